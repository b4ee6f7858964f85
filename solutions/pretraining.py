# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Pretraining: exercises
#
# You build everything between a pile of text and a trained model: a tokenizer, rows of tokens, the learning rate, AdamW,
# clipping, gradient accumulation, the loop itself, and checkpoints. Then you count what training costs, and fit the laws that say how
# to spend a budget.
#
# Token ids are int64 tensors. A loss is in nats. In the shapes, `*shape` stands for any shape. Functions change their arguments in place only
# where the task says so. Where a task says that something is refused, raise a `ValueError` with a message.

# %% given
import os

from torch import nn

# %% [markdown] exercise="train_bpe" points=8 minutes=20
# ## Learning byte pairs
#
# **Given** `word_counts`, a dictionary from words to how often each occurs, and a number of `merges`, **return** the merges that byte-pair
# encoding learns: a list of pairs `(left, right)` of `bytes`, in the order in which they were learned.
#
# **Rule.**
#
# - A word starts as the single bytes of its UTF-8 form: `"é"` is `[b"\xc3", b"\xa9"]`.
# - Count all pairs of neighbouring tokens inside words, each as often as its word occurs (twice if it stands there twice). A pair never
#   crosses from one word into another.
# - The most frequent pair is learned. Of equally frequent ones, take the pair that sorts first, as Python compares tuples of bytes.
# - Join it in all words, from left to right and without overlap: with the pair (a, a), `aaa` becomes `aa`, `a`. Then count again.
# - Stop after `merges` merges, or earlier when no pair is left.
# - `merges` below 0 is a `ValueError`.
#
# **Example.** `train_bpe({"low": 5, "lower": 2, "newest": 6, "widest": 3}, 3)` is
# `[(b"e", b"s"), (b"es", b"t"), (b"l", b"o")]`. The pair (e, s) occurs $6 + 3 = 9$ times, as do (s, t) and, after the first merge,
# (es, t); the pair that sorts first wins.


# %% exercise="train_bpe"
def train_bpe(word_counts, merges):
    ### BEGIN SOLUTION
    if merges < 0:
        raise ValueError(f"train_bpe needs merges >= 0, got merges={merges}")
    words = {word: [bytes([byte]) for byte in word.encode()] for word in word_counts}
    learned = []
    for _ in range(merges):
        pairs = {}
        for word, tokens in words.items():
            for i in range(len(tokens) - 1):
                pair = (tokens[i], tokens[i + 1])
                pairs[pair] = pairs.get(pair, 0) + word_counts[word]
        if not pairs:
            break
        most = max(pairs.values())
        left, right = min(pair for pair, count in pairs.items() if count == most)
        learned.append((left, right))
        for word, tokens in words.items():
            joined = []
            for token in tokens:
                if token == right and joined and joined[-1] == left:
                    # a token that was joined just now equals left only if right were empty, which it never is
                    joined[-1] = left + right
                else:
                    joined.append(token)
            words[word] = joined
    return learned
    ### END SOLUTION


# %% [markdown] hints="train_bpe"
# 1. Keep for every word its current list of tokens and its count. A merge changes the lists, the counts stay.
# 2. `bytes([b])` makes one byte from a number, and iterating over `word.encode()` gives the numbers.
# 3. `min(pairs, key=lambda pair: (-pairs[pair], pair))` is the most frequent pair, the first in order among equals.
# 4. To join a pair, walk through the tokens with an index: if this token and the next are the pair, append their sum and go on by two, else append the token and go on by one.

# %% [markdown] exercise="bpe_encode" points=6 minutes=10
# ## Applying byte pairs
#
# **Given** a `word` (a string) and the list of `merges` from the exercise before, **return** the word's tokens, a list of `bytes`.
#
# **Rule.** Start from the single bytes of the word's UTF-8 form. Apply the merges one after the other, in the order in which they were learned: each
# joins every occurrence of its pair, from left to right and without overlap. A merge that finds nothing changes nothing.
#
# **Example.** With the merges `[(b"b", b"c"), (b"a", b"b")]` the word `"abc"` becomes `[b"a", b"bc"]`: the merge of b and c comes first, and then
# there is no b left beside the a.


