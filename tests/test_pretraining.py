"""Independent facts about `course_llm.pretraining`."""

import csv
import io
import math
import random
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autograder.checks import pretraining as checks
from autograder.inside.modules import MODULES
from autograder.spec import Gen
from course_llm import corpus, live, pretraining
from course_llm.tokenizer import load_tokenizer, train_merges, word_counts

WORDS = st.dictionaries(st.text("abcä ", min_size=1, max_size=8), st.integers(1, 9), max_size=6)


def close(a, b, tolerance=1e-9):
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


# ---- byte pairs


def test_train_bpe_on_the_example_of_sennrich():
    counts = {"low": 5, "lower": 2, "newest": 6, "widest": 3}
    assert pretraining.train_bpe(counts, 3) == [(b"e", b"s"), (b"es", b"t"), (b"l", b"o")]


def test_train_bpe_breaks_ties_by_the_pair_that_sorts_first():
    assert pretraining.train_bpe({"zy": 2, "ab": 2, "b": 9}, 2) == [(b"a", b"b"), (b"z", b"y")]
    assert pretraining.train_bpe({"ca": 1, "ab": 1}, 1) == [(b"a", b"b")]


def test_train_bpe_merges_left_to_right_and_stops_early():
    assert pretraining.train_bpe({"aaa": 1}, 9) == [(b"a", b"a"), (b"aa", b"a")]
    assert pretraining.train_bpe({"a": 7, "": 3}, 4) == []
    assert pretraining.train_bpe({"ab": 1}, 0) == []
    assert pretraining.train_bpe({"é": 3}, 5) == [(b"\xc3", b"\xa9")]


def test_train_bpe_refuses_negative_merges():
    with pytest.raises(ValueError, match="train_bpe needs merges >= 0"):
        pretraining.train_bpe({"ab": 1}, -1)


@settings(max_examples=60, deadline=None)
@given(WORDS, st.integers(0, 12))
def test_train_bpe_equals_the_incremental_trainer(counts, merges):
    assert pretraining.train_bpe(counts, merges) == train_merges(counts, merges)


def test_train_bpe_gives_the_merges_of_the_shipped_tokenizer():
    texts = corpus.training_documents()
    counts = dict(word_counts(texts))
    tokenizer = load_tokenizer()
    learned = pretraining.train_bpe(counts, 5)
    for i, (left, right) in enumerate(learned):
        assert tokenizer.decode([256 + i]).encode() == left + right
    # the whole vocabulary, on a small corpus: ids are counted on from the bytes
    small = type(tokenizer).train(texts[:40], 400)
    merges = pretraining.train_bpe(dict(word_counts(texts[:40])), 143)
    assert [small.decode([256 + i]).encode() for i in range(143)] == [a + b for a, b in merges]
    for word in list(word_counts(texts[40:60])):
        assert pretraining.bpe_encode(word, merges) == [t.encode() for t in small.tokens(small.encode(word))]


def test_bpe_encode_applies_merges_in_learned_order():
    merges = [(b"b", b"c"), (b"a", b"b"), (b"a", b"bc")]
    assert pretraining.bpe_encode("abc", merges) == [b"abc"]
    assert pretraining.bpe_encode("ab", merges) == [b"ab"]
    assert pretraining.bpe_encode("abc", merges[1::-1]) == [b"ab", b"c"]  # not the longest match
    assert pretraining.bpe_encode("aaaaa", [(b"a", b"a")]) == [b"aa", b"aa", b"a"]
    assert pretraining.bpe_encode("", merges) == []
    assert pretraining.bpe_encode("ü", []) == [b"\xc3", b"\xbc"]


@settings(max_examples=40, deadline=None)
@given(WORDS, st.text("abcä ", max_size=10))
def test_tokens_join_to_the_word(counts, word):
    tokens = pretraining.bpe_encode(word, pretraining.train_bpe(counts, 8))
    assert b"".join(tokens) == word.encode()


# ---- rows


