"""The Gradescope archive, unpacked, set up and run in a folder laid out as Gradescope lays it out."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from autograder import catalog, gradescope, packing
from autograder.grading import ExerciseReport, SubmissionReport
from samples.build import answers, fill
from tests import environments
from tests.test_cli import DROPS_CROSSING, command, refused

STEM = "decoding"
CHAPTER = catalog.chapter(STEM)
NAMES = [entry.name for entry in CHAPTER.entries]
RIGHT = answers(STEM)
ALLOWED = {"score", "execution_time", "output", "output_format", "test_output_format", "test_name_format", "visibility", "stdout_visibility", "extra_data", "tests", "leaderboard"}  # fmt: skip
ALLOWED_IN_TEST = {"score", "max_score", "status", "name", "name_format", "number", "output", "output_format", "tags", "visibility", "extra_data"}  # fmt: skip
# a container whose system calls are filtered as Docker does it: no new namespaces, no mounts
NO_NAMESPACES = """
import os, sys
import pyseccomp as s

rules = s.SyscallFilter(defaction=s.ALLOW)
for name in ("unshare", "setns", "mount", "umount2", "pivot_root"):
    rules.add_rule(s.ERRNO(1), name)
for flag in (0x10000000, 0x00020000, 0x20000000):
    rules.add_rule(s.ERRNO(1), "clone", s.Arg(0, s.MASKED_EQ, flag, flag))
rules.add_rule(s.ERRNO(38), "clone3")
rules.load()
os.execv(sys.argv[1], sys.argv[1:])
"""
HOSTILE = """
import os

def {name}(*args, **kwargs):
    root = {root!r}
    won = '{{"score": 1000, "tests": []}}'
    for place in (root + "/results/results.json", root + "/run_autograder", root + "/results/.results.json.tmp"):
        for act in (lambda: open(place, "w").write(won), lambda: os.remove(place), lambda: os.chmod(place, 0o777)):
            try:
                act()
            except OSError:
                pass
    for folder, _, files in os.walk(root):
        for file in files:
            if file in ("{stem}.py", "assignment.json"):
                text = open(os.path.join(folder, file)).read()
                scope = {{}}
                exec(text, scope)
                return scope["{name}"](*args, **kwargs)
    return print(won)
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    path = tmp_path_factory.mktemp("archive") / "decoding.zip"
    code, out, err = command("gradescope", STEM, "--to", path, "--seed", 5)
    assert (code, err) == (0, "") and str(path) in out
    return path


