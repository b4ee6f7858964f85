"""Writes grades in the forms that learning platforms import: Canvas's gradebook and Moodle's grading worksheet.

The safe way is to fill the file that the platform exported: one cell a student changes, every other byte stays. Without such a file a new one is
written. Grades are nbgrader's, less the penalty for lateness.
"""

import csv
import dataclasses
import io
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autograder.catalog import Chapter
from autograder.platforms import CANVAS, MOODLE
from autograder.roster import (
    MEANING,
    TEST_STUDENT,
    People,
    Person,
    fold,
    number,
    run_together,
    swapped,
)
from autograder.sheet import LmsError, Sheet

# headings in a gradebook of Canvas that are no assignments
CANVAS_WHO = ("student", "lastname", "firstname", "id", "sis user id", "sis login id", "integration id", "root account", "section")  # fmt: skip
CANVAS_TOTALS = re.compile(r"\b(Current|Final|Override) (Score|Points|Grade|Status)\b")
FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclasses.dataclass
class Grade:
    """A student's grade; `score` is None when she handed nothing in, else the points less the penalty."""

    person: Person
    score: float | None = None
    penalty: float = 0.0
    timestamp: Any = None
    exercises: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Written:
    """What a file says, and what it could not say."""

    data: bytes
    filled: int = 0
    unknown_rows: list[str] = dataclasses.field(default_factory=list)
    unknown_students: list[str] = dataclasses.field(default_factory=list)
    left: list[str] = dataclasses.field(default_factory=list)


# the gradebook


def read_grades(gradebook: Any, chapter: Chapter, record: dict, roster: People | None) -> tuple[list[Grade], float]:  # fmt: skip
    """All students' grades of a chapter, by id, and the points that there are.

    Args:
        record: what collecting noted of the students of this assignment, by id.
    """
    from nbgrader.api import Grade as Stored
    from nbgrader.api import GradeCell, SubmittedAssignment, SubmittedNotebook

    assignment = gradebook.find_assignment(chapter.stem)
    people = roster.people if roster else []  # its numbers of participants may be another assignment's
    listed = {p.student: {k: v for k, v in p.says.items() if k != "moodle"} for p in people}
    known_by = recognised([s.id for s in gradebook.students], record, roster) if roster else {}
    grades = {}
    for student in gradebook.students:
        noted = record.get(student.id, {})
        ours = {"first": student.first_name, "last": student.last_name, "email": student.email, "canvas": student.lms_user_id}  # fmt: skip
        known = {k: v for k, v in ours.items() if v}
        says = {"name": noted.get("name", "")} if noted.get("form") == "moodle" else {}
        says |= known | listed.pop(known_by.get(student.id, student.id), {}) | noted.get("ids", {})
        grades[student.id] = Grade(Person(student.id, {k: str(v) for k, v in says.items()}))
    for student, says in listed.items():  # whom the gradebook does not know has handed nothing in
        grades.setdefault(student, Grade(Person(student, says)))
    for submission in assignment.submissions:
        grade = grades[submission.student_id]
        grade.penalty = submission.late_submission_penalty or 0.0
        grade.score = max(0.0, submission.score - grade.penalty)
        grade.timestamp = submission.timestamp
    cells = (
        gradebook.db.query(SubmittedAssignment.student_id, GradeCell.name, Stored.score)
        .select_from(Stored)
        .join(SubmittedNotebook, Stored.notebook_id == SubmittedNotebook.id)
        .join(SubmittedAssignment, SubmittedNotebook.assignment_id == SubmittedAssignment.id)
        .join(GradeCell, Stored.cell_id == GradeCell.id)
        .filter(SubmittedAssignment.assignment_id == assignment.id)
    )
    for student, name, points in cells:
        grades[student].exercises[name.removeprefix("check_")] = points
    return [grades[s] for s in sorted(grades)], assignment.max_score


def recognised(students: list[str], record: dict, roster: People) -> dict[str, str]:
    """The roster's ids of students who were collected without it, and so go by another id in the gradebook.

    Moodle's number says nothing here, since every assignment has its own, and a roster's student is nobody's twice.
    """
    free = {p.student for p in roster.people} - set(students)
    found: dict[str, list[str]] = {}
    for student in sorted(set(students) - {p.student for p in roster.people}):
        noted = record.get(student, {})
        ids = [
            (kind, fold(value))
            for kind, value in noted.get("ids", {}).items()
            if kind in ("canvas", "github")
        ]
        ours = [(kind, fold(student)) for kind in ("email", "login", "sis", "github")]
        name = [("name", fold(noted["name"]))] if noted.get("form") == "moodle" and noted.get("name") else []
        person = roster.find([*ids, *name, *ours])
        if person and person.student in free:
            found.setdefault(person.student, []).append(student)
    return {same[0]: person for person, same in found.items() if len(same) == 1}


