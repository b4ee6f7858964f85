"""What a decoder is made of: norms, positions, feed-forward networks and attention, with any cache.

`ModelConfig` says which of each. The modules here are the fast forms; the chapters' functions
(`course_llm.attention`, `course_llm.kv_cache`, `course_llm.mla`) are the plain ones, and the tests say that
they agree. Rotary positions turn the pairs (2i, 2i+1), as in the RoFormer paper and in
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
        kind: "linear", "llama3" or "yarn".
        factor: how many times longer the context becomes.
        original_context: context of pretraining, in tokens.
        low, high: "llama3": wave lengths over original_context / low are divided by `factor`, those under
            original_context / high stay. "yarn": the same borders in rotations (beta_slow and beta_fast).
        attention_factor: "yarn": cosines and sines are multiplied by it.
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
    """Returns the angle per position of each rotated pair, base^(-2i/dim), stretched by `scaling`; float32."""
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
    """Returns cosines and sines of all positions, with an axis for the heads; the angles are float32."""
    frequencies = rotary_frequencies(dim, base, scaling, positions.device)
    angles = positions.to(torch.float32).unsqueeze(-2).unsqueeze(-1) * frequencies
    factor = scaling.attention_factor if scaling is not None else 1.0
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(
    x: Float[Tensor, "*batch heads seq dim"], cos: Tensor, sin: Tensor
) -> Float[Tensor, "*batch heads seq dim"]:
    """Turns each pair (2i, 2i+1) by its angle (RoFormer, arXiv 2104.09864, eq. 34)."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)


def sinusoids(
    positions: Int[Tensor, "*rows seq"], d_hidden: int, dtype: torch.dtype
) -> Float[Tensor, "*rows seq d_hidden"]:
    """Returns sinusoidal positions, sine on even and cosine on odd columns (arXiv 1706.03762, §3.5)."""
    angles = positions.to(torch.float32).unsqueeze(-1) * rotary_frequencies(
        d_hidden, 10000.0, None, positions.device
    )
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).to(dtype)


class Linear(nn.Linear):
    """A linear layer whose weights stay unset: `Decoder.initialise` draws them, or a checkpoint fills them."""

    def reset_parameters(self) -> None:
        """Leaves the memory as it is; drawing numbers only to overwrite them takes longer than loading."""


class Embedding(nn.Embedding):
    """An embedding whose weights stay unset, as in `Linear`."""

    def reset_parameters(self) -> None:
        """Leaves the memory as it is."""


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last axis and scales (arXiv 1910.07467); statistics in float32."""

    def __init__(self, dim: int, eps: float, device: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, device=device))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


@dataclass
class Step:
    """What all layers share in one forward pass.

    Attributes:
        cos, sin: rotary tables of the new positions, or None.
        mask: boolean, True = may attend, broadcast to (batch, heads, queries, keys); None = no key is hidden.
        causal: no mask is needed but the plain causal one over as many keys as queries.
        cache: keys and values so far, or None; see `course_llm.caches`.
    """

    cos: Float[Tensor, ...] | None = None
    sin: Float[Tensor, ...] | None = None
    mask: Bool[Tensor, ...] | None = None
    causal: bool = True
    cache: Any = None


PRODUCTS_FROM = (
    2**18
)  # numbers in the keys; measured: below, the fused kernel's one call costs less than several


def seen_weights(
    scores: Float[Tensor, "*batch queries keys"], mask: Bool[Tensor, ...] | None
) -> Float[Tensor, "*batch queries keys"]:
    """Returns softmax over the keys that the mask lets through, computed in float32 at least.

    A row without any key (padding) comes out as 0, not as NaN.
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
    """Attends with two matrix products per key-value head, whose queries are the rows."""
    queries, keys = rows.flatten(0, 1) * scale, k.flatten(0, 1)
    if queries.shape[1] == 1:
        scores = torch.bmm(queries, keys.mT)
    else:  # a CPU multiplies keys with a few columns twice as fast as a few rows with keys
        scores = torch.bmm(keys, queries.mT).mT
    weights = seen_weights(scores.unflatten(0, rows.shape[:2]), mask)
    return torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).unflatten(0, rows.shape[:2])


def products_are_faster(k: Tensor, v: Tensor) -> bool:
    """Says whether `attend_by_products` beats the fused kernel for one query: on a CPU, without gaps, if there is much to read.

    The fused kernel of PyTorch 2.13 for CPUs works in blocks of queries; a single one leaves it waiting, in half
    precision above all.
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
    """Causal self-attention with as many key-value heads as the configuration says: MHA, GQA or MQA."""

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
        widths = [self.heads, self.kv_heads, self.kv_heads]
        parts = (
            self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(widths, dim=2)
        )  # their gradients are joined
        q, k, v = (part.transpose(1, 2) for part in parts)  # as they lie in memory
        if self.q_norm is not None:  # (batch, heads, seq, head_dim)
            q, k = self.q_norm(q), self.k_norm(k)
        if step.cos is not None:
            q, k = rotate(q, step.cos, step.sin), rotate(k, step.cos, step.sin)
        if step.cache is not None:
            k, v = step.cache.update(self.layer, k, v)
        return self.out(attend(q, k, v, step, self.scale).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The position-wise network: GELU (exact or tanh), or SwiGLU (arXiv 2002.05202), its gate first."""

    def __init__(self, config: Any, d_ff: int | None = None, device: Any = None) -> None:
        super().__init__()
        d_ff = d_ff or config.d_ff
        self.kind = config.feed_forward
        width = 2 * d_ff if self.kind == "swiglu" else d_ff
        self.up = Linear(config.d_hidden, width, bias=config.biases, device=device)
        self.down = Linear(d_ff, config.d_hidden, bias=config.biases, device=device)

    def forward(self, x: Float[Tensor, "*batch d_hidden"]) -> Float[Tensor, "*batch d_hidden"]:
        up = self.up(x)
        if self.kind == "swiglu":
            gate, value = up.chunk(2, dim=-1)
            return self.down(F.silu(gate) * value)
        return self.down(F.gelu(up, approximate="tanh" if self.kind == "gelu_tanh" else "none"))
