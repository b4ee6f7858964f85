"""Runs students' code behind a wall: bubblewrap around a warm process that forks one locked-down worker per submission.

    grader ──control socket──► bwrap ─► zygote (trusted, torch imported) ─fork─► worker (one submission)
       └──────────────────────────────data socket (frames of codec)────────────────────┘

bubblewrap gives the zygote no network, no home, a read-only system with nothing of this project in it but the channel's
own code, and its own process namespace. `inside/zygote.py` says what every worker gives up on top of that.
"""

import builtins
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyseccomp
import torch
from packaging.requirements import Requirement

from autograder.catalog import Chapter
from autograder.inside.codec import HEADER, Handle, Packer, ProtocolError, Unpacker, frame_lengths
from autograder.inside.engine import Outcome, Raised, clone_tree, tensors_in
from autograder.inside.meter import Meter
from autograder.spec import MEASURED, BackendLost, Mismatch, Served

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
    "PYTHONDONTWRITEBYTECODE": "1",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp",
}
LIBRARIES = ("torch", "numpy", "scipy", "safetensors", "jaxtyping", "einops")
INSIDE = Path(__file__).parent / "inside"
# what an answer may ask of the grader while one exercise is graded
MAX_SERVED_CALLS = 20_000
MAX_SERVED_ELEMENTS = 1 << 20  # in one call
MAX_SERVED_S = 10.0
MAX_RECEIVED_BYTES = 512 << 20
MAX_LENT_NUMBER = 1 << 16
WAITING_S = 10.0  # wall clock beyond six times the processor time, on a busy machine
MAX_UNREAD_BYTES = 128 << 20


class SandboxError(RuntimeError):
    """The sandbox cannot be set up; the message says what to do."""


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


INSTALL = "apt install bubblewrap"


def bubblewrap() -> str:
    """The path of bubblewrap.

    Raises:
        SandboxError: it is not installed.
    """
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxError(
            f"bubblewrap is not installed, and nothing is graded without it; install it with: {INSTALL}"
        )
    return path


