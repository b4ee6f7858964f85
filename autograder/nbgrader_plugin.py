"""Puts the sandboxed grader in the place of nbgrader's `Execute`.

`nbgrader_config.py` calls `configure(c)`. From then on `nbgrader autograde`, the formgrader's button and `course-llm grade --course`
give the same grades: the submission is rebuilt on the released notebook as it is read, and the graded cells get their outputs from the sandbox instead of a kernel.
What grades imports torch and is imported where it is used: every command reads the configuration.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from nbconvert.exporters import HTMLExporter, NotebookExporter
from nbgrader.api import Gradebook
from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets import Integer, Unicode, default
from traitlets.config import Config

from autograder import catalog
from autograder.catalog import UnknownChapter
from autograder.course import OURS, fingerprint, timestamp_of
from autograder.gradebook import (
    graded_points,
    save_grades,
    set_points,
    share_connections,
    take_late_penalty,
)
from autograder.submission import (
    MAX_DEPTH,
    SubmissionError,
    from_notebook,
    further_files,
    is_plain,
    parse_notebook,
    read_text,
)
from autograder.validate import give_validate_an_exit_code

if TYPE_CHECKING:
    from autograder.grading import Grader, SubmissionReport


class SubmissionExporter(NotebookExporter):
    """Reads a submission as text and hands nbgrader the released notebook with its answers."""

    def from_filename(self, filename: str, resources: dict | None = None, **kwargs: Any) -> tuple[str, dict]:
        from autograder import notebooks

        path = Path(filename)
        chapter = chapter_of(path.stem)
        try:
            data = parse_notebook(read_text(path), path.name)
            notebook, _ = notebooks.rebuilt(data, chapter)
            if not getattr(self.parent, "_sanitizing", True):  # what the first pass has written is ours
                notebook = self.second_pass(data, notebook, chapter)
        except SubmissionError as error:
            self.log.error("%s: %s", filename, error)
            notebook = notebooks.unreadable(str(error), chapter)
        return self.from_notebook_node(nbformat.from_dict(notebook), resources, **kwargs)

    def second_pass(self, data: dict, notebook: nbformat.NotebookNode, chapter: catalog.Chapter) -> Any:
        """Keeps what the first pass said of the submission."""
        from autograder import notebooks

        said = data["metadata"].get(OURS, {})
        if said.get("error"):
            return notebooks.unreadable(said["error"], chapter)
        notebook.metadata[OURS] = said
        return notebook


class FeedbackExporter(HTMLExporter):
    """nbgrader's feedback page, with the exercises' names where its list of contents says "Test cell" of each."""

    def from_notebook_node(self, nb: nbformat.NotebookNode, resources: dict | None = None, **kwargs: Any) -> tuple[str, dict]:  # fmt: skip
        page, resources = super().from_notebook_node(nb, resources, **kwargs)
        return re.sub(r'(<a href="#check_(\w+)">)Test cell</a>', r"\1\2</a>", page), resources


class GradeInSandbox(NbGraderPreprocessor):
    """Stands where `Execute` stands: grades the answers out of process, writes the graded cells' outputs and saves the grades."""

    seed = Integer(help="Seed of the hidden cases.").tag(config=True)
    device = Unicode("cpu", help="Device on which the exercises' tensors lie.").tag(config=True)

    @default("seed")
    def _seed(self) -> int:
        from autograder.judge import GRADING_SEED

        return GRADING_SEED

    def preprocess(self, nb: nbformat.NotebookNode, resources: dict) -> tuple[nbformat.NotebookNode, dict]:
        names = resources["nbgrader"]
        chapter = chapter_of(names["notebook"])
        grader = warm_grader(chapter.stem, self.seed, self.device)
        submission = from_notebook(json.loads(json.dumps(nb)), chapter)
        report = grader.grade(submission, names["student"])
        ours = nb.metadata.get(OURS, {})
        report.error, report.remarks = ours.get("error"), ours.get("remarks", [])
        if report.error:
            for exercise in report.exercises:
                exercise.message = "Not graded."  # the error stands above the first cell
        for remark in report.remarks:
            self.log.warning("%s: %s", report.submission, remark)
        self._save(nb, report, chapter, **names)
        self.log.info("%s: %g of %g points", report.submission, report.points, report.max_points)
        return nb, resources

    def _save(self, nb: nbformat.NotebookNode, report: SubmissionReport, chapter: catalog.Chapter, student: str, assignment: str, notebook: str, db_url: str) -> None:  # fmt: skip
        from autograder import notebooks
        from autograder.grading import Options

        folder = self.parent.parent.coursedir
        with Gradebook(db_url, folder.course_id) as gradebook:
            set_points(nb, graded_points(gradebook, assignment, notebook))
            notebooks.fill_outputs(nb, {e.name: e for e in report.exercises})
            submission = gradebook.find_submission(assignment, student)
            save_grades(submission, nb, notebook)
            gradebook.db.commit()
            late = submission.total_seconds_late > 0
        if late:
            take_late_penalty(self.parent, db_url, assignment, notebook, student)
        path = Path(folder.format_path(folder.submitted_directory, student, assignment), f"{notebook}.ipynb")
        options = Options(seed=self.seed, device=self.device)
        notebooks.store_report(nb, report, fingerprint(path, chapter.stem, options))


