"""Language models small enough to cross the wall: an answer calls them on its own side, for a hundredth of what a served call costs.

They hold random numbers and nothing that spells an expected answer. A model whose calls are counted, or whose numbers would give
the answer away, stays with the grader (`autograder.spec.Served`).
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class HistoryModel:
    """Next-token logits that depend on every token of a text and its place.

    Args:
        last, past: `(vocab, vocab)`, float64: what the last token says about the next, and what each earlier one does.
    """

    last: Tensor
    past: Tensor

    def __call__(self, ids: Tensor) -> Tensor:
        """Takes ids `(batch, seq)`, returns float32 logits `(batch, vocab)`."""
        places = torch.arange(ids.shape[1], dtype=torch.float64, device=ids.device)
        weights = (1.3 * places).cos()[:, None]
        return (1.5 * self.last[ids[:, -1]] + (weights * self.past[ids]).sum(dim=1)).float()


@dataclasses.dataclass(frozen=True, eq=False)
class RowModel:
    """Logits that the first token of a row chooses, whatever follows it.

    Args:
        logits: `(first tokens, vocab)`.
    """

    logits: Tensor

    def __call__(self, ids: Tensor) -> Tensor:
        """Takes ids `(batch, seq)`, returns logits `(batch, vocab)`."""
        return self.logits[ids[:, 0]]


@dataclasses.dataclass(frozen=True, eq=False)
class SameLogits:
    """The same logits after every text.

    Args:
        logits: `(vocab,)`.
    """

    logits: Tensor

    def __call__(self, ids: Tensor) -> Tensor:
        """Takes ids `(batch, seq)`, returns logits `(batch, vocab)`."""
        return self.logits.repeat(ids.shape[0], 1)


MODELS = {model.__name__: model for model in (HistoryModel, RowModel, SameLogits)}
