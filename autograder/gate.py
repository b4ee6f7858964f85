"""Refuses exercises that do not hold together: `python -m autograder.gate [STEM…]`.

For every exercise: the reference and the solution pass; the blank exercise fails with NotImplementedError alone; every
near-miss fails and is diagnosed as itself; the generated files are fresh; names, signatures and book labels agree.
"""

import __future__

import concurrent.futures
import inspect
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator

from rich.console import Console

from autograder import judge, sync
from autograder.judge import GRADING_SEED, PUBLIC_SEED, Result, near_miss_result, run_exercise
from autograder.spec import Exercise, Local

SEEDS = ((PUBLIC_SEED, True), (GRADING_SEED, False))


def solution_namespace(solution: sync.Solution, skip_answers: bool = False) -> dict:
    """The names that a solution file defines, as its notebook would."""
    namespace: dict = {"__name__": "__main__"}
    for source in (sync.SETUP, solution.given):
        exec(compile(source, "<given>", "exec"), namespace)
    for part in () if skip_answers else solution.parts:
        run_cell(part.code, namespace)
    return namespace


def run_cell(source: str, namespace: dict) -> None:
    """Runs an answer's cell with annotations left unevaluated, as the notebook does."""
    exec(
        compile(source, "<answer>", "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True),
        namespace,
    )


def check_chapter(stem: str) -> Iterator[str]:
    """Yields what is wrong with a chapter."""
    try:
        solution = sync.read_solution(stem)
    except (sync.SolutionError, SyntaxError, KeyError) as error:
        yield f"the solution file cannot be read: {error}"
        return
    checks = judge.exercises(stem)
    names = [part.name for part in solution.parts]
    if names != list(checks):
        yield f"exercises of the solution and of the checks differ: {sorted(set(names) ^ set(checks)) or 'their order'}"
    generated = sync.generated(stem)
    for path, text in generated.items():
        if not path.exists() or path.read_text() != text:
            yield f"{path.relative_to(sync.ROOT)} is stale: run `make sync`"
    page = sync.ROOT / "book" / f"{stem}.md"
    labels = set(re.findall(r"^\(([\w-]+)\)=", page.read_text(), flags=re.M)) if page.exists() else set()
    namespace = solution_namespace(solution)
    starters = next(json.loads(text)["entries"] for path, text in generated.items() if path.suffix == ".json")
    for part, entry in zip(solution.parts, starters, strict=True):
        if part.name in checks:
            exercise = checks[part.name]
            blank = solution_namespace(solution, skip_answers=True)
            run_cell(entry["starter"], blank)
            for complaint in check_exercise(exercise, namespace, blank, part.points):
                yield f"{part.name}: {complaint}"
            for label in {exercise.see, *(m.see for m in exercise.near_misses)} - labels:
                yield f"{part.name}: book/{stem}.md has no label ({label})="


def check_exercise(exercise: Exercise, solution: dict, blank: dict, points: int) -> Iterator[str]:
    """Yields what is wrong with an exercise."""
    for name in exercise.functions:
        twin, answer = getattr(exercise.reference, name, None), solution.get(name)
        if twin is None or answer is None:
            yield f"{name} is not defined by the reference and the solution"
            return
        if inspect.isfunction(twin) and _parameters(twin) != _parameters(answer):
            yield f"the signatures of {name} differ: {_parameters(twin)} and {_parameters(answer)}"
    total = sum(group.share for group in exercise.groups)
    if any((2 * points * group.share) % total for group in exercise.groups):
        yield f"{points} points do not share out in halves over {[g.share for g in exercise.groups]}"
    if len(exercise.near_misses) < 3:
        yield f"it has {len(exercise.near_misses)} near-misses, it needs 3"
    for seed, public in SEEDS:
        where = "public cases" if public else "grading cases"
        try:
            reference = run_exercise(exercise, Local(exercise.reference_names()), seed, public)
        except AssertionError as error:
            yield str(error)
            return
        yield from _failure(reference, f"the reference fails ({where})")
        yield from _failure(
            run_exercise(exercise, Local(dict(solution)), seed, public), f"the solution fails ({where})"
        )
        result = run_exercise(exercise, Local(dict(blank)), seed, public)
        if result.attempted or result.fraction:
            yield f"the blank exercise is not taken as such ({where}): {result.complaint}"
        for miss in exercise.near_misses:
            result = near_miss_result(exercise, miss, seed, public)
            if result.passed:
                yield f"near-miss {miss.name} passes ({where})"
            elif result.diagnosis is not miss:
                found = result.diagnosis.name if result.diagnosis else "nothing"
                yield f"near-miss {miss.name} is diagnosed as {found} ({where})"


def _parameters(function) -> list[tuple]:
    return [(p.name, p.kind.name, repr(p.default)) for p in inspect.signature(function).parameters.values()]


def _failure(result: Result, words: str) -> Iterator[str]:
    if not result.passed:
        group = next(g.group.name for g in result.groups if not g.passed)
        index, complaint = next(g.first_complaint for g in result.groups if not g.passed)
        yield f"{words}: group {group}, case {index + 1}: {complaint}"


def complaints_of(stem: str) -> list[str]:
    """What is wrong with a chapter, as a list that can be sent between processes."""
    return list(check_chapter(stem))


def main(argv: list[str] | None = None) -> int:
    """Checks the chapters and prints what is wrong; exit code 1 if anything is."""
    given = sys.argv[1:] if argv is None else argv
    chosen = given or sync.solution_stems()
    for stem in chosen:
        if stem not in sync.solution_stems() or stem not in judge.stems():
            print(
                f"gate: {stem} needs both solutions/{stem}.py and autograder/checks/{stem}.py",
                file=sys.stderr,
            )
            return 2
    console, wrong = Console(highlight=False), 0
    # a process a chapter: each imports torch for itself, since a forked one could inherit its threads
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(len(chosen), os.cpu_count() or 1), context) as pool:
        for stem, complaints in zip(chosen, pool.map(complaints_of, chosen), strict=True):
            wrong += len(complaints)
            for complaint in complaints:
                console.print(f"{stem}: {complaint}", markup=False)
            if not complaints:
                counts = [len(e.near_misses) for e in judge.exercises(stem).values()]
                console.print(f"{stem}: {len(counts)} exercises and {sum(counts)} near-misses hold together")
    for path, text in ({} if given else sync.ungraded_notebooks()).items():
        if not path.exists() or path.read_text() != text:
            wrong += 1
            console.print(f"{path.relative_to(sync.ROOT)} is stale: run `make sync`", markup=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
