"""Grades for learning platforms: what Canvas and Moodle import is read here as they read it; late policies; a class from archive to gradebook."""

import contextlib
import csv
import datetime
import functools
import io
import json
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traitlets.config import Config

from autograder import catalog, cli, lms
from autograder.course import CONFIG
from autograder.late import LatePolicy
from samples.build import answers, fill

STEM = "decoding"
CHAPTER = catalog.chapter(STEM)
NAMES = [entry.name for entry in CHAPTER.entries]
POINTS = {entry.name: entry.points for entry in CHAPTER.entries}
FULL = float(CHAPTER.points)
PROGRAMS = Path(sys.executable).parent
DUE = "2026-03-01 12:00:00"
LATE_POLICY = """
c.AssignLatePenalties.plugin_class = "autograder.late.LatePolicy"
c.LatePolicy.percent_per_day = 10
c.LatePolicy.grace_hours = 6
c.LatePolicy.max_percent = 25
"""


def command(*arguments: object, code: int = 0) -> tuple[str, str]:
    """Runs the command in this process: standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert cli.main([str(a) for a in arguments]) == code, out.getvalue() + err.getvalue()
    assert len(err.getvalue().splitlines()) <= 1
    return out.getvalue(), err.getvalue()


@functools.cache
def empty_gradebook() -> bytes:
    """A gradebook that knows the assignment; nbgrader takes seconds to make one."""
    from nbgrader.api import Gradebook

    with tempfile.TemporaryDirectory() as folder:
        with Gradebook(f"sqlite:///{folder}/gradebook.db", "course_llm") as book:
            book.add_assignment(STEM, duedate=DUE)
            book.add_notebook(STEM, STEM)
            for name, points in POINTS.items():
                book.add_grade_cell(f"check_{name}", STEM, STEM, max_score=points, cell_type="code")
        return Path(folder, "gradebook.db").read_bytes()


def make_course(root: Path, students: dict[str, dict], record: dict | None = None) -> Path:
    """A course folder whose gradebook has these students: names, address, and the share of points earned."""
    from nbgrader.api import Gradebook

    (root / "release" / STEM).mkdir(parents=True)
    (root / "nbgrader_config.py").write_text(CONFIG)
    (root / "gradebook.db").write_bytes(empty_gradebook())
    if record:
        (root / "collected").mkdir()
        (root / "collected" / f"{STEM}.json").write_text(json.dumps({"students": record}))
    with Gradebook(f"sqlite:///{root}/gradebook.db", "course_llm") as book:
        for student, says in students.items():
            known = {k: v for k, v in says.items() if k not in ("share", "penalty")}
            book.add_student(student, **known)
            if "share" not in says:
                continue
            submission = book.add_submission(STEM, student)
            (notebook,) = submission.notebooks
            notebook.late_submission_penalty = says.get("penalty")
            for grade in notebook.grades:
                grade.auto_score = says["share"] * grade.max_score
        book.db.commit()
    return root


def table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


# Canvas

CANVAS = (
    "\ufeffStudent,ID,SIS User ID,SIS Login ID,Section,Notes,Decoding (4711),Attention (4712),Homework Current Score,Final Grade\r\n"
    ",,,,,,Manual Posting,,,\r\n"
    "    Points Possible,,,,,,{points},10.00,(read only),(read only)\r\n"
    '"Lovelace, Ada",41,u-1,ada@uni.example,"Lab 1, Monday",says ""hi"",,9.00,12.5,B\r\n'
    '"Noether, Emmy",42,u-2,emmy@uni.example,Lab 1,,,,,\r\n'
    '"Gödel, Kurt",43,u-3,kurt@uni.example,Lab 2,,"3.00",,,\r\n'
    '"Abel, Niels",44,u-4,niels@uni.example,Lab 2,,EX,,,\r\n'
    '"Student, Test",99,,f00,Lab 1,,,,,\r\n'
)


def imported_by_canvas(data: bytes) -> tuple[dict[str, float], dict[str, dict[str, str]]]:
    """Reads a file as Canvas's importer does: points possible by column, and grades by column of every student's key."""
    rows = list(csv.reader(io.StringIO(data.decode("utf-8-sig"))))
    head = rows[0]
    assert "Student" in head[0] and "ID" in head[1]
    assert head[2:5] in (["SIS User ID", "SIS Login ID", "Section"],)
    possible, grades = {}, {}
    for row in rows[1:]:
        if "Points Possible" in row[0]:
            possible = {h: float(c) for h, c in zip(head, row, strict=True) if re.fullmatch(r"[\d.]+", c)}
        elif not all(re.fullmatch(r"\s*(Muted|Manual Posting.*)?\s*", c) for c in row):
            grades[row[1] or row[2] or row[3] or row[0]] = dict(zip(head, row, strict=True))
    return possible, grades


STUDENTS = {
    "ada_41": {"share": 1.0},
    "u-2": {"share": 0.5, "penalty": 0.1 * FULL},
    "kurt": {"email": "kurt@uni.example", "share": 1 / 3},
    "niels": {"first_name": "Niels", "last_name": "Abel"},
}
RECORD = {"ada_41": {"name": "lovelaceada", "ids": {"canvas": "41"}, "form": "canvas"}}


def test_canvas_gradebook_is_filled_and_every_other_byte_kept(tmp_path):
    root = make_course(tmp_path / "course", STUDENTS, RECORD)
    given_file = tmp_path / "grades.csv"
    before = CANVAS.format(points=f"{FULL:.2f}").encode()
    given_file.write_bytes(before)
    out, _ = command("export", STEM, "--course", root, "--format", "canvas", "--grades-from", given_file)
    after = (root / f"{STEM}-canvas.csv").read_bytes()
    assert given_file.read_bytes() == before
    third = lms.plain_number(FULL / 3)
    expected = before.replace(b"says \"\"hi\"\",,9.00", f'says ""hi"",{FULL:g},9.00'.encode()).replace(b"Lab 1,,,,,\r\n\"G", f'Lab 1,,{0.4 * FULL:g},,,\r\n"G'.encode())  # fmt: skip
    assert after == expected.replace(b'"3.00"', f'"{third}"'.encode())
    possible, grades = imported_by_canvas(after)
    assert possible["Decoding (4711)"] == FULL
    assert {k: g["Decoding (4711)"] for k, g in grades.items()} == {"41": f"{FULL:g}", "42": f"{0.4 * FULL:g}", "43": third, "44": "EX", "99": ""}  # fmt: skip
    assert "3 grades" in out and "left as it was: Abel, Niels (44): has no grade" in out


def test_rows_and_students_that_nobody_matches_are_listed_and_the_rest_is_written(tmp_path):
    known = {
        "41": {"share": 1.0},
        "stranger": {"share": 1.0},
        "u-2": {"share": 0.5},
        "emmy@uni.example": {"share": 0.1},
    }
    root = make_course(tmp_path / "course", known)
    given_file = tmp_path / "grades.csv"
    given_file.write_text(CANVAS.format(points=FULL))
    out, err = command("export", STEM, "--course", root, "--format", "canvas", "--grades-from", given_file, "--to", tmp_path / "out.csv", code=1)  # fmt: skip
    _, grades = imported_by_canvas((tmp_path / "out.csv").read_bytes())
    assert grades["41"]["Decoding (4711)"] == f"{FULL:g}"
    assert "nobody in the gradebook: Gödel, Kurt (43)" in out and "stranger" in out
    assert grades["42"]["Decoding (4711)"] == f"{0.1 * FULL:g}"  # her login comes before her number
    assert "could not be matched" in err
    assert "Student, Test" not in out


def test_two_rows_of_one_student_are_both_left(tmp_path):
    root = make_course(
        tmp_path / "course", {"ada": {"first_name": "Ada", "last_name": "Lovelace", "share": 1.0}}
    )
    given_file = tmp_path / "grades.csv"
    given_file.write_text(f"Student,ID,SIS Login ID,Section,{STEM}\n Points Possible,,,,\n\"Lovelace, Ada\",1,a,,\n\"Lovelace, Ada\",2,b,,\n")  # fmt: skip
    out, _ = command(
        "export", STEM, "--course", root, "--format", "canvas", "--grades-from", given_file, code=1
    )
    assert (root / f"{STEM}-canvas.csv").read_bytes() == given_file.read_bytes()
    assert "2 rows seem to be ada's" in out


def test_another_maximum_is_refused_or_converted(tmp_path):
    root = make_course(tmp_path / "course", STUDENTS, RECORD)
    given_file = tmp_path / "grades.csv"
    given_file.write_text(CANVAS.format(points="100.00"))
    export = ("export", STEM, "--course", root, "--format", "canvas", "--grades-from", given_file)
    _, err = command(*export, code=1)
    assert "--scale" in err and not (root / f"{STEM}-canvas.csv").exists()
    command(*export, "--scale")
    _, grades = imported_by_canvas((root / f"{STEM}-canvas.csv").read_bytes())
    assert {k: g["Decoding (4711)"] for k, g in grades.items()} == {"41": "100", "42": "40", "43": "33.33", "44": "EX", "99": ""}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--column", "Nothing"), "no columns for 'Nothing'"),
        (("--column", "Homework Current Score"), "no columns"),
        (("--grades-from", "/no/such/file.csv"), "cannot be read"),
    ],
)
def test_a_column_or_file_that_is_not_there_is_said(tmp_path, options, words):
    root = make_course(tmp_path / "course", STUDENTS)
    given_file = tmp_path / "grades.csv"
    given_file.write_text(CANVAS.format(points=FULL))
    _, err = command("export", STEM, "--course", root, "--format", "canvas", "--grades-from", given_file, *options, code=1)  # fmt: skip
    assert words in err


@pytest.mark.parametrize("content", [b"", b"Student\n", b"a,b\n1,2\n", "Student,ID\nä,1\n".encode("utf-16")])
def test_a_file_that_is_no_gradebook_is_said(tmp_path, content):
    root = make_course(tmp_path / "course", STUDENTS)
    (tmp_path / "grades.csv").write_bytes(content)
    for form in ("canvas", "moodle"):
        command(
            "export",
            STEM,
            "--course",
            root,
            "--format",
            form,
            "--grades-from",
            tmp_path / "grades.csv",
            code=1,
        )
    _, err = command("export", STEM, "--course", root, "--grades-from", tmp_path / "grades.csv", code=2)
    assert "--format canvas or moodle" in err


def test_canvas_without_its_file_is_written_by_the_roster(tmp_path):
    says = {"s1": {"share": 1.0}, "s2": {"share": 0.5}, "s3": {"share": 0.25}, "s4": {}}
    root = make_course(tmp_path / "course", says)
    roster = tmp_path / "roster.csv"
    roster.write_text('student_id,canvas_id,sis_user_id,login,first_name,last_name\ns1,41,,,"=HYPERLINK(""x"")",-Ada\n'
                      "s2,,u-2,=emmy,Emmy,Noether\ns3,,,,Kurt,Gödel\ns4,44,,,Niels,Abel\n")  # fmt: skip
    out, _ = command("export", STEM, "--course", root, "--format", "canvas", "--roster", roster, "--column", "Decoding (7)", code=1)  # fmt: skip
    possible, grades = imported_by_canvas((root / f"{STEM}-canvas.csv").read_bytes())
    assert possible == {"Decoding (7)": FULL}
    assert {k: g["Decoding (7)"] for k, g in grades.items()} == {"41": f"{FULL:g}", "u-2": f"{FULL / 2:g}", "Gödel, Kurt": f"{FULL / 4:g}"}  # fmt: skip
    assert grades["41"]["Student"].startswith("'-Ada, =HYPER") and grades["u-2"]["SIS Login ID"] == "=emmy"
    assert "s3: no id of Canvas" in out and "s4: has no grade" in out


# Moodle

MOODLE = (
    'Identifier,"Full name","Email address",Status,Grade,"Maximum grade","Grade can be changed","Last modified (submission)","Last modified (grade)","Feedback comments"\n'
    '"Participant 2001","Ada Lovelace",ada@uni.example,"Submitted for grading - ",,{points},Yes,"Sunday, 1 March 2026, 10:00 AM",-,\n'
    '"Participant 2002","Emmy Noether",emmy@uni.example,"Submitted for grading - ",12.00,{points},Yes,"Sunday, 1 March 2026, 11:00 AM",-,"well, done"\n'
    '"Participant 2003","Kurt Gödel",kurt@uni.example,"Submitted for grading - ",,{points},No,"Sunday, 1 March 2026, 11:00 AM",-,\n'
    '"Participant 2004","Niels Abel",niels@uni.example,"No submission - ",,{points},Yes,-,-,\n'
)


def imported_by_moodle(data: bytes) -> dict[str, float]:
    """Reads a worksheet as Moodle's importer does: the grades that it takes, by participant."""
    rows = list(csv.DictReader(io.StringIO(data.decode())))
    assert {"Identifier", "Grade", "Last modified (grade)"} <= set(rows[0])
    taken = {r["Identifier"][len("Participant ") :]: r["Grade"] for r in rows if r["Grade"]}
    assert all(0 <= float(taken[k]) <= float(rows[0]["Maximum grade"]) for k in taken)
    return {k: float(v) for k, v in taken.items()}


