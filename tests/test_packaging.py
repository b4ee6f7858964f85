"""The wheel holds what its users need, and nothing that is only for this repository."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from autograder import catalog
from samples.build import answers
from tests.conftest import ROOT

SOURCES = ("src", "autograder", "etc", "pyproject.toml", "README.md", "LICENSE", "LICENSE-TEXT")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel's folder, unpacked, and the names of its files."""
    copy = tmp_path_factory.mktemp("copy")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(copy / "out"), str(copy)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = (copy / "out").glob("course_llm-*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(copy / "site")
        return copy / "site", archive.namelist()


def test_the_wheel_holds_packages_data_figures_and_the_command(wheel):
    site, names = wheel
    for folder in ("src/course_llm", "autograder"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert path.relative_to(ROOT).as_posix().removeprefix("src/") in names
    assert {f"autograder/catalog/{stem}.json" for stem in catalog.stems()} <= set(names)
    assert "course_llm/data/bundled.safetensors" in names and "course_llm/live/sampling.js" in names
    (points,) = site.glob("*.dist-info/entry_points.txt")
    assert "course-llm = autograder.cli:main" in points.read_text()
    assert [n for n in names if n.endswith("data/etc/jupyter/nbgrader_config.py")]
    assert len([n for n in names if "/licenses/" in n]) == 2


def test_the_wheel_holds_no_solutions_tests_samples_or_book(wheel):
    _, names = wheel
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.startswith("course_llm-")} == {"course_llm", "autograder"}


def test_the_wheels_command_checks_and_grades_outside_the_repository(wheel, tmp_path):
    site, _ = wheel
    path = tmp_path / "mine.py"
    path.write_text(answers("decoding")["top_p_filter"])
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(site)}

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "autograder.cli", *arguments, "--json"]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)

    where = "import autograder, course_llm; print(autograder.__file__, course_llm.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", where], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert all(Path(place).is_relative_to(site) for place in found.stdout.split())
    assert json.loads(run("check", "decoding", "mine.py").stdout)[0]["passed"]
    graded = run("grade", "decoding", "mine.py")
    (report,) = json.loads(graded.stdout)
    assert report["points"] == catalog.chapter("decoding").entry("top_p_filter").points
