"""Facts about the loss chapter's reference: hand values, laws, torch.nn.functional, Hugging Face."""

import inspect
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from course_llm import loss
from course_llm.regularized_loss import chunked_regularized_cross_entropy, regularized_cross_entropy

HALF = (torch.float16, torch.bfloat16)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Relative and absolute: a few units in the last place of numbers of order one.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6, torch.float64: 1e-12}


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def randint(high, *shape, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def agree(got, want, dtype=torch.float64):
    want = torch.as_tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def unchecked(function):
    """The function as shipped: the test run's shape annotations stand in front of our own ValueErrors."""
    return inspect.unwrap(function)


# log_softmax


def test_log_softmax_is_stable_where_softmax_underflows():
    assert loss.log_softmax(torch.tensor([0.0, 200.0])).tolist() == [-200.0, 0.0]
    assert loss.log_softmax(torch.tensor([-1e4, 1e4])).tolist() == [-2e4, 0.0]
    assert loss.log_softmax(torch.tensor([1e30, 0.0])).tolist() == [0.0, -torch.tensor(1e30).item()]


def test_log_softmax_of_a_forbidden_token():
    logits = torch.tensor([0.0, -math.inf, 0.0], requires_grad=True)
    log_probs = loss.log_softmax(logits)
    agree(log_probs[[0, 2]], torch.tensor([-math.log(2)] * 2), torch.float32)
    assert log_probs[1] == -math.inf
    log_probs[0].backward()
    agree(logits.grad, torch.tensor([0.5, 0.0, -0.5]), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_log_softmax_equals_torch(shape, dtype):
    logits = 3 * randn(*shape, dtype=dtype)
    got = loss.log_softmax(logits)
    assert got.dtype == dtype
    agree(got, F.log_softmax(logits.double(), dim=-1), dtype)


def test_log_softmax_gradient_equals_torch():
    logits, weight = randn(3, 5).requires_grad_(), randn(3, 5, seed=1)
    (got,) = torch.autograd.grad((loss.log_softmax(logits) * weight).sum(), logits)
    (want,) = torch.autograd.grad((F.log_softmax(logits, dim=-1) * weight).sum(), logits)
    agree(got, want)


# cross_entropy


def test_cross_entropy_of_the_lecture():
    probs = torch.tensor([0.55, 0.2, 0.15, 0.1], dtype=torch.float64)
    agree(loss.cross_entropy(probs.log(), torch.tensor(0)), -math.log(0.55))
    probs = torch.tensor([0.01, 0.99], dtype=torch.float64)
    assert round(loss.cross_entropy(probs.log(), torch.tensor(0)).item(), 1) == 4.6


def test_uniform_logits_cost_ln_vocab():
    agree(loss.cross_entropy(torch.zeros(3, 7).double(), torch.tensor([0, 3, 6])), math.log(7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 2, 3)])
def test_cross_entropy_equals_torch(shape, dtype):
    logits, targets = randn(*shape, 7, dtype=dtype), randint(7, *shape)
    got = loss.cross_entropy(logits, targets)
    assert got.dtype == dtype and got.shape == ()
    agree(got, F.cross_entropy(logits.double().reshape(-1, 7), targets.reshape(-1)), dtype)


@pytest.mark.parametrize("ignore_index", [-100, 0, 3, 99])
def test_ignored_targets_count_neither_above_nor_below(ignore_index):
    logits, targets = randn(2, 4, 7).requires_grad_(), randint(7, 2, 4)
    targets[0, 1:3] = ignore_index
    got = loss.cross_entropy(logits, targets, ignore_index)
    want = F.cross_entropy(logits.reshape(-1, 7), targets.reshape(-1), ignore_index=ignore_index)
    agree(got, want)
    for a, b in zip(torch.autograd.grad(got, logits), torch.autograd.grad(want, logits), strict=True):
        agree(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_without_targets_is_zero_and_so_is_its_gradient(dtype):
    logits = randn(3, 5, dtype=dtype).requires_grad_()
    value = loss.cross_entropy(logits, torch.full((3,), -100))
    value.backward()
    assert value.item() == 0 and torch.equal(logits.grad, torch.zeros_like(logits))


def test_cross_entropy_of_many_half_precision_rows_is_summed_in_float32():
    # the sum, 20,000 * ln 64, is past the largest float16
    value = loss.cross_entropy(torch.zeros(20_000, 64, dtype=torch.float16), torch.zeros(20_000).long())
    agree(value, math.log(64), torch.float16)


def test_targets_outside_the_vocabulary_are_refused():
    logits = torch.zeros(2, 5)
    for bad in (5, -1, -100):
        with pytest.raises(ValueError, match=f"got target={bad}"):
            loss.cross_entropy(logits, torch.tensor([0, bad]), ignore_index=-7)
    for function in (loss.next_token_loss, loss.sequence_log_prob):
        with pytest.raises(ValueError, match=function.__name__):
            function(logits[None], torch.tensor([[0, 5]]))
    with pytest.raises(ValueError, match="cross_entropy_gradient"):
        loss.cross_entropy_gradient(logits, torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="chunked_cross_entropy"):
        loss.chunked_cross_entropy(torch.zeros(2, 3), torch.zeros(3, 5), torch.tensor([0, 5]), 1)


def test_shapes_that_do_not_fit_are_refused():
    logits, ids = torch.zeros(2, 4, 5), torch.zeros(2, 3).long()
    for function in (loss.cross_entropy, loss.next_token_loss, loss.sequence_log_prob):
        with pytest.raises(ValueError, match="one target per row"):
            unchecked(function)(logits, ids)
    with pytest.raises(ValueError, match="one count per sum"):
        unchecked(loss.perplexity)(torch.zeros(2), torch.ones(3).long())
    with pytest.raises(ValueError, match="one target per row"):
        unchecked(loss.chunked_cross_entropy)(torch.zeros(2, 3), torch.zeros(3, 5), torch.zeros(3).long(), 1)


# shift, next-token loss, sequence probability


def test_shift_pairs_each_token_with_the_one_before_it():
    inputs, targets = loss.shift_for_next_token(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert inputs.tolist() == [[1, 2], [4, 5]] and targets.tolist() == [[2, 3], [5, 6]]
    inputs, targets = loss.shift_for_next_token(torch.tensor([[7]]))
    assert inputs.shape == targets.shape == (1, 0)


def test_next_token_loss_equals_hugging_face():
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits, ids = randn(2, 6, 11, dtype=torch.float32), randint(11, 2, 6)
    labels = ids.clone()
    labels[:, 4:] = -100
    want = ForCausalLMLoss(logits, labels, vocab_size=11)
    ids[:, 4:], ids[:, :4] = 9, ids[:, :4] % 9
    labels[:, :4] = ids[:, :4]
    want = ForCausalLMLoss(logits, labels, vocab_size=11)
    agree(loss.next_token_loss(logits, ids, pad_id=9), want, torch.float32)


@pytest.mark.parametrize("pad_id", [None, 0, 4])
def test_next_token_loss_drops_padded_targets_not_padded_inputs(pad_id):
    logits = randn(2, 4, 5)
    ids = torch.tensor([[4, 0, 2, 0], [1, 4, 4, 3]])  # padding left, right and inside
    log_probs = F.log_softmax(logits, dim=-1)
    terms = [
        -log_probs[row, t, ids[row, t + 1]]
        for row in range(2)
        for t in range(3)
        if pad_id is None or ids[row, t + 1] != pad_id
    ]
    agree(loss.next_token_loss(logits, ids, pad_id), torch.stack(terms).mean())


@pytest.mark.parametrize("dtype", DTYPES)
def test_next_token_loss_without_targets_is_zero(dtype):
    one_token = loss.next_token_loss(randn(2, 1, 5, dtype=dtype), randint(5, 2, 1))
    all_padding = loss.next_token_loss(randn(2, 3, 5, dtype=dtype), torch.full((2, 3), 2), pad_id=2)
    assert one_token.item() == all_padding.item() == 0
    assert one_token.dtype == all_padding.dtype == dtype


def toy_logits(ids, vocab=3):
    """A causal model: logits depend on the position and on all tokens so far."""
    position = torch.arange(ids.shape[1])
    state = (ids * (position + 1)).cumsum(dim=1) + 5 * position
    return torch.sin(state.unsqueeze(-1) * torch.arange(1, vocab + 1).double()) * 2


def test_probabilities_of_all_continuations_sum_to_one():
    texts = torch.tensor([[2, *rest] for rest in itertools.product(range(3), repeat=3)])
    agree(loss.sequence_log_prob(toy_logits(texts), texts).exp().sum(), 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequence_log_prob_is_minus_the_summed_loss(dtype):
    logits, ids = randn(3, 4, 5, dtype=dtype), randint(5, 3, 4)
    got = loss.sequence_log_prob(logits, ids)
    assert got.dtype == dtype
    want = -F.cross_entropy(logits.double()[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").sum(-1)
    agree(got, want, dtype)


def test_sequence_log_prob_gradient_and_single_tokens():
    logits, ids = randn(2, 3, 5).requires_grad_(), randint(5, 2, 3)
    assert torch.autograd.gradcheck(lambda x: loss.sequence_log_prob(x, ids), logits)
    assert loss.sequence_log_prob(logits[:, :1], ids[:, :1]).tolist() == [0, 0]


# perplexity, bits per byte


def test_perplexity_of_a_uniform_model_is_the_vocabulary():
    sums = torch.tensor([3, 5, 0], dtype=torch.float64) * math.log(50)
    agree(loss.perplexity(sums, torch.tensor([3, 5, 0])), 50.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_perplexity_weighs_batches_by_their_tokens(dtype):
    got = loss.perplexity(torch.tensor([1.0, 12.0, 0.0], dtype=dtype), torch.tensor([1, 3, 0]))
    assert got.dtype == dtype and got.shape == ()
    agree(got, math.exp(13 / 4), dtype)


def test_perplexity_of_nothing_is_nan_and_its_gradient_is_that_of_exp():
    assert loss.perplexity(torch.zeros(2), torch.zeros(2).long()).isnan()
    sums = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: loss.perplexity(x, torch.tensor([2, 3])), sums)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_per_byte_counts_utf8_bytes(dtype):
    # 8 bytes: 2 for the Greek letter, 4 for the emoji, 1 each for the space and the newline
    got = loss.bits_per_byte(torch.tensor(16 * math.log(2), dtype=dtype), "α 🧬\n")
    assert got.dtype == dtype
    agree(got, 2.0, dtype)
    with pytest.raises(ValueError, match="at least one byte"):
        loss.bits_per_byte(torch.tensor(1.0), "")


def test_bits_per_byte_is_differentiable():
    nll = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    loss.bits_per_byte(nll, "abc").backward()
    agree(nll.grad, 1 / (3 * math.log(2)))


# gradient


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_gradient_equals_autograd(dtype):
    logits, targets = randn(4, 6, dtype=dtype), randint(6, 4)
    with torch.no_grad():
        got = loss.cross_entropy_gradient(logits, targets)
    assert got.dtype == dtype and not got.requires_grad
    wide = logits.double().requires_grad_()
    (want,) = torch.autograd.grad(F.cross_entropy(wide, targets), wide)
    agree(got, want, dtype)


def test_cross_entropy_gradient_is_differentiable_and_sums_to_zero():
    logits, targets = randn(3, 4).requires_grad_(), randint(4, 3)
    assert torch.autograd.gradcheck(lambda x: loss.cross_entropy_gradient(x, targets), logits)
    agree(loss.cross_entropy_gradient(logits, targets).sum(-1), torch.zeros(3))


# teacher forcing, free running


def test_teacher_forcing_is_the_argmax_after_the_true_tokens():
    ids = randint(3, 4, 6)
    got = loss.teacher_forced_predictions(toy_logits, ids)
    for t in range(6):
        assert torch.equal(got[:, t], toy_logits(ids[:, : t + 1])[:, -1].argmax(-1))


@pytest.mark.parametrize("prompt_length", [1, 2, 5, 6])
def test_free_running_reads_its_own_predictions(prompt_length):
    ids = randint(3, 4, 6)
    got = loss.free_running_predictions(toy_logits, ids, prompt_length)
    read = ids.clone()
    for t in range(6):
        if t >= prompt_length:
            read[:, t] = got[:, t - 1]
        assert torch.equal(got[:, t], toy_logits(read[:, : t + 1])[:, -1].argmax(-1))
    assert got.shape == ids.shape


def test_the_two_agree_only_while_the_model_is_right():
    ids = randint(3, 8, 6, seed=1)
    forced = loss.teacher_forced_predictions(toy_logits, ids)
    free = loss.free_running_predictions(toy_logits, ids, 1)
    assert torch.equal(free[:, 0], forced[:, 0]) and not torch.equal(free, forced)
    assert torch.equal(loss.free_running_predictions(toy_logits, ids, 6), forced)


def test_free_running_refuses_an_impossible_prompt():
    for prompt_length in (0, 4):
        with pytest.raises(ValueError, match=f"got prompt_length={prompt_length}"):
            loss.free_running_predictions(toy_logits, torch.zeros(1, 3).long(), prompt_length)


# sliding window


def brute_force_windows(model, ids, window, stride):
    """Scores token t in the first window that has t among its targets, one token at a time."""
    n = ids.shape[1]
    last = max(0, n - window)
    starts = [s for s in range(0, last, stride)] + [last]
    total = 0.0
    for t in range(1, n):
        start = next(s for s in starts if s < t < s + window)
        log_probs = F.log_softmax(model(ids[:, start : start + window]), dim=-1)
        total -= log_probs[0, t - 1 - start, ids[0, t]].item()
    return total


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize(("window", "stride"), [(2, 1), (4, 1), (4, 2), (4, 3), (5, 4), (20, 7)])
def test_sliding_windows_score_each_token_once(n, window, stride):
    ids = randint(3, 1, n)
    nll, count = loss.sliding_window_nll(toy_logits, ids, window, stride)
    assert count == n - 1 and nll.shape == ()
    agree(nll, brute_force_windows(toy_logits, ids, window, stride))


def test_one_window_is_the_whole_text():
    ids = randint(3, 1, 9)
    nll, _ = loss.sliding_window_nll(toy_logits, ids, 9, 1)
    agree(nll, -loss.sequence_log_prob(toy_logits(ids), ids)[0])


def test_sliding_window_sums_half_precision_logits_in_float32():
    ids = randint(3, 1, 9)
    nll, _ = loss.sliding_window_nll(lambda x: toy_logits(x).half(), ids, 4, 2)
    assert nll.dtype == torch.float32


@pytest.mark.parametrize("stride", [0, 4, 5])
def test_a_stride_that_leaves_gaps_is_refused(stride):
    with pytest.raises(ValueError, match=f"stride={stride}"):
        loss.sliding_window_nll(toy_logits, torch.zeros(1, 9).long(), 4, stride)


# chunked loss


def full_loss(hidden, w_vocab, targets, **kwargs):
    return F.cross_entropy(hidden @ w_vocab, targets, **kwargs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 3, 5, 10, 64])
def test_chunked_cross_entropy_equals_the_full_loss_and_its_gradients(chunk, dtype):
    hidden = randn(10, 4, dtype=dtype).requires_grad_()
    w_vocab, targets = randn(4, 7, seed=1, dtype=dtype).requires_grad_(), randint(7, 10)
    got = loss.chunked_cross_entropy(hidden, w_vocab, targets, chunk)
    grads = torch.autograd.grad(3 * got, (hidden, w_vocab))
    wide = [x.detach().double().requires_grad_() for x in (hidden, w_vocab)]
    want = full_loss(*wide, targets)
    assert got.dtype == dtype and [g.dtype for g in grads] == [dtype, dtype]
    agree(got, want, dtype)
    for a, b in zip(grads, torch.autograd.grad(3 * want, wide), strict=True):
        agree(a, b, dtype)


def test_the_chapters_chunked_loss_equals_the_packages():
    page = (Path(__file__).parents[1] / "book" / "loss.md").read_text(encoding="utf-8")
    cells = re.findall(r"```\{code-cell\} ipython3\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names = {"torch": torch, "F": F, "loss": loss}
    for start in ("def loss_in_chunks", "def gradients_in_chunks", "class ChunkedLoss"):
        exec(next(cell for cell in cells if cell.startswith(start)), names)
    hidden, w_vocab, targets = (
        randn(10, 4).requires_grad_(),
        randn(4, 9, seed=1).requires_grad_(),
        randint(9, 10),
    )
    for chunk in (1, 3, 5, 64):
        by_hand = names["ChunkedLoss"].apply(hidden, w_vocab, targets, chunk)
        package = loss.chunked_cross_entropy(hidden, w_vocab, targets, chunk)
        agree(by_hand, package)
        grads = (torch.autograd.grad(3 * value, (hidden, w_vocab)) for value in (by_hand, package))
        for got, want in zip(*grads, strict=True):
            agree(got, want)


def test_chunked_cross_entropy_of_a_tied_and_of_a_frozen_projection():
    hidden, embedding, targets = randn(6, 4).requires_grad_(), randn(7, 4).requires_grad_(), randint(7, 6)
    got = torch.autograd.grad(
        loss.chunked_cross_entropy(hidden, embedding.T, targets, 4), (hidden, embedding)
    )
    want = torch.autograd.grad(full_loss(hidden, embedding.T, targets), (hidden, embedding))
    for a, b in zip(got, want, strict=True):
        agree(a, b)
    loss.chunked_cross_entropy(hidden, embedding.detach().T, targets, 4).backward()
    agree(hidden.grad, want[0])


def test_chunked_cross_entropy_leaves_out_ignored_targets():
    hidden, w_vocab, targets = randn(6, 4).requires_grad_(), randn(4, 7), randint(7, 6)
    targets[:3] = -100
    got = loss.chunked_cross_entropy(hidden, w_vocab, targets, 2)
    want = full_loss(hidden, w_vocab, targets)
    agree(got, want)
    agree(torch.autograd.grad(got, hidden)[0], torch.autograd.grad(want, hidden)[0])
    nothing = loss.chunked_cross_entropy(hidden, w_vocab, torch.full_like(targets, -100), 2)
    nothing.backward()
    assert nothing.item() == 0 and torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_chunked_cross_entropy_refuses_empty_chunks_and_a_second_derivative():
    hidden, w_vocab, targets = randn(6, 4).requires_grad_(), randn(4, 7), randint(7, 6)
    with pytest.raises(ValueError, match="chunk=0"):
        loss.chunked_cross_entropy(hidden, w_vocab, targets, 0)
    value = loss.chunked_cross_entropy(hidden, w_vocab, targets, 2)
    (grad,) = torch.autograd.grad(value.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the size of the largest tensor that an operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.largest = max(self.largest, *(x.numel() for x in tensors), 0)
        return result


def test_chunked_cross_entropy_never_holds_all_logits():
    n, d_hidden, vocab, chunk = 96, 4, 64, 16
    hidden, w_vocab = randn(n, d_hidden).requires_grad_(), randn(d_hidden, vocab).requires_grad_()
    saved = []

    def keep(x):
        saved.append(x.numel())
        return x

    with LargestTensor() as meter, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss.chunked_cross_entropy(hidden, w_vocab, randint(vocab, n), chunk).backward()
    assert meter.largest == chunk * vocab
    assert hidden.grad is not None and sum(saved) == n * d_hidden + d_hidden * vocab + n  # its arguments


def test_chunked_cross_entropy_costs_a_third_more_flops():
    hidden, w_vocab, targets = randn(12, 8).requires_grad_(), randn(8, 32).requires_grad_(), randint(32, 12)
    with FlopCounterMode(display=False) as chunked:
        loss.chunked_cross_entropy(hidden, w_vocab, targets, 4).backward()
    with FlopCounterMode(display=False) as full:
        full_loss(hidden, w_vocab, targets).backward()
    assert 3 * chunked.get_total_flops() == 4 * full.get_total_flops()


# label smoothing and z-loss


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_label_smoothing_and_z_loss_equal_torch(label_smoothing, z_loss, ignore_index, dtype):
    logits, targets = randn(2, 5, 7, dtype=dtype), randint(7, 2, 5)
    targets[0, :2] = ignore_index
    got = regularized_cross_entropy(logits, targets, label_smoothing, z_loss, ignore_index)
    flat, counted = logits.double().reshape(-1, 7), (targets != ignore_index).reshape(-1)
    want = F.cross_entropy(flat[counted], targets.reshape(-1)[counted], label_smoothing=label_smoothing)
    want = want + z_loss * flat[counted].logsumexp(-1).square().mean()
    assert got.dtype == dtype
    agree(got, want, dtype)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("ignore_index", [-100, 2])
@pytest.mark.parametrize("chunk", [2, 50])
def test_chunked_regularized_loss_equals_the_plain_one(label_smoothing, z_loss, ignore_index, chunk):
    hidden, w_vocab, targets = randn(9, 4).requires_grad_(), randn(4, 7).requires_grad_(), randint(7, 9)
    targets[2:5] = ignore_index
    settings = (label_smoothing, z_loss, ignore_index)
    got = chunked_regularized_cross_entropy(hidden, w_vocab, targets, chunk, *settings)
    want = regularized_cross_entropy(hidden @ w_vocab, targets, *settings)
    agree(got, want)
    for a, b in zip(*(torch.autograd.grad(x, (hidden, w_vocab)) for x in (got, want)), strict=True):
        agree(a, b)


def test_regularization_out_of_range_is_refused():
    logits, targets = torch.zeros(2, 3), torch.tensor([0, 1])
    for settings in ((-0.1, 0.0), (1.1, 0.0), (0.0, -1.0), (0.0, math.nan)):
        with pytest.raises(ValueError, match="regularized_cross_entropy needs"):
            regularized_cross_entropy(logits, targets, *settings)
        with pytest.raises(ValueError, match="chunked_regularized_cross_entropy needs"):
            chunked_regularized_cross_entropy(torch.zeros(2, 4), torch.zeros(4, 3), targets, 1, *settings)
    with pytest.raises(ValueError, match="chunk=0"):
        chunked_regularized_cross_entropy(torch.zeros(2, 4), torch.zeros(4, 3), targets, 0)


# every function


def float_cases():
    ids, rows = randint(5, 2, 4), randint(5, 6)
    return {
        "log_softmax": (loss.log_softmax, (randn(2, 4, 5),)),
        "cross_entropy": (loss.cross_entropy, (randn(2, 4, 5), ids)),
        "next_token_loss": (loss.next_token_loss, (randn(2, 4, 5), ids, 0)),
        "sequence_log_prob": (loss.sequence_log_prob, (randn(2, 4, 5), ids)),
        "cross_entropy_gradient": (loss.cross_entropy_gradient, (randn(6, 5), rows)),
        "chunked_cross_entropy": (loss.chunked_cross_entropy, (randn(6, 3), randn(3, 5), rows, 4)),
        "regularized": (regularized_cross_entropy, (randn(6, 5), rows, 0.1, 1e-3)),
        "perplexity": (loss.perplexity, (randn(3).abs(), torch.tensor([1, 0, 3]))),
    }


@pytest.mark.parametrize("name", list(float_cases()))
def test_inputs_are_left_alone_and_layout_does_not_matter(name):
    function, args = float_cases()[name]
    kept = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
    want = function(*args)
    for a, b in zip(args, kept, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    strided = [
        x.transpose(0, -1).contiguous().transpose(0, -1) if isinstance(x, torch.Tensor) else x for x in args
    ]
    agree(function(*strided), want)


@pytest.mark.parametrize("name", list(float_cases()))
def test_runs_on_the_meta_device(name):
    function, args = float_cases()[name]
    want = function(*args)
    args = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in args]
    args = [x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
    got = function(*args)
    got.sum().backward()
    assert got.device.type == "meta" and got.shape == want.shape and got.dtype == want.dtype
