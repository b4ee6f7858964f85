# %% [markdown]
# # A pretraining run of your own
#
# The exercises of the [pretraining chapter](../exercises/pretraining/pretraining.ipynb) gave you the parts of a training loop. Here they train a real model, from random
# numbers to text, in less than **four minutes on two CPU cores**: a decoder of 0.66 million parameters on 28,525 definitions of diseases, cells and anatomical
# structures. The goal is at most **1.35 bits per byte** on text that it has not seen. (The compressor xz, given the training text first, needs 1.35.)
#
# Nothing here is graded. Where an exercise of yours passes its check, your function runs; where none does, the course's own takes its place, and
# the notebook says so. It looks for `pretraining.ipynb` beside this notebook, in a folder `pretraining`, and in `exercises`.
#
# **The model that comes out is no source of medical information.** It learns what definitions sound like, and makes its facts up.

# %%
import io
import os
import random
import time

import torch
from IPython.display import Image, display
from matplotlib.figure import Figure
from torch import nn

from autograder.own import own_functions
from course_llm import corpus
from course_llm.checkpoints import load_model, save_model
from course_llm.generation import Sampling, generate_text
from course_llm.model import Decoder, ModelConfig
from course_llm.tokenizer import load_tokenizer
from course_llm.training_data import bits_per_byte

SHARE = float(os.environ.get("COURSE_LLM_RUN_SHARE", 1))  # 0.01 runs a hundredth of everything, to see that it works
STEPS = round(3500 * SHARE)  # of 512 tokens each
torch.set_num_threads(min(2, torch.get_num_threads()))  # more are of no use to matrices this small

# %% [markdown]
# ## Your functions

# %%
mine = own_functions("pretraining", ["random_batch", "learning_rate", "adamw_step", "clip_gradients", "accumulate_gradients"])

# %% [markdown]
# ## The text
#
# All training documents in one stream, in random order, an end of text after each. You may put other text in their place: any list of strings will do, and
# `corpus.read_documents("my_file.txt")` reads one document a line.

# %%
tokenizer = load_tokenizer()
documents = corpus.training_documents()
ids = tokenizer.encode_batch(random.Random(1).sample(documents, len(documents)))
stream = torch.tensor([token for document in ids for token in (*document, tokenizer.eos_id)])
print(f"{len(documents):,} documents, {corpus.byte_count(documents) / 1e6:.2f} MB, {len(stream):,} tokens; for example:\n{documents[4000]}")

# %% [markdown]
# ## The model, before
#
# Two layers of width 128, half as many as the bundled model has: for so little text a small model that reads more is better than a large one that reads less.
# Untrained, it guesses: 2,048 tokens, all of them about equally probable.

# %%
config = ModelConfig(tokenizer.vocab, d_hidden=128, layers=2, heads=4, d_ff=512, context=128, feed_forward="gelu", qk_norm=True)
model = Decoder(config, seed=1)
held_out = corpus.validation_documents()[: round(1508 * SHARE)]
prompts = ["Marfan syndrome:", "hepatocyte:", "left ventricle:"]


def show_samples():
    rules = Sampling(temperature=0.7, top_p=0.9)
    texts = generate_text(model.eval(), tokenizer, prompts, 40, rules, generator=torch.Generator().manual_seed(1))
    for prompt, text in zip(prompts, texts, strict=True):
        print(prompt + text, end="\n\n")


print(f"{model.parameter_count():,} parameters, {bits_per_byte(model, held_out[:20], tokenizer, 128):.2f} bits per byte\n")
show_samples()

# %% [markdown]
# ## One step
#
# `adamw_step` becomes an optimizer, so that its means can be saved with the run. Matrices decay, vectors do not. The matrix products run in bfloat16 where that is faster
# on your machine; weights, sums and the optimizer stay in float32.


