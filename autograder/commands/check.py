"""`course-llm check`: a student's own answers on the public cases."""

import argparse
import contextlib
import json
import sys
from pathlib import Path

from autograder.commands import EXIT_FAILURE, Failure, chapter_of


def add(commands) -> None:
    """Adds the command."""
    check = commands.add_parser("check", help="check your own answers on the public cases", description="Checks a notebook or Python file on the public cases, in this process. Exit code 0 only if all that it defines pass.")  # fmt: skip
    check.add_argument("stem", metavar="STEM", help="the chapter, for example decoding")
    check.add_argument(
        "file", metavar="FILE", nargs="?", type=Path, help="an .ipynb or a .py (default: STEM.ipynb)"
    )
    check.add_argument("--json", action="store_true", help="print the result as JSON")
    check.set_defaults(run=run_check)


def run_check(arguments: argparse.Namespace) -> int:
    """`course-llm check`: public cases, in this process."""
    chapter = chapter_of(arguments.stem)
    path = arguments.file or default_notebook(arguments.stem)
    from autograder.submission import SubmissionError, read_submission

    try:
        submission = read_submission(path, chapter)
    except SubmissionError as error:
        raise Failure(str(error)) from None
    from autograder.check import check_sources

    # what the answers print must not stand in the middle of the JSON
    with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
        results = check_sources(chapter, submission)
    if arguments.json:
        print(json.dumps(results, indent=2))
    elif results:
        print_check_table(results)
    if not results:
        if path.suffix == ".ipynb" and not all(
            f"{e.name}: its cell is missing" in submission.remarks for e in chapter.entries
        ):
            raise Failure(
                f"no exercise of {arguments.stem} is written yet in {path}: replace `raise NotImplementedError` with your answer"
            )
        raise Failure(f"{path} defines none of the exercises of {arguments.stem}")
    return 0 if all(r["passed"] for r in results) else EXIT_FAILURE


def print_check_table(results: list[dict]) -> None:
    """One row per exercise, and what is wrong with it."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("exercise", "result", "what is wrong")
    for row in results:
        case = "".join(f"\n{label}: {text}" for label, text in row.get("case", {}).items())
        table.add_row(row["name"], "passed" if row["passed"] else "failed", escape(row["message"] + case))
    Console().print(table)


def default_notebook(stem: str) -> Path:
    """The chapter's notebook here, or where it lies in the project."""
    places = (Path(f"{stem}.ipynb"), Path("exercises", stem, f"{stem}.ipynb"))
    for place in places:
        if place.exists():
            return place
    raise Failure(f"there is no {stem}.ipynb here; name the file: course-llm check {stem} FILE")
