"""What a GPU needs, shown without one: no value is read back, nothing is made in the wrong place, one graph serves all steps."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import course_llm
from autograder import judge
from autograder.spec import Local, run_case
from course_llm.caches import StaticCache
from course_llm.experts import ExpertsConfig
from course_llm.generation import CACHE_KINDS, Sampling, make_cache
from course_llm.layers import LatentConfig
from course_llm.model import Decoder, ModelConfig
from course_llm.training_step import Objective, make_optimizer, training_step

SMALL = dict(vocab=61, d_hidden=32, layers=2, heads=4, d_ff=48, context=64)
EXPERTS = ExpertsConfig(experts=8, per_token=2, d_ff=16, shared=1, scoring="sigmoid", groups=4, best_groups=2)
CONFIGS = {
    "mha": ModelConfig(**SMALL, feed_forward="gelu", norm="layer", positions="learned", biases=True),
    "gqa": ModelConfig(**SMALL, kv_heads=2, qk_norm=True),
    "mqa": ModelConfig(**SMALL, kv_heads=1, positions="sinusoidal", tied=False),
    "window": ModelConfig(**SMALL, kv_heads=2, window=4),
    "mla": ModelConfig(**SMALL, latent=LatentConfig(d_c=12, d_cq=20, rope_dim=4, value_dim=6)),
    "experts": ModelConfig(**SMALL, kv_heads=2, experts=EXPERTS),
}
ROOM = 16


def half(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Numbers large enough that a wrong position or mask shows, in a dtype."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else 0.2 * noise)
    return model.to(dtype).eval()


def some_ids(batch: int, seq: int) -> torch.Tensor:
    return torch.randint(0, 61, (batch, seq), generator=torch.Generator().manual_seed(3))


# -- the meta device: no number can be read, no shape can depend on one -------------------------------


@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_decode_loop_runs_without_numbers(name, kind):
    model = Decoder(CONFIGS[name], device="meta")
    cache = make_cache(kind, model, 2, ROOM)
    rules = Sampling(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01)
    # with experts a prompt as long as this asks which tokens an expert gets: then single tokens from the start
    new = torch.zeros(2, 1 if name == "experts" else 5, dtype=torch.int64, device="meta")
    for _ in range(3):
        logits = model(new, cache, last_only=True)[:, -1]
        new = rules.draw(logits)[:, None]
        assert logits.device.type == new.device.type == "meta"
        assert logits.shape == (2, 61) and new.shape == (2, 1)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "experts"])
def test_training_step_runs_without_numbers(name):
    model = Decoder(CONFIGS[name], device="meta")
    objective = Objective(model, label_smoothing=0.1, z_loss=1e-4)
    ids = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    assert objective(ids, ids, document_ids=ids).device.type == "meta"
    optimizer = make_optimizer(model, 1e-3, fused=False)  # the fused kernel has no form without numbers
    loss, norm = training_step(objective, model.parameters(), optimizer, [(ids, ids)] * 2, clip=1.0)
    assert loss.device.type == norm.device.type == "meta" and loss.shape == norm.shape == ()
    assert all(state["exp_avg"].is_meta for state in optimizer.state.values())


# -- factories say where ------------------------------------------------------------------------------


class ToldWhere(TorchFunctionMode):
    """Refuses functions of the package that make a tensor without being told where.

    Functions that take no tensor (a mask from its size alone) have no place to take over and are let through.
    """

    FACTORIES = (
        *(
            torch.zeros,
            torch.ones,
            torch.empty,
            torch.full,
            torch.arange,
            torch.tensor,
            torch.randn,
            torch.rand,
        ),
        *(torch.randint, torch.randperm, torch.eye, torch.linspace, torch.tril_indices, torch.triu_indices),
    )
    PLACELESS = ("causal_mask", "sinusoidal_positions", "causal_mask_with_past", "sliding_window_mask")
    PLACELESS += ("prefix_lm_mask", "_causal", "pack", "<genexpr>", "random_decoder")

    def __init__(self) -> None:
        super().__init__()
        self.package = str(Path(course_llm.__file__).parent)
        self.seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        caller = sys._getframe(1).f_code
        if func in self.FACTORIES and caller.co_filename.startswith(self.package):
            self.seen += 1
            if "device" not in kwargs and caller.co_name not in self.PLACELESS:
                raise AssertionError(f"{caller.co_name} makes a tensor by {func.__name__} without device=")
        return func(*args, **kwargs)


class Watched(Local):
    """Performs the steps of a case under `ToldWhere`."""

    def __init__(self, namespace, mode):
        super().__init__(namespace)
        self.mode = mode

    def perform(self, *args, **options):
        with self.mode:
            return super().perform(*args, **options)


@pytest.mark.parametrize(
    "stem", ["attention", "decoding", "masking", "loss", "pretraining", "kv_cache", "mla"]
)
def test_chapters_functions_make_tensors_where_their_arguments_are(stem):
    """The first cases of every exercise, through the reference: none is made without a place."""
    mode = ToldWhere()
    for exercise in judge.exercises(stem).values():
        for group in exercise.groups:
            for case in itertools.islice(group.cases(judge_gen(exercise, group)), 2):
                run = run_case(case, exercise, Watched(exercise.reference_names(), mode), None)
                assert run.complaint is None, (exercise.name, group.name, run.complaint)
                for outcome in run.transcript:
                    assert "without device=" not in str(outcome.error), (exercise.name, outcome.error)
    assert mode.seen > 0 or stem == "loss"  # the loss makes none: its tensors come from others


def judge_gen(exercise, group):
    """The generator of a group's cases."""
    from autograder.spec import Gen

    return Gen(judge.PUBLIC_SEED + len(exercise.name) + len(group.name))


