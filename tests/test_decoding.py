"""Independent facts about `course_llm.decoding`: hand values, laws, Hugging Face, exhaustive search."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from course_llm.decoding import (
    beam_search,
    distinct_n,
    generate,
    greedy_decode,
    min_p_filter,
    repetition_penalty,
    sample_from_uniform,
    sampling_distribution,
    softmax_with_temperature,
    speculative_accept,
    top_k_filter,
    top_p_filter,
)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# a few units in the last place of numbers of order one
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-12}
CAT = [1.0, 0.0, -0.9, -2.1]  # mat, floor, couch, bed after "The cat sat on the"


def rand(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rand_probs(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return rand(seed, *shape, dtype=torch.float64).softmax(dim=-1).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor | list, atol: float | None = None) -> None:
    want = torch.as_tensor(want, dtype=got.dtype)
    atol = TOLERANCE[got.dtype] if atol is None else atol
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


def markov(table: list[list[float]] | torch.Tensor):
    """A language model whose next token depends on the last token and on the length of the text."""
    logits = torch.as_tensor(table)

    def next_logits(ids: torch.Tensor) -> torch.Tensor:
        return logits[ids[:, -1]] + 0.01 * ids.shape[1] * torch.arange(logits.shape[1])

    return next_logits


# --- softmax_with_temperature


@pytest.mark.parametrize(
    ("temperature", "mat", "floor"), [(0.5, 0.862, 0.117), (1.0, 0.64, 0.235), (2.0, 0.453, 0.275)]
)
def test_temperature_gives_the_lectures_numbers(temperature, mat, floor):
    probs = softmax_with_temperature(torch.tensor(CAT), temperature)
    close(probs[:2], [mat, floor], atol=6e-4)


@pytest.mark.parametrize("dtype", FLOATS)
def test_temperature_keeps_the_dtype_and_sums_to_one(dtype):
    logits = rand(0, 2, 3, 11, dtype=dtype)
    probs = softmax_with_temperature(logits, 0.7)
    assert probs.dtype == dtype and probs.shape == logits.shape
    close(probs, (logits.double() / 0.7).softmax(dim=-1).to(dtype))


def test_temperature_agrees_with_hugging_face():
    logits = rand(1, 3, 11)
    close(softmax_with_temperature(logits, 1.7), TemperatureLogitsWarper(1.7)(None, logits).softmax(dim=-1))


def test_temperature_is_stable_for_huge_logits_and_small_temperatures():
    logits = torch.tensor([1e4, 1e4 - 1, -1e4])
    close(softmax_with_temperature(logits, 1.0), [1 / (1 + math.exp(-1)), 1 / (1 + math.e), 0.0])
    close(softmax_with_temperature(logits, 1e-40), [1.0, 0.0, 0.0])
    close(softmax_with_temperature(torch.tensor([1e4, 9900, -1e4]).half(), 0.01), [1.0, 0.0, 0.0])


def test_temperature_zero_is_the_first_maximum():
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]], dtype=torch.float16)
    assert softmax_with_temperature(logits, 0.0).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert softmax_with_temperature(logits, 0.0).dtype == torch.float16


def test_temperature_gives_masked_tokens_probability_zero():
    close(softmax_with_temperature(torch.tensor([0.0, -torch.inf, 0.0]), 2.0), [0.5, 0.0, 0.5])


def test_temperature_gradient_is_that_of_softmax():
    logits = rand(2, 2, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: softmax_with_temperature(x, 0.7), logits)


def test_temperature_refuses_below_zero():
    with pytest.raises(ValueError, match=r"temperature=-0\.1"):
        softmax_with_temperature(torch.zeros(3), -0.1)
    with pytest.raises(ValueError, match="nan"):
        softmax_with_temperature(torch.zeros(3), math.nan)


# --- filters


def test_top_k_by_hand():
    probs = softmax_with_temperature(torch.tensor(CAT), 0.5)
    close(top_k_filter(probs, 2), [0.880, 0.120, 0, 0], atol=1e-3)
    close(top_k_filter(torch.tensor([0.1, 0.4, 0.2, 0.3]), 2), [0, 4 / 7, 0, 3 / 7])


def test_top_k_gives_ties_to_the_lower_id():
    assert top_k_filter(torch.tensor([0.125, 0.25, 0.25, 0.25, 0.125]), 2).tolist() == [0, 0.5, 0.5, 0, 0]
    # long rows: an unstable sort shuffles equal values there
    kept = top_k_filter(torch.full((2, 1000), 1e-3), 10)
    assert (kept > 0).nonzero()[:, 1].tolist() == [*range(10), *range(10)]


def test_top_k_beyond_the_vocabulary_changes_nothing():
    probs = rand_probs(0, 2, 5)
    close(top_k_filter(probs, 5), probs)
    close(top_k_filter(probs, 50), probs)


@pytest.mark.parametrize("k", [0, -1])
def test_top_k_refuses_less_than_one(k):
    with pytest.raises(ValueError, match=f"k={k}"):
        top_k_filter(torch.tensor([0.5, 0.5]), k)


@pytest.mark.parametrize("dtype", FLOATS)
def test_filters_keep_dtype_and_batch_dimensions_and_inputs(dtype):
    probs = rand_probs(1, 2, 3, 7, dtype=dtype)
    before = probs.clone()
    for filtered in (top_k_filter(probs, 3), top_p_filter(probs, 0.6), min_p_filter(probs, 0.3)):
        assert filtered.dtype == dtype and filtered.shape == probs.shape
        close(filtered.double().sum(dim=-1), torch.ones(2, 3), atol=4 * TOLERANCE[dtype])
    assert torch.equal(probs, before)


def test_filters_agree_with_hugging_face():
    logits = rand(3, 4, 50)
    probs = logits.softmax(dim=-1)
    close(top_k_filter(probs, 7), TopKLogitsWarper(7)(None, logits).softmax(dim=-1))
    close(top_p_filter(probs, 0.65), TopPLogitsWarper(0.65)(None, logits).softmax(dim=-1))
    close(min_p_filter(probs, 0.2), MinPLogitsWarper(0.2)(None, logits).softmax(dim=-1))


def test_filters_are_differentiable():
    probs = rand_probs(4, 2, 6, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: top_k_filter(x, 3), probs)
    assert torch.autograd.gradcheck(lambda x: top_p_filter(x, 0.6), probs)
    assert torch.autograd.gradcheck(lambda x: min_p_filter(x, 0.35), probs)


def test_top_p_keeps_the_token_that_crosses():
    close(top_p_filter(torch.tensor([0.05, 0.3, 0.5, 0.15]), 0.7), [0, 0.375, 0.625, 0])
    # the first token alone crosses
    assert top_p_filter(torch.tensor([0.25, 0.75]), 0.1).tolist() == [0, 1]


def test_top_p_stops_when_the_mass_is_reached_exactly():
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125])
    close(top_p_filter(probs, 0.75), [2 / 3, 1 / 3, 0, 0])
    close(top_p_filter(probs, 0.875), [4 / 7, 2 / 7, 1 / 7, 0])  # and the tie goes to the lower id


def test_top_p_one_keeps_every_token():
    # 0.1 ten times sums to a little more than 1 in float32, and a tail follows
    probs = torch.tensor([0.1] * 10 + [1e-8] * 5)
    assert (top_p_filter(probs, 1.0) > 0).all()


@given(st.integers(0, 10_000), st.integers(2, 12), st.floats(0.01, 0.99))
@settings(max_examples=50, deadline=None)
def test_top_p_is_the_smallest_set_that_reaches_p(seed, vocab, p):
    probs = rand_probs(seed, vocab, dtype=torch.float64)
    kept = probs[top_p_filter(probs, p) > 0]
    assert kept.sum() >= p
    assert kept.sum() - kept.min() < p


@pytest.mark.parametrize("p", [0.0, -0.5, 1.5, math.nan])
def test_top_p_refuses_a_mass_outside_its_range(p):
    with pytest.raises(ValueError, match=f"p={p}"):
        top_p_filter(torch.tensor([0.5, 0.5]), p)


def test_min_p_is_relative_to_the_largest():
    close(min_p_filter(torch.tensor([0.5, 0.25, 0.15, 0.1]), 0.5), [2 / 3, 1 / 3, 0, 0])  # 0.25 is enough
    close(min_p_filter(torch.tensor([0.4, 0.3, 0.3, 0.0]), 1.0), [1.0, 0, 0, 0])
    close(min_p_filter(torch.tensor([0.4, 0.3, 0.3, 0.0]), 0.0), [0.4, 0.3, 0.3, 0.0])
    with pytest.raises(ValueError, match=r"min_p=1\.1"):
        min_p_filter(torch.tensor([0.5, 0.5]), 1.1)


# --- sampling


def test_sampling_distribution_truncates_after_scaling():
    logits = torch.tensor(CAT)
    close(sampling_distribution(logits, temperature=0.5, top_k=2), [0.880, 0.120, 0, 0], atol=1e-3)
    close(sampling_distribution(logits), logits.softmax(dim=-1))


def test_sampling_distribution_gives_top_p_the_renormalised_top_k():
    # top-2 of 0.4, 0.3, 0.2, 0.1 is 0.571, 0.429: p = 0.5 then keeps one token, without it two
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    close(sampling_distribution(logits, top_k=2, top_p=0.5), [1.0, 0, 0, 0])
    close(sampling_distribution(logits, top_p=0.5), [4 / 7, 3 / 7, 0, 0])


def test_sampling_distribution_agrees_with_hugging_face():
    logits = rand(5, 4, 40)
    warped = TemperatureLogitsWarper(1.3)(None, logits)
    warped = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(12)(None, warped))
    close(sampling_distribution(logits, 1.3, 12, 0.8), warped.softmax(dim=-1))


def test_sampling_distribution_at_temperature_zero_is_greedy():
    logits = rand(6, 3, 9)
    want = torch.nn.functional.one_hot(logits.argmax(dim=-1), 9)
    close(sampling_distribution(logits, 0.0, top_k=3, top_p=0.9), want)


def test_sample_from_uniform_inverts_the_cumulative_sum():
    probs = torch.tensor([0.25, 0.0, 0.5, 0.25]).expand(6, 4)
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999])
    assert sample_from_uniform(probs, u).tolist() == [0, 0, 2, 2, 3, 3]


def test_sample_from_uniform_never_draws_an_impossible_token():
    probs = torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0], [0.25, 0.25, 0.25, 0.0]])
    assert sample_from_uniform(probs, torch.tensor([0.0, 0.0, 0.9])).tolist() == [1, 3, 2]
    short = torch.tensor([[0.1] * 9 + [0.0999, 0.0]])  # rounding left the total below u
    assert sample_from_uniform(short, torch.tensor([0.99995])).tolist() == [9]


@pytest.mark.parametrize("dtype", FLOATS)
def test_sample_from_uniform_follows_the_distribution(dtype):
    probs = torch.tensor([0.125, 0.5, 0.0, 0.375], dtype=dtype)
    u = (torch.arange(1000) + 0.5) / 1000
    ids = sample_from_uniform(probs.expand(1000, 4), u)
    assert ids.dtype == torch.int64
    assert torch.bincount(ids, minlength=4).tolist() == [125, 500, 0, 375]


# --- greedy_decode and generate


CYCLE = [[0.0, 3, 1, 2], [0, 1, 3, 2], [2, 1, 0, 3], [3, 2, 1, 0]]  # 0 -> 1 -> 2 -> 3 -> 0


def test_greedy_appends_the_most_probable_token():
    ids = torch.tensor([[0], [2]])
    assert greedy_decode(markov(CYCLE), ids, 3).tolist() == [[0, 1, 2, 3], [2, 3, 0, 1]]
    assert greedy_decode(markov(CYCLE), ids, 0).tolist() == [[0], [2]]


def test_greedy_sees_the_whole_text():
    def counting(ids):  # the next token is the number of tokens that differ from the first
        return -((ids != ids[:, :1]).sum(dim=1, keepdim=True) - torch.arange(5)).abs().float()

    assert greedy_decode(counting, torch.tensor([[4]]), 4).tolist() == [[4, 0, 1, 2, 3]]


def test_greedy_fills_finished_rows_and_stops_when_all_have_finished():
    calls = []

    def next_logits(ids):
        calls.append(ids.shape)
        return markov(CYCLE)(ids)

    out = greedy_decode(next_logits, torch.tensor([[0], [1]]), 10, eos_id=3)
    assert out.tolist() == [[0, 1, 2, 3], [1, 2, 3, 3]]
    assert len(calls) == 3


def test_greedy_ignores_an_eos_in_the_prompt():
    assert greedy_decode(markov(CYCLE), torch.tensor([[3, 0]]), 9, eos_id=3).tolist() == [[3, 0, 1, 2, 3]]


def test_greedy_gives_ties_to_the_lower_id_and_keeps_the_ids_dtype():
    out = greedy_decode(lambda ids: torch.zeros(len(ids), 1000), torch.zeros(2, 1, dtype=torch.int32), 2)
    assert out.tolist() == [[0, 0, 0]] * 2 and out.dtype == torch.int32


def test_generate_at_temperature_zero_is_greedy():
    ids = torch.tensor([[0], [1]])
    for eos_id in (None, 3):
        want = greedy_decode(markov(CYCLE), ids, 6, eos_id=eos_id)
        assert torch.equal(generate(markov(CYCLE), ids, 6, temperature=0.0, eos_id=eos_id), want)
    assert torch.equal(generate(markov(CYCLE), ids, 6, top_k=1), greedy_decode(markov(CYCLE), ids, 6))
    assert torch.equal(generate(markov(CYCLE), ids, 6, top_p=0.1), greedy_decode(markov(CYCLE), ids, 6))


def test_generate_repeats_from_the_generator_alone():
    ids = torch.zeros(3, 1, dtype=torch.int64)
    texts = []
    for global_seed, seed in ((0, 7), (1, 7), (1, 8)):
        torch.manual_seed(global_seed)
        texts.append(generate(markov(CYCLE), ids, 20, generator=torch.Generator().manual_seed(seed)))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[1], texts[2])


def test_generate_draws_rows_independently_from_the_distribution():
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5])
    ids = torch.zeros(8000, 1, dtype=torch.int64)
    out = generate(
        lambda ids: logits.expand(len(ids), 4),
        ids,
        1,
        temperature=0.7,
        top_k=3,
        top_p=0.9,
        generator=torch.Generator().manual_seed(0),
    )
    share = torch.bincount(out[:, 1], minlength=4) / 8000
    # 4 standard deviations of a share of 8000 draws
    close(share, sampling_distribution(logits, 0.7, 3, 0.9), atol=4 * 0.5 / math.sqrt(8000))


def test_generate_ends_rows_with_eos():
    out = generate(
        markov(CYCLE),
        torch.zeros(6, 1, dtype=torch.int64),
        50,
        temperature=1.5,
        eos_id=3,
        generator=torch.Generator().manual_seed(1),
    )
    assert out.shape[1] < 51
    for row in out[:, 1:].tolist():
        assert set(row[row.index(3) :]) == {3}
    # the last column is new for the row that finishes last
    assert (out[:, -2] != 3).any()


# --- beam_search


def every_text(next_logits, prompt, length, vocab, eos_id, length_penalty):
    """All hypotheses with their scores, by exhaustive enumeration."""
    scored = {}
    for tokens in itertools.product(range(vocab), repeat=length):
        if eos_id in tokens:
            tokens = tokens[: tokens.index(eos_id) + 1]
        total = 0.0
        for position, token in enumerate(tokens):
            ids = torch.cat([prompt, torch.tensor([tokens[:position]], dtype=torch.int64)], dim=1)
            total += next_logits(ids)[0].log_softmax(dim=-1)[token].item()
        scored[tokens] = total / len(tokens) ** length_penalty
    return sorted(scored.items(), key=lambda pair: -pair[1])


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("eos_id", [None, 1])
def test_beam_search_with_all_beams_is_exhaustive(eos_id, length_penalty):
    model = markov(rand(8, 3, 3))
    prompt = torch.tensor([[2, 0]])
    want = every_text(model, prompt, 4, 3, eos_id, length_penalty)
    got = beam_search(model, prompt, 81, 4, eos_id=eos_id, length_penalty=length_penalty)
    assert [tuple(ids.tolist()) for ids, _ in got] == [tokens for tokens, _ in want]
    assert [score for _, score in got] == pytest.approx([score for _, score in want], abs=1e-5)


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_one_beam_gives_the_greedy_text(seed):
    model = markov(rand(seed, 5, 5))
    prompt = torch.tensor([[1, 3]])
    text = greedy_decode(model, prompt, 6, eos_id=0)[0, 2:].tolist()
    ((new_ids, score),) = beam_search(model, prompt, 1, 6, eos_id=0, length_penalty=1.0)
    assert new_ids.tolist() == text
    assert isinstance(score, float) and score < 0


def test_beam_search_finds_what_greedy_misses():
    # greedy takes 1 (0.5), after which all is flat; 2 (0.4) leads to a sure token
    table = torch.tensor([[0.1, 0.5, 0.4], [1 / 3, 1 / 3, 1 / 3], [0.98, 0.01, 0.01]]).log()
    model = lambda ids: table[ids[:, -1]]  # noqa: E731
    best, *_ = beam_search(model, torch.tensor([[0]]), 2, 2)
    assert best[0].tolist() == [2, 0]
    assert best[1] == pytest.approx(math.log(0.4 * 0.98), abs=1e-6)
    assert greedy_decode(model, torch.tensor([[0]]), 2).tolist() == [[0, 1, 0]]


def test_beam_search_keeps_finished_hypotheses():
    # the EOS (0) takes 0.4 at once, every other step is flat: ending at once is the most probable text
    table = torch.tensor([[0.4, 0.3, 0.3]] * 3).log()
    got = beam_search(lambda ids: table[ids[:, -1]], torch.tensor([[1]]), 3, 3, eos_id=0)
    assert got[0][0].tolist() == [0]
    assert len(got) == 3
    # the mean log-probability prefers the longer text that ends with 0.9
    table = torch.tensor([[0.4, 0.6], [0.9, 0.1]]).log()
    model = lambda ids: table[ids[:, -1]]  # noqa: E731
    by_sum = beam_search(model, torch.tensor([[0]]), 2, 3, eos_id=0)
    assert by_sum[0][1] == pytest.approx(math.log(0.6 * 0.9), abs=1e-6)


def test_length_penalty_prefers_longer_texts():
    table = torch.tensor([[0.5, 0.5], [0.45, 0.55]]).log()
    model = lambda ids: table[ids[:, -1]]  # noqa: E731
    short = beam_search(model, torch.tensor([[0]]), 8, 3, eos_id=0, length_penalty=0.0)[0][0]
    long = beam_search(model, torch.tensor([[0]]), 8, 3, eos_id=0, length_penalty=1.0)[0][0]
    assert short.tolist() == [0]
    assert long.tolist() == [1, 1, 1]


def test_beam_search_edges():
    model = markov(CYCLE)
    ((new_ids, score),) = beam_search(model, torch.tensor([[0]]), 2, 0, length_penalty=1.0)
    assert new_ids.tolist() == [] and score == 0.0
    impossible = lambda ids: torch.tensor([[0.0, -torch.inf, 0.0]]).expand(len(ids), 3)  # noqa: E731
    assert [ids.tolist() for ids, _ in beam_search(impossible, torch.tensor([[0]]), 3, 1)] == [[0], [2]]
    with pytest.raises(ValueError, match="beams=0"):
        beam_search(model, torch.tensor([[0]]), 0, 2)


# --- repetition


@pytest.mark.parametrize("dtype", FLOATS)
def test_repetition_penalty_agrees_with_hugging_face(dtype):
    logits = rand(9, 2, 12, dtype=dtype)
    ids = torch.tensor([[1, 5, 5, 0], [11, 11, 11, 2]])
    got = repetition_penalty(logits, ids, 1.3)
    assert got.dtype == dtype
    close(got, RepetitionPenaltyLogitsProcessor(1.3)(ids, logits))


def test_repetition_penalty_lowers_both_signs_once():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0]], requires_grad=True)
    got = repetition_penalty(logits, torch.tensor([[0, 1, 1, 3]]), 2.0)
    assert got.tolist() == [[1.0, -4.0, 1.0, 0.0]]
    got[0, :3].sum().backward()
    assert logits.grad.tolist() == [[0.5, 2.0, 1.0, 0.0]]
    assert logits.tolist() == [[2.0, -2.0, 1.0, 0.0]]
    nothing = repetition_penalty(logits, torch.empty(1, 0, dtype=torch.int64), 2.0)
    assert torch.equal(nothing, logits)
    with pytest.raises(ValueError, match="penalty=0"):
        repetition_penalty(logits, torch.tensor([[0]]), 0.0)


def test_distinct_n_counts_overlapping_ngrams():
    text = [1, 2, 1, 2, 3]
    assert distinct_n(text, 1) == 3 / 5
    assert distinct_n(text, 2) == 3 / 4
    assert distinct_n(torch.tensor(text), 2) == 3 / 4
    assert distinct_n(torch.tensor([4] * 10), 3) == 1 / 8


def test_distinct_n_without_ngrams_is_zero():
    for value in (
        distinct_n([1, 2], 3),
        distinct_n([], 1),
        distinct_n(torch.tensor([], dtype=torch.int64), 2),
    ):
        assert value == 0.0 and isinstance(value, float)
    with pytest.raises(ValueError, match="n=0"):
        distinct_n([1, 2], 0)


# --- speculative_accept


def test_speculative_accept_by_hand():
    target = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.2, 0.6]])
    draft = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.3, 0.6]])
    ids = torch.tensor([0, 1])
    # draft 0: p/q = 0.625; draft 1: p/q = 1/3
    count, probs = speculative_accept(target, draft, ids, torch.tensor([0.7, 0.0]))
    assert count == 0
    close(probs, [0, 2 / 3, 1 / 3])
    count, probs = speculative_accept(target, draft, ids, torch.tensor([0.6, 0.4]))
    assert count == 1
    close(probs, [0.0, 0.0, 1.0])
    count, probs = speculative_accept(target, draft, ids, torch.tensor([0.6, 0.3]))
    assert count == 2 and isinstance(count, int)
    close(probs, target[2])


def test_speculative_accept_rejects_at_the_ratio_and_at_zero():
    target = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    draft = torch.tensor([[0.5, 0.5]])
    assert speculative_accept(target, draft, torch.tensor([0]), torch.tensor([0.5]))[0] == 0
    impossible = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    assert speculative_accept(impossible, draft, torch.tensor([0]), torch.tensor([0.0]))[0] == 0
    # a draft of zero probability under the draft model does not divide by 0
    sure = torch.tensor([[0.0, 1.0]])
    assert speculative_accept(target, sure, torch.tensor([0]), torch.tensor([0.9]))[0] == 1


def test_speculative_accept_without_drafts_returns_the_target_row():
    none = torch.empty(0)
    count, probs = speculative_accept(torch.tensor([[0.3, 0.7]]), torch.empty(0, 2), none.long(), none)
    assert count == 0
    close(probs, [0.3, 0.7])


def test_speculative_sampling_follows_the_target_exactly():
    """Sums over the draft's token and integrates over u: the first token's law is the target's row."""
    target, draft = rand_probs(10, 2, 5, dtype=torch.float64), rand_probs(11, 1, 5, dtype=torch.float64)
    law = torch.zeros(5, dtype=torch.float64)
    for token in range(5):
        accept = min(1.0, (target[0, token] / draft[0, token]).item())
        ids = torch.tensor([token])
        low, high = torch.tensor([0.999 * accept]).double(), torch.tensor([0.5 + accept / 2]).double()
        assert speculative_accept(target, draft, ids, low)[0] == 1
        law[token] += draft[0, token] * accept
        if accept < 1:
            count, residual = speculative_accept(target, draft, ids, high)
            assert count == 0
            law += draft[0, token] * (1 - accept) * residual
    close(law, target[0])


