"""Loads models in Hugging Face's layout: GPT-2, Llama, Mistral, Qwen2 and 3, DeepSeek-V2 and V3.

A folder with `config.json` and one or more safetensors files becomes a `course_llm.model.Decoder`. Three
things differ between the layouts: matrices that are multiplied with the same input are joined here; GPT-2
stores its matrices transposed; and Llama rotates the pairs (i, i + d/2) where the paper and this course
rotate (2i, 2i + 1), so that the rows of its query and key matrices are reordered, after which the scores are
the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course_llm.checkpoints import fill, load_tensors
from course_llm.experts import ExpertsConfig
from course_llm.layers import LatentConfig, RopeScaling
from course_llm.model import Decoder, ModelConfig

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
DEEPSEEK = ("deepseek_v2", "deepseek_v3")


def load_pretrained(folder: str | Path, dtype: torch.dtype = torch.float32, device: Any = None) -> Decoder:
    """Builds a decoder from a folder in Hugging Face's layout, ready for inference.

    Args:
        folder: holds `config.json` and `model.safetensors`, or an index and the files that it lists.
        dtype, device: of the weights.

    Raises:
        ValueError: a file is missing or cut short, the model is of a kind that is not known, or a tensor is
            missing, left over or of another shape; the message names it.
    """
    folder = Path(folder)
    settings = _read_json(folder / "config.json")
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(_read_json(index)["weight_map"].values()))
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
    """Builds a decoder from the contents of `config.json` and a state dictionary in Hugging Face's names."""
    config = config_from_settings(settings)
    source = Source(tensors)
    convert = _gpt2 if settings["model_type"] == "gpt2" else _llama_like
    converted = convert(source, config, settings)
    source.refuse_left_over(config.layers)
    model = Decoder(config, seed=None, device=device).to(dtype)
    fill(model, converted, "the checkpoint", {"head.weight": "embedding.weight"} if config.tied else None)
    return model.eval()


class Source:
    """A state dictionary that notes which tensors have been used and names the one that is missing."""

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
        """Returns a tensor; ValueError if there is none."""
        if name not in self.tensors:
            raise ValueError(f"the model needs tensor {name}, the checkpoint has none")
        self.unused.discard(name)
        return self.tensors[name]

    def refuse_left_over(self, layers: int) -> None:
        """Raises ValueError if a tensor was not used; layers past the last one (multi-token prediction) may be."""
        for name in sorted(self.unused):
            parts = name.split(".")
            extra = parts[0] == "layers" and int(parts[1]) >= layers
            if not extra and not name.endswith(self.IGNORED) and name != "lm_head.weight":
                raise ValueError(f"the model has no place for tensor {name} of the checkpoint")


# -- configuration ------------------------------------------------------------------------------------


def config_from_settings(settings: Mapping[str, Any]) -> ModelConfig:
    """Turns the contents of a `config.json` into a `ModelConfig`.

    Raises:
        ValueError: a kind of model, or a setting of it, that the decoder does not have.
    """
    kind = settings.get("model_type")
    if kind == "gpt2":
        return _gpt2_config(settings)
    if kind not in (*LLAMA_LIKE, *DEEPSEEK):
        known = ", ".join(("gpt2", *LLAMA_LIKE, *DEEPSEEK))
        raise ValueError(f"load_pretrained needs a model of kind {known}, got {kind}")
    if settings.get("hidden_act", "silu") != "silu":
        raise ValueError(f"load_pretrained needs hidden_act silu, got {settings['hidden_act']}")
    if settings.get("mlp_bias") or (kind != "qwen2" and settings.get("attention_bias")):
        raise ValueError("load_pretrained needs a model without biases, got attention_bias or mlp_bias")
    latent = None
    head_dim = settings.get("head_dim")
    if kind in DEEPSEEK:
        head_dim = settings["qk_nope_head_dim"]
        sizes = (settings["kv_lora_rank"], settings.get("q_lora_rank"), settings["qk_rope_head_dim"])
        latent = LatentConfig(*sizes, settings["v_head_dim"])
    rope = _rope_settings(settings)
    scaling, scale = _rope_scaling(rope, settings, latent, head_dim)
    windowed = kind == "mistral" or settings.get("use_sliding_window")
    return ModelConfig(
        vocab=settings["vocab_size"],
        d_hidden=settings["hidden_size"],
        layers=settings["num_hidden_layers"],
        heads=settings["num_attention_heads"],
        d_ff=settings["intermediate_size"],
        context=settings["max_position_embeddings"],
        kv_heads=None if latent else settings.get("num_key_value_heads"),
        head_dim=head_dim,
        latent=latent,
        rope_base=float(rope["rope_theta"]),
        rope_scaling=scaling,
        norm_eps=settings["rms_norm_eps"],
        qk_norm=kind == "qwen3",
        qkv_biases=kind == "qwen2",
        tied=settings.get("tie_word_embeddings", False),
        window=settings.get("sliding_window") if windowed else None,
        experts=_experts(settings) if kind in DEEPSEEK else None,
        attention_scale=scale,
    )


