"""What is right in the loss chapter: log-probabilities, the loss, its units, teacher forcing, long texts, big vocabularies."""

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from autograder.spec import HALF, Exercise, Gen, call, scenario, served
from course_llm import loss as ref

# log_softmax

log_softmax = Exercise("log_softmax", ref, see="log-softmax")


@log_softmax.group("values", share=1)
def _(g: Gen):
    """Gives the logarithm of the softmax over the last axis, for any number of batch dimensions."""
    yield (
        call(g.tensor([0.0, 0.0, math.log(2.0)]))
        .expect(g.tensor([-math.log(4.0), -math.log(4.0), -math.log(2.0)]))
        .says("probabilities 1/4, 1/4, 1/2")
    )
    yield call(g.tensor([3.0])).expect(g.tensor([0.0])).says("a vocabulary of one token")
    for shape in [(6,), (3, 5), (2, 3, 5), (2, 2, 3, 4)]:
        logits = 2 * g.randn(*shape)
        yield call(logits).expect(F.log_softmax(logits, -1)).says(f"{len(shape) - 1} batch dimensions")


@log_softmax.group("stable", share=1)
def _(g: Gen):
    """Stays finite and exact for logits that are large or far apart."""
    yield call(g.tensor([0.0, 200.0])).expect(g.tensor([-200.0, 0.0])).says("[0, 200]")
    yield call(g.tensor([-1e4, 1e4, 0.0])).expect(g.tensor([-2e4, 0.0, -1e4])).says("logits of ±10,000")
    # x − logsumexp(x) is right, too: it loses the digits that float32 does not have at 10,000
    yield (
        call(g.tensor([-1e4, -1e4]))
        .expect(g.tensor([-math.log(2.0)] * 2))
        .close(atol=2e-3)
        .says("all logits at −10,000")
    )
    yield (
        call(g.tensor([[0.0, 1.0], [1000.0, 1001.0]]))
        .close(atol=2e-4)
        .says("rows that lie far from each other")
    )
    yield call(1000 + g.randn(2, 4, dtype=torch.float64)).says("logits around 1,000")
    yield call(g.tensor([0.0, 1e5], torch.bfloat16)).says("100,000 in bfloat16")
    yield call(g.tensor([0.0, 1000.0], torch.float16)).says("1,000 in float16")


@log_softmax.group("dtypes and layout", share=1)
def _(g: Gen):
    """Keeps the dtype and its precision; takes slices and transposes of other tensors."""
    for dtype in (*HALF, torch.float64):
        yield call(g.randn(2, 5, dtype=dtype)).says(str(dtype))
    yield call(g.randn(5, 3).T).says("logits that are not contiguous")


@log_softmax.group("gradient", share=1)
def _(g: Gen):
    """Is differentiable, also where the softmax underflows."""
    yield call(g.randn(2, 5)).gradient().says("one batch dimension")
    yield call(g.randn(2, 2, 3, dtype=torch.float64)).gradient().says("two batch dimensions")
    yield call(g.tensor([0.0, 200.0, 199.0])).gradient().says("logits far apart")
    yield call(g.randn(2, 4, dtype=torch.float16)).gradient().says("float16")


@log_softmax.near_miss("log-of-softmax")
def _(logits):
    """The softmax is computed first and its logarithm taken afterwards. A probability below about 1e-45 is already 0 in
    float32, and log 0 is −inf. Simplify on paper first: log softmax is x − log Σ exp(x), and no probability is needed."""
    return logits.softmax(-1).log()


@log_softmax.near_miss("raw-exponential")
def _(logits):
    """The formula x − log Σ exp(x) is right, but exp overflows above 88 in float32. Subtract the largest logit of each
    row first: it cancels."""
    return logits - logits.exp().sum(-1, keepdim=True).log()


def _epsilon_inside_log(epsilon, hide=torch.add):
    def near_miss(logits):
        """A small number is added inside the logarithm. It hides the −inf but gives a wrong value: every probability below
        the number gets the same log-probability. Subtract the largest logit instead; then there is nothing to hide."""
        return hide(logits.softmax(-1), epsilon).log()

    return near_miss


log_softmax.near_miss("epsilon-inside-log")(_epsilon_inside_log(1e-9))
for _epsilon in (1e-6, 1e-8, 1e-10, 1e-12):
    log_softmax.near_miss(f"epsilon-{_epsilon:g}-inside-log")(_epsilon_inside_log(_epsilon))
for _epsilon in (1e-6, 1e-8, 1e-9):
    log_softmax.near_miss(f"clamped-at-{_epsilon:g}-inside-log")(_epsilon_inside_log(_epsilon, torch.clamp))


@log_softmax.near_miss("one-maximum-for-all")
def _(logits):
    """One maximum is subtracted from all rows. A row that lies far below it underflows. Take the maximum of each row:
    over the last axis, with keepdim=True."""
    shifted = logits - logits.max()
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


@log_softmax.near_miss("first-axis")
def _(logits):
    """The probabilities sum to 1 down the first axis. The vocabulary is the last axis: normalise over dim=-1."""
    return F.log_softmax(logits, 0)


@log_softmax.near_miss("second-axis")
def _(logits):
    """The probabilities sum to 1 over the second axis. That is the vocabulary only when there is one batch dimension:
    normalise over dim=-1, the last axis, however many there are."""
    return F.log_softmax(logits, min(1, logits.dim() - 1))


@log_softmax.near_miss("base-2", see="nats-and-bits")
def _(logits):
    """The logarithm has base 2. Losses are in nats here: take the natural logarithm."""
    return F.log_softmax(logits, -1) / math.log(2)


@log_softmax.near_miss("mean-subtracted")
def _(logits):
    """The mean of the row is subtracted before exp. A logit may still lie far above it and overflow. Subtract the largest
    one: then no exponent is above 0."""
    shifted = logits - logits.mean(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


@log_softmax.near_miss("normaliser-detached")
def _(logits):
    """The values are right, but log Σ exp(x) is cut off from the logits, so the gradient lacks the softmax. Only the maximum
    that is subtracted may be detached: it cancels."""
    return logits - logits.logsumexp(-1, keepdim=True).detach()


@log_softmax.near_miss("probabilities")
def _(logits):
    """These are the probabilities. Their logarithm is asked for."""
    return logits.softmax(-1)


# cross_entropy

cross_entropy = Exercise("cross_entropy", ref, see="cross-entropy")


@cross_entropy.group("values", share=2)
def _(g: Gen):
    """Gives the mean negative log-probability of the targets, for any number of batch dimensions."""
    lecture = g.tensor([0.55, 0.2, 0.15, 0.1]).log()
    yield call(lecture, g.tensor(0)).expect(g.tensor(-math.log(0.55))).says("one row, probability 0.55")
    yield (
        call(g.tensor([[1.0, 1.0, 1.0, 1.0]]), g.tensor([2]))
        .expect(g.tensor(math.log(4.0)))
        .says("a uniform model of four tokens")
    )
    for shape in [(5,), (2, 3), (2, 2, 3)]:
        logits, targets = g.randn(*shape, 7), g.ints(0, 7, *shape)
        want = F.cross_entropy(logits.reshape(-1, 7), targets.reshape(-1))
        yield call(logits, targets).expect(want).says(f"{len(shape)} batch dimensions")


@cross_entropy.group("ignored", share=1)
def _(g: Gen):
    """Leaves targets equal to ignore_index out of the sum and out of the count."""
    logits = g.randn(2, 4, 5)
    yield call(logits, g.tensor([[1, -100, -100, -100], [2, 0, 4, -100]])).says("−100 by default")
    yield call(logits, g.tensor([[0, 2, 0, 0], [1, 0, 3, 4]]), ignore_index=0).says("token 0 is ignored")
    yield call(logits, g.tensor([[4, 2, 0, 4], [1, 4, 3, 1]]), 4).says("the last token is ignored")
    yield call(logits, g.tensor([[99, 2, 0, 99], [1, 99, 3, 4]]), ignore_index=99).says(
        "an ignore_index above the vocabulary"
    )
    yield call(logits[0], g.tensor([3, -1, -1, 4]), ignore_index=-1).says("ignore_index −1")
    yield call(logits[1], g.tensor([3, 1, 1, 4]), ignore_index=2).says("an ignore_index that no target has")


@cross_entropy.group("nothing counts", share=1)
def _(g: Gen):
    """Is 0, with gradient 0, when no target counts."""
    for dtype in (torch.float32, torch.float16):
        logits = g.randn(3, 4, dtype=dtype)
        yield (
            call(logits, g.tensor([-100, -100, -100]))
            .expect(g.tensor(0.0, dtype))
            .gradient()
            .says(f"every target is ignored, {dtype}")
        )
    yield (
        call(g.randn(2, 2, 4), g.tensor([[3, 3], [3, 3]]), ignore_index=3)
        .gradient()
        .says("every target is ignored, two batch dimensions")
    )
    yield call(g.randn(0, 4), torch.zeros(0).long()).expect(g.tensor(0.0)).says("no row at all")


@cross_entropy.group("stable", share=1)
def _(g: Gen):
    """Stays exact for logits that are far apart."""
    yield call(g.tensor([[0.0, 200.0]]), g.tensor([0])).expect(g.tensor(200.0)).says("[0, 200]")
    yield call(g.tensor([[-1e4, 1e4], [1e4, -1e4]]), g.tensor([0, 0])).expect(g.tensor(1e4)).says("±10,000")
    yield call(g.tensor([0.0, 200.0, 1.0]), g.tensor(0)).gradient().says("the gradient at [0, 200, 1]")


@cross_entropy.group("dtypes and layout", share=1)
def _(g: Gen):
    """Keeps the dtype and its precision; takes slices and transposes of other tensors."""
    for dtype in (*HALF, torch.float64):
        targets = g.ints(0, 5, 2, 3)
        targets[0, 1] = -100
        yield call(g.randn(2, 3, 5, dtype=dtype), targets).says(str(dtype))
    yield call(g.randn(6, 4).T, g.ints(0, 6, 4)).says("logits that are not contiguous")
    yield call(g.randn(2, 3, 5), g.ints(0, 5, 3, 2).T).says("targets that are not contiguous")


@cross_entropy.group("gradient", share=1)
def _(g: Gen):
    """Is differentiable: (softmax − one-hot) over the targets that count."""
    yield call(g.randn(4, 5), g.ints(0, 5, 4)).gradient().says("one batch dimension")
    targets = g.ints(0, 5, 2, 3)
    targets[1, 1:] = -100
    yield call(g.randn(2, 3, 5, dtype=torch.float64), targets).gradient().says("with ignored targets")
    yield call(g.randn(3, 5, dtype=torch.bfloat16), g.ints(0, 5, 3)).gradient().says("bfloat16")


def _flat(logits, targets):
    return logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)


