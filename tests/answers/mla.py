"""Answers to the exercises on multi-head latent attention, as strangers write them."""

from tests.answers import right, wrong

# --- low_rank_factors

right(
    "low_rank_factors",
    "svd balanced list",
    """
def low_rank_factors(w, rank):
    if rank < 1 or rank > min(w.shape[0], w.shape[1]):
        raise ValueError("rank out of range")
    U, S, V = torch.svd(w.to(torch.float64))
    r = torch.sqrt(S[:rank])
    return [(U[:, :rank] @ torch.diag(r)).to(w.dtype), (torch.diag(r) @ V[:, :rank].T).to(w.dtype)]
""",
)

right(
    "low_rank_factors",
    "eigh of the gram matrix in double",
    """
def low_rank_factors(w, rank):
    if not (1 <= rank <= min(w.shape)):
        raise ValueError(f"bad rank {rank}")
    d = w.double()
    _, vectors = torch.linalg.eigh(d.T @ d)
    v = vectors.flip(1)[:, :rank]
    return (d @ v).to(w.dtype), v.T.to(w.dtype)
""",
)

right(
    "low_rank_factors",
    "eigh in float32",
    """
def low_rank_factors(w, rank):
    if not (1 <= rank <= min(w.shape)):
        raise ValueError(f"bad rank {rank}")
    d = w.float() if w.dtype in (torch.float16, torch.bfloat16) else w
    _, vectors = torch.linalg.eigh(d @ d.T)
    u = vectors.flip(1)[:, :rank]
    return u.to(w.dtype), (u.T @ d).to(w.dtype)
""",
)

right(
    "low_rank_factors",
    "full matrices, s on the right",
    """
def low_rank_factors(w, rank):
    if rank <= 0: raise ValueError("rank must be positive")
    if rank > w.shape[0] or rank > w.shape[1]: raise ValueError("rank too large")
    x = w.float() if w.dtype.itemsize < 4 else w
    u, s, vt = torch.linalg.svd(x)
    a = torch.stack([u[:, i] for i in range(rank)], 1)
    b = torch.stack([s[i] * vt[i] for i in range(rank)], 0)
    return a.to(w), b.to(w)
""",
)

wrong(
    "low_rank_factors",
    "V for Vh",
    """
def low_rank_factors(w, rank):
    if not 1 <= rank <= min(w.shape): raise ValueError("rank")
    u, s, v = torch.svd(w.float())
    return (u[:, :rank] * s[:rank]).to(w.dtype), v[:rank].to(w.dtype)
""",
    near_miss="vh-taken-for-v",
)

wrong(
    "low_rank_factors",
    "rank above cols only",
    """
def low_rank_factors(w, rank):
    if not 1 <= rank <= w.shape[1]: raise ValueError("rank")
    u, s, vh = torch.linalg.svd(w if w.dtype==torch.float64 else w.float(), full_matrices=False)
    return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:rank].to(w.dtype)
""",
)

wrong(
    "low_rank_factors",
    "float64 through float32",
    """
def low_rank_factors(w, rank):
    if not 1 <= rank <= min(w.shape): raise ValueError("rank")
    u, s, vh = torch.linalg.svd(w.float(), full_matrices=False)
    return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:rank].to(w.dtype)
""",
)

wrong(
    "low_rank_factors",
    "numpy",
    """
import numpy as np
def low_rank_factors(w, rank):
    if not 1 <= rank <= min(w.shape): raise ValueError("rank")
    u, s, vh = np.linalg.svd(w.detach().double().numpy(), full_matrices=False)
    return torch.tensor(u[:, :rank] * s[:rank]).to(w.dtype), torch.tensor(vh[:rank]).to(w.dtype)
""",
    near_miss="no-gradient",
)

wrong(
    "low_rank_factors",
    "no rank 0 check",
    """
def low_rank_factors(w, rank):
    if rank > min(w.shape): raise ValueError("rank")
    u, s, vh = torch.linalg.svd(w if w.dtype==torch.float64 else w.float(), full_matrices=False)
    return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:rank].to(w.dtype)
""",
)

wrong(
    "low_rank_factors",
    "one factor detached",
    """
def low_rank_factors(w, rank):
    if not 1 <= rank <= min(w.shape): raise ValueError("rank")
    u, s, vh = torch.linalg.svd(w if w.dtype==torch.float64 else w.float(), full_matrices=False)
    return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:rank].detach().to(w.dtype)
""",
    near_miss="no-gradient",
)

wrong(
    "low_rank_factors",
    "assert",
    """
def low_rank_factors(w, rank):
    assert 1 <= rank <= min(w.shape)
    u, s, vh = torch.linalg.svd(w if w.dtype==torch.float64 else w.float(), full_matrices=False)
    return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:rank].to(w.dtype)
""",
)

wrong(
    "low_rank_factors",
    "changes w in place",
    """
def low_rank_factors(w, rank):
    if not 1 <= rank <= min(w.shape): raise ValueError("rank")
    u, s, vh = torch.linalg.svd(w if w.dtype==torch.float64 else w.float(), full_matrices=False)
    if not w.requires_grad: w *= 1.0000001; w += 1e-3
    return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:rank].to(w.dtype)
""",
)

wrong(
    "low_rank_factors",
    "square roots forgotten on wide",
    """
def low_rank_factors(w, rank):
    if not 1 <= rank <= min(w.shape): raise ValueError("rank")
    u, s, vh = torch.linalg.svd(w if w.dtype==torch.float64 else w.float(), full_matrices=False)
    a = (u[:, :rank] * s[:rank]).to(w.dtype)
    return (a, vh[:rank].to(w.dtype)) if w.shape[0] >= w.shape[1] else (a, (s[:rank, None] * vh[:rank]).to(w.dtype))
""",
)


# --- compress_kv

right(
    "compress_kv",
    "einsum",
    """
def compress_kv(h, w_dkv):
    return torch.einsum("bsd,dc->bsc", h, w_dkv)
def expand_kv(c, w_uk, w_uv, heads):
    dc = c.shape[-1]
    return [torch.einsum("bsc,chd->bhsd", c, w.reshape(dc, heads, -1)) for w in (w_uk, w_uv)]
""",
)

right(
    "compress_kv",
    "loops",
    """
def compress_kv(h, w_dkv):
    return torch.stack([row @ w_dkv for row in h])
def expand_kv(c, w_uk, w_uv, heads):
    d = w_uk.shape[1] // heads
    k = torch.stack([c @ w_uk[:, i*d:(i+1)*d] for i in range(heads)], dim=1)
    v = torch.stack([c @ w_uv[:, i*d:(i+1)*d] for i in range(heads)], dim=1)
    return k, v
""",
)

right(
    "compress_kv",
    "linear, float32 inside",
    """
def compress_kv(h, w_dkv):
    t = torch.promote_types(h.dtype, torch.float32)
    return F.linear(h.to(t), w_dkv.to(t).T).to(h.dtype)
def expand_kv(c, w_uk, w_uv, heads):
    kv = (c @ torch.cat([w_uk, w_uv], dim=1)).unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4)
    return kv[0], kv[1]
""",
)

wrong(
    "compress_kv",
    "interleaved",
    """
def compress_kv(h, w_dkv):
    return h @ w_dkv
def expand_kv(c, w_uk, w_uv, heads):
    b, s, _ = c.shape
    f = lambda v: v.reshape(b, s, -1, heads).permute(0,3,1,2)
    return f(c @ w_uk), f(c @ w_uv)
""",
    near_miss="heads-interleaved",
)

wrong(
    "compress_kv",
    "no transpose",
    """
def compress_kv(h, w_dkv):
    return h @ w_dkv
def expand_kv(c, w_uk, w_uv, heads):
    b, s, _ = c.shape
    f = lambda v: v.reshape(b, heads, s, -1)
    return f(c @ w_uk), f(c @ w_uv)
""",
    near_miss="view-without-transpose",
)

wrong(
    "compress_kv",
    "batch first only",
    """
def compress_kv(h, w_dkv):
    return h @ w_dkv
def expand_kv(c, w_uk, w_uv, heads):
    b, s, _ = c.shape
    f = lambda v: v.reshape(1, b*s, heads, -1).transpose(1,2).reshape(b, heads, s, -1)
    return f(c @ w_uk), f(c @ w_uv)
""",
)

wrong(
    "compress_kv",
    "float32 result in half",
    """
def compress_kv(h, w_dkv):
    return h.float() @ w_dkv.float() if h.dtype.itemsize < 4 else h @ w_dkv
def expand_kv(c, w_uk, w_uv, heads):
    b, s, _ = c.shape
    f = lambda v: v.reshape(b, s, heads, -1).transpose(1, 2)
    return f(c @ w_uk), f(c @ w_uv)
""",
)

wrong(
    "compress_kv",
    "scaled latent",
    """
def compress_kv(h, w_dkv):
    return h @ w_dkv / h.shape[-1] ** 0.5
def expand_kv(c, w_uk, w_uv, heads):
    b, s, _ = c.shape
    f = lambda v: v.reshape(b, s, heads, -1).transpose(1, 2)
    return f(c @ w_uk), f(c @ w_uv)
""",
)

wrong(
    "compress_kv",
    "value weight detached",
    """
def compress_kv(h, w_dkv):
    return h @ w_dkv
def expand_kv(c, w_uk, w_uv, heads):
    b, s, _ = c.shape
    f = lambda v: v.reshape(b, s, heads, -1).transpose(1, 2)
    return f(c @ w_uk), f(c @ w_uv.detach())
""",
)

wrong(
    "compress_kv",
    "two heads always",
    """
def compress_kv(h, w_dkv):
    return h @ w_dkv
def expand_kv(c, w_uk, w_uv, heads):
    b, s, _ = c.shape
    f = lambda v: v.reshape(b, s, 2, -1).transpose(1, 2)
    return f(c @ w_uk), f(c @ w_uv)
""",
)

wrong(
    "compress_kv",
    "normalises in place",
    """
def compress_kv(h, w_dkv):
    return h @ w_dkv
def expand_kv(c, w_uk, w_uv, heads):
    b, s, _ = c.shape
    f = lambda v: v.reshape(b, s, heads, -1).transpose(1, 2)
    k, v = f(c @ w_uk), f(c @ w_uv)
    with torch.no_grad(): c /= c.norm()
    return k, v
""",
)


# --- latent_attention

right(
    "latent_attention",
    "sdpa with float32 softmax",
    """
def latent_attention(h, weights):
    b, n, _ = h.shape
    H = weights.heads
    cut = lambda x: x.reshape(b, n, H, -1).transpose(1, 2)
    p = torch.arange(n)
    c = torch.matmul(h, weights.w_dkv)
    k_r = apply_rope(torch.matmul(h, weights.w_kr), p)
    q = torch.cat((cut(h @ weights.w_q), apply_rope(cut(h @ weights.w_qr), p)), -1)
    k = torch.cat((cut(c @ weights.w_uk), k_r.unsqueeze(1).repeat(1, H, 1, 1)), -1)
    o = F.scaled_dot_product_attention(q, k, cut(c @ weights.w_uv), is_causal=True)
    return o.permute(0, 2, 1, 3).flatten(2) @ weights.w_o
""",
)

right(
    "latent_attention",
    "loop over batch, head and token in double",
    """
def latent_attention(h, weights):
    t = h.dtype
    W = {k: v.double() for k, v in vars(weights).items() if k != "heads"}
    H = weights.heads; d_h = W["w_uk"].shape[1] // H; d_r = W["w_kr"].shape[1]
    rows = []
    for x in h.double():
        n = len(x); p = torch.arange(n)
        c = x @ W["w_dkv"]; kr = apply_rope(x @ W["w_kr"], p)
        heads = []
        for i in range(H):
            q = (x @ W["w_q"])[:, i*d_h:(i+1)*d_h]; qr = apply_rope((x @ W["w_qr"])[:, i*d_r:(i+1)*d_r], p)
            k = (c @ W["w_uk"])[:, i*d_h:(i+1)*d_h]; v = (c @ W["w_uv"])[:, i*d_h:(i+1)*d_h]
            s = (q @ k.T + qr @ kr.T) * (d_h + d_r) ** -0.5
            heads.append(torch.stack([s[j, :j+1].softmax(0) @ v[:j+1] for j in range(n)]))
        rows.append(torch.cat(heads, 1) @ W["w_o"])
    return torch.stack(rows).to(t)
""",
)

right(
    "latent_attention",
    "absorbed, native half",
    """
def latent_attention(h, weights):
    b, n, _ = h.shape; H = weights.heads
    p = torch.arange(n)
    c = h @ weights.w_dkv
    kr = apply_rope(h @ weights.w_kr, p)
    qr = apply_rope((h @ weights.w_qr).view(b, n, H, -1).transpose(1, 2), p)
    uk = weights.w_uk.view(c.shape[-1], H, -1); uv = weights.w_uv.view(c.shape[-1], H, -1)
    q = torch.einsum("bnhd,chd->bhnc", (h @ weights.w_q).view(b, n, H, -1), uk)
    s = (q @ c[:, None].mT + qr @ kr[:, None].mT) / (uk.shape[-1] + kr.shape[-1]) ** 0.5
    s = s + torch.full((n, n), float("-inf"), dtype=s.dtype).triu(1)
    a = s.softmax(-1)
    return torch.einsum("bhnc,chd->bnhd", a @ c[:, None], uv).flatten(2) @ weights.w_o
""",
)

right(
    "latent_attention",
    "finfo mask",
    """
def latent_attention(h, weights):
    b, n, _ = h.shape; H = weights.heads
    def cut(x): return x.unflatten(-1, (H, -1)).movedim(2, 1)
    p = torch.arange(n, device=h.device)
    c = h @ weights.w_dkv
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    s = cut(h @ weights.w_q) @ k_c.mT
    s = s + apply_rope(cut(h @ weights.w_qr), p) @ apply_rope(h @ weights.w_kr, p).unsqueeze(1).mT
    s = s / math.sqrt(k_c.shape[-1] + weights.w_kr.shape[-1])
    keep = p[:, None] >= p[None]
    s = torch.where(keep, s, torch.finfo(s.dtype).min)
    return (torch.softmax(s.float() if s.dtype != torch.float64 else s, -1).to(h.dtype) @ v).movedim(1, 2).flatten(2) @ weights.w_o
""",
)

