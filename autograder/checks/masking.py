"""What is right in the masking chapter, and the wrong answers that teach something."""

import math

import torch

from autograder.compare import Tolerance, difference
from autograder.inside.engine import cotangent
from autograder.spec import Case, Exercise, Gen, call, served
from course_llm import masking as ref

INF = math.inf


def drawn(*rows: str) -> torch.Tensor:
    """Reads a boolean mask drawn with x (may attend) and . (may not)."""
    return torch.tensor([[c == "x" for c in row] for row in rows])


def additive(allowed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The additive form of a boolean mask."""
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -INF)


def positions(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Query positions as a column, key positions as a row."""
    return torch.arange(n)[:, None], torch.arange(n)[None, :]


def in_float32(case: Case, dtype: torch.dtype) -> Case:
    """Allows sums and exponentials in float32 where the inputs are float64, as the course's rules do."""
    return case.close(1e-5, 1e-5) if dtype == torch.float64 else case


# ---------------------------------------------------------------------------------------- causal_mask

causal_mask = Exercise("causal_mask", ref, see="mask-matrix")


@causal_mask.group("values", share=2)
def _(g: Gen):
    """0 where the key is the query's own token or an earlier one, -inf where it comes later."""
    four = [[0, -INF, -INF, -INF], [0, 0, -INF, -INF], [0, 0, 0, -INF], [0, 0, 0, 0]]
    yield call(4).expect(g.tensor(four)).says("the four tokens of “I am an automaton”")
    for n in (1, 2, 3, 7, g.python.randrange(8, 13)):
        yield call(n).says(f"n = {n}")


@causal_mask.group("dtypes")
def _(g: Gen):
    """The mask has the dtype that is asked for, and a true -inf in each."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        yield call(5, dtype).says(str(dtype))
    yield call(3, dtype=torch.float64).says("dtype given by name")
    yield call(n=3, dtype=torch.float16).says("both arguments given by name")


@causal_mask.near_miss("transposed")
def _(n, dtype=torch.float32):
    """-inf stands where the key comes before the query, so each token sees the future and not the past. Rows are queries and
    columns are keys: the forbidden part j > i lies above the diagonal."""
    return torch.full((n, n), -INF, dtype=dtype).tril(-1)


@causal_mask.near_miss("diagonal-masked")
def _(n, dtype=torch.float32):
    """The diagonal is masked, too, so a token may not attend to itself and the first one has no key left. Start the forbidden part
    one above the diagonal: j > i, not j ≥ i."""
    return torch.full((n, n), -INF, dtype=dtype).triu(0)


@causal_mask.near_miss("sees-the-next")
def _(n, dtype=torch.float32):
    """The forbidden part starts two above the diagonal, so each token still sees the next one, which is the answer it should
    predict. Forbid every j > i."""
    return torch.full((n, n), -INF, dtype=dtype).triu(2)


@causal_mask.near_miss("minus-a-billion")
def _(n, dtype=torch.float32):
    """-1e9 stands where -inf should. It does not exist in float16, and a row with nothing else comes out uniform instead of empty.
    Use -inf: its softmax is exactly 0."""
    return torch.full((n, n), -1e9).triu(1).to(dtype)


@causal_mask.near_miss("smallest-number")
def _(n, dtype=torch.float32):
    """The smallest number of the dtype stands where -inf should. It overflows when a negative score is added, and a row with
    nothing else comes out uniform. Use -inf: its softmax is exactly 0."""
    return torch.full((n, n), torch.finfo(dtype).min, dtype=dtype).triu(1)


@causal_mask.near_miss("smallest-number-in-half")
def _(n, dtype=torch.float32):
    """In half precision a finite number stands where -inf should. float16 and bfloat16 have an infinity as well: use -inf in
    every dtype."""
    fill = -INF if dtype in (torch.float32, torch.float64) else torch.finfo(dtype).min
    return torch.full((n, n), fill, dtype=dtype).triu(1)


@causal_mask.near_miss("zero-times-infinity")
def _(n, dtype=torch.float32):
    """A matrix of zeros and ones is multiplied by -inf, and 0 · (-inf) is NaN. Put the -inf in place with `masked_fill`,
    `torch.where` or `torch.full(...).triu(1)` instead."""
    return torch.ones(n, n, dtype=dtype).triu(1) * -INF


@causal_mask.near_miss("zeros-and-ones")
def _(n, dtype=torch.float32):
    """This matrix has 1 where attending is allowed and 0 where it is not. An additive mask is added to the scores: allowed is 0,
    forbidden is -inf."""
    return torch.ones(n, n, dtype=dtype).tril()


@causal_mask.near_miss("boolean")
def _(n, dtype=torch.float32):
    """This is the boolean mask. Here the additive form is asked for, in the dtype of the scores: 0 where attending is allowed and
    -inf where it is not."""
    return torch.ones(n, n, dtype=torch.bool).tril()


@causal_mask.near_miss("swapped-values")
def _(n, dtype=torch.float32):
    """-inf and 0 have changed places: the past is forbidden and the future allowed. What is added to an allowed score is 0."""
    return torch.full((n, n), -INF, dtype=dtype).tril()


@causal_mask.near_miss("dtype-ignored")
def _(n, dtype=torch.float32):
    """The mask is always float32. Make it in the dtype that is asked for, or adding it to half-precision scores turns them into
    float32."""
    return torch.full((n, n), -INF).triu(1)


# ------------------------------------------------------------------------------------- masked_softmax

masked_softmax = Exercise("masked_softmax", ref, see="masked-weights")


def _allowed(g: Gen, *shape: int) -> torch.Tensor:
    """A random boolean mask with an allowed first and a forbidden last key in every row."""
    allowed = g.rand(*shape) < 0.6
    allowed[..., 0] = True
    allowed[..., -1] = False
    return allowed


# The spacing of float32 at 1e4 is 1e-3: log-weights that are taken there (scores minus logsumexp) err by that much and are
# right all the same. The same holds for 60 in float16.
LARGE = Tolerance(5e-3, 5e-3)


@masked_softmax.group("values", share=2)
def _(g: Gen):
    """Softmax over the allowed keys of each row, 0 for the others."""
    # the scores are ours, chosen so that the lecture's weights come out
    scores = [[1.1, 0.4, 0.7, 0.3], [0.2, 1.0, 0.9, 0.4], [0.5, 0.3, 1.2, 2.0], [0.104, 0.6, 1.002, 1.8]]
    yield call(g.tensor(scores), ref.causal_mask(4)).says("the four tokens of “I am an automaton”")
    two = call(g.tensor([[0.0, math.log(3), 5.0]]), g.tensor([[0.0, 0.0, -INF]]))
    yield two.expect(g.tensor([[0.25, 0.75, 0.0]])).says("one query, three keys, the last one masked")
    yield call(g.randn(3, 5), torch.zeros(3, 5)).says("nothing is masked")
    yield call(g.randn(3, 5), additive(_allowed(g, 3, 5))).says("fewer queries than keys")
    yield call(g.randn(5, 3), additive(_allowed(g, 5, 3))).says("more queries than keys")
    only = torch.eye(4, dtype=torch.bool)[g.perm(4)]
    yield call(g.randn(4, 4), additive(only)).expect(only.float()).says("one key per row")


@masked_softmax.group("batch dimensions")
def _(g: Gen):
    """The mask broadcasts over batch dimensions and heads."""
    yield call(g.randn(2, 4, 4), ref.causal_mask(4)).says("one mask for the batch")
    yield call(g.randn(2, 3, 4, 5), additive(_allowed(g, 4, 5))).says("one mask for batch and heads")
    yield call(g.randn(2, 3, 4, 5), additive(_allowed(g, 2, 3, 4, 5))).says("a mask of its own for each head")
    yield call(g.randn(2, 3, 4, 5), additive(_allowed(g, 2, 1, 4, 5))).says(
        "a mask for each row of the batch"
    )
    yield call(g.randn(2, 3, 4, 5), additive(_allowed(g, 2, 1, 1, 5))).says(
        "padding: one row of keys for all queries"
    )
    yield call(g.randn(2, 5, 4).transpose(1, 2), additive(_allowed(g, 4, 5))).says(
        "scores that are not contiguous"
    )


@masked_softmax.group("rows without keys", share=2)
def _(g: Gen):
    """A row in which every key is masked is all 0; the other rows are not disturbed."""
    empty = drawn("xxxx", "....", "x.x.", "....")
    yield call(g.randn(4, 4), additive(empty)).says("two of four rows are empty")
    yield call(g.randn(3, 4), torch.full((3, 4), -INF)).expect(torch.zeros(3, 4)).says("all rows are empty")
    left = ref.causal_padding_mask(drawn("..xx", "xxxx"))
    yield call(g.randn(2, 3, 4, 4), additive(left)).says("left padding in a batch of two")
    yield call(g.randn(2, 2, 3), additive(drawn("...", "xx."))).says("an empty row in every batch entry")


@masked_softmax.group("exact zeros")
def _(g: Gen):
    """Masked weights are exactly 0, not just small, however large the scores are."""

    def exactly_zero(weights, scores, mask):
        if weights.shape != scores.shape or weights.dtype != scores.dtype:
            return "the weights need the shape and the dtype of the scores"
        masked = (mask == -INF).expand(scores.shape)
        if bool((weights[masked] != 0).any()):
            return "a masked weight is not exactly 0"
        return difference(weights, ref.masked_softmax(scores, mask), LARGE)

    mask = additive(_allowed(g, 4, 6))
    yield call(g.randn(4, 6), mask).judge(exactly_zero).says("ordinary scores")
    yield call(g.randn(4, 6, dtype=torch.float64), mask.double()).judge(exactly_zero).says("float64")
    hidden = torch.where(mask == -INF, 90.0, -90.0)
    yield (
        call(hidden + g.randn(4, 6), mask)
        .judge(exactly_zero)
        .says("masked keys have by far the largest scores")
    )
    yield call(g.randn(4, 6) - 1e4, mask).judge(exactly_zero).says("all scores are very negative")


@masked_softmax.group("large scores")
def _(g: Gen):
    """Scores of ±1e4 give weights, not NaN."""
    scores = [[1e4, 1e4, 0.0, 3.0], [-1e4, -1e4, -1e4, 1e4], [0.0, 1.0, 2.0, 1e4]]
    mask = [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, -INF], [0.0, -INF, 0.0, -INF]]
    want = [
        [0.5, 0.5, 0, 0],
        [1 / 3, 1 / 3, 1 / 3, 0],
        [1 / (1 + math.e**2), 0, math.e**2 / (1 + math.e**2), 0],
    ]
    yield (
        call(g.tensor(scores), g.tensor(mask))
        .expect(g.tensor(want))
        .close(5e-3, 5e-3)
        .says("also behind the mask")
    )
    near_1000 = call(g.randn(3, 4) + 1e3, additive(drawn("xxx.", "....", "x.xx")))
    yield near_1000.close(5e-3, 5e-3).says("all scores near 1000")


@masked_softmax.group("dtypes")
def _(g: Gen):
    """The weights have the dtype of the scores."""
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        ordinary = call(g.randn(2, 4, 5, dtype=dtype), additive(_allowed(g, 4, 5), dtype))
        yield in_float32(ordinary, dtype).says(str(dtype))
        empty = call(g.randn(3, 4, dtype=dtype), additive(drawn("xx..", "....", "xxxx"), dtype))
        yield in_float32(empty, dtype).says(f"an empty row in {dtype}")
    near_60 = call(g.randn(1, 4, dtype=torch.float16) + 60, torch.zeros(1, 4, dtype=torch.float16))
    yield near_60.close(5e-2, 5e-2).says("scores near 60 in float16")


@masked_softmax.group("gradient", share=2)
def _(g: Gen):
    """Gradients flow to the scores; they are 0, not NaN, in rows without keys."""

    def scores_gradient(result, scores, mask):
        # the gradient in the mask is not graded
        if result["detached"]:
            return "the result is detached from the scores, no gradient flows"
        leaf = scores.detach().clone().requires_grad_()
        weights = ref.masked_softmax(leaf, mask)
        (want,) = torch.autograd.grad(weights, leaf, cotangent(weights))
        complaint = difference(result["value"], weights.detach(), Tolerance(1e-5, 1e-5))
        if complaint is None and not result["grads"][0].any() and want.any():
            return "the result is detached from the scores, no gradient flows"
        return complaint or difference(
            result["grads"][0], want, Tolerance(1e-4, 1e-4), "the gradient of the scores"
        )

    for dtype in (torch.float32, torch.float64):
        mask = additive(_allowed(g, 3, 4), dtype)
        yield (
            call(g.randn(3, 4, dtype=dtype), mask)
            .gradient()
            .judge(scores_gradient)
            .says(f"every row has a key, {dtype}")
        )
    mask = additive(drawn("xxxx", "....", "x.x."))
    yield call(g.randn(3, 4), mask).gradient().judge(scores_gradient).says("one row is empty")
    yield (
        call(g.randn(2, 3, 3, 4), mask)
        .gradient()
        .judge(scores_gradient)
        .says("one row is empty in each of six matrices")
    )


@masked_softmax.near_miss("mask-after-softmax")
def _(scores, mask):
    """The mask is applied after the softmax, so the rows no longer sum to 1 and the masked scores still count in the denominator.
    Add the mask to the scores first."""
    return torch.softmax(scores, -1).masked_fill(mask == -INF, 0.0)


@masked_softmax.near_miss("mask-added-to-weights")
def _(scores, mask):
    """The mask is added to the weights, which makes them -inf. Add it to the scores, before the softmax: exp(-inf) is 0."""
    return torch.softmax(scores, -1) + mask


@masked_softmax.near_miss("nan-rows")
def _(scores, mask):
    """A row in which every key is masked comes out as NaN: the softmax divides 0 by 0 there. Give such a row finite scores
    before the softmax and set its weights to 0 after it."""
    return torch.softmax(scores + mask, -1)


@masked_softmax.near_miss("uniform-rows")
def _(scores, mask):
    """A row in which every key is masked gets the same weight everywhere: with a large finite number in place of -inf no key is
    really forbidden. Such a row has to be all 0."""
    return torch.softmax(scores.masked_fill(mask == -INF, torch.finfo(scores.dtype).min), -1)


@masked_softmax.near_miss("raw-rows")
def _(scores, mask):
    """A row in which every key is masked attends as if nothing were masked. Filling it with finite scores is the right first half;
    set its weights to 0 after the softmax."""
    empty = (mask == -INF).expand(scores.shape).all(-1, keepdim=True)
    return torch.softmax(torch.where(empty, scores, scores + mask), -1)


@masked_softmax.near_miss("nan-replaced-afterwards")
def _(scores, mask):
    """The weights are right, but the gradient of a row without keys is NaN: replacing NaN after the softmax does not remove it
    from the backward pass. Give such a row finite scores before the softmax and set its weights to 0 after it."""
    return torch.nan_to_num(torch.softmax(scores + mask, -1), nan=0.0)


@masked_softmax.near_miss("over-queries")
def _(scores, mask):
    """The softmax runs over the queries (dim=-2), so columns sum to 1 instead of rows. Each query shares out its attention over the
    keys, which are the last axis."""
    hidden = (mask == -INF).expand(scores.shape)
    masked = (scores + mask).masked_fill(hidden.all(-2, keepdim=True), 0.0)
    return torch.softmax(masked, -2).masked_fill(hidden, 0.0)


@masked_softmax.near_miss("mask-ignored")
def _(scores, mask):
    """This is the softmax of the raw scores; the mask has no effect. Add it to the scores first."""
    return torch.softmax(scores, -1)


@masked_softmax.near_miss("masked-score-zero")
def _(scores, mask):
    """Masked scores are set to 0, and exp(0) = 1 is a weight like any other. A forbidden key needs the score -inf."""
    return torch.softmax(scores.masked_fill(mask == -INF, 0.0), -1)


@masked_softmax.near_miss("finite-number")
def _(scores, mask):
    """A finite number such as -1e4 stands where -inf should. It is forgotten beside scores of the same size, and a masked key
    comes back. Keep the -inf of the mask."""
    hidden = (mask == -INF).expand(scores.shape)
    finite = scores + mask.clamp(min=-1e4)
    return torch.softmax(finite, -1).masked_fill(hidden.all(-1, keepdim=True), 0.0)


@masked_softmax.near_miss("overflow")
def _(scores, mask):
    """Large scores overflow in exp. Subtract the largest allowed score of each row first (the result is the same), or let
    `torch.softmax` do it."""
    powers = torch.exp(scores) * (mask == 0)
    total = powers.sum(-1, keepdim=True)
    return torch.where(
        total > 0, powers / total.clamp_min(1e-30 if scores.dtype != torch.float16 else 1e-7), 0.0
    )


@masked_softmax.near_miss("largest-of-all-rows")
def _(scores, mask):
    """One number is subtracted from all rows, the largest of the whole tensor: in a row far below it every exp becomes 0. Subtract the largest of each
    row, or let `torch.softmax` do it."""
    total = scores + mask
    weights = (total - total.max()).exp()
    sums = weights.sum(-1, keepdim=True)
    return weights / torch.where(sums == 0, 1, sums)


@masked_softmax.near_miss("largest-of-all-keys")
def _(scores, mask):
    """The masked keys take part until they are taken out: when one of them has by far the largest score, every allowed exp becomes 0,
    and dividing by their sum again does not bring it back. Subtract the largest of scores + mask, or mask before the softmax."""
    powers = torch.exp(scores - scores.amax(-1, keepdim=True)) * (mask == 0)
    total = powers.sum(-1, keepdim=True)
    return powers / torch.where(total > 0, total, 1.0)


# ------------------------------------------------------------------------------ causal_self_attention

causal_self_attention = Exercise("causal_self_attention", ref, see="masked-self-attention")


@causal_self_attention.group("values", share=2)
def _(g: Gen):
    """Each output is the weighted mean of the values up to its own position."""
    v = g.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 5.0]])
    means = g.tensor([[1.0, 0.0], [0.5, 0.5], [4 / 3, 2.0]])
    yield (
        call(torch.zeros(3, 2), g.randn(3, 2), v)
        .expect(means)
        .says("with equal scores, the mean of the values so far")
    )
    for seq, d in [(5, 3), (4, 8), (7, 2)]:
        yield call(g.randn(seq, d), g.randn(seq, d), g.randn(seq, d)).says(f"{seq} tokens, d = {d}")
    one = g.randn(1, 4)
    yield call(g.randn(1, 4), g.randn(1, 4), one).expect(one).says("a single token gets its own value")


@causal_self_attention.group("batch dimensions")
def _(g: Gen):
    """Any number of batch dimensions stands before (seq, d)."""
    for shape in [(1, 5, 3), (3, 5, 3), (2, 3, 6, 4), (2, 1, 3, 4, 2)]:
        yield call(g.randn(*shape), g.randn(*shape), g.randn(*shape)).says(
            f"{len(shape) - 2} batch dimensions"
        )
    q, k, v = (g.randn(2, 6, 3, 4).transpose(1, 2) for _ in range(3))
    yield call(q, k, v).says("views that are not contiguous, as after splitting heads")


@causal_self_attention.group("dtypes")
def _(g: Gen):
    """The result has the dtype of the inputs."""
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        for shape, words in (((2, 5, 4), ""), ((3, 8), "no batch dimension, ")):
            case = call(*(g.randn(*shape, dtype=dtype) for _ in range(3)))
            yield in_float32(case, dtype).says(f"{words}{dtype}")


@causal_self_attention.group("future", share=2)
def _(g: Gen):
    """No later token has any influence, however large its score."""
    q, k, v = (g.randn(2, 5, 3, dtype=torch.float64) for _ in range(3))
    loud = k.clone()
    loud[:, 3:] = 40 * q[:, :1]  # the first query would look at nothing else
    yield in_float32(call(q, loud, v), q.dtype).says("later keys match earlier queries very well")
    large = v * 10.0 ** torch.arange(5, dtype=torch.float64)[:, None]
    yield call(q, k, large).close(1e-4, 1e-4).says("later values are large")

    q_near, k_far = (g.rand(2, 5, 3, dtype=torch.float64) + 0.5 for _ in range(2))
    yield (
        call(q_near, -300 * k_far, v)
        .close(1e-3, 1e-3)
        .says("all scores far below 0, where a finite number in the mask lets later keys through")
    )

    def first_half_unchanged(out, q, k, v):
        if out.shape != v.shape:
            return f"the result has shape {tuple(out.shape)}, it should have {tuple(v.shape)}"
        want = ref.causal_self_attention(q[:, :3], k[:, :3], v[:, :3])
        return difference(out[:, :3], want, Tolerance(1e-5, 1e-5), "the output of the first tokens")

    yield (
        call(q, loud, v)
        .judge(first_half_unchanged)
        .says("the first outputs are those of the text cut off after them")
    )
    # scores of 2,000: beside them the weights of the earlier keys vanish in any dtype, so that masking and dividing after the
    # softmax is too late
    deafening = k.clone()
    first = q[:, :1]
    deafening[:, 3:] = 2_000 * math.sqrt(3) * first / (first * first).sum(-1, keepdim=True)
    for dtype in (torch.float32, torch.float64):
        yield (
            call(*(t.to(dtype) for t in (q, deafening, v)))
            .judge(first_half_unchanged)
            .says(f"later keys have scores of 2,000, {dtype}")
        )


@causal_self_attention.group("gradient", share=2)
def _(g: Gen):
    """Gradients flow to queries, keys and values, and from no output to a later position."""
    for shape in [(4, 3), (2, 3, 5, 2)]:
        yield call(*(g.randn(*shape) for _ in range(3))).gradient().says(f"{len(shape) - 2} batch dimensions")
    double = call(*(g.randn(2, 4, 3, dtype=torch.float64) for _ in range(3)))
    yield in_float32(double, torch.float64).gradient().says("float64")


def _attend(scores: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores.masked_fill(hidden, -INF), -1) @ v


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def _later(q: torch.Tensor, offset: int) -> torch.Tensor:
    """True on and above the diagonal that lies `offset` above the main one."""
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(offset)


@causal_self_attention.near_miss("no-mask")
def _(q, k, v):
    """Every token attends to every other, later ones included: this is the encoder's attention. Add the causal mask to the
    scores before the softmax."""
    return torch.softmax(_scores(q, k), -1) @ v


@causal_self_attention.near_miss("sees-the-next")
def _(q, k, v):
    """Each token still sees the next one, which is the answer it should predict: the mask is off by one. Forbid every key j > i."""
    return _attend(_scores(q, k), v, _later(q, 2))


@causal_self_attention.near_miss("excludes-itself")
def _(q, k, v):
    """A token may not attend to itself here, and the first one has no key left, which gives NaN: the mask is off by one. Forbid
    j > i, not j ≥ i."""
    return _attend(_scores(q, k), v, _later(q, 0))


@causal_self_attention.near_miss("excludes-itself-and-gives-zero")
def _(q, k, v):
    """A token may not attend to itself here, and the first output is 0 because it has no key left: the mask is off by one. Forbid
    j > i, not j ≥ i."""
    mask = torch.zeros(q.shape[-2], q.shape[-2], dtype=q.dtype).masked_fill(_later(q, 0), -INF)
    return ref.masked_softmax(_scores(q, k), mask) @ v


@causal_self_attention.near_miss("excludes-itself-after-the-first")
def _(q, k, v):
    """A token may not attend to itself here, only the first one may: the mask is off by one, and patched in the first row. Forbid
    j > i, not j ≥ i."""
    hidden = _later(q, 0)
    hidden[0, 0] = False
    return _attend(_scores(q, k), v, hidden)


@causal_self_attention.near_miss("mask-transposed")
def _(q, k, v):
    """The mask is transposed: each token sees itself and the future, not the past. Rows are queries and columns are keys."""
    return _attend(_scores(q, k), v, _later(q, 1).T)


@causal_self_attention.near_miss("mask-after-softmax")
def _(q, k, v):
    """The mask is applied after the softmax: the weights of a row do not sum to 1, and later keys still count in the
    denominator. Mask the scores, then take the softmax."""
    return torch.softmax(_scores(q, k), -1).tril() @ v


@causal_self_attention.near_miss("renormalised-too-late")
def _(q, k, v):
    """The softmax runs over all keys, and the rows are masked and divided by their sums afterwards. A later key with a large score
    leaves nothing of the earlier ones to divide. Mask the scores, then take the softmax."""
    weights = torch.softmax(_scores(q, k), -1).tril()
    return weights / weights.sum(-1, keepdim=True) @ v


@causal_self_attention.near_miss("finite-number")
def _(q, k, v):
    """A finite number stands where -inf should: when all scores of a row lie far below 0, later tokens get the weight. Use -inf."""
    return torch.softmax(_scores(q, k).masked_fill(_later(q, 1), -100.0), -1) @ v


@causal_self_attention.near_miss("unscaled")
def _(q, k, v):
    """The scores are not divided by √d. Without it they grow with the width and the softmax becomes too sharp."""
    return _attend(q @ k.transpose(-2, -1), v, _later(q, 1))


@causal_self_attention.near_miss("scaled-by-d")
def _(q, k, v):
    """The scores are divided by d, they should be divided by √d: a sum of d products of unit variance has the standard
    deviation √d."""
    return _attend(q @ k.transpose(-2, -1) / q.shape[-1], v, _later(q, 1))


@causal_self_attention.near_miss("scaled-by-length")
def _(q, k, v):
    """The scores are divided by the square root of the number of tokens. The scale comes from the width d, the last axis."""
    return _attend(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-2]), v, _later(q, 1))


@causal_self_attention.near_miss("over-queries")
def _(q, k, v):
    """The softmax runs over the queries, so columns sum to 1 instead of rows. It runs over the keys, the last axis."""
    return torch.softmax(_scores(q, k).masked_fill(_later(q, 1), -INF), -2) @ v


@causal_self_attention.near_miss("zero-is-masked")
def _(q, k, v):
    """Every score of 0 is masked, also one that is 0 by itself: build the mask from the positions, not from the scores."""
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).tril()
    return scores.masked_fill(scores == 0, -math.inf).softmax(-1) @ v


@causal_self_attention.near_miss("queries-and-keys-swapped")
def _(q, k, v):
    """Queries and keys have changed places: the queries are the rows of the scores, q · kᵀ."""
    return ref.causal_self_attention(k, q, v)


@causal_self_attention.near_miss("masked-score-zero")
def _(q, k, v):
    """Later scores are set to 0, and exp(0) = 1 is a weight like any other, so the future is still seen. Set them to -inf."""
    return torch.softmax(_scores(q, k).tril(), -1) @ v


# ------------------------------------------------------------------------------ causal_mask_with_past

causal_mask_with_past = Exercise("causal_mask_with_past", ref, see="mask-with-past")


@causal_mask_with_past.group("values", share=3)
def _(g: Gen):
    """The queries are the last tokens: the last one sees every key, the one before all but the last."""
    yield call(2, 5).expect(drawn("xxxx.", "xxxxx")).says("2 new tokens after 3")
    yield call(1, 4).expect(drawn("xxxx")).says("one new token sees everything")
    yield call(3, 3).expect(drawn("x..", "xx.", "xxx")).says("nothing before: the square mask")
    for queries, keys in [(1, 1), (4, 7), (5, 6), (3, 8)]:
        yield call(queries, keys).says(f"{queries} queries, {keys} keys")
    yield call(queries=3, keys=5 + g.python.randrange(4)).says("arguments given by name")


@causal_mask_with_past.group("errors")
def _(g: Gen):
    """Refuses more queries than keys."""
    for queries, keys in [(3, 2), (5, 1), (1, 0)]:
        yield call(queries, keys).raises(ValueError).says(f"{queries} queries, {keys} keys")


@causal_mask_with_past.near_miss("aligned-top-left")
def _(queries, keys):
    """The diagonal starts at the top left, as if the queries were the first tokens: the last query misses the newest keys. Query i
    stands at position keys - queries + i."""
    _refuse(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool).tril()


@causal_mask_with_past.near_miss("everything-visible")
def _(queries, keys):
    """Every query sees every key, so the new tokens see each other's future. That is right for one new token only."""
    _refuse(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool)


@causal_mask_with_past.near_miss("excludes-itself")
def _(queries, keys):
    """Each query misses its own key: the diagonal lies one too low. The last query sees every key."""
    _refuse(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries - 1)


@causal_mask_with_past.near_miss("sees-the-next")
def _(queries, keys):
    """Each query sees the token after its own: the diagonal lies one too high. Only the last query sees every key."""
    _refuse(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries + 1)


@causal_mask_with_past.near_miss("only-the-past")
def _(queries, keys):
    """The queries see the earlier tokens but neither themselves nor each other. Inside the new part the usual triangle holds."""
    _refuse(queries, keys)
    return (torch.arange(keys) < keys - queries).expand(queries, keys).clone()


@causal_mask_with_past.near_miss("only-the-new")
def _(queries, keys):
    """The queries see only the new tokens; the earlier ones are hidden. All earlier keys lie in the past of every query."""
    _refuse(queries, keys)
    past = torch.arange(keys) < keys - queries
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries) & ~past