# forms of our own


def exercises_csv(grades: list[Grade], chapter: Chapter, max_points: float) -> bytes:
    """A row for each student and a column for each exercise; empty cells where nothing was handed in."""
    names = [entry.name for entry in chapter.entries]
    names += sorted({name for grade in grades for name in grade.exercises} - set(names))
    head = ["student_id", "last_name", "first_name", "email", "submitted_at", *names, "late_penalty", "score", "max_score"]  # fmt: skip
    rows = [head]
    for grade in grades:
        says = grade.person.says
        points = [plain_number(grade.exercises[name]) if name in grade.exercises else "" for name in names]
        done = grade.score is not None
        rows.append(
            [
                text(grade.person.student),
                text(says.get("last", "")),
                text(says.get("first", "")),
                text(says.get("email", "")),
                f"{grade.timestamp:%Y-%m-%d %H:%M:%S} UTC" if grade.timestamp else "",
                *points,
                plain_number(grade.penalty) if done else "",
                plain_number(grade.score) if done else "",
                plain_number(max_points),
            ]
        )
    return table(rows)


def new_canvas(grades: list[Grade], max_points: float, title: str) -> Written:
    """A gradebook for Canvas to import: `Student`, its ids, `Section`, and one assignment."""
    rows = [["Student", "ID", "SIS User ID", "SIS Login ID", "Section", title]]
    rows.append(["    Points Possible", "", "", "", "", plain_number(max_points)])
    written = Written(b"")
    for grade in grades:
        says = grade.person.says
        if grade.score is None:
            written.left.append(f"{grade.person.student}: has no grade")
            continue
        sortable = f"{says['last']}, {says['first']}" if says.get("last") and says.get("first") else says.get("name", "")  # fmt: skip
        ids = [says.get("canvas", ""), says.get("sis", ""), says.get("login", "")]
        if not any(ids):
            written.unknown_students.append(f"{grade.person.student}: no id of Canvas, no SIS id, no login is known")  # fmt: skip
        rows.append([text(sortable or grade.person.student), *ids, text(says.get("section", "")), plain_number(grade.score)])  # fmt: skip
        written.filled += 1
    written.data = table(rows)
    return written


def new_moodle(grades: list[Grade], title: str) -> Written:
    """A table for Moodle's grade import, where its columns are mapped to Moodle's own."""
    rows = [["Student id", "Username", "ID number", "Email address", "First name", "Last name", title]]
    written = Written(b"")
    for grade in grades:
        says = grade.person.says
        if grade.score is None:
            written.left.append(f"{grade.person.student}: has no grade")
            continue
        ids = [says.get(k, "") for k in ("login", "sis", "email")]
        if not any(ids):
            written.unknown_students.append(f"{grade.person.student}: no username, ID number or address is known")  # fmt: skip
        names = [text(says.get("first", "")), text(says.get("last", ""))]
        rows.append([grade.person.student, *ids, *names, plain_number(grade.score)])
        written.filled += 1
    written.data = table(rows)
    return written


