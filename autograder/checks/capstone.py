"""What is right in the capstone, and what its near-misses mean.

Steps are judged with a right cache that stays beside the implementation (`GrowingCache`), so that each exercise stands on its own; only
`generate_text` works with the answer's own cache and step. Most cases run on small random models, those called "bundled" on the
model that the course trained, with prompts on which the best token leads by far more than rounding (a test says so). The counts of
the last group are those of the leaderboard; they depend on lengths alone.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from autograder.inside.codec import Handle
from autograder.inside.engine import clone_tree
from autograder.spec import Exercise, Gen, Subject, call, scenario
from course_llm import capstone as ref
from course_llm.attention import merge_heads, split_heads
from course_llm.decoding import sample_from_uniform, sampling_distribution
from course_llm.kv_cache import cached_attention, rope_at
from course_llm.mla import low_rank_factors
from course_llm.weights import LatentLayerWeights, LayerWeights, ModelWeights

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
PROMPTS = (  # seven tokens each
    "optic nerve glioma: A",
    "retinal ganglion cell: A neuron",
    "hereditary anemia: An anemia that",
    "pulmonary artery: An artery that",
    "acute leukemia: A leukemia that",
    "osteoblast: A cell that",
)
PROMPT_TOKENS, NEW_TOKENS = 42, 9  # what the leaderboard counts: all prompts in one


@functools.cache
def bundled() -> tuple[ModelWeights, ModelWeights, Callable[[str], list[int]], int]:
    """The bundled model with keys and values, the same with latents, its encoder, and its end of text."""
    from course_llm.bundled import bundled_weights

    weights, tokenizer = bundled_weights()
    return weights, ref.with_latents(weights, weights.norm.shape[0]), tokenizer.encode, tokenizer.eos_id


def prompt(*texts: str) -> Tensor:
    """Prompts of one length as a batch of ids."""
    return torch.tensor([bundled()[2](text) for text in texts])


def layer(
    g: Gen, d_hidden: int, heads: int, head_dim: int, d_ff: int = 8, dtype: torch.dtype = F32
) -> LayerWeights:
    """A random layer whose results are of order one."""

    def matrix(rows: int, columns: int) -> Tensor:
        return g.randn(rows, columns, dtype=dtype) / math.sqrt(rows)

    def scale(width: int) -> Tensor:
        return 1 + 0.5 * g.rand(width, dtype=dtype)

    width = heads * head_dim
    return LayerWeights(
        norm1=scale(d_hidden),
        w_q=matrix(d_hidden, width),
        w_k=matrix(d_hidden, width),
        w_v=matrix(d_hidden, width),
        q_norm=scale(head_dim),
        k_norm=scale(head_dim),
        w_o=matrix(width, d_hidden),
        norm2=scale(d_hidden),
        w_up=matrix(d_hidden, d_ff),
        w_down=matrix(d_ff, d_hidden),
    )


def latent_layer(
    g: Gen, d_hidden: int, heads: int, head_dim: int, d_c: int, d_ff: int = 8, dtype: torch.dtype = F32
) -> LatentLayerWeights:
    """A random layer with latents."""
    fields = vars(layer(g, d_hidden, heads, head_dim, d_ff, dtype)).copy()
    del fields["w_k"], fields["w_v"]
    width = heads * head_dim
    return LatentLayerWeights(
        **fields,
        w_dkv=g.randn(d_hidden, d_c, dtype=dtype) / math.sqrt(d_hidden),
        w_uk=g.randn(d_c, width, dtype=dtype) / math.sqrt(d_c),
        w_uv=g.randn(d_c, width, dtype=dtype) / math.sqrt(d_c),
    )


def model(g: Gen, *layers: LayerWeights | LatentLayerWeights, heads: int, vocab: int) -> ModelWeights:
    """A model of these layers with a random embedding."""
    like = layers[0].norm1
    embedding = g.randn(vocab, like.shape[0], dtype=like.dtype)
    return ModelWeights(embedding, layers, 1 + 0.5 * g.rand(*like.shape, dtype=like.dtype), heads)


def small_model(g: Gen, layers: int = 2, vocab: int = 13) -> ModelWeights:
    """A random model whose text changes: with an output matrix tied to the embedding, most would repeat their last token.

    Half of the last norm's scales are negative, so that a token is not its own best follower, and attention weighs more.
    """
    made = model(g, *(layer(g, 16, 2, 8, 24) for _ in range(layers)), heads=2, vocab=vocab)
    louder = tuple(dataclasses.replace(w, w_o=2 * w.w_o) for w in made.layers)
    signs = torch.tensor([1.0, -1.0]).repeat(8)
    return dataclasses.replace(made, embedding=made.embedding / 2, layers=louder, norm=signs * made.norm)


def whole(number: float) -> str:
    return f"{number:,.0f}"


# ---- ModelCache

ModelCache = Exercise("ModelCache", ref, see="capstone-cache")


def fill(s: Subject, cache: Handle, *layers: tuple[Tensor, ...]) -> None:
    """One step: every layer in turn gets its rows."""
    for index, rows in enumerate(layers):
        s.method(cache, "update", index, *rows)


def pairs(g: Gen, layers: int, new: int) -> list[tuple[Tensor, Tensor]]:
    return [(g.randn(2, 3, new, 4), g.randn(2, 3, new, 4)) for _ in range(layers)]


@ModelCache.group("values", share=2)
def _(g: Gen):
    """Returns all rows of the layer so far, for any number of tensors."""

    steps = [pairs(g, 3, new) for new in (4, 1, 1, 3)]

    def run(s: Subject) -> None:
        cache = s.new("ModelCache", 3, 9)
        for step in steps:
            fill(s, cache, *step)

    yield scenario(run).says("keys and values of 3 layers: a prompt, two tokens, a chunk")
    latents = [g.randn(2, new, 5, dtype=F64) for new in (1, 3, 1, 2)]  # one row first: it fits in any number

    def one(s: Subject) -> None:
        cache = s.new("ModelCache", 1, 7)
        for rows in latents:
            s.method(cache, "update", 0, rows)

    yield scenario(one).says("one tensor, a latent, in float64")
    others = [(g.randn(1, 2, new, 4), g.randn(1, 2, new, 6), g.randn(1, new, 2)) for new in (2, 1)]

    def several(s: Subject) -> None:
        first, second = s.new("ModelCache", 2, 5), s.new("ModelCache", 2, 5)
        for rows in others:
            fill(s, first, rows, tuple(-r for r in rows))
            fill(s, second, tuple(2 * r for r in rows), rows)

    yield scenario(several).says("three tensors of different widths, two caches side by side")
    mixed = [(pairs(g, 1, new)[0], (g.randn(2, new, 5),)) for new in (3, 1, 2)]

    def kinds(s: Subject) -> None:
        cache = s.new("ModelCache", 2, 6)
        for step in mixed:
            fill(s, cache, *step)

    yield scenario(kinds).says("keys and values in one layer, latents in the next")
    both = [(g.randn(1, 2, new, 4), g.randn(1, 2, new, 4, dtype=F64)) for new in (2, 1)]

    def dtypes(s: Subject) -> None:
        cache = s.new("ModelCache", 1, 4)
        for rows in both:
            s.method(cache, "update", 0, *rows)

    yield scenario(dtypes).says("two tensors of different dtypes")


@ModelCache.group("length", share=1)
def _(g: Gen):
    """Length is what all layers hold: it grows with the last layer's rows."""
    steps = [pairs(g, 3, new) for new in (2, 1, 3)]

    def run(s: Subject) -> None:
        cache = s.new("ModelCache", 3, 8)
        s.get(cache, "length")
        for step in steps:
            for index, rows in enumerate(step):
                s.method(cache, "update", index, *rows)
                s.get(cache, "length")

    yield scenario(run).says("read after every update")


@ModelCache.group("overflow", share=1)
def _(g: Gen):
    """Refuses tokens that do not fit, and is unchanged then."""
    first, long, one = pairs(g, 2, 3), pairs(g, 2, 3), pairs(g, 2, 1)

    def run(s: Subject) -> None:
        cache = s.new("ModelCache", 2, 5)
        fill(s, cache, *first)
        s.method_raises(ValueError, cache, "update", 0, *long[0])
        s.get(cache, "length")
        fill(s, cache, *one)
        s.method(cache, "update", 0, *one[1])
        s.method_raises(ValueError, cache, "update", 0, *one[0])
        s.method(cache, "update", 1, *one[0])
        s.get(cache, "length")

    yield scenario(run).says("3 + 3 tokens into room for 5")

    def at_once(s: Subject) -> None:
        cache = s.new("ModelCache", 2, 2)
        s.method_raises(ValueError, cache, "update", 1, *long[1])
        fill(s, cache, *one)
        s.get(cache, "length")

    yield scenario(at_once).says("a prompt of 3 tokens into room for 2")


@ModelCache.group("reset", share=1)
def _(g: Gen):
    """Reset forgets all tokens of all layers."""
    before, after = pairs(g, 3, 4), pairs(g, 3, 2)

    def run(s: Subject) -> None:
        cache = s.new("ModelCache", 3, 5)
        fill(s, cache, *before)
        s.method(cache, "reset")
        s.get(cache, "length")
        fill(s, cache, *after)
        fill(s, cache, *after)
        s.get(cache, "length")

    yield scenario(run).says("filled, reset, filled again")

    def half(s: Subject) -> None:
        cache = s.new("ModelCache", 3, 5)
        s.method(cache, "reset")
        s.method(cache, "update", 0, *before[0])
        s.method(cache, "reset")
        fill(s, cache, *after)

    yield scenario(half).says("reset in the middle of a step")


