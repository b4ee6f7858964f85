"""Independent facts about `course_llm.attention`: hand values, laws, torch.nn and Hugging Face."""

import math
from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from course_llm.attention import (
    apply_rope,
    attention_parameter_count,
    attention_weights,
    decoder_block,
    decoder_flops,
    decoder_logits,
    merge_heads,
    multi_head_attention,
    random_decoder,
    scaled_dot_product_attention,
    sinusoidal_positions,
    split_heads,
)
from course_llm.weights import BlockWeights

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# a result of order one after a few roundings of the dtype (10, 7, 23 and 52 bits)
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-10}
INF = float("inf")


def randn(seed, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def close(got, want):
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def causal(n, dtype=torch.float32):
    return torch.full((n, n), -INF, dtype=dtype).triu(1)


def block_weights(seed, d_hidden=8, inner=8, d_ff=12, dtype=torch.float32):
    shapes = {
        "ln1_scale": (d_hidden,), "ln1_bias": (d_hidden,),
        "w_q": (d_hidden, inner), "w_k": (d_hidden, inner),
        "w_v": (d_hidden, inner), "w_o": (inner, d_hidden),
        "ln2_scale": (d_hidden,), "ln2_bias": (d_hidden,),
        "w_up": (d_hidden, d_ff), "b_up": (d_ff,), "w_down": (d_ff, d_hidden), "b_down": (d_hidden,),
    }  # fmt: skip
    return BlockWeights(
        **{name: 0.4 * randn(seed + i, *shape, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}
    )


# scaled dot-product attention


def test_weights_of_a_hand_computed_query():
    # scores 2/√4 = 1 and 0: weights e/(e+1) and 1/(e+1)
    q = torch.tensor([[2.0, 0, 0, 0]])
    k = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0]])
    weights = attention_weights(q, k)
    close(weights, torch.tensor([[math.e / (math.e + 1), 1 / (math.e + 1)]]))
    v = torch.tensor([[1.0, 0, 3], [0, 1, 3]])  # d_v differs from d_k
    close(scaled_dot_product_attention(q, k, v), torch.tensor([[0.7310586, 0.2689414, 3.0]]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_attention_agrees_with_torch(dtype, batch):
    q, k, v = (randn(i, *batch, n, d, dtype=dtype) for i, (n, d) in enumerate([(3, 4), (5, 4), (5, 6)]))
    mask = torch.tensor([[0, -INF, 0, 0, 0], [0, 0, -INF, -INF, 0], [-INF, -INF, -INF, -INF, 0]], dtype=dtype)
    for m in (None, mask):
        got = scaled_dot_product_attention(q, k, v, m)
        assert got.dtype == dtype
        wide = None if m is None else m.double()
        close(got, F.scaled_dot_product_attention(q.double(), k.double(), v.double(), wide))


def test_mask_hides_a_key_and_broadcasts():
    q, k, v = randn(0, 2, 3, 4), randn(1, 2, 5, 4), randn(2, 2, 5, 4)
    mask = torch.tensor([0, 0, -INF, 0, 0])
    kept = [0, 1, 3, 4]
    close(
        scaled_dot_product_attention(q, k, v, mask), scaled_dot_product_attention(q, k[:, kept], v[:, kept])
    )
    weights = attention_weights(q, k, mask)
    assert (weights[..., 2] == 0).all()
    close(weights.sum(-1), torch.ones(2, 3))


def test_large_scores_stay_finite():
    q, k, v = 100 * randn(0, 3, 4), 100 * randn(1, 5, 4), randn(2, 5, 4)
    got = scaled_dot_product_attention(q, k, v)
    winners = (q @ k.T).argmax(-1)
    close(got, v[winners])


def test_attention_is_blind_to_the_order_of_keys():
    q, k, v = randn(0, 3, 4), randn(1, 5, 4), randn(2, 5, 4)
    order = torch.tensor([3, 0, 4, 1, 2])
    close(scaled_dot_product_attention(q, k[order], v[order]), scaled_dot_product_attention(q, k, v))


def test_attention_gradients():
    inputs = [randn(i, 2, n, 4, dtype=torch.float64).requires_grad_() for i, n in enumerate([3, 5, 5])]
    mask = torch.tensor([0, 0, -INF, 0, 0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda q, k, v: scaled_dot_product_attention(q, k, v, mask), inputs)


# heads


def test_split_heads_gives_each_head_consecutive_columns():
    x = torch.arange(2 * 3 * 8.0).reshape(2, 3, 8)
    heads = split_heads(x, 4)
    assert heads.shape == (2, 4, 3, 2)
    for h in range(4):
        assert torch.equal(heads[:, h], x[..., 2 * h : 2 * h + 2])
    assert torch.equal(split_heads(x, 1)[:, 0], x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_undoes_split(dtype):
    x = randn(0, 2, 5, 12, dtype=dtype)
    assert torch.equal(merge_heads(split_heads(x, 3)), x)
    y = randn(1, 2, 3, 5, 4, dtype=dtype)
    assert torch.equal(split_heads(merge_heads(y), 3), y)
    assert torch.equal(merge_heads(y), torch.cat(y.unbind(1), dim=-1))


def test_split_heads_refuses_widths_that_heads_do_not_divide():
    with pytest.raises(ValueError, match="split_heads needs d_hidden % heads == 0, got d_hidden=10, heads=4"):
        split_heads(torch.zeros(1, 2, 10), 4)
    with pytest.raises(ValueError, match="heads=0"):
        split_heads(torch.zeros(1, 2, 10), 0)


# multi-head attention


@pytest.mark.parametrize("same", [True, False])
def test_multi_head_attention_agrees_with_torch_nn(same):
    d_hidden, heads = 12, 3
    x_query, x_key = randn(0, 2, 4, d_hidden), randn(1, 2, 4 if same else 7, d_hidden)
    if same:
        x_key = x_query
    w_q, w_k, w_v, w_o = (0.3 * randn(10 + i, d_hidden, d_hidden) for i in range(4))
    module = torch.nn.MultiheadAttention(d_hidden, heads, bias=False, batch_first=True)
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat([w_q.T, w_k.T, w_v.T]))  # torch keeps (outputs, inputs)
        module.out_proj.weight.copy_(w_o.T)
        want, _ = module(x_query, x_key, x_key)
    close(multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_multi_head_attention_is_a_loop_over_heads(dtype, batch):
    d_hidden, heads, d_k, d_v = 6, 3, 2, 4
    x_query, x_key = randn(0, *batch, 3, d_hidden, dtype=dtype), randn(1, *batch, 5, d_hidden, dtype=dtype)
    w_q, w_k = (0.3 * randn(i, d_hidden, heads * d_k, dtype=dtype) for i in (2, 3))
    w_v = 0.3 * randn(4, d_hidden, heads * d_v, dtype=dtype)
    w_o = 0.3 * randn(5, heads * d_v, d_hidden, dtype=dtype)
    mask = torch.zeros(heads, 3, 5, dtype=dtype)
    mask[1, :, 0] = -INF
    mask[2, 0, 3:] = -INF
    got = multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask)
    assert got.dtype == dtype
    want = 0
    for h in range(heads):
        k_columns, v_columns = slice(h * d_k, (h + 1) * d_k), slice(h * d_v, (h + 1) * d_v)
        q, k = x_query.double() @ w_q.double()[:, k_columns], x_key.double() @ w_k.double()[:, k_columns]
        v = x_key.double() @ w_v.double()[:, v_columns]
        mixed = F.scaled_dot_product_attention(q, k, v, mask[h].double())
        want = want + mixed @ w_o.double()[v_columns]  # concatenate and project = sum over heads
    close(got, want)


def test_multi_head_attention_gradients_reach_every_input():
    shapes = [(1, 2, 4), (1, 3, 4), (4, 6), (4, 6), (4, 4), (4, 4)]
    inputs = [randn(i, *s, dtype=torch.float64).requires_grad_() for i, s in enumerate(shapes)]
    assert torch.autograd.gradcheck(lambda *t: multi_head_attention(*t, heads=2), inputs)


def test_multi_head_attention_refuses_widths_that_heads_do_not_divide():
    x, w = torch.zeros(1, 2, 6), torch.zeros(6, 6)
    with pytest.raises(ValueError, match="multi_head_attention needs heads_d_k"):
        multi_head_attention(x, x, w, w, w, w, heads=4)


# parameters


def test_parameter_count_of_the_original_transformer():
    assert attention_parameter_count(512, 8) == 4 * 512 * 512 == 1_048_576
    assert attention_parameter_count(512, 8, d_k=64, d_v=64) == 1_048_576


def test_parameter_count_equals_the_size_of_real_matrices():
    module = torch.nn.MultiheadAttention(24, 4, bias=False)
    assert attention_parameter_count(24, 4) == sum(p.numel() for p in module.parameters())
    # widths of their own: 2·(10×3·4) + (10×3·5) + (3·5×10)
    assert attention_parameter_count(10, 3, d_k=4, d_v=5) == 240 + 150 + 150


def test_parameter_count_with_one_width_left_out():
    assert attention_parameter_count(12, 3, d_k=2) == 2 * 12 * 6 + 2 * 12 * 12
    assert attention_parameter_count(12, 3, d_v=2) == 2 * 12 * 12 + 2 * 12 * 6


@pytest.mark.parametrize("widths", [{}, {"d_k": 4}, {"d_v": 4}])
def test_parameter_count_refuses_a_default_width_that_is_not_whole(widths):
    with pytest.raises(ValueError, match="got d_hidden=100, heads=12"):
        attention_parameter_count(100, 12, **widths)


# positions


def test_sinusoidal_positions_hand_values():
    table = sinusoidal_positions(3, 4)
    assert table.dtype == torch.float32
    close(table[0], torch.tensor([0.0, 1, 0, 1]))
    # the second pair turns 100 times slower: 10000^(2/4)
    close(table[2], torch.tensor([math.sin(2), math.cos(2), math.sin(0.02), math.cos(0.02)]))
    close(sinusoidal_positions(3, 4, base=16.0)[2, 2:], torch.tensor([math.sin(0.5), math.cos(0.5)]))


def test_sinusoidal_positions_agree_with_hugging_face():
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    reference = MarianSinusoidalPositionalEmbedding(50, 16)
    blocks = reference.create_weight() if hasattr(reference, "create_weight") else reference._init_weight()
    blocks = reference.weight if blocks is None else blocks  # sines first, then cosines
    interleaved = torch.stack((blocks[:, :8], blocks[:, 8:]), dim=-1).flatten(-2)
    close(sinusoidal_positions(50, 16), interleaved.detach())


def test_a_shift_of_sinusoidal_positions_is_a_rotation():
    table = sinusoidal_positions(30, 8)
    dots = table @ table.T
    close(dots[5, 9], dots[20, 24])  # depends on the distance alone


def test_sinusoidal_positions_stay_exact_far_out():
    row = sinusoidal_positions(5001, 8)[5000]
    want = [f(5000 / 10000 ** (2 * i / 8)) for i in range(4) for f in (math.sin, math.cos)]
    close(row, torch.tensor(want, dtype=torch.float64))


def test_sinusoidal_positions_refuse_an_odd_width():
    with pytest.raises(ValueError, match="sinusoidal_positions needs an even d_hidden, got d_hidden=5"):
        sinusoidal_positions(3, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_is_a_complex_rotation_of_neighbouring_pairs(dtype):
    x = randn(0, 2, 3, 5, 8, dtype=dtype)
    positions = torch.tensor([0, 3, 4, 4, 900])
    got = apply_rope(x, positions)
    assert got.dtype == dtype
    frequencies = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    turn = torch.polar(torch.ones(5, 4, dtype=torch.float64), positions[:, None] * frequencies)
    want = torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (4, 2))) * turn).flatten(-2)
    # float32 angles near 900 are off by 900 · 2⁻²⁴
    torch.testing.assert_close(
        got.double(), want, rtol=0, atol=max(TOLERANCE[dtype], 3e-4 * (dtype == torch.float32))
    )


def test_rope_agrees_with_hugging_face():
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb, create_sinusoidal_positions

    x = randn(0, 1, 6, 2, 8)  # GPT-J: (batch, seq, heads, head_dim), neighbouring pairs
    sin, cos = torch.chunk(create_sinusoidal_positions(6, 8)[None], 2, dim=-1)
    want = apply_rotary_pos_emb(x, sin, cos).transpose(1, 2)
    close(apply_rope(x.transpose(1, 2), torch.arange(6)), want)


def test_rope_scores_depend_on_the_distance_alone():
    q, k = randn(0, 1, 16, dtype=torch.float64), randn(1, 1, 16, dtype=torch.float64)

    def score(m, n):
        return (apply_rope(q, torch.tensor([m])) * apply_rope(k, torch.tensor([n]))).sum()

    close(score(7, 3), score(104, 100))
    assert (score(7, 3) - score(3, 7)).abs() > 0.1  # the sign of the distance matters


def test_rope_broadcasts_positions_and_takes_any_integer_dtype():
    x = randn(0, 2, 3, 4, 6)
    per_row = torch.tensor([[0, 1, 2, 3], [7, 0, 11, 2]])
    got = apply_rope(x, per_row[:, None])  # (batch, 1, seq)
    for b in range(2):
        close(got[b], apply_rope(x[b], per_row[b].int()))
    close(apply_rope(x, torch.tensor(5)), apply_rope(x, torch.full((4,), 5)))


def test_rope_base_sets_the_speed():
    x = torch.tensor([[0.0, 0, 1, 0]])
    got = apply_rope(x, torch.tensor([2]), base=16.0)  # second pair: 2 / 16^(1/2) = 0.5
    close(got, torch.tensor([[0.0, 0, math.cos(0.5), math.sin(0.5)]]))


def test_rope_gradient_and_length():
    x = randn(0, 3, 4, dtype=torch.float64).requires_grad_()
    positions = torch.tensor([2, 0, 9])
    assert torch.autograd.gradcheck(lambda t: apply_rope(t, positions), [x])
    close(apply_rope(x, positions).norm(dim=-1), x.norm(dim=-1))


def test_rope_refuses_an_odd_width():
    with pytest.raises(ValueError, match="apply_rope needs an even head_dim, got head_dim=5"):
        apply_rope(torch.zeros(2, 5), torch.arange(2))


# the block and the model


def test_block_agrees_with_torch_nn():
    d_hidden, heads, d_ff = 8, 2, 12
    weights, x = block_weights(0), randn(99, 2, 5, d_hidden)
    layer = torch.nn.TransformerEncoderLayer(
        d_hidden, heads, d_ff, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    ).eval()
    attention = layer.self_attn
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.cat([weights.w_q.T, weights.w_k.T, weights.w_v.T]))
        attention.out_proj.weight.copy_(weights.w_o.T)
        attention.in_proj_bias.zero_(), attention.out_proj.bias.zero_()
        for module, scale, bias in (
            (layer.norm1, weights.ln1_scale, weights.ln1_bias),
            (layer.norm2, weights.ln2_scale, weights.ln2_bias),
            (layer.linear1, weights.w_up.T, weights.b_up),
            (layer.linear2, weights.w_down.T, weights.b_down),
        ):
            module.weight.copy_(scale), module.bias.copy_(bias)
        want = layer(x, src_mask=causal(5), is_causal=False)
    close(decoder_block(x, weights, heads), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_block_keeps_the_dtype(dtype):
    weights, x = block_weights(3, dtype=dtype), randn(98, 2, 4, 8, dtype=dtype)
    wide = BlockWeights(**{f.name: getattr(weights, f.name).double() for f in fields(weights)})
    got = decoder_block(x, weights, 2)
    assert got.dtype == dtype
    close(got, decoder_block(x.double(), wide, 2))


def test_block_hides_the_future():
    weights, x = block_weights(0), randn(99, 1, 6, 8)
    changed = x.clone()
    changed[:, 3:] += randn(97, 1, 3, 8)
    before, after = decoder_block(x, weights, 2), decoder_block(changed, weights, 2)
    close(after[:, :3], before[:, :3])
    assert ((after - before)[:, 3:].abs().amax(-1) > 1e-3).all()


def test_block_with_zero_output_projections_is_the_identity():
    weights, x = block_weights(0), randn(99, 2, 5, 8)
    silent = {n: torch.zeros_like(getattr(weights, n)) for n in ("w_o", "w_down", "b_down")}
    assert torch.equal(decoder_block(x, replace(weights, **silent), 2), x)


def test_block_gradients_reach_every_weight():
    weights = block_weights(0, dtype=torch.float64)
    names = [f.name for f in fields(weights)]
    inputs = [randn(99, 1, 3, 8, dtype=torch.float64), *(getattr(weights, n) for n in names)]
    inputs = [t.requires_grad_() for t in inputs]

    def run(x, *parts):
        return decoder_block(x, BlockWeights(**dict(zip(names, parts, strict=True))), 2)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_block_uses_its_heads():
    weights, x = block_weights(0), randn(99, 1, 5, 8)
    assert (decoder_block(x, weights, 2) - decoder_block(x, weights, 4)).abs().max() > 1e-3


def test_logits_are_causal_and_see_the_order():
    model = random_decoder(
        vocab=11, layers=2, d_hidden=8, d_ff=16, generator=torch.Generator().manual_seed(0)
    )
    ids = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 9]])
    logits = decoder_logits(ids, model, heads=2)
    assert logits.shape == (2, 4, 11)
    close(decoder_logits(ids[:, :3], model, heads=2), logits[:, :3])
    assert (logits[0, 2] - logits[1, 2]).abs().max() > 1e-3  # same tokens before, another order
    assert (decoder_logits(ids, model, heads=4) - logits).abs().max() > 1e-3


