"""Finds who handed in what in a platform's download, chooses each student's notebook, and puts it into a course folder.

Four forms are known: the archives of Moodle and Canvas, a folder of GitHub Classroom's clones, and a plain folder. Whatever is not taken is named with
the reason. A course folder changes as a whole: everything is written beside it first, and moved into place at the end.
"""

import dataclasses
import datetime
import json
import os
import re
import stat
import subprocess
import tempfile
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autograder import catalog
from autograder.archives import Entry, FolderSource, MemberError, Source, SourceError
from autograder.roster import People, fold
from autograder.staging import Staging
from autograder.submission import printable

FORMS = ("folder", "moodle", "canvas", "github")
# a student chooses the names of files, so what identifies her is looked for from the left, in what the platform wrote
MOODLE = re.compile(r"(?P<name>.+?)(?:_(?P<id>\d+))?_assignsubmission_(?P<plugin>[a-z]+)(?:_(?P<rest>.*))?$")
CANVAS = re.compile(r"(?:(?P<name>.+?)_)?(?:(?P<late>LATE)_)?(?P<id>\d+|anon_[A-Za-z0-9]+)_(?:(?P<file>\d+)_(?P<rest>.+)|(?:text|link)\.html)$")  # fmt: skip
COPY = re.compile(r"(?P<stem>.+?)(?:-(?P<again>\d{1,4})| ?\((?P<copy>\d{1,4})\))$")
PACKED = (".zip", ".tar", ".gz", ".tgz", ".7z", ".rar", ".bz2", ".xz")
NO_NOTEBOOK = "nothing that can be graded"


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


@dataclasses.dataclass
class Listing:
    """What was found in a folder or an archive."""

    source: Path
    form: str
    findings: list[Finding]
    passed_over: list[tuple[str, str]]
    without_work: list[str] = dataclasses.field(default_factory=list)

    @property
    def collected(self) -> list[Finding]:
        return [f for f in self.findings if f.chosen]

    @property
    def failed(self) -> list[Finding]:
        return [f for f in self.findings if not f.chosen]

    def to_json(self) -> dict:
        return {
            "source": str(self.source),
            "form": self.form,
            "students": [f.to_json() for f in self.findings],
            "passed_over": [{"name": name, "why": why} for name, why in self.passed_over],
            "nothing_handed_in": self.without_work,
        }


def examine(source: Source, stem: str, form: str = "auto", roster: People | None = None,
            times: People | None = None, prefix: str | None = None) -> Listing:  # fmt: skip
    """Says who handed in what, and chooses each one's notebook; nothing is written.

    Args:
        form: one of `FORMS`, or auto.
        prefix: what stands before the user's name in the names of GitHub Classroom's repositories.

    Raises:
        SourceError: nothing in it was handed in by anybody.
    """
    if form == "auto":
        form = form_of(source)
    readers = {"moodle": moodle, "canvas": canvas, "github": github, "folder": plain}
    if form == "github":
        findings, left = github(source, stem, roster, prefix)
    else:
        findings, left = readers[form](source, stem)
    if not findings:
        raise SourceError(f"{source.path} holds no submissions in the layout that {form} gives; see course-llm collect --help")  # fmt: skip
    listing = Listing(source.path, form, findings, [*left, *source.passed_over])
    name_students(listing, roster)
    for finding in findings:
        choose(finding, stem, form)
        note_time(finding, times, source)
    if roster:
        there = {f.student for f in findings}
        listing.without_work = [p.student for p in roster.people if p.student not in there]
    findings.sort(key=lambda f: f.student)
    return listing


# the four forms


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


# who is it


def name_students(listing: Listing, roster: People | None) -> None:
    """Gives every finding its student's id, by the roster or by what the platform says.

    Nobody gets another's by a name of her choice: the better way of being recognised wins, and an id of the roster is given by the roster alone.
    """
    persons = {id(f): roster.find(f.keys) for f in listing.findings} if roster else {}
    owners = grouped([f for f in listing.findings if persons.get(id(f))], lambda f: persons[id(f)].student)
    for student, same in owners.items():
        ranks = {id(f): next(i for i, key in enumerate(f.keys) if roster.index.get(key)) for f in same}
        best = [f for f in same if ranks[id(f)] == min(ranks.values())]
        for finding in same:
            if finding not in best:
                persons[id(finding)] = None
            finding.student = student if finding in best else ""
            if len(best) > 1 and finding in best:
                finding.passed_over += [(w.entry.path, f"{len(best)} submissions belong to {student}") for w in finding.works]  # fmt: skip
                finding.works = []
    taken = {p.student for p in roster.people} if roster else set()
    others = [f for f in listing.findings if not f.student]
    for name, same in grouped(others, lambda f: f.fallback).items():
        for finding in same:
            number = safe_id(next(iter(finding.ids.values()), "again"))
            alone = len(same) == 1 and name not in taken
            finding.student = name if alone else f"{name}_{number}"
            if not alone:
                finding.remarks.append("others have the same name")
            if roster:
                finding.remarks.append("not in the roster, or not told apart there")


def grouped(items: list, key: Callable[[Any], Any]) -> dict[Any, list]:
    groups: dict[Any, list] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


# which file