@ModelCache.group("allocation", share=1)
def _(g: Gen):
    """Allocates the room for all tokens once, and holds nothing else."""
    steps = [pairs(g, 2, new) for new in (3, 1, 1)]

    def run(s: Subject) -> None:
        cache = s.new("ModelCache", 2, 40)
        room = 2 * 2 * (2 * 3 * 40 * 4)
        for step in steps:
            fill(s, cache, *step)
            held = s.held(cache)
            s.require(
                held >= room,
                f"the cache holds {held} elements, room for all 40 tokens takes 2 layers · 2 · {room // 4} = {room}: "
                "allocate it at the first update",
            )
            s.require(
                held <= room + 64,
                f"the cache holds {held} elements, 2 layers · 2 · {room // 4} = {room} are enough",
            )

    yield scenario(run).says("room for 40 tokens in 2 layers")
    long, first, again = pairs(g, 1, 6)[0], pairs(g, 1, 3)[0], pairs(g, 1, 5)[0]

    def kept(s: Subject) -> None:
        cache, room = s.new("ModelCache", 1, 5), 2 * (2 * 3 * 5 * 4)
        s.method_raises(ValueError, cache, "update", 0, *long)
        s.require(s.held(cache) <= 64, "a refused update has allocated memory: refuse first")
        fill(s, cache, first)
        s.method(cache, "reset")
        held = s.held(cache)
        s.require(held >= room, f"after reset the cache holds {held} elements: keep the memory, {room}")
        fill(s, cache, again)
        held = s.held(cache)
        s.require(held <= room + 64, f"filled again, the cache holds {held} elements, {room} are enough")

    yield scenario(kept).says("a refused prompt, a reset")


class _Cache(ref.ModelCache):
    """What the near-misses of the cache have in common."""

    def __init__(self, layers, max_seq):
        super().__init__(layers, max_seq)
        self.layers, self.max_seq = layers, max_seq


@ModelCache.near_miss("returns-the-new-rows")
class _(_Cache):
    """Only the new rows come back. The attention needs the rows of all tokens so far: return what the layer holds up to its new end."""

    def update(self, layer, *rows):
        super().update(layer, *rows)
        return rows


@ModelCache.near_miss("layers-share-rows")
class _(_Cache):
    """All layers write into the same rows. Each layer has keys and values of its own: keep one set of buffers per layer."""

    def update(self, layer, *rows):
        if not self._buffers[layer]:
            self._buffers[layer] = self._buffers[0]
        return super().update(layer, *rows)


@ModelCache.near_miss("length-of-the-first-layer")
class _(_Cache):
    """Length grows with the first layer's rows. The layers behind it would then rotate by positions that are off: all layers of one step must read the same length, so it grows with the last one's."""

    @property
    def length(self):
        return self._lengths[0]


@ModelCache.near_miss("no-refusal")
class _(_Cache):
    """More than max_seq tokens are taken. Compare length + new with max_seq before anything is written, and raise a ValueError."""

    def update(self, layer, *rows):
        if self._lengths[layer] + rows[0].shape[-2] <= self.max_seq:
            return super().update(layer, *rows)
        kept = tuple(
            b[..., : self._lengths[layer], :] for b in self._buffers[layer] or [r[..., :0, :] for r in rows]
        )
        return tuple(torch.cat((a, b), dim=-2) for a, b in zip(kept, rows, strict=True))


@ModelCache.near_miss("counts-before-it-refuses")
class _(_Cache):
    """A refused update has moved the count all the same: raise first, change afterwards."""

    def update(self, layer, *rows):
        try:
            return super().update(layer, *rows)
        except ValueError:
            self._lengths[layer] += rows[0].shape[-2]
            raise


@ModelCache.near_miss("reset-of-one-layer")
class _(_Cache):
    """Reset forgets the first layer's tokens alone: the counts of all layers go back to 0."""

    def reset(self):
        self._lengths[0] = 0


@ModelCache.near_miss("reset-frees-the-memory")
class _(_Cache):
    """Reset lets the memory go, and the next update allocates it again. Set the counts to 0 and keep the buffers: what is behind the counts is never read."""

    def reset(self):
        self.__init__(self.layers, self.max_seq)


@ModelCache.near_miss("writes-at-the-common-length")
class _(_Cache):
    """Rows are written where the shortest layer ends. A layer that is ahead of it loses rows: each layer's new rows stand behind its own."""

    def update(self, layer, *rows):
        self._lengths[layer] = self.length
        return super().update(layer, *rows)


@ModelCache.near_miss("first-rows-shape-all-layers")
class _(_Cache):
    """The first rows that come decide the shapes of all layers. A layer may hold a latent where the one before holds keys and values: allocate when a layer gets its own first rows."""

    def update(self, layer, *rows):
        found = super().update(layer, *rows)
        self._buffers = [b or tuple(map(torch.empty_like, self._buffers[layer])) for b in self._buffers]
        return found


@ModelCache.near_miss("grows-by-concatenation")
class _(_Cache):
    """The rows are right, but each update makes new tensors and copies the whole cache: allocate the room for max_seq tokens once and write the new rows only."""

    def update(self, layer, *rows):
        end = self._lengths[layer] + rows[0].shape[-2]
        if end > self.max_seq:
            raise ValueError(f"ModelCache.update needs at most max_seq={self.max_seq} tokens, got {end}")
        old = self._buffers[layer] if self._lengths[layer] else [r[..., :0, :] for r in rows]
        self._buffers[layer] = tuple(torch.cat((a, b), dim=-2) for a, b in zip(old, rows, strict=True))
        self._lengths[layer] = end
        return self._buffers[layer]


@ModelCache.near_miss("bare-tensor")
class _(_Cache):
    """One tensor came and one goes back bare: `update` returns a tuple always, so that whoever calls it need not ask how many there are."""

    def update(self, layer, *rows):
        found = super().update(layer, *rows)
        return found[0] if len(found) == 1 else found


@ModelCache.near_miss("last-row-refused")
class _(_Cache):
    """The last free row is refused: length + new may be max_seq, only more does not fit."""

    def update(self, layer, *rows):
        if self._lengths[layer] + rows[0].shape[-2] >= self.max_seq:
            raise ValueError(f"ModelCache.update needs at most max_seq={self.max_seq} tokens")
        return super().update(layer, *rows)


@ModelCache.near_miss("tokens-on-the-third-axis")
class _(_Cache):
    """The tokens are counted on axis 2, where keys and values of all heads have them: a latent has no heads. Count on the second to last axis, -2."""

    def update(self, layer, *rows):
        start, new = self._lengths[layer], rows[0].shape[2]
        if start + new > self.max_seq:
            raise ValueError(f"ModelCache.update needs at most max_seq={self.max_seq} tokens")
        if not self._buffers[layer]:
            self._buffers[layer] = tuple(r.new_empty(*r.shape[:-2], self.max_seq, r.shape[-1]) for r in rows)
        for buffer, r in zip(self._buffers[layer], rows, strict=True):
            buffer[..., start : start + new, :] = r
        self._lengths[layer] = start + new
        return tuple(buffer[..., : start + new, :] for buffer in self._buffers[layer])


@ModelCache.near_miss("dtype-of-the-first")
class _(_Cache):
    """All tensors of a layer are kept in the dtype of the first: each has its own."""

    def update(self, layer, *rows):
        return super().update(layer, *(r.to(rows[0].dtype) for r in rows))


# ---- attention_step

attention_step = Exercise("attention_step", ref, see="capstone-attention")


def ask_unchanged(s: Subject, function: str, *args) -> Tensor:
    """Asks, and requires that tensors which were handed in are as they were."""
    value = s.ask(function, *args)
    changed = s.transcript[-1].changed
    s.require(not changed, f"{', '.join(changed)} of {function} is changed in place")
    return value


def steps_of(
    function: str, x: Tensor, layers: list, heads: int, chunks: tuple[int, ...], tolerance: float = 5e-5
) -> Callable[[Subject], None]:
    """Pushes rows through some layers' attentions, chunk by chunk; every result is compared with float64's."""

    def run(s: Subject) -> None:
        cache, right = (
            s.module("GrowingCache", {}, layers=len(layers)),
            ref.ModelCache(len(layers), x.shape[1]),
        )
        for part in x.split(chunks, dim=1):
            for index, weights in enumerate(layers):
                got = ask_unchanged(s, function, part, weights, heads, cache, index)
                wide = clone_tree((part, weights), Tensor.double)
                want = getattr(ref, function)(*wide, heads, right, index).to(x.dtype)
                complaint = "the result is not attention over all tokens so far"
                s.require_close(got, want, complaint, tolerance, tolerance)

    return run


@attention_step.group("values", share=3)
def _(g: Gen):
    """Equals the model's attention, for a prompt, a chunk and one token at a time."""
    for words, chunks, layers in (
        ("a prompt", (5,), 1),
        ("a prompt, then one token after the other", (4, 1, 1, 1), 1),
        ("chunks, two layers", (3, 2, 4, 1), 2),
    ):
        made = [layer(g, 12, 3, 4) for _ in range(layers)]
        x = g.randn(2, sum(chunks), 12)
        yield scenario(steps_of("attention_step", x, made, 3, chunks)).says(words)
    made = [layer(g, 10, 2, 8)]
    yield scenario(steps_of("attention_step", g.randn(1, 6, 10), made, 2, (4, 1, 1))).says(
        "heads · head_dim is not d_hidden"
    )


