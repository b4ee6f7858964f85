"""The live figures of the loss chapter show the package's numbers, and work with the keyboard and on a phone."""

import math

import pytest
import torch

from course_llm import live, loss
from tests.book_site import browser  # noqa: F401

MOUNT = """
<!doctype html><meta charset="utf-8"><style>%s</style><div id="figure"></div><script type="module">%s
const heard = {}, state = {};
figure.render({el: document.getElementById("figure"), model: {
  get: (key) => state[key],
  set: (key, value) => { state[key] = value; (heard[`change:${key}`] ?? []).forEach((f) => f()); },
  on: (name, f) => (heard[name] ??= []).push(f),
  save_changes: () => {},
}});
</script>
"""


@pytest.fixture
def mounted(browser):  # noqa: F811
    """A function that puts a figure alone on a page as wide as a phone."""
    context = browser.new_context(viewport={"width": 390, "height": 800})
    page = context.new_page()
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))

    def mount(name):
        source = live.source(name).replace("export default", "const figure =")
        page.set_content(MOUNT % (live.style_sheet(), source))
        page.locator(".controls").first.wait_for()
        return page

    yield mount
    assert faults == []
    context.close()


def number(page, name, key="value"):
    return float(page.get_by_test_id(name).get_attribute(f"data-{key}"))


@pytest.mark.parametrize("p", [0.001, 0.01, 0.25, 0.55, 1.0])
def test_loss_curve_is_the_packages_loss(mounted, p):
    page = mounted("loss_curve")
    page.get_by_test_id("probability").fill(str(p))
    logits = torch.tensor([[p, 1 - p]], dtype=torch.float64).log().clamp(min=-1e9)
    target = torch.tensor([0])
    want = loss.cross_entropy(logits, target).item()
    assert number(page, "nats") == pytest.approx(want, abs=1e-9)
    assert number(page, "bits") == pytest.approx(want / math.log(2), abs=1e-9)
    assert number(page, "choices") == pytest.approx(math.exp(want), rel=1e-9)
    assert number(page, "slope") == pytest.approx(
        loss.cross_entropy_gradient(logits, target)[0, 0].item(), abs=1e-9
    )


def test_loss_curve_gives_the_worked_examples_numbers(mounted):
    page = mounted("loss_curve")
    assert page.get_by_test_id("nats").inner_text() == "0.598"
    page.get_by_test_id("set-0.01").press("Enter")
    assert page.get_by_test_id("nats").inner_text() == "4.605"
    assert page.get_by_test_id("probability-value").inner_text() == "0.010"


@pytest.mark.parametrize("prompt_length", [1, 2, 4, 8, 10])
def test_teacher_forcing_is_the_packages(mounted, prompt_length):
    state = live.defaults("teacher_forcing")
    page = mounted("teacher_forcing")
    page.get_by_test_id("prompt_length").fill(str(prompt_length))
    table = torch.tensor(state["logits"], dtype=torch.float64)
    ids = torch.tensor([state["text"]])
    seen = ids[:, :-1]
    forced = loss.teacher_forced_predictions(lambda x: table[x], seen)
    free = loss.free_running_predictions(lambda x: table[x], seen, prompt_length)
    read = torch.cat([seen[:, :prompt_length], free[:, prompt_length - 1 : -1]], dim=1)
    for way, predictions, inputs in [("forced", forced, seen), ("free", free, read)]:
        shown = [number(page, f"{way}-{t}") for t in range(seen.shape[1])]
        assert shown == predictions[0].tolist()
        assert number(page, f"{way}-right") == (predictions == ids[:, 1:]).sum().item()
        want = loss.cross_entropy(table[inputs], ids[:, 1:]).item()
        assert number(page, f"{way}-loss") == pytest.approx(want, abs=1e-9)


def test_teacher_forcing_counts_what_is_shown_and_fits_a_phone(mounted):
    page = mounted("teacher_forcing")
    page.get_by_test_id("shown").focus()
    page.keyboard.press("Home")
    assert page.get_by_test_id("forced-right").inner_text() == "1 of 1"
    assert page.get_by_test_id("said").inner_text().startswith("No mistake so far")
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert page.get_by_test_id("free-right").inner_text() == "2 of 3"
    assert "position 2" in page.get_by_test_id("said").inner_text()
    for name in ("loss_curve", "teacher_forcing"):
        assert mounted(name).evaluate("document.documentElement.scrollWidth") <= 390
