"""Grades the course's exercises: `check` in a notebook, `course-llm grade` for a class."""

import os
import sys
import warnings


def put_scripts_on_path() -> None:
    """Lets nbgrader find `alembic` when the environment is used without being activated."""
    scripts = os.path.dirname(sys.executable)
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])


# nbgrader 0.9 on SQLAlchemy 2.1 says this for every submission; it loses nothing
warnings.filterwarnings("ignore", "Object of type <Submitted")
