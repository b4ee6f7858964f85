# %% [markdown]
# # Loss: exercises
#
# A language model is trained with one number, the cross-entropy of the next token. Here you build it from a stable
# logarithm of the softmax, write down its gradient, compare teacher forcing with free running, measure long texts fairly, and
# finally compute the loss of a huge vocabulary in little memory.
#
# These rules hold everywhere. Logarithms are natural, so losses are in **nats**. A float result keeps the dtype of its float
# input, `float16` and `bfloat16` included (computing in `float32` inside is fine), and `float64` keeps its precision. Every
# float result is **differentiable** in its float inputs. Inputs are never changed in place, and may be slices or
# transposes of other tensors. A wrong argument raises a `ValueError` with a message where the docstring says so. You may use your own functions from above.
#
# A `model` is a function: token ids `(batch, seq)` go in, logits `(batch, seq, vocab)` come out. It is causal: the logits at
# position $t$ depend on the tokens up to $t$.

# %% given
from torch.utils.checkpoint import checkpoint

# %% [markdown] exercise="log_softmax" points=4 minutes=15
# ## The logarithm of the softmax
#
# **Given** `logits` with the vocabulary on the last axis and any number of batch dimensions before it, **return** the
# log-probabilities $\log \mathrm{softmax}(x)$, in the same shape.
#
# $$\log \mathrm{softmax}(x)_i = x_i - \log \sum_j \exp(x_j)$$
#
# The values must be exact for logits of any size: `[0, 200]` gives `[-200, 0]`, not `[-inf, 0]`, and logits of ±10,000 give
# neither `inf` nor NaN. Rows may lie far from each other.
#
# Write the formula yourself; no `log_softmax` of torch is needed.
#
# **Example.** `[0, 0, log 2]` gives probabilities 1/4, 1/4, 1/2, so the result is `[-1.386, -1.386, -0.693]`.

# %% exercise="log_softmax"
def log_softmax(logits):
    ### BEGIN SOLUTION
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    shifted = wide - wide.max(dim=-1, keepdim=True).values
    return (shifted - shifted.exp().sum(dim=-1, keepdim=True).log()).to(logits.dtype)
    ### END SOLUTION

# %% [markdown] hints="log_softmax"
# 1. Adding the same number to all logits of a row does not change the softmax. Which number keeps `exp` from overflowing?
# 2. Subtract each row's largest logit: `logits.amax(dim=-1, keepdim=True)`. Then every exponential is at most 1.
# 3. Never take the logarithm of a single probability: it may be 0. Take it of the row's sum, which is at least 1.
# 4. `shifted - shifted.exp().sum(dim=-1, keepdim=True).log()`.

# %% [markdown] exercise="cross_entropy" points=7 minutes=20
# ## Cross-entropy
#
# **Given** `logits` `(*batch, vocab)` and `targets` `(*batch)` with token ids, **return** the mean of $-\log P(\text{target})$, a
# tensor of shape `()`. There may be no batch dimension at all: logits `(vocab,)` and one target of shape `()`.
#
# - Targets equal to `ignore_index` do not count: neither in the sum nor in the number that divides it. `ignore_index` may be
#   any integer, inside the vocabulary or outside.
# - When no target counts, the loss is 0 and its gradient is 0, not NaN. The result still belongs to the graph, so that
#   `backward()` runs.
# - The loss is exact for logits that are far apart.
#
# **Example.** Probabilities 0.55 and 0.25 at two targets, and a third target that is −100, give
# $-(\log 0.55 + \log 0.25)/2 = 0.992$.

# %% exercise="cross_entropy"
def cross_entropy(logits, targets, ignore_index=-100):
    ### BEGIN SOLUTION
    counted = targets != ignore_index
    ids = torch.where(counted, targets, 0)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nll = -log_softmax(wide).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    total = torch.where(counted, nll, 0).sum()
    return (total / counted.sum().clamp(min=1)).to(logits.dtype)
    ### END SOLUTION

# %% [markdown] hints="cross_entropy"
# 1. Start from your `log_softmax` and pick one number from each row.
# 2. `log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)` picks the targets, for any number of batch dimensions.
# 3. An ignored target may not be an index at all. Replace it by 0 before the look-up, and set its loss to 0 afterwards.
# 4. Divide by `(targets != ignore_index).sum().clamp(min=1)`: with nothing to count, this is 0/1.

# %% [markdown] exercise="shift_for_next_token" points=3 minutes=10
# ## Inputs and targets
#
# **Given** token `ids` `(batch, seq)`, **return** the pair `(inputs, targets)`, each `(batch, seq − 1)`: the target at a position is
# the token that follows the input at this position. The dtype stays.
#
# **Example.** `[[7, 8, 9]]` gives `[[7, 8]]` and `[[8, 9]]`. A text of one token has no pair: both results have shape
# `(batch, 0)`.

