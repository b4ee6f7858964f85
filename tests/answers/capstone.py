"""Right and wrong answers to the capstone's exercises; what an answer leans on comes from the solution."""

from samples.build import answers
from tests.answers import changed, right, wrong

SOLUTION = answers("capstone")
ATTENTIONS = SOLUTION["attention_step"] + "\n\n" + SOLUTION["latent_attention_step"] + "\n"
STEP = "\n\n".join((SOLUTION["ModelCache"], ATTENTIONS, SOLUTION["decoder_step"])) + "\n"
FACTORS = SOLUTION["latent_attention_step"].split("def latent_attention_step")[0]
GENERATOR = "def generate_text(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):"

# ---- ModelCache

CACHE = """
class ModelCache:
    def __init__(self, layers, max_seq):
        self.max_seq = max_seq
        self.buffers = [None] * layers
        self.counts = [0] * layers

    @property
    def length(self):
        return min(self.counts)

    def update(self, layer, *rows):
        start = self.counts[layer]
        end = start + rows[0].shape[-2]
        if end > self.max_seq:
            raise ValueError(f"{end} tokens do not fit into {self.max_seq}")
        if self.buffers[layer] is None:
            self.buffers[layer] = [r.new_zeros(*r.shape[:-2], self.max_seq, r.shape[-1]) for r in rows]
        for buffer, new in zip(self.buffers[layer], rows):
            buffer[..., start:end, :] = new
        self.counts[layer] = end
        return tuple(b[..., :end, :] for b in self.buffers[layer])

    def reset(self):
        self.counts = [0] * len(self.counts)
"""


def cache_with(*changes: tuple[str, str]) -> str:
    """The cache with some of its lines changed."""
    return changed(CACHE, *changes)


right("ModelCache", "buffers and counts in lists", CACHE)
right(
    "ModelCache",
    "a little class for each layer",
    """
class Layer:
    def __init__(self):
        self.count = 0
        self.kept = []


class ModelCache:
    def __init__(self, layers, max_seq):
        self.all = [Layer() for _ in range(layers)]
        self.room = max_seq

    def update(self, layer, *rows):
        mine, new = self.all[layer], rows[0].size(-2)
        if mine.count + new > self.room:
            raise ValueError("the cache is full")
        if len(mine.kept) == 0:
            for r in rows:
                shape = list(r.shape)
                shape[-2] = self.room
                mine.kept.append(torch.empty(shape, dtype=r.dtype, device=r.device))
        for buffer, r in zip(mine.kept, rows):
            buffer.narrow(-2, mine.count, new).copy_(r)
        mine.count += new
        return tuple(buffer.narrow(-2, 0, mine.count) for buffer in mine.kept)

    def reset(self):
        for layer in self.all:
            layer.count = 0

    @property
    def length(self):
        return self.all[-1].count
""",
)
right(
    "ModelCache",
    "one stacked buffer for all layers, length kept as an attribute",
    """
class ModelCache:
    def __init__(self, layers, max_seq):
        self.n, self.max_seq, self.length = layers, max_seq, 0
        self.at = [0] * layers
        self.stack = None

    def update(self, layer, *rows):
        a = self.at[layer]
        b = a + rows[0].shape[-2]
        if b > self.max_seq:
            raise ValueError("full")
        if self.stack is None:
            self.stack = [r.new_zeros((self.n, *r.shape[:-2], self.max_seq, r.shape[-1])) for r in rows]
        out = []
        for buffer, r in zip(self.stack, rows):
            buffer[layer][..., a:b, :] = r
            out.append(buffer[layer][..., :b, :].clone())
        self.at[layer] = b
        self.length = min(self.at)
        return tuple(out)

    def reset(self):
        self.at = [0] * self.n
        self.length = 0
""",
)
wrong("ModelCache", "length is that of the fullest layer", cache_with(("min(self.counts)", "max(self.counts)")),
      near_miss="length-of-the-first-layer")  # fmt: skip
