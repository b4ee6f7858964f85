"""`course-llm doctor`: tries, in a real worker, what a hostile answer would try, and says what holds on this machine."""

import dataclasses
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterable

from autograder import catalog
from autograder.remote import Worker
from autograder.sandbox import Limits, Sandbox
from autograder.spec import BackendLost
from autograder.wall import INSTALL, SandboxError

PROBE = '''
def attempt(action):
    """Whether it can be done; only what a wall answers counts as a refusal."""
    try:
        return bool(action())
    except (OSError, ImportError, MemoryError):
        return False

def fill_tmp():
    for i in range(200):
        with open("/tmp/%d" % i, "wb") as file:
            file.write(bytes(1 << 20))
    return True

def fork():
    import os
    if os.fork() == 0:
        os._exit(0)
    return True

def probe_alive():
    return True

def probe_network():
    import socket
    return attempt(lambda: socket.create_connection(("127.0.0.1", {port}), timeout=2))

def probe_program():
    import subprocess
    return attempt(lambda: subprocess.run(["/usr/bin/env"]))

def probe_fork():
    return attempt(fork)

def probe_home():
    import os
    return attempt(lambda: set(os.listdir({home!r})) - {{{interpreter!r}}})

def probe_project():
    import os
    return attempt(lambda: os.listdir({project!r}))

def probe_reference():
    return attempt(lambda: __import__("course_llm.decoding"))

def probe_checks():
    return attempt(lambda: __import__("autograder.checks"))

def probe_write():
    return attempt(lambda: open("/usr/probe", "w"))

def probe_processes():
    import os
    return attempt(lambda: [name for name in os.listdir("/proc") if name.isdigit()])

def probe_memory():
    return attempt(lambda: bytearray(8 << 30))

def probe_disk():
    return attempt(fill_tmp)

def probe_environment():
    import os
    return any(name.startswith(("USER", "SSH", "JUPYTER", "CI")) for name in os.environ)
'''
WORDS = {
    "network": "no network, not even to this machine",
    "program": "no other program is started",
    "fork": "no further process is started",
    "home": "home folders cannot be read",
    "project": "solutions, checks and other submissions cannot be read",
    "reference": "the reference cannot be imported",
    "checks": "the checks cannot be imported",
    "write": "the system cannot be written",
    "processes": "other processes cannot be seen",
    "memory": "memory is limited",
    "disk": "disk space is limited",
    "environment": "the environment of the grader is not passed on",
}


@dataclasses.dataclass
class Finding:
    """One thing that should hold, whether it does, and what to do when it does not."""

    what: str
    holds: bool
    cure: str = ""


def examine() -> list[Finding]:
    """Tries everything in `PROBE` in a real worker."""
    findings = [
        Finding("Linux", platform.system() == "Linux", "grade on Linux, in a virtual machine if need be"),
        Finding("bubblewrap is installed", shutil.which("bwrap") is not None, INSTALL),
    ]
    if not all(f.holds for f in findings):
        return findings
    stem = catalog.stems()[0]
    chapter = dataclasses.replace(catalog.chapter(stem), given="", given_modules=())
    with Sandbox(chapter, Limits(cell_s=30)) as sandbox:
        try:
            worker = sandbox.start_worker()
            findings.append(Finding("the sandbox starts", True))
        except SandboxError as error:
            return [*findings, Finding("the sandbox starts", False, str(error))]
        findings += probed(sandbox, worker)
    return findings


def probed(sandbox: Sandbox, worker: Worker, names: Iterable[str] = WORDS) -> list[Finding]:
    """Tries what `names` name in a worker, and ends it."""
    project = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    home = os.path.expanduser("~")
    # where Python itself lies below the home folder, that one path is there
    interpreter = os.path.relpath(os.path.realpath(sys.base_prefix), home).split(os.sep)[0]
    findings = []
    with socket.create_server(("127.0.0.1", 0)) as listener:  # somebody who would answer
        port = listener.getsockname()[1]
        source = PROBE.format(home=home, project=project, interpreter=interpreter, port=port)
        for name in ("alive", *names, "alive"):
            try:
                worker.allow(30)
                worker.run_cell("probe", source)
                answer = worker.perform("call", f"probe_{name}").value
                holds = answer is (name == "alive")
            except BackendLost:  # ended by a limit, if the next worker lives
                holds, worker = name != "alive", sandbox.start_worker()
            cure = "" if holds else "do not grade strangers' code on this machine"
            alive = "a worker still answers" if findings else "a worker answers"
            findings.append(Finding(WORDS.get(name, alive), holds, cure))
    worker.close()
    return findings


def print_findings(findings: list[Finding]) -> None:
    """The findings as a table."""
    from rich.console import Console
    from rich.table import Table

    who = "root" if os.geteuid() == 0 else "an ordinary user"
    table = Table("holds", "what", "cure", title=f"isolation on this machine, as {who}")
    for finding in findings:
        table.add_row("yes" if finding.holds else "NO", finding.what, "" if finding.holds else finding.cure)
    Console().print(table)