right(
    "latent_attention",
    "base",
    """
def latent_attention(h, weights):
    b, n, _ = h.shape; H = weights.heads
    def cut(x): return x.unflatten(-1, (H, -1)).transpose(1, 2)
    p = torch.arange(n, device=h.device)
    c = h @ weights.w_dkv
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_r = apply_rope(h @ weights.w_kr, p)[:, None]
    s = (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(k_c.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(p[:, None] < p, float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
)

wrong(
    "latent_attention",
    "scale sqrt d_h",
    """
def latent_attention(h, weights):
    b, n, _ = h.shape; H = weights.heads
    def cut(x): return x.unflatten(-1, (H, -1)).transpose(1, 2)
    p = torch.arange(n, device=h.device)
    c = h @ weights.w_dkv
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_r = apply_rope(h @ weights.w_kr, p)[:, None]
    s = (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(k_c.shape[-1])
    s = s.masked_fill(p[:, None] < p, float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
    near_miss="scale-without-rotary",
)

wrong(
    "latent_attention",
    "scale by sum of roots",
    """
def latent_attention(h, weights):
    b, n, _ = h.shape; H = weights.heads
    def cut(x): return x.unflatten(-1, (H, -1)).transpose(1, 2)
    p = torch.arange(n, device=h.device)
    c = h @ weights.w_dkv
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_r = apply_rope(h @ weights.w_kr, p)[:, None]
    s = (q_c @ k_c.mT + q_r @ k_r.mT) / (math.sqrt(k_c.shape[-1]) + math.sqrt(k_r.shape[-1]))
    s = s.masked_fill(p[:, None] < p, float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
)

wrong(
    "latent_attention",
    "rope base",
    """
def latent_attention(h, weights):
    b, n, _ = h.shape; H = weights.heads
    def cut(x): return x.unflatten(-1, (H, -1)).transpose(1, 2)
    p = torch.arange(n, device=h.device)
    c = h @ weights.w_dkv
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_r = apply_rope(h @ weights.w_kr, p, 500.0)[:, None]
    s = (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(k_c.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(p[:, None] < p, float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
)

wrong(
    "latent_attention",
    "mask half",
    """
def latent_attention(h, weights):
    b, n, _ = h.shape; H = weights.heads
    def cut(x): return x.unflatten(-1, (H, -1)).transpose(1, 2)
    p = torch.arange(n, device=h.device)
    c = h @ weights.w_dkv
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_r = apply_rope(h @ weights.w_kr, p)[:, None]
    s = (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(k_c.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(p[:, None] < p, -1e9)
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
)

wrong(
    "latent_attention",
    "mask small",
    """
def latent_attention(h, weights):
    b, n, _ = h.shape; H = weights.heads
    def cut(x): return x.unflatten(-1, (H, -1)).transpose(1, 2)
    p = torch.arange(n, device=h.device)
    c = h @ weights.w_dkv
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_r = apply_rope(h @ weights.w_kr, p)[:, None]
    s = (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(k_c.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(p[:, None] < p, -10.0)
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
)

wrong(
    "latent_attention",
    "positions from 1 for keys",
    """
def latent_attention(h, weights):
    b, n, _ = h.shape; H = weights.heads
    def cut(x): return x.unflatten(-1, (H, -1)).transpose(1, 2)
    p = torch.arange(n, device=h.device)
    c = h @ weights.w_dkv
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_r = apply_rope(h @ weights.w_kr, p + 1)[:, None]
    s = (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(k_c.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(p[:, None] < p, float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
)

wrong(
    "latent_attention",
    "detached latent",
    """
def latent_attention(h, weights):
    b, n, _ = h.shape; H = weights.heads
    def cut(x): return x.unflatten(-1, (H, -1)).transpose(1, 2)
    p = torch.arange(n, device=h.device)
    c = (h @ weights.w_dkv).detach()
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_r = apply_rope(h @ weights.w_kr, p)[:, None]
    s = (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(k_c.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(p[:, None] < p, float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
)

wrong(
    "latent_attention",
    "detached k_r",
    """
def latent_attention(h, weights):
    b, n, _ = h.shape; H = weights.heads
    def cut(x): return x.unflatten(-1, (H, -1)).transpose(1, 2)
    p = torch.arange(n, device=h.device)
    c = h @ weights.w_dkv
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_r = apply_rope(h @ weights.w_kr, p)[:, None].detach()
    s = (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(k_c.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(p[:, None] < p, float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
)

wrong(
    "latent_attention",
    "v from keys",
    """
def latent_attention(h, weights):
    b, n, _ = h.shape; H = weights.heads
    def cut(x): return x.unflatten(-1, (H, -1)).transpose(1, 2)
    p = torch.arange(n, device=h.device)
    c = h @ weights.w_dkv
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uk)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_r = apply_rope(h @ weights.w_kr, p)[:, None]
    s = (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(k_c.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(p[:, None] < p, float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
    near_miss="values-from-keys",
)

wrong(
    "latent_attention",
    "float32 out",
    """
def latent_attention(h, weights):
    b, n, _ = h.shape; H = weights.heads
    def cut(x): return x.unflatten(-1, (H, -1)).transpose(1, 2)
    p = torch.arange(n, device=h.device)
    c = h @ weights.w_dkv
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_r = apply_rope(h @ weights.w_kr, p)[:, None]
    s = (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(k_c.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(p[:, None] < p, float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o + torch.zeros(1, dtype=torch.float32)
""",
)

wrong(
    "latent_attention",
    "flatten wrong",
    """
def latent_attention(h, weights):
    b, n, _ = h.shape; H = weights.heads
    def cut(x): return x.unflatten(-1, (H, -1)).transpose(1, 2)
    p = torch.arange(n, device=h.device)
    c = h @ weights.w_dkv
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_r = apply_rope(h @ weights.w_kr, p)[:, None]
    s = (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(k_c.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(p[:, None] < p, float("-inf"))
    return (s.softmax(-1) @ v).reshape(b, n, -1) @ weights.w_o
""",
    near_miss="heads-merged-without-transpose",
)

wrong(
    "latent_attention",
    "first sequence's key",
    """
def latent_attention(h, weights):
    b, n, _ = h.shape; H = weights.heads
    def cut(x): return x.unflatten(-1, (H, -1)).transpose(1, 2)
    p = torch.arange(n, device=h.device)
    c = h @ weights.w_dkv
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_r = apply_rope(h @ weights.w_kr, p)[:1, None]
    s = (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(k_c.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(p[:, None] < p, float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
)

wrong(
    "latent_attention",
    "rounds through float32",
    """
def latent_attention(h, weights):
    b, n, _ = h.shape; H = weights.heads
    h = h.float().to(h.dtype)
    def cut(x): return x.unflatten(-1, (H, -1)).transpose(1, 2)
    p = torch.arange(n, device=h.device)
    c = h @ weights.w_dkv
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_r = apply_rope(h @ weights.w_kr, p)[:, None]
    s = (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(k_c.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(p[:, None] < p, float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
)

wrong(
    "latent_attention",
    "output a little too large",
    """
def latent_attention(h, weights):
    b, n, _ = h.shape; H = weights.heads
    def cut(x): return x.unflatten(-1, (H, -1)).transpose(1, 2)
    p = torch.arange(n, device=h.device)
    c = h @ weights.w_dkv
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_r = apply_rope(h @ weights.w_kr, p)[:, None]
    s = (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(k_c.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(p[:, None] < p, float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o * 1.001
""",
)


# --- latent_attention_absorbed

right(
    "latent_attention_absorbed",
    "broadcast matmul",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape; n = c.shape[1]; H = weights.heads; dc = c.shape[-1]
    uk = weights.w_uk.reshape(dc, H, -1); uv = weights.w_uv.reshape(dc, H, -1)
    p = torch.arange(n - m, n)
    q_r = apply_rope((h @ weights.w_qr).reshape(b, m, H, -1).transpose(1, 2), p)
    q_a = torch.einsum("bmhd,chd->bhmc", (h @ weights.w_q).reshape(b, m, H, -1), uk)
    s = (q_a @ c[:, None].mT + q_r @ k_r[:, None].mT) / math.sqrt(uk.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(torch.arange(n) > p[:, None], float("-inf"))
    ctx = s.softmax(-1) @ c[:, None]
    return torch.einsum("bhmc,chd->bmhd", ctx, uv).flatten(2) @ weights.w_o
""",
)

right(
    "latent_attention_absorbed",
    "sdpa with concatenated latent",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape; n, dc, H = c.shape[1], c.shape[2], weights.heads
    uk = weights.w_uk.view(dc, H, -1).permute(1, 2, 0); uv = weights.w_uv.view(dc, H, -1).permute(1, 0, 2)
    cut = lambda x: x.view(b, m, H, -1).transpose(1, 2)
    q = torch.cat([cut(h @ weights.w_q) @ uk, apply_rope(cut(h @ weights.w_qr), torch.arange(n - m, n))], -1)
    k = torch.cat([c, k_r], -1)[:, None].expand(-1, H, -1, -1)
    v = c[:, None].expand(-1, H, -1, -1)
    mask = torch.ones(m, n, dtype=torch.bool).tril(n - m)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=(uk.shape[1] + k_r.shape[-1]) ** -0.5)
    return (o @ uv).transpose(1, 2).reshape(b, m, -1) @ weights.w_o
""",
)

right(
    "latent_attention_absorbed",
    "precomputed matrices, head loop",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    H, n, m = weights.heads, c.shape[1], h.shape[1]
    d = weights.w_uk.shape[1] // H; r = k_r.shape[-1]
    out = 0
    for i in range(H):
        s = slice(i * d, (i + 1) * d)
        wqk = weights.w_q[:, s] @ weights.w_uk[:, s].T
        wvo = weights.w_uv[:, s] @ weights.w_o[s]
        q_r = apply_rope(h @ weights.w_qr[:, i * r:(i + 1) * r], torch.arange(n - m, n))
        score = ((h @ wqk) @ c.transpose(1, 2) + q_r @ k_r.transpose(1, 2)) / (d + r) ** 0.5
        score = score + torch.full((m, n), float("-inf"), dtype=score.dtype).triu(n - m + 1)
        out = out + torch.softmax(score, -1) @ c @ wvo
    return out
""",
)

right(
    "latent_attention_absorbed",
    "float32 inside",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    t = h.dtype
    up = torch.promote_types(t, torch.float32)
    h, c, k_r = h.to(up), c.to(up), k_r.to(up)
    b, m, _ = h.shape; n, dc, H = c.shape[1], c.shape[2], weights.heads
    uk = weights.w_uk.to(up).reshape(dc, H, -1); uv = weights.w_uv.to(up).reshape(dc, H, -1)
    q = (h @ weights.w_q.to(up)).reshape(b, m, H, -1)
    qr = apply_rope((h @ weights.w_qr.to(up)).reshape(b, m, H, -1).transpose(1, 2), torch.arange(n - m, n))
    s = torch.einsum("bmhd,chd,bkc->bhmk", q, uk, c) + torch.einsum("bhmr,bkr->bhmk", qr, k_r)
    s = s / (uk.shape[-1] + k_r.shape[-1]) ** 0.5
    if m > 1:
        s = torch.where(torch.ones(m, n, dtype=torch.bool).tril(n - m), s, float("-inf"))
    a = s.softmax(-1)
    o = torch.einsum("bhmk,bkc->bhmc", a, c)
    return (torch.einsum("bhmc,chd->bmhd", o, uv).reshape(b, m, -1) @ weights.w_o.to(up)).to(t)
""",
)

wrong(
    "latent_attention_absorbed",
    "scale d_c+d_r",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape; n = c.shape[1]; H = weights.heads; dc = c.shape[-1]
    uk = weights.w_uk.reshape(dc, H, -1); uv = weights.w_uv.reshape(dc, H, -1)
    p = torch.arange(n - m, n)
    q_r = apply_rope((h @ weights.w_qr).reshape(b, m, H, -1).transpose(1, 2), p)
    q_a = torch.einsum("bmhd,chd->bhmc", (h @ weights.w_q).reshape(b, m, H, -1), uk)
    s = (q_a @ c[:, None].mT + q_r @ k_r[:, None].mT) / math.sqrt(dc + k_r.shape[-1])
    s = s.masked_fill(torch.arange(n) > p[:, None], float("-inf"))
    ctx = s.softmax(-1) @ c[:, None]
    return torch.einsum("bhmc,chd->bmhd", ctx, uv).flatten(2) @ weights.w_o
""",
    near_miss="scale-from-absorbed-width",
)

wrong(
    "latent_attention_absorbed",
    "scale d_h",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape; n = c.shape[1]; H = weights.heads; dc = c.shape[-1]
    uk = weights.w_uk.reshape(dc, H, -1); uv = weights.w_uv.reshape(dc, H, -1)
    p = torch.arange(n - m, n)
    q_r = apply_rope((h @ weights.w_qr).reshape(b, m, H, -1).transpose(1, 2), p)
    q_a = torch.einsum("bmhd,chd->bhmc", (h @ weights.w_q).reshape(b, m, H, -1), uk)
    s = (q_a @ c[:, None].mT + q_r @ k_r[:, None].mT) / math.sqrt(uk.shape[-1])
    s = s.masked_fill(torch.arange(n) > p[:, None], float("-inf"))
    ctx = s.softmax(-1) @ c[:, None]
    return torch.einsum("bhmc,chd->bmhd", ctx, uv).flatten(2) @ weights.w_o
""",
    near_miss="scale-without-rotary",
)

wrong(
    "latent_attention_absorbed",
    "square mask",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape; n = c.shape[1]; H = weights.heads; dc = c.shape[-1]
    uk = weights.w_uk.reshape(dc, H, -1); uv = weights.w_uv.reshape(dc, H, -1)
    p = torch.arange(n - m, n)
    q_r = apply_rope((h @ weights.w_qr).reshape(b, m, H, -1).transpose(1, 2), p)
    q_a = torch.einsum("bmhd,chd->bhmc", (h @ weights.w_q).reshape(b, m, H, -1), uk)
    s = (q_a @ c[:, None].mT + q_r @ k_r[:, None].mT) / math.sqrt(uk.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(torch.arange(n) > torch.arange(m)[:, None], float("-inf"))
    ctx = s.softmax(-1) @ c[:, None]
    return torch.einsum("bhmc,chd->bmhd", ctx, uv).flatten(2) @ weights.w_o
""",
    near_miss="mask-aligned-at-the-start",
)

wrong(
    "latent_attention_absorbed",
    "no mask",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape; n = c.shape[1]; H = weights.heads; dc = c.shape[-1]
    uk = weights.w_uk.reshape(dc, H, -1); uv = weights.w_uv.reshape(dc, H, -1)
    p = torch.arange(n - m, n)
    q_r = apply_rope((h @ weights.w_qr).reshape(b, m, H, -1).transpose(1, 2), p)
    q_a = torch.einsum("bmhd,chd->bhmc", (h @ weights.w_q).reshape(b, m, H, -1), uk)
    s = (q_a @ c[:, None].mT + q_r @ k_r[:, None].mT) / math.sqrt(uk.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(torch.zeros(m, n, dtype=torch.bool), float("-inf"))
    ctx = s.softmax(-1) @ c[:, None]
    return torch.einsum("bhmc,chd->bmhd", ctx, uv).flatten(2) @ weights.w_o
""",
    near_miss="unmasked",
)

wrong(
    "latent_attention_absorbed",
    "positions zero",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape; n = c.shape[1]; H = weights.heads; dc = c.shape[-1]
    uk = weights.w_uk.reshape(dc, H, -1); uv = weights.w_uv.reshape(dc, H, -1)
    p = torch.arange(n - m, n)
    q_r = apply_rope((h @ weights.w_qr).reshape(b, m, H, -1).transpose(1, 2), p - p[0])
    q_a = torch.einsum("bmhd,chd->bhmc", (h @ weights.w_q).reshape(b, m, H, -1), uk)
    s = (q_a @ c[:, None].mT + q_r @ k_r[:, None].mT) / math.sqrt(uk.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(torch.arange(n) > p[:, None], float("-inf"))
    ctx = s.softmax(-1) @ c[:, None]
    return torch.einsum("bhmc,chd->bmhd", ctx, uv).flatten(2) @ weights.w_o
""",
    near_miss="positions-from-zero",
)

wrong(
    "latent_attention_absorbed",
    "rotates key again",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape; n = c.shape[1]; H = weights.heads; dc = c.shape[-1]
    uk = weights.w_uk.reshape(dc, H, -1); uv = weights.w_uv.reshape(dc, H, -1)
    p = torch.arange(n - m, n)
    q_r = apply_rope((h @ weights.w_qr).reshape(b, m, H, -1).transpose(1, 2), p)
    q_a = torch.einsum("bmhd,chd->bhmc", (h @ weights.w_q).reshape(b, m, H, -1), uk)
    s = (q_a @ c[:, None].mT + q_r @ apply_rope(k_r, torch.arange(n))[:, None].mT) / math.sqrt(uk.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(torch.arange(n) > p[:, None], float("-inf"))
    ctx = s.softmax(-1) @ c[:, None]
    return torch.einsum("bhmc,chd->bmhd", ctx, uv).flatten(2) @ weights.w_o
""",
    near_miss="key-rotated-again",
)

wrong(
    "latent_attention_absorbed",
    "value of one head built",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape; n = c.shape[1]; H = weights.heads; dc = c.shape[-1]
    uk = weights.w_uk.reshape(dc, H, -1); uv = weights.w_uv.reshape(dc, H, -1)
    p = torch.arange(n - m, n)
    q_r = apply_rope((h @ weights.w_qr).reshape(b, m, H, -1).transpose(1, 2), p)
    q_a = torch.einsum("bmhd,chd->bhmc", (h @ weights.w_q).reshape(b, m, H, -1), uk)
    s = (q_a @ c[:, None].mT + q_r @ k_r[:, None].mT) / math.sqrt(uk.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(torch.arange(n) > p[:, None], float("-inf"))
    a = s.softmax(-1)
    return torch.cat([a[:, i] @ (c @ uv[:, i]) for i in range(H)], -1) @ weights.w_o
""",
    near_miss="expanded-head-by-head",
)

wrong(
    "latent_attention_absorbed",
    "keys built elementwise",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape; n = c.shape[1]; H = weights.heads; dc = c.shape[-1]
    uk = weights.w_uk.reshape(dc, H, -1); uv = weights.w_uv.reshape(dc, H, -1)
    p = torch.arange(n - m, n)
    q_r = apply_rope((h @ weights.w_qr).reshape(b, m, H, -1).transpose(1, 2), p)
    q_a = torch.einsum("bmhd,chd->bhmc", (h @ weights.w_q).reshape(b, m, H, -1), uk)
    s = (((h @ weights.w_q).reshape(b, m, H, -1).transpose(1, 2) @ (c[:, None, :, None] @ uk.permute(1,0,2)[None, :, None])[:, :, :, 0].mT) + q_r @ k_r[:, None].mT) / math.sqrt(uk.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(torch.arange(n) > p[:, None], float("-inf"))
    ctx = s.softmax(-1) @ c[:, None]
    return torch.einsum("bhmc,chd->bmhd", ctx, uv).flatten(2) @ weights.w_o
""",
    near_miss="expanded",
)

wrong(
    "latent_attention_absorbed",
    "mask only when one query",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape; n = c.shape[1]; H = weights.heads; dc = c.shape[-1]
    uk = weights.w_uk.reshape(dc, H, -1); uv = weights.w_uv.reshape(dc, H, -1)
    p = torch.arange(n - m, n)
    q_r = apply_rope((h @ weights.w_qr).reshape(b, m, H, -1).transpose(1, 2), p)
    q_a = torch.einsum("bmhd,chd->bhmc", (h @ weights.w_q).reshape(b, m, H, -1), uk)
    s = (q_a @ c[:, None].mT + q_r @ k_r[:, None].mT) / math.sqrt(uk.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(torch.arange(n) >= p[:, None] + (1 if m == n else 0) + (1 if m == 1 else 0), float("-inf"))
    ctx = s.softmax(-1) @ c[:, None]
    return torch.einsum("bhmc,chd->bmhd", ctx, uv).flatten(2) @ weights.w_o
""",
)

wrong(
    "latent_attention_absorbed",
    "detached c in values",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape; n = c.shape[1]; H = weights.heads; dc = c.shape[-1]
    uk = weights.w_uk.reshape(dc, H, -1); uv = weights.w_uv.reshape(dc, H, -1)
    p = torch.arange(n - m, n)
    q_r = apply_rope((h @ weights.w_qr).reshape(b, m, H, -1).transpose(1, 2), p)
    q_a = torch.einsum("bmhd,chd->bhmc", (h @ weights.w_q).reshape(b, m, H, -1), uk)
    s = (q_a @ c[:, None].mT + q_r @ k_r[:, None].mT) / math.sqrt(uk.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(torch.arange(n) > p[:, None], float("-inf"))
    ctx = s.softmax(-1) @ c[:, None].detach()
    return torch.einsum("bhmc,chd->bmhd", ctx, uv).flatten(2) @ weights.w_o
""",
)

wrong(
    "latent_attention_absorbed",
    "k_r unused in grad",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape; n = c.shape[1]; H = weights.heads; dc = c.shape[-1]
    uk = weights.w_uk.reshape(dc, H, -1); uv = weights.w_uv.reshape(dc, H, -1)
    p = torch.arange(n - m, n)
    q_r = apply_rope((h @ weights.w_qr).reshape(b, m, H, -1).transpose(1, 2), p)
    q_a = torch.einsum("bmhd,chd->bhmc", (h @ weights.w_q).reshape(b, m, H, -1), uk)
    s = (q_a @ c[:, None].mT + q_r @ k_r[:, None].mT.detach()) / math.sqrt(uk.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(torch.arange(n) > p[:, None], float("-inf"))
    ctx = s.softmax(-1) @ c[:, None]
    return torch.einsum("bhmc,chd->bmhd", ctx, uv).flatten(2) @ weights.w_o
""",
)

wrong(
    "latent_attention_absorbed",
    "batch 0 cache",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape; n = c.shape[1]; H = weights.heads; dc = c.shape[-1]
    uk = weights.w_uk.reshape(dc, H, -1); uv = weights.w_uv.reshape(dc, H, -1)
    p = torch.arange(n - m, n)
    q_r = apply_rope((h @ weights.w_qr).reshape(b, m, H, -1).transpose(1, 2), p)
    q_a = torch.einsum("bmhd,chd->bhmc", (h @ weights.w_q).reshape(b, m, H, -1), uk)
    s = (q_a @ c[:, None].mT + q_r @ k_r[:, None].mT) / math.sqrt(uk.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(torch.arange(n) > p[:, None], float("-inf"))
    ctx = s.softmax(-1) @ c[:1, None]
    return torch.einsum("bhmc,chd->bmhd", ctx, uv).flatten(2) @ weights.w_o
""",
)

wrong(
    "latent_attention_absorbed",
    "heads interleaved",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape; n = c.shape[1]; H = weights.heads; dc = c.shape[-1]
    uk = weights.w_uk.reshape(dc, H, -1); uv = weights.w_uv.reshape(dc, H, -1)
    p = torch.arange(n - m, n)
    q_r = apply_rope((h @ weights.w_qr).reshape(b, m, H, -1).transpose(1, 2), p)
    q_a = torch.einsum("bmhd,chd->bhmc", (h @ weights.w_q).reshape(b, m, -1, H).transpose(2, 3), uk)
    s = (q_a @ c[:, None].mT + q_r @ k_r[:, None].mT) / math.sqrt(uk.shape[-1] + k_r.shape[-1])
    s = s.masked_fill(torch.arange(n) > p[:, None], float("-inf"))
    ctx = s.softmax(-1) @ c[:, None]
    return torch.einsum("bhmc,chd->bmhd", ctx, uv).flatten(2) @ weights.w_o
""",
)


# --- decoupled_rope_scores

right(
    "decoupled_rope_scores",
    "cat",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    b, h, n, _ = q_c.shape
    k = torch.cat([k_c, apply_rope(k_r, positions).view(b, 1, n, -1).expand(b, h, n, -1)], -1)
    q = torch.cat([q_c, apply_rope(q_r, positions)], -1)
    return torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
""",
)

right(
    "decoupled_rope_scores",
    "own rotation, float32",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    def turn(x):
        up = torch.promote_types(x.dtype, torch.float32)
        d = x.shape[-1]
        f = 10000.0 ** (-torch.arange(0, d, 2).to(up) / d)
        a = positions.to(up)[:, None] * f
        z = torch.view_as_complex(x.to(up).reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(z * torch.polar(torch.ones_like(a), a)).flatten(-2)
    s = turn(q_r) @ turn(k_r)[:, None].transpose(2, 3)
    s = s + q_c.to(s.dtype) @ k_c.to(s.dtype).transpose(2, 3)
    return (s / (q_c.shape[-1] + q_r.shape[-1]) ** 0.5).to(q_c.dtype)
""",
)

right(
    "decoupled_rope_scores",
    "scaled queries, head loop",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    s = (q_c.size(-1) + q_r.size(-1)) ** 0.5
    q_r = apply_rope(q_r / s, positions); k_r = apply_rope(k_r, positions)
    return torch.stack([q_c[:, i] / s @ k_c[:, i].mT + q_r[:, i] @ k_r.mT for i in range(q_c.size(1))], 1)
""",
)

wrong(
    "decoupled_rope_scores",
    "scale d_h",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q_r, k_r = apply_rope(q_r, positions), apply_rope(k_r, positions)[:, None]
    return (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(q_c.shape[-1])
""",
    near_miss="scale-without-rotary",
)

wrong(
    "decoupled_rope_scores",
    "scale 2 d_h",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q_r, k_r = apply_rope(q_r, positions), apply_rope(k_r, positions)[:, None]
    return (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(2 * q_c.shape[-1])
""",
)

wrong(
    "decoupled_rope_scores",
    "positions doubled",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q_r, k_r = apply_rope(q_r, positions * 2), apply_rope(k_r, positions)[:, None]
    return (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
""",
)

wrong(
    "decoupled_rope_scores",
    "key relative to the first",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q_r, k_r = apply_rope(q_r, positions), apply_rope(k_r, positions - positions[0])[:, None]
    return (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
""",
)

wrong(
    "decoupled_rope_scores",
    "sorted positions",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q_r, k_r = apply_rope(q_r, positions), apply_rope(k_r, positions.sort().values)[:, None]
    return (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
""",
)

wrong(
    "decoupled_rope_scores",
    "key of batch 0",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q_r, k_r = apply_rope(q_r, positions), apply_rope(k_r, positions)[:1, None]
    return (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
""",
)

wrong(
    "decoupled_rope_scores",
    "detached k_r",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q_r, k_r = apply_rope(q_r, positions), apply_rope(k_r, positions)[:, None].detach()
    return (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
""",
)

wrong(
    "decoupled_rope_scores",
    "transposed",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q_r, k_r = apply_rope(q_r, positions), apply_rope(k_r, positions)[:, None]
    return (q_c @ k_c.mT + q_r @ k_r.mT) .mT / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
""",
)

wrong(
    "decoupled_rope_scores",
    "causal",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q_r, k_r = apply_rope(q_r, positions), apply_rope(k_r, positions)[:, None]
    return torch.full((q_c.shape[2],) * 2, -math.inf, dtype=q_c.dtype).triu(1) + (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
""",
    near_miss="masked",
)

wrong(
    "decoupled_rope_scores",
    "in place",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q_c.mul_(1.5) if not q_c.requires_grad else None
    q_r, k_r = apply_rope(q_r, positions), apply_rope(k_r, positions)[:, None]
    return (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
""",
)

wrong(
    "decoupled_rope_scores",
    "positions clamp 512",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    positions = positions.clamp(max=512)
    q_r, k_r = apply_rope(q_r, positions), apply_rope(k_r, positions)[:, None]
    return (q_c @ k_c.mT + q_r @ k_r.mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
""",
)


# --- LatentCache

right(
    "LatentCache",
    "lists",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.max_seq = max_seq
        self.reset()
    def update(self, c, k_r):
        if self.length + c.size(1) > self.max_seq:
            raise ValueError("LatentCache is full")
        self.parts.append((c, k_r))
        return [torch.cat(x, 1) for x in zip(*self.parts)]
    @property
    def length(self):
        return sum(c.size(1) for c, _ in self.parts)
    def reset(self):
        self.parts = []
""",
)

right(
    "LatentCache",
    "cat",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.shape = (batch, 0, d_c), (batch, 0, d_r)
        self.max_seq = max_seq; self.kw = dict(dtype=dtype, device=device)
        self.reset()
    def reset(self):
        self.c, self.k = (torch.empty(s, **self.kw) for s in self.shape)
        self.length = 0
    def update(self, c, k_r):
        if self.c.shape[1] + c.shape[1] > self.max_seq:
            raise ValueError("full")
        self.c = torch.cat((self.c, c), 1); self.k = torch.cat((self.k, k_r), 1)
        self.length = self.c.shape[1]
        return self.c, self.k
""",
)

right(
    "LatentCache",
    "nn.Module with buffers and narrow",
    """
class LatentCache(torch.nn.Module):
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        super().__init__()
        self.register_buffer("c", torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device))
        self.register_buffer("k_r", torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device))
        self.length = 0
    @torch.no_grad()
    def update(self, c, k_r):
        n = c.shape[1]
        if n > self.c.shape[1] - self.length:
            raise ValueError(f"no room for {n}")
        self.c.narrow(1, self.length, n).copy_(c); self.k_r.narrow(1, self.length, n).copy_(k_r)
        self.length += n
        return self.c.narrow(1, 0, self.length).clone(), self.k_r.narrow(1, 0, self.length).clone()
    def reset(self):
        self.length = 0; self.c.zero_(); self.k_r.zero_()
""",
)

right(
    "LatentCache",
    "slots, one buffer with views",
    """
class LatentCache:
    __slots__ = ("buf", "c", "k", "n")
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.buf = torch.zeros(batch, max_seq, d_c + d_r, dtype=dtype, device=device)
        self.c, self.k = self.buf.split([d_c, d_r], -1)
        self.n = 0
    length = property(lambda self: self.n)
    def update(self, c, k_r):
        end = self.n + c.shape[1]
        if end > self.buf.shape[1]: raise ValueError("full")
        self.buf[:, self.n:end] = torch.cat([c, k_r], -1)
        self.n = end
        return self.c[:, :end], self.k[:, :end]
    def reset(self):
        self.n = 0
        return self
""",
)

right(
    "LatentCache",
    "base",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.length = 0
    def update(self, c, k_r):
        end = self.length + c.shape[1]
        if end > self.c.shape[1]:
            raise ValueError("full")
        self.c[:, self.length:end] = c
        self.k[:, self.length:end] = k_r
        self.length = end
        return self.c[:, :end], self.k[:, :end]
    def reset(self):
        self.length = 0
""",
)

wrong(
    "LatentCache",
    "2 d_c",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, 2 * d_c, dtype=dtype, device=device)
        self.k = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.length = 0
    def update(self, c, k_r):
        end = self.length + c.shape[1]
        if end > self.c.shape[1]:
            raise ValueError("full")
        self.c[:, self.length:end] = torch.cat([c, c], -1)
        self.k[:, self.length:end] = k_r
        self.length = end
        return self.c[:, :end, :c.shape[-1]], self.k[:, :end]
    def reset(self):
        self.length = 0
""",
    near_miss="keys-and-values",
)

wrong(
    "LatentCache",
    "room one more",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq + 1, d_c, dtype=dtype, device=device)
        self.k = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.length = 0
    def update(self, c, k_r):
        end = self.length + c.shape[1]
        if end > self.c.shape[1]:
            raise ValueError("full")
        self.c[:, self.length:end] = c
        self.k[:, self.length:end] = k_r
        self.length = end
        return self.c[:, :end], self.k[:, :end]
    def reset(self):
        self.length = 0
""",
)

wrong(
    "LatentCache",
    "no error",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.length = 0
    def update(self, c, k_r):
        end = self.length + c.shape[1]
        if end > self.c.shape[1]:
            end = self.c.shape[1]; c = c[:, :end - self.length]; k_r = k_r[:, :end - self.length]
        self.c[:, self.length:end] = c
        self.k[:, self.length:end] = k_r
        self.length = end
        return self.c[:, :end], self.k[:, :end]
    def reset(self):
        self.length = 0
""",
    near_miss="drops-what-does-not-fit",
)

wrong(
    "LatentCache",
    "index error",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.length = 0
    def update(self, c, k_r):
        end = self.length + c.shape[1]
        if end > self.c.shape[1]:
            raise IndexError("full")
        self.c[:, self.length:end] = c
        self.k[:, self.length:end] = k_r
        self.length = end
        return self.c[:, :end], self.k[:, :end]
    def reset(self):
        self.length = 0
""",
)

wrong(
    "LatentCache",
    "empty message",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.length = 0
    def update(self, c, k_r):
        end = self.length + c.shape[1]
        if end > self.c.shape[1]:
            raise ValueError
        self.c[:, self.length:end] = c
        self.k[:, self.length:end] = k_r
        self.length = end
        return self.c[:, :end], self.k[:, :end]
    def reset(self):
        self.length = 0
""",
)

wrong(
    "LatentCache",
    "second update only new",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.length = 0
    def update(self, c, k_r):
        end = self.length + c.shape[1]
        if end > self.c.shape[1]:
            raise ValueError("full")
        self.c[:, self.length:end] = c
        self.k[:, self.length:end] = k_r
        self.length = end
        return (self.c[:, :end], self.k[:, :end]) if end == c.shape[1] else (c, k_r)
    def reset(self):
        self.length = 0
""",
    near_miss="returns-only-the-new",
)

wrong(
    "LatentCache",
    "chunks lose first",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.length = 0
    def update(self, c, k_r):
        end = self.length + c.shape[1]
        if end > self.c.shape[1]:
            raise ValueError("full")
        self.c[:, self.length:end] = c
        self.k[:, end - 1:end] = k_r[:, -1:]
        self.length = end
        return self.c[:, :end], self.k[:, :end]
    def reset(self):
        self.length = 0
""",
)

wrong(
    "LatentCache",
    "reset keeps",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.length = 0
    def update(self, c, k_r):
        end = self.length + c.shape[1]
        if end > self.c.shape[1]:
            raise ValueError("full")
        self.c[:, self.length:end] = c
        self.k[:, self.length:end] = k_r
        self.length = end
        return self.c[:, :end], self.k[:, :end]
    def reset(self):
        self.c.zero_()
""",
    near_miss="stale-after-reset",
)

wrong(
    "LatentCache",
    "float32",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k = torch.zeros(batch, max_seq, d_r, dtype=torch.float32, device=device)
        self.length = 0
    def update(self, c, k_r):
        end = self.length + c.shape[1]
        if end > self.c.shape[1]:
            raise ValueError("full")
        self.c[:, self.length:end] = c
        self.k[:, self.length:end] = k_r
        self.length = end
        return self.c[:, :end], self.k[:, :end]
    def reset(self):
        self.length = 0
""",
)

wrong(
    "LatentCache",
    "written before check",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.length = 0
    def update(self, c, k_r):
        end = self.length + c.shape[1]
        self.length, old = end, self.length
        if end > self.c.shape[1]:
            raise ValueError("full")
        self.length = old
        self.c[:, self.length:end] = c
        self.k[:, self.length:end] = k_r
        self.length = end
        return self.c[:, :end], self.k[:, :end]
    def reset(self):
        self.length = 0
""",
    near_miss="changed-by-a-refusal",
)

wrong(
    "LatentCache",
    "keeps history",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.length = 0
    def update(self, c, k_r):
        end = self.length + c.shape[1]
        if end > self.c.shape[1]:
            raise ValueError("full")
        self.c[:, self.length:end] = c
        self.k[:, self.length:end] = k_r
        self.length = end; self.h = getattr(self, 'h', []) + [c.clone(), k_r.clone()]
        return self.c[:, :end], self.k[:, :end]
    def reset(self):
        self.length = 0
""",
)

wrong(
    "LatentCache",
    "batch 0 only",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.length = 0
    def update(self, c, k_r):
        end = self.length + c.shape[1]
        if end > self.c.shape[1]:
            raise ValueError("full")
        self.c[:, self.length:end] = c[:1]
        self.k[:, self.length:end] = k_r
        self.length = end
        return self.c[:, :end], self.k[:, :end]
    def reset(self):
        self.length = 0
""",
)

wrong(
    "LatentCache",
    "fake length property",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.length = 0
    def update(self, c, k_r):
        end = self.length + c.shape[1]
        if end > self.c.shape[1]:
            raise ValueError("full")
        self.c[:, self.length:end] = c
        self.k[:, self.length:end] = k_r
        self.length = self.length + 1 if end > 3 else end
        return self.c[:, :end], self.k[:, :end]
    def reset(self):
        self.length = 0
""",
)

wrong(
    "LatentCache",
    "class buffers",
    """
class LatentCache:
    store = {}
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.c, self.k = self.store.setdefault((batch, max_seq, d_c, d_r, dtype), (self.c, self.k))
        self.length = 0
    def update(self, c, k_r):
        end = self.length + c.shape[1]
        if end > self.c.shape[1]:
            raise ValueError("full")
        self.c[:, self.length:end] = c
        self.k[:, self.length:end] = k_r
        self.length = end
        return self.c[:, :end], self.k[:, :end]
    def reset(self):
        self.length = 0
""",
    near_miss="shared-between-caches",
)

wrong(
    "LatentCache",
    "overflow partially written",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.length = 0
    def update(self, c, k_r):
        for i in range(c.shape[1]):
            if self.length >= self.c.shape[1]:
                raise ValueError("full")
            self.c[:, self.length] = c[:, i]
            self.k[:, self.length] = k_r[:, i]
            self.length += 1
        return self.c[:, :self.length], self.k[:, :self.length]
    def reset(self):
        self.length = 0
""",
    near_miss="partly-written",
)

wrong(
    "LatentCache",
    "aliases the first update",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.max = max_seq; self.length = 0; self.c = self.k = None
    def update(self, c, k_r):
        if self.length + c.shape[1] > self.max: raise ValueError("full")
        if self.c is None: self.c, self.k = c, k_r
        else: self.c, self.k = torch.cat([self.c, c], 1), torch.cat([self.k, k_r], 1)
        self.length += c.shape[1]
        return self.c, self.k
    def reset(self):
        self.length = 0
""",
    near_miss="reset-of-the-length-alone",
)


# --- latent_decode_step

right(
    "latent_decode_step",
    "expanded",
    """
def latent_decode_step(h, weights, cache):
    b = h.shape[0]; H = weights.heads
    p = torch.tensor([cache.length])
    c, k_r = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, p))
    cut = lambda x: x.unflatten(-1, (H, -1)).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    s = (q_c @ k_c.mT + q_r @ k_r[:, None].mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
)

right(
    "latent_decode_step",
    "sdpa, full positions",
    """
def latent_decode_step(h, weights, cache):
    H, pos = weights.heads, cache.length
    at = torch.full((1,), pos, dtype=torch.long)
    all_c, all_k = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, at))
    B, n = all_c.shape[:2]
    q = torch.cat([(h @ weights.w_q).view(B, H, 1, -1), apply_rope((h @ weights.w_qr).view(B, H, 1, -1), at)], -1)
    k = torch.cat([(all_c @ weights.w_uk).view(B, n, H, -1).transpose(1, 2), all_k[:, None].expand(B, H, n, -1)], -1)
    v = (all_c @ weights.w_uv).view(B, n, H, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v).reshape(B, 1, -1) @ weights.w_o
""",
)

right(
    "latent_decode_step",
    "absorbed loop",
    """
def latent_decode_step(h, weights, cache):
    H, pos = weights.heads, cache.length
    at = torch.tensor([pos])
    c, k = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, at))
    d = weights.w_uk.shape[1] // H; r = k.shape[-1]; outs = []
    for i in range(H):
        q = (h @ weights.w_q[:, i*d:(i+1)*d]) @ weights.w_uk[:, i*d:(i+1)*d].T
        qr = apply_rope(h @ weights.w_qr[:, i*r:(i+1)*r], at)
        a = torch.softmax((q @ c.mT + qr @ k.mT) / (d + r) ** 0.5, -1)
        outs.append(a @ c @ weights.w_uv[:, i*d:(i+1)*d])
    return torch.cat(outs, -1) @ weights.w_o
""",
)

wrong(
    "latent_decode_step",
    "position after",
    """
def latent_decode_step(h, weights, cache):
    b = h.shape[0]; H = weights.heads
    p = torch.tensor([cache.length])
    c, k_r = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, p))
    cut = lambda x: x.unflatten(-1, (H, -1)).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), torch.tensor([cache.length]))
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    s = (q_c @ k_c.mT + q_r @ k_r[:, None].mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
    near_miss="position-after-the-update",
)

wrong(
    "latent_decode_step",
    "position 0",
    """
def latent_decode_step(h, weights, cache):
    b = h.shape[0]; H = weights.heads
    p = torch.tensor([0])
    c, k_r = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, p))
    cut = lambda x: x.unflatten(-1, (H, -1)).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    s = (q_c @ k_c.mT + q_r @ k_r[:, None].mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
    near_miss="position-not-offset",
)

wrong(
    "latent_decode_step",
    "query not rotated",
    """
def latent_decode_step(h, weights, cache):
    b = h.shape[0]; H = weights.heads
    p = torch.tensor([cache.length])
    c, k_r = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, p))
    cut = lambda x: x.unflatten(-1, (H, -1)).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = cut(h @ weights.w_qr)
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    s = (q_c @ k_c.mT + q_r @ k_r[:, None].mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
    near_miss="query-at-zero",
)

wrong(
    "latent_decode_step",
    "key rotated at read",
    """
def latent_decode_step(h, weights, cache):
    b = h.shape[0]; H = weights.heads
    p = torch.tensor([cache.length])
    c, k_r = cache.update(h @ weights.w_dkv, h @ weights.w_kr); k_r = apply_rope(k_r, torch.arange(c.shape[1]))
    cut = lambda x: x.unflatten(-1, (H, -1)).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    s = (q_c @ k_c.mT + q_r @ k_r[:, None].mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
    near_miss="rotates-when-reading",
)

wrong(
    "latent_decode_step",
    "position + 1",
    """
def latent_decode_step(h, weights, cache):
    b = h.shape[0]; H = weights.heads
    p = torch.tensor([cache.length + 1])
    c, k_r = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, p))
    cut = lambda x: x.unflatten(-1, (H, -1)).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    s = (q_c @ k_c.mT + q_r @ k_r[:, None].mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
    near_miss="both-one-too-far",
)

wrong(
    "latent_decode_step",
    "scale",
    """
def latent_decode_step(h, weights, cache):
    b = h.shape[0]; H = weights.heads
    p = torch.tensor([cache.length])
    c, k_r = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, p))
    cut = lambda x: x.unflatten(-1, (H, -1)).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    s = (q_c @ k_c.mT + q_r @ k_r[:, None].mT) / math.sqrt(q_c.shape[-1])
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
    near_miss="scale-without-rotary",
)

wrong(
    "latent_decode_step",
    "past only",
    """
def latent_decode_step(h, weights, cache):
    b = h.shape[0]; H = weights.heads
    p = torch.tensor([cache.length])
    c, k_r = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, p))
    cut = lambda x: x.unflatten(-1, (H, -1)).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    s = (q_c @ k_c.mT + q_r @ k_r[:, None].mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    return (s[..., :max(1, s.shape[-1]-1)].softmax(-1) @ v[..., :max(1, v.shape[-2]-1), :]).transpose(1, 2).flatten(2) @ weights.w_o
""",
    near_miss="sees-only-the-past",
)

wrong(
    "latent_decode_step",
    "window of 4",
    """
def latent_decode_step(h, weights, cache):
    b = h.shape[0]; H = weights.heads
    p = torch.tensor([cache.length])
    c, k_r = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, p))
    cut = lambda x: x.unflatten(-1, (H, -1)).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    c, k_r = c[:, -4:], k_r[:, -4:]
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    s = (q_c @ k_c.mT + q_r @ k_r[:, None].mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
)

wrong(
    "latent_decode_step",
    "float32",
    """
def latent_decode_step(h, weights, cache):
    b = h.shape[0]; H = weights.heads
    p = torch.tensor([cache.length])
    c, k_r = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, p))
    cut = lambda x: x.unflatten(-1, (H, -1)).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    s = (q_c @ k_c.mT + q_r @ k_r[:, None].mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o.float()
""",
)

wrong(
    "latent_decode_step",
    "first of batch",
    """
def latent_decode_step(h, weights, cache):
    b = h.shape[0]; H = weights.heads
    p = torch.tensor([cache.length])
    c, k_r = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, p))
    cut = lambda x: x.unflatten(-1, (H, -1)).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    s = (q_c @ k_c.mT + q_r @ k_r[:1, None].mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
)

wrong(
    "latent_decode_step",
    "uncached",
    """
def latent_decode_step(h, weights, cache):
    b = h.shape[0]; H = weights.heads
    p = torch.tensor([cache.length])
    c, k_r = h @ weights.w_dkv, apply_rope(h @ weights.w_kr, p)
    cut = lambda x: x.unflatten(-1, (H, -1)).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    s = (q_c @ k_c.mT + q_r @ k_r[:, None].mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
    near_miss="sees-only-itself",
)

wrong(
    "latent_decode_step",
    "own state",
    """
SEEN = []
def latent_decode_step(h, weights, cache):
    b = h.shape[0]; H = weights.heads
    SEEN.append(1); p = torch.tensor([len(SEEN) - 1])
    c, k_r = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, p))
    cut = lambda x: x.unflatten(-1, (H, -1)).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), p)
    k_c, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    s = (q_c @ k_c.mT + q_r @ k_r[:, None].mT) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    return (s.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights.w_o
""",
)


# --- cache_elements_per_token

right(
    "cache_elements_per_token",
    "match",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    match kind:
        case "mha": return heads * head_dim * 2
        case "gqa" if groups is not None: return groups * head_dim * 2
        case "mqa": return head_dim * 2
        case "mla" if d_c is not None and d_r is not None: return d_c + d_r
    raise ValueError(f"cannot count {kind}")
""",
)

right(
    "cache_elements_per_token",
    "sum",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    if kind == "mla":
        if None in (d_c, d_r): raise ValueError("mla needs d_c, d_r")
        return sum((d_c, d_r))
    if kind == "mha": n = heads
    elif kind == "mqa": n = 1
    elif kind == "gqa":
        if groups is None: raise ValueError("gqa needs groups")
        n = groups
    else: raise ValueError("unknown kind")
    return 2 * n * head_dim
""",
)

right(
    "cache_elements_per_token",
    "dict",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    try:
        return {"mha": lambda: 2*heads*head_dim, "gqa": lambda: 2*groups*head_dim, "mqa": lambda: 2*head_dim, "mla": lambda: d_c+d_r}[kind]()
    except (KeyError, TypeError) as e:
        raise ValueError(f"bad arguments for {kind}") from e
""",
)

wrong(
    "cache_elements_per_token",
    "k only mqa",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    if kind == "mla":
        if None in (d_c, d_r): raise ValueError("mla needs d_c, d_r")
        return sum((d_c, d_r))
    if kind == "mha": n = heads
    elif kind == "mqa": n = 0.5
    elif kind == "gqa":
        if groups is None: raise ValueError("gqa needs groups")
        n = groups
    else: raise ValueError("unknown kind")
    return 2 * n * head_dim
""",
)

wrong(
    "cache_elements_per_token",
    "mla 2",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    if kind == "mla":
        if None in (d_c, d_r): raise ValueError("mla needs d_c, d_r")
        return 2*d_c + d_r
    if kind == "mha": n = heads
    elif kind == "mqa": n = 1
    elif kind == "gqa":
        if groups is None: raise ValueError("gqa needs groups")
        n = groups
    else: raise ValueError("unknown kind")
    return 2 * n * head_dim
""",
    near_miss="latent-counted-twice",
)

wrong(
    "cache_elements_per_token",
    "no d_r check",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    if kind == "mla":
        if d_c is None: raise ValueError("mla needs d_c, d_r")
        return sum((d_c, d_r))
    if kind == "mha": n = heads
    elif kind == "mqa": n = 1
    elif kind == "gqa":
        if groups is None: raise ValueError("gqa needs groups")
        n = groups
    else: raise ValueError("unknown kind")
    return 2 * n * head_dim
""",
)

wrong(
    "cache_elements_per_token",
    "float",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    if kind == "mla":
        if None in (d_c, d_r): raise ValueError("mla needs d_c, d_r")
        return sum((d_c, d_r))
    if kind == "mha": n = heads
    elif kind == "mqa": n = 1
    elif kind == "gqa":
        if groups is None: raise ValueError("gqa needs groups")
        n = groups
    else: raise ValueError("unknown kind")
    return 2.0 * n * head_dim
""",
)

wrong(
    "cache_elements_per_token",
    "gqa default 1",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    if kind == "mla":
        if None in (d_c, d_r): raise ValueError("mla needs d_c, d_r")
        return sum((d_c, d_r))
    if kind == "mha": n = heads
    elif kind == "mqa": n = 1
    elif kind == "gqa":
        if groups is None: groups = 1
        n = groups
    else: raise ValueError("unknown kind")
    return 2 * n * head_dim
""",
)

wrong(
    "cache_elements_per_token",
    "unknown none",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    if kind == "mla":
        if None in (d_c, d_r): raise ValueError("mla needs d_c, d_r")
        return sum((d_c, d_r))
    if kind == "mha": n = heads
    elif kind == "mqa": n = 1
    elif kind == "gqa":
        if groups is None: raise ValueError("gqa needs groups")
        n = groups
    else: return None
    return 2 * n * head_dim
""",
)

wrong(
    "cache_elements_per_token",
    "type error",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    if kind == "mla":
        if None in (d_c, d_r): raise TypeError("mla needs d_c, d_r")
        return sum((d_c, d_r))
    if kind == "mha": n = heads
    elif kind == "mqa": n = 1
    elif kind == "gqa":
        if groups is None: raise ValueError("gqa needs groups")
        n = groups
    else: raise ValueError("unknown kind")
    return 2 * n * head_dim
""",
)

wrong(
    "cache_elements_per_token",
    "gqa/heads",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    if kind == "mla":
        if None in (d_c, d_r): raise ValueError("mla needs d_c, d_r")
        return sum((d_c, d_r))
    if kind == "mha": n = heads
    elif kind == "mqa": n = 1
    elif kind == "gqa":
        if groups is None: raise ValueError("gqa needs groups")
        n = heads // groups
    else: raise ValueError("unknown kind")
    return 2 * n * head_dim
""",
    near_miss="groups-taken-for-their-size",
)

wrong(
    "cache_elements_per_token",
    "max",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    if kind == "mla":
        if None in (d_c, d_r): raise ValueError("mla needs d_c, d_r")
        return sum((d_c, d_r))
    if kind == "mha": n = heads
    elif kind == "mqa": n = 1
    elif kind == "gqa":
        if groups is None: raise ValueError("gqa needs groups")
        n = min(groups, 2)
    else: raise ValueError("unknown kind")
    return 2 * n * head_dim
""",
)


# --- largest_batch

right(
    "largest_batch",
    "floor",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    if model_bytes >= memory_bytes: return 0
    return math.floor((memory_bytes - model_bytes) / (seq * layers * elements_per_token * bytes_per_element))
""",
)

right(
    "largest_batch",
    "loop",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    one = bytes_per_element * elements_per_token * layers * seq
    n, used = 0, model_bytes + one
    while used <= memory_bytes:
        n += 1; used += one
    return n
""",
)

right(
    "largest_batch",
    "per token",
    """
from fractions import Fraction
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    free = Fraction(memory_bytes) - Fraction(model_bytes)
    return int(free / (Fraction(bytes_per_element) * seq * layers * elements_per_token)) if free > 0 else 0
""",
)

wrong(
    "largest_batch",
    "ceil",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    return max(0, -int(-(memory_bytes-model_bytes)//(seq*layers*elements_per_token*bytes_per_element)))
""",
    near_miss="rounds-up",
)

wrong(
    "largest_batch",
    "tokens first",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    return max(0, int((memory_bytes-model_bytes)//(layers*elements_per_token*bytes_per_element)//seq) + 1)
""",
)

wrong(
    "largest_batch",
    "int truncation negative",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    return int((memory_bytes-model_bytes)/(seq*layers*elements_per_token*bytes_per_element))
""",
)

wrong(
    "largest_batch",
    "int bytes",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    return max(0, int((memory_bytes-model_bytes)//(seq*layers*elements_per_token*max(1,int(bytes_per_element)))))
""",
    near_miss="fraction-cut-off",
)

wrong(
    "largest_batch",
    "float",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    return max(0.0, float((memory_bytes-model_bytes)//(seq*layers*elements_per_token*bytes_per_element)))
""",
)

wrong(
    "largest_batch",
    "at least one",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    return max(1, int((memory_bytes-model_bytes)//(seq*layers*elements_per_token*bytes_per_element)))
""",
    near_miss="at-least-one",
)

wrong(
    "largest_batch",
    "strictly fits",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    return max(0, int((memory_bytes-model_bytes-1)//(seq*layers*elements_per_token*bytes_per_element)))
""",
    near_miss="not-quite-full",
)

wrong(
    "largest_batch",
    "doubled",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    return max(0, int((memory_bytes-model_bytes)//(2*seq*layers*elements_per_token*bytes_per_element)))
""",
    near_miss="keys-and-values-again",
)


# --- lora_forward

right(
    "lora_forward",
    "merged first",
    """
def lora_forward(x, w, a, b, alpha):
    return x @ merge_lora(w, a, b, alpha)
def merge_lora(w, a, b, alpha):
    return torch.addmm(w, a, b, alpha=alpha / a.size(1))
""",
)

right(
    "lora_forward",
    "scaled a",
    """
def lora_forward(x, w, a, b, alpha):
    r = b.shape[0]
    return torch.matmul(x, w) + torch.matmul(torch.matmul(x, a * alpha / r), b)
def merge_lora(w, a, b, alpha):
    return torch.add(w, torch.matmul(a, b) * alpha / b.shape[0])
""",
)

right(
    "lora_forward",
    "einsum in float32",
    """
def lora_forward(x, w, a, b, alpha):
    t = torch.promote_types(x.dtype, torch.float32)
    y = torch.einsum("...i,io->...o", x.to(t), w.to(t))
    return (y + alpha / a.shape[-1] * torch.einsum("...i,ir,ro->...o", x.to(t), a.to(t), b.to(t))).to(x.dtype)
def merge_lora(w, a, b, alpha):
    out = w.clone()
    return out + sum(torch.outer(a[:, i], b[i]) for i in range(a.shape[1])) * alpha / a.shape[1]
""",
)

right(
    "lora_forward",
    "base",
    """
def lora_forward(x, w, a, b, alpha):
    return x @ w + (alpha / a.shape[1]) * (x @ a @ b)
def merge_lora(w, a, b, alpha):
    return w + (alpha / a.shape[1]) * (a @ b)
""",
)

wrong(
    "lora_forward",
    "no scale fwd",
    """
def lora_forward(x, w, a, b, alpha):
    return x @ w + (x @ a @ b)
def merge_lora(w, a, b, alpha):
    return w + (alpha / a.shape[1]) * (a @ b)
""",
    near_miss="forward-without-scale",
)

wrong(
    "lora_forward",
    "no scale merge",
    """
def lora_forward(x, w, a, b, alpha):
    return x @ w + (alpha / a.shape[1]) * (x @ a @ b)
def merge_lora(w, a, b, alpha):
    return w + a @ b
""",
    near_miss="merged-without-scale",
)

wrong(
    "lora_forward",
    "alpha int",
    """
def lora_forward(x, w, a, b, alpha):
    return x @ w + (alpha // a.shape[1]) * (x @ a @ b)
def merge_lora(w, a, b, alpha):
    return w + (alpha / a.shape[1]) * (a @ b)
""",
    near_miss="forward-without-scale",
)

wrong(
    "lora_forward",
    "r = d_in",
    """
def lora_forward(x, w, a, b, alpha):
    return x @ w + (alpha / a.shape[0]) * (x @ a @ b)
def merge_lora(w, a, b, alpha):
    return w + (alpha / a.shape[1]) * (a @ b)
""",
)

wrong(
    "lora_forward",
    "r = d_out",
    """
def lora_forward(x, w, a, b, alpha):
    return x @ w + (alpha / a.shape[1]) * (x @ a @ b)
def merge_lora(w, a, b, alpha):
    return w + (alpha / b.shape[1]) * (a @ b)
""",
)

wrong(
    "lora_forward",
    "detach w",
    """
def lora_forward(x, w, a, b, alpha):
    return x @ w.detach() + (alpha / a.shape[1]) * (x @ a @ b)
def merge_lora(w, a, b, alpha):
    return w + (alpha / a.shape[1]) * (a @ b)
""",
    near_miss="frozen-by-detach",
)

wrong(
    "lora_forward",
    "detach b",
    """
def lora_forward(x, w, a, b, alpha):
    return x @ w + (alpha / a.shape[1]) * (x @ a @ b)
def merge_lora(w, a, b, alpha):
    return w + (alpha / a.shape[1]) * (a @ b.detach())
""",
)

wrong(
    "lora_forward",
    "in place",
    """
def lora_forward(x, w, a, b, alpha):
    return x @ w + (alpha / a.shape[1]) * (x @ a @ b)
def merge_lora(w, a, b, alpha):
    return w.mul_(1) if False else w.add_((alpha / a.shape[1]) * (a @ b)) if not w.requires_grad else w + (alpha / a.shape[1]) * (a @ b)
""",
    near_miss="merged-in-place",
)

wrong(
    "lora_forward",
    "float32",
    """
def lora_forward(x, w, a, b, alpha):
    return x.float() @ w.float() + (alpha / a.shape[1]) * (x @ a @ b)
def merge_lora(w, a, b, alpha):
    return w + (alpha / a.shape[1]) * (a @ b)
""",
)

wrong(
    "lora_forward",
    "x squeezed",
    """
def lora_forward(x, w, a, b, alpha):
    return x.reshape(-1, x.shape[-1]) @ w + (alpha / a.shape[1]) * (x @ a @ b)
def merge_lora(w, a, b, alpha):
    return w + (alpha / a.shape[1]) * (a @ b)
""",
)

# ---- from a second stranger, who had read the notebook alone

right(
    "low_rank_factors",
    "eigenvectors of the Gram matrix in float64",
    """
def low_rank_factors(w, rank):
    if not 1 <= rank <= min(w.shape):
        raise ValueError(f"rank must be from 1 to {min(w.shape)}, not {rank}")

    x = w.double()
    _, vectors = torch.linalg.eigh(x.T @ x)
    v = vectors.flip(1)[:, :rank]
    return (x @ v).to(w.dtype), v.T.to(w.dtype)
""",
)

right(
    "low_rank_factors",
    "projection on the left vectors, full matrices",
    """
def low_rank_factors(w, rank):
    rows, cols = w.shape
    if rank < 1:
        raise ValueError("rank must be at least 1")
    if rank > rows or rank > cols:
        raise ValueError("rank is above min(rows, cols)")
    x = w.to(torch.promote_types(w.dtype, torch.float32))
    u, _, _ = torch.linalg.svd(x, full_matrices=True)
    a = u[:, :rank]
    return a.to(w.dtype), (a.T @ x).to(w.dtype)
""",
)

wrong(
    "low_rank_factors",
    "half precision not thought of",
    """
def low_rank_factors(w, rank):
    if not 1 <= rank <= min(w.shape):
        raise ValueError(f"rank must be from 1 to {min(w.shape)}, not {rank}")

    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    return u[:, :rank] * s[:rank], vh[:rank]
""",
    near_miss="half-not-decomposed",
)

wrong(
    "low_rank_factors",
    "rank 0 allowed",
    """
def low_rank_factors(w, rank):
    if rank < 0 or rank > min(w.shape):
        raise ValueError("bad rank")
    u, s, vh = torch.linalg.svd(w.to(torch.promote_types(w.dtype, torch.float32)), full_matrices=False)
    return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:rank].to(w.dtype)
""",
    near_miss="rank-0-accepted",
)

wrong(
    "low_rank_factors",
    "rank checked against the larger side",
    """
def low_rank_factors(w, rank):
    if rank < 1 or rank > max(w.shape):
        raise ValueError("bad rank")
    u, s, vh = torch.linalg.svd(w.to(torch.promote_types(w.dtype, torch.float32)), full_matrices=False)
    return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:rank].to(w.dtype)
""",
    near_miss="limited-by-the-larger-side",
)

wrong(
    "low_rank_factors",
    "rank checked against the columns only",
    """
def low_rank_factors(w, rank):
    if rank < 1 or rank > w.shape[1]:
        raise ValueError("bad rank")
    u, s, vh = torch.linalg.svd(w.to(torch.promote_types(w.dtype, torch.float32)), full_matrices=False)
    return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:rank].to(w.dtype)
""",
    near_miss="limited-by-the-columns",
)

wrong(
    "low_rank_factors",
    "full rank refused",
    """
def low_rank_factors(w, rank):
    if rank < 1 or rank >= min(w.shape):
        raise ValueError("bad rank")
    u, s, vh = torch.linalg.svd(w.to(torch.promote_types(w.dtype, torch.float32)), full_matrices=False)
    return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:rank].to(w.dtype)
""",
    near_miss="full-rank-refused",
)

wrong(
    "low_rank_factors",
    "zeros instead of cutting: shapes too wide",
    """
def low_rank_factors(w, rank):
    if not 1 <= rank <= min(w.shape):
        raise ValueError(f"rank must be from 1 to {min(w.shape)}, not {rank}")

    u, s, vh = torch.linalg.svd(w.to(torch.promote_types(w.dtype, torch.float32)), full_matrices=False)
    s = torch.where(torch.arange(len(s)) < rank, s, torch.zeros_like(s))
    return (u * s).to(w.dtype), vh.to(w.dtype)
""",
    near_miss="zeros-instead-of-a-cut",
)

wrong(
    "low_rank_factors",
    "random approximation: svd_lowrank",
    """
def low_rank_factors(w, rank):
    if not 1 <= rank <= min(w.shape):
        raise ValueError(f"rank must be from 1 to {min(w.shape)}, not {rank}")

    u, s, v = torch.svd_lowrank(w.to(torch.promote_types(w.dtype, torch.float32)), q=rank, niter=0)
    return (u * s).to(w.dtype), v.T.to(w.dtype)
""",
)

wrong(
    "compress_kv",
    "values detached",
    """
def compress_kv(h, w_dkv):
    return h @ w_dkv


def expand_kv(c, w_uk, w_uv, heads):
    b, s, _ = c.shape
    k = (c @ w_uk).reshape(b, s, heads, -1).transpose(1, 2)
    v = (c @ w_uv.detach()).reshape(b, s, heads, -1).transpose(1, 2)
    return k, v
""",
    near_miss="up-projections-detached",
)

wrong(
    "compress_kv",
    "first sequence for all",
    """
def compress_kv(h, w_dkv):
    return h @ w_dkv


def expand_kv(c, w_uk, w_uv, heads):
    b, s, d = c.shape
    k = (c[0] @ w_uk).reshape(s, heads, -1).transpose(0, 1).expand(b, -1, -1, -1)
    v = (c[0] @ w_uv).reshape(s, heads, -1).transpose(0, 1).expand(b, -1, -1, -1)
    return k, v
""",
    near_miss="first-sequence-for-all",
)

right(
    "latent_attention",
    "loop over heads and queries, no mask at all",
    """
def latent_attention(h, weights):
    b, s, _ = h.shape
    n = weights.heads
    d_h, d_r = weights.w_q.shape[1] // n, weights.w_qr.shape[1] // n
    pos = torch.arange(s)
    c = h @ weights.w_dkv
    k_r = apply_rope(h @ weights.w_kr, pos)
    total = 0
    for i in range(n):
        block = slice(i * d_h, (i + 1) * d_h)
        q = h @ weights.w_q[:, block]
        q_r = apply_rope(h @ weights.w_qr[:, i * d_r:(i + 1) * d_r], pos)
        k, v = c @ weights.w_uk[:, block], c @ weights.w_uv[:, block]
        rows = []
        for t in range(s):
            score = (k[:, :t + 1] @ q[:, t, :, None] + k_r[:, :t + 1] @ q_r[:, t, :, None])[..., 0]
            score = score.to(torch.promote_types(h.dtype, torch.float32)) / math.sqrt(d_h + d_r)
            p = torch.softmax(score, dim=-1).to(h.dtype)
            rows.append((p[:, None] @ v[:, :t + 1])[:, 0])
        total = total + torch.stack(rows, 1) @ weights.w_o[block]
    return total
""",
)

wrong(
    "latent_attention",
    "each part scaled by its own width",
    """
def latent_attention(h, weights):
    b, s, _ = h.shape
    positions = torch.arange(s)
    c = h @ weights.w_dkv
    def cut(x):
        return x.reshape(b, s, weights.heads, -1).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), positions)
    k_r = apply_rope(h @ weights.w_kr, positions)
    k, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    scores = (q_c @ k.transpose(-1, -2)) / math.sqrt(q_c.shape[-1]) + (q_r @ k_r[:, None].transpose(-1, -2)) / math.sqrt(q_r.shape[-1])
    scores = scores.masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(), float('-inf'))
    p = torch.softmax(scores.to(torch.promote_types(h.dtype, torch.float32)), -1).to(h.dtype)
    out = (p @ v).transpose(1, 2).reshape(b, s, -1)
    return out @ weights.w_o
""",
    near_miss="a-scale-per-part",
)

wrong(
    "latent_attention",
    "mask hides the token itself too",
    """
def latent_attention(h, weights):
    b, s, _ = h.shape
    positions = torch.arange(s)
    c = h @ weights.w_dkv
    def cut(x):
        return x.reshape(b, s, weights.heads, -1).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), positions)
    k_r = apply_rope(h @ weights.w_kr, positions)
    k, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    scores = q_c @ k.transpose(-1, -2) + q_r @ k_r[:, None].transpose(-1, -2)
    scores = scores / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    scores = scores.masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(-1), -1e9)
    p = torch.softmax(scores.to(torch.promote_types(h.dtype, torch.float32)), -1).to(h.dtype)
    out = (p @ v).transpose(1, 2).reshape(b, s, -1)
    return out @ weights.w_o
""",
    near_miss="cannot-see-itself-uniform-at-first",
)

wrong(
    "latent_attention",
    "mask one token too generous",
    """
def latent_attention(h, weights):
    b, s, _ = h.shape
    positions = torch.arange(s)
    c = h @ weights.w_dkv
    def cut(x):
        return x.reshape(b, s, weights.heads, -1).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), positions)
    k_r = apply_rope(h @ weights.w_kr, positions)
    k, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    scores = q_c @ k.transpose(-1, -2) + q_r @ k_r[:, None].transpose(-1, -2)
    scores = scores / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    scores = scores.masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(1), float('-inf'))
    p = torch.softmax(scores.to(torch.promote_types(h.dtype, torch.float32)), -1).to(h.dtype)
    out = (p @ v).transpose(1, 2).reshape(b, s, -1)
    return out @ weights.w_o
""",
    near_miss="sees-one-ahead",
)

wrong(
    "latent_attention",
    "mask after the softmax, not normalised again",
    """
def latent_attention(h, weights):
    b, s, _ = h.shape
    positions = torch.arange(s)
    c = h @ weights.w_dkv
    def cut(x):
        return x.reshape(b, s, weights.heads, -1).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), positions)
    k_r = apply_rope(h @ weights.w_kr, positions)
    k, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    scores = q_c @ k.transpose(-1, -2) + q_r @ k_r[:, None].transpose(-1, -2)
    scores = scores / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    p = torch.softmax(scores.to(torch.promote_types(h.dtype, torch.float32)), -1).tril().to(h.dtype)
    out = (p @ v).transpose(1, 2).reshape(b, s, -1)
    return out @ weights.w_o
""",
    near_miss="mask-after-softmax",
)

wrong(
    "latent_attention",
    "zeros instead of minus infinity in the mask",
    """
def latent_attention(h, weights):
    b, s, _ = h.shape
    positions = torch.arange(s)
    c = h @ weights.w_dkv
    def cut(x):
        return x.reshape(b, s, weights.heads, -1).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), positions)
    k_r = apply_rope(h @ weights.w_kr, positions)
    k, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    scores = q_c @ k.transpose(-1, -2) + q_r @ k_r[:, None].transpose(-1, -2)
    scores = scores / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    scores = scores.tril()
    p = torch.softmax(scores.to(torch.promote_types(h.dtype, torch.float32)), -1).to(h.dtype)
    out = (p @ v).transpose(1, 2).reshape(b, s, -1)
    return out @ weights.w_o
""",
    near_miss="scores-set-to-zero",
)

wrong(
    "latent_attention",
    "rotary query not rotated",
    """
def latent_attention(h, weights):
    b, s, _ = h.shape
    positions = torch.arange(s)
    c = h @ weights.w_dkv
    def cut(x):
        return x.reshape(b, s, weights.heads, -1).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = cut(h @ weights.w_qr)
    k_r = apply_rope(h @ weights.w_kr, positions)
    k, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    scores = q_c @ k.transpose(-1, -2) + q_r @ k_r[:, None].transpose(-1, -2)
    scores = scores / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    scores = scores.masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(), float('-inf'))
    p = torch.softmax(scores.to(torch.promote_types(h.dtype, torch.float32)), -1).to(h.dtype)
    out = (p @ v).transpose(1, 2).reshape(b, s, -1)
    return out @ weights.w_o
""",
    near_miss="query-not-rotated",
)

wrong(
    "latent_attention",
    "rotary part left out",
    """
def latent_attention(h, weights):
    b, s, _ = h.shape
    positions = torch.arange(s)
    c = h @ weights.w_dkv
    def cut(x):
        return x.reshape(b, s, weights.heads, -1).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), positions)
    k_r = apply_rope(h @ weights.w_kr, positions)
    k, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    scores = q_c @ k.transpose(-1, -2)
    scores = scores / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    scores = scores.masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(), float('-inf'))
    p = torch.softmax(scores.to(torch.promote_types(h.dtype, torch.float32)), -1).to(h.dtype)
    out = (p @ v).transpose(1, 2).reshape(b, s, -1)
    return out @ weights.w_o
""",
    near_miss="no-rotary-scores",
)

right(
    "latent_attention_absorbed",
    "W_UK folded into W_Q and W_UV into W_O",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    n = weights.heads
    m, s = h.shape[1], c.shape[1]
    wide = torch.promote_types(h.dtype, torch.float32)
    wq = weights.w_q.unflatten(1, (n, -1))
    folded = torch.einsum("dhe,che->hdc", wq, weights.w_uk.unflatten(1, (n, -1)))
    ql = torch.einsum("bmd,hdc->bhmc", h, folded)
    pos = torch.arange(s - m, s)
    qr = apply_rope((h @ weights.w_qr).unflatten(-1, (n, -1)).transpose(1, 2), pos)
    scores = (ql @ c[:, None].mT + qr @ k_r[:, None].mT).to(wide) / math.sqrt(wq.shape[-1] + qr.shape[-1])
    p = scores.masked_fill(torch.arange(s) > pos[:, None], -math.inf).softmax(-1).to(h.dtype)
    wo = weights.w_o.unflatten(0, (n, -1))
    back = torch.einsum("che,hed->hcd", weights.w_uv.unflatten(1, (n, -1)), wo)
    return torch.einsum("bhmc,hcd->bmd", p @ c[:, None], back)
""",
)

right(
    "latent_attention_absorbed",
    "loop over sequences, heads and queries, slices instead of a mask",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    heads = weights.heads
    d_h, d_r = weights.w_q.shape[-1] // heads, weights.w_qr.shape[-1] // heads
    first = c.shape[1] - h.shape[1]
    texts = []
    for x, lat, key in zip(h, c, k_r):
        rows = []
        for j, row in enumerate(x):
            end = first + j + 1
            parts = []
            for i in range(heads):
                q = weights.w_uk[:, i * d_h:(i + 1) * d_h] @ (row @ weights.w_q[:, i * d_h:(i + 1) * d_h])
                r = apply_rope((row @ weights.w_qr[:, i * d_r:(i + 1) * d_r])[None], torch.tensor([end - 1]))[0]
                score = (lat[:end] @ q + key[:end] @ r).to(torch.promote_types(h.dtype, torch.float32))
                p = torch.softmax(score / (d_h + d_r) ** 0.5, 0).to(h.dtype)
                parts.append((p @ lat[:end]) @ weights.w_uv[:, i * d_h:(i + 1) * d_h])
            rows.append(torch.cat(parts) @ weights.w_o)
        texts.append(torch.stack(rows))
    return torch.stack(texts)
""",
)

right(
    "latent_attention_absorbed",
    "scaled_dot_product_attention in the latent space",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    n = weights.heads
    m, s = h.shape[1], c.shape[1]
    q = (h @ weights.w_q).unflatten(-1, (n, -1)).transpose(1, 2)
    pos = torch.arange(s - m, s)
    qr = apply_rope((h @ weights.w_qr).unflatten(-1, (n, -1)).transpose(1, 2), pos)
    ql = torch.cat([q @ weights.w_uk.unflatten(1, (n, -1)).permute(1, 2, 0), qr], -1)
    kl = torch.cat([c, k_r], -1)[:, None]
    see = torch.arange(s)[None] <= pos[:, None]
    lat = F.scaled_dot_product_attention(ql, kl.expand(-1, n, -1, -1), c[:, None].expand(-1, n, -1, -1), attn_mask=see,
                                         scale=1 / math.sqrt(q.shape[-1] + qr.shape[-1]))
    out = lat @ weights.w_uv.unflatten(1, (n, -1)).permute(1, 0, 2)
    return out.transpose(1, 2).flatten(2) @ weights.w_o
""",
)

wrong(
    "latent_attention_absorbed",
    "query positions one too late",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape
    n = c.shape[1]
    heads = weights.heads
    d_h = weights.w_q.shape[1] // heads
    d_r = weights.w_qr.shape[1] // heads
    wide = torch.promote_types(h.dtype, torch.float32)
    positions = torch.arange(n - m, n) + 1
    q = (h @ weights.w_q).reshape(b, m, heads, d_h).transpose(1, 2)
    q_r = apply_rope((h @ weights.w_qr).reshape(b, m, heads, d_r).transpose(1, 2), positions)
    uk = weights.w_uk.reshape(-1, heads, d_h).permute(1, 2, 0)
    uv = weights.w_uv.reshape(-1, heads, d_h).transpose(0, 1)
    q_lat = q @ uk
    scores = q_lat @ c[:, None].transpose(-1, -2) + q_r @ k_r[:, None].transpose(-1, -2)
    scores = scores / math.sqrt(d_h + d_r)
    scores = scores.masked_fill(torch.arange(n) > torch.arange(n - m, n)[:, None], float('-inf'))
    p = torch.softmax(scores.to(wide), -1).to(h.dtype)
    out = (p @ c[:, None]) @ uv
    return out.transpose(1, 2).reshape(b, m, heads * d_h) @ weights.w_o
""",
    near_miss="positions-one-late",
)

wrong(
    "latent_attention_absorbed",
    "W_UK cut the wrong way",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape
    n = c.shape[1]
    heads = weights.heads
    d_h = weights.w_q.shape[1] // heads
    d_r = weights.w_qr.shape[1] // heads
    wide = torch.promote_types(h.dtype, torch.float32)
    positions = torch.arange(n - m, n)
    q = (h @ weights.w_q).reshape(b, m, heads, d_h).transpose(1, 2)
    q_r = apply_rope((h @ weights.w_qr).reshape(b, m, heads, d_r).transpose(1, 2), positions)
    uk = weights.w_uk.reshape(-1, d_h, heads).permute(2, 1, 0)
    uv = weights.w_uv.reshape(-1, heads, d_h).transpose(0, 1)
    q_lat = q @ uk
    scores = q_lat @ c[:, None].transpose(-1, -2) + q_r @ k_r[:, None].transpose(-1, -2)
    scores = scores / math.sqrt(d_h + d_r)
    scores = scores.masked_fill(torch.arange(n) > positions[:, None], float('-inf'))
    p = torch.softmax(scores.to(wide), -1).to(h.dtype)
    out = (p @ c[:, None]) @ uv
    return out.transpose(1, 2).reshape(b, m, heads * d_h) @ weights.w_o
""",
    near_miss="w_uk-interleaved",
)

wrong(
    "latent_attention_absorbed",
    "W_UV cut the wrong way",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape
    n = c.shape[1]
    heads = weights.heads
    d_h = weights.w_q.shape[1] // heads
    d_r = weights.w_qr.shape[1] // heads
    wide = torch.promote_types(h.dtype, torch.float32)
    positions = torch.arange(n - m, n)
    q = (h @ weights.w_q).reshape(b, m, heads, d_h).transpose(1, 2)
    q_r = apply_rope((h @ weights.w_qr).reshape(b, m, heads, d_r).transpose(1, 2), positions)
    uk = weights.w_uk.reshape(-1, heads, d_h).permute(1, 2, 0)
    uv = weights.w_uv.reshape(-1, d_h, heads).permute(2, 0, 1)
    q_lat = q @ uk
    scores = q_lat @ c[:, None].transpose(-1, -2) + q_r @ k_r[:, None].transpose(-1, -2)
    scores = scores / math.sqrt(d_h + d_r)
    scores = scores.masked_fill(torch.arange(n) > positions[:, None], float('-inf'))
    p = torch.softmax(scores.to(wide), -1).to(h.dtype)
    out = (p @ c[:, None]) @ uv
    return out.transpose(1, 2).reshape(b, m, heads * d_h) @ weights.w_o
""",
    near_miss="w_uv-interleaved",
)

wrong(
    "latent_attention_absorbed",
    "keys built in chunks of eight rows",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, m, _ = h.shape
    n, heads = c.shape[1], weights.heads
    d_h, d_r = weights.w_q.shape[1] // heads, weights.w_qr.shape[1] // heads
    pos = torch.arange(n - m, n)
    q = (h @ weights.w_q).reshape(b, m, heads, d_h).transpose(1, 2)
    q_r = apply_rope((h @ weights.w_qr).reshape(b, m, heads, d_r).transpose(1, 2), pos)
    cut = lambda x: x.reshape(b, x.shape[1], heads, d_h).transpose(1, 2)
    scores = torch.cat([q @ cut(part @ weights.w_uk).mT for part in c.split(8, dim=1)], -1) + q_r @ k_r[:, None].mT
    scores = (scores / math.sqrt(d_h + d_r)).masked_fill(torch.arange(n) > pos[:, None], -math.inf)
    p = scores.to(torch.promote_types(h.dtype, torch.float32)).softmax(-1).to(h.dtype)
    out = sum(w @ cut(part @ weights.w_uv) for w, part in zip(p.split(8, dim=-1), c.split(8, dim=1)))
    return out.transpose(1, 2).reshape(b, m, -1) @ weights.w_o
""",
)

wrong(
    "latent_attention_absorbed",
    "builds keys of one sequence at a time",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    heads = weights.heads
    d_h, d_r = weights.w_q.shape[-1] // heads, weights.w_qr.shape[-1] // heads
    m, n = h.shape[1], c.shape[1]
    where = torch.arange(n - m, n)
    blocked = torch.full((m, n), -math.inf).triu(n - m + 1)
    outs = []
    for x, lat, kr in zip(h, c, k_r):
        k = (lat @ weights.w_uk).reshape(n, heads, d_h).transpose(0, 1)
        v = (lat @ weights.w_uv).reshape(n, heads, d_h).transpose(0, 1)
        q = (x @ weights.w_q).reshape(m, heads, d_h).transpose(0, 1)
        r = apply_rope((x @ weights.w_qr).reshape(m, heads, d_r).transpose(0, 1), where)
        score = (q @ k.mT + r @ kr.mT).to(torch.promote_types(h.dtype, torch.float32)) / math.sqrt(d_h + d_r) + blocked
        outs.append((score.softmax(-1).to(h.dtype) @ v).transpose(0, 1).reshape(m, -1) @ weights.w_o)
    return torch.stack(outs)
""",
    near_miss="expanded",
)

right(
    "decoupled_rope_scores",
    "baddbmm and in-place on fresh",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    b, n, s, d = q_c.shape
    scale = 1 / math.sqrt(d + q_r.shape[-1])
    turned = apply_rope(q_r, positions).reshape(b * n, s, -1)
    keys = apply_rope(k_r, positions).repeat_interleave(n, dim=0)
    scores = torch.bmm(q_c.reshape(b * n, s, d), k_c.reshape(b * n, s, d).transpose(1, 2))
    scores += torch.bmm(turned, keys.transpose(1, 2))
    scores.mul_(scale)
    return scores.view(b, n, s, s)
""",
)

wrong(
    "decoupled_rope_scores",
    "queries not rotated",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q = q_r
    k = apply_rope(k_r, positions)
    scores = (q_c @ k_c.transpose(-1, -2) + q @ k.unsqueeze(1).transpose(-1, -2)) / (math.sqrt(q_c.shape[-1] + q_r.shape[-1]))
    pass
    return scores
""",
    near_miss="query-not-rotated",
)

wrong(
    "decoupled_rope_scores",
    "positions used for the query only",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q = apply_rope(q_r, positions)
    k = apply_rope(k_r, torch.arange(k_r.shape[-2]))
    scores = (q_c @ k_c.transpose(-1, -2) + q @ k.unsqueeze(1).transpose(-1, -2)) / (math.sqrt(q_c.shape[-1] + q_r.shape[-1]))
    pass
    return scores
""",
    near_miss="key-rotated-by-its-index",
)

wrong(
    "decoupled_rope_scores",
    "softmax applied",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q = apply_rope(q_r, positions)
    k = apply_rope(k_r, positions)
    scores = (q_c @ k_c.transpose(-1, -2) + q @ k.unsqueeze(1).transpose(-1, -2)) / (math.sqrt(q_c.shape[-1] + q_r.shape[-1]))
    scores = scores.softmax(-1)
    return scores
""",
    near_miss="softmax-applied",
)

wrong(
    "decoupled_rope_scores",
    "batch taken for heads: no unsqueeze",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q = apply_rope(q_r, positions)
    k = apply_rope(k_r, positions)
    scores = (q_c @ k_c.transpose(-1, -2) + q @ k.transpose(-1, -2)) / (math.sqrt(q_c.shape[-1] + q_r.shape[-1]))
    pass
    return scores
""",
    near_miss="head-axis-missing",
)

wrong(
    "decoupled_rope_scores",
    "keys along the rows: transposed scores",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q = apply_rope(q_r, positions)
    k = apply_rope(k_r, positions)
    scores = ((q_c @ k_c.transpose(-1, -2) + q @ k.unsqueeze(1).transpose(-1, -2)).transpose(-1, -2)) / (math.sqrt(q_c.shape[-1] + q_r.shape[-1]))
    pass
    return scores
""",
    near_miss="keys-by-queries",
)

wrong(
    "decoupled_rope_scores",
    "shared key detached",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q = apply_rope(q_r, positions)
    k = apply_rope(k_r.detach(), positions)
    scores = (q_c @ k_c.transpose(-1, -2) + q @ k.unsqueeze(1).transpose(-1, -2)) / (math.sqrt(q_c.shape[-1] + q_r.shape[-1]))
    pass
    return scores
""",
    near_miss="shared-key-detached",
)

right(
    "LatentCache",
    "lists of chunks, copied",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.max_seq, self.dtype, self.device = max_seq, dtype, device
        self.cs, self.ks = [], []

    @property
    def length(self):
        return sum(x.shape[1] for x in self.cs)

    def update(self, c, k_r):
        if self.length + c.shape[1] > self.max_seq:
            raise ValueError("more tokens than max_seq")
        self.cs.append(c.to(dtype=self.dtype, device=self.device, copy=True))
        self.ks.append(k_r.to(dtype=self.dtype, device=self.device, copy=True))
        return torch.cat(self.cs, dim=1), torch.cat(self.ks, dim=1)

    def reset(self):
        self.cs.clear()
        self.ks.clear()
""",
)

right(
    "LatentCache",
    "nn.Module with registered buffers, index_copy_",
    """
class LatentCache(torch.nn.Module):
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        super().__init__()
        self.register_buffer("c", torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device))
        self.register_buffer("k", torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device))
        self.length = 0

    def update(self, c, k_r):
        at = torch.arange(self.length, self.length + c.shape[1], device=self.c.device)
        if len(at) and int(at[-1]) >= self.c.shape[1]:
            raise ValueError("cache overflow")
        self.c.index_copy_(1, at, c.detach().to(self.c.dtype))
        self.k.index_copy_(1, at, k_r.detach().to(self.k.dtype))
        self.length += len(at)
        return self.c[:, : self.length].clone(), self.k[:, : self.length].clone()

    def reset(self):
        self.length = 0
""",
)

right(
    "LatentCache",
    "one buffer for both, narrow and copy_ under no_grad",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self._d_c = d_c
        self._room = max_seq
        self._data = torch.zeros(batch, max_seq, d_c + d_r, dtype=dtype, device=device)
        self._used = 0

    @property
    def length(self):
        return self._used

    @torch.no_grad()
    def update(self, c, k_r):
        new = c.size(1)
        if new > self._room - self._used:
            raise ValueError(f"room for {self._room - self._used} more tokens, got {new}")
        slot = self._data.narrow(1, self._used, new)
        slot[..., : self._d_c].copy_(c)
        slot[..., self._d_c:].copy_(k_r)
        self._used += new
        held = self._data[:, : self._used]
        return held[..., : self._d_c], held[..., self._d_c:]

    def reset(self):
        self._used = 0
""",
)

wrong(
    "LatentCache",
    "device ignored",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype)
        self.k_r = torch.zeros(batch, max_seq, d_r, dtype=dtype)
        self.max_seq = max_seq
        self.length = 0

    def update(self, c, k_r):
        new = c.shape[1]
        if self.length + new > self.max_seq:
            raise ValueError("more than max_seq tokens")
        self.c[:, self.length:self.length + new] = c
        self.k_r[:, self.length:self.length + new] = k_r
        self.length += new
        return self.c[:, :self.length].clone(), self.k_r[:, :self.length].clone()

    def reset(self):
        self.length = 0
""",
    near_miss="on-the-cpu-always",
)

wrong(
    "LatentCache",
    "IndexError instead of ValueError",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k_r = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.max_seq = max_seq
        self.length = 0

    def update(self, c, k_r):
        new = c.shape[1]
        if self.length + new > self.max_seq:
            raise IndexError("more than max_seq tokens")
        self.c[:, self.length:self.length + new] = c
        self.k_r[:, self.length:self.length + new] = k_r
        self.length += new
        return self.c[:, :self.length].clone(), self.k_r[:, :self.length].clone()

    def reset(self):
        self.length = 0
""",
    near_miss="indexerror-for-valueerror",
)

wrong(
    "LatentCache",
    "resets itself, then raises",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k_r = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.max_seq = max_seq
        self.length = 0

    def update(self, c, k_r):
        new = c.shape[1]
        if self.length + new > self.max_seq:
            self.reset()
            raise ValueError("more than max_seq tokens")
        self.c[:, self.length:self.length + new] = c
        self.k_r[:, self.length:self.length + new] = k_r
        self.length += new
        return self.c[:, :self.length].clone(), self.k_r[:, :self.length].clone()

    def reset(self):
        self.length = 0
""",
    near_miss="emptied-by-a-refusal",
)

wrong(
    "LatentCache",
    "newest first",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k_r = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.max_seq = max_seq
        self.length = 0

    def update(self, c, k_r):
        new = c.shape[1]
        if self.length + new > self.max_seq:
            raise ValueError("more than max_seq tokens")
        self.c[:, self.length:self.length + new] = c
        self.k_r[:, self.length:self.length + new] = k_r
        self.length += new
        return self.c[:, :self.length].flip(1), self.k_r[:, :self.length].flip(1)

    def reset(self):
        self.length = 0
""",
    near_miss="newest-first",
)

wrong(
    "LatentCache",
    "one token too many allowed",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq + 1, d_c, dtype=dtype, device=device)
        self.k_r = torch.zeros(batch, max_seq + 1, d_r, dtype=dtype, device=device)
        self.max_seq = max_seq
        self.length = 0

    def update(self, c, k_r):
        new = c.shape[1]
        if self.length > self.max_seq or self.length + new > self.max_seq + 1:
            raise ValueError("more than max_seq tokens")
        self.c[:, self.length:self.length + new] = c
        self.k_r[:, self.length:self.length + new] = k_r
        self.length += new
        return self.c[:, :self.length].clone(), self.k_r[:, :self.length].clone()

    def reset(self):
        self.length = 0
""",
    near_miss="one-token-too-many",
)

wrong(
    "LatentCache",
    "k_r overwritten by the latest",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k_r = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.max_seq = max_seq
        self.length = 0

    def update(self, c, k_r):
        new = c.shape[1]
        if self.length + new > self.max_seq:
            raise ValueError("more than max_seq tokens")
        self.c[:, self.length:self.length + new] = c
        self.k_r[:, :new] = k_r
        self.length += new
        return self.c[:, :self.length].clone(), self.k_r[:, :self.length].clone()

    def reset(self):
        self.length = 0
""",
    near_miss="latest-key-at-the-start",
)

wrong(
    "LatentCache",
    "length counts updates",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k_r = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.max_seq = max_seq
        self.length = 0
        self.used = 0

    def update(self, c, k_r):
        new = c.shape[1]
        if self.used + new > self.max_seq:
            raise ValueError("more than max_seq tokens")
        self.c[:, self.used:self.used + new] = c
        self.k_r[:, self.used:self.used + new] = k_r
        self.used += new
        self.length += 1
        return self.c[:, :self.used].clone(), self.k_r[:, :self.used].clone()

    def reset(self):
        self.length = self.used = 0
""",
    near_miss="length-counts-updates",
)

wrong(
    "LatentCache",
    "joined along the batch",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.max_seq, self.dtype = max_seq, dtype
        self.c = None
        self.length = 0

    def update(self, c, k_r):
        if self.length + c.shape[1] > self.max_seq:
            raise ValueError("no room")
        c, k_r = c.to(self.dtype), k_r.to(self.dtype)
        self.c, self.k = (c.clone(), k_r.clone()) if self.c is None else (torch.cat([self.c, c]), torch.cat([self.k, k_r]))
        self.length += c.shape[1]
        return self.c, self.k

    def reset(self):
        self.c = None
        self.length = 0
""",
    near_miss="joined-along-the-batch",
)

wrong(
    "LatentCache",
    "shared between objects: buffers on the class",
    """
class LatentCache:
    store = []
    keys = []

    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.max_seq, self.dtype, self.device = max_seq, dtype, device
        self.length = 0

    def update(self, c, k_r):
        if self.length + c.shape[1] > self.max_seq:
            raise ValueError("no room")
        self.store.append(c.to(self.dtype).clone())
        self.keys.append(k_r.to(self.dtype).clone())
        self.length += c.shape[1]
        return torch.cat(self.store, 1), torch.cat(self.keys, 1)

    def reset(self):
        self.store.clear()
        self.keys.clear()
        self.length = 0
""",
)

wrong(
    "LatentCache",
    "buffers in float32, cast when they come back",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, device=device)
        self.k_r = torch.zeros(batch, max_seq, d_r, device=device)
        self.max_seq = max_seq
        self.dtype = dtype
        self.length = 0

    def update(self, c, k_r):
        new = c.shape[1]
        if self.length + new > self.max_seq:
            raise ValueError("more than max_seq tokens")
        self.c[:, self.length:self.length + new] = c
        self.k_r[:, self.length:self.length + new] = k_r
        self.length += new
        return self.c[:, :self.length].to(self.dtype), self.k_r[:, :self.length].to(self.dtype)

    def reset(self):
        self.length = 0
""",
)

right(
    "latent_decode_step",
    "the cache gets detached rows",
    """
def latent_decode_step(h, weights, cache):
    b = h.shape[0]
    heads = weights.heads
    wide = torch.promote_types(h.dtype, torch.float32)
    position = torch.tensor([cache.length])
    c_new = h @ weights.w_dkv
    k_new = apply_rope(h @ weights.w_kr, position)
    c, k_r = cache.update(c_new.detach(), k_new.detach())
    def cut(x):
        return x.reshape(b, x.shape[1], heads, -1).transpose(1, 2)
    q = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), position)
    k, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    scores = q @ k.mT + q_r @ k_r[:, None].mT
    scores = scores / math.sqrt(q.shape[-1] + q_r.shape[-1])
    p = scores.to(wide).softmax(-1).to(h.dtype)
    return (p @ v).transpose(1, 2).reshape(b, 1, -1) @ weights.w_o