wrong("ModelCache", "the whole buffer comes back", cache_with(("b[..., :end, :] for", "b for")))
wrong("ModelCache", "one token less than there is room for", cache_with(("if end > self", "if end >= self")))
wrong("ModelCache", "a chunk behind the prompt is cut to its last row",
      cache_with(("buffer[..., start:end, :] = new", "buffer[..., start:end, :] = new if start == 0 else new[..., -1:, :]")))  # fmt: skip
wrong("ModelCache", "a refused update has moved the count",
      cache_with(("        if end > self.max_seq", "        self.counts[layer] = end\n        if end > self.max_seq")),
      near_miss="counts-before-it-refuses")  # fmt: skip
wrong("ModelCache", "all instances share their buffers",
      cache_with(("    def __init__", "    buffers = [None] * 9\n\n    def __init__"), ("        self.buffers = [None] * layers\n", "")))  # fmt: skip
wrong("ModelCache", "reset drops the memory but not the counts", cache_with(("self.counts = [0] * len(self.counts)", "self.buffers = [None] * len(self.counts)")))  # fmt: skip
wrong("ModelCache", "room for twice as many tokens", cache_with(("*r.shape[:-2], self.max_seq,", "*r.shape[:-2], 2 * self.max_seq,")))  # fmt: skip

# ---- attention_step

ATTENTION = """
def attention_step(x, layer, heads, cache, index):
    past = cache.length
    batch, new, _ = x.shape
    def per_head(w):
        return (x @ w).view(batch, new, heads, -1).transpose(1, 2)
    q = F.rms_norm(per_head(layer.w_q), layer.q_norm.shape, layer.q_norm, 1e-5)
    k = F.rms_norm(per_head(layer.w_k), layer.k_norm.shape, layer.k_norm, 1e-5)
    v = per_head(layer.w_v)
    positions = torch.arange(past, past + new, device=x.device)
    q, k = apply_rope(q, positions), apply_rope(k, positions)
    k, v = cache.update(index, k, v)
    mask = causal_mask_with_past(new, k.shape[2])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).reshape(batch, new, -1) @ layer.w_o
"""

right("attention_step", "fused attention with a boolean mask", ATTENTION)
right(
    "attention_step",
    "everything by hand, one head after the other",
    """
def rope(x, positions):
    half = torch.arange(0, x.shape[-1], 2, device=x.device)
    angle = positions[:, None].double() * 10000.0 ** (-half.double() / x.shape[-1])
    turn = torch.polar(torch.ones_like(angle), angle)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def norm(x, scale):
    return x / torch.sqrt((x.float() ** 2).mean(-1, keepdim=True) + 1e-5).to(x.dtype) * scale


def attention_step(x, layer, heads, cache, index):
    start, new = cache.length, x.shape[1]
    positions = torch.arange(start, start + new)
    width = layer.w_q.shape[1] // heads
    qs, ks, vs = [], [], []
    for h in range(heads):
        cut = slice(h * width, (h + 1) * width)
        qs.append(rope(norm(x @ layer.w_q[:, cut], layer.q_norm), positions))
        ks.append(rope(norm(x @ layer.w_k[:, cut], layer.k_norm), positions))
        vs.append(x @ layer.w_v[:, cut])
    keys, values = cache.update(index, torch.stack(ks, 1), torch.stack(vs, 1))
    hidden = torch.arange(keys.shape[2])[None, :] > positions[:, None]
    mixed = []
    for h in range(heads):
        scores = qs[h] @ keys[:, h].transpose(1, 2) / width ** 0.5
        mixed.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values[:, h])
    return torch.cat(mixed, -1) @ layer.w_o
""",
)
right(
    "attention_step",
    "all three projections in one product, einsum",
    """
def attention_step(x, layer, heads, cache, index):
    n = cache.length
    q, k, v = (x @ torch.cat([layer.w_q, layer.w_k, layer.w_v], 1)).chunk(3, dim=-1)
    q, k, v = split_heads(q, heads), split_heads(k, heads), split_heads(v, heads)
    rms = torch.nn.functional.rms_norm
    d = q.shape[-1]
    q = rope_at(rms(q, (d,), layer.q_norm, 1e-5), n)
    k = rope_at(rms(k, (d,), layer.k_norm, 1e-5), n)
    k, v = cache.update(index, k, v)
    s = torch.einsum("bhqd,bhkd->bhqk", q * d**-0.5, k)
    s = s + torch.full(s.shape[-2:], -torch.inf, dtype=s.dtype).triu(k.shape[2] - q.shape[2] + 1)
    return torch.einsum("bhqk,bhkd->bqhd", s.softmax(-1), v).flatten(2) @ layer.w_o
""",
)
wrong("attention_step", "the mask lets one more key in",
      changed(ATTENTION, ("mask = causal_mask_with_past(new, k.shape[2])", "mask = torch.ones(new, k.shape[2]).tril(past + 1).bool()")))  # fmt: skip
