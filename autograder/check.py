"""`check("top_p_filter")` under an exercise: a table of cases, what is probably wrong, the next hint.

Runs in the student's own kernel, on the public cases. Nothing here gives points: grading happens elsewhere, on other cases.
"""

import contextlib
import dataclasses
import html
import inspect
import linecache
import re
import sys
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

from rich.console import Console
from rich.table import Table

from autograder import catalog, judge, pieces
from autograder.catalog import Chapter, Entry
from autograder.inside.engine import describe_error
from autograder.inside.worker import Cells
from autograder.judge import PUBLIC_SEED, Expected, GroupResult, Result, run_exercise, sentence
from autograder.reproduce import Lines, case_lines
from autograder.screen import needed, not_countable
from autograder.spec import CaseRun, Exercise, Local, error_complaint
from autograder.submission import Submission

FIRST_CASE = "The first case that fails"

_hinted: dict[str, int] = {}  # how many hints of an exercise have been shown, or passed over


class CheckFailed(AssertionError):
    """An exercise does not pass its public cases; shown as one line, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class Report:
    """An exercise's result, as a table in a notebook (HTML), in a terminal (text), and as data."""

    def __init__(
        self,
        result: Result,
        hint: str | None,
        borrowed: list[str] | None = None,
        case: Lines | None = None,
    ):
        self.result = result
        self.hint = hint
        self.borrowed = borrowed or []
        self.case = case or []

    def rows(self) -> list[tuple[bool, str, str]]:
        """One row per group: passed, what it checks, what is wrong."""
        rows = []
        for found in self.result.groups:
            complaint = ""
            if first := found.first_complaint:
                index, words = first
                says = public_case(self.result, found, index).case.words
                complaint = sentence(f"{says}: {words}" if says else words)
            rows.append((found.passed, found.group.says, complaint))
        return rows

    def advice(self) -> list[str]:
        """What to read below the table: the diagnosis, where the book explains it, the next hint."""
        result = self.result
        lines = []
        if not result.attempted:
            lines.append("Not written yet: replace `raise NotImplementedError` with your answer.")
        if result.diagnosis:
            lines.append(f"{result.diagnosis.says} ({book_address(result.exercise, result.diagnosis.see)})")
        if not result.passed and self.hint:
            lines.append(f"Hint: {self.hint}")
        if self.borrowed:
            lines.append(pieces.sentence(self.borrowed))
        return lines

    def _repr_html_(self) -> str:
        mark = {True: "✓ passed", False: "✗ failed"}
        rows = [(mark[ok], says, complaint) for ok, says, complaint in self.rows()]
        table = html_table(("result", "what", "what is wrong"), rows)
        return table + html_case(self.case) + "".join(f"<p>{marked_up(line)}</p>" for line in self.advice())

    def __repr__(self) -> str:
        table = Table("", "what", "what is wrong", title=self.result.exercise.name, title_justify="left")
        for ok, says, complaint in self.rows():
            table.add_row("✓" if ok else "✗", says, complaint)
        console = Console(width=110, color_system=None, markup=False, emoji=False, force_jupyter=False)
        with console.capture() as captured:
            console.print(table)
            if self.case:
                console.print(f"{FIRST_CASE}:")
                lines = Table(box=None, show_header=False)
                for label, text in self.case:
                    lines.add_row(label, text)
                console.print(lines)
            for line in self.advice():
                console.print(line)
        return captured.get().rstrip()


def public_case(result: Result, found: GroupResult, index: int) -> Expected:
    """A case of a group that was checked, which is a public one."""
    plan = judge.prepared(result.exercise, PUBLIC_SEED, True)
    return next(cases for group, cases in plan if group is found.group)[index]


def html_case(case: Lines) -> str:
    """The first case that fails, as a table whose rows have names."""
    style = "text-align:left;vertical-align:top;padding:3px 12px 3px 6px"
    rows = [
        f"<tr><th scope='row' style='{style};white-space:nowrap'>{html.escape(label)}</th>"
        f"<td style='{style}'><code>{html.escape(text)}</code></td></tr>"
        for label, text in case
    ]
    caption = f"<caption style='text-align:left'>{FIRST_CASE}</caption>"
    return f"<table>{caption}{''.join(rows)}</table>" if rows else ""


