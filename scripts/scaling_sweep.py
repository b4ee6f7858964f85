"""Trains small decoders of several sizes on several budgets and writes the table that the chapter fits.

    python scripts/scaling_sweep.py            prints the shipped table and what follows from it
    python scripts/scaling_sweep.py --rerun    trains all runs again (a quarter of an hour on one core)

Each run reads new text only: no token is seen twice. That bounds the budget of small models. All sizes share one tokenizer of 512 tokens, made from the corpus's own merges: with a larger one
the embedding would be most of a small model. A model of width d is trained with rate 6e-3 * sqrt(64 / d), five per
cent warm-up, and a cosine that ends with the run.
"""

import argparse
import csv
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from course_llm import corpus
from course_llm.model import Decoder, ModelConfig
from course_llm.pretraining import compute_optimal, fit_chinchilla, learning_rate, pack, parameter_count
from course_llm.tokenizer import CourseTokenizer, train_merges, word_counts

TABLE = Path(__file__).parents[1] / "src" / "course_llm" / "data" / "scaling_runs.csv"
COLUMNS = ("layers", "d_hidden", "parameters", "tokens", "flops", "loss", "seconds")
# FLOPs: layers and width of the models trained with them; each list reaches past the best size on both sides
RUNS = {
    4e10: ((2, 8), (2, 12), (2, 16), (2, 24), (2, 40)),
    1.2e11: ((2, 12), (2, 16), (2, 24), (2, 40), (3, 56)),
    4e11: ((2, 24), (2, 32), (2, 40), (3, 56), (4, 80)),
    8e11: ((2, 40), (2, 48), (3, 56), (4, 64), (4, 80)),
}
VOCAB, CONTEXT, ROWS = 512, 64, 8


def streams() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns inputs and targets of training rows, in random order, and of validation rows."""
    tokenizer = CourseTokenizer(train_merges(word_counts(corpus.training_documents()), VOCAB - 257))
    sides = []
    for documents in (corpus.training_documents(), corpus.validation_documents()[:400]):
        order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(0)).tolist()
        ids = tokenizer.encode_batch([documents[i] for i in order])
        sides += pack(ids, tokenizer.eos_id, CONTEXT)[:2]
    order = torch.randperm(len(sides[0]), generator=torch.Generator().manual_seed(1))
    return sides[0][order], sides[1][order], sides[2], sides[3]


def train(layers: int, d_hidden: int, steps: int, data: tuple) -> float:
    """Trains one model on the first steps * ROWS rows and returns its validation loss in nats per token."""
    inputs, targets, held_inputs, held_targets = data
    heads = max(d_hidden // 16, 1)
    heads = next(h for h in range(heads, 0, -1) if d_hidden % h == 0 and (d_hidden // h) % 2 == 0)
    config = ModelConfig(
        VOCAB, d_hidden, layers, heads, 4 * d_hidden, CONTEXT, feed_forward="gelu", qk_norm=True
    )
    model = Decoder(config, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    peak = 6e-3 * math.sqrt(64 / d_hidden)
    for step in range(steps):
        rows = slice(step * ROWS, (step + 1) * ROWS)
        loss = F.cross_entropy(model(inputs[rows]).flatten(0, 1), targets[rows].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, peak, math.ceil(0.05 * steps), steps, peak / 20)
        optimizer.step()
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
            for x, y in zip(held_inputs.split(64), held_targets.split(64), strict=True)
        ]
    return float(torch.stack(losses).sum()) / held_targets.numel()


def sweep() -> list[dict[str, float]]:
    """Trains all runs, smallest first."""
    data, rows = streams(), []
    print(f"{data[0].numel():,} training tokens, {data[2].numel():,} validation tokens", flush=True)
    for flops, sizes in RUNS.items():
        for layers, d_hidden in sizes:
            parameters = parameter_count(layers, d_hidden, 4 * d_hidden, VOCAB)
            steps = round(flops / 6 / parameters / (ROWS * CONTEXT))
            assert steps * ROWS <= len(data[0]), "a run would see text twice"
            begin = time.process_time()
            loss = train(layers, d_hidden, steps, data)
            tokens = steps * ROWS * CONTEXT
            values = (layers, d_hidden, parameters, tokens, 6 * parameters * tokens, round(loss, 5))
            row = dict(zip(COLUMNS, (*values, round(time.process_time() - begin, 1)), strict=True))
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> int:
    """Reads or makes the table, and prints the parametric fit."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rerun", action="store_true", help="train everything again and replace the table")
    parser.add_argument("--out", type=Path, default=TABLE, help="where --rerun writes")
    arguments = parser.parse_args()
    if arguments.rerun:
        torch.set_num_threads(1)
        rows = sweep()
        with arguments.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    with arguments.out.open() as file:
        rows = list(csv.DictReader(file))
    N, D, L = (
        torch.tensor([float(r[k]) for r in rows], dtype=torch.float64)
        for k in ("parameters", "tokens", "loss")
    )
    fitted = fit_chinchilla(N, D, L)
    print(f"{len(rows)} runs: E, A, B, alpha, beta =", ", ".join(f"{value:.4g}" for value in fitted))
    for flops in RUNS:
        best = min(
            (r for r in rows if 0.8 < float(r["flops"]) / flops < 1.25), key=lambda r: float(r["loss"])
        )
        n, d = compute_optimal(flops, *fitted[1:])
        print(f"{flops:.1e} FLOPs: best run N={best['parameters']}, fit N={n:,.0f}, D={d:,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
