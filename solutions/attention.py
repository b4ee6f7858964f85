# %% [markdown]
# # Attention: exercises
#
# You build a decoder block from its parts: attention over one set of keys, the split into heads, multi-head attention,
# two ways to tell a model where a token stands, and the block that a decoder stacks.
#
# Some things hold everywhere:
#
# - Vectors are rows and are multiplied by matrices from the right, `x @ w`.
# - `*batch` in a shape stands for any number of batch axes, or none.
# - A float result has the dtype of its inputs, also in `float16` and `bfloat16`.
# - No input is changed in place.
# - Gradients flow to every float input but a mask.
#
# An answer may call the functions that you wrote in earlier cells.

# %% given
from course_llm.weights import BlockWeights

# %% [markdown] exercise="scaled_dot_product_attention" points=6 minutes=15
# ## Scaled dot-product attention
#
# **Given** queries `q` of shape `(*batch, queries, d_k)`, keys `k` of shape `(*batch, keys, d_k)`, values `v` of shape
# `(*batch, keys, d_v)` and perhaps an additive `mask`, **return** for each query the weighted mean of the values,
# `(*batch, queries, d_v)`.
#
# **Rule.** The scores are the dot products of queries and keys, divided by $\sqrt{d_k}$. The mask is added to the scores;
# it broadcasts to `(*batch, queries, keys)`, and holds 0 where a query may attend to a key and `-inf` where it may not.
# The softmax over the keys turns each row of scores into weights. The result is weights times values:
#
# $$\mathrm{softmax}\left(\frac{QK^\top}{\sqrt{d_k}} + M\right)V$$
#
# Every row has at least one key left. Scores may be large (a thousand, say): `torch.softmax` copes with that, a plain
# `exp` does not. `d_v` may differ from `d_k`.
#
# **Example.** `q = [[2, 0, 0, 0]]`, `k = [[1, 0, 0, 0], [0, 1, 0, 0]]`: the scores are $2/\sqrt{4} = 1$ and 0, the weights
# $e/(e+1) = 0.731$ and $1/(e+1) = 0.269$. With `v = [[1, 0, 3], [0, 1, 3]]` the result is `[[0.731, 0.269, 3.0]]`. With the
# mask `[[-inf, 0]]` the first key is hidden, and the result is `[[0, 1, 3]]`.

# %% exercise="scaled_dot_product_attention"
def scaled_dot_product_attention(q, k, v, mask=None):
    ### BEGIN SOLUTION
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (*batch, queries, keys)
    if mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1) @ v
    ### END SOLUTION

# %% [markdown] hints="scaled_dot_product_attention"
# 1. Which two axes of `k` have to change places, so that `q @ k...` compares every query with every key?
# 2. `k.transpose(-2, -1)` swaps the last two axes and leaves all batch axes alone.
# 3. Scale with the width of the queries, `q.shape[-1]`. Add the mask before the softmax, if there is one.
# 4. `torch.softmax(scores, dim=-1) @ v`: the weights of one query sum to 1 over the keys, the last axis.

# %% [markdown] exercise="split_heads" points=3 minutes=10
# ## Split into heads
#
# **Given** `x` of shape `(batch, seq, d_hidden)` and the number of `heads`, which divides `d_hidden`, **return** the same
# numbers as `(batch, heads, seq, d_hidden/heads)`.
#
# **Rule.** Head 0 owns the first `d_hidden/heads` columns of every position, head 1 the next, and so on.
#
# **Example.** Three positions, four columns, two heads: `[[[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]]` becomes
# `[[[[1, 2], [5, 6], [9, 10]], [[3, 4], [7, 8], [11, 12]]]]`.

