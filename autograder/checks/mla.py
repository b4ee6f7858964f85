"""What is right in the exercises on multi-head latent attention."""

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autograder.inside.engine import Outcome
from autograder.spec import Exercise, Gen, Mismatch, Subject, call, scenario
from course_llm import mla as ref
from course_llm.attention import apply_rope, merge_heads, split_heads
from course_llm.weights import MLAWeights

HALF = (torch.float16, torch.bfloat16)
# a chain of products may round to half precision half a dozen times
CHAIN = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 5e-2}


def mla_weights(
    g: Gen,
    d: int = 8,
    heads: int = 2,
    d_h: int = 4,
    d_r: int = 2,
    d_c: int = 6,
    dtype: torch.dtype = torch.float32,
) -> MLAWeights:
    """Draws a layer whose scores and outputs are of order one."""
    shapes = [(d, heads * d_h), (d, heads * d_r), (d, d_c), (d, d_r), (d_c, heads * d_h), (d_c, heads * d_h)]
    shapes.append((heads * d_h, d))
    drawn = [(g.randn(*s, dtype=torch.float64) * 1.2 / s[0] ** 0.5).to(dtype) for s in shapes]
    return MLAWeights(*drawn, heads=heads)


def in_dtype(weights: MLAWeights, dtype: torch.dtype) -> MLAWeights:
    tensors = {k: v.to(dtype) for k, v in vars(weights).items() if isinstance(v, Tensor)}
    return dataclasses.replace(weights, **tensors)


def cached(h: Tensor, w: MLAWeights) -> tuple[Tensor, Tensor]:
    """The latents and the rotated keys of a whole sequence, as an independent computation."""
    return h @ w.w_dkv, apply_rope(h @ w.w_kr, torch.arange(h.shape[1]))


def torch_attention(h: Tensor, w: MLAWeights) -> Tensor:
    """The layer by torch's own attention, head by head, in float64: an independent fact."""
    dtype, h, w = h.dtype, h.double(), in_dtype(w, torch.float64)
    d_h, d_r = w.w_uk.shape[1] // w.heads, w.w_kr.shape[1]
    (c, k_r), out = cached(h, w), []
    for i in range(w.heads):
        content, rotary = slice(i * d_h, (i + 1) * d_h), slice(i * d_r, (i + 1) * d_r)
        q_r = apply_rope(h @ w.w_qr[:, rotary], torch.arange(h.shape[1]))
        q, k = torch.cat([h @ w.w_q[:, content], q_r], -1), torch.cat([c @ w.w_uk[:, content], k_r], -1)
        out.append(F.scaled_dot_product_attention(q, k, c @ w.w_uv[:, content], is_causal=True))
    return (torch.cat(out, -1) @ w.w_o).to(dtype)


# --- low_rank_factors

low_rank_factors = Exercise("low_rank_factors", ref, see="mla-low-rank")


def spectrum(g: Gen, rows: int, cols: int, values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    """A matrix with these singular values and random singular vectors."""
    n = len(values)
    u, _ = torch.linalg.qr(g.randn(rows, n, dtype=torch.float64))
    v, _ = torch.linalg.qr(g.randn(cols, n, dtype=torch.float64))
    return (u * torch.tensor(values, dtype=torch.float64) @ v.mT).to(dtype)


def pair_complaint(value: Any, w: Tensor, rank: int) -> str:
    if (
        not isinstance(value, (tuple, list))
        or len(value) != 2
        or not all(isinstance(x, Tensor) for x in value)
    ):
        return "the result should be two tensors, a and b"
    sides = (("the factor a", value[0], (w.shape[0], rank)), ("the factor b", value[1], (rank, w.shape[1])))
    for name, x, shape in sides:
        if x.dtype != w.dtype:
            return f"{name} should have the dtype of w, {w.dtype}"
        if tuple(x.shape) != shape:
            return f"{name} has shape {tuple(x.shape)}, it should have {shape}"
        if not bool(x.isfinite().all()):
            return f"{name} has a NaN or an infinity"
    return ""


def factors(w: Tensor, rank: int, words: str, unique: bool = True):
    """A case that judges the product a @ b alone: how the singular values are shared is free."""

    def run(s: Subject) -> None:
        value = s.ask("low_rank_factors", w, rank)
        changed = s.transcript[-1].changed
        complaint = pair_complaint(value, w, rank)
        product = None if complaint else value[0].double() @ value[1].double()
        if not unique and product is not None:
            product = (w.double() - product).norm()
        # what is kept for the diagnosis does not depend on the sharing either
        s.transcript[-1] = Outcome(value=complaint or product, changed=changed)
        s.require(not complaint, complaint)
        u, sigma, vh = torch.linalg.svd(w.double(), full_matrices=False)
        best = u[:, :rank] * sigma[:rank] @ vh[:rank] if unique else sigma[rank:].norm()
        atol = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}[w.dtype]
        what = "the product a @ b is not the best approximation of this rank"
        s.require_close(product, best, what, rtol=0.0, atol=atol)
        s.require(not changed, "w is changed in place")

    return scenario(run).says(words)


@low_rank_factors.group("values", share=2)
def _(g: Gen):
    """Gives two factors whose product is the closest matrix of this rank."""
    yield factors(
        g.tensor([[1.0, 0, 0], [0, 3, 0], [0, 0, 2]]), 2, "a diagonal matrix keeps its two largest entries"
    )
    yield factors(spectrum(g, 6, 4, [3.0, 2.0, 1.0, 0.5]), 2, "a tall matrix")
    yield factors(spectrum(g, 4, 7, [3.0, 1.8, 0.9, 0.4]), 2, "a wide matrix")
    yield factors(spectrum(g, 5, 5, [2.5, 1.5, 0.8, 0.5, 0.2]), 1, "rank 1")
    yield factors(spectrum(g, 5, 5, [2.5, 1.5, 0.8, 0.5, 0.2]), 4, "one rank less than full")


@low_rank_factors.group("edges", share=1)
def _(g: Gen):
    """Works at full rank, for a row, a matrix of lower rank, equal singular values and other memory layouts."""
    yield factors(spectrum(g, 5, 3, [2.0, 1.0, 0.5]), 3, "full rank gives the matrix back")
    yield factors(spectrum(g, 3, 5, [2.0, 1.0, 0.5]), 3, "full rank of a wide matrix")
    yield factors(g.randn(1, 4), 1, "a single row")
    yield factors(spectrum(g, 4, 5, [2.0]), 2, "a matrix of lower rank than asked for")
    yield factors(torch.diag(g.tensor([1.0, 2.0, 2.0])), 1, "two equal singular values", unique=False)
    yield factors(spectrum(g, 4, 6, [3.0, 2.0, 1.0, 0.5]).mT, 2, "a transposed view")


@low_rank_factors.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype of the matrix, in double and in half precision."""
    for dtype in (torch.float64, *HALF):
        yield factors(spectrum(g, 6, 4, [2.0, 1.2, 0.6, 0.3], dtype), 2, str(dtype))


@low_rank_factors.group("gradient", share=1)
def _(g: Gen):
    """Gradients flow through both factors to the matrix."""

    def run(s: Subject) -> None:
        """float64"""
        w = spectrum(g, 5, 4, [3.0, 2.0, 1.0, 0.4], torch.float64)
        parts = s._value(s._perform("gradient", "low_rank_factors", (w, 2)))
        grads = parts["grads"]
        flows = parts["detached"] == 0 and len(grads) == 1 and bool(grads[0].isfinite().all())
        flows = flows and float(grads[0].norm()) > 1e-3
        s.transcript[-1] = Outcome(value=flows)
        s.require(flows, "no gradient reaches w through one of the factors")

    yield scenario(run)


@low_rank_factors.group("errors", share=1)
def _(g: Gen):
    """Refuses a rank below 1 or above the smaller side."""
    for shape, rank in (((4, 6), 0), ((4, 6), -1), ((4, 6), 5), ((6, 4), 5), ((3, 3), 4)):
        yield call(g.randn(*shape), rank).raises(ValueError).says(f"rank {rank} of {shape}")


def _svd(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.linalg.svd(w.to(torch.promote_types(w.dtype, torch.float32)), full_matrices=False)


def _check_rank(w: Tensor, rank: int) -> None:
    if not 1 <= rank <= min(w.shape):
        raise ValueError(f"low_rank_factors needs 1 <= rank <= {min(w.shape)}, got rank={rank}")


@low_rank_factors.near_miss("largest-entries")
def _(w, rank):
    """The largest entries are kept, each on its own. The best approximation keeps the largest singular values:
    take them and their vectors from `torch.linalg.svd`."""
    _check_rank(w, rank)
    a, b = w.new_zeros(w.shape[0], rank), w.new_zeros(rank, w.shape[1])
    for r, place in enumerate(w.abs().flatten().topk(rank).indices.tolist()):
        i, j = divmod(place, w.shape[1])
        a[i, r], b[r, j] = w[i, j], 1.0
    return a, b


@low_rank_factors.near_miss("largest-columns")
def _(w, rank):
    """The columns of largest norm are kept and the others set to zero. Every column matters: use the SVD, whose
    first singular vectors are mixtures of all columns."""
    _check_rank(w, rank)
    kept = w.norm(dim=0).topk(rank).indices
    return w[:, kept], F.one_hot(kept, w.shape[1]).to(w.dtype)


@low_rank_factors.near_miss("singular-values-twice")
def _(w, rank):
    """Both factors carry the full singular values, so that the product has their squares. Give them to one factor, or
    their square roots to each."""
    _check_rank(w, rank)
    u, s, vh = _svd(w)
    return (u[:, :rank] * s[:rank]).to(w.dtype), (s[:rank, None] * vh[:rank]).to(w.dtype)


@low_rank_factors.near_miss("no-singular-values")
def _(w, rank):
    """The singular values are left out: u and v have length one. Scale one of the factors by them."""
    _check_rank(w, rank)
    u, _, vh = _svd(w)
    return u[:, :rank].to(w.dtype), vh[:rank].to(w.dtype)


@low_rank_factors.near_miss("smallest-singular-values")
def _(w, rank):
    """The smallest singular values are kept, which is the worst choice. `torch.linalg.svd` sorts them from large to
    small: take the first ones."""
    _check_rank(w, rank)
    u, s, vh = _svd(w)
    return (u[:, -rank:] * s[-rank:]).to(w.dtype), vh[-rank:].to(w.dtype)


@low_rank_factors.near_miss("vh-taken-for-v")
def _(w, rank):
    """The third result of `torch.linalg.svd` is Vᴴ already, one right singular vector in each row. Take its first
    rows; do not transpose its columns."""
    _check_rank(w, rank)
    u, s, vh = torch.linalg.svd(w.to(torch.promote_types(w.dtype, torch.float32)), full_matrices=True)
    return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:, :rank].mT.to(w.dtype)


@low_rank_factors.near_miss("first-columns")
def _(w, rank):
    """The first rows and columns of the matrix itself are taken. They approximate nothing: use its SVD."""
    _check_rank(w, rank)
    return w[:, :rank].clone(), torch.eye(rank, w.shape[1], dtype=w.dtype)


@low_rank_factors.near_miss("any-rank")
def _(w, rank):
    """A rank that is not there is silently clamped. Raise a ValueError unless 1 <= rank <= min(w.shape)."""
    u, s, vh = _svd(w)
    rank = max(1, min(rank, *w.shape))
    return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:rank].to(w.dtype)


def _refusing(refused):
    def near_miss(w, rank):
        """The rank is checked against the wrong limits. A matrix has at most min(rows, cols) singular values, and a factor
        at least one column: raise a ValueError unless 1 <= rank <= min(w.shape)."""
        if refused(rank, *w.shape):
            raise ValueError(f"low_rank_factors got rank={rank}")
        u, s, vh = _svd(w)
        return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:rank].to(w.dtype)

    return near_miss


for _name, _refused in {
    "rank-0-accepted": lambda rank, rows, cols: rank < 0 or rank > min(rows, cols),
    "rank-below-1-accepted": lambda rank, rows, cols: rank > min(rows, cols),
    "rank-above-the-limit-accepted": lambda rank, rows, cols: rank < 1,
    "limited-by-the-larger-side": lambda rank, rows, cols: rank < 1 or rank > max(rows, cols),
    "limited-by-the-columns": lambda rank, rows, cols: rank < 1 or rank > cols,
    "limited-by-the-rows": lambda rank, rows, cols: rank < 1 or rank > rows,
    "full-rank-refused": lambda rank, rows, cols: rank < 1 or rank >= min(rows, cols),
}.items():
    low_rank_factors.near_miss(_name)(_refusing(_refused))


@low_rank_factors.near_miss("half-not-decomposed")
def _(w, rank):
    """`torch.linalg.svd` does not take half precision, so the answer fails there. Decompose in float32 and bring the factors
    back with `.to(w.dtype)`."""
    _check_rank(w, rank)
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    return u[:, :rank] * s[:rank], vh[:rank]


@low_rank_factors.near_miss("zeros-instead-of-a-cut")
def _(w, rank):
    """The small singular values are set to zero, but their vectors stay, so that nothing is saved. Cut both factors: `rank`
    columns and `rank` rows."""
    _check_rank(w, rank)
    u, s, vh = _svd(w)
    kept = s * (torch.arange(len(s)) < rank)
    return (u * kept).to(w.dtype), vh.to(w.dtype)


@low_rank_factors.near_miss("no-gradient")
def _(w, rank):
    """The factors are cut off from w (`detach`, `no_grad` or NumPy), so nothing can be learned through them. Keep the
    SVD in the graph."""
    _check_rank(w, rank)
    u, s, vh = _svd(w.detach())
    return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:rank].to(w.dtype)


@low_rank_factors.near_miss("float32-out")
def _(w, rank):
    """The factors come back in another dtype than the matrix. Half precision is decomposed in float32, but the
    result goes back with `.to(w.dtype)`, and float64 stays float64."""
    _check_rank(w, rank)
    u, s, vh = torch.linalg.svd(w.float(), full_matrices=False)
    return u[:, :rank] * s[:rank], vh[:rank]


@low_rank_factors.near_miss("double-through-float32")
def _(w, rank):
    """The dtype is right, but a float64 matrix is decomposed in float32 and loses half of its digits. Only half precision needs
    float32: decompose in `torch.promote_types(w.dtype, torch.float32)`."""
    _check_rank(w, rank)
    u, s, vh = torch.linalg.svd(w.float(), full_matrices=False)
    return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:rank].to(w.dtype)


def _centred(dim):
    def near_miss(w, rank):
        """The mean is subtracted first, as in principal component analysis. Then a @ b approximates the centred matrix: decompose
        w as it is."""
        _check_rank(w, rank)
        x = w.to(torch.promote_types(w.dtype, torch.float32))
        u, s, vh = _svd(x - x.mean(dim, keepdim=True))
        return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:rank].to(w.dtype)

    return near_miss


low_rank_factors.near_miss("centred-columns")(_centred(0))
low_rank_factors.near_miss("centred-rows")(_centred(1))


@low_rank_factors.near_miss("first-rows-of-a-qr")
def _(w, rank):
    """The QR decomposition is cut. Its columns are not sorted by what they explain, so the cut is not the best one: use the SVD."""
    _check_rank(w, rank)
    q, r = torch.linalg.qr(w.to(torch.promote_types(w.dtype, torch.float32)))
    return q[:, :rank].to(w.dtype), r[:rank].to(w.dtype)


# --- compress_kv and expand_kv

compress_kv = Exercise("compress_kv", ref, see="mla-compress", functions=("compress_kv", "expand_kv"))


def expansion(
    g: Gen, batch: int, seq: int, heads: int, d_h: int, d_c: int, dtype: torch.dtype = torch.float32
):
    """Arguments of `expand_kv`."""
    scale = d_c**-0.5
    w_uk, w_uv = (g.randn(d_c, heads * d_h, dtype=torch.float64) * scale for _ in range(2))
    return g.randn(batch, seq, d_c, dtype=dtype), w_uk.to(dtype), w_uv.to(dtype), heads


def by_head(c: Tensor, w_uk: Tensor, w_uv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The expansion head by head with `F.linear`: an independent fact."""
    return tuple(torch.stack([F.linear(c, block.mT) for block in w.chunk(heads, 1)], 1) for w in (w_uk, w_uv))


