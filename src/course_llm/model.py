"""One decoder-only transformer for the whole course, configured by a frozen dataclass.

Text goes in as token ids, logits of the next token come out at every position. `ModelConfig` chooses the
attention (MHA, GQA, MQA or MLA), the positions (sinusoidal, learned, rotary), the feed-forward network (GELU,
SwiGLU), the norm (LayerNorm, RMSNorm) and the rest, and so GPT-2, Llama, Mistral and DeepSeek are all this
one class (`course_llm.hf` loads their weights). Any cache of `course_llm.caches` fits. `load_bundled` returns
the small model that the course trained itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from course_llm.checkpoints import load_model
from course_llm.experts import ExpertsConfig, MixtureOfExperts
from course_llm.latent_layer import LatentAttention
from course_llm.layers import (
    Attention,
    Embedding,
    FeedForward,
    LatentConfig,
    Linear,
    RMSNorm,
    RopeScaling,
    Step,
    rotary_tables,
    sinusoids,
)
from course_llm.tokenizer import CourseTokenizer, load_tokenizer

BUNDLED_PATH = Path(__file__).parent / "data" / "bundled.safetensors"


@dataclass(frozen=True)
class ModelConfig:
    """Describes a decoder.

    Attributes:
        vocab: number of tokens.
        d_hidden: width of the residual stream.
        layers: number of blocks.
        heads: query heads.
        d_ff: width of the feed-forward network.
        context: longest sequence, in tokens.
        kv_heads: key-value heads; None means `heads` (MHA), 1 is MQA, between is GQA.
        head_dim: width of a head; None means `d_hidden // heads`.
        latent: sizes of multi-head latent attention; then `kv_heads` is not used.
        positions: how the order gets in: `"rotary"`, `"learned"` or `"sinusoidal"`.
        rope_base: pair i of rotary positions turns by `rope_base ** (-2 * i / width)` per token: the larger the
            base, the slower the last pairs.
        rope_scaling: how these rotations are slowed down for longer contexts; None leaves them.
        feed_forward: `"gelu"` (exact), `"gelu_tanh"` or `"swiglu"`.
        norm: `"rms"` or `"layer"`.
        norm_eps: added to the mean square or to the variance before the root.
        qk_norm: RMSNorm on each head's queries and keys (arXiv 2010.04245).
        biases: on the linear layers of the blocks (experts have none, nor have the matrices of latent attention that
            make queries, keys and values of the heads).
        qkv_biases: on the projections to queries, keys and values alone, where `biases` is off.
        tied: the output matrix is the embedding.
        window: a token sees itself and the `window - 1` tokens before it; None sees all.
        experts: a mixture of experts in place of feed-forward networks.
        attention_scale: factor of the scores; None means one over the root of the width of a query.
    """

    vocab: int
    d_hidden: int
    layers: int
    heads: int
    d_ff: int
    context: int
    kv_heads: int | None = None
    head_dim: int | None = None
    latent: LatentConfig | None = None
    positions: str = "rotary"
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    feed_forward: str = "swiglu"
    norm: str = "rms"
    norm_eps: float = 1e-5
    qk_norm: bool = False
    biases: bool = False
    qkv_biases: bool = False
    tied: bool = True
    window: int | None = None
    experts: ExpertsConfig | None = None
    attention_scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("vocab", "d_hidden", "layers", "heads", "d_ff", "context"):
            _require(getattr(self, name) >= 1, f"{name} >= 1", name, getattr(self, name))
        _require(self.heads % self.n_kv_heads == 0, "heads % kv_heads == 0", "kv_heads", self.kv_heads)
        whole = self.head_dim is not None or self.d_hidden % self.heads == 0
        _require(whole, "d_hidden % heads == 0 or a head_dim", "heads", self.heads)
        _require(
            self.positions in ("rotary", "learned", "sinusoidal"),
            "known positions",
            "positions",
            self.positions,
        )
        _require(
            self.feed_forward in ("gelu", "gelu_tanh", "swiglu"),
            "a known one",
            "feed_forward",
            self.feed_forward,
        )
        _require(self.norm in ("rms", "layer"), "norm rms or layer", "norm", self.norm)
        _require(self.window is None or self.window >= 1, "window >= 1", "window", self.window)
        rotated = self.latent.rope_dim if self.latent else self.d_head
        even = self.positions != "rotary" or rotated % 2 == 0
        _require(even, "an even head_dim for rotary positions", "head_dim", rotated)
        _require(
            self.positions != "sinusoidal" or self.d_hidden % 2 == 0,
            "even d_hidden",
            "d_hidden",
            self.d_hidden,
        )

    @property
    def n_kv_heads(self) -> int:
        """Number of key-value heads, which is `kv_heads`, or `heads` where that is None."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def d_head(self) -> int:
        """Width of a head, which is `head_dim`, or `d_hidden // heads` where that is None."""
        return self.d_hidden // self.heads if self.head_dim is None else self.head_dim


