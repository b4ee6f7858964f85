"""A training step against Hugging Face's and nanoGPT's, and the cross-entropy in chunks against the plain one.

    python -m benchmarks.training [--rounds 7] [--json benchmarks/training.json]

All three models are one GPT-2 with the same random weights, no dropout, the same rows, AdamW (fused) and clipping: before
anything is timed, the three losses and gradient norms are compared. Then whole steps are timed, side by side.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import (
    Result,
    compare,
    cpu_s,
    finish,
    interleave,
    one_thread,
    parser,
    summarise,
)
from course_llm import hf
from course_llm.loss import chunked_cross_entropy
from course_llm.regularized_loss import training_cross_entropy
from course_llm.training_reports import step_flops
from course_llm.training_step import Objective, make_optimizer, training_step

SMALL = dict(vocab_size=8192, n_embd=384, n_layer=6, n_head=6, n_positions=256)
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
NO_TEXT = dict(bos_token_id=0, eos_token_id=0)
ROWS = 4
CLIP = 1.0


class NanoBlock(nn.Module):
    """A block as nanoGPT writes it: one matrix for queries, keys and values, PyTorch's fused attention."""

    def __init__(self, config: transformers.GPT2Config) -> None:
        super().__init__()
        width, self.heads = config.n_embd, config.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, seq, width = x.shape
        parts = self.qkv(self.ln_1(x)).split(width, dim=2)
        q, k, v = (part.view(rows, seq, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).contiguous().view(rows, seq, width))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Nano(nn.Module):
    """A GPT-2 in nanoGPT's manner, with `F.cross_entropy` on the logits of all positions.

    It differs from nanoGPT where that would make the comparison unequal: GELU by tanh, as in GPT-2 itself.
    """

    def __init__(self, config: transformers.GPT2Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.places = nn.Embedding(config.n_positions, config.n_embd)
        self.blocks = nn.ModuleList(NanoBlock(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))

    @torch.no_grad()
    def take(self, theirs: transformers.GPT2LMHeadModel) -> Nano:
        """Copies Hugging Face's weights, whose matrices are transposed."""
        source, names = theirs.transformer, {"qkv": "attn.c_attn", "proj": "attn.c_proj"}
        names |= {"up": "mlp.c_fc", "down": "mlp.c_proj"}
        self.tokens.weight.copy_(source.wte.weight)
        self.places.weight.copy_(source.wpe.weight)
        self.norm.load_state_dict(source.ln_f.state_dict())
        for block, other in zip(self.blocks, source.h, strict=True):
            block.ln_1.load_state_dict(other.ln_1.state_dict())
            block.ln_2.load_state_dict(other.ln_2.state_dict())
            for ours, name in names.items():
                getattr(block, ours).weight.copy_(other.get_submodule(name).weight.T)
                getattr(block, ours).bias.copy_(other.get_submodule(name).bias)
        return self


def whole_step(loss_of: Callable[[Tensor, Tensor], Tensor], model: nn.Module, batch: tuple[Tensor, Tensor]):
    """Returns a function that does one step in the usual way: loss, backward, clipping, AdamW, gradients away."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step() -> tuple[Tensor, Tensor]:
        loss = loss_of(*batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach(), norm

    return step


def in_bfloat16(loss_of: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Runs a loss under autocast."""

    def wrapped(*batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(*batch)

    return wrapped


def ways(sizes: dict, rows: int, halves: bool = True) -> tuple[dict[str, Callable], object]:
    """Returns the steps of all three, by name, and our model."""
    config = transformers.GPT2Config(**sizes, **NO_DROPOUT, **NO_TEXT)
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, config.vocab_size, (rows, config.n_positions + 1))
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    found, kept = {}, None
    for half in (False, True) if halves else (False,):
        name = " bfloat16" if half else ""
        wrap = in_bfloat16 if half else lambda loss_of: loss_of
        model = copy.deepcopy(theirs)

        def their_loss(inputs: Tensor, targets: Tensor, model: nn.Module = model) -> Tensor:
            return model(inputs, labels=inputs, shift_labels=targets, use_cache=False).loss

        found[f"HF{name}"] = whole_step(wrap(their_loss), model, batch)
        nano = Nano(config).take(theirs)
        found[f"nanoGPT{name}"] = whole_step(wrap(nano), nano, batch)
        ours = hf.from_state_dict(config.to_dict(), theirs.state_dict()).train()
        objective = Objective(ours, torch.bfloat16 if half else torch.float32)
        optimizer = make_optimizer(ours, 1e-4)
        found[f"ours{name}"] = lambda objective=objective, ours=ours, optimizer=optimizer: training_step(
            objective, ours.parameters(), optimizer, [batch], CLIP
        )
        kept = kept or ours
    return found, kept


def agree(found: dict[str, Callable]) -> None:
    """Runs every step once and raises AssertionError unless losses and gradient norms are the same."""
    first = {name: step() for name, step in found.items()}
    loss, norm = first["HF"]
    for name, (own_loss, own_norm) in first.items():
        tolerance = 2e-2 if "bfloat16" in name else 1e-4
        torch.testing.assert_close(own_loss.float(), loss, rtol=tolerance, atol=0, msg=name)
        torch.testing.assert_close(own_norm.float(), norm, rtol=tolerance, atol=0, msg=name)


def bare(sizes: dict, rows: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """Returns what no step can do without: its matrix products, forward and backward, and PyTorch's fused attention."""
    width, layers, heads, seq = (sizes[name] for name in ("n_embd", "n_layer", "n_head", "n_positions"))
    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)] * layers
    shapes.append((width, sizes["vocab_size"]))
    pairs = {shape: [torch.randn(n, rows * seq).to(dtype) for n in shape] for shape in set(shapes)}
    weights = {shape: (0.02 * torch.randn(shape)).to(dtype) for shape in set(shapes)}
    qkv = [torch.randn(rows, seq, heads, width // heads).to(dtype).transpose(1, 2) for _ in range(3)]
    qkv = [part.requires_grad_() for part in qkv]

    def products() -> None:
        for shape in shapes:
            (x, grad), weight = pairs[shape], weights[shape]
            x.T @ weight, weight @ grad, x @ grad.T

    def attention() -> None:
        for _ in range(layers):
            seen = F.scaled_dot_product_attention(*qkv, is_causal=True)
            torch.autograd.grad(seen, qkv, seen.detach())

    return {"products": products, "attention": attention}


def steps(rounds: int, sizes: dict = SMALL, rows: int = ROWS) -> list[Result]:
    """Compares whole training steps, and all of them with what no step can do without."""
    found, ours = ways(sizes, rows)
    agree(found)
    a = torch.randn(1024, 1024)
    found["matmul"] = lambda: a @ a
    for dtype, words in ((torch.float32, ""), (torch.bfloat16, " bfloat16")):
        found |= {f"{name}{words}": run for name, run in bare(sizes, rows, dtype).items()}
    seconds = interleave(found, rounds)
    for words in ("", " bfloat16"):
        pairs = zip(seconds[f"products{words}"], seconds[f"attention{words}"], strict=True)
        seconds[f"least{words}"] = [sum(pair) for pair in pairs]
    flops = step_flops(ours.config, ours, rows * sizes["n_positions"])
    product = min(min(seconds["matmul"]), min(cpu_s(found["matmul"]) for _ in range(5)))
    peak = 2 * 1024**3 / product
    shares = [flops / second / peak for second in seconds["ours"]]
    most = [flops / second / peak for second in seconds["least"]]
    gflops = f"peak {peak / 1e9:.0f} GFLOP/s; the best step has {max(shares):.0%}"
    name, alone = f"training step, small, {rows} × {sizes['n_positions']}", "products and attention alone"
    return [
        compare(f"{name}, float32, against HF", seconds, "HF", "ours", 1.28),
        compare(f"the same, if the step were {alone}", seconds, "HF", "least"),
        compare(f"{name}, float32, against nanoGPT", seconds, "nanoGPT", "ours", 1.0),
        compare(f"the same, if the step were {alone}", seconds, "nanoGPT", "least"),
        compare(f"{name}, bfloat16, against HF float32", seconds, "HF", "ours bfloat16", 2.2),
        compare(f"the same, if the step were {alone}", seconds, "HF", "least bfloat16"),
        compare(f"{name}, bfloat16, against HF bfloat16", seconds, "HF bfloat16", "ours bfloat16"),
        compare(f"{name}, bfloat16, against nanoGPT bfloat16", seconds, "nanoGPT bfloat16", "ours bfloat16"),
        summarise(f"{name}, float32, share of the matmul peak", shares, 0.92, note=gflops),
        summarise(f"the same, if the step were {alone}", most),
    ]


def kept_bytes(function: Callable[[], Tensor], parameter: Tensor) -> int:
    """Counts what a loss keeps for backward, each storage once, without the parameter, which is there anyway."""
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function()
    found.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(found.values())


def flops_of(function: Callable[[], Tensor]) -> int:
    """Counts the FLOPs of forward and backward."""
    with FlopCounterMode(display=False) as counter:
        function().backward()
    return counter.get_total_flops()


def losses(rounds: int, n: int, d_hidden: int, vocab: int, chunk: int, bars: bool) -> list[Result]:
    """Compares the loss in chunks, and the one of a training step, with `F.cross_entropy` on all logits."""
    hidden = torch.randn(n, d_hidden, requires_grad=True)
    weight = (torch.randn(vocab, d_hidden) / d_hidden**0.5).requires_grad_()
    targets = torch.randint(0, vocab, (n,))
    functions = {
        "plain": lambda: F.cross_entropy(hidden @ weight.T, targets),
        "chunked": lambda: chunked_cross_entropy(hidden, weight.T, targets, chunk),
        "ahead": lambda: training_cross_entropy(hidden, weight.T, targets),
    }

    def forward_and_backward(function: Callable[[], Tensor]) -> None:
        hidden.grad = weight.grad = None
        function().backward()

    kept = {name: kept_bytes(function, weight) for name, function in functions.items()}
    flops = {name: flops_of(function) for name, function in functions.items()}
    runs = {name: (lambda f=function: forward_and_backward(f)) for name, function in functions.items()}
    seconds = interleave(runs, rounds)
    where, found = f"n {n}, d {d_hidden}, vocab {vocab:,}", []
    for name, words in (("chunked", f"in chunks of {chunk}"), ("ahead", "gradient ahead")):
        judged = bars and name == "chunked"
        title = f"cross-entropy {words}"
        ratio = kept["plain"] / kept[name]
        found.append(Result(f"{title}: bytes kept ÷", *[ratio] * 3, 70 if judged else None, note=where))
        more = flops[name] / flops["plain"]
        found.append(Result(f"{title}: FLOPs ×", *[more] * 3, 1.34 if judged else None, below=True))
        times = [own / plain for own, plain in zip(seconds[name], seconds["plain"], strict=True)]
        medians = {each: statistics.median(seconds[each]) for each in ("plain", name)}
        found.append(
            summarise(f"{title}: time ×", times, 0.95 if judged else None, seconds=medians, below=True)
        )
    return found


def main() -> None:
    """Measures all and prints the table."""
    arguments = parser(__doc__).parse_args()
    one_thread()
    results = steps(arguments.rounds)
    for shape in (
        (1024, 384, 8192, 512, False),
        (2048, 384, 50257, 128, True),
        (4096, 128, 50257, 128, True),
    ):
        results += losses(arguments.rounds, *shape)
    finish(results, arguments.json)


if __name__ == "__main__":
    main()
