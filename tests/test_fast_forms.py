"""Facts about the fast forms: each gives what its plain twin gives, and says when it may be used."""

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import measure
from benchmarks.decode import step_flops
from course_llm.caches import ChunkedCache, StaticCache
from course_llm.decoding import top_p_filter
from course_llm.experts import ExpertsConfig
from course_llm.generation import Sampling, generate
from course_llm.latent_layer import dot_products
from course_llm.layers import (
    PRODUCTS_FROM,
    LatentConfig,
    Linear,
    Step,
    attend,
    attend_by_products,
    products_are_faster,
    seen_weights,
)
from course_llm.model import Decoder, ModelConfig
from course_llm.nucleus import top_p_by_values
from course_llm.prepack import BlockedLinear, along_outputs, has_blocks, prepack_weights

SMALL = dict(vocab=61, d_hidden=32, layers=2, heads=4, d_ff=48, context=64)
CONFIGS = {
    "gqa": ModelConfig(**SMALL, kv_heads=2),
    "learned": ModelConfig(**SMALL, positions="learned", norm="layer", feed_forward="gelu", biases=True),
    "mla": ModelConfig(**SMALL, latent=LatentConfig(d_c=12, rope_dim=4, value_dim=6)),
    "experts": ModelConfig(**SMALL, tied=False, experts=ExpertsConfig(experts=4, per_token=2, d_ff=16)),
}
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == want.dtype == dtype and got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


