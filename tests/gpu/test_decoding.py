"""Decoding as a GPU wants it: a captured graph gives the eager tokens, and caches take the memory of their formulas."""

import pytest
import torch

from benchmarks.gpu import TINY, Bench
from course_llm.caches import GrowingCache, StaticCache
from course_llm.generation import make_cache
from course_llm.layers import LatentConfig
from course_llm.model import Decoder, ModelConfig
from tests.test_devices import CONFIGS, half, some_ids

NEW = 6


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_captured_decoding_writes_the_eager_tokens(name, device):
    """The graph is recorded once, at one position, and replayed at all others."""
    model = half(Decoder(CONFIGS[name]), torch.float32).to(device)
    ids = some_ids(2, 5).to(device)
    eager, text = StaticCache(CONFIGS[name], 2, 24, device=device, fixed=True), []
    logits = model(ids, eager, last_only=True)
    for _ in range(NEW):
        text.append(logits[:, -1].argmax(-1))
        logits = model(text[-1][:, None], eager, last_only=True)

    cache = StaticCache(CONFIGS[name], 2, 24, device=device, fixed=True)
    new = torch.zeros(2, 1, dtype=torch.int64, device=device)

    def step() -> None:
        new.copy_(model(new, cache, last_only=True)[:, -1].argmax(-1, keepdim=True))

    replay = Bench(device.type, TINY).capture(step)  # on a CPU the step itself
    cache.reset()
    new.copy_(model(ids, cache, last_only=True)[:, -1].argmax(-1, keepdim=True))
    got = [new[:, 0].clone()]
    for _ in range(NEW - 1):
        replay()
        got.append(new[:, 0].clone())
    assert torch.equal(torch.stack(got), torch.stack(text))


MEASURED = {
    "grouped": ModelConfig(61, 256, 3, 4, 64, 1024, kv_heads=2),  # 3 layers, 2 heads of 64
    "latent": ModelConfig(61, 256, 3, 4, 64, 1024, latent=LatentConfig(d_c=64, rope_dim=32, value_dim=32)),
}
NUMBERS = {"grouped": 2 * 2 * 64, "latent": 64 + 32}  # per token and layer


@pytest.mark.parametrize("name", MEASURED)
def test_caches_take_the_memory_of_their_formulas(name, cuda):
    """torch.cuda.memory_allocated, to the byte; every tensor here is a multiple of the allocator's 512 bytes."""
    config, numbers = MEASURED[name], NUMBERS[name]
    model = Decoder(config, device="meta")
    batch, room, layers = 4, 512, config.layers
    wanted = {
        "static": layers * batch * room * numbers * 2,
        "fixed": layers * batch * room * numbers * 2 + 512,  # and its position
        "rolling": layers * batch * room * numbers * 2,
        "paged": layers * batch * room * numbers * 2,
        "int8": layers * batch * room * (numbers + 2 * (2 if name == "grouped" else 1) * 2),  # float16 scales
    }
    for kind, bytes_wanted in wanted.items():
        before = torch.cuda.memory_allocated(cuda)
        cache = make_cache(kind, model, batch, room, torch.float16, cuda)
        assert torch.cuda.memory_allocated(cuda) - before == bytes_wanted, kind
        del cache
    before = torch.cuda.memory_allocated(cuda)
    cache = GrowingCache(config, batch, torch.float16, cuda)
    shape = (batch, cache.kv_heads, 128)
    for layer in range(layers):
        k = torch.zeros(*shape, cache.key_dim, dtype=torch.float16, device=cuda)
        v = torch.zeros(*shape, cache.value_dim, dtype=torch.float16, device=cuda)
        cache.update(layer, k, v)
    del k, v
    assert torch.cuda.memory_allocated(cuda) - before == layers * batch * 128 * numbers * 2


def test_training_loss_holds_no_logits(cuda):
    """The peak of memory above inputs and gradients is far below the logits of all rows."""
    from course_llm.loss import chunked_cross_entropy

    n, width, vocab = 8192, 64, 32768
    hidden = torch.randn(n, width, device=cuda, requires_grad=True)
    weight = torch.randn(vocab, width, device=cuda, requires_grad=True)
    targets = torch.randint(0, vocab, (n,), device=cuda)
    chunked_cross_entropy(hidden, weight.T, targets, 256).backward()
    hidden.grad = weight.grad = None
    before = torch.cuda.memory_allocated(cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    chunked_cross_entropy(hidden, weight.T, targets, 256).backward()
    assert torch.cuda.max_memory_allocated(cuda) - before < n * vocab * 4 / 4
