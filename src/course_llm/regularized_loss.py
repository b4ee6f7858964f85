"""The cross-entropy of a training run: label smoothing and z-loss, plain and in chunks.

Two forms of one function. The plain one says what is computed; the chunked one computes the same from the
hidden states without ever holding the logits of more than `chunk` rows.
"""

from jaxtyping import Float, Int
from torch import Tensor

from course_llm.loss import _check_targets, _ChunkedLoss, _mean_over, _row_losses, _widened


def regularized_cross_entropy(
    logits: Float[Tensor, "*batch vocab"],
    targets: Int[Tensor, "*batch"],
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
) -> Float[Tensor, ""]:
    """Returns the mean cross-entropy with smoothed targets plus z_loss * log(Z)^2, in nats (0-d).

    Args:
        logits: unnormalised scores; Z is the sum of their exponentials in a row.
        targets: the true token id of each row, or `ignore_index`.
        label_smoothing: share of the target's probability that is spread over the vocabulary, 0 to 1.
        z_loss: weight of the squared log Z, at least 0 (PaLM: 1e-4); it keeps the logits from drifting.
        ignore_index: rows with this target do not count.

    Raises:
        ValueError: for label_smoothing outside [0, 1] or z_loss below 0.
    """
    name = "regularized_cross_entropy"
    _check_weights(name, label_smoothing, z_loss)
    _check_targets(name, targets, logits.shape[:-1], logits.shape[-1], ignore_index)
    counted = targets != ignore_index
    losses, _ = _row_losses(_widened(logits), targets.masked_fill(~counted, 0), label_smoothing, z_loss)
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
    """Returns `regularized_cross_entropy` of hidden @ w_vocab in the memory of `chunked_cross_entropy`.

    Args:
        hidden: the model's last hidden states, one row per prediction.
        w_vocab: the output projection.
        targets: the true token id of each row, or `ignore_index`.
        chunk: number of rows whose logits exist at once, at least 1.
        label_smoothing: as in `regularized_cross_entropy`.
        z_loss: as in `regularized_cross_entropy`.
        ignore_index: rows with this target do not count.

    Raises:
        ValueError: for chunk below 1, label_smoothing outside [0, 1] or z_loss below 0.
    """
    name = "chunked_regularized_cross_entropy"
    if chunk < 1:
        raise ValueError(f"{name} needs chunk >= 1, got chunk={chunk}")
    _check_weights(name, label_smoothing, z_loss)
    _check_targets(name, targets, hidden.shape[:-1], w_vocab.shape[-1], ignore_index)
    return _ChunkedLoss.apply(hidden, w_vocab, targets, chunk, label_smoothing, z_loss, ignore_index)


def _check_weights(name: str, label_smoothing: float, z_loss: float) -> None:
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{name} needs 0 <= label_smoothing <= 1, got label_smoothing={label_smoothing}")
    if not z_loss >= 0:
        raise ValueError(f"{name} needs z_loss >= 0, got z_loss={z_loss}")
