"""Independent facts about the reference of the chapter on multi-head latent attention."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from course_llm import corpus, mla
from course_llm.attention import apply_rope
from course_llm.weights import MLAWeights

HALF_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape, g=None, dtype=torch.float64):
    return torch.randn(*shape, generator=g or seeded(), dtype=torch.float64).to(dtype)


def mla_weights(d=12, heads=3, d_h=4, d_r=2, d_c=5, seed=0, dtype=torch.float64) -> MLAWeights:
    g = seeded(seed)
    shapes = {
        "w_q": (d, heads * d_h),
        "w_qr": (d, heads * d_r),
        "w_dkv": (d, d_c),
        "w_kr": (d, d_r),
        "w_uk": (d_c, heads * d_h),
        "w_uv": (d_c, heads * d_h),
        "w_o": (heads * d_h, d),
    }
    matrices = {name: randn(*shape, g=g, dtype=dtype) / shape[0] ** 0.5 for name, shape in shapes.items()}
    return MLAWeights(**matrices, heads=heads)


def multi_head_twin(h: torch.Tensor, w: MLAWeights) -> torch.Tensor:
    """The same layer by torch's own attention: per head, keys of width d_h + d_r, values of width d_h."""
    d_h, d_r = w.w_uk.shape[1] // w.heads, w.w_kr.shape[1]
    positions, c, out = torch.arange(h.shape[1]), h @ w.w_dkv, []
    for i in range(w.heads):
        content, rotary = slice(i * d_h, (i + 1) * d_h), slice(i * d_r, (i + 1) * d_r)
        q = torch.cat([h @ w.w_q[:, content], apply_rope(h @ w.w_qr[:, rotary], positions)], dim=-1)
        k = torch.cat([c @ w.w_uk[:, content], apply_rope(h @ w.w_kr, positions)], dim=-1)
        out.append(F.scaled_dot_product_attention(q, k, c @ w.w_uv[:, content], is_causal=True))
    return torch.cat(out, dim=-1) @ w.w_o


# --- low rank


def test_low_rank_factors_keep_the_largest_singular_value_of_a_diagonal():
    a, b = mla.low_rank_factors(torch.diag(torch.tensor([1.0, 3.0, 2.0])), 2)
    assert torch.allclose(a @ b, torch.diag(torch.tensor([0.0, 3.0, 2.0])), atol=1e-6)


@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (5, 5)])
def test_low_rank_error_is_the_tail_of_the_spectrum(shape):
    w = randn(*shape)
    s = torch.linalg.svdvals(w)
    for rank in range(1, min(shape) + 1):
        a, b = mla.low_rank_factors(w, rank)
        assert a.shape == (shape[0], rank) and b.shape == (rank, shape[1])
        # Eckart and Young: no matrix of this rank is closer than the root of the sum of the squares left out
        assert torch.allclose((w - a @ b).norm(), s[rank:].norm(), atol=1e-12)


@pytest.mark.parametrize("rank", [0, -1, 5])
def test_low_rank_factors_refuse_a_rank_that_is_not_there(rank):
    with pytest.raises(ValueError, match="low_rank_factors needs"):
        mla.low_rank_factors(randn(4, 6), rank)


@pytest.mark.parametrize("dtype", HALF_TOLERANCE)
def test_low_rank_factors_in_half_precision(dtype):
    w = randn(6, 5, dtype=dtype)
    a, b = mla.low_rank_factors(w, 3)
    exact_a, exact_b = mla.low_rank_factors(w.double(), 3)
    assert a.dtype == b.dtype == dtype
    assert torch.allclose((a @ b).double(), exact_a @ exact_b, atol=2 * HALF_TOLERANCE[dtype])


def test_low_rank_product_is_differentiable():
    def product(w):
        a, b = mla.low_rank_factors(w, 2)
        return a @ b

    assert torch.autograd.gradcheck(product, randn(4, 3).requires_grad_())


# --- compress, expand


def test_expand_kv_gives_each_head_its_column_block():
    h, w = randn(2, 5, 12), mla_weights()
    c = mla.compress_kv(h, w.w_dkv)
    k, v = mla.expand_kv(c, w.w_uk, w.w_uv, 3)
    for i in range(3):
        assert torch.allclose(k[:, i], h @ (w.w_dkv @ w.w_uk[:, 4 * i : 4 * i + 4]))
        assert torch.allclose(v[:, i], h @ (w.w_dkv @ w.w_uv[:, 4 * i : 4 * i + 4]))