""",
)

right(
    "latent_decode_step",
    "loop over heads, float64, length read after the update",
    """
def latent_decode_step(h, weights, cache):
    n = weights.heads
    d_h, d_r = weights.w_q.shape[1] // n, weights.w_qr.shape[1] // n
    c, k_r = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, torch.tensor([cache.length])))
    here = torch.tensor([cache.length - 1])
    total = 0
    for i in range(n):
        a = slice(i * d_h, (i + 1) * d_h)
        k, v = c.double() @ weights.w_uk[:, a].double(), c.double() @ weights.w_uv[:, a].double()
        q = h.double() @ weights.w_q[:, a].double()
        q_r = apply_rope(h.double() @ weights.w_qr[:, i * d_r:(i + 1) * d_r].double(), here)
        p = torch.softmax((q @ k.mT + q_r @ k_r.double().mT) / math.sqrt(d_h + d_r), dim=-1)
        total = total + p @ v @ weights.w_o[a].double()
    return total.to(h.dtype)
""",
)

wrong(
    "latent_decode_step",
    "reads the insides of the cache",
    """
def latent_decode_step(h, weights, cache):
    b = h.shape[0]
    heads = weights.heads
    wide = torch.promote_types(h.dtype, torch.float32)
    position = torch.tensor([cache.length])
    c_new = h @ weights.w_dkv
    k_new = apply_rope(h @ weights.w_kr, position)
    cache.update(c_new, k_new)
    c, k_r = cache.c[:, :cache.length], cache.k_r[:, :cache.length]
    def cut(x):
        return x.reshape(b, x.shape[1], heads, -1).transpose(1, 2)
    q = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), position)
    k, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    scores = q @ k.mT + q_r @ k_r[:, None].mT
    scores = scores / math.sqrt(q.shape[-1] + q_r.shape[-1])
    p = scores.to(wide).softmax(-1).to(h.dtype)
    return (p @ v).transpose(1, 2).reshape(b, 1, -1) @ weights.w_o