@compress_kv.group("values", share=3)
def _(g: Gen):
    """Compresses with one matrix for all heads, and expands every head from the whole latent."""
    yield (
        call(g.tensor([[[1.0, 2.0]]]), g.tensor([[1.0], [3.0]]))
        .expect(g.tensor([[[7.0]]]))
        .says("1·1 + 2·3 = 7")
    )
    yield call(g.randn(2, 5, 8), g.randn(8, 3) / 3).says("two sequences")
    hand = (g.tensor([[[2.0]]]), g.tensor([[1.0, 2.0, 3.0, 4.0]]), g.tensor([[5.0, 6.0, 7.0, 8.0]]), 2)
    keys, values = g.tensor([[[[2.0, 4.0]], [[6.0, 8.0]]]]), g.tensor([[[[10.0, 12.0]], [[14.0, 16.0]]]])
    yield call(*hand).of("expand_kv").expect((keys, values)).says("head 0 owns the first two columns")
    for batch, seq, heads, d_h, d_c in ((1, 4, 2, 3, 4), (2, 5, 3, 2, 6), (2, 3, 4, 4, 4)):
        args = expansion(g, batch, seq, heads, d_h, d_c)
        yield call(*args).of("expand_kv").expect(by_head(*args)).says(f"{heads} heads, {batch} sequences")


@compress_kv.group("edges", share=1)
def _(g: Gen):
    """Works for one head, one token, a latent wider than the keys, and other memory layouts."""
    for batch, seq, heads, d_h, d_c in ((1, 1, 3, 2, 6), (2, 4, 1, 5, 3), (2, 3, 2, 1, 7)):
        args = expansion(g, batch, seq, heads, d_h, d_c)
        yield (
            call(*args)
            .of("expand_kv")
            .expect(by_head(*args))
            .says(f"{seq} tokens, {heads} heads of width {d_h}")
        )
    c, w_uk, w_uv, heads = expansion(g, 3, 4, 2, 3, 6)
    yield (
        call(c.mT.contiguous().mT, w_uk.mT.contiguous().mT, w_uv, heads)
        .of("expand_kv")
        .says("transposed views")
    )
    yield call(g.randn(5, 2, 8).transpose(0, 1), g.randn(3, 8).mT / 3).says("transposed views")


@compress_kv.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype, in double and in half precision."""
    for dtype in (torch.float64, *HALF):
        yield call(g.randn(2, 3, 8, dtype=dtype), (g.randn(8, 3) / 3).to(dtype)).says(str(dtype))
        yield call(*expansion(g, 2, 3, 2, 3, 6, dtype)).of("expand_kv").says(str(dtype))


@compress_kv.group("gradient", share=1)
def _(g: Gen):
    """Gradients flow to the input and to every matrix."""
    yield call(g.randn(2, 3, 8), g.randn(8, 4) / 3).gradient()
    yield call(*expansion(g, 2, 3, 2, 3, 4)).of("expand_kv").gradient()


@compress_kv.near_miss("per-head-latents", of="expand_kv")
def _(c, w_uk, w_uv, heads):
    """Every head expands its own slice of the latent. The latent is shared: each head reads all of it, and owns a block
    of columns of the up-projections, not of rows."""
    d_c, width = w_uk.shape
    rows = torch.arange(d_c, device=c.device) * heads // d_c  # the head that owns each row
    columns = torch.arange(width, device=c.device) * heads // width
    own = (rows[:, None] == columns).to(c.dtype)
    return split_heads(c @ (w_uk * own), heads), split_heads(c @ (w_uv * own), heads)


@compress_kv.near_miss("view-without-transpose", of="expand_kv")
def _(c, w_uk, w_uv, heads):
    """The numbers are cut into the right shape but not moved: `view` to (batch, heads, seq, d_h) mixes tokens and heads.
    View as (batch, seq, heads, d_h), then transpose axes 1 and 2."""
    batch, seq, _ = c.shape
    return tuple((c @ w).reshape(batch, heads, seq, -1) for w in (w_uk, w_uv))


@compress_kv.near_miss("heads-interleaved", of="expand_kv")
def _(c, w_uk, w_uv, heads):
    """Head i takes every heads-th column. Heads are consecutive blocks of columns: split the width into (heads, d_h),
    not (d_h, heads)."""
    batch, seq, _ = c.shape
    return tuple((c @ w).reshape(batch, seq, -1, heads).permute(0, 3, 1, 2) for w in (w_uk, w_uv))


@compress_kv.near_miss("heads-behind-seq", of="expand_kv")
def _(c, w_uk, w_uv, heads):
    """The head axis stands behind the tokens. Transpose axes 1 and 2: attention wants (batch, heads, seq, d_h)."""
    batch, seq, _ = c.shape
    return tuple((c @ w).reshape(batch, seq, heads, -1) for w in (w_uk, w_uv))


@compress_kv.near_miss("values-first", of="expand_kv")
def _(c, w_uk, w_uv, heads):
    """Keys and values are swapped: return the keys (from w_uk) first."""
    return split_heads(c @ w_uv, heads), split_heads(c @ w_uk, heads)


@compress_kv.near_miss("values-from-keys", of="expand_kv")
def _(c, w_uk, w_uv, heads):
    """The values are built with w_uk, too. Keys and values share the latent, not the up-projection: use w_uv."""
    return split_heads(c @ w_uk, heads), split_heads(c @ w_uk, heads)


@compress_kv.near_miss("normalised-latent")
def _(h, w_dkv):
    """The latent is normalised. The full model does so, this exercise does not: return the plain product."""
    c = h @ w_dkv
    return c * (c.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


@compress_kv.near_miss("detached-latent")
def _(h, w_dkv):
    """The latent is cut off from its inputs. W_DKV is learned through it: return it without `detach` or `no_grad`."""
    return (h @ w_dkv).detach()


@compress_kv.near_miss("up-projections-detached", of="expand_kv")
def _(c, w_uk, w_uv, heads):
    """An up-projection is cut off from its result. Both are learned through the keys and values: no `detach`, no `no_grad`."""
    return split_heads(c @ w_uk, heads), split_heads(c @ w_uv.detach(), heads)


@compress_kv.near_miss("first-sequence-for-all", of="expand_kv")
def _(c, w_uk, w_uv, heads):
    """Every sequence gets the keys and values of the first. Each has latents of its own: keep the batch axis."""
    c = c[:1].expand_as(c)
    return split_heads(c @ w_uk, heads), split_heads(c @ w_uv, heads)


# --- a layer with knobs, from which the near-misses of the attention exercises are made


def _layer(
    h: Tensor,
    c: Tensor,
    k_r: Tensor,
    w: MLAWeights,
    width: str = "d_h + d_r",
    positions: str = "end",
    mask: str = "end",
    content: str = "plain",
    heads: str = "blocks",
    project: bool = True,
    swap: bool = False,
    merge: str = "transposed",
    values: str = "own",
    softmax_dim: int = -1,
    rope_q: str = "per head",
    softmax: str = "stable",
) -> Tensor:
    interleaved = lambda x, n: x.reshape(*x.shape[:2], -1, n).permute(0, 3, 1, 2)  # noqa: E731
    split = interleaved if heads == "interleaved" else split_heads
    split_k = interleaved if heads == "w_uk interleaved" else split
    split_v = interleaved if heads == "w_uv interleaved" else split
    queries, keys = h.shape[1], c.shape[1]
    start = {"end": keys - queries, "zero": 0, "late": keys - queries + 1}[positions]
    at = torch.arange(start, start + queries, device=h.device)
    q_c = split(h @ w.w_q, w.heads)
    if rope_q == "before split":
        q_r = split(apply_rope(h @ w.w_qr, at), w.heads)
    else:
        q_r = split(h @ w.w_qr, w.heads)
        q_r = q_r if rope_q == "none" else apply_rope(q_r, at)
    up_k, up_v = (w.w_uv, w.w_uk) if swap else (w.w_uk, w.w_uv)
    k_c, v = split_k(c @ up_k, w.heads), split_v(c @ up_v, w.heads)
    if content == "rotated":
        q_c, k_c = apply_rope(q_c, at), apply_rope(k_c, torch.arange(keys, device=h.device))
    shared = k_r[:, None] if k_r.dim() == 3 else k_r
    sizes = {"d_h": q_c.shape[-1], "d_r": q_r.shape[-1], "d_c": c.shape[-1], "one": 1, "d": h.shape[-1]}
    named = [sizes[name] for name in width.split(" + ") if name in sizes]
    scale = sum(named) ** -0.5 if named else 1.0
    scores = (q_c @ k_c.mT + q_r @ shared.mT) * scale
    if width == "content alone":
        scores = q_c @ k_c.mT * (sizes["d_h"] + sizes["d_r"]) ** -0.5 + q_r @ shared.mT
    if width == "d_h, d_r":
        scores = q_c @ k_c.mT * sizes["d_h"] ** -0.5 + q_r @ shared.mT * sizes["d_r"] ** -0.5
    offsets = {
        "start": queries - keys,
        "none": queries,
        "strict": -1,
        "strict or nan": -1,
        "strict or uniform": -1,
        "ahead": 1,
    }
    diagonal = keys - queries + offsets.get(mask, 0)
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=h.device).triu(diagonal + 1)
    if mask == "strict":
        hidden[:, 0] = False
    if mask == "past":
        hidden = hidden.new_ones(queries, keys).tril(keys - queries - 1)
    if mask in ("after", "zeros"):
        attention = scores.softmax(softmax_dim).masked_fill(hidden, 0.0)
        attention = scores.masked_fill(hidden, 0.0).softmax(softmax_dim) if mask == "zeros" else attention
    elif softmax != "stable":
        attention, mask = _SOFTMAX[softmax](scores, hidden), "strict or nan"  # NaN stays
    else:
        low = -1e9 if mask == "strict or uniform" else -math.inf
        attention = scores.masked_fill(hidden, low).softmax(softmax_dim)
        attention = attention if mask == "strict or nan" else attention.nan_to_num(0.0)
    v = k_c if values == "keys" else v
    mixed = attention @ v
    out = merge_heads(mixed) if merge == "transposed" else mixed.reshape(*h.shape[:2], -1)
    return out @ w.w_o if project else out


def _overflowing(scores: Tensor, hidden: Tensor) -> Tensor:
    powers = scores.exp().masked_fill(hidden, 0.0)
    return powers / powers.sum(-1, keepdim=True)


_SOFTMAX = {
    "overflowing": _overflowing,
    "not low enough": lambda scores, hidden: scores.masked_fill(hidden, -100.0).softmax(-1),
    "float32": lambda scores, hidden: (
        scores.float().masked_fill(hidden, -math.inf).softmax(-1).to(scores.dtype)
    ),
}


def _absorbed(h: Tensor, c: Tensor, k_r: Tensor, w: MLAWeights, softmax: str) -> Tensor:
    """The absorbed form with another softmax, for near-misses that cost what they should."""
    queries, keys = h.shape[1], c.shape[1]
    q_c, at = split_heads(h @ w.w_q, w.heads), torch.arange(keys - queries, keys)
    q_r = apply_rope(split_heads(h @ w.w_qr, w.heads), at)
    up_k, up_v = (x.unflatten(1, (w.heads, -1)) for x in (w.w_uk, w.w_uv))
    scores = torch.einsum("bhqd,chd->bhqc", q_c, up_k) @ c[:, None].mT + q_r @ k_r[:, None].mT
    hidden = torch.arange(keys) > at[:, None]
    scores = scores * (q_c.shape[-1] + q_r.shape[-1]) ** -0.5
    mixed = _SOFTMAX[softmax](scores, hidden) @ c[:, None]
    return torch.einsum("bhqc,chd->bqhd", mixed, up_v).flatten(2) @ w.w_o


def _whole(h: Tensor, w: MLAWeights, **knobs: Any) -> Tensor:
    c, k_r = cached(h, w)
    return _layer(h, c, k_r, w, **knobs)


# --- latent_attention

latent_attention = Exercise("latent_attention", ref, see="mla-attention")

SHAPES = [  # batch, seq, d, heads, d_h, d_r, d_c
    (1, 5, 8, 2, 4, 2, 6),
    (2, 6, 8, 2, 4, 4, 5),
    (2, 7, 9, 3, 2, 4, 4),
    (3, 4, 6, 4, 6, 2, 3),
]


def layer_args(g: Gen, batch: int, seq: int, d: int, *shape: int, dtype: torch.dtype = torch.float32):
    return g.randn(batch, seq, d, dtype=dtype), mla_weights(g, d, *shape, dtype=dtype)


def large_scores(g: Gen) -> tuple[Tensor, MLAWeights, Tensor, Tensor]:
    """A layer in float64 whose scores are hundreds or thousands, and its cache. In one head they rise from token to token, in the other
    they are below 0 and fall: exp leaves its range, a mask of -100 is no mask, and the largest score takes all."""
    h, w = layer_args(g, 2, 6, 8, 2, 4, 2, 6, dtype=torch.float64)
    signs = g.tensor([10.0] * 4 + [-10.0] * 4, torch.float64)
    w = dataclasses.replace(
        w, w_q=(w.w_q.abs() + 0.3) * signs, w_dkv=w.w_dkv.abs() + 0.3, w_uk=w.w_uk.abs() + 0.3
    )
    h = (h[:, :1].abs() + 0.3) * torch.arange(1.0, 7, dtype=torch.float64)[:, None]
    return h, w, *cached(h, w)


@latent_attention.group("values", share=3)
def _(g: Gen):
    """Gives what causal attention with keys of width d_h + d_r gives."""
    for shape in SHAPES:
        args = layer_args(g, *shape)
        yield (
            call(*args)
            .expect(torch_attention(*args))
            .says(f"batch {shape[0]}, {shape[1]} tokens, {shape[3]} heads")
        )


@latent_attention.group("edges", share=1)
def _(g: Gen):
    """Works for one token, one head, odd widths, a longer sequence, large scores, and other memory layouts."""
    for shape in (
        (2, 1, 8, 2, 4, 2, 6),
        (1, 4, 7, 1, 3, 2, 5),
        (2, 3, 5, 3, 1, 2, 2),
        (1, 33, 8, 2, 4, 4, 6),
    ):
        args = layer_args(g, *shape)
        yield (
            call(*args)
            .expect(torch_attention(*args))
            .says(f"{shape[1]} tokens, {shape[3]} heads of width {shape[4]}")
        )
    h, w = layer_args(g, 2, 5, 8, 2, 4, 2, 6)
    yield call(h.mT.contiguous().mT, dataclasses.replace(w, w_uk=w.w_uk.mT.contiguous().mT)).says(
        "transposed views"
    )
    yield call(*large_scores(g)[:2]).says("scores of hundreds and thousands")


@latent_attention.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype, in double and in half precision."""
    for dtype in (torch.float64, *HALF):
        args = layer_args(g, 2, 5, 8, 2, 4, 2, 6, dtype=dtype)
        yield call(*args).close(CHAIN[dtype], CHAIN[dtype]).says(str(dtype))


