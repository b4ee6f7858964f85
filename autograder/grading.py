"""Grades submissions: runs each one's cells in a sandbox, asks every exercise's questions, reports points and reasons."""

import ast
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import inspect
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from autograder import catalog, judge, pieces
from autograder.catalog import Chapter, Entry
from autograder.guard import bounded
from autograder.inside.engine import Raised
from autograder.judge import GRADING_SEED, Result, run_exercise
from autograder.remote import Worker
from autograder.sandbox import Limits, Sandbox
from autograder.screen import needed, not_countable
from autograder.spec import BackendLost, Exercise
from autograder.submission import Submission, SubmissionError, read_submission
from autograder.wall import SandboxError

PR_SET_PDEATHSIG = 1


@dataclasses.dataclass
class ExerciseReport:
    """What a submission earned in one exercise, and why not more."""

    name: str
    points: float
    max_points: float
    passed: bool
    near_miss: str | None = None
    message: str = ""
    attempted: bool = True
    see: str = ""
    groups: list[dict] = dataclasses.field(default_factory=list)
    borrowed: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class SubmissionReport:
    """What a submission earned."""

    submission: str
    exercises: list[ExerciseReport]
    error: str | None = None
    remarks: list[str] = dataclasses.field(default_factory=list)
    elapsed_s: float = 0.0
    isolated: bool = True

    @property
    def points(self) -> float:
        return round(sum(e.points for e in self.exercises), 2)

    @property
    def max_points(self) -> float:
        return sum(e.max_points for e in self.exercises)

    def to_json(self) -> dict[str, Any]:
        """The report as the command line prints it."""
        names = (
            "name",
            "points",
            "max_points",
            "passed",
            "near_miss",
            "message",
            "attempted",
            "see",
            "groups",
            "borrowed",
        )
        exercises = [{name: getattr(e, name) for name in names} for e in self.exercises]
        return {"submission": self.submission, "points": self.points, "max_points": self.max_points, "error": self.error,
                "remarks": self.remarks, "elapsed_s": round(self.elapsed_s, 3), "sandboxed": self.isolated,
                "exercises": exercises}  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "SubmissionReport":
        """The report of which `to_json` made this."""
        exercises = [ExerciseReport(**e) for e in data["exercises"]]
        return cls(data["submission"], exercises, data["error"], data["remarks"], data["elapsed_s"], data["sandboxed"])  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """How a run grades."""

    seed: int = GRADING_SEED
    device: str = "cpu"
    limits: Limits = dataclasses.field(default_factory=Limits)
    isolate: bool = True
    user: int | None = None
    """Whom the worker becomes where root grades without bubblewrap."""


class Grader:
    """Grades submissions of one chapter, one after the other, with one warm sandbox."""

    def __init__(self, chapter: Chapter, options: Options | None = None):
        self.chapter = chapter
        self.options = options or Options()
        given = self.options
        self.sandbox = Sandbox(chapter, given.limits, given.device, given.isolate, given.user)
        self.exercises = judge.exercises(chapter.stem)
        self.reference = next(iter(self.exercises.values())).reference_names()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.sandbox.close()

    def grade_file(self, path: Path, name: str) -> SubmissionReport:
        """Grades a notebook or Python file; a file that cannot be read is a report with an error."""
        started = time.monotonic()
        try:
            report = self.grade(read_submission(path, self.chapter), name)
        except SubmissionError as error:
            report = ungraded(self.chapter.stem, name, str(error), self.options)
        report.elapsed_s = time.monotonic() - started
        return report

    def grade(self, submission: Submission, name: str, only: tuple[str, ...] = ()) -> SubmissionReport:
        """Grades a submission that has been read; `only` some of its exercises."""
        run = _Run(self, submission)
        entries = [entry for entry in self.chapter.entries if not only or entry.name in only]
        try:
            reports = run.all(entries)
        except SandboxError:
            raise
        except Exception as error:  # whatever one submission breaks, the others are graded
            logging.getLogger(__name__).debug("%s", name, exc_info=True)
            words = f"it could not be graded ({type(error).__name__} in the grader): look at it by hand"
            return ungraded(self.chapter.stem, name, words, self.options)
        finally:
            run.close()
        return SubmissionReport(name, reports, remarks=submission.remarks, isolated=self.options.isolate)

    def _nothing(self, entry: Entry, message: str, attempted: bool = False) -> ExerciseReport:
        return ExerciseReport(entry.name, 0.0, entry.points, False, message=message, attempted=attempted)