# %% exercise="shift_for_next_token"
def shift_for_next_token(ids):
    ### BEGIN SOLUTION
    return ids[:, :-1], ids[:, 1:]
    ### END SOLUTION

# %% [markdown] hints="shift_for_next_token"
# 1. Which token of a text is never an input? Which is never a target?
# 2. Two slices along the second axis: `ids[:, :-1]` and `ids[:, 1:]`.

# %% [markdown] exercise="next_token_loss" points=6 minutes=15
# ## The training loss of a language model
#
# **Given** `logits` `(batch, seq, vocab)`, the model's answer to `ids` `(batch, seq)`, **return** the mean loss of predicting each
# token from those before it, in nats, a tensor of shape `()`. Neither argument is shifted: the shift happens here. The logits
# at position $t$ are scored against the token at $t + 1$; the last logits have no target, the first token is no target.
#
# - Targets equal to `pad_id` do not count. `pad_id` is a token id of the vocabulary, and 0 is allowed; `None` means that
#   there is no padding.
# - What decides is the target: a real token that follows padding counts.
# - The mean is over all targets of the batch that count, not row by row.
# - When no target is left (texts of one token, or all targets padded), the loss is 0.
#
# **Example.** `ids = [[5, 2, 0]]` with `pad_id=0` leaves one target, the 2: the loss is
# $-\log \mathrm{softmax}(\text{logits}[0, 0])[2]$.

# %% exercise="next_token_loss"
def next_token_loss(logits, ids, pad_id=None):
    ### BEGIN SOLUTION
    _, targets = shift_for_next_token(ids)
    if pad_id is not None:
        targets = targets.masked_fill(targets == pad_id, -100)
    return cross_entropy(logits[:, :-1], targets)
    ### END SOLUTION

# %% [markdown] hints="next_token_loss"
# 1. Line them up: which logits speak of `ids[:, 1]`?
# 2. `logits[:, :-1]` and `ids[:, 1:]` fit together.
# 3. Turn padded targets into −100 (in a copy) and leave the rest to your `cross_entropy`.
# 4. `if pad_id:` is false for 0. Ask `pad_id is not None`.

# %% [markdown] exercise="sequence_log_prob" points=5 minutes=15
# ## The probability of a text
#
# **Given** `logits` `(batch, seq, vocab)`, the model's answer to `ids` `(batch, seq)`, **return** for each row
#
# $$\log P(x_2, \ldots, x_n \mid x_1) = \sum_{t=2}^{n} \log P(x_t \mid x_1, \ldots, x_{t-1}),$$
#
# a tensor `(batch,)`. The first token is given and not scored; the last logits have nothing to score. A row of one token has
# log-probability 0. Texts may be so long that the probability itself is 0 in `float32`; its logarithm is not.
#
# **Example.** Conditional probabilities 1/2 and 1/4 for the second and third token give $\log (1/8) = -2.079$.

# %% exercise="sequence_log_prob"
def sequence_log_prob(logits, ids):
    ### BEGIN SOLUTION
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_probs = log_softmax(wide[:, :-1])
    picked = log_probs.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return picked.sum(dim=-1).to(logits.dtype)
    ### END SOLUTION

# %% [markdown] hints="sequence_log_prob"
# 1. The chain rule is a product; its logarithm is a sum.
# 2. The shift is the one of the training loss: logits without the last position, ids without the first.
# 3. Pick the targets with `gather` and sum over the positions only: each row is a text of its own.

# %% [markdown] exercise="perplexity" points=5 minutes=10
# ## Perplexity
#
# A data set was evaluated in batches of unequal size. **Given** `nll_sums` `(batches,)`, the summed loss of each batch in nats,
# and `token_counts` `(batches,)`, the number of tokens of each batch, **return** the perplexity of the whole set, a tensor of
# shape `()` in the dtype of `nll_sums`:
#
# $$\exp\left(\frac{\text{all nats}}{\text{all tokens}}\right)$$
#
# A batch may be empty, with sum 0 and count 0; it changes nothing. At least one batch has a token.
#
# **Example.** Sums `[1, 12]` and counts `[1, 3]` give $\exp(13/4) = 25.8$.

# %% exercise="perplexity"
def perplexity(nll_sums, token_counts):
    ### BEGIN SOLUTION
    wide = nll_sums.to(torch.promote_types(nll_sums.dtype, torch.float32))
    return (wide.sum() / token_counts.sum()).exp().to(nll_sums.dtype)
    ### END SOLUTION

# %% [markdown] hints="perplexity"
# 1. Every token should weigh the same, whichever batch it came in.
# 2. Sum the nats, sum the tokens, divide once, exponentiate once.

