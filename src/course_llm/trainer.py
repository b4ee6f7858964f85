"""`course-llm pretrain`: trains a decoder by a recipe, shows how it goes, and survives being killed.

    course-llm pretrain src/course_llm/data/recipe.toml --out runs/first
    course-llm pretrain src/course_llm/data/recipe.toml --out runs/first --resume

A checkpoint holds weights, AdamW's state and the step; it is replaced atomically, and the data of a step
follow from the step. So a run that was killed at any moment goes on to the very same weights as one that was
not (same machine, same number of threads).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from course_llm import corpus
from course_llm.checkpoints import fill, load_tensors, save_model, save_tensors
from course_llm.model import Decoder
from course_llm.recipe import (
    RECIPE_PATH,
    Recipe,
    TokenStream,
    as_plain,
    bits_per_byte,
    difference,
    read_recipe,
)
from course_llm.training_reports import LOG_COLUMNS, matmul_peak, plot_log, progress, step_flops, write_log

QUICK_VALIDATION_DOCUMENTS = 150  # while training; the last figure is over all of them


def warm_stable_decay(step: int, peak: float, warmup: int, total: int, decay_share: float) -> float:
    """Returns the learning rate of a step, from 0: up in `warmup` steps, flat, then linearly towards 0 at `total`."""
    decay = max(int(total * decay_share), 1)
    return peak * min(1.0, (step + 1) / max(warmup, 1), (total - step) / decay)


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Builds AdamW in which matrices decay and vectors (norms, biases) do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    training = recipe.training
    groups = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=training.peak_lr, betas=training.betas, eps=training.eps, fused=True)


@dataclass
class Result:
    """What a run reached.

    Attributes:
        model: trained.
        step: steps done.
        rows: the log, one dictionary per line.
        validation_bits_per_byte: over all validation documents; None if the run stopped early.
    """

    model: Decoder
    step: int
    rows: list[dict[str, Any]]
    validation_bits_per_byte: float | None


class Trainer:
    """One pretraining run in a folder: checkpoint, log and, at the end, the model.

    Args:
        recipe: what to do.
        out: folder for `checkpoint.safetensors`, `log.csv` and `model.safetensors`; None writes nothing.
        device: where to train.
        compile: use `torch.compile`.
        console: where to report; None is silent.
    """

    def __init__(
        self,
        recipe: Recipe,
        out: str | Path | None = None,
        device: str = "cpu",
        compile: bool = False,
        console: Console | None = None,
    ) -> None:
        self.recipe, self.console = recipe, console
        self.device = torch.device(device)
        self.out = None if out is None else Path(out)
        if self.out is not None:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(
                    f"Trainer needs a folder it can make, got {self.out}: {error.strerror}"
                ) from None
        self.tokenizer = recipe.tokenizer()
        documents = corpus.read_documents(recipe.corpus_path)
        train, self.validation = corpus.split(documents, recipe.validation_share)
        ids = self.tokenizer.encode_batch(train)
        self.stream = TokenStream(ids, self.tokenizer.eos_id, recipe.model.context, recipe.training.seed)
        self.model = Decoder(recipe.model, seed=recipe.training.seed).to(self.device)
        self.optimizer = make_optimizer(self.model, recipe)
        self.run_model: Any = torch.compile(self.model) if compile else self.model
        self.step = 0
        self.elapsed_s = 0.0
        self.rows: list[dict[str, Any]] = []
        dtype = torch.bfloat16 if recipe.training.precision == "bfloat16" else torch.float32
        self.precision = dtype

    # -- one step ---------------------------------------------------------------------------------

    def train_step(self) -> tuple[Tensor, Tensor]:
        """Does one optimizer step; returns the mean loss per token and the gradients' norm, still on the device."""
        training = self.recipe.training
        inputs, targets = self.stream.batch(self.step * training.rows, training.rows)
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        total = torch.zeros((), device=self.device)
        for part, wanted in zip(
            inputs.chunk(training.accumulate), targets.chunk(training.accumulate), strict=True
        ):
            with self._autocast():
                logits = self.run_model(part)
            loss = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten()) / training.accumulate
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), training.clip)
        rate = warm_stable_decay(
            self.step, training.peak_lr, training.warmup_steps, self.recipe.steps, training.decay_share
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total, norm

    def _autocast(self) -> Any:
        if self.precision == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.precision)

    # -- the run ----------------------------------------------------------------------------------

    def run(self, steps: int | None = None) -> Result:
        """Trains to the end of the recipe, or to `steps` if that is earlier, and returns what was reached."""
        last = min(self.recipe.steps, self.recipe.steps if steps is None else steps)
        training = self.recipe.training
        peak = matmul_peak(self.device, self.precision)
        tokens_per_step = training.rows * self.recipe.model.context
        flops = step_flops(self.recipe.model, self.model, tokens_per_step)
        losses: list[Tensor] = []
        self.model.train()
        mark, mark_step = time.perf_counter(), self.step
        with progress(self.console, last, self.step) as report:
            while self.step < last:
                loss, norm = self.train_step()
                losses.append(loss)
                done = self.step == last
                if self.step % training.log_every == 0 or done:
                    mean = float(torch.stack(losses).mean())
                    if not mean < float("inf"):
                        raise ValueError(f"training diverged: the loss is {mean} at step {self.step}")
                    now = time.perf_counter()
                    speed = (self.step - mark_step) / max(now - mark, 1e-9)
                    self.elapsed_s += now - mark
                    row = self._row(mean, float(norm), speed * tokens_per_step, speed * flops / peak)
                    if self.step % training.validate_every == 0 or done:
                        row["validation_bits_per_byte"] = round(self.validate(QUICK_VALIDATION_DOCUMENTS), 4)
                    self.rows.append(row)
                    report(row)
                    losses, mark, mark_step = [], time.perf_counter(), self.step
                    if self.console and (self.step % training.sample_every == 0 or done):
                        self._show_samples()
                if self.out and (self.step % training.checkpoint_every == 0 or done):
                    self.save()
        return self._finish()

    def _finish(self) -> Result:
        """Writes the model if the recipe is done, with its figure over all validation documents."""
        bits = None
        if self.step == self.recipe.steps:
            bits = self.validate(len(self.validation))
            if self.out:
                card = {"validation_bits_per_byte": bits, "recipe": as_plain(self.recipe), "step": self.step}
                save_model(self.out / "model.safetensors", self.model, **card)
            if self.console:
                self.console.print(
                    f"validation: {bits:.4f} bits per byte over {len(self.validation)} documents"
                )
        return Result(self.model, self.step, self.rows, bits)

    def _row(self, loss: float, norm: float, tokens_per_s: float, peak_share: float) -> dict[str, Any]:
        tokens = self.step * self.recipe.training.rows * self.recipe.model.context
        rate = self.optimizer.param_groups[0]["lr"]
        values = (self.step, tokens, round(loss, 5), round(rate, 8), round(norm, 4), "")
        rest = (round(tokens_per_s), round(peak_share, 3), round(self.elapsed_s, 1))
        return dict(zip(LOG_COLUMNS, values + rest, strict=True))

    def validate(self, documents: int) -> float:
        """Measures bits per byte over the first so many validation documents."""
        self.model.eval()
        bits = bits_per_byte(
            self.model, self.validation[:documents], self.tokenizer, self.recipe.model.context
        )
        self.model.train()
        return bits

    @torch.no_grad()
    def sample(self, prompt: str, tokens: int = 48, temperature: float = 0.7) -> str:
        """Continues a prompt, with a seed of its own, so that looking never changes the run."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.tensor([[self.tokenizer.eos_id, *self.tokenizer.encode(prompt)]], device=self.device)
        for _ in range(tokens):
            logits = self.model(ids[:, -self.recipe.model.context :], last_only=True)[:, -1].float()
            chosen = torch.multinomial((logits / temperature).softmax(-1).cpu(), 1, generator=generator)
            if int(chosen) == self.tokenizer.eos_id:
                break
            ids = torch.cat((ids, chosen.to(self.device)), dim=1)
        return self.tokenizer.decode(ids[0])

    def _show_samples(self) -> None:
        self.model.eval()
        for prompt in self.recipe.training.prompts:
            self.console.print(
                f"  step {self.step}: {self.sample(prompt)}", style="dim", markup=False, highlight=False
            )
        self.model.train()

    # -- checkpoint -------------------------------------------------------------------------------

    def save(self) -> None:
        """Replaces checkpoint and log, each atomically."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(value)
        recipe = as_plain(self.recipe)
        metadata = {"step": self.step, "elapsed_s": self.elapsed_s, "recipe": recipe, "log": self.rows}
        save_tensors(self.out / "checkpoint.safetensors", tensors, metadata)
        write_log(self.out / "log.csv", self.rows)

    def resume(self) -> None:
        """Goes back to the folder's checkpoint.

        Raises:
            ValueError: there is none, it is cut short, or it belongs to another recipe.
        """
        path = self.out / "checkpoint.safetensors"
        tensors, metadata = load_tensors(path)
        found = difference(as_plain(self.recipe), metadata.get("recipe", {}))
        if found:
            raise ValueError(f"{path} belongs to another recipe: {found}")
        weights = {name[6:]: tensor for name, tensor in tensors.items() if name.startswith("model.")}
        fill(self.model, weights, path)
        for name, parameter in self.model.named_parameters():
            state = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                tensor = tensors.get(f"optimizer.{key}.{name}")
                if tensor is None:
                    raise ValueError(f"resume needs tensor optimizer.{key}.{name}, {path} has none")
                state[key] = tensor.to(self.device)
            self.optimizer.state[parameter] = state
        self.step, self.elapsed_s, self.rows = metadata["step"], metadata["elapsed_s"], metadata["log"]


