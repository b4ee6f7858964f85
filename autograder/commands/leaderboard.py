"""`course-llm leaderboard`: the capstone's generators by counted cost."""

import argparse
import json
from pathlib import Path

from autograder.commands import Failure, UsageError
from autograder.commands.grade import end_of_grading, graded_paths


def add(commands) -> None:
    """Adds the command."""
    board = commands.add_parser("leaderboard", help="rank the capstone's generators by what they cost", description="Ranks the capstone's generators by counted FLOPs: of notebooks that are graded now, or of those graded in a course folder.")  # fmt: skip
    board.add_argument("paths", metavar="PATH", nargs="*", type=Path, help="a notebook, a .py file, or a folder <student>/capstone/capstone.ipynb")  # fmt: skip
    board.add_argument("--course", type=Path, metavar="DIR", help="course folder whose graded submissions are ranked")  # fmt: skip
    board.add_argument("--json", action="store_true", help="print a list with one object per submission")
    board.add_argument("--workers", type=int, metavar="N", help="processes (default: by cores and submissions)")  # fmt: skip
    board.add_argument(
        "--no-sandbox",
        action="store_true",
        help="run answers without isolation; the counts are not to be trusted then",
    )
    board.set_defaults(
        run=run_leaderboard, stem="capstone", device="cpu", seed=None, force=False, scheduler=None
    )


def run_leaderboard(arguments: argparse.Namespace) -> int:
    """`course-llm leaderboard`: the capstone's generators by counted cost."""
    from autograder.course import Course, CourseError
    from autograder.leaderboard import leaderboard, print_leaderboard

    if bool(arguments.paths) == bool(arguments.course):
        raise UsageError(
            "leaderboard takes notebooks or folders to grade, or --course DIR with what is graded there"
        )
    unusable: dict[str, str] = {}
    if arguments.course:
        try:
            reports = Course(arguments.course, stem=arguments.stem).reports(arguments.stem)
        except CourseError as error:
            raise Failure(str(error)) from None
    else:
        reports, unusable = graded_paths(arguments)
    rows = leaderboard(reports)
    if arguments.json:
        print(json.dumps([row.to_json() for row in rows], indent=1))
    elif len(rows) > len(unusable):
        print_leaderboard(rows)
    return end_of_grading(arguments, unusable)
