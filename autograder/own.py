"""Lends a notebook the student's own functions from another notebook, and the course's where she has none that pass.

`own_functions("decoding", ["generate"])` reads her `decoding.ipynb`, runs its cells in this kernel and checks the functions that are
asked for on their public cases. What is not written yet, or fails, is taken from the course; a line for each says which it is.
"""

import contextlib
import io
import types
from collections.abc import Iterable
from pathlib import Path

from autograder import catalog, judge
from autograder.catalog import Chapter, Entry
from autograder.check import check_names, failure_line, run_cells
from autograder.submission import SubmissionError, read_submission

PLACES = (".", "{stem}", "../{stem}", "exercises/{stem}", "../exercises/{stem}")


def own_functions(
    stem: str, names: Iterable[str], notebook: str | Path | None = None
) -> types.SimpleNamespace:
    """Returns functions of a chapter by name, the student's own where they pass their public cases, and says whose they are.

    Args:
        stem: the chapter.
        names: its functions and classes.
        notebook: her .ipynb or .py; by default STEM.ipynb here, in a folder STEM, or in the project's `exercises`.

    Raises:
        ValueError: there is no such chapter, or it has no such function.
    """
    chapter = catalog.chapter(stem)
    entries = {name: _entry(chapter, name) for name in names}
    path = find_notebook(stem) if notebook is None else Path(notebook)
    errors: dict[str, str] = {}
    namespace: dict = {}
    why = f"there is no {stem}.ipynb here"
    if path is not None:
        try:
            submission = read_submission(path, chapter)
            with contextlib.redirect_stdout(io.StringIO()):  # what her other cells print is not of interest
                namespace, cells, errors = run_cells(chapter, submission)
            why = ""
        except SubmissionError as error:
            why = str(error)
    found = {}
    for name, entry in entries.items():
        reason = why or errors.get(entry.name) or errors.get("file")
        if not reason:
            cells.turn(entry.name)
            reason = _fault(chapter, entry, namespace, submission.sources)
        found[name] = (
            getattr(judge.exercises(stem)[entry.name].reference, name) if reason else namespace[name]
        )
        print(f"{name}: " + (f"the course's ({reason})" if reason else f"yours, from {path}"))
    return types.SimpleNamespace(**found)


def find_notebook(stem: str) -> Path | None:
    """Finds a chapter's notebook in the places where a student has it; None if there is none."""
    places = [Path(place.format(stem=stem)) / f"{stem}.ipynb" for place in PLACES]
    return next((place for place in places if place.is_file()), None)


def _entry(chapter: Chapter, name: str) -> Entry:
    for entry in chapter.entries:
        if name in entry.functions:
            return entry
    raise ValueError(f"the chapter {chapter.stem} has no exercise with {name}")


def _fault(chapter: Chapter, entry: Entry, namespace: dict, sources: dict[str, str]) -> str:
    """What keeps an exercise from being used, or nothing."""
    if any(name not in namespace for name in entry.functions):
        return "not written yet"
    result = check_names(chapter, entry.name, namespace, sources).result
    return "" if result.passed else failure_line(result)
