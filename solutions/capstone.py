# %% [markdown]
# # Capstone: your own generator, exercises
#
# You have built all that a decoder needs. Here you put it together into a generator that runs the bundled biomedical model: a
# cache for all layers, its attention with cached keys and values, the same with cached latents, the step through the
# whole model, the loop that writes text. It is graded on its tokens, on its counted cost and on what it caches. Costs are counted
# where torch computes: take numbers out of a tensor with `int(x)` or `x.item()`, not with NumPy or `tolist`, whose work cannot be
# counted. What a function is given stays as it is; only the cache changes.
#
# **Your pieces.** The cell below imports the course's own versions of what you wrote in the chapters. Paste **your**
# version of a piece above the answer that uses it, in the same cell: it takes the place of the course's there and below. Pieces
# that you do not paste are taken from the course, and the check and the report name them.
#
# **The weights.** `LayerWeights`, `LatentLayerWeights` and `ModelWeights` are frozen dataclasses: `help(LayerWeights)` shows
# the fields. Row vectors times weights (`x @ w`); heads are consecutive column blocks, as in `split_heads`.
#
# **The norms.** Every norm is an RMSNorm over the last axis:
#
# $$\frac{x}{\sqrt{\mathrm{mean}(x^2) + 10^{-5}}} \cdot \text{scale}$$
#
# The call `F.rms_norm(x, scale.shape, scale, 1e-5)` computes it.
#
# **To hear it speak**, when all is written, run in a cell of your own:
#
# ```python
# from course_llm.bundled import bundled_weights
#
# weights, tokenizer = bundled_weights()
# prompt = torch.tensor([tokenizer.encode("renal tubule: The part of the kidney")])
# print(tokenizer.decode(generate_text(weights, prompt, 40, tokenizer.eos_id)[0]))
# ```
#
# It writes in the style of a medical dictionary and makes its facts up: it is not medical information.

# %% pieces
from course_llm.attention import apply_rope, merge_heads, scaled_dot_product_attention, split_heads
from course_llm.decoding import sample_from_uniform, sampling_distribution
from course_llm.kv_cache import KVCache, cached_attention, rope_at
from course_llm.masking import causal_mask_with_past
from course_llm.mla import compress_kv, expand_kv, low_rank_factors
from course_llm.weights import LatentLayerWeights, LayerWeights, ModelWeights

# %% [markdown] exercise="ModelCache" points=6 minutes=20
# ## A cache for all layers
#
# `KVCache` serves one layer. A model needs one cache for all, and one that takes rows of any kind, keys and values or a
# latent.
#
# `ModelCache(layers, max_seq)` has room for `max_seq` tokens in each of `layers` layers.
#
# - `update(layer, *rows)` takes one tensor or several, `(..., new, width)` each, whose second to last axis is the new tokens.
#   It stores them behind those that this layer holds and returns a **tuple** of as many tensors: all rows of the layer
#   so far, oldest first. A tuple also when one tensor came.
# - The room for all `max_seq` tokens is allocated when a layer gets its **first** rows, each tensor in its own dtype and on its device. The cache
#   holds this and nothing else. One layer may hold keys and values, the next one latents.
# - `length` is an int: the tokens that **all** layers hold. A step passes through the layers one after the other; until
#   the last one has its rows, `length` is what it was before the step.
# - When more than `max_seq` tokens would be held, `update` raises a `ValueError` and changes nothing.
# - `reset()` forgets all tokens of all layers; the cache can be filled again, in the same memory.
#
# **Example.** In a cache for 2 layers that holds 3 tokens, `update(0, k, v)` with one new token returns 4 rows each, and `length`
# is still 3. After `update(1, k, v)` it is 4.

