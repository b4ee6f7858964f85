"""`course-llm items`: what the class did not understand."""

import argparse
import json
from pathlib import Path

from autograder.commands import Failure, UsageError, chapter_of


def add(commands) -> None:
    """Adds the command."""
    items = commands.add_parser("items", help="analyse an assignment's exercises over the class")
    items.add_argument("stem", metavar="STEM", help="the chapter")
    items.add_argument("--course", type=Path, default=Path("course"), metavar="DIR", help="course folder (default: course)")  # fmt: skip
    items.add_argument("--json", action="store_true", help="print the analysis as JSON")
    items.add_argument("--csv", action="store_true", help="print a line of CSV per exercise")
    items.add_argument("--plot", type=Path, metavar="FILE", help="draw it: an .svg or a .png")
    items.set_defaults(run=run_items)


def run_items(arguments: argparse.Namespace) -> int:
    """`course-llm items`."""
    chapter_of(arguments.stem)
    if arguments.json and arguments.csv:
        raise UsageError("--json and --csv print the same: give one of them")
    if arguments.plot and arguments.plot.suffix not in (".svg", ".png"):
        raise UsageError(f"--plot takes a file that ends in .svg or .png, got {arguments.plot}")
    from autograder.course import Course, CourseError
    from autograder.items import analyse, as_csv, plot, print_analysis

    try:
        found = analyse(arguments.stem, Course(arguments.course, stem=arguments.stem).reports(arguments.stem))
    except CourseError as error:
        raise Failure(str(error)) from None
    if arguments.plot:
        plot(found, arguments.plot)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=1))
    elif arguments.csv:
        print(as_csv(found), end="")
    else:
        print_analysis(found)
        if arguments.plot:
            print(f"drew {arguments.plot}")
    return 0
