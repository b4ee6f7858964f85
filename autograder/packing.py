"""Packs this installation, so that it can be installed elsewhere: a wheel, and the versions of what it needs."""

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import io
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGES = ("autograder", "course_llm")
WHEEL = """\
Wheel-Version: 1.0
Generator: course-llm
Root-Is-Purelib: true
Tag: py3-none-any
"""
OLDEST = (1980, 1, 1, 0, 0, 0)  # the same files give the same archive


class PackingError(RuntimeError):
    """This installation cannot be packed; the message says what to do."""


def write_wheel(folder: Path) -> Path:
    """Writes a wheel of the installed packages into a folder; works from a checkout and from an installation.

    The form is that of the PyPA's binary distribution format: the packages, a .dist-info folder, and RECORD with the files' hashes.

    Raises:
        PackingError: the project is not installed.
    """
    try:
        distribution = importlib.metadata.distribution("course-llm")
    except importlib.metadata.PackageNotFoundError:
        raise PackingError("course-llm is not installed; in its folder run: pip install -e .") from None
    name = f"course_llm-{distribution.version}"
    path = folder / f"{name}-py3-none-any.whl"
    files = dict(package_files())
    info = f"{name}.dist-info"
    for entry in ("METADATA", "entry_points.txt"):
        files[f"{info}/{entry}"] = (distribution.read_text(entry) or "").encode()
    files[f"{info}/WHEEL"] = WHEEL.encode()
    for file in distribution.files or ():
        if file.parent.name == "licenses":
            files[f"{info}/licenses/{file.name}"] = file.locate().read_bytes()
    files[f"{info}/RECORD"] = record(files, f"{info}/RECORD")
    write_zip(path, files)
    return path


def package_files() -> Iterator[tuple[str, bytes]]:
    """The files of the packages, as an import would find them."""
    for package in PACKAGES:
        root = Path(importlib.util.find_spec(package).origin).parent
        for file in sorted(root.rglob("*")):
            inner = file.relative_to(root)
            hidden = any(part == "__pycache__" or part.startswith(".") for part in inner.parts)
            if file.is_file() and not hidden:
                yield f"{package}/{inner.as_posix()}", file.read_bytes()


def record(files: dict[str, bytes], own: str) -> bytes:
    """A wheel's RECORD: a line per file with its hash and size; none for RECORD itself."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        lines.writerow((name, f"sha256={digest}", len(data)))
    lines.writerow((own, "", ""))
    return text.getvalue().encode()


def write_zip(path: Path, files: dict[str, bytes], executable: Iterable[str] = ()) -> None:
    """Writes files into a zip archive; those that are named may be executed."""
    programs = set(executable)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, OLDEST)
            entry.external_attr = (0o100755 if name in programs else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)


def pinned(names: Iterable[str]) -> str:
    """Requirements that fix the installed versions of distributions and of all that they need."""
    from autograder.wall import distributions

    found = distributions(names)
    # a local version such as 2.9.0+cpu is on one index alone
    return "".join(f"{name}=={d.version.partition('+')[0]}\n" for name, d in sorted(found.items()))