def _terms(logits, targets, ignore_index):
    """The loss of each row, 0 where the target is ignored."""
    x, t = _flat(logits, targets)
    return F.cross_entropy(x, t, ignore_index=ignore_index, reduction="none"), t != ignore_index


@cross_entropy.near_miss("ignored-in-denominator")
def _(logits, targets, ignore_index=-100):
    """Ignored targets are left out of the sum but still counted in the number that divides it. The mean is over the
    targets that count: divide by their number."""
    terms, _ = _terms(logits, targets, ignore_index)
    return terms.sum() / max(terms.numel(), 1)


@cross_entropy.near_miss("sum")
def _(logits, targets, ignore_index=-100):
    """This is the sum over the targets. The mean is asked for: divide by the number of targets that count."""
    return _terms(logits, targets, ignore_index)[0].sum()


@cross_entropy.near_miss("nan-when-nothing-counts")
def _(logits, targets, ignore_index=-100):
    """When no target counts, the mean is 0/0, which is NaN, and NaN poisons every weight. Clamp the count to at least 1:
    then the loss and its gradient are 0."""
    return F.cross_entropy(*_flat(logits, targets), ignore_index=ignore_index)


@cross_entropy.near_miss("mean-of-row-means")
def _(logits, targets, ignore_index=-100):
    """The mean is taken in each row and then over the rows. Rows with many ignored targets then weigh too much. Sum over
    all targets that count, and divide once."""
    terms, counted = _terms(logits, targets, ignore_index)
    terms, counted = terms.reshape(targets.shape), counted.reshape(targets.shape)
    if targets.dim() == 0:
        return terms
    return (terms.sum(-1) / counted.sum(-1).clamp(min=1)).sum() / max(terms[..., 0].numel(), 1)


@cross_entropy.near_miss("always-minus-100")
def _(logits, targets, ignore_index=-100):
    """Only −100 is ignored, whatever ignore_index says. Compare the targets with the argument."""
    x, t = _flat(logits, targets)
    counted = t != -100
    nll = -x.log_softmax(-1).gather(-1, t.masked_fill(~counted, 0)[:, None])[:, 0] * counted
    return nll.sum() / counted.sum().clamp(min=1)


@cross_entropy.near_miss("ignored-become-token-0")
def _(logits, targets, ignore_index=-100):
    """Ignored targets are replaced by token 0 so that they can be looked up, and then counted as if token 0 were right.
    Set their loss to 0 after the look-up, and leave them out of the count."""
    x, t = _flat(logits, targets)
    nll = -x.log_softmax(-1).gather(-1, t.masked_fill(t == ignore_index, 0)[:, None])
    return nll.sum() / max(nll.numel(), 1)


@cross_entropy.near_miss("log-of-softmax", see="log-softmax")
def _(logits, targets, ignore_index=-100):
    """The softmax is computed first and its logarithm taken afterwards: a target of very small probability costs inf. Use
    the stable log_softmax."""
    x, t = _flat(logits, targets)
    counted = t != ignore_index
    picked = x.softmax(-1).gather(-1, t.masked_fill(~counted, 0)[:, None])[:, 0].log()
    return -picked.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)


@cross_entropy.near_miss("bits", see="nats-and-bits")
def _(logits, targets, ignore_index=-100):
    """This loss is in bits: the logarithm has base 2. Training losses are in nats, with the natural logarithm."""
    return ref.cross_entropy(logits, targets, ignore_index) / math.log(2)


@cross_entropy.near_miss("nan-gradient-when-nothing-counts")
def _(logits, targets, ignore_index=-100):
    """The loss is 0 when no target counts, but its gradient is NaN: torch.where hides 0/0 in the value, and backward goes
    through it all the same. Clamp the count to at least 1, so that 0/0 is never computed."""
    x, t = _flat(logits, targets)
    counted = t != ignore_index
    terms = -x.log_softmax(-1).gather(-1, t.masked_fill(~counted, 0)[:, None])[:, 0] * counted
    return torch.where(counted.any(), terms.sum() / counted.sum(), torch.zeros_like(terms.sum()))


@cross_entropy.near_miss("cut-off-when-nothing-counts")
def _(logits, targets, ignore_index=-100):
    """When no target counts, a new 0 is returned that does not belong to the graph, so backward() fails. Return the sum over no
    rows, or a sum of the logits times 0."""
    terms, counted = _terms(logits, targets, ignore_index)
    return terms.sum() / counted.sum() if counted.any() else torch.zeros((), dtype=logits.dtype)


def _ce_epsilon_inside_log(epsilon, hide=torch.add):
    def near_miss(logits, targets, ignore_index=-100):
        """The probability is kept away from 0 before its logarithm is taken. That hides the inf but gives a wrong loss: every
        target less likely than this number costs the same. Use the stable log_softmax."""
        x, t = _flat(logits, targets)
        counted = t != ignore_index
        picked = hide(x.softmax(-1), epsilon).gather(-1, t.masked_fill(~counted, 0)[:, None])[:, 0].log()
        return -picked.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)

    return near_miss


for _epsilon in (1e-8, 1e-9, 1e-10, 1e-12):
    _name = f"epsilon-{_epsilon:g}-inside-log"
    cross_entropy.near_miss(_name, see="log-softmax")(_ce_epsilon_inside_log(_epsilon))
for _epsilon in (1e-8, 1e-9):
    _name = f"clamped-at-{_epsilon:g}-inside-log"
    cross_entropy.near_miss(_name, see="log-softmax")(_ce_epsilon_inside_log(_epsilon, torch.clamp))


@cross_entropy.near_miss("default-0")
def _(logits, targets, ignore_index=0):
    """Token 0 is left out although ignore_index was not given. Its default is −100, which is no token."""
    return ref.cross_entropy(logits, targets, ignore_index)


# shift_for_next_token

shift_for_next_token = Exercise("shift_for_next_token", ref, see="shifting")


@shift_for_next_token.group("values", share=2)
def _(g: Gen):
    """Pairs each token with the token that follows it."""
    yield (
        call(g.tensor([[1, 2, 3], [4, 5, 6]]))
        .expect((g.tensor([[1, 2], [4, 5]]), g.tensor([[2, 3], [5, 6]])))
        .says("two texts of three tokens")
    )
    yield call(g.perm(15).reshape(3, 5)).says("a batch of three")
    yield call(g.perm(16).reshape(4, 4)).says("as many rows as tokens")


@shift_for_next_token.group("edges", share=1)
def _(g: Gen):
    """Handles one text, two tokens, one token, other integer types, transposed ids."""
    yield call(g.perm(6)[None]).says("a batch of one")
    yield call(g.perm(4).reshape(2, 2)).says("texts of two tokens")
    yield call(g.perm(3)[:, None]).says("texts of one token have no pair")
    yield call(g.perm(6).reshape(2, 3).to(torch.int32)).says("int32 ids stay int32")
    yield call(g.perm(12).reshape(6, 2).T).says("ids that are not contiguous")


@shift_for_next_token.near_miss("unshifted")
def _(ids):
    """Inputs and targets are both the whole text, so each token is its own target and the model learns to copy. Drop the
    last token of the inputs and the first of the targets."""
    return ids, ids


@shift_for_next_token.near_miss("wrong-way")
def _(ids):
    """The targets are the tokens before the inputs: this trains a model to predict the past. The target is the token that
    comes next."""
    return ids[:, 1:], ids[:, :-1]


@shift_for_next_token.near_miss("same-slice")
def _(ids):
    """The inputs are shortened, and the targets in the same way, so each token is its own target. The targets begin one
    token later."""
    return ids[:, :-1], ids[:, :-1]


@shift_for_next_token.near_miss("shifts-the-batch")
def _(ids):
    """The slice is taken along the batch: it pairs one text with another. Shift along the second axis, inside each
    text."""
    return ids[:-1], ids[1:]


@shift_for_next_token.near_miss("two-ahead")
def _(ids):
    """The target is the token after the next. Shift by one: drop the last token of the inputs and the first of the targets."""
    return ids[:, :-2], ids[:, 2:]


@shift_for_next_token.near_miss("padded-with-minus-100")
def _(ids):
    """The last token gets the target −100. It has no target here: drop it from the inputs, so that both are one token shorter."""
    return ids, torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)


@shift_for_next_token.near_miss("one-long-text")
def _(ids):
    """The rows are joined into one text before the shift, so the last token of a row gets the first of the next as its target.
    Shift along the second axis, inside each text."""
    flat, shape = ids.reshape(-1), (ids.shape[0], ids.shape[1] - 1)
    number = shape[0] * shape[1]
    return flat[:-1][:number].reshape(shape), flat[1:][:number].reshape(shape)


@shift_for_next_token.near_miss("rolled")
def _(ids):
    """The targets wrap round: the last token is asked to predict the first. The last token has no target here; drop it
    from the inputs."""
    return ids, ids.roll(-1, 1)


# next_token_loss

next_token_loss = Exercise("next_token_loss", ref, see="shifting")


