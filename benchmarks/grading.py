"""What grading costs: `python -m benchmarks.grading [ways|growth|workers] [--submissions N] [--stem STEM] [--json FILE]`.

- `ways`: three ways to grade the same notebooks into a gradebook, side by side: stock nbgrader (its own `Execute`, the same tests in
  the cells, the reference's answers computed there as in any test that compares with one), nbgrader with this project's preprocessor, and `course-llm grade --course`. Each is run on one notebook and on N; the difference
  divided by N - 1 is what one more submission costs, the rest is start-up. Ratios against stock.
- `growth`: `course-llm grade --course` on classes of several sizes, 20, 200 and 1,000 unless `--sizes` says otherwise.
- `workers`: the same class with one process and with two, by wall time; wants two idle cores.

Processor seconds of all processes, those behind the wall included. Peak memory is that of the largest process. Without a name all three are measured.
"""

import argparse
import ctypes
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nbgrader.api import Gradebook
from rich.console import Console
from rich.table import Table

from samples.build import answers, fill

STOCK_CONFIG = "c = get_config()\nc.CourseDirectory.course_id = 'course_llm'\n"
PR_SET_CHILD_SUBREAPER = 36
SAME_TESTS = """from autograder import judge, spec
result = judge.run_exercise(judge.exercises("{stem}")["{name}"], spec.Local(globals()), judge.GRADING_SEED, public=False)
assert result.passed, result.message
"""
STOCK, PLUGIN, OURS = "stock nbgrader", "nbgrader with our preprocessor", "course-llm grade --course"


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a command took: processor and wall seconds, and megabytes of its largest process."""

    cpu_s: float
    wall_s: float
    peak_mb: float


def used_by(*command: str, cwd: Path) -> Usage:
    """Runs a command that must succeed."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.monotonic() - started
        if process.returncode:
            said.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{said.read()[-2000:]}")
    usages = [usage, *orphans()]
    cpu_s = sum(u.ru_utime + u.ru_stime for u in usages)
    return Usage(cpu_s, wall_s, max(u.ru_maxrss for u in usages) / 1024)


def adopt_orphans() -> None:
    """Makes this process the parent of what its children leave behind: bubblewrap ends without waiting for the process
    that it started in the new namespace, whose time, and that of all graded answers, would be counted nowhere."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")


def orphans() -> list:
    """What the adopted processes and their children used; waits until they have ended."""
    found = []
    while True:
        try:
            found.append(os.wait4(-1, 0)[2])
        except ChildProcessError:
            return found


def graded(way: str, stem: str, count: int, folder: Path, workers: int = 1) -> Usage:
    """Grades `count` notebooks in a fresh course folder."""
    shutil.rmtree(folder, ignore_errors=True)
    used_by("course-llm", "release", stem, "--course", str(folder), cwd=Path.cwd())
    source = folder / "class" if way == OURS else folder / "submitted"
    notebook = json.dumps(fill(stem, answers(stem)))
    for i in range(count):
        target = source / f"student{i:04}" / stem
        target.mkdir(parents=True)
        (target / f"{stem}.ipynb").write_text(notebook)
    if way == STOCK:
        (folder / "nbgrader_config.py").write_text(STOCK_CONFIG)
        put_tests_into_cells(stem, folder)
    if way == OURS:
        return used_by("course-llm", "grade", stem, str(source), "--course", str(folder), "--workers", str(workers), "--json", cwd=folder)  # fmt: skip
    return used_by("nbgrader", "autograde", stem, cwd=folder)


def put_tests_into_cells(stem: str, folder: Path) -> None:
    """Gives the gradebook's test cells, which nbgrader puts in the place of the students', what is graded elsewhere outside of them."""
    with Gradebook(f"sqlite:///{folder}/gradebook.db", "course_llm") as book:
        for cell in book.find_notebook(stem, stem).source_cells:
            if asked := re.fullmatch(r'check\("(\w+)"\)', cell.source):
                cell.source = SAME_TESTS.format(stem=stem, name=asked[1])
        book.db.commit()


def ways(stem: str, count: int, folder: Path) -> list[dict]:
    """What a submission costs in three ways."""
    rows: list[dict] = []
    for way in (STOCK, PLUGIN, OURS):
        one, many = graded(way, stem, 1, folder), graded(way, stem, count, folder)
        each, more = many.cpu_s / count, (many.cpu_s - one.cpu_s) / (count - 1)
        stock = rows[0] if rows else {"cpu_s_each": each, "cpu_s_one_more": more}
        rows.append({
            "way": way,
            "cpu_s_each": each,
            "ratio_each": stock["cpu_s_each"] / each,
            "cpu_s_one_more": more,
            "ratio_one_more": stock["cpu_s_one_more"] / more,
            "cpu_s_start": one.cpu_s - more,
            "wall_s": many.wall_s,
            "peak_mb": many.peak_mb,
        })  # fmt: skip
    return rows


def growth(stem: str, sizes: list[int], folder: Path) -> list[dict]:
    """What classes of several sizes cost."""
    rows = []
    for size in sizes:
        found = graded(OURS, stem, size, folder)
        rows.append({"submissions": size, "cpu_s": found.cpu_s, "cpu_s_each": found.cpu_s / size, "wall_s": found.wall_s, "peak_mb": found.peak_mb})  # fmt: skip
    return rows


def with_workers(stem: str, count: int, folder: Path) -> list[dict]:
    """What a second process gains; start-up is taken off, for it is the same."""
    rows: list[dict] = []
    for workers in (1, 2):
        few, many = (graded(OURS, stem, n, folder, workers) for n in (workers, count))
        wall = (many.wall_s - few.wall_s) / (count - workers)
        first = rows[0]["wall_s_one_more"] if rows else wall
        rows.append({"workers": workers, "wall_s": many.wall_s, "wall_s_one_more": wall, "speedup": first / wall})  # fmt: skip
    return rows


def show(title: str, rows: list[dict]) -> None:
    """Prints rows as a table."""
    table = Table(*[name.replace("_", " ") for name in rows[0]], title=title)
    for row in rows:
        table.add_row(*[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()])
    Console(width=160).print(table)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", choices=("ways", "growth", "workers"), help="(default: all three)")
    parser.add_argument("--submissions", type=int, default=20, help="class of `ways`; `workers` takes ten of it (default: 20)")  # fmt: skip
    parser.add_argument("--stem", default="decoding", help="the chapter (default: decoding)")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[20, 200, 1000], metavar="N", help="classes of `growth`"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was measured, beside what the file has")  # fmt: skip
    arguments = parser.parse_args()
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    os.environ["OMP_NUM_THREADS"] = "1"
    adopt_orphans()
    found = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    stem, count = arguments.stem, arguments.submissions
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "course")
        if arguments.what in (None, "ways"):
            found["ways"] = ways(stem, count, folder)
            show(f"{count} submissions of {stem}, one process", found["ways"])
        if arguments.what in (None, "growth"):
            found["growth"] = growth(stem, arguments.sizes, folder)
            show(f"growth, {stem}, one process", found["growth"])
        if arguments.what in (None, "workers"):
            found["workers"] = with_workers(stem, 10 * count, folder)
            show(f"{10 * count} submissions of {stem}", found["workers"])
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
