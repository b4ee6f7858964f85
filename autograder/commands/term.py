"""The commands of a term: `course-llm release` and `feedback`, thin over nbgrader's own API, `collect` and `export`."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from autograder.commands import Failure, chapter_of, collect, export


def add(commands) -> None:
    """Adds the commands."""
    simple(commands, "release", "write an assignment into a course folder and release it", run_release, "run it again, so that the release is whole")
    collect.add(commands)
    simple(commands, "feedback", "write the feedback pages of an assignment", run_feedback, "some pages may be missing; run it again, it writes all")
    export.add(commands)


def simple(commands, name: str, words: str, run: Callable[[argparse.Namespace], int], interrupted: str) -> None:  # fmt: skip
    """Adds a command that takes a chapter and a course folder."""
    command = commands.add_parser(name, help=words)
    command.add_argument("stem", metavar="STEM", help="the chapter")
    command.add_argument("--course", type=Path, default=Path("course"), metavar="DIR", help="course folder (default: course)")  # fmt: skip
    command.set_defaults(run=run, interrupted=interrupted)


def run_release(arguments: argparse.Namespace) -> int:
    """`course-llm release`."""
    chapter_of(arguments.stem)
    from autograder.course import Course, CourseError

    try:
        course = Course(arguments.course, create=True)
        path, safe = course.release(arguments.stem), course.is_set_up()
    except CourseError as error:
        raise Failure(str(error)) from None
    print(f"released {path}")
    if not safe:
        config = arguments.course / "nbgrader_config.py"
        print(f"course-llm: {config} is not of this course's making: nbgrader's own autograde and formgrader would run the students' code with your rights there; add to it: from autograder.nbgrader_plugin import configure; configure(c)", file=sys.stderr)  # fmt: skip
    return 0


def run_feedback(arguments: argparse.Namespace) -> int:
    """`course-llm feedback`."""
    chapter_of(arguments.stem)
    from autograder.course import Course, CourseError

    try:
        pages = Course(arguments.course).feedback(arguments.stem)
    except CourseError as error:
        raise Failure(str(error)) from None
    print(f"wrote {len(pages)} feedback pages below {arguments.course / 'feedback'}")
    return 0
