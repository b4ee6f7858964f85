"""The GitHub Classroom repository; its workflow's steps are run in a shell, as a runner does."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest
import yaml

from autograder import catalog, classroom
from samples.build import answers, fill
from tests import environments
from tests.test_cli import DROPS_CROSSING, command, refused

STEM = "decoding"
CHAPTER = catalog.chapter(STEM)
RIGHT = answers(STEM)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classroom") / "assignment"
    code, out, err = command("classroom", STEM, "--to", folder)
    assert (code, err) == (0, "") and str(folder) in out
    return folder


def workflow(repository: Path) -> dict:
    return yaml.safe_load((repository / ".github" / "workflows" / "classroom.yml").read_text())


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """What setup-python leaves first on the path: a Python without the project, here with its dependencies."""
    names = [d.name for d in importlib.metadata.distributions() if d.name != "course-llm"]
    made = environments.make(tmp_path_factory.mktemp("runner"), environments.interpreter(), names)
    return made / "bin"


def push(repository: Path, python: Path, place: Path, notebook: dict | str | None) -> tuple[int, str, str]:
    """Runs the workflow's steps on a student's repository: exit code, what was printed, the job's summary."""
    checkout = place / "work"
    shutil.copytree(repository, checkout)
    target = checkout / f"{STEM}.ipynb"
    target.unlink()
    if notebook is not None:
        target.write_text(notebook if isinstance(notebook, str) else json.dumps(notebook))
    summary = place / "summary.md"
    summary.touch()
    env = {"PATH": f"{python}:/usr/bin:/bin", "HOME": str(place), "RUNNER_TEMP": str(place), "GITHUB_STEP_SUMMARY": str(summary), "CI": "true", "OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1"}  # fmt: skip
    said = ""
    (job,) = workflow(repository)["jobs"].values()
    for step in job["steps"]:
        if "run" not in step:
            continue
        script = place / "step.sh"
        script.write_text(step["run"])
        done = subprocess.run(["bash", "-e", script], cwd=checkout, env=env, capture_output=True, text=True)
        said += done.stdout + done.stderr
        if done.returncode:
            return done.returncode, said, summary.read_text()
    return 0, said, summary.read_text()


def points(said: str) -> str:
    (found,) = re.findall(r"^::notice title=Autograding complete::Points (\S+)$", said, re.M)
    (report,) = re.findall(r"^::notice title=Autograding report::(.*)$", said, re.M)
    numbers = json.loads(report)
    assert found == f"{numbers['totalPoints']}/{numbers['maxPoints']}"
    return found


def test_a_right_notebook_passes_with_every_point(repository, python, tmp_path):
    code, said, summary = push(repository, python, tmp_path, fill(STEM, RIGHT))
    assert code == 0, said
    assert points(said) == f"{CHAPTER.points}/{CHAPTER.points}"
    assert summary.count("| passed |") == len(CHAPTER.entries)


def test_a_wrong_notebook_fails_and_the_summary_says_why(repository, python, tmp_path):
    notebook = fill(STEM, {**RIGHT, "top_p_filter": DROPS_CROSSING})
    code, said, summary = push(repository, python, tmp_path, notebook)
    worth = CHAPTER.entry("top_p_filter").points
    assert code == 1
    passed = re.findall(
        r"^\| `\w+` \| passed \| (\d+) / \1 \|", summary, re.M
    )  # what uses the filter fails, too
    assert 0 < sum(map(int, passed)) <= CHAPTER.points - worth
    assert points(said) == f"{sum(map(int, passed))}/{CHAPTER.points}"
    (row,) = (line for line in summary.splitlines() if line.startswith("| `top_p_filter`"))
    assert f"| failed | 0 / {worth} |" in row and "crosses" in row


@pytest.mark.parametrize("notebook", [None, "{", CHAPTER.notebook])
def test_what_cannot_be_checked_gets_no_point_and_says_so(repository, python, tmp_path, notebook):
    code, said, summary = push(repository, python, tmp_path, notebook)
    assert code == 1
    assert points(said) == f"0/{CHAPTER.points}"
    words = "Not attempted." if isinstance(notebook, dict) else "The check did not come to a result"
    assert summary.count(words) == len(CHAPTER.entries)


def test_the_workflow_asks_for_no_more_than_it_needs(repository):
    found = workflow(repository)
    assert found["permissions"] == {"contents": "read"}
    (job,) = found["jobs"].values()
    assert job["timeout-minutes"] <= 60
    assert {step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step} == {
        "actions/checkout",
        "actions/setup-python",
    }


def test_the_notebook_is_the_released_one(repository):
    notebook = nbformat.read(repository / f"{STEM}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert notebook == nbformat.from_dict(CHAPTER.notebook)
    assert f"{STEM}.ipynb" in (repository / "README.md").read_text()


def test_with_an_address_the_package_comes_from_there(tmp_path):
    files = classroom.write_repository(CHAPTER, tmp_path, "https://git.example/course", "main")
    assert not any(path.suffix == ".whl" for path in files)
    steps = [s["run"] for s in workflow(tmp_path)["jobs"]["run-autograding-tests"]["steps"] if "run" in s]
    assert '"git+https://git.example/course@main"' in steps[0]
    assert "git+https://git.example/course@main" in (tmp_path / "README.md").read_text()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    code, line = refused("classroom", STEM, "--to", tmp_path)
    assert code == 2 and "not an empty folder" in line
    assert os.listdir(tmp_path) == ["mine.txt"]


def test_a_message_cannot_break_the_table():
    rows = [{"name": "f", "passed": False, "message": "a|b\n<b>", "points": 0, "max_points": 2}]
    (line,) = (line for line in classroom.table(CHAPTER, rows).splitlines() if "`f`" in line)
    assert line.endswith("| a\\|b &lt;b> |")
