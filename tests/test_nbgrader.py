"""nbgrader as its users know it: the same gradebook by every way, the exchange, validate, and none of the stock grader's faults."""

import contextlib
import copy
import html
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import nbformat
import pytest

from autograder import catalog, cli
from autograder.course import CONFIG, Course
from samples.build import answers, cell_index, fill, near_miss_sources

STEM = "decoding"
CHAPTER = catalog.chapter(STEM)
RIGHT = answers(STEM)
NAMES = [entry.name for entry in CHAPTER.entries]
FEW = {name: RIGHT[name] for name in NAMES[:3]}
FEW_POINTS = sum(CHAPTER.entry(name).points for name in FEW)
DUE = "2026-03-01 12:00:00"
LATE_IS_ZERO = '\nc.LateSubmissionPlugin.penalty_method = "zero"\n'
PROGRAMS = Path(sys.executable).parent


def sample_class() -> dict[str, dict | str]:
    """One student for each thing that goes wrong with the stock grader, and some for whom all is well."""
    students: dict[str, dict | str] = {
        "ada": fill(STEM, RIGHT),
        "carl": fill(STEM, {**FEW, **dict(list(near_miss_sources(STEM, 0).items())[:2])}),
        "dora": fill(STEM, {}),
        "hugo": fill(STEM, {**FEW, NAMES[1]: FEW[NAMES[1]].replace(":", "", 1)}),
        "liam": json.dumps(fill(STEM, RIGHT))[:-40],
    }
    students["ines"] = fill(STEM, FEW)
    del students["ines"]["cells"][cell_index(students["ines"], f"check_{NAMES[0]}")]
    students["jun"] = fill(STEM, FEW)
    copied = copy.deepcopy(students["jun"]["cells"][cell_index(students["jun"], f"check_{NAMES[1]}")])
    students["jun"]["cells"].insert(5, copied)
    students["kaja"] = fill(STEM, {NAMES[0]: FEW[NAMES[0]]})
    for name, score in zip(NAMES, ["1000", "-1", "nan", "False", "10000"], strict=False):
        cell = students["kaja"]["cells"][cell_index(students["kaja"], f"check_{name}")]
        cell["source"] = score
        cell["metadata"]["nbgrader"]["points"] = 1000
        cell["outputs"] = [result(score)]
    loud = "import sys, warnings\nwarnings.warn('only a warning')\nprint('loud', file=sys.stderr)\nprint('x' * 30_000_000)\n"
    students["noor"] = fill(STEM, {**FEW, NAMES[0]: loud + FEW[NAMES[0]]})
    students["noor"]["cells"][cell_index(students["noor"], NAMES[0])]["outputs"] = [stream("x" * 30_000_000)]
    loop = f"def {NAMES[0]}(*args, **kwargs):\n    while True:\n        pass\n"
    quits = f"import os\n\n\ndef {NAMES[1]}(*args, **kwargs):\n    os._exit(0)\n"
    students["otto"] = fill(STEM, {**FEW, NAMES[0]: loop, NAMES[1]: quits})
    return students


def result(text: str) -> dict:
    return {
        "output_type": "execute_result",
        "execution_count": 1,
        "metadata": {},
        "data": {"text/plain": text},
    }


def stream(text: str) -> dict:
    return {"output_type": "stream", "name": "stdout", "text": text}


def make_course(root: Path, students: Collection[str] = (), settings: str = "") -> Path:
    """A course folder with the class, or some of it, handed in: ada in time, carl two hours late."""
    root.mkdir(parents=True)
    (root / "nbgrader_config.py").write_text(CONFIG + LATE_IS_ZERO + settings)
    for student, notebook in sample_class().items():
        if students and student not in students:
            continue
        folder = root / "submitted" / student / STEM
        folder.mkdir(parents=True)
        text = notebook if isinstance(notebook, str) else json.dumps(notebook)
        (folder / f"{STEM}.ipynb").write_text(text)
    (root / "submitted" / "ada" / STEM / "timestamp.txt").write_text("2026-03-01 10:00:00.5 UTC")
    (root / "submitted" / "carl" / STEM / "timestamp.txt").write_text("2026-03-01 14:00:00 UTC")
    return root


def gradebook(root: Path):
    """The gradebook of a course folder, wherever its configuration has it."""
    return Course(root).api().gradebook


