"""What is right in the chapter on the KV cache, and what its near-misses mean.

Classes are judged by conversations: several updates, several instances, refusals after which all must be as before. Where a
conversation needs a tensor that stays with the implementation (to see whether the cache copied it, or whether what was
returned earlier still holds), `keep` calls a method and holds on to what it returns.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from autograder.inside.codec import Handle
from autograder.inside.engine import Outcome, tensors_in
from autograder.spec import Case, Exercise, Gen, Mismatch, Subject, call, scenario, served
from course_llm import kv_cache as ref
from course_llm.attention import apply_rope

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def sums_in_float32(case: Case, dtype: torch.dtype) -> Case:
    """Allows sums and exponentials in float32 where the inputs are float64, as the course's rules do."""
    return case.close(1e-5, 1e-5) if dtype is F64 else case


def rows(g: Gen, batch: int, heads: int, new: int, dim: int, dtype: torch.dtype = F32) -> tuple:
    """Keys and values of new tokens."""
    return g.randn(batch, heads, new, dim, dtype=dtype), g.randn(batch, heads, new, dim, dtype=dtype)


def heads_inside(g: Gen, batch: int, heads: int, new: int, dim: int) -> tuple:
    """Keys and values as a projection leaves them: the head axis moved by a transpose, not contiguous."""
    return tuple(g.randn(batch, new, heads, dim).transpose(1, 2) for _ in range(2))


def keep(s: Subject, handle: Handle, method: str, *args: Any) -> Handle:
    """Calls a method and keeps what it returns beside the implementation, uncopied."""
    return s.new((handle, method), *args)


def update(s: Subject, cache: Handle, k: torch.Tensor, v: torch.Tensor) -> None:
    """Updates and compares. Of a result in the wrong shape only the shapes are kept: rows that nothing was written to hold
    anything."""
    try:
        s.method(cache, "update", k, v)
    except Mismatch:
        outcome, want = s.transcript[-1], s.expected[len(s.transcript) - 1]
        shapes = [tuple(t.shape) for t in tensors_in(outcome.value)]
        if outcome.error is None and shapes != [tuple(t.shape) for t in tensors_in(want.value)]:
            s.transcript[-1] = Outcome(value=shapes)
        raise


def count(s: Subject, cache: Handle, name: str) -> None:
    """Reads a number that must be a Python int: a tensor changes under the hands of whoever has read it."""
    s.require(type(s.get(cache, name)) is int, f"{name} is not an int")


def numbers(want: Any) -> Callable[..., str | None]:
    """A verdict on plain numbers, ints or floats: the value counts, not the type."""

    def verdict(value: Any, *args: Any) -> str | None:
        expected, got = (want, value) if isinstance(want, tuple) else ((want,), (value,))
        if not isinstance(got, (tuple, list)) or len(got) != len(expected):
            return f"the result should be a tuple of {len(expected)} numbers"
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            what = f"the result's item {i}" if len(expected) > 1 else "the result"
            if isinstance(a, torch.Tensor) and a.dim() == 0:
                a = a.item()
            if isinstance(a, bool) or not isinstance(a, (int, float)):
                return f"{what} is not a number"
            if not abs(a - b) <= 1e-9 * abs(b):
                return f"{what} has the wrong value"
        return None

    return verdict


@functools.cache
def shared_buffers(*key: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Two buffers of a shape, dtype and device that all instances of a near-miss share, as class attributes would."""
    *shape, dtype, device = key
    return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))


# cached_attention

cached_attention = Exercise("cached_attention", ref, see="newest-row")


def _qkv(
    g: Gen, *batch: int, queries: int, keys: int, d_k: int = 4, d_v: int = 4, dtype: torch.dtype = F32
) -> tuple:
    return (
        g.randn(*batch, queries, d_k, dtype=dtype),
        g.randn(*batch, keys, d_k, dtype=dtype),
        g.randn(*batch, keys, d_v, dtype=dtype),
    )


def _torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """The independent fact: torch's attention with a mask that is aligned to the end."""
    queries, keys = q.shape[-2], k.shape[-2]
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **kwargs)


def _far_below(g: Gen, heads: int, kv_heads: int, queries: int, keys: int) -> Case:
    """Queries and keys whose scores lie far below 0: a mask of some finite number lets the later keys through."""
    q, k = (g.rand(2, h, n, 3, dtype=F64) + 0.5 for h, n in ((heads, queries), (kv_heads, keys)))
    case = call(q, -300 * k, g.randn(2, kv_heads, keys, 3, dtype=F64))
    return case.close(1e-3, 1e-3).says(f"all scores far below 0, {queries} queries on {keys} keys")


@cached_attention.group("values", share=2)
def _(g: Gen):
    """Attends from the last rows to all keys up to their own position."""
    for queries, keys, words in (
        (6, 6, "a whole prompt"),
        (1, 6, "one new token"),
        (3, 7, "a chunk behind a past"),
    ):
        args = _qkv(g, 2, 3, queries=queries, keys=keys)
        yield call(*args).expect(_torch_attention(*args)).says(words)
    yield call(*_qkv(g, 2, 3, queries=1, keys=1)).says("the first token")
    yield call(*_qkv(g, 2, 2, queries=5, keys=6)).says("a chunk behind one token")
    args = _qkv(g, 2, 3, queries=2, keys=5, d_k=4, d_v=6)
    yield call(*args).expect(_torch_attention(*args)).says("values wider than keys")
    yield call(*_qkv(g, 2, 3, queries=4, keys=4, d_k=8, d_v=2)).says("values narrower than keys")


@cached_attention.group("batch dimensions", share=1)
def _(g: Gen):
    """Takes any number of batch dimensions, and inputs that are not contiguous."""
    for batch in ((), (3,), (2, 1, 3, 2)):
        for queries, keys in ((4, 4), (2, 5), (1, 3)):
            yield call(*_qkv(g, *batch, queries=queries, keys=keys)).says(
                f"{len(batch)} batch dimensions, {queries} queries, {keys} keys"
            )
    q, k, v = (g.randn(2, n, 3, 4).transpose(1, 2) for n in (2, 5, 5))
    yield call(q, k, v).says("heads moved by a transpose")


@cached_attention.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype: float16, bfloat16, float64; masks whatever the size of the scores."""
    yield _far_below(g, 2, 2, 4, 4)
    yield _far_below(g, 2, 2, 3, 6)
    for dtype in (F16, BF16, F64):
        for queries, keys in ((4, 4), (2, 6), (1, 5)):
            case = call(*_qkv(g, 2, 2, queries=queries, keys=keys, dtype=dtype))
            yield sums_in_float32(case, dtype).says(f"{str(dtype).removeprefix('torch.')}, {queries} queries")


@cached_attention.group("gradient", share=1)
def _(g: Gen):
    """Lets gradients flow to q, k and v."""
    for queries, keys, words in ((4, 4, "a whole prompt"), (2, 5, "a chunk"), (1, 4, "one token")):
        yield call(*_qkv(g, 2, 2, queries=queries, keys=keys, d_v=3)).gradient().says(words)


@cached_attention.group("cost", share=1)
def _(g: Gen):
    """Costs the formula's FLOPs: nothing is computed for rows that are not asked for."""
    for queries, keys in ((1, 48), (3, 40)):
        args = _qkv(g, 2, 3, queries=queries, keys=keys, d_k=4, d_v=5)

        def run(s: Subject, args=args, queries=queries, keys=keys) -> None:
            flops = s.measure("cached_attention", *args).flops
            enough = 2 * 2 * 3 * queries * keys * (4 + 5)
            s.require(
                flops <= enough,
                f"{queries} queries on {keys} keys take {flops} FLOPs, 2 · batch · heads · queries · keys · (d_k + d_v) "
                f"= {enough} are enough",
            )

        yield scenario(run).says(f"{queries} queries, {keys} keys")


def _plain_attention(q, k, v, mask, scale=None):
    scores = (
        q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) if scale is None else q @ k.transpose(-2, -1) * scale
    )
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v


def _end_mask(q, k, shift=0):
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2] + shift)


@cached_attention.near_miss("no-mask")
def _(q, k, v):
    """Nothing is masked: right for one new token, which may see everything, but in a prompt or chunk earlier rows see later ones."""
    return _plain_attention(q, k, v, None)


@cached_attention.near_miss("square-mask-on-chunk")
def _(q, k, v):
    """The mask starts at the top left, as if the first query were the first token: the queries are the last rows, so align it to the end."""
    return _plain_attention(q, k, v, torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril())


@cached_attention.near_miss("square-mask-for-several")
def _(q, k, v):
    """One new token is right, but the mask of a chunk starts at the top left, as if its first query were the first token: the queries are the last rows, so align it to the end."""
    queries, keys = q.shape[-2], k.shape[-2]
    mask = torch.ones(queries, keys, dtype=torch.bool)
    return _plain_attention(q, k, v, mask.tril() if queries > 1 else mask)


@cached_attention.near_miss("chunk-unmasked")
def _(q, k, v):
    """Only a whole prompt is masked: in a chunk behind a past, too, a row may not see the rows after it."""
    return _plain_attention(q, k, v, _end_mask(q, k) if q.shape[-2] == k.shape[-2] else None)


@cached_attention.near_miss("sees-one-ahead")
def _(q, k, v):
    """Each row sees one token too many: query i of n sees keys up to position keys - n + i, itself included."""
    return _plain_attention(q, k, v, _end_mask(q, k, 1))


@cached_attention.near_miss("blind-to-itself")
def _(q, k, v):
    """A row does not see its own key: the newest token is in the cache when it attends, and belongs to what it sees."""
    return _plain_attention(q, k, v, _end_mask(q, k, -1))


@cached_attention.near_miss("newest-chunk-only")
def _(q, k, v):
    """The queries see the new keys only, not the past: everything in the cache lies before them and belongs to what they see."""
    past = k.shape[-2] - q.shape[-2]
    return _plain_attention(q, k, v, _end_mask(q, k) & (torch.arange(k.shape[-2]) >= past))


@cached_attention.near_miss("mask-after-softmax")
def _(q, k, v):
    """The mask is applied after the softmax: the weights of a row do not sum to 1. Mask the scores, then take the softmax."""
    weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)
    return weights.masked_fill(~_end_mask(q, k), 0.0) @ v


@cached_attention.near_miss("over-queries")
def _(q, k, v):
    """The softmax runs over the queries: each query shares out its attention over the keys, the last axis."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~_end_mask(q, k), -math.inf).softmax(-2) @ v


@cached_attention.near_miss("finite-number")
def _(q, k, v):
    """A finite number stands where -inf should: when all scores of a row lie far below 0, the hidden keys get the weight. Use -inf."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~_end_mask(q, k), -100.0).softmax(-1) @ v


@cached_attention.near_miss("unscaled")
def _(q, k, v):
    """The scores are not divided by the square root of d_k."""
    return _plain_attention(q, k, v, _end_mask(q, k), 1.0)


@cached_attention.near_miss("scaled-by-d-v")
def _(q, k, v):
    """The scores are divided by the square root of d_v: their spread comes from the width of the keys, d_k."""
    return _plain_attention(q, k, v, _end_mask(q, k), v.shape[-1] ** -0.5)


@cached_attention.near_miss("last-row-only")
def _(q, k, v):
    """Only the last row comes back: a prompt or a chunk has one output row for each of its queries."""
    return _plain_attention(q, k, v, _end_mask(q, k))[..., -1:, :]


@cached_attention.near_miss("computes-all-rows")
def _(q, k, v):
    """The result is right but not the cost: scores are computed for rows that are not asked for. Multiply the given queries with the keys, no more."""
    rest = k.shape[-2] - q.shape[-2]
    full = torch.cat([q.new_zeros(*q.shape[:-2], rest, q.shape[-1]), q], dim=-2)
    return ref.cached_attention(full, k, v)[..., rest:, :]


# KVCache

KVCache = Exercise("KVCache", ref, see="the-cache")


def _grow(g: Gen, chunks: tuple[int, ...], dtype: torch.dtype = F32, shape=(2, 3, 8, 4)) -> Case:
    """Updates with these numbers of rows, comparing what comes back and the length."""
    batch, heads, room, dim = shape
    given = [rows(g, batch, heads, n, dim, dtype) for n in chunks]

    def run(s: Subject) -> None:
        cache = s.new("KVCache", batch, heads, room, dim, dtype, "cpu")
        for k, v in given:
            update(s, cache, k, v)
            s.get(cache, "length")

    return scenario(run)


def _again(g: Gen, cls: str, dtype: torch.dtype) -> Case:
    """Updates, resets and updates."""
    given = [rows(g, 1, 2, n, 3, dtype) for n in (2, 3)]

    def run(s: Subject) -> None:
        cache = s.new(cls, 1, 2, 4, 3, dtype, "cpu")
        update(s, cache, *given[0])
        s.method(cache, "reset")
        update(s, cache, *given[1])

    return scenario(run)


@KVCache.group("values", share=2)
def _(g: Gen):
    """Returns the keys and the values of all tokens so far."""
    yield _grow(g, (1, 1, 1)).says("token by token")
    yield _grow(g, (4, 1, 1)).says("a prompt, then token by token")
    yield _grow(g, (2, 3, 1, 2)).says("chunks, up to the last free row")
    yield _grow(g, (8,)).says("a prompt that fills the cache")
    yield _grow(g, (3, 1, 2), shape=(1, 1, 9, 5)).says("one sequence, one head")
    first, second = heads_inside(g, 2, 3, 3, 4), heads_inside(g, 2, 3, 2, 4)

    def keywords(s: Subject) -> None:
        cache = s.new(
            "KVCache", batch=2, kv_heads=3, max_seq=6, head_dim=4, dtype=F32, device=torch.device("cpu")
        )
        s.get(cache, "length")
        for k, v in (first, second):
            update(s, cache, k=k, v=v)

    yield scenario(keywords).says("inputs that are not contiguous, arguments by keyword")


@KVCache.group("dtypes", share=1)
def _(g: Gen):
    """Stores and returns the dtype it was made with, after reset too, on the device it was made for."""
    for dtype in (F16, BF16, F64):
        yield _grow(g, (2, 1), dtype).says(str(dtype).removeprefix("torch."))
        yield _again(g, "KVCache", dtype).says(f"{str(dtype).removeprefix('torch.')}, after reset")
    given = rows(g, 1, 2, 2, 3)
    yield scenario(lambda s: _elsewhere(s, "KVCache", (1, 2, 4, 3), given)).says("another device")


@KVCache.group("reset", share=1)
def _(g: Gen):
    """Starts again after reset: length 0, no old rows, all the room."""
    given = [rows(g, 2, 3, n, 4) for n in (4, 2, 1, 5)]

    def run(s: Subject) -> None:
        cache = s.new("KVCache", 2, 3, 8, 4, F32, "cpu")
        update(s, cache, *given[0])
        update(s, cache, *given[1])
        s.method(cache, "reset")
        count(s, cache, "length")
        for k, v in given[1:]:
            update(s, cache, k, v)
            count(s, cache, "length")
        s.method(cache, "reset")
        s.method(cache, "reset")
        update(s, cache, *given[0])

    yield scenario(run).says("update, reset, update up to the end, reset twice, update")

    def empty(s: Subject) -> None:
        cache = s.new("KVCache", 2, 3, 8, 4, F32, "cpu")
        s.method(cache, "reset")
        s.get(cache, "length")
        update(s, cache, *given[0])

    yield scenario(empty).says("reset of an empty cache")