def table(rows: list[list[str]]) -> bytes:
    """Rows as a CSV in UTF-8."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().encode("utf-8", "replace")


def without_formulas(data: str) -> bytes:
    """A table that nbgrader has written, with every cell that is no number fit for a spreadsheet."""
    rows = list(csv.reader(io.StringIO(data)))
    return table([[cell if is_number(cell) else text(cell) for cell in row] for row in rows])


def is_number(cell: str) -> bool:
    """Whether a cell holds a number, which may have a sign."""
    return re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?", cell) is not None


def text(words: str) -> str:
    """Free text for a cell: on one line, and not taken for a formula by a spreadsheet."""
    words = "".join(c for c in words if c.isprintable() or c == "\t")
    return "'" + words if words.lstrip().startswith(FORMULA) or words.startswith(FORMULA) else words


def plain_number(points: float) -> str:
    """Points with at most two decimals, which is what the platforms keep."""
    return format(round(points, 2) + 0.0, ".10g")


# a platform's own file


def fill_canvas(sheet: Sheet, grades: list[Grade], max_points: float, stem: str, column: str | None, scale: bool) -> Written:  # fmt: skip
    """Fills one assignment's column of the gradebook that Canvas exported."""
    headings = sheet.columns()
    where = {fold(h): c for h, c in headings.items()}
    if "id" not in where or not ({"student", "lastname"} & set(where)):
        raise LmsError(f"{sheet.path} is not a gradebook of Canvas: it has no columns Student and ID; export it with Grades, Export, Export Entire Gradebook")  # fmt: skip
    points_row = next((r for r in range(1, len(sheet.rows)) if "points possible" in sheet.get(r, 0).casefold()), None)  # fmt: skip
    fit = {h: c for h, c in headings.items() if fold(h) not in CANVAS_WHO and not CANVAS_TOTALS.search(h)
           and not (points_row and "read only" in sheet.get(points_row, c))}  # fmt: skip
    chosen = chosen_column(fit, column or stem, sheet.path, exact=bool(column))
    possible = as_number(sheet.get(points_row, chosen)) if points_row else None

    def keys(row: int) -> list[tuple[str, str]]:
        cell = {kind: sheet.get(row, where.get(h)).strip() for kind, h in (("canvas", "id"), ("sis", "sis user id"), ("login", "sis login id"))}  # fmt: skip
        name = sheet.get(row, where.get("student")) or f"{sheet.get(row, where.get('lastname'))}, {sheet.get(row, where.get('firstname'))}"  # fmt: skip
        typed = list(cell.items())
        return [*typed, ("email", cell["login"]), ("email", cell["sis"]), ("student", cell["login"]), ("student", cell["sis"]),
                ("student", cell["canvas"]), ("name", swapped(name))]  # fmt: skip

    def name(row: int) -> str:
        names = [sheet.get(row, where.get(h)) for h in ("student", "lastname", "firstname")]
        return f"{', '.join(n for n in names if n)} ({sheet.get(row, where['id'])})"

    def is_student(row: int) -> bool:
        cells = [sheet.get(row, c).strip() for c in range(len(sheet.rows[row]))]
        return row != points_row and any(c and not c.startswith(("Manual Posting", "Muted")) for c in cells)

    rows = [r for r in range(1, len(sheet.rows)) if is_student(r)]
    tests = {r for r in rows if fold(sheet.get(r, where.get("student"))) == TEST_STUDENT}
    matched, written = match(sheet, [r for r in rows if r not in tests], grades, keys, name)
    for row, grade in matched:
        put(sheet, row, chosen, grade, scaled(possible, max_points, scale, sheet.path, "Points Possible"), name(row), written)  # fmt: skip
    written.data = sheet.written()
    return written


def fill_moodle(sheet: Sheet, grades: list[Grade], max_points: float, column: str | None, scale: bool, names: dict[str, str]) -> Written:  # fmt: skip
    """Fills the grading worksheet that Moodle exported.

    Args:
        names: the names that the archive of this assignment gave to the participants, by their numbers.
    """
    headings = sheet.columns()
    where = {MEANING.get(fold(h), fold(h)): c for h, c in headings.items()}
    rows = list(range(1, len(sheet.rows)))
    if "moodle" not in where:  # the headings are in the language of whoever exported it
        fits = [c for c in range(len(sheet.rows[0])) if all(re.search(r"\D\d+\s*$", sheet.get(r, c)) for r in rows)]  # fmt: skip
        if not fits:
            raise LmsError(f"{sheet.path} is not a grading worksheet of Moodle: it has no column Identifier; get it with Download grading worksheet")  # fmt: skip
        where["moodle"] = fits[0]
    chosen = chosen_column(headings, column or "Grade", sheet.path, exact=True)
    top = where.get("maximum grade", chosen + 1 if column else None)

    def keys(row: int) -> list[tuple[str, str]]:
        said = {kind: sheet.get(row, where.get(kind)).strip() for kind in ("email", "login", "sis", "name")}
        participant = number(sheet.get(row, where["moodle"]))
        known = names.get(participant)
        if known and said["name"] and run_together(known) != run_together(said["name"]):
            participant = ""  # the numbers of another assignment
        typed = [("moodle", participant), *((k, said[k]) for k in ("email", "login", "sis"))]
        return [*typed, *(("student", said[k]) for k in ("email", "login", "sis", "name")), ("name", said["name"])]  # fmt: skip

    def name(row: int) -> str:
        return " ".join(
            filter(None, (sheet.get(row, where.get("name")), f"({sheet.get(row, where['moodle'])})"))
        )

    matched, written = match(sheet, rows, grades, keys, name)
    for row, grade in matched:
        if fold(sheet.get(row, where.get("grade can be changed"))) == "no":
            written.left.append(f"{name(row)}: Moodle says that the grade cannot be changed")
            continue
        factor = scaled(as_number(sheet.get(row, top)), max_points, scale, sheet.path, "Maximum grade")
        put(sheet, row, chosen, grade, factor, name(row), written)
    written.data = sheet.written()
    return written


