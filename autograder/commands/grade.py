"""`course-llm grade`: submissions in the sandbox, on the hidden cases."""

import argparse
import contextlib
import json
import sys
import textwrap
import time
from pathlib import Path

from autograder.commands import NOTHING_KEPT, Failure, UsageError, chapter_of, refuse_course_folder


def add(commands) -> None:
    """Adds the command."""
    grade = commands.add_parser("grade", help="grade submissions in the sandbox, on the hidden cases")
    grade.add_argument("stem", metavar="STEM", help="the chapter")
    grade.add_argument("paths", metavar="PATH", nargs="+", type=Path, help="a notebook, a .py file, or a folder <student>/STEM/STEM.ipynb")  # fmt: skip
    grade.add_argument("--json", action="store_true", help="print a list with one object per submission")
    grade.add_argument(
        "--workers", type=int, metavar="N", help="processes (default: by cores and submissions)"
    )
    grade.add_argument(
        "--course", type=Path, metavar="DIR", help="course folder whose nbgrader gradebook is written"
    )
    grade.add_argument(
        "--device", default="cpu", metavar="D", help="where the exercises' tensors lie: cpu, cuda, mps"
    )
    grade.add_argument("--seed", type=int, metavar="S", help="seed of the hidden cases")
    grade.add_argument("--force", action="store_true", help="grade again what is graded already")
    grade.add_argument(
        "--no-sandbox", action="store_true", help="run answers without isolation; every report says so"
    )
    grade.add_argument("--scheduler", metavar="ADDRESS", help="grade on a Dask cluster (tcp://host:port)")
    grade.set_defaults(run=run_grade, interrupted=kept)


def kept(arguments: argparse.Namespace) -> str:
    """What a run that is interrupted leaves behind."""
    return "what was graded is kept; run it again to go on" if arguments.course else NOTHING_KEPT


def run_grade(arguments: argparse.Namespace) -> int:
    """`course-llm grade`: hidden cases, in the sandbox; with `--course` into nbgrader's gradebook."""
    reports, unusable = graded_paths(arguments)
    if arguments.json:
        print(json.dumps([report.to_json() for report in reports], indent=1))
    elif len(reports) > len(unusable):
        print_class_table(arguments.stem, reports)
    return end_of_grading(arguments, unusable)


def options_of(arguments: argparse.Namespace):
    """How a run is to grade, after everything that it needs has been asked for."""
    chapter_of(arguments.stem)
    if arguments.workers is not None and arguments.workers < 1:
        raise UsageError(f"--workers needs a number of at least 1, got {arguments.workers}")
    import torch

    torch.set_num_threads(1)  # children of a process with torch threads hang
    if getattr(arguments, "scheduler", None) is None:
        require_device(arguments.device)
    try:
        from autograder import grading
        from autograder.wall import SandboxError, bubblewrap
    except ImportError as error:
        raise Failure(f"grading needs Linux and the package {error.name}; see: course-llm doctor") from None
    seed = grading.GRADING_SEED if arguments.seed is None else arguments.seed
    options = grading.Options(seed=seed, device=arguments.device, isolate=not arguments.no_sandbox)
    try:
        if options.isolate:
            bubblewrap()
    except SandboxError as error:
        raise Failure(str(error)) from None
    return options


def graded_paths(arguments: argparse.Namespace) -> tuple[list, dict[str, str]]:
    """Grades what the paths name; returns the reports, and what is wrong with paths that give none."""
    options = options_of(arguments)
    from autograder.cluster import ClusterError
    from autograder.course import Course, CourseError
    from autograder.grading import ungraded
    from autograder.submission import SubmissionError
    from autograder.wall import SandboxError

    try:
        course = Course(arguments.course, create=True) if arguments.course else None
        files, unusable = submissions_in(arguments.paths, arguments.stem, course)
        reports = grade_files(arguments, files, options, course) if files else []
    except (SandboxError, ClusterError, CourseError, SubmissionError) as error:
        raise Failure(str(error)) from None
    reports += [ungraded(arguments.stem, name, words, options) for name, words in unusable.items()]
    return reports, unusable


def end_of_grading(arguments: argparse.Namespace, unusable: dict[str, str]) -> int:
    """What is said when all is graded: a warning where nothing isolated, an error for paths that gave nothing."""
    if arguments.no_sandbox:
        print("course-llm: graded without a sandbox: the answers ran with your rights", file=sys.stderr)
    if unusable:
        raise Failure("; ".join(unusable.values()))
    return 0


def require_device(device: str) -> None:
    """A usage error unless torch has the device."""
    import torch

    kind = device.split(":")[0]
    if kind not in ("cpu", "cuda", "mps"):
        raise UsageError(f"--device takes cpu, cuda, cuda:N or mps, got {device}")
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}[kind]
    if not there:
        raise UsageError(
            f"--device {device}: torch finds no {kind} device on this machine; grade with --device cpu"
        )


