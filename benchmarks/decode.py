"""Greedy decoding against Hugging Face and nanoGPT's loop: `python -m benchmarks.decode [--only small gpt2 ...] [--rounds 5] [--json FILE]`.

Random weights, the same on both sides; 64 random prompt tokens, 192 new ones, one thread. Every way's tokens are compared before
anything is timed: in float32 they must be equal. A timing is a whole `generate`, the prompt included. Laying out weights and compiling
happen once, when a model is loaded, and are not timed.

    small    6 layers, width 384, 6 heads, 8,192 tokens, batch 1, against `transformers` with its dynamic cache
    compiled the same with `compile_steps`
    gpt2     GPT-2's sizes, batch 8, float32, and bfloat16 against float32
    share    GPT-2's sizes, batch 1: bytes of weights read per second, as a share of what one matrix times vector reads
    loop     small, batch 1 and 8, against reading everything again at each step
    flops    operations of one step with a cache, counted
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import measure
from benchmarks.measure import Result, compare, count, interleave
from benchmarks.models import NEW, PROMPT, SIZES, pair, prompts, their_tokens
from course_llm.compiled_steps import compile_steps
from course_llm.generation import generate, make_cache
from course_llm.model import Decoder
from course_llm.prepack import prepack_weights

Tokens = list[list[int]]


def our_tokens(model: Decoder, ids: Tensor, cache: str) -> Tokens:
    """Greedy decoding by `course_llm.generation.generate`."""
    return generate(model, ids.tolist(), NEW, cache=cache)


@torch.no_grad()
def loop_tokens(model: Decoder, ids: Tensor) -> Tokens:
    """Greedy decoding without a cache, as nanoGPT's `generate` goes: the last `context` tokens again at every step."""
    for _ in range(NEW):
        logits = model(ids[:, -model.config.context :], last_only=True)[:, -1]
        ids = torch.cat((ids, logits.argmax(dim=-1, keepdim=True)), dim=1)
    return ids[:, PROMPT:].tolist()


def require_equal(what: str, want: Tokens, got: Tokens) -> None:
    """Stops the benchmark if a way is fast because it does something else."""
    if want != got:
        raise SystemExit(f"{what}: the tokens are not those of the baseline")


def against_theirs(what: str, size: str, batch: int, cache: str, bar: float, rounds: int) -> Result:
    """Compares `generate` on weights laid out for the batch with Hugging Face's."""
    theirs, ours = pair(size)
    fast, ids = prepack_weights(ours, batch), prompts(batch, size)
    require_equal(what, their_tokens(theirs, ids), our_tokens(fast, ids, cache))
    ways = {"theirs": partial(their_tokens, theirs, ids), "ours": partial(our_tokens, fast, ids, cache)}
    return compare(
        what, interleave(ways, rounds, 0), "theirs", "ours", bar, note=f"{cache} cache, tokens equal"
    )


def small(rounds: int) -> Iterator[Result]:
    yield against_theirs("small, batch 1, eager", "small", 1, "static", 1.4, rounds)


def compiled(rounds: int) -> Iterator[Result]:
    theirs, ours = pair("small")
    model, ids = compile_steps(prepack_weights(ours, 1), options={"size_asserts": False}), prompts(1, "small")
    start = time.perf_counter()
    got = our_tokens(model, ids, "fixed")
    note = f"fixed cache, tokens equal; first text, compiling included, {time.perf_counter() - start:.0f} s"
    require_equal("compiled", their_tokens(theirs, ids), got)
    ways = {"theirs": partial(their_tokens, theirs, ids), "ours": partial(our_tokens, model, ids, "fixed")}
    yield compare("small, batch 1, compiled", interleave(ways, rounds, 0), "theirs", "ours", 1.8, note=note)


def gpt2(rounds: int) -> Iterator[Result]:
    what = "GPT-2, batch 8"
    theirs, ours = pair("GPT-2")
    half = pair("GPT-2", torch.bfloat16)[1]
    ids, cache = prompts(8, "GPT-2"), "chunked"
    plain, half = prepack_weights(ours, 8), prepack_weights(half, 8)
    want = their_tokens(theirs, ids)
    require_equal(what, want, our_tokens(plain, ids, cache))
    ways = {
        "theirs": partial(their_tokens, theirs, ids),
        "float32": partial(our_tokens, plain, ids, cache),
        "bfloat16": partial(our_tokens, half, ids, cache),
    }
    seconds = interleave(ways, rounds, 0)
    yield compare(f"{what}, float32", seconds, "theirs", "float32", 2.0, note="chunked cache, tokens equal")
    note = "chunked cache; against their float32; tokens differ"
    yield compare(f"{what}, bfloat16", seconds, "theirs", "bfloat16", 2.6, note=note)


