"""What a pretraining run shows: the log, a progress bar, the share of the machine's peak, and curves."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from course_llm.checkpoints import write_atomically
from course_llm.model import Decoder, ModelConfig

#: Columns of the log.
LOG_COLUMNS = (
    "step",
    "tokens",
    "loss",
    "lr",
    "grad_norm",
    "validation_bits_per_byte",
    "tokens_per_s",
    "peak_share",
    "elapsed_s",
)


def matmul_peak(
    device: torch.device, dtype: torch.dtype, largest: int = 1024, repeats: int = 3, patience_s: float = 0.1
) -> float:
    """Measures the FLOPs per second of matrix products, the best of a few.

    The small ones come first: a processor without instructions for the dtype takes seconds for a large one.

    Args:
        device: where to measure.
        dtype: of the matrices.
        largest: rows and columns of the largest product; the others have a half and a quarter of it.
        repeats: measurements per size, after one to warm up.
        patience_s: once a product takes longer, no more follow.
    """
    best = 0.0
    for size in (largest // 4, largest // 2, largest):
        a = torch.randn(size, size, device=device).to(dtype)
        for _ in range(repeats + 1):
            start = time.perf_counter()
            (a @ a).flatten()[0].item()  # reading a number waits for the device
            elapsed_s = time.perf_counter() - start
            best = max(best, 2 * size**3 / elapsed_s)
            if elapsed_s > patience_s:
                return best
    return best


def step_flops(config: ModelConfig, model: Decoder, tokens: int) -> float:
    """Counts the FLOPs of a training step: 6 per weight and token, and causal attention's two products.

    Args:
        config: the model's.
        model: its matrices are counted; an embedding that is no output matrix is not, for it multiplies nothing.
        tokens: of the step, in sequences as long as the model's context.
    """
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)
    if not config.tied:
        weights -= model.embedding.weight.numel()
    if model.positions is not None:
        weights -= model.positions.weight.numel()
    return tokens * (6.0 * weights + 12.0 * config.layers * config.heads * config.d_head * config.context / 2)


def write_log(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the log as CSV, atomically.

    Args:
        path: where to.
        rows: one dictionary per line, with the keys `LOG_COLUMNS`.

    Raises:
        ValueError: the file could not be written; an old one is untouched.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, LOG_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())


@contextmanager
def progress(console: Console | None, last: int, done: int) -> Iterator[Any]:
    """Shows a progress bar on a terminal, lines elsewhere; yields the function that takes a row of the log.

    Args:
        console: where to; None shows nothing.
        last: the step at which the run ends.
        done: steps that an earlier run has done.
    """
    words = "loss {loss:.3f} · {tokens_per_s:,} tokens/s · {peak_share:.0%} of matmul peak"
    if console is None:
        yield lambda row: None
    elif not console.is_terminal:
        yield lambda row: console.print(
            f"step {row['step']}/{last} · " + words.format(**row), highlight=False
        )
    else:
        text = TextColumn("{task.description}")
        columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("pretraining", total=last, completed=done)
            yield lambda row: bar.update(task, completed=row["step"], description=words.format(**row))


def plot_log(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draws training loss (nats per token) and validation (bits per byte) over the tokens seen.

    Args:
        path: where to, as SVG.
        rows: the log.

    Raises:
        ValueError: the file could not be written; an old one is untouched.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 6.0), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.plot([row["tokens"] for row in rows], [row["loss"] for row in rows])
    top.set_ylabel("training loss (nats per token)")
    measured = [row for row in rows if row["validation_bits_per_byte"] != ""]
    figures = [row["validation_bits_per_byte"] for row in measured]
    bottom.plot([row["tokens"] for row in measured], figures, marker="o")
    bottom.set(xlabel="tokens", ylabel="validation (bits per byte)")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    write_atomically(path, buffer.getvalue())


def tensorboard_writer(folder: Path) -> Callable[[dict[str, Any]], None]:
    """Returns a function that writes a row of the log as TensorBoard events.

    Args:
        folder: where to.

    Raises:
        ValueError: the package tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("TensorBoard events need the package tensorboard: pip install tensorboard") from None
    writer = SummaryWriter(str(folder))

    def write(row: dict[str, Any]) -> None:
        for name, value in row.items():
            if name != "step" and value != "":
                writer.add_scalar(name, value, row["step"])
        writer.flush()

    return write
