"""Tests of the suite itself: writes beyond a result, or to an operand, are found; copies lie as the views do."""

import pytest
import torch

from .fences import VIEWS, Fenced, fenced
from .parity import SMALL, operands, parameters, poisoned

PROBLEM = SMALL["groups, unequal channels"]


def right(x, w, bias, y):
    y.copy_(torch.conv_transpose1d(x, w, bias, **parameters(PROBLEM)))


def before(x, w, bias, y):
    y.as_strided((1,), (1,), y.storage_offset() - 1).zero_()


def after(x, w, bias, y):
    y.as_strided((1,), (1,), y.storage_offset() + y.numel()).zero_()


def to_an_operand(x, w, bias, y):
    w[-1, -1, -1] += 1


def before_an_operand(x, w, bias, y):
    x.as_strided((1,), (1,), x.storage_offset() - 1).zero_()


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("wrong", [before, after, to_an_operand, before_an_operand])
def test_a_write_to_what_is_not_the_result_is_found(wrong, shift):
    x, w, bias = operands(PROBLEM, torch.float16)
    with pytest.raises(AssertionError, match="it wrote"):
        fenced(wrong, (x, w, bias), poisoned(PROBLEM, torch.float16), shift)
    result = fenced(right, (x, w, bias), poisoned(PROBLEM, torch.float16), shift)
    assert torch.equal(result, torch.conv_transpose1d(x, w, bias, **parameters(PROBLEM)))


@pytest.mark.parametrize("name", VIEWS)
def test_a_copy_lies_as_the_tensor_does(name):
    view = VIEWS[name](torch.randn(3, 4, 5))
    copy = Fenced(view, shift=3)
    assert copy.tensor.shape == (3, 4, 5)
    assert copy.tensor.stride() == view.stride()
    assert torch.equal(copy.tensor, view)
    assert copy.tensor.data_ptr() % 16 == 3 * view.itemsize