@attention_step.group("cache", share=2)
def _(g: Gen):
    """Stores keys normed and rotated, and values, once per token; goes on in a cache that was filled before."""
    for past, new in ((6, 1), (40, 3)):
        weights, x = layer(g, 12, 3, 4), g.randn(2, new, 12)
        k, v = g.randn(2, 3, past, 4), g.randn(2, 3, past, 4)

        def run(s: Subject, weights=weights, x=x, k=k, v=v) -> None:
            cache = s.module("GrowingCache", {}, layers=1)
            s.ask_method(cache, "update", 0, k, v)
            got = s.ask("attention_step", x, weights, 3, cache, 0)
            right = ref.ModelCache(1, 64)
            right.update(0, k, v)
            want = ref.attention_step(x, weights, 3, right, 0)
            s.require_close(
                got,
                want,
                "the result is not attention over what the cache holds and the new rows",
                5e-5,
                5e-5,
            )
            held, tokens = s.held(cache), k.shape[2] + x.shape[1]
            enough = 2 * 2 * 3 * tokens * 4
            s.require(
                held == enough,
                f"after {tokens} tokens the cache holds {held} numbers; keys and values are 2 · batch · tokens · width = {enough}",
            )
            s.method(cache, "update", 0, k[:, :, :1], v[:, :, :1])

        yield scenario(run).says(f"{new} new after {past} tokens")


@attention_step.group("dtypes", share=1)
def _(g: Gen):
    """Keeps the dtype, and norms small rows with the epsilon 1e-5."""
    for dtype, tolerance in ((F64, 1e-5), (BF16, 0.1)):
        made = [layer(g, 12, 3, 4, dtype=dtype)]
        x = g.randn(2, 5, 12, dtype=dtype)
        yield scenario(steps_of("attention_step", x, made, 3, (4, 1), tolerance)).says(str(dtype))
    made, x = [layer(g, 12, 3, 4)], 0.01 * g.randn(2, 5, 12)
    yield scenario(steps_of("attention_step", x, made, 3, (4, 1), 1e-6)).says("rows of size 0.01")


def cost_complaint(flops: int, enough: int, words: str, formula: str) -> str:
    return f"{words} takes {whole(flops)} FLOPs, {formula} = {whole(enough)} are enough"


def require_cost(s: Subject, flops: int, enough: int, words: str, formula: str) -> None:
    s.require(flops <= enough, cost_complaint(flops, enough, words, formula))


@attention_step.group("cost", share=2)
def _(g: Gen):
    """Costs what its docstring says: projections for new rows only, scores for new rows only."""
    for past, new in ((30, 1), (20, 4), (0, 12)):
        weights, x = layer(g, 12, 3, 4), g.randn(2, new, 12)
        k, v = g.randn(2, 3, past, 4), g.randn(2, 3, past, 4)

        def run(s: Subject, weights=weights, x=x, k=k, v=v) -> None:
            cache = s.module("GrowingCache", {}, layers=1)
            past, new = k.shape[2], x.shape[1]
            if past:
                s.ask_method(cache, "update", 0, k, v)
            flops = s.measure("attention_step", x, weights, 3, cache, 0).flops
            enough = 2 * (8 * new * 12 * 12 + 4 * new * (past + new) * 12)
            formula = "batch · (8 · new · d_hidden · width + 4 · new · keys · width)"
            require_cost(s, flops, enough, f"{new} new after {past} tokens", formula)

        yield scenario(run).says(f"{new} new after {past} tokens")


def attention_with(
    x: Tensor,
    weights: LayerWeights,
    heads: int,
    cache,
    index: int,
    *,
    start: Callable = lambda past: past,
    norm: bool = True,
    norm_last: bool = False,
    norm_scale: bool = True,
    norm_width: bool = False,
    attend: Callable = cached_attention,
    rotate_values: bool = False,
    epsilon: float | None = 1e-5,
    rotate: Callable = rope_at,
    scales: Callable = lambda q_scale, k_scale: (q_scale, k_scale),
    norm_values: bool = False,
    project: Callable = lambda rows, w_o: rows @ w_o,
) -> Tensor:
    """The reference in small steps, each of which a near-miss gets wrong."""
    past = start(cache.length)
    q, k, v = x @ weights.w_q, x @ weights.w_k, x @ weights.w_v
    q_scale, k_scale = scales(weights.q_norm, weights.k_norm)
    if norm_width:
        q, k = (rms(t, s.repeat(heads)) for t, s in ((q, q_scale), (k, k_scale)))
        norm = False
    q, k, v = (split_heads(t, heads) for t in (q, k, v))
    if not norm_scale:
        q_scale, k_scale = torch.ones_like(q_scale), torch.ones_like(k_scale)
    if norm and not norm_last:
        q = q if q_scale is None else rms(q, q_scale, epsilon)
        k = k if k_scale is None else rms(k, k_scale, epsilon)
    q, k = rotate(q, past), rotate(k, past)
    if norm_last:
        q, k = rms(q, q_scale), rms(k, k_scale)
    if rotate_values:
        v = rope_at(v, past)
    if norm_values:
        v = rms(v, k_scale)
    k, v = cache.update(index, k, v)
    return project(merge_heads(attend(q, k, v)), weights.w_o)


def rms(x: Tensor, scale: Tensor, epsilon: float | None = 1e-5) -> Tensor:
    return F.rms_norm(x, scale.shape, scale, epsilon)


def rope_by_halves(x: Tensor, start: int) -> Tensor:
    """Rotates column i with column i + head_dim / 2."""
    pairs = x.unflatten(-1, (2, -1)).mT.flatten(-2)
    return rope_at(pairs, start).unflatten(-1, (-1, 2)).mT.flatten(-2)


@attention_step.near_miss("positions-from-zero")
def _(x, layer, heads, cache, index):
    """The new rows are rotated as if the text began with them. They stand behind what the cache holds: the first of them at `cache.length`."""
    return attention_with(x, layer, heads, cache, index, start=lambda past: 0)


@attention_step.near_miss("length-after-the-update")
def _(x, layer, heads, cache, index):
    """The queries' positions are read off the cache after its update. In the last layer it has grown by then: read `cache.length` first."""
    past = cache.length
    q, k, v = (split_heads(x @ w, heads) for w in (layer.w_q, layer.w_k, layer.w_v))
    k, v = cache.update(index, rope_at(rms(k, layer.k_norm), past), v)
    return merge_heads(cached_attention(rope_at(rms(q, layer.q_norm), cache.length), k, v)) @ layer.w_o


@attention_step.near_miss("no-norms")
def _(x, layer, heads, cache, index):
    """Queries and keys are not normed. This model has an RMSNorm on each head's queries and keys, before the rotation."""
    return attention_with(x, layer, heads, cache, index, norm=False)


@attention_step.near_miss("keys-alone-normed")
def _(x, layer, heads, cache, index):
    """The queries are not normed, only the keys are: this model has an RMSNorm on both, with the scales `q_norm` and `k_norm`."""
    return attention_with(x, layer, heads, cache, index, scales=lambda q, k: (None, k))


@attention_step.near_miss("queries-alone-normed")
def _(x, layer, heads, cache, index):
    """The keys are not normed, only the queries are: this model has an RMSNorm on both, with the scales `q_norm` and `k_norm`."""
    return attention_with(x, layer, heads, cache, index, scales=lambda q, k: (q, None))


@attention_step.near_miss("one-scale-for-both")
def _(x, layer, heads, cache, index):
    """Queries and keys are normed with the same scale: keys have their own, `k_norm`."""
    return attention_with(x, layer, heads, cache, index, scales=lambda q, k: (q, q))


@attention_step.near_miss("scales-swapped")
def _(x, layer, heads, cache, index):
    """The scales have changed places: `q_norm` belongs to the queries, `k_norm` to the keys."""
    return attention_with(x, layer, heads, cache, index, scales=lambda q, k: (k, q))


@attention_step.near_miss("values-normed-too")
def _(x, layer, heads, cache, index):
    """The values are normed, too: this model norms queries and keys alone."""
    return attention_with(x, layer, heads, cache, index, norm_values=True)


@attention_step.near_miss("no-positions")
def _(x, layer, heads, cache, index):
    """Nothing is rotated, so that the order of the tokens is lost: queries and keys are rotated by their positions."""
    return attention_with(x, layer, heads, cache, index, rotate=lambda rows, start: rows)


@attention_step.near_miss("keys-alone-rotated")
def _(x, layer, heads, cache, index):
    """The keys are rotated and the queries are not: a score depends on a distance only when both are."""
    past = cache.length
    q, k, v = (split_heads(x @ w, heads) for w in (layer.w_q, layer.w_k, layer.w_v))
    k, v = cache.update(index, rope_at(rms(k, layer.k_norm), past), v)
    return merge_heads(cached_attention(rms(q, layer.q_norm), k, v)) @ layer.w_o


@attention_step.near_miss("norms-its-rows-again")
def _(x, layer, heads, cache, index):
    """`norm1` is applied here, but x comes behind it already: whoever calls this norms the rows."""
    return attention_with(rms(x, layer.norm1), layer, heads, cache, index)


@attention_step.near_miss("adds-the-residual")
def _(x, layer, heads, cache, index):
    """x is added to the result: return what the attention gives, and leave the sum to whoever calls this."""
    return x + attention_with(x, layer, heads, cache, index)


@attention_step.near_miss("no-output-projection")
def _(x, layer, heads, cache, index):
    """The merged heads come back as they are: multiply them with `w_o`."""
    return attention_with(x, layer, heads, cache, index, project=lambda rows, w_o: rows)


@attention_step.near_miss("norm-over-all-heads")
def _(x, layer, heads, cache, index):
    """The norm runs over all heads together. Split into heads first: every head is divided by its own root mean square."""
    return attention_with(x, layer, heads, cache, index, norm_width=True)


@attention_step.near_miss("rotates-before-the-norm")
def _(x, layer, heads, cache, index):
    """Queries and keys are rotated before they are normed. The norm's scales belong to the unrotated columns: norm first."""
    return attention_with(x, layer, heads, cache, index, norm_last=True)


@attention_step.near_miss("forgets-the-scales")
def _(x, layer, heads, cache, index):
    """The norms leave out their scales `q_norm` and `k_norm`."""
    return attention_with(x, layer, heads, cache, index, norm_scale=False)


