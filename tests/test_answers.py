"""Strangers' answers are graded as they deserve, in the sandbox."""

import importlib
import pkgutil

import pytest

import tests.answers
from autograder import catalog
from autograder.grading import Grader
from autograder.submission import Submission
from tests.answers import ANSWERS, Answer

STEMS = [m.name for m in pkgutil.iter_modules(tests.answers.__path__)]
for stem in STEMS:
    importlib.import_module(f"tests.answers.{stem}")


@pytest.fixture(scope="module")
def graders():
    """One warm grader per chapter."""
    made: dict[str, Grader] = {}
    yield lambda stem: made.setdefault(stem, Grader(catalog.chapter(stem)))
    for grader in made.values():
        grader.sandbox.close()


@pytest.mark.parametrize(
    "answer", ANSWERS, ids=lambda a: f"{a.exercise}: {'right' if a.right else 'wrong'}, {a.words}"
)
def test_answer_is_graded_as_it_deserves(answer: Answer, graders):
    chapter, entry = catalog.entry(answer.exercise)
    report = graders(chapter.stem).grade(
        Submission({answer.exercise: answer.source}), "answer", only=(entry.name,)
    )
    graded = report.exercises[0]
    complaints = [g["complaint"] for g in graded.groups if g["complaint"]]
    if answer.right:
        assert graded.points == graded.max_points, (graded.message, complaints)
    else:
        assert graded.attempted, graded.message
        assert graded.points < graded.max_points, "a wrong answer gets full points"
        assert graded.message
        if answer.near_miss:
            assert graded.near_miss == answer.near_miss, complaints


def test_every_exercise_has_three_right_and_five_wrong_answers():
    for stem in STEMS:
        for entry in catalog.chapter(stem).entries:
            mine = [a for a in ANSWERS if a.exercise == entry.name]
            assert sum(a.right for a in mine) >= 3, f"{entry.name} has too few right answers"
            assert sum(not a.right for a in mine) >= 5, f"{entry.name} has too few wrong answers"