# %% exercise="bpe_encode"
def bpe_encode(word, merges):
    ### BEGIN SOLUTION
    tokens = [bytes([byte]) for byte in word.encode()]
    for left, right in merges:
        i = 0
        while i < len(tokens) - 1:
            if tokens[i] == left and tokens[i + 1] == right:
                tokens[i : i + 2] = [left + right]
            i += 1
    return tokens
    ### END SOLUTION


# %% [markdown] hints="bpe_encode"
# 1. Two loops: over the merges, and inside over the word's tokens.
# 2. The inner loop is the same as in training: walk with an index, join where this token and the next are the pair.
# 3. `tokens[i:i + 2] = [tokens[i] + tokens[i + 1]]` joins two tokens of a list at place i.

# %% [markdown] exercise="pack" points=6 minutes=15
# ## Packing documents into rows
#
# **Given** `documents`, a list of lists of token ids, the id `eos_id` of the end of text, and the length of a row, `block`, **return** three int64 tensors
# of shape `(rows, block)`: inputs, targets, and document ids.
#
# **Rule.**
#
# - Join the documents into one stream, in their order, with `eos_id` after each of them, the last and empty ones too.
# - Cut the stream into rows that start at 0, `block`, `2 * block`, … Each token of a row is an input; its target is the next token *of the
#   stream*. So a row needs `block + 1` tokens, and the last target of a row is the first input of the next. Targets cross documents.
# - A tail of fewer than `block + 1` tokens is dropped. There may be no row at all: the shape is then `(0, block)`.
# - The document id of an input is the index in `documents` of the document it comes from. The end of text belongs to the document that it ends.
#   A document may hold `eos_id` itself, so count documents and not ends of text.
# - `block` below 1 is a `ValueError`.
#
# **Example.** `pack([[5, 6], [7], [8, 9]], 0, 3)`: the stream is 5 6 0 7 0 8 9 0. The inputs are `[[5, 6, 0], [7, 0, 8]]`, the targets
# `[[6, 0, 7], [0, 8, 9]]`, the document ids `[[0, 0, 0], [1, 1, 2]]`.


# %% exercise="pack"
def pack(documents, eos_id, block):
    ### BEGIN SOLUTION
    if block < 1:
        raise ValueError(f"pack needs block >= 1, got block={block}")
    stream, owners = [], []
    for i, document in enumerate(documents):
        stream += [*document, eos_id]
        owners += [i] * (len(document) + 1)
    stream = torch.tensor(stream, dtype=torch.int64)
    owners = torch.tensor(owners, dtype=torch.int64)
    used = max(len(stream) - 1, 0) // block * block
    return (
        stream[:used].view(-1, block),
        stream[1 : used + 1].view(-1, block),
        owners[:used].view(-1, block),
    )
    ### END SOLUTION


# %% [markdown] hints="pack"
# 1. Make two flat lists first: the stream, and the index of the document of each of its tokens.
# 2. How many rows are there? Each input needs a token after it, so all but the last token can be inputs: `(length - 1) // block`.
# 3. With n rows, the inputs are `stream[: n * block]` and the targets `stream[1 : n * block + 1]`, both reshaped to `(n, block)`. Mind the empty stream.

# %% [markdown] exercise="random_batch" points=6 minutes=10
# ## Random rows
#
# **Given** a stream of `tokens`, shape `(n,)`, the row length `block`, the number of rows `batch`, and a `generator`, **return** `(inputs, targets)`, both
# `(batch, block)` with the dtype of the tokens.
#
# **Rule.**
#
# - Each row is `block` consecutive tokens of the stream; its targets are the tokens one place further.
# - Every row's start is drawn independently and with replacement, and every start that leaves room for the last target is equally likely. There are `n - block`
#   of them.
# - All randomness comes from `generator` (a `torch.Generator`): the same state gives the same rows, and every call moves it on.
# - Fewer than `block + 1` tokens are a `ValueError`.
#
# **Example.** For the tokens 10, 20, 30, 40 and block 2 the starts 0 and 1 are possible. Start 1 gives the input row `[20, 30]` and the target row `[30, 40]`.