@next_token_loss.group("values", share=2)
def _(g: Gen):
    """Scores each token by the logits of the position before it, and takes the mean."""
    logits, ids = g.randn(2, 5, 7), g.ints(0, 7, 2, 5)
    want = F.cross_entropy(logits[:, :-1].reshape(-1, 7), ids[:, 1:].reshape(-1))
    yield call(logits, ids).expect(want).says("a batch of two, no padding")
    yield call(g.randn(1, 4, 5), g.ints(0, 5, 1, 4)).says("a batch of one")
    yield call(g.randn(3, 2, 4), g.ints(0, 4, 3, 2)).says("texts of two tokens")
    yield call(g.randn(2, 4, 3), g.tensor([[0, 1, 0, 2], [0, 0, 2, 1]]), pad_id=None).says(
        "without pad_id, token 0 counts like any other"
    )


@next_token_loss.group("padding", share=1)
def _(g: Gen):
    """Leaves padded targets out, and only those: a token after padding is still a target."""
    logits = g.randn(3, 5, 6)
    yield call(logits, g.tensor([[1, 2, 5, 5, 5], [3, 1, 4, 2, 5], [2, 2, 1, 5, 5]]), 5).says(
        "padding on the right, texts of unequal length"
    )
    yield call(logits, g.tensor([[0, 0, 0, 2, 3], [0, 1, 4, 2, 5], [3, 2, 1, 5, 5]]), pad_id=0).says(
        "padding on the left with token 0"
    )
    yield call(logits, g.tensor([[1, 3, 2, 3, 4], [3, 3, 3, 3, 3], [5, 3, 3, 2, 1]]), pad_id=3).says(
        "padding inside, and a row of padding alone"
    )
    yield call(logits, g.tensor([[1, 3, 2, 3, 4], [3, 3, 2, 1, 3], [5, 3, 3, 2, 1]]), pad_id=0).says(
        "a pad_id that does not occur"
    )


@next_token_loss.group("nothing left", share=1)
def _(g: Gen):
    """Is 0 when no target is left."""
    # a 0 that does not belong to the graph is right, too
    yield call(g.randn(2, 1, 4), g.ints(0, 4, 2, 1)).expect(g.tensor(0.0)).says("texts of one token")
    yield (
        call(g.randn(2, 3, 4), g.tensor([[1, 2, 2], [2, 2, 2]]), pad_id=2)
        .expect(g.tensor(0.0))
        .says("padding behind the first token")
    )


@next_token_loss.group("dtypes and layout", share=1)
def _(g: Gen):
    """Keeps the dtype and its precision; takes slices and transposes of other tensors."""
    for dtype in (*HALF, torch.float64):
        yield call(g.randn(2, 4, 5, dtype=dtype), g.ints(0, 5, 2, 4), pad_id=1).says(str(dtype))
    yield call(g.randn(4, 3, 6).transpose(0, 1), g.ints(0, 6, 4, 3).T).says(
        "arguments that are not contiguous"
    )


@next_token_loss.group("gradient", share=1)
def _(g: Gen):
    """Is differentiable in the logits."""
    yield call(g.randn(2, 4, 5), g.ints(0, 5, 2, 4)).gradient().says("no padding")
    ids = g.tensor([[1, 0, 2, 4, 4], [3, 1, 4, 4, 4]])
    yield call(g.randn(2, 5, 5, dtype=torch.float64), ids, pad_id=4).gradient().says("padding")
    yield call(g.randn(2, 4, 5, dtype=torch.float16), g.ints(0, 5, 2, 4)).gradient().says("float16")


def _mean(logits, targets, counted):
    """The mean loss over the counted targets, 0 when there is none."""
    log_probs = ref.log_softmax(logits.double() if logits.dtype == torch.float64 else logits.float())
    nll = -log_probs.gather(-1, targets[..., None])[..., 0]
    return (nll.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)).to(logits.dtype)


def _not_pad(targets, pad_id):
    return torch.ones_like(targets, dtype=torch.bool) if pad_id is None else targets != pad_id


@next_token_loss.near_miss("no-shift")
def _(logits, ids, pad_id=None):
    """Each token is scored by the logits of its own position, which have already read it: this rewards copying. Score
    token t + 1 by the logits at t."""
    return _mean(logits, ids, _not_pad(ids, pad_id))


@next_token_loss.near_miss("double-shift")
def _(logits, ids, pad_id=None):
    """The targets are shifted twice, so the model is asked for the token after the next. Shift once: logits without the
    last position, ids without the first."""
    return _mean(logits[:, :-2], ids[:, 2:], _not_pad(ids[:, 2:], pad_id))


@next_token_loss.near_miss("wrong-way")
def _(logits, ids, pad_id=None):
    """Logits and ids are shifted the wrong way: each position is asked for the token before it. Drop the last logits and
    the first id."""
    return _mean(logits[:, 1:], ids[:, :-1], _not_pad(ids[:, :-1], pad_id))


@next_token_loss.near_miss("padding-counted")
def _(logits, ids, pad_id=None):
    """Padded targets are scored like words. The loss then depends on how long the longest text of the batch is. Leave
    targets equal to pad_id out of the mean."""
    return _mean(logits[:, :-1], ids[:, 1:], _not_pad(ids[:, 1:], None))


@next_token_loss.near_miss("padding-in-denominator")
def _(logits, ids, pad_id=None):
    """Padded targets are left out of the sum but still counted in the number that divides it. Divide by the number of
    real targets."""
    counted = _not_pad(ids[:, 1:], pad_id)
    return _mean(logits[:, :-1], ids[:, 1:], counted) * (counted.sum() / max(counted.numel(), 1))


@next_token_loss.near_miss("padded-inputs-dropped")
def _(logits, ids, pad_id=None):
    """A position is left out when its input is padding. What counts is its target: the first word after padding on the
    left is a target, and padding after the last word is not."""
    return _mean(logits[:, :-1], ids[:, 1:], _not_pad(ids[:, :-1], pad_id))


@next_token_loss.near_miss("pad-id-0-is-false")
def _(logits, ids, pad_id=None):
    """With pad_id=0 nothing is ignored, because `if pad_id:` is false for 0. Write `if pad_id is not None:`."""
    return _mean(logits[:, :-1], ids[:, 1:], _not_pad(ids[:, 1:], pad_id or None))


@next_token_loss.near_miss("mean-of-row-means", see="averages-of-averages")
def _(logits, ids, pad_id=None):
    """The mean is taken in each text and then over the texts, so a token of a short text weighs more. Sum over all real
    targets of the batch, and divide once."""
    counted = _not_pad(ids[:, 1:], pad_id)
    rows = zip(logits[:, :-1], ids[:, 1:], counted, strict=True)
    return torch.stack([_mean(x, t, c) for x, t, c in rows]).mean()


@next_token_loss.near_miss("nan-when-nothing-is-left")
def _(logits, ids, pad_id=None):
    """When no target is left, the mean is 0/0, which is NaN. Clamp the number of targets to at least 1: the loss is then
    0."""
    targets = ids[:, 1:].masked_fill(~_not_pad(ids[:, 1:], pad_id), -100)
    return F.cross_entropy(*_flat(logits[:, :-1], targets))


@next_token_loss.near_miss("both-have-to-be-real")
def _(logits, ids, pad_id=None):
    """A target is left out when it is padding, and also when the token before it is. What decides is the target alone: a
    real token that follows padding counts."""
    counted = _not_pad(ids[:, 1:], pad_id) & _not_pad(ids[:, :-1], pad_id)
    return _mean(logits[:, :-1], ids[:, 1:], counted)


@next_token_loss.near_miss("stops-at-the-first-padding")
def _(logits, ids, pad_id=None):
    """Everything behind the first padding is left out. Padding may stand on the left or inside: a real token that follows it
    counts."""
    counted = _not_pad(ids[:, 1:], pad_id).long().cumprod(1).bool()
    return _mean(logits[:, :-1], ids[:, 1:], counted)


@next_token_loss.near_miss("token-0-is-always-padding")
def _(logits, ids, pad_id=None):
    """Token 0 is taken for padding although no pad_id was given. None means that every target counts."""
    return _mean(logits[:, :-1], ids[:, 1:], _not_pad(ids[:, 1:], 0 if pad_id is None else pad_id))


# sequence_log_prob

sequence_log_prob = Exercise("sequence_log_prob", ref, see="text-probability")


@sequence_log_prob.group("values", share=2)
def _(g: Gen):
    """Sums the log-probability of each token but the first, one number per row."""
    quarter = g.tensor([[[0.0, 0.0, math.log(2.0)]] * 3])
    yield call(quarter, g.tensor([[0, 2, 1]])).expect(g.tensor([-math.log(8.0)])).says("1/2 times 1/4")
    for batch, seq in [(1, 4), (3, 5), (4, 2)]:
        yield call(g.randn(batch, seq, 6), g.ints(0, 6, batch, seq)).says(f"a batch of {batch}")


@sequence_log_prob.group("law and limits", share=1)
def _(g: Gen):
    """Is a probability: over all continuations it sums to 1. Long texts do not underflow."""
    table = g.randn(97, 3)
    texts = g.tensor([[1, *rest] for rest in itertools.product(range(3), repeat=3)])

    def law(s):
        """Over all continuations of three tokens."""
        log_probs = s.call("sequence_log_prob", _causal_logits(table, texts), texts)
        s.require_close(log_probs.exp().sum(), g.tensor(1.0), "the probabilities do not sum to 1", atol=1e-4)

    yield scenario(law)
    yield call(g.randn(2, 1, 5), g.ints(0, 5, 2, 1)).expect(torch.zeros(2)).says("texts of one token")
    yield call(g.randn(2, 80, 20), g.ints(0, 20, 2, 80)).says(
        "80 tokens: the probability itself is 0 in float32"
    )
    yield (
        call(g.tensor([[[0.0, 200.0], [0.0, 0.0]]]), g.tensor([[1, 0]]))
        .expect(g.tensor([-200.0]))
        .says("logits far apart")
    )