@latent_attention.group("gradient", share=1)
def _(g: Gen):
    """Gradients flow to the hidden rows and to all seven matrices, and none from a row to a later one."""
    for shape in ((1, 4, 6, 2, 4, 2, 3), (2, 3, 6, 3, 2, 2, 4)):
        yield call(*layer_args(g, *shape, dtype=torch.float64)).gradient().says(f"{shape[3]} heads")


@latent_attention.near_miss("scale-from-latent")
def _(h, weights):
    """The scale is taken from the width of the latent. Scores are products of keys and queries of width d_h + d_r: divide
    by the root of that."""
    return _whole(h, weights, width="d_c + d_r")


@latent_attention.near_miss("scale-from-d_c")
def _(h, weights):
    """The scores are divided by √d_c. The latent is expanded before it meets a query: divide by √(d_h + d_r)."""
    return _whole(h, weights, width="d_c")


@latent_attention.near_miss("scale-from-d_hidden")
def _(h, weights):
    """The scores are divided by √d_hidden. They are products of one head's keys and queries: divide by √(d_h + d_r)."""
    return _whole(h, weights, width="d")


@latent_attention.near_miss("scale-without-rotary")
def _(h, weights):
    """The scale counts the content part alone. The key is d_h + d_r wide: divide by √(d_h + d_r)."""
    return _whole(h, weights, width="d_h")


@latent_attention.near_miss("unscaled")
def _(h, weights):
    """The scores are not scaled. Divide by √(d_h + d_r) before the softmax."""
    return _whole(h, weights, width="one")


@latent_attention.near_miss("rotary-key-per-head")
def _(h, weights):
    """Each head has a rotary key of its own. MLA shares one k_r = RoPE(h · w_kr) among all heads, which is why it costs
    only d_r numbers per token; only the queries have a rotary part per head."""
    k_r = apply_rope(split_heads(h @ weights.w_qr, weights.heads), torch.arange(h.shape[1], device=h.device))
    return _layer(h, h @ weights.w_dkv, k_r, weights)


@latent_attention.near_miss("rotary-key-split-among-heads")
def _(h, weights):
    """The rotary key is cut into one piece per head. All heads use the whole k_r: broadcast it over the head axis."""
    k_r = apply_rope(h @ weights.w_kr, torch.arange(h.shape[1], device=h.device))
    columns = torch.arange(k_r.shape[-1], device=h.device) % weights.heads
    own = (torch.arange(weights.heads, device=h.device)[:, None] == columns).to(h.dtype)
    return _layer(h, h @ weights.w_dkv, k_r[:, None] * own[:, None], weights)


@latent_attention.near_miss("content-rotated")
def _(h, weights):
    """The content part is rotated, too. Only q_r and k_r carry positions; a rotated k_c could not be absorbed."""
    return _whole(h, weights, content="rotated")


@latent_attention.near_miss("no-rotation")
def _(h, weights):
    """Nothing is rotated, so the layer does not know the order of the tokens. Apply `apply_rope` to q_r and k_r."""
    return _layer(h, h @ weights.w_dkv, h @ weights.w_kr, weights, rope_q="none")


@latent_attention.near_miss("key-not-rotated")
def _(h, weights):
    """Only the query is rotated, so scores depend on absolute positions. Rotate the shared key as well."""
    return _layer(h, h @ weights.w_dkv, h @ weights.w_kr, weights)


@latent_attention.near_miss("rotated-before-the-split")
def _(h, weights):
    """The rotary queries of all heads are rotated as one long vector, so each head turns at other speeds than the key.
    Split into heads first, then rotate."""
    return _whole(h, weights, rope_q="before split")


@latent_attention.near_miss("query-not-rotated")
def _(h, weights):
    """Only the shared key is rotated, so scores depend on absolute positions. Rotate the rotary queries as well."""
    return _whole(h, weights, rope_q="none")


@latent_attention.near_miss("no-rotary-scores")
def _(h, weights):
    """The rotary scores q_r · k_r are left out, so the layer does not know the order of the tokens. Add them to the content
    scores."""
    return _layer(h, h @ weights.w_dkv, h.new_zeros(*h.shape[:2], weights.w_kr.shape[1]), weights)


@latent_attention.near_miss("a-scale-per-part")
def _(h, weights):
    """Each part of the score has a scale of its own. The two parts are one key of width d_h + d_r: scale the sum by
    1/√(d_h + d_r)."""
    return _whole(h, weights, width="d_h, d_r")


@latent_attention.near_miss("mask-after-softmax")
def _(h, weights):
    """The future is set to 0 after the softmax, so the weights no longer sum to 1. Set its scores to −inf before."""
    return _whole(h, weights, mask="after")


@latent_attention.near_miss("scores-set-to-zero")
def _(h, weights):
    """The scores of the future are set to 0, and exp(0) is 1: it still counts. Set them to −inf."""
    return _whole(h, weights, mask="zeros")


@latent_attention.near_miss("sees-one-ahead")
def _(h, weights):
    """A token sees the one after it. Hide key j from query i wherever j > i."""
    return _whole(h, weights, mask="ahead")


@latent_attention.near_miss("not-causal")
def _(h, weights):
    """Tokens see the future. Hide key j from query i wherever j > i."""
    return _whole(h, weights, mask="none")


def _cannot_see_itself(mask):
    def near_miss(h, weights):
        """A token does not see itself. The diagonal is allowed: hide key j only where j > i."""
        return _whole(h, weights, mask=mask)

    return near_miss


latent_attention.near_miss("cannot-see-itself")(_cannot_see_itself("strict"))
latent_attention.near_miss("cannot-see-itself-nan-at-first")(_cannot_see_itself("strict or nan"))
latent_attention.near_miss("cannot-see-itself-uniform-at-first")(_cannot_see_itself("strict or uniform"))


@latent_attention.near_miss("heads-interleaved")
def _(h, weights):
    """Heads take every heads-th column. They are consecutive blocks: view the width as (heads, d_h), not (d_h, heads)."""
    return _whole(h, weights, heads="interleaved")


@latent_attention.near_miss("keys-and-values-swapped")
def _(h, weights):
    """Keys are expanded with w_uv and values with w_uk. It is the other way round."""
    return _whole(h, weights, swap=True)


@latent_attention.near_miss("values-from-keys")
def _(h, weights):
    """The expanded keys are used as values, too. Values have an up-projection of their own: c · w_uv."""
    return _whole(h, weights, values="keys")


@latent_attention.near_miss("heads-merged-without-transpose")
def _(h, weights):
    """The heads are not put side by side again: a `reshape` of (batch, heads, seq, d_h) mixes tokens. Transpose axes 1 and 2
    first."""
    return _whole(h, weights, merge="plain")


@latent_attention.near_miss("softmax-over-queries")
def _(h, weights):
    """The softmax runs over the queries. Each query shares out its attention among the keys: use dim=-1."""
    return _whole(h, weights, softmax_dim=-2)


@latent_attention.near_miss("sees-only-the-future")
def _(h, weights):
    """The mask is turned round: a token sees itself and what follows. Hide key j from query i wherever j > i, and keep the lower
    triangle."""
    return _whole(h, weights, mask="past")


@latent_attention.near_miss("rotated-together")
def _(h, weights):
    """Content and rotary part are joined before the rotation, so that the whole key is rotated. Rotate q_r and k_r alone, then
    join."""
    heads, at = weights.heads, torch.arange(h.shape[1], device=h.device)
    c, k_r = h @ weights.w_dkv, (h @ weights.w_kr)[:, None].expand(-1, heads, -1, -1)
    q = torch.cat([split_heads(h @ weights.w_q, heads), split_heads(h @ weights.w_qr, heads)], -1)
    k = torch.cat([split_heads(c @ weights.w_uk, heads), k_r], -1)
    v = split_heads(c @ weights.w_uv, heads)
    mixed = F.scaled_dot_product_attention(apply_rope(q, at), apply_rope(k, at), v, is_causal=True)
    return merge_heads(mixed) @ weights.w_o


@latent_attention.near_miss("latent-normalised")
def _(h, weights):
    """The latent is normalised. The full model does so, this exercise does not: expand the plain product."""
    c, k_r = cached(h, weights)
    return _layer(h, F.rms_norm(c, c.shape[-1:]), k_r, weights)


@latent_attention.near_miss("no-output-projection")
def _(h, weights):
    """The heads are put side by side and returned as they are. They still go through W_O."""
    return _whole(h, weights, project=False)


@latent_attention.near_miss("residual-added")
def _(h, weights):
    """The hidden rows are added to the result. The residual stream is the block's business: return the output of the layer alone."""
    return h + _whole(h, weights)


@latent_attention.near_miss("overflowing-softmax")
def _(h, weights):
    """The softmax is `exp` over its sum, which leaves the range of numbers for large scores and gives NaN. Subtract the row's maximum first, or use
    `torch.softmax`."""
    return _whole(h, weights, softmax="overflowing")


@latent_attention.near_miss("mask-not-low-enough")
def _(h, weights):
    """The future is hidden by a fixed number such as -100. A visible score may be lower still: use -inf."""
    return _whole(h, weights, softmax="not low enough")


@latent_attention.near_miss("double-through-float32")
def _(h, weights):
    """The softmax of float64 scores runs in float32 (`.float()` or `dtype=torch.float32`) and loses half of their digits. "At least
    float32" is `torch.promote_types(h.dtype, torch.float32)`."""
    return _whole(h, weights, softmax="float32")


# --- latent_attention_absorbed

latent_attention_absorbed = Exercise("latent_attention_absorbed", ref, see="mla-absorption")


def absorbed_args(g: Gen, queries: int, *shape: int, dtype: torch.dtype = torch.float32):
    """The last rows, the cache of the whole sequence, and the weights; the whole input too."""
    h, w = layer_args(g, *shape, dtype=torch.float64)
    c, k_r = cached(h, w)
    return (h[:, shape[1] - queries :].to(dtype), c.to(dtype), k_r.to(dtype), in_dtype(w, dtype)), h, w


def absorbed_case(g: Gen, queries: int, *shape: int):
    args, h, w = absorbed_args(g, queries, *shape)
    fact = torch_attention(h, w)[:, shape[1] - queries :].to(torch.float32)
    return (
        call(*args).expect(fact).says(f"{queries} of {shape[1]} tokens, batch {shape[0]}, {shape[3]} heads")
    )


@latent_attention_absorbed.group("values", share=3)
def _(g: Gen):
    """Equals the naive form for a whole prompt, a chunk and one token."""
    for queries, shape in ((5, SHAPES[0]), (6, SHAPES[1]), (3, SHAPES[2]), (1, SHAPES[1]), (2, SHAPES[3])):
        yield absorbed_case(g, queries, *shape)


@latent_attention_absorbed.group("edges", share=1)
def _(g: Gen):
    """Works for a single token, one head, a latent wider than the keys, a long cache, large scores, and other memory layouts."""
    for queries, shape in (
        (1, (2, 1, 8, 2, 4, 2, 6)),
        (2, (2, 4, 7, 1, 3, 2, 5)),
        (1, (1, 3, 5, 3, 1, 2, 9)),
    ):
        yield absorbed_case(g, queries, *shape)
    yield absorbed_case(g, 3, 1, 40, 8, 2, 4, 4, 6)
    (h, c, k_r, w), _, _ = absorbed_args(g, 3, 2, 5, 8, 2, 4, 2, 6)
    yield call(h, c.mT.contiguous().mT, k_r.mT.contiguous().mT, w).says("transposed views")
    h, w, c, k_r = large_scores(g)
    yield call(h[:, 3:], c, k_r, w).says("scores of hundreds and thousands")


@latent_attention_absorbed.group("cost", share=2)
def _(g: Gen):
    """Never builds the keys or the values, not for one head either."""
    heads, d_h, d_c, keys = 2, 64, 4, 256
    args, _, _ = absorbed_args(g, 1, 1, keys, 8, heads, d_h, 2, d_c)

    def all_heads(s: Subject) -> None:
        """one token against 256 latents"""
        m = s.measure("latent_attention_absorbed", *args)
        s.require(
            m.largest < keys * heads * d_h,
            f"a tensor of {m.largest:,} numbers is made: the keys of all heads",
        )

    def one_head(s: Subject) -> None:
        """one token against 256 latents, head by head"""
        m = s.measure("latent_attention_absorbed", *args)
        s.require(
            m.largest < keys * d_h,
            f"a tensor of {m.largest:,} numbers is made: the keys of one head have {keys * d_h:,}",
        )

    def flops(s: Subject) -> None:
        """FLOPs of one token against 256 latents"""
        m = s.measure("latent_attention_absorbed", *args)
        limit, wanted = 2 * keys * d_c * d_h, ref.decode_flops("absorbed", keys, 8, heads, d_h, d_c, 2)
        s.require(
            m.flops < limit,
            f"it costs {m.flops:,} FLOPs; absorbed it is about {wanted:,}, and the keys of one head cost {limit:,}",
        )

    yield from (scenario(all_heads), scenario(one_head), scenario(flops))


