"""The gradebook on PostgreSQL by nbgrader's `db_url`: a real server, and the same grades as with SQLite."""

import csv
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from autograder import cli
from autograder.course import CONFIG, Course, CourseError, fingerprint
from autograder.grading import Options, grade_many
from tests.postgres import NAME, PASSWORD, URL_PASSWORD, postgres, programs
from tests.test_nbgrader import (
    PROGRAMS,
    STEM,
    cells_of,
    command,
    entries,
    make_course,
    nbgrader,
    page,
    prepare,
)

psycopg = pytest.importorskip(
    "psycopg", reason="the driver of PostgreSQL is not installed: pip install '.[postgres]'"
)
pytestmark = pytest.mark.skipif(
    programs() is None, reason="PostgreSQL is not installed: apt install postgresql"
)

CLASS = ("ada", "carl", "dora", "hugo", "liam")


@pytest.fixture(scope="module")
def server():
    with postgres() as server:
        yield server


def on(url: str) -> str:
    """The line of nbgrader_config.py that puts the gradebook there."""
    return f"c.CourseDirectory.db_url = {url!r}\n"


def graded_by_us(root: Path) -> Path:
    """Release, grade, feedback and export by our commands."""
    command("release", STEM, "--course", root)
    prepare(root)
    command("grade", STEM, root / "submitted", "--course", root)
    command("feedback", STEM, "--course", root)
    command("export", STEM, "--course", root)
    return root


@pytest.fixture(scope="module")
def sqlite(tmp_path_factory):
    return graded_by_us(make_course(tmp_path_factory.mktemp("sqlite") / "course", CLASS))


@pytest.fixture(scope="module")
def ours(tmp_path_factory, server):
    return graded_by_us(make_course(tmp_path_factory.mktemp("ours") / "course", CLASS, on(server.database("ours"))))  # fmt: skip


@pytest.fixture(scope="module")
def theirs(tmp_path_factory, server):
    """The class on PostgreSQL through nbgrader's own commands."""
    root = make_course(tmp_path_factory.mktemp("theirs") / "course", CLASS, on(server.database("theirs")))
    command("release", STEM, "--course", root)
    prepare(root)
    nbgrader(root, "autograde", STEM)
    nbgrader(root, "generate_feedback", STEM)
    nbgrader(root, "export", "--to", f"{STEM}.csv")
    return root


def rows(root: Path) -> list[dict]:
    """The export by student; the database gives them in no order."""
    with open(root / f"{STEM}.csv") as file:
        return sorted(csv.DictReader(file), key=lambda row: row["student_id"])


def test_postgresql_and_sqlite_hold_the_same_grades(sqlite, ours, theirs):
    expected = entries(sqlite)
    assert set(CLASS) <= expected.keys() and expected["ada"]["score"][0] > expected["carl"]["score"][0] > 0
    assert expected["carl"]["penalty"] and expected["hugo"]["needs_manual_grade"]
    for root in (ours, theirs):
        found = entries(root)
        assert found.keys() == expected.keys()
        for name in expected:
            assert comparable(found[name]) == comparable(expected[name]), (root, name)
        assert not (root / "gradebook.db").exists()


def comparable(entry):
    """Without the order in which a database gives cells, which it need not keep."""
    return sorted(entry, key=str) if isinstance(entry, list) else entry


def test_notebooks_feedback_and_export_are_those_of_sqlite(sqlite, ours, theirs):
    for root in (ours, theirs):
        for student in CLASS:
            assert cells_of(root, student) == cells_of(sqlite, student), student
            assert page(root, student) == page(sqlite, student), student
        assert rows(root) == rows(sqlite) and len(rows(root)) == len(CLASS)


def test_grading_again_grades_nothing_twice(ours, capsys):
    before = entries(ours)
    command("grade", STEM, ours / "submitted", "--course", ours)
    assert f"{len(CLASS)} of {len(CLASS)} submissions are graded already" in capsys.readouterr().err
    command("grade", STEM, ours / "submitted", "--course", ours, "--force", "--workers", "2")
    assert entries(ours) == before