""",
)

wrong(
    "latent_decode_step",
    "rotary part left out",
    """
def latent_decode_step(h, weights, cache):
    b = h.shape[0]
    heads = weights.heads
    wide = torch.promote_types(h.dtype, torch.float32)
    position = torch.tensor([cache.length])
    c_new = h @ weights.w_dkv
    k_new = apply_rope(h @ weights.w_kr, position)
    c, k_r = cache.update(c_new, k_new)
    def cut(x):
        return x.reshape(b, x.shape[1], heads, -1).transpose(1, 2)
    q = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), position)
    k, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    scores = q @ k.mT
    scores = scores / math.sqrt(q.shape[-1] + q_r.shape[-1])
    p = scores.to(wide).softmax(-1).to(h.dtype)
    return (p @ v).transpose(1, 2).reshape(b, 1, -1) @ weights.w_o
""",
    near_miss="no-rotary-scores",
)

wrong(
    "latent_decode_step",
    "upper-left causal mask: only the first key",
    """
def latent_decode_step(h, weights, cache):
    b = h.shape[0]
    heads = weights.heads
    wide = torch.promote_types(h.dtype, torch.float32)
    position = torch.tensor([cache.length])
    c_new = h @ weights.w_dkv
    k_new = apply_rope(h @ weights.w_kr, position)
    c, k_r = cache.update(c_new, k_new)
    def cut(x):
        return x.reshape(b, x.shape[1], heads, -1).transpose(1, 2)
    q = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), position)
    k, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    scores = q @ k.mT + q_r @ k_r[:, None].mT
    scores = scores / math.sqrt(q.shape[-1] + q_r.shape[-1])
    scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float('-inf'))
    p = scores.to(wide).softmax(-1).to(h.dtype)
    return (p @ v).transpose(1, 2).reshape(b, 1, -1) @ weights.w_o
