"""Speculative decoding for batches, and beam search with a cache.

A small model drafts a few tokens, the large one checks them all in one pass, and what is kept follows the
large model's distribution exactly (Leviathan et al., arXiv 2211.17192). In a batch the rows accept different
numbers of drafts. Here all rows advance together: a rejected draft keeps its place in the caches but is
marked as padding, and since positions count real tokens only, every row is what it would be alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from course_llm.decoding import speculative_accept
from course_llm.generation import Sampling, make_cache, pad_left
from course_llm.model import Decoder


@dataclass
class Speculation:
    """What `generate_speculative` returns.

    Attributes:
        rows: the new tokens of every row, its end of text included.
        target_passes: how often the large model ran, the prompt included.
        drafted: tokens that the small model proposed for rows that were still going.
        accepted: those of them that were kept.
    """

    rows: list[list[int]]
    target_passes: int
    accepted: int
    drafted: int


@torch.no_grad()
def generate_speculative(
    model: Decoder,
    draft: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    drafts: int = 4,
    sampling: Sampling | None = None,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Speculation:
    """Generates with the large model's distribution while the small one does most of the steps.

    Args:
        model: the large model, whose distribution the text follows.
        draft: the small one, with the same vocabulary.
        prompts: token ids, of any lengths.
        max_new_tokens: per row.
        drafts: tokens drafted per round.
        sampling: how tokens are chosen, for both; None is greedy, and then the text is the large model's
            greedy text.
        eos_id: ends a row.
        generator: the only source of randomness; None takes torch's global one.

    Raises:
        ValueError: different vocabularies, drafts below 1, or a repetition penalty (it is not the same for
            both).
    """
    rules = sampling or Sampling(temperature=0.0)
    if model.config.vocab != draft.config.vocab:
        raise ValueError(
            f"generate_speculative needs one vocabulary, got {model.config.vocab} and {draft.config.vocab} tokens"
        )
    if drafts < 1 or rules.repetition_penalty != 1:
        raise ValueError(
            f"generate_speculative needs drafts >= 1 and no repetition penalty, got drafts={drafts}, "
            f"repetition_penalty={rules.repetition_penalty}"
        )
    ids, real = pad_left(prompts, device=model.embedding.weight.device)
    batch = len(ids)
    room = ids.shape[1] + (max_new_tokens + 1) * (drafts + 1)
    caches = [make_cache("static", which, batch, room) for which in (model, draft)]
    result = Speculation([[] for _ in range(batch)], 1, 0, 0)
    pending = rules.draw(model(ids, caches[0], real, last_only=True)[:, -1], generator)
    draft(ids, caches[1], real, last_only=True)
    alive = _append(result.rows, pending[:, None], [1] * batch, [True] * batch, max_new_tokens, eos_id)
    while any(alive):
        # the pending token and the drafts of this round; the mask is settled when they have been judged
        block = [pending]
        chances = []
        fresh = real.new_ones(batch, 0)
        for _ in range(drafts):
            fresh = torch.cat((fresh, real.new_ones(batch, 1)), dim=1)
            logits = draft(block[-1][:, None], caches[1], torch.cat((real, fresh), dim=1))[:, -1]
            chances.append(rules.distribution(logits))
            block.append(_pick(chances[-1], generator))
        fresh = torch.cat((fresh, real.new_ones(batch, 1)), dim=1)
        mask = torch.cat((real, fresh), dim=1)
        draft(block[-1][:, None], caches[1], mask, last_only=True)  # so that both caches hold the same places
        drafted = torch.stack(block, dim=1)  # (batch, 1 + drafts)
        targets = rules.distribution(model(drafted, caches[0], mask))
        result.target_passes += 1
        counts, pending = _judge(targets, torch.stack(chances, dim=1), drafted[:, 1:], generator)
        accepted = torch.arange(drafts + 1, device=real.device) <= counts[:, None]
        real = torch.cat((real, accepted), dim=1)
        found = torch.cat((drafted[:, 1:], pending[:, None]), dim=1)
        found = found.scatter(1, counts[:, None], pending[:, None])  # accepted drafts, then the new token
        numbers = counts.tolist()
        result.drafted += drafts * sum(alive)
        result.accepted += sum(number for number, on in zip(numbers, alive, strict=True) if on)
        alive = _append(result.rows, found, [n + 1 for n in numbers], alive, max_new_tokens, eos_id)
    return result


def _pick(probs: Tensor, generator: torch.Generator | None) -> Int[Tensor, " batch"]:
    return torch.multinomial(probs, 1, generator=generator)[:, 0]


def _judge(
    targets: Tensor, chances: Tensor, drafted: Tensor, generator: torch.Generator | None
) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
    """Accepts drafts row by row; returns how many and the token that follows them."""
    device = targets.device if generator is None else generator.device
    u = torch.rand(drafted.shape, generator=generator, device=device).to(targets.device)
    judged = [speculative_accept(*row) for row in zip(targets, chances, drafted, u, strict=True)]
    counts = torch.tensor([count for count, _ in judged], device=targets.device)
    return counts, _pick(torch.stack([following for _, following in judged]), generator)


def _append(
    rows: list[list[int]], found: Tensor, numbers: list[int], alive: list[bool], most: int, eos_id: int | None
) -> list[bool]:
    """Adds each living row's first tokens to it; returns which rows go on."""
    going = []
    for row, tokens, number, on in zip(rows, found.tolist(), numbers, alive, strict=True):
        for token in tokens[:number] if on else []:
            if len(row) < most and (not row or row[-1] != eos_id or eos_id is None):
                row.append(token)
        going.append(on and len(row) < most and not (eos_id is not None and row[-1] == eos_id))
    return going


