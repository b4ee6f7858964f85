"""Collecting from elsewhere: the archives of Moodle and Canvas, clones, plain folders; the variations one meets, and hostile ones."""

import contextlib
import io
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from nbgrader.api import Gradebook

from autograder import archives, cli, staging
from autograder.archives import MemberError, SourceError, ZipSource
from autograder.course import CONFIG, timestamp_of
from autograder.roster import RosterError, read_roster, read_times

STEM = "decoding"
PROGRAM = Path(sys.executable).parent / "course-llm"


def notebook(mark: str) -> bytes:
    return json.dumps({"cells": [], "metadata": {"mark": mark}, "nbformat": 4, "nbformat_minor": 5}).encode()


def course(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nbgrader_config.py").write_text(CONFIG)
    return folder


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def lay(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def collect(source: Path, root: Path, *options: object, code: int = 0) -> tuple[dict, str]:
    """Runs the command in this process; what it printed as JSON, and its line on standard error."""
    arguments = ["collect", STEM, source, "--course", root, "--json", *options]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert cli.main([str(a) for a in arguments]) == code, out.getvalue() + err.getvalue()
    assert len(err.getvalue().splitlines()) <= 1
    return json.loads(out.getvalue() or "{}"), err.getvalue()


def marks(root: Path) -> dict[str, str]:
    """Whose notebook lies in the course folder, by student."""
    found = sorted((root / "submitted").glob(f"*/{STEM}/{STEM}.ipynb"))
    return {p.parts[-3]: json.loads(p.read_bytes())["metadata"]["mark"] for p in found}


def by_student(listing: dict) -> dict[str, dict]:
    return {s["student"]: s for s in listing["students"]}


def reasons(listing: dict) -> dict[str, str]:
    every = [p for s in listing["students"] for p in s["passed_over"]] + listing["passed_over"]
    return {p["name"]: p["why"] for p in every}


# Moodle


@pytest.mark.parametrize(
    "form", ["with folders", "as it was", "without folders", "in one more folder", "unpacked"]
)
def test_moodle_archives_of_every_form(tmp_path, form):
    link = {"with folders": "_assignsubmission_file/", "without folders": "_assignsubmission_file_"}.get(form, "_assignsubmission_file_/")  # fmt: skip
    top = "hw1/" if form == "in one more folder" else ""
    members = {
        f"{top}Ada Lovelace_2001{link}decoding.ipynb": notebook("ada"),
        f"{top}Émile Borel_2002{link}decoding.ipynb": notebook("emile"),
        f"{top}Émile Borel_2002_assignsubmission_onlinetext{link[22:]}onlinetext.html": b"<p>done</p>",
    }
    source = lay(tmp_path / "in", members) if form == "unpacked" else archive(tmp_path / "in.zip", members)
    root = course(tmp_path / "course")
    listing, _ = collect(source, root)
    assert listing["form"] == "moodle"
    assert marks(root) == {"Ada_Lovelace": "ada", "Émile_Borel": "emile"}
    assert by_student(listing)["Ada_Lovelace"]["ids"] == {"moodle": "2001"}
    assert any("typed into Moodle" in why for why in reasons(listing).values())
    assert not list(
        root.glob("submitted/*/*/timestamp.txt")
    )  # the times in an archive are those of the download
    kept = json.loads((root / "collected" / f"{STEM}.json").read_text())["students"]
    assert kept["Ada_Lovelace"]["ids"] == {"moodle": "2001"}


def test_moodle_namesakes_are_told_apart_by_their_numbers(tmp_path):
    members = {f"Kim Lee_{n}_assignsubmission_file_/decoding.ipynb": notebook(str(n)) for n in (7, 8)}
    root = course(tmp_path / "course")
    collect(archive(tmp_path / "in.zip", members), root)
    assert marks(root) == {"Kim_Lee_7": "7", "Kim_Lee_8": "8"}


# Canvas


def test_canvas_archive_with_late_and_repeated_submissions(tmp_path):
    members = {
        "lovelaceada_41_901_decoding.ipynb": notebook("ada first"),
        "lovelaceada_41_955_decoding-1.ipynb": notebook("ada second"),
        "borelemile_LATE_42_902_my work.ipynb": notebook("emile"),
        "noether_43_903_notes.pdf": b"%PDF",
        "noether_43_904_decoding.ipynb": notebook("emmy"),
        "anon_xyZ12_905_decoding.ipynb": notebook("anonymous"),
        "abelniels_44_text.html": b"<p>here it is</p>",
        "ann_45_910_decoding.zip": b"PK",
        "readme.txt": b"",
    }
    root = course(tmp_path / "course")
    listing, err = collect(archive(tmp_path / "submissions.zip", members), root, code=1)
    assert listing["form"] == "canvas"
    assert marks(root) == {"lovelaceada_41": "ada second", "borelemile_42": "emile", "noether_43": "emmy",
                           "anon_xyZ12": "anonymous"}  # fmt: skip
    students = by_student(listing)
    assert students["borelemile_42"]["late"] and "late, says Canvas" in students["borelemile_42"]["remarks"]
    assert "called my work.ipynb" in students["borelemile_42"]["remarks"]
    why = reasons(listing)
    assert why["lovelaceada_41_901_decoding.ipynb"] == "an earlier attempt, or a copy"
    assert why["noether_43_903_notes.pdf"] == "not a notebook"
    assert "not a file" in why["abelniels_44_text.html"] and "not opened" in why["ann_45_910_decoding.zip"]
    assert "form that Canvas gives" in why["readme.txt"]
    assert "2 of 6 students" in err and "abelniels_44" in err and "ann_45" in err


def test_canvas_resubmission_is_the_one_with_the_highest_file_id_whatever_it_is_called(tmp_path):
    members = {"x_1_30_decoding.ipynb": notebook("last"), "x_1_20_decoding-7.ipynb": notebook("first"),
               "y_2_5_a.ipynb": notebook("old"), "y_2_6_b.ipynb": notebook("new")}  # fmt: skip
    root = course(tmp_path / "course")
    collect(archive(tmp_path / "in.zip", members), root)
    assert marks(root) == {"x_1": "last", "y_2": "new"}


# GitHub Classroom


def git(folder: Path, *arguments: str, **environment: str) -> None:
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}  # fmt: skip
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, env=os.environ | names | environment)  # fmt: skip


