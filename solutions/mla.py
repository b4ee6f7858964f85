# %% [markdown]
# # Multi-head latent attention: exercises
#
# You build the attention layer of DeepSeek-V2: a low-rank factorisation, the latent that replaces keys and values in the
# cache, the whole layer in two forms, of which the second never builds a key or a value, the scores with a separate rotary
# key, the cache, one decode step, and the arithmetic that says what all this saves. The last exercise is LoRA, the same idea
# used for fine-tuning.
#
# All matrices act on row vectors, `x @ w`. Heads are consecutive blocks of columns. Every exercise can be solved without the
# others, in any order. Both forms of the layer contain the scores with a separate rotary key: if you want the smaller step first,
# take that exercise before them. Results keep the dtype and device of the inputs, and no input is changed in place.
# Gradients flow to every float input, except through the cache: the cache and the decode step serve inference, and no
# gradient of theirs is asked for. The matrices come in a frozen dataclass:
#
# | `MLAWeights` | shape | what it does |
# |---|---|---|
# | `w_q` | `(d_hidden, heads·d_h)` | content part of the queries |
# | `w_qr` | `(d_hidden, heads·d_r)` | rotary part of the queries |
# | `w_dkv` | `(d_hidden, d_c)` | down to the latent |
# | `w_kr` | `(d_hidden, d_r)` | the rotary key, one for all heads |
# | `w_uk`, `w_uv` | `(d_c, heads·d_h)` | latent up to keys, to values |
# | `w_o` | `(heads·d_h, d_hidden)` | output |
# | `heads` | `int` | number of heads |
#
# `apply_rope(x, positions)` is given. It turns rows `x` of shape `(..., seq, width)` by their integer `positions`, `(seq,)`
# or of any shape that broadcasts to `(..., seq)`.

# %% given
from course_llm.attention import apply_rope
from course_llm.weights import MLAWeights

# %% [markdown] exercise="low_rank_factors" points=6 minutes=15
# ## The best approximation of a given rank
#
# **Given** a matrix `w` of shape `(rows, cols)` and a `rank`, **return** `(a, b)` of shapes `(rows, rank)` and
# `(rank, cols)` such that `a @ b` is the closest matrix of at most that rank.
#
# **Rule.** Take the singular value decomposition, keep the largest `rank` singular values and their vectors. Share the
# singular values between `a` and `b` as you like: only the product is checked. `torch.linalg.svd` does not take half
# precision: decompose such a matrix in `float32` and convert the factors back. A `rank` below 1 or above `min(rows, cols)` is a `ValueError` that says so.
#
# **Example.** For `w = diag(1, 3, 2)` and rank 2, `a @ b` is `diag(0, 3, 2)`.

# %% exercise="low_rank_factors"
def low_rank_factors(w, rank):
    ### BEGIN SOLUTION
    if not 1 <= rank <= min(w.shape):
        raise ValueError(f"low_rank_factors needs 1 <= rank <= {min(w.shape)}, got rank={rank}")
    full = w if w.dtype == torch.float64 else w.float()
    u, s, vh = torch.linalg.svd(full, full_matrices=False)
    root = s[:rank].sqrt()
    return (u[:, :rank] * root).to(w.dtype), (root[:, None] * vh[:rank]).to(w.dtype)
    ### END SOLUTION

# %% [markdown] hints="low_rank_factors"
# 1. `torch.linalg.svd(w, full_matrices=False)` returns u, the singular values from large to small, and Vᴴ.
# 2. The product of the first columns of u, the singular values, and the first rows of Vᴴ is the best approximation.
# 3. `a = u[:, :rank] * s[:rank]` scales each column; `b = vh[:rank]`. Use `.float()` for half precision alone and `.to(w.dtype)` at the end.

# %% [markdown] exercise="compress_kv" points=3 minutes=10
# ## Compress and expand
#
# **Given** hidden rows `h` and `w_dkv`, `compress_kv` **returns** the latents, `(batch, seq, d_c)`: the plain product, without a norm.
#
# **Given** latents `c`, the two up-projections and `heads`, `expand_kv` **returns** `(k, v)`, each `(batch, heads, seq, d_h)`.
#
# **Rule.** All heads read the same latent. Head $i$ owns the $i$-th block of $d_h$ columns of `c @ w_uk` and of `c @ w_uv`.
#
# **Example.** One token, `c = [[[2.]]]`, `w_uk = [[1., 2., 3., 4.]]`, two heads: the key of head 0 is `[2., 4.]`, that of head 1 `[6., 8.]`.

