"""Reads Hugging Face's `config.json` of GPT-2, Llama, Mistral, Qwen2 and 3, DeepSeek-V2 and V3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from course_llm.experts import ExpertsConfig
from course_llm.layers import LatentConfig, RopeScaling
from course_llm.model import ModelConfig

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
DEEPSEEK = ("deepseek_v2", "deepseek_v3")
SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "rms_norm_eps", "n_embd", "n_layer", "n_head", "n_positions"),
    *("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
)


def config_from_settings(settings: Mapping[str, Any]) -> ModelConfig:
    """Turns the contents of a `config.json` into a `course_llm.model.ModelConfig`.

    Args:
        settings: what the file holds.

    Raises:
        ValueError: a kind of model, or a setting of it, that the decoder does not have; or a setting that is
            missing or no number.
    """
    if not isinstance(settings, Mapping):
        raise ValueError(
            f"load_pretrained needs settings by name in config.json, got {type(settings).__name__}"
        )
    for name in SIZES:
        value = settings.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"load_pretrained needs {name} above 0 in config.json, got {value!r}")
    try:
        return _config(settings)
    except KeyError as error:
        raise ValueError(f"load_pretrained needs {error.args[0]} in config.json, it has none") from None
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(
            f"load_pretrained needs numbers where config.json has something else: {error}"
        ) from None


def _config(settings: Mapping[str, Any]) -> ModelConfig:
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