def clone(folder: Path, mark: str, when: str = "2026-03-01T12:30:00+0100", packed: bool = True) -> Path:
    lay(folder, {f"{STEM}.ipynb": notebook(mark), "README.md": b"# task\n"})
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "done", GIT_COMMITTER_DATE=when, GIT_AUTHOR_DATE=when)
    if packed:
        git(folder, "gc", "-q")
        git(folder, "pack-refs", "--all")
    return folder


def test_clones_of_github_classroom(tmp_path):
    source = tmp_path / "term-1-submissions"
    clone(source / "term-1-ada-l", "ada")
    clone(source / "term-1-bob", "bob", "2026-03-02T00:00:00+0000", packed=False)
    (source / "term-1-bob" / f"{STEM}.ipynb").rename(source / "term-1-bob" / "answers.ipynb")
    root = course(tmp_path / "course")
    roster = tmp_path / "roster.csv"
    roster.write_text('"identifier","github_username","github_id","name"\n"al@uni.example","ada-l","1",""\n')
    listing, _ = collect(source, root, "--roster", roster)
    assert listing["form"] == "github"
    assert marks(root) == {"al@uni.example": "ada", "bob": "bob"}
    students = by_student(listing)
    assert (students["al@uni.example"]["time"], students["al@uni.example"]["time_from"]) == ("2026-03-01 11:30:00 UTC", "commit")  # fmt: skip
    assert students["bob"]["time"] == "2026-03-02 00:00:00 UTC"
    assert "not in the roster, or not told apart there" in students["bob"]["remarks"]
    assert str(timestamp_of(root / "submitted" / "bob" / STEM)) == "2026-03-02 00:00:00"


def test_a_table_of_times_stands_above_the_commits(tmp_path):
    source = tmp_path / "in"
    clone(source / "task-ada", "ada")
    times = tmp_path / "grades.csv"
    times.write_text("assignment_name,github_username,roster_identifier,submission_timestamp\nTask,ada,,2026-03-05T09:00:00Z\n")  # fmt: skip
    root = course(tmp_path / "course")
    listing, _ = collect(source, root, "--prefix", "task", "--times", times)
    assert by_student(listing)["ada"]["time"] == "2026-03-05 09:00:00 UTC"
    assert by_student(listing)["ada"]["time_from"] == "table"


def test_nothing_of_a_hostile_repository_is_run(tmp_path):
    """Configuration, hooks, attributes and alternates that would have git start a program, in a repository handed over with its .git."""
    ran = tmp_path / "ran"
    program = tmp_path / "evil.sh"
    program.write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
    program.chmod(0o755)
    source = tmp_path / "in"
    folder = clone(source / "task-mallory", "mallory", packed=False)
    with open(folder / ".git" / "config", "a") as config:
        config.write(f"[core]\nfsmonitor = {program}\npager = {program}\nhooksPath = {tmp_path}\nsshCommand = {program}\ngitProxy = {program}\n"
                     f"[log]\nshowSignature = true\n[gpg]\nprogram = {program}\n[alias]\ncat-file = !{program}\n"
                     f'[include]\npath = {program}\n[filter "x"]\nclean = {program}\nsmudge = {program}\n'
                     f'[diff]\nexternal = {program}\n[uploadpack]\npackObjectsHook = {program}\n[extensions]\npartialClone = origin\n'
                     f'[remote "origin"]\npromisor = true\nurl = ext::{program}\n')  # fmt: skip
    for hook in ("post-checkout", "pre-commit", "reference-transaction"):
        shutil.copy(program, folder / ".git" / "hooks" / hook)
    (folder / ".gitattributes").write_text("* filter=x diff=x\n")
    root = course(tmp_path / "course")
    listing, _ = collect(source, root, "--prefix", "task")
    assert by_student(listing)["mallory"]["time_from"] == "commit"
    assert not ran.exists()
    # a commit that is not there would be fetched by a lazy clone
    (folder / ".git" / "refs" / "heads" / "main").write_text("1" * 40 + "\n")
    listing, _ = collect(source, root, "--prefix", "task")
    assert by_student(listing)["mallory"]["time"] is None
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/../../../../etc/passwd\n")
    collect(source, root, "--prefix", "task")
    shutil.rmtree(folder / ".git" / "objects")
    (folder / ".git" / "objects").symlink_to("/")
    collect(source, root, "--prefix", "task")
    assert not ran.exists() and marks(root) == {"mallory": "mallory"}


