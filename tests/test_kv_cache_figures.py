"""The chapter's live figures show the reference's numbers, and its table of models agrees with their libraries."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from course_llm import live
from course_llm.kv_cache import decode_intensity, forward_flops, kv_cache_bytes
from course_llm.model_shapes import PUBLISHED

LIVE = Path(live.__file__).parent

MOUNT = """
<!doctype html><meta charset="utf-8"><style>%s</style><div id="here"></div><script type="module">
const heard = {};
const state = %s;
const model = {
  get: (key) => state[key],
  set: (key, value) => { if (state[key] !== value) { state[key] = value; (heard[`change:${key}`] ?? []).forEach((f) => f()); } },
  on: (name, f) => (heard[name] ??= []).push(f),
  save_changes: () => {},
};
window.model = model;
const module = await import("data:text/javascript;charset=utf-8," + encodeURIComponent(%s));
module.default.render({ model, el: document.getElementById("here") });
document.body.dataset.ready = "yes";
</script>
"""


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        except sync_api.Error:
            pytest.skip("no browser here")
        yield started
        started.close()


def mount(browser, name: str, **state):
    """Opens a live figure on an empty page as wide as a phone."""
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    source = json.dumps(live.source(name)).replace("</", "<\\/")
    page.set_content(MOUNT % ((LIVE / "live.css").read_text(), json.dumps(state), source))
    page.wait_for_selector("body[data-ready]")
    return page


def value(page, name: str) -> float:
    return float(page.get_by_test_id(name).get_attribute("data-value"))


SEVEN_B = dict(layers=32, heads=32, head_dim=128, d_ff=3 * 11008 // 2)  # three matrices, counted as two


@pytest.mark.parametrize("cached, batch, kv_heads", [("yes", 1, 32), ("yes", 16, 8), ("no", 2, 32)])
def test_steps_show_the_references_numbers(browser, cached, batch, kv_heads):
    page = mount(
        browser, "kv_cache_steps", cached=cached, batch=batch, kv_heads=kv_heads, prompt=3, record=500
    )
    total = 0
    for step in range(4):
        seq = 503 + step
        new = 1 if cached == "yes" and step else seq
        flops = forward_flops(batch, new, seq, kv_heads=kv_heads, **SEVEN_B)
        read = decode_intensity(batch, seq, kv_heads=kv_heads, bytes_per_element=2, **SEVEN_B)[1]
        total += flops
        assert value(page, "pushed") == new
        assert value(page, "flops") == flops
        assert value(page, "total") == total
        assert value(page, "read") == read
        assert value(page, "intensity") == pytest.approx(flops / read)
        assert value(page, "cache") == (
            kv_cache_bytes(batch, seq, 32, kv_heads, 128) if cached == "yes" else 0
        )
        states = [page.get_by_test_id(f"token-{i}").get_attribute("data-state") for i in range(14)]
        fresh = 1 if new == 1 else 3 + step
        assert states == ["cached"] * (3 + step - fresh) + ["computed"] * fresh + ["to come"] * (11 - step)
        page.get_by_test_id("next").click()
    page.get_by_test_id("again").click()
    assert value(page, "phase") == 0
    assert page.errors == [] and page.evaluate("document.documentElement.scrollWidth") <= 390


def test_steps_stop_at_the_end_of_the_text(browser):
    page = mount(browser, "kv_cache_steps", prompt=12, step=9)
    assert page.get_by_test_id("step-value").inner_text() == "2"
    assert page.get_by_test_id("next").is_disabled()


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_calculator_shows_the_references_numbers(browser, name):
    page = mount(browser, "cache_size", model=name, batch=4, seq=2048, bits=8, memory_gb=80)
    shape = PUBLISHED[name]
    one = kv_cache_bytes(1, 2048, shape.layers, shape.kv_heads, shape.head_dim, 1)
    assert value(page, "bytes-token") == one / 2048
    assert value(page, "bytes-text") == one
    assert value(page, "bytes-batch") == 4 * one
    assert value(page, "bytes-mha") == kv_cache_bytes(4, 2048, shape.layers, shape.heads, shape.head_dim, 1)
    assert value(page, "bytes-weights") == 2 * shape.parameters
    assert value(page, "said") == max(0, (80e9 - 2 * shape.parameters) // one)
    page.get_by_test_id("seq").focus()
    page.keyboard.press("ArrowRight")
    assert value(page, "bytes-text") == 2 * one
    assert page.errors == [] and page.evaluate("document.documentElement.scrollWidth") <= 390


def test_calculator_knows_the_published_models():
    source = live.source("cache_size")
    table = json.loads(re.search(r"const MODELS = (\{.*?\n\});", source, flags=re.S).group(1))
    keys = ("layers", "heads", "kv_heads", "head_dim", "parameters")
    assert table == {name: {key: getattr(shape, key) for key in keys} for name, shape in PUBLISHED.items()}


@pytest.mark.parametrize(
    "name, config",
    [
        ("GPT-2", "GPT2Config"),
        ("BioGPT", "BioGptConfig"),
        ("Llama-2-7B", "LlamaConfig"),
        ("Mistral-7B", "MistralConfig"),
    ],
)
def test_shapes_agree_with_hugging_face(name, config):
    default = getattr(
        pytest.importorskip("transformers"), config
    )()  # these defaults are the published models
    shape = PUBLISHED[name]
    assert shape.layers == default.num_hidden_layers
    assert shape.d_hidden == default.hidden_size
    assert shape.heads == default.num_attention_heads
    assert shape.kv_heads == (getattr(default, "num_key_value_heads", None) or shape.heads)
    assert shape.head_dim == (getattr(default, "head_dim", None) or default.hidden_size // shape.heads)
    assert shape.d_ff == (getattr(default, "intermediate_size", None) or 4 * default.hidden_size)
    assert shape.vocab == default.vocab_size
    assert shape.window == (default.sliding_window if name == "Mistral-7B" else None)


@pytest.mark.parametrize(
    "name, billions",
    [("GPT-2", 0.124), ("BioGPT", 0.347), ("SmolLM2-135M", 0.1345), ("GPT-3", 175), ("Llama-2-7B", 6.74),
     ("Llama-2-70B", 69.0), ("Mistral-7B", 7.24), ("Llama-3-8B", 8.03), ("Llama-3-70B", 70.6),
     ("Llama-3.1-405B", 405.9), ("DeepSeek-67B", 67.4)],
)  # fmt: skip
def test_shapes_give_the_published_parameter_counts(name, billions):
    # biases, norms and learned positions are left out
    assert PUBLISHED[name].parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_tied_models_count_their_embedding_once():
    shape = PUBLISHED["SmolLM2-135M"]
    untied = dataclasses.replace(shape, tied=False)
    assert untied.parameters - shape.parameters == shape.vocab * shape.d_hidden