@latent_attention_absorbed.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype, in double and in half precision."""
    for dtype in (torch.float64, *HALF):
        args, _, _ = absorbed_args(g, 2, 2, 5, 8, 2, 4, 2, 6, dtype=dtype)
        yield call(*args).close(CHAIN[dtype], CHAIN[dtype]).says(str(dtype))


@latent_attention_absorbed.group("gradient", share=1)
def _(g: Gen):
    """Gradients flow to the rows, the cache and the matrices that are used."""
    for queries in (3, 1):
        args, _, _ = absorbed_args(g, queries, 2, 3, 6, 2, 4, 2, 3, dtype=torch.float64)
        yield call(*args).gradient().says(f"{queries} of 3 tokens")


@latent_attention_absorbed.near_miss("scale-from-absorbed-width")
def _(h, c, k_r, weights):
    """The scale is taken from the absorbed query, which is d_c + d_r wide. Absorption changes how a score is computed, not
    which score it is: the scale stays 1/√(d_h + d_r)."""
    return _layer(h, c, k_r, weights, width="d_c + d_r")


@latent_attention_absorbed.near_miss("scale-from-d_c")
def _(h, c, k_r, weights):
    """The scores are divided by √d_c. They are still the scores of keys of width d_h + d_r: divide by √(d_h + d_r)."""
    return _layer(h, c, k_r, weights, width="d_c")


@latent_attention_absorbed.near_miss("scale-without-rotary")
def _(h, c, k_r, weights):
    """The scale counts the content part alone. Divide by √(d_h + d_r)."""
    return _layer(h, c, k_r, weights, width="d_h")


@latent_attention_absorbed.near_miss("mask-aligned-at-the-start")
def _(h, c, k_r, weights):
    """The causal mask is aligned at the first key, as if the rows in h were the first of the sequence. They are the last:
    query i sees keys up to keys - queries + i."""
    return _layer(h, c, k_r, weights, mask="start")


@latent_attention_absorbed.near_miss("unmasked")
def _(h, c, k_r, weights):
    """Rows in h see later keys. One new token needs no mask, a chunk or a whole prompt does."""
    return _layer(h, c, k_r, weights, mask="none")


@latent_attention_absorbed.near_miss("positions-from-zero")
def _(h, c, k_r, weights):
    """The queries are rotated from position 0. They are the last rows: their positions start at keys - queries."""
    return _layer(h, c, k_r, weights, positions="zero")


@latent_attention_absorbed.near_miss("positions-one-late")
def _(h, c, k_r, weights):
    """The queries are rotated one position too far. They are the last rows: their positions end at keys - 1."""
    return _layer(h, c, k_r, weights, positions="late")


@latent_attention_absorbed.near_miss("query-not-rotated")
def _(h, c, k_r, weights):
    """The rotary part of the query is not rotated. k_r comes rotated, q_r does not: apply `apply_rope` to it."""
    return _layer(h, c, k_r, weights, rope_q="none")


@latent_attention_absorbed.near_miss("key-rotated-again")
def _(h, c, k_r, weights):
    """The shared key is rotated a second time. It comes rotated, as it lies in the cache: use it as it is."""
    return _layer(h, c, apply_rope(k_r, torch.arange(c.shape[1], device=h.device)), weights)


@latent_attention_absorbed.near_miss("no-rotary-scores")
def _(h, c, k_r, weights):
    """The rotary scores q_r · k_r are left out, so positions play no part. Add them to the content scores."""
    return _layer(h, c, torch.zeros_like(k_r), weights)


@latent_attention_absorbed.near_miss("latents-detached")
def _(h, c, k_r, weights):
    """The latents are cut off from the result, so w_dkv does not learn through it. Leave `detach` out."""
    return _layer(h, c.detach(), k_r, weights)


@latent_attention_absorbed.near_miss("keys-and-values-swapped")
def _(h, c, k_r, weights):
    """W_UV is absorbed into the query and W_UK into the output. It is the other way round."""
    return _layer(h, c, k_r, weights, swap=True)


@latent_attention_absorbed.near_miss("heads-merged-without-transpose")
def _(h, c, k_r, weights):
    """The heads are not put side by side again: a `reshape` of (batch, heads, queries, d_h) mixes tokens. Transpose axes 1 and
    2 first."""
    return _layer(h, c, k_r, weights, merge="plain")


@latent_attention_absorbed.near_miss("heads-interleaved")
def _(h, c, k_r, weights):
    """Heads take every heads-th column. They are consecutive blocks: view the width as (heads, d_h), not (d_h, heads)."""
    return _layer(h, c, k_r, weights, heads="interleaved")


@latent_attention_absorbed.near_miss("w_uk-interleaved")
def _(h, c, k_r, weights):
    """W_UK is cut into heads the wrong way: its columns are consecutive blocks. Reshape it to (d_c, heads, d_h), not to
    (d_c, d_h, heads)."""
    return _layer(h, c, k_r, weights, heads="w_uk interleaved")


@latent_attention_absorbed.near_miss("w_uv-interleaved")
def _(h, c, k_r, weights):
    """W_UV is cut into heads the wrong way: its columns are consecutive blocks. Reshape it to (d_c, heads, d_h), not to
    (d_c, d_h, heads)."""
    return _layer(h, c, k_r, weights, heads="w_uv interleaved")


@latent_attention_absorbed.near_miss("expanded")
def _(h, c, k_r, weights):
    """The result is right, but keys and values are built for every cached token. Move W_UK to the query,
    (q W_UKᵀ) cᵀ, and W_UV behind the weighted mean of the latents: then no tensor has a row of width d_h per cached token."""
    return _layer(h, c, k_r, weights)


@latent_attention_absorbed.near_miss("expanded-head-by-head")
def _(h, c, k_r, weights):
    """The result is right, but each head's keys and values are built in turn: less memory, the same work. Move W_UK to the
    query and W_UV behind the weighted mean of the latents, in each head as well."""
    d_h, d_r, out = weights.w_uk.shape[1] // weights.heads, k_r.shape[-1], []
    for i in range(weights.heads):
        content, rotary = slice(i * d_h, (i + 1) * d_h), slice(i * d_r, (i + 1) * d_r)
        one = dataclasses.replace(
            weights,
            w_q=weights.w_q[:, content],
            w_qr=weights.w_qr[:, rotary],
            w_uk=weights.w_uk[:, content],
            w_uv=weights.w_uv[:, content],
            heads=1,
        )
        out.append(_layer(h, c, k_r, one, project=False))
    return torch.cat(out, -1) @ weights.w_o


@latent_attention_absorbed.near_miss("unscaled")
def _(h, c, k_r, weights):
    """The scores are not scaled. Divide by √(d_h + d_r) before the softmax."""
    return _layer(h, c, k_r, weights, width="one")


@latent_attention_absorbed.near_miss("only-content-scaled")
def _(h, c, k_r, weights):
    """Only the content scores are scaled. Add the rotary scores first, then divide the sum by √(d_h + d_r)."""
    return _layer(h, c, k_r, weights, width="content alone")


@latent_attention_absorbed.near_miss("taken-for-the-first-rows")
def _(h, c, k_r, weights):
    """The rows in h are rotated and masked as if they were the first of the sequence. They are the last: row i stands at position
    keys - queries + i and sees keys up to there."""
    return _layer(h, c, k_r, weights, positions="zero", mask="start")


@latent_attention_absorbed.near_miss("sees-one-ahead")
def _(h, c, k_r, weights):
    """A row sees the key after its own. Query i sees keys up to keys - queries + i."""
    return _layer(h, c, k_r, weights, mask="ahead")


@latent_attention_absorbed.near_miss("only-a-square-mask")
def _(h, c, k_r, weights):
    """The mask is applied to a whole prompt only. A chunk of several rows needs it, too: query i sees keys up to
    keys - queries + i."""
    return _layer(h, c, k_r, weights, mask="end" if h.shape[1] == c.shape[1] else "none")


@latent_attention_absorbed.near_miss("w_uk-for-the-values")
def _(h, c, k_r, weights):
    """The weighted mean of the latents goes through W_UK again. Values have an up-projection of their own: W_UV."""
    return _layer(h, c, k_r, dataclasses.replace(weights, w_uv=weights.w_uk))


@latent_attention_absorbed.near_miss("w_uk-reshaped")
def _(h, c, k_r, weights):
    """W_UK is brought to (heads, d_h, d_c) by `reshape`, which mixes its numbers. Reshape to (d_c, heads, d_h), then permute the
    axes."""
    d_c, width = weights.w_uk.shape
    blocks = weights.w_uk.reshape(weights.heads, width // weights.heads, d_c)
    return _layer(h, c, k_r, dataclasses.replace(weights, w_uk=blocks.permute(2, 0, 1).reshape(d_c, width)))


@latent_attention_absorbed.near_miss("no-output-projection")
def _(h, c, k_r, weights):
    """The heads are put side by side and returned as they are. They still go through W_O."""
    return _layer(h, c, k_r, weights, project=False)


@latent_attention_absorbed.near_miss("overflowing-softmax")
def _(h, c, k_r, weights):
    """The softmax is `exp` over its sum, which leaves the range of numbers for large scores and gives NaN. Subtract the row's maximum first, or use
    `torch.softmax`."""
    return _absorbed(h, c, k_r, weights, "overflowing")


@latent_attention_absorbed.near_miss("mask-not-low-enough")
def _(h, c, k_r, weights):
    """Later keys are hidden by a fixed number such as -100. A visible score may be lower still: use -inf."""
    return _absorbed(h, c, k_r, weights, "not low enough")


@latent_attention_absorbed.near_miss("double-through-float32")
def _(h, c, k_r, weights):
    """The softmax of float64 scores runs in float32 (`.float()` or `dtype=torch.float32`) and loses half of their digits. "At least
    float32" is `torch.promote_types(h.dtype, torch.float32)`."""
    return _absorbed(h, c, k_r, weights, "float32")


# --- decoupled_rope_scores

decoupled_rope_scores = Exercise("decoupled_rope_scores", ref, see="mla-decoupled-rope")


def score_args(
    g: Gen,
    batch: int,
    heads: int,
    seq: int,
    d_h: int,
    d_r: int,
    dtype: torch.dtype = torch.float32,
    positions=None,
):
    parts = [g.randn(batch, heads, seq, d, dtype=dtype) for d in (d_h, d_r, d_h)]
    positions = g.ints(0, 50, seq) if positions is None else positions
    return *parts, g.randn(batch, seq, d_r, dtype=dtype), positions


def wide_key_scores(q_c: Tensor, q_r: Tensor, k_c: Tensor, k_r: Tensor, positions: Tensor) -> Tensor:
    """The scores of concatenated queries and keys: an independent fact."""
    shared = apply_rope(k_r, positions)[:, None].expand(-1, q_c.shape[1], -1, -1)
    q, k = torch.cat([q_c, apply_rope(q_r, positions)], -1), torch.cat([k_c, shared], -1)
    return torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])


@decoupled_rope_scores.group("values", share=3)
def _(g: Gen):
    """Adds content scores and rotated scores, scaled by 1/√(d_h + d_r)."""
    one = (
        g.tensor([[[[3.0, 0.0]]]]),
        g.tensor([[[[1.0, 0.0]]]]),
        g.tensor([[[[2.0, 0.0]]]]),
        g.tensor([[[1.0, 0.0]]]),
    )
    yield call(*one, g.tensor([5])).expect(g.tensor([[[[3.5]]]])).says("(3·2 + 1·1)/√4 = 3.5")
    for batch, heads, seq, d_h, d_r in ((1, 2, 5, 4, 2), (2, 3, 4, 4, 4), (3, 2, 6, 2, 4)):
        args = score_args(g, batch, heads, seq, d_h, d_r)
        yield (
            call(*args)
            .expect(wide_key_scores(*args))
            .says(f"{batch} sequences, {heads} heads, any positions")
        )


@decoupled_rope_scores.group("edges", share=1)
def _(g: Gen):
    """Works for one token, one head, odd content widths, late, repeated and negative positions, and other memory layouts."""
    cases = (
        ((2, 1, 4, 3, 2), [0, 1, 2, 3]),
        ((1, 3, 1, 5, 4), [7]),
        ((2, 2, 4, 2, 2), [900, 901, 3, 3]),
        ((1, 2, 4, 2, 4), [-3, -1, 0, 4]),
    )
    for shape, positions in cases:
        args = score_args(g, *shape, positions=g.tensor(positions))
        yield call(*args).expect(wide_key_scores(*args)).close(atol=1e-4).says(f"positions {positions}")
    q_c, q_r, k_c, k_r, positions = score_args(g, 2, 3, 4, 4, 2)
    views = [x.mT.contiguous().mT for x in (q_c, q_r, k_c, k_r)]
    yield call(*views, positions).says("transposed views")


@decoupled_rope_scores.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype, in double and in half precision."""
    for dtype in (torch.float64, *HALF):
        args = score_args(g, 2, 2, 4, 4, 2, dtype)
        yield call(*args).close(CHAIN[dtype], CHAIN[dtype]).says(str(dtype))
    late = g.tensor([3001, 3002, 3007, 3013])  # half precision has no such numbers
    for dtype in HALF:
        args = score_args(g, 1, 2, 4, 4, 2, dtype, positions=late)
        yield call(*args).close(CHAIN[dtype], CHAIN[dtype]).says(f"{dtype}, positions above 3,000")


@decoupled_rope_scores.group("gradient", share=1)
def _(g: Gen):
    """Gradients flow to all four parts."""
    yield call(*score_args(g, 2, 3, 3, 4, 2, torch.float64)).gradient()


def _scores(q_c, q_r, k_c, k_r, at_q, at_k, scale_c, scale_r):
    turned_q = q_r if at_q is None else apply_rope(q_r, at_q)
    turned_k = k_r if at_k is None else apply_rope(k_r, at_k)
    turned_k = turned_k[:, None] if turned_k.dim() == 3 else turned_k
    return q_c @ k_c.mT * scale_c**-0.5 + turned_q @ turned_k.mT * scale_r**-0.5


@decoupled_rope_scores.near_miss("content-rotated")
def _(q_c, q_r, k_c, k_r, positions):
    """The content part is rotated, too. It must stay as it is, or W_UK could not be absorbed: rotate q_r and k_r alone."""
    width = q_c.shape[-1] + q_r.shape[-1]
    q_c, k_c = apply_rope(q_c, positions), apply_rope(k_c, positions)
    return _scores(q_c, q_r, k_c, k_r, positions, positions, width, width)


@decoupled_rope_scores.near_miss("only-content-rotated")
def _(q_c, q_r, k_c, k_r, positions):
    """The parts are mixed up: content is rotated and the rotary part is not. Rotate q_r and k_r alone."""
    width = q_c.shape[-1] + q_r.shape[-1]
    q_c, k_c = apply_rope(q_c, positions), apply_rope(k_c, positions)
    return _scores(q_c, q_r, k_c, k_r, None, None, width, width)


@decoupled_rope_scores.near_miss("widths-swapped")
def _(q_c, q_r, k_c, k_r, positions):
    """Each part is divided by the root of the other part's width. There is one scale for the sum, 1/√(d_h + d_r)."""
    return _scores(q_c, q_r, k_c, k_r, positions, positions, q_r.shape[-1], q_c.shape[-1])


@decoupled_rope_scores.near_miss("a-scale-per-part")
def _(q_c, q_r, k_c, k_r, positions):
    """Each part has a scale of its own. The two parts are one key of width d_h + d_r: scale the sum by 1/√(d_h + d_r)."""
    return _scores(q_c, q_r, k_c, k_r, positions, positions, q_c.shape[-1], q_r.shape[-1])


@decoupled_rope_scores.near_miss("scale-without-rotary")
def _(q_c, q_r, k_c, k_r, positions):
    """The scale counts the content part alone. Divide by √(d_h + d_r)."""
    return _scores(q_c, q_r, k_c, k_r, positions, positions, q_c.shape[-1], q_c.shape[-1])


@decoupled_rope_scores.near_miss("scale-from-rotary")
def _(q_c, q_r, k_c, k_r, positions):
    """The scale counts the rotary part alone. Divide by √(d_h + d_r)."""
    return _scores(q_c, q_r, k_c, k_r, positions, positions, q_r.shape[-1], q_r.shape[-1])


@decoupled_rope_scores.near_miss("unscaled")
def _(q_c, q_r, k_c, k_r, positions):
    """The scores are not scaled. Divide by √(d_h + d_r)."""
    return _scores(q_c, q_r, k_c, k_r, positions, positions, 1, 1)


@decoupled_rope_scores.near_miss("positions-ignored")
def _(q_c, q_r, k_c, k_r, positions):
    """Rows are rotated by their index. Use the positions that are given: they may start anywhere and have gaps."""
    width, index = q_c.shape[-1] + q_r.shape[-1], torch.arange(len(positions))
    return _scores(q_c, q_r, k_c, k_r, index, index, width, width)


@decoupled_rope_scores.near_miss("key-not-rotated")
def _(q_c, q_r, k_c, k_r, positions):
    """Only the query is rotated, so scores depend on absolute positions. Rotate k_r by its own positions as well."""
    width = q_c.shape[-1] + q_r.shape[-1]
    return _scores(q_c, q_r, k_c, k_r, positions, None, width, width)


