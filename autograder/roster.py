"""Who is who: tables that name the same student in several ways, and times of handing in.

A learning platform knows a student by a number, a login, an address, a name; the gradebook by an id. A roster is a CSV that puts these side by
side. The files that the platforms export themselves are read as they come: a column is known by its heading.
"""

import csv
import dataclasses
import datetime
import io
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

MAX_TABLE_BYTES = 50 << 20

# what a column says, and the headings it goes by, in lower case with spaces
HEADINGS = {
    "student": ("student id",),
    "id": ("id",),
    "email": ("email", "email address", "e-mail", "e-mail address"),
    "login": ("username", "login", "login id", "sis login id"),
    "sis": ("sis user id", "sis id", "id number", "idnumber"),
    "canvas": ("canvas id", "canvas user id", "lms user id"),
    "moodle": ("identifier", "participant"),
    "github": ("github", "github username"),
    "roster identifier": ("roster identifier",),
    "name": ("name", "full name", "student"),
    "first": ("first name", "firstname"),
    "last": ("last name", "lastname", "surname"),
    "section": ("section",),
    "time": (
        "time",
        "timestamp",
        "submitted",
        "submitted at",
        "submission timestamp",
        "last modified (submission)",
    ),
}
MEANING = {heading: meaning for meaning, headings in HEADINGS.items() for heading in headings}
KINDS = ("student", "email", "login", "sis", "canvas", "moodle", "github")
TEST_STUDENT = "student, test"  # a row of every gradebook of Canvas
AMBIGUOUS_DATE = re.compile(r"\s*\d{1,2}[/.]\d{1,2}[/.]\d{2,4}\b")


class RosterError(ValueError):
    """A table that cannot be used; the message says what to do."""


@dataclasses.dataclass
class Person:
    """A row: the student's id in the gradebook (or ""), what the columns say, and when something was handed in (UTC)."""

    student: str
    says: dict[str, str]
    time: datetime.datetime | None = None

    @property
    def name(self) -> str:
        """First and last name."""
        first, last = self.says.get("first", ""), self.says.get("last", "")
        return f"{first} {last}".strip() or swapped(self.says.get("name", ""))

    def details(self) -> dict[str, str]:
        """What nbgrader's gradebook has room for, as far as it is known: a name in one piece goes by as the last name."""
        last, comma, first = self.says.get("name", "").partition(",")
        found = {
            "first_name": self.says.get("first") or (first.strip() if comma else ""),
            "last_name": self.says.get("last") or last.strip(),
            "email": self.says.get("email", ""),
        }
        return {name: value for name, value in found.items() if value}

    def ways(self) -> set[tuple[str, str]]:
        """All that this person can be recognised by, as pairs of kind and value."""
        found = {(kind, fold(self.says[kind])) for kind in KINDS if self.says.get(kind)}
        if self.student:
            found.add(("student", fold(self.student)))
        if self.says.get("moodle"):
            found = {pair for pair in found if pair[0] != "moodle"} | {
                ("moodle", number(self.says["moodle"]))
            }
        if self.name:
            found.add(("name", fold(self.name)))
        sortable = self.says.get("name", "") if "," in self.says.get("name", "") else ""
        sortable = sortable or f"{self.says.get('last', '')}{self.says.get('first', '')}"
        if sortable:
            found.add(("run together", run_together(sortable)))
        return {(kind, value) for kind, value in found if value}


class People:
    """Finds a person by any of the ways to be recognised."""

    def __init__(self, people: Iterable[Person]):
        self.people = list(people)
        self.index: dict[tuple[str, str], list[Person]] = {}
        for person in self.people:
            for key in person.ways():
                self.index.setdefault(key, []).append(person)

    def find(self, keys: Iterable[tuple[str, str]]) -> Person | None:
        """The person that the first key with an owner belongs to; nobody where it has several."""
        for key in keys:
            found = self.index.get(key, [])
            if found:
                return found[0] if len(found) == 1 else None
        return None


