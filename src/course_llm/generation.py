"""Generation as it is served: batches of unequal prompts, any cache, all samplers, streaming and stop sequences.

The chapters' functions (`course_llm.decoding`) see a model from outside and compute everything anew at every
step. Here prompts of different lengths stand side by side, padded on the left; each token goes through the
model once; and a row that has ended is filled up while the others go on. Same distribution, same order of
operations: repetition penalty, temperature, top-k, top-p, min-p, one draw per step for the whole batch.
Speculative decoding is in `course_llm.speculative`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from course_llm import decoding
from course_llm.caches import Cache, ChunkedCache, GrowingCache, RollingCache, StaticCache
from course_llm.compact_caches import PagedCache, QuantizedCache
from course_llm.model import Decoder
from course_llm.nucleus import top_p_by_values
from course_llm.tokenizer import CourseTokenizer

#: What `make_cache` can build.
CACHE_KINDS = ("growing", "chunked", "static", "fixed", "rolling", "int8", "paged")


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from logits; the steps are taken in the order of the fields.

    Attributes:
        repetition_penalty: above 1 discourages tokens that the row has already; padding does not count.
        temperature: 0 takes the most probable token.
        top_k: as in `course_llm.decoding.top_k_filter`; None skips the step.
        top_p: as in `course_llm.decoding.top_p_filter`; None skips the step.
        min_p: as in `course_llm.decoding.min_p_filter`; None skips the step.
    """

    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def distribution(self, logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
        """Returns the probabilities that a token is drawn from (without the repetition penalty).

        Args:
            logits: of the next token.
        """
        probs = decoding.sampling_distribution(logits, self.temperature, self.top_k, self.top_p)
        return probs if self.min_p is None else decoding.min_p_filter(probs, self.min_p)

    def draw(
        self, logits: Float[Tensor, "batch vocab"], generator: torch.Generator | None = None
    ) -> Int[Tensor, " batch"]:
        """Draws one token per row with a single `torch.multinomial` over the whole vocabulary.

        Args:
            logits: of the next token, the repetition penalty applied.
            generator: the only source of randomness; None takes torch's global one.
        """
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        return torch.multinomial(self.distribution(logits), 1, generator=generator)[:, 0]

    def draw_fast(
        self, logits: Float[Tensor, "batch vocab"], generator: torch.Generator | None = None, among: int = 256
    ) -> Int[Tensor, " batch"]:
        """Draws from the same distribution, but sorts and draws among the `among` best tokens only.

        With top-k that is exact. With top-p alone it is exact in the rows whose best tokens hold mass p; the
        others draw from the whole vocabulary, as in `draw` but with the faster
        `course_llm.nucleus.top_p_by_values`. Ties at the last place go to any of the tied tokens.

        Args:
            logits: of the next token, the repetition penalty applied.
            generator: the only source of randomness; None takes torch's global one.
            among: tokens that are sorted where there is no top-k.
        """
        k = min(self.top_k or among, logits.shape[-1])
        limited = self.top_k is not None or (self.top_p or 1.0) < 1.0
        if self.temperature == 0 or not limited or k > logits.shape[-1] // 2:
            return self.draw(logits, generator)
        best, ids = logits.topk(k, dim=-1)
        wide = torch.promote_types(logits.dtype, torch.float32)
        scaled = best.to(wide) / self.temperature
        if self.top_k is not None:
            return self._draw_among(scaled.softmax(-1), ids, generator)
        probs = (scaled - (logits.to(wide) / self.temperature).logsumexp(-1, keepdim=True)).exp()
        short = probs.sum(-1) < self.top_p
        if not bool(short.any()):
            return self._draw_among(probs, ids, generator)
        chosen = ids.new_empty(len(ids))
        whole = decoding.softmax_with_temperature(logits[short], self.temperature)
        chosen[short] = self._pick(top_p_by_values(whole, self.top_p), generator)
        if not bool(short.all()):
            chosen[~short] = self._draw_among(probs[~short], ids[~short], generator)
        return chosen

    def _draw_among(self, probs: Tensor, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draws one of the tokens whose probabilities are given in falling order."""
        if self.top_p is not None and self.top_p < 1:
            before = probs.cumsum(-1) - probs
            probs = probs * (before < self.top_p)
        return ids.gather(-1, self._pick(probs, generator)[:, None])[:, 0]

    def _pick(self, probs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Applies min-p, the last of the steps, and draws a place of each row."""
        if self.min_p is not None:
            probs = decoding.min_p_filter(probs, self.min_p)
        return torch.multinomial(probs, 1, generator=generator)[:, 0]


def make_cache(
    kind: str, model: Decoder, batch: int, room: int, dtype: torch.dtype | None = None, device: Any = None
) -> Cache:
    """Builds one of the caches by name.

    Args:
        kind: `"growing"`, `"chunked"`, `"static"`, `"fixed"` (static with fixed addresses), `"rolling"`, `"int8"`
            or `"paged"`.
        model: gives the sizes, and dtype and device where they are not given.
        batch: rows.
        room: tokens per row, padding included.
        dtype: in which keys and values are held; None takes the model's.
        device: where they are held; None takes the model's.

    Raises:
        ValueError: another kind.
    """
    weight = model.embedding.weight
    dtype, device, config = dtype or weight.dtype, device or weight.device, model.config
    if kind == "growing":
        return GrowingCache(config, batch, dtype, device)
    if kind == "chunked":
        return ChunkedCache(config, batch, dtype, device)
    if kind in ("static", "fixed"):
        return StaticCache(config, batch, room, dtype, device, fixed=kind == "fixed")
    if kind == "rolling":
        return RollingCache(config, batch, dtype, device, window=config.window or room)
    if kind == "int8":
        return QuantizedCache(config, batch, room, torch.promote_types(dtype, torch.float16), device)
    if kind == "paged":
        page_size = 16
        return PagedCache(config, batch, batch * -(-room // page_size), page_size, dtype, device)
    raise ValueError(f"make_cache needs one of {', '.join(CACHE_KINDS)}, got {kind}")


def pad_left(
    prompts: Sequence[Sequence[int]], pad_id: int = 0, device: Any = None
) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
    """Puts prompts of different lengths side by side, padded on the left; returns ids and what is real.

    Args:
        prompts: token ids, of any lengths.
        pad_id: the token that fills a row up.
        device: where the result lies.

    Returns:
        `(ids, real)`; `real` is True on the prompts' own tokens.

    Raises:
        ValueError: no prompt, or an empty one.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"generate needs at least one prompt and a token in each, got lengths {lengths}")
    longest = max(lengths)
    rows = [[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    places = torch.arange(longest)
    real = places >= longest - torch.tensor(lengths)[:, None]
    return torch.tensor(rows, dtype=torch.int64, device=device), real.to(device)


@torch.no_grad()
def stream(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    eos_id: int | None = None,
    stop: Sequence[Sequence[int]] = (),
    generator: torch.Generator | None = None,
    cache: str | Cache = "static",
    fast: bool = False,
) -> Iterator[list[int | None]]:
    """Yields each step's new token of every row as soon as it is there, None for rows that have ended.

    Args:
        model: a decoder.
        prompts: token ids, of any lengths.
        max_new_tokens: per row.
        sampling: how tokens are chosen; None is greedy.
        eos_id: ends a row; it is the row's last token.
        stop: sequences of tokens that end a row too, once its new tokens end with one.
        generator: the only source of randomness; None takes torch's global one.
        cache: a kind for `make_cache`, or an empty cache with enough room.
        fast: draw with `Sampling.draw_fast`: the same distribution, other tokens for the same seed.

    Raises:
        ValueError: no prompt, an empty one, an empty stop sequence, `max_new_tokens` below 0, a repetition
            penalty that is not above 0, an unknown cache, or more tokens than there is room for.
    """
    if max_new_tokens < 0:
        raise ValueError(f"generate needs max_new_tokens >= 0, got max_new_tokens={max_new_tokens}")
    if any(len(sequence) == 0 for sequence in stop):
        raise ValueError("generate needs stop sequences with at least one token, got an empty one")
    rules = sampling or Sampling(temperature=0.0)
    device = model.embedding.weight.device
    ids, real = pad_left(prompts, device=device)
    batch, seq = ids.shape
    room = seq + max_new_tokens
    if isinstance(cache, str):
        cache = make_cache(cache, model, batch, room)
    padded = not bool(real.all())
    fixed = getattr(cache, "fixed", False)
    real = torch.cat((real, real.new_ones(batch, (cache.max_seq if fixed else room) - seq)), dim=1)
    seen = _Seen(ids, real, model.config.vocab) if rules.repetition_penalty != 1 else None
    rows: list[list[int]] = [[] for _ in range(batch)]
    ended = [False] * batch
    new = ids
    for step in range(max_new_tokens):
        known = real if fixed else real[:, : seq + step]
        logits = model(new, cache, known if padded else None, last_only=True)[:, -1]
        if seen is not None:
            logits = seen.penalise(logits, rules.repetition_penalty)
        chosen = (rules.draw_fast if fast else rules.draw)(logits, generator)
        if seen is not None:
            seen.add(chosen)
        new = chosen[:, None]
        tokens = chosen.tolist()
        yield [None if over else token for over, token in zip(ended, tokens, strict=True)]
        for row, token in enumerate(tokens):
            if not ended[row]:
                rows[row].append(token)
                ended[row] = token == eos_id or any(rows[row][-len(end) :] == list(end) for end in stop)
        if all(ended):
            return


class _Seen:
    """Which tokens a row has had, as one boolean per token of the vocabulary: the penalty counts none twice."""

    def __init__(self, ids: Tensor, real: Tensor, vocab: int) -> None:
        seq = ids.shape[1]
        # padding is scattered to a place past the vocabulary
        places = torch.where(real[:, :seq], ids, vocab)
        self.tokens = torch.zeros(len(ids), vocab + 1, dtype=torch.bool, device=ids.device).scatter_(
            1, places, True
        )

    def add(self, chosen: Tensor) -> None:
        self.tokens.scatter_(1, chosen[:, None], True)

    def penalise(self, logits: Tensor, penalty: float) -> Tensor:
        if not penalty > 0:
            raise ValueError(f"generate needs repetition_penalty > 0, got repetition_penalty={penalty}")
        penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
        return torch.where(self.tokens[:, :-1], penalised, logits)


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    eos_id: int | None = None,
    stop: Sequence[Sequence[int]] = (),
    generator: torch.Generator | None = None,
    cache: str | Cache = "static",
    fast: bool = False,
) -> list[list[int]]:
    """Returns the new tokens of every row, the end of text or the stop sequence included.

    Arguments and errors are those of `stream`.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(model, prompts, max_new_tokens, sampling, eos_id, stop, generator, cache, fast):
        for row, token in zip(rows, tokens, strict=True):
            if token is not None:
                row.append(token)
    return rows


def generate_text(
    model: Decoder,
    tokenizer: CourseTokenizer,
    prompts: Sequence[str],
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    generator: torch.Generator | None = None,
    on_text: Callable[[int, str], None] | None = None,
) -> list[str]:
    """Continues texts and returns what was added to each, cut before the first stop text.

    Args:
        model: for example that of `course_llm.model.load_bundled`.
        tokenizer: the model's.
        prompts: texts; the model sees an end of text before each, as at the start of a document.
        max_new_tokens: per text.
        sampling: how tokens are chosen; None is greedy.
        stop: texts that end a row, wherever token borders fall.
        generator: the only source of randomness; None takes torch's global one.
        on_text: called with row and whole text so far whenever a row has grown.
    """
    ids = [[tokenizer.eos_id, *tokenizer.encode(prompt)] for prompt in prompts]
    rows: list[list[int]] = [[] for _ in prompts]
    texts, ended = ["" for _ in prompts], [False for _ in prompts]
    for tokens in stream(model, ids, max_new_tokens, sampling, tokenizer.eos_id, generator=generator):
        for row, token in enumerate(tokens):
            if token is None or ended[row]:
                continue
            rows[row].append(token)
            text = tokenizer.decode(rows[row])
            cuts = [text.index(end) for end in stop if end in text]
            ended[row] = bool(cuts) or token == tokenizer.eos_id
            texts[row] = text[: min(cuts)] if cuts else text
            if on_text is not None:
                on_text(row, texts[row])
        if all(ended):
            break
    return texts
