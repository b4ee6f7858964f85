"""Small models that the grader builds beside a student's training code; `Engine` finds them by name."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TinyLM(nn.Module):
    """Predicts the next token from the last `context` tokens: embedding, one hidden layer, output.

    Causal by construction, `(batch, seq)` ids to `(batch, seq, vocab)` logits, no dropout.
    """

    def __init__(self, vocab: int, width: int = 16, context: int = 2):
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(vocab, width)
        self.hidden = nn.Linear(context * width, 2 * width)
        self.out = nn.Linear(2 * width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)  # (batch, seq, width)
        shifted = [F.pad(x, (0, 0, i, 0))[:, : x.shape[1]] for i in range(self.context)]
        return self.out(torch.tanh(self.hidden(torch.cat(shifted, dim=-1))))


class Bigram(nn.Module):
    """Looks the next token's logits up in a table: the smallest language model there is."""

    def __init__(self, vocab: int):
        super().__init__()
        self.table = nn.Embedding(vocab, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


MODULES = {"TinyLM": TinyLM, "Bigram": Bigram}
