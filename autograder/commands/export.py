"""`course-llm export`: the grades of an assignment, for a spreadsheet or for a learning platform."""

import argparse
from pathlib import Path

from autograder.commands import Failure, UsageError, chapter_of

DESCRIPTION = """Writes the grades of an assignment, less the penalty for lateness. csv is nbgrader's; exercises has a column for each
exercise; canvas and moodle are imported there, and fill the file that the platform exported when --grades-from names it. Exit code 1 if a
row of that file, or a student, could not be matched, or if collected work is not graded yet; the file is written all the same."""


def add(commands) -> None:
    """Adds the command."""
    export = commands.add_parser("export", help="write the grades of an assignment as CSV", description=DESCRIPTION)  # fmt: skip
    export.add_argument("stem", metavar="STEM", help="the chapter")
    export.add_argument("--course", type=Path, default=Path("course"), metavar="DIR", help="course folder (default: course)")  # fmt: skip
    export.add_argument("--format", default="csv", metavar="FORM", choices=["csv", "exercises", "canvas", "moodle"], help="csv, exercises, canvas or moodle (default: csv)")  # fmt: skip
    export.add_argument("--to", type=Path, metavar="FILE", help="where to write (default: DIR/STEM.csv, DIR/STEM-FORM.csv)")  # fmt: skip
    export.add_argument("--grades-from", type=Path, metavar="FILE", help="the gradebook that Canvas exported, or Moodle's grading worksheet, to be filled")  # fmt: skip
    export.add_argument("--column", metavar="NAME", help="the column for the grade (default: by the chapter's name; Grade for Moodle)")  # fmt: skip
    export.add_argument("--scale", action="store_true", help="convert points to the platform's maximum where that is another")  # fmt: skip
    export.add_argument("--roster", type=Path, metavar="CSV", help="who is who, as for collect")
    export.set_defaults(run=run_export)


def run_export(arguments: argparse.Namespace) -> int:
    """`course-llm export`."""
    chapter = chapter_of(arguments.stem)
    from autograder import lms
    from autograder.collecting import read_record
    from autograder.course import Course, CourseError
    from autograder.roster import RosterError, read_roster

    form = arguments.format
    if arguments.grades_from and form not in ("canvas", "moodle"):
        raise UsageError(f"--grades-from goes with --format canvas or moodle, not with {form}")
    ending = "" if form == "csv" else f"-{form}"
    target = arguments.to or arguments.course / f"{arguments.stem}{ending}.csv"
    try:
        course = Course(arguments.course, stem=arguments.stem)
        if form == "csv":
            course.export(arguments.stem, target)
            print(f"wrote {target}")
            return ended(arguments, [], course.waiting(arguments.stem))
        roster = read_roster(arguments.roster) if arguments.roster else None
        record = read_record(course.root / "collected" / f"{arguments.stem}.json")
        with course.graded_book(arguments.stem) as gradebook:
            grades, max_points = lms.read_grades(gradebook, chapter, record, roster)
        written = written_form(arguments, chapter, grades, max_points, record)
        waiting = course.waiting(arguments.stem)
    except RosterError as error:
        raise UsageError(str(error)) from None
    except (CourseError, lms.LmsError) as error:
        raise Failure(str(error)) from None
    lms.write(target, written.data)
    return ended(arguments, tell(arguments, written, target), waiting)


def written_form(arguments: argparse.Namespace, chapter, grades: list, max_points: float, record: dict):
    """The file's content in the form that is asked for."""
    from autograder import lms

    title, given = arguments.column or chapter.stem, arguments.grades_from
    if arguments.format == "exercises":
        return lms.Written(lms.exercises_csv(grades, chapter, max_points), sum(g.score is not None for g in grades))  # fmt: skip
    if arguments.format == "canvas":
        if given:
            return lms.fill_canvas(lms.Sheet(given), grades, max_points, chapter.stem, arguments.column, arguments.scale)  # fmt: skip
        return lms.new_canvas(grades, max_points, title)
    if given:
        names = {n["ids"]["moodle"]: n["name"] for n in record.values() if n.get("ids", {}).get("moodle")}
        return lms.fill_moodle(lms.Sheet(given), grades, max_points, arguments.column, arguments.scale, names)
    return lms.new_moodle(grades, title)


def tell(arguments: argparse.Namespace, written, target: Path) -> list[str]:
    """Says what was written and what was not; returns what is wrong with it."""
    from autograder.submission import printable

    print(f"wrote {target}: {written.filled} grades")
    for words, names in (("left as it was", written.left), ("nobody in the gradebook", written.unknown_rows),
                         ("not to be found by the platform", written.unknown_students)):  # fmt: skip
        for name in names:
            print(f"{words}: {printable(name)}")
    if not (written.unknown_rows or written.unknown_students):
        return []
    rows, students = len(written.unknown_rows), len(written.unknown_students)
    where = arguments.grades_from or target
    return [f"{rows} rows of {where} and {students} students of the gradebook could not be matched; see above, and name them in a --roster"]  # fmt: skip


def ended(arguments: argparse.Namespace, wrong: list[str], waiting: list[str]) -> int:
    """Fails if something is wrong, or if somebody's work waits to be graded: the file then has an old grade, or none."""
    from autograder.submission import printable

    if waiting:
        folder, names = arguments.course / "submitted", ", ".join(map(printable, waiting))
        wrong = [*wrong, f"collected and not graded yet: {names}; run: course-llm grade {arguments.stem} {folder} --course {arguments.course}, and export again"]  # fmt: skip
    if wrong:
        raise Failure("; ".join(wrong))
    return 0
