"""The exercises of every chapter hold together, and so do the rooms of the project: what `make gate` asks."""

import sys
from pathlib import Path

import pytest

from autograder.sync import solution_stems, ungraded_notebooks


@pytest.mark.timeout(900)
@pytest.mark.parametrize("stem", solution_stems())
def test_exercises_hold_together(stem, run):
    done = run(sys.executable, "-m", "autograder.gate", stem, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def test_notebooks_without_grades_are_fresh():
    stale = [p.name for p, text in ungraded_notebooks().items() if not p.exists() or p.read_text() != text]
    assert not stale, f"stale: {stale}; run `make sync`"


def test_no_room_uses_what_it_may_not(run):
    done = run(Path(sys.executable).parent / "lint-imports", "--no-cache")
    assert done.returncode == 0, done.stdout
