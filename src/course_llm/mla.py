"""Multi-head latent attention (MLA): cache one small latent per token instead of its keys and values.

Keys and values of all heads are linear functions of one hidden row, and a learned low-rank factorisation
makes them functions of a latent `c` of a few hundred numbers. Only `c` is cached. Two facts make this work.
The expansion matrices can be absorbed into the query and the output, so that keys and values are never
built. Rotary positions would stand in the way of that, so they travel on a separate small key `k_r`
that all heads share (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Row vectors times weights; heads are consecutive column blocks. No norms and no query compression here.
"""

from fractions import Fraction
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from course_llm.attention import apply_rope, merge_heads, split_heads
from course_llm.weights import MLAWeights


def low_rank_factors(
    w: Float[Tensor, "rows cols"], rank: int
) -> tuple[Float[Tensor, "rows {rank}"], Float[Tensor, "{rank} cols"]]:
    """Factors a matrix into its best approximation `a @ b` of a given rank (SVD; Eckart and Young, 1936).

    Args:
        w: the matrix to approximate.
        rank: columns of a and rows of b, from 1 to `min(rows, cols)`.

    Returns:
        `(a, b)`. How the singular values are shared between a and b is free: only `a @ b` is determined.

    Raises:
        ValueError: rank is below 1 or above `min(rows, cols)`.

    Numerics: half precision is decomposed in float32.
    """
    if not 1 <= rank <= min(w.shape):
        raise ValueError(f"low_rank_factors needs 1 <= rank <= {min(w.shape)}, got rank={rank}")
    u, s, vh = torch.linalg.svd(w.to(_at_least_float32(w)), full_matrices=False)
    return (u[:, :rank] * s[:rank]).to(w.dtype), vh[:rank].to(w.dtype)


def compress_kv(
    h: Float[Tensor, "batch seq d_hidden"], w_dkv: Float[Tensor, "d_hidden d_c"]
) -> Float[Tensor, "batch seq d_c"]:
    """Compresses each hidden row to the latent that is cached (DeepSeek-V2, eq. 9).

    Args:
        h: hidden rows.
        w_dkv: down-projection, shared by keys, values and all heads.
    """
    return h @ w_dkv


def expand_kv(
    c: Float[Tensor, "batch seq d_c"],
    w_uk: Float[Tensor, "d_c width"],
    w_uv: Float[Tensor, "d_c width"],
    heads: int,
) -> tuple[Float[Tensor, "batch {heads} seq d_h"], Float[Tensor, "batch {heads} seq d_h"]]:
    """Expands latents to the keys and values of every head (DeepSeek-V2, eqs. 10 and 11).

    Args:
        c: latents.
        w_uk: up-projection to the keys; its columns are `heads` consecutive blocks of width d_h.
        w_uv: up-projection to the values, in the same blocks.
        heads: number of heads, a divisor of the width.

    Returns:
        `(k, v)`.

    Raises:
        ValueError: heads does not divide the width (optional in the exercise).
    """
    return split_heads(c @ w_uk, heads), split_heads(c @ w_uv, heads)


def latent_attention(
    h: Float[Tensor, "batch seq d_hidden"], weights: MLAWeights
) -> Float[Tensor, "batch seq d_hidden"]:
    """Attends causally from latents, in the form that expands them first (DeepSeek-V2, eqs. 9 to 19).

    Args:
        h: hidden rows, at positions 0, 1, and so on.
        weights: the projections; head i's query and key are its content part (d_h) followed by its
            rotated part (d_r). The rotated key is one for all heads.

    Numerics: softmax in at least float32, scores scaled by `1 / sqrt(d_h + d_r)`.
    """
    c = compress_kv(h, weights.w_dkv)
    k_r = apply_rope(h @ weights.w_kr, torch.arange(h.shape[1], device=h.device))
    return latent_attention_expanded(h, c, k_r, weights)


def latent_attention_expanded(
    h: Float[Tensor, "batch queries d_hidden"],
    c: Float[Tensor, "batch keys d_c"],
    k_r: Float[Tensor, "batch keys d_r"],
    weights: MLAWeights,
) -> Float[Tensor, "batch queries d_hidden"]:
    """Attends from cached latents by building every key and value: the slow twin of the absorbed form.

    Args:
        h: the last hidden rows of the sequence.
        c: latents of the whole sequence.
        k_r: rotated shared keys of the whole sequence.
        weights: the projections.

    Raises:
        ValueError: there are more rows of h than latents.
    """
    q_c, q_r = _queries(h, c.shape[1], weights, "latent_attention_expanded")
    k_c, v = expand_kv(c, weights.w_uk, weights.w_uv, weights.heads)
    scores = q_c @ k_c.mT + q_r @ k_r[:, None].mT  # (batch, heads, queries, keys)
    heads_out = _causal_weights(scores, q_c.shape[-1] + q_r.shape[-1]) @ v
    return merge_heads(heads_out) @ weights.w_o


