"""`course-llm pretrain` killed with SIGKILL ten times, and on a disk that is full: no file is ever half, no weight differs.

The command runs in processes that one parent forks, so that torch is imported once; every one of them calls the command's `main`.
"""

import json
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch

from course_llm import corpus
from course_llm.checkpoints import load_tensors
from course_llm.trainer import pretrain_from_recipe
from tests.conftest import ROOT
from tests.test_trainer import RECIPE

# Forks the command once per line of its input, a JSON list [arguments, how it ends]; answers with its exit status and what it said.
#   null: by itself; ["step", n, s]: SIGKILL once the checkpoint is at step n, after s more seconds;
#   ["write", n, place]: SIGKILL by its own hand in the n-th checkpoint that it writes; ["limit", bytes]: no file may grow larger.
PARENT = """
import json, os, resource, signal, sys, time
import torch
from course_llm import checkpoints
from course_llm.trainer import main

torch.set_num_threads(1)
die = lambda: os.kill(os.getpid(), signal.SIGKILL)

class Half:
    def __init__(self, file): self.file = file
    def __enter__(self): return self
    def __exit__(self, *rest): self.file.close()
    def __getattr__(self, name): return getattr(self.file, name)
    def write(self, data):
        self.file.write(data[: len(data) // 2]); self.file.flush(); die()

def die_in_write(number, place):
    checkpoint = lambda path: "checkpoint" in str(path)
    count = [0]
    real_open, real_replace, real_fsync = checkpoints.Path.open, os.replace, os.fsync
    def opened(path, mode="r", *rest, **more):
        file = real_open(path, mode, *rest, **more)
        if mode == "wb" and checkpoint(path):
            count[0] += 1
            if count[0] == number and place == "half":
                return Half(file)
        return file
    def replace(old, new):
        if checkpoint(new) and count[0] == number and place == "before the rename": die()
        real_replace(old, new)
        if checkpoint(new) and count[0] == number and place == "after the rename": die()
    def fsync(descriptor):
        if count[0] == number and place == "before the flush": die()
        real_fsync(descriptor)
    checkpoints.Path.open, os.replace, os.fsync = opened, replace, fsync

def step(folder):
    try: return checkpoints.load_tensors(folder + "/checkpoint.safetensors")[1]["step"]
    except ValueError as error:
        assert "No such file" in str(error), error  # whole at every moment
        return -1

for line in sys.stdin:
    arguments, end = json.loads(line)
    said, saying = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(saying, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        if end and end[0] == "write": die_in_write(*end[1:])
        if end and end[0] == "limit": resource.setrlimit(resource.RLIMIT_FSIZE, (end[1], end[1]))
        status = 99
        try: status = main(arguments)
        finally:
            sys.stderr.flush(); os._exit(status)
    os.close(saying)
    if end and end[0] == "step":
        while os.waitpid(child, os.WNOHANG) == (0, 0) and step(arguments[2]) < end[1]: time.sleep(0.003)
        time.sleep(end[2]); os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    print(json.dumps([os.waitstatus_to_exitcode(status), open(said).read()]), flush=True)
"""


@pytest.fixture
def recipe_path(tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join(corpus.documents()[:300]), encoding="utf-8")
    path = tmp_path / "recipe.toml"
    path.write_text(
        RECIPE.replace("tokens = 1920", "tokens = 16_000").replace("_every = 3\n", "_every = 1\n")
    )
    return path  # 250 steps


@pytest.fixture
def command(tmp_path):
    """Runs `course-llm pretrain` in a forked process; returns its exit status and what it wrote to stderr."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=environment, text=True, **pipes)

    def run(*arguments, end=None):
        parent.stdin.write(json.dumps([[str(argument) for argument in arguments], end]) + "\n")
        parent.stdin.flush()
        return tuple(json.loads(parent.stdout.readline()))

    yield run
    parent.stdin.close()
    assert parent.wait(timeout=60) == 0


def state(out):
    return load_tensors(out / "checkpoint.safetensors")


def test_ten_kills_at_random_moments_change_no_weight(recipe_path, tmp_path, command):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    whole = pretrain_from_recipe(recipe_path)
    torch.set_num_threads(threads)
    out, seed = tmp_path / "out", random.SystemRandom().randrange(2**32)
    print("seed", seed)  # shown when the test fails
    drawn = random.Random(seed)
    places = ["half", "before the flush", "before the rename", "after the rename"]
    ends = [["write", drawn.randint(1, 8), place] for place in places]
    ends += [["step", drawn.randint(1, 8), drawn.random() * 0.03] for _ in range(6)]
    drawn.shuffle(ends)
    done = 0
    for kind, number, how in ends:
        # a moment of the whole run: so many steps behind where the last one stopped
        end = [kind, done + number, how] if kind == "step" else [kind, number, how]
        resume = ["--resume"] if (out / "checkpoint.safetensors").exists() else []
        status, said = command(recipe_path, "--out", out, *resume, end=end)
        assert (status, said) == (-9, ""), (end, said)
        if (out / "checkpoint.safetensors").exists():
            before, done = done, state(out)[1]["step"]
            assert before <= done < 250
    assert done > 0
    assert command(recipe_path, "--out", out, "--resume") == (0, "")
    tensors, metadata = state(out)
    assert metadata["step"] == 250
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensors[f"model.{name}"], tensor), name
    found = sorted(path.name for path in out.iterdir())
    assert found == ["checkpoint.safetensors", "log.csv", "model.safetensors"]  # no half file is left
    log = (out / "log.csv").read_text().splitlines()
    assert [int(line.split(",")[0]) for line in log[1:]] == list(range(5, 251, 5))


def test_a_file_that_may_not_grow_leaves_the_checkpoint(recipe_path, tmp_path, command):
    out = tmp_path / "out"
    assert command(recipe_path, "--out", out, "--steps", 3) == (0, "")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    status, said = command(recipe_path, "--out", out, "--resume", end=["limit", 50_000])
    assert status == 1 and said.count("\n") == 1
    assert "checkpoint.safetensors was not written (File too large)" in said
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    status, said = command(recipe_path, "--out", tmp_path / "new", end=["limit", 50_000])
    assert status == 1 and said.count("\n") == 1 and list((tmp_path / "new").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="only root can mount a small disk")
def test_a_full_disk_leaves_the_checkpoint(recipe_path, tmp_path, command):
    disk = tmp_path / "disk"
    disk.mkdir()
    assert command(recipe_path, "--out", tmp_path / "try", "--steps", 1) == (0, "")
    size = (tmp_path / "try" / "checkpoint.safetensors").stat().st_size
    room = f"size={size * 3 // 2}"  # for one checkpoint, not for a second one beside it
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", room, "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("this container does not let root mount")
    try:
        status, said = command(recipe_path, "--out", disk / "out")
        assert status == 1 and said.count("\n") == 1
        assert "checkpoint.safetensors was not written (No space left on device)" in said
        assert state(disk / "out")[1]["step"] == 1
        assert sorted(path.name for path in (disk / "out").iterdir()) == ["checkpoint.safetensors", "log.csv"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