# a plain folder


def test_plain_folder_as_it_has_always_been(tmp_path):
    source = lay(tmp_path / "in", {f"ada/{STEM}/{STEM}.ipynb": notebook("ada"), f"ada/{STEM}/timestamp.txt": b"2026-03-01 10:00:00 UTC\n",
                                   f"ada/{STEM}/data.csv": b"1,2\n", "ada/loss/loss.ipynb": notebook("loss"),
                                   "bob/loss/loss.ipynb": notebook("loss")})  # fmt: skip
    root = course(tmp_path / "course")
    listing, _ = collect(source, root)
    assert marks(root) == {"ada": "ada"}
    assert sorted(p.name for p in (root / "submitted" / "ada" / STEM).iterdir()) == ["data.csv", f"{STEM}.ipynb", "timestamp.txt"]  # fmt: skip
    assert by_student(listing)["ada"]["time"] == "2026-03-01 10:00:00 UTC"


def test_plain_folder_variations(tmp_path):
    source = lay(tmp_path / "in", {
        "other name/answers.ipynb": notebook("renamed"),
        "copies/decoding.ipynb": notebook("first"), "copies/decoding-1.ipynb": notebook("second"), "copies/decoding (2).ipynb": notebook("third"),
        "several/a.ipynb": notebook("a"), "several/b.ipynb": notebook("b"),
        "doubt/a.ipynb": notebook("a"), "doubt/b.ipynb": notebook("b"),
        "both/decoding.ipynb": notebook("named"), "both/scratch.ipynb": notebook("scratch"), "both/loss.ipynb": notebook("loss"),
        "upper/Decoding.IPYNB": notebook("upper"),
        "deep/work/final/decoding.ipynb": notebook("deep"),
        "checkpoint/.ipynb_checkpoints/decoding-checkpoint.ipynb": notebook("checkpoint"),
        "wrong/loss.ipynb": notebook("loss"),
        "single.ipynb": notebook("single"),
        "decoding.ipynb": notebook("whose?"),
    })  # fmt: skip
    (source / "empty").mkdir()
    for name, seconds in (("several/a", 2_000), ("several/b", 1_000), ("doubt/a", 3_000), ("doubt/b", 3_000)):
        os.utime(source / f"{name}.ipynb", (seconds, seconds))
    root = course(tmp_path / "course")
    listing, err = collect(source, root, code=1)
    assert marks(root) == {"other name": "renamed", "copies": "third", "several": "a", "both": "named", "upper": "upper",
                           "deep": "deep", "single": "single"}  # fmt: skip
    why = reasons(listing)
    assert "which one?" in why["doubt/a.ipynb"] and "which one?" in why["doubt/b.ipynb"]
    assert (
        why["both/loss.ipynb"].startswith("another chapter's")
        and "chapter's name" in why["both/scratch.ipynb"]
    )
    assert "Jupyter keeps" in why["checkpoint/.ipynb_checkpoints/decoding-checkpoint.ipynb"]
    assert why["decoding.ipynb"] == "it lies in no student's folder"
    for name in ("doubt", "checkpoint", "wrong", "empty"):
        assert name in err


def test_a_second_collect_replaces_what_was_there_and_leaves_others(tmp_path):
    root = course(tmp_path / "course")
    collect(lay(tmp_path / "one", {f"{s}/{STEM}/{STEM}.ipynb": notebook("old") for s in "ab"}), root)
    (root / "submitted" / "a" / STEM / "stale.txt").write_text("")
    (root / "submitted" / "a" / STEM).chmod(0o555)
    collect(lay(tmp_path / "two", {f"a/{STEM}/{STEM}.ipynb": notebook("new"), f"c/{STEM}/{STEM}.ipynb": notebook("new")}), root)  # fmt: skip
    assert marks(root) == {"a": "new", "b": "old", "c": "new"}
    assert not (root / "submitted" / "a" / STEM / "stale.txt").exists()
    assert not (root / ".collecting").exists()
    assert set(json.loads((root / "collected" / f"{STEM}.json").read_text())["students"]) == {"a", "b", "c"}


