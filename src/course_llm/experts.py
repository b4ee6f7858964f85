"""Mixture of experts as DeepSeek has it: a few small networks per token out of many, and some that see every token.

A router scores all experts; the best `per_token` of them, taken from the best groups, are added up with their
scores as weights. DeepSeek-V2 scores with a softmax; V3 with a sigmoid and a bias that steers the choice but
not the weights (arXiv 2412.19437, §2.1.2). The course's chapters do not need it; DeepSeek's weights do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes and rules of a mixture of experts.

    Attributes:
        experts: how many there are to choose from.
        per_token: how many each token takes.
        d_ff: width of one expert.
        shared: experts that every token takes; they are one network of width `shared * d_ff`.
        dense_layers: how many layers at the start have an ordinary feed-forward network.
        scoring: `"softmax"` (V2) or `"sigmoid"` (V3, with the bias that steers the choice).
        groups: equal groups into which the experts are divided.
        best_groups: how many groups a token may take experts from; all of them is no limit.
        normalise: make a token's weights sum to 1.
        scale: multiplies the weights.
    """

    experts: int
    per_token: int
    d_ff: int
    shared: int = 0
    dense_layers: int = 0
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    best_groups: int = 1
    normalise: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.experts:
            raise ValueError(f"ExpertsConfig needs 1 <= per_token <= experts, got per_token={self.per_token}")
        if self.experts % self.groups or not 1 <= self.best_groups <= self.groups:
            raise ValueError(
                f"ExpertsConfig needs experts % groups == 0 and 1 <= best_groups <= groups, got "
                f"experts={self.experts}, groups={self.groups}, best_groups={self.best_groups}"
            )


class MixtureOfExperts(nn.Module):
    """A feed-forward layer of SwiGLU experts with a router.

    Args:
        config: of the model, a `course_llm.model.ModelConfig` with `experts`.
        device: where to build.
    """

    def __init__(self, config: Any, device: Any = None) -> None:
        super().__init__()
        from course_llm.layers import FeedForward

        self.rule = rule = config.experts
        self.router = nn.Parameter(torch.empty(rule.experts, config.d_hidden, device=device))
        self.router_bias = nn.Parameter(torch.empty(rule.experts, device=device), requires_grad=False)
        self.up = nn.Parameter(torch.empty(rule.experts, 2 * rule.d_ff, config.d_hidden, device=device))
        self.down = nn.Parameter(torch.empty(rule.experts, config.d_hidden, rule.d_ff, device=device))
        self.shared = FeedForward(config, rule.shared * rule.d_ff, device) if rule.shared else None

    def route(
        self, x: Float[Tensor, "tokens d_hidden"]
    ) -> tuple[Int[Tensor, "tokens per_token"], Float[Tensor, "tokens per_token"]]:
        """Returns which experts each token takes and with which weights; scores in float32.

        Args:
            x: one row per token.
        """
        rule = self.rule
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.router.to(wide))
        scores = logits.softmax(-1) if rule.scoring == "softmax" else logits.sigmoid()
        wanted = scores if rule.scoring == "softmax" else scores + self.router_bias
        if rule.best_groups < rule.groups:
            grouped = wanted.unflatten(-1, (rule.groups, -1))
            best = grouped.amax(-1) if rule.scoring == "softmax" else grouped.topk(2, dim=-1).values.sum(-1)
            kept = torch.zeros_like(best, dtype=torch.bool).scatter(
                -1, best.topk(rule.best_groups).indices, True
            )
            outside = 0.0 if rule.scoring == "softmax" else float("-inf")
            wanted = grouped.masked_fill(~kept.unsqueeze(-1), outside).flatten(-2)
        chosen = wanted.topk(rule.per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if rule.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * rule.scale

    def forward(self, x: Float[Tensor, "*batch d_hidden"]) -> Float[Tensor, "*batch d_hidden"]:
        """Returns, for each row by itself, the weighted sum of its experts and what the shared ones give."""
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weights = self.route(tokens)
        if (
            chosen.numel() <= self.rule.experts
        ):  # a decode step: fetch the weights of each token, no shape depends on data
            up = torch.einsum("ted,td->te", self.up[chosen].flatten(1, 2), tokens).unflatten(
                1, (chosen.shape[1], -1)
            )
            gate, value = up.chunk(2, dim=-1)
            parts = torch.einsum("tkdf,tkf->tkd", self.down[chosen], F.silu(gate) * value)
            mixed = (parts * weights.unsqueeze(-1).to(parts.dtype)).sum(1)
        else:
            mixed = torch.zeros_like(tokens)
            for expert in range(self.rule.experts):
                token, place = (chosen == expert).nonzero(as_tuple=True)
                gate, value = F.linear(tokens[token], self.up[expert]).chunk(2, dim=-1)
                part = F.linear(F.silu(gate) * value, self.down[expert])
                mixed = mixed.index_add(0, token, (part * weights[token, place, None]).to(mixed.dtype))
        if self.shared is not None:
            mixed = mixed + self.shared(tokens)
        return mixed.view(x.shape)