# %% [markdown] exercise="bits_per_byte" points=4 minutes=10
# ## Bits per byte
#
# **Given** `nll_sum`, the loss of a whole text in nats (a tensor of shape `()`), and the `text`, **return** the number of bits that
# the model needs per byte, also of shape `()`. A bit is $\ln 2$ nats. The bytes are those of the text in UTF-8, spaces and line ends among
# them: `"β"` has two, `"→"` three. An empty text raises a `ValueError` with a message.
#
# **Example.** $8 \ln 2$ nats for `"aorta"` are 8 bits over 5 bytes, 1.6. The same nats for `"β-cell"` are 8 bits over 7 bytes.

# %% exercise="bits_per_byte"
def bits_per_byte(nll_sum, text):
    ### BEGIN SOLUTION
    if not text:
        raise ValueError("bits_per_byte needs a text, got an empty one")
    return nll_sum / math.log(2) / len(text.encode("utf-8"))
    ### END SOLUTION

# %% [markdown] hints="bits_per_byte"
# 1. `len(text)` counts characters. Which method of a string gives its bytes?
# 2. `len(text.encode("utf-8"))`; and nats become bits when divided by `math.log(2)`.
# 3. An empty text is one without a character. A text that is one space has a byte.

# %% [markdown] exercise="cross_entropy_gradient" points=5 minutes=15
# ## The gradient of the loss
#
# **Given** `logits` `(n, vocab)` and `targets` `(n,)`, **return** the gradient of the mean cross-entropy in the logits, `(n, vocab)`:
#
# $$\frac{\mathrm{softmax}(x) - \mathrm{onehot}(\text{target})}{n}$$
#
# It works without autograd, also under `torch.no_grad()`. Outside of it, the result is itself **differentiable** in the
# logits, so it may not be detached from them. Logits may be as large as ±10,000.
#
# **Example.** Logits `[[0, 0, log 2], [0, 0, 0]]` and targets `[2, 0]` give
# `[[0.125, 0.125, -0.25], [-0.333, 0.167, 0.167]]`. Each row sums to 0.

# %% exercise="cross_entropy_gradient"
def cross_entropy_gradient(logits, targets):
    ### BEGIN SOLUTION
    one_hot = F.one_hot(targets, logits.shape[-1]).to(logits.dtype)
    return (torch.softmax(logits, dim=-1) - one_hot) / len(targets)
    ### END SOLUTION

# %% [markdown] hints="cross_entropy_gradient"
# 1. `torch.softmax` is stable and differentiable; start there.
# 2. `F.one_hot(targets, vocab)` has a 1 at each target. It is an integer tensor: convert it.
# 3. `probs[rows, targets] -= 1` changes the softmax in place, and autograd needs the softmax for the second derivative.
#    Subtract a one-hot tensor instead.
# 4. The loss is a mean over `n` rows: divide by `len(targets)`.

# %% [markdown] exercise="free_running_predictions" points=6 minutes=20
# ## Teacher forcing and free running
#
# Two functions. Both return a tensor `(batch, seq)` of token ids whose entry at $t$ is the model's prediction (the arg-max of
# its logits) after the inputs up to $t$.
#
# - `teacher_forced_predictions(model, ids)`: every input is the true token.
# - `free_running_predictions(model, ids, prompt_length)`: the inputs are the first `prompt_length` true tokens, then the
#   model's own predictions. The input at position `prompt_length` is the prediction made at `prompt_length − 1`, and so on.
#   `prompt_length` is from 1 to `seq`.
#
# Ties go to the lower token id, as `argmax` does. A prediction is made from **everything** read so far, not from the last
# token alone.
#
# **Example.** A model that predicts "last input + 1" reads `[[3, 5, 9]]`. Teacher forcing gives `[[4, 6, 10]]`. Free running with
# a prompt of one token reads 3, then 4, then 5, and gives `[[4, 5, 6]]`.

# %% exercise="free_running_predictions"
def free_running_predictions(model, ids, prompt_length):
    ### BEGIN SOLUTION
    inputs = ids[:, :prompt_length]
    predictions = model(inputs).argmax(dim=-1)
    for _ in range(prompt_length, ids.shape[1]):
        inputs = torch.cat([inputs, predictions[:, -1:]], dim=1)
        predictions = torch.cat([predictions, model(inputs)[:, -1:].argmax(dim=-1)], dim=1)
    return predictions
    ### END SOLUTION


def teacher_forced_predictions(model, ids):
    ### BEGIN SOLUTION
    return model(ids).argmax(dim=-1)
    ### END SOLUTION

# %% [markdown] hints="free_running_predictions"
# 1. Teacher forcing is one call of the model: it answers at all positions at once.
# 2. For free running keep two tensors: what has been read, and what has been predicted.
# 3. Read the prompt with one call; its predictions are entries 0 to `prompt_length − 1`.
# 4. Then repeat: append the last prediction to what has been read, call the model, append its arg-max at the last position
#    to the predictions, until there are `seq` of them.

