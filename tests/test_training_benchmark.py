"""The three training steps that the benchmark times are one and the same computation."""

import torch

from benchmarks.training import agree, flops_of, kept_bytes, ways
from course_llm.loss import chunked_cross_entropy
from course_llm.regularized_loss import training_cross_entropy

TINY = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=8)


def test_all_steps_have_the_same_loss_and_gradient():
    found, ours = ways(TINY, rows=2)
    assert set(found) == {f"{who}{half}" for who in ("HF", "nanoGPT", "ours") for half in ("", " bfloat16")}
    agree(found)
    agree(found)  # and after a step with AdamW, too
    assert ours.config.layers == 2


def test_what_a_loss_keeps_and_computes_is_counted():
    n, width, vocab = 96, 16, 2048
    hidden, weight = torch.randn(n, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    targets = torch.randint(0, vocab, (n,))
    forms = {
        "plain": lambda: torch.nn.functional.cross_entropy(hidden @ weight.T, targets),
        "chunked": lambda: chunked_cross_entropy(hidden, weight.T, targets, 32),
        "ahead": lambda: training_cross_entropy(hidden, weight.T, targets, 32),
    }
    kept = {name: kept_bytes(form, weight) for name, form in forms.items()}
    assert kept["chunked"] == n * (4 * width + 8)  # the hidden states and the targets
    assert kept["ahead"] == 4 * width * (n + vocab)
    assert kept["plain"] > 4 * n * vocab and kept["plain"] > 70 * kept["chunked"]
    product = 2 * n * width * vocab
    assert [flops_of(form) for form in forms.values()] == [3 * product, 4 * product, 3 * product]
