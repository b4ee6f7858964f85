"""The warm parent inside the sandbox: imports torch once, then forks a fresh, locked-down worker for every submission.

It is started by bubblewrap (`autograder.wall`), reads orders from a control socket, and never runs a line of a student's code.
A worker is process 1 of a process namespace of its own, so whatever it started ends with it; it has a /tmp of its own,
no /proc, no capabilities, limits on memory, processor time, files and threads, and a filter that refuses to start programs or
open sockets.
"""

import array
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, PR_CAP_AMBIENT = 4, 22, 38, 1, 47
PR_CAP_AMBIENT_CLEAR_ALL, PR_CAPBSET_DROP = 4, 24
SECCOMP_MODE_FILTER = 2
LINUX_CAPABILITY_VERSION_3 = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def must(result: int, what: str) -> None:
    """Raises OSError unless a libc call returned 0."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def private_mounts(tmp_bytes: int) -> None:
    """Gives this process a mount namespace with an empty, small /tmp and /dev/shm and nothing in /proc."""
    must(libc.unshare(CLONE_NEWNS | CLONE_NEWIPC), "unshare")
    flags = MS_NOSUID | MS_NODEV
    options = f"size={tmp_bytes},nr_inodes=4096,mode=700".encode()
    must(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", flags, options), "mount /tmp")
    for place in (b"/dev/shm", b"/proc"):
        must(
            libc.mount(b"tmpfs", place, b"tmpfs", flags | MS_NOEXEC, b"size=4k,nr_inodes=2,mode=500"), "mount"
        )
    os.chdir("/tmp")


def drop_privileges() -> None:
    """Gives up every capability for good."""
    must(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0)
    empty = (ctypes.c_uint32 * 6)()
    must(libc.capset(header, empty), "capset")


def filter_syscalls(program: bytes) -> None:
    """Installs the compiled seccomp filter."""

    class SockFprog(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    fprog = SockFprog(len(program) // 8, program)
    must(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(fprog), 0, 0), "seccomp")


def set_limits(limits: dict, walled: bool) -> None:
    """Sets resource limits; memory is counted on top of what torch already maps."""
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    pairs = {
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if walled:  # counted for the whole user where there is no user namespace
        pairs[resource.RLIMIT_NPROC] = limits["threads"]
    if limits["memory_bytes"]:
        pairs[resource.RLIMIT_AS] = mapped + limits["memory_bytes"]
    for kind, value in pairs.items():
        resource.setrlimit(kind, (value, value))


def become_worker(
    channel: socket.socket, control: socket.socket, limits: dict, program: bytes, warm, walled: bool
) -> None:
    """Turns a fresh fork into a worker; never returns. Without the wall only what a process can do to itself is left."""
    try:
        os.setsid()  # a signal to "my process group" must not reach the zygote
        control.close()
        fd = channel.detach()
        null = os.open("/dev/null", os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.dup2(fd, 3)
        os.closerange(4, 4096)
        must(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        set_limits(limits, walled)
        if walled:
            private_mounts(limits["tmp_bytes"])
        drop_privileges()
        filter_syscalls(program)
        warm.serve(socket.socket(fileno=3))
    except BaseException:
        os._exit(70)
    os._exit(0)


def processor_seconds(pid: int) -> float:
    """Processor time that a child has used so far; a loop is told from a busy machine by it."""
    return time.clock_gettime((~pid << 3) | 2)


def thread_count(pid: int) -> int:
    """How many threads a child has: RLIMIT_NPROC does not hold for root, and counts all that an ordinary user runs."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[17])
    except (OSError, ValueError, IndexError):
        return 0


def receive_order(control: socket.socket) -> tuple[dict, list[int]]:
    """Reads one order and the descriptors that came with it; an empty order means the grader is gone."""
    fds = array.array("i")
    data, ancillary, _, _ = control.recvmsg(65536, socket.CMSG_LEN(4 * fds.itemsize))
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return (json.loads(data) if data else {}), list(fds)


def main() -> None:
    """Serves orders until the control socket closes."""
    control, files, walled = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3] == "walled"
    with open(os.path.join(files, "seccomp.bpf"), "rb") as file:
        program = file.read()
    with open(os.path.join(files, "template.json")) as file:
        template = json.load(file)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)

    from autograder.inside import worker as warm

    warm.warm_up(template)
    own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
    gc.collect()
    gc.freeze()  # children share these objects; do not touch their reference counts by collecting
    control.sendall(json.dumps({"ready": True}).encode())
    child, watch, allowed_s, allowed_threads, overrun, crowded = 0, -1, 0.0, 0, False, False
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        crowded = crowded or (bool(child) and thread_count(child) > allowed_threads)
        if child and (crowded or processor_seconds(child) > allowed_s):
            overrun = not crowded
            os.kill(child, signal.SIGKILL)
        for fd, _ in poll.poll(200 if child else None):
            if fd == watch:
                _, status, usage = os.wait4(child, 0)
                poll.unregister(watch)
                os.close(watch)
                child, watch = 0, -1
                report = {
                    "status": status,
                    "cpu_s": usage.ru_utime + usage.ru_stime,
                    "maxrss_kb": usage.ru_maxrss,
                    "overrun": overrun,
                    "crowded": crowded,
                }
                control.sendall(json.dumps(report).encode())
                continue
            order, fds = receive_order(control)
            if not order:
                if child:
                    os.kill(child, signal.SIGKILL)
                os._exit(0)
            if order["order"] == "kill" and child:
                os.kill(child, signal.SIGKILL)
            elif order["order"] == "allow" and child:
                allowed_s = processor_seconds(child) + order["cpu_s"]
            elif order["order"] == "start":
                allowed_s, allowed_threads = order["limits"]["cell_s"], order["limits"]["threads"]
                overrun = crowded = False
                channel = socket.socket(fileno=fds[0])
                if walled:
                    must(libc.unshare(CLONE_NEWPID), "unshare pid")
                child = os.fork()
                if child == 0:
                    become_worker(channel, control, order["limits"], program, warm, walled)
                if walled:
                    must(libc.setns(own_namespace, CLONE_NEWPID), "setns")
                channel.close()
                watch = os.pidfd_open(child)
                poll.register(watch, select.POLLIN)


if __name__ == "__main__":
    main()