@pytest.mark.parametrize("name", CONFIGS)
def test_training_step_makes_tensors_where_the_model_is(name):
    model = Decoder(CONFIGS[name])
    ids = some_ids(2, 8)
    optimizer = make_optimizer(model, 1e-3)
    mode = ToldWhere()
    with mode:
        objective = Objective(model, torch.bfloat16, label_smoothing=0.1, z_loss=1e-4)
        objective(ids, ids, document_ids=ids)
        training_step(objective, model.parameters(), optimizer, [(ids, ids)], clip=1.0)
    assert mode.seen > 0


# -- every dtype --------------------------------------------------------------------------------------

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 0.15}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_every_cache_in_every_dtype(name, dtype):
    model = half(Decoder(CONFIGS[name]), dtype)
    ids = some_ids(2, 9)
    want = model(ids)
    assert want.dtype == dtype and want.isfinite().all()
    for kind in CACHE_KINDS:
        cache = make_cache(kind, model, 2, ROOM)
        got = torch.cat([model(chunk, cache) for chunk in ids.split([4, 1, 1, 3], dim=1)], dim=1)
        assert got.dtype == dtype
        # a few roundings per layer, in another order; the int8 cache rounds to 1/127 of the largest entry
        tolerance = max(TOLERANCE[dtype], 0.05) if kind == "int8" else TOLERANCE[dtype]
        if name == "experts" and dtype != torch.float64:
            continue  # a rounding may choose another expert
        assert (got - want).abs().max() <= tolerance * want.abs().max(), kind


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_training_step_in_every_dtype_is_near_float64(dtype):
    exact, model = half(Decoder(CONFIGS["gqa"]), torch.float64), half(Decoder(CONFIGS["gqa"]), dtype)
    ids = some_ids(2, 9)
    losses = [Objective(each)(ids[:, :-1], ids[:, 1:]) for each in (exact, model)]
    for loss in losses:
        loss.backward()
    assert losses[1].dtype == dtype
    torch.testing.assert_close(losses[1].double(), losses[0], rtol=TOLERANCE[dtype], atol=0)
    want, got = exact.embedding.weight.grad, model.embedding.weight.grad
    assert got.dtype == dtype
    limit = max(TOLERANCE[dtype], 1e-4 if dtype == torch.float32 else 0) * 2
    assert (got - want).abs().max() <= limit * want.abs().max()


