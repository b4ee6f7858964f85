"""The subcommands of `course-llm`, one module each; this one holds what they share.

A module has `add(commands)`, which adds its parser, and functions that run it and return the exit code.
"""

import argparse
from pathlib import Path
from typing import NoReturn

EXIT_FAILURE, EXIT_USAGE = 1, 2


class Failure(Exception):
    """Ends the command with one line on standard error and exit code 1."""


class UsageError(Exception):
    """Ends the command with one line on standard error and exit code 2."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


OWN_FOLDERS = ("source", "release", "autograded", "feedback")
NOTHING_KEPT = "nothing of it is kept; run it again"


def refuse_course_folder(path: Path) -> None:
    """A usage error for a course folder, and for those of its folders in which nobody hands in: their names would become students."""
    place = path.resolve()
    for root in (place, place.parent):
        if (root / "nbgrader_config.py").is_file() and (root == place or place.name in OWN_FOLDERS):
            what = "a course folder itself" if root == place else "a folder of nbgrader's own"
            raise UsageError(f"{path} is {what}; what was collected there lies in {root / 'submitted'}")


def chapter_of(stem: str):
    """The chapter of a stem, or a usage error that names the chapters."""
    from autograder import catalog

    try:
        return catalog.chapter(stem)
    except catalog.UnknownChapter as error:
        raise UsageError(str(error)) from None
