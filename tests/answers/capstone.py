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
wrong(
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
    near_miss="first-rows-shape-all-layers",
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

# ---- by another hand

right(
    "ModelCache",
    "a store per tensor, tokens on the first axis",
    """
class Store:
    def __init__(self, like, room):
        self.data = torch.empty((room, *like.shape[:-2], like.shape[-1]), dtype=like.dtype, device=like.device)
        self.used = 0

    def append(self, rows):
        new = rows.shape[-2]
        self.data[self.used : self.used + new].copy_(rows.detach().movedim(-2, 0))
        self.used += new
        return self.data[: self.used].movedim(0, -2)


class ModelCache:
    def __init__(self, layers: int, max_seq: int) -> None:
        self._room = max_seq
        self._layers: list[tuple[Store, ...]] = [() for _ in range(layers)]

    def _held(self, layer):
        return self._layers[layer][0].used if self._layers[layer] else 0

    @property
    def length(self) -> int:
        return min(self._held(i) for i in range(len(self._layers)))

    def update(self, layer: int, *rows):
        if self._held(layer) + rows[0].size(-2) > self._room:
            raise ValueError("the cache is full")
        if not self._layers[layer]:
            self._layers[layer] = tuple(Store(r, self._room) for r in rows)
        return tuple(store.append(r) for store, r in zip(self._layers[layer], rows))

    def reset(self) -> None:
        for stores in self._layers:
            for store in stores:
                store.used = 0
""",
)

right(
    "ModelCache",
    "index_copy_ and an array of counts",
    """
class ModelCache:
    def __init__(self, layers, max_seq):
        self.n = torch.zeros(layers, dtype=torch.long)
        self.max_seq = max_seq
        self.bufs = [None for _ in range(layers)]

    @property
    def length(self):
        return int(self.n.min())

    def update(self, layer, *rows):
        where = torch.arange(rows[0].shape[-2]) + self.n[layer]
        total = int(self.n[layer]) + rows[0].shape[-2]
        if total > self.max_seq:
            raise ValueError("full")
        if self.bufs[layer] is None:
            self.bufs[layer] = tuple(
                torch.full(r.shape[:-2] + (self.max_seq, r.shape[-1]), torch.nan, dtype=r.dtype, device=r.device) for r in rows
            )
        for buf, r in zip(self.bufs[layer], rows, strict=True):
            buf.index_copy_(r.ndim - 2, where.to(r.device), r)
        self.n[layer] = total
        return tuple(buf[..., :total, :] for buf in self.bufs[layer])

    def reset(self):
        self.n.zero_()
""",
)

right(
    "ModelCache",
    "dictionaries by layer, narrow and copy_, length an attribute, copies come back",
    """
class ModelCache:
    def __init__(self, layers, max_seq):
        self.layers, self.max_seq = layers, max_seq
        self.memory, self.filled = {}, {}
        self.length = 0

    def update(self, layer, *rows):
        old = self.filled.get(layer, 0)
        new = rows[-1].size(-2)
        if self.max_seq - old < new:
            raise ValueError("ModelCache.update needs room for %d more tokens, has %d" % (new, self.max_seq - old))
        for i, r in enumerate(rows):
            key = (layer, i)
            if key not in self.memory:
                shape = list(r.shape)
                shape[-2] = self.max_seq
                self.memory[key] = torch.zeros(shape, dtype=r.dtype, device=r.device)
            self.memory[key].narrow(-2, old, new).copy_(r)
        self.filled[layer] = old + new
        if len(self.filled) == self.layers:
            self.length = min(self.filled.values())
        return tuple(self.memory[layer, i].narrow(-2, 0, old + new).clone() for i in range(len(rows)))

    def reset(self):
        self.filled.clear()
        self.length = 0
""",
)

wrong("ModelCache", "allocates before it refuses", changed(CACHE, ('        if end > self.max_seq:\n            raise ValueError(f"{end} tokens do not fit into {self.max_seq}")\n', ''), ('        for buffer, new in', '        if end > self.max_seq:\n            raise ValueError("full")\n        for buffer, new in')))  # fmt: skip

wrong("ModelCache", "reset frees the memory", changed(CACHE, ('self.counts = [0] * len(self.counts)', 'self.__init__(len(self.counts), self.max_seq)')), near_miss="reset-frees-the-memory")  # fmt: skip

wrong("ModelCache", "writes at the common length", changed(CACHE, ('start = self.counts[layer]', 'start = self.length')), near_miss="writes-at-the-common-length")  # fmt: skip

wrong("ModelCache", "a bare tensor when one came", changed(CACHE, ('return tuple(b[..., :end, :] for b in self.buffers[layer])', 'out = tuple(b[..., :end, :] for b in self.buffers[layer])\n        return out if len(out) > 1 else out[0]')), near_miss="bare-tensor")  # fmt: skip

wrong("ModelCache", "keeps the last rows beside the buffers", changed(CACHE, ('        self.counts[layer] = end\n', '        self.counts[layer] = end\n        self.last = rows\n')))  # fmt: skip

OWN_PIECES = """
def split_heads(x, heads):
    b, s, d = x.shape
    return x.reshape(b, s, heads, d // heads).permute(0, 2, 1, 3)


def merge_heads(x):
    b, h, s, d = x.shape
    return x.permute(0, 2, 1, 3).reshape(b, s, h * d)


def rope_at(x, start):
    d = x.shape[-1]
    freq = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = torch.arange(start, start + x.shape[-2], dtype=torch.float64)[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


def cached_attention(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    seen = torch.arange(m)[None, :] <= torch.arange(m - n, m)[:, None]
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
    return weights @ v


def norm(x, scale):
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-5) * scale


def attention_step(x, layer, heads, cache, index):
    position = cache.length
    queries = norm(split_heads(x @ layer.w_q, heads), layer.q_norm)
    keys = norm(split_heads(x @ layer.w_k, heads), layer.k_norm)
    values = split_heads(x @ layer.w_v, heads)
    keys, values = cache.update(index, rope_at(keys, position), values)
    mixed = cached_attention(rope_at(queries, position), keys, values)
    return merge_heads(mixed) @ layer.w_o
"""

right("attention_step", "own pieces pasted in", OWN_PIECES)  # fmt: skip

right(
    "attention_step",
    "loops over rows, heads and queries",
    """
def attention_step(x, layer, heads, cache, index):
    batch, new, _ = x.shape
    past = cache.length
    hd = layer.w_q.shape[1] // heads
    positions = torch.arange(past, past + new)

    def head(w, h, scale=None):
        y = x @ w[:, h * hd : (h + 1) * hd]
        if scale is None:
            return y
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * scale
        return apply_rope(y, positions)

    q = [head(layer.w_q, h, layer.q_norm) for h in range(heads)]
    k = torch.stack([head(layer.w_k, h, layer.k_norm) for h in range(heads)], dim=1)
    v = torch.stack([head(layer.w_v, h) for h in range(heads)], dim=1)
    k, v = cache.update(index, k, v)
    out = torch.zeros(batch, new, heads * hd, dtype=x.dtype)
    for h in range(heads):
        for i in range(new):
            end = past + i + 1
            s = (k[:, h, :end] @ q[h][:, i, :, None]).squeeze(-1) / hd**0.5
            p = s.softmax(-1)
            out[:, i, h * hd : (h + 1) * hd] = (p[:, None] @ v[:, h, :end])[:, 0]
    return out @ layer.w_o
""",
)

right(
    "attention_step",
    "a class does the work, einsum, additive mask",
    """
class Attention:
    def __init__(self, layer, heads):
        self.layer, self.heads = layer, heads
        self.hd = layer.q_norm.numel()

    def project(self, x, w):
        return torch.einsum("bsd,dhe->bhse", x, w.reshape(w.shape[0], self.heads, self.hd))

    def normed(self, y, scale):
        return torch.nn.functional.rms_norm(y, [self.hd], weight=scale, eps=1e-5)

    def __call__(self, x, cache, index):
        where = cache.length + torch.arange(x.size(1))
        q = apply_rope(self.normed(self.project(x, self.layer.w_q), self.layer.q_norm), where)
        k = apply_rope(self.normed(self.project(x, self.layer.w_k), self.layer.k_norm), where)
        k, v = cache.update(index, k, self.project(x, self.layer.w_v))
        n, m = q.size(2), k.size(2)
        mask = torch.zeros(n, m, dtype=x.dtype).masked_fill(torch.ones(n, m).triu(m - n + 1) > 0, -torch.inf)
        y = scaled_dot_product_attention(q, k, v, mask)
        return torch.einsum("bhse,hed->bsd", y, self.layer.w_o.reshape(self.heads, self.hd, -1))


def attention_step(x, layer, heads, cache, index):
    return Attention(layer, heads)(x, cache, index)
""",
)

wrong("attention_step", "a mask for the first call only", changed(ATTENTION, ('mask = causal_mask_with_past(new, k.shape[2])', 'mask = None if past else causal_mask_with_past(new, k.shape[2])')), near_miss="chunk-unmasked")  # fmt: skip

wrong("attention_step", "is_causal where there is more than one row", changed(ATTENTION, ('attn_mask=mask', 'is_causal=new > 1')), near_miss="top-left-for-chunks")  # fmt: skip

wrong("attention_step", "epsilon left to the default", changed(ATTENTION, ('_norm, 1e-5)', '_norm)')), near_miss="another-epsilon")  # fmt: skip

wrong("attention_step", "epsilon beside the root", changed(OWN_PIECES, ('torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-5)', '(torch.sqrt((x * x).mean(dim=-1, keepdim=True)) + 1e-5)')))  # fmt: skip

wrong("attention_step", "the index is ignored", changed(ATTENTION, ('cache.update(index,', 'cache.update(0,')), near_miss="ignores-the-index")  # fmt: skip

wrong("attention_step", "halves rotated instead of pairs", changed(OWN_PIECES, ('even, odd = x[..., 0::2], x[..., 1::2]', 'even, odd = x[..., : d // 2], x[..., d // 2 :]'), ('out[..., 0::2]', 'out[..., : d // 2]'), ('out[..., 1::2]', 'out[..., d // 2 :]')), near_miss="halves-for-pairs")  # fmt: skip

wrong("attention_step", "keys cached before norm and rotation", changed(ATTENTION, ('    q, k = apply_rope(q, positions), apply_rope(k, positions)\n', '    q, k = apply_rope(q, positions), per_head(layer.w_k)\n'), ('    mask =', '    k = apply_rope(F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-5), torch.arange(k.shape[2]))\n    mask =')))  # fmt: skip

wrong("attention_step", "rotated before the norm", changed(OWN_PIECES, ('norm(split_heads(x @ layer.w_q, heads), layer.q_norm)', 'norm(rope_at(split_heads(x @ layer.w_q, heads), position), layer.q_norm)'), ('norm(split_heads(x @ layer.w_k, heads), layer.k_norm)', 'norm(rope_at(split_heads(x @ layer.w_k, heads), position), layer.k_norm)'), ('rope_at(keys, position)', 'keys'), ('rope_at(queries, position)', 'queries')), near_miss="rotates-before-the-norm")  # fmt: skip

wrong("attention_step", "scores for old rows thrown away", changed(OWN_PIECES, ('cached_attention(rope_at(queries, position), keys, values)', 'cached_attention(F.pad(rope_at(queries, position), (0, 0, position, 0)), keys, values)[:, :, position:]')), near_miss="scores-for-all-rows")  # fmt: skip

wrong("attention_step", "divides x in place", changed(ATTENTION, ('    past = cache.length\n', '    past = cache.length\n    x /= 1.0 + 1e-6\n')))  # fmt: skip

right(
    "latent_attention_step",
    "lent factors, values absorbed where it is cheaper",
    """
def latent_factors(w_k, w_v, d_c):
    both = torch.hstack((w_k, w_v))
    a, b = low_rank_factors(both, d_c)
    w_uk, w_uv = b.chunk(2, dim=-1)
    return a, w_uk, w_uv


def latent_attention_step(x, layer, heads, cache, index):
    past, new = cache.length, x.shape[1]
    d = layer.q_norm.numel()
    norm = lambda y, scale: y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * scale
    q = apply_rope(norm(split_heads(x @ layer.w_q, heads), layer.q_norm), torch.arange(past, past + new))
    c = cache.update(index, x @ layer.w_dkv)[0]
    n = c.shape[1]
    k = apply_rope(norm(split_heads(c @ layer.w_uk, heads), layer.k_norm), torch.arange(n))
    s = (q @ k.mT) * d**-0.5
    p = s.masked_fill(~causal_mask_with_past(new, n), -torch.inf).softmax(-1)
    w_uv = layer.w_uv.unflatten(1, (heads, d)).transpose(0, 1)
    if new * heads * (n + d) <= n * heads * d + new * n * d:  # absorb the values where it is cheaper
        y = (p @ c[:, None]) @ w_uv
    else:
        y = p @ (c[:, None] @ w_uv)
    return merge_heads(y) @ layer.w_o
""",
)

right(
    "latent_attention_step",
    "eigenvectors, a loop over heads and queries, own rotation",
    """
def latent_factors(w_k, w_v, d_c):
    d, width = w_k.shape
    if d_c < 1 or d_c > d or d_c > 2 * width:
        raise ValueError("d_c is out of range")
    w = torch.cat((w_k, w_v), -1).double()
    values, vectors = torch.linalg.eigh(w @ w.T)
    down = vectors[:, -d_c:]
    up = down.T @ w
    return down.to(w_k.dtype), up[:, :width].to(w_k.dtype), up[:, width:].to(w_k.dtype)


def rotate(x, positions):
    d = x.shape[-1]
    freq = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = positions.double()[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def latent_attention_step(x, layer, heads, cache, index):
    first = cache.length
    latents = cache.update(index, x @ layer.w_dkv)[0]
    total = latents.shape[1]
    width = layer.w_uk.shape[1]
    d = width // heads
    columns = []
    for h in range(heads):
        block = slice(h * d, (h + 1) * d)
        q = F.rms_norm(x @ layer.w_q[:, block], (d,), layer.q_norm, 1e-5)
        k = F.rms_norm(latents @ layer.w_uk[:, block], (d,), layer.k_norm, 1e-5)
        v = latents @ layer.w_uv[:, block]
        q = rotate(q, torch.arange(first, total))
        k = rotate(k, torch.arange(total))
        rows = []
        for i in range(q.shape[1]):
            n = first + i + 1
            p = (q[:, i : i + 1] @ k[:, :n].transpose(1, 2) / math.sqrt(d)).softmax(-1)
            rows.append(p @ v[:, :n])
        columns.append(torch.cat(rows, 1))
    return torch.cat(columns, 2) @ layer.w_o
""",
)

wrong("latent_attention_step", "hidden rows cached in the place of latents", changed(LATENT, ('(c,) = cache.update(index, x @ layer.w_dkv)', 'c = cache.update(index, x)[0] @ layer.w_dkv')), near_miss="caches-hidden-rows")  # fmt: skip

wrong("latent_attention_step", "matrices put together at every call", changed(LATENT, ('    past =', '    w_k, w_v = layer.w_dkv @ layer.w_uk, layer.w_dkv @ layer.w_uv\n    past =')), near_miss="multiplies-the-matrices")  # fmt: skip

KEPT = """
KEPT = {}


def latent_attention_step(x, layer, heads, cache, index):
    start = cache.length
    c = compress_kv(x, layer.w_dkv)
    cache.update(index, c)
    k, v = expand_kv(c, layer.w_uk, layer.w_uv, heads)
    k = rope_at(F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-5), start)
    if start:
        k, v = torch.cat([KEPT[index][0], k], 2), torch.cat([KEPT[index][1], v], 2)
    KEPT[index] = k, v
    q = F.rms_norm(split_heads(x @ layer.w_q, heads), layer.q_norm.shape, layer.q_norm, 1e-5)
    return merge_heads(cached_attention(rope_at(q, start), k, v)) @ layer.w_o
"""

wrong("latent_attention_step", "keys kept in a dictionary of the module", FACTORS + KEPT)  # fmt: skip

wrong("latent_attention_step", "keys kept on the cache", changed(FACTORS + KEPT, ('KEPT[', 'cache.kept['), ('    start =', "    cache.kept = cache.__dict__.get('kept', {})\n    start =")))  # fmt: skip

wrong("latent_attention_step", "changes the weights", changed(LATENT, ('    past =', '    layer.w_uk.mul_(1.001)\n    past =')))  # fmt: skip

wrong("latent_attention_step", "rotated before the norm", changed(LATENT, ('    q = F.rms_norm(q, layer.q_norm.shape, layer.q_norm, 1e-5)\n    k = F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-5)\n    q, k = rope_at(q, past), rope_at(k, 0)\n', '    q, k = rope_at(q, past), rope_at(k, 0)\n    q = F.rms_norm(q, layer.q_norm.shape, layer.q_norm, 1e-5)\n    k = F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-5)\n')), near_miss="rotates-before-the-norm")  # fmt: skip

wrong("latent_attention_step", "a bound from one of the two matrices", changed(LATENT, ('min(both.shape)', 'min(w_k.shape)')))  # fmt: skip

wrong("latent_attention_step", "a chunk behind a prompt is not masked", changed(LATENT, ('cached_attention(q, k, v)', '(F.scaled_dot_product_attention if past else cached_attention)(q, k, v)')))  # fmt: skip

BY_HAND = (
    ATTENTIONS
    + """
def rms(x, scale):
    return scale * x / (x.pow(2).mean(dim=-1, keepdim=True) + 1e-5).sqrt()


def mlp(x, layer):
    up = torch.matmul(x, layer.w_up)
    return torch.matmul(0.5 * up * (1 + torch.erf(up / math.sqrt(2))), layer.w_down)


def decoder_step(weights, ids, cache):
    x = F.embedding(ids, weights.embedding)
    for i in range(len(weights.layers)):
        layer = weights.layers[i]
        if type(layer) is LayerWeights:
            x += attention_step(rms(x, layer.norm1), layer, weights.heads, cache, i)
        else:
            x += latent_attention_step(rms(x, layer.norm1), layer, weights.heads, cache, i)
        x += mlp(rms(x, layer.norm2), layer)
    last = rms(x, weights.norm)[:, -1:, :]
    return torch.einsum("bsd,vd->bv", last, weights.embedding)
"""
)

right("decoder_step", "norm and GELU by hand, in place", BY_HAND)  # fmt: skip

right(
    "decoder_step",
    "a class with a method per layer, only the last row behind the last attention",
    ATTENTIONS
    + """
class Decoder:
    def __init__(self, weights, cache):
        self.weights, self.cache = weights, cache

    @staticmethod
    def norm(x, scale):
        return torch.nn.functional.rms_norm(x, (x.size(-1),), scale, 1e-5)

    def layer(self, x, index):
        layer = self.weights.layers[index]
        h = self.norm(x, layer.norm1)
        if hasattr(layer, "w_dkv"):
            y = latent_attention_step(h, layer, self.weights.heads, self.cache, index)
        else:
            y = attention_step(h, layer, self.weights.heads, self.cache, index)
        x = x + y
        if index == len(self.weights.layers) - 1:
            x = x[:, -1:]
        return x + F.gelu(self.norm(x, layer.norm2) @ layer.w_up) @ layer.w_down

    def __call__(self, ids):
        x = self.weights.embedding[ids]
        for index in range(len(self.weights.layers)):
            x = self.layer(x, index)
        return F.linear(self.norm(x.squeeze(1), self.weights.norm), self.weights.embedding)


def decoder_step(weights, ids, cache):
    return Decoder(weights, cache)(ids)
""",
)

LEAST = (
    FACTORS
    + """
def causal(q, k, v):
    # row by row: no score that the mask hides
    past = k.shape[2] - q.shape[2]
    rows = []
    for i in range(q.shape[2]):
        n = past + i + 1
        if n == 1:  # one key has all the weight
            rows.append(v[:, :, :1])
            continue
        p = (q[:, :, i : i + 1] @ k[:, :, :n].mT / q.shape[-1] ** 0.5).softmax(-1)
        rows.append(p @ v[:, :, :n])
    return torch.cat(rows, 2)


def attend(x, layer, heads, cache, index, ids=None, last=False):
    # ids: equal tokens share their projections; last: only the last row asks
    start = cache.length
    norm = lambda y, scale: F.rms_norm(y, scale.shape, scale, 1e-5)
    if ids is not None and ids.shape[0] == 1:
        _, inverse = ids[0].unique(return_inverse=True)
        first = torch.stack([(inverse == j).nonzero()[0, 0] for j in range(int(inverse.max()) + 1)])
        project = lambda w: (x[:, first] @ w)[:, inverse]
    else:
        project = lambda w: x @ w
    q = x[:, -1:] @ layer.w_q if last else project(layer.w_q)
    begin = start + x.shape[1] - q.shape[1]
    q = rope_at(norm(split_heads(q, heads), layer.q_norm), begin)
    if isinstance(layer, LayerWeights):
        k = rope_at(norm(split_heads(project(layer.w_k), heads), layer.k_norm), start)
        k, v = cache.update(index, k, split_heads(project(layer.w_v), heads))
        return merge_heads(causal(q, k, v)) @ layer.w_o
    (c,) = cache.update(index, project(layer.w_dkv))
    k = rope_at(norm(split_heads(c @ layer.w_uk, heads), layer.k_norm), 0)
    if q.shape[2] > 1:
        return merge_heads(causal(q, k, split_heads(c @ layer.w_uv, heads))) @ layer.w_o
    y = causal(q, k, c[:, None].expand(-1, heads, -1, -1))
    return merge_heads(y @ layer.w_uv.unflatten(1, (heads, -1)).transpose(0, 1)) @ layer.w_o


def decoder_step(weights, ids, cache):
    x = weights.embedding[ids]
    for index, layer in enumerate(weights.layers):
        final = index == len(weights.layers) - 1
        y = attend(F.rms_norm(x, layer.norm1.shape, layer.norm1, 1e-5), layer, weights.heads, cache, index, None if index else ids, final)
        x = x[:, -y.shape[1] :] + y
        h = F.rms_norm(x, layer.norm2.shape, layer.norm2, 1e-5)
        x = x + F.gelu(h @ layer.w_up) @ layer.w_down
    x = F.rms_norm(x[:, -1], weights.norm.shape, weights.norm, 1e-5)
    return x @ weights.embedding.T
"""
)

right("decoder_step", "as few products as there can be", LEAST)  # fmt: skip

wrong("decoder_step", "last norm without epsilon", changed(DECODER, ('weights.norm, 1e-5', 'weights.norm')))  # fmt: skip

wrong("decoder_step", "epsilon left to the default", changed(DECODER, (', 1e-5) @', ') @'), ('w.norm1, 1e-5', 'w.norm1'), ('weights.norm, 1e-5', 'weights.norm')), near_miss="another-epsilon")  # fmt: skip

wrong("decoder_step", "LayerNorm in the place of RMSNorm", changed(DECODER, ('(d,), w.norm1, 1e-5', '(d,), w.norm1, None, 1e-5'), ('(d,), w.norm2, 1e-5', '(d,), w.norm2, None, 1e-5'), ('(d,), weights.norm, 1e-5', '(d,), weights.norm, None, 1e-5'), ('def decoder_step', 'def norm(*args):\n    return F.layer_norm(*args)\n\n\ndef decoder_step'), ('attend(F.rms_norm(', 'attend(norm('), ('F.gelu(F.rms_norm(', 'F.gelu(norm('), ('h = F.rms_norm(', 'h = norm(')), near_miss="layer-norm")  # fmt: skip

wrong("decoder_step", "the kind is that of the first layer", changed(DECODER, ('isinstance(w, L', 'isinstance(weights.layers[0], L')))  # fmt: skip

wrong("decoder_step", "an index per kind", changed(DECODER, ('cache, i)', 'cache, sum(type(v) is type(w) for v in weights.layers[:i]))')))  # fmt: skip

wrong("decoder_step", "only the last row reaches the last layer", changed(DECODER, ('        attend =', '        h = h[:, -1:] if i == len(weights.layers) - 1 else h\n        attend =')))  # fmt: skip

wrong("decoder_step", "writes into the embedding", changed(BY_HAND, ('x = F.embedding(ids, weights.embedding)', 'x = weights.embedding[ids[0, 0] : ids[0, 0] + 1][None] if ids.numel() == 1 else weights.embedding[ids]')))  # fmt: skip

wrong("decoder_step", "the normed row takes the stream's place", changed(DECODER, ('        h = h + attend(F.rms_norm(h, (d,), w.norm1, 1e-5)', '        h = F.rms_norm(h, (d,), w.norm1, 1e-5)\n        h = h + attend(h'), ('        h = h + F.gelu(F.rms_norm(h, (d,), w.norm2, 1e-5)', '        h = F.rms_norm(h, (d,), w.norm2, 1e-5)\n        h = h + F.gelu(h')), near_miss="adds-to-the-normed-row")  # fmt: skip

OWN_SAMPLING = (
    STEP
    + """
def pick(logits, temperature, top_k, top_p, u):
    if temperature == 0:
        best = logits == logits.max(dim=-1, keepdim=True).values
        return best.int().argmax(-1)
    scaled = torch.softmax(logits / temperature, -1)
    if top_k is not None:
        kept = torch.topk(scaled, top_k).indices
        scaled = torch.zeros_like(scaled).scatter(-1, kept, scaled.gather(-1, kept))
        scaled = scaled / scaled.sum(-1, keepdim=True)
    if top_p is not None:
        order = torch.sort(scaled, dim=-1, descending=True, stable=True)
        before = order.values.cumsum(-1) - order.values
        kept = torch.where(before < top_p, order.values, 0.0)
        scaled = torch.zeros_like(scaled).scatter(-1, order.indices, kept)
        scaled = scaled / scaled.sum(-1, keepdim=True)
    total = scaled.cumsum(-1)
    return ((total <= u[:, None]).sum(-1)).clamp(max=logits.shape[-1] - 1)


def generate_text(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    if temperature and uniforms is None:
        raise ValueError("uniforms?")
    if max_new_tokens == 0:
        return ids.clone()
    batch, seq = ids.shape
    out = torch.full((batch, seq + max_new_tokens), -1 if eos_id is None else eos_id, dtype=ids.dtype)
    out[:, :seq] = ids
    cache = ModelCache(len(weights.layers), seq + max_new_tokens - 1)
    alive = torch.ones(batch, dtype=torch.bool)
    begin, end = 0, seq
    while True:
        logits = decoder_step(weights, out[:, begin:end], cache)
        u = None if uniforms is None else uniforms[:, end - seq]
        new = pick(logits, temperature, top_k, top_p, u)
        out[alive, end] = new[alive]
        if eos_id is not None:
            alive &= new != eos_id
        begin, end = end, end + 1
        if end == seq + max_new_tokens or not alive.any():
            return out[:, :end]
"""
)

right("generate_text", "room for all tokens, filled from the left", OWN_SAMPLING)  # fmt: skip

right(
    "generate_text",
    "a generator function yields columns",
    STEP
    + """
def columns(weights, ids, max_new_tokens, eos_id, choose):
    cache = ModelCache(len(weights.layers), ids.size(1) + max_new_tokens)
    finished = [False] * ids.size(0)
    step = ids
    for t in range(max_new_tokens):
        tokens = [int(token) for token in choose(decoder_step(weights, step, cache), t)]
        for row, token in enumerate(tokens):
            if finished[row]:
                tokens[row] = eos_id
            elif eos_id is not None and token == eos_id:
                finished[row] = True
        step = torch.tensor(tokens, dtype=ids.dtype).reshape(-1, 1)
        yield step
        if all(finished):
            return


def generate_text(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    if temperature > 0 and uniforms is None:
        raise ValueError("generate_text needs uniforms where temperature > 0")

    def choose(logits, t):
        if temperature > 0:
            return sample_from_uniform(sampling_distribution(logits, temperature, top_k, top_p), uniforms[:, t])
        return torch.argmax(logits, dim=-1)

    with torch.inference_mode():
        return torch.cat([ids, *columns(weights, ids, max_new_tokens, eos_id, choose)], dim=1)
""",
)

right(
    "generate_text",
    "temperature 0 through the distribution, prompt in the cache by hand",
    STEP
    + """
def generate_text(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    if temperature != 0 and uniforms is None:
        raise ValueError("give uniforms")
    rows, seq = ids.shape
    u = torch.zeros(rows, max_new_tokens) if uniforms is None else uniforms
    cache = ModelCache(len(weights.layers), max(seq + max_new_tokens - 1, 1))
    text = ids
    while text.shape[1] < seq + max_new_tokens:
        t = text.shape[1] - seq
        logits = decoder_step(weights, text[:, cache.length :], cache)
        probs = sampling_distribution(logits, temperature, top_k, top_p)
        token = sample_from_uniform(probs, u[:, t].to(probs.dtype))
        if eos_id is not None:
            ended = (text[:, seq:] == eos_id).any(1)
            token[ended] = eos_id
        text = torch.cat([text, token[:, None]], 1)
        if eos_id is not None and (text[:, seq:] == eos_id).any(1).all():
            break
    return text
""",
)

right("generate_text", "texts one after the other", changed(LOOP, ("def generate_text(", "def one(")) + """

def generate_text(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    rows = []
    for i in range(len(ids)):
        own = None if uniforms is None else uniforms[i : i + 1]
        rows.append(one(weights, ids[i : i + 1], max_new_tokens, eos_id, temperature, top_k, top_p, own))
    longest = max(row.shape[1] for row in rows)
    return torch.cat([F.pad(row, (0, longest - row.shape[1]), value=eos_id or 0) for row in rows])
""")  # fmt: skip

wrong("generate_text", "the prompt is read token by token", changed(LOOP, ('    text, unread = ids, ids\n', '    for i in range(ids.shape[1] - 1):\n        decoder_step(weights, ids[:, i : i + 1], cache)\n    text, unread = ids, ids[:, -1:]\n')), near_miss="prompt-token-by-token")  # fmt: skip

wrong("generate_text", "the prompt in two steps", changed(LOOP, ('    text, unread = ids, ids\n', '    if ids.shape[1] > 1:\n        decoder_step(weights, ids[:, :-1], cache)\n    text, unread = ids, ids[:, -1:]\n')))  # fmt: skip

wrong("generate_text", "the prompt's last token is read twice", changed(LOOP, ('    text, unread = ids, ids\n', '    decoder_step(weights, ids, cache)\n    text, unread = ids, ids[:, -1:]\n'), ('ids.shape[1] + max_new_tokens)', 'ids.shape[1] + max_new_tokens + 1)')), near_miss="last-prompt-token-twice")  # fmt: skip

wrong("generate_text", "reads on behind the end and cuts it off", changed(LOOP, ('        if done.all():\n            break\n    return text', '    if eos_id is not None and done.all():\n        ends = (text[:, ids.shape[1] :] == eos_id).int().argmax(1).max()\n        text = text[:, : ids.shape[1] + int(ends) + 1]\n    return text')), near_miss="asks-after-the-end")  # fmt: skip

wrong("generate_text", "EOS 0 is taken for none", changed(LOOP, ('if eos_id is not None:', 'if eos_id:')))  # fmt: skip

wrong("generate_text", "finished rows go on", changed(LOOP, ('            token[done] = eos_id\n', '')), near_miss="goes-on-after-the-end")  # fmt: skip

wrong("generate_text", "temperature behind the filters", changed(OWN_SAMPLING, ('scaled = torch.softmax(logits / temperature, -1)', 'scaled = torch.softmax(logits, -1)'), ('    total = scaled.cumsum', '    scaled = scaled ** (1 / temperature)\n    scaled = scaled / scaled.sum(-1, keepdim=True)\n    total = scaled.cumsum')))  # fmt: skip

wrong("generate_text", "top-k is forgotten", changed(LOOP, ('temperature, top_k, top_p), uniforms', 'temperature, None, top_p), uniforms')))  # fmt: skip

wrong("generate_text", "a cache that outlives the call", changed(LOOP, ('    cache = ModelCache(len(weights.layers), ids.shape[1] + max_new_tokens)\n', '    cache = CACHES.setdefault((weights.layers[0].w_q.shape, ids.shape), ModelCache(len(weights.layers), 99))\n'), ('def generate_text', 'CACHES = {}\n\n\ndef generate_text')))  # fmt: skip
wrong(
    "ModelCache",
    "buffers in the first tensor's dtype",
    """
class ModelCache:
    def __init__(self, layers, max_seq):
        self.buffers = [None] * layers
        self.counts = [0] * layers
        self.max_seq = max_seq
    @property
    def length(self):
        return min(self.counts)
    def update(self, layer, *rows):
        n = self.counts[layer]
        new = rows[0].shape[-2]
        if n + new > self.max_seq:
            raise ValueError(f"ModelCache.update: {n + new} tokens, room for {self.max_seq}")
        if self.buffers[layer] is None:
            self.buffers[layer] = [rows[0].new_empty((*r.shape[:-2], self.max_seq, r.shape[-1])) for r in rows]
        for b, r in zip(self.buffers[layer], rows):
            b[..., n:n + new, :] = r
        self.counts[layer] = n + new
        return tuple(b[..., :n + new, :] for b in self.buffers[layer])
    def reset(self):
        self.counts = [0] * len(self.counts)
""",
    near_miss="dtype-of-the-first",
)
wrong(
    "ModelCache",
    "tokens counted on axis 2",
    """
class ModelCache:
    def __init__(self, layers, max_seq):
        self.buffers = [None] * layers
        self.counts = [0] * layers
        self.max_seq = max_seq
    @property
    def length(self):
        return min(self.counts)
    def update(self, layer, *rows):
        n = self.counts[layer]
        new = rows[0].shape[2]
        if n + new > self.max_seq:
            raise ValueError(f"ModelCache.update: {n + new} tokens, room for {self.max_seq}")
        if self.buffers[layer] is None:
            self.buffers[layer] = [r.new_empty((*r.shape[:-2], self.max_seq, r.shape[-1])) for r in rows]
        for b, r in zip(self.buffers[layer], rows):
            b[..., n:n + new, :] = r
        self.counts[layer] = n + new
        return tuple(b[..., :n + new, :] for b in self.buffers[layer])
    def reset(self):
        self.counts = [0] * len(self.counts)
""",
    near_miss="tokens-on-the-third-axis",
)
wrong(
    "ModelCache",
    "the last free row refused",
    """
class ModelCache:
    def __init__(self, layers, max_seq):
        self.buffers = [None] * layers
        self.counts = [0] * layers
        self.max_seq = max_seq
    @property
    def length(self):
        return min(self.counts)
    def update(self, layer, *rows):
        n = self.counts[layer]
        new = rows[0].shape[-2]
        if n + new >= self.max_seq:
            raise ValueError(f"ModelCache.update: {n + new} tokens, room for {self.max_seq}")
        if self.buffers[layer] is None:
            self.buffers[layer] = [r.new_empty((*r.shape[:-2], self.max_seq, r.shape[-1])) for r in rows]
        for b, r in zip(self.buffers[layer], rows):
            b[..., n:n + new, :] = r
        self.counts[layer] = n + new
        return tuple(b[..., :n + new, :] for b in self.buffers[layer])
    def reset(self):
        self.counts = [0] * len(self.counts)
""",
    near_miss="last-row-refused",
)
wrong(
    "attention_step",
    "nothing rotated",
    """
def attention_step(x, layer, heads, cache, index):
    past = cache.length
    q = split_heads(x @ layer.w_q, heads)
    k = split_heads(x @ layer.w_k, heads)
    v = split_heads(x @ layer.w_v, heads)
    q = F.rms_norm(q, layer.q_norm.shape, layer.q_norm, 1e-5)
    k = F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-5)
    k, v = cache.update(index, k, v)
    return merge_heads(cached_attention(q, k, v)) @ layer.w_o
""",
    near_miss="no-positions",
)
wrong(
    "attention_step",
    "the queries' norm forgotten",
    """
def attention_step(x, layer, heads, cache, index):
    past = cache.length
    q = split_heads(x @ layer.w_q, heads)
    k = split_heads(x @ layer.w_k, heads)
    v = split_heads(x @ layer.w_v, heads)
    k = F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-5)
    q, k = rope_at(q, past), rope_at(k, past)
    k, v = cache.update(index, k, v)
    return merge_heads(cached_attention(q, k, v)) @ layer.w_o
""",
    near_miss="keys-alone-normed",
)
wrong(
    "attention_step",
    "the keys' norm with the queries' scale",
    """
def attention_step(x, layer, heads, cache, index):
    past = cache.length
    q = split_heads(x @ layer.w_q, heads)
    k = split_heads(x @ layer.w_k, heads)
    v = split_heads(x @ layer.w_v, heads)
    q = F.rms_norm(q, layer.q_norm.shape, layer.q_norm, 1e-5)
    k = F.rms_norm(k, layer.q_norm.shape, layer.q_norm, 1e-5)
    q, k = rope_at(q, past), rope_at(k, past)
    k, v = cache.update(index, k, v)
    return merge_heads(cached_attention(q, k, v)) @ layer.w_o
""",
    near_miss="one-scale-for-both",
)
wrong(
    "attention_step",
    "the first norm applied again",
    """
def attention_step(x, layer, heads, cache, index):
    past = cache.length
    x = F.rms_norm(x, layer.norm1.shape, layer.norm1, 1e-5)
    q = split_heads(x @ layer.w_q, heads)
    k = split_heads(x @ layer.w_k, heads)
    v = split_heads(x @ layer.w_v, heads)
    q = F.rms_norm(q, layer.q_norm.shape, layer.q_norm, 1e-5)
    k = F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-5)
    q, k = rope_at(q, past), rope_at(k, past)
    k, v = cache.update(index, k, v)
    return merge_heads(cached_attention(q, k, v)) @ layer.w_o
""",
    near_miss="norms-its-rows-again",
)
wrong(
    "attention_step",
    "the residual added",
    """
def attention_step(x, layer, heads, cache, index):
    past = cache.length
    q = split_heads(x @ layer.w_q, heads)
    k = split_heads(x @ layer.w_k, heads)
    v = split_heads(x @ layer.w_v, heads)
    q = F.rms_norm(q, layer.q_norm.shape, layer.q_norm, 1e-5)
    k = F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-5)
    q, k = rope_at(q, past), rope_at(k, past)
    k, v = cache.update(index, k, v)
    return x + merge_heads(cached_attention(q, k, v)) @ layer.w_o
""",
    near_miss="adds-the-residual",
)
wrong(
    "attention_step",
    "epsilon 1e-6",
    """
def attention_step(x, layer, heads, cache, index):
    past = cache.length
    q = split_heads(x @ layer.w_q, heads)
    k = split_heads(x @ layer.w_k, heads)
    v = split_heads(x @ layer.w_v, heads)
    q = F.rms_norm(q, layer.q_norm.shape, layer.q_norm, 1e-6)
    k = F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-6)
    q, k = rope_at(q, past), rope_at(k, past)
    k, v = cache.update(index, k, v)
    return merge_heads(cached_attention(q, k, v)) @ layer.w_o
""",
    near_miss="smaller-epsilon",
)
wrong(
    "latent_attention_step",
    "d_c bounded by the rows alone",
    """
def latent_factors(w_k, w_v, d_c):
    w = torch.cat([w_k, w_v], dim=1)
    if not 1 <= d_c <= w.shape[0]:
        raise ValueError(f"latent_factors: d_c must be in 1..{min(w.shape)}, got {d_c}")
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    w_dkv = u[:, :d_c] * s[:d_c]
    w_uk, w_uv = vh[:d_c].split([w_k.shape[1], w_v.shape[1]], dim=1)
    return w_dkv, w_uk, w_uv
def latent_attention_step(x, layer, heads, cache, index):
    past = cache.length
    q = split_heads(x @ layer.w_q, heads)
    q = rope_at(F.rms_norm(q, layer.q_norm.shape, layer.q_norm, 1e-5), past)
    (c,) = cache.update(index, x @ layer.w_dkv)
    k, v = split_heads(c @ layer.w_uk, heads), split_heads(c @ layer.w_uv, heads)
    k = rope_at(F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-5), 0)
    return merge_heads(cached_attention(q, k, v)) @ layer.w_o
""",
    near_miss="bound-of-the-rows",
)
wrong(
    "latent_attention_step",
    "singular values in both factors",
    """
def latent_factors(w_k, w_v, d_c):
    w = torch.cat([w_k, w_v], dim=1)
    if not 1 <= d_c <= min(w.shape):
        raise ValueError(f"latent_factors: d_c must be in 1..{min(w.shape)}, got {d_c}")
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    w_dkv = u[:, :d_c] * s[:d_c]
    w_uk, w_uv = (s[:d_c, None] * vh[:d_c]).split([w_k.shape[1], w_v.shape[1]], dim=1)
    return w_dkv, w_uk, w_uv
def latent_attention_step(x, layer, heads, cache, index):
    past = cache.length
    q = split_heads(x @ layer.w_q, heads)
    q = rope_at(F.rms_norm(q, layer.q_norm.shape, layer.q_norm, 1e-5), past)
    (c,) = cache.update(index, x @ layer.w_dkv)
    k, v = split_heads(c @ layer.w_uk, heads), split_heads(c @ layer.w_uv, heads)
    k = rope_at(F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-5), 0)
    return merge_heads(cached_attention(q, k, v)) @ layer.w_o
""",
)
wrong(
    "decoder_step",
    "probabilities",
    ATTENTIONS
    + """
def decoder_step(weights, ids, cache):
    x = weights.embedding[ids]
    for i, layer in enumerate(weights.layers):
        step = latent_attention_step if isinstance(layer, LatentLayerWeights) else attention_step
        x = x + step(F.rms_norm(x, layer.norm1.shape, layer.norm1, 1e-5), layer, weights.heads, cache, i)
        x = x + F.gelu(F.rms_norm(x, layer.norm2.shape, layer.norm2, 1e-5) @ layer.w_up) @ layer.w_down
    x = F.rms_norm(x[:, -1], weights.norm.shape, weights.norm, 1e-5)
    return (x @ weights.embedding.T).softmax(-1)
""",
    near_miss="probabilities",
)
wrong(
    "decoder_step",
    "the first norm for both parts",
    ATTENTIONS
    + """
def decoder_step(weights, ids, cache):
    x = weights.embedding[ids]
    for i, layer in enumerate(weights.layers):
        step = latent_attention_step if isinstance(layer, LatentLayerWeights) else attention_step
        x = x + step(F.rms_norm(x, layer.norm1.shape, layer.norm1, 1e-5), layer, weights.heads, cache, i)
        x = x + F.gelu(F.rms_norm(x, layer.norm1.shape, layer.norm1, 1e-5) @ layer.w_up) @ layer.w_down
    x = F.rms_norm(x[:, -1], weights.norm.shape, weights.norm, 1e-5)
    return x @ weights.embedding.T
""",
    near_miss="first-norm-twice",
)
wrong(
    "generate_text",
    "greedy below temperature 1",
    """
class ModelCache:
    def __init__(self, layers, max_seq):
        self.buffers = [None] * layers
        self.counts = [0] * layers
        self.max_seq = max_seq
    @property
    def length(self):
        return min(self.counts)
    def update(self, layer, *rows):
        n = self.counts[layer]
        new = rows[0].shape[-2]
        if n + new > self.max_seq:
            raise ValueError(f"ModelCache.update: {n + new} tokens, room for {self.max_seq}")
        if self.buffers[layer] is None:
            self.buffers[layer] = [r.new_empty((*r.shape[:-2], self.max_seq, r.shape[-1])) for r in rows]
        for b, r in zip(self.buffers[layer], rows):
            b[..., n:n + new, :] = r
        self.counts[layer] = n + new
        return tuple(b[..., :n + new, :] for b in self.buffers[layer])
    def reset(self):
        self.counts = [0] * len(self.counts)

def attention_step(x, layer, heads, cache, index):
    past = cache.length
    q = split_heads(x @ layer.w_q, heads)
    k = split_heads(x @ layer.w_k, heads)
    v = split_heads(x @ layer.w_v, heads)
    q = F.rms_norm(q, layer.q_norm.shape, layer.q_norm, 1e-5)
    k = F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-5)
    q, k = rope_at(q, past), rope_at(k, past)
    k, v = cache.update(index, k, v)
    return merge_heads(cached_attention(q, k, v)) @ layer.w_o

def latent_factors(w_k, w_v, d_c):
    w = torch.cat([w_k, w_v], dim=1)
    if not 1 <= d_c <= min(w.shape):
        raise ValueError(f"latent_factors: d_c must be in 1..{min(w.shape)}, got {d_c}")
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    w_dkv = u[:, :d_c] * s[:d_c]
    w_uk, w_uv = vh[:d_c].split([w_k.shape[1], w_v.shape[1]], dim=1)
    return w_dkv, w_uk, w_uv
def latent_attention_step(x, layer, heads, cache, index):
    past = cache.length
    q = split_heads(x @ layer.w_q, heads)
    q = rope_at(F.rms_norm(q, layer.q_norm.shape, layer.q_norm, 1e-5), past)
    (c,) = cache.update(index, x @ layer.w_dkv)
    k, v = split_heads(c @ layer.w_uk, heads), split_heads(c @ layer.w_uv, heads)
    k = rope_at(F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-5), 0)
    return merge_heads(cached_attention(q, k, v)) @ layer.w_o

def decoder_step(weights, ids, cache):
    x = weights.embedding[ids]
    for i, layer in enumerate(weights.layers):
        step = latent_attention_step if isinstance(layer, LatentLayerWeights) else attention_step
        x = x + step(F.rms_norm(x, layer.norm1.shape, layer.norm1, 1e-5), layer, weights.heads, cache, i)
        x = x + F.gelu(F.rms_norm(x, layer.norm2.shape, layer.norm2, 1e-5) @ layer.w_up) @ layer.w_down
    x = F.rms_norm(x[:, -1], weights.norm.shape, weights.norm, 1e-5)
    return x @ weights.embedding.T

def generate_text(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    if temperature > 0 and uniforms is None:
        raise ValueError("generate_text: uniforms are needed above temperature 0")
    cache = ModelCache(len(weights.layers), ids.shape[1] + max_new_tokens)
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    chunk = ids
    for t in range(max_new_tokens):
        logits = decoder_step(weights, chunk, cache)
        if temperature < 1:
            new = logits.argmax(-1)
        else:
            new = sample_from_uniform(sampling_distribution(logits, temperature, top_k, top_p), uniforms[:, t])
        if eos_id is not None:
            new = torch.where(done, eos_id, new)
            done = done | (new == eos_id)
        chunk = new[:, None]
        ids = torch.cat([ids, chunk], 1)
        if done.all():
            break
    return ids
""",
    near_miss="greedy-below-one",
)
wrong(
    "generate_text",
    "room for 64 tokens whatever comes",
    """
class ModelCache:
    def __init__(self, layers, max_seq):
        self.buffers = [None] * layers
        self.counts = [0] * layers
        self.max_seq = max_seq
    @property
    def length(self):
        return min(self.counts)
    def update(self, layer, *rows):
        n = self.counts[layer]
        new = rows[0].shape[-2]
        if n + new > self.max_seq:
            raise ValueError(f"ModelCache.update: {n + new} tokens, room for {self.max_seq}")
        if self.buffers[layer] is None:
            self.buffers[layer] = [r.new_empty((*r.shape[:-2], self.max_seq, r.shape[-1])) for r in rows]
        for b, r in zip(self.buffers[layer], rows):
            b[..., n:n + new, :] = r
        self.counts[layer] = n + new
        return tuple(b[..., :n + new, :] for b in self.buffers[layer])
    def reset(self):
        self.counts = [0] * len(self.counts)

def attention_step(x, layer, heads, cache, index):
    past = cache.length
    q = split_heads(x @ layer.w_q, heads)
    k = split_heads(x @ layer.w_k, heads)
    v = split_heads(x @ layer.w_v, heads)
    q = F.rms_norm(q, layer.q_norm.shape, layer.q_norm, 1e-5)
    k = F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-5)
    q, k = rope_at(q, past), rope_at(k, past)
    k, v = cache.update(index, k, v)
    return merge_heads(cached_attention(q, k, v)) @ layer.w_o

def latent_factors(w_k, w_v, d_c):
    w = torch.cat([w_k, w_v], dim=1)
    if not 1 <= d_c <= min(w.shape):
        raise ValueError(f"latent_factors: d_c must be in 1..{min(w.shape)}, got {d_c}")
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    w_dkv = u[:, :d_c] * s[:d_c]
    w_uk, w_uv = vh[:d_c].split([w_k.shape[1], w_v.shape[1]], dim=1)
    return w_dkv, w_uk, w_uv
def latent_attention_step(x, layer, heads, cache, index):
    past = cache.length
    q = split_heads(x @ layer.w_q, heads)
    q = rope_at(F.rms_norm(q, layer.q_norm.shape, layer.q_norm, 1e-5), past)
    (c,) = cache.update(index, x @ layer.w_dkv)
    k, v = split_heads(c @ layer.w_uk, heads), split_heads(c @ layer.w_uv, heads)
    k = rope_at(F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-5), 0)
    return merge_heads(cached_attention(q, k, v)) @ layer.w_o

def decoder_step(weights, ids, cache):
    x = weights.embedding[ids]
    for i, layer in enumerate(weights.layers):
        step = latent_attention_step if isinstance(layer, LatentLayerWeights) else attention_step
        x = x + step(F.rms_norm(x, layer.norm1.shape, layer.norm1, 1e-5), layer, weights.heads, cache, i)
        x = x + F.gelu(F.rms_norm(x, layer.norm2.shape, layer.norm2, 1e-5) @ layer.w_up) @ layer.w_down
    x = F.rms_norm(x[:, -1], weights.norm.shape, weights.norm, 1e-5)
    return x @ weights.embedding.T

def generate_text(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    if temperature > 0 and uniforms is None:
        raise ValueError("generate_text: uniforms are needed above temperature 0")
    cache = ModelCache(len(weights.layers), 64)
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    chunk = ids
    for t in range(max_new_tokens):
        logits = decoder_step(weights, chunk, cache)
        if temperature == 0:
            new = logits.argmax(-1)
        else:
            new = sample_from_uniform(sampling_distribution(logits, temperature, top_k, top_p), uniforms[:, t])
        if eos_id is not None:
            new = torch.where(done, eos_id, new)
            done = done | (new == eos_id)
        chunk = new[:, None]
        ids = torch.cat([ids, chunk], 1)
        if done.all():
            break
    return ids
""",
)