# -- a captured graph: addresses and shapes stay, the position is a tensor ----------------------------


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_fixed_cache_keeps_its_addresses_and_takes_its_position_from_a_tensor(name):
    model = half(Decoder(CONFIGS[name]), torch.float64)
    cache = StaticCache(CONFIGS[name], 2, ROOM, torch.float64, fixed=True)
    held = (*cache.keys, *cache.values, cache.length)
    addresses = [tensor.data_ptr() for tensor in held]
    ids = some_ids(2, 8)
    want = model(ids)
    model(ids[:, :5], cache)
    assert isinstance(cache.length, torch.Tensor) and cache.length.shape == ()
    cache.length.fill_(3)  # as a replayed graph would find it: the same step at another place
    for place in range(3, 8):
        got = model(ids[:, place : place + 1], cache)
        torch.testing.assert_close(got[:, 0], want[:, place], rtol=0, atol=1e-11)
    cache.reset()
    model(ids[:, :5], cache)
    cache.crop(2)
    torch.testing.assert_close(model(ids[:, 2:4], cache), want[:, 2:4], rtol=0, atol=1e-11)
    assert addresses == [tensor.data_ptr() for tensor in (*cache.keys, *cache.values, cache.length)]


# -- torch.compile ------------------------------------------------------------------------------------

# in processes of their own: the run-time type checks of the tests are not made to be traced
PREAMBLE = """
import torch
from torch._dynamo.utils import counters
from course_llm.caches import StaticCache
from course_llm.experts import ExpertsConfig
from course_llm.generation import Sampling
from course_llm.layers import LatentConfig
from course_llm.model import Decoder, ModelConfig
from course_llm.training_step import Objective
torch.set_num_threads(1)
sizes = dict(vocab=61, d_hidden=32, layers=2, heads=4, d_ff=48, context=64)
configs = {
    "mha": ModelConfig(**sizes, feed_forward="gelu", norm="layer", positions="learned", biases=True),
    "mqa": ModelConfig(**sizes, kv_heads=1, positions="sinusoidal", tied=False),
    "window": ModelConfig(**sizes, kv_heads=2, window=4, qk_norm=True),
    "mla": ModelConfig(**sizes, latent=LatentConfig(12, 20, 4, 6)),
    "experts": ModelConfig(**sizes, kv_heads=2, experts=ExpertsConfig(8, 2, 16, shared=1)),
}
ids = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(3))
"""
DECODE = """
for name, config in configs.items():
    torch._dynamo.reset()
    counters.clear()
    model = Decoder(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 * (parameter.ndim == 1), 0.2)
    cache = StaticCache(config, 2, 16, fixed=True)
    real = torch.ones(2, 16, dtype=torch.bool)
    real[0, :2] = False
    rules = Sampling(temperature=0.7, top_k=9, top_p=0.9)
    def step(new):
        logits = model(new, cache, real, last_only=True)[:, -1]
        return logits, rules.draw(logits)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        model(ids[:, :4], cache, real)
        for place in range(4, 12):
            logits, drawn = compiled(ids[:, place : place + 1])
            assert drawn.shape == (2,)
            want = model(ids[:, : place + 1], real=real[:, : place + 1])[:, -1]
            torch.testing.assert_close(logits, want, rtol=1e-3, atol=1e-4)
    print(name, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
"""
TRAIN = """
del configs["experts"]  # which tokens an expert gets is data: no fixed graph
for name, config in configs.items():
    torch._dynamo.reset()
    counters.clear()
    model = Decoder(config)
    objective = Objective(model, label_smoothing=0.1, z_loss=1e-4)
    want = objective(ids[:, :-1], ids[:, 1:])
    grads = torch.autograd.grad(want, list(model.parameters()))
    compiled = torch.compile(objective, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        loss = compiled(ids[:, :-1], ids[:, 1:])
        for got, grad in zip(torch.autograd.grad(loss, list(model.parameters())), grads, strict=True):
            torch.testing.assert_close(got, grad, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(loss, want)
    print(name, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
"""


@pytest.mark.parametrize(("code", "kinds"), [(DECODE, 5), (TRAIN, 4)], ids=["decode", "train"])
def test_one_graph_without_a_break(code, kinds):
    """Every kind of attention, with padding and with sampling in the graph: one compilation for all steps."""
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code], capture_output=True, text=True, timeout=500
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == kinds, done.stderr[-3000:]
    assert all(graphs == "1" and breaks == "0" for _, graphs, breaks in rows), rows