# %% exercise="split_heads"
def split_heads(x, heads):
    ### BEGIN SOLUTION
    batch, seq, d_hidden = x.shape
    return x.reshape(batch, seq, heads, d_hidden // heads).transpose(1, 2)
    ### END SOLUTION

# %% [markdown] hints="split_heads"
# 1. Two steps: cut the last axis into two, then swap two axes.
# 2. `reshape` to the final shape at once gives the right shape with the wrong numbers: it reads the memory in order.
# 3. Reshape to `(batch, seq, heads, d_hidden // heads)`, then `transpose(1, 2)`.

# %% [markdown] exercise="merge_heads" points=3 minutes=10
# ## Merge the heads
#
# **Given** `x` of shape `(batch, heads, seq, head_dim)`, **return** `(batch, seq, heads * head_dim)`.
#
# **Rule.** For each position, the vectors of all heads stand side by side, head 0 first. It undoes the split.
#
# **Example.** `[[[[1, 2], [5, 6], [9, 10]], [[3, 4], [7, 8], [11, 12]]]]` (two heads, three positions, two columns each)
# becomes `[[[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]]`.

# %% exercise="merge_heads"
def merge_heads(x):
    ### BEGIN SOLUTION
    batch, heads, seq, head_dim = x.shape
    return x.transpose(1, 2).reshape(batch, seq, heads * head_dim)
    ### END SOLUTION

# %% [markdown] hints="merge_heads"
# 1. Go the way of the split backwards: first swap the axes, then join two of them.
# 2. After `x.transpose(1, 2)` the shape is `(batch, seq, heads, head_dim)`, and the last two axes are to become one.
# 3. `view` refuses to join axes after a transpose; `reshape` copies where it has to.

# %% [markdown] exercise="multi_head_attention" points=6 minutes=20
# ## Multi-head attention
#
# **Given** two inputs of width `d_hidden`, `x_query` `(*batch, queries, d_hidden)` and `x_key` `(*batch, keys, d_hidden)`,
# the four weights, the number of `heads` and perhaps an additive `mask`, **return** `(*batch, queries, d_hidden)`.
#
# **Rule.**
# 1. Queries are `x_query @ w_q`. Keys and values come from the other input: `x_key @ w_k` and `x_key @ w_v`.
#    `w_q` and `w_k` have `heads * d_k` columns, `w_v` has `heads * d_v`. Read `d_k` and `d_v` off the weights:
#    they need not be `d_hidden / heads`, and they may differ.
# 2. Each head owns a block of consecutive columns of all three.
# 3. Each head runs scaled dot-product attention on its own (scale $1/\sqrt{d_k}$, with `d_k` the width of *one* head). The
#    mask, 0 or `-inf`, broadcasts to `(*batch, heads, queries, keys)`.
# 4. The heads are put side by side, head 0 first, and multiplied by `w_o`, which is `(heads * d_v, d_hidden)`.
#
# The two inputs may be the same (self-attention) or differ in content and length (cross-attention). There may be no batch
# axis or several, so count axes from the end.
#
# **Example.** One head, all four weights `[[2, 0], [0, 2]]` and both inputs `[[1, 0], [0, 1]]`: the scores of the first query
# are $4/\sqrt{2}$ and 0, its weights 0.944 and 0.056, the mixed value `[1.888, 0.112]` and the result `[3.777, 0.223]`.

# %% exercise="multi_head_attention"
def multi_head_attention(x_query, x_key, w_q, w_k, w_v, w_o, heads, mask=None):
    ### BEGIN SOLUTION
    def split(x):  # (*batch, seq, heads * width) -> (*batch, heads, seq, width)
        return x.reshape(*x.shape[:-1], heads, -1).transpose(-3, -2)

    q, k, v = split(x_query @ w_q), split(x_key @ w_k), split(x_key @ w_v)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (*batch, heads, queries, keys)
    if mask is not None:
        scores = scores + mask
    mixed = torch.softmax(scores, dim=-1) @ v  # (*batch, heads, queries, d_v)
    merged = mixed.transpose(-3, -2)  # (*batch, queries, heads, d_v)
    return merged.reshape(*merged.shape[:-2], -1) @ w_o
    ### END SOLUTION

# %% [markdown] hints="multi_head_attention"
# 1. Project all heads at once, `x_query @ w_q`; the heads are already there, as blocks of columns.
# 2. Split with `reshape(*x.shape[:-1], heads, -1).transpose(-3, -2)`: it works for any number of batch axes.
# 3. Attention on `(*batch, heads, seq, width)` is the attention of the first exercise, with one batch axis more.
# 4. Merge: swap the axes of heads and queries back, join the last two axes, multiply by `w_o`.

# %% [markdown] exercise="attention_parameter_count" points=3 minutes=10
# ## Count the parameters
#
# **Given** the width `d_hidden`, the number of `heads` and perhaps the widths `d_k` and `d_v` of one head, **return** the
# number of weights in `w_q`, `w_k`, `w_v` and `w_o` together, as an `int`. There are no biases.
#
# **Rule.** `w_q` and `w_k` are `(d_hidden, heads * d_k)`, `w_v` is `(d_hidden, heads * d_v)`, `w_o` is
# `(heads * d_v, d_hidden)`. A width that is left out is `d_hidden / heads`, each for itself: `d_v` does not follow `d_k`.
#
# **Raise** `ValueError` when a width is left out and `d_hidden / heads` is not a whole number. When both widths are given,
# `heads` need not divide `d_hidden`.
#
# **Example.** `attention_parameter_count(512, 8)` is 4 · 512 · 512 = 1,048,576. `attention_parameter_count(10, 3, d_k=4, d_v=5)`
# is 10 · 12 + 10 · 12 + 10 · 15 + 15 · 10 = 540. `attention_parameter_count(100, 12)` raises.

# %% exercise="attention_parameter_count"
def attention_parameter_count(d_hidden, heads, d_k=None, d_v=None):
    ### BEGIN SOLUTION
    if (d_k is None or d_v is None) and d_hidden % heads:
        raise ValueError(
            f"attention_parameter_count needs d_hidden % heads == 0, got d_hidden={d_hidden}, heads={heads}"
        )
    d_k = d_hidden // heads if d_k is None else d_k
    d_v = d_hidden // heads if d_v is None else d_v
    return 2 * d_hidden * heads * d_k + 2 * d_hidden * heads * d_v
    ### END SOLUTION

# %% [markdown] hints="attention_parameter_count"
# 1. Write down the shapes of the four matrices; a matrix has rows times columns weights.
# 2. `w_q` and `w_k` give 2 · d_hidden · heads · d_k, `w_v` and `w_o` give 2 · d_hidden · heads · d_v.
# 3. Check `d_hidden % heads` only where a width is `None`; compute the default with `//`, so that it stays an `int`.

# %% [markdown] exercise="sinusoidal_positions" points=3 minutes=15
# ## Sinusoidal positions
#
# **Given** the number of positions `seq`, the width `d_hidden` and a `base`, **return** a `float32` tensor
# `(seq, d_hidden)`, one row per position, counted from 0.
#
# **Rule.** Columns come in pairs. For the pair $i = 0, 1, \dots, d_\text{hidden}/2 - 1$ and position $t$,
#
# $$\begin{aligned}
# \text{column } 2i &: \quad \sin\frac{t}{\text{base}^{2i/d_\text{hidden}}} \\
# \text{column } 2i+1 &: \quad \cos\frac{t}{\text{base}^{2i/d_\text{hidden}}}
# \end{aligned}$$
#
# **Raise** `ValueError` when `d_hidden` is odd.
#
# **Example.** `sinusoidal_positions(2, 4)` has the rows `[0, 1, 0, 1]` and `[sin 1, cos 1, sin 0.01, cos 0.01]`, because
# $10000^{2/4} = 100$.

# %% exercise="sinusoidal_positions"
def sinusoidal_positions(seq, d_hidden, base=10000.0):
    ### BEGIN SOLUTION
    if d_hidden % 2:
        raise ValueError(f"sinusoidal_positions needs an even d_hidden, got d_hidden={d_hidden}")
    pairs = torch.arange(0, d_hidden, 2, dtype=torch.float32)  # 2i
    angles = torch.arange(seq, dtype=torch.float32)[:, None] / base ** (pairs / d_hidden)  # (seq, d_hidden/2)
    table = torch.empty(seq, d_hidden)
    table[:, 0::2] = angles.sin()
    table[:, 1::2] = angles.cos()
    return table
    ### END SOLUTION

# %% [markdown] hints="sinusoidal_positions"
# 1. First make the table of angles, `(seq, d_hidden/2)`: a column of positions divided by a row of powers of the base.
# 2. `torch.arange(0, d_hidden, 2)` is already 2i, so the exponent is that divided by `d_hidden`.
# 3. Write sines to the columns `0::2` and cosines to the columns `1::2` of an empty `(seq, d_hidden)` table.

# %% [markdown] exercise="apply_rope" points=5 minutes=20
# ## Rotary positions
#
# **Given** queries or keys `x` of shape `(*batch, seq, head_dim)` with an even `head_dim`, integer `positions` that broadcast
# to `(*batch, seq)`, and a `base`, **return** `x` with every pair of neighbouring columns rotated.
#
# **Rule.** The pair $(x_{2i}, x_{2i+1})$ of a row at position $t$ turns by the angle $\theta = t / \text{base}^{2i/\text{head\_dim}}$:
#
# $$\begin{aligned}
# x_{2i} &\to x_{2i}\cos\theta - x_{2i+1}\sin\theta \\
# x_{2i+1} &\to x_{2i}\sin\theta + x_{2i+1}\cos\theta
# \end{aligned}$$
#
# A row's position is the number in `positions`, not the row's index: positions may start anywhere, have gaps and repeat. They
# may have the shape `(seq,)`, or a row for each element of the batch, or axes of length 1. Compute the angles in `float32`
# or better, also for half-precision `x` (bfloat16 cannot tell position 300 from 301), and return the dtype of `x`.
#
# **Example.** `apply_rope([[1, 0, 0, 1]], positions=[1])` is `[[cos 1, sin 1, -sin 0.01, cos 0.01]]`. At position 0
# nothing changes.

# %% exercise="apply_rope"
def apply_rope(x, positions, base=10000.0):
    ### BEGIN SOLUTION
    head_dim = x.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=dtype, device=x.device) / head_dim)
    angles = positions[..., None] * frequencies  # (..., seq, head_dim/2)
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)  # (..., seq, head_dim/2, 2)
    return rotated.flatten(-2).to(x.dtype)
    ### END SOLUTION