def test_compress_and_expand_are_differentiable():
    h, w = randn(1, 3, 12).requires_grad_(), mla_weights()
    args = [x.requires_grad_() for x in (w.w_dkv, w.w_uk, w.w_uv)]
    assert torch.autograd.gradcheck(
        lambda h, d, k, v: mla.expand_kv(mla.compress_kv(h, d), k, v, 3), (h, *args)
    )


def test_expand_kv_refuses_heads_that_do_not_divide():
    w = mla_weights()
    with pytest.raises(ValueError, match="needs"):
        mla.expand_kv(randn(1, 3, 5), w.w_uk, w.w_uv, 5)


# --- attention


@pytest.mark.parametrize("batch, seq", [(1, 1), (2, 6)])
def test_latent_attention_is_torch_attention_with_wide_keys(batch, seq):
    h, w = randn(batch, seq, 12), mla_weights()
    assert torch.allclose(mla.latent_attention(h, w), multi_head_twin(h, w), atol=1e-12)


@pytest.mark.parametrize("heads, d_h, d_r, d_c", [(1, 4, 2, 3), (2, 6, 4, 16), (4, 3, 2, 1)])
@pytest.mark.parametrize("queries", [1, 3, 7])
def test_absorbed_equals_naive(heads, d_h, d_r, d_c, queries):
    w = mla_weights(heads=heads, d_h=d_h, d_r=d_r, d_c=d_c)
    h = randn(2, 7, 12)
    c, k_r = h @ w.w_dkv, apply_rope(h @ w.w_kr, torch.arange(7))
    last = h[:, -queries:]
    naive = mla.latent_attention(h, w)[:, -queries:]
    assert torch.allclose(mla.latent_attention_absorbed(last, c, k_r, w), naive, atol=1e-12)
    assert torch.allclose(mla.latent_attention_expanded(last, c, k_r, w), naive, atol=1e-12)


def test_latent_attention_is_causal():
    h, w = randn(1, 6, 12).requires_grad_(), mla_weights()
    (grad,) = torch.autograd.grad(mla.latent_attention(h, w)[0, 2].sum(), h)
    assert grad[0, :3].abs().sum(-1).gt(0).all()
    assert grad[0, 3:].eq(0).all()


def test_latent_attention_depends_on_every_weight():
    h, w = randn(1, 6, 12), mla_weights()
    want = mla.latent_attention(h, w)
    for name in ("w_q", "w_qr", "w_dkv", "w_kr", "w_uk", "w_uv", "w_o"):
        changed = replace(w, **{name: getattr(w, name) * 1.5})
        assert not torch.allclose(mla.latent_attention(h, changed), want, atol=1e-4), name


def test_attention_gradients_agree_between_the_forms():
    h = randn(1, 4, 12)
    grads = []
    for form in (mla.latent_attention_expanded, mla.latent_attention_absorbed):
        w = mla_weights()
        leaves = [h.clone().requires_grad_()]
        tensors = {
            n: getattr(w, n).requires_grad_() for n in ("w_q", "w_qr", "w_dkv", "w_kr", "w_uk", "w_uv", "w_o")
        }
        leaves += tensors.values()
        w = replace(w, **tensors)
        c, k_r = leaves[0] @ w.w_dkv, apply_rope(leaves[0] @ w.w_kr, torch.arange(4))
        grads.append(torch.autograd.grad(form(leaves[0], c, k_r, w).square().sum(), leaves))
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("dtype", HALF_TOLERANCE)
def test_attention_in_half_precision(dtype):
    h, w = randn(2, 5, 12, dtype=dtype), mla_weights(dtype=dtype)
    exact = mla.latent_attention(h.double(), mla_weights_in(w, torch.float64))
    got = mla.latent_attention(h, w)
    assert got.dtype == dtype
    assert torch.allclose(got.double(), exact, atol=HALF_TOLERANCE[dtype])
    c, k_r = h @ w.w_dkv, apply_rope(h @ w.w_kr, torch.arange(5))
    absorbed = mla.latent_attention_absorbed(h, c, k_r, w)
    assert absorbed.dtype == dtype
    assert torch.allclose(absorbed.double(), exact, atol=2 * HALF_TOLERANCE[dtype])


