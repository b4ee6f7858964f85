"""The command line: what it prints, its exit codes, and one line for every error."""

import contextlib
import importlib
import io
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from autograder import catalog, cli
from autograder.check import check_names
from autograder.commands.grade import print_class_table
from autograder.course import CONFIG
from samples.build import PATCH, answers, fill, write_class

STEM = "decoding"
CHAPTER = catalog.chapter(STEM)
RIGHT = answers(STEM)
NAMES = [entry.name for entry in CHAPTER.entries]
DROPS_CROSSING = """
import torch


def top_p_filter(probs, p):
    if not 0 < p <= 1:
        raise ValueError("p")
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    kept = torch.where(ordered.cumsum(-1) <= p, ordered, 0)
    kept = torch.zeros_like(probs).scatter(-1, order, kept)
    return kept / kept.sum(-1, keepdim=True)
"""


def command(*arguments: object) -> tuple[int, str, str]:
    """Runs the command in this process: exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([str(a) for a in arguments])
    assert "Traceback" not in out.getvalue() + err.getvalue()
    return code, out.getvalue(), err.getvalue()


def refused(*arguments: object) -> tuple[int, str]:
    """Runs a command that ends in an error: exit code, and its one line."""
    code, _, err = command(*arguments)
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("course-llm: "), err
    return code, lines[0]


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# check


def test_check_passes_a_python_file_that_defines_one_exercise(tmp_path):
    path = write(tmp_path / "mine.py", RIGHT["top_p_filter"])
    code, out, err = command("check", STEM, path, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == [{"name": "top_p_filter", "passed": True, "near_miss": None, "message": ""}]


def test_check_passes_a_solved_notebook_and_shows_a_table(tmp_path):
    path = write(tmp_path / "mine.ipynb", fill(STEM, RIGHT))
    code, out, _ = command("check", STEM, path)
    assert code == 0
    assert all(name in out for name in NAMES)
    assert "failed" not in out


def test_check_names_the_known_mistake(tmp_path):
    path = write(tmp_path / "mine.py", DROPS_CROSSING)
    code, out, _ = command("check", STEM, path, "--json")
    (result,) = json.loads(out)
    assert code == 1
    assert result["near_miss"] == "drops-crossing-token" and "crosses" in result["message"]


def test_check_says_where_and_why_an_error_is_raised_and_shows_the_case(tmp_path):
    broken = "import torch\n\n\ndef top_k_filter(probs, k):\n    return probs[9]\n"
    path = write(tmp_path / "mine.py", broken)
    (result,) = json.loads(command("check", STEM, path, "--json")[1])
    assert "An IndexError is raised in line 5 of the file (index 9 is out of bounds" in result["message"]
    assert result["case"] == {
        "call": "top_k_filter(probs=float32 (4,), k=2)",
        "probs": "float32 (4,): [0.1, 0.4, 0.2, 0.3]",
        "expected": "float32 (4,): [0, 0.5714, 0, 0.4286]",
    }
    _, out, _ = command("check", STEM, path)
    assert "call: top_k_filter(probs=float32 (4,), k=2)" in out
    path = write(tmp_path / "mine.ipynb", fill(STEM, {"top_k_filter": broken}))
    (result,) = json.loads(command("check", STEM, path, "--json")[1])
    assert "in line 5 of your cell (index 9" in result["message"]


def test_grade_shows_no_case_and_no_words_of_an_error(tmp_path):
    for answer in ("raise IndexError(f'secret {probs}')", "return probs"):
        path = write(tmp_path / "mine.py", f"def top_k_filter(probs, k):\n    {answer}\n")
        _, out, _ = command("grade", STEM, path, "--json")
        assert not any(
            word in out for word in ("secret", "tensor(", "yours", '"case"', "float32 (", "0.5714")
        )


def test_check_fails_when_one_of_two_exercises_fails(tmp_path):
    unfinished = "def top_k_filter(probs, k):\n    raise NotImplementedError\n"
    path = write(tmp_path / "mine.py", RIGHT["top_p_filter"] + "\n\n" + unfinished)
    code, out, _ = command("check", STEM, path, "--json")
    assert code == 1
    assert {r["name"]: r["passed"] for r in json.loads(out)} == {"top_p_filter": True, "top_k_filter": False}


def test_check_keeps_its_json_clean_of_what_the_answers_print(tmp_path):
    noisy = "print('hello')\n" + RIGHT["top_p_filter"].replace(":\n", ":\n    print('called')\n", 1)
    code, out, err = command("check", STEM, write(tmp_path / "mine.py", noisy), "--json")
    assert code == 0 and json.loads(out)[0]["passed"]
    assert "hello" in err


@pytest.mark.parametrize("ending", ["import sys\nsys.exit(0)", "raise SystemExit", "1 / 0"])
def test_check_is_not_ended_by_the_file_it_checks(tmp_path, ending):
    path = write(tmp_path / "mine.py", ending + DROPS_CROSSING)
    code, out, _ = command("check", STEM, path, "--json")
    assert code == 1
    assert json.loads(out)[0]["near_miss"] == "drops-crossing-token"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("mine.py", "def top_p_filter(probs, p)\n    pass\n", "SyntaxError in line 1"),
        ("mine.py", "import no_such_module\n", "ModuleNotFoundError in line 1"),
    ],
)
def test_check_says_that_a_file_does_not_run(tmp_path, name, content, words):
    code, out, _ = command("check", STEM, write(tmp_path / name, content), "--json")
    assert code == 1
    assert words in json.loads(out)[0]["message"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("blank.ipynb", CHAPTER.notebook, f"no exercise of {STEM} is written yet"),
        ("other.ipynb", catalog.chapter("loss").notebook, "defines none of the exercises"),
        ("empty.py", "", "defines none of the exercises"),
        ("broken.ipynb", json.dumps(CHAPTER.notebook)[:-9], "its JSON is broken"),
        ("empty.ipynb", "", "its JSON is broken"),
        ("list.ipynb", "[]", "it has no cells"),
        ("binary.py", b"\x89PNG\r\n\xff\xfe\x00", "not UTF-8"),
        ("mine.txt", "x = 1", "neither a notebook"),
        ("deep.ipynb", "[" * 100_000, "its JSON is broken"),
    ],
)
def test_check_refuses_a_file_in_one_line(tmp_path, name, content, words):
    code, line = refused("check", STEM, write(tmp_path / name, content))
    assert code == 1
    assert words in line


UNCOUNTED = answers("loss")["chunked_cross_entropy"].replace(
    "logits = h @ w\n", "logits = h @ w\n        w.tolist()\n"
)


def test_check_refuses_a_cost_that_cannot_be_counted_as_grading_does(tmp_path):
    path = write(tmp_path / "mine.py", UNCOUNTED)
    for name in ("check", "grade"):
        code, out, _ = command(name, "loss", path, "--json")
        found = json.loads(out)[0]
        found = (
            found
            if name == "check"
            else next(e for e in found["exercises"] if not e["passed"] and e["points"])
        )
        assert code == (name == "check") and not found["passed"]
        assert "cost cannot be counted, because of `tolist`" in found["message"]


def test_check_in_a_notebook_reads_the_cells_that_the_kernel_still_has():
    shell = InteractiveShell()
    namespace = shell.user_ns
    shell.run_cell(
        "import torch\nimport torch.nn.functional as F\nfrom torch.utils.checkpoint import checkpoint"
    )
    for source, passed in ((UNCOUNTED, False), (answers("loss")["chunked_cross_entropy"], True)):
        shell.run_cell(source)
        result = check_names(catalog.chapter("loss"), "chunked_cross_entropy", namespace).result
        assert result.passed == passed, result.message
        assert ("`tolist`" in result.complaint) != passed


def test_check_finds_the_chapters_notebook_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, line = refused("check", STEM)
    assert code == 1 and f"course-llm check {STEM} FILE" in line
    write(tmp_path / "exercises" / STEM / f"{STEM}.ipynb", fill(STEM, {NAMES[0]: RIGHT[NAMES[0]]}))
    code, out, _ = command("check", STEM, "--json")
    assert code == 0
    assert [r["name"] for r in json.loads(out)] == [NAMES[0]]


def test_check_judges_an_exercise_by_its_own_cell_whatever_a_later_cell_redefines(tmp_path):
    helper = f"def {NAMES[0]}(logits, temperature):\n    return logits\n\n\n"
    path = write(
        tmp_path / "mine.ipynb", fill(STEM, {NAMES[0]: RIGHT[NAMES[0]], NAMES[-1]: helper + RIGHT[NAMES[-1]]})
    )
    code, out, _ = command("check", STEM, path, "--json")
    assert {r["name"]: r["passed"] for r in json.loads(out)} == {NAMES[0]: True, NAMES[-1]: True}
    assert code == 0
    ((report,),) = [json.loads(command("grade", STEM, path, "--json")[1])]
    assert report["points"] == CHAPTER.entry(NAMES[0]).points + CHAPTER.entry(NAMES[-1]).points


# usage


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice"),
        (["check"], "STEM"),
        (["check", "decodings"], "the chapters are"),
        (["check", "../etc"], "the chapters are"),
        (["grade", STEM], "PATH"),
        (["grade", "nothing", "."], "the chapters are"),
        (["grade", STEM, ".", "--workers", "0"], "at least 1"),
        (["grade", STEM, ".", "--workers", "many"], "invalid int"),
        (["grade", STEM, ".", "--seed", "x"], "invalid int"),
        (["grade", STEM, ".", "--device", "tpu"], "--device takes"),
        (["grade", STEM, ".", "--device", "cuda:99"], "--device cuda:99"),
        (["release", "nothing"], "the chapters are"),
        (["collect", STEM, "/no/such/folder"], "there is no folder"),
        (["feedback", "nothing"], "the chapters are"),
        (["export", "nothing"], "the chapters are"),
    ],
)
def test_usage_errors_are_one_line_and_exit_code_2(arguments, words):
    code, line = refused(*arguments)
    assert code == 2
    assert words in line


@pytest.mark.parametrize("name", ["collect", "feedback", "export", "items", "regrade"])
def test_a_folder_that_is_no_course_is_refused(tmp_path, name):
    folder = [tmp_path] if name == "collect" else []
    code, line = refused(name, STEM, *folder, "--course", tmp_path / "none")
    assert code == 1
    assert f"course-llm release {STEM} --course {tmp_path / 'none'}" in line
    assert not (tmp_path / "none").exists()


def test_the_installed_command_has_real_exit_codes(run, tmp_path):
    right = write(tmp_path / "right.py", RIGHT["top_p_filter"])
    wrong = write(tmp_path / "wrong.py", DROPS_CROSSING)
    program = Path(sys.executable).parent / "course-llm"
    assert run(program, "check", STEM, right, cwd=tmp_path).returncode == 0
    assert run(program, "check", STEM, wrong, cwd=tmp_path).returncode == 1
    usage = run(program, "check", "nothing", cwd=tmp_path)
    assert usage.returncode == 2 and usage.stdout == "" and len(usage.stderr.splitlines()) == 1
    assert run(program, "--help", cwd=tmp_path).returncode == 0


# grade


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """One call with every kind of path: its exit code, the reports by submission, standard error, and the folder."""
    folder = tmp_path_factory.mktemp("paths")
    given = {
        "right.ipynb": fill(STEM, RIGHT),
        "one.py": RIGHT["top_p_filter"],
        "wrong.py": DROPS_CROSSING,
        "syntax.py": "def top_p_filter(probs, p)\n",
        "broken.ipynb": json.dumps(fill(STEM, RIGHT))[:-30],
        "empty.ipynb": "",
        "empty.py": "",
        "binary.py": b"\xff\xfe\x00\x01",
        "notes.txt": "x = 1",
    }
    paths = [write(folder / name, content) for name, content in given.items()]
    for student, sources in {"ada": {NAMES[0]: RIGHT[NAMES[0]]}, "mona": {}}.items():
        write(folder / "class" / student / STEM / f"{STEM}.ipynb", fill(STEM, sources))
    write(folder / "class" / "zoe" / STEM / "other.ipynb", fill(STEM, RIGHT))
    (folder / "nobody").mkdir()
    paths += [folder / "class", folder / "nobody", folder / "missing.py"]
    code, out, err = command("grade", STEM, *paths, "--json", "--seed", "5")
    reports = {r["submission"].removeprefix(f"{folder}/"): r for r in json.loads(out)}
    return code, reports, err, folder


def exercise(report: dict, name: str) -> dict:
    return next(e for e in report["exercises"] if e["name"] == name)


def test_grade_reports_every_path_and_student_once(graded):
    _, reports, _, _ = graded
    assert list(reports) == ["right.ipynb", "one.py", "wrong.py", "syntax.py", "broken.ipynb", "empty.ipynb", "empty.py", "binary.py",
                             "notes.txt", "ada", "mona", "zoe", "nobody", "missing.py"]  # fmt: skip


def test_grade_json_has_all_keys(graded):
    _, reports, _, _ = graded
    for report in reports.values():
        assert {"submission", "points", "max_points", "error", "exercises"} <= set(report)
        assert [e["name"] for e in report["exercises"]] == NAMES
        assert report["max_points"] == CHAPTER.points
        assert report["points"] == pytest.approx(sum(e["points"] for e in report["exercises"]))
        for found, entry in zip(report["exercises"], CHAPTER.entries, strict=True):
            assert {"name", "points", "max_points", "passed", "near_miss", "message"} <= set(found)
            assert found["max_points"] == entry.points
            assert found["passed"] == (found["points"] == found["max_points"])


def test_grade_gives_a_right_notebook_every_point(graded):
    _, reports, _, _ = graded
    report = reports["right.ipynb"]
    assert report["points"] == CHAPTER.points
    assert report["error"] is None
    assert all(e["passed"] and e["near_miss"] is None and e["message"] == "" for e in report["exercises"])


def test_grade_counts_what_a_python_file_does_not_define_as_not_attempted(graded):
    _, reports, _, _ = graded
    report = reports["one.py"]
    assert exercise(report, "top_p_filter")["passed"]
    assert report["points"] == CHAPTER.entry("top_p_filter").points
    others = [e for e in report["exercises"] if e["name"] != "top_p_filter"]
    assert all(e["points"] == 0 and e["message"] == "Not attempted." for e in others)


def test_grade_names_the_known_mistake(graded):
    _, reports, _, _ = graded
    found = exercise(reports["wrong.py"], "top_p_filter")
    assert found["near_miss"] == "drops-crossing-token"
    assert found["points"] < found["max_points"] and "crosses" in found["message"]


def test_grade_reads_a_class_folder_by_student(graded):
    _, reports, _, _ = graded
    assert reports["ada"]["points"] == CHAPTER.entry(NAMES[0]).points
    assert reports["mona"]["points"] == 0 and reports["mona"]["error"] is None
    assert "there is no file" in reports["zoe"]["error"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken.ipynb", "its JSON is broken"),
        ("empty.ipynb", "its JSON is broken"),
        ("binary.py", "not UTF-8"),
        ("notes.txt", "neither a notebook"),
        ("nobody", "holds no submissions"),
        ("missing.py", "there is no file"),
    ],
)
def test_grade_gives_an_unusable_file_a_row_with_its_error(graded, name, words):
    _, reports, _, _ = graded
    assert words in reports[name]["error"]
    assert reports[name]["points"] == 0


def test_grade_says_where_a_file_is_not_python(graded):
    _, reports, _, _ = graded
    assert "SyntaxError in line 1" in exercise(reports["syntax.py"], "top_p_filter")["message"]
    assert {e["message"] for e in reports["empty.py"]["exercises"]} == {"Not attempted."}


def test_grade_fails_when_a_path_gives_nothing_though_all_others_are_graded(graded):
    code, _, err, _ = graded
    assert code == 1
    assert len(err.strip().splitlines()) == 1
    assert "nobody holds no submissions" in err and "missing.py" in err


def test_grade_in_two_workers_gives_the_same_grades(graded, run):
    _, reports, _, folder = graded
    names = ["one.py", "wrong.py", "syntax.py", "broken.ipynb"]
    program = Path(sys.executable).parent / "course-llm"
    done = run(program, "grade", STEM, *names, "--json", "--workers", "2", "--seed", "5", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    again = json.loads(done.stdout)
    assert [r["submission"] for r in again] == names
    for report in again:
        assert report["exercises"] == reports[report["submission"]]["exercises"]


def test_grade_of_one_file_prints_a_table(graded):
    _, _, _, folder = graded
    code, out, err = command("grade", STEM, folder / "broken.ipynb")
    assert (code, err) == (0, "")
    assert "JSON" in out and f"0 / {CHAPTER.points}" in out


def test_grade_of_an_empty_folder_is_one_line(tmp_path):
    code, line = refused("grade", STEM, tmp_path)
    assert code == 1
    assert f"<student>/{STEM}/{STEM}.ipynb" in line


def test_grade_refuses_two_submissions_of_one_name(tmp_path):
    for place in ("a", "b"):
        write(tmp_path / place / "ada" / STEM / f"{STEM}.ipynb", fill(STEM, {}))
    code, line = refused("grade", STEM, tmp_path / "a", tmp_path / "b")
    assert code == 2
    assert "two submissions are called ada" in line


def test_grade_without_bubblewrap_names_the_command_that_installs_it(tmp_path, monkeypatch):
    path = write(tmp_path / "mine.py", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    code, line = refused("grade", STEM, path)
    assert code == 1
    assert "apt install bubblewrap" in line


def test_grade_without_a_sandbox_says_so_and_keeps_its_limits(tmp_path, monkeypatch):
    loop = "def top_p_filter(probs, p):\n    while True:\n        pass\n"
    right, endless = write(tmp_path / "right.py", RIGHT["top_p_filter"]), write(tmp_path / "loop.py", loop)
    patch = write(tmp_path / "patch.py", PATCH.format(name="top_p_filter"))
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no bubblewrap here
    code, out, err = command("grade", STEM, right, endless, patch, "--no-sandbox", "--json")
    assert code == 0 and "without a sandbox" in err
    reports = json.loads(out)
    assert not any(r["sandboxed"] for r in reports)
    assert [exercise(r, "top_p_filter")["passed"] for r in reports] == [True, False, False]
    assert "time is up" in exercise(reports[1], "top_p_filter")["message"]
    print_class_table(STEM, [])  # a table of nobody is a table


# the course folder


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A course folder with three students, graded, with its first output."""
    root = tmp_path_factory.mktemp("term")
    for student, sources in {"ada": RIGHT, "mona": {}}.items():
        write(root / "in" / student / STEM / f"{STEM}.ipynb", fill(STEM, sources))
    write(root / "in" / "liam" / STEM / f"{STEM}.ipynb", "{")
    (root / "in" / "ada" / STEM / "timestamp.txt").write_text("2026-03-01 10:00:00 UTC")
    (root / "in" / "ada" / STEM / "timestamp.txt").chmod(0o444)
    first = command("grade", STEM, root / "in", "--course", root / "course", "--json")
    return root / "course", root / "in", first


