# %% [markdown]
# # KV cache: exercises
#
# A decoder that reads the whole text again for every new token computes the same keys and values over and over. Here you
# build what avoids it: attention for the newest rows only, the cache, positions that go on where it ends, and a
# generator that pushes every token through the model once. Then you count what a step costs and what the cache
# weighs, and make it smaller: fewer heads, a window, eight bits, pages.
#
# Shapes are `(batch, heads, seq, head_dim)`. A *chunk* is any number of new tokens at the end of the text: a whole
# prompt, a part of it, or one token. `apply_rope(x, positions)` from the chapter on attention is given.

# %% given
from course_llm.attention import apply_rope

# %% [markdown] exercise="cached_attention" points=6 minutes=15
# ## Attention for the newest rows
#
# With the keys and values of the past at hand, attention is only computed for the queries of the new tokens.
#
# **Given** queries `q` `(..., queries, d_k)`, keys `k` `(..., keys, d_k)` and values `v` `(..., keys, d_v)`, with any number of
# batch dimensions and queries ≤ keys. The queries belong to the **last** rows of the sequence: to a whole
# prompt (queries = keys), a chunk, or one token (queries = 1).
#
# **Return** `(..., queries, d_v)`: $\mathrm{softmax}(q k^\top / \sqrt{d_k})\, v$, where each query sees the keys up to its own position and none
# behind it. Query $i$ of $n$, counted from 0, stands at position keys − $n$ + $i$.
#
# **Example.** 2 queries on 5 keys stand at positions 3 and 4. The first sees keys 0–3, the second keys 0–4.
#
# The dtype stays that of the inputs, gradients flow to all three, and the cost counts: a step takes at most
# 2 · queries · keys · (d_k + d_v) FLOPs per head. Compute no scores for rows that are not asked for.

# %% exercise="cached_attention"
def cached_attention(q, k, v):
    ### BEGIN SOLUTION
    queries, keys = q.shape[-2], k.shape[-2]
    visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~visible, -math.inf)
    return torch.softmax(scores, dim=-1) @ v
    ### END SOLUTION

# %% [markdown] hints="cached_attention"
# 1. Write the positions of the queries down: with 5 keys and 2 queries they are 3 and 4. Which keys may each see?
# 2. `torch.ones(queries, keys, dtype=torch.bool).tril(diagonal)` is a staircase; `diagonal` moves it to the right.
# 3. The staircase must end at the lower right corner: `diagonal=keys - queries`. Fill the rest of the scores with `-inf` before the softmax.

# %% [markdown] exercise="KVCache" points=8 minutes=20
# ## The cache
#
# Keeps the keys and values of all tokens so far, for one layer.
#
# `KVCache(batch, kv_heads, max_seq, head_dim, dtype, device)` allocates the room for `max_seq` tokens **once**.
#
# - `update(k, v)` takes the keys and values of the new tokens, `(batch, kv_heads, new, head_dim)` each, stores them behind
#   those before, and returns a pair: **all** keys and **all** values so far, `(batch, kv_heads, length, head_dim)`.
# - `length` is the number of tokens stored, an int.
# - `reset()` forgets all of them; the cache can be filled again.
# - When the new tokens do not fit, `update` raises a `ValueError` and changes nothing.
#
# New rows are copied in: changing `k` afterwards must not change the cache. What `update` returned keeps
# its values while the cache grows; it may be a view of the buffer, so that returning it copies nothing.
#
# **Example.** With `max_seq=4`, after an update with 3 tokens and one with 1, `length` is 4 and the second call has returned
# 4 rows. A third update raises a `ValueError`, and `length` is still 4. After `reset()` it is 0.

