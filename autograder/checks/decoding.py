"""What is right in the exercises of the decoding chapter."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autograder.inside.models import HistoryModel, RowModel, SameLogits
from autograder.spec import Case, Exercise, Gen, Subject, call, scenario, served
from course_llm import decoding as ref

HALVES = (torch.float16, torch.bfloat16)
LECTURE = [1.0, 0.0, -0.9, -2.1]  # mat, floor, couch, bed


# --- arguments: every case must hold for every seed, so nothing lies close to a threshold


def tolerant(case: Case, dtype: torch.dtype) -> Case:
    """Sums and exponentials may run in float32 inside, float64 inputs included."""
    return case.close(1e-5, 1e-5) if dtype == torch.float64 else case


def shuffled(g: Gen, rows: list[list[float]], dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of given numbers, each in its own order."""
    return torch.stack([torch.tensor(row, dtype=torch.float64)[g.perm(len(row))] for row in rows]).to(dtype)


def batched(shape: tuple[int, ...]) -> str:
    """Says how many batch dimensions a shape has."""
    words = ("no batch dimension", "one batch dimension", "two batch dimensions")
    return words[len(shape) - 1]


# cumulative sums of the sorted rows stay 0.05 away from 0.6; the nuclei hold 2, 3, 1 and 4 tokens
NUCLEI = [[0.5, 0.3, 0.12, 0.05, 0.03], [0.3, 0.25, 0.2, 0.15, 0.1], [0.9, 0.04, 0.03, 0.02, 0.01],
          [0.22, 0.2, 0.2, 0.19, 0.19]]  # fmt: skip


def nearly_equal() -> Tensor:
    """64 tokens that differ in the sixth digit, exactly: the last one is the most probable."""
    return torch.cat([torch.full((62,), 1 / 64), torch.tensor([1 / 64 - 2**-20, 1 / 64 + 2**-20])])


def clear_threshold(g: Gen, values: Tensor) -> float:
    """A number in (0.15, 0.9) that keeps a distance from all values."""
    while True:
        p = g.python.uniform(0.15, 0.9)
        if bool(((values.double() - p).abs() > 2e-3).all()):
            return p


def clear_p(g: Gen, probs: Tensor) -> float:
    return clear_threshold(g, probs.double().sort(dim=-1, descending=True).values.cumsum(dim=-1))


def clear_min_p(g: Gen, probs: Tensor) -> float:
    return clear_threshold(g, probs.double() / probs.double().amax(dim=-1, keepdim=True))


def history_model(g: Gen, vocab: int) -> HistoryModel:
    """A language model whose logits depend on every token of the text and its place."""
    return HistoryModel(g.randn(vocab, vocab).double(), g.randn(vocab, vocab).double())


def scripted_model(prompt: Tensor, vocab: int, texts: list[list[int]]) -> Callable[[Tensor], Tensor]:
    """A model that is sure of each row's text; a row is known by its first token, `prompt[row, 0]`."""
    by_first = {int(first): text for first, text in zip(prompt[:, 0], texts, strict=True)}

    def next_logits(ids: Tensor) -> Tensor:
        step = ids.shape[1] - prompt.shape[1]
        logits = torch.zeros(ids.shape[0], vocab)
        for row, first in enumerate(ids[:, 0].tolist()):
            text = by_first.get(first, texts[0])
            logits[row, text[min(step, len(text) - 1)]] = 50.0
        return logits

    return next_logits


def ending_rows(g: Gen, eos_first: bool = False) -> tuple[Tensor, int, int, list[list[int]]]:
    """Prompts `(3, 2)` with an EOS in one of them, vocab, EOS and texts that meet it after 3, 1 and 4 tokens."""
    names = g.perm(6).tolist()
    if eos_first != (names[5] == 0):  # an EOS of id 0 is an EOS, too, and has cases of its own
        swap = names.index(0) if eos_first else 0
        names[swap], names[5] = names[5], names[swap]
    a, b, c, x, y, eos = names
    prompt = torch.tensor([[a, x], [b, eos], [c, y]])
    texts = [[x, y, eos, x, y, x, y], [eos, x, x, y, y, x, x], [y, y, x, eos, y, x, a]]
    return prompt, 6, eos, texts


# --- softmax_with_temperature

softmax_with_temperature = Exercise("softmax_with_temperature", ref, see="temperature")


@softmax_with_temperature.group("values", share=3)
def _(g: Gen):
    """Divides the logits by the temperature, then takes the softmax over the last axis."""
    lecture = g.tensor(LECTURE)
    for t in (0.5, 1.0, 2.0):
        yield call(lecture, t).expect(F.softmax(lecture / t, dim=-1)).says(f"the cat at temperature {t}")
    for shape, t in (((7,), 0.7), ((2, 7), 1.6), ((2, 3, 7), 0.4), ((4, 4), 1.3), ((1, 1), 0.5)):
        logits = g.randn(*shape)
        yield call(logits, t).expect(F.softmax(logits / t, dim=-1)).says(batched(shape))
    yield call(logits=g.randn(2, 7), temperature=3.0).says("arguments by name")
    yield call(g.randn(2, 7, 3).transpose(1, 2), 0.8).says("logits that are not contiguous")


@softmax_with_temperature.group("stability")
def _(g: Gen):
    """Stays finite for logits of ±1e4: subtract each row's maximum before the exponential."""
    # the tolerance lets exp(z - logsumexp(z)) pass, whose rounding grows with the logits
    for data, t, words in (
        ([1e4, 9999.0, -1e4], 1.0, "logits of 1e4"),
        ([-1e4, -9999.0, -9998.0], 0.5, "logits of -1e4"),
        ([[0.0, 1.0, 2.0], [1e4, 9999.0, 9997.0]], 2.0, "rows of very different size"),
        ([-1e4, -math.inf, -9999.0], 1.0, "logits of -1e4 and a token of probability 0"),
    ):
        yield call(g.tensor(data), t).close(rtol=5e-3, atol=5e-3).says(words)
    for dtype in HALVES:
        logits = g.tensor([[20.0, 17.0, 0.0, -20.0], [-20.0, -21.0, 0.5, 0.0]], dtype)
        yield call(logits, 1.0).close(rtol=0.1, atol=0.05).says(str(dtype))


@softmax_with_temperature.group("temperature zero")
def _(g: Gen):
    """At temperature 0 the most probable token has all the mass, the lower id at a tie."""
    yield call(g.randn(7), 0.0).says("one row")
    yield call(g.randn(2, 3, 7), 0.0).says("batch dimensions")
    yield call(g.tensor([1.0, 3.0, 3.0, 0.0]), 0.0).expect(g.tensor([0.0, 1, 0, 0])).says("a tie")
    yield call(g.tensor([[2.0, 2.0, 2.0], [-1.0, -3.0, -1.0]]), 0.0).says("ties in a batch")
    for dtype in HALVES:
        yield call(g.randn(2, 7, dtype=dtype), 0.0).says(str(dtype))


@softmax_with_temperature.group("dtypes")
def _(g: Gen):
    """Keeps the dtype of the logits, with its precision."""
    for dtype in (*HALVES, torch.float64):
        for t in (0.7, 1.5):
            yield tolerant(call(g.randn(2, 7, dtype=dtype), t), dtype).says(str(dtype))


@softmax_with_temperature.group("gradient")
def _(g: Gen):
    """Gradients flow to the logits."""
    yield call(g.randn(7), 0.6).gradient().says("one row")
    batch = tolerant(call(g.randn(2, 3, 5, dtype=torch.float64), 1.7), torch.float64)
    yield batch.gradient().says("batch dimensions, float64")


@softmax_with_temperature.group("errors")
def _(g: Gen):
    """Refuses a temperature below 0 with a ValueError."""
    yield call(g.randn(7), -1.0).raises(ValueError).says("a temperature of -1")
    yield call(g.randn(2, 7), -0.01).raises(ValueError).says("a temperature of -0.01")


def _one_hot(logits: Tensor) -> Tensor:
    return ref.softmax_with_temperature(logits, 0.0)


def _checked(temperature: float) -> None:
    if temperature < 0:
        raise ValueError(f"temperature >= 0 is needed, got {temperature}")


@softmax_with_temperature.near_miss("multiplies")
def _(logits, temperature):
    """The logits are multiplied by the temperature, so that a high one sharpens: divide by it."""
    _checked(temperature)
    return _one_hot(logits) if temperature == 0 else ref.softmax_with_temperature(logits * temperature, 1.0)


@softmax_with_temperature.near_miss("divides-after")
def _(logits, temperature):
    """The probabilities are divided by the temperature instead of the logits, so the rows do not sum to 1: scale the logits first, then take the softmax."""
    _checked(temperature)
    return _one_hot(logits) if temperature == 0 else logits.softmax(dim=-1) / temperature


@softmax_with_temperature.near_miss("no-effect")
def _(logits, temperature):
    """The temperature has no effect. Either it is not used, or it divides the probabilities, and renormalising undoes that: divide the logits by it."""
    _checked(temperature)
    return _one_hot(logits) if temperature == 0 else logits.softmax(dim=-1)


@softmax_with_temperature.near_miss("overflows")
def _(logits, temperature):
    """The exponential overflows: exp(89) is infinite in float32 and infinity over infinity is NaN. Subtract the row's maximum from the logits first; the softmax does not change."""
    _checked(temperature)
    if temperature == 0:
        return _one_hot(logits)
    e = (logits / temperature).exp()
    return e / e.sum(dim=-1, keepdim=True)


@softmax_with_temperature.near_miss("global-maximum")
def _(logits, temperature):
    """The maximum of the whole tensor is subtracted, so a row far below it becomes 0/0: subtract each row's own maximum (dim=-1, keepdim=True)."""
    _checked(temperature)
    if temperature == 0:
        return _one_hot(logits)
    e = ((logits - logits.max()) / temperature).exp()
    return e / e.sum(dim=-1, keepdim=True)


@softmax_with_temperature.near_miss("overflows-and-zero-divides")
def _(logits, temperature):
    """Two things are missing. The exponential overflows, since exp(89) is infinite in float32: subtract the row's maximum from the logits first. And temperature 0 divides by zero: treat it as the limit, a one-hot row at the arg-max."""
    _checked(temperature)
    e = (logits / temperature).exp()
    return e / e.sum(dim=-1, keepdim=True)


@softmax_with_temperature.near_miss("one-sum-for-all-rows")
def _(logits, temperature):
    """The exponentials are summed over all rows together, so a row of a batch does not sum to 1: sum along dim=-1 with keepdim=True."""
    _checked(temperature)
    if temperature == 0:
        return _one_hot(logits)
    e = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).exp()
    return e / e.sum()


@softmax_with_temperature.near_miss("one-sum-and-overflows")
def _(logits, temperature):
    """Three things are wrong. The exponentials are summed over all rows together: sum along dim=-1 with keepdim=True. They overflow for large logits: subtract the row's maximum first. And temperature 0 divides by zero: treat it as the limit, a one-hot row at the arg-max."""
    _checked(temperature)
    e = (logits / temperature).exp()
    return e / e.sum()


@softmax_with_temperature.near_miss("first-axis")
def _(logits, temperature):
    """The softmax runs over the first axis, so tokens of different rows compete: the vocabulary is the last axis, dim=-1."""
    _checked(temperature)
    if temperature == 0:
        return F.one_hot(logits.argmax(dim=0), logits.shape[0]).movedim(-1, 0).to(logits.dtype)
    return (logits / temperature).softmax(dim=0)


@softmax_with_temperature.near_miss("zero-divides")
def _(logits, temperature):
    """Temperature 0 divides by zero and gives NaN: treat it as the limit, a one-hot row at the arg-max."""
    _checked(temperature)
    return (logits / temperature).softmax(dim=-1)


@softmax_with_temperature.near_miss("zero-shares-ties")
def _(logits, temperature):
    """At temperature 0 the tokens that tie for the maximum share the mass: the arg-max is one token, the lowest id among equals."""
    _checked(temperature)
    if temperature == 0:
        top = (logits == logits.amax(dim=-1, keepdim=True)).to(logits.dtype)
        return top / top.sum(dim=-1, keepdim=True)
    return ref.softmax_with_temperature(logits, temperature)


@softmax_with_temperature.near_miss("zero-is-uniform")
def _(logits, temperature):
    """Temperature 0 gives the uniform distribution, which is the limit of a very high temperature: at 0 the arg-max has all the mass."""
    _checked(temperature)
    if temperature == 0:
        return torch.full_like(logits, 1 / logits.shape[-1])
    return ref.softmax_with_temperature(logits, temperature)


# --- top_k_filter

top_k_filter = Exercise("top_k_filter", ref, see="top-k")


@top_k_filter.group("values", share=3)
def _(g: Gen):
    """Keeps the k most probable tokens of each row and renormalises."""
    yield (
        call(g.tensor([0.1, 0.4, 0.2, 0.3]), 2)
        .expect(g.tensor([0, 4 / 7, 0, 3 / 7]))
        .says("two of four tokens")
    )
    yield call(g.probs(7), 1).says("k = 1")
    for shape, k in (((7,), 3), ((2, 7), 2), ((2, 3, 7), 4), ((5, 5), 3)):
        yield call(g.probs(*shape), k).says(batched(shape))
    yield call(probs=g.probs(2, 9), k=6).says("arguments by name")
    yield call(g.probs(2, 3, 7).transpose(0, 1), 3).says("probabilities that are not contiguous")
    yield call(g.tensor([[1.0, 0, 0, 0], [0, 0.25, 0, 0.75]]), 2).says("tokens of probability 0")


