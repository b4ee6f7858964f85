"""Makes the notebooks that nbgrader stores: the released one with a student's answers in it, and the grader's outputs.

A submitted notebook is never passed on as it came. Its sources are put into a fresh copy of the released notebook, so that ids, points,
locks and checks are the instructor's, whatever was done to the file.
"""

import copy
import html
import re
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell

from autograder import pieces
from autograder.catalog import Chapter
from autograder.check import html_table, marked_up
from autograder.course import OURS
from autograder.grading import ExerciseReport, SubmissionReport
from autograder.judge import sentence
from autograder.submission import MAX_SOURCE_CHARACTERS, Submission, from_notebook, grade_id, source_of

MAX_EXTRA_CELLS = 500
MAX_EXTRA_CHARACTERS = 2_000_000


def released(chapter: Chapter) -> nbformat.NotebookNode:
    """A fresh copy of the released notebook."""
    return nbformat.from_dict(copy.deepcopy(chapter.notebook))


def rebuilt(data: dict, chapter: Chapter) -> tuple[nbformat.NotebookNode, Submission]:
    """The released notebook with the answers of a parsed submission, and its own further cells where they stood."""
    submission = from_notebook(data, chapter)
    notebook = released(chapter)
    extras = _extra_cells(data, chapter, submission)
    cells = extras.get(None, [])
    for cell in notebook.cells:
        name = cell.metadata["nbgrader"]["grade_id"]
        if name in submission.sources:
            cell.source = submission.sources[name]
        cells += [cell, *extras.get(name, [])]
    notebook.cells = cells
    notebook.metadata[OURS] = {"remarks": submission.remarks}
    return notebook, submission


def unreadable(message: str, chapter: Chapter) -> nbformat.NotebookNode:
    """The released notebook with a note that the submission could not be read."""
    notebook = released(chapter)
    notebook.cells.insert(
        0, new_markdown_cell(f"**This submission could not be read.** {_inert(message)}", id="unreadable")
    )
    notebook.metadata[OURS] = {"error": message, "remarks": []}
    return notebook


def _extra_cells(data: dict, chapter: Chapter, submission: Submission) -> dict[str | None, list]:
    """The student's own cells by the name of the released cell they follow; markdown is shown as plain text."""
    known = {cell["metadata"]["nbgrader"]["grade_id"] for cell in chapter.notebook["cells"]}
    extras: dict[str | None, list] = {}
    place, count, left = None, 0, MAX_EXTRA_CHARACTERS
    for cell in data["cells"]:
        name, source = grade_id(cell), source_of(cell)[:MAX_SOURCE_CHARACTERS]
        if name in known:
            place = name
            continue
        if not source.strip() or source in submission.sources.values():
            continue
        if count == MAX_EXTRA_CELLS or len(source) > left:
            continue
        count, left = count + 1, left - len(source)
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            extras.setdefault(place, []).append(new_code_cell(source, id=f"extra-{count}"))
        else:
            extras.setdefault(place, []).append(new_markdown_cell(_verbatim(source), id=f"extra-{count}"))
    return extras


def _verbatim(text: str) -> str:
    """Text as a fenced block that nothing inside can close: a page of an instructor's runs no student's script."""
    ours = re.fullmatch(r"(`{3,})text\n(.*)\n\1", text, re.S)
    if ours and "`" * len(ours[1]) not in ours[2]:  # nbgrader converts a notebook twice
        return text
    ticks = max([2, *(len(run) for run in re.findall(r"`+", text))]) + 1
    fence = "`" * ticks
    return f"{fence}text\n{text}\n{fence}"


def _inert(text: str) -> str:
    return html.escape(text).replace("[", "&#91;")


def fill_outputs(notebook: nbformat.NotebookNode, reports: dict[str, ExerciseReport]) -> None:
    """Writes each exercise's result into its graded cell, in the form that nbgrader reads points from."""
    for cell in notebook.cells:
        settings = cell.metadata.get("nbgrader", {})
        if not settings.get("grade"):
            continue
        report = reports.get(settings["grade_id"].removeprefix("check_"))
        cell.execution_count = None
        cell.outputs = (
            outputs(report, float(settings["points"]))
            if report
            else [_error("There is no check for this cell.")]
        )


def outputs(report: ExerciseReport, max_points: float) -> list:
    """A table of groups, and then the points (nbgrader takes an error for none, a number for some)."""
    shown = _output(
        "display_data", metadata={}, data={"text/html": _html(report), "text/plain": _text(report)}
    )
    points = max_points if report.passed else min(report.points * max_points / report.max_points, max_points)
    if points <= 0:
        return [shown, _error(report.message or "No points.")] if report.groups else [_error(report.message)]
    return [
        shown,
        _output("execute_result", metadata={}, data={"text/plain": f"{points:g}"}, execution_count=None),
    ]


def _output(kind: str, **fields: Any) -> nbformat.NotebookNode:
    """An output as nbformat makes it, without validating each one (a test validates them all)."""
    return nbformat.from_dict({"output_type": kind, **fields})


def _error(message: str) -> Any:
    return _output("error", ename="CheckFailed", evalue=message, traceback=[f"CheckFailed: {message}"])


def _html(report: ExerciseReport) -> str:
    rows = [
        (
            "✓" if g["passed"] else "✗",
            g["says"],
            sentence(g["complaint"]) if g["complaint"] else "",
            f"{g['points']:g} / {g['max_points']:g}",
        )
        for g in report.groups
    ]
    words = (report.message, pieces.sentence(report.borrowed))
    told = "".join(f"<p>{marked_up(text)}</p>" for text in words if text)
    see = f"<p>In the book: {html.escape(report.see)}</p>" if report.see and not report.passed else ""
    return html_table(("", "what", "what is wrong", "points"), rows) + told + see


def _text(report: ExerciseReport) -> str:
    lines = [
        f"{'pass' if g['passed'] else 'FAIL'}  {g['says']} {g['complaint']}".rstrip() for g in report.groups
    ]
    return "\n".join([*lines, report.message, pieces.sentence(report.borrowed)]).strip()


def store_report(notebook: nbformat.NotebookNode, report: SubmissionReport, fingerprint: str) -> None:
    """Keeps the report in the notebook's metadata, so that a rerun need not grade again."""
    notebook.metadata[OURS] = {
        **notebook.metadata.get(OURS, {}),
        "fingerprint": fingerprint,
        "report": report.to_json(),
    }