@attention_step.near_miss("mask-from-the-top-left")
def _(x, layer, heads, cache, index):
    """The causal mask begins at the first key, as `is_causal=True` does, so that new rows see the beginning of the text alone. The last query sees every key."""

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention_with(x, layer, heads, cache, index, attend=attend)


@attention_step.near_miss("no-mask")
def _(x, layer, heads, cache, index):
    """A prompt's rows see what stands behind them. One new token needs no mask, a prompt or a chunk does."""
    return attention_with(x, layer, heads, cache, index, attend=F.scaled_dot_product_attention)


@attention_step.near_miss("top-left-for-chunks")
def _(x, layer, heads, cache, index):
    """`is_causal=True` serves a prompt, and one token needs no mask; a chunk gets the mask of the text's beginning. It sees what stands before it, too: the last query sees every key."""

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)

    return attention_with(x, layer, heads, cache, index, attend=attend)


@attention_step.near_miss("chunk-unmasked")
def _(x, layer, heads, cache, index):
    """Only a prompt is masked. A chunk behind it has rows that must not see each other's future either: the mask follows from new rows and keys, whatever the cache holds."""

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] == k.shape[2])

    return attention_with(x, layer, heads, cache, index, attend=attend)


@attention_step.near_miss("halves-for-pairs")
def _(x, layer, heads, cache, index):
    """Columns are rotated with those half a head away, as Llama's code has it. In this model neighbours are a pair, columns 2i and 2i + 1, as in `apply_rope`."""
    return attention_with(x, layer, heads, cache, index, rotate=rope_by_halves)


@attention_step.near_miss("another-epsilon")
def _(x, layer, heads, cache, index):
    """The norms have another epsilon, torch's default perhaps: in this model it is 1e-5, and small rows tell the difference."""
    return attention_with(x, layer, heads, cache, index, epsilon=None)


@attention_step.near_miss("smaller-epsilon")
def _(x, layer, heads, cache, index):
    """The norms have the epsilon 1e-6, as many models do: in this one it is 1e-5, and small rows tell the difference."""
    return attention_with(x, layer, heads, cache, index, epsilon=1e-6)


@attention_step.near_miss("ignores-the-index")
def _(x, layer, heads, cache, index):
    """Every layer writes into the cache's first layer: hand the `index` on to `cache.update`."""
    return attention_with(x, layer, heads, cache, 0)


@attention_step.near_miss("stores-unrotated-keys")
def _(x, layer, heads, cache, index):
    """The cache holds keys before their rotation, and all of them are rotated at every step. It is the rotated key that is stored: then only new ones are rotated."""
    past = cache.length
    q, k, v = (split_heads(x @ w, heads) for w in (layer.w_q, layer.w_k, layer.w_v))
    k, v = cache.update(index, rms(k, layer.k_norm), v)
    return merge_heads(cached_attention(rope_at(rms(q, layer.q_norm), past), rope_at(k, 0), v)) @ layer.w_o


@attention_step.near_miss("scores-for-all-rows")
def _(x, layer, heads, cache, index):
    """Right but slow: scores are computed for old rows, too, and thrown away. Attend from the new queries alone."""

    def attend(q, k, v):
        blank = q.new_zeros(*q.shape[:2], k.shape[2] - q.shape[2], q.shape[3])
        return cached_attention(torch.cat((blank, q), dim=2), k, v)[:, :, -q.shape[2] :]

    return attention_with(x, layer, heads, cache, index, attend=attend)


# ---- latent_attention_step, latent_factors

latent_attention_step = Exercise(
    "latent_attention_step",
    ref,
    see="capstone-latents",
    functions=("latent_factors", "latent_attention_step"),
)


@latent_attention_step.group("values", share=4)
def _(g: Gen):
    """Equals attention with w_k = w_dkv · w_uk and w_v = w_dkv · w_uv, for a prompt, a chunk and one token at a time."""
    for words, chunks, layers, d_c in (
        ("a prompt", (5,), 1, 12),
        ("a prompt, then one token after the other", (4, 1, 1, 1), 1, 5),
        ("chunks, two layers", (3, 2, 4, 1), 2, 7),
    ):
        made = [latent_layer(g, 12, 3, 4, d_c) for _ in range(layers)]
        x = g.randn(2, sum(chunks), 12)
        yield scenario(steps_of("latent_attention_step", x, made, 3, chunks)).says(words)
    made = [latent_layer(g, 10, 2, 8, 3, dtype=F64)]
    yield scenario(
        steps_of("latent_attention_step", g.randn(1, 6, 10, dtype=F64), made, 2, (4, 1, 1), 1e-5)
    ).says("heads · head_dim is not d_hidden, in float64")


@latent_attention_step.group("cache", share=2)
def _(g: Gen):
    """Stores one latent per token and nothing else; goes on in a cache that was filled before."""
    for past, new, d_c in ((6, 1, 5), (30, 3, 8)):
        weights, x, c = latent_layer(g, 12, 3, 4, d_c), g.randn(2, new, 12), g.randn(2, past, d_c)

        def run(s: Subject, weights=weights, x=x, c=c) -> None:
            cache = s.module("GrowingCache", {}, layers=1)
            s.ask("latent_attention_step", x, weights, 3, cache, 0)
            tokens, d_c = x.shape[1], c.shape[2]
            held, enough = s.held(cache), 2 * tokens * d_c
            told = f"after {tokens} tokens the cache holds {held} numbers; latents are batch · tokens · d_c = {enough}"
            s.require(
                held != 2 * tokens * 12, told
            )  # two near-misses, each with its own step in the transcript
            s.require(held == enough, told)
            filled = s.module("GrowingCache", {}, layers=1)
            s.ask_method(filled, "update", 0, c)
            got = s.ask("latent_attention_step", x, weights, 3, filled, 0)
            right = ref.ModelCache(1, 64)
            right.update(0, c)
            want = ref.latent_attention_step(x, weights, 3, right, 0)
            s.require_close(
                got, want, "the result is not attention over the cached latents and the new", 5e-5, 5e-5
            )

        yield scenario(run).says(f"{new} new after {past} tokens")


def product(value: tuple, w_k: Tensor, w_v: Tensor, d_c: int) -> str | None:
    """Complains unless the factors' product is the best approximation of both projections together."""
    if not isinstance(value, tuple) or len(value) != 3 or not all(isinstance(t, Tensor) for t in value):
        return "the result should be a tuple of three tensors, (w_dkv, w_uk, w_uv)"
    shapes = [(w_k.shape[0], d_c), (d_c, w_k.shape[1]), (d_c, w_v.shape[1])]
    for name, tensor, shape in zip(("w_dkv", "w_uk", "w_uv"), value, shapes, strict=True):
        if tuple(tensor.shape) != shape:
            return f"{name} has shape {tuple(tensor.shape)}, it should be {shape}"
        if tensor.dtype != w_k.dtype:
            return f"{name} has dtype {tensor.dtype}, it should be {w_k.dtype}"
    got = torch.cat((value[0] @ value[1], value[0] @ value[2]), dim=1)
    a, b = low_rank_factors(torch.cat((w_k, w_v), dim=1), d_c)
    if not (got - a @ b).abs().max() <= 1e-4:
        error, least = (
            (got - torch.cat((w_k, w_v), dim=1)).norm(),
            (a @ b - torch.cat((w_k, w_v), dim=1)).norm(),
        )
        if error > least + 1e-4:
            return f"the product is off by {error:.3f} (norm of the difference), the best of rank {d_c} by {least:.3f}"
        return "the product is not the best approximation"
    return None


@latent_attention_step.group("factors", share=3)
def _(g: Gen):
    """`latent_factors` gives the best approximation of both projections together."""
    for d_hidden, width, d_c in ((12, 12, 5), (12, 12, 12), (10, 16, 1), (16, 6, 10)):
        w_k, w_v = g.randn(d_hidden, width), g.randn(d_hidden, width) * 0.5
        yield call(w_k, w_v, d_c).of("latent_factors").judge(product).says(f"d_c = {d_c} of {d_hidden}")


@latent_attention_step.group("errors", share=1)
def _(g: Gen):
    """`latent_factors` refuses a d_c outside of its bounds."""
    w_k, w_v = g.randn(6, 4), g.randn(6, 4)
    for d_c in (0, 7, -1):
        yield call(w_k, w_v, d_c).of("latent_factors").raises(ValueError).says(f"d_c = {d_c} of 6")
    narrow = call(g.randn(6, 2), g.randn(6, 2), 5).of("latent_factors")
    yield narrow.raises(ValueError).says("d_c = 5, with 6 rows and 2 + 2 columns")


@latent_attention_step.group("cost", share=2)
def _(g: Gen):
    """Costs at most what its docstring says: latents for new rows only, keys and values expanded once."""
    # with d_c = head_dim, absorbing the values costs no more than expanding them, in a prefill too
    for past, new in ((30, 1), (20, 4), (0, 12)):
        weights, x, c = latent_layer(g, 12, 3, 4, 4), g.randn(2, new, 12), g.randn(2, past, 4)

        def run(s: Subject, weights=weights, x=x, c=c) -> None:
            cache = s.module("GrowingCache", {}, layers=1)
            past, new = c.shape[1], x.shape[1]
            if past:
                s.ask_method(cache, "update", 0, c)
            flops = s.measure("latent_attention_step", x, weights, 3, cache, 0).flops
            keys = past + new
            expansion = 2 * 4 * keys * 4 * 12
            enough = 2 * (2 * new * 12 * (2 * 12 + 4) + 4 * new * keys * 12) + expansion
            formula = "batch · (2 · new · d_hidden · (2 · width + d_c) + 4 · keys · d_c · width + 4 · new · keys · width)"
            words = f"{new} new after {past} tokens"
            if flops > enough + expansion:  # more than one expansion too much
                words += ", keys and values expanded more than once,"
            s.require(flops <= enough + expansion, cost_complaint(flops, enough, words, formula))
            require_cost(s, flops, enough, words, formula)

        yield scenario(run).says(f"{new} new after {past} tokens")


