"""Facts about the decoder: Hugging Face's numbers, the chapters' functions, every cache against none."""

import itertools
import json
import types

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from course_llm import attention, hf, mla
from course_llm.caches import ChunkedCache, GrowingCache, RollingCache, StaticCache
from course_llm.checkpoints import load_model, load_tensors, save_model
from course_llm.compact_caches import PagedCache, QuantizedCache
from course_llm.hf_config import config_from_settings
from course_llm.layers import LatentConfig, rotary_tables, rotate, sinusoids
from course_llm.model import Decoder, ModelConfig, load_bundled
from course_llm.weights import BlockWeights, MLAWeights

BASE = dict(
    vocab_size=61,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
DEEPSEEK = BASE | dict(
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=12,
    v_head_dim=10,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=20,
    first_k_dense_replace=1,
    n_shared_experts=1,
)
YARN = dict(
    rope_type="yarn",
    rope_theta=1e4,
    factor=4.0,
    original_max_position_embeddings=16,
    beta_fast=32,
    beta_slow=1,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=1e4,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
SETTINGS = {
    "gpt2": transformers.GPT2Config(
        vocab_size=61, n_embd=48, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    ),
    "llama": transformers.LlamaConfig(**BASE),
    "llama-3": transformers.LlamaConfig(**BASE, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**BASE, sliding_window=5),
    "qwen2": transformers.Qwen2Config(**BASE),
    "qwen3": transformers.Qwen3Config(**BASE, head_dim=8),
    "v2": transformers.DeepseekV2Config(
        **DEEPSEEK, topk_method="group_limited_greedy", n_group=4, topk_group=2
    ),
    "v2-lite": transformers.DeepseekV2Config(
        **DEEPSEEK | dict(q_lora_rank=None), rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=0.7)
    ),
    "v3": transformers.DeepseekV3Config(
        **DEEPSEEK, n_group=4, topk_group=2, rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0)
    ),
    "v3-halves": transformers.DeepseekV3Config(
        **DEEPSEEK | dict(first_k_dense_replace=3), n_group=1, topk_group=1, rope_interleave=False
    ),
}


def their_model(name: str) -> nn.Module:
    """Builds Hugging Face's model with random weights that are large enough to matter."""
    settings = SETTINGS[name]
    extra = {"experts_implementation": "eager"} if name.startswith("v") else {}
    model = transformers.AutoModelForCausalLM.from_config(
        settings, attn_implementation="sdpa", **extra
    ).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else 0.15 * noise)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def some_ids(batch: int, seq: int, vocab: int = 61) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, seq), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_loss_and_gradients_are_hugging_faces(name):
    theirs = their_model(name)
    ours = hf.from_state_dict(SETTINGS[name].to_dict(), theirs.state_dict())
    ids = some_ids(2, 24)
    want = theirs(ids, labels=ids)
    got = ours(ids)
    # float32 rounding through three layers
    torch.testing.assert_close(got, want.logits, rtol=0, atol=3e-6 * want.logits.abs().max().item())
    loss = F.cross_entropy(got[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss, want.loss)
    loss.backward()
    want.loss.backward()
    theirs_embedding = theirs.get_input_embeddings().weight.grad
    scale = theirs_embedding.abs().max().item()
    torch.testing.assert_close(ours.embedding.weight.grad, theirs_embedding, rtol=0, atol=1e-5 * scale)
    gradients = {
        key: parameter.grad for key, parameter in theirs.named_parameters() if parameter.grad is not None
    }
    converted = hf.from_state_dict(SETTINGS[name].to_dict(), _filled(theirs, gradients))
    for (key, parameter), (_, want_grad) in zip(
        ours.named_parameters(), converted.named_parameters(), strict=True
    ):
        if parameter.grad is not None:
            # a sum over many positions cancels: the error follows the largest entry
            limit = 2e-5 * want_grad.abs().max().item() + 1e-7
            torch.testing.assert_close(parameter.grad, want_grad.detach(), rtol=0, atol=limit, msg=key)


def _filled(model: nn.Module, gradients: dict) -> dict:
    """A state dictionary with gradients in the place of parameters."""
    return {key: gradients.get(key, torch.zeros_like(value)) for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-3", "mistral", "qwen3", "v3-halves"])
def test_float64_agrees_to_rounding(name):
    theirs = their_model(name).double()
    for module in theirs.modules():  # Hugging Face's RMSNorm computes in float32, whatever comes in
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(
                lambda self, x: (
                    self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))
                ),
                module,
            )
    ours = hf.from_state_dict(SETTINGS[name].to_dict(), theirs.state_dict(), torch.float64)
    ids = some_ids(2, 24)
    want = theirs(ids).logits
    torch.testing.assert_close(ours(ids), want, rtol=0, atol=1e-13 * want.abs().max().item())