def syscall_filter() -> bytes:
    """Compiles the filter that a worker runs under: threads yes, processes, programs and sockets no."""
    denied = """
        execve execveat fork vfork ptrace process_vm_readv process_vm_writev kcmp pidfd_open pidfd_getfd pidfd_send_signal
        socket socketpair connect bind listen accept accept4 mount umount2 pivot_root chroot move_mount open_tree fsopen
        fsmount fsconfig fspick mount_setattr unshare setns keyctl add_key request_key bpf perf_event_open userfaultfd
        io_uring_setup io_uring_enter io_uring_register memfd_create memfd_secret mknod mknodat open_by_handle_at
        name_to_handle_at quotactl swapon swapoff reboot kexec_load init_module finit_module delete_module acct
        settimeofday clock_settime adjtimex clock_adjtime sethostname setdomainname personality shmget shmat shmctl
        msgget msgsnd msgrcv semget semop semtimedop mq_open modify_ldt iopl ioperm setrlimit prlimit64 setuid setgid
        setresuid setresgid landlock_create_ruleset fanotify_init inotify_init inotify_init1 syslog vhangup nfsservctl
    """
    errno_eperm, errno_enosys, clone_thread = 1, 38, 0x00010000
    rules = pyseccomp.SyscallFilter(defaction=pyseccomp.ALLOW)
    for name in denied.split():
        with contextlib.suppress(
            OSError, ValueError, RuntimeError
        ):  # a name this kernel's library does not know
            if name == "prlimit64":  # reading limits is harmless, setting them is not
                rules.add_rule(pyseccomp.ERRNO(errno_eperm), name, pyseccomp.Arg(2, pyseccomp.NE, 0))
            else:
                rules.add_rule(pyseccomp.ERRNO(errno_eperm), name)
    only_threads = pyseccomp.Arg(0, pyseccomp.MASKED_EQ, clone_thread, 0)
    rules.add_rule(pyseccomp.ERRNO(errno_eperm), "clone", only_threads)
    rules.add_rule(
        pyseccomp.ERRNO(errno_enosys), "clone3"
    )  # glibc then falls back to clone, whose flags can be read
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def distributions(names: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions of these names and of all that they require, by normalised name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    queue = list(names)
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for text in found[name].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                queue.append(requirement.name)
    return found


@functools.cache
def library_paths() -> tuple[Path, ...]:
    """Files and folders of the libraries that answers may import: torch, numpy and what they need, nothing else."""
    found: set[Path] = set()
    for distribution in distributions(LIBRARIES).values():
        tops = {
            file.parts[0]
            for file in distribution.files or ()
            if not file.parts[0].startswith((".", "__pycache__"))
        }
        found |= {Path(distribution.locate_file(top)) for top in tops if not top.endswith(".pth")}
    return tuple(sorted(path for path in found if path.exists()))


def bubblewrap_command(files: Path, control_fd: int, device: str) -> list[str]:
    """The command that starts the zygote behind the wall."""
    # user 0 of a namespace of its own: for another one bubblewrap would nest a second namespace, from which the zygote
    # could not go back to its own after a fork
    command = [bubblewrap(), "--unshare-user", "--uid", "0", "--gid", "0", "--unshare-pid", "--unshare-ipc"]
    command += [
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--hostname",
        "sandbox",
        "--die-with-parent",
    ]
    command += ["--new-session", "--clearenv", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
    for variable, value in ENVIRONMENT.items():
        command += ["--setenv", variable, value]
    command += ["--ro-bind", "/usr", "/usr"]
    for place in ("/lib", "/lib64", "/bin", "/sbin"):
        if os.path.islink(place):
            command += ["--symlink", os.readlink(place), place]
        elif os.path.isdir(place):
            command += ["--ro-bind", place, place]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    base = os.path.realpath(sys.base_prefix)
    if not base.startswith("/usr/") and base != "/usr":
        command += ["--ro-bind", base, base]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/dev/shm"]
    for package in (
        "course_llm",
        "autograder",
        "course-llm",
    ):  # hide copies installed where the system is bound
        for place in installed_copies(package, (base, "/usr")):
            command += ["--tmpfs", place]
    for path in library_paths():
        command += ["--ro-bind", str(path), f"/site/{path.name}"]
    if device.startswith("cuda"):
        for node in sorted(Path("/dev").glob("nvidia*")):
            command += ["--dev-bind", str(node), str(node)]
    command += ["--ro-bind", str(files), "/grader", "--chdir", "/", "--remount-ro", "/"]
    return [*command, "--", *zygote_command("/grader", ["/site"], control_fd, "walled")]


def bare_command(files: Path, control_fd: int) -> list[str]:
    """The command that starts the zygote without a wall: with the grader's rights, though with its own environment."""
    sites = sorted({str(path.parent) for path in library_paths()})
    return zygote_command(str(files), sites, control_fd, "bare")


def zygote_command(files: str, sites: list[str], control_fd: int, wall: str) -> list[str]:
    """The interpreter, with nothing on its path but the channel's code and the libraries."""
    arguments = ["zygote", str(control_fd), files, wall]
    start = f"import sys; sys.path[:0] = {[files, *sites]}; sys.argv = {arguments}; "
    start += "from autograder.inside.zygote import main; main()"
    return [os.path.realpath(sys.executable), "-I", "-S", "-c", start]


def installed_copies(package: str, roots: tuple[str, ...]) -> list[str]:
    """Folders of an installed package that lie below one of the roots."""
    places = []
    for entry in {os.path.realpath(p) for p in sys.path if p}:
        folder = os.path.join(entry, package)
        if os.path.isdir(folder) and any(folder.startswith(root.rstrip("/") + "/") for root in roots):
            places.append(folder)
    return places


def write_inside_files(folder: Path, chapter: Chapter, device: str) -> None:
    """Lays out what the sandbox holds of this project: the channel's code, the chapter's given modules, no answers."""
    package = folder / "autograder"
    shutil.copytree(INSIDE, package / "inside", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").write_text("")
    given = folder / "course_llm"
    given.mkdir()
    (given / "__init__.py").write_text("")
    for module in chapter.given_modules:
        source = importlib.util.find_spec(f"course_llm.{module}").origin
        shutil.copy(source, given / f"{module}.py")
    (folder / "seccomp.bpf").write_bytes(syscall_filter())
    (folder / "template.json").write_text(
        json.dumps({"sources": [chapter.setup, chapter.given], "device": device})
    )


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

    def start_worker(self) -> "Worker":
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


def explain(words: str) -> str:
    """Adds the cure to bubblewrap's words where the cause is known."""
    if (
        "setting up uid map" in words
        or "No permissions to create" in words
        or "Creating new namespace failed" in words
    ):
        return (
            f"{words} (this machine does not allow user namespaces: on Ubuntu 24.04 and later run "
            "`sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`, in a container start it with "
            "`--security-opt seccomp=unconfined --security-opt apparmor=unconfined`, or grade as root)"
        )
    return words or "it ends without a word"


class Worker:
    """One submission's process, as a `Backend`."""

    def __init__(self, sandbox: Sandbox, sock: socket.socket):
        self.sandbox = sandbox
        self.sock = sock
        self.deadline = time.monotonic() + 60
        self._lent: dict[str, Any] = {}
        self._served: list[Any] = []
        self._opaque: list[Any] = []
        self._unread = bytearray()
        self._poll = select.poll()
        self._poll.register(sock)
        self._cost: Cost | None = None
        self.not_countable: Callable[[], str | None] = lambda: None
        self._alive = True
        self.report: dict = {}
        self._start_accounts()

    def close(self) -> dict:
        """Ends the worker; returns the kernel's account of it."""
        if self._alive:
            self._alive = False
            self.sock.close()
            self.report = self.sandbox.end_worker()
        return self.report

    def allow(self, cpu_s: float) -> None:
        """Starts the clocks for what comes next: processor time, and a wall clock for answers that sleep."""
        self.deadline = time.monotonic() + 6 * cpu_s + min(WAITING_S, 2 + 2 * cpu_s)
        self._start_accounts()
        with contextlib.suppress(OSError):
            self.sandbox.order({"order": "allow", "cpu_s": cpu_s})

    def _start_accounts(self) -> None:
        self._opaque.clear()
        self._calls = self._received = 0
        self._served_s = 0.0

    def lend(self, names: list[str], reference: dict[str, Any]) -> None:
        """Puts the grader's versions of some functions, called across the wall, in the place of the student's."""
        self._lent = {name: reference[name] for name in names}
        self._send(Packer(), {"op": "lend", "names": names})
        self._receive()

    def run_cell(self, name: str, source: str) -> Raised | None:
        """Runs one cell; returns the first error."""
        self._send(Packer(), {"op": "cell", "name": name, "source": source})
        answer, _ = self._receive()
        return self._error(answer.get("error"))

    def turn(self, name: str) -> None:
        """Binds again what an exercise's cell has bound, should a later cell have taken a name away."""
        self._send(Packer(), {"op": "turn", "name": name})
        self._receive()

    def defined(self, names: tuple[str, ...]) -> set[str]:
        """Which of the names the cells have defined."""
        self._send(Packer(), {"op": "names", "names": list(names)})
        answer, _ = self._receive()
        found = answer.get("defined")
        return set(names) & {n for n in found if isinstance(n, str)} if isinstance(found, list) else set()

    def perform(
        self, kind: str, target: Any, args: tuple = (), kwargs: dict | None = None, **options
    ) -> Outcome:
        """Performs a step in the worker."""
        if kind in MEASURED and (why := self.not_countable()):
            raise Mismatch(why)
        self._served.clear()
        self._cost = Cost() if kind == "measure" else None
        packer = Packer(special=self._hand_over, device=self._elsewhere())
        self._send(packer, self._request(packer, kind, target, args, kwargs or {}, options))
        while True:
            answer, unpacker = self._receive()
            if answer.get("op") != "served":
                return self._outcome((kind, target, args, kwargs or {}), answer, unpacker)
            self._serve(answer, unpacker)

    def perform_many(self, steps: list[tuple[str, Any, tuple, dict, dict]]) -> list[Outcome]:
        """Performs independent steps that need nothing from the grader, in one question.

        The same list, asked again of another worker, is not packed again.
        """
        self._cost = None
        kept = self.sandbox.packed.get(id(steps))
        if kept is None:
            packer = Packer(device=self._elsewhere())
            requests = [self._request(packer, *step) for step in steps]
            kept = steps, packer.frame({"op": "steps", "steps": requests})
            self.sandbox.packed[id(steps)] = kept  # with the list itself, so that no other one has its id
        self._write(kept[1])
        answer, unpacker = self._receive()
        answers = answer.get("answers")
        if not isinstance(answers, list) or len(answers) != len(steps):
            raise self._lost("The answer came back malformed.")
        return [self._outcome(step, one, unpacker) for step, one in zip(steps, answers, strict=True)]

    def _request(
        self, packer: Packer, kind: str, target: Any, args: tuple, kwargs: dict, options: dict
    ) -> dict:
        return {"op": "step", "kind": kind, "target": packer.pack(target), "args": packer.pack(args),
                "kwargs": packer.pack(kwargs), "options": options}  # fmt: skip

    def _outcome(self, step: tuple, answer: dict, unpacker: Unpacker) -> Outcome:
        kind, _, args, kwargs, *_ = step
        if not isinstance(answer, dict):
            raise self._lost("The answer came back malformed.")
        error = self._error(answer.get("error"))
        if error is not None:
            return Outcome(error=error)
        try:
            value = unpacker.unpack(answer["value"])
            possible = {f"argument {i + 1}" for i in range(len(args))} | set(kwargs)
            changed = tuple(n for n in answer.get("changed", ()) if n in possible)
        except (KeyError, TypeError, ProtocolError) as problem:
            raise self._lost(f"The answer came back malformed: {problem}.") from None
        value = self._checked(kind, value)
        return Outcome(value=value if self._cost is None else self._cost.added_to(value), changed=changed)

    def _checked(self, kind: str, value: Any) -> Any:
        """The parts of a composite answer have the types that the judge relies on, or the worker is lied about."""
        if kind == "gradient":
            fits = isinstance(value, dict) and set(value) == {"value", "grads", "detached"}
            fits = fits and isinstance(value["grads"], tuple) and type(value["detached"]) is int
        elif kind == "measure":
            fits = isinstance(value, dict) and set(value) == {"value", "flops", "largest", "held", "saved"}
            fits = fits and all(
                type(value[k]) is int and value[k] >= 0 for k in ("flops", "largest", "held", "saved")
            )
        elif kind in ("new", "module", "optimizer", "generator"):
            fits = isinstance(value, Handle)
        elif kind == "held":
            fits = type(value) is int and value >= 0
        elif kind == "workdir":
            fits = isinstance(value, str) and len(value) < 200
        else:
            fits = True
        if not fits:
            raise self._lost("The answer came back malformed.")
        return value

    # the channel

    def _hand_over(self, value: Any) -> Any:
        if isinstance(value, Served):
            value.reset()
            self._served.append(value)
            return {"t": "served", "v": len(self._served) - 1}
        if type(value).__module__.startswith(("course_llm.", "autograder.")) and not dataclasses.is_dataclass(
            value
        ):
            self._opaque.append(value)
            return {"t": "opaque", "v": len(self._opaque) - 1}
        return None

    def _resolve(self, node: dict) -> Any:
        if node["t"] == "opaque":
            return self._opaque[int(node["v"])] if 0 <= int(node["v"]) < len(self._opaque) else None
        if node["t"] == "handle" and 0 <= int(node["v"]) < 10_000:
            return Handle(int(node["v"]))
        return None

    def _serve(self, request: dict, unpacker: Unpacker) -> None:
        packer = Packer(special=self._hand_back, device=self._elsewhere())
        try:
            function = self._service_of(request["v"])
            args, kwargs = unpacker.unpack(request["args"]), unpacker.unpack(request["kwargs"])
            if sum(t.numel() for t in tensors_in((args, kwargs))) > MAX_SERVED_ELEMENTS:
                raise ValueError("its arguments are too large")
            if function not in self._served and largest_number((args, kwargs)) > MAX_LENT_NUMBER:
                raise ValueError("a number is too large")
            data = packer.frame({"value": packer.pack(self._timed(function, args, kwargs))})
            frame_lengths(data[: HEADER.size])
        except ProtocolError as problem:
            raise self._lost(f"The answer came back malformed: {problem}.") from None
        except BackendLost:
            raise
        except Exception as error:
            data = Packer().frame({"error": f"{type(error).__name__}: {str(error)[:200]}"})
        self._write(data)

    def _timed(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """Calls a function on the grader's own time, of which an answer has only so much."""
        if self._calls > MAX_SERVED_CALLS or self._served_s > MAX_SERVED_S:
            raise self._lost("The answer calls what it was given far too often, or with far too much.")
        started = time.thread_time()
        try:
            if self._cost is None or function in self._served:
                return function(*args, **kwargs)
            with Meter() as meter:  # what is lent costs the answer as much as if it were its own
                value = function(*args, **kwargs)
            self._cost.add(meter)
            return value
        finally:
            self._served_s += time.thread_time() - started

    def _service_of(self, name: Any) -> Any:
        """What a request for the grader's help names: a served callable, a lent function, or that one's gradient."""
        self._calls += 1
        if type(name) is int and 0 <= name < len(self._served):
            return self._served[name]
        if isinstance(name, str) and name.removeprefix("gradient of ") in self._lent:
            function = self._lent[name.removeprefix("gradient of ")]
            return function if name in self._lent else functools.partial(lent_gradient, function)
        raise ValueError("there is no such function")

    def _hand_back(self, value: Any) -> Any:
        self._opaque.append(value)
        return {"t": "opaque", "v": len(self._opaque) - 1}

    def _send(self, packer: Packer, skeleton: Any) -> None:
        self._write(packer.frame(skeleton))

    def _write(self, data: bytes) -> None:
        """Sends, and meanwhile takes in what the worker answers, so that neither waits for the other for ever."""
        left = memoryview(data)
        while left:
            try:
                left = left[self.sock.send(left, socket.MSG_DONTWAIT) :]
                continue
            except BlockingIOError:
                pass
            except OSError:
                raise self._lost(None) from None
            if not self._wait(select.POLLOUT | select.POLLIN) & select.POLLOUT:
                if len(self._unread) > MAX_UNREAD_BYTES:
                    raise self._lost("The answer came back malformed: it is too large.")
                try:
                    self._take_in()
                except BlockingIOError:
                    time.sleep(0.001)

    def _receive(self) -> tuple[dict, Unpacker]:
        try:
            json_bytes, tensor_bytes = frame_lengths(self._exactly(HEADER.size))
            self._received += json_bytes + tensor_bytes
            if self._received > MAX_RECEIVED_BYTES:
                raise ProtocolError("all answers together are too large")
            text, blob = self._exactly(json_bytes), self._exactly(tensor_bytes)
            unpacker = Unpacker(blob, special=self._resolve, devices={self.device_name(): "cpu"})
            answer = unpacker.parse(text)
            if not isinstance(answer, dict):
                raise ProtocolError("the answer is not an object")
        except ProtocolError as problem:
            raise self._lost(f"The answer came back malformed: {problem}.") from None
        return answer, unpacker

    def _elsewhere(self) -> str | None:
        """The device that the worker is to put tensors on, where that is not the CPU, on which all lie here."""
        return None if self.sandbox.device == "cpu" else self.device_name()

    def device_name(self) -> str:
        return "cuda:0" if self.sandbox.device == "cuda" else self.sandbox.device

    def _exactly(self, count: int) -> bytes:
        while len(self._unread) < count:
            self._wait(select.POLLIN)
            try:
                self._take_in()
            except BlockingIOError:  # an out-of-band byte wakes the poll and is no data
                time.sleep(0.001)
        part = bytes(self._unread[:count])
        del self._unread[:count]
        return part

    def _take_in(self) -> None:
        try:
            part = self.sock.recv(1 << 18, socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise
        except OSError:
            part = b""
        if not part:
            raise self._lost(None)
        self._unread += part

    def _wait(self, event: int) -> int:
        left = self.deadline - time.monotonic()
        self._poll.modify(self.sock, event)
        ready = self._poll.poll(left * 1000) if left > 0 else []
        if not ready:
            raise self._lost(TIME_IS_UP)
        return ready[0][1]

    def _lost(self, reason: str | None) -> BackendLost:
        report = self.close()
        return BackendLost(reason or cause_of_death(report))

    def _error(self, error: Any) -> Raised | None:
        if error is None:
            return None
        if not isinstance(error, dict) or not isinstance(error.get("types"), list):
            raise self._lost("The answer came back malformed.")
        types = tuple(t for t in error["types"] if isinstance(t, str) and t in BUILTIN_ERRORS)
        line = error.get("line")
        line = line if type(line) is int and 0 < line < 100_000 else None
        return Raised(types or ("Exception",), "said" if error.get("words") is True else "", line)


BUILTIN_ERRORS = {
    n for n, t in vars(builtins).items() if isinstance(t, type) and issubclass(t, BaseException)
}


@dataclasses.dataclass
class Cost:
    """What lent functions cost in a step that is measured: the worker's own meter cannot see it."""

    flops: int = 0
    largest: int = 0
    held: int = 0
    saved: int = 0

    def add(self, meter: Meter) -> None:
        self.flops += meter.flops
        self.largest = max(self.largest, meter.largest)
        self.held = max(self.held, meter.held)
        self.saved += meter.saved

    def added_to(self, value: dict) -> dict:
        """The worker's counts with these: an upper bound where both held tensors at one time."""
        return {
            **value,
            "flops": value["flops"] + self.flops,
            "largest": max(value["largest"], self.largest),
            "held": value["held"] + self.held,
            "saved": value["saved"] + self.saved,
        }


def largest_number(value: Any) -> float:
    """The largest size of a plain number in a tree of arguments."""
    if isinstance(value, (int, float)):
        return abs(value)
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        return max((largest_number(item) for item in value), default=0)
    return 0


def lent_gradient(function: Any, args: tuple, kwargs: dict, marks: list, cotangents: list) -> list:
    """The gradient of a lent function in the tensors that are marked."""
    marked = iter(marks)
    leaves = []

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().clone()
        if next(marked):
            leaves.append(copy.requires_grad_())
        return copy

    args, kwargs = clone_tree((args, kwargs), leaf)
    with torch.enable_grad():
        outputs = [t for t in tensors_in(function(*args, **kwargs)) if t.is_floating_point()]
        pairs = [(t, c) for t, c in zip(outputs, cotangents, strict=True) if t.requires_grad]
        grads = torch.autograd.grad([t for t, _ in pairs], leaves, [c for _, c in pairs], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]


TIME_IS_UP = "The time is up: the answer does not come to an end (an endless loop, or far too much work)."


def cause_of_death(report: dict) -> str:
    """Says why a worker's process ended, from the kernel's account of it."""
    if report.get("overrun"):
        return TIME_IS_UP
    if report.get("crowded"):
        return "The process was stopped: it started more threads than it may."
    status = report.get("status", -1)
    if status >= 0 and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number in (signal.SIGXCPU, signal.SIGKILL):
            return "The process was stopped: it used more processor time or memory than it may."
        if number == signal.SIGSYS:
            return "The process was stopped: it tried something that answers may not do."
        if number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
            return (
                "The process crashed: it used too much memory, recursed too deeply, or broke the interpreter."
            )
        return f"The process was stopped by signal {signal.Signals(number).name}."
    return "The process ended by itself in the middle of a question (it called exit, perhaps)."
