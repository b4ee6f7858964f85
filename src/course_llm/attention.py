"""Attention and the decoder-only transformer, from one head to logits.

Idea of the chapter: a token looks at other tokens by comparing its query with their keys, and takes a
weighted mean of their values. Many such heads side by side, a feed-forward layer behind them, two residual
connections and a norm before each: that is a block. A decoder is a stack of blocks that maps token ids to
logits of the next token. Attention itself does not see order; positions enter by an added vector
(sinusoidal) or by a rotation of queries and keys (RoPE).

Row vectors times weights throughout (`x @ w`); heads are consecutive column blocks.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from course_llm.weights import BlockWeights, DecoderWeights


def attention_weights(
    q: Float[Tensor, "*batch queries d_k"],
    k: Float[Tensor, "*batch keys d_k"],
    mask: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, "*batch queries keys"]:
    """Compares queries with keys and returns weights that sum to 1 over the keys (Vaswani et al. 2017).

    `mask` is additive: 0 where a query may attend, `-inf` where it may not; it broadcasts to the scores, and
    at least one key is left in every row.

    Args:
        q: queries.
        k: keys, as wide as the queries.
        mask: see above; None hides nothing.

    Numerics: softmax in float32 for half-precision inputs; the result has the dtype of `q`.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (*batch, queries, keys)
    if mask is not None:
        scores = scores + mask
    # sums of exponentials in half precision keep two or three digits
    softmax_dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.softmax(scores, dim=-1, dtype=softmax_dtype).to(q.dtype)


def scaled_dot_product_attention(
    q: Float[Tensor, "*batch queries d_k"],
    k: Float[Tensor, "*batch keys d_k"],
    v: Float[Tensor, "*batch keys d_v"],
    mask: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, "*batch queries d_v"]:
    """Averages the values with weights `softmax(q @ k.T / sqrt(d_k))` (Vaswani et al. 2017, eq. 1).

    Args:
        q: queries, d_k numbers each.
        k: keys, as wide as the queries.
        v: values, one per key; their width d_v may differ from d_k.
        mask: additive, broadcast to `(*batch, queries, keys)`: 0 = may attend, `-inf` = may not. None hides
            nothing. Every query has at least one key left.

    Numerics: stable for large scores; the result has the dtype of `q`.
    """
    return attention_weights(q, k, mask) @ v


def _to_heads(x: Float[Tensor, "*batch seq width"], heads: int) -> Float[Tensor, "*batch heads seq head_dim"]:
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def _from_heads(x: Float[Tensor, "*batch heads seq head_dim"]) -> Float[Tensor, "*batch seq width"]:
    return x.transpose(-2, -3).flatten(-2)


def _check_heads(function: str, axis: str, width: int, heads: int) -> None:
    if heads < 1 or width % heads:
        raise ValueError(f"{function} needs {axis} % heads == 0, got {axis}={width}, heads={heads}")


def split_heads(
    x: Float[Tensor, "batch seq d_hidden"], heads: int
) -> Float[Tensor, "batch heads seq head_dim"]:
    """Cuts the last axis into `heads` consecutive blocks, one per head (Vaswani et al. 2017, sec. 3.2.2).

    Args:
        x: the vectors of all heads side by side; head 0 owns the first `d_hidden / heads` columns, head 1
            the next, and so on.
        heads: number of heads, a divisor of d_hidden.

    Raises:
        ValueError: heads does not divide d_hidden (optional in the exercise).
    """
    _check_heads("split_heads", "d_hidden", x.shape[-1], heads)
    return _to_heads(x, heads)


def merge_heads(x: Float[Tensor, "batch heads seq head_dim"]) -> Float[Tensor, "batch seq d_hidden"]:
    """Puts the heads of each position side by side, undoing `split_heads` (Vaswani et al. 2017, 3.2.2).

    Args:
        x: one vector per head and position; `d_hidden = heads * head_dim`.
    """
    return _from_heads(x)