def chapter_of(notebook: str) -> catalog.Chapter:
    """The chapter of a notebook.

    Raises:
        SubmissionError: the course has no such notebook; it is not executed instead.
    """
    try:
        return catalog.chapter(notebook)
    except UnknownChapter as error:
        raise SubmissionError(f"{notebook}.ipynb is not graded: {error}") from None


@functools.cache
def warm_grader(stem: str, seed: int, device: str) -> Grader:
    """One grader per chapter and process; its sandbox stays warm until the process ends."""
    import torch

    from autograder.grading import Grader, Options

    torch.set_num_threads(1)
    grader = Grader(catalog.chapter(stem), Options(seed=seed, device=device))
    atexit.register(grader.sandbox.close)
    return grader


def configure(config: Config) -> None:
    """Sets nbgrader up for this course; to be called in `nbgrader_config.py`.

    nbgrader's further preprocessors are not needed: cells, ids, points and outputs are the grader's own when they come here.
    """
    config.Autograde.exporter_class = SubmissionExporter
    config.Autograde.sanitize_preprocessors = []
    config.Autograde.autograde_preprocessors = [GradeInSandbox]
    config.GenerateFeedback.exporter_class = FeedbackExporter
    share_connections()
    give_validate_an_exit_code()
    copy_no_links()


def copy_no_links() -> None:
    """Makes nbgrader copy plain files of a sane size, number and depth only, and read no time from anything else.

    nbgrader copies every further file of a submission, and whole folders when it collects, with the instructor's rights: a link
    in it would be followed, to another student's notebook or to the instructor's own files.
    """
    from nbgrader.converters import base
    from nbgrader.coursedir import CourseDirectory
    from nbgrader.exchange.default import exchange

    if getattr(base.find_all_files, "plain", False):
        return
    stock_ignore = exchange.ignore_patterns

    def find_all_files(path: str, exclude: list[str] | None = None) -> list[str]:
        folder = Path(path)
        return [] if is_linked(folder) else [str(file) for file in further_files(folder, exclude or ())]

    def ignore_patterns(**settings: Any) -> Callable[[str, list[str]], set[str]]:
        ignored = stock_ignore(**settings)
        top = 0

        def ignore(folder: str, names: list[str]) -> set[str]:
            nonlocal top
            depth = len(Path(folder).parts)
            top = top or depth  # the first folder is the one that is copied
            if os.path.islink(folder) or depth - top >= MAX_DEPTH:
                return set(names)
            return set(ignored(folder, names)) | {
                n for n in names if not is_plain(os.path.join(folder, n), True)
            }

        return ignore

    find_all_files.plain = True
    base.find_all_files, exchange.ignore_patterns = find_all_files, ignore_patterns
    CourseDirectory.get_existing_timestamp = lambda self, path: timestamp_of(Path(path))


def is_linked(folder: Path) -> bool:
    """Whether an assignment's folder, or its student's, is a link."""
    return folder.is_symlink() or folder.parent.is_symlink()