@torch.no_grad()
def share(rounds: int) -> Iterator[Result]:
    ours = pair("GPT-2")[1]
    model, ids = prepack_weights(ours, 1), prompts(1, "GPT-2")
    # a step reads all matrices once, but one row of the positions; the tied embedding is read as the head
    weight_bytes = 4 * (ours.parameter_count() - ours.positions.weight.numel())
    cache, new = make_cache("static", model, 1, PROMPT + NEW), ids[:, :1]
    model(ids, cache, last_only=True)

    def step() -> None:
        model(new, cache, last_only=True)
        cache.crop(PROMPT)

    head, x = ours.head.weight, torch.randn(ours.config.d_hidden)
    along = head.t().contiguous().t()
    ways = {
        "step": step,
        "gemv": partial(torch.mv, head, x),
        "gemv along outputs": partial(torch.mv, along, x),
    }
    seconds = interleave(ways, rounds, least_s=0.2)
    for name, bar in (("gemv", 0.92), ("gemv along outputs", None)):
        read = [4 * head.numel() / s for s in seconds[name]]
        shares = [weight_bytes / s / peak for s, peak in zip(seconds["step"], read, strict=True)]
        note = f"that reads {sorted(read)[len(read) // 2] / 1e9:.1f} GB/s; a step {weight_bytes / 1e6:.0f} MB"
        yield measure.summarise(f"GPT-2, batch 1, bandwidth ÷ that of a {name}", shares, bar, note=note)


def loop(rounds: int) -> Iterator[Result]:
    ours = pair("small")[1]
    for batch, bar in ((1, 8.0), (8, 24.0)):
        fast, ids = prepack_weights(ours, batch), prompts(batch, "small")
        cache = "static" if batch == 1 else "chunked"
        require_equal("loop", loop_tokens(ours, ids), our_tokens(fast, ids, cache))
        ways = {"loop": partial(loop_tokens, ours, ids), "cached": partial(our_tokens, fast, ids, cache)}
        what = f"small, batch {batch}, cached against nanoGPT's loop"
        yield compare(
            what, interleave(ways, rounds, 0), "loop", "cached", bar, note=f"{cache} cache, tokens equal"
        )


def sdpa_flops(q: tuple, k: tuple, v: tuple, *rest: object, out_shape: object = None, **more: object) -> int:
    """Two products per head; shapes are (batch, heads, queries or keys, width)."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])


SDPA_CPU = {  # what the counter of PyTorch 2.13 leaves out on a CPU
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *shapes, **more: 0,
}


@torch.no_grad()
def step_flops(model: Decoder, ids: Tensor) -> int:
    """Counts the operations of the step of one token behind the given ones."""
    cache = make_cache("static", model, len(ids), ids.shape[1] + 1)
    model(ids, cache)
    with FlopCounterMode(display=False, custom_mapping=SDPA_CPU) as counter:
        model(ids[:, :1], cache, last_only=True)
    return counter.get_total_flops()


def flops(rounds: int) -> Iterator[Result]:
    model = pair("small")[1]
    layers, width, _, _ = SIZES["small"]
    parameters = sum(weight.numel() for weight in model.parameters() if weight.ndim == 2)
    parameters -= model.positions.weight.numel()  # looked up, not multiplied
    for tokens in (65, 256):
        wanted = 2 * parameters + 4 * layers * width * tokens
        counted = step_flops(model, prompts(1, "small").repeat(1, 4)[:, : tokens - 1])
        yield count(f"FLOPs of a step, {tokens} tokens", counted, wanted, "2P + 4·layers·width·tokens")


GROUPS: dict[str, Callable[[int], Iterator[Result]]] = {
    "small": small,
    "compiled": compiled,
    "gpt2": gpt2,
    "share": share,
    "loop": loop,
    "flops": flops,
}


def main() -> None:
    """Runs the chosen groups and prints one table."""
    parser = measure.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    arguments = parser.parse_args()
    measure.one_thread()
    results = [row for group in arguments.only for row in GROUPS[group](arguments.rounds)]
    measure.finish(results, arguments.json)


if __name__ == "__main__":
    main()