def scores(course: Path) -> dict[str, float]:
    query = "select student_id, sum(coalesce(auto_score, 0)) from grade g join submitted_notebook n on n.id = g.notebook_id join submitted_assignment a on a.id = n.assignment_id group by student_id"  # fmt: skip
    with contextlib.closing(sqlite3.connect(course / "gradebook.db")) as db:
        return dict(db.execute(query).fetchall())


def test_grade_with_a_course_writes_the_gradebook(course):
    root, _, (code, out, _) = course
    assert code == 0
    assert {r["submission"]: r["points"] for r in json.loads(out)} == scores(root) == {"ada": CHAPTER.points, "mona": 0, "liam": 0}  # fmt: skip


def test_grading_again_grades_nothing_twice_and_reports_the_same(course):
    root, folder, (_, first, _) = course
    stamp = (root / "autograded" / "ada" / STEM / f"{STEM}.ipynb").stat().st_mtime_ns
    code, second, err = command("grade", STEM, folder, "--course", root, "--json")
    assert code == 0 and "3 of 3 submissions are graded already" in err
    assert json.loads(second) == json.loads(first)
    assert (root / "autograded" / "ada" / STEM / f"{STEM}.ipynb").stat().st_mtime_ns == stamp


def test_a_changed_submission_and_force_are_graded_again(course):
    root, folder, (_, first, _) = course
    write(folder / "mona" / STEM / f"{STEM}.ipynb", fill(STEM, {NAMES[0]: RIGHT[NAMES[0]]}))
    code, _, err = command("grade", STEM, folder, "--course", root, "--json")
    assert code == 0 and "2 of 3 submissions are graded already" in err
    assert scores(root)["mona"] == CHAPTER.entry(NAMES[0]).points
    write(folder / "mona" / STEM / f"{STEM}.ipynb", fill(STEM, {}))
    code, out, err = command("grade", STEM, folder, "--course", root, "--json", "--force")
    assert (code, err) == (0, "")
    for report in (before := json.loads(first)) + (after := json.loads(out)):
        report.pop("elapsed_s")
    assert before == after


