"""Grading can be killed at any moment and run again: the gradebook equals that of an undisturbed run."""

import contextlib
import json
import random
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from samples.build import answers, fill

STEM = "masking"
KILLS = 20
STUDENTS = 12

pytestmark = pytest.mark.timeout(900)


def gradebook(course: Path) -> list[tuple]:
    """Every student's scores, by cell."""
    query = """
        SELECT student.id, base_cell.name, grade.auto_score, grade.needs_manual_grade
        FROM grade JOIN submitted_notebook ON grade.notebook_id = submitted_notebook.id
        JOIN submitted_assignment ON submitted_notebook.assignment_id = submitted_assignment.id
        JOIN student ON submitted_assignment.student_id = student.id
        JOIN base_cell ON grade.cell_id = base_cell.id
    """
    with sqlite3.connect(course / "gradebook.db") as db:
        return sorted(db.execute(query).fetchall())


def notebooks(course: Path) -> dict[str, list]:
    """The outputs of the autograded notebooks, by student."""
    paths = sorted((course / "autograded").glob(f"*/{STEM}/{STEM}.ipynb"))
    return {p.parts[-3]: [c.get("outputs") for c in json.loads(p.read_text())["cells"]] for p in paths}


def mixed_class(folder: Path) -> Path:
    """Writes a class that is right in every second exercise, each student in others."""
    right = answers(STEM)
    for i in range(STUDENTS):
        some = {name: source for j, (name, source) in enumerate(right.items()) if (j + i) % 2}
        target = folder / f"student{i:02}" / STEM
        target.mkdir(parents=True)
        (target / f"{STEM}.ipynb").write_text(json.dumps(fill(STEM, some)))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return mixed_class(tmp_path_factory.mktemp("class"))


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory) -> tuple[Path, list[dict]]:
    """The course after a run that nothing has disturbed, and its report."""
    course = tmp_path_factory.mktemp("undisturbed") / "course"
    command = ["course-llm", "grade", STEM, str(folder), "--course", str(course), "--workers", "1", "--json"]
    whole = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert whole.returncode == 0, whole.stderr
    return course, json.loads(whole.stdout)


def test_a_killed_run_goes_on_and_no_grade_is_lost_or_given_twice(folder, undisturbed, tmp_path, run):
    whole, first = undisturbed
    killed = tmp_path / "killed"
    command = ["course-llm", "grade", STEM, str(folder), "--course", str(killed), "--workers", "2", "--json"]
    moments, done = random.Random(11), []
    for _ in range(KILLS):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(moments.uniform(0.5, 7))
        process.send_signal(signal.SIGKILL)
        process.wait()
        done.append(len(list((killed / "autograded").glob("*/*/*.ipynb"))))
    assert done == sorted(done)  # what is finished stays
    last = run(*command)
    assert last.returncode == 0, last.stderr
    assert gradebook(killed) == gradebook(whole)
    assert notebooks(killed) == notebooks(whole)
    second = json.loads(last.stdout)
    assert [(r["submission"], r["points"]) for r in first] == [(r["submission"], r["points"]) for r in second]
    assert not list(killed.rglob("*.tmp")) or gradebook(killed)


def test_a_gradebook_that_is_locked_is_waited_for(folder, tmp_path, run):
    course = tmp_path / "course"
    released = run("course-llm", "release", STEM, "--course", course)
    assert released.returncode == 0, released.stderr
    lock = sqlite3.connect(course / "gradebook.db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    blocked = run("course-llm", "grade", STEM, folder, "--course", course, "--workers", "1")
    lock.execute("ROLLBACK")
    lock.close()
    assert blocked.returncode == 1
    assert len(blocked.stderr.strip().splitlines()) == 1 and "gradebook" in blocked.stderr
    after = run("course-llm", "grade", STEM, folder, "--course", course, "--workers", "1")
    assert after.returncode == 0, after.stderr
    assert len(gradebook(course)) == STUDENTS * len(answers(STEM))


def test_a_gradebook_that_is_none_is_a_clear_error(folder, tmp_path, run):
    course = tmp_path / "course"
    run("course-llm", "release", STEM, "--course", course)
    (course / "gradebook.db").write_bytes(b"this is not a database" * 100)
    broken = run("course-llm", "grade", STEM, folder, "--course", course)
    assert broken.returncode == 1
    assert len(broken.stderr.strip().splitlines()) == 1 and "gradebook" in broken.stderr
    assert (course / "gradebook.db").read_bytes().startswith(b"this is not")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of its own and a way to give it another size."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True
    ).returncode:
        pytest.skip("only root may mount a disk")

    def resize(size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", place], check=True)

    yield place, resize
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_is_a_clear_error_and_loses_nothing(folder, undisturbed, small_disk, run):
    disk, resize = small_disk
    command = ("course-llm", "grade", STEM, folder, "--course", disk / "course", "--workers", "1")
    full = run(*command)
    assert full.returncode == 1
    assert "make room and run this again" in full.stderr and "Traceback" not in full.stderr
    kept = len(list((disk / "course" / "autograded").glob("*/*/*.ipynb")))
    resize("60m")
    after = run(*command)
    assert after.returncode == 0, after.stderr
    assert kept == 0 or f"{kept} of {STUDENTS} submissions are graded already" in after.stderr
    assert gradebook(disk / "course") == gradebook(undisturbed[0])
    assert notebooks(disk / "course") == notebooks(undisturbed[0])


def test_a_killed_grader_leaves_no_process_behind(folder, tmp_path):
    """Its workers and their sandboxes end with it, though it can't tell them."""
    course = tmp_path / "course"
    command = ["course-llm", "grade", STEM, str(folder), "--course", str(course), "--workers", "2"]
    grader = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def alive() -> list[Path]:
        """The processes that have this course in their command line: the grader and what was forked from it."""
        found = []
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(course).encode() in place.read_bytes():
                    found.append(place.parent)
        return found

    wait_for(lambda: len(alive()) >= 3)
    grader.kill()
    grader.wait()
    wait_for(lambda: not alive())


def wait_for(condition, seconds: float = 120) -> None:
    """Waits until something holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
