"""Grading on Gradescope: the archive that an instructor uploads, and the form of results.json.

Gradescope builds a container once, from the archive's `setup.sh`, and runs `run_autograder` in a fresh copy of it for every submission
(gradescope-autograders.readthedocs.io, "Autograder Specifications"). What runs in there is `autograder.gradescope_run`.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from autograder import judge, packing, pieces
from autograder.catalog import Chapter
from autograder.grading import ExerciseReport, SubmissionReport
from autograder.judge import sentence
from autograder.wall import LIBRARIES

VISIBILITIES = ("visible", "after_due_date", "after_published", "hidden")
NEEDED = (*LIBRARIES, "packaging", "pyseccomp", "rich", "tokenizers")  # beside what answers may import
SETUP = """\
#!/usr/bin/env bash
# Gradescope runs this once, as root, when the archive is uploaded. Packages come from where apt and pip are set up to take them.
set -euo pipefail
root="${GRADESCOPE_ROOT:-/autograder}"
cd "$root/source"

find_python() {
  for name in python3 python3.14 python3.13 python3.12 python3.11; do
    if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      python="$name"
      return 0
    fi
  done
  return 1
}

install() { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"; }

if ! command -v bwrap >/dev/null || ! find_python; then
  apt-get update -qq
  install bubblewrap libseccomp2 || echo "bubblewrap cannot be installed: answers will run as a user without rights"
  find_python || install python3-venv || true
  find_python || install python3.11 python3.11-venv || true
  find_python || { echo "Python 3.11 or newer is needed: choose a newer base image" >&2; exit 1; }
fi
umask 022
test -x "$root/venv/bin/python" || "$python" -m venv "$root/venv"
"$root/venv/bin/python" -m pip install -q --disable-pip-version-check -r requirements.txt
rm -rf "$root/grader"
"$root/venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --target "$root/grader" ./course_llm-*.whl
chmod 700 "$root/source" "$root/grader"
cd /
PYTHONPATH="$root/grader" OMP_NUM_THREADS=1 "$root/venv/bin/python" -P -m autograder.gradescope_run --check
"""
RUN = """\
#!/usr/bin/env bash
# Gradescope runs this for every submission. Whatever happens, there is a results.json afterwards.
root="${GRADESCOPE_ROOT:-/autograder}"
results="$root/results/results.json"
umask 022
mkdir -p "$root/results"
rm -f "$results"
cd /
PYTHONPATH="$root/grader" OMP_NUM_THREADS=1 "$root/venv/bin/python" -P -m autograder.gradescope_run || true
[ -s "$results" ] || cat >"$results" <<'END'
{"score": 0, "output": "The grader did not start. It is not your fault: tell your instructor.", "output_format": "text", "stdout_visibility": "hidden"}
END
"""


def write_archive(
    chapter: Chapter, path: Path, seed: int, visibility: str = "visible", book: str = ""
) -> None:
    """Writes the archive for a chapter.

    Args:
        chapter: whose exercises are graded.
        path: where the zip file goes.
        seed: of the hidden cases.
        visibility: when students see their results: one of `VISIBILITIES`.
        book: the address of the published book, with a slash at its end; empty while it has none.

    Raises:
        PackingError: this installation cannot be packed.
    """
    settings = {"stem": chapter.stem, "seed": seed, "visibility": visibility, "book": book}
    with tempfile.TemporaryDirectory() as folder:
        wheel = packing.write_wheel(Path(folder))
        files = {
            "setup.sh": SETUP.encode(),
            "run_autograder": RUN.encode(),
            "requirements.txt": packing.pinned(NEEDED).encode(),
            "assignment.json": (json.dumps(settings, indent=1) + "\n").encode(),
            wheel.name: wheel.read_bytes(),
        }
    packing.write_zip(path, files, executable=("setup.sh", "run_autograder"))


# the form of results.json


def results(report: SubmissionReport, chapter: Chapter, settings: dict[str, Any]) -> dict[str, Any]:
    """A report in the form of results.json: a test for each exercise; what students read is plain text."""
    hidden = {e.name: {g.name for g in e.groups if g.hidden} for e in judge.exercises(chapter.stem).values()}
    tests = [
        exercise_result(e, str(number), hidden.get(e.name, set()), settings)
        for number, e in enumerate(report.exercises, 1)
    ]
    words = [report.error] if report.error else []
    return {
        "score": report.points,
        "output": "\n".join([*words, *report.remarks]),
        "output_format": "text",
        "test_output_format": "text",
        "test_name_format": "text",
        "visibility": settings["visibility"],
        "stdout_visibility": "hidden",
        "tests": tests,
    }


def nothing(words: str) -> dict[str, Any]:
    """The results.json of a submission that could not be graded."""
    return {"score": 0, "output": words, "output_format": "text", "stdout_visibility": "hidden", "tests": []}


def exercise_result(
    report: ExerciseReport, number: str, hidden: set[str], settings: dict[str, Any]
) -> dict[str, Any]:
    """One exercise; of a group that is hidden from students, only whether it passes and its points."""
    lines = []
    for group in report.groups:
        complaint = sentence(group["complaint"]) if group["complaint"] else ""
        words = "Hidden cases." if group["name"] in hidden else f"{group['says']} {complaint}".rstrip()
        mark = "pass" if group["passed"] else "FAIL"
        lines.append(f"{mark}  {words} ({group['points']:g} / {group['max_points']:g})")
    failing = next((g["name"] for g in report.groups if not g["passed"]), None)
    told = report.near_miss is not None or failing not in hidden
    lines.append(report.message if told else "What fails is among the hidden cases.")
    lines.append(pieces.sentence(report.borrowed))
    if report.see and not report.passed:
        lines.append(f"In the book: {settings['book']}{'book/' if settings['book'] else ''}{report.see}")
    tags = [settings["stem"]]
    tags += [report.near_miss] if report.near_miss else []
    tags += [] if report.attempted else ["not attempted"]
    return {
        "name": report.name,
        "number": number,
        "score": report.points,
        "max_score": report.max_points,
        "status": "passed" if report.passed else "failed",
        "output": "\n".join(line for line in lines if line),
        "tags": tags,
        "visibility": settings["visibility"],
    }