def test_grade_with_a_course_takes_folders_only(course):
    root, folder, _ = course
    code, line = refused("grade", STEM, folder / "ada" / STEM / f"{STEM}.ipynb", "--course", root)
    assert code == 2
    assert "takes a folder" in line


def test_grade_takes_no_folder_of_the_course_itself_for_submissions(course):
    """Its folders would be graded as students that are called release and source."""
    root, _, _ = course
    for folder in (root, root / "release", root / "autograded"):
        for options in ((), ("--course", root)):
            code, line = refused("grade", STEM, folder, *options)
            assert code == 2 and str(root / "submitted") in line
    assert set(scores(root)) == {"ada", "mona", "liam"}


def test_grade_of_a_folder_that_is_not_there_says_what_makes_it(tmp_path):
    write(tmp_path / "nbgrader_config.py", CONFIG)
    code, line = refused("grade", STEM, tmp_path / "submitted", "--course", tmp_path)
    assert code == 2 and f"course-llm collect {STEM}" in line


def test_release_into_a_course_folder_of_another_make_warns(tmp_path):
    write(tmp_path / "nbgrader_config.py", 'c = get_config()\nc.CourseDirectory.course_id = "cs101"\n')
    code, _, err = command("release", STEM, "--course", tmp_path)
    assert code == 0 and "configure(c)" in err and "your rights" in err
    write(tmp_path / "nbgrader_config.py", CONFIG)
    assert command("release", STEM, "--course", tmp_path)[2] == ""


