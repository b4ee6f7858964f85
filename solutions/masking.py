# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Masking: exercises
#
# You build the masks that decide which token may look at which: the causal mask, masks for padding, windows, packed
# documents and prefixes. At the end you write the test that tells whether a model cheats.
#
# Two forms of a mask occur. A **boolean** mask says `True` where a query may attend to a key. An **additive** mask says `0`
# there and `-inf` where it may not; it is added to the scores before the softmax. In both, row $i$ is the query (the token
# that looks) and column $j$ is the key (the token that is looked at). Positions start at 0.
#
# In the shapes, `...` or `*batch` stands for any number of batch dimensions, none included. No function changes its
# arguments in place.

# %% [markdown] exercise="causal_mask" points=3 minutes=10
# ## Causal mask
#
# **Given** the number of tokens `n` and a floating-point `dtype`, **return** the additive causal mask, a tensor of shape
# `(n, n)` and of that dtype.
#
# **Rule.** Entry $(i, j)$ is `0` if $j \le i$ (the current or an earlier token) and `-inf` if $j > i$ (a later one). Use a true
# `-inf`, `float("-inf")`, in every dtype; float16 and bfloat16 have one, too.
#
# **Example.** `causal_mask(3)` is
#
#     [[0, -inf, -inf],
#      [0,    0, -inf],
#      [0,    0,    0]]
#
# in float32.

# %% exercise="causal_mask"
def causal_mask(n, dtype=torch.float32):
    ### BEGIN SOLUTION
    query = torch.arange(n)[:, None]
    key = torch.arange(n)[None, :]
    return torch.zeros(n, n, dtype=dtype).masked_fill(key > query, float("-inf"))
    ### END SOLUTION


# %% [markdown] hints="causal_mask"
# 1. The forbidden entries lie above the diagonal; the diagonal itself is allowed.
# 2. `torch.triu(x, diagonal=1)` keeps what lies above the diagonal and sets the rest to 0. Do not multiply -inf by zeros: that gives NaN.
# 3. `torch.full((n, n), float("-inf"), dtype=dtype)` followed by `.triu(1)` is the whole mask.

# %% [markdown] exercise="masked_softmax" points=5 minutes=20
# ## From scores to weights
#
# **Given** `scores` of shape `(..., queries, keys)` and an additive `mask` (`0` or `-inf`, same dtype, of any shape that
# broadcasts to that of the scores), **return** the attention weights in the shape and dtype of the scores.
#
# **Rule.**
#
# - Each row is the softmax of `scores + mask` over its keys (the last axis).
# - A masked weight is exactly 0.
# - A row in which *every* key is masked is all 0, and the gradient with respect to its scores is 0, not NaN.
# - Scores may be as large as ±1e4: no weight is NaN, and the weights of each row with an open key sum to 1, also when the
#   largest score belongs to a masked key.
# - Gradients flow to `scores`.
#
# **Example.** Scores `[0, log 3, 5]` with the mask `[0, 0, -inf]` give `[0.25, 0.75, 0]`. The mask
# `[-inf, -inf, -inf]` gives `[0, 0, 0]`.


# %% exercise="masked_softmax"
def masked_softmax(scores, mask):
    ### BEGIN SOLUTION
    hidden = (mask == float("-inf")).expand(scores.shape)
    empty = hidden.all(dim=-1, keepdim=True)
    # an empty row gets zeros before the softmax, so that neither it nor its gradient is NaN
    masked = torch.where(hidden, float("-inf"), scores)
    masked = torch.where(empty, 0.0, masked)
    return torch.where(hidden, 0.0, torch.softmax(masked, dim=-1))
    ### END SOLUTION


# %% [markdown] hints="masked_softmax"
# 1. `torch.softmax(scores + mask, dim=-1)` is right for every row that has a key left. What does it give for a row of -inf?
# 2. Replacing NaN after the softmax is too late for the gradient: the backward pass still goes through the NaN. Change what goes into the softmax.
# 3. Find the empty rows with `(mask == float("-inf")).all(-1, keepdim=True)`; mind that the mask may have fewer rows than the scores, so expand it first.
# 4. Set empty rows of `scores + mask` to 0 with `masked_fill`, take the softmax, and set all masked weights to 0 with a second `masked_fill`.