def test_pack_by_hand():
    inputs, targets, ids = pretraining.pack([[5, 6], [7], [], [8, 9, 3]], 0, 3)
    # stream 5 6 0 | 7 0 0 | 8 9 3 | 0: three rows, the last target is the final end of text
    assert inputs.tolist() == [[5, 6, 0], [7, 0, 0], [8, 9, 3]]
    assert targets.tolist() == [[6, 0, 7], [0, 0, 8], [9, 3, 0]]
    assert ids.tolist() == [[0, 0, 0], [1, 1, 2], [3, 3, 3]]
    assert {t.dtype for t in (inputs, targets, ids)} == {torch.int64}


@pytest.mark.parametrize("documents", [[], [[]], [[1, 2]], [[1, 2], [3]]])
def test_pack_drops_a_tail_without_a_target(documents):
    inputs, targets, ids = pretraining.pack(documents, 9, 5)
    assert inputs.shape == targets.shape == ids.shape == (0, 5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=6), st.integers(1, 5))
def test_pack_keeps_the_stream(documents, block):
    inputs, targets, ids = pretraining.pack(documents, 0, block)
    stream = [t for d in documents for t in [*d, 0]]
    flat = inputs.flatten().tolist()
    assert flat == stream[: len(flat)]
    assert len(stream) - 1 - len(flat) < block
    assert targets.flatten().tolist() == stream[1 : len(flat) + 1]
    assert ids.flatten().tolist() == sorted(ids.flatten().tolist())


def test_pack_refuses_an_empty_block():
    with pytest.raises(ValueError, match="pack needs block >= 1, got block=0"):
        pretraining.pack([[1]], 0, 0)


def test_random_batch_draws_every_start_equally_often():
    tokens = torch.randperm(13, generator=torch.Generator().manual_seed(0)) + 100
    inputs, targets = pretraining.random_batch(tokens, 9, 4000, torch.Generator().manual_seed(1))
    where = {int(t): i for i, t in enumerate(tokens)}
    starts = torch.tensor([where[int(t)] for t in inputs[:, 0]])
    assert torch.bincount(starts).tolist() == pytest.approx([1000] * 4, abs=150)
    for start in range(4):
        rows = inputs[starts == start]
        assert (rows == tokens[start : start + 9]).all()
        assert (targets[starts == start] == tokens[start + 1 : start + 10]).all()


def test_random_batch_uses_its_generator_alone():
    tokens, generator = torch.arange(1000), torch.Generator().manual_seed(3)
    twin = generator.clone_state()
    first, _ = pretraining.random_batch(tokens, 4, 8, generator)
    torch.manual_seed(5)
    again, _ = pretraining.random_batch(tokens, 4, 8, twin)
    second, _ = pretraining.random_batch(tokens, 4, 8, generator)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    with pytest.raises(ValueError, match="at least block"):
        pretraining.random_batch(tokens[:4], 4, 1, generator)


# ---- learning rate, optimizer, clipping


def test_learning_rate_rises_in_a_line_and_falls_in_a_cosine():
    rates = [pretraining.learning_rate(step, 1.0, 4, 12, 0.2) for step in range(16)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert close(rates[8], 0.6)  # half way between peak and floor
    assert rates[12:] == [0.2] * 4
    assert all(a >= b for a, b in pairwise(rates[4:]))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8, eta_min=0.2)
    for step in range(4, 12):
        assert close(rates[step], schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


def test_learning_rate_without_warm_up():
    assert pretraining.learning_rate(0, 3.0, 0, 10, 0.0) == 3.0
    assert pretraining.learning_rate(0, 3.0, 5, 2, 0.1) == 0.6
    assert pretraining.learning_rate(7, 3.0, 5, 2, 0.1) == 0.1
    for step, warmup in ((-1, 2), (0, -1)):
        with pytest.raises(ValueError, match="learning_rate needs"):
            pretraining.learning_rate(step, 1.0, warmup, 10, 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adamw_step_follows_torch(dtype, decay):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 3, generator=generator).to(dtype)
    parameter = nn.Parameter(start.double().clone())
    options = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": decay}
    optimizer = torch.optim.AdamW([parameter], **options)
    param, m, v = start, torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, 5):
        grad = torch.randn(5, 3, generator=generator).to(dtype)
        parameter.grad = grad.double().clone()
        optimizer.step()
        param, m, v = pretraining.adamw_step(param, grad, m, v, step, **options)
        assert param.dtype == m.dtype == v.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 6e-3, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(param.double(), parameter.detach(), rtol=tolerance, atol=tolerance)


