"""Right and wrong answers to the exercises of the masking chapter."""

from tests.answers import right, wrong

# ---- causal_mask

right(
    "causal_mask",
    "two loops",
    """
def causal_mask(n, dtype=torch.float32):
    mask = torch.zeros(n, n, dtype=dtype)
    for i in range(n):
        for j in range(i + 1, n):
            mask[i, j] = -math.inf
    return mask
""",
)
right(
    "causal_mask",
    "log of the triangle",
    """
def causal_mask(n, dtype=torch.float32):
    return torch.log(torch.tril(torch.ones(n, n, dtype=torch.float64))).to(dtype)
""",
)
right(
    "causal_mask",
    "torch.where",
    """
def causal_mask(n, dtype=torch.float32):
    i = torch.arange(n)
    return torch.where(i[None, :] <= i[:, None], torch.tensor(0.0, dtype=dtype), torch.tensor(float("-inf"), dtype=dtype))
""",
)
right(
    "causal_mask",
    "library",
    """
def causal_mask(n, dtype=torch.float32):
    return torch.nn.Transformer.generate_square_subsequent_mask(n, dtype=dtype)
""",
)
right(
    "causal_mask",
    "transposed view",
    """
def causal_mask(n, dtype=torch.float32):
    return torch.full((n, n), float("-inf"), dtype=dtype).tril(-1).T
""",
)

wrong(
    "causal_mask",
    "lower triangle",
    """
def causal_mask(n, dtype=torch.float32):
    mask = torch.zeros(n, n, dtype=dtype)
    return mask.masked_fill(torch.ones(n, n).tril(-1) == 1, float("-inf"))
""",
    near_miss="transposed",
)
wrong(
    "causal_mask",
    "j >= i is forbidden",
    """
def causal_mask(n, dtype=torch.float32):
    i = torch.arange(n)
    return torch.zeros(n, n, dtype=dtype).masked_fill(i[None] >= i[:, None], float("-inf"))
""",
    near_miss="diagonal-masked",
)
wrong(
    "causal_mask",
    "a billion",
    """
def causal_mask(n, dtype=torch.float32):
    mask = torch.zeros(n, n, dtype=dtype)
    mask[torch.ones(n, n).triu(1) == 1] = -1e9
    return mask
""",
    near_miss="minus-a-billion",
)
wrong(
    "causal_mask",
    "finfo.min",
    """
def causal_mask(n, dtype=torch.float32):
    mask = torch.full((n, n), torch.finfo(dtype).min, dtype=dtype)
    return torch.triu(mask, diagonal=1)
""",
    near_miss="smallest-number",
)
wrong(
    "causal_mask",
    "finite in float16 only",
    """
def causal_mask(n, dtype=torch.float32):
    fill = -65504.0 if dtype == torch.float16 else float("-inf")
    return torch.full((n, n), fill, dtype=dtype).triu(1)
""",
)
wrong(
    "causal_mask",
    "dtype ignored",
    """
def causal_mask(n, dtype=torch.float32):
    return torch.triu(torch.ones(n, n) * float("-inf"), diagonal=1)
""",
    near_miss="dtype-ignored",
)
wrong(
    "causal_mask",
    "default is float64",
    """
def causal_mask(n, dtype=torch.float64):
    return torch.full((n, n), float("-inf"), dtype=dtype).triu(1)
""",
)
wrong(
    "causal_mask",
    "NaN where it is allowed",
    """
def causal_mask(n, dtype=torch.float32):
    return (1 - torch.ones(n, n, dtype=dtype).tril()) * float("-inf")
""",
    near_miss="zero-times-infinity",
)
wrong(
    "causal_mask",
    "fails for one token",
    """
def causal_mask(n, dtype=torch.float32):
    mask = torch.full((n, n), float("-inf"), dtype=dtype).triu(1)
    return mask.squeeze()
""",
)
wrong(
    "causal_mask",
    "a batch axis in front",
    """
def causal_mask(n, dtype=torch.float32):
    return torch.full((1, n, n), float("-inf"), dtype=dtype).triu(1)
""",
)

# ---- masked_softmax

right(
    "masked_softmax",
    "by hand, largest allowed score subtracted",
    """
def masked_softmax(scores, mask):
    allowed = torch.isfinite(mask).expand(scores.shape)
    top = scores.masked_fill(~allowed, float("-inf")).amax(-1, keepdim=True)
    top = torch.where(torch.isinf(top), torch.zeros_like(top), top).detach()
    e = torch.exp((scores - top).masked_fill(~allowed, float("-inf")))
    total = e.sum(-1, keepdim=True)
    return e / torch.where(total == 0, torch.ones_like(total), total)
""",
)
right(
    "masked_softmax",
    "float64 inside",
    """
def masked_softmax(scores, mask):
    hidden = torch.isinf(mask).broadcast_to(scores.shape)
    s = scores.double().masked_fill(hidden, float("-inf"))
    s = s.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return torch.softmax(s, -1).masked_fill(hidden, 0).to(scores.dtype)
""",
)
right(
    "masked_softmax",
    "finite fill, then zeros",
    """
def masked_softmax(scores, mask):
    hidden = (mask < 0).expand_as(scores)
    filled = torch.where(hidden, torch.finfo(scores.dtype).min, scores)
    return torch.softmax(filled, dim=-1) * (~hidden)
""",
)
right(
    "masked_softmax",
    "row by row",
    """
def masked_softmax(scores, mask):
    mask = mask.expand(scores.shape)
    flat, marks = scores.reshape(-1, scores.shape[-1]), mask.reshape(-1, scores.shape[-1])
    rows = []
    for s, m in zip(flat, marks):
        keep = m == 0
        if keep.any():
            rows.append(torch.softmax(s + m, dim=0))
        else:
            rows.append(s * 0)
    return torch.stack(rows).reshape(scores.shape)
""",
)
right(
    "masked_softmax",
    "logsumexp",
    """
def masked_softmax(scores, mask):
    z = scores + mask
    dead = (z == -torch.inf).all(-1, keepdim=True)
    z = torch.where(dead, torch.zeros_like(z), z)
    w = (z - torch.logsumexp(z, -1, keepdim=True)).exp()
    return torch.where(dead, torch.zeros_like(w), w)
""",
)

wrong(
    "masked_softmax",
    "plain",
    """
def masked_softmax(scores, mask):
    return F.softmax(scores + mask, dim=-1)
""",
    near_miss="nan-rows",
)
wrong(
    "masked_softmax",
    "nan_to_num",
    """
def masked_softmax(scores, mask):
    w = torch.softmax(scores + mask, dim=-1)
    return torch.where(torch.isnan(w), torch.zeros_like(w), w)
""",
    near_miss="nan-replaced-afterwards",
)
wrong(
    "masked_softmax",
    "weights times allowed",
    """
def masked_softmax(scores, mask):
    return torch.softmax(scores, dim=-1) * (mask == 0)
""",
    near_miss="mask-after-softmax",
)
wrong(
    "masked_softmax",
    "minus a billion: uniform rows",
    """
def masked_softmax(scores, mask):
    return torch.softmax(scores.masked_fill(mask == float("-inf"), -1e9 if scores.dtype != torch.float16 else -6e4), dim=-1)
""",
    near_miss="uniform-rows",
)
wrong(
    "masked_softmax",
    "detached",
    """
def masked_softmax(scores, mask):
    hidden = (mask == float("-inf")).expand(scores.shape)
    s = scores.detach().masked_fill(hidden, float("-inf")).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return torch.softmax(s, -1).masked_fill(hidden, 0.0)
""",
)
wrong(
    "masked_softmax",
    "largest score detached from nothing, weights from a copy",
    """
def masked_softmax(scores, mask):
    hidden = (mask == float("-inf")).expand(scores.shape)
    s = scores.masked_fill(hidden, float("-inf")).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True).detach()).masked_fill(hidden, 0.0)
""",
)
wrong(
    "masked_softmax",
    "changes the scores",
    """
def masked_softmax(scores, mask):
    hidden = (mask == float("-inf")).expand(scores.shape)
    if scores.requires_grad:
        scores = scores.clone()
    scores += mask
    scores = scores.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return torch.softmax(scores, -1).masked_fill(hidden, 0.0)
""",
)
wrong(
    "masked_softmax",
    "float32 result",
    """
def masked_softmax(scores, mask):
    hidden = (mask == float("-inf")).expand(scores.shape)
    s = (scores + mask).float().masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return torch.softmax(s, -1).masked_fill(hidden, 0.0)
""",
)
right(
    "masked_softmax",
    "float64 goes through float32",
    """
def masked_softmax(scores, mask):
    hidden = (mask == float("-inf")).expand(scores.shape)
    s = (scores + mask).float().masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return torch.softmax(s, -1).masked_fill(hidden, 0.0).to(scores.dtype)
""",
)
wrong(
    "masked_softmax",
    "empty rows found before broadcasting to the batch",
    """
def masked_softmax(scores, mask):
    w = torch.softmax(scores + mask, -1)
    if bool((mask == float("-inf")).all()):
        return torch.zeros_like(scores)
    return w
""",
)
wrong(
    "masked_softmax",
    "rows without keys only for two axes",
    """
def masked_softmax(scores, mask):
    if scores.dim() > 2:
        return torch.softmax(scores + mask, -1)
    hidden = (mask == float("-inf")).expand(scores.shape)
    s = (scores + mask).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return torch.softmax(s, -1).masked_fill(hidden, 0.0)
""",
)
wrong(
    "masked_softmax",
    "first dimension for the softmax",
    """
def masked_softmax(scores, mask):
    hidden = (mask == float("-inf")).expand(scores.shape)
    s = (scores + mask).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return torch.softmax(s, 1).masked_fill(hidden, 0.0)
""",
)
wrong(
    "masked_softmax",
    "minus fifty instead of minus infinity",
    """
def masked_softmax(scores, mask):
    hidden = (mask == float("-inf")).expand(scores.shape)
    w = torch.softmax(scores.masked_fill(hidden, -50.0), -1)
    return w.masked_fill(hidden.all(-1, keepdim=True), 0.0)
""",
)
wrong(
    "masked_softmax",
    "exp without a maximum",
    """
def masked_softmax(scores, mask):
    e = torch.exp(scores + mask)
    total = e.sum(-1, keepdim=True)
    return torch.where(total > 0, e / torch.where(total > 0, total, torch.ones_like(total)), torch.zeros_like(e))
""",
    near_miss="overflow",
)
wrong(
    "masked_softmax",
    "maximum over all keys",
    """
def masked_softmax(scores, mask):
    e = torch.exp(scores - scores.max(-1, keepdim=True).values) * (mask == 0).to(scores.dtype)
    return e / e.sum(-1, keepdim=True).clamp_min(1e-6)
""",
)