# %% exercise="random_batch"
def random_batch(tokens, block, batch, generator):
    ### BEGIN SOLUTION
    if len(tokens) <= block:
        raise ValueError(f"random_batch needs more than block={block} tokens, got {len(tokens)}")
    starts = torch.randint(0, len(tokens) - block, (batch,), generator=generator).tolist()
    inputs = torch.stack([tokens[i : i + block] for i in starts])
    targets = torch.stack([tokens[i + 1 : i + block + 1] for i in starts])
    return inputs, targets
    ### END SOLUTION


# %% [markdown] hints="random_batch"
# 1. `torch.randint(high, (batch,), generator=generator)` draws from 0 to `high - 1`. What is the last start that still has a target for its last token?
# 2. With block tokens and one more for the last target, the starts are 0 to `n - block - 1`, so `high` is `n - block`.
# 3. Cut `tokens[i : i + block + 1]` for each start and `torch.stack` them: all columns but the last are the inputs, all but the first the targets.

# %% [markdown] exercise="learning_rate" points=6 minutes=10
# ## The learning rate
#
# **Given** a `step` that counts from 0, the `peak` rate, the number of `warmup` steps, the `total` number of steps and a `floor`, **return** the learning rate
# of the step, a float.
#
# **Rule.**
#
# - Before `warmup`, a straight line: `peak * (step + 1) / warmup`.
# - From `warmup` to `total`, half a cosine from `peak` to `floor`, where $x$ runs from 0 at step `warmup` to 1 at step `total`:
#
#   $$\text{floor} + (\text{peak} - \text{floor})\,\frac{1 + \cos(\pi x)}{2}$$
#
# - From `total` on, `floor`. If `total` is `warmup`, there is no cosine.
# - So steps `warmup - 1` and `warmup` both have the peak. `warmup` may be 0: then step 0 has the peak.
# - A negative `step` or `warmup` is a `ValueError`.
#
# **Example.** With peak 1, warmup 4, total 12 and floor 0.2, the steps 0, 3, 4, 8 and 12 have the rates 0.25, 1, 1, 0.6 and 0.2.


# %% exercise="learning_rate"
def learning_rate(step, peak, warmup, total, floor):
    ### BEGIN SOLUTION
    if step < 0 or warmup < 0:
        raise ValueError(f"learning_rate needs step, warmup >= 0, got step={step}, warmup={warmup}")
    if step < warmup:
        return peak * (step + 1) / warmup
    if step >= total:
        return floor
    x = (step - warmup) / (total - warmup)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * x))
    ### END SOLUTION


# %% [markdown] hints="learning_rate"
# 1. Three cases, in this order: before warmup, from total on, and in between.
# 2. The cosine spans `total - warmup` steps: `x = (step - warmup) / (total - warmup)`.
# 3. At x = 0 the cosine is 1 and the rate is the peak; at x = 1 it is −1 and the rate is the floor. Check your formula at both ends.

# %% [markdown] exercise="adamw_step" points=8 minutes=15
# ## One step of AdamW
#
# **Given** a parameter `param`, its gradient `grad`, the running means `m` and `v`, the number of this `step` (counted from 1), `lr`, `betas`, `eps` and
# `weight_decay`, **return** the new `(param, m, v)`, in the dtype of the arguments, which stay unchanged.
#
# **Rule**, as in `torch.optim.AdamW`. With $\theta$ for `param`, $g$ for `grad`, $s$ for `step`, $\eta$ for `lr`, $(\beta_1, \beta_2)$ for `betas`, $\epsilon$ for `eps` and $\lambda$ for
# `weight_decay`:
#
# $$\begin{aligned}
# m &\leftarrow \beta_1 m + (1 - \beta_1)\, g \\
# v &\leftarrow \beta_2 v + (1 - \beta_2)\, g^2 \\
# \theta &\leftarrow (1 - \eta \lambda)\, \theta - \eta\, \frac{m / (1 - \beta_1^s)}{\sqrt{v / (1 - \beta_2^s)} + \epsilon}
# \end{aligned}$$
#
# - Both means started at 0 and are too small at first; the divisions correct that. What is returned are $m$ and $v$ themselves.
# - A `step` below 1 is a `ValueError`.
#
# **Example.** In step 1, with `m` and `v` 0, `weight_decay` 0 and `eps` 0, every entry moves by exactly `lr` against the sign of its gradient: param 1, grad 2, lr 0.1 gives
# 0.9; with betas (0.9, 0.99), m is 0.2 and v is 0.04.