def test_moodle_worksheet_is_filled(tmp_path):
    says = {"Ada_Lovelace": {"share": 1.0}, "emmy@uni.example": {"share": 0.5}, "k": {"email": "KURT@uni.example", "share": 1.0},
            "Niels_Abel": {}}  # fmt: skip
    record = {"Ada_Lovelace": {"name": "Ada Lovelace", "ids": {"moodle": "2001"}, "form": "moodle"}}
    root = make_course(tmp_path / "course", says, record)
    sheet = tmp_path / "sheet.csv"
    sheet.write_text(MOODLE.format(points=f"{FULL:.2f}"))
    out, _ = command("export", STEM, "--course", root, "--format", "moodle", "--grades-from", sheet)
    data = (root / f"{STEM}-moodle.csv").read_bytes()
    assert imported_by_moodle(data) == {"2001": FULL, "2002": FULL / 2}
    assert data == sheet.read_bytes().replace(b'" - ",,', b'" - ",,').replace(b'grading - ",,', f'grading - ",{FULL:g},'.encode(), 1).replace(b"12.00", f"{FULL / 2:g}".encode())  # fmt: skip
    assert "cannot be changed" in out and "Niels Abel (Participant 2004): has no grade" in out
    sheet.write_text(MOODLE.format(points="100"))
    command("export", STEM, "--course", root, "--format", "moodle", "--grades-from", sheet, "--scale")
    assert imported_by_moodle((root / f"{STEM}-moodle.csv").read_bytes()) == {"2001": 100, "2002": 50}


