"""Right and wrong answers to the exercises of the chapter on the KV cache."""

from tests.answers import right, wrong

# ---- cached_attention

right(
    "cached_attention",
    "fused attention with a boolean mask",
    """
def cached_attention(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    mask = torch.arange(m, device=q.device)[None, :] <= torch.arange(m - n, m, device=q.device)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
""",
)
right(
    "cached_attention",
    "one query at a time",
    """
def cached_attention(q, k, v):
    past = k.shape[-2] - q.shape[-2]
    rows = []
    for i in range(q.shape[-2]):
        end = past + i + 1
        scores = (q[..., i : i + 1, :] @ k[..., :end, :].mT) / q.shape[-1] ** 0.5
        rows.append(torch.softmax(scores.float(), -1).to(v.dtype) @ v[..., :end, :])
    return torch.cat(rows, dim=-2)
""",
)
right(
    "cached_attention",
    "in float64, with einsum and an additive mask",
    """
def cached_attention(q, k, v):
    dtype = q.dtype
    q, k, v = q.double(), k.double(), v.double()
    n, m = q.shape[-2], k.shape[-2]
    scores = torch.einsum("...qd,...kd->...qk", q, k) * q.shape[-1] ** -0.5
    scores = scores + torch.full((n, m), -torch.inf, dtype=torch.float64).triu(m - n + 1)
    return torch.einsum("...qk,...kd->...qd", scores.softmax(-1), v).to(dtype)
""",
)
right(
    "cached_attention",
    "scaled before, softmax by hand",
    """
def cached_attention(q, k, v):
    n, m = q.shape[-2:][0], k.shape[-2]
    s = (q / math.sqrt(q.size(-1))) @ k.transpose(-1, -2)
    hidden = torch.ones(n, m).triu(m - n + 1).bool()
    s = torch.where(hidden, torch.finfo(s.dtype).min, s)
    s = s - s.max(-1, keepdim=True).values
    e = s.exp()
    return (e / e.sum(-1, keepdim=True)) @ v
""",
)
wrong(
    "cached_attention",
    "fused attention with is_causal, which starts at the top left",
    """
def cached_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
""",
    near_miss="square-mask-on-chunk",
)
wrong(
    "cached_attention",
    "mask for a whole prompt only",
    """
def cached_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[-2] == k.shape[-2])
""",
    near_miss="chunk-unmasked",
)
wrong(
    "cached_attention",
    "no mask",
    """
def cached_attention(q, k, v):
    return (q @ k.mT / math.sqrt(k.shape[-1])).softmax(-1) @ v
""",
    near_miss="no-mask",
)
wrong(
    "cached_attention",
    "right but square",
    """
def cached_attention(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    q = F.pad(q, (0, 0, m - n, 0))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., m - n :, :]
""",
    near_miss="computes-all-rows",
)
wrong(
    "cached_attention",
    "four dimensions only",
    """
def cached_attention(q, k, v):
    b, h, n, d = q.shape
    m = k.shape[2]
    s = torch.einsum("bhqd,bhkd->bhqk", q, k) / d**0.5
    s = s.masked_fill(~torch.ones(n, m, dtype=torch.bool).tril(m - n), -torch.inf)
    return torch.einsum("bhqk,bhkd->bhqd", s.softmax(-1), v)
""",
)
wrong(
    "cached_attention",
    "float32 comes back",
    """
def cached_attention(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    s = (q.float() @ k.float().mT / q.shape[-1] ** 0.5).masked_fill(~torch.ones(n, m, dtype=torch.bool).tril(m - n), -torch.inf)
    return s.softmax(-1) @ v.float()
""",
)
wrong(
    "cached_attention",
    "no gradient through the weights",
    """
def cached_attention(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~torch.ones(n, m, dtype=torch.bool).tril(m - n), -torch.inf)
    return s.softmax(-1).detach() @ v
""",
)
wrong(
    "cached_attention",
    "scales q in place",
    """
def cached_attention(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    with torch.no_grad():
        q /= math.sqrt(q.shape[-1])
    s = (q @ k.mT).masked_fill(~torch.ones(n, m, dtype=torch.bool).tril(m - n), -torch.inf)
    return s.softmax(-1) @ v
""",
)

# ---- KVCache