def test_dry_run_writes_nothing_and_the_table_says_all(tmp_path):
    members = {"a_1_2_decoding.ipynb": notebook("a"), "b_3_4_essay.pdf": b"%PDF"}
    root = course(tmp_path / "course")
    before = sorted(root.rglob("*"))
    done = subprocess.run([str(PROGRAM), "collect", STEM, str(archive(tmp_path / "in.zip", members)), "--course", str(root), "--dry-run"],
                          capture_output=True, text=True)  # fmt: skip
    assert sorted(root.rglob("*")) == before
    assert done.returncode == 1 and "1 submission would be collected" in done.stdout
    assert "b_3" in done.stdout and "passed over: b_3_4_essay.pdf: not a notebook" in done.stdout


# rosters and times


def test_a_roster_names_the_students(tmp_path):
    roster = tmp_path / "roster.csv"
    roster.write_bytes("\ufeffstudent_id;email;canvas_id;first_name;last_name\r\ns1;ada@uni.example;41;Ada;Lovelace\r\n"
                       "s2;emmy@uni.example;;Emmy;Noether\r\ns3;kurt@uni.example;99;Kurt;Gödel\r\n".encode())  # fmt: skip
    canvas = {
        "lovelaceada_41_1_decoding.ipynb": notebook("ada"),
        "noetheremmy_42_2_decoding.ipynb": notebook("emmy"),
    }
    root = course(tmp_path / "course")
    listing, _ = collect(archive(tmp_path / "c.zip", canvas), root, "--roster", roster)
    assert marks(root) == {"s1": "ada", "s2": "emmy"}
    assert listing["nothing_handed_in"] == ["s3"]
    moodle = {"Ada Lovelace_1_assignsubmission_file_/decoding.ipynb": notebook("ada2"), "Kurt Gödel_2_assignsubmission_file_/decoding.ipynb": notebook("kurt")}  # fmt: skip
    collect(archive(tmp_path / "m.zip", moodle), root, "--roster", roster)
    assert marks(root) == {"s1": "ada2", "s2": "emmy", "s3": "kurt"}
    roster.write_text('student_id,name,email\ns1,"Lovelace, Ada",ada@king.example\n')
    collect(archive(tmp_path / "m.zip", moodle), root, "--roster", roster, "--dry-run")
    with Gradebook(f"sqlite:///{root}/gradebook.db", "course_llm") as gradebook:
        named = {s.id: (s.first_name, s.last_name, s.email) for s in gradebook.students}
        assert named == {"s1": ("Ada", "Lovelace", "ada@uni.example"), "s2": ("Emmy", "Noether", "emmy@uni.example"), "s3": ("Kurt", "Gödel", "kurt@uni.example")}  # fmt: skip
    collect(archive(tmp_path / "m.zip", moodle), root, "--roster", roster)
    with Gradebook(f"sqlite:///{root}/gradebook.db", "course_llm") as gradebook:
        ada = gradebook.find_student("s1")
        assert (ada.first_name, ada.last_name, ada.email) == ("Ada", "Lovelace", "ada@king.example")


def test_two_submissions_that_a_roster_gives_to_one_student_are_both_left(tmp_path):
    roster = tmp_path / "roster.csv"
    roster.write_text('student_id,name\ns1,"Lovelace, Ada"\n')
    members = {
        "lovelaceada_41_1_decoding.ipynb": notebook("a"),
        "lovelaceada_77_2_decoding.ipynb": notebook("b"),
    }
    root = course(tmp_path / "course")
    listing, _ = collect(archive(tmp_path / "in.zip", members), root, "--roster", roster, code=1)
    assert marks(root) == {}
    assert all(why == "2 submissions belong to s1" for why in reasons(listing).values())


def test_nobody_takes_anothers_place_by_a_name(tmp_path):
    """One calls herself as the roster calls another, and one by another's id: both keep a row of their own."""
    roster = tmp_path / "roster.csv"
    roster.write_text('student_id,canvas_id,name\ns1,41,"Lovelace, Ada"\n')
    members = {
        "ada_41_1_decoding.ipynb": notebook("ada"),
        "lovelaceada_66_2_decoding.ipynb": notebook("mallory"),
    }
    root = course(tmp_path / "course")
    collect(archive(tmp_path / "in.zip", members), root, "--roster", roster)
    assert marks(root) == {"s1": "ada", "lovelaceada_66": "mallory"}
    roster.write_text("student_id,name\ns1,Ada Lovelace\n")
    members = {"Ada Lovelace_1_assignsubmission_file_/decoding.ipynb": notebook("ada"), "s1_2_assignsubmission_file_/decoding.ipynb": notebook("m")}  # fmt: skip
    listing, _ = collect(archive(tmp_path / "m.zip", members), root, "--roster", roster)
    assert marks(root)["s1"] == "ada" and marks(root)["s1_2"] == "m"
    assert "others have the same name" in by_student(listing)["s1_2"]["remarks"]


