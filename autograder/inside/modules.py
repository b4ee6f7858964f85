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


class LatentCache(nn.Module):
    """Keeps latents and rotated keys for a decode step, with the interface of `course_llm.mla.LatentCache`."""

    def __init__(self, batch: int, max_seq: int, d_c: int, d_r: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.max_seq, self.length = max_seq, 0
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype)
        self.k_r = torch.zeros(batch, max_seq, d_r, dtype=dtype)

    def update(self, c: Tensor, k_r: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + c.shape[1]
        if end > self.max_seq:
            raise ValueError(f"LatentCache.update needs length + new <= max_seq={self.max_seq}, got {end}")
        self.c[:, self.length : end], self.k_r[:, self.length : end] = c.detach(), k_r.detach()
        self.length = end
        return self.c[:, :end], self.k_r[:, :end]

    def reset(self) -> None:
        self.length = 0


MODULES = {"TinyLM": TinyLM, "Bigram": Bigram, "LatentCache": LatentCache}