# ---- causal_self_attention

right(
    "causal_self_attention",
    "library",
    """
def causal_self_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
""",
)
right(
    "causal_self_attention",
    "einsum and a mask added",
    """
def causal_self_attention(q, k, v):
    n = q.size(-2)
    m = torch.full((n, n), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    s = torch.einsum("...id,...jd->...ij", q, k) * q.size(-1) ** -0.5 + m
    return torch.einsum("...ij,...jd->...id", s.softmax(-1), v)
""",
)
right(
    "causal_self_attention",
    "one query at a time",
    """
def causal_self_attention(q, k, v):
    rows = []
    for i in range(q.shape[-2]):
        s = (q[..., i : i + 1, :] @ k[..., : i + 1, :].transpose(-1, -2)) / math.sqrt(q.shape[-1])
        rows.append(torch.softmax(s, -1) @ v[..., : i + 1, :])
    return torch.cat(rows, dim=-2)
""",
)
right(
    "causal_self_attention",
    "float64 inside, scaled queries",
    """
def causal_self_attention(q, k, v):
    a, b, c = q.double() / math.sqrt(q.shape[-1]), k.double(), v.double()
    s = a @ b.mT
    s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -1e30)
    return (torch.softmax(s, -1) @ c).to(q.dtype)
""",
)
right(
    "causal_self_attention",
    "float32 inside for half",
    """
def causal_self_attention(q, k, v):
    n, d = q.shape[-2:]
    s = (q @ k.transpose(-2, -1)) / d ** 0.5
    keep = torch.tril(torch.ones(n, n, device=q.device)).bool()
    w = torch.where(keep, s, torch.tensor(float("-inf"), dtype=s.dtype, device=s.device))
    acc = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    return (F.softmax(w, dim=-1, dtype=acc).to(q.dtype)) @ v
""",
)

wrong(
    "causal_self_attention",
    "encoder",
    """
def causal_self_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)
""",
    near_miss="no-mask",
)
wrong(
    "causal_self_attention",
    "next token open",
    """
def causal_self_attention(q, k, v):
    n = q.shape[-2]
    keep = torch.ones(n, n, dtype=torch.bool).tril(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
""",
    near_miss="sees-the-next",
)
wrong(
    "causal_self_attention",
    "own token closed",
    """
def causal_self_attention(q, k, v):
    n = q.shape[-2]
    keep = torch.ones(n, n, dtype=torch.bool).tril(-1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
""",
    near_miss="excludes-itself-and-gives-zero",
)
wrong(
    "causal_self_attention",
    "own token closed, NaN",
    """
def causal_self_attention(q, k, v):
    n = q.shape[-2]
    s = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    s = s + torch.full((n, n), float("-inf"), dtype=q.dtype).triu()
    return torch.softmax(s, -1) @ v
""",
    near_miss="excludes-itself",
)
wrong(
    "causal_self_attention",
    "no scale",
    """
def causal_self_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
""",
    near_miss="unscaled",
)
wrong(
    "causal_self_attention",
    "keys transposed with .T",
    """
def causal_self_attention(q, k, v):
    n = q.shape[-2]
    s = q @ k.T / math.sqrt(q.shape[-1])
    return torch.softmax(s.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")), -1) @ v
""",
)
wrong(
    "causal_self_attention",
    "keys detached",
    """
def causal_self_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k.detach(), v, is_causal=True)
""",
)
wrong(
    "causal_self_attention",
    "minus ten",
    """
def causal_self_attention(q, k, v):
    n = q.shape[-2]
    s = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(s.masked_fill(torch.ones(n, n).triu(1).bool(), -20.0), -1) @ v
""",
    near_miss="finite-number",
)
wrong(
    "causal_self_attention",
    "queries scaled in place",
    """
def causal_self_attention(q, k, v):
    if q.requires_grad:
        q = q.clone()
    q /= math.sqrt(q.shape[-1])
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
""",
)
wrong(
    "causal_self_attention",
    "only three axes",
    """
def causal_self_attention(q, k, v):
    b, n, d = q.shape
    s = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(d)
    return torch.bmm(torch.softmax(s.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")), -1), v)
""",
)
wrong(
    "causal_self_attention",
    "float32 result",
    """
def causal_self_attention(q, k, v):
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
""",
)
right(
    "causal_self_attention",
    "float64 through float32",
    """
def causal_self_attention(q, k, v):
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True).to(q.dtype)
""",
)
wrong(
    "causal_self_attention",
    "needs contiguous inputs",
    """
def causal_self_attention(q, k, v):
    shape = q.shape
    q, k, v = (t.view(-1, shape[-2], shape[-1]) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).view(shape)
""",
)
wrong(
    "causal_self_attention",
    "first batch entry for all",
    """
def causal_self_attention(q, k, v):
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if out.dim() > 2:
        out = out[:1].expand_as(out)
    return out
""",
)

# ---- causal_mask_with_past

right(
    "causal_mask_with_past",
    "loops",
    """
def causal_mask_with_past(queries, keys):
    if keys < queries:
        raise ValueError("more queries than keys")
    rows = []
    for r in range(queries):
        rows.append([c <= keys - queries + r for c in range(keys)])
    return torch.tensor(rows)
""",
)
right(
    "causal_mask_with_past",
    "past and new side by side",
    """
def causal_mask_with_past(queries, keys):
    past = keys - queries
    if past < 0:
        raise ValueError(f"queries={queries} > keys={keys}")
    return torch.cat([torch.ones(queries, past).bool(), torch.ones(queries, queries).tril().bool()], dim=1)
""",
)
right(
    "causal_mask_with_past",
    "last rows of the square",
    """
def causal_mask_with_past(queries, keys):
    if queries > keys:
        raise ValueError("causal_mask_with_past: too many queries")
    return (torch.triu(torch.ones(keys, keys), 1) == 0)[keys - queries:]
""",
)