def _gpt2_config(settings: Mapping[str, Any]) -> ModelConfig:
    kinds = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    kind = settings.get("activation_function", "gelu_new")
    odd = [name for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention") if settings.get(name)]
    if kind not in kinds or odd:
        raise ValueError(f"load_pretrained needs a plain GPT-2, got {odd[0] if odd else kind}")
    return ModelConfig(
        vocab=settings["vocab_size"],
        d_hidden=settings["n_embd"],
        layers=settings["n_layer"],
        heads=settings["n_head"],
        d_ff=settings.get("n_inner") or 4 * settings["n_embd"],
        context=settings["n_positions"],
        positions="learned",
        feed_forward=kinds[kind],
        norm="layer",
        norm_eps=settings.get("layer_norm_epsilon", 1e-5),
        biases=True,
        tied=settings.get("tie_word_embeddings", True),
    )


def _rope_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the old and the new way to write rotary settings."""
    rope = dict(settings.get("rope_parameters") or settings.get("rope_scaling") or {})
    rope.setdefault("rope_theta", settings.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def _rope_scaling(
    rope: Mapping[str, Any], settings: Mapping[str, Any], latent: LatentConfig | None, head_dim: int | None
) -> tuple[RopeScaling | None, float | None]:
    """Returns how frequencies are stretched, and the factor of the scores where it is not the usual one."""
    kind = rope["rope_type"]
    if kind == "default":
        return None, None
    original = rope.get("original_max_position_embeddings") or settings["max_position_embeddings"]
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]), original), None
    if kind == "llama3":
        return RopeScaling(
            "llama3", rope["factor"], original, rope["low_freq_factor"], rope["high_freq_factor"]
        ), None
    if kind != "yarn":
        raise ValueError(f"load_pretrained needs rope_type default, linear, llama3 or yarn, got {kind}")

    def stretch(strength: float) -> float:
        return 0.1 * strength * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    all_dim, part = rope.get("mscale_all_dim"), rope.get("mscale")
    factor = rope.get("attention_factor")
    if factor is None:
        factor = stretch(part) / stretch(all_dim) if part and all_dim else stretch(1.0)
    scale = None
    if latent is not None and all_dim:
        scale = (head_dim + latent.rope_dim) ** -0.5 * stretch(all_dim) ** 2
    borders = float(rope.get("beta_slow") or 1), float(rope.get("beta_fast") or 32)
    return RopeScaling("yarn", float(rope["factor"]), original, *borders, attention_factor=factor), scale


def _experts(settings: Mapping[str, Any]) -> ExpertsConfig | None:
    dense = settings.get("first_k_dense_replace") or 0
    if dense >= settings["num_hidden_layers"]:
        return None
    third = settings["model_type"] == "deepseek_v3"
    limited = third or settings.get("topk_method") == "group_limited_greedy"
    return ExpertsConfig(
        experts=settings["n_routed_experts"],
        per_token=settings["num_experts_per_tok"],
        d_ff=settings["moe_intermediate_size"],
        shared=settings.get("n_shared_experts") or 0,
        dense_layers=dense,
        scoring="sigmoid" if third else "softmax",
        groups=settings["n_group"] if limited else 1,
        best_groups=settings["topk_group"] if limited else 1,
        normalise=third and settings.get("norm_topk_prob", True),
        scale=settings.get("routed_scaling_factor", 1.0),
    )


# -- tensors ------------------------------------------------------------------------------------------


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Reorders each head's rows from (0, ..., d-1) to (0, d/2, 1, d/2 + 1, ...): rotated halves become pairs."""
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