@sequence_log_prob.group("dtypes and layout", share=1)
def _(g: Gen):
    """Keeps the dtype and its precision; takes slices and transposes of other tensors."""
    for dtype in (*HALF, torch.float64):
        yield call(g.randn(2, 3, 4, dtype=dtype), g.ints(0, 4, 2, 3)).says(str(dtype))
    yield call(g.randn(5, 3, 4).transpose(0, 1), g.ints(0, 4, 5, 3).T).says(
        "arguments that are not contiguous"
    )


@sequence_log_prob.group("gradient", share=1)
def _(g: Gen):
    """Is differentiable in the logits."""
    yield call(g.randn(2, 4, 5), g.ints(0, 5, 2, 4)).gradient().says("a batch of two")
    yield call(g.randn(3, 3, 4, dtype=torch.float64), g.ints(0, 4, 3, 3)).gradient().says("float64")


def _log_probs_of_next(logits, ids):
    return ref.log_softmax(logits[:, :-1]).gather(-1, ids[:, 1:, None])[..., 0]


@sequence_log_prob.near_miss("mean-for-sum")
def _(logits, ids):
    """This is the mean log-probability per token. The chain rule multiplies the probabilities of all tokens, so their
    logarithms are summed."""
    picked = _log_probs_of_next(logits, ids)
    return picked.sum(-1) / max(picked.shape[1], 1)


@sequence_log_prob.near_miss("sums-logits", see="log-softmax")
def _(logits, ids):
    """Raw logits are summed. They are no log-probabilities: take the log-softmax of each row first."""
    picked = logits[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return picked.float().sum(-1).to(logits.dtype)


@sequence_log_prob.near_miss("includes-first-token")
def _(logits, ids):
    """Every token is looked up at its own position, the first one too. The logits at t speak of token t + 1: the first
    token is given, and the last logits have nothing to score."""
    return ref.log_softmax(logits).gather(-1, ids[..., None])[..., 0].sum(-1)


@sequence_log_prob.near_miss("sums-over-the-batch")
def _(logits, ids):
    """The sum runs over the whole batch. Each row is a text of its own: sum over the positions only."""
    return _log_probs_of_next(logits, ids).sum()


@sequence_log_prob.near_miss("sum-over-the-batch-for-each-row")
def _(logits, ids):
    """Every row gets the sum over the whole batch. Each row is a text of its own: sum over the positions only."""
    return _log_probs_of_next(logits, ids).sum().expand(len(ids))


@sequence_log_prob.near_miss("bits", see="nats-and-bits")
def _(logits, ids):
    """This is in bits: the logarithm has base 2. Log-probabilities are in nats here."""
    return _log_probs_of_next(logits, ids).sum(-1) / math.log(2)


def _seq_epsilon_inside_log(epsilon):
    def near_miss(logits, ids):
        """The probabilities are kept away from 0 before their logarithm is taken. That hides the −inf but gives a wrong value:
        every token less likely than this number counts the same. Use the stable log_softmax."""
        probs = logits[:, :-1].softmax(-1) + epsilon
        return probs.gather(-1, ids[:, 1:, None])[..., 0].log().sum(-1)

    return near_miss


for _epsilon in (1e-8, 1e-9, 1e-10, 1e-12):
    _name = f"epsilon-{_epsilon:g}-inside-log"
    sequence_log_prob.near_miss(_name, see="log-softmax")(_seq_epsilon_inside_log(_epsilon))


@sequence_log_prob.near_miss("log-of-softmax", see="log-softmax")
def _(logits, ids):
    """The softmax is computed first and its logarithm taken afterwards: a very unlikely token gives −inf. Use the stable
    log_softmax."""
    return logits[:, :-1].softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].log().sum(-1)


@sequence_log_prob.near_miss("loss-sign")
def _(logits, ids):
    """The sign is that of a loss. A log-probability is at most 0."""
    return -_log_probs_of_next(logits, ids).sum(-1)


@sequence_log_prob.near_miss("product-then-log")
def _(logits, ids):
    """The probabilities are multiplied and the logarithm is taken at the end. The product of a long text is 0 in float32.
    Add logarithms instead."""
    return _log_probs_of_next(logits, ids).exp().prod(-1).log()


@sequence_log_prob.near_miss("probability")
def _(logits, ids):
    """This is the probability itself. Its logarithm is asked for: a long text's probability is 0 in float32."""
    return _log_probs_of_next(logits, ids).sum(-1).exp()


# perplexity

perplexity = Exercise("perplexity", ref, see="perplexity")


@perplexity.group("values", share=2)
def _(g: Gen):
    """Exponentiates the mean over all tokens, whatever batches they came in."""
    yield (
        call(g.tensor([1.0, 12.0]), g.tensor([1, 3]))
        .expect(g.tensor(math.exp(13 / 4)))
        .says("13 nats over 4 tokens")
    )
    yield (
        call(math.log(50.0) * g.tensor([3.0, 5.0]), g.tensor([3, 5]))
        .expect(g.tensor(50.0))
        .says("a uniform model of 50 tokens")
    )
    yield call(g.tensor([7.0]), g.tensor([4])).expect(g.tensor(math.exp(7 / 4))).says("one batch")
    for batches in (3, 6):
        counts = g.ints(1, 40, batches)
        counts[0] = 3
        yield call(counts * (0.5 + 2 * g.rand(batches)), counts).says(f"{batches} batches of unequal size")


@perplexity.group("empty batches", share=1)
def _(g: Gen):
    """A batch without tokens changes nothing."""
    yield (
        call(g.tensor([6.0, 0.0, 2.0]), g.tensor([4, 0, 1]))
        .expect(g.tensor(math.exp(8 / 5)))
        .says("in the middle")
    )
    yield call(g.tensor([0.0, 0.0, 3.0]), g.tensor([0, 0, 2])).says("twice at the start")


