"""What is right in the attention chapter: cases, independent facts, near-misses and what they mean."""

import dataclasses
import math

import torch
import torch.nn.functional as F

from autograder.spec import Exercise, Gen, call
from course_llm import attention as ref
from course_llm.weights import BlockWeights

INF = math.inf
HALF_AND_DOUBLE = (torch.float16, torch.bfloat16, torch.float64)


def tolerant(case, dtype, steps=1):
    """Softmax, sines and norms may run in float32 inside, float64 inputs included; half precision rounds at
    each step."""
    atol = {torch.float64: 1e-5, torch.float16: steps * 4e-3, torch.bfloat16: steps * 3e-2}[dtype]
    return case.close(atol, atol)


def holes(g: Gen, *shape: int, dtype=torch.float32):
    """An additive mask that hides about half of the keys: at least one is hidden and one is left in every
    row."""
    keys = shape[-1]
    hidden = g.rand(*shape) < 0.4
    lucky = g.ints(0, keys, *shape[:-1], 1)
    hidden = hidden.scatter(-1, (lucky + 1) % keys, True).scatter(-1, lucky, False)
    return torch.zeros(shape, dtype=dtype).masked_fill(hidden, -INF)


def causal(n: int, dtype=torch.float32):
    return torch.full((n, n), -INF, dtype=dtype).triu(1)


# scaled dot-product attention

scaled_dot_product_attention = Exercise(
    "scaled_dot_product_attention", ref, see="scaled-dot-product-attention"
)


def qkv(g: Gen, *batch: int, queries=3, keys=5, d_k=4, d_v=6, dtype=torch.float32):
    return (
        g.randn(*batch, queries, d_k, dtype=dtype),
        g.randn(*batch, keys, d_k, dtype=dtype),
        g.randn(*batch, keys, d_v, dtype=dtype),
    )


@scaled_dot_product_attention.group("values", share=4)
def _(g: Gen):
    """Compares every query with every key, scales, normalises over the keys and averages the values."""
    q = g.tensor([[2.0, 0, 0, 0]])
    k = g.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0]])
    first = math.e / (math.e + 1)
    by_hand = call(q, k, g.tensor([[1.0, 0, 3], [0, 1, 3]])).expect(g.tensor([[first, 1 - first, 3]]))
    yield by_hand.says("one query, two keys, three numbers per value")
    # a root of d_k that is not whole: rounding it must show
    for sizes in ({}, {"d_k": 7, "d_v": 2}, {"queries": 7, "keys": 2}, {"queries": 6, "keys": 6, "d_v": 4}):
        args = qkv(g, **sizes)
        yield call(*args).expect(F.scaled_dot_product_attention(*args)).says("no batch dimension, no mask")


@scaled_dot_product_attention.group("batch dimensions", share=2)
def _(g: Gen):
    """Works for any number of batch dimensions, each element on its own."""
    for batch in [(2,), (3, 2), (2, 1, 3)]:
        args = qkv(g, *batch)
        fact = F.scaled_dot_product_attention(*args)
        yield call(*args).expect(fact).says(f"{len(batch)} batch dimensions, no mask")


@scaled_dot_product_attention.group("mask", share=3)
def _(g: Gen):
    """Adds the mask to the scores, broadcast to (..., queries, keys), so that hidden keys get weight 0."""
    args = qkv(g)
    yield call(*args, mask=holes(g, 3, 5)).says("a mask of shape (queries, keys)")
    q, k, v = qkv(g, queries=4, keys=4)
    yield call(q, k, v, causal(4)).says("a causal mask")
    for batch, shape in [((2,), (3, 5)), ((2,), (2, 1, 5)), ((2, 3), (2, 1, 3, 5)), ((2, 3), (1, 5))]:
        args, mask = qkv(g, *batch), holes(g, *shape)
        fact = F.scaled_dot_product_attention(*args, attn_mask=mask)
        yield call(*args, mask).expect(fact).says(f"{len(batch)} batch dimensions, a mask of shape {shape}")


@scaled_dot_product_attention.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype of its inputs, half precision included, with and without a mask."""
    for dtype in HALF_AND_DOUBLE:
        for batch in [(), (2, 2)]:
            args = qkv(g, *batch, dtype=dtype)
            yield tolerant(call(*args), dtype).says(f"{dtype}, no mask")
            yield tolerant(call(*args, holes(g, 3, 5, dtype=dtype)), dtype).says(f"{dtype}, with a mask")


@scaled_dot_product_attention.group("gradient", share=1)
def _(g: Gen):
    """Gradients flow to queries, keys and values."""
    yield call(*qkv(g)).gradient().says("no batch dimension")
    yield call(*qkv(g, 2, 3)).gradient().says("two batch dimensions")


@scaled_dot_product_attention.group("edge cases", share=1)
def _(g: Gen):
    """One key, large scores, inputs that are not contiguous."""
    q, _, _ = qkv(g)
    k, v = g.randn(1, 4), g.randn(1, 6)
    yield call(q, k, v).expect(v.expand(3, 6).clone()).says("a single key")
    q = g.tensor([[40.0, 0], [0, 40], [-40, 0]])
    k = g.tensor([[40.0, 10], [40, 20], [30, 40]])
    v = g.randn(3, 2)
    # row 0: two equal winners; row 1: the last key by far; row 2: the last key, the least negative one
    fact = torch.stack((v[:2].mean(0), v[2], v[2]))
    yield call(q, k, v).expect(fact).says("scores of plus and minus a thousand")
    # a mask of a finite number would leave the best key the weight 1
    mask = g.tensor([[0.0, 0, -INF], [0, -INF, -INF], [-INF, 0, 0]])
    fact = torch.stack((v[:2].mean(0), v[0], v[2]))
    yield call(q, 2 * k, v, mask).expect(fact).says("scores of plus and minus two thousand, with a mask")
    q, k, v = (t.transpose(1, 2) for t in (g.randn(2, 3, 2, 4), g.randn(2, 5, 2, 4), g.randn(2, 5, 2, 6)))
    yield call(q, k, v, holes(g, 3, 5)).says("inputs that are transposed views")


@scaled_dot_product_attention.near_miss("scales-by-value-width")
def _(q, k, v, mask=None):
    """The scores are divided by √d_v, but it is the width of queries and keys, d_k, over which the dot
    product sums. Take d_k from `q`."""
    return _attend(q @ k.transpose(-2, -1) / math.sqrt(v.shape[-1]), v, mask)


@scaled_dot_product_attention.near_miss("divides-by-d-k")
def _(q, k, v, mask=None):
    """The scores are divided by d_k itself. A sum of d_k products has a standard deviation of √d_k, so
    divide by √d_k."""
    return _attend(q @ k.transpose(-2, -1) / q.shape[-1], v, mask)


@scaled_dot_product_attention.near_miss("unscaled")
def _(q, k, v, mask=None):
    """The scores are not scaled. Divide them by √d_k before the softmax, else wide heads give nearly
    one-hot weights."""
    return _attend(q @ k.transpose(-2, -1), v, mask)


@scaled_dot_product_attention.near_miss("multiplies-by-root")
def _(q, k, v, mask=None):
    """The scores are multiplied by √d_k. Divide by it: the scale is there to bring large scores back to
    order one."""
    return _attend(q @ k.transpose(-2, -1) * math.sqrt(q.shape[-1]), v, mask)


@scaled_dot_product_attention.near_miss("softmax-over-queries")
def _(q, k, v, mask=None):
    """The softmax runs over the queries. Each query spreads its attention over the keys, so its row must
    sum to 1: normalise over the last axis."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores if mask is None else scores + mask
    return torch.softmax(scores, dim=-2) @ v