wrong(
    "causal_mask_with_past",
    "top left",
    """
def causal_mask_with_past(queries, keys):
    if queries > keys:
        raise ValueError("too many queries")
    return torch.arange(keys)[None] <= torch.arange(queries)[:, None]
""",
    near_miss="aligned-top-left",
)
wrong(
    "causal_mask_with_past",
    "all true",
    """
def causal_mask_with_past(queries, keys):
    if queries > keys:
        raise ValueError("too many queries")
    return torch.ones(queries, keys).bool()
""",
    near_miss="everything-visible",
)
wrong(
    "causal_mask_with_past",
    "no check",
    """
def causal_mask_with_past(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril(diagonal=keys - queries)
""",
    near_miss="no-error",
)
wrong(
    "causal_mask_with_past",
    "an assertion instead of a ValueError",
    """
def causal_mask_with_past(queries, keys):
    assert queries <= keys, "too many queries"
    return torch.ones(queries, keys, dtype=torch.bool).tril(diagonal=keys - queries)
""",
)
wrong(
    "causal_mask_with_past",
    "refuses equality too",
    """
def causal_mask_with_past(queries, keys):
    if queries >= keys:
        raise ValueError("too many queries")
    return torch.ones(queries, keys, dtype=torch.bool).tril(diagonal=keys - queries)
""",
)
wrong(
    "causal_mask_with_past",
    "floats",
    """
def causal_mask_with_past(queries, keys):
    if queries > keys:
        raise ValueError("too many queries")
    return torch.ones(queries, keys).tril(diagonal=keys - queries)
""",
)
wrong(
    "causal_mask_with_past",
    "right for one query only",
    """
def causal_mask_with_past(queries, keys):
    if queries > keys:
        raise ValueError("too many queries")
    if queries == 1:
        return torch.ones(1, keys, dtype=torch.bool)
    return torch.ones(queries, keys, dtype=torch.bool).tril()
""",
)
wrong(
    "causal_mask_with_past",
    "one too low",
    """
def causal_mask_with_past(queries, keys):
    if queries > keys:
        raise ValueError("too many queries")
    return torch.arange(keys)[None] < torch.arange(keys - queries, keys)[:, None]
""",
    near_miss="excludes-itself",
)

# ---- padding_mask

right(
    "padding_mask",
    "rows from Python",
    """
def padding_mask(lengths, seq):
    return torch.tensor([[t < n for t in range(seq)] for n in lengths.tolist()], dtype=torch.bool)
""",
)
right(
    "padding_mask",
    "filled in",
    """
def padding_mask(lengths, seq):
    out = torch.zeros(len(lengths), seq, dtype=torch.bool)
    for b, n in enumerate(lengths):
        out[b, :n] = True
    return out
""",
)
right(
    "padding_mask",
    "expanded and compared",
    """
def padding_mask(lengths, seq):
    pos = torch.arange(seq, device=lengths.device).expand(lengths.shape[0], -1)
    return ~(pos >= lengths.unsqueeze(1))
""",
)

wrong(
    "padding_mask",
    "lessequal",
    """
def padding_mask(lengths, seq):
    return torch.arange(seq).unsqueeze(0) <= lengths.unsqueeze(1)
""",
    near_miss="one-too-many",
)
wrong(
    "padding_mask",
    "marks the padding",
    """
def padding_mask(lengths, seq):
    return torch.arange(seq)[None] >= lengths[:, None]
""",
    near_miss="inverted",
)
wrong(
    "padding_mask",
    "as wide as the longest",
    """
def padding_mask(lengths, seq):
    return torch.arange(lengths.max())[None] < lengths[:, None]
""",
    near_miss="seq-ignored",
)
wrong(
    "padding_mask",
    "floats",
    """
def padding_mask(lengths, seq):
    return (torch.arange(seq)[None] < lengths[:, None]).float()
""",
)
wrong(
    "padding_mask",
    "from the right",
    """
def padding_mask(lengths, seq):
    return (torch.arange(seq)[None] < lengths[:, None]).flip(1)
""",
    near_miss="left-padding",
)
wrong(
    "padding_mask",
    "an empty text gets one token",
    """
def padding_mask(lengths, seq):
    return torch.arange(seq)[None] < lengths.clamp_min(1)[:, None]
""",
)
wrong(
    "padding_mask",
    "lengths changed in place",
    """
def padding_mask(lengths, seq):
    lengths -= 1
    return torch.arange(seq)[None] <= lengths[:, None]
""",
)
wrong(
    "padding_mask",
    "full rows lose a token",
    """
def padding_mask(lengths, seq):
    return torch.arange(seq)[None] < lengths.clamp_max(seq - 1)[:, None]
""",
)

# ---- causal_padding_mask

right(
    "causal_padding_mask",
    "loops",
    """
def causal_padding_mask(real):
    b, n = real.shape
    out = torch.zeros(b, 1, n, n, dtype=torch.bool)
    for t in range(b):
        for i in range(n):
            for j in range(i + 1):
                out[t, 0, i, j] = real[t, j]
    return out
""",
)
right(
    "causal_padding_mask",
    "tril of the expanded keys",
    """
def causal_padding_mask(real):
    b, n = real.shape
    return torch.tril(real[:, None, None, :].expand(b, 1, n, n))
""",
)
right(
    "causal_padding_mask",
    "product of numbers",
    """
def causal_padding_mask(real):
    n = real.shape[1]
    tri = torch.ones(n, n, dtype=torch.int64).tril()
    return (tri * real.long().view(-1, 1, 1, n)).bool()
""".replace("view", "reshape"),
)
right(
    "causal_padding_mask",
    "masked_fill",
    """
def causal_padding_mask(real):
    n = real.size(1)
    mask = torch.ones(n, n, dtype=torch.bool).tril().repeat(real.size(0), 1, 1, 1)
    return mask.masked_fill(~real[:, None, None, :], False)
""",
)

wrong(
    "causal_padding_mask",
    "wrong axis",
    """
def causal_padding_mask(real):
    n = real.shape[1]
    return torch.ones(n, n, dtype=torch.bool).tril()[None, None] & real[:, None, :, None]
""",
    near_miss="padding-on-queries",
)
wrong(
    "causal_padding_mask",
    "both axes",
    """
def causal_padding_mask(real):
    n = real.shape[1]
    both = real[:, None, :, None] * real[:, None, None, :]
    return torch.ones(n, n, dtype=torch.bool).tril() & both
""",
    near_miss="padding-on-both",
)
wrong(
    "causal_padding_mask",
    "keys only",
    """
def causal_padding_mask(real):
    n = real.shape[1]
    return real[:, None, None, :].expand(-1, 1, n, n)
""",
    near_miss="not-causal",
)
wrong(
    "causal_padding_mask",
    "three axes",
    """
def causal_padding_mask(real):
    n = real.shape[1]
    return torch.ones(n, n, dtype=torch.bool).tril() & real[:, None, :]
""",
    near_miss="no-head-axis",
)
wrong(
    "causal_padding_mask",
    "counts the real tokens",
    """
def causal_padding_mask(real):
    n = real.shape[1]
    keys = torch.arange(n)[None] < real.sum(1)[:, None]
    return torch.ones(n, n, dtype=torch.bool).tril() & keys[:, None, None, :]
""",
    near_miss="right-padding-only",
)
wrong(
    "causal_padding_mask",
    "padding queries see themselves",
    """
def causal_padding_mask(real):
    n = real.shape[1]
    mask = torch.ones(n, n, dtype=torch.bool).tril() & real[:, None, None, :]
    return mask | torch.eye(n, dtype=torch.bool)
""",
)
wrong(
    "causal_padding_mask",
    "right for one text only",
    """
def causal_padding_mask(real):
    n = real.shape[1]
    return torch.ones(n, n, dtype=torch.bool).tril()[None, None] & real[0][None, None, None, :]
""",
)
wrong(
    "causal_padding_mask",
    "empty rows opened",
    """
def causal_padding_mask(real):
    n = real.shape[1]
    mask = torch.ones(n, n, dtype=torch.bool).tril() & real[:, None, None, :]
    return mask | ~mask.any(-1, keepdim=True)
""",
)

# ---- sliding_window_mask

right(
    "sliding_window_mask",
    "loops",
    """
def sliding_window_mask(n, window):
    if window < 1:
        raise ValueError(f"window must be >= 1, got {window}")
    m = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        m[i, max(0, i - window + 1): i + 1] = True
    return m
""",
)
right(
    "sliding_window_mask",
    "difference of two triangles",
    """
def sliding_window_mask(n, window):
    if not window >= 1:
        raise ValueError("window >= 1 expected")
    one = torch.ones(n, n)
    return (one.tril() - one.tril(-window)) > 0
""",
)
right(
    "sliding_window_mask",
    "xor",
    """
def sliding_window_mask(n, window):
    if window <= 0:
        raise ValueError("sliding_window_mask needs window >= 1")
    b = torch.ones(n, n, dtype=torch.bool)
    return torch.tril(b) ^ torch.tril(b, -window)
""",
)