def multi_head_attention(
    x_query: Float[Tensor, "*batch queries d_hidden"],
    x_key: Float[Tensor, "*batch keys d_hidden"],
    w_q: Float[Tensor, "d_hidden heads_d_k"],
    w_k: Float[Tensor, "d_hidden heads_d_k"],
    w_v: Float[Tensor, "d_hidden heads_d_v"],
    w_o: Float[Tensor, "heads_d_v d_hidden"],
    heads: int,
    mask: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, "*batch queries d_hidden"]:
    """Runs `heads` attentions side by side, concatenates and projects them (Vaswani et al. 2017, sec. 3.2.2).

    Self-attention when the two inputs are the same, cross-attention when they differ.

    Args:
        x_query: the positions that ask; queries come from here.
        x_key: the positions that are looked at; keys and values come from here.
        w_q: projection to the queries of all heads, `heads * d_k` columns; each head owns d_k consecutive
            ones.
        w_k: projection to the keys of all heads, in the same columns.
        w_v: projection to the values, `heads * d_v` columns, d_v consecutive ones per head; d_v may differ
            from d_k.
        w_o: projection of the concatenated heads back to d_hidden.
        heads: number of heads.
        mask: additive (0 = may attend, `-inf` = may not), broadcast to `(*batch, heads, queries, keys)`. None
            hides nothing.

    Raises:
        ValueError: heads does not divide the columns of the projections (optional in the exercise).
    """
    _check_heads("multi_head_attention", "heads_d_k", w_q.shape[-1], heads)
    _check_heads("multi_head_attention", "heads_d_v", w_v.shape[-1], heads)
    q = _to_heads(x_query @ w_q, heads)  # (*batch, heads, queries, d_k)
    k = _to_heads(x_key @ w_k, heads)  # (*batch, heads, keys, d_k)
    v = _to_heads(x_key @ w_v, heads)  # (*batch, heads, keys, d_v)
    mixed = scaled_dot_product_attention(q, k, v, mask)  # (*batch, heads, queries, d_v)
    return _from_heads(mixed) @ w_o


def attention_parameter_count(
    d_hidden: int, heads: int, d_k: int | None = None, d_v: int | None = None
) -> int:
    """Counts the weights of w_q, w_k, w_v and w_o, no biases (Vaswani et al. 2017, sec. 3.2.2).

    Args:
        d_hidden: width of the model.
        heads: number of heads.
        d_k: width of one head's queries and keys; `d_hidden / heads` when left out.
        d_v: width of one head's values; `d_hidden / heads` when left out.

    Raises:
        ValueError: a width is left out and `d_hidden / heads` is not a whole number.
    """
    if d_k is None or d_v is None:
        _check_heads("attention_parameter_count", "d_hidden", d_hidden, heads)
    d_k = d_hidden // heads if d_k is None else d_k
    d_v = d_hidden // heads if d_v is None else d_v
    queries_and_keys = 2 * d_hidden * heads * d_k
    values_and_output = 2 * d_hidden * heads * d_v
    return queries_and_keys + values_and_output


def sinusoidal_positions(seq: int, d_hidden: int, base: float = 10000.0) -> Float[Tensor, "seq d_hidden"]:
    """Returns the position vectors of the original transformer, float32 (Vaswani et al. 2017, sec. 3.5).

    Column `2 * i` holds the sine of `position / base ** (2 * i / d_hidden)`, column `2 * i + 1` the cosine.

    Args:
        seq: number of positions, counted from 0.
        d_hidden: width of the model, even.
        base: the larger, the slower the last columns turn.

    Raises:
        ValueError: d_hidden is odd.
    """
    if d_hidden % 2:
        raise ValueError(f"sinusoidal_positions needs an even d_hidden, got d_hidden={d_hidden}")
    # float64: in float32, distant angles are off in the fourth decimal
    frequencies = base ** (-torch.arange(0, d_hidden, 2, dtype=torch.float64) / d_hidden)
    angles = torch.arange(seq, dtype=torch.float64)[:, None] * frequencies  # (seq, d_hidden/2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).float()