# %% exercise="adamw_step"
def adamw_step(param, grad, m, v, step, lr, betas, eps, weight_decay):
    ### BEGIN SOLUTION
    if step < 1:
        raise ValueError(f"adamw_step needs step >= 1, got step={step}")
    b1, b2 = betas
    m_new = b1 * m.double() + (1 - b1) * grad.double()
    v_new = b2 * v.double() + (1 - b2) * grad.double() ** 2
    update = (m_new / (1 - b1**step)) / ((v_new / (1 - b2**step)).sqrt() + eps)
    new = param.double() * (1 - lr * weight_decay) - lr * update
    return new.to(param.dtype), m_new.to(m.dtype), v_new.to(v.dtype)
    ### END SOLUTION


# %% [markdown] hints="adamw_step"
# 1. Write the four formulas one below the other. Write `m = ...`, not `m *= ...`: the arguments stay as they are.
# 2. The decay acts on the old parameter and does not enter the gradient: that is the W in AdamW.
# 3. In float16 a small number times grad² can vanish. Computing in float32 and converting at the end (`.to(param.dtype)`) is safe.

# %% [markdown] exercise="clip_gradients" points=4 minutes=10
# ## Clipping gradients
#
# **Given** `grads`, a list of gradients of any shapes, and `max_norm`, **return** `(clipped, norm)`: a list of new gradients, and the common norm *before*
# clipping (a 0-d tensor or a number).
#
# **Rule.** The common norm is the root of the sum of the squares of all entries of all tensors. If it is above `max_norm`, every gradient is multiplied by the same factor
# `max_norm / norm`; otherwise all stay as they are. (torch adds $10^{-6}$ to the norm before it divides; you may, too.) Gradients that are all 0 stay 0. `max_norm` not above 0 is a
# `ValueError`. Each gradient keeps its dtype.
#
# **Example.** `clip_gradients([tensor([3.]), tensor([[4.]])], 1.0)` has the norm 5 and gives `[tensor([0.6]), tensor([[0.8]])]`.


# %% exercise="clip_gradients"
def clip_gradients(grads, max_norm):
    ### BEGIN SOLUTION
    if not max_norm > 0:
        raise ValueError(f"clip_gradients needs max_norm > 0, got max_norm={max_norm}")
    norm = torch.sqrt(sum(grad.double().square().sum() for grad in grads))
    scale = 1.0 if norm <= max_norm else max_norm / norm
    return [(grad.double() * scale).to(grad.dtype) for grad in grads], norm
    ### END SOLUTION


# %% [markdown] hints="clip_gradients"
# 1. Add up the squares of all entries of all tensors, and take one root at the end.
# 2. One factor for all: `min(1, max_norm / norm)`. It keeps the direction of the step.
# 3. Avoid a division by 0 when all gradients are 0: compare first, divide only if the norm is above max_norm.

# %% [markdown] exercise="accumulate_gradients" points=7 minutes=15
# ## Gradient accumulation
#
# **Given** a `model` (token ids `(batch, seq)` to logits `(batch, seq, vocab)`) and `microbatches`, a list of pairs `(inputs, targets)` whose shapes differ
# from pair to pair, leave in the `.grad` of the model's parameters the gradient of the mean loss per token over *all* microbatches together, and **return** that mean loss, a 0-d
# tensor that is detached.
#
# **Rule.**
#
# - The loss of a token is the cross-entropy, minus the logarithm of its probability. Targets of `-100` do not count, neither in the sum nor in the number that divides it. A microbatch may be
#   without any target that counts; all together have at least one.
# - Gradients that are there from before are cleared first.
# - Run each microbatch forward and backward by itself, so that only one is in memory. The weights do not change.
#
# **Example.** One microbatch has 1 target that counts, with loss 2, the other has 3 with losses 1, 1, 1. The mean loss is $5/4$, not $(2 + 1)/2$.


