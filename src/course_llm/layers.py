"""What a decoder is made of: norms, positions, feed-forward networks and attention, with any cache.

`course_llm.model.ModelConfig` says which of each. The modules here are the fast forms; the chapters' functions
(`course_llm.attention`, `course_llm.kv_cache`, `course_llm.mla`) are the plain ones, and the tests say that
they agree. Rotary positions turn the pairs `(2 * i, 2 * i + 1)`, as in the RoFormer paper and in
`course_llm.attention.apply_rope`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1).

    Attributes:
        d_c: width of the latent that stands for keys and values.
        d_cq: width of the latent that queries are made of; None makes them from the hidden state.
        rope_dim: width of the rotated part of queries and of the one rotated key that all heads share.
        value_dim: width of a head's values.
    """

    d_c: int
    d_cq: int | None = None
    rope_dim: int = 64
    value_dim: int = 128


@dataclass(frozen=True)
class RopeScaling:
    """Stretches rotary frequencies to longer contexts: Llama 3's rule or YaRN (arXiv 2309.00071).

    Attributes:
        kind: `"linear"` divides all frequencies by `factor`. `"llama3"` and `"yarn"` divide those of the slow
            pairs, leave those of the fast pairs, and blend between the two borders.
        factor: how many times longer the context becomes.
        original_context: context of pretraining, in tokens.
        low: the border of the slow pairs: those with fewer rotations than this within `original_context` get
            their frequency divided by `factor`. (Llama's `low_freq_factor`, YaRN's `beta_slow`.)
        high: the border of the fast pairs: those with more rotations than this keep their frequency. (Llama's
            `high_freq_factor`, YaRN's `beta_fast`.)
        attention_factor: multiplies cosines and sines, and so what rotated columns add to the scores by its square;
            YaRN's, 1 otherwise.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_context: int = 8192
    low: float = 1.0
    high: float = 4.0
    attention_factor: float = 1.0


def rotary_frequencies(
    dim: int, base: float, scaling: RopeScaling | None, device: Any
) -> Float[Tensor, " half"]:
    """Returns the angle per position of each rotated pair, `base ** (-2 * i / dim)`, slowed by `scaling`; float32.

    Args:
        dim: width that is rotated, even.
        base: the larger, the slower the last pairs turn.
        scaling: for longer contexts; None leaves the frequencies.
        device: where the result lies.
    """
    steps = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
    frequencies = 1.0 / base**steps
    if scaling is None:
        return frequencies
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    if scaling.kind == "llama3":
        turns = scaling.original_context * frequencies / (2 * math.pi)
        keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
        return slow * (1 - keep) + frequencies * keep

    def pair_of(rotations: float) -> float:
        """The pair that turns so many times within the original context (YaRN, eq. 17 to 20)."""
        wave = scaling.original_context / (rotations * 2 * math.pi)
        return dim * math.log(wave) / (2 * math.log(base))

    first, last = max(math.floor(pair_of(scaling.high)), 0), min(math.ceil(pair_of(scaling.low)), dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32, device=device)
    slowed = ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
    return slow * slowed + frequencies * (1 - slowed)


def rotary_tables(
    positions: Int[Tensor, "*rows seq"],
    dim: int,
    base: float,
    scaling: RopeScaling | None,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "*rows 1 seq half"], Float[Tensor, "*rows 1 seq half"]]:
    """Returns cosines and sines of all positions, with an axis for the heads; the angles are float32.

    Args:
        positions: of the tokens.
        dim: width that is rotated, even.
        base: as in `rotary_frequencies`.
        scaling: as in `rotary_frequencies`; its `attention_factor` multiplies both tables.
        dtype: of the tables.
    """
    frequencies = rotary_frequencies(dim, base, scaling, positions.device)
    angles = positions.to(torch.float32).unsqueeze(-2).unsqueeze(-1) * frequencies
    factor = scaling.attention_factor if scaling is not None else 1.0
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(
    x: Float[Tensor, "*batch heads seq dim"], cos: Tensor, sin: Tensor
) -> Float[Tensor, "*batch heads seq dim"]:
    """Turns each pair of columns `(2 * i, 2 * i + 1)` by its angle (RoFormer, arXiv 2104.09864, eq. 34).

    Args:
        x: queries or keys.
        cos: cosines of the angles from `rotary_tables`, one per position and pair.
        sin: their sines.
    """
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)


def sinusoids(
    positions: Int[Tensor, "*rows seq"], d_hidden: int, dtype: torch.dtype
) -> Float[Tensor, "*rows seq d_hidden"]:
    """Returns sinusoidal positions, sine on even and cosine on odd columns (arXiv 1706.03762, §3.5).

    Args:
        positions: of the tokens.
        d_hidden: width of the model, even.
        dtype: of the result.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * rotary_frequencies(
        d_hidden, 10000.0, None, positions.device
    )
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).to(dtype)