def test_adamw_step_is_pure_and_counts_from_one():
    given_ = [torch.ones(3), torch.full((3,), 2.0), torch.zeros(3), torch.zeros(3)]
    copies = [t.clone() for t in given_]
    param, m, v = pretraining.adamw_step(*given_, 1, 0.1, (0.9, 0.99), 0.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(given_, copies, strict=True))
    torch.testing.assert_close(
        param, torch.full((3,), 0.9)
    )  # the first step is lr long, whatever the gradient
    torch.testing.assert_close(m, torch.full((3,), 0.2))
    torch.testing.assert_close(v, torch.full((3,), 0.04))
    with pytest.raises(ValueError, match="step >= 1"):
        pretraining.adamw_step(*given_, 0, 0.1, (0.9, 0.99), 1e-8, 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_clip_gradients_follows_torch(dtype):
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(4, 3, generator=generator).to(dtype), torch.randn(5, generator=generator).to(dtype)]
    copies = [grad.clone() for grad in grads]
    parameters = [nn.Parameter(torch.zeros_like(grad, dtype=torch.float64)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.double().clone()
    want = nn.utils.clip_grad_norm_(parameters, 1.5)
    clipped, norm = pretraining.clip_gradients(grads, 1.5)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-5)
    assert close(float(norm), float(want), tolerance)
    for grad, parameter, old, copy in zip(clipped, parameters, grads, copies, strict=True):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.double(), parameter.grad, rtol=tolerance, atol=tolerance)
        assert torch.equal(old, copy)


def test_clip_gradients_leaves_small_ones_alone():
    grads = [torch.tensor([0.3]), torch.tensor([[0.4]])]
    clipped, norm = pretraining.clip_gradients(grads, 1.0)
    assert close(float(norm), 0.5, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(clipped, grads, strict=True))
    clipped, norm = pretraining.clip_gradients([torch.zeros(3)], 1.0)
    assert float(norm) == 0
    assert torch.equal(clipped[0], torch.zeros(3))
    assert pretraining.clip_gradients([], 1.0)[0] == []
    with pytest.raises(ValueError, match="max_norm > 0"):
        pretraining.clip_gradients(grads, 0.0)


# ---- training


def tiny(vocab=11, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(vocab, 6), nn.Tanh(), nn.Linear(6, vocab))


def test_accumulate_gradients_equals_one_large_batch():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (5, 8), generator=generator)
    targets = torch.randint(0, 11, (5, 8), generator=generator)
    targets[0, 3:] = -100
    targets[4] = -100
    model, twin = tiny(), tiny()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    loss = pretraining.accumulate_gradients(
        model, [(ids[:1], targets[:1]), (ids[1:4], targets[1:4]), (ids[4:], targets[4:])]
    )
    want = F.cross_entropy(twin(ids).flatten(0, 1), targets.flatten())
    want.backward()
    assert not loss.requires_grad
    torch.testing.assert_close(loss, want.detach())
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def chain(n, vocab=11, seed=0):
    """Tokens of which each is the one before plus 1 or plus 3, so that ln 2 is the best loss."""
    steps = random.Random(seed).choices((1, 3), k=n - 1)
    tokens = [0]
    for step in steps:
        tokens.append((tokens[-1] + step) % vocab)
    return torch.tensor(tokens)


def test_pretrain_reaches_the_entropy_of_the_data():
    model = tiny()
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    losses = pretraining.pretrain(model, chain(3000), 150, 8, 16, 0.05, 10, torch.Generator().manual_seed(0))
    assert len(losses) == 150
    assert close(losses[0], math.log(11), 1e-6)
    assert math.log(2) - 0.05 < sum(losses[-10:]) / 10 < math.log(2) + 0.08