# %% exercise="accumulate_gradients"
def accumulate_gradients(model, microbatches):
    ### BEGIN SOLUTION
    for parameter in model.parameters():
        parameter.grad = None
    count = sum(int((targets != -100).sum()) for _, targets in microbatches)
    mean = torch.zeros(())
    for inputs, targets in microbatches:
        logits = model(inputs)
        loss = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-100, reduction="sum"
        )
        loss = loss / count
        loss.backward()
        mean = mean + loss.detach()
    return mean
    ### END SOLUTION


# %% [markdown] hints="accumulate_gradients"
# 1. `backward()` adds to `.grad`. So the sum over microbatches comes by itself; what you must get right is the divisor.
# 2. Count the targets of all microbatches first. Then call `backward()` on each microbatch's *sum* of losses divided by that count.
# 3. `F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")` is a microbatch's sum; `model.zero_grad()` clears the old gradients.

# %% [markdown] exercise="pretrain" points=8 minutes=20
# ## The training loop
#
# **Given** a `model` (token ids to logits, as above), a stream of `tokens`, the number of `steps`, `batch` and `block` of each batch, `peak_lr`, `warmup` and a `generator`, train the
# model in place and **return** a list of floats: the training loss of each step, in nats per token, measured before that step's update.
#
# **Rule.** In each step
#
# 1. draw a batch with `random_batch`, with the given generator and no other source of randomness;
# 2. compute the mean loss and its gradient, with none left over from the step before;
# 3. clip the gradients to a common norm of 1;
# 4. set the learning rate to `learning_rate(step, peak_lr, warmup, steps, peak_lr / 10)`, with step counted from 0;
# 5. make one step of `torch.optim.AdamW`, with betas (0.9, 0.95) and weight decay 0.1.
#
# Your functions from above are at hand. Where a number above is not to your taste you may change it, as long as
#
# - the first loss is that of the untrained model (near $\ln \text{vocab}$),
# - the first update moves the weights by about `peak_lr / warmup`,
# - the target is reached: on a stream of 6,000 tokens in which each token has three possible successors, depending on the two tokens before it, with chances 0.7, 0.2 and 0.1, a small
#   model of 16 tokens comes to **1.35 nats or less** on new text in 120 steps of 16 rows of 32 tokens (`peak_lr` 0.02, `warmup` 12). Guessing has $\ln 16 = 2.77$, the best possible is 0.80. The
#   loop above reaches 1.16 on average over ten seeds, 1.24 at worst.
#
# **Example.** `pretrain(model, tokens, 100, 8, 64, 3e-3, 10, generator)` returns 100 floats.


# %% exercise="pretrain"
def pretrain(model, tokens, steps, batch, block, peak_lr, warmup, generator):
    ### BEGIN SOLUTION
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(steps):
        inputs, targets = random_batch(tokens, block, batch, generator)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, peak_lr, warmup, steps, peak_lr / 10)
        optimizer.step()
        losses.append(loss.item())
    return losses
    ### END SOLUTION


# %% [markdown] hints="pretrain"
# 1. Make the optimizer once, before the loop: its state must live as long as the run.
# 2. The order in a step: batch, loss, `optimizer.zero_grad()`, `loss.backward()`, clip, set the rate, `optimizer.step()`.
# 3. The rate of a torch optimizer is set with `for group in optimizer.param_groups: group["lr"] = rate`.
# 4. `accumulate_gradients(model, [(inputs, targets)])` does the loss and the gradient at once; `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)` clips in place.

