"""One step of training: forward, backward, clipping, AdamW. All that is computed often is here.

The model gives its last hidden states, and the loss takes their gradient while it computes the logits
(`course_llm.regularized_loss.training_cross_entropy`): the logits of all positions never exist. Nothing reads a
number back from the device, so the step also runs where there are no numbers (`device="meta"`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from course_llm.model import Decoder
from course_llm.regularized_loss import training_cross_entropy


class Objective(nn.Module):
    """The mean loss per token of a decoder: what a training step minimises.

    Args:
        model: its parameters are trained.
        precision: of matrix products; bfloat16 means autocast, anything else the dtype of the weights.
        label_smoothing: as in `course_llm.regularized_loss.regularized_cross_entropy`.
        z_loss: as in `course_llm.regularized_loss.regularized_cross_entropy`.
    """

    def __init__(
        self,
        model: Decoder,
        precision: torch.dtype | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        self.model, self.label_smoothing, self.z_loss = model, label_smoothing, z_loss
        self.half = precision if precision == torch.bfloat16 else None

    def forward(
        self,
        ids: Int[Tensor, "batch seq"],
        targets: Int[Tensor, "batch seq"],
        document_ids: Int[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, ""]:
        """Returns the mean loss per token.

        Args:
            ids: the inputs.
            targets: the token that follows each input; `-100` does not count.
            document_ids: attention stays inside a document; None takes each row as one.
        """
        with nullcontext() if self.half is None else torch.autocast(ids.device.type, self.half):
            hidden = self.model.hidden(ids, document_ids=document_ids).flatten(0, 1)
        w_vocab = self.model.head.weight.T
        if self.half is not None:
            hidden, w_vocab = hidden.to(self.half), w_vocab.to(self.half)
        rules = {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        return training_cross_entropy(hidden, w_vocab, targets.flatten(), **rules)


def make_optimizer(
    model: nn.Module,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    fused: bool = True,
) -> torch.optim.AdamW:
    """Builds AdamW in which matrices decay and vectors (norms, biases) do not.

    Args:
        model: its parameters are trained.
        lr: learning rate.
        betas: shares of the two running means that are kept at each step.
        eps: added to the root of the second mean.
        weight_decay: of matrices.
        fused: use torch's fused kernels.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)


def training_step(
    objective: Callable[[Tensor, Tensor], Tensor],
    parameters: Iterable[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Int[Tensor, "batch seq"], Int[Tensor, "batch seq"]]],
    clip: float,
) -> tuple[Float[Tensor, ""], Any]:
    """Does one optimizer step and returns the loss and the gradients' norm before clipping, on the device.

    Args:
        objective: inputs and targets to the mean loss per token.
        parameters: all that are trained.
        optimizer: of the parameters, its rate set.
        batches: pairs `(inputs, targets)`, all with the same number of tokens: then the mean of their means is
            the mean per token. They go forward and backward one after the other.
        clip: largest norm of all gradients together, above 0.

    Raises:
        ValueError: no batch, or a clip that is not above 0.
    """
    if not batches or not clip > 0:
        raise ValueError(f"training_step needs a batch and clip > 0, got {len(batches)} and clip={clip}")
    total: Tensor | float = 0.0
    for inputs, targets in batches:
        loss = objective(inputs, targets) / len(batches)
        loss.backward()
        total = total + loss.detach()
    norm = nn.utils.clip_grad_norm_(parameters, clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, norm
