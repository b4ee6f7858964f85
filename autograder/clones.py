"""Reads when the last commit of a clone was made, and runs nothing that the clone brings along."""

import datetime
import os
import re
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any


def commit_time(repository: Path) -> datetime.datetime | None:
    """When the last commit of a clone was made, by the clock of whoever made it; None where that cannot be told.

    Nothing of the repository is run: git works in an empty repository of its own, with no configuration but its defaults, and is lent the
    store of objects. The name of the commit is read from the files that hold it.
    """
    folder = repository / ".git"
    head = head_of(folder)
    objects = folder / "objects"
    if head is None or not is_folder(folder) or not is_folder(objects):
        return None
    with tempfile.TemporaryDirectory() as own:
        environment = {
            "PATH": os.defpath,
            "HOME": own,
            "GIT_DIR": f"{own}/git",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "LC_ALL": "C",
        }
        try:
            calm: dict[str, Any] = {
                "stdin": subprocess.DEVNULL,
                "capture_output": True,
                "timeout": 20,
                "cwd": own,
            }
            subprocess.run(
                ["git", "init", "-q", "--bare", "--template="], env=environment, check=True, **calm
            )
            lent = environment | {"GIT_OBJECT_DIRECTORY": str(objects.resolve())}
            size = subprocess.run(["git", "cat-file", "-s", head], env=lent, check=True, **calm).stdout
            if int(size) > 1 << 20:
                return None
            text = subprocess.run(["git", "cat-file", "commit", head], env=lent, check=True, **calm).stdout
            found = re.search(rb"^committer [^\n]*> (\d{1,12}) [+-]\d{4}$", text.split(b"\n\n")[0], re.M)
            return datetime.datetime.fromtimestamp(int(found[1]), datetime.UTC) if found else None
        except (OSError, subprocess.SubprocessError, ValueError, OverflowError):
            return None


def head_of(folder: Path) -> str | None:
    """The name of the commit that is checked out, from a repository's own files."""
    text = small_text(folder / "HEAD")
    found = re.fullmatch(r"ref: (refs/heads/[\w./-]{1,200})", text)
    if found and ".." not in found[1]:
        packed = re.search(
            rf"^([0-9a-f]{{40}}) {re.escape(found[1])}$", small_text(folder / "packed-refs"), re.M
        )
        text = small_text(folder / found[1]) or (packed[1] if packed else "")
    return text if re.fullmatch(r"[0-9a-f]{40}", text) else None


def small_text(path: Path) -> str:
    """A small plain file's text without spaces around it; empty where there is none."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return (
                file.read(1 << 20).decode().strip() if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else ""
            )
    except (OSError, UnicodeDecodeError):
        return ""


def is_folder(path: Path) -> bool:
    """Whether a path is a folder itself, not a link to one."""
    return path.is_dir() and not path.is_symlink()