def ungraded(stem: str, name: str, error: str, options: Options) -> SubmissionReport:
    """The report of a submission that cannot be read: no points, and why."""
    nothing = [ExerciseReport(e.name, 0.0, e.points, False, message="Not graded.", attempted=False) for e in catalog.chapter(stem).entries]  # fmt: skip
    return SubmissionReport(name, nothing, error, isolated=options.isolate)


class _Run:
    """One submission being graded: its worker, renewed when it is lost, and what its cells did."""

    def __init__(self, grader: Grader, submission: Submission):
        self.grader = grader
        self.sources = dict(submission.sources)
        self.errors: dict[str, str] = {}
        self.worker: Worker | None = None
        self.overruns = 0
        self.spent_s = 0.0
        self.started = time.monotonic()

    def close(self) -> None:
        if self.worker is not None:
            self.end(self.worker)
            self.worker = None

    def end(self, worker: Worker) -> None:
        self.spent_s += worker.close().get("cpu_s", 0.0)

    def ready_worker(self, exercise: str) -> Worker:
        """A live worker in which the cells have run and it is the exercise's turn; a cell that takes it along is left out from then on."""
        while self.worker is None:
            # every restart runs all cells again, so what one worker may use is not yet a bound for the submission
            limit = self.grader.options.limits.submission_s
            if self.spent_s > limit or time.monotonic() - self.started > 4 * limit:
                raise BackendLost("The submission has used up its time; this exercise was not graded.")
            worker = self.grader.sandbox.start_worker()
            name = ""
            try:
                for name, source in self.sources.items():
                    worker.allow(self._patience(self.grader.options.limits.cell_s))
                    if error := worker.run_cell(name, source):
                        self.errors[name] = describe_cell_error(error)
                self.worker = worker
            except BackendLost as lost:
                self.end(worker)
                self.overruns += 1
                self.errors[name] = f"The cell could not be run. {lost}"
                del self.sources[name]
        self.worker.turn(exercise)
        return self.worker

    def _patience(self, seconds: float) -> float:
        """Processor time for the next thing; whoever has run out of it before gets less."""
        return seconds if self.overruns == 0 else seconds / 4

    def all(self, entries: list[Entry]) -> list[ExerciseReport]:
        """Grades the exercises; then once more those that fail and lean on others that fail, with the grader's in their place."""
        reports = {entry.name: self.exercise(entry) for entry in entries}
        broken = {
            f
            for e in self.grader.chapter.entries
            for f in e.functions
            if e.name in reports and not reports[e.name].passed
        }
        uses = uses_of(self.sources) if broken else {}
        functions = {n for n, f in self.grader.reference.items() if lendable(f)}
        earlier: set[str] = (
            set()
        )  # a later exercise may contain the answer to an earlier one, so that is never lent
        before = {}
        for entry in self.grader.chapter.entries:
            before[entry.name] = set(earlier)
            earlier |= set(entry.functions)
        for entry in entries:
            report = reports[entry.name]
            lent = sorted(broken & functions & reach(uses, entry.functions) & before[entry.name])
            if report.passed or not report.attempted or not lent:
                continue
            self.close()
            again = self.exercise(entry, lent)
            if again.points > report.points:
                reports[entry.name] = again
                if again.passed:
                    broken -= set(entry.functions)  # it is right as soon as what it leans on is
                names = " and ".join(lent)
                again.message = (
                    f"Graded with the course's {names} in the place of yours. {again.message}".strip()
                )
            self.close()
        return list(reports.values())

    def exercise(self, entry: Entry, lent: Sequence[str] = ()) -> ExerciseReport:
        """Grades one exercise; whatever happens in it, the next one starts afresh."""
        grader = self.grader
        if not self.sources:
            told = self.errors.get(entry.name) or self.errors.get("file")
            return grader._nothing(entry, told or "Not attempted.", attempted=told is not None)
        try:
            worker = self.ready_worker(entry.name)
            worker.allow(self._patience(grader.options.limits.cell_s))
            missing = [name for name in entry.functions if name not in worker.defined(entry.functions)]
            if lent and not missing:
                worker.lend(list(lent), grader.reference)
        except BackendLost as lost:
            self.close()
            return grader._nothing(entry, str(lost), attempted=True)
        if missing:
            told = self.errors.get(entry.name) or self.errors.get("file")
            if told:
                return grader._nothing(entry, told, attempted=True)
            tried = entry.name in self.sources
            words = f"{missing[0]} is not defined by its cell." if tried else "Not attempted."
            return grader._nothing(entry, words, attempted=tried)
        exercise = grader.exercises[entry.name]
        judge.prepared(exercise, grader.options.seed, False)  # not on the answer's time
        try:
            result = self._judged(exercise, worker, ahead=not lent)
            if result.lost and not lent:  # once more, case by case: what stands before the fatal case counts
                with contextlib.suppress(BackendLost):  # the first result says more than that no time is left
                    result = self._judged(exercise, self.ready_worker(entry.name))
        except BackendLost as lost:
            self.close()
            return grader._nothing(entry, str(lost), attempted=True)
        if not result.passed and not lent and (again := self._alone(entry, exercise)):
            result = max(result, again, key=lambda found: found.fraction)
        report = report_exercise(entry, result, self.errors.get(entry.name))
        report.borrowed = pieces.borrowed(grader.chapter, self.sources, entry.functions)
        return report

    def _alone(self, entry: Entry, exercise: Exercise) -> Result | None:
        """The result without the lines that an exercise does not lead to, where only these keep its cost from being counted."""
        part = needed(self.sources, exercise.functions)
        if not not_countable(self.sources, exercise.functions) or not_countable(part, exercise.functions):
            return None
        self.close()
        whole, errors, self.sources = self.sources, dict(self.errors), part
        try:
            return self._judged(exercise, self.ready_worker(entry.name))
        except BackendLost:
            return None
        finally:
            self.close()
            self.sources, self.errors = whole, errors

    def _judged(self, exercise: Exercise, worker: Worker, ahead: bool = False) -> Result:
        worker.allow(self._patience(exercise.seconds))
        worker.not_countable = functools.cache(
            functools.partial(not_countable, self.sources, exercise.functions)
        )
        try:
            with bounded():
                result = run_exercise(exercise, worker, self.grader.options.seed, public=False, ahead=ahead)
        except BackendLost:
            self.overruns += 1
            raise
        if result.lost:
            self.overruns += 1
            self.close()
        return result