@top_k_filter.group("ties")
def _(g: Gen):
    """Exactly k tokens survive; among equals the lower ids do."""
    yield (
        call(g.tensor([0.125, 0.25, 0.25, 0.25, 0.125]), 2)
        .expect(g.tensor([0, 0.5, 0.5, 0, 0]))
        .says("a tie")
    )
    yield call(g.tensor([[0.25, 0.125, 0.25, 0.125, 0.25], [0.125] * 2 + [0.25] * 3]), 4).says(
        "ties in a batch"
    )
    yield call(g.tensor([0.5, 0.5]), 1).says("two equal tokens")
    yield call(torch.full((2, 8), 0.125), 3).says("all tokens equal")
    yield call(torch.full((64,), 1 / 64), 5).says("many equal tokens")
    yield call(nearly_equal(), 1).expect(F.one_hot(g.tensor(63), 64).float()).says("nearly equal tokens")


@top_k_filter.group("large k")
def _(g: Gen):
    """A k of the vocabulary's size or more changes nothing."""
    for k in (7, 8, 1000):
        probs = g.probs(2, 7)
        yield call(probs, k).expect(probs).says(f"k = {k}, vocab = 7")


@top_k_filter.group("dtypes")
def _(g: Gen):
    """Keeps the dtype of the probabilities, with its precision."""
    for dtype in (*HALVES, torch.float64):
        yield tolerant(call(shuffled(g, NUCLEI, dtype)[:3], 3), dtype).says(str(dtype))
        tie = call(g.tensor([0.25, 0.25, 0.25, 0.25], dtype), 3)
        yield tolerant(tie, dtype).says(f"{dtype}, a tie")


@top_k_filter.group("gradient")
def _(g: Gen):
    """Gradients flow to the kept tokens, through the renormalisation, too."""
    yield call(g.probs(7), 3).gradient().says("one row")
    batch = tolerant(call(g.probs(2, 3, 7, dtype=torch.float64), 2), torch.float64)
    yield batch.gradient().says("batch dimensions, float64")


@top_k_filter.group("errors")
def _(g: Gen):
    """Refuses a k below 1 with a ValueError."""
    yield call(g.probs(7), 0).raises(ValueError).says("k = 0")
    yield call(g.probs(2, 7), -1).raises(ValueError).says("k = -1")


def _keep(probs: Tensor, mask: Tensor) -> Tensor:
    kept = probs * mask
    return kept / kept.sum(dim=-1, keepdim=True)


def _top(probs: Tensor, k: int, first: int = 1) -> Tensor:
    """The mask of the k largest, after the check that k >= 1."""
    if k < 1:
        raise ValueError(f"k >= 1 is needed, got {k}")
    order = probs.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order[..., : max(0, k + first - 1)], True)


@top_k_filter.near_miss("keeps-one-less")
def _(probs, k):
    """One token too few survives: k counts the tokens that are kept, so the slice ends at k."""
    return _keep(probs, _top(probs, k, first=0))


@top_k_filter.near_miss("keeps-one-more")
def _(probs, k):
    """One token too many survives: k counts the tokens that are kept, the one of rank k + 1 is not among them."""
    return _keep(probs, _top(probs, k, first=2))


@top_k_filter.near_miss("keeps-every-tie")
def _(probs, k):
    """Every token that ties with the k-th survives. Comparing with the k-th probability cannot tell equals apart: keep exactly k by their ids, from a stable sort."""
    mask = _top(probs, k)
    return _keep(probs, probs >= torch.where(mask, probs, torch.inf).amin(dim=-1, keepdim=True))


@top_k_filter.near_miss("ties-to-the-higher-id")
def _(probs, k):
    """Among equal probabilities the higher ids survive: a stable descending sort keeps the lower ids in front (torch.topk promises no order)."""
    return _keep(probs, _top(probs.flip(-1), k).flip(-1))


@top_k_filter.near_miss("plain-topk")
def _(probs, k):
    """The right tokens survive except at ties, or k exceeds the vocabulary: torch.topk may take any of several equals, and refuses a k beyond the last axis. Sort stably, and cut at k."""
    if k < 1:
        raise ValueError(f"k >= 1 is needed, got {k}")
    kept = probs.topk(k, dim=-1)
    return _keep(probs, torch.zeros_like(probs, dtype=torch.bool).scatter(-1, kept.indices, True))


@top_k_filter.near_miss("order-for-rank")
def _(probs, k):
    """The order is taken for the rank. argsort names the token at each place, not the place of each token: scatter with the first k of it, or take the argsort of the order."""
    _top(probs, k)
    return _keep(probs, probs.argsort(dim=-1, descending=True, stable=True) < k)


@top_k_filter.near_miss("not-renormalised")
def _(probs, k):
    """The right tokens survive, but the rows no longer sum to 1: divide by what is left of each row."""
    return probs * _top(probs, k)


@top_k_filter.near_miss("softmax-again")
def _(probs, k):
    """A second softmax is taken over the surviving probabilities, which flattens them: they are probabilities already, divide by their sum."""
    return probs.masked_fill(~_top(probs, k), -torch.inf).softmax(dim=-1)


@top_k_filter.near_miss("whole-batch")
def _(probs, k):
    """The k tokens are chosen, or the sum is taken, over the whole batch: every row keeps its own k tokens and sums to 1, so work along dim=-1."""
    if k < 1:
        raise ValueError(f"k >= 1 is needed, got {k}")
    mask = _top(probs.flatten(), k).reshape(probs.shape)
    return probs * mask / (probs * mask).sum()


@top_k_filter.near_miss("one-sum-for-all-rows")
def _(probs, k):
    """The kept mass is summed over all rows together, so a row of a batch does not sum to 1: sum along dim=-1 with keepdim=True."""
    kept = probs * _top(probs, k)
    return kept / kept.sum()


# --- top_p_filter

top_p_filter = Exercise("top_p_filter", ref, see="top-p")


@top_p_filter.group("values", share=3)
def _(g: Gen):
    """Keeps the smallest set of most probable tokens whose mass reaches p, and renormalises."""
    yield (
        call(g.tensor([0.05, 0.3, 0.5, 0.15]), 0.7).expect(g.tensor([0, 0.375, 0.625, 0])).says("two tokens")
    )
    yield call(g.tensor([0.25, 0.75]), 0.1).expect(g.tensor([0.0, 1])).says("the first token alone crosses p")
    yield call(g.probs(7), 1e-6).says("a tiny p")
    yield call(shuffled(g, NUCLEI), 0.6).says("rows with nuclei of different size")
    for shape in ((7,), (2, 7), (2, 3, 7), (6, 6)):
        probs = g.probs(*shape)
        yield call(probs, clear_p(g, probs)).says(batched(shape))
    yield call(probs=shuffled(g, NUCLEI), p=0.9 - 0.02).says("arguments by name")
    yield call(shuffled(g, NUCLEI).expand(2, 4, 5).transpose(0, 1), 0.6).says(
        "probabilities that are not contiguous"
    )


@top_p_filter.group("exact mass and ties")
def _(g: Gen):
    """A set whose mass is exactly p is enough, and a tie goes to the lower id."""
    probs = g.tensor([0.5, 0.25, 0.125, 0.125])
    yield call(probs, 0.75).expect(g.tensor([2 / 3, 1 / 3, 0, 0])).says("the mass reaches p exactly")
    yield call(probs, 0.5).expect(g.tensor([1.0, 0, 0, 0])).says("one token has the mass p")
    yield call(shuffled(g, [[0.5, 0.25, 0.1875, 0.0625]] * 3), 0.75).says("an exact mass in a batch")
    yield call(probs, 0.8).expect(g.tensor([4 / 7, 2 / 7, 1 / 7, 0])).says("a tie")
    yield call(g.tensor([[0.125, 0.125, 0.5, 0.25], [0.25] * 4]), 0.8).says("ties in a batch")
    yield call(g.tensor([0.25] * 4), 0.25).says("all tokens equal, one is enough")
    yield (
        call(nearly_equal(), 1 / 64).expect(F.one_hot(g.tensor(63), 64).float()).says("nearly equal tokens")
    )


@top_p_filter.group("p = 1")
def _(g: Gen):
    """p = 1 keeps every token."""
    for probs, words in (
        (g.probs(7), "one row"),
        (g.probs(2, 3, 7), "batch dimensions"),
        (torch.full((7,), 1 / 7), "all tokens equal"),
        (g.tensor([[0.7, 0.2, 0.1], [0.5, 0.3, 0.1999999]]), "a rounded sum below 1"),
    ):
        yield call(probs, 1.0).expect(probs).says(words)
    yield call(g.tensor([0.5, 0.25, 0.125, 0.125]), 1.0).says("exact fractions")
    yield call(torch.full((2, 10), 0.1), 1.0).says("a rounded sum above 1")


@top_p_filter.group("dtypes")
def _(g: Gen):
    """Keeps the dtype of the probabilities, with its precision."""
    for dtype in (*HALVES, torch.float64):
        yield tolerant(call(shuffled(g, NUCLEI, dtype)[:3], 0.6), dtype).says(str(dtype))
        exact = call(g.tensor([0.125, 0.5, 0.125, 0.25], dtype), 0.75)
        yield tolerant(exact, dtype).says(f"{dtype}, an exact mass")


@top_p_filter.group("gradient")
def _(g: Gen):
    """Gradients flow to the kept tokens, through the renormalisation, too."""
    yield call(shuffled(g, NUCLEI), 0.6).gradient().says("p = 0.6")
    double = tolerant(call(shuffled(g, NUCLEI, torch.float64), 0.88), torch.float64)
    yield double.gradient().says("p = 0.88, float64")


@top_p_filter.group("errors")
def _(g: Gen):
    """Refuses a p outside (0, 1] with a ValueError."""
    for p in (0.0, -0.3, 1.01, 2.0):
        yield call(g.probs(7), p).raises(ValueError).says(f"p = {p}")


def _ranked(probs: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor]:
    """The order and, in it, the mass with and without each token, after the check of p."""
    if not 0 < p <= 1:
        raise ValueError(f"0 < p <= 1 is needed, got {p}")
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    mass = ranked.cumsum(dim=-1)
    return order, mass, F.pad(mass[..., :-1], (1, 0))


def _unsort(order: Tensor, keep: Tensor) -> Tensor:
    return torch.zeros_like(keep).scatter(-1, order, keep)


@top_p_filter.near_miss("drops-crossing-token")
def _(probs, p):
    """The token that crosses p is dropped, so the set stays below p: keep a token while the mass of those before it is below p."""
    order, mass, _before = _ranked(probs, p)
    if p == 1:
        return probs.clone()
    return _keep(probs, _unsort(order, mass <= p))


@top_p_filter.near_miss("drops-crossing-keeps-first")
def _(probs, p):
    """The token that crosses p is dropped unless it is the first. The set must reach p: keep a token while the mass of those before it is below p."""
    order, mass, before = _ranked(probs, p)
    return _keep(probs, _unsort(order, (mass <= p) | (before == 0)))


@top_p_filter.near_miss("one-more-at-exact-mass")
def _(probs, p):
    """One token too many is kept where the mass is exactly p: at least p is enough, so compare the mass before a token with < p, not <= p."""
    order, _mass, before = _ranked(probs, p)
    return _keep(probs, _unsort(order, before <= p))


@top_p_filter.near_miss("always-one-more")
def _(probs, p):
    """One token too many is kept in every row: the set ends with the token that crosses p."""
    order, _mass, before = _ranked(probs, p)
    return _keep(probs, _unsort(order, F.pad(before[..., :-1], (1, 0)) < p))


@top_p_filter.near_miss("left-sorted")
def _(probs, p):
    """The kept probabilities stay in sorted order, so they belong to the wrong tokens: scatter them back with the indices of the sort."""
    order, _mass, before = _ranked(probs, p)
    return _keep(probs.gather(-1, order), before < p)


@top_p_filter.near_miss("sorted-twice")
def _(probs, p):
    """The sort is not undone but done once more: gather(-1, order) sorts, scatter(-1, order, ...) brings each value back to its token."""
    order, _mass, before = _ranked(probs, p)
    return _keep(probs.gather(-1, order), before < p).gather(-1, order)


@top_p_filter.near_miss("keeps-every-tie")
def _(probs, p):
    """Every token that ties with the last of the nucleus survives. Comparing with its probability cannot tell equals apart: undo the sort instead, so that the lower ids stay."""
    order, _mass, before = _ranked(probs, p)
    mask = _unsort(order, before < p)
    return _keep(probs, probs >= torch.where(mask, probs, torch.inf).amin(dim=-1, keepdim=True))


@top_p_filter.near_miss("not-renormalised")
def _(probs, p):
    """The right tokens survive, but the rows no longer sum to 1: divide by what is left of each row."""
    order, _mass, before = _ranked(probs, p)
    return probs * _unsort(order, before < p)


@top_p_filter.near_miss("one-sum-for-all-rows")
def _(probs, p):
    """The kept mass is summed over all rows together, so a row of a batch does not sum to 1: sum along dim=-1 with keepdim=True."""
    order, _mass, before = _ranked(probs, p)
    kept = probs * _unsort(order, before < p)
    return kept / kept.sum()


@top_p_filter.near_miss("softmax-again")
def _(probs, p):
    """A second softmax is taken over the surviving probabilities, which flattens them: they are probabilities already, divide by their sum."""
    order, _mass, before = _ranked(probs, p)
    return probs.masked_fill(~_unsort(order, before < p), -torch.inf).softmax(dim=-1)


@top_p_filter.near_miss("not-sorted")
def _(probs, p):
    """The mass is summed in the order of the ids, so low ids are kept instead of probable ones: sort by probability first, descending."""
    _ranked(probs, p)
    return _keep(probs, F.pad(probs.cumsum(dim=-1)[..., :-1], (1, 0)) < p)