@perplexity.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype of the sums and its precision."""
    for dtype in (*HALF, torch.float64):
        yield call((3 * g.rand(4) + 0.5).to(dtype), g.tensor([2, 5, 1, 4])).says(str(dtype))
    # the counts are no numbers of float16
    large = call(g.tensor([20_000.0, 20_000.0], torch.float16), g.tensor([70_000, 90_000]))
    yield large.expect(g.tensor(math.exp(0.25), torch.float16)).says("float16, large batches")


@perplexity.group("gradient", share=1)
def _(g: Gen):
    """Is differentiable in the sums."""
    yield call(5 * g.rand(3), g.tensor([2, 1, 5])).gradient().says("three batches")
    yield call(5 * g.rand(2, dtype=torch.float64), g.tensor([3, 4])).gradient().says("float64")


@perplexity.near_miss("mean-of-means", see="averages-of-averages")
def _(nll_sums, token_counts):
    """The mean is taken in each batch and then over the batches. A small batch weighs as much as a large one, and an empty
    one gives NaN. Divide the sum of all nats by the number of all tokens."""
    return (nll_sums / token_counts).mean().exp()


@perplexity.near_miss("mean-of-perplexities", see="averages-of-averages")
def _(nll_sums, token_counts):
    """The perplexities of the batches are averaged. The exponential is not linear, so this is too high. Average the nats
    over all tokens first, then exponentiate once."""
    return (nll_sums / token_counts).exp().mean()


@perplexity.near_miss("weighted-perplexities", see="averages-of-averages")
def _(nll_sums, token_counts):
    """The perplexities of the batches are averaged with their token counts as weights. The weights are right, the order is
    not: average the nats, then exponentiate once."""
    each = (nll_sums / token_counts.clamp(min=1)).exp()
    return (each * token_counts).sum() / token_counts.sum()


@perplexity.near_miss("nan-for-an-empty-batch")
def _(nll_sums, token_counts):
    """The mean of each batch is weighted by its tokens, which is right, but the mean of an empty batch is 0/0, and NaN times 0
    is NaN. Divide once: the sum of all nats by the number of all tokens."""
    return ((nll_sums / token_counts * token_counts).sum() / token_counts.sum()).exp()


@perplexity.near_miss("empty-batch-has-a-token")
def _(nll_sums, token_counts):
    """An empty batch is counted as if it had one token. It changes nothing: add the counts as they are."""
    return (nll_sums.sum() / token_counts.clamp(min=1).sum()).exp()


@perplexity.near_miss("not-exponentiated")
def _(nll_sums, token_counts):
    """This is the mean loss in nats. The perplexity is its exponential."""
    return nll_sums.sum() / token_counts.sum()


@perplexity.near_miss("base-2", see="nats-and-bits")
def _(nll_sums, token_counts):
    """2 is raised to a number of nats. The sums are in nats, so the base is e; 2 belongs to bits."""
    return 2 ** (nll_sums.sum() / token_counts.sum())


@perplexity.near_miss("divides-by-batches")
def _(nll_sums, token_counts):
    """The sum is divided by the number of batches. The mean is per token: divide by the number of all tokens."""
    return nll_sums.mean().exp()


# bits_per_byte

bits_per_byte = Exercise("bits_per_byte", ref, see="bits-per-byte")


@bits_per_byte.group("ASCII", share=1)
def _(g: Gen):
    """Turns nats into bits and divides by the number of bytes."""
    yield call(g.tensor(8 * math.log(2.0)), "aorta").expect(g.tensor(8 / 5)).says("8 bits over 5 bytes")
    yield call(9 * g.rand() + 2, "Marfan syndrome affects the aorta.").says("a sentence")
    yield call(9 * g.rand() + 2, "  a tall stature\n\n").says("spaces and line ends are bytes")
    yield call(g.rand() + 2, " ").says("a text that is one space")


@bits_per_byte.group("other characters", share=1)
def _(g: Gen):
    """Counts UTF-8 bytes, of which a character has one to four."""
    yield (
        call(g.tensor(16 * math.log(2.0)), "α 🧬\n").expect(g.tensor(2.0)).says("Greek and an emoji: 8 bytes")
    )
    yield call(9 * g.rand() + 2, "Sjögren, β-thalassaemia, 肝臓").says("accents, Greek, Chinese")
    yield call(9 * g.rand() + 2, "Ménière").says("an accent as a character of its own")
    eight = call(g.tensor(16 * math.log(2.0)), " ab\r\ncd ").expect(g.tensor(2.0))
    yield eight.says("spaces at the ends and a line end of two characters")


@bits_per_byte.group("dtypes and gradient", share=1)
def _(g: Gen):
    """Keeps the dtype and the gradient."""
    for dtype in (*HALF, torch.float64):
        yield call(5 * g.rand(dtype=dtype) + 2, "cell").says(str(dtype))
    yield call(5 * g.rand() + 2, "μ-cell").gradient().says("the gradient")


@bits_per_byte.group("errors", share=1)
def _(g: Gen):
    """Refuses an empty text."""
    yield call(g.tensor(0.0), "").raises(ValueError).says("no text, no loss")
    yield call(g.tensor(3.0), "").raises(ValueError).says("no text")


def _needs_text(text):
    if not text:
        raise ValueError("bits_per_byte needs a text, got an empty one")


@bits_per_byte.near_miss("over-characters")
def _(nll_sum, text):
    """The division is by characters. A Greek letter has two bytes and an emoji four: divide by len(text.encode("utf-8"))."""
    _needs_text(text)
    return nll_sum / math.log(2) / len(text)


@bits_per_byte.near_miss("over-words")
def _(nll_sum, text):
    """The division is by words, or by tokens. Their number depends on the tokenizer; the number of bytes does not."""
    _needs_text(text)
    return nll_sum / math.log(2) / max(len(text.split()), 1)


@bits_per_byte.near_miss("nats-per-byte", see="nats-and-bits")
def _(nll_sum, text):
    """This is in nats. A bit is ln 2 ≈ 0.69 nats: divide by ln 2."""
    _needs_text(text)
    return nll_sum / len(text.encode())


@bits_per_byte.near_miss("multiplied-by-ln-2", see="nats-and-bits")
def _(nll_sum, text):
    """The nats are multiplied by ln 2. A nat is more than a bit (1.44 of them), so the number grows: divide by ln 2."""
    _needs_text(text)
    return nll_sum * math.log(2) / len(text.encode())


@bits_per_byte.near_miss("sixteen-bit-characters")
def _(nll_sum, text):
    """The bytes are those of UTF-16, where a letter has two. Texts are stored and compared in UTF-8."""
    _needs_text(text)
    return nll_sum / math.log(2) / len(text.encode("utf-16-le"))


@bits_per_byte.near_miss("white-space-not-counted")
def _(nll_sum, text):
    """White space at the ends is cut off before the bytes are counted. The model has scored it: spaces and line ends are bytes
    of the text like any other."""
    _needs_text(text)
    return nll_sum / math.log(2) / max(len(text.strip().encode()), 1)


@bits_per_byte.near_miss("white-space-refused")
def _(nll_sum, text):
    """A text of white space alone is refused as if it were empty. A space is a byte: only a text without any byte is an
    error."""
    _needs_text(text.strip())
    return nll_sum / math.log(2) / len(text.encode())


@bits_per_byte.near_miss("line-ends-not-counted")
def _(nll_sum, text):
    """Line ends are left out of the count. The model has scored them: they are bytes of the text like any other."""
    _needs_text(text)
    return nll_sum / math.log(2) / max(len("".join(text.splitlines()).encode()), 1)


def _empty_text_accepted(answer):
    def near_miss(nll_sum, text):
        """An empty text has no bytes, so there is no number of bits per byte. Raise a ValueError that says so, instead of
        returning inf, NaN or 0."""
        return answer(nll_sum) if not text else nll_sum / (math.log(2) * len(text.encode()))

    return near_miss


bits_per_byte.near_miss("empty-text-accepted")(_empty_text_accepted(lambda nll_sum: nll_sum / 0.0))
bits_per_byte.near_miss("empty-text-is-0")(_empty_text_accepted(lambda nll_sum: nll_sum * 0))
bits_per_byte.near_miss("empty-text-has-a-byte")(_empty_text_accepted(lambda nll_sum: nll_sum / math.log(2)))


# cross_entropy_gradient

cross_entropy_gradient = Exercise("cross_entropy_gradient", ref, see="loss-gradient")


@cross_entropy_gradient.group("values", share=2)
def _(g: Gen):
    """Is (softmax − one-hot)/n."""
    yield (
        call(g.tensor([[0.0, 0.0, math.log(2.0)], [0.0, 0.0, 0.0]]), g.tensor([2, 0]))
        .expect(g.tensor([[0.125, 0.125, -0.25], [-1 / 3, 1 / 6, 1 / 6]]))
        .says("two rows by hand")
    )
    for n, vocab in [(1, 5), (6, 4), (4, 4)]:
        logits, targets = g.randn(n, vocab), g.ints(0, vocab, n)
        leaf = logits.clone().requires_grad_()
        want = torch.autograd.grad(F.cross_entropy(leaf, targets), leaf)[0]
        yield call(logits, targets).expect(want).says(f"{n} rows, {vocab} tokens")
    yield call(g.randn(4, 4), g.tensor([1, 1, 3, 1])).says("the same target several times")
    yield (
        call(g.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]]), g.tensor([1, 2]))
        .close(atol=1e-3)
        .says("logits of ±10,000")
    )


@cross_entropy_gradient.group("without autograd", share=1)
def _(g: Gen):
    """Works under torch.no_grad()."""
    yield call(g.randn(3, 5), g.ints(0, 5, 3)).no_grad().says("float32")
    yield call(g.randn(2, 4, dtype=torch.float64), g.ints(0, 4, 2)).no_grad().says("float64")


@cross_entropy_gradient.group("dtypes and layout", share=1)
def _(g: Gen):
    """Keeps the dtype and its precision; takes slices and transposes of other tensors."""
    for dtype in (*HALF, torch.float64):
        yield call(g.randn(3, 4, dtype=dtype), g.ints(0, 4, 3)).says(str(dtype))
    yield call(g.randn(5, 3).T, g.ints(0, 5, 3)).says("logits that are not contiguous")


@cross_entropy_gradient.group("second derivative", share=1)
def _(g: Gen):
    """The result can itself be differentiated in the logits."""
    yield call(g.randn(3, 4), g.ints(0, 4, 3)).gradient().says("float32")
    yield call(g.randn(2, 5, dtype=torch.float64), g.ints(0, 5, 2)).gradient().says("float64")


def _one_hot(logits, targets):
    return F.one_hot(targets, logits.shape[-1]).to(logits.dtype)


@cross_entropy_gradient.near_miss("missing-1-over-n")
def _(logits, targets):
    """This is the gradient of the summed loss. The loss is a mean over n rows, so each row's share is divided by n."""
    return logits.softmax(-1) - _one_hot(logits, targets)


@cross_entropy_gradient.near_miss("sign")
def _(logits, targets):
    """The sign is turned round: this points downhill. The gradient is softmax − one-hot; it is negative at the target,
    because a larger logit there makes the loss smaller."""
    return (_one_hot(logits, targets) - logits.softmax(-1)) / len(targets)


@cross_entropy_gradient.near_miss("one-hot-forgotten")
def _(logits, targets):
    """The one-hot of the target is missing: every logit is pushed down, the right one too. Subtract 1 from the
    probability of the target."""
    return logits.softmax(-1) / len(targets)


@cross_entropy_gradient.near_miss("divided-by-all-entries")
def _(logits, targets):
    """The division is by n · vocab. The loss is a mean over the n rows alone: divide by n."""
    return (logits.softmax(-1) - _one_hot(logits, targets)) / logits.numel()


@cross_entropy_gradient.near_miss("needs-autograd")
def _(logits, targets):
    """Autograd is asked for the gradient, and torch.no_grad() has switched it off. The closed form needs no graph:
    (softmax − one-hot)/n."""
    leaf = logits.detach().clone().requires_grad_()
    F.cross_entropy(leaf, targets).backward()
    return leaf.grad


@cross_entropy_gradient.near_miss("detached")
def _(logits, targets):
    """The values are right, but the result is cut off from the logits, so it cannot be differentiated again. Compute it from
    the logits themselves, without detach and without a graph of its own."""
    return (logits.detach().softmax(-1) - _one_hot(logits, targets)) / len(targets)


@cross_entropy_gradient.near_miss("needs-grad-mode")
def _(logits, targets):
    """Autograd is asked for the gradient, which it can differentiate again, but torch.no_grad() switches it off. The closed
    form needs no graph: (softmax − one-hot)/n."""
    leaf = logits if logits.requires_grad else logits.detach().clone().requires_grad_()
    return torch.autograd.grad(F.cross_entropy(leaf, targets), leaf, create_graph=True)[0]


@cross_entropy_gradient.near_miss("raw-exponential", see="log-softmax")
def _(logits, targets):
    """The softmax is written as exp(x)/Σ exp(x), and exp overflows above 88 in float32. Subtract the largest logit of each row
    first: it cancels."""
    exponentials = logits.exp()
    probs = exponentials / exponentials.sum(-1, keepdim=True)
    return (probs - _one_hot(logits, targets)) / len(targets)


@cross_entropy_gradient.near_miss("softmax-over-the-rows")
def _(logits, targets):
    """The softmax runs down the rows. Each row is one prediction: normalise over the vocabulary, the last axis."""
    return (logits.softmax(0) - _one_hot(logits, targets)) / len(targets)


@cross_entropy_gradient.near_miss("log-probabilities")
def _(logits, targets):
    """Log-probabilities stand where the probabilities belong. The gradient is softmax − one-hot, without a logarithm."""
    return (logits.log_softmax(-1) - _one_hot(logits, targets)) / len(targets)


