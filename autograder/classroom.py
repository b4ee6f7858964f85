"""An assignment's repository for GitHub Classroom, and the report of its workflow.

    python -m autograder.classroom STEM CHECK.json

The workflow runs the public check and reports the points in the way of GitHub Classroom's own reporter (the action
`autograding-grading-reporter` of GitHub's organisation classroom-resources): two notices, "Points 7/20" and the same as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from autograder import catalog, packing
from autograder.catalog import Chapter

WORKFLOW = """\
name: Autograding Tests
on: [push, workflow_dispatch, repository_dispatch]
permissions:
  contents: read
jobs:
  run-autograding-tests:
    runs-on: ubuntu-latest
    timeout-minutes: 30
    if: github.actor != 'github-classroom[bot]'
    steps:
      - name: Check out the repository
        uses: actions/checkout@v4
      - name: Set up Python
        uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - name: Install the course's package
        run: python -m pip install -q --disable-pip-version-check "{package}"
      - name: Check the notebook
        run: course-llm check {stem} {stem}.ipynb --json > "$RUNNER_TEMP/check.json" || true
      - name: Report
        run: python -m autograder.classroom {stem} "$RUNNER_TEMP/check.json"
"""
README = """\
# {title}

Write your answers into `{stem}.ipynb`: replace each `raise NotImplementedError`, run the cell, and run the `check(...)` below it. Keep the
cells where they are.

To work on your own machine, with Python 3.11 or newer:

```bash
python -m venv .venv
.venv/bin/pip install "{package}"
.venv/bin/jupyter lab {stem}.ipynb
```

Commit the notebook and push it. On every push the same check runs here, under *Actions*, and its summary says which exercises pass and what is
wrong with the others. An exercise counts there when its public cases pass.

Your grade is given later, on other cases and with partial credit, from what stands in this repository at the due date. Changing the workflow
changes nothing about it.
"""
IGNORED = ".ipynb_checkpoints/\n.venv/\n"


def write_repository(chapter: Chapter, folder: Path, url: str = "", branch: str = "") -> list[Path]:
    """Writes the repository that GitHub Classroom copies for each student, and returns its files.

    Args:
        chapter: whose notebook is handed out.
        folder: where to; it is made.
        url, branch: where pip finds the course's package with git; without an address a wheel is put into the repository.

    Raises:
        PackingError: the wheel cannot be made.
    """
    grader = folder / ".github" / "grader"
    workflows = folder / ".github" / "workflows"
    workflows.mkdir(parents=True, exist_ok=True)
    if url:
        package = f"git+{url}" + (f"@{branch}" if branch else "")
    else:
        grader.mkdir(exist_ok=True)
        package = packing.write_wheel(grader).relative_to(folder).as_posix()
        package = f"./{package}"
    words = {"stem": chapter.stem, "title": f"{chapter.title}: exercises", "package": package}
    (workflows / "classroom.yml").write_text(WORKFLOW.format(**words))
    (folder / "README.md").write_text(README.format(**words))
    (folder / ".gitignore").write_text(IGNORED)
    notebook = json.dumps(chapter.notebook, indent=1, ensure_ascii=False) + "\n"
    (folder / f"{chapter.stem}.ipynb").write_text(notebook, encoding="utf-8")
    return sorted(path for path in folder.rglob("*") if path.is_file())


# in the workflow


def main() -> int:
    """Writes the job's summary and the points of a check; exit code 0 only if every exercise passes."""
    chapter, path = catalog.chapter(sys.argv[1]), Path(sys.argv[2])
    try:
        checked = {row["name"]: row for row in json.loads(path.read_text())}
    except (OSError, ValueError, TypeError, KeyError):
        checked = None
    rows = [row_of(chapter, entry, checked) for entry in chapter.entries]
    points, most = sum(row["points"] for row in rows), chapter.points
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(table(chapter, rows))
    print(f"::notice title=Autograding complete::Points {points}/{most}")
    print(f"::notice title=Autograding report::{json.dumps({'totalPoints': points, 'maxPoints': most})}")
    return 0 if points == most else 1


def row_of(chapter: Chapter, entry: catalog.Entry, checked: dict[str, Any] | None) -> dict[str, Any]:
    """What the check says of one exercise."""
    if checked is None:
        words = (
            f"The check did not come to a result: see the log of the step before, and {chapter.stem}.ipynb."
        )
        row = {"passed": False, "message": words}
    else:
        untried = {"passed": False, "message": checked.get("file", {}).get("message") or "Not attempted."}
        row = checked.get(entry.name, untried)
    passed = row["passed"] is True
    return {"name": entry.name, "passed": passed, "message": row["message"],
            "points": entry.points if passed else 0, "max_points": entry.points}  # fmt: skip


def table(chapter: Chapter, rows: list[dict[str, Any]]) -> str:
    """The summary, in Markdown."""
    lines = [f"## {chapter.title}", "", "| exercise | result | points | what is wrong |", "|---|---|---|---|"]
    for row in rows:
        words = (
            " ".join(row["message"].split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
        )
        result = "passed" if row["passed"] else "failed"
        lines.append(f"| `{row['name']}` | {result} | {row['points']} / {row['max_points']} | {words} |")
    total = sum(row["points"] for row in rows)
    lines += ["", f"**{total} of {chapter.points} points** on the public cases. Grades are given on others."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
