"""Recipes and data of a pretraining run: what is read from a TOML file, and which tokens come at which step.

The batch of a step follows from the recipe's seed and the step alone. So a run that is taken up again after
a crash needs no state of a random generator to see the same data, and every process of a parallel run knows
its share.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from course_llm import corpus
from course_llm.checkpoints import config_from_dict
from course_llm.model import ModelConfig
from course_llm.tokenizer import CourseTokenizer, load_tokenizer

RECIPE_PATH = corpus.DATA / "recipe.toml"


@dataclass(frozen=True)
class Training:
    """How to train.

    Attributes:
        seed: of the initial weights and of the order of the data.
        tokens: to train on, in all.
        rows: sequences per step and process, of the model's context each.
        accumulate: so many backward passes make one step, each over rows / accumulate sequences.
        peak_lr: of AdamW; reached after `warmup_steps`, kept, and taken linearly to 0 over the last
            `decay_share`.
        betas, eps, weight_decay: of AdamW; only matrices decay.
        clip: largest norm of all gradients together.
        precision: of matrix products while training.
        log_every, validate_every, sample_every, checkpoint_every: in steps.
        prompts: what samples begin with.
    """

    seed: int = 0
    tokens: int = 1_000_000
    rows: int = 4
    accumulate: int = 1
    peak_lr: float = 3e-3
    warmup_steps: int = 200
    decay_share: float = 0.2
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    log_every: int = 50
    validate_every: int = 1000
    sample_every: int = 2000
    checkpoint_every: int = 500
    prompts: tuple[str, ...] = ("Marfan syndrome:",)

    def __post_init__(self) -> None:
        for name in (
            "tokens",
            "rows",
            "accumulate",
            "log_every",
            "validate_every",
            "sample_every",
            "checkpoint_every",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"a recipe needs training.{name} >= 1, got {getattr(self, name)}")
        if self.rows % self.accumulate:
            raise ValueError(
                f"a recipe needs rows % accumulate == 0, got rows={self.rows}, accumulate={self.accumulate}"
            )
        if not 0 <= self.decay_share <= 1:
            raise ValueError(f"a recipe needs 0 <= decay_share <= 1, got {self.decay_share}")
        if self.precision not in ("float32", "bfloat16"):
            raise ValueError(f"a recipe needs precision float32 or bfloat16, got {self.precision}")


@dataclass(frozen=True)
class Recipe:
    """All that a run depends on: the model, the data and the training.

    Attributes:
        model: the decoder; its vocabulary is the tokenizer's.
        training: how to train it.
        corpus_path: text with one document a line, plain or `.xz`; the shipped corpus by default.
        tokenizer_path: a tokenizer.json; the shipped one by default.
        validation_share: part of the documents that is held out.
    """

    model: ModelConfig
    training: Training = field(default_factory=Training)
    corpus_path: str = str(corpus.CORPUS_PATH)
    tokenizer_path: str | None = None
    validation_share: float = corpus.VALIDATION_SHARE

    @property
    def steps(self) -> int:
        """Steps that take `training.tokens` tokens, rounded up, for one process."""
        return -(-self.training.tokens // (self.training.rows * self.model.context))

    def tokenizer(self) -> CourseTokenizer:
        """Loads the tokenizer."""
        return CourseTokenizer.load(self.tokenizer_path) if self.tokenizer_path else load_tokenizer()


def read_recipe(path: str | Path) -> Recipe:
    """Reads a recipe from TOML: tables [data], [model] and [training] with the fields of the classes here.

    Paths in it are relative to its folder; "shipped" is the course's own corpus and tokenizer.

    Raises:
        ValueError: the file is missing or no TOML, or a key is unknown, missing or out of range.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"read_recipe needs a readable file, got {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"read_recipe needs TOML, got {path}: {error}") from None
    data, model, training = (dict(table.pop(name, {})) for name in ("data", "model", "training"))
    known = {field.name for field in dataclasses.fields(Training)}
    unknown = [*table, *(set(data) - {"corpus", "tokenizer", "validation_share"}), *(set(training) - known)]
    if unknown:
        raise ValueError(f"a recipe has no {unknown[0]}, got it in {path}")
    lists = {name: tuple(value) for name, value in training.items() if isinstance(value, list)}
    names = {name: data.get(name, "shipped") for name in ("corpus", "tokenizer")}
    places = {name: None if value == "shipped" else str(path.parent / value) for name, value in names.items()}
    tokenizer = CourseTokenizer.load(places["tokenizer"]) if places["tokenizer"] else load_tokenizer()
    return Recipe(
        config_from_dict({"vocab": tokenizer.vocab, **model}),
        Training(**training | lists),
        places["corpus"] or str(corpus.CORPUS_PATH),
        places["tokenizer"],
        data.get("validation_share", corpus.VALIDATION_SHARE),
    )