def latent_attention_absorbed(
    h: Float[Tensor, "batch queries d_hidden"],
    c: Float[Tensor, "batch keys d_c"],
    k_r: Float[Tensor, "batch keys d_r"],
    weights: MLAWeights,
) -> Float[Tensor, "batch queries d_hidden"]:
    """Attends in the latent space, without building a key or a value (DeepSeek-V2, section 2.1.2).

    For each head `(q @ w_uk.T) @ c.T` replaces `q @ (c @ w_uk).T`, and `(a @ c) @ w_uv` replaces
    `a @ (c @ w_uv)`, where `a` are the attention weights. The result equals that of the expanded form; the
    cost per cached token no longer holds a matrix product with `w_uk` or `w_uv`.

    Args:
        h: the last hidden rows of the sequence: all of them, a chunk, or one.
        c: latents of the whole sequence, those of h included.
        k_r: shared keys of the whole sequence, already rotated.
        weights: the projections.

    Raises:
        ValueError: there are more rows of h than latents (optional in the exercise).

    Numerics: softmax in at least float32, scores scaled by `1 / sqrt(d_h + d_r)`.
    """
    q_c, q_r = _queries(h, c.shape[1], weights, "latent_attention_absorbed")
    per_head = (weights.w_uk.shape[0], weights.heads, q_c.shape[-1])
    w_uk, w_uv = weights.w_uk.reshape(per_head), weights.w_uv.reshape(per_head)  # (d_c, heads, d_h)
    q_latent = torch.einsum("bhqd,chd->bhqc", q_c, w_uk)
    scores = torch.einsum("bhqc,bkc->bhqk", q_latent, c) + torch.einsum("bhqr,bkr->bhqk", q_r, k_r)
    # the width is that of the key the scores stand for, not that of the latent they are computed with
    attention = _causal_weights(scores, q_c.shape[-1] + q_r.shape[-1])
    mixed = torch.einsum("bhqk,bkc->bhqc", attention, c)
    return merge_heads(torch.einsum("bhqc,chd->bhqd", mixed, w_uv)) @ weights.w_o


def decoupled_rope_scores(
    q_c: Float[Tensor, "batch heads seq d_h"],
    q_r: Float[Tensor, "batch heads seq d_r"],
    k_c: Float[Tensor, "batch heads seq d_h"],
    k_r: Float[Tensor, "batch seq d_r"],
    positions: Int[Tensor, " seq"],
) -> Float[Tensor, "batch heads seq seq"]:
    """Scores content and position on separate parts of the key (DeepSeek-V2, eqs. 14 to 18).

    Args:
        q_c: content part of the queries, never rotated.
        q_r: positional part of the queries, not yet rotated.
        k_c: content part of the keys, never rotated.
        k_r: positional key, one for all heads, not yet rotated.
        positions: absolute position of each row, any integers.

    Returns:
        Scores of every query with every key, scaled by `1 / sqrt(d_h + d_r)`, without a mask.
    """
    rotated_q, rotated_k = apply_rope(q_r, positions), apply_rope(k_r, positions)
    scores = q_c @ k_c.mT + rotated_q @ rotated_k[:, None].mT
    return scores * (q_c.shape[-1] + q_r.shape[-1]) ** -0.5


