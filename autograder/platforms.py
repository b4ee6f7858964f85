"""Who handed in which files, told from the names that Moodle, Canvas, GitHub Classroom or an instructor gave them."""

import dataclasses
import datetime
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autograder.archives import Entry, FolderSource, Source
from autograder.roster import People, fold
from autograder.submission import printable

# a student chooses the names of files, so what identifies her is looked for from the left, in what the platform wrote
MOODLE = re.compile(r"(?P<name>.+?)(?:_(?P<id>\d+))?_assignsubmission_(?P<plugin>[a-z]+)(?:_(?P<rest>.*))?$")
CANVAS = re.compile(r"(?:(?P<name>.+?)_)?(?:(?P<late>LATE)_)?(?P<id>\d+|anon_[A-Za-z0-9]+)_(?:(?P<file>\d+)_(?P<rest>.+)|(?:text|link)\.html)$")  # fmt: skip
COPY = re.compile(r"(?P<stem>.+?)(?:-(?P<again>\d{1,4})| ?\((?P<copy>\d{1,4})\))$")


@dataclasses.dataclass
class Work:
    """A file that a student handed in: what it was called, and what makes one later than another."""

    entry: Entry
    name: str
    file_id: int = 0

    @property
    def is_notebook(self) -> bool:
        return self.name.lower().endswith(".ipynb")

    @property
    def stem_and_copy(self) -> tuple[str, int]:
        """The name without what platforms and browsers add to the second file of a name: `-1`, ` (1)`."""
        stem = self.name[: -len(".ipynb")]
        found = COPY.match(stem)
        return (found["stem"], int(found["again"] or found["copy"])) if found else (stem, 0)


@dataclasses.dataclass
class Finding:
    """What was found of one student."""

    name: str
    keys: list[tuple[str, str]]
    fallback: str
    ids: dict[str, str] = dataclasses.field(default_factory=dict)
    works: list[Work] = dataclasses.field(default_factory=list)
    late: bool = False
    repository: Path | None = None
    student: str = ""
    chosen: Work | None = None
    further: list[Work] = dataclasses.field(default_factory=list)
    time: datetime.datetime | None = None
    time_from: str = ""
    remarks: list[str] = dataclasses.field(default_factory=list)
    passed_over: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict:
        return {
            "student": self.student,
            "name": self.name,
            "ids": self.ids,
            "collected": self.chosen is not None,
            "file": self.chosen.entry.path if self.chosen else None,
            "time": f"{self.time:%Y-%m-%d %H:%M:%S} UTC" if self.time else None,
            "time_from": self.time_from,
            "late": self.late,
            "remarks": self.remarks,
            "passed_over": [{"name": name, "why": why} for name, why in self.passed_over],
        }


def grouped(items: list, key: Callable[[Any], Any]) -> dict[Any, list]:
    groups: dict[Any, list] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def form_of(source: Source) -> str:
    """Which form a source has: the one that at least half of its topmost names have, so that no student decides it alone."""
    tops = grouped(source.entries, lambda e: e.parts[0])
    if isinstance(source, FolderSource) and 2 * len(source.repositories & set(tops)) >= max(1, len(tops)):
        return "github"
    for form, pattern in (("moodle", MOODLE), ("canvas", CANVAS)):
        depth = depth_of(pattern, [e.parts for e in source.entries])
        if depth is None:
            continue
        votes = sum(any(matches(pattern, e.parts, depth) for e in entries) for entries in tops.values())
        if 2 * votes >= len(tops):
            return form
    return "folder"


def matches(pattern: re.Pattern, parts: tuple[str, ...], depth: int) -> bool:
    return len(parts) > depth and pattern.match(parts[depth]) is not None


def depth_of(pattern: re.Pattern, paths: list[tuple[str, ...]]) -> int | None:
    """How many folders stand around what the platform wrote: the fewest at which a name has its form."""
    deepest = max(map(len, paths), default=0)
    return next((d for d in range(deepest) if any(matches(pattern, p, d) for p in paths)), None)


def moodle(source: Source, stem: str) -> tuple[list[Finding], list[tuple[str, str]]]:
    """`Full Name_12345_assignsubmission_file_/...`, or the same in front of the name of the file."""
    depth = depth_of(MOODLE, [e.parts for e in source.entries]) or 0
    found: dict[tuple, Finding] = {}
    left = []
    for entry in source.entries:
        match = MOODLE.match(entry.parts[depth]) if len(entry.parts) > depth else None
        if not match:
            left.append((entry.path, "its name is not in the form that Moodle gives"))
            continue
        name, participant = match["name"], match["id"] or ""
        finding = found.setdefault(
            (name, participant),
            Finding(
                name,
                [("moodle", participant), ("name", fold(name))],
                safe_id(name),
                {"moodle": participant} if participant else {},
            ),
        )
        if match["plugin"] != "file":
            finding.passed_over.append((entry.path, "text typed into Moodle, not a file"))
        else:
            flat = len(entry.parts) == depth + 1
            finding.works.append(Work(entry, match["rest"] or "" if flat else entry.parts[-1]))
    return list(found.values()), left