# %% exercise="compress_kv"
def compress_kv(h, w_dkv):
    ### BEGIN SOLUTION
    return h @ w_dkv
    ### END SOLUTION


def expand_kv(c, w_uk, w_uv, heads):
    ### BEGIN SOLUTION
    batch, seq, _ = c.shape
    k, v = ((c @ w).view(batch, seq, heads, -1).transpose(1, 2) for w in (w_uk, w_uv))
    return k, v
    ### END SOLUTION

# %% [markdown] hints="compress_kv"
# 1. Each function is one matrix product; `expand_kv` then moves the heads to their own axis.
# 2. View `(batch, seq, heads·d_h)` as `(batch, seq, heads, d_h)`: consecutive columns stay together.
# 3. `.transpose(1, 2)` brings the heads in front of the tokens.

# %% [markdown] exercise="latent_attention" points=6 minutes=20
# ## Latent attention, the naive form
#
# **Given** hidden rows `h` at positions 0, 1, …, and `weights`, **return** the output of the layer, `(batch, seq, d_hidden)`.
#
# **Rule.**
#
# 1. Latent $c = h W_{DKV}$; content keys and values are expanded from it, per head.
# 2. Content queries are $h W_Q$, rotary queries $h W_{QR}$, both cut into heads; then each rotary query is rotated by its position.
# 3. One rotary key for all heads: `h @ weights.w_kr`, rotated by the same positions with `apply_rope`.
# 4. The score of a query with a key is (content · content + rotary · rotary) / $\sqrt{d_h + d_r}$.
# 5. Causal mask, softmax over the keys, weighted sum of the values, heads side by side, times $W_O$.
#
# **Example.** With a single token the softmax is 1, and the output is $h\,W_{DKV} W_{UV} W_O$.