# %% [markdown] hints="apply_rope"
# 1. Angles first: `positions[..., None]` times one frequency per pair has the shape `(..., seq, head_dim/2)`.
# 2. `x[..., 0::2]` and `x[..., 1::2]` are the first and the second members of all pairs.
# 3. To put the pairs back, stack both results in a new last axis and flatten the last two axes.
# 4. Products of half-precision `x` with `float32` sines are `float32`: cast the result with `.to(x.dtype)`.

# %% [markdown] exercise="decoder_block" points=8 minutes=20
# ## The decoder block
#
# **Given** `x` of shape `(batch, seq, d_hidden)`, a `BlockWeights` with the block's weights, and the number of `heads`, **return**
# the block's output, `(batch, seq, d_hidden)`.
#
# **Rule.** Pre-norm, with two residual connections:
#
# $$\begin{aligned}
# h &= x + \mathrm{MultiHead}(\mathrm{norm}_1(x)) \\
# \text{result} &= h + \mathrm{FFN}(\mathrm{norm}_2(h))
# \end{aligned}$$
#
# - $\mathrm{norm}$ is LayerNorm over the last axis: subtract the mean, divide by $\sqrt{\text{variance} + 10^{-5}}$ (the variance
#   divides by `d_hidden`), multiply by the scale, add the bias. `ln1_scale`, `ln1_bias` belong to the first, `ln2_scale`,
#   `ln2_bias` to the second.
# - $\mathrm{MultiHead}$ is multi-head self-attention with `w_q`, `w_k`, `w_v`, `w_o`, all `(d_hidden, d_hidden)` here. It is causal: position
#   $i$ attends to the positions $0 \dots i$.
# - $\mathrm{FFN}(z)$ is the feed-forward layer, $\mathrm{GELU}(z\,W_{\mathrm{up}} + b_{\mathrm{up}})\,W_{\mathrm{down}} + b_{\mathrm{down}}$, with the exact GELU, `F.gelu(...)`.
#
# There is no position encoding and no norm at the end.
#
# **Example.** With `w_o`, `w_down` and `b_down` all zero, both branches add nothing, and the result is `x`.

