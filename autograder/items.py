"""Item analysis: what the class did not understand, exercise by exercise, read off the reports that grading stored.

Every submission that was graded is a row, every exercise a column of points; an exercise that was not attempted has 0 points. A number that
is not defined, because nobody differs for instance, is NaN here, a dash in the table and null in JSON.
"""

import csv
import dataclasses
import io
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autograder.grading import ExerciseReport, SubmissionReport

SHARE = 0.27  # of the class in the upper and in the lower group
FEWEST = 3  # submissions for a correlation that says anything


@dataclasses.dataclass(frozen=True)
class Item:
    """One exercise over the whole class. Shares lie between 0 and 1."""

    name: str
    max_points: float
    attempted: int
    right: int
    mean_points: float
    """Over all submissions."""
    item_rest: float
    """Corrected item-total correlation, see `item_rest`."""
    upper_lower: float
    """Upper-lower index, see `upper_lower`."""
    near_misses: dict[str, int]
    """How many answers behave like each known mistake, the most frequent first."""
    groups: dict[str, int]
    """How many of the attempts fail each group of cases, the most frequent first."""

    @property
    def share_right(self) -> float:
        """Of those who attempted it."""
        return self.right / self.attempted if self.attempted else math.nan

    @property
    def other_wrong(self) -> int:
        """Wrong attempts that behave like no known mistake."""
        return self.attempted - self.right - sum(self.near_misses.values())


@dataclasses.dataclass(frozen=True)
class Analysis:
    """An assignment's items, and what they make together."""

    stem: str
    submissions: int
    unreadable: int
    mean_points: float
    max_points: float
    alpha: float
    """Cronbach's alpha, see `cronbach_alpha`."""
    grading_s: float
    """Mean wall clock that grading a submission took; how long students worked, nobody knows here."""
    items: list[Item]

    def to_json(self) -> dict[str, Any]:
        """The analysis with null for what is not defined."""
        items = [{**dataclasses.asdict(item), "share_right": item.share_right, "other_wrong": item.other_wrong} for item in self.items]  # fmt: skip
        return defined({**dataclasses.asdict(self), "items": items})


