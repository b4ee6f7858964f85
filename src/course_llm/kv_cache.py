"""The KV cache: a decoder computes each key and each value once.

A decoder that writes one token at a time and reads the whole text again for each of them computes the same
keys and values over and over: with a causal mask, the past never changes. So it keeps them. What remains per
token is one row of queries against all cached keys: decoding is split into a prefill (the prompt, many rows
at once) and decode steps (one row each). The chapter builds the cache and what belongs to it, generates with
it, and then shrinks it: fewer key and value heads, a window, eight bits per number, pages instead of
reservations.

Shapes are `(batch, heads, seq, head_dim)`; a chunk is any number of new rows at the end of the sequence.
Counts are of matrix products, a multiplication and an addition each: a product of `(a, b)` and `(b, c)` costs
`2 * a * b * c` FLOPs.
"""

import math
from collections.abc import Callable, Hashable

import torch
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor

from course_llm.attention import apply_rope


def _refuse_foreign_rows(who: str, k: Tensor, v: Tensor, shape: tuple[int, ...], buffer: Tensor) -> None:
    """Refuses keys and values that do not belong in `buffer`; -1 in `shape` is the axis of the new rows."""
    for name, rows in (("k", k), ("v", v)):
        expected = tuple(k.shape[i] if n == -1 else n for i, n in enumerate(shape))
        if tuple(rows.shape) != expected:
            raise ValueError(f"{who} needs {name} of shape {expected}, got {tuple(rows.shape)}")
        if rows.dtype != buffer.dtype or rows.device != buffer.device:
            raise ValueError(
                f"{who} needs {name} in {buffer.dtype} on {buffer.device}, got {rows.dtype} on {rows.device}"
            )