# %% exercise="latent_attention"
def latent_attention(h, weights):
    ### BEGIN SOLUTION
    batch, seq, _ = h.shape
    positions = torch.arange(seq, device=h.device)

    def per_head(x):
        return x.view(batch, seq, weights.heads, -1).transpose(1, 2)

    c = h @ weights.w_dkv
    q_r = apply_rope(per_head(h @ weights.w_qr), positions)
    k_r = apply_rope(h @ weights.w_kr, positions)[:, None].expand_as(q_r)
    q = torch.cat([per_head(h @ weights.w_q), q_r], dim=-1)
    k = torch.cat([per_head(c @ weights.w_uk), k_r], dim=-1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    future = torch.ones(seq, seq, dtype=torch.bool, device=h.device).triu(1)
    attention = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    out = attention @ per_head(c @ weights.w_uv)
    return out.transpose(1, 2).reshape(batch, seq, -1) @ weights.w_o
    ### END SOLUTION

# %% [markdown] hints="latent_attention"
# 1. Write a small helper that turns `(batch, seq, heads·width)` into `(batch, heads, seq, width)`; you need it four times.
# 2. Concatenate the content part and the rotated part of the queries, and likewise of the keys: this is ordinary attention with keys of width $d_h + d_r$.
# 3. `k_r[:, None]` has shape `(batch, 1, seq, d_r)` and broadcasts over the heads (`expand` it before `torch.cat`).
# 4. Rotate after the split into heads, mask with `masked_fill(…triu(1), -inf)`, then merge with `transpose(1, 2)` and `reshape`.

# %% [markdown] exercise="latent_attention_absorbed" points=8 minutes=20
# ## Latent attention, absorbed
#
# **Given** the last rows `h` of a sequence (all of them, a chunk, or one), the latents `c` and rotated keys `k_r` of the whole
# sequence, and `weights`, **return** the same output for the rows in `h` as the naive form.
#
# **Rule.** Never build a key or a value, not even for one head. Per head, $(q\, W_{UK}^\top)\, c^\top$ equals $q\, (c\, W_{UK})^\top$, and
# $(a\, c)\, W_{UV}$ equals $a\, (c\, W_{UV})$, with $a$ the attention weights. `k_r` comes rotated; the rotary queries you rotate yourself, at the positions
# `keys − queries`, …, `keys − 1`. The mask lets the last row see every key. The scale stays $1/\sqrt{d_h + d_r}$.
#
# **Example.** With 1 query and 256 keys, $d_c = 4$ and $d_h = 64$, no tensor may have 256 × 64 numbers.

# %% exercise="latent_attention_absorbed"
def latent_attention_absorbed(h, c, k_r, weights):
    ### BEGIN SOLUTION
    (batch, queries, _), keys, heads = h.shape, c.shape[1], weights.heads
    w_uk = weights.w_uk.unflatten(1, (heads, -1)).permute(1, 2, 0)  # (heads, d_h, d_c)
    w_uv = weights.w_uv.unflatten(1, (heads, -1)).transpose(0, 1)  # (heads, d_c, d_h)
    q_c = (h @ weights.w_q).view(batch, queries, heads, -1).transpose(1, 2)
    q_r = (h @ weights.w_qr).view(batch, queries, heads, -1).transpose(1, 2)
    q_r = apply_rope(q_r, torch.arange(keys - queries, keys, device=h.device))
    width = q_c.shape[-1] + q_r.shape[-1]
    scores = torch.einsum("bhqc,bkc->bhqk", q_c @ w_uk, c) + torch.einsum("bhqr,bkr->bhqk", q_r, k_r)
    future = torch.ones(queries, keys, dtype=torch.bool, device=h.device).triu(keys - queries + 1)
    attention = (scores / math.sqrt(width)).masked_fill(future, float("-inf")).softmax(dim=-1)
    out = torch.einsum("bhqk,bkc->bhqc", attention, c) @ w_uv  # (batch, heads, queries, d_h)
    return out.transpose(1, 2).reshape(batch, queries, -1) @ weights.w_o
    ### END SOLUTION

# %% [markdown] hints="latent_attention_absorbed"
# 1. View `w_uk` as `(d_c, heads, d_h)`. The absorbed query of head $i$ is `q_i @ w_uk[:, i].T`, of width $d_c$.
# 2. `torch.einsum("bhqd,chd->bhqc", q, w_uk)` does that for all heads; its product with `c` is the content score.
# 3. Average the latents with the attention weights first, `(batch, heads, queries, d_c)`, and apply $W_{UV}$ to the mean.
# 4. Row $i$ of `h` sees the keys up to `keys − queries + i`: hide `torch.ones(queries, keys).triu(keys - queries + 1)`.

# %% [markdown] exercise="decoupled_rope_scores" points=6 minutes=15
# ## Scores with a decoupled rotary key
#
# **Given** content parts `q_c` and `k_c`, `(batch, heads, seq, d_h)`, rotary queries `q_r`, `(batch, heads, seq, d_r)`, one
# rotary key `k_r` for all heads, `(batch, seq, d_r)`, and integer `positions`, `(seq,)`, **return** the scores of every query
# with every key, `(batch, heads, seq, seq)`, without a mask.
#
# **Rule.** `q_r` and `k_r` come unrotated: rotate both by the given positions (they may start anywhere and have gaps). The
# content parts stay as they are. The sum of the two products is scaled by $1/\sqrt{d_h + d_r}$.
#
# **Example.** One token, `q_c = [3, 0]`, `k_c = [2, 0]`, `q_r = k_r = [1, 0]`: the score is $(6 + 1)/\sqrt{4} = 3.5$ at any position.

# %% exercise="decoupled_rope_scores"
def decoupled_rope_scores(q_c, q_r, k_c, k_r, positions):
    ### BEGIN SOLUTION
    q_r, k_r = apply_rope(q_r, positions), apply_rope(k_r, positions)
    content = q_c @ k_c.transpose(-1, -2)
    rotary = q_r @ k_r.unsqueeze(1).transpose(-1, -2)
    return (content + rotary) / math.sqrt(q_c.shape[-1] + q_r.shape[-1])
    ### END SOLUTION

# %% [markdown] hints="decoupled_rope_scores"
# 1. The dot product of two concatenated vectors is the sum of two dot products.
# 2. `apply_rope` takes `q_r` and `k_r` with the same `positions`.
# 3. `k_r[:, None]` adds the head axis; divide the sum by `math.sqrt(d_h + d_r)`.

# %% [markdown] exercise="LatentCache" points=6 minutes=20
# ## The cache
#
# **Write** a class that holds the latents and rotated keys of one layer.
#
# **Rule.** It is made with room for `max_seq` tokens. `update(c, k_r)` takes new rows, `(batch, new, d_c)` and
# `(batch, new, d_r)`, and returns the pair of all rows so far, oldest first. `length` is the number of tokens held. `reset()`
# forgets them, and the room is free again. It keeps $d_c + d_r$ numbers per token and nothing beside them, in `dtype` on
# `device`. Whether gradients flow through it does not matter: it serves inference, and you may detach the rows. When more than `max_seq` tokens would be held, `update` raises a `ValueError` and nothing is changed.
#
# **Example.** After updates with 3 tokens and 1 token `length` is 4, and the second update returns 4 rows. With `max_seq = 4` a third update fails.

# %% exercise="LatentCache"
class LatentCache:
    def __init__(self, batch, max_seq, d_c, d_r, dtype, device):
        ### BEGIN SOLUTION
        self.rows = torch.empty(batch, max_seq, d_c + d_r, dtype=dtype, device=device)
        self.d_c, self.max_seq, self.length = d_c, max_seq, 0
        ### END SOLUTION

    def update(self, c, k_r):
        ### BEGIN SOLUTION
        end = self.length + c.shape[1]
        if end > self.max_seq:
            raise ValueError(f"LatentCache.update needs length + new <= max_seq={self.max_seq}, got {end}")
        self.rows[:, self.length : end, : self.d_c] = c
        self.rows[:, self.length : end, self.d_c :] = k_r
        self.length = end
        return self.rows[:, :end, : self.d_c], self.rows[:, :end, self.d_c :]
        ### END SOLUTION

    def reset(self):
        ### BEGIN SOLUTION
        self.length = 0
        ### END SOLUTION

# %% [markdown] hints="LatentCache"
# 1. Allocate the buffers once, in `__init__`, with `torch.zeros(batch, max_seq, …, dtype=dtype, device=device)`.
# 2. Write new rows at `[:, length : length + new]`, then move `length`, and return the buffers up to `length`.
# 3. Compare `length + new` with `max_seq` before anything is written. `reset` needs to touch `length` alone.

# %% [markdown] exercise="latent_decode_step" points=6 minutes=15
# ## One decode step
#
# **Given** the hidden row `h` of the newest token, `(batch, 1, d_hidden)`, `weights`, and a `cache` with `length` and
# `update(c, k_r)` as above, **return** the layer's output for this token, `(batch, 1, d_hidden)`.
#
# **Rule.** The token's position is `cache.length` before the update. Compress it, rotate its shared key at that position, and
# store both. Then attend from it to everything in the cache, itself included. The result equals the last row of the naive form
# over the whole sequence. Use your functions from above if they pass, or write the step out; it need not be absorbed to be right.
#
# **Example.** Three steps on an empty cache give the three rows of `latent_attention` on the three tokens, and `cache.length` is 3.

# %% exercise="latent_decode_step"
def latent_decode_step(h, weights, cache):
    ### BEGIN SOLUTION
    batch, heads = h.shape[0], weights.heads
    position = torch.tensor([cache.length], device=h.device)
    c, k_r = cache.update(h @ weights.w_dkv, apply_rope(h @ weights.w_kr, position))
    q_c = (h @ weights.w_q).view(batch, heads, -1)
    q_r = apply_rope((h @ weights.w_qr).view(batch, heads, 1, -1), position).squeeze(2)
    w_uk = weights.w_uk.unflatten(1, (heads, -1))  # (d_c, heads, d_h)
    w_uv = weights.w_uv.unflatten(1, (heads, -1))
    q_latent = torch.einsum("bhd,chd->bhc", q_c, w_uk)
    scores = q_latent @ c.transpose(1, 2) + q_r @ k_r.transpose(1, 2)  # (batch, heads, keys)
    attention = torch.softmax(scores / math.sqrt(q_c.shape[-1] + q_r.shape[-1]), dim=-1)
    out = torch.einsum("bhc,chd->bhd", attention @ c, w_uv)
    return out.reshape(batch, 1, -1) @ weights.w_o
    ### END SOLUTION

# %% [markdown] hints="latent_decode_step"
# 1. Read `cache.length` first: it is the position of the new token, for its key and its query.
# 2. `c, k_r = cache.update(h @ weights.w_dkv, rotated_key)` stores the token and gives you all of them.
# 3. One query needs no mask: what is in the cache is the past and itself.
# 4. The rest is attention of one query with all rows of `c` and `k_r`, naive or absorbed, scaled by $1/\sqrt{d_h + d_r}$.

# %% [markdown] exercise="cache_elements_per_token" points=5 minutes=10
# ## What is cached per token
#
# **Given** a `kind` of attention and its shape, **return** how many numbers one layer caches for one token, as an int.
#
# **Rule.** `"mha"` keeps a key and a value of every head; `"gqa"` those of `groups` KV heads; `"mqa"` those of one; `"mla"` one
# latent (`d_c`) and one rotary key (`d_r`) for all heads. An unknown kind is a `ValueError`; so is `groups` missing for
# `"gqa"`, or `d_c` or `d_r` missing for `"mla"`. Arguments that a kind does not need are ignored.
#
# **Example.** 8 heads of width 16: `"mha"` 256, `"gqa"` with 2 groups 64, `"mqa"` 32; `"mla"` with $d_c = 20$ and $d_r = 4$ is 24.

# %% exercise="cache_elements_per_token"
def cache_elements_per_token(kind, heads, head_dim, groups=None, d_c=None, d_r=None):
    ### BEGIN SOLUTION
    if kind not in ("mha", "gqa", "mqa", "mla"):
        raise ValueError(f"cache_elements_per_token needs kind mha, gqa, mqa or mla, got {kind!r}")
    if kind == "mla":
        if d_c is None or d_r is None:
            raise ValueError(f"cache_elements_per_token needs d_c and d_r for mla, got {d_c=}, {d_r=}")
        return d_c + d_r
    if kind == "gqa" and groups is None:
        raise ValueError("cache_elements_per_token needs groups for gqa, got None")
    kv_heads = {"mha": heads, "gqa": groups, "mqa": 1}[kind]
    return 2 * kv_heads * head_dim
    ### END SOLUTION

# %% [markdown] hints="cache_elements_per_token"
# 1. MHA, GQA and MQA differ in the number of KV heads alone, and each KV head keeps a key and a value.
# 2. MLA keeps one latent and one rotary key, whatever the heads.
# 3. Test `is None`, and raise before you count.

# %% [markdown] exercise="largest_batch" points=5 minutes=10
# ## How many sequences fit
#
# **Given** the memory of a device and of the model's weights in bytes, and the shape of the cache, **return** how many whole
# sequences fit beside the weights, as an int.
#
# **Rule.** A sequence takes `seq` × `layers` × `elements_per_token` × `bytes_per_element` bytes; `elements_per_token` counts
# one layer, and `bytes_per_element` may be a fraction (0.75 for 6 bits). The result is 0 when the model does not fit.
#
# **Example.** 10,000 bytes, a model of 4,000, 100 tokens, 2 layers, 5 numbers of 2 bytes: 2,000 bytes a sequence, 3 fit. With one byte less, 2 fit.

# %% exercise="largest_batch"
def largest_batch(memory_bytes, model_bytes, seq, layers, elements_per_token, bytes_per_element):
    ### BEGIN SOLUTION
    sequence_bytes = seq * layers * elements_per_token * bytes_per_element
    return max(0, int((memory_bytes - model_bytes) // sequence_bytes))
    ### END SOLUTION

# %% [markdown] hints="largest_batch"
# 1. What is free is `memory_bytes - model_bytes`.
# 2. `//` rounds down, also for fractions; `int` makes an int of it.
# 3. `max(0, …)` for a model that does not fit.

# %% [markdown] exercise="lora_forward" points=3 minutes=10
# ## LoRA
#
# **Given** rows `x`, `(..., d_in)`, a pretrained weight `w`, `(d_in, d_out)`, and factors `a`, `(d_in, r)`, and `b`,
# `(r, d_out)`, `lora_forward` **returns** $xW + (\alpha / r)\, xAB$, with $\alpha$ the argument `alpha`. `merge_lora` **returns** the one matrix that does the same.
#
# **Rule.** $r$ is the width of `a`. Merging leaves `w` itself unchanged. Gradients flow to every input, `w` too.
#
# **Example.** `x = [[1, 2]]`, `w = [[1], [1]]`, `a` the identity, `b = [[2], [1]]`, `alpha=4`: $3 + (4/2) \cdot 4 = 11$, and the merged weight is `[[5], [3]]`.

# %% exercise="lora_forward"
def lora_forward(x, w, a, b, alpha):
    ### BEGIN SOLUTION
    return x @ w + (alpha / a.shape[1]) * ((x @ a) @ b)
    ### END SOLUTION


def merge_lora(w, a, b, alpha):
    ### BEGIN SOLUTION
    return w + (alpha / a.shape[1]) * (a @ b)
    ### END SOLUTION

# %% [markdown] hints="lora_forward"
# 1. The rank is `a.shape[1]`.
# 2. Multiply from the left: `(x @ a) @ b` never builds a `(d_in, d_out)` matrix.
# 3. The merged weight is `w + (alpha / r) * (a @ b)`, a new tensor.
