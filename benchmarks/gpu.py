"""All figures of a GPU in one run of under five minutes.

    python -m benchmarks.gpu [--json FILE]
    python -m benchmarks.gpu --device cpu --tiny    # the same code, small, where there is no GPU

Decoding is compared with the memory's bandwidth and training with the matrix product's peak; both are measured in the same
run. Nothing is compared with other libraries here: `benchmarks/training.py` and its neighbours do that on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import environment
from course_llm.caches import StaticCache
from course_llm.generation import Sampling, make_cache
from course_llm.latent_layer import LatentAttention
from course_llm.layers import LatentConfig, Step, attend
from course_llm.loss import chunked_cross_entropy
from course_llm.model import Decoder, ModelConfig
from course_llm.regularized_loss import training_cross_entropy
from course_llm.training_reports import step_flops
from course_llm.training_step import Objective, make_optimizer, training_step

GROUP = 4  # query heads that share keys


@dataclass(frozen=True)
class Figure:
    """One line of the output.

    Attributes:
        measure: what was measured.
        value: median over the repeats.
        unit: of the value.
        note: what the number needs to be understood.
    """

    measure: str
    value: float
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Sizes:
    """How large everything is; `tiny` keeps the code and shrinks the numbers."""

    served: ModelConfig
    trained: ModelConfig
    prompt: int = 128
    new: int = 128
    prefill: tuple[int, int] = (4, 2048)
    batches: tuple[int, ...] = (1, 8, 64)
    contexts: tuple[int, ...] = (1024, 4096, 16384)
    latent: ModelConfig | None = None
    logits: tuple[int, int] = (64, 50257)
    rows: int = 16
    loss: tuple[int, int] = (16384, 768)
    square: int = 8192
    buffer_bytes: int = 2**31
    repeats: int = 10


LARGE = Sizes(
    served=ModelConfig(32000, 2048, 16, 16, 5632, 4096, kv_heads=4),  # about a billion parameters
    trained=ModelConfig(50304, 768, 12, 12, 3072, 1024, feed_forward="gelu_tanh", norm="layer", biases=True),
    latent=ModelConfig(32000, 2048, 1, 16, 1, 32768, head_dim=128, latent=LatentConfig(512, None, 64, 128)),
)
TINY = Sizes(
    served=ModelConfig(61, 32, 2, 4, 48, 64, kv_heads=2),
    trained=ModelConfig(61, 32, 2, 4, 48, 16, feed_forward="gelu_tanh", norm="layer", biases=True),
    prompt=4,
    new=4,
    prefill=(2, 8),
    batches=(1, 2),
    contexts=(8, 16),
    latent=ModelConfig(61, 32, 1, 4, 1, 64, head_dim=8, latent=LatentConfig(16, None, 4, 8)),
    logits=(4, 997),
    rows=2,
    loss=(32, 16),
    square=64,
    buffer_bytes=2**16,
    repeats=2,
)


class Bench:
    """Measures on one device; every method that yields figures is one section.

    Args:
        device: "cuda" or, to try the code, "cpu".
        sizes: `LARGE` or `TINY`.
        compile: also measure what `torch.compile` makes of decoding and training.
    """

    def __init__(self, device: str, sizes: Sizes, compile: bool = True) -> None:
        self.device, self.sizes, self.compile = torch.device(device), sizes, compile
        self.cuda = self.device.type == "cuda"
        self.generator = torch.Generator(self.device).manual_seed(0)

    # -- tools ------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Waits until the device has done all that was asked of it."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], times: int = 1) -> float:
        """Returns the seconds of one call: the median of a few runs of `times` calls each, after a warm-up."""
        run(), run()
        found = []
        for _ in range(self.sizes.repeats):
            self.wait()
            start = time.perf_counter()
            for _ in range(times):
                run()
            self.wait()
            found.append((time.perf_counter() - start) / times)
        return statistics.median(found)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def ids(self, batch: int, seq: int, vocab: int) -> Tensor:
        return torch.randint(0, vocab, (batch, seq), generator=self.generator, device=self.device)

    def allocated(self) -> int:
        """Bytes that torch holds on the device; 0 where that is not counted."""
        gc.collect()
        return torch.cuda.memory_allocated(self.device) if self.cuda else 0

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Most bytes held at a time during a call, above those held before; 0 where that is not counted."""
        if not self.cuda:
            run()
            return 0
        before = self.allocated()
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        return torch.cuda.max_memory_allocated(self.device) - before

    def capture(self, step: Callable[[], Any]) -> Callable[[], object]:
        """Records a step as a CUDA graph and returns what replays it; on a CPU the step itself.

        The step reads and writes tensors whose addresses stay; it has been run before, so that all lazy work is done.
        """
        if not self.cuda:
            return step
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    # -- sections ---------------------------------------------------------------------------------

    def ceilings(self) -> Iterator[Figure]:
        """Measures what the machine can do at best: bytes per second and FLOPs per second."""
        source = torch.empty(self.sizes.buffer_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        copied = 2 * self.sizes.buffer_bytes / self.seconds(lambda: target.copy_(source))
        n = self.sizes.square
        matrix, vector = self.randn(n, n), self.randn(n, 1)
        read = 2 * n * n / self.seconds(lambda: matrix @ vector, 20)
        self.bandwidth = max(copied, read)
        self.peak = 2 * n**3 / self.seconds(lambda: matrix @ matrix)
        yield Figure("memory bandwidth, copy", copied / 1e9, "GB/s")
        yield Figure(
            "memory bandwidth, one matrix times a vector", read / 1e9, "GB/s", f"bfloat16, {n} × {n}"
        )
        yield Figure("matrix product", self.peak / 1e12, "TFLOP/s", f"bfloat16, {n}³")

    @torch.no_grad()
    def decoding(self) -> Iterator[Figure]:
        """Decodes greedily with the static cache: step by step, as a CUDA graph, compiled."""
        sizes, config = self.sizes, self.sizes.served
        model = Decoder(config, seed=None, device=self.device).to(torch.bfloat16).eval()
        for parameter in model.parameters():
            parameter.normal_(0, 0.02, generator=self.generator)
        weight_bytes = 2 * model.parameter_count()
        for batch in sizes.batches:
            room = sizes.prompt + sizes.new + 8  # a captured step is tried a few times first
            cache = StaticCache(config, batch, room, torch.bfloat16, self.device, fixed=True)
            prompt = self.ids(batch, sizes.prompt, config.vocab)
            new = prompt[:, -1:].clone()

            def step(cache: StaticCache = cache, new: Tensor = new) -> None:
                logits = model(new, cache, last_only=True)[:, -1]
                new.copy_(logits.argmax(-1, keepdim=True))

            model(prompt, cache, last_only=True)
            step()
            ways = {"eager": step, "captured": self.capture(step)}
            if self.compile and batch == sizes.batches[0]:
                for tensor in (*cache.keys, *cache.values, cache.length, new):
                    torch._dynamo.mark_static_address(tensor)  # or the graph would not be captured
                mode = "reduce-overhead" if self.cuda else None
                ways["compiled"] = torch.compile(step, fullgraph=True, dynamic=False, mode=mode)
            for name, run in ways.items():

                def text(run: Callable[[], object] = run, cache: StaticCache = cache) -> None:
                    cache.crop(sizes.prompt)
                    for _ in range(sizes.new):
                        run()

                second = self.seconds(text) / sizes.new
                share = weight_bytes / second / self.bandwidth
                note = f"weights read: {share:.0%} of the bandwidth"
                yield Figure(f"decoding, batch {batch}, {name}", batch / second, "tokens/s", note)
        rows, length = sizes.prefill
        prompt = self.ids(rows, length, config.vocab)
        cache = StaticCache(config, rows, length, torch.bfloat16, self.device)

        def prefill() -> None:
            cache.reset()
            model(prompt, cache, last_only=True)

        second = self.seconds(prefill)
        # a third of a training step, without the output matrix, which only the last rows meet
        flops = step_flops(dataclasses.replace(config, context=length), model, rows * length) / 3
        flops -= 2 * rows * (length - 1) * config.vocab * config.d_hidden
        share = f"{flops / second / self.peak:.0%} of the matrix product's peak"
        yield Figure(f"prefill, {rows} × {length} tokens", rows * length / second, "tokens/s", share)

    @torch.no_grad()
    def attention(self) -> Iterator[Figure]:
        """Compares one step of latent attention in both forms, and grouped queries with repeated keys."""
        config = self.sizes.latent
        layer = LatentAttention(config, 0, self.device)
        for parameter in layer.parameters():
            parameter.normal_(0, 0.02, generator=self.generator)
        layer = layer.to(torch.bfloat16)
        sizes = config.latent
        for context in self.sizes.contexts:
            q_c = self.randn(1, config.heads, 1, layer.d_h)
            q_r = self.randn(1, config.heads, 1, sizes.rope_dim)
            c, k_r = self.randn(1, 1, context, sizes.d_c), self.randn(1, 1, context, sizes.rope_dim)
            step = Step(causal=False)
            absorbed = self.seconds(lambda a=(q_c, q_r, c, k_r, step): layer.absorbed(*a), 10)
            expanded = self.seconds(lambda a=(q_c, q_r, c, k_r, step): layer.expanded(*a), 10)
            note = f"{expanded / absorbed:.1f} times faster than expanded"
            yield Figure(f"latent attention, one step at {context} tokens", 1e6 * absorbed, "µs", note)
            heads, width = config.heads, config.d_head
            q = self.randn(8, heads, 1, width)
            k, v = (
                self.randn(8, heads // GROUP, context, width),
                self.randn(8, heads // GROUP, context, width),
            )
            grouped = self.seconds(lambda a=(q, k, v, step): attend(*a, 1.0), 10)
            repeated = self.seconds(
                lambda q=q, k=k, v=v: F.scaled_dot_product_attention(
                    q, k.repeat_interleave(GROUP, 1), v.repeat_interleave(GROUP, 1)
                ),
                10,
            )
            note = f"{repeated / grouped:.1f} times faster than repeated keys"
            yield Figure(
                f"grouped queries, one step of 8 rows at {context} tokens", 1e6 * grouped, "µs", note
            )

    @torch.no_grad()
    def samplers(self) -> Iterator[Figure]:
        """Times drawing one token per row from peaked and flat logits."""
        rows, vocab = self.sizes.logits
        for name, scale in (("peaked", 5.0), ("flat", 0.3)):
            logits = scale * self.randn(rows, vocab, dtype=torch.float32)
            rules = {"T, top-k, top-p": Sampling(temperature=0.8, top_k=50, top_p=0.9)}
            rules["top-p"] = Sampling(top_p=0.9)
            for words, rule in rules.items():
                plain = self.seconds(lambda r=rule, x=logits: r.draw(x, self.generator))
                fast = self.seconds(lambda r=rule, x=logits: r.draw_fast(x, self.generator))
                note = f"{plain / fast:.1f} times faster than over the whole vocabulary"
                yield Figure(f"sampling, {words}, {name}, {rows} × {vocab}", 1e6 * fast, "µs", note)

    def training(self) -> Iterator[Figure]:
        """Times whole training steps in bfloat16, eager and compiled."""
        config, rows = self.sizes.trained, self.sizes.rows
        ids = self.ids(rows, config.context + 1, config.vocab)
        batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        for name in ("eager", "compiled") if self.compile else ("eager",):
            model = Decoder(config, device=self.device)
            objective = Objective(model, torch.bfloat16)
            run = torch.compile(objective) if name == "compiled" else objective
            optimizer = make_optimizer(model, 1e-4)

            def step(run: Any = run, model: Decoder = model, optimizer: Any = optimizer) -> None:
                training_step(run, model.parameters(), optimizer, [batch], 1.0)

            second = self.seconds(step)
            tokens = rows * config.context
            share = step_flops(config, model, tokens) / second / self.peak
            note = f"{share:.0%} of the matrix product's peak; {rows} × {config.context} tokens"
            held = self.peak_bytes(step) / 1e9
            yield Figure(f"training step, bfloat16, {name}", tokens / second, "tokens/s", note)
            if self.cuda:
                yield Figure(f"training step, {name}: memory above weights and optimizer", held, "GB")

    def losses(self) -> Iterator[Figure]:
        """Compares time and memory of the cross-entropy: all logits at once, in chunks, gradient ahead."""
        (n, width), vocab = self.sizes.loss, self.sizes.trained.vocab
        hidden, weight = (
            self.randn(n, width).requires_grad_(),
            (0.02 * self.randn(vocab, width)).requires_grad_(),
        )
        targets = self.ids(1, n, vocab)[0]
        forms = {
            "plain": lambda: F.cross_entropy((hidden @ weight.T).float(), targets),
            "chunked": lambda: chunked_cross_entropy(hidden, weight.T, targets, max(n // 16, 1)),
            "gradient ahead": lambda: training_cross_entropy(hidden, weight.T, targets),
        }
        for name, form in forms.items():

            def run(form: Callable[[], Tensor] = form) -> None:
                hidden.grad = weight.grad = None
                form().backward()

            second, held = self.seconds(run), self.peak_bytes(run)
            note = f"{held / 1e9:.2f} GB at the peak" if self.cuda else ""
            yield Figure(f"cross-entropy, {name}, {n} × {vocab}", 1e3 * second, "ms", note)

    def caches(self) -> Iterator[Figure]:
        """Measures the memory of every cache and compares it with its own count of bytes."""
        models = {"GQA": self.sizes.served, "latent": self.sizes.latent}
        for words, config in models.items():
            model = Decoder(config, device="meta")
            for kind in ("static", "fixed", "rolling", "int8", "paged"):
                before = self.allocated()
                cache = make_cache(kind, model, 8, 1024, torch.bfloat16, self.device)
                measured = self.allocated() - before if self.cuda else cache.cache_bytes
                note = f"its formula says {cache.cache_bytes / 1e6:.3f}"
                yield Figure(f"cache, {words}, {kind}, 8 × 1024 tokens", measured / 1e6, "MB", note)
                del cache

    def run(self) -> Iterator[Figure]:
        """Yields all figures, section after section."""
        sections = (self.ceilings, self.decoding, self.attention, self.samplers)
        for section in (*sections, self.training, self.losses, self.caches):
            yield from section()
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a line per figure and returns the exit status."""
    parser = argparse.ArgumentParser("benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the code")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        words = "no CUDA device here; --device cpu --tiny tries the same code without one"
        print(f"benchmarks.gpu: {words}", file=sys.stderr)
        return 1
    bench = Bench(arguments.device, TINY if arguments.tiny else LARGE, not arguments.no_compile)
    where = environment()
    if bench.cuda:
        where["gpu"] = torch.cuda.get_device_name(bench.device)
        where["cuda"] = torch.version.cuda
    start, figures = time.perf_counter(), []
    for figure in bench.run():
        figures.append(figure)
        print(
            f"{figure.measure:<62} {figure.value:>12,.4g} {figure.unit:<9} {figure.note}".rstrip(), flush=True
        )
    where["elapsed_s"] = round(time.perf_counter() - start, 1)
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    if arguments.json is not None:
        rows = [dataclasses.asdict(figure) for figure in figures]
        arguments.json.write_text(json.dumps({"environment": where, "figures": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