def test_first_update_is_one_step_of_the_warm_up():
    model, twin = tiny(), tiny()
    pretraining.pretrain(model, chain(100), 1, 2, 8, 0.05, 10, torch.Generator().manual_seed(0))
    with torch.no_grad():
        moved = model[2].weight - twin[2].weight * (1 - 0.1 * 0.005)  # without the decay
    assert float(moved.abs().max()) == pytest.approx(0.05 / 10, rel=1e-3)


def test_pretrain_is_reproducible_and_follows_its_generator():
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(runs) * 7)
        model = tiny(seed=4)
        runs.append(
            pretraining.pretrain(model, chain(400), 4, 2, 8, 0.01, 2, torch.Generator().manual_seed(seed))
        )
    assert runs[0] == runs[1] != runs[2]


# ---- checkpoints


def run(seed=0):
    model = tiny(seed=seed)
    return (
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1)),
        torch.Generator().manual_seed(seed),
    )


def practise(model, optimizer, generator, steps):
    losses = []
    for _ in range(steps):
        losses.append(
            pretraining.accumulate_gradients(
                model, [pretraining.random_batch(chain(200), 8, 2, generator)]
            ).item()
        )
        optimizer.step()
    return losses


@pytest.mark.parametrize("as_string", [True, False])
def test_a_resumed_run_gives_the_same_numbers(tmp_path, as_string):
    path = tmp_path / "run.pt"
    first = run()
    practise(*first, 3)
    pretraining.save_checkpoint(str(path) if as_string else path, *first[:2], 3, first[2])
    second = run(1)
    assert pretraining.load_checkpoint(str(path) if as_string else path, *second) == 3
    assert practise(*first, 4) == practise(*second, 4)
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]


@pytest.mark.parametrize("place", ["serialise", "flush", "rename"])
def test_a_crash_while_saving_leaves_the_old_file_whole(tmp_path, monkeypatch, place):
    path = tmp_path / "run.pt"
    first = run()
    pretraining.save_checkpoint(path, *first[:2], 3, first[2])
    old = path.read_bytes()
    practise(*first, 1)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    class Half(io.BytesIO):
        def __reduce__(self):
            fail()

    if place == "serialise":
        first[0].state_dict = lambda: {"big": torch.ones(1000), "broken": Half()}
    monkeypatch.setattr(
        *{"flush": ("os.fsync", fail), "rename": ("os.replace", fail)}.get(place, ("os.sep", "/"))
    )
    with pytest.raises(OSError, match="No space"):
        pretraining.save_checkpoint(path, *first[:2], 4, first[2])
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]


# ---- counting and scaling laws


def test_parameter_count_equals_a_built_model():
    from course_llm.model import Decoder, ModelConfig

    for tied in (True, False):
        config = ModelConfig(300, 24, 3, 4, 80, 16, feed_forward="gelu", tied=tied)
        matrices = sum(p.numel() for p in Decoder(config).parameters() if p.ndim == 2)
        assert pretraining.parameter_count(3, 24, 80, 300, tied) == matrices
    assert pretraining.parameter_count(12, 768, 3072, 50257) == 84_934_656 + 768 * 50257  # GPT-2 small
    assert pretraining.training_flops(70 * 10**9, 1400 * 10**9) == 588 * 10**21
    assert isinstance(pretraining.training_flops(3, 4), int)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fit_power_law_finds_the_constants(dtype):
    x = torch.logspace(3, 9, 7, dtype=dtype)
    alpha, c = pretraining.fit_power_law(x, (8.8e13 / x) ** 0.076)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    assert close(alpha, 0.076, tolerance)
    assert close(c, 8.8e13, 100 * tolerance)
    slope = torch.linalg.lstsq(
        torch.stack([x.double().log(), torch.ones(7)], -1), (3 + x.double().log().cos()).log()[:, None]
    ).solution[0]
    assert close(pretraining.fit_power_law(x.double(), 3 + x.double().log().cos())[0], -float(slope))
    for bad in ((x[:1], x[:1]), (-x, x), (x, x - x[0])):
        with pytest.raises(ValueError, match="fit_power_law needs"):
            pretraining.fit_power_law(*bad)