wrong("attention_step", "the queries' norm is used for the keys, too", changed(ATTENTION, ("layer.k_norm.shape, layer.k_norm", "layer.q_norm.shape, layer.q_norm")))  # fmt: skip
wrong("attention_step", "keys stand one position further on", changed(ATTENTION, ("apply_rope(k, positions)", "apply_rope(k, positions + 1)")))  # fmt: skip
wrong("attention_step", "positions begin at 0", changed(ATTENTION, ("past = cache.length", "past = 0"), ("causal_mask_with_past(new, k.shape[2])", "causal_mask_with_past(new, k.shape[2])")),
      near_miss="positions-from-zero")  # fmt: skip
wrong("attention_step", "values are rotated", changed(ATTENTION, ("v = per_head(layer.w_v)", "v = apply_rope(per_head(layer.w_v), torch.arange(past, past + new))")))  # fmt: skip
wrong("attention_step", "heads are merged without a transpose", changed(ATTENTION, ("out.transpose(1, 2).reshape", "out.reshape")))  # fmt: skip
wrong("attention_step", "no norms", changed(ATTENTION, ("F.rms_norm(per_head(layer.w_q), layer.q_norm.shape, layer.q_norm, 1e-5)", "per_head(layer.w_q)"), ("F.rms_norm(per_head(layer.w_k), layer.k_norm.shape, layer.k_norm, 1e-5)", "per_head(layer.w_k)")),
      near_miss="no-norms")  # fmt: skip
wrong("attention_step", "right in float32 alone", changed(ATTENTION, ("@ layer.w_o", "@ layer.w_o\n    return out.float()"), ("return out.transpose", "out = out.transpose")))  # fmt: skip

# ---- latent_attention_step

LATENT = (
    FACTORS
    + """
def latent_attention_step(x, layer, heads, cache, index):
    past = cache.length
    (c,) = cache.update(index, x @ layer.w_dkv)
    q = split_heads(x @ layer.w_q, heads)
    k = split_heads(c @ layer.w_uk, heads)
    v = split_heads(c @ layer.w_uv, heads)
    q = F.rms_norm(q, layer.q_norm.shape, layer.q_norm, 1e-5)
    k = F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-5)
    q, k = rope_at(q, past), rope_at(k, 0)
    return merge_heads(cached_attention(q, k, v)) @ layer.w_o
"""
)

