"""The capstone's generator against the bundled model itself, its counts against torch's, and the leaderboard."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from autograder import catalog, pieces
from autograder.checks.capstone import PROMPT_TOKENS, PROMPTS, latent_layer, layer, small_model
from autograder.grading import ExerciseReport, SubmissionReport
from autograder.inside.meter import Meter
from autograder.leaderboard import NAMES, leaderboard
from autograder.spec import Gen
from course_llm import capstone
from course_llm.bundled import bundled_weights
from course_llm.decoding import sampling_distribution
from course_llm.model import load_bundled
from samples.build import answers, fill
from tests.answers import capstone as strangers
from tests.test_cli import command, refused, write


@pytest.fixture(scope="module")
def model():
    return load_bundled()[0].eval()


@pytest.fixture(scope="module")
def bundled():
    return bundled_weights()


@pytest.fixture(scope="module")
def latent(bundled):
    return capstone.with_latents(bundled[0], 128)


def encoded(tokenizer, *texts: str) -> torch.Tensor:
    return torch.tensor([tokenizer.encode(text) for text in texts])


@torch.no_grad()
def test_step_gives_the_bundled_models_logits(model, bundled, latent):
    ids = encoded(bundled[1], *PROMPTS[:2])
    want = model(ids)
    for weights in (bundled[0], latent):
        cache = capstone.ModelCache(4, 10)
        for start, end in ((0, 4), (4, 6), (6, 7)):
            got = capstone.decoder_step(weights, ids[:, start:end], cache)
            assert torch.allclose(got, want[:, end - 1], atol=2e-3)
            assert cache.length == end


@torch.no_grad()
def test_generator_writes_what_the_bundled_model_writes(model, bundled, latent):
    ids = encoded(bundled[1], *PROMPTS)
    text = ids
    for _ in range(10):
        text = torch.cat((text, model(text)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(capstone.generate_text(bundled[0], ids, 10), text)
    assert torch.equal(capstone.generate_text(latent, ids, 10), text)


@torch.no_grad()
def test_prompts_of_the_checks_leave_no_doubt(model, bundled):
    ids = encoded(bundled[1], *PROMPTS)
    assert ids.numel() == PROMPT_TOKENS
    text = capstone.generate_text(bundled[0], ids, 24, bundled[1].eos_id)
    best = model(text)[:, ids.shape[1] - 1 : -1].topk(2).values
    asked = (
        (text[:, ids.shape[1] - 1 : -1] != bundled[1].eos_id).cumprod(1).bool()
    )  # rows that have not ended
    assert (best[..., 0] - best[..., 1])[asked].min() > 0.02


def test_attention_step_equals_fused_attention_on_the_whole_text():
    g = Gen(3)
    weights, x = layer(g, 12, 3, 4, dtype=torch.float64), g.randn(2, 6, 12, dtype=torch.float64)
    q, k, v = ((x @ w).unflatten(-1, (3, 4)).transpose(1, 2) for w in (weights.w_q, weights.w_k, weights.w_v))
    angles = torch.arange(6).double()[:, None] * 10000.0 ** (-torch.tensor([0.0, 2.0]).double() / 4)
    turn = torch.polar(torch.ones_like(angles), angles)

    def rotated(t, scale):
        t = F.rms_norm(t, (4,), scale, 1e-5)
        return torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (2, 2)).contiguous()) * turn).flatten(
            -2
        )

    q, k = rotated(q, weights.q_norm), rotated(k, weights.k_norm)
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ weights.w_o
    cache = capstone.ModelCache(1, 6)
    parts = [capstone.attention_step(part, weights, 3, cache, 0) for part in x.split((3, 1, 2), dim=1)]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-6)


def test_latent_attention_equals_attention_with_the_products():
    g = Gen(4)
    weights = latent_layer(g, 12, 3, 4, 5, dtype=torch.float64)
    fields = {f.name: getattr(weights, f.name) for f in dataclasses.fields(weights)}
    down, uk, uv = (fields.pop(n) for n in ("w_dkv", "w_uk", "w_uv"))
    plain = capstone.LayerWeights(**fields, w_k=down @ uk, w_v=down @ uv)
    x = g.randn(2, 5, 12, dtype=torch.float64)
    caches = capstone.ModelCache(1, 5), capstone.ModelCache(1, 5)
    for part in x.split((3, 1, 1), dim=1):
        got = capstone.latent_attention_step(part, weights, 3, caches[0], 0)
        assert torch.allclose(got, capstone.attention_step(part, plain, 3, caches[1], 0), atol=1e-6)


def test_latent_factors_lose_the_smallest_singular_values():
    g = Gen(5)
    w_k, w_v = g.randn(10, 8), g.randn(10, 8)
    both = torch.cat((w_k, w_v), dim=1)
    for d_c in (1, 4, 10):
        down, uk, uv = capstone.latent_factors(w_k, w_v, d_c)
        assert (down.shape, uk.shape, uv.shape) == ((10, d_c), (d_c, 8), (d_c, 8))
        error = (both - down @ torch.cat((uk, uv), dim=1)).square().sum()
        assert error == pytest.approx(float(torch.linalg.svdvals(both)[d_c:].square().sum()), abs=1e-4)
    for d_c in (0, 11):
        with pytest.raises(ValueError, match="d_c"):
            capstone.latent_factors(w_k, w_v, d_c)


def test_cache_grows_with_the_last_layer_and_refuses_without_a_change():
    cache = capstone.ModelCache(2, 3)
    k = torch.arange(4.0).reshape(1, 2, 2)
    assert [t.tolist() for t in cache.update(0, k, -k)] == [k.tolist(), (-k).tolist()]
    assert cache.length == 0
    cache.update(1, k, k)
    assert cache.length == 2
    with pytest.raises(ValueError, match="max_seq=3"):
        cache.update(0, k, k)
    assert cache.length == 2
    (kept, _) = cache.update(0, k[:, :1], k[:, :1])
    assert kept.tolist() == torch.cat((k, k[:, :1]), 1).tolist()
    cache.reset()
    assert cache.length == 0
    assert cache.update(1, k, k)[0].tolist() == k.tolist()


def test_sampling_draws_with_the_rows_own_numbers():
    weights, ids = small_model(Gen(6)), torch.tensor([[1, 2], [3, 4]])
    uniforms = torch.tensor([[0.1, 0.9], [0.6, 0.3]])
    got = capstone.generate_text(weights, ids, 2, None, 1.3, 5, 0.9, uniforms)
    text = ids
    for step in range(2):
        logits = torch.stack(
            [capstone.decoder_step(weights, row[None], capstone.ModelCache(2, 9))[0] for row in text]
        )
        probs = sampling_distribution(logits, 1.3, 5, 0.9)
        token = (probs.cumsum(-1) <= uniforms[:, step : step + 1]).sum(-1, keepdim=True)
        text = torch.cat((text, token), dim=1)
    assert torch.equal(got, text)
    with pytest.raises(ValueError, match="uniforms"):
        capstone.generate_text(weights, ids, 2, temperature=0.5)


def test_rows_end_with_eos_and_the_prompt_alone_is_returned_for_none():
    weights, ids = small_model(Gen(7)), torch.tensor([[1, 2], [3, 4]])
    plain = capstone.generate_text(weights, ids, 6)
    assert torch.equal(capstone.generate_text(weights, ids, 0), ids)
    eos_id = int(plain[0, 3])
    ended = capstone.generate_text(weights, ids[:1], 6, eos_id)
    assert ended.shape[1] == 2 + 1 + plain[0, 2:].tolist().index(eos_id)


@pytest.mark.parametrize("kind", ["keys and values", "latents"])
def test_counts_are_what_torch_counts(kind, bundled, latent):
    weights = bundled[0] if kind == "keys and values" else latent
    ids = encoded(bundled[1], PROMPTS[0])
    with FlopCounterMode(display=False) as counter:
        capstone.generate_text(weights, ids, 5)
    assert counter.get_total_flops() == capstone.generation_flops(weights, 7, 5)
    assert capstone.least_flops(weights, 7, 5) < capstone.generation_flops(weights, 7, 5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["keys and values", "latents"])
def test_least_flops_are_reached_and_not_undercut(kind, bundled, latent):
    weights = bundled[0] if kind == "keys and values" else latent
    names = {}
    exec(
        f"import math\nimport torch\nimport torch.nn.functional as F\n{catalog.chapter('capstone').given}",
        names,
    )
    for source in (strangers.LOOP, strangers.LEAST):
        exec(source, names)
    for text in PROMPTS[:3]:
        ids = encoded(bundled[1], text)
        with Meter() as meter:
            written = names["generate_text"](weights, ids, 5)
        assert torch.equal(written, capstone.generate_text(weights, ids, 5))
        distinct = written[:, :-1].unique().numel()
        least = capstone.least_flops(weights, 7, 5, distinct)
        assert meter.flops == least if distinct == 11 else meter.flops >= least


# what is borrowed


def test_pieces_that_are_pasted_are_not_borrowed():
    chapter = catalog.chapter("capstone")
    source = "def rope_at(x, start):\n    return apply_rope(x, start)\n\ndef attention_step(x):\n    return rope_at(split_heads(x, 2), 0)\n"
    assert pieces.borrowed(chapter, {"attention_step": source}, ["attention_step"]) == [
        "apply_rope",
        "split_heads",
    ]
    namespace = {"__name__": "somewhere"}
    exec(f"{chapter.given}\n{source}", namespace)
    assert pieces.borrowed_here(chapter, namespace, ["attention_step"]) == ["apply_rope", "split_heads"]


def test_pieces_that_an_answer_imports_itself_are_borrowed():
    chapter = catalog.chapter("capstone")
    source = "from course_llm.kv_cache import generate_cached as mine\n\ndef generate_text(x):\n    return mine(x)\n"
    assert pieces.borrowed(chapter, {"generate_text": source}, ["generate_text"]) == ["generate_cached"]
    assert pieces.borrowed(catalog.chapter("decoding"), {"generate_text": source}, ["generate_text"]) == []


# the leaderboard


def report(name: str, flops: int, latent_flops: int = 2 * 10**8, passed: bool = True) -> SubmissionReport:
    counts = dict(zip(NAMES, (flops, 52224, latent_flops, 26112), strict=True))
    generator = ExerciseReport("generate_text", 10, 10, passed, message="" if passed else "Wrong.", groups=[{"counts": counts}], borrowed=["rope_at"])  # fmt: skip
    return SubmissionReport(name, [generator])


def test_leaderboard_orders_by_flops_and_ranks_no_impossible_count():
    names = [("b", 10**8), ("a", 9 * 10**7), ("d", 10**8), ("magic", 1000)]
    rows = leaderboard(
        [*(report(*n) for n in names), report("wrong", 10**8, passed=False), report("c", 10**8, 15 * 10**7)]
    )
    assert [(r.place, r.submission) for r in rows] == [
        (1, "a"),
        (2, "c"),
        (3, "b"),
        (3, "d"),
        (None, "magic"),
        (None, "wrong"),
    ]
    assert "fewer than the matrices take" in rows[4].remark
    kept = report("kept", 87_736_320, 94_289_920)  # keys expanded once and kept beside the cache
    assert "fewer than the matrices take" in leaderboard([kept])[0].remark
    assert rows[5].remark == "Wrong."
    assert (rows[0].cache_bytes_per_token, rows[0].latent_cache_bytes_per_token) == (4096, 2048)
    assert rows[0].borrowed == ("rope_at",)


def test_leaderboard_grades_notebooks_and_reads_a_course(tmp_path):
    right = answers("capstone")
    own = {**right, "attention_step": "def rope_at(x, start):\n    return apply_rope(x, torch.arange(start, start + x.shape[-2]))\n\n" + right["attention_step"]}  # fmt: skip
    slow = {**right, "generate_text": strangers.LOOP.removeprefix(strangers.STEP).replace("        if done.all()", "        unread, cache = text, ModelCache(len(weights.layers), 99)\n        if done.all()")}  # fmt: skip
    for name, sources in (("ada", own), ("grace", slow), ("blank", {})):
        write(tmp_path / "class" / name / "capstone" / "capstone.ipynb", fill("capstone", sources))
    code, _, err = command("grade", "capstone", tmp_path / "class", "--course", tmp_path / "course")
    assert code == 0, err
    code, out, err = command("leaderboard", "--course", tmp_path / "course", "--json")
    assert code == 0, err
    rows = {row["submission"]: row for row in json.loads(out)}
    assert rows["ada"]["place"] == 1
    assert "rope_at" in rows["grace"]["borrowed"] and "cached_attention" in rows["ada"]["borrowed"]
    assert rows["ada"]["cache_bytes_per_token"] == 4096
    assert "Right but slow" in rows["grace"]["remark"] and rows["grace"]["place"] is None
    assert rows["blank"]["remark"] == "Not attempted."
    code, out, _ = command("leaderboard", tmp_path / "class" / "ada" / "capstone" / "capstone.ipynb")
    assert code == 0 and "87,736,320" in out


def test_leaderboard_says_what_it_needs(tmp_path):
    assert refused("leaderboard")[0] == 2
    assert refused("leaderboard", tmp_path, "--course", tmp_path)[0] == 2
    assert "course-llm release capstone --course" in refused("leaderboard", "--course", tmp_path)[1]
    assert "there is no file" in refused("leaderboard", tmp_path / "none.ipynb")[1]
