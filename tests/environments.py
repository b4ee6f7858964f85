"""A fresh environment for what is installed elsewhere, without a network: it sees the libraries of this one, but not the project."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that other users may enter, too; pytest's own are closed to them."""
    folder = Path(tempfile.mkdtemp(prefix="course-llm-test-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def interpreter() -> str:
    """A Python of this version that other users may start; the one in use where there is none."""
    own = os.path.realpath(sys.executable)
    system = "/usr/bin/python{}.{}".format(*sys.version_info[:2])
    return own if reachable(own) or not os.path.exists(system) else system


def reachable(path: str) -> bool:
    """Whether every user may enter all folders above a path."""
    return all(parent.stat().st_mode & 0o005 == 0o005 for parent in Path(path).parents)


def make(folder: Path, python: str, names: Iterable[str]) -> Path:
    """Makes an environment in which exactly the named distributions of this one are installed, by links."""
    links = folder / "links"
    links.mkdir()
    for name in names:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            place = Path(distribution.locate_file(top))
            if place.exists() and not (links / top).exists():
                (links / top).symlink_to(place)
    subprocess.run([python, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (site,) = (folder / "venv" / "lib").glob("python3*/site-packages")
    (site / "links.pth").write_text(f"{links}\n")
    return folder / "venv"