# %% [markdown] exercise="causal_self_attention" points=4 minutes=15
# ## Causal self-attention
#
# **Given** queries `q`, keys `k` and values `v`, each `(..., seq, d)`, **return** the output of masked self-attention,
# `(..., seq, d)`, in their dtype.
#
# **Rule.** $\mathrm{softmax}(q k^\top / \sqrt{d} + M)\, v$, where $M$ is the causal mask: output $i$ is a weighted mean of the values 0 to $i$. Output $i$ has
# exactly zero gradient with respect to every later position. You may use your functions from above.
#
# **Example.** If all queries are 0, all scores are equal and each output is the mean of the values so far: the values
# `[[1, 0], [0, 1]]` give the outputs `[[1, 0], [0.5, 0.5]]`.


# %% exercise="causal_self_attention"
def causal_self_attention(q, k, v):
    ### BEGIN SOLUTION
    seq, d = q.shape[-2:]
    scores = torch.matmul(q, k.transpose(-2, -1)) / d**0.5
    later = torch.ones(seq, seq, dtype=torch.bool, device=q.device).triu(1)
    weights = torch.softmax(scores.masked_fill(later, float("-inf")), dim=-1)
    return torch.matmul(weights, v)
    ### END SOLUTION


# %% [markdown] hints="causal_self_attention"
# 1. Three steps: scores, weights, weighted sum of the values. The mask belongs between the first and the second.
# 2. Transpose the last two axes of `k` with `k.transpose(-2, -1)`, so that any number of batch dimensions works. The scale is the square root of `q.shape[-1]`.
# 3. `masked_softmax(scores, causal_mask(q.shape[-2], scores.dtype)) @ v`.

# %% [markdown] exercise="causal_mask_with_past" points=4 minutes=10
# ## Causal mask for the newest tokens
#
# While text is generated, the keys of all earlier tokens are kept, and only the newest tokens ask.
#
# **Given** the number of `queries` (1 or more) and of `keys`, **return** a boolean mask of shape `(queries, keys)`.
#
# **Rule.** The queries are the *last* tokens of the sequence of `keys` tokens. Each sees itself and everything before it: the last query sees
# every key, the one before it all but the last key. With as many queries as keys it is the plain causal mask. If there are more
# queries than keys, raise a `ValueError` with a message that says so.
#
# **Example.** `causal_mask_with_past(2, 5)`, with x for True:
#
#     x x x x .
#     x x x x x


# %% exercise="causal_mask_with_past"
def causal_mask_with_past(queries, keys):
    ### BEGIN SOLUTION
    if queries > keys:
        raise ValueError(f"causal_mask_with_past needs queries <= keys, got queries={queries}, keys={keys}")
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    ### END SOLUTION


# %% [markdown] hints="causal_mask_with_past"
# 1. At which position of the whole sequence does query 0 stand, when the last query stands at `keys - 1`?
# 2. Query $i$ stands at position `keys - queries + i`. It sees every key up to there.
# 3. `torch.tril` takes a `diagonal` argument: `keys - queries` moves the triangle to the right.

# %% [markdown] exercise="padding_mask" points=3 minutes=10
# ## Padding mask
#
# Texts of unequal length are padded on the right to one length, so that they fit into one tensor.
#
# **Given** `lengths`, an integer tensor of shape `(batch,)` with values from 0 to `seq`, and the padded length `seq`, **return** a boolean tensor
# of shape `(batch, seq)`.
#
# **Rule.** Row $b$ is `True` on the first `lengths[b]` positions, the real tokens, and `False` on the padding.
#
# **Example.** `padding_mask(torch.tensor([2, 3]), 4)`, with x for True:
#
#     x x . .
#     x x x .


# %% exercise="padding_mask"
def padding_mask(lengths, seq):
    ### BEGIN SOLUTION
    positions = torch.arange(seq, device=lengths.device)
    return positions[None, :] < lengths[:, None]
    ### END SOLUTION


