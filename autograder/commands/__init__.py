"""The subcommands of `course-llm`, one module each; this one holds what they share.

A module has `add(commands)`, which adds its parser, and functions that run it and return the exit code.
"""

import argparse
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


def chapter_of(stem: str):
    """The chapter of a stem, or a usage error that names the chapters."""
    from autograder import catalog

    try:
        return catalog.chapter(stem)
    except catalog.UnknownChapter as error:
        raise UsageError(str(error)) from None