# %% exercise="KVCache"
class KVCache:
    def __init__(self, batch, kv_heads, max_seq, head_dim, dtype, device):
        ### BEGIN SOLUTION
        self.keys = torch.zeros(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros(batch, kv_heads, max_seq, head_dim, dtype=dtype, device=device)
        self.length = 0
        ### END SOLUTION

    def update(self, k, v):
        ### BEGIN SOLUTION
        end = self.length + k.shape[2]
        if end > self.keys.shape[2]:
            raise ValueError(
                f"KVCache.update needs length + new <= max_seq, got {self.length} + {k.shape[2]} > {self.keys.shape[2]}"
            )
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]
        ### END SOLUTION

    def reset(self):
        ### BEGIN SOLUTION
        self.length = 0
        ### END SOLUTION

# %% [markdown] hints="KVCache"
# 1. Two buffers `(batch, kv_heads, max_seq, head_dim)` and a counter are all the state there is. `torch.cat` is not needed.
# 2. Compare first: if `self.length + new` is beyond `max_seq`, raise before anything is written or counted.
# 3. `self.keys[:, :, self.length:end] = k` copies into the buffer; return `self.keys[:, :, :end]`. Rows behind `length` never come back, so `reset` only needs to set the counter.

# %% [markdown] exercise="rope_at" points=4 minutes=10
# ## Positions go on where the cache ends
#
# **Given** queries or keys `x` `(..., seq, head_dim)` of consecutive new tokens, not yet rotated, and the position `start` of the first
# of them in the whole text (0 or more).
#
# **Return** `x` rotated with `apply_rope` at positions start, start + 1, …, start + seq − 1, same shape and dtype.
#
# **Example.** When 7 tokens are in the cache and 2 new ones arrive, `start` is 7 and the rows are rotated for
# positions 7 and 8. A row that is decoded alone comes out as it would in one pass over the whole text.

# %% exercise="rope_at"
def rope_at(x, start):
    ### BEGIN SOLUTION
    return apply_rope(x, torch.arange(start, start + x.shape[-2], device=x.device))
    ### END SOLUTION

# %% [markdown] hints="rope_at"
# 1. `apply_rope(x, positions)` takes any integer positions, one for each row: which are they here?
# 2. The number of rows is `x.shape[-2]`.
# 3. `torch.arange(start, start + x.shape[-2], device=x.device)`.

# %% [markdown] exercise="generate_cached" points=6 minutes=20
# ## Generate with a cache
#
# **Given** a `model`, a prompt `ids` `(batch, seq)`, `max_new_tokens` and possibly an `eos_id`. The model is called as `model(ids, cache)`: it
# reads token ids `(batch, new)` that continue the text behind `cache` and returns `(logits, cache)`, with logits
# `(batch, new, vocab)`, one row for each token read. At first `cache` is `None`; later hand in the one that was returned last (it may be
# a new object each time).
#
# **Return** the prompt with the new tokens behind it, `(batch, seq + new)`. Each new token is the one with the highest logit (the
# lowest id among equals).
#
# - Push the prompt once, then only the newest token of each row: **prompt + new − 1** tokens per row, since the last
#   token written is never read. The number is counted.
# - A row that has written `eos_id` is finished: from then on it is filled with `eos_id`. Stop as soon as all rows have
#   finished. An EOS in the prompt does not count. With `eos_id=None` nothing ends early.
# - `max_new_tokens=0` returns the prompt.
#
# **Example.** Two rows write [3, EOS, …] and [4, 3, 2, EOS, …] with `max_new_tokens=5`. Four tokens are added: 3, EOS, EOS, EOS and
# 4, 3, 2, EOS.

# %% exercise="generate_cached"
def generate_cached(model, ids, max_new_tokens, eos_id=None):
    ### BEGIN SOLUTION
    finished = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    new, cache = ids, None
    for _ in range(max_new_tokens):
        logits, cache = model(new, cache)
        token = logits[:, -1].argmax(dim=-1)
        if eos_id is not None:
            token = torch.where(finished, eos_id, token)
            finished = finished | (token == eos_id)
        new = token.unsqueeze(1)
        ids = torch.cat([ids, new], dim=1)
        if finished.all():
            break
    return ids
    ### END SOLUTION

