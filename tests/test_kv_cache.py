"""Independent facts about the KV cache: hand values, laws, torch and Hugging Face."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from course_llm.attention import apply_rope
from course_llm.kv_cache import (
    KVCache,
    PagedKVCache,
    RollingKVCache,
    cached_attention,
    decode_intensity,
    dequantize_kv,
    forward_flops,
    generate_cached,
    grouped_query_attention,
    kv_cache_bytes,
    mha_to_gqa,
    positions_from_padding,
    quantize_kv,
    rope_at,
)

# about ten units in the last place of the result; half precision also rounds the scores and the weights
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_near(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# size


def test_cache_size_is_the_lectures_formula():
    # GPT-3: 96 layers, 96 heads of 128, d_hidden 12288, FP16 (FACTS: 4.72 MB per token)
    assert kv_cache_bytes(1, 1, 96, 96, 128) == 2 * 2 * 96 * 12288 == 4_718_592


@pytest.mark.parametrize(
    "layers, kv_heads, want", [(32, 32, 524_288), (80, 8, 327_680), (32, 8, 131_072), (95, 8, 389_120)]
)
def test_cache_bytes_per_token_of_published_models(layers, kv_heads, want):
    # Llama-2-7B, Llama-2-70B, Llama-3-8B, DeepSeek-67B
    assert kv_cache_bytes(1, 1, layers, kv_heads, 128) == want


def test_cache_size_grows_with_every_argument():
    base = (2, 3, 5, 7, 11, 2)
    size = kv_cache_bytes(*base)
    for i, value in enumerate(base):
        doubled = [*base[:i], 2 * value, *base[i + 1 :]]
        assert kv_cache_bytes(*doubled) == 2 * size
    assert kv_cache_bytes(2, 3, 5, 7, 11, 0.5) == size / 4
    assert type(size) is int


# the cache


def rows(batch: int, heads: int, new: int, dim: int, seed: int, dtype=torch.float32) -> tuple[Tensor, Tensor]:
    both = randn(2, batch, heads, new, dim, seed=seed, dtype=dtype)
    return both[0], both[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunks", [(1, 1, 1), (4, 1, 1, 2), (8,), (3, 5)])
def test_cache_returns_everything_so_far(chunks, dtype):
    cache = KVCache(2, 3, 8, 4, dtype, "cpu")
    ks, vs = zip(*(rows(2, 3, n, 4, i, dtype) for i, n in enumerate(chunks)), strict=True)
    for i in range(len(chunks)):
        k, v = cache.update(ks[i], vs[i])
        assert torch.equal(k, torch.cat(ks[: i + 1], dim=2))
        assert torch.equal(v, torch.cat(vs[: i + 1], dim=2))
        assert cache.length == sum(chunks[: i + 1])
        assert k.dtype == v.dtype == dtype


def test_cache_lives_on_its_device():
    cache = KVCache(1, 2, 4, 3, torch.float32, "meta")
    k = torch.empty(1, 2, 2, 3, device="meta")
    assert cache.update(k, k)[0].device.type == "meta"
    rolling = RollingKVCache(1, 2, 4, 3, torch.float32, torch.device("meta"))
    assert rolling.update(k, k)[1].device.type == "meta"
    paged = PagedKVCache(2, 2, 2, 3, torch.float32, "meta")
    paged.append(0, k[0], k[0])
    assert paged.gather(0)[0].device.type == "meta"


def test_cache_allocates_once():
    cache = KVCache(1, 2, 64, 4, torch.float32, "cpu")
    k, v = rows(1, 2, 1, 4, 0)
    first = cache.update(k, v)
    second = cache.update(k, v)
    for a, b in zip(first, second, strict=True):
        assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_returned_keys_keep_their_values_while_the_cache_grows():
    cache = KVCache(1, 1, 8, 2, torch.float32, "cpu")
    first = cache.update(*rows(1, 1, 3, 2, 0))
    before = [t.clone() for t in first]
    for i in range(5):
        cache.update(*rows(1, 1, 1, 2, i + 1))
    assert torch.equal(first[0], before[0]) and torch.equal(first[1], before[1])


@pytest.mark.parametrize("make", [lambda: KVCache(1, 1, 8, 2, torch.float32, "cpu"),
                                  lambda: RollingKVCache(1, 1, 8, 2, torch.float32, "cpu")])  # fmt: skip
def test_caches_copy_their_arguments(make):
    cache = make()
    k, v = rows(1, 1, 3, 2, 0)
    expected = k.clone(), v.clone()
    cache.update(k, v)
    k.zero_()
    v.zero_()
    got = cache.update(*rows(1, 1, 1, 2, 1))
    assert torch.equal(got[0][:, :, :3], expected[0]) and torch.equal(got[1][:, :, :3], expected[1])


def test_cache_starts_again_after_reset():
    cache = KVCache(1, 2, 4, 3, torch.float32, "cpu")
    cache.update(*rows(1, 2, 4, 3, 0))
    cache.reset()
    assert cache.length == 0
    k, v = rows(1, 2, 2, 3, 1)
    got_k, got_v = cache.update(k, v)
    assert torch.equal(got_k, k) and torch.equal(got_v, v)


def test_overflow_changes_nothing():
    cache = KVCache(1, 2, 4, 3, torch.float32, "cpu")
    k, v = rows(1, 2, 3, 3, 0)
    cache.update(k, v)
    with pytest.raises(ValueError, match=r"KVCache.update needs length \+ new <= max_seq, got 3 \+ 2 > 4"):
        cache.update(*rows(1, 2, 2, 3, 1))
    assert cache.length == 3
    last = rows(1, 2, 1, 3, 2)
    assert torch.equal(cache.update(*last)[0], torch.cat([k, last[0]], dim=2))


def test_caches_refuse_another_dtype_and_stay_as_they_are():
    k, v = rows(1, 2, 1, 4, 0, torch.float64)
    for cache in (
        KVCache(1, 2, 4, 4, torch.float32, "cpu"),
        RollingKVCache(1, 2, 4, 4, torch.float32, "cpu"),
    ):
        with pytest.raises(ValueError, match="float32"):
            cache.update(k, v)
        with pytest.raises(ValueError, match="v in"):
            cache.update(k.float(), v)
        with pytest.raises(ValueError, match="shape"):
            cache.update(k[:, :1].float(), v[:, :1].float())
        assert cache.length == 0
    paged = PagedKVCache(2, 2, 2, 4, torch.float32, "cpu")
    with pytest.raises(ValueError, match="float32"):
        paged.append(0, k[0], v[0])
    assert paged.free_pages == 2
    meta = torch.empty(1, 2, 1, 4, device="meta")
    with pytest.raises(ValueError, match="meta"):
        KVCache(1, 2, 4, 4, torch.float32, "cpu").update(meta, meta)


def test_cache_keeps_no_graph():
    cache = KVCache(1, 1, 2, 2, torch.float32, "cpu")
    k, v = rows(1, 1, 1, 2, 0)
    assert not cache.update(k.requires_grad_(), v.requires_grad_())[0].requires_grad


# attention from the end


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 2, 4, 6])
def test_cached_attention_is_the_end_of_full_attention(queries, dtype):
    q, k, v = (randn(2, 3, 6, d, seed=i, dtype=dtype) for i, d in enumerate((4, 4, 5)))
    wide = [t.double() for t in (q, k, v)]
    full = F.scaled_dot_product_attention(*wide, is_causal=True).to(dtype)
    assert_near(cached_attention(q[:, :, 6 - queries :], k, v), full[:, :, 6 - queries :])


def test_cached_attention_takes_any_batch_dimensions():
    q, k, v = (randn(2, 1, 3, 5, 4, seed=i) for i in range(3))
    whole = cached_attention(q, k, v)
    assert_near(whole[1, 0, 2], cached_attention(q[1, 0, 2], k[1, 0, 2], v[1, 0, 2]))
    assert cached_attention(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0]).shape == (5, 4)


def test_cached_attention_hides_the_future_from_a_chunk():
    q, k, v = (randn(1, 1, 6, 4, seed=i) for i in range(3))
    base = cached_attention(q[:, :, 3:], k, v)
    k[:, :, -1], v[:, :, -1] = 7.0, 9.0
    changed = (cached_attention(q[:, :, 3:], k, v) - base).abs().amax(dim=(0, 1, 3)) > 1e-6
    assert changed.tolist() == [False, False, True]


def test_cached_attention_differentiates():
    q, k, v = (randn(2, n, 3, seed=i, dtype=torch.float64).requires_grad_() for i, n in enumerate((2, 4, 4)))
    assert torch.autograd.gradcheck(cached_attention, (q, k, v))


def test_cached_attention_costs_the_formula():
    q, k, v = (randn(2, 3, n, d, seed=i) for i, (n, d) in enumerate(((2, 4), (7, 4), (7, 5))))
    with FlopCounterMode(display=False) as counter:
        cached_attention(q, k, v)
    assert counter.get_total_flops() == 2 * 3 * 2 * 2 * 7 * (4 + 5)


def test_cached_attention_refuses_more_queries_than_keys():
    with pytest.raises(ValueError, match="queries <= keys, got queries=3, keys=2"):
        cached_attention(torch.zeros(3, 2), torch.zeros(2, 2), torch.zeros(2, 2))


# positions


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_at_continues_the_full_rotation(dtype):
    x = randn(2, 3, 9, 8, dtype=dtype)
    full = apply_rope(x, torch.arange(9))
    assert_near(rope_at(x[:, :, 4:], 4), full[:, :, 4:])
    assert_near(rope_at(x, 0), full)


def test_rope_at_far_away_depends_on_the_distance_alone():
    q, k = randn(1, 8, seed=0, dtype=torch.float64), randn(1, 8, seed=1, dtype=torch.float64)
    near = (rope_at(q, 5) * rope_at(k, 2)).sum()
    far = (rope_at(q, 9_999) * rope_at(k, 9_996)).sum()
    torch.testing.assert_close(near, far, rtol=1e-9, atol=1e-9)


def test_rope_at_turns_the_first_pair_by_one_radian_per_position():
    turned = rope_at(torch.tensor([[1.0, 0.0]], dtype=torch.float64), 3)
    torch.testing.assert_close(turned, torch.tensor([[math.cos(3), math.sin(3)]], dtype=torch.float64))
    with pytest.raises(ValueError, match="start >= 0"):
        rope_at(torch.zeros(1, 2), -1)


def test_positions_from_padding_by_hand():
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]], dtype=torch.bool)
    positions = positions_from_padding(real)
    assert positions.dtype == torch.int64
    assert positions[real].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0]
    assert positions.min() >= 0  # fit to index a table


# generation


class Recorder:
    """A random two-layer attention model with a cache, which notes what it is asked."""

    def __init__(self, vocab: int = 11, heads: int = 2, head_dim: int = 4, layers: int = 2, seed: int = 0):
        d = heads * head_dim
        self.embed, self.out = randn(vocab, d, seed=seed), randn(d, vocab, seed=seed + 1)
        self.w = randn(layers, 3, heads, d, head_dim, seed=seed + 2) / d**0.5
        self.pushed: list[tuple[int, ...]] = []

    def __call__(self, ids: Tensor, cache: list | None) -> tuple[Tensor, list]:
        self.pushed.append(tuple(ids.shape))
        old = cache or [None] * len(self.w)
        start = 0 if cache is None else cache[0][0].shape[-2]
        x, new_cache = self.embed[ids], []
        for (w_q, w_k, w_v), past in zip(self.w, old, strict=True):
            q, k, v = (torch.einsum("bsd,hde->bhse", x, w) for w in (w_q, w_k, w_v))
            q, k = rope_at(q, start), rope_at(k, start)
            if past is not None:
                k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
            new_cache.append((k, v))
            x = x + cached_attention(q, k, v).transpose(1, 2).flatten(2)
        return x @ self.out, new_cache


def without_cache(model: Recorder, ids: Tensor, new: int) -> Tensor:
    for _ in range(new):
        logits, _ = model(ids, None)
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids


@pytest.mark.parametrize("prompt, new", [(1, 1), (4, 6), (7, 1)])
def test_generate_cached_equals_reading_everything_again(prompt, new):
    model = Recorder()
    ids = torch.randint(0, 11, (3, prompt), generator=torch.Generator().manual_seed(1))
    got = generate_cached(model, ids, new)
    pushed = sum(seq for _, seq in model.pushed)
    assert pushed == prompt + new - 1
    assert torch.equal(got, without_cache(model, ids, new))


def test_generate_cached_without_new_tokens_returns_the_prompt():
    model, ids = Recorder(), torch.tensor([[1, 2]])
    assert torch.equal(generate_cached(model, ids, 0), ids)
    assert model.pushed == []


def scripted(rows_: list[list[int]], prompt: int, vocab: int = 9):
    """A model that writes what the script says; its cache is the count of tokens read."""
    script = torch.tensor(rows_)
    pushed: list[int] = []

    def model(ids: Tensor, cache: int | None):
        pushed.append(ids.numel())
        seen = (cache or 0) + ids.shape[1]
        logits = torch.zeros(*ids.shape, vocab)
        logits[torch.arange(len(script)), -1, script[:, seen - prompt]] = 1.0
        return logits, seen

    return model, pushed


def test_generate_cached_fills_finished_rows_and_stops_when_all_have_finished():
    model, pushed = scripted([[3, 8, 5, 6, 7], [4, 3, 2, 8, 7]], prompt=2)
    ids = torch.tensor([[8, 1], [1, 8]])  # an EOS in the prompt does not count
    got = generate_cached(model, ids, 5, eos_id=8)
    assert got.tolist() == [[8, 1, 3, 8, 8, 8], [1, 8, 4, 3, 2, 8]]
    assert sum(pushed) == 2 * (2 + 4 - 1)
    assert generate_cached(scripted([[3, 8, 5]], 1)[0], ids[:1, :1], 3).tolist() == [[8, 3, 8, 5]]


def test_generate_cached_gives_ties_to_the_lower_id():
    def flat(ids, cache):
        return torch.zeros(*ids.shape, 5), cache

    assert generate_cached(flat, torch.tensor([[4]]), 2).tolist() == [[4, 0, 0]]


def test_generate_cached_equals_hugging_face():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=31, n_positions=32, eos_token_id=None, bos_token_id=0
    )
    gpt2 = transformers.GPT2LMHeadModel(config).eval()

    def model(ids, cache):
        with torch.no_grad():
            out = gpt2(ids, past_key_values=cache, use_cache=True)
        return out.logits, out.past_key_values

    ids = torch.tensor([[5, 3, 9], [1, 1, 2]])
    want = gpt2.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    assert torch.equal(generate_cached(model, ids, 6), want)


# fewer heads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_grouped_query_attention_equals_torch(kv_heads, dtype):
    q = randn(2, 6, 5, 4, seed=0, dtype=dtype)
    k, v = randn(2, kv_heads, 5, 4, seed=1, dtype=dtype), randn(2, kv_heads, 5, 3, seed=2, dtype=dtype)
    wide = [t.double() for t in (q, k, v)]
    want = F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True).to(dtype)
    assert_near(grouped_query_attention(q, k, v), want)
    assert_near(grouped_query_attention(q[:, :, 3:], k, v), want[:, :, 3:])


def test_grouped_query_attention_equals_hugging_face_repeat_kv():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k, v = randn(2, 4, 3, 4, seed=0), randn(2, 2, 7, 4, seed=1), randn(2, 2, 7, 4, seed=2)
    want = cached_attention(q, llama.repeat_kv(k, 2), llama.repeat_kv(v, 2))
    assert_near(grouped_query_attention(q, k, v), want)


def test_grouped_query_attention_differentiates_and_copies_no_keys():
    shapes = ((1, 4, 2, 2), (1, 2, 3, 2), (1, 2, 3, 2))
    q, k, v = (randn(*s, seed=i, dtype=torch.float64).requires_grad_() for i, s in enumerate(shapes))
    assert torch.autograd.gradcheck(grouped_query_attention, (q, k, v))


def test_grouped_query_attention_refuses_heads_that_do_not_divide():
    kv = torch.zeros(1, 2, 4, 2)
    with pytest.raises(ValueError, match="heads=3, kv_heads=2"):
        grouped_query_attention(torch.zeros(1, 3, 4, 2), kv, kv)
    with pytest.raises(ValueError, match="queries=5, keys=4"):
        grouped_query_attention(torch.zeros(1, 2, 5, 2), kv, kv)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mha_to_gqa_averages_neighbouring_heads(dtype):
    w = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 10]], dtype=dtype)
    assert torch.equal(mha_to_gqa(w, 4, 2), torch.tensor([[2, 3, 6, 8]], dtype=dtype))
    assert torch.equal(mha_to_gqa(w, 4, 4), w)
    assert torch.equal(mha_to_gqa(w, 8, 2), torch.tensor([[2.5, 7]], dtype=dtype))


def test_mha_to_gqa_is_exact_when_the_heads_of_a_group_are_equal():
    block = randn(6, 2, 3, seed=3)  # two kv heads of width 3
    w = block.repeat_interleave(2, dim=1).flatten(1)
    assert_near(mha_to_gqa(w, 4, 2), block.flatten(1))
    x = randn(2, 5, 6, seed=4)
    heads = (x @ w).unflatten(-1, (4, 3)).transpose(1, 2)
    fewer = (x @ mha_to_gqa(w, 4, 2)).unflatten(-1, (2, 3)).transpose(1, 2)
    assert_near(grouped_query_attention(heads, fewer, fewer), cached_attention(heads, heads, heads))


def test_mha_to_gqa_differentiates_and_refuses_uneven_heads():
    w = randn(2, 8, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda w: mha_to_gqa(w, 4, 2), (w,))
    for bad in ((4, 3), (3, 3), (4, 0)):
        with pytest.raises(ValueError, match="mha_to_gqa needs heads"):
            mha_to_gqa(torch.zeros(2, 8), *bad)


# a window


@given(
    chunks=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    window=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_rolling_cache_returns_the_last_rows_in_order(chunks, window):
    cache = RollingKVCache(1, 2, window, 3, torch.float32, "cpu")
    k, v = rows(1, 2, sum(chunks), 3, 0)
    seen, kept = 0, []
    for n in chunks:
        out = cache.update(k[:, :, seen : seen + n], v[:, :, seen : seen + n])
        seen += n
        first = max(0, seen - window)
        kept.append((out, [t[:, :, first:seen].clone() for t in (k, v)], torch.arange(first, seen)))
        assert cache.length == seen
    for (got_k, got_v, positions), (want_k, want_v), want_positions in kept:  # earlier results are unharmed
        assert torch.equal(got_k, want_k) and torch.equal(got_v, want_v)
        assert torch.equal(positions, want_positions) and positions.dtype == torch.int64


@pytest.mark.parametrize("dtype", DTYPES)
def test_rolling_cache_keeps_the_dtype_and_starts_again_after_reset(dtype):
    cache = RollingKVCache(2, 1, 2, 3, dtype, "cpu")
    cache.update(*rows(2, 1, 5, 3, 0, dtype))
    cache.reset()
    assert cache.length == 0
    k, v = rows(2, 1, 1, 3, 1, dtype)
    got_k, got_v, positions = cache.update(k, v)
    assert torch.equal(got_k, k) and torch.equal(got_v, v) and positions.tolist() == [0]


def test_rolling_cache_decodes_like_a_sliding_window():
    q, k, v = (randn(1, 2, 9, 4, seed=i) for i in range(3))
    i = torch.arange(9)
    mask = (i[:, None] >= i) & (i[:, None] - i < 3)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    cache = RollingKVCache(1, 2, 3, 4, torch.float32, "cpu")
    for t in range(9):
        keys, values, _ = cache.update(k[:, :, t : t + 1], v[:, :, t : t + 1])
        assert_near(cached_attention(q[:, :, t : t + 1], keys, values), want[:, :, t : t + 1])


def test_rolling_cache_refuses_an_empty_window():
    with pytest.raises(ValueError, match="window >= 1, got window=0"):
        RollingKVCache(1, 1, 0, 1, torch.float32, "cpu")


# eight bits


def test_quantize_kv_by_hand():
    x = torch.tensor([[[[127.0, -63.6, 0.4], [0.0, 0.0, 0.0], [-2.54, 1.27, 0.0]]]])
    q, scale = quantize_kv(x)
    assert q.dtype == torch.int8
    assert q[0, 0].tolist() == [[127, -64, 0], [0, 0, 0], [-127, 64, 0]]
    assert scale.shape == (1, 1, 3, 1)
    torch.testing.assert_close(scale[0, 0, ::2, 0], torch.tensor([1.0, 0.02]))
    assert dequantize_kv(q, scale)[0, 0, 1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantization_error_is_half_a_step(dtype):
    x = randn(2, 3, 5, 16, dtype=dtype) * torch.logspace(-2, 1, 5, dtype=torch.float64).to(dtype)[:, None]
    q, scale = quantize_kv(x)
    back = dequantize_kv(q, scale)
    assert scale.dtype == back.dtype == dtype
    # half precision rounds the product once more, and its scale before that
    slack = {torch.float16: 1.2, torch.bfloat16: 2.1}.get(dtype, 1.0001)
    assert bool(((back - x).abs().double() <= slack * scale.double() / 2).all())
    assert bool((q.abs().amax(dim=-1) == 127).all())


def test_zeros_survive_in_half_precision():
    q, scale = quantize_kv(torch.zeros(1, 1, 2, 4, dtype=torch.float16))
    back = dequantize_kv(q, scale)
    assert back.tolist() == [[[[0.0] * 4] * 2]]


def test_dequantize_differentiates_in_the_scale():
    q = torch.tensor([[[[3, -2]]]], dtype=torch.int8)
    scale = torch.tensor([[[[0.5]]]], requires_grad=True)
    dequantize_kv(q, scale).sum().backward()
    assert scale.grad.item() == 1.0


# pages


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_paged_cache_behaves_like_a_list_per_sequence(data):
    pages, page_size = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    cache = PagedKVCache(pages, page_size, 2, 3, torch.float32, "cpu")
    plain: dict[int, list[Tensor]] = {}
    for step in range(data.draw(st.integers(1, 15))):
        sequence = data.draw(st.sampled_from([7, 100, -3]))
        if data.draw(st.integers(0, 3)) == 0 and sequence in plain:
            cache.free(sequence)
            del plain[sequence]
        else:
            new = data.draw(st.integers(1, 7))
            both = randn(2, 2, new, 3, seed=step)
            longer = torch.cat([plain[sequence], both], dim=2) if sequence in plain else both
            others = sum(math.ceil(t.shape[2] / page_size) for s, t in plain.items() if s != sequence)
            if others + math.ceil(longer.shape[2] / page_size) > pages:
                with pytest.raises(ValueError, match="more pages"):
                    cache.append(sequence, both[0], both[1])
            else:
                cache.append(sequence, both[0], both[1])
                plain[sequence] = longer
        used = sum(math.ceil(t.shape[2] / page_size) for t in plain.values())
        assert cache.free_pages == pages - used
        for s, t in plain.items():
            k, v = cache.gather(s)
            assert torch.equal(k, t[0]) and torch.equal(v, t[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_cache_keeps_the_dtype_and_returns_copies(dtype):
    cache = PagedKVCache(1, 4, 1, 2, dtype, "cpu")
    k, v = (t[0] for t in rows(1, 1, 4, 2, 0, dtype))
    cache.append(5, k, v)
    got = cache.gather(5)
    cache.free(5)
    cache.append(6, *(t[0] for t in rows(1, 1, 4, 2, 1, dtype)))
    assert torch.equal(got[0], k) and torch.equal(got[1], v) and got[0].dtype == dtype


def test_paged_cache_refuses_sequences_it_does_not_know():
    cache = PagedKVCache(1, 4, 1, 2, torch.float32, "cpu")
    for call in (cache.gather, cache.free):
        with pytest.raises(ValueError, match="appended to, got 3"):
            call(3)


# intensity


def test_decode_intensity_by_hand():
    # d = 4, w = 2*16 + 2*4*2 + 2*4*8 = 112 weights a layer
    flops, read_bytes, intensity = decode_intensity(3, 5, 2, 2, 1, 2, 8, 2)
    assert flops == 3 * 2 * (2 * 112 + 4 * 5 * 4)
    assert read_bytes == 2 * 2 * (112 + 2 * 3 * 5 * 2)
    assert intensity == flops / read_bytes


def test_decode_intensity_uses_every_argument():
    base = (3, 5, 2, 4, 2, 2, 8, 2)
    results = [decode_intensity(*base)]
    for i in range(8):
        results.append(decode_intensity(*base[:i], 2 * base[i], *base[i + 1 :]))
    assert len({r[:2] for r in results}) == 9
    assert decode_intensity(*base[:7], 0.5)[1] == results[0][1] / 4


def test_one_decoded_row_of_weights_alone_has_intensity_one_in_fp16():
    # each weight is read once (2 bytes) and used in one multiplication and one addition
    assert decode_intensity(1, 0, 4, 8, 8, 16, 512, 2)[2] == 1.0
    assert decode_intensity(32, 0, 4, 8, 8, 16, 512, 2)[2] == 32.0


def test_forward_flops_are_those_of_the_matrix_products():
    heads, kv_heads, dim, d_ff, batch, new, seq = 4, 2, 3, 20, 2, 3, 7
    d = heads * dim
    x = randn(batch, new, d)
    k = randn(batch, kv_heads, seq, dim)
    with FlopCounterMode(display=False) as counter:
        q = (x @ randn(d, d)).unflatten(-1, (heads, dim)).transpose(1, 2)
        x @ randn(d, 2 * kv_heads * dim)
        out = grouped_query_attention(q, k, k).transpose(1, 2).flatten(2) @ randn(d, d)
        (out @ randn(d, d_ff)) @ randn(d_ff, d)
    assert forward_flops(batch, new, seq, 1, heads, kv_heads, dim, d_ff) == counter.get_total_flops()
    assert forward_flops(3, 1, 5, 2, 2, 1, 2, 8) == decode_intensity(3, 5, 2, 2, 1, 2, 8, 2)[0]
    assert forward_flops(3, 1, 5, 6, 2, 1, 2, 8) == 3 * forward_flops(3, 1, 5, 2, 2, 1, 2, 8)