def submissions_in(paths: list[Path], stem: str, course) -> tuple[dict[str, Path], dict[str, str]]:
    """The files to grade by the name of their submission, and what is wrong with paths that give none."""
    from autograder.submission import SubmissionError, class_folder, printable

    files: dict[str, Path] = {}
    unusable: dict[str, str] = {}
    for path in paths:
        refuse_course_folder(path)
        if course and not path.exists():
            raise UsageError(f"there is no folder {path}; first run: course-llm collect {stem} SOURCE --course {course.root}")  # fmt: skip
        if course and not path.is_dir():
            raise UsageError(
                f"--course takes a folder of submissions <student>/{stem}/{stem}.ipynb, got {path}"
            )
        try:
            if path.is_dir():
                found = course.collect(stem, path) if course else class_folder(path, stem)
            elif not path.exists() and not path.is_symlink():
                raise SubmissionError(f"there is no file or folder {path}")
            else:
                others = [name for name, file in files.items() if file != path]
                found = {printable(str(path), others): path}
        except SubmissionError as error:
            unusable[printable(str(path), unusable)] = str(error)
            continue
        for name, file in found.items():
            if name in files and files[name] != file:
                raise UsageError(f"two submissions are called {name}: {files[name]} and {file}")
            files[name] = file
    return files, unusable


def grade_files(arguments: argparse.Namespace, files: dict[str, Path], options, course) -> list:
    """Grades files with progress on standard error; returns the reports in the files' order."""
    from autograder import grading
    from autograder.course import fingerprint

    stem = arguments.stem
    reports: dict = {}
    prints = {name: fingerprint(path, stem, options) for name, path in files.items()} if course else {}
    if course and not arguments.force:
        known = {name: course.graded(stem, name, prints[name]) for name in files}
        reports = {name: report for name, report in known.items() if report is not None}
        if reports:
            print(f"{len(reports)} of {len(files)} submissions are graded already", file=sys.stderr)
    left = {name: path for name, path in files.items() if name not in reports}
    workers = arguments.workers or grading.default_workers(len(left))
    log = course.root / f"grading_{stem}.log" if course else None
    with progress(len(left), log) as advance, cluster_at(arguments.scheduler) as cluster:
        stream = grading.grade_many(stem, left, options, cluster, workers)
        if course and left:
            with course.writer(stem) as writer:
                for report in stream:
                    writer.write(report, files[report.submission], prints[report.submission])
                    reports[report.submission] = report
                    advance(report)
        else:
            for report in stream:
                reports[report.submission] = report
                advance(report)
    return [reports[name] for name in files]


def cluster_at(address: str | None):
    """A context with a Dask cluster, or with None."""
    if address is None:
        return contextlib.nullcontext()
    from autograder.cluster import Cluster

    return Cluster(address)


class progress:
    """Says on standard error how far grading is, how fast it goes and how long it will take: a bar on a terminal, else a line now and then.

    With `log`, a file, every submission gets a line there.
    """

    LINE_EVERY_S = 15.0
    LINES_FROM = 20

    def __init__(self, total: int, log: Path | None = None):
        self.total = total
        self.log_path = log
        self.bar = self.log = None

    def __enter__(self):
        self.done, self.started = 0, time.monotonic()
        self.said = self.started
        if self.log_path is not None and self.total:
            self.log = open(self.log_path, "a", encoding="utf-8")
        if self.total > 1 and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("grading"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())  # fmt: skip
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task("grading", total=self.total, rate="")
        return self.advance

    def advance(self, report) -> None:
        """Counts one submission."""
        self.done += 1
        now = time.monotonic()
        rate = self.done / max(1e-9, now - self.started)
        if self.log is not None:
            print(log_line(report), file=self.log, flush=True)
        if self.bar is not None:
            self.bar.update(self.task, advance=1, rate=f"{rate:.1f} submissions/s")
        elif self.total >= self.LINES_FROM and now - self.said > self.LINE_EVERY_S and self.done < self.total:
            self.said = now
            left = (self.total - self.done) / rate
            print(f"graded {self.done} of {self.total}, {rate:.1f} submissions/s, {left:.0f} s left", file=sys.stderr)  # fmt: skip

    def __exit__(self, *exc: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.log is not None:
            self.log.close()


def log_line(report) -> str:
    """When a submission was graded, whose it is, its points, the seconds it took, and what was odd, separated by tabs."""
    passed = f"{sum(e.passed for e in report.exercises)}/{len(report.exercises)} exercises"
    odd = "; ".join([report.error or "", *report.remarks]).strip("; ")
    fields = (time.strftime("%Y-%m-%dT%H:%M:%S%z"), report.submission, f"{report.points:g}/{report.max_points:g} points", passed, f"{report.elapsed_s:.2f} s", odd)  # fmt: skip
    return "\t".join(" ".join(field.split()) for field in fields).rstrip("\t")


def print_class_table(stem: str, reports: list) -> None:
    """The class as a table: points, and the first thing that is wrong."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    who = Column("submission", overflow="fold")  # an address that is cut off could be anybody's
    table = Table(who, "points", "passed", "s", "remark", title=f"{stem}: {len(reports)} submissions")
    for report in reports:
        passed = sum(e.passed for e in report.exercises)
        wrong = next(
            (
                f"{e.name}: {e.near_miss or e.message}"
                for e in report.exercises
                if e.attempted and not e.passed
            ),
            "",
        )
        nothing = "" if any(e.attempted for e in report.exercises) else "nothing attempted"
        remark = report.error or wrong or "; ".join(report.remarks) or nothing
        points = f"{report.points:g} / {report.max_points:g}"
        table.add_row(
            escape(report.submission),
            points,
            f"{passed} / {len(report.exercises)}",
            f"{report.elapsed_s:.2f}",
            escape(textwrap.shorten(remark, 160, placeholder=" …")),
        )
    if not all(r.isolated for r in reports):
        table.caption = "graded WITHOUT a sandbox: the answers ran with the grader's rights"
    Console(markup=False, emoji=False).print(table)  # a folder's name is a student's to choose
