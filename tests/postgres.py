"""A PostgreSQL server of Debian's, for the tests: in a folder of its own, on the loopback address, with a password."""

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

NAME, PASSWORD = "grader", "p@ss/word"
URL_PASSWORD = "p%40ss%2Fword"
STARTS_WITHIN_S = 60


def programs() -> Path | None:
    """The folder of PostgreSQL's programs, which Debian keeps off the path; None where it is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3]))
    there = found[-1] if found else shutil.which("initdb")
    return Path(there).parent if there else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server that can be stopped and started again."""

    def __init__(self, folder: Path, owner: dict):
        self.folder, self.owner = folder, owner
        self.port = free_port()
        self.process: subprocess.Popen | None = None

    def command(self, name: str, *arguments: object) -> list[str]:
        return [str(programs() / name), *map(str, arguments)]

    def create(self) -> None:
        """Makes the empty cluster; only the password opens it."""
        secret = self.folder / "secret"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        subprocess.run(
            self.command("initdb", "-D", self.folder / "data", "-U", NAME, "--auth=scram-sha-256", f"--pwfile={secret}",
                         "--encoding=UTF8", "--locale=C", "--no-sync"),
            check=True, capture_output=True, cwd=self.folder, **self.owner,
        )  # fmt: skip

    def start(self) -> None:
        """Starts it and waits until it answers."""
        with open(self.folder / "log", "a") as log:
            self.process = subprocess.Popen(
                self.command("postgres", "-D", self.folder / "data", "-h", "127.0.0.1", "-p", self.port, "-k", self.folder, "-F"),
                stdout=log, stderr=log, cwd=self.folder, **self.owner,
            )  # fmt: skip
        ready = self.command("pg_isready", "-h", "127.0.0.1", "-p", self.port, "-q")
        deadline = time.monotonic() + STARTS_WITHIN_S
        while subprocess.run(ready).returncode:
            ended = self.process.poll() is not None or time.monotonic() > deadline
            assert not ended, (self.folder / "log").read_text()[-2000:]
            time.sleep(0.1)

    def stop(self) -> None:
        """Ends it as an administrator does who waits for nobody."""
        if self.process is not None:
            self.process.send_signal(2)  # SIGINT: the fast shutdown
            self.process.wait(60)
            self.process = None

    def database(self, name: str) -> str:
        """Makes a database; returns the address for nbgrader's `db_url`."""
        subprocess.run(
            self.command("createdb", "-h", "127.0.0.1", "-p", self.port, "-U", NAME, name),
            check=True, capture_output=True, env=os.environ | {"PGPASSWORD": PASSWORD},
        )  # fmt: skip
        return f"postgresql://{NAME}:{URL_PASSWORD}@127.0.0.1:{self.port}/{name}"


@contextlib.contextmanager
def postgres() -> Iterator[Server]:
    """A running server. It refuses to run as root, so that root lends it the account `postgres` or `nobody`."""
    with tempfile.TemporaryDirectory(prefix="course-llm-pg-") as name:
        owner = {}
        if os.getuid() == 0:
            names = {entry.pw_name: entry for entry in pwd.getpwall()}
            account = names.get("postgres") or names["nobody"]
            owner = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
            os.chown(name, account.pw_uid, account.pw_gid)
        server = Server(Path(name), owner)
        server.create()
        try:
            server.start()
            yield server
        finally:
            server.stop()
