"""What the page for students says of PyTorch holds."""

import re

import pytest
import torch

from tests.book_site import ROOT

PAGE = (ROOT / "book" / "students.md").read_text()
CALLS = re.findall(r"^\| `([^`]+)` \| `([\[(][^`]+[\])])` \|", PAGE, re.MULTILINE)


def test_table_of_calls_is_read():
    section = PAGE.split("## The PyTorch")[1].split("\n## ")[0]
    assert len(CALLS) == len(re.findall(r"^\| `", section, re.MULTILINE)) > 10


@pytest.mark.parametrize("call, gives", CALLS)
def test_call_gives_what_the_table_says(call, gives):
    given = {"torch": torch}
    for name, value in re.findall(r"`(x|ids)` is `([^`]+)`", PAGE):
        given[name] = eval(value, given)
    got, want = eval(call, given), eval(gives)
    if isinstance(want, tuple):
        assert tuple(got) == want
    else:
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tensors_without_a_dtype_promote_half_precision_and_numbers_do_not(dtype):
    x = torch.ones(3, dtype=dtype)
    assert (x + torch.zeros(3)).dtype == (x * torch.tensor([1.0])).dtype == torch.float32
    assert (0.5 * x).dtype == dtype


def test_rows_of_any_shape_go_there_and_back():
    for shape in [(4,), (2, 4), (2, 3, 4)]:
        x = torch.rand(shape)
        rows = x.reshape(-1, x.shape[-1])
        assert rows.ndim == 2 and torch.equal(rows.reshape(x.shape), x)
