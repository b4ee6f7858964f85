"""What runs in Gradescope's container: grades the submission there and writes results.json.

    python -m autograder.gradescope_run [--check]

The student's code must not write results.json, nor read the checks. Where bubblewrap works, its sandbox sees neither. Where the container
allows no user namespaces and the grader is root, the worker becomes a user without rights, and the folders that matter are root's alone;
that this holds is tried each time, before the submission is touched. Where neither can be had, nothing is graded, with the reason.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from autograder import catalog, doctor, gradescope, judge
from autograder.catalog import Chapter
from autograder.doctor import WORDS, Finding
from autograder.grading import Grader, Options, ungraded
from autograder.sandbox import Limits, Sandbox
from autograder.submission import SubmissionError, grade_id, is_plain, parse_notebook, read_text
from autograder.wall import SandboxError

WORKER_USER = 62_017  # nobody's: in the range that systemd keeps for users who come and go
OPEN_WITHOUT_WALL = ("processes", "disk")  # a container's own, gone with it
OWN = ("source", "grader", "submission", "results")
MAX_LOOKED_INTO = 20
UNFINISHED = (
    "Grading did not come to an end: the container's time or memory ran out. An answer that never ends or takes much memory does this. "
    "If it happens with other submissions too, tell your instructor."
)
UNSAFE = "Nothing was graded, and it is not your fault: the grader found no isolation that it trusts. Tell your instructor."
BROKEN = "The grader failed, and it is not your fault: tell your instructor."
PROBE = """
def listed(place):
    import os
    return os.listdir(place) is not None

def written(place):
    with open(place, "a"):
        return True
"""


class Unsafe(RuntimeError):
    """Nothing here isolates an answer; the message is for the instructor."""


def main() -> int:
    """Grades, or with `--check` tries whether grading would work here; returns the exit code."""
    started = time.monotonic()
    root = Path(os.environ.get("GRADESCOPE_ROOT", "/autograder"))
    settings = json.loads((root / "source" / "assignment.json").read_text())
    chapter = catalog.chapter(settings["stem"])
    if "--check" in sys.argv[1:]:
        return check(root, chapter, settings)
    target = root / "results" / "results.json"
    write(target, gradescope.nothing(UNFINISHED))  # what is found if this process is killed
    try:
        found = graded(root, chapter, settings)
    except (Unsafe, SandboxError) as error:
        print(f"nothing is graded: {error}")
        found = gradescope.nothing(UNSAFE)
    except Exception:
        traceback.print_exc(file=sys.stdout)  # instructors alone see standard output
        found = gradescope.nothing(BROKEN)
    found["execution_time"] = round(time.monotonic() - started, 2)
    write(target, found)
    return 0


def write(path: Path, found: dict[str, Any]) -> None:
    """Replaces results.json as a whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(found, indent=1), encoding="utf-8")
    os.replace(temporary, path)


def check(root: Path, chapter: Chapter, settings: dict[str, Any]) -> int:
    """For setup.sh: prepares every case once, and says what isolates while the container is built."""
    for exercise in judge.exercises(chapter.stem).values():
        judge.prepared(exercise, settings["seed"], False)
    print(f"the checks of {chapter.stem} work here")
    try:
        isolating(root, chapter, settings)
    except (
        Unsafe,
        SandboxError,
    ) as error:  # a container that grades may be allowed more than one that builds
        print(f"while the container is built, nothing isolates: {error}")
    return 0


def graded(root: Path, chapter: Chapter, settings: dict[str, Any]) -> dict[str, Any]:
    """Grades the submission and returns its results."""
    options = isolating(root, chapter, settings)
    remark = None
    with Grader(chapter, options) as grader:
        try:
            path, remark = find(root / "submission", chapter)
            report = grader.grade_file(path, path.name)
        except SubmissionError as error:
            report = ungraded(chapter.stem, "submission", str(error), options)
    if remark:
        report.remarks.insert(0, remark)
    found = gradescope.results(report, chapter, settings)
    found["extra_data"] = {"isolation": "bubblewrap" if options.isolate else "user"}
    return found


# what isolates


