"""Grading on a Dask cluster: the gradebook equals that of one process, also when a worker is killed half way."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_interruption import STEM, STUDENTS, gradebook, mixed_class, notebooks

pytest.importorskip("distributed", reason="Dask is not installed: pip install '.[dask]'")
pytestmark = pytest.mark.timeout(900)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Cluster:
    """A scheduler and its workers as processes of their own, on loopback."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.processes: list[subprocess.Popen] = []

    def start(self, *words: str) -> subprocess.Popen:
        with open(self.folder / f"{words[0]}{len(self.processes)}.log", "w") as log:
            # a group of its own: what a worker has started is killed with it, as when a machine dies
            process = subprocess.Popen([sys.executable, "-m", "dask", *words], cwd=self.folder, stdout=log, stderr=log, start_new_session=True)  # fmt: skip
        self.processes.append(process)
        return process

    def scheduler(self) -> None:
        port = self.address.rpartition(":")[2]
        self.start("scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard")
        until(lambda: connects(int(port)))

    def worker(self) -> subprocess.Popen:
        started = self.start("worker", self.address, "--nthreads", "1", "--no-dashboard", "--no-nanny")
        log = self.folder / f"worker{len(self.processes) - 1}.log"
        until(lambda: "Registered to" in log.read_text())
        return started

    def close(self) -> None:
        for process in self.processes:
            kill(process)


def connects(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def until(holds, seconds: float = 120) -> None:
    """Waits until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it does not come to pass"
        time.sleep(0.2)


def kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def cluster(tmp_path):
    folder = tmp_path / "dask"
    folder.mkdir()
    cluster = Cluster(folder)
    yield cluster
    cluster.close()


def test_a_cluster_gives_the_same_gradebook_and_a_killed_worker_costs_nothing(cluster, tmp_path, run):
    folder = mixed_class(tmp_path / "class")
    here, there = tmp_path / "here", tmp_path / "there"
    alone = run("course-llm", "grade", STEM, folder, "--course", here, "--workers", "1")
    assert alone.returncode == 0, alone.stderr
    cluster.scheduler()
    first, _ = cluster.worker(), cluster.worker()
    command = [
        "course-llm",
        "grade",
        STEM,
        str(folder),
        "--course",
        str(there),
        "--scheduler",
        cluster.address,
    ]
    grading = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = there / f"grading_{STEM}.log"
    until(lambda: log.exists() and len(log.read_text().splitlines()) >= STUDENTS // 4)
    kill(first)
    _, err = grading.communicate(timeout=600)
    assert grading.returncode == 0, err
    assert gradebook(there) == gradebook(here)
    assert notebooks(there) == notebooks(here)
    lines = log.read_text().splitlines()
    assert len(lines) == STUDENTS
    assert all(re.match(r"\d{4}-\d\d-\d\dT\S+\tstudent\d\d\t[\d.]+/[\d.]+ points\t\d+/\d+ exercises\t[\d.]+ s", line) for line in lines)  # fmt: skip


def test_a_cluster_that_cannot_grade_is_said_in_one_line(cluster, tmp_path, run):
    folder = mixed_class(tmp_path / "class")
    nobody = run("course-llm", "grade", STEM, folder, "--scheduler", f"tcp://127.0.0.1:{free_port()}")
    assert nobody.returncode == 1
    assert re.fullmatch(r"course-llm: no Dask scheduler answers at \S+ \(\w+\)\n", nobody.stderr)
    cluster.scheduler()
    idle = run("course-llm", "grade", STEM, folder, "--scheduler", cluster.address)
    assert idle.returncode == 1
    assert len(idle.stderr.splitlines()) == 1 and "no workers" in idle.stderr