@causal_mask_with_past.near_miss("inverted")
def _(queries, keys):
    """True and False have changed places. True means: may attend."""
    _refuse(queries, keys)
    return ~torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


@causal_mask_with_past.near_miss("axes-swapped")
def _(queries, keys):
    """Rows and columns have changed places. The shape is (queries, keys): one row per query."""
    _refuse(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).T


@causal_mask_with_past.near_miss("additive")
def _(queries, keys):
    """This is the additive form, with 0 and -inf. Here the boolean form is asked for: True where attending is allowed."""
    _refuse(queries, keys)
    return torch.full((queries, keys), -INF).triu(keys - queries + 1)


@causal_mask_with_past.near_miss("newest-first")
def _(queries, keys):
    """The rows stand upside down: the newest query comes first. Row i is query i, and the last row sees every key."""
    _refuse(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).flip(0)


@causal_mask_with_past.near_miss("equality-refused")
def _(queries, keys):
    """As many queries as keys are refused, but that is the plain causal mask of a whole text. Refuse queries > keys only."""
    if queries >= keys:
        raise ValueError("queries must be fewer than keys")
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


@causal_mask_with_past.near_miss("no-error")
def _(queries, keys):
    """More queries than keys are accepted, though some queries would come before the first token. Raise a ValueError that says
    so."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def _refuse(queries: int, keys: int) -> None:
    if queries > keys:
        raise ValueError("queries must not exceed keys")


# --------------------------------------------------------------------------------------- padding_mask

padding_mask = Exercise("padding_mask", ref, see="padding-mask")


@padding_mask.group("values", share=2)
def _(g: Gen):
    """True on the first lengths[b] tokens of row b."""
    yield call(g.tensor([2, 4, 1]), 4).expect(drawn("xx..", "xxxx", "x...")).says("three texts, padded to 4")
    yield call(g.ints(1, 6, 5), 6).says("five texts, padded to 6")
    yield call(g.tensor([3]), 5).expect(drawn("xxx..")).says("one text")
    yield call(g.ints(1, 4, 2, 3)[1], 7).says("all texts are shorter than seq")
    yield call(lengths=g.tensor([3, 1]), seq=3).expect(drawn("xxx", "x..")).says("arguments given by name")


@padding_mask.group("edge cases")
def _(g: Gen):
    """An empty text has no real token, a full one has no padding."""
    yield call(g.tensor([0, 3]), 3).expect(drawn("...", "xxx")).says("lengths 0 and seq")
    yield call(g.tensor([0, 0]), 2).expect(drawn("..", "..")).says("two empty texts")
    yield call(g.tensor([1, 0]), 1).expect(drawn("x", ".")).says("seq = 1")
    yield call(g.tensor([2, 1, 0, 3], torch.int32), 3).says("lengths as int32")
    yield call(torch.stack([g.perm(5), g.perm(5)], dim=1)[:, 0], 5).says("lengths that are not contiguous")


@padding_mask.near_miss("one-too-many")
def _(lengths, seq):
    """One padding token per row counts as real. Positions start at 0, so the real ones are position < length, not ≤."""
    return torch.arange(seq) <= lengths[:, None]


@padding_mask.near_miss("one-too-few")
def _(lengths, seq):
    """The last real token of each row is lost. Positions start at 0, so the real ones are position < length."""
    return torch.arange(seq) < lengths[:, None] - 1


@padding_mask.near_miss("inverted")
def _(lengths, seq):
    """True marks the padding here. True means a real token, which may be attended to."""
    return torch.arange(seq) >= lengths[:, None]


@padding_mask.near_miss("left-padding")
def _(lengths, seq):
    """The real tokens stand at the end of each row here. They are the first lengths[b] tokens: padding follows on the right."""
    return torch.arange(seq) >= seq - lengths[:, None]


@padding_mask.near_miss("additive")
def _(lengths, seq):
    """This is the additive form, with 0 and -inf. Here the boolean form is asked for: True on real tokens."""
    return torch.zeros(len(lengths), seq).masked_fill(torch.arange(seq) >= lengths[:, None], -INF)


@padding_mask.near_miss("seq-ignored")
def _(lengths, seq):
    """The mask is as wide as the longest text; the argument seq has no effect. Rows are padded to seq tokens."""
    return torch.arange(int(lengths.max())) < lengths[:, None]


@padding_mask.near_miss("first-length-for-all")
def _(lengths, seq):
    """Every row gets the length of the first text. Compare the positions with a column of lengths, so that each row has its
    own."""
    return (torch.arange(seq) < lengths[0]).expand(len(lengths), seq).clone()


@padding_mask.near_miss("one-token-at-least")
def _(lengths, seq):
    """An empty text gets one real token. A length of 0 gives a row without any True."""
    return torch.arange(seq) < lengths[:, None].clamp(min=1)


@padding_mask.near_miss("whole-numbers")
def _(lengths, seq):
    """These are whole numbers, 1 on real tokens and 0 on padding. The boolean form is asked for: the comparison itself."""
    return (torch.arange(seq) < lengths[:, None]).long()


@padding_mask.near_miss("axes-swapped")
def _(lengths, seq):
    """Rows and columns have changed places. The shape is (batch, seq): one row per text."""
    return (torch.arange(seq) < lengths[:, None]).T


# -------------------------------------------------------------------------------- causal_padding_mask

causal_padding_mask = Exercise("causal_padding_mask", ref, see="causal-padding-mask")


@causal_padding_mask.group("values", share=2)
def _(g: Gen):
    """A query sees a key if the key is not later and is a real token."""
    right = drawn("x...", "xx..", "xx..", "xx..")[None, None]
    yield call(drawn("xx..")).expect(right).says("padding on the right")
    yield call(drawn("xxx")).expect(drawn("x..", "xx.", "xxx")[None, None]).says("no padding: plain causal")
    yield call(drawn("xxx..", "xxxxx", "x....")).says("three texts, padded on the right")
    yield call(g.rand(4, 6) < 0.5).says("padding anywhere")


@causal_padding_mask.group("left padding")
def _(g: Gen):
    """Padding on the left is hidden, too; a padding query follows the same rule and may see nothing."""
    left = drawn("...", ".x.", ".xx")[None, None]
    yield call(drawn(".xx")).expect(left).says("padding on the left")
    yield call(drawn("..xx", "xxxx", "...x")).says("three texts, padded on the left")
    yield call(drawn(".xx.", "x..x", "....")).says("padding on both sides, in the middle, everywhere")


@causal_padding_mask.group("shapes")
def _(g: Gen):
    """One mask per text, with an axis of size 1 for the heads."""
    yield call(drawn("x")).expect(torch.ones(1, 1, 1, 1, dtype=torch.bool)).says("one token")
    yield call(drawn("x", ".", "x")).says("three texts of one token")
    yield call((g.rand(6, 4) < 0.6).T).says("an input that is not contiguous")
    yield call(drawn("xxxx.", "xx...")).says("as many queries as keys, padding included")


@causal_padding_mask.near_miss("padding-on-queries")
def _(real):
    """The padding is put on the query axis: rows of padding are empty, and real tokens still see padding keys. It belongs to the
    last axis, the keys: real[:, None, None, :]."""
    return _triangle(real) & real[:, None, :, None]


@causal_padding_mask.near_miss("padding-on-both")
def _(real):
    """Padding queries see nothing here. The rule asks about the key alone, for padding queries too: their outputs are not read,
    and an empty row is a NaN in a plain softmax."""
    return _triangle(real) & real[:, None, None, :] & real[:, None, :, None]


@causal_padding_mask.near_miss("not-causal")
def _(real):
    """Padding is hidden, but the causal part is lost: every query sees later tokens. Both conditions must hold."""
    return real[:, None, None, :].repeat(1, 1, real.shape[1], 1)


@causal_padding_mask.near_miss("padding-ignored")
def _(real):
    """This is the plain causal mask: padding keys are seen. A key must be real, too."""
    return _triangle(real).expand(len(real), 1, -1, -1).clone()


@causal_padding_mask.near_miss("either-condition")
def _(real):
    """A key is seen here when it is real or not later. Both conditions must hold: use & instead of |."""
    return _triangle(real) | real[:, None, None, :]


@causal_padding_mask.near_miss("no-head-axis")
def _(real):
    """The axis for the heads is missing: the shape is (batch, 1, seq, seq), so that the mask broadcasts over the heads and not
    over the batch."""
    return (_triangle(real) & real[:, None, None, :])[:, 0]


@causal_padding_mask.near_miss("inverted-padding")
def _(real):
    """Padding is shown and real tokens are hidden. `real` is True on real tokens, as it is needed here."""
    return _triangle(real) & ~real[:, None, None, :]


@causal_padding_mask.near_miss("right-padding-only")
def _(real):
    """The real tokens are counted and taken to stand at the start of the row. They may stand anywhere: use `real` itself, not its
    sum."""
    keys = torch.arange(real.shape[1]) < real.sum(1, keepdim=True)
    return _triangle(real) & keys[:, None, None, :]


@causal_padding_mask.near_miss("first-text-for-all")
def _(real):
    """Every text gets the padding of the first one. Keep the batch axis: real[:, None, None, :]."""
    return (_triangle(real) & real[0]).expand(len(real), 1, -1, -1).clone()


@causal_padding_mask.near_miss("diagonal-always-open")
def _(real):
    """Every token sees itself here, padding too. A key must be real, also on the diagonal: a row without keys stays empty."""
    return _triangle(real) & real[:, None, None, :] | torch.eye(real.shape[1], dtype=torch.bool)


@causal_padding_mask.near_miss("empty-rows-opened")
def _(real):
    """A query without any real key sees itself here. The rule makes no exception: its row stays empty, and masked_softmax copes."""
    mask = _triangle(real) & real[:, None, None, :]
    return mask | (~mask.any(-1, keepdim=True) & torch.eye(real.shape[1], dtype=torch.bool))


@causal_padding_mask.near_miss("excludes-itself")
def _(real):
    """A token may not attend to itself here. The key may be the query's own token: key ≤ query."""
    return _triangle(real).tril(-1) & real[:, None, None, :]