def test_the_worksheet_as_roster_knows_who_handed_nothing_in(tmp_path):
    root = make_course(
        tmp_path / "course", {"ada@uni.example": {"share": 1.0}, "emmy@uni.example": {"share": 0.5}}
    )
    sheet = tmp_path / "sheet.csv"
    sheet.write_text(MOODLE.format(points=FULL))
    export = ("export", STEM, "--course", root, "--format", "moodle", "--grades-from", sheet)
    command(*export, code=1)
    out, _ = command(*export, "--roster", sheet)
    assert imported_by_moodle((root / f"{STEM}-moodle.csv").read_bytes()) == {"2001": FULL, "2002": FULL / 2}
    assert "Niels Abel (Participant 2004): has no grade" in out


def test_a_worksheet_of_another_assignment_gives_nobody_anothers_grade(tmp_path):
    """Moodle numbers the participants of every assignment anew."""
    record = {"Kurt": {"name": "Kurt Gödel", "ids": {"moodle": "2001"}, "form": "moodle"}}
    root = make_course(tmp_path / "course", {"Kurt": {"share": 0.5}}, record)
    sheet = tmp_path / "sheet.csv"
    sheet.write_text(MOODLE.format(points=FULL).replace(",No,", ",Yes,"))
    command("export", STEM, "--course", root, "--format", "moodle", "--grades-from", sheet, code=1)
    assert imported_by_moodle((root / f"{STEM}-moodle.csv").read_bytes()) == {"2002": 12, "2003": FULL / 2}