def latent_with(
    x: Tensor,
    layer: LatentLayerWeights,
    heads: int,
    cache,
    index: int,
    *,
    queries_at: Callable = lambda past, length: past,
    turn_keys: bool = True,
    norm: bool = True,
    norm_last: bool = False,
    scale: Callable | None = None,
    attend: Callable = cached_attention,
    latent: Callable = lambda c: c,
) -> Tensor:
    """The reference in small steps, each of which a near-miss gets wrong."""
    past = cache.length
    (c,) = cache.update(index, latent(x @ layer.w_dkv))
    q, k, v = (split_heads(t, heads) for t in (x @ layer.w_q, c @ layer.w_uk, c @ layer.w_uv))
    if not norm_last:
        q = rms(q, layer.q_norm)
        k = rms(k, layer.k_norm) if norm else k
    q = rope_at(q, queries_at(past, cache.length))
    k = rope_at(k, 0) if turn_keys else k
    if norm_last:
        q, k = rms(q, layer.q_norm), rms(k, layer.k_norm)
    return merge_heads(attend(q if scale is None else q * scale(q, c), k, v)) @ layer.w_o


@latent_attention_step.near_miss("caches-keys-and-values")
def _(x, layer, heads, cache, index):
    """Right, but keys and values are cached, which the latent was to replace. Give the cache the latents of the new tokens and expand what comes back."""
    past = cache.length
    c = x @ layer.w_dkv
    q, k, v = (split_heads(t, heads) for t in (x @ layer.w_q, c @ layer.w_uk, c @ layer.w_uv))
    k, v = cache.update(index, rope_at(rms(k, layer.k_norm), past), v)
    return merge_heads(cached_attention(rope_at(rms(q, layer.q_norm), past), k, v)) @ layer.w_o


@latent_attention_step.near_miss("caches-hidden-rows")
def _(x, layer, heads, cache, index):
    """Right, but the hidden rows are cached, d_hidden numbers per token, and all of them are compressed again. Compress the new rows and cache what comes out."""
    past = cache.length
    (rows,) = cache.update(index, x)
    c = rows @ layer.w_dkv
    q, k, v = (split_heads(t, heads) for t in (x @ layer.w_q, c @ layer.w_uk, c @ layer.w_uv))
    q, k = rope_at(rms(q, layer.q_norm), past), rope_at(rms(k, layer.k_norm), 0)
    return merge_heads(cached_attention(q, k, v)) @ layer.w_o


@latent_attention_step.near_miss("multiplies-the-matrices")
def _(x, layer, heads, cache, index):
    """Right but slow: `w_dkv` is multiplied with `w_uk` and `w_uv`, which costs as much as many tokens. Expand the latents; the product of the matrices is never needed."""
    both = layer.w_dkv @ torch.cat((layer.w_uk, layer.w_uv), dim=1)
    return latent_with(x, layer, heads, cache, index) + 0 * both.sum()


@latent_attention_step.near_miss("length-after-the-update")
def _(x, layer, heads, cache, index):
    """The queries' positions are read off the cache after its update. In the last layer it has grown by then: read `cache.length` first."""
    return latent_with(x, layer, heads, cache, index, queries_at=lambda past, length: length)


@latent_attention_step.near_miss("rotates-before-the-norm")
def _(x, layer, heads, cache, index):
    """Queries and keys are rotated before they are normed. The norm's scales belong to the unrotated columns: norm first."""
    return latent_with(x, layer, heads, cache, index, norm_last=True)


@latent_attention_step.near_miss("queries-and-keys-begin-together")
def _(x, layer, heads, cache, index):
    """Queries and keys are rotated from the same position on. Keys are expanded for all tokens and begin at 0; queries are new and begin at `cache.length`, read before the update."""
    return latent_with(x, layer, heads, cache, index, queries_at=lambda past, length: 0)


@latent_attention_step.near_miss("unrotated-keys")
def _(x, layer, heads, cache, index):
    """The expanded keys are not rotated. The latent holds no position: key i is rotated by i each time it is expanded."""
    return latent_with(x, layer, heads, cache, index, turn_keys=False)


@latent_attention_step.near_miss("no-norm-on-keys")
def _(x, layer, heads, cache, index):
    """The expanded keys are not normed: in this model each head's keys pass an RMSNorm before they are rotated."""
    return latent_with(x, layer, heads, cache, index, norm=False)


@latent_attention_step.near_miss("scale-of-the-latent")
def _(x, layer, heads, cache, index):
    """The scores are divided by √d_c. Keys are head_dim wide, whatever they are made of: the scale is 1/√head_dim."""
    return latent_with(x, layer, heads, cache, index, scale=lambda q, c: math.sqrt(q.shape[-1] / c.shape[-1]))


@latent_attention_step.near_miss("no-mask-over-latents")
def _(x, layer, heads, cache, index):
    """A prompt's rows see what stands behind them: causal attention from the new rows to all keys is needed here as before."""
    return latent_with(x, layer, heads, cache, index, attend=F.scaled_dot_product_attention)


@latent_attention_step.near_miss("expands-for-every-query")
def _(x, layer, heads, cache, index):
    """Right but slow: all latents are expanded again for every new row. Keys and values are the same for all rows: expand once per call."""
    past = cache.length
    (c,) = cache.update(index, x @ layer.w_dkv)
    rows = []
    for i in range(x.shape[1]):
        q, k, v = (
            split_heads(t, heads) for t in (x[:, i : i + 1] @ layer.w_q, c @ layer.w_uk, c @ layer.w_uv)
        )
        q, k = rope_at(rms(q, layer.q_norm), past + i), rope_at(rms(k, layer.k_norm), 0)
        end = past + i + 1
        rows.append(merge_heads(cached_attention(q, k[:, :, :end], v[:, :, :end])) @ layer.w_o)
    return torch.cat(rows, dim=1)


@latent_attention_step.near_miss("latent-of-the-keys", of="latent_factors")
def _(w_k, w_v, d_c):
    """The latent is that of the keys, and the values are fitted to it. One latent serves both: take the singular value decomposition of `w_k` and `w_v` side by side."""
    if not 1 <= d_c <= min(w_k.shape[0], 2 * w_k.shape[1]):
        raise ValueError(f"latent_factors needs 1 <= d_c <= {min(w_k.shape[0], 2 * w_k.shape[1])}, got {d_c}")
    u = torch.linalg.svd(w_k)[0][:, :d_c]
    return u, u.T @ w_k, u.T @ w_v


@latent_attention_step.near_miss("first-columns", of="latent_factors")
def _(w_k, w_v, d_c):
    """The singular vectors are there, but not the singular values: multiply them into one of the two factors."""
    if not 1 <= d_c <= min(w_k.shape[0], 2 * w_k.shape[1]):
        raise ValueError(f"latent_factors needs 1 <= d_c <= {min(w_k.shape[0], 2 * w_k.shape[1])}, got {d_c}")
    u, _, vh = torch.linalg.svd(torch.cat((w_k, w_v), dim=1), full_matrices=False)
    w_uk, w_uv = vh[:d_c].chunk(2, dim=1)
    return u[:, :d_c], w_uk, w_uv


@latent_attention_step.near_miss("singular-values-twice", of="latent_factors")
def _(w_k, w_v, d_c):
    """The singular values are in both factors, so that the product has their squares: give them to one, or their square roots to both."""
    w_dkv, w_uk, w_uv = ref.latent_factors(w_k, w_v, d_c)
    s = torch.linalg.svdvals(torch.cat((w_k, w_v), dim=1))[:d_c]
    return w_dkv * s, w_uk, w_uv


@latent_attention_step.near_miss("smallest-singular-values", of="latent_factors")
def _(w_k, w_v, d_c):
    """The smallest singular values are kept: they come in descending order, and the first d_c carry the most."""
    if not 1 <= d_c <= min(w_k.shape[0], 2 * w_k.shape[1]):
        raise ValueError(f"latent_factors needs 1 <= d_c <= {min(w_k.shape[0], 2 * w_k.shape[1])}, got {d_c}")
    u, s, vh = torch.linalg.svd(torch.cat((w_k, w_v), dim=1), full_matrices=False)
    w_uk, w_uv = vh[-d_c:].chunk(2, dim=1)
    return u[:, -d_c:] * s[-d_c:], w_uk, w_uv


@latent_attention_step.near_miss("keys-for-values", of="latent_factors")
def _(w_k, w_v, d_c):
    """The two factors that expand have changed places: `w_uk` gives the keys and comes before `w_uv`."""
    w_dkv, w_uk, w_uv = ref.latent_factors(w_k, w_v, d_c)
    return w_dkv, w_uv, w_uk


@latent_attention_step.near_miss("bound-of-the-rows", of="latent_factors")
def _(w_k, w_v, d_c):
    """d_c is compared with d_hidden alone: `[w_k | w_v]` has 2 · width columns, and no rank above that either."""
    if not 1 <= d_c <= w_k.shape[0]:
        raise ValueError(f"latent_factors needs 1 <= d_c <= {w_k.shape[0]}, got {d_c}")
    u, s, vh = torch.linalg.svd(torch.cat((w_k, w_v), dim=1), full_matrices=False)
    w_uk, w_uv = vh[:d_c].chunk(2, dim=1)
    return u[:, :d_c] * s[:d_c], w_uk, w_uv


@latent_attention_step.near_miss("norms-the-latent")
def _(x, layer, heads, cache, index):
    """The latent is normed, as DeepSeek's models do: this one caches x · w_dkv as it is."""
    return latent_with(
        x, layer, heads, cache, index, latent=lambda c: F.rms_norm(c, c.shape[-1:], None, 1e-5)
    )


