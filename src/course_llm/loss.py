"""Learning to predict the next token: the cross-entropy of a language model, and how to measure it honestly.

The chain rule turns the probability of a text into one prediction per position. The loss is the mean of the
negative log-probabilities that the model gives to the true tokens, in nats; perplexity and bits per byte are
the same number in other units. Teacher forcing computes every position in one pass; free running is what
happens when the model writes. Everywhere, targets outside the vocabulary and shapes that do not fit are
refused with a ValueError.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable


def log_softmax(logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
    """Returns log-probabilities over the last axis, stable for logits of any size (log-sum-exp trick).

    Args:
        logits: unnormalised scores; `[0, 200]` gives `[-200, 0]`, not `[-inf, 0]`.

    Half precision is computed in float32; the result has the dtype of the logits.
    """
    wide = _widened(logits)
    # Subtract the largest logit: exp overflows above 88 in float32. It cancels, so it needs no gradient.
    shifted = wide - wide.amax(dim=-1, keepdim=True).detach()
    return (shifted - shifted.exp().sum(dim=-1, keepdim=True).log()).to(logits.dtype)


def cross_entropy(
    logits: Float[Tensor, "*batch vocab"], targets: Int[Tensor, "*batch"], ignore_index: int = -100
) -> Float[Tensor, ""]:
    """Returns the mean negative log-probability of the targets, in nats (0-d).

    Args:
        logits: unnormalised scores of every token of the vocabulary.
        targets: the true token id of each row, or `ignore_index`.
        ignore_index: rows with this target count neither in the sum nor in the number that divides it.

    When no target counts, the loss is 0 and so is its gradient. Half precision is summed in float32.

    Raises:
        ValueError: targets outside the vocabulary, or shapes that do not fit (optional in the exercise).
    """
    _check_targets("cross_entropy", targets, logits.shape[:-1], logits.shape[-1], ignore_index)
    counted = targets != ignore_index
    nll = -_target_log_probs(logits, targets.masked_fill(~counted, 0))
    return _mean_over(nll, counted).to(logits.dtype)


def shift_for_next_token(
    ids: Int[Tensor, "batch seq"],
) -> tuple[Int[Tensor, "batch shorter"], Int[Tensor, "batch shorter"]]:
    """Returns `(inputs, targets)`, each one token shorter: a target is the token that follows its input.

    Args:
        ids: token ids of whole texts, at least one token each.
    """
    return ids[:, :-1], ids[:, 1:]


def next_token_loss(
    logits: Float[Tensor, "batch seq vocab"], ids: Int[Tensor, "batch seq"], pad_id: int | None = None
) -> Float[Tensor, ""]:
    """Returns the mean loss of predicting each token from those before it, in nats (0-d).

    Args:
        logits: what the model says after each token of `ids`; the last position has no target.
        ids: the token ids that the model has read, not shifted.
        pad_id: id of the padding token, below vocab: targets equal to it do not count. None counts them all.

    When no target is left, the loss is 0.

    Raises:
        ValueError: ids outside the vocabulary, or shapes that do not fit (optional in the exercise).
    """
    _check_targets("next_token_loss", ids, logits.shape[:-1], logits.shape[-1])
    _, targets = shift_for_next_token(ids)
    if pad_id is not None:
        targets = targets.masked_fill(targets == pad_id, -100)
    return cross_entropy(logits[:, :-1], targets)


def sequence_log_prob(
    logits: Float[Tensor, "batch seq vocab"], ids: Int[Tensor, "batch seq"]
) -> Float[Tensor, " batch"]:
    """Returns `log P(x_2, ..., x_n | x_1)` of each row, in nats: the chain rule as a sum of logarithms.

    Args:
        logits: what the model says after each token of `ids`; the last position has nothing to predict.
        ids: token ids; the first is given and not scored.

    A row of one token has log-probability 0. Half precision is summed in float32.

    Raises:
        ValueError: ids outside the vocabulary, or shapes that do not fit (optional in the exercise).
    """
    _check_targets("sequence_log_prob", ids, logits.shape[:-1], logits.shape[-1])
    _, targets = shift_for_next_token(ids)
    return _target_log_probs(logits[:, :-1], targets).sum(dim=-1).to(logits.dtype)


def perplexity(
    nll_sums: Float[Tensor, " batches"], token_counts: Int[Tensor, " batches"]
) -> Float[Tensor, ""]:
    """Returns `exp(all nats / all tokens)` of a data set that came in batches of unequal size (0-d).

    Args:
        nll_sums: summed negative log-likelihood of each batch, in nats.
        token_counts: number of scored tokens of each batch; a batch may have none.

    Without any token there is no mean and the result is `nan`. Half precision is summed in float32.

    Raises:
        ValueError: there are not as many counts as sums (optional in the exercise).
    """
    if nll_sums.shape != token_counts.shape:
        shapes = f"sums {tuple(nll_sums.shape)}, counts {tuple(token_counts.shape)}"
        raise ValueError(f"perplexity needs one count per sum, got {shapes}")
    return (_widened(nll_sums).sum() / token_counts.sum()).exp().to(nll_sums.dtype)


def bits_per_byte(nll_sum: Float[Tensor, ""], text: str) -> Float[Tensor, ""]:
    """Returns the bits that the model needs per byte of text: comparable across tokenizers (0-d).

    Args:
        nll_sum: negative log-likelihood of the whole text, in nats.
        text: the text that was scored; its size is its number of UTF-8 bytes.

    Raises:
        ValueError: the text is empty.
    """
    if not text:
        raise ValueError("bits_per_byte needs a text of at least one byte, got an empty one")
    return nll_sum / (math.log(2) * len(text.encode("utf-8")))


def cross_entropy_gradient(
    logits: Float[Tensor, "n vocab"], targets: Int[Tensor, " n"]
) -> Float[Tensor, "n vocab"]:
    """Returns the gradient of the mean cross-entropy in the logits: `(softmax - one_hot) / n`.

    Args:
        logits: unnormalised scores, one row per prediction.
        targets: the true token id of each row.

    Works under `torch.no_grad()` too; without it, the result is itself differentiable in the logits.

    Raises:
        ValueError: targets outside the vocabulary, or shapes that do not fit (optional in the exercise).
    """
    _check_targets("cross_entropy_gradient", targets, logits.shape[:-1], logits.shape[-1])
    one_hot = torch.zeros_like(logits).scatter(-1, targets.unsqueeze(-1), 1)
    return ((log_softmax(_widened(logits)).exp() - one_hot) / max(len(targets), 1)).to(logits.dtype)


def free_running_predictions(
    model: Callable[[Tensor], Tensor], ids: Int[Tensor, "batch seq"], prompt_length: int
) -> Int[Tensor, "batch seq"]:
    """Returns what the model predicts after each position when it reads the prompt, then its own predictions.

    Args:
        model: ids `(batch, seq)` to logits `(batch, seq, vocab)`, causal.
        ids: the true token ids; only the first `prompt_length` of each row are read.
        prompt_length: number of true tokens at the start, from 1 to seq.

    Entry t is the arg-max after the inputs up to t. From `t = prompt_length` on, the input at t is entry
    `t - 1`. Ties go to the lower id.

    Raises:
        ValueError: prompt_length is below 1 or above seq (optional in the exercise).
    """
    seq = ids.shape[1]
    if not 1 <= prompt_length <= seq:
        rule = f"1 <= prompt_length <= seq={seq}"
        raise ValueError(f"free_running_predictions needs {rule}, got prompt_length={prompt_length}")
    inputs = ids[:, :prompt_length]
    predictions = teacher_forced_predictions(model, inputs)
    while predictions.shape[1] < seq:
        inputs = torch.cat([inputs, predictions[:, -1:]], dim=1)
        newest = teacher_forced_predictions(model, inputs)[:, -1:]
        predictions = torch.cat([predictions, newest], dim=1)
    return predictions


def teacher_forced_predictions(
    model: Callable[[Tensor], Tensor], ids: Int[Tensor, "batch seq"]
) -> Int[Tensor, "batch seq"]:
    """Returns what the model predicts after each position when every input is the true token: one pass.

    Args:
        model: ids `(batch, seq)` to logits `(batch, seq, vocab)`, causal.
        ids: the true token ids.

    Entry t is the arg-max after the inputs up to t, so it guesses the token at `t + 1`. Ties go to the
    lower id.
    """
    with torch.no_grad():
        return model(ids).argmax(dim=-1).to(ids.dtype)


def sliding_window_nll(
    model: Callable[[Tensor], Tensor], ids: Int[Tensor, "1 n"], window: int, stride: int
) -> tuple[Float[Tensor, ""], int]:
    """Returns `(nll, n - 1)`: the summed loss, in nats, of a text that is longer than the model's window.

    Args:
        model: ids `(1, seq)` to logits `(1, seq, vocab)`, causal.
        ids: the token ids of the text; the first is given and not scored, every other is scored once.
        window: tokens that the model reads at once.
        stride: tokens between the starts of two windows, at least 1; a smaller one gives more context.

    Windows of `window` tokens start at `0, stride, 2 * stride, ...`, the last at `max(0, n - window)`. The
    targets of a window are its tokens but the first; it scores those that no earlier window has scored.

    Raises:
        ValueError: stride is not below window, or (optional in the exercise) is below 1.
    """
    if not 1 <= stride < window:
        raise ValueError(
            f"sliding_window_nll needs 1 <= stride < window, got window={window}, stride={stride}"
        )
    n = ids.shape[1]
    starts = [*range(0, n - window, stride), max(0, n - window)]
    nll: Tensor | float = 0.0
    # the tokens before this one are done; the first has no prediction
    scored = 1
    with torch.no_grad():
        for start in starts:
            tokens = ids[:, start : start + window]
            log_probs = _target_log_probs(model(tokens)[:, :-1], tokens[:, 1:])
            nll = nll - log_probs[:, scored - start - 1 :].sum()
            scored = start + tokens.shape[1]
    return nll, n - 1


def chunked_cross_entropy(
    hidden: Float[Tensor, "n d_hidden"],
    w_vocab: Float[Tensor, "d_hidden vocab"],
    targets: Int[Tensor, " n"],
    chunk: int,
) -> Float[Tensor, ""]:
    """Returns the mean cross-entropy of `hidden @ w_vocab`, in nats (0-d), `chunk` rows of logits at a time.

    Args:
        hidden: the model's last hidden states, one row per prediction.
        w_vocab: the output projection.
        targets: the true token id of each row.
        chunk: number of rows whose logits exist at once, at least 1; need not divide n, may be above n.

    Equals the loss of all rows at once, and so do its gradients in `hidden` and `w_vocab`. With chunk below
    n the `(n, vocab)` logits never exist, neither at once nor in pieces saved for backward.

    Raises:
        ValueError: chunk is below 1, or targets are outside the vocabulary (optional in the exercise).
    """
    if chunk < 1:
        raise ValueError(f"chunked_cross_entropy needs chunk >= 1, got chunk={chunk}")
    _check_targets("chunked_cross_entropy", targets, hidden.shape[:-1], w_vocab.shape[-1], -100)
    return _ChunkedLoss.apply(hidden, w_vocab, targets, chunk)


class _ChunkedLoss(torch.autograd.Function):
    """Saves its arguments and no logits; backward computes the logits again, chunk by chunk.

    A row costs lse - (1 - s) * x[target] - s * mean(x) + z * lse^2 with label smoothing s and z-loss z, where
    lse is the log-sum-exp of the row's logits x.
    """

    @staticmethod
    def forward(ctx, hidden, w_vocab, targets, chunk, label_smoothing=0.0, z_loss=0.0, ignore_index=-100):
        ctx.save_for_backward(hidden, w_vocab, targets)
        ctx.settings = chunk, label_smoothing, z_loss, ignore_index
        counted = targets != ignore_index
        targets = targets.masked_fill(~counted, 0)
        losses = hidden.new_empty(len(hidden), dtype=_wide_dtype(hidden))
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = _widened(hidden[rows] @ w_vocab)  # (chunk, vocab)
            losses[rows] = _row_losses(logits, targets[rows], label_smoothing, z_loss)
        return _mean_over(losses, counted).to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        hidden, w_vocab, targets = ctx.saved_tensors
        chunk, label_smoothing, z_loss, ignore_index = ctx.settings
        counted = targets != ignore_index
        targets, kept = targets.masked_fill(~counted, 0), hidden.masked_fill(~counted[:, None], 0)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_w = torch.zeros_like(w_vocab, dtype=_wide_dtype(hidden)) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = _widened(hidden[rows] @ w_vocab)  # (chunk, vocab)
            softmax, lse = logits.softmax(dim=-1), None
            if z_loss:
                lse = _log_z(logits, softmax)
            grad = _turn_into_gradient(softmax, targets[rows], lse, label_smoothing, z_loss).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ w_vocab.T
            if grad_w is not None:
                _add_product(grad_w, kept[rows].T, grad)
        # each row's share in the mean enters here: these sums have fewer elements than the logits
        share = grad_loss / counted.sum().clamp(min=1)
        grad_hidden = None if grad_hidden is None else grad_hidden.mul_((counted * share)[:, None])
        grad_w = None if grad_w is None else grad_w.mul_(share).to(w_vocab.dtype)
        return grad_hidden, grad_w, None, None, None, None, None


def _turn_into_gradient(
    softmax: Float[Tensor, "rows vocab"],
    targets: Int[Tensor, " rows"],
    lse: Float[Tensor, " rows"] | None,
    label_smoothing: float,
    z_loss: float,
) -> Float[Tensor, "rows vocab"]:
    """Turns the softmax of each row into the gradient of its loss in its logits, in place."""
    grad = softmax.mul_(1 + 2 * z_loss * lse[:, None]) if z_loss else softmax
    grad = grad.sub_(label_smoothing / grad.shape[-1]) if label_smoothing else grad
    at_target = targets[:, None]
    return grad.scatter_add_(-1, at_target, grad.new_full(at_target.shape, label_smoothing - 1))


def _add_product(total: Float[Tensor, "n m"], a: Float[Tensor, "n k"], b: Float[Tensor, "k m"]) -> None:
    """Adds a @ b to the total, in place, and computes it in the total's order of rows and columns."""
    if total.dtype == a.dtype and not torch.compiler.is_compiling():
        torch.addmm(total, a, b, out=total)  # and not addmm_, which torch's counter of FLOPs leaves out
    elif total.is_contiguous():
        total += a @ b
    else:
        total.T.add_(b.T @ a.T)


