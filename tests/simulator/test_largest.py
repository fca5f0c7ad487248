"""The largest weight, in the CUDA simulator: of several blocks, wherever it lies, beside what is no number."""

import math

import pytest
import torch

from numba_tconv.kernels.common.tensor_core import largest
from numba_tconv.runtime.layout import Layout
from tests.few_blocks import few_threads

THREADS = 7  # no power of two
PASS = THREADS * largest.BATCH  # weights of a block, at a time
MOST = 3  # blocks
SIZE = 2 * MOST * PASS + 5  # weights: two full passes and a short one


@pytest.fixture(autouse=True)
def tiny_blocks():
    with few_threads(largest, THREADS):
        yield


def numbers_of(w, most=MOST):
    find, count = largest.finder(Layout.of(w), most)
    found = find(w)
    assert found.shape == (count,)
    return found


@pytest.mark.parametrize("at", [0, 1, THREADS - 1, PASS - 1, PASS, MOST * PASS, SIZE - 5, SIZE - 1])
def test_the_largest_is_found_wherever_it_lies(at):
    w = torch.rand(1, 1, SIZE) - 0.5
    w[0, 0, at] = -2.0
    assert numbers_of(w).max() == 2


@pytest.mark.parametrize(("size", "blocks"), [(1, 1), (PASS, 1), (PASS + 1, 2), (SIZE, MOST)])
def test_no_more_blocks_than_have_weights(size, blocks):
    w = torch.full((1, size, 1), 0.25)
    assert numbers_of(w).tolist() == [0.25] * blocks


@pytest.mark.parametrize("dims", [(0, 1, 2), (1, 0, 2), (2, 0, 1)])
@pytest.mark.parametrize("what", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_does_not_count(what, dims):
    w = torch.rand(8, 6, 5).permute(dims)
    w[1, 2, 3] = what
    assert len(numbers_of(w)) == MOST, "by the kernel"
    assert numbers_of(w).max() == w[w.isfinite()].abs().max()


@pytest.mark.parametrize("what", [math.inf, math.nan, 0])
def test_weights_apart_do_not_count_what_lies_between(what):
    w = torch.full((4, 3, 10), 9.0)[:, :, ::2]
    w.fill_(-0.5)[1, 2, 3] = what
    assert numbers_of(w).tolist() == [0.5]


@pytest.mark.parametrize("what", [math.inf, math.nan])
def test_weights_without_a_number_have_zero(what):
    assert numbers_of(torch.full((2, 2, 2), what)).tolist() == [0]