# %% [markdown] hints="generate_cached"
# 1. Keep two things apart: the text so far, and what the model has not read yet. At first the second is the prompt, then one token per row.
# 2. The logits of the next token are the last row, `logits[:, -1]`, in the prefill too: that is the first new token, no second call needed.
# 3. `cache = None` before the loop; `logits, cache = model(unread, cache)` in it; `unread = token[:, None]` at its end.
# 4. A boolean `finished` per row: `token = torch.where(finished, eos_id, token)`, then `finished |= token == eos_id`. Test `eos_id is not None`: token 0 may be the EOS.

# %% [markdown] exercise="positions_from_padding" points=3 minutes=10
# ## Prompts of unequal length
#
# Prompts of unequal length are padded at the **left** so that all of them end in the same column, where generation goes on. The
# padding must not take up positions.
#
# **Given** a boolean `real` `(batch, seq)`: False on the padding at the left of a row, True on its real tokens.
#
# **Return** int64 positions `(batch, seq)`: 0 at the first real token of each row, then 1, 2 and so on. What stands on padding does
# not matter.
#
# **Example.** [False, False, True, True, True] gives [·, ·, 0, 1, 2].

# %% exercise="positions_from_padding"
def positions_from_padding(real):
    ### BEGIN SOLUTION
    return (real.long().cumsum(dim=-1) - 1).clamp(min=0)
    ### END SOLUTION

# %% [markdown] hints="positions_from_padding"
# 1. The position of a real token is the number of real tokens before it in its own row.
# 2. A cumulative sum over the row counts the real tokens up to and including the token itself.
# 3. `real.long().cumsum(dim=-1) - 1`, and anything you like on padding, for example `.clamp(min=0)`.

# %% [markdown] exercise="decode_intensity" points=4 minutes=15
# ## What a decode step costs
#
# One decode step pushes **one** token per sequence through all layers. It reads all weights once, and the cache of
# every sequence.
#
# **Given** `batch`, `seq` (tokens in the cache, the new one included), `layers`, `heads`, `kv_heads`, `head_dim`, `d_ff` and `bytes_per_element` (of weights and cache;
# may be a fraction).
#
# **Return** three numbers: FLOPs, bytes, and FLOPs per byte. With $d = \text{heads} \cdot \text{head\_dim}$ a layer has
#
# $$w = 2 d^2 + 2\, d \cdot \text{kv\_heads} \cdot \text{head\_dim} + 2\, d \cdot d_\mathrm{ff}$$
#
# weights (queries and output; keys and values; two feed-forward matrices). Each weight costs a multiplication and an addition per
# token, and attention $4 \cdot \text{seq} \cdot d$ more for scores and weighted sum.
#
# $$\text{FLOPs} = \text{batch} \cdot \text{layers} \cdot (2 w + 4 \cdot \text{seq} \cdot d)$$
#
# The bytes are those of the weights and of all keys and values, with bytes_per_element for each number:
#
# $$\begin{aligned}
# \text{bytes} &= \text{bytes\_per\_element} \cdot \text{layers} \\
# &\cdot (w + 2 \cdot \text{batch} \cdot \text{seq} \cdot \text{kv\_heads} \cdot \text{head\_dim})
# \end{aligned}$$
#
# Embeddings, norms and biases are left out.
#
# **Example.** Batch 3, seq 5, 2 layers, 2 heads, 1 kv head, head_dim 2, d_ff 8, 2 bytes: $d = 4$, $w = 112$, so 1824 FLOPs, 688 bytes and
# 2.65 FLOPs per byte.

# %% exercise="decode_intensity"
def decode_intensity(batch, seq, layers, heads, kv_heads, head_dim, d_ff, bytes_per_element):
    ### BEGIN SOLUTION
    d = heads * head_dim
    kv_width = kv_heads * head_dim
    weights = 2 * d**2 + 2 * d * kv_width + 2 * d * d_ff
    flops = batch * layers * (2 * weights + 4 * seq * d)
    read_bytes = bytes_per_element * layers * (weights + 2 * batch * seq * kv_width)
    return flops, read_bytes, flops / read_bytes
    ### END SOLUTION