# %% [markdown] exercise="save_checkpoint" points=7 minutes=20
# ## Checkpoints
#
# Write two functions. `save_checkpoint(path, model, optimizer, step, generator)` writes a file; `load_checkpoint(path, model, optimizer, generator)` reads it, puts the state of
# all three objects back *in place*, and **returns** the step.
#
# **Rule.**
#
# - A run that is loaded goes on with the very same numbers as one that was never stopped. So besides the weights (and buffers, if the model has some)
#   keep the state of the optimizer (its means, its step, its settings) and that of the generator.
# - `path` is a string or a `pathlib.Path`. `step` is an int.
# - A file that exists is replaced. A crash while saving, at any moment, leaves the old file whole: write the new one beside it under another name, and give it the right name with
#   `os.replace` when it is complete. If writing fails, the error is raised.
# - Saving changes nothing of the run.
#
# **Example.** After 3 steps and `save_checkpoint("run.pt", model, optimizer, 3, generator)`, a new process builds the same kinds of model, optimizer and generator,
# calls `load_checkpoint("run.pt", model, optimizer, generator)`, gets 3, and its next steps have the losses of steps 4, 5, … of the first run.


# %% exercise="save_checkpoint"
def save_checkpoint(path, model, optimizer, step, generator):
    ### BEGIN SOLUTION
    temporary = str(path) + ".new"
    everything = {
        "weights": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "generator": generator.get_state(),
        "step": step,
    }
    torch.save(everything, temporary)
    os.replace(temporary, path)
    ### END SOLUTION


def load_checkpoint(path, model, optimizer, generator):
    ### BEGIN SOLUTION
    everything = torch.load(path, weights_only=True)
    model.load_state_dict(everything["weights"])
    optimizer.load_state_dict(everything["optimizer"])
    generator.set_state(everything["generator"])
    return everything["step"]
    ### END SOLUTION


# %% [markdown] hints="save_checkpoint"
# 1. Models and optimizers have `state_dict()` and `load_state_dict(...)`, generators have `get_state()` and `set_state(...)`. Put all of it into one dictionary, with the step.
# 2. `torch.save(dictionary, file)` writes it, `torch.load(file, weights_only=True)` reads it.
# 3. Save under `str(path) + ".part"` and rename with `os.replace(str(path) + ".part", path)`. Whatever happens before the last line, the old file is still there.

# %% [markdown] exercise="parameter_count" points=5 minutes=10
# ## Counting parameters and FLOPs
#
# Write two functions.
#
# `parameter_count(layers, d_hidden, d_ff, vocab, tied=True)` **returns** the number of weights of a decoder, an int. Each layer has four attention matrices of
# shape `(d_hidden, d_hidden)` (queries, keys, values, output) and two feed-forward matrices (`(d_hidden, d_ff)` and back). The embedding is `(vocab, d_hidden)`; the output matrix is the same
# tensor if `tied`, and one more of that size if not. Biases, norms and positions do not count.
#
# `training_flops(parameters, tokens)` **returns** what training costs: 6 FLOPs per parameter and token (2 in the forward pass, a multiplication and an addition, and twice
# that in the backward pass). Whole numbers in give a whole number.
#
# **Example.** `parameter_count(1, 2, 3, 5)` is $1 \cdot (4 \cdot 2^2 + 2 \cdot 2 \cdot 3) + 5 \cdot 2 = 38$, and with `tied=False` 48. `training_flops(38, 100)` is 22800.


# %% exercise="parameter_count"
def parameter_count(layers, d_hidden, d_ff, vocab, tied=True):
    ### BEGIN SOLUTION
    attention = 4 * d_hidden * d_hidden
    feed_forward = 2 * d_hidden * d_ff
    embeddings = vocab * d_hidden if tied else 2 * vocab * d_hidden
    return layers * (attention + feed_forward) + embeddings
    ### END SOLUTION


def training_flops(parameters, tokens):
    ### BEGIN SOLUTION
    return 6 * parameters * tokens
    ### END SOLUTION


# %% [markdown] hints="parameter_count"
# 1. Count one layer first, multiply by `layers`, and add the embeddings at the end.
# 2. One layer: `4 * d_hidden**2 + 2 * d_hidden * d_ff`. Do not assume `d_ff = 4 * d_hidden`.