def fold(text: str) -> str:
    """Text in the form in which it is compared: no case, one space for spaces and underscores."""
    return re.sub(r"[\s_]+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()


def run_together(text: str) -> str:
    """A sortable name as Canvas writes it into names of files: small letters and digits alone."""
    return re.sub(r"[^\w]", "", unicodedata.normalize("NFC", text).lower())


def same_name(one: str, other: str) -> bool:
    """Whether two full names have the same words, in any order, whatever stands between the letters."""
    one, other = (unicodedata.normalize("NFKC", name).casefold() for name in (one, other))
    return run_together(one) == run_together(other) or sorted(re.findall(r"\w+", one)) == sorted(re.findall(r"\w+", other))  # fmt: skip


def swapped(name: str) -> str:
    """`Last, First` as `First Last`."""
    last, comma, first = name.partition(",")
    return f"{first.strip()} {last.strip()}" if comma else name


def number(identifier: str) -> str:
    """The digits at the end of Moodle's `Participant 12345`."""
    found = re.search(r"(\d+)\s*$", identifier)
    return found[1] if found else ""


def decoded(data: bytes, name: str) -> str:
    """A table's text: UTF-8 with or without a mark, or what Windows writes.

    Raises:
        RosterError: it is no text.
    """
    if b"\0" in data:
        raise RosterError(f"{name} is not a CSV file in UTF-8; save it as CSV (UTF-8)")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace")


def delimiter_of(text: str) -> str:
    """The character that parts the first line into the most columns."""
    line = text.split("\n", 1)[0]
    return max(",;\t", key=lambda c: len(next(csv.reader([line], delimiter=c), [])))


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV, each by what its columns mean; columns with other headings are left out.

    Raises:
        RosterError: there is no such file, or it is no CSV.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_TABLE_BYTES + 1)
    except OSError as error:
        raise RosterError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_TABLE_BYTES:
        raise RosterError(f"{path} is larger than {MAX_TABLE_BYTES >> 20} MB")
    text = decoded(data, str(path))
    try:
        rows = list(csv.reader(io.StringIO(text), delimiter=delimiter_of(text)))
    except csv.Error as error:
        raise RosterError(f"{path} is not a CSV file: {error}") from None
    if not rows:
        raise RosterError(f"{path} is empty")
    headings = [fold(h) for h in rows[0]]
    meanings = [MEANING.get(h, "") for h in headings]
    if "sis login id" in headings:  # a gradebook of Canvas
        meanings = ["canvas" if h == "id" else m for h, m in zip(headings, meanings, strict=True)]
    if "github" in meanings:  # a roster of GitHub Classroom
        meanings = ["roster identifier" if h == "identifier" else m for h, m in zip(headings, meanings, strict=True)]  # fmt: skip
    found = []
    for row in rows[1:]:
        says = {m: cell.strip() for m, cell in zip(meanings, row, strict=False) if m and cell.strip()}
        if (
            says
            and "points possible" not in says.get("name", "").casefold()
            and fold(says.get("name", "")) != TEST_STUDENT
        ):
            found.append(says)
    return found


def read_roster(path: Path) -> People:
    """Reads a roster.

    Raises:
        RosterError: it cannot be read, or a row has no id, an id that is no name of a folder, or the id of another row.
    """
    people: dict[str, Person] = {}
    for says in read_rows(path):
        columns = ("student", "id", "login", "roster identifier", "email", "sis", "canvas")
        student = next((says[c] for c in columns if says.get(c)), "")
        if not student:
            raise RosterError(f"{path} has a row without a student's id; name the column student_id")
        if not is_id(student):
            raise RosterError(
                f"{path}: {student!r} cannot be a student's id: it must do as the name of a folder"
            )
        if student in people:
            raise RosterError(f"{path} names the student {student} twice")
        people[student] = Person(student, says)
    if not people:
        raise RosterError(f"{path} names no student; it needs a column student_id and one row for each")
    return People(people.values())


def is_id(text: str) -> bool:
    """Whether text can be a student's id, which becomes the name of a folder."""
    return bool(text) and text.isprintable() and "/" not in text and not text.startswith(".") and text == text.strip() and len(text.encode()) <= 128  # fmt: skip


def read_times(path: Path, zone: datetime.tzinfo | None) -> People:
    """Reads when students handed in, from any table that says who and when.

    Args:
        zone: of times that name none themselves; None is this machine's.

    Raises:
        RosterError: it cannot be read, has no column of times, or a time that cannot be understood.
    """
    rows = read_rows(path)
    if not any("time" in says for says in rows):
        raise RosterError(f"{path} has no column of times; name it submitted_at, and write 2026-03-01 12:00")
    people = []
    for says in rows:
        student = says.get("student") or says.get("id") or says.get("roster identifier") or ""
        when = says.get("time", "")
        if when and when != "-":
            people.append(Person(student, says, utc(when, zone, path)))
    return People(people)


def utc(text: str, zone: datetime.tzinfo | None, path: Path) -> datetime.datetime:
    """Parses a time, in UTC."""
    from dateutil import parser

    try:
        if AMBIGUOUS_DATE.match(text):
            raise ValueError
        found = parser.parse(text)
        found = found if found.tzinfo else found.replace(tzinfo=zone)
        return found.astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        raise RosterError(f"{path}: the time {text!r} is not clear; write it like 2026-03-01 12:00") from None
