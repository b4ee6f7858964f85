"""Puts collected work into a course folder as a whole.

Everything is written into `.collecting` in the course folder first. Its journal, written last, is the point of no return: before it, an interrupted
collect leaves the course as it was; after it, the next one finishes the moves.
"""

import contextlib
import json
import os
import shutil
import stat
from pathlib import Path

from autograder.submission import is_plain

JOURNAL = "journal.json"


class Staging:
    """A context in which students' work is laid ready; `commit` puts it in place."""

    def __init__(self, root: Path):
        self.root = root
        self.folder = root / ".collecting"
        self.students: list[tuple[str, str]] = []
        self.recovered = False

    def __enter__(self) -> "Staging":
        self.lock = os.open(self.root, os.O_RDONLY)
        with contextlib.suppress(
            ImportError, OSError
        ):  # without locks two collects at a time are the user's to avoid
            import fcntl

            fcntl.flock(self.lock, fcntl.LOCK_EX)
        if (self.folder / JOURNAL).exists():
            self._move_into_place()
            self.recovered = True
        self._clear()
        self.folder.mkdir()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if not (self.folder / JOURNAL).exists():
                self._clear()
        finally:
            os.close(self.lock)

    def add(self, student: str, stem: str, files: dict[str, bytes | Path]) -> None:
        """Lays one student's work ready; it will take the place of what she handed in before."""
        place = self.folder / str(len(self.students))
        place.mkdir()
        self.students.append((student, stem))
        for name, content in files.items():
            if isinstance(content, bytes):
                (place / name).write_bytes(content)
            elif is_plain(content) and os.access(content, os.R_OK):
                shutil.copyfile(content, place / name, follow_symlinks=False)

    def commit(self, record: tuple[str, dict] | None = None) -> None:
        """Puts everything in place, and replaces a file of the course folder by the record, given with its name."""
        if not self.students and not record:
            return
        if record:
            (self.folder / "record").write_text(json.dumps(record[1], indent=1, ensure_ascii=False) + "\n", "utf-8")  # fmt: skip
        os.sync()
        journal = {"students": self.students, "record": record[0] if record else None}
        with open(self.folder / "journal.tmp", "w", encoding="utf-8", errors="surrogateescape") as file:
            json.dump(journal, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.folder / "journal.tmp", self.folder / JOURNAL)
        self._move_into_place()
        self._clear()

    def _move_into_place(self) -> None:
        journal = json.loads((self.folder / JOURNAL).read_text("utf-8"))
        for number, (student, stem) in enumerate(journal["students"]):
            place, target = self.folder / str(number), self.root / "submitted" / student / stem
            if not place.exists():  # moved before the interruption
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_symlink():
                target.unlink()
            elif target.exists():
                make_writable(target)
                before = self.folder / f"before-{number}"
                if before.exists():
                    remove(before)
                os.rename(target, before)
            os.rename(place, target)
        if journal["record"] and (self.folder / "record").exists():
            target = self.root / journal["record"]
            target.parent.mkdir(exist_ok=True)
            os.replace(self.folder / "record", target)

    def _clear(self) -> None:
        if self.folder.exists():
            # the journal goes last: without the work beside it, it would have nothing to finish
            for entry in sorted(self.folder.iterdir(), key=lambda p: p.name == JOURNAL):
                remove(entry)
            self.folder.rmdir()


def make_writable(folder: Path) -> None:
    """Takes the write protection from a folder, which nbgrader's exchange leaves on what it collects."""
    folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_IRWXU)


def remove(path: Path) -> None:
    """Removes a file, or a folder with what is in it."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return
    for folder, names, _ in os.walk(path):
        for name in names:
            if not (inner := Path(folder, name)).is_symlink():
                make_writable(inner)
    make_writable(path)
    shutil.rmtree(path)