def lendable(thing: Any) -> bool:
    """Whether part of the reference can be called across the wall: a function that opens no file, for it would be one of the grader's machine."""
    if not inspect.isfunction(thing):
        return False
    return not any("Path" in str(p.annotation) for p in inspect.signature(thing).parameters.values())


def uses_of(sources: dict[str, str]) -> dict[str, set[str]]:
    """Which names each top-level definition of the answers mentions."""
    uses: dict[str, set[str]] = {}
    for source in sources.values():
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                uses[node.name] = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return uses


def reach(uses: dict[str, set[str]], names: tuple[str, ...]) -> set[str]:
    """Everything that definitions mention, directly or through one another."""
    found: set[str] = set()
    queue = list(names)
    while queue:
        for name in uses.get(queue.pop(), ()):
            if name not in found:
                found.add(name)
                queue.append(name)
    return found


def report_exercise(entry: Entry, result: Result, cell_error: str | None) -> ExerciseReport:
    """Turns a judged exercise into its report; hidden values never appear in it."""
    points = result.points(entry.points)
    message = result.message
    if cell_error and not result.passed:
        message = f"{cell_error} {message}".strip()
    near_miss = result.diagnosis.name if result.diagnosis else None
    see = result.diagnosis.see if result.diagnosis else result.exercise.see
    total = sum(group.share for group in result.exercise.groups)
    first = result.groups[0].passed if result.groups else False
    groups = []
    for found in result.groups:
        complaint = found.first_complaint
        groups.append({
            "name": found.group.name,
            "says": found.group.says,
            "passed": found.passed,
            "points": round(entry.points * found.group.share / total, 2) if found.passed and first else 0.0,
            "max_points": round(entry.points * found.group.share / total, 2),
            "complaint": complaint[1] if complaint else "",
            "counts": found.noted,
        })  # fmt: skip
    return ExerciseReport(entry.name, points, entry.points, result.passed, near_miss, message, result.attempted,
                          f"{result.exercise.stem}.html#{see}", groups)  # fmt: skip