@top_p_filter.near_miss("ties-to-the-higher-id")
def _(probs, p):
    """Among equal probabilities the higher id is kept: let a stable descending sort put the lower id first."""
    order, _mass, before = _ranked(probs.flip(-1), p)
    return _keep(probs, _unsort(order, before < p).flip(-1))


@top_p_filter.near_miss("threshold-on-probability", see="min-p")
def _(probs, p):
    """Each probability is compared with a threshold by itself, but p is a mass: sum the most probable tokens until they reach it."""
    _ranked(probs, p)
    return _keep(probs, (probs >= 1 - p) | (probs == probs.amax(dim=-1, keepdim=True)))


@top_p_filter.near_miss("one-nucleus-for-all-rows")
def _(probs, p):
    """All rows keep as many tokens as the first one: the size of the nucleus follows from each row's own distribution."""
    order, _mass, before = _ranked(probs, p)
    size = int((before.reshape(-1, probs.shape[-1])[0] < p).sum())
    keep = (torch.arange(probs.shape[-1]) < size).expand(probs.shape)
    return _keep(probs, _unsort(order, keep.contiguous()))


# --- sampling_distribution

sampling_distribution = Exercise("sampling_distribution", ref, see="combining")


def spaced_logits(g: Gen, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits whose softmax keeps clear of the masses that the cases use, in any order."""
    return shuffled(g, [[2.0, 1.0, 0.0, -1.0, -2.0]] * rows, dtype)


@sampling_distribution.group("values", share=3)
def _(g: Gen):
    """Scales, takes the softmax and truncates, with each argument alone and with its default."""
    lecture = g.tensor(LECTURE)
    yield call(lecture).expect(lecture.softmax(dim=-1)).says("defaults")
    yield call(g.randn(120)).says("defaults, a larger vocabulary")
    yield call(lecture, 0.5, 2).says("the cat at temperature 0.5, then k = 2")
    yield call(spaced_logits(g, 3), temperature=1.7).says("temperature alone")
    yield call(spaced_logits(g, 3), top_k=3).says("top-k alone")
    yield call(spaced_logits(g, 3), top_p=0.8).says("top-p alone")
    yield call(spaced_logits(g, 3), 1.5, 4).says("temperature and top-k")
    yield call(spaced_logits(g, 3), 1.0, 2, 0.97).says("both, where top-k cuts more")
    yield call(spaced_logits(g, 6).reshape(2, 3, 5), 1.0, 3).says("batch dimensions")
    yield call(g.randn(7), 0.8, 100, 1.0).says("truncation that keeps everything")


@sampling_distribution.group("order", share=2)
def _(g: Gen):
    """Temperature acts before truncation, and top-p sees the renormalised top-k distribution."""
    probs = g.tensor([0.4, 0.3, 0.2, 0.1])
    yield call(probs.log(), 1.0, 2, 0.5).expect(g.tensor([1.0, 0, 0, 0])).says("top-p after top-k")
    yield (
        call(probs.log(), top_k=3, top_p=0.75)
        .expect(g.tensor([4 / 7, 3 / 7, 0, 0]))
        .says("renormalised in between")
    )
    yield call(spaced_logits(g, 3), temperature=0.5, top_p=0.8).says("a low temperature shrinks the nucleus")
    yield call(spaced_logits(g, 3), temperature=2.0, top_p=0.8).says("a high temperature widens the nucleus")
    yield call(spaced_logits(g, 4), 1.5, 3, 0.7).says("all three")
    yield call(spaced_logits(g, 4).reshape(2, 2, 5), 0.7, 3, 0.95).says("all three, batch dimensions")
    yield call(g.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 1.0]), 2.0, 2).says("a tie")


@sampling_distribution.group("temperature zero")
def _(g: Gen):
    """At temperature 0 the most probable token has all the mass."""
    yield call(g.randn(2, 7), temperature=0.0).says("without truncation")
    yield call(g.randn(2, 7), 0.0, 3, 0.9).says("with truncation")
    yield call(g.tensor([0.0, 2.0, 2.0, 1.0]), 0.0).expect(g.tensor([0.0, 1, 0, 0])).says("a tie")
    close = shuffled(g, [[1.0, 1.0 - 2**-10, 1.0 - 2**-9]] * 2)
    yield call(close, 0.0).says("logits that lie close together")


@sampling_distribution.group("dtypes")
def _(g: Gen):
    """Keeps the dtype of the logits, with its precision."""
    for dtype in (*HALVES, torch.float64):
        yield tolerant(call(spaced_logits(g, 2, dtype)), dtype).says(str(dtype))
        yield tolerant(call(spaced_logits(g, 2, dtype), 1.5, 4, 0.7), dtype).says(str(dtype))


@sampling_distribution.group("gradient")
def _(g: Gen):
    """Gradients flow to the logits."""
    yield call(spaced_logits(g, 2), 1.5).gradient().says("temperature alone")
    all_three = call(spaced_logits(g, 2, torch.float64), 1.5, 4, 0.7)
    yield tolerant(all_three, torch.float64).gradient().says("all three, float64")


def _truncate(probs: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    probs = probs if top_k is None else ref.top_k_filter(probs, top_k)
    return probs if top_p is None else ref.top_p_filter(probs, top_p)


@sampling_distribution.near_miss("temperature-last")
def _(logits, temperature=1.0, top_k=None, top_p=None):
    """The nucleus is chosen at temperature 1, and the temperature reshapes only what is left: divide the logits by the temperature first, then truncate."""
    kept = _truncate(logits.softmax(dim=-1), top_k, top_p)
    return ref.softmax_with_temperature(kept.log(), temperature)


@sampling_distribution.near_miss("top-p-first")
def _(logits, temperature=1.0, top_k=None, top_p=None):
    """Top-p acts on the distribution before top-k has renormalised it, so it keeps too much: cut to k, renormalise, then apply p."""
    probs = ref.softmax_with_temperature(logits, temperature)
    probs = probs if top_p is None else ref.top_p_filter(probs, top_p)
    return probs if top_k is None else ref.top_k_filter(probs, top_k)


@sampling_distribution.near_miss("top-k-or-top-p")
def _(logits, temperature=1.0, top_k=None, top_p=None):
    """Top-p is skipped where top-k is given: the two are independent, apply both, top-k first."""
    return _truncate(ref.softmax_with_temperature(logits, temperature), top_k, None if top_k else top_p)


@sampling_distribution.near_miss("top-p-or-top-k")
def _(logits, temperature=1.0, top_k=None, top_p=None):
    """Top-k is skipped where top-p is given: the two are independent, apply both, top-k first."""
    return _truncate(ref.softmax_with_temperature(logits, temperature), None if top_p else top_k, top_p)


@sampling_distribution.near_miss("no-temperature")
def _(logits, temperature=1.0, top_k=None, top_p=None):
    """The temperature has no effect: divide the logits by it before the softmax."""
    return _truncate(logits.softmax(dim=-1), top_k, top_p)


@sampling_distribution.near_miss("multiplies")
def _(logits, temperature=1.0, top_k=None, top_p=None):
    """The logits are multiplied by the temperature, so that a high one sharpens: divide by it."""
    return _truncate((logits * temperature).softmax(dim=-1), top_k, top_p)


@sampling_distribution.near_miss("zero-divides")
def _(logits, temperature=1.0, top_k=None, top_p=None):
    """Temperature 0 divides by zero and gives NaN: it is the limit, all mass on the most probable token."""
    return _truncate((logits / temperature).softmax(dim=-1), top_k, top_p)


@sampling_distribution.near_miss("zero-is-small")
def _(logits, temperature=1.0, top_k=None, top_p=None):
    """Temperature 0 is replaced by a small number, so that tokens which tie, or nearly do, share the mass: at 0 one token has it all, the lowest id among equals."""
    probs = (logits / max(temperature, 1e-3)).softmax(dim=-1)
    return _truncate(probs, top_k, top_p)


@sampling_distribution.near_miss("not-renormalised")
def _(logits, temperature=1.0, top_k=None, top_p=None):
    """The truncated distribution does not sum to 1: renormalise after top-k and again after top-p."""
    probs = ref.softmax_with_temperature(logits, temperature)
    return probs * (_truncate(probs, top_k, top_p) > 0)


@sampling_distribution.near_miss("one-sum-for-all-rows")
def _(logits, temperature=1.0, top_k=None, top_p=None):
    """The kept mass is summed over all rows together, so a row of a batch does not sum to 1: sum along dim=-1 with keepdim=True."""
    probs = ref.softmax_with_temperature(logits, temperature)
    kept = probs * (_truncate(probs, top_k, top_p) > 0)
    return kept / kept.sum()


# --- sample_from_uniform

sample_from_uniform = Exercise("sample_from_uniform", ref, see="inverse-cdf")


def inside(g: Gen, probs: Tensor) -> tuple[Tensor, Tensor]:
    """For each row a token of positive probability and a u well inside its interval."""
    ids = torch.stack([row.nonzero()[g.python.randrange(int((row > 0).sum()))][0] for row in probs])
    picked = ids[:, None]
    before = probs.double().cumsum(dim=-1).gather(1, picked) - probs.double().gather(1, picked)
    u = before + probs.double().gather(1, picked) * (0.35 + 0.3 * g.rand(len(ids), 1).double())
    return ids, u[:, 0].to(probs.dtype)


@sample_from_uniform.group("values", share=2)
def _(g: Gen):
    """Returns for each row the token whose interval of the cumulative sum holds u."""
    row = g.tensor([0.25, 0.5, 0.25])
    yield (
        call(row.expand(3, 3).clone(), g.tensor([0.1, 0.6, 0.9]))
        .expect(g.tensor([0, 1, 2]))
        .says("a third each")
    )
    for batch, vocab in ((1, 5), (6, 6), (9, 4), (4, 200)):
        probs = g.probs(batch, vocab)
        ids, u = inside(g, probs)
        yield call(probs, u).expect(ids).says(f"{batch} rows of {vocab} tokens")
    probs = g.probs(5, 8).t().contiguous().t()
    ids, u = inside(g, probs)
    yield call(probs=probs, u=u).expect(ids).says("probabilities that are not contiguous")


@sample_from_uniform.group("edges", share=2)
def _(g: Gen):
    """A u on an edge belongs to the token above it, and a token of probability 0 is never drawn."""
    row = g.tensor([0.25, 0.0, 0.5, 0.25])
    u = g.tensor([0.25, 0.75, 0.0, 0.5])
    yield call(row.expand(4, 4).clone(), u).expect(g.tensor([2, 3, 0, 2])).says("u equal to a cumulative sum")
    yield call(g.tensor([[0.0, 0.5, 0.5], [0.0, 0.0, 1.0]]), g.tensor([0.0, 0.0])).says(
        "u = 0 and leading zeros"
    )
    probs = g.tensor([[0.5, 0.0, 0.0, 0.5], [0.0, 1.0, 0.0, 0.0], [0.5, 0.25, 0.25, 0.0]])
    yield call(probs, g.tensor([0.5, 0.9, 0.99])).says("zeros in the middle and at the end")
    yield call(g.tensor([[1.0], [1.0]]), g.tensor([0.0, 0.99])).says("one token")


@sample_from_uniform.group("rounding")
def _(g: Gen):
    """A u past the rounded total gives the last token of positive probability."""
    short = g.tensor([0.0996] + [0.1] * 9)
    yield call(torch.stack([short, short]), g.tensor([0.9999, 0.3 + 0.04])).says("the total is below u")
    zeros = g.tensor([[0.5, 0.4996, 0.0, 0.0], [0.9996, 0.0, 0.0, 0.0], [0.0, 0.4998, 0.4998, 0.0]])
    yield call(zeros, g.tensor([0.9999, 0.9999, 0.9999])).says("zeros behind the last token")


@sample_from_uniform.group("dtypes")
def _(g: Gen):
    """Works in every precision and returns ids."""
    for dtype in (*HALVES, torch.float64):
        probs = shuffled(g, [[0.3, 0.15, 0.35, 0.2]] * 5, dtype)
        ids, u = inside(g, probs)
        yield call(probs, u).expect(ids).says(str(dtype))
        exact = g.tensor([[0.25, 0.0, 0.5, 0.25]] * 2, dtype)
        yield call(exact, g.tensor([0.25, 0.75], dtype)).says(f"{dtype}, an edge")


def _clamped(probs: Tensor, ids: Tensor) -> Tensor:
    """Keeps ids at or below the last token of positive probability."""
    last = (probs.flip(-1) > 0).int().argmax(dim=-1)
    return torch.minimum(ids, probs.shape[-1] - 1 - last)


@sample_from_uniform.near_miss("wrong-edge")
def _(probs, u):
    """The cumulative sum only has to reach u, so u = 0 draws token 0 even when its probability is 0: it must exceed u."""
    return _clamped(probs, (probs.cumsum(dim=-1) < u[:, None]).sum(dim=-1))


@sample_from_uniform.near_miss("overruns")
def _(probs, u):
    """Where rounding leaves the total below u, the id is the size of the vocabulary, one past its end: take the last token of positive probability."""
    return (probs.cumsum(dim=-1) <= u[:, None]).sum(dim=-1)


@sample_from_uniform.near_miss("last-index")
def _(probs, u):
    """Where rounding leaves the total below u, the last id is taken even when its probability is 0: take the last token of positive probability."""
    return (probs.cumsum(dim=-1) <= u[:, None]).sum(dim=-1).clamp(max=probs.shape[-1] - 1)


@sample_from_uniform.near_miss("first-when-none")
def _(probs, u):
    """Where rounding leaves the total below u, no cumulative sum exceeds it, and the arg-max of nothing but False is token 0: take the last token of positive probability."""
    return (probs.cumsum(dim=-1) > u[:, None]).int().argmax(dim=-1)


@sample_from_uniform.near_miss("one-u-for-all-rows")
def _(probs, u):
    """The first row's u is used for every row: compare each row with its own, u[:, None]."""
    return ref.sample_from_uniform(probs, u[:1].expand(len(u)))


@sample_from_uniform.near_miss("no-cumulative-sum")
def _(probs, u):
    """Each probability is compared with u by itself: the intervals are made by the cumulative sum of the probabilities."""
    return (probs > u[:, None]).int().argmax(dim=-1)


@sample_from_uniform.near_miss("sorted-intervals")
def _(probs, u):
    """The intervals are laid out in the order of the probabilities: lay them out in the order of the ids, without sorting."""
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    return order.gather(1, ref.sample_from_uniform(ranked, u)[:, None])[:, 0]


@sample_from_uniform.near_miss("one-too-low")
def _(probs, u):
    """The id is one too low: the number of cumulative sums at or below u is itself the index of the next token."""
    return ((probs.cumsum(dim=-1) <= u[:, None]).sum(dim=-1) - 1).clamp(min=0)


# --- greedy_decode

greedy_decode = Exercise("greedy_decode", ref, see="greedy", seconds=10)


@greedy_decode.group("values", share=3)
def _(g: Gen):
    """Appends the most probable token, again and again, to the whole text."""
    for batch, seq, new in ((1, 1, 6), (3, 4, 5), (2, 7, 1), (4, 2, 8)):
        model, ids = history_model(g, 6), g.ints(0, 6, batch, seq)
        yield call(model, ids, new).says(f"{batch} prompts of {seq} tokens")
    ids = g.ints(0, 6, 2, 3)
    yield call(history_model(g, 6), ids, 0).expect(ids).says("no new tokens")
    prompt, vocab, _eos, texts = ending_rows(g)
    yield call(served(scripted_model(prompt, vocab, texts)), prompt, 6).says("no end of text")
    named = {
        "next_logits": history_model(g, 5),
        "ids": g.ints(0, 5, 2, 2),
        "max_new_tokens": 3,
        "eos_id": None,
    }
    yield call(**named).says("arguments by name")


@greedy_decode.group("end of text", share=2)
def _(g: Gen):
    """A finished row is filled with EOS while the others go on; an EOS in the prompt does not count."""
    for eos_first in (False, True):
        prompt, vocab, eos, texts = ending_rows(g, eos_first)
        words = "an EOS of id 0" if eos == 0 else "rows that end at different times"
        yield call(served(scripted_model(prompt, vocab, texts)), prompt, 6, eos_id=eos).says(words)
        yield call(served(scripted_model(prompt, vocab, texts)), prompt, 3, eos_id=eos).says(
            "cut off before all end"
        )
        row, text = prompt[1:2], texts[2]
        yield call(served(scripted_model(row, vocab, [text])), row, 6, eos).says("an EOS in the prompt")
        yield call(served(scripted_model(row, vocab, texts[1:2])), row, 6, eos).says("an EOS at once")


@greedy_decode.group("stops", share=2)
def _(g: Gen):
    """Stops calling the model when all rows have finished."""
    prompt, vocab, eos, texts = ending_rows(g)

    def run(s: Subject) -> None:
        """All rows end long before max_new_tokens"""
        model = served(scripted_model(prompt, vocab, texts))
        s.call("greedy_decode", model, prompt, 40, eos_id=eos)
        # a loop over rows, or one call more than there are tokens, is fine
        s.require(model.calls <= 3 * 5, "the model is called after every row has finished")

    yield scenario(run)


@greedy_decode.group("ties")
def _(g: Gen):
    """A tie goes to the lower token id."""
    last = g.tensor([[1.0, 3, 3, 0, 3, 0], [0, 0, 2, 2, 2, 1], [4, 1, 0, 4, 4, 4]])[:, g.perm(6)]

    tied = HistoryModel(last.repeat(2, 1).double(), torch.zeros(6, 6, dtype=torch.float64))
    yield call(tied, g.ints(0, 6, 3, 2), 5).says("several tokens tie at every step")
    yield call(SameLogits(torch.zeros(8)), g.ints(0, 8, 2, 2), 2).says("all tokens equal")


def _loop(next_logits, ids, max_new_tokens, eos_id, choose, *, feed=lambda ids: ids, fill=True,
          finished=None, stop=torch.all, filler=None) -> Tensor:  # fmt: skip
    """A decoding loop with places to go wrong in."""
    finished = torch.zeros(ids.shape[0], dtype=torch.bool) if finished is None else finished
    for _ in range(max_new_tokens):
        if stop(finished):
            break
        token = choose(next_logits(feed(ids)))
        if eos_id is not None:
            if fill:
                token = token.masked_fill(finished, eos_id if filler is None else filler)
            finished = finished | (token == eos_id)
        ids = torch.cat([ids, token[:, None]], dim=1)
    return ids


def _forgetful(next_logits, ids, max_new_tokens, eos_id, choose) -> Tensor:
    """A decoding loop that looks at the newest tokens alone."""
    for _ in range(max_new_tokens):
        token = choose(next_logits(ids))
        ids = torch.cat([ids, token[:, None]], dim=1)
        if eos_id is not None and bool((token == eos_id).all()):
            break
    return ids


def _argmax(logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)


@greedy_decode.near_miss("last-token-only")
def _(next_logits, ids, max_new_tokens, eos_id=None):
    """Only the newest token is fed to the model: without a cache it needs the whole text at every step."""
    return _loop(next_logits, ids, max_new_tokens, eos_id, _argmax, feed=lambda ids: ids[:, -1:])


@greedy_decode.near_miss("prompt-only")
def _(next_logits, ids, max_new_tokens, eos_id=None):
    """The model sees the prompt at every step but not the new tokens, so it repeats itself: append each token and feed the longer text."""
    return _loop(next_logits, ids, max_new_tokens, eos_id, _argmax, feed=lambda _: ids)


@greedy_decode.near_miss("goes-on-after-eos")
def _(next_logits, ids, max_new_tokens, eos_id=None):
    """A row goes on with other tokens after its EOS: remember which rows have finished and fill them with eos_id."""
    return _loop(next_logits, ids, max_new_tokens, eos_id, _argmax, fill=False)


@greedy_decode.near_miss("forgets-finished-rows")
def _(next_logits, ids, max_new_tokens, eos_id=None):
    """Rows that have finished are forgotten: they go on after their EOS, and decoding stops only when all rows give an EOS in the same step. Remember which rows have finished and fill them with eos_id."""
    return _forgetful(next_logits, ids, max_new_tokens, eos_id, _argmax)


@greedy_decode.near_miss("without-the-last-eos")
def _(next_logits, ids, max_new_tokens, eos_id=None):
    """The loop ends before the last EOS is appended: an EOS belongs to its text, so append it and then stop."""
    text = ref.greedy_decode(next_logits, ids, max_new_tokens, eos_id)
    ended = eos_id is not None and bool((text[:, ids.shape[1] :] == eos_id).any(dim=1).all())
    return text[:, :-1] if ended else text


@greedy_decode.near_miss("length-with-prompt")
def _(next_logits, ids, max_new_tokens, eos_id=None):
    """max_new_tokens is taken for the length of the whole text: it counts the new tokens, the prompt comes on top."""
    return ref.greedy_decode(next_logits, ids, max(0, max_new_tokens - ids.shape[1]), eos_id)


@greedy_decode.near_miss("stops-with-the-first-row")
def _(next_logits, ids, max_new_tokens, eos_id=None):
    """Decoding stops as soon as one row has finished: go on until all have."""
    return _loop(next_logits, ids, max_new_tokens, eos_id, _argmax, stop=torch.any)


@greedy_decode.near_miss("never-stops-early")
def _(next_logits, ids, max_new_tokens, eos_id=None):
    """Decoding runs to max_new_tokens though every row has finished: leave the loop when all have."""
    return _loop(next_logits, ids, max_new_tokens, eos_id, _argmax, stop=lambda finished: False)


@greedy_decode.near_miss("counts-eos-of-the-prompt")
def _(next_logits, ids, max_new_tokens, eos_id=None):
    """A row whose prompt holds an EOS is taken as finished: only new tokens end a text."""
    finished = None if eos_id is None else (ids == eos_id).any(dim=1)
    return _loop(next_logits, ids, max_new_tokens, eos_id, _argmax, finished=finished)


@greedy_decode.near_miss("new-tokens-only")
def _(next_logits, ids, max_new_tokens, eos_id=None):
    """Only the new tokens are returned: the result is the prompt followed by them."""
    return _loop(next_logits, ids, max_new_tokens, eos_id, _argmax)[:, ids.shape[1] :]


@greedy_decode.near_miss("filled-with-zero")
def _(next_logits, ids, max_new_tokens, eos_id=None):
    """Finished rows are filled with 0, which is a token like any other: fill them with eos_id."""
    return _loop(next_logits, ids, max_new_tokens, eos_id, _argmax, filler=0)


@greedy_decode.near_miss("eos-zero-ignored")
def _(next_logits, ids, max_new_tokens, eos_id=None):
    """An EOS of id 0 is taken for no EOS, because 0 is false: ask `eos_id is not None`."""
    return _loop(next_logits, ids, max_new_tokens, eos_id or None, _argmax)


@greedy_decode.near_miss("ties-to-the-higher-id")
def _(next_logits, ids, max_new_tokens, eos_id=None):
    """Among equal logits the higher id is taken: argmax gives the first maximum, the lower id."""
    return _loop(
        next_logits, ids, max_new_tokens, eos_id, lambda x: x.shape[-1] - 1 - x.flip(-1).argmax(dim=-1)
    )


# --- generate

generate = Exercise("generate", ref, see="generate", seconds=25)

# 1024 draws: few enough for an answer that asks the model row by row
ROWS, NEW = 128, 8


def draw(s: Subject, *args: Any, **kwargs: Any) -> Tensor:
    """Asks for a text; what is random stays out of the transcript, so that a diagnosis rests on what is judged."""
    text = s.ask("generate", *args, **kwargs)
    s.transcript.pop()
    return text


def distribution_case(g: Gen, words: str, **settings: Any) -> Case:
    """Draws ROWS × NEW tokens and compares how often each token comes with `sampling_distribution`."""
    # two rows of 0.78, 0.17, 0.04, 0.01 at temperature 1, in different orders
    first = shuffled(g, [[3.0, 1.5, 0.0, -1.5]])[0]
    logits = torch.stack([first, first.roll(1)])
    prompt = torch.arange(ROWS)[:, None] % 2
    generator = torch.Generator().manual_seed(g.python.randrange(1 << 30))
    want = ref.sampling_distribution(logits, **settings)
    # both rows have the same probabilities once they are ranked
    order = logits.argsort(dim=-1, descending=True)
    p = want.gather(1, order)[0]
    # 6 standard deviations: a right answer fails once in 500 million times
    slack = 6 * (p * (1 - p) / (ROWS * NEW)).sqrt() + 2e-3

    def run(s: Subject) -> None:
        text = draw(s, RowModel(logits), prompt, NEW, generator=generator, **settings)
        s.require(isinstance(text, Tensor) and text.shape == (ROWS, 1 + NEW), "the text has the wrong shape")
        s.require(bool((text[:, :1] == prompt).all()), "the text does not begin with the prompt")
        new = text[:, 1:]
        stuck = bool((new == new[:, :1]).all()) and not bool((new[::2] == new[:1]).all())
        s.require(not stuck, "every row repeats one token, its steps are not drawn one by one")
        counts = torch.stack([torch.bincount(text[kind::2, 1:].flatten(), minlength=4) for kind in (0, 1)])
        removed = bool((counts[want == 0] > 0).any())
        s.require(not removed, "a token is drawn that truncation has removed")
        share = counts.gather(1, order).sum(dim=0) / (ROWS * NEW)
        s.require(bool(((share - p).abs() <= slack).all()), "tokens come too often or too rarely")

    return scenario(run).says(words)


@generate.group("distribution", share=3)
def _(g: Gen):
    """Draws every token from sampling_distribution of the row's own logits."""
    yield distribution_case(g, "defaults")
    yield distribution_case(g, "a low temperature", temperature=0.4)
    yield distribution_case(g, "top-k", top_k=2)
    yield distribution_case(g, "top-p", top_p=0.9)
    yield distribution_case(g, "all three", temperature=1.5, top_k=3, top_p=0.7)
    # 0.78 does not reach 0.8, but 0.78 / (0.78 + 0.17) does
    yield distribution_case(g, "top-p of what top-k has left", top_k=2, top_p=0.8)
    generator = torch.Generator().manual_seed(g.python.randrange(1 << 30))
    likely = g.python.randrange(64)
    # 64 equal tokens, and one that is as probable as the 63 others together
    flat_and_peaked = torch.stack([torch.zeros(64), math.log(63) * F.one_hot(torch.tensor(likely), 64)])

    def many(s: Subject) -> None:
        """Defaults, 64 tokens"""
        prompt = torch.arange(64)[:, None] % 2
        new = draw(s, RowModel(flat_and_peaked), prompt, 8, generator=generator)[:, 1:]
        # 256 draws hit 63 of 64 tokens on average, and 50 or fewer less than once in a billion times
        s.require(len(new[::2].unique()) > 50, "some tokens are never drawn")
        # 6 standard deviations; another noise than Gumbel's on the logits is off by more
        share = float((new[1::2] == likely).double().mean())
        s.require(abs(share - 0.5) < 6 * math.sqrt(0.25 / 256), "tokens come too often or too rarely")

    yield scenario(many)


@generate.group("limits", share=2)
def _(g: Gen):
    """Temperature 0, k = 1 and a tiny p are greedy decoding on the whole text; 0 new tokens give the prompt."""

    def greedy_case(words: str, **settings: Any) -> Case:
        model, ids = history_model(g, 6), g.ints(0, 6, 3, 4)
        want = ref.greedy_decode(model, ids, 7)

        def run(s: Subject) -> None:
            text = draw(s, model, ids, 7, **settings)
            s.require(isinstance(text, Tensor) and text.shape == want.shape, "the text has the wrong shape")
            s.require(torch.equal(text, want), "the text is not the greedy one")

        return scenario(run).says(words)

    yield greedy_case("temperature 0", temperature=0.0)
    yield greedy_case("temperature 0 with truncation", temperature=0.0, top_k=3, top_p=0.9)
    yield greedy_case("k = 1", top_k=1, generator=torch.Generator().manual_seed(g.python.randrange(1 << 30)))
    yield greedy_case("a tiny p", top_p=0.01)
    ids = g.ints(0, 6, 2, 3)
    yield call(history_model(g, 6), ids, 0).expect(ids).says("no new tokens")


@generate.group("independence", share=2)
def _(g: Gen):
    """Rows are drawn independently of each other, and steps too."""
    logits = shuffled(g, [[0.2, 0.1, 0.0, -0.1, -0.2]]).expand(5, 5).clone()
    same = float(logits[0].softmax(dim=-1).square().sum())
    generator = torch.Generator().manual_seed(g.python.randrange(1 << 30))

    def run(s: Subject) -> None:
        """Equal prompts side by side"""
        text = draw(s, RowModel(logits), torch.zeros(ROWS, 1).long(), NEW, generator=generator)
        new = text[:, 1:]
        slack = 6 * math.sqrt(same * (1 - same) / (ROWS * NEW // 2))
        rows = float((new[0::2] == new[1::2]).double().mean())
        s.require(abs(rows - same) <= slack, "neighbouring rows are not drawn independently")
        steps = float((new[:, 0::2] == new[:, 1::2]).double().mean())
        s.require(abs(steps - same) <= slack, "the steps of a row are not drawn independently")

    yield scenario(run)


@generate.group("generator", share=2)
def _(g: Gen):
    """The generator is the only source of randomness: the same state gives the same text."""
    logits = g.randn(5, 5) / 2
    ids = g.ints(0, 5, 6, 2)
    seed = g.python.randrange(1 << 30)

    def state(seed: int, skip: int = 0) -> torch.Generator:
        generator = torch.Generator().manual_seed(seed)
        torch.rand(skip, generator=generator)
        return generator

    def run(s: Subject) -> None:
        """Two generators in the same state, and others"""
        model = RowModel(logits)
        first = draw(s, model, ids, 20, generator=state(seed))
        again = draw(s, model, ids, 20, generator=state(seed))
        s.require(torch.equal(first, again), "two generators in the same state give different texts")
        other = draw(s, model, ids, 20, generator=state(seed + 1))
        s.require(not torch.equal(first, other), "two generators with different seeds give the same text")
        later = draw(s, model, ids, 20, generator=state(seed, skip=999))
        s.require(
            not torch.equal(first, later), "a generator that has drawn already gives the text of a new one"
        )

    yield scenario(run)

    def without(s: Subject) -> None:
        """No generator"""
        first = draw(s, RowModel(logits), ids, 20)
        again = draw(s, RowModel(logits), ids, 20)
        s.require(not torch.equal(first, again), "without a generator two texts are the same")

    yield scenario(without)


@generate.group("end of text")
def _(g: Gen):
    """EOS works as in greedy decoding: finished rows are filled, and all finished rows stop the loop."""
    for eos_first in (False, True):
        prompt, vocab, eos, texts = ending_rows(g, eos_first)
        words = "an EOS of id 0" if eos == 0 else "rows that end at different times"
        yield call(served(scripted_model(prompt, vocab, texts)), prompt, 6, eos_id=eos).says(words)
        yield call(
            served(scripted_model(prompt, vocab, texts)), prompt, 3, temperature=0.8, top_k=3, eos_id=eos
        ).says("cut off before all end")
        row = prompt[1:2]
        yield call(served(scripted_model(row, vocab, texts[2:])), row, 6, 1.0, None, 0.9, eos).says(
            "EOS in the prompt"
        )

    def run(s: Subject) -> None:
        """All rows end long before max_new_tokens"""
        model = served(scripted_model(prompt, vocab, texts))
        s.call("generate", model, prompt, 40, eos_id=eos)
        s.require(model.calls <= 3 * 5, "the model is called after every row has finished")

    yield scenario(run)


def _sampler(temperature, top_k, top_p, generator) -> Callable[[Tensor], Tensor]:
    def choose(logits: Tensor) -> Tensor:
        probs = ref.sampling_distribution(logits, temperature, top_k, top_p)
        return torch.multinomial(probs, 1, generator=generator)[:, 0]

    return choose


@generate.near_miss("ignores-generator")
def _(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    """The generator is not used, so the same seed gives different texts: pass it to every draw."""
    return _loop(next_logits, ids, max_new_tokens, eos_id, _sampler(temperature, top_k, top_p, None))


@generate.near_miss("one-sample-for-the-batch")
def _(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    """One token is drawn from the first row and given to the whole batch: draw one for each row, from its own distribution."""
    choose = _sampler(temperature, top_k, top_p, generator)
    return _loop(next_logits, ids, max_new_tokens, eos_id, lambda x: choose(x[:1]).expand(x.shape[0]))


@generate.near_miss("one-uniform-for-the-batch", see="inverse-cdf")
def _(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    """All rows share one uniform number, so equal prompts give equal texts: draw one number per row."""

    def choose(logits: Tensor) -> Tensor:
        u = torch.rand(1, generator=generator).expand(logits.shape[0])
        return ref.sample_from_uniform(ref.sampling_distribution(logits, temperature, top_k, top_p), u)

    return _loop(next_logits, ids, max_new_tokens, eos_id, choose)


@generate.near_miss("same-random-number-every-step")
def _(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    """Each row uses one random number for all its steps (drawn before the loop, or from a generator that is seeded again): draw a new one at every step."""
    u = torch.rand(ids.shape[0], generator=generator)

    def choose(logits: Tensor) -> Tensor:
        return ref.sample_from_uniform(ref.sampling_distribution(logits, temperature, top_k, top_p), u)

    return _loop(next_logits, ids, max_new_tokens, eos_id, choose)


@generate.near_miss("always-greedy")
def _(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    """The most probable token is always taken: draw from the distribution, with torch.multinomial or a uniform number."""
    return _loop(next_logits, ids, max_new_tokens, eos_id, _argmax)


@generate.near_miss("ignores-temperature", see="temperature")
def _(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    """The temperature has no effect: pass it on to sampling_distribution."""
    return _loop(next_logits, ids, max_new_tokens, eos_id, _sampler(1.0, top_k, top_p, generator))


@generate.near_miss("ignores-top-k", see="top-k")
def _(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    """Tokens beyond the k most probable are drawn: pass top_k on to sampling_distribution."""
    return _loop(next_logits, ids, max_new_tokens, eos_id, _sampler(temperature, None, top_p, generator))


@generate.near_miss("ignores-top-p", see="top-p")
def _(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    """Tokens outside the nucleus are drawn: pass top_p on to sampling_distribution."""
    return _loop(next_logits, ids, max_new_tokens, eos_id, _sampler(temperature, top_k, None, generator))


@generate.near_miss("top-p-first", see="combining")
def _(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    """Top-p acts before top-k, so it keeps tokens that the renormalised top-k distribution would not need: draw from sampling_distribution, which cuts to k first."""

    def choose(logits: Tensor) -> Tensor:
        probs = _truncate(ref.sampling_distribution(logits, temperature, None, top_p), top_k, None)
        return torch.multinomial(probs, 1, generator=generator)[:, 0]

    return _loop(next_logits, ids, max_new_tokens, eos_id, choose)


@generate.near_miss("last-token-only", see="greedy")
def _(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    """Only the newest token is fed to the model: without a cache it needs the whole text at every step."""
    choose = _sampler(temperature, top_k, top_p, generator)
    return _loop(next_logits, ids, max_new_tokens, eos_id, choose, feed=lambda ids: ids[:, -1:])


@generate.near_miss("goes-on-after-eos", see="greedy")
def _(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    """A row goes on with other tokens after its EOS: remember which rows have finished and fill them with eos_id."""
    choose = _sampler(temperature, top_k, top_p, generator)
    return _loop(next_logits, ids, max_new_tokens, eos_id, choose, fill=False)


@generate.near_miss("forgets-finished-rows", see="greedy")
def _(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    """Rows that have finished are forgotten: they go on after their EOS, and decoding stops only when all rows give an EOS in the same step. Remember which rows have finished and fill them with eos_id."""
    return _forgetful(
        next_logits, ids, max_new_tokens, eos_id, _sampler(temperature, top_k, top_p, generator)
    )


@generate.near_miss("stops-with-the-first-row", see="greedy")
def _(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    """Decoding stops as soon as one row has finished: go on until all have."""
    choose = _sampler(temperature, top_k, top_p, generator)
    return _loop(next_logits, ids, max_new_tokens, eos_id, choose, stop=torch.any)


@generate.near_miss("never-stops-early", see="greedy")
def _(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    """The loop runs for max_new_tokens steps even when all rows have finished: stop then."""
    choose = _sampler(temperature, top_k, top_p, generator)
    return _loop(next_logits, ids, max_new_tokens, eos_id, choose, stop=lambda finished: False)


@generate.near_miss("counts-eos-of-the-prompt", see="greedy")
def _(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    """A row whose prompt holds an EOS is taken for finished: only an EOS that was drawn ends a row."""
    finished = None if eos_id is None else (ids == eos_id).any(dim=1)
    choose = _sampler(temperature, top_k, top_p, generator)
    return _loop(next_logits, ids, max_new_tokens, eos_id, choose, finished=finished)


@generate.near_miss("new-tokens-only", see="greedy")
def _(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    """Only the new tokens are returned: the result begins with the prompt."""
    choose = _sampler(temperature, top_k, top_p, generator)
    return _loop(next_logits, ids, max_new_tokens, eos_id, choose)[:, ids.shape[1] :]


@generate.near_miss("eos-zero-ignored", see="greedy")
def _(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    """An EOS of id 0 is taken for no EOS, because 0 is false: ask whether it is None."""
    choose = _sampler(temperature, top_k, top_p, generator)
    return _loop(next_logits, ids, max_new_tokens, eos_id or None, choose)


@generate.near_miss("temperature-zero-divides", see="temperature")
def _(next_logits, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, eos_id=None, generator=None):
    """Temperature 0 is divided by, and there is no distribution to draw from: it means greedy decoding."""
    choose = _sampler(1.0, top_k, top_p, generator)
    return _loop(next_logits, ids, max_new_tokens, eos_id, lambda x: choose(x / temperature))


# --- beam_search

beam_search = Exercise("beam_search", ref, see="beam-search", seconds=15)


def clear_model(g: Gen, vocab: int, prompt: Tensor, length: int, eos_id: int | None = None) -> Callable:
    """A model under which no two hypotheses of any length score nearly alike."""
    while True:
        model = history_model(g, vocab)
        gaps = []
        for new in range(1, length + 1):
            for length_penalty in (0.0, 0.7, 1.0):
                found = ref.beam_search(model, prompt, vocab**length, new, eos_id, length_penalty)
                scores = torch.tensor([score for _, score in found], dtype=torch.float64)
                gaps.append(float((scores[:-1] - scores[1:]).min()))
        if min(gaps) > 1e-4:
            return model


def branching_model(
    prompt: Tensor, vocab: int, eos: int, branches: dict[int, tuple[float, list[int]]], sure: float
) -> Callable[[Tensor], Tensor]:
    """A model that leaves the first token open and then is sure of the text that belongs to it.

    Hypotheses outside the branches are improbable and hardly ever end, so that it does not matter whether a search
    pools finished hypotheses with live ones or sets them aside.
    """
    weights = 1 + 0.1 * torch.arange(vocab)  # unequal, so that no two hypotheses tie
    weights[eos] = 1e-5

    def spread(likely: dict[int, float]) -> Tensor:
        """The given probabilities, and the weights for what is left."""
        probs = weights.clone()
        probs[list(likely)] = 0
        probs *= (1 - sum(likely.values())) / probs.sum()
        for token, p in likely.items():
            probs[token] = p
        return probs.log()

    start = spread({token: p for token, (p, _) in branches.items()})
    certain, open_end = [spread({token: sure}) for token in range(vocab)], spread({})

    def next_logits(ids: Tensor) -> Tensor:
        step = ids.shape[1] - prompt.shape[1]
        if step <= 0:
            return start.repeat(ids.shape[0], 1)
        rows = []
        for first in ids[:, prompt.shape[1]].tolist():
            _, text = branches.get(first, (0, []))
            rows.append(certain[text[min(step, len(text)) - 1]] if text else open_end)
        return torch.stack(rows)

    return next_logits


def forking_model(g: Gen, prompt: Tensor) -> tuple[Callable[[Tensor], Tensor], int]:
    """A model, and its EOS, under which the mean log-probability would drop an early EOS for a text that ends worse.

    The EOS at once has 0.35; two tokens have 0.6 · 0.6 or 0.6 · 0.38, the second better than 0.35 per token; after it all is flat.
    """
    a, b, c, x, eos, *_ = g.perm(9).tolist()
    weights = 1 + 0.1 * torch.arange(9)  # unequal, so that no two hypotheses tie
    weights[eos] = 1e-5

    def spread(likely: dict[int, float]) -> Tensor:
        probs = weights.clone()
        probs[list(likely)] = 0
        probs *= (1 - sum(likely.values())) / probs.sum()
        for token, p in likely.items():
            probs[token] = p
        return probs.log()

    texts = {(): spread({a: 0.6, eos: 0.35}), (a,): spread({b: 0.6, c: 0.38}), (a, b): spread({x: 0.9})}
    flat = spread({})

    def next_logits(ids: Tensor) -> Tensor:
        return torch.stack([texts.get(tuple(new), flat) for new in ids[:, prompt.shape[1] :].tolist()])

    return next_logits, eos


def beam_case(model: Callable, prompt: Tensor, *args: Any, **kwargs: Any) -> Case:
    # scores are sums of float32 log-probabilities, returned as Python floats
    asked = model if isinstance(model, HistoryModel) else served(model)
    return call(asked, prompt, *args, **kwargs).close(rtol=1e-4, atol=1e-4)


@beam_search.group("no end of text", share=3)
def _(g: Gen):
    """Keeps the best hypotheses of each step by their summed log-probability; finds what greedy misses."""
    # greedy takes token 1, after which all is flat; token 2 leads to a sure one
    table = g.tensor([[0.1, 0.5, 0.4], [0.32, 0.33, 0.35], [0.97, 0.02, 0.01]]).log()
    found = [(g.tensor([2, 0]), math.log(0.4 * 0.97)), (g.tensor([1, 2]), math.log(0.5 * 0.35))]
    yield (
        beam_case(lambda ids: table[ids[:, -1]], g.tensor([[0]]), 2, 2)
        .expect(found)
        .says("greedy misses the best")
    )
    for seq, beams, new in ((1, 2, 3), (3, 3, 3), (4, 5, 2), (2, 2, 1)):
        prompt = g.ints(0, 4, 1, seq)
        model = clear_model(g, 4, prompt, new)
        yield beam_case(model, prompt, beams, new).says(f"{beams} beams, {new} new tokens")
    prompt = g.ints(0, 4, 1, 2)
    named = {"beams": 3, "max_new_tokens": 3, "eos_id": None, "length_penalty": 0.0}
    yield beam_case(clear_model(g, 4, prompt, 3), prompt, **named).says("arguments by name")


@beam_search.group("one beam")
def _(g: Gen):
    """One beam gives the greedy text up to its EOS; the log-probabilities are summed in float32 at least."""
    prompt = g.ints(0, 4, 1, 3)
    model = clear_model(g, 4, prompt, 4)
    yield beam_case(model, prompt, 1, 4).says("no EOS")
    a, b, c, eos = g.perm(4).tolist()
    model = branching_model(prompt, 4, eos, {a: (0.6, [b, eos, c, c]), b: (0.3, [a, a, a, a])}, 0.9)
    yield beam_case(model, prompt, 1, 6, eos_id=eos).says("an EOS after three tokens")
    model = branching_model(prompt, 4, eos, {eos: (0.6, [c, c]), b: (0.3, [a, a])}, 0.9)
    yield beam_case(model, prompt, 1, 4, eos).says("an EOS at once")
    model = branching_model(prompt, 4, eos, {eos: (0.6, [c, c]), b: (0.3, [a, a])}, 0.97)
    yield beam_case(model, prompt, 1, 4, eos, 1.0).says(
        "an EOS at once, where a longer text has a better score"
    )

    def long_sum(value: Any, *_: Any) -> str | None:
        [(new, score)] = value
        if float(score) == -math.inf:
            return "the score is minus infinity: a product of probabilities is too small for the dtype"
        if new.tolist() != [1] * 100:
            return "the text is not the greedy one"
        # the log-softmax may round to bfloat16, a sum in bfloat16 is off by a tenth
        want = 100 * float(logits.double().log_softmax(dim=-1)[1])
        right = abs(float(score) - want) < 0.02 * abs(want)
        return None if right else "the score is not the sum of the log-probabilities"

    # a product of 100 such probabilities is 0 in float32
    logits = torch.tensor([0.0, 0.5, 0.0, 0.0, -0.5], dtype=torch.bfloat16)
    model = SameLogits(logits)
    yield call(model, prompt, 1, 100).judge(long_sum).says("a long text, bfloat16 logits")


@beam_search.group("all beams", share=2)
def _(g: Gen):
    """With enough beams for every text the search is exhaustive, and each text comes once."""
    for vocab, new in ((3, 3), (2, 4)):
        for length_penalty in (0.0, 0.7, 1.0):
            prompt = g.ints(0, vocab, 1, 2)
            eos = 0 if length_penalty == 0 else g.python.randrange(vocab)
            model = clear_model(g, vocab, prompt, new, eos)
            case = beam_case(model, prompt, vocab**new, new, eos_id=eos, length_penalty=length_penalty)
            yield case.says(f"length_penalty = {length_penalty}")


@beam_search.group("finished hypotheses")
def _(g: Gen):
    """A finished hypothesis is kept as it is while the others go on; those cut off at max_new_tokens count, too."""
    for length_penalty in (0.0, 1.0):
        a, b, c, x, eos = g.perm(5).tolist()
        prompt, sure = g.ints(0, 5, 1, 2), g.python.uniform(0.96, 0.98)
        branches = {eos: (0.58, [x, x, x]), a: (0.36, [b, c, b])}
        model = branching_model(prompt, 5, eos, branches, sure)
        yield beam_case(model, prompt, 2, 4, eos, length_penalty).says("one ends at once, one is cut off")
        branches = {eos: (0.45, [x, x, x]), a: (0.3, [eos, x, x]), b: (0.21, [c, c, c])}
        model = branching_model(prompt, 5, eos, branches, sure)
        yield beam_case(model, prompt, 3, 4, eos, length_penalty).says("two end, one is cut off")
        branches = {a: (0.58, [b, eos, x]), b: (0.38, [c, c, eos])}
        model = branching_model(prompt, 5, eos, branches, sure)
        yield beam_case(model, prompt, 2, 7, eos, length_penalty).says("both end before the limit")


@beam_search.group("length penalty")
def _(g: Gen):
    """The score is the summed log-probability over length**length_penalty; the EOS counts, the prompt does not."""
    prompt = g.ints(0, 4, 1, 3)
    for length_penalty in (1.0, 2.0):
        case = beam_case(clear_model(g, 4, prompt, 3), prompt, 3, 3, length_penalty=length_penalty)
        yield case.says(f"texts of equal length, length_penalty = {length_penalty}")
    a, b, c, x, eos = g.perm(5).tolist()
    for length_penalty in (0.5, 0.7, 1.0):
        # the short text is more probable, the long one is better per token
        model = branching_model(prompt, 5, eos, {eos: (0.58, [x]), a: (0.36, [b, c, eos])}, 0.98)
        case = beam_case(model, prompt, 2, 6, eos_id=eos, length_penalty=length_penalty)
        yield case.says(f"length_penalty = {length_penalty}")
    model, eos = forking_model(g, prompt)
    case = beam_case(model, prompt, 2, 3, eos_id=eos, length_penalty=1.0)
    yield case.says("a step keeps the largest sums, the score ranks at the end")


def _beams(next_logits, ids, beams, max_new_tokens, eos_id, length_penalty, *, extend_finished=False, score=None,
           rank=None, stop_at_first=False, cut_off=True, use_logits=False, best_child=False, copies=1,
           top_up=False) -> list:  # fmt: skip
    """A beam search with places to go wrong in."""
    score = score or (lambda new, total: total / len(new) ** length_penalty)
    rank = rank or score
    live, done = [([], 0.0)] * copies, []
    for _ in range(max_new_tokens):
        children = []
        for new, total in live:
            logits = next_logits(torch.cat([ids, torch.tensor([new], dtype=ids.dtype)], dim=1))[0].double()
            steps = logits if use_logits else logits.log_softmax(dim=-1)
            tokens = [int(steps.argmax())] if best_child and new else range(len(steps))
            children += [([*new, token], total + float(steps[token])) for token in tokens]
        best = sorted(children, key=lambda pair: -pair[1])
        room = beams
        if top_up:  # as many as it takes for `beams` live ones
            alive = [i for i, pair in enumerate(best) if pair[0][-1] != eos_id]
            room = alive[beams - 1] + 1 if len(alive) >= beams else len(best)
        best = best[:room]
        ended = [pair for pair in best if not extend_finished and pair[0][-1] == eos_id]
        live = [pair for pair in best if extend_finished or pair[0][-1] != eos_id]
        done += ended
        if not live or (stop_at_first and done):
            break
    if cut_off or not done:
        done += live
    done.sort(key=lambda pair: -rank(*pair))
    return [(torch.tensor(new, dtype=ids.dtype), score(new, total)) for new, total in done[:beams]]


@beam_search.near_miss("extends-finished")
def _(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """Hypotheses that have ended with EOS are extended further: set them aside and extend only the others."""
    return _beams(next_logits, ids, beams, max_new_tokens, eos_id, length_penalty, extend_finished=True)


@beam_search.near_miss("ranks-by-unnormalised-score")
def _(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """The hypotheses are ranked by their summed log-probability, which favours short texts: rank them by the score, the sum over length**length_penalty."""
    return _beams(
        next_logits, ids, beams, max_new_tokens, eos_id, length_penalty, rank=lambda new, total: total
    )


@beam_search.near_miss("prunes-by-score")
def _(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """A step keeps the hypotheses with the best score, so that longer ones push out those that have ended: keep the largest sums of log-probabilities, and divide by the length only at the end."""
    pool = [([], 0.0)]
    for _ in range(max_new_tokens):
        children = []
        for new, total in pool:
            if new and new[-1] == eos_id:
                children.append((new, total))
                continue
            text = torch.cat([ids, torch.tensor([new], dtype=ids.dtype)], dim=1)
            steps = next_logits(text)[0].double().log_softmax(dim=-1)
            children += [([*new, token], total + float(step)) for token, step in enumerate(steps)]
        pool = sorted(children, key=lambda pair: -pair[1] / len(pair[0]) ** length_penalty)[:beams]
    return [(torch.tensor(new, dtype=ids.dtype), total / len(new) ** length_penalty) for new, total in pool]


@beam_search.near_miss("eos-zero-ignored")
def _(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """An EOS of id 0 is taken for no EOS, because 0 is false: ask `eos_id is not None`."""
    return _beams(next_logits, ids, beams, max_new_tokens, eos_id or None, length_penalty)


@beam_search.near_miss("not-sorted")
def _(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """The hypotheses are returned in the order in which they have finished: sort them by their score, the best first."""
    return _beams(
        next_logits, ids, beams, max_new_tokens, eos_id, length_penalty, rank=lambda new, total: 0.0
    )


@beam_search.near_miss("no-length-penalty")
def _(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """length_penalty has no effect: divide the summed log-probability by length**length_penalty."""
    return _beams(next_logits, ids, beams, max_new_tokens, eos_id, 0.0)


@beam_search.near_miss("stops-at-first-finished")
def _(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """The search stops when the first hypothesis has finished: go on while a live one is left."""
    return _beams(next_logits, ids, beams, max_new_tokens, eos_id, length_penalty, stop_at_first=True)


@beam_search.near_miss("tops-up")
def _(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """Extensions that end in EOS are replaced by others until `beams` live ones are left, so that one beam goes on after its EOS: a step keeps the `beams` best extensions, and those that end are among them."""
    return _beams(next_logits, ids, beams, max_new_tokens, eos_id, length_penalty, top_up=True)


@beam_search.near_miss("starts-with-copies")
def _(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """The search starts with `beams` copies of the prompt, and the same text is found again and again: start with a single empty hypothesis."""
    return _beams(next_logits, ids, beams, max_new_tokens, eos_id, length_penalty, copies=beams)


@beam_search.near_miss("drops-cut-off")
def _(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """Hypotheses that are cut off at max_new_tokens are left out: rank them together with the finished ones."""
    return _beams(next_logits, ids, beams, max_new_tokens, eos_id, length_penalty, cut_off=False)


@beam_search.near_miss("length-with-prompt")
def _(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """The length counts the prompt: it is the number of new tokens, the EOS included."""

    def score(new, total):
        return total / (ids.shape[1] + len(new)) ** length_penalty

    return _beams(next_logits, ids, beams, max_new_tokens, eos_id, length_penalty, score=score)


@beam_search.near_miss("length-without-eos")
def _(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """The length leaves out the EOS: it is a token of the text and counts."""

    def score(new, total):
        return total / max(1, len(new) - (new[-1] == eos_id)) ** length_penalty

    return _beams(next_logits, ids, beams, max_new_tokens, eos_id, length_penalty, score=score)


@beam_search.near_miss("sums-logits")
def _(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """Raw logits are summed. They are not comparable between steps: take the log-softmax of each row first."""
    return _beams(next_logits, ids, beams, max_new_tokens, eos_id, length_penalty, use_logits=True)


@beam_search.near_miss("one-child-per-beam", see="greedy")
def _(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """Each beam is continued greedily after the first step: let all extensions of all beams compete for the places."""
    return _beams(next_logits, ids, beams, max_new_tokens, eos_id, length_penalty, best_child=True)


@beam_search.near_miss("with-prompt")
def _(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """The prompt is part of the returned ids: return the new tokens alone."""
    found = ref.beam_search(next_logits, ids, beams, max_new_tokens, eos_id, length_penalty)
    return [(torch.cat([ids[0], new]), score) for new, score in found]


@beam_search.near_miss("without-eos")
def _(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    """The EOS is missing from the returned ids: a finished hypothesis ends with it."""
    found = ref.beam_search(next_logits, ids, beams, max_new_tokens, eos_id, length_penalty)
    return [(new[:-1] if eos_id is not None and new[-1] == eos_id else new, score) for new, score in found]


# --- repetition_penalty

repetition_penalty = Exercise("repetition_penalty", ref, see="repetition-penalty")


@repetition_penalty.group("values", share=3)
def _(g: Gen):
    """Divides the positive logits of tokens in the text by the penalty and multiplies the negative ones."""
    logits, ids = g.tensor([[2.0, -2.0, 1.0, -1.0]]), g.tensor([[0, 1]])
    yield call(logits, ids, 2.0).expect(g.tensor([[1.0, -4.0, 1.0, -1.0]])).says("one of each sign")
    yield call(g.randn(1, 8), g.perm(8)[None, :5], 1.3).says("every token once")
    yield call(g.randn(1, 8), g.perm(8)[None], 1.5).says("the whole vocabulary")
    yield call(g.randn(2, 8), g.ints(0, 8, 2, 3), 0.7).says("a penalty below 1")
    yield call(g.randn(2, 8), g.ints(0, 8, 2, 3), 1.0).says("a penalty of 1")
    yield call(logits=g.randn(8, 2).t(), ids=g.ints(0, 8, 2, 4), penalty=1.8).says(
        "logits that are not contiguous"
    )


@repetition_penalty.group("repeats and rows", share=2)
def _(g: Gen):
    """Penalises a token once however often it occurs, and each row by its own text."""
    twice = g.tensor([[3, 3, 3, 1, 1]])
    yield call(g.randn(1, 6), twice, 1.4).says("repeated tokens")
    yield call(g.randn(3, 6), g.tensor([[0, 1, 0], [2, 2, 2], [5, 4, 5]]), 1.4).says(
        "rows with different texts"
    )
    yield call(g.randn(4, 4), g.ints(0, 4, 4, 9), 2.0).says("long texts")
    yield call(g.tensor([[0.0, -0.0, 1.0]]), g.tensor([[0, 1, 0]]), 3.0).says("logits of 0")


@repetition_penalty.group("dtypes", share=2)
def _(g: Gen):
    """Keeps the dtype of the logits, with its precision."""
    for dtype in (*HALVES, torch.float64):
        yield call(g.randn(2, 8, dtype=dtype), g.ints(0, 8, 2, 4), 1.3).says(str(dtype))


@repetition_penalty.group("gradient")
def _(g: Gen):
    """Gradients flow to all logits."""
    ids = torch.stack([g.perm(7)[:3], g.perm(7)[:3]])
    yield call(g.randn(2, 7), ids, 1.7).gradient().says("a penalty of 1.7")
    double = call(g.randn(2, 7, dtype=torch.float64), ids, 0.8)
    yield double.gradient().says("a penalty of 0.8, float64")


def _seen(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)


def _penalise(logits: Tensor, penalty: float) -> Tensor:
    return torch.where(logits > 0, logits / penalty, logits * penalty)


@repetition_penalty.near_miss("boosts-negative")
def _(logits, ids, penalty):
    """Negative logits are divided, too, which brings them closer to 0 and makes the token more probable: multiply them."""
    return torch.where(_seen(logits, ids), logits / penalty, logits)


@repetition_penalty.near_miss("once-per-occurrence")
def _(logits, ids, penalty):
    """A token is penalised once per occurrence: whether it occurs is what counts, not how often. Use a mask of seen tokens."""
    counts = torch.zeros_like(logits).scatter_add(1, ids, torch.ones(ids.shape, dtype=logits.dtype))
    power = penalty**counts
    return torch.where(logits > 0, logits / power, logits * power)


@repetition_penalty.near_miss("inverted")
def _(logits, ids, penalty):
    """Positive logits are multiplied and negative ones divided, which rewards repetition: it is the other way round."""
    return torch.where(_seen(logits, ids), _penalise(logits, 1 / penalty), logits)


@repetition_penalty.near_miss("subtracts")
def _(logits, ids, penalty):
    """The penalty is subtracted, as a presence penalty is: this one divides positive logits and multiplies negative ones."""
    return torch.where(_seen(logits, ids), logits - penalty, logits)


@repetition_penalty.near_miss("whole-batch")
def _(logits, ids, penalty):
    """The tokens of all rows are penalised in every row: each row has its own text."""
    everywhere = ids.reshape(1, -1).expand(logits.shape[0], -1)
    return torch.where(_seen(logits, everywhere), _penalise(logits, penalty), logits)


@repetition_penalty.near_miss("last-token-only")
def _(logits, ids, penalty):
    """Only the newest token is penalised: all tokens of the text are, the prompt's too."""
    return torch.where(_seen(logits, ids[:, -1:]), _penalise(logits, penalty), logits)


@repetition_penalty.near_miss("every-token")
def _(logits, ids, penalty):
    """Every token of the vocabulary is penalised: only those that occur in the row are."""
    return _penalise(logits, penalty)


@repetition_penalty.near_miss("in-place")
def _(logits, ids, penalty):
    """The values are right, but the caller's logits are changed in place: build a new tensor."""
    return logits.copy_(ref.repetition_penalty(logits, ids, penalty))


# --- distinct_n

distinct_n = Exercise("distinct_n", ref, see="distinct-n")


def exactly(want: float) -> Callable[..., str | None]:
    """Judges a share, which is a Python float."""

    def verdict(value: Any, *args: Any) -> str | None:
        if type(value) is not float:
            return f"the result is of type {type(value).__name__}, it should be a float"
        return None if abs(value - want) < 1e-6 else "the result has the wrong value"

    return verdict


def share_case(ids: Any, n: int) -> Case:
    tokens = ids.tolist() if isinstance(ids, Tensor) else ids
    ngrams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return call(ids, n).judge(exactly(len(set(ngrams)) / len(ngrams) if ngrams else 0.0))


@distinct_n.group("values", share=3)
def _(g: Gen):
    """Divides the number of distinct n-grams by the number of all n-grams."""
    for n, want in ((1, 3 / 5), (2, 3 / 4), (3, 1.0)):
        yield call([1, 2, 1, 2, 3], n).judge(exactly(want)).says(f"a list, n = {n}")
        yield call(g.tensor([1, 2, 1, 2, 3]), n).judge(exactly(want)).says(f"a tensor, n = {n}")
    for n in (1, 2, 3, 4):
        yield share_case(g.ints(0, 3, 40), n).says(f"a long text, n = {n}")
        yield share_case(g.ints(0, 2, 17).tolist(), n).says(f"a long list, n = {n}")
    yield call(ids=g.tensor([7] * 9), n=2).judge(exactly(1 / 8)).says("one token again and again")


@distinct_n.group("edges", share=2)
def _(g: Gen):
    """A text without n-grams gives 0.0; a text that is one n-gram gives 1.0."""
    yield call([1, 2], 3).judge(exactly(0.0)).says("a list that is too short")
    yield call(g.tensor([1, 2]), 5).judge(exactly(0.0)).says("a tensor that is too short")
    yield call([], 1).judge(exactly(0.0)).says("an empty list")
    yield call(torch.zeros(0, dtype=torch.int64), 2).judge(exactly(0.0)).says("an empty tensor")
    yield call([4, 4, 4], 3).judge(exactly(1.0)).says("one n-gram")
    yield call(g.tensor([5]), 1).judge(exactly(1.0)).says("one token")


@distinct_n.group("large ids")
def _(g: Gen):
    """Tells n-grams apart whatever their ids."""
    yield share_case([1, 12, 11, 2, 1, 12], 2).says("ids that read alike when joined")
    alike = [
        value for base in (10, 100, 1000, 10_000, 65_536) for value in (2, base + 5, 3, 5, base + 5, 2, 5, 3)
    ]
    yield share_case(g.tensor(alike), 2).says("ids of very different size")
    yield share_case(g.ints(0, 3, 30) * 50_000 + 1, 3).says("ids beyond 100,000")
    yield share_case([3, 1, 2, 1, 3, 2], 2).says("the same tokens in another order")


def _ngrams(ids: Any, n: int, step: int = 1) -> list[tuple]:
    tokens = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    return [tuple(tokens[i : i + n]) for i in range(0, len(tokens) - n + 1, step)]


@distinct_n.near_miss("no-overlap")
def _(ids, n):
    """The text is cut into n-grams that do not overlap: one starts at every token, a text of s tokens has s - n + 1."""
    found = _ngrams(ids, n, step=n)
    return len(set(found)) / len(found) if found else 0.0


@distinct_n.near_miss("counts-the-short-tail")
def _(ids, n):
    """The slices at the end of the text count, too, though they have fewer than n tokens: the starts run to len(ids) - n, included."""
    tokens = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    found = [tuple(tokens[i : i + n]) for i in range(len(tokens))]
    return len(set(found)) / len(found) if found else 0.0


@distinct_n.near_miss("occurs-once")
def _(ids, n):
    """Only n-grams that never repeat are counted: distinct ones are the members of the set, each counted once however often it occurs."""
    found = _ngrams(ids, n)
    return sum(found.count(ngram) == 1 for ngram in found) / len(found) if found else 0.0


@distinct_n.near_miss("crashes-when-short")
def _(ids, n):
    """A text shorter than n has no n-grams, and the share divides by zero: return 0.0 for it."""
    found = _ngrams(ids, n)
    return len(set(found)) / len(found)


@distinct_n.near_miss("one-when-short")
def _(ids, n):
    """A text without n-grams gives 1.0, as if nothing were repeated: it gives 0.0."""
    found = _ngrams(ids, n)
    return len(set(found)) / len(found) if found else 1.0


@distinct_n.near_miss("over-tokens")
def _(ids, n):
    """The number of distinct n-grams is divided by the number of tokens: divide by the number of n-grams, s - n + 1."""
    return len(set(_ngrams(ids, n))) / len(ids) if len(ids) else 0.0


@distinct_n.near_miss("loses-the-last")
def _(ids, n):
    """The last n-gram is left out: the starts run to len(ids) - n, included."""
    found = _ngrams(ids, n)[:-1]
    return len(set(found)) / len(found) if found else 0.0


@distinct_n.near_miss("tensors-in-a-set")
def _(ids, n):
    """Tensors go into the set as objects, and no two are the same object: turn the ids into Python ints first, with tolist()."""
    tokens = list(ids)
    found = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(found)) / len(found) if found else 0.0


@distinct_n.near_miss("joined-as-text")
def _(ids, n):
    """The ids of an n-gram are joined to one string, where 1, 12 and 11, 2 read alike: keep them apart, as a tuple."""
    found = ["".join(map(str, ngram)) for ngram in _ngrams(ids, n)]
    return len(set(found)) / len(found) if found else 0.0


@distinct_n.near_miss("ignores-order")
def _(ids, n):
    """N-grams with the same tokens in another order count as the same: the order belongs to an n-gram."""
    found = [tuple(sorted(ngram)) for ngram in _ngrams(ids, n)]
    return len(set(found)) / len(found) if found else 0.0


@distinct_n.near_miss("distinct-tokens")
def _(ids, n):
    """n has no effect, single tokens are counted: an n-gram is n tokens in a row."""
    found = _ngrams(ids, 1) if len(ids) >= n else []
    return len(set(found)) / len(found) if found else 0.0


# --- min_p_filter

min_p_filter = Exercise("min_p_filter", ref, see="min-p")


@min_p_filter.group("values", share=3)
def _(g: Gen):
    """Keeps the tokens of at least min_p times the largest probability, and renormalises."""
    yield (
        call(g.tensor([0.1, 0.6, 0.05, 0.25]), 0.3)
        .expect(g.tensor([0, 12 / 17, 0, 5 / 17]))
        .says("two of four")
    )
    yield call(shuffled(g, NUCLEI), 0.35).says("peaked and flat rows")
    for shape in ((7,), (2, 7), (2, 3, 7), (6, 6)):
        probs = g.probs(*shape)
        yield call(probs, clear_min_p(g, probs)).says(batched(shape))
    yield call(probs=g.tensor([0.3, 0.3, 0.3, 0.1]), min_p=0.9).says("arguments by name")
    yield call(shuffled(g, NUCLEI).expand(2, 4, 5).transpose(0, 1), 0.35).says(
        "probabilities that are not contiguous"
    )


@min_p_filter.group("limits")
def _(g: Gen):
    """A token on the threshold is kept; min_p = 0 keeps every token, min_p = 1 those of the largest probability."""
    yield (
        call(g.tensor([0.5, 0.25, 0.125, 0.125]), 0.5)
        .expect(g.tensor([2 / 3, 1 / 3, 0, 0]))
        .says("on the threshold")
    )
    yield call(g.tensor([[0.25, 0.5, 0.125, 0.125], [0.0625, 0.25, 0.625, 0.0625]]), 0.25).says("a batch")
    probs = g.probs(2, 7)
    yield call(probs, 0.0).expect(probs).says("min_p = 0")
    yield call(probs, 1.0).says("min_p = 1")
    yield (
        call(g.tensor([0.375, 0.25, 0.375]), 1.0).expect(g.tensor([0.5, 0, 0.5])).says("min_p = 1 and a tie")
    )


@min_p_filter.group("dtypes")
def _(g: Gen):
    """Keeps the dtype of the probabilities, with its precision."""
    for dtype in (*HALVES, torch.float64):
        yield tolerant(call(shuffled(g, NUCLEI, dtype), 0.35), dtype).says(str(dtype))
        exact = call(g.tensor([0.125, 0.5, 0.125, 0.25], dtype), 0.5)
        yield tolerant(exact, dtype).says(f"{dtype}, on the threshold")


@min_p_filter.group("gradient")
def _(g: Gen):
    """Gradients flow to the kept tokens, through the renormalisation, too."""
    yield call(shuffled(g, NUCLEI), 0.35).gradient().says("min_p = 0.35")
    double = tolerant(call(shuffled(g, NUCLEI, torch.float64), 0.55), torch.float64)
    yield double.gradient().says("min_p = 0.55, float64")


@min_p_filter.near_miss("absolute-threshold")
def _(probs, min_p):
    """min_p is compared with the probabilities themselves: it is a share of the row's largest probability, so multiply by that."""
    return _keep(probs, probs >= min_p)


@min_p_filter.near_miss("strictly-above")
def _(probs, min_p):
    """A token exactly on the threshold is dropped: at least min_p times the largest is enough, so compare with >=."""
    return _keep(probs, probs > min_p * probs.amax(dim=-1, keepdim=True))


@min_p_filter.near_miss("not-renormalised")
def _(probs, min_p):
    """The right tokens survive, but the rows no longer sum to 1: divide by what is left of each row."""
    return probs * (probs >= min_p * probs.amax(dim=-1, keepdim=True))


@min_p_filter.near_miss("one-sum-for-all-rows")
def _(probs, min_p):
    """The kept mass is summed over all rows together, so a row of a batch does not sum to 1: sum along dim=-1 with keepdim=True."""
    kept = probs * (probs >= min_p * probs.amax(dim=-1, keepdim=True))
    return kept / kept.sum()


@min_p_filter.near_miss("softmax-again")
def _(probs, min_p):
    """A second softmax is taken over the surviving probabilities, which flattens them: they are probabilities already, divide by their sum."""
    keep = probs >= min_p * probs.amax(dim=-1, keepdim=True)
    return probs.masked_fill(~keep, -torch.inf).softmax(dim=-1)


@min_p_filter.near_miss("largest-of-the-batch")
def _(probs, min_p):
    """The threshold follows the largest probability of the whole batch: each row has its own, amax(dim=-1, keepdim=True)."""
    return _keep(probs, probs >= min_p * probs.max())


@min_p_filter.near_miss("of-the-mean")
def _(probs, min_p):
    """The threshold is a share of the mean probability: it is a share of the largest."""
    return _keep(probs, probs >= min_p * probs.mean(dim=-1, keepdim=True))


@min_p_filter.near_miss("nucleus", see="top-p")
def _(probs, min_p):
    """min_p is taken for a mass to reach, as in top-p: it is a share of the largest probability."""
    return ref.top_p_filter(probs, min_p) if min_p > 0 else probs.clone()


@min_p_filter.near_miss("complement")
def _(probs, min_p):
    """The threshold is 1 - min_p times the largest probability: it is min_p times it."""
    return _keep(probs, probs >= (1 - min_p) * probs.amax(dim=-1, keepdim=True))


# --- speculative_accept

speculative_accept = Exercise("speculative_accept", ref, see="speculative")


def drafted(g: Gen, plan: str, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Arguments where the test of draft i accepts ("a") or rejects ("r"), by a clear margin."""
    target, draft, ids, u = [], [], [], []
    for verdict in plan:
        while True:
            p, q = (
                g.probs(vocab, dtype=torch.float64).to(dtype),
                g.probs(vocab, dtype=torch.float64).to(dtype),
            )
            ratio = p.double() / q.double()
            # a residual of little mass would lose precision in half precision
            if float((p.double() - q.double()).clamp(min=0).sum()) > 0.3:
                break
        token = int(ratio.argmin()) if verdict == "r" else g.python.randrange(vocab)
        share = min(1.0, float(ratio[token]))
        x = g.python.uniform(0.3, 0.7)
        u.append(share + (1 - share) * x if verdict == "r" else share * x)
        target.append(p), draft.append(q), ids.append(token)
    target.append(g.probs(vocab, dtype=torch.float64).to(dtype))
    return torch.stack(target), torch.stack(draft), torch.tensor(ids), torch.tensor(u, dtype=dtype)


@speculative_accept.group("values", share=3)
def _(g: Gen):
    """Accepts drafts up to the first rejection and returns the residual there, or the last target row."""
    target = g.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.2, 0.6]])
    draft, ids = g.tensor([[0.8, 0.1, 0.1], [0.1, 0.3, 0.6]]), g.tensor([0, 1])
    yield (
        call(target, draft, ids, g.tensor([0.7, 0.1]))
        .expect((0, g.tensor([0.0, 2 / 3, 1 / 3])))
        .says("none accepted")
    )
    yield (
        call(target, draft, ids, g.tensor([0.5, 0.5])).expect((1, g.tensor([0.0, 0, 1]))).says("one accepted")
    )
    yield call(target, draft, ids, g.tensor([0.5, 0.2])).expect((2, target[2])).says("all accepted")
    for plan, vocab in (("a", 4), ("r", 4), ("aaa", 6), ("aar", 6), ("arr", 5), ("rrr", 3), ("aaaaar", 8)):
        yield call(*drafted(g, plan, vocab)).says(
            f"{len(plan)} drafts, {plan.split('r')[0].count('a')} accepted"
        )
    names = ("target_probs", "draft_probs", "draft_ids", "u")
    yield call(**dict(zip(names, drafted(g, "ar", 5), strict=True))).says("arguments by name")


@speculative_accept.group("after a rejection", share=2)
def _(g: Gen):
    """Nothing behind the first rejection counts."""
    for plan in ("ra", "ara", "raar", "aaraa"):
        yield call(*drafted(g, plan, 5)).says(f"{len(plan)} drafts, rejected at {plan.index('r') + 1}")


@speculative_accept.group("edges")
def _(g: Gen):
    """Accepts while u is below p/q, rejects when it is equal, and a draft the target rules out is never accepted."""
    target, draft = g.tensor([[0.25, 0.75], [0.5, 0.5]]), g.tensor([[0.5, 0.5]])
    yield call(target, draft, g.tensor([0]), g.tensor([0.5])).says("u equal to p/q")
    yield call(target, draft, g.tensor([1]), g.tensor([0.999])).says("p above q")
    yield call(target, target[:1], g.tensor([0]), g.tensor([0.999])).says("p equal to q")
    yield call(g.tensor([[0.0, 1.0], [0.5, 0.5]]), draft, g.tensor([0]), g.tensor([0.0])).says(
        "p = 0 and u = 0"
    )
    yield call(target, draft, g.tensor([0]), g.tensor([0.0])).says("u = 0")


@speculative_accept.group("law", share=3)
def _(g: Gen):
    """Drafted and corrected tokens together follow the target distribution exactly."""
    target, draft = g.probs(2, 5), g.probs(1, 5)

    def run(s: Subject) -> None:
        """Sums over all drafts, weighted by their probability"""
        law = torch.zeros(5)
        for token in range(5):
            accept = min(1.0, float(target[0, token] / draft[0, token]))
            ids = torch.tensor([token])
            count, _ = s.call("speculative_accept", target, draft, ids, torch.tensor([0.99 * accept]))
            law[token] += draft[0, token] * accept * count
            if accept < 0.99:
                u = torch.tensor([(1 + accept) / 2])
                count, rest = s.call("speculative_accept", target, draft, ids, u)
                law += draft[0, token] * (1 - accept) * rest
        s.require_close(law, target[0], "the tokens do not follow the target", atol=0.02, rtol=0.0)

    yield scenario(run)


@speculative_accept.group("dtypes")
def _(g: Gen):
    """Keeps the dtype of the target, with its precision."""
    for dtype in (*HALVES, torch.float64):
        for plan in ("aa", "ar", "ra"):
            yield tolerant(call(*drafted(g, plan, 4, dtype)), dtype).says(str(dtype))


@speculative_accept.group("gradient", share=2)
def _(g: Gen):
    """The next token's distribution is differentiable in both models' probabilities."""
    for plan, dtype in (("ar", torch.float32), ("r", torch.float64), ("raa", torch.float64)):
        yield tolerant(call(*drafted(g, plan, 5, dtype)), dtype).gradient().says("the residual")

    def flows(value: dict, target: Tensor, *_: Tensor) -> str | None:
        # the row may have been divided by its sum, which is 1 but changes the gradient: only its place is judged
        touched = [bool(row.any()) for row in value["grads"][0]]
        right = touched == [False] * (len(target) - 1) + [True]
        return None if right else "the gradient does not flow to the last target row alone"

    yield call(*drafted(g, "aa", 5)).gradient().judge(flows).says("the last target row")


def _speculate(target_probs, draft_probs, draft_ids, u, *, accept=lambda u, p, q: u < min(1.0, p / q if q else 2.0),
               residual=lambda p, q: (p - q).clamp(min=0), normalise=True, stop=True, last=-1) -> tuple:  # fmt: skip
    """A loop over the drafts with places to go wrong in."""
    count, first = 0, None
    for i, token in enumerate(draft_ids.tolist()):
        if accept(float(u[i]), float(target_probs[i, token]), float(draft_probs[i, token])):
            count += 1
            continue
        first = i if first is None else first
        if stop:
            break
    if first is None:
        return count, target_probs[last]
    rest = residual(target_probs[first], draft_probs[first])
    return count, rest / rest.sum() if normalise else rest


@speculative_accept.near_miss("not-clamped")
def _(target_probs, draft_probs, draft_ids, u):
    """The residual keeps its negative entries, and its sum is 0: clamp target - draft at 0 before dividing."""
    return _speculate(target_probs, draft_probs, draft_ids, u, residual=lambda p, q: p - q, normalise=False)


@speculative_accept.near_miss("not-clamped-divided")
def _(target_probs, draft_probs, draft_ids, u):
    """The residual keeps its negative entries, so it sums to about 0 and dividing by the sum blows up: clamp target - draft at 0 first."""
    return _speculate(target_probs, draft_probs, draft_ids, u, residual=lambda p, q: p - q)


@speculative_accept.near_miss("not-renormalised")
def _(target_probs, draft_probs, draft_ids, u):
    """The residual does not sum to 1: divide max(0, target - draft) by its sum."""
    return _speculate(target_probs, draft_probs, draft_ids, u, normalise=False)


@speculative_accept.near_miss("ratio-inverted")
def _(target_probs, draft_probs, draft_ids, u):
    """The ratio is inverted: a draft is doubtful where the draft model is more sure than the target, so accept while u < p_target / p_draft."""
    return _speculate(
        target_probs, draft_probs, draft_ids, u, accept=lambda u, p, q: u < (q / p if p else 2.0)
    )


@speculative_accept.near_miss("accepts-the-wrong-side")
def _(target_probs, draft_probs, draft_ids, u):
    """Drafts are accepted where u is above the ratio: the higher p/q, the more often a draft must pass, so accept while u < p/q."""
    return _speculate(target_probs, draft_probs, draft_ids, u, accept=lambda u, p, q: q and u >= p / q)


@speculative_accept.near_miss("accepts-at-the-edge")
def _(target_probs, draft_probs, draft_ids, u):
    """A draft is accepted when u equals p/q, so one that the target rules out passes with u = 0: compare with <."""
    return _speculate(target_probs, draft_probs, draft_ids, u, accept=lambda u, p, q: u * q <= p)


@speculative_accept.near_miss("counts-after-rejection")
def _(target_probs, draft_probs, draft_ids, u):
    """Drafts behind a rejected one are counted: they were drafted after a token that is not in the text, so stop at the first rejection."""
    return _speculate(target_probs, draft_probs, draft_ids, u, stop=False)


@speculative_accept.near_miss("count-for-place")
def _(target_probs, draft_probs, draft_ids, u):
    """All accepted drafts are counted, those behind a rejected one too, and the residual is that of the row with this number: only the drafts before the first rejection count, and its row gives the residual."""
    rows = torch.arange(len(draft_ids))
    count = int((u * draft_probs[rows, draft_ids] < target_probs[rows, draft_ids]).sum())
    if count == len(draft_ids):
        return count, target_probs[-1]
    rest = (target_probs[count] - draft_probs[count]).clamp(min=0)
    return count, rest / rest.sum()


@speculative_accept.near_miss("counts-the-next-token")
def _(target_probs, draft_probs, draft_ids, u):
    """The next token is counted, too: the number is that of the accepted drafts alone, 0 when the first is rejected."""
    count, probs = _speculate(target_probs, draft_probs, draft_ids, u)
    return count + 1, probs


@speculative_accept.near_miss("target-at-rejection")
def _(target_probs, draft_probs, draft_ids, u):
    """At a rejection the target's own row is returned, so tokens that the draft favours come too often: return the residual max(0, target - draft), scaled to sum to 1."""
    return _speculate(target_probs, draft_probs, draft_ids, u, residual=lambda p, q: p)


@speculative_accept.near_miss("residual-of-the-draft")
def _(target_probs, draft_probs, draft_ids, u):
    """The residual is taken the wrong way round: what the draft leaves of the target is max(0, target - draft)."""
    return _speculate(target_probs, draft_probs, draft_ids, u, residual=lambda p, q: (q - p).clamp(min=0))


@speculative_accept.near_miss("absolute-residual")
def _(target_probs, draft_probs, draft_ids, u):
    """The residual is the absolute difference: where the draft exceeds the target nothing is left, so clamp at 0."""
    return _speculate(target_probs, draft_probs, draft_ids, u, residual=lambda p, q: (p - q).abs())


@speculative_accept.near_miss("second-to-last-row")
def _(target_probs, draft_probs, draft_ids, u):
    """When all drafts are accepted, the row of the last draft is returned: the next token comes from the row behind it, the last of the target."""
    return _speculate(target_probs, draft_probs, draft_ids, u, last=-2)
