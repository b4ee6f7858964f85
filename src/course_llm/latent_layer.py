"""Multi-head latent attention as a layer of the model, with norms and query compression (DeepSeek-V2 and V3).

The cache holds one latent c and one rotated key per token, the same for all heads. The layer has two forms
that give the same numbers: expanded, which makes keys and values of every head from the latent, and absorbed,
which moves the expanding matrices into the query and the output and never makes them. It takes whichever
needs fewer operations: expanded for long prompts, absorbed when a few new tokens meet a long cache.
`course_llm.mla` shows both plainly.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from course_llm.layers import Linear, RMSNorm, Step, rotate, seen_weights

LATENT_NORM_EPS = 1e-6  # DeepSeek's, whatever the eps of the other norms


def dot_products(
    rows: Float[Tensor, "batch rows width"], keys: Float[Tensor, "batch keys width"], part: int = 512
) -> Float[Tensor, "batch rows keys"]:
    """Returns `rows @ keys.mT`.

    On a CPU more than four parts of keys are multiplied part by part: each then fits into the processor's cache.

    Args:
        rows: any rows.
        keys: as wide as the rows.
        part: keys per part.
    """
    if keys.device.type != "cpu" or keys.shape[1] <= 4 * part:
        return torch.bmm(rows, keys.mT)
    return torch.cat([torch.bmm(rows, some.mT) for some in keys.split(part, dim=1)], dim=-1)


class LatentAttention(nn.Module):
    """Causal multi-head latent attention (arXiv 2405.04434, §2.1) with a decoupled rotary key.

    Args:
        config: of the model, a `course_llm.model.ModelConfig` with `latent`.
        layer: its number, from 0; its place in the cache.
        device: where to build.
    """

    def __init__(self, config: Any, layer: int, device: Any = None) -> None:
        super().__init__()
        sizes = config.latent
        self.heads, self.layer = config.heads, layer
        self.d_h, self.d_r, self.d_v, self.d_c = config.d_head, sizes.rope_dim, sizes.value_dim, sizes.d_c
        self.scale = config.attention_scale or (self.d_h + self.d_r) ** -0.5

        def linear(d_in: int, d_out: int, bias: bool = False) -> Linear:
            return Linear(d_in, d_out, bias=bias, device=device)

        biases, queries = config.biases, self.heads * (self.d_h + self.d_r)
        compressed = sizes.d_cq is not None
        self.q_down = linear(config.d_hidden, sizes.d_cq, biases) if compressed else None
        self.q_norm = RMSNorm(sizes.d_cq, LATENT_NORM_EPS, device) if compressed else None
        self.q_up = linear(sizes.d_cq if compressed else config.d_hidden, queries)
        self.kv_down = linear(config.d_hidden, self.d_c + self.d_r, biases)
        self.kv_norm = RMSNorm(self.d_c, LATENT_NORM_EPS, device)
        self.kv_up = linear(self.d_c, self.heads * (self.d_h + self.d_v))
        self.out = linear(self.heads * self.d_v, config.d_hidden, biases)

    def forward(
        self, x: Float[Tensor, "batch seq d_hidden"], step: Step
    ) -> Float[Tensor, "batch seq d_hidden"]:
        """Returns what the new tokens gather, projected back to the hidden width.

        Args:
            x: normed rows of the new tokens.
            step: positions, mask and cache, which all layers share.
        """
        hidden = x if self.q_down is None else self.q_norm(self.q_down(x))
        q = self.q_up(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q_c, q_r = q.split([self.d_h, self.d_r], dim=-1)  # (batch, heads, seq, d_h or d_r)
        c, k_r = self.kv_down(x).split([self.d_c, self.d_r], dim=-1)
        c, k_r = self.kv_norm(c).unsqueeze(1), k_r.unsqueeze(1)  # (batch, 1, seq, d_c or d_r)
        if step.cos is not None:
            q_r, k_r = rotate(q_r, step.cos, step.sin), rotate(k_r, step.cos, step.sin)
        if step.cache is not None:
            c, k_r = step.cache.update(self.layer, c, k_r)
        form = self.absorbed if self._absorbing_is_cheaper(x.shape[1]) and not step.causal else self.expanded
        return self.out(form(q_c, q_r, c, k_r, step).transpose(1, 2).flatten(2))

    def _absorbing_is_cheaper(self, queries: int) -> bool:
        """Compares the multiplications per key and head: expanding keys and values, or longer dot products."""
        expanded = self.d_c * (self.d_h + self.d_v) + queries * (self.d_h + self.d_r + self.d_v)
        return queries * (2 * self.d_c + self.d_r) < expanded

    def expanded(
        self,
        q_c: Float[Tensor, "batch heads queries d_h"],
        q_r: Float[Tensor, "batch heads queries d_r"],
        c: Float[Tensor, "batch 1 keys d_c"],
        k_r: Float[Tensor, "batch 1 keys d_r"],
        step: Step,
    ) -> Float[Tensor, "batch heads queries d_v"]:
        """Makes every head's keys and values from the latents, then attends.

        Args:
            q_c: content part of the queries.
            q_r: positional part of the queries, rotated.
            c: latents of all tokens, normed.
            k_r: the key that all heads share, rotated.
            step: says which keys are hidden.
        """
        kv = self.kv_up(c[:, 0]).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_c, v = kv.split([self.d_h, self.d_v], dim=-1)
        q, k = torch.cat((q_c, q_r), dim=-1), torch.cat((k_c, k_r.expand(-1, self.heads, -1, -1)), dim=-1)
        return F.scaled_dot_product_attention(q, k, v, step.mask, is_causal=step.causal, scale=self.scale)

    def absorbed(
        self,
        q_c: Float[Tensor, "batch heads queries d_h"],
        q_r: Float[Tensor, "batch heads queries d_r"],
        c: Float[Tensor, "batch 1 keys d_c"],
        k_r: Float[Tensor, "batch 1 keys d_r"],
        step: Step,
    ) -> Float[Tensor, "batch heads queries d_v"]:
        """Attends over the latents themselves, for which the queries of all heads become the rows of one product.

        Args:
            q_c: content part of the queries.
            q_r: positional part of the queries, rotated.
            c: latents of all tokens, normed.
            k_r: the key that all heads share, rotated.
            step: says which keys are hidden.
        """
        w_uk, w_uv = self.kv_up.weight.unflatten(0, (self.heads, -1)).split([self.d_h, self.d_v], dim=1)
        rows = torch.cat((q_c @ w_uk, q_r), dim=-1) * self.scale  # (batch, heads, queries, d_c + d_r)
        shape = rows.shape[:3]
        rows = rows.flatten(1, 2)
        keys, positions = c[:, 0], k_r[:, 0]
        scores = dot_products(rows[..., : self.d_c], keys) + torch.bmm(rows[..., self.d_c :], positions.mT)
        scores = scores.unflatten(1, shape[1:])
        weights = seen_weights(scores, step.mask)
        seen = torch.bmm(weights.flatten(1, 2), keys).unflatten(1, shape[1:])  # (batch, heads, queries, d_c)
        # the matrix first: a product that is one row wide is slower than one that is one column wide
        return (w_uv @ seen.mT).mT