def test_times_from_moodles_worksheet_in_a_time_zone(tmp_path):
    sheet = tmp_path / "sheet.csv"
    sheet.write_text('Identifier,"Full name","Email address",Status,Grade,"Maximum grade","Grade can be changed","Last modified (submission)","Last modified (grade)"\n'
                     '"Participant 2001","Ada Lovelace",ada@uni.example,"Submitted for grading - ",,100.00,Yes,"Sunday, 1 March 2026, 11:59 PM",-\n'
                     '"Participant 2002","Emmy Noether",emmy@uni.example,"No submission - ",,100.00,Yes,-,-\n')  # fmt: skip
    members = {"Ada Lovelace_2001_assignsubmission_file_/decoding.ipynb": notebook("ada")}
    root = course(tmp_path / "course")
    listing, _ = collect(
        archive(tmp_path / "in.zip", members), root, "--times", sheet, "--timezone", "Europe/Berlin"
    )
    assert by_student(listing)["Ada_Lovelace"]["time"] == "2026-03-01 22:59:00 UTC"
    listing, _ = collect(tmp_path / "in.zip", root, "--times", sheet, "--roster", sheet, "--timezone", "UTC")
    assert by_student(listing)["ada@uni.example"]["time"] == "2026-03-01 23:59:00 UTC"
    assert listing["nothing_handed_in"] == ["emmy@uni.example"]


MOODLE_HEAD = 'Identifier,"Full name","Email address",Status,"Last modified (submission)"\n'


def test_a_worksheet_of_another_assignment_gives_nobody_anothers_work_or_time(tmp_path):
    """Moodle numbers the participants of every assignment anew, so that the numbers of two worksheets may be crosswise."""
    sheet = tmp_path / "sheet.csv"
    sheet.write_text(MOODLE_HEAD
                     + '"Participant 2002","Ada Lovelace",ada@uni.example,Submitted,"Sunday, 1 March 2026, 10:00 AM"\n'
                     + '"Participant 2001","Emmy Noether",emmy@uni.example,Submitted,"Sunday, 1 March 2026, 11:00 AM"\n'
                     + '"Participant 7","Gödel Kurt",kurt@uni.example,Submitted,"Sunday, 1 March 2026, 11:30 AM"\n')  # fmt: skip
    names = {"Ada Lovelace_2001": "ada", "Emmy Noether_2002": "emmy", "Kurt Gödel_7": "kurt"}
    members = {f"{name}_assignsubmission_file_/{STEM}.ipynb": notebook(mark) for name, mark in names.items()}
    root = course(tmp_path / "course")
    listing, _ = collect(archive(tmp_path / "in.zip", members), root, "--roster", sheet, "--times", sheet, "--timezone", "UTC")  # fmt: skip
    assert marks(root) == {"ada@uni.example": "ada", "emmy@uni.example": "emmy", "kurt@uni.example": "kurt"}
    said = by_student(listing)
    assert said["ada@uni.example"]["time"] is None and said["emmy@uni.example"]["time"] is None
    assert "another assignment's" in " ".join(said["ada@uni.example"]["remarks"])
    assert (
        said["kurt@uni.example"]["time"] == "2026-03-01 11:30:00 UTC"
    )  # the words of a name may stand in any order
    assert not said["kurt@uni.example"]["remarks"]


def test_a_roster_in_which_nobody_is_known_is_said(tmp_path):
    (tmp_path / "roster.csv").write_text("ID,E-Mail-Adresse des Kontos\nT1,ada@uni.example\n")
    source, root = lay(tmp_path / "in", {f"ada/{STEM}.ipynb": notebook("a")}), course(tmp_path / "course")
    done = subprocess.run([str(PROGRAM), "collect", STEM, str(source), "--course", str(root), "--roster", str(tmp_path / "roster.csv")],
                          capture_output=True, text=True)  # fmt: skip
    assert "nobody who handed in is in the roster" in done.stdout


def test_what_can_get_no_points_is_said_when_it_is_collected(tmp_path):
    other = {"cells": [{"cell_type": "code", "source": "", "metadata": {"nbgrader": {"grade_id": "causal_mask"}}}], "metadata": {"mark": "b"}}  # fmt: skip
    files = {f"a/{STEM}.ipynb": b'{"cells": [', f"b/{STEM}.ipynb": json.dumps(other).encode(), f"c/{STEM}.ipynb": notebook("c"), f"d/{STEM}.ipynb": b"\xff\xfe"}  # fmt: skip
    listing, _ = collect(lay(tmp_path / "in", files), course(tmp_path / "course"))
    remarks = {student: " ".join(says["remarks"]) for student, says in by_student(listing).items()}
    assert "JSON is broken" in remarks["a"] and "no exercise of decoding" in remarks["b"] and not remarks["c"]
    assert "not UTF-8" in remarks["d"]
    assert all(says["collected"] for says in listing["students"])