def apply_rope(
    x: Float[Tensor, "*batch seq head_dim"], positions: Int[Tensor, "..."], base: float = 10000.0
) -> Float[Tensor, "*batch seq head_dim"]:
    """Rotates columns `(2 * i, 2 * i + 1)` by `position / base ** (2 * i / head_dim)` (RoFormer, eq. 34).

    The dot product of two rotated vectors depends on their positions through the distance alone.

    Args:
        x: queries or keys of one or more heads; head_dim is even.
        positions: integers, broadcast to `x.shape[:-1]`; absolute and arbitrary (gaps, repeats, any start).
        base: the larger, the slower the last columns turn.

    Raises:
        ValueError: head_dim is odd (optional in the exercise).

    Numerics: angles in float32 at least, because half precision does not hold large positions.
    """
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ValueError(f"apply_rope needs an even head_dim, got head_dim={head_dim}")
    angle_dtype = torch.promote_types(x.dtype, torch.float32)
    pair_starts = torch.arange(0, head_dim, 2, dtype=angle_dtype, device=x.device)
    frequencies = base ** (-pair_starts / head_dim)  # (head_dim/2,)
    angles = positions[..., None].to(angle_dtype) * frequencies  # (..., seq, head_dim/2)
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def decoder_block(
    x: Float[Tensor, "batch seq d_hidden"], weights: BlockWeights, heads: int
) -> Float[Tensor, "batch seq d_hidden"]:
    """Applies a pre-norm decoder block: causal attention, GELU feed-forward (GPT-2, Radford et al. 2019).

    `h = x + MultiHead(norm1(x))`, and the result is `h + FFN(norm2(h))`; FFN is the feed-forward layer.
    Causal: a position attends to itself and to earlier ones. No position encoding, no norm at the end.

    Args:
        x: the residual stream.
        weights: norms (scale and bias), the four attention projections without biases, the feed-forward
            layer with biases.
        heads: number of heads.

    Numerics: LayerNorm with epsilon 1e-5, exact GELU (not the tanh approximation).
    """
    seq, d_hidden = x.shape[1:]
    future = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(1)
    mask = torch.zeros(seq, seq, dtype=x.dtype, device=x.device).masked_fill(future, -torch.inf)

    normed = F.layer_norm(x, (d_hidden,), weights.ln1_scale, weights.ln1_bias, eps=1e-5)
    x = x + multi_head_attention(
        normed, normed, weights.w_q, weights.w_k, weights.w_v, weights.w_o, heads, mask
    )
    normed = F.layer_norm(x, (d_hidden,), weights.ln2_scale, weights.ln2_bias, eps=1e-5)
    return x + F.gelu(normed @ weights.w_up + weights.b_up) @ weights.w_down + weights.b_down


def decoder_logits(
    ids: Int[Tensor, "batch seq"], weights: DecoderWeights, heads: int
) -> Float[Tensor, "batch seq vocab"]:
    """Maps token ids to logits of the next token at every position: the whole model as one function.

    Embedding plus sinusoidal positions, the blocks, a final norm, the projection to the vocabulary.

    Args:
        ids: token ids, at positions 0, 1, and so on.
        weights: of the whole model.
        heads: number of heads in every block.
    """
    x = weights.embedding[ids]  # (batch, seq, d_hidden)
    x = x + sinusoidal_positions(*x.shape[1:]).to(x)
    for block in weights.blocks:
        x = decoder_block(x, block, heads)
    x = F.layer_norm(x, x.shape[-1:], weights.ln_scale, weights.ln_bias, eps=1e-5)
    return x @ weights.w_vocab


def decoder_flops(seq: int, layers: int, d_hidden: int, d_ff: int, vocab: int) -> int:
    """Counts the multiplications and additions in the matrix products of one forward pass of one sequence.

    A product of `(m, k)` and `(k, n)` costs `2 * m * k * n`. Heads together are d_hidden wide. The scores are
    counted whole, as a plain matrix product computes them, the masked half included.

    Args:
        seq: tokens of the sequence.
        layers: blocks.
        d_hidden: width of the model.
        d_ff: width of the feed-forward layer.
        vocab: number of tokens.
    """
    projections = 2 * seq * 4 * d_hidden**2
    scores_and_mixing = 2 * 2 * seq**2 * d_hidden
    feed_forward = 2 * seq * 2 * d_hidden * d_ff
    return layers * (projections + scores_and_mixing + feed_forward) + 2 * seq * d_hidden * vocab


def random_decoder(
    vocab: int, layers: int, d_hidden: int, d_ff: int, generator: torch.Generator
) -> DecoderWeights:
    """Draws the weights of an untrained decoder, normal with variance `1 / inputs`: activations of order one.

    Args:
        vocab: number of tokens.
        layers: blocks.
        d_hidden: width of the model.
        d_ff: width of the feed-forward layer.
        generator: the only source of randomness.
    """

    def normal(inputs: int, outputs: int) -> Tensor:
        return torch.randn(inputs, outputs, generator=generator) / math.sqrt(inputs)

    def ones() -> Tensor:
        return torch.ones(d_hidden)

    def zeros(width: int = d_hidden) -> Tensor:
        return torch.zeros(width)

    def block() -> BlockWeights:
        projections = [normal(d_hidden, d_hidden) for _ in range(4)]
        up, down = normal(d_hidden, d_ff), normal(d_ff, d_hidden)
        return BlockWeights(ones(), zeros(), *projections, ones(), zeros(), up, zeros(d_ff), down, zeros())

    embedding = torch.randn(vocab, d_hidden, generator=generator)
    blocks = tuple(block() for _ in range(layers))
    return DecoderWeights(embedding, blocks, ones(), zeros(), normal(d_hidden, vocab))