def runs_of(E, A, B, alpha, beta):
    N = torch.logspace(4, 6, 5, dtype=torch.float64).repeat(4)
    D = torch.logspace(5, 7, 4, dtype=torch.float64).repeat_interleave(5)
    return N, D, E + A / N**alpha + B / D**beta


@pytest.mark.parametrize("law", [(1.69, 406.4, 410.7, 0.34, 0.28), (0.8, 30.0, 900.0, 0.45, 0.5)])
def test_fit_chinchilla_finds_the_constants(law):
    for got, want in zip(pretraining.fit_chinchilla(*runs_of(*law)), law, strict=True):
        assert close(got, want, 1e-3)


def test_fit_chinchilla_hardly_minds_one_odd_run():
    law = (1.5, 30.0, 200.0, 0.4, 0.35)
    N, D, L = runs_of(*law)
    L[7] *= 1.5  # a run that diverged
    for got, want in zip(pretraining.fit_chinchilla(N, D, L), law, strict=True):
        assert close(got, want, 0.02)
    with pytest.raises(ValueError, match="five or more"):
        pretraining.fit_chinchilla(N[:4], D[:4], L[:4])
    with pytest.raises(ValueError, match="positive"):
        pretraining.fit_chinchilla(N, D, -L)


def test_compute_optimal_is_the_minimum_on_the_budget():
    law = dict(A=406.4, B=410.7, alpha=0.34, beta=0.28)
    flops = 5.76e23
    n, d = pretraining.compute_optimal(flops, **law)
    assert close(6 * n * d, flops)

    def loss(n):
        return law["A"] / n ** law["alpha"] + law["B"] / (flops / 6 / n) ** law["beta"]

    assert loss(n) < min(loss(n * 1.01), loss(n / 1.01))
    assert n == pytest.approx(32e9, rel=0.02)  # Chinchilla as printed
    assert pretraining.compute_optimal(flops, 1.0, 1.0, 0.3, 0.3)[0] == pytest.approx((flops / 6) ** 0.5)
    with pytest.raises(ValueError, match="flops > 0"):
        pretraining.compute_optimal(0, **law)


def test_the_shipped_sweep_is_what_the_live_figures_show():
    table = list(csv.DictReader((corpus.DATA / "scaling_runs.csv").open()))
    for row in table:
        layers, d_hidden = int(row["layers"]), int(row["d_hidden"])
        assert int(row["parameters"]) == pretraining.parameter_count(layers, d_hidden, 4 * d_hidden, 512)
        flops = pretraining.training_flops(int(row["parameters"]), int(row["tokens"]))
        assert int(row["flops"]) == flops
    shown = live.defaults("scaling_fit")
    columns = ("parameters", "tokens", "loss")
    assert shown["runs"] == [[float(row[name]) for name in columns] for row in table]
    fitted = pretraining.fit_chinchilla(*torch.tensor(shown["runs"], dtype=torch.float64).T)
    law = live.defaults("scaling_explorer")["laws"]["sweep"]
    for value, name in zip(fitted, ("E", "A", "B", "alpha", "beta"), strict=True):
        assert close(law[name], value, 1e-4)
        in_figure = shown["fit"].get(name) or 10 ** shown["fit"][f"log_{name}"]
        assert close(in_figure, value, 1e-4)


def test_the_loop_reaches_the_target_of_its_exercise_with_a_margin():
    for seed in range(10):
        g = Gen(seed)
        tokens = checks.chain(g, 8000)
        model = MODULES["TinyLM"](checks.CHAIN_VOCAB, checks.CHAIN_WIDTH)
        model.load_state_dict(
            checks.weights(g, "TinyLM", True, vocab=checks.CHAIN_VOCAB, width=checks.CHAIN_WIDTH)
        )
        sizes = (
            checks.CHAIN_STEPS,
            checks.CHAIN_BATCH,
            checks.CHAIN_BLOCK,
            checks.CHAIN_PEAK,
            checks.CHAIN_WARMUP,
        )
        pretraining.pretrain(model, tokens[:6000], *sizes, g.torch)
        assert checks.validation_nats(model.state_dict(), tokens[6000:]) < checks.TARGET_NATS - 0.05
