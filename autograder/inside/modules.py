"""Small models that the grader builds beside a student's training code; `Engine` finds them by name."""

import contextlib
import os
import weakref
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook


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

    def practise(
        self, optimizer: torch.optim.Optimizer, generator: torch.Generator, steps: int
    ) -> list[float]:
        """Trains on random tokens for some steps and returns the losses: fodder for checkpoints."""
        losses = []
        for _ in range(steps):
            ids = torch.randint(self.out.out_features, (4, 7), generator=generator)
            loss = F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


class ShiftedLM(TinyLM):
    """A `TinyLM` with a buffer, which no optimizer changes: a constant that is added to the logits."""

    def __init__(self, vocab: int, width: int = 16, context: int = 2):
        super().__init__(vocab, width, context)
        self.register_buffer("shift", torch.zeros(1, vocab))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.shift


class WatchedLM(TinyLM):
    """A `TinyLM` that notes its weights and the norm of its gradients at every call, the first 96 times, and that norm once more
    whenever one of torch's optimizers makes a step with them."""

    def __init__(self, vocab: int, width: int = 16, context: int = 2):
        super().__init__(vocab, width, context)
        self.weights_noted: list[Tensor] = []
        self.norms_noted: list[float] = []
        self.norms_stepped: list[float] = []
        WATCHED.add(self)

    def forward(self, ids: Tensor) -> Tensor:
        if len(self.weights_noted) < 96:
            self.weights_noted.append(torch.cat([p.detach().flatten() for p in self.parameters()]))
            self.norms_noted.append(_norm_of_gradients(list(self.parameters())))
        return super().forward(ids)

    def noted(self) -> tuple[list[Tensor], list[float]]:
        """Weights and norms, call by call."""
        return self.weights_noted, self.norms_noted

    def stepped(self) -> list[float]:
        """The norms of the gradients with which optimizers made their steps; none where an answer updates the weights itself."""
        return self.norms_stepped


WATCHED: "weakref.WeakSet[WatchedLM]" = weakref.WeakSet()


def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    for model in list(WATCHED):
        mine = {id(p) for p in model.parameters()}
        stepped = [p for group in optimizer.param_groups for p in group["params"] if id(p) in mine]
        if stepped and len(model.norms_stepped) < 96:
            model.norms_stepped.append(_norm_of_gradients(stepped))


register_optimizer_step_pre_hook(
    _before_step
)  # once: a hook that is taken away while torch calls it is an error


def _norm_of_gradients(parameters: list[nn.Parameter]) -> float:
    grads = [p.grad.detach().flatten() for p in parameters if p.grad is not None]
    return float(torch.cat(grads).norm()) if grads else 0.0


class UnsavableLM(TinyLM):
    """A `TinyLM` whose state cannot be written: pickling it fails half way, as a full disk would."""

    def state_dict(self, *args, **kwargs) -> dict:
        return {**super().state_dict(*args, **kwargs), "unsavable": Unsavable()}

    def __reduce_ex__(self, protocol):
        raise OSError("no space left on device")


class Unsavable:
    def __reduce_ex__(self, protocol):
        raise OSError("no space left on device")

    def _same(self, *args, **kwargs) -> "Unsavable":
        return self

    detach = clone = cpu = contiguous = to = _same


class Disk(nn.Module):
    """Does with files what a case needs done beside the answer."""

    def link(self, path: str, name: str) -> bool:
        """Gives the file of `path` a second name, which keeps its content if `path` is replaced and not if it is rewritten."""
        with contextlib.suppress(OSError):
            os.link(path, name)
            return True
        return False

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def same_content(self, a: str, b: str) -> bool:
        return Path(a).read_bytes() == Path(b).read_bytes()

    def copy(self, path: str, name: str) -> None:
        Path(name).write_bytes(Path(path).read_bytes())


class FilePath(type(Path())):
    """A `pathlib.Path` that the engine can build and keep like a module."""

    def load_state_dict(self, state: dict) -> None:
        pass


class Bigram(nn.Module):
    """Looks the next token's logits up in a table: the smallest language model there is."""

    def __init__(self, vocab: int):
        super().__init__()
        self.table = nn.Embedding(vocab, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class LatentCache(nn.Module):
    """Keeps latents and rotated keys for a decode step, with the interface of `course_llm.mla.LatentCache`.

    Its buffers have other names than there: an answer may use `length` and `update` alone.
    """

    def __init__(self, batch: int, max_seq: int, d_c: int, d_r: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.max_seq, self.length = max_seq, 0
        self._latents = torch.zeros(batch, max_seq, d_c, dtype=dtype)
        self._keys = torch.zeros(batch, max_seq, d_r, dtype=dtype)

    def update(self, c: Tensor, k_r: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + c.shape[1]
        if end > self.max_seq:
            raise ValueError(f"LatentCache.update needs length + new <= max_seq={self.max_seq}, got {end}")
        self._latents[:, self.length : end] = c.detach()
        self._keys[:, self.length : end] = k_r.detach()
        self.length = end
        return self._latents[:, :end], self._keys[:, :end]

    def reset(self) -> None:
        self.length = 0


class GrowingCache(nn.Module):
    """Keeps any rows of every layer for a decoder's step, with the interface of `course_llm.capstone.ModelCache`."""

    def __init__(self, layers: int):
        super().__init__()
        self._rows: list[tuple[Tensor, ...]] = [()] * layers

    @property
    def length(self) -> int:
        return min(rows[0].shape[-2] if rows else 0 for rows in self._rows)

    def update(self, layer: int, *rows: Tensor) -> tuple[Tensor, ...]:
        old = self._rows[layer]
        both = zip(old, rows, strict=True) if old else ((row[..., :0, :], row) for row in rows)
        self._rows[layer] = tuple(torch.cat((a, b.detach()), dim=-2) for a, b in both)
        return self._rows[layer]


MODULES = {"TinyLM": TinyLM, "Bigram": Bigram, "LatentCache": LatentCache, "GrowingCache": GrowingCache, "WatchedLM": WatchedLM,
           "ShiftedLM": ShiftedLM, "UnsavableLM": UnsavableLM, "Disk": Disk, "FilePath": lambda path: FilePath(path)}  # fmt: skip