# %%
class AdamW(torch.optim.Optimizer):
    """Calls `adamw_step` once a group, for all its parameters in one long vector: forty small calls would take longer."""

    def __init__(self, model, weight_decay=0.1):
        vectors = [p for p in model.parameters() if p.ndim < 2]
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        super().__init__([{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}], {"lr": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = group["params"]
            flat = torch.cat([p.flatten() for p in params])
            grad = torch.cat([p.grad.flatten() for p in params])
            state = self.state[params[0]] or {"step": 0, "m": torch.zeros_like(flat), "v": torch.zeros_like(flat)}
            step, rule = state["step"] + 1, (group["lr"], (0.9, 0.99), 1e-8, group["weight_decay"])
            new, m, v = mine.adamw_step(flat, grad, state["m"], state["v"], step, *rule)
            for p, part in zip(params, new.split([p.numel() for p in params]), strict=True):
                p.copy_(part.view_as(p))
            self.state[params[0]] = {"step": step, "m": m, "v": v}


# %%
class Mixed(nn.Module):
    """Runs a model's matrix products in bfloat16, or not."""

    def __init__(self, model, bfloat16):
        super().__init__()
        self.model, self.bfloat16 = model, bfloat16

    def forward(self, ids):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            return self.model(ids).float()


# %%
PEAK, WARMUP, BATCH, BLOCK = 3e-3, min(200, STEPS // 10), 4, 128
FLAT = round(0.6 * STEPS)  # steps before the rate falls


def rate(step):
    """Warm-up, flat, then half a cosine down to 0: your schedule twice."""
    if step < FLAT:
        return mine.learning_rate(step, PEAK, WARMUP, FLAT, PEAK)  # a floor as high as the peak
    return mine.learning_rate(step - FLAT, PEAK, 0, STEPS - FLAT, 0.0)


def train_step(net, optimizer, step, generator):
    """Draws rows, computes the gradient, bounds it, chooses the rate, updates; returns the loss."""
    loss = mine.accumulate_gradients(net, [mine.random_batch(stream, BLOCK, BATCH, generator)])
    parameters = [p for p in net.parameters() if p.grad is not None]
    clipped, _ = mine.clip_gradients([p.grad for p in parameters], 1.0)
    for p, grad in zip(parameters, clipped, strict=True):
        p.grad = grad
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    optimizer.step()
    return loss.item()


# %% [markdown]
# How long will it take? A few steps of a model that is thrown away tell; on a busy machine one thread may be faster than two. If it is too long for you, choose fewer
# `STEPS` above: the schedule follows, so a shorter run is a whole run and not a broken-off one.


# %%
def seconds_per_step(threads, bfloat16, steps=6):
    torch.set_num_threads(threads)
    trial = Decoder(config, seed=0)
    net, optimizer, generator = Mixed(trial, bfloat16), AdamW(trial), torch.Generator().manual_seed(0)
    train_step(net, optimizer, 0, generator)  # the first one is slow
    start = time.perf_counter()
    for step in range(1, steps + 1):
        train_step(net, optimizer, step, generator)
    return (time.perf_counter() - start) / steps


kinds = ["float32", "bfloat16"] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ["float32"]  # without AVX-512 it is ten times slower
speeds = {(n, kind): seconds_per_step(n, kind == "bfloat16") for n in range(1, torch.get_num_threads() + 1) for kind in kinds}
threads, precision = min(speeds, key=speeds.get)
torch.set_num_threads(threads)
for (n, kind), seconds in speeds.items():
    print(f"{n} thread(s), {kind}: {BATCH * BLOCK / seconds:,.0f} tokens/s")
print(f"{STEPS:,} steps in {precision}: about {STEPS * speeds[threads, precision] / 60:.1f} minutes")

# %% [markdown]
# ## The run


# %%
class LossPlot:
    """The training loss, drawn anew every few seconds."""

    def __init__(self, every_s=4.0):
        self.losses, self.every_s, self.last = [], every_s, time.perf_counter()
        self.shown = display(self.drawn(), display_id=True)

    def drawn(self):
        figure = Figure(figsize=(7, 3), layout="constrained")
        axes = figure.subplots()
        means = [sum(part) / len(part) for part in (self.losses[i : i + 20] for i in range(0, len(self.losses), 20))]
        axes.plot([20 * i * BATCH * BLOCK / 1e6 for i in range(1, len(means) + 1)], means)
        axes.set(xlabel="tokens read, millions", ylabel="training loss, nats per token", xlim=(0, STEPS * BATCH * BLOCK / 1e6))
        axes.set_title(f"step {len(self.losses):,} of {STEPS:,}" + (f", loss {means[-1]:.2f}" if means else ""))
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=90)
        return Image(data=picture.getvalue(), alt="training loss over the tokens read")

    def add(self, loss, done):
        self.losses.append(loss)
        if done or time.perf_counter() - self.last > self.every_s:
            self.shown.update(self.drawn())
            self.last = time.perf_counter()


# %%
net, optimizer, generator = Mixed(model.train(), precision == "bfloat16"), AdamW(model), torch.Generator().manual_seed(1)
plot, start = LossPlot(), time.perf_counter()
for step in range(STEPS):
    plot.add(train_step(net, optimizer, step, generator), done=step == STEPS - 1)
training_s = time.perf_counter() - start
print(f"{training_s / 60:.1f} minutes, {STEPS * BATCH * BLOCK / training_s:,.0f} tokens/s, loss from {plot.losses[0]:.2f} to {sum(plot.losses[-20:]) / len(plot.losses[-20:]):.2f}")

# %% [markdown]
# ## The model, after

# %%
model.eval()
bits = bits_per_byte(model, held_out, tokenizer, 128)
print(f"{bits:.3f} bits per byte on {len(held_out):,} documents that it has not seen; the goal is 1.35, the course's own model has 0.997\n")
show_samples()

# %% [markdown]
# Not medical information: the style is right, the facts are made up.
#
# ## Keep it
#
# One file holds the weights and the configuration. In a notebook of any chapter,
#
# ```python
# from course_llm.checkpoints import load_model
# from course_llm.tokenizer import load_tokenizer
#
# model, tokenizer = load_model("my_model.safetensors"), load_tokenizer()
# ```
#
# takes the place of `model, tokenizer = load_bundled()`, and `weights, tokenizer = bundled_weights(path="my_model.safetensors")` hands it to the generator that you write in
# the capstone.

# %%
save_model("my_model.safetensors", model, steps=STEPS, validation_bits_per_byte=bits)
again = load_model("my_model.safetensors")
before, after = (bits_per_byte(who, held_out[:100], tokenizer, 128) for who in (model, again))
print(f"{os.path.getsize('my_model.safetensors') / 1e6:.1f} MB in float16; {before:.3f} bits per byte on the first documents before, {after:.3f} from the file")

# %% [markdown]
# ## What next
#
# - Leave something out: no warm-up (`WARMUP = 0`), no clipping (a limit of `1e9`), 16 rows a step, a cosine from beginning to end. What does each cost in bits per byte?
# - The same minutes can buy a smaller model that reads more, or a larger one that reads less. Four layers came to the same 1.32 bits in 3,000 steps, which took half as long
#   again. And one layer?
# - `course-llm pretrain` trains the course's model: the same loop with checkpoints, a log, and a recipe in a file. It takes five times as many tokens.
