"""CPU per submission, side by side in one run: `python -m benchmarks.grading [--submissions N] [--stem STEM]`.

Three ways to grade the same notebooks into a gradebook: stock nbgrader (its own `Execute`, the same checks in the cells), nbgrader with
this project's preprocessor, and `course-llm grade --course`. Each is run on one notebook and on N; the difference divided by N - 1 is what one more
submission costs, the rest is start-up. Processor seconds of all processes, children included; ratios against stock.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from samples.build import answers, fill

STOCK_CONFIG = "c = get_config()\nc.CourseDirectory.course_id = 'course_llm'\n"
WAYS = ("stock nbgrader", "nbgrader with our preprocessor", "course-llm grade --course")


def children_cpu_s() -> float:
    """Processor seconds of the children that have ended so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def timed(*command: str, cwd: Path) -> tuple[float, float]:
    """Processor and wall seconds of a command that must succeed."""
    cpu, wall = children_cpu_s(), time.monotonic()
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return children_cpu_s() - cpu, time.monotonic() - wall


def measure(way: str, stem: str, count: int, folder: Path) -> tuple[float, float]:
    """Grades `count` notebooks in a fresh course folder."""
    shutil.rmtree(folder, ignore_errors=True)
    timed("course-llm", "release", stem, "--course", str(folder), cwd=Path.cwd())
    source = folder / "class" if way == WAYS[2] else folder / "submitted"
    notebook = fill(stem, answers(stem))
    for i in range(count):
        target = source / f"student{i:04}" / stem
        target.mkdir(parents=True)
        (target / f"{stem}.ipynb").write_text(json.dumps(notebook))
    if way == WAYS[0]:
        (folder / "nbgrader_config.py").write_text(STOCK_CONFIG)
    if way == WAYS[2]:
        return timed("course-llm", "grade", stem, str(source), "--course", str(folder), "--workers", "1", "--json", cwd=folder)
    return timed("nbgrader", "autograde", stem, cwd=folder)


def main() -> None:
    """Measures the three ways and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--submissions", type=int, default=20)
    parser.add_argument("--stem", default="decoding")
    arguments = parser.parse_args()
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    count = arguments.submissions
    table = Table("way", "CPU-s per submission", "ratio", "one more costs", "ratio", "start-up CPU-s", "wall s")
    stock: tuple[float, float] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            (one, _), (many, wall) = (measure(way, arguments.stem, n, Path(folder, "course")) for n in (1, count))
            each, more = many / count, (many - one) / (count - 1)
            stock = stock or (each, more)
            table.add_row(way, f"{each:.3f}", f"{stock[0] / each:.1f}", f"{more:.3f}", f"{stock[1] / more:.1f}",
                          f"{one - more:.2f}", f"{wall:.1f}")  # fmt: skip
    Console().print(f"{count} submissions of {arguments.stem}, one process", table)


if __name__ == "__main__":
    main()