right("latent_attention_step", "expanded", LATENT)
right(
    "latent_attention_step",
    "values absorbed into the output, singular values shared",
    """
def latent_factors(w_k, w_v, d_c):
    w = torch.cat((w_k, w_v), -1)
    if not 0 < d_c <= min(w.size()):
        raise ValueError(f"d_c = {d_c}")
    u, s, v = torch.svd(w)
    root = s[:d_c].sqrt()
    down, up = u[:, :d_c] * root, root[:, None] * v[:, :d_c].T
    return down, up[:, : w_k.shape[1]], up[:, w_k.shape[1] :]


def latent_attention_step(x, layer, heads, cache, index):
    start = cache.length
    c = cache.update(index, x @ layer.w_dkv)[0]
    q, k = split_heads(x @ layer.w_q, heads), split_heads(c @ layer.w_uk, heads)
    q = rope_at(F.rms_norm(q, (q.shape[-1],), layer.q_norm, 1e-5), start)
    k = rope_at(F.rms_norm(k, (k.shape[-1],), layer.k_norm, 1e-5), 0)
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    p = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    w_uv = layer.w_uv.unflatten(1, (heads, -1)).transpose(0, 1)
    return ((p @ c[:, None]) @ w_uv).transpose(1, 2).flatten(2) @ layer.w_o
""",
)
right(
    "latent_attention_step",
    "keys and values in one product, positions by apply_rope",
    """
def latent_factors(w_k, w_v, d_c):
    both = torch.hstack([w_k, w_v])
    if d_c < 1 or d_c > both.shape[0] or d_c > both.shape[1]:
        raise ValueError("d_c does not fit")
    values, vectors = torch.linalg.eigh(both.double() @ both.double().T)
    down = vectors.flip(-1)[:, :d_c].to(both.dtype)
    up = down.T @ both
    return down, up[:, : w_k.shape[1]], up[:, w_k.shape[1] :]


def latent_attention_step(x, layer, heads, cache, index):
    n, new = cache.length, x.shape[1]
    c = compress_kv(x, layer.w_dkv)
    c = cache.update(index, c)[0]
    kv = c @ torch.cat([layer.w_uk, layer.w_uv], 1)
    k, v = (split_heads(part, heads) for part in kv.chunk(2, -1))
    q = split_heads(x @ layer.w_q, heads)
    q = apply_rope(F.rms_norm(q, layer.q_norm.shape, layer.q_norm, 1e-5), torch.arange(n, n + new))
    k = apply_rope(F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-5), torch.arange(n + new))
    return merge_heads(F.scaled_dot_product_attention(q, k, v, causal_mask_with_past(new, n + new))) @ layer.w_o
""",
)
wrong("latent_attention_step", "queries stand behind the new tokens", changed(LATENT, ("rope_at(q, past)", "rope_at(q, cache.length)")))  # fmt: skip
wrong("latent_attention_step", "the latent is normed", changed(LATENT, ("k = split_heads(c @ layer.w_uk", "c = F.rms_norm(c, (c.shape[-1],))\n    k = split_heads(c @ layer.w_uk")))  # fmt: skip
wrong("latent_attention_step", "queries and keys begin at 0", changed(LATENT, ("rope_at(q, past)", "rope_at(q, 0)")),
      near_miss="queries-and-keys-begin-together")  # fmt: skip
wrong("latent_attention_step", "latent and hidden row are cached", changed(LATENT, ("(c,) = cache.update(index, x @ layer.w_dkv)", "c, _ = cache.update(index, x @ layer.w_dkv, x)")))  # fmt: skip
wrong("latent_attention_step", "keys and values come from the new latents alone when there is one token",
      changed(LATENT, ("q = split_heads(x @ layer.w_q, heads)", "c = c[:, -1:] if x.shape[1] == 1 else c\n    q = split_heads(x @ layer.w_q, heads)")))  # fmt: skip
wrong("latent_attention_step", "factors of keys and values apart, half of the latent each",
      LATENT.replace(FACTORS, """
def latent_factors(w_k, w_v, d_c):
    if not 1 <= d_c <= min(w_k.shape[0], 2 * w_k.shape[1]):
        raise ValueError("d_c")
    def factors(w, r):
        u, s, vh = torch.linalg.svd(w, full_matrices=False)
        return u[:, :r] * s[:r], vh[:r]
    half = d_c // 2
    a, b = factors(w_k, d_c - half)
    c, d = factors(w_v, half)
    return torch.cat([a, c], 1), torch.cat([b, torch.zeros(c.shape[1], w_k.shape[1])]), torch.cat([torch.zeros(a.shape[1], w_v.shape[1]), d])
"""))  # fmt: skip
wrong("latent_attention_step", "a d_c out of bounds is moved into them",
      changed(LATENT, ("    both = torch.cat([w_k, w_v], dim=1)\n", "    both = torch.cat([w_k, w_v], dim=1)\n    d_c = max(1, min(d_c, *both.shape))\n")))  # fmt: skip

# ---- decoder_step