@pytest.mark.parametrize("dtype", FLOATS)
def test_speculative_accept_keeps_the_dtype(dtype):
    target, draft = rand_probs(12, 3, 6, dtype=dtype), rand_probs(13, 2, 6, dtype=dtype)
    ids = draft.argmax(dim=-1)
    _, probs = speculative_accept(target, draft, ids, torch.tensor([0.99, 0.99]))
    assert probs.dtype == dtype
    close(probs.double().sum(), 1.0, atol=4 * TOLERANCE[dtype])


def test_speculative_accept_is_differentiable():
    target = rand_probs(14, 3, 5, dtype=torch.float64).requires_grad_()
    draft = rand_probs(15, 2, 5, dtype=torch.float64).requires_grad_()
    ids = (draft - target[:2]).argmax(dim=-1)
    u = torch.tensor([0.999, 0.999], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda t, d: speculative_accept(t, d, ids, u)[1], (target, draft))


def test_speculative_accept_survives_rows_that_differ_by_rounding():
    target = torch.tensor([[0.4995, 0.5], [0.5, 0.5]], dtype=torch.float16)
    draft = torch.tensor([[0.5, 0.5]], dtype=torch.float16)
    count, probs = speculative_accept(target, draft, torch.tensor([0]), torch.tensor([0.99999]))
    assert count == 0 and not probs.isnan().any()


def test_speculative_accept_refuses_a_missing_target_row():
    with pytest.raises(ValueError, match="2 rows for 2 drafts"):
        speculative_accept(
            torch.full((2, 2), 0.5), torch.full((2, 2), 0.5), torch.tensor([0, 1]), torch.zeros(2)
        )