def test_a_roster_that_was_not_there_when_the_work_was_collected(tmp_path):
    """The gradebook has names for ids then, and the roster finds them by what collecting noted, but not by a number of Moodle's."""
    record = {"Ada_Lovelace": {"name": "Ada Lovelace", "ids": {"moodle": "2001"}, "form": "moodle"},
              "noetheremmy_42": {"name": "noetheremmy", "ids": {"canvas": "42"}, "form": "canvas"}}  # fmt: skip
    says = {
        "Ada_Lovelace": {"share": 1.0},
        "noetheremmy_42": {"share": 0.5},
        "kurt@uni.example": {"share": 0.25},
    }
    root = make_course(tmp_path / "course", says, record)
    roster, sheet = tmp_path / "roster.csv", tmp_path / "sheet.csv"
    roster.write_text("student_id,name,email,canvas_id,identifier\n"
                      "s1,Ada Lovelace,ada@uni.example,,Participant 2003\ns2,Emmy Noether,emmy@uni.example,42,Participant 2001\n"
                      "s3,Kurt Gödel,kurt@uni.example,,Participant 2002\ns4,Niels Abel,niels@uni.example,,\n")  # fmt: skip
    sheet.write_text(MOODLE.format(points=FULL).replace(",No,", ",Yes,"))
    out, _ = command("export", STEM, "--course", root, "--format", "moodle", "--grades-from", sheet, "--roster", roster)  # fmt: skip
    assert imported_by_moodle((root / f"{STEM}-moodle.csv").read_bytes()) == {"2001": FULL, "2002": FULL / 2, "2003": FULL / 4}  # fmt: skip
    assert "nobody" not in out and "Niels Abel (Participant 2004): has no grade" in out