def canvas(source: Source, stem: str) -> tuple[list[Finding], list[tuple[str, str]]]:
    """`lastfirst_[LATE_]userid_fileid_name`, all in one folder."""
    depth = depth_of(CANVAS, [e.parts for e in source.entries]) or 0
    found: dict[str, Finding] = {}
    left = []
    for entry in source.entries:
        match = CANVAS.match(entry.parts[depth]) if len(entry.parts) == depth + 1 else None
        if not match:
            left.append((entry.path, "its name is not in the form that Canvas gives"))
            continue
        name, user = match["name"] or match["id"], match["id"]
        finding = found.setdefault(
            user,
            Finding(
                name,
                [("canvas", user), ("run together", name)],
                safe_id(f"{match['name']}_{user}" if match["name"] else user),
                {"canvas": user},
            ),
        )
        finding.late |= bool(match["late"])
        if match["file"]:
            finding.works.append(Work(entry, match["rest"], int(match["file"][:18])))
        else:
            finding.passed_over.append((entry.path, "text or a link entered into Canvas, not a file"))
    return list(found.values()), left


def github(
    source: Source, stem: str, roster: People | None, prefix: str | None
) -> tuple[list[Finding], list]:
    """`assignment-username/...`, a clone for each student."""
    found: dict[str, Finding] = {}
    left = []
    slug = prefix or source.path.resolve().name.removesuffix("-submissions")
    for entry in source.entries:
        if len(entry.parts) < 2:
            left.append((entry.path, "it lies outside of the students' repositories"))
            continue
        folder = entry.parts[0]
        if folder not in found:
            user = user_of(folder, (slug, stem), roster)
            keys = [("github", fold(user)), ("student", fold(user)), ("login", fold(user))]
            found[folder] = Finding(folder, keys, safe_id(user), {"github": user}, repository=source.path / folder)  # fmt: skip
            if user == folder and user_of(folder, (), roster) == folder:
                found[folder].remarks.append("the user's name could not be told from the repository's; say --prefix ASSIGNMENT")  # fmt: skip
        found[folder].works.append(Work(entry, entry.parts[-1]))
    return list(found.values()), left


def user_of(folder: str, slugs: tuple[str, ...], roster: People | None) -> str:
    """The user's name in a repository's: what stands behind the assignment's, or a name of the roster at its end."""
    for slug in slugs:
        if folder.startswith(f"{slug}-") and len(folder) > len(slug) + 1:
            return folder[len(slug) + 1 :]
    known = [p.says["github"] for p in roster.people if p.says.get("github")] if roster else []
    ends = [user for user in known if fold(folder).endswith("-" + fold(user))]
    return max(ends, key=len, default=folder)


def plain(source: Source, stem: str) -> tuple[list[Finding], list[tuple[str, str]]]:
    """`student/stem/...`, `student/...`, or `student.ipynb`; one more folder around it all is looked through."""
    entries, folders = source.entries, source.folders
    depth = 0
    if len({e.parts[0] for e in entries}) == 1 and all(len(e.parts) > 2 and fold(e.parts[1]) != fold(stem) for e in entries):  # fmt: skip
        depth, folders = 1, set()
    found: dict[str, Finding] = {}
    left = []

    def finding_of(name: str) -> Finding:
        keys = [(kind, fold(name)) for kind in ("student", "email", "login", "sis", "github", "name")]
        fallback = name if isinstance(source, FolderSource) else safe_id(name)
        return found.setdefault(name, Finding(name, keys, fallback))

    for entry in entries:
        inner = entry.parts[depth:]
        if len(inner) > 1:
            finding_of(inner[0]).works.append(Work(entry, inner[-1]))
            continue
        name = inner[0][: -len(".ipynb")]
        if entry.fault or not inner[0].lower().endswith(".ipynb") or fold(name) == fold(stem):
            left.append((entry.path, entry.fault or "it lies in no student's folder"))
        else:
            finding_of(name).works.append(Work(entry, f"{stem}.ipynb"))
    own = {}
    for (
        finding
    ) in found.values():  # a folder of the assignment's name says that other folders are other assignments'
        there = [w for w in finding.works if fold(stem) in map(fold, w.entry.parts[depth + 1 : None if w.entry.fault else -1])]  # fmt: skip
        if there:
            finding.works, own[finding.name] = there, finding
    if own:
        return list(own.values()), left
    for name in sorted(folders - set(found)):
        finding_of(name)
    return list(found.values()), left


def safe_id(text: str) -> str:
    """A platform's name for a student as an id: fit for a folder, a command line and a table."""
    text = unicodedata.normalize("NFC", printable(text))
    text = re.sub(r"[\s/\\:*?\"<>|\[\]{},;]+", "_", text).lstrip(".-=+@_'").rstrip("._")
    while len(text.encode()) > 100:
        text = text[:-1]
    return text or "unnamed"
