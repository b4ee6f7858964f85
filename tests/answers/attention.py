"""Right and wrong answers to the exercises of the attention chapter."""

from tests.answers import right, wrong

# ---- scaled_dot_product_attention

right(
    "scaled_dot_product_attention",
    "einsum",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    scores = torch.einsum("...qd,...kd->...qk", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    return torch.einsum("...qk,...kv->...qv", scores.softmax(-1), v)
""",
)

right(
    "scaled_dot_product_attention",
    "library",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
""",
)

right(
    "scaled_dot_product_attention",
    "float64 inside",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    scores = q.double() @ k.double().mT / q.size(-1) ** 0.5
    if mask is not None:
        scores = scores + mask.double()
    return (torch.softmax(scores, -1) @ v.double()).to(q.dtype)
""",
)

right(
    "scaled_dot_product_attention",
    "float32 inside",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    scores = (q.float() / math.sqrt(q.shape[-1])) @ k.float().transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(mask == float("-inf"), float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(v.dtype)
    return weights @ v
""",
)

right(
    "scaled_dot_product_attention",
    "by hand with max",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    scores = torch.matmul(q, k.transpose(-2, -1)) / (q.shape[-1] ** 0.5)
    if mask is not None:
        scores = torch.where(mask == 0, scores, torch.full_like(scores, -torch.inf))
    scores = scores - scores.max(dim=-1, keepdim=True).values
    powers = torch.exp(scores)
    return (powers @ v) / powers.sum(-1, keepdim=True)
""",
)

right(
    "scaled_dot_product_attention",
    "loop over queries",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    rows = []
    if mask is not None:
        mask = mask.expand(*q.shape[:-1], k.shape[-2])
    for i in range(q.shape[-2]):
        scores = (q[..., i : i + 1, :] * k).sum(-1) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores + mask[..., i, :]
        weights = torch.softmax(scores, -1)
        rows.append((weights[..., None] * v).sum(-2))
    return torch.stack(rows, dim=-2)
""",
)

right(
    "scaled_dot_product_attention",
    "root on both sides",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    fourth = q.shape[-1] ** 0.25
    scores = (q / fourth) @ (k / fourth).transpose(-2, -1)
    scores = scores if mask is None else mask + scores
    return scores.log_softmax(-1).exp() @ v
""",
)

right(
    "scaled_dot_product_attention",
    "large negative fill",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask != 0, torch.finfo(scores.dtype).min)
    return F.softmax(scores, dim=-1) @ v
""",
)

right(
    "scaled_dot_product_attention",
    "bmm on flattened batch",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    batch = q.shape[:-2]
    n, m = q.shape[-2], k.shape[-2]
    q2, k2, v2 = q.reshape(-1, n, q.shape[-1]), k.reshape(-1, m, k.shape[-1]), v.reshape(-1, m, v.shape[-1])
    scores = torch.bmm(q2, k2.transpose(1, 2)) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask.expand(*batch, n, m).reshape(-1, n, m)
    return torch.bmm(torch.softmax(scores, dim=2), v2).reshape(*batch, n, -1)
""",
)

wrong(
    "scaled_dot_product_attention",
    "scale in place",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    with torch.no_grad():
        q /= math.sqrt(q.shape[-1])
    scores = q @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1) @ v
""",
)

wrong(
    "scaled_dot_product_attention",
    "detached keys",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    scores = q @ k.detach().transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1) @ v
""",
)

wrong(
    "scaled_dot_product_attention",
    "detached values",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1) @ v.data
""",
)

wrong(
    "scaled_dot_product_attention",
    "float32 result",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    scores = q.float() @ k.float().transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1) @ v.float()
""",
)

wrong(
    "scaled_dot_product_attention",
    "fill 1e9 in half",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask == -torch.inf, -1e9)
    return torch.softmax(scores, -1) @ v
""",
)

wrong(
    "scaled_dot_product_attention",
    "causal always",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
""",
)

wrong(
    "scaled_dot_product_attention",
    "small fill",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask == -torch.inf, -5.0)
    return torch.softmax(scores, -1) @ v
""",
)

wrong(
    "scaled_dot_product_attention",
    "boolean mask",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask.bool(), -torch.inf)
    return torch.softmax(scores, -1) @ v
""",
    near_miss="mask-inverted",
)

wrong(
    "scaled_dot_product_attention",
    "shares first batch",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    if q.dim() > 2:
        k = k[:1].expand_as(k)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
""",
)

wrong(
    "scaled_dot_product_attention",
    "key count scale",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-2])
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1) @ v
""",
)

wrong(
    "scaled_dot_product_attention",
    "dv scale",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    d = v.size(-1)
    s = torch.einsum("...qd,...kd->...qk", q, k).div(d**0.5)
    if mask is not None:
        s = s + mask
    return F.softmax(s, -1).matmul(v)
""",
    near_miss="scales-by-value-width",
)

wrong(
    "scaled_dot_product_attention",
    "dim1 softmax",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    s = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        s = s + mask
    return F.softmax(s, 1) @ v
""",
)

wrong(
    "scaled_dot_product_attention",
    "zeroed after",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    w = F.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
    if mask is not None:
        w = w * torch.exp(mask)
    return w @ v
""",
    near_miss="mask-after-softmax",
)

wrong(
    "scaled_dot_product_attention",
    "t for 2d",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    s = q @ k.T / q.shape[-1] ** 0.5
    if mask is not None:
        s = s + mask
    return F.softmax(s, -1) @ v
""",
    near_miss="two-axes-only",
)

wrong(
    "scaled_dot_product_attention",
    "returns weights too",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    s = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        s = s + mask
    w = F.softmax(s, -1)
    return w @ v, w
""",
)

wrong(
    "scaled_dot_product_attention",
    "naive exp",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    e = torch.exp(q @ k.mT / q.shape[-1] ** 0.5 + (0 if mask is None else mask))
    return (e / e.sum(-1, keepdim=True)) @ v
""",
    near_miss="softmax-overflows",
)

wrong(
    "scaled_dot_product_attention",
    "mask changed in place",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        mask[mask != 0] = torch.finfo(mask.dtype).min
        scores = scores + mask
    return scores.softmax(-1) @ v
""",
)