# %% [markdown] exercise="sliding_window_nll" points=5 minutes=20
# ## A text longer than the window
#
# A model reads at most `window` tokens. **Given** the `model`, the `ids` `(1, n)` of a text, `window` and `stride`, **return**
# `(nll, n − 1)`: the summed loss in nats (a tensor of shape `()`), and the number of tokens it is about. Every token but the first is scored exactly once.
#
# - Windows of `window` tokens start at 0, `stride`, `2 · stride`, …; the last starts at `max(0, n − window)`, so that it is full
#   whenever the text is long enough.
# - A window goes to the model by itself. Its targets are its tokens but its first.
# - It scores those targets that no earlier window has scored; the other tokens are context.
# - Unless `stride < window`, raise a `ValueError` with a message. (`stride` is at least 1.)
#
# **Example.** `n = 9`, `window=4`, `stride=2`. The windows start at 0, 2, 4 and 5. The first scores tokens 1, 2, 3; the second
# 4 and 5; the third 6 and 7; the last 8. That is 8 tokens.

# %% exercise="sliding_window_nll"
def sliding_window_nll(model, ids, window, stride):
    ### BEGIN SOLUTION
    if not stride < window:
        raise ValueError(f"sliding_window_nll needs stride < window, got window={window}, stride={stride}")
    n = ids.shape[1]
    last = max(0, n - window)
    total = torch.zeros(())
    scored = 1
    for start in [*range(0, last, stride), last]:
        part = ids[:, start : start + window]
        log_probs = log_softmax(model(part)[0, :-1])
        nll = -log_probs.gather(-1, part[0, 1:].unsqueeze(-1)).squeeze(-1)
        total = total + nll[scored - start - 1 :].sum()
        scored = start + part.shape[1]
    return total, n - 1
    ### END SOLUTION

# %% [markdown] hints="sliding_window_nll"
# 1. First list the starts: `range(0, last, stride)` and then `last`, with `last = max(0, n - window)`.
# 2. Remember up to which token everything is scored. At the beginning that is token 0, which is given.
# 3. In a window that starts at $s$, the logits at position $i$ score token $s + i + 1$.
# 4. With `scored` tokens done, skip the first `scored − s − 1` losses of the window.

# %% [markdown] exercise="chunked_cross_entropy" points=8 minutes=30
# ## The loss of a big vocabulary
#
# **Given** the last hidden states `hidden` `(n, d_hidden)`, the output projection `w_vocab` `(d_hidden, vocab)` and `targets`
# `(n,)`, **return** the mean cross-entropy of the logits `hidden @ w_vocab`, a tensor of shape `()`, without holding the
# logits of all rows at once.
#
# - Work on `chunk` rows at a time. `chunk` need not divide `n` and may be larger than `n`: then there is one chunk of `n` rows.
# - The result equals the full loss, the one of all rows at once: add the sums of the chunks and divide once by `n`.
# - The gradients in `hidden` and in `w_vocab` equal those of the full loss.
# - With `chunk` below `n` no tensor of `n · vocab` elements is made, and the chunks' logits are not kept for backward either:
#   together they would be the same `n · vocab` numbers. Each chunk is computed again in backward.
#
# `checkpoint(f, *args, use_reentrant=False)`, imported above, returns `f(*args)` but keeps only `args`, and calls `f` again in
# backward. A `torch.autograd.Function` of your own does as well.
#
# **Example.** `n = 5` rows and `chunk=2` are chunks of 2, 2 and 1 rows.

# %% exercise="chunked_cross_entropy"
def chunked_cross_entropy(hidden, w_vocab, targets, chunk):
    ### BEGIN SOLUTION
    def summed_loss(h, w, t):
        logits = h @ w
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, t, reduction="sum")

    total = torch.zeros((), device=hidden.device)
    for start in range(0, len(targets), chunk):
        rows = slice(start, start + chunk)
        total = total + checkpoint(summed_loss, hidden[rows], w_vocab, targets[rows], use_reentrant=False)
    return (total / len(targets)).to(hidden.dtype)
    ### END SOLUTION

# %% [markdown] hints="chunked_cross_entropy"
# 1. Write the plain loop first: for each chunk of rows, logits, then the **sum** of the losses; at the end divide by `n`.
# 2. The plain loop gives the right numbers, but autograd keeps each chunk's logits. Put a chunk's computation into a function
#    of its own.
# 3. Call this function through `checkpoint(..., use_reentrant=False)`, with `hidden[rows]`, `w_vocab` and `targets[rows]` as
#    its arguments.
# 4. The last chunk may be shorter: slices take care of that by themselves.
