"""Grades the sample class from submissions to feedback: `python -m samples.run STEM --course DIR`."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from autograder import catalog, cli
from samples.build import write_class


def main() -> int:
    """Builds the class, grades it into a course folder, writes feedback and grades."""
    parser = argparse.ArgumentParser(prog="python -m samples.run")
    parser.add_argument("stem", choices=catalog.stems())
    parser.add_argument("--course", type=Path, required=True)
    arguments = parser.parse_args()
    stem, course = arguments.stem, str(arguments.course)
    with tempfile.TemporaryDirectory() as folder:
        students = write_class(stem, Path(folder))
        started = time.monotonic()
        steps = [
            ["release", stem, "--course", course],
            ["grade", stem, folder, "--course", course],
            ["feedback", stem, "--course", course],
            ["export", stem, "--course", course],
        ]
        for step in steps:
            before = time.monotonic()
            if code := cli.main(step):
                return code
            if step[0] == "grade":
                each = (time.monotonic() - before) / len(students)
                print(f"{len(students)} submissions, {each:.2f} s each", flush=True)
        print(f"from release to export in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
