"""`check("…")` in a notebook: where an error is, the case that fails, and a hint that fits."""

import contextlib
import io

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from autograder import catalog, check, judge
from autograder.check import CheckFailed, Report, check_names
from autograder.reproduce import in_contrast
from autograder.spec import Local

STEM = "decoding"
CHAPTER = catalog.chapter(STEM)
NAME = "softmax_with_temperature"
HINTS = CHAPTER.entry(NAME).hints
HEAD = f"def {NAME}(logits, temperature):\n"


@pytest.fixture
def shell(monkeypatch):
    """A notebook's kernel in which the set-up cell has run, and no hint has been shown."""
    monkeypatch.setattr(check, "_hinted", {})
    shell = InteractiveShell()
    shell.run_cell(CHAPTER.setup)
    return shell


def checked(shell: InteractiveShell, source: str, name: str = NAME) -> Report:
    """Runs a cell and checks what it defines."""
    shell.run_cell(source)
    return check_names(CHAPTER, name, shell.user_ns)


def told(shell: InteractiveShell, source: str) -> str:
    """What a student reads below the cell with the check."""
    shell.run_cell(source)
    out = io.StringIO()
    shell.user_ns["check"] = check.check
    with contextlib.redirect_stdout(out), pytest.raises(CheckFailed):
        exec(f"check({NAME!r})", shell.user_ns)
    return " ".join(out.getvalue().split())


def test_an_error_has_its_line_in_the_cell_and_its_words(shell):
    report = checked(
        shell, f"{HEAD}\n    first = logits[..., 0]\n    return torch.stack([first, first[9]])\n"
    )
    complaint = report.result.complaint
    assert complaint.startswith("an IndexError is raised in line 4 of your cell (")
    assert complaint.removeprefix("an ") in report.rows()[0][2]
    assert "index" in complaint.split("(", 1)[1]
    assert "line 4 of your cell" in report._repr_html_()


def test_an_error_in_another_cell_is_placed_where_the_answer_calls_it(shell):
    shell.run_cell("def helper(x):\n    # a comment\n    # and one more\n    return x[99]\n")
    complaint = checked(shell, f"{HEAD}    return helper(logits)\n").result.complaint
    assert "in line 2 of your cell" in complaint


def test_a_refusal_of_the_wrong_kind_says_what_it_was(shell):
    source = f"{HEAD}    assert temperature >= 0, 'too cold'\n    return (logits / temperature).softmax(-1)\n"
    errors = checked(shell, source).rows()[-1][2]
    assert (
        "an AssertionError is raised in line 2 of your cell (too cold), it should be a ValueError" in errors
    )


def test_graded_errors_keep_their_words_to_themselves(shell):
    """The same run as a check, without what `check_names` adds for the student herself."""
    shell.run_cell(f"{HEAD}    raise IndexError(f'secret {{logits}}')\n")
    exercise = judge.exercises(STEM)[NAME]
    result = judge.run_exercise(exercise, Local(shell.user_ns), judge.GRADING_SEED, public=False)
    assert {g.first_complaint[1] for g in result.groups[:-1]} == {"an IndexError is raised"}


def test_the_first_case_that_fails_can_be_seen(shell):
    report = checked(shell, f"{HEAD}    return logits.softmax(-1) / temperature\n")
    assert report.case == [
        ("call", f"{NAME}(logits=float32 (4,), temperature=0.5)"),
        ("logits", "float32 (4,): [1, 0, -0.9, -2.1]"),
        ("expected", "float32 (4,): [0.8623, 0.1167, 0.01929, 0.00175]"),
        ("yours", "float32 (4,): [1.28, 0.4709, 0.1914, 0.05766]"),
    ]
    assert "The first case that fails:" in repr(report) and "expected" in repr(report)
    html = report._repr_html_()
    assert "<caption" in html and "<th scope='row'" in html and "<th scope='col'" in html


def test_what_a_result_calls_itself_is_escaped(shell):
    evil = "type('<b>x</b>', (), {})()"
    report = checked(shell, f"{HEAD}    return {evil}\n")
    assert "<b>" not in report._repr_html_() and "&lt;b&gt;" in report._repr_html_()


