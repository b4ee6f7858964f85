"""The live figures of the chapter on latent attention show the package's numbers, with the keyboard and on a phone."""

import pytest
import torch

from course_llm import live, mla
from tests.book_site import browser  # noqa: F401

MOUNT = """
<!doctype html><meta charset="utf-8"><style>%s</style><div id="figure"></div><script type="module">%s
const heard = {}, state = {};
figure.render({el: document.getElementById("figure"), model: {
  get: (key) => state[key],
  set: (key, value) => {
    if (state[key] === value) return;
    state[key] = value;
    (heard[`change:${key}`] ?? []).forEach((f) => f());
  },
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
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    context.close()


def number(page, name):
    return float(page.get_by_test_id(name).get_attribute("data-value"))


def expression() -> torch.Tensor:
    """The matrix of three programmes, as the chapter's cell makes it."""
    i = torch.arange(12, dtype=torch.float64)[:, None]
    j = torch.arange(18, dtype=torch.float64)
    noise = (12.9898 * (i + 1) + 78.233 * (j + 1)).sin() * 43758.5453 % 1
    matrix = 0.4 * (noise - 0.5)
    for programme in range(3):
        strength = torch.where(i % 3 == programme, 1 + i / 12, 0.1)
        matrix = matrix + strength * torch.where(j // 6 == programme, 1.5 - (j % 6) / 6, 0.05)
    return matrix


def test_low_rank_shows_the_svd(mounted):
    page = mounted("low_rank")
    matrix = expression()
    for place, sigma in enumerate(torch.linalg.svdvals(matrix)):
        assert number(page, f"sigma-{place}") == pytest.approx(float(sigma), abs=1e-6)
    for rank in (1, 3, 7, 12):
        page.get_by_test_id("rank").fill(str(rank))
        a, b = mla.low_rank_factors(matrix, rank)
        assert number(page, "error") == pytest.approx(
            float((matrix - a @ b).norm() / matrix.norm()), abs=1e-6
        )
        assert page.get_by_test_id("stored").inner_text() == str(a.numel() + b.numel())


def test_low_rank_moves_with_the_keyboard(mounted):
    page = mounted("low_rank")
    page.get_by_test_id("rank").press("ArrowRight")
    assert page.get_by_test_id("rank-value").inner_text() == "4"
    page.get_by_test_id("matrix").select_option("programmes without noise")
    assert number(page, "error") < 1e-6  # three programmes, rank 4


@pytest.mark.parametrize(
    "model, shape",
    [("DeepSeek-V2", (5120, 128, 128, 512, 64)), ("this chapter’s small models", (96, 6, 16, 56, 8))],
)
def test_absorption_counts_what_the_package_counts(mounted, model, shape):
    page = mounted("absorption")
    page.get_by_test_id("model").select_option(model)
    for power in (0, 12, 17):
        page.get_by_test_id("context").fill(str(power))
        for form in ("expanded", "absorbed"):
            assert number(page, f"flops-{form}") == mla.decode_flops(form, 2**power, *shape)
            page.get_by_test_id("form").select_option(form)
            steps = page.locator("tbody [data-testid^=step-]")
            shown = sum(float(step.get_attribute("data-value")) for step in steps.all())
            assert shown == mla.decode_flops(form, 2**power, *shape)


def test_cache_figure_counts_what_the_package_counts(mounted):
    page = mounted("mla_cache")
    page.get_by_test_id("heads").fill("12")  # 8 groups do not divide 12 heads
    assert page.get_by_test_id("groups").input_value() == "6"
    for model, shape in (("DeepSeek-V2", (128, 128, 8, 512, 64)), ("Llama-3-8B", (32, 128, 8, 512, 64))):
        page.get_by_test_id("model").select_option(model)
        for kind in ("mha", "gqa", "mqa", "mla"):
            assert number(page, f"elements-{kind}") == mla.cache_elements_per_token(kind, *shape)
    page.get_by_test_id("model").select_option("DeepSeek-V2")
    assert number(page, "said") == 2.25
    assert number(page, "bytes-mla") == 60 * 576 * 2
    page.get_by_test_id("bits").select_option("6")
    assert number(page, "bytes-mla") == 25_920
