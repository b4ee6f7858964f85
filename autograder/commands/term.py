"""`course-llm release`, `collect`, `feedback`, `export`: thin over nbgrader's own API."""

import argparse
from pathlib import Path

from autograder.commands import Failure, UsageError, chapter_of


def add(commands) -> None:
    """Adds the commands."""
    for name, words in (
        ("release", "write an assignment into a course folder and release it"),
        ("collect", "collect submissions into a course folder"),
        ("feedback", "write the feedback pages of an assignment"),
        ("export", "write the grades of an assignment as CSV"),
    ):
        command = commands.add_parser(name, help=words)
        command.add_argument("stem", metavar="STEM", help="the chapter")
        if name == "collect":
            command.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, help="folder <student>/STEM/STEM.ipynb (default: nbgrader's exchange)")  # fmt: skip
        if name == "export":
            command.add_argument(
                "--to", type=Path, metavar="FILE", help="where to write (default: DIR/STEM.csv)"
            )
        command.add_argument("--course", type=Path, default=Path("course"), metavar="DIR", help="course folder (default: course)")  # fmt: skip
        command.set_defaults(run=globals()[f"run_{name}"])


def run_release(arguments: argparse.Namespace) -> int:
    """`course-llm release`."""
    chapter_of(arguments.stem)
    from autograder.course import Course, CourseError

    try:
        path = Course(arguments.course, create=True).release(arguments.stem)
    except CourseError as error:
        raise Failure(str(error)) from None
    print(f"released {path}")
    return 0


def run_collect(arguments: argparse.Namespace) -> int:
    """`course-llm collect`."""
    chapter_of(arguments.stem)
    from autograder.course import Course, CourseError
    from autograder.submission import SubmissionError

    if arguments.folder is not None and not arguments.folder.is_dir():
        raise UsageError(f"there is no folder {arguments.folder}")
    try:
        course = Course(arguments.course)
        if arguments.folder is None:
            collected = course.collect_from_exchange(arguments.stem)
        else:
            collected = course.collect(arguments.stem, arguments.folder)
    except (CourseError, SubmissionError) as error:
        raise Failure(str(error)) from None
    print(f"collected {len(collected)} submissions into {arguments.course / 'submitted'}")
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


def run_export(arguments: argparse.Namespace) -> int:
    """`course-llm export`."""
    chapter_of(arguments.stem)
    from autograder.course import Course, CourseError

    target = arguments.to or arguments.course / f"{arguments.stem}.csv"
    try:
        Course(arguments.course).export(arguments.stem, target)
    except CourseError as error:
        raise Failure(str(error)) from None
    print(f"wrote {target}")
    return 0
