"""Item analysis against values that were worked out by hand."""

import json
import math
import xml.dom.minidom

import numpy as np
import pytest

from autograder import catalog, items
from autograder.course import CONFIG
from autograder.grading import ExerciseReport, SubmissionReport
from tests.test_cli import command, refused, write

nan = math.nan


def report(name: str, *points: float, most: float = 1, missing: tuple[int, ...] = ()) -> SubmissionReport:
    exercises = [
        ExerciseReport(f"f{i}", p, most, p == most, attempted=i not in missing) for i, p in enumerate(points)
    ]
    return SubmissionReport(name, exercises)


def equal(found, wanted) -> None:
    np.testing.assert_allclose(np.asarray(found, float), np.asarray(wanted, float), atol=1e-12)


# four submissions, three items, totals 3, 2, 1, 0
GUTTMAN = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]], float)


def test_alpha_of_a_perfect_scale_of_three_items():
    # item variances 3/16, 4/16, 3/16, variance of the totals 5/4: 3/2 (1 - (10/16)/(5/4)) = 3/4
    assert items.cronbach_alpha(GUTTMAN) == pytest.approx(0.75)


def test_alpha_is_one_for_equal_items_and_zero_for_independent_ones():
    assert items.cronbach_alpha(np.array([[1, 1], [0, 0], [1, 1]], float)) == pytest.approx(1)
    assert items.cronbach_alpha(np.array([[1, 1], [1, 0], [0, 1], [0, 0]], float)) == pytest.approx(0)


@pytest.mark.parametrize("points", [[[1], [0]], [[1, 2]], [[1, 2], [2, 1]], [[1, 1], [1, 1]]])
def test_alpha_is_not_defined_without_items_submissions_or_differences(points):
    assert math.isnan(items.cronbach_alpha(np.array(points, float)))


def test_item_rest_correlation_leaves_the_item_out():
    # item 0 is 1 1 1 0 and the rest 2 1 0 0: covariance sum 0.75, squares 0.75 and 2.75
    # item 1 is 1 1 0 0 and the rest 2 1 1 0: covariance sum 1, squares 1 and 2
    edge = 0.75 / math.sqrt(0.75 * 2.75)
    equal(items.item_rest(GUTTMAN), [edge, 1 / math.sqrt(2), edge])


def test_item_rest_correlation_agrees_with_numpy():
    points = np.random.default_rng(3).integers(0, 5, (40, 6)).astype(float)
    wanted = [np.corrcoef(points[:, i], np.delete(points, i, 1).sum(1))[0, 1] for i in range(6)]
    equal(items.item_rest(points), wanted)


def test_item_rest_correlation_is_not_defined_where_nobody_differs():
    equal(items.item_rest(np.array([[1, 0], [1, 1], [1, 0]], float)), [nan, nan])
    equal(items.item_rest(np.array([[1, 0], [0, 1]], float)), [nan, nan])


def test_upper_lower_index_of_ten():
    # 27 % of ten are three: the upper three have 1, 1, 0 of item 0, the lower three 0, 0, 1
    item = [1, 1, 0, 1, 1, 0, 1, 0, 0, 1]
    points = np.array([[a, 30 - 2 * i] for i, a in enumerate(item)], float)
    equal(items.upper_lower(points, [1, 30]), [2 / 3 - 1 / 3, ((30 + 28 + 26) - (16 + 14 + 12)) / 3 / 30])


def test_those_who_tie_at_the_edge_share_its_place():
    # four submissions, groups of one; two share the highest total, one of them right in item 0
    points = np.array([[1, 1], [0, 2], [1, 0], [0, 0]], float)
    wanted = [0.5 - 0, (1.5 - 0) / 2]
    for order in ([0, 1, 2, 3], [1, 0, 3, 2], [3, 1, 2, 0]):
        equal(items.upper_lower(points[order], [1, 2]), wanted)


def test_upper_lower_index_is_not_defined_where_all_totals_are_equal():
    equal(items.upper_lower(np.array([[1, 0], [0, 1], [1, 0]], float), [1, 1]), [nan, nan])
    equal(items.upper_lower(np.array([[1, 0]], float), [1, 1]), [nan, nan])