def test_nothing_graded_is_said_by_every_export(tmp_path):
    root = make_course(tmp_path / "course", {"ada": {}})
    for form in ("csv", "exercises", "canvas", "moodle"):
        _, err = command("export", STEM, "--course", root, "--format", form, code=1)
        assert f"course-llm grade {STEM}" in err and not list(root.glob("*.csv"))


def test_collected_work_that_is_not_graded_is_named_by_every_export(tmp_path):
    from autograder.course import content_digest

    root = make_course(tmp_path / "course", {"ada": {"share": 1.0}, "emmy": {"share": 0.5}, "kurt": {"share": 0.5}})  # fmt: skip
    for student in ("ada", "emmy", "niels"):
        work = root / "submitted" / student / STEM / f"{STEM}.ipynb"
        work.parent.mkdir(parents=True)
        work.write_text(f'{{"cells": [], "by": "{student}"}}')
        kept = root / "autograded" / student / STEM / f"{STEM}.ipynb"
        kept.parent.mkdir(parents=True)
        kept.write_text(json.dumps({"metadata": {"course_llm": {"fingerprint": f"x:{content_digest(work)}", "report": {}}}}))  # fmt: skip
    (root / "submitted" / "emmy" / STEM / f"{STEM}.ipynb").write_text('{"cells": [], "by": "emmy again"}')
    for form in ("csv", "exercises"):
        _, err = command("export", STEM, "--course", root, "--format", form, code=1)
        assert "not graded yet: emmy, niels; run: course-llm grade" in err
    assert len(table(root / f"{STEM}.csv")) == 3


def test_feedback_is_packed_under_the_names_that_the_platforms_read(tmp_path):
    pages = {student: tmp_path / student for student in ("ada", "emmy", "kurt", "niels", "text")}
    for student, page in pages.items():
        page.write_text(student)
    record = {
        "ada": {"form": "moodle", "file": f"Ada Lovelace_2001_assignsubmission_file_/deep/{STEM}.ipynb"},
        "emmy": {
            "form": "moodle",
            "file": f"in one more/Emmy Noether_2002_assignsubmission_file_{STEM}.ipynb",
        },
        "kurt": {"form": "canvas", "file": "goedelkurt_LATE_43_777_my_answers-1.ipynb"},
        "niels": {"form": "folder", "file": f"niels/{STEM}.ipynb"},
    }
    data, left = lms.feedback_zip(pages, record, STEM)
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        found = {name: file.read(name).decode() for name in file.namelist()}
    assert left == ["niels", "text"]
    assert found.pop(f"goedelkurt_LATE_43_777_{STEM}.html") == "kurt"
    for name, student in found.items():  # as Moodle's importer takes a name apart
        _, participant, kind, plugin = name.split("/")[0].split("_", 4)
        assert (participant, kind, plugin, name.split("/")[1]) == ({"ada": "2001", "emmy": "2002"}[student], "assignsubmission", "file", f"{STEM}.html")  # fmt: skip
    assert len(found) == 2


def test_a_worksheet_in_another_language(tmp_path):
    root = make_course(tmp_path / "course", {"Ada_Lovelace": {"share": 1.0}}, {"Ada_Lovelace": {"name": "Ada Lovelace", "ids": {"moodle": "2001"}, "form": "moodle"}})  # fmt: skip
    sheet = tmp_path / "sheet.csv"
    sheet.write_text(f'ID,"Vollständiger Name",Status,Bewertung,"Bestwertung"\n"Teilnehmer/in2001","Ada Lovelace","Zur Bewertung",,"{FULL:.2f}"\n')  # fmt: skip
    export = ("export", STEM, "--course", root, "--format", "moodle", "--grades-from", sheet)
    assert "--column" in command(*export, code=1)[1]
    command(*export, "--column", "Bewertung")
    assert f'"Zur Bewertung",{FULL:g},"{FULL:.2f}"' in (root / f"{STEM}-moodle.csv").read_text()


