# %% [markdown]
# # Decoding: exercises
#
# A language model returns logits; a decoding rule turns them into text. Here you build the rules: temperature, top-k,
# top-p and min-p, sampling, greedy search and beam search, a penalty and a measure for repetition, and the acceptance
# step of speculative decoding.
#
# Some things hold everywhere. Where the signature says `*batch`, `probs` and `logits` may have any number of batch
# dimensions, or none: a single row has the shape `(vocab,)`. The vocabulary is the last axis. When tokens tie, the
# **lower token id** wins. Results keep the dtype of their input, and inputs are never changed in place. Gradients flow
# from every float tensor that you return to the float tensors that came in (but not at temperature 0): compute with
# tensors, because `.tolist()`, `.item()` and NumPy cut the gradient. You may use your own functions from above in later
# exercises.
#
# A language model is seen from outside, as a function `next_logits`: token ids `(batch, seq)` go in, the logits
# `(batch, vocab)` of the next token come out. It has no memory, so it needs the whole text at every call. Token ids are
# `int64`, those that you return, too.

# %% [markdown] exercise="softmax_with_temperature" points=4 minutes=10
# ## Temperature
#
# **Given** logits and a temperature $t$, **return** the probabilities $\mathrm{softmax}(z / t)$ over the last axis.
#
# - Logits may be as large as ±10,000: the result holds no NaN and no infinity.
# - $t = 0$ is the limit: a one-hot row at the largest logit, at the lowest id where several are largest.
# - $t < 0$ raises a `ValueError` with a message.
#
# **Example.** Logits `[1.0, 0.0, -0.9, -2.1]` give `[0.862, 0.117, 0.019, 0.002]` at $t = 0.5$ and
# `[0.453, 0.275, 0.175, 0.096]` at $t = 2$.


# %% exercise="softmax_with_temperature"
def softmax_with_temperature(logits, temperature):
    ### BEGIN SOLUTION
    if temperature < 0:
        raise ValueError(f"softmax_with_temperature needs temperature >= 0, got {temperature}")
    if temperature == 0:
        return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(logits.dtype)
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return (shifted / temperature).softmax(dim=-1)
    ### END SOLUTION


# %% [markdown] hints="softmax_with_temperature"
# 1. Divide the logits, not the probabilities, by the temperature.
# 2. Subtracting a row's maximum from its logits does not change the softmax, and no exponential can overflow afterwards. `torch.softmax` does it for you.
# 3. For temperature 0, `F.one_hot(logits.argmax(dim=-1), vocab)` is an integer tensor: convert it to the dtype of the logits.

# %% [markdown] exercise="top_k_filter" points=4 minutes=15
# ## Top-k
#
# **Given** probabilities and `k`, **return** the distribution over the `k` most probable tokens of each row: the others become 0,
# and what is left is divided by its sum.
#
# - Exactly `k` tokens survive, even when several tie; among equals the lower ids do. (`torch.topk` does not promise which
#   of several equals it returns.)
# - A `k` of the size of the vocabulary or more changes nothing.
# - `k < 1` raises a `ValueError` with a message.
#
# **Example.** `[0.1, 0.4, 0.2, 0.3]` with `k = 2` gives `[0, 0.571, 0, 0.429]`; `[0.25, 0.25, 0.25, 0.25]` with `k = 2` gives
# `[0.5, 0.5, 0, 0]`.


# %% exercise="top_k_filter"
def top_k_filter(probs, k):
    ### BEGIN SOLUTION
    if k < 1:
        raise ValueError(f"top_k_filter needs k >= 1, got {k}")
    order = probs.argsort(dim=-1, descending=True, stable=True)
    mask = torch.zeros_like(probs).scatter(-1, order[..., :k], 1.0)
    kept = probs * mask
    return kept / kept.sum(dim=-1, keepdim=True)
    ### END SOLUTION


# %% [markdown] hints="top_k_filter"
# 1. Find the ids of the `k` most probable tokens, make a mask of them, multiply, renormalise.
# 2. `probs.argsort(dim=-1, descending=True, stable=True)` lists the ids by probability, and equal ones in the order of their ids.
# 3. `torch.zeros_like(probs).scatter(-1, ids, 1.0)` has a 1 at each of the ids; slicing `[..., :k]` never runs over the end.