def defined(value: Any) -> Any:
    """The same data with None in the place of NaN, which JSON does not know."""
    if isinstance(value, dict):
        return {key: defined(item) for key, item in value.items()}
    if isinstance(value, list):
        return [defined(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def analyse(stem: str, reports: Sequence[SubmissionReport]) -> Analysis:
    """Analyses the reports of an assignment's submissions, of which there is at least one; one pass over them."""
    names = list(dict.fromkeys(e.name for report in reports for e in report.exercises))
    rows: list[dict[str, ExerciseReport]] = [{e.name: e for e in report.exercises} for report in reports]
    points = np.array([[row[n].points if n in row else 0.0 for n in names] for row in rows])
    points = points.reshape(len(rows), len(names))
    most = {n: max(row[n].max_points for row in rows if n in row) for n in names}
    rest, spread = item_rest(points), upper_lower(points, [most[n] for n in names])
    items = [
        item([row[n] for row in rows if n in row], most[n], points[:, i], rest[i], spread[i])
        for i, n in enumerate(names)
    ]
    return Analysis(
        stem,
        submissions=len(reports),
        unreadable=sum(report.error is not None for report in reports),
        mean_points=float(points.sum(axis=1).mean()),
        max_points=float(sum(most.values())),
        alpha=cronbach_alpha(points),
        grading_s=float(np.mean([report.elapsed_s for report in reports])),
        items=items,
    )


def item(found: list[ExerciseReport], most: float, points: np.ndarray, rest: float, spread: float) -> Item:
    """Counts one exercise's attempts, and what was wrong with them."""
    tried = [e for e in found if e.attempted]
    wrong = [e for e in tried if not e.passed]
    misses = Counter(e.near_miss for e in wrong if e.near_miss)
    groups = Counter(g["name"] for e in wrong for g in e.groups if not g["passed"])
    return Item(
        found[0].name,
        most,
        len(tried),
        len(tried) - len(wrong),
        float(points.mean()),
        float(rest),
        float(spread),
        dict(misses.most_common()),
        dict(groups.most_common()),
    )


def item_rest(points: np.ndarray) -> np.ndarray:
    """Each item's Pearson correlation with the sum of all other items (corrected item-total correlation).

    The item itself is left out of the sum, with which it would correlate by being part of it (Henrysson 1963). NaN for fewer than three
    submissions, and where the item or the rest is the same for all.

    Args:
        points: (submissions, items).
    """
    others = points.sum(axis=1, keepdims=True) - points
    if len(points) < FEWEST:
        return np.full(points.shape[1], math.nan)
    a, b = points - points.mean(axis=0), others - others.mean(axis=0)
    return ratio((a * b).sum(axis=0), np.sqrt((a * a).sum(axis=0) * (b * b).sum(axis=0)))


def upper_lower(points: np.ndarray, most: Sequence[float]) -> np.ndarray:
    """How much better the upper 27 % of the class, by total points, do in an item than the lower 27 %: from -1 to 1.

    D = (mean of the upper - mean of the lower) / most points, with groups of round(0.27 n), at least 1 (Kelley 1939). Those who tie at a group's
    edge share its last places, so that the order of the submissions does not matter. NaN for fewer than two submissions, and where all totals are equal.

    Args:
        points: (submissions, items).
        most: the most points of each item.
    """
    totals = points.sum(axis=1)
    if len(points) < 2 or np.ptp(totals) == 0:
        return np.full(points.shape[1], math.nan)
    size = max(1, math.floor(SHARE * len(points) + 0.5))
    best, worst = best_weights(totals, size), best_weights(-totals, size)
    return ratio((best - worst) @ points / size, np.asarray(most, dtype=float))


def best_weights(totals: np.ndarray, size: int) -> np.ndarray:
    """How far each belongs to the `size` highest: 1, 0, or a share of the last places for those who tie there."""
    edge = np.sort(totals)[-size]
    above, at = totals > edge, totals == edge
    return above + at * ((size - above.sum()) / at.sum())


def cronbach_alpha(points: np.ndarray) -> float:
    """k / (k - 1) (1 - sum of the items' variances / variance of the totals), for k items (Cronbach 1951).

    Says how far the exercises rank the class alike: 1 when all do so in the same way, near 0 when they have nothing to do with one another.
    NaN for fewer than two items or submissions, and where all totals are equal.
    """
    n, k = points.shape
    variance = points.sum(axis=1).var()
    if k < 2 or n < 2 or variance == 0:
        return math.nan
    return float(k / (k - 1) * (1 - points.var(axis=0).sum() / variance))


def ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """A quotient, NaN where the divisor is no larger than rounding errors."""
    small = np.abs(below) < 1e-12
    return np.where(small, math.nan, above / np.where(small, 1.0, below))


# what is shown


def dashed(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)


def counted(counts: dict[str, int], most: int | None = None) -> str:
    """Names with their counts, the first few."""
    return ", ".join(f"{name} ({count})" for name, count in list(counts.items())[:most])


def print_analysis(found: Analysis) -> None:
    """The items as a table."""
    from rich.console import Console
    from rich.table import Table

    title = f"{found.stem}: {found.submissions} submissions, {found.mean_points:.1f} of {found.max_points:g} points on average"
    caption = f"Cronbach's alpha {dashed(found.alpha, '.2f')}; r: corrected item-total correlation; D: upper-lower 27 % index"
    table = Table(title=title, caption=caption)
    table.add_column("exercise", overflow="fold")
    for head in ("tried", "right", "near-miss", "points", "r", "D"):
        table.add_column(head, justify="right", no_wrap=True)
    for i in found.items:
        misses = str(sum(i.near_misses.values()))
        cells = (dashed(i.share_right, ".0%"), misses, f"{i.mean_points:.1f} / {i.max_points:g}")
        table.add_row(i.name, str(i.attempted), *cells, dashed(i.item_rest, ".2f"), dashed(i.upper_lower, ".2f"))  # fmt: skip
    console = Console(markup=False, emoji=False, highlight=False)
    console.print(table)
    for i in found.items:
        if i.right < i.attempted:
            console.print(f"{i.name}: {i.attempted - i.right} wrong", style="bold")
            told = {"like": counted(i.near_misses, 5), "fail": counted(i.groups, 5)}
            for head, words in told.items():
                if words:
                    console.print(f"  {head}: {words}")
    if found.unreadable:
        console.print(f"{found.unreadable} of the submissions could not be read; they count as not attempted")


def as_csv(found: Analysis) -> str:
    """The items as CSV; an empty cell is a number that is not defined."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(("exercise", "submissions", "attempted", "right", "share_right", "mean_points", "max_points",
                    "item_rest", "upper_lower", "near_misses", "failing_groups"))  # fmt: skip
    for i in found.items:
        numbers = [dashed(v, ".4f").replace("–", "") for v in (i.share_right, i.mean_points)]
        more = [dashed(v, ".4f").replace("–", "") for v in (i.item_rest, i.upper_lower)]
        told = ("; ".join(f"{n}={c}" for n, c in counts.items()) for counts in (i.near_misses, i.groups))
        lines.writerow((i.name, found.submissions, i.attempted, i.right, *numbers, f"{i.max_points:g}", *more, *told))  # fmt: skip
    return text.getvalue()


def plot(found: Analysis, path: Path) -> None:
    """Draws a bar per exercise: right, the known mistakes, other wrong answers, not attempted.

    An SVG follows the reader's light or dark theme, background included; a PNG has a white background.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from course_llm.plotting import style

    with matplotlib.rc_context({**style("light"), "svg.fonttype": "none"}):
        figure = Figure(figsize=(9.0, 1.4 + 0.42 * len(found.items)), layout="constrained")
        FigureCanvasAgg(figure)
        figure.patch.set_facecolor(PAPER["light"])
        draw(found, figure)
        if path.suffix == ".png":
            figure.savefig(path, dpi=200, facecolor=PAPER["light"], metadata={"Software": None})
            return
        buffer = io.StringIO()
        figure.savefig(
            buffer, format="svg", facecolor=PAPER["light"], metadata={"Date": None, "Creator": None}
        )
    path.write_text(with_dark_theme(buffer.getvalue()), encoding="utf-8")


PAPER = {"light": "#ffffff", "dark": "#121212"}


def draw(found: Analysis, figure: Any) -> None:
    """Draws the bars on an empty figure; each bar's longest known mistake is named beside it."""
    from course_llm.plotting import COLOURS

    axes = figure.subplots()
    n = max(1, found.submissions)
    first = [next(iter(i.near_misses.values()), 0) for i in found.items]
    further = [sum(i.near_misses.values()) - f for i, f in zip(found.items, first, strict=True)]
    parts = (
        ("right", [i.right for i in found.items], COLOURS[0], ""),
        ("most frequent near-miss", first, COLOURS[1], "//"),
        ("other near-misses", further, COLOURS[3], ".."),
        ("other wrong answers", [i.other_wrong for i in found.items], COLOURS[4], "xx"),
        ("not attempted", [found.submissions - i.attempted for i in found.items], COLOURS[5], ""),
    )
    rows = np.arange(len(found.items))
    left = np.zeros(len(found.items))
    for label, counts, colour, hatch in parts:
        widths = np.array(counts, dtype=float) / n
        axes.barh(rows, widths, left=left, height=0.72, label=label, color=colour, hatch=hatch, linewidth=0,
                  alpha=0.45 if label == "not attempted" else 1.0)  # fmt: skip
        left += widths
    for row, i in zip(rows, found.items, strict=True):
        axes.text(1.015, row, counted(i.near_misses, 1), va="center", fontsize=8.5)
    axes.set_yticks(rows, [i.name for i in found.items])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlabel(f"share of {found.submissions} submissions")
    figure.legend(loc="outside upper left", ncols=3, fontsize=8.5)


def with_dark_theme(svg: str) -> str:
    """The same SVG with ink and paper exchanged where the reader's theme is dark; a viewer without style sheets shows the light one."""
    from course_llm.plotting import style

    pairs = [(PAPER["light"], PAPER["dark"]), (style("light")["text.color"], style("dark")["text.color"])]
    rules = [
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in pairs
        for kind in ("fill", "stroke")
    ]
    sheet = f"<style>@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"
    start = svg.index(">", svg.index("<svg")) + 1
    return svg[:start] + sheet + svg[start:]
