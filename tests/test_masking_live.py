"""The live figures of the masking chapter show the package's masks and weights, and fit a phone."""

import math

import pytest
import torch

from course_llm import live, masking
from tests.book_site import browser  # noqa: F401
from tests.test_loss_live import mounted, number  # noqa: F401

TOKENS = 7


def padded(left):
    real = torch.zeros(1, TOKENS, dtype=torch.bool)
    real[:, -4 if left else 0 : None if left else 4] = True
    return masking.causal_padding_mask(real)[0, 0]


MASKS = {
    "none": torch.ones(TOKENS, TOKENS, dtype=torch.bool),
    "causal": masking.causal_mask(TOKENS) == 0,
    "past": masking.causal_mask_with_past(2, TOKENS),
    "window": masking.sliding_window_mask(TOKENS, 3),
    "prefix": masking.prefix_lm_mask(TOKENS, 4),
    "documents": masking.document_mask(torch.tensor([0, 0, 0, 0, 1, 1, 1])),
    "right": padded(left=False),
    "left": padded(left=True),
}


@pytest.mark.parametrize("kind", MASKS)
def test_mask_builder_shows_the_packages_mask_and_weights(mounted, kind):  # noqa: F811
    page = mounted("mask_builder")
    page.get_by_test_id("kind").select_option(kind)
    allowed = MASKS[kind]
    scores = torch.tensor(live.defaults("mask_builder")["scores"])[-len(allowed) :]
    weights = masking.masked_softmax(scores, torch.zeros(allowed.shape).masked_fill(~allowed, -math.inf))
    hidden = TOKENS - len(allowed)  # rows of old tokens, which ask nothing
    for i in range(TOKENS):
        for j in range(TOKENS):
            cell = page.get_by_test_id(f"cell-{i}-{j}")
            assert cell.is_visible() == (i >= hidden)
            if i >= hidden:
                assert (cell.get_attribute("data-allowed") == "true") == bool(allowed[i - hidden, j])
                assert float(cell.get_attribute("data-value")) == pytest.approx(
                    float(weights[i - hidden, j]), abs=1e-6
                )
    said = page.get_by_test_id("said").inner_text()
    assert f"{int(allowed.sum())} of {allowed.numel()} pairs are open." in said


def test_mask_builder_has_one_row_for_each_new_token(mounted):  # noqa: F811
    page = mounted("mask_builder")
    page.get_by_test_id("kind").select_option("past")
    for queries in (1, 3, TOKENS):
        page.get_by_test_id("queries").fill(str(queries))
        assert page.locator("tbody tr:visible").count() == queries
    page.get_by_test_id("kind").select_option("causal")
    assert page.locator("tbody tr:visible").count() == TOKENS


def test_masked_weights_are_the_packages(mounted):  # noqa: F811
    page = mounted("masked_weights")
    page.get_by_test_id("step").fill("3")
    scores = torch.tensor(live.defaults("masked_weights")["scores"])
    weights = masking.masked_softmax(scores, masking.causal_mask(4))
    for i in range(4):
        for j in range(4):
            assert number(page, f"cell-{i}-{j}") == pytest.approx(float(weights[i, j]), abs=1e-6)


@pytest.mark.parametrize(("width", "rows"), [(390, 2), (800, 1)])
def test_the_four_scores_stand_in_one_row_or_two(mounted, width, rows):  # noqa: F811
    page = mounted("masked_weights")
    page.set_viewport_size({"width": width, "height": 800})
    tops = {round(page.get_by_test_id(f"score-{j}").bounding_box()["y"]) for j in range(4)}
    assert len(tops) == rows
    page.set_viewport_size({"width": 390, "height": 800})
