"""What the grader must know of a chapter's notebook: points, hints, cells. The JSON files are made by `autograder.sync`."""

import dataclasses
import functools
import json
from importlib import resources
from typing import Any


class UnknownChapter(ValueError):
    """No chapter goes by this name."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One exercise as its notebook shows it."""

    name: str
    functions: tuple[str, ...]
    title: str
    points: int
    minutes: int
    hints: tuple[str, ...]
    starter: str

    @property
    def check_id(self) -> str:
        """The nbgrader id of the graded cell; the answer's cell has the exercise's name."""
        return f"check_{self.name}"


@dataclasses.dataclass(frozen=True)
class Chapter:
    """One chapter's notebook."""

    stem: str
    title: str
    setup: str
    given: str
    given_modules: tuple[str, ...]
    notebook: dict[str, Any]
    entries: tuple[Entry, ...]
    pieces: dict[str, str] = dataclasses.field(default_factory=dict)
    """Names of other chapters that the notebook lends until the student brings her own, each with its chapter."""

    @property
    def points(self) -> int:
        return sum(entry.points for entry in self.entries)

    def entry(self, name: str) -> Entry:
        return next(entry for entry in self.entries if entry.name == name)


def stems() -> list[str]:
    """The chapters that have exercises, by name."""
    names = (item.name for item in resources.files(__package__).iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


@functools.cache
def chapter(stem: str) -> Chapter:
    """Reads a chapter's catalog.

    Raises:
        UnknownChapter: there is none.
    """
    if stem not in stems():
        raise UnknownChapter(f"there is no chapter {stem!r}; the chapters are {', '.join(stems())}")
    data: dict[str, Any] = json.loads(resources.files(__package__).joinpath(f"{stem}.json").read_text())
    entries = tuple(
        Entry(**{**e, "functions": tuple(e["functions"]), "hints": tuple(e["hints"])})
        for e in data.pop("entries")
    )
    return Chapter(**{**data, "given_modules": tuple(data["given_modules"])}, entries=entries)


def entry(name: str) -> tuple[Chapter, Entry]:
    """Finds an exercise in any chapter.

    Raises:
        UnknownChapter: no chapter has it.
    """
    for stem in stems():
        for found in chapter(stem).entries:
            if name in (found.name, *found.functions):
                return chapter(stem), found
    raise UnknownChapter(f"there is no exercise {name!r}")