# %% [markdown] exercise="fit_power_law" points=6 minutes=15
# ## Fitting a power law
#
# **Given** `x` (parameters, tokens or FLOPs) and `loss`, two tensors of shape `(n,)`, **return** `(alpha, c)` of the law $L = (c / x)^\alpha$ (two numbers or 0-d tensors).
#
# **Rule.** Take logarithms: $\log L = \alpha \log c - \alpha \log x$ is a straight line in $\log x$. Fit it by ordinary least squares of $\log L$ on $\log x$, over all points, and read $\alpha$ and $c$ off its
# slope and intercept. Fewer than two points, or a value that is not above 0, are a `ValueError`.
#
# **Example.** The points (1, 4), (4, 2), (16, 1) lie on $L = (16 / x)^{0.5}$: `alpha` is 0.5 and `c` is 16.


# %% exercise="fit_power_law"
def fit_power_law(x, loss):
    ### BEGIN SOLUTION
    if len(x) < 2 or (x <= 0).any() or (loss <= 0).any():
        raise ValueError("fit_power_law needs at least two points, all above 0")
    columns = torch.stack([torch.ones_like(x.double()), x.double().log()], dim=1)
    intercept, slope = torch.linalg.lstsq(columns, loss.double().log().unsqueeze(1)).solution.flatten()
    return -slope, torch.exp(intercept / -slope)
    ### END SOLUTION


# %% [markdown] hints="fit_power_law"
# 1. With `a = x.log()` and `b = loss.log()`, and `da` and `db` for each of them minus its mean, the slope is `(da * db).sum() / (da * da).sum()` and the intercept `b.mean() - slope * a.mean()`.
# 2. The slope is `-alpha`. The intercept is `alpha * log(c)`.
# 3. So `c = exp(intercept / alpha)`. Compute in float64: `c` is far away from the points and amplifies rounding.

# %% [markdown] exercise="fit_chinchilla" points=7 minutes=20
# ## The Chinchilla fit
#
# **Given** `parameters` $N$, `tokens` $D$ and `loss` $L$ of some training runs, three tensors of shape `(n,)`, **return** `(E, A, B, alpha, beta)` of the law
#
# $$L = E + \frac{A}{N^\alpha} + \frac{B}{D^\beta}$$
#
# (five numbers or 0-d tensors).
#
# **Rule.** Minimise the sum over runs of the Huber loss, with $\delta = 10^{-3}$, of $\log L$ predicted minus $\log L$ measured. The Huber loss of a difference $z$ is $z^2/2$ if $\left|z\right| \le \delta$ and
# $\delta\,(\left|z\right| - \delta/2)$ beyond: an odd run counts linearly, not squared. All five are above 0. The minimum has to be found well enough: your objective may be 3 % above the best. Fewer than five
# runs, or a value that is not above 0, are a `ValueError`. The time limit is generous but not endless: a few starts, not thousands.
#
# **How.** The problem is well-behaved in $\log E$, $\log A$ and $\log B$, with exponents that start near 0.4, and with $N$ and $D$ divided by their geometric means $\bar N$ and $\bar D$ (multiply $A$ by $\bar N^\alpha$ and $B$ by $\bar D^\beta$ at the
# end). Work in float64. `torch.optim.LBFGS` with `line_search_fn="strong_wolfe"` and a small `tolerance_change` finds the minimum. `F.huber_loss(a, b, delta=1e-3)` is the Huber
# loss.
#
# **Example.** Runs that follow $E = 1.69$, $A = 406.4$, $B = 410.7$, $\alpha = 0.34$, $\beta = 0.28$ exactly give these five numbers back.