# %% exercise="decoder_block"
def decoder_block(x, weights: BlockWeights, heads):
    ### BEGIN SOLUTION
    batch, seq, d_hidden = x.shape
    normed = F.layer_norm(x, (d_hidden,), weights.ln1_scale, weights.ln1_bias, 1e-5)
    q, k, v = (
        (normed @ w).reshape(batch, seq, heads, -1).transpose(1, 2) for w in (weights.w_q, weights.w_k, weights.w_v)
    )
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(1)
    mixed = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ v
    x = x + mixed.transpose(1, 2).reshape(batch, seq, -1) @ weights.w_o
    normed = F.layer_norm(x, (d_hidden,), weights.ln2_scale, weights.ln2_bias, 1e-5)
    return x + F.gelu(normed @ weights.w_up + weights.b_up) @ weights.w_down + weights.b_down
    ### END SOLUTION

# %% [markdown] hints="decoder_block"
# 1. Two steps of the same kind: normalise, transform, add the result to what you had *before* the norm.
# 2. `F.layer_norm(x, (d_hidden,), scale, bias, 1e-5)` is the norm.
# 3. Additive causal mask: `torch.full((seq, seq), -math.inf, dtype=x.dtype, device=x.device).triu(1)`. It is -inf above
#    the diagonal and 0 elsewhere.
# 4. The second norm is applied to the sum after attention, with `ln2_scale` and `ln2_bias`; GELU stands between `w_up` and `w_down`.
