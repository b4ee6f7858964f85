"""One attention step of one new token, fast form against plain form: `python -m benchmarks.attention_steps [--rounds 7] [--json FILE]`.

MLA: a layer of DeepSeek-V2-Lite's shape (width 2048, 16 heads, latent 512, rotary key 64), with its projections and its latent
cache, against the same layer that expands all cached latents to keys and values at every step; weights laid out alike.
GQA: attention of one query per head over cached keys and values, `course_llm.layers.attend` against `repeat_interleave` of
keys and values before PyTorch's own `scaled_dot_product_attention`. Results are compared before they are timed. Batch 1, float32.
Elements of the caches are counted in the tensors that they hold.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import measure
from course_llm.caches import StaticCache
from course_llm.latent_layer import LatentAttention
from course_llm.layers import LatentConfig, Step, attend, rotary_tables
from course_llm.model import ModelConfig
from course_llm.prepack import prepack_weights

MLA = ModelConfig(
    vocab=8,
    d_hidden=2048,
    layers=1,
    heads=16,
    d_ff=8,
    context=32_768,
    head_dim=128,
    latent=LatentConfig(d_c=512, d_cq=None, rope_dim=64, value_dim=128),
)
CONTEXTS = {1024: 12.0, 4096: 35.0, 16_384: 60.0}  # tokens: bar
GROUPED = {  # heads, key-value heads, head_dim, tokens
    "Llama 3 8B": (32, 8, 128, 4096),
    "Llama 3 70B": (64, 8, 128, 4096),
    "32 heads in groups of 16": (32, 2, 128, 4096),
}
AGREE = dict(rtol=1e-4, atol=1e-5)


class ExpandingAttention(LatentAttention):
    """Latent attention that always makes keys and values first."""

    def _absorbing_is_cheaper(self, queries: int) -> bool:
        return False


def latent_step(tokens: int, rounds: int) -> measure.Result:
    """Times one step of both layers with so many tokens in the cache, the new one included."""
    generator = torch.Generator().manual_seed(0)
    fast, plain = LatentAttention(MLA, 0), ExpandingAttention(MLA, 0)
    for parameter in fast.parameters():
        if parameter.ndim == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
    plain.load_state_dict(fast.state_dict())
    fast, plain = prepack_weights(fast, 1), prepack_weights(plain, 1)
    cache = StaticCache(MLA, 1, tokens)
    for held in (cache.keys[0], cache.values[0]):
        held.copy_(torch.randn(held.shape, generator=generator))
    measure.count("cache elements", cache.cache_bytes // 4, tokens * (512 + 64))
    x = torch.randn(1, 1, MLA.d_hidden, generator=generator)
    cos, sin = rotary_tables(torch.tensor([[tokens - 1]]), 64, 10_000.0, None, torch.float32)

    def step(layer: LatentAttention) -> Tensor:
        cache.length = tokens - 1
        return layer(x, Step(cos, sin, causal=False, cache=cache))

    torch.testing.assert_close(step(fast), step(plain), **AGREE)
    ways = {"expanded": lambda: step(plain), "absorbed": lambda: step(fast)}
    seconds = measure.interleave(ways, rounds, least_s=0.05)
    return measure.compare(f"MLA layer, {tokens} tokens", seconds, "expanded", "absorbed", CONTEXTS[tokens])


def grouped_step(name: str, rounds: int) -> measure.Result:
    """Times attention of one query per head with keys and values shared and repeated."""
    heads, pairs, dim, tokens = GROUPED[name]
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, 1, dim, generator=generator)
    k, v = (torch.randn(1, pairs, tokens, dim, generator=generator) for _ in range(2))

    def repeated() -> Tensor:
        times = heads // pairs
        return F.scaled_dot_product_attention(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))

    def shared() -> Tensor:
        return attend(q, k, v, Step(causal=False), dim**-0.5)

    torch.testing.assert_close(shared(), repeated(), **AGREE)
    seconds = measure.interleave({"repeated": repeated, "shared": shared}, rounds, least_s=0.05)
    note = f"{heads} heads, {pairs} key-value heads, {tokens} tokens"
    return measure.compare(f"GQA, {name}", seconds, "repeated", "shared", 18.0, note=note)


@torch.no_grad()
def main() -> None:
    """Times all, counts the elements of a latent cache."""
    arguments = measure.parser(__doc__).parse_args()
    measure.one_thread()
    results = [latent_step(tokens, arguments.rounds) for tokens in CONTEXTS]
    held = StaticCache(MLA, 1, 64).cache_bytes // 4
    results.append(
        measure.count("MLA, cache elements per token and layer", held // 64, 512 + 64, "d_c + d_r")
    )
    results += [grouped_step(name, arguments.rounds) for name in GROUPED]
    measure.finish(results, arguments.json)


if __name__ == "__main__":
    main()