def html_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of texts that leaves colours to the page it stands on; short cells do not wrap."""
    style = "text-align:left;vertical-align:top;padding:3px 12px 3px 6px"

    def cell(tag: str, text: str) -> str:
        wrap = ";white-space:nowrap" if len(text) < 16 else ""
        return f"<{tag} style='{style}{wrap}'>{marked_up(text)}</{tag.split()[0]}>"

    lines = ["".join(cell("th scope='col'", text) for text in head)]
    lines += ["".join(cell("td", text) for text in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def marked_up(text: str) -> str:
    """Text with `code` and *emphasis* as HTML."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
    return re.sub(r"(?<![\w*])\*(\w[^*<]*)\*(?![\w*])", r"<em>\1</em>", text)


def book_address(exercise: Exercise, label: str) -> str:
    """Where the book explains something."""
    return f"book: {exercise.stem}.html#{label}"


def check_names(
    chapter: Chapter, name: str, namespace: dict[str, Any], sources: dict[str, str] | None = None
) -> Report:
    """Runs an exercise's public cases on a namespace and returns the report; without `sources`, the cells that have
    defined it are looked up in the kernel."""
    exercise = judge.exercises(chapter.stem)[name]
    files = answer_files(namespace, exercise.functions)

    def why_not() -> str | None:
        cells = living_cells(namespace) if sources is None else sources
        return not_countable(needed(cells, exercise.functions), exercise.functions)

    with contextlib.redirect_stderr(sys.stdout):  # nbgrader takes anything on stderr for a failure
        result = run_exercise(exercise, Local(namespace, why_not, files), PUBLIC_SEED, public=True)
    where = "the file" if files == ("<answer file>",) else "your cell"
    for found in result.groups:
        found.runs = [with_the_errors_words(run, where) for run in found.runs]
    borrowed = pieces.borrowed_here(chapter, namespace, exercise.functions)
    return Report(result, None, borrowed, first_case(result))


def first_case(result: Result) -> Lines:
    """The first case that fails, to be seen and tried; nothing where all pass or nothing is written."""
    for found in result.groups if result.attempted else ():
        if first := found.first_complaint:
            index, _ = first
            with contextlib.suppress(Exception):  # a result of a strange make, when it is looked at
                return case_lines(result.exercise, public_case(result, found, index), found.runs[index])
            return []
    return []


def with_the_errors_words(run: CaseRun, where: str) -> CaseRun:
    """Adds to a complaint about an error what it says itself: these cases are public, and the kernel is the student's."""
    error = run.transcript[-1].error if run.complaint and run.transcript else None
    if error is None:
        return run
    plain = error_complaint(run.transcript[-1])
    said = " ".join(error.message.split())
    said = f"{said[:199]}…" if len(said) > 200 else said
    told = plain.removesuffix("the answer") + where if error.line else plain
    return dataclasses.replace(
        run, complaint=run.complaint.replace(plain, f"{told} ({said})" if said else told)
    )


def answer_files(namespace: dict[str, Any], functions: tuple[str, ...]) -> tuple[str, ...]:
    """The names under which the kernel has compiled the cells that define some functions and classes."""
    mine = [namespace[name] for name in functions if name in namespace]
    return tuple(
        {code.co_filename for thing in mine if is_here(thing, namespace) for code in codes_of(thing)}
    )


def is_here(thing: Any, namespace: dict[str, Any]) -> bool:
    """Whether a function or class was defined in the notebook, not imported."""
    return getattr(thing, "__module__", None) == namespace.get("__name__")


def codes_of(thing: Any) -> Iterator[CodeType]:
    """The code of a function, or of a class's methods."""
    for part in [thing, *(vars(thing).values() if isinstance(thing, type) else ())]:
        code = getattr(inspect.unwrap(part) if callable(part) else part, "__code__", None)
        if code is not None:
            yield code


