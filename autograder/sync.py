"""Generates each chapter's student notebook and catalog from its solution file: `python -m autograder.sync [STEM…]`.

Without a stem it also makes the notebooks that are not graded from their percent files in `notebooks/`.

nbgrader's own converter makes the student version (clears the answers, locks the cells, writes the checksums). This module only turns
a percent notebook into nbgrader's instructor version and writes the reference's signatures and docstrings into it.
"""

import ast
import dataclasses
import importlib
import inspect
import io
import json
import re
import sys
import tempfile
import textwrap
import tokenize
from pathlib import Path

import jupytext
import nbformat
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from autograder import put_scripts_on_path

ROOT = Path(__file__).resolve().parent.parent
SETUP = """\
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
"""
COLAB = """\
import importlib.util
import sys

if "google.colab" in sys.modules and importlib.util.find_spec("autograder") is None:
    import subprocess

    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "git+{url}"], check=True)
"""
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CHECK_IMPORT = "from autograder.check import check\n"


class SolutionError(ValueError):
    """A solution file does not hold together."""


@dataclasses.dataclass
class Part:
    """One exercise of a solution file."""

    name: str
    points: int = 0
    minutes: int = 0
    task: str = ""
    code: str = ""
    hints: tuple[str, ...] = ()


@dataclasses.dataclass
class Solution:
    """A solution file, taken apart."""

    stem: str
    intro: list[str]
    given: str
    parts: list[Part]
    lends_pieces: bool = False

    @property
    def title(self) -> str:
        return self.intro[0].splitlines()[0].lstrip("# ").strip()


def solution_stems() -> list[str]:
    """The chapters that have a solution file."""
    return sorted(path.stem for path in (ROOT / "solutions").glob("*.py"))


def read_solution(stem: str) -> Solution:
    """Takes a solution file apart.

    Raises:
        SolutionError: an exercise lacks its task, points or code.
    """
    notebook = jupytext.read(ROOT / "solutions" / f"{stem}.py", fmt="py:percent")
    solution = Solution(stem, [], "", [])
    parts: dict[str, Part] = {}
    for cell in notebook.cells:
        meta = cell.metadata
        if "hints" in meta:
            parts[meta["hints"]].hints = _list_items(cell.source)
        elif "exercise" in meta:
            part = parts.setdefault(meta["exercise"], Part(meta["exercise"]))
            if cell.cell_type == "markdown":
                part.task, part.points, part.minutes = cell.source, int(meta["points"]), int(meta["minutes"])
            else:
                part.code = cell.source
        elif cell.cell_type == "markdown":
            solution.intro.append(cell.source)
        elif meta.get("title") in ("given", "pieces"):
            solution.given, solution.lends_pieces = cell.source, meta["title"] == "pieces"
        else:
            raise SolutionError(
                f"solutions/{stem}.py: a code cell belongs to no exercise: {cell.source[:60]!r}"
            )
    solution.parts = list(parts.values())
    for part in solution.parts:
        if not (part.task and part.code and part.points > 0 and part.minutes > 0 and part.hints):
            raise SolutionError(
                f"solutions/{stem}.py: {part.name} needs a task with points and minutes, code and hints"
            )
    return solution


def _list_items(markdown: str) -> tuple[str, ...]:
    items = re.split(r"^\s*(?:\d+\.|[-*])\s+", markdown, flags=re.M)
    return tuple(" ".join(item.split()) for item in items[1:])


def header(source: str, node: ast.FunctionDef) -> tuple[int, int]:
    """Lines (first, behind the last) of a function's `def` statement, without its body."""
    lines = source.splitlines(keepends=True)
    start = node.lineno - 1
    for token in tokenize.generate_tokens(io.StringIO("".join(lines[start:])).readline):
        if token.type == tokenize.NEWLINE:
            return start, start + token.end[0]
    raise AssertionError("a function has a header")


def _documented_header(source: str, node: ast.FunctionDef) -> str:
    """A reference function's `def` statement and docstring, dedented."""
    first, last = header(source, node)
    if ast.get_docstring(node) is not None:
        last = node.body[0].end_lineno
    return textwrap.dedent("\n".join(source.splitlines()[first:last]))