@latent_attention_step.near_miss("expands-new-latents-alone")
def _(x, layer, heads, cache, index):
    """Keys and values are expanded from the new latents alone: expand what the cache returns, the latents of all tokens."""
    past, c = cache.length, x @ layer.w_dkv
    cache.update(index, c)
    q, k, v = (split_heads(t, heads) for t in (x @ layer.w_q, c @ layer.w_uk, c @ layer.w_uv))
    q, k = rope_at(rms(q, layer.q_norm), past), rope_at(rms(k, layer.k_norm), 0)
    return merge_heads(cached_attention(q, k, v)) @ layer.w_o


@latent_attention_step.near_miss("any-rank", of="latent_factors")
def _(w_k, w_v, d_c):
    """A d_c that no approximation has, 0 or more than the matrix has rows, is taken: raise a ValueError."""
    u, s, vh = torch.linalg.svd(torch.cat((w_k, w_v), dim=1), full_matrices=False)
    w_uk, w_uv = vh[:d_c].chunk(2, dim=1)
    return u[:, :d_c] * s[:d_c], w_uk, w_uv


# ---- decoder_step

decoder_step = Exercise("decoder_step", ref, see="capstone-step", seconds=10.0)


def model_steps(
    weights: ModelWeights, ids: Tensor, chunks: tuple[int, ...], tolerance: float = 1e-4
) -> Callable[[Subject], None]:
    """Pushes ids through a model, chunk by chunk; every result is compared."""

    def run(s: Subject) -> None:
        layers = len(weights.layers)
        cache, right = s.module("GrowingCache", {}, layers=layers), ref.ModelCache(layers, ids.shape[1])
        for part in ids.split(chunks, dim=1):
            got = ask_unchanged(s, "decoder_step", weights, part, cache)
            want = ref.decoder_step(weights, part, right)
            s.require_close(got, want, "the logits are not the model's", tolerance, tolerance)

    return run


@decoder_step.group("values", share=2)
def _(g: Gen):
    """Returns the logits behind the last new token, for a prompt, a chunk and one token at a time."""
    for words, chunks, layers in (
        ("one layer, a prompt", (5,), 1),
        ("two layers, a prompt and then tokens", (3, 1, 1), 2),
        ("three layers, chunks", (2, 3), 3),
    ):
        weights = small_model(g, layers)
        yield scenario(model_steps(weights, g.ints(0, 13, 2, sum(chunks)), chunks)).says(words)


@decoder_step.group("bundled", share=1)
def _(g: Gen):
    """Runs the bundled model, and norms small rows with the epsilon 1e-5."""
    weights, *_ = bundled()
    text = g.python.choice(PROMPTS)
    # sums over 128 and 512 columns, in float32 and in any order
    yield scenario(model_steps(weights, prompt(text), (6, 1), 2e-3)).says(f"the bundled model reads {text!r}")
    small = quiet(small_model(g), 0.01)
    yield scenario(model_steps(small, g.ints(0, 13, 2, 5), (4, 1), 1e-5)).says("rows of size 0.01")


def quiet(weights: ModelWeights, size: float) -> ModelWeights:
    """The model with a residual stream so much smaller that the norms' epsilon counts."""
    layers = tuple(dataclasses.replace(w, w_o=size * w.w_o, w_down=size * w.w_down) for w in weights.layers)
    return dataclasses.replace(weights, embedding=size * weights.embedding, layers=layers)


@decoder_step.group("latents", share=1)
def _(g: Gen):
    """Takes layers with latents, and models that mix both kinds."""
    latent = [latent_layer(g, 16, 2, 8, 6, 24) for _ in range(2)]
    for words, layers in (
        ("two layers with latents", latent),
        ("one with keys and values, one with latents", [layer(g, 16, 2, 8, 24), latent[0]]),
    ):
        weights = model(g, *layers, heads=2, vocab=13)
        yield scenario(model_steps(weights, g.ints(0, 13, 2, 5), (3, 1, 1))).says(words)


@decoder_step.group("cost", share=2)
def _(g: Gen):
    """Computes the logits of the last token alone."""
    for new in (1, 9):
        weights = small_model(g, vocab=60)

        def run(s: Subject, weights=weights, ids=g.ints(0, 60, 2, new)) -> None:
            cache = s.module("GrowingCache", {}, layers=2)
            flops = s.measure("decoder_step", weights, ids, cache).flops
            new = ids.shape[1]
            enough = 2 * ref.step_flops(weights, new, new)
            formula = "batch · (the layers' products for new rows + 2 · d_hidden · vocab)"
            require_cost(s, flops, enough, f"a step of {new} tokens", formula)

        yield scenario(run).says(f"{new} new token{'s' if new > 1 else ''}")


def step_with(
    weights: ModelWeights,
    ids: Tensor,
    cache,
    *,
    norm1: bool = True,
    norm2: bool = True,
    last_norm: bool = True,
    residual: bool = True,
    parallel: bool = False,
    gelu: Callable = F.gelu,
    index_of: Callable = lambda index: index,
    row: int = -1,
    every_row: bool = False,
    scale: float = 1.0,
    adds_to_normed: bool = False,
    attention_residual: bool = True,
    layers: slice = slice(None),
    rms: Callable = rms,
) -> Tensor:
    """The reference in small steps, each of which a near-miss gets wrong."""
    x = weights.embedding[ids] * scale
    for index, w in enumerate(weights.layers[layers]):
        attend = ref.latent_attention_step if isinstance(w, LatentLayerWeights) else ref.attention_step
        mixed = attend(rms(x, w.norm1) if norm1 else x, w, weights.heads, cache, index_of(index))
        kept = x if attention_residual else 0
        old, x = x, (rms(x, w.norm1) if adds_to_normed else kept) + mixed
        source = old if parallel else x
        x = rms(x, w.norm2) if adds_to_normed else x
        x = (x if residual else 0) + gelu((rms(source, w.norm2) if norm2 else source) @ w.w_up) @ w.w_down
    if every_row:
        return (rms(x, weights.norm) @ weights.embedding.T)[:, row]
    x = x[:, row]
    return (rms(x, weights.norm) if last_norm else x) @ weights.embedding.T


@decoder_step.near_miss("no-last-norm")
def _(weights, ids, cache):
    """The last norm is missing: `weights.norm` stands between the layers and the output matrix."""
    return step_with(weights, ids, cache, last_norm=False)


@decoder_step.near_miss("no-first-norm")
def _(weights, ids, cache):
    """The attention reads the residual stream itself: it reads it through `norm1`."""
    return step_with(weights, ids, cache, norm1=False)


@decoder_step.near_miss("no-second-norm")
def _(weights, ids, cache):
    """The feed-forward network reads the residual stream itself: it reads it through `norm2`."""
    return step_with(weights, ids, cache, norm2=False)


@decoder_step.near_miss("one-residual")
def _(weights, ids, cache):
    """The feed-forward network's output replaces the residual stream: both parts of a layer add to it."""
    return step_with(weights, ids, cache, residual=False)


@decoder_step.near_miss("attention-without-residual")
def _(weights, ids, cache):
    """The attention's output replaces the residual stream: both parts of a layer add to it."""
    return step_with(weights, ids, cache, attention_residual=False)


@decoder_step.near_miss("first-norm-twice")
def _(weights, ids, cache):
    """Both parts of a layer read through `norm1`: the feed-forward network has a norm of its own, `norm2`."""
    layers = tuple(dataclasses.replace(w, norm2=w.norm1) for w in weights.layers)
    return step_with(dataclasses.replace(weights, layers=layers), ids, cache)


@decoder_step.near_miss("last-token-alone")
def _(weights, ids, cache):
    """Only the last new token goes through the layers: the others are not cached then, and those behind cannot see them. Take the last row behind the layers."""
    return step_with(weights, ids[:, -1:], cache)


@decoder_step.near_miss("last-layer-left-out")
def _(weights, ids, cache):
    """The last layer is left out: go through all of `weights.layers`."""
    return step_with(weights, ids, cache, layers=slice(-1))


@decoder_step.near_miss("probabilities")
def _(weights, ids, cache):
    """These are probabilities: return the logits, without a softmax."""
    return step_with(weights, ids, cache).softmax(dim=-1)


@decoder_step.near_miss("parallel-parts")
def _(weights, ids, cache):
    """The feed-forward network reads what stood there before the attention: in this model it reads the stream with the attention's result added."""
    return step_with(weights, ids, cache, parallel=True)


@decoder_step.near_miss("adds-to-the-normed-row")
def _(weights, ids, cache):
    """The normed row takes the place of the residual stream. The norms serve what goes into a part; what comes out is added to the row as it was."""
    return step_with(weights, ids, cache, adds_to_normed=True)


@decoder_step.near_miss("layer-norm")
def _(weights, ids, cache):
    """The norms subtract the mean: this model has RMSNorm, which does not."""
    return step_with(weights, ids, cache, rms=lambda x, s: F.layer_norm(x, s.shape, s, None, 1e-5))


@decoder_step.near_miss("another-epsilon")
def _(weights, ids, cache):
    """The norms have another epsilon, torch's default perhaps: in this model it is 1e-5, and small rows tell the difference."""
    return step_with(weights, ids, cache, rms=functools.partial(rms, epsilon=None))


@decoder_step.near_miss("smaller-epsilon")
def _(weights, ids, cache):
    """The norms have the epsilon 1e-6, as many models do: in this one it is 1e-5, and small rows tell the difference."""
    return step_with(weights, ids, cache, rms=functools.partial(rms, epsilon=1e-6))


@decoder_step.near_miss("tanh-gelu")
def _(weights, ids, cache):
    """GELU is its approximation by tanh, as in GPT-2: this model has the exact one, `F.gelu` without more."""
    return step_with(weights, ids, cache, gelu=functools.partial(F.gelu, approximate="tanh"))