def test_a_blank_and_a_right_answer_show_no_case(shell):
    right = f"{HEAD}    if temperature < 0:\n        raise ValueError('negative')\n    if temperature == 0:\n" \
        "        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)\n    return (logits / temperature).softmax(-1)\n"  # fmt: skip
    assert checked(shell, right).result.passed and checked(shell, right).case == []
    blank = checked(shell, f"{HEAD}    raise NotImplementedError\n")
    assert not blank.result.attempted and blank.case == []


@pytest.mark.parametrize("stem", [STEM, "kv_cache"])
def test_every_near_miss_can_be_shown(stem):
    for exercise in judge.exercises(stem).values():
        for miss in exercise.near_misses:
            result = judge.near_miss_result(exercise, miss, judge.PUBLIC_SEED, public=True)
            lines = check.first_case(result)
            assert all(label and text and "object at" not in text for label, text in lines), lines
            assert lines == [] or lines[0][0] == "call"


def test_large_tensors_show_the_entry_where_they_differ_most():
    want = torch.zeros(5, 5)
    got = want.clone()
    got[3, 1], got[2, 2] = 1e-7, 1e-9
    assert in_contrast(got, want) == ("float32 (5, 5), 1e-07 at [3, 1]", "float32 (5, 5), 0 at [3, 1]")
    got[0, 4] = torch.nan
    assert in_contrast(got, want)[0] == "float32 (5, 5), nan at [0, 4]"


def test_values_have_as_many_digits_as_it_takes_to_tell_them_apart():
    mine, right = in_contrast(torch.tensor([1 / 3 + 1e-6]).double(), torch.tensor([1 / 3]).double())
    assert mine != right


def test_a_known_mistake_gets_no_hint(shell):
    source = f"{HEAD}    if temperature == 0:\n        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)\n" \
        "    e = (logits / temperature).exp()\n    return e / e.sum(-1, keepdim=True)\n"  # fmt: skip
    for _ in range(2):
        words = told(shell, source)
        assert "The exponential overflows" in words and "Hint" not in words
    assert check._hinted == {}


def test_hints_escalate_and_leave_out_those_for_groups_that_pass(shell):
    scaled = f"{HEAD}    return logits.softmax(-1) * (0.9 + temperature)\n"
    for hint in (HINTS[0], HINTS[1], HINTS[2], HINTS[2]):
        assert f"Hint: {hint.split('`')[0].strip()}" in told(shell, scaled)
    check._hinted.clear()
    only_zero = f"{HEAD}    if temperature < 0:\n        raise ValueError('negative')\n    if temperature == 0:\n        return logits * 0\n" \
        "    return (logits / temperature).softmax(-1)\n"  # fmt: skip
    words = told(shell, only_zero)
    assert "Hint: For temperature 0" in words and "Divide the logits" not in words


def test_nothing_is_hinted_where_every_hint_is_about_what_passes(shell):
    no_refusal = f"{HEAD}    if temperature <= 0:\n        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)\n" \
        "    return (logits / temperature).softmax(-1)\n"  # fmt: skip
    words = told(shell, no_refusal)
    assert "nothing is raised" in words and "Hint" not in words


def test_every_case_of_the_decoding_chapter_has_words():
    for exercise in judge.exercises(STEM).values():
        for group in exercise.groups:
            assert all(case.words for case in exercise.cases(group, judge.PUBLIC_SEED)), (
                exercise.name,
                group.name,
            )


class Shy:
    """An object that may not be looked at."""

    def __repr__(self):
        raise RuntimeError("no")

    def __eq__(self, other):
        raise RuntimeError("no")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, 2).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.ones(2, dtype=torch.complex64),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.ones(0, 3),
        lambda: [Shy(), {}, 10**400],
        lambda: iter([1.0]),
        lambda: {"value": float("nan")},
        Shy,
    ],
)
@pytest.mark.parametrize(
    ("stem", "name"), [("masking", "causal_mask"), ("loss", "log_softmax"), ("decoding", "greedy_decode")]
)
def test_a_result_of_a_strange_make_is_a_wrong_one_and_no_error(stem, name, make):
    made = make()
    namespace = {"__name__": "__main__", name: lambda *args, **kwargs: made}
    report = check_names(catalog.chapter(stem), name, namespace, sources={})
    assert not report.result.passed and report.result.message
    assert name in repr(report) and "<table>" in report._repr_html_()