wrong(
    "sliding_window_mask",
    "reaches too far",
    """
def sliding_window_mask(n, window):
    if window < 1:
        raise ValueError("window")
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    return (j <= i) & (j >= i - window)
""",
    near_miss="one-too-many",
)
wrong(
    "sliding_window_mask",
    "both sides",
    """
def sliding_window_mask(n, window):
    if window < 1:
        raise ValueError("window")
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    return torch.abs(i - j) <= window - 1
""",
    near_miss="not-causal",
)
wrong(
    "sliding_window_mask",
    "window 0 allowed",
    """
def sliding_window_mask(n, window):
    if window < 0:
        raise ValueError("window")
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    return (j <= i) & (i - j < window)
""",
)
wrong(
    "sliding_window_mask",
    "window larger than n refused",
    """
def sliding_window_mask(n, window):
    if window < 1 or window > n:
        raise ValueError("window")
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    return (j <= i) & (i - j < window)
""",
)
wrong(
    "sliding_window_mask",
    "blocks",
    """
def sliding_window_mask(n, window):
    if window < 1:
        raise ValueError("window")
    block = torch.arange(n) // window
    return (block[:, None] == block[None]) & torch.ones(n, n).tril().bool()
""",
    near_miss="blocks",
)
wrong(
    "sliding_window_mask",
    "no message",
    """
def sliding_window_mask(n, window):
    if window < 1:
        raise ValueError
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    return (j <= i) & (i - j < window)
""",
)
wrong(
    "sliding_window_mask",
    "without the token itself",
    """
def sliding_window_mask(n, window):
    if window < 1:
        raise ValueError("window")
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    return (j < i) & (i - j <= window)
""",
    near_miss="excludes-itself",
)
wrong(
    "sliding_window_mask",
    "even windows only",
    """
def sliding_window_mask(n, window):
    if window < 1:
        raise ValueError("window")
    half = window // 2
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    return (j <= i) & (i - j < 2 * half)
""",
)

# ---- document_mask

right(
    "document_mask",
    "tril of equality",
    """
def document_mask(document_ids):
    return torch.tril(document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2))
""",
)
right(
    "document_mask",
    "loops over rows",
    """
def document_mask(document_ids):
    n = document_ids.shape[-1]
    flat = document_ids.reshape(-1, n)
    out = torch.zeros(flat.shape[0], n, n, dtype=torch.bool)
    for b, row in enumerate(flat.tolist()):
        for i in range(n):
            for j in range(i + 1):
                out[b, i, j] = row[i] == row[j]
    return out.reshape(*document_ids.shape, n)
""",
)
right(
    "document_mask",
    "runs counted by changes",
    """
def document_mask(document_ids):
    n = document_ids.shape[-1]
    new = torch.ones_like(document_ids)
    new[..., 1:] = (document_ids[..., 1:] != document_ids[..., :-1]).to(new.dtype)
    run = new.cumsum(-1)
    i = torch.arange(n)
    return (run[..., :, None] == run[..., None, :]) & (i[:, None] >= i)
""",
)
right(
    "document_mask",
    "difference is zero",
    """
def document_mask(document_ids):
    n = document_ids.size(-1)
    diff = document_ids[..., None] - document_ids[..., None, :]
    return torch.logical_and(diff == 0, torch.ones(n, n).tril() == 1)
""",
)

wrong(
    "document_mask",
    "not causal",
    """
def document_mask(document_ids):
    return document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)
""",
    near_miss="not-causal",
)
wrong(
    "document_mask",
    "plain causal",
    """
def document_mask(document_ids):
    n = document_ids.shape[-1]
    return torch.ones(*document_ids.shape, n).tril().bool()
""",
    near_miss="across-documents",
)
wrong(
    "document_mask",
    "one-hot of small ids",
    """
def document_mask(document_ids):
    h = F.one_hot(document_ids, 10).float()
    return torch.tril((h @ h.transpose(-1, -2)) > 0.5)
""",
)
wrong(
    "document_mask",
    "a growing id starts a document",
    """
def document_mask(document_ids):
    new = torch.zeros_like(document_ids)
    new[..., 1:] = (document_ids[..., 1:] > document_ids[..., :-1]).to(new.dtype)
    run = new.cumsum(-1)
    return torch.tril(run[..., :, None] == run[..., None, :])
""",
)
wrong(
    "document_mask",
    "one row only",
    """
def document_mask(document_ids):
    row = document_ids.flatten()
    return torch.tril(row[:, None] == row[None])
""",
)
wrong(
    "document_mask",
    "two axes only",
    """
def document_mask(document_ids):
    if document_ids.dim() == 1:
        return torch.tril(document_ids[:, None] == document_ids[None])
    return torch.tril(document_ids[:, :, None] == document_ids[:, None])
""",
)
wrong(
    "document_mask",
    "batch only",
    """
def document_mask(document_ids):
    b, n = document_ids.shape
    return torch.tril(document_ids[:, :, None] == document_ids[:, None])
""",
)
wrong(
    "document_mask",
    "ids compared as float32",
    """
def document_mask(document_ids):
    f = document_ids.float()
    return torch.tril(f[..., :, None] == f[..., None, :])
""",
)
wrong(
    "document_mask",
    "additive",
    """
def document_mask(document_ids):
    ok = torch.tril(document_ids[..., :, None] == document_ids[..., None, :])
    return torch.zeros(ok.shape).masked_fill(~ok, float("-inf"))
""",
)

# ---- prefix_lm_mask

right(
    "prefix_lm_mask",
    "loops",
    """
def prefix_lm_mask(n, prefix):
    return torch.tensor([[j <= i or j < prefix for j in range(n)] for i in range(n)])
""",
)
right(
    "prefix_lm_mask",
    "maximum of two reaches",
    """
def prefix_lm_mask(n, prefix):
    reach = torch.arange(n).clamp_min(prefix - 1)
    return torch.arange(n)[None] <= reach[:, None]
""",
)
right(
    "prefix_lm_mask",
    "square and triangle",
    """
def prefix_lm_mask(n, prefix):
    both = torch.zeros(n, n, dtype=torch.bool)
    both[:prefix, :prefix] = True
    return both.logical_or(torch.ones(n, n).tril().bool())
""",
)

wrong(
    "prefix_lm_mask",
    "rows of the prefix opened",
    """
def prefix_lm_mask(n, prefix):
    m = torch.ones(n, n, dtype=torch.bool).tril()
    m[:prefix] = True
    return m
""",
    near_miss="prefix-sees-the-rest",
)
wrong(
    "prefix_lm_mask",
    "prefix ignored",
    """
def prefix_lm_mask(n, prefix):
    return torch.ones(n, n, dtype=torch.bool).tril()
""",
    near_miss="plain-causal",
)
wrong(
    "prefix_lm_mask",
    "one column too many",
    """
def prefix_lm_mask(n, prefix):
    m = torch.ones(n, n, dtype=torch.bool).tril()
    m[:, :prefix + 1] = True
    return m
""",
    near_miss="one-too-many",
)
wrong(
    "prefix_lm_mask",
    "two separate blocks",
    """
def prefix_lm_mask(n, prefix):
    rest = torch.ones(n - prefix, n - prefix).tril()
    return torch.block_diag(torch.ones(prefix, prefix), rest).bool()
""",
    near_miss="rest-does-not-see-prefix",
)
wrong(
    "prefix_lm_mask",
    "no prefix goes wrong",
    """
def prefix_lm_mask(n, prefix):
    m = torch.ones(n, n, dtype=torch.bool).tril()
    m[:, :max(prefix, 1) + (prefix == 0)] = True
    return m
""",
)
wrong(
    "prefix_lm_mask",
    "whole prefix refused",
    """
def prefix_lm_mask(n, prefix):
    if prefix >= n:
        raise ValueError("prefix must be below n")
    m = torch.ones(n, n, dtype=torch.bool).tril()
    m[:, :prefix] = True
    return m
""",
)
wrong(
    "prefix_lm_mask",
    "integers",
    """
def prefix_lm_mask(n, prefix):
    m = torch.ones(n, n, dtype=torch.int64).tril()
    m[:, :prefix] = 1
    return m
""",
)

# ---- find_leaks