@decoder_step.near_miss("relu")
def _(weights, ids, cache):
    """The feed-forward network has ReLU where this model has GELU."""
    return step_with(weights, ids, cache, gelu=F.relu)


@decoder_step.near_miss("first-row")
def _(weights, ids, cache):
    """The logits are those behind the first new token: what is asked for follows the last."""
    return step_with(weights, ids, cache, row=0)


@decoder_step.near_miss("scaled-embedding")
def _(weights, ids, cache):
    """The embedding is multiplied by √d_hidden, as in the first transformer: this model takes it as it is."""
    return step_with(weights, ids, cache, scale=math.sqrt(weights.norm.shape[0]))


@decoder_step.near_miss("one-cache-for-all-layers")
def _(weights, ids, cache):
    """Every layer uses the cache's first layer: give each its own index."""
    return step_with(weights, ids, cache, index_of=lambda index: 0)


@decoder_step.near_miss("logits-of-all-rows")
def _(weights, ids, cache):
    """Right but slow: the logits of all new tokens are computed, and all but the last are thrown away. Take the last row before the output matrix, a prompt's other rows predict what is known."""
    return step_with(weights, ids, cache, every_row=True)


# ---- generate_text

generate_text = Exercise("generate_text", ref, see="capstone-generator", seconds=30.0)


@generate_text.group("greedy", share=3)
def _(g: Gen):
    """Continues the prompt by the most probable tokens."""
    for words, batch, seq, new in (
        ("a batch of 3, 6 new tokens", 3, 4, 6),
        ("a prompt of one token", 2, 1, 5),
        ("one new token", 1, 5, 1),
        ("none", 2, 3, 0),
    ):
        yield call(small_model(g), g.ints(0, 13, batch, seq), new).says(words)
    yield call(tied_model(g), torch.tensor([[2, 5], [3, 3]]), 3).says("two tokens are equally probable")
    yield call(small_model(g, layers=1), g.ints(0, 13, 1, 600), 2).says("a prompt of 600 tokens")


def tied_model(g: Gen) -> ModelWeights:
    """A model whose tokens come in pairs, so that every best token has a twin; with one column each, no sum is rounded."""
    embedding = 4 * torch.eye(5, 16).repeat(2, 1)
    return dataclasses.replace(small_model(g), embedding=embedding)


@generate_text.group("bundled", share=2)
def _(g: Gen):
    """Writes what the bundled model writes."""
    weights, _, _, eos_id = bundled()
    texts = g.python.sample(PROMPTS, 3)
    yield call(weights, prompt(texts[0]), 16).says(f"the bundled model continues {texts[0]!r}")
    yield call(weights, prompt(*texts[1:]), 24, eos_id).says(
        f"{texts[1]!r} and {texts[2]!r} together, up to their ends"
    )


@generate_text.group("end", share=1)
def _(g: Gen):
    """Fills finished rows with the EOS, stops when all have finished, and takes no EOS of the prompt for an end."""
    weights, ids, plain, ends = ending_model(g)
    for row, column in ends:
        eos_id = int(plain[row, column])
        yield call(weights, ids, 8, eos_id).says("rows end at different places")
        yield call(weights, ids[row : row + 1], 8, eos_id).says("one row, which ends early")
        yield call(weights, plain[row : row + 1, : column + 1], 4, eos_id).says("an EOS in the prompt")
    order = torch.arange(13)
    order[0], order[eos_id] = eos_id, 0  # the same model and prompt with the EOS as token 0
    renamed = dataclasses.replace(weights, embedding=weights.embedding[order])
    yield call(renamed, order[ids], 8, 0).says("the EOS is token 0")


def ending_model(g: Gen) -> tuple[ModelWeights, Tensor, Tensor, list[tuple[int, int]]]:
    """A model, four prompts of three tokens, eight more each, and where two rows would end: they go on with other tokens."""
    while True:
        weights, ids = small_model(g), g.ints(0, 13, 4, 3)
        plain = ref.generate_text(weights, ids, 8)
        ends = {}
        for row, text in enumerate(plain.tolist()):
            for column in range(4, 8):
                if text[column] not in text[3:column] and text[column] != text[column + 1]:
                    ends.setdefault(row, (row, column))
        if len(ends) > 1:
            return weights, ids, plain, list(ends.values())[:2]


@generate_text.group("sampling", share=1)
def _(g: Gen):
    """Draws from the distribution with the row's own numbers; refuses a temperature without them."""
    weights, ids = small_model(g), g.ints(0, 13, 3, 4)
    yield call(weights, ids, 6, None, 1.0, uniforms=g.rand(3, 6)).says("temperature 1")
    flat = dataclasses.replace(
        weights, norm=weights.norm / 4
    )  # at a low temperature, too, more than one token is probable
    yield call(flat, ids, 6, None, 0.5, uniforms=g.rand(3, 6)).says("temperature 0.5")
    yield call(weights, ids, 9, None, 5.0, 3, uniforms=g.rand(3, 9)).says("temperature 5, the best three")
    yield call(weights, ids, 9, None, 4.0, None, 0.6, g.rand(3, 9)).says("temperature 4, top-p 0.6")
    yield call(weights, ids, 9, None, 5.0, 5, 0.7, g.rand(3, 9)).says(
        "temperature 5, the best five, top-p 0.7"
    )
    plain = ref.generate_text(weights, ids, 6, None, 1.5, None, None, uniforms := g.rand(3, 6))
    yield call(weights, ids, 6, int(plain[0, 5]), 1.5, None, None, uniforms).says("rows that end")
    # the best token alone, so that all who take a temperature without numbers give the same answer
    yield call(weights, ids, 6, None, 0.7, 1).raises(ValueError).says("no numbers at temperature 0.7")


@generate_text.group("latents", share=1)
def _(g: Gen):
    """Runs the bundled model with latents in the place of keys and values."""
    text = g.python.choice(PROMPTS)
    yield call(bundled()[1], prompt(text), 12).says(f"the bundled model with latents continues {text!r}")


def tokens_of(weights: ModelWeights, flops: int, prompt_tokens: int, new: int, batch: int) -> int:
    """About how many tokens per row cost so much: the steps' cost, and then that of the last step for each more."""
    more = flops / batch - ref.generation_flops(weights, prompt_tokens, new)
    return prompt_tokens + new - 1 + round(more / ref.step_flops(weights, 1, prompt_tokens + new))


@generate_text.group("cost", share=2)
def _(g: Gen):
    """Pushes prompt + new - 1 tokens per row through the model, and caches what must be cached."""
    weights = small_model(g, vocab=6)
    for words, seq, new in (("a prompt of 12, 6 new", 12, 6), ("a prompt of 2, one new", 2, 1)):

        def run(s: Subject, ids=g.ints(0, 6, 2, seq), new=new) -> None:
            flops = s.measure("generate_text", weights, ids, new).flops
            require_tokens(s, weights, flops, ids.shape[1], new, 2)
            require_steps(s, weights, ids, new)

        yield scenario(run).says(words)
    ending, ids, plain, ((row, column), _) = ending_model(g)
    eos_id, written = int(plain[row, column]), column - 2

    def early(s: Subject, ids=ids[row : row + 1]) -> None:
        flops = s.measure("generate_text", ending, ids, 8, eos_id).flops
        require_tokens(s, ending, flops, 3, written, 1)

    yield scenario(early).says(f"a row that has ended after {written} tokens")
    yield scenario(_bundled_cost).says(f"the bundled model, a prompt of {PROMPT_TOKENS}, {NEW_TOKENS} new")


def require_tokens(s: Subject, weights: ModelWeights, flops: int, seq: int, new: int, batch: int) -> None:
    """Requires the cost of prompt + new - 1 tokens; half a token, and the logits of the prompt, more are allowed."""
    enough = batch * ref.generation_flops(weights, seq, new)
    allowed = enough + batch * (
        ref.step_flops(weights, 1, seq + new) // 2 + 2 * seq * weights.embedding.numel()
    )
    pushed = tokens_of(weights, flops, seq, new, batch)
    told = (
        f"{seq} prompt and {new} new tokens cost {whole(flops)} FLOPs, those of about {pushed} tokens through the model; "
        f"prompt + new - 1 = {seq + new - 1} are enough, {whole(enough)} FLOPs"
    )
    s.require(flops <= allowed + 2 * batch * ref.step_flops(weights, 1, seq + new), told)
    s.require(flops <= allowed, told)


def require_steps(s: Subject, weights: ModelWeights, ids: Tensor, new: int) -> None:
    """Requires that the model is run `new` times: each run's logits cost so much more with a larger vocabulary."""
    more = 50
    rows = torch.randn(more, 16, generator=torch.Generator().manual_seed(5))  # no two logits are nearly equal
    wide = dataclasses.replace(weights, embedding=torch.cat((weights.embedding, rows)))

    def rows_of_logits(function: str, *args) -> float:
        flops = []
        for model in (weights, wide):
            cache = [] if args else [s.new("ModelCache", len(weights.layers), ids.shape[1])]
            flops.append(s.measure(function, model, ids, *args, *cache).flops)
        return (flops[1] - flops[0]) / (2 * 16 * more * ids.shape[0])

    runs = rows_of_logits("generate_text", new) - (rows_of_logits("decoder_step") - 1)
    s.require(
        runs < new + 0.5,
        f"the model is run {runs:.0f} times for {new} new token{'s' if new > 1 else ''}: the prompt goes through it in one step, as the first of {new}",
    )


