"""Weights laid out in memory for decoding on a CPU: the same numbers, in the order in which a few rows read them.

A decode step multiplies one row per sequence with every weight, so that reading the weights is most of its
time. The library's product of a single row reads a matrix fastest along its outputs, where checkpoints store
it along its inputs. With several rows the product reads blocks of both, and oneDNN has a format for them.
Which is best depends on the number of rows: `prepack_weights` is told how many there will be.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from course_llm.layers import Linear

Model = TypeVar("Model", bound=nn.Module)
PLAIN = ("kv_up",)  # absorbed latent attention works with the weight itself


class BlockedLinear(nn.Module):
    """A linear layer, for inference, whose weight lies in oneDNN's blocks.

    Args:
        linear: gives weight and bias; both are shared with it, the blocks are a copy.
        rows: number of rows of the input that the blocks are chosen for; with others the result is the same, and
            takes longer.
    """

    def __init__(self, linear: nn.Linear, rows: int) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.blocks = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Returns the product with the weight, plus the bias if there is one."""
        return torch.ops.mkldnn._linear_pointwise(x, self.blocks, self.bias, "none", [], "")


def along_outputs(linear: nn.Linear) -> nn.Linear:
    """Returns the layer with its weight stored along the outputs: shape and values stay, the strides change.

    Args:
        linear: the layer; it stays as it is.
    """
    twin = copy.copy(linear)
    weight = linear.weight.detach().t().contiguous().t()
    twin._parameters = {**linear._parameters, "weight": nn.Parameter(weight, requires_grad=False)}
    return twin


@torch.no_grad()
def prepack_weights(model: Model, batch: int) -> Model:
    """Returns a model for inference whose matrices are laid out for steps of `batch` rows.

    The results are those of the model up to rounding, for any input. The matrices are copied as they are now;
    everything else is shared with the model. On other devices than a CPU, and where oneDNN or its products in the
    model's dtype are missing, the model's own layers are used.

    Args:
        model: a decoder or a layer of one, any `torch.nn.Module`; it stays as it is.
        batch: sequences that will be decoded together.

    Returns:
        A model of the same class.

    Raises:
        ValueError: batch is below 1.
    """
    if batch < 1:
        raise ValueError(f"prepack_weights needs batch >= 1, got batch={batch}")

    def lay_out(name: str, module: nn.Module) -> nn.Module:
        if isinstance(module, Linear):
            return module if name in PLAIN else _laid_out(module, batch)
        twin = copy.copy(module)
        twin._modules = {name: child and lay_out(name, child) for name, child in module._modules.items()}
        return twin

    return lay_out("", model)


def _laid_out(linear: Linear, batch: int) -> nn.Module:
    """Chooses the layout of one layer."""
    weight = linear.weight
    if weight.device.type != "cpu" or (weight.dtype == torch.float64 and batch > 1):
        return linear
    if batch == 1 and weight.dtype in (torch.float32, torch.float64):
        # a narrow output is read faster as it is
        return along_outputs(linear) if linear.out_features >= linear.in_features else linear
    # blocks for fewer than 16 rows are slower for some numbers of rows, and faster for none
    return BlockedLinear(linear, max(batch, 16)) if has_blocks(weight.dtype) else linear


def has_blocks(dtype: torch.dtype) -> bool:
    """Says whether oneDNN is there and has products in this dtype on this processor: half precisions need AVX-512.

    Args:
        dtype: of the weights.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float32
