"""A course folder in nbgrader's layout: release, collect, grade into the gradebook, feedback, export.

Thin over nbgrader: its API makes the files and owns the gradebook. Only grading is written here a second time, because a class is graded
many times faster when each submission does not pay for nbgrader's conversions; it leaves the same gradebook and the same files
(a test compares the two). What grades imports torch, which takes seconds, and is imported where it is used.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat

from autograder import catalog, put_scripts_on_path
from autograder.catalog import Chapter
from autograder.gradebook import graded_points, save_grades, set_points, take_late_penalty
from autograder.staging import remove
from autograder.submission import (
    SubmissionError,
    further_files,
    in_linked_folder,
    parse_notebook,
    read_text,
)

if TYPE_CHECKING:
    from autograder.grading import Options, SubmissionReport
    from autograder.roster import Person

OURS = "course_llm"  # in a notebook's metadata: its report

CONFIG = """\
# Configuration of nbgrader for this course folder. Add your own settings below.
from autograder.nbgrader_plugin import configure

c = get_config()  # noqa: F821
configure(c)
c.CourseDirectory.course_id = "course_llm"
"""


class CourseError(ValueError):
    """Something about the course folder is wrong; the message says what to do."""


class Course:
    """A course folder; made when it does not exist yet, if it may be. `stem` is the chapter that an error names."""

    def __init__(self, root: Path, create: bool = False, stem: str = "STEM"):
        self.root = root.resolve()
        if not (self.root / "nbgrader_config.py").exists():
            if not create:
                raise CourseError(
                    f"{root} is not a course folder (it has no nbgrader_config.py); make it with: course-llm release {stem} --course {root}"
                )
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                (self.root / "nbgrader_config.py").write_text(CONFIG)
            except OSError as error:
                raise CourseError(f"{root} cannot be made a course folder: {error.strerror}") from None
        self._recorded: dict[str, set[str]] = {}

    def api(self) -> Any:
        """nbgrader's API on the settings that its own commands read here: the machine's, the user's, this folder's."""
        put_scripts_on_path()
        from jupyter_core.paths import jupyter_config_path
        from nbgrader.apps import NbGraderAPI
        from nbgrader.auth import NoAuthPlugin
        from traitlets.config.loader import Config, PyFileConfigLoader

        config = Config()
        for path in [Path(p, "nbgrader_config.py") for p in (*reversed(jupyter_config_path()), self.root)]:
            try:
                if os.path.isfile(path):
                    with contextlib.chdir(self.root):
                        config.merge(PyFileConfigLoader(path.name, path=str(path.parent)).load_config())
            except Exception as error:
                raise CourseError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
        config.CourseDirectory.root = str(self.root)
        config.Authenticator.plugin_class = (
            NoAuthPlugin  # what an instructor does needs no JupyterHub to answer
        )
        return NbGraderAPI(config=config)

    def is_set_up(self) -> bool:
        """Whether nbgrader's own commands grade in the sandbox here; they would run what students wrote with the instructor's rights."""
        return "autograde_preprocessors" in self.api().config.Autograde

    def release(self, stem: str) -> Path:
        """Writes the assignment into source/ and has nbgrader make the release version and the gradebook's entry."""
        from autograder import notebooks

        chapter = catalog.chapter(stem)
        self.recorded(stem)  # a database that does not answer is told in one line
        source = self.root / "source" / stem
        source.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebooks.released(chapter), source / f"{stem}.ipynb")
        self._must(self.api().generate_assignment(stem, force=True, create=True), f"release {stem}")
        return self.root / "release" / stem / f"{stem}.ipynb"

    def released(self, stem: str) -> bool:
        """Whether the gradebook knows the assignment."""
        return (self.root / "release" / stem).is_dir() and self.recorded(stem) is not None

    def recorded(self, stem: str) -> set[str] | None:
        """The students of whom the gradebook has a submission; None when it does not know the assignment.

        A file of SQLite that is not there yet is not made.
        """
        if stem not in self._recorded:
            from nbgrader.api import Gradebook, SubmittedAssignment
            from sqlalchemy import make_url

            folder = self.api().coursedir
            with self._gradebook_errors():
                url = make_url(folder.db_url)
                if url.get_backend_name() == "sqlite" and not Path(url.database or "").exists():
                    return None
                with Gradebook(folder.db_url, folder.course_id) as gradebook:
                    assignment = assignment_in(gradebook, stem)
                    if assignment is None:
                        return None
                    found = gradebook.db.query(SubmittedAssignment.student_id).filter_by(
                        assignment=assignment
                    )
                    self._recorded[stem] = {student for (student,) in found}
        return self._recorded[stem]

    def collect(self, stem: str, folder: Path) -> dict[str, Path]:
        """Copies a folder of submissions, `<student>/<stem>/<stem>.ipynb`, into submitted/; links are not followed."""
        from autograder.staging import Staging
        from autograder.submission import class_folder

        collected = {}
        with Staging(self.root) as staging:
            for student, path in class_folder(folder, stem).items():
                target = self.root / "submitted" / student / stem
                if target.resolve() != path.parent.resolve():
                    files = [] if in_linked_folder(path) else [path, *further_files(path.parent)]
                    on_top = {file.name: file for file in files if file.parent == path.parent}
                    staging.add(student, stem, on_top)
                collected[student] = target / f"{stem}.ipynb"
            staging.commit()
        return collected

    def collect_from_exchange(self, stem: str) -> dict[str, Path]:
        """Has nbgrader collect what was submitted through its exchange."""
        self.recorded(stem)  # as in release
        try:
            self._must(self.api().collect(stem, update=True), f"collect {stem} from its exchange")
        except CourseError as error:
            config = self.root / "nbgrader_config.py"
            raise CourseError(
                f"{error} (name a FOLDER to collect, or set c.Exchange.root in {config})"
            ) from None
        return self.submitted(stem)

    def submitted(self, stem: str) -> dict[str, Path]:
        """The collected submissions by student."""
        from autograder.submission import class_folder

        return class_folder(self.root / "submitted", stem)

    def feedback(self, stem: str) -> list[Path]:
        """Has nbgrader write the feedback pages."""
        if not any((self.root / "autograded").glob(f"*/{stem}/{stem}.ipynb")):
            raise CourseError(f"{self.root} has nothing graded for {stem}; first run: course-llm grade {stem} FOLDER --course {self.root}")  # fmt: skip
        self.recorded(stem)  # as in release
        self._must(self.api().generate_feedback(stem, force=True), f"write the feedback for {stem}")
        return sorted((self.root / "feedback").glob(f"*/{stem}/{stem}.html"))

    def export(self, stem: str, target: Path) -> Path:
        """Has nbgrader write an assignment's grades as CSV."""
        from nbgrader.plugins import CsvExportPlugin

        from autograder.lms import without_formulas

        with self.graded_book(stem) as gradebook:
            plugin = CsvExportPlugin()
            temporary = target.with_name(f".{target.name}.tmp")
            plugin.to = str(temporary)
            plugin.assignment = [stem]
            plugin.export(gradebook)
            # a name or an id may be a student's own choice
            temporary.write_bytes(without_formulas(temporary.read_text("utf-8")))
            os.replace(temporary, target)
        return target

    @contextlib.contextmanager
    def graded_book(self, stem: str) -> Iterator[Any]:
        """Opens the gradebook to read an assignment's grades, of which it has to have some."""
        if not (self.released(stem) and self.recorded(stem)):
            raise CourseError(f"{self.root} has no grades for {stem}; first run: course-llm grade {stem} FOLDER --course {self.root}")  # fmt: skip
        with self._gradebook_errors(), self.api().gradebook as gradebook:
            yield gradebook

    @contextlib.contextmanager
    def _gradebook_errors(self) -> Iterator[None]:
        """Says in one line that the gradebook cannot be used; nothing of it is changed."""
        from nbgrader.api import InvalidEntry
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (SQLAlchemyError, InvalidEntry, ModuleNotFoundError) as error:
            words = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
            config = self.root / "nbgrader_config.py"
            if isinstance(error, ModuleNotFoundError):
                cure = f"install the driver that c.CourseDirectory.db_url in {config} asks for; for PostgreSQL: pip install 'psycopg[binary]'"
            elif "disk is full" in words or "disk I/O error" in words:
                cure = "make room and run this again; what was finished is kept"
            elif "locked" in words:
                cure = "wait until no other program uses it and run this again"
            elif self.api().coursedir.db_url.startswith("sqlite"):
                cure = "restore a copy of it"
            else:
                cure = f"see that its server runs and that c.CourseDirectory.db_url in {config} is right"
            raise CourseError(f"the gradebook of {self.root} cannot be used ({words}); {cure}") from None

    def _must(self, result: dict, what: str) -> None:
        if not result["success"]:
            words = (result.get("error") or result.get("log") or "").strip().splitlines()
            reason = re.sub(r"^[\w.]+(Error|Exception): ", "", words[-1]) if words else "no reason given"
            raise CourseError(f"nbgrader could not {what}: {reason}")

    def name_students(self, people: Iterable[Person]) -> None:
        """Gives the gradebook the names and addresses that a roster has, as `nbgrader db student import` does."""
        from nbgrader.api import Gradebook

        folder = self.api().coursedir
        with self._gradebook_errors(), Gradebook(folder.db_url, folder.course_id) as gradebook:
            for person in people:
                gradebook.update_or_create_student(person.student, **person.details())

    # grading

    def graded(self, stem: str, student: str, fingerprint: str) -> SubmissionReport | None:
        """The report of a submission that has been graded already, in this form and by these rules."""
        path = self.root / "autograded" / student / stem / f"{stem}.ipynb"
        found, report = stored_report(path)
        known = report is not None and found == fingerprint and student in (self.recorded(stem) or ())
        return report if known else None  # a new gradebook does not know what was graded into an old one

    def waiting(self, stem: str) -> list[str]:
        """The students whose work is collected, and not graded yet in the form in which it was collected last."""
        try:
            files = self.submitted(stem) if (self.root / "submitted").is_dir() else {}
        except SubmissionError:
            return []
        known = self.recorded(stem) or ()
        found = []
        for student, path in files.items():
            _, _, content = kept_in(self.root / "autograded" / student / stem / f"{stem}.ipynb")[0].partition(
                ":"
            )
            if student not in known or (content and content != content_digest(path)):
                found.append(student)
        return found

    def reports(self, stem: str) -> list[SubmissionReport]:
        """The reports of all submissions that have been graded."""
        paths = sorted((self.root / "autograded").glob(f"*/{stem}/{stem}.ipynb"))
        found = [report for _, report in map(stored_report, paths) if report is not None]
        if not found:
            raise CourseError(f"{self.root} has nothing graded for {stem}; first run: course-llm grade {stem} FOLDER --course {self.root}")  # fmt: skip
        return found

    @contextlib.contextmanager
    def writer(self, stem: str) -> Iterator[GradeWriter]:
        """Opens the gradebook for the one process that writes it."""
        from nbgrader.api import Gradebook

        from autograder import late

        if not self.released(stem):
            self.release(stem)
        self._recorded.pop(stem, None)  # it will have more
        api = self.api()
        try:
            late.check_policy(api)
        except ValueError as error:
            raise CourseError(f"{self.root / 'nbgrader_config.py'}: {error}") from None
        folder = api.coursedir
        with self._gradebook_errors(), Gradebook(folder.db_url, folder.course_id) as gradebook:
            gradebook.db().expire_on_commit = (
                False  # nobody else writes meanwhile: nothing need be read again
            )
            yield GradeWriter(self, catalog.chapter(stem), gradebook, folder.ignore)