def prepare(root: Path) -> None:
    """Sets a due date, and a point that hugo was given by hand before."""
    with gradebook(root) as book:
        book.update_or_create_assignment(STEM, duedate=DUE)
        book.add_student("hugo")
        (notebook,) = book.add_submission(STEM, "hugo").notebooks
        next(g for g in notebook.grades if g.cell.name == f"check_{NAMES[1]}").manual_score = 1.0
        book.db.commit()


def nbgrader(root: Path, *arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess:
    """Runs nbgrader in a folder as a user would."""
    done = subprocess.run([str(PROGRAMS / "nbgrader"), *arguments], cwd=root, capture_output=True, text=True,
                          timeout=900, env=os.environ | environment)  # fmt: skip
    assert done.returncode == code, done.stderr[-3000:]
    return done


def command(*arguments: object) -> str:
    """Runs our command, which must succeed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main([str(a) for a in arguments]) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """The class through our commands, and the reports of grading."""
    root = make_course(tmp_path_factory.mktemp("ours") / "course")
    command("release", STEM, "--course", root)
    prepare(root)
    reports = json.loads(command("grade", STEM, root / "submitted", "--course", root, "--json"))
    command("feedback", STEM, "--course", root)
    command("export", STEM, "--course", root)
    return root, {r["submission"]: r for r in reports}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """The same class through nbgrader's commands, and what autograde said."""
    root = make_course(tmp_path_factory.mktemp("theirs") / "course")
    source = root / "source" / STEM
    source.mkdir(parents=True)
    (source / f"{STEM}.ipynb").write_text(json.dumps(CHAPTER.notebook))
    nbgrader(root, "generate_assignment", STEM, "--create")
    prepare(root)
    done = nbgrader(root, "autograde", STEM)
    nbgrader(root, "generate_feedback", STEM)
    nbgrader(root, "export", "--to", "decoding.csv")
    return root, done.stderr


# the same gradebook


def entries(root: Path) -> dict:
    """All that nbgrader stores of an assignment: cells, submissions, grades, comments."""
    with gradebook(root) as book:
        assignment = book.find_assignment(STEM)
        (notebook,) = assignment.notebooks
        found = {"cells": [(c.name, c.source, c.locked, str(c.cell_type), c.checksum) for c in notebook.source_cells],
                 "points": {c.name: c.max_score for c in notebook.grade_cells},
                 "students": sorted(s.id for s in book.students)}  # fmt: skip
        for handed_in in assignment.submissions:
            (work,) = handed_in.notebooks
            found[handed_in.student.id] = {
                "timestamp": handed_in.timestamp,
                "late": handed_in.total_seconds_late,
                "penalty": work.late_submission_penalty,
                "needs_manual_grade": handed_in.needs_manual_grade,
                "score": (handed_in.score, handed_in.max_score),
                "grades": {g.cell.name: (g.auto_score, g.manual_score, g.extra_credit, g.needs_manual_grade) for g in work.grades},
                "comments": {c.cell.name: (c.auto_comment, c.manual_comment) for c in work.comments},
            }  # fmt: skip
        return found


def test_nbgrader_and_our_command_leave_the_same_gradebook(ours, theirs):
    mine, stock = entries(ours[0]), entries(theirs[0])
    assert mine.keys() == stock.keys() >= sample_class().keys()
    for name in mine:
        assert mine[name] == stock[name], name


def test_the_gradebook_has_what_the_report_says(ours):
    root, reports = ours
    stored = entries(root)
    for student, report in reports.items():
        graded = {name: score for name, (score, *_) in stored[student]["grades"].items()}
        assert graded == {f"check_{e['name']}": pytest.approx(e["points"]) for e in report["exercises"]}


def test_late_seconds_penalties_and_manual_grades_are_kept(ours):
    stored = entries(ours[0])
    assert stored["ada"]["late"] == 0 and stored["carl"]["late"] == 7200
    assert stored["carl"]["penalty"] == stored["carl"]["score"][0] > 0
    assert stored["ada"]["penalty"] is None
    assert stored["hugo"]["grades"][f"check_{NAMES[1]}"] == (0, 1, None, True)
    assert stored["hugo"]["needs_manual_grade"] and not stored["ada"]["needs_manual_grade"]
    assert stored["dora"]["comments"] == {name: ("No response.", None) for name in NAMES}


def cells_of(root: Path, student: str) -> list[tuple]:
    notebook = nbformat.read(root / "autograded" / student / STEM / f"{STEM}.ipynb", 4)
    return [(c.cell_type, c.id, c.source, c.metadata, c.get("outputs")) for c in notebook.cells]


def test_the_autograded_notebooks_are_the_same(ours, theirs):
    for student in sample_class():
        assert cells_of(ours[0], student) == cells_of(theirs[0], student), student


def page(root: Path, student: str) -> str:
    return (root / "feedback" / student / STEM / f"{STEM}.html").read_text()


def test_the_feedback_pages_and_the_export_are_the_same(ours, theirs):
    for student in sample_class():
        assert page(ours[0], student) == page(theirs[0], student), student
    assert (ours[0] / f"{STEM}.csv").read_text() == (theirs[0] / f"{STEM}.csv").read_text()
    assert len((ours[0] / f"{STEM}.csv").read_text().splitlines()) == len(sample_class()) + 1


def test_the_released_notebooks_are_the_same_and_blank(ours, theirs):
    mine, stock = (
        json.loads((root / "release" / STEM / f"{STEM}.ipynb").read_text()) for root, _ in (ours, theirs)
    )
    assert mine == stock
    text = json.dumps(mine)
    assert "raise NotImplementedError" in text and "BEGIN SOLUTION" not in text


def test_grading_again_by_the_other_way_changes_nothing(ours):
    """The formgrader's button after our command: what is graded stays as it is."""
    root, _ = ours
    before = entries(root)
    nbgrader(root, "autograde", STEM, "--student", "dora", "--force")
    assert entries(root) == before
    command("grade", STEM, root / "submitted", "--course", root)  # dora's notebook is read-only now
    assert entries(root) == before


# feedback


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", page))


def test_feedback_shows_points_diagnosis_and_where_the_book_explains_it(ours):
    root, reports = ours
    text = text_of(page(root, "carl"))
    wrong = [e for e in reports["carl"]["exercises"] if e["near_miss"]]
    assert wrong
    for found in wrong:
        assert found["message"] in text
        assert found["see"] in text
    assert all(f'<a href="#check_{e.name}">{e.name}</a>' in page(root, "carl") for e in CHAPTER.entries)
    assert "Test cell" not in text
    total = reports["carl"]["points"]
    assert f"{total:g}" in text and f"{CHAPTER.points}" in text


def test_feedback_tells_no_hidden_case(ours):
    """Nothing of the checks is in the page: no values, no expected results, no code of the cases."""
    root, _ = ours
    for student in sample_class():
        text = text_of(page(root, student))
        handed_in = (root / "submitted" / student / STEM / f"{STEM}.ipynb").read_text()
        for word in ("tensor(", "expected", "near_miss", ".expect(", "assert"):
            assert word not in text or word in handed_in, (student, word)


# the stock grader's faults


def points(root: Path, student: str) -> dict[str, float]:
    return {name.removeprefix("check_"): g[0] for name, g in entries(root)[student]["grades"].items()}


def test_a_warning_on_standard_error_costs_nothing(ours):
    assert sum(points(ours[0], "noor").values()) == FEW_POINTS


def test_a_forged_output_or_maximum_earns_nothing_more(ours):
    earned = points(ours[0], "kaja")
    assert earned.pop(NAMES[0]) == CHAPTER.entry(NAMES[0]).points
    assert set(earned.values()) == {0}


def test_a_copied_test_cell_costs_neither_its_student_nor_those_after(ours):
    assert sum(points(ours[0], "jun").values()) == FEW_POINTS
    assert list(entries(ours[0])) and {"kaja", "liam", "noor", "otto"} <= set(entries(ours[0]))


def test_a_deleted_test_cell_is_graded(ours):
    assert sum(points(ours[0], "ines").values()) == FEW_POINTS


def test_a_killed_process_and_an_endless_loop_earn_nothing_and_cost_only_themselves(ours):
    root, reports = ours
    earned = points(root, "otto")
    assert earned[NAMES[0]] == earned[NAMES[1]] == 0
    assert earned[NAMES[2]] == CHAPTER.entry(NAMES[2]).points
    told = {e["name"]: e["message"] for e in reports["otto"]["exercises"]}
    assert "time is up" in told[NAMES[0]] and "ended by itself" in told[NAMES[1]]


def test_a_syntax_error_costs_only_its_exercise(ours):
    earned = points(ours[0], "hugo")
    assert earned[NAMES[1]] == 0
    assert sum(earned.values()) == FEW_POINTS - CHAPTER.entry(NAMES[1]).points


def test_thirty_megabytes_of_output_are_not_kept(ours, theirs):
    for root, _ in (ours, theirs):
        assert (root / "autograded" / "noor" / STEM / f"{STEM}.ipynb").stat().st_size < 1 << 20
        assert len(page(root, "noor")) < 2 << 20


def test_a_notebook_of_broken_json_gets_a_row_and_feedback(ours):
    root, reports = ours
    assert "its JSON is broken" in reports["liam"]["error"]
    assert sum(points(root, "liam").values()) == 0
    assert "its JSON is broken" in text_of(page(root, "liam"))


def test_autograde_ends_well_though_the_class_does_not(theirs):
    _, log = theirs
    assert "Traceback" not in log
    assert "its JSON is broken" in log


# validate


@pytest.fixture
def elsewhere(tmp_path):
    """A folder with no configuration of nbgrader in or above it."""
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def validate(folder: Path, notebook: dict, code: int) -> str:
    (folder / "mine.ipynb").write_text(json.dumps(notebook))
    return nbgrader(folder, "validate", "mine.ipynb", code=code).stdout


def test_validate_passes_right_answers_wherever_it_runs(elsewhere):
    assert "Success" in validate(elsewhere, fill(STEM, RIGHT), 0)


def test_validate_fails_wrong_answers_with_an_exit_code(elsewhere):
    name, wrong = next(iter(near_miss_sources(STEM, 0).items()))
    told = validate(elsewhere, only(fill(STEM, {name: wrong}), name), 1)
    assert "VALIDATION FAILED ON 1 CELL" in told
    assert f"{name} fails" in told


def only(notebook: dict, name: str) -> dict:
    """The notebook up to an exercise, with no other exercise in it."""
    others = {n for other in NAMES if other != name for n in (other, f"check_{other}")}
    cells = [c for c in notebook["cells"] if c["metadata"]["nbgrader"]["grade_id"] not in others]
    return {**notebook, "cells": cells}


def test_validate_fails_on_a_notebook_that_is_not_there(elsewhere):
    assert "There is no notebook other.ipynb" in nbgrader(elsewhere, "validate", "other.ipynb", code=1).stderr


# settings


def test_settings_of_the_machine_hold_for_our_commands_and_the_course_folder_has_the_last_word(
    tmp_path, monkeypatch
):
    machine, course = tmp_path / "machine", tmp_path / "course"
    for folder in (machine, course):
        folder.mkdir()
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(machine))
    everybody = f'c = get_config()\nc.Exchange.root = "{tmp_path}"\nc.CourseDirectory.course_id = "other"\n'
    (machine / "nbgrader_config.py").write_text(everybody + 'c.CourseDirectory.root = "/"\n')
    (course / "nbgrader_config.py").write_text(CONFIG)
    api = Course(course).api()
    assert api.exchange_root == str(tmp_path)
    assert (api.course_id, api.coursedir.root) == ("course_llm", str(course))


