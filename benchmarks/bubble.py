"""A throwaway machine for code that really does harm: bubblewrap inside bubblewrap, on one small disk, as nobody in particular.

    here ──► outer bubble: the measuring process, a disk of its own, a network of its own
                └──► inner bubble, one per run: what is measured, in process numbers of its own

The outer bubble holds the system and this project read-only, and one disk of limited size that home and `/tmp` lie on, as they do on a
machine. The inner one can be filled, killed and thrown away without the measuring process taking notice. What runs in either is an ordinary user,
for the kernel does not limit the processes of root.
"""

import contextlib
import dataclasses
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DISK, HOME, TMP, LOGS = Path("/disk"), Path("/disk/home"), Path("/disk/tmp"), Path("/logs")
SECRET = "canary-7f3a9c"
USER = 54321
DISK_BYTES, LOG_BYTES = 400 << 20, 64 << 20
PROCESS_BYTES = 8 << 30  # address space of one process
ALL_BYTES = 3 << 30  # resident, of all processes of a run
PROCESSES = 120
HOLD = "97"  # seconds that a run's shell waits to be looked at; also how it is told from what a run has left behind


def outer_command(*inside: str) -> list[str]:
    """The command that starts the outer bubble with a command inside."""
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    for variable, value in {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(HOME),
        "USER": "instructor",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "INSTRUCTOR_TOKEN": SECRET,
    }.items():
        command += ["--setenv", variable, value]
    command += ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    for size, place in ((DISK_BYTES, DISK), (LOG_BYTES, LOGS), (LOG_BYTES, "/dev/shm")):
        command += ["--perms", "1777", "--size", str(size), "--tmpfs", str(place)]
    return [*view(), *command, "--chdir", str(ROOT), "--", *inside]


def view() -> list[str]:
    """The command that shows what follows the system and this project alone, and makes an ordinary user of root."""
    command = [
        "bwrap",
        "--die-with-parent",
        "--ro-bind",
        "/usr",
        "/usr",
        "--bind",
        "/proc",
        "/proc",
        "--dev",
        "/dev",
    ]
    for place in ("/lib", "/lib64", "/bin", "/sbin"):
        if os.path.islink(place):
            command += ["--symlink", os.readlink(place), place]
        elif os.path.isdir(place):
            command += ["--ro-bind", place, place]
    command += ["--perms", "0755", "--dir", "/etc"]
    for place in ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives"):
        command += ["--ro-bind-try", place, place]
    for place in ours():
        for parent in reversed(Path(place).parents[:-1]):  # bubblewrap would make them for root alone
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", place, place]
    for place in ("/tmp", DISK, LOGS):
        command += ["--dir", str(place)]
    if os.geteuid() != 0:
        return [*command, "--"]
    user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs"]
    return [*command, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--", *user]


def ours() -> list[str]:
    """Folders of the interpreter, the environment and this project that are not the system's."""
    found = {os.path.realpath(sys.base_prefix), os.path.realpath(sys.prefix), str(ROOT)}
    return sorted(place for place in found if not place.startswith("/usr"))


def set_limits() -> None:
    """Limits that whatever runs in the bubbles inherits."""
    for what, most in ((resource.RLIMIT_NPROC, PROCESSES + 40), (resource.RLIMIT_AS, PROCESS_BYTES),
                       (resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, 300)):  # fmt: skip
        resource.setrlimit(what, (most, most))


@dataclasses.dataclass(frozen=True)
class Run:
    """How a command in an inner bubble ended: by itself, or killed by itself or for its `time`, `memory` or `processes`."""

    ended: str
    code: int | None
    said: str
    left: int = 0


def run(command: str, folder: Path, wall_s: float) -> Run:
    """Runs a shell command in an inner bubble, and ends it and all it has started."""
    status = LOGS / "status"
    status.unlink(missing_ok=True)
    before = set(processes())
    script = f"{command}; echo $? > {status}; exec sleep {HOLD}"
    devices = f"--proc /proc --dev /dev --size {LOG_BYTES} --tmpfs /dev/shm"
    inner = f"bwrap --unshare-user --unshare-pid --unshare-ipc --die-with-parent --dev-bind / / --bind {TMP} /tmp {devices}".split()
    for place in ours():
        if place.startswith("/tmp/"):
            inner += ["--ro-bind", place, place]
    inner += ["--chdir", str(folder), "--", "sh", "-c", script]
    with tempfile.TemporaryFile(dir=LOGS) as log:
        process = subprocess.Popen(inner, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=set_limits)  # fmt: skip
        ended = watch(process, status, before, wall_s)
        left = 0
        if ended == "by itself":
            for _ in range(6):
                time.sleep(0.5)
                left = len(left_behind(before))
                if not left:
                    break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.seek(max(0, log.seek(0, 2) - 20_000))
        said = log.read().decode(errors="replace")
    for _ in range(50):
        if set(processes()) <= before:
            break
        time.sleep(0.1)
    code = int(status.read_text() or -1) if ended == "by itself" else None
    return Run(ended, code, said, left)


def watch(process: subprocess.Popen, status: Path, before: set[int], wall_s: float) -> str:
    """Waits for the end of a run, and says what it was."""
    deadline, crowded = time.monotonic() + wall_s, 0
    while time.monotonic() < deadline:
        if status.exists():
            return "by itself"
        if process.poll() is not None:
            return "killed"
        mine = set(processes()) - before
        if sum(map(resident_bytes, mine)) > ALL_BYTES:
            return "memory"
        crowded = crowded + 1 if len(mine) > PROCESSES else 0
        if crowded > 8:
            return "processes"
        time.sleep(0.25)
    return "time"


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def left_behind(before: set[int]) -> list[int]:
    """Processes of a run that outlive it; the bubble's own are not among them."""
    found = []
    for pid in set(processes()) - before:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and words[0] != b"bwrap" and words[:2] != [b"sleep", HOLD.encode()]:
            found.append(pid)
    return found


def resident_bytes(pid: int) -> int:
    """A process's share of the memory: what forks have in common counts once."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, ValueError):
        return 0