# %% [markdown] exercise="top_p_filter" points=4 minutes=20
# ## Top-p (nucleus)
#
# **Given** probabilities and `p`, **return** the distribution over the nucleus of each row: the smallest set of most probable tokens
# whose mass is **at least** `p`. The other tokens become 0, and what is left is divided by its sum.
#
# - The token that crosses `p` belongs to the nucleus, so the nucleus is never empty. A mass of exactly `p` is enough.
# - Among equal probabilities the lower id comes first.
# - `p = 1` keeps every token. A `p` outside $0 < p \le 1$ raises a `ValueError` with a message.
#
# **Example.** `[0.05, 0.3, 0.5, 0.15]` with `p = 0.7` gives `[0, 0.375, 0.625, 0]`: 0.5 alone is too little, 0.5 + 0.3 reaches 0.7.


# %% exercise="top_p_filter"
def top_p_filter(probs, p):
    ### BEGIN SOLUTION
    if not 0 < p <= 1:
        raise ValueError(f"top_p_filter needs 0 < p <= 1, got {p}")
    if p == 1:
        return probs.clone()
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ranked.cumsum(dim=-1) - ranked
    kept = torch.zeros_like(probs).scatter(-1, order, ranked * (mass_before < p))
    return kept / kept.sum(dim=-1, keepdim=True)
    ### END SOLUTION


# %% [markdown] hints="top_p_filter"
# 1. Sort each row by probability, most probable first, and take the cumulative sum.
# 2. A token belongs to the nucleus while the mass of the tokens *before* it is still below `p`.
# 3. `torch.zeros_like(probs).scatter(-1, order, values)` puts sorted values back at their tokens' ids.

# %% [markdown] exercise="sampling_distribution" points=4 minutes=10
# ## Combining them
#
# **Given** logits, **return** the distribution that the next token is drawn from. In this order: divide by the temperature,
# softmax, top-k, renormalise, top-p, renormalise. `None` for `top_k` or `top_p` skips that step; temperature 0 puts all mass
# on the most probable token.
#
# **Example.** The logits of the probabilities `[0.4, 0.3, 0.2, 0.1]` with `top_k=2` and `top_p=0.5` give `[1, 0, 0, 0]`: after
# top-k the distribution is `[0.571, 0.429, 0, 0]`, and 0.571 alone reaches 0.5.


# %% exercise="sampling_distribution"
def sampling_distribution(logits, temperature=1.0, top_k=None, top_p=None):
    ### BEGIN SOLUTION
    probs = softmax_with_temperature(logits, temperature)
    if top_k is not None:
        probs = top_k_filter(probs, top_k)
    if top_p is not None:
        probs = top_p_filter(probs, top_p)
    return probs
    ### END SOLUTION


# %% [markdown] hints="sampling_distribution"
# 1. The three functions above are all that is needed.
# 2. The order matters: temperature reshapes the whole distribution, and top-p looks at what top-k has left, renormalised.
# 3. Ask `is not None`, so that each step stands for itself.

# %% [markdown] exercise="sample_from_uniform" points=3 minutes=15
# ## Drawing a token from a uniform number
#
# **Given** probabilities `(batch, vocab)` and one number $0 \le u < 1$ per row, **return** one token id per row: the first whose
# cumulative sum **exceeds** $u$. So token $i$ owns the interval from the mass of the ids below it, included, to that mass
# plus its own probability, excluded.
#
# - A token of probability 0 is never returned.
# - Rounding may leave the total of a row a little below 1. When $u$ is not below the total, return the last token of positive
#   probability.
#
# **Example.** `[0.25, 0, 0.5, 0.25]` gives token 0 for `u = 0.2`, token 2 for `u = 0.25` and token 3 for `u = 0.75`.