def isolating(root: Path, chapter: Chapter, settings: dict[str, Any]) -> Options:
    """Finds the strongest isolation that holds here, by trying it.

    Raises:
        Unsafe: there is none.
    """
    findings = doctor.examine()
    doctor.print_findings(findings)
    if all(f.holds for f in findings):
        return Options(settings["seed"])
    if os.geteuid() != 0:
        cures = "; ".join(f"{f.what}: {f.cure}" for f in findings if not f.holds)
        raise Unsafe(f"bubblewrap does not isolate, and the grader is not root ({cures})")
    options = Options(settings["seed"], isolate=False, user=WORKER_USER)
    without_wall = guarded(root, chapter)
    print("without bubblewrap, as a user without rights:")
    doctor.print_findings(without_wall)
    if not all(f.holds for f in without_wall):
        raise Unsafe("; ".join(f"not so: {f.what}" for f in without_wall if not f.holds))
    return options


def guarded(root: Path, chapter: Chapter) -> list[Finding]:
    """Makes the folders that matter root's alone, and tries as the worker what must not be possible then."""
    for name in OWN:
        if (root / name).is_dir():
            os.chmod(root / name, 0o700)
    tried = [("listed", root / name, f"{name}/ cannot be read") for name in OWN]
    tried += [("written", root / "results" / "results.json", "results.json cannot be written"),
              ("written", root / "results" / "more.json", "results/ cannot be written"),
              ("written", root / "run_autograder", "run_autograder cannot be written"),
              ("written", root / "venv" / "pyvenv.cfg", "the environment cannot be written")]  # fmt: skip
    findings = []
    with Sandbox(chapter, Limits(cell_s=30), isolate=False, user=WORKER_USER) as sandbox:
        try:
            worker = sandbox.start_worker()
        except OSError as error:  # a Python that lies in root's home, say
            raise Unsafe(f"no worker starts as a user without rights: {error}") from None
        worker.allow(30)
        worker.run_cell("probe", PROBE)
        # the probe itself works: what it says below is worth something
        works = worker.perform("call", "listed", ("/",)).value is True
        findings.append(Finding("the worker starts as a user without rights", works))
        for function, place, words in tried:
            outcome = worker.perform("call", function, (str(place),))
            refused = outcome.error is not None and "OSError" in outcome.error.types
            findings.append(Finding(words, refused))
        names = [name for name in WORDS if name not in OPEN_WITHOUT_WALL]
        return findings + doctor.probed(sandbox, worker, names)


# the submission


def find(folder: Path, chapter: Chapter) -> tuple[Path, str | None]:
    """The file to grade, whatever its name, and a remark where there was a choice.

    Of several notebooks that with the chapter's name is taken, else the one with the most of its exercises; a Python file where there is no notebook.

    Raises:
        SubmissionError: there is none.
    """
    files = [path for path in sorted(folder.rglob("*")) if is_candidate(path, folder)]
    for suffix in (".ipynb", ".py"):
        found = [path for path in files if path.suffix == suffix]
        if len(found) == 1:
            return found[0], None
        if found:
            named = [path for path in found if path.stem == chapter.stem]
            best = named[0] if named else max(found[:MAX_LOOKED_INTO], key=lambda p: exercises_in(p, chapter))
            return best, f"{len(found)} files of the kind {suffix} were handed in; {best.name} is graded."
    raise SubmissionError(f"there is no notebook in what was handed in; hand in {chapter.stem}.ipynb")


def is_candidate(path: Path, folder: Path) -> bool:
    """Whether a file could be the submission: no link, nothing that an editor or an archiver left."""
    inner = path.relative_to(folder)
    left = any(part.startswith((".", "__MACOSX")) for part in inner.parts)
    linked = any(parent.is_symlink() for parent in (folder / p for p in inner.parents))
    return path.suffix in (".ipynb", ".py") and not left and not linked and is_plain(path)


def exercises_in(path: Path, chapter: Chapter) -> int:
    """How many of the chapter's exercises a notebook has cells for."""
    names = {entry.name for entry in chapter.entries}
    try:
        if path.suffix == ".py":
            return sum(name in read_text(path) for name in names)
        return len(names & {grade_id(cell) for cell in parse_notebook(read_text(path), path.name)["cells"]})
    except SubmissionError:
        return -1


if __name__ == "__main__":
    sys.exit(main())
