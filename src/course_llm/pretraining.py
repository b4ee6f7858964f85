"""Pretraining: from a pile of text to a model that predicts the next token.

Text becomes tokens (`train_bpe`, `bpe_encode`), tokens become rows of one length (`pack`, `random_batch`),
and a loop turns rows into a model: a learning rate that rises and falls, AdamW, a bound on the gradient's
norm, gradients summed over microbatches, checkpoints to resume from (`pretrain` puts them together). The last
part counts: parameters, FLOPs, and how the loss falls with both, so that a budget can be spent well.
"""

import math
import os
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

HUBER_DELTA = 1e-3  # of Hoffmann et al., appendix D.3


def train_bpe(word_counts: dict[str, int], merges: int) -> list[tuple[bytes, bytes]]:
    """Learns byte-pair merges (Sennrich et al., arXiv 1508.07909) and returns them in the order learned.

    Args:
        word_counts: how often each word occurs in the text. A word is its UTF-8 bytes; pairs never cross
            words.
        merges: how many merges to learn; fewer come back when no pair is left.

    Each step joins the most frequent pair of neighbours everywhere, from left to right and without overlap.
    Ties go to the pair that sorts first.

    Raises:
        ValueError: merges is negative.
    """
    if merges < 0:
        raise ValueError(f"train_bpe needs merges >= 0, got merges={merges}")
    words = [([bytes([byte]) for byte in word.encode()], count) for word, count in word_counts.items()]
    learned: list[tuple[bytes, bytes]] = []
    while len(learned) < merges:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for tokens, count in words:
            for pair in pairwise(tokens):
                pairs[pair] += count
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        learned.append(best)
        words = [(_merge(tokens, best), count) for tokens, count in words]
    return learned