# %% [markdown] hints="decode_intensity"
# 1. Work out $d$ and $w$ first, and compare $w$ with the example's 112.
# 2. The weights are read once for the whole batch; the FLOPs are done for each sequence.
# 3. The cache has kv_heads heads, the scores have heads: the two widths stand in different lines.

# %% [markdown] exercise="kv_cache_bytes" points=3 minutes=10
# ## The size of the cache
#
# **Given** `batch`, `seq`, `layers`, `kv_heads`, `head_dim` and `bytes_per_element` (2 unless said otherwise: FP16; 0.5 for 4 bits).
#
# **Return** the bytes that the cache takes: keys **and** values, in every layer, for every token of every sequence,
# kv_heads · head_dim numbers each.
#
# **Example.** GPT-3 has 96 layers and 96 heads of width 128. One token takes 2 · 96 · 96 · 128 · 2 = 4,718,592 bytes, 4.7 MB.

# %% exercise="kv_cache_bytes"
def kv_cache_bytes(batch, seq, layers, kv_heads, head_dim, bytes_per_element=2):
    ### BEGIN SOLUTION
    return 2 * batch * seq * layers * kv_heads * head_dim * bytes_per_element
    ### END SOLUTION

# %% [markdown] hints="kv_cache_bytes"
# 1. Count the numbers in one layer for one token first: a key and a value for each kv head.
# 2. One product of seven factors: a 2 for keys and values, and the six arguments.

# %% [markdown] exercise="grouped_query_attention" points=6 minutes=15
# ## Fewer key and value heads
#
# **Given** queries `q` `(batch, heads, queries, d_k)`, keys `k` `(batch, kv_heads, keys, d_k)` and values `v` `(batch, kv_heads, keys, d_v)`, where kv_heads divides heads. The
# queries are the last rows of the sequence, as in `cached_attention`.
#
# **Return** `(batch, heads, queries, d_v)`: causal attention in which **consecutive** query heads share one key and value head.
#
# **Example.** With 8 heads and 2 kv_heads, query heads 0–3 read kv head 0, query heads 4–7 read kv head 1. With kv_heads = heads this is
# multi-head attention, with kv_heads = 1 multi-query attention.

# %% exercise="grouped_query_attention"
def grouped_query_attention(q, k, v):
    ### BEGIN SOLUTION
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    queries, keys = q.shape[-2], k.shape[-2]
    visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~visible, -math.inf).softmax(dim=-1) @ v
    ### END SOLUTION

# %% [markdown] hints="grouped_query_attention"
# 1. Give every query head its own copy of the kv head it reads; the rest is `cached_attention`.
# 2. Which order must the copies have? For 4 heads and 2 kv_heads: 0, 0, 1, 1.
# 3. `k.repeat_interleave(heads // kv_heads, dim=1)`; `repeat` would give 0, 1, 0, 1.

# %% [markdown] exercise="mha_to_gqa" points=4 minutes=10
# ## From many heads to few
#
# A trained model with multi-head attention becomes one with grouped queries by pooling the columns of its key and
# value projections, and some further training.
#
# **Given** a projection `w` `(d_in, heads · head_dim)` whose heads are consecutive blocks of columns, `heads`, and `kv_heads`, which divides heads.
#
# **Return** `(d_in, kv_heads · head_dim)`: each group of heads / kv_heads consecutive heads becomes one, their mean.
#
# **Example.** `[[1, 2, 3, 4, 5, 6, 7, 10]]` with 4 heads (of width 2) and 2 kv_heads becomes `[[2, 3, 6, 8]]`: the first two heads
# are (1, 2) and (3, 4), their mean is (2, 3).