def _require(holds: bool, rule: str, name: str, value: object) -> None:
    if not holds:
        raise ValueError(f"ModelConfig needs {rule}, got {name}={value}")


def make_norm(config: ModelConfig, device: Any = None) -> nn.Module:
    """Builds the configured norm over the hidden width.

    Args:
        config: of the model.
        device: where to build.
    """
    if config.norm == "rms":
        return RMSNorm(config.d_hidden, config.norm_eps, device)
    return nn.LayerNorm(config.d_hidden, config.norm_eps, device=device)


class Block(nn.Module):
    """One layer: attention and feed-forward network, each after a norm and added to the residual stream.

    Args:
        config: of the model.
        layer: its number, from 0.
        device: where to build.
    """

    def __init__(self, config: ModelConfig, layer: int, device: Any = None) -> None:
        super().__init__()
        self.norm1, self.norm2 = make_norm(config, device), make_norm(config, device)
        self.attention = (LatentAttention if config.latent else Attention)(config, layer, device)
        mixed = config.experts is not None and layer >= config.experts.dense_layers
        self.feed_forward = MixtureOfExperts(config, device) if mixed else FeedForward(config, device=device)

    def forward(
        self, x: Float[Tensor, "batch seq d_hidden"], step: Step
    ) -> Float[Tensor, "batch seq d_hidden"]:
        """Returns the residual stream behind the layer.

        Args:
            x: the residual stream, one row per new token.
            step: what all layers share.
        """
        x = x + self.attention(self.norm1(x), step)
        return x + self.feed_forward(self.norm2(x))