@KVCache.group("overflow", share=1)
def _(g: Gen):
    """Refuses rows that do not fit with a ValueError, and changes nothing."""
    three, two, one, nine = (rows(g, 2, 3, n, 4) for n in (3, 2, 1, 9))

    def run(s: Subject) -> None:
        cache = s.new("KVCache", 2, 3, 4, 4, F32, "cpu")
        update(s, cache, *three)
        count(s, cache, "length")
        s.method_raises(ValueError, cache, "update", *two)
        s.get(cache, "length")
        update(s, cache, *one)
        s.method_raises(ValueError, cache, "update", *one)
        s.get(cache, "length")

    yield scenario(run).says("a chunk that is one row too long, then one that fits, then one more")

    def empty(s: Subject) -> None:
        cache = s.new("KVCache", 2, 3, 8, 4, F32, "cpu")
        s.method_raises(ValueError, cache, "update", *nine)
        s.get(cache, "length")
        update(s, cache, *three)
        update(s, cache, *two)
        s.method(cache, "reset")
        update(s, cache, *three)
        s.method_raises(ValueError, cache, "update", *nine)
        update(s, cache, *two)

    yield scenario(empty).says("a prompt that is too long, and again after reset")


@KVCache.group("independent", share=1)
def _(g: Gen):
    """Shares no memory: not with another cache, not with the tensors handed in; earlier results stay right."""
    given = [rows(g, 1, 2, n, 3) for n in (2, 1, 3, 1)]

    def two(s: Subject) -> None:
        a = s.new("KVCache", 1, 2, 8, 3, F32, "cpu")
        update(s, a, *given[0])
        b = s.new("KVCache", 1, 2, 8, 3, F32, "cpu")
        s.get(b, "length")
        update(s, b, *given[1])
        update(s, a, *given[2])
        s.method(b, "reset")
        s.get(a, "length")
        update(s, a, *given[3])

    yield scenario(two).says("two caches side by side")
    yield scenario(lambda s: _overwrite_inputs(s, "KVCache", (1, 2, 8, 3), given[0], given[1])).says(
        "a tensor is changed after it was handed in"
    )
    full = rows(g, 1, 2, 8, 3)
    yield scenario(lambda s: _watch_inputs(s, "KVCache", (1, 2, 8, 3), full, given[2])).says(
        "a prompt that fills the cache is not written to"
    )
    yield scenario(lambda s: _look_back(s, "KVCache", (1, 2, 8, 3), given)).says(
        "earlier results after later updates"
    )


def _beside(s: Subject, cls: str, sizes: tuple, given: tuple, copy: tuple = ("clone",)) -> list[Handle]:
    """Brings keys and values into the worker, where they stay as tensors that the case can look at again."""
    batch, heads, room, dim = sizes
    source = s.new(cls, batch, heads, max(room, given[0].shape[2]), dim, F32, "cpu")
    returned = keep(s, source, "update", *given)
    return [keep(s, keep(s, returned, "__getitem__", i), *copy) for i in (0, 1)]


def _overwrite_inputs(s: Subject, cls: str, sizes: tuple, handed: tuple, after: tuple) -> None:
    """Hands tensors in, fills them with zeros afterwards, and looks whether the cache notices."""
    live = _beside(s, cls, sizes, handed)
    cache = s.new(cls, *sizes, F32, "cpu")
    update(s, cache, *live)
    for tensor in live:
        s.ask_method(tensor, "zero_")
    update(s, cache, *after)


def _watch_inputs(s: Subject, cls: str, sizes: tuple, handed: tuple, after: tuple) -> None:
    """Hands tensors in and looks whether the cache writes into them later."""
    live = _beside(s, cls, sizes, handed)
    cache = s.new(cls, *sizes, F32, "cpu")
    update(s, cache, *live)
    s.method(cache, "reset")
    update(s, cache, *after)
    for tensor in live:
        s.method(tensor, "clone")


def _elsewhere(s: Subject, cls: str, sizes: tuple, given: tuple) -> None:
    """Makes a cache on the device "meta", which keeps shapes and no numbers: they cannot be copied into buffers elsewhere.

    Whatever else fails there (a number cannot be read, tensors cannot be compared) says nothing about the cache.
    """
    batch, heads, room, dim = (
        sizes  # another size for the helper: instances that share memory are another case's business
    )
    live = _beside(s, cls, (batch, heads, room + 1, dim), given, ("to", "meta"))
    there = True
    try:
        cache = s.new(cls, *sizes, F32, "meta")
        s.ask_method(cache, "update", *live)
    except Mismatch:
        there = s.transcript[-1].error.name != "NotImplementedError"  # "Cannot copy out of meta tensor"
    s.transcript[-1] = Outcome()
    s.require(there, "the buffers do not lie on the device that was asked for")


def _look_back(s: Subject, cls: str, sizes: tuple, given: list) -> None:
    """Keeps the first result and reads it again after every later update."""
    cache = s.new(cls, *sizes, F32, "cpu")
    returned = keep(s, cache, "update", *given[0])
    for k, v in given[1:]:
        update(s, cache, k, v)
        s.method(returned, "__getitem__", 0)
        s.method(returned, "__getitem__", 1)


@KVCache.group("allocation", share=2)
def _(g: Gen):
    """Allocates the room for all tokens once, at the start."""
    k, v = rows(g, 1, 2, 1, 4)

    def run(s: Subject) -> None:
        made = s.measure("KVCache", 1, 2, 512, 4, F32, "cpu").largest
        s.transcript.pop()  # the instance itself cannot be compared
        cache = s.new("KVCache", 1, 2, 512, 4, F32, "cpu")
        first = s.measure((cache, "update"), k, v).largest
        room = 2 * 512 * 4
        s.require(
            max(made, first) >= room,
            f"the largest tensor made holds {max(made, first)} elements, room for all tokens takes {room}",
        )

    yield scenario(run).says("room for 512 tokens")