class LatentCache:
    """Keeps the latents and the rotated shared keys of one layer: `d_c + d_r` numbers per token.

    Args:
        batch: sequences held at once.
        max_seq: tokens per sequence there is room for; the buffers are allocated once.
        d_c: width of the latent.
        d_r: width of the shared rotary key.
        dtype: dtype of the buffers.
        device: device of the buffers.

    Attributes:
        length: tokens held so far.
    """

    def __init__(
        self,
        batch: int,
        max_seq: int,
        d_c: int,
        d_r: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.c = torch.zeros(batch, max_seq, d_c, dtype=dtype, device=device)
        self.k_r = torch.zeros(batch, max_seq, d_r, dtype=dtype, device=device)
        self.length = 0

    def update(
        self, c: Float[Tensor, "batch new d_c"], k_r: Float[Tensor, "batch new d_r"]
    ) -> tuple[Float[Tensor, "batch seq d_c"], Float[Tensor, "batch seq d_r"]]:
        """Appends new rows and returns all rows so far.

        Args:
            c: latents of the new tokens.
            k_r: shared keys of the new tokens, already rotated.

        Returns:
            `(c, k_r)` of every token held, oldest first.

        Raises:
            ValueError: more than max_seq tokens would be held, or (optional in the exercise) rows have
                another shape, dtype or device; nothing is changed then.
        """
        new = c.shape[1]
        for name, rows, buffer in (("c", c, self.c), ("k_r", k_r, self.k_r)):
            expected = (buffer.shape[0], new, buffer.shape[2])
            if rows.shape != expected or rows.dtype != buffer.dtype or rows.device != buffer.device:
                raise ValueError(
                    f"LatentCache.update needs {name} of shape {expected}, {buffer.dtype}, {buffer.device}, "
                    f"got {tuple(rows.shape)}, {rows.dtype}, {rows.device}"
                )
        if self.length + new > self.c.shape[1]:
            raise ValueError(
                f"LatentCache.update needs length + new <= max_seq={self.c.shape[1]}, "
                f"got length={self.length}, new={new}"
            )
        # detached: a cache serves inference, and a graph through every step would grow without bound
        self.c[:, self.length : self.length + new] = c.detach()
        self.k_r[:, self.length : self.length + new] = k_r.detach()
        self.length += new
        return self.c[:, : self.length], self.k_r[:, : self.length]

    def reset(self) -> None:
        """Forgets every token and keeps the buffers."""
        self.length = 0


def latent_decode_step(
    h: Float[Tensor, "batch 1 d_hidden"], weights: MLAWeights, cache: Any
) -> Float[Tensor, "batch 1 d_hidden"]:
    """Attends from the newest token to all tokens so far, through the latent cache.

    Args:
        h: hidden row of the newest token; its position is `cache.length` before the update.
        weights: the projections.
        cache: has `length` and `update(c, k_r)` as `LatentCache`; the rotated key is stored.

    Returns:
        The row that `latent_attention` gives for this token when it sees the whole sequence.
    """
    c = compress_kv(h, weights.w_dkv)
    k_r = apply_rope(h @ weights.w_kr, torch.tensor([cache.length], device=h.device))
    return latent_attention_absorbed(h, *cache.update(c, k_r), weights)


def cache_elements_per_token(
    kind: str,
    heads: int,
    head_dim: int,
    groups: int | None = None,
    d_c: int | None = None,
    d_r: int | None = None,
) -> int:
    """Counts the numbers that one layer caches for one token (DeepSeek-V2, table 1).

    Args:
        kind: `"mha"`, `"gqa"`, `"mqa"` or `"mla"`.
        heads: query heads.
        head_dim: width of one head's key, and of its value.
        groups: key-value heads; needed for `"gqa"`.
        d_c: width of the latent; needed for `"mla"`.
        d_r: width of the shared rotary key; needed for `"mla"`.

    Raises:
        ValueError: an unknown kind, or an argument that the kind needs is missing.
    """
    if kind == "mha":
        return 2 * heads * head_dim
    if kind == "mqa":
        return 2 * head_dim
    if kind == "gqa":
        if groups is None:
            raise ValueError("cache_elements_per_token needs groups for kind='gqa', got None")
        return 2 * groups * head_dim
    if kind == "mla":
        if d_c is None or d_r is None:
            raise ValueError(f"cache_elements_per_token needs d_c and d_r for kind='mla', got {d_c=}, {d_r=}")
        # one latent serves keys and values, and one rotary key serves all heads
        return d_c + d_r
    raise ValueError(f"cache_elements_per_token needs kind 'mha', 'gqa', 'mqa' or 'mla', got {kind!r}")


def largest_batch(
    memory_bytes: float | int,
    model_bytes: float | int,
    seq: int,
    layers: int,
    elements_per_token: int,
    bytes_per_element: float | int,
) -> int:
    """Counts the sequences whose cache fits beside the model, 0 when the model itself does not fit.

    Args:
        memory_bytes: memory of the device, bytes.
        model_bytes: memory that the weights take, bytes.
        seq: tokens per sequence.
        layers: layers of the model.
        elements_per_token: cached numbers per token and layer.
        bytes_per_element: bytes per cached number; 0.75 is a 6-bit cache.

    Raises:
        ValueError: a sequence would take no memory, as `seq`, `layers`, `elements_per_token` or
            `bytes_per_element` is not above 0 (optional in the exercise).
    """
    sequence_bytes = Fraction(bytes_per_element) * seq * layers * elements_per_token
    if sequence_bytes <= 0:
        raise ValueError(
            "largest_batch needs seq, layers, elements_per_token, bytes_per_element > 0, got "
            f"{seq=}, {layers=}, {elements_per_token=}, {bytes_per_element=}"
        )
    # fractions: a float quotient can round up to the next whole sequence
    return max(0, (Fraction(memory_bytes) - Fraction(model_bytes)) // sequence_bytes)


def lora_forward(
    x: Float[Tensor, "*batch d_in"],
    w: Float[Tensor, "d_in d_out"],
    a: Float[Tensor, "d_in r"],
    b: Float[Tensor, "r d_out"],
    alpha: float | int,
) -> Float[Tensor, "*batch d_out"]:
    """Applies a weight with a low-rank update beside it, `x @ w + (alpha / r) * x @ a @ b` (LoRA, eq. 3).

    Args:
        x: input rows.
        w: the pretrained weight.
        a: first factor of the update.
        b: second factor; zeros at the start of training, so that the update starts at nothing.
        alpha: strength of the update; divided by the rank r.
    """
    return x @ w + (x @ a) @ b * (alpha / a.shape[1])


def merge_lora(
    w: Float[Tensor, "d_in d_out"],
    a: Float[Tensor, "d_in r"],
    b: Float[Tensor, "r d_out"],
    alpha: float | int,
) -> Float[Tensor, "d_in d_out"]:
    """Merges a low-rank update into its weight, `w + (alpha / r) * a @ b`: no extra cost at inference.

    Args:
        w: the pretrained weight.
        a: first factor of the update.
        b: second factor of the update.
        alpha: strength of the update; divided by the rank r.
    """
    return w + a @ b * (alpha / a.shape[1])


def decode_flops(
    form: str, context_tokens: int, d_hidden: int, heads: int, d_h: int, d_c: int, d_r: int
) -> int:
    """Counts the FLOPs of one layer's attention for one new token, a multiply-add as two.

    Args:
        form: `"expanded"` (every cached latent is expanded) or `"absorbed"`.
        context_tokens: cached tokens, the new one included.
        d_hidden: width of the model.
        heads: attention heads.
        d_h: content width of a head.
        d_c: width of the latent.
        d_r: width of the shared rotary key.

    Raises:
        ValueError: another form.
    """
    projections = d_hidden * (heads * (d_h + d_r) + d_c + d_r) + heads * d_h * d_hidden
    if form == "expanded":
        expansion = context_tokens * d_c * 2 * heads * d_h
        attention = context_tokens * heads * (2 * d_h + d_r)
    elif form == "absorbed":
        expansion = 2 * heads * d_h * d_c  # once per step: W_UK on the query, W_UV on the mixed latent
        attention = context_tokens * heads * (2 * d_c + d_r)
    else:
        raise ValueError(f"decode_flops needs form 'expanded' or 'absorbed', got {form!r}")
    return 2 * (projections + expansion + attention)


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _queries(h: Tensor, keys: int, weights: MLAWeights, caller: str) -> tuple[Tensor, Tensor]:
    """Projects the last rows of a sequence to content and rotated queries, one pair per head."""
    queries = h.shape[1]
    if queries > keys:
        raise ValueError(f"{caller} needs queries <= keys, got queries={queries}, keys={keys}")
    positions = torch.arange(keys - queries, keys, device=h.device)
    q_c = split_heads(h @ weights.w_q, weights.heads)  # (batch, heads, queries, d_h)
    q_r = split_heads(h @ weights.w_qr, weights.heads)  # (batch, heads, queries, d_r)
    return q_c, apply_rope(q_r, positions)


def _causal_weights(scores: Tensor, key_width: int) -> Tensor:
    """Turns raw scores into causal attention weights; the last query sees every key."""
    queries, keys = scores.shape[-2:]
    visible = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril(keys - queries)
    scores = (scores * key_width**-0.5).masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=-1, dtype=_at_least_float32(scores)).to(scores.dtype)