@causal_padding_mask.near_miss("looks-ahead")
def _(real):
    """The causal part is transposed: each token sees itself and what comes later. Rows are queries and columns are keys."""
    return _triangle(real).mT & real[:, None, None, :]


def _triangle(real: torch.Tensor) -> torch.Tensor:
    return torch.ones(1, 1, real.shape[1], real.shape[1], dtype=torch.bool).tril()


# -------------------------------------------------------------------------------- sliding_window_mask

sliding_window_mask = Exercise("sliding_window_mask", ref, see="sliding-window-mask")


@sliding_window_mask.group("values", share=2)
def _(g: Gen):
    """Each token sees itself and the window - 1 tokens before it."""
    yield call(4, 2).expect(drawn("x...", "xx..", ".xx.", "..xx")).says("n = 4, window = 2")
    yield call(5, 3).expect(drawn("x....", "xx...", "xxx..", ".xxx.", "..xxx")).says("n = 5, window = 3")
    for n, window in [(7, 2), (8, 5), (9, 4)]:
        yield call(n, window).says(f"n = {n}, window = {window}")
    yield call(n=6, window=1 + g.python.randrange(2, 5)).says("arguments given by name")


@sliding_window_mask.group("edge cases")
def _(g: Gen):
    """A window of 1 is the token itself; a window of n or more is plain causal."""
    yield call(4, 1).expect(torch.eye(4, dtype=torch.bool)).says("window = 1")
    yield call(4, 4).expect(torch.ones(4, 4, dtype=torch.bool).tril()).says("window = n")
    yield call(3, 10).expect(torch.ones(3, 3, dtype=torch.bool).tril()).says("window > n")
    yield call(1, 1).says("one token")
    yield call(1, 3).says("one token, window 3")


