"""The capstone's leaderboard: who generates the same text with the least counted work.

The numbers are those that grading noted: the capstone's last group runs every generator on the bundled model, with one prompt, and
counts its FLOPs and what its cache holds. Nothing is timed, so that the table is the same on every machine.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from autograder.grading import SubmissionReport

STEM, EXERCISE = "capstone", "generate_text"
BYTES = 4  # the bundled model's weights are float32
NAMES = ("flops", "cache_elements", "latent flops", "latent cache_elements")


@dataclasses.dataclass(frozen=True)
class Row:
    """One submission: its place and its counts, or why it has none."""

    submission: str
    place: int | None = None
    flops: int | None = None
    cache_bytes_per_token: float | None = None
    latent_flops: int | None = None
    latent_cache_bytes_per_token: float | None = None
    borrowed: tuple[str, ...] = ()
    remark: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "borrowed": list(self.borrowed)}


def leaderboard(reports: Iterable[SubmissionReport]) -> list[Row]:
    """Orders submissions by the FLOPs of their generation, then by those with latents; the others come last, by name."""
    rows = [_row(report) for report in reports]
    ranked = sorted((r for r in rows if not r.remark), key=lambda r: (_cost(r), r.submission))
    costs = [_cost(r) for r in ranked]
    placed = [dataclasses.replace(r, place=1 + costs.index(_cost(r))) for r in ranked]
    return placed + sorted((r for r in rows if r.remark), key=lambda r: r.submission)


def _cost(row: Row) -> tuple[int, int]:
    return row.flops, row.latent_flops


def _row(report: SubmissionReport) -> Row:
    from autograder.checks.capstone import NEW_TOKENS, PROMPT_TOKENS

    name = report.submission
    taken = sorted({piece for e in report.exercises for piece in e.borrowed})
    generator = next((e for e in report.exercises if e.name == EXERCISE), None)
    if report.error or generator is None:
        return Row(name, remark=report.error or "no generator")
    counts = {k: v for group in generator.groups for k, v in group.get("counts", {}).items()}
    if not generator.passed or not all(k in counts for k in NAMES):
        return Row(name, remark=generator.message or "the generator does not pass", borrowed=tuple(taken))
    for kind, least in zip(("", "latent "), _least(), strict=True):
        flops = counts[f"{kind}flops"]
        if flops < least:
            words = f"{flops:,} FLOPs are counted with {'latents' if kind else 'keys and values'}, fewer than the matrices take ({least:,})"
            why = "it multiplies where nobody counts, keeps what is not in its cache, or knows a way that the count does not"
            return Row(name, remark=f"{words}: {why}", borrowed=tuple(taken))
    tokens = PROMPT_TOKENS + NEW_TOKENS
    return Row(
        name,
        flops=counts["flops"],
        cache_bytes_per_token=BYTES * counts["cache_elements"] / tokens,
        latent_flops=counts["latent flops"],
        latent_cache_bytes_per_token=BYTES * counts["latent cache_elements"] / tokens,
        borrowed=tuple(taken),
    )


@functools.cache
def _least() -> tuple[int, int]:
    """FLOPs below which nobody is ranked, with keys and values and with latents."""
    from autograder.checks.capstone import NEW_TOKENS, PROMPT_TOKENS, PROMPTS, bundled, prompt
    from course_llm.capstone import generate_text, least_flops

    plain, latent, *_ = bundled()
    text = generate_text(plain, prompt(*PROMPTS).reshape(1, PROMPT_TOKENS), NEW_TOKENS)
    distinct = text[:, :-1].unique().numel()
    return tuple(least_flops(w, PROMPT_TOKENS, NEW_TOKENS, distinct) for w in (plain, latent))


def print_leaderboard(rows: list[Row]) -> None:
    """The leaderboard as a table."""
    from rich.console import Console
    from rich.table import Table

    from autograder.checks.capstone import NEW_TOKENS, PROMPT_TOKENS

    title = f"generate_text on the bundled model, {PROMPT_TOKENS} prompt and {NEW_TOKENS} new tokens"
    caption = "cache: bytes per token; borrowed: pieces taken from the course"
    table = Table("place", title=title, caption=caption)
    table.add_column("submission", overflow="fold", min_width=10)
    for head in ("FLOPs", "cache", "latent\nFLOPs", "latent\ncache", "borrowed"):
        table.add_column(head, justify="right", no_wrap=head.endswith("FLOPs"))
    for row in rows:
        counts = (row.flops, row.cache_bytes_per_token, row.latent_flops, row.latent_cache_bytes_per_token)
        cells = [f"{n:,.0f}" if n is not None else "" for n in counts]
        table.add_row(str(row.place or ""), row.submission, *cells, str(len(row.borrowed)))
    console = Console(markup=False, emoji=False)  # a folder's name is a student's to choose
    console.print(table)
    for row in rows:
        if row.remark:
            console.print(f"{row.submission}: {row.remark[:200]}")