@scaled_dot_product_attention.near_miss("softmax-over-axis-one")
def _(q, k, v, mask=None):
    """The softmax runs over axis 1, which is the axis of the keys only where there is no batch dimension.
    Count from the end: `dim=-1`."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores if mask is None else scores + mask
    return torch.softmax(scores, dim=1) @ v


@scaled_dot_product_attention.near_miss("mask-after-softmax")
def _(q, k, v, mask=None):
    """The mask is applied after the softmax: hidden keys have already taken their share, and the other
    weights no longer sum to 1. Add the mask to the scores before the softmax."""
    weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1)
    return (weights if mask is None else weights.masked_fill(mask == -INF, 0)) @ v


@scaled_dot_product_attention.near_miss("renormalised-after-the-mask")
def _(q, k, v, mask=None):
    """The mask is applied after the softmax, and the weights are divided by their sum. That is 0/0 where a
    hidden key has taken all the weight: add the mask to the scores before the softmax."""
    weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1)
    if mask is None:
        return weights @ v
    weights = weights.masked_fill(mask == -INF, 0)
    return weights / weights.sum(-1, keepdim=True) @ v


@scaled_dot_product_attention.near_miss("mask-multiplied")
def _(q, k, v, mask=None):
    """The scores are multiplied by the mask, which is no product of zeros and ones: it is additive, 0
    leaves a score as it is. Add it."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return _attend(scores if mask is None else scores * mask, v, None)


@scaled_dot_product_attention.near_miss("global-maximum")
def _(q, k, v, mask=None):
    """The largest of all scores is subtracted, so the powers of a row far below it are all 0, and 0/0 is
    NaN. Subtract each row's own largest score."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores if mask is None else scores + mask
    powers = (scores - scores.max()).exp()
    return powers / powers.sum(-1, keepdim=True) @ v


@scaled_dot_product_attention.near_miss("mask-added-to-weights")
def _(q, k, v, mask=None):
    """The additive mask is added to the weights, which makes them infinite. Add it to the scores, before
    the softmax, where -inf turns into a weight of exactly 0."""
    weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1)
    return (weights if mask is None else weights + mask) @ v


@scaled_dot_product_attention.near_miss("ignores-the-mask")
def _(q, k, v, mask=None):
    """The mask has no effect. Add it to the scores before the softmax: 0 leaves a score as it is, -inf
    hides the key."""
    return _attend(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), v, None)


@scaled_dot_product_attention.near_miss("mask-inverted")
def _(q, k, v, mask=None):
    """The mask is read the wrong way round: in an additive mask 0 means "may attend" and -inf means "may
    not"."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return _attend(scores if mask is None else scores.masked_fill(mask == 0, -INF), v, None)


@scaled_dot_product_attention.near_miss("softmax-overflows")
def _(q, k, v, mask=None):
    """The exponential of a large score overflows (float32 ends at e^88), and inf/inf is NaN. Subtract each
    row's largest score first, or use `torch.softmax`."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    powers = (scores if mask is None else scores + mask).exp()
    return powers / powers.sum(-1, keepdim=True) @ v


@scaled_dot_product_attention.near_miss("two-axes-only")
def _(q, k, v, mask=None):
    """This works for a single matrix of keys only: with batch dimensions `k.T` or `transpose(0, 1)` turns
    the wrong axes. Swap the last two, `k.transpose(-2, -1)`."""
    return _attend(q @ k.permute(*reversed(range(k.dim()))) / math.sqrt(q.shape[-1]), v, mask)


def _attend(scores, v, mask):
    scores = scores if mask is None else scores + mask
    return torch.softmax(scores, dim=-1) @ v


# splitting and merging heads

split_heads = Exercise("split_heads", ref, see="split-heads")


@split_heads.group("values", share=3)
def _(g: Gen):
    """Gives head i the i-th block of consecutive columns, as (batch, heads, seq, d_hidden/heads)."""
    x = g.tensor([[[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]])
    by_hand = g.tensor([[[[1.0, 2], [5, 6], [9, 10]], [[3, 4], [7, 8], [11, 12]]]])
    yield call(x, 2).expect(by_hand).says("three positions, four columns, two heads")
    for batch, seq, d_hidden, heads in [(1, 5, 12, 3), (2, 3, 8, 4), (3, 4, 6, 2), (2, 4, 16, 4)]:
        x = g.randn(batch, seq, d_hidden)
        fact = torch.stack(x.chunk(heads, dim=-1), dim=1)
        yield (
            call(x, heads).expect(fact).says(f"batch {batch}, seq {seq}, d_hidden {d_hidden}, heads {heads}")
        )


@split_heads.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype and every number exactly."""
    for dtype in HALF_AND_DOUBLE:
        yield call(g.randn(2, 3, 12, dtype=dtype), 3).close(0.0, 0.0).says(f"{dtype}")


@split_heads.group("gradient", share=1)
def _(g: Gen):
    """Gradients flow back to the input."""
    yield call(g.randn(2, 3, 12), 4).gradient()


@split_heads.group("edge cases", share=1)
def _(g: Gen):
    """One head, heads of width 1, one position, inputs that are not contiguous."""
    x = g.randn(2, 3, 4)
    yield call(x, 1).expect(x[:, None].clone()).says("one head is the whole width")
    yield call(x, 4).expect(x.transpose(1, 2)[..., None].clone()).says("as many heads as columns")
    yield call(g.randn(2, 1, 12), 3).says("a single position")
    yield call(g.randn(3, 2, 12).transpose(0, 1), 3).says("a transposed view, axes of batch and seq swapped")
    yield call(g.randn(2, 12, 5).transpose(1, 2), 4).says(
        "a transposed view, axes of seq and d_hidden swapped"
    )


