"""Finds who handed in what in a platform's download, chooses each student's notebook, and puts it into a course folder.

Four forms are known: the archives of Moodle and Canvas, a folder of GitHub Classroom's clones, and a plain folder. Whatever is not taken is named with
the reason. A course folder changes as a whole: everything is written beside it first, and moved into place at the end.
"""

import contextlib
import dataclasses
import datetime
import json
from pathlib import Path

from autograder import catalog
from autograder.archives import MemberError, Source, SourceError
from autograder.clones import commit_time
from autograder.platforms import Finding, Work, canvas, form_of, github, grouped, moodle, plain, safe_id
from autograder.roster import People, fold, number, same_name
from autograder.staging import Staging
from autograder.submission import MAX_BYTES, SubmissionError, grade_id, parse_notebook

PACKED = (".zip", ".tar", ".gz", ".tgz", ".7z", ".rar", ".bz2", ".xz")


@dataclasses.dataclass
class Listing:
    """What was found in a folder or an archive."""

    source: Path
    form: str
    findings: list[Finding]
    passed_over: list[tuple[str, str]]
    without_work: list[str] = dataclasses.field(default_factory=list)
    no_one_known: bool = False
    """There is a roster, and nobody who handed in is in it."""

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
        form: folder, moodle, canvas, github, or auto.
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
    for finding in findings:
        distrust_number(finding, [people for people in (roster, times) if people])
    name_students(listing, roster)
    for finding in findings:
        choose(finding, stem, form)
        look_into(finding, source, stem)
        note_time(finding, times, source)
    if roster:
        there = {f.student for f in findings}
        listing.without_work = [p.student for p in roster.people if p.student not in there]
        listing.no_one_known = len(listing.without_work) == len(roster.people)
    findings.sort(key=lambda f: f.student)
    return listing


# who is it


def distrust_number(finding: Finding, tables: list[People]) -> None:
    """Forgets Moodle's number of a participant where a table gives it to somebody of another name.

    Moodle numbers the participants of every assignment anew: the table is another assignment's, and would give one student another's work.
    """
    for key in [key for key in finding.keys if key[0] == "moodle"]:
        owners = [p for people in tables for p in people.index.get(key, []) if p.name]
        if any(not same_name(p.name, finding.name) for p in owners):
            finding.keys.remove(key)
            finding.remarks.append(
                "told by the name: the table numbers the participants otherwise, as another assignment's does"
            )


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


def look_into(finding: Finding, source: Source, stem: str) -> None:
    """Remarks on a notebook that will get no points whatever is in it: it is broken, or another chapter's."""
    if not finding.chosen:
        return
    try:
        data = parse_notebook(source.read(finding.chosen.entry).decode("utf-8-sig"), finding.chosen.name)
    except UnicodeDecodeError:
        finding.remarks.append(f"{finding.chosen.name} is not UTF-8 text")
    except SubmissionError as error:
        finding.remarks.append(str(error))
    except MemberError:  # `store` says so, and leaves it out
        return
    else:
        ids = {grade_id(cell) for cell in data["cells"]} - {None}
        if ids and not ids & {entry.name for entry in catalog.chapter(stem).entries}:
            finding.remarks.append(f"it holds no exercise of {stem}")


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
    participant = number(person.says.get("moodle", "")) if person else ""
    foreign = participant not in ("", finding.ids.get("moodle", participant))
    if foreign:
        person = None
        finding.remarks.append(
            "no time: the table of times is another assignment's, by the participants' numbers"
        )
    stamp = next((w for w in finding.further if w.name == "timestamp.txt"), None)
    if person:
        finding.time, finding.time_from = person.time, "table"
        finding.further = [w for w in finding.further if w is not stamp]
    elif stamp:
        from autograder.course import time_in

        found = None
        with contextlib.suppress(MemberError, ValueError):
            found = time_in(source.read(stamp.entry)[:100].decode())
        if found:
            finding.time, finding.time_from = found.replace(tzinfo=datetime.UTC), "timestamp.txt"
        else:
            finding.further.remove(stamp)
            finding.passed_over.append((stamp.entry.path, "no time can be read from it"))
    elif finding.repository and finding.chosen:
        finding.time = commit_time(finding.repository)
        finding.time_from = "commit" if finding.time else ""
    if times and not person and not foreign:
        finding.remarks.append("no time in the table of times")
    if finding.late and not finding.time:
        finding.remarks.append("late, says Canvas")


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
            left = source.left_bytes
            for work in finding.further:
                if left - source.left_bytes > MAX_BYTES:
                    finding.passed_over.append((work.entry.path, "her further files are too large together"))
                    continue
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