def test_moodle_without_its_worksheet_is_a_table_for_the_grade_import(tmp_path):
    says = {"s1": {"email": "ada@uni.example", "first_name": "@Ada", "last_name": "Lovelace, B.A.", "share": 1.0}, "s2": {"share": 0.5}, "s3": {}}  # fmt: skip
    root = make_course(tmp_path / "course", says)
    out, _ = command("export", STEM, "--course", root, "--format", "moodle", code=1)
    rows = table(root / f"{STEM}-moodle.csv")
    assert [(r["Student id"], r["Email address"], r[STEM]) for r in rows] == [("s1", "ada@uni.example", f"{FULL:g}"), ("s2", "", f"{FULL / 2:g}")]  # fmt: skip
    assert rows[0]["First name"] == "'@Ada" and rows[0]["Last name"] == "Lovelace, B.A."
    assert "s2: no username" in out


# exercises


def test_a_column_for_each_exercise(tmp_path):
    says = {"b": {"share": 0.5, "penalty": 2.0}, "a": {"last_name": "+1", "share": 1.0}, "c": {}}
    root = make_course(tmp_path / "course", says)
    command("export", STEM, "--course", root, "--format", "exercises")
    rows = table(root / f"{STEM}-exercises.csv")
    assert [r["student_id"] for r in rows] == ["a", "b", "c"]
    assert list(rows[0]) == ["student_id", "last_name", "first_name", "email", "submitted_at", *NAMES, "late_penalty", "score", "max_score"]  # fmt: skip
    assert all(
        float(rows[0][n]) == POINTS[n] and float(rows[1][n]) == POINTS[n] / 2 and rows[2][n] == ""
        for n in NAMES
    )
    assert [r["score"] for r in rows] == [f"{FULL:g}", f"{FULL / 2 - 2:g}", ""]
    assert (
        rows[0]["last_name"] == "'+1"
        and rows[1]["late_penalty"] == "2"
        and rows[2]["max_score"] == f"{FULL:g}"
    )


# the sheet

CELLS = st.text(alphabet='ab",;\n\r\t é=', max_size=6)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.lists(CELLS, min_size=2, max_size=4), min_size=2, max_size=5), data=st.data())
def test_a_sheet_reads_as_csv_does_and_changes_one_cell(tmp_path_factory, rows, data):
    rows[0] = ["x"] * 5  # one delimiter is in the majority
    path = tmp_path_factory.mktemp("sheet") / "s.csv"
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows(rows)
    path.write_bytes(out.getvalue().encode())
    sheet = lms.Sheet(path)
    assert [[sheet.get(r, c) for c in range(len(row))] for r, row in enumerate(sheet.rows)] == rows
    assert sheet.written() == path.read_bytes()
    r = data.draw(st.integers(0, len(rows) - 1))
    c = data.draw(st.integers(0, len(rows[r]) - 1))
    sheet.put(r, c, "7.5")
    again = list(csv.reader(io.StringIO(sheet.written().decode(), newline="")))
    assert again == [
        [("7.5" if (i, j) == (r, c) else x) for j, x in enumerate(row)] for i, row in enumerate(rows)
    ]


# late policies


@pytest.mark.parametrize(
    ("hours", "settings_", "points"),
    [
        (0.01, {}, 1),
        (24, {}, 1),
        (24.01, {}, 2),
        (300, {}, 10),
        (6, {"grace_hours": 6.0}, None),
        (6.01, {"grace_hours": 6.0}, 1),
        (30.01, {"grace_hours": 6.0}, 2),
        (2000, {"max_percent": 25.0}, 2.5),
        (30, {"percent_per_day": 0.0}, 0),
        (30, {"percent_per_day": 33.0}, 6.6),
    ],
)
def test_each_day_begun_costs_so_much_up_to_a_limit(hours, settings_, points):
    penalty = LatePolicy(config=Config({"LatePolicy": settings_})).late_submission_penalty(
        "a", 10.0, 3600 * hours
    )
    assert penalty == (None if points is None else pytest.approx(points))


# from the archive to the gradebook