def assignment_in(gradebook: Any, stem: str) -> Any:
    """The gradebook's entry of an assignment, or None."""
    from nbgrader.api import MissingEntry

    try:
        return gradebook.find_assignment(stem)
    except MissingEntry:
        return None


class GradeWriter:
    """Writes reports into the gradebook and the autograded notebooks, one submission at a time, all or nothing."""

    def __init__(self, course: Course, chapter: Chapter, gradebook: Any, ignored: list[str]):
        self.course = course
        self.chapter = chapter
        self.gradebook = gradebook
        self.ignored = ignored
        self.points = graded_points(gradebook, chapter.stem, chapter.stem)

    def write(self, report: SubmissionReport, path: Path, fingerprint: str) -> None:
        """Saves one submission's grades; the notebook comes last, so that a killed run grades it again."""
        from autograder import notebooks

        try:
            data = parse_notebook(read_text(path), path.name)
            notebook, _ = notebooks.rebuilt(data, self.chapter)
        except SubmissionError as error:
            notebook = notebooks.unreadable(str(error), self.chapter)
        set_points(notebook, self.points)
        notebooks.fill_outputs(notebook, {e.name: e for e in report.exercises})
        notebooks.store_report(notebook, report, fingerprint)
        if not report.isolated:
            notebook.cells.insert(
                0, nbformat.v4.new_markdown_cell("**Graded without a sandbox.**", id="unsafe")
            )
        self._save_grades(report, path, notebook)
        target = self.course.root / "autograded" / report.submission / self.chapter.stem
        target.mkdir(parents=True, exist_ok=True)
        self._copy_further_files(path, target)
        write_atomically(
            target / f"{self.chapter.stem}.ipynb", json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        )

    def _copy_further_files(self, path: Path, target: Path) -> None:
        """Copies what nbgrader copies beside the notebook: the time, the exchange's secret, the instructor's own files.

        What stands in the way of the instructor's files, or cannot be copied, is left out: it must not keep the others from being graded.
        """
        for old in target.iterdir():
            if old.name != f"{self.chapter.stem}.ipynb":
                remove(old)
        own = self.course.root / "source" / self.chapter.stem
        for folder in (own, *([] if in_linked_folder(path) else [path.parent])):
            for file in further_files(folder, [*self.ignored, "*.ipynb"]):
                place = target / file.relative_to(folder)
                if folder is not own and place.exists():
                    continue
                try:
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, place)
                except OSError as error:
                    if folder is own or error.errno in (errno.ENOSPC, errno.EDQUOT):
                        raise

    def _save_grades(self, report: SubmissionReport, path: Path, notebook: Any) -> None:
        gradebook, stem = self.gradebook, self.chapter.stem
        gradebook.update_or_create_student(report.submission)
        stamp = timestamp_of(path.parent)
        extra = {"timestamp": stamp} if stamp else {}
        submission = gradebook.update_or_create_submission(stem, report.submission, **extra)
        save_grades(submission, notebook, stem)
        gradebook.db.commit()
        if submission.total_seconds_late > 0:
            api = self.course.api()
            take_late_penalty(api, api.coursedir.db_url, stem, stem, report.submission)


