"""A decoder whose step of one token is compiled, while prompts, which come in every length, run as they are."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from course_llm.model import Decoder


def compile_steps(model: Decoder, **settings: Any) -> Decoder:
    """Returns a decoder that compiles its first step with a fixed cache and uses that for all further ones.

    One token per row with a `StaticCache(..., fixed=True)` has the same shapes and addresses at every step, so that one
    compilation serves a whole text. All other calls, and all other caches, go to the model itself.

    Args:
        model: shares its weights with the result.
        settings: for `torch.compile`.
    """
    twin = copy.copy(model)
    step = torch.compile(model, **{"dynamic": False, **settings})

    def forward(ids: Tensor, cache: Any = None, *rest: Any, **more: Any) -> Tensor:
        single = ids.shape[1] == 1 and getattr(cache, "fixed", False)
        return (step if single else model)(ids, cache, *rest, **more)

    twin.forward = forward
    return twin
