"""Compares an answer with what is right: type, dtype, shape, values, in that order; says in words what differs."""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from autograder.inside.codec import Handle, Opaque, Other

# A right answer may sum in another order or round to its dtype more than once: about 100 units in the last place for
# float32 and float64, 4 for the half precisions.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far values may lie apart; `None` follows the dtype of the answer."""

    rtol: float | None = None
    atol: float | None = None

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        default = TOLERANCE.get(dtype, 0.0)
        return (default if self.rtol is None else self.rtol), (default if self.atol is None else self.atol)


BY_DTYPE = Tolerance()


def difference(got: Any, want: Any, tolerance: Tolerance = BY_DTYPE, what: str = "the result") -> str | None:
    """Says how `got` differs from `want`, or returns None where it does not; never shows a value."""
    if isinstance(want, Tensor):
        return _tensor_difference(got, want, tolerance, what)
    if isinstance(want, bool) or want is None or isinstance(want, (str, bytes)):
        if type(got) is not type(want):
            return f"{what} is {kind(got)}, it should be {kind(want)}"
        return None if got == want else f"{what} has the wrong value"
    if isinstance(want, (int, float)):
        return _number_difference(got, want, tolerance, what)
    if isinstance(want, (list, tuple)):
        return _sequence_difference(got, want, tolerance, what)
    if isinstance(want, dict):
        if not isinstance(got, dict):
            return f"{what} is {kind(got)}, it should be {kind(want)}"
        if set(got) != set(want):
            return f"{what} has the wrong keys"
        parts = (difference(got[k], want[k], tolerance, f"{what}[{k!r}]") for k in want)
        return next((p for p in parts if p), None)
    if isinstance(want, (Handle, Opaque)):
        return None if type(got) is type(want) else f"{what} is {kind(got)}, it should be an object"
    if isinstance(want, Other):
        return None if got == want else f"{what} is {kind(got)}, it should be {kind(want)}"
    raise TypeError(f"no rule compares a {type(want).__name__}")


def kind(value: Any) -> str:
    """Names a value's type as a learner would."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor"
    if isinstance(value, Other):
        return f"{value.type_name}"
    if value is None:
        return "None"
    return {"int": "an int"}.get(type(value).__name__, f"a {type(value).__name__}")


def _tensor_difference(got: Any, want: Tensor, tolerance: Tolerance, what: str) -> str | None:
    if not isinstance(got, Tensor):
        return f"{what} is {kind(got)}, it should be {kind(want)}"
    if got.is_nested or got.is_meta or got.layout is not torch.strided:
        return f"{what} is a tensor of a special make (sparse, nested or without values), it should be an ordinary one"
    if got.dtype != want.dtype:
        return f"{what} has dtype {_name(got.dtype)}, it should have {_name(want.dtype)}"
    if got.device.type != want.device.type:
        return f"{what} lies on {got.device.type}, it should lie on {want.device.type}"
    if got.shape != want.shape:
        return f"{what} has shape {tuple(got.shape)}, it should have {tuple(want.shape)}"
    if not want.dtype.is_floating_point:
        wrong = int((got != want).sum())
        return None if wrong == 0 else f"{what} has {wrong} wrong of {want.numel()} entries"
    rtol, atol = tolerance.of(want.dtype)
    a, b = got.detach().double(), want.detach().double()
    if torch.equal(a, b) or torch.allclose(a, b, rtol, atol):
        return None
    if bool((a.isnan() & ~b.isnan()).any()):
        return f"{what} has NaN where there should be none"
    if bool((a.isinf() & (a != b)).any()):
        return f"{what} has an infinity where there should be none"
    # the tolerance around an expected infinity is infinite: only the infinity itself will do
    near = ((a - b).abs() <= atol + rtol * b.abs()) & b.isfinite()
    close = near | (a == b) | (a.isnan() & b.isnan())
    wrong = int((~close).sum())
    return None if wrong == 0 else f"{what} has {wrong} wrong of {want.numel()} values"


def _number_difference(got: Any, want: float, tolerance: Tolerance, what: str) -> str | None:
    if isinstance(got, Tensor) and got.dim() == 0:
        fits = got.dtype.is_floating_point or (isinstance(want, int) and got.dtype != torch.bool)
        if not fits or (isinstance(want, int) and got.dtype.is_floating_point):
            return f"{what} is {kind(got)}, it should be {kind(want)}"
        dtype, got = got.dtype, got.item()
    else:
        dtype = torch.float64
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        return f"{what} is {kind(got)}, it should be {kind(want)}"
    if isinstance(want, int):
        if not isinstance(got, int):
            return f"{what} is {kind(got)}, it should be an int"
        return None if got == want else f"{what} has the wrong value"
    rtol, atol = tolerance.of(dtype)
    if isinstance(got, int) and got.bit_length() > 1000:  # more than a float can be
        return f"{what} has the wrong value"
    if got != got or want != want:
        return (
            None
            if got != got and want != want
            else f"{what} is NaN"
            if got != got
            else f"{what} should be NaN"
        )
    # the tolerance around an expected infinity is infinite: only the infinity itself will do
    if got == want or (math.isfinite(want) and abs(got - want) <= atol + rtol * abs(want)):
        return None
    return f"{what} has the wrong value"


def _sequence_difference(got: Any, want: Any, tolerance: Tolerance, what: str) -> str | None:
    if not isinstance(got, (list, tuple)):
        return f"{what} is {kind(got)}, it should be {kind(want)} of {len(want)}"
    if len(got) != len(want):
        return f"{what} has {len(got)} items, it should have {len(want)}"
    parts = (
        difference(a, b, tolerance, f"{what}[{i}]") for i, (a, b) in enumerate(zip(got, want, strict=True))
    )
    return next((p for p in parts if p), None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