class TokenStream:
    """Cuts documents into training rows: shuffled anew each epoch, joined by ends of text, cut every `context`.

    Args:
        documents: token ids of each document.
        eos_id: ends a document.
        context: tokens per row.
        seed: of the order.
    """

    def __init__(self, documents: Sequence[Sequence[int]], eos_id: int, context: int, seed: int) -> None:
        self.documents = [torch.tensor([*ids, eos_id], dtype=torch.int64) for ids in documents]
        self.context, self.seed = context, seed
        self.rows_per_epoch = (sum(map(len, self.documents)) - 1) // context
        if self.rows_per_epoch < 1:
            raise ValueError(f"TokenStream needs more than context={context} tokens, got fewer")
        self._epoch: tuple[int, Tensor, Tensor] | None = None

    def batch(self, first: int, rows: int) -> tuple[Int[Tensor, "rows context"], Int[Tensor, "rows context"]]:
        """Returns inputs and targets of rows first, first + 1, ..., counted from the start of the run."""
        starts = [self._row(index) for index in range(first, first + rows)]
        pieces = torch.stack([stream[start : start + self.context + 1] for stream, start in starts])
        return pieces[:, :-1], pieces[:, 1:]

    def _row(self, index: int) -> tuple[Tensor, int]:
        epoch, place = divmod(index, self.rows_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.documents), generator=generator).tolist()
            stream = torch.cat([self.documents[document] for document in order])
            self._epoch = (epoch, stream, torch.randperm(self.rows_per_epoch, generator=generator))
        _, stream, rows = self._epoch
        return stream, int(rows[place]) * self.context


def windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int]]:
    """Yields start and first scored target of windows that score every target of a sequence once.

    Windows of `window` tokens start every `stride`; each scores the targets that the one before has not.
    """
    scored = 1
    for start in range(0, length, stride):
        yield start, scored
        scored = min(start + window, length)
        if scored == length:
            return


@torch.no_grad()
def bits_per_byte(
    model: nn.Module, documents: Sequence[str], tokenizer: CourseTokenizer, context: int, batch: int = 16
) -> float:
    """Measures how many bits the model needs per byte of documents, their ends included.

    The documents stand one after the other, each with its end of text, for which one byte, the newline, is
    counted. They are read in windows of `context` tokens that overlap by half: every token is predicted once,
    and all but the first ones after at least context / 2 others.

    Args:
        model: token ids `(batch, seq)` to logits.
        documents: texts that the model was not trained on.
        tokenizer: the model's.
        context: tokens per window.
        batch: windows at a time.
    """
    ids = [tokenizer.eos_id]
    for document in tokenizer.encode_batch(documents):
        ids += [*document, tokenizer.eos_id]
    stream = torch.tensor(ids, dtype=torch.int64)
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64)
    places = list(windows(len(ids), context + 1, max(context // 2, 1)))
    for first in range(0, len(places), batch):
        group = places[first : first + batch]
        rows = [stream[start : start + context + 1] for start, _ in group]
        lengths = torch.tensor([len(row) for row in rows])
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.eos_id)
        position = torch.arange(1, padded.shape[1])
        fresh = torch.tensor([scored - start for start, scored in group])
        counted = (position >= fresh[:, None]) & (position < lengths[:, None])
        logits = model(padded[:, :-1].to(device)).float()
        losses = F.cross_entropy(logits.flatten(0, 1), padded[:, 1:].flatten().to(device), reduction="none")
        total += losses.cpu().double()[counted.flatten()].sum()
    return float(total / torch.tensor(2.0).double().log() / corpus.byte_count(documents))


def as_plain(recipe: Recipe) -> dict[str, Any]:
    """Returns a recipe as plain values, exactly as JSON gives them back; paths are left out, as files may move."""
    plain = json.loads(json.dumps(dataclasses.asdict(recipe)))
    return {name: value for name, value in plain.items() if not name.endswith("_path")}


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Says where two plain recipes would train to other weights, or None; how often to report does not count."""
    for part in ("model", "training"):
        for name, value in ours[part].items():
            other = theirs.get(part, {}).get(name)
            if value != other and not name.endswith("_every") and name != "prompts":
                return f"{part}.{name} is {value} here and {other} there"
    if ours["validation_share"] != theirs.get("validation_share"):
        return (
            f"validation_share is {ours['validation_share']} here and {theirs.get('validation_share')} there"
        )
    return None
