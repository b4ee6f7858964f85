"""Live figures: the same module is a widget in a notebook and alive on a page, and its numbers are the package's."""

import math
import re

import anywidget
import pytest
import torch

from course_llm import decoding, live
from tests.book_site import browser, chapter_pages, site  # noqa: F401

# ---- in a notebook ----


@pytest.mark.parametrize("name", live.names())
def test_module_keeps_to_the_contract(name):
    source = live.source(name)
    assert source.count("\nexport default ") == 1
    assert not re.search(r"^\s*import\b|\bimport\(|https?://(?!www\.w3\.org)", source, re.MULTILINE)
    assert live.defaults(name)


@pytest.mark.parametrize("name", live.names())
def test_figure_is_a_widget_with_the_modules_source_and_defaults(name):
    widget = live.figure(name)
    assert isinstance(widget, anywidget.AnyWidget)
    assert widget._esm == live.source(name)
    assert widget._css == live.style_sheet()
    for key, value in live.defaults(name).items():
        assert getattr(widget, key) == value
        assert widget.trait_metadata(key, "sync")


def test_state_is_set_and_sent():
    widget = live.figure("sampling", temperature=0.5, top_k=2)
    assert (widget.temperature, widget.top_k, widget.top_p) == (0.5, 2, 1.0)
    widget.top_p = 0.7
    assert widget.get_state()["top_p"] == 0.7
    assert live.figure("sampling").temperature == 1.0  # another figure has its own state


def test_unknown_figure_and_unknown_state_are_named():
    with pytest.raises(
        ValueError, match=r"figure needs the name of a live figure \(.*sampling.*\), got 'sampler'"
    ):
        live.figure("sampler")
    with pytest.raises(ValueError, match=r"figure 'sampling' needs state among prompt, .*, got 'temprature'"):
        live.figure("sampling", temprature=2)


def test_module_without_defaults_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "_FOLDER", tmp_path)
    (tmp_path / "bare.js").write_text("export default { render() {} };\n")
    with pytest.raises(ValueError, match="const DEFAULTS"):
        live.defaults("bare")
    (tmp_path / "bare.js").write_text("const DEFAULTS = {a: 1};\nexport default { render() {} };\n")
    with pytest.raises(ValueError, match="in JSON"):
        live.defaults("bare")


# ---- on a page ----


@pytest.fixture(scope="module")
def chapter(site, browser):  # noqa: F811
    """The decoding page; a test that changes a figure reloads it first."""
    context = browser.new_context(viewport={"width": 390, "height": 800})
    page = context.new_page()
    page.faults = []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.uri = (site / "book" / "decoding.html").as_uri()
    yield page
    assert page.faults == []
    context.close()


def opened(page, name):
    page.goto(page.uri)
    return page.locator(f"[data-live={name}]")


def numbers(figure, prefix, count):
    """The full numbers behind what is shown; what is shown must be them, rounded."""
    values = []
    for i in range(count):
        output = figure.get_by_test_id(f"{prefix}-{i}")
        values.append(float(output.get_attribute("data-value")))
        assert output.inner_text() == f"{values[-1]:.3f}"
    return torch.tensor(values, dtype=torch.float64)


def test_every_figure_of_every_page_comes_to_life_with_named_controls(site, browser):  # noqa: F811
    context = browser.new_context()
    page = context.new_page()
    for name in chapter_pages(site):
        page.goto((site / name).as_uri())
        figures = page.locator("[data-live]")
        for i in range(figures.count()):
            controls = figures.nth(i).locator("input, select, button, textarea")
            assert controls.count() > 0, (name, figures.nth(i).get_attribute("data-live"))
            for j in range(controls.count()):
                words = controls.nth(j).evaluate(
                    "(node) => node.getAttribute('aria-label') || [...node.labels].map((l) => l.textContent).join('')"
                    " || (node.tagName === 'BUTTON' ? node.textContent : '')"
                )
                assert words.strip(), (name, controls.nth(j).evaluate("(node) => node.outerHTML"))
    context.close()


SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"temperature": 0.0},
    {"temperature": 0.5, "top_k": 2},
    {"top_k": 3, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.6},
    {"temperature": 1.0, "top_p": 0.05},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_sampling_shows_the_packages_distribution(chapter, settings):
    figure = opened(chapter, "sampling")
    for key, value in settings.items():
        figure.get_by_test_id(key).fill(str(value))
        assert float(figure.get_by_test_id(f"{key}-value").inner_text()) == value
    logits = torch.tensor(live.defaults("sampling")["logits"], dtype=torch.float64)
    before = decoding.softmax_with_temperature(logits, settings.get("temperature", 1.0))
    after = decoding.sampling_distribution(logits, **settings)
    torch.testing.assert_close(numbers(figure, "before", 4), before)
    torch.testing.assert_close(numbers(figure, "after", 4), after)


def test_sampling_gives_the_worked_examples_numbers(chapter):
    figure = opened(chapter, "sampling")
    for t, first in [(0.5, "0.862"), (1.0, "0.640"), (2.0, "0.453")]:
        figure.get_by_test_id("temperature").fill(str(t))
        assert figure.get_by_test_id("before-0").inner_text() == first
    figure.get_by_test_id("temperature").fill("0.5")
    figure.get_by_test_id("top_k").fill("2")
    shown = [figure.get_by_test_id(f"after-{i}").inner_text() for i in range(4)]
    assert shown == ["0.881", "0.119", "0.000", "0.000"]


def test_sampling_takes_edited_logits(chapter):
    figure = opened(chapter, "sampling")
    figure.get_by_test_id("logit-3").fill("4.5")
    figure.get_by_test_id("top_k").fill("2")
    expected = decoding.sampling_distribution(
        torch.tensor([3.1, 2.1, 1.2, 4.5], dtype=torch.float64), top_k=2
    )
    torch.testing.assert_close(numbers(figure, "after", 4), expected)
    figure.get_by_test_id("logit-3").fill("")  # half-way through typing: nothing changes
    torch.testing.assert_close(numbers(figure, "after", 4), expected)


def test_sampling_draws_can_be_repeated_and_follow_the_distribution(chapter):
    def draw():
        figure = opened(chapter, "sampling")
        figure.get_by_test_id("top_k").fill("3")
        for _ in range(10):
            figure.get_by_test_id("draw-100").click()
        return figure, [int(figure.get_by_test_id(f"count-{i}").inner_text()) for i in range(4)]

    figure, counts = draw()
    assert sum(counts) == 1000
    assert counts[3] == 0
    for count, share in zip(counts, numbers(figure, "after", 4).tolist(), strict=True):
        assert abs(count - 1000 * share) <= 4 * math.sqrt(
            1000 * share * (1 - share)
        )  # four standard deviations
    assert draw()[1] == counts
    figure.get_by_test_id("draw").click()
    assert figure.get_by_test_id("said").inner_text().removeprefix("The cat sat on the ") in (
        "mat",
        "floor",
        "couch",
    )
    figure.get_by_test_id("reset").click()
    assert figure.get_by_test_id("count-0").inner_text() == "0"


def table_model():
    table = torch.tensor(live.defaults("generation")["logits"], dtype=torch.float64)
    return table, lambda ids: table[ids[:, -1]]


def shown_ids(figure):
    return [int(i) for i in figure.get_by_test_id("text").get_attribute("data-ids").split()]


def test_generation_is_greedy_decoding(chapter):
    figure = opened(chapter, "generation")
    table, next_logits = table_model()
    figure.get_by_test_id("temperature").fill("0.5")
    probs = decoding.softmax_with_temperature(table[1], 0.5)
    torch.testing.assert_close(numbers(figure, "prob", 10), probs)
    figure.get_by_test_id("next").click()
    assert (
        shown_ids(figure) == decoding.greedy_decode(next_logits, torch.tensor([[1]]), 1, eos_id=0)[0].tolist()
    )
    figure.get_by_test_id("run").click()
    ids = decoding.greedy_decode(next_logits, torch.tensor([[1]]), 12, eos_id=0)[0]
    assert shown_ids(figure) == ids.tolist()
    assert "history of a history of a history" in " ".join(figure.get_by_test_id("text").inner_text().split())
    assert decoding.distinct_n(ids, 2) < 0.6
    assert "maximum length" in figure.get_by_test_id("said").inner_text()
    assert figure.get_by_test_id("next").is_disabled()
    figure.get_by_test_id("reset").click()
    assert shown_ids(figure) == [1]