def living_cells(namespace: dict[str, Any]) -> dict[str, str]:
    """The sources of the cells whose functions and classes the kernel still has, by the name of one of them."""
    found: dict[str, str] = {}
    files: set[str] = set()
    for name, thing in list(namespace.items()):
        if not is_here(thing, namespace):
            continue
        for code in codes_of(thing):
            if code.co_filename not in files:
                files.add(code.co_filename)
                found[name] = "".join(linecache.getlines(code.co_filename))
    return found


def run_cells(chapter: Chapter, submission: Submission) -> tuple[dict[str, Any], Cells, dict[str, str]]:
    """Runs a submission's cells in this process; returns their names, the cells, and what went wrong in which."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = Cells(namespace)
    errors: dict[str, str] = {}
    for name, source in {"setup": chapter.setup, "given": chapter.given, **submission.sources}.items():
        error = cells.run(name, source)
        if isinstance(error, KeyboardInterrupt):
            raise error
        if error is not None:
            line = error.lineno if isinstance(error, SyntaxError) else describe_error(error).line
            where = f" in line {line}" if line else ""
            what = "the file" if name == "file" else "its cell"
            errors[name] = f"{what} raises {type(error).__name__}{where}: {error}"
    return namespace, cells, errors


def check_sources(chapter: Chapter, submission: Submission) -> list[dict[str, Any]]:
    """Runs a submission's cells in this process and checks every exercise that they define, for `course-llm check`."""
    namespace, cells, errors = run_cells(chapter, submission)
    results = []
    for entry in chapter.entries:
        tried = entry.name in submission.sources
        if not all(f in namespace for f in entry.functions):
            if tried or any(f in namespace for f in entry.functions):
                missing = next(f for f in entry.functions if f not in namespace)
                told = errors.get(entry.name) or errors.get("file") or f"{missing} is not defined"
                results.append({"name": entry.name, "passed": False, "near_miss": None, "message": told})
            continue
        cells.turn(entry.name)
        report = check_names(chapter, entry.name, namespace, submission.sources)
        result = report.result
        results.append({
            "name": entry.name,
            "passed": result.passed,
            "near_miss": result.diagnosis.name if result.diagnosis else None,
            "message": result.message,
            **({"case": dict(report.case)} if report.case else {}),
            **({"borrowed": report.borrowed} if chapter.pieces else {}),
        })  # fmt: skip
    if not results and "file" in errors:
        results.append({"name": "file", "passed": False, "near_miss": None, "message": errors["file"]})
    return results


def check(name: str) -> None:
    """Checks one exercise of the notebook and shows the result.

    Args:
        name: the exercise's name, `"top_p_filter"`.

    Raises:
        CheckFailed: a public case fails.
        ValueError: there is no such exercise.
    """
    if callable(name):
        name = getattr(name, "__name__", str(name))
    chapter, entry = catalog.entry(name)
    namespace = sys._getframe(1).f_globals
    missing = [f for f in entry.functions if f not in namespace]
    if missing:
        raise CheckFailed(f"{missing[0]} is not defined: run the cell with your answer first")
    report = check_names(chapter, entry.name, namespace)
    report.hint = next_hint(entry, report.result)
    _show(report)
    if not report.result.passed:
        raise CheckFailed(failure_line(report.result))


def next_hint(entry: Entry, result: Result) -> str | None:
    """The next hint for an answer whose mistake is not known.

    Hints go from the ordinary cases to the rest, as the groups do: as many are passed over as groups pass.
    """
    if result.passed or not result.attempted or result.diagnosis:
        return None
    passing = next(i for i, found in enumerate(result.groups) if not found.passed)
    if passing >= len(entry.hints):  # none is about what fails
        return None
    index = min(max(passing, _hinted.get(entry.name, 0)), len(entry.hints) - 1)
    _hinted[entry.name] = index + 1
    return entry.hints[index]


def failure_line(result: Result) -> str:
    """One line for the end of a failed check."""
    if not result.attempted:
        return f"{result.exercise.name} is not written yet"
    failed = sum(not g.passed for g in result.groups)
    return f"{result.exercise.name} fails {failed} of {len(result.groups)} groups: {result.message}"


def _show(report: Report) -> None:
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        print(report)
        return
    if get_ipython() is None:
        print(report)
    else:
        display(report)