class _Store:
    """What the near-misses of a cache share: two buffers and a length."""

    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        self.k = torch.zeros(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.length = 0

    def check(self, new):
        if self.length + new > self.k.shape[2]:
            raise ValueError(f"KVCache.update needs length + new <= max_seq, got {self.length} + {new}")

    def write(self, start, k, v):
        self.k[:, :, start : start + k.shape[2]] = k
        self.v[:, :, start : start + k.shape[2]] = v

    def update(self, k, v):
        self.check(k.shape[2])
        self.write(self.length, k, v)
        self.length += k.shape[2]
        return self.k[:, :, : self.length], self.v[:, :, : self.length]

    def reset(self):
        self.length = 0


@KVCache.near_miss("new-part-only")
class _(_Store):
    """Only the new rows come back: attention needs the keys and values of every token so far, so return the filled part."""

    def update(self, k, v):
        super().update(k, v)
        return k, v


@KVCache.near_miss("whole-buffer")
class _(_Store):
    """The empty rows come back too: return the first `length` rows only, or attention reads tokens that do not exist."""

    def update(self, k, v):
        super().update(k, v)
        return self.k, self.v


@KVCache.near_miss("stale-after-reset")
class _(_Store):
    """The rows are cleared at reset but the count is not: set length to 0, and the old rows no longer matter."""

    def reset(self):
        self.k.zero_()
        self.v.zero_()


@KVCache.near_miss("concatenates")
class _(_Store):
    """The cache grows by concatenation, which copies every key and value for each new token: allocate max_seq rows once and write into them."""

    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        super().__init__(batch, kv_heads, 0, head_dim, dtype, device)
        self.max_seq = max_seq

    def update(self, k, v):
        if self.length + k.shape[2] > self.max_seq:
            raise ValueError(
                f"KVCache.update needs length + new <= max_seq, got {self.length} + {k.shape[2]}"
            )
        self.k, self.v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        self.length += k.shape[2]
        return self.k, self.v

    def reset(self):
        self.k, self.v, self.length = self.k[:, :, :0], self.v[:, :, :0], 0


@KVCache.near_miss("drops-overflow")
class _(_Store):
    """Rows that do not fit are dropped without a word: raise a ValueError before anything is stored."""

    def update(self, k, v):
        room = self.k.shape[2] - self.length
        return super().update(k[:, :, :room], v[:, :, :room])


@KVCache.near_miss("stores-what-fits")
class _(_Store):
    """The rows that fit are stored before the others are refused: check first, then change, so that a refused update changes nothing."""

    def update(self, k, v):
        room = self.k.shape[2] - self.length
        if k.shape[2] > room:
            super().update(k[:, :, :room], v[:, :, :room])
            raise ValueError(f"KVCache.update needs new <= {room}, got {k.shape[2]}")
        return super().update(k, v)


@KVCache.near_miss("counts-before-check")
class _(_Store):
    """length is raised before the check, so a refused update is counted all the same: check first, then change."""

    def update(self, k, v):
        start, self.length = self.length, self.length + k.shape[2]
        if self.length > self.k.shape[2]:
            raise ValueError(f"KVCache.update needs length <= max_seq, got {self.length}")
        self.write(start, k, v)
        return self.k[:, :, : self.length], self.v[:, :, : self.length]


@KVCache.near_miss("writes-at-zero")
class _(_Store):
    """Every update writes at row 0 and overwrites the tokens before: write at row `length`, then raise it."""

    def update(self, k, v):
        self.check(k.shape[2])
        self.write(0, k, v)
        self.length += k.shape[2]
        return self.k[:, :, : self.length], self.v[:, :, : self.length]


@KVCache.near_miss("one-row-at-a-time")
class _(_Store):
    """length grows by 1 whatever comes: a chunk of n rows makes it grow by n."""

    def update(self, k, v):
        self.check(k.shape[2])
        self.write(self.length, k, v)
        self.length += 1
        end = self.length - 1 + k.shape[2]
        return self.k[:, :, :end], self.v[:, :, :end]


@KVCache.near_miss("always-float32")
class _(_Store):
    """The buffers are float32 whatever dtype is asked for: pass dtype on when you allocate them."""

    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        super().__init__(batch, kv_heads, max_seq, head_dim, F32, device)


@KVCache.near_miss("always-on-the-cpu")
class _(_Store):
    """The buffers lie on the CPU whatever device is asked for: pass device on when you allocate them."""

    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        super().__init__(batch, kv_heads, max_seq, head_dim, dtype, "cpu")


@KVCache.near_miss("values-from-keys")
class _(_Store):
    """The values that come back are keys: keep two buffers, one for k and one for v."""

    def update(self, k, v):
        keys, _ = super().update(k, k)
        return keys, keys


@KVCache.near_miss("shared-by-all")
class _(_Store):
    """All caches share one memory (a class attribute or a default argument): make the buffers in __init__, for each cache."""

    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        super().__init__(batch, kv_heads, max_seq, head_dim, dtype, device)
        self.k, self.v = shared_buffers(batch, kv_heads, max_seq, head_dim, dtype, str(device))


@KVCache.near_miss("keeps-the-callers-tensor")
class _(_Store):
    """The cache keeps the tensor it is handed, not a copy: when the caller changes it, the cache changes. Copy into the buffer."""

    def update(self, k, v):
        self.check(k.shape[2])
        if self.length == 0:
            self.first = k, v
            self.length = k.shape[2]
            return k, v
        self.write(0, *self.first)
        return super().update(k, v)


@KVCache.near_miss("keeps-a-full-prompt")
class _(_Store):
    """A prompt that fills the cache is kept as it was handed in, and overwritten later: copy it into the buffer."""

    def update(self, k, v):
        if self.length == 0 and k.shape[2] == self.k.shape[2]:
            self.k, self.v, self.length = k, v, k.shape[2]
            return k, v
        return super().update(k, v)


@KVCache.near_miss("keys-and-values-swapped")
class _(_Store):
    """Keys and values have changed places on the way out: return the pair in the order (keys, values)."""

    def update(self, k, v):
        keys, values = super().update(k, v)
        return values, keys


@KVCache.near_miss("last-row-refused")
class _(_Store):
    """The last free row is refused: length + new may be max_seq, only more does not fit."""

    def check(self, new):
        super().check(new + 1)


@KVCache.near_miss("refusal-forgets-all")
class _(_Store):
    """A refused update empties the cache: it must change nothing, the tokens before are still there."""

    def check(self, new):
        try:
            super().check(new)
        except ValueError:
            self.length = 0
            raise


@KVCache.near_miss("length-is-a-tensor")
class _(_Store):
    """length is a tensor: whoever has read it sees it change, and it costs a look at the device. Keep an int."""

    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        super().__init__(batch, kv_heads, max_seq, head_dim, dtype, device)
        self.reset()

    def reset(self):
        self.length = torch.tensor(0)


@KVCache.near_miss("rows-move")
class _(_Store):
    """The rows move when new ones come, and so does what was returned earlier: leave a row where it is and write behind it."""

    def update(self, k, v):
        new, room = k.shape[2], self.k.shape[2]
        self.check(new)
        for buffer, rows_ in ((self.k, k), (self.v, v)):
            buffer[:, :, : room - new] = buffer[:, :, new:].clone()
            buffer[:, :, room - new :] = rows_
        self.length += new
        return self.k[:, :, room - self.length :], self.v[:, :, room - self.length :]


# rope_at

rope_at = Exercise("rope_at", ref, see="cache-positions")

FAR = 5e-3  # float32 holds an angle of 10,000 radians to about 1e-3


@rope_at.group("values", share=3)
def _(g: Gen):
    """Rotates rows by start, start + 1, … ."""
    yield call(g.randn(2, 3, 5, 8), 0).says("from position 0")
    yield call(g.randn(2, 3, 1, 8), 7).says("one new token at position 7")
    yield call(g.randn(2, 3, 4, 8), 3).says("a chunk from position 3")
    yield (
        call(g.tensor([[1.0, 0.0]]), 3)
        .expect(g.tensor([[math.cos(3), math.sin(3)]]))
        .says("one pair, by hand")
    )
    x = g.randn(2, 9, 6)
    yield call(x[:, 4:], 4).expect(apply_rope(x, torch.arange(9))[:, 4:]).says("the end of a longer text")


@rope_at.group("decode", share=1)
def _(g: Gen):
    """Gives token by token what the whole text gives at once."""
    x = g.randn(2, 2, 6, 8)

    def run(s: Subject) -> None:
        full = s.call("rope_at", x, 0)
        for cut in (1, 4):
            parts = [s.call("rope_at", x[:, :, :cut], 0)]
            parts += [s.call("rope_at", x[:, :, i : i + 1], i) for i in range(cut, 6)]
            s.require_close(torch.cat(parts, dim=2), full, "decoding differs from the whole text")

    yield scenario(run).says("a prompt and single tokens against the whole text")


@rope_at.group("batch dimensions", share=1)
def _(g: Gen):
    """Takes any number of batch dimensions, and inputs that are not contiguous."""
    for batch in ((), (3,), (2, 1, 3, 2)):
        yield call(g.randn(*batch, 3, 4), 5).says(f"{len(batch)} batch dimensions")
    yield call(g.randn(2, 5, 3, 4).transpose(1, 2), 2).says("heads moved by a transpose")


@rope_at.group("far", share=1)
def _(g: Gen):
    """Holds far from the start, up to position 10,000."""
    yield call(g.randn(2, 1, 8), 9_999).close(FAR, FAR).says("one token at position 9,999")
    yield call(g.randn(2, 4, 8), 2_501).close(FAR, FAR).says("a chunk from position 2,501")


@rope_at.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype: float16, bfloat16, float64; half precision far from the start too."""
    for dtype in (F16, BF16):
        yield call(g.randn(2, 3, 8, dtype=dtype), 4).says(str(dtype).removeprefix("torch."))
    yield call(g.randn(2, 3, 8, dtype=F16), 3_001).close(1e-2, 1e-2).says("float16 at position 3,001")
    yield call(g.randn(2, 3, 8, dtype=BF16), 301).says("bfloat16 at position 301")
    yield call(g.randn(2, 3, 8, dtype=F64), 4).close(1e-5, 1e-5).says("float64")


@rope_at.group("gradient", share=1)
def _(g: Gen):
    """Lets gradients flow to x."""
    yield call(g.randn(2, 3, 4), 6).gradient().says("a chunk")


@rope_at.near_miss("starts-at-zero")
def _(x, start):
    """The rows are rotated as if the text began with them: new rows stand at positions start, start + 1, …, behind what is cached."""
    return apply_rope(x, torch.arange(x.shape[-2]))


@rope_at.near_miss("rotated-twice")
def _(x, start):
    """The rows are rotated twice, as a cached key is when it is rotated again at every step: rotate each key once, when it is new."""
    positions = torch.arange(start, start + x.shape[-2])
    return apply_rope(apply_rope(x, positions), positions)


@rope_at.near_miss("one-position-for-all")
def _(x, start):
    """Every row of the chunk gets the same position: right for one token, but row i stands at start + i."""
    return apply_rope(x, torch.full((x.shape[-2],), start))


@rope_at.near_miss("counts-from-one")
def _(x, start):
    """The rows stand one position too far: the first of them is at `start` itself, since positions count from 0."""
    return apply_rope(x, torch.arange(start + 1, start + 1 + x.shape[-2]))


@rope_at.near_miss("ends-at-start")
def _(x, start):
    """The last row is put at `start`: start is the position of the first row, the cache's length before the update."""
    return apply_rope(x, torch.arange(start - x.shape[-2] + 1, start + 1))


@rope_at.near_miss("pairs-halves")
def _(x, start):
    """Column i is paired with column i + head_dim/2: here the pairs are neighbours (2i, 2i + 1), as in `apply_rope`."""
    half = x.shape[-1] // 2
    order = torch.arange(x.shape[-1]).view(2, half).T.flatten()
    rotated = apply_rope(x[..., order], torch.arange(start, start + x.shape[-2]))
    return rotated[..., order.argsort()]


@rope_at.near_miss("half-precision-angles")
def _(x, start):
    """The positions are rounded to the dtype of x, and half precision cannot hold them: compute the angles in float32."""
    positions = torch.arange(start, start + x.shape[-2]).to(x.dtype)
    return apply_rope(x, positions.to(torch.int64))


# generate_cached

generate_cached = Exercise("generate_cached", ref, see="generate-with-cache")


class _Past:
    """A cache as the model hands it out: what was read so far, as a running hash, and how much."""

    def __init__(self, state: torch.Tensor, seen: int):
        self.state, self.seen = state, seen


def _model(g: Gen, kind: str = "new object", vocab: int = 11) -> tuple[Callable, Callable]:
    """A model whose next token depends on every token before, in their order; and the same without a cache.

    The cache is a new object each time, one object that is changed and returned again, or plain tensors.
    """
    table = torch.stack([g.perm(vocab) for _ in range(101)]).float()  # no ties within a row

    def read(ids: torch.Tensor, state: torch.Tensor, seen: int) -> tuple:
        states = []
        for i in range(ids.shape[1]):
            state = (state * 31 + (ids[:, i] + 1) * (seen + i + 7)) % 101
            states.append(state)
        return table[torch.stack(states, dim=1)], state

    def start(ids: torch.Tensor) -> torch.Tensor:
        return torch.full((ids.shape[0],), 5)

    def model(ids, cache):
        if kind == "tensors":
            state, seen = (start(ids), 0) if cache is None else (cache[0], int(cache[1]))
            logits, state = read(ids, state, seen)
            return logits, (state, torch.tensor(seen + ids.shape[1]))
        past = _Past(start(ids), 0) if cache is None else cache
        logits, state = read(ids, past.state, past.seen)
        if kind == "new object":
            return logits, _Past(state, past.seen + ids.shape[1])
        past.state, past.seen = state, past.seen + ids.shape[1]
        return logits, past

    def plain(ids, new):
        for _ in range(new):
            logits, _ = read(ids, start(ids), 0)
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        return ids

    return model, plain


def _script(text: list[list[int]], prompt: int, vocab: int = 9) -> Callable:
    """A model that writes the given text whatever it reads; its cache counts the tokens read."""
    rows_ = torch.tensor(text)

    def model(ids, cache):
        seen = (0 if cache is None else cache.seen) + ids.shape[1]
        logits = torch.zeros(*ids.shape, vocab)
        position = min(seen - prompt, rows_.shape[1] - 1)
        if position >= 0:
            logits[torch.arange(len(rows_)), -1, rows_[:, position]] = 1.0
        return logits, _Past(rows_[:, 0], seen)

    return model


@generate_cached.group("values", share=2)
def _(g: Gen):
    """Writes the same tokens as without a cache."""
    for kind in ("new object", "tensors", "same object"):
        for batch, prompt, new in ((1, 4, 5), (3, 5, 6), (2, 1, 4), (2, 3, 1)):
            model, plain = _model(g, kind)
            ids = g.ints(0, 11, batch, prompt)
            yield (
                call(served(model), ids, new)
                .expect(plain(ids, new))
                .says(f"{batch} rows, prompt of {prompt}, {new} new tokens")
            )
    ids = g.ints(0, 11, 2, 3)
    yield call(served(_model(g)[0]), ids, 0).expect(ids).says("no new token: the prompt")


@generate_cached.group("end of text", share=2)
def _(g: Gen):
    """Fills finished rows with EOS and stops when all have finished."""
    two = [[3, 8, 5, 6, 7], [4, 3, 2, 8, 7]]
    ids = g.tensor([[2, 1], [1, 4]])
    want = g.tensor([[2, 1, 3, 8, 8, 8], [1, 4, 4, 3, 2, 8]])
    yield (
        call(served(_script(two, 2)), ids, 5, eos_id=8)
        .expect(want)
        .says("two rows that end at different tokens")
    )
    yield (
        call(served(_script(two, 2)), ids, 3, 8)
        .expect(g.tensor([[2, 1, 3, 8, 8], [1, 4, 4, 3, 2]]))
        .says("one row ends, the other is cut off")
    )
    eos_in_prompt = g.tensor([[8, 1], [1, 8]])
    yield call(served(_script(two, 2)), eos_in_prompt, 4, 8).says("an EOS in the prompt does not count")
    yield call(served(_script([[3, 8, 5]], 1)), g.tensor([[8]]), 3).says(
        "without eos_id no token ends the text"
    )
    yield call(served(_script([[3, 0, 5, 1]], 2)), g.tensor([[4, 4]]), 4, 0).says("EOS may be token 0")
    yield call(served(_script([[6, 2], [6, 3]], 2)), ids, 2, 6).says("every row ends at once")
    three = [[1, 2, 7, 4, 4], [7, 3, 3, 3, 3], [5, 5, 5, 5, 7]]
    yield call(served(_script(three, 3)), g.ints(0, 7, 3, 3), 6, eos_id=7).says("three rows")


@generate_cached.group("ties", share=1)
def _(g: Gen):
    """Gives ties to the lower token id."""
    high = torch.zeros(2, 9)
    high[0, [3, 6]], high[1, [8, 5, 7]] = 2.0, 1.0

    def model(ids, cache):
        return high[:, None].expand(-1, ids.shape[1], -1).clone(), _Past(ids[:, 0], 0)

    yield call(served(model), g.ints(0, 9, 2, 3), 2).says("several tokens share the highest logit")


@generate_cached.group("cost", share=1)
def _(g: Gen):
    """Pushes prompt + new − 1 tokens per row through the model."""
    for batch, prompt, new in ((2, 6, 5), (1, 4, 1), (3, 1, 6)):
        model, _ = _model(g)
        yield _counted(model, g.ints(0, 11, batch, prompt), new, None, new).says(
            f"prompt of {prompt}, {new} new tokens"
        )
    early = _script([[3, 8, 5, 6, 7], [4, 3, 8, 8, 7]], 2)
    yield _counted(early, g.ints(0, 8, 2, 2), 5, 8, 3).says("every row has ended after three tokens")


def _counted(model: Callable, ids: torch.Tensor, new: int, eos_id: int | None, written: int) -> Case:
    def run(s: Subject) -> None:
        counter = served(model)
        s.call("generate_cached", counter, ids, new, eos_id)
        batch, prompt = ids.shape
        enough = batch * (prompt + written - 1)
        s.require(
            counter.tokens == enough,
            f"{counter.tokens} tokens go through the model, {batch} · (prompt + new − 1) = {enough} are enough",
        )

    return scenario(run)


def _loop(step: Callable, eos: Callable | None = None) -> Callable:
    """The loop that the near-misses share; `step(model, ids, unread, cache)` gives logits and cache."""

    def generate(model, ids, max_new_tokens, eos_id=None):
        finished, unread, cache = torch.zeros(len(ids), dtype=torch.bool), ids, None
        for _ in range(max_new_tokens):
            logits, cache = step(model, ids, unread, cache)
            token = logits.argmax(-1)
            if eos_id is not None:
                token = token.masked_fill(finished, eos_id)
                finished = finished | (token == eos_id)
            unread = token[:, None]
            ids = torch.cat([ids, unread], dim=1)
            if eos_id is not None and finished.all():
                break
        return ids

    return generate


@generate_cached.near_miss("reads-everything-again")
def _(model, ids, max_new_tokens, eos_id=None):
    """The tokens are right, but the whole text goes through the model at every step, and the cache is not used: after the prompt hand in the newest token and the cache."""
    return _loop(lambda model, ids, unread, cache: _last(model(ids, None)))(
        model, ids, max_new_tokens, eos_id
    )


def _last(answer: tuple) -> tuple:
    return answer[0][:, -1], answer[1]


@generate_cached.near_miss("prefix-and-cache")
def _(model, ids, max_new_tokens, eos_id=None):
    """The whole text is handed in together with a cache that holds it already, so every token is read twice: hand in the newest token only."""
    return _loop(lambda model, ids, unread, cache: _last(model(ids, cache)))(
        model, ids, max_new_tokens, eos_id
    )


@generate_cached.near_miss("loses-the-prefill-logit")
def _(model, ids, max_new_tokens, eos_id=None):
    """The logits of the prefill are thrown away and the last prompt token is read a second time: the last row of the prefill's logits gives the first new token."""
    if max_new_tokens == 0:
        return ids

    def step(model, ids, unread, cache):
        if cache is None:
            _, cache = model(ids, None)
            unread = ids[:, -1:]
        return _last(model(unread, cache))

    return _loop(step)(model, ids, max_new_tokens, eos_id)


@generate_cached.near_miss("no-cache-no-prefix")
def _(model, ids, max_new_tokens, eos_id=None):
    """The newest token is read without the cache, so the model forgets the text before it: hand the returned cache in again."""
    return _loop(lambda model, ids, unread, cache: _last(model(unread, None)))(
        model, ids, max_new_tokens, eos_id
    )


@generate_cached.near_miss("keeps-the-first-cache")
def _(model, ids, max_new_tokens, eos_id=None):
    """The cache of the prefill is handed in at every step: the model returns a new one each time, so keep that."""
    first = []

    def step(model, ids, unread, cache):
        logits, new = model(unread, first[0] if first else None)
        if not first:
            first.append(new)
        return logits[:, -1], new

    return _loop(step)(model, ids, max_new_tokens, eos_id)


@generate_cached.near_miss("first-row-of-logits")
def _(model, ids, max_new_tokens, eos_id=None):
    """The logits behind the first token of the prompt are used: the next token comes from the last row, `logits[:, -1]`."""

    def step(model, ids, unread, cache):
        logits, cache = model(unread, cache)
        return logits[:, 0], cache

    return _loop(step)(model, ids, max_new_tokens, eos_id)


@generate_cached.near_miss("goes-on-after-eos")
def _(model, ids, max_new_tokens, eos_id=None):
    """A finished row goes on writing: fill it with eos_id until the others have finished."""
    finished, unread, cache = torch.zeros(len(ids), dtype=torch.bool), ids, None
    for _ in range(max_new_tokens):
        logits, cache = model(unread, cache)
        unread = logits[:, -1].argmax(-1, keepdim=True)
        finished = finished | (unread[:, 0] == eos_id)
        ids = torch.cat([ids, unread], dim=1)
        if finished.all():
            break
    return ids


@generate_cached.near_miss("stops-at-the-first-row")
def _(model, ids, max_new_tokens, eos_id=None):
    """Generation stops when the first row has finished: go on until every row has."""
    unread, cache = ids, None
    for _ in range(max_new_tokens):
        logits, cache = model(unread, cache)
        unread = logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, unread], dim=1)
        if eos_id is not None and (unread == eos_id).any():
            break
    return ids


@generate_cached.near_miss("stops-when-all-end-at-once")
def _(model, ids, max_new_tokens, eos_id=None):
    """Generation stops only when all rows write EOS in the same step: remember which rows have finished, and fill them."""
    unread, cache = ids, None
    for _ in range(max_new_tokens):
        logits, cache = model(unread, cache)
        unread = logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, unread], dim=1)
        if eos_id is not None and (unread == eos_id).all():
            break
    return ids


@generate_cached.near_miss("filled-with-zero")
def _(model, ids, max_new_tokens, eos_id=None):
    """Finished rows are filled with token 0: fill them with eos_id."""
    text = ref.generate_cached(model, ids, max_new_tokens, eos_id)
    new = text[:, ids.shape[1] :]
    ended = (new == eos_id).long().cumsum(1) if eos_id is not None else torch.zeros_like(new)
    return torch.cat([ids, new.masked_fill(ended > 1, 0)], dim=1)


@generate_cached.near_miss("last-eos-not-written")
def _(model, ids, max_new_tokens, eos_id=None):
    """The step in which the last row ends is not written: add its tokens, the EOS belongs to the text, then stop."""
    text = ref.generate_cached(model, ids, max_new_tokens, eos_id)
    if eos_id is None or not (text[:, ids.shape[1] :] == eos_id).any(1).all():
        return text
    return text[:, :-1]


@generate_cached.near_miss("zero-taken-for-none")
def _(model, ids, max_new_tokens, eos_id=None):
    """An eos_id of 0 is taken for none: 0 is a token like any other, so ask whether it `is None`."""
    return ref.generate_cached(model, ids, max_new_tokens, eos_id or None)


@generate_cached.near_miss("new-tokens-only")
def _(model, ids, max_new_tokens, eos_id=None):
    """Only the new tokens come back: return the prompt with the new tokens behind it."""
    return ref.generate_cached(model, ids, max_new_tokens, eos_id)[:, ids.shape[1] :]


@generate_cached.near_miss("one-token-too-many")
def _(model, ids, max_new_tokens, eos_id=None):
    """One token more is written than asked for: max_new_tokens counts the one that the prompt's logits give, too."""
    return ref.generate_cached(model, ids, max_new_tokens + 1, eos_id)


@generate_cached.near_miss("one-token-at-least")
def _(model, ids, max_new_tokens, eos_id=None):
    """A token is written though max_new_tokens is 0: then the prompt comes back as it is."""
    return ref.generate_cached(model, ids, max(1, max_new_tokens), eos_id)


@generate_cached.near_miss("first-row-for-all")
def _(model, ids, max_new_tokens, eos_id=None):
    """Every row gets the token of the first: each has logits of its own, so take the arg-max over the last axis alone."""

    def step(model, ids, unread, cache):
        logits, cache = _last(model(unread, cache))
        return logits[:1].expand_as(logits), cache

    return _loop(step)(model, ids, max_new_tokens, eos_id)


@generate_cached.near_miss("stops-at-nothing")
def _(model, ids, max_new_tokens, eos_id=None):
    """Generation goes on when every row has finished, and only EOS is added: stop there."""
    finished, unread, cache = torch.zeros(len(ids), dtype=torch.bool), ids, None
    for _ in range(max_new_tokens):
        logits, cache = model(unread, cache)
        token = logits[:, -1].argmax(-1)
        if eos_id is not None:
            token = token.masked_fill(finished, eos_id)
            finished = finished | (token == eos_id)
        unread = token[:, None]
        ids = torch.cat([ids, unread], dim=1)
    return ids


