"""The capstone: the pieces of all chapters put together into a generator that runs the course's bundled model.

A decoder needs little beside what the chapters built: rotary positions and causal attention, a cache, a loop
that pushes each token through the model once, a way to draw the next one. The bundled model adds two details,
both of current practice: RMSNorm in the place of LayerNorm, and a norm on every head's queries and keys.
Then its layers are rewritten to cache one latent in the place of keys and values.

Row vectors times weights, heads as consecutive column blocks. A multiplication and an addition are two FLOPs.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from course_llm.attention import merge_heads, split_heads
from course_llm.decoding import sample_from_uniform, sampling_distribution
from course_llm.kv_cache import cached_attention, rope_at
from course_llm.mla import compress_kv, expand_kv, low_rank_factors
from course_llm.weights import LatentLayerWeights, LayerWeights, ModelWeights

EPS = 1e-5  # of every RMSNorm in the bundled model


class ModelCache:
    """Keeps rows of every token so far for all layers: keys and values, or latents.

    Args:
        layers: layers of the model.
        max_seq: tokens there is room for.

    Attributes:
        length: tokens that all layers hold, an int. While a step passes through the layers it stays what it
            was; it grows when the last layer gets its rows.
    """

    def __init__(self, layers: int, max_seq: int) -> None:
        self._max_seq = max_seq
        self._buffers: list[tuple[Tensor, ...]] = [() for _ in range(layers)]
        self._lengths = [0] * layers

    @property
    def length(self) -> int:
        return min(self._lengths)

    def update(
        self, layer: int, *rows: Float[Tensor, "... new _"]
    ) -> tuple[Float[Tensor, "... length _"], ...]:
        """Stores the rows of new tokens behind those that a layer holds, and returns all its rows so far.

        Room for max_seq tokens is allocated when a layer gets its first rows, each in its own dtype, on its
        device, and is kept; nothing else is. Every token's rows are stored once.

        Args:
            layer: 0 is the first.
            rows: any number of tensors, their second to last axis the new tokens: a prompt, a chunk, or one.

        Returns:
            As many tensors as came, always a tuple, oldest token first.

        Raises:
            ValueError: more than max_seq tokens would be held. Nothing is changed then, in no layer.
        """
        start = self._lengths[layer]
        end = start + rows[0].shape[-2]
        if end > self._max_seq:
            raise ValueError(f"ModelCache.update needs at most max_seq={self._max_seq} tokens, got {end}")
        if not self._buffers[layer]:
            self._buffers[layer] = tuple(
                r.new_empty(*r.shape[:-2], self._max_seq, r.shape[-1], requires_grad=False) for r in rows
            )
        for buffer, new in zip(self._buffers[layer], rows, strict=True):
            # detached: a cache serves inference, and a graph through every step would grow without bound
            buffer[..., start:end, :] = new.detach()
        self._lengths[layer] = end
        return tuple(buffer[..., :end, :] for buffer in self._buffers[layer])

    def reset(self) -> None:
        """Forgets all tokens of all layers; the memory is kept and used again."""
        self._lengths = [0] * len(self._lengths)


def attention_step(
    x: Float[Tensor, "batch new d_hidden"], layer: LayerWeights, heads: int, cache: Any, index: int
) -> Float[Tensor, "batch new d_hidden"]:
    """Attends from new tokens to all tokens so far, with cached keys and values, as the bundled model does.

    Project to queries, keys and values; split into heads; RMSNorm over head_dim, with epsilon 1e-5, on each
    head's queries (scale `q_norm`) and keys (scale `k_norm`); rotate both by their positions in the text;
    store keys and values; attend causally with scale `1 / sqrt(head_dim)`; merge the heads; project with
    `w_o`.

    Args:
        x: rows of the new tokens, behind the layer's first norm (`norm1` is not applied here).
        layer: the layer's weights.
        heads: attention heads.
        cache: as `ModelCache`: has `length`, the position of the first new token, and `update(layer, *rows)`.
            Keys are stored normed and rotated.
        index: which layer of the cache this is.

    Cost: `8 * new * d_hidden**2 + 4 * new * keys * d_hidden` FLOPs per row of the batch where
    `heads * head_dim = d_hidden`; `keys` counts all tokens so far, the new ones included.
    """
    past = cache.length  # read before the update: the last layer's makes it grow
    q, k, v = (split_heads(x @ w, heads) for w in (layer.w_q, layer.w_k, layer.w_v))
    q, k = rope_at(_rms_norm(q, layer.q_norm), past), rope_at(_rms_norm(k, layer.k_norm), past)
    k, v = cache.update(index, k, v)
    return merge_heads(cached_attention(q, k, v)) @ layer.w_o


def latent_factors(
    w_k: Float[Tensor, "d_hidden width"], w_v: Float[Tensor, "d_hidden width"], d_c: int
) -> tuple[Float[Tensor, "d_hidden {d_c}"], Float[Tensor, "{d_c} width"], Float[Tensor, "{d_c} width"]]:
    """Factors a layer's key and value projections through one latent (as in DeepSeek-V2, eqs. 9 to 11).

    Both projections read the same row, so that they are one matrix `[w_k | w_v]` of `2 * width` columns. Its
    best approximation of rank d_c is `w_dkv @ [w_uk | w_uv]`.

    Args:
        w_k: projection to the keys of all heads.
        w_v: projection to the values of all heads.
        d_c: width of the latent, from 1 to `min(d_hidden, 2 * width)`.

    Returns:
        `(w_dkv, w_uk, w_uv)`. How the product is shared between the factors is free.

    Raises:
        ValueError: d_c is outside of these bounds.
    """
    both = torch.cat((w_k, w_v), dim=1)
    if not 1 <= d_c <= min(both.shape):
        raise ValueError(f"latent_factors needs 1 <= d_c <= {min(both.shape)}, got d_c={d_c}")
    w_dkv, up = low_rank_factors(both, d_c)
    w_uk, w_uv = up.chunk(2, dim=1)
    return w_dkv, w_uk, w_uv


def latent_attention_step(
    x: Float[Tensor, "batch new d_hidden"], layer: LatentLayerWeights, heads: int, cache: Any, index: int
) -> Float[Tensor, "batch new d_hidden"]:
    """Attends as `attention_step` does, from cached latents: neither keys nor values are stored.

    With `w_k = w_dkv @ w_uk` and `w_v = w_dkv @ w_uv` the result is that of `attention_step`.

    Args:
        x: rows of the new tokens, behind the layer's first norm.
        layer: the layer's weights.
        heads: attention heads.
        cache: as in `attention_step`; it is given the latents of the new tokens, `(batch, new, d_c)`, and
            nothing else. Keys are expanded from the latents, then normed, then rotated by the positions
            0, 1, ... of all tokens.
        index: which layer of the cache this is.

    Cost per row of the batch, with `width = heads * head_dim`: `2 * new * d_hidden * (2 * width + d_c)` FLOPs
    for queries, latents and output of the new tokens, at most `4 * keys * d_c * width` for keys and values of
    all tokens, and `4 * new * keys * width` for scores and mixing. Latents are computed for new tokens only.
    """
    past = cache.length
    q = rope_at(_rms_norm(split_heads(x @ layer.w_q, heads), layer.q_norm), past)
    (c,) = cache.update(index, compress_kv(x, layer.w_dkv))  # (batch, keys, d_c)
    k, v = expand_kv(c, layer.w_uk, layer.w_uv, heads)
    # a norm and a rotation stand between latent and key: W_UK cannot be absorbed into the query here
    k = rope_at(_rms_norm(k, layer.k_norm), 0)
    return merge_heads(cached_attention(q, k, v)) @ layer.w_o


def decoder_step(
    weights: ModelWeights, ids: Int[Tensor, "batch new"], cache: Any
) -> Float[Tensor, "batch vocab"]:
    """Pushes new tokens through the whole model and returns the logits of the token that follows the last.

    Embed; in every layer add `attention(norm1(x))` and then `gelu(norm2(x) @ w_up) @ w_down` to `x`; norm;
    multiply with the transposed embedding. All norms are RMSNorm with epsilon 1e-5, GELU is exact.

    Args:
        weights: the model's; a layer of kind `LatentLayerWeights` attends by `latent_attention_step`, one of
            kind `LayerWeights` by `attention_step`.
        ids: the new tokens, which continue the text in the cache: a prompt, a chunk, or one token.
        cache: as in `attention_step`.

    Cost per row of the batch: for each layer that of its attention and `4 * new * d_hidden * d_ff` FLOPs of
    the feed-forward network, and `2 * d_hidden * vocab` for the logits, which are computed for the last token
    only.
    """
    x = weights.embedding[ids]  # (batch, new, d_hidden)
    for index, layer in enumerate(weights.layers):
        attend = latent_attention_step if isinstance(layer, LatentLayerWeights) else attention_step
        x = x + attend(_rms_norm(x, layer.norm1), layer, weights.heads, cache, index)
        x = x + F.gelu(_rms_norm(x, layer.norm2) @ layer.w_up) @ layer.w_down
    return _rms_norm(x[:, -1], weights.norm) @ weights.embedding.T


def generate_text(
    weights: ModelWeights,
    ids: Int[Tensor, "batch seq"],
    max_new_tokens: int,
    eos_id: int | None = None,
    temperature: float | int = 0.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    uniforms: Float[Tensor, "batch max_new_tokens"] | None = None,
) -> Int[Tensor, "batch longer"]:
    """Continues each row, pushing every token through the model at most once.

    The prompt is read in one step (prefill), then one token per step: `prompt + new - 1` tokens per row in
    all, since the last token written is never read.

    Args:
        weights: the model's, with layers of either kind.
        ids: the prompt, at least one token.
        max_new_tokens: most tokens to add; 0 returns the prompt.
        eos_id: token that ends a row; a finished row is filled with it, and the loop stops when every row has
            finished. An EOS in the prompt does not count. None never stops early.
        temperature: as in `sampling_distribution`; 0 takes the most probable token, ties to the lower id.
        top_k: as in `sampling_distribution`; temperature 0 does not use it.
        top_p: as in `sampling_distribution`; temperature 0 does not use it.
        uniforms: numbers in [0, 1); above temperature 0 the t-th new token of a row is drawn by
            `sample_from_uniform` with the row's t-th number.

    Returns:
        The prompt followed by the new tokens.

    Raises:
        ValueError: temperature is above 0 and there are no uniforms.
    """
    if temperature > 0 and uniforms is None:
        raise ValueError(f"generate_text needs uniforms above temperature 0, got temperature={temperature}")
    cache = ModelCache(len(weights.layers), ids.shape[1] + max_new_tokens)
    finished = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    text, unread = [ids], ids
    for step in range(max_new_tokens):
        logits = decoder_step(weights, unread, cache)
        if temperature > 0:
            probs = sampling_distribution(logits, temperature, top_k, top_p)
            token = sample_from_uniform(probs, uniforms[:, step])
        else:  # argmax returns the first of several maxima, so a tie goes to the lower id
            token = logits.argmax(dim=-1)
        token = token.to(ids.dtype)
        if eos_id is not None:
            token = token.masked_fill(finished, eos_id)
            finished = finished | (token == eos_id)
        unread = token[:, None]
        text.append(unread)
        if finished.all():
            break
    return torch.cat(text, dim=1)


def with_latents(weights: ModelWeights, d_c: int) -> ModelWeights:
    """Rewrites every layer of a model to cache one latent of width d_c in the place of keys and values.

    At `d_c = d_hidden` nothing is lost; below, each layer's projections are the best approximation of rank
    d_c.

    Args:
        weights: a model with layers of kind `LayerWeights`.
        d_c: width of the latent, as in `latent_factors`.

    Raises:
        ValueError: d_c is below 1 or too large.
    """
    layers = []
    for layer in weights.layers:
        kept = {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer)}
        factors = latent_factors(kept.pop("w_k"), kept.pop("w_v"), d_c)
        layers.append(
            LatentLayerWeights(**kept, **dict(zip(("w_dkv", "w_uk", "w_uv"), factors, strict=True)))
        )
    return dataclasses.replace(weights, layers=tuple(layers))


def step_flops(weights: ModelWeights, new: int, keys: int) -> int:
    """Counts the FLOPs of the matrix products in one `decoder_step`, for one row of the batch.

    Args:
        weights: the model's, with layers of either kind.
        new: tokens that are pushed.
        keys: tokens in sight of the last one, the new ones included.
    """
    total = 2 * weights.embedding.numel()
    for layer in weights.layers:
        d_hidden, width = layer.w_q.shape
        total += (
            2 * new * (2 * d_hidden * width + 2 * d_hidden * layer.w_up.shape[1]) + 4 * new * keys * width
        )
        if isinstance(layer, LatentLayerWeights):
            d_c = layer.w_dkv.shape[1]
            total += 2 * new * d_hidden * d_c + 4 * keys * d_c * width
        else:
            total += 4 * new * d_hidden * width
    return total


def generation_flops(weights: ModelWeights, prompt: int, new: int) -> int:
    """Counts the FLOPs of `generate_text` for one row: a prefill and `new - 1` steps of one token.

    Args:
        weights: the model's.
        prompt: tokens of the prompt.
        new: tokens written, 1 or more.
    """
    steps = range(prompt + 1, prompt + new)
    return step_flops(weights, prompt, prompt) + sum(step_flops(weights, 1, keys) for keys in steps)


def least_flops(weights: ModelWeights, prompt: int, new: int, distinct: int | None = None) -> int:
    """Counts the fewest FLOPs that are known to suffice for a row; fewer means that some were not counted.

    - In every layer each token that is pushed needs its keys and values, or its latent. The rest of the layer
      it needs in all layers but the last: there only the row that gives the next token does, one per step.
    - In the first layer a token's projections do not depend on where it stands: equal tokens can share them.
    - With latents all keys are expanded anew in every step, since nothing else is kept; values are expanded or
      absorbed, whichever costs less.

    Args:
        weights: the model's.
        prompt: tokens of the prompt.
        new: tokens written, 1 or more.
        distinct: how many of the pushed tokens differ; None: all.
    """
    pushed = prompt + new - 1
    distinct = pushed if distinct is None else distinct
    total = 2 * new * weights.embedding.numel()
    for index, layer in enumerate(weights.layers):
        last = index == len(weights.layers) - 1
        d_hidden, width = layer.w_q.shape
        latent = isinstance(layer, LatentLayerWeights)
        stored = layer.w_dkv.shape[1] if latent else 2 * width
        different = pushed if index else distinct
        rows = new if last else pushed
        total += 2 * d_hidden * (different * stored + min(rows, different) * width)
        total += 2 * rows * d_hidden * (width + 2 * layer.w_up.shape[1])
        for step in range(new):
            keys, asked = prompt + step, 1 if last or step else prompt
            seen = sum(range(max(2, keys - asked + 1), keys + 1))  # one key alone needs no weights
            attention = 4 * seen * width
            if latent:
                expansion = 2 * min(keys, different) * stored * width
                absorbed = 2 * seen * (width + weights.heads * stored) + 2 * asked * stored * width
                attention = expansion + min(attention + expansion, absorbed)
            total += attention
    return total


def _rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    """Divides by the root mean square over the last axis and scales; statistics in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)).to(x.dtype) * scale