@cross_entropy_gradient.near_miss("every-target-in-every-row")
def _(logits, targets):
    """1 is subtracted at the targets of all rows in every row: `probs[:, targets]` takes whole columns. Pair each row with its
    own target: `probs[arange(n), targets]`, or subtract a one-hot tensor."""
    columns = _one_hot(logits, targets).amax(0)
    return (logits.softmax(-1) - columns) / len(targets)


@cross_entropy_gradient.near_miss("softmax-changed-in-place")
def _(logits, targets):
    """1 is subtracted inside the softmax's own output. Autograd needs that output to differentiate, so the result cannot be
    differentiated again. Subtract a one-hot tensor, or clone first."""
    probs = logits.softmax(-1)
    probs[torch.arange(len(targets)), targets] -= 1
    return probs / len(targets)


# free running and teacher forcing

free_running_predictions = Exercise(
    "free_running_predictions",
    ref,
    see="free-running",
    functions=("free_running_predictions", "teacher_forced_predictions"),
)


def _causal_logits(table: Tensor, ids: Tensor) -> Tensor:
    """Logits that depend on the position and on every token so far: a look-up by a running sum."""
    position = torch.arange(ids.shape[1])
    state = ((ids + 1) * (3 * position + 1)).cumsum(dim=1) + 7 * position
    return table[state % len(table)]


def _causal_model(g: Gen, vocab: int, dtype: torch.dtype = torch.float32):
    table = g.randn(97, vocab, dtype=dtype)
    return served(lambda ids: _causal_logits(table, ids))


@free_running_predictions.group("teacher forcing", share=2)
def _(g: Gen):
    """Teacher forcing: the arg-max after the true tokens up to each position."""
    for batch, seq in [(1, 5), (3, 6)]:
        case = call(_causal_model(g, 6), g.ints(0, 6, batch, seq)).of("teacher_forced_predictions")
        yield case.says(f"a batch of {batch}")
    yield (
        call(_causal_model(g, 4), g.ints(0, 4, 4, 4))
        .of("teacher_forced_predictions")
        .says("as many rows as tokens")
    )


@free_running_predictions.group("free running", share=3)
def _(g: Gen):
    """Free running: behind the prompt, each input is the model's own last prediction."""
    for batch, seq, prompt in [(1, 7, 2), (3, 8, 3), (4, 6, 1), (2, 5, 4)]:
        yield call(_causal_model(g, 6), g.ints(0, 6, batch, seq), prompt).says(
            f"a batch of {batch}, {prompt} of {seq} tokens given"
        )


@free_running_predictions.group("limits and ties", share=1)
def _(g: Gen):
    """With the whole text as prompt it is teacher forcing; ties go to the lower id."""
    yield call(_causal_model(g, 6), g.ints(0, 6, 2, 5), 5).says("the whole text is the prompt")
    yield call(_causal_model(g, 6), g.ints(0, 6, 2, 1), 1).says("texts of one token")
    coarse = g.ints(0, 2, 97, 5).float()
    model = served(lambda ids: _causal_logits(coarse, ids))
    yield call(model, g.ints(0, 5, 3, 6)).of("teacher_forced_predictions").says("ties, teacher forcing")
    yield call(model, g.ints(0, 5, 3, 6), 2).says("ties, free running")
    yield call(_causal_model(g, 4, torch.bfloat16), g.ints(0, 4, 2, 5), 2).says("a model in bfloat16")
    yield call(_causal_model(g, 5), g.ints(0, 5, 6, 2).T, prompt_length=2).says("ids that are not contiguous")


def _run_free(model, ids, prompt_length, last_only=False, given=None):
    """Free running by hand: the inputs and the predictions."""
    inputs = ids[:, : prompt_length if given is None else given].clone()
    predictions = model(inputs).argmax(-1)
    while predictions.shape[1] < ids.shape[1]:
        newest = predictions[:, -1:]
        inputs = torch.cat([inputs, newest], 1)
        logits = model(newest if last_only else inputs)
        predictions = torch.cat([predictions, logits[:, -1:].argmax(-1)], 1)
    return inputs, predictions


@free_running_predictions.near_miss("teacher-forcing-in-the-loop")
def _(model, ids, prompt_length):
    """The true tokens are fed behind the prompt, too: this is teacher forcing. When a model writes there is no truth to
    feed: append its own prediction."""
    return model(ids).argmax(-1)


@free_running_predictions.near_miss("inputs-returned")
def _(model, ids, prompt_length):
    """This is the text that the model has read: the prompt and its continuation. Entry t should be the prediction made after
    reading up to t, so everything moves one place to the left."""
    return _run_free(model, ids, prompt_length)[0]


@free_running_predictions.near_miss("feeds-only-the-last-token")
def _(model, ids, prompt_length):
    """Behind the prompt the model sees only its last prediction and has forgotten the rest. Feed everything up to t: the
    prompt and all predictions so far."""
    return _run_free(model, ids, prompt_length, last_only=True)[1]


@free_running_predictions.near_miss("prompt-one-too-long")
def _(model, ids, prompt_length):
    """One true token too many is read: the input at t = prompt_length is still taken from ids. It is the model's first own
    prediction, entry prompt_length − 1."""
    return _run_free(model, ids, prompt_length, given=min(prompt_length + 1, ids.shape[1]))[1]


@free_running_predictions.near_miss("prompt-one-too-short")
def _(model, ids, prompt_length):
    """The last token of the prompt is not read: the model's own prediction stands in its place. The first `prompt_length`
    inputs are true tokens."""
    return _run_free(model, ids, prompt_length, given=max(prompt_length - 1, 1))[1]


@free_running_predictions.near_miss("prompt-ignored")
def _(model, ids, prompt_length):
    """Only the first token is read, whatever prompt_length says. The first `prompt_length` inputs are true tokens."""
    return _run_free(model, ids, prompt_length, given=1)[1]


@free_running_predictions.near_miss("true-tokens-in-the-prompt")
def _(model, ids, prompt_length):
    """Inside the prompt the true next tokens are returned. Every entry is a prediction, those inside the prompt too."""
    predictions = _run_free(model, ids, prompt_length)[1]
    return torch.cat([ids[:, 1:prompt_length], predictions[:, prompt_length - 1 :]], 1)


@free_running_predictions.near_miss("last-entry-missing")
def _(model, ids, prompt_length):
    """The prediction after the last input is missing. There is an entry for every position: (batch, seq)."""
    return _run_free(model, ids, prompt_length)[1][:, :-1]


@free_running_predictions.near_miss("one-row-for-all")
def _(model, ids, prompt_length):
    """The prediction of the first row is fed to every row. Each row goes on with its own."""
    inputs = ids[:, :prompt_length]
    while inputs.shape[1] < ids.shape[1]:
        inputs = torch.cat([inputs, model(inputs)[:1, -1:].argmax(-1).expand(len(ids), 1)], 1)
    return model(inputs).argmax(-1)


@free_running_predictions.near_miss("guesses-of-one-pass-fed")
def _(model, ids, prompt_length):
    """The predictions of one teacher-forced pass are fed all at once. They were made from true tokens: predict one token,
    append it, and predict the next from that."""
    inputs = torch.cat([ids[:, :prompt_length], model(ids).argmax(-1)[:, prompt_length - 1 : -1]], 1)
    return model(inputs).argmax(-1)


def _last_arg_max(logits):
    return logits.shape[-1] - 1 - logits.flip(-1).argmax(-1)


def _free_with_last_arg_max(model, ids, prompt_length):
    """Ties go to the higher token id. `argmax` takes the lower one; `topk`, `sort` and `==` with the maximum do not promise
    that."""
    inputs = ids[:, :prompt_length]
    while inputs.shape[1] < ids.shape[1]:
        inputs = torch.cat([inputs, _last_arg_max(model(inputs)[:, -1:])], 1)
    return _last_arg_max(model(inputs))


free_running_predictions.near_miss("ties-to-the-higher-id")(_free_with_last_arg_max)
free_running_predictions.near_misses[-1].names["teacher_forced_predictions"] = lambda model, ids: (
    _last_arg_max(model(ids))
)


@free_running_predictions.near_miss("errors-mended")
def _(model, ids, prompt_length):
    """Each prediction is made from the true tokens and one prediction at the end. The earlier predictions have to stay in
    the input: mistakes pile up, and that is the point."""
    forced = model(ids).argmax(-1)
    columns = [forced[:, :prompt_length]]
    for t in range(prompt_length, ids.shape[1]):
        inputs = torch.cat([ids[:, :t], columns[-1][:, -1:]], 1)
        columns.append(model(inputs)[:, -1:].argmax(-1))
    return torch.cat(columns, 1)


@free_running_predictions.near_miss(
    "teacher-forcing-shortened", of="teacher_forced_predictions", see="teacher-forcing"
)
def _(model, ids):
    """The last token is not fed, so its prediction is missing. Every position gets an entry, the last one too: it
    guesses a token that is not there yet."""
    return model(ids[:, :-1]).argmax(-1)


@free_running_predictions.near_miss(
    "true-tokens-returned", of="teacher_forced_predictions", see="teacher-forcing"
)
def _(model, ids):
    """These are the true tokens, moved by one. Teacher forcing feeds the true tokens; what is asked for is what the model
    predicts after them."""
    return torch.cat([ids[:, 1:], model(ids)[:, -1:].argmax(-1)], 1)


@free_running_predictions.near_miss(
    "entry-t-guesses-token-t", of="teacher_forced_predictions", see="teacher-forcing"
)
def _(model, ids):
    """Everything stands one place too far to the right: entry t is the guess at token t. Entry t is what the model predicts
    after it has read token t, its guess at token t + 1."""
    return torch.cat([ids[:, :1], model(ids)[:, :-1].argmax(-1)], 1)