DECODER = (
    ATTENTIONS
    + """
def decoder_step(weights, ids, cache):
    h = F.embedding(ids, weights.embedding)
    d = h.shape[-1]
    for i, w in enumerate(weights.layers):
        attend = latent_attention_step if isinstance(w, LatentLayerWeights) else attention_step
        h = h + attend(F.rms_norm(h, (d,), w.norm1, 1e-5), w, weights.heads, cache, i)
        h = h + F.gelu(F.rms_norm(h, (d,), w.norm2, 1e-5) @ w.w_up) @ w.w_down
    h = F.rms_norm(h[:, -1], (d,), weights.norm, 1e-5)
    return F.linear(h, weights.embedding)
"""
)

right("decoder_step", "F.embedding and F.linear", DECODER)
right(
    "decoder_step",
    "norm and erf by hand, kind of layer by its attribute",
    ATTENTIONS
    + """
def norm(x, scale):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * scale


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def decoder_step(weights, ids, cache):
    x = weights.embedding[ids]
    index = 0
    for layer in weights.layers:
        normed = norm(x, layer.norm1)
        if hasattr(layer, "w_dkv"):
            a = latent_attention_step(normed, layer, weights.heads, cache, index)
        else:
            a = attention_step(normed, layer, weights.heads, cache, index)
        x = x + a
        x = x + gelu(norm(x, layer.norm2) @ layer.w_up) @ layer.w_down
        index += 1
    return norm(x[:, -1, :], weights.norm) @ weights.embedding.t()
""",
)
right("decoder_step", "the last row is cut out with its axis",
      changed(DECODER, ("h[:, -1], (d,)", "h[:, -1:], (d,)"), ("return F.linear(h, weights.embedding)", "return (h @ weights.embedding.mT).squeeze(1)")))  # fmt: skip
wrong("decoder_step", "the second norm reads the stream before the attention",
      changed(DECODER, ("        h = h + attend", "        old = h\n        h = h + attend"), ("F.rms_norm(h, (d,), w.norm2", "F.rms_norm(old, (d,), w.norm2")),
      near_miss="parallel-parts")  # fmt: skip
wrong("decoder_step", "GELU by tanh", changed(DECODER, ("w.w_up)", 'w.w_up, approximate="tanh")')), near_miss="tanh-gelu")  # fmt: skip
wrong("decoder_step", "norms of each layer are exchanged", changed(DECODER, ("w.norm1", "w.norm0"), ("w.norm2", "w.norm1"), ("w.norm0", "w.norm2")))  # fmt: skip
wrong("decoder_step", "logits of all rows", changed(DECODER, ("h[:, -1], (d,)", "h, (d,)"), ("return F.linear(h, weights.embedding)", "return F.linear(h, weights.embedding)[:, -1]")),
      near_miss="logits-of-all-rows")  # fmt: skip
wrong("decoder_step", "latents are not known", changed(DECODER, ("latent_attention_step if isinstance(w, LatentLayerWeights) else attention_step\n", "attention_step\n")))  # fmt: skip
wrong("decoder_step", "epsilon is 1e-2", changed(DECODER, ("w.norm1, 1e-5", "w.norm1, 1e-2")))
wrong("decoder_step", "the last layer is left out", changed(DECODER, ("enumerate(weights.layers)", "enumerate(weights.layers[:-1] or weights.layers)")))  # fmt: skip

# ---- generate_text

LOOP = (
    STEP
    + GENERATOR
    + """
    if temperature > 0 and uniforms is None:
        raise ValueError("sampling needs uniforms")
    cache = ModelCache(len(weights.layers), ids.shape[1] + max_new_tokens)
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    text, unread = ids, ids
    for t in range(max_new_tokens):
        logits = decoder_step(weights, unread, cache)
        if temperature > 0:
            token = sample_from_uniform(sampling_distribution(logits, temperature, top_k, top_p), uniforms[:, t])
        else:
            token = logits.argmax(-1)
        if eos_id is not None:
            token[done] = eos_id
            done |= token == eos_id
        unread = token[:, None]
        text = torch.cat([text, unread], 1)
        if done.all():
            break
    return text
"""
)