# %% [markdown] hints="padding_mask"
# 1. Compare positions 0, 1, …, `seq - 1` with the length of each row.
# 2. `torch.arange(seq)` is a row of positions; `lengths[:, None]` is a column of lengths. Comparing a row with a column broadcasts to (batch, seq).
# 3. The last real token of a text of length 2 stands at position 1: use `<`.

# %% [markdown] exercise="causal_padding_mask" points=4 minutes=15
# ## Causal and padding together
#
# **Given** `real`, a boolean tensor of shape `(batch, seq)` that is `True` on real tokens and `False` on padding, **return** a boolean mask of
# shape `(batch, 1, seq, seq)`. The axis of size 1 broadcasts over the heads.
#
# **Rule.** A query sees a key if the key is not later than the query **and** the key is a real token. The rule asks only
# about the key: it holds in the same form for queries that are padding, whose outputs nobody reads. The padding may stand on
# the right, on the left or anywhere else.
#
# **Example.** For one text with `real = [[False, True, True]]` (padding on the left) the mask of shape `(1, 1, 3, 3)` is, with x
# for True:
#
#     . . .
#     . x .
#     . x x


# %% exercise="causal_padding_mask"
def causal_padding_mask(real):
    ### BEGIN SOLUTION
    batch, seq = real.shape
    causal = torch.ones(seq, seq, dtype=torch.bool, device=real.device).tril()
    return causal[None, None] & real.reshape(batch, 1, 1, seq)
    ### END SOLUTION


# %% [markdown] hints="causal_padding_mask"
# 1. Two conditions must hold at once: make a boolean mask for each and join them with `&`.
# 2. Which axis does the padding belong to? The rule asks about the key, and keys are the last axis.
# 3. `real[:, None, None, :]` has the shape (batch, 1, 1, seq); the triangle `torch.ones(seq, seq, dtype=torch.bool).tril()` broadcasts with it.

# %% [markdown] exercise="sliding_window_mask" points=4 minutes=10
# ## Sliding window
#
# **Given** the number of tokens `n` and a `window`, **return** a boolean mask of shape `(n, n)`.
#
# **Rule.** Each token sees itself and the `window - 1` tokens before it, so `window` tokens in all (fewer at the start of the text), and
# nothing that comes later. A window of `n` or more is the plain causal mask. If the window is below 1, raise a `ValueError`
# with a message that says so.
#
# **Example.** `sliding_window_mask(4, 2)`, with x for True:
#
#     x . . .
#     x x . .
#     . x x .
#     . . x x


# %% exercise="sliding_window_mask"
def sliding_window_mask(n, window):
    ### BEGIN SOLUTION
    if window < 1:
        raise ValueError(f"sliding_window_mask needs window >= 1, got window={window}")
    triangle = torch.ones(n, n, dtype=torch.bool).tril()
    return triangle.triu(1 - window)  # what lies more than window - 1 below the diagonal goes, too
    ### END SOLUTION


# %% [markdown] hints="sliding_window_mask"
# 1. Write the distance of every key behind every query as a matrix: query position minus key position.
# 2. Which distances are allowed for a window of 1? Only 0. For a window of 2? 0 and 1.
# 3. With `i = torch.arange(n)[:, None]` and `j = torch.arange(n)`: `(i - j >= 0) & (i - j < window)`.

# %% [markdown] exercise="document_mask" points=4 minutes=10
# ## Packed documents
#
# Instead of padding short texts, training packs several into one row. They must not read each other.
#
# **Given** `document_ids`, an integer tensor of shape `(..., seq)` that names the document of each token, **return** a boolean mask
# of shape `(..., seq, seq)`.
#
# **Rule.** A query sees a key if both lie in the same document (their ids are equal) and the key is not later than the query. The
# ids are names, not numbers: they may be any integers in any order. The tokens of a document stand together, so an id never
# returns after its document has ended. Each row of a batch has documents of its own.
#
# **Example.** `document_mask(torch.tensor([7, 7, 3, 3]))`, with x for True:
#
#     x . . .
#     x x . .
#     . . x .
#     . . x x