@decoupled_rope_scores.near_miss("query-not-rotated")
def _(q_c, q_r, k_c, k_r, positions):
    """Only the key is rotated, so scores depend on absolute positions. Rotate q_r by the positions as well."""
    width = q_c.shape[-1] + q_r.shape[-1]
    return _scores(q_c, q_r, k_c, k_r, None, positions, width, width)


@decoupled_rope_scores.near_miss("key-rotated-by-its-index")
def _(q_c, q_r, k_c, k_r, positions):
    """The query is rotated by the given positions and the key by its index. Both stand at the given positions."""
    width, index = q_c.shape[-1] + q_r.shape[-1], torch.arange(len(positions))
    return _scores(q_c, q_r, k_c, k_r, positions, index, width, width)


@decoupled_rope_scores.near_miss("keys-by-queries")
def _(q_c, q_r, k_c, k_r, positions):
    """The scores are transposed. A row belongs to a query, a column to a key: q · kᵀ."""
    width = q_c.shape[-1] + q_r.shape[-1]
    return _scores(q_c, q_r, k_c, k_r, positions, positions, width, width).mT


@decoupled_rope_scores.near_miss("softmax-applied")
def _(q_c, q_r, k_c, k_r, positions):
    """These are attention weights. The scores are asked for, before mask and softmax."""
    width = q_c.shape[-1] + q_r.shape[-1]
    return _scores(q_c, q_r, k_c, k_r, positions, positions, width, width).softmax(-1)


@decoupled_rope_scores.near_miss("head-axis-missing")
def _(q_c, q_r, k_c, k_r, positions):
    """The shared key has no head axis, so its batch axis meets the heads: an error, or the keys of another sequence. Add the
    axis: `k_r[:, None]`."""
    turned = apply_rope(q_r, positions) @ apply_rope(k_r, positions).mT
    return (q_c @ k_c.mT + turned) * (q_c.shape[-1] + q_r.shape[-1]) ** -0.5


@decoupled_rope_scores.near_miss("shared-key-detached")
def _(q_c, q_r, k_c, k_r, positions):
    """No gradient reaches the shared key, so w_kr does not learn. Leave `detach` out."""
    width = q_c.shape[-1] + q_r.shape[-1]
    return _scores(q_c, q_r, k_c, k_r.detach(), positions, positions, width, width)


@decoupled_rope_scores.near_miss("nothing-rotated")
def _(q_c, q_r, k_c, k_r, positions):
    """Nothing is rotated. q_r and k_r come unrotated: turn both with `apply_rope`."""
    width = q_c.shape[-1] + q_r.shape[-1]
    return _scores(q_c, q_r, k_c, k_r, None, None, width, width)


@decoupled_rope_scores.near_miss("keys-turned-backwards")
def _(q_c, q_r, k_c, k_r, positions):
    """The key is turned against the query, so scores depend on the sum of the positions. Rotate both the same way."""
    width = q_c.shape[-1] + q_r.shape[-1]
    return _scores(q_c, q_r, k_c, k_r, positions, -positions, width, width)


@decoupled_rope_scores.near_miss("masked")
def _(q_c, q_r, k_c, k_r, positions):
    """A causal mask is applied. This function returns the scores of every query with every key: leave the mask out."""
    width = q_c.shape[-1] + q_r.shape[-1]
    scores = _scores(q_c, q_r, k_c, k_r, positions, positions, width, width)
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)


@decoupled_rope_scores.near_miss("rotated-together")
def _(q_c, q_r, k_c, k_r, positions):
    """Content and rotary part are joined before the rotation, so that the whole key is rotated. Rotate q_r and k_r alone, then
    join."""
    shared = k_r[:, None].expand(-1, q_r.shape[1], -1, -1)
    q, k = (apply_rope(torch.cat(x, -1), positions) for x in ((q_c, q_r), (k_c, shared)))
    return q @ k.mT * q.shape[-1] ** -0.5


@decoupled_rope_scores.near_miss("no-rotary-scores")
def _(q_c, q_r, k_c, k_r, positions):
    """The rotary scores q_r · k_r are left out, so positions play no part. Add them to the content scores."""
    return q_c @ k_c.mT * (q_c.shape[-1] + q_r.shape[-1]) ** -0.5


@decoupled_rope_scores.near_miss("scale-without-the-root")
def _(q_c, q_r, k_c, k_r, positions):
    """The scores are divided by d_h + d_r. Divide by its root."""
    width = (q_c.shape[-1] + q_r.shape[-1]) ** 2
    return _scores(q_c, q_r, k_c, k_r, positions, positions, width, width)


@decoupled_rope_scores.near_miss("scale-from-two-roots")
def _(q_c, q_r, k_c, k_r, positions):
    """The scores are divided by √d_h + √d_r. The root is taken of the sum: √(d_h + d_r)."""
    width = (q_c.shape[-1] ** 0.5 + q_r.shape[-1] ** 0.5) ** 2
    return _scores(q_c, q_r, k_c, k_r, positions, positions, width, width)


@decoupled_rope_scores.near_miss("positions-in-half-precision")
def _(q_c, q_r, k_c, k_r, positions):
    """Positions, or angles, are computed in the dtype of the rows. Half precision does not hold large positions: leave them integers,
    `apply_rope` takes care of the angles."""
    width, at = q_c.shape[-1] + q_r.shape[-1], positions.to(q_r.dtype)
    return _scores(q_c, q_r, k_c, k_r, at, at, width, width)


# --- LatentCache

LatentCache = Exercise("LatentCache", ref, see="mla-cache")
CPU = "cpu"
FEW = 4  # a length may be a tensor


def rows(g: Gen, batch: int, seq: int, d_c: int, d_r: int, dtype: torch.dtype = torch.float32):
    return g.randn(batch, seq, d_c, dtype=dtype), g.randn(batch, seq, d_r, dtype=dtype)


def updates(
    g: Gen, cuts: list[int], batch=2, max_seq=8, d_c=5, d_r=2, dtype=torch.float32, device: Any = CPU
):
    """A case that hands rows over in pieces; the end of each piece is in `cuts`."""
    c, k_r = rows(g, batch, cuts[-1], d_c, d_r, dtype)

    def run(s: Subject) -> None:
        cache, start = s.new("LatentCache", batch, max_seq, d_c, d_r, dtype, device), 0
        for stop in cuts:
            got = s.method(cache, "update", c[:, start:stop], k_r[:, start:stop])
            s.require_close(
                tuple(got), (c[:, :stop], k_r[:, :stop]), "it is not what was handed over", 0.0, 0.0
            )
            s.get(cache, "length")
            start = stop

    return scenario(run).says(f"updates end at {cuts}, {str(dtype).removeprefix('torch.')}")


@LatentCache.group("values", share=2)
def _(g: Gen):
    """Returns every latent and rotary key so far, for a prompt, chunks and single tokens."""
    yield updates(g, [3])
    yield updates(g, [1, 2, 3, 4])
    yield updates(g, [4, 5, 8])
    yield updates(g, [2, 5], batch=3, d_c=2, d_r=4)
    yield updates(g, [1, 4], batch=1, d_c=3, d_r=3)


@LatentCache.group("reset", share=1)
def _(g: Gen):
    """Forgets everything on reset, has its room again, and shares nothing with another cache."""
    c, k_r = rows(g, 2, 6, 4, 2)

    def again(s: Subject) -> None:
        """reset, then other rows"""
        cache = s.new("LatentCache", 2, 6, 4, 2, torch.float32, CPU)
        s.method(cache, "update", c[:, :5], k_r[:, :5])
        s.ask_method(cache, "reset")
        s.get(cache, "length")
        s.method(cache, "update", c[:, 5:], k_r[:, 5:])
        s.get(cache, "length")
        s.method(cache, "update", c[:, :5], k_r[:, :5])

    def fresh(s: Subject) -> None:
        """reset of a new cache"""
        cache = s.new("LatentCache", 2, 6, 4, 2, torch.float32, CPU)
        s.get(cache, "length")
        s.ask_method(cache, "reset")
        s.method(cache, "update", c, k_r)

    def two(s: Subject) -> None:
        """two caches at once"""
        one, other = (s.new("LatentCache", 2, 6, 4, 2, torch.float32, CPU) for _ in range(2))
        s.method(one, "update", c[:, :2], k_r[:, :2])
        s.method(other, "update", c[:, 3:], k_r[:, 3:])
        s.method(one, "update", c[:, 2:3], k_r[:, 2:3])
        s.get(one, "length")
        s.get(other, "length")

    yield from (scenario(again), scenario(fresh), scenario(two))


@LatentCache.group("overflow", share=1)
def _(g: Gen):
    """Refuses more than max_seq tokens with a ValueError, and nothing is changed then."""
    c, k_r = rows(g, 2, 7, 4, 2)

    def full(s: Subject) -> None:
        """a chunk that does not fit"""
        cache = s.new("LatentCache", 2, 4, 4, 2, torch.float32, CPU)
        s.method(cache, "update", c[:, :3], k_r[:, :3])
        s.method_raises(ValueError, cache, "update", c[:, 3:5], k_r[:, 3:5])
        s.get(cache, "length")
        s.method(cache, "update", c[:, 5:6], k_r[:, 5:6])
        s.method_raises(ValueError, cache, "update", c[:, 6:], k_r[:, 6:])
        s.get(cache, "length")

    def prompt(s: Subject) -> None:
        """a prompt that does not fit"""
        cache = s.new("LatentCache", 2, 4, 4, 2, torch.float32, CPU)
        s.method_raises(ValueError, cache, "update", c[:, :5], k_r[:, :5])
        s.get(cache, "length")
        s.method(cache, "update", c[:, :4], k_r[:, :4])

    yield from (scenario(full), scenario(prompt))


@LatentCache.group("dtypes", share=1)
def _(g: Gen):
    """Keeps rows in the dtype it is made with, on the device it is given."""
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        yield updates(g, [2, 3], dtype=dtype)
    yield updates(g, [1, 2], device=torch.device("cpu"))
    given = rows(g, 1, 2, 3, 2)

    def elsewhere(s: Subject) -> None:
        """another device"""
        # "meta" keeps shapes and no numbers: they cannot be copied into buffers that lie elsewhere. Whatever else fails there
        # (a number cannot be read, the answer cannot be sent) says nothing about the cache.
        source = s.new("LatentCache", 1, 4, 3, 2, torch.float32, CPU)
        both = s.new((source, "update"), *given)
        live = [s.new((s.new((both, "__getitem__"), i), "to"), "meta") for i in (0, 1)]
        there = True
        try:
            cache = s.new("LatentCache", 1, 4, 3, 2, torch.float32, "meta")
            s.ask_method(cache, "update", *live)
        except Mismatch:
            there = s.transcript[-1].error.name != "NotImplementedError"  # "Cannot copy out of meta tensor"
        s.transcript[-1] = Outcome()
        s.require(there, "the buffers do not lie on the device that was asked for")

    yield scenario(elsewhere)


@LatentCache.group("memory", share=1)
def _(g: Gen):
    """Holds d_c + d_r numbers per token of room, and no more."""
    batch, max_seq, d_c, d_r = 2, 12, 6, 2
    c, k_r = rows(g, batch, 9, d_c, d_r)

    def held(s: Subject) -> None:
        """what is kept after a prompt and a token"""
        cache = s.new("LatentCache", batch, max_seq, d_c, d_r, torch.float32, CPU)
        s.ask_method(cache, "update", c[:, :8], k_r[:, :8])
        s.ask_method(cache, "update", c[:, 8:], k_r[:, 8:])
        numbers, places = s.held(cache), batch * max_seq
        complaint = f"{numbers / places:g} numbers are kept per token, not d_c + d_r = {d_c + d_r}"
        room = places * (d_c + d_r) + FEW
        beside = f"{numbers - places * (d_c + d_r)} numbers are kept beside the {places * (d_c + d_r)} of the cache"
        s.require(numbers <= room or numbers % places == 0, beside)
        s.require(numbers <= places * (d_c + 2 * d_r), complaint)
        s.require(numbers <= room, complaint)
        s.require(numbers >= batch * 9 * (d_c + d_r), "the rows are not kept in the cache itself")

    def rotary(s: Subject) -> None:
        """a cache with a wide rotary key"""
        cache = s.new("LatentCache", batch, max_seq, 2, 6, torch.float32, CPU)
        s.ask_method(cache, "update", k_r[:, :4], c[:, :4])
        numbers, places = s.held(cache), batch * max_seq
        s.require(
            numbers <= places * 8 + FEW or numbers % places == 0,
            f"{numbers - places * 8} numbers are kept beside the {places * 8} of the cache",
        )
        s.require(
            numbers <= places * 8 + FEW, f"{numbers / places:g} numbers are kept per token, not d_c + d_r = 8"
        )

    yield from (scenario(held), scenario(rotary))


class _Cache:
    """Parts from which the near-misses are made: two buffers and a length."""

    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        self.max_seq = max_seq
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k_r = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.length = 0

    def check(self, c):
        if self.length + c.shape[1] > self.max_seq:
            raise ValueError(f"LatentCache.update needs length + new <= {self.max_seq}")

    def write(self, c, k_r):
        end = self.length + c.shape[1]
        self.c[:, self.length : end], self.k_r[:, self.length : end] = c, k_r
        self.length = end

    def update(self, c, k_r):
        self.check(c)
        self.write(c, k_r)
        return self.c[:, : self.length], self.k_r[:, : self.length]

    def reset(self):
        self.length = 0


@LatentCache.near_miss("keys-and-values")
class _(_Cache):
    """A key and a value of the latent's width are kept for every token. One latent stands for both: keep c once, beside k_r."""

    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        super().__init__(batch, max_seq, d_c, d_r, dtype, device)
        self.v = torch.zeros_like(self.c)

    def update(self, c, k_r):
        self.check(c)
        self.v[:, self.length : self.length + c.shape[1]] = c
        return super().update(c, k_r)


@LatentCache.near_miss("room-for-two-rotary-keys")
class _(_Cache):
    """More than one rotary key is kept per token. All heads share one: d_r numbers beside the latent."""

    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        super().__init__(batch, max_seq, d_c, d_r, dtype, device)
        self.copies = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)


@LatentCache.near_miss("returns-only-the-new")
class _(_Cache):
    """`update` returns the new rows alone. Attention needs all tokens so far: return everything that is held."""

    def update(self, c, k_r):
        super().update(c, k_r)
        return c, k_r


@LatentCache.near_miss("returns-the-whole-buffer")
class _(_Cache):
    """`update` returns the whole buffer, with rows that were never written. Cut it at `length`."""

    def update(self, c, k_r):
        super().update(c, k_r)
        return self.c.clone(), self.k_r.clone()


@LatentCache.near_miss("writes-at-the-start")
class _(_Cache):
    """New rows overwrite the first ones. Write them behind what is held: from `length` on."""

    def write(self, c, k_r):
        new = c.shape[1]
        self.c[:, :new], self.k_r[:, :new] = c, k_r
        self.length += new


@LatentCache.near_miss("counts-updates")
class _(_Cache):
    """`length` grows by one per update. A prompt or a chunk brings several tokens: add `c.shape[1]`."""

    def write(self, c, k_r):
        end = self.length + c.shape[1]
        self.c[:, self.length : end], self.k_r[:, self.length : end] = c, k_r
        self.length += 1


