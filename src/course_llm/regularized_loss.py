"""The cross-entropy of a training run: label smoothing and z-loss, plain, in chunks, and with its gradient ahead.

Three forms of one function. The plain one says what is computed. The chunked one computes the same from the
hidden states without ever holding the logits of more than `chunk` rows, and computes the logits twice. The one
of a training step takes the gradient of each chunk at once, while its logits are there: no logits are kept and
none are computed again. What it keeps instead is the gradient of the output matrix, which a training step
needs in any case.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from course_llm.loss import (
    _add_product,
    _check_targets,
    _ChunkedLoss,
    _log_z,
    _mean_over,
    _row_losses,
    _turn_into_gradient,
    _wide_dtype,
    _widened,
)

CHUNK_LOGITS = {"cpu": 2**22}  # logits that exist at once: on CPUs as many as its caches hold
MANY_LOGITS = 2**27  # elsewhere: enough to keep a GPU busy


def regularized_cross_entropy(
    logits: Float[Tensor, "*batch vocab"],
    targets: Int[Tensor, "*batch"],
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
) -> Float[Tensor, ""]:
    """Returns the mean cross-entropy with smoothed targets plus `z_loss * log(Z) ** 2`, in nats (0-d).

    Args:
        logits: unnormalised scores; Z is the sum of their exponentials in a row.
        targets: the true token id of each row, or `ignore_index`.
        label_smoothing: share of the target's probability that is spread over the vocabulary, 0 to 1.
        z_loss: weight of the squared log Z, at least 0 (PaLM: 1e-4); it keeps the logits from drifting.
        ignore_index: rows with this target do not count.

    Raises:
        ValueError: label_smoothing is outside [0, 1], z_loss below 0, or a target outside the vocabulary.
    """
    name = "regularized_cross_entropy"
    _check_weights(name, label_smoothing, z_loss)
    _check_targets(name, targets, logits.shape[:-1], logits.shape[-1], ignore_index)
    counted = targets != ignore_index
    losses = _row_losses(_widened(logits), targets.masked_fill(~counted, 0), label_smoothing, z_loss)
    return _mean_over(losses, counted).to(logits.dtype)


def chunked_regularized_cross_entropy(
    hidden: Float[Tensor, "n d_hidden"],
    w_vocab: Float[Tensor, "d_hidden vocab"],
    targets: Int[Tensor, " n"],
    chunk: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
) -> Float[Tensor, ""]:
    """Returns `regularized_cross_entropy` of `hidden @ w_vocab`, whose logits exist only `chunk` rows at a time.

    Args:
        hidden: the model's last hidden states, one row per prediction.
        w_vocab: the output projection.
        targets: the true token id of each row, or `ignore_index`.
        chunk: number of rows whose logits exist at once, at least 1.
        label_smoothing: as in `regularized_cross_entropy`.
        z_loss: as in `regularized_cross_entropy`.
        ignore_index: rows with this target do not count.

    Raises:
        ValueError: chunk is below 1, label_smoothing outside [0, 1], z_loss below 0, or a target outside the
            vocabulary.
    """
    name = "chunked_regularized_cross_entropy"
    if chunk < 1:
        raise ValueError(f"{name} needs chunk >= 1, got chunk={chunk}")
    _check_weights(name, label_smoothing, z_loss)
    _check_targets(name, targets, hidden.shape[:-1], w_vocab.shape[-1], ignore_index)
    return _ChunkedLoss.apply(hidden, w_vocab, targets, chunk, label_smoothing, z_loss, ignore_index)


def training_cross_entropy(
    hidden: Float[Tensor, "n d_hidden"],
    w_vocab: Float[Tensor, "d_hidden vocab"],
    targets: Int[Tensor, " n"],
    chunk: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
) -> Float[Tensor, ""]:
    """Returns `regularized_cross_entropy` of `hidden @ w_vocab` and has its gradient ready.

    Args:
        hidden: the model's last hidden states, one row per prediction.
        w_vocab: the output projection.
        targets: the true token id of each row, or `ignore_index`.
        chunk: number of rows whose logits exist at once, at least 1; None takes as many as suit the device.
        label_smoothing: as in `regularized_cross_entropy`.
        z_loss: as in `regularized_cross_entropy`.
        ignore_index: rows with this target do not count.

    The FLOPs are those of the plain form. The result can be differentiated once. Half precision is multiplied as it
    is and summed in float32. Without gradients (`torch.no_grad`) only the loss is computed.

    Raises:
        ValueError: chunk is below 1, label_smoothing outside [0, 1], z_loss below 0, or a target outside the
            vocabulary.
    """
    name = "training_cross_entropy"
    if chunk is None:
        logits = CHUNK_LOGITS.get(hidden.device.type, MANY_LOGITS)
        chunk = max(logits // max(w_vocab.shape[-1], 1), 1)
    if chunk < 1:
        raise ValueError(f"{name} needs chunk >= 1, got chunk={chunk}")
    _check_weights(name, label_smoothing, z_loss)
    _check_targets(name, targets, hidden.shape[:-1], w_vocab.shape[-1], ignore_index)
    form = _LossAndGradient if torch.is_grad_enabled() else _ChunkedLoss
    return form.apply(hidden, w_vocab, targets, chunk, label_smoothing, z_loss, ignore_index)


class _LossAndGradient(torch.autograd.Function):
    """Computes the gradient in forward, chunk by chunk; backward only scales it."""

    @staticmethod
    def forward(ctx, hidden, w_vocab, targets, chunk, label_smoothing, z_loss, ignore_index):
        counted = targets != ignore_index
        targets, kept = targets.masked_fill(~counted, 0), hidden.masked_fill(~counted[:, None], 0)
        losses = hidden.new_empty(len(hidden), dtype=_wide_dtype(hidden))
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_w = torch.zeros_like(w_vocab, dtype=_wide_dtype(hidden)) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = _widened(hidden[rows] @ w_vocab)  # (chunk, vocab)
            losses[rows], softmax, lse = _losses_and_softmax(logits, targets[rows], label_smoothing, z_loss)
            grad = _turn_into_gradient(softmax, targets[rows], lse, label_smoothing, z_loss).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ w_vocab.T
            if grad_w is not None:
                _add_product(grad_w, kept[rows].T, grad)
        share = 1 / counted.sum().clamp(min=1)
        grad_hidden = None if grad_hidden is None else grad_hidden.mul_((counted * share)[:, None])
        grad_w = None if grad_w is None else grad_w.mul_(share).to(w_vocab.dtype)
        ctx.save_for_backward(grad_hidden, grad_w)
        return _mean_over(losses, counted).to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        # in place: the gradient of a vocabulary is large, and this is its only use; a second backward is refused
        found = [None if grad is None else grad.mul_(grad_loss) for grad in ctx.saved_tensors]
        return *found, None, None, None, None, None


def _losses_and_softmax(
    logits: Float[Tensor, "rows vocab"], targets: Int[Tensor, " rows"], label_smoothing: float, z_loss: float
) -> tuple[Float[Tensor, " rows"], Float[Tensor, "rows vocab"], Float[Tensor, " rows"]]:
    """Returns the loss of each row, its softmax and its log-sum-exp, with one exponential per logit."""
    softmax = logits.softmax(dim=-1)
    lse = _log_z(logits, softmax)
    losses = lse - (1 - label_smoothing) * logits.gather(-1, targets[:, None])[:, 0]
    if label_smoothing:
        losses = losses - label_smoothing * logits.mean(dim=-1)
    if z_loss:
        losses = losses + z_loss * lse.square()
    return losses, softmax, lse


def _check_weights(name: str, label_smoothing: float, z_loss: float) -> None:
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{name} needs 0 <= label_smoothing <= 1, got label_smoothing={label_smoothing}")
    if not z_loss >= 0:
        raise ValueError(f"{name} needs z_loss >= 0, got z_loss={z_loss}")