def test_a_class_from_canvas_and_back(tmp_path, run):
    """The commands of the guide: collect, grade, export. nbgrader's own autograde takes the same for lateness."""
    from nbgrader.api import Gradebook

    right = answers(STEM)
    some = {name: right[name] for name in NAMES[:3]}
    earned = sum(POINTS[name] for name in some)
    archive = tmp_path / "submissions.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("lovelaceada_41_900_decoding.ipynb", json.dumps(fill(STEM, {})))
        file.writestr("lovelaceada_41_950_decoding-1.ipynb", json.dumps(fill(STEM, right)))
        file.writestr("noetheremmy_LATE_42_901_homework.ipynb", json.dumps(fill(STEM, some)))
        file.writestr("gdelkurt_43_902_decoding.pdf", b"%PDF")
    book = tmp_path / "gradebook.csv"
    book.write_text(CANVAS.format(points=f"{FULL:.2f}"))
    times = tmp_path / "times.csv"
    times.write_text(
        "canvas_id,submitted_at\n41,2026-03-01 11:00\n42,2026-03-02 20:00\n"
    )  # 32 hours late: two days begun
    root = tmp_path / "course"
    program = PROGRAMS / "course-llm"
    command("release", STEM, "--course", root)
    with open(root / "nbgrader_config.py", "a") as config:
        config.write(LATE_POLICY)
    with Gradebook(f"sqlite:///{root}/gradebook.db", "course_llm") as gradebook:
        gradebook.update_or_create_assignment(STEM, duedate=DUE)
    collected = run(
        program,
        "collect",
        STEM,
        archive,
        "--course",
        root,
        "--roster",
        book,
        "--times",
        times,
        "--timezone",
        "UTC",
    )
    assert collected.returncode == 1 and "gdelkurt" in collected.stdout
    assert (
        collected.stderr
        == "course-llm: 1 of 3 students handed in nothing that can be graded: kurt@uni.example\n"
    )
    graded = run(program, "grade", STEM, root / "submitted", "--course", root, "--json")
    assert graded.returncode == 0 and {r["submission"]: r["points"] for r in json.loads(graded.stdout)} == {
        "ada@uni.example": FULL,
        "emmy@uni.example": earned,
    }
    exported = run(
        program,
        "export",
        STEM,
        "--course",
        root,
        "--format",
        "canvas",
        "--grades-from",
        book,
        "--roster",
        book,
    )
    assert exported.returncode == 0 and "left as it was: Gödel, Kurt (43): has no grade" in exported.stdout
    _, grades = imported_by_canvas((root / f"{STEM}-canvas.csv").read_bytes())
    column = {k: g["Decoding (4711)"] for k, g in grades.items()}
    assert column == {
        "41": f"{FULL:g}",
        "42": lms.plain_number(0.8 * earned),
        "43": "3.00",
        "44": "EX",
        "99": "",
    }
    # the same by nbgrader's own commands
    theirs = tmp_path / "theirs"
    shutil.copytree(root, theirs)
    done = run(
        PROGRAMS / "nbgrader", "autograde", STEM, "--force", "--student", "emmy@uni.example", cwd=theirs
    )
    assert done.returncode == 0, done.stderr
    for folder in (root, theirs):
        command("export", STEM, "--course", folder)
    ours, other = ((f / f"{STEM}.csv").read_text() for f in (root, theirs))
    assert ours == other
    (emmy,) = [r for r in csv.DictReader(io.StringIO(ours)) if r["student_id"] == "emmy@uni.example"]
    assert float(emmy["late_submission_penalty"]) == pytest.approx(0.2 * earned)
    assert datetime.datetime.fromisoformat(emmy["timestamp"]) == datetime.datetime(2026, 3, 2, 20)


def test_a_late_policy_that_makes_no_sense_is_said(tmp_path):
    root = make_course(tmp_path / "course", {})
    source = tmp_path / "in" / "a" / STEM
    source.mkdir(parents=True)
    (source / f"{STEM}.ipynb").write_text(json.dumps(fill(STEM, {})))
    (source / "timestamp.txt").write_text("2026-03-05 12:00:00 UTC")
    with open(root / "nbgrader_config.py", "a") as config:
        config.write(LATE_POLICY.replace("= 10", "= 1000"))
    _, err = command("grade", STEM, tmp_path / "in", "--course", root, code=1)
    assert "percent_per_day" in err and "nbgrader_config.py" in err