def mla_weights_in(w: MLAWeights, dtype: torch.dtype) -> MLAWeights:
    return MLAWeights(*(x.to(dtype) if isinstance(x, torch.Tensor) else x for x in vars(w).values()))


@pytest.mark.parametrize("form", [mla.latent_attention_absorbed, mla.latent_attention_expanded])
def test_more_queries_than_keys_are_refused(form):
    with pytest.raises(ValueError, match="queries <= keys"):
        form(randn(1, 4, 12), randn(1, 3, 5), randn(1, 3, 2), mla_weights())


def test_absorbed_builds_no_key_and_expanded_does():
    w, keys = mla_weights(d=8, heads=2, d_h=64, d_r=2, d_c=4), 256
    c, k_r, h = randn(1, keys, 4), randn(1, keys, 2), randn(1, 1, 8)
    one_head_key_flops = 2 * keys * 4 * 64
    for form, few in ((mla.latent_attention_absorbed, True), (mla.latent_attention_expanded, False)):
        with FlopCounterMode(display=False) as counter:
            form(h, c, k_r, w)
        assert (counter.get_total_flops() < one_head_key_flops) == few


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("keys, d, heads, d_h, d_c, d_r", [(9, 12, 3, 4, 5, 2), (64, 8, 2, 16, 6, 4)])
def test_decode_flops_are_those_counted(form, keys, d, heads, d_h, d_c, d_r):
    w = mla_weights(d=d, heads=heads, d_h=d_h, d_c=d_c, d_r=d_r)
    c, h = randn(1, keys - 1, d_c), randn(1, 1, d)
    k_r = randn(1, keys - 1, d_r)
    step = getattr(mla, f"latent_attention_{form}")
    with FlopCounterMode(display=False) as counter:
        step(h, torch.cat([c, h @ w.w_dkv], 1), torch.cat([k_r, h @ w.w_kr], 1), w)
    assert counter.get_total_flops() == mla.decode_flops(form, keys, d, heads, d_h, d_c, d_r)


def test_decode_flops_refuse_an_unknown_form():
    with pytest.raises(ValueError, match="form"):
        mla.decode_flops("naive", 1, 1, 1, 1, 1, 1)


# --- decoupled scores


def test_decoupled_scores_are_rotated_wide_keys():
    g = seeded(3)
    q_c, k_c = randn(2, 3, 5, 4, g=g), randn(2, 3, 5, 4, g=g)
    q_r, k_r, positions = randn(2, 3, 5, 2, g=g), randn(2, 5, 2, g=g), torch.tensor([7, 0, 3, 4, 11])
    q = torch.cat([q_c, apply_rope(q_r, positions)], -1)
    k = torch.cat([k_c, apply_rope(k_r, positions)[:, None].expand(2, 3, 5, 2)], -1)
    want = q @ k.mT / math.sqrt(6)
    assert torch.allclose(mla.decoupled_rope_scores(q_c, q_r, k_c, k_r, positions), want, atol=1e-12)


def test_decoupled_scores_by_hand():
    # content 3 * 2, position (1, 0) against (1, 0) a quarter turn apart: 0; widths 2 + 2
    q_c, k_c = torch.tensor([3.0, 0.0]).expand(1, 1, 2, 2), torch.tensor([2.0, 0.0]).expand(1, 1, 2, 2)
    q_r, k_r = torch.tensor([1.0, 0.0]).expand(1, 1, 2, 2), torch.tensor([1.0, 0.0]).expand(1, 2, 2)
    scores = mla.decoupled_rope_scores(q_c, q_r, k_c, k_r, torch.tensor([0, 1]))
    same, next_to = 7 / 2, (6 + math.cos(1)) / 2
    assert torch.allclose(scores[0, 0], torch.tensor([[same, next_to], [next_to, same]]))


def test_decoupled_scores_depend_on_the_distance_alone():
    g = seeded(4)
    args = [randn(1, 2, 4, w, g=g) for w in (3, 4, 3)] + [randn(1, 4, 4, g=g)]
    near = mla.decoupled_rope_scores(*args, torch.arange(4))
    far = mla.decoupled_rope_scores(*args, torch.arange(4) + 1000)
    assert torch.allclose(near, far, atol=1e-9)
    stretched = mla.decoupled_rope_scores(*args, torch.arange(4) * 5)
    assert not torch.allclose(near, stretched, atol=1e-2)


