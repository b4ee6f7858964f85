"""Runs students' code behind a wall: bubblewrap around a warm process that forks one locked-down worker per submission.

    grader ──control socket──► bwrap ─► zygote (trusted, torch imported) ─fork─► worker (one submission)
       └──────────────────────────────data socket (frames of codec)────────────────────┘

bubblewrap gives the zygote no network, no home, a read-only system with nothing of this project in it but the channel's
own code, and its own process namespace (`autograder.wall`). `inside/zygote.py` says what every worker gives up on top of that;
`autograder.remote` is the grader's end of the data socket.
"""

import dataclasses
import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path

from autograder.catalog import Chapter
from autograder.remote import Worker
from autograder.wall import (
    ENVIRONMENT,
    SandboxError,
    bare_command,
    bubblewrap_command,
    explain,
    write_inside_files,
)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one submission may use."""

    memory_bytes: int = 2 << 30
    cpu_s: int = 240
    tmp_bytes: int = 64 << 20
    file_bytes: int = 64 << 20
    threads: int = 64
    cell_s: float = 10.0
    submission_s: float = 120.0  # processor time of all its workers together


class Sandbox:
    """One warm sandbox for one chapter; starts one worker at a time."""

    def __init__(
        self,
        chapter: Chapter,
        limits: Limits | None = None,
        device: str = "cpu",
        isolate: bool = True,
        user: int | None = None,
    ):
        """
        Args:
            chapter: whose given modules the answers may use.
            limits: what a submission may use.
            device: where the exercises' tensors lie.
            isolate: False runs the zygote without bubblewrap: only for machines where it cannot be had.
            user: the id of the user that the zygote becomes; for root alone, where there is no bubblewrap.
        """
        self.limits = limits or Limits()
        if device != "cpu":  # a driver maps far more than it uses, and a limit on that stops it
            self.limits = dataclasses.replace(self.limits, memory_bytes=0)
        self.device = device
        self.isolate = isolate
        self.user = user
        self.chapter = chapter
        self.packed: dict[int, tuple[list, bytes]] = {}
        self._process: subprocess.Popen | None = None
        self._control: socket.socket | None = None

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the sandbox and everything in it."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:  # it ends by itself when the control socket closes
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # the folder is needed until everything is imported, so that no killed grader leaves it behind for long
        with tempfile.TemporaryDirectory(prefix="course-llm-") as folder:
            write_inside_files(Path(folder), self.chapter, self.device)
            if self.isolate:
                command = bubblewrap_command(Path(folder), theirs.fileno(), self.device)
            else:
                command = bare_command(Path(folder), theirs.fileno())
            if self.user is not None:
                os.chmod(folder, 0o755)  # its files hold no answers
            self._process = subprocess.Popen(
                command,
                env=ENVIRONMENT,
                cwd="/",
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                user=self.user,
                group=self.user,
                extra_groups=None if self.user is None else [],
            )
            theirs.close()
            self._control = ours
            ours.settimeout(120)
            try:
                ready = ours.recv(65536)
            except OSError:
                ready = b""
            if not ready:
                self._process.kill()
                words = self._process.stderr.read().decode(errors="replace").strip()[-800:]
                self.close()
                raise SandboxError(f"the sandbox does not start: {explain(words)}")

    def start_worker(self) -> Worker:
        """Forks a fresh worker; restarts the sandbox when it has died."""
        for attempt in (1, 2):
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._start()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)  # no byte stands outside of the stream
            order = json.dumps({"order": "start", "limits": dataclasses.asdict(self.limits)}).encode()
            try:
                socket.send_fds(self._control, [order], [theirs.fileno()])
                return Worker(self, ours)
            except OSError:
                ours.close()
                self.close()
                if attempt == 2:
                    raise SandboxError("the sandbox ends as soon as it is started") from None
            finally:
                theirs.close()
        raise AssertionError("unreachable")

    def order(self, order: dict) -> None:
        """Sends an order to the zygote."""
        self._control.sendall(json.dumps(order).encode())

    def end_worker(self) -> dict:
        """Kills the worker and returns the kernel's account of it: status, processor seconds, peak memory."""
        try:
            self.order({"order": "kill"})
            self._control.settimeout(20)
            report = json.loads(self._control.recv(65536))
        except (OSError, ValueError):
            self.close()  # the zygote is gone with its worker; the next one gets a new one
            report = {"status": -1, "cpu_s": 0.0, "maxrss_kb": 0}
        return report