def with_reference_signatures(code: str, stem: str) -> str:
    """Writes the reference's signatures and docstrings into an answer's code."""
    source = inspect.getsource(importlib.import_module(f"course_llm.{stem}"))
    reference = {n.name: n for n in ast.parse(source).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    edits: list[tuple[int, int, str]] = []
    for node in ast.parse(code).body:
        twin = reference.get(getattr(node, "name", ""))
        if isinstance(node, ast.FunctionDef) and isinstance(twin, ast.FunctionDef):
            edits.append((*header(code, node), _documented_header(source, twin)))
        elif isinstance(node, ast.ClassDef) and isinstance(twin, ast.ClassDef):
            if doc := ast.get_docstring(twin, clean=True):
                line = f'"""{doc}"""' if "\n" not in doc else f'"""{doc}\n"""'
                edits.append((node.lineno, node.lineno, textwrap.indent(line, "    ") + "\n\n"))
            methods = {n.name: n for n in twin.body if isinstance(n, ast.FunctionDef)}
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name in methods:
                    text = textwrap.indent(_documented_header(source, methods[method.name]), "    ")
                    edits.append((*header(code, method), text))
    lines = code.splitlines()
    for first, last, text in sorted(edits, reverse=True):
        lines[first:last] = text.splitlines()
    return "\n".join(lines)


def site_config() -> dict:
    """The book's configuration, _config.yml; empty where the package is installed without the book."""
    config = yaml.safe_load((ROOT / "_config.yml").read_text()) if (ROOT / "_config.yml").exists() else {}
    return config or {}


def repository_url() -> str:
    """The address of the project's repository, empty while it has none (`repository.url` in _config.yml)."""
    return (site_config().get("repository") or {}).get("url") or ""


def instructor_notebook(solution: Solution) -> nbformat.NotebookNode:
    """nbgrader's instructor version: tasks, answers, graded cells."""
    url = repository_url()
    setup = SETUP + ("\n" + COLAB.format(url=url) if url else "") + "\n" + CHECK_IMPORT
    cells = [_markdown(f"intro_{i}", text) for i, text in enumerate(solution.intro)]
    cells.append(_code("setup", setup, locked=True))
    if solution.given:
        cells.append(_code("given", solution.given, locked=True))
    for part in solution.parts:
        cells.append(
            _markdown(f"task_{part.name}", f"{part.task}\n\n*{part.points} points, {part.minutes} minutes.*")
        )
        cells.append(_code(part.name, with_reference_signatures(part.code, solution.stem), solution=True))
        cells.append(_code(f"check_{part.name}", f'check("{part.name}")', locked=True, points=part.points))
    return new_notebook(cells=cells, metadata=METADATA)


def _nbgrader(grade_id: str, **settings) -> dict:
    base = {
        "grade_id": grade_id,
        "grade": False,
        "locked": False,
        "solution": False,
        "task": False,
        "schema_version": 3,
    }
    return {"nbgrader": {**base, **settings}}


def _markdown(grade_id: str, source: str) -> nbformat.NotebookNode:
    return new_markdown_cell(source, id=_cell_id(grade_id), metadata=_nbgrader(grade_id, locked=True))


def _code(
    grade_id: str, source: str, locked: bool = False, solution: bool = False, points: int = 0
) -> nbformat.NotebookNode:
    settings: dict = {"locked": locked, "solution": solution}
    if points:
        settings |= {"grade": True, "points": points}
    return new_code_cell(source.rstrip("\n"), id=_cell_id(grade_id), metadata=_nbgrader(grade_id, **settings))


def _cell_id(grade_id: str) -> str:
    return grade_id.replace("_", "-")[:64]


def student_notebook(solution: Solution) -> nbformat.NotebookNode:
    """nbgrader's release version of a solution file, made by nbgrader."""
    from nbgrader.apps import NbGraderAPI
    from traitlets.config import Config

    put_scripts_on_path()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source", solution.stem)
        source.mkdir(parents=True)
        nbformat.write(instructor_notebook(solution), source / f"{solution.stem}.ipynb")
        config = Config()
        config.CourseDirectory.root = folder
        config.ClearSolutions.code_stub = {"python": "# your answer here\nraise NotImplementedError"}
        result = NbGraderAPI(config=config).generate_assignment(solution.stem, force=True, create=True)
        if not result["success"]:
            raise SolutionError(
                f"nbgrader could not release {solution.stem}: {result.get('error') or result.get('log')}"
            )
        return nbformat.read(Path(folder, "release", solution.stem, f"{solution.stem}.ipynb"), as_version=4)


def defined_names(code: str) -> list[str]:
    """Functions and classes that a cell defines at its top level."""
    return [n.name for n in ast.parse(code).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]


def given_modules(code: str) -> list[str]:
    """Modules of course_llm that a given cell imports, and those that they import."""
    found: list[str] = []
    queue = [code]
    while queue:
        for name in re.findall(r"^\s*from course_llm\.(\w+) import", queue.pop(), flags=re.M):
            if name not in found:
                found.append(name)
                queue.append((ROOT / "src" / "course_llm" / f"{name}.py").read_text())
    return sorted(found)


def lent_pieces(code: str) -> dict[str, str]:
    """Names that a pieces cell imports from the chapters, each with its chapter."""
    chapters = solution_stems()
    imports = [node for node in ast.parse(code).body if isinstance(node, ast.ImportFrom)]
    found = {(node.module or "").removeprefix("course_llm."): node.names for node in imports}
    return {alias.name: stem for stem, names in found.items() if stem in chapters for alias in names}


def catalog(solution: Solution, notebook: nbformat.NotebookNode) -> dict:
    """What the grader must know of the notebook."""
    starters = {cell.metadata["nbgrader"]["grade_id"]: cell.source for cell in notebook.cells}
    modules = given_modules(solution.given)
    if solution.stem in modules:
        raise SolutionError(
            f"solutions/{solution.stem}.py: the given cell may not import the chapter's own module"
        )
    reference = importlib.import_module(f"course_llm.{solution.stem}")
    entries = [
        {
            "name": part.name,
            "functions": [name for name in defined_names(part.code) if hasattr(reference, name)],
            "title": part.task.splitlines()[0].lstrip("# ").strip(),
            "points": part.points,
            "minutes": part.minutes,
            "hints": list(part.hints),
            "starter": starters[part.name],
        }
        for part in solution.parts
    ]
    pieces = {"pieces": lent_pieces(solution.given)} if solution.lends_pieces else {}
    return {"stem": solution.stem, "title": solution.title, "setup": SETUP, "given": solution.given,
            "given_modules": modules, **pieces, "entries": entries, "notebook": notebook}  # fmt: skip


def generated(stem: str) -> dict[Path, str]:
    """The files that a chapter's solution file generates, by path, as text."""
    solution = read_solution(stem)
    notebook = student_notebook(solution)
    return {
        ROOT / "exercises" / stem / f"{stem}.ipynb": nbformat.writes(notebook) + "\n",
        ROOT / "autograder" / "catalog" / f"{stem}.json": json.dumps(catalog(solution, notebook), indent=1)
        + "\n",
    }


def ungraded_notebooks() -> dict[Path, str]:
    """The notebooks that the percent files in `notebooks/` generate, by path, as text."""
    url = repository_url()
    found = {}
    for path in sorted((ROOT / "notebooks").glob("*.py")):
        notebook = new_notebook(metadata=METADATA)
        for number, cell in enumerate(jupytext.read(path, fmt="py:percent").cells):
            make = new_code_cell if cell.cell_type == "code" else new_markdown_cell
            notebook.cells.append(make(cell.source, id=f"cell-{number}"))
        if url:
            notebook.cells.insert(1, new_code_cell(COLAB.format(url=url).rstrip("\n"), id="setup"))
        found[path.with_suffix(".ipynb")] = nbformat.writes(notebook) + "\n"
    return found


def _write(files: dict[Path, str]) -> None:
    for path, text in files.items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")


def main(argv: list[str] | None = None) -> int:
    """Writes what is generated; prints a line per file that changed."""
    given = sys.argv[1:] if argv is None else argv
    for stem in given or solution_stems():
        if stem not in solution_stems():
            print(f"sync: there is no solutions/{stem}.py", file=sys.stderr)
            return 2
        try:
            _write(generated(stem))
        except (SolutionError, SyntaxError, KeyError) as error:
            print(f"sync: {error}", file=sys.stderr)
            return 1
    if not given:
        _write(ungraded_notebooks())
    return 0


if __name__ == "__main__":
    sys.exit(main())
