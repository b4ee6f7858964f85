"""A JupyterHub on the loopback address for the tests, by the configuration in etc/jupyterhub, with system accounts made for it."""

import contextlib
import dataclasses
import os
import pwd
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.conftest import ROOT
from tests.postgres import free_port
from tests.test_browser_jupyter import answers_at

EXAMPLE = ROOT / "etc" / "jupyterhub"
PROGRAMS = Path(sys.executable).parent
STARTS_WITHIN_S = 240
OPEN = """
set -e
IFS='
'
stash=$(mktemp -d)
for place in $PLACES; do mkdir -p "$stash$place"; mount --rbind "$place" "$stash$place"; done
for closed in $CLOSED; do mount -t tmpfs -o mode=755 tmpfs "$closed"; done
for place in $PLACES; do mkdir -p "$place"; mount --move "$stash$place" "$place"; done
find "$stash" -xdev -depth -type d -delete
exec "$@"
"""
FEWER_WORDS = "c.JupyterHub.log_level = 'WARN'\nc.Spawner.args = ['--log-level=WARN']\n"


def missing() -> str | None:
    """What a hub with system accounts lacks here, or None."""
    if not (PROGRAMS / "jupyterhub").exists():
        return "JupyterHub is not installed: pip install '.[hub]'"
    if not shutil.which("configurable-http-proxy"):
        return "the hub's proxy is not installed: npm install --global --prefix .venv configurable-http-proxy"
    if os.getuid() != 0:
        return "only root can make the accounts of the instructor and the students"
    probe = [
        *opened(),
        *becoming("nobody"),
        sys.executable,
        "-c",
        "import jupyterhub, autograder, course_llm",
    ]
    done = subprocess.run(probe, cwd="/", capture_output=True, text=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def opened() -> list[str]:
    """The prefix of a command that lets every account read the checkout and the interpreter, which may lie in root's home.

    It holds for the command alone: in a mount namespace of its own, an empty folder takes the place of each closed one, with nothing in it but these.
    """
    places = {str(path) for path in (ROOT, Path(sys.prefix), Path(os.path.realpath(sys.base_prefix)))}
    closed = {next(iter(shut), None) for shut in map(closed_above, places)} - {None}
    hidden = sorted(place for place in places if closed_above(place))
    variables = ["PLACES=" + "\n".join(hidden), "CLOSED=" + "\n".join(map(str, closed))]
    return ["env", *variables, "unshare", "--mount", "sh", "-c", OPEN, "sh"]


def closed_above(place: str) -> list[Path]:
    """The folders above a place that other accounts may not enter, from the root on."""
    return [folder for folder in reversed(Path(place).parents) if not folder.stat().st_mode & 0o001]


def becoming(name: str) -> list[str]:
    """The prefix of a command that runs it with the rights of an account."""
    entry = pwd.getpwnam(name)
    return ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups"]


@dataclasses.dataclass(frozen=True)
class Person:
    """A system account."""

    name: str
    password: str
    home: Path
    settings: str

    def own(self, path: Path) -> None:
        """Gives a file or a folder with all that is in it to this person."""
        entry = pwd.getpwnam(self.name)
        for found in [path, *path.rglob("*")]:
            os.chown(found, entry.pw_uid, entry.pw_gid, follow_symlinks=False)

    def run(self, *command: object, cwd: Path | None = None) -> subprocess.CompletedProcess:
        """Runs a command as this person does in a terminal of the hub, but without the hub's token."""
        environment = {
            "HOME": str(self.home),
            "PATH": os.environ["PATH"],
            "OMP_NUM_THREADS": "1",
            "LANG": "C.UTF-8",
            "JUPYTER_CONFIG_PATH": self.settings,
        }
        return subprocess.run(
            [*opened(), *becoming(self.name), *map(str, command)], cwd=cwd or self.home, env=environment,
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip


@contextlib.contextmanager
def accounts(folder: Path, roles: dict[str, str]) -> Iterator[list[Person]]:
    """System accounts with homes in a folder; with their end, all that runs under them ends, and they are removed."""
    tag = secrets.token_hex(3)
    people = [
        Person(f"{name}-{tag}", secrets.token_hex(8), folder / name, settings(folder / "jupyterhub", role))
        for name, role in roles.items()
    ]
    try:
        for person in people:
            subprocess.run(
                ["useradd", "--create-home", "--home-dir", person.home, "--shell", "/bin/sh", person.name],
                check=True, capture_output=True,
            )  # fmt: skip
            person.home.chmod(0o700)  # as adduser makes it; useradd leaves it open
            subprocess.run(["chpasswd"], input=f"{person.name}:{person.password}", text=True, check=True)
        yield people
    finally:
        for person in people:
            with contextlib.suppress(KeyError):
                end_processes_of(pwd.getpwnam(person.name).pw_uid)
                subprocess.run(["userdel", person.name], check=True, capture_output=True)


def settings(folder: Path, role: str) -> str:
    """Where a role's settings lie, as the example's hook has it."""
    return f"{folder / role}:{folder / 'all'}"


def end_processes_of(uid: int) -> None:
    """Kills what an account that was made here still runs."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == uid:
                process.kill()
                process.wait(10)


@dataclasses.dataclass
class Hub:
    """A running hub."""

    address: str
    folder: Path
    exchange: Path
    people: list[Person]

    def log(self) -> str:
        return (self.folder / "hub.log").read_text()


@contextlib.contextmanager
def jupyterhub() -> Iterator[Hub]:
    """The hub of etc/jupyterhub for one instructor and two students; only names, ports and paths are changed."""
    with tempfile.TemporaryDirectory(prefix="course-llm-hub-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        exchange = folder / "exchange"
        exchange.mkdir()
        exchange.chmod(0o777)
        with accounts(folder, {"teacher": "instructors", "ada": "students", "emil": "students"}) as people:
            configure(folder, exchange, people)
            yield from serve(Hub(f"http://127.0.0.1:{free_port()}", folder, exchange, people))


def configure(folder: Path, exchange: Path, people: list[Person]) -> None:
    """Copies the example and puts these people, this exchange and these paths in the place of its own."""
    shutil.copytree(EXAMPLE, folder / "jupyterhub")
    changes = {f'"{person.name.split("-")[0]}"': f'"{person.name}"' for person in people}
    changes |= {
        "/srv/course_llm/jupyterhub": str(folder / "jupyterhub"),
        "/srv/nbgrader/exchange": str(exchange),
    }
    for path in (folder / "jupyterhub").rglob("*.py"):
        pattern = re.compile("|".join(map(re.escape, changes)))
        path.write_text(pattern.sub(lambda found: changes[found[0]], path.read_text()))
    free = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    with open(folder / "jupyterhub" / "jupyterhub_config.py", "a") as config:
        config.write(
            f"\nc.JupyterHub.hub_bind_url = {free[0]!r}\nc.ConfigurableHTTPProxy.api_url = {free[1]!r}\n{FEWER_WORDS}"
        )
        config.write(f"c.Spawner.cmd = [{str(PROGRAMS / 'jupyterhub-singleuser')!r}]\n")
        config.write(
            f"c.Spawner.environment = {{'OMP_NUM_THREADS': '1'}}\nc.Spawner.start_timeout = c.Spawner.http_timeout = {STARTS_WITHIN_S}\n"
        )


def serve(hub: Hub) -> Iterator[Hub]:
    state = hub.folder / "state"
    state.mkdir(mode=0o700)
    config = hub.folder / "jupyterhub" / "jupyterhub_config.py"
    command = [*opened(), PROGRAMS / "jupyterhub", "--config", config, "--JupyterHub.bind_url", hub.address]
    with open(hub.folder / "hub.log", "w") as log:
        server = subprocess.Popen(command, cwd=state, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not answers_at(f"{hub.address}/hub/health"):
            assert server.poll() is None and time.monotonic() < deadline, hub.log()[-3000:]
            time.sleep(0.3)
        yield hub
    finally:
        server.terminate()  # it ends the servers of its users and its proxy
        server.wait(60)
