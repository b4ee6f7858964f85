"""Facts about the masks: the lecture's numbers, laws, torch and Hugging Face as witnesses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from course_llm.masking import (
    causal_mask,
    causal_mask_with_past,
    causal_padding_mask,
    causal_self_attention,
    document_mask,
    find_leaks,
    masked_softmax,
    padding_mask,
    prefix_lm_mask,
    sliding_window_mask,
)

INF = math.inf
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# half precision: 2^-11 and 2^-8 relative, a few roundings each
ATOL = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-6, torch.float64: 1e-12}


def additive(mask: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the additive form of a boolean mask."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -INF)


def rows(text: str) -> torch.Tensor:
    """Reads a boolean mask drawn with x (may attend) and . (may not)."""
    return torch.tensor([[c == "x" for c in row] for row in text.split()])


# causal_mask


def test_causal_mask_of_the_automaton_sentence():
    expected = [[0, -INF, -INF, -INF], [0, 0, -INF, -INF], [0, 0, 0, -INF], [0, 0, 0, 0]]
    assert causal_mask(4).tolist() == expected


def test_causal_mask_equals_that_of_torch():
    assert torch.equal(causal_mask(7), torch.nn.Transformer.generate_square_subsequent_mask(7))


@pytest.mark.parametrize("dtype", FLOATS)
def test_causal_mask_has_the_dtype_asked_for_and_true_infinities(dtype):
    mask = causal_mask(5, dtype)
    assert mask.dtype == dtype
    assert mask.isneginf().sum() == 10
    assert (mask == 0).sum() == 15


def test_causal_mask_defaults_to_float32():
    assert causal_mask(1).dtype == torch.float32
    assert causal_mask(1).tolist() == [[0.0]]


@pytest.mark.parametrize("n", [0, -1])
def test_causal_mask_refuses_no_tokens(n):
    with pytest.raises(ValueError, match="causal_mask"):
        causal_mask(n)


def test_causal_mask_refuses_a_dtype_without_infinity():
    with pytest.raises(ValueError, match="floating-point"):
        causal_mask(3, torch.int64)


# masked_softmax


def test_masked_softmax_gives_the_weights_of_the_lecture():
    # the scores are ours, chosen to give the lecture's weights; the lecture prints no row "an"
    scores = torch.tensor(
        [[1.1, 0.4, 0.7, 0.3], [0.2, 1.0, 0.9, 0.4], [0.5, 0.3, 1.2, 2.0], [0.104, 0.6, 1.002, 1.8]]
    )
    weights = masked_softmax(scores, causal_mask(4))
    assert weights[0].tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(weights[1], torch.tensor([0.310, 0.690, 0, 0]), atol=5e-4, rtol=0)
    torch.testing.assert_close(weights[3], torch.tensor([0.095, 0.156, 0.233, 0.517]), atol=5e-4, rtol=0)
    assert (weights.triu(1) == 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(4, 4), (2, 3, 5), (2, 3, 4, 4)])
def test_masked_softmax_equals_softmax_where_every_row_has_a_key(dtype, shape):
    torch.manual_seed(0)
    scores = torch.randn(shape, dtype=torch.float64)
    allowed = torch.rand(shape[-2:]) < 0.6
    allowed[:, 0] = True
    expected = torch.softmax(scores.to(dtype).double() + additive(allowed).double(), -1)
    got = masked_softmax(scores.to(dtype), additive(allowed, dtype))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=ATOL[dtype], rtol=0)


def test_masked_softmax_broadcasts_a_mask_over_batch_and_heads():
    torch.manual_seed(1)
    scores = torch.randn(2, 3, 4, 4)
    per_row = torch.rand(2, 1, 1, 4) < 0.5
    weights = masked_softmax(scores, additive(per_row))
    assert torch.equal(weights != 0, per_row.expand(2, 3, 4, 4))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_without_keys_is_zero_and_so_is_its_gradient(dtype):
    torch.manual_seed(2)
    scores = torch.randn(3, 4).to(dtype).requires_grad_()
    allowed = torch.tensor([[True] * 4, [False] * 4, [True, False, False, True]])
    weights = masked_softmax(scores, additive(allowed, dtype))
    assert weights[1].tolist() == [0] * 4
    (weights * torch.arange(4).to(dtype)).sum().backward()
    assert scores.grad[1].tolist() == [0] * 4
    assert scores.grad.isfinite().all()
    assert (scores.grad[2] != 0).tolist() == [True, False, False, True]


def test_scaled_dot_product_attention_of_torch_also_gives_zero_for_a_row_without_keys():
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 1, 1, 4, 8).unbind()
    allowed = torch.tensor([[True] * 4, [False] * 4, [True, False, False, True], [False, True, True, True]])
    ours = masked_softmax(q @ k.mT / math.sqrt(8), additive(allowed)) @ v
    torch.testing.assert_close(
        ours, F.scaled_dot_product_attention(q, k, v, attn_mask=allowed), atol=1e-6, rtol=0
    )


def test_masked_softmax_has_the_right_gradient():
    torch.manual_seed(4)
    scores = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    mask = causal_mask(3, torch.float64)
    assert torch.autograd.gradcheck(lambda s: masked_softmax(s, mask), scores)


def test_masked_softmax_survives_large_scores_also_behind_the_mask():
    scores = torch.tensor([[0.0, 1.0, 1e4], [-1e4, -1e4, 1e4]])
    weights = masked_softmax(scores, torch.tensor([0.0, 0.0, -INF]))
    e = math.e
    torch.testing.assert_close(weights, torch.tensor([[1 / (1 + e), e / (1 + e), 0], [0.5, 0.5, 0]]))


def test_masked_softmax_ignores_a_masked_score_that_is_not_a_number():
    weights = masked_softmax(
        torch.tensor([[0.0, INF], [math.nan, 0.0]]), torch.tensor([[0.0, -INF], [-INF, 0.0]])
    )
    assert weights.tolist() == [[1, 0], [0, 1]]


def test_masked_softmax_leaves_its_arguments_alone():
    scores, mask = torch.ones(2, 2), torch.full((2, 2), -INF)
    masked_softmax(scores, mask)
    assert scores.tolist() == [[1, 1], [1, 1]]
    assert mask.isneginf().all()


@pytest.mark.parametrize(
    "mask", [torch.zeros(3, 5), torch.zeros(2, 2, 4, 4), torch.ones(4, 4, dtype=torch.bool)]
)
def test_masked_softmax_refuses_a_mask_that_does_not_fit(mask):
    with pytest.raises((ValueError, TypeError), match="masked_softmax"):
        masked_softmax(torch.zeros(4, 4), mask)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 5))
def test_rows_of_masked_softmax_sum_to_one_or_are_empty(seed, queries, keys):
    g = torch.Generator().manual_seed(seed)
    allowed = torch.rand(queries, keys, generator=g) < 0.5
    sums = masked_softmax(torch.randn(queries, keys, generator=g), additive(allowed)).sum(-1)
    torch.testing.assert_close(sums, allowed.any(-1).float())


# causal_self_attention


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4), (2, 3, 5, 4), (1, 1, 1, 8)])
def test_causal_self_attention_equals_that_of_torch(dtype, shape):
    torch.manual_seed(5)
    q, k, v = torch.randn(3, *shape).to(dtype).unbind()
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    got = causal_self_attention(q, k, v)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=ATOL[dtype], rtol=0)


def test_outputs_have_no_gradient_towards_later_inputs():
    torch.manual_seed(6)
    q, k, v = (torch.randn(2, 6, 4, requires_grad=True) for _ in range(3))
    for i in range(6):
        for gradient in torch.autograd.grad(causal_self_attention(q, k, v)[:, i].sum(), (q, k, v)):
            assert (gradient[:, i + 1 :] == 0).all()
        assert (torch.autograd.grad(causal_self_attention(q, k, v)[:, i].sum(), v)[0][:, : i + 1] != 0).all()


def test_the_first_token_can_only_repeat_its_own_value():
    torch.manual_seed(7)
    q, k, v = torch.randn(3, 4, 8).unbind()
    torch.testing.assert_close(causal_self_attention(q, k, v)[0], v[0])


def test_causal_self_attention_has_the_right_gradient():
    torch.manual_seed(8)
    q, k, v = (torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(causal_self_attention, (q, k, v))


# causal_mask_with_past


def test_the_last_query_sees_every_key():
    assert torch.equal(causal_mask_with_past(2, 5), rows("xxxx. xxxxx"))
    assert causal_mask_with_past(1, 5).all()


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 4), (3, 3), (2, 7), (5, 6)])
def test_causal_mask_with_past_is_the_last_rows_of_the_square_mask(queries, keys):
    square = causal_mask(keys) == 0
    assert torch.equal(causal_mask_with_past(queries, keys), square[-queries:])


def test_causal_mask_with_past_equals_the_lower_right_bias_of_torch():
    from torch.nn.attention.bias import causal_lower_right

    assert torch.equal(causal_mask_with_past(3, 8), causal_lower_right(3, 8)._materialize("cpu"))


@pytest.mark.parametrize(("queries", "keys"), [(3, 2), (1, 0), (0, 3)])
def test_causal_mask_with_past_refuses_more_queries_than_keys(queries, keys):
    with pytest.raises(ValueError, match="causal_mask_with_past"):
        causal_mask_with_past(queries, keys)


# padding


def test_padding_mask_marks_the_real_tokens():
    assert torch.equal(padding_mask(torch.tensor([2, 0, 4]), 4), rows("xx.. .... xxxx"))
    assert torch.equal(padding_mask(torch.tensor([2], dtype=torch.int32), 3), rows("xx."))


def test_padding_mask_counts_back_to_the_lengths():
    lengths = torch.tensor([1, 5, 3, 0])
    assert torch.equal(padding_mask(lengths, 6).sum(1), lengths)


@pytest.mark.parametrize("lengths", [[5], [-1], [2, 9]])
def test_padding_mask_refuses_lengths_that_do_not_fit(lengths):
    with pytest.raises(ValueError, match="padding_mask"):
        padding_mask(torch.tensor(lengths), 4)


def test_causal_padding_mask_hides_padding_keys_and_the_future():
    got = causal_padding_mask(rows("xx. .xx"))
    assert got.shape == (2, 1, 3, 3)
    assert torch.equal(got[0, 0], rows("x.. xx. xx."))
    assert torch.equal(got[1, 0], rows("... .x. .xx"))


def test_causal_padding_mask_equals_that_of_hugging_face():
    masking_utils = pytest.importorskip("transformers.masking_utils")
    real = rows("xxxx. .xxxx xxxxx xx...")
    theirs = masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.padding_mask_function(real)
    )
    ours = causal_padding_mask(real)
    for b, i, j in torch.cartesian_prod(torch.arange(4), torch.arange(5), torch.arange(5)):
        assert bool(theirs(b, 0, i, j)) == bool(ours[b, 0, i, j])


def test_padding_does_not_change_the_outputs_of_real_tokens():
    torch.manual_seed(9)
    q, k, v = torch.randn(3, 1, 1, 6, 4).unbind()
    real = torch.tensor([[False, False, True, True, True, True]])
    padded = masked_softmax(q @ k.mT / 2, additive(causal_padding_mask(real))) @ v
    alone = causal_self_attention(*(t[:, :, 2:] for t in (q, k, v)))
    torch.testing.assert_close(padded[:, :, 2:], alone)
    assert (padded[:, :, :2] == 0).all()


# windows, documents, prefixes


def test_sliding_window_counts_the_token_itself():
    assert torch.equal(sliding_window_mask(4, 2), rows("x... xx.. .xx. ..xx"))
    assert torch.equal(sliding_window_mask(4, 1), torch.eye(4, dtype=torch.bool))
    assert torch.equal(sliding_window_mask(4, 9), causal_mask(4) == 0)


def test_sliding_window_equals_that_of_hugging_face():
    masking_utils = pytest.importorskip("transformers.masking_utils")
    theirs = masking_utils.sliding_window_causal_mask_function(3)
    i, j = torch.arange(7)[:, None], torch.arange(7)
    assert torch.equal(sliding_window_mask(7, 3), theirs(0, 0, i, j))


@pytest.mark.parametrize(("n", "window"), [(4, 0), (4, -2), (0, 1)])
def test_sliding_window_refuses_an_empty_window(n, window):
    with pytest.raises(ValueError, match="sliding_window_mask"):
        sliding_window_mask(n, window)


def test_documents_do_not_see_each_other():
    assert torch.equal(document_mask(torch.tensor([7, 7, 3, 3])), rows("x... xx.. ..x. ..xx"))


def test_document_mask_keeps_every_batch_axis():
    ids = torch.tensor([[0, 0, 1, 2], [5, 5, 5, 5], [1, 0, 0, 0]])
    got = document_mask(ids.reshape(3, 1, 4))
    assert got.shape == (3, 1, 4, 4)
    for row, mask in zip(ids, got[:, 0], strict=True):
        blocks = [
            torch.ones(int(c), int(c)).tril() for c in torch.unique_consecutive(row, return_counts=True)[1]
        ]
        assert torch.equal(mask, torch.block_diag(*blocks).bool())


def test_the_prefix_sees_itself_whole():
    assert torch.equal(prefix_lm_mask(4, 2), rows("xx.. xx.. xxx. xxxx"))
    assert torch.equal(prefix_lm_mask(4, 0), causal_mask(4) == 0)
    assert torch.equal(prefix_lm_mask(4, 1), causal_mask(4) == 0)
    assert prefix_lm_mask(4, 4).all()


@pytest.mark.parametrize(("n", "prefix"), [(4, 5), (4, -1), (0, 0)])
def test_prefix_lm_mask_refuses_a_prefix_that_does_not_fit(n, prefix):
    with pytest.raises(ValueError, match="prefix_lm_mask"):
        prefix_lm_mask(n, prefix)


# find_leaks


def table_model(weights: torch.Tensor, seed: int = 0, vocab: int = 5):
    """Makes output i the weighted sum (row i of `weights`) of vectors that stand for the tokens."""
    vectors = torch.randn(vocab, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def model(ids):
        return weights.double() @ vectors[ids]

    return model


def test_find_leaks_sees_exactly_the_entries_above_the_diagonal():
    g = torch.Generator().manual_seed(10)
    for _ in range(5):
        weights = (torch.rand(6, 6, generator=g) < 0.4).double()
        got = find_leaks(table_model(weights), torch.randint(5, (1, 6), generator=g))
        assert torch.equal(got, weights.triu(1).bool())


def test_find_leaks_acquits_causal_self_attention_and_convicts_plain_attention():
    table = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    ids = torch.tensor([[0, 3, 1, 4]])

    def plain(ids):
        return F.scaled_dot_product_attention(table[ids], table[ids], table[ids])

    assert not find_leaks(lambda ids: causal_self_attention(table[ids], table[ids], table[ids]), ids).any()
    leaks = find_leaks(plain, ids)
    assert torch.equal(leaks, torch.ones(4, 4).triu(1).bool())


def test_a_mask_after_the_softmax_leaks_through_the_denominator():
    table = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(12))

    def model(ids):
        x = table[ids]
        return torch.softmax(x @ x.mT, -1).tril() @ x

    assert find_leaks(model, torch.tensor([[0, 3, 1]]))[0].tolist() == [False, True, True]


@pytest.mark.parametrize("token", range(4))
def test_find_leaks_tries_every_other_token(token):
    def model(ids):  # position 0 notices one token only, and only at position 2
        return (ids[:, 2] == token).double()[:, None, None] * torch.ones(1, 3, 4)

    expected = torch.zeros(3, 3, dtype=torch.bool)
    expected[:2, 2] = True
    assert torch.equal(find_leaks(model, torch.tensor([[0, 0, 1]])), expected)


@pytest.mark.parametrize(("size", "leaks"), [(1e-7, False), (1e-5, True), (-1e-5, True)])
def test_find_leaks_counts_changes_above_a_millionth(size, leaks):
    def model(ids):
        logits = torch.full((len(ids), 2, 3), 7.0, dtype=torch.float64)
        logits[:, 0, 2] += size * ids[:, 1]
        return logits

    assert bool(find_leaks(model, torch.tensor([[0, 0]]))[0, 1]) is leaks


def test_find_leaks_leaves_the_text_alone_and_handles_one_token():
    ids = torch.tensor([[1, 2, 0]])
    find_leaks(table_model(torch.ones(3, 3)), ids)
    assert ids.tolist() == [[1, 2, 0]]
    assert find_leaks(table_model(torch.ones(1, 1)), torch.tensor([[2]])).tolist() == [[False]]
    assert not find_leaks(lambda ids: torch.zeros(len(ids), 2, 1), torch.tensor([[0, 0]])).any()


def test_find_leaks_refuses_a_batch():
    with pytest.raises((ValueError, TypeError), match="find_leaks"):
        find_leaks(table_model(torch.ones(3, 3)), torch.zeros(2, 3, dtype=torch.int64))