def match(sheet: Sheet, rows: list[int], grades: list[Grade], keys: Callable[[int], list[tuple[str, str]]],
          name: Callable[[int], str]) -> tuple[list[tuple[int, Grade]], Written]:  # fmt: skip
    """Pairs rows with students, by the first key that says who it is; a student of two rows belongs to none."""
    people = People(grade.person for grade in grades)
    by_id = {grade.person.student: grade for grade in grades}
    written = Written(b"")
    claimed: dict[str, list[int]] = {}
    for row in rows:
        person = people.find([(kind, fold(value)) for kind, value in keys(row) if value])
        if person:
            claimed.setdefault(person.student, []).append(row)
        else:
            written.unknown_rows.append(name(row))
    pairs = []
    for student, found in claimed.items():
        if len(found) == 1:
            pairs.append((found[0], by_id[student]))
        else:
            written.unknown_rows += [
                f"{name(row)}: {len(found)} rows seem to be {student}'s" for row in found
            ]
            written.unknown_students.append(student)
    written.unknown_students += [g.person.student for g in grades if g.score is not None and g.person.student not in claimed]  # fmt: skip
    return sorted(pairs, key=lambda pair: pair[0]), written


def put(
    sheet: Sheet, row: int, column: int, grade: Grade, factor: float, name: str, written: Written
) -> None:
    """Writes a grade into its cell."""
    if grade.score is None:
        written.left.append(f"{name}: has no grade")
    elif column >= len(sheet.rows[row]):
        written.unknown_rows.append(f"{name}: the row is too short")
    elif fold(sheet.get(row, column)) in ("ex", "n/a"):
        written.left.append(f"{name}: excused, or not given the assignment")
    else:
        sheet.put(row, column, plain_number(grade.score * factor))
        written.filled += 1


def chosen_column(headings: dict[str, int], wanted: str, path: Path, exact: bool) -> int:
    """The column that is called so, with or without the number that Canvas puts behind it, or the only one that has the word in its name."""
    titles = {h: fold(re.sub(r"\s*\(\d+\)$", "", h)) for h in headings if h}
    found = [h for h in titles if h == wanted] or [h for h, title in titles.items() if fold(wanted) in (title, fold(h))]  # fmt: skip
    if not found and not exact:
        found = [h for h, title in titles.items() if fold(wanted) in title]
    if len(found) != 1:
        some = ", ".join(repr(h) for h in list(titles)[:12])
        raise LmsError(
            f"{path} has {len(found) or 'no'} columns for {wanted!r}; name one with --column: {some}"
        )
    return headings[found[0]]


def as_number(cell: str) -> float | None:
    """A number as a platform writes it, with a point or a comma."""
    try:
        return float(cell.strip().replace(",", "."))
    except ValueError:
        return None


def scaled(possible: float | None, max_points: float, scale: bool, path: Path, column: str) -> float:
    """What points are multiplied with to fit the platform's maximum."""
    if possible is None or abs(possible - max_points) < 0.005:
        return 1.0
    if not scale:
        raise LmsError(f"the assignment has {plain_number(max_points)} points, but {column} in {path} is {plain_number(possible)}; change it there, or convert the grades with --scale")  # fmt: skip
    return possible / max_points if max_points else 0.0


# feedback


def feedback_zip(pages: dict[str, Path], record: dict, stem: str) -> tuple[bytes, list[str]]:
    """The feedback pages under the names by which Moodle and Canvas know whose they are, and the students for whom there is none.

    Both go by what they wrote in front of the name of the file that was handed in: the participant's number, or the user's and the file's.

    Args:
        pages: by student.
        record: what collecting noted of the students of this assignment, by id.
    """
    packed, left = io.BytesIO(), []
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for student, page in pages.items():
            name = name_at_platform(record.get(student, {}), stem)
            if name:
                file.writestr(
                    zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), page.read_bytes(), zipfile.ZIP_DEFLATED
                )
            else:
                left.append(student)
    return packed.getvalue(), left


def name_at_platform(noted: dict, stem: str) -> str:
    """What a student's page has to be called; "" if her work came from neither platform."""
    parts = str(noted.get("file") or "").split("/")
    if noted.get("form") == "moodle":
        found = next((m for m in map(MOODLE.match, parts) if m and m["id"]), None)
        return f"{found['name']}_{found['id']}_assignsubmission_file/{stem}.html" if found else ""
    found = CANVAS.match(parts[-1]) if noted.get("form") == "canvas" else None
    return f"{parts[-1][: found.start('rest')]}{stem}.html" if found and found["file"] else ""


def write(path: Path, data: bytes) -> None:
    """Writes a file as a whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)
