"""Counts what an answer costs: FLOPs, the largest tensor made, the elements kept for backward."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

aten = torch.ops.aten


def _cpu_sdpa_flops(query, key, value, *args, out_shape=None, **kwargs) -> int:
    return sdpa_flop_count(query, key, value)


# torch counts 0 for the CPU's fused attention (pytorch#195460), and skips the matrix-vector products
EXTRA_FLOPS = {
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_sdpa_flops,
    aten.mv: lambda a, x, out_shape=None, **kwargs: 2 * a[0] * a[1],
    aten.dot: lambda a, b, out_shape=None, **kwargs: 2 * a[0],
}


class Meter(TorchDispatchMode):
    """A context that watches every operation below it, forward and backward.

    `largest` is the element count of the largest tensor that an operation returned (views of arguments aside); `saved`
    is the number of elements that autograd kept for the backward pass, each storage once.
    """

    def __init__(self):
        super().__init__()
        self.largest = 0
        self._storages: dict[int, int] = {}
        self._flops = FlopCounterMode(display=False, custom_mapping=EXTRA_FLOPS)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._on_save, lambda x: x)

    @property
    def flops(self) -> int:
        return self._flops.get_total_flops()

    @property
    def saved(self) -> int:
        return sum(self._storages.values())

    def _on_save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage.nbytes() // max(1, tensor.element_size())
        return tensor

    def __enter__(self):
        self._flops.__enter__()
        self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *exc):
        super().__exit__(*exc)
        self._hooks.__exit__(*exc)
        self._flops.__exit__(*exc)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(
                    self.largest, tensor.untyped_storage().nbytes() // max(1, tensor.element_size())
                )
        return out
