"""Caches of keys and values for `course_llm.model`: growing, chunked, static, rolling, int8, paged, and latent.

All have one interface. `update(layer, k, v)` takes the new tokens of a layer and returns all keys and values
that the layer attends to; `key_slots(slots)` says which place in the sequence each of them has, which is all
the model needs to know to mask them; `advance(new)` counts the new tokens when every layer has had them.
`select(rows)` keeps or repeats rows of the batch (beam search), `crop(length)` forgets the last tokens
(speculative decoding), `cache_bytes` says what is held. Each layer has tensors of its own: that compiles to
better code than one stacked tensor.

With multi-head latent attention "keys" are the latents and "values" the shared rotated keys, one head of
each: every class here is then a latent cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor


def cache_shape(config: Any) -> tuple[int, int, int]:
    """Returns heads, width of a key and width of a value that one token takes in one layer.

    Args:
        config: of the model, a `course_llm.model.ModelConfig`.
    """
    if config.latent is not None:
        return 1, config.latent.d_c, config.latent.rope_dim
    return config.n_kv_heads, config.d_head, config.d_head


class Cache:
    """What all caches share; this class itself holds nothing.

    Args:
        config: of the model, a `course_llm.model.ModelConfig`.
        batch: rows.
        dtype: in which keys and values are held.
        device: where they are held.

    Attributes:
        length: tokens seen so far, padding counted.

    Raises:
        ValueError: batch is below 1.
    """

    def __init__(
        self, config: Any, batch: int, dtype: torch.dtype = torch.float32, device: Any = None
    ) -> None:
        if batch < 1:
            raise ValueError(f"{type(self).__name__} needs batch >= 1, got batch={batch}")
        self.layers, self.batch, self.dtype, self.device = config.layers, batch, dtype, device
        self.kv_heads, self.key_dim, self.value_dim = cache_shape(config)
        self.length: Any = 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores a layer's new keys and values and returns all those that its new tokens may attend to.

        `length` stays what it is until `advance`.

        Args:
            layer: number of the layer, from 0.
            k: keys of the new tokens, `(batch, kv_heads, new, key width)`: see `cache_shape`.
            v: their values, `(batch, kv_heads, new, value width)`.

        Returns:
            Keys `(batch, kv_heads, keys, key width)` and values `(batch, kv_heads, keys, value width)`, in the dtype
            of what came; `key_slots` says where in the sequence each of them stands.

        Raises:
            ValueError: k has another batch or other heads.
        """
        raise NotImplementedError

    def key_slots(self, slots: Int[Tensor, " new"]) -> Int[Tensor, " keys"]:
        """Returns the place in the sequence of each key that `update` returns.

        Args:
            slots: places of the new tokens.
        """
        return torch.arange(self.length + len(slots), device=slots.device)

    def is_fresh(self) -> bool:
        """Says whether `update` returns just what it is given: nothing is held and nothing is added."""
        return self.length == 0

    def sees_all(self, window: int | None) -> bool:
        """Says whether one more token may attend to every key that `update` then returns.

        Args:
            window: of the model; None where a token sees all before it.
        """
        return window is None or self.length + 1 <= window

    def advance(self, new: int) -> None:
        """Counts tokens that every layer has been given.

        Args:
            new: how many.
        """
        self.length = self.length + new

    def reset(self) -> None:
        """Forgets everything."""
        self.length = 0

    def crop(self, length: int) -> None:
        """Forgets all tokens but the first `length`.

        Args:
            length: tokens to keep.

        Raises:
            ValueError: there are fewer, or this kind of cache cannot do it.
        """
        if not 0 <= length <= int(self.length):
            raise ValueError(f"crop needs 0 <= length <= {int(self.length)}, got length={length}")
        self.length = length

    def select(self, rows: Int[Tensor, " kept"]) -> None:
        """Makes row i what row `rows[i]` was.

        Args:
            rows: for each new row the number of an old one; they may repeat.
        """
        self.batch = len(rows)
        self._apply(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def _apply(self, f: Any) -> None:
        for tensors in self._held():
            tensors[:] = [f(tensor) for tensor in tensors]

    def _held(self) -> list[list[Tensor]]:
        """Lists the lists of tensors that are held, one entry per layer."""
        raise NotImplementedError

    @property
    def cache_bytes(self) -> int:
        """Bytes of memory that the cache holds."""
        return sum(tensor.numel() * tensor.element_size() for tensors in self._held() for tensor in tensors)

    def _empty(self, rows: int, width: int, dtype: torch.dtype | None = None) -> list[Tensor]:
        shape = (self.batch, self.kv_heads, rows, width)
        return [torch.zeros(shape, dtype=dtype or self.dtype, device=self.device) for _ in range(self.layers)]

    def _refuse_other_batches(self, k: Tensor) -> None:
        if k.shape[0] != self.batch or k.shape[1] != self.kv_heads:
            raise ValueError(
                f"{type(self).__name__} needs batch={self.batch} and {self.kv_heads} heads, got {tuple(k.shape[:2])}"
            )


class GrowingCache(Cache):
    """Joins old and new at every step: no limit, but each step copies all that is held; arguments as in `Cache`."""

    def __init__(
        self, config: Any, batch: int, dtype: torch.dtype = torch.float32, device: Any = None
    ) -> None:
        super().__init__(config, batch, dtype, device)
        self.reset()

    def reset(self) -> None:
        """Forgets everything and gives the memory back."""
        self.length = 0
        self.keys, self.values = self._empty(0, self.key_dim), self._empty(0, self.value_dim)

    def _held(self) -> list[list[Tensor]]:
        return [self.keys, self.values]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns all keys and values of the layer, the new ones last; see `Cache.update`."""
        self._refuse_other_batches(k)
        self.keys[layer] = torch.cat((self.keys[layer], k.to(self.dtype)), dim=2)
        self.values[layer] = torch.cat((self.values[layer], v.to(self.dtype)), dim=2)
        return self.keys[layer].to(k.dtype), self.values[layer].to(k.dtype)

    def crop(self, length: int) -> None:
        """Forgets all tokens but the first `length` and gives the memory back; see `Cache.crop`."""
        super().crop(length)
        self._apply(lambda tensor: tensor[:, :, :length])


class ChunkedCache(GrowingCache):
    """Grows by `chunk` tokens at a time and returns all of its memory, used or not.

    Nothing is copied but once per chunk. And without gaps between the heads matrix products on a CPU read keys and
    values several times faster than a part of each head's memory: see `course_llm.layers.attend`.

    Args:
        config: as in `Cache`.
        batch: as in `Cache`.
        dtype: as in `Cache`.
        device: as in `Cache`.
        chunk: tokens by which each head's memory grows.

    Raises:
        ValueError: chunk or batch is below 1.
    """

    def __init__(
        self,
        config: Any,
        batch: int,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        chunk: int = 64,
    ) -> None:
        if chunk < 1:
            raise ValueError(f"ChunkedCache needs chunk >= 1, got chunk={chunk}")
        self.chunk = chunk
        super().__init__(config, batch, dtype, device)

    def _room(self, tokens: int) -> int:
        """The memory, in tokens, once so many are held."""
        return max(self.keys[0].shape[2], -(-tokens // self.chunk) * self.chunk)

    def sees_all(self, window: int | None) -> bool:
        """As in `Cache.sees_all`, and only if the memory is then full: what is not used yet must be hidden."""
        return self._room(self.length + 1) == self.length + 1 and super().sees_all(window)

    def key_slots(self, slots: Int[Tensor, " new"]) -> Int[Tensor, " keys"]:
        """As in `Cache.key_slots`; memory that is not used yet counts as places behind the new tokens."""
        # places after the new tokens hold nothing yet: the causal mask hides them
        if self.length == 0:
            return slots
        return torch.arange(self._room(self.length + len(slots)), device=slots.device)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the new rows behind the old ones and returns the whole memory; the first time, what it was given.

        See `Cache.update`.
        """
        self._refuse_other_batches(k)
        end = self.length + k.shape[2]
        for held, x in ((self.keys, k), (self.values, v)):
            missing = self._room(end) - held[layer].shape[2]
            if missing:
                held[layer] = F.pad(held[layer], (0, 0, 0, missing))
            held[layer][:, :, self.length : end] = x
        if self.length == 0:
            return k, v
        return self.keys[layer].to(k.dtype), self.values[layer].to(v.dtype)

    def crop(self, length: int) -> None:
        """Forgets all tokens but the first `length` and keeps the memory; see `Cache.crop`."""
        Cache.crop(self, length)


class StaticCache(Cache):
    """Writes into memory that was set aside once.

    Args:
        config: as in `Cache`.
        batch: as in `Cache`.
        max_seq: room, in tokens.
        dtype: as in `Cache`.
        device: as in `Cache`.
        fixed: return the whole memory, whatever is used of it, and keep `length` as a tensor on the device.
            Then addresses and shapes never change: one compilation, or one captured CUDA graph, serves every
            step. The caller sees to it that there is room.

    Raises:
        ValueError: max_seq or batch is below 1.
    """

    def __init__(
        self,
        config: Any,
        batch: int,
        max_seq: int,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        fixed: bool = False,
    ) -> None:
        super().__init__(config, batch, dtype, device)
        if max_seq < 1:
            raise ValueError(f"StaticCache needs max_seq >= 1, got max_seq={max_seq}")
        self.max_seq, self.fixed = max_seq, fixed
        self.keys, self.values = self._empty(max_seq, self.key_dim), self._empty(max_seq, self.value_dim)
        self.reset()

    def reset(self) -> None:
        """Forgets everything and keeps the memory."""
        if isinstance(self.length, Tensor):
            self.length.zero_()  # in place: the address must stay the same
        else:
            self.length = torch.zeros((), dtype=torch.int64, device=self.device) if self.fixed else 0

    def _held(self) -> list[list[Tensor]]:
        return [self.keys, self.values]

    def is_fresh(self) -> bool:
        """As in `Cache.is_fresh`; with `fixed` never, since `update` then returns the whole memory."""
        return not self.fixed and self.length == 0

    def sees_all(self, window: int | None) -> bool:
        """As in `Cache.sees_all`; with `fixed` never, since `update` then returns the whole memory."""
        return not self.fixed and super().sees_all(window)

    def key_slots(self, slots: Int[Tensor, " new"]) -> Int[Tensor, " keys"]:
        """As in `Cache.key_slots`; with `fixed` all places of the memory."""
        # places after the new tokens hold nothing yet: the causal mask hides them
        return torch.arange(self.max_seq, device=slots.device) if self.fixed else super().key_slots(slots)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the new rows behind the old ones and returns all (`fixed`: the whole memory); see `Cache.update`.

        Raises:
            ValueError: there is no room (not looked at with `fixed`), or k has another batch or other heads.
        """
        self._refuse_other_batches(k)
        keys, values, new = self.keys[layer], self.values[layer], k.shape[2]
        if self.fixed:
            places = torch.arange(new, device=k.device) + self.length
            keys.index_copy_(2, places, k.to(self.dtype))
            values.index_copy_(2, places, v.to(self.dtype))
            return keys.to(k.dtype), values.to(v.dtype)
        end = self.length + new
        if end > self.max_seq:
            raise ValueError(f"StaticCache needs at most max_seq={self.max_seq} tokens, got {end}")
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end].to(k.dtype), values[:, :, :end].to(v.dtype)

    def advance(self, new: int) -> None:
        """As in `Cache.advance`; with `fixed` the counter keeps its place in memory."""
        if self.fixed:
            self.length.add_(new)  # in place: the address must stay the same
        else:
            self.length += new

    def crop(self, length: int) -> None:
        """As in `Cache.crop`; with `fixed` the length is not checked, for reading it would wait for the device."""
        if not self.fixed:
            super().crop(length)
        else:
            self.length.fill_(length)


class RollingCache(Cache):
    """Keeps the last `window` tokens only, in a ring: for models whose tokens see no farther (Mistral).

    Args:
        config: as in `Cache`.
        batch: as in `Cache`.
        dtype: as in `Cache`.
        device: as in `Cache`.
        window: tokens to keep; None takes the model's window.

    Raises:
        ValueError: the window is below 1 or there is none, or batch is below 1.
    """

    def __init__(
        self,
        config: Any,
        batch: int,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        window: int | None = None,
    ) -> None:
        super().__init__(config, batch, dtype, device)
        self.window = window if window is not None else config.window
        if self.window is None or self.window < 1:
            raise ValueError(f"RollingCache needs window >= 1, got window={self.window}")
        self.keys, self.values = (
            self._empty(self.window, self.key_dim),
            self._empty(self.window, self.value_dim),
        )

    def _held(self) -> list[list[Tensor]]:
        return [self.keys, self.values]

    def _ring_slots(self, last: int, device: Any) -> Int[Tensor, " window"]:
        """The place in the sequence of each entry of the ring when `last` is the newest token; below 0: empty."""
        ring = torch.arange(self.window, device=device)
        slots = last - (last - ring) % self.window
        return slots.clamp(min=-1)

    def sees_all(self, window: int | None) -> bool:
        """As in `Cache.sees_all`; only if the ring is then full and no wider than the model's window."""
        return self.length + 1 >= self.window and (window is None or self.window <= window)

    def key_slots(self, slots: Int[Tensor, " new"]) -> Int[Tensor, " keys"]:
        """As in `Cache.key_slots`; -1 where the ring has no key yet."""
        if self.length == 0:
            return slots
        if len(slots) == 1:
            return self._ring_slots(self.length, slots.device)
        return torch.cat((self._ring_slots(self.length - 1, slots.device), slots))

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the ring, in its own order, with one new token in it; or the ring as it was and several new ones.

        See `Cache.update`.
        """
        self._refuse_other_batches(k)
        keys, values, new = self.keys[layer], self.values[layer], k.shape[2]
        if new == 1 and self.length:
            keys[:, :, self.length % self.window] = k[:, :, 0]
            values[:, :, self.length % self.window] = v[:, :, 0]
            return keys.to(k.dtype), values.to(v.dtype)
        seen = k, v
        if self.length:  # a chunk's first queries still need what its last tokens will overwrite
            seen = torch.cat((keys.to(k.dtype), k), dim=2), torch.cat((values.to(v.dtype), v), dim=2)
        kept = min(new, self.window)
        places = torch.arange(self.length + new - kept, self.length + new, device=k.device) % self.window
        keys[:, :, places] = k[:, :, -kept:].to(self.dtype)
        values[:, :, places] = v[:, :, -kept:].to(self.dtype)
        return seen

    def crop(self, length: int) -> None:
        """Does nothing where nothing is to be forgotten.

        Raises:
            ValueError: length is not the present one; what was overwritten is gone.
        """
        if length != self.length:
            raise ValueError("RollingCache cannot crop: what was overwritten is gone")