# the exchange


def test_an_assignment_goes_through_the_exchange_and_its_feedback_comes_back(tmp_path):
    exchange = tmp_path / "exchange"
    exchange.mkdir(mode=0o777)
    exchange.chmod(0o777)
    place = f'\nc.Exchange.root = "{exchange}"\n'
    course, desk = tmp_path / "course", tmp_path / "desk"
    command("release", STEM, "--course", course)
    desk.mkdir()
    (course / "nbgrader_config.py").write_text(CONFIG + place)
    (desk / "nbgrader_config.py").write_text(
        f'c = get_config()\nc.CourseDirectory.course_id = "course_llm"{place}'
    )

    nbgrader(course, "release_assignment", STEM)
    nbgrader(desk, "fetch_assignment", STEM)
    notebook = desk / STEM / f"{STEM}.ipynb"
    assert json.loads(notebook.read_text())["cells"]
    notebook.write_text(json.dumps(fill(STEM, FEW)))
    nbgrader(desk, "submit", STEM)
    assert "collected 1 submissions" in command("collect", STEM, "--course", course)
    (student,) = os.listdir(course / "submitted")
    assert (course / "submitted" / student / STEM / "timestamp.txt").exists()

    (report,) = json.loads(command("grade", STEM, course / "submitted", "--course", course, "--json"))
    assert report["points"] == FEW_POINTS
    assert entries(course)[student]["timestamp"] is not None
    command("feedback", STEM, "--course", course)
    nbgrader(course, "release_feedback", STEM)
    nbgrader(desk, "fetch_feedback", STEM)
    (returned,) = desk.glob(f"{STEM}/feedback/*/{STEM}.html")
    assert f"{FEW_POINTS}" in text_of(returned.read_text())
