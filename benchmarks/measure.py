"""What the benchmarks of speed share: ways side by side in one process, on one thread, compared round by round.

A shared machine speeds up and slows down from one second to the next. So a round runs every way once, in turn, and a ratio is
taken inside a round; what is told is the median over the rounds, with the least and the greatest. Seconds are
the processor's, not the clock's.

    costs = interleave({"theirs": theirs, "ours": ours}, rounds=7)
    result = compare("decoding, small", costs, "theirs", "ours", bar=1.4)
    finish([result], json_path=None)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Result:
    """One row of the table.

    Attributes:
        measure: what was measured.
        median, least, greatest: over the rounds; usually seconds of the baseline divided by ours.
        bar: what is to be reached, None where nothing is.
        rounds: how many there were.
        seconds: median processor seconds of each way, for readers who want more than a ratio.
        below: the bar is an upper one: smaller is better.
        note: anything that the numbers need.
    """

    measure: str
    median: float
    least: float
    greatest: float
    bar: float | None = None
    rounds: int = 1
    seconds: Mapping[str, float] | None = None
    below: bool = False
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the median is at the bar; None without a bar."""
        if self.bar is None:
            return None
        return self.median <= self.bar if self.below else self.median >= self.bar


def one_thread() -> None:
    """Makes torch use one thread; call it before anything is computed."""
    torch.set_num_threads(1)


def cpu_s(run: Callable[[], object], times: int = 1) -> float:
    """Returns the processor seconds of one call, the mean over `times` calls."""
    start = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - start) / times


def interleave(
    ways: Mapping[str, Callable[[], object]],
    rounds: int = 7,
    warm_up: int = 1,
    least_s: float = 0.0,
    before: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Runs all ways in turn, round after round, and returns the processor seconds per call of each.

    Args:
        ways: what to run. Every second round goes through them backwards, so that none always comes after the same one.
        rounds: timed rounds.
        warm_up: calls of each way that are not timed.
        least_s: a way that takes less is called several times per round, so often that together they take this long.
        before: run ahead of every way, outside the timing.
    """
    times = {}
    for name, run in ways.items():
        for _ in range(warm_up):
            run()
        times[name] = max(1, round(least_s / max(cpu_s(run), 1e-7))) if least_s else 1
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways) if number % 2 == 0 else reversed(list(ways)):
            if before is not None:
                before()
            seconds[name].append(cpu_s(ways[name], times[name]))
    return seconds


def summarise(measure: str, values: Sequence[float], bar: float | None = None, **more: Any) -> Result:
    """Returns median, least and greatest of one number per round as a row."""
    return Result(measure, statistics.median(values), min(values), max(values), bar, len(values), **more)


def compare(
    measure: str,
    seconds: Mapping[str, Sequence[float]],
    baseline: str,
    ours: str,
    bar: float | None = None,
    **more: Any,
) -> Result:
    """Returns how many times faster `ours` is than `baseline`: a ratio per round, then the median."""
    ratios = [theirs / own for theirs, own in zip(seconds[baseline], seconds[ours], strict=True)]
    medians = {name: statistics.median(seconds[name]) for name in (baseline, ours)}
    return summarise(measure, ratios, bar, seconds=medians, **more)


def count(measure: str, value: float, wanted: float, note: str = "") -> Result:
    """Returns a row for a number that was counted, not timed, and that must be exactly what is wanted."""
    if value != wanted:
        raise AssertionError(f"{measure}: counted {value}, wanted {wanted}")
    return Result(measure, value, value, value, wanted, note=note)


def environment() -> dict[str, Any]:
    """Says where the numbers come from."""
    cpu = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        fields = {name.strip(): value.strip() for name, value in fields.items()}
        cpu = f"{fields['model name']}, family {fields['cpu family']}, model {fields['model']}"
    except (OSError, KeyError):
        pass
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }


def parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser with what every benchmark takes: --rounds, --json."""
    made = argparse.ArgumentParser(description=description.split("\n")[0])
    made.add_argument("--rounds", type=int, default=7, help="timed rounds, 5 or more (default: %(default)s)")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the results to a file")
    return made


def finish(results: Iterable[Result], json_path: Path | None = None) -> None:
    """Prints the table and writes the file, if one is wanted."""
    results, where = list(results), environment()
    table = Table("measure", "median", "min–max", "bar", "reached", "CPU ms", "note")
    for result in results:
        reached = {True: "yes", False: "no", None: ""}[result.reached]
        span = f"{_short(result.least)}–{_short(result.greatest)}" if result.rounds > 1 else ""
        times = ", ".join(f"{name} {1e3 * value:.4g}" for name, value in (result.seconds or {}).items())
        bar = "" if result.bar is None else _short(result.bar)
        table.add_row(result.measure, _short(result.median), span, bar, reached, times, result.note)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    if json_path is not None:
        rows = [{**asdict(result), "reached": result.reached} for result in results]
        json_path.write_text(json.dumps({"environment": where, "results": rows}, indent=1) + "\n")


def _short(value: float) -> str:
    """Writes a ratio with three digits, a count with all of them."""
    return str(value) if isinstance(value, int) else f"{value:.3g}"
