"""The sandboxed grader: points, isolation, and one broken cell that costs only itself."""

import math
import os
import textwrap
import time

import pytest
import torch

from autograder import catalog, guard, judge, screen
from autograder.catalog import Chapter
from autograder.compare import BY_DTYPE, difference
from autograder.grading import Grader, Options
from autograder.sandbox import Limits, Sandbox
from autograder.spec import BackendLost, Local
from autograder.submission import Submission
from autograder.sync import SETUP
from samples.build import answers

STEM = "decoding"
RIGHT = answers(STEM)
FIRST = next(iter(RIGHT))


@pytest.fixture(scope="module")
def grader():
    with Grader(catalog.chapter(STEM)) as grader:
        yield grader


@pytest.fixture(scope="module")
def bare():
    """A sandbox of no chapter in particular, with tight limits."""
    chapter = Chapter("none", "none", SETUP, "", (), {}, ())
    limits = Limits(memory_bytes=512 << 20, cell_s=3, tmp_bytes=4 << 20, file_bytes=1 << 20)
    with Sandbox(chapter, limits) as sandbox:
        yield sandbox


@pytest.fixture
def worker(bare):
    worker = bare.start_worker()
    worker.allow(3)
    yield worker
    worker.close()


def grade(grader, *names: str, **changed: str):
    sources = {**RIGHT, **{n: textwrap.dedent(s) for n, s in changed.items()}}
    report = grader.grade(Submission(sources), "someone", only=names)
    return {e.name: e for e in report.exercises}


def outcome(worker, source: str, *args):
    """Defines `f` in the worker and calls it."""
    error = worker.run_cell("f", textwrap.dedent(source))
    assert error is None, error
    return worker.perform("call", "f", args)


def test_the_solution_gets_every_point(grader):
    report = grader.grade(Submission(RIGHT), "ada")
    assert report.points == report.max_points == catalog.chapter(STEM).points
    assert report.error is None


def test_a_blank_notebook_gets_no_point_and_says_not_attempted(grader):
    starters = {e.name: e.starter for e in catalog.chapter(STEM).entries}
    report = grader.grade(Submission(starters), "mona")
    assert report.points == 0
    assert {e.message for e in report.exercises} == {"Not attempted."}


def test_partial_credit_is_the_share_of_the_groups_that_pass(grader):
    source = "def top_k_filter(probs, k):\n" + textwrap.indent(
        textwrap.dedent("""
        order = probs.sort(dim=-1, descending=True, stable=True).indices
        keep = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order[..., : max(k, 1)], True)
        kept = torch.where(keep, probs, 0)
        return kept / kept.sum(-1, keepdim=True)
        """),
        "    ",
    )
    found = grade(grader, "top_k_filter", top_k_filter=source)["top_k_filter"]
    failed = [g["name"] for g in found.groups if not g["passed"]]
    assert 0 < found.points < found.max_points
    assert found.points == sum(g["points"] for g in found.groups)
    assert len(failed) == 1


def test_a_broken_cell_costs_only_itself(grader):
    broken = {"top_k_filter": "def top_k_filter(probs, k)\n    return probs"}
    found = grade(grader, "top_k_filter", "sampling_distribution", "generate", **broken)
    assert found["top_k_filter"].points == 0
    assert "SyntaxError in line 1" in found["top_k_filter"].message
    # these two call top_k_filter: they are graded with a working one, gradients included
    assert found["sampling_distribution"].points == found["sampling_distribution"].max_points
    assert found["generate"].points == found["generate"].max_points
    assert "the course's top_k_filter in" in found["generate"].message


def test_a_warning_and_a_print_on_stderr_cost_nothing(grader):
    noise = "import sys, warnings\nwarnings.warn('only a warning')\nprint('loud', file=sys.stderr)\n"
    assert grade(grader, FIRST, **{FIRST: noise + RIGHT[FIRST]})[FIRST].passed


@pytest.mark.parametrize("value", ["-1", "float('nan')", "False", "1000", "None", "'52'"])
def test_a_printed_or_returned_score_earns_nothing(grader, value):
    found = grade(
        grader, FIRST, **{FIRST: f"print({value})\ndef {FIRST}(*args, **kwargs):\n    return {value}"}
    )[FIRST]
    assert found.points == 0