def pretrain_from_recipe(
    recipe: Recipe | str | Path = RECIPE_PATH,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    steps: int | None = None,
    device: str = "cpu",
    compile: bool = False,
    console: Console | None = None,
) -> Result:
    """Trains a decoder by a recipe and returns it with its log.

    Args:
        recipe: a `Recipe` or the path of one; the shipped recipe by default.
        out: folder for checkpoints, log and model; None keeps all in memory.
        resume: go on from the checkpoint in `out`.
        steps: stop early; the schedule is still that of the whole recipe.
        device: "cpu", "cuda", "mps".
        compile: use `torch.compile`.
        console: where to report progress; None is silent.

    Raises:
        ValueError: a recipe, corpus or checkpoint that does not do, or `out` holds a checkpoint and `resume`
            is off.
    """
    if isinstance(recipe, (str, Path)):
        recipe = read_recipe(recipe)
    if steps is not None and steps < 0:
        raise ValueError(f"pretrain needs steps >= 0, got steps={steps}")
    if resume and out is None:
        raise ValueError("pretrain needs a folder to resume from, got out=None")
    if out is not None and not resume and (Path(out) / "checkpoint.safetensors").exists():
        raise ValueError(
            f"{out} holds a checkpoint already: resume it or choose another folder; nothing was changed"
        )
    trainer = Trainer(recipe, out, device, compile, console)
    if resume:
        trainer.resume()
    return trainer.run(steps)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `course-llm pretrain` and returns the exit status; a fault is one clear line."""
    parser = argparse.ArgumentParser("course-llm pretrain", description="Trains a decoder by a recipe.")
    parser.add_argument(
        "recipe", nargs="?", default=str(RECIPE_PATH), help="TOML file; the shipped one by default"
    )
    parser.add_argument("--out", default="runs/pretrain", help="folder for checkpoint, log and model")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--steps", type=int, help="stop after so many steps of the recipe")
    parser.add_argument("--plot", action="store_true", help="draw the curves into log.svg")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument(
        "--threads", type=int, help="threads of the CPU; the last bits of the weights depend on it"
    )
    arguments = parser.parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    console = Console()
    try:
        result = pretrain_from_recipe(
            arguments.recipe,
            arguments.out,
            resume=arguments.resume,
            steps=arguments.steps,
            device=arguments.device,
            compile=arguments.compile,
            console=console,
        )
        if arguments.plot:
            plot_log(Path(arguments.out) / "log.svg", result.rows)
    except ValueError as error:
        print(f"course-llm pretrain: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("course-llm pretrain: stopped; --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