@LatentCache.near_miss("stale-after-reset")
class _(_Cache):
    """After `reset` the old rows come back: the buffers are cleared and `length` is not. Set `length` to 0; the buffers
    may stay as they are."""

    def reset(self):
        self.c.zero_()
        self.k_r.zero_()


@LatentCache.near_miss("reset-of-the-length-alone")
class _(_Cache):
    """`reset` sets `length` to 0, but what `update` returns does not follow it: the old rows still come first. Let the
    returned rows end at `length`, or empty what is kept."""

    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        super().__init__(batch, 0, d_c, d_r, dtype, device)
        self.c, self.k_r, self.max_seq = self.c[:, :0], self.k_r[:, :0], max_seq

    def update(self, c, k_r):
        self.check(c)
        self.c, self.k_r = torch.cat([self.c, c], 1), torch.cat([self.k_r, k_r], 1)
        self.length += c.shape[1]
        return self.c, self.k_r


@LatentCache.near_miss("drops-what-does-not-fit")
class _(_Cache):
    """Rows that do not fit are dropped in silence, and the model goes on with a hole in its past. Raise a ValueError."""

    def update(self, c, k_r):
        room = self.max_seq - self.length
        return super().update(c[:, :room], k_r[:, :room])


@LatentCache.near_miss("partly-written")
class _(_Cache):
    """A refused update has stored the rows that still fitted. Compare length + new with max_seq before the first row is
    written."""

    def update(self, c, k_r):
        for t in range(c.shape[1]):
            held = super().update(c[:, t : t + 1], k_r[:, t : t + 1])
        return held


@LatentCache.near_miss("no-limit")
class _(_Cache):
    """The cache grows past max_seq. Its room is fixed: raise a ValueError when the new rows do not fit."""

    def update(self, c, k_r):
        more = self.length + c.shape[1] - self.c.shape[1]
        if more > 0:
            self.c, self.k_r = F.pad(self.c, (0, 0, 0, more)), F.pad(self.k_r, (0, 0, 0, more))
        self.write(c, k_r)
        return self.c[:, : self.length], self.k_r[:, : self.length]


@LatentCache.near_miss("forgets-the-oldest")
class _(_Cache):
    """When the room is used up the oldest rows are dropped. That is a rolling cache; this one raises a ValueError and
    changes nothing."""

    def check(self, c):
        pass

    def update(self, c, k_r):
        everything = (
            torch.cat([self.c[:, : self.length], c], 1),
            torch.cat([self.k_r[:, : self.length], k_r], 1),
        )
        last = [x[:, -self.max_seq :] for x in everything]
        self.length = last[0].shape[1]
        self.c[:, : self.length], self.k_r[:, : self.length] = last
        return tuple(last)


@LatentCache.near_miss("changed-by-a-refusal")
class _(_Cache):
    """An update that is refused leaves its mark: `length` has grown already. Check for room before anything is changed."""

    def update(self, c, k_r):
        start, self.length = self.length, self.length + c.shape[1]
        if self.length > self.max_seq:
            raise ValueError("LatentCache.update needs room")
        self.c[:, start : self.length], self.k_r[:, start : self.length] = c, k_r
        return self.c[:, : self.length], self.k_r[:, : self.length]


def _raising(error):
    class near_miss(_Cache):
        """Too many tokens end in another error than a ValueError, a `RuntimeError` of the copy perhaps. Compare length + new
        with max_seq and raise the ValueError yourself."""

        def check(self, c):
            if self.length + c.shape[1] > self.max_seq:
                raise error("the cache is full")

    return near_miss


LatentCache.near_miss("another-error")(_raising(RuntimeError))
for _error in (AssertionError, IndexError, OverflowError, MemoryError):
    LatentCache.near_miss(f"{_error.__name__.lower()}-for-valueerror")(_raising(_error))


@LatentCache.near_miss("one-token-too-many")
class _(_Cache):
    """One token more than max_seq is taken. Refuse as soon as length + new > max_seq."""

    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        super().__init__(batch, max_seq + 1, d_c, d_r, dtype, device)


@LatentCache.near_miss("emptied-by-a-refusal")
class _(_Cache):
    """An update that is refused has emptied the cache. Raise the ValueError, and leave everything as it is."""

    def check(self, c):
        if self.length + c.shape[1] > self.max_seq:
            self.length = 0
            raise ValueError("LatentCache.update needs room")


@LatentCache.near_miss("newest-first")
class _(_Cache):
    """The newest row comes first. Rows come back oldest first, in the order in which they were handed over."""

    def update(self, c, k_r):
        return tuple(x.flip(1) for x in super().update(c, k_r))


@LatentCache.near_miss("latest-key-at-the-start")
class _(_Cache):
    """Latents are written behind those before, but the rotary key always at the start. Both belong to the same token: write both
    from `length` on."""

    def write(self, c, k_r):
        new = c.shape[1]
        self.c[:, self.length : self.length + new], self.k_r[:, :new] = c, k_r
        self.length += new


@LatentCache.near_miss("length-counts-updates")
class _(_Cache):
    """`length` is the number of updates. It is the number of tokens: a prompt or a chunk brings several."""

    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        super().__init__(batch, max_seq, d_c, d_r, dtype, device)
        self.used = 0

    def update(self, c, k_r):
        end = self.used + c.shape[1]
        if end > self.max_seq:
            raise ValueError("LatentCache.update needs room")
        self.c[:, self.used : end], self.k_r[:, self.used : end] = c, k_r
        self.used, self.length = end, self.length + 1
        return self.c[:, :end], self.k_r[:, :end]

    def reset(self):
        self.used = self.length = 0


@LatentCache.near_miss("joined-along-the-batch")
class _(_Cache):
    """New rows are put behind the old ones along the batch axis, as if they were other sequences. Tokens stand along axis 1."""

    def update(self, c, k_r):
        self.check(c)
        first = self.length == 0
        self.c, self.k_r = (c, k_r) if first else (torch.cat([self.c, c]), torch.cat([self.k_r, k_r]))
        self.length += c.shape[1]
        return self.c, self.k_r


@LatentCache.near_miss("on-the-cpu-always")
class _(_Cache):
    """The buffers lie on the CPU whatever device is asked for. Pass `device` on when they are made."""

    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        super().__init__(batch, max_seq, d_c, d_r, dtype, CPU)


@LatentCache.near_miss("one-token-too-few")
class _(_Cache):
    """The last place is never used. Exactly max_seq tokens fit: refuse when length + new > max_seq, not at equality."""

    def check(self, c):
        if self.length + c.shape[1] >= self.max_seq:
            raise ValueError("LatentCache.update needs room")


@LatentCache.near_miss("always-float32")
class _(_Cache):
    """The buffers are float32 whatever dtype is asked for. Pass `dtype` and `device` on when they are made."""

    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        super().__init__(batch, max_seq, d_c, d_r, torch.float32, device)


@LatentCache.near_miss("shared-between-caches")
class _(_Cache):
    """All caches write into the same buffers, which belong to the class. Make them in `__init__` and keep them on `self`."""

    shared: dict = {}  # noqa: RUF012

    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        super().__init__(batch, max_seq, d_c, d_r, dtype, device)
        key = batch, max_seq, d_c, d_r, dtype
        self.c, self.k_r = type(self).shared.setdefault(key, (self.c, self.k_r))


# --- latent_decode_step

latent_decode_step = Exercise("latent_decode_step", ref, see="mla-decode")


def decoding(g: Gen, prompt: int, *shape: int, dtype: torch.dtype = torch.float32, room: int = 0):
    """A case that decodes a sequence behind a prompt of so many tokens, and compares each step with the full pass."""
    exact_h, exact_w = layer_args(g, *shape, dtype=torch.float64)
    h, w = exact_h.to(dtype), in_dtype(exact_w, dtype)
    batch, seq = shape[:2]
    full = torch_attention(h.double(), w)  # from the rounded numbers, in float64
    c, k_r = (x.to(dtype) for x in cached(h.double(), in_dtype(w, torch.float64)))
    tolerance = CHAIN[dtype]

    def run(s: Subject) -> None:
        config = {
            "batch": batch,
            "max_seq": seq + room,
            "d_c": c.shape[-1],
            "d_r": k_r.shape[-1],
            "dtype": dtype,
        }
        cache = s.module("LatentCache", {}, **config)
        if prompt:
            s.ask_method(cache, "update", c[:, :prompt], k_r[:, :prompt])
        for t in range(prompt, seq):
            got = s.ask("latent_decode_step", h[:, t : t + 1], w, cache)
            s.require(not s.transcript[-1].changed, "an argument is changed in place")
            s.require_close(
                got,
                full[:, t : t + 1].to(dtype),
                f"token {t} differs from the full pass",
                tolerance,
                tolerance,
            )
            s.get(cache, "length")

    return scenario(run).says(
        f"{seq - prompt} steps after {prompt} tokens, {str(dtype).removeprefix('torch.')}"
    )


@latent_decode_step.group("values", share=3)
def _(g: Gen):
    """Every step gives the row of the full forward pass."""
    yield decoding(g, 0, 1, 5, 8, 2, 4, 2, 6)
    yield decoding(g, 3, 1, 5, 8, 2, 4, 4, 5)
    yield decoding(g, 4, 2, 7, 9, 3, 2, 4, 4)


@latent_decode_step.group("edges", share=1)
def _(g: Gen):
    """Works from an empty cache, for one head, odd widths, several sequences, room to spare, and after a reset."""
    yield decoding(g, 0, 3, 4, 6, 4, 6, 2, 3, room=5)
    yield decoding(g, 0, 2, 4, 7, 1, 3, 2, 5)
    yield decoding(g, 20, 2, 23, 8, 2, 4, 4, 6)
    h, w = layer_args(g, 2, 3, 8, 2, 4, 2, 6)
    other, _ = layer_args(g, 2, 3, 8, 2, 4, 2, 6)

    def after_reset(s: Subject) -> None:
        """a second text after a reset"""
        cache = s.module("LatentCache", {}, batch=2, max_seq=4, d_c=6, d_r=2)
        for text in (other, h):
            for t in range(3):
                s.call("latent_decode_step", text[:, t : t + 1], w, cache)
            s.ask_method(cache, "reset")

    def two_layers(s: Subject) -> None:
        """two caches in turn"""
        caches = [s.module("LatentCache", {}, batch=2, max_seq=4, d_c=6, d_r=2) for _ in range(2)]
        for t in range(3):
            for cache, text in zip(caches, (h, other), strict=True):
                s.call("latent_decode_step", text[:, t : t + 1], w, cache)

    yield from (scenario(after_reset), scenario(two_layers))


@latent_decode_step.group("cache", share=1)
def _(g: Gen):
    """Stores the latent and the rotated key of the new token, once."""
    h, w = layer_args(g, 2, 4, 8, 2, 4, 2, 6)
    c, k_r = cached(h, w)

    def stored(s: Subject) -> None:
        """what lies in the cache after two steps"""
        cache = s.module("LatentCache", {}, batch=2, max_seq=6, d_c=6, d_r=2)
        s.ask_method(cache, "update", c[:, :2], k_r[:, :2])
        for t in (2, 3):
            s.ask("latent_decode_step", h[:, t : t + 1], w, cache)
        s.get(cache, "length")
        got_c, got_k = s.ask_method(cache, "update", c[:, :1], k_r[:, :1])
        s.require_close(got_c, torch.cat([c, c[:, :1]], 1), "the latents in the cache are not h · w_dkv")
        s.require_close(
            got_k,
            torch.cat([k_r, k_r[:, :1]], 1),
            "the keys in the cache are not those rotated at their positions",
        )

    yield scenario(stored)