def test_generation_samples_by_the_inverse_of_the_cumulative_sum(chapter):
    figure = opened(chapter, "generation")
    table, _ = table_model()
    figure.get_by_test_id("method").select_option("sample")
    figure.get_by_test_id("temperature").fill("1.5")
    texts = set()
    for _ in range(4):
        figure.get_by_test_id("reseed").click()
        while figure.get_by_test_id("next").is_enabled():
            probs = decoding.softmax_with_temperature(table[shown_ids(figure)[-1]], 1.5)
            figure.get_by_test_id("next").click()
            u = float(figure.get_by_test_id("said").get_attribute("data-u"))
            expected = decoding.sample_from_uniform(probs[None], torch.tensor([u], dtype=torch.float64))
            assert shown_ids(figure)[-1] == expected.item()
        texts.add(tuple(shown_ids(figure)))
        assert shown_ids(figure)[-1] == 0 or len(shown_ids(figure)) == 13
    assert len(texts) >= 2


def tree_model(first):
    """The figure's tree as `next_logits`: the vocabulary is all its words."""
    tree = live.defaults("beam")["tree"]
    vocabulary = []

    def collect(branches):
        for word, (_, below) in branches.items():
            vocabulary.append(word)
            collect(below)

    collect(tree)

    def next_logits(ids):
        logits = torch.full((len(ids), len(vocabulary)), -torch.inf, dtype=torch.float64)
        for row, text in zip(logits, ids[:, 1:].tolist(), strict=True):
            branches = tree
            for i in text:
                branches = branches[vocabulary[i]][1]
            for place, (word, (prob, _)) in enumerate(branches.items()):
                p = prob if text else (first if place == 0 else 1 - first)
                row[vocabulary.index(word)] = math.log(p)
        return logits

    return vocabulary, next_logits


@pytest.mark.parametrize("first", [0.55, 0.3, 0.9])
@pytest.mark.parametrize("beams", [1, 2, 3, 4])
def test_beam_keeps_the_packages_hypotheses(chapter, beams, first):
    figure = opened(chapter, "beam")
    figure.get_by_test_id("beams").fill(str(beams))
    figure.get_by_test_id("first").fill(str(first))
    vocabulary, next_logits = tree_model(first)
    for steps in (1, 2, 3):
        figure.get_by_test_id("step").fill(str(steps))
        expected = decoding.beam_search(next_logits, torch.tensor([[0]]), beams, steps)
        kept = figure.get_by_test_id("kept").locator("li")
        assert kept.count() == len(expected)
        for i, (ids, score) in enumerate(expected):
            assert kept.nth(i).get_attribute("data-path") == " ".join(vocabulary[j] for j in ids.tolist())
            assert float(kept.nth(i).get_attribute("data-score")) == pytest.approx(score, abs=1e-9)
            assert f"log p = {score:.3f}".replace("-", "−") in kept.nth(i).inner_text()


def test_beam_says_what_greedy_search_misses(chapter):
    figure = opened(chapter, "beam")
    assert "“shows no tumour” (0.172)" in figure.get_by_test_id("verdict").inner_text()
    assert "“was normal again” (0.324)" in figure.get_by_test_id("verdict").inner_text()
    assert "has found it" in figure.get_by_test_id("verdict").inner_text()
    figure.get_by_test_id("beams").fill("1")
    assert "has missed it" in figure.get_by_test_id("verdict").inner_text()
    assert figure.locator(".node.kept").count() == 3


def test_sliders_move_with_the_keyboard(chapter):
    figure = opened(chapter, "sampling")
    figure.get_by_test_id("top_k").focus()
    chapter.keyboard.press("ArrowLeft")
    assert figure.get_by_test_id("top_k-value").inner_text() == "3"
    assert figure.get_by_test_id("after-3").inner_text() == "0.000"