def describe_cell_error(error: Raised) -> str:
    """Says that a cell failed when it was run, and where."""
    where = f" in line {error.line}" if error.line else ""
    if error.name in ("SyntaxError", "IndentationError", "TabError"):
        return f"The cell is not Python: {error.name}{where}."
    return f"The cell raises {error.name}{where} when it is run."


# many submissions

_grader: Grader | None = None


def _grade_one(stem: str, options: Options, path: str, name: str) -> SubmissionReport:
    """Grades one file in a pool's process, whose sandbox stays warm between files."""
    global _grader
    if _grader is None or _grader.chapter.stem != stem or _grader.options != options:
        if _grader is not None:
            _grader.sandbox.close()
        _grader = Grader(catalog.chapter(stem), options)
    return _grader.grade_file(Path(path), name)


def default_workers(submissions: int) -> int:
    """As many processes as there are cores, but none for less than a dozen submissions: each has a start-up cost."""
    return max(1, min(len(os.sched_getaffinity(0)), math.ceil(submissions / 12)))


def grade_many(
    stem: str,
    files: dict[str, Path],
    options: Options,
    cluster: Any = None,
    workers: int = 1,
) -> Iterator[SubmissionReport]:
    """Grades files (by the submission's name) and yields reports as they are finished.

    A process of the pool, or a machine of the `autograder.cluster.Cluster`, that dies takes no report with it: what it had not
    finished is graded again, here.
    """
    done: set[str] = set()
    if cluster is None and workers == 1:
        with Grader(catalog.chapter(stem), options) as grader:
            for name, path in files.items():
                yield grader.grade_file(path, name)
        return
    stream = cluster.grade(stem, files, options) if cluster else _grade_in_pool(stem, files, options, workers)
    for report in stream:
        done.add(report.submission)
        yield report
    left = {name: path for name, path in files.items() if name not in done}
    if left:
        yield from grade_many(stem, left, options)


def _grade_in_pool(stem: str, files: dict[str, Path], options: Options, workers: int) -> Iterator[SubmissionReport]:  # fmt: skip
    """Yields the reports of those files that a pool of processes could grade, as they are finished."""
    for exercise in judge.exercises(stem).values():
        judge.prepared(exercise, options.seed, False)  # before any fork, so that it is done once
    pool = process_pool(workers, end_with_parent)
    futures = []
    try:
        with contextlib.suppress(BrokenProcessPool):
            for name, path in files.items():
                futures.append(pool.submit(_grade_one, stem, options, str(path), name))
        for future in concurrent.futures.as_completed(futures):
            with contextlib.suppress(BrokenProcessPool):
                yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def process_pool(workers: int, initializer: Callable[[], None] | None = None) -> concurrent.futures.ProcessPoolExecutor:  # fmt: skip
    """A pool of processes forked from this one, so that torch and the expected answers are there already."""
    import multiprocessing

    fork = multiprocessing.get_context("fork")
    return concurrent.futures.ProcessPoolExecutor(workers, mp_context=fork, initializer=initializer)


def end_with_parent() -> None:
    """Has the kernel end this process, and with it its sandbox, when the grader is killed: nobody else would."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
