"""A case that fails, in a few lines: the call, its small arguments, what was expected and what came back.

For a student's own check alone, whose cases are public. A graded report has none of this: it would tell hidden values.
"""

import inspect
import re
from typing import Any

import torch
from torch import Tensor

from autograder.compare import difference, kind
from autograder.inside.codec import Handle
from autograder.inside.engine import tensors_in
from autograder.judge import Expected
from autograder.spec import Asked, CaseRun, Exercise, Served

SMALL = 16  # numbers that are written out
CALLS = ("call", "new", "gradient", "measure")
DIGITS = (4, 7, 10, 17)  # as many as it takes to see a difference

Lines = list[tuple[str, str]]


def case_lines(exercise: Exercise, expected: Expected, run: CaseRun) -> Lines:
    """Returns what a learner needs to see a failing case for herself, as pairs of a label and a text."""
    asked = run.asked
    if asked is None or asked.kind not in CALLS:
        return []
    arguments = named_arguments(exercise, asked)
    lines = [("call", call_in_words(asked, arguments))]
    for name, value in arguments:
        if name and isinstance(value, Tensor) and written_out(value):
            lines.append((name, in_full(value, 4)))
    if 0 <= asked.place < min(len(run.transcript), len(expected.transcript)):
        lines += answer_lines(expected, run, asked)
    return lines


def named_arguments(exercise: Exercise, asked: Asked) -> Lines:
    """A step's arguments with their names; the name is empty where it is not known."""
    if isinstance(asked.target, str):
        try:
            signature = inspect.signature(getattr(exercise.reference, asked.target))
            return list(signature.bind(*asked.args, **asked.kwargs).arguments.items())
        except (AttributeError, TypeError, ValueError):
            pass
    return [("", value) for value in asked.args] + list(asked.kwargs.items())


def call_in_words(asked: Asked, arguments: Lines) -> str:
    """The call with the shapes of its tensors: `softmax_with_temperature(logits=float32 (2, 7), temperature=1.6)`."""
    name = asked.target if isinstance(asked.target, str) else f".{asked.target[1]}"
    parts = [f"{label}={in_short(value)}" if label else in_short(value) for label, value in arguments]
    return f"{name}({', '.join(parts)})"


def answer_lines(expected: Expected, run: CaseRun, asked: Asked) -> Lines:
    """What the reference gives at the step that failed, and what the answer gave; nothing where the two agree."""
    outcome, reference = run.transcript[asked.place], expected.transcript[asked.place]
    if expected.case.error is not None:
        return [] if outcome.error else [("yours", in_full(outcome.value, 4))]
    got, want, of = outcome.value, reference.value, ""
    if isinstance(want, dict) and "detached" in want:
        got = got or {}
        found = re.match(r"the gradient of float input (\d+)", run.complaint or "")
        if found:
            i, of = int(found[1]) - 1, " gradient"
            got, want = got["grads"][i], want["grads"][i]
        else:
            got, want = got.get("value"), want["value"]
    label = "one right answer" if expected.case.verdict else "expected"
    if outcome.error:
        return [(label, in_full(want, 4))]
    if expected.case.verdict is None and difference(got, want, expected.case.tolerance) is None:
        return []
    mine, right = in_contrast(got, want)
    return [(f"{label}{of}", right), (f"your{of}" if of else "yours", mine)]


def in_contrast(got: Any, want: Any) -> tuple[str, str]:
    """Two values with as many digits as it takes to tell them apart; of large tensors, the entry where they differ most."""
    alike = isinstance(got, Tensor) and isinstance(want, Tensor) and got.shape == want.shape
    place = worst_place(got, want) if alike and not written_out(want) and not got.is_meta else None
    for digits in DIGITS:
        if place is None:
            texts = in_full(got, digits), in_full(want, digits)
        else:
            texts = tuple(f"{in_short(t)}, {numbers(t[place], digits)} at {list(place)}" for t in (got, want))
        if texts[0] != texts[1]:
            break
    return texts


def worst_place(got: Tensor, want: Tensor) -> tuple[int, ...]:
    """The place at which two tensors of one shape differ most; a NaN differs from every number."""
    a, b = got.double(), want.double()
    same = (a == b) | (a.isnan() & b.isnan())
    apart = (a - b).abs().nan_to_num(torch.inf, torch.inf).masked_fill(same, 0)
    return tuple(int(i) for i in torch.unravel_index(apart.argmax(), a.shape))


def written_out(value: Any) -> bool:
    """Whether a value is small enough for its numbers to be written out."""
    if isinstance(value, Tensor):
        return not value.is_meta and 0 < value.numel() <= SMALL
    if isinstance(value, (list, tuple)):
        plain = all(isinstance(v, (Tensor, list, tuple, int, float, str)) or v is None for v in value)
        return plain and len(value) <= 8 and sum(t.numel() for t in tensors_in(value)) <= SMALL
    return False


def in_full(value: Any, digits: int) -> str:
    """A value with its numbers where they are few, else in short."""
    try:
        if not written_out(value):
            return in_short(value, digits)
        return (
            f"{in_short(value)}: {numbers(value, digits)}"
            if isinstance(value, Tensor)
            else numbers(value, digits)
        )
    except Exception:  # a tensor of another make
        return kind(value)


def in_short(value: Any, digits: int = 6) -> str:
    """A value in a few words: a tensor's dtype and shape, a plain number itself, else the kind of thing it is."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if value is None or type(value) in (bool, int, float, str):
        return numbers(value, digits)
    if isinstance(value, (list, tuple)) and len(value) <= 8:
        inner = ", ".join(in_short(v, digits) for v in value)
        if len(inner) <= 100:
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, (list, tuple, dict)):
        return f"{kind(value)} of {len(value)}"
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Handle):
        return "an object"
    if isinstance(value, Served) or (callable(value) and not isinstance(value, type)):
        return "a function"
    return kind(value)


def numbers(value: Any, digits: int) -> str:
    """Numbers as Python writes them, rounded to some digits."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().tolist()
    if type(value) is float:
        return f"{value:.{digits}g}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(numbers(v, digits) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:99]}…"
