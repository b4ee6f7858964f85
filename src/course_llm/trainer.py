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
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from course_llm.recipe import RECIPE_PATH, Recipe, read_recipe
from course_llm.training_reports import plot_log, tensorboard_writer
from course_llm.training_run import Result, Trainer


def pretrain_from_recipe(
    recipe: Recipe | str | Path = RECIPE_PATH,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    steps: int | None = None,
    device: str = "cpu",
    compile: bool = False,
    parallel: str | None = None,
    console: Console | None = None,
    tensorboard: bool = False,
) -> Result:
    """Trains a decoder by a recipe and returns it with its log.

    Args:
        recipe: a `Recipe` or the path of one; the shipped recipe by default.
        out: folder for checkpoints, log and model; None keeps all in memory.
        resume: go on from the checkpoint in `out`.
        steps: stop early; the schedule is still that of the whole recipe.
        device: `"cpu"`, `"cuda"` or `"mps"`.
        compile: use `torch.compile`.
        parallel: `"ddp"` or `"fsdp"` under torchrun; see `course_llm.workers`.
        console: where to report progress; None is silent.
        tensorboard: write events into the folder `events` of `out`.

    Raises:
        ValueError: the recipe, the corpus or the checkpoint is missing or not valid; the device is not there;
            `steps` is below 0; `resume` without `out`; or `out` holds a checkpoint and `resume` is off.
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
    on_row = tensorboard_writer(Path(out or ".") / "events") if tensorboard else None
    require_device(device)
    trainer = Trainer(recipe, out, device, compile, parallel, console, on_row)
    try:
        if resume:
            trainer.resume()
        return trainer.run(steps)
    finally:
        trainer.workers.leave()


def require_device(name: str) -> None:
    """Refuses a device that torch does not know or cannot use here.

    Args:
        name: of the device.

    Raises:
        ValueError: torch cannot use it.
    """
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA fails an assertion
        words = str(error).splitlines()[0]
        raise ValueError(f"pretrain needs a device that this machine has, got {name}: {words}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `course-llm pretrain` and returns the exit status; a fault is one clear line.

    Args:
        argv: the command's arguments; None takes those of the process.
    """
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
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), help="several processes, under torchrun")
    parser.add_argument("--tensorboard", action="store_true", help="write TensorBoard events")
    arguments = parser.parse_args(argv)
    if arguments.threads is not None and arguments.threads < 1:
        parser.error(f"--threads needs at least 1, got {arguments.threads}")
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
            parallel=arguments.parallel,
            tensorboard=arguments.tensorboard,
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