def test_right_wrong_near_misses_and_groups_are_counted():
    failed = [{"name": "values", "passed": False}, {"name": "errors", "passed": True}]
    first = [
        ExerciseReport("f", 4, 4, True),
        ExerciseReport("f", 0, 4, False, near_miss="off-by-one", groups=failed),
        ExerciseReport("f", 2, 4, False, near_miss="off-by-one", groups=failed[::-1]),
        ExerciseReport("f", 1, 4, False, near_miss="transposed", groups=[{"name": "errors", "passed": False}]),
        ExerciseReport("f", 0, 4, False, message="The time is up"),
        ExerciseReport("f", 0, 4, False, attempted=False),
    ]  # fmt: skip
    reports = [SubmissionReport(str(i), [e], elapsed_s=i) for i, e in enumerate(first)]
    reports[-1].error = "cannot be read"
    found = items.analyse("decoding", reports)
    (item,) = found.items
    assert (item.attempted, item.right, item.other_wrong) == (5, 1, 1)
    assert item.share_right == pytest.approx(0.2) and item.mean_points == pytest.approx(7 / 6)
    assert list(item.near_misses.items()) == [("off-by-one", 2), ("transposed", 1)]
    assert item.groups == {"values": 2, "errors": 1}
    assert (found.submissions, found.unreadable, found.grading_s) == (6, 1, 2.5)
    assert math.isnan(found.alpha)


def test_what_is_not_defined_is_null_in_json_and_empty_in_csv():
    found = items.analyse("decoding", [report("a", 1, 0, missing=(1,)), report("b", 1, 0, missing=(1,))])
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["alpha"] is None and data["items"][1]["share_right"] is None
    line = items.as_csv(found).splitlines()[2]
    assert line == "f1,2,0,0,,0.0000,1,,,,"


def test_a_class_of_a_thousand_is_judged_like_one_of_ten_of_its_kind():
    kind = [report(str(i), *np.random.default_rng(i).integers(0, 2, 12)) for i in range(10)]
    few, many = items.analyse("decoding", kind), items.analyse("decoding", kind * 100)
    assert many.submissions == 1000 and many.alpha == pytest.approx(few.alpha)
    equal([i.item_rest for i in many.items], [i.item_rest for i in few.items])
    assert [i.right for i in many.items] == [100 * i.right for i in few.items]


@pytest.fixture
def course(tmp_path):
    """A course folder with three graded submissions."""
    write(tmp_path / "nbgrader_config.py", CONFIG)
    names = [entry.name for entry in catalog.chapter("decoding").entries[:3]]
    for student, points in {"ann": (4, 4, 4), "bob": (4, 2, 0), "<b>cy</b>": (0, 0, 0)}.items():
        exercises = [ExerciseReport(n, p, 4, p == 4, near_miss=None if p == 4 else "like-this") for n, p in zip(names, points, strict=True)]  # fmt: skip
        stored = {"fingerprint": "x", "report": SubmissionReport(student, exercises).to_json()}
        folder = tmp_path / "autograded" / student.replace("/", "_") / "decoding"
        write(folder / "decoding.ipynb", {"cells": [], "metadata": {"course_llm": stored}})
    return tmp_path


def test_the_command_prints_a_table_json_and_csv(course):
    code, out, err = command("items", "decoding", "--course", course)
    assert (code, err) == (0, "")
    assert "top_k_filter" in out and "67%" in out and "like-this (2)" in out
    data = json.loads(command("items", "decoding", "--course", course, "--json")[1])
    assert [i["attempted"] for i in data["items"]] == [3, 3, 3]
    assert data["items"][1]["near_misses"] == {"like-this": 2}
    lines = command("items", "decoding", "--course", course, "--csv")[1].splitlines()
    assert len(lines) == 4 and lines[2].startswith("top_k_filter,3,3,1,0.3333,2.0000,4,")


def test_the_picture_is_a_drawing_with_words_for_both_themes(course, tmp_path):
    path = tmp_path / "items.svg"
    assert command("items", "decoding", "--course", course, "--plot", path)[0] == 0
    svg = path.read_text()
    words = [n.firstChild.data for n in xml.dom.minidom.parseString(svg).getElementsByTagName("text")]
    assert {"top_k_filter", "right", "like-this (2)", "share of 3 submissions"} <= set(words)
    assert "prefers-color-scheme: dark" in svg
    png = tmp_path / "items.png"
    assert command("items", "decoding", "--course", course, "--plot", png)[0] == 0
    assert png.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_done_is_said(course, tmp_path):
    assert "ends in .svg or .png" in refused("items", "decoding", "--course", course, "--plot", "a.gif")[1]
    assert "nothing graded for loss" in refused("items", "loss", "--course", course)[1]
    assert "not a course folder" in refused("items", "loss", "--course", tmp_path / "no")[1]
    assert refused("items", "decoding", "--course", course, "--json", "--csv")[0] == 2
