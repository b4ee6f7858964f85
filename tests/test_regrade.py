"""Regrading after a check is mended: what changes, why, and that nothing is written before it is wanted."""

import hashlib
import json
import os
import pty
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from autograder import catalog, cli, grading
from autograder import regrade as module
from autograder.course import Course, stored_report
from autograder.grading import ExerciseReport, Options, SubmissionReport
from samples.build import answers, fill
from tests.test_cli import DROPS_CROSSING, command, refused, write

STEM = "decoding"
CHAPTER = catalog.chapter(STEM)
NAME = "top_p_filter"
WORTH = CHAPTER.entry(NAME).points
RIGHT = answers(STEM)


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """Three graded submissions; the grades of ann and cyn were given by a check that was wrong."""
    folder = tmp_path_factory.mktemp("graded")
    for student, source in {"ann": RIGHT[NAME], "bob": DROPS_CROSSING, "cyn": RIGHT[NAME]}.items():
        write(folder / "in" / student / STEM / f"{STEM}.ipynb", fill(STEM, {NAME: source}))
    root = folder / "course"
    assert command("grade", STEM, folder / "in", "--course", root, "--workers", 1)[0] == 0
    for student in ("ann", "cyn"):
        as_if_graded_wrongly(root, student)
    return root


@pytest.fixture
def course(graded, tmp_path):
    return shutil.copytree(graded, tmp_path / "course")


def as_if_graded_wrongly(root: Path, student: str) -> None:
    """Puts another report into the course folder, with the fingerprint of other checks."""
    files = Course(root).submitted(STEM)
    _, report = stored_report(root / "autograded" / student / STEM / f"{STEM}.ipynb")
    for e in report.exercises:
        if e.name == NAME:
            e.points, e.passed, e.message = 0.0, False, "The mass is wrong."
    with Course(root).writer(STEM) as writer:
        writer.write(report, files[student], "other checks")


def scores(root: Path) -> dict[str, float]:
    return {n: p for n, p in sqlite3.connect(root / "gradebook.db").execute("SELECT student_id, SUM(COALESCE(manual_score, auto_score, 0)) FROM grade JOIN submitted_notebook n ON grade.notebook_id = n.id JOIN submitted_assignment a ON n.assignment_id = a.id GROUP BY student_id")}  # fmt: skip


def everything(root: Path) -> dict[str, str]:
    """All files of a folder with their contents' hashes."""
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*") if p.is_file()}  # fmt: skip


def regraded(root: Path, *more: str) -> dict:
    code, out, err = command("regrade", STEM, "--course", root, "--workers", 1, "--json", *more)
    assert code == 0, err
    return json.loads(out)


def test_whose_points_change_is_told_and_nothing_is_written(course):
    before = everything(course)
    code, out, err = command("regrade", STEM, "--course", course, "--workers", 1)
    assert code == 0, err  # progress may stand there
    assert "ann" in out and "cyn" in out and "bob" not in out
    assert NAME in out and f"+{WORTH}" in out and "The mass is wrong. → passed" in " ".join(out.split())
    assert "2 graded anew" in out and "nothing is written" in out
    assert everything(course) == before


def test_write_changes_the_gradebook_and_the_next_regrade_finds_nothing(course):
    found = regraded(course, "--write")
    assert found["written"] and found["up_to_date"] == ["bob"]
    (change,) = (c for c in found["changes"] if c["submission"] == "ann")
    assert (change["old_points"], change["new_points"]) == (0, WORTH)
    (exercise,) = change["exercises"]
    assert (exercise["name"], exercise["old_message"], exercise["new_message"]) == (
        NAME,
        "The mass is wrong.",
        "",
    )
    assert scores(course) == {"ann": WORTH, "bob": 0, "cyn": WORTH}
    again = regraded(course, "--write")
    assert again["changes"] == [] and len(again["up_to_date"]) == 3 and not again["written"]
    assert not (course / ".regrade").exists()


def test_a_manual_score_is_told_and_kept(course):
    with sqlite3.connect(course / "gradebook.db") as database:
        database.execute("UPDATE grade SET manual_score = 1.5 WHERE notebook_id IN (SELECT n.id FROM submitted_notebook n JOIN submitted_assignment a ON n.assignment_id = a.id WHERE student_id = 'cyn') AND cell_id IN (SELECT id FROM base_cell WHERE name = ?)", (f"check_{NAME}",))  # fmt: skip
    found = regraded(course, "--write")
    kept = {c["submission"]: c["exercises"][0]["manual_score"] for c in found["changes"]}
    assert kept == {"ann": None, "cyn": 1.5}
    assert scores(course) == {"ann": WORTH, "bob": 0, "cyn": 1.5}