def _row_losses(
    logits: Float[Tensor, "*batch vocab"],
    targets: Int[Tensor, "*batch"],
    label_smoothing: float,
    z_loss: float,
) -> Float[Tensor, "*batch"]:
    """Returns the loss of each row; torch computes its log-probabilities in one pass over the logits."""
    log_probs = logits.log_softmax(dim=-1)
    losses = (label_smoothing - 1) * log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        losses = losses - label_smoothing * log_probs.mean(dim=-1)
    if z_loss:
        losses = losses + z_loss * logits.logsumexp(dim=-1).square()
    return losses


def _log_z(
    logits: Float[Tensor, "*batch vocab"], softmax: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """Returns each row's log-sum-exp without another exponential.

    The largest logit x has the probability exp(x - lse), at least 1/vocab: no digits are lost.
    """
    return logits.amax(dim=-1) - softmax.amax(dim=-1).log()


def _target_log_probs(
    logits: Float[Tensor, "*batch vocab"], targets: Int[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """Returns the log-probability of each target, in float32 for half types."""
    return log_softmax(_widened(logits)).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _mean_over(values: Float[Tensor, "*batch"], counted: Bool[Tensor, "*batch"]) -> Float[Tensor, ""]:
    """Returns the mean of the counted values; 0, with gradient 0, when none counts."""
    return values.masked_fill(~counted, 0).sum() / counted.sum().clamp(min=1)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _widened(x: Tensor) -> Tensor:
    """Returns x in float32 when it is a half type, else x itself: exponentials and sums need the digits."""
    return x.to(_wide_dtype(x))


def _check_targets(
    name: str, targets: Tensor, rows: torch.Size, vocab: int, ignore_index: int | None = None
) -> None:
    if targets.shape != rows:
        shapes = f"rows {tuple(rows)}, targets {tuple(targets.shape)}"
        raise ValueError(f"{name} needs one target per row, got {shapes}")
    # Reading values back stalls a GPU and breaks a compiled graph: only eager CPU code pays for this check.
    if targets.device.type != "cpu" or torch.compiler.is_compiling():
        return
    outside = (targets < 0) | (targets >= vocab)
    if ignore_index is not None:
        outside &= targets != ignore_index
    if outside.any():
        raise ValueError(f"{name} needs 0 <= target < vocab={vocab}, got target={targets[outside][0].item()}")
