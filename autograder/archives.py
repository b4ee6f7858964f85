"""Reads the files that a class handed in, out of a folder or a zip archive, and trusts neither.

Whatever an archive says of itself may be false. Names are only read, never used as paths. Sizes are counted while a member is inflated.
Links, devices, encrypted members and archives in the archive are named and left alone. What is wrong with one member costs its owner only.
"""

import contextlib
import dataclasses
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autograder.guard import bounded_memory
from autograder.submission import MAX_BYTES, MAX_DEPTH, MAX_FURTHER_FILES, printable

MAX_MEMBERS = 50_000
MAX_TOTAL_BYTES = 4 << 30
DIRECTORY_BYTES = 1 << 30
NOT_WORK = {"__MACOSX", ".DS_Store", "Thumbs.db", "desktop.ini", ".git", "__pycache__"}
# what Moodle, Canvas and zip programs write; other methods let an archive choose how much memory its reader takes
METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OverflowError,
    EOFError,
    OSError,
)


class SourceError(ValueError):
    """A folder or archive from which nothing can be collected; the message says what to do."""


class MemberError(ValueError):
    """A file in it that cannot be taken; the message says why."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file: the parts of its name, fit to be printed, when it was changed (in seconds since 1970), where it is, and why it is not taken."""

    parts: tuple[str, ...]
    changed_s: float = 0.0
    place: Any = None
    fault: str = ""

    @property
    def path(self) -> str:
        return "/".join(self.parts)


@dataclasses.dataclass
class Source:
    """The files of a folder or an archive, and those that could be anybody's, with the reason why they are passed over."""

    path: Path
    entries: list[Entry] = dataclasses.field(default_factory=list)
    passed_over: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    folders: set[str] = dataclasses.field(default_factory=set)
    left_bytes: int = MAX_TOTAL_BYTES

    def read(self, entry: Entry) -> bytes:
        """The content of a file.

        Raises:
            MemberError: this file cannot be taken.
            SourceError: all that was read is more than a class hands in.
        """
        if entry.fault:
            raise MemberError(entry.fault)
        with self.opened(entry) as stream:
            parts, count = [], 0
            while part := stream.read(min(1 << 20, MAX_BYTES + 1 - count)):
                parts.append(part)
                count += len(part)
                self.left_bytes -= len(part)
                if count > MAX_BYTES:
                    raise MemberError(f"it is larger than {MAX_BYTES >> 20} MB")
                if self.left_bytes < 0:
                    raise SourceError(
                        f"{self.path} unfolds to more than {MAX_TOTAL_BYTES / (1 << 30):g} GB; collect it in parts"
                    )
        return b"".join(parts)

    def opened(self, entry: Entry) -> Any:
        raise NotImplementedError


