"""One pretraining run: steps, log, validation, samples, and checkpoints that survive being killed.

`course_llm.trainer` starts it from a recipe. `Trainer.train_step` is the loop's heart; all around it is
book-keeping.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from course_llm import corpus
from course_llm.checkpoints import fill, load_tensors, save_model, save_tensors
from course_llm.model import Decoder
from course_llm.recipe import Recipe, as_plain, difference, warm_stable_decay
from course_llm.training_data import TokenStream, bits_per_byte
from course_llm.training_reports import LOG_COLUMNS, matmul_peak, progress, step_flops, write_log
from course_llm.training_step import Objective, make_optimizer, training_step
from course_llm.workers import join, shard_all, shard_like, whole

QUICK_VALIDATION_DOCUMENTS = 150  # while training; the last figure is over all of them


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
        parallel: `"ddp"` or `"fsdp"` under torchrun; see `course_llm.workers`.
        console: where to report; None is silent.
        on_row: called with each line of the log.

    Raises:
        ValueError: corpus or tokenizer is missing or not valid, `out` cannot be made, or `parallel` is not possible here.
    """

    def __init__(
        self,
        recipe: Recipe,
        out: str | Path | None = None,
        device: str = "cpu",
        compile: bool = False,
        parallel: str | None = None,
        console: Console | None = None,
        on_row: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.recipe, training = recipe, recipe.training
        self.device = torch.device(device)
        self.out = None if out is None else _made(Path(out))
        self.tokenizer = recipe.tokenizer()
        documents = corpus.read_documents(recipe.corpus_path)
        train, self.validation = corpus.split(documents, recipe.validation_share)
        ids = self.tokenizer.encode_batch(train)
        self.stream = TokenStream(ids, self.tokenizer.eos_id, recipe.model.context, training.seed)
        self.workers = join(parallel, training.rows // training.accumulate, self.device)
        first = self.workers.rank == 0
        self.console, self.on_row = (console, on_row) if first else (None, None)
        self.precision: torch.dtype = getattr(torch, training.precision)
        wide = torch.promote_types(self.precision, torch.float32)  # bfloat16 is for matrix products alone
        self.model = Decoder(recipe.model, seed=training.seed).to(self.device, wide)
        wrapped = self.workers.wrap(Objective(self.model, self.precision))
        self.objective: Any = torch.compile(wrapped) if compile else wrapped
        rules = (training.peak_lr, training.betas, training.eps, training.weight_decay)
        self.optimizer = make_optimizer(self.model, *rules, fused=parallel != "fsdp")
        self.step, self.elapsed_s = 0, 0.0
        self.rows: list[dict[str, Any]] = []
        self.losses: list[Tensor] = []  # since the last line of the log

    def train_step(self) -> tuple[Tensor, Tensor]:
        """Does one optimizer step; returns the mean loss per token and the gradients' norm, on the device."""
        training = self.recipe.training
        inputs, targets = self.stream.batch(self.step * training.rows, training.rows)
        parts = training.accumulate
        batches = [
            tuple(self.workers.share(part).to(self.device) for part in pair)
            for pair in zip(inputs.chunk(parts), targets.chunk(parts), strict=True)
        ]
        shape = (training.peak_lr, training.warmup_steps, self.recipe.steps, training.decay_share)
        for group in self.optimizer.param_groups:
            group["lr"] = warm_stable_decay(self.step, *shape)
        loss, norm = training_step(
            self.objective, self.model.parameters(), self.optimizer, batches, training.clip
        )
        self.step += 1
        return self.workers.mean(loss), whole(norm)

    # -- the run ----------------------------------------------------------------------------------

    def run(self, steps: int | None = None) -> Result:
        """Trains to the end of the recipe, or to `steps` if that is earlier, and returns what was reached.

        Args:
            steps: where to stop, counted from the start of the recipe; None goes to its end.

        Raises:
            ValueError: the loss is no longer finite, or a file could not be written.
        """
        last = min(self.recipe.steps, self.recipe.steps if steps is None else steps)
        training = self.recipe.training
        peak = matmul_peak(self.device, self.precision)
        tokens = training.rows * self.recipe.model.context
        flops = step_flops(self.recipe.model, self.model, tokens)
        self.model.train()
        mark, mark_step = time.perf_counter(), self.step
        with progress(self.console, last, self.step) as report:
            while self.step < last:
                loss, norm = self.train_step()
                self.losses.append(loss)
                done = self.step == last
                if self.step % training.log_every == 0 or done:
                    mean = float(torch.stack(self.losses).mean())  # waits for the device
                    elapsed = time.perf_counter() - mark
                    self.elapsed_s += elapsed
                    speed = (self.step - mark_step) / max(elapsed, 1e-9)
                    report(self._log(mean, float(norm), speed * tokens, speed * flops / peak, done))
                    mark, mark_step = time.perf_counter(), self.step
                if self.out and (self.step % training.checkpoint_every == 0 or done):
                    self.save()
        return self._finish()

    def _log(
        self, loss: float, norm: float, tokens_per_s: float, peak_share: float, done: bool
    ) -> dict[str, Any]:
        """Adds a line to the log; measures validation and shows samples when it is time."""
        if not loss < float("inf"):
            raise ValueError(f"training diverged: the loss is {loss} at step {self.step}")
        training, bits = self.recipe.training, ""
        if self.step % training.validate_every == 0 or done:
            bits = round(self.validate(QUICK_VALIDATION_DOCUMENTS), 4)
        if self.step % training.sample_every == 0 or done:
            self._show_samples()
        tokens = self.step * training.rows * self.recipe.model.context
        rate = self.optimizer.param_groups[0]["lr"]
        values = (self.step, tokens, round(loss, 5), round(rate, 8), round(norm, 4), bits)
        rest = (round(tokens_per_s), round(peak_share, 3), round(self.elapsed_s, 1))
        self.rows.append(dict(zip(LOG_COLUMNS, values + rest, strict=True)))
        self.losses = []
        if self.on_row is not None:
            self.on_row(self.rows[-1])
        return self.rows[-1]

    def _finish(self) -> Result:
        """Writes the model if the recipe is done, with its figure over all validation documents."""
        if self.step < self.recipe.steps:
            return Result(self.model, self.step, self.rows, None)
        bits = self.validate(len(self.validation))
        tensors = {name: whole(tensor).cpu() for name, tensor in self.model.state_dict().items()}
        if self.out and self.workers.rank == 0:
            plain = Decoder(self.recipe.model, seed=None)
            fill(plain, tensors, "the trained model")
            card = {"validation_bits_per_byte": bits, "recipe": as_plain(self.recipe), "step": self.step}
            save_model(self.out / "model.safetensors", plain, **card)
        if self.console:
            count = len(self.validation)
            self.console.print(f"validation: {bits:.4f} bits per byte over {count} documents")
        return Result(self.model, self.step, self.rows, bits)

    def validate(self, documents: int) -> float:
        """Measures bits per byte over the first validation documents; NaN if there are none.

        Args:
            documents: how many.
        """
        chosen, context = self.validation[:documents], self.recipe.model.context
        if not chosen:
            return float("nan")
        self.model.eval()
        bits = bits_per_byte(self.model, chosen, self.tokenizer, context)
        self.model.train()
        return bits

    @torch.no_grad()
    def sample(self, prompt: str, tokens: int = 48, temperature: float = 0.7) -> str:
        """Continues a prompt, with a seed of its own, so that looking never changes the run.

        Args:
            prompt: text.
            tokens: to add at most.
            temperature: above 0.
        """
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
            text = self.sample(prompt)  # in every process: a sharded model needs them all
            if self.console:
                self.console.print(f"  step {self.step}: {text}", style="dim", markup=False, highlight=False)
        self.model.train()

    # -- checkpoint -------------------------------------------------------------------------------

    def save(self) -> None:
        """Replaces checkpoint and log, each atomically.

        Raises:
            ValueError: a file could not be written; the old one is untouched.
        """
        tensors = {f"model.{name}": whole(tensor) for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer.{key}.{name}"] = whole(torch.as_tensor(value))
        if self.workers.rank == 0:
            metadata = {"step": self.step, "elapsed_s": self.elapsed_s, "recipe": as_plain(self.recipe)}
            metadata |= {"log": self.rows, "losses": [float(loss) for loss in self.losses]}
            save_tensors(self.out / "checkpoint.safetensors", tensors, metadata)
            write_log(self.out / "log.csv", self.rows)
        self.workers.wait()

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
        fill(self.model, shard_all(weights, self.model), path)
        for name, parameter in self.model.named_parameters():
            state = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                tensor = tensors.get(f"optimizer.{key}.{name}")
                if tensor is None:
                    raise ValueError(f"resume needs tensor optimizer.{key}.{name}, {path} has none")
                state[key] = shard_like(tensor, parameter)
            self.optimizer.state[parameter] = state
        self.step, self.elapsed_s, self.rows = metadata["step"], metadata["elapsed_s"], metadata["log"]
        self.losses = [torch.tensor(loss, device=self.device) for loss in metadata["losses"]]


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"Trainer needs a folder it can make, got {folder}: {error.strerror}") from None
    return folder