# --- cache


def new_cache(max_seq=6, batch=2, dtype=torch.float64):
    return mla.LatentCache(batch, max_seq, 5, 2, dtype, "cpu")


def test_cache_returns_everything_so_far():
    cache, c, k_r = new_cache(), randn(2, 6, 5), randn(2, 6, 2)
    for start, stop in ((0, 3), (3, 4), (4, 6)):
        got_c, got_k = cache.update(c[:, start:stop], k_r[:, start:stop])
        assert torch.equal(got_c, c[:, :stop]) and torch.equal(got_k, k_r[:, :stop])
        assert cache.length == stop


def test_cache_holds_exactly_d_c_plus_d_r_numbers_per_token():
    cache = new_cache(max_seq=6)
    held = sum(x.numel() for x in vars(cache).values() if isinstance(x, torch.Tensor))
    assert held == 2 * 6 * mla.cache_elements_per_token("mla", 3, 4, d_c=5, d_r=2)


def test_cache_overflow_changes_nothing():
    cache, c, k_r = new_cache(max_seq=4), randn(2, 3, 5), randn(2, 3, 2)
    cache.update(c, k_r)
    with pytest.raises(ValueError, match="max_seq=4"):
        cache.update(c[:, :2], k_r[:, :2])
    assert cache.length == 3
    got_c, got_k = cache.update(c[:, :1], k_r[:, :1])
    assert torch.equal(got_c, torch.cat([c, c[:, :1]], 1)) and torch.equal(
        got_k, torch.cat([k_r, k_r[:, :1]], 1)
    )


def test_cache_reset_forgets():
    cache, c, k_r = new_cache(), randn(2, 3, 5), randn(2, 3, 2)
    cache.update(c, k_r)
    cache.reset()
    assert cache.length == 0
    got_c, _ = cache.update(c[:, :1] + 1, k_r[:, :1])
    assert torch.equal(got_c, c[:, :1] + 1)


@pytest.mark.parametrize(
    "c, k_r",
    [
        (randn(2, 1, 5, dtype=torch.float32), randn(2, 1, 2)),
        (randn(2, 1, 5), randn(2, 1, 2, dtype=torch.float32)),
        (randn(3, 1, 5), randn(3, 1, 2)),
        (randn(2, 1, 4), randn(2, 1, 2)),
        (randn(2, 1, 5), randn(2, 1, 3)),
        (randn(2, 1, 5).to("meta"), randn(2, 1, 2).to("meta")),
    ],
    ids=["dtype of c", "dtype of k_r", "batch", "width of c", "width of k_r", "device"],
)
def test_cache_refuses_rows_of_another_kind(c, k_r):
    cache = new_cache()
    with pytest.raises(ValueError, match=r"LatentCache\.update needs"):
        cache.update(c, k_r)
    assert cache.length == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_cache_keeps_its_dtype_and_device(dtype):
    cache = mla.LatentCache(1, 2, 3, 2, dtype, "cpu")
    c, k_r = cache.update(torch.ones(1, 1, 3, dtype=dtype), torch.ones(1, 1, 2, dtype=dtype))
    assert c.dtype == k_r.dtype == dtype
    assert mla.LatentCache(1, 2, 3, 2, dtype, "meta").c.device.type == "meta"


def test_cache_copies_what_it_is_given():
    cache, c, k_r = new_cache(), randn(2, 2, 5), randn(2, 2, 2)
    kept = c.clone()
    cache.update(c, k_r)
    c.zero_()
    got, _ = cache.update(c[:, :1], k_r[:, :1])
    assert torch.equal(got[:, :2], kept)


def test_decode_steps_equal_the_full_pass():
    h, w, cache = randn(2, 6, 12), mla_weights(), new_cache()
    full = mla.latent_attention(h, w)
    for t in range(6):
        assert torch.allclose(
            mla.latent_decode_step(h[:, t : t + 1], w, cache), full[:, t : t + 1], atol=1e-12
        )
    assert cache.length == 6