# %% exercise="ModelCache"
class ModelCache:
    def __init__(self, layers, max_seq):
        ### BEGIN SOLUTION
        self.layers = layers
        self.max_seq = max_seq
        self.stored = {}
        self.reset()
        ### END SOLUTION

    @property
    def length(self):
        ### BEGIN SOLUTION
        return min(self.tokens)
        ### END SOLUTION

    def update(self, layer, *rows):
        ### BEGIN SOLUTION
        start, end = self.tokens[layer], self.tokens[layer] + rows[0].shape[-2]
        if end > self.max_seq:
            raise ValueError(f"ModelCache.update needs length + new <= {self.max_seq}, got {end}")
        if layer not in self.stored:
            shapes = [(*r.shape[:-2], self.max_seq, r.shape[-1]) for r in rows]
            self.stored[layer] = [r.new_zeros(shape) for r, shape in zip(rows, shapes, strict=True)]
        for buffer, new in zip(self.stored[layer], rows, strict=True):
            buffer[..., start:end, :] = new.detach()
        self.tokens[layer] = end
        return tuple(buffer[..., :end, :] for buffer in self.stored[layer])
        ### END SOLUTION

    def reset(self):
        ### BEGIN SOLUTION
        self.tokens = [0] * self.layers
        ### END SOLUTION

# %% [markdown] hints="ModelCache"
# 1. Every layer has a count of its own. What is `length` in terms of these counts?
# 2. `rows[0].new_zeros(*rows[0].shape[:-2], max_seq, rows[0].shape[-1])` is a buffer of the right kind; make one for each tensor at the layer's first update.
# 3. Refuse first, then write `buffer[..., start:end, :] = new`, then set the layer's count to `end`. `length` is the least count of all layers; `reset` sets all to 0 and keeps the buffers.

# %% [markdown] exercise="attention_step" points=8 minutes=20
# ## The model's attention, with a cache
#
# **Given** the rows `x` `(batch, new, d_hidden)` of new tokens, which come behind the layer's first norm already; the layer's
# weights; the number of `heads`; a cache with `length` and `update(layer, *rows)` as in `ModelCache`; and the `index` of this layer in it.
#
# **Return** `(batch, new, d_hidden)`:
#
# 1. project with `w_q`, `w_k`, `w_v` and split into heads;
# 2. RMSNorm over `head_dim` on every head's queries (scale `q_norm`) and keys (scale `k_norm`);
# 3. rotate queries and keys by their positions in the text: the first new token stands at `cache.length`;
# 4. store keys and values, `cache.update(index, k, v)`; the keys are stored normed and rotated;
# 5. attend causally from the new rows to all rows so far, scale $1/\sqrt{\text{head\_dim}}$; merge the heads; multiply with `w_o`.
#
# `heads * head_dim` may differ from `d_hidden`.
#
# **Cost.** At most `8 * new * d_hidden * width + 4 * new * keys * width` FLOPs per row of the batch, where `width` is `heads * head_dim` and
# `keys` counts all tokens so far, the new ones included.
#
# **Example.** A prompt of 5 tokens, then one token: the second call computes one row of queries, at position 5, on 6 keys.

# %% exercise="attention_step"
def attention_step(x, layer, heads, cache, index):
    ### BEGIN SOLUTION
    start = cache.length
    q = split_heads(x @ layer.w_q, heads)
    k = split_heads(x @ layer.w_k, heads)
    v = split_heads(x @ layer.w_v, heads)
    q = F.rms_norm(q, layer.q_norm.shape, layer.q_norm, 1e-5)
    k = F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-5)
    k, v = cache.update(index, rope_at(k, start), v)
    return merge_heads(cached_attention(rope_at(q, start), k, v)) @ layer.w_o
    ### END SOLUTION

# %% [markdown] hints="attention_step"
# 1. All pieces are there: `split_heads`, `rope_at`, `cached_attention`, `merge_heads`. Write the five lines of the task one after the other.
# 2. `F.rms_norm(q, layer.q_norm.shape, layer.q_norm, 1e-5)` norms the last axis. Norm first, rotate second.
# 3. Read `start = cache.length` before the update: in the last layer the update makes it grow. Rotate new queries and new keys with `rope_at(..., start)`, once.

