"""`python -m benchmarks.gpu`: says in one line that there is no GPU, and runs the same code small on a CPU."""

import json
import sys

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(run):
    done = run(sys.executable, "-m", "benchmarks.gpu")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "no CUDA device" in done.stderr


def test_all_figures_come_on_a_cpu_too(run, tmp_path):
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--no-compile"]
    done = run(*command, "--json", path)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    names = [figure["measure"] for figure in found["figures"]]
    for words in (
        "bandwidth",
        "decoding, batch 1, captured",
        "prefill",
        "latent attention",
        "grouped queries",
    ):
        assert any(words in name for name in names), words
    for words in ("sampling", "training step", "cross-entropy, chunked", "cache, latent, int8"):
        assert any(words in name for name in names), words
    assert all(figure["value"] > 0 for figure in found["figures"])
    assert found["environment"]["torch"] == torch.__version__
    assert len(done.stdout.splitlines()) == len(names) + 1
