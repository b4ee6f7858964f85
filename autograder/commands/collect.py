"""`course-llm collect`: what a class handed in elsewhere, into a course folder."""

import argparse
import json
import sys
from pathlib import Path

from autograder.commands import Failure, UsageError, chapter_of, refuse_course_folder

DESCRIPTION = """Copies submissions into submitted/ of a course folder. SOURCE is a folder or a zip archive: Moodle's or Canvas's
download of all submissions, a folder of GitHub Classroom's clones, or a folder with one folder for each student. Without SOURCE nbgrader's
exchange is asked. Exit code 1 if somebody handed in nothing that can be graded."""


def add(commands) -> None:
    """Adds the command."""
    collect = commands.add_parser("collect", help="collect submissions into a course folder", description=DESCRIPTION)  # fmt: skip
    collect.add_argument("stem", metavar="STEM", help="the chapter")
    collect.add_argument("source", metavar="SOURCE", nargs="?", type=Path, help="a folder or a zip archive (default: nbgrader's exchange)")  # fmt: skip
    collect.add_argument("--course", type=Path, default=Path("course"), metavar="DIR", help="course folder (default: course)")  # fmt: skip
    collect.add_argument("--from", dest="form", default="auto", metavar="FORM", choices=["auto", "folder", "moodle", "canvas", "github"], help="auto, folder, moodle, canvas or github (default: auto, by the names)")  # fmt: skip
    collect.add_argument("--roster", type=Path, metavar="CSV", help="who is who: student_id beside email, username, canvas_id, github_username, name")  # fmt: skip
    collect.add_argument("--times", type=Path, metavar="CSV", help="when they handed in: student_id, email or another name, and submitted_at")  # fmt: skip
    collect.add_argument("--timezone", metavar="ZONE", help="of times that name none, for example Europe/Berlin (default: this machine's)")  # fmt: skip
    collect.add_argument("--prefix", metavar="NAME", help="what stands before the user's name in the names of GitHub Classroom's repositories")  # fmt: skip
    collect.add_argument("--dry-run", action="store_true", help="say what would be collected, and write nothing")  # fmt: skip
    collect.add_argument("--json", action="store_true", help="print what was found as JSON")
    collect.set_defaults(
        run=run_collect,
        interrupted="run it again: the course folder is as it was, or the next collect finishes this one",
    )


def run_collect(arguments: argparse.Namespace) -> int:
    """`course-llm collect`."""
    chapter_of(arguments.stem)
    from autograder.archives import SourceError, open_source
    from autograder.collecting import examine, store
    from autograder.course import Course, CourseError
    from autograder.submission import SubmissionError

    if arguments.source is not None and not arguments.source.exists():
        raise UsageError(f"there is no folder or archive {arguments.source}")
    if arguments.source is not None:
        refuse_course_folder(arguments.source)
    try:
        course = Course(arguments.course, stem=arguments.stem)
        if arguments.source is None:
            collected = course.collect_from_exchange(arguments.stem)
            print(f"collected {len(collected)} submissions into {arguments.course / 'submitted'}")
            return 0
        roster, times = tables(arguments)
        submitted = course.root / "submitted"
        if submitted == arguments.source.resolve():
            raise UsageError(f"{arguments.source} is the course's own folder: its work is collected already")
        source = open_source(arguments.source)
        listing = examine(source, arguments.stem, arguments.form, roster, times, arguments.prefix)
        if not arguments.dry_run and store(source, listing, arguments.stem, course.root):
            print("course-llm: a collect that was interrupted has been finished first", file=sys.stderr)
        if roster and not arguments.dry_run:
            collected = {finding.student for finding in listing.collected}
            course.name_students(p for p in roster.people if p.student in collected)
    except (CourseError, SourceError, SubmissionError) as error:
        raise Failure(str(error)) from None
    if arguments.json:
        print(json.dumps(listing.to_json(), indent=1))
    else:
        print_listing(listing, arguments.timezone)
        found = f"{len(listing.collected)} submission{'s' * (len(listing.collected) != 1)}"
        print(f"{found} would be collected" if arguments.dry_run else f"collected {found} into {submitted}")
    if listing.failed:
        raise Failure(f"{len(listing.failed)} of {len(listing.findings)} students handed in nothing that can be graded: {', '.join(f.student for f in listing.failed)}")  # fmt: skip
    return 0


def tables(arguments: argparse.Namespace) -> tuple:
    """The roster and the times, where they are given."""
    import zoneinfo

    from autograder.roster import RosterError, read_roster, read_times

    try:
        zone = zoneinfo.ZoneInfo(arguments.timezone) if arguments.timezone else None
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise UsageError(f"--timezone takes a name like Europe/Berlin, got {arguments.timezone}") from None
    try:
        roster = read_roster(arguments.roster) if arguments.roster else None
        return roster, read_times(arguments.times, zone) if arguments.times else None
    except RosterError as error:
        raise UsageError(str(error)) from None


def print_listing(listing, timezone: str | None) -> None:
    """One row for each student, then what was passed over and why."""
    import zoneinfo

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    zone = zoneinfo.ZoneInfo(timezone or "UTC")
    headings = ("student", "handed in as", "file", f"time ({zone.key})", "remark")
    # an address that is cut off could be anybody's
    columns = (Column(words, overflow="fold") for words in headings)
    table = Table(*columns, title=f"{listing.source.name}: {listing.form}")
    for finding in listing.findings:
        chosen = finding.chosen
        when = f"{finding.time.astimezone(zone):%Y-%m-%d %H:%M} ({finding.time_from})" if finding.time else ""
        remark = "; ".join(finding.remarks if chosen else ["nothing that can be graded", *finding.remarks])
        cells = (finding.student, finding.name, chosen.name if chosen else "", when, remark)
        table.add_row(*map(escape, cells))
    console = Console(markup=False, emoji=False, highlight=False)
    console.print(table)
    rest = 0
    for finding in listing.findings:
        for name, why in finding.passed_over:
            if finding.chosen and why == "not a notebook":
                rest += 1
            else:
                console.print(f"passed over: {name}: {why}", soft_wrap=True)
    for name, why in listing.passed_over:
        console.print(f"passed over: {name}: {why}", soft_wrap=True)
    if rest:
        console.print(f"passed over: {rest} further files that are no notebooks; --json names them")
    if listing.no_one_known:
        console.print("nobody who handed in is in the roster: is it this class's, and do its columns have the names that the guide lists?", soft_wrap=True)  # fmt: skip
    if listing.without_work:
        console.print(f"handed nothing in: {', '.join(listing.without_work)}", soft_wrap=True)
