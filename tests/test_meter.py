"""The meter that grades cost: what an operation makes, what is alive at one time, what autograd keeps."""

import torch

from autograder.inside.meter import Meter


def test_largest_counts_what_is_made_not_views_of_it():
    x = torch.ones(3, 4)
    with Meter() as meter:
        x.T.reshape(12)[:3]
    assert meter.largest == 12  # the reshape of a transposed tensor copies
    with Meter() as meter:
        x.view(12)[:6].expand(2, 6)
    assert meter.largest == 0


def test_held_is_what_is_alive_at_one_time():
    x = torch.ones(10)
    with Meter() as meter:
        for _ in range(5):
            y = x + 1
            del y
    assert meter.held == 10
    with Meter() as meter:
        kept = [x + i for i in range(5)]
        del kept
        x + 1
    assert meter.held == 50


def test_saved_counts_each_storage_once_and_forgets_what_backward_lets_go():
    x = torch.ones(10, requires_grad=True)
    with Meter() as meter:
        y = (x * x).exp()  # keeps x, twice, and the output
        assert meter.saved == 20
        y.sum().backward()
    with meter:
        (x.detach() * 2).requires_grad_().sin().sum().backward()
    assert meter.saved == 20


def test_flops_are_counted():
    with Meter() as meter:
        torch.ones(2, 3) @ torch.ones(3, 4)
        torch.ones(2, 3) @ torch.ones(3)
    assert meter.flops == 2 * 2 * 3 * 4 + 2 * 2 * 3


def test_products_that_torch_counts_too_low_are_counted_whole():
    pair, matrix = torch.ones(3, dtype=torch.complex64), torch.ones(2, 3)
    with Meter() as meter:
        torch.addmv(torch.ones(2), matrix, torch.ones(3))
        torch.vdot(torch.ones(3), torch.ones(3))
    assert meter.flops == 2 * 2 * 3 + 2 * 3
    with Meter() as meter:
        matrix.to(torch.complex64) @ torch.stack([pair, pair], 1)  # four real products
    assert meter.flops == 4 * (2 * 2 * 3 * 2)