@free_running_predictions.near_miss(
    "one-token-at-a-time", of="teacher_forced_predictions", see="teacher-forcing"
)
def _(model, ids):
    """Each token goes to the model alone, so it has forgotten what came before. Hand over the whole text: one causal pass
    predicts after every position."""
    return torch.cat([model(ids[:, t : t + 1]).argmax(-1) for t in range(ids.shape[1])], 1)


@free_running_predictions.near_miss("scores-returned", of="teacher_forced_predictions", see="teacher-forcing")
def _(model, ids):
    """These are the largest logits, not the tokens that have them. The arg-max is the token's id."""
    return model(ids).max(-1).values


# sliding_window_nll

sliding_window_nll = Exercise("sliding_window_nll", ref, see="long-texts")


def _pair(value, model, ids, window, stride):
    """A sum as a number or 0-d tensor of any float type, and a whole number of tokens."""
    want, count = ref.sliding_window_nll(model.function, ids, window, stride)
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return "the result should be a pair: the sum and the number of tokens"
    got, tokens = value
    for part, name in ((got, "sum"), (tokens, "number of tokens")):
        if isinstance(part, Tensor) and part.dim() > 0:
            return f"the {name} should be one number"
        if not isinstance(part, (Tensor, int, float)) or isinstance(part, bool):
            return f"the {name} should be a number"
    if float(tokens) != count:
        return "the number of tokens is wrong"
    if not abs(float(got) - float(want)) <= 1e-4 * (1 + abs(float(want))):
        return "the sum is wrong"
    return None


@sliding_window_nll.group("values", share=2)
def _(g: Gen):
    """Scores each token but the first once, in the first window that can."""
    for n, window, stride in [(13, 5, 2), (12, 4, 1), (17, 6, 4), (14, 7, 6)]:
        case = call(_causal_model(g, 6), g.ints(0, 6, 1, n), window, stride).judge(_pair)
        yield case.says(f"{n} tokens, windows of {window}, stride {stride}")


@sliding_window_nll.group("last window", share=1)
def _(g: Gen):
    """Moves the last window back so that it is full, wherever the text ends."""
    for n, window, stride in [(11, 4, 3), (12, 4, 3), (9, 8, 3), (13, 4, 3), (10, 6, 5), (11, 6, 5)]:
        case = call(_causal_model(g, 5), g.ints(0, 5, 1, n), window, stride).judge(_pair)
        yield case.says(f"{n} tokens, windows of {window}, stride {stride}")
    case = call(_causal_model(g, 5, torch.float64), g.ints(0, 5, 1, 10), window=3, stride=2)
    yield case.judge(lambda value, model, ids: _pair(value, model, ids, 3, 2)).says("a model in float64")


@sliding_window_nll.group("short texts", share=1)
def _(g: Gen):
    """Takes a text that fits into one window as a whole."""
    for n, window, stride in [(6, 6, 2), (4, 9, 3), (2, 5, 1), (2, 2, 1), (3, 2, 1)]:
        case = call(_causal_model(g, 5), g.ints(0, 5, 1, n), window, stride).judge(_pair)
        yield case.says(f"{n} tokens, windows of {window}, stride {stride}")


@sliding_window_nll.group("errors", share=1)
def _(g: Gen):
    """Refuses a stride that is not below the window."""
    for n, window, stride in [(12, 4, 4), (12, 4, 5), (12, 3, 8), (3, 6, 6), (4, 4, 7), (5, 1, 1)]:
        yield (
            call(_causal_model(g, 4), g.ints(0, 4, 1, n), window, stride)
            .raises(ValueError)
            .says(f"{n} tokens, window {window}, stride {stride}")
        )


def _window_starts(n, window, stride):
    return [*range(0, n - window, stride), max(0, n - window)]


def _check_stride(window, stride):
    if stride >= window:
        raise ValueError(f"sliding_window_nll needs stride < window, got window={window}, stride={stride}")


def _sliding_near_miss(name, windows):
    """Adds a near-miss in two variants: it counts n − 1 tokens, or those that it scores."""

    def as_stated(model, ids, window, stride):
        _check_stride(window, stride)
        return windows(model, ids, window, stride)[0], ids.shape[1] - 1

    def as_scored(model, ids, window, stride):
        _check_stride(window, stride)
        return windows(model, ids, window, stride)

    as_stated.__doc__ = as_scored.__doc__ = windows.__doc__
    sliding_window_nll.near_miss(name)(as_stated)
    sliding_window_nll.near_miss(f"{name}-and-counted")(as_scored)


def _windows(model, ids, window, stride, first, starts=None):
    """Sums over windows; `first(start, scored)` is the first token that a window scores."""
    n, total, scored, tokens = ids.shape[1], 0.0, 1, 0
    for start in _window_starts(n, window, stride) if starts is None else starts:
        part = ids[:, start : start + window]
        log_probs = ref.log_softmax(model(part)[:, :-1]).gather(-1, part[:, 1:, None])[0, :, 0]
        begin = first(start, scored) - start - 1
        total = total - log_probs[begin:].sum()
        tokens += len(log_probs[begin:])
        scored = start + part.shape[1]
    return total, tokens


def _scored_twice(model, ids, window, stride):
    """Every window scores all its targets, so tokens where two windows overlap count twice. A window scores only the tokens
    that no earlier window has scored; the others are context."""
    return _windows(model, ids, window, stride, lambda start, scored: start + 1)


_sliding_near_miss("scored-twice", _scored_twice)


def _first_tokens_lost(model, ids, window, stride):
    """Every window scores only its last `stride` tokens, the first window too, so the tokens before those are never scored.
    The first window has no earlier one: it scores all its targets."""
    length = min(window, ids.shape[1])
    return _windows(model, ids, window, stride, lambda start, scored: max(scored, start + length - stride))


_sliding_near_miss("first-tokens-lost", _first_tokens_lost)


@sliding_window_nll.near_miss("whole-text-at-once")
def _(model, ids, window, stride):
    """The whole text goes to the model at once. The model reads at most `window` tokens: give it one window at a time."""
    _check_stride(window, stride)
    return _windows(model, ids, ids.shape[1], 1, lambda start, scored: scored)


@sliding_window_nll.near_miss("counts-n-tokens")
def _(model, ids, window, stride):
    """The count is n. The first token is given and not predicted, so n − 1 tokens are scored."""
    _check_stride(window, stride)
    return _windows(model, ids, window, stride, lambda start, scored: scored)[0], ids.shape[1]


def _tail_dropped(model, ids, window, stride):
    """The windows stop at the last full one on the stride's grid, and the tokens behind it are never scored. Let the last
    window start at n − window."""
    starts = [0, *range(stride, ids.shape[1] - window + 1, stride)]
    return _windows(model, ids, window, stride, lambda start, scored: scored, starts)


_sliding_near_miss("tail-dropped", _tail_dropped)


@sliding_window_nll.near_miss("last-window-cut-short")
def _(model, ids, window, stride):
    """The last window starts on the stride's grid and is cut off by the end of the text, so its tokens have less context
    than they could. Let it start at n − window."""
    _check_stride(window, stride)
    starts = [0, *range(stride, ids.shape[1] - window + stride, stride)]
    return _windows(model, ids, window, stride, lambda start, scored: scored, starts)[0], ids.shape[1] - 1


def _boundaries_lost(model, ids, window, stride):
    """The text is cut into windows that do not overlap. The first token of each has no prediction and is lost, and the stride
    is not used. Start a window every `stride` tokens."""
    starts = range(0, ids.shape[1], window)
    return _windows(model, ids, window, stride, lambda start, scored: start + 1, starts)


_sliding_near_miss("boundaries-lost", _boundaries_lost)


@sliding_window_nll.near_miss("mean-for-sum", see="averages-of-averages")
def _(model, ids, window, stride):
    """The first number is a mean. The sum is asked for: sums and counts of several texts can be added, means cannot."""
    _check_stride(window, stride)
    total, tokens = _windows(model, ids, window, stride, lambda start, scored: scored)
    return total / max(tokens, 1), ids.shape[1] - 1


@sliding_window_nll.near_miss("gaps-accepted")
def _(model, ids, window, stride):
    """With a stride of at least the window, the first token of a later window is never scored, and the answer does not say so.
    Raise a ValueError unless stride < window."""
    total, _ = _windows(model, ids, window, stride, lambda start, scored: max(scored, start + 1))
    return total, ids.shape[1] - 1


@sliding_window_nll.near_miss("stride-equal-to-window-accepted")
def _(model, ids, window, stride):
    """A stride equal to the window is accepted. Each window's first token is then never scored, but for the first: raise a
    ValueError unless stride < window."""
    if stride > window:
        raise ValueError(f"sliding_window_nll needs stride < window, got window={window}, stride={stride}")
    total, _ = _windows(model, ids, window, stride, lambda start, scored: max(scored, start + 1))
    return total, ids.shape[1] - 1


@sliding_window_nll.near_miss("checked-for-long-texts-only")
def _(model, ids, window, stride):
    """The stride is checked only when the text needs more than one window. Arguments that make no sense are refused whatever the
    text: raise the ValueError first."""
    if ids.shape[1] > window:
        _check_stride(window, stride)
    total, _ = _windows(model, ids, window, stride, lambda start, scored: max(scored, start + 1))
    return total, ids.shape[1] - 1


@sliding_window_nll.near_miss("windows-one-token-longer")
def _(model, ids, window, stride):
    """`window` targets are scored at once, so that a window has window + 1 tokens. A window has `window` tokens, and its targets
    are its tokens but the first."""
    _check_stride(window, stride)
    return _windows(model, ids, window + 1, stride, lambda start, scored: scored)[0], ids.shape[1] - 1


# chunked_cross_entropy

chunked_cross_entropy = Exercise("chunked_cross_entropy", ref, see="chunked-loss")