def _bundled_cost(s: Subject) -> None:
    """Counts what generation with the bundled model costs and caches: the leaderboard's numbers."""
    ids = prompt(*PROMPTS).reshape(1, PROMPT_TOKENS)
    rows = PROMPT_TOKENS + NEW_TOKENS
    for kind, weights in zip(("", "latent "), bundled()[:2], strict=True):
        flops = s.measure("generate_text", weights, ids, NEW_TOKENS).flops
        require_tokens(s, weights, flops, PROMPT_TOKENS, NEW_TOKENS, 1)
        cache = s.new("ModelCache", len(weights.layers), rows)
        s.ask("decoder_step", weights, ids, cache)
        held = s.held(cache)
        per_token = sum(w.w_dkv.shape[1] if kind else 2 * w.w_q.shape[1] for w in weights.layers)
        s.require(
            held <= per_token * rows + 64,
            f"the cache for {rows} tokens holds {whole(held)} numbers, {whole(per_token * rows)} are enough",
        )
        s.count(f"{kind}flops", flops)
        s.count(f"{kind}cache_elements", held)


def generate_with(
    weights: ModelWeights,
    ids: Tensor,
    max_new_tokens: int,
    eos_id: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    uniforms: Tensor | None = None,
    *,
    best: Callable = lambda logits: logits.argmax(dim=-1),
    number: Callable = lambda uniforms, step: uniforms[:, step],
    fills: bool = True,
    stops: Callable = torch.all,
    ended: Callable = lambda ids, eos_id: torch.zeros(ids.shape[0], dtype=torch.bool),
    reads: Callable = lambda text, token: token[:, None],
    keeps_cache: bool = True,
    refuses: bool = True,
    reads_last: bool = False,
    room: int | None = None,
    begins: Callable = lambda weights, ids, cache: ids,
) -> Tensor:
    """The reference in small steps, each of which a near-miss gets wrong."""
    if temperature > 0 and uniforms is None:
        if refuses:
            raise ValueError("generate_text needs uniforms above temperature 0")
        uniforms = torch.full((ids.shape[0], max_new_tokens), 0.5)
    cache = ref.ModelCache(len(weights.layers), room or ids.shape[1] + max_new_tokens)
    finished = ended(ids, eos_id)
    text, unread = ids, begins(weights, ids, cache)
    for step in range(max_new_tokens):
        logits = ref.decoder_step(weights, unread, cache)
        if temperature > 0:
            token = sample_from_uniform(
                sampling_distribution(logits, temperature, top_k, top_p), number(uniforms, step)
            )
        else:
            token = best(logits)
        if eos_id is not None:
            token = token.masked_fill(finished, eos_id) if fills else token
            finished = finished | (token == eos_id)
        text = torch.cat((text, token[:, None]), dim=1)
        if eos_id is not None and stops(finished):
            break
        unread = reads(text, token)
        if not keeps_cache:
            cache.reset()
    if reads_last and max_new_tokens:
        ref.decoder_step(weights, unread, ref.ModelCache(len(weights.layers), text.shape[1]))
    return text


@generate_text.near_miss("reads-the-whole-text")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """Right but slow: the whole text goes through the model for every token, as if there were no cache. Push only what is new."""
    settings = (eos_id, temperature, top_k, top_p, uniforms)
    return generate_with(
        weights, ids, max_new_tokens, *settings, reads=lambda text, token: text, keeps_cache=False
    )


@generate_text.near_miss("reads-the-last-token")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """Right, but one step too many: the last token written is pushed through the model, and nobody asks what follows it. Prompt + new - 1 tokens are enough."""
    return generate_with(
        weights, ids, max_new_tokens, eos_id, temperature, top_k, top_p, uniforms, reads_last=True
    )


@generate_text.near_miss("forgets-the-past")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """Each new token is read with an empty cache, so that the model knows no other. Keep the cache from step to step."""
    settings = (eos_id, temperature, top_k, top_p, uniforms)
    return generate_with(weights, ids, max_new_tokens, *settings, keeps_cache=False)


@generate_text.near_miss("caches-the-text-again")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """The whole text goes through the model again although the cache holds it, so that the model reads everything twice. Push the new token alone."""
    settings = (eos_id, temperature, top_k, top_p, uniforms)
    room = (ids.shape[1] + max_new_tokens) * (max_new_tokens + 1)
    return generate_with(weights, ids, max_new_tokens, *settings, reads=lambda text, token: text, room=room)


@generate_text.near_miss("last-prompt-token-twice")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """The prompt is read, and then its last token once more, so that the model sees it twice. The prompt's step gives the logits of the first new token already."""

    def begins(weights, ids, cache):
        if max_new_tokens:
            ref.decoder_step(weights, ids, cache)
        return ids[:, -1:]

    settings = (eos_id, temperature, top_k, top_p, uniforms)
    room = ids.shape[1] + max_new_tokens + 1
    return generate_with(weights, ids, max_new_tokens, *settings, begins=begins, room=room)


@generate_text.near_miss("prompt-token-by-token")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """Right but slow: the prompt is read token by token, and each step pays for logits that nobody asks for. The whole prompt goes through the model in one step."""

    def begins(weights, ids, cache):
        for i in range(ids.shape[1] - 1):
            ref.decoder_step(weights, ids[:, i : i + 1], cache)
        return ids[:, -1:]

    settings = (eos_id, temperature, top_k, top_p, uniforms)
    return generate_with(weights, ids, max_new_tokens, *settings, begins=begins)


@generate_text.near_miss("asks-after-the-end")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """Right but slow: the model is asked on when all rows have ended, and what it says is thrown away. Leave the loop as soon as the last row has its EOS."""
    settings = (eos_id, temperature, top_k, top_p, uniforms)
    text = generate_with(weights, ids, max_new_tokens, *settings, stops=lambda finished: False)
    if eos_id is None:
        return text
    still_alive = (text[:, ids.shape[1] :] == eos_id).cummax(dim=1).values.all(dim=0).logical_not().sum()
    return text[:, : ids.shape[1] + int(still_alive) + 1]


@generate_text.near_miss("ties-to-the-last")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """Of two equally probable tokens the higher id is taken: ties go to the lower one, as `argmax` has it."""

    def best(logits):
        return logits.shape[-1] - 1 - logits.flip(-1).argmax(dim=-1)

    return generate_with(weights, ids, max_new_tokens, eos_id, temperature, top_k, top_p, uniforms, best=best)


@generate_text.near_miss("goes-on-after-the-end")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """A finished row goes on with other tokens: from its EOS on it is filled with the EOS."""
    return generate_with(
        weights, ids, max_new_tokens, eos_id, temperature, top_k, top_p, uniforms, fills=False
    )


@generate_text.near_miss("stops-with-the-first-row")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """All rows stop as soon as one has ended: the loop ends when every row has."""
    return generate_with(
        weights, ids, max_new_tokens, eos_id, temperature, top_k, top_p, uniforms, stops=torch.any
    )


@generate_text.near_miss("never-stops-early")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """The loop goes on when all rows have ended, and writes nothing but EOS: stop then."""
    settings = (eos_id, temperature, top_k, top_p, uniforms)
    return generate_with(weights, ids, max_new_tokens, *settings, stops=lambda finished: False)


@generate_text.near_miss("ended-by-the-prompt")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """An EOS in the prompt is taken for the end of the row: only new tokens end it."""
    settings = (eos_id, temperature, top_k, top_p, uniforms)

    def ended(ids, eos_id):
        return (ids == (-1 if eos_id is None else eos_id)).any(dim=1)

    return generate_with(weights, ids, max_new_tokens, *settings, ended=ended)


@generate_text.near_miss("one-number-for-all-steps")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """Every token of a row is drawn with the row's first number: the t-th new token has the t-th."""
    settings = (eos_id, temperature, top_k, top_p, uniforms)
    return generate_with(
        weights, ids, max_new_tokens, *settings, number=lambda uniforms, step: uniforms[:, 0]
    )


@generate_text.near_miss("one-number-for-all-rows")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """All rows draw with the first row's numbers: each row has its own."""
    settings = (eos_id, temperature, top_k, top_p, uniforms)

    def number(uniforms, step):
        return uniforms[:1, step].expand(uniforms.shape[0])

    return generate_with(weights, ids, max_new_tokens, *settings, number=number)


@generate_text.near_miss("temperature-alone")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """Top-k and top-p are not applied: hand them on to `sampling_distribution`."""
    return generate_with(weights, ids, max_new_tokens, eos_id, temperature, None, None, uniforms)


@generate_text.near_miss("numbers-of-its-own")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """A temperature above 0 without numbers to draw with is taken: raise a ValueError."""
    settings = (eos_id, temperature, top_k, top_p, uniforms)
    return generate_with(weights, ids, max_new_tokens, *settings, refuses=False)


@generate_text.near_miss("greedy-at-any-temperature")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """The most probable token is taken at any temperature: above 0 draw with `sample_from_uniform`."""
    if temperature > 0 and uniforms is None:
        raise ValueError("generate_text needs uniforms above temperature 0")
    return generate_with(weights, ids, max_new_tokens, eos_id)


@generate_text.near_miss("greedy-below-one")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """The most probable token is taken below temperature 1: only temperature 0 does that, every other one draws."""
    if temperature > 0 and uniforms is None:
        raise ValueError("generate_text needs uniforms above temperature 0")
    temperature = temperature if temperature >= 1 else 0.0
    return generate_with(weights, ids, max_new_tokens, eos_id, temperature, top_k, top_p, uniforms)


@generate_text.near_miss("zero-taken-for-none")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """An eos_id of 0 is taken for none: 0 is a token like any other, so ask whether it `is None`."""
    settings = (temperature, top_k, top_p, uniforms)
    return generate_with(weights, ids, max_new_tokens, eos_id or None, *settings)


@generate_text.near_miss("new-tokens-only")
def _(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    """Only the new tokens come back: return the prompt with the new tokens behind it."""
    settings = (eos_id, temperature, top_k, top_p, uniforms)
    return generate_with(weights, ids, max_new_tokens, *settings)[:, ids.shape[1] :]
