"""Runs an exercise's groups on an implementation, gives points, and explains a wrong answer by the near-misses."""

import dataclasses
import functools
import importlib
import pkgutil
from typing import Any

from autograder import checks
from autograder.compare import BY_DTYPE, Tolerance
from autograder.guard import off_the_clock
from autograder.inside.engine import Outcome
from autograder.spec import (
    Backend,
    BackendLost,
    Case,
    CaseRun,
    Exercise,
    Group,
    Local,
    NearMiss,
    Served,
    outcome_difference,
    run_case,
)

PUBLIC_SEED = 1
GRADING_SEED = 20_170_612


@dataclasses.dataclass(frozen=True)
class Expected:
    """A case and the reference's transcript of it."""

    case: Case
    transcript: list[Outcome]


@dataclasses.dataclass
class GroupResult:
    """How an implementation did in one group."""

    group: Group
    runs: list[CaseRun]
    counts: bool = True

    @property
    def passed(self) -> bool:
        return all(run.complaint is None for run in self.runs)

    @property
    def noted(self) -> dict[str, int]:
        """What its cases noted for the report."""
        return {name: number for run in self.runs for name, number in run.counts.items()}

    @property
    def first_complaint(self) -> tuple[int, str] | None:
        return next(((i, r.complaint) for i, r in enumerate(self.runs) if r.complaint), None)


@dataclasses.dataclass
class Result:
    """How an implementation did in one exercise."""

    exercise: Exercise
    groups: list[GroupResult]
    attempted: bool = True
    diagnosis: NearMiss | None = None
    lost: str | None = None
    error: str | None = None

    @property
    def passed(self) -> bool:
        return bool(self.groups) and self.lost is None and all(g.passed for g in self.groups)

    @property
    def fraction(self) -> float:
        """The share of the points that is earned: whole groups, and none unless the first passes."""
        if not self.groups or not self.groups[0].passed:
            return 0.0
        return sum(g.group.share for g in self.groups if g.passed) / sum(
            g.share for g in self.exercise.groups
        )

    def points(self, max_points: float) -> float:
        return max_points if self.passed else min(round(max_points * self.fraction, 2), max_points)

    @property
    def complaint(self) -> str:
        """One sentence: the first thing that is wrong."""
        if self.lost:
            return self.lost
        for result in self.groups:
            if found := result.first_complaint:
                return found[1]
        return ""

    @property
    def message(self) -> str:
        """What the learner is told: the diagnosis where there is one, else the first complaint in its group."""
        if not self.attempted:
            return "Not attempted."
        if self.passed:
            return ""
        if self.lost:
            return self.lost
        if self.diagnosis:
            return self.diagnosis.says
        for result in self.groups:
            if found := result.first_complaint:
                _, complaint = found
                return f"{sentence(result.group.says)} {sentence(complaint)}"
        return ""


def sentence(text: str) -> str:
    """The text as a sentence: capital first unless it opens with code or a symbol, and full stop last."""
    first = text.split(" ", 1)[0].rstrip(":;,.!?")
    if first == "a" or (first.isalpha() and len(first) > 1):
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."


@functools.cache
def stems() -> tuple[str, ...]:
    """The chapters that have checks."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(checks.__path__)))


@functools.cache
def exercises(stem: str) -> dict[str, Exercise]:
    """A chapter's exercises by name, in the order of the check file."""
    module = importlib.import_module(f"autograder.checks.{stem}")
    found = [value for value in vars(module).values() if isinstance(value, Exercise)]
    return {exercise.name: exercise for exercise in found}


@functools.cache
def prepared(exercise: Exercise, seed: int, public: bool) -> list[tuple[Group, list[Expected]]]:
    """The cases of an exercise with what the reference answers to them."""
    plan = []
    for group in exercise.groups:
        if public and group.hidden:
            continue
        expected = []
        for case in exercise.cases(group, seed):
            run = run_case(case, exercise, Local(exercise.reference_names()), None)
            if run.complaint:
                raise AssertionError(
                    f"the reference fails {exercise.name}/{group.name} ({case.words}): {run.complaint}"
                )
            expected.append(Expected(case, run.transcript))
        plan.append((group, expected))
    return plan


@functools.cache
def expected_cases(exercise: Exercise, seed: int, public: bool) -> tuple[Expected, ...]:
    """All cases of an exercise, in order."""
    return tuple(e for _, cases in prepared(exercise, seed, public) for e in cases)


@functools.cache
def near_miss_run(exercise: Exercise, miss: NearMiss, seed: int, public: bool, index: int) -> CaseRun:
    """How a near-miss does in one case; not on the time of the answer that asks for it first."""
    expected = expected_cases(exercise, seed, public)[index]
    names = {**exercise.reference_names(), **miss.names}
    with off_the_clock():
        return run_case(expected.case, exercise, Local(names), expected.transcript)


class Replay:
    """Answers the one step of a case with an outcome that has come in already."""

    def __init__(self, outcome: Outcome):
        self.outcome = outcome

    def perform(
        self, kind: str, target: Any, args: tuple = (), kwargs: dict | None = None, **options
    ) -> Outcome:
        return self.outcome


@functools.cache
def single_calls(exercise: Exercise, seed: int, public: bool) -> tuple[list[Case], list[tuple]]:
    """The cases that are one call and need nothing from the grader, and the steps that they are."""
    cases = [e.case for _, expected in prepared(exercise, seed, public) for e in expected if not e.case.run]
    single = [c for c in cases if not any(isinstance(v, Served) for v in (*c.args, *c.kwargs.values()))]
    return single, [(c.kind, c.function or exercise.name, c.args, c.kwargs, c.options) for c in single]