@torch.no_grad()
def beam_search(
    model: Decoder,
    prompt: Sequence[int],
    beams: int,
    max_new_tokens: int,
    eos_id: int | None = None,
    length_penalty: float = 0.0,
) -> list[tuple[list[int], float]]:
    """Returns the `beams` best continuations that a beam search finds, best first, each with its score.

    Finished hypotheses are pooled and `beams` live ones go on beside them (canonical beam search; Hugging
    Face's `early_stopping="never"`). The score is `sum(log p) / length ** length_penalty`, the end of text counted.
    The search stops when no live hypothesis can come into the pool any more.

    Args:
        model: a decoder.
        prompt: token ids.
        beams: live hypotheses, and size of the pool.
        max_new_tokens: where hypotheses are cut off; cut ones count as finished.
        eos_id: ends a hypothesis.
        length_penalty: 0 ranks by probability; above 0 favours longer texts.

    Raises:
        ValueError: beams below 1, or an empty prompt.
    """
    if beams < 1 or not len(prompt):
        raise ValueError(
            f"beam_search needs beams >= 1 and a prompt, got beams={beams}, {len(prompt)} tokens"
        )
    cache = make_cache("static", model, 1, len(prompt) + max_new_tokens)
    new = torch.tensor([list(prompt)], device=model.embedding.weight.device)
    wide = torch.promote_types(model.embedding.weight.dtype, torch.float32)
    sums = torch.zeros(1, dtype=wide, device=new.device)
    live: list[list[int]] = [[]]
    pool: list[tuple[list[int], float]] = []
    for length in range(1, max_new_tokens + 1):
        totals = sums[:, None] + model(new, cache, last_only=True)[:, -1].to(wide).log_softmax(-1)
        best, flat = totals.flatten().topk(min(2 * beams, totals.numel()))
        parents, tokens = (flat // totals.shape[1]).tolist(), (flat % totals.shape[1]).tolist()
        kept: list[int] = []
        for place, (parent, token, total) in enumerate(zip(parents, tokens, best.tolist(), strict=True)):
            over = token == eos_id or length == max_new_tokens
            if over and place < beams:
                pool.append(([*live[parent], token], total / length**length_penalty))
            elif not over and len(kept) < beams:
                kept.append(place)
        pool = sorted(pool, key=lambda pair: pair[1], reverse=True)[:beams]
        if not kept:
            break
        # log p only falls; with a penalty above 0 it may still be divided by a longer length
        reach = max_new_tokens if length_penalty > 0 else length
        if len(pool) == beams and pool[-1][1] >= best[kept[0]].item() / reach**length_penalty:
            break
        chosen = torch.tensor(kept, device=new.device)
        cache.select(torch.tensor([parents[place] for place in kept], device=new.device))
        live = [[*live[parents[place]], tokens[place]] for place in kept]
        sums, new = best[chosen], (flat % totals.shape[1])[chosen][:, None]
    return pool