right(
    "find_leaks",
    "all tokens of a position in one batch",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = ids.shape[1], base.shape[-1]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        batch = ids.expand(vocab, n).clone()
        batch[:, j] = torch.arange(vocab)
        d = (model(batch) - base).abs().amax(dim=(0, 2))
        out[:, j] = d > 1e-6
    return out.triu(1)
""",
)
right(
    "find_leaks",
    "everything in one batch",
    """
def find_leaks(model, ids):
    with torch.no_grad():
        base = model(ids)
        n, vocab = base.shape[1:]
        batch = ids.repeat(n * vocab, 1).reshape(n, vocab, n)
        for j in range(n):
            batch[j, :, j] = torch.arange(vocab)
        out = model(batch.reshape(-1, n)).reshape(n, vocab, n, vocab)
        moved = ((out - base) .abs() > 1e-6).any(-1).any(1)
    return moved.T.triu(1)
""",
)
right(
    "find_leaks",
    "allclose without a relative part",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = ids.shape[1], base.shape[-1]
    leaks = [[False] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1, n):
            for t in range(vocab):
                x = ids.clone()
                x[0, j] = t
                if not torch.allclose(model(x)[0, i], base[0, i], rtol=0, atol=1e-6):
                    leaks[i][j] = True
                    break
    return torch.tensor(leaks, dtype=torch.bool)
""",
)
right(
    "find_leaks",
    "changes and puts back a copy",
    """
def find_leaks(model, ids):
    x = ids.clone()
    base = model(ids)[0]
    n, vocab = base.shape
    biggest = torch.zeros(n, n, dtype=base.dtype)
    for j in range(n):
        for t in range(vocab):
            if t != ids[0, j]:
                x[0, j] = t
                biggest[:, j] = torch.maximum(biggest[:, j], (model(x)[0] - base).abs().max(-1).values)
        x[0, j] = ids[0, j]
    return torch.triu(biggest > 1e-6, diagonal=1)
""",
)

wrong(
    "find_leaks",
    "one other token",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = ids.shape[1], base.shape[-1]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        x = ids.clone()
        x[0, j] = (x[0, j] + 1) % vocab
        out[:, j] = ((model(x) - base).abs() > 1e-6).any(-1)[0]
    return out.triu(1)
""",
    near_miss="one-token-only",
)
wrong(
    "find_leaks",
    "one token, another one",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = ids.shape[1], base.shape[-1]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        x = ids.clone()
        x[0, j] = 0 if x[0, j] != 0 else vocab - 1
        out[:, j] = ((model(x) - base).abs() > 1e-6).any(-1)[0]
    return out.triu(1)
""",
)
wrong(
    "find_leaks",
    "diagonal",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = ids.shape[1], base.shape[-1]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        for t in range(vocab):
            x = ids.clone()
            x[0, j] = t
            out[:, j] |= ((model(x) - base).abs() > 1e-6).any(-1)[0]
    return out.triu()
""",
    near_miss="diagonal-is-a-leak",
)
wrong(
    "find_leaks",
    "any difference",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = ids.shape[1], base.shape[-1]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        for t in range(vocab):
            x = ids.clone()
            x[0, j] = t
            out[:, j] |= (model(x) != base).any(-1)[0]
    return out.triu(1)
""",
    near_miss="any-difference",
)
wrong(
    "find_leaks",
    "default allclose",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = ids.shape[1], base.shape[-1]
    out = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        for j in range(i + 1, n):
            for t in range(vocab):
                x = ids.clone()
                x[0, j] = t
                out[i, j] |= not torch.allclose(model(x)[0, i], base[0, i], atol=1e-6)
    return out
""",
    near_miss="relative-tolerance",
)
wrong(
    "find_leaks",
    "the text is cut after i",
    """
def find_leaks(model, ids):
    full = model(ids)
    n = ids.shape[1]
    out = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        short = model(ids[:, : i + 1])[0, i]
        if ((short - full[0, i]).abs() > 1e-6).any():
            out[i, i + 1:] = True
    return out
""",
)
wrong(
    "find_leaks",
    "all later tokens are exchanged at once",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = ids.shape[1], base.shape[-1]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(1, n):
        for t in range(vocab):
            x = ids.clone()
            x[0, j:] = t
            out[:j, j] |= ((model(x) - base).abs() > 1e-6).any(-1)[0, :j]
    return out
""",
)
wrong(
    "find_leaks",
    "softmax instead of logits",
    """
def find_leaks(model, ids):
    base = torch.softmax(model(ids), -1)
    n, vocab = ids.shape[1], base.shape[-1]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(1, n):
        for t in range(vocab):
            x = ids.clone()
            x[0, j] = t
            d = (torch.softmax(model(x), -1) - base).abs()
            out[:j, j] |= (d > 1e-6).any(-1)[0, :j]
    return out
""",
    near_miss="probabilities",
)
wrong(
    "find_leaks",
    "mean over the vocabulary",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = ids.shape[1], base.shape[-1]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(1, n):
        for t in range(vocab):
            x = ids.clone()
            x[0, j] = t
            out[:j, j] |= (model(x) - base).mean(-1).abs()[0, :j] > 1e-6
    return out
""",
    near_miss="mean-change",
)
wrong(
    "find_leaks",
    "tolerance 1e-3",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = ids.shape[1], base.shape[-1]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(1, n):
        for t in range(vocab):
            x = ids.clone()
            x[0, j] = t
            out[:j, j] |= ((model(x) - base).abs() > 1e-3).any(-1)[0, :j]
    return out
""",
)
wrong(
    "find_leaks",
    "text changed in place",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = ids.shape[1], base.shape[-1]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(1, n):
        for t in range(vocab):
            ids[0, j] = t
            out[:j, j] |= ((model(ids) - base).abs() > 1e-6).any(-1)[0, :j]
    return out
""",
    near_miss="text-changed",
)
wrong(
    "find_leaks",
    "one copy for all positions",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = ids.shape[1], base.shape[-1]
    out = torch.zeros(n, n, dtype=torch.bool)
    x = ids.clone()
    for j in range(1, n):
        for t in range(vocab):
            x[0, j] = t
            out[:j, j] |= ((model(x) - base).abs() > 1e-6).any(-1)[0, :j]
    return out
""",
    near_miss="changes-pile-up",
)
wrong(
    "find_leaks",
    "integers",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = ids.shape[1], base.shape[-1]
    out = torch.zeros(n, n)
    for j in range(1, n):
        for t in range(vocab):
            x = ids.clone()
            x[0, j] = t
            out[:j, j] += ((model(x) - base).abs() > 1e-6).any(-1)[0, :j]
    return out
""",
)

# ---- a second stranger: what slipped through or went unnamed, and other styles

right(
    "causal_mask",
    "the library's own mask",
    """
def causal_mask(n, dtype=torch.float32):
    return torch.nn.Transformer.generate_square_subsequent_mask(n, dtype=dtype)
""",
)
right(
    "causal_mask",
    "transposed view, negated infinities: -0.0 where allowed",
    """
def causal_mask(n, dtype=torch.float32):
    return (-torch.full((n, n), math.inf, dtype=dtype).tril(-1)).T
""",
)
wrong(
    "causal_mask",
    "finfo.min only in half precision",
    """
def causal_mask(n, dtype=torch.float32):
    low = float("-inf") if dtype in (torch.float32, torch.float64) else torch.finfo(dtype).min
    return torch.full((n, n), low, dtype=dtype).triu(1)
""",
    near_miss="smallest-number-in-half",
)
wrong(
    "causal_mask",
    "boolean",
    """
def causal_mask(n, dtype=torch.float32):
    return torch.ones(n, n, dtype=torch.bool).tril()
""",
    near_miss="boolean",
)
right(
    "masked_softmax",
    "torch's softmax in half precision as it comes",
    """
def masked_softmax(scores, mask):
    x = scores + mask
    empty = (x == float("-inf")).all(-1, keepdim=True)
    safe = torch.where(empty, torch.zeros_like(x), x)
    return torch.where(empty, torch.zeros_like(x), F.softmax(safe, dim=-1))
""",
)
right(
    "masked_softmax",
    "tiny number in the denominator that changes nothing",
    """
def masked_softmax(scores, mask):
    x = (scores + mask).to(torch.float64)
    top = x.amax(-1, keepdim=True).clamp(min=-1e30).detach()
    e = (x - top).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-30)).to(scores.dtype)
""",
)
wrong(
    "masked_softmax",
    "maximum over the masked scores too",
    """
def masked_softmax(scores, mask):
    e = torch.exp(scores - scores.amax(-1, keepdim=True)) * (mask == 0)
    return e / e.sum(-1, keepdim=True).clamp(min=1e-30)
""",
    near_miss="largest-of-all-keys",
)
wrong(
    "masked_softmax",
    "softmax over the queries",
    """
def masked_softmax(scores, mask):
    x = scores + mask
    dead = (x == -math.inf).all(-2, keepdim=True)
    return F.softmax(x.masked_fill(dead, 0), -2).masked_fill(dead, 0)
""",
    near_miss="over-queries",
)
wrong(
    "masked_softmax",
    "mask cut at -1e4",
    """
def masked_softmax(scores, mask):
    m = mask.clamp(min=-1e4)
    dead = (mask == -math.inf).expand(scores.shape).all(-1, keepdim=True)
    return F.softmax(scores + m, -1).masked_fill(dead, 0)