class FolderSource(Source):
    """A folder. Links are not followed."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.repositories: set[str] = set()
        self._counts: dict[tuple[str, ...], int] = {}
        self._around = 1
        self._walk(path, ())

    def _walk(self, folder: Path, parts: tuple[str, ...]) -> None:
        if self._counts.get(parts[: self._around], 0) > MAX_FURTHER_FILES:
            return
        try:
            # a folder's own files before those of the folders in it, so that many of these hide none of those
            names = sorted(os.listdir(folder), key=lambda n: (os.path.isdir(folder / n), n))
            if not parts and sum(os.path.isdir(folder / n) for n in names) == 1:
                self._around = 2  # one more folder around it all
        except OSError as error:
            if not parts:
                raise SourceError(f"{folder} cannot be read: {error.strerror}") from None
            self.entries.append(Entry(parts, fault=f"it cannot be read: {error.strerror}"))
            return
        for name in names:
            place, here = folder / name, (*parts, printable(name))
            if name == ".git" and len(parts) == 1:
                self.repositories.add(parts[0])
            if name in NOT_WORK:
                continue
            found = os.lstat(place)
            if stat.S_ISDIR(found.st_mode) and len(here) < MAX_DEPTH:
                if not parts:
                    self.folders.add(here[0])
                self._walk(place, here)
                continue
            whose = here[: self._around]
            self._counts[whose] = self._counts.get(whose, 0) + 1
            if len(parts) >= self._around and self._counts[whose] > MAX_FURTHER_FILES:
                if self._counts[whose] == MAX_FURTHER_FILES + 1:
                    words = f"here or below are more than {MAX_FURTHER_FILES:,} files of one student; the rest is left out"
                    self.passed_over.append(("/".join(parts), words))
                return
            fault = fault_of(found.st_mode, len(here))
            self.entries.append(Entry(here, found.st_mtime, place, fault))
            if len(self.entries) > MAX_MEMBERS:
                raise SourceError(f"{self.path} holds more than {MAX_MEMBERS:,} files; collect it in parts")

    @contextlib.contextmanager
    def opened(self, entry: Entry) -> Iterator[Any]:
        try:
            handle = os.open(entry.place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(handle, "rb") as stream:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise MemberError("it is not a plain file")
                yield stream
        except OSError as error:
            raise MemberError(f"it cannot be read: {error.strerror}") from None


class ZipSource(Source):
    """A zip archive."""

    def __init__(self, path: Path):
        super().__init__(path)
        file = open(path, "rb")  # noqa: SIM115  # the archive reads from it as long as it lives
        try:
            with bounded_memory(DIRECTORY_BYTES):
                self.archive = zipfile.ZipFile(file)
        except MemoryError:
            raise SourceError(
                f"{path} names too many files to be a class's work; collect it in parts"
            ) from None
        except ZIP_ERRORS:
            raise SourceError(f"{path} is not a zip archive, or it is damaged; download it again") from None
        members = self.archive.infolist()
        if len(members) > MAX_MEMBERS:
            raise SourceError(f"{path} holds more than {MAX_MEMBERS:,} files; collect it in parts")
        for member in members:
            self._enter(member)

    def _enter(self, member: zipfile.ZipInfo) -> None:
        parts, unsafe = member_parts(member)
        mode = member.external_attr >> 16
        if (
            not parts
            or NOT_WORK & set(parts)
            or stat.S_ISDIR(mode)
            or member.orig_filename.endswith(("/", "\\"))
        ):
            return
        if unsafe:
            self.passed_over.append(("/".join(parts), "its name points out of the archive"))
        else:
            self.entries.append(Entry(parts, place=member, fault=fault_of(mode, len(parts))))

    @contextlib.contextmanager
    def opened(self, entry: Entry) -> Iterator[Any]:
        member = entry.place
        if member.flag_bits & 1:
            raise MemberError("it is encrypted")
        if member.compress_type not in METHODS:
            raise MemberError("it is packed in a way that is not read here")
        try:
            with self.archive.open(member) as stream:
                yield stream
        except (MemberError, SourceError):
            raise
        except ZIP_ERRORS:
            raise MemberError("it is damaged in the archive") from None


def fault_of(mode: int, depth: int) -> str:
    """Why a file of this mode, so deep in folders, is not taken; empty when it may be."""
    if stat.S_ISLNK(mode):
        return "a link; links are not followed"
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "not a plain file"
    return "too deep in folders" if depth >= MAX_DEPTH else ""


def member_parts(member: zipfile.ZipInfo) -> tuple[tuple[str, ...], bool]:
    """The parts of a member's name as text fit to be printed, and whether the name points out of the archive."""
    name = member.orig_filename
    if (
        not member.flag_bits & 0x800
    ):  # no word of UTF-8: older programs wrote it all the same, others code page 437
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode("utf-8")
    name = name.replace("\\", "/")
    raw = [part for part in name.split("/") if part not in ("", ".")]
    unsafe = ".." in raw or name.startswith("/") or re.match(r"[A-Za-z]:/", name) is not None
    return tuple(printable(part)[:255] for part in raw), unsafe


def open_source(path: Path) -> Source:
    """Opens a folder or a zip archive.

    Raises:
        SourceError: it is neither, or cannot be read.
    """
    if path.is_dir():
        return FolderSource(path)
    if not path.is_file():
        raise SourceError(f"there is no folder or archive {path}")
    return ZipSource(path)