@pytest.mark.parametrize(
    ("arguments", "module", "run", "words"),
    [
        (("grade", STEM, "in", "--course", "term"), "grade", "run_grade", "what was graded is kept"),
        (("grade", STEM, "in"), "grade", "run_grade", "nothing of it is kept"),
        (("regrade", STEM, "--write"), "regrade", "run_regrade", "what was graded is kept"),
        (("regrade", STEM), "regrade", "run_regrade", "nothing of it is kept"),
        (("collect", STEM, "in"), "collect", "run_collect", "as it was, or the next collect finishes"),
        (("feedback", STEM), "term", "run_feedback", "it writes all"),
        (("export", STEM), "export", "run_export", "nothing of it is kept"),
        (("items", STEM), "items", "run_items", "nothing of it is kept"),
        (("check", STEM, "a.ipynb"), "check", "run_check", "nothing of it is kept"),
        (("pretrain", "recipe.toml"), "pretrain", "run_pretrain", "--resume goes on from it"),
    ],
)
def test_an_interrupted_command_says_what_is_left_of_it(arguments, module, run, words, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module(f"autograder.commands.{module}"), run, interrupted)
    code, out, err = command(*arguments)
    assert (code, out) == (130, "") and words in err


def test_release_collect_feedback_and_export(course, tmp_path):
    root, folder, _ = course
    assert command("release", STEM, "--course", root)[0] == 0
    assert json.loads((root / "release" / STEM / f"{STEM}.ipynb").read_text())["cells"]
    code, out, _ = command("collect", STEM, folder, "--course", root)
    assert code == 0 and "collected 3 submissions" in out
    code, out, _ = command("feedback", STEM, "--course", root)
    assert code == 0 and "3 feedback pages" in out
    assert "its JSON is broken" in (root / "feedback" / "liam" / STEM / f"{STEM}.html").read_text()
    code, out, _ = command("export", STEM, "--course", root)
    rows = (root / f"{STEM}.csv").read_text().splitlines()
    assert code == 0 and len(rows) == 4 and f",{float(CHAPTER.points)}" in rows[1]
    assert command("export", STEM, "--course", root, "--to", tmp_path / "all.csv")[0] == 0
    assert (tmp_path / "all.csv").read_text().splitlines() == rows
    code, line = refused("export", STEM, "--course", root, "--to", tmp_path / "no" / "all.csv")
    assert code == 1 and "No such file" in line