def bpe_encode(word: str, merges: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    """Cuts a word into tokens by applying the merges in the order in which they were learned.

    Args:
        word: any text; it starts as its UTF-8 bytes.
        merges: what `train_bpe` returned.
    """
    tokens = [bytes([byte]) for byte in word.encode()]
    for pair in merges:
        tokens = _merge(tokens, pair)
    return tokens


def _merge(tokens: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    """Joins every occurrence of a pair, from left to right and without overlap."""
    if pair not in pairwise(tokens):
        return tokens
    merged: list[bytes] = []
    i = 0
    while i < len(tokens):
        if tuple(tokens[i : i + 2]) == pair:
            merged.append(pair[0] + pair[1])
            i += 2
        else:
            merged.append(tokens[i])
            i += 1
    return merged


def pack(
    documents: Sequence[Sequence[int]], eos_id: int, block: int
) -> tuple[Int[Tensor, "rows block"], Int[Tensor, "rows block"], Int[Tensor, "rows block"]]:
    """Joins documents into one stream of tokens and cuts it into rows: `(inputs, targets, document ids)`.

    Args:
        documents: token ids of each document; no end of text has been added to them.
        eos_id: the token put after each document; it belongs to that document, which may hold it elsewhere,
            too.
        block: tokens per row, at least 1.

    Rows start `block` tokens apart. A target is the token that follows its input in the stream, so the last
    target of a row is the first input of the next. A document id is the index in `documents` of the input. A
    tail of fewer than `block + 1` tokens is dropped. All three are int64.

    Raises:
        ValueError: block is below 1.
    """
    if block < 1:
        raise ValueError(f"pack needs block >= 1, got block={block}")
    stream = [token for document in documents for token in [*document, eos_id]]
    owners = [i for i, document in enumerate(documents) for _ in range(len(document) + 1)]
    rows = max(len(stream) - 1, 0) // block
    used = rows * block
    inputs, targets, ids = (
        torch.tensor(part, dtype=torch.int64).reshape(rows, block)
        for part in (stream[:used], stream[1 : used + 1], owners[:used])
    )
    return inputs, targets, ids


def random_batch(
    tokens: Int[Tensor, " n"], block: int, batch: int, generator: torch.Generator
) -> tuple[Int[Tensor, "batch block"], Int[Tensor, "batch block"]]:
    """Draws rows of a token stream at random, with replacement: `(inputs, targets)`.

    Args:
        tokens: the stream.
        block: tokens per row.
        batch: how many rows; each start that leaves room for the last target is equally likely.
        generator: the only source of randomness.

    Raises:
        ValueError: the stream has fewer than `block + 1` tokens.
    """
    starts = len(tokens) - block  # a row needs block + 1 tokens: the last one is a target
    if starts < 1:
        raise ValueError(f"random_batch needs at least block + 1 = {block + 1} tokens, got {len(tokens)}")
    first = torch.randint(starts, (batch, 1), generator=generator, device=generator.device)
    rows = tokens[first.to(tokens.device) + torch.arange(block + 1, device=tokens.device)]
    return rows[:, :-1], rows[:, 1:]


def learning_rate(step: int, peak: float, warmup: int, total: int, floor: float) -> float:
    """Returns the learning rate of a step: a straight line up, half a cosine down (SGDR, arXiv 1608.03983).

    Args:
        step: counts from 0.
        peak: the highest rate; steps `warmup - 1` and `warmup` both have it.
        warmup: number of steps on the way up, `peak * (step + 1) / warmup`; 0 for none.
        total: the step at which the cosine reaches the floor; if it is `warmup`, there is no cosine.
        floor: the rate from step `total` on.

    Raises:
        ValueError: step or warmup is negative.
    """
    if step < 0 or warmup < 0:
        raise ValueError(f"learning_rate needs step >= 0 and warmup >= 0, got step={step}, warmup={warmup}")
    if step < warmup:
        return peak * (step + 1) / warmup
    if step >= total:
        return floor
    done = (step - warmup) / (total - warmup)
    return floor + (peak - floor) * (1 + math.cos(math.pi * done)) / 2


def adamw_step(
    param: Float[Tensor, "*shape"],
    grad: Float[Tensor, "*shape"],
    m: Float[Tensor, "*shape"],
    v: Float[Tensor, "*shape"],
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Returns `(param, m, v)` after one step of AdamW (Loshchilov and Hutter, arXiv 1711.05101).

    Args:
        param: a parameter.
        grad: its gradient.
        m: running mean of the gradient; zeros before the first step.
        v: running mean of the gradient's square; zeros before the first step.
        step: counts from 1.
        lr: learning rate.
        betas: the shares of m and of v that are kept.
        eps: added to the root of v, after the correction.
        weight_decay: share of the parameter that is taken away, times lr; it does not pass through m and v.

    Raises:
        ValueError: step is below 1.
    """
    if step < 1:
        raise ValueError(f"adamw_step needs step >= 1, got step={step}")
    wide = torch.promote_types(param.dtype, torch.float32)  # (1 - beta2) * grad^2 underflows in float16
    p, g = param.to(wide), grad.to(wide)
    new_m = betas[0] * m.to(wide) + (1 - betas[0]) * g
    new_v = betas[1] * v.to(wide) + (1 - betas[1]) * g**2
    unbiased_m = new_m / (1 - betas[0] ** step)
    unbiased_v = new_v / (1 - betas[1] ** step)
    new = p * (1 - lr * weight_decay) - lr * unbiased_m / (unbiased_v.sqrt() + eps)
    return new.to(param.dtype), new_m.to(m.dtype), new_v.to(v.dtype)


def clip_gradients(
    grads: Sequence[Float[Tensor, "..."]], max_norm: float
) -> tuple[list[Float[Tensor, "..."]], Float[Tensor, ""]]:
    """Scales gradients down together when their common norm is above max_norm: `(clipped, norm before)`.

    Args:
        grads: gradients of all parameters; one Euclidean norm is taken over all their entries.
        max_norm: above 0; gradients with a smaller norm stay as they are.

    Raises:
        ValueError: max_norm is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_gradients needs max_norm > 0, got max_norm={max_norm}")
    if not grads:
        return [], torch.zeros(())
    wide = [grad.to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
    norm = torch.stack([torch.linalg.vector_norm(grad) for grad in wide]).norm()
    scale = (max_norm / norm).clamp(max=1.0)  # a norm of 0 gives infinity, and so 1
    return [(grad * scale).to(old.dtype) for grad, old in zip(wide, grads, strict=True)], norm


def accumulate_gradients(
    model: nn.Module, microbatches: Sequence[tuple[Int[Tensor, "..."], Int[Tensor, "..."]]]
) -> Float[Tensor, ""]:
    """Leaves in `.grad` the gradient of the mean loss per token over all microbatches; returns that loss.

    Args:
        model: token ids `(batch, seq)` to logits `(batch, seq, vocab)`. Its old gradients are cleared.
        microbatches: pairs `(inputs, targets)` of shape `(batch, seq)`, of unequal sizes; targets of `-100`
            do not count. At least one target counts.

    The microbatches go forward and backward one after the other, so that only one is in memory. The loss is
    0-d and detached.
    """
    model.zero_grad()
    counted = sum((targets != -100).sum() for _, targets in microbatches)
    total: Tensor | float = 0.0
    for inputs, targets in microbatches:
        logits = model(inputs)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
        nll = F.cross_entropy(wide, targets.flatten(), ignore_index=-100, reduction="sum")
        (nll / counted).backward()
        total = total + nll.detach()
    return total / counted


def pretrain(
    model: nn.Module,
    tokens: Int[Tensor, " n"],
    steps: int,
    batch: int,
    block: int,
    peak_lr: float,
    warmup: int,
    generator: torch.Generator,
) -> list[float]:
    """Trains a model on a stream of tokens and returns the loss of each step, in nats per token.

    Args:
        model: token ids `(batch, seq)` to logits `(batch, seq, vocab)`, causal; changed in place.
        tokens: the stream.
        steps: how many updates.
        batch: rows per step, drawn by `random_batch`.
        block: tokens per row.
        peak_lr: highest rate of `learning_rate`, with `total = steps` and `floor = peak_lr / 10`.
        warmup: steps on the way up to it.
        generator: the only source of randomness.

    AdamW with betas (0.9, 0.95), eps 1e-8 and weight decay 0.1; the gradients' norm is clipped at 1.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(steps):
        losses.append(accumulate_gradients(model, [random_batch(tokens, block, batch, generator)]))
        trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
        clipped, _ = clip_gradients([parameter.grad for parameter in trained], 1.0)
        for parameter, grad in zip(trained, clipped, strict=True):
            parameter.grad = grad
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, peak_lr, warmup, steps, peak_lr / 10)
        optimizer.step()
    return [float(loss) for loss in losses]  # only now: reading a loss waits for the device


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    generator: torch.Generator,
) -> None:
    """Writes all that a run needs to go on: weights, optimizer state, step, and the state of the generator.

    Args:
        path: the file; an old one is replaced when the new one is complete, and not before.
        model: its weights and buffers are kept.
        optimizer: its state is kept.
        step: number of steps done.
        generator: its state is kept.
    """
    path = Path(path)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"generator": generator.get_state(), "step": step}
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # or the new name could reach the disk before the data
        os.replace(part, path)  # a crash before this line leaves the old file, after it the new one
    finally:
        part.unlink(missing_ok=True)


def load_checkpoint(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> int:
    """Restores in place what `save_checkpoint` wrote and returns the number of steps done.

    Args:
        path: the file.
        model: of the same architecture as the one that was saved; changed.
        optimizer: of the same kind as the one that was saved, over this model's parameters; changed.
        generator: on the same kind of device as the one that was saved; changed.
    """
    state = torch.load(Path(path), map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    generator.set_state(state["generator"])
    return state["step"]


def parameter_count(layers: int, d_hidden: int, d_ff: int, vocab: int, tied: bool = True) -> int:
    """Counts a decoder's weights in matrices: no biases, norms or positions.

    Args:
        layers: blocks, each with four attention matrices and two feed-forward matrices.
        d_hidden: width of the residual stream.
        d_ff: width of the feed-forward layer.
        vocab: number of tokens.
        tied: the output matrix is the embedding, and counts once.
    """
    return layers * (4 * d_hidden**2 + 2 * d_hidden * d_ff) + vocab * d_hidden * (1 if tied else 2)


def training_flops(parameters: float, tokens: float) -> float:
    """Returns the FLOPs of training, `6 * N * D` (Kaplan et al., arXiv 2001.08361): 2 forward and 4 backward.

    Args:
        parameters: N, the weights that multiply each token.
        tokens: D, the tokens trained on, repetitions counted.
    """
    return 6 * parameters * tokens


def fit_power_law(x: Float[Tensor, " n"], loss: Float[Tensor, " n"]) -> tuple[float, float]:
    """Fits `L = (c / x) ** alpha` by least squares of log L on log x; returns `(alpha, c)`.

    Args:
        x: parameters, tokens or FLOPs, above 0, at least two different values.
        loss: the loss at each, above 0.

    Raises:
        ValueError: there are fewer than two points, or a value is not above 0.
    """
    if len(x) < 2 or bool((x <= 0).any()) or bool((loss <= 0).any()):
        raise ValueError(f"fit_power_law needs two or more positive points, got x={x}, loss={loss}")
    log_x, log_loss = x.double().log(), loss.double().log()
    from_mean = log_x - log_x.mean()
    slope = (from_mean * log_loss).sum() / (from_mean**2).sum()
    alpha = -slope
    return float(alpha), float((log_loss.mean() / alpha + log_x.mean()).exp())


def fit_chinchilla(
    parameters: Float[Tensor, " n"], tokens: Float[Tensor, " n"], loss: Float[Tensor, " n"]
) -> tuple[float, float, float, float, float]:
    """Fits `L = E + A / N**alpha + B / D**beta` (arXiv 2203.15556); returns `(E, A, B, alpha, beta)`.

    Args:
        parameters: N of each run, above 0.
        tokens: D of each run, above 0.
        loss: the final loss of each run, above 0; at least five runs.

    Minimises the Huber loss (`delta = 1e-3`) of log L predicted minus log L measured, so that single odd runs
    count little. A coarse grid over the exponents gives the start, L-BFGS the rest.

    Raises:
        ValueError: there are fewer than five runs, or a value is not above 0.
    """
    data = torch.stack([parameters.double(), tokens.double(), loss.double()])
    if data.shape[1] < 5 or bool((data <= 0).any()):
        raise ValueError(f"fit_chinchilla needs five or more positive runs, got {data.T.tolist()}")
    log_n, log_d, log_loss = data.log()
    unknown = _start(log_n, log_d, data[2]).requires_grad_()  # log E, log A', log B', alpha, beta
    centre_n, centre_d = log_n.mean(), log_d.mean()

    def objective() -> Tensor:
        e, a, b, alpha, beta = unknown
        terms = [e.expand_as(log_n), a - alpha * (log_n - centre_n), b - beta * (log_d - centre_d)]
        return F.huber_loss(torch.stack(terms).logsumexp(0), log_loss, delta=HUBER_DELTA, reduction="sum")

    optimizer = torch.optim.LBFGS(
        [unknown], max_iter=2000, tolerance_grad=1e-14, tolerance_change=1e-18, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)
    e, a, b, alpha, beta = unknown.detach()
    fitted = (e.exp(), (a + alpha * centre_n).exp(), (b + beta * centre_d).exp(), alpha, beta)
    return tuple(float(value) for value in fitted)


def _start(log_n: Tensor, log_d: Tensor, loss: Tensor) -> Tensor:
    """Tries exponents on a grid, where E, A and B follow by linear least squares, and returns the best five.

    A and B are those at the mean of log N and log D: the five are nearly independent of each other there.
    """
    grid = torch.linspace(0.05, 1.5, 30, dtype=torch.float64, device=loss.device)
    best, start = math.inf, loss.new_zeros(5)
    for alpha in grid:
        for_n = (-alpha * (log_n - log_n.mean())).exp()
        columns = (-grid[:, None] * (log_d - log_d.mean())).exp()  # (grid, runs)
        design = torch.stack([torch.ones_like(columns), for_n.expand_as(columns), columns], dim=-1)
        solved = torch.linalg.lstsq(design, loss.expand_as(columns).unsqueeze(-1)).solution.squeeze(-1)
        residual = ((design @ solved.unsqueeze(-1)).squeeze(-1) - loss).square().sum(-1)
        residual = residual.masked_fill((solved <= 0).any(-1), math.inf)
        i = int(residual.argmin())
        if residual[i] < best:
            best = float(residual[i])
            start = torch.cat([solved[i].log(), torch.stack([alpha, grid[i]])])
    if math.isinf(best):  # no positive solution anywhere: begin in the middle
        share = float(loss.min()) / 3
        start = torch.tensor([math.log(share)] * 3 + [0.4, 0.4], dtype=torch.float64, device=loss.device)
    return start


def compute_optimal(flops: float, A: float, B: float, alpha: float, beta: float) -> tuple[float, float]:
    """Returns the `(parameters, tokens)` that a budget of FLOPs is best spent on (Chinchilla, eq. 4).

    They are the N and D with the least `A / N**alpha + B / D**beta` under `6 * N * D = flops`.

    Args:
        flops: the budget, above 0.
        A: factor of the term that falls with parameters.
        B: factor of the term that falls with tokens.
        alpha: exponent of the term that falls with parameters.
        beta: exponent of the term that falls with tokens.

    Raises:
        ValueError: flops is not above 0.
    """
    if not flops > 0:
        raise ValueError(f"compute_optimal needs flops > 0, got flops={flops}")
    balance = (alpha * A / (beta * B)) ** (1 / (alpha + beta))
    parameters = balance * (flops / 6) ** (beta / (alpha + beta))
    return parameters, flops / 6 / parameters