@sliding_window_mask.group("errors")
def _(g: Gen):
    """Refuses a window below 1."""
    for n, window in [(4, 0), (4, -1), (1, 0)]:
        yield call(n, window).raises(ValueError).says(f"window = {window}")


@sliding_window_mask.near_miss("one-too-many")
def _(n, window):
    """Each token sees window tokens before itself. The window counts the token itself, so it reaches back window - 1."""
    _refuse_window(window)
    i, j = positions(n)
    return (j <= i) & (i - j <= window)


@sliding_window_mask.near_miss("one-too-few")
def _(n, window):
    """Each token sees one token less than the window. The window holds the token itself and the window - 1 before it."""
    _refuse_window(window)
    i, j = positions(n)
    return (j <= i) & (i - j < window - 1)


@sliding_window_mask.near_miss("not-causal")
def _(n, window):
    """The window reaches into the future as well. It holds the token itself and what lies before it: key ≤ query."""
    _refuse_window(window)
    i, j = positions(n)
    return (i - j).abs() < window


@sliding_window_mask.near_miss("future-open")
def _(n, window):
    """The window is cut off behind, but the future is open: the condition key ≤ query is missing."""
    _refuse_window(window)
    i, j = positions(n)
    return i - j < window


@sliding_window_mask.near_miss("excludes-itself")
def _(n, window):
    """The token itself is left out. The window holds the token and the window - 1 before it."""
    _refuse_window(window)
    i, j = positions(n)
    return (j < i) & (i - j <= window)


