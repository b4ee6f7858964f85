"""Top-p over a whole vocabulary without sorting its ids: the fast twin of `course_llm.decoding.top_p_filter`.

Which tokens the nucleus holds follows from the sorted probabilities alone: those above the last one that is kept, and
as many of those equal to it as are missing. Numbers by themselves are sorted several times faster than numbers with
their places.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from course_llm.decoding import _renormalise, _widen


def _descending(values: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
    """Sorts each row; NumPy's sort for CPUs uses vector instructions, PyTorch's moves the places along."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return values.sort(dim=-1, descending=True).values


def top_p_by_values(probs: Float[Tensor, "*batch vocab"], p: float) -> Float[Tensor, "*batch vocab"]:
    """Returns what `course_llm.decoding.top_p_filter` returns, ties to the lower id included.

    Args:
        probs: each row sums to 1.
        p: the mass to reach, above 0 and at most 1.

    Raises:
        ValueError: p is not in (0, 1].
    """
    if not 0 < p <= 1:
        raise ValueError(f"top_p_by_values needs 0 < p <= 1, got p={p}")
    if p == 1:
        return _renormalise(probs, torch.ones_like(probs, dtype=torch.bool))
    wide = _widen(probs.detach())
    ranked = _descending(wide)
    mass = ranked.cumsum(dim=-1)
    # a token belongs to the nucleus while the mass of the tokens before it has not reached p
    kept = 1 + (mass[..., :-1] < p).sum(dim=-1, keepdim=True)
    last = ranked.gather(-1, kept - 1)
    keep = wide >= last
    if bool((keep.sum(dim=-1, keepdim=True) > kept).any()):  # more tokens than places at the border
        above, tied = wide > last, wide == last
        keep = above | (tied & (tied.cumsum(dim=-1) <= kept - above.sum(dim=-1, keepdim=True)))
    return _renormalise(probs, keep)
