"""Decoding turns logits into text, one token at a time.

A language model answers one question: how likely is each token of the vocabulary to come next? A decoding
rule turns that answer into a token, appends it, and asks again. Greedy search and beam search look for a
probable text; sampling draws from the distribution, after temperature has reshaped it and top-k, top-p or
min-p have cut off its tail. The end of the chapter measures repetition, discourages it, and lets a small
model draft tokens for a large one without changing the distribution of the text.

Here a model is seen from outside, as `next_logits`: token ids `(batch, seq)` go in, the logits
`(batch, vocab)` of the next token come out. Ties go to the lower token id everywhere.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


def _widen(x: Tensor) -> Tensor:
    # sums and exponentials of half precision run in float32; float64 stays as it is
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _renormalise(probs: Tensor, keep: Tensor) -> Tensor:
    """Sets the tokens outside `keep` to 0 and scales each row to sum to 1."""
    kept = _widen(torch.where(keep, probs, 0))
    return (kept / kept.sum(dim=-1, keepdim=True)).to(probs.dtype)


def softmax_with_temperature(
    logits: Float[Tensor, "*batch vocab"], temperature: float
) -> Float[Tensor, "*batch vocab"]:
    """Returns `softmax(logits / temperature)` (Ackley et al. 1985).

    Below 1 the distribution sharpens, above 1 it flattens. Temperature 0 is the limit: all mass on the most
    probable token, the lowest id among equals. The softmax runs in float32 for half precision.

    Args:
        logits: of any size; `-inf` is a token of probability 0.
        temperature: 0 or more.

    Raises:
        ValueError: temperature is below 0.
    """
    if not temperature >= 0:
        raise ValueError(f"softmax_with_temperature needs temperature >= 0, got temperature={temperature}")
    if temperature == 0:
        # argmax returns the first of several maxima, so a tie goes to the lower id
        top = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits).scatter(-1, top, 1)
    wide = _widen(logits)
    # subtract the maximum before the division: a small temperature would make the quotient overflow
    wide = wide - wide.detach().amax(dim=-1, keepdim=True)
    return (wide / temperature).softmax(dim=-1).to(logits.dtype)


def top_k_filter(probs: Float[Tensor, "*batch vocab"], k: int) -> Float[Tensor, "*batch vocab"]:
    """Returns the distribution over the k most probable tokens (Fan et al. 2018).

    Exactly k tokens survive, ties going to the lower id; the others become 0 and each row is scaled to
    sum to 1 again. A k of the vocabulary's size or more changes nothing.

    Args:
        probs: each row sums to 1.
        k: number of tokens to keep, 1 or more.

    Raises:
        ValueError: k is below 1.
    """
    if k < 1:
        raise ValueError(f"top_k_filter needs k >= 1, got k={k}")
    # a stable sort keeps equal probabilities in the order of their ids; torch.topk does not promise that
    order = probs.argsort(dim=-1, descending=True, stable=True)
    keep = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order[..., :k], True)
    return _renormalise(probs, keep)


def top_p_filter(probs: Float[Tensor, "*batch vocab"], p: float) -> Float[Tensor, "*batch vocab"]:
    """Returns the distribution over the nucleus (Holtzman et al. 2020, eq. 2).

    The nucleus is the smallest set of most probable tokens whose mass is at least p. The token that crosses
    p belongs to it, so it is never empty; ties go to the lower id. The other tokens become 0 and each row is
    scaled to sum to 1 again. `p = 1` keeps every token.

    Args:
        probs: each row sums to 1.
        p: the mass to reach, above 0 and at most 1.

    Raises:
        ValueError: p is not in (0, 1].
    """
    if not 0 < p <= 1:
        raise ValueError(f"top_p_filter needs 0 < p <= 1, got p={p}")
    if p == 1:  # a rounded sum may reach 1 before the last token
        return _renormalise(probs, torch.ones_like(probs, dtype=torch.bool))
    ranked, order = _widen(probs.detach()).sort(dim=-1, descending=True, stable=True)
    mass = ranked.cumsum(dim=-1)
    # a token belongs to the nucleus while the mass of the tokens before it has not reached p
    before = torch.cat([torch.zeros_like(mass[..., :1]), mass[..., :-1]], dim=-1)
    keep = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, before < p)
    return _renormalise(probs, keep)


def sampling_distribution(
    logits: Float[Tensor, "*batch vocab"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Float[Tensor, "*batch vocab"]:
    """Returns the distribution that the next token is drawn from.

    The order is: divide by the temperature, softmax, top-k, renormalise, top-p, renormalise. Top-p looks at
    the renormalised top-k distribution.

    Args:
        logits: of the next token.
        temperature: as in `softmax_with_temperature`; 0 puts all mass on the most probable token.
        top_k: as in `top_k_filter`; None skips the step.
        top_p: as in `top_p_filter`; None skips the step.
    """
    probs = softmax_with_temperature(logits, temperature)
    if top_k is not None:
        probs = top_k_filter(probs, top_k)
    if top_p is not None:
        probs = top_p_filter(probs, top_p)
    return probs


def sample_from_uniform(
    probs: Float[Tensor, "batch vocab"], u: Float[Tensor, " batch"]
) -> Int[Tensor, " batch"]:
    """Returns the token ids where the cumulative sum first exceeds u (inverse transform sampling).

    Token i owns the interval from P(ids < i), included, to P(ids <= i), excluded, so a token of probability 0
    is never drawn. Where rounding leaves the total at or below u, the last token of positive probability is
    drawn.

    Args:
        probs: each row sums to 1.
        u: one uniform number in [0, 1) per row.
    """
    wide = torch.promote_types(torch.promote_types(probs.dtype, u.dtype), torch.float32)
    cumulative = probs.to(wide).cumsum(dim=-1)
    positive = probs > 0
    last = (positive * torch.arange(probs.shape[-1], device=probs.device)).amax(dim=-1)
    hit = positive & (cumulative > u.to(wide)[:, None])
    # argmax returns the first of several maxima: the first token whose cumulative sum exceeds u
    return torch.where(hit.any(dim=-1), hit.int().argmax(dim=-1), last)


def _extend(
    next_logits: Callable[[Tensor], Tensor],
    ids: Int[Tensor, "batch seq"],
    max_new_tokens: int,
    eos_id: int | None,
    choose: Callable[[Tensor], Tensor],
) -> Int[Tensor, "batch seq_out"]:
    """Appends the tokens that `choose` takes from the logits until every row has met its EOS."""
    finished = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        token = choose(next_logits(ids)).to(ids.dtype)
        if eos_id is not None:
            token = token.masked_fill(finished, eos_id)
            finished = finished | (token == eos_id)
        ids = torch.cat([ids, token[:, None]], dim=1)
        if finished.all():
            break
    return ids


def greedy_decode(
    next_logits: Callable[[Tensor], Tensor],
    ids: Int[Tensor, "batch seq"],
    max_new_tokens: int,
    eos_id: int | None = None,
) -> Int[Tensor, "batch seq_out"]:
    """Returns the prompt followed by the most probable token at each step.

    A row that has produced `eos_id` is filled with it from there on; the loop stops when every row has
    finished. An EOS in the prompt does not count. Ties go to the lower id.

    Args:
        next_logits: `(batch, seq)` token ids to `(batch, vocab)` logits of the next token.
        ids: the prompts.
        max_new_tokens: at most this many are appended; 0 returns the prompt.
        eos_id: the token that ends a text; None never ends one.
    """
    return _extend(next_logits, ids, max_new_tokens, eos_id, choose=lambda logits: logits.argmax(dim=-1))


def generate(
    next_logits: Callable[[Tensor], Tensor],
    ids: Int[Tensor, "batch seq"],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "batch seq_out"]:
    """Returns the prompt followed by tokens drawn from `sampling_distribution`, each row on its own.

    Temperature 0 is greedy decoding. EOS works as in `greedy_decode`. Two generators in the same state give
    the same text.

    Args:
        next_logits: `(batch, seq)` token ids to `(batch, vocab)` logits of the next token.
        ids: the prompts.
        max_new_tokens: at most this many are appended; 0 returns the prompt.
        temperature: as in `sampling_distribution`.
        top_k: as in `sampling_distribution`.
        top_p: as in `sampling_distribution`.
        eos_id: the token that ends a text; None never ends one.
        generator: the only source of randomness; None takes torch's global one.
    """
    device = ids.device if generator is None else generator.device

    def draw(logits: Tensor) -> Tensor:
        probs = sampling_distribution(logits, temperature, top_k, top_p)
        u = torch.rand(probs.shape[0], generator=generator, device=device)
        return sample_from_uniform(probs, u.to(probs.device))

    return _extend(next_logits, ids, max_new_tokens, eos_id, choose=draw)


def beam_search(
    next_logits: Callable[[Tensor], Tensor],
    ids: Int[Tensor, "1 seq"],
    beams: int,
    max_new_tokens: int,
    eos_id: int | None = None,
    length_penalty: float = 0.0,
) -> list[tuple[Int[Tensor, " new"], float]]:
    """Returns the best continuations that a search with `beams` hypotheses finds, best first.

    Each step extends every live hypothesis by every token and takes the `beams` most probable. Those that
    end in EOS are set aside as finished, the others live on; at the end the finished ones and those cut off
    at `max_new_tokens` are ranked together. The score is `sum(log p) / length**length_penalty`, where both sum
    and length include the EOS. One beam gives the greedy text up to its EOS. Sums run in float32 at least.

    Args:
        next_logits: `(batch, seq)` token ids to `(batch, vocab)` logits of the next token.
        ids: one prompt.
        beams: number of hypotheses kept per step and returned at most, 1 or more.
        max_new_tokens: the length at which a hypothesis is cut off.
        eos_id: the token that ends a text; None never ends one.
        length_penalty: 0 ranks by probability, 1 by the mean log-probability per token.

    Returns:
        Up to `beams` distinct pairs `(new_ids, score)`, without the prompt, with the EOS.

    Raises:
        ValueError: beams is below 1 (optional in the exercise).
    """
    if beams < 1:
        raise ValueError(f"beam_search needs beams >= 1, got beams={beams}")
    live = ids.new_empty(1, 0)  # (live, new)
    log_probs = torch.zeros(1, device=ids.device)  # (live,), the sum over each hypothesis
    hypotheses: list[tuple[Tensor, float]] = []

    def rank(text: Tensor, log_prob: float) -> tuple[Tensor, float]:
        return text, log_prob / max(len(text), 1) ** length_penalty

    for _ in range(max_new_tokens):
        logits = next_logits(torch.cat([ids.expand(len(live), -1), live], dim=1))
        totals = log_probs[:, None] + _widen(logits).log_softmax(dim=-1)  # (live, vocab)
        best, flat = totals.flatten().sort(descending=True, stable=True)
        possible = best > -torch.inf
        best, flat = best[possible][:beams], flat[possible][:beams]
        parent, token = flat // totals.shape[1], flat % totals.shape[1]
        texts = torch.cat([live[parent], token.to(ids.dtype)[:, None]], dim=1)
        ended = torch.zeros_like(token, dtype=torch.bool) if eos_id is None else token == eos_id
        hypotheses += [rank(*pair) for pair in zip(texts[ended], best[ended].tolist(), strict=True)]
        live, log_probs = texts[~ended], best[~ended]
        if len(live) == 0:
            break
    hypotheses += [rank(*pair) for pair in zip(live, log_probs.tolist(), strict=True)]
    return sorted(hypotheses, key=lambda pair: pair[1], reverse=True)[:beams]


def repetition_penalty(
    logits: Float[Tensor, "batch vocab"], ids: Int[Tensor, "batch seq"], penalty: float
) -> Float[Tensor, "batch vocab"]:
    """Returns logits that discourage the tokens already in the row (CTRL, Keskar et al. 2019, section 4.1).

    Each token that occurs in the row is penalised once, however often it occurs: a positive logit is divided
    by the penalty, a negative one multiplied, so both fall. The other tokens keep their logits.

    Args:
        logits: of the next token.
        ids: the text so far, prompt included.
        penalty: above 0; 1 changes nothing, above 1 discourages.

    Raises:
        ValueError: penalty is not above 0 (optional in the exercise).
    """
    if not penalty > 0:
        raise ValueError(f"repetition_penalty needs penalty > 0, got penalty={penalty}")
    # a mask counts a token once, whatever its number of occurrences
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids.long(), True)
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalised, logits)


def distinct_n(ids: Int[Tensor, " seq"] | Sequence[int], n: int) -> float:
    """Returns the share of n-grams that are distinct (Li et al. 2016).

    The n-grams overlap: a text of `seq` tokens has `seq - n + 1` of them. A text without any gives 0.0.

    Args:
        ids: the text, a 1-D tensor or a list.
        n: length of the n-grams, 1 or more.

    Raises:
        ValueError: n is below 1 (optional in the exercise).
    """
    if n < 1:
        raise ValueError(f"distinct_n needs n >= 1, got n={n}")
    tokens = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    ngrams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def min_p_filter(probs: Float[Tensor, "*batch vocab"], min_p: float) -> Float[Tensor, "*batch vocab"]:
    """Returns the distribution over tokens near the most probable one (Nguyen et al. 2024).

    A token survives when its probability is at least min_p times the largest of its row. So the threshold
    follows the model's confidence: a peaked row keeps few tokens, a flat row many. The other tokens become 0
    and each row is scaled to sum to 1 again.

    Args:
        probs: each row sums to 1.
        min_p: share of the largest probability, from 0 (keeps every token) to 1 (keeps the largest).

    Raises:
        ValueError: min_p is outside [0, 1] (optional in the exercise).
    """
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p_filter needs 0 <= min_p <= 1, got min_p={min_p}")
    wide = _widen(probs.detach())
    return _renormalise(probs, wide >= min_p * wide.amax(dim=-1, keepdim=True))


def speculative_accept(
    target_probs: Float[Tensor, "targets vocab"],
    draft_probs: Float[Tensor, "drafts vocab"],
    draft_ids: Int[Tensor, " drafts"],
    u: Float[Tensor, " drafts"],
) -> tuple[int, Float[Tensor, " vocab"]]:
    """Returns the accepted count and the next token's distribution (Leviathan et al. 2023, algorithm 1).

    With p and q the target's and the draft's probability of the drafted token, draft i is accepted if
    `u[i] < min(1, p / q)`. At the first rejection the next token comes from the residual of that row:
    `max(0, target - draft)`, scaled to sum to 1. When all drafts are accepted it comes from the last target
    row. Tokens obtained in this way follow the target distribution exactly.

    Args:
        target_probs: rows of the large model, one more than there are drafts.
        draft_probs: rows of the small model that the drafts were drawn from.
        draft_ids: the drafted tokens.
        u: one uniform number in [0, 1) per draft.

    Raises:
        ValueError: target_probs does not have one row more than there are drafts (optional in the exercise).
    """
    drafts = len(draft_ids)
    if len(target_probs) != drafts + 1:
        raise ValueError(
            f"speculative_accept needs one target row more than drafts, "
            f"got {len(target_probs)} rows for {drafts} drafts"
        )
    picked = draft_ids.long()[:, None]
    p = _widen(target_probs[:drafts].gather(1, picked))[:, 0]
    q = _widen(draft_probs.gather(1, picked))[:, 0]
    accepted = u * q < p  # u < p / q without dividing by 0
    count = int(accepted.int().cumprod(dim=0).sum())
    if count == drafts:
        return count, target_probs[drafts]
    residual = (_widen(target_probs[count]) - _widen(draft_probs[count])).clamp(min=0)
    total = residual.sum()
    if total == 0:  # the rows differ by rounding alone
        return count, target_probs[count]
    return count, (residual / total).to(target_probs.dtype)