@split_heads.near_miss("view-without-transpose")
def _(x, heads):
    """The shape is right, but `view` alone cuts the numbers up in their order in memory, so a head gets
    pieces of different positions. Split the last axis into (heads, head_dim) first, then swap the axes of
    seq and heads."""
    batch, seq, d_hidden = x.shape
    return x.reshape(batch, heads, seq, d_hidden // heads)


@split_heads.near_miss("interleaved-heads")
def _(x, heads):
    """The heads are interleaved: head i gets columns i, i + heads, i + 2·heads, … A head owns consecutive
    columns, so the last axis splits into (heads, head_dim), in this order."""
    batch, seq, d_hidden = x.shape
    return x.reshape(batch, seq, d_hidden // heads, heads).permute(0, 3, 1, 2)


@split_heads.near_miss("axes-not-swapped")
def _(x, heads):
    """The columns are split, but the result is still (batch, seq, heads, head_dim). Swap axes 1 and 2, so
    that each head has its own (seq, head_dim) matrix."""
    return x.unflatten(-1, (heads, -1))


@split_heads.near_miss("heads-taken-for-width")
def _(x, heads):
    """`heads` is used as the width of a head. It is their number: a head is d_hidden/heads wide."""
    return x.unflatten(-1, (-1, heads)).transpose(1, 2)


@split_heads.near_miss("keys-layout")
def _(x, heads):
    """Each head comes out as (head_dim, seq), the layout of transposed keys. The result is (batch, heads,
    seq, head_dim); the transpose for the scores comes later."""
    return x.unflatten(-1, (heads, -1)).permute(0, 2, 3, 1)


merge_heads = Exercise("merge_heads", ref, see="merge-heads")


@merge_heads.group("values", share=2)
def _(g: Gen):
    """Puts the heads of each position side by side, head 0 first, as (batch, seq, heads·head_dim)."""
    x = g.tensor([[[[1.0, 2], [5, 6], [9, 10]], [[3, 4], [7, 8], [11, 12]]]])
    by_hand = g.tensor([[[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]])
    yield call(x).expect(by_hand).says("two heads, three positions, two columns each")
    for batch, heads, seq, head_dim in [(1, 3, 5, 4), (2, 4, 3, 2), (3, 2, 4, 3), (2, 4, 4, 4)]:
        x = g.randn(batch, heads, seq, head_dim)
        fact = torch.cat(x.unbind(1), dim=-1)
        yield call(x).expect(fact).says(f"batch {batch}, heads {heads}, seq {seq}, head_dim {head_dim}")


@merge_heads.group("inverse", share=1)
def _(g: Gen):
    """Undoes the split, also on a view whose axes are swapped in memory."""
    for batch, seq, heads, head_dim in [(2, 3, 4, 2), (1, 5, 3, 4)]:
        x = g.randn(batch, seq, heads * head_dim)
        split = x.unflatten(-1, (heads, head_dim)).transpose(1, 2)
        yield call(split).expect(x).says(f"the split of batch {batch}, seq {seq}, heads {heads}")
    yield call(g.randn(2, 3, 4, 5).transpose(2, 3)).says(
        "a transposed view, axes of seq and head_dim swapped"
    )


@merge_heads.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype and every number exactly."""
    for dtype in HALF_AND_DOUBLE:
        yield call(g.randn(2, 3, 5, 4, dtype=dtype)).close(0.0, 0.0).says(f"{dtype}")


@merge_heads.group("gradient", share=1)
def _(g: Gen):
    """Gradients flow back to the input."""
    yield call(g.randn(2, 3, 5, 4)).gradient()


@merge_heads.group("edge cases", share=1)
def _(g: Gen):
    """One head, heads of width 1, one position."""
    x = g.randn(2, 1, 3, 4)
    yield call(x).expect(x[:, 0].clone()).says("a single head")
    x = g.randn(2, 4, 3, 1)
    yield call(x).expect(x[..., 0].transpose(1, 2).clone()).says("heads of width 1")
    yield call(g.randn(2, 3, 1, 4)).says("a single position")


@merge_heads.near_miss("reshape-without-transpose")
def _(x):
    """The shape is right, but `reshape` alone strings the numbers together head by head, so a row mixes
    positions. Swap the axes of heads and seq first, then join heads and head_dim."""
    batch, heads, seq, head_dim = x.shape
    return x.reshape(batch, seq, heads * head_dim)


@merge_heads.near_miss("view-after-transpose")
def _(x):
    """`view` cannot join two axes that are not neighbours in memory, which is so after a transpose. Use
    `reshape`, or `contiguous()` before `view`."""
    batch, heads, seq, head_dim = x.shape
    return x.transpose(1, 2).view(batch, seq, heads * head_dim)


@merge_heads.near_miss("interleaved-heads")
def _(x):
    """The columns of the heads are interleaved: 0 of head 0, 0 of head 1, … A head's columns stay together,
    so heads is the slower and head_dim the faster of the two joined axes."""
    return x.permute(0, 2, 3, 1).flatten(-2)


@merge_heads.near_miss("axes-not-joined")
def _(x):
    """The axes are swapped to (batch, seq, heads, head_dim), but heads and head_dim are still apart. Join
    them into one axis of width heads·head_dim."""
    return x.transpose(1, 2).contiguous()


@merge_heads.near_miss("sums-heads")
def _(x):
    """The heads are added up. They are concatenated: side by side, each keeps its columns, and w_o mixes
    them later."""
    return x.sum(1)


@merge_heads.near_miss("joined-along-seq")
def _(x):
    """The heads are strung together along the positions. Join them along the last axis: the number of
    positions stays."""
    return x.flatten(1, 2)


# multi-head attention

multi_head_attention = Exercise("multi_head_attention", ref, see="multi-head-attention")


def mha(
    g: Gen, *batch, queries=3, keys=5, d_hidden=6, heads=2, d_k=4, d_v=5, dtype=torch.float32, same=False
):
    """Inputs and weights; `same` gives self-attention."""
    x_query = g.randn(*batch, queries, d_hidden, dtype=dtype)
    x_key = x_query if same else g.randn(*batch, keys, d_hidden, dtype=dtype)

    def weight(rows, columns):
        return (g.randn(rows, columns, dtype=torch.float64) / math.sqrt(rows)).to(dtype)

    weights = [weight(d_hidden, heads * d) for d in (d_k, d_k, d_v)] + [weight(heads * d_v, d_hidden)]
    return (x_query, x_key, *weights, heads)


def head_by_head(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    """Multi-head attention as a sum over heads: projecting the concatenation is adding the projected
    heads."""
    blocks = [w.chunk(heads, dim=1) for w in (w_q, w_k, w_v)] + [w_o.chunk(heads, dim=0)]
    masks = [None] * heads if mask is None else [mask[..., h, :, :] for h in range(heads)]
    total = 0
    for h, m in enumerate(masks):
        q, k, v = x_query @ blocks[0][h], x_key @ blocks[1][h], x_key @ blocks[2][h]
        total = total + F.scaled_dot_product_attention(q, k, v, attn_mask=m) @ blocks[3][h]
    return total


@multi_head_attention.group("self-attention", share=4)
def _(g: Gen):
    """Projects, attends in each head, concatenates and projects back; both inputs are the same."""
    one_head = (2.0 * torch.eye(2),) * 4  # queries, keys and values are 2x, the output is doubled once more
    x = g.tensor([[1.0, 0], [0, 1]])
    first = 1 / (1 + math.exp(-4 / math.sqrt(2)))
    by_hand = 4 * g.tensor([[first, 1 - first], [1 - first, first]])
    yield (
        call(x[None], x[None], *one_head, 1)
        .expect(by_hand[None])
        .says("one head, two positions, weights 2·identity")
    )
    for sizes in ({"d_k": 3, "d_v": 3}, {"d_k": 4, "d_v": 2}, {"heads": 3, "d_k": 2, "d_v": 4}):
        args = mha(g, 2, queries=4, same=True, **sizes)
        yield call(*args).expect(head_by_head(*args)).says(", ".join(f"{k} {v}" for k, v in sizes.items()))


@multi_head_attention.group("cross-attention", share=2)
def _(g: Gen):
    """Takes queries from the first input, keys and values from the second."""
    for queries, keys in [(3, 5), (4, 4), (6, 2), (1, 6)]:
        args = mha(g, 2, queries=queries, keys=keys)
        yield call(*args).expect(head_by_head(*args)).says(f"{queries} queries, {keys} keys")


@multi_head_attention.group("mask", share=2)
def _(g: Gen):
    """Broadcasts the additive mask to (..., heads, queries, keys)."""
    args, mask = mha(g, 2, heads=3, d_k=2, d_v=4), holes(g, 2, 3, 3, 5)
    yield call(*args, mask=mask).expect(head_by_head(*args, mask)).says("a mask for every row and head")
    yield call(*mha(g, 2), holes(g, 3, 5)).says("one mask for all rows and heads")
    yield call(*mha(g, 3), holes(g, 3, 1, 3, 5)).says("a mask for every row, the same for all heads")
    yield call(*mha(g, 2, heads=3), holes(g, 3, 3, 5)).says("a mask for every head, the same for all rows")
    yield call(*mha(g, 2, queries=5, same=True), causal(5)).says("a causal mask")


@multi_head_attention.group("batch dimensions", share=1)
def _(g: Gen):
    """Works without a batch dimension and with several."""
    for batch in [(), (2, 3)]:
        args = mha(g, *batch, heads=3, d_k=2)
        yield call(*args).expect(head_by_head(*args)).says(f"{len(batch)} batch dimensions")
        yield call(*args, holes(g, 3, 3, 5)).says(f"{len(batch)} batch dimensions, with a mask")


@multi_head_attention.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype of its inputs, half precision included, with and without a mask."""
    for dtype in HALF_AND_DOUBLE:
        args = mha(g, 2, dtype=dtype)
        yield tolerant(call(*args), dtype, steps=2).says(f"{dtype}, no mask")
        yield tolerant(call(*args, holes(g, 3, 5, dtype=dtype)), dtype, steps=2).says(f"{dtype}, with a mask")


@multi_head_attention.group("gradient", share=1)
def _(g: Gen):
    """Gradients flow to both inputs and to all four weights."""
    yield call(*mha(g, 2)).gradient().says("cross-attention")
    yield call(*mha(g, 1, heads=3, d_k=2, d_v=2)).gradient().says("three heads")


@multi_head_attention.group("edge cases", share=1)
def _(g: Gen):
    """One head, one query and key, inputs that are not contiguous."""
    yield call(*mha(g, 2, heads=1)).says("one head")
    yield call(*mha(g, 2, queries=1, same=True)).says("a single position")
    x_query, x_key, *rest = mha(g, 2)
    rest[:4] = [w.T.contiguous().T for w in rest[:4]]
    x_query, x_key = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (x_query, x_key))
    yield call(x_query, x_key, *rest).says("inputs and weights that are transposed views")


def _mha(
    x_query,
    x_key,
    w_q,
    w_k,
    w_v,
    w_o,
    heads,
    mask=None,
    *,
    scale=None,
    split=None,
    project=True,
    x_value=None,
):
    """Multi-head attention with one part to be replaced."""
    split = split or (lambda x: x.unflatten(-1, (heads, -1)).transpose(-2, -3))
    q, k = split(x_query @ w_q), split(x_key @ w_k)
    v = split((x_key if x_value is None else x_value) @ w_v)
    scores = q @ k.transpose(-2, -1) * (scale if scale else q.shape[-1] ** -0.5)
    scores = scores if mask is None else scores + mask
    mixed = torch.softmax(scores, dim=-1) @ v
    merged = mixed.transpose(-2, -3).flatten(-2)
    return merged @ w_o if project else merged


@multi_head_attention.near_miss("no-output-projection")
def _(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    """The concatenated heads are returned as they are. Multiply them by `w_o`: it mixes the heads and
    brings the width back to d_hidden."""
    return _mha(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask, project=False)


@multi_head_attention.near_miss("weights-transposed")
def _(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    """The weights are transposed, as `torch.nn.Linear` keeps them. Here row vectors are multiplied by the
    matrices as they are: `x @ w`."""
    return _mha(x_query, x_key, w_q.T, w_k.T, w_v.T, w_o.T, heads, mask)


@multi_head_attention.near_miss("scaled-by-all-heads")
def _(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    """The scores are divided by the root of the width of all heads together. Each dot product runs over one
    head, so divide by √d_k with d_k the width of one head."""
    return _mha(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask, scale=w_q.shape[-1] ** -0.5)


@multi_head_attention.near_miss("scaled-by-model-width")
def _(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    """The scores are divided by √d_hidden. Each dot product runs over the d_k columns of one head, so
    divide by √d_k."""
    return _mha(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask, scale=x_query.shape[-1] ** -0.5)


@multi_head_attention.near_miss("width-from-d-hidden")
def _(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    """The width of a head is taken for d_hidden/heads. That is the usual choice, not a law: read d_k off
    `w_q` and d_v off `w_v`, their columns divided by `heads`."""
    width = x_query.shape[-1] // heads
    q, k, v = (
        (x @ w).reshape(*x.shape[:-1], heads, width).transpose(-3, -2)
        for x, w in ((x_query, w_q), (x_key, w_k), (x_key, w_v))
    )
    scores = q @ k.transpose(-2, -1) / math.sqrt(width)
    scores = scores if mask is None else scores + mask
    return (torch.softmax(scores, dim=-1) @ v).transpose(-3, -2).flatten(-2) @ w_o


@multi_head_attention.near_miss("axes-from-the-front")
def _(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    """The axes of seq and heads are counted from the front, which is right for one batch dimension alone.
    Count from the end: swap axes -3 and -2."""
    q, k, v = (
        (x @ w).unflatten(-1, (heads, -1)).transpose(1, 2)
        for x, w in ((x_query, w_q), (x_key, w_k), (x_key, w_v))
    )
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores if mask is None else scores + mask
    return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2) @ w_o


@multi_head_attention.near_miss("scaled-by-d-hidden-over-heads")
def _(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    """The scale uses d_hidden/heads for d_k. That is the usual choice of d_k, not a law: read the width of
    a head off `w_q`."""
    return _mha(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask, scale=(x_query.shape[-1] / heads) ** -0.5)


@multi_head_attention.near_miss("unscaled", see="scaled-dot-product-attention")
def _(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    """The scores are not scaled. Divide them by √d_k, d_k the width of one head, before the softmax."""
    return _mha(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask, scale=1.0)


@multi_head_attention.near_miss("keys-from-query-input")
def _(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    """Keys and values are made from `x_query`, which is self-attention. In cross-attention they come from
    `x_key`: a query asks one sequence and is answered by the other."""
    return _mha(x_query, x_query, w_q, w_k, w_v, w_o, heads, mask)


@multi_head_attention.near_miss("values-from-query-input")
def _(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    """The values are made from `x_query`. Keys and values belong together: both come from `x_key`."""
    return _mha(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask, x_value=x_query)


@multi_head_attention.near_miss("interleaved-heads")
def _(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    """A head is given every `heads`-th column. Heads are consecutive blocks of columns: split the last axis
    into (heads, width of a head), in this order."""

    def split(x):
        return x.unflatten(-1, (-1, heads)).movedim(-1, -3)

    return _mha(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask, split=split)


@multi_head_attention.near_miss("split-without-transpose")
def _(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    """The projections are reshaped to (heads, seq, width) without a transpose, so a head mixes columns of
    different positions. Split the last axis first, then swap the axes of seq and heads."""

    def split(x):
        return x.reshape(*x.shape[:-2], heads, x.shape[-2], -1)

    return _mha(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask, split=split)


@multi_head_attention.near_miss("merge-without-transpose")
def _(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    """The heads are joined by a reshape alone, so a row mixes positions. Swap the axes of heads and seq
    before you join heads and width."""
    q, k, v = (
        (x @ w).unflatten(-1, (heads, -1)).transpose(-2, -3)
        for x, w in ((x_query, w_q), (x_key, w_k), (x_key, w_v))
    )
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return mixed.reshape(*x_query.shape[:-1], -1) @ w_o


@multi_head_attention.near_miss("one-wide-head")
def _(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    """All columns act as one wide head, `heads` has no effect. Split the projections, so that each head has
    its own softmax."""
    return _mha(x_query, x_key, w_q, w_k, w_v, w_o, 1, mask)


@multi_head_attention.near_miss("ignores-the-mask")
def _(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    """The mask has no effect. Add it to the scores of the heads before the softmax."""
    return _mha(x_query, x_key, w_q, w_k, w_v, w_o, heads)


# parameters

attention_parameter_count = Exercise("attention_parameter_count", ref, see="attention-parameter-count")


@attention_parameter_count.group("default widths", share=2)
def _(g: Gen):
    """Counts all four matrices when a head is d_hidden/heads wide."""
    yield call(512, 8).expect(1_048_576).says("the original transformer")
    for heads in (1, 2, 3):
        d_hidden = heads * g.python.randrange(2, 40)
        yield call(d_hidden, heads).expect(4 * d_hidden**2).says(f"{heads} heads, default widths")


@attention_parameter_count.group("given widths", share=2)
def _(g: Gen):
    """Uses d_k and d_v where they are given, both or one of them, by position or by name."""
    yield call(10, 3, 4, 5).expect(240 + 150 + 150).says("both widths, heads need not divide d_hidden")
    yield call(12, 3, d_k=2).expect(144 + 288).says("d_k alone")
    yield call(12, 3, d_v=2).expect(288 + 144).says("d_v alone")
    heads, d_k, d_v = (g.python.randrange(2, 9) for _ in range(3))
    d_hidden = heads * g.python.randrange(10, 20)
    yield call(d_hidden, heads, d_k=d_k, d_v=d_v).says("both widths by name")
    yield call(d_hidden, heads, d_v=d_v).says("d_v alone, other sizes")
    yield call(d_hidden, heads, d_k).says("d_k alone, by position")


@attention_parameter_count.group("errors", share=2)
def _(g: Gen):
    """Refuses to guess a width when d_hidden/heads is not whole."""
    yield call(100, 12).raises(ValueError).says("no width given")
    yield call(10, 4, d_k=3).raises(ValueError).says("d_v is missing")
    yield call(10, 4, d_v=3).raises(ValueError).says("d_k is missing")


def _widths(d_hidden, heads, d_k, d_v):
    if (d_k is None or d_v is None) and d_hidden % heads:
        raise ValueError("d_hidden/heads is not whole")
    default = d_hidden // heads
    return default if d_k is None else d_k, default if d_v is None else d_v


@attention_parameter_count.near_miss("counts-one-head")
def _(d_hidden, heads, d_k=None, d_v=None):
    """The matrices of a single head are counted. d_k and d_v are the widths of one head: multiply them by
    `heads`."""
    d_k, d_v = _widths(d_hidden, heads, d_k, d_v)
    return 2 * d_hidden * d_k + 2 * d_hidden * d_v


@attention_parameter_count.near_miss("forgets-w-o")
def _(d_hidden, heads, d_k=None, d_v=None):
    """The output projection `w_o` is missing. There are four matrices; `w_o` has heads·d_v rows and
    d_hidden columns."""
    d_k, d_v = _widths(d_hidden, heads, d_k, d_v)
    return 2 * d_hidden * heads * d_k + d_hidden * heads * d_v


@attention_parameter_count.near_miss("w-o-square")
def _(d_hidden, heads, d_k=None, d_v=None):
    """`w_o` is counted as d_hidden × d_hidden. Its rows are the concatenated heads: heads·d_v of them,
    whatever d_hidden is."""
    d_k, d_v = _widths(d_hidden, heads, d_k, d_v)
    return 2 * d_hidden * heads * d_k + d_hidden * heads * d_v + d_hidden**2


@attention_parameter_count.near_miss("ignores-the-widths")
def _(d_hidden, heads, d_k=None, d_v=None):
    """The given d_k and d_v have no effect. They set the columns of w_q, w_k and w_v and the rows of w_o."""
    _widths(d_hidden, heads, d_k, d_v)
    return 4 * d_hidden**2


@attention_parameter_count.near_miss("d-v-follows-d-k")
def _(d_hidden, heads, d_k=None, d_v=None):
    """When d_v is left out it is d_hidden/heads, not d_k: the two widths have a default each."""
    d_k, default = _widths(d_hidden, heads, d_k, d_v)
    d_v = (d_k if d_v is None else d_v) if default else 0
    return 2 * d_hidden * heads * (d_k + d_v)


@attention_parameter_count.near_miss("values-as-wide-as-keys")
def _(d_hidden, heads, d_k=None, d_v=None):
    """d_v has no effect: w_v and w_o are counted with d_k. Values may have a width of their own, and w_o
    takes them in."""
    d_k, _ = _widths(d_hidden, heads, d_k, d_v)
    return 4 * d_hidden * heads * d_k


@attention_parameter_count.near_miss("adds-biases")
def _(d_hidden, heads, d_k=None, d_v=None):
    """Biases are counted, too. The projections here are matrices alone."""
    d_k, d_v = _widths(d_hidden, heads, d_k, d_v)
    return 2 * (d_hidden + 1) * heads * d_k + (d_hidden + 1) * heads * d_v + (heads * d_v + 1) * d_hidden


@attention_parameter_count.near_miss("rounds-the-width")
def _(d_hidden, heads, d_k=None, d_v=None):
    """A width that is not whole is rounded down in silence. Raise a ValueError when d_hidden/heads is
    needed and not whole."""
    d_k = d_hidden // heads if d_k is None else d_k
    d_v = d_hidden // heads if d_v is None else d_v
    return 2 * d_hidden * heads * (d_k + d_v)


@attention_parameter_count.near_miss("always-wants-whole-heads")
def _(d_hidden, heads, d_k=None, d_v=None):
    """An error is raised though both widths are given. d_hidden/heads must be whole only where it is used
    as a default."""
    if d_hidden % heads:
        raise ValueError("d_hidden/heads is not whole")
    d_k, d_v = _widths(d_hidden, heads, d_k, d_v)
    return 2 * d_hidden * heads * (d_k + d_v)


# positions

sinusoidal_positions = Exercise("sinusoidal_positions", ref, see="sinusoidal-positions")


@sinusoidal_positions.group("values", share=3)
def _(g: Gen):
    """Sines on even columns, cosines on odd ones, each pair slower than the one before; float32."""
    by_hand = [[0, 1, 0, 1], [math.sin(1), math.cos(1), math.sin(0.01), math.cos(0.01)]]
    yield call(2, 4).expect(g.tensor(by_hand)).says("two positions, four columns")
    for seq, d_hidden in [(6, 8), (4, 12), (12, 6)]:
        fact = [
            [f(t / 10000 ** (2 * i / d_hidden)) for i in range(d_hidden // 2) for f in (math.sin, math.cos)]
            for t in range(seq)
        ]
        yield call(seq, d_hidden).expect(g.tensor(fact)).says(f"{seq} positions, {d_hidden} columns")


@sinusoidal_positions.group("base", share=1)
def _(g: Gen):
    """The base sets how much slower each pair is."""
    by_hand = [math.sin(2), math.cos(2), math.sin(0.5), math.cos(0.5)]
    yield (
        call(3, 4, base=16.0)
        .judge(
            lambda value, *_: (
                None if torch.allclose(value[2], g.tensor(by_hand), atol=1e-5) else "row 2 is not right"
            )
        )
        .says("base 16")
    )
    yield call(5, 8, 100.0).says("base 100, by position")
    yield call(5, 6, base=float(g.python.randrange(20, 500))).says("another base")


@sinusoidal_positions.group("edge cases", share=1)
def _(g: Gen):
    """One position, two columns, distant positions."""
    yield call(1, 6).expect(g.tensor([[0.0, 1, 0, 1, 0, 1]])).says("position 0 alone")
    yield call(5, 2).says("one pair of columns")
    yield call(200, 16).close(0.0, 1e-3).says("two hundred positions")


@sinusoidal_positions.group("errors", share=1)
def _(g: Gen):
    """Refuses an odd width."""
    for d_hidden in (5, 1, 2 * g.python.randrange(4, 20) + 1):
        yield call(3, d_hidden).raises(ValueError).says("an odd d_hidden")


def _table(seq, d_hidden, angles):
    if d_hidden % 2:
        raise ValueError("d_hidden is odd")
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).float()


def _angles(seq, d_hidden, base, exponent=2.0, start=0):
    pairs = torch.arange(d_hidden // 2, dtype=torch.float64)
    return torch.arange(start, start + seq, dtype=torch.float64)[:, None] * base ** (
        -exponent * pairs / d_hidden
    )


@sinusoidal_positions.near_miss("sine-block-then-cosine-block")
def _(seq, d_hidden, base=10000.0):
    """All sines come first, then all cosines. Sine and cosine of the same angle are neighbours: even
    columns hold sines, odd columns cosines."""
    table = _table(seq, d_hidden, _angles(seq, d_hidden, base))
    return torch.cat((table[:, 0::2], table[:, 1::2]), dim=1)


@sinusoidal_positions.near_miss("exponent-halved")
def _(seq, d_hidden, base=10000.0):
    """The exponent is i/d_hidden with i the number of the pair. It is 2i/d_hidden, so that the last pairs
    turn almost `base` times slower than the first."""
    return _table(seq, d_hidden, _angles(seq, d_hidden, base, exponent=1.0))


@sinusoidal_positions.near_miss("exponent-doubled")
def _(seq, d_hidden, base=10000.0):
    """The exponent is twice too large: in 2i/d_hidden, i counts pairs. If you count with `arange(0,
    d_hidden, 2)`, the 2 is already in it."""
    return _table(seq, d_hidden, _angles(seq, d_hidden, base, exponent=4.0))


@sinusoidal_positions.near_miss("exponent-from-the-column")
def _(seq, d_hidden, base=10000.0):
    """The exponent uses the column's own number, so a sine and its cosine turn at different speeds. Both
    columns of a pair share the exponent 2i/d_hidden."""
    columns = torch.arange(d_hidden, dtype=torch.float64)
    angles = torch.arange(seq, dtype=torch.float64)[:, None] * base ** (-columns / d_hidden)
    if d_hidden % 2:
        raise ValueError("d_hidden is odd")
    return torch.where(columns % 2 == 0, angles.sin(), angles.cos()).float()


@sinusoidal_positions.near_miss("starts-at-one")
def _(seq, d_hidden, base=10000.0):
    """The positions are counted from 1. They start at 0: the first row is 0, 1, 0, 1, …"""
    return _table(seq, d_hidden, _angles(seq, d_hidden, base, start=1))


@sinusoidal_positions.near_miss("cosine-first")
def _(seq, d_hidden, base=10000.0):
    """Sine and cosine are swapped. Even columns (0, 2, …) hold the sine, odd columns the cosine."""
    return _table(seq, d_hidden, _angles(seq, d_hidden, base)).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


@sinusoidal_positions.near_miss("ignores-the-base")
def _(seq, d_hidden, base=10000.0):
    """The base is fixed at 10000, the argument has no effect."""
    return _table(seq, d_hidden, _angles(seq, d_hidden, 10000.0))


@sinusoidal_positions.near_miss("multiplies-by-the-power")
def _(seq, d_hidden, base=10000.0):
    """The position is multiplied by base^(2i/d_hidden). Divide: later pairs turn slower, not faster."""
    return _table(seq, d_hidden, _angles(seq, d_hidden, base, exponent=-2.0))


@sinusoidal_positions.near_miss("accepts-an-odd-width")
def _(seq, d_hidden, base=10000.0):
    """An odd width is accepted, though its last sine has no cosine. Raise a ValueError."""
    table = _table(seq, d_hidden + d_hidden % 2, _angles(seq, d_hidden + d_hidden % 2, base))
    return table[:, :d_hidden]


apply_rope = Exercise("apply_rope", ref, see="apply-rope")


def rotation(x, positions, base=10000.0):
    """RoPE as a multiplication of complex numbers, in float64: an independent fact."""
    head_dim = x.shape[-1]
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turn = torch.exp(1j * positions[..., None] * frequencies)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def rope_case(x, positions, **kwargs):
    """Compares with the complex rotation; float32 angles of positions below 100 are good to 1e-4."""
    return call(x, positions, **kwargs).expect(rotation(x, positions, **kwargs)).close(1e-4, 1e-4)


@apply_rope.group("values", share=3)
def _(g: Gen):
    """Rotates columns 2i and 2i + 1 together, by the angle position / base^(2i/head_dim)."""
    by_hand = g.tensor([[math.cos(1), math.sin(1), -math.sin(0.01), math.cos(0.01)]])
    yield call(g.tensor([[1.0, 0, 0, 1]]), g.tensor([1])).expect(by_hand).says("one vector at position 1")
    yield rope_case(g.randn(5, 8), torch.arange(5)).says("positions 0 to 4")
    yield rope_case(g.randn(4, 6), g.tensor([7, 3, 20, 3])).says("positions with gaps and repeats")
    yield rope_case(g.randn(4, 8), torch.arange(4) + g.python.randrange(5, 30)).says(
        "consecutive positions, not from 0"
    )


@apply_rope.group("batch dimensions", share=2)
def _(g: Gen):
    """Broadcasts the positions to all axes of x but the last."""
    yield rope_case(g.randn(2, 5, 8), g.perm(9)[:5]).says("(batch, seq, head_dim), positions of shape (seq,)")
    yield rope_case(g.randn(2, 3, 5, 4), g.perm(9)[:5]).says(
        "(batch, heads, seq, head_dim), positions (seq,)"
    )
    yield rope_case(g.randn(3, 5, 8), g.ints(0, 40, 3, 5)).says(
        "a row of positions for every element of the batch"
    )
    yield rope_case(g.randn(2, 3, 4, 6), g.ints(0, 40, 2, 1, 4)).says("positions of shape (batch, 1, seq)")
    yield rope_case(g.randn(3, 4, 6), g.ints(1, 40, 3, 1)).says("positions of shape (batch, 1)")


@apply_rope.group("base", share=1)
def _(g: Gen):
    """The base sets how much slower each pair turns."""
    x = g.tensor([[0.0, 0, 1, 0]])
    by_hand = g.tensor([[0, 0, math.cos(0.5), math.sin(0.5)]])
    yield call(x, g.tensor([2]), base=16.0).expect(by_hand).says("base 16, second pair at position 2")
    yield rope_case(g.randn(4, 8), g.perm(20)[:4], base=500.0).says("base 500")
    x, positions = g.randn(4, 8), g.perm(20)[:4]
    yield call(x, positions, 100.0).close(1e-4, 1e-4).says("base 100, by position")


@apply_rope.group("distance", share=1)
def _(g: Gen):
    """The dot product of two rotated vectors depends on their distance alone, and on its sign."""
    pair, distance, start = g.randn(2, 8), g.python.randrange(1, 9), g.python.randrange(50, 200)
    rows = pair.expand(3, 2, 8).clone()
    positions = g.tensor([[0, distance], [start, start + distance], [distance, 0]])

    def verdict(value, *_):
        near, far, turned = value.prod(-2).sum(-1)
        if (near - far).abs() > 1e-3:
            return "the same two vectors at the same distance, further on, have another dot product"
        want = rotation(rows, positions).prod(-2).sum(-1)[2]
        return None if (turned - want).abs() < 1e-3 else "a distance and its negative are confused"

    yield call(rows, positions).judge(verdict).says("two vectors, moved along together")


@apply_rope.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype of x; the angles are right in half precision, too, where 300 is a large position."""
    for dtype in HALF_AND_DOUBLE:
        yield tolerant(call(g.randn(2, 4, 8, dtype=dtype), torch.arange(4)), dtype).says(
            f"{dtype}, small positions"
        )
    for dtype in (torch.float16, torch.bfloat16):
        x = g.randn(2, 4, 8, dtype=dtype)
        yield call(x, g.perm(300)[:4] + 301).says(f"{dtype}, positions above 300")


@apply_rope.group("gradient", share=1)
def _(g: Gen):
    """Gradients flow to x."""
    yield call(g.randn(2, 4, 8), g.perm(9)[:4]).gradient()


@apply_rope.group("edge cases", share=1)
def _(g: Gen):
    """Position 0, a single pair, distant positions, other integer dtypes, views."""
    x = g.randn(3, 6)
    yield call(x, g.tensor([0, 0, 0])).expect(x).says("position 0 changes nothing")
    yield rope_case(g.randn(4, 2), g.perm(9)[:4]).says("a single pair of columns")
    yield rope_case(g.randn(1, 8), g.tensor([5])).says("a single position")
    # the angle of a single pair is the position itself, exact in float32
    yield rope_case(g.randn(3, 2), 100_000 + g.perm(9)[:3]).says("positions beyond 100,000")
    yield rope_case(g.randn(4, 8), g.perm(9)[:4].int()).says("int32 positions")
    yield (
        call(g.randn(2, 3, 8), 2 * g.ints(1025, 2000, 3) + 1)
        .close(1e-2, 1e-2)
        .says("positions in the thousands")
    )
    yield rope_case(g.randn(2, 4, 3, 6).transpose(1, 2), g.perm(9)[:4]).says("x is a transposed view")


def _rope(x, positions, base=10000.0, exponent=2.0, sign=1.0):
    head_dim = x.shape[-1]
    pairs = torch.arange(head_dim // 2, dtype=torch.float64)
    angles = sign * positions[..., None] * base ** (-exponent * pairs / head_dim)
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


@apply_rope.near_miss("ignores-the-positions")
def _(x, positions, base=10000.0):
    """The rows are numbered 0, 1, 2, … and `positions` has no effect. A row's angle comes from its own
    position, which may be any integer."""
    return _rope(x, torch.arange(x.shape[-2]), base)


@apply_rope.near_miss("restarts-at-zero")
def _(x, positions, base=10000.0):
    """The positions are shifted so that the first one is 0. They are absolute: the first row may stand at
    position 7, and is rotated by it."""
    return _rope(x, positions - positions[..., :1], base)


@apply_rope.near_miss("rotates-the-other-way")
def _(x, positions, base=10000.0):
    """The pairs turn the other way. Column 2i becomes x₀·cos − x₁·sin and column 2i + 1 becomes x₀·sin +
    x₁·cos: check the two signs."""
    return _rope(x, positions, base, sign=-1.0)


@apply_rope.near_miss("pairs-the-halves")
def _(x, positions, base=10000.0):
    """Column i is paired with column i + head_dim/2, as some libraries do. The RoFormer paper pairs
    neighbours: columns 2i and 2i + 1."""
    half = x.shape[-1] // 2
    order = torch.arange(x.shape[-1]).view(2, half).T.flatten()
    return _rope(x[..., order], positions, base)[..., order.argsort()]


@apply_rope.near_miss("pairs-left-apart")
def _(x, positions, base=10000.0):
    """The pairs are rotated, but all first members come out before all second ones. Put each pair back
    where it was: columns 2i and 2i + 1."""
    y = _rope(x, positions, base)
    return torch.cat((y[..., 0::2], y[..., 1::2]), dim=-1)


@apply_rope.near_miss("exponent-halved")
def _(x, positions, base=10000.0):
    """The exponent is i/head_dim with i the number of the pair. It is 2i/head_dim."""
    return _rope(x, positions, base, exponent=1.0)


@apply_rope.near_miss("exponent-doubled")
def _(x, positions, base=10000.0):
    """The exponent is twice too large: in 2i/head_dim, i counts pairs. If you count with `arange(0,
    head_dim, 2)`, the 2 is already in it."""
    return _rope(x, positions, base, exponent=4.0)


@apply_rope.near_miss("one-angle-for-all-pairs")
def _(x, positions, base=10000.0):
    """All pairs turn by the same angle. Pair i turns by position / base^(2i/head_dim): the later, the
    slower."""
    return _rope(x, positions, base, exponent=0.0)


@apply_rope.near_miss("ignores-the-base")
def _(x, positions, base=10000.0):
    """The base is fixed at 10000, the argument has no effect."""
    return _rope(x, positions)


@apply_rope.near_miss("shares-positions-across-the-batch")
def _(x, positions, base=10000.0):
    """The first row of positions is used for the whole batch. Each element of the batch may have positions
    of its own: give `positions` one more axis at the end and let it broadcast."""
    return _rope(x, positions.reshape(-1, positions.shape[-1])[0], base)


@apply_rope.near_miss("adds-the-angles")
def _(x, positions, base=10000.0):
    """Sines and cosines of the position are added to x. RoPE does not add anything: it rotates each pair of
    columns."""
    table = _rope(
        torch.tensor([0.0, 1.0]).repeat(x.shape[-1] // 2).expand(x.shape), positions, base, sign=-1.0
    )
    return (x + table).to(x.dtype)


@apply_rope.near_miss("angles-in-half-precision")
def _(x, positions, base=10000.0):
    """The angles are computed in the dtype of x. bfloat16 counts exactly only to 256, so distant positions
    collide: compute the angles in float32 and cast the result."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    dtype = x.dtype if half else torch.float64
    frequencies = (base ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])).to(dtype)
    angles = positions[..., None].to(dtype) * frequencies
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


# the block

decoder_block = Exercise("decoder_block", ref, see="decoder-block")


def block_weights(g: Gen, d_hidden=8, d_ff=12, dtype=torch.float32):
    """Weights that keep activations at order one; scales near 1, biases that are not zero."""

    def matrix(rows, columns):
        return (g.randn(rows, columns, dtype=torch.float64) / math.sqrt(rows)).to(dtype)

    def scale():
        return (1 + 0.3 * g.randn(d_hidden, dtype=torch.float64)).to(dtype)

    def bias(width):
        return (0.3 * g.randn(width, dtype=torch.float64)).to(dtype)

    return BlockWeights(
        ln1_scale=scale(),
        ln1_bias=bias(d_hidden),
        w_q=matrix(d_hidden, d_hidden),
        w_k=matrix(d_hidden, d_hidden),
        w_v=matrix(d_hidden, d_hidden),
        w_o=matrix(d_hidden, d_hidden),
        ln2_scale=scale(),
        ln2_bias=bias(d_hidden),
        w_up=matrix(d_hidden, d_ff),
        b_up=bias(d_ff),
        w_down=matrix(d_ff, d_hidden),
        b_down=bias(d_hidden),
    )


def torch_layer(x, w: BlockWeights, heads: int):
    """The same block from torch.nn: an encoder layer with a causal mask is a decoder block."""
    layer = torch.nn.TransformerEncoderLayer(
        x.shape[-1], heads, w.w_up.shape[1], dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    ).eval()
    state = {
        "self_attn.in_proj_weight": torch.cat([w.w_q.T, w.w_k.T, w.w_v.T]),
        "self_attn.in_proj_bias": torch.zeros(3 * x.shape[-1]),
        "self_attn.out_proj.weight": w.w_o.T,
        "self_attn.out_proj.bias": torch.zeros(x.shape[-1]),
        "linear1.weight": w.w_up.T,
        "linear1.bias": w.b_up,
        "linear2.weight": w.w_down.T,
        "linear2.bias": w.b_down,
        "norm1.weight": w.ln1_scale,
        "norm1.bias": w.ln1_bias,
        "norm2.weight": w.ln2_scale,
        "norm2.bias": w.ln2_bias,
    }
    layer.load_state_dict(state)
    with torch.no_grad():
        return layer(x, src_mask=causal(x.shape[1]))


@decoder_block.group("values", share=4)
def _(g: Gen):
    """Norm, causal attention, residual; norm, GELU feed-forward, residual."""
    for batch, seq, d_hidden, heads, d_ff in [(1, 4, 8, 2, 12), (2, 5, 12, 3, 8), (3, 3, 8, 4, 32)]:
        x, weights = g.randn(batch, seq, d_hidden), block_weights(g, d_hidden, d_ff)
        fact = torch_layer(x, weights, heads)
        yield (
            call(x, weights, heads)
            .expect(fact)
            .says(f"batch {batch}, seq {seq}, d_hidden {d_hidden}, heads {heads}")
        )


@decoder_block.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype of its input, half precision included."""
    for dtype in HALF_AND_DOUBLE:
        case = call(0.5 * g.randn(2, 4, 8, dtype=dtype), block_weights(g, dtype=dtype), 2)
        yield tolerant(case, dtype, steps=3).says(f"{dtype}")


@decoder_block.group("gradient", share=1)
def _(g: Gen):
    """Gradients flow to the input and to every weight."""
    yield call(g.randn(2, 4, 8), block_weights(g), 2).gradient()


@decoder_block.group("edge cases", share=2)
def _(g: Gen):
    """One position, one head, rows of tiny variance, inputs that are not contiguous."""
    yield call(g.randn(2, 1, 8), block_weights(g), 2).says("a single position")
    yield call(g.randn(2, 4, 8), block_weights(g), 1).says("one head")
    yield call(g.randn(2, 4, 8), block_weights(g), 8).says("as many heads as columns")
    yield call(0.004 * g.randn(2, 4, 8), block_weights(g), 2).says(
        "rows of tiny variance, where the norm's epsilon counts"
    )
    quiet = block_weights(g)
    quiet = dataclasses.replace(quiet, w_o=0.002 * quiet.w_o)
    yield call(0.004 * g.randn(2, 4, 8), quiet, 2).says("tiny variance at the second norm, too")
    yield call(g.randn(4, 2, 8).transpose(0, 1), block_weights(g), 2).says("x is a transposed view")
    sharp = block_weights(g)
    sharp = dataclasses.replace(sharp, w_q=40 * sharp.w_q)
    case = call(g.randn(2, 5, 8), sharp, 2).close(1e-3, 1e-3)
    yield case.says("scores of about a hundred, where -inf hides a position and a modest number does not")


def _norm(x, scale, bias, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], scale, bias, eps)


def _attention(x, w, heads, diagonal=1):
    mask = torch.full((x.shape[1], x.shape[1]), -INF, dtype=x.dtype).triu(diagonal)
    return ref.multi_head_attention(x, x, w.w_q, w.w_k, w.w_v, w.w_o, heads, mask)


def _feed_forward(x, w, activation=F.gelu):
    return activation(x @ w.w_up + w.b_up) @ w.w_down + w.b_down


def _norm1(x, w):
    return _norm(x, w.ln1_scale, w.ln1_bias)


def _norm2(x, w):
    return _norm(x, w.ln2_scale, w.ln2_bias)


@decoder_block.near_miss("post-norm")
def _(x, weights, heads):
    """The norms come after the residual additions, as in the original transformer. This block is pre-norm:
    normalise what goes into attention and feed-forward, and leave the residual stream itself alone."""
    x = _norm1(x + _attention(x, weights, heads), weights)
    return _norm2(x + _feed_forward(x, weights), weights)


@decoder_block.near_miss("no-attention-residual")
def _(x, weights, heads):
    """The residual around the attention is missing: add the attention's output to x instead of replacing
    x."""
    x = _attention(_norm1(x, weights), weights, heads)
    return x + _feed_forward(_norm2(x, weights), weights)


@decoder_block.near_miss("no-feed-forward-residual")
def _(x, weights, heads):
    """The residual around the feed-forward layer is missing: add its output to what came out of the
    attention step."""
    x = x + _attention(_norm1(x, weights), weights, heads)
    return _feed_forward(_norm2(x, weights), weights)


@decoder_block.near_miss("residual-from-the-norm")
def _(x, weights, heads):
    """The residual adds the normalised x. The residual stream carries x itself; the norm is only for what
    goes into the attention and the feed-forward layer."""
    normed = _norm1(x, weights)
    x = normed + _attention(normed, weights, heads)
    normed = _norm2(x, weights)
    return normed + _feed_forward(normed, weights)


@decoder_block.near_miss("attention-residual-from-the-norm")
def _(x, weights, heads):
    """The attention's output is added to the normalised x. The residual stream passes by the norm: add it
    to x itself."""
    normed = _norm1(x, weights)
    x = normed + _attention(normed, weights, heads)
    return x + _feed_forward(_norm2(x, weights), weights)


@decoder_block.near_miss("second-residual-from-the-input")
def _(x, weights, heads):
    """The second residual adds the block's input, so what the attention has added is lost. It adds the
    stream after the attention step, h."""
    h = x + _attention(_norm1(x, weights), weights, heads)
    return x + _feed_forward(_norm2(h, weights), weights)


@decoder_block.near_miss("rms-norm")
def _(x, weights, heads):
    """The norm does not subtract the mean, as RMSNorm. LayerNorm does, and divides by the root of the
    variance about it."""

    def norm(x, scale, bias):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale + bias

    x = x + _attention(norm(x, weights.ln1_scale, weights.ln1_bias), weights, heads)
    return x + _feed_forward(norm(x, weights.ln2_scale, weights.ln2_bias), weights)


@decoder_block.near_miss("norm-at-the-end")
def _(x, weights, heads):
    """The result is normalised once more. The block ends with the second residual; the model's last norm
    comes after all blocks."""
    return _norm2(ref.decoder_block(x, weights, heads), weights)


@decoder_block.near_miss("not-causal")
def _(x, weights, heads):
    """Every position sees the whole sequence. A decoder is causal: hide later positions with -inf above the
    diagonal of the scores."""
    normed = _norm1(x, weights)
    x = x + ref.multi_head_attention(
        normed, normed, weights.w_q, weights.w_k, weights.w_v, weights.w_o, heads
    )
    return x + _feed_forward(_norm2(x, weights), weights)


@decoder_block.near_miss("sees-one-ahead")
def _(x, weights, heads):
    """A position sees the one after it: the mask is off by one. Hide every key with a larger index than the
    query's (`triu(1)`)."""
    x = x + _attention(_norm1(x, weights), weights, heads, diagonal=2)
    return x + _feed_forward(_norm2(x, weights), weights)


@decoder_block.near_miss("sees-the-future-only")
def _(x, weights, heads):
    """The mask is transposed: positions see themselves and later ones. Hide what lies above the diagonal,
    keys after the query."""
    normed, future = _norm1(x, weights), torch.full((x.shape[1], x.shape[1]), -INF, dtype=x.dtype).tril(-1)
    x = x + ref.multi_head_attention(
        normed, normed, weights.w_q, weights.w_k, weights.w_v, weights.w_o, heads, future
    )
    return x + _feed_forward(_norm2(x, weights), weights)


@decoder_block.near_miss("parallel-branches")
def _(x, weights, heads):
    """The feed-forward layer reads the block's input. It comes second: it reads the norm of the stream
    after attention has been added."""
    h = x + _attention(_norm1(x, weights), weights, heads)
    return h + _feed_forward(_norm2(x, weights), weights)


@decoder_block.near_miss("one-norm-for-both")
def _(x, weights, heads):
    """The first norm's scale and bias are used for both norms. The second one has its own: ln2_scale and
    ln2_bias."""
    x = x + _attention(_norm1(x, weights), weights, heads)
    return x + _feed_forward(_norm1(x, weights), weights)


@decoder_block.near_miss("norm-without-scale-and-bias")
def _(x, weights, heads):
    """The norms stop at mean 0 and variance 1. Multiply by the learned scale and add the learned bias."""
    x = x + _attention(_norm(x, None, None), weights, heads)
    return x + _feed_forward(_norm(x, None, None), weights)


@decoder_block.near_miss("no-norms")
def _(x, weights, heads):
    """Nothing is normalised. Pre-norm means: LayerNorm of x goes into the attention, LayerNorm of the sum
    into the feed-forward layer."""
    x = x + _attention(x, weights, heads)
    return x + _feed_forward(x, weights)


@decoder_block.near_miss("tanh-gelu")
def _(x, weights, heads):
    """This is the tanh approximation of GELU. Use the exact one, x·Φ(x) with the normal distribution
    function Φ (`torch.nn.functional.gelu` without arguments)."""
    x = x + _attention(_norm1(x, weights), weights, heads)
    return x + _feed_forward(_norm2(x, weights), weights, lambda z: F.gelu(z, approximate="tanh"))


@decoder_block.near_miss("relu")
def _(x, weights, heads):
    """The feed-forward layer uses ReLU, as the original transformer did. This block uses GELU."""
    x = x + _attention(_norm1(x, weights), weights, heads)
    return x + _feed_forward(_norm2(x, weights), weights, F.relu)


@decoder_block.near_miss("no-feed-forward-biases")
def _(x, weights, heads):
    """The biases of the feed-forward layer are missing: add b_up before the GELU and b_down at the end."""
    x = x + _attention(_norm1(x, weights), weights, heads)
    return x + F.gelu(_norm2(x, weights) @ weights.w_up) @ weights.w_down


@decoder_block.near_miss("no-b-up")
def _(x, weights, heads):
    """The bias b_up is missing: add it before the GELU."""
    x = x + _attention(_norm1(x, weights), weights, heads)
    return x + F.gelu(_norm2(x, weights) @ weights.w_up) @ weights.w_down + weights.b_down


@decoder_block.near_miss("no-b-down")
def _(x, weights, heads):
    """The bias b_down is missing: add it at the end of the feed-forward layer."""
    x = x + _attention(_norm1(x, weights), weights, heads)
    return x + F.gelu(_norm2(x, weights) @ weights.w_up + weights.b_up) @ weights.w_down


@decoder_block.near_miss("no-second-norm")
def _(x, weights, heads):
    """The feed-forward layer reads the stream as it is. The second norm, with ln2_scale and ln2_bias,
    stands before it."""
    x = x + _attention(_norm1(x, weights), weights, heads)
    return x + _feed_forward(x, weights)


@decoder_block.near_miss("unbiased-variance")
def _(x, weights, heads):
    """The variance is divided by n − 1, the default of `torch.var`. LayerNorm divides by n:
    `correction=0`."""

    def norm(x, scale, bias):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (x.var(-1, keepdim=True) + 1e-5).sqrt() * scale + bias

    x = x + _attention(norm(x, weights.ln1_scale, weights.ln1_bias), weights, heads)
    return x + _feed_forward(norm(x, weights.ln2_scale, weights.ln2_bias), weights)


@decoder_block.near_miss("epsilon-outside-the-root")
def _(x, weights, heads):
    """The norm's epsilon is added to the standard deviation. It belongs inside the root: √(variance +
    1e-5)."""

    def norm(x, scale, bias):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (x.var(-1, keepdim=True, correction=0).sqrt() + 1e-5) * scale + bias

    x = x + _attention(norm(x, weights.ln1_scale, weights.ln1_bias), weights, heads)
    return x + _feed_forward(norm(x, weights.ln2_scale, weights.ln2_bias), weights)


@decoder_block.near_miss("scores-scaled-by-d-hidden")
def _(x, weights, heads):
    """The scores are divided by √d_hidden. Each head's dot product runs over d_hidden/heads columns: divide
    by the root of that."""
    # multiplying the queries brings the scale of `multi_head_attention` to the wrong one
    normed = _norm1(x, weights)
    mask = torch.full((x.shape[1], x.shape[1]), -INF, dtype=x.dtype).triu(1)
    w_q = weights.w_q / math.sqrt(heads)
    x = x + ref.multi_head_attention(normed, normed, w_q, weights.w_k, weights.w_v, weights.w_o, heads, mask)
    return x + _feed_forward(_norm2(x, weights), weights)


@decoder_block.near_miss("one-wide-head")
def _(x, weights, heads):
    """All columns act as one head, `heads` has no effect. Split queries, keys and values into heads, each
    with its own softmax."""
    x = x + _attention(_norm1(x, weights), weights, 1)
    return x + _feed_forward(_norm2(x, weights), weights)