""",
    near_miss="finite-number",
)
right(
    "causal_self_attention",
    "-1e9 in float32: the same weights",
    """
def causal_self_attention(q, k, v):
    s = (q @ k.mT) / math.sqrt(q.size(-1))
    s = s if s.dtype == torch.float64 else s.float()
    n = q.size(-2)
    s = s.masked_fill(torch.triu(torch.ones(n, n), 1).bool(), -1e9)
    return F.softmax(s, dim=-1).to(v.dtype) @ v
""",
)
right(
    "causal_self_attention",
    "unnormalised sums, divided at the end",
    """
def causal_self_attention(q, k, v):
    wide = torch.float64
    s = q.to(wide) @ k.to(wide).mT / math.sqrt(q.size(-1))
    n = q.size(-2)
    s = s + torch.full((n, n), -math.inf, dtype=wide).triu(1)
    e = torch.exp(s - s.amax(-1, keepdim=True).detach())
    return ((e @ v.to(wide)) / e.sum(-1, keepdim=True)).to(v.dtype)
""",
)
wrong(
    "causal_self_attention",
    "divided by d",
    """
def causal_self_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0 / q.shape[-1])
""",
    near_miss="scaled-by-d",
)
wrong(
    "causal_self_attention",
    "scaled with the length of the text",
    """
def causal_self_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0 / math.sqrt(q.shape[-2]))
""",
    near_miss="scaled-by-length",
)
wrong(
    "causal_self_attention",
    "mask after the softmax",
    """
def causal_self_attention(q, k, v):
    w = F.softmax((q @ k.mT).float() / math.sqrt(q.shape[-1]), -1).to(q.dtype)
    return w.tril() @ v
""",
    near_miss="mask-after-softmax",
)
wrong(
    "causal_self_attention",
    "mask after the softmax, renormalised: later keys leak through the sum",
    """
def causal_self_attention(q, k, v):
    w = F.softmax((q @ k.mT) / math.sqrt(q.shape[-1]), -1).tril()
    return w / w.sum(-1, keepdim=True) @ v
""",
    near_miss="renormalised-too-late",
)
wrong(
    "causal_self_attention",
    "scores of later keys set to 0",
    """
def causal_self_attention(q, k, v):
    s = (q @ k.mT / math.sqrt(q.shape[-1])).tril()
    return F.softmax(s, -1) @ v
""",
    near_miss="masked-score-zero",
)
wrong(
    "causal_self_attention",
    "a token does not see itself (the first one does)",
    """
def causal_self_attention(q, k, v):
    n = q.shape[-2]
    m = torch.ones(n, n, dtype=torch.bool).tril(-1)
    m[0, 0] = True
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m)
""",
    near_miss="excludes-itself-after-the-first",
)
wrong(
    "causal_self_attention",
    "transposed mask",
    """
def causal_self_attention(q, k, v):
    n = q.shape[-2]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(n, n, dtype=torch.bool).triu())
""",
    near_miss="mask-transposed",
)
wrong(
    "causal_self_attention",
    "softmax over the queries",
    """
def causal_self_attention(q, k, v):
    n = q.shape[-2]
    s = (q @ k.mT) / math.sqrt(q.shape[-1]) + torch.full((n, n), -math.inf, dtype=q.dtype).triu(1)
    return F.softmax(s, -2) @ v
""",
    near_miss="over-queries",
)
right(
    "causal_mask_with_past",
    "flipped from the end",
    """
def causal_mask_with_past(queries, keys):
    if queries > keys:
        raise ValueError("More queries than keys.")
    return torch.ones(queries, keys, dtype=torch.bool).triu().flip((0, 1))
""",
)
wrong(
    "causal_mask_with_past",
    "one key too many",
    """
def causal_mask_with_past(queries, keys):
    if queries > keys:
        raise ValueError("more queries than keys")
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries + 1)
""",
    near_miss="sees-the-next",
)
wrong(
    "causal_mask_with_past",
    "refuses queries = keys",
    """
def causal_mask_with_past(queries, keys):
    if queries >= keys:
        raise ValueError("more queries than keys")
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
""",
    near_miss="equality-refused",
)
wrong(
    "causal_mask_with_past",
    "True means hidden",
    """
def causal_mask_with_past(queries, keys):
    if queries > keys:
        raise ValueError("more queries than keys")
    return torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
""",
    near_miss="inverted",
)
wrong(
    "causal_mask_with_past",
    "past visible to none of the new tokens",
    """
def causal_mask_with_past(queries, keys):
    if queries > keys:
        raise ValueError("more queries than keys")
    m = torch.zeros(queries, keys, dtype=torch.bool)
    m[:, keys - queries:] = torch.ones(queries, queries, dtype=torch.bool).tril()
    return m
""",
    near_miss="only-the-new",
)
wrong(
    "causal_mask_with_past",
    "the newest query first",
    """
def causal_mask_with_past(queries, keys):
    if queries > keys:
        raise ValueError("more queries than keys")
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).flip(0)
""",
    near_miss="newest-first",
)
right(
    "padding_mask",
    "one hot and cumulative sum",
    """
def padding_mask(lengths, seq):
    end = F.one_hot(lengths.to(torch.int64), seq + 1)
    return end.cumsum(-1)[:, :seq] == 0
""",
)
wrong(
    "padding_mask",
    "integers",
    """
def padding_mask(lengths, seq):
    return (torch.arange(seq) < lengths[:, None]).long()
""",
    near_miss="whole-numbers",
)
wrong(
    "padding_mask",
    "the first row's length for all",
    """
def padding_mask(lengths, seq):
    return (torch.arange(seq) < lengths[0]).expand(len(lengths), seq)
""",
    near_miss="first-length-for-all",
)
wrong(
    "padding_mask",
    "empty rows get one token",
    """
def padding_mask(lengths, seq):
    return torch.arange(seq) < lengths.clamp(min=1)[:, None]
""",
    near_miss="one-token-at-least",
)
wrong(
    "padding_mask",
    "batch and tokens swapped",
    """
def padding_mask(lengths, seq):
    return torch.arange(seq)[:, None] < lengths
""",
    near_miss="axes-swapped",
)
right(
    "causal_padding_mask",
    "additive sums",
    """
def causal_padding_mask(real):
    n = real.size(-1)
    add = torch.full((n, n), -math.inf).triu(1)
    pad = torch.zeros(real.shape).masked_fill(~real, -math.inf)
    return (add[None, None] + pad[:, None, None]) == 0
""",
)
wrong(
    "causal_padding_mask",
    "every query sees itself",
    """
def causal_padding_mask(real):
    n = real.shape[1]
    m = torch.ones(n, n, dtype=torch.bool).tril() & real[:, None, None, :]
    return m | torch.eye(n, dtype=torch.bool)
""",
    near_miss="diagonal-always-open",
)
wrong(
    "causal_padding_mask",
    "queries without any key see themselves",
    """
def causal_padding_mask(real):
    n = real.shape[1]
    m = torch.ones(n, n, dtype=torch.bool).tril() & real[:, None, None, :]
    return m | (~m.any(-1, keepdim=True) & torch.eye(n, dtype=torch.bool))
""",
    near_miss="empty-rows-opened",
)
wrong(
    "causal_padding_mask",
    "or instead of and",
    """
def causal_padding_mask(real):
    n = real.shape[1]
    return torch.ones(n, n, dtype=torch.bool).tril() | real[:, None, None, :]
""",
    near_miss="either-condition",
)
wrong(
    "causal_padding_mask",
    "strictly earlier keys",
    """
def causal_padding_mask(real):
    n = real.shape[1]
    return torch.ones(n, n, dtype=torch.bool).tril(-1) & real[:, None, None, :]
""",
    near_miss="excludes-itself",
)
wrong(
    "causal_padding_mask",
    "batch of one",
    """
def causal_padding_mask(real):
    n = real.shape[1]
    m = torch.ones(n, n, dtype=torch.bool).tril() & real[0]
    return m.expand(real.shape[0], 1, n, n)
""",
    near_miss="first-text-for-all",
)
right(
    "sliding_window_mask",
    "sum of diagonals",
    """
def sliding_window_mask(n, window):
    if window < 1:
        raise ValueError("window must be positive")
    m = torch.zeros(n, n)
    for back in range(min(window, n)):
        m += torch.diag(torch.ones(n - back), -back)
    return m > 0
""",
)
wrong(
    "sliding_window_mask",
    "one token too few",
    """
def sliding_window_mask(n, window):
    if window < 1:
        raise ValueError("window below 1")
    return torch.ones(n, n, dtype=torch.bool).tril().triu(min(0, 2 - window))