def test_a_new_database_is_filled_again(sqlite, server, tmp_path, capsys, monkeypatch):
    """A course that moves from SQLite has notebooks that are graded and a gradebook that is empty; the password is in a file."""
    url = (
        server.database("moved").replace("postgresql:", "postgresql+psycopg:").replace(f":{URL_PASSWORD}", "")
    )
    passwords = tmp_path / "passwords"
    passwords.write_text(f"127.0.0.1:{server.port}:moved:{NAME}:{PASSWORD}\n")
    passwords.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    root = moved(sqlite, tmp_path / "course", url)
    command("release", STEM, "--course", root)
    reports = json.loads(command("grade", STEM, root / "submitted", "--course", root, "--json"))
    assert "already" not in capsys.readouterr().err
    found = entries(root)
    assert {r["submission"]: r["points"] for r in reports} == {s: sum_of(found[s]) for s in CLASS}


def sum_of(entry: dict) -> float:
    return sum(automatic for automatic, *_ in entry["grades"].values())


def moved(root: Path, target: Path, url: str) -> Path:
    """A copy of a course folder with its gradebook elsewhere."""
    shutil.copytree(root, target)
    (target / "nbgrader_config.py").write_text(CONFIG + on(url))
    return target


# what goes wrong


def refused(capsys, *arguments: object) -> str:
    """What our command says when it fails: one line, without the password."""
    capsys.readouterr()
    assert cli.main([str(a) for a in arguments]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "the gradebook of" in line and PASSWORD not in line and URL_PASSWORD not in line
    return line


def test_a_server_that_is_down_is_one_line(sqlite, server, tmp_path, capsys):
    root = moved(sqlite, tmp_path / "course", server.database("down"))
    handed_in = root / "submitted"
    server.stop()
    try:
        for name, *rest in [["release"], ["collect"], ["grade", handed_in], ["feedback"], ["export"]]:
            told = refused(capsys, name, STEM, *rest, "--course", root)
            assert "Connection refused" in told and "see that its server runs" in told
            assert str(root / "nbgrader_config.py") in told
        done = subprocess.run([PROGRAMS / "course-llm", "grade", STEM, handed_in, "--course", root], capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1
    finally:
        server.start()
    command("grade", STEM, handed_in, "--course", root)
    assert set(CLASS) <= entries(root).keys()


def test_a_server_that_goes_away_half_way_loses_nothing(sqlite, server, tmp_path, capsys):
    """What was graded before stays, and the rest is graded by the next run."""
    root = moved(sqlite, tmp_path / "course", server.database("half_way"))
    handed_in = root / "submitted"
    course = Course(root)
    course.release(STEM)
    options = Options()
    files = course.collect(STEM, handed_in)
    with pytest.raises(CourseError, match="see that its server runs"), course.writer(STEM) as writer:
        for done, report in enumerate(grade_many(STEM, files, options)):
            if done == 2:
                server.stop()
            path = files[report.submission]
            writer.write(report, path, fingerprint(path, STEM, options))
    server.start()
    assert Course(root).recorded(STEM) == set(CLASS[:2])
    command("grade", STEM, handed_in, "--course", root)
    assert f"2 of {len(CLASS)} submissions are graded already" in capsys.readouterr().err
    assert {s: sum_of(entries(root)[s]) for s in CLASS} == {s: sum_of(entries(sqlite)[s]) for s in CLASS}


FAULTS = {
    "a wrong password": (URL_PASSWORD, "wrong", "password authentication failed"),
    "a database that is not there": ("/right", "/missing", "does not exist"),
    "an address in the old form": ("postgresql:", "postgres:", "postgres"),
    "a driver that is not installed": ("postgresql:", "postgresql+pg8000:", "pip install 'psycopg[binary]'"),
    "no address at all": ("postgresql:", "", "URL"),
}


def test_a_wrong_address_is_one_line(sqlite, server, tmp_path, capsys):
    url = server.database("right")
    root = moved(sqlite, tmp_path / "course", url)
    for fault, (old, new, words) in FAULTS.items():
        (root / "nbgrader_config.py").write_text(CONFIG + on(url.replace(old, new, 1)))
        assert words in refused(capsys, "grade", STEM, root / "submitted", "--course", root), fault