def _attend_at_end(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last rows: query i of n, from 0, sees the keys up to position keys - n + i."""
    queries, keys = q.shape[-2], k.shape[-2]
    position = torch.arange(keys - queries, keys, device=q.device)
    hidden = torch.arange(keys, device=q.device) > position[:, None]  # (queries, keys)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    # exponentials and sums of half precision run in float32; float64 stays as it is
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores.to(wide).masked_fill(hidden, -math.inf), dim=-1)
    return weights.to(v.dtype) @ v


def cached_attention(
    q: Float[Tensor, "*batch queries d_k"],
    k: Float[Tensor, "*batch keys d_k"],
    v: Float[Tensor, "*batch keys d_v"],
) -> Float[Tensor, "*batch queries d_v"]:
    """Attends from the last rows of a sequence to all of it, causally (Vaswani et al. 2017, section 3.2).

    The queries are the last rows of the sequence whose keys and values are given: the whole prompt, a chunk,
    or one token. Each sees its own position and everything before it. A step costs
    `2 * queries * keys * (d_k + d_v)` FLOPs per head: nothing is computed for rows that are not asked for.

    Args:
        q: queries of the newest tokens, at most as many as there are keys.
        k: keys of all tokens, oldest first.
        v: their values; d_v may differ from d_k.

    Raises:
        ValueError: there are more queries than keys (optional in the exercise).

    Numerics: the softmax runs in float32 for half-precision inputs.
    """
    if q.shape[-2] > k.shape[-2]:
        raise ValueError(
            f"cached_attention needs queries <= keys, got queries={q.shape[-2]}, keys={k.shape[-2]}"
        )
    return _attend_at_end(q, k, v)


class KVCache:
    """Keeps the keys and values of every token so far in memory that is allocated once.

    Concatenating would copy the whole cache for each new token; here a step writes its own rows only.

    Args:
        batch: sequences that grow together.
        kv_heads: key and value heads.
        max_seq: tokens there is room for.
        head_dim: width of one head.
        dtype: of the keys and values.
        device: where the buffers live.

    Attributes:
        length: tokens stored so far, an int.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        max_seq: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._keys = torch.empty(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self._values = torch.empty_like(self._keys)
        self.length = 0

    def update(
        self,
        k: Float[Tensor, "batch kv_heads new head_dim"],
        v: Float[Tensor, "batch kv_heads new head_dim"],
    ) -> tuple[
        Float[Tensor, "batch kv_heads length head_dim"], Float[Tensor, "batch kv_heads length head_dim"]
    ]:
        """Stores the new rows and returns the keys and values of all tokens so far, the new ones included.

        The rows are copied in: changing k or v afterwards does not change the cache. What was returned keeps
        its values while the cache grows (until `reset`), and is meant for reading.

        Args:
            k: keys of the new tokens, one row or a chunk.
            v: their values.

        Raises:
            ValueError: the new rows do not fit into max_seq, or (optional in the exercise) have another
                shape, dtype or device. Nothing is stored then, and length stays.
        """
        batch, kv_heads, max_seq, head_dim = self._keys.shape
        _refuse_foreign_rows("KVCache.update", k, v, (batch, kv_heads, -1, head_dim), self._keys)
        end = self.length + k.shape[-2]
        if end > max_seq:
            raise ValueError(
                f"KVCache.update needs length + new <= max_seq, got {self.length} + {k.shape[-2]} > {max_seq}"
            )
        # without detach the buffer would keep the graph of every step alive
        self._keys[:, :, self.length : end] = k.detach()
        self._values[:, :, self.length : end] = v.detach()
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def reset(self) -> None:
        """Forgets all tokens; the memory is kept and used again."""
        self.length = 0


def rope_at(x: Float[Tensor, "*batch seq head_dim"], start: int) -> Float[Tensor, "*batch seq head_dim"]:
    """Rotates rows by their positions `start, start + 1, ...` in the whole text (RoFormer, eq. 34).

    New rows continue where the cache ends, so `start` is the cache's length before the update. Keys are
    rotated once, when they are new, and cached rotated.

    Args:
        x: queries or keys of consecutive tokens, not yet rotated.
        start: position of the first row, 0 or more.

    Raises:
        ValueError: start is below 0 (optional in the exercise).
    """
    if start < 0:
        raise ValueError(f"rope_at needs start >= 0, got start={start}")
    return apply_rope(x, torch.arange(start, start + x.shape[-2], device=x.device))


def generate_cached(
    model: Callable[[Tensor, object], tuple[Tensor, object]],
    ids: Int[Tensor, "batch seq"],
    max_new_tokens: int,
    eos_id: int | None = None,
) -> Int[Tensor, "batch longer"]:
    """Continues each row greedily, pushing every token through the model at most once.

    The first call reads the prompt (prefill), each later one only the newest token of each row:
    `prompt + new - 1` tokens per row in all, since the last token written is never read. Ties go to the lower
    token id.

    Args:
        model: `model(ids, cache)` reads `(batch, new)` token ids that continue the text behind `cache` (None
            at first) and returns logits `(batch, new, vocab)` and the cache to hand in next time, which may
            be a new object.
        ids: the prompt.
        max_new_tokens: most tokens to add; 0 returns the prompt.
        eos_id: token that ends a row; a finished row is filled with it, and the loop stops when every row has
            finished. An EOS in the prompt does not count. None never stops early.

    Returns:
        The prompt followed by the new tokens.
    """
    finished = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    text, unread, cache = [ids], ids, None
    for _ in range(max_new_tokens):
        logits, cache = model(unread, cache)
        # argmax returns the first of several maxima, so a tie goes to the lower id
        token = logits[:, -1].argmax(dim=-1).to(ids.dtype)
        if eos_id is not None:
            token = token.masked_fill(finished, eos_id)
            finished = finished | (token == eos_id)
        unread = token[:, None]
        text.append(unread)
        if finished.all():
            break
    return torch.cat(text, dim=1)


def positions_from_padding(real: Bool[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """Counts each row's positions from its first real token, so that left padding takes up none.

    Args:
        real: True on real tokens, False on the padding at the left.

    Returns:
        int64 positions 0, 1, 2, ... on the real tokens of each row; the values on padding have no meaning.
    """
    # -1 on padding would index from the end of a table of positions: clamp it to a position that exists
    return (real.to(torch.int64).cumsum(dim=-1) - 1).clamp(min=0)


def decode_intensity(
    batch: int,
    seq: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    d_ff: int,
    bytes_per_element: int | float,
) -> tuple[int | float, int | float, float]:
    """Counts one decode step: FLOPs, bytes read from memory, and FLOPs per byte (Williams et al. 2009).

    With `d = heads * head_dim` a layer has `w = 2 * d**2 + 2 * d * kv_heads * head_dim + 2 * d * d_ff`
    weights. A step of one new token per sequence costs `batch * layers * (2 * w + 4 * seq * d)` FLOPs. It
    reads the weights once and each sequence's keys and values, in all
    `bytes_per_element * layers * (w + 2 * batch * seq * kv_heads * head_dim)` bytes.

    Args:
        batch: sequences decoded together.
        seq: tokens in the cache, the new one included.
        layers: number of layers.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of one head.
        d_ff: width of the feed-forward layer, which has two matrices.
        bytes_per_element: of weights and cache, for example 2 for FP16.

    Embeddings, norms, biases and activations are left out.
    """
    d = heads * head_dim
    weights = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff  # per layer
    flops = batch * layers * (2 * weights + 4 * seq * d)
    read_bytes = bytes_per_element * layers * (weights + 2 * batch * seq * kv_heads * head_dim)
    return flops, read_bytes, flops / read_bytes


def forward_flops(
    batch: int, new: int, seq: int, layers: int, heads: int, kv_heads: int, head_dim: int, d_ff: int
) -> int:
    """Counts the FLOPs of pushing `new` tokens per sequence through the layers, with `seq` tokens in sight.

    `new = seq` is a prefill (or a pass without a cache), `new = 1` a decode step as in `decode_intensity`.
    Scores are counted in full, hidden ones too, as matrix products compute them.

    Args:
        batch: sequences.
        new: tokens pushed per sequence.
        seq: tokens attended to, the new ones included.
        layers: number of layers.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of one head.
        d_ff: width of the feed-forward layer, which has two matrices.
    """
    d = heads * head_dim
    weights = 2 * d * d + 2 * d * kv_heads * head_dim + 2 * d * d_ff
    return batch * layers * new * (2 * weights + 4 * seq * d)


def kv_cache_bytes(
    batch: int, seq: int, layers: int, kv_heads: int, head_dim: int, bytes_per_element: int | float = 2
) -> int | float:
    """Returns the size of the KV cache, `2 * layers * kv_heads * head_dim * batch * seq` numbers, in bytes.

    The 2 is for keys and values. With `kv_heads * head_dim = d_hidden` and two bytes per number (FP16) this
    is the common `2 * 2 * batch * seq * layers * d_hidden`.

    Args:
        batch: sequences.
        seq: tokens cached per sequence.
        layers: layers, each with a cache of its own.
        kv_heads: key and value heads, fewer than query heads in grouped-query attention.
        head_dim: width of one head.
        bytes_per_element: 4, 2 (FP16, BF16), 1 (int8), or a fraction such as 0.5 (4 bits).
    """
    return 2 * layers * kv_heads * head_dim * batch * seq * bytes_per_element


def grouped_query_attention(
    q: Float[Tensor, "batch heads queries d_k"],
    k: Float[Tensor, "batch kv_heads keys d_k"],
    v: Float[Tensor, "batch kv_heads keys d_v"],
) -> Float[Tensor, "batch heads queries d_v"]:
    """Attends with fewer key and value heads than query heads, causally (Ainslie et al. 2023).

    Consecutive query heads share one key and value head: with 8 heads and 2 kv_heads, heads 0 to 3 read kv
    head 0 and heads 4 to 7 read kv head 1. As in `cached_attention` the queries are the last rows of the
    sequence. `kv_heads = heads` is multi-head attention, `kv_heads = 1` multi-query attention.

    Args:
        q: queries of the newest tokens.
        k: keys of all tokens; kv_heads divides heads.
        v: their values.

    Raises:
        ValueError: kv_heads does not divide heads, or there are more queries than keys (optional in the
            exercise).

    Numerics: the softmax runs in float32 for half-precision inputs.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads % kv_heads:
        raise ValueError(
            f"grouped_query_attention needs heads % kv_heads == 0, got heads={heads}, kv_heads={kv_heads}"
        )
    if q.shape[-2] > k.shape[-2]:
        raise ValueError(
            f"grouped_query_attention needs queries <= keys, got queries={q.shape[-2]}, keys={k.shape[-2]}"
        )
    grouped = q.unflatten(1, (kv_heads, heads // kv_heads))  # (batch, kv_heads, group, queries, d_k)
    # the new axis lets the heads of a group share k and v without a copy of them
    return _attend_at_end(grouped, k.unsqueeze(2), v.unsqueeze(2)).flatten(1, 2)


def mha_to_gqa(w: Float[Tensor, "d_in width"], heads: int, kv_heads: int) -> Float[Tensor, "d_in kv_width"]:
    """Pools the heads of a key or value projection to fewer heads (Ainslie et al. 2023, section 2.1).

    Heads are consecutive column blocks of head_dim. Each group of `heads / kv_heads` consecutive heads
    becomes one, their mean.

    Args:
        w: projection with `heads * head_dim` columns.
        heads: heads it has.
        kv_heads: heads to be left; divides heads.

    Raises:
        ValueError: kv_heads does not divide heads, or heads the width (optional in the exercise).
    """
    if kv_heads < 1 or heads % kv_heads or w.shape[-1] % heads:
        raise ValueError(
            "mha_to_gqa needs heads % kv_heads == 0 and width % heads == 0, "
            f"got heads={heads}, kv_heads={kv_heads}, width={w.shape[-1]}"
        )
    grouped = w.unflatten(-1, (kv_heads, heads // kv_heads, w.shape[-1] // heads))
    return grouped.mean(dim=-2).flatten(-2)  # (d_in, kv_heads * head_dim)


class RollingKVCache:
    """Keeps the last `window` tokens only, for attention with a sliding window (Mistral 7B, section 2).

    Memory stays the same however long the text is. Token p lives in row `p % window`, so that a new token
    overwrites the one that leaves the window.

    Args:
        batch: sequences that grow together.
        kv_heads: key and value heads.
        window: tokens kept, 1 or more.
        head_dim: width of one head.
        dtype: of the keys and values.
        device: where the buffers live.

    Attributes:
        length: tokens seen so far, an int; it goes on past window.

    Raises:
        ValueError: window is below 1 (optional in the exercise).
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        window: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if window < 1:
            raise ValueError(f"RollingKVCache needs window >= 1, got window={window}")
        self._keys = torch.empty(batch, kv_heads, window, head_dim, dtype=dtype, device=device)
        self._values = torch.empty_like(self._keys)
        self.length = 0

    def update(
        self,
        k: Float[Tensor, "batch kv_heads new head_dim"],
        v: Float[Tensor, "batch kv_heads new head_dim"],
    ) -> tuple[
        Float[Tensor, "batch kv_heads rows head_dim"],
        Float[Tensor, "batch kv_heads rows head_dim"],
        Int[Tensor, " rows"],
    ]:
        """Stores the new rows and returns keys, values and positions of the last `min(length, window)` tokens.

        Rows come oldest first. The rows are copied: changing k or v afterwards does not change the cache, and
        a later update does not change what was returned.

        Args:
            k: keys of the new tokens, one row or a chunk, which may be longer than the window.
            v: their values.

        Returns:
            `(keys, values, positions)`; the int64 positions are those in the whole text, whose first token
            has position 0.

        Raises:
            ValueError: rows of another shape, dtype or device (optional in the exercise).
        """
        batch, kv_heads, window, head_dim = self._keys.shape
        _refuse_foreign_rows("RollingKVCache.update", k, v, (batch, kv_heads, -1, head_dim), self._keys)
        end = self.length + k.shape[-2]
        # of a chunk longer than the window only the last rows stay: two rows may not fight for one slot
        kept = min(k.shape[-2], window)
        slots = torch.arange(end - kept, end, device=k.device) % window
        self._keys[:, :, slots] = k[:, :, k.shape[-2] - kept :].detach()
        self._values[:, :, slots] = v[:, :, v.shape[-2] - kept :].detach()
        self.length = end
        positions = torch.arange(max(0, end - window), end, device=k.device)
        return self._keys[:, :, positions % window], self._values[:, :, positions % window], positions

    def reset(self) -> None:
        """Forgets all tokens; the next one has position 0 again."""
        self.length = 0


def quantize_kv(
    x: Float[Tensor, "batch heads seq head_dim"],
) -> tuple[Int8[Tensor, "batch heads seq head_dim"], Float[Tensor, "batch heads seq 1"]]:
    """Rounds keys or values to int8 with one scale for each token and head (symmetric, round to nearest).

    The scale is the largest magnitude of the row divided by 127, so that `x` is about `q * scale` and, in
    float32, off by at most `scale / 2`. A row of zeros comes back as zeros.

    Args:
        x: keys or values.

    Returns:
        `(q, scale)`: whole numbers from -127 to 127, and the scale in the dtype of x.

    Numerics: the division runs in float32 for half-precision inputs.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (wide.abs().amax(dim=-1, keepdim=True) / 127).to(x.dtype)
    divisor = torch.where(scale > 0, scale, 1).to(wide.dtype)  # a row of zeros is divided by 1
    # a scale that was rounded down in half precision could give 128: clamp
    return (wide / divisor).round().clamp(-127, 127).to(torch.int8), scale


def dequantize_kv(
    q: Int8[Tensor, "batch heads seq head_dim"], scale: Float[Tensor, "batch heads seq 1"]
) -> Float[Tensor, "batch heads seq head_dim"]:
    """Turns int8 keys or values back into floats in the dtype of the scale: `q * scale`.

    Args:
        q: from `quantize_kv`.
        scale: from `quantize_kv`.
    """
    return q.to(scale.dtype) * scale


class PagedKVCache:
    """Keeps many sequences in one pool of pages, handed out on demand (vLLM, Kwon et al. 2023).

    A page holds `page_size` tokens of one sequence. The block table of a sequence lists its pages in the
    order of its tokens; they need not lie side by side. Only the last page of a sequence can be partly empty.

    Args:
        pages: pages in the pool.
        page_size: tokens a page holds.
        kv_heads: key and value heads.
        head_dim: width of one head.
        dtype: of the keys and values.
        device: where the pool lives.

    Attributes:
        free_pages: pages that belong to no sequence, an int.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._keys = torch.empty(pages, page_size, kv_heads, head_dim, dtype=dtype, device=device)
        self._values = torch.empty_like(self._keys)
        self._free = list(range(pages))
        self._tables: dict[Hashable, list[int]] = {}
        self._lengths: dict[Hashable, int] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def append(
        self,
        sequence: Hashable,
        k: Float[Tensor, "kv_heads new head_dim"],
        v: Float[Tensor, "kv_heads new head_dim"],
    ) -> None:
        """Stores new rows at the end of a sequence, filling its last page before taking a free one.

        The rows are copied. A sequence that is not known yet, or was freed, starts empty.

        Args:
            sequence: the sequence's id, any int.
            k: keys of its new tokens, one row or a chunk of any length.
            v: their values.

        Raises:
            ValueError: fewer pages are free than the new rows need, or (optional in the exercise) rows have
                another shape, dtype or device. Nothing is stored then, no page is taken.
        """
        _, page_size, kv_heads, head_dim = self._keys.shape
        _refuse_foreign_rows("PagedKVCache.append", k, v, (kv_heads, -1, head_dim), self._keys)
        length, table = self._lengths.get(sequence, 0), self._tables.get(sequence, [])
        end = length + k.shape[1]
        missing = math.ceil(end / page_size) - len(table)
        if missing > len(self._free):
            raise ValueError(f"PagedKVCache.append needs {missing} more pages, got {len(self._free)} free")
        table = table + [self._free.pop() for _ in range(missing)]
        self._tables[sequence], self._lengths[sequence] = table, end
        page, offset = self._where(sequence, length, end)
        self._keys[page, offset] = k.detach().transpose(0, 1)  # (new, kv_heads, head_dim)
        self._values[page, offset] = v.detach().transpose(0, 1)

    def gather(
        self, sequence: Hashable
    ) -> tuple[Float[Tensor, "kv_heads length head_dim"], Float[Tensor, "kv_heads length head_dim"]]:
        """Returns all keys and values of a sequence, oldest first, as copies that no later call changes.

        Args:
            sequence: the sequence's id.

        Raises:
            ValueError: the sequence is not known (optional in the exercise).
        """
        if sequence not in self._tables:
            raise ValueError(f"PagedKVCache.gather needs a sequence that was appended to, got {sequence!r}")
        page, offset = self._where(sequence, 0, self._lengths[sequence])
        return self._keys[page, offset].transpose(0, 1), self._values[page, offset].transpose(0, 1)

    def free(self, sequence: Hashable) -> None:
        """Gives the pages of a finished sequence back to the pool and forgets the sequence.

        Args:
            sequence: the sequence's id.

        Raises:
            ValueError: the sequence is not known (optional in the exercise).
        """
        if sequence not in self._tables:
            raise ValueError(f"PagedKVCache.free needs a sequence that was appended to, got {sequence!r}")
        self._free += self._tables.pop(sequence)
        del self._lengths[sequence]

    def _where(self, sequence: Hashable, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Returns page and row within the page of the tokens start ... end - 1."""
        position = torch.arange(start, end, device=self._keys.device)
        page_size = self._keys.shape[1]
        table = torch.tensor(self._tables[sequence], dtype=torch.int64, device=self._keys.device)
        return table[position // page_size], position % page_size
