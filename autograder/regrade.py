"""Grades what was collected once more, and says whose points change and why before anything is written.

For the day when a check is mended in the middle of a term. Nothing in the course folder changes until `write` is called; then every
submission is replaced as a whole, and a run that is killed goes on where it stopped.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autograder import grading
from autograder.course import Course, CourseError, fingerprint, stored_report
from autograder.grading import ExerciseReport, Options, SubmissionReport


@dataclasses.dataclass(frozen=True)
class ExerciseChange:
    """An exercise whose points or words change. None stands for an exercise that was not there."""

    name: str
    old_points: float | None
    new_points: float | None
    old_message: str
    new_message: str
    groups: str
    manual_score: float | None
    """A score given by hand: it counts before and after."""

    @property
    def why(self) -> str:
        """What was said before and what is said now."""
        if self.old_message != self.new_message:
            return f"{self.old_message or 'passed'} → {self.new_message or 'passed'}"
        return self.groups or self.new_message


@dataclasses.dataclass(frozen=True)
class Change:
    """A submission of which something changes."""

    submission: str
    old_points: float
    new_points: float
    exercises: list[ExerciseChange]

    @property
    def in_points(self) -> bool:
        return any(e.old_points != e.new_points for e in self.exercises)


@dataclasses.dataclass
class Comparison:
    """All that a regrade finds."""

    stem: str
    graded: int = 0
    changes: list[Change] = dataclasses.field(default_factory=list)
    unchanged: list[str] = dataclasses.field(default_factory=list)
    up_to_date: list[str] = dataclasses.field(default_factory=list)
    """Graded by these checks already, and not graded again."""
    not_graded: list[str] = dataclasses.field(default_factory=list)
    """Collected, but never graded: these are `course-llm grade`'s."""
    not_collected: list[str] = dataclasses.field(default_factory=list)
    """Graded once, but no longer among the collected: these are left as they are."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Regrade:
    """One regrade of an assignment in a course folder."""

    def __init__(self, course: Course, stem: str, options: Options, force: bool = False):
        """
        Args:
            course: the course folder.
            stem: the chapter.
            options: how to grade; those of the first grading, or other questions are asked.
            force: grade again what these checks have graded.

        Raises:
            CourseError: nothing is graded yet, or the gradebook cannot be used.
            SubmissionError: nothing is collected.
        """
        self.course, self.stem, self.options = course, stem, options
        self.old = dict(stored(course, stem))
        if not self.old:
            raise CourseError(f"{course.root} has nothing graded for {stem}; first run: course-llm grade {stem} FOLDER --course {course.root}")  # fmt: skip
        self.manual = manual_scores(course, stem)
        files = course.submitted(stem)
        self.files = {name: path for name, path in files.items() if name in self.old}
        self.prints = {name: fingerprint(path, stem, options) for name, path in self.files.items()}
        fresh = [n for n in self.files if self.old[n][0] == self.prints[n] and not force]
        self.found = Comparison(stem, up_to_date=fresh)
        self.found.not_graded = sorted(set(files) - set(self.old))
        self.found.not_collected = sorted(set(self.old) - set(files))
        self.new: dict[str, SubmissionReport] = {}
        self._take_up()

    @property
    def left(self) -> dict[str, Path]:
        """What is to be graded still."""
        done = {*self.new, *self.found.up_to_date}
        return {name: path for name, path in self.files.items() if name not in done}

    @property
    def journal(self) -> Path:
        """Where a run that is going to write keeps what it has graded, until it is written."""
        return self.course.root / ".regrade" / f"{self.stem}.jsonl"

    def grade(self, workers: int, keep: bool, advance: Callable[[SubmissionReport], None]) -> Comparison:
        """Grades what is left and compares; with `keep`, what is finished outlives this process."""
        with self._keeping() if keep and self.left else contextlib.nullcontext() as keeping:
            for report in grading.grade_many(self.stem, self.left, self.options, None, workers):
                self.new[report.submission] = report
                if keeping:
                    keeping(report)
                advance(report)
        for name in sorted(self.new):
            self.found.graded += 1
            change = compared(self.old[name][1], self.new[name], self.manual.get(name, {}))
            if change.exercises:
                self.found.changes.append(change)
            else:
                self.found.unchanged.append(name)
        return self.found

    def write(self) -> None:
        """Writes all that was graded into the gradebook and the notebooks, one submission at a time."""
        if self.new:
            with self.course.writer(self.stem) as writer:
                for name, report in self.new.items():
                    writer.write(report, self.files[name], self.prints[name])
        self.journal.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.journal.parent.rmdir()

    def _take_up(self) -> None:
        """Takes over what an interrupted run has graded of the same files by the same checks."""
        with contextlib.suppress(OSError):
            for line in self.journal.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # the last line of a killed run
                    kept = json.loads(line)
                    report = SubmissionReport.from_json(kept["report"])
                    name = report.submission
                    if self.prints.get(name) == kept["fingerprint"] and name not in self.found.up_to_date:
                        self.new[name] = report

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[Callable[[SubmissionReport], None]]:
        self.journal.parent.mkdir(exist_ok=True)
        with open(self.journal, "a", encoding="utf-8") as file:

            def keep(report: SubmissionReport) -> None:
                kept = {"fingerprint": self.prints[report.submission], "report": report.to_json()}
                file.write("\n" + json.dumps(kept))  # whatever half a line a killed run has left ends here
                file.flush()
                os.fsync(file.fileno())

            yield keep


def stored(course: Course, stem: str) -> Iterator[tuple[str, tuple[str, SubmissionReport]]]:
    """The reports in the course folder by student, each with the fingerprint of what it was graded by."""
    for path in sorted((course.root / "autograded").glob(f"*/{stem}/{stem}.ipynb")):
        found, report = stored_report(path)
        if report is not None:
            yield path.parent.parent.name, (found, report)


def manual_scores(course: Course, stem: str) -> dict[str, dict[str, float]]:
    """The scores that were given by hand, by student and exercise."""
    from nbgrader.api import BaseCell, Grade, SubmittedAssignment, SubmittedNotebook

    found: dict[str, dict[str, float]] = {}
    with course.graded_book(stem) as gradebook:
        rows = gradebook.db.query(SubmittedAssignment.student_id, BaseCell.name, Grade.manual_score)
        rows = rows.select_from(Grade).join(BaseCell, Grade.cell_id == BaseCell.id)
        rows = rows.join(SubmittedNotebook, Grade.notebook_id == SubmittedNotebook.id)
        rows = rows.join(SubmittedAssignment, SubmittedNotebook.assignment_id == SubmittedAssignment.id)
        assignment = gradebook.find_assignment(stem)
        rows = rows.filter(SubmittedAssignment.assignment_id == assignment.id, Grade.manual_score.isnot(None))
        for student, cell, score in rows:
            found.setdefault(student, {})[cell.removeprefix("check_")] = score
    return found


def compared(old: SubmissionReport, new: SubmissionReport, manual: dict[str, float]) -> Change:
    """What changes between two reports of a submission; nothing changes where `exercises` is empty."""
    before, after = ({e.name: e for e in report.exercises} for report in (old, new))
    exercises = []
    for name in [*after, *(n for n in before if n not in after)]:
        a, b = before.get(name), after.get(name)
        if a and b and (a.points, a.message) == (b.points, b.message):
            continue
        exercises.append(
            ExerciseChange(
                name,
                a.points if a else None,
                b.points if b else None,
                a.message if a else "This exercise was not there.",
                b.message if b else "This exercise is no longer there.",
                groups_changed(a, b) if a and b else "",
                manual.get(name),
            )
        )
    return Change(new.submission, old.points, new.points, exercises)


def groups_changed(old: ExerciseReport, new: ExerciseReport) -> str:
    """Which groups of cases pass now and which fail now, where the words are the same."""
    before = {g["name"]: g["passed"] for g in old.groups}
    changed = [g for g in new.groups if before.get(g["name"]) not in (None, g["passed"])]
    passing, failing = ([g["name"] for g in changed if g["passed"] is was] for was in (True, False))
    parts = [f"{what} now: {', '.join(names)}" for what, names in (("passes", passing), ("fails", failing)) if names]  # fmt: skip
    return "; ".join(parts)


def print_comparison(found: Comparison) -> None:
    """A row per exercise whose points change, and what else there is to say."""
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(markup=False, emoji=False, highlight=False)  # a folder's name is a student's to choose
    moved = [change for change in found.changes if change.in_points]
    if moved:
        headings = ("submission", "points", "exercise", "by", "why")
        columns = (Column(words, overflow="fold") for words in headings)
        table = Table(*columns, title=f"{found.stem}: points that change")
        for change in moved:
            name, total = change.submission, f"{change.old_points:g} → {change.new_points:g}"
            for e in change.exercises:
                if e.old_points == e.new_points:
                    continue
                by = f"{(e.new_points or 0) - (e.old_points or 0):+g}"
                hand = "" if e.manual_score is None else f" (the {e.manual_score:g} given by hand stays)"
                table.add_row(name, total, e.name, by, e.why + hand)
                name = total = ""
        console.print(table)
    words = len(found.changes) - len(moved)
    parts = [f"{found.graded} graded anew", f"{len(moved)} change in points", f"{words} in words alone"]
    if found.up_to_date:
        parts.append(f"{len(found.up_to_date)} graded by these checks already (--force grades them, too)")
    if found.not_graded:
        parts.append(f"{len(found.not_graded)} never graded (course-llm grade {found.stem})")
    if found.not_collected:
        parts.append(f"{len(found.not_collected)} no longer collected and left as they are: {', '.join(found.not_collected)}")  # fmt: skip
    console.print("; ".join(parts), soft_wrap=True)