@sliding_window_mask.near_miss("blocks")
def _(n, window):
    """The text is cut into blocks of window tokens, and the first token of each block sees nothing before it. The window slides:
    it ends at each query's own token."""
    _refuse_window(window)
    i, j = positions(n)
    return (j <= i) & (i // window == j // window)


@sliding_window_mask.near_miss("looks-ahead")
def _(n, window):
    """The window lies in the future: each token sees itself and what comes after it. Rows are queries, and the window ends at the
    query's own token."""
    _refuse_window(window)
    i, j = positions(n)
    return (j >= i) & (j - i < window)


@sliding_window_mask.near_miss("slice-from-the-end")
def _(n, window):
    """The first rows are empty or wrong: i - window + 1 is negative there, and a negative start of a slice counts from the end.
    Start at max(0, i - window + 1)."""
    _refuse_window(window)
    mask = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        mask[i, i - window + 1 : i + 1] = True
    return mask


@sliding_window_mask.near_miss("large-window-refused")
def _(n, window):
    """A window larger than the text is refused. It is the plain causal mask: no token has that many before it."""
    if not 1 <= window <= n:
        raise ValueError("window must be 1 to n")
    i, j = positions(n)
    return (j <= i) & (i - j < window)


@sliding_window_mask.near_miss("window-ignored")
def _(n, window):
    """This is the plain causal mask; the window has no effect. Hide the keys that lie window tokens or more behind the query."""
    _refuse_window(window)
    return torch.ones(n, n, dtype=torch.bool).tril()


@sliding_window_mask.near_miss("inverted")
def _(n, window):
    """True and False have changed places. True means: may attend."""
    _refuse_window(window)
    i, j = positions(n)
    return ~((j <= i) & (i - j < window))


@sliding_window_mask.near_miss("additive")
def _(n, window):
    """This is the additive form, with 0 and -inf. Here the boolean form is asked for: True where attending is allowed."""
    _refuse_window(window)
    i, j = positions(n)
    return additive((j <= i) & (i - j < window))


@sliding_window_mask.near_miss("no-error")
def _(n, window):
    """A window of 0 is accepted, and no token sees anything. Raise a ValueError that says so."""
    i, j = positions(n)
    return (j <= i) & (i - j < window)


def _refuse_window(window: int) -> None:
    if window < 1:
        raise ValueError("window must be at least 1")


# -------------------------------------------------------------------------------------- document_mask

document_mask = Exercise("document_mask", ref, see="document-mask")


def _documents(g: Gen, rows: int, seq: int) -> torch.Tensor:
    """Rows of runs of equal ids; ids are arbitrary, in no order, and do not return."""
    texts = []
    for _ in range(rows):
        names, row = g.perm(50).tolist(), []
        while len(row) < seq:
            row += [names.pop() - 5] * g.python.randrange(1, 4)
        texts.append(row[:seq])
    return torch.tensor(texts)


@document_mask.group("values", share=2)
def _(g: Gen):
    """Causal inside a document, nothing across."""
    yield (
        call(g.tensor([0, 0, 1, 1]))
        .expect(drawn("x...", "xx..", "..x.", "..xx"))
        .says("two documents of two tokens")
    )
    yield call(g.tensor([0, 0, 0])).expect(drawn("x..", "xx.", "xxx")).says("one document: plain causal")
    yield call(g.tensor([0, 1, 2])).expect(torch.eye(3, dtype=torch.bool)).says("documents of one token")
    yield call(g.tensor([0, 1, 1, 1, 2, 2, 3])).says("documents of unequal length")


@document_mask.group("ids")
def _(g: Gen):
    """Any numbers may name the documents, in any order."""
    yield call(g.tensor([7, 7, 3, 3])).expect(drawn("x...", "xx..", "..x.", "..xx")).says("ids that fall")
    yield call(g.tensor([5, 9, 9, 2, 2, 2, 7])).says("ids that rise and fall")
    yield call(g.tensor([10**12, 10**12 + 1, 10**12 + 1, -4])).says("huge and negative ids")
    yield call(_documents(g, 1, 11)[0]).says("eleven tokens")


@document_mask.group("batch dimensions")
def _(g: Gen):
    """Any number of batch dimensions; each row has its own documents."""
    yield (
        call(g.tensor([[0, 0, 1], [0, 1, 1]]))
        .expect(torch.stack([drawn("x..", "xx.", "..x"), drawn("x..", ".x.", ".xx")]))
        .says("two rows")
    )
    yield call(_documents(g, 3, 6)).says("three rows")
    yield call(_documents(g, 6, 5).reshape(2, 3, 5)).says("two batch dimensions")
    yield call(_documents(g, 2, 5).T.contiguous().T).says("an input that is not contiguous")
    yield call(g.tensor([4])).says("one token")
    yield call(g.tensor([[1, 1, 0]], torch.int32)).says("ids as int32")


@document_mask.near_miss("across-documents")
def _(document_ids):
    """This is the plain causal mask: tokens see earlier documents. A key must have the query's document id, too."""
    n = document_ids.shape[-1]
    return torch.ones(n, n, dtype=torch.bool).tril().expand(*document_ids.shape, n).clone()


@document_mask.near_miss("not-causal")
def _(document_ids):
    """Documents are kept apart, but inside a document every token sees the later ones. The key must not come after the query."""
    return document_ids[..., :, None] == document_ids[..., None, :]


@document_mask.near_miss("grows-only")
def _(document_ids):
    """A new document is noticed only when the id grows. Ids are names, not numbers: two tokens belong together when their ids are
    equal."""
    return (document_ids[..., None, :] >= document_ids[..., :, None]) & _square(document_ids)


@document_mask.near_miss("smaller-ids-visible")
def _(document_ids):
    """Earlier documents with a smaller id are visible. Ids are names, not numbers: two tokens belong together when their ids are
    equal."""
    return (document_ids[..., None, :] <= document_ids[..., :, None]) & _square(document_ids)


@document_mask.near_miss("only-growing-ids")
def _(document_ids):
    """A new document is noticed only where the id grows. Ids may fall as well: a document ends where the next id is another one."""
    grows = torch.zeros_like(document_ids)
    grows[..., 1:] = (document_ids[..., 1:] > document_ids[..., :-1]).to(document_ids.dtype)
    run = grows.cumsum(-1)
    return (run[..., :, None] == run[..., None, :]) & _square(document_ids)


@document_mask.near_miss("rounded-ids")
def _(document_ids):
    """The ids are turned into float32, which rounds whole numbers above 16,777,216: two documents become one. Compare them as they
    are."""
    ids = document_ids.float()
    return (ids[..., :, None] == ids[..., None, :]) & _square(document_ids)


@document_mask.near_miss("zero-is-padding")
def _(document_ids):
    """The document with the id 0 is taken for padding. Any number may name a document."""
    same = document_ids[..., :, None] == document_ids[..., None, :]
    return same & _square(document_ids) & (document_ids != 0)[..., None]


@document_mask.near_miss("negative-is-padding")
def _(document_ids):
    """A document with a negative id is taken for padding. Any number may name a document."""
    same = document_ids[..., :, None] == document_ids[..., None, :]
    return same & _square(document_ids) & (document_ids >= 0)[..., None]


@document_mask.near_miss("additive")
def _(document_ids):
    """This is the additive form, with 0 and -inf. Here the boolean form is asked for: True where attending is allowed."""
    return additive((document_ids[..., :, None] == document_ids[..., None, :]) & _square(document_ids))


@document_mask.near_miss("either-condition")
def _(document_ids):
    """A key is seen here when it lies in the same document or in the past. Both conditions must hold: use & instead of |."""
    return (document_ids[..., :, None] == document_ids[..., None, :]) | _square(document_ids)


@document_mask.near_miss("different-documents")
def _(document_ids):
    """A token sees the other documents and not its own. The ids must be equal, not different."""
    return (document_ids[..., :, None] != document_ids[..., None, :]) & _square(document_ids)


@document_mask.near_miss("excludes-itself")
def _(document_ids):
    """A token may not attend to itself here. The key may be the query's own token: key ≤ query."""
    return (document_ids[..., :, None] == document_ids[..., None, :]) & _square(document_ids).tril(-1)


@document_mask.near_miss("looks-ahead")
def _(document_ids):
    """The causal part is transposed: each token sees itself and the later tokens of its document. Rows are queries and columns
    are keys."""
    return (document_ids[..., :, None] == document_ids[..., None, :]) & _square(document_ids).T


@document_mask.near_miss("neighbours-only")
def _(document_ids):
    """Only neighbouring tokens are compared, so a token sees itself and the one before it. Compare every query with every key."""
    n = document_ids.shape[-1]
    same = document_ids[..., :, None] == document_ids[..., None, :]
    return same & _square(document_ids) & torch.ones(n, n, dtype=torch.bool).triu(-1)


@document_mask.near_miss("first-row-for-all")
def _(document_ids):
    """Every row gets the documents of the first one. Keep the batch axes: compare ids[..., :, None] with ids[..., None, :]."""
    n = document_ids.shape[-1]
    first = document_ids.reshape(-1, n)[0]
    return ((first[:, None] == first) & _square(document_ids)).expand(*document_ids.shape, n).clone()


@document_mask.near_miss("head-axis")
def _(document_ids):
    """There is one axis too many. The shape is that of the ids with one more seq at the end; an axis for the heads is not asked for
    here."""
    return ((document_ids[..., :, None] == document_ids[..., None, :]) & _square(document_ids)).unsqueeze(-3)


def _square(document_ids: torch.Tensor) -> torch.Tensor:
    n = document_ids.shape[-1]
    return torch.ones(n, n, dtype=torch.bool).tril()


# ------------------------------------------------------------------------------------- prefix_lm_mask

prefix_lm_mask = Exercise("prefix_lm_mask", ref, see="prefix-mask")


@prefix_lm_mask.group("values", share=2)
def _(g: Gen):
    """The prefix sees itself whole, the rest is causal."""
    yield call(4, 2).expect(drawn("xx..", "xx..", "xxx.", "xxxx")).says("n = 4, prefix = 2")
    yield call(5, 3).expect(drawn("xxx..", "xxx..", "xxx..", "xxxx.", "xxxxx")).says("n = 5, prefix = 3")
    for n, prefix in [(6, 2), (7, 4), (9, 6)]:
        yield call(n, prefix).says(f"n = {n}, prefix = {prefix}")
    yield call(n=8, prefix=2 + g.python.randrange(5)).says("arguments given by name")


@prefix_lm_mask.group("edge cases")
def _(g: Gen):
    """Without a prefix it is plain causal; with everything in the prefix, everyone sees everyone."""
    triangle = torch.ones(4, 4, dtype=torch.bool).tril()
    yield call(4, 0).expect(triangle).says("prefix = 0")
    yield call(4, 1).expect(triangle).says("prefix = 1")
    yield call(4, 4).expect(torch.ones(4, 4, dtype=torch.bool)).says("prefix = n")
    yield call(4, 3).expect(drawn("xxx.", "xxx.", "xxx.", "xxxx")).says("prefix = n - 1")
    yield call(1, 1).says("one token")
    yield call(1, 0).says("one token, no prefix")


@prefix_lm_mask.near_miss("prefix-sees-the-rest")
def _(n, prefix):
    """The tokens of the prefix see the rest, too. They see each other only: open the columns of the prefix, not its rows."""
    i, j = positions(n)
    return (j <= i) | (i < prefix)


@prefix_lm_mask.near_miss("plain-causal")
def _(n, prefix):
    """This is the plain causal mask: the prefix does not see itself whole. Open every key of the prefix."""
    i, j = positions(n)
    return (j <= i) & (prefix >= 0)


@prefix_lm_mask.near_miss("one-too-many")
def _(n, prefix):
    """One token after the prefix is open as well. The prefix is the positions below `prefix`: key < prefix, not ≤."""
    i, j = positions(n)
    return (j <= i) | (j <= prefix)


@prefix_lm_mask.near_miss("one-too-few")
def _(n, prefix):
    """The last token of the prefix is not open to the others. The prefix is the positions below `prefix`."""
    i, j = positions(n)
    return (j <= i) | (j < prefix - 1)


@prefix_lm_mask.near_miss("rest-does-not-see-prefix")
def _(n, prefix):
    """The tokens after the prefix do not see it. Nothing is hidden from them but the future: the prefix lies in their past."""
    i, j = positions(n)
    return ((i < prefix) & (j < prefix)) | ((j <= i) & (j >= prefix))


@prefix_lm_mask.near_miss("rest-not-causal")
def _(n, prefix):
    """The tokens after the prefix see each other whole. Only the prefix does; the rest is what the model learns to predict."""
    i, j = positions(n)
    return (i >= prefix) | (j < prefix)


@prefix_lm_mask.near_miss("roles-swapped")
def _(n, prefix):
    """The prefix is causal and the rest sees itself whole. It is the other way round: the prefix is read at once, the rest is written
    token by token."""
    i, j = positions(n)
    return (j <= i) | ((i >= prefix) & (j >= prefix))


@prefix_lm_mask.near_miss("looks-ahead-everywhere")
def _(n, prefix):
    """Every token looks prefix - 1 tokens ahead. Only keys of the prefix are open to earlier queries: key < prefix."""
    i, j = positions(n)
    return (j <= i) | (j - i < prefix)


@prefix_lm_mask.near_miss("no-prefix-opens-all")
def _(n, prefix):
    """A prefix of 0 opens everything, as if nothing had been given. 0 is a length like any other: the mask is plain causal."""
    i, j = positions(n)
    return (j <= i) | (j < (prefix or n))


@prefix_lm_mask.near_miss("only-the-prefix")
def _(n, prefix):
    """Only the prefix is open; the tokens after it see neither themselves nor each other. Add the causal part."""
    i, j = positions(n)
    return (j < prefix) & (i >= 0)


@prefix_lm_mask.near_miss("suffix")
def _(n, prefix):
    """The last tokens see each other whole here. The prefix is the first tokens: key < prefix."""
    i, j = positions(n)
    return (j <= i) | ((i >= n - prefix) & (j >= n - prefix))


@prefix_lm_mask.near_miss("inverted")
def _(n, prefix):
    """True and False have changed places. True means: may attend."""
    i, j = positions(n)
    return ~((j <= i) | (j < prefix))


@prefix_lm_mask.near_miss("additive")
def _(n, prefix):
    """This is the additive form, with 0 and -inf. Here the boolean form is asked for: True where attending is allowed."""
    i, j = positions(n)
    return additive((j <= i) | (j < prefix))


# ----------------------------------------------------------------------------------------- find_leaks

find_leaks = Exercise("find_leaks", ref, see="find-leaks", seconds=20)

VOCAB = 5


def model_of(rule, vocab: int = VOCAB):
    """A language model in the grader: `rule(ids)` gives the logits, ids are looked over first."""

    def model(ids):
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise ValueError("the model needs ids of shape (batch, seq), as whole numbers")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise ValueError(f"the model needs ids from 0 to {vocab - 1}")
        return rule(ids.long())

    return served(model)


def mixing_model(g: Gen, weights: torch.Tensor, vocab: int = VOCAB):
    """Output i is the sum of the tokens' vectors, weighted by row i of `weights`: it reads exactly where they are not 0."""
    vectors = _vectors(g, vocab)
    weights = weights.double()
    return model_of(lambda ids: weights[: ids.shape[1], : ids.shape[1]] @ vectors[ids], vocab)


def attending_model(g: Gen, attend):
    """Output i is made by `attend(scores) @ x`, with the tokens' vectors as queries, keys and values."""
    vectors = _vectors(g, VOCAB)

    def rule(ids):
        x = vectors[ids]  # (batch, seq, vocab)
        return attend(x @ x.mT) @ x

    return model_of(rule)


def noticing_model(seq: int, edges, token: int, size: float = 1.0, base: float = 0.0):
    """The logits are constant but for this: for each (i, j) of `edges`, output i moves by `size` where token j is `token`."""

    def rule(ids):
        logits = torch.full((*ids.shape, VOCAB), base, dtype=torch.float64)
        for i, j in edges:
            if i < ids.shape[1] and j < ids.shape[1]:
                logits[:, i, 1] += size * (ids[:, j] == token)
        return logits

    return model_of(rule)


def _vectors(g: Gen, vocab: int) -> torch.Tensor:
    """One vector per token, no two of them close to each other in any entry."""
    columns = [g.perm(vocab).double() - 1.5 for _ in range(vocab)]
    return torch.stack(columns, dim=1) / 2 + 0.1 * g.rand(vocab, vocab, dtype=torch.float64)


def _future(n: int) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


@find_leaks.group("models", share=3)
def _(g: Gen):
    """Convicts models that read later tokens, and acquits those that do not."""
    n = 4
    ids = g.ints(0, VOCAB - 1, 1, n)
    none = torch.zeros(n, n, dtype=torch.bool)
    causal = mixing_model(g, (0.5 + g.rand(n, n)).tril())
    yield call(causal, ids).expect(none).says("a causal model")
    yield (
        call(mixing_model(g, torch.eye(n)), ids)
        .expect(none)
        .says("a model that looks at the current token only")
    )
    everything = mixing_model(g, 0.5 + g.rand(n, n))
    yield call(everything, ids).expect(_future(n)).says("a model without a mask")
    following = torch.ones(n, n).tril(1)
    yield (
        call(mixing_model(g, following), ids)
        .expect(_future(n) & following.bool())
        .says("a mask that is off by one")
    )
    yield call(attending_model(g, lambda s: torch.softmax(s, -1).tril()), ids).says(
        "a mask after the softmax"
    )
    yield (
        call(attending_model(g, lambda s: torch.softmax(s + ref.causal_mask(n, s.dtype), -1)), ids)
        .expect(none)
        .says("masked self-attention")
    )
    prefix = ref.prefix_lm_mask(n, 2)
    yield (
        call(mixing_model(g, prefix.double()), ids)
        .expect(prefix & _future(n))
        .says("a prefix that sees itself whole")
    )
    yield (
        call(mixing_model(g, torch.eye(n) - 1 / n), ids)
        .expect(_future(n))
        .says("the mean over all positions is subtracted")
    )


@find_leaks.group("single entries")
def _(g: Gen):
    """Finds the one output that reads the one later token, and nothing else."""
    for n, edges in [(5, [(1, 3)]), (6, [(0, 5), (2, 3)]), (5, [(3, 4), (0, 1)])]:
        weights = torch.ones(n, n).tril()
        for i, j in edges:
            weights[i, j] = -0.7
        yield call(mixing_model(g, weights), g.ints(0, VOCAB, 1, n)).says(
            f"{len(edges)} of {n * (n - 1) // 2} entries leak"
        )
    last = torch.eye(5)
    last[:, -1] = 1.0
    yield call(mixing_model(g, last), g.ints(0, VOCAB, 1, 5)).says("every output reads the last token")
    for vocab in (2, 3):
        weights = (g.rand(4, 4) < 0.5).double()
        yield call(mixing_model(g, weights, vocab), g.ints(0, vocab, 1, 4)).says(
            f"a vocabulary of {vocab} tokens"
        )
    yield (
        call(mixing_model(g, torch.ones(1, 1)), g.tensor([[2]]))
        .expect(torch.zeros(1, 1, dtype=torch.bool))
        .says("one token")
    )
    yield (
        call(mixing_model(g, torch.ones(2, 2)), g.tensor([[1, 1]]))
        .expect(drawn(".x", ".."))
        .says("two tokens")
    )


@find_leaks.group("every other token", share=2)
def _(g: Gen):
    """Tries every other token of the vocabulary in each place, one place at a time."""
    ids = g.tensor([[1, 0, 2, 1]])
    for token in range(
        VOCAB
    ):  # whichever tokens an answer leaves out, one of these models reacts to them alone
        yield call(noticing_model(4, [(0, 2), (2, 3)], token), ids).says(
            "one token out of the vocabulary makes the difference"
        )
    high = call(noticing_model(3, [(0, 1)], VOCAB - 1), g.tensor([[0, 0, 0]]))
    yield high.expect(drawn(".x.", "...", "...")).says("the token that matters is not in the text")

    def both(
        ids,
    ):  # output 0 changes when 1 stands at position 1 and 0 at position 2, with the other one left as it is
        logits = torch.zeros(*ids.shape, VOCAB, dtype=torch.float64)
        if ids.shape[1] > 2:
            logits[:, 0, 3] += ((ids[:, 1] == 3) & (ids[:, 2] == 0)).double()
        return logits

    pair = call(model_of(both), g.tensor([[2, 1, 0]]))
    yield pair.expect(drawn(".x.", "...", "...")).says("two later tokens together make the difference")


@find_leaks.group("what counts as a change", share=2)
def _(g: Gen):
    """Any logit that moves by more than 1e-6, up or down, counts; what moves less does not."""
    ids = g.tensor([[0, 1, 2, 0]])
    edges = [(0, 2), (1, 3)]
    tiny = drawn("....", "....", "....", "....")
    found = drawn("..x.", "...x", "....", "....")
    yield call(noticing_model(4, edges, 4, 1e-8), ids).expect(tiny).says("logits move by 1e-8")
    yield call(noticing_model(4, edges, 4, 1e-4), ids).expect(found).says("logits move by 1e-4")
    yield call(noticing_model(4, edges, 4, 3e-6), ids).expect(found).says("one of five logits moves by 3e-6")
    yield (
        call(noticing_model(4, edges, 4, 5e-4, base=100.0), ids)
        .expect(found)
        .says("logits near 100 move by 5e-4")
    )
    yield call(noticing_model(4, edges, 4, -1.0), ids).expect(found).says("a logit goes down")
    for j, token in ((2, 2), (3, 0)):  # the text's own token: every other one takes the bonus away
        lost = noticing_model(4, [(1, j)], token)
        want = torch.zeros(4, 4, dtype=torch.bool)
        want[1, j] = True
        yield call(lost, ids).expect(want).says("a logit goes down for every other token")

    def balanced(ids):  # two logits move against each other: neither their sum nor the arg-max moves
        logits = torch.zeros(*ids.shape, VOCAB, dtype=torch.float64)
        logits[..., 0] = 9.0
        for i, j in [(i, j) for i, j in edges if j < ids.shape[1]]:
            logits[:, i, 2] += (ids[:, j] == 3).double()
            logits[:, i, 4] -= (ids[:, j] == 3).double()
        return logits

    yield call(model_of(balanced), ids).expect(found).says("the most probable token stays the same")

    def trembling(ids):  # each logit moves by less than 1e-6, all five together by more
        logits = torch.zeros(*ids.shape, VOCAB, dtype=torch.float64)
        for i, j in [(i, j) for i, j in edges if j < ids.shape[1]]:
            logits[:, i] += 6e-7 * (ids[:, j] == 4).double()[:, None]
        return logits

    yield call(model_of(trembling), ids).expect(tiny).says("five logits move by 6e-7 each")

    def shifted(ids):  # all logits of a position move together: the probabilities stay, the logits do not
        logits = torch.arange(VOCAB, dtype=torch.float64).expand(*ids.shape, VOCAB).clone()
        for i, j in [(i, j) for i, j in edges if j < ids.shape[1]]:
            logits[:, i] += (ids[:, j] == 4).double()[:, None]
        return logits

    yield call(model_of(shifted), ids).expect(found).says("all logits of a position move together")


def _trials(model, ids):
    """Yields (j, all logits after another token is put at j) for every j and every other token."""
    logits = model(ids)
    for j in range(ids.shape[1]):
        for token in range(logits.shape[-1]):
            if token != int(ids[0, j]):
                changed = ids.clone()
                changed[0, j] = token
                yield j, logits, model(changed)


def _moved(a, b):
    return (a - b).abs().amax(-1)[0] > 1e-6


def _no_leaks(ids):
    return torch.zeros(ids.shape[1], ids.shape[1], dtype=torch.bool)


@find_leaks.near_miss("one-token-only")
def _(model, ids):
    """Only one other token is tried in each place. A model may react to a single token of the vocabulary: try all of them."""
    logits, leaks = model(ids), _no_leaks(ids)
    for j in range(1, ids.shape[1]):
        changed = ids.clone()
        changed[0, j] = (changed[0, j] + 1) % logits.shape[-1]
        leaks[:j, j] = _moved(model(changed), logits)[:j]
    return leaks


@find_leaks.near_miss("last-token-only")
def _(model, ids):
    """One token alone decides in each place: either no other is tried, or the answer of the last one overwrites those before it. Try
    every other token, and collect what they find with `|=`."""
    leaks = _no_leaks(ids)
    for j, before, after in _trials(model, ids):
        leaks[:j, j] = _moved(after, before)[:j]
    return leaks


@find_leaks.near_miss("tokens-of-the-text")
def _(model, ids):
    """Only tokens up to the largest one in the text are tried. The vocabulary is larger: its size is the last axis of the
    logits."""
    logits, leaks = model(ids), _no_leaks(ids)
    for j in range(1, ids.shape[1]):
        for token in range(int(ids.max()) + 1):
            changed = ids.clone()
            changed[0, j] = token
            leaks[:j, j] |= _moved(model(changed), logits)[:j]
    return leaks


@find_leaks.near_miss("diagonal-is-a-leak")
def _(model, ids):
    """The diagonal is reported, too. Output i may read token i: it predicts the token after it. Only j > i is a leak."""
    leaks = _no_leaks(ids)
    for j, before, after in _trials(model, ids):
        leaks[: j + 1, j] |= _moved(after, before)[: j + 1]
    return leaks


@find_leaks.near_miss("every-dependence")
def _(model, ids):
    """Every dependence is reported, on earlier tokens as well. Reading the past is what a model is for: only j > i is a leak."""
    leaks = _no_leaks(ids)
    for j, before, after in _trials(model, ids):
        leaks[:, j] |= _moved(after, before)
    return leaks


@find_leaks.near_miss("transposed")
def _(model, ids):
    """Rows and columns have changed places. The row is the output i that changes, the column is the place j of the other token."""
    leaks = _no_leaks(ids)
    for j, before, after in _trials(model, ids):
        leaks[j, :j] |= _moved(after, before)[:j]
    return leaks


@find_leaks.near_miss("past-for-future")
def _(model, ids):
    """The dependence on earlier tokens is reported, which is allowed. A leak is an output that reads a later token: j > i."""
    leaks = _no_leaks(ids)
    for j, before, after in _trials(model, ids):
        leaks[j + 1 :, j] |= _moved(after, before)[j + 1 :]
    return leaks


@find_leaks.near_miss("most-probable-token")
def _(model, ids):
    """Only a change of the most probable token counts here. The logits may change long before the arg-max does: compare them all."""
    leaks = _no_leaks(ids)
    for j, before, after in _trials(model, ids):
        leaks[:j, j] |= (before.argmax(-1) != after.argmax(-1))[0, :j]
    return leaks


@find_leaks.near_miss("sum-of-logits")
def _(model, ids):
    """Changes of several logits are added up and can cancel. Take the absolute difference of each logit, then the largest."""
    leaks = _no_leaks(ids)
    for j, before, after in _trials(model, ids):
        leaks[:j, j] |= ((after - before).sum(-1).abs()[0] > 1e-6)[:j]
    return leaks


@find_leaks.near_miss("mean-change")
def _(model, ids):
    """The changes are averaged over the vocabulary, or the limit is above 1e-6: a small change of one logit is lost, and with their signs
    they can cancel. Take the largest absolute change of any logit and compare it with 1e-6."""
    leaks = _no_leaks(ids)
    for j, before, after in _trials(model, ids):
        leaks[:j, j] |= ((after - before).abs().mean(-1)[0] > 1e-6)[:j]
    return leaks


@find_leaks.near_miss("changes-added-up")
def _(model, ids):
    """The changes of all logits are added up, by a sum or a norm. Each logit is compared on its own: at least one must move by more
    than 1e-6."""
    leaks = _no_leaks(ids)
    for j, before, after in _trials(model, ids):
        leaks[:j, j] |= ((after - before).abs().sum(-1)[0] > 1e-6)[:j]
    return leaks


@find_leaks.near_miss("every-token-must-move-it")
def _(model, ids):
    """A leak is reported only when every other token changes the logits. One is enough: collect what they find with `|=` or `any`."""
    leaks = ~_no_leaks(ids)
    for j, before, after in _trials(model, ids):
        leaks[:, j] &= _moved(after, before)
    return leaks.triu(1)


@find_leaks.near_miss("token-zero-left-out")
def _(model, ids):
    """Token 0 is never tried. The vocabulary is 0 to vocab - 1, so 0 is a token like any other."""
    logits, leaks = model(ids), _no_leaks(ids)
    for j in range(1, ids.shape[1]):
        for token in range(1, logits.shape[-1]):
            changed = ids.clone()
            changed[0, j] = token
            leaks[:j, j] |= _moved(model(changed), logits)[:j]
    return leaks


@find_leaks.near_miss("all-later-tokens-at-once")
def _(model, ids):
    """All later tokens are exchanged together, so a leak from one of them is charged to others. Change one place and leave the rest of
    the text as it is."""
    logits, leaks = model(ids), _no_leaks(ids)
    for j in range(1, ids.shape[1]):
        for token in range(logits.shape[-1]):
            changed = ids.clone()
            changed[0, j:] = token
            leaks[:j, j] |= _moved(model(changed), logits)[:j]
    return leaks


@find_leaks.near_miss("only-upwards")
def _(model, ids):
    """Only a logit that goes up counts. Take the absolute value of the difference before it is compared with 1e-6."""
    leaks = _no_leaks(ids)
    for j, before, after in _trials(model, ids):
        leaks[:j, j] |= ((after - before).amax(-1)[0] > 1e-6)[:j]
    return leaks


@find_leaks.near_miss("any-difference")
def _(model, ids):
    """Differences of rounding count as leaks. A change counts when it is larger than 1e-6."""
    leaks = _no_leaks(ids)
    for j, before, after in _trials(model, ids):
        leaks[:j, j] |= (after != before).any(-1)[0, :j]
    return leaks


@find_leaks.near_miss("limit-too-large")
def _(model, ids):
    """The limit is too large, and small changes are lost. A change counts when it is larger than 1e-6."""
    leaks = _no_leaks(ids)
    for j, before, after in _trials(model, ids):
        leaks[:j, j] |= ((after - before).abs().amax(-1)[0] > 1e-3)[:j]
    return leaks


@find_leaks.near_miss("relative-tolerance")
def _(model, ids):
    """The tolerance grows with the logits, as in `torch.allclose` and `torch.isclose` unless rtol is 0. The limit is 1e-6, whatever the
    size of the logits."""
    leaks = _no_leaks(ids)
    for j, before, after in _trials(model, ids):
        leaks[:j, j] |= ~torch.isclose(after, before, atol=1e-6).all(-1)[0, :j]
    return leaks


@find_leaks.near_miss("isclose-as-it-is")
def _(model, ids):
    """`torch.isclose` and `torch.allclose` have tolerances of their own: a part of the logits' size, and 1e-8. Here the limit is 1e-6 whatever the
    size of the logits: compare the absolute difference with it."""
    leaks = _no_leaks(ids)
    for j, before, after in _trials(model, ids):
        leaks[:j, j] |= ~torch.isclose(after, before).all(-1)[0, :j]
    return leaks


@find_leaks.near_miss("changes-pile-up")
def _(model, ids):
    """The token that was tried stays in place while the next positions are tried. Put each other token into a fresh copy of the
    text."""
    logits, leaks, changed = model(ids), _no_leaks(ids), ids.clone()
    for j in range(ids.shape[1]):
        for token in range(logits.shape[-1]):
            changed[0, j] = token
            leaks[:j, j] |= _moved(model(changed), logits)[:j]
    return leaks


@find_leaks.near_miss("cuts-the-text")
def _(model, ids):
    """The text is cut off before j, and all tokens from there on are missing at once: put another token at j and leave the rest of the text as it
    is, so that what moves is due to that token."""
    logits, leaks = model(ids), _no_leaks(ids)
    for j in range(1, ids.shape[1]):
        leaks[:j, j] = _moved(model(ids[:, :j]), logits[:, :j])
    return leaks


@find_leaks.near_miss("last-place-left-out")
def _(model, ids):
    """No other token is put at the last position: every j up to the end of the text is tried, the last one too."""
    leaks = _no_leaks(ids)
    for j, before, after in _trials(model, ids):
        if j < ids.shape[1] - 1:
            leaks[:j, j] |= _moved(after, before)[:j]
    return leaks


@find_leaks.near_miss("last-token-left-out")
def _(model, ids):
    """The last token of the vocabulary is never tried: ids go from 0 to vocab - 1, both included."""
    logits, leaks = model(ids), _no_leaks(ids)
    for j in range(1, ids.shape[1]):
        for token in range(logits.shape[-1] - 1):
            changed = ids.clone()
            changed[0, j] = token
            leaks[:j, j] |= _moved(model(changed), logits)[:j]
    return leaks


@find_leaks.near_miss("neighbours-only")
def _(model, ids):
    """Only the output right before the changed token is compared. A leak can reach further back: compare every output i < j."""
    leaks = _no_leaks(ids)
    for j, before, after in _trials(model, ids):
        if j > 0:
            leaks[j - 1, j] |= _moved(after, before)[j - 1]
    return leaks


@find_leaks.near_miss("probabilities")
def _(model, ids):
    """The probabilities are compared. They stay the same when all logits of a position move together: compare the logits."""
    leaks = _no_leaks(ids)
    for j, before, after in _trials(model, ids):
        leaks[:j, j] |= _moved(torch.softmax(after, -1), torch.softmax(before, -1))[:j]
    return leaks


@find_leaks.near_miss("text-changed")
def _(model, ids):
    """The other tokens are put into the text itself, which is not what it was afterwards, and each change stays in place for the
    next one. Put each into a fresh copy: ids.clone()."""
    logits, leaks = model(ids), _no_leaks(ids)
    for j in range(1, ids.shape[1]):
        for token in range(logits.shape[-1]):
            ids[0, j] = token
            leaks[:j, j] |= _moved(model(ids), logits)[:j]
    return leaks