@generate_cached.near_miss("prompt-eos-counts")
def _(model, ids, max_new_tokens, eos_id=None):
    """An EOS in the prompt ends the row at once: only an EOS that the model writes counts."""
    finished = (ids == eos_id).any(dim=1) if eos_id is not None else torch.zeros(len(ids), dtype=torch.bool)
    unread, cache = ids, None
    for _ in range(max_new_tokens):
        logits, cache = model(unread, cache)
        token = logits[:, -1].argmax(-1)
        if eos_id is not None:
            token = token.masked_fill(finished, eos_id)
            finished = finished | (token == eos_id)
        unread = token[:, None]
        ids = torch.cat([ids, unread], dim=1)
        if finished.all():
            break
    return ids


@generate_cached.near_miss("last-prompt-token-counts")
def _(model, ids, max_new_tokens, eos_id=None):
    """A prompt that ends with EOS ends the row at once: only an EOS that the model writes counts."""
    finished = ids[:, -1] == eos_id if eos_id is not None else torch.zeros(len(ids), dtype=torch.bool)
    unread, cache = ids, None
    for _ in range(max_new_tokens):
        logits, cache = model(unread, cache)
        token = logits[:, -1].argmax(-1)
        if eos_id is not None:
            token = token.masked_fill(finished, eos_id)
            finished = finished | (token == eos_id)
        unread = token[:, None]
        ids = torch.cat([ids, unread], dim=1)
        if finished.all():
            break
    return ids


@generate_cached.near_miss("reads-the-last-token-too")
def _(model, ids, max_new_tokens, eos_id=None):
    """The tokens are right, but the last one written is still pushed through the model, and nobody reads what comes out: stop before."""
    text = ref.generate_cached(model, ids, max_new_tokens, eos_id)
    if max_new_tokens:
        model(text[:, -1:], None)
    return text


@generate_cached.near_miss("higher-id-wins")
def _(model, ids, max_new_tokens, eos_id=None):
    """Of equal logits the higher token id is taken: ties go to the lower one, as `argmax` gives it."""

    def step(model, ids, unread, cache):
        logits, cache = model(unread, cache)
        return logits[:, -1].flip(-1), cache

    def generate(model, ids, new, eos_id):
        unread, cache, finished = ids, None, torch.zeros(len(ids), dtype=torch.bool)
        for _ in range(new):
            logits, cache = step(model, ids, unread, cache)
            token = logits.shape[-1] - 1 - logits.argmax(-1)
            if eos_id is not None:
                token = token.masked_fill(finished, eos_id)
                finished = finished | (token == eos_id)
            unread = token[:, None]
            ids = torch.cat([ids, unread], dim=1)
            if eos_id is not None and finished.all():
                break
        return ids

    return generate(model, ids, max_new_tokens, eos_id)


# positions_from_padding

positions_from_padding = Exercise("positions_from_padding", ref, see="unequal-prompts")


def _padded(*pads: int, seq: int) -> Case:
    """Rows with so many padding tokens at the left; what an answer puts on padding is not looked at."""
    real = torch.arange(seq) >= torch.tensor(pads)[:, None]
    want = torch.arange(seq) - torch.tensor(pads)[:, None]

    def run(s: Subject) -> None:
        value = s.ask("positions_from_padding", real)
        changed = s.transcript[-1].changed
        if isinstance(value, torch.Tensor) and value.shape == real.shape:
            s.transcript[-1] = Outcome(value=torch.where(real, value, 0))
        is_int64 = isinstance(value, torch.Tensor) and value.dtype == torch.int64
        s.require(is_int64, "the result should be an int64 tensor")
        s.require(
            value.shape == real.shape,
            f"the result has shape {tuple(value.shape)}, it should have {tuple(real.shape)}",
        )
        wrong = int((value != want)[real].sum())
        s.require(wrong == 0, f"the positions of {wrong} of {int(real.sum())} real tokens are wrong")
        s.require(not changed, "argument 1 is changed in place")

    return scenario(run)


@positions_from_padding.group("values", share=2)
def _(g: Gen):
    """Counts from 0 at the first real token of each row."""
    yield _padded(2, 0, 4, seq=5).says("three rows with 2, 0 and 4 padding tokens")
    yield _padded(3, seq=7).says("one row")
    pads = [g.python.randint(0, 8) for _ in range(5)]
    yield _padded(*pads, seq=9).says("five rows")
    yield _padded(1, 2, 3, 4, seq=5).says("every row padded differently")


@positions_from_padding.group("edges", share=1)
def _(g: Gen):
    """Holds without padding, with one real token, with one token in all, and in a long batch."""
    yield _padded(0, 0, seq=6).says("no padding")
    yield _padded(5, 5, seq=6).says("one real token in each row")
    yield _padded(0, seq=1).says("a single token")
    yield _padded(*range(0, 300, 7), seq=300).says("over 255 positions")


def _arange(real):
    return torch.arange(real.shape[1]).expand(real.shape)


@positions_from_padding.near_miss("ignores-padding")
def _(real):
    """Padding takes up positions: count from the first real token of each row, as if the padding were not there."""
    return _arange(real).clone()


@positions_from_padding.near_miss("shared-across-the-batch")
def _(real):
    """Every row gets the positions of the first: rows have different amounts of padding, so count in each of them."""
    first = (real[:1].long().cumsum(-1) - 1).clamp(min=0)
    return first.expand(real.shape).clone()


@positions_from_padding.near_miss("least-padding-for-all")
def _(real):
    """One shift, that of the longest prompt, is used for the whole batch: each row has its own."""
    pad = (~real).sum(-1).min()
    return _arange(real) - pad


@positions_from_padding.near_miss("most-padding-for-all")
def _(real):
    """One shift, that of the shortest prompt, is used for the whole batch: each row has its own."""
    pad = (~real).sum(-1).max()
    return _arange(real) - pad


@positions_from_padding.near_miss("takes-off-the-tokens")
def _(real):
    """The number of real tokens is taken off, and not that of the padding: position = column - padding."""
    return _arange(real) - real.sum(-1, keepdim=True)


@positions_from_padding.near_miss("counts-from-one")
def _(real):
    """The first real token is at position 1: a cumulative sum counts the token itself, so take 1 off."""
    return real.long().cumsum(-1)


@positions_from_padding.near_miss("counts-over-the-batch")
def _(real):
    """The sum runs over the batch: count along the text, the last axis, in each row."""
    return (real.long().cumsum(0) - 1).clamp(min=0)


@positions_from_padding.near_miss("adds-the-padding")
def _(real):
    """The padding is added to the position instead of taken off: position = column - padding."""
    return _arange(real) + (~real).sum(-1, keepdim=True)


@positions_from_padding.near_miss("counts-from-the-right")
def _(real):
    """The positions run backwards: the first real token of a row is at 0, the last at its length - 1."""
    return _arange(real).flip(-1).clone()


@positions_from_padding.near_miss("eight-bits")
def _(real):
    """Sums in eight bits wrap at 256, and positions are int64: count in int64."""
    return real.to(torch.uint8).cumsum(-1, dtype=torch.uint8).long() - 1


# decode_intensity

decode_intensity = Exercise("decode_intensity", ref, see="arithmetic-intensity")


def _decode(*args: Any) -> Case:
    return call(*args).judge(numbers(ref.decode_intensity(*args)))


@decode_intensity.group("values", share=2)
def _(g: Gen):
    """Counts FLOPs, bytes and FLOPs per byte of one decode step."""
    assert ref.decode_intensity(3, 5, 2, 2, 1, 2, 8, 2) == (1824, 688, 1824 / 688)
    yield _decode(3, 5, 2, 2, 1, 2, 8, 2).says("small numbers")
    yield _decode(1, 4096, 32, 32, 32, 128, 11008, 2).says("one sequence, plain multi-head attention")
    yield _decode(16, 8192, 32, 32, 8, 128, 14336, 2).says("a batch, grouped-query attention")
    heads = g.python.choice([4, 6, 8])
    yield _decode(g.python.randint(2, 9), g.python.randint(10, 99), 3, heads, 2, 5, 7 * heads, 2).says(
        "a small model"
    )


@decode_intensity.group("arguments", share=2)
def _(g: Gen):
    """Follows every argument: the batch, the cache's length, layers, heads, widths and bytes."""
    base = [3, 5, 2, 6, 2, 2, 8, 2]
    names = ["batch", "seq", "layers", "heads", "kv_heads", "head_dim", "d_ff", "bytes_per_element"]
    for i, name in enumerate(names):
        yield _decode(*base[:i], 2 * base[i], *base[i + 1 :]).says(f"{name} doubled")
    yield _decode(*base[:7], 0.5).says("4 bits: half a byte")
    yield _decode(3, 5, 3, 3, 1, 1, 2, 0.75).says("6 bits: three quarters of a byte")
    yield _decode(63, 4097, 81, 37, 3, 127, 14_337, 2).says("counts beyond 32 bits, to the last digit")
    yield _decode(1, 1, 1, 1, 1, 1, 1, 1).says("ones")
    keywords = dict(zip(names, base, strict=True))
    yield call(**keywords).judge(numbers(ref.decode_intensity(**keywords))).says("by keyword")


def _intensity(flops, read):
    return flops, read, flops / read


def _weights(heads, kv_heads, head_dim, d_ff):
    d = heads * head_dim
    return d, 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff


@decode_intensity.near_miss("prefill")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """These are the FLOPs of a prefill, of seq tokens per sequence: a decode step pushes one token."""
    d, w = _weights(heads, kv_heads, head_dim, d_ff)
    read = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return _intensity(batch * seq * layers * (2 * w + 4 * seq * d), read)


@decode_intensity.near_miss("query-heads-in-the-cache")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """The cache's bytes are counted with the query heads: it holds kv_heads · head_dim numbers for K and for V."""
    d, w = _weights(heads, kv_heads, head_dim, d_ff)
    read = bytes_per_element * layers * (w + 2 * batch * seq * d)
    return _intensity(batch * layers * (2 * w + 4 * seq * d), read)


@decode_intensity.near_miss("weights-per-sequence")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """The weights are read once for every sequence: one read serves the whole batch, which is why batching helps."""
    d, w = _weights(heads, kv_heads, head_dim, d_ff)
    read = bytes_per_element * layers * batch * (w + 2 * seq * kv_heads * head_dim)
    return _intensity(batch * layers * (2 * w + 4 * seq * d), read)


@decode_intensity.near_miss("shared-cache")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """The cache is read once for the whole batch: weights are shared, but each sequence has its own keys and values."""
    d, w = _weights(heads, kv_heads, head_dim, d_ff)
    read = bytes_per_element * layers * (w + 2 * seq * kv_heads * head_dim)
    return _intensity(batch * layers * (2 * w + 4 * seq * d), read)


@decode_intensity.near_miss("one-of-two")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """Only one of keys and values is read: the step reads both, so 2 · batch · seq · kv_heads · head_dim numbers."""
    d, w = _weights(heads, kv_heads, head_dim, d_ff)
    read = bytes_per_element * layers * (w + batch * seq * kv_heads * head_dim)
    return _intensity(batch * layers * (2 * w + 4 * seq * d), read)


@decode_intensity.near_miss("multiplications-only")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """Only the multiplications are counted: each comes with an addition, so twice as many FLOPs."""
    d, w = _weights(heads, kv_heads, head_dim, d_ff)
    read = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return _intensity(batch * layers * (w + 2 * seq * d), read)


@decode_intensity.near_miss("full-width-keys")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """The projections of K and V are counted as d × d: with fewer kv_heads they are d × kv_heads · head_dim."""
    d, w = _weights(heads, heads, head_dim, d_ff)
    read = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return _intensity(batch * layers * (2 * w + 4 * seq * d), read)


@decode_intensity.near_miss("no-attention-flops")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """The FLOPs of the scores and of the weighted sum are left out: 4 · seq · d per token and layer."""
    _, w = _weights(heads, kv_heads, head_dim, d_ff)
    read = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return _intensity(batch * layers * 2 * w, read)


@decode_intensity.near_miss("upside-down")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """The last number is bytes per FLOP: intensity is FLOPs per byte."""
    flops, read, _ = ref.decode_intensity(
        batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element
    )
    return flops, read, read / flops


@decode_intensity.near_miss("kv-heads-in-the-scores")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """The scores are counted for the kv heads only: every query head computes its own, whoever shares the keys."""
    _, w = _weights(heads, kv_heads, head_dim, d_ff)
    read = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return _intensity(batch * layers * (2 * w + 4 * seq * kv_heads * head_dim), read)


@decode_intensity.near_miss("half-the-attention")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """Attention is counted half: 2 · seq · d for the scores and as much for the weighted sum, 4 · seq · d together."""
    d, w = _weights(heads, kv_heads, head_dim, d_ff)
    read = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return _intensity(batch * layers * (2 * w + 2 * seq * d), read)


@decode_intensity.near_miss("one-flop-per-weight")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """Each weight is counted once: it costs a multiplication and an addition per token, so 2 w."""
    d, w = _weights(heads, kv_heads, head_dim, d_ff)
    read = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return _intensity(batch * layers * (w + 4 * seq * d), read)


@decode_intensity.near_miss("one-layer")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """These are the numbers of one layer: every layer has its own weights and its own cache."""
    return ref.decode_intensity(batch, seq, 1, heads, kv_heads, head_dim, d_ff, bytes_per_element)


@decode_intensity.near_miss("bytes-of-one-layer")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """The bytes are those of one layer: every layer's weights and cache are read."""
    d, w = _weights(heads, kv_heads, head_dim, d_ff)
    read = bytes_per_element * (w + 2 * batch * seq * kv_heads * head_dim)
    return _intensity(batch * layers * (2 * w + 4 * seq * d), read)


@decode_intensity.near_miss("one-sequence-of-flops")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """The FLOPs are those of one sequence: every sequence of the batch pushes a token through all weights."""
    d, w = _weights(heads, kv_heads, head_dim, d_ff)
    read = bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)
    return _intensity(layers * (2 * w + 4 * seq * d), read)


@decode_intensity.near_miss("whole-flops-per-byte")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """The intensity is cut to a whole number: divide with `/`, not `//`."""
    flops, read, _ = ref.decode_intensity(
        batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element
    )
    return flops, read, flops // read


@decode_intensity.near_miss("rounded")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """The intensity is rounded to two digits: only the example's text does that. Return the quotient as it is."""
    flops, read, intensity = ref.decode_intensity(
        batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element
    )
    return flops, read, round(intensity, 2)


@decode_intensity.near_miss("new-token-twice")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """One token too many is attended to: seq counts the new one already."""
    return ref.decode_intensity(batch, seq + 1, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element)


@decode_intensity.near_miss("bytes-first")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """FLOPs and bytes have changed places: FLOPs come first, then bytes, then FLOPs per byte."""
    flops, read, intensity = ref.decode_intensity(
        batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element
    )
    return read, flops, intensity


@decode_intensity.near_miss("kv-heads-for-heads")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """The width d is computed from the kv heads: it is heads · head_dim, that of all query heads."""
    return ref.decode_intensity(batch, seq, layers, kv_heads, kv_heads, head_dim, d_ff, bytes_per_element)


@decode_intensity.near_miss("whole-bytes")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """The bytes are cut to a whole number: six bits are three quarters of a byte, and their sum need not be whole."""
    flops, read, _ = ref.decode_intensity(
        batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element
    )
    return flops, int(read), flops / int(read)


@decode_intensity.near_miss("always-fp16")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """Every element is counted with two bytes: multiply by bytes_per_element."""
    return ref.decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, 2)


@decode_intensity.near_miss("float32")
def _(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    """Large counts lose their last digits: float32 holds seven of them. Count with Python's ints."""
    counts = ref.decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element)
    return tuple(torch.tensor(counts, dtype=F32).tolist())


# kv_cache_bytes

kv_cache_bytes = Exercise("kv_cache_bytes", ref, see="cache-size")


