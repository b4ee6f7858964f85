"""Bounds what one answer can make the trusted side spend: memory that a judge allocates from its numbers, time it judges for.

The worker's limits hold on the other side of the wall. Here a number that came back may still size a histogram, or steer a loop.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

try:
    import resource
except ImportError:  # a student's Windows, where nothing is graded
    resource = None

MEMORY_BYTES = 2 << 30
JUDGING_S = 60.0
_alone = threading.Lock()
TOO_MUCH = "The answer makes far too much work for the grader."


@contextlib.contextmanager
def bounded_memory(extra_bytes: int = MEMORY_BYTES) -> Iterator[None]:
    """Lets this process take so much more memory and no more: allocations beyond it fail instead of ending the machine."""
    if resource is None or not _alone.acquire(blocking=False):  # the limit is the process's, and set already
        yield
        return
    try:
        with _memory_limit(extra_bytes):
            yield
    finally:
        _alone.release()


@contextlib.contextmanager
def _memory_limit(extra_bytes: int) -> Iterator[None]:
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as statm:
            limit = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + extra_bytes
        known = [n for n in (soft, hard) if n != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([limit, *known]), hard))
    except (OSError, ValueError):  # a system without such a limit
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def bounded_time(seconds: float = JUDGING_S) -> Iterator[None]:
    """Raises `BackendLost` once this process has worked for so long; only in a main thread, where signals arrive."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    # imports torch, for which whoever only reads a notebook need not wait
    from autograder.spec import BackendLost

    def stop(*_: Any) -> None:
        raise BackendLost(TOO_MUCH)

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)  # again every second, for whoever catches it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before or signal.SIG_DFL)


@contextlib.contextmanager
def off_the_clock() -> Iterator[None]:
    """Stops the clock of `bounded_time` for work of the grader's own, which it keeps for all answers."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    left, interval = signal.setitimer(signal.ITIMER_PROF, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, left, interval)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Both bounds, around the judging of one exercise."""
    with bounded_memory(), bounded_time():
        yield
