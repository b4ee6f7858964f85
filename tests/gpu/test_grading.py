"""The course's own answers, graded with every tensor on the device."""

import pytest

from autograder import catalog
from autograder.grading import Grader, Options
from autograder.submission import Submission
from samples.build import answers


@pytest.mark.parametrize("stem", ["decoding", "masking", "kv_cache"])
def test_right_answers_earn_every_point_on_the_device(stem, device):
    with Grader(catalog.chapter(stem), Options(device=str(device))) as grader:
        report = grader.grade(Submission(answers(stem)), "someone")
    assert [(e.name, e.message) for e in report.exercises if not e.passed] == []