@latent_decode_step.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype, in double and in half precision."""
    for dtype in (torch.float64, *HALF):
        yield decoding(g, 2, 2, 4, 8, 2, 4, 2, 6, dtype=dtype)


def _step(
    h: Tensor,
    w: MLAWeights,
    cache: Any,
    key_at: int = 0,
    query_at: int = 0,
    store: bool = True,
    rotated: bool = True,
    past_only: bool = False,
    width: str = "d_h + d_r",
) -> Tensor:
    """One step with knobs: the offsets of key and query from the right position."""
    position = cache.length
    c, k_r = h @ w.w_dkv, h @ w.w_kr
    if rotated:
        k_r = apply_rope(k_r, torch.tensor([position + key_at]))
    if store:
        c, k_r = cache.update(c, k_r)
    if past_only and c.shape[1] > 1:
        c, k_r = c[:, :-1], k_r[:, :-1]
    # `_layer` puts the query at the end of the keys; turn the keys instead of the query to move it
    shift = c.shape[1] - 1 - position - query_at
    if shift:
        k_r = apply_rope(k_r, torch.full((c.shape[1],), shift))
    return _layer(h, c, k_r, w, width=width)


@latent_decode_step.near_miss("position-not-offset")
def _(h, weights, cache):
    """Key and query are rotated as position 0 in every step. The new token stands at `cache.length`, read before the update."""
    return _step(h, weights, cache, key_at=-cache.length, query_at=-cache.length)


@latent_decode_step.near_miss("position-after-the-update")
def _(h, weights, cache):
    """The query is rotated at `cache.length` as it is after the update, one too far. Read the position before the update."""
    return _step(h, weights, cache, query_at=1)


@latent_decode_step.near_miss("both-one-too-far")
def _(h, weights, cache):
    """Key and query are rotated one position too far. The first token stands at 0: the position is `cache.length` before
    the update."""
    return _step(h, weights, cache, key_at=1, query_at=1)


@latent_decode_step.near_miss("query-at-zero")
def _(h, weights, cache):
    """The query is not rotated, or at position 0, which is the same. It stands where the new token stands: at `cache.length`
    before the update."""
    return _step(h, weights, cache, query_at=-cache.length)


@latent_decode_step.near_miss("stores-unrotated-keys")
def _(h, weights, cache):
    """The key is stored unrotated. A cached key is never touched again: rotate it at its position, then store it."""
    return _step(h, weights, cache, rotated=False)


@latent_decode_step.near_miss("rotates-when-reading")
def _(h, weights, cache):
    """Keys are stored unrotated and all of them are turned anew in every step. Rotate a key once, at its position, and store
    it rotated: the cache holds nothing that has to be computed again."""
    c, k_r = cache.update(h @ weights.w_dkv, h @ weights.w_kr)
    return _layer(h, c, apply_rope(k_r, torch.arange(c.shape[1])), weights)


@latent_decode_step.near_miss("rotates-the-cache-again")
def _(h, weights, cache):
    """Keys from the cache are rotated once more. They were rotated when they were stored: use them as they are."""
    c = h @ weights.w_dkv
    k_r = apply_rope(h @ weights.w_kr, torch.tensor([cache.length]))
    c, k_r = cache.update(c, k_r)
    return _layer(h, c, apply_rope(k_r, torch.arange(c.shape[1])), weights)


@latent_decode_step.near_miss("sees-only-itself")
def _(h, weights, cache):
    """The new token attends to itself alone. Attend to what `cache.update` returns, all tokens so far."""
    position = cache.length
    c = h @ weights.w_dkv
    k_r = apply_rope(h @ weights.w_kr, torch.tensor([position]))
    cache.update(c, k_r)
    return _layer(h, c, apply_rope(k_r, torch.tensor([-position])), weights)


@latent_decode_step.near_miss("not-stored")
def _(h, weights, cache):
    """The new token is not stored. Call `cache.update` in each step, or the next one does not see this token."""
    position, c, k_r = cache.length, h @ weights.w_dkv, h @ weights.w_kr
    k_r = apply_rope(k_r, torch.tensor([position]))
    before_c, before_k = cache.update(c[:, :0], k_r[:, :0])
    return _layer(h, torch.cat([before_c, c], 1), torch.cat([before_k, k_r], 1), weights)


@latent_decode_step.near_miss("sees-only-the-past")
def _(h, weights, cache):
    """The new token does not see itself. Update the cache first, then attend to everything in it."""
    return _step(h, weights, cache, past_only=True)


@latent_decode_step.near_miss("stored-twice")
def _(h, weights, cache):
    """The new token is stored twice. One call of `cache.update` per step: keep what it returns."""
    position, c = cache.length, h @ weights.w_dkv
    k_r = apply_rope(h @ weights.w_kr, torch.tensor([position]))
    cache.update(c, k_r)
    c, k_r = cache.update(c, k_r)
    return _layer(h, c, apply_rope(k_r, torch.full((c.shape[1],), c.shape[1] - 1 - position)), weights)


@latent_decode_step.near_miss("no-rotary-scores")
def _(h, weights, cache):
    """The rotary scores q_r · k_r are left out, so positions play no part. Add them to the content scores."""
    at = torch.tensor([cache.length])
    c, k_r = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, at))
    return _layer(h, c, torch.zeros_like(k_r), weights)


@latent_decode_step.near_miss("sees-only-the-first")
def _(h, weights, cache):
    """The causal mask is aligned at the first key, so the new token sees that alone. It is the last of the sequence and sees
    everything: no mask is needed."""
    at = torch.tensor([cache.length])
    c, k_r = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, at))
    return _layer(h, c, k_r, weights, mask="start")


@latent_decode_step.near_miss("softmax-over-heads")
def _(h, weights, cache):
    """The softmax runs over the heads. Each head shares out its attention among the keys: use dim=-1."""
    at = torch.tensor([cache.length])
    c, k_r = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, at))
    return _layer(h, c, k_r, weights, softmax_dim=1)


@latent_decode_step.near_miss("heads-interleaved")
def _(h, weights, cache):
    """Heads take every heads-th column. They are consecutive blocks: view the width as (heads, d_h), not (d_h, heads)."""
    at = torch.tensor([cache.length])
    c, k_r = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, at))
    return _layer(h, c, k_r, weights, heads="interleaved")


@latent_decode_step.near_miss("scale-without-rotary")
def _(h, weights, cache):
    """The scale counts the content part alone. Divide by √(d_h + d_r)."""
    return _step(h, weights, cache, width="d_h")


@latent_decode_step.near_miss("scale-from-absorbed-width")
def _(h, weights, cache):
    """The scale is taken from the absorbed query. It stays 1/√(d_h + d_r)."""
    return _step(h, weights, cache, width="d_c + d_r")


# --- cache_elements_per_token

cache_elements_per_token = Exercise("cache_elements_per_token", ref, see="mla-elements")


@cache_elements_per_token.group("values", share=3)
def _(g: Gen):
    """Counts what one layer keeps for one token."""
    yield call("mha", 128, 128).expect(32_768).says("multi-head attention in the shape of DeepSeek-V2")
    yield call("gqa", 128, 128, groups=8).expect(2_048).says("8 groups")
    yield call("mqa", 128, 128).expect(256).says("multi-query attention")
    yield call("mla", 128, 128, d_c=512, d_r=64).expect(576).says("DeepSeek-V2: 512 + 64")
    heads, head_dim = g.python.randrange(3, 9), g.python.randrange(9, 33)
    for kind, given in (("mha", {}), ("gqa", {"groups": 2}), ("mqa", {}), ("mla", {"d_c": 7, "d_r": 3})):
        yield call(kind, heads, head_dim, **given).says(f"{kind} with other heads")


@cache_elements_per_token.group("arguments", share=1)
def _(g: Gen):
    """Takes its arguments by position or by name, and uses only those its kind needs."""
    for kind in ("mha", "gqa", "mqa", "mla"):
        yield call(kind, 12, 10, 4, 7, 5).says(f"{kind}, all by position")
        yield call(d_r=5, d_c=7, groups=4, head_dim=10, heads=12, kind=kind).says(f"{kind}, all by name")
    yield call("gqa", 6, 10, 6).expect(120).says("as many groups as heads is multi-head attention")
    yield call("gqa", 6, 10, 1).expect(20).says("one group is multi-query attention")


@cache_elements_per_token.group("errors", share=1)
def _(g: Gen):
    """Refuses an unknown kind and a missing argument."""
    everything = {"groups": 2, "d_c": 4, "d_r": 2}
    wrong = [("xyz", {}), ("xyz", everything), ("m", {}), ("gqa", {}), ("gqa", {"d_c": 4, "d_r": 2})]
    wrong += [("mla", {}), ("mla", {"d_c": 4}), ("mla", {"d_r": 2}), ("mla", {"groups": 2})]
    for kind, given in wrong:
        yield (
            call(kind, 8, 16, **given)
            .raises(ValueError)
            .says(f"{kind!r} with {', '.join(given) or 'no option'}")
        )


def _count(kind, heads, head_dim, groups, d_c, d_r, **other):
    """The right count, with other formulas for some kinds."""
    if kind not in ("mha", "gqa", "mqa", "mla"):
        raise ValueError(f"unknown kind {kind!r}")
    if (kind == "gqa" and groups is None) or (kind == "mla" and (d_c is None or d_r is None)):
        raise ValueError(f"an argument is missing for {kind!r}")
    formulas = {
        "mha": lambda: 2 * heads * head_dim,
        "gqa": lambda: 2 * groups * head_dim,
        "mqa": lambda: 2 * head_dim,
        "mla": lambda: d_c + d_r,
    }
    return {**formulas, **other}[kind]()


@cache_elements_per_token.near_miss("latent-counted-twice")
def _(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    """The latent is counted for keys and again for values. One latent serves both: d_c + d_r."""
    return _count(kind, heads, head_dim, groups, d_c, d_r, mla=lambda: 2 * d_c + d_r)


@cache_elements_per_token.near_miss("mla-doubled")
def _(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    """MLA is doubled as if it kept keys and values. It keeps one latent and one rotary key: d_c + d_r."""
    return _count(kind, heads, head_dim, groups, d_c, d_r, mla=lambda: 2 * (d_c + d_r))


@cache_elements_per_token.near_miss("rotary-key-left-out")
def _(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    """The rotary key is left out. It cannot be rebuilt from the latent, so it is cached beside it: d_c + d_r."""
    return _count(kind, heads, head_dim, groups, d_c, d_r, mla=lambda: d_c)


@cache_elements_per_token.near_miss("rotary-key-per-head")
def _(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    """The rotary key is counted once per head. All heads share it: d_c + d_r."""
    return _count(kind, heads, head_dim, groups, d_c, d_r, mla=lambda: d_c + heads * d_r)


@cache_elements_per_token.near_miss("mla-per-head")
def _(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    """MLA is counted once per head. The latent belongs to all heads together: d_c + d_r, whatever the heads."""
    return _count(kind, heads, head_dim, groups, d_c, d_r, mla=lambda: heads * (d_c + d_r))


@cache_elements_per_token.near_miss("keys-alone")
def _(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    """Only the keys are counted. MHA, GQA and MQA keep a key and a value: twice as many."""
    one = {"mha": lambda: heads * head_dim, "gqa": lambda: groups * head_dim, "mqa": lambda: head_dim}
    return _count(kind, heads, head_dim, groups, d_c, d_r, **one)


@cache_elements_per_token.near_miss("gqa-counts-query-heads")
def _(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    """GQA is counted with the query heads. Its cache holds one key and one value per group: 2 · groups · head_dim."""
    return _count(kind, heads, head_dim, groups, d_c, d_r, gqa=lambda: 2 * heads * head_dim)


@cache_elements_per_token.near_miss("groups-taken-for-their-size")
def _(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    """`groups` is taken for the number of heads in a group. It is the number of groups, that is of KV heads."""
    return _count(kind, heads, head_dim, groups, d_c, d_r, gqa=lambda: 2 * heads // groups * head_dim)


@cache_elements_per_token.near_miss("mqa-counts-heads")
def _(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    """MQA is counted with all heads. Its one key and one value serve every head: 2 · head_dim."""
    return _count(kind, heads, head_dim, groups, d_c, d_r, mqa=lambda: 2 * heads * head_dim)


@cache_elements_per_token.near_miss("superfluous-refused")
def _(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    """An argument that the kind does not need is refused. It is ignored: only what is missing is an error."""
    if kind in ("mha", "gqa", "mqa") and (d_c is not None or d_r is not None):
        raise ValueError(f"{kind} takes neither d_c nor d_r")
    return _count(kind, heads, head_dim, groups, d_c, d_r)


@cache_elements_per_token.near_miss("groups-used-by-mha")
def _(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    """MHA is counted with `groups` when they are given. Only GQA has groups; the other kinds ignore them."""
    return _count(
        kind,
        heads,
        head_dim,
        groups,
        d_c,
        d_r,
        mha=lambda: 2 * (heads if groups is None else groups) * head_dim,
    )


def _unknown(answer):
    def near_miss(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
        """An unknown kind is answered, as if it were a known one or with nothing. Raise a ValueError that names the kind."""
        if kind not in ("mha", "gqa", "mqa", "mla"):
            return answer(heads, head_dim)
        return _count(kind, heads, head_dim, groups, d_c, d_r)

    return near_miss


cache_elements_per_token.near_miss("unknown-is-mha")(_unknown(lambda heads, head_dim: 2 * heads * head_dim))
cache_elements_per_token.near_miss("unknown-is-mqa")(_unknown(lambda heads, head_dim: 2 * head_dim))
cache_elements_per_token.near_miss("unknown-is-none")(_unknown(lambda heads, head_dim: None))
cache_elements_per_token.near_miss("unknown-is-0")(_unknown(lambda heads, head_dim: 0))


@cache_elements_per_token.near_miss("unknown-is-mla")
def _(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    """What is none of the other kinds is taken for MLA. Ask for "mla" by name, and raise a ValueError for all that is left."""
    return _count(
        kind if kind in ("mha", "gqa", "mqa") else "mla",
        heads,
        head_dim,
        groups,
        d_c,
        d_r,
    )


def _filled(**filled):
    def near_miss(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
        """A missing argument is taken for a number. Nothing sensible can be counted without it: raise a ValueError."""
        given = {"groups": groups, "d_c": d_c, "d_r": d_r}
        for name, instead in filled.items():
            if given[name] is None:
                given[name] = heads if instead == "heads" else instead
        return _count(kind, heads, head_dim, **given)

    return near_miss


for _name, _fill in {
    "missing-is-zero": {"groups": "heads", "d_c": 0, "d_r": 0},
    "missing-groups-are-heads": {"groups": "heads"},
    "missing-groups-are-one": {"groups": 1},
    "missing-width-is-zero": {"d_c": 0, "d_r": 0},
    "missing-rotary-width-is-zero": {"d_r": 0},
}.items():
    cache_elements_per_token.near_miss(_name)(_filled(**_fill))


@cache_elements_per_token.near_miss("one-of-two-is-enough")
def _(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    """MLA is refused only when d_c and d_r are both missing. It needs both: raise a ValueError when either is None."""
    if kind == "mla" and (d_c is not None or d_r is not None):
        d_c, d_r = d_c or 0, d_r or 0
    return _count(kind, heads, head_dim, groups, d_c, d_r)


def _other_errors(unknown, missing):
    def near_miss(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
        """Another error than a ValueError is raised, a KeyError or TypeError perhaps. Check the kind and its arguments first
        and raise the ValueError yourself."""
        try:
            return _count(kind, heads, head_dim, groups, d_c, d_r)
        except ValueError as error:
            raise (missing if kind in ("gqa", "mla") else unknown)(str(error)) from None

    return near_miss


for _name, _unknown_kind, _missing in (
    ("wrong-error", KeyError, TypeError),
    ("wrong-error-for-the-kind", KeyError, ValueError),
    ("wrong-error-for-an-argument", ValueError, TypeError),
    ("assertion-error", AssertionError, AssertionError),
    ("another-error-for-the-kind", NameError, ValueError),
):
    cache_elements_per_token.near_miss(_name)(_other_errors(_unknown_kind, _missing))


# --- largest_batch

largest_batch = Exercise("largest_batch", ref, see="mla-batch")


@largest_batch.group("values", share=3)
def _(g: Gen):
    """Counts the whole sequences whose cache fits beside the weights."""
    yield call(10_000, 4_000, 100, 2, 5, 2).expect(3).says("2,000 bytes a sequence, 6,000 bytes free")
    yield call(9_999, 4_000, 100, 2, 5, 2).expect(2).says("one byte less")
    for _ in range(4):
        seq, layers, elements, size = (g.python.randrange(2, n) for n in (200, 9, 60, 5))
        count = g.python.randrange(3, 40)
        sequence = seq * layers * elements * size
        model = g.python.randrange(1, 50_000)
        for spare in (0, sequence - 1, sequence * 2 // 3):
            args = model + count * sequence + spare, model, seq, layers, elements, size
            yield (
                call(*args)
                .expect(count)
                .says(f"{count} sequences and {'some' if spare else 'no'} room to spare")
            )
    count, sequence = g.python.randrange(40, 90), 4096 * 27 * 576 * 2
    for spare in (0, -1):
        yield (
            call(31_413_626_609 + count * sequence + spare, 31_413_626_609, 4096, 27, 576, 2)
            .expect(count + spare)
            .says(f"a model of 31 GB, {'one byte less' if spare else 'exactly full'}")
        )


@largest_batch.group("fractions", share=1)
def _(g: Gen):
    """Takes fractional bytes: half a byte for 4 bits, three quarters for 6."""
    for size in (0.5, 0.75, 1.5):
        count = g.python.randrange(3, 30)
        memory = 1_000 + count * 64 * 4 * 16 * size
        yield (
            call(int(memory), 1_000, 64, 4, 16, size)
            .expect(count)
            .says(f"{size} bytes a number, exactly full")
        )
        yield (
            call(int(memory) - 1, 1_000, 64, 4, 16, size)
            .expect(count - 1)
            .says(f"{size} bytes, one byte less")
        )
    yield call(2.0**30, 2.0**29, 1024, 8, 64, 0.75).says("memory given as a float")
    yield call(103, 100, 1, 2, 1, 0.75).expect(2).says("3 bytes free, 1.5 bytes a sequence")
    for elements, size in ((5, 0.75), (7, 0.5), (1, 0.75)):  # a token takes no whole number of bytes
        count = g.python.randrange(20, 60)
        memory = 1_000 + int(count * 64 * 4 * elements * size)
        for spare in (0, -1):
            yield (
                call(memory + spare, 1_000, 64, 4, elements, size)
                .expect(count + spare)
                .says(
                    f"{elements} numbers of {size} bytes a token, {'one byte less' if spare else 'exactly full'}"
                )
            )


@largest_batch.group("too small", share=1)
def _(g: Gen):
    """Gives 0 when the model or its first sequence does not fit."""
    for memory, model in ((4_000, 4_001), (4_000, 9_000), (4_000, 4_000), (5_999, 4_000)):
        yield call(memory, model, 100, 2, 5, 2).expect(0).says(f"{memory:,} bytes, the model takes {model:,}")
    yield call(100, 5_000, 100, 2, 5, 0.75).expect(0).says("fractional bytes, the model does not fit")


def _fits(memory_bytes, model_bytes, *factors):
    return max(0, int((memory_bytes - model_bytes) // math.prod(factors)))


@largest_batch.near_miss("rounds-up")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """The count is rounded up, so that the last sequence does not fit. Only whole sequences count: round down."""
    return max(
        0, math.ceil((memory_bytes - model_bytes) / (seq * layers * elements_per_token * bytes_per_element))
    )


@largest_batch.near_miss("rounds-to-nearest")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """The count is rounded to the nearest number. Only whole sequences count: round down."""
    return max(
        0, round((memory_bytes - model_bytes) / (seq * layers * elements_per_token * bytes_per_element))
    )


@largest_batch.near_miss("negative")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """The count is negative when the model does not fit. No sequence fits then: return 0."""
    return int((memory_bytes - model_bytes) // (seq * layers * elements_per_token * bytes_per_element))


@largest_batch.near_miss("negative-and-truncated")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """The count is negative when the model is far too large. No sequence fits then: return 0. int() drops the fraction and keeps
    the sign."""
    return int((memory_bytes - model_bytes) / (seq * layers * elements_per_token * bytes_per_element))


@largest_batch.near_miss("refuses-a-large-model")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """A model that does not fit ends in an error. It is an answer like any other: 0 sequences fit."""
    if model_bytes > memory_bytes:
        raise ValueError("largest_batch needs room for the model")
    return _fits(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element)


@largest_batch.near_miss("truncated-towards-zero")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """The size of the gap is counted although the model does not fit. Return 0 when memory_bytes < model_bytes."""
    return int(abs(memory_bytes - model_bytes) // (seq * layers * elements_per_token * bytes_per_element))


@largest_batch.near_miss("at-least-one")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """At least one sequence is promised. When the model or its first sequence does not fit, the answer is 0."""
    return max(1, _fits(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element))


@largest_batch.near_miss("not-quite-full")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """A memory that is filled to the last byte counts as too small. It fits: compare with ≤, not with <."""
    return _fits(memory_bytes - 1, model_bytes, seq, layers, elements_per_token, bytes_per_element)


@largest_batch.near_miss("model-forgotten")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """The weights are forgotten. They take their part of the memory first: subtract model_bytes."""
    return _fits(memory_bytes, 0, seq, layers, elements_per_token, bytes_per_element)


@largest_batch.near_miss("layers-forgotten")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """The layers are forgotten. Every layer has a cache of its own: multiply by `layers`."""
    return _fits(memory_bytes, model_bytes, seq, elements_per_token, bytes_per_element)


@largest_batch.near_miss("tokens-not-sequences")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """Tokens are counted, not sequences. A sequence holds `seq` of them: divide by seq as well."""
    return _fits(memory_bytes, model_bytes, layers, elements_per_token, bytes_per_element)


@largest_batch.near_miss("keys-and-values-again")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """The elements are doubled for keys and values. `elements_per_token` counts both already."""
    return _fits(memory_bytes, model_bytes, 2, seq, layers, elements_per_token, bytes_per_element)


@largest_batch.near_miss("numbers-not-bytes")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """Numbers are counted, not bytes. Multiply by `bytes_per_element`."""
    return _fits(memory_bytes, model_bytes, seq, layers, elements_per_token)


@largest_batch.near_miss("fraction-cut-off")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """The bytes per number are cut to a whole number. Packed 6-bit numbers take 0.75 bytes: use the fraction."""
    return _fits(memory_bytes, model_bytes, seq, layers, elements_per_token, max(1, int(bytes_per_element)))


@largest_batch.near_miss("token-rounded-up")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """The bytes of one token are rounded to a whole number before they are multiplied. Packed numbers do not stop at a byte: round
    once, at the end, and down."""
    token = math.ceil(elements_per_token * bytes_per_element)
    return _fits(memory_bytes, model_bytes, seq, layers, token)


@largest_batch.near_miss("bits-not-bytes")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """Bits are counted against bytes: everything is multiplied by 8. All sizes are in bytes already."""
    return _fits(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element, 8)


@largest_batch.near_miss("a-model-per-sequence")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """The weights are counted once for each sequence. All sequences share them: subtract model_bytes once."""
    sequence = seq * layers * elements_per_token * bytes_per_element
    return int(memory_bytes // (model_bytes + sequence))


@largest_batch.near_miss("whole-bytes")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """The bytes per number are rounded up to a whole byte. Packed 6-bit numbers take 0.75: use the fraction."""
    return _fits(memory_bytes, model_bytes, seq, layers, elements_per_token, math.ceil(bytes_per_element))


@largest_batch.near_miss("computed-in-float32")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """The bytes are computed in float32, which has seven digits, and a device has eleven. Use Python's numbers, not tensors."""
    one = torch.tensor(float(seq * layers * elements_per_token * bytes_per_element))
    return max(0, int(torch.tensor(float(memory_bytes - model_bytes)) // one))


@largest_batch.near_miss("rounded-in-between")
def _(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    """The memory is divided by one factor after the other and rounded down each time. With fractions of a byte that loses sequences:
    multiply the factors first, divide once."""
    left = memory_bytes - model_bytes
    for factor in (layers, elements_per_token, bytes_per_element, seq):
        left = left // factor
    return max(0, int(left))


# --- lora_forward and merge_lora

lora_forward = Exercise("lora_forward", ref, see="mla-lora", functions=("lora_forward", "merge_lora"))


def lora_args(
    g: Gen, *batch: int, d_in=6, d_out=5, r=2, dtype: torch.dtype = torch.float32, alpha: Any = 3.0
):
    x = g.randn(*batch, d_in, dtype=dtype)
    w, a, b = (g.randn(*s, dtype=torch.float64) / s[0] ** 0.5 for s in ((d_in, d_out), (d_in, r), (r, d_out)))
    return x, w.to(dtype), a.to(dtype), b.to(dtype), alpha


@lora_forward.group("values", share=3)
def _(g: Gen):
    """Adds (alpha/r)·x·A·B to x·W, and merges the same update into the weight."""
    x, w = g.tensor([[1.0, 2.0]]), g.tensor([[1.0], [1.0]])
    a, b = g.tensor([[1.0, 0.0], [0.0, 1.0]]), g.tensor([[2.0], [1.0]])
    yield call(x, w, a, b, 4.0).expect(g.tensor([[11.0]])).says("3 + (4/2)·(1·2 + 2·1) = 11")
    yield (
        call(w, a, b, 4.0)
        .of("merge_lora")
        .expect(g.tensor([[5.0], [3.0]]))
        .says("[1, 1] + (4/2)·[2, 1] = [5, 3]")
    )
    for batch, r, alpha in (((4,), 2, 3.0), ((2, 3), 3, 1.0), ((2,), 4, 8)):
        x, w, a, b, alpha = lora_args(g, *batch, r=r, alpha=alpha)
        merged = torch.addmm(w, a, b, alpha=alpha / r)
        yield (
            call(x, w, a, b, alpha)
            .expect(F.linear(x, merged.mT))
            .says(f"rank {r}, alpha {alpha}, batch {batch}")
        )
        yield call(w, a, b, alpha).of("merge_lora").expect(merged).says(f"merged, rank {r}, alpha {alpha}")


@lora_forward.group("edges", share=1)
def _(g: Gen):
    """Works for one row, several batch dimensions, rank 1, alpha 0, a wide or tall weight, and other memory layouts."""
    yield call(*lora_args(g)).says("one row without batch")
    yield call(*lora_args(g, 2, 1, 3, d_in=3, d_out=7)).says("three batch dimensions")
    for r, alpha in ((1, 2.0), (3, 0.0), (5, 0.5)):
        args = lora_args(g, 3, d_in=4, d_out=4, r=r, alpha=alpha)
        yield call(*args).says(f"rank {r}, alpha {alpha}")
        yield call(*args[1:]).of("merge_lora").says(f"merged, rank {r}, alpha {alpha}")
    x, w, a, b, alpha = lora_args(g, 3, 4)
    views = [t.mT.contiguous().mT for t in (x, w, a, b)]
    yield call(*views, alpha).says("transposed views")
    yield call(*views[1:], alpha).of("merge_lora").says("merged, transposed views")
    zeros = torch.zeros_like(b)
    yield call(x, w, a, zeros, alpha).expect(x @ w).says("b is zero at the start of training")


@lora_forward.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype, in double and in half precision."""
    for dtype in (torch.float64, *HALF):
        args = lora_args(g, 3, dtype=dtype)
        yield call(*args).close(CHAIN[dtype], CHAIN[dtype]).says(str(dtype))
        yield call(*args[1:]).of("merge_lora").close(CHAIN[dtype], CHAIN[dtype]).says(f"merged, {dtype}")


@lora_forward.group("gradient", share=1)
def _(g: Gen):
    """Gradients flow to the input, the weight and both factors."""
    args = lora_args(g, 2, 3, dtype=torch.float64)
    yield call(*args).gradient().says("forward")
    yield call(*args[1:]).of("merge_lora").gradient().says("merged")


def _lora_pair(name: str, says: str, scale, rank=lambda a, b: a.shape[1]) -> None:
    """A near-miss of both functions that gets the scale wrong in the same way."""

    def forward(x, w, a, b, alpha):
        return x @ w + scale(alpha, rank(a, b)) * (x @ a @ b)

    def merged(w, a, b, alpha):
        return w + scale(alpha, rank(a, b)) * (a @ b)

    forward.__doc__ = says
    miss = lora_forward.near_miss(name)
    miss(forward)
    lora_forward.near_misses[-1].names["merge_lora"] = merged


_lora_pair(
    "scale-forgotten",
    "The update is not scaled. It enters as (alpha/r)·A·B.",
    lambda alpha, r: 1.0,
)
_lora_pair(
    "not-divided-by-the-rank",
    "The update is scaled by alpha alone. Divide by the rank r, the width of A, so that alpha need not change with r.",
    lambda alpha, r: alpha,
)
_lora_pair(
    "alpha-forgotten",
    "The update is divided by the rank but not multiplied by alpha. The scale is alpha/r.",
    lambda alpha, r: 1 / r,
)
_lora_pair(
    "scale-upside-down",
    "The scale is upside down. It is alpha/r, not r/alpha.",
    lambda alpha, r: r / alpha if alpha else 0.0,
)
_lora_pair(
    "root-of-the-rank",
    "The update is divided by the root of the rank. That is a later variant; LoRA divides by r itself.",
    lambda alpha, r: alpha / r**0.5,
)


_lora_pair(
    "whole-number-division",
    "alpha // r cuts the scale to a whole number, often to 0. It is the fraction alpha/r.",
    lambda alpha, r: alpha // r,
)
_lora_pair(
    "alpha-cut-to-an-int",
    "alpha is cut to a whole number. It may be a fraction: use it as it is.",
    lambda alpha, r: int(alpha) / r,
)
_lora_pair(
    "rank-from-the-input",
    "The update is divided by the input's width, the rows of A. The rank r is the number of columns of A, which is the number of rows of B.",
    lambda alpha, r: alpha / r,
    lambda a, b: a.shape[0],
)
_lora_pair(
    "rank-from-the-output",
    "The update is divided by the output's width, the columns of B. The rank r is the number of columns of A, which is the number of rows of B.",
    lambda alpha, r: alpha / r,
    lambda a, b: b.shape[1],
)


@lora_forward.near_miss("merged-without-alpha", of="merge_lora")
def _(w, a, b, alpha):
    """The merge divides by the rank but forgets alpha. Merge W + (alpha/r)·A·B, so that both give the same."""
    return w + a @ b / a.shape[1]


@lora_forward.near_miss("merged-without-the-rank", of="merge_lora")
def _(w, a, b, alpha):
    """The merge multiplies by alpha but does not divide by the rank. Merge W + (alpha/r)·A·B, so that both give the same."""
    return w + a @ b * alpha


@lora_forward.near_miss("only-rows-of-a-matrix")
def _(x, w, a, b, alpha):
    """`torch.mm` takes matrices alone, so one row, or rows with several batch dimensions, end in an error. Use `@`, which takes
    any number of them."""
    return torch.mm(x, w) + torch.mm(torch.mm(x, a), b) * (alpha / a.shape[1])


@lora_forward.near_miss("forward-without-scale")
def _(x, w, a, b, alpha):
    """The forward pass forgets the scale that the merge has. Both are x·W + (alpha/r)·x·A·B."""
    return x @ w + x @ a @ b


@lora_forward.near_miss("weight-left-out")
def _(x, w, a, b, alpha):
    """Only the update is applied. It stands beside the pretrained weight: add x·W."""
    return x @ a @ b * (alpha / a.shape[1])


@lora_forward.near_miss("scaled-with-the-weight")
def _(x, w, a, b, alpha):
    """The scale acts on x·W as well. It belongs to the update alone."""
    return (x @ w + x @ a @ b) * (alpha / a.shape[1])


@lora_forward.near_miss("merged-in-place", of="merge_lora")
def _(w, a, b, alpha):
    """The weight is overwritten in place, so a second merge adds the update twice. Return a new tensor: w + …, not w += …"""
    w += a @ b * (alpha / a.shape[1])
    return w


@lora_forward.near_miss("merged-without-scale", of="merge_lora")
def _(w, a, b, alpha):
    """The merge forgets the scale that the forward pass has. Merge W + (alpha/r)·A·B, so that both give the same."""
    return w + a @ b


@lora_forward.near_miss("returns-the-update", of="merge_lora")
def _(w, a, b, alpha):
    """The update is returned, not the merged weight. Add it to w."""
    return a @ b * (alpha / a.shape[1])


@lora_forward.near_miss("frozen-by-detach")
def _(x, w, a, b, alpha):
    """The pretrained weight is detached. LoRA freezes it by `requires_grad_(False)` outside; the function itself lets
    gradients through to every input."""
    return x @ w.detach() + x @ a @ b * (alpha / a.shape[1])


@lora_forward.near_miss("merged-under-no-grad", of="merge_lora")
@torch.no_grad()
def _(w, a, b, alpha):
    """The merge runs under `no_grad`, so nothing can be learned through it. Leave the graph alone."""
    return w + a @ b * (alpha / a.shape[1])


@lora_forward.near_miss("merged-with-a-frozen-weight", of="merge_lora")
def _(w, a, b, alpha):
    """The merge detaches the pretrained weight. LoRA freezes it by `requires_grad_(False)` outside; the function itself lets
    gradients through to every input."""
    return w.detach() + a @ b * (alpha / a.shape[1])


@lora_forward.near_miss("rows-flattened")
def _(x, w, a, b, alpha):
    """The batch dimensions are flattened and do not come back. Use `@`, which takes any number of them."""
    rows = x.reshape(-1, x.shape[-1])
    return rows @ w + rows @ a @ b * (alpha / a.shape[1])


def _in_float32(x, w, a, b, alpha):
    """The result comes back in float32. Keep the dtype of the inputs."""
    x, w, a, b = (t.float() for t in (x, w, a, b))
    return x @ w + x @ a @ b * (alpha / a.shape[1])


lora_forward.near_miss("float32-out")(_in_float32)
