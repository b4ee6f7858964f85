"""What an instance keeps is counted once, wherever it hangs; the lent latent cache does what the package's does."""

import pytest
import torch

from autograder.inside.engine import elements_held
from autograder.inside.modules import LatentCache
from course_llm import mla


class Slots:
    __slots__ = ("kept", "name")

    def __init__(self, kept):
        self.kept, self.name = kept, "slots"


class OnTheClass:
    shared = torch.zeros(5)


class Plain:
    def __init__(self, **kept):
        vars(self).update(kept)


def test_each_storage_is_counted_once():
    rows = torch.zeros(2, 3, 7)
    assert elements_held(Plain(rows=rows, c=rows[..., :4], k_r=rows[..., 4:])) == 42


def test_a_view_counts_as_all_that_it_keeps_alive():
    assert elements_held(Plain(last=torch.zeros(100)[-1:])) == 100


@pytest.mark.parametrize(
    "thing, count",
    [
        (Slots([torch.zeros(3), (torch.zeros(4), {"a": torch.zeros(2)})]), 9),
        (OnTheClass(), 5),
        (Plain(inner=Plain(x=torch.zeros(6))), 6),
        (torch.nn.Linear(3, 2), 8),
        (Plain(number=3, words="x"), 0),
    ],
    ids=["slots and containers", "class attribute", "nested", "module", "nothing"],
)
def test_tensors_are_found_wherever_they_hang(thing, count):
    assert elements_held(thing) == count


def test_a_ring_of_references_ends():
    ring = Plain(x=torch.zeros(2))
    ring.self = ring
    assert elements_held(ring) == 2


def test_the_lent_cache_agrees_with_the_packages():
    g = torch.Generator().manual_seed(0)
    c, k_r = torch.randn(2, 5, 4, generator=g), torch.randn(2, 5, 2, generator=g)
    ours = mla.LatentCache(2, 5, 4, 2, torch.float32, "cpu")
    lent = LatentCache(batch=2, max_seq=5, d_c=4, d_r=2)
    for start, stop in ((0, 3), (3, 5)):
        pairs = zip(
            ours.update(c[:, start:stop], k_r[:, start:stop]),
            lent.update(c[:, start:stop], k_r[:, start:stop]),
            strict=True,
        )
        assert all(torch.equal(a, b) for a, b in pairs)
        assert ours.length == lent.length == stop
    with pytest.raises(ValueError, match="max_seq=5"):
        lent.update(c[:, :1], k_r[:, :1])
    lent.reset()
    assert lent.length == 0 and elements_held(lent) == 2 * 5 * 6