def test_the_table_has_whole_ids_and_the_times_of_the_zone_that_is_given(tmp_path):
    student = "wilhelmina.featherstonehaugh-cholmondeley@students.uni.example"
    source = lay(tmp_path / "in", {f"{student}/{STEM}.ipynb": notebook("a"), f"{student}/timestamp.txt": b"2026-03-01 22:59:00 UTC\n"})  # fmt: skip
    done = subprocess.run([str(PROGRAM), "collect", STEM, str(source), "--course", str(course(tmp_path / "course")), "--timezone", "Europe/Berlin"],
                          capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"})  # fmt: skip
    cells = [line.split("│")[1].strip() for line in done.stdout.splitlines() if line.startswith("│")]
    assert "".join(cells) == student
    assert "23:59" in done.stdout and "22:59" not in done.stdout


def test_collect_starts_without_torch(tmp_path):
    """Torch takes seconds to import, and collecting needs none of it."""
    source, root = lay(tmp_path / "in", {f"ada/{STEM}.ipynb": notebook("a")}), course(tmp_path / "course")
    program = f"import sys; from autograder import cli; assert cli.main(['collect', '{STEM}', {str(source)!r}, '--course', {str(root)!r}]) == 0; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"student_id,email\n", "names no student"),
        (b"email2,phone\na,b\n", "names no student"),
        (b"name,email\nAda,\n", "without a student's id"),
        (b"student_id\n../etc\n", "cannot be a student's id"),
        (b"student_id\n.hidden\n", "cannot be a student's id"),
        (b"student_id\na\na\n", "twice"),
        ("student_id\nä\n".encode("utf-16"), "not a CSV file in UTF-8"),
        (b"x\n" + b"a" * 200_000 + b"\n", "not a CSV file"),
    ],
)  # fmt: skip
def test_a_roster_that_cannot_be_used_is_said(tmp_path, content, words):
    (tmp_path / "r.csv").write_bytes(content)
    with pytest.raises(RosterError, match=words):
        read_roster(tmp_path / "r.csv")


@pytest.mark.parametrize("when", ["01/02/2026 10:00", "3.4.2026", "soon", "99999999999999999999"])
def test_a_time_that_is_not_clear_is_said(tmp_path, when):
    (tmp_path / "t.csv").write_text(f"student_id,submitted_at\na,{when}\n")
    with pytest.raises(RosterError, match="is not clear"):
        read_times(tmp_path / "t.csv", None)


def test_wrong_calls_are_usage_errors(tmp_path):
    root, source = course(tmp_path / "course"), lay(tmp_path / "in", {f"a/{STEM}.ipynb": notebook("a")})
    for options, words in (
        (("--timezone", "Mars/Olympus"), "--timezone takes"),
        (("--roster", tmp_path / "no.csv"), "cannot be read"),
        (("--from", "blackboard"), "invalid choice"),
    ):
        _, err = collect(source, root, *options, code=2)
        assert words in err
    for folder in (root, root / "autograded", root / "release"):
        folder.mkdir(exist_ok=True)
        assert str(root / "submitted") in collect(folder, root, code=2)[1]
    (root / "submitted").mkdir()
    assert "collected already" in collect(root / "submitted", root, code=2)[1]


# hostile archives


