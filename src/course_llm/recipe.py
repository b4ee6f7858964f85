"""Recipes: all that a pretraining run depends on, read from a TOML file."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course_llm import corpus
from course_llm.checkpoints import config_from_dict
from course_llm.model import ModelConfig
from course_llm.tokenizer import CourseTokenizer, load_tokenizer

RECIPE_PATH = corpus.DATA / "recipe.toml"
POSITIVE = ("tokens", "rows", "accumulate", "log_every", "validate_every", "sample_every", "checkpoint_every")
EXAMPLES = {"int": 0, "float": 0.0, "str": ""}  # of what a setting's annotation asks for
LOWEST = dict.fromkeys(POSITIVE, 1) | {"warmup_steps": 0, "weight_decay": 0}


@dataclass(frozen=True)
class Training:
    """How to train.

    Attributes:
        seed: of the initial weights and of the order of the data.
        tokens: to train on, in all.
        rows: sequences per step, all processes together, of the model's context each.
        accumulate: so many backward passes make one step, each over `rows / accumulate` sequences.
        peak_lr: of AdamW; reached after `warmup_steps`, kept, and taken linearly to 0 over the last
            `decay_share`.
        betas: shares of its two running means that AdamW keeps at each step.
        eps: added by AdamW to the root of the second mean.
        weight_decay: of AdamW; only matrices decay.
        clip: largest norm of all gradients together.
        precision: `"bfloat16"` for matrix products alone (autocast), `"float32"`, or `"float64"` to compare
            exactly.
        log_every: steps from one line of the log to the next.
        validate_every: steps from one measurement on validation documents to the next.
        sample_every: steps from one round of samples to the next.
        checkpoint_every: steps from one checkpoint to the next.
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
    precision: str = "float32"
    log_every: int = 50
    validate_every: int = 1000
    sample_every: int = 2000
    checkpoint_every: int = 500
    prompts: tuple[str, ...] = ("Marfan syndrome:",)

    def __post_init__(self) -> None:
        for name, lowest in LOWEST.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"a recipe needs training.{name} >= {lowest}, got {getattr(self, name)}")
        for name in ("peak_lr", "eps", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"a recipe needs training.{name} > 0, got {getattr(self, name)}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"a recipe needs 0 <= beta < 1 for both betas, got {list(self.betas)}")
        if self.rows % self.accumulate:
            raise ValueError(
                f"a recipe needs rows % accumulate == 0, got rows={self.rows}, accumulate={self.accumulate}"
            )
        if not 0 <= self.decay_share <= 1:
            raise ValueError(f"a recipe needs 0 <= decay_share <= 1, got {self.decay_share}")
        if self.precision not in ("bfloat16", "float32", "float64"):
            raise ValueError(f"a recipe needs precision bfloat16, float32 or float64, got {self.precision}")


def _require_kind(name: str, value: Any, example: Any) -> None:
    """Raises ValueError unless a value from a recipe is of the same kind as an example; whole numbers do as numbers."""
    if isinstance(example, tuple):
        count = 2 if isinstance(example[0], float) else None  # betas; prompts may be any number
        if not isinstance(value, tuple) or (count and len(value) != count):
            raise ValueError(
                f"a recipe needs {name} as a list{f' of {count}' if count else ''}, got {value!r}"
            )
        for item in value:
            _require_kind(f"every item of {name}", item, example[0])
        return
    kinds = {int: "a whole number", float: "a number", str: "text in quotes"}
    fits = isinstance(value, (int, float) if isinstance(example, float) else type(example))
    if not fits or isinstance(value, bool):
        raise ValueError(f"a recipe needs {name} as {kinds[type(example)]}, got {value!r}")


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
        """Steps that take `training.tokens` tokens, rounded up."""
        return -(-self.training.tokens // (self.training.rows * self.model.context))

    def tokenizer(self) -> CourseTokenizer:
        """Loads the tokenizer."""
        return CourseTokenizer.load(self.tokenizer_path) if self.tokenizer_path else load_tokenizer()


def read_recipe(path: str | Path) -> Recipe:
    """Reads a recipe from TOML.

    Its tables are `[model]` with the fields of `course_llm.model.ModelConfig` (`vocab` is the tokenizer's),
    `[training]` with those of `Training`, and `[data]` with `corpus`, `tokenizer` and `validation_share`. Paths are
    relative to the recipe's folder; `"shipped"` is the course's own corpus or tokenizer.

    Args:
        path: the file.

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
    data, model, training = _checked(table, path)
    names = {name: data.get(name, "shipped") for name in ("corpus", "tokenizer")}
    places = {name: None if value == "shipped" else str(path.parent / value) for name, value in names.items()}
    tokenizer = CourseTokenizer.load(places["tokenizer"]) if places["tokenizer"] else load_tokenizer()
    return Recipe(
        config_from_dict({"vocab": tokenizer.vocab, **model}),
        Training(**training),
        places["corpus"] or str(corpus.CORPUS_PATH),
        places["tokenizer"],
        data.get("validation_share", corpus.VALIDATION_SHARE),
    )


def _checked(table: dict[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Returns a recipe's tables data, model and training; ValueError where a key or a value's kind is wrong."""
    for name in ("data", "model", "training"):
        if not isinstance(table.get(name, {}), dict):
            raise ValueError(f"a recipe needs a table [{name}], got {table[name]!r} in {path}")
    data, model, training = (table.pop(name, {}) for name in ("data", "model", "training"))
    settings = {setting.name: setting.default for setting in dataclasses.fields(Training)}
    kinds = {"corpus": "", "tokenizer": "", "validation_share": 0.0}
    unknown = [*table, *(set(data) - set(kinds)), *(set(training) - set(settings))]
    if unknown:
        raise ValueError(f"a recipe has no {unknown[0]}, got it in {path}")
    training |= {name: tuple(value) for name, value in training.items() if isinstance(value, list)}
    for name, value in data.items():
        _require_kind(f"data.{name}", value, kinds[name])
    for name, value in training.items():
        _require_kind(f"training.{name}", value, settings[name])
    for setting in dataclasses.fields(ModelConfig):
        kind = str(setting.type).removesuffix(" | None")
        if setting.name in model and kind in EXAMPLES:
            _require_kind(f"model.{setting.name}", model[setting.name], EXAMPLES[kind])
    return data, model, training


def as_plain(recipe: Recipe) -> dict[str, Any]:
    """Returns a recipe as plain values, exactly as JSON gives them back; paths are left out, as files may move.

    Args:
        recipe: any.
    """
    plain = json.loads(json.dumps(dataclasses.asdict(recipe)))
    return {name: value for name, value in plain.items() if not name.endswith("_path")}


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Says where two plain recipes would train to other weights, or None; how often to report does not count.

    Args:
        ours: from `as_plain`.
        theirs: from `as_plain`, or from an older checkpoint.
    """
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


def warm_stable_decay(step: int, peak: float, warmup: int, total: int, decay_share: float) -> float:
    """Returns the learning rate of a step, from 0: up in `warmup` steps, flat, then linearly towards 0.

    Args:
        step: counts from 0; step `total`, which is not taken, has rate 0.
        peak: the flat part's rate.
        warmup: steps on the way up.
        total: steps in all.
        decay_share: part of the steps on the way down.
    """
    decay = max(int(total * decay_share), 1)
    return peak * min(1.0, (step + 1) / max(warmup, 1), (total - step) / decay)