# %% exercise="sample_from_uniform"
def sample_from_uniform(probs, u):
    ### BEGIN SOLUTION
    cumulative = probs.cumsum(dim=-1)
    ids = (cumulative <= u[:, None]).sum(dim=-1)
    from_the_end = (probs > 0).flip(-1).int().argmax(dim=-1)
    last_possible = probs.shape[-1] - 1 - from_the_end
    return torch.minimum(ids, last_possible)
    ### END SOLUTION


# %% [markdown] hints="sample_from_uniform"
# 1. `u[:, None]` lines up each row's number with its cumulative sums.
# 2. The number of cumulative sums at or below `u` is the id.
# 3. To find the last token of positive probability, flip `probs > 0` and take the arg-max: it gives the first of several maxima.
# 4. The smaller of the two ids is the answer.

# %% [markdown] exercise="greedy_decode" points=4 minutes=15
# ## Greedy search
#
# **Given** `next_logits`, prompts `(batch, seq)` and `max_new_tokens`, append the most probable token to every row, and again to
# the longer text. **Return** the prompts followed by the new tokens.
#
# - When a row has produced `eos_id` it is finished: from then on it is filled with `eos_id`. An EOS in the prompt does not
#   count. `eos_id=None` means that no token ends a text; `eos_id=0` is an id like any other.
# - Stop when all rows have finished, even before `max_new_tokens`. `max_new_tokens=0` returns the prompt.
# - Among equal logits the lower id wins.
#
# **Example.** A model that always continues 0 → 1 → 2 → 3 → 0 turns `[[0], [1]]` with `max_new_tokens=9` and `eos_id=3` into
# `[[0, 1, 2, 3], [1, 2, 3, 3]]`.


# %% exercise="greedy_decode"
def greedy_decode(next_logits, ids, max_new_tokens, eos_id=None):
    ### BEGIN SOLUTION
    finished = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        token = next_logits(ids).argmax(dim=-1)
        if eos_id is not None:
            token[finished] = eos_id
            finished |= token == eos_id
        ids = torch.cat([ids, token[:, None]], dim=1)
        if finished.all():
            break
    return ids
    ### END SOLUTION


# %% [markdown] hints="greedy_decode"
# 1. The loop is: logits of the whole text, arg-max, append. `torch.cat([ids, token[:, None]], dim=1)` appends a column.
# 2. Keep a boolean per row, all False at first: has it produced an EOS?
# 3. In each step: replace the tokens of finished rows by `eos_id`, then mark the rows whose token is `eos_id`, then leave the loop if all are marked.

# %% [markdown] exercise="generate" points=5 minutes=15
# ## Sampling a text
#
# The same loop, but each token is drawn from `sampling_distribution(logits, temperature, top_k, top_p)`, for every row
# independently. Temperature 0 is greedy search. EOS and `max_new_tokens` work as in `greedy_decode`.
#
# All randomness comes from `generator` (a `torch.Generator`; `None` means PyTorch's global one): two generators in the
# same state give the same text.
#
# **Example.** With `temperature=0.0`, or with `top_k=1`, the result is that of `greedy_decode`.


# %% exercise="generate"
def generate(
    next_logits,
    ids,
    max_new_tokens,
    temperature=1.0,
    top_k=None,
    top_p=None,
    eos_id=None,
    generator=None,
):
    ### BEGIN SOLUTION
    finished = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        probs = sampling_distribution(next_logits(ids), temperature, top_k, top_p)
        token = torch.multinomial(probs, 1, generator=generator)[:, 0]
        if eos_id is not None:
            token[finished] = eos_id
            finished |= token == eos_id
        ids = torch.cat([ids, token[:, None]], dim=1)
        if finished.all():
            break
    return ids
    ### END SOLUTION


# %% [markdown] hints="generate"
# 1. Begin with your `greedy_decode` and change how the token is chosen.
# 2. `torch.multinomial(probs, 1, generator=generator)` draws one token per row; so does `sample_from_uniform` with one number of `torch.rand(batch, generator=generator)` per row.
# 3. Draw anew at every step, inside the loop.