def _size(*args: Any, want: float | None = None, **kwargs: Any) -> Case:
    expected = ref.kv_cache_bytes(*args, **kwargs)
    assert want is None or want == expected
    return call(*args, **kwargs).judge(numbers(expected))


@kv_cache_bytes.group("values", share=2)
def _(g: Gen):
    """Multiplies keys and values, layers, heads, width, sequences, tokens and bytes."""
    yield _size(1, 1, 96, 96, 128, want=4_718_592).says("one token of GPT-3 in FP16: 4.72 MB")
    yield _size(1, 1, 80, 8, 128, want=327_680).says("one token of Llama-2-70B in FP16: 328 kB")
    batch, seq = g.python.randint(2, 9), g.python.randint(100, 5000)
    yield _size(batch, seq, 32, 8, 128, want=131_072 * batch * seq).says("many sequences of Llama-3-8B")
    yield _size(3, 5, 7, 11, 13).says("five different numbers")


@kv_cache_bytes.group("element", share=1)
def _(g: Gen):
    """Follows the bytes of an element: 2 when nothing is said, fractions too."""
    for width in (1, 4, 8):
        yield _size(2, 3, 5, 7, 12, width).says(f"{width} bytes an element")
    yield _size(2, 3, 5, 7, 12, bytes_per_element=1).says("by keyword")
    yield _size(2, 3, 5, 7, 12, 0.5).says("4 bits: half a byte")
    yield _size(3, 1, 5, 7, 13, 0.75).says("6 bits: three quarters of a byte")
    yield _size(63, 32_769, 97, 97, 127, 1).says("a size beyond 32 bits, to the last digit")