@pytest.mark.parametrize("name", ["gpt2", "llama-3", "v3"])
def test_loads_what_hugging_face_saves(name, tmp_path):
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path, max_shard_size="100kB")  # several files and an index
    ours = hf.load_pretrained(tmp_path)
    ids = some_ids(1, 12)
    want = theirs(ids).logits
    torch.testing.assert_close(ours(ids), want, rtol=0, atol=3e-6 * want.abs().max().item())
    assert hf.load_pretrained(tmp_path, torch.bfloat16).embedding.weight.dtype == torch.bfloat16


def test_wrong_checkpoints_name_the_tensor(tmp_path):
    settings, tensors = SETTINGS["llama"].to_dict(), their_model("llama").state_dict()
    name = "model.layers.1.self_attn.k_proj.weight"
    missing = {key: value for key, value in tensors.items() if key != name}
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.k_proj\.weight"):
        hf.from_state_dict(settings, missing)
    with pytest.raises(ValueError, match=r"blocks\.1\.attention\.out\.weight"):
        hf.from_state_dict(settings, tensors | {"model.layers.1.self_attn.o_proj.weight": torch.ones(3, 4)})
    with pytest.raises(ValueError, match=r"layers\.0\.extra"):
        hf.from_state_dict(settings, tensors | {"model.layers.0.extra": torch.ones(1)})
    with pytest.raises(ValueError, match="bert"):
        config_from_settings({"model_type": "bert"})
    with pytest.raises(ValueError, match="longrope"):
        config_from_settings(settings | {"rope_parameters": {"rope_type": "longrope"}})
    with pytest.raises(ValueError, match=r"config\.json"):
        hf.load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        hf.load_pretrained(tmp_path)


# -- caches -------------------------------------------------------------------------------------------

SMALL = dict(vocab=61, d_hidden=32, layers=2, heads=4, d_ff=48, context=64)
CONFIGS = {
    "mha": ModelConfig(**SMALL, feed_forward="gelu", norm="layer", positions="learned", biases=True),
    "gqa": ModelConfig(**SMALL, kv_heads=2, qk_norm=True),
    "mqa": ModelConfig(**SMALL, kv_heads=1, positions="sinusoidal", tied=False),
    "window": ModelConfig(**SMALL, kv_heads=2, window=4),
    "mla": ModelConfig(**SMALL, latent=LatentConfig(d_c=12, d_cq=20, rope_dim=4, value_dim=6)),
    "mla without query compression": ModelConfig(
        **SMALL, latent=LatentConfig(d_c=4, rope_dim=4, value_dim=8)
    ),
}
CACHES = {
    "growing": lambda config: GrowingCache(config, 2, torch.float64),
    "chunked": lambda config: ChunkedCache(config, 2, torch.float64, chunk=3),
    "static": lambda config: StaticCache(config, 2, 16, torch.float64),
    "fixed": lambda config: StaticCache(config, 2, 16, torch.float64, fixed=True),
    "rolling": lambda config: RollingCache(config, 2, torch.float64, window=config.window or 16),
    "paged": lambda config: PagedCache(config, 2, pages=10, page_size=3, dtype=torch.float64),
}