def test_decode_continues_a_prefilled_cache():
    h, w, cache = randn(2, 5, 12), mla_weights(), new_cache()
    cache.update(h[:, :4] @ w.w_dkv, apply_rope(h[:, :4] @ w.w_kr, torch.arange(4)))
    step = mla.latent_decode_step(h[:, 4:], w, cache)
    assert torch.allclose(step, mla.latent_attention(h, w)[:, 4:], atol=1e-12)


# --- counting


def test_deepseek_v2_counts():
    count = mla.cache_elements_per_token
    assert count("mha", 128, 128) == 32_768
    assert count("gqa", 128, 128, groups=8) == 2_048
    assert count("mqa", 128, 128) == 256
    assert count("mla", 128, 128, d_c=512, d_r=64) == 576


@pytest.mark.parametrize(
    "kind, given",
    [
        ("gqa", {}),
        ("mla", {"d_c": 4}),
        ("mla", {"d_r": 4}),
        ("mla", {"groups": 2}),
        ("xyz", {}),
        ("MHA", {}),
    ],
)
def test_cache_elements_refuse_what_they_cannot_count(kind, given):
    with pytest.raises(ValueError, match="cache_elements_per_token needs"):
        mla.cache_elements_per_token(kind, 8, 16, **given)


def test_largest_batch_counts_whole_sequences():
    # 100 tokens * 2 layers * 5 numbers * 2 bytes = 2,000 bytes a sequence
    assert mla.largest_batch(10_000, 4_000, 100, 2, 5, 2) == 3
    assert mla.largest_batch(9_999, 4_000, 100, 2, 5, 2) == 2
    assert mla.largest_batch(10_000, 4_000, 100, 2, 5, 0.75) == 8
    assert mla.largest_batch(4_000, 4_001, 100, 2, 5, 2) == 0
    assert isinstance(mla.largest_batch(1e10, 1e9, 100, 2, 5, 0.75), int)


def test_largest_batch_refuses_an_empty_sequence():
    with pytest.raises(ValueError, match="largest_batch needs"):
        mla.largest_batch(10, 1, 0, 2, 5, 2)


# --- LoRA


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_merged_lora_equals_the_forward_pass(batch, dtype):
    g = seeded(5)
    x, w = randn(*batch, 6, g=g, dtype=dtype), randn(6, 4, g=g, dtype=dtype) / 4
    a, b = randn(6, 2, g=g, dtype=dtype) / 4, randn(2, 4, g=g, dtype=dtype) / 4
    tolerance = 2 * HALF_TOLERANCE.get(dtype, 1e-5)
    got, merged = mla.lora_forward(x, w, a, b, 3.0), mla.merge_lora(w, a, b, 3.0)
    assert got.dtype == merged.dtype == dtype
    assert torch.allclose(got.float(), (x @ merged).float(), atol=tolerance)
    want = x.double() @ (w.double() + 1.5 * a.double() @ b.double())
    assert torch.allclose(got.double(), want, atol=tolerance)


def test_lora_starts_at_the_pretrained_weight():
    x, w, a = randn(3, 6), randn(6, 4), randn(6, 2)
    assert torch.equal(mla.lora_forward(x, w, a, torch.zeros(2, 4, dtype=w.dtype), 8), x @ w)


def test_lora_is_differentiable():
    g = seeded(6)
    args = [randn(*s, g=g).requires_grad_() for s in ((3, 6), (6, 4), (6, 2), (2, 4))]
    assert torch.autograd.gradcheck(lambda x, w, a, b: mla.lora_forward(x, w, a, b, 3.0), args)
    assert torch.autograd.gradcheck(lambda w, a, b: mla.merge_lora(w, a, b, 3.0), args[1:])


def test_the_measured_kinds_come_with_the_package_and_are_of_equal_size():
    runs = json.loads((corpus.DATA / "attention_kinds.json").read_text())
    per_kind = {kind: [run for run in runs if run["kind"] == kind] for kind in {run["kind"] for run in runs}}
    assert len(per_kind) == 5 and {len(runs) for runs in per_kind.values()} == {5}
    sizes = [run["parameters"] for run in runs]
    assert max(sizes) - min(sizes) < 1e-3 * min(sizes)
    assert per_kind["MLA, 24 + 8"][0]["elements_per_token"] == mla.cache_elements_per_token("mqa", 6, 16)