@kv_cache_bytes.near_miss("query-heads")
def _(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    """The size does not follow kv_heads: the cache holds keys and values, so its heads count, not the query heads."""
    return 2 * batch * seq * layers * 32 * head_dim * bytes_per_element


@kv_cache_bytes.near_miss("one-of-two")
def _(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    """Only one of keys and values is counted: both are cached, so one more factor of 2."""
    return batch * seq * layers * kv_heads * head_dim * bytes_per_element


@kv_cache_bytes.near_miss("always-fp16")
def _(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    """A second factor of 2 stands for the two bytes of FP16 alone: multiply by bytes_per_element in its place."""
    return 2 * 2 * batch * seq * layers * kv_heads * head_dim


@kv_cache_bytes.near_miss("whole-bytes")
def _(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    """bytes_per_element is cut to a whole number: four bits are half a byte, so keep the fraction."""
    return 2 * batch * seq * layers * kv_heads * head_dim * int(bytes_per_element)


@kv_cache_bytes.near_miss("elements")
def _(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    """These are elements, not bytes: multiply by bytes_per_element."""
    return 2 * batch * seq * layers * kv_heads * head_dim


@kv_cache_bytes.near_miss("one-layer")
def _(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    """This is the cache of one layer: every layer has its own keys and values."""
    return 2 * batch * seq * kv_heads * head_dim * bytes_per_element


@kv_cache_bytes.near_miss("one-sequence")
def _(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    """This is the cache of one sequence: the sequences of a batch share weights, but not keys and values."""
    return 2 * seq * layers * kv_heads * head_dim * bytes_per_element


@kv_cache_bytes.near_miss("one-token")
def _(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    """This is the cache of one token: keys and values are kept for every token of the text, so multiply by seq."""
    return 2 * batch * layers * kv_heads * head_dim * bytes_per_element


@kv_cache_bytes.near_miss("fp32-unless-said")
def _(batch, seq, layers, kv_heads, head_dim, bytes_per_element=4):
    """An element has four bytes when nothing is said: the default is 2, FP16."""
    return 2 * batch * seq * layers * kv_heads * head_dim * bytes_per_element


@kv_cache_bytes.near_miss("megabytes")
def _(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    """These are megabytes: return bytes."""
    return 2 * batch * seq * layers * kv_heads * head_dim * bytes_per_element / 1e6


@kv_cache_bytes.near_miss("bits")
def _(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    """These are bits: return bytes."""
    return 8 * ref.kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element)


@kv_cache_bytes.near_miss("whole-result")
def _(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    """The result is cut to a whole number of bytes: leave the fraction as it is."""
    return int(ref.kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element))


@kv_cache_bytes.near_miss("float32")
def _(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    """Large sizes lose their last digits: float32 holds seven of them. Multiply Python's ints."""
    size = 2 * batch * seq * layers * kv_heads * head_dim * bytes_per_element
    return torch.tensor(size, dtype=F32).item()


@kv_cache_bytes.near_miss("int32")
def _(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    """Large sizes overflow: an int32 ends at 2,147,483,647 bytes, 2 GB. Multiply Python's ints, or use int64."""
    elements = 2 * batch * seq * layers * kv_heads * head_dim
    return ((elements + 2**31) % 2**32 - 2**31) * bytes_per_element


# grouped_query_attention

grouped_query_attention = Exercise("grouped_query_attention", ref, see="fewer-heads")


def _gqa(
    g: Gen,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    batch: int = 2,
    d_v: int = 4,
    dtype: torch.dtype = F32,
) -> tuple:
    return (
        g.randn(batch, heads, queries, 4, dtype=dtype),
        g.randn(batch, kv_heads, keys, 4, dtype=dtype),
        g.randn(batch, kv_heads, keys, d_v, dtype=dtype),
    )


@grouped_query_attention.group("values", share=2)
def _(g: Gen):
    """Lets consecutive query heads share a key and value head, in a whole prompt."""
    for heads, kv_heads in ((4, 2), (6, 2), (6, 3), (8, 4)):
        args = _gqa(g, heads, kv_heads, 5, 5)
        yield (
            call(*args)
            .expect(_torch_attention(*args, enable_gqa=True))
            .says(f"{heads} query heads, {kv_heads} key and value heads")
        )
    yield call(*_gqa(g, 4, 2, 4, 4, batch=1, d_v=6)).says("one sequence, values wider than keys")
    yield call(*_gqa(g, 4, 2, 4, 4, batch=3, d_v=2)).says("three sequences, values narrower than keys")


@grouped_query_attention.group("extremes", share=1)
def _(g: Gen):
    """Is multi-head attention with as many key heads as query heads, and multi-query attention with one."""
    args = _gqa(g, 4, 4, 5, 5)
    yield call(*args).expect(_torch_attention(*args)).says("as many as query heads")
    yield call(*_gqa(g, 4, 1, 5, 5)).says("one for all")
    yield call(*_gqa(g, 1, 1, 3, 3)).says("a single query head")


@grouped_query_attention.group("decode", share=1)
def _(g: Gen):
    """Takes the last rows of the sequence: one token or a chunk."""
    for queries, keys in ((1, 6), (3, 7), (1, 1), (4, 5)):
        args = _gqa(g, 6, 2, queries, keys)
        yield (
            call(*args)
            .expect(_torch_attention(*args, enable_gqa=True))
            .says(f"{queries} queries on {keys} keys")
        )
    q, k, v = (g.randn(2, n, h, 4).transpose(1, 2) for n, h in ((2, 4), (5, 2), (5, 2)))
    yield call(q, k, v).says("heads moved by a transpose")


@grouped_query_attention.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype: float16, bfloat16, float64; masks whatever the size of the scores."""
    yield _far_below(g, 4, 2, 4, 4)
    for dtype in (F16, BF16, F64):
        for queries in (4, 1):
            case = call(*_gqa(g, 4, 2, queries, 4, dtype=dtype))
            yield sums_in_float32(case, dtype).says(f"{str(dtype).removeprefix('torch.')}, {queries} queries")


@grouped_query_attention.group("gradient", share=1)
def _(g: Gen):
    """Lets gradients flow to q, k and v; a shared head collects those of its whole group."""
    yield call(*_gqa(g, 4, 2, 3, 3, d_v=3)).gradient().says("a whole prompt")
    yield call(*_gqa(g, 6, 2, 2, 4)).gradient().says("a chunk")


def _expand(k, heads):
    return k.repeat_interleave(heads // k.shape[1], dim=1)


@grouped_query_attention.near_miss("repeat-for-repeat-interleave")
def _(q, k, v):
    """Query heads 0, 1, 2, … read kv heads 0, 1, 0, 1, …: neighbours share a head here, so repeat each kv head in place (`repeat_interleave`), not the whole row of them (`repeat`)."""
    times = q.shape[1] // k.shape[1]
    return ref.cached_attention(q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1))


@grouped_query_attention.near_miss("first-kv-head")
def _(q, k, v):
    """All query heads read the first kv head: that is multi-query attention; each group has a kv head of its own."""
    return _plain_attention(q, k[:, :1], v[:, :1], _end_mask(q, k))


@grouped_query_attention.near_miss("mean-of-kv-heads")
def _(q, k, v):
    """All query heads read the mean of the kv heads: each group reads its own kv head, and nothing is averaged here."""
    return _plain_attention(q, k.mean(1, keepdim=True), v.mean(1, keepdim=True), _end_mask(q, k))


@grouped_query_attention.near_miss("keys-shared-values-not")
def _(q, k, v):
    """Keys are repeated head by head, but values as a whole row, so a query head weighs the values of another group: treat both alike."""
    times = q.shape[1] // k.shape[1]
    return ref.cached_attention(q, _expand(k, q.shape[1]), v.repeat(1, times, 1, 1))


@grouped_query_attention.near_miss("no-mask")
def _(q, k, v):
    """Nothing is masked: in a prompt or a chunk earlier rows see later ones. Mask as in `cached_attention`."""
    return _plain_attention(q, _expand(k, q.shape[1]), _expand(v, q.shape[1]), None)


@grouped_query_attention.near_miss("top-left-mask")
def _(q, k, v):
    """The mask starts at the top left, as if the first query were the first token: the queries are the last rows, so align it to the end."""
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return _plain_attention(q, _expand(k, q.shape[1]), _expand(v, q.shape[1]), mask)


@grouped_query_attention.near_miss("scaled-by-group")
def _(q, k, v):
    """The scores are divided by the square root of the width of a whole group: a score is still one dot product of width d_k."""
    scale = (q.shape[-1] * q.shape[1] / k.shape[1]) ** -0.5
    if q.shape[1] == k.shape[1]:
        scale = q.shape[-1] ** -0.5
    return _plain_attention(q, _expand(k, q.shape[1]), _expand(v, q.shape[1]), _end_mask(q, k), scale)


@grouped_query_attention.near_miss("scaled-by-all-heads")
def _(q, k, v):
    """The scores are divided by the square root of the width of all heads: a score is one dot product of width d_k."""
    scale = (q.shape[-1] * q.shape[1]) ** -0.5
    return _plain_attention(q, _expand(k, q.shape[1]), _expand(v, q.shape[1]), _end_mask(q, k), scale)


@grouped_query_attention.near_miss("scaled-by-d-v")
def _(q, k, v):
    """The scores are divided by the square root of d_v: their spread comes from the width of the keys, d_k."""
    scale = v.shape[-1] ** -0.5
    return _plain_attention(q, _expand(k, q.shape[1]), _expand(v, q.shape[1]), _end_mask(q, k), scale)


@grouped_query_attention.near_miss("unscaled")
def _(q, k, v):
    """The scores are not divided by the square root of d_k."""
    return _plain_attention(q, _expand(k, q.shape[1]), _expand(v, q.shape[1]), _end_mask(q, k), 1.0)


@grouped_query_attention.near_miss("chunk-unmasked")
def _(q, k, v):
    """Only a whole prompt is masked: in a chunk behind a past, too, a row may not see the rows after it."""
    mask = _end_mask(q, k) if q.shape[-2] == k.shape[-2] else None
    return _plain_attention(q, _expand(k, q.shape[1]), _expand(v, q.shape[1]), mask)


@grouped_query_attention.near_miss("heads-shuffled")
def _(q, k, v):
    """The heads come out in another order: they went in as (kv head, place in the group), so flatten them in that order again."""
    out = ref.grouped_query_attention(q, k, v)
    return out.unflatten(1, (k.shape[1], -1)).transpose(1, 2).flatten(1, 2)


@grouped_query_attention.near_miss("first-sequence-for-all")
def _(q, k, v):
    """Every sequence reads the keys of the first: they have the batch axis in common with the queries, so keep it."""
    return ref.grouped_query_attention(q, k[:1].expand_as(k), v)


@grouped_query_attention.near_miss("one-head-per-group")
def _(q, k, v):
    """The queries of a group are averaged, so only kv_heads heads come out: every query head keeps its own output."""
    return ref.cached_attention(q.unflatten(1, (k.shape[1], -1)).mean(2), k, v)


# mha_to_gqa

mha_to_gqa = Exercise("mha_to_gqa", ref, see="fewer-heads")


@mha_to_gqa.group("values", share=2)
def _(g: Gen):
    """Averages each group of consecutive heads."""
    w = g.tensor([[1.0, 2, 3, 4, 5, 6, 7, 10]])
    yield call(w, 4, 2).expect(g.tensor([[2.0, 3, 6, 8]])).says("four heads of width 2 to two, by hand")
    yield call(w, 8, 2).expect(g.tensor([[2.5, 7]])).says("eight heads of width 1 to two")
    for heads, kv_heads, dim in ((6, 2, 3), (6, 3, 4), (8, 4, 2)):
        yield call(g.randn(5, heads * dim), heads, kv_heads).says(
            f"{heads} heads of width {dim} to {kv_heads}"
        )


@mha_to_gqa.group("extremes", share=1)
def _(g: Gen):
    """Changes nothing when no head goes, and gives one mean when one head is left."""
    w = g.randn(3, 8)
    yield call(w, 4, 4).expect(w).says("as many heads as before")
    yield call(w, 4, 1).expect((w[:, :2] + w[:, 2:4] + w[:, 4:6] + w[:, 6:]) / 4).says("one head")
    yield call(w, 1, 1).expect(w).says("a single head")
    yield call(g.randn(12, 5).T, 4, 2).says("weights that are not contiguous")


@mha_to_gqa.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype, and lets gradients flow to the weights."""
    for dtype in (F16, BF16, F64):
        case = call(g.randn(3, 12, dtype=dtype), 6, 2)
        yield sums_in_float32(case, dtype).says(str(dtype).removeprefix("torch."))
    yield call(g.randn(3, 8), 4, 2).gradient().says("gradient")


@mha_to_gqa.near_miss("keeps-the-first-head")
def _(w, heads, kv_heads):
    """The first head of each group is kept and the others are lost: pool the group by its mean."""
    return w.unflatten(-1, (kv_heads, heads // kv_heads, -1))[..., 0, :].flatten(-2)


@mha_to_gqa.near_miss("distant-heads")
def _(w, heads, kv_heads):
    """Heads that lie kv_heads apart are pooled: a group is heads / kv_heads consecutive ones, those that will share a kv head."""
    return w.unflatten(-1, (heads // kv_heads, kv_heads, -1)).mean(-3).flatten(-2)


@mha_to_gqa.near_miss("interleaved-columns")
def _(w, heads, kv_heads):
    """Neighbouring columns are taken for different heads: a head is a block of head_dim consecutive columns."""
    return w.unflatten(-1, (-1, kv_heads, heads // kv_heads)).mean(-1).flatten(-2)


@mha_to_gqa.near_miss("sum")
def _(w, heads, kv_heads):
    """The heads of a group are summed: keys would grow with the size of the group, so take the mean."""
    return w.unflatten(-1, (kv_heads, heads // kv_heads, -1)).sum(-2).flatten(-2)


@mha_to_gqa.near_miss("divided-by-kv-heads")
def _(w, heads, kv_heads):
    """The sum of a group is divided by the number of groups: a group has heads / kv_heads members."""
    return w.unflatten(-1, (kv_heads, heads // kv_heads, -1)).sum(-2).flatten(-2) / kv_heads


@mha_to_gqa.near_miss("groups-of-kv-heads")
def _(w, heads, kv_heads):
    """A group has kv_heads members here, and heads / kv_heads heads are left: kv_heads is what is left."""
    return w.unflatten(-1, (heads // kv_heads, kv_heads, -1)).mean(-2).flatten(-2)


@mha_to_gqa.near_miss("largest")
def _(w, heads, kv_heads):
    """The largest entry of the group is taken: pool by the mean."""
    return w.unflatten(-1, (kv_heads, heads // kv_heads, -1)).amax(-2).flatten(-2)


@mha_to_gqa.near_miss("transposed")
def _(w, heads, kv_heads):
    """The means are right but rows and columns have changed places: the shape is (d_in, kv_heads · head_dim)."""
    return w.unflatten(-1, (kv_heads, heads // kv_heads, -1)).mean(-2).flatten(-2).T


@mha_to_gqa.near_miss("first-heads-of-all")
def _(w, heads, kv_heads):
    """The first kv_heads heads are kept: every group contributes one head, the mean of its members."""
    return w.unflatten(-1, (heads, -1))[..., :kv_heads, :].flatten(-2)


@mha_to_gqa.near_miss("repeated-to-full-width")
def _(w, heads, kv_heads):
    """The means are right but repeated to the old width: the point is a narrower matrix, with kv_heads · head_dim columns."""
    pooled = w.unflatten(-1, (kv_heads, heads // kv_heads, -1)).mean(-2, keepdim=True)
    return pooled.expand(-1, -1, heads // kv_heads, -1).flatten(1)


# RollingKVCache

RollingKVCache = Exercise("RollingKVCache", ref, see="rolling-cache")


def _roll(
    g: Gen, chunks: tuple[int, ...], window: int, dtype: torch.dtype = F32, batch: int = 2, heads: int = 3
) -> Case:
    given = [rows(g, batch, heads, n, 4, dtype) for n in chunks]

    def run(s: Subject) -> None:
        cache = s.new("RollingKVCache", batch, heads, window, 4, dtype, "cpu")
        for k, v in given:
            update(s, cache, k, v)
            s.get(cache, "length")

    return scenario(run)


@RollingKVCache.group("values", share=2)
def _(g: Gen):
    """Returns keys, values and positions of the last tokens, oldest first."""
    yield _roll(g, (1,) * 3, 5).says("window not yet full")
    yield _roll(g, (1,) * 9, 4).says("token by token, twice around")
    yield _roll(g, (3, 1, 1, 1), 4).says("a prompt, then token by token")
    yield _roll(g, (1,) * 4, 1).says("a window of one token")
    yield _roll(g, (1,) * 7, 3, batch=1, heads=1).says("one sequence, one head")


@RollingKVCache.group("chunks", share=2)
def _(g: Gen):
    """Takes chunks: across the window's end, as long as the window, longer."""
    yield _roll(g, (3, 3, 2, 4), 4).says("chunks across the end")
    yield _roll(g, (4, 4, 1), 4).says("chunks as long as the window")
    yield _roll(g, (7, 1, 9, 2), 4).says("chunks longer than the window")
    yield _roll(g, (2, 11), 3).says("a long chunk behind a short one")
    first, second = heads_inside(g, 2, 3, 3, 4), heads_inside(g, 2, 3, 2, 4)

    def keywords(s: Subject) -> None:
        cache = s.new(
            "RollingKVCache", batch=2, kv_heads=3, window=4, head_dim=4, dtype=F32, device=torch.device("cpu")
        )
        s.get(cache, "length")
        for k, v in (first, second):
            update(s, cache, k=k, v=v)

    yield scenario(keywords).says("inputs that are not contiguous, arguments by keyword")


@RollingKVCache.group("dtypes", share=1)
def _(g: Gen):
    """Stores and returns the dtype it was made with, after reset too; positions are int64."""
    for dtype in (F16, BF16, F64):
        yield _roll(g, (2, 1, 1), 3, dtype).says(str(dtype).removeprefix("torch."))
        yield _again(g, "RollingKVCache", dtype).says(f"{str(dtype).removeprefix('torch.')}, after reset")


@RollingKVCache.group("reset", share=1)
def _(g: Gen):
    """Starts again after reset: length and positions from 0, no old rows."""
    given = [rows(g, 1, 2, n, 4) for n in (5, 2, 1, 3)]

    def run(s: Subject) -> None:
        cache = s.new("RollingKVCache", 1, 2, 4, 4, F32, "cpu")
        s.method(cache, "reset")
        update(s, cache, *given[0])
        count(s, cache, "length")
        s.method(cache, "reset")
        count(s, cache, "length")
        for k, v in given[1:]:
            update(s, cache, k, v)
            count(s, cache, "length")

    yield scenario(run).says("a full window, reset, fewer tokens, then more")


@RollingKVCache.group("independent", share=1)
def _(g: Gen):
    """Shares no memory: not with another cache, not with the tensors handed in; earlier results stay right."""
    given = [rows(g, 1, 2, n, 3) for n in (2, 1, 3, 1)]

    def two(s: Subject) -> None:
        a = s.new("RollingKVCache", 1, 2, 6, 3, F32, "cpu")
        update(s, a, *given[0])
        b = s.new("RollingKVCache", 1, 2, 6, 3, F32, "cpu")
        update(s, b, *given[1])
        update(s, a, *given[2])
        s.method(b, "reset")
        update(s, a, *given[3])

    yield scenario(two).says("two caches side by side")
    for new, words in ((2, "shorter than"), (4, "as long as"), (6, "longer than")):
        handed = rows(g, 1, 2, new, 3)
        yield scenario(
            lambda s, handed=handed: _overwrite_inputs(s, "RollingKVCache", (1, 2, 4, 3), handed, given[1])
        ).says(f"a chunk {words} the window is changed after it was handed in")
    yield scenario(lambda s: _look_back(s, "RollingKVCache", (1, 2, 4, 3), given)).says(
        "earlier results after later updates"
    )


@RollingKVCache.group("memory", share=1)
def _(g: Gen):
    """Needs the same memory however long the text is."""
    k, v = rows(g, 1, 2, 200, 4)

    def run(s: Subject) -> None:
        cache = s.new("RollingKVCache", 1, 2, 5, 4, F32, "cpu")
        for i in range(0, 200, 10):
            update(s, cache, k[:, :, i : i + 10], v[:, :, i : i + 10])
        largest = s.measure((cache, "update"), k[:, :, :1], v[:, :, :1]).largest
        room = 2 * 2 * (5 + 1) * 4
        s.require(
            largest <= 4 * room,
            f"after 200 tokens an update makes a tensor of {largest} elements, the window and the new token have {room}",
        )

    yield scenario(run).says("200 tokens through a window of 5")


class _Rolling:
    """What the near-misses of the rolling cache share: the last rows, and how many were seen."""

    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        self.window = window
        self.make = lambda: torch.zeros(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.reset()

    def reset(self):
        self.k, self.v, self.length = self.make(), self.make(), 0

    def push(self, k, v):
        self.k = torch.cat([self.k, k], dim=2)[:, :, -self.window :]
        self.v = torch.cat([self.v, v], dim=2)[:, :, -self.window :]
        self.length += k.shape[2]

    def update(self, k, v):
        self.push(k, v)
        return self.k, self.v, torch.arange(self.length - self.k.shape[2], self.length)


@RollingKVCache.near_miss("position-in-the-window")
class _(_Rolling):
    """Positions count the rows that are kept: a token's position is its place in the whole text, and does not change when others leave the window."""

    def update(self, k, v):
        self.push(k, v)
        return self.k, self.v, torch.arange(self.k.shape[2])


@RollingKVCache.near_miss("rows-kept-as-length")
class _(_Rolling):
    """length stops at the window: it counts the tokens seen, and positions follow from it."""

    def update(self, k, v):
        out = super().update(k, v)
        self.length = min(self.length, self.window)
        return out


@RollingKVCache.near_miss("order-of-storage")
class _(_Rolling):
    """The rows come in the order of the ring's slots: once the ring has turned, the oldest row is not the first, so reorder what you return."""

    def update(self, k, v):
        keys, values, positions = super().update(k, v)
        order = (positions % self.window).argsort()
        return keys[:, :, order], values[:, :, order], positions[order]


@RollingKVCache.near_miss("rows-in-order-of-storage")
class _(_Rolling):
    """The positions are in order, but the rows come in the order of the ring's slots: once the ring has turned, the oldest row is not the first, so reorder keys and values."""

    def update(self, k, v):
        keys, values, positions = super().update(k, v)
        order = (positions % self.window).argsort()
        return keys[:, :, order], values[:, :, order], positions


@RollingKVCache.near_miss("keys-and-values-swapped")
class _(_Rolling):
    """Keys and values have changed places on the way out: return keys, values and positions."""

    def update(self, k, v):
        keys, values, positions = super().update(k, v)
        return values, keys, positions


@RollingKVCache.near_miss("positions-from-one")
class _(_Rolling):
    """Positions count from 1: the first token ever seen has position 0."""

    def update(self, k, v):
        keys, values, positions = super().update(k, v)
        return keys, values, positions + 1


@RollingKVCache.near_miss("whole-window-always")
class _(_Rolling):
    """A whole window comes back while the text is shorter, with rows that nothing was written to: return min(length, window) rows."""

    def update(self, k, v):
        keys, values, positions = super().update(k, v)
        empty = self.window - keys.shape[2]
        return F.pad(keys, (0, 0, 0, empty)), F.pad(values, (0, 0, 0, empty)), positions


@RollingKVCache.near_miss("zeros-before-the-text")
class _(_Rolling):
    """A whole window comes back while the text is shorter, with zeros in front and positions below 0: return min(length, window) rows."""

    def update(self, k, v):
        keys, values, _ = super().update(k, v)
        empty = self.window - keys.shape[2]
        positions = torch.arange(self.length - self.window, self.length)
        return F.pad(keys, (0, 0, empty, 0)), F.pad(values, (0, 0, empty, 0)), positions


@RollingKVCache.near_miss("rows-before-the-window")
class _(_Rolling):
    """All rows of before come back with the new ones: after the update, too, only the last `window` are asked for."""

    def update(self, k, v):
        keys, values = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        self.push(k, v)
        return keys, values, torch.arange(self.length - keys.shape[2], self.length)


@RollingKVCache.near_miss("one-row-leaves-per-update")
class _(_Rolling):
    """A full window gives up one row per update, so that a chunk makes it grow: n new rows push n old ones out."""

    def push(self, k, v):
        full = int(self.k.shape[2] >= self.window)
        self.k = torch.cat([self.k[:, :, full:], k], dim=2)
        self.v = torch.cat([self.v[:, :, full:], v], dim=2)
        self.length += k.shape[2]


@RollingKVCache.near_miss("long-chunk-refused")
class _(_Rolling):
    """A chunk longer than the window is refused: a prompt may be that long, and its last rows are kept."""

    def push(self, k, v):
        if k.shape[2] > self.window:
            raise ValueError(f"RollingKVCache.update needs new <= window, got {k.shape[2]}")
        super().push(k, v)


@RollingKVCache.near_miss("newest-first")
class _(_Rolling):
    """The newest row comes first: return the oldest first, as in the text."""

    def update(self, k, v):
        keys, values, positions = super().update(k, v)
        return keys.flip(2), values.flip(2), positions.flip(0)


@RollingKVCache.near_miss("one-row-too-many")
class _(_Rolling):
    """window + 1 rows are kept: a window of w holds the newest token and the w − 1 before it."""

    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        super().__init__(batch, kv_heads, window + 1, head_dim, dtype, device)


@RollingKVCache.near_miss("one-row-too-few")
class _(_Rolling):
    """window − 1 rows are kept: a window of w holds the newest token and the w − 1 before it."""

    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        super().__init__(batch, kv_heads, max(1, window - 1), head_dim, dtype, device)


@RollingKVCache.near_miss("start-of-long-chunk")
class _(_Rolling):
    """Of a chunk longer than the window the first rows are kept: the last ones are the newest, so keep those."""

    def push(self, k, v):
        new = k.shape[2]
        super().push(k[:, :, : self.window], v[:, :, : self.window])
        self.length += new - min(new, self.window)


@RollingKVCache.near_miss("one-token-per-update")
class _(_Rolling):
    """Every update counts as one token: a chunk of n rows makes length grow by n."""

    def push(self, k, v):
        super().push(k, v)
        self.length += 1 - k.shape[2]

    def update(self, k, v):
        self.push(k, v)
        last = self.length - 1
        return self.k, self.v, torch.arange(last - self.k.shape[2] + 1, last + 1)


@RollingKVCache.near_miss("stale-after-reset")
class _(_Rolling):
    """length is 0 after reset but the old rows are still there and come back: forget them too."""

    def reset(self):
        if not hasattr(self, "k"):
            super().reset()
        self.length = 0

    def update(self, k, v):
        self.push(k, v)
        return self.k, self.v, torch.arange(self.length - self.k.shape[2], self.length)


@RollingKVCache.near_miss("positions-go-on-after-reset")
class _(_Rolling):
    """The rows are gone after reset, but positions go on from the old text: set length to 0, the next token has position 0."""

    def reset(self):
        self.k, self.v = self.make(), self.make()
        self.length = getattr(self, "length", 0)


@RollingKVCache.near_miss("cleared-but-counted")
class _(_Rolling):
    """The rows are set to zero at reset but still counted, and come back as tokens: set length to 0 instead."""

    def reset(self):
        if not hasattr(self, "k"):
            super().reset()
        self.k, self.v = torch.zeros_like(self.k), torch.zeros_like(self.v)


@RollingKVCache.near_miss("keeps-everything")
class _(_Rolling):
    """The rows are right, but every token is kept and cut at the end, so memory grows with the text: drop what leaves the window."""

    def push(self, k, v):
        self.all_k = torch.cat([self.all_k if self.length else self.make(), k], dim=2)
        self.all_v = torch.cat([self.all_v if self.length else self.make(), v], dim=2)
        self.k, self.v = self.all_k[:, :, -self.window :], self.all_v[:, :, -self.window :]
        self.length += k.shape[2]


@RollingKVCache.near_miss("views-of-the-ring")
class _(_Rolling):
    """What update returned earlier changes when the ring turns, because it is a view of the buffer: return a copy in order."""

    def push(self, k, v):
        if self.length == 0:
            shape = (*k.shape[:2], self.window, k.shape[3])
            self.ring_k, self.ring_v = k.new_zeros(shape), v.new_zeros(shape)
        for i in range(k.shape[2]):
            slot = (self.length + i) % self.window
            self.ring_k[:, :, slot], self.ring_v[:, :, slot] = k[:, :, i], v[:, :, i]
        self.length += k.shape[2]

    def update(self, k, v):
        self.push(k, v)
        positions = torch.arange(max(0, self.length - self.window), self.length)
        if self.length <= self.window:
            return self.ring_k[:, :, : self.length], self.ring_v[:, :, : self.length], positions
        return (
            self.ring_k[:, :, positions % self.window],
            self.ring_v[:, :, positions % self.window],
            positions,
        )


@RollingKVCache.near_miss("views-of-a-shifted-buffer")
class _(_Rolling):
    """What update returned earlier changes when the rows are shifted, because it is a view of the buffer: return a copy."""

    def push(self, k, v):
        if self.length == 0:
            shape = (*k.shape[:2], self.window, k.shape[3])
            self.buffers = k.new_zeros(shape), v.new_zeros(shape)
        for buffer, new in zip(self.buffers, (k, v), strict=True):
            buffer.copy_(torch.cat([buffer, new], dim=2)[:, :, -self.window :])
        self.length += k.shape[2]

    def update(self, k, v):
        self.push(k, v)
        rows_ = min(self.length, self.window)
        keys, values = (buffer[:, :, self.window - rows_ :] for buffer in self.buffers)
        return keys, values, torch.arange(self.length - rows_, self.length)


@RollingKVCache.near_miss("keeps-the-callers-rows")
class _(_Rolling):
    """The cache keeps the rows it is handed, not copies: when the caller changes them, the cache changes. Copy them."""

    def push(self, k, v):
        old_k, old_v = ([], []) if self.length == 0 else (self.rows_k, self.rows_v)
        self.rows_k = (old_k + list(k.unbind(2)))[-self.window :]
        self.rows_v = (old_v + list(v.unbind(2)))[-self.window :]
        self.k, self.v = torch.stack(self.rows_k, dim=2), torch.stack(self.rows_v, dim=2)
        self.length += k.shape[2]


@RollingKVCache.near_miss("keeps-a-full-chunk")
class _(_Rolling):
    """A chunk that fills the window is kept as it was handed in: when the caller changes it, the cache changes. Copy its last rows."""

    def push(self, k, v):
        if k.shape[2] < self.window:
            return super().push(k, v)
        self.k, self.v = k[:, :, -self.window :], v[:, :, -self.window :]
        self.length += k.shape[2]


@RollingKVCache.near_miss("shared-by-all")
class _(_Rolling):
    """All caches share one memory (a class attribute or a default argument): make the buffers in __init__, for each cache."""

    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        super().__init__(batch, kv_heads, window, head_dim, dtype, device)
        self.ring = shared_buffers(batch, kv_heads, window, head_dim, dtype, str(device))

    def update(self, k, v):
        rows_ = min(self.length, self.window)
        old = torch.arange(self.length - rows_, self.length) % self.window
        self.k, self.v = (buffer[:, :, old] for buffer in self.ring)
        keys, values, positions = super().update(k, v)
        for buffer, new in zip(self.ring, (keys, values), strict=True):
            buffer[:, :, positions % self.window] = new
        return keys, values, positions


@RollingKVCache.near_miss("always-float32")
class _(_Rolling):
    """The rows come back as float32 whatever dtype is asked for: pass dtype on when you allocate the buffers."""

    def update(self, k, v):
        keys, values, positions = super().update(k, v)
        return keys.float(), values.float(), positions


# quantize_kv and dequantize_kv

quantize_kv = Exercise("quantize_kv", ref, see="eight-bits", functions=("quantize_kv", "dequantize_kv"))

# Rounding the quotient and the product once more in half precision may cost part of a step beyond the half.
STEP = {F16: 0.65, BF16: 1.2, F32: 0.5005, F64: 0.5005}


def _quantized(value: Any, x: torch.Tensor) -> str | None:
    """Judges `quantize_kv`: types, the scale of each token and head, and the rounding."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return "the result should be a pair (q, scale)"
    q, scale = value
    if not isinstance(q, torch.Tensor) or q.dtype != torch.int8:
        return "q should be an int8 tensor"
    if q.shape != x.shape:
        return f"q has shape {tuple(q.shape)}, it should have that of x, {tuple(x.shape)}"
    if not isinstance(scale, torch.Tensor) or scale.dtype != x.dtype:
        return f"scale should be a tensor in the dtype of x, {str(x.dtype).removeprefix('torch.')}"
    if scale.shape != (*x.shape[:-1], 1):
        return f"scale has shape {tuple(scale.shape)}, it should have {(*x.shape[:-1], 1)}"
    exact, q, scale = x.double(), q.double(), scale.double()
    if not bool(scale.isfinite().all()) or bool((scale < 0).any()):
        return "scale has values that are negative or not finite"
    largest = exact.abs().amax(dim=-1, keepdim=True)
    filled = largest > 0
    outside = q.abs() > 127
    if bool((outside & ~filled).any()):
        return "q leaves the range from -127 to 127 in a token that is all zero, where 0 is divided by 0"
    if bool(outside.any()):
        return "q leaves the range from -127 to 127"
    off = (
        (scale - largest / 127).abs() > {F16: 5e-3, BF16: 2e-2}.get(x.dtype, 1e-4) * largest / 127
    ) & filled
    if bool(off.any()):
        return f"{int(off.sum())} of {off.numel()} scales are not the row's largest magnitude divided by 127"
    if bool((q * scale)[(~filled).expand_as(q)].any()):
        return "zeros do not come back as zeros"
    wrong = ((q * scale - exact).abs() > STEP[x.dtype] * scale) & filled
    return (
        f"{int(wrong.sum())} of {q.numel()} numbers are not rounded to the nearest step"
        if bool(wrong.any())
        else None
    )


def _round_trip(x: torch.Tensor) -> Case:
    """Quantises, turns back, and compares with the original."""

    def run(s: Subject) -> None:
        q, scale = s.ask("quantize_kv", x)
        complaint = _quantized((q, scale), x)
        s.require(complaint is None, complaint or "")
        back = s.ask("dequantize_kv", q, scale)
        s.require(isinstance(back, torch.Tensor) and back.dtype == x.dtype, "the dtype does not come back")
        s.require(back.shape == x.shape, "the shape does not come back")
        error = (back.double() - x.double()).abs()
        step = (
            (STEP[x.dtype] + {F16: 0.1, BF16: 0.4}.get(x.dtype, 0.0))
            * x.double().abs().amax(-1, keepdim=True)
            / 127
        )
        s.require(bool((error <= step).all()), "a number comes back more than half a step away")

    return scenario(run)


@quantize_kv.group("values", share=2)
def _(g: Gen):
    """Quantises to int8 with one scale for each token and head, and turns back."""
    yield call(g.randn(2, 3, 4, 8)).judge(_quantized).says("quantise")
    yield call(g.randn(1, 1, 1, 5)).judge(_quantized).says("quantise one token")
    q, scale = g.ints(-127, 128, 2, 3, 4, 5).to(torch.int8), g.rand(2, 3, 4, 1) + 0.01
    yield call(q, scale).of("dequantize_kv").says("turn back")
    yield (
        call(g.tensor([[[[127, -64, 0]]]], torch.int8), g.tensor([[[[0.5]]]]))
        .of("dequantize_kv")
        .expect(g.tensor([[[[63.5, -32.0, 0.0]]]]))
        .says("turn back, by hand")
    )
    yield _round_trip(g.randn(2, 3, 4, 8)).says("there and back")


@quantize_kv.group("scales", share=1)
def _(g: Gen):
    """Gives every token and head its own scale, from the largest magnitude, whatever its sign."""
    x = g.randn(2, 2, 5, 6) * torch.tensor([0.0001, 0.1, 1.0, 30.0, 1000.0])[:, None]
    yield call(x).judge(_quantized).says("tokens of very different size")
    yield (
        call(g.randn(2, 3, 2, 6) * torch.tensor([0.01, 1.0, 50.0])[:, None, None])
        .judge(_quantized)
        .says("heads of very different size")
    )
    yield call(-g.rand(1, 2, 3, 4) - 0.1).judge(_quantized).says("all numbers negative")
    yield call(g.rand(1, 2, 3, 4) + 0.1).judge(_quantized).says("all numbers positive")
    yield call(g.randn(2, 6, 3, 4).transpose(1, 2)).judge(_quantized).says("an input that is not contiguous")
    one = g.randn(1, 1, 2, 8)
    one[0, 0, 0, 3], one[0, 0, 1, 5] = -9.0, 9.0
    yield _round_trip(one).says("one outlier in a token")


@quantize_kv.group("zeros", share=1)
def _(g: Gen):
    """Brings zeros back as zeros, in a token that is all zero too."""
    x = g.randn(2, 2, 3, 4)
    x[0, 1, 2], x[1, 0, 0], x[..., 1] = 0.0, 0.0, 0.0
    for dtype in (F32, F16, BF16):
        yield _round_trip(x.to(dtype)).says(f"some zeros, {str(dtype).removeprefix('torch.')}")
        yield _round_trip(torch.zeros(1, 2, 2, 3, dtype=dtype)).says(
            f"all zero, {str(dtype).removeprefix('torch.')}"
        )


@quantize_kv.group("dtypes", share=1)
def _(g: Gen):
    """Gives the scale, and what comes back, in the dtype of x."""
    for dtype in (F16, BF16, F64):
        name = str(dtype).removeprefix("torch.")
        yield _round_trip(g.randn(2, 3, 4, 8, dtype=dtype)).says(name)
        q, scale = g.ints(-127, 128, 1, 2, 3, 4).to(torch.int8), (g.rand(1, 2, 3, 1) / 64 + 0.004).to(dtype)
        yield sums_in_float32(call(q, scale).of("dequantize_kv"), dtype).says(f"turn back, {name}")


@quantize_kv.group("gradient", share=1)
def _(g: Gen):
    """Lets gradients flow through `dequantize_kv` to the scale."""
    q = g.ints(-127, 128, 1, 2, 3, 4).to(torch.int8)
    yield call(q, g.rand(1, 2, 3, 1) / 64 + 0.004).of("dequantize_kv").gradient().says("turn back")


def _rounded(x, scale):
    return (x / torch.where(scale == 0, 1, scale)).round().clamp(-127, 127).to(torch.int8), scale


@quantize_kv.near_miss("one-scale-for-all")
def _(x):
    """One scale serves the whole tensor: a single large token makes all others coarse, so take the maximum over head_dim alone."""
    scale = (x.abs().amax() / 127).expand(*x.shape[:-1], 1).clone()
    return _rounded(x, scale)


@quantize_kv.near_miss("one-scale-per-head")
def _(x):
    """One scale serves all tokens of a head: a new token would change the scale of those cached before, so take the maximum over head_dim alone."""
    scale = (x.abs().amax(dim=(-1, -2), keepdim=True) / 127).expand(*x.shape[:-1], 1).clone()
    return _rounded(x, scale)


@quantize_kv.near_miss("one-scale-per-token")
def _(x):
    """One scale serves all heads of a token: heads differ in size, so take the maximum over head_dim alone."""
    scale = (x.abs().amax(dim=(1, -1), keepdim=True) / 127).expand(*x.shape[:-1], 1).clone()
    return _rounded(x, scale)


@quantize_kv.near_miss("cuts-off")
def _(x):
    """The quotient is cut off towards zero, an error of up to a whole step: round to the nearest integer before the cast."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / torch.where(scale == 0, 1, scale)).to(torch.int8), scale


@quantize_kv.near_miss("without-magnitude")
def _(x):
    """The scale comes from the largest value, not the largest magnitude: negative numbers leave the range, so take the absolute value first."""
    scale = x.amax(dim=-1, keepdim=True) / 127
    return (x / torch.where(scale == 0, 1, scale)).round().to(torch.int32).to(torch.int8), scale


@quantize_kv.near_miss("without-magnitude-but-cut")
def _(x):
    """The scale comes from the largest value, not the largest magnitude: larger negative numbers are cut off at -127, so take the absolute value first."""
    scale = x.amax(dim=-1, keepdim=True) / 127
    return _rounded(x, scale)


@quantize_kv.near_miss("down-to-minus-128")
def _(x):
    """The scale is the largest magnitude divided by 128, and q reaches -128: symmetric quantisation uses -127 to 127, so divide by 127."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 128
    return (x / torch.where(scale == 0, 1, scale)).round().clamp(-128, 127).to(torch.int8), scale


@quantize_kv.near_miss("rounds-down")
def _(x):
    """The quotient is rounded down, an error of up to a whole step: round to the nearest integer."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / torch.where(scale == 0, 1, scale)).floor().clamp(-127, 127).to(torch.int8), scale


@quantize_kv.near_miss("one-scale-per-channel")
def _(x):
    """The maximum runs over the tokens: that is a scale per channel, and a new token would change it. Take it over head_dim, the last axis."""
    return _rounded(x, x.abs().amax(dim=-2, keepdim=True) / 127)


@quantize_kv.near_miss("shared-across-the-batch")
def _(x):
    """One scale serves a token of all sequences: they have nothing to do with each other, so take the maximum over head_dim alone."""
    scale = (x.abs().amax(dim=(0, -1), keepdim=True) / 127).expand(*x.shape[:-1], 1).clone()
    return _rounded(x, scale)


@quantize_kv.near_miss("divided-by-128")
def _(x):
    """The scale is the largest magnitude divided by 128: int8 ends at 127, so the largest number does not fit. Divide by 127."""
    return _rounded(x, x.abs().amax(dim=-1, keepdim=True) / 128)


@quantize_kv.near_miss("asymmetric")
def _(x):
    """The scale comes from the distance between smallest and largest value: symmetric quantisation has no offset, and takes the largest magnitude."""
    low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
    scale = (high - low) / 254
    return _rounded(x - (high + low) / 2, scale)


@quantize_kv.near_miss("epsilon-added")
def _(x):
    """Something small is added to the scale against a division by 0, and it shows where the numbers are small: the scale is the largest magnitude / 127, and only a row of zeros needs care."""
    return _rounded(x, x.abs().amax(dim=-1, keepdim=True) / 127 + 1e-5)


@quantize_kv.near_miss("epsilon-at-least")
def _(x):
    """The scale has a least value, such as 1e-5, against a division by 0, and rows of small numbers lose their digits: divide by 1 where it is 0, and keep all others."""
    return _rounded(x, (x.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-5))


@quantize_kv.near_miss("scale-without-axis")
def _(x):
    """The scale has lost its last axis: keep it with size 1 (`keepdim=True`), so that q * scale broadcasts over head_dim."""
    q, scale = _rounded(x, x.abs().amax(dim=-1, keepdim=True) / 127)
    return q, scale.squeeze(-1)


@quantize_kv.near_miss("always-float32-scale")
def _(x):
    """The scale is float32 whatever x is: give it in the dtype of x, and what comes back has that dtype too."""
    return _rounded(x.float(), x.float().abs().amax(dim=-1, keepdim=True) / 127)


@quantize_kv.near_miss("forgets-the-scale", of="dequantize_kv")
def _(q, scale):
    """The integers come back as they are: multiply by the scale."""
    return q.to(scale.dtype)


@quantize_kv.near_miss("divides-by-the-scale", of="dequantize_kv")
def _(q, scale):
    """The integers are divided by the scale: x / scale was the way there, so the way back multiplies."""
    return q.to(scale.dtype) / torch.where(scale == 0, 1, scale)


@quantize_kv.near_miss("back-in-float32", of="dequantize_kv")
def _(q, scale):
    """The result is float32 whatever the scale is: give it in the dtype of the scale."""
    return q.float() * scale.float()


# PagedKVCache

PagedKVCache = Exercise("PagedKVCache", ref, see="pages")


def _pages(g: Gen, pages: int, size: int, steps: list[tuple], dtype: torch.dtype = F32) -> Case:
    """Performs steps such as ("append", 7, 3), ("free", 7), ("refused", 7, 5); looks at everything after each.

    A sequence is looked at while it holds tokens.
    """
    given = [
        (g.randn(2, s[2], 3, dtype=dtype), g.randn(2, s[2], 3, dtype=dtype)) if len(s) > 2 else ()
        for s in steps
    ]

    def run(s: Subject) -> None:
        cache = s.new("PagedKVCache", pages, size, 2, 3, dtype, "cpu")
        s.get(cache, "free_pages")
        alive: list[int] = []
        for (step, sequence, *_), rows_ in zip(steps, given, strict=True):
            if step == "refused":
                s.method_raises(ValueError, cache, "append", sequence, *rows_)
            elif step == "append":
                s.method(cache, "append", sequence, *rows_)
                alive += [sequence] if sequence not in alive else []
            else:
                s.method(cache, "free", sequence)
                alive.remove(sequence)
            s.get(cache, "free_pages")
            for other in alive:
                s.method(cache, "gather", other)

    return scenario(run)


@PagedKVCache.group("values", share=3)
def _(g: Gen):
    """Gathers all tokens of a sequence in order, wherever its pages lie."""
    yield _pages(g, 6, 4, [("append", 0, 3)]).says("one sequence in one page")
    yield _pages(g, 6, 4, [("append", 0, 1)] * 6).says("token by token, across a page's end")
    yield _pages(g, 8, 2, [("append", 0, 3), ("append", 1, 2), ("append", 0, 2), ("append", 1, 3)]).says(
        "two sequences that grow in turn"
    )
    yield _pages(g, 9, 3, [("append", 17, 7), ("append", 3, 1), ("append", 240, 4), ("append", 17, 1)]).says(
        "three sequences with ids 17, 3 and 240"
    )
    yield _pages(g, 5, 1, [("append", 4, 2), ("append", 2, 1), ("append", 4, 2)]).says("pages of one token")
    k, v = (g.randn(5, 2, 3).transpose(0, 1) for _ in range(2))

    def keywords(s: Subject) -> None:
        cache = s.new(
            "PagedKVCache",
            pages=4,
            page_size=2,
            kv_heads=2,
            head_dim=3,
            dtype=F32,
            device=torch.device("cpu"),
        )
        s.method(cache, "append", sequence=9, k=k, v=v)
        s.method(cache, "gather", sequence=9)
        s.method(cache, "free", sequence=9)
        s.get(cache, "free_pages")

    yield scenario(keywords).says("inputs that are not contiguous, arguments by keyword")


@PagedKVCache.group("free", share=1)
def _(g: Gen):
    """Uses freed pages again; a freed sequence starts empty."""
    yield _pages(
        g,
        4,
        2,
        [("append", 1, 3), ("append", 2, 4), ("free", 1), ("append", 3, 3), ("free", 2), ("append", 3, 4)],
    ).says("pages of two freed sequences go to a third")
    yield _pages(g, 3, 2, [("append", 5, 3), ("free", 5), ("append", 5, 2), ("append", 5, 1)]).says(
        "the same id after it was freed"
    )
    yield _pages(
        g, 2, 2, [("append", i, 4) if n == 0 else ("free", i) for i in range(4) for n in (0, 1)]
    ).says("the whole pool, four times over")


@PagedKVCache.group("exhausted", share=2)
def _(g: Gen):
    """Refuses rows that need more pages than are free with a ValueError, and changes nothing."""
    yield _pages(g, 3, 2, [("append", 1, 3), ("refused", 1, 4), ("append", 1, 1), ("append", 1, 2)]).says(
        "a sequence that outgrows the pool, then one that fits"
    )
    yield _pages(g, 3, 2, [("append", 1, 3), ("refused", 2, 3), ("append", 2, 2), ("refused", 2, 1)]).says(
        "a new sequence that does not fit, then one that does"
    )
    yield _pages(
        g, 3, 4, [("append", 1, 5), ("append", 2, 3), ("refused", 1, 4), ("append", 1, 3), ("append", 2, 1)]
    ).says("room in the last pages, but no free page")
    yield _pages(
        g, 2, 2, [("refused", 1, 5), ("append", 1, 4), ("free", 1), ("refused", 2, 5), ("append", 2, 3)]
    ).says("refused, full, freed, refused, used again")


@PagedKVCache.group("dtypes", share=1)
def _(g: Gen):
    """Stores and returns the dtype it was made with."""
    for dtype in (F16, BF16, F64):
        yield _pages(g, 4, 2, [("append", 1, 3), ("append", 2, 1)], dtype).says(
            str(dtype).removeprefix("torch.")
        )


@PagedKVCache.group("independent", share=1)
def _(g: Gen):
    """Keeps sequences apart whatever their ids; shares no memory with another cache, with the tensors handed in, with earlier results."""
    ids = (0, 8, -8, 1, -1, 257, 2**32 + 1, 2**53 + 1, 2**53)
    named = [(i, g.randn(2, n, 3), g.randn(2, n, 3)) for n in (1, 2) for i in ids]

    def many(s: Subject) -> None:
        cache = s.new("PagedKVCache", 18, 2, 2, 3, F32, "cpu")
        for i, k, v in named:
            s.method(cache, "append", i, k, v)
        for i in ids:
            s.method(cache, "gather", i)

    yield scenario(many).says("ids that are negative, huge, or apart by a round number")
    given = [(g.randn(2, n, 3), g.randn(2, n, 3)) for n in (2, 3, 4, 1)]

    def two(s: Subject) -> None:
        a = s.new("PagedKVCache", 4, 2, 2, 3, F32, "cpu")
        s.method(a, "append", 1, *given[1])
        b = s.new("PagedKVCache", 4, 2, 2, 3, F32, "cpu")
        count(s, b, "free_pages")
        s.method(b, "append", 1, *given[0])
        s.method(a, "append", 1, *given[3])
        for cache in (a, b):
            s.method(cache, "gather", 1)
            s.get(cache, "free_pages")
        s.method(b, "free", 1)
        s.method(a, "gather", 1)

    yield scenario(two).says("two caches side by side")

    def look_back(s: Subject) -> None:
        cache = s.new("PagedKVCache", 1, 4, 2, 3, F32, "cpu")  # one page: it is the one that is used again
        s.method(cache, "append", 1, *given[0])
        earlier = keep(s, cache, "gather", 1)
        s.method(cache, "free", 1)
        s.method(cache, "append", 2, *given[2])
        s.method(earlier, "__getitem__", 0)
        s.method(earlier, "__getitem__", 1)

    yield scenario(look_back).says("what was gathered stays when its pages are used again")

    def overwrite(s: Subject, rows_: tuple) -> None:
        cache = s.new("PagedKVCache", 4, 2, 2, 3, F32, "cpu")
        s.method(cache, "append", 1, *rows_)
        source = keep(s, cache, "gather", 1)
        live = [keep(s, keep(s, source, "__getitem__", i), "clone") for i in (0, 1)]
        s.method(cache, "append", 2, *live)
        for tensor in live:
            s.ask_method(tensor, "zero_")
        s.method(cache, "gather", 2)

    for words, rows_ in zip(("a page", "a page and a half", "two pages"), given, strict=False):
        yield scenario(lambda s, rows_=rows_: overwrite(s, rows_)).says(
            f"{words} of rows is changed after it was handed in"
        )


class _Paged:
    """What the near-misses of the paged cache share."""

    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        self.size = page_size
        self.k = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.pool, self.tables, self.lengths = list(range(pages)), {}, {}

    @property
    def free_pages(self):
        return len(self.pool)

    def need(self, sequence, new):
        have = len(self.tables.get(sequence, [])) * self.size
        return max(0, math.ceil((self.lengths.get(sequence, 0) + new - have) / self.size))

    def append(self, sequence, k, v):
        need = self.need(sequence, k.shape[1])
        if need > len(self.pool):
            raise ValueError(f"PagedKVCache.append needs {need} free pages, got {len(self.pool)}")
        self.take(sequence, need)
        self.write(sequence, k, v)

    def take(self, sequence, need):
        table = self.tables.setdefault(sequence, [])
        table += [self.pool.pop(0) for _ in range(need)]

    def write(self, sequence, k, v):
        for i in range(k.shape[1]):
            at = self.lengths.get(sequence, 0)
            page, row = self.tables[sequence][at // self.size], at % self.size
            self.k[page, :, row], self.v[page, :, row] = k[:, i], v[:, i]
            self.lengths[sequence] = at + 1

    def gather(self, sequence):
        length, table = self.lengths[sequence], self.tables[sequence]
        return tuple(torch.cat([t[p] for p in table], dim=1)[:, :length] for t in (self.k, self.v))

    def free(self, sequence):
        self.pool += self.tables.pop(sequence)
        del self.lengths[sequence]


@PagedKVCache.near_miss("reads-across-pages")
class _(_Paged):
    """The rows behind the first page are read as if the pages of a sequence lay side by side: follow the block table, page by page."""

    def gather(self, sequence):
        length, first = self.lengths[sequence], self.tables[sequence][0]
        flat = (t.transpose(1, 2).flatten(0, 1)[first * self.size :][:length] for t in (self.k, self.v))
        return tuple(t.transpose(0, 1) for t in flat)


@PagedKVCache.near_miss("pages-by-number")
class _(_Paged):
    """The pages are read in the order of their numbers: the block table lists them in the order of the tokens, so follow it."""

    def gather(self, sequence):
        length, table = self.lengths[sequence], sorted(self.tables[sequence])
        return tuple(torch.cat([t[p] for p in table], dim=1)[:, :length] for t in (self.k, self.v))


@PagedKVCache.near_miss("keys-and-values-swapped")
class _(_Paged):
    """Keys and values have changed places on the way out: return the pair in the order (keys, values)."""

    def gather(self, sequence):
        keys, values = super().gather(sequence)
        return values, keys


@PagedKVCache.near_miss("values-from-keys")
class _(_Paged):
    """The values that come back are keys: keep two pools, one for k and one for v."""

    def append(self, sequence, k, v):
        super().append(sequence, k, k)


@PagedKVCache.near_miss("one-page-too-many")
class _(_Paged):
    """A page is taken before it is needed: n tokens need ceil(n / page_size) pages, and a full page needs no empty one behind it."""

    def need(self, sequence, new):
        total = self.lengths.get(sequence, 0) + new
        return total // self.size + 1 - len(self.tables.get(sequence, []))


@PagedKVCache.near_miss("ids-cut-to-size")
class _(_Paged):
    """Sequences whose ids differ share a block table, since the ids are cut to a small number: any int may be an id, so look it up in a dict."""

    def append(self, sequence, k, v):
        super().append(sequence % 8, k, v)

    def gather(self, sequence):
        return super().gather(sequence % 8)

    def free(self, sequence):
        super().free(sequence % 8)


@PagedKVCache.near_miss("whole-pages")
class _(_Paged):
    """Whole pages come back, with the rows that nothing was written to: cut at the sequence's length."""

    def gather(self, sequence):
        return tuple(torch.cat([t[p] for p in self.tables[sequence]], dim=1) for t in (self.k, self.v))


@PagedKVCache.near_miss("new-page-per-append")
class _(_Paged):
    """Every append takes new pages though the last one has room: fill it first, or pages run out too early."""

    def append(self, sequence, k, v):
        need = math.ceil(k.shape[1] / self.size)
        if need > len(self.pool):
            raise ValueError(f"PagedKVCache.append needs {need} free pages, got {len(self.pool)}")
        pages = [self.pool.pop(0) for _ in range(need)]
        self.tables.setdefault(sequence, []).extend(
            (pages[i // self.size], i % self.size) for i in range(k.shape[1])
        )
        for i in range(k.shape[1]):
            self.k[pages[i // self.size], :, i % self.size] = k[:, i]
            self.v[pages[i // self.size], :, i % self.size] = v[:, i]

    def gather(self, sequence):
        return tuple(
            torch.stack([t[p, :, r] for p, r in self.tables[sequence]], dim=1) for t in (self.k, self.v)
        )

    def free(self, sequence):
        self.pool += sorted({p for p, _ in self.tables.pop(sequence)})


@PagedKVCache.near_miss("pages-never-come-back")
class _(_Paged):
    """The pages of a freed sequence do not return to the pool: put them back, or the pool runs dry."""

    def free(self, sequence):
        del self.tables[sequence], self.lengths[sequence]


@PagedKVCache.near_miss("stale-after-free")
class _(_Paged):
    """The pages go back to the pool but the sequence still counts its old tokens: forget its block table and its length too."""

    def free(self, sequence):
        self.pool += self.tables[sequence]
        self.tables[sequence] = list(self.tables[sequence])


@PagedKVCache.near_miss("length-kept-after-free")
class _(_Paged):
    """The pages go back and the block table is gone, but the sequence's length is kept: when its id is used again, it does not start empty. Forget both."""

    def free(self, sequence):
        self.pool += self.tables.pop(sequence)


@PagedKVCache.near_miss("frees-everything")
class _(_Paged):
    """All pages are free after one sequence has ended, those of the others too: give back its own only."""

    def free(self, sequence):
        self.pool, self.tables, self.lengths = list(range(len(self.k))), {}, {}


@PagedKVCache.near_miss("one-page-comes-back")
class _(_Paged):
    """Only one page of a freed sequence returns to the pool: give back all that its block table lists."""

    def free(self, sequence):
        self.pool.append(self.tables.pop(sequence)[0])
        del self.lengths[sequence]


@PagedKVCache.near_miss("stores-what-fits")
class _(_Paged):
    """When the pool runs out in the middle, the rows before are already stored: find out first how many pages are needed, and refuse before anything changes."""

    def append(self, sequence, k, v):
        for i in range(k.shape[1]):
            super().append(sequence, k[:, i : i + 1], v[:, i : i + 1])


@PagedKVCache.near_miss("fills-the-last-page-before-refusing")
class _(_Paged):
    """What fits into the last page is stored before it turns out that pages are missing: compare first, and refuse before anything changes."""

    def append(self, sequence, k, v):
        room = len(self.tables.get(sequence, [])) * self.size - self.lengths.get(sequence, 0)
        if self.need(sequence, k.shape[1]) > len(self.pool) and room:
            super().append(sequence, k[:, :room], v[:, :room])
        super().append(sequence, k, v)


@PagedKVCache.near_miss("counted-though-refused")
class _(_Paged):
    """The new rows are counted before it turns out that pages are missing: a refused append must leave the length as it was."""

    def append(self, sequence, k, v):
        start, need = self.lengths.get(sequence, 0), self.need(sequence, k.shape[1])
        self.lengths[sequence] = start + k.shape[1]
        if need > len(self.pool):
            raise ValueError(f"PagedKVCache.append needs {need} free pages, got {len(self.pool)}")
        self.lengths[sequence] = start
        super().append(sequence, k, v)


@PagedKVCache.near_miss("takes-pages-before-refusing")
class _(_Paged):
    """The free pages are taken before it turns out that they are too few, and are lost: compare first, then take."""

    def append(self, sequence, k, v):
        need = self.need(sequence, k.shape[1])
        pages, self.pool = self.pool[:need], self.pool[need:]
        if len(pages) < need:
            raise ValueError(f"PagedKVCache.append needs {need} free pages, got {len(pages)}")
        self.tables.setdefault(sequence, []).extend(pages)
        self.write(sequence, k, v)


@PagedKVCache.near_miss("ignores-room-in-the-last-page")
class _(_Paged):
    """The check counts pages for all new rows although some fit into the last page: what is needed is ceil((length + new) / page_size) minus the pages held."""

    def append(self, sequence, k, v):
        need = math.ceil(k.shape[1] / self.size)
        if need > len(self.pool):
            raise ValueError(f"PagedKVCache.append needs {need} free pages, got {len(self.pool)}")
        super().append(sequence, k, v)


@PagedKVCache.near_miss("one-table-for-all")
class _(_Paged):
    """All sequences share one block table, so each reads the tokens of the others: keep a table for each sequence."""

    def append(self, sequence, k, v):
        super().append(0, k, v)

    def gather(self, sequence):
        return super().gather(0)

    def free(self, sequence):
        super().free(0)


@PagedKVCache.near_miss("views-of-pages")
class _(_Paged):
    """What gather returned is a view of a page, and changes when the page is used again: return a copy."""

    def gather(self, sequence):
        if len(self.tables[sequence]) == 1:
            page, length = self.tables[sequence][0], self.lengths[sequence]
            return self.k[page, :, :length], self.v[page, :, :length]
        return super().gather(sequence)


@PagedKVCache.near_miss("tokens-for-pages")
class _(_Paged):
    """free_pages counts free rows: a page that holds one token belongs to its sequence whole, so count pages."""

    @property
    def free_pages(self):
        return len(self.k) * self.size - sum(self.lengths.values())


@PagedKVCache.near_miss("shared-by-all")
class _(_Paged):
    """All caches share one pool of pages (a class attribute or a default argument): make it in __init__, for each cache."""

    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        super().__init__(pages, page_size, kv_heads, head_dim, dtype, device)
        self.k, self.v = shared_buffers(pages, kv_heads, page_size, head_dim, dtype, str(device))
