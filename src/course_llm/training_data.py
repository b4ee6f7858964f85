"""Data of a pretraining run: which tokens come at which step, and how well a model predicts those held out.

The batch of a step follows from the seed and the step alone. So a run that is taken up again after a crash
needs no state of a random generator to see the same data, and every process of a parallel run knows its
share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from course_llm import corpus
from course_llm.tokenizer import CourseTokenizer


class TokenStream:
    """Cuts documents into training rows: shuffled anew each epoch, joined by ends of text, cut every `context`.

    Args:
        documents: token ids of each document.
        eos_id: ends a document.
        context: tokens per row.
        seed: of the order.

    Raises:
        ValueError: the documents together have no more than `context` tokens.
    """

    def __init__(self, documents: Sequence[Sequence[int]], eos_id: int, context: int, seed: int) -> None:
        self.documents = [torch.tensor([*ids, eos_id], dtype=torch.int64) for ids in documents]
        self.context, self.seed = context, seed
        self.rows_per_epoch = (sum(map(len, self.documents)) - 1) // context
        if self.rows_per_epoch < 1:
            raise ValueError(f"TokenStream needs more than context={context} tokens, got fewer")
        self._epoch: tuple[int, Tensor, Tensor] | None = None

    def batch(self, first: int, rows: int) -> tuple[Int[Tensor, "rows context"], Int[Tensor, "rows context"]]:
        """Returns inputs and targets of the rows `first` to `first + rows - 1`.

        Args:
            first: number of the first row, counted from 0 at the start of the run.
            rows: how many.
        """
        starts = [self._row(index) for index in range(first, first + rows)]
        pieces = torch.stack([stream[start : start + self.context + 1] for stream, start in starts])
        return pieces[:, :-1], pieces[:, 1:]

    def _row(self, index: int) -> tuple[Tensor, int]:
        epoch, place = divmod(index, self.rows_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.documents), generator=generator).tolist()
            stream = torch.cat([self.documents[document] for document in order])
            self._epoch = (epoch, stream, torch.randperm(self.rows_per_epoch, generator=generator))
        _, stream, rows = self._epoch
        return stream, int(rows[place]) * self.context


def windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int]]:
    """Yields start and first scored target of windows that score every target of a sequence once.

    Windows of `window` tokens start every `stride`; each scores the targets that the one before has not.

    Args:
        length: tokens of the sequence.
        window: tokens per window.
        stride: tokens between two starts, below `window`.
    """
    scored = 1
    for start in range(0, length, stride):
        yield start, scored
        scored = min(start + window, length)
        if scored == length:
            return


@torch.no_grad()
def bits_per_byte(
    model: nn.Module, documents: Sequence[str], tokenizer: CourseTokenizer, context: int, batch: int = 16
) -> float:
    """Measures how many bits the model needs per byte of documents, their ends included.

    The documents stand one after the other, each with its end of text, for which one byte, the newline, is
    counted. They are read in windows of `context` tokens that overlap by half: every token is predicted once,
    and all but the first ones after at least `context / 2` others.

    Args:
        model: token ids `(batch, seq)` to logits.
        documents: texts that the model was not trained on.
        tokenizer: the model's.
        context: tokens per window.
        batch: windows at a time.
    """
    ids = [tokenizer.eos_id]
    for document in tokenizer.encode_batch(documents):
        ids += [*document, tokenizer.eos_id]
    stream = torch.tensor(ids, dtype=torch.int64)
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64)
    places = list(windows(len(ids), context + 1, max(context // 2, 1)))
    for first in range(0, len(places), batch):
        group = places[first : first + batch]
        rows = [stream[start : start + context + 1] for start, _ in group]
        lengths = torch.tensor([len(row) for row in rows])
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.eos_id)
        position = torch.arange(1, padded.shape[1])
        fresh = torch.tensor([scored - start for start, scored in group])
        counted = (position >= fresh[:, None]) & (position < lengths[:, None])
        logits = model(padded[:, :-1].to(device)).float()
        losses = F.cross_entropy(logits.flatten(0, 1), padded[:, 1:].flatten().to(device), reduction="none")
        total += losses.cpu().double()[counted.flatten()].sum()
    return float(total / torch.tensor(2.0).double().log() / corpus.byte_count(documents))