# %% [markdown] exercise="latent_attention_step" points=12 minutes=30
# ## Latents in the place of keys and values
#
# Keys and values of a layer are read off the same row: together, `[w_k | w_v]` is one matrix with `d_hidden` rows. Written as a product
# through `d_c` numbers, it gives a **latent**, and the latent is all that has to be cached. With `d_c = d_hidden` nothing is lost; the bundled model's cache
# is then half as large. A smaller `d_c` is an approximation.
#
# **`latent_factors(w_k, w_v, d_c)`** returns `(w_dkv, w_uk, w_uv)`, of shapes `(d_hidden, d_c)`, `(d_c, width)`, `(d_c, width)`, such that `w_dkv @ w_uk`
# beside `w_dkv @ w_uv` is the best approximation of rank `d_c` of `w_k` beside `w_v`. How the product is shared between the factors
# is free. A `d_c` below 1 or above `min(d_hidden, 2 * width)` is a `ValueError`.
#
# **`latent_attention_step(x, layer, heads, cache, index)`** takes a `LatentLayerWeights` and returns what `attention_step` returns
# with `w_k = w_dkv @ w_uk` and `w_v = w_dkv @ w_uv`. Its cache is given the latents of the new tokens alone,
# `cache.update(index, c)` with `c` of shape `(batch, new, d_c)`, and returns a tuple of one tensor. Keys are expanded from all latents, then normed, then rotated, key $i$
# by position $i$.
#
# **Cost.** Per row of the batch at most the sum of
#
# - `2 * new * d_hidden * (2 * width + d_c)` FLOPs for queries, latents and the output, of new tokens alone;
# - `4 * keys * d_c * width` for keys and values, expanded once per call;
# - `4 * new * keys * width` for attention.
#
# Less is possible. The leaderboard counts.

# %% exercise="latent_attention_step"
def latent_factors(w_k, w_v, d_c):
    ### BEGIN SOLUTION
    both = torch.cat([w_k, w_v], dim=1)
    if d_c < 1 or d_c > min(both.shape):
        raise ValueError(f"latent_factors needs 1 <= d_c <= {min(both.shape)}, got {d_c}")
    w_dkv, w_up = low_rank_factors(both, d_c)
    return w_dkv, w_up[:, : w_k.shape[1]], w_up[:, w_k.shape[1] :]
    ### END SOLUTION


def latent_attention_step(x, layer, heads, cache, index):
    ### BEGIN SOLUTION
    start = cache.length
    q = split_heads(x @ layer.w_q, heads)
    q = rope_at(F.rms_norm(q, layer.q_norm.shape, layer.q_norm, 1e-5), start)
    (c,) = cache.update(index, compress_kv(x, layer.w_dkv))
    k, v = expand_kv(c, layer.w_uk, layer.w_uv, heads)
    k = rope_at(F.rms_norm(k, layer.k_norm.shape, layer.k_norm, 1e-5), 0)
    return merge_heads(cached_attention(q, k, v)) @ layer.w_o
    ### END SOLUTION

# %% [markdown] hints="latent_attention_step"
# 1. One matrix for both: `torch.cat([w_k, w_v], dim=1)`. Its two low-rank factors come from `low_rank_factors`; the second one is cut in two again.
# 2. Compress the new rows, store, and work with all latents that come back: `expand_kv` gives the keys and values of every head.
# 3. Queries stand at `cache.length`, read before the update, and behind; keys at 0, 1, …, so `rope_at(k, 0)` after the norm. Mind the comma in `(c,) = cache.update(index, ...)`.

# %% [markdown] exercise="decoder_step" points=6 minutes=15
# ## One step through the model
#
# **Given** `weights` (a `ModelWeights`), the `ids` `(batch, new)` of new tokens, and a cache that holds the text before them.
#
# **Return** the logits of the token that follows the **last** new one, `(batch, vocab)`.
#
# 1. `x = weights.embedding[ids]`.
# 2. In every layer `x = x + attention(norm1(x))`, then `x = x + gelu(norm2(x) @ w_up) @ w_down`. The attention is `latent_attention_step` for a layer that is a
#    `LatentLayerWeights`, and `attention_step` for a `LayerWeights`. GELU is exact (`F.gelu`), the norms are RMSNorm.
# 3. The last norm (`weights.norm`), then the output matrix, which is the embedding transposed.
#
# **Cost.** The vocabulary's `2 * d_hidden * vocab` FLOPs are paid once per row of the batch, for the last token alone.
#
# **Example.** A prompt of 9 tokens and then one token are two calls with the same cache; each returns `(batch, vocab)`.