def test_logits_are_embedding_positions_blocks_norm_and_projection():
    model = random_decoder(
        vocab=11, layers=0, d_hidden=8, d_ff=16, generator=torch.Generator().manual_seed(0)
    )
    model = replace(model, ln_scale=randn(1, 8), ln_bias=randn(2, 8))
    ids = torch.tensor([[5, 7]])
    x = model.embedding[ids] + sinusoidal_positions(2, 8)
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / (centred.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    close(decoder_logits(ids, model, heads=1), (normed * model.ln_scale + model.ln_bias) @ model.w_vocab)


def test_random_decoder_follows_its_generator():
    def draw(seed):
        return random_decoder(7, 2, 8, 16, torch.Generator().manual_seed(seed))

    assert torch.equal(draw(0).w_vocab, draw(0).w_vocab)
    assert not torch.equal(draw(0).w_vocab, draw(1).w_vocab)
    model = draw(0)
    assert model.embedding.shape == (7, 8) and model.w_vocab.shape == (8, 7) and len(model.blocks) == 2
    assert model.blocks[0].w_up.shape == (8, 16)
    assert not torch.equal(model.blocks[0].w_q, model.blocks[1].w_q)


@pytest.mark.parametrize("layers, seq, d_ff, vocab", [(1, 4, 16, 11), (3, 7, 24, 5)])
def test_flops_are_what_torch_counts(layers, seq, d_ff, vocab):
    model = random_decoder(vocab, layers, 8, d_ff, torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        decoder_logits(torch.zeros(1, seq, dtype=torch.int64), model, heads=2)
    assert decoder_flops(seq, layers, 8, d_ff, vocab) == counter.get_total_flops()