wrong(
    "scaled_dot_product_attention",
    "half rounds the scores",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    s = q @ k.mT / q.shape[-1] ** 0.5
    if s.dtype in (torch.float16, torch.bfloat16):
        s = s.round()
    if mask is not None:
        s = s + mask
    return s.softmax(-1) @ v
""",
)

# ---- split_heads

right(
    "split_heads",
    "view",
    """
def split_heads(x, heads):
    b, s, d = x.shape
    return x.view(b, s, heads, d // heads).permute(0, 2, 1, 3)
""",
)

right(
    "split_heads",
    "chunk stack",
    """
def split_heads(x, heads):
    return torch.stack(torch.chunk(x, heads, dim=-1), dim=1)
""",
)

right(
    "split_heads",
    "loop",
    """
def split_heads(x, heads):
    width = x.shape[-1] // heads
    out = x.new_zeros(x.shape[0], heads, x.shape[1], width)
    for h in range(heads):
        out[:, h] = x[:, :, h * width : (h + 1) * width]
    return out
""",
)

right(
    "split_heads",
    "unflatten contiguous",
    """
def split_heads(x, heads):
    if x.shape[-1] % heads:
        raise ValueError("no")
    return x.unflatten(2, (heads, -1)).swapaxes(1, 2).contiguous()
""",
)

right(
    "split_heads",
    "transpose first",
    """
def split_heads(x, heads):
    b, s, d = x.shape
    return x.transpose(1, 2).reshape(b, heads, d // heads, s).transpose(2, 3)
""",
)

right(
    "split_heads",
    "einsum",
    """
def split_heads(x, heads):
    b, s, d = x.shape
    return torch.einsum("bshd->bhsd", x.reshape(b, s, heads, d // heads))
""",
)

wrong(
    "split_heads",
    "fresh leaf",
    """
def split_heads(x, heads):
    return torch.tensor(x.tolist(), dtype=x.dtype).unflatten(-1, (heads, -1)).transpose(1, 2)
""",
)

wrong(
    "split_heads",
    "first batch only",
    """
def split_heads(x, heads):
    b, s, d = x.shape
    return x[:1].reshape(1, s, heads, -1).transpose(1, 2)
""",
)

wrong(
    "split_heads",
    "float",
    """
def split_heads(x, heads):
    return x.float().unflatten(-1, (heads, -1)).transpose(1, 2)
""",
)

wrong(
    "split_heads",
    "reversed",
    """
def split_heads(x, heads):
    return torch.stack(x.chunk(heads, -1)[::-1], 1)
""",
)

wrong(
    "split_heads",
    "stack dim0",
    """
def split_heads(x, heads):
    return torch.stack(x.chunk(heads, -1), 0)
""",
)

wrong(
    "split_heads",
    "view",
    """
def split_heads(x, heads):
    b, s, d = x.shape
    return x.contiguous().view(b, heads, s, d // heads)
""",
    near_miss="view-without-transpose",
)

wrong(
    "split_heads",
    "strided",
    """
def split_heads(x, heads):
    return torch.stack([x[..., h::heads] for h in range(heads)], 1)
""",
    near_miss="interleaved-heads",
)

wrong(
    "split_heads",
    "head axis last",
    """
def split_heads(x, heads):
    b, s, d = x.shape
    return x.reshape(b, s, heads, d // heads)
""",
    near_miss="axes-not-swapped",
)

wrong(
    "split_heads",
    "permute wrong",
    """
def split_heads(x, heads):
    b, s, d = x.shape
    return x.reshape(b, s, heads, d // heads).permute(0, 2, 3, 1)
""",
    near_miss="keys-layout",
)

wrong(
    "split_heads",
    "memory bound",
    """
def split_heads(x, heads):
    b, s, d = x.shape
    w = d // heads
    return torch.as_strided(x, (b, heads, s, w), (s * d, w, d, 1))
""",
)

# ---- merge_heads

right(
    "merge_heads",
    "cat",
    """
def merge_heads(x):
    return torch.cat([x[:, h] for h in range(x.shape[1])], dim=-1)
""",
)

right(
    "merge_heads",
    "contiguous view",
    """
def merge_heads(x):
    b, h, s, d = x.shape
    return x.permute(0, 2, 1, 3).contiguous().view(b, s, -1)
""",
)

right(
    "merge_heads",
    "loop",
    """
def merge_heads(x):
    b, h, s, d = x.shape
    out = torch.zeros(b, s, h * d, dtype=x.dtype, device=x.device)
    for i in range(h):
        out[:, :, i * d : (i + 1) * d] = x[:, i]
    return out
""",
)

right(
    "merge_heads",
    "flatten",
    """
def merge_heads(x):
    return x.movedim(1, 2).flatten(2)
""",
)

right(
    "merge_heads",
    "unbind",
    """
def merge_heads(x):
    return torch.concat(x.unbind(dim=1), dim=2)
""",
)

wrong(
    "merge_heads",
    "plain view",
    """
def merge_heads(x):
    b, h, s, d = x.shape
    return x.contiguous().view(b, s, h * d)
""",
    near_miss="reshape-without-transpose",
)

wrong(
    "merge_heads",
    "no contiguous",
    """
def merge_heads(x):
    b, h, s, d = x.shape
    return x.permute(0, 2, 1, 3).view(b, s, h * d)
""",
    near_miss="view-after-transpose",
)

wrong(
    "merge_heads",
    "interleave",
    """
def merge_heads(x):
    b, h, s, d = x.shape
    return x.permute(0, 2, 3, 1).reshape(b, s, h * d)
""",
    near_miss="interleaved-heads",
)

wrong(
    "merge_heads",
    "detached",
    """
def merge_heads(x):
    return x.detach().transpose(1, 2).flatten(2)
""",
)

wrong(
    "merge_heads",
    "half to float",
    """
def merge_heads(x):
    return x.transpose(1, 2).flatten(2).to(torch.float32)
""",
)

wrong(
    "merge_heads",
    "mean",
    """
def merge_heads(x):
    return x.mean(1)
""",
)

wrong(
    "merge_heads",
    "squeezes batch",
    """
def merge_heads(x):
    return x.transpose(1, 2).flatten(2).squeeze()
""",
)

wrong(
    "merge_heads",
    "reversed heads",
    """
def merge_heads(x):
    return x.flip(1).transpose(1, 2).flatten(2)
""",
)

# ---- multi_head_attention

right(
    "multi_head_attention",
    "loop",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    dk, dv = w_q.shape[1] // heads, w_v.shape[1] // heads
    outs = []
    for h in range(heads):
        q = x_query @ w_q[:, h * dk : (h + 1) * dk]
        k = x_key @ w_k[:, h * dk : (h + 1) * dk]
        v = x_key @ w_v[:, h * dv : (h + 1) * dv]
        s = q @ k.transpose(-1, -2) / math.sqrt(dk)
        if mask is not None:
            m = mask
            if m.dim() >= 3:
                m = m[..., h if m.shape[-3] > 1 else 0, :, :]
            s = s + m
        outs.append(s.softmax(-1) @ v)
    return torch.cat(outs, -1) @ w_o
""",
)

right(
    "multi_head_attention",
    "library",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    q = (x_query @ w_q).unflatten(-1, (heads, -1)).transpose(-2, -3)
    k = (x_key @ w_k).unflatten(-1, (heads, -1)).transpose(-2, -3)
    v = (x_key @ w_v).unflatten(-1, (heads, -1)).transpose(-2, -3)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(-2, -3).flatten(-2) @ w_o
""",
)

right(
    "multi_head_attention",
    "einsum per head weights",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    wq, wk, wv = (w.reshape(w.shape[0], heads, -1) for w in (w_q, w_k, w_v))
    wo = w_o.reshape(heads, -1, w_o.shape[1])
    q = torch.einsum("...qi,ihd->...hqd", x_query, wq)
    k = torch.einsum("...ki,ihd->...hkd", x_key, wk)
    v = torch.einsum("...ki,ihd->...hkd", x_key, wv)
    s = torch.einsum("...hqd,...hkd->...hqk", q, k) / wq.shape[-1] ** 0.5
    if mask is not None:
        s = s + mask
    return torch.einsum("...hqk,...hkd,hdo->...qo", s.softmax(-1), v, wo)
""",
)

right(
    "multi_head_attention",
    "float64 inside",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    dtype = x_query.dtype
    x_query, x_key, w_q, w_k, w_v, w_o = (t.double() for t in (x_query, x_key, w_q, w_k, w_v, w_o))

    def split(t):
        return t.reshape(*t.shape[:-1], heads, -1).movedim(-2, -3)

    s = split(x_query @ w_q) @ split(x_key @ w_k).mT / math.sqrt(w_q.shape[-1] // heads)
    if mask is not None:
        s = s + mask.double()
    y = (torch.softmax(s, -1) @ split(x_key @ w_v)).movedim(-3, -2)
    return (y.reshape(*y.shape[:-2], -1) @ w_o).to(dtype)
""",
)

right(
    "multi_head_attention",
    "flattened batch",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    batch = x_query.shape[:-2]
    n, m = x_query.shape[-2], x_key.shape[-2]
    xq, xk = x_query.reshape(-1, n, x_query.shape[-1]), x_key.reshape(-1, m, x_key.shape[-1])
    b = xq.shape[0]
    q = (xq @ w_q).view(b, n, heads, -1).transpose(1, 2)
    k = (xk @ w_k).view(b, m, heads, -1).transpose(1, 2)
    v = (xk @ w_v).view(b, m, heads, -1).transpose(1, 2)
    s = torch.matmul(q, k.transpose(2, 3)) * (q.shape[-1] ** -0.5)
    if mask is not None:
        s = s + mask.expand(*batch, heads, n, m).reshape(b, heads, n, m)
    y = torch.matmul(torch.softmax(s, dim=-1), v)
    y = y.transpose(1, 2).contiguous().view(b, n, -1) @ w_o
    return y.view(*batch, n, -1)
""",
)

right(
    "multi_head_attention",
    "sum over heads",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    total = 0
    parts = zip(w_q.chunk(heads, 1), w_k.chunk(heads, 1), w_v.chunk(heads, 1), w_o.chunk(heads, 0))
    if mask is not None:
        mask = mask.expand(*x_query.shape[:-2], heads, x_query.shape[-2], x_key.shape[-2])
    for h, (a, b, c, d) in enumerate(parts):
        s = (x_query @ a) @ (x_key @ b).mT / math.sqrt(a.shape[1])
        if mask is not None:
            s = s + mask[..., h, :, :]
        total = total + torch.softmax(s, -1) @ (x_key @ c) @ d
    return total
""",
)

wrong(
    "multi_head_attention",
    "3d only",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    b, n, _ = x_query.shape
    m = x_key.shape[1]
    q = (x_query @ w_q).view(b, n, heads, -1).transpose(1, 2)
    k = (x_key @ w_k).view(b, m, heads, -1).transpose(1, 2)
    v = (x_key @ w_v).view(b, m, heads, -1).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return y.transpose(1, 2).reshape(b, n, -1) @ w_o
""",
)

wrong(
    "multi_head_attention",
    "dk from dhidden",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    d = x_query.shape[-1] // heads
    q = (x_query @ w_q).unflatten(-1, (heads, d)).transpose(-2, -3)
    k = (x_key @ w_k).unflatten(-1, (heads, d)).transpose(-2, -3)
    v = (x_key @ w_v).unflatten(-1, (heads, d)).transpose(-2, -3)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return y.transpose(-2, -3).flatten(-2) @ w_o
""",
)

wrong(
    "multi_head_attention",
    "mask unsqueezed",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    q = (x_query @ w_q).unflatten(-1, (heads, -1)).transpose(-2, -3)
    k = (x_key @ w_k).unflatten(-1, (heads, -1)).transpose(-2, -3)
    v = (x_key @ w_v).unflatten(-1, (heads, -1)).transpose(-2, -3)
    if mask is not None and mask.dim() == 3:
        mask = mask[:, None]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return y.transpose(-2, -3).flatten(-2) @ w_o
""",
)

wrong(
    "multi_head_attention",
    "first head mask",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    q = (x_query @ w_q).unflatten(-1, (heads, -1)).transpose(-2, -3)
    k = (x_key @ w_k).unflatten(-1, (heads, -1)).transpose(-2, -3)
    v = (x_key @ w_v).unflatten(-1, (heads, -1)).transpose(-2, -3)
    if mask is not None and mask.dim() > 2:
        mask = mask[..., :1, :, :]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return y.transpose(-2, -3).flatten(-2) @ w_o
""",
)

wrong(
    "multi_head_attention",
    "detached w o",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    q = (x_query @ w_q).unflatten(-1, (heads, -1)).transpose(-2, -3)
    k = (x_key @ w_k).unflatten(-1, (heads, -1)).transpose(-2, -3)
    v = (x_key @ w_v).unflatten(-1, (heads, -1)).transpose(-2, -3)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return y.transpose(-2, -3).flatten(-2) @ w_o.detach()
""",
)

wrong(
    "multi_head_attention",
    "float32 out",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    x_query, x_key, w_q, w_k, w_v, w_o = (t.float() for t in (x_query, x_key, w_q, w_k, w_v, w_o))
    mask = None if mask is None else mask.float()
    q = (x_query @ w_q).unflatten(-1, (heads, -1)).transpose(-2, -3)
    k = (x_key @ w_k).unflatten(-1, (heads, -1)).transpose(-2, -3)
    v = (x_key @ w_v).unflatten(-1, (heads, -1)).transpose(-2, -3)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return y.transpose(-2, -3).flatten(-2) @ w_o
""",
)

wrong(
    "multi_head_attention",
    "values width scale",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    q = (x_query @ w_q).unflatten(-1, (heads, -1)).transpose(-2, -3)
    k = (x_key @ w_k).unflatten(-1, (heads, -1)).transpose(-2, -3)
    v = (x_key @ w_v).unflatten(-1, (heads, -1)).transpose(-2, -3)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=v.shape[-1] ** -0.5)
    return y.transpose(-2, -3).flatten(-2) @ w_o
""",
)

wrong(
    "multi_head_attention",
    "no wo",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    outs = []
    for a, b, c in zip(w_q.chunk(heads, 1), w_k.chunk(heads, 1), w_v.chunk(heads, 1)):
        outs.append(F.scaled_dot_product_attention(x_query @ a, x_key @ b, x_key @ c, attn_mask=None if mask is None else (mask if mask.dim() < 3 else mask[..., 0, :, :])))
    return torch.cat(outs, -1)
""",
    near_miss="no-output-projection",
)

wrong(
    "multi_head_attention",
    "linear",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    q = F.linear(x_query, w_q).unflatten(-1, (heads, -1)).transpose(-2, -3)
    k = F.linear(x_key, w_k).unflatten(-1, (heads, -1)).transpose(-2, -3)
    v = F.linear(x_key, w_v).unflatten(-1, (heads, -1)).transpose(-2, -3)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return F.linear(y.transpose(-2, -3).flatten(-2), w_o)
""",
    near_miss="weights-transposed",
)

wrong(
    "multi_head_attention",
    "one head width",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    q, k, v = x_query @ w_q / math.sqrt(w_q.shape[1]), x_key @ w_k, x_key @ w_v
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(-2, -3) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    return y.transpose(-2, -3).flatten(-2) @ w_o
""",
    near_miss="scaled-by-all-heads",
)

wrong(
    "multi_head_attention",
    "self only",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    q, k, v = (x_query @ w for w in (w_q, w_k, w_v))
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(-2, -3) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return y.transpose(-2, -3).flatten(-2) @ w_o
""",
    near_miss="keys-from-query-input",
)

wrong(
    "multi_head_attention",
    "swapped inputs",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    q, k, v = x_key @ w_q, x_query @ w_k, x_query @ w_v
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(-2, -3) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return y.transpose(-2, -3).flatten(-2) @ w_o
""",
)

wrong(
    "multi_head_attention",
    "batch first bug",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    q, k, v = x_query @ w_q, x_key[:1].expand_as(x_key) @ w_k if x_key.dim() > 2 else x_key @ w_k, x_key @ w_v
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(-2, -3) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return y.transpose(-2, -3).flatten(-2) @ w_o
""",
)

wrong(
    "multi_head_attention",
    "reshape merge",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    q, k, v = x_query @ w_q, x_key @ w_k, x_key @ w_v
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(-2, -3) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).contiguous()
    return y.view(*x_query.shape[:-1], -1) @ w_o
""",
    near_miss="merge-without-transpose",
)

wrong(
    "multi_head_attention",
    "mask ignored",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    q, k, v = x_query @ w_q, x_key @ w_k, x_key @ w_v
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(-2, -3) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v)
    return y.transpose(-2, -3).flatten(-2) @ w_o
""",
    near_miss="ignores-the-mask",
)

wrong(
    "multi_head_attention",
    "heads interleaved",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    q, k, v = x_query @ w_q, x_key @ w_k, x_key @ w_v
    q, k, v = (torch.stack([t[..., h::heads] for h in range(heads)], -3) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return y.transpose(-2, -3).flatten(-2) @ w_o
""",
    near_miss="interleaved-heads",
)

wrong(
    "multi_head_attention",
    "queries scaled in place",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    with torch.no_grad():
        w_q *= (w_q.shape[1] // heads) ** -0.5
    q, k, v = x_query @ w_q, x_key @ w_k, x_key @ w_v
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(-2, -3) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    return y.transpose(-2, -3).flatten(-2) @ w_o
""",
)

# ---- attention_parameter_count

right(
    "attention_parameter_count",
    "sum of four",
    """
def attention_parameter_count(d_hidden, heads, d_k=None, d_v=None):
    def default(width):
        if width is not None:
            return width
        width, rest = divmod(d_hidden, heads)
        if rest:
            raise ValueError(f"{d_hidden} / {heads}")
        return width

    k, v = default(d_k), default(d_v)
    q_params = k_params = d_hidden * (heads * k)
    return q_params + k_params + d_hidden * (heads * v) + (heads * v) * d_hidden
""",
)

right(
    "attention_parameter_count",
    "tensors",
    """
def attention_parameter_count(d_hidden, heads, d_k=None, d_v=None):
    if None in (d_k, d_v) and d_hidden / heads != d_hidden // heads:
        raise ValueError("not whole")
    d_k = d_k or d_hidden // heads
    d_v = d_v or d_hidden // heads
    shapes = [(d_hidden, heads * d_k)] * 2 + [(d_hidden, heads * d_v), (heads * d_v, d_hidden)]
    return sum(torch.empty(s, device="meta").numel() for s in shapes)
""",
)

right(
    "attention_parameter_count",
    "per head",
    """
def attention_parameter_count(d_hidden, heads, d_k=None, d_v=None):
    if d_k is None:
        if d_hidden % heads != 0:
            raise ValueError("d_hidden must be divisible by heads")
        d_k = int(d_hidden / heads)
    if d_v is None:
        if d_hidden % heads != 0:
            raise ValueError("d_hidden must be divisible by heads")
        d_v = int(d_hidden / heads)
    total = 0
    for _ in range(heads):
        total += d_hidden * d_k + d_hidden * d_k + d_hidden * d_v + d_v * d_hidden
    return total
""",
)

wrong(
    "attention_parameter_count",
    "three matrices",
    """
def attention_parameter_count(d_hidden, heads, d_k=None, d_v=None):
    if (d_k is None or d_v is None) and d_hidden % heads:
        raise ValueError("whole")
    d_k = d_k or d_hidden // heads
    d_v = d_v or d_hidden // heads
    return heads * d_hidden * (d_k + d_k + d_v)
""",
    near_miss="forgets-w-o",
)

wrong(
    "attention_parameter_count",
    "single",
    """
def attention_parameter_count(d_hidden, heads, d_k=None, d_v=None):
    if (d_k is None or d_v is None) and d_hidden % heads:
        raise ValueError("whole")
    d_k = d_k or d_hidden // heads
    d_v = d_v or d_hidden // heads
    return d_hidden * d_k * 2 + d_hidden * d_v + d_v * d_hidden
""",
    near_miss="counts-one-head",
)

wrong(
    "attention_parameter_count",
    "true division",
    """
def attention_parameter_count(d_hidden, heads, d_k=None, d_v=None):
    if (d_k is None or d_v is None) and d_hidden % heads:
        raise ValueError("whole")
    d_k = d_hidden / heads if d_k is None else d_k
    d_v = d_hidden / heads if d_v is None else d_v
    return 2 * d_hidden * heads * (d_k + d_v)
""",
)

wrong(
    "attention_parameter_count",
    "assertion",
    """
def attention_parameter_count(d_hidden, heads, d_k=None, d_v=None):
    if d_k is None or d_v is None:
        assert d_hidden % heads == 0, "whole"
    d_k = d_hidden // heads if d_k is None else d_k
    d_v = d_hidden // heads if d_v is None else d_v
    return 2 * d_hidden * heads * (d_k + d_v)
""",
)

wrong(
    "attention_parameter_count",
    "only both none",
    """
def attention_parameter_count(d_hidden, heads, d_k=None, d_v=None):
    if d_k is None and d_v is None and d_hidden % heads:
        raise ValueError("whole")
    d_k = d_hidden // heads if d_k is None else d_k
    d_v = d_hidden // heads if d_v is None else d_v
    return 2 * d_hidden * heads * (d_k + d_v)
""",
)

wrong(
    "attention_parameter_count",
    "silent",
    """
def attention_parameter_count(d_hidden, heads, d_k=None, d_v=None):
    k = d_k if d_k else d_hidden // heads
    v = d_v if d_v else d_hidden // heads
    return d_hidden * heads * k * 2 + d_hidden * heads * v * 2
""",
    near_miss="rounds-the-width",
)

wrong(
    "attention_parameter_count",
    "dv is dk",
    """
def attention_parameter_count(d_hidden, heads, d_k=None, d_v=None):
    if (d_k is None or d_v is None) and d_hidden % heads:
        raise ValueError("whole")
    if d_k is None:
        d_k = d_hidden // heads
    if d_v is None:
        d_v = d_k
    return 2 * d_hidden * heads * (d_k + d_v)
""",
    near_miss="d-v-follows-d-k",
)

wrong(
    "attention_parameter_count",
    "empty message",
    """
def attention_parameter_count(d_hidden, heads, d_k=None, d_v=None):
    if (d_k is None or d_v is None) and d_hidden % heads:
        raise ValueError
    d_k = d_hidden // heads if d_k is None else d_k
    d_v = d_hidden // heads if d_v is None else d_v
    return 2 * d_hidden * heads * (d_k + d_v)
""",
)

wrong(
    "attention_parameter_count",
    "w o is square",
    """
def attention_parameter_count(d_hidden, heads, d_k=None, d_v=None):
    if (d_k is None or d_v is None) and d_hidden % heads:
        raise ValueError("not whole")
    d_k = d_hidden // heads if d_k is None else d_k
    d_v = d_hidden // heads if d_v is None else d_v
    return d_hidden * (2 * heads * d_k + heads * d_v + d_hidden)
""",
    near_miss="w-o-square",
)

wrong(
    "attention_parameter_count",
    "refuses too much",
    """
def attention_parameter_count(d_hidden, heads, d_k=None, d_v=None):
    if d_hidden % heads != 0:
        raise ValueError("heads must divide d_hidden")
    if d_k is None:
        d_k = d_hidden // heads
    if d_v is None:
        d_v = d_hidden // heads
    return d_hidden * heads * d_k + d_hidden * heads * d_k + d_hidden * heads * d_v + heads * d_v * d_hidden
""",
    near_miss="always-wants-whole-heads",
)

# ---- sinusoidal_positions

right(
    "sinusoidal_positions",
    "loop",
    """
def sinusoidal_positions(seq, d_hidden, base=10000.0):
    if d_hidden % 2 == 1:
        raise ValueError("odd")
    out = torch.zeros(seq, d_hidden)
    for t in range(seq):
        for i in range(d_hidden // 2):
            a = t / base ** (2 * i / d_hidden)
            out[t, 2 * i] = math.sin(a)
            out[t, 2 * i + 1] = math.cos(a)
    return out
""",
)

right(
    "sinusoidal_positions",
    "exp log",
    """
def sinusoidal_positions(seq, d_hidden, base=10000.0):
    if d_hidden % 2:
        raise ValueError("odd width")
    pe = torch.zeros(seq, d_hidden)
    position = torch.arange(0, seq, dtype=torch.float).unsqueeze(1)
    div = torch.exp(torch.arange(0, d_hidden, 2).float() * (-math.log(base) / d_hidden))
    pe[:, 0::2] = torch.sin(position * div)
    pe[:, 1::2] = torch.cos(position * div)
    return pe
""",
)

right(
    "sinusoidal_positions",
    "float64",
    """
def sinusoidal_positions(seq, d_hidden, base=10000.0):
    if d_hidden % 2:
        raise ValueError("odd width")
    a = torch.outer(torch.arange(seq).double(), base ** (-torch.arange(0, d_hidden, 2).double() / d_hidden))
    return torch.stack([a.sin(), a.cos()], -1).reshape(seq, d_hidden).to(torch.float32)
""",
)

right(
    "sinusoidal_positions",
    "phase",
    """
def sinusoidal_positions(seq, d_hidden, base=10000.0):
    if d_hidden % 2:
        raise ValueError("odd width")
    cols = torch.arange(d_hidden)
    a = torch.arange(seq)[:, None] / torch.pow(torch.tensor(base), (cols - cols % 2) / d_hidden)
    return torch.where(cols % 2 == 0, torch.sin(a), torch.cos(a))
""",
)

right(
    "sinusoidal_positions",
    "complex",
    """
def sinusoidal_positions(seq, d_hidden, base=10000.0):
    if d_hidden % 2:
        raise ValueError("odd width")
    f = base ** (-torch.arange(0, d_hidden, 2) / d_hidden)
    z = torch.polar(torch.ones(seq, d_hidden // 2), torch.arange(seq)[:, None] * f)
    return torch.stack((z.imag, z.real), -1).flatten(1)
""",
)

wrong(
    "sinusoidal_positions",
    "cat",
    """
def sinusoidal_positions(seq, d_hidden, base=10000.0):
    if d_hidden % 2:
        raise ValueError("odd width")
    a = torch.arange(seq)[:, None] * base ** (-torch.arange(0, d_hidden, 2) / d_hidden)
    return torch.cat((a.sin(), a.cos()), 1)
""",
    near_miss="sine-block-then-cosine-block",
)

wrong(
    "sinusoidal_positions",
    "two twice",
    """
def sinusoidal_positions(seq, d_hidden, base=10000.0):
    if d_hidden % 2:
        raise ValueError("odd width")
    a = torch.arange(seq)[:, None] / base ** (2 * torch.arange(0, d_hidden, 2) / d_hidden)
    return torch.stack((a.sin(), a.cos()), -1).flatten(1)
""",
    near_miss="exponent-doubled",
)

wrong(
    "sinusoidal_positions",
    "no two",
    """
def sinusoidal_positions(seq, d_hidden, base=10000.0):
    if d_hidden % 2:
        raise ValueError("odd width")
    a = torch.arange(seq)[:, None] / base ** (torch.arange(d_hidden // 2) / d_hidden)
    return torch.stack((a.sin(), a.cos()), -1).flatten(1)
""",
    near_miss="exponent-halved",
)

wrong(
    "sinusoidal_positions",
    "float64 out",
    """
def sinusoidal_positions(seq, d_hidden, base=10000.0):
    if d_hidden % 2:
        raise ValueError("odd width")
    a = torch.arange(seq)[:, None].double() * base ** (-torch.arange(0, d_hidden, 2).double() / d_hidden)
    return torch.stack((a.sin(), a.cos()), -1).flatten(1)
""",
)

wrong(
    "sinusoidal_positions",
    "one based",
    """
def sinusoidal_positions(seq, d_hidden, base=10000.0):
    if d_hidden % 2:
        raise ValueError("odd width")
    a = torch.arange(1, seq + 1)[:, None] * base ** (-torch.arange(0, d_hidden, 2) / d_hidden)
    return torch.stack((a.sin(), a.cos()), -1).flatten(1)
""",
    near_miss="starts-at-one",
)

wrong(
    "sinusoidal_positions",
    "hard coded",
    """
def sinusoidal_positions(seq, d_hidden, base=10000.0):
    if d_hidden % 2:
        raise ValueError("odd width")
    a = torch.arange(seq)[:, None] * 10000 ** (-torch.arange(0, d_hidden, 2) / d_hidden)
    return torch.stack((a.sin(), a.cos()), -1).flatten(1)
""",
    near_miss="ignores-the-base",
)

wrong(
    "sinusoidal_positions",
    "divides by width minus two",
    """
def sinusoidal_positions(seq, d_hidden, base=10000.0):
    if d_hidden % 2:
        raise ValueError("odd width")
    a = torch.arange(seq)[:, None] * base ** (-torch.arange(0, d_hidden, 2) / max(d_hidden - 2, 1))
    return torch.stack((a.sin(), a.cos()), -1).flatten(1)
""",
)

wrong(
    "sinusoidal_positions",
    "no error",
    """
def sinusoidal_positions(seq, d_hidden, base=10000.0):
    pe = torch.zeros(seq, d_hidden)
    a = torch.arange(seq)[:, None] * base ** (-torch.arange(0, d_hidden, 2) / d_hidden)
    pe[:, 0::2] = a.sin()
    pe[:, 1::2] = a.cos()
    return pe
""",
)

wrong(
    "sinusoidal_positions",
    "half table",
    """
def sinusoidal_positions(seq, d_hidden, base=10000.0):
    if d_hidden % 2:
        raise ValueError("odd width")
    a = torch.arange(seq)[:, None].bfloat16() * (base ** (-torch.arange(0, d_hidden, 2) / d_hidden)).bfloat16()
    return torch.stack((a.sin(), a.cos()), -1).flatten(1).float()
""",
)

# ---- apply_rope

right(
    "apply_rope",
    "complex",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    f = base ** (-torch.arange(0, d, 2).float() / d)
    angles = positions.unsqueeze(-1).float() * f
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2).contiguous())
    z = z * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(z).flatten(-2).type_as(x)
""",
)

right(
    "apply_rope",
    "repeat interleave",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    inv = 1.0 / (base ** (torch.arange(0, d, 2, dtype=torch.float32) / d))
    ang = (positions[..., None] * inv).repeat_interleave(2, dim=-1)
    rot = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).reshape(x.shape)
    return x * ang.cos().to(x.dtype) + rot * ang.sin().to(x.dtype)
""",
)

right(
    "apply_rope",
    "loop",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    pos = positions.expand(x.shape[:-1]).double()
    cols = []
    for i in range(d // 2):
        theta = pos / base ** (2 * i / d)
        c, s = torch.cos(theta), torch.sin(theta)
        a, b = x[..., 2 * i], x[..., 2 * i + 1]
        cols += [a * c - b * s, a * s + b * c]
    return torch.stack(cols, -1).to(x.dtype)
""",
)

right(
    "apply_rope",
    "matrices",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    theta = positions[..., None].to(dtype) / base ** (torch.arange(0, d, 2, dtype=dtype) / d)
    c, s = theta.cos(), theta.sin()
    m = torch.stack((torch.stack((c, -s), -1), torch.stack((s, c), -1)), -2)
    pairs = x.to(dtype).unflatten(-1, (-1, 2)).unsqueeze(-1)
    return (m @ pairs).squeeze(-1).flatten(-2).to(x.dtype)
""",
)

right(
    "apply_rope",
    "new empty",
    """
def apply_rope(x, positions, base=10000.0):
    half = torch.arange(x.shape[-1] // 2, device=x.device)
    theta = positions.double()[..., None] * torch.exp(-2 * half * math.log(base) / x.shape[-1]).double()
    out = torch.empty_like(x)
    out[..., ::2] = (x[..., ::2] * theta.cos() - x[..., 1::2] * theta.sin()).to(x.dtype)
    out[..., 1::2] = (x[..., ::2] * theta.sin() + x[..., 1::2] * theta.cos()).to(x.dtype)
    return out
""",
)

right(
    "apply_rope",
    "negative sine form",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    theta = torch.tensor([base ** (-2 * i / d) for i in range(d // 2)], dtype=torch.float64)
    angle = positions.unsqueeze(-1) * theta
    z = torch.complex(x[..., ::2].double(), x[..., 1::2].double()) * torch.exp(1j * angle)
    return torch.stack((z.real, z.imag), -1).flatten(-2).to(x.dtype)
""",
)

wrong(
    "apply_rope",
    "outer only 1d",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    f = base ** (-torch.arange(0, d, 2).float() / d)
    a = torch.outer(positions.float(), f)
    e, o = x[..., 0::2], x[..., 1::2]
    return torch.stack((e * a.cos() - o * a.sin(), e * a.sin() + o * a.cos()), -1).flatten(-2).to(x.dtype)
""",
)

wrong(
    "apply_rope",
    "in place",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    a = positions[..., None] * base ** (-torch.arange(0, d, 2).float() / d)
    e, o = x[..., 0::2].clone(), x[..., 1::2].clone()
    with torch.no_grad():
        x[..., 0::2] = (e * a.cos() - o * a.sin()).to(x.dtype)
        x[..., 1::2] = (e * a.sin() + o * a.cos()).to(x.dtype)
    return x
""",
)

wrong(
    "apply_rope",
    "promotes",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    a = positions[..., None] * base ** (-torch.arange(0, d, 2).float() / d)
    e, o = x[..., 0::2], x[..., 1::2]
    return torch.stack((e * a.cos() - o * a.sin(), e * a.sin() + o * a.cos()), -1).flatten(-2)
""",
)

wrong(
    "apply_rope",
    "half angles",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    f = (1.0 / base ** (torch.arange(0, d, 2, dtype=torch.float64) / d)).to(x.dtype)
    a = positions[..., None].to(x.dtype) * f
    e, o = x[..., 0::2], x[..., 1::2]
    return torch.stack((e * a.cos() - o * a.sin(), e * a.sin() + o * a.cos()), -1).flatten(-2)
""",
    near_miss="angles-in-half-precision",
)

wrong(
    "apply_rope",
    "arange",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    a = torch.arange(x.shape[-2])[..., None] * base ** (-torch.arange(0, d, 2).float() / d)
    e, o = x[..., 0::2], x[..., 1::2]
    return torch.stack((e * a.cos() - o * a.sin(), e * a.sin() + o * a.cos()), -1).flatten(-2).to(x.dtype)
""",
    near_miss="ignores-the-positions",
)

wrong(
    "apply_rope",
    "from first",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    pos = positions.flatten()[0] + torch.arange(x.shape[-2])
    a = pos[..., None] * base ** (-torch.arange(0, d, 2).float() / d)
    e, o = x[..., 0::2], x[..., 1::2]
    return torch.stack((e * a.cos() - o * a.sin(), e * a.sin() + o * a.cos()), -1).flatten(-2).to(x.dtype)
""",
)

wrong(
    "apply_rope",
    "neox",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    a = positions[..., None] * base ** (-torch.arange(0, d, 2).float() / d)
    a = torch.cat((a, a), -1)
    x1, x2 = x.chunk(2, -1)
    return (x * a.cos() + torch.cat((-x2, x1), -1) * a.sin()).to(x.dtype)
""",
    near_miss="pairs-the-halves",
)

wrong(
    "apply_rope",
    "minus",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    a = positions[..., None] * base ** (-torch.arange(0, d, 2).float() / d)
    e, o = x[..., 0::2], x[..., 1::2]
    return torch.stack((e * a.cos() + o * a.sin(), o * a.cos() - e * a.sin()), -1).flatten(-2).to(x.dtype)
""",
    near_miss="rotates-the-other-way",
)

wrong(
    "apply_rope",
    "modulo",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    a = (positions % 64)[..., None] * base ** (-torch.arange(0, d, 2).float() / d)
    e, o = x[..., 0::2], x[..., 1::2]
    return torch.stack((e * a.cos() - o * a.sin(), e * a.sin() + o * a.cos()), -1).flatten(-2).to(x.dtype)
""",
)

wrong(
    "apply_rope",
    "no grad",
    """
@torch.no_grad()
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    a = positions[..., None] * base ** (-torch.arange(0, d, 2).float() / d)
    e, o = x[..., 0::2], x[..., 1::2]
    return torch.stack((e * a.cos() - o * a.sin(), e * a.sin() + o * a.cos()), -1).flatten(-2).to(x.dtype)
""",
)

wrong(
    "apply_rope",
    "base default lost",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    a = positions[..., None] * 10000.0 ** (-torch.arange(0, d, 2).float() / d)
    e, o = x[..., 0::2], x[..., 1::2]
    return torch.stack((e * a.cos() - o * a.sin(), e * a.sin() + o * a.cos()), -1).flatten(-2).to(x.dtype)
""",
    near_miss="ignores-the-base",
)

wrong(
    "apply_rope",
    "catted",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    a = positions[..., None] * base ** (-torch.arange(0, d, 2).float() / d)
    e, o = x[..., 0::2], x[..., 1::2]
    return torch.cat((e * a.cos() - o * a.sin(), e * a.sin() + o * a.cos()), -1).to(x.dtype)
""",
    near_miss="pairs-left-apart",
)

wrong(
    "apply_rope",
    "positions shared",
    """
def apply_rope(x, positions, base=10000.0):
    while positions.dim() > 1:
        positions = positions[0]
    d = x.shape[-1]
    a = positions[..., None] * base ** (-torch.arange(0, d, 2).float() / d)
    e, o = x[..., 0::2], x[..., 1::2]
    return torch.stack((e * a.cos() - o * a.sin(), e * a.sin() + o * a.cos()), -1).flatten(-2).to(x.dtype)
""",
    near_miss="shares-positions-across-the-batch",
)

wrong(
    "apply_rope",
    "relative",
    """
def apply_rope(x, positions, base=10000.0):
    positions = positions - positions[..., 0:1]
    d = x.shape[-1]
    a = positions[..., None] * base ** (-torch.arange(0, d, 2).float() / d)
    e, o = x[..., 0::2], x[..., 1::2]
    return torch.stack((e * a.cos() - o * a.sin(), e * a.sin() + o * a.cos()), -1).flatten(-2).to(x.dtype)
""",
    near_miss="restarts-at-zero",
)

wrong(
    "apply_rope",
    "exponent twice",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    a = positions[..., None] / base ** (2 * torch.arange(0, d, 2).float() / d)
    e, o = x[..., 0::2], x[..., 1::2]
    return torch.stack((e * a.cos() - o * a.sin(), e * a.sin() + o * a.cos()), -1).flatten(-2).to(x.dtype)
""",
    near_miss="exponent-doubled",
)

# ---- decoder_block

right(
    "decoder_block",
    "library",
    """
def decoder_block(x, weights, heads):
    w = weights
    h = F.layer_norm(x, x.shape[-1:], w.ln1_scale, w.ln1_bias)
    q, k, v = ((h @ m).unflatten(-1, (heads, -1)).transpose(1, 2) for m in (w.w_q, w.w_k, w.w_v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).flatten(2) @ w.w_o
    h = F.layer_norm(x, x.shape[-1:], w.ln2_scale, w.ln2_bias)
    return x + F.linear(F.gelu(F.linear(h, w.w_up.T, w.b_up)), w.w_down.T, w.b_down)
""",
)

right(
    "decoder_block",
    "by hand",
    """
def decoder_block(x, weights, heads):
    def norm(t, scale, bias):
        mean = t.mean(-1, keepdim=True)
        var = ((t - mean) ** 2).mean(-1, keepdim=True)
        return (t - mean) / torch.sqrt(var + 1e-5) * scale + bias

    def gelu(z):
        return 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))

    w, (b, n, d) = weights, x.shape
    width = d // heads
    h = norm(x, w.ln1_scale, w.ln1_bias)
    outs = []
    for i in range(heads):
        c = slice(i * width, (i + 1) * width)
        s = (h @ w.w_q[:, c]) @ (h @ w.w_k[:, c]).transpose(1, 2) / width**0.5
        s = s.masked_fill(torch.tril(torch.ones(n, n)) == 0, float("-inf"))
        outs.append(torch.softmax(s, -1) @ (h @ w.w_v[:, c]))
    x = x + torch.cat(outs, -1) @ w.w_o
    return x + (gelu(norm(x, w.ln2_scale, w.ln2_bias) @ w.w_up + w.b_up) @ w.w_down + w.b_down)
""",
)

right(
    "decoder_block",
    "float64 inside",
    """
def decoder_block(x, weights, heads):
    dtype = x.dtype
    x = x.double()
    w = {name: getattr(weights, name).double() for name in BlockWeights.__dataclass_fields__}
    h = F.layer_norm(x, (x.shape[-1],), w["ln1_scale"], w["ln1_bias"], 1e-5)
    q, k, v = ((h @ w[m]).unflatten(-1, (heads, -1)).transpose(1, 2) for m in ("w_q", "w_k", "w_v"))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).flatten(2) @ w["w_o"]
    h = F.layer_norm(x, (x.shape[-1],), w["ln2_scale"], w["ln2_bias"], 1e-5)
    return (x + F.gelu(h @ w["w_up"] + w["b_up"]) @ w["w_down"] + w["b_down"]).to(dtype)
""",
)

right(
    "decoder_block",
    "position by position",
    """
def decoder_block(x, weights, heads):
    w = weights
    h = F.layer_norm(x, x.shape[-1:], w.ln1_scale, w.ln1_bias, eps=1e-5)
    q, k, v = ((h @ m).unflatten(-1, (heads, -1)) for m in (w.w_q, w.w_k, w.w_v))
    rows = []
    for t in range(x.shape[1]):
        s = torch.einsum("bhd,bkhd->bhk", q[:, t], k[:, : t + 1]) / q.shape[-1] ** 0.5
        rows.append(torch.einsum("bhk,bkhd->bhd", s.softmax(-1), v[:, : t + 1]).flatten(1))
    x = x + torch.stack(rows, 1) @ w.w_o
    h = F.layer_norm(x, x.shape[-1:], w.ln2_scale, w.ln2_bias, eps=1e-5)
    return x + F.gelu(h @ w.w_up + w.b_up) @ w.w_down + w.b_down
""",
)

wrong(
    "decoder_block",
    "modern post",
    """
def decoder_block(x, weights, heads):
    w = weights
    q, k, v = ((x @ m).unflatten(-1, (heads, -1)).transpose(1, 2) for m in (w.w_q, w.w_k, w.w_v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = F.layer_norm(x + y.transpose(1, 2).flatten(2) @ w.w_o, x.shape[-1:], w.ln1_scale, w.ln1_bias)
    return F.layer_norm(x + F.gelu(x @ w.w_up + w.b_up) @ w.w_down + w.b_down, x.shape[-1:], w.ln2_scale, w.ln2_bias)
""",
    near_miss="post-norm",
)

wrong(
    "decoder_block",
    "bidirectional",
    """
def decoder_block(x, weights, heads):
    w = weights
    h = F.layer_norm(x, x.shape[-1:], w.ln1_scale, w.ln1_bias)
    q, k, v = ((h @ m).unflatten(-1, (heads, -1)).transpose(1, 2) for m in (w.w_q, w.w_k, w.w_v))
    y = F.scaled_dot_product_attention(q, k, v)
    x = x + y.transpose(1, 2).flatten(2) @ w.w_o
    h = F.layer_norm(x, x.shape[-1:], w.ln2_scale, w.ln2_bias)
    return x + F.gelu(h @ w.w_up + w.b_up) @ w.w_down + w.b_down
""",
    near_miss="not-causal",
)

wrong(
    "decoder_block",
    "in place residual",
    """
def decoder_block(x, weights, heads):
    w = weights
    h = F.layer_norm(x, x.shape[-1:], w.ln1_scale, w.ln1_bias)
    q, k, v = ((h @ m).unflatten(-1, (heads, -1)).transpose(1, 2) for m in (w.w_q, w.w_k, w.w_v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x += y.transpose(1, 2).flatten(2) @ w.w_o
    h = F.layer_norm(x, x.shape[-1:], w.ln2_scale, w.ln2_bias)
    return x + F.gelu(h @ w.w_up + w.b_up) @ w.w_down + w.b_down
""",
)

wrong(
    "decoder_block",
    "eps 1e 6",
    """
def decoder_block(x, weights, heads):
    w = weights
    h = F.layer_norm(x, x.shape[-1:], w.ln1_scale, w.ln1_bias, 1e-6)
    q, k, v = ((h @ m).unflatten(-1, (heads, -1)).transpose(1, 2) for m in (w.w_q, w.w_k, w.w_v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).flatten(2) @ w.w_o
    h = F.layer_norm(x, x.shape[-1:], w.ln2_scale, w.ln2_bias, 1e-6)
    return x + F.gelu(h @ w.w_up + w.b_up) @ w.w_down + w.b_down
""",
)

wrong(
    "decoder_block",
    "tanh",
    """
def decoder_block(x, weights, heads):
    w = weights
    h = F.layer_norm(x, x.shape[-1:], w.ln1_scale, w.ln1_bias)
    q, k, v = ((h @ m).unflatten(-1, (heads, -1)).transpose(1, 2) for m in (w.w_q, w.w_k, w.w_v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).flatten(2) @ w.w_o
    h = F.layer_norm(x, x.shape[-1:], w.ln2_scale, w.ln2_bias)
    z = h @ w.w_up + w.b_up
    return x + 0.5 * z * (1 + torch.tanh(0.7978845608 * (z + 0.044715 * z**3))) @ w.w_down + w.b_down
""",
    near_miss="tanh-gelu",
)

wrong(
    "decoder_block",
    "swapped norms",
    """
def decoder_block(x, weights, heads):
    w = weights
    h = F.layer_norm(x, x.shape[-1:], w.ln2_scale, w.ln2_bias)
    q, k, v = ((h @ m).unflatten(-1, (heads, -1)).transpose(1, 2) for m in (w.w_q, w.w_k, w.w_v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).flatten(2) @ w.w_o
    h = F.layer_norm(x, x.shape[-1:], w.ln1_scale, w.ln1_bias)
    return x + F.gelu(h @ w.w_up + w.b_up) @ w.w_down + w.b_down
""",
)

wrong(
    "decoder_block",
    "detached weights",
    """
def decoder_block(x, weights, heads):
    w = weights
    h = F.layer_norm(x, x.shape[-1:], w.ln1_scale.detach(), w.ln1_bias)
    q, k, v = ((h @ m).unflatten(-1, (heads, -1)).transpose(1, 2) for m in (w.w_q, w.w_k, w.w_v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).flatten(2) @ w.w_o
    h = F.layer_norm(x, x.shape[-1:], w.ln2_scale, w.ln2_bias)
    return x + F.gelu(h @ w.w_up + w.b_up) @ w.w_down + w.b_down
""",
)

wrong(
    "decoder_block",
    "float32 mask",
    """
def decoder_block(x, weights, heads):
    w, n = weights, x.shape[1]
    h = F.layer_norm(x, x.shape[-1:], w.ln1_scale, w.ln1_bias)
    q, k, v = ((h @ m).unflatten(-1, (heads, -1)).transpose(1, 2) for m in (w.w_q, w.w_k, w.w_v))
    s = q @ k.mT / q.shape[-1] ** 0.5 + torch.full((n, n), -1e9).triu(1)
    x = x + (s.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2) @ w.w_o
    h = F.layer_norm(x, x.shape[-1:], w.ln2_scale, w.ln2_bias)
    return (x + F.gelu(h @ w.w_up + w.b_up) @ w.w_down + w.b_down).float()
""",
)

wrong(
    "decoder_block",
    "attn bias missing",
    """
def decoder_block(x, weights, heads):
    w = weights
    h = F.layer_norm(x, x.shape[-1:], w.ln1_scale, w.ln1_bias)
    q, k, v = ((h @ m).unflatten(-1, (heads, -1)).transpose(1, 2) for m in (w.w_q, w.w_k, w.w_v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).flatten(2) @ w.w_o
    h = F.layer_norm(x, x.shape[-1:], w.ln2_scale, w.ln2_bias)
    return x + F.gelu(h @ w.w_up) @ w.w_down
""",
    near_miss="no-feed-forward-biases",
)

wrong(
    "decoder_block",
    "down bias missing",
    """
def decoder_block(x, weights, heads):
    w = weights
    h = F.layer_norm(x, x.shape[-1:], w.ln1_scale, w.ln1_bias)
    q, k, v = ((h @ m).unflatten(-1, (heads, -1)).transpose(1, 2) for m in (w.w_q, w.w_k, w.w_v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).flatten(2) @ w.w_o
    h = F.layer_norm(x, x.shape[-1:], w.ln2_scale, w.ln2_bias)
    return x + F.gelu(h @ w.w_up + w.b_up) @ w.w_down
""",
)

wrong(
    "decoder_block",
    "residual lost",
    """
def decoder_block(x, weights, heads):
    w = weights
    h = F.layer_norm(x, x.shape[-1:], w.ln1_scale, w.ln1_bias)
    q, k, v = ((h @ m).unflatten(-1, (heads, -1)).transpose(1, 2) for m in (w.w_q, w.w_k, w.w_v))
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ w.w_o
    n = F.layer_norm(h, x.shape[-1:], w.ln2_scale, w.ln2_bias)
    return h + F.gelu(n @ w.w_up + w.b_up) @ w.w_down + w.b_down
""",
    near_miss="no-attention-residual",
)

wrong(
    "decoder_block",
    "future sees one",
    """
def decoder_block(x, weights, heads):
    w, n = weights, x.shape[1]
    h = F.layer_norm(x, x.shape[-1:], w.ln1_scale, w.ln1_bias)
    q, k, v = ((h @ m).unflatten(-1, (heads, -1)).transpose(1, 2) for m in (w.w_q, w.w_k, w.w_v))
    keep = torch.ones(n, n, dtype=torch.bool).tril(1)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    x = x + y.transpose(1, 2).flatten(2) @ w.w_o
    h = F.layer_norm(x, x.shape[-1:], w.ln2_scale, w.ln2_bias)
    return x + F.gelu(h @ w.w_up + w.b_up) @ w.w_down + w.b_down
""",
    near_miss="sees-one-ahead",
)

wrong(
    "decoder_block",
    "normed residual",
    """
def decoder_block(x, weights, heads):
    w = weights
    x = F.layer_norm(x, x.shape[-1:], w.ln1_scale, w.ln1_bias)
    q, k, v = ((x @ m).unflatten(-1, (heads, -1)).transpose(1, 2) for m in (w.w_q, w.w_k, w.w_v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).flatten(2) @ w.w_o
    x = F.layer_norm(x, x.shape[-1:], w.ln2_scale, w.ln2_bias)
    return x + F.gelu(x @ w.w_up + w.b_up) @ w.w_down + w.b_down
""",
    near_miss="residual-from-the-norm",
)

wrong(
    "decoder_block",
    "batch mixed",
    """
def decoder_block(x, weights, heads):
    w = weights
    h = F.layer_norm(x, x.shape[1:], w.ln1_scale.expand(x.shape[1:]), w.ln1_bias.expand(x.shape[1:]))
    q, k, v = ((h @ m).unflatten(-1, (heads, -1)).transpose(1, 2) for m in (w.w_q, w.w_k, w.w_v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).flatten(2) @ w.w_o
    h = F.layer_norm(x, x.shape[1:], w.ln2_scale.expand(x.shape[1:]), w.ln2_bias.expand(x.shape[1:]))
    return x + F.gelu(h @ w.w_up + w.b_up) @ w.w_down + w.b_down
""",
)

wrong(
    "decoder_block",
    "another epsilon in the second norm only",
    """
def decoder_block(x, weights, heads):
    w = weights
    h = F.layer_norm(x, x.shape[-1:], w.ln1_scale, w.ln1_bias)
    q, k, v = ((h @ m).unflatten(-1, (heads, -1)).transpose(1, 2) for m in (w.w_q, w.w_k, w.w_v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).flatten(2) @ w.w_o
    h = F.layer_norm(x, x.shape[-1:], w.ln2_scale, w.ln2_bias, 1e-6)
    return x + F.gelu(h @ w.w_up + w.b_up) @ w.w_down + w.b_down
""",
)
wrong(
    "apply_rope",
    "positions rounded to float16",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    a = positions[..., None].half().float() * base ** (-torch.arange(0, d, 2).float() / d)
    e, o = x[..., 0::2], x[..., 1::2]
    return torch.stack((e * a.cos() - o * a.sin(), e * a.sin() + o * a.cos()), -1).flatten(-2).to(x.dtype)
""",
)
wrong(
    "scaled_dot_product_attention",
    "pads to at least as many keys as queries",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    extra = max(q.shape[-2] - k.shape[-2], 0)
    k, v = F.pad(k, (0, 0, 0, extra)), F.pad(v, (0, 0, 0, extra))
    if mask is not None:
        mask = F.pad(mask, (0, extra))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
""",
)
right(
    "scaled_dot_product_attention",
    "online softmax over the keys",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    hi = q.double()
    best = hi.new_full((*q.shape[:-1], 1), -1e300)
    total = torch.zeros_like(best)
    acc = hi.new_zeros(*q.shape[:-1], v.shape[-1])
    full = None if mask is None else mask.expand(*q.shape[:-1], k.shape[-2]).double()
    for j in range(k.shape[-2]):
        s = (hi * k[..., j : j + 1, :].double()).sum(-1, keepdim=True) / math.sqrt(q.shape[-1])
        if full is not None:
            s = s + full[..., j : j + 1]
        new = torch.maximum(best, s)
        old, fresh = (best - new).exp(), (s - new).exp()
        total = total * old + fresh
        acc = acc * old + fresh * v[..., j : j + 1, :].double()
        best = new
    return (acc / total).type(q.dtype)
""",
)
wrong(
    "scaled_dot_product_attention",
    "-inf clamped to -1000",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    scores = q.double() @ k.double().transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask.clamp(min=-1000.0)
    return (scores.softmax(dim=-1) @ v.double()).to(q.dtype)
""",
)
right(
    "split_heads",
    "index_select of columns",
    """
def split_heads(x, heads):
    columns = torch.arange(x.shape[-1]).view(heads, 1, -1)
    return torch.cat([x.index_select(-1, c.flatten()).unsqueeze(1) for c in columns], dim=1)
""",
)
right(
    "merge_heads",
    "a callable class",
    """
class MergeHeads:
    def __call__(self, x):
        return torch.cat(tuple(x.select(1, h) for h in range(x.shape[1])), dim=2)

merge_heads = MergeHeads()
""",
)
wrong(
    "multi_head_attention",
    "no scale",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    def cut(t):
        return t.unflatten(-1, (heads, -1)).transpose(-3, -2)

    q, k, v = cut(x_query @ w_q), cut(x_key @ w_k), cut(x_key @ w_v)
    scores = q @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores + mask
    mixed = scores.softmax(-1) @ v
    return mixed.transpose(-3, -2).flatten(-2) @ w_o
""",
    near_miss="unscaled",
)
wrong(
    "multi_head_attention",
    "mask given a head axis that it has",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    def cut(t):
        return t.unflatten(-1, (heads, -1)).transpose(-3, -2)

    q, k, v = cut(x_query @ w_q), cut(x_key @ w_k), cut(x_key @ w_v)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + (mask.unsqueeze(-3) if mask.ndim >= 3 else mask)
    mixed = scores.softmax(-1) @ v
    return mixed.transpose(-3, -2).flatten(-2) @ w_o
""",
)
right(
    "attention_parameter_count",
    "a lambda",
    """
def _need(d_hidden, heads):
    if d_hidden % heads:
        raise ValueError("d_hidden / heads must be whole")
    return d_hidden // heads

attention_parameter_count = lambda d_hidden, heads, d_k=None, d_v=None: 2 * d_hidden * heads * sum(
    _need(d_hidden, heads) if width is None else width for width in (d_k, d_v)
)
""",
)
wrong(
    "attention_parameter_count",
    "raises only for d_k left out",
    """
def attention_parameter_count(d_hidden, heads, d_k=None, d_v=None):
    if d_k is None and d_hidden % heads != 0:
        raise ValueError(f"{heads} heads do not divide {d_hidden}")
    if d_k is None:
        d_k = d_hidden // heads
    if d_v is None:
        d_v = d_hidden // heads
    return 2 * d_hidden * heads * d_k + 2 * d_hidden * heads * d_v
""",
)
right(
    "apply_rope",
    "view and unbind",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    freq = base ** (-torch.arange(0, d, 2, dtype=torch.float32) / d)
    angle = positions.float().unsqueeze(-1) * freq
    cos, sin = angle.cos(), angle.sin()
    a, b = x.view(*x.shape[:-1], d // 2, 2).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)
""",
)
wrong(
    "apply_rope",
    "frequencies in the dtype of x",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    freq = base ** (-torch.arange(0, d, 2, dtype=torch.float32) / d)
    angle = positions.float().unsqueeze(-1) * freq.to(x.dtype)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)
""",
)
wrong(
    "decoder_block",
    "second residual from x",
    """
def decoder_block(x, weights, heads):
    w = weights
    d = x.shape[-1]

    def norm(t, scale, bias):
        return F.layer_norm(t, (d,), scale, bias, 1e-5)

    def split(t):
        return t.unflatten(-1, (heads, -1)).transpose(1, 2)

    n = norm(x, w.ln1_scale, w.ln1_bias)
    q, k, v = split(n @ w.w_q), split(n @ w.w_k), split(n @ w.w_v)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    seq = x.shape[1]
    hidden = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(1)
    att = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
    h = x + att.transpose(1, 2).flatten(2) @ w.w_o
    n = norm(h, w.ln2_scale, w.ln2_bias)
    return x + F.gelu(n @ w.w_up + w.b_up) @ w.w_down + w.b_down
""",
    near_miss="second-residual-from-the-input",
)
wrong(
    "decoder_block",
    "RMSNorm",
    """
def decoder_block(x, weights, heads):
    w = weights
    d = x.shape[-1]

    def norm(t, scale, bias):
        return t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale + bias

    def split(t):
        return t.unflatten(-1, (heads, -1)).transpose(1, 2)

    n = norm(x, w.ln1_scale, w.ln1_bias)
    q, k, v = split(n @ w.w_q), split(n @ w.w_k), split(n @ w.w_v)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    seq = x.shape[1]
    hidden = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(1)
    att = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
    h = x + att.transpose(1, 2).flatten(2) @ w.w_o
    n = norm(h, w.ln2_scale, w.ln2_bias)
    return h + F.gelu(n @ w.w_up + w.b_up) @ w.w_down + w.b_down
""",
    near_miss="rms-norm",
)
wrong(
    "decoder_block",
    "norm at the end",
    """
def decoder_block(x, weights, heads):
    w = weights
    d = x.shape[-1]

    def norm(t, scale, bias):
        return F.layer_norm(t, (d,), scale, bias, 1e-5)

    def split(t):
        return t.unflatten(-1, (heads, -1)).transpose(1, 2)

    n = norm(x, w.ln1_scale, w.ln1_bias)
    q, k, v = split(n @ w.w_q), split(n @ w.w_k), split(n @ w.w_v)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    seq = x.shape[1]
    hidden = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(1)
    att = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
    h = x + att.transpose(1, 2).flatten(2) @ w.w_o
    n = norm(h, w.ln2_scale, w.ln2_bias)
    return norm(h + F.gelu(n @ w.w_up + w.b_up) @ w.w_down + w.b_down, w.ln2_scale, w.ln2_bias)
""",
    near_miss="norm-at-the-end",
)
wrong(
    "decoder_block",
    "hidden scores lowered by 30 only",
    """
def decoder_block(x, weights, heads):
    w = weights
    d = x.shape[-1]

    def norm(t, scale, bias):
        return F.layer_norm(t, (d,), scale, bias, 1e-5)

    def split(t):
        return t.unflatten(-1, (heads, -1)).transpose(1, 2)

    n = norm(x, w.ln1_scale, w.ln1_bias)
    q, k, v = split(n @ w.w_q), split(n @ w.w_k), split(n @ w.w_v)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    seq = x.shape[1]
    hidden = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(1)
    att = (scores - 30.0 * hidden.to(scores.dtype)).softmax(-1) @ v
    h = x + att.transpose(1, 2).flatten(2) @ w.w_o
    n = norm(h, w.ln2_scale, w.ln2_bias)
    return h + F.gelu(n @ w.w_up + w.b_up) @ w.w_down + w.b_down
""",
)
wrong(
    "decoder_block",
    "norm detached",
    """
def decoder_block(x, weights, heads):
    w = weights
    d = x.shape[-1]

    def norm(t, scale, bias):
        m = t.mean(-1, keepdim=True).detach()
        s = (t.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt().detach()
        return (t - m) / s * scale + bias

    def split(t):
        return t.unflatten(-1, (heads, -1)).transpose(1, 2)

    n = norm(x, w.ln1_scale, w.ln1_bias)
    q, k, v = split(n @ w.w_q), split(n @ w.w_k), split(n @ w.w_v)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    seq = x.shape[1]
    hidden = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(1)
    att = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
    h = x + att.transpose(1, 2).flatten(2) @ w.w_o
    n = norm(h, w.ln2_scale, w.ln2_bias)
    return h + F.gelu(n @ w.w_up + w.b_up) @ w.w_down + w.b_down
""",
)

# ---- answers that were written without sight of the checks
wrong(
    "scaled_dot_product_attention",
    "the root rounded down",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    s = q @ k.mT / int(math.sqrt(q.shape[-1]))
    if mask is not None: s = s + mask
    return s.softmax(-1) @ v
""",
)
wrong(
    "scaled_dot_product_attention",
    "the mask multiplied",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    s = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None: s = s * mask
    return s.softmax(-1) @ v
""",
    near_miss="mask-multiplied",
)
wrong(
    "scaled_dot_product_attention",
    "subtracts the largest score of all",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    s = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None: s = s + mask
    e = (s - s.max()).exp()
    return e / e.sum(-1, keepdim=True) @ v
""",
    near_miss="global-maximum",
)
wrong(
    "scaled_dot_product_attention",
    "the mask after the softmax, divided by the sum",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    w = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    if mask is not None:
        w = w * (mask == 0)
        w = w / w.sum(-1, keepdim=True)
    return w @ v
""",
    near_miss="renormalised-after-the-mask",
)
right(
    "scaled_dot_product_attention",
    "the mask before the scale",
    """
def scaled_dot_product_attention(q, k, v, mask=None):
    s = q @ k.mT
    if mask is not None: s = s + mask
    return (s / q.shape[-1] ** 0.5).softmax(-1) @ v
""",
)
right(
    "split_heads",
    "view, on views too",
    """
def split_heads(x, heads):
    b, s, d = x.shape
    return x.view(b, s, heads, d // heads).transpose(1, 2)
""",
)
wrong(
    "multi_head_attention",
    "heads as wide as d_hidden per heads",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    dk = x_query.shape[-1] // heads
    f = lambda t: t.reshape(*t.shape[:-1], heads, dk).transpose(-2, -3)
    q, k, v = f(x_query @ w_q), f(x_key @ w_k), f(x_key @ w_v)
    s = q @ k.transpose(-1, -2) / dk ** 0.5
    if mask is not None: s = s + mask
    return (s.softmax(-1) @ v).transpose(-2, -3).flatten(-2) @ w_o
""",
    near_miss="width-from-d-hidden",
)
wrong(
    "multi_head_attention",
    "axes 1 and 2",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    q = (x_query @ w_q).unflatten(-1, (heads, -1)).transpose(1, 2)
    k = (x_key @ w_k).unflatten(-1, (heads, -1)).transpose(1, 2)
    v = (x_key @ w_v).unflatten(-1, (heads, -1)).transpose(1, 2)
    s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if mask is not None: s = s + mask
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w_o
""",
    near_miss="axes-from-the-front",
)
right(
    "multi_head_attention",
    "sums over blocks of w_o",
    """
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    q = torch.stack((x_query @ w_q).chunk(heads, -1), -3)
    k = torch.stack((x_key @ w_k).chunk(heads, -1), -3)
    v = torch.stack((x_key @ w_v).chunk(heads, -1), -3)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return torch.einsum("...hqv,hvd->...qd", o, w_o.reshape(heads, -1, w_o.shape[-1]))
""",
)
wrong(
    "apply_rope",
    "a table of 4096 positions",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    inv = base ** (-torch.arange(0, d, 2, dtype=torch.float32) / d)
    ang = positions.clamp(0, 4095)[..., None].float() * inv
    c, s = ang.cos(), ang.sin()
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2).to(x.dtype)
""",
)
right(
    "apply_rope",
    "two by two matrices",
    """
def apply_rope(x, positions, base=10000.0):
    d = x.shape[-1]
    a = positions[..., None].double() / base ** (torch.arange(0, d, 2).double() / d)
    R = torch.stack([torch.stack([a.cos(), -a.sin()], -1), torch.stack([a.sin(), a.cos()], -1)], -2)
    p = x.double().reshape(*x.shape[:-1], d // 2, 2, 1)
    return (R @ p).reshape(x.shape).to(x.dtype)
""",
)
wrong(
    "decoder_block",
    "adds to the norm",
    """
def decoder_block(x, weights, heads):
    w = weights
    b, n, d = x.shape
    h = F.layer_norm(x, (d,), w.ln1_scale, w.ln1_bias, 1e-5)
    f = lambda t: t.unflatten(-1, (heads, -1)).transpose(1, 2)
    q, k, v = f(h @ w.w_q), f(h @ w.w_k), f(h @ w.w_v)
    s = q @ k.mT / q.shape[-1] ** 0.5
    s = s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    a = (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w.w_o
    x = h + a
    h = F.layer_norm(x, (d,), w.ln2_scale, w.ln2_bias, 1e-5)
    return x + F.gelu(h @ w.w_up + w.b_up) @ w.w_down + w.b_down
""",
    near_miss="attention-residual-from-the-norm",
)
wrong(
    "decoder_block",
    "b_down left out",
    """
def decoder_block(x, weights, heads):
    w = weights
    b, n, d = x.shape
    h = F.layer_norm(x, (d,), w.ln1_scale, w.ln1_bias, 1e-5)
    f = lambda t: t.unflatten(-1, (heads, -1)).transpose(1, 2)
    q, k, v = f(h @ w.w_q), f(h @ w.w_k), f(h @ w.w_v)
    s = q @ k.mT / q.shape[-1] ** 0.5
    s = s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    a = (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w.w_o
    x = x + a
    h = F.layer_norm(x, (d,), w.ln2_scale, w.ln2_bias, 1e-5)
    return x + F.gelu(h @ w.w_up + w.b_up) @ w.w_down
""",
    near_miss="no-b-down",
)
wrong(
    "decoder_block",
    "b_up left out",
    """
def decoder_block(x, weights, heads):
    w = weights
    b, n, d = x.shape
    h = F.layer_norm(x, (d,), w.ln1_scale, w.ln1_bias, 1e-5)
    f = lambda t: t.unflatten(-1, (heads, -1)).transpose(1, 2)
    q, k, v = f(h @ w.w_q), f(h @ w.w_k), f(h @ w.w_v)
    s = q @ k.mT / q.shape[-1] ** 0.5
    s = s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    a = (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w.w_o
    x = x + a
    h = F.layer_norm(x, (d,), w.ln2_scale, w.ln2_bias, 1e-5)
    return x + F.gelu(h @ w.w_up) @ w.w_down + w.b_down
""",
    near_miss="no-b-up",
)
wrong(
    "decoder_block",
    "no second norm",
    """
def decoder_block(x, weights, heads):
    w = weights
    b, n, d = x.shape
    h = F.layer_norm(x, (d,), w.ln1_scale, w.ln1_bias, 1e-5)
    f = lambda t: t.unflatten(-1, (heads, -1)).transpose(1, 2)
    q, k, v = f(h @ w.w_q), f(h @ w.w_k), f(h @ w.w_v)
    s = q @ k.mT / q.shape[-1] ** 0.5
    s = s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    a = (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w.w_o
    x = x + a
    h = x
    return x + F.gelu(h @ w.w_up + w.b_up) @ w.w_down + w.b_down
""",
    near_miss="no-second-norm",
)