# %% exercise="decoder_step"
def decoder_step(weights, ids, cache):
    ### BEGIN SOLUTION
    x = weights.embedding[ids]
    for index, layer in enumerate(weights.layers):
        normed = F.rms_norm(x, layer.norm1.shape, layer.norm1, 1e-5)
        if isinstance(layer, LatentLayerWeights):
            x = x + latent_attention_step(normed, layer, weights.heads, cache, index)
        else:
            x = x + attention_step(normed, layer, weights.heads, cache, index)
        normed = F.rms_norm(x, layer.norm2.shape, layer.norm2, 1e-5)
        x = x + F.gelu(normed @ layer.w_up) @ layer.w_down
    last = F.rms_norm(x[:, -1], weights.norm.shape, weights.norm, 1e-5)
    return last @ weights.embedding.T
    ### END SOLUTION

# %% [markdown] hints="decoder_step"
# 1. The residual stream `x` is only ever added to; norms are applied to what goes into a part, not to `x` itself.
# 2. `enumerate(weights.layers)` gives the index that the cache needs; `isinstance(layer, LatentLayerWeights)` chooses the attention.
# 3. Take the last row before the last norm: `F.rms_norm(x[:, -1], ...) @ weights.embedding.T`.

# %% [markdown] exercise="generate_text" points=10 minutes=25
# ## The generator
#
# **Given** `weights`, a prompt `ids` `(batch, seq)` and `max_new_tokens`, **return** the prompt followed by the new tokens.
#
# - The prompt goes through the model in one step, then one token per step. Per row `prompt + new - 1` tokens go through the model: the last
#   token written is never read. `max_new_tokens` 0 returns the prompt.
# - Temperature 0 takes the most probable token, ties to the lower id. Above, new token `t` of a row, counted from 0, is drawn from
#   `sampling_distribution(logits, temperature, top_k, top_p)` by `sample_from_uniform` with `uniforms[:, t]`; `uniforms` is `(batch, max_new_tokens)`.
#   A temperature above 0 without `uniforms` is a `ValueError`.
# - A row ends with `eos_id`; a finished row is filled with it, and the loop stops when all rows have finished. An EOS in the prompt does not count;
#   `None` never stops early.
# - Layers of both kinds work: `ModelCache` and `decoder_step` take care of that.
#
# **Example.** For a prompt of 9 tokens and 20 new ones, $9 + 19 = 28$ tokens go through the model.

# %% exercise="generate_text"
def generate_text(weights, ids, max_new_tokens, eos_id=None, temperature=0.0, top_k=None, top_p=None, uniforms=None):
    ### BEGIN SOLUTION
    if temperature > 0 and uniforms is None:
        raise ValueError(f"generate_text needs uniforms at temperature {temperature}")
    cache = ModelCache(len(weights.layers), ids.shape[1] + max_new_tokens)
    out, new = ids, ids
    done = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    for t in range(max_new_tokens):
        logits = decoder_step(weights, new, cache)
        if temperature == 0:
            token = logits.argmax(dim=-1)
        else:
            probs = sampling_distribution(logits, temperature, top_k, top_p)
            token = sample_from_uniform(probs, uniforms[:, t])
        if eos_id is not None:
            token = torch.where(done, eos_id, token)
            done = done | (token == eos_id)
        new = token.to(ids.dtype).unsqueeze(1)
        out = torch.cat([out, new], dim=1)
        if done.all():
            break
    return out
    ### END SOLUTION

# %% [markdown] hints="generate_text"
# 1. It is `generate_cached` with your own model in it: what is unread goes through `decoder_step`, first the prompt, then each new token alone.
# 2. A cache with room for `ids.shape[1] + max_new_tokens` tokens is enough. `unread = token[:, None]` after each step.
# 3. Keep a boolean `done` per row: a done row's token becomes `eos_id`, a row whose token is `eos_id` becomes done, and when all are done the loop ends.
