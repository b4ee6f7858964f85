"""Reads what a student handed in: the source of each exercise's cell, and remarks on what is odd about the file.

Nothing is executed and nothing but text is taken over. Every oddity ends in a remark or an error in one line, never in a
traceback: a broken submission costs its own points and nobody else's.
"""

import ast
import dataclasses
import fnmatch
import json
import os
import re
import stat
import warnings
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from autograder.catalog import Chapter
from autograder.guard import bounded_memory

MAX_BYTES = 100 << 20
MAX_FURTHER_FILES = 2_000
MAX_FURTHER_BYTES = 500 << 20
MAX_DEPTH = 12
MAX_CELLS = 20_000
MAX_SOURCE_CHARACTERS = 200_000
MAX_FILE_CHARACTERS = 2_000_000
MAX_LOOKED_INTO_CHARACTERS = 400_000  # Python's parser takes seconds for `import a.a.a`, long enough


class SubmissionError(ValueError):
    """A file that cannot be graded; the message says why and what to do."""


@dataclasses.dataclass
class Submission:
    """The sources to run, by cell name, in the order of the notebook, and remarks."""

    sources: dict[str, str]
    remarks: list[str] = dataclasses.field(default_factory=list)


def read_submission(path: Path, chapter: Chapter) -> Submission:
    """Reads a notebook or a Python file.

    Raises:
        SubmissionError: the file is missing, too large, or not what its name says.
    """
    text = read_text(path)
    if path.suffix == ".py" and len(text) > MAX_FILE_CHARACTERS:
        raise SubmissionError(
            f"{path.name} has over {MAX_FILE_CHARACTERS} characters; hand in the answers alone"
        )
    if path.suffix == ".py":
        return Submission({"file": text})
    if path.suffix != ".ipynb":
        raise SubmissionError(f"{path.name} is neither a notebook (.ipynb) nor a Python file (.py)")
    return from_notebook(parse_notebook(text, path.name), chapter)


def read_text(path: Path) -> str:
    """Reads a regular file as UTF-8 text.

    Raises:
        SubmissionError: it is missing, not a regular file, too large, or not text.
    """
    try:
        if path.is_symlink() or in_linked_folder(path):
            raise SubmissionError(f"{path.name} is a link to another file; hand in the file itself")
        if path.is_dir():
            raise SubmissionError(f"{path.name} is a folder, not a file")
        if not path.is_file():
            raise SubmissionError(f"there is no file {path}")
        if path.stat().st_size > MAX_BYTES:
            raise SubmissionError(
                f"{path.name} is larger than {MAX_BYTES >> 20} MB; clear its outputs and save it again"
            )
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SubmissionError(f"{path.name} is not UTF-8 text; save it again from Jupyter") from None
    except OSError as error:
        raise SubmissionError(f"{path.name} cannot be read: {error.strerror}") from None


def is_plain(path: str | Path, folders: bool = False) -> bool:
    """Whether a path is a regular file (or a folder) itself, not a link or a device, and not of an absurd size."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return (stat.S_ISREG(found.st_mode) and found.st_size <= MAX_BYTES) or (
        folders and stat.S_ISDIR(found.st_mode)
    )


def further_files(folder: Path, ignored: Iterable[str] = ()) -> list[Path]:
    """Plain files in an assignment's folder and below, as many, as large and as deep as a person hands in; those on top come first.

    Left out are links, devices, names that match a pattern of `ignored`, and what would stand where the grader writes.
    """
    patterns, taken = tuple(ignored), (f"{folder.name}.html", f".{folder.name}.ipynb.tmp")
    found: list[Path] = []
    left, queue = MAX_FURTHER_BYTES, [(folder, 1)]
    for here, depth in queue:  # grows on the way
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            if (here is folder and entry.name in taken) or any(
                fnmatch.fnmatchcase(entry.name, p) for p in patterns
            ):
                continue
            if entry.is_dir(follow_symlinks=False):
                if depth < MAX_DEPTH and len(queue) < MAX_FURTHER_FILES:
                    queue.append((here / entry.name, depth + 1))
            elif is_plain(entry.path) and os.access(entry.path, os.R_OK):
                size = entry.stat(follow_symlinks=False).st_size
                if len(found) == MAX_FURTHER_FILES:
                    return found
                if size <= left:
                    found.append(here / entry.name)
                    left -= size
    return found


def in_linked_folder(path: Path) -> bool:
    """Whether a submission in nbgrader's layout, `<student>/<assignment>/<notebook>`, is another's by a link."""
    folder = path.parent
    return folder.name == path.stem and (folder.is_symlink() or folder.parent.is_symlink())


def parse_notebook(text: str, name: str) -> dict:
    """Parses a notebook's JSON, of any nbformat version that has cells.

    Raises:
        SubmissionError: it is no notebook.
    """
    try:
        with bounded_memory():
            data = json.loads(text)
    except MemoryError:
        raise SubmissionError(f"{name} has too many parts; clear its outputs and save it again") from None
    except (ValueError, RecursionError):
        raise SubmissionError(
            f"{name} is not a notebook: its JSON is broken; save it again from Jupyter"
        ) from None
    if isinstance(data, dict) and isinstance(data.get("worksheets"), list):  # nbformat 3
        sheets = [s for s in data["worksheets"] if isinstance(s, dict)]
        data["cells"] = [c for s in sheets if isinstance(s.get("cells"), list) for c in s["cells"]]
        for cell in data["cells"]:
            if isinstance(cell, dict) and "input" in cell:
                cell["source"] = cell["input"]
    if not isinstance(data, dict) or not isinstance(data.get("cells"), list):
        raise SubmissionError(f"{name} is not a notebook: it has no cells")
    if len(data["cells"]) > MAX_CELLS:
        raise SubmissionError(
            f"{name} has over {MAX_CELLS:,} cells; hand in the released notebook with your answers"
        )
    return data


def source_of(cell: Any) -> str:
    """A cell's text, whatever its form."""
    source = cell.get("source", "") if isinstance(cell, dict) else ""
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    # half of a surrogate pair is no text: it could not be written to a file again
    return source.encode("utf-8", "replace").decode() if isinstance(source, str) else ""


