"""What several test files share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# commands that are run as a user would run them find nbgrader, alembic and course-llm
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])


@pytest.fixture
def run():
    """Runs a command as a user would and returns what came of it."""

    def run(
        *command: str | Path, cwd: Path = ROOT, timeout: float = 300, **options
    ) -> subprocess.CompletedProcess:
        return subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            timeout=timeout,
            capture_output=True,
            text=True,
            **options,
        )

    return run
