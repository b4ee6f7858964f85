"""`course-llm regrade`: whose points change after a check is mended, and why, before anything is written."""

import argparse
import json
import sys
from pathlib import Path

from autograder.commands import NOTHING_KEPT, Failure
from autograder.commands.grade import options_of, progress


def add(commands) -> None:
    """Adds the command."""
    regrade = commands.add_parser("regrade", help="say whose points change since checks were mended, then write them", description="Grades the collected submissions anew and compares them with the course folder. Nothing is written without --write, or a yes on a terminal.")  # fmt: skip
    regrade.add_argument("stem", metavar="STEM", help="the chapter")
    regrade.add_argument("--course", type=Path, default=Path("course"), metavar="DIR", help="course folder (default: course)")  # fmt: skip
    regrade.add_argument("--json", action="store_true", help="print the comparison as JSON")
    regrade.add_argument("--write", action="store_true", help="write the new grades when all are known")
    regrade.add_argument("--force", action="store_true", help="grade again what these checks have graded")
    regrade.add_argument("--workers", type=int, metavar="N", help="processes (default: by cores and submissions)")  # fmt: skip
    regrade.add_argument("--device", default="cpu", metavar="D", help="as when it was graded: cpu, cuda, mps")
    regrade.add_argument("--seed", type=int, metavar="S", help="as when it was graded")
    regrade.add_argument("--no-sandbox", action="store_true", help="run answers without isolation")
    regrade.set_defaults(run=run_regrade, interrupted=kept)


def kept(arguments: argparse.Namespace) -> str:
    """What a run that is interrupted leaves behind."""
    return "what was graded is kept; run it again to go on" if arguments.write else NOTHING_KEPT


def run_regrade(arguments: argparse.Namespace) -> int:
    """`course-llm regrade`."""
    options = options_of(arguments)
    from autograder.course import Course, CourseError
    from autograder.grading import default_workers
    from autograder.regrade import Regrade, print_comparison
    from autograder.submission import SubmissionError
    from autograder.wall import SandboxError

    try:
        regrade = Regrade(Course(arguments.course, stem=arguments.stem), arguments.stem, options, arguments.force)
        left = len(regrade.left)
        workers = arguments.workers or default_workers(left)
        with progress(left) as advance:
            found = regrade.grade(workers, arguments.write, advance)
        if not arguments.json:
            print_comparison(found)
        wanted = arguments.write or (regrade.new and agreed(arguments, len(regrade.new)))
        if wanted:
            regrade.write()
        written = bool(wanted and regrade.new)
    except (SandboxError, CourseError, SubmissionError) as error:
        raise Failure(str(error)) from None
    if arguments.json:
        print(json.dumps({**found.to_json(), "written": written}, indent=1))
    elif written:
        print(f"wrote {len(regrade.new)} submissions; then: course-llm feedback {arguments.stem} --course {arguments.course}, and export again")  # fmt: skip
    elif regrade.found.changes:
        print("nothing is written; the same with --write writes it")
    elif regrade.new:
        print("nothing changes, and nothing is written")
    return 0


def agreed(arguments: argparse.Namespace, count: int) -> bool:
    """Whether somebody at a terminal says yes."""
    if arguments.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    print(f"Write these {count} submissions? [y/N] ", end="", flush=True)
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False