def ask_ahead(exercise: Exercise, backend: Backend, seed: int, public: bool) -> dict[int, Replay]:
    """Asks all single calls at once, by the identity of their case: crossing the wall costs more than the call."""
    single, steps = single_calls(exercise, seed, public)
    return {id(c): Replay(outcome) for c, outcome in zip(single, backend.perform_many(steps), strict=True)}


def run_exercise(
    exercise: Exercise, backend: Backend, seed: int, public: bool, ahead: bool = False
) -> Result:
    """Runs all groups on an implementation and diagnoses what is wrong with it.

    `ahead` asks what can be asked at once; when the implementation is lost on the way, no case is answered.
    """
    result = Result(exercise, [])
    lost: str | None = None
    plan = prepared(exercise, seed, public)
    answered: dict[int, Replay] = {}
    if ahead:
        try:
            answered = ask_ahead(exercise, backend, seed, public)
        except BackendLost as error:
            lost = str(error)
    for group, cases in plan:
        runs: list[CaseRun] = []
        for expected in cases:
            if lost is None:
                try:
                    chosen = answered.get(id(expected.case), backend)
                    runs.append(run_case(expected.case, exercise, chosen, expected.transcript))
                    continue
                except BackendLost as error:
                    lost = str(error)
            runs.append(CaseRun(lost, []))
        result.groups.append(GroupResult(group, runs))
    result.lost = lost
    explain(result, seed, public)
    return result


def near_miss_result(exercise: Exercise, miss: NearMiss, seed: int, public: bool) -> Result:
    """The result of a near-miss, taken for an answer."""
    result = Result(exercise, [])
    index = 0
    for group, cases in prepared(exercise, seed, public):
        places = range(index, index := index + len(cases))
        result.groups.append(
            GroupResult(group, [near_miss_run(exercise, miss, seed, public, i) for i in places])
        )
    explain(result, seed, public)
    return result


def explain(result: Result, seed: int, public: bool) -> None:
    """Adds to a result whether anything was attempted and which near-miss it is."""
    runs = [run for group in result.groups for run in group.runs]
    if result.passed or result.lost is not None or not runs:
        return
    if _is_the_blank(next(run for run in runs if run.complaint)):
        result.attempted = False
    else:
        result.diagnosis = diagnose(result.exercise, runs, seed, public)


def _is_the_blank(run: CaseRun) -> bool:
    """Whether the bare `raise NotImplementedError` of the notebook was met. torch raises the same error with words, where an
    operation does not take half precision: that is an attempt."""
    error = run.transcript[-1].error if run.transcript else None
    return error is not None and error.name == "NotImplementedError" and not error.message.strip()


def diagnose(exercise: Exercise, runs: list[CaseRun], seed: int, public: bool) -> NearMiss | None:
    """Finds the near-miss that behaves like an answer with these runs.

    It must answer like the near-miss in at least half of the cases that fail, one of them with a value rather than an
    error where the near-miss has values, and must not pass more than a third of what the near-miss fails.
    """
    cases = expected_cases(exercise, seed, public)
    failing = [i for i, run in enumerate(runs) if run.complaint]
    best: tuple[float, NearMiss] | None = None
    for miss in exercise.near_misses:
        theirs = functools.partial(near_miss_run, exercise, miss, seed, public)
        alike: list[int] = []
        for done, i in enumerate(failing):
            if 2 * (len(alike) + len(failing) - done) < len(failing):
                break  # it can't answer like the near-miss in half of them any more
            if theirs(i).complaint and same_transcript(runs[i], theirs(i), cases[i].case.tolerance):
                alike.append(i)
        if 2 * len(alike) < len(failing) or not alike:
            continue
        missed = [i for i in range(len(runs)) if theirs(i).complaint]
        contradicted = [i for i in missed if not runs[i].complaint]
        if 3 * len(contradicted) > len(missed):
            continue
        if not any(_telling(theirs(i)) for i in alike) and any(_telling(theirs(i)) for i in missed):
            continue
        score = len(alike) / len(failing) - len(contradicted) / len(missed)
        if best is None or score > best[0]:
            best = score, miss
    return best[1] if best else None


def _telling(run: CaseRun) -> bool:
    """Whether the failing step gave a value: two errors of one type may have nothing in common."""
    return bool(run.transcript) and run.transcript[-1].error is None


def same_transcript(a: CaseRun, b: CaseRun, tolerance: Tolerance = BY_DTYPE) -> bool:
    """Whether two implementations answered a case in the same way."""
    if len(a.transcript) != len(b.transcript):
        return False
    return all(same_outcome(x, y, tolerance) for x, y in zip(a.transcript, b.transcript, strict=True))


def same_outcome(a: Outcome, b: Outcome, tolerance: Tolerance = BY_DTYPE) -> bool:
    """Whether two outcomes are alike: the same kind of error, or values within the tolerance."""
    if a.error or b.error:
        return bool(a.error and b.error and a.error.name == b.error.name)
    if a.changed != b.changed:
        return False
    try:
        return outcome_difference(a, b, tolerance) is None
    except TypeError:  # values that no rule compares, say two functions
        return type(a.value) is type(b.value) and repr(a.value) == repr(b.value)