right(
    "KVCache",
    "one buffer for both, copies returned",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.store = torch.empty((2, batch, kv_heads, max_seq, head_dim), dtype=dtype, device=device)
        self.n = 0

    @property
    def length(self):
        return self.n

    def update(self, k, v):
        new = k.size(2)
        if self.n + new > self.store.size(3):
            raise ValueError(f"KVCache.update: {new} more rows do not fit")
        self.store[0].narrow(2, self.n, new).copy_(k)
        self.store[1].narrow(2, self.n, new).copy_(v)
        self.n += new
        keys, values = self.store[:, :, :, : self.n].clone()
        return keys, values

    def reset(self):
        self.n = 0
""",
)
right(
    "KVCache",
    "index_copy_ along the sequence, cleared at reset, list returned",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.max_seq = max_seq
        self.shape = (batch, kv_heads, max_seq, head_dim)
        self.k = torch.zeros(self.shape, dtype=dtype, device=device)
        self.v = torch.zeros(self.shape, dtype=dtype, device=device)
        self.length = 0

    def update(self, k, v):
        rows = range(self.length, self.length + k.shape[2])
        if rows and rows[-1] >= self.max_seq:
            raise ValueError("KVCache.update needs room")
        index = torch.tensor(list(rows), device=k.device)
        self.k.index_copy_(2, index, k.contiguous())
        self.v.index_copy_(2, index, v.contiguous())
        self.length = len(range(0, self.length + k.shape[2]))
        return [self.k[:, :, : self.length], self.v[:, :, : self.length]]

    def reset(self):
        self.k = torch.zeros_like(self.k)
        self.v = torch.zeros_like(self.v)
        self.length = 0
""",
)
right(
    "KVCache",
    "sequence first in memory, allocated at the first update",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.sizes, self.kind, self.length, self.k = (max_seq, batch, kv_heads, head_dim), (dtype, device), 0, None

    def update(self, k, v):
        start, end = self.length, self.length + k.shape[2]
        if end > self.sizes[0]:
            raise ValueError(f"KVCache.update needs at most {self.sizes[0]} rows, got {end}")
        if self.k is None:
            self.k = torch.empty(self.sizes, dtype=self.kind[0], device=self.kind[1])
            self.v = torch.empty(self.sizes, dtype=self.kind[0], device=self.kind[1])
        self.k[start:end] = k.permute(2, 0, 1, 3)
        self.v[start:end] = v.permute(2, 0, 1, 3)
        self.length = end
        return self.k[:end].permute(1, 2, 0, 3), self.v[:end].permute(1, 2, 0, 3)

    def reset(self):
        self.length = 0
""",
)

CACHE = """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.k = torch.zeros(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.length = 0

    def update(self, k, v):
        end = self.length + k.shape[2]
        if end > self.k.shape[2]:
            raise ValueError("KVCache.update: full")
        self.k[:, :, self.length : end] = k
        self.v[:, :, self.length : end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]

    def reset(self):
        self.length = 0
"""


def changed(source: str, *edits: tuple[str, str]) -> str:
    """A right answer with a few words exchanged."""
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


right("KVCache", "as in the book", CACHE)
wrong(
    "KVCache",
    "returns the new rows",
    changed(CACHE, ("self.k[:, :, :end], self.v[:, :, :end]", "k, v")),
    near_miss="new-part-only",
)
wrong(
    "KVCache",
    "list of tensors, concatenated at every update",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.max_seq, self.parts, self.length = max_seq, [], 0

    def update(self, k, v):
        if self.length + k.shape[2] > self.max_seq:
            raise ValueError("KVCache.update: full")
        self.parts.append((k.clone(), v.clone()))
        self.length += k.shape[2]
        return torch.cat([p[0] for p in self.parts], dim=2), torch.cat([p[1] for p in self.parts], dim=2)

    def reset(self):
        self.parts, self.length = [], 0
""",
    near_miss="concatenates",
)
wrong(
    "KVCache",
    "reset does nothing",
    changed(CACHE, ("    def reset(self):\n        self.length = 0", "    def reset(self):\n        pass")),
    near_miss="stale-after-reset",
)
wrong("KVCache", "one row too few", changed(CACHE, ("if end > self.k.shape[2]", "if end >= self.k.shape[2]")))
wrong("KVCache", "an IndexError", changed(CACHE, ("ValueError", "IndexError")))
wrong(
    "KVCache",
    "only checked for the first update",
    changed(CACHE, ("if end > self.k.shape[2]:", "if k.shape[2] > self.k.shape[2]:")),
)
wrong(
    "KVCache",
    "counts before it refuses",
    changed(
        CACHE,
        (
            "        if end > self.k.shape[2]:\n",
            "        start, self.length = self.length, end\n        if end > self.k.shape[2]:\n",
        ),
        ("self.k[:, :, self.length : end] = k", "self.k[:, :, start:end] = k"),
        ("self.v[:, :, self.length : end] = v", "self.v[:, :, start:end] = v"),
    ),
    near_miss="counts-before-check",
)
wrong(
    "KVCache",
    "keys and values share a buffer",
    changed(
        CACHE,
        (
            "self.v = torch.zeros(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)",
            "self.v = self.k",
        ),
    ),
)
wrong(
    "KVCache",
    "class attributes",
    """
class KVCache:
    buffers = {}

    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        key = (batch, kv_heads, max_seq, head_dim, dtype)
        if key not in self.buffers:
            self.buffers[key] = torch.zeros(2, *key[:-1], dtype=dtype, device=device)
        self.k, self.v = self.buffers[key]
        self.length = 0
"""
    + CACHE[CACHE.index("\n    def update") :],
    near_miss="shared-by-all",
)
wrong(
    "KVCache",
    "keeps the first tensor it is handed",
    changed(
        CACHE,
        (
            "        self.length = end\n",
            "        if self.length == 0:\n            self.first = k, v\n        self.length = end\n        self.k[:, :, : self.first[0].shape[2]] = self.first[0]\n        self.v[:, :, : self.first[0].shape[2]] = self.first[1]\n",
        ),
    ),
)
wrong(
    "KVCache",
    "half of the room",
    changed(
        CACHE,
        (
            "dtype=dtype, device=device)\n        self.length = 0",
            "dtype=dtype, device=device)\n        self.k = self.k[:, :, : max_seq - 1]\n        self.length = 0",
        ),
    ),
)
wrong(
    "KVCache",
    "float32 buffers",
    changed(
        CACHE,
        (
            "self.k = torch.zeros(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)",
            "self.k = torch.zeros(batch, kv_heads, max_seq, head_dim, device=device)",
        ),
    ),
)

# ---- rope_at

right(
    "rope_at",
    "arange plus start",
    """
def rope_at(x, start):
    return apply_rope(x, start + torch.arange(x.size(-2)))
""",
)
right(
    "rope_at",
    "row by row",
    """
def rope_at(x, start):
    rows = [apply_rope(x[..., i : i + 1, :], torch.tensor([start + i])) for i in range(x.shape[-2])]
    return torch.cat(rows, dim=-2)
""",
)
right(
    "rope_at",
    "complex numbers, by hand",
    """
def rope_at(x, start):
    d = x.shape[-1]
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    freq = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = torch.arange(start, start + x.shape[-2], dtype=torch.float64)[:, None] * freq
    turn = torch.polar(torch.ones_like(angle), angle)
    z = torch.view_as_complex(wide.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z * turn).flatten(-2).to(x.dtype)
""",
)
right(
    "rope_at",
    "positions broadcast to every batch dimension",
    """
def rope_at(x, start):
    positions = torch.arange(start, start + x.shape[-2], device=x.device).expand(x.shape[:-1])
    return apply_rope(x, positions)
""",
)
wrong(
    "rope_at",
    "from 0",
    "def rope_at(x, start):\n    return apply_rope(x, torch.arange(x.shape[-2]))\n",
    near_miss="starts-at-zero",
)
wrong(
    "rope_at",
    "one position for the chunk",
    "def rope_at(x, start):\n    return apply_rope(x, torch.tensor(start))\n",
    near_miss="one-position-for-all",
)
wrong(
    "rope_at",
    "one too far",
    "def rope_at(x, start):\n    return apply_rope(x, torch.arange(start + 1, start + x.shape[-2] + 1))\n",
    near_miss="counts-from-one",
)
wrong(
    "rope_at",
    "length of the wrong axis",
    "def rope_at(x, start):\n    return apply_rope(x, torch.arange(start, start + x.shape[1]))\n",
)
wrong(
    "rope_at",
    "twice",
    "def rope_at(x, start):\n    p = torch.arange(start, start + x.shape[-2])\n    return apply_rope(apply_rope(x, p), p)\n",
    near_miss="rotated-twice",
)
wrong(
    "rope_at",
    "angles in the dtype of x",
    """
def rope_at(x, start):
    d = x.shape[-1]
    freq = 10000.0 ** (-torch.arange(0, d, 2).to(x.dtype) / d)
    angle = torch.arange(start, start + x.shape[-2]).to(x.dtype)[:, None] * freq
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(-2)
""",
)
wrong(
    "rope_at",
    "other base",
    "def rope_at(x, start):\n    return apply_rope(x, torch.arange(start, start + x.shape[-2]), 1000.0)\n",
)
wrong(
    "rope_at",
    "detached",
    "def rope_at(x, start):\n    return apply_rope(x.detach(), torch.arange(start, start + x.shape[-2]))\n",
)

# ---- generate_cached

right(
    "generate_cached",
    "first call before the loop",
    """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    if max_new_tokens == 0:
        return ids
    done = [False] * len(ids)
    logits, cache = model(ids, None)
    while True:
        column = []
        for row, choice in enumerate(logits[:, -1, :].argmax(-1).tolist()):
            if done[row]:
                choice = eos_id
            done[row] = done[row] or (eos_id is not None and choice == eos_id)
            column.append([choice])
        ids = torch.cat((ids, torch.tensor(column)), dim=-1)
        max_new_tokens -= 1
        if max_new_tokens == 0 or all(done):
            return ids
        logits, cache = model(torch.tensor(column), cache)
""",
)
right(
    "generate_cached",
    "preallocated output",
    """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    batch, seq = ids.shape
    out = torch.empty(batch, seq + max_new_tokens, dtype=ids.dtype)
    out[:, :seq] = ids
    cache, read, end = None, 0, seq
    open_rows = torch.ones(batch, dtype=torch.bool)
    for _ in range(max_new_tokens):
        logits, cache = model(out[:, read:end], cache)
        read = end
        nxt = logits[:, -1].max(dim=-1).indices
        if eos_id is not None:
            nxt[~open_rows] = eos_id
            open_rows &= nxt != eos_id
        out[:, end] = nxt
        end += 1
        if not open_rows.any():
            break
    return out[:, :end]
""",
)
right(
    "generate_cached",
    "prompt token by token",
    """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    if not max_new_tokens:
        return ids.clone()
    cache = None
    for i in range(ids.shape[1]):
        logits, cache = model(ids[:, i : i + 1], cache)
    finished = torch.zeros(ids.shape[0], 1, dtype=torch.bool)
    for step in range(max_new_tokens):
        token = logits[:, -1:].argmax(-1)
        if eos_id is not None:
            token = torch.where(finished, torch.full_like(token, eos_id), token)
            finished |= token.eq(eos_id)
        ids = torch.hstack([ids, token])
        if bool(finished.all()) or step == max_new_tokens - 1:
            break
        logits, cache = model(token, cache)
    return ids
""",
)

GENERATE = """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    finished = torch.zeros(ids.shape[0], dtype=torch.bool)
    new, cache = ids, None
    for _ in range(max_new_tokens):
        logits, cache = model(new, cache)
        token = logits[:, -1].argmax(-1)
        if eos_id is not None:
            token = torch.where(finished, eos_id, token)
            finished = finished | (token == eos_id)
        new = token[:, None]
        ids = torch.cat([ids, new], dim=1)
        if finished.all():
            break
    return ids
"""
right("generate_cached", "as in the book", GENERATE)
wrong(
    "generate_cached", "eos_id 0 taken for none", changed(GENERATE, ("if eos_id is not None:", "if eos_id:"))
)
wrong(
    "generate_cached",
    "whole text, no cache",
    changed(GENERATE, ("model(new, cache)", "model(ids, None)")),
    near_miss="reads-everything-again",
)
wrong(
    "generate_cached",
    "whole text and the cache",
    changed(GENERATE, ("model(new, cache)", "model(ids, cache)")),
    near_miss="prefix-and-cache",
)
wrong(
    "generate_cached",
    "first cache for ever",
    changed(
        GENERATE,
        (
            "logits, cache = model(new, cache)",
            "logits, newer = model(new, cache)\n        cache = newer if cache is None else cache",
        ),
    ),
    near_miss="keeps-the-first-cache",
)
wrong(
    "generate_cached",
    "first logits",
    changed(GENERATE, ("logits[:, -1]", "logits[:, 0]")),
    near_miss="first-row-of-logits",
)
wrong("generate_cached", "any for all", changed(GENERATE, ("finished.all()", "finished.any()")))
wrong(
    "generate_cached",
    "no fill",
    changed(GENERATE, ("            token = torch.where(finished, eos_id, token)\n", "")),
    near_miss="goes-on-after-eos",
)
wrong(
    "generate_cached",
    "new tokens only",
    changed(GENERATE, ("    return ids\n", "    return ids[:, -max_new_tokens:]\n")),
)
wrong(
    "generate_cached",
    "stops before the last EOS is written",
    changed(
        GENERATE,
        (
            "        new = token[:, None]\n        ids = torch.cat([ids, new], dim=1)\n        if finished.all():\n            break\n",
            "        if finished.all():\n            break\n        new = token[:, None]\n        ids = torch.cat([ids, new], dim=1)\n",
        ),
    ),
)
wrong(
    "generate_cached",
    "one token too many through the model",
    changed(GENERATE, ("    return ids\n", "    model(new, cache)\n    return ids\n")),
)
wrong(
    "generate_cached",
    "never stops early",
    changed(GENERATE, ("        if finished.all():\n            break\n", "")),
    near_miss="stops-at-nothing",
)
wrong(
    "generate_cached",
    "first row decides",
    changed(
        GENERATE,
        (
            "        new = token[:, None]",
            "        token = token[:1].expand(len(ids))\n        new = token[:, None]",
        ),
    ),
)

# ---- positions_from_padding

right(
    "positions_from_padding",
    "column minus padding",
    "def positions_from_padding(real):\n    pad = (~real).sum(dim=1, keepdim=True)\n    return torch.arange(real.shape[1])[None, :] - pad\n",
)
right(
    "positions_from_padding",
    "argmax finds the first real token",
    "def positions_from_padding(real):\n    first = real.int().argmax(dim=1)\n    return (torch.arange(real.shape[1]) - first[:, None]).clamp_min(0)\n",
)
right(
    "positions_from_padding",
    "loop, minus one on padding",
    """
def positions_from_padding(real):
    out = torch.full(real.shape, -1, dtype=torch.int64)
    for i, row in enumerate(real.tolist()):
        n = 0
        for j, there in enumerate(row):
            if there:
                out[i, j] = n
                n += 1
    return out
""",
)
right(
    "positions_from_padding",
    "cumsum, ones on padding as Hugging Face does",
    "def positions_from_padding(real):\n    p = real.long().cumsum(-1) - 1\n    return p.masked_fill(~real, 1)\n",
)
wrong(
    "positions_from_padding",
    "padding counts",
    "def positions_from_padding(real):\n    return torch.arange(real.shape[1]).repeat(real.shape[0], 1)\n",
    near_miss="ignores-padding",
)
wrong(
    "positions_from_padding",
    "from one",
    "def positions_from_padding(real):\n    return real.long().cumsum(1)\n",
    near_miss="counts-from-one",
)
wrong(
    "positions_from_padding",
    "first row for all",
    "def positions_from_padding(real):\n    return (real[0].long().cumsum(0) - 1).repeat(real.shape[0], 1)\n",
    near_miss="shared-across-the-batch",
)
wrong(
    "positions_from_padding",
    "int32",
    "def positions_from_padding(real):\n    return (real.int().cumsum(-1) - 1).int()\n",
)
wrong(
    "positions_from_padding",
    "over the batch axis",
    "def positions_from_padding(real):\n    return real.long().cumsum(0) - 1\n",
)
wrong(
    "positions_from_padding",
    "one dimension",
    "def positions_from_padding(real):\n    return (real.long().cumsum(-1) - 1).flatten()\n",
)

# ---- decode_intensity

INTENSITY = """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = heads * head_dim
    w = 2 * d**2 + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    flops = batch * layers * (2 * w + 4 * seq * d)
    moved = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return flops, moved, flops / moved
"""
right("decode_intensity", "as in the book", INTENSITY)
right(
    "decode_intensity",
    "floats in a list",
    changed(
        INTENSITY,
        ("return flops, moved, flops / moved", "return [float(flops), float(moved), flops / moved]"),
    ),
)
right(
    "decode_intensity",
    "layer by layer",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    flops = moved = 0
    d, kv = heads * head_dim, kv_heads * head_dim
    for _ in range(layers):
        for rows, columns in ((d, d), (d, kv), (d, kv), (d, d), (d, d_ff), (d_ff, d)):
            flops += 2 * batch * rows * columns
            moved += rows * columns * bytes_per_element
        flops += batch * heads * 2 * (2 * seq * head_dim)
        moved += 2 * batch * kv_heads * seq * head_dim * bytes_per_element
    return flops, moved, flops / moved
""",
)
wrong(
    "decode_intensity",
    "query heads cached",
    changed(INTENSITY, ("2 * batch * seq * kv_heads * head_dim)", "2 * batch * seq * d)")),
    near_miss="query-heads-in-the-cache",
)
wrong(
    "decode_intensity",
    "prefill",
    changed(INTENSITY, ("flops = batch * layers", "flops = batch * seq * layers")),
    near_miss="prefill",
)
wrong(
    "decode_intensity", "two bytes for ever", changed(INTENSITY, ("moved = bytes_per_element", "moved = 2"))
)
wrong(
    "decode_intensity",
    "weights once per sequence",
    changed(INTENSITY, ("layers * (w + 2 * batch * seq", "layers * batch * (w + 2 * seq")),
    near_miss="weights-per-sequence",
)
wrong("decode_intensity", "one feed-forward matrix", changed(INTENSITY, ("2 * d * d_ff", "d * d_ff")))
wrong("decode_intensity", "whole FLOPs per byte", changed(INTENSITY, ("flops / moved\n", "flops // moved\n")))
wrong(
    "decode_intensity",
    "only two numbers",
    changed(INTENSITY, ("return flops, moved, flops / moved", "return flops, moved")),
)

# ---- kv_cache_bytes

right(
    "kv_cache_bytes",
    "loop over factors",
    "def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):\n    n = 2\n    for factor in (batch, seq, layers, kv_heads, head_dim, bytes_per_element):\n        n *= factor\n    return n\n",
)
right(
    "kv_cache_bytes",
    "math.prod, as a float",
    "def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):\n    return float(math.prod([batch, seq, layers, kv_heads, head_dim, 2])) * bytes_per_element\n",
)
right(
    "kv_cache_bytes",
    "bits",
    "def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):\n    bits = 8 * bytes_per_element\n    return 2 * batch * seq * layers * kv_heads * head_dim * bits / 8\n",
)
wrong(
    "kv_cache_bytes",
    "the lecture's formula in FP16 only",
    "def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):\n    return 2 * 2 * batch * seq * layers * kv_heads * head_dim\n",
    near_miss="always-fp16",
)
wrong(
    "kv_cache_bytes",
    "keys only",
    "def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):\n    return batch * seq * layers * kv_heads * head_dim * bytes_per_element\n",
    near_miss="one-of-two",
)
wrong(
    "kv_cache_bytes",
    "default of 4",
    "def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=4):\n    return 2 * batch * seq * layers * kv_heads * head_dim * bytes_per_element\n",
)
wrong(
    "kv_cache_bytes",
    "int of the width",
    "def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):\n    return 2 * batch * seq * layers * kv_heads * head_dim * max(1, round(bytes_per_element))\n",
)
wrong(
    "kv_cache_bytes",
    "elements",
    "def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):\n    return 2 * batch * seq * layers * kv_heads * head_dim\n",
    near_miss="elements",
)
wrong(
    "kv_cache_bytes",
    "megabytes",
    "def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):\n    return 2 * batch * seq * layers * kv_heads * head_dim * bytes_per_element / 1e6\n",
)

# ---- grouped_query_attention

right(
    "grouped_query_attention",
    "fused",
    """
def grouped_query_attention(q, k, v):
    n, m = q.shape[2], k.shape[2]
    mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
""",
)
right(
    "grouped_query_attention",
    "loop over query heads",
    """
def grouped_query_attention(q, k, v):
    group = q.shape[1] // k.shape[1]
    n, m = q.shape[2], k.shape[2]
    mask = torch.full((n, m), -math.inf, dtype=q.dtype).triu(m - n + 1)
    heads = []
    for h in range(q.shape[1]):
        s = q[:, h] @ k[:, h // group].mT / math.sqrt(q.shape[-1]) + mask
        heads.append(s.softmax(-1) @ v[:, h // group])
    return torch.stack(heads, dim=1)
""",
)
right(
    "grouped_query_attention",
    "grouped einsum without a copy",
    """
def grouped_query_attention(q, k, v):
    b, h, n, d = q.shape
    g, m = k.shape[1], k.shape[2]
    s = torch.einsum("bgrqd,bgkd->bgrqk", q.reshape(b, g, h // g, n, d), k).float() * d**-0.5 if q.dtype != torch.float64 else torch.einsum("bgrqd,bgkd->bgrqk", q.reshape(b, g, h // g, n, d), k) * d**-0.5
    s = s.masked_fill(torch.arange(m) > torch.arange(m - n, m)[:, None], float("-inf"))
    return torch.einsum("bgrqk,bgkd->bgrqd", s.softmax(-1).to(v.dtype), v).reshape(b, h, n, v.shape[-1])
""",
)
GQA = """
def grouped_query_attention(q, k, v):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    n, m = q.shape[2], k.shape[2]
    s = (q @ k.mT) / math.sqrt(q.shape[-1])
    s = s.masked_fill(~torch.ones(n, m, dtype=torch.bool).tril(m - n), -torch.inf)
    return s.softmax(-1) @ v
"""
wrong(
    "grouped_query_attention",
    "repeat",
    changed(
        GQA,
        (
            "k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)",
            "k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)",
        ),
    ),
    near_miss="repeat-for-repeat-interleave",
)
wrong(
    "grouped_query_attention",
    "square mask",
    changed(GQA, (".tril(m - n)", ".tril()")),
    near_miss="top-left-mask",
)
wrong(
    "grouped_query_attention",
    "no mask",
    changed(
        GQA, ("    s = s.masked_fill(~torch.ones(n, m, dtype=torch.bool).tril(m - n), -torch.inf)\n", "")
    ),
    near_miss="no-mask",
)
wrong(
    "grouped_query_attention",
    "values repeated otherwise",
    changed(GQA, ("v.repeat_interleave(group, dim=1)", "v.repeat(1, group, 1, 1)")),
    near_miss="keys-shared-values-not",
)
wrong("grouped_query_attention", "unscaled", changed(GQA, (" / math.sqrt(q.shape[-1])", "")))
wrong(
    "grouped_query_attention",
    "scaled by the width of the values",
    changed(GQA, ("math.sqrt(q.shape[-1])", "math.sqrt(v.shape[-1])")),
)
wrong(
    "grouped_query_attention",
    "mixes up the batch",
    changed(GQA, ("return s.softmax(-1) @ v", "return s.softmax(-1) @ v[:1]")),
)
wrong(
    "grouped_query_attention",
    "no gradient to the values",
    changed(GQA, ("return s.softmax(-1) @ v", "return s.softmax(-1) @ v.detach()")),
)

# ---- mha_to_gqa

right(
    "mha_to_gqa",
    "split and stack",
    "def mha_to_gqa(w, heads, kv_heads):\n    parts = w.split(w.shape[1] // heads, dim=1)\n    n = heads // kv_heads\n    return torch.cat([torch.stack(parts[i * n : (i + 1) * n]).mean(0) for i in range(kv_heads)], dim=1)\n",
)
right(
    "mha_to_gqa",
    "pooling matrix",
    "def mha_to_gqa(w, heads, kv_heads):\n    n, dim = heads // kv_heads, w.shape[1] // heads\n    pool = torch.eye(kv_heads, dtype=w.dtype).repeat_interleave(n, 0) / n\n    return w @ torch.kron(pool, torch.eye(dim, dtype=w.dtype))\n",
)
right(
    "mha_to_gqa",
    "view from the right",
    "def mha_to_gqa(w, heads, kv_heads):\n    return w.reshape(w.shape[0], kv_heads, -1, w.shape[1] // heads).float().mean(-2).flatten(1).to(w.dtype) if w.dtype != torch.float64 else w.reshape(w.shape[0], kv_heads, -1, w.shape[1] // heads).mean(-2).flatten(1)\n",
)
wrong(
    "mha_to_gqa",
    "first head",
    "def mha_to_gqa(w, heads, kv_heads):\n    return w.reshape(w.shape[0], kv_heads, heads // kv_heads, -1)[:, :, 0].flatten(1)\n",
    near_miss="keeps-the-first-head",
)
wrong(
    "mha_to_gqa",
    "heads far apart",
    "def mha_to_gqa(w, heads, kv_heads):\n    return w.reshape(w.shape[0], heads // kv_heads, kv_heads, -1).mean(1).flatten(1)\n",
    near_miss="distant-heads",
)
wrong(
    "mha_to_gqa",
    "sum",
    "def mha_to_gqa(w, heads, kv_heads):\n    return w.reshape(w.shape[0], kv_heads, heads // kv_heads, -1).sum(2).flatten(1)\n",
    near_miss="sum",
)
wrong(
    "mha_to_gqa",
    "rows for columns",
    "def mha_to_gqa(w, heads, kv_heads):\n    return w.T.reshape(w.shape[0], kv_heads, heads // kv_heads, -1).mean(2).flatten(1)\n",
)
wrong(
    "mha_to_gqa",
    "always pairs",
    "def mha_to_gqa(w, heads, kv_heads):\n    dim = w.shape[1] // heads\n    return w.reshape(w.shape[0], -1, 2, dim).mean(2).flatten(1)\n",
)
wrong(
    "mha_to_gqa",
    "detached",
    "def mha_to_gqa(w, heads, kv_heads):\n    return w.detach().reshape(w.shape[0], kv_heads, heads // kv_heads, -1).mean(2).flatten(1)\n",
)
wrong(
    "mha_to_gqa",
    "float32",
    "def mha_to_gqa(w, heads, kv_heads):\n    return w.float().reshape(w.shape[0], kv_heads, heads // kv_heads, -1).mean(2).flatten(1)\n",
)

# ---- RollingKVCache

ROLLING = """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.k = torch.zeros(batch, kv_heads, window, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.window, self.length = window, 0

    def update(self, k, v):
        for i in range(k.shape[2]):
            slot = self.length % self.window
            self.k[:, :, slot], self.v[:, :, slot] = k[:, :, i], v[:, :, i]
            self.length += 1
        positions = torch.arange(max(0, self.length - self.window), self.length)
        order = positions % self.window
        return self.k[:, :, order], self.v[:, :, order], positions

    def reset(self):
        self.length = 0
"""
right("RollingKVCache", "a ring, row by row", ROLLING)
right(
    "RollingKVCache",
    "a list of rows",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.window, self.dtype = window, dtype
        self.rows, self.length = [], 0

    def update(self, k, v):
        for i in range(k.shape[2]):
            self.rows.append((self.length, k[:, :, i].clone(), v[:, :, i].clone()))
            self.length += 1
        self.rows = self.rows[-self.window :]
        return (
            torch.stack([r[1] for r in self.rows], dim=2),
            torch.stack([r[2] for r in self.rows], dim=2),
            torch.tensor([r[0] for r in self.rows]),
        )

    def reset(self):
        self.rows, self.length = [], 0
""",
)
right(
    "RollingKVCache",
    "shifts the buffer, copies what it returns",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.kv = torch.zeros(2, batch, kv_heads, window, head_dim, dtype=dtype, device=device)
        self.seen = 0
        self.window = window

    length = property(lambda self: self.seen)

    def update(self, k, v):
        both = torch.stack([k, v])[..., -self.window :, :]
        n = both.shape[3]
        self.kv = torch.cat([self.kv[:, :, :, n:], both], dim=3)
        self.seen += k.shape[2]
        rows = min(self.seen, self.window)
        keys, values = self.kv[:, :, :, self.window - rows :].clone()
        return keys, values, torch.arange(self.seen)[-rows:]

    def reset(self):
        self.seen = 0
""",
)
wrong(
    "RollingKVCache",
    "positions in the window",
    changed(ROLLING, ("self.v[:, :, order], positions", "self.v[:, :, order], torch.arange(len(positions))")),
    near_miss="position-in-the-window",
)
wrong(
    "RollingKVCache",
    "order of the ring",
    changed(
        ROLLING,
        (
            "order = positions % self.window",
            "positions = positions[(positions % self.window).argsort()]\n        order = positions % self.window",
        ),
    ),
    near_miss="order-of-storage",
)
wrong(
    "RollingKVCache",
    "reset forgets nothing",
    changed(
        ROLLING,
        (
            "    def reset(self):\n        self.length = 0",
            "    def reset(self):\n        self.k.zero_()\n        self.v.zero_()",
        ),
    ),
    near_miss="cleared-but-counted",
)
wrong(
    "RollingKVCache",
    "window plus one",
    changed(
        ROLLING, ("self.window, self.length = window, 0", "self.window, self.length = window - 1 or 1, 0")
    ),
)
wrong(
    "RollingKVCache",
    "chunks written at once, wrong when longer than the window",
    changed(
        ROLLING,
        (
            """        for i in range(k.shape[2]):
            slot = self.length % self.window
            self.k[:, :, slot], self.v[:, :, slot] = k[:, :, i], v[:, :, i]
            self.length += 1
""",
            """        n = min(k.shape[2], self.window)
        slots = torch.arange(self.length, self.length + n) % self.window
        self.k[:, :, slots], self.v[:, :, slots] = k[:, :, :n], v[:, :, :n]
        self.length += k.shape[2]
""",
        ),
    ),
)
wrong(
    "RollingKVCache",
    "length of the rows",
    changed(
        ROLLING,
        (
            "        return self.k[:, :, order]",
            "        self.length = min(self.length, self.window)\n        return self.k[:, :, order]",
        ),
    ),
    near_miss="rows-kept-as-length",
)
wrong(
    "RollingKVCache",
    "views until the ring is full",
    changed(
        ROLLING,
        (
            "        order = positions",
            "        if self.length <= self.window:\n            return self.k[:, :, : self.length], self.v[:, :, : self.length], positions\n        order = positions",
        ),
    ),
    near_miss="views-of-the-ring",
)
wrong(
    "RollingKVCache",
    "keeps every row",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.window = window
        self.empty = torch.zeros(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.reset()

    def update(self, k, v):
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        first = max(0, self.length - self.window)
        return self.k[:, :, first:], self.v[:, :, first:], torch.arange(first, self.length)

    @property
    def length(self):
        return self.k.shape[2]

    def reset(self):
        self.k = self.v = self.empty
""",
    near_miss="keeps-everything",
)
wrong(
    "RollingKVCache",
    "int32 positions",
    changed(
        ROLLING,
        (
            "torch.arange(max(0, self.length - self.window), self.length)",
            "torch.arange(max(0, self.length - self.window), self.length, dtype=torch.int32)",
        ),
    ),
)

# ---- quantize_kv

BACK = """

def dequantize_kv(q, scale):
    return q.to(scale.dtype) * scale
"""
right(
    "quantize_kv",
    "norm, clamp and torch.where",
    """
def quantize_kv(x):
    scale = torch.linalg.vector_norm(x, ord=torch.inf, dim=-1, keepdim=True) / 127
    q = torch.where(scale > 0, x / scale, torch.zeros_like(x))
    return torch.clamp(torch.round(q), -127, 127).to(torch.int8), scale


def dequantize_kv(q, scale):
    return torch.mul(scale, q)
""",
)
right(
    "quantize_kv",
    "scale one for empty rows, in float64",
    """
def quantize_kv(x):
    wide = x.double()
    scale = wide.abs().max(dim=-1, keepdim=True).values / 127
    scale = scale.masked_fill(scale == 0, 1.0)
    return torch.floor(wide / scale + 0.5).clamp(-127, 127).to(torch.int8), scale.to(x.dtype)


def dequantize_kv(q, scale):
    return (q.double() * scale.double()).to(scale.dtype)
""",
)
right(
    "quantize_kv",
    "largest of maximum and minus minimum",
    """
def quantize_kv(x):
    top = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))
    scale = torch.clamp(top / 127, min=torch.finfo(x.dtype).tiny)
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale
"""
    + BACK,
)
QUANTIZE = """
def quantize_kv(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    q = (x / scale.clamp(min=1e-7)).round().clamp(-127, 127)
    return q.to(torch.int8), scale

def dequantize_kv(q, scale):
    return q.to(scale.dtype) * scale
"""
right("quantize_kv", "native arithmetic", QUANTIZE)
wrong(
    "quantize_kv",
    "one scale",
    changed(
        QUANTIZE, ("x.abs().amax(-1, keepdim=True) / 127", "(x.abs().amax() / 127).expand(*x.shape[:-1], 1)")
    ),
    near_miss="one-scale-for-all",
)
wrong(
    "quantize_kv",
    "one scale per head",
    changed(
        QUANTIZE,
        (
            "x.abs().amax(-1, keepdim=True) / 127",
            "(x.abs().amax((-1, -2), keepdim=True) / 127).expand(*x.shape[:-1], 1)",
        ),
    ),
    near_miss="one-scale-per-head",
)
wrong("quantize_kv", "no rounding", changed(QUANTIZE, (".round()", "")), near_miss="cuts-off")
wrong("quantize_kv", "no abs", changed(QUANTIZE, ("x.abs().amax", "x.amax")))
wrong(
    "quantize_kv",
    "scale squeezed",
    changed(QUANTIZE, ("return q.to(torch.int8), scale", "return q.to(torch.int8), scale[..., 0]")),
    near_miss="scale-without-axis",
)
wrong("quantize_kv", "int16", changed(QUANTIZE, ("q.to(torch.int8)", "q.to(torch.int16)")))
wrong(
    "quantize_kv",
    "float32 comes back",
    changed(QUANTIZE, ("return q.to(scale.dtype) * scale", "return q.float() * scale.float()")),
    near_miss="back-in-float32",
)
wrong("quantize_kv", "a step twice as wide", changed(QUANTIZE, ("/ 127", "/ 63")))
wrong(
    "quantize_kv",
    "scale per channel",
    changed(QUANTIZE, ("x.abs().amax(-1, keepdim=True)", "x.abs().amax(-2, keepdim=True)")),
)
wrong(
    "quantize_kv",
    "no way back for the gradient",
    changed(QUANTIZE, ("return q.to(scale.dtype) * scale", "return q.to(scale.dtype) * scale.detach()")),
)

# ---- PagedKVCache

PAGED = """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.size = page_size
        self.k = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.pool, self.table, self.count = list(range(pages)), {}, {}

    @property
    def free_pages(self):
        return len(self.pool)

    def append(self, sequence, k, v):
        start = self.count.get(sequence, 0)
        end = start + k.shape[1]
        need = math.ceil(end / self.size) - math.ceil(start / self.size)
        if need > len(self.pool):
            raise ValueError("PagedKVCache.append: no page left")
        self.table.setdefault(sequence, []).extend(self.pool.pop() for _ in range(need))
        for i in range(start, end):
            page = self.table[sequence][i // self.size]
            self.k[page, :, i % self.size] = k[:, i - start]
            self.v[page, :, i % self.size] = v[:, i - start]
        self.count[sequence] = end

    def gather(self, sequence):
        n = self.count[sequence]
        keys = self.k[self.table[sequence]].transpose(0, 1).flatten(1, 2)
        values = self.v[self.table[sequence]].transpose(0, 1).flatten(1, 2)
        return keys[:, :n], values[:, :n]

    def free(self, sequence):
        self.pool.extend(self.table.pop(sequence))
        del self.count[sequence]
"""
right("PagedKVCache", "block table and loop", PAGED)
right(
    "PagedKVCache",
    "owner of each page in a tensor, free_pages counted by hand",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.flat = torch.empty(2, kv_heads, pages * page_size, head_dim, dtype=dtype, device=device)
        self.page_size, self.free_pages = page_size, pages
        self.used = [False] * pages
        self.slots = {}

    def append(self, sequence, k, v):
        slots = self.slots.get(sequence, [])
        room = -len(slots) % self.page_size
        need = max(0, -(-(k.shape[1] - room) // self.page_size))
        if need > self.free_pages:
            raise ValueError(f"PagedKVCache.append needs {need} pages, has {self.free_pages}")
        new = [slots[-1] + 1 + i for i in range(min(room, k.shape[1]))]
        for page in [p for p, used in enumerate(self.used) if not used][:need]:
            self.used[page] = True
            new += range(page * self.page_size, (page + 1) * self.page_size)
        new = new[: k.shape[1]]
        self.free_pages -= need
        self.flat[0][:, new], self.flat[1][:, new] = k, v
        self.slots[sequence] = slots + new

    def gather(self, sequence):
        keys, values = self.flat[:, :, self.slots[sequence]]
        return keys, values

    def free(self, sequence):
        for page in {s // self.page_size for s in self.slots.pop(sequence)}:
            self.used[page] = False
            self.free_pages += 1
""",
)
right(
    "PagedKVCache",
    "pages as separate tensors",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        make = lambda: torch.zeros(2, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.pool = [make() for _ in range(pages)]
        self.page_size = page_size
        self.sequences = {}

    free_pages = property(lambda self: len(self.pool))

    def append(self, sequence, k, v):
        pages, length = self.sequences.get(sequence, ([], 0))
        need = -(-(length + k.shape[1]) // self.page_size) - len(pages)
        if need > len(self.pool):
            raise ValueError("PagedKVCache.append: out of pages")
        pages = pages + [self.pool.pop(0) for _ in range(need)]
        new = torch.stack([k, v])
        done = 0
        while done < k.shape[1]:
            page, row = divmod(length + done, self.page_size)
            step = min(self.page_size - row, k.shape[1] - done)
            pages[page][:, :, row : row + step] = new[:, :, done : done + step]
            done += step
        self.sequences[sequence] = pages, length + done

    def gather(self, sequence):
        pages, length = self.sequences[sequence]
        return tuple(torch.cat(pages, dim=2)[:, :, :length])

    def free(self, sequence):
        pages, _ = self.sequences.pop(sequence)
        self.pool += pages
""",
)
wrong(
    "PagedKVCache",
    "pages lost",
    changed(PAGED, ("self.pool.extend(self.table.pop(sequence))", "self.table.pop(sequence)")),
    near_miss="pages-never-come-back",
)
wrong(
    "PagedKVCache",
    "whole pages",
    changed(PAGED, ("return keys[:, :n], values[:, :n]", "return keys, values")),
    near_miss="whole-pages",
)
wrong(
    "PagedKVCache",
    "contiguous pages",
    changed(
        PAGED,
        ("self.k[self.table[sequence]]", "self.k[self.table[sequence][0] :]"),
        ("self.v[self.table[sequence]]", "self.v[self.table[sequence][0] :]"),
    ),
)
wrong(
    "PagedKVCache",
    "refuses while there is room in the last page",
    changed(
        PAGED,
        (
            "math.ceil(end / self.size) - math.ceil(start / self.size)\n        if need > len(self.pool)",
            "math.ceil(end / self.size) - math.ceil(start / self.size)\n        if math.ceil(k.shape[1] / self.size) > len(self.pool)",
        ),
    ),
    near_miss="ignores-room-in-the-last-page",
)
wrong("PagedKVCache", "MemoryError", changed(PAGED, ("ValueError", "MemoryError")))
wrong(
    "PagedKVCache",
    "takes pages one by one until there is none",
    changed(
        PAGED,
        (
            """        if need > len(self.pool):
            raise ValueError("PagedKVCache.append: no page left")
        self.table.setdefault(sequence, []).extend(self.pool.pop() for _ in range(need))
""",
            """        for _ in range(need):
            if not self.pool:
                raise ValueError("PagedKVCache.append: no page left")
            self.table.setdefault(sequence, []).append(self.pool.pop())
""",
        ),
    ),
)
wrong("PagedKVCache", "old tokens after free", changed(PAGED, ("        del self.count[sequence]\n", "")))
wrong(
    "PagedKVCache",
    "ids are indices",
    changed(
        PAGED,
        ("{}, {}\n", "[[] for _ in range(pages)], [0] * pages\n"),
        ("self.count.get(sequence, 0)", "self.count[sequence]"),
        ("self.table.setdefault(sequence, []).extend", "self.table[sequence].extend"),
        (
            "self.table.pop(sequence))\n        del self.count[sequence]",
            "self.table[sequence])\n        self.table[sequence], self.count[sequence] = [], 0",
        ),
    ),
)
wrong(
    "PagedKVCache",
    "tables of the class",
    changed(
        PAGED,
        ("class PagedKVCache:\n", "class PagedKVCache:\n    table, count = {}, {}\n\n"),
        ("self.pool, self.table, self.count = list(range(pages)), {}, {}", "self.pool = list(range(pages))"),
    ),
)
wrong(
    "PagedKVCache",
    "values are keys",
    changed(
        PAGED,
        (
            "self.v[page, :, i % self.size] = v[:, i - start]",
            "self.v[page, :, i % self.size] = k[:, i - start]",
        ),
    ),
)
wrong(
    "PagedKVCache",
    "a view when one page is enough",
    changed(
        PAGED,
        (
            "        keys = self.k[self",
            "        if len(self.table[sequence]) == 1:\n            page = self.table[sequence][0]\n            return self.k[page, :, :n], self.v[page, :, :n]\n        keys = self.k[self",
        ),
    ),
    near_miss="views-of-pages",
)

# ---- slips after reset

wrong(
    "KVCache",
    "float32 after reset",
    changed(
        CACHE,
        (
            "    def reset(self):\n        self.length = 0",
            "    def reset(self):\n        self.k, self.v = torch.zeros(self.k.shape), torch.zeros(self.v.shape)\n        self.length = 0",
        ),
    ),
)
wrong(
    "RollingKVCache",
    "float32 after reset",
    changed(
        ROLLING,
        (
            "    def reset(self):\n        self.length = 0",
            "    def reset(self):\n        self.k, self.v = torch.zeros(self.k.shape), torch.zeros(self.v.shape)\n        self.length = 0",
        ),
    ),
)

# ---- a second stranger: what slipped through or went unnamed, and other styles

right(
    "cached_attention",
    "early return for one query, -1e9 in float32 for more",
    """
def cached_attention(q, k, v):
    d = q.shape[-1]
    s = (q / math.sqrt(d)) @ k.mT
    s = s.float() if s.dtype != torch.float64 else s
    if q.shape[-2] == 1:
        return s.softmax(-1).to(v.dtype) @ v
    i = torch.arange(q.shape[-2])[:, None] + (k.shape[-2] - q.shape[-2])
    s = torch.where(torch.arange(k.shape[-2])[None] <= i, s, torch.tensor(-1e9, dtype=s.dtype))
    return s.softmax(-1).to(v.dtype) @ v
""",
)
right(
    "cached_attention",
    "torch's half precision softmax",
    """
def cached_attention(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    add = torch.full((n, m), -math.inf, dtype=q.dtype).triu(m - n + 1)
    return F.softmax(q @ k.mT / math.sqrt(q.shape[-1]) + add, dim=-1) @ v
""",
)
wrong(
    "cached_attention",
    "prompt or one token, no chunks",
    """
def cached_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[-2] > 1)
""",
    near_miss="square-mask-for-several",
)
wrong(
    "cached_attention",
    "one key too many",
    """
def cached_attention(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    s = (q @ k.mT) / math.sqrt(q.shape[-1])
    keep = torch.ones(n, m, dtype=torch.bool).tril(m - n + 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    return F.softmax(s.to(wide).masked_fill(~keep, -math.inf), -1).to(v.dtype) @ v
""",
    near_miss="sees-one-ahead",
)
wrong(
    "cached_attention",
    "scaled with d_v",
    """
def cached_attention(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    s = (q @ k.mT) / math.sqrt(v.shape[-1])
    keep = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    wide = torch.promote_types(q.dtype, torch.float32)
    return F.softmax(s.to(wide).masked_fill(~keep, -math.inf), -1).to(v.dtype) @ v
""",
    near_miss="scaled-by-d-v",
)
wrong(
    "cached_attention",
    "no scale",
    """
def cached_attention(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    s = (q @ k.mT)
    keep = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    wide = torch.promote_types(q.dtype, torch.float32)
    return F.softmax(s.to(wide).masked_fill(~keep, -math.inf), -1).to(v.dtype) @ v
""",
    near_miss="unscaled",
)
wrong(
    "cached_attention",
    "softmax over the queries",
    """
def cached_attention(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    s = (q @ k.mT) / math.sqrt(q.shape[-1])
    keep = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    wide = torch.promote_types(q.dtype, torch.float32)
    return F.softmax(s.to(wide).masked_fill(~keep, -math.inf), -2).nan_to_num(0).to(v.dtype) @ v
""",
    near_miss="over-queries",
)
wrong(
    "cached_attention",
    "mask after the softmax",
    """
def cached_attention(q, k, v):
    n, m = q.shape[-2], k.shape[-2]
    s = (q @ k.mT) / math.sqrt(q.shape[-1])
    keep = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    wide = torch.promote_types(q.dtype, torch.float32)
    return (F.softmax(s.to(wide), -1) * keep).to(v.dtype) @ v
""",
    near_miss="mask-after-softmax",
)
right(
    "KVCache",
    "copies returned, index_copy_",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        make = lambda: torch.zeros(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.keys, self.values = make(), make()
        self.reset()

    def reset(self):
        self.length = 0

    def update(self, k, v):
        spots = torch.arange(self.length, self.length + k.shape[2], device=self.keys.device)
        if spots.numel() and int(spots[-1]) >= self.keys.shape[2]:
            raise ValueError("does not fit")
        self.keys.index_copy_(2, spots, k.detach())
        self.values.index_copy_(2, spots, v.detach())
        self.length = self.length + k.shape[2]
        return self.keys[:, :, :self.length].clone(), self.values[:, :, :self.length].clone()
""",
)
right(
    "KVCache",
    "dataclass for one half",
    """
from dataclasses import dataclass

@dataclass
class _Half:
    data: Tensor

    def put(self, x, at):
        self.data[:, :, at:at + x.shape[2]].copy_(x)
        return self.data[:, :, :at + x.shape[2]]

class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        def room():
            return torch.empty((batch, kv_heads, max_seq, head_dim), dtype=dtype, device=device)
        self.halves = [_Half(room()), _Half(room())]
        self.free = max_seq
        self.max_seq = max_seq

    @property
    def length(self):
        return self.max_seq - self.free

    def update(self, k, v):
        n = k.shape[2]
        if n > self.free:
            raise ValueError(f"{n} new tokens, room for {self.free}")
        at = self.length
        out = [h.put(x, at) for h, x in zip(self.halves, (k, v))]
        self.free -= n
        return out[0], out[1]

    def reset(self):
        self.free = self.max_seq
""",
)
right(
    "KVCache",
    "rows past the end written before the check, never to be seen",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.k = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.v = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.max_seq = max_seq
        self.length = 0

    def update(self, k, v):
        end = self.length + k.shape[2]
        room = self.max_seq - self.length
        self.k[:, :, self.length:end] = k[:, :, :room]
        if end > self.max_seq:
            raise ValueError("no room")
        self.v[:, :, self.length:end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]

    def reset(self):
        self.length = 0
""",
)
wrong(
    "KVCache",
    "an overflow resets",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.k = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.v = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.max_seq = max_seq
        self.length = 0

    def update(self, k, v):
        end = self.length + k.shape[2]
        if end > self.max_seq:
            self.length = 0
            raise ValueError(f"no room: {end} > {self.max_seq}")
        self.k[:, :, self.length:end] = k
        self.v[:, :, self.length:end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]

    def reset(self):
        self.length = 0
""",
    near_miss="refusal-forgets-all",
)
wrong(
    "KVCache",
    "overflow is cut off",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.k = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.v = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.max_seq = max_seq
        self.length = 0

    def update(self, k, v):
        end = self.length + k.shape[2]
        if end > self.max_seq:
            k, v, end = k[:, :, :self.max_seq - self.length], v[:, :, :self.max_seq - self.length], self.max_seq
        self.k[:, :, self.length:end] = k
        self.v[:, :, self.length:end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]

    def reset(self):
        self.length = 0
""",
    near_miss="drops-overflow",
)
wrong(
    "KVCache",
    "the last place is refused",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.k = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.v = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.max_seq = max_seq
        self.length = 0

    def update(self, k, v):
        end = self.length + k.shape[2]
        if end >= self.max_seq:
            raise ValueError(f"no room: {end} > {self.max_seq}")
        self.k[:, :, self.length:end] = k
        self.v[:, :, self.length:end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]

    def reset(self):
        self.length = 0
""",
    near_miss="last-row-refused",
)
wrong(
    "KVCache",
    "the whole buffer comes back",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.k = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.v = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.max_seq = max_seq
        self.length = 0

    def update(self, k, v):
        end = self.length + k.shape[2]
        if end > self.max_seq:
            raise ValueError(f"no room: {end} > {self.max_seq}")
        self.k[:, :, self.length:end] = k
        self.v[:, :, self.length:end] = v
        self.length = end
        return self.k, self.v

    def reset(self):
        self.length = 0
""",
    near_miss="whole-buffer",
)
wrong(
    "KVCache",
    "keys and values swapped on the way out",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.k = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.v = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.max_seq = max_seq
        self.length = 0

    def update(self, k, v):
        end = self.length + k.shape[2]
        if end > self.max_seq:
            raise ValueError(f"no room: {end} > {self.max_seq}")
        self.k[:, :, self.length:end] = k
        self.v[:, :, self.length:end] = v
        self.length = end
        return self.v[:, :, :end], self.k[:, :, :end]

    def reset(self):
        self.length = 0
""",
    near_miss="keys-and-values-swapped",
)
wrong(
    "KVCache",
    "values read from the keys' buffer",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.k = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.v = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.max_seq = max_seq
        self.length = 0

    def update(self, k, v):
        end = self.length + k.shape[2]
        if end > self.max_seq:
            raise ValueError(f"no room: {end} > {self.max_seq}")
        self.k[:, :, self.length:end] = k
        self.v[:, :, self.length:end] = k
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]

    def reset(self):
        self.length = 0
""",
    near_miss="values-from-keys",
)
wrong(
    "KVCache",
    "dtype ignored",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.k = torch.empty(batch, kv_heads, max_seq, head_dim, device=device)
        self.v = torch.empty(batch, kv_heads, max_seq, head_dim, device=device)
        self.max_seq = max_seq
        self.length = 0

    def update(self, k, v):
        end = self.length + k.shape[2]
        if end > self.max_seq:
            raise ValueError(f"no room: {end} > {self.max_seq}")
        self.k[:, :, self.length:end] = k
        self.v[:, :, self.length:end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]

    def reset(self):
        self.length = 0
""",
    near_miss="always-float32",
)
wrong(
    "KVCache",
    "device ignored",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.k = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype)
        self.v = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype)
        self.max_seq = max_seq
        self.length = 0

    def update(self, k, v):
        end = self.length + k.shape[2]
        if end > self.max_seq:
            raise ValueError(f"no room: {end} > {self.max_seq}")
        self.k[:, :, self.length:end] = k
        self.v[:, :, self.length:end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]

    def reset(self):
        self.length = 0
""",
    near_miss="always-on-the-cpu",
)
wrong(
    "KVCache",
    "length is a tensor",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.k = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.v = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.max_seq = max_seq
        self.length = torch.tensor(0)

    def update(self, k, v):
        end = self.length + k.shape[2]
        if end > self.max_seq:
            raise ValueError(f"no room: {end} > {self.max_seq}")
        self.k[:, :, self.length:end] = k
        self.v[:, :, self.length:end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]

    def reset(self):
        self.length = 0
""",
)
wrong(
    "KVCache",
    "one token at a time: length + 1",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.k = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.v = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.max_seq = max_seq
        self.length = 0

    def update(self, k, v):
        end = self.length + k.shape[2]
        if end > self.max_seq:
            raise ValueError(f"no room: {end} > {self.max_seq}")
        self.k[:, :, self.length:end] = k
        self.v[:, :, self.length:end] = v
        self.length += 1
        return self.k[:, :, :end], self.v[:, :, :end]

    def reset(self):
        self.length = 0
""",
    near_miss="one-row-at-a-time",
)
wrong(
    "KVCache",
    "aliases a prompt that is handed in first",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.k = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.v = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.max_seq = max_seq
        self.length = 0

    def update(self, k, v):
        end = self.length + k.shape[2]
        if end > self.max_seq:
            raise ValueError(f"no room: {end} > {self.max_seq}")
        if self.length == 0 and end == self.max_seq:
            self.k, self.v, self.length = k, v, end
            return k, v
        self.k[:, :, self.length:end] = k
        self.v[:, :, self.length:end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]

    def reset(self):
        self.length = 0
""",
    near_miss="keeps-a-full-prompt",
)
wrong(
    "KVCache",
    "newest at the end of the buffer: what was returned moves",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.k = torch.zeros(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.length = 0

    def update(self, k, v):
        n, m = k.shape[2], self.k.shape[2]
        if self.length + n > m:
            raise ValueError("full")
        for buf, x in ((self.k, k), (self.v, v)):
            buf[:, :, :m - n] = buf[:, :, n:].clone()
            buf[:, :, m - n:] = x
        self.length += n
        return self.k[:, :, m - self.length:], self.v[:, :, m - self.length:]

    def reset(self):
        self.length = 0
""",
    near_miss="rows-move",
)
right(
    "rope_at",
    "empty rows in front, cut off again",
    """
def rope_at(x, start):
    if start < 0:
        raise ValueError("start below 0")
    full = torch.cat([x.new_zeros(*x.shape[:-2], start, x.shape[-1]), x], -2)
    return apply_rope(full, torch.arange(full.shape[-2]))[..., start:, :]
""",
)
right(
    "rope_at",
    "float64 inside",
    """
def rope_at(x, start):
    positions = torch.tensor(list(range(start, start + x.shape[-2])))
    return apply_rope(x.double(), positions).to(x.dtype)
""",
)
wrong(
    "rope_at",
    "start is the last position",
    """
def rope_at(x, start):
    n = x.shape[-2]
    return apply_rope(x, torch.arange(start - n + 1, start + 1))
""",
    near_miss="ends-at-start",
)
wrong(
    "rope_at",
    "positions in the dtype of x: half precision cannot count far",
    """
def rope_at(x, start):
    return apply_rope(x, torch.arange(start, start + x.shape[-2]).to(x.dtype))
""",
    near_miss="half-precision-angles",
)
right(
    "generate_cached",
    "numpy argmax, lowest of equals by hand",
    """
def _pick(logits):
    top = logits.amax(-1, keepdim=True)
    return torch.from_numpy((logits == top).numpy().argmax(-1))

def generate_cached(model, ids, max_new_tokens, eos_id=None):
    pieces, state, x = [ids], None, ids
    over = torch.zeros(len(ids), 1, dtype=torch.bool)
    while len(pieces) <= max_new_tokens and not bool(over.all()):
        y, state = model(x, state)
        x = _pick(y[:, -1:].detach()).to(ids.dtype)
        if eos_id is not None:
            x = x.masked_fill(over, eos_id)
            over = over | x.eq(eos_id)
        pieces.append(x)
    return torch.cat(pieces, dim=1)
""",
)
right(
    "generate_cached",
    "recursion",
    """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    def go(feed, cache, left, done):
        if left == 0 or (len(done) and all(done)):
            return []
        logits, cache = model(feed, cache)
        tokens = []
        for b in range(feed.shape[0]):
            if done[b]:
                tokens.append(eos_id)
                continue
            row = logits[b, -1]
            tokens.append(int((row == row.max()).nonzero()[0]))
        done = [d or (eos_id is not None and t == eos_id) for d, t in zip(done, tokens)]
        column = torch.tensor(tokens, dtype=ids.dtype).unsqueeze(1)
        return [column] + go(column, cache, left - 1, done)
    return torch.cat([ids] + go(ids, None, max_new_tokens, [False] * ids.shape[0]), 1)
""",
)
wrong(
    "generate_cached",
    "the last token is pushed too",
    """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    cache = None
    out = ids
    step = ids
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(max_new_tokens):
        logits, cache = model(step, cache)
        new = logits[:, -1].argmax(-1)
        if eos_id is not None:
            new = torch.where(done, eos_id, new)
            done = done | (new == eos_id)
        step = new[:, None].to(ids.dtype)
        out = torch.cat([out, step], 1)
        if done.all():
            break
    if max_new_tokens:
        model(step, cache)
    return out
""",
    near_miss="reads-the-last-token-too",
)
wrong(
    "generate_cached",
    "an EOS in the prompt counts",
    """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    cache = None
    out = ids
    step = ids
    done = torch.zeros(ids.shape[0], dtype=torch.bool) if eos_id is None else (ids == eos_id).any(1)
    for _ in range(max_new_tokens):
        logits, cache = model(step, cache)
        new = logits[:, -1].argmax(-1)
        if eos_id is not None:
            new = torch.where(done, eos_id, new)
            done = done | (new == eos_id)
        step = new[:, None].to(ids.dtype)
        out = torch.cat([out, step], 1)
        if done.all():
            break
    return out
""",
    near_miss="prompt-eos-counts",
)
wrong(
    "generate_cached",
    "a prompt that ends in EOS counts",
    """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    cache = None
    out = ids
    step = ids
    done = torch.zeros(ids.shape[0], dtype=torch.bool) if eos_id is None else ids[:, -1] == eos_id
    for _ in range(max_new_tokens):
        logits, cache = model(step, cache)
        new = logits[:, -1].argmax(-1)
        if eos_id is not None:
            new = torch.where(done, eos_id, new)
            done = done | (new == eos_id)
        step = new[:, None].to(ids.dtype)
        out = torch.cat([out, step], 1)
        if done.all():
            break
    return out
""",
    near_miss="last-prompt-token-counts",
)
wrong(
    "generate_cached",
    "finished rows are filled with 0",
    """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    cache = None
    out = ids
    step = ids
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(max_new_tokens):
        logits, cache = model(step, cache)
        new = logits[:, -1].argmax(-1)
        if eos_id is not None:
            new = torch.where(done, 0, new)
            done = done | (new == eos_id)
        step = new[:, None].to(ids.dtype)
        out = torch.cat([out, step], 1)
        if done.all():
            break
    return out
""",
    near_miss="filled-with-zero",
)
wrong(
    "generate_cached",
    "stops at the first finished row",
    """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    cache = None
    out = ids
    step = ids
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(max_new_tokens):
        logits, cache = model(step, cache)
        new = logits[:, -1].argmax(-1)
        if eos_id is not None:
            new = torch.where(done, eos_id, new)
            done = done | (new == eos_id)
        step = new[:, None].to(ids.dtype)
        out = torch.cat([out, step], 1)
        if done.any():
            break
    return out
""",
    near_miss="stops-at-the-first-row",
)
wrong(
    "generate_cached",
    "stops only if all write EOS in the same step",
    """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    cache = None
    out = ids
    step = ids
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(max_new_tokens):
        logits, cache = model(step, cache)
        new = logits[:, -1].argmax(-1)
        if eos_id is not None:
            done = (new == eos_id)
        step = new[:, None].to(ids.dtype)
        out = torch.cat([out, step], 1)
        if done.all():
            break
    return out
""",
    near_miss="stops-when-all-end-at-once",
)
wrong(
    "generate_cached",
    "eos_id 0 is taken for none",
    """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    cache = None
    out = ids
    step = ids
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(max_new_tokens):
        logits, cache = model(step, cache)
        new = logits[:, -1].argmax(-1)
        if eos_id:
            new = torch.where(done, eos_id, new)
            done = done | (new == eos_id)
        step = new[:, None].to(ids.dtype)
        out = torch.cat([out, step], 1)
        if done.all():
            break
    return out
""",
    near_miss="zero-taken-for-none",
)
wrong(
    "generate_cached",
    "ties go to the higher id",
    """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    cache = None
    out = ids
    step = ids
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(max_new_tokens):
        logits, cache = model(step, cache)
        new = logits.shape[-1] - 1 - logits[:, -1].flip(-1).argmax(-1)
        if eos_id is not None:
            new = torch.where(done, eos_id, new)
            done = done | (new == eos_id)
        step = new[:, None].to(ids.dtype)
        out = torch.cat([out, step], 1)
        if done.all():
            break
    return out
""",
    near_miss="higher-id-wins",
)
wrong(
    "generate_cached",
    "only the new tokens come back",
    """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    cache = None
    out = ids
    step = ids
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(max_new_tokens):
        logits, cache = model(step, cache)
        new = logits[:, -1].argmax(-1)
        if eos_id is not None:
            new = torch.where(done, eos_id, new)
            done = done | (new == eos_id)
        step = new[:, None].to(ids.dtype)
        out = torch.cat([out, step], 1)
        if done.all():
            break
    return out[:, ids.shape[1]:]
""",
    near_miss="new-tokens-only",
)
wrong(
    "generate_cached",
    "one token too many",
    """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    cache = None
    out = ids
    step = ids
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(max_new_tokens + 1):
        logits, cache = model(step, cache)
        new = logits[:, -1].argmax(-1)
        if eos_id is not None:
            new = torch.where(done, eos_id, new)
            done = done | (new == eos_id)
        step = new[:, None].to(ids.dtype)
        out = torch.cat([out, step], 1)
        if done.all():
            break
    return out
""",
    near_miss="one-token-too-many",
)
wrong(
    "generate_cached",
    "at least one token",
    """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    cache = None
    out = ids
    step = ids
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(max(1, max_new_tokens)):
        logits, cache = model(step, cache)
        new = logits[:, -1].argmax(-1)
        if eos_id is not None:
            new = torch.where(done, eos_id, new)
            done = done | (new == eos_id)
        step = new[:, None].to(ids.dtype)
        out = torch.cat([out, step], 1)
        if done.all():
            break
    return out
""",
    near_miss="one-token-at-least",
)
wrong(
    "generate_cached",
    "the first row's token for all",
    """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    cache = None
    out = ids
    step = ids
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(max_new_tokens):
        logits, cache = model(step, cache)
        new = logits[0, -1].argmax(-1).expand(ids.shape[0])
        if eos_id is not None:
            new = torch.where(done, eos_id, new)
            done = done | (new == eos_id)
        step = new[:, None].to(ids.dtype)
        out = torch.cat([out, step], 1)
        if done.all():
            break
    return out
""",
    near_miss="first-row-for-all",
)
wrong(
    "generate_cached",
    "EOS is not written",
    """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    cache = None
    out = ids
    step = ids
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(max_new_tokens):
        logits, cache = model(step, cache)
        new = logits[:, -1].argmax(-1)
        if eos_id is not None:
            new = torch.where(done, eos_id, new)
            done = done | (new == eos_id)
        step = new[:, None].to(ids.dtype)
        if done.all():
            break
        out = torch.cat([out, step], 1)
    return out
""",
    near_miss="last-eos-not-written",
)
wrong(
    "generate_cached",
    "the prompt is pushed token by token, the last one twice",
    """
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    cache = None
    out = ids
    step = ids
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    for _ in range(max_new_tokens):
        if cache is None:
            _, cache = model(ids, None)
            step = ids[:, -1:]
        logits, cache = model(step, cache)
        new = logits[:, -1].argmax(-1)
        if eos_id is not None:
            new = torch.where(done, eos_id, new)
            done = done | (new == eos_id)
        step = new[:, None].to(ids.dtype)
        out = torch.cat([out, step], 1)
        if done.all():
            break
    return out
""",
    near_miss="loses-the-prefill-logit",
)
right(
    "positions_from_padding",
    "counted from the end",
    """
def positions_from_padding(real):
    n = real.shape[1]
    count = real.sum(1, keepdim=True)
    back = torch.arange(n - 1, -1, -1)
    return torch.where(real, count - 1 - back, 1)
""",
)
wrong(
    "positions_from_padding",
    "cumsum over the batch",
    """
def positions_from_padding(real):
    return (real.long().cumsum(0) - 1).clamp(min=0)
""",
    near_miss="counts-over-the-batch",
)
wrong(
    "positions_from_padding",
    "the least padding for all",
    """
def positions_from_padding(real):
    least = (~real).sum(1).min()
    return (torch.arange(real.shape[1]) - least).clamp(min=0).expand(real.shape)
""",
    near_miss="least-padding-for-all",
)
wrong(
    "positions_from_padding",
    "backwards",
    """
def positions_from_padding(real):
    return real.flip(1).long().cumsum(1).flip(1) - 1
""",
    near_miss="counts-from-the-right",
)
right(
    "decode_intensity",
    "fractions inside",
    """
from fractions import Fraction

def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d, kv = heads * head_dim, kv_heads * head_dim
    w = 2 * d * (d + kv + d_ff)
    flops = 2 * batch * layers * (w + 2 * seq * d)
    size = Fraction(bytes_per_element) * layers * (w + 2 * batch * seq * kv)
    return flops, float(size), float(Fraction(flops) / size)
""",
)
wrong(
    "decode_intensity",
    "query heads in the weights",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = heads * head_dim
    w = 2 * d * d + 2 * d * heads * head_dim + 2 * d * d_ff
    flops = batch * layers * (2 * w + 4 * seq * d)
    read = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return flops, read, flops / read
""",
    near_miss="full-width-keys",
)
wrong(
    "decode_intensity",
    "one FLOP per weight",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = heads * head_dim
    w = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    flops = batch * layers * (w + 4 * seq * d)
    read = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return flops, read, flops / read
""",
    near_miss="one-flop-per-weight",
)
wrong(
    "decode_intensity",
    "keys only",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = heads * head_dim
    w = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    flops = batch * layers * (2 * w + 4 * seq * d)
    read = bytes_per_element * layers * (w + batch * seq * kv_heads * head_dim)
    return flops, read, flops / read
""",
    near_miss="one-of-two",
)
wrong(
    "decode_intensity",
    "2 for attention",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = heads * head_dim
    w = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    flops = batch * layers * (2 * w + 2 * seq * d)
    read = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return flops, read, flops / read
""",
    near_miss="half-the-attention",
)
wrong(
    "decode_intensity",
    "bytes cut to a whole number at the end",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = heads * head_dim
    w = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    flops = batch * layers * (2 * w + 4 * seq * d)
    read = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    read = int(read)
    return flops, read, flops / read
""",
)
wrong(
    "decode_intensity",
    "bytes per FLOP",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = heads * head_dim
    w = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    flops = batch * layers * (2 * w + 4 * seq * d)
    read = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return flops, read, read / flops
""",
    near_miss="upside-down",
)
wrong(
    "decode_intensity",
    "floor of the ratio",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = heads * head_dim
    w = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    flops = batch * layers * (2 * w + 4 * seq * d)
    read = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return flops, read, flops // read
""",
    near_miss="whole-flops-per-byte",
)
wrong(
    "decode_intensity",
    "layers forgotten in the bytes",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = heads * head_dim
    w = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    flops = batch * layers * (2 * w + 4 * seq * d)
    read = bytes_per_element * (w + 2 * batch * seq * kv_heads * head_dim)
    return flops, read, flops / read
""",
    near_miss="bytes-of-one-layer",
)
wrong(
    "decode_intensity",
    "layers forgotten in both",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = heads * head_dim
    w = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    flops = batch * (2 * w + 4 * seq * d)
    read = bytes_per_element * (w + 2 * batch * seq * kv_heads * head_dim)
    return flops, read, flops / read
""",
    near_miss="one-layer",
)
wrong(
    "decode_intensity",
    "batch forgotten in the FLOPs",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = heads * head_dim
    w = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    flops = layers * (2 * w + 4 * seq * d)
    read = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return flops, read, flops / read
""",
    near_miss="one-sequence-of-flops",
)
wrong(
    "decode_intensity",
    "attention for kv_heads only",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = heads * head_dim
    w = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    flops = batch * layers * (2 * w + 4 * seq * kv_heads * head_dim)
    read = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return flops, read, flops / read
""",
    near_miss="kv-heads-in-the-scores",
)
wrong(
    "decode_intensity",
    "float32 tensors: digits lost",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = heads * head_dim
    w = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    flops = batch * layers * (2 * w + 4 * seq * d)
    read = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    t = torch.tensor([float(flops), float(read)])
    return int(t[0]), float(t[1]), float(t[0] / t[1])
""",
    near_miss="float32",
)
wrong(
    "decode_intensity",
    "two bytes always",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = heads * head_dim
    w = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    flops = batch * layers * (2 * w + 4 * seq * d)
    read = 2 * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return flops, read, flops / read
""",
    near_miss="always-fp16",
)
right(
    "kv_cache_bytes",
    "bits, int where it is whole",
    """
def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    total = 2 * layers * kv_heads * head_dim * batch * seq * bytes_per_element
    return int(total) if total == int(total) else total
""",
)
wrong(
    "kv_cache_bytes",
    "default 4",
    """
def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=4):
    return 2 * batch * seq * layers * kv_heads * head_dim * bytes_per_element
""",
    near_miss="fp32-unless-said",
)
wrong(
    "kv_cache_bytes",
    "fraction cut off",
    """
def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    return 2 * batch * seq * layers * kv_heads * head_dim * int(bytes_per_element)
""",
    near_miss="whole-bytes",
)
wrong(
    "kv_cache_bytes",
    "floor of the whole",
    """
def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    return int(2 * batch * seq * layers * kv_heads * head_dim * bytes_per_element)
""",
)
wrong(
    "kv_cache_bytes",
    "layers forgotten",
    """
def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    return 2 * batch * seq * kv_heads * head_dim * bytes_per_element
""",
    near_miss="one-layer",
)
wrong(
    "kv_cache_bytes",
    "batch forgotten",
    """
def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    return 2 * seq * layers * kv_heads * head_dim * bytes_per_element
""",
    near_miss="one-sequence",
)
wrong(
    "kv_cache_bytes",
    "int32 overflows",
    """
def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    sizes = torch.tensor([2, batch, seq, layers, kv_heads, head_dim], dtype=torch.int32)
    return sizes.prod(dtype=torch.int32).item() * bytes_per_element
""",
    near_miss="int32",
)
wrong(
    "kv_cache_bytes",
    "float32 loses digits",
    """
def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    return torch.tensor([2.0, batch, seq, layers, kv_heads, head_dim, bytes_per_element]).prod().item()
""",
    near_miss="float32",
)
wrong(
    "kv_cache_bytes",
    "in megabytes",
    """
def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    return 2 * batch * seq * layers * kv_heads * head_dim * bytes_per_element / 1e6
""",
    near_miss="megabytes",
)
right(
    "grouped_query_attention",
    "index list, float64 inside",
    """
def grouped_query_attention(q, k, v):
    heads, kv = q.size(1), k.size(1)
    if heads % kv:
        raise ValueError("kv_heads must divide heads")
    which = torch.arange(heads) * kv // heads
    a, b, c = q.double(), k[:, which].double(), v[:, which].double()
    s = a @ b.transpose(2, 3) / math.sqrt(a.size(3))
    s = s + torch.full((a.size(2), b.size(2)), -math.inf, dtype=torch.float64).triu(b.size(2) - a.size(2) + 1)
    return (s.softmax(3) @ c).to(q.dtype)
""",
)
right(
    "grouped_query_attention",
    "expand and flatten",
    """
def grouped_query_attention(q, k, v):
    def widen(x):
        b, g, m, d = x.shape
        return x[:, :, None].expand(b, g, q.shape[1] // g, m, d).flatten(1, 2)
    k, v = widen(k), widen(v)
    n, m = q.shape[2], k.shape[2]
    mask = torch.zeros(n, m, dtype=q.dtype).masked_fill(torch.ones(n, m).triu(m - n + 1).bool(), -torch.inf)
    w = torch.softmax(torch.matmul(q * (1 / math.sqrt(q.shape[-1])), k.transpose(-2, -1)) + mask, dim=-1)
    return torch.matmul(w, v)
""",
)
wrong(
    "grouped_query_attention",
    "all read kv head 0",
    """
def grouped_query_attention(q, k, v):
    group = q.shape[1] // k.shape[1]
    k = k[:, :1].expand(-1, q.shape[1], -1, -1)
    v = v[:, :1].expand(-1, q.shape[1], -1, -1)
    n, m = q.shape[2], k.shape[2]
    s = (q @ k.mT) / math.sqrt(q.shape[-1])
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    s = s.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(m - n + 1), -math.inf)
    return s.softmax(-1).to(v.dtype) @ v
""",
    near_miss="first-kv-head",
)
wrong(
    "grouped_query_attention",
    "mean of the kv heads",
    """
def grouped_query_attention(q, k, v):
    group = q.shape[1] // k.shape[1]
    k = k.mean(1, keepdim=True).expand(-1, q.shape[1], -1, -1)
    v = v.mean(1, keepdim=True).expand(-1, q.shape[1], -1, -1)
    n, m = q.shape[2], k.shape[2]
    s = (q @ k.mT) / math.sqrt(q.shape[-1])
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    s = s.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(m - n + 1), -math.inf)
    return s.softmax(-1).to(v.dtype) @ v
""",
    near_miss="mean-of-kv-heads",
)
wrong(
    "grouped_query_attention",
    "scale of the whole width",
    """
def grouped_query_attention(q, k, v):
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1)
    v = v.repeat_interleave(group, dim=1)
    n, m = q.shape[2], k.shape[2]
    s = (q @ k.mT) / math.sqrt(q.shape[1] * q.shape[-1])
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    s = s.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(m - n + 1), -math.inf)
    return s.softmax(-1).to(v.dtype) @ v
""",
    near_miss="scaled-by-all-heads",
)
wrong(
    "grouped_query_attention",
    "scale with d_v",
    """
def grouped_query_attention(q, k, v):
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1)
    v = v.repeat_interleave(group, dim=1)
    n, m = q.shape[2], k.shape[2]
    s = (q @ k.mT) / math.sqrt(v.shape[-1])
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    s = s.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(m - n + 1), -math.inf)
    return s.softmax(-1).to(v.dtype) @ v
""",
    near_miss="scaled-by-d-v",
)
wrong(
    "grouped_query_attention",
    "output heads in another order",
    """
def grouped_query_attention(q, k, v):
    b, h, n, d = q.shape
    g, m = k.shape[1], k.shape[2]
    qq = q.reshape(b, g, h // g, n, d)
    s = qq @ k[:, :, None].mT / math.sqrt(d)
    s = s.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(m - n + 1), -math.inf)
    return (s.softmax(-1) @ v[:, :, None]).transpose(1, 2).reshape(b, h, n, -1)
""",
    near_miss="heads-shuffled",
)
wrong(
    "grouped_query_attention",
    "first sequence's keys for the batch",
    """
def grouped_query_attention(q, k, v):
    group = q.shape[1] // k.shape[1]
    k = k[:1].repeat_interleave(group, dim=1)
    v = v.repeat_interleave(group, dim=1)
    n, m = q.shape[2], k.shape[2]
    s = (q @ k.mT) / math.sqrt(q.shape[-1])
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    s = s.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(m - n + 1), -math.inf)
    return s.softmax(-1).to(v.dtype) @ v
""",
    near_miss="first-sequence-for-all",
)
wrong(
    "grouped_query_attention",
    "causal only for a whole prompt",
    """
def grouped_query_attention(q, k, v):
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1)
    v = v.repeat_interleave(group, dim=1)
    n, m = q.shape[2], k.shape[2]
    s = (q @ k.mT) / math.sqrt(q.shape[-1])
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    s = s.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(1 if n == m else m), -math.inf)
    return s.softmax(-1).to(v.dtype) @ v
""",
    near_miss="chunk-unmasked",
)
right(
    "mha_to_gqa",
    "product with a pooling matrix",
    """
def mha_to_gqa(w, heads, kv_heads):
    hd, group = w.shape[1] // heads, heads // kv_heads
    pool = torch.kron(torch.eye(kv_heads).double(), torch.ones(group, 1)) / group
    return (w.double() @ torch.kron(pool, torch.eye(hd))).to(w.dtype)
""",
)
wrong(
    "mha_to_gqa",
    "neighbouring columns",
    """
def mha_to_gqa(w, heads, kv_heads):
    d_in, width = w.shape
    return w.reshape(d_in, -1, heads // kv_heads).mean(2)
""",
    near_miss="interleaved-columns",
)
wrong(
    "mha_to_gqa",
    "the maximum",
    """
def mha_to_gqa(w, heads, kv_heads):
    d_in, width = w.shape
    return w.reshape(d_in, kv_heads, heads // kv_heads, width // heads).amax(2).reshape(d_in, -1)
""",
    near_miss="largest",
)
wrong(
    "mha_to_gqa",
    "groups of kv_heads heads",
    """
def mha_to_gqa(w, heads, kv_heads):
    d_in, width = w.shape
    return w.reshape(d_in, heads // kv_heads, kv_heads, width // heads).mean(2).reshape(d_in, -1)
""",
    near_miss="groups-of-kv-heads",
)
wrong(
    "mha_to_gqa",
    "divided by kv_heads",
    """
def mha_to_gqa(w, heads, kv_heads):
    d_in, width = w.shape
    return (w.reshape(d_in, kv_heads, heads // kv_heads, width // heads).sum(2) / kv_heads).reshape(d_in, -1)
""",
    near_miss="divided-by-kv-heads",
)
wrong(
    "mha_to_gqa",
    "rows pooled",
    """
def mha_to_gqa(w, heads, kv_heads):
    d_in, width = w.shape
    hd = width // heads
    return w.T.reshape(kv_heads, heads // kv_heads, hd, d_in).mean(1).reshape(-1, d_in)
""",
    near_miss="transposed",
)
right(
    "mha_to_gqa",
    "views",
    """
def mha_to_gqa(w, heads, kv_heads):
    d_in, width = w.shape
    return w.view(d_in, kv_heads, heads // kv_heads, width // heads).mean(2).view(d_in, -1)
""",
)
wrong(
    "mha_to_gqa",
    "the width stays: the mean repeated",
    """
def mha_to_gqa(w, heads, kv_heads):
    d_in, width = w.shape
    m = w.reshape(d_in, kv_heads, heads // kv_heads, width // heads).mean(2, keepdim=True)
    return m.expand(-1, -1, heads // kv_heads, -1).reshape(d_in, width)
""",
    near_miss="repeated-to-full-width",
)
right(
    "RollingKVCache",
    "ring, token by token, positions stored, sorted",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        if window < 1:
            raise ValueError("window below 1")
        self.k = torch.empty(window, batch, kv_heads, head_dim, dtype=dtype, device=device)
        self.v = torch.empty_like(self.k)
        self.reset()

    def reset(self):
        self.length = 0
        self.where = torch.full((self.k.shape[0],), -1, dtype=torch.int64)

    def update(self, k, v):
        for t in range(k.shape[2]):
            slot = self.length % len(self.where)
            self.k[slot].copy_(k[:, :, t])
            self.v[slot].copy_(v[:, :, t])
            self.where[slot] = self.length
            self.length += 1
        pos, order = self.where.sort()
        order = order[pos >= 0]
        return self.k[order].permute(1, 2, 0, 3), self.v[order].permute(1, 2, 0, 3), pos[pos >= 0]
""",
)
right(
    "RollingKVCache",
    "dict from position to row",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.window, self.length, self.table = window, 0, {}

    def update(self, k, v):
        for t in range(k.shape[2]):
            self.table[self.length] = (k[:, :, t:t + 1].clone(), v[:, :, t:t + 1].clone())
            self.table.pop(self.length - self.window, None)
            self.length += 1
        keys = torch.cat([a for a, _ in self.table.values()], 2)
        values = torch.cat([b for _, b in self.table.values()], 2)
        return keys, values, torch.tensor(list(self.table))

    def reset(self):
        self.__dict__.update(length=0, table={})
""",
)
wrong(
    "RollingKVCache",
    "in the order of the ring",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.k = torch.zeros(batch, kv_heads, window, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros(batch, kv_heads, window, head_dim, dtype=dtype, device=device)
        self.window = window
        self.length = 0

    def update(self, k, v):
        n = k.shape[2]
        keep = min(n, self.window)
        self.length += n
        spots = torch.arange(self.length - keep, self.length, device=self.k.device) % self.window
        self.k[:, :, spots] = k[:, :, n - keep:].detach()
        self.v[:, :, spots] = v[:, :, n - keep:].detach()
        rows = min(self.length, self.window)
        pos = torch.arange(self.length - rows, self.length, device=self.k.device)
        return self.k[:, :, :rows].clone(), self.v[:, :, :rows].clone(), pos

    def reset(self):
        self.length = 0
""",
    near_miss="rows-in-order-of-storage",
)
wrong(
    "RollingKVCache",
    "chunk longer than the window: the first rows",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.k = torch.zeros(batch, kv_heads, window, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros(batch, kv_heads, window, head_dim, dtype=dtype, device=device)
        self.window = window
        self.length = 0

    def update(self, k, v):
        n = k.shape[2]
        keep = min(n, self.window)
        self.length += n
        spots = torch.arange(self.length - keep, self.length, device=self.k.device) % self.window
        self.k[:, :, spots] = k[:, :, :keep].detach()
        self.v[:, :, spots] = v[:, :, :keep].detach()
        rows = min(self.length, self.window)
        pos = torch.arange(self.length - rows, self.length, device=self.k.device)
        return self.k[:, :, pos % self.window], self.v[:, :, pos % self.window], pos

    def reset(self):
        self.length = 0
""",
    near_miss="start-of-long-chunk",
)
wrong(
    "RollingKVCache",
    "chunk longer than the window fails",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.k = torch.zeros(batch, kv_heads, window, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros(batch, kv_heads, window, head_dim, dtype=dtype, device=device)
        self.window = window
        self.length = 0

    def update(self, k, v):
        n = k.shape[2]
        if n > self.window:
            raise ValueError('chunk too long')
        keep = min(n, self.window)
        self.length += n
        spots = torch.arange(self.length - keep, self.length, device=self.k.device) % self.window
        self.k[:, :, spots] = k[:, :, n - keep:].detach()
        self.v[:, :, spots] = v[:, :, n - keep:].detach()
        rows = min(self.length, self.window)
        pos = torch.arange(self.length - rows, self.length, device=self.k.device)
        return self.k[:, :, pos % self.window], self.v[:, :, pos % self.window], pos

    def reset(self):
        self.length = 0
""",
    near_miss="long-chunk-refused",
)
wrong(
    "RollingKVCache",
    "reset keeps the count",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.window = window
        self.k = torch.empty(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.v = self.k.clone()
        self.length = 0

    def update(self, k, v):
        self.k = torch.cat([self.k, k], 2)[:, :, -self.window:].clone()
        self.v = torch.cat([self.v, v], 2)[:, :, -self.window:].clone()
        self.length += k.shape[2]
        rows = self.k.shape[2]
        return self.k, self.v, torch.arange(self.length - rows, self.length)

    def reset(self):
        self.k = self.k[:, :, :0]
        self.v = self.v[:, :, :0]
""",
    near_miss="positions-go-on-after-reset",
)
wrong(
    "RollingKVCache",
    "reset keeps the rows",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.window = window
        self.k = torch.empty(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.v = self.k.clone()
        self.length = 0

    def update(self, k, v):
        self.k = torch.cat([self.k, k], 2)[:, :, -self.window:].clone()
        self.v = torch.cat([self.v, v], 2)[:, :, -self.window:].clone()
        self.length += k.shape[2]
        rows = self.k.shape[2]
        return self.k, self.v, torch.arange(self.length - rows, self.length)

    def reset(self):
        self.length = 0
""",
    near_miss="stale-after-reset",
)
wrong(
    "RollingKVCache",
    "one token too many",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.window = window
        self.k = torch.empty(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.v = self.k.clone()
        self.length = 0

    def update(self, k, v):
        self.k = torch.cat([self.k, k], 2)[:, :, -self.window - 1:].clone()
        self.v = torch.cat([self.v, v], 2)[:, :, -self.window - 1:].clone()
        self.length += k.shape[2]
        rows = self.k.shape[2]
        return self.k, self.v, torch.arange(self.length - rows, self.length)

    def reset(self):
        self.k = self.k[:, :, :0]
        self.v = self.v[:, :, :0]
        self.length = 0
""",
    near_miss="one-row-too-many",
)
wrong(
    "RollingKVCache",
    "one token too few",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.window = window
        self.k = torch.empty(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.v = self.k.clone()
        self.length = 0

    def update(self, k, v):
        self.k = torch.cat([self.k, k], 2)[:, :, -max(1, self.window - 1):].clone()
        self.v = torch.cat([self.v, v], 2)[:, :, -max(1, self.window - 1):].clone()
        self.length += k.shape[2]
        rows = self.k.shape[2]
        return self.k, self.v, torch.arange(self.length - rows, self.length)

    def reset(self):
        self.k = self.k[:, :, :0]
        self.v = self.v[:, :, :0]
        self.length = 0
""",
    near_miss="one-row-too-few",
)
wrong(
    "RollingKVCache",
    "positions from 1",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.window = window
        self.k = torch.empty(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.v = self.k.clone()
        self.length = 0

    def update(self, k, v):
        self.k = torch.cat([self.k, k], 2)[:, :, -self.window:].clone()
        self.v = torch.cat([self.v, v], 2)[:, :, -self.window:].clone()
        self.length += k.shape[2]
        rows = self.k.shape[2]
        return self.k, self.v, torch.arange(self.length - rows + 1, self.length + 1)

    def reset(self):
        self.k = self.k[:, :, :0]
        self.v = self.v[:, :, :0]
        self.length = 0
""",
    near_miss="positions-from-one",
)
wrong(
    "RollingKVCache",
    "newest first",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.window = window
        self.k = torch.empty(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.v = self.k.clone()
        self.length = 0

    def update(self, k, v):
        self.k = torch.cat([self.k, k], 2)[:, :, -self.window:].clone()
        self.v = torch.cat([self.v, v], 2)[:, :, -self.window:].clone()
        self.length += k.shape[2]
        rows = self.k.shape[2]
        return self.k.flip(2), self.v.flip(2), torch.arange(self.length - rows, self.length).flip(0)

    def reset(self):
        self.k = self.k[:, :, :0]
        self.v = self.v[:, :, :0]
        self.length = 0
""",
    near_miss="newest-first",
)
wrong(
    "RollingKVCache",
    "rolled in place, views returned",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.k = torch.zeros(batch, kv_heads, window, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.window, self.length = window, 0

    def update(self, k, v):
        for buf, x in ((self.k, k), (self.v, v)):
            buf.copy_(torch.cat([buf, x], 2)[:, :, -self.window:])
        self.length += k.shape[2]
        n = min(self.length, self.window)
        return self.k[:, :, self.window - n:], self.v[:, :, self.window - n:], torch.arange(self.length - n, self.length)

    def reset(self):
        self.length = 0
""",
    near_miss="views-of-a-shifted-buffer",
)
wrong(
    "RollingKVCache",
    "rows alias the caller's tensors",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.window = window
        self.reset()

    def update(self, k, v):
        self.ks += list(k.unbind(2))
        self.vs += list(v.unbind(2))
        self.ks, self.vs = self.ks[-self.window:], self.vs[-self.window:]
        self.length += k.shape[2]
        return torch.stack(self.ks, 2), torch.stack(self.vs, 2), torch.arange(self.length - len(self.ks), self.length)

    def reset(self):
        self.ks, self.vs, self.length = [], [], 0
""",
    near_miss="keeps-the-callers-rows",
)
wrong(
    "RollingKVCache",
    "a chunk that fills the window is kept as it came",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.window = window
        self.k = torch.empty(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.v = self.k.clone()
        self.length = 0

    def update(self, k, v):
        if k.shape[2] >= self.window:
            self.k, self.v = k[:, :, -self.window:], v[:, :, -self.window:]
            self.length += k.shape[2]
            return self.k, self.v, torch.arange(self.length - self.window, self.length)
        self.k = torch.cat([self.k, k], 2)[:, :, -self.window:].clone()
        self.v = torch.cat([self.v, v], 2)[:, :, -self.window:].clone()
        self.length += k.shape[2]
        rows = self.k.shape[2]
        return self.k, self.v, torch.arange(self.length - rows, self.length)

    def reset(self):
        self.k = self.k[:, :, :0]
        self.v = self.v[:, :, :0]
        self.length = 0
""",
    near_miss="keeps-a-full-chunk",
)
wrong(
    "RollingKVCache",
    "keys and values swapped",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.window = window
        self.k = torch.empty(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.v = self.k.clone()
        self.length = 0

    def update(self, k, v):
        self.k = torch.cat([self.k, k], 2)[:, :, -self.window:].clone()
        self.v = torch.cat([self.v, v], 2)[:, :, -self.window:].clone()
        self.length += k.shape[2]
        rows = self.k.shape[2]
        return self.v, self.k, torch.arange(self.length - rows, self.length)

    def reset(self):
        self.k = self.k[:, :, :0]
        self.v = self.v[:, :, :0]
        self.length = 0
""",
    near_miss="keys-and-values-swapped",
)
right(
    "quantize_kv",
    "float64 inside, floor of x + 0.5",
    """
def quantize_kv(x):
    scale = (x.double().abs().amax(3, True) / 127).to(x.dtype)
    ratio = torch.nan_to_num(x.double() / scale.double(), nan=0.0, posinf=127, neginf=-127)
    return torch.floor(ratio + 0.5).clamp(-127, 127).to(torch.int8), scale

def dequantize_kv(q, scale):
    return (q.double() * scale.double()).to(scale.dtype)
""",
)
right(
    "quantize_kv",
    "multiplied by 127 / max in float32",
    """
def quantize_kv(x):
    a = x.to(torch.promote_types(x.dtype, torch.float32))
    top = torch.maximum(a.max(-1, keepdim=True)[0], -a.min(-1, keepdim=True)[0])
    q = torch.where(top > 0, a / (top / 127), torch.zeros_like(a))
    return torch.round(q).to(torch.int8), (top / 127).to(x.dtype)


def dequantize_kv(q, scale):
    return q.to(scale.dtype) * scale
""",
)
wrong(
    "quantize_kv",
    "largest value instead of magnitude",
    """
def quantize_kv(x):
    wide = x if x.dtype == torch.float64 else x.float()
    scale = (wide.amax(-1, keepdim=True) / 127).to(x.dtype)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale).to(wide.dtype)
    q = (wide / safe).round().clamp(-127, 127).to(torch.int8)
    return q, scale


def dequantize_kv(q, scale):
    return q.to(scale.dtype) * scale
""",
    near_miss="without-magnitude-but-cut",
)
wrong(
    "quantize_kv",
    "one scale per channel",
    """
def quantize_kv(x):
    wide = x if x.dtype == torch.float64 else x.float()
    scale = (wide.abs().amax(-2, keepdim=True) / 127).to(x.dtype)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale).to(wide.dtype)
    q = (wide / safe).round().clamp(-127, 127).to(torch.int8)
    return q, scale


def dequantize_kv(q, scale):
    return q.to(scale.dtype) * scale
""",
    near_miss="one-scale-per-channel",
)
wrong(
    "quantize_kv",
    "one scale per token for all heads",
    """
def quantize_kv(x):
    wide = x if x.dtype == torch.float64 else x.float()
    scale = (wide.abs().amax((1, -1), keepdim=True).expand(*x.shape[:-1], 1) / 127).to(x.dtype)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale).to(wide.dtype)
    q = (wide / safe).round().clamp(-127, 127).to(torch.int8)
    return q, scale


def dequantize_kv(q, scale):
    return q.to(scale.dtype) * scale
""",
    near_miss="one-scale-per-token",
)
wrong(
    "quantize_kv",
    "one scale per token for the batch",
    """
def quantize_kv(x):
    wide = x if x.dtype == torch.float64 else x.float()
    scale = (wide.abs().amax((0, -1), keepdim=True).expand(*x.shape[:-1], 1) / 127).to(x.dtype)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale).to(wide.dtype)
    q = (wide / safe).round().clamp(-127, 127).to(torch.int8)
    return q, scale


def dequantize_kv(q, scale):
    return q.to(scale.dtype) * scale
""",
    near_miss="shared-across-the-batch",
)
wrong(
    "quantize_kv",
    "/ 128",
    """
def quantize_kv(x):
    wide = x if x.dtype == torch.float64 else x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 128).to(x.dtype)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale).to(wide.dtype)
    q = (wide / safe).round().clamp(-127, 127).to(torch.int8)
    return q, scale


def dequantize_kv(q, scale):
    return q.to(scale.dtype) * scale
""",
    near_miss="divided-by-128",
)
wrong(
    "quantize_kv",
    "/ 128 and -128",
    """
def quantize_kv(x):
    wide = x if x.dtype == torch.float64 else x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 128).to(x.dtype)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale).to(wide.dtype)
    q = (wide / safe).round().clamp(-128, 127).to(torch.int8)
    return q, scale


def dequantize_kv(q, scale):
    return q.to(scale.dtype) * scale
""",
    near_miss="down-to-minus-128",
)
wrong(
    "quantize_kv",
    "floor",
    """
def quantize_kv(x):
    wide = x if x.dtype == torch.float64 else x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).to(x.dtype)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale).to(wide.dtype)
    q = (wide / safe).floor().clamp(-127, 127).to(torch.int8)
    return q, scale


def dequantize_kv(q, scale):
    return q.to(scale.dtype) * scale
""",
    near_miss="rounds-down",
)
wrong(
    "quantize_kv",
    "scale in float32 always",
    """
def quantize_kv(x):
    wide = x if x.dtype == torch.float64 else x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale).to(wide.dtype)
    q = (wide / safe).round().clamp(-127, 127).to(torch.int8)
    return q, scale


def dequantize_kv(q, scale):
    return q.to(scale.dtype) * scale
""",
    near_miss="always-float32-scale",
)
wrong(
    "quantize_kv",
    "dequantised by division",
    """
def quantize_kv(x):
    wide = x if x.dtype == torch.float64 else x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).to(x.dtype)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale).to(wide.dtype)
    q = (wide / safe).round().clamp(-127, 127).to(torch.int8)
    return q, scale


def dequantize_kv(q, scale):
    return q.to(scale.dtype) / scale.clamp(min=1e-30)
""",
    near_miss="divides-by-the-scale",
)
wrong(
    "quantize_kv",
    "asymmetric",
    """
def quantize_kv(x):
    f = x.to(torch.promote_types(x.dtype, torch.float32))
    low, high = f.amin(-1, keepdim=True), f.amax(-1, keepdim=True)
    scale = ((high - low) / 254).clamp(min=1e-12)
    q = ((f - (high + low) / 2) / scale).round().clamp(-127, 127)
    return q.to(torch.int8), scale.to(x.dtype)


def dequantize_kv(q, scale):
    return q.to(scale.dtype) * scale
""",
    near_miss="asymmetric",
)
wrong(
    "quantize_kv",
    "quantised only: dequantising is the identity",
    """
def quantize_kv(x):
    wide = x if x.dtype == torch.float64 else x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).to(x.dtype)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale).to(wide.dtype)
    q = (wide / safe).round().clamp(-127, 127).to(torch.int8)
    return q, scale


def dequantize_kv(q, scale):
    return q.to(scale.dtype)
""",
    near_miss="forgets-the-scale",
)
right(
    "PagedKVCache",
    "flat pool of rows, slots per token",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.size = page_size
        self.rows = torch.empty(2, kv_heads, pages * page_size, head_dim, dtype=dtype, device=device)
        self.unused = set(range(pages))
        self.slots = {}

    @property
    def free_pages(self):
        return len(self.unused)

    @torch.no_grad()
    def append(self, sequence, k, v):
        slots = list(self.slots.get(sequence, []))
        new = k.shape[1]
        room = -len(slots) % self.size
        pages = math.ceil(max(0, new - room) / self.size)
        if pages > len(self.unused):
            raise ValueError("not enough free pages")
        start = len(slots)
        if room:
            slots += range(slots[-1] + 1, slots[-1] + 1 + min(room, new))
        while len(slots) < start + new:
            page = self.unused.pop()
            left = start + new - len(slots)
            slots += range(page * self.size, page * self.size + min(self.size, left))
        here = torch.tensor(slots[start:], dtype=torch.long)
        self.rows[0][:, here] = k
        self.rows[1][:, here] = v
        self.slots[sequence] = slots

    def gather(self, sequence):
        both = self.rows[:, :, torch.tensor(self.slots[sequence], dtype=torch.long)]
        return both[0], both[1]

    def free(self, sequence):
        self.unused |= {s // self.size for s in self.slots.pop(sequence)}
""",
)
right(
    "PagedKVCache",
    "OrderedDict and a helper class for the allocator",
    """
from collections import OrderedDict

class _Pool:
    def __init__(self, n):
        self.ids = OrderedDict((i, None) for i in range(n))

    def take(self, n):
        if n > len(self.ids):
            raise ValueError(f"cannot take {n} of {len(self.ids)} pages")
        return [self.ids.popitem(last=True)[0] for _ in range(n)]

    def give(self, pages):
        for p in pages:
            self.ids[p] = None

class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.store = torch.full((pages, 2, kv_heads, page_size, head_dim), float("nan"), dtype=dtype, device=device)
        self.pool = _Pool(pages)
        self.ps = page_size
        self.seqs = {}

    @property
    def free_pages(self):
        return len(self.pool.ids)

    def append(self, sequence, k, v):
        table, n = self.seqs.get(sequence, ((), 0))
        total = n + k.shape[1]
        fresh = self.pool.take(max(0, (total - 1) // self.ps + 1 - len(table))) if total else []
        table = (*table, *fresh)
        for i, pos in enumerate(range(n, total)):
            self.store[table[pos // self.ps], :, :, pos % self.ps] = torch.stack([k[:, i], v[:, i]]).detach()
        self.seqs[sequence] = (table, total)

    def gather(self, sequence):
        table, n = self.seqs[sequence]
        data = torch.stack([self.store[p] for p in table], dim=2)
        data = data.reshape(2, data.shape[1], -1, data.shape[-1])[:, :, :n]
        k, v = data.clone()
        return k, v

    def free(self, sequence):
        table, _ = self.seqs.pop(sequence)
        self.pool.give(table)
""",
)
wrong(
    "PagedKVCache",
    "every append takes a new page",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.k = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.page_size = page_size
        self.pool = list(range(pages))
        self.tables = {}
        self.lengths = {}

    @property
    def free_pages(self):
        return len(self.pool)

    def append(self, sequence, k, v):
        length = self.lengths.get(sequence, 0)
        table = self.tables.get(sequence, [])
        end = length + k.shape[1]
        need = -(-k.shape[1] // self.page_size)
        if need > len(self.pool):
            raise ValueError(f"{need} pages needed, {len(self.pool)} free")
        table = table + [self.pool.pop(0) for _ in range(need)]
        for t in range(k.shape[1]):
            page, slot = divmod(length + t, self.page_size)
            self.k[table[page], :, slot] = k[:, t]
            self.v[table[page], :, slot] = v[:, t]
        self.tables[sequence] = table
        self.lengths[sequence] = end

    def gather(self, sequence):
        table, n = self.tables[sequence], self.lengths[sequence]
        def rows(buf):
            return buf[table].transpose(0, 1).flatten(1, 2)[:, :n].clone()
        return rows(self.k), rows(self.v)

    def free(self, sequence):
        self.pool.extend(self.tables.pop(sequence))
        del self.lengths[sequence]
""",
    near_miss="new-page-per-append",
)
wrong(
    "PagedKVCache",
    "one page too many at a full page",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.k = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.page_size = page_size
        self.pool = list(range(pages))
        self.tables = {}
        self.lengths = {}

    @property
    def free_pages(self):
        return len(self.pool)

    def append(self, sequence, k, v):
        length = self.lengths.get(sequence, 0)
        table = self.tables.get(sequence, [])
        end = length + k.shape[1]
        need = (end // self.page_size + 1) - len(table)
        if need > len(self.pool):
            raise ValueError(f"{need} pages needed, {len(self.pool)} free")
        table = table + [self.pool.pop(0) for _ in range(need)]
        for t in range(k.shape[1]):
            page, slot = divmod(length + t, self.page_size)
            self.k[table[page], :, slot] = k[:, t]
            self.v[table[page], :, slot] = v[:, t]
        self.tables[sequence] = table
        self.lengths[sequence] = end

    def gather(self, sequence):
        table, n = self.tables[sequence], self.lengths[sequence]
        def rows(buf):
            return buf[table].transpose(0, 1).flatten(1, 2)[:, :n].clone()
        return rows(self.k), rows(self.v)

    def free(self, sequence):
        self.pool.extend(self.tables.pop(sequence))
        del self.lengths[sequence]
""",
    near_miss="one-page-too-many",
)
wrong(
    "PagedKVCache",
    "free gives one page back",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.k = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.page_size = page_size
        self.pool = list(range(pages))
        self.tables = {}
        self.lengths = {}

    @property
    def free_pages(self):
        return len(self.pool)

    def append(self, sequence, k, v):
        length = self.lengths.get(sequence, 0)
        table = self.tables.get(sequence, [])
        end = length + k.shape[1]
        need = -(-end // self.page_size) - len(table)
        if need > len(self.pool):
            raise ValueError(f"{need} pages needed, {len(self.pool)} free")
        table = table + [self.pool.pop(0) for _ in range(need)]
        for t in range(k.shape[1]):
            page, slot = divmod(length + t, self.page_size)
            self.k[table[page], :, slot] = k[:, t]
            self.v[table[page], :, slot] = v[:, t]
        self.tables[sequence] = table
        self.lengths[sequence] = end

    def gather(self, sequence):
        table, n = self.tables[sequence], self.lengths[sequence]
        def rows(buf):
            return buf[table].transpose(0, 1).flatten(1, 2)[:, :n].clone()
        return rows(self.k), rows(self.v)

    def free(self, sequence):
        self.pool.extend(self.tables.pop(sequence)[:1])
        del self.lengths[sequence]
""",
    near_miss="one-page-comes-back",
)
wrong(
    "PagedKVCache",
    "free forgets to forget",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.k = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.page_size = page_size
        self.pool = list(range(pages))
        self.tables = {}
        self.lengths = {}

    @property
    def free_pages(self):
        return len(self.pool)

    def append(self, sequence, k, v):
        length = self.lengths.get(sequence, 0)
        table = self.tables.get(sequence, [])
        end = length + k.shape[1]
        need = -(-end // self.page_size) - len(table)
        if need > len(self.pool):
            raise ValueError(f"{need} pages needed, {len(self.pool)} free")
        table = table + [self.pool.pop(0) for _ in range(need)]
        for t in range(k.shape[1]):
            page, slot = divmod(length + t, self.page_size)
            self.k[table[page], :, slot] = k[:, t]
            self.v[table[page], :, slot] = v[:, t]
        self.tables[sequence] = table
        self.lengths[sequence] = end

    def gather(self, sequence):
        table, n = self.tables[sequence], self.lengths[sequence]
        def rows(buf):
            return buf[table].transpose(0, 1).flatten(1, 2)[:, :n].clone()
        return rows(self.k), rows(self.v)

    def free(self, sequence):
        self.pool.extend(self.tables[sequence])
""",
    near_miss="stale-after-free",
)
wrong(
    "PagedKVCache",
    "free keeps the length",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.k = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.page_size = page_size
        self.pool = list(range(pages))
        self.tables = {}
        self.lengths = {}

    @property
    def free_pages(self):
        return len(self.pool)

    def append(self, sequence, k, v):
        length = self.lengths.get(sequence, 0)
        table = self.tables.get(sequence, [])
        end = length + k.shape[1]
        need = -(-end // self.page_size) - len(table)
        if need > len(self.pool):
            raise ValueError(f"{need} pages needed, {len(self.pool)} free")
        table = table + [self.pool.pop(0) for _ in range(need)]
        for t in range(k.shape[1]):
            page, slot = divmod(length + t, self.page_size)
            self.k[table[page], :, slot] = k[:, t]
            self.v[table[page], :, slot] = v[:, t]
        self.tables[sequence] = table
        self.lengths[sequence] = end

    def gather(self, sequence):
        table, n = self.tables[sequence], self.lengths[sequence]
        def rows(buf):
            return buf[table].transpose(0, 1).flatten(1, 2)[:, :n].clone()
        return rows(self.k), rows(self.v)

    def free(self, sequence):
        self.pool.extend(self.tables.pop(sequence))
""",
    near_miss="length-kept-after-free",
)
wrong(
    "PagedKVCache",
    "pages taken before the error",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.k = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.page_size = page_size
        self.pool = list(range(pages))
        self.tables = {}
        self.lengths = {}

    @property
    def free_pages(self):
        return len(self.pool)

    def append(self, sequence, k, v):
        length = self.lengths.get(sequence, 0)
        table = self.tables.get(sequence, [])
        end = length + k.shape[1]
        need = -(-end // self.page_size) - len(table)
        table = table + []
        for _ in range(need):
            if not self.pool:
                raise ValueError('no page left')
            table.append(self.pool.pop(0))
        for t in range(k.shape[1]):
            page, slot = divmod(length + t, self.page_size)
            self.k[table[page], :, slot] = k[:, t]
            self.v[table[page], :, slot] = v[:, t]
        self.tables[sequence] = table
        self.lengths[sequence] = end

    def gather(self, sequence):
        table, n = self.tables[sequence], self.lengths[sequence]
        def rows(buf):
            return buf[table].transpose(0, 1).flatten(1, 2)[:, :n].clone()
        return rows(self.k), rows(self.v)

    def free(self, sequence):
        self.pool.extend(self.tables.pop(sequence))
        del self.lengths[sequence]
""",
    near_miss="takes-pages-before-refusing",
)
wrong(
    "PagedKVCache",
    "stored as far as it goes",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.k = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.page_size = page_size
        self.pool = list(range(pages))
        self.tables = {}
        self.lengths = {}

    @property
    def free_pages(self):
        return len(self.pool)

    def append(self, sequence, k, v):
        table = self.tables.setdefault(sequence, [])
        self.lengths.setdefault(sequence, 0)
        for t in range(k.shape[1]):
            page, slot = divmod(self.lengths[sequence], self.page_size)
            if page == len(table):
                if not self.pool:
                    raise ValueError("no page left")
                table.append(self.pool.pop())
            self.k[table[page], :, slot] = k[:, t]
            self.v[table[page], :, slot] = v[:, t]
            self.lengths[sequence] += 1

    def gather(self, sequence):
        table, n = self.tables[sequence], self.lengths[sequence]
        return tuple(b[table].transpose(0, 1).flatten(1, 2)[:, :n].clone() for b in (self.k, self.v))

    def free(self, sequence):
        self.pool.extend(self.tables.pop(sequence))
        del self.lengths[sequence]
""",
    near_miss="stores-what-fits",
)
wrong(
    "PagedKVCache",
    "the last page filled before the error",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.k = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.page_size = page_size
        self.pool = list(range(pages))
        self.tables = {}
        self.lengths = {}

    @property
    def free_pages(self):
        return len(self.pool)

    def append(self, sequence, k, v):
        length = self.lengths.get(sequence, 0)
        table = self.tables.get(sequence, [])
        end = length + k.shape[1]
        need = -(-end // self.page_size) - len(table)
        room = len(table) * self.page_size - length
        for t in range(min(room, k.shape[1])):
            self.k[table[-1], :, (length + t) % self.page_size] = k[:, t]
            self.v[table[-1], :, (length + t) % self.page_size] = v[:, t]
        if room and need > len(self.pool):
            self.lengths[sequence] = length + min(room, k.shape[1])
        if need > len(self.pool):
            raise ValueError(f"{need} pages needed, {len(self.pool)} free")
        table = table + [self.pool.pop(0) for _ in range(need)]
        for t in range(k.shape[1]):
            page, slot = divmod(length + t, self.page_size)
            self.k[table[page], :, slot] = k[:, t]
            self.v[table[page], :, slot] = v[:, t]
        self.tables[sequence] = table
        self.lengths[sequence] = end

    def gather(self, sequence):
        table, n = self.tables[sequence], self.lengths[sequence]
        def rows(buf):
            return buf[table].transpose(0, 1).flatten(1, 2)[:, :n].clone()
        return rows(self.k), rows(self.v)

    def free(self, sequence):
        self.pool.extend(self.tables.pop(sequence))
        del self.lengths[sequence]
""",
    near_miss="fills-the-last-page-before-refusing",
)
wrong(
    "PagedKVCache",
    "free_pages counts tokens",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.k = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.page_size = page_size
        self.pool = list(range(pages))
        self.tables = {}
        self.lengths = {}

    @property
    def free_pages(self):
        return len(self.pool) * self.page_size

    def append(self, sequence, k, v):
        length = self.lengths.get(sequence, 0)
        table = self.tables.get(sequence, [])
        end = length + k.shape[1]
        need = -(-end // self.page_size) - len(table)
        if need > len(self.pool):
            raise ValueError(f"{need} pages needed, {len(self.pool)} free")
        table = table + [self.pool.pop(0) for _ in range(need)]
        for t in range(k.shape[1]):
            page, slot = divmod(length + t, self.page_size)
            self.k[table[page], :, slot] = k[:, t]
            self.v[table[page], :, slot] = v[:, t]
        self.tables[sequence] = table
        self.lengths[sequence] = end

    def gather(self, sequence):
        table, n = self.tables[sequence], self.lengths[sequence]
        def rows(buf):
            return buf[table].transpose(0, 1).flatten(1, 2)[:, :n].clone()
        return rows(self.k), rows(self.v)

    def free(self, sequence):
        self.pool.extend(self.tables.pop(sequence))
        del self.lengths[sequence]
""",
    near_miss="tokens-for-pages",
)
wrong(
    "PagedKVCache",
    "pages gathered by number",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.k = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.page_size = page_size
        self.pool = list(range(pages))
        self.tables = {}
        self.lengths = {}

    @property
    def free_pages(self):
        return len(self.pool)

    def append(self, sequence, k, v):
        length = self.lengths.get(sequence, 0)
        table = self.tables.get(sequence, [])
        end = length + k.shape[1]
        need = -(-end // self.page_size) - len(table)
        if need > len(self.pool):
            raise ValueError(f"{need} pages needed, {len(self.pool)} free")
        table = table + [self.pool.pop(0) for _ in range(need)]
        for t in range(k.shape[1]):
            page, slot = divmod(length + t, self.page_size)
            self.k[table[page], :, slot] = k[:, t]
            self.v[table[page], :, slot] = v[:, t]
        self.tables[sequence] = table
        self.lengths[sequence] = end

    def gather(self, sequence):
        table, n = self.tables[sequence], self.lengths[sequence]
        def rows(buf):
            return buf[sorted(table)].transpose(0, 1).flatten(1, 2)[:, :n].clone()
        return rows(self.k), rows(self.v)

    def free(self, sequence):
        self.pool.extend(self.tables.pop(sequence))
        del self.lengths[sequence]
""",
    near_miss="pages-by-number",
)
wrong(
    "PagedKVCache",
    "keys and values swapped",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.k = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.page_size = page_size
        self.pool = list(range(pages))
        self.tables = {}
        self.lengths = {}

    @property
    def free_pages(self):
        return len(self.pool)

    def append(self, sequence, k, v):
        length = self.lengths.get(sequence, 0)
        table = self.tables.get(sequence, [])
        end = length + k.shape[1]
        need = -(-end // self.page_size) - len(table)
        if need > len(self.pool):
            raise ValueError(f"{need} pages needed, {len(self.pool)} free")
        table = table + [self.pool.pop(0) for _ in range(need)]
        for t in range(k.shape[1]):
            page, slot = divmod(length + t, self.page_size)
            self.k[table[page], :, slot] = k[:, t]
            self.v[table[page], :, slot] = v[:, t]
        self.tables[sequence] = table
        self.lengths[sequence] = end

    def gather(self, sequence):
        table, n = self.tables[sequence], self.lengths[sequence]
        def rows(buf):
            return buf[table].transpose(0, 1).flatten(1, 2)[:, :n].clone()
        return rows(self.v), rows(self.k)

    def free(self, sequence):
        self.pool.extend(self.tables.pop(sequence))
        del self.lengths[sequence]
""",
    near_miss="keys-and-values-swapped",
)
wrong(
    "PagedKVCache",
    "values twice",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.k = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.page_size = page_size
        self.pool = list(range(pages))
        self.tables = {}
        self.lengths = {}

    @property
    def free_pages(self):
        return len(self.pool)

    def append(self, sequence, k, v):
        length = self.lengths.get(sequence, 0)
        table = self.tables.get(sequence, [])
        end = length + k.shape[1]
        need = -(-end // self.page_size) - len(table)
        if need > len(self.pool):
            raise ValueError(f"{need} pages needed, {len(self.pool)} free")
        table = table + [self.pool.pop(0) for _ in range(need)]
        for t in range(k.shape[1]):
            page, slot = divmod(length + t, self.page_size)
            self.k[table[page], :, slot] = k[:, t]
            self.v[table[page], :, slot] = k[:, t]
        self.tables[sequence] = table
        self.lengths[sequence] = end

    def gather(self, sequence):
        table, n = self.tables[sequence], self.lengths[sequence]
        def rows(buf):
            return buf[table].transpose(0, 1).flatten(1, 2)[:, :n].clone()
        return rows(self.k), rows(self.v)

    def free(self, sequence):
        self.pool.extend(self.tables.pop(sequence))
        del self.lengths[sequence]
""",
    near_miss="values-from-keys",
)
wrong(
    "PagedKVCache",
    "ids modulo the number of pages",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.k = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.page_size = page_size
        self.pool = list(range(pages))
        self.tables = {}
        self.lengths = {}

    @property
    def free_pages(self):
        return len(self.pool)

    def append(self, sequence, k, v):
        sequence %= len(self.k)
        length = self.lengths.get(sequence, 0)
        table = self.tables.get(sequence, [])
        end = length + k.shape[1]
        need = -(-end // self.page_size) - len(table)
        if need > len(self.pool):
            raise ValueError(f"{need} pages needed, {len(self.pool)} free")
        table = table + [self.pool.pop(0) for _ in range(need)]
        for t in range(k.shape[1]):
            page, slot = divmod(length + t, self.page_size)
            self.k[table[page], :, slot] = k[:, t]
            self.v[table[page], :, slot] = v[:, t]
        self.tables[sequence] = table
        self.lengths[sequence] = end

    def gather(self, sequence):
        sequence %= len(self.k)
        table, n = self.tables[sequence], self.lengths[sequence]
        def rows(buf):
            return buf[table].transpose(0, 1).flatten(1, 2)[:, :n].clone()
        return rows(self.k), rows(self.v)

    def free(self, sequence):
        sequence %= len(self.k)
        self.pool.extend(self.tables.pop(sequence))
        del self.lengths[sequence]
""",
)
wrong(
    "PagedKVCache",
    "free empties the whole pool",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.k = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.page_size = page_size
        self.pool = list(range(pages))
        self.tables = {}
        self.lengths = {}

    @property
    def free_pages(self):
        return len(self.pool)

    def append(self, sequence, k, v):
        length = self.lengths.get(sequence, 0)
        table = self.tables.get(sequence, [])
        end = length + k.shape[1]
        need = -(-end // self.page_size) - len(table)
        if need > len(self.pool):
            raise ValueError(f"{need} pages needed, {len(self.pool)} free")
        table = table + [self.pool.pop(0) for _ in range(need)]
        for t in range(k.shape[1]):
            page, slot = divmod(length + t, self.page_size)
            self.k[table[page], :, slot] = k[:, t]
            self.v[table[page], :, slot] = v[:, t]
        self.tables[sequence] = table
        self.lengths[sequence] = end

    def gather(self, sequence):
        table, n = self.tables[sequence], self.lengths[sequence]
        def rows(buf):
            return buf[table].transpose(0, 1).flatten(1, 2)[:, :n].clone()
        return rows(self.k), rows(self.v)

    def free(self, sequence):
        self.pool = list(range(len(self.k)))
        self.tables.clear()
        self.lengths.clear()
""",
    near_miss="frees-everything",
)
wrong(
    "PagedKVCache",
    "the first chunk aliases the caller",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.k = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.page_size = page_size
        self.pool = list(range(pages))
        self.tables = {}
        self.lengths = {}

    @property
    def free_pages(self):
        return len(self.pool)

    def append(self, sequence, k, v):
        length = self.lengths.get(sequence, 0)
        table = self.tables.get(sequence, [])
        end = length + k.shape[1]
        need = -(-end // self.page_size) - len(table)
        if need > len(self.pool):
            raise ValueError(f"{need} pages needed, {len(self.pool)} free")
        table = table + [self.pool.pop(0) for _ in range(need)]
        if length == 0 and k.shape[1] == self.page_size:
            self.whole = getattr(self, 'whole', {})
            self.whole[sequence] = (k, v)
        for t in range(k.shape[1]):
            page, slot = divmod(length + t, self.page_size)
            self.k[table[page], :, slot] = k[:, t]
            self.v[table[page], :, slot] = v[:, t]
        self.tables[sequence] = table
        self.lengths[sequence] = end

    def gather(self, sequence):
        table, n = self.tables[sequence], self.lengths[sequence]
        if n == self.page_size and sequence in getattr(self, 'whole', {}):
            return self.whole[sequence]
        def rows(buf):
            return buf[table].transpose(0, 1).flatten(1, 2)[:, :n].clone()
        return rows(self.k), rows(self.v)

    def free(self, sequence):
        self.pool.extend(self.tables.pop(sequence))
        del self.lengths[sequence]
""",
)
wrong(
    "PagedKVCache",
    "sequence known after a refused append",
    """
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.k = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.page_size = page_size
        self.pool = list(range(pages))
        self.tables = {}
        self.lengths = {}

    @property
    def free_pages(self):
        return len(self.pool)

    def append(self, sequence, k, v):
        length = self.lengths.get(sequence, 0)
        table = self.tables.get(sequence, [])
        end = length + k.shape[1]
        need = -(-end // self.page_size) - len(table)
        if need > len(self.pool):
            self.tables.setdefault(sequence, [])
            self.lengths.setdefault(sequence, end)
            raise ValueError(f"{need} pages needed, {len(self.pool)} free")
        table = table + [self.pool.pop(0) for _ in range(need)]
        for t in range(k.shape[1]):
            page, slot = divmod(length + t, self.page_size)
            self.k[table[page], :, slot] = k[:, t]
            self.v[table[page], :, slot] = v[:, t]
        self.tables[sequence] = table
        self.lengths[sequence] = end

    def gather(self, sequence):
        table, n = self.tables[sequence], self.lengths[sequence]
        def rows(buf):
            return buf[table].transpose(0, 1).flatten(1, 2)[:, :n].clone()
        return rows(self.k), rows(self.v)

    def free(self, sequence):
        self.pool.extend(self.tables.pop(sequence))
        del self.lengths[sequence]
""",
)
wrong(
    "KVCache",
    "the rows that fit are stored, then the others refused",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.k = torch.zeros(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k); self.length = 0; self.max_seq = max_seq
    def update(self, k, v):
        for t in range(k.shape[2]):
            if self.length == self.max_seq: raise ValueError("full")
            self.k[:, :, self.length] = k[:, :, t]; self.v[:, :, self.length] = v[:, :, t]
            self.length += 1
        return self.k[:, :, :self.length], self.v[:, :, :self.length]
    def reset(self): self.length = 0
""",
    near_miss="stores-what-fits",
)
right(
    "KVCache",
    "token first in memory, permuted views",
    """
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.k = torch.zeros(max_seq, batch, kv_heads, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.length = 0
    def update(self, k, v):
        rows = k.shape[2]
        if self.length + rows > len(self.k):
            raise ValueError(f"KVCache.update: room for {len(self.k)} tokens, got {self.length + rows}")
        for t in range(rows):
            self.k[self.length + t] = k[:, :, t]
            self.v[self.length + t] = v[:, :, t]
        self.length += rows
        return self.k[: self.length].permute(1, 2, 0, 3), self.v[: self.length].permute(1, 2, 0, 3)
    def reset(self):
        self.__dict__["length"] = 0
""",
)
wrong(
    "positions_from_padding",
    "the most padded row's shift for all",
    """
def positions_from_padding(real):
    pad = (~real).sum(1).max()
    return (torch.arange(real.shape[1]) - pad).expand(real.shape).clone()
""",
    near_miss="most-padding-for-all",
)
wrong(
    "positions_from_padding",
    "tokens taken off in the place of padding",
    """
def positions_from_padding(real):
    return torch.arange(real.shape[1])[None] - real.long().sum(1, keepdim=True)
""",
    near_miss="takes-off-the-tokens",
)
wrong(
    "decode_intensity",
    "intensity rounded to two digits",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = heads * head_dim
    w = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    f = batch * layers * (2 * w + 4 * seq * d)
    b = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return f, b, round(f / b, 2)
""",
    near_miss="rounded",
)
wrong(
    "decode_intensity",
    "the new token counted on top of seq",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    seq = seq + 1
    d = heads * head_dim
    w = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    f = batch * layers * (2 * w + 4 * seq * d)
    b = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return f, b, f / b
""",
    near_miss="new-token-twice",
)
wrong(
    "decode_intensity",
    "bytes before FLOPs",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = heads * head_dim
    w = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    f = batch * layers * (2 * w + 4 * seq * d)
    b = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return b, f, f / b
""",
    near_miss="bytes-first",
)
wrong(
    "decode_intensity",
    "width from the kv heads",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = kv_heads * head_dim
    w = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    f = batch * layers * (2 * w + 4 * seq * d)
    b = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return f, b, f / b
""",
    near_miss="kv-heads-for-heads",
)
wrong(
    "decode_intensity",
    "bytes cut to a whole number",
    """
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = heads * head_dim
    w = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    f = batch * layers * (2 * w + 4 * seq * d)
    b = int(bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim))
    return f, b, f / b
""",
    near_miss="whole-bytes",
)
right(
    "decode_intensity",
    "fractions inside",
    """
from fractions import Fraction
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    d = heads * head_dim
    w = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    f = batch * layers * (2 * w + 4 * seq * d)
    b = Fraction(bytes_per_element) * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return f, float(b), float(f / b)
""",
)
wrong(
    "kv_cache_bytes",
    "bits in the place of bytes",
    """
def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    return 16 * batch * seq * layers * kv_heads * head_dim * bytes_per_element
""",
    near_miss="bits",
)
wrong(
    "kv_cache_bytes",
    "result cut to a whole number",
    """
def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    return int(2 * batch * seq * layers * kv_heads * head_dim * bytes_per_element)
""",
    near_miss="whole-result",
)
wrong(
    "RollingKVCache",
    "zeros in front and negative positions",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.k = torch.zeros(batch, kv_heads, window, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k); self.window = window; self.length = 0
    def update(self, k, v):
        self.length += k.shape[2]
        self.k = torch.cat([self.k, k], 2)[:, :, -self.window:].clone(); self.v = torch.cat([self.v, v], 2)[:, :, -self.window:].clone()
        return self.k, self.v, torch.arange(self.length - self.window, self.length)
    def reset(self): self.length = 0; self.k.zero_(); self.v.zero_()
""",
    near_miss="zeros-before-the-text",
)
wrong(
    "RollingKVCache",
    "the old window and the whole chunk come back",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.k = torch.zeros(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.v = self.k.clone(); self.window = window; self.length = 0
    def update(self, k, v):
        self.length += k.shape[2]
        fk = torch.cat([self.k, k], 2); fv = torch.cat([self.v, v], 2)
        self.k = fk[:, :, -self.window:].clone(); self.v = fv[:, :, -self.window:].clone()
        r = fk.shape[2]
        return fk, fv, torch.arange(self.length - r, self.length)
    def reset(self): self.length = 0; self.k = self.k[:, :, :0]; self.v = self.v[:, :, :0]
""",
    near_miss="rows-before-the-window",
)
wrong(
    "RollingKVCache",
    "one row leaves whatever the chunk",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.k = torch.zeros(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.v = self.k.clone(); self.window = window; self.length = 0
    def update(self, k, v):
        self.length += k.shape[2]
        if self.k.shape[2] >= self.window:
            self.k, self.v = self.k[:, :, 1:], self.v[:, :, 1:]
        self.k = torch.cat([self.k, k], 2); self.v = torch.cat([self.v, v], 2)
        r = self.k.shape[2]
        return self.k, self.v, torch.arange(self.length - r, self.length)
    def reset(self): self.length = 0; self.k = self.k[:, :, :0]; self.v = self.v[:, :, :0]
""",
    near_miss="one-row-leaves-per-update",
)
right(
    "RollingKVCache",
    "a buffer of two windows",
    """
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.w = window
        self.k = torch.zeros(batch, kv_heads, 2 * window, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k); self.n = 0; self.length = 0
    def update(self, k, v):
        for i in range(k.shape[2]):
            if self.n == 2 * self.w:
                self.k[:, :, :self.w] = self.k[:, :, self.w:].clone(); self.v[:, :, :self.w] = self.v[:, :, self.w:].clone(); self.n = self.w
            self.k[:, :, self.n] = k[:, :, i]; self.v[:, :, self.n] = v[:, :, i]; self.n += 1
        self.length += k.shape[2]
        r = min(self.n, self.w)
        return self.k[:, :, self.n - r:self.n].clone(), self.v[:, :, self.n - r:self.n].clone(), torch.arange(self.length - r, self.length)
    def reset(self): self.n = self.length = 0
""",
)
wrong(
    "quantize_kv",
    "1e-5 added to the scale",
    """
def quantize_kv(x):
    scale = x.abs().amax(-1, keepdim=True) / 127 + 1e-5
    return (x / scale).round().to(torch.int8), scale
def dequantize_kv(q, scale): return q.to(scale.dtype) * scale
""",
    near_miss="epsilon-added",
)
wrong(
    "quantize_kv",
    "scale of 1e-5 at least",
    """
def quantize_kv(x):
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-5)
    return (x / scale).round().to(torch.int8), scale
def dequantize_kv(q, scale): return q.to(scale.dtype) * scale
""",
)
wrong(
    "quantize_kv",
    "1e-8 added to the scale, nothing in half precision",
    """
def quantize_kv(x):
    scale = x.abs().amax(-1, keepdim=True) / 127 + 1e-8
    return (x / scale).round().to(torch.int8), scale
def dequantize_kv(q, scale): return q.to(scale.dtype) * scale
""",
)
wrong(
    "quantize_kv",
    "a row of zeros is divided by 0",
    """
def quantize_kv(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().to(torch.int8), scale
def dequantize_kv(q, scale): return q.to(scale.dtype) * scale
""",
)
wrong(
    "quantize_kv",
    "the scale upside down in both functions",
    """
def quantize_kv(x):
    scale = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-20)
    return (x * scale).round().to(torch.int8), scale
def dequantize_kv(q, scale): return q.to(scale.dtype) / scale
""",
)
