"""The live figures of the pretraining chapter show the package's numbers, and fit a phone."""

import json
import math

import pytest
import torch

from autograder.checks.pretraining import objective
from course_llm import live, pretraining
from tests.book_site import browser  # noqa: F401
from tests.test_loss_live import mounted, number  # noqa: F401


def learned(page):
    return json.loads(page.get_by_test_id("learned").get_attribute("data-value"))


@pytest.mark.parametrize(
    ("typed", "counts"),
    [
        (None, {"low": 5, "lower": 2, "newest": 6, "widest": 3}),
        ("aaaa 3, ba, ab", {"aaaa": 3, "ba": 1, "ab": 1}),
        ("Sjögren 2, jö 4, aaa", {"Sjögren": 2, "jö": 4, "aaa": 1}),
    ],
)
def test_bpe_merges_are_the_packages(mounted, typed, counts):  # noqa: F811
    page = mounted("bpe_merges")
    if typed:
        page.get_by_test_id("words").fill(typed)
    for step in range(8):
        page.get_by_test_id("merges").fill(str(step))
        merges = pretraining.train_bpe(counts, step)
        assert learned(page) == [[token.decode(errors="replace") for token in pair] for pair in merges]
        for i, word in enumerate(counts):
            cell = page.get_by_test_id(f"tokens-{i}")
            tokens = [token.decode(errors="replace") for token in pretraining.bpe_encode(word, merges)]
            assert json.loads(cell.get_attribute("data-value")) == tokens


def test_bpe_merges_go_on_and_back_and_end(mounted):  # noqa: F811
    page = mounted("bpe_merges")
    page.get_by_test_id("words").fill("ab 2")
    page.get_by_test_id("merges").fill("0")
    assert "a + b (2)" in page.get_by_test_id("next").inner_text()
    page.get_by_test_id("on").click()
    assert learned(page) == [["a", "b"]]
    assert "No pair is left" in page.get_by_test_id("next").inner_text()
    page.get_by_test_id("back").click()
    assert learned(page) == []


@pytest.mark.parametrize("key", ["printed", "source", "refit", "sweep"])
@pytest.mark.parametrize("log_flops", [11.5, 23.76])
def test_scaling_explorer_spends_a_budget_as_the_package_does(mounted, key, log_flops):  # noqa: F811
    page = mounted("scaling_explorer")
    page.get_by_test_id("law").select_option(key)
    page.get_by_test_id("log_flops").fill(str(log_flops))
    page.get_by_test_id("log_parameters").fill("9.5")
    law = live.defaults("scaling_explorer")["laws"][key]
    A, B, alpha, beta = (law[name] for name in ("A", "B", "alpha", "beta"))
    best = pretraining.compute_optimal(10**log_flops, A, B, alpha, beta)
    for who, (n, d) in (("best", best), ("own", (10**9.5, 10 ** (log_flops - 9.5) / 6))):
        assert number(page, f"{who}-parameters") == pytest.approx(n, rel=1e-9)
        assert number(page, f"{who}-tokens") == pytest.approx(d, rel=1e-9)
        assert number(page, f"{who}-ratio") == pytest.approx(d / n, rel=1e-9)
        assert number(page, f"{who}-loss") == pytest.approx(law["E"] + A / n**alpha + B / d**beta, rel=1e-9)


def test_scaling_fit_shows_what_the_fit_makes_small(mounted):  # noqa: F811
    page = mounted("scaling_fit")
    state = live.defaults("scaling_fit")
    runs = torch.tensor(state["runs"], dtype=torch.float64).T
    law = [0.9, 10**1.5, 10**2.5, 0.3, 0.45]
    for name, value in zip(("E", "log_A", "log_B", "alpha", "beta"), (0.9, 1.5, 2.5, 0.3, 0.45), strict=True):
        page.get_by_test_id(name).fill(str(value))
    assert number(page, "objective") == pytest.approx(objective(law, *runs), rel=1e-9)
    assert float(page.get_by_test_id("share").inner_text()) == pytest.approx(0.45 / 0.75, abs=1e-3)
    page.get_by_test_id("take-fit").click()
    least = objective(pretraining.fit_chinchilla(*runs), *runs)
    assert number(page, "objective") == pytest.approx(least, rel=1e-3)
    page.get_by_test_id("reset").click()
    assert math.isclose(float(page.get_by_test_id("E").input_value()), state["E"])


@pytest.mark.parametrize("name", ["bpe_merges", "scaling_explorer", "scaling_fit"])
def test_figure_fits_a_phone(mounted, name):  # noqa: F811
    page = mounted(name)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for control in page.locator("input, select").all():
        assert control.evaluate("c => c.labels.length") == 1