def test_what_is_not_there_yet_is_said(course):
    root, _, _ = course
    other = next(stem for stem in catalog.stems() if stem != STEM)
    for name in ("feedback", "export"):
        code, line = refused(name, other, "--course", root)
        assert code == 1
        assert f"course-llm grade {other}" in line


def test_collect_without_a_folder_asks_the_exchange(tmp_path):
    write(tmp_path / "nbgrader_config.py", CONFIG + f'\nc.Exchange.root = "{tmp_path / "none"}"\n')
    code, line = refused("collect", STEM, "--course", tmp_path)
    assert code == 1
    assert "name a FOLDER" in line


def test_a_course_folder_whose_configuration_is_broken_is_said(tmp_path):
    write(tmp_path / "nbgrader_config.py", "c = ")
    code, line = refused("release", STEM, "--course", tmp_path)
    assert code == 1
    assert "nbgrader_config.py" in line


def test_a_course_folder_that_cannot_be_made_is_said(tmp_path):
    write(tmp_path / "file", "")
    code, line = refused("release", STEM, "--course", tmp_path / "file" / "course")
    assert code == 1
    assert "file" in line


def test_a_killed_run_is_resumed(tmp_path):
    """Grading that is killed in the middle keeps what it has finished, and a second run grades the rest."""
    write_class_of_right(tmp_path / "in", 4)
    program = Path(sys.executable).parent / "course-llm"
    arguments = [str(program), "grade", STEM, str(tmp_path / "in"), "--course", str(tmp_path / "course")]
    process = subprocess.Popen([*arguments, "--workers", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    finished = tmp_path / "course" / "autograded"
    while process.poll() is None and not list(finished.glob(f"*/{STEM}/{STEM}.ipynb")):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    process.kill()
    process.wait()
    done = len(list(finished.glob(f"*/{STEM}/{STEM}.ipynb")))
    code, out, err = command("grade", STEM, tmp_path / "in", "--course", tmp_path / "course", "--json")
    assert code == 0 and f"{done} of 4 submissions are graded already" in err
    points = CHAPTER.entry(NAMES[0]).points
    assert [r["points"] for r in json.loads(out)] == [points] * 4
    assert set(scores(tmp_path / "course").values()) == {points}


def write_class_of_right(folder: Path, count: int) -> None:
    for i in range(count):
        write(folder / f"s{i}" / STEM / f"{STEM}.ipynb", fill(STEM, {NAMES[0]: RIGHT[NAMES[0]]}))


def test_the_sample_class_has_every_kind_of_submission(tmp_path):
    students = write_class(STEM, tmp_path)
    assert len(students) >= 16
    assert sorted(students) == sorted(p.name for p in tmp_path.iterdir())