right("generate_text", "a loop", LOOP)
right(
    "generate_text",
    "rows of Python lists",
    STEP
    + GENERATOR
    + """
    if temperature and uniforms is None:
        raise ValueError(f"temperature {temperature} without uniforms")
    rows = [list(map(int, row)) for row in ids]
    length, ended = len(rows[0]), [False] * len(rows)
    cache = ModelCache(len(weights.layers), length + max_new_tokens)
    unread = ids
    while len(rows[0]) < length + max_new_tokens and not all(ended):
        logits = decoder_step(weights, unread, cache)
        t = len(rows[0]) - length
        if temperature:
            probs = sampling_distribution(logits, temperature, top_k, top_p)
            best = sample_from_uniform(probs, uniforms[:, t])
        else:
            best = torch.argmax(logits, dim=1)
        for i, row in enumerate(rows):
            token = eos_id if ended[i] else int(best[i])
            row.append(token)
            ended[i] = ended[i] or token == eos_id
        unread = torch.tensor([[row[-1]] for row in rows])
    return torch.tensor(rows)
""",
)
right(
    "generate_text",
    "filled into a tensor that is cut at the end",
    STEP
    + GENERATOR
    + """
    if temperature > 0 and uniforms is None:
        raise ValueError("uniforms are missing")
    batch, seq = ids.shape
    if max_new_tokens == 0:
        return ids.clone()
    out = torch.zeros(batch, seq + max_new_tokens, dtype=ids.dtype)
    out[:, :seq] = ids
    cache = ModelCache(len(weights.layers), seq + max_new_tokens - 1)
    alive = torch.ones(batch, dtype=torch.bool)
    read = 0
    for end in range(seq, seq + max_new_tokens):
        logits = decoder_step(weights, out[:, read:end], cache)
        read = end
        if temperature == 0:
            chosen = logits.max(dim=-1).indices
        else:
            chosen = sample_from_uniform(sampling_distribution(logits, temperature, top_k, top_p), uniforms[:, end - seq])
        if eos_id is not None:
            chosen = torch.where(alive, chosen, torch.full_like(chosen, eos_id))
            alive = alive & (chosen != eos_id)
        out[:, end] = chosen
        if not alive.any():
            return out[:, : end + 1]
    return out
""",
)
wrong("generate_text", "the whole text is read for every token",
      changed(LOOP, ("        text = torch.cat([text, unread], 1)\n", "        text = torch.cat([text, unread], 1)\n        unread, cache = text, ModelCache(len(weights.layers), ids.shape[1] + max_new_tokens)\n")),
      near_miss="reads-the-whole-text")  # fmt: skip
wrong("generate_text", "the last token is read, too",
      changed(LOOP, ("    return text", "    if max_new_tokens:\n        decoder_step(weights, unread, ModelCache(len(weights.layers), 9))\n    return text")),
      near_miss="reads-the-last-token")  # fmt: skip
wrong("generate_text", "the prompt is read token by token, and its last token twice",
      changed(LOOP, ("    text, unread = ids, ids", "    for i in range(ids.shape[1] - 1):\n        decoder_step(weights, ids[:, i : i + 1], cache)\n    text, unread = ids, ids[:, -2:]"),
              ("ids.shape[1] + max_new_tokens)", "ids.shape[1] + max_new_tokens + 1)")))  # fmt: skip
wrong("generate_text", "numbers are read one too late", changed(LOOP, ("uniforms[:, t]", "uniforms[:, min(t + 1, max_new_tokens - 1)]")))  # fmt: skip
wrong("generate_text", "stops with the first row", changed(LOOP, ("done.all()", "done.any()")), near_miss="stops-with-the-first-row")  # fmt: skip
wrong("generate_text", "EOS in the prompt ends a row",
      changed(LOOP, ("done = torch.zeros(ids.shape[0], dtype=torch.bool)", "done = (ids == eos_id).any(1) if eos_id is not None else torch.zeros(ids.shape[0], dtype=torch.bool)")),
      near_miss="ended-by-the-prompt")  # fmt: skip
wrong(
    "generate_text",
    "the prompt is left out",
    changed(LOOP, ("return text", "return text[:, ids.shape[1] :]")),
)
wrong("generate_text", "top-p is forgotten", changed(LOOP, ("temperature, top_k, top_p), uniforms", "temperature, top_k), uniforms")))  # fmt: skip