def random_model(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Decoder:
    model = Decoder(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else 0.2 * noise)
    return model


def splits(total: int) -> list[list[int]]:
    """All ways to cut `total` tokens into chunks."""
    cuts = itertools.product([False, True], repeat=total - 1)
    found = []
    for choice in cuts:
        sizes, size = [], 1
        for cut in choice:
            if cut:
                sizes.append(size)
                size = 0
            size += 1
        found.append([*sizes, size])
    return found


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_cached_equals_full_for_every_split(name, kind):
    model = random_model(CONFIGS[name])
    ids = some_ids(2, 7)
    want = model(ids)
    cache = CACHES[kind](CONFIGS[name])
    for sizes in splits(7):
        cache.reset()
        parts = [model(chunk, cache) for chunk in ids.split(sizes, dim=1)]
        # float64 through two layers, summed in another order
        torch.testing.assert_close(torch.cat(parts, dim=1), want, rtol=0, atol=1e-11)
        assert int(cache.length) == 7


@pytest.mark.parametrize("kind", CACHES)
@torch.no_grad()
def test_padded_rows_are_what_they_are_alone(kind):
    """A prompt of three tokens beside one of six: left padding changes neither logits nor positions."""
    for name in ("gqa", "mla", "mha", "window"):
        model = random_model(CONFIGS[name])
        ids = some_ids(2, 9)
        real = torch.ones(2, 16, dtype=torch.bool)
        real[0, :3] = False
        cache = CACHES[kind](CONFIGS[name])
        parts = []
        for chunk in ids.split([6, 1, 2], dim=1):
            end = int(cache.length) + chunk.shape[1]
            parts.append(model(chunk, cache, real if kind == "fixed" else real[:, :end]))
        got = torch.cat(parts, dim=1)
        torch.testing.assert_close(got[0, 3:], model(ids[:1, 3:])[0], rtol=0, atol=1e-11)
        torch.testing.assert_close(got[1], model(ids[1:])[0], rtol=0, atol=1e-11)
        torch.testing.assert_close(model(ids, real=real[:, :9])[0, 3:], got[0, 3:], rtol=0, atol=1e-11)


@torch.no_grad()
def test_quantised_cache_is_near_and_small():
    config = CONFIGS["gqa"]
    model = random_model(config, torch.float32)
    ids = some_ids(2, 12)
    want = model(ids)
    for sizes in ([12], [5, 1, 6], [1] * 12):
        cache = QuantizedCache(config, 2, 12, torch.float16)
        got = torch.cat([model(chunk, cache) for chunk in ids.split(sizes, dim=1)], dim=1)
        assert (
            0 < (got - want).abs().max() < 0.03 * want.abs().max()
        )  # int8: a step is 1/127 of the largest entry
    per_number = 1 + 2 / 8  # int8, and a float16 scale for 8 of them
    assert cache.cache_bytes == 2 * 2 * config.layers * 2 * 12 * 8 * per_number
    with pytest.raises(ValueError, match="max_seq=12"):
        model(ids[:, :1], cache)


def test_memory_is_what_the_formula_says():
    config = CONFIGS["gqa"]
    numbers = 2 * config.layers * 2 * 2 * 8  # keys and values, layers, batch, kv heads, head width
    assert StaticCache(config, 2, 10, torch.float16).cache_bytes == numbers * 10 * 2
    assert RollingCache(config, 2, torch.float32, window=5).cache_bytes == numbers * 5 * 4
    latent = CONFIGS["mla"]
    assert StaticCache(latent, 1, 10, torch.float32).cache_bytes == latent.layers * 10 * (12 + 4) * 4
    assert GrowingCache(config, 2).cache_bytes == 0


@pytest.mark.parametrize("kind", ["growing", "chunked", "static", "paged", "fixed"])
@torch.no_grad()
def test_crop_and_select(kind):
    config = CONFIGS["gqa"]
    model, ids = random_model(config), some_ids(2, 9)
    cache = CACHES[kind](config)
    model(ids[:, :6], cache)
    cache.crop(4)
    rows = torch.tensor([1, 1])
    cache.select(rows)
    got = model(ids[rows][:, 4:], cache)
    torch.testing.assert_close(got, model(ids[rows])[:, 4:], rtol=0, atol=1e-11)


@torch.no_grad()
def test_paged_cache_takes_and_returns_pages():
    config = CONFIGS["gqa"]
    model, ids = random_model(config), some_ids(2, 9)
    cache = PagedCache(config, 2, pages=6, page_size=3, dtype=torch.float64)
    model(ids[:, :4], cache)
    assert cache.free_pages == 2
    cache.crop(3)
    assert cache.free_pages == 4
    cache.select(torch.tensor([0]))
    assert cache.free_pages == 5
    with pytest.raises(ValueError, match="free pages"):
        cache.select(torch.tensor([0] * 7))
    assert cache.free_pages == 5 and cache.batch == 1
    with pytest.raises(ValueError, match="batch=1"):
        model(ids[:, 3:], cache)
    model(ids[:1, 3:], cache)
    with pytest.raises(ValueError, match="free pages"):
        model(some_ids(1, 10), cache)


def test_caches_refuse_what_does_not_fit():
    config = CONFIGS["gqa"]
    model = random_model(config)
    cache = StaticCache(config, 1, 4, torch.float64)
    with pytest.raises(ValueError, match="max_seq=4"):
        model(some_ids(1, 5), cache)
    with pytest.raises(ValueError, match="length=3"):
        cache.crop(3)
    with pytest.raises(ValueError, match="batch=0"):
        GrowingCache(config, 0)
    with pytest.raises(ValueError, match="window=None"):
        RollingCache(config, 1)
    with pytest.raises(ValueError, match="crop"):
        RollingCache(config, 1, window=3).crop(2)
    with pytest.raises(ValueError, match="page_size=0"):
        PagedCache(config, 1, 1, 0)
    with pytest.raises(ValueError, match="max_seq=0"):
        QuantizedCache(config, 1, 0)


# -- the decoder --------------------------------------------------------------------------------------


def test_block_is_the_chapters_block():
    config = ModelConfig(**SMALL, feed_forward="gelu", norm="layer", positions="learned", biases=False)
    block = random_model(config).blocks[0]
    q, k, v = block.attention.qkv.weight.T.chunk(3, dim=1)
    weights = BlockWeights(
        block.norm1.weight,
        block.norm1.bias,
        q,
        k,
        v,
        block.attention.out.weight.T,
        block.norm2.weight,
        block.norm2.bias,
        block.feed_forward.up.weight.T,
        torch.zeros(48, dtype=torch.float64),
        block.feed_forward.down.weight.T,
        torch.zeros(32, dtype=torch.float64),
    )
    from course_llm.layers import Step

    x = torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(block(x, Step()), attention.decoder_block(x, weights, heads=4))


def test_positions_are_the_chapters_positions():
    positions = torch.tensor([[0, 3, 1], [7, 2, 40]])
    x = torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = rotary_tables(positions, 8, 10000.0, None, torch.float32)
    torch.testing.assert_close(
        rotate(x, cos, sin), attention.apply_rope(x, positions[:, None].expand(2, 4, 3))
    )
    torch.testing.assert_close(
        sinusoids(torch.arange(9), 16, torch.float32), attention.sinusoidal_positions(9, 16)
    )


def test_latent_layer_is_the_chapters_attention():
    """With norms of scale 1 on latents of root mean square 1 the layer is the chapter's naive form."""
    config = ModelConfig(**SMALL, latent=LatentConfig(d_c=8, rope_dim=4, value_dim=8))
    model = random_model(config)
    layer = model.blocks[0].attention
    layer.kv_norm = nn.Identity()
    down = layer.kv_down.weight.T
    q = layer.q_up.weight.T.unflatten(1, (4, 12))
    kv = layer.kv_up.weight.T.unflatten(1, (4, 16))
    weights = MLAWeights(
        w_q=q[..., :8].flatten(1),
        w_qr=q[..., 8:].flatten(1),
        w_dkv=down[:, :8],
        w_kr=down[:, 8:],
        w_uk=kv[..., :8].flatten(1),
        w_uv=kv[..., 8:].flatten(1),
        w_o=layer.out.weight.T,
        heads=4,
    )
    x = torch.randn(2, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    step = model._plan(torch.zeros(2, 6, dtype=torch.int64), None, None, None, torch.float64)[1]
    # the model's angles are float32 numbers
    torch.testing.assert_close(layer(x, step), mla.latent_attention(x, weights), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_documents_do_not_see_each_other():
    model = random_model(CONFIGS["gqa"])
    ids = some_ids(1, 10)
    documents = torch.tensor([[0] * 4 + [1] * 6])
    got = model(ids, document_ids=documents)
    torch.testing.assert_close(got[:, :4], model(ids[:, :4]), rtol=0, atol=1e-11)
    # rotary scores depend on distances alone, so a document may start anywhere
    torch.testing.assert_close(got[:, 4:], model(ids[:, 4:]), rtol=0, atol=1e-5)


def test_last_only_is_the_last_row():
    model = random_model(CONFIGS["mha"])
    ids = some_ids(2, 6)
    torch.testing.assert_close(model(ids, last_only=True), model(ids)[:, -1:])


def test_seed_decides_the_weights():
    config = CONFIGS["gqa"]
    first, again, other = Decoder(config, seed=1), Decoder(config, seed=1), Decoder(config, seed=2)
    assert torch.equal(first.embedding.weight, again.embedding.weight)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    assert first.embedding.weight.detach().std() == pytest.approx(0.02, rel=0.1)
    assert first.blocks[0].attention.out.weight.detach().std() == pytest.approx(
        0.02 / (2 * 2) ** 0.5, rel=0.1
    )


def test_decoder_and_training_step_run_on_the_meta_device():
    for name in ("gqa", "mla"):
        model = Decoder(CONFIGS[name], device="meta")
        ids = torch.zeros(2, 8, dtype=torch.int64, device="meta")
        cache = StaticCache(CONFIGS[name], 2, 16, device="meta", fixed=True)
        model(ids, cache)
        logits = model(ids[:, :1], cache)
        assert logits.device.type == "meta" and logits.shape == (2, 1, 61)
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        torch.optim.AdamW(model.parameters()).step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_stays_near_float32(dtype):
    for name in ("gqa", "mla", "mha"):
        model = random_model(CONFIGS[name], torch.float32)
        ids = some_ids(2, 8)
        want = model(ids)
        got = model.to(dtype)(ids)
        assert got.dtype == dtype
        bound = {torch.float16: 0.02, torch.bfloat16: 0.12}[dtype]  # a few roundings per layer
        assert (got.float() - want).abs().max() < bound * want.abs().max()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 3}, "heads"),
        ({"kv_heads": 3}, "kv_heads=3"),
        ({"layers": 0}, "layers=0"),
        ({"window": 0}, "window=0"),
        ({"norm": "batch"}, "norm=batch"),
        ({"positions": "none"}, "positions=none"),
        ({"feed_forward": "relu"}, "feed_forward=relu"),
        ({"head_dim": 7}, "head_dim=7"),
    ],
)
def test_configuration_refuses_nonsense(changes, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig(**SMALL | changes)


def test_learned_positions_end_with_the_context():
    with pytest.raises(ValueError, match="context=64"):
        Decoder(CONFIGS["mha"])(some_ids(1, 65))


def test_saved_models_come_back(tmp_path):
    path = tmp_path / "model.safetensors"
    for name in ("gqa", "mqa", "mla"):
        model = random_model(CONFIGS[name], torch.float32)
        save_model(path, model, torch.float32, note="x")
        again = load_model(path)
        assert again.config == model.config and load_tensors(path)[1]["note"] == "x"
        assert torch.equal(again(some_ids(1, 5)), model(some_ids(1, 5)))
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    with pytest.raises(ValueError, match="ends within tensor"):
        load_model(path)
    path.write_bytes(b"no model")
    with pytest.raises(ValueError, match="header"):
        load_model(path)


@torch.no_grad()
def test_bundled_model_writes_like_a_medical_dictionary():
    model, tokenizer = load_bundled()
    assert 1_000_000 < model.parameter_count() < 1_100_000
    text = "cardiomyopathy: A disease of the heart muscle."
    ids = torch.tensor([[tokenizer.eos_id, *tokenizer.encode(text)]])
    nll = F.cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction="sum")
    assert nll / torch.log(torch.tensor(2.0)) / len(text) < 1.6  # bits per byte of one short text
