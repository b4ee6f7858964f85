"""Loads models in Hugging Face's layout: GPT-2, Llama, Mistral, Qwen2 and 3, DeepSeek-V2 and V3.

A folder with `config.json` and one or more safetensors files becomes a `course_llm.model.Decoder`. Three
things differ between the layouts: matrices that are multiplied with the same input are joined here; GPT-2
stores its matrices transposed; and Llama rotates the pairs `(i, i + d / 2)` where the paper and this course
rotate `(2 * i, 2 * i + 1)`, so that the rows of its query and key matrices are reordered, after which the scores are
the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course_llm.checkpoints import fill, load_tensors
from course_llm.experts import ExpertsConfig
from course_llm.hf_config import config_from_settings
from course_llm.model import Decoder, ModelConfig


def load_pretrained(folder: str | Path, dtype: torch.dtype = torch.float32, device: Any = None) -> Decoder:
    """Builds a decoder from a folder in Hugging Face's layout, ready for inference.

    Args:
        folder: holds `config.json` and `model.safetensors`, or an index and the files that it lists.
        dtype: of the weights.
        device: where the decoder lies.

    Raises:
        ValueError: a file is missing or cut short, the model is of a kind that is not known, or a tensor is
            missing, left over or of another shape; the message names it.
    """
    folder = Path(folder)
    settings = _read_json(folder / "config.json")
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        places = _read_json(index)
        if not isinstance(places, dict) or not isinstance(places.get("weight_map"), dict):
            raise ValueError(f"load_pretrained needs a weight_map in {index}, it has none")
        names = sorted(set(places["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors |= load_tensors(folder / name)[0]
    return from_state_dict(settings, tensors, dtype, device)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"load_pretrained needs {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"load_pretrained needs JSON in {path}: {error}") from None


def from_state_dict(
    settings: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float32,
    device: Any = None,
) -> Decoder:
    """Builds a decoder from the contents of `config.json` and a state dictionary in Hugging Face's names.

    Args:
        settings: what `config.json` holds.
        tensors: by Hugging Face's names, with or without the prefix `model.` or `transformer.`.
        dtype: of the weights.
        device: where the decoder lies.

    Raises:
        ValueError: a kind of model that is not known, or a tensor that is missing, left over or of another shape.
    """
    config = config_from_settings(settings)
    source = Source(tensors)
    convert = _gpt2 if settings["model_type"] == "gpt2" else _llama_like
    converted = convert(source, config, settings)
    source.refuse_left_over(config.layers)
    model = Decoder(config, seed=None, device=device).to(dtype)
    fill(model, converted, "the checkpoint", {"head.weight": "embedding.weight"} if config.tied else None)
    return model.eval()


class Source:
    """A state dictionary that notes which tensors have been used and names the one that is missing.

    Args:
        tensors: by Hugging Face's names, with or without the prefix `model.` or `transformer.`.
    """

    IGNORED = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # buffers of old files

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        prefixes = ("transformer.", "model.")
        self.tensors = {}
        for name, tensor in tensors.items():
            prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
            self.tensors[name[len(prefix) :]] = tensor
        self.unused = set(self.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str) -> Tensor:
        """Returns a tensor and notes that it has been used.

        Args:
            name: without prefix.

        Raises:
            ValueError: there is none of this name.
        """
        if name not in self.tensors:
            raise ValueError(f"the model needs tensor {name}, the checkpoint has none")
        self.unused.discard(name)
        return self.tensors[name]

    def refuse_left_over(self, layers: int) -> None:
        """Refuses tensors that were not used; layers past the last one (multi-token prediction) may be left over.

        Args:
            layers: of the model.

        Raises:
            ValueError: another tensor was not used.
        """
        for name in sorted(self.unused):
            parts = name.split(".")
            extra = parts[0] == "layers" and int(parts[1]) >= layers
            if not extra and not name.endswith(self.IGNORED) and name != "lm_head.weight":
                raise ValueError(f"the model has no place for tensor {name} of the checkpoint")


# -- tensors ------------------------------------------------------------------------------------------


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Reorders each head's rows from `(0, ..., d - 1)` to `(0, d / 2, 1, d / 2 + 1, ...)`: rotated halves become pairs.

    Args:
        rows: rows of a query or key matrix, or entries of a vector; the heads one after the other.
        heads: how many there are.
    """
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _gpt2(source: Source, config: ModelConfig, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    found = {"embedding.weight": source.take("wte.weight"), "positions.weight": source.take("wpe.weight")}
    for part in ("weight", "bias"):
        found[f"norm.{part}"] = source.take(f"ln_f.{part}")
    names = {
        "ln_1": "norm1",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out",
        "ln_2": "norm2",
        "mlp.c_fc": "feed_forward.up",
        "mlp.c_proj": "feed_forward.down",
    }
    for layer in range(config.layers):
        for theirs, ours in names.items():
            for part in ("weight", "bias"):
                tensor = source.take(f"h.{layer}.{theirs}.{part}")
                found[f"blocks.{layer}.{ours}.{part}"] = tensor.T if tensor.ndim == 2 else tensor
    if not config.tied:
        found["head.weight"] = source.take("lm_head.weight")
    return found


def _llama_like(source: Source, config: ModelConfig, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    found = {
        "embedding.weight": source.take("embed_tokens.weight"),
        "norm.weight": source.take("norm.weight"),
    }
    if not config.tied:
        found["head.weight"] = source.take("lm_head.weight")
    for layer in range(config.layers):

        def take(name: str, layer: int = layer) -> Tensor:
            return source.take(f"layers.{layer}.{name}")

        parts = _latent_attention(take, config, settings) if config.latent else _attention(take, config)
        parts["norm1.weight"] = take("input_layernorm.weight")
        parts["norm2.weight"] = take("post_attention_layernorm.weight")
        mixed = config.experts is not None and layer >= config.experts.dense_layers
        fused = f"layers.{layer}.mlp.experts.gate_up_proj" in source
        parts |= _mixture(take, config.experts, fused) if mixed else _swiglu(take, "mlp", "feed_forward")
        found |= {f"blocks.{layer}.{name}": tensor for name, tensor in parts.items()}
    return found


def _attention(take: Callable[..., Tensor], config: ModelConfig) -> dict[str, Tensor]:
    found = {"attention.out.weight": take("self_attn.o_proj.weight")}
    for part in ("weight", "bias") if config.qkv_biases else ("weight",):
        q = interleave(take(f"self_attn.q_proj.{part}"), config.heads)
        k = interleave(take(f"self_attn.k_proj.{part}"), config.n_kv_heads)
        found[f"attention.qkv.{part}"] = torch.cat((q, k, take(f"self_attn.v_proj.{part}")))
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            found[f"attention.{name}.weight"] = interleave(take(f"self_attn.{name}.weight"), 1)
    return found


def _latent_attention(
    take: Callable[..., Tensor], config: ModelConfig, settings: Mapping[str, Any]
) -> dict[str, Tensor]:
    names = {
        "kv_down": "kv_a_proj_with_mqa",
        "kv_norm": "kv_a_layernorm",
        "kv_up": "kv_b_proj",
        "out": "o_proj",
    }
    if config.latent.d_cq is None:
        names["q_up"] = "q_proj"
    else:
        names |= {"q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj"}
    found = {f"attention.{ours}.weight": take(f"self_attn.{theirs}.weight") for ours, theirs in names.items()}
    if not settings.get("rope_interleave", True):
        rope = config.latent.rope_dim
        queries = found["attention.q_up.weight"].unflatten(0, (config.heads, -1))
        rotated = torch.stack([interleave(head[-rope:], 1) for head in queries])
        found["attention.q_up.weight"] = torch.cat((queries[:, :-rope], rotated), dim=1).flatten(0, 1)
        down = found["attention.kv_down.weight"]
        found["attention.kv_down.weight"] = torch.cat((down[:-rope], interleave(down[-rope:], 1)))
    return found


def _swiglu(take: Callable[..., Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    up = torch.cat((take(f"{theirs}.gate_proj.weight"), take(f"{theirs}.up_proj.weight")))
    return {f"{ours}.up.weight": up, f"{ours}.down.weight": take(f"{theirs}.down_proj.weight")}


def _mixture(take: Callable[..., Tensor], rule: ExpertsConfig, fused: bool) -> dict[str, Tensor]:
    """Experts come one by one, as the published files have them, or stacked, as a model in memory does."""
    found = {
        "feed_forward.router": take("mlp.gate.weight"),
        "feed_forward.router_bias": torch.zeros(rule.experts),
    }
    if rule.scoring == "sigmoid":
        found["feed_forward.router_bias"] = take("mlp.gate.e_score_correction_bias")
    if rule.shared:
        found |= _swiglu(take, "mlp.shared_experts", "feed_forward.shared")
    if fused:
        found |= {"feed_forward.up": take("mlp.experts.gate_up_proj")}
        return found | {"feed_forward.down": take("mlp.experts.down_proj")}
    parts = [_swiglu(take, f"mlp.experts.{expert}", "x") for expert in range(rule.experts)]
    for name in ("up", "down"):
        found[f"feed_forward.{name}"] = torch.stack([part[f"x.{name}.weight"] for part in parts])
    return found