# -- weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_layouts_change_no_result(bias, dtype):
    linear = Linear(24, 40, bias=bias)
    for parameter in linear.parameters():
        parameter.copy_(randn(*parameter.shape))
    linear = linear.to(dtype)
    for rows in (1, 3, 17):
        x = randn(rows, 2, 24, dtype=dtype)
        if has_blocks(dtype):
            near(BlockedLinear(linear, 16)(x), linear(x), dtype)
        near(along_outputs(linear)(x), linear(x), dtype)
    assert along_outputs(linear).weight.stride() == (1, 40) and linear.weight.stride() == (24, 1)
    assert torch.equal(along_outputs(linear).weight, linear.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_prepacked_models_give_the_same_logits(name, batch, dtype):
    model = Decoder(CONFIGS[name]).to(dtype).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fast = prepack_weights(model, batch)
    ids = torch.arange(7 * batch).reshape(batch, 7) % 61
    near(fast(ids), model(ids), dtype)
    caches = [StaticCache(m.config, batch, 8, dtype) for m in (model, fast)]
    for chunk in ids.split([4, 1, 2], dim=1):
        near(fast(chunk, caches[1]), model(chunk, caches[0]), dtype)
    assert fast.embedding.weight is model.embedding.weight
    assert fast.parameter_count() == model.parameter_count()
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert all(type(module) is not BlockedLinear for module in model.modules())


def test_prepacking_knows_where_it_helps():
    model = Decoder(CONFIGS["gqa"])
    blocked = [type(m) is BlockedLinear for m in prepack_weights(model, 2).modules()]
    assert sum(blocked) == 2 * 4 + 1  # qkv, out, up, down of each layer, and the head
    one = prepack_weights(model, 1)
    assert one.head.weight.stride() == (1, 61) and one.blocks[0].feed_forward.down.weight.stride() == (48, 1)
    double = prepack_weights(model.double(), 2)
    assert type(double.head) is Linear
    absorbed = prepack_weights(Decoder(CONFIGS["mla"]), 2).blocks[0].attention
    assert type(absorbed.kv_up) is Linear and type(absorbed.out) is BlockedLinear
    far = prepack_weights(Decoder(CONFIGS["gqa"], device="meta"), 2)
    assert type(far.head) is Linear
    with pytest.raises(ValueError, match="batch=0"):
        prepack_weights(model, 0)


# -- attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [1, 4])
def test_attention_by_products_is_torchs(groups, dtype):
    rows, k, v = (randn(2, 3, n, d, seed=n, dtype=dtype) for n, d in ((groups, 8), (11, 8), (12, 5)))
    v = v[:, :, :11].contiguous()
    mask = torch.rand(2, 1, 1, 11, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[1] = False  # a row of padding sees nothing and comes out as 0
    for seen in (None, mask):
        want = F.scaled_dot_product_attention(rows, k, v, seen, scale=0.3)
        near(attend_by_products(rows, k, v, seen, 0.3), want, dtype)
    assert not attend_by_products(rows, k, v, mask, 0.3)[1].any()


def test_attend_takes_products_when_they_are_faster():
    wide = PRODUCTS_FROM // (2 * 64)
    q, k, v = randn(1, 8, 1, 64), randn(1, 2, wide, 64, seed=1), randn(1, 2, wide, 64, seed=2)
    small, gaps = k[:, :, : wide // 2].contiguous(), randn(1, 2, 2 * wide, 64)[:, :, :wide]
    assert products_are_faster(k, v) and products_are_faster(small.bfloat16(), small.bfloat16())
    assert not products_are_faster(small, small) and not products_are_faster(gaps, v)
    want = F.scaled_dot_product_attention(
        q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), scale=0.125
    )
    for keys, values in ((k, v), (gaps.copy_(k), v)):
        got = attend(q, keys, values, Step(causal=False), 0.125)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    with FlopCounterMode(display=False) as counter:
        attend(q, k, v, Step(causal=False), 0.125)
    assert counter.get_total_flops() == 4 * 8 * wide * 64  # nothing is repeated


def test_weights_of_hidden_keys_are_zero():
    scores = torch.tensor([[0.0, 5.0, 0.0], [1.0, 2.0, 3.0]])
    got = seen_weights(scores, torch.tensor([[True, False, True], [False, False, False]]))
    assert got.tolist() == [[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]
    assert torch.equal(seen_weights(scores, None), scores.softmax(-1))


@pytest.mark.parametrize("keys", [5, 12, 13, 16])
def test_products_in_parts_are_whole_products(keys):
    rows, held = randn(2, 3, 8, dtype=torch.float64), randn(2, keys, 8, seed=1, dtype=torch.float64)
    near(dot_products(rows, held, part=3), rows @ held.mT, torch.float64)


def test_chunked_cache_grows_by_chunks_without_gaps():
    config = CONFIGS["gqa"]
    cache = ChunkedCache(config, 2, chunk=4)
    for layer in range(2):
        k = randn(2, 2, 5, 8, seed=layer)
        assert cache.update(layer, k, k)[0] is k  # the first time there is nothing else to attend to
    cache.advance(5)
    assert cache.keys[0].shape[2] == 8 and not cache.sees_all(None)
    for tokens in (6, 7, 8):
        new = randn(2, 2, 1, 8, seed=9)
        assert cache.sees_all(None) == (tokens == 8)
        for layer in range(2):
            keys, values = cache.update(layer, new, new)
            assert (
                keys.shape[2] == 8
                and keys.is_contiguous()
                and torch.equal(values[:, :, tokens - 1], new[:, :, 0])
            )
        cache.advance(1)
    cache.crop(2)
    assert cache.length == 2 and cache.keys[1].shape[2] == 8  # memory stays, what is in it is hidden
    with pytest.raises(ValueError, match="chunk=0"):
        ChunkedCache(config, 2, chunk=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fast_generation_writes_the_same_text(dtype):
    """Long enough to take new chunks, prompts of unequal length."""
    model = Decoder(CONFIGS["gqa"]).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim == 2 else 1)
    prompts = [[5, 9, 2], list(range(1, 60))]
    want = generate(model.float(), prompts, 80)
    got = generate(prepack_weights(model.to(dtype), 2), prompts, 80, cache="chunked")
    if dtype == torch.float32:
        assert got == want
    else:  # bfloat16 turns near ties: it starts with the same tokens
        assert [row[:1] for row in got] == [row[:1] for row in want] and len(got[0]) == 80


# -- sampling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.01, 0.5, 0.9, 1.0])
def test_top_p_by_values_is_top_p(p, dtype):
    for scale in (0.0, 0.1, 3.0):  # 0: all tokens are equal
        probs = (scale * randn(2, 5, 200, dtype=dtype)).softmax(-1)
        assert torch.equal(top_p_by_values(probs, p), top_p_filter(probs, p))
    tied = torch.tensor([[0.1, 0.3, 0.1, 0.3, 0.2]], dtype=dtype)
    assert torch.equal(top_p_by_values(tied, p), top_p_filter(tied, p))
    peak = torch.tensor([0.0, 1.0, 0.0], dtype=dtype)
    assert torch.equal(top_p_by_values(peak, p), top_p_filter(peak, p))


def test_top_p_by_values_refuses_nonsense():
    for p in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"p={p}"):
            top_p_by_values(torch.ones(3) / 3, p)


def test_only_rows_that_need_it_draw_from_the_whole_vocabulary():
    """A peaked row beside a flat one: both follow `distribution`, each from its own support."""
    logits = torch.zeros(2, 400)
    logits[0, 7:10] = torch.tensor([9.0, 8.0, 7.0])
    rules = Sampling(top_p=0.9, min_p=0.1)
    want = rules.distribution(logits)
    drawn = rules.draw_fast(logits.repeat(20_000, 1), torch.Generator().manual_seed(3), among=16)
    for row, counts in enumerate((drawn[0::2].bincount(minlength=400), drawn[1::2].bincount(minlength=400))):
        share = counts / 20_000
        assert not counts[want[row] == 0].any()
        deviation = (want[row] * (1 - want[row]) / 20_000).sqrt()
        assert ((share - want[row]).abs() <= 5 * deviation + 1e-9).all()


# -- compiling, measuring -----------------------------------------------------------------------------

COMPILED = """
import json, torch
from course_llm.compiled_steps import compile_steps
from course_llm.generation import generate
from course_llm.model import Decoder, ModelConfig
from course_llm.prepack import prepack_weights
model = Decoder(ModelConfig(vocab=61, d_hidden=32, layers=2, heads=4, d_ff=48, context=64))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.mul_(6 if parameter.ndim == 2 else 1)
graphs = []
def backend(graph, inputs):
    graphs.append(len(inputs))
    return graph.forward
fast = compile_steps(prepack_weights(model, 1), backend=backend)
found = []
for kind in ("fixed", "static"):
    found.append(generate(fast, [[3, 1, 4]], 9, cache=kind) == generate(model, [[3, 1, 4]], 9))
    found.append(len(graphs))
print(json.dumps(found))
"""


def test_steps_are_compiled_once_and_prompts_are_not():
    # in a process of its own: the run-time type checks of the tests are not made to be traced
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=300)
    assert done.stdout and json.loads(done.stdout) == [True, 1, True, 1], done.stderr[-2000:]


def test_benchmarks_take_turns_and_compare_round_by_round(tmp_path):
    order = []
    ways = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    seconds = measure.interleave(ways, rounds=3, warm_up=0)
    assert order == ["a", "b", "b", "a", "a", "b"] and all(len(found) == 3 for found in seconds.values())
    result = measure.compare("x", {"a": [2.0, 9.0, 4.0], "b": [1.0, 3.0, 1.0]}, "a", "b", bar=3.0)
    assert (result.median, result.least, result.greatest, result.reached) == (3.0, 2.0, 4.0, True)
    assert measure.summarise("x", [2.0], 1.0, below=True).reached is False
    with pytest.raises(AssertionError, match="counted 3, wanted 4"):
        measure.count("elements", 3, 4)
    measure.finish([result], tmp_path / "x.json")
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["results"][0]["median"] == 3.0 and written["environment"]["torch"] == torch.__version__


@pytest.mark.parametrize("tokens", [2, 9])
def test_a_cached_step_costs_two_per_parameter_and_four_per_key(tokens):
    """2P + 4·layers·width·tokens FLOPs (P: entries of the matrices), as the benchmark counts them."""
    model = Decoder(CONFIGS["learned"])
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2) - model.positions.weight.numel()
    counted = step_flops(model, torch.arange(tokens - 1)[None])
    assert counted == 2 * matrices + 4 * 2 * 32 * tokens
