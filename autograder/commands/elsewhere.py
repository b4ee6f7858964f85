"""`course-llm gradescope` and `course-llm classroom`: the same exercises on other people's systems."""

import argparse
from pathlib import Path

from autograder.commands import Failure, UsageError, chapter_of


def add(commands) -> None:
    """Adds the commands."""
    scope = commands.add_parser("gradescope", help="write a chapter's autograder archive for Gradescope")
    scope.add_argument("stem", metavar="STEM", help="the chapter")
    scope.add_argument(
        "--to", type=Path, metavar="FILE", help="where to write (default: STEM-gradescope.zip)"
    )
    scope.add_argument("--seed", type=int, metavar="S", help="seed of the hidden cases")
    scope.add_argument("--visibility", default="visible", metavar="WHEN", help="when students see results: visible, after_due_date, after_published or hidden")  # fmt: skip
    scope.set_defaults(run=run_gradescope)
    room = commands.add_parser(
        "classroom", help="write a chapter's assignment repository for GitHub Classroom"
    )
    room.add_argument("stem", metavar="STEM", help="the chapter")
    room.add_argument("--to", type=Path, metavar="DIR", help="where to write (default: STEM-assignment)")
    room.set_defaults(run=run_classroom)


def run_gradescope(arguments: argparse.Namespace) -> int:
    """`course-llm gradescope`."""
    chapter = chapter_of(arguments.stem)
    try:
        from autograder import gradescope
        from autograder.judge import GRADING_SEED
    except ImportError as error:
        raise Failure(f"the archive is made on Linux, with the package {error.name}") from None
    from autograder.packing import PackingError
    from autograder.sync import site_config

    if arguments.visibility not in gradescope.VISIBILITIES:
        words = ", ".join(gradescope.VISIBILITIES)
        raise UsageError(f"--visibility takes one of {words}, got {arguments.visibility}")
    target = arguments.to or Path(f"{arguments.stem}-gradescope.zip")
    seed = GRADING_SEED if arguments.seed is None else arguments.seed
    book = (site_config().get("html") or {}).get("baseurl") or ""
    try:
        gradescope.write_archive(chapter, target, seed, arguments.visibility, book)
    except PackingError as error:
        raise Failure(str(error)) from None
    print(f"wrote {target}: upload it under Configure Autograder")
    return 0


def run_classroom(arguments: argparse.Namespace) -> int:
    """`course-llm classroom`."""
    chapter = chapter_of(arguments.stem)
    from autograder.classroom import write_repository
    from autograder.packing import PackingError
    from autograder.sync import repository_url, site_config

    folder = arguments.to or Path(f"{arguments.stem}-assignment")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder; name another one with --to")
    branch = (site_config().get("repository") or {}).get("branch") or ""
    try:
        files = write_repository(chapter, folder, repository_url(), branch)
    except PackingError as error:
        raise Failure(str(error)) from None
    print(f"wrote {len(files)} files to {folder}: push them to a template repository")
    return 0
