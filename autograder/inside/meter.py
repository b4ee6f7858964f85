"""Counts what an answer costs: FLOPs, the largest tensor made, the elements held and kept for backward."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count, shape_wrapper

aten = torch.ops.aten


def _cpu_sdpa_flops(query, key, value, *args, out_shape=None, **kwargs) -> int:
    return sdpa_flop_count(query, key, value)


# torch counts 0 for the CPU's fused attention (pytorch#195460), and skips the matrix-vector products
EXTRA_FLOPS = {
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_sdpa_flops,
    aten.mv: lambda a, x, out_shape=None, **kwargs: 2 * a[0] * a[1],
    aten.dot: lambda a, b, out_shape=None, **kwargs: 2 * a[0],
    aten.vdot: lambda a, b, out_shape=None, **kwargs: 2 * a[0],
    aten.addmv: lambda bias, a, x, out_shape=None, **kwargs: 2 * a[0] * a[1],
}


def _by_dtype(count: Callable) -> Callable:
    """Counts a product of complex numbers as the four real ones that it is."""

    def counted(*args, out_val=None, **kwargs) -> int:
        parts = 4 if isinstance(out_val, Tensor) and out_val.is_complex() else 1
        return parts * count(*args, out_val=out_val, **kwargs)

    counted._get_raw = True  # torch hands over tensors in the place of shapes
    return counted


COUNTS = {
    op: _by_dtype(count)
    for op, count in {**flop_registry, **{k: shape_wrapper(f) for k, f in EXTRA_FLOPS.items()}}.items()
}


class Saved:
    """A tensor that autograd keeps; tells the meter when it is let go."""

    def __init__(self, meter: "Meter", tensor: Tensor):
        self.tensor = tensor
        self._meter = meter
        self._meter.note_saved(tensor, 1)

    def __del__(self):
        self._meter.note_saved(self.tensor, -1)


class Meter(TorchDispatchMode):
    """A context that watches every operation below it, forward and backward.

    `largest` is the element count of the largest tensor that an operation returned (views of arguments aside); `held` is the
    most elements of all tensors made that were alive at one time; `saved` is the most that autograd kept for the backward pass
    at one time, each storage once.
    """

    def __init__(self):
        super().__init__()
        self.largest = self.held = self.saved = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._alive = 0
        self._kept: dict[int, int] = {}  # how often autograd keeps a storage
        self._kept_elements = 0
        self._flops = FlopCounterMode(display=False, custom_mapping=COUNTS)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: Saved(self, tensor), lambda saved: saved.tensor
        )

    @property
    def flops(self) -> int:
        return self._flops.get_total_flops()

    def note_saved(self, tensor: Tensor, change: int) -> None:
        """Counts a storage when autograd keeps it for the first time, and no more when it lets go for the last."""
        key = tensor.untyped_storage().data_ptr()
        before = self._kept.get(key, 0)
        self._kept[key] = before + change
        if before == 0 or self._kept[key] == 0:
            self._kept_elements += change * _elements(tensor)
            self.saved = max(self.saved, self._kept_elements)

    def _note_made(self, tensor: Tensor) -> None:
        storage, elements = tensor.untyped_storage(), _elements(tensor)
        self.largest = max(self.largest, elements)
        self._made[storage._cdata] = StorageWeakRef(storage), elements
        self._alive += elements
        if self._alive > self.held:  # only now it matters which of them are gone
            self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
            self._alive = sum(elements for _, elements in self._made.values())
            self.held = max(self.held, self._alive)

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
                self._note_made(tensor)
        return out


def _elements(tensor: Tensor) -> int:
    """Elements of the whole storage that a tensor looks at."""
    return tensor.untyped_storage().nbytes() // max(1, tensor.element_size())
