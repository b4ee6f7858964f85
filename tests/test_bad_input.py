"""Wrong files and wrong arguments: one clear ValueError, and what was on the disk stays whole."""

import itertools
import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch
from torch import nn

from course_llm import hf, pretraining
from course_llm.checkpoints import config_from_dict, fill, load_model, load_tensors, save_model, save_tensors
from course_llm.hf_config import config_from_settings
from course_llm.model import Decoder, ModelConfig
from course_llm.training_step import Objective, make_optimizer, training_step

CONFIG = ModelConfig(61, 16, 1, 2, 24, 32, kv_heads=1)
LLAMA = dict(
    model_type="llama",
    vocab_size=61,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=24,
    max_position_embeddings=32,
    rms_norm_eps=1e-6,
)
DEEPSEEK = LLAMA | dict(
    model_type="deepseek_v3",
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    n_group=2,
    topk_group=1,
)
GPT2 = dict(model_type="gpt2", vocab_size=61, n_embd=16, n_layer=1, n_head=2, n_positions=32)


@pytest.fixture(autouse=True)
def untyped():
    """Without the run-time type checks of the test run, which would speak first: a user does not have them."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


# -- files --------------------------------------------------------------------------------------------


def test_a_file_cut_anywhere_names_the_first_tensor_that_is_not_whole(tmp_path):
    path = tmp_path / "model.safetensors"
    save_model(path, Decoder(CONFIG), torch.float32)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    ends = sorted(
        (entry["data_offsets"][1], name) for name, entry in header.items() if name != "__metadata__"
    )
    for kept in range(0, len(data), 97):
        path.write_bytes(data[:kept])
        with pytest.raises(ValueError) as error:
            load_model(path)
        if kept < 8 + length:
            assert "header" in str(error.value)
        else:
            first = next(name for end, name in ends if 8 + length + end > kept)
            assert f"ends within tensor {first}" in str(error.value)


def test_a_damaged_header_is_a_value_error(tmp_path):
    path = tmp_path / "model.safetensors"
    save_model(path, Decoder(CONFIG), torch.float32)
    data, generator = path.read_bytes(), random.Random(0)
    (length,) = struct.unpack("<Q", data[:8])
    refused = 0
    for _ in range(300):
        broken = bytearray(data)
        for _ in range(generator.randint(1, 3)):
            broken[generator.randrange(8 + length)] = generator.randrange(256)
        path.write_bytes(bytes(broken))
        try:
            load_model(path)
        except ValueError as error:
            refused += 1
            assert str(error) and "\n" not in str(error)
    assert refused > 250


@pytest.mark.parametrize(
    "header", ["[]", "3", "null", '{"a": 1}', '{"a": {}}', '{"a": {"data_offsets": [0]}}', "[" * 3000]
)
def test_a_header_of_another_make_is_refused(header, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode())
    with pytest.raises(ValueError, match="header is broken"):
        load_tensors(path)


@pytest.mark.parametrize(
    "config",
    [
        3,
        [],
        {"vocab": 5},
        {"latent": {"d_x": 3}},
        {"experts": {"experts": 2}},
        {"rope_scaling": {}},
        {"heads": "two"},
    ],
)
def test_a_configuration_of_another_make_is_refused(config, tmp_path):
    if isinstance(config, dict) and len(config) == 1 and "vocab" not in config:
        whole = dict(vocab=5, d_hidden=8, layers=1, heads=2, d_ff=8, context=8)
        config = whole | config
    with pytest.raises(ValueError, match="needs"):
        config_from_dict(config)
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.ones(1)}, {"config": config})
    with pytest.raises(ValueError):
        load_model(path)


@pytest.mark.parametrize("settings", [LLAMA, DEEPSEEK, GPT2], ids=lambda settings: settings["model_type"])
def test_a_missing_setting_is_named(settings):
    config_from_settings(settings)
    optional = ("num_key_value_heads",)
    for name in set(settings) - {"model_type", *optional}:
        with pytest.raises(ValueError, match=f"{name} in config.json"):
            config_from_settings({key: value for key, value in settings.items() if key != name})
        for wrong in ("many", None, [1], -1):
            with pytest.raises(ValueError):
                config_from_settings(settings | {name: wrong})
    for wrong in ([], "llama", None):
        with pytest.raises(ValueError, match="by name"):
            config_from_settings(wrong)


def test_a_folder_with_a_wrong_index_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    index = tmp_path / "model.safetensors.index.json"
    for content, words in (("[]", "weight_map"), ("{}", "weight_map"), ("{", "JSON")):
        index.write_text(content)
        with pytest.raises(ValueError, match=words):
            hf.load_pretrained(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors"}}))
    with pytest.raises(ValueError, match=r"part-1\.safetensors"):
        hf.load_pretrained(tmp_path)


def test_integers_in_the_place_of_weights_are_refused_and_nothing_is_copied():
    model = nn.Linear(2, 3)
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match="tensor bias of a float dtype"):
        fill(model, {"weight": torch.zeros(3, 2), "bias": torch.zeros(3, dtype=torch.int64)}, "a file")
    assert torch.equal(model.weight, before)


# -- a crash while saving -----------------------------------------------------------------------------

CRASH = """
import os, sys
import torch
from course_llm import checkpoints, pretraining
from torch import nn
at, kind, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
calls = 0
def counted(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == at:
            os._exit(9)  # as a killed process: no finally, no flush
        return function(*args, **kwargs)
    return call
os.fsync, os.replace = counted(os.fsync), counted(os.replace)
if kind == "tensors":
    checkpoints.save_tensors(path, {"a": torch.zeros(1000)}, {"step": 2})
else:
    model = nn.Linear(20, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    pretraining.save_checkpoint(path, model, optimizer, 2, torch.Generator())
"""


@pytest.mark.parametrize("kind", ["tensors", "checkpoint"])
def test_a_process_killed_while_saving_leaves_the_old_file_whole(kind, tmp_path):
    path = tmp_path / "state"
    model, generator = nn.Linear(20, 20), torch.Generator()
    optimizer = torch.optim.AdamW(model.parameters())
    if kind == "tensors":
        save_tensors(path, {"a": torch.ones(1000)}, {"step": 1})
    else:
        pretraining.save_checkpoint(path, model, optimizer, 1, generator)
    before = path.read_bytes()
    for at in (1, 2):  # before the data are on the disk; before the new name
        done = subprocess.run(
            [sys.executable, "-c", CRASH, str(at), kind, str(path)], capture_output=True, text=True
        )
        assert done.returncode == 9, done.stderr
        assert path.read_bytes() == before
    done = subprocess.run([sys.executable, "-c", CRASH, "0", kind, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if kind == "tensors":
        assert load_tensors(path)[1]["step"] == 2
    else:
        assert pretraining.load_checkpoint(path, model, optimizer, generator) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="was not written"):
        save_tensors(tmp_path / "x", {"a": torch.ones(1)})


# -- arguments ----------------------------------------------------------------------------------------


def test_ids_outside_the_vocabulary_and_masks_of_another_shape_are_refused():
    model = Decoder(CONFIG)
    ids = torch.tensor([[1, 2, 3]])
    for wrong, span in (([[1, 61]], "1 to 61"), ([[-1, 2]], "-1 to 2")):
        with pytest.raises(ValueError, match=f"vocab=61, got {span}"):
            model(torch.tensor(wrong))
    for shape in ((1, 2), (2, 3)):
        with pytest.raises(ValueError, match="1 rows and 3 tokens"):
            model(ids, real=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match="document_ids like ids"):
        model(ids, document_ids=ids[:, :2])
    for wrong in (ids[0], ids.float()):
        with pytest.raises(ValueError, match="whole numbers"):
            model(wrong)
    objective = Objective(model)
    with pytest.raises(ValueError, match="one target per row"):
        objective(ids, ids[:, :2])
    with pytest.raises(ValueError, match="target=61"):
        objective(ids, torch.tensor([[1, 2, 61]]))


def test_a_training_step_needs_a_batch_and_a_bound():
    model = Decoder(CONFIG)
    ids = torch.tensor([[1, 2, 3]])
    optimizer = make_optimizer(model, 1e-3)
    for batches, clip in itertools.product([[], [(ids, ids)]], [0.0, 1.0]):
        if not batches or not clip:
            with pytest.raises(ValueError, match="training_step needs"):
                training_step(Objective(model), model.parameters(), optimizer, batches, clip)


def test_the_project_has_no_pickle_in_its_own_files():
    """Weights are read as safetensors, or by `torch.load` with `weights_only`: a file can't run code."""
    package = Path(hf.__file__).parent
    for path in package.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "import pickle" not in text, path
        assert text.count("torch.load(") == text.count("weights_only=True"), path