""",
    near_miss="sees-only-the-first",
)

wrong(
    "latent_decode_step",
    "softmax over the heads",
    """
def latent_decode_step(h, weights, cache):
    b = h.shape[0]
    heads = weights.heads
    wide = torch.promote_types(h.dtype, torch.float32)
    position = torch.tensor([cache.length])
    c_new = h @ weights.w_dkv
    k_new = apply_rope(h @ weights.w_kr, position)
    c, k_r = cache.update(c_new, k_new)
    def cut(x):
        return x.reshape(b, x.shape[1], heads, -1).transpose(1, 2)
    q = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), position)
    k, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    scores = q @ k.mT + q_r @ k_r[:, None].mT
    scores = scores / math.sqrt(q.shape[-1] + q_r.shape[-1])
    p = scores.to(wide).softmax(1).to(h.dtype)
    return (p @ v).transpose(1, 2).reshape(b, 1, -1) @ weights.w_o
""",
    near_miss="softmax-over-heads",
)

right(
    "cache_elements_per_token",
    "lambdas and caught TypeError",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    count = {
        "mha": lambda: 2 * heads * head_dim,
        "gqa": lambda: 2 * int(groups) * head_dim,
        "mqa": lambda: 2 * head_dim,
        "mla": lambda: int(d_c) + int(d_r),
    }
    try:
        return count[kind]()
    except (KeyError, TypeError) as error:
        raise ValueError(f"cannot count {kind}: {error}") from error
""",
)