def test_a_write_that_is_killed_while_it_grades_goes_on_where_it_stopped(course, monkeypatch):
    before = everything(course)
    real = grading.grade_many

    def killed(stem, files, *more):
        for report in real(stem, files, *more):
            yield report
            raise KeyboardInterrupt

    monkeypatch.setattr(grading, "grade_many", killed)
    assert command("regrade", STEM, "--course", course, "--workers", 1, "--write")[0] == 130
    journal = course / ".regrade" / f"{STEM}.jsonl"
    assert {n: h for n, h in everything(course).items() if n != ".regrade/decoding.jsonl"} == before
    journal.write_text(journal.read_text() + '\n{"fingerprint": "half a li')
    graded = []

    def watched(stem, files, *more):
        graded.extend(files)
        return real(stem, files, *more)

    monkeypatch.setattr(grading, "grade_many", watched)
    found = regraded(course, "--write")
    assert graded == ["cyn"] and found["graded"] == 2
    assert scores(course) == {"ann": WORTH, "bob": 0, "cyn": WORTH}
    assert not journal.exists()


def test_a_write_that_is_killed_while_it_writes_writes_the_rest_later(course, monkeypatch):
    from autograder.course import GradeWriter

    real = GradeWriter.write

    def killed(self, report, *more):
        if report.submission == "cyn":
            raise KeyboardInterrupt
        real(self, report, *more)

    monkeypatch.setattr(GradeWriter, "write", killed)
    assert command("regrade", STEM, "--course", course, "--workers", 1, "--write")[0] == 130
    assert scores(course) == {"ann": WORTH, "bob": 0, "cyn": 0}
    monkeypatch.setattr(GradeWriter, "write", real)
    found = regraded(course, "--write")
    assert [c["submission"] for c in found["changes"]] == ["cyn"] and "ann" in found["up_to_date"]
    assert scores(course) == {"ann": WORTH, "bob": 0, "cyn": WORTH}


def test_what_is_new_or_gone_is_named_and_left_alone(course):
    write(course / "submitted" / "dan" / STEM / f"{STEM}.ipynb", fill(STEM, {}))
    (course / "submitted" / "bob" / STEM / f"{STEM}.ipynb").unlink()
    (course / "submitted" / "bob" / STEM / "timestamp.txt").unlink(missing_ok=True)
    (course / "submitted" / "bob" / STEM).rmdir()
    found = regraded(course, "--write")
    assert found["not_graded"] == ["dan"] and found["not_collected"] == ["bob"]
    assert set(scores(course)) == {"ann", "bob", "cyn"}


@pytest.mark.parametrize(("answer", "written"), [("y", True), ("", False)])
def test_somebody_at_a_terminal_is_asked(course, answer, written):
    leader, follower = pty.openpty()
    program = Path(sys.executable).parent / "course-llm"
    process = subprocess.Popen([program, "regrade", STEM, "--course", course, "--workers", "1"], stdin=follower, stdout=follower, stderr=subprocess.PIPE)  # fmt: skip
    os.close(follower)
    os.write(leader, f"{answer}\n".encode())
    said = b""
    try:
        while part := os.read(leader, 4096):
            said += part
    except OSError:  # the terminal is closed
        pass
    assert process.wait() == 0, process.stderr.read()
    assert b"Write these 2 submissions?" in said
    assert scores(course)["ann"] == (WORTH if written else 0)


def test_the_same_words_are_explained_by_the_groups():
    def groups(*passed):
        return [{"name": n, "passed": p} for n, p in zip(("values", "errors"), passed, strict=True)]

    old = SubmissionReport(
        "s", [ExerciseReport("f", 0, 3, False, message="Wrong.", groups=groups(False, True))]
    )
    new = SubmissionReport(
        "s", [ExerciseReport("f", 1, 3, False, message="Wrong.", groups=groups(True, False))]
    )
    (change,) = module.compared(old, new, {}).exercises
    assert change.why == "passes now: values; fails now: errors"
    assert module.compared(old, old, {}).exercises == []


def test_exercises_that_came_or_went_are_changes():
    old = SubmissionReport("s", [ExerciseReport("f", 1, 3, False)])
    new = SubmissionReport("s", [ExerciseReport("g", 2, 3, False)])
    came, went = module.compared(old, new, {}).exercises
    assert (came.name, came.old_points, came.new_points) == ("g", None, 2)
    assert (went.name, went.old_points, went.new_points) == ("f", 1, None)


def test_force_grades_what_is_up_to_date(course):
    regrade = module.Regrade(Course(course), STEM, Options(), force=True)
    assert set(regrade.left) == {"ann", "bob", "cyn"}


def test_what_cannot_be_regraded_is_said(course, tmp_path):
    assert "nothing graded for loss" in refused("regrade", "loss", "--course", course)[1]
    assert "not a course folder" in refused("regrade", STEM, "--course", tmp_path / "no")[1]
    assert refused("regrade", STEM, "--course", course, "--workers", 0)[0] == 2
    assert cli.main(["regrade", "nothing", "--course", str(course)]) == 2
