"""`course-llm doctor`: tries, in a real worker, what a hostile answer would try, and says what holds on this machine."""

import dataclasses
import os
import platform
import shutil
import sys
from collections.abc import Iterable

from autograder import catalog
from autograder.sandbox import INSTALL, Limits, Sandbox, SandboxError, Worker
from autograder.spec import BackendLost

PROBE = '''
def probe_network():
    import socket
    socket.create_connection(("127.0.0.1", 9), timeout=1)

def probe_program():
    import subprocess
    subprocess.run(["/usr/bin/env"])

def probe_fork():
    import os
    if os.fork() == 0:
        os._exit(0)

def probe_home():
    import os
    if not set(os.listdir({home!r})) - {{{interpreter!r}}}:
        raise FileNotFoundError

def probe_project():
    import os
    if not os.listdir({project!r}):
        raise FileNotFoundError

def probe_reference():
    import course_llm.decoding

def probe_checks():
    import autograder.checks

def probe_write():
    open("/usr/probe", "w")

def probe_processes():
    import os
    if not [name for name in os.listdir("/proc") if name.isdigit()]:
        raise PermissionError

def probe_memory():
    bytearray(8 << 30)

def probe_disk():
    for i in range(200):
        with open("/tmp/%d" % i, "wb") as file:
            file.write(bytes(1 << 20))

def probe_environment():
    import os
    if not any(name.startswith(("USER", "SSH", "JUPYTER", "CI")) for name in os.environ):
        raise KeyError
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
    source = PROBE.format(home=home, project=project, interpreter=interpreter)
    findings = []
    for name in names:
        try:
            worker.allow(30)
            worker.run_cell("probe", source)
            refused = worker.perform("call", f"probe_{name}").error is not None
        except BackendLost:
            refused, worker = True, sandbox.start_worker()
        cure = "" if refused else "do not grade strangers' code on this machine"
        findings.append(Finding(WORDS[name], refused, cure))
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
