"""Two caches that save memory: int8 numbers, and pages that are only taken when they are needed.

Both have the interface of `course_llm.caches.Cache`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from course_llm.caches import Cache
from course_llm.kv_cache import dequantize_kv, quantize_kv


class QuantizedCache(Cache):
    """Holds int8 numbers and one scale per token and head, each off by half a scale at most.

    Args:
        config: as in `course_llm.caches.Cache`.
        batch: as in `course_llm.caches.Cache`.
        max_seq: room, in tokens.
        dtype: of the scales.
        device: where numbers and scales are held.

    Raises:
        ValueError: max_seq or batch is below 1.
    """

    def __init__(
        self, config: Any, batch: int, max_seq: int, dtype: torch.dtype = torch.float32, device: Any = None
    ) -> None:
        super().__init__(config, batch, dtype, device)
        if max_seq < 1:
            raise ValueError(f"QuantizedCache needs max_seq >= 1, got max_seq={max_seq}")
        self.max_seq = max_seq
        self.numbers = [self._empty(max_seq, width, torch.int8) for width in (self.key_dim, self.value_dim)]
        self.scales = [self._empty(max_seq, 1) for _ in range(2)]

    def _held(self) -> list[list[Tensor]]:
        return [*self.numbers, *self.scales]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Rounds and stores the new rows; returns all as floats again, the new ones as rounded, too.

        See `course_llm.caches.Cache.update`.

        Raises:
            ValueError: there is no room, or k has another batch or other heads.
        """
        self._refuse_other_batches(k)
        end = self.length + k.shape[2]
        if end > self.max_seq:
            raise ValueError(f"QuantizedCache needs at most max_seq={self.max_seq} tokens, got {end}")
        found = []
        for part, x in enumerate((k, v)):
            numbers, scales = self.numbers[part][layer], self.scales[part][layer]
            rounded, scale = quantize_kv(x)
            numbers[:, :, self.length : end] = rounded
            scales[:, :, self.length : end] = scale
            found.append(dequantize_kv(numbers[:, :, :end], scales[:, :, :end]).to(x.dtype))
        return found[0], found[1]


class PagedCache(Cache):
    """Takes memory from a pool in pages of a few tokens (PagedAttention, arXiv 2309.06180).

    A row's tokens lie on the pages that its block table lists, in that order, wherever in the pool they are.
    All layers share the table.

    Args:
        config: as in `course_llm.caches.Cache`.
        batch: as in `course_llm.caches.Cache`.
        pages: in the pool.
        page_size: tokens per page.
        dtype: as in `course_llm.caches.Cache`.
        device: as in `course_llm.caches.Cache`.

    Raises:
        ValueError: pages, page_size or batch is below 1.
    """

    def __init__(
        self,
        config: Any,
        batch: int,
        pages: int,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        super().__init__(config, batch, dtype, device)
        if pages < 1 or page_size < 1:
            raise ValueError(
                f"PagedCache needs pages, page_size >= 1, got pages={pages}, page_size={page_size}"
            )
        self.page_size, self.pages = page_size, pages

        def pool(width: int) -> list[Tensor]:
            shape = (pages, page_size, self.kv_heads, width)
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(self.layers)]

        self.keys, self.values = pool(self.key_dim), pool(self.value_dim)
        self.reset()

    def reset(self) -> None:
        """Forgets everything; all pages are free."""
        self.length = 0
        self.free = list(range(self.pages))
        self.table: list[list[int]] = [[] for _ in range(self.batch)]
        self._blocks: Tensor | None = None

    def _held(self) -> list[list[Tensor]]:
        return [self.keys, self.values]

    @property
    def free_pages(self) -> int:
        """Pages that no row holds."""
        return len(self.free)

    def _reserve(self, tokens: int) -> None:
        """Takes pages until every row has room for so many tokens; takes none if they do not suffice."""
        wanted = -(-tokens // self.page_size)
        missing = sum(max(wanted - len(row), 0) for row in self.table)
        if missing > len(self.free):
            raise ValueError(
                f"PagedCache needs {missing} free pages, got {len(self.free)}; nothing was changed"
            )
        for row in self.table:
            while len(row) < wanted:
                row.append(self.free.pop())
                self._blocks = None
        if self._blocks is None:
            self._blocks = torch.tensor(self.table, device=self.device)  # (batch, blocks)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the new tokens onto their pages and gathers all tokens of every row.

        See `course_llm.caches.Cache.update`.

        Raises:
            ValueError: too few pages are free, nothing is changed then; or k has another batch or other heads.
        """
        self._refuse_other_batches(k)
        end = self.length + k.shape[2]
        self._reserve(end)
        slots = torch.arange(self.length, end, device=k.device)
        pages, places = self._blocks[:, slots // self.page_size], slots % self.page_size
        found = []
        for pool, x in ((self.keys[layer], k), (self.values[layer], v)):
            pool[pages, places] = x.transpose(1, 2).to(self.dtype)  # (batch, new, heads, width)
            rows = pool[self._blocks].flatten(1, 2)[:, :end]
            found.append(rows.transpose(1, 2).to(x.dtype))
        return found[0], found[1]

    def crop(self, length: int) -> None:
        """Forgets all tokens but the first `length`; pages that hold none of them become free.

        Raises:
            ValueError: there are fewer tokens.
        """
        super().crop(length)
        needed = -(-length // self.page_size)
        for row in self.table:
            self.free += row[needed:]
            del row[needed:]
        self._blocks = None

    def select(self, rows: Tensor) -> None:
        """Makes row i what row `rows[i]` was; pages of rows that are not kept return to the pool.

        A row that is taken several times is copied, onto pages of its own.

        Args:
            rows: for each new row the number of an old one.

        Raises:
            ValueError: the copies need more pages than are free; nothing is changed then.
        """
        old, chosen = self.table, rows.tolist()
        kept = {page for row in set(chosen) for page in old[row]}
        free = self.free + [page for row in old for page in row if page not in kept]
        copied = [row for place, row in enumerate(chosen) if row in chosen[:place]]
        needed = sum(len(old[row]) for row in copied)
        if needed > len(free):
            raise ValueError(f"PagedCache needs {needed} free pages, got {len(free)}; nothing was changed")
        self.free, self.table, self.batch = free, [], len(chosen)
        copies: list[tuple[int, int]] = []
        for place, row in enumerate(chosen):
            pages = list(old[row])
            if row in chosen[:place]:
                pages = [self.free.pop() for _ in pages]
                copies += zip(old[row], pages, strict=True)
            self.table.append(pages)
        if copies:
            sources, targets = (
                torch.tensor(pages, device=self.device) for pages in zip(*copies, strict=True)
            )
            for pool in (*self.keys, *self.values):
                pool[targets] = pool[sources]
        self._blocks = None