def _chunked_arguments(g: Gen, n: int, d_hidden: int, vocab: int, dtype: torch.dtype = torch.float32):
    w_vocab = (g.randn(d_hidden, vocab, dtype=torch.float64) / math.sqrt(d_hidden)).to(dtype)
    return g.randn(n, d_hidden, dtype=dtype), w_vocab, g.ints(0, vocab, n)


@chunked_cross_entropy.group("values", share=2)
def _(g: Gen):
    """Equals the mean loss of all rows, whatever the chunk."""
    for n, chunk in [(12, 4), (10, 4), (7, 1), (5, 5), (5, 64), (1, 3), (13, 12)]:
        hidden, w_vocab, targets = _chunked_arguments(g, n, 6, 9)
        want = F.cross_entropy(hidden @ w_vocab, targets)
        yield call(hidden, w_vocab, targets, chunk).expect(want).says(f"{n} rows in chunks of {chunk}")
    yield (
        call(200 * g.randn(6, 4), g.randn(4, 7), g.ints(0, 7, 6), 4).close(atol=1e-3).says("logits far apart")
    )


@chunked_cross_entropy.group("gradient", share=2)
def _(g: Gen):
    """Has the gradients of the full loss, in the hidden states and in the projection."""
    for n, chunk in [(8, 4), (10, 4), (5, 8), (5, 1)]:
        yield call(*_chunked_arguments(g, n, 6, 9), chunk).gradient().says(f"{n} rows in chunks of {chunk}")
    yield call(*_chunked_arguments(g, 7, 4, 5, torch.float64), 3).gradient().says("float64")


@chunked_cross_entropy.group("dtypes and layout", share=1)
def _(g: Gen):
    """Keeps the dtype and its precision; takes slices and transposes of other tensors."""
    for dtype in (*HALF, torch.float64):
        yield call(*_chunked_arguments(g, 7, 4, 5, dtype), 3).says(str(dtype))
    yield (
        call(*_chunked_arguments(g, 6, 4, 5, torch.bfloat16), 4).gradient().says("the gradients in bfloat16")
    )
    hidden, w_vocab, targets = _chunked_arguments(g, 8, 5, 7)
    yield call(hidden.T.contiguous().T, w_vocab.T.contiguous().T, targets, chunk=3).says(
        "arguments that are not contiguous"
    )


@chunked_cross_entropy.group("memory", share=3)
def _(g: Gen):
    """Never holds (n, vocab) logits: not in one tensor, not in pieces, not saved for backward."""
    n, d_hidden, vocab = 128, 4, 64
    hidden, w_vocab, targets = _chunked_arguments(g, n, d_hidden, vocab)
    want = F.cross_entropy(hidden @ w_vocab, targets)

    def forward_and_backward(s):
        """128 rows, 64 tokens, chunks of 8, with backward."""
        m = s.measure("chunked_cross_entropy", hidden, w_vocab, targets, 8, backward=True)
        s.require_close(m.value, want, "the loss is wrong")
        s.require(m.largest < n * vocab, "one tensor holds the logits of all rows")
        s.require(m.saved < n * vocab, "the chunks together keep (n, vocab) numbers for backward")
        s.require(m.held < n * vocab, "the chunks together hold (n, vocab) numbers")

    def follows_the_chunk(s):
        """The same in chunks of 4 and of 16."""
        at_once = {}
        for chunk in (4, 16):
            # the steps may not depend on the answer: each is compared with the reference's at the same place
            m = s.measure("chunked_cross_entropy", hidden, w_vocab, targets, chunk, backward=True)
            s.require(
                m.largest <= max(2 * chunk * vocab, n * d_hidden), "more than `chunk` rows are held at once"
            )
            at_once[chunk] = m
        s.require(at_once[16].held < n * vocab, "the chunks together hold (n, vocab) numbers")
        if (
            at_once[16].largest < 16 * vocab
        ):  # row by row inside a chunk, perhaps: then backward holds a chunk
            more = at_once[16].held - at_once[4].held
            s.require(more >= 4 * vocab, "fewer than `chunk` rows are computed at once, whatever `chunk` is")

    yield scenario(forward_and_backward)
    yield scenario(follows_the_chunk)


@chunked_cross_entropy.near_miss("mean-of-chunk-means", see="averages-of-averages")
def _(hidden, w_vocab, targets, chunk):
    """The mean is taken in each chunk and then over the chunks. A last chunk that is shorter then weighs too much. Add the sums
    of the chunks, and divide once by n."""
    pairs = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    return torch.stack([ref.chunked_cross_entropy(h, w_vocab, t, chunk) for h, t in pairs]).mean()


@chunked_cross_entropy.near_miss("plain-loop")
def _(hidden, w_vocab, targets, chunk):
    """The loop makes one chunk at a time, but autograd keeps each chunk's logits until backward, so together they are
    (n, vocab) again. Compute a chunk again in backward: torch.utils.checkpoint, or an autograd.Function of your own."""
    pairs = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    return sum(F.cross_entropy(h @ w_vocab, t, reduction="sum") for h, t in pairs) / len(targets)


@chunked_cross_entropy.near_miss("all-at-once")
def _(hidden, w_vocab, targets, chunk):
    """All logits are computed at once: the (n, vocab) tensor is what this function must avoid. Multiply `chunk` rows at a
    time."""
    return F.cross_entropy(hidden @ w_vocab, targets)


def _sum_of_rows(hidden, w_vocab, targets):
    return F.cross_entropy(hidden @ w_vocab, targets, reduction="sum")


def _checkpointed(hidden, w_vocab, targets):
    return torch.utils.checkpoint.checkpoint(_sum_of_rows, hidden, w_vocab, targets, use_reentrant=False)


@chunked_cross_entropy.near_miss("number-of-chunks")
def _(hidden, w_vocab, targets, chunk):
    """`chunk` is taken as the number of pieces, as in torch.chunk. It is the number of rows in a piece, as in
    torch.split: with more rows there are more pieces, not larger ones."""
    pairs = zip(hidden.chunk(chunk), targets.chunk(chunk), strict=True)
    return sum(_checkpointed(h, w_vocab, t) for h, t in pairs) / len(targets)


@chunked_cross_entropy.near_miss("divided-by-full-chunks", see="averages-of-averages")
def _(hidden, w_vocab, targets, chunk):
    """The sum is divided by chunk times the number of chunks. The last chunk may be shorter: divide by n, the number of
    rows."""
    total = sum(
        _checkpointed(h, w_vocab, t) for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    )
    return total / (chunk * math.ceil(len(targets) / chunk))


@chunked_cross_entropy.near_miss("sum-for-mean")
def _(hidden, w_vocab, targets, chunk):
    """This is the sum over the rows. The mean is asked for: divide once by n."""
    return sum(
        _checkpointed(h, w_vocab, t) for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    )


@chunked_cross_entropy.near_miss("late-binding")
def _(hidden, w_vocab, targets, chunk):
    """The loss is right and the gradients are not: the function that is checkpointed reads the loop's variable, and when backward
    calls it again the loop has ended, so every chunk becomes the last one. Hand the chunk over as an argument."""
    total = 0
    for start in range(0, len(targets), chunk):

        def part():
            rows = slice(start, start + chunk)  # noqa: B023
            return _sum_of_rows(hidden[rows], w_vocab, targets[rows])

        total = total + torch.utils.checkpoint.checkpoint(part, use_reentrant=False)
    return total / len(targets)


@chunked_cross_entropy.near_miss("projection-detached")
def _(hidden, w_vocab, targets, chunk):
    """No gradient reaches the projection. It is learned like everything else: hand w_vocab over as it is, and return its
    gradient from a backward of your own."""
    return ref.chunked_cross_entropy(hidden, w_vocab.detach(), targets, chunk)


@chunked_cross_entropy.near_miss("hidden-detached")
def _(hidden, w_vocab, targets, chunk):
    """No gradient reaches the hidden states, so nothing below the projection learns. Hand them over as they are, and return
    their gradient from a backward of your own."""
    return ref.chunked_cross_entropy(hidden.detach(), w_vocab, targets, chunk)


@chunked_cross_entropy.near_miss("last-rows-dropped")
def _(hidden, w_vocab, targets, chunk):
    """Rows behind the last full chunk are dropped. `chunk` need not divide n: let the last chunk be shorter."""
    starts = range(0, len(targets) - chunk + 1, chunk)
    parts = [_checkpointed(hidden[i : i + chunk], w_vocab, targets[i : i + chunk]) for i in starts]
    return sum(parts, hidden.sum() * 0) / len(targets)


@chunked_cross_entropy.near_miss("detached")
def _(hidden, w_vocab, targets, chunk):
    """The memory is saved by computing without gradients, so nothing can be learned from this loss. Keep the graph and let
    backward compute the chunks again."""
    with torch.no_grad():
        return ref.chunked_cross_entropy(hidden, w_vocab, targets, chunk)


class _Unscaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, w_vocab, targets, chunk):
        grad_hidden, grad_w, total = torch.empty_like(hidden), torch.zeros_like(w_vocab), hidden.new_zeros(())
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            log_probs = ref.log_softmax(hidden[rows] @ w_vocab)
            total = total - log_probs.gather(-1, targets[rows, None]).sum()
            grad = (log_probs.exp() - _one_hot(log_probs, targets[rows])) / len(targets)
            grad_hidden[rows] = grad @ w_vocab.T
            grad_w += hidden[rows].T @ grad
        ctx.save_for_backward(grad_hidden, grad_w)
        return total / len(targets)

    @staticmethod
    def backward(ctx, grad_loss):
        return *ctx.saved_tensors, None, None


@chunked_cross_entropy.near_miss("upstream-gradient-ignored")
def _(hidden, w_vocab, targets, chunk):
    """backward returns the same gradients whatever comes from above. When the loss is scaled or added to another, that is
    wrong: multiply by grad_output."""
    return _Unscaled.apply(hidden, w_vocab, targets, chunk)
