"""The commands of a term: `course-llm release` and `feedback`, thin over nbgrader's own API, `collect` and `export`."""

import argparse
import sys
from pathlib import Path

from autograder.commands import Failure, chapter_of, collect, export


def add(commands) -> None:
    """Adds the commands."""
    release = simple(commands, "release", "write an assignment into a course folder and release it")
    release.set_defaults(run=run_release, interrupted="run it again, so that the release is whole")
    collect.add(commands)
    feedback = simple(commands, "feedback", "write the feedback pages of an assignment")
    feedback.add_argument("--zip", action="store_true", help="pack them, too, as DIR/STEM-feedback.zip, to be uploaded to Moodle or Canvas")  # fmt: skip
    feedback.set_defaults(run=run_feedback, interrupted="pages may be missing; run it again, it writes all")
    export.add(commands)


def simple(commands, name: str, words: str) -> argparse.ArgumentParser:
    """Adds a command that takes a chapter and a course folder."""
    command = commands.add_parser(name, help=words)
    command.add_argument("stem", metavar="STEM", help="the chapter")
    command.add_argument("--course", type=Path, default=Path("course"), metavar="DIR", help="course folder (default: course)")  # fmt: skip
    return command


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
        course = Course(arguments.course, stem=arguments.stem)
        pages = course.feedback(arguments.stem)
    except CourseError as error:
        raise Failure(str(error)) from None
    print(f"wrote {len(pages)} feedback pages below {arguments.course / 'feedback'}")
    if arguments.zip:
        pack(arguments, course, pages)
    return 0


def pack(arguments: argparse.Namespace, course, pages: list[Path]) -> None:
    """Writes the pages as an archive for the platform from which the work was collected."""
    from autograder import lms
    from autograder.collecting import read_record
    from autograder.submission import printable

    record = read_record(course.root / "collected" / f"{arguments.stem}.json")
    data, left = lms.feedback_zip({page.parts[-3]: page for page in pages}, record, arguments.stem)
    for student in left:
        print(f"not in the archive: {printable(student)} was collected from neither Moodle nor Canvas")
    if len(left) == len(pages):
        raise Failure("no page belongs to a student collected from Moodle or Canvas; no archive is written")
    target = arguments.course / f"{arguments.stem}-feedback.zip"
    lms.write(target, data)
    print(f"packed {len(pages) - len(left)} pages as {target}")