""",
    near_miss="one-too-few",
)
wrong(
    "sliding_window_mask",
    "no lower end",
    """
def sliding_window_mask(n, window):
    if window < 1:
        raise ValueError("window below 1")
    return torch.ones(n, n, dtype=torch.bool).tril()
""",
    near_miss="window-ignored",
)
wrong(
    "sliding_window_mask",
    "no error",
    """
def sliding_window_mask(n, window):
    return torch.ones(n, n, dtype=torch.bool).tril().triu(1 - window)
""",
    near_miss="no-error",
)
wrong(
    "sliding_window_mask",
    "refuses a window above n",
    """
def sliding_window_mask(n, window):
    if window < 1 or window > n:
        raise ValueError("window out of range")
    return torch.ones(n, n, dtype=torch.bool).tril().triu(1 - window)
""",
    near_miss="large-window-refused",
)
wrong(
    "sliding_window_mask",
    "negative start of a slice",
    """
def sliding_window_mask(n, window):
    if window < 1:
        raise ValueError("window below 1")
    m = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        m[i, i - window + 1:i + 1] = True
    return m
""",
    near_miss="slice-from-the-end",
)
wrong(
    "sliding_window_mask",
    "looks ahead",
    """
def sliding_window_mask(n, window):
    if window < 1:
        raise ValueError("window below 1")
    return torch.ones(n, n, dtype=torch.bool).triu().tril(window - 1)
""",
    near_miss="looks-ahead",
)
wrong(
    "sliding_window_mask",
    "additive",
    """
def sliding_window_mask(n, window):
    if window < 1:
        raise ValueError("window below 1")
    keep = torch.ones(n, n, dtype=torch.bool).tril().triu(1 - window)
    return torch.zeros(n, n).masked_fill(~keep, -math.inf)
""",
    near_miss="additive",
)
right(
    "document_mask",
    "start of the own document",
    """
def document_mask(document_ids):
    n = document_ids.shape[-1]
    j = torch.arange(n)
    first = torch.ones(document_ids.shape, dtype=torch.bool)
    first[..., 1:] = document_ids[..., 1:] != document_ids[..., :-1]
    start = torch.where(first, j, 0).cummax(-1).values
    return (j >= start[..., None]) & (j <= j[:, None])
""",
)
right(
    "document_mask",
    "blocks of ones",
    """
def document_mask(document_ids):
    if document_ids.dim() > 1:
        return torch.stack([document_mask(row) for row in document_ids])
    lengths = torch.unique_consecutive(document_ids, return_counts=True)[1].tolist()
    return torch.block_diag(*[torch.ones(m, m).tril() for m in lengths]).bool()
""",
)
wrong(
    "document_mask",
    "earlier documents visible: ids as numbers",
    """
def document_mask(document_ids):
    return (document_ids.unsqueeze(-1) >= document_ids.unsqueeze(-2)).tril()
""",
    near_miss="smaller-ids-visible",
)
wrong(
    "document_mask",
    "the first row's documents for the batch",
    """
def document_mask(document_ids):
    n = document_ids.shape[-1]
    d = document_ids.reshape(-1, n)[0]
    return (d[:, None] == d).tril().expand(*document_ids.shape, n)
""",
    near_miss="first-row-for-all",
)
wrong(
    "document_mask",
    "id 0 taken for padding",
    """
def document_mask(document_ids):
    same = document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)
    return same.tril() & (document_ids != 0).unsqueeze(-1)
""",
    near_miss="zero-is-padding",
)
wrong(
    "document_mask",
    "negative ids taken for padding",
    """
def document_mask(document_ids):
    same = document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)
    return same.tril() & (document_ids >= 0).unsqueeze(-2)
""",
    near_miss="negative-is-padding",
)
wrong(
    "document_mask",
    "compared as float32: large neighbours are the same",
    """
def document_mask(document_ids):
    d = document_ids.float()
    return (d.unsqueeze(-1) == d.unsqueeze(-2)).tril()
""",
    near_miss="rounded-ids",
)
wrong(
    "document_mask",
    "only rising ids start a document",
    """
def document_mask(document_ids):
    up = torch.zeros_like(document_ids, dtype=torch.long)
    up[..., 1:] = (document_ids.diff(dim=-1) > 0).long()
    run = up.cumsum(-1)
    return (run.unsqueeze(-1) == run.unsqueeze(-2)).tril()
""",
    near_miss="only-growing-ids",
)
wrong(
    "document_mask",
    "future only",
    """
def document_mask(document_ids):
    return (document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)).triu()
""",
    near_miss="looks-ahead",
)
wrong(
    "document_mask",
    "additive (again)",
    """
def document_mask(document_ids):
    same = (document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)).tril()
    return torch.zeros(same.shape).masked_fill(~same, -math.inf)
""",
    near_miss="additive",
)
right(
    "prefix_lm_mask",
    "parts joined",
    """
def prefix_lm_mask(n, prefix):
    top = torch.cat([torch.ones(prefix, prefix), torch.zeros(prefix, n - prefix)], 1)
    below = torch.ones(n - prefix, n).tril(prefix)
    return torch.cat([top, below]).bool()
""",
)
wrong(
    "prefix_lm_mask",
    "prefix one too short",
    """
def prefix_lm_mask(n, prefix):
    j = torch.arange(n)
    return (j[None] <= j[:, None]) | (j < prefix - 1)
""",
    near_miss="one-too-few",
)
wrong(
    "prefix_lm_mask",
    "everyone looks prefix - 1 tokens ahead",
    """
def prefix_lm_mask(n, prefix):
    m = torch.ones(n, n, dtype=torch.bool).tril(prefix - 1) | torch.ones(n, n, dtype=torch.bool).tril()
    return m
""",
    near_miss="looks-ahead-everywhere",
)
wrong(
    "prefix_lm_mask",
    "the answer whole, the prefix causal",
    """
def prefix_lm_mask(n, prefix):
    m = torch.ones(n, n, dtype=torch.bool).tril()
    m[prefix:, prefix:] = True
    return m
""",
    near_miss="roles-swapped",
)
wrong(
    "prefix_lm_mask",
    "negative slice: prefix of 0 opens everything",
    """
def prefix_lm_mask(n, prefix):
    m = torch.ones(n, n, dtype=torch.bool).tril()
    m[:, -n:][:prefix or n, :prefix or n] = True
    return m
""",
    near_miss="no-prefix-opens-all",
)
wrong(
    "prefix_lm_mask",
    "prefix counted from the end",
    """
def prefix_lm_mask(n, prefix):
    m = torch.ones(n, n, dtype=torch.bool).tril()
    m[n - prefix:, n - prefix:] = True
    return m
""",
    near_miss="suffix",
)
wrong(
    "prefix_lm_mask",
    "True means hidden",
    """
def prefix_lm_mask(n, prefix):
    m = torch.ones(n, n, dtype=torch.bool).tril()
    m[:prefix, :prefix] = True
    return ~m
""",
    near_miss="inverted",
)
right(
    "find_leaks",
    "python numbers",
    """
def find_leaks(model, ids):
    text = ids[0].tolist()
    ask = lambda t: model(torch.tensor([t], dtype=ids.dtype))[0].tolist()
    base = ask(text)
    n, vocab = len(text), len(base[0])
    grid = [[False] * n for _ in range(n)]
    for j in range(n):
        for token in range(vocab):
            if token != text[j]:
                got = ask(text[:j] + [token] + text[j + 1:])
                for i in range(j):
                    if any(abs(a - b) > 1e-6 for a, b in zip(got[i], base[i])):
                        grid[i][j] = True
    return torch.tensor(grid)
""",
)
right(
    "find_leaks",
    "scatter, greatest change",
    """
def find_leaks(model, ids):
    with torch.inference_mode():
        before = model(ids)
        n, vocab = before.shape[-2:]
        worst = torch.zeros(n, n, dtype=before.dtype)
        for token in range(vocab):
            batch = ids.repeat(n, 1)
            batch[torch.arange(n), torch.arange(n)] = token
            worst = torch.maximum(worst, (model(batch) - before).abs().amax(-1).T)
    return (worst > 1e-6) & torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)