# %% exercise="fit_chinchilla"
def fit_chinchilla(parameters, tokens, loss):
    ### BEGIN SOLUTION
    n, d, measured = (t.double() for t in (parameters, tokens, loss))
    if len(n) < 5 or (n <= 0).any() or (d <= 0).any() or (measured <= 0).any():
        raise ValueError("fit_chinchilla needs at least five runs, all values above 0")
    mean_n, mean_d = n.log().mean(), d.log().mean()
    best = None
    for alpha in (0.2, 0.4, 0.8):
        for beta in (0.2, 0.4, 0.8):
            third = math.log(float(measured.min()) / 3)
            x = torch.tensor([third, third, third, alpha, beta], dtype=torch.float64, requires_grad=True)
            optimizer = torch.optim.LBFGS(
                [x], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-15, line_search_fn="strong_wolfe"
            )

            def closure(x=x, optimizer=optimizer):
                optimizer.zero_grad()
                terms = torch.stack(
                    [
                        x[0].expand_as(n),
                        x[1] - x[3] * (n.log() - mean_n),
                        x[2] - x[4] * (d.log() - mean_d),
                    ]
                )
                value = F.huber_loss(terms.logsumexp(0), measured.log(), delta=1e-3, reduction="sum")
                value.backward()
                return value

            optimizer.step(closure)
            value = float(closure())
            if best is None or value < best[0]:
                best = value, x.detach()
    e, a, b, alpha, beta = best[1]
    return e.exp(), (a + alpha * mean_n).exp(), (b + beta * mean_d).exp(), alpha, beta
    ### END SOLUTION


# %% [markdown] hints="fit_chinchilla"
# 1. Make one tensor of five unknowns with `requires_grad=True`: `log E`, `log A`, `log B`, `alpha`, `beta`. The predicted `log L` is the log of a sum of three exponentials: `torch.logsumexp`.
# 2. The three terms are `log E`, `log A - alpha * log N` and `log B - beta * log D`. Subtract the mean of `log N` and of `log D` first, so that the unknowns do not depend on each other so much.
# 3. `optimizer.step(closure)` calls your closure many times; it clears the gradient, computes the Huber loss, calls `backward()` and returns the loss. The loss is tiny, about `1e-6`: take the sum over runs, not the mean, and set `tolerance_grad=1e-12` and `tolerance_change=1e-15`, or the optimizer stops far too early.
# 4. Start from several exponents (0.2, 0.4, 0.8) and keep the result with the lowest objective. Undo the centring: `A = exp(log A' + alpha * mean of log N)`, and `B` in the same way.

# %% [markdown] exercise="compute_optimal" points=5 minutes=15
# ## Spending a budget
#
# **Given** a budget `flops`, $C$, and the constants `A`, `B`, `alpha`, `beta` of $L = E + A / N^\alpha + B / D^\beta$, **return** `(N, D)`, the parameters and tokens with the lowest loss among all with
# $6 N D = C$. They are floats and are not rounded. A budget that is not above 0 is a `ValueError`.
#
# **Rule.** Put $D = C / (6N)$ into the law and set the derivative in $N$ to 0. The result is
#
# $$\begin{aligned}
# N &= G \left(\frac{C}{6}\right)^{\beta / (\alpha + \beta)}, \quad G = \left(\frac{\alpha A}{\beta B}\right)^{1 / (\alpha + \beta)} \\
# D &= \frac{C}{6N}
# \end{aligned}$$
#
# **Example.** With $A = B = 1$ and $\alpha = \beta = 0.5$, a budget of 600 FLOPs gives $N = 10$ and $D = 10$.


# %% exercise="compute_optimal"
def compute_optimal(flops, A, B, alpha, beta):
    ### BEGIN SOLUTION
    if flops <= 0:
        raise ValueError(f"compute_optimal needs flops > 0, got flops={flops}")
    log_n = (math.log(alpha * A / (beta * B)) + beta * math.log(flops / 6)) / (alpha + beta)
    n = math.exp(log_n)
    return n, flops / (6 * n)
    ### END SOLUTION


# %% [markdown] hints="compute_optimal"
# 1. The power of the budget in N has beta on top: the slower the data term falls, the less is gained by more tokens … and the exponent of D has alpha on top.
# 2. G multiplies N, and its inverse multiplies D. Computing `D` as `flops / (6 * N)` makes the budget fit exactly.