def stored_report(path: Path) -> tuple[str, SubmissionReport | None]:
    """The report that an autograded notebook keeps, and the fingerprint of what it was graded by."""
    fingerprint, data = kept_in(path)
    if data is None:
        return "", None
    from autograder.grading import ExerciseReport, SubmissionReport

    exercises = [ExerciseReport(**e) for e in data["exercises"]]
    report = SubmissionReport(
        data["submission"], exercises, data["error"], data["remarks"], data["elapsed_s"], data["sandboxed"]
    )
    return fingerprint, report


def kept_in(path: Path) -> tuple[str, dict | None]:
    """The fingerprint and the report in an autograded notebook's metadata, as they stand there."""
    try:
        ours = json.loads(path.read_text())["metadata"][OURS]
        return str(ours["fingerprint"]), ours["report"]
    except (OSError, ValueError, KeyError, TypeError):
        return "", None


def timestamp_of(folder: Path) -> Any:
    """When a submission was handed in, from nbgrader's timestamp.txt; None where there is none that can be read."""
    path = folder / "timestamp.txt"
    try:
        if not path.is_file() or path.is_symlink():
            return None
        with open(path, encoding="utf-8") as file:
            return time_in(file.read(100))
    except (OSError, ValueError):
        return None


def time_in(text: str) -> Any:
    """The time that a student's file names, without its zone; None where it cannot be told."""
    from nbgrader.utils import parse_utc

    try:
        return parse_utc(text.strip()) if text.strip() else None
    except Exception:  # dateutil guesses, looks for files of zones, and warns of it by errors
        return None


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file as a whole: a crash leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def fingerprint(path: Path, stem: str, options: Options) -> str:
    """Changes when the checks, the reference or the options change, and behind a colon when the submission does."""
    from autograder.rules import rules_fingerprint

    digest = hashlib.sha256(rules_fingerprint(stem).encode())
    digest.update(json.dumps([options.seed, options.device, options.isolate]).encode())
    return f"{digest.hexdigest()}:{content_digest(path)}"


def content_digest(path: Path) -> str:
    """The digest of a submission's bytes; that of nothing where there is no file of its own."""
    with contextlib.suppress(OSError):
        if path.is_file() and not path.is_symlink():
            with open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256().hexdigest()


logging.getLogger("nbgrader").setLevel(logging.ERROR)