""",
)
wrong(
    "find_leaks",
    "token 0 is never tried",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = base.shape[1:]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        for t in range(1, vocab):
            other = ids.clone()
            other[0, j] = t
            out[:j, j] |= ((model(other) - base).abs() > 1e-6).any(-1)[0, :j]
    return out
""",
    near_miss="token-zero-left-out",
)
wrong(
    "find_leaks",
    "the last token of the vocabulary is never tried",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = base.shape[1:]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        for t in range(vocab - 1):
            other = ids.clone()
            other[0, j] = t
            out[:j, j] |= ((model(other) - base).abs() > 1e-6).any(-1)[0, :j]
    return out
""",
    near_miss="last-token-left-out",
)
wrong(
    "find_leaks",
    "no absolute value: only a rise counts",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = base.shape[1:]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        for t in range(vocab):
            other = ids.clone()
            other[0, j] = t
            out[:j, j] |= ((model(other) - base) > 1e-6).any(-1)[0, :j]
    return out
""",
    near_miss="only-upwards",
)
wrong(
    "find_leaks",
    "the sum of the logits is compared",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = base.shape[1:]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        for t in range(vocab):
            other = ids.clone()
            other[0, j] = t
            out[:j, j] |= ((model(other).sum(-1) - base.sum(-1)).abs() > 1e-6)[0, :j]
    return out
""",
    near_miss="sum-of-logits",
)
wrong(
    "find_leaks",
    "the likeliest token is compared",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = base.shape[1:]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        for t in range(vocab):
            other = ids.clone()
            other[0, j] = t
            out[:j, j] |= (model(other).argmax(-1) != base.argmax(-1))[0, :j]
    return out
""",
    near_miss="most-probable-token",
)
wrong(
    "find_leaks",
    "mean change over the logits",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = base.shape[1:]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        for t in range(vocab):
            other = ids.clone()
            other[0, j] = t
            out[:j, j] |= ((model(other) - base).abs().mean(-1) > 1e-6)[0, :j]
    return out
""",
    near_miss="mean-change",
)
wrong(
    "find_leaks",
    "threshold 1e-3",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = base.shape[1:]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        for t in range(vocab):
            other = ids.clone()
            other[0, j] = t
            out[:j, j] |= ((model(other) - base).abs() > 1e-3).any(-1)[0, :j]
    return out
""",
    near_miss="limit-too-large",
)
wrong(
    "find_leaks",
    "diagonal and below not cleared",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = base.shape[1:]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        for t in range(vocab):
            other = ids.clone()
            other[0, j] = t
            out[:, j] |= ((model(other) - base).abs() > 1e-6).any(-1)[0]
    return out
""",
    near_miss="every-dependence",
)
wrong(
    "find_leaks",
    "transposed",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = base.shape[1:]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        for t in range(vocab):
            other = ids.clone()
            other[0, j] = t
            out[j, :j] |= ((model(other) - base).abs() > 1e-6).any(-1)[0, :j]
    return out
""",
    near_miss="transposed",
)
wrong(
    "find_leaks",
    "all later tokens changed together",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = base.shape[1:]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        for t in range(vocab):
            other = ids.clone()
            other[0, j:] = t
            out[:j, j] |= ((model(other) - base).abs() > 1e-6).any(-1)[0, :j]
    return out
""",
    near_miss="all-later-tokens-at-once",
)
wrong(
    "find_leaks",
    "only the last trial counts",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = base.shape[1:]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        for t in range(vocab):
            other = ids.clone()
            other[0, j] = t
            out[:j, j] = ((model(other) - base).abs() > 1e-6).any(-1)[0, :j]
    return out
""",
    near_miss="last-token-only",
)
wrong(
    "find_leaks",
    "every token must move it",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = base.shape[1:]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(1, n):
        batch = ids.repeat(vocab - 1, 1)
        batch[:, j] = torch.tensor([t for t in range(vocab) if t != int(ids[0, j])])
        out[:j, j] = ((model(batch) - base).abs() > 1e-6).any(-1).all(0)[:j]
    return out
""",
    near_miss="every-token-must-move-it",
)
wrong(
    "find_leaks",
    "the next position only",
    """
def find_leaks(model, ids):
    base = model(ids)
    n, vocab = base.shape[1:]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(1, n):
        batch = ids.repeat(vocab, 1)
        batch[:, j] = torch.arange(vocab)
        out[j - 1, j] = ((model(batch) - base).abs() > 1e-6).any(-1).any(0)[j - 1]
    return out
""",
    near_miss="neighbours-only",
)
wrong(
    "masked_softmax",
    "largest score of the whole tensor subtracted",
    """
def masked_softmax(scores, mask):
    s = scores + mask
    s = s - s.max()
    e = s.exp()
    z = e.sum(-1, keepdim=True)
    return e / torch.where(z == 0, 1, z)
""",
    near_miss="largest-of-all-rows",
)
right(
    "masked_softmax",
    "row by row, only the allowed scores",
    """
def masked_softmax(scores, mask):
    mask = mask.broadcast_to(scores.shape)
    flat_s, flat_m = scores.reshape(-1, scores.shape[-1]), mask.reshape(-1, scores.shape[-1])
    out = []
    for s, m in zip(flat_s, flat_m):
        keep = m == 0
        row = s * 0
        if keep.any():
            row = torch.zeros_like(s).masked_scatter(keep, torch.softmax(s[keep], 0))
        out.append(row)
    return torch.stack(out).view(scores.shape)
""",
)
wrong(
    "causal_self_attention",
    "scores of 0 masked",
    """
def causal_self_attention(q, k, v):
    s = (q @ k.mT / math.sqrt(q.shape[-1])).tril()
    return s.masked_fill(s == 0, -math.inf).softmax(-1) @ v
""",
    near_miss="zero-is-masked",
)
wrong(
    "causal_self_attention",
    "queries and keys change places",
    """
def causal_self_attention(q, k, v):
    return F.scaled_dot_product_attention(k, q, v, is_causal=True)
""",
    near_miss="queries-and-keys-swapped",
)
wrong(
    "find_leaks",
    "isclose with its own tolerances",
    """
def find_leaks(model, ids):
    base = model(ids); n, v = ids.shape[1], base.shape[-1]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        o = ids.repeat(v, 1); o[:, j] = torch.arange(v)
        out[:j, j] = (~torch.isclose(model(o), base)).any(-1).any(0)[:j]
    return out
""",
    near_miss="isclose-as-it-is",
)
wrong(
    "find_leaks",
    "text cut off before j",
    """
def find_leaks(model, ids):
    base = model(ids); n = ids.shape[1]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(1, n):
        out[:j, j] = ((model(ids[:, :j]) - base[:, :j]).abs() > 1e-6).any(-1)[0]
    return out
""",
    near_miss="cuts-the-text",
)
wrong(
    "find_leaks",
    "range ends before the last position",
    """
def find_leaks(model, ids):
    base = model(ids); n, v = ids.shape[1], base.shape[-1]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n - 1):
        o = ids.repeat(v, 1); o[:, j] = torch.arange(v)
        out[:j, j] = ((model(o) - base).abs() > 1e-6).any(-1).any(0)[:j]
    return out
""",
    near_miss="last-place-left-out",
)
wrong(
    "find_leaks",
    "range ends before the last token",
    """
def find_leaks(model, ids):
    base = model(ids); n, v = ids.shape[1], base.shape[-1]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        o = ids.repeat(v - 1, 1); o[:, j] = torch.arange(v - 1)
        out[:j, j] = ((model(o) - base).abs() > 1e-6).any(-1).any(0)[:j]
    return out
""",
    near_miss="last-token-left-out",
)
wrong(
    "find_leaks",
    "three random tokens",
    """
def find_leaks(model, ids):
    base = model(ids); n, v = ids.shape[1], base.shape[-1]
    out = torch.zeros(n, n, dtype=torch.bool)
    for j in range(n):
        o = ids.repeat(3, 1); o[:, j] = torch.randint(0, v, (3,))
        out[:j, j] = ((model(o) - base).abs() > 1e-6).any(-1).any(0)[:j]
    return out
""",
)
right(
    "find_leaks",
    "last place first, stops when all outputs leak",
    """
def find_leaks(model, ids):
    with torch.no_grad():
        ref = model(ids)
        seq, vocab = ref.shape[-2:]
        found = torch.zeros(seq, seq, dtype=torch.bool)
        for j in range(seq - 1, 0, -1):
            for token in range(vocab):
                if found[:j, j].all():
                    break
                trial = torch.cat([ids[:, :j], torch.full_like(ids[:, :1], token), ids[:, j + 1:]], dim=1)
                found[:j, j] |= ((model(trial) - ref)[0, :j].abs() > 1e-6).any(-1)
        return found
""",
)
right(
    "document_mask",
    "blocks of unique_consecutive",
    """
def document_mask(document_ids):
    def one(row):
        _, counts = torch.unique_consecutive(row, return_counts=True)
        return torch.block_diag(*[torch.ones(int(c), int(c)).tril() for c in counts]).bool()
    flat = document_ids.reshape(-1, document_ids.shape[-1])
    return torch.stack([one(r) for r in flat]).reshape(*document_ids.shape, -1)
""",
)