def test_hidden_values_are_not_told(grader):
    spy = f"def {FIRST}(*args, **kwargs):\n    raise ValueError(f'secret {{args}}')"
    found = grade(grader, FIRST, **{FIRST: spy})[FIRST]
    assert "secret" not in repr(found) and "tensor(" not in repr(found)


def test_an_endless_loop_ends_and_the_rest_is_graded(grader):
    last = list(RIGHT)[-1]
    loop = f"def {FIRST}(*args, **kwargs):\n    while True:\n        pass"
    found = grade(grader, FIRST, last, **{FIRST: loop})
    assert "time is up" in found[FIRST].message
    assert found[last].passed


def test_a_cell_that_ends_the_process_is_left_out(grader):
    last = list(RIGHT)[-1]
    found = grade(grader, FIRST, last, **{FIRST: "import os\nos._exit(0)"})
    assert found[FIRST].points == 0 and found[FIRST].message
    assert found[last].passed


def test_grading_twice_gives_the_same_report(grader):
    first, second = (grader.grade(Submission(RIGHT), "ada").to_json() for _ in range(2))
    first.pop("elapsed_s"), second.pop("elapsed_s")
    assert first == second


def test_another_seed_asks_other_questions(grader):
    table = f"seen = []\ndef {FIRST}(*args, **kwargs):\n    return args[0] * 0 + 1 / args[0].shape[-1]"
    with Grader(catalog.chapter(STEM), Options(seed=7)) as other:
        assert grade(other, FIRST, **{FIRST: table})[FIRST].points == 0
        assert grade(other, FIRST)[FIRST].passed


# the wall


@pytest.mark.parametrize(
    "attempt",
    [
        "import socket; socket.create_connection(('127.0.0.1', 9), 1)",
        "import subprocess; subprocess.run(['/usr/bin/env'])",
        "import os; os.fork()",
        "import os; os.execv('/usr/bin/env', ['env'])",
        "open('/usr/probe', 'w')",
        "open('/grader/probe', 'w')",
        "import course_llm.decoding",
        "import autograder.checks.decoding",
        "import nbgrader",
        "open('/etc/passwd')",
        "import os; os.kill(1, 9) or 1 / 0",
        "import ctypes; 1 / (1 + ctypes.CDLL(None).ptrace(16, 2, 0, 0))",
        "import ctypes; 1 / (1 + ctypes.CDLL(None).unshare(0x10000000))",
        "import ctypes; 1 / (1 + ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None))",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (10, 10))",
        "bytearray(1 << 30)",
        "[open(f'/tmp/{i}', 'wb').write(bytes(1 << 20)) for i in range(8)]",
        "import os; os.listdir('/proc')[0]",
        "import os; os.setuid(0) or 1 / 0",
        "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
    ],
)
def test_the_sandbox_refuses(worker, attempt):
    result = outcome(worker, f"def f():\n    {attempt}")
    assert result.error is not None, f"allowed: {attempt}"


def test_the_worker_sees_no_path_of_the_project_or_home(worker):
    source = """
    def f():
        import os
        seen = [os.path.join(d, n) for d in ("/", "/site") for n in os.listdir(d)]
        return [sorted(seen), sorted(os.environ), os.getcwd()]
    """
    found = outcome(worker, source)
    assert found.error is None, found.error
    seen, environment, cwd = found.value
    assert cwd == "/tmp"
    assert (
        outcome(
            worker, "def f():\n    import os\n    return [f for _, d, n in os.walk('/grader') for f in d + n]"
        ).value
        == []
    )  # gone once it is imported
    assert "/site/torch" in seen
    assert not {"USER", "SSH_AUTH_SOCK", "JUPYTERHUB_API_TOKEN"} & set(environment)
    assert not any(name.endswith(("nbgrader", "transformers")) for name in seen)


def test_only_the_channel_is_inherited(worker):
    source = """
    def f():
        import os
        found = []
        for fd in range(256):
            try:
                os.fstat(fd)
                found.append(fd)
            except OSError:
                pass
        return found
    """
    assert outcome(worker, source).value == [0, 1, 2, 3]