@pytest.fixture(scope="module")
def container(archive):
    """A folder like Gradescope's /autograder, after its setup.sh has run."""
    with environments.open_folder() as root:
        source = root / "source"
        with zipfile.ZipFile(archive) as file:
            file.extractall(source)
        pins = (source / "requirements.txt").read_text()
        names = [line.partition("==")[0] for line in pins.splitlines()]
        environments.make(root, environments.interpreter(), [*names, "pip"])
        shutil.copy(source / "run_autograder", root)
        (root / "run_autograder").chmod(0o755)
        env = os.environ | {"GRADESCOPE_ROOT": str(root), "PIP_NO_INDEX": "1"}
        done = subprocess.run(
            ["bash", source / "setup.sh"], env=env, cwd=root, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"the checks of {STEM} work here" in done.stdout
        yield root


def submit(root: Path, files: dict[str, str | dict], *wrapper: str) -> tuple[dict, str]:
    """Runs a submission as Gradescope does; returns results.json and what was printed."""
    for name in ("submission", "results"):
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).mkdir()
    for name, content in files.items():
        path = root / "submission" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    env = {"PATH": os.environ["PATH"], "HOME": "/root", "GRADESCOPE_ROOT": str(root)}
    done = subprocess.run([*wrapper, "/usr/bin/env", "bash", root / "run_autograder"], env=env, cwd=root, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((root / "results" / "results.json").read_text())
    assert_documented(found)
    return found, done.stdout + done.stderr


def assert_documented(found: dict) -> None:
    """results.json has nothing but what Gradescope documents, in the documented types."""
    assert set(found) <= ALLOWED
    assert found["stdout_visibility"] == "hidden" and isinstance(found["output"], str)
    assert isinstance(found["score"], (int, float))
    for test in found["tests"]:
        assert set(test) <= ALLOWED_IN_TEST
        assert test["status"] in ("passed", "failed") and test["visibility"] in gradescope.VISIBILITIES
        assert 0 <= test["score"] <= test["max_score"]
        assert all(isinstance(test[k], str) for k in ("name", "number", "output"))
        assert all(isinstance(tag, str) for tag in test["tags"])


def test_the_archive_has_setup_and_run_at_its_root_and_names_no_registry(archive):
    with zipfile.ZipFile(archive) as file:
        modes = {i.filename: (i.external_attr >> 16) & 0o777 for i in file.infolist()}
        texts = [file.read(n).decode() for n in ("setup.sh", "run_autograder", "requirements.txt")]
    assert modes["setup.sh"] == modes["run_autograder"] == 0o755
    assert any(name.endswith(".whl") for name in modes)
    assert not any("://" in text for text in texts)
    assert "torch==" in texts[2] and "+" not in texts[2]
    for text in texts[:2]:
        assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode == 0


def test_the_wheel_in_it_is_the_installation(archive, tmp_path):
    with zipfile.ZipFile(archive) as file:
        (name,) = (n for n in file.namelist() if n.endswith(".whl"))
        file.extract(name, tmp_path)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", tmp_path / "site", tmp_path / name]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for relative, data in packing.package_files():
        assert (tmp_path / "site" / relative).read_bytes() == data
    assert (tmp_path / "site" / "bin" / "course-llm").exists()


def test_a_right_submission_of_any_name_gets_every_point(container):
    found, said = submit(container, {"My answers (2).ipynb": fill(STEM, RIGHT), "notes.txt": "hello"})
    assert found["score"] == CHAPTER.points, found["output"] + said
    assert found["extra_data"] == {"isolation": "bubblewrap"}
    assert [t["name"] for t in found["tests"]] == NAMES
    assert {t["status"] for t in found["tests"]} == {"passed"}
    assert [t["number"] for t in found["tests"]] == [str(i + 1) for i in range(len(NAMES))]
    assert found["execution_time"] > 0


def test_a_wrong_submission_is_told_its_mistake_and_where_to_read(container):
    found, _ = submit(container, {f"{STEM}.ipynb": fill(STEM, {"top_p_filter": DROPS_CROSSING})})
    tests = {t["name"]: t for t in found["tests"]}
    wrong = tests["top_p_filter"]
    assert found["score"] == 0 and wrong["status"] == "failed"
    assert "drops-crossing-token" in wrong["tags"]
    assert "crosses" in wrong["output"] and f"{STEM}.html#" in wrong["output"]
    assert "tensor(" not in json.dumps(found)
    assert "not attempted" in tests["beam_search"]["tags"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({f"{STEM}.ipynb": "{"}, "its JSON is broken"),
        ({}, f"hand in {STEM}.ipynb"),
        ({"essay.txt": "words", ".ipynb_checkpoints/a.ipynb": "{}"}, f"hand in {STEM}.ipynb"),
    ],
)
def test_a_broken_submission_gets_nothing_and_a_reason(container, files, words):
    found, _ = submit(container, files)
    assert found["score"] == 0 and words in found["output"]


def test_of_several_notebooks_the_one_with_the_exercises_is_graded(container):
    others = {"a.ipynb": {"cells": []}, "week 3/final.ipynb": fill(STEM, {NAMES[1]: RIGHT[NAMES[1]]})}
    found, _ = submit(container, others)
    assert found["score"] == CHAPTER.entry(NAMES[1]).points
    assert "final.ipynb is graded" in found["output"]


def hostile(root: Path) -> dict:
    source = HOSTILE.format(name=NAMES[0], stem=STEM, root=str(root))
    return {f"{STEM}.ipynb": fill(STEM, {NAMES[0]: source, NAMES[1]: RIGHT[NAMES[1]]})}


def test_a_hostile_submission_earns_what_is_right_and_writes_nothing(container):
    found, _ = submit(container, hostile(container))
    assert found["score"] == CHAPTER.entry(NAMES[1]).points
    assert (container / "run_autograder").read_text() == gradescope.RUN


