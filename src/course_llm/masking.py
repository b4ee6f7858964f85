"""Masks: training on every position at once without showing the answers.

A text of n tokens holds n - 1 questions: what follows the first token, what follows the first two, and so
on. A transformer answers them all in one pass, but plain attention lets position i read token i + 1, which is
the answer. A mask forbids it. A boolean mask says True where a query may attend to a key, as torch's
`scaled_dot_product_attention` does; an additive mask says 0 there and `-inf` elsewhere and is added to the
scores before the softmax. `find_leaks` puts a model to the test: it finds, from outside, which outputs depend
on later tokens.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def causal_mask(n: int, dtype: torch.dtype = torch.float32) -> Float[Tensor, "n n"]:
    """Builds the additive mask that hides the future: 0 where key `j <= i`, `-inf` where `j > i`.

    Rows are queries, columns are keys. The diagonal is allowed: a token may attend to itself.

    Args:
        n: number of tokens, 1 or more.
        dtype: floating-point type of the mask, that of the scores it is added to.

    Raises:
        ValueError: n is below 1, or dtype is no floating-point type (optional in the exercise).
    """
    _require_at_least("causal_mask", "n", n, 1)
    if not dtype.is_floating_point:
        raise ValueError(f"causal_mask needs a floating-point dtype (-inf must exist), got dtype={dtype}")
    # a true -inf, not -1e9: a row of -1e9 attends to its masked keys, and float16 has no such number
    return torch.full((n, n), -math.inf, dtype=dtype).triu(diagonal=1)


def masked_softmax(
    scores: Float[Tensor, "*batch queries keys"], mask: Float[Tensor, "..."]
) -> Float[Tensor, "*batch queries keys"]:
    """Turns scores into attention weights: softmax over the keys of `scores + mask`.

    Masked weights are exactly 0 and the others of a row sum to 1. A row without any allowed key is all 0, and
    so is its gradient (a plain softmax gives NaN there). Scores as large as 1e4 do not overflow.

    Args:
        scores: raw attention scores, already scaled by `1 / sqrt(d_k)`.
        mask: additive, 0 = may attend, `-inf` = may not, in the dtype of the scores; broadcast to their shape.

    Raises:
        ValueError: the mask is not additive or does not broadcast to the scores (optional in the exercise).

    Numerics: the softmax runs in float32 for half-precision scores.
    """
    _require_broadcast(mask, scores)
    wide = torch.promote_types(scores.dtype, torch.float32)
    hidden = (mask == -math.inf).expand(scores.shape)
    masked = (scores + mask).to(wide).masked_fill(hidden, -math.inf)
    # softmax of a row of -inf is NaN, and its gradient too: such a row gets harmless zeros first
    masked = masked.masked_fill(hidden.all(dim=-1, keepdim=True), 0.0)
    return torch.softmax(masked, dim=-1).masked_fill(hidden, 0.0).to(scores.dtype)


def causal_self_attention(
    q: Float[Tensor, "*batch seq d"], k: Float[Tensor, "*batch seq d"], v: Float[Tensor, "*batch seq d"]
) -> Float[Tensor, "*batch seq d"]:
    """Attends to the current and to earlier tokens only: `softmax(q @ k.T / sqrt(d) + M) @ v`.

    M is `causal_mask`. Output i depends on `q[i]` and on k and v up to position i; its gradient with respect
    to every later position is exactly 0.

    Args:
        q: queries, one row per token.
        k: keys.
        v: values.

    Numerics: the softmax runs in float32 for half-precision inputs.
    """
    seq, d = q.shape[-2:]
    scores = q @ k.transpose(-2, -1) / math.sqrt(d)  # (..., queries, keys)
    return masked_softmax(scores, causal_mask(seq, scores.dtype).to(scores.device)) @ v


def causal_mask_with_past(queries: int, keys: int) -> Bool[Tensor, "queries keys"]:
    """Builds the boolean causal mask for the last `queries` tokens of a sequence of `keys` tokens.

    While text is generated, the keys of earlier tokens are kept and only new tokens ask. The last query is
    the last token and sees every key; the query before it sees all but the last key, and so on. True = may
    attend.

    Args:
        queries: number of new tokens, 1 or more.
        keys: number of tokens so far, the new ones included.

    Raises:
        ValueError: there are more queries than keys, or (optional in the exercise) queries is below 1.
    """
    _require_at_least("causal_mask_with_past", "queries", queries, 1)
    if queries > keys:
        raise ValueError(
            "causal_mask_with_past needs queries <= keys (the queries are the last tokens of the sequence), "
            f"got queries={queries}, keys={keys}"
        )
    query_position = torch.arange(keys - queries, keys)
    return torch.arange(keys) <= query_position[:, None]


def padding_mask(lengths: Int[Tensor, "batch"], seq: int) -> Bool[Tensor, "batch seq"]:
    """Marks the real tokens of a batch that is padded on the right: True on the first `lengths[b]` of row b.

    Args:
        lengths: number of real tokens per row, 0 to seq.
        seq: length to which the rows are padded, in tokens.

    Raises:
        ValueError: seq is below 1, or a length is below 0 or above seq (optional in the exercise).
    """
    _require_at_least("padding_mask", "seq", seq, 1)
    if lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= seq:
        raise ValueError(f"padding_mask needs 0 <= lengths <= seq, got lengths={lengths.tolist()}, seq={seq}")
    return torch.arange(seq, device=lengths.device) < lengths[:, None]


def causal_padding_mask(real: Bool[Tensor, "batch seq"]) -> Bool[Tensor, "batch 1 seq seq"]:
    """Combines causal mask and padding: a query sees a key if `key <= query` and the key is a real token.

    The rule holds for padding queries too; nobody reads their outputs. Real tokens may stand anywhere in the
    row, so padding on the right and on the left both work. The axis of size 1 broadcasts over the heads.

    Args:
        real: True on real tokens, False on padding.
    """
    seq = real.shape[1]
    return _causal(seq, real.device) & real[:, None, None, :]


def sliding_window_mask(n: int, window: int) -> Bool[Tensor, "n n"]:
    """Lets each token attend to itself and to the `window - 1` tokens before it. True = may attend.

    Args:
        n: number of tokens, 1 or more.
        window: number of tokens that a query sees, itself included, 1 or more; n or more is plain causal.

    Raises:
        ValueError: window is below 1, or (optional in the exercise) n is.
    """
    _require_at_least("sliding_window_mask", "n", n, 1)
    _require_at_least("sliding_window_mask", "window", window, 1)
    position = torch.arange(n)
    distance = position[:, None] - position  # how far the key lies behind the query
    return (distance >= 0) & (distance < window)


def document_mask(document_ids: Int[Tensor, "*batch seq"]) -> Bool[Tensor, "*batch seq seq"]:
    """Keeps packed documents apart: causal inside a document, nothing across. True = may attend.

    Args:
        document_ids: the document of each token. A document is a run of equal ids; which numbers are used
            does not matter, and an id does not return after its run has ended.
    """
    same = document_ids[..., :, None] == document_ids[..., None, :]  # (..., query, key)
    return same & _causal(document_ids.shape[-1], document_ids.device)


def prefix_lm_mask(n: int, prefix: int) -> Bool[Tensor, "n n"]:
    """Lets the first `prefix` tokens see each other whole and keeps the rest causal. True = may attend.

    No token of the prefix sees a token after the prefix; a later token sees itself and all before it.

    Args:
        n: number of tokens, 1 or more.
        prefix: length of the prefix, 0 (plain causal) to n (everyone sees everyone).

    Raises:
        ValueError: n is below 1, or prefix below 0 or above n (optional in the exercise).
    """
    _require_at_least("prefix_lm_mask", "n", n, 1)
    if not 0 <= prefix <= n:
        raise ValueError(f"prefix_lm_mask needs 0 <= prefix <= n, got prefix={prefix}, n={n}")
    return _causal(n) | (torch.arange(n) < prefix)


def find_leaks(
    model: Callable[[Int[Tensor, "batch seq"]], Float[Tensor, "batch seq vocab"]], ids: Int[Tensor, "1 seq"]
) -> Bool[Tensor, "seq seq"]:
    """Finds which outputs of a model depend on later tokens, by putting other tokens there.

    Entry `(i, j)` is True if `j > i` and the logits at position i change by more than 1e-6 (any one of them,
    up or down) for some other token at position j, all other tokens left as they are. Entries on and below
    the diagonal are False: an output may depend on its own token and on earlier ones.

    Args:
        model: `(batch, seq)` token ids in, `(batch, seq, vocab)` logits out; row b of the output depends on
            row b of the input alone.
        ids: one text; every id lies in 0 to `vocab - 1`. It is not modified.

    Raises:
        ValueError: there is not exactly one text (optional in the exercise).
    """
    if ids.shape[0] != 1:
        raise ValueError(f"find_leaks needs ids of shape (1, seq), got {tuple(ids.shape)}")
    seq = ids.shape[1]
    with torch.no_grad():
        logits = model(ids)  # (1, seq, vocab)
        vocab = logits.shape[-1]
        tokens = torch.arange(vocab, dtype=ids.dtype, device=ids.device)
        leaks = torch.zeros(seq, seq, dtype=torch.bool, device=ids.device)
        for j in range(1, seq):
            others = tokens[tokens != ids[0, j]]
            if len(others) == 0:  # a vocabulary of one token leaves nothing to try
                continue
            changed = ids.repeat(len(others), 1)
            changed[:, j] = others
            difference = (model(changed) - logits).abs()  # (others, seq, vocab)
            leaks[:j, j] = (difference > 1e-6).any(dim=-1).any(dim=0)[:j]
    return leaks


def _causal(n: int, device: torch.device | None = None) -> Bool[Tensor, "n n"]:
    """Returns the boolean causal mask, True where key <= query."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril()


def _require_at_least(function: str, name: str, value: int, least: int) -> None:
    """Refuses anything but a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{function} needs a whole number {name} >= {least}, got {name}={value!r}")


def _require_broadcast(mask: Tensor, scores: Tensor) -> None:
    """Refuses a mask that is not additive or does not broadcast to the shape of the scores."""
    if not mask.is_floating_point():
        raise ValueError(f"masked_softmax needs an additive mask (0 or -inf), got dtype {mask.dtype}")
    try:
        shape = torch.broadcast_shapes(mask.shape, scores.shape)
    except RuntimeError:
        shape = None
    if shape != scores.shape:
        raise ValueError(
            "masked_softmax needs a mask that broadcasts to the shape of the scores, "
            f"got mask {tuple(mask.shape)}, scores {tuple(scores.shape)}"
        )