def test_nothing_is_left_for_the_next_worker(bare):
    first = bare.start_worker()
    first.allow(3)
    outcome(
        first,
        "def f():\n    open('/tmp/note', 'w').write('hello')\n    import torch\n    torch.marked = True\n    return 1",
    )
    first.close()
    second = bare.start_worker()
    second.allow(3)
    found = outcome(
        second, "def f():\n    import os, torch\n    return [os.listdir('/tmp'), hasattr(torch, 'marked')]"
    )
    assert found.value == [[], False]
    second.close()


def test_threads_end_with_the_worker(bare):
    worker = bare.start_worker()
    worker.allow(3)
    source = """
    def f():
        import threading, time
        for _ in range(8):
            threading.Thread(target=time.sleep, args=(1000,), daemon=False).start()
        return 1
    """
    assert outcome(worker, source).value == 1
    started = time.monotonic()
    worker.close()
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        ("while True: pass", "time is up"),
        ("import os; os._exit(3)", "ended by itself"),
        ("import os, signal; os.abort()", "ended|crashed|stopped"),
        ("import ctypes; ctypes.string_at(0)", "crashed"),
        ("import os; os.killpg(0, 9); os._exit(1)", "ended by itself|stopped"),
        (
            "import os\n    for fd in range(3, 20):\n        try: os.write(fd, b'x' * 100000)\n        except OSError: pass",
            "malformed",
        ),
        (
            "import os, struct\n    os.write(3, struct.pack('<4sIQ', b'cllm', 10, 1 << 60) + b'0' * 10)",
            "malformed",
        ),
        (
            "import os, struct\n    t = b'[' * 100000\n    os.write(3, struct.pack('<4sIQ', b'cllm', len(t), 0) + t)",
            "malformed",
        ),
        (
            'import os, struct\n    t = b\'{"value": {"t": "tensor", "v": 7}}\'\n    os.write(3, struct.pack(\'<4sIQ\', b\'cllm\', len(t), 0) + t)',
            "malformed",
        ),
    ],
)
def test_a_lost_worker_says_why(bare, attempt, words):
    import re

    worker = bare.start_worker()
    worker.allow(2)
    with pytest.raises(BackendLost) as lost:
        outcome(worker, f"def f():\n    {attempt}\n    return 1")
        outcome(worker, "def f():\n    return 1")
    assert re.search(words, str(lost.value)), str(lost.value)
    after = bare.start_worker()
    after.allow(3)
    assert outcome(after, "def f():\n    return 1").value == 1
    after.close()


def test_values_cross_the_wall_as_they_are(worker):
    value = (
        torch.arange(6).reshape(2, 3).T,
        torch.tensor([float("nan"), float("-inf")], dtype=torch.bfloat16),
        torch.zeros(0, 3),
        {"a": [1, -2.5, True, None, b"bytes", "text"], 3: (float("inf"),)},
        torch.float16,
        2**200,
    )
    returned = outcome(worker, "def f(x):\n    return x", value).value
    assert repr(returned) == repr(value)
    strides = outcome(worker, "def f(x):\n    return list(x[0].stride())", value).value
    assert strides == list(value[0].stride())


def test_the_report_of_a_worker_counts_its_memory(bare):
    worker = bare.start_worker()
    worker.allow(3)
    outcome(worker, "def f():\n    return len(bytes(100 << 20))")
    assert worker.close()["maxrss_kb"] > 200 << 10


def test_no_temporary_folder_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Sandbox(Chapter("none", "none", SETUP, "", (), {}, ())) as sandbox:
        sandbox.start_worker().close()
        assert os.listdir(tmp_path) == []


