"""Hostile and cheating submissions earn what they honestly earned, harm nobody, and are told what happened."""

import contextlib
import copy
import csv
import dataclasses
import json
import os
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from autograder import catalog, cli, compare, judge, remote
from autograder.grading import Grader, Options, SubmissionReport
from autograder.inside.engine import Outcome
from autograder.notebooks import rebuilt
from autograder.sandbox import Limits
from autograder.submission import Submission, SubmissionError, parse_notebook, read_text
from benchmarks import attacks as attacks_beside_stock
from benchmarks import bubble
from samples.build import answers, fill
from tests.attacks import ATTACKED, BESIDE, RIGHT, STEM, Attack, costs, honest, load

ATTACKS = load()
ROOT = Path(__file__).resolve().parent.parent
SECRET = bubble.SECRET
LIMITS = Limits(
    memory_bytes=512 << 20, cpu_s=60, tmp_bytes=8 << 20, file_bytes=8 << 20, threads=64, cell_s=2.0
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A course folder with a fellow student's answers, a gradebook, and what comes into being beside them."""
    course = tmp_path_factory.mktemp("class")
    in_class(course, "ada", honest())
    with contextlib.closing(sqlite3.connect(course / "gradebook.db")) as gradebook:
        gradebook.execute("CREATE TABLE grade (auto_score FLOAT, manual_score FLOAT)")
        gradebook.execute("INSERT INTO grade VALUES (4, NULL)")
        gradebook.commit()
    return course


def state(folder: Path) -> dict[str, bytes]:
    """What a folder holds."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


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
    patch.setattr(remote, "MAX_SERVED_S", 1.0)
    patch.setattr(remote, "MAX_SERVED_CALLS", 500)
    patch.setattr(remote, "WAITING_S", 5.0)
    for name in (ATTACKED, "greedy_decode", "generate"):
        patch.setattr(judge.exercises(STEM)[name], "seconds", 1.2)
    with Grader(catalog.chapter(STEM), Options(limits=LIMITS)) as grader:
        yield grader
    patch.undo()
    del os.environ["CANARY_VARIABLE"]


def written(attack: Attack | None, folder: Path, port: int = 9) -> Path:
    """Writes a submission as a student would hand it in."""
    places = {
        "CANARY": f"{folder}/canary.txt",
        "FOLDER": str(folder),
        "HOME": str(Path.home()),
        "PORT": str(port),
        "VARIABLE": "CANARY_VARIABLE",
    }
    return in_class(folder, "someone", attack.written(places) if attack else honest())


def in_class(course: Path, student: str, data: dict | bytes | str) -> Path:
    """Hands a notebook in, in nbgrader's layout."""
    path = course / "submitted" / student / STEM / f"{STEM}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    made = json.dumps(data) if isinstance(data, dict) else data
    path.write_bytes(made.encode() if isinstance(made, str) else made)
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
    before = state(folder)
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
    assert not listener[1]
    assert state(folder) == before
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


# the same through nbgrader's own command, with what only a folder can do


def command(*words: object) -> None:
    """Runs `course-llm` in this process, which has torch already."""
    assert cli.main([str(word) for word in words]) == 0


def test_nbgrader_autograde_is_not_led_astray(tmp_path, run, capsys):
    course, secret = tmp_path / "course", tmp_path / "secret.txt"
    secret.write_text(SECRET)
    command("release", STEM, "--course", course)
    right = honest()
    full = sum(catalog.chapter(STEM).entry(name).points for name in (ATTACKED, *BESIDE))
    expected = {}
    tricks = ("scripts in the text", "scripts in outputs", "half a character", "nbformat 3", "UTF-16", "test cell replaced",
              "points in the metadata", "test cells copied", "schema from the future", "a report of its own", "not an object", "ids of every type")  # fmt: skip
    for number, attack in enumerate(a for a in ATTACKS if a.name in tricks):
        made = attack.damage(copy.deepcopy(right))
        in_class(course, f"trick{number:02}", made)
        expected[f"trick{number:02}"] = 0.0 if attack.error else full - 4 + attack.points
    # a time that is none, links to others' files, a pipe, and a further file of a terabyte
    odd = in_class(course, "odd", right).parent
    expected["odd"] = full
    (odd / "timestamp.txt").write_bytes(b"yesterday \xff")
    (odd / "passwd").symlink_to(secret)
    (odd / "folder").symlink_to(tmp_path)
    os.mkfifo(odd / "pipe")
    with open(odd / "large.bin", "wb") as file:
        file.truncate(1 << 40)
    blank = fill(STEM, {})
    thief = in_class(course, "thief", blank)
    thief.unlink()
    thief.symlink_to(odd / f"{STEM}.ipynb")
    (course / "submitted" / "copycat").symlink_to(course / "submitted" / "odd")
    (course / "submitted" / "twin").mkdir()
    (course / "submitted" / "twin" / STEM).symlink_to(course / "submitted" / "odd" / STEM)
    expected |= {"thief": 0.0, "copycat": 0.0, "twin": 0.0, "zoe": full}
    in_class(course, "zoe", right)

    done = run("nbgrader", "autograde", STEM, cwd=course)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    command("export", STEM, "--course", course, "--to", course / "grades.csv")
    rows = list(csv.DictReader((course / "grades.csv").read_text().splitlines()))
    assert {r["student_id"]: float(r["score"]) for r in rows} == expected
    kept = [p for p in (course / "autograded").rglob("*") if p.is_file()]
    assert {p.name for p in kept} <= {f"{STEM}.ipynb", "timestamp.txt"}
    assert not any(p.is_symlink() or SECRET.encode() in p.read_bytes() for p in kept)
    assert secret.read_text() == SECRET

    command("feedback", STEM, "--course", course)
    pages = list((course / "feedback").rglob("*.html"))
    assert len(pages) == len(expected)
    for page in pages:
        text = page.read_text()
        for evil in ("<script>alert", "<img src=x", "<svg onload", 'href="javascript'):
            assert evil not in text, (page, evil)

    # the grader's own command gives the same grades, and reads the same links as little
    capsys.readouterr()
    command("grade", STEM, course / "submitted", "--json", "--workers", 1)
    assert {r["submission"]: r["points"] for r in json.loads(capsys.readouterr().out)} == expected


def test_collecting_follows_no_links(tmp_path, run):
    course, exchange, secret = tmp_path / "course", tmp_path / "exchange", tmp_path / "secret.txt"
    secret.write_text(SECRET)
    command("release", STEM, "--course", course)
    config = course / "nbgrader_config.py"
    config.write_text(
        config.read_text() + f'c.Exchange.root = "{exchange}"\nc.Exchange.path_includes_course = False\n'
    )
    inbound = exchange / "course_llm" / "inbound"
    mine = inbound / f"eve+{STEM}+2024-02-03 04:05:06 UTC+x"
    mine.mkdir(parents=True)
    (mine / f"{STEM}.ipynb").write_text(json.dumps(fill(STEM, {})))
    (mine / "notes.txt").write_text("mine")
    (mine / "stolen.txt").symlink_to(secret)
    (mine / "folder").symlink_to(tmp_path)
    (inbound / f"mallory+{STEM}+2024-02-03 04:05:06 UTC+x").symlink_to(mine)
    done = run("nbgrader", "collect", STEM, cwd=course)
    found = sorted(
        str(p.relative_to(course / "submitted")) for p in (course / "submitted").rglob("*") if p.is_file()
    )
    assert found == [f"eve/{STEM}/{STEM}.ipynb", f"eve/{STEM}/notes.txt"], done.stderr[-2000:]


# counts are taken in the worker, where the answer runs, too


@pytest.fixture(scope="module")
def costs_grader():
    with Grader(catalog.chapter("loss")) as grader:
        yield grader


def graded_cost(grader: Grader, source: str, **more: str):
    report = grader.grade(Submission({costs.EXERCISE: source, **more}), "someone", only=(costs.EXERCISE,))
    return report.exercises[0]


@pytest.mark.parametrize("name", costs.submissions())
def test_a_hidden_cost_is_not_believed(costs_grader, name):
    honest = graded_cost(costs_grader, costs.WASTEFUL)
    found = graded_cost(costs_grader, costs.submissions()[name])
    assert 0 < honest.points < honest.max_points
    assert found.points <= honest.points
    assert not next(g for g in found.groups if g["name"] == "memory")["passed"]
    assert found.message


@pytest.mark.parametrize("name", costs.UNCOUNTED)
def test_what_is_not_done_or_not_counted_costs_points(name):
    stem, exercise, source = costs.UNCOUNTED[name]
    with Grader(catalog.chapter(stem)) as grader:
        source = textwrap.dedent(source)
        found = grader.grade(Submission({exercise: source}), "someone", only=(exercise,)).exercises[0]
    assert 0 < found.points < found.max_points, found
    assert found.message


def test_an_honest_cost_is_believed(costs_grader):
    right = answers("loss")
    found = graded_cost(costs_grader, right[costs.EXERCISE], perplexity="%timeit 1\nimport sys\nimport numpy as np\ndef (", **{"log_softmax": right["log_softmax"]})  # fmt: skip
    assert found.passed, found


def test_names_of_every_kind_have_a_row_and_links_do_not_lend_a_grade(tmp_path, capsys):
    names = [
        b"\xff\xfe",
        b"[red][bold :smile:",
        b"a\nb\x1b[2J",
        b"'; DROP TABLE student; --",
        "Ünï ✓".encode(),
        b"<b>x",
        b"\xff" * 250,
    ]
    right = json.dumps(fill(STEM, {name: RIGHT[name] for name in BESIDE})).encode()
    for name in names:
        path = os.path.join(os.fsencode(tmp_path), b"hand-ins", name, STEM.encode())
        os.makedirs(path)
        with open(os.path.join(path, f"{STEM}.ipynb".encode()), "wb") as file:
            file.write(right)
    (tmp_path / "hand-ins" / "eve").symlink_to(tmp_path / "hand-ins" / "<b>x")
    full = sum(catalog.chapter(STEM).entry(name).points for name in BESIDE)
    command("grade", STEM, tmp_path / "hand-ins")
    assert "Traceback" not in capsys.readouterr().err
    command("grade", STEM, tmp_path / "hand-ins", "--json", "--course", tmp_path / "course")
    rows = json.loads(capsys.readouterr().out)
    assert [r["points"] for r in rows if r["submission"] != "eve"] == [full] * len(names)
    assert [r["points"] for r in rows if r["submission"] == "eve"] == [0.0]
    assert all(r["submission"].isprintable() for r in rows)


def test_a_submission_has_so_much_time_and_no_more():
    burns = (
        "import os, time\nstart = time.process_time()\nwhile time.process_time() - start < 0.4:\n    pass\n"
    )
    cells = {
        e.name: f"{burns}def {e.name}(*args, **kwargs):\n    os._exit(1)\n"
        for e in catalog.chapter(STEM).entries
    }
    with Grader(
        catalog.chapter(STEM), Options(limits=dataclasses.replace(LIMITS, submission_s=6.0))
    ) as grader:
        report = grader.grade(Submission(cells), "someone")
        assert report.points == 0
        messages = [e.message for e in report.exercises]
        assert "ended by itself" in messages[0] and "used up its time" in messages[-1]


def test_what_is_lent_opens_no_file_of_the_graders(tmp_path):
    right = answers("pretraining")["parameter_count"].replace("def parameter_count", "def right")
    os.mkfifo(tmp_path / "pipe")  # whoever opens it waits for ever
    (tmp_path / "there").write_text(SECRET)
    for place in ("there", "pipe"):
        probe = f"""
def parameter_count(*args, **kwargs):
    save_checkpoint
    try:
        load_checkpoint({str(tmp_path / place)!r}, 1, 2, 3)
    except RuntimeError as error:
        return right(*args, **kwargs) if "FileNotFound" not in str(error) else 0
    return 0
"""
        broken = "def save_checkpoint(*args):\n    pass\ndef load_checkpoint(*args):\n    return 1\n"
        with Grader(catalog.chapter("pretraining")) as grader:
            cells = Submission({"save_checkpoint": broken, "parameter_count": right + probe})
            report = grader.grade(cells, "someone", only=("save_checkpoint", "parameter_count"))
        assert report.points == 0, report


def test_a_number_beyond_all_floats_is_wrong_and_no_more():
    assert compare.difference(10**400, 0.5) == "the result has the wrong value"
    assert judge.same_outcome(Outcome(value=10**400), Outcome(value=0.5)) is False


def odd_folders(course: Path) -> None:
    """Fills eve's folder with what would stand in the grader's way."""
    folder = in_class(course, "eve", honest()).parent
    (folder / f".{STEM}.ipynb.tmp").mkdir()
    (folder / f".{STEM}.ipynb.tmp" / "x").write_text("x")
    (folder / f"{STEM}.html").mkdir()
    (folder / f"{STEM}.html" / "x").write_text("x")
    (folder / "data").write_text("a file where the instructor has a folder")
    (folder / "again").write_text("first a file")
    (folder / "timestamp.txt").write_text("2026-08-05 2e8TCMWZeUM ..")
    down = os.open(folder, os.O_RDONLY)
    for _ in range(1200):  # deeper than Python recurses
        os.mkdir("d", dir_fd=down)
        below = os.open("d", os.O_RDONLY, dir_fd=down)
        os.close(down)
        down = below
    os.close(os.open("f", os.O_CREAT, dir_fd=down))
    os.close(down)


def test_a_folder_of_one_keeps_nobody_from_being_graded(tmp_path, capsys):
    course = tmp_path / "course"
    command("release", STEM, "--course", course)
    (course / "source" / STEM / "data").mkdir()
    (course / "source" / STEM / "data" / "mine.csv").write_text("1")
    for student in ("ada", "=1+1", "zoe"):
        in_class(course, student, honest())
    odd_folders(course)
    command("grade", STEM, course / "submitted", "--course", course)
    kept = course / "autograded" / "eve" / STEM
    assert (kept / "data" / "mine.csv").read_text() == "1"
    folder = course / "submitted" / "eve" / STEM
    (folder / "again").unlink()
    (folder / "again").mkdir()
    (folder / "again" / "x").write_text("then a folder")
    command("grade", STEM, course / "submitted", "--course", course, "--force")
    assert (kept / "again" / "x").is_file()
    command("feedback", STEM, "--course", course)
    assert len(list((course / "feedback").glob(f"*/{STEM}/{STEM}.html"))) == 4
    command("export", STEM, "--course", course)
    rows = list(csv.DictReader((course / f"{STEM}.csv").read_text().splitlines()))
    assert {r["student_id"]: float(r["score"]) for r in rows} == dict.fromkeys(("ada", "'=1+1", "zoe", "eve"), 11.0)  # fmt: skip
    subprocess.run(["rm", "-rf", course], check=True)  # Python's own would recurse


def test_a_folder_of_one_keeps_nobody_from_being_collected(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("autograder.archives.MAX_MEMBERS", 300)
    monkeypatch.setattr("autograder.archives.MAX_FURTHER_FILES", 100)
    monkeypatch.setattr("autograder.archives.MAX_TOTAL_BYTES", 40 << 20)
    monkeypatch.setattr("autograder.archives.Source.left_bytes", 40 << 20)
    monkeypatch.setattr("autograder.collecting.MAX_BYTES", 10 << 20)
    hand_ins, course = tmp_path / "hand-ins", tmp_path / "course"
    command("release", STEM, "--course", course)
    for student in ("ada", "eve", "zoe"):
        (hand_ins / student / STEM).mkdir(parents=True)
        (hand_ins / student / STEM / f"{STEM}.ipynb").write_text(json.dumps(honest()))
    many = hand_ins / "eve" / STEM / "a_library"
    many.mkdir()
    for i in range(400):
        (many / str(i)).touch()
    for i in range(20):
        with open(hand_ins / "eve" / STEM / f"large{i}", "wb") as file:
            file.truncate(8 << 20)
    command("collect", STEM, hand_ins, "--course", course)
    found = {p.parent.parent.name for p in (course / "submitted").rglob(f"{STEM}.ipynb")}
    assert found == {"ada", "eve", "zoe"}


def test_the_name_of_a_file_steers_no_terminal(tmp_path, capsys):
    path = tmp_path / "x\x1b[2J\x1b]0;mine\x07.ipynb"
    path.write_text(json.dumps(fill(STEM, {})))
    command("grade", STEM, path)
    assert cli.main(["grade", STEM, str(path) + "gone\x1b[2J"]) == 1
    said = "".join(capsys.readouterr())
    assert "\x1b" not in said and "\x07" not in said and "x?[2J" in said


# the table in the instructor guide, and the bubble in which stock nbgrader meets the attacks


def test_the_table_is_of_these_attacks_and_this_grader_holds():
    found = json.loads((ROOT / "benchmarks" / "attacks.json").read_text())
    chosen = attacks_beside_stock.chosen()
    assert [row["name"] for row in found["attacks"]] == list(chosen)
    assert {a.kind for a in chosen.values() if a} == {"result", "answers", "harm", "notebook"}
    for row in found["attacks"]:
        assert {k: row[k] for k in ("name", "kind", "words", "honest")} == attacks_beside_stock.described(row["name"], chosen[row["name"]])  # fmt: skip
        assert row["ours"]["points"] <= row["honest"] or not chosen[row["name"]].beside, row
        assert row["ours"]["points"] == found["command"][row["name"]], row
        assert row["ours"]["says"] or row["ours"]["points"] >= 11, row
    ours = found["ours"]
    assert ours["points"] == {"ada": 11, "zoe": 11} and ours["ended"] == "by itself"
    assert not (ours["read"] or ours["changed"] or ours["connections"] or ours["left"])
    # what stock nbgrader does with honest students shows that it was set up fairly
    assert found["stock"]["points"] == {"ada": 11, "eve": 11, "zoe": 11} and not found["stock"]["read"]


HARMFUL = (
    "import os; os.kill(-1, 9)",
    """exec("import os, time\\nwhile True:\\n    try: os.fork()\\n    except OSError: time.sleep(1)")""",
    """exec("while True: open('/tmp/x', 'ab').write(bytes(1 << 24))")""",
    """import subprocess; subprocess.Popen(["sleep", "50"])""",
    "import time; time.sleep(50)",
    "pass",
)
INSIDE = f"""
import os, shlex, sys
from benchmarks import bubble

for place in (bubble.HOME, bubble.TMP):
    place.mkdir()
for code in {HARMFUL!r}:
    done = bubble.run(shlex.join([sys.executable, "-c", code]), bubble.HOME, 3 if "sleep(50)" in code else 30)
    print(done.ended, done.left, "No space left" in done.said, len(bubble.processes()), sep=",")
print(os.path.exists({str(Path.home() / ".bashrc")!r}), os.environ["INSTRUCTOR_TOKEN"], sep=",")
"""


def test_the_bubble_holds_what_stock_nbgrader_would_not(run):
    done = run(*bubble.outer_command(sys.executable, "-c", INSIDE), timeout=240)
    lines = done.stdout.splitlines()
    assert lines[0] == "killed,0,False,2", done.stderr
    assert lines[1] in ("processes,0,False,2", "time,0,False,2")
    assert lines[2:] == ["by itself,0,True,2", "by itself,1,False,2", "time,0,False,2", "by itself,0,False,2", f"False,{SECRET}"]  # fmt: skip