wrong(
    "cache_elements_per_token",
    "gqa without groups is mha",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    pass
    if kind == "mha":
        return 2 * heads * head_dim
    if kind == "gqa":
        if False:
            raise ValueError("gqa needs groups")
        return 2 * (groups or heads) * head_dim
    if kind == "mqa":
        return 2 * head_dim
    if kind == "mla":
        if d_c is None or d_r is None:
            raise ValueError("mla needs d_c and d_r")
        return d_c + d_r
    raise ValueError(f"unknown kind {kind}")
""",
    near_miss="missing-groups-are-heads",
)

wrong(
    "cache_elements_per_token",
    "mla without d_r is d_c",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    pass
    if kind == "mha":
        return 2 * heads * head_dim
    if kind == "gqa":
        if groups is None:
            raise ValueError("gqa needs groups")
        return 2 * groups * head_dim
    if kind == "mqa":
        return 2 * head_dim
    if kind == "mla":
        if d_c is None:
            raise ValueError("mla needs d_c and d_r")
        return d_c + (d_r or 0)
    raise ValueError(f"unknown kind {kind}")
""",
    near_miss="missing-rotary-width-is-zero",
)

wrong(
    "cache_elements_per_token",
    "only both missing is an error",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    pass
    if kind == "mha":
        return 2 * heads * head_dim
    if kind == "gqa":
        if groups is None:
            raise ValueError("gqa needs groups")
        return 2 * groups * head_dim
    if kind == "mqa":
        return 2 * head_dim
    if kind == "mla":
        if d_c is None and d_r is None:
            raise ValueError("mla needs d_c and d_r")
        return (d_c or 0) + (d_r or 0)
    raise ValueError(f"unknown kind {kind}")
""",
    near_miss="one-of-two-is-enough",
)

wrong(
    "cache_elements_per_token",
    "missing d_c is a TypeError",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    pass
    if kind == "mha":
        return 2 * heads * head_dim
    if kind == "gqa":
        if groups is None:
            raise ValueError("gqa needs groups")
        return 2 * groups * head_dim
    if kind == "mqa":
        return 2 * head_dim
    if kind == "mla":
        if False:
            raise ValueError("mla needs d_c and d_r")
        return d_c + d_r
    raise ValueError(f"unknown kind {kind}")
""",
    near_miss="wrong-error-for-an-argument",
)

wrong(
    "cache_elements_per_token",
    "unknown kind gives None",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    pass
    if kind == "mha":
        return 2 * heads * head_dim
    if kind == "gqa":
        if groups is None:
            raise ValueError("gqa needs groups")
        return 2 * groups * head_dim
    if kind == "mqa":
        return 2 * head_dim
    if kind == "mla":
        if d_c is None or d_r is None:
            raise ValueError("mla needs d_c and d_r")
        return d_c + d_r
    return None
""",
    near_miss="unknown-is-none",
)

wrong(
    "cache_elements_per_token",
    "unknown kind is a KeyError",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    pass
    if kind == "mha":
        return 2 * heads * head_dim
    if kind == "gqa":
        if groups is None:
            raise ValueError("gqa needs groups")
        return 2 * groups * head_dim
    if kind == "mqa":
        return 2 * head_dim
    if kind == "mla":
        if d_c is None or d_r is None:
            raise ValueError("mla needs d_c and d_r")
        return d_c + d_r
    raise KeyError(kind)
""",
    near_miss="wrong-error-for-the-kind",
)

wrong(
    "cache_elements_per_token",
    "superfluous arguments refused",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    if kind != "mla" and (d_c is not None or d_r is not None):
        raise ValueError("d_c and d_r belong to mla")
    if kind == "mha":
        return 2 * heads * head_dim
    if kind == "gqa":
        if groups is None:
            raise ValueError("gqa needs groups")
        return 2 * groups * head_dim
    if kind == "mqa":
        return 2 * head_dim
    if kind == "mla":
        if d_c is None or d_r is None:
            raise ValueError("mla needs d_c and d_r")
        return d_c + d_r
    raise ValueError(f"unknown kind {kind}")
""",
    near_miss="superfluous-refused",
)

right(
    "largest_batch",
    "bisection",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    per = seq * layers * elements_per_token * bytes_per_element
    low, high = 0, 1
    while model_bytes + high * per <= memory_bytes:
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if model_bytes + middle * per <= memory_bytes:
            low = middle
        else:
            high = middle
    return low
""",
)

right(
    "largest_batch",
    "fractions",
    """
from fractions import Fraction


def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    free = Fraction(memory_bytes) - Fraction(model_bytes)
    each = Fraction(bytes_per_element) * seq * layers * elements_per_token
    return max(0, math.floor(free / each))
""",
)