# %% exercise="document_mask"
def document_mask(document_ids):
    ### BEGIN SOLUTION
    seq = document_ids.shape[-1]
    same = document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)
    later = torch.ones(seq, seq, dtype=torch.bool, device=document_ids.device).triu(1)
    return same.masked_fill(later, False)
    ### END SOLUTION


# %% [markdown] hints="document_mask"
# 1. Two conditions, joined with `&`: the same document, and not later.
# 2. To compare every query with every key, give the ids a second axis: `document_ids[..., :, None]` are the queries.
# 3. `document_ids[..., :, None] == document_ids[..., None, :]`, and the triangle `torch.ones(seq, seq, dtype=torch.bool).tril()`.

# %% [markdown] exercise="prefix_lm_mask" points=3 minutes=10
# ## Prefix language model
#
# A question may be read as a whole before the answer is written token by token.
#
# **Given** the number of tokens `n` and the length `prefix` of the prefix, from 0 to `n`, **return** a boolean mask of shape `(n, n)`.
#
# **Rule.** The first `prefix` tokens see each other whole, in both directions, and nothing after the prefix. Every later token sees itself and
# everything before it. With a prefix of 0 the mask is plain causal, with a prefix of `n` it is all `True`.
#
# **Example.** `prefix_lm_mask(4, 2)`, with x for True:
#
#     x x . .
#     x x . .
#     x x x .
#     x x x x


# %% exercise="prefix_lm_mask"
def prefix_lm_mask(n, prefix):
    ### BEGIN SOLUTION
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    mask[:prefix, :prefix] = True
    return mask
    ### END SOLUTION


# %% [markdown] hints="prefix_lm_mask"
# 1. Start from the causal mask. Which entries have to be opened?
# 2. Only those where both the query and the key lie in the prefix.
# 3. A slice can be set: `mask[:prefix, :prefix] = True`. Or join two conditions with `|`: key ≤ query, or key < prefix.

# %% [markdown] exercise="find_leaks" points=8 minutes=20
# ## Does the model cheat?
#
# You are given a model as a black box and have to find out which of its outputs depend on later tokens.
#
# **Given** `model`, a function from token ids `(batch, seq)` to logits `(batch, seq, vocab)`, and `ids`, one text of shape `(1, seq)`, **return** a
# boolean tensor of shape `(seq, seq)`.
#
# **Rule.** Entry $(i, j)$ is `True` if $j > i$ and there is some other token of the vocabulary which, put at position $j$, changes
# the logits at position $i$: at least one of the logits moves by more than 1e-6, up or down. All other tokens stay as they are. Try
# every other token: a model may react to a single one. On and below the diagonal every entry is `False`: reading its
# own token and earlier ones is what a model is for.
#
# The vocabulary is 0, 1, …, `vocab - 1`; its size is the last axis of the logits. Each row of a batch is computed on its own, so you may
# try tokens one by one or several at once. Do not change `ids`.
#
# **Example.** A model that reads only the current token has no leak. A model whose output $i$ reads tokens 0 to $i + 1$ gives, for
# three tokens, with x for True:
#
#     . x .
#     . . x
#     . . .


# %% exercise="find_leaks"
def find_leaks(model, ids):
    ### BEGIN SOLUTION
    seq = ids.shape[1]
    before = model(ids)
    vocab = before.shape[-1]
    leaks = torch.zeros(seq, seq, dtype=torch.bool)
    for j in range(1, seq):
        for token in range(vocab):
            changed = ids.clone()
            changed[0, j] = token
            moved = (model(changed) - before).abs() > 1e-6  # (1, seq, vocab)
            leaks[:j, j] |= moved[0, :j].any(dim=-1)
    return leaks
    ### END SOLUTION


# %% [markdown] hints="find_leaks"
# 1. Run the model on the text, then on copies of the text that differ in one token, and compare the logits.
# 2. Two loops: over the position $j$ that is changed and over the token that is put there. `ids.clone()` makes the copy.
# 3. `(after - before).abs() > 1e-6` says which logits moved; `.any(-1)` says at which positions $i$ one did. Only rows $i < j$ count.
# 4. Several tokens may be tried at one $j$: collect what they find with `leaks[:j, j] |= ...`.