def grade_id(cell: Any) -> str | None:
    """The nbgrader id of a cell, or None."""
    for key in ("metadata", "nbgrader"):
        cell = cell.get(key) if isinstance(cell, dict) else None
    found = cell.get("grade_id") if isinstance(cell, dict) else None
    return found if isinstance(found, str) else None


def from_notebook(data: dict, chapter: Chapter) -> Submission:
    """Finds each exercise's cell by its id; a lost id is made up for by the name that the cell defines."""
    submission = Submission({})
    cells = [(grade_id(cell), source_of(cell), cell) for cell in data["cells"]]
    names = {function for entry in chapter.entries for function in entry.functions}
    defined = definitions([source for _, source, _ in cells], names)
    for entry in chapter.entries:
        found = [(source, cell) for name, source, cell in cells if name == entry.name]
        written = [pair for pair in found if pair[0].strip() != entry.starter.strip()]
        if not written:
            elsewhere = zip(cells, defined, strict=True)
            renamed = [
                (s, c)
                for (name, s, c), known in elsewhere
                if name != entry.name and known & set(entry.functions)
            ]
            if renamed and not (found and name_is_taken(renamed, chapter)):
                submission.remarks.append(
                    f"{entry.name}: its cell is not where it was; the cell that defines it is graded"
                )
                written = renamed
        elif len(written) > 1:
            submission.remarks.append(
                f"{entry.name}: there are {len(written)} cells with its id; the last one is graded"
            )
        if not written and not found:
            submission.remarks.append(f"{entry.name}: its cell is missing")
        if not written:
            continue
        source, cell = written[-1]
        if isinstance(cell, dict) and cell.get("cell_type") != "code":
            submission.remarks.append(
                f"{entry.name}: its cell is no longer a code cell; its text is graded all the same"
            )
        if len(source) > MAX_SOURCE_CHARACTERS:
            submission.remarks.append(
                f"{entry.name}: its cell has over {MAX_SOURCE_CHARACTERS} characters and is not run"
            )
            continue
        submission.sources[entry.name] = source
    return submission


def name_is_taken(pairs: list, chapter: Chapter) -> bool:
    """Whether a cell that defines an exercise's name carries the id of another exercise (an answer may define helpers)."""
    ids = {entry.name for entry in chapter.entries}
    return all(grade_id(cell) in ids for _, cell in pairs)


def definitions(sources: list[str], names: set[str]) -> list[set[str]]:
    """Which of the names each cell defines at its top level; code of unusual length is not looked into."""
    mentioned = re.compile(rf"^(def|class)\s+({'|'.join(map(re.escape, names))})\b", re.M)
    found, left = [], MAX_LOOKED_INTO_CHARACTERS
    for source in sources:
        known: set[str] = set()
        if len(source) <= min(left, MAX_SOURCE_CHARACTERS) and mentioned.search(source):
            left -= len(source)
            known = names & top_level_names(source)
        found.append(known)
    return found


def top_level_names(source: str) -> set[str]:
    """The functions and classes that code defines at its top level."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a doubtful escape in an answer is no news for whoever grades
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    return {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}


def class_folder(path: Path, stem: str) -> dict[str, Path]:
    """The submissions of a folder in nbgrader's layout, `<student>/<assignment>/<notebook>`, by student.

    Raises:
        SubmissionError: the folder holds none.
    """
    found = {}
    for student in sorted(os.listdir(path)):
        assignment = path / student / stem
        try:
            there = (path / student).is_dir() and (assignment.is_dir() or assignment.is_symlink())
        except OSError:  # a folder that may not be read has a row, too
            there = True
        if there and not student.startswith("."):
            found[printable(student, found)] = assignment / f"{stem}.ipynb"
    if not found:
        raise SubmissionError(f"{path} holds no submissions in the layout <student>/{stem}/{stem}.ipynb")
    return found


def printable(name: str, taken: Container[str] = ()) -> str:
    """A folder's name as a student's id that can be printed and stored: what is no text in it becomes a question mark."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    text = "".join(c if c.isprintable() and c != "\ufffd" else "?" for c in text)
    while text in taken:
        text += "~"
    return text