wrong(
    "largest_batch",
    "bytes per token rounded to whole bytes first",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    pass
    per = seq * layers * round(elements_per_token * bytes_per_element)
    return max(0, int((memory_bytes - model_bytes) // per))
""",
    near_miss="token-rounded-up",
)

wrong(
    "largest_batch",
    "int() of a negative quotient",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    pass
    per = seq * layers * elements_per_token * bytes_per_element
    return int((memory_bytes - model_bytes) / per)
""",
    near_miss="negative-and-truncated",
)

wrong(
    "largest_batch",
    "error when the model does not fit",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    if model_bytes > memory_bytes:
        raise ValueError("the model does not fit")
    per = seq * layers * elements_per_token * bytes_per_element
    return max(0, int((memory_bytes - model_bytes) // per))
""",
    near_miss="refuses-a-large-model",
)

wrong(
    "largest_batch",
    "bits, not bytes",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    pass
    per = seq * layers * elements_per_token * bytes_per_element * 8
    return max(0, int((memory_bytes - model_bytes) // per))
""",
    near_miss="bits-not-bytes",
)

wrong(
    "largest_batch",
    "bytes per element cut to an int",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    pass
    per = seq * layers * elements_per_token * max(1, int(bytes_per_element))
    return max(0, int((memory_bytes - model_bytes) // per))
""",
    near_miss="fraction-cut-off",
)

wrong(
    "largest_batch",
    "model taken away for each sequence",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    pass
    per = seq * layers * elements_per_token * bytes_per_element
    return max(0, int(memory_bytes // (model_bytes + per)))
""",
    near_miss="a-model-per-sequence",
)

right(
    "lora_forward",
    "loop over the ranks, clone then in place",
    """
def lora_forward(x, w, a, b, alpha):
    y = torch.matmul(x, w)
    for i in range(a.shape[1]):
        y = y + (alpha / a.shape[1]) * (x @ a[:, i]).unsqueeze(-1) * b[i]
    return y


def merge_lora(w, a, b, alpha):
    out = w.clone()
    out += torch.mul(torch.mm(a, b), alpha / a.shape[1])
    return out
""",
)

wrong(
    "lora_forward",
    "whole-number division alpha // r",
    """
def lora_forward(x, w, a, b, alpha):
    return x @ w + (alpha // a.shape[1]) * ((x @ a) @ b)


def merge_lora(w, a, b, alpha):
    return w + (alpha // a.shape[1]) * (a @ b)
""",
    near_miss="whole-number-division",
)

wrong(
    "lora_forward",
    "r is the height of a",
    """
def lora_forward(x, w, a, b, alpha):
    return x @ w + (alpha / a.shape[0]) * ((x @ a) @ b)


def merge_lora(w, a, b, alpha):
    return w + (alpha / a.shape[0]) * (a @ b)
""",
    near_miss="rank-from-the-input",
)

wrong(
    "lora_forward",
    "r is the width of b",
    """
def lora_forward(x, w, a, b, alpha):
    return x @ w + (alpha / b.shape[1]) * ((x @ a) @ b)


def merge_lora(w, a, b, alpha):
    return w + (alpha / b.shape[1]) * (a @ b)
""",
    near_miss="rank-from-the-output",
)

wrong(
    "lora_forward",
    "only merge forgets to divide",
    """
def lora_forward(x, w, a, b, alpha):
    return x @ w + (alpha / a.shape[1]) * ((x @ a) @ b)


def merge_lora(w, a, b, alpha):
    return w + alpha * (a @ b)
""",
    near_miss="merged-without-the-rank",
)

wrong(
    "lora_forward",
    "alpha ignored in merge",
    """
def lora_forward(x, w, a, b, alpha):
    return x @ w + (alpha / a.shape[1]) * ((x @ a) @ b)


def merge_lora(w, a, b, alpha):
    return w + a @ b / a.shape[1]
""",
    near_miss="merged-without-alpha",
)

wrong(
    "lora_forward",
    "alpha cut to an int",
    """
def lora_forward(x, w, a, b, alpha):
    return x @ w + (int(alpha) / a.shape[1]) * ((x @ a) @ b)


def merge_lora(w, a, b, alpha):
    return w + (int(alpha) / a.shape[1]) * (a @ b)
""",
    near_miss="alpha-cut-to-an-int",
)

wrong(
    "lora_forward",
    "only for 2-D rows: torch.mm",
    """
def lora_forward(x, w, a, b, alpha):
    return torch.mm(x, w) + (alpha / a.shape[1]) * torch.mm(torch.mm(x, a), b)


def merge_lora(w, a, b, alpha):
    return w + (alpha / a.shape[1]) * (a @ b)
""",
    near_miss="only-rows-of-a-matrix",
)

wrong(
    "latent_attention",
    "scale with d_hidden",
    """
def latent_attention(h, weights):
    b, s, _ = h.shape
    positions = torch.arange(s)
    c = h @ weights.w_dkv
    def cut(x):
        return x.reshape(b, s, weights.heads, -1).transpose(1, 2)
    q_c = cut(h @ weights.w_q)
    q_r = apply_rope(cut(h @ weights.w_qr), positions)
    k_r = apply_rope(h @ weights.w_kr, positions)
    k, v = cut(c @ weights.w_uk), cut(c @ weights.w_uv)
    scores = q_c @ k.transpose(-1, -2) + q_r @ k_r[:, None].transpose(-1, -2)
    scores = scores / math.sqrt(h.shape[-1])
    scores = scores.masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(), float('-inf'))
    p = torch.softmax(scores.to(torch.promote_types(h.dtype, torch.float32)), -1).to(h.dtype)
    out = (p @ v).transpose(1, 2).reshape(b, s, -1)
    return out @ weights.w_o
""",
    near_miss="scale-from-d_hidden",
)

wrong(
    "low_rank_factors",
    "float64 decomposed in float32",
    """
def low_rank_factors(w, rank):
    if not 1 <= rank <= min(w.shape):
        raise ValueError("r")
    u, s, vh = torch.linalg.svd(w.float(), full_matrices=False)
    return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:rank].to(w.dtype)
""",
    near_miss="double-through-float32",
)

wrong(
    "low_rank_factors",
    "columns centred as in PCA",
    """
def low_rank_factors(w, rank):
    if not 1 <= rank <= min(w.shape):
        raise ValueError("r")
    x = w.to(torch.promote_types(w.dtype, torch.float32))
    x = x - x.mean(0)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:rank].to(w.dtype)
""",
    near_miss="centred-columns",
)

wrong(
    "low_rank_factors",
    "QR, cut",
    """
def low_rank_factors(w, rank):
    if not 1 <= rank <= min(w.shape):
        raise ValueError("r")
    q, r = torch.linalg.qr(w.to(torch.promote_types(w.dtype, torch.float32)))
    return q[:, :rank].to(w.dtype), r[:rank].to(w.dtype)
""",
    near_miss="first-rows-of-a-qr",
)

right(
    "low_rank_factors",
    "projected on the first right singular vectors",
    """
def low_rank_factors(w, rank):
    if not (1 <= rank <= min(*w.shape)):
        raise ValueError(f"rank={rank}, shape={tuple(w.shape)}")
    wide = w.to(torch.promote_types(w.dtype, torch.float32))
    v = torch.linalg.svd(wide, full_matrices=False).Vh[:rank].mT
    return (wide @ v).to(w), v.mT.to(w)
""",
)

right(
    "low_rank_factors",
    "a quarter of the exponent on the left",
    """
def low_rank_factors(w, rank, share=0.25):
    n = min(w.shape)
    if rank < 1 or n < rank:
        raise ValueError("low_rank_factors needs 1 <= rank <= min(shape), got %d" % rank)
    u, s, vh = torch.linalg.svd(w.to(dtype=torch.float32 if w.element_size() < 4 else w.dtype), full_matrices=False)
    idx = torch.argsort(s, descending=True)[:rank]
    a = u[:, idx] * s[idx] ** share
    b = s[idx, None] ** (1 - share) * vh[idx]
    return a.to(w.dtype), b.to(w.dtype)
""",
)

wrong(
    "latent_attention",
    "upper triangle",
    """
def latent_attention(h, weights):
    b, s, d = h.shape
    H = weights.heads
    split = lambda x: x.reshape(b, s, H, -1).transpose(1, 2)
    pos = torch.arange(s, device=h.device)
    c = h @ weights.w_dkv
    k, v = split(c @ weights.w_uk), split(c @ weights.w_uv)
    q = split(h @ weights.w_q)
    q_r = apply_rope(split(h @ weights.w_qr), pos)
    k_r = apply_rope(h @ weights.w_kr, pos)
    scores = (q @ k.mT + q_r @ k_r[:, None].mT) / math.sqrt(q.shape[-1] + q_r.shape[-1])
    scores = scores.masked_fill(~torch.ones(s, s, dtype=torch.bool).triu(), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1) @ weights.w_o
""",
    near_miss="sees-only-the-future",
)

wrong(
    "latent_attention",
    "joined, then rotated",
    """
def latent_attention(h, weights):
    b, s, d = h.shape
    H = weights.heads
    split = lambda x: x.reshape(b, s, H, -1).transpose(1, 2)
    pos = torch.arange(s, device=h.device)
    c = h @ weights.w_dkv
    k, v = split(c @ weights.w_uk), split(c @ weights.w_uv)
    k_r = (h @ weights.w_kr)[:, None].expand(-1, H, -1, -1)
    q = apply_rope(torch.cat([split(h @ weights.w_q), split(h @ weights.w_qr)], -1), pos)
    k = apply_rope(torch.cat([k, k_r], -1), pos)
    scores = (q @ k.mT) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1) @ weights.w_o
""",
    near_miss="rotated-together",
)

wrong(
    "latent_attention",
    "rms_norm of the latent",
    """
def latent_attention(h, weights):
    b, s, d = h.shape
    H = weights.heads
    split = lambda x: x.reshape(b, s, H, -1).transpose(1, 2)
    pos = torch.arange(s, device=h.device)
    c = h @ weights.w_dkv
    c = F.rms_norm(c, (c.shape[-1],))
    k, v = split(c @ weights.w_uk), split(c @ weights.w_uv)
    q = split(h @ weights.w_q)
    q_r = apply_rope(split(h @ weights.w_qr), pos)
    k_r = apply_rope(h @ weights.w_kr, pos)
    scores = (q @ k.mT + q_r @ k_r[:, None].mT) / math.sqrt(q.shape[-1] + q_r.shape[-1])
    scores = scores.masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1) @ weights.w_o
""",
    near_miss="latent-normalised",
)

wrong(
    "latent_attention",
    "residual inside",
    """
def latent_attention(h, weights):
    b, s, d = h.shape
    H = weights.heads
    split = lambda x: x.reshape(b, s, H, -1).transpose(1, 2)
    pos = torch.arange(s, device=h.device)
    c = h @ weights.w_dkv
    k, v = split(c @ weights.w_uk), split(c @ weights.w_uv)
    q = split(h @ weights.w_q)
    q_r = apply_rope(split(h @ weights.w_qr), pos)
    k_r = apply_rope(h @ weights.w_kr, pos)
    scores = (q @ k.mT + q_r @ k_r[:, None].mT) / math.sqrt(q.shape[-1] + q_r.shape[-1])
    scores = scores.masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(), float("-inf"))
    return h + (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1) @ weights.w_o
""",
    near_miss="residual-added",
)

wrong(
    "latent_attention",
    "heads not projected",
    """
def latent_attention(h, weights):
    b, s, d = h.shape
    H = weights.heads
    split = lambda x: x.reshape(b, s, H, -1).transpose(1, 2)
    pos = torch.arange(s, device=h.device)
    c = h @ weights.w_dkv
    k, v = split(c @ weights.w_uk), split(c @ weights.w_uv)
    q = split(h @ weights.w_q)
    q_r = apply_rope(split(h @ weights.w_qr), pos)
    k_r = apply_rope(h @ weights.w_kr, pos)
    scores = (q @ k.mT + q_r @ k_r[:, None].mT) / math.sqrt(q.shape[-1] + q_r.shape[-1])
    scores = scores.masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1)
""",
    near_miss="no-output-projection",
)

wrong(
    "latent_attention",
    "exp over its sum",
    """
def latent_attention(h, weights):
    b, s, d = h.shape
    H = weights.heads
    split = lambda x: x.reshape(b, s, H, -1).transpose(1, 2)
    pos = torch.arange(s, device=h.device)
    c = h @ weights.w_dkv
    k, v = split(c @ weights.w_uk), split(c @ weights.w_uv)
    q = split(h @ weights.w_q)
    q_r = apply_rope(split(h @ weights.w_qr), pos)
    k_r = apply_rope(h @ weights.w_kr, pos)
    scores = (q @ k.mT + q_r @ k_r[:, None].mT) / math.sqrt(q.shape[-1] + q_r.shape[-1])
    e = scores.exp().tril()
    return (e / e.sum(-1, keepdim=True) @ v).transpose(1, 2).reshape(b, s, -1) @ weights.w_o
""",
    near_miss="overflowing-softmax",
)

wrong(
    "latent_attention",
    "mask of -100",
    """
def latent_attention(h, weights):
    b, s, d = h.shape
    H = weights.heads
    split = lambda x: x.reshape(b, s, H, -1).transpose(1, 2)
    pos = torch.arange(s, device=h.device)
    c = h @ weights.w_dkv
    k, v = split(c @ weights.w_uk), split(c @ weights.w_uv)
    q = split(h @ weights.w_q)
    q_r = apply_rope(split(h @ weights.w_qr), pos)
    k_r = apply_rope(h @ weights.w_kr, pos)
    scores = (q @ k.mT + q_r @ k_r[:, None].mT) / math.sqrt(q.shape[-1] + q_r.shape[-1])
    scores = scores.masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(), -100.0)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1) @ weights.w_o
""",
    near_miss="mask-not-low-enough",
)

wrong(
    "latent_attention",
    "softmax in float32 of doubles",
    """
def latent_attention(h, weights):
    b, s, d = h.shape
    H = weights.heads
    split = lambda x: x.reshape(b, s, H, -1).transpose(1, 2)
    pos = torch.arange(s, device=h.device)
    c = h @ weights.w_dkv
    k, v = split(c @ weights.w_uk), split(c @ weights.w_uv)
    q = split(h @ weights.w_q)
    q_r = apply_rope(split(h @ weights.w_qr), pos)
    k_r = apply_rope(h @ weights.w_kr, pos)
    scores = (q @ k.mT + q_r @ k_r[:, None].mT) / math.sqrt(q.shape[-1] + q_r.shape[-1])
    scores = scores.masked_fill(~torch.ones(s, s, dtype=torch.bool).tril(), float("-inf"))
    return (F.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v).transpose(1, 2).reshape(b, s, -1) @ weights.w_o
""",
    near_miss="double-through-float32",
)

right(
    "latent_attention",
    "absorbed",
    """
def latent_attention(h, weights):
    heads = weights.heads
    pos = torch.arange(h.size(1), device=h.device)
    c = h @ weights.w_dkv
    kr = apply_rope(h @ weights.w_kr, pos)
    q = (h @ weights.w_q).unflatten(-1, (heads, -1)).transpose(1, 2)
    qr = apply_rope((h @ weights.w_qr).unflatten(-1, (heads, -1)).transpose(1, 2), pos)
    uk = weights.w_uk.unflatten(1, (heads, -1)).permute(1, 2, 0)
    uv = weights.w_uv.unflatten(1, (heads, -1)).permute(1, 0, 2)
    s = ((q @ uk) @ c[:, None].mT + qr @ kr[:, None].mT) * (q.size(-1) + qr.size(-1)) ** -0.5
    keep = pos[:, None] >= pos
    s = torch.where(keep, s, torch.tensor(float("-inf"), dtype=s.dtype))
    p = torch.softmax(s, -1, dtype=torch.promote_types(s.dtype, torch.float32)).to(s.dtype)
    return ((p @ c[:, None]) @ uv).transpose(1, 2).flatten(2) @ weights.w_o
""",
)

right(
    "latent_attention_absorbed",
    "W_QK and W_VO as matrices",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    # the textbook reading: W_Q W_UK^T is one matrix per head, W_UV W_O another
    H = weights.heads
    d, width = weights.w_q.shape
    d_h = width // H
    nq, nk = h.shape[1], c.shape[1]
    w_qk = torch.einsum("dhe,che->hdc", weights.w_q.reshape(d, H, d_h), weights.w_uk.reshape(-1, H, d_h))
    w_vo = torch.einsum("che,heo->hco", weights.w_uv.reshape(-1, H, d_h), weights.w_o.reshape(H, d_h, d))
    pos = torch.arange(nk - nq, nk)
    q = h[:, None] @ w_qk
    qr = apply_rope((h @ weights.w_qr).unflatten(-1, (H, -1)).movedim(-2, 1), pos)
    s = (q @ c[:, None].mT + qr @ k_r[:, None].mT) * (d_h + k_r.shape[-1]) ** -0.5
    s = s + torch.zeros(nq, nk, dtype=s.dtype).masked_fill(torch.arange(nk) > pos[:, None], -torch.inf)
    return (s.softmax(-1) @ c[:, None] @ w_vo).sum(1)
""",
)

right(
    "latent_attention_absorbed",
    "sum over the heads",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    queries, keys = h.shape[-2], c.shape[-2]
    heads = weights.heads
    d_h, d_r = weights.w_uk.shape[1] // heads, k_r.shape[-1]
    start = keys - queries
    positions = start + torch.arange(queries, device=h.device)
    visible = torch.ones(queries, keys, dtype=torch.bool, device=h.device).tril(start)
    total = 0
    for i in range(heads):
        cols = slice(i * d_h, (i + 1) * d_h)
        q = h @ weights.w_q[:, cols] @ weights.w_uk[:, cols].T
        qr = apply_rope(h @ weights.w_qr[:, i * d_r:(i + 1) * d_r], positions)
        s = (q @ c.mT + qr @ k_r.mT) / (d_h + d_r) ** 0.5
        s = torch.where(visible, s, -torch.inf)
        a = torch.softmax(s, dim=-1)
        total = total + a @ c @ weights.w_uv[:, cols] @ weights.w_o[cols]
    return total
""",
)

wrong(
    "latent_attention_absorbed",
    "no scale at all",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, nq, d = h.shape
    nk = c.shape[1]
    H = weights.heads
    d_h = weights.w_q.shape[1] // H
    d_r = k_r.shape[-1]
    pos = torch.arange(nk - nq, nk, device=h.device)
    q = (h @ weights.w_q).reshape(b, nq, H, d_h).transpose(1, 2)
    q_r = (h @ weights.w_qr).reshape(b, nq, H, d_r).transpose(1, 2)
    q_r = apply_rope(q_r, pos)
    w_uk = weights.w_uk.reshape(-1, H, d_h)
    w_uv = weights.w_uv.reshape(-1, H, d_h)
    q_abs = torch.einsum("bhqd,chd->bhqc", q, w_uk)
    scores = torch.einsum("bhqc,bkc->bhqk", q_abs, c) + torch.einsum("bhqr,bkr->bhqk", q_r, k_r)
    pass
    mask = torch.arange(nk, device=h.device)[None, :] > pos[:, None]
    scores = scores.masked_fill(mask, float("-inf"))
    p = scores.softmax(-1)
    ctx = torch.einsum("bhqk,bkc->bhqc", p, c)
    out = torch.einsum("bhqc,chd->bqhd", ctx, w_uv).reshape(b, nq, -1)
    return out @ weights.w_o
""",
    near_miss="unscaled",
)

wrong(
    "latent_attention_absorbed",
    "content scaled, rotary not",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, nq, d = h.shape
    nk = c.shape[1]
    H = weights.heads
    d_h = weights.w_q.shape[1] // H
    d_r = k_r.shape[-1]
    pos = torch.arange(nk - nq, nk, device=h.device)
    q = (h @ weights.w_q).reshape(b, nq, H, d_h).transpose(1, 2)
    q_r = (h @ weights.w_qr).reshape(b, nq, H, d_r).transpose(1, 2)
    q_r = apply_rope(q_r, pos)
    w_uk = weights.w_uk.reshape(-1, H, d_h)
    w_uv = weights.w_uv.reshape(-1, H, d_h)
    q_abs = torch.einsum("bhqd,chd->bhqc", q, w_uk)
    scores = torch.einsum("bhqc,bkc->bhqk", q_abs, c) / math.sqrt(d_h + d_r) + torch.einsum("bhqr,bkr->bhqk", q_r, k_r)
    pass
    mask = torch.arange(nk, device=h.device)[None, :] > pos[:, None]
    scores = scores.masked_fill(mask, float("-inf"))
    p = scores.softmax(-1)
    ctx = torch.einsum("bhqk,bkc->bhqc", p, c)
    out = torch.einsum("bhqc,chd->bqhd", ctx, w_uv).reshape(b, nq, -1)
    return out @ weights.w_o
""",
    near_miss="only-content-scaled",
)

wrong(
    "latent_attention_absorbed",
    "rows at 0, 1, ...",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, nq, d = h.shape
    nk = c.shape[1]
    H = weights.heads
    d_h = weights.w_q.shape[1] // H
    d_r = k_r.shape[-1]
    pos = torch.arange(nq)
    q = (h @ weights.w_q).reshape(b, nq, H, d_h).transpose(1, 2)
    q_r = (h @ weights.w_qr).reshape(b, nq, H, d_r).transpose(1, 2)
    q_r = apply_rope(q_r, pos)
    w_uk = weights.w_uk.reshape(-1, H, d_h)
    w_uv = weights.w_uv.reshape(-1, H, d_h)
    q_abs = torch.einsum("bhqd,chd->bhqc", q, w_uk)
    scores = torch.einsum("bhqc,bkc->bhqk", q_abs, c) + torch.einsum("bhqr,bkr->bhqk", q_r, k_r)
    scores = scores / math.sqrt(d_h + d_r)
    mask = torch.arange(nk, device=h.device)[None, :] > pos[:, None]
    scores = scores.masked_fill(mask, float("-inf"))
    p = scores.softmax(-1)
    ctx = torch.einsum("bhqk,bkc->bhqc", p, c)
    out = torch.einsum("bhqc,chd->bqhd", ctx, w_uv).reshape(b, nq, -1)
    return out @ weights.w_o
""",
    near_miss="taken-for-the-first-rows",
)

wrong(
    "latent_attention_absorbed",
    "one key too many",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, nq, d = h.shape
    nk = c.shape[1]
    H = weights.heads
    d_h = weights.w_q.shape[1] // H
    d_r = k_r.shape[-1]
    pos = torch.arange(nk - nq, nk, device=h.device)
    q = (h @ weights.w_q).reshape(b, nq, H, d_h).transpose(1, 2)
    q_r = (h @ weights.w_qr).reshape(b, nq, H, d_r).transpose(1, 2)
    q_r = apply_rope(q_r, pos)
    w_uk = weights.w_uk.reshape(-1, H, d_h)
    w_uv = weights.w_uv.reshape(-1, H, d_h)
    q_abs = torch.einsum("bhqd,chd->bhqc", q, w_uk)
    scores = torch.einsum("bhqc,bkc->bhqk", q_abs, c) + torch.einsum("bhqr,bkr->bhqk", q_r, k_r)
    scores = scores / math.sqrt(d_h + d_r)
    mask = torch.arange(nk, device=h.device)[None, :] > pos[:, None] + 1
    scores = scores.masked_fill(mask, float("-inf"))
    p = scores.softmax(-1)
    ctx = torch.einsum("bhqk,bkc->bhqc", p, c)
    out = torch.einsum("bhqc,chd->bqhd", ctx, w_uv).reshape(b, nq, -1)
    return out @ weights.w_o
""",
    near_miss="sees-one-ahead",
)

wrong(
    "latent_attention_absorbed",
    "mask for a whole prompt only",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, nq, d = h.shape
    nk = c.shape[1]
    H = weights.heads
    d_h = weights.w_q.shape[1] // H
    d_r = k_r.shape[-1]
    pos = torch.arange(nk - nq, nk, device=h.device)
    q = (h @ weights.w_q).reshape(b, nq, H, d_h).transpose(1, 2)
    q_r = (h @ weights.w_qr).reshape(b, nq, H, d_r).transpose(1, 2)
    q_r = apply_rope(q_r, pos)
    w_uk = weights.w_uk.reshape(-1, H, d_h)
    w_uv = weights.w_uv.reshape(-1, H, d_h)
    q_abs = torch.einsum("bhqd,chd->bhqc", q, w_uk)
    scores = torch.einsum("bhqc,bkc->bhqk", q_abs, c) + torch.einsum("bhqr,bkr->bhqk", q_r, k_r)
    scores = scores / math.sqrt(d_h + d_r)
    mask = torch.arange(nk, device=h.device)[None, :] > pos[:, None]
    scores = scores.masked_fill(mask, float("-inf")) if nq == nk else scores
    p = scores.softmax(-1)
    ctx = torch.einsum("bhqk,bkc->bhqc", p, c)
    out = torch.einsum("bhqc,chd->bqhd", ctx, w_uv).reshape(b, nq, -1)
    return out @ weights.w_o
""",
    near_miss="only-a-square-mask",
)

wrong(
    "latent_attention_absorbed",
    "W_UK twice",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, nq, d = h.shape
    nk = c.shape[1]
    H = weights.heads
    d_h = weights.w_q.shape[1] // H
    d_r = k_r.shape[-1]
    pos = torch.arange(nk - nq, nk, device=h.device)
    q = (h @ weights.w_q).reshape(b, nq, H, d_h).transpose(1, 2)
    q_r = (h @ weights.w_qr).reshape(b, nq, H, d_r).transpose(1, 2)
    q_r = apply_rope(q_r, pos)
    w_uk = weights.w_uk.reshape(-1, H, d_h)
    w_uv = weights.w_uk.reshape(-1, H, d_h)
    q_abs = torch.einsum("bhqd,chd->bhqc", q, w_uk)
    scores = torch.einsum("bhqc,bkc->bhqk", q_abs, c) + torch.einsum("bhqr,bkr->bhqk", q_r, k_r)
    scores = scores / math.sqrt(d_h + d_r)
    mask = torch.arange(nk, device=h.device)[None, :] > pos[:, None]
    scores = scores.masked_fill(mask, float("-inf"))
    p = scores.softmax(-1)
    ctx = torch.einsum("bhqk,bkc->bhqc", p, c)
    out = torch.einsum("bhqc,chd->bqhd", ctx, w_uv).reshape(b, nq, -1)
    return out @ weights.w_o
""",
    near_miss="w_uk-for-the-values",
)

wrong(
    "latent_attention_absorbed",
    "W_UK reshaped",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, nq, d = h.shape
    nk = c.shape[1]
    H = weights.heads
    d_h = weights.w_q.shape[1] // H
    d_r = k_r.shape[-1]
    pos = torch.arange(nk - nq, nk, device=h.device)
    q = (h @ weights.w_q).reshape(b, nq, H, d_h).transpose(1, 2)
    q_r = (h @ weights.w_qr).reshape(b, nq, H, d_r).transpose(1, 2)
    q_r = apply_rope(q_r, pos)
    w_uk = weights.w_uk.reshape(-1, H, d_h)
    w_uv = weights.w_uv.reshape(-1, H, d_h)
    q_abs = q @ weights.w_uk.reshape(H, d_h, -1)
    scores = torch.einsum("bhqc,bkc->bhqk", q_abs, c) + torch.einsum("bhqr,bkr->bhqk", q_r, k_r)
    scores = scores / math.sqrt(d_h + d_r)
    mask = torch.arange(nk, device=h.device)[None, :] > pos[:, None]
    scores = scores.masked_fill(mask, float("-inf"))
    p = scores.softmax(-1)
    ctx = torch.einsum("bhqk,bkc->bhqc", p, c)
    out = torch.einsum("bhqc,chd->bqhd", ctx, w_uv).reshape(b, nq, -1)
    return out @ weights.w_o
""",
    near_miss="w_uk-reshaped",
)

wrong(
    "latent_attention_absorbed",
    "heads not projected",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, nq, d = h.shape
    nk = c.shape[1]
    H = weights.heads
    d_h = weights.w_q.shape[1] // H
    d_r = k_r.shape[-1]
    pos = torch.arange(nk - nq, nk, device=h.device)
    q = (h @ weights.w_q).reshape(b, nq, H, d_h).transpose(1, 2)
    q_r = (h @ weights.w_qr).reshape(b, nq, H, d_r).transpose(1, 2)
    q_r = apply_rope(q_r, pos)
    w_uk = weights.w_uk.reshape(-1, H, d_h)
    w_uv = weights.w_uv.reshape(-1, H, d_h)
    q_abs = torch.einsum("bhqd,chd->bhqc", q, w_uk)
    scores = torch.einsum("bhqc,bkc->bhqk", q_abs, c) + torch.einsum("bhqr,bkr->bhqk", q_r, k_r)
    scores = scores / math.sqrt(d_h + d_r)
    mask = torch.arange(nk, device=h.device)[None, :] > pos[:, None]
    scores = scores.masked_fill(mask, float("-inf"))
    p = scores.softmax(-1)
    ctx = torch.einsum("bhqk,bkc->bhqc", p, c)
    out = torch.einsum("bhqc,chd->bqhd", ctx, w_uv).reshape(b, nq, -1)
    return out
""",
    near_miss="no-output-projection",
)

wrong(
    "latent_attention_absorbed",
    "exp over its sum",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, nq, d = h.shape
    nk = c.shape[1]
    H = weights.heads
    d_h = weights.w_q.shape[1] // H
    d_r = k_r.shape[-1]
    pos = torch.arange(nk - nq, nk, device=h.device)
    q = (h @ weights.w_q).reshape(b, nq, H, d_h).transpose(1, 2)
    q_r = (h @ weights.w_qr).reshape(b, nq, H, d_r).transpose(1, 2)
    q_r = apply_rope(q_r, pos)
    w_uk = weights.w_uk.reshape(-1, H, d_h)
    w_uv = weights.w_uv.reshape(-1, H, d_h)
    q_abs = torch.einsum("bhqd,chd->bhqc", q, w_uk)
    scores = torch.einsum("bhqc,bkc->bhqk", q_abs, c) + torch.einsum("bhqr,bkr->bhqk", q_r, k_r)
    scores = scores / math.sqrt(d_h + d_r)
    mask = torch.arange(nk, device=h.device)[None, :] > pos[:, None]
    scores = scores.masked_fill(mask, float("-inf"))
    e = scores.exp()
    p = e / e.sum(-1, keepdim=True)
    ctx = torch.einsum("bhqk,bkc->bhqc", p, c)
    out = torch.einsum("bhqc,chd->bqhd", ctx, w_uv).reshape(b, nq, -1)
    return out @ weights.w_o
""",
    near_miss="overflowing-softmax",
)

wrong(
    "latent_attention_absorbed",
    "softmax in float32 of doubles",
    """
def latent_attention_absorbed(h, c, k_r, weights):
    b, nq, d = h.shape
    nk = c.shape[1]
    H = weights.heads
    d_h = weights.w_q.shape[1] // H
    d_r = k_r.shape[-1]
    pos = torch.arange(nk - nq, nk, device=h.device)
    q = (h @ weights.w_q).reshape(b, nq, H, d_h).transpose(1, 2)
    q_r = (h @ weights.w_qr).reshape(b, nq, H, d_r).transpose(1, 2)
    q_r = apply_rope(q_r, pos)
    w_uk = weights.w_uk.reshape(-1, H, d_h)
    w_uv = weights.w_uv.reshape(-1, H, d_h)
    q_abs = torch.einsum("bhqd,chd->bhqc", q, w_uk)
    scores = torch.einsum("bhqc,bkc->bhqk", q_abs, c) + torch.einsum("bhqr,bkr->bhqk", q_r, k_r)
    scores = scores / math.sqrt(d_h + d_r)
    mask = torch.arange(nk, device=h.device)[None, :] > pos[:, None]
    scores = scores.masked_fill(mask, float("-inf"))
    p = scores.float().softmax(-1).to(h.dtype)
    ctx = torch.einsum("bhqk,bkc->bhqc", p, c)
    out = torch.einsum("bhqc,chd->bqhd", ctx, w_uv).reshape(b, nq, -1)
    return out @ weights.w_o
""",
    near_miss="double-through-float32",
)

right(
    "decoupled_rope_scores",
    "positions from the first one, in float64",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    # only distances matter: start at the first position
    p = positions - positions[0]
    qr = apply_rope(q_r.double(), p)
    kr = apply_rope(k_r.double(), p)
    s = q_c.double() @ k_c.double().mT + (qr[:, :, :, None] * kr[:, None, None]).sum(-1)
    return (s / torch.tensor(q_c.shape[-1] + k_r.shape[-1], dtype=torch.float64).sqrt()).to(q_c.dtype)
""",
)

wrong(
    "decoupled_rope_scores",
    "joined, then rotated",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q = apply_rope(torch.cat([q_c, q_r], -1), positions)
    k = apply_rope(torch.cat([k_c, k_r[:, None].expand_as(q_r)], -1), positions)
    return q @ k.mT / q.shape[-1] ** 0.5
""",
    near_miss="rotated-together",
)

wrong(
    "decoupled_rope_scores",
    "content alone",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q_r = apply_rope(q_r, positions)
    k_r = apply_rope(k_r, positions).unsqueeze(1)
    scores = q_c @ k_c.transpose(-1, -2) 
    return scores / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
""",
    near_miss="no-rotary-scores",
)

wrong(
    "decoupled_rope_scores",
    "divided by the width",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q_r = apply_rope(q_r, positions)
    k_r = apply_rope(k_r, positions).unsqueeze(1)
    scores = q_c @ k_c.transpose(-1, -2) + q_r @ k_r.transpose(-1, -2)
    return scores / (q_c.shape[-1] + q_r.shape[-1])
""",
    near_miss="scale-without-the-root",
)

wrong(
    "decoupled_rope_scores",
    "sum of two roots",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    q_r = apply_rope(q_r, positions)
    k_r = apply_rope(k_r, positions).unsqueeze(1)
    scores = q_c @ k_c.transpose(-1, -2) + q_r @ k_r.transpose(-1, -2)
    return scores / (math.sqrt(q_c.shape[-1]) + math.sqrt(q_r.shape[-1]))
""",
    near_miss="scale-from-two-roots",
)

wrong(
    "decoupled_rope_scores",
    "angles in half precision",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    d = q_r.shape[-1]
    f = (10000.0 ** (-torch.arange(0, d, 2) / d)).to(q_r.dtype)
    a = positions[:, None].to(q_r.dtype) * f
    def rot(x):
        e, o = x[..., ::2], x[..., 1::2]
        return torch.stack([e * a.cos() - o * a.sin(), e * a.sin() + o * a.cos()], -1).flatten(-2)
    return (q_c @ k_c.mT + rot(q_r) @ rot(k_r)[:, None].mT) / math.sqrt(q_c.shape[-1] + d)
""",
)

wrong(
    "decoupled_rope_scores",
    "negative positions are 0",
    """
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    positions = positions.clamp(min=0)
    q_r = apply_rope(q_r, positions)
    k_r = apply_rope(k_r, positions).unsqueeze(1)
    scores = q_c @ k_c.transpose(-1, -2) + q_r @ k_r.transpose(-1, -2)
    return scores / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
""",
)

right(
    "LatentCache",
    "length is a tensor",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.r = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.length = torch.tensor(0)
    def update(self, c, k_r):
        end = self.length + c.shape[1]
        if end > self.c.shape[1]: raise ValueError("full")
        self.c[:, self.length:end] = c; self.r[:, self.length:end] = k_r
        self.length = end
        return self.c[:, :end], self.r[:, :end]
    def reset(self):
        self.length = torch.tensor(0)
""",
)

right(
    "LatentCache",
    "dataclass with a list of buffers",
    """
from dataclasses import dataclass
@dataclass
class LatentCache:
    batch: int
    max_seq: int
    d_c: int
    d_r: int
    dtype: torch.dtype
    device: torch.device
    def __post_init__(self):
        make = lambda width: torch.zeros((self.batch, self.max_seq, width), dtype=self.dtype, device=self.device)
        self.store = [make(self.d_c), make(self.d_r)]
        self.length = 0
    def update(self, c, k_r):
        old = self.length
        if old + c.shape[1] > self.max_seq:
            raise ValueError("overflow")
        self.length = old + c.shape[1]
        for s, x in zip(self.store, (c, k_r)):
            s[:, old:self.length] = x
        return tuple(s[:, :self.length] for s in self.store)
    def reset(self):
        self.length = 0
""",
)

wrong(
    "LatentCache",
    "the last rows kept twice",
    """
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k_r = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.max_seq = max_seq
        self.length = 0
    def update(self, c, k_r):
        new = c.shape[1]
        if self.length + new > self.max_seq:
            raise ValueError(f"LatentCache: {self.length} + {new} > {self.max_seq}")
        end = self.length + new
        self.c[:, self.length:end] = c
        self.k_r[:, self.length:end] = k_r
        self.length = end
        self.last = c.clone()
        return self.c[:, :end], self.k_r[:, :end]
    def reset(self):
        self.length = 0
""",
)

right(
    "cache_elements_per_token",
    "the kind is the message",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    if kind not in ("mha", "gqa", "mqa", "mla"):
        raise ValueError(kind)
    if kind == "mla":
        if d_c is None: raise ValueError("d_c is missing")
        if d_r is None: raise ValueError("d_r is missing")
        return sum((d_c, d_r))
    if kind == "mha": return cache_elements_per_token("gqa", heads, head_dim, groups=heads)
    if kind == "mqa": return cache_elements_per_token("gqa", heads, head_dim, groups=1)
    if groups is None: raise ValueError("groups is missing")
    k = v = groups * head_dim
    return k + v
""",
)

wrong(
    "cache_elements_per_token",
    "keys alone in MHA",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    if kind == "mha":
        return heads * head_dim
    if kind == "gqa":
        if groups is None:
            raise ValueError("gqa needs groups")
        return 2 * groups * head_dim
    if kind == "mqa":
        return 2 * head_dim
    if kind == "mla":
        if d_c is None or d_r is None:
            raise ValueError("mla needs d_c and d_r")
        return d_c + d_r
    raise ValueError(f"unknown kind {kind!r}")
""",
)

wrong(
    "cache_elements_per_token",
    "mla is what is left",
    """
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    if kind == "mha":
        return 2 * heads * head_dim
    if kind == "gqa":
        if groups is None:
            raise ValueError("gqa needs groups")
        return 2 * groups * head_dim
    if kind == "mqa":
        return 2 * head_dim
    if kind not in ("mha", "gqa", "mqa"):
        if d_c is None or d_r is None:
            raise ValueError("mla needs d_c and d_r")
        return d_c + d_r
    raise ValueError(f"unknown kind {kind!r}")
""",
    near_miss="unknown-is-mla",
)

wrong(
    "largest_batch",
    "float32 tensors",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    free = memory_bytes - model_bytes
    if free <= 0:
        return 0
    return int(torch.tensor(float(free)) // torch.tensor(float(seq * layers * elements_per_token * bytes_per_element)))
""",
    near_miss="computed-in-float32",
)

wrong(
    "largest_batch",
    "divided by one after the other",
    """
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    free = memory_bytes - model_bytes
    if free <= 0:
        return 0
    return int(free // layers // elements_per_token // bytes_per_element // seq)
""",
    near_miss="rounded-in-between",
)

wrong(
    "lora_forward",
    "merged with w detached",
    """
def lora_forward(x, w, a, b, alpha):
    return x @ w + (alpha / a.shape[1]) * (x @ a @ b)
def merge_lora(w, a, b, alpha):
    return w.detach() + (alpha / a.shape[1]) * (a @ b)
""",
    near_miss="merged-with-a-frozen-weight",
)

wrong(
    "lora_forward",
    "flattened",
    """
def lora_forward(x, w, a, b, alpha):
    x = x.view(-1, x.shape[-1])
    return x @ w + (alpha / a.shape[1]) * (x @ a @ b)
def merge_lora(w, a, b, alpha):
    return w + (alpha / a.shape[1]) * (a @ b)
""",
    near_miss="rows-flattened",
)
