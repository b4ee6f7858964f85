"""The wall around students' code: the bubblewrap command, what is to be seen behind it, and which system calls are left.

What every worker gives up on top of that says `inside/zygote.py`.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pyseccomp
from packaging.requirements import Requirement

from autograder.catalog import Chapter

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


class SandboxError(RuntimeError):
    """The sandbox cannot be set up; the message says what to do."""


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
        io_setup io_uring_setup io_uring_enter io_uring_register memfd_create memfd_secret mknod mknodat open_by_handle_at
        name_to_handle_at quotactl swapon swapoff reboot kexec_load init_module finit_module delete_module acct
        settimeofday clock_settime adjtimex clock_adjtime sethostname setdomainname personality shmget shmat shmctl
        msgget msgsnd msgrcv semget semop semtimedop mq_open modify_ldt iopl ioperm setrlimit prlimit64 setuid setgid
        setresuid setresgid landlock_create_ruleset fanotify_init inotify_init inotify_init1 syslog vhangup nfsservctl
    """
    errno_eperm, errno_enosys, clone_thread, set_dumpable = 1, 38, 0x00010000, 4
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
    # a crash leaves no image of the memory with a program of the machine that collects them
    rules.add_rule(
        pyseccomp.ERRNO(errno_eperm), "prctl", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, 0xFFFFFFFF, set_dumpable)
    )
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
