"""Saves one graded notebook in nbgrader's gradebook, the same whether nbgrader or `course-llm grade` asks for it.

nbgrader's own preprocessors do this in one transaction per cell, with a new connection each; here it is one for the notebook.
"""

import functools
from typing import Any

import nbformat


def graded_points(gradebook: Any, assignment: str, notebook: str) -> dict[str, float]:
    """The points of the graded cells as the gradebook has them, by the cells' names."""
    return {cell.name: cell.max_score for cell in gradebook.find_notebook(notebook, assignment).grade_cells}


def set_points(notebook: nbformat.NotebookNode, points: dict[str, float]) -> None:
    """Has the graded cells be worth what the gradebook says: an instructor may have changed the points."""
    for cell in notebook.cells:
        settings = cell.metadata.get("nbgrader", {})
        if settings.get("grade") and settings["grade_id"] in points:
            settings["points"] = points[settings["grade_id"]]


def save_grades(submission: Any, notebook: nbformat.NotebookNode, name: str) -> None:
    """Writes what the graded cells' outputs say into a submission's notebook; a manual score is kept.

    Args:
        submission: nbgrader's `SubmittedAssignment`, in an open session that the caller commits.
        notebook: the graded notebook.
        name: its name in the gradebook.
    """
    from nbgrader.utils import compute_checksum, determine_grade

    cells = {c.metadata["nbgrader"]["grade_id"]: c for c in notebook.cells if "nbgrader" in c.metadata}
    saved = next(n for n in submission.notebooks if n.name == name)
    for grade in saved.grades:
        cell = cells.get(grade.cell.name)
        grade.auto_score = 0.0 if cell is None else determine_grade(cell)[0]
        grade.needs_manual_grade = grade.manual_score is not None
    for comment in saved.comments:
        cell = cells.get(comment.cell.name)
        blank = cell is not None and cell.metadata.nbgrader.get("checksum") == compute_checksum(cell)
        comment.auto_comment = "No response." if blank else None
    saved.late_submission_penalty = None


def take_late_penalty(parent: Any, db_url: str, assignment: str, notebook: str, student: str) -> None:
    """Has nbgrader take off what its late policy says; to be called for late submissions, after their grades are saved."""
    from nbgrader.preprocessors import AssignLatePenalties

    names = {"notebook": notebook, "assignment": assignment, "student": student, "db_url": db_url}
    AssignLatePenalties(parent=parent).preprocess(nbformat.v4.new_notebook(), {"nbgrader": names})


def share_connections() -> None:
    """Has nbgrader keep one engine per database: it opens its gradebook half a dozen times for every submission."""
    from nbgrader import api

    if not hasattr(api.create_engine, "cache_info"):
        api.create_engine = functools.cache(api.create_engine)
