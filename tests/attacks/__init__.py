"""Hostile and cheating submissions, each with the verdict it must get; `tests/test_attacks.py` grades them.

An attack replaces the cell of one exercise (`cell`), probes for something and answers rightly only if it finds it (`probe`), or
damages the whole notebook (`notebook`). The exercises beside it are answered rightly and must keep their points.
"""

import dataclasses
import importlib
import json
import pkgutil
import textwrap
from collections.abc import Callable

from samples.build import answers, fill

STEM = "decoding"
RIGHT = answers(STEM)
ATTACKED = "softmax_with_temperature"
BESIDE = ("repetition_penalty", "distinct_n")  # quick exercises that are answered rightly in every submission
SENDS = '''
import json, os, struct

def send(skeleton, blob=b"", names=None):
    """Writes a frame of the grader's own protocol to the worker's channel."""
    text = json.dumps(skeleton).encode() if names is None else names
    data = struct.pack("<4sIQ", b"cllm", len(text), len(blob)) + text + blob
    while data:
        data = data[os.write(3, data):]
'''


@dataclasses.dataclass(frozen=True)
class Attack:
    """One submission: the changed cells or the damage to the notebook, and the points it must get."""

    name: str
    kind: str
    words: str
    cells: dict[str, str]
    points: float = 0.0
    damage: Callable[[dict], dict | str | bytes] | None = None
    error: str | None = None
    says: str | None = None
    beside: bool = True  # False: it may spoil its own other exercises

    @property
    def exercise(self) -> str:
        return next(iter(self.cells), ATTACKED)

    def written(self, places: dict[str, str]) -> bytes:
        """The notebook as it is handed in; `@NAME@` in it stands for one of the places that it is after."""
        data = honest(self.cells)
        made = self.damage(data) if self.damage else data
        if isinstance(made, dict):
            made = json.dumps(made)
        if isinstance(made, str):
            for name, value in places.items():
                made = made.replace(f"@{name}@", value)
            made = made.encode()
        return made


def honest(cells: dict[str, str] | None = None) -> dict:
    """A notebook with a few right answers, but for the cells that are given."""
    return fill(STEM, {name: RIGHT[name] for name in (ATTACKED, *BESIDE)} | (cells or {}))


ATTACKS: list[Attack] = []


def cell(kind: str, name: str, words: str, source: str, exercise: str = ATTACKED, points: float = 0.0,
         also: dict[str, str] | None = None, says: str | None = None, beside: bool = True) -> None:  # fmt: skip
    """Adds an attack in the cell of an exercise; `points` are what it earns there, `says` is a part of the message."""
    cells = {exercise: textwrap.dedent(source).strip(), **(also or {})}
    ATTACKS.append(Attack(name, kind, words, cells, points, says=says, beside=beside))


def probe(kind: str, name: str, words: str, source: str, beside: bool = True) -> None:
    """Adds an attack that looks for something: code that sets `found`. Only a find earns points, and none may."""
    code = f"""
found = False
try:
{textwrap.indent(textwrap.dedent(source).strip(), "    ")}
except BaseException:
    found = False

{RIGHT[ATTACKED].replace(f"def {ATTACKED}", "def right")}

def {ATTACKED}(logits, temperature):
    if found:
        return right(logits, temperature)
    raise RuntimeError("nothing found")
"""
    ATTACKS.append(Attack(name, kind, words, {ATTACKED: code}, beside=beside))


def notebook(name: str, words: str, points: float | None = None, error: str | None = None) -> Callable:
    """Adds damage to a notebook of right answers: `points` of the attacked exercise, or a part of the error message."""

    def add(damage: Callable[[dict], dict | str | bytes]) -> Callable:
        earned = 0.0 if error else 4.0 if points is None else points
        ATTACKS.append(Attack(name, "notebook", words, {}, earned, damage, error))
        return damage

    return add


def load() -> list[Attack]:
    """All attacks."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return ATTACKS