class Decoder(nn.Module):
    """A decoder-only transformer.

    Args:
        config: what to build.
        seed: of the initial weights, as in `initialise`; None leaves the memory unset, to be filled from a
            checkpoint.
        device: where to build; `"meta"` makes no weights.
    """

    def __init__(self, config: ModelConfig, seed: int | None = 0, device: Any = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab, config.d_hidden, device=device)
        learned = config.positions == "learned"
        self.positions = Embedding(config.context, config.d_hidden, device=device) if learned else None
        self.blocks = nn.ModuleList(Block(config, layer, device) for layer in range(config.layers))
        self.norm = make_norm(config, device)
        self.head = Linear(config.d_hidden, config.vocab, bias=False, device=device)
        if config.tied:
            self.head.weight = self.embedding.weight
        if seed is not None and self.embedding.weight.device.type != "meta":
            self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draws all matrices anew from a seed; the same numbers on every device.

        Normal, with standard deviation 0.02. It is divided by `sqrt(2 * layers)` for the last matrix of each
        attention, feed-forward network and expert (GPT-2), and for the matrices of latent attention that
        project down to latents, too. Biases become 0.

        Args:
            seed: of the generator.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                last = name.endswith(("out.weight", "down.weight", "feed_forward.down"))
                deviation = 0.02 / math.sqrt(2 * self.config.layers) if last else 0.02
                parameter.copy_(torch.empty(parameter.shape).normal_(0, deviation, generator=generator))
            elif name.endswith("bias"):  # scales of norms stay 1
                parameter.zero_()

    def forward(
        self,
        ids: Int[Tensor, "batch seq"],
        cache: Any = None,
        real: Bool[Tensor, "batch total"] | None = None,
        document_ids: Int[Tensor, "batch seq"] | None = None,
        last_only: bool = False,
    ) -> Float[Tensor, "batch out vocab"]:
        """Returns the logits of the next token at every position, or at the last one only.

        Args:
            ids: the new tokens; with a cache those that follow the tokens it holds.
            cache: from `course_llm.caches`; it is updated.
            real: True on real tokens, False on padding, for the cached and the new tokens together. Padding
                to the left moves the positions: a row's first real token has position 0.
            document_ids: attention stays inside a document (without a cache only).
            last_only: compute the logits of the last position alone.

        Raises:
            ValueError: ids that are no whole numbers below vocab (values are looked at on CPUs), more tokens than
                the context of learned positions, or a mask or document ids of another shape.
        """
        return self.head(self.hidden(ids, cache, real, document_ids, last_only))

    def hidden(
        self,
        ids: Int[Tensor, "batch seq"],
        cache: Any = None,
        real: Bool[Tensor, "batch total"] | None = None,
        document_ids: Int[Tensor, "batch seq"] | None = None,
        last_only: bool = False,
    ) -> Float[Tensor, "batch out d_hidden"]:
        """Returns the last norm's output, which `head` turns into logits; arguments as in `forward`."""
        x = self._embed(ids)
        positions, step = self._plan(ids, cache, real, document_ids, x.dtype)
        if self.positions is not None:
            x = x + self.positions(positions)
        elif self.config.positions == "sinusoidal":
            x = x + sinusoids(positions, self.config.d_hidden, x.dtype)
        for block in self.blocks:
            x = block(x, step)
        if cache is not None:
            cache.advance(ids.shape[1])
        return self.norm(x[:, -1:] if last_only else x)

    def _embed(self, ids: Tensor) -> Tensor:
        if ids.ndim != 2 or ids.is_floating_point():
            raise ValueError(
                f"Decoder needs ids (batch, seq) of whole numbers, got {tuple(ids.shape)}, {ids.dtype}"
            )
        if torch.compiler.is_compiling():
            return self.embedding(ids)
        try:
            return self.embedding(ids)
        except IndexError:
            span = f"{ids.min().item()} to {ids.max().item()}"
            raise ValueError(f"Decoder needs 0 <= id < vocab={self.config.vocab}, got {span}") from None

    def _plan(
        self, ids: Tensor, cache: Any, real: Any, document_ids: Any, dtype: torch.dtype
    ) -> tuple[Tensor, Step]:
        """Works out positions, rotary tables and the mask of one forward pass, which all layers share."""
        seq, config = ids.shape[1], self.config
        past = 0 if cache is None else cache.length
        slots = torch.arange(seq, device=ids.device) + past  # place in the sequence, padding counted
        positions = slots.unsqueeze(0)
        if real is not None:
            if real.shape[0] != ids.shape[0] or (isinstance(past, int) and real.shape[1] < past + seq):
                wanted = f"{ids.shape[0]} rows and {past + seq} tokens"
                raise ValueError(f"Decoder needs real for {wanted}, got {tuple(real.shape)}")
            counted = (real.long().cumsum(-1) - 1).clamp(min=0)
            positions = counted.index_select(1, slots)
        if document_ids is not None and document_ids.shape != ids.shape:
            raise ValueError(
                f"Decoder needs document_ids like ids {tuple(ids.shape)}, got {tuple(document_ids.shape)}"
            )
        if self.positions is not None and isinstance(past, int) and past + seq > config.context:
            raise ValueError(
                f"Decoder needs at most context={config.context} tokens with learned positions, got {past + seq}"
            )
        step = Step(cache=cache)
        if config.positions == "rotary":
            dim = config.latent.rope_dim if config.latent else config.d_head
            step.cos, step.sin = rotary_tables(positions, dim, config.rope_base, config.rope_scaling, dtype)
        if real is not None or document_ids is not None:
            hidden = True
        elif cache is None or cache.is_fresh():
            hidden = config.window is not None and config.window < seq
        else:
            step.causal = False
            hidden = seq > 1 or not cache.sees_all(config.window)
        if hidden:
            step.mask, step.causal = self._mask(slots, cache, real, document_ids), False
        return positions, step

    def _mask(self, slots: Tensor, cache: Any, real: Any, document_ids: Any) -> Bool[Tensor, ...] | None:
        """Says which keys each new token sees: (batch or 1, 1, queries, keys), True = may attend."""
        keys = slots if cache is None else cache.key_slots(slots)  # -1 where a cache has no key yet
        allowed = (keys <= slots.unsqueeze(-1)) & (keys >= 0)
        if self.config.window is not None:
            allowed = allowed & (keys > slots.unsqueeze(-1) - self.config.window)
        allowed = allowed[None, None]
        if real is not None:
            allowed = allowed & real[:, keys.clamp(0, real.shape[1] - 1)][:, None, None]
        if document_ids is not None:
            allowed = allowed & (document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2))[:, None]
        return allowed

    def parameter_count(self) -> int:
        """Counts all parameters, a tied embedding once, however its two uses are laid out in memory."""
        named = self.named_parameters()
        return sum(p.numel() for name, p in named if not (self.config.tied and name == "head.weight"))


def load_bundled(device: Any = None) -> tuple[Decoder, CourseTokenizer]:
    """Returns the model that the course trained on its corpus, in float32, and its tokenizer.

    `data/MODEL_CARD.md` in the package describes it. What it writes sounds like a medical dictionary and is made
    up: it is not medical information.

    Args:
        device: where the model lies.
    """
    return load_model(BUNDLED_PATH, device=device), load_tokenizer()