def craft(path: Path, members: dict[str, bytes], change=None) -> Path:
    """An archive whose members' headers are changed by `change(info)` before they are written."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            if change:
                change(info)
            file.writestr(info, content)
    return path


def good(student: str = "good", number: int = 1) -> dict[str, bytes]:
    return {f"{student}_{number}_{number}_decoding.ipynb": notebook(student)}


def test_names_cannot_leave_the_course_folder(tmp_path):
    members = {**good(), **good("fine", 2), "../../evil_5_5_decoding.ipynb": b"x", "/tmp/evil_6_6_decoding.ipynb": b"x", "C:\\evil_7_7_decoding.ipynb": b"x",
               "..\\..\\evil_8_8_decoding.ipynb": b"x", "..._9_9_decoding.ipynb": notebook("dots"), "a\x1b[2Jb_10_10_decoding.ipynb": notebook("escape"),
               "=cmd|' c_11_11_decoding.ipynb": notebook("formula")}  # fmt: skip
    root = course(tmp_path / "deep" / "course")
    listing, _ = collect(craft(tmp_path / "in.zip", members), root)
    assert set(marks(root).values()) == {"good", "fine", "dots", "escape", "formula"}
    assert all(not s.startswith((".", "=", "-")) and s.isprintable() and "/" not in s for s in marks(root))
    assert sum("points out of the archive" in why for why in reasons(listing).values()) == 4
    assert not [p for p in tmp_path.rglob("*evil*")] and "\x1b" not in json.dumps(listing)


def test_windows_separators_and_old_code_pages(tmp_path):
    members = {"Jos\u00e9 P\u00e9rez_1_assignsubmission_file_\\decoding.ipynb": notebook("jose")}
    path = craft(tmp_path / "in.zip", members)
    data = path.read_bytes()
    utf8 = "Jos\u00e9 P\u00e9rez_1".encode()
    # the flag that says UTF-8 is taken away: bytes stay, as older programs write them
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.index(signature) + offset
        flags = struct.unpack_from("<H", data, at)[0]
        data = data[:at] + struct.pack("<H", flags & ~0x800) + data[at + 2 :]
    path.write_bytes(data)
    root = course(tmp_path / "course")
    collect(path, root)
    assert marks(root) == {"Jos\u00e9_P\u00e9rez": "jose"}
    path.write_bytes(data.replace(utf8, "Jos\u00e9 P\u00e9rez_123".encode("cp437")))
    listing, _ = collect(path, root)
    assert by_student(listing)["Jos\u00e9_P\u00e9rez"]["ids"] == {"moodle": "123"}


def test_bombs_cost_their_own_student(tmp_path):
    bomb = b" " * (archives.MAX_BYTES + 1)
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as file:
        file.writestr("decoding.ipynb", notebook("inner"))
    members = {**good(), "bomb_2_2_decoding.ipynb": bomb, "nested_3_3_decoding.zip": inner.getvalue()}
    root = course(tmp_path / "course")
    path = craft(tmp_path / "in.zip", members)
    assert path.stat().st_size < 1 << 20
    listing, err = collect(path, root, code=1)
    assert marks(root) == {"good_1": "good"}
    assert reasons(listing)["bomb_2_2_decoding.ipynb"] == "it is larger than 100 MB"
    assert "bomb_2" in err and "nested_3" in err


def test_a_header_that_lies_about_the_size_is_not_believed(tmp_path):
    path = craft(tmp_path / "in.zip", {**good(), "liar_2_2_decoding.ipynb": b" " * (archives.MAX_BYTES + 1)})
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x01\x02")
    struct.pack_into("<I", data, at + 24, 100)  # the size when unpacked
    path.write_bytes(data)
    root = course(tmp_path / "course")
    listing, _ = collect(path, root, code=1)
    assert marks(root) == {"good_1": "good"}
    assert "damaged" in reasons(listing)["liar_2_2_decoding.ipynb"]


def test_the_whole_archive_has_a_limit(tmp_path, monkeypatch):
    source = ZipSource(
        craft(tmp_path / "in.zip", {f"s{i}_{i}_{i}_decoding.ipynb": b" " * 1000 for i in range(5)})
    )
    source.left_bytes = 2500
    with pytest.raises(SourceError, match="collect it in parts"):
        for entry in source.entries:
            source.read(entry)
    monkeypatch.setattr(archives, "MAX_MEMBERS", 3)
    with pytest.raises(SourceError, match="more than 3 files"):
        ZipSource(tmp_path / "in.zip")
    lay(tmp_path / "folder", {f"{i}.ipynb": b"" for i in range(5)})
    with pytest.raises(SourceError, match="more than 3 files"):
        archives.FolderSource(tmp_path / "folder")


def test_links_devices_and_encrypted_members_are_named_and_left(tmp_path):
    def change(info):
        kinds = {"link": stat.S_IFLNK, "fifo": stat.S_IFIFO, "device": stat.S_IFCHR}
        info.external_attr = (kinds.get(info.filename.split("_")[0], stat.S_IFREG) | 0o644) << 16

    members = {**good(), "link_2_2_decoding.ipynb": b"/etc/passwd", "fifo_3_3_decoding.ipynb": b"", "device_4_4_decoding.ipynb": b"",
               "secret_5_5_decoding.ipynb": notebook("secret"), "odd_6_6_decoding.ipynb": notebook("odd")}  # fmt: skip
    path = craft(tmp_path / "in.zip", members, change)
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x01\x02", 0, data.rindex(b"secret_5"))
    data[at + 8] |= 1  # encrypted
    at = data.rindex(b"PK\x01\x02", 0, data.rindex(b"odd_6"))
    struct.pack_into("<H", data, at + 10, zipfile.ZIP_LZMA)
    path.write_bytes(data)
    root = course(tmp_path / "course")
    listing, _ = collect(path, root, code=1)
    assert marks(root) == {"good_1": "good"}
    why = {name.split("_")[0]: reason for name, reason in reasons(listing).items()}
    assert why == {"link": "a link; links are not followed", "fifo": "not a plain file", "device": "not a plain file",
                   "secret": "it is encrypted", "odd": "it is packed in a way that is not read here"}  # fmt: skip


def test_links_in_a_folder_are_not_followed(tmp_path):
    (tmp_path / "secret.ipynb").write_bytes(notebook("secret"))
    source = lay(tmp_path / "in", {f"good/{STEM}/{STEM}.ipynb": notebook("good")})
    (source / "file" / STEM).mkdir(parents=True)
    (source / "file" / STEM / f"{STEM}.ipynb").symlink_to(tmp_path / "secret.ipynb")
    (source / "assignment").mkdir()
    (source / "assignment" / STEM).symlink_to(source / "good" / STEM)
    (source / "whole").symlink_to(source / "good")
    (source / "pipe" / STEM).mkdir(parents=True)
    os.mkfifo(source / "pipe" / STEM / f"{STEM}.ipynb")
    root = course(tmp_path / "course")
    listing, err = collect(source, root, code=1)
    assert marks(root) == {"good": "good"}
    assert all(name in err for name in ("file", "assignment", "pipe"))
    assert reasons(listing)["whole"] == "a link; links are not followed"


def test_a_damaged_member_costs_its_own_student_and_a_damaged_archive_is_said(tmp_path):
    path = craft(tmp_path / "in.zip", {**good(), "broken_2_2_decoding.ipynb": os.urandom(5000)})
    data = bytearray(path.read_bytes())
    at = data.index(b"broken_2_2_decoding.ipynb") + 60
    data[at : at + 40] = bytes(40)
    path.write_bytes(data)
    root = course(tmp_path / "course")
    listing, _ = collect(path, root, code=1)
    assert marks(root) == {"good_1": "good"} and "damaged" in reasons(listing)["broken_2_2_decoding.ipynb"]
    for content in (b"", b"not a zip", bytes(data[:-30]), b"PK\x05\x06" + bytes(18)):
        path.write_bytes(content)
        listing, err = collect(path, root, code=1)
        assert not listing and err.startswith("course-llm: ")
    assert marks(root) == {"good_1": "good"}


def test_no_student_decides_the_form_for_all(tmp_path):
    """A folder in which one student imitates a platform's names stays a plain folder."""
    source = lay(tmp_path / "in", {f"{s}/{STEM}/{STEM}.ipynb": notebook(s) for s in "abc"})
    lay(
        source,
        {
            f"mallory/{STEM}/a_{i}_assignsubmission_file_/decoding.ipynb": notebook("forged")
            for i in range(20)
        },
    )
    lay(source, {f"mallory/a_{i}_{i}_decoding.ipynb": notebook("forged") for i in range(20)})
    (source / "mallory" / ".git").mkdir()
    root = course(tmp_path / "course")
    listing, _ = collect(source, root)
    assert listing["form"] == "folder" and set(marks(root)) == {"a", "b", "c", "mallory"}