# %% [markdown] exercise="beam_search" points=8 minutes=20
# ## Beam search
#
# **Given** one prompt `(1, seq)`, search for probable continuations with `beams` hypotheses. Start with one empty hypothesis.
# In each step extend every live hypothesis by every token, and keep the `beams` with the largest sum of log-probabilities.
# Those that end in `eos_id` are finished: they are kept as they are and not extended. Stop after `max_new_tokens` steps or
# when no live hypothesis is left.
#
# **Return** a list of at most `beams` pairs `(new_ids, score)`, best score first:
#
# - `new_ids` is a 1-D tensor of the new tokens, without the prompt, with the EOS if there is one;
# - the score is $\sum \log p \,/\, \text{length}^{\text{length\_penalty}}$, where sum and length run over the new tokens,
#   EOS included;
# - hypotheses that were cut off at `max_new_tokens` are ranked together with the finished ones.
#
# **Example.** Token 1 follows the prompt with probability 0.5, token 2 with 0.4. After 1 the most probable token has 0.35, after
# 2 token 0 has 0.97. Greedy search takes 1; two beams and two new tokens find `[2, 0]` with the score
# $\log(0.4 \cdot 0.97) = -0.947$. With one beam the result is the greedy text up to its EOS.


# %% exercise="beam_search"
def beam_search(next_logits, ids, beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    ### BEGIN SOLUTION
    live, finished = [([], 0.0)], []  # new tokens and the sum of their log-probabilities
    for _ in range(max_new_tokens):
        texts = torch.stack([torch.cat([ids[0], ids.new_tensor(new)]) for new, _ in live])
        log_probs = next_logits(texts).log_softmax(dim=-1).tolist()
        children = []
        for (new, total), row in zip(live, log_probs, strict=True):
            for token, log_prob in enumerate(row):
                children.append(([*new, token], total + log_prob))
        children.sort(key=lambda child: child[1], reverse=True)
        live = []
        for new, total in children[:beams]:
            (finished if new[-1] == eos_id else live).append((new, total))
        if not live:
            break
    found = [(ids.new_tensor(new), total / len(new) ** length_penalty) for new, total in finished + live]
    found.sort(key=lambda pair: pair[1], reverse=True)
    return found[:beams]
    ### END SOLUTION


# %% [markdown] hints="beam_search"
# 1. Keep two lists: live hypotheses and finished ones, each a pair of new tokens and summed log-probability. Nothing has to be vectorised.
# 2. `log_softmax` of the logits gives the log-probability of each extension; add it to the sum of the hypothesis.
# 3. Sort all extensions of all live hypotheses together and cut to `beams`; then sort those that end in EOS into the finished list.
# 4. At the end divide each sum by `len(new) ** length_penalty`, sort finished and live hypotheses together, cut to `beams`.

# %% [markdown] exercise="repetition_penalty" points=4 minutes=10
# ## Repetition penalty
#
# **Given** logits `(batch, vocab)`, the text so far `(batch, seq)` and a penalty above 0, **return** new logits. For each token that
# occurs in a row's text: a positive logit is divided by the penalty, a negative one is multiplied by it. Tokens that do not
# occur keep their logits.
#
# A token is penalised once, however often it occurs, and each row only by its own text.
#
# **Example.** Logits `[[2, -2, 1, -1]]`, text `[[0, 1, 1]]`, penalty 2 give `[[1, -4, 1, -1]]`.


# %% exercise="repetition_penalty"
def repetition_penalty(logits, ids, penalty):
    ### BEGIN SOLUTION
    picked = logits.gather(1, ids)
    picked = torch.where(picked > 0, picked / penalty, picked * penalty)
    return logits.scatter(1, ids, picked)
    ### END SOLUTION


# %% [markdown] hints="repetition_penalty"
# 1. `torch.where` chooses between the two rules by the sign of the logit.
# 2. A boolean mask of the tokens that occur counts each of them once: `scatter` a True at the ids.
# 3. Or `gather` the logits at the ids, penalise them, and `scatter` them back (not `scatter_`, which changes the input).

# %% [markdown] exercise="distinct_n" points=3 minutes=10
# ## Distinct-n
#
# **Given** a text (a 1-D tensor or a list of ids) and `n`, **return** the number of distinct n-grams divided by the number of all
# n-grams, as a Python `float`. N-grams overlap: a text of $s$ tokens has $s - n + 1$ of them. Without any n-gram the result is
# `0.0`.
#
# **Example.** `[1, 2, 1, 2, 3]` has the 2-grams (1, 2), (2, 1), (1, 2), (2, 3): three of four are distinct, 0.75.


# %% exercise="distinct_n"
def distinct_n(ids, n):
    ### BEGIN SOLUTION
    tokens = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    if not ngrams:
        return 0.0
    return len(set(ngrams)) / len(ngrams)
    ### END SOLUTION


# %% [markdown] hints="distinct_n"
# 1. A `set` keeps each n-gram once, if the n-grams are tuples of Python ints: `tolist()` makes ints of a tensor.
# 2. `tokens[i : i + n]` for every start `i` from 0 to `len(tokens) - n`.
# 3. Return 0.0 before dividing by zero.

# %% [markdown] exercise="min_p_filter" points=3 minutes=10
# ## Min-p
#
# **Given** probabilities and `min_p` between 0 and 1, keep in each row the tokens whose probability is **at least** `min_p` times
# the row's largest probability. The others become 0, and what is left is divided by its sum.
#
# **Example.** `[0.1, 0.6, 0.05, 0.25]` with `min_p = 0.3`: the threshold is 0.3 · 0.6 = 0.18, the result `[0, 0.706, 0, 0.294]`.


# %% exercise="min_p_filter"
def min_p_filter(probs, min_p):
    ### BEGIN SOLUTION
    largest = probs.amax(dim=-1, keepdim=True)
    kept = torch.where(probs >= min_p * largest, probs, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)
    ### END SOLUTION


# %% [markdown] hints="min_p_filter"
# 1. The threshold differs from row to row.
# 2. `amax(dim=-1, keepdim=True)` gives each row's largest probability in a shape that broadcasts.
# 3. Mask with `>=`, then renormalise as in top-k.

# %% [markdown] exercise="speculative_accept" points=6 minutes=20
# ## Speculative decoding: accept or correct
#
# A small draft model has proposed `n` tokens, `draft_ids`, each drawn from its row of `draft_probs` `(n, vocab)`. The large
# target model has computed its own distributions at the same places and at the one behind them: `target_probs`
# `(n + 1, vocab)`. `u` holds one uniform number per draft. Decide how many drafts to accept, and where the next token comes from.
#
# - With $p_i$ and $q_i$ the target's and the draft's probability of the drafted token: accept draft $i$ if
#   $u_i < \min(1, p_i / q_i)$. At the first rejection stop; nothing behind it counts.
# - At a rejection the next token's distribution is the residual of that row: $\max(0, \text{target} - \text{draft})$, divided
#   by its sum. When all drafts are accepted, it is the last row of `target_probs`.
#
# **Return** the pair (number of accepted drafts, distribution of the next token).
#
# **Example.** Target row `[0.5, 0.3, 0.2]`, draft row `[0.8, 0.1, 0.1]`, drafted token 0. The ratio is 0.625. With `u = 0.7` the
# draft is rejected: `(0, [0, 0.667, 0.333])`.


# %% exercise="speculative_accept"
def speculative_accept(target_probs, draft_probs, draft_ids, u):
    ### BEGIN SOLUTION
    for i, token in enumerate(draft_ids.tolist()):
        ratio = target_probs[i, token] / draft_probs[i, token]
        if not u[i] < ratio:
            residual = (target_probs[i] - draft_probs[i]).clamp(min=0)
            return i, residual / residual.sum()
    return len(draft_ids), target_probs[-1]
    ### END SOLUTION


# %% [markdown] hints="speculative_accept"
# 1. A loop over the drafts that returns at the first rejection is enough.
# 2. `u` is always below 1, so the minimum with 1 changes nothing.
# 3. `(target_probs[i] - draft_probs[i]).clamp(min=0)`, divided by its sum, is the residual; after the loop the answer is `(len(draft_ids), target_probs[-1])`.
