"""Hostile and cheating submissions earn what they honestly earned, harm nobody, and are told what happened."""

import copy
import dataclasses
import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from autograder import catalog, judge, sandbox
from autograder.grading import Grader, Options, SubmissionReport
from autograder.notebooks import rebuilt
from autograder.sandbox import Limits
from autograder.submission import SubmissionError, parse_notebook, read_text
from samples.build import fill
from tests.attacks import ATTACKED, BESIDE, RIGHT, STEM, Attack, load

ATTACKS = load()
SECRET = "canary-7f3a9c"
LIMITS = Limits(
    memory_bytes=512 << 20, cpu_s=60, tmp_bytes=8 << 20, file_bytes=8 << 20, threads=64, cell_s=2.0
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("class")


@pytest.fixture(scope="module")
def listener():
    """The port of a server on loopback, and the list of whoever connected."""
    server = socket.create_server(("127.0.0.1", 0))
    callers = []

    def serve():
        while True:
            try:
                callers.append(server.accept()[1])
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    yield server.getsockname()[1], callers
    server.close()


@pytest.fixture(scope="module")
def grader():
    """A grader with tight limits; time that an attack wastes is wasted here, too."""
    patch = pytest.MonkeyPatch()
    os.environ["CANARY_VARIABLE"] = SECRET
    patch.setattr(sandbox, "MAX_SERVED_S", 1.0)
    patch.setattr(sandbox, "MAX_SERVED_CALLS", 500)
    patch.setattr(sandbox, "WAITING_S", 5.0)
    for name in (ATTACKED, "greedy_decode", "generate"):
        patch.setattr(judge.exercises(STEM)[name], "seconds", 1.2)
    with Grader(catalog.chapter(STEM), Options(limits=LIMITS)) as grader:
        yield grader
    patch.undo()
    del os.environ["CANARY_VARIABLE"]


def written(attack: Attack | None, folder: Path, port: int = 9) -> Path:
    """Writes a submission as a student would hand it in."""
    data = fill(STEM, {name: RIGHT[name] for name in (ATTACKED, *BESIDE)} | (attack.cells if attack else {}))
    made = attack.damage(copy.deepcopy(data)) if attack and attack.damage else data
    if isinstance(made, dict):
        made = json.dumps(made)
    if isinstance(made, str):
        names = {
            "@CANARY@": f"{folder}/canary.txt",
            "@FOLDER@": str(folder),
            "@PORT@": str(port),
            "@VARIABLE@": "CANARY_VARIABLE",
        }
        for name, value in names.items():
            made = made.replace(name, value)
        made = made.encode()
    path = folder / "someone" / STEM / f"{STEM}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(made)
    return path


def earned(report: SubmissionReport) -> dict[str, float]:
    return {e.name: e.points for e in report.exercises}


def told(report: SubmissionReport) -> dict:
    """What a report says, but for the time it took."""
    data = report.to_json()
    data.pop("elapsed_s")
    return data


@pytest.fixture(scope="module")
def neighbour(grader, folder):
    """A right submission, and what it gets before any attack."""
    path = folder / "neighbour.ipynb"
    path.write_bytes(written(None, folder).read_bytes())
    return path, told(grader.grade_file(path, "neighbour"))


def test_there_are_enough_attacks_of_every_kind():
    kinds = {
        kind: [a for a in ATTACKS if a.kind == kind] for kind in ("result", "answers", "harm", "notebook")
    }
    assert len(ATTACKS) >= 60
    assert all(len(found) >= 15 for found in kinds.values())
    assert len({a.name for a in ATTACKS}) == len(ATTACKS)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: f"{a.kind}: {a.name}")
def test_an_attack_earns_nothing_and_harms_nobody(attack, grader, folder, listener, neighbour, capfd):
    canary = folder / "canary.txt"
    canary.write_text(SECRET)
    path = written(attack, folder, listener[0])
    before = sorted(os.listdir(folder)), path.stat().st_mtime_ns
    started = time.monotonic(), time.process_time()

    report = grader.grade_file(path, "someone")

    # it ends, and the grader itself has worked little for it
    assert time.monotonic() - started[0] < 180
    assert time.process_time() - started[1] < 20
    assert told(grader.grade_file(neighbour[0], "neighbour")) == neighbour[1], (
        "another student's grade has changed"
    )
    # points that were honestly earned, here and beside
    points = earned(report)
    assert points[attack.exercise] == attack.points, report
    lost = attack.error is not None
    others = {
        name: value
        for name, value in points.items()
        if name in BESIDE or (name == ATTACKED and attack.exercise != ATTACKED)
    }
    full = {name: 0.0 if lost else catalog.chapter(STEM).entry(name).points for name in others}
    assert others == full or (not attack.beside and all(others[name] <= full[name] for name in full))
    assert sum(points.values()) == attack.points + sum(others.values())
    # nothing outside has been read or changed
    assert canary.read_text() == SECRET and not listener[1]
    assert (sorted(os.listdir(folder)), path.stat().st_mtime_ns) == before
    # the report says what happened, in words of ours
    words = json.dumps(told(report))
    assert (
        SECRET not in words and "tensor(" not in words and "Traceback" not in words and "\\u001b" not in words
    )
    assert "Traceback" not in "".join(capfd.readouterr())
    message = next(e.message for e in report.exercises if e.name == attack.exercise)
    if lost:
        assert attack.error in report.error, report.error
    else:
        assert report.error is None, report.error
        assert attack.points or (message and len(message) < 600), message
        assert attack.says is None or attack.says in message, message


def test_a_page_of_an_attack_runs_no_script(folder):
    from nbconvert import HTMLExporter

    chapter = catalog.chapter(STEM)
    for attack in [a for a in ATTACKS if a.damage and not a.error]:
        try:
            data = parse_notebook(read_text(written(attack, folder)), f"{STEM}.ipynb")
        except SubmissionError:
            continue
        notebook, _ = rebuilt(data, chapter)
        again, _ = rebuilt(json.loads(json.dumps(notebook)), chapter)
        assert [c.source for c in again.cells] == [c.source for c in notebook.cells], attack.name
        if "script" not in attack.name and attack.name not in ("attachments", "a report of its own"):
            continue
        page, _ = HTMLExporter(template_name="basic").from_notebook_node(again)
        for evil in ("<script>alert", "onerror=alert", "onload=alert", 'href="javascript'):
            assert evil not in page.replace("&lt;img src=x onerror=alert", ""), (attack.name, evil)


def test_the_verdicts_are_data():
    assert all(dataclasses.is_dataclass(a) and a.words and (a.cells or a.damage) for a in ATTACKS)