def test_reading_random_damage_never_ends_in_a_traceback(tmp_path):
    import random

    original = craft(tmp_path / "in.zip", {**good(), **good("b", 2)}).read_bytes()
    r = random.Random(0)
    for _ in range(300):
        data = bytearray(original)
        for _ in range(r.randrange(1, 6)):
            data[r.randrange(len(data))] = r.randrange(256)
        (tmp_path / "damaged.zip").write_bytes(data)
        try:
            source = ZipSource(tmp_path / "damaged.zip")
        except SourceError:
            continue
        for entry in source.entries:
            try:
                assert len(source.read(entry)) < 10_000
            except MemberError as error:
                assert str(error)


# interruption


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("moves", [0, 1, 2, 3, 4])
def test_an_interrupted_collect_leaves_the_old_or_is_finished_by_the_next(tmp_path, monkeypatch, moves):
    root = course(tmp_path / "course")
    lay(root / "submitted", {f"{s}/{STEM}/{STEM}.ipynb": notebook("old") for s in "ab"})

    def put(mark: str, names: str) -> bool:
        with staging.Staging(root) as laid:
            for student in names:
                laid.add(student, STEM, {f"{STEM}.ipynb": notebook(mark)})
            laid.commit(("collected/x.json", {"mark": mark}))
        return laid.recovered

    real, count = os.rename, 0

    def rename(*paths):
        nonlocal count
        if count == moves:
            raise Interrupted
        count += 1
        real(*paths)

    monkeypatch.setattr(staging.os, "rename", rename)
    with pytest.raises(Interrupted):
        put("new", "abc")  # needs five moves
    monkeypatch.setattr(staging.os, "rename", real)
    assert put("newer", "d")
    assert marks(root) == {"a": "new", "b": "new", "c": "new", "d": "newer"}
    assert not (root / ".collecting").exists()


def test_a_collect_that_is_killed_while_it_reads_changes_nothing(tmp_path):
    root = course(tmp_path / "course")
    lay(root / "submitted", {f"a/{STEM}/{STEM}.ipynb": notebook("old")})
    script = (
        "import os, sys\nfrom autograder import cli, staging\nadd = staging.Staging.add\n"
        "def once(self, *a):\n    if self.students:\n        os.kill(os.getpid(), 9)\n    add(self, *a)\n"
        "staging.Staging.add = once\nsys.exit(cli.main(sys.argv[1:]))\n"
    )
    source = lay(tmp_path / "in", {f"{s}/{STEM}/{STEM}.ipynb": notebook("new") for s in "abc"})
    done = subprocess.run([sys.executable, "-c", script, "collect", STEM, str(source), "--course", str(root)], capture_output=True)  # fmt: skip
    assert done.returncode == -9
    assert marks(root) == {"a": "old"} and (root / ".collecting").exists()
    collect(source, root)
    assert marks(root) == {"a": "new", "b": "new", "c": "new"} and not (root / ".collecting").exists()