@pytest.fixture(scope="module")
def confined(container):
    """The start of a command whose processes get no namespaces, as in an ordinary container."""
    if not environments.reachable(os.path.realpath(container / "venv" / "bin" / "python")):
        pytest.skip("no Python here may be started by another user")
    return [str(container / "venv" / "bin" / "python"), "-c", textwrap.dedent(NO_NAMESPACES)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_without_namespaces_root_grades_as_a_user_without_rights(container, confined):
    found, said = submit(container, hostile(container), *confined)
    assert found["extra_data"] == {"isolation": "user"}, found["output"] + said
    assert found["score"] == CHAPTER.entry(NAMES[1]).points
    assert (container / "run_autograder").read_text() == gradescope.RUN
    assert sorted(p.name for p in (container / "results").iterdir()) == ["results.json"]
    assert "results.json cannot be written" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_what_others_may_write_is_noticed_and_nothing_is_graded(container, confined):
    (container / "run_autograder").chmod(0o777)
    try:
        found, said = submit(container, {f"{STEM}.ipynb": fill(STEM, RIGHT)}, *confined)
    finally:
        (container / "run_autograder").chmod(0o755)
    assert found["score"] == 0 and found["tests"] == []
    assert "not your fault" in found["output"] and "not so: run_autograder cannot be written" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_environment_that_others_cannot_enter_is_no_isolation(container, confined):
    (container / "venv").chmod(0o700)  # so that what the worker may import cannot be found
    (container / "links").chmod(0o700)
    try:
        found, said = submit(container, {f"{STEM}.ipynb": fill(STEM, RIGHT)}, *confined)
    finally:
        (container / "venv").chmod(0o755)
        (container / "links").chmod(0o755)
    assert found["score"] == 0 and found["tests"] == []
    assert "not your fault" in found["output"] and "nothing is graded:" in said


def test_a_grader_that_does_not_start_leaves_a_result(container):
    hidden = container / "grader-away"
    (container / "grader").rename(hidden)
    try:
        found, _ = submit_raw(container)
    finally:
        hidden.rename(container / "grader")
    assert found["score"] == 0 and "tell your instructor" in found["output"]


def submit_raw(root: Path) -> tuple[dict, str]:
    env = {"PATH": os.environ["PATH"], "GRADESCOPE_ROOT": str(root)}
    done = subprocess.run(["bash", root / "run_autograder"], env=env, capture_output=True, text=True)
    return json.loads((root / "results" / "results.json").read_text()), done.stderr


def test_hidden_groups_tell_whether_they_pass_and_nothing_more():
    groups = [
        {"name": "values", "says": "The values.", "passed": True, "points": 2.0, "max_points": 2.0, "complaint": ""},
        {"name": "secret", "says": "Tells all.", "passed": False, "points": 0.0, "max_points": 1.0, "complaint": "it is so"},
    ]  # fmt: skip
    report = ExerciseReport(
        "f", 2.0, 3.0, False, message="Tells all. It is so.", see="x.html#y", groups=groups
    )
    settings = {"stem": STEM, "visibility": "after_due_date", "book": "https://book.example/"}
    shown = gradescope.exercise_result(report, "1", {"secret"}, settings)
    assert "FAIL  Hidden cases. (0 / 1)" in shown["output"] and "pass  The values. (2 / 2)" in shown["output"]
    assert "Tells" not in shown["output"] and "it is so" not in shown["output"].lower()
    assert "https://book.example/book/x.html#y" in shown["output"]
    assert shown["visibility"] == "after_due_date"


def test_an_unreadable_submissions_reason_stands_above_its_tests():
    report = SubmissionReport("s", [ExerciseReport("f", 0.0, 3.0, False)], error="no <b>cells</b>")
    found = gradescope.results(report, CHAPTER, {"stem": STEM, "visibility": "visible", "book": ""})
    assert_documented(found)
    assert found["output"] == "no <b>cells</b>" and found["output_format"] == "text"


def test_the_command_refuses_what_gradescope_does_not_know(tmp_path):
    code, line = refused("gradescope", STEM, "--visibility", "never")
    assert code == 2 and "after_due_date" in line
    code, line = refused("gradescope", STEM, "--to", tmp_path / "no" / "a.zip")
    assert code == 1 and "No such file" in line
    assert refused("gradescope", "nothing")[0] == 2
