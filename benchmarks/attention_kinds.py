"""Trains decoders of equal size that differ in their attention alone, several seeds each, and writes what they reach.

    python benchmarks/attention_kinds.py [--seeds 5] [--tokens 400000]

The results are data of the package, `src/course_llm/data/attention_kinds.json`, one entry per run; runs that are there
already are not repeated. The chapter on latent attention draws them, in a clone or with the package alone.
"""

import argparse
import dataclasses
import json
import time

import torch

from course_llm import corpus
from course_llm.layers import LatentConfig
from course_llm.mla import cache_elements_per_token
from course_llm.model import Decoder, ModelConfig
from course_llm.recipe import Recipe, Training
from course_llm.tokenizer import load_tokenizer
from course_llm.trainer import Trainer

RESULTS = corpus.DATA / "attention_kinds.json"
HEADS, HEAD_DIM, ROPE_DIM = 6, 16, 8
KINDS = {  # arguments of ModelConfig, and of cache_elements_per_token
    "MHA": ({}, {"kind": "mha"}),
    "GQA, 2 groups": ({"kv_heads": 2}, {"kind": "gqa", "groups": 2}),
    "MQA": ({"kv_heads": 1}, {"kind": "mqa"}),
    "MLA, 56 + 8": (
        {"latent": LatentConfig(56, None, ROPE_DIM, HEAD_DIM)},
        {"kind": "mla", "d_c": 56, "d_r": 8},
    ),
    "MLA, 24 + 8": (
        {"latent": LatentConfig(24, None, ROPE_DIM, HEAD_DIM)},
        {"kind": "mla", "d_c": 24, "d_r": 8},
    ),
}
BASE = ModelConfig(
    vocab=load_tokenizer().vocab,
    d_hidden=HEADS * HEAD_DIM,
    layers=3,
    heads=HEADS,
    d_ff=4 * HEADS * HEAD_DIM,
    context=128,
    head_dim=HEAD_DIM,
    feed_forward="gelu",
)


def equal_config(kind: str) -> ModelConfig:
    """The configuration of a kind, its feed-forward width chosen so that all have the parameters of MHA."""
    wanted = Decoder(BASE, device="meta").parameter_count()
    config = dataclasses.replace(BASE, **KINDS[kind][0])
    missing = wanted - Decoder(config, device="meta").parameter_count()
    more = round(missing / (config.layers * 2 * config.d_hidden))
    return dataclasses.replace(config, d_ff=config.d_ff + more)


def train(kind: str, seed: int, tokens: int) -> dict:
    """Trains one model and says what it is and what it reaches."""
    config = equal_config(kind)
    training = Training(
        seed=seed, tokens=tokens, warmup_steps=100, precision="bfloat16", validate_every=10**9
    )
    start = time.perf_counter()
    result = Trainer(Recipe(config, training)).run()
    return {
        "kind": kind,
        "seed": seed,
        "tokens": tokens,
        "parameters": result.model.parameter_count(),
        "d_ff": config.d_ff,
        "elements_per_token": cache_elements_per_token(heads=HEADS, head_dim=HEAD_DIM, **KINDS[kind][1]),
        "validation_bits_per_byte": result.validation_bits_per_byte,
        "elapsed_s": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    """Runs what is missing, one seed of every kind at a time."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=400_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for seed in range(1, arguments.seeds + 1):
        for kind in KINDS:
            if any((r["kind"], r["seed"], r["tokens"]) == (kind, seed, arguments.tokens) for r in runs):
                continue
            runs.append(train(kind, seed, arguments.tokens))
            print(json.dumps(runs[-1]), flush=True)
            RESULTS.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