def test_the_graders_own_work_is_not_on_the_clock_of_the_answer():
    def work(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    with guard.bounded_time(0.3):
        with guard.off_the_clock():
            work(0.6)
        work(0.1)  # the clock stood still
        with pytest.raises(BackendLost):
            work(5)


def test_a_near_miss_is_run_only_where_it_may_decide(monkeypatch):
    """Whoever gives one wrong answer does not wait for all near-misses in all cases."""
    exercise = judge.exercises("decoding")["top_p_filter"]
    asked, run = [], judge.near_miss_run

    def noted(exercise, miss, seed, public, index):
        asked.append((miss.name, index))
        return run(exercise, miss, seed, public, index)

    monkeypatch.setattr(judge, "near_miss_run", noted)
    miss = exercise.near_misses[0]
    names = {**exercise.reference_names(), **miss.names}
    result = judge.run_exercise(exercise, Local(names), judge.GRADING_SEED, public=False)
    assert result.diagnosis is miss
    cases = len(judge.expected_cases(exercise, judge.GRADING_SEED, False))
    assert len(set(asked)) < len(exercise.near_misses) * cases / 2


# what keeps a cost from being counted

ELSEWHERE = """
import os
import pickle


def save_checkpoint(path, model, optimizer, step, generator):
    with open(path, "wb") as file:
        pickle.dump(step, file)
    os.replace(path, path)
"""
MEASURED = """
import torch.nn.functional as F


def total(microbatches):
    return sum(int((targets != -100).sum()) for _, targets in microbatches)


def accumulate_gradients(model, microbatches):
    count, value = total(microbatches), 0.0
    model.eval()
    model.zero_grad()
    for inputs, targets in microbatches:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / count
        loss.backward()
        value = value + loss.detach()
    return value
"""


@pytest.mark.parametrize("cells", [{"file": ELSEWHERE + MEASURED}, {"save_checkpoint": ELSEWHERE, "accumulate_gradients": MEASURED}])  # fmt: skip
def test_what_another_exercise_needs_keeps_no_cost_from_being_counted(cells):
    with Grader(catalog.chapter("pretraining")) as grader:
        report = grader.grade(Submission(cells), "one", only=("accumulate_gradients",))
        (found,) = report.exercises
        assert found.passed, found.message
        name = list(cells)[-1]
        reaching = {**cells, name: cells[name].replace("model.eval()", "__import__('gc').collect()")}
        (found,) = grader.grade(Submission(reaching), "two", only=("accumulate_gradients",)).exercises
        assert not found.passed and "cost cannot be counted" in found.message


def test_what_is_needed_keeps_its_lines():
    source = 'import os\n\n@cache\ndef f(x):\n    return g(x) + N\n\ntorch.manual_seed(1)\nN = os.getpid()\nM = {}\nM["a"] = f\ndef g(x):\n    return x\ndef h():\n    return open(3)\n'
    part = screen.needed({"cell": source}, ["f"])["cell"].split("\n")
    assert part == ["import os", "", "@cache", "def f(x):", "    return g(x) + N", "", "", "N = os.getpid()", "", "", "def g(x):", "    return x", "", ""]  # fmt: skip
    assert screen.needed({"cell": source}, ["absent"]) == {}


@pytest.mark.parametrize(
    ("loop", "countable"),
    [
        ('for name in ("w_uk", "w_uv"):\n        getattr(w, name)', True),
        ('[getattr(w, n) for n in ["w_uk"]]', True),
        ('for name in ("w_uk", "__globals__"):\n        getattr(w, name)', False),
        ('for name in ("w_uk",):\n        name += "x"\n        getattr(w, name)', False),
        ("for name in given:\n        getattr(w, name)", False),
        ("getattr(w, given)", False),
        ("w.f.__globals__", False),
        ("w.eval()", True),
        ("eval(w)", False),
    ],
)
def test_attributes_by_name_are_read_off_a_written_list_alone(loop, countable):
    why = screen.not_countable({"cell": f"def f(w, given):\n    {loop}\n"}, ["f"])
    assert (why is None) == countable


@pytest.mark.parametrize(("got", "want", "same"), [(-90.0, -math.inf, False), (-math.inf, -math.inf, True), (1e300, math.inf, False), (math.inf, 1.0, False), (10**400, 1.0, False), (1.0, 1.0, True)])  # fmt: skip
def test_a_finite_number_is_no_infinity(got, want, same):
    assert (difference(got, want, BY_DTYPE) is None) == same
