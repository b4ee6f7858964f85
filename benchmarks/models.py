"""The models that the benchmarks of speed compare: Hugging Face's and this package's, with the same random weights."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor

from course_llm import hf
from course_llm.model import Decoder

PROMPT, NEW = 64, 192  # tokens
SIZES = {  # layers, width, heads, vocabulary
    "small": (6, 384, 6, 8192),
    "GPT-2": (12, 768, 12, 50257),
}


def pair(size: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.nn.Module, Decoder]:
    """Returns Hugging Face's GPT-2 and this package's decoder of one size, in evaluation mode.

    Weights are normal with deviation 0.05, wide enough that greedy texts do not fall into one repeated token; texts
    that differ show in the tokens.
    """
    layers, width, heads, vocab = SIZES[size]
    settings = transformers.GPT2Config(
        vocab_size=vocab,
        n_positions=1024,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        theirs = transformers.GPT2LMHeadModel(settings)
    theirs = theirs.to_empty(device="cpu").eval()
    theirs.tie_weights()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            noise = 0.05 * torch.randn(parameter.shape, generator=generator)
            scale = parameter.ndim == 1 and name.endswith("weight")  # of a norm
            parameter.copy_(noise + 1 if scale else noise)
    ours = hf.from_state_dict(settings.to_dict(), theirs.state_dict(), dtype)
    return theirs.to(dtype), ours


def prompts(batch: int, size: str, seed: int = 1) -> Tensor:
    """Returns random token ids, (batch, PROMPT)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SIZES[size][3], (batch, PROMPT), generator=generator)


def their_tokens(theirs: torch.nn.Module, ids: Tensor, new: int = NEW) -> list[list[int]]:
    """Greedy decoding by Hugging Face's `generate` with its dynamic cache; returns the new tokens."""
    settings = dict(max_new_tokens=new, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids))
    return theirs.generate(ids, **settings)[:, ids.shape[1] :].tolist()