def choose(finding: Finding, stem: str, form: str) -> None:
    """Chooses a student's notebook: the one of the chapter's name, else the only one, else the newest; the last of several attempts."""
    others = {fold(s) for s in catalog.stems()} - {fold(stem)}
    notebooks, rest = [], []
    for work in finding.works:
        if work.entry.fault:
            finding.passed_over.append((work.entry.path, work.entry.fault))
        elif ".ipynb_checkpoints" in work.entry.parts:
            finding.passed_over.append((work.entry.path, "a copy that Jupyter keeps"))
        elif work.is_notebook:
            notebooks.append(work)
        else:
            rest.append(work)
    named = [w for w in notebooks if fold(w.stem_and_copy[0]) == fold(stem)]
    others_work = [w for w in notebooks if fold(w.stem_and_copy[0]) in others]
    pool = named or [w for w in notebooks if w not in others_work]
    finding.passed_over += [(w.entry.path, "another chapter's, by its name") for w in others_work]
    if not named:
        why = "older than the one taken"
    else:
        why = "an earlier attempt, or a copy"
        finding.passed_over += [(w.entry.path, "unused: another has the chapter's name") for w in notebooks if w not in named and w not in others_work]  # fmt: skip
    choose_from(finding, pool, stem, form, bool(named), why)
    for work in rest:  # what lies beside the notebook is the student's data; platforms hand over single files
        beside = (
            form == "folder" and finding.chosen and work.entry.parts[:-1] == finding.chosen.entry.parts[:-1]
        )
        if beside and len(work.name.encode()) <= 200:
            finding.further.append(work)
        elif work.name.lower().endswith(PACKED):
            finding.passed_over.append((work.entry.path, "an archive; it is not opened: ask for the notebook itself"))  # fmt: skip
        else:
            finding.passed_over.append((work.entry.path, "not a notebook"))


def choose_from(finding: Finding, pool: list[Work], stem: str, form: str, named: bool, why: str) -> None:
    """Chooses the last of some notebooks, and notes why the others are not taken."""
    if not pool:
        return
    rank = {id(w): newness(w, form, named) for w in pool}
    pool.sort(key=lambda w: rank[id(w)])
    if len(pool) > 1 and not named and rank[id(pool[-1])] == rank[id(pool[-2])]:
        finding.passed_over += [(w.entry.path, f"one of {len(pool)} notebooks, none called {stem}.ipynb: which one?") for w in pool]  # fmt: skip
        return
    finding.chosen = pool[-1]
    finding.passed_over += [(w.entry.path, why) for w in pool[:-1]]
    if not named:
        finding.remarks.append(f"called {finding.chosen.name}")
    elif len(pool) > 1:
        finding.remarks.append(f"the last of {len(pool)} attempts")


def newness(work: Work, form: str, named: bool) -> tuple:
    """What makes one file later than another. A zip's own times are those of the download and say nothing."""
    changed = work.entry.changed_s if form == "folder" else 0.0
    if not named:
        return (work.file_id, changed)
    return (work.file_id, work.stem_and_copy[1], -len(work.entry.parts), changed, work.entry.path)


# when


def note_time(finding: Finding, times: People | None, source: Source) -> None:
    """Notes when a student handed in: from a table, else from a file timestamp.txt, else, for a clone, from its last commit."""
    person = times.find([("student", fold(finding.student)), *finding.keys]) if times else None
    stamp = next((w for w in finding.further if w.name == "timestamp.txt"), None)
    if person:
        finding.time, finding.time_from = person.time, "table"
        finding.further = [w for w in finding.further if w is not stamp]
    elif stamp:
        from nbgrader.utils import parse_utc

        try:
            found = parse_utc(source.read(stamp.entry)[:100].decode().strip())
            finding.time, finding.time_from = found.replace(tzinfo=datetime.UTC), "timestamp.txt"
        except (MemberError, ValueError, OverflowError):
            finding.further.remove(stamp)
            finding.passed_over.append((stamp.entry.path, "no time can be read from it"))
    elif finding.repository and finding.chosen:
        finding.time = commit_time(finding.repository)
        finding.time_from = "commit" if finding.time else ""
    if times and not person:
        finding.remarks.append("no time in the table of times")
    if finding.late and not finding.time:
        finding.remarks.append("late, says Canvas")


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


# into the course folder


def store(source: Source, listing: Listing, stem: str, root: Path) -> bool:
    """Puts every chosen notebook into submitted/ of a course folder, and notes who it was in collected/; all or nothing.

    A notebook that cannot be read after all costs its student alone: the finding then has none. Returns whether a collect that was interrupted
    before has been finished, too.
    """
    note = f"collected/{stem}.json"
    with Staging(root) as staging:
        students = read_record(root / note)
        for finding in listing.collected:
            assert finding.chosen
            try:
                files: dict[str, bytes | Path] = {f"{stem}.ipynb": source.read(finding.chosen.entry)}
            except MemberError as error:
                finding.passed_over.append((finding.chosen.entry.path, str(error)))
                finding.chosen = None
                continue
            for work in finding.further:
                try:
                    files[work.name] = source.read(work.entry)
                except MemberError as error:
                    finding.passed_over.append((work.entry.path, str(error)))
            if finding.time and finding.time_from != "timestamp.txt":
                files["timestamp.txt"] = f"{finding.time:%Y-%m-%d %H:%M:%S} UTC\n".encode()
            staging.add(finding.student, stem, files)
            said = finding.to_json()
            students[finding.student] = {k: said[k] for k in ("name", "ids", "file", "time", "time_from", "late")} | {"form": listing.form}  # fmt: skip
        if listing.collected:
            staging.commit((note, {"assignment": stem, "students": dict(sorted(students.items()))}))
        return staging.recovered


def read_record(path: Path) -> dict:
    """What collecting has noted of an assignment's students; nothing where there is no such note."""
    try:
        students = json.loads(path.read_text("utf-8"))["students"]
        return students if isinstance(students, dict) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