# %% exercise="mha_to_gqa"
def mha_to_gqa(w, heads, kv_heads):
    ### BEGIN SOLUTION
    d_in, width = w.shape
    blocks = w.reshape(d_in, kv_heads, heads // kv_heads, width // heads)
    return blocks.mean(dim=2).reshape(d_in, -1)
    ### END SOLUTION

# %% [markdown] hints="mha_to_gqa"
# 1. Cut the columns into axes: which group, which head of the group, which column of the head.
# 2. `w.reshape(d_in, kv_heads, heads // kv_heads, head_dim)`, where head_dim is the width divided by heads.
# 3. Take the mean over the axis of the heads in a group and flatten the last two axes.

# %% [markdown] exercise="RollingKVCache" points=8 minutes=20
# ## A cache with a window
#
# With sliding-window attention a token sees the last `window` tokens only. Then older ones need not be kept.
#
# `RollingKVCache(batch, kv_heads, window, head_dim, dtype, device)` keeps the last `window` tokens (`window` ≥ 1), for one layer.
#
# - `update(k, v)` takes the keys and values of new tokens, `(batch, kv_heads, new, head_dim)` each, and returns three things: keys, values and
#   positions of the last `window` tokens (fewer while the text is shorter), **oldest first**. Keys and values are `(batch, kv_heads, rows, head_dim)`, positions
#   int64 `(rows,)`: a token's place in the **whole** text, from 0.
# - `length` is the number of tokens **seen**, an int; it goes on past `window`.
# - `reset()` forgets everything; the next token has position 0.
#
# A chunk may be longer than the window. Memory must not grow with the text. The cache copies what it is handed, and a
# later update must not change what an earlier one returned.
#
# **Example.** With `window=3`, after 5 tokens the rows are those of positions 2, 3, 4, and `length` is 5.

# %% exercise="RollingKVCache"
class RollingKVCache:
    def __init__(self, batch, kv_heads, window, head_dim, dtype, device):
        ### BEGIN SOLUTION
        self.window = window
        self.empty = torch.zeros(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.reset()
        ### END SOLUTION

    def update(self, k, v):
        ### BEGIN SOLUTION
        self.keys = torch.cat([self.keys, k], dim=2)[:, :, -self.window :]
        self.values = torch.cat([self.values, v], dim=2)[:, :, -self.window :]
        self.length += k.shape[2]
        rows = self.keys.shape[2]
        positions = torch.arange(self.length - rows, self.length, device=k.device)
        return self.keys, self.values, positions
        ### END SOLUTION

    def reset(self):
        ### BEGIN SOLUTION
        self.keys = self.values = self.empty
        self.length = 0
        ### END SOLUTION

# %% [markdown] hints="RollingKVCache"
# 1. The positions follow from two numbers: how many tokens were seen, and how many rows are kept.
# 2. The simple way: put the new rows behind the old ones and keep the last `window` of them. `torch.cat` copies, but never more than the window and the chunk.
# 3. The frugal way: a buffer of `window` rows in which token p lives in row p % window. Return its rows in the order `positions % window`; indexing with a tensor copies.
# 4. In both: `positions = torch.arange(length - rows, length)`.

# %% [markdown] exercise="quantize_kv" points=6 minutes=15
# ## Eight bits
#
# Two functions: one stores keys or values as int8 with a scale, the other brings them back.
#
# **`quantize_kv(x)`**: given `x` `(batch, heads, seq, head_dim)`, return a pair `(q, scale)`.
# Each token of each head has its own scale: its largest **magnitude** divided by 127, shape `(batch, heads, seq, 1)`, in the dtype of `x`.
# `q` is `x / scale`, rounded to the nearest integer, as int8 in −127 … 127 (symmetric: no offset).
#
# **`dequantize_kv(q, scale)`**: return `q * scale` in the dtype of the scale. In float32 no number may be off by more than
# scale / 2. Zeros come back as zeros, also in a token that is all zero.
#
# **Example.** (−2.54, 1.234, 0) has scale 0.02 and q = (−127, 62, 0), since 1.234 / 0.02 = 61.7; it comes back as (−2.54, 1.24, 0).

# %% exercise="quantize_kv"
def quantize_kv(x):
    ### BEGIN SOLUTION
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale)
    q = (x.float() / divisor.float()).round().clamp(-127, 127).to(torch.int8)
    return q, scale
    ### END SOLUTION


def dequantize_kv(q, scale):
    ### BEGIN SOLUTION
    return q.to(scale.dtype) * scale
    ### END SOLUTION

# %% [markdown] hints="quantize_kv"
# 1. The largest magnitude of each token and head: absolute values, then the maximum over the last axis, which stays with size 1 (`keepdim=True`).
# 2. A row of zeros has scale 0: divide it by something else, and it stays zero.
# 3. `.round()` before `.to(torch.int8)`: the cast alone cuts off. `.clamp(-127, 127)` helps where half precision has rounded the scale.

# %% [markdown] exercise="PagedKVCache" points=8 minutes=20
# ## Pages
#
# Reserving room for the longest possible text wastes most of it. A paged cache has one pool of pages that many sequences share; each
# takes a page when it needs one.
#
# `PagedKVCache(pages, page_size, kv_heads, head_dim, dtype, device)` has `pages` pages with room for `page_size` tokens each, for one layer.
#
# - `append(sequence, k, v)` stores new tokens, `(kv_heads, new, head_dim)` each, at the end of `sequence` (an int, any int). The sequence's last page is filled before a free
#   page is taken. A sequence that is not known yet starts empty. Returns nothing.
# - `gather(sequence)` returns a pair: all keys and all values of that sequence, oldest first, `(kv_heads, length, head_dim)` each. What it returned
#   does not change later.
# - `free(sequence)` gives the pages back and forgets the sequence; its id may be used again.
# - `free_pages` is the number of pages that belong to no sequence, an int.
# - When `append` needs more pages than are free, it raises a `ValueError` and changes nothing: no token stored, no page taken.
#
# **Example.** With 4 pages of 2 tokens, appending 3 tokens to sequence 7 takes 2 pages. One more token fits into the second of them, and
# `free_pages` stays 2. After `free(7)` it is 4.

# %% exercise="PagedKVCache"
class PagedKVCache:
    def __init__(self, pages, page_size, kv_heads, head_dim, dtype, device):
        ### BEGIN SOLUTION
        self.page_size = page_size
        self.keys = torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.free_list = list(range(pages))
        self.tables = {}  # sequence -> its pages, in order
        self.lengths = {}  # sequence -> tokens stored
        ### END SOLUTION

    @property
    def free_pages(self):
        ### BEGIN SOLUTION
        return len(self.free_list)
        ### END SOLUTION

    def append(self, sequence, k, v):
        ### BEGIN SOLUTION
        length = self.lengths.get(sequence, 0)
        table = self.tables.get(sequence, [])
        end = length + k.shape[1]
        missing = -(-end // self.page_size) - len(table)
        if missing > self.free_pages:
            raise ValueError(f"PagedKVCache.append needs {missing} more pages, got {self.free_pages} free")
        self.tables[sequence] = table = table + [self.free_list.pop() for _ in range(missing)]
        for i in range(k.shape[1]):
            page, row = table[(length + i) // self.page_size], (length + i) % self.page_size
            self.keys[page, :, row] = k[:, i]
            self.values[page, :, row] = v[:, i]
        self.lengths[sequence] = end
        ### END SOLUTION

    def gather(self, sequence):
        ### BEGIN SOLUTION
        table, length = self.tables[sequence], self.lengths[sequence]
        keys = torch.cat([self.keys[page] for page in table], dim=1)
        values = torch.cat([self.values[page] for page in table], dim=1)
        return keys[:, :length], values[:, :length]
        ### END SOLUTION

    def free(self, sequence):
        ### BEGIN SOLUTION
        self.free_list += self.tables.pop(sequence)
        del self.lengths[sequence]
        ### END SOLUTION

# %% [markdown] hints="PagedKVCache"
# 1. The state: two pools `(pages, kv_heads, page_size, head_dim)`, a list of free page numbers, and for each sequence its list of pages (the block table) and its length.
# 2. Token i of a sequence lives in page `table[i // page_size]`, row `i % page_size`.
# 3. Before anything changes: `missing = ceil((length + new) / page_size) - len(table)`. Compare it with the number of free pages.
# 4. `gather`: `torch.cat` of the pages in the order of the table, cut at the sequence's length.