class Linear(nn.Linear):
    """A linear layer whose weights stay unset; arguments as in `torch.nn.Linear`.

    `course_llm.model.Decoder.initialise` draws them, or a checkpoint fills them.
    """

    def reset_parameters(self) -> None:
        """Leaves the memory as it is; drawing numbers only to overwrite them takes longer than loading."""


class Embedding(nn.Embedding):
    """An embedding whose weights stay unset, as in `Linear`; arguments as in `torch.nn.Embedding`."""

    def reset_parameters(self) -> None:
        """Leaves the memory as it is."""


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last axis and scales (arXiv 1910.07467); statistics in float32.

    Args:
        dim: width of the last axis.
        eps: added to the mean square before the root.
        device: where to build.
    """

    def __init__(self, dim: int, eps: float, device: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, device=device))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Returns the normed rows, in the dtype of `x`."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


@dataclass
class Step:
    """What all layers share in one forward pass.

    Attributes:
        cos: cosines of the new positions from `rotary_tables`; None without rotary positions.
        sin: sines of the new positions; None without rotary positions.
        mask: boolean, True = may attend, broadcast to `(batch, heads, queries, keys)`; None = no key is hidden.
        causal: no mask is needed but the plain causal one over as many keys as queries.
        cache: keys and values so far, or None; see `course_llm.caches`.
    """

    cos: Float[Tensor, ...] | None = None
    sin: Float[Tensor, ...] | None = None
    mask: Bool[Tensor, ...] | None = None
    causal: bool = True
    cache: Any = None


# numbers in the keys; measured: below, the fused kernel's one call costs less than several
PRODUCTS_FROM = 2**18


def seen_weights(
    scores: Float[Tensor, "*batch queries keys"], mask: Bool[Tensor, ...] | None
) -> Float[Tensor, "*batch queries keys"]:
    """Returns softmax over the keys that the mask lets through, computed in float32 at least.

    A row without any key (padding) comes out as 0, not as NaN.

    Args:
        scores: scaled already.
        mask: True = may attend, broadcast to the scores; None hides no key.
    """
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
    return weights if mask is None else weights.masked_fill(~mask, 0)


def attend_by_products(
    rows: Float[Tensor, "batch kv_heads queries d_k"],
    k: Float[Tensor, "batch kv_heads keys d_k"],
    v: Float[Tensor, "batch kv_heads keys d_v"],
    mask: Bool[Tensor, ...] | None,
    scale: float,
) -> Float[Tensor, "batch kv_heads queries d_v"]:
    """Attends with two matrix products per key-value head, whose queries are the rows.

    Args:
        rows: the query heads that share a key-value head, one row each.
        k: keys.
        v: their values.
        mask: True = may attend, broadcast to the scores; None hides no key.
        scale: factor of the scores.
    """
    queries, keys = rows.flatten(0, 1) * scale, k.flatten(0, 1)
    if queries.shape[1] == 1:
        scores = torch.bmm(queries, keys.mT)
    else:  # a CPU multiplies keys with a few columns twice as fast as a few rows with keys
        scores = torch.bmm(keys, queries.mT).mT
    weights = seen_weights(scores.unflatten(0, rows.shape[:2]), mask)
    return torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).unflatten(0, rows.shape[:2])


def products_are_faster(k: Tensor, v: Tensor) -> bool:
    """Says whether `attend_by_products` beats the fused kernel for one query.

    It does on a CPU if keys and values lie in memory without gaps and are large or in half precision. The fused
    kernel of PyTorch 2.13 for CPUs works in blocks of queries, and a single query leaves most of a block empty.

    Args:
        k: keys.
        v: values.
    """
    whole = k.device.type == "cpu" and k.is_contiguous() and v.is_contiguous()
    return whole and (k.numel() >= PRODUCTS_FROM or k.dtype in (torch.bfloat16, torch.float16))


def attend(
    q: Float[Tensor, "batch heads queries d_k"],
    k: Float[Tensor, "batch kv_heads keys d_k"],
    v: Float[Tensor, "batch kv_heads keys d_v"],
    step: Step,
    scale: float,
) -> Float[Tensor, "batch heads queries d_v"]:
    """Attends with grouped queries (arXiv 2305.13245); query heads that share keys are computed together.

    With one query per head the query heads of a group become the rows of one matrix product: keys and values
    are read once and never repeated.

    Args:
        q: queries of the new tokens.
        k: keys; kv_heads divides heads.
        v: their values.
        step: says which keys are hidden.
        scale: factor of the scores.
    """
    groups = q.shape[1] // k.shape[1]
    if q.shape[2] == 1:
        rows = q.reshape(q.shape[0], k.shape[1], groups, q.shape[3])
        if products_are_faster(k, v):
            attended = attend_by_products(rows, k, v, step.mask, scale)
        else:
            attended = F.scaled_dot_product_attention(rows, k, v, step.mask, scale=scale)
        return attended.reshape(*q.shape[:3], v.shape[3])
    return F.scaled_dot_product_attention(
        q, k, v, step.mask, is_causal=step.causal, scale=scale, enable_gqa=groups > 1
    )


class Attention(nn.Module):
    """Causal self-attention with as many key-value heads as the configuration says: MHA, GQA or MQA.

    Args:
        config: of the model, a `course_llm.model.ModelConfig`.
        layer: its number, from 0; its place in the cache.
        device: where to build.
    """

    def __init__(self, config: Any, layer: int, device: Any = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.n_kv_heads, config.d_head
        self.layer = layer
        self.scale = config.attention_scale or self.head_dim**-0.5
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = Linear(config.d_hidden, rows, bias=config.biases or config.qkv_biases, device=device)
        self.out = Linear(self.heads * self.head_dim, config.d_hidden, bias=config.biases, device=device)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps, device) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps, device) if config.qk_norm else None

    def forward(
        self, x: Float[Tensor, "batch seq d_hidden"], step: Step
    ) -> Float[Tensor, "batch seq d_hidden"]:
        """Returns what the new tokens gather, projected back to the hidden width.

        Args:
            x: normed rows of the new tokens.
            step: positions, mask and cache, which all layers share.
        """
        widths = [self.heads, self.kv_heads, self.kv_heads]
        # split at once: the three gradients come back as one
        parts = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(widths, dim=2)
        q, k, v = (part.transpose(1, 2) for part in parts)  # as they lie in memory
        if self.q_norm is not None:  # (batch, heads, seq, head_dim)
            q, k = self.q_norm(q), self.k_norm(k)
        if step.cos is not None:
            q, k = rotate(q, step.cos, step.sin), rotate(k, step.cos, step.sin)
        if step.cache is not None:
            k, v = step.cache.update(self.layer, k, v)
        return self.out(attend(q, k, v, step, self.scale).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The position-wise network: GELU (exact or tanh), or SwiGLU (arXiv 2002.05202), its gate first.

    Args:
        config: of the model, a `course_llm.model.ModelConfig`.
        d_ff: inner width; None takes that of `config`.
        device: where to build.
    """

    def __init__(self, config: Any, d_ff: int | None = None, device: Any = None) -> None:
        super().__init__()
        d_ff = d_ff or config.d_ff
        self.kind = config.feed_forward
        width = 2 * d_ff if self.kind == "swiglu" else d_ff
        self.up = Linear(config.d_hidden, width, bias=config.biases, device=device)
        self.down = Linear(d_ff, config.d_hidden, bias=config.biases, device=device)

    def forward(self, x: Float[Tensor, "*batch d_hidden"]) -> Float[Tensor, "*batch d_hidden"]:
        """Applies the network to each row by itself."""
        up = self.up(x)
        if self.kind == "swiglu":
            gate, value = up.chunk(2, dim=-1)
            return self.down(F.silu(gate) * value)
        return self.down(F.gelu(up, approximate="tanh" if self.kind == "gelu_tanh" else "none"))
