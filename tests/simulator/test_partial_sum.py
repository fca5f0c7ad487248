"""The kernel that adds up partial sums, in the CUDA simulator. Needs NUMBA_ENABLE_CUDASIM=1 (`make test`)."""

import pytest
import torch

from numba_tconv.kernels import partial_sum
from numba_tconv.problem import Problem
from numba_tconv.ptx import SIMULATOR
from tests.few_blocks import few_threads

pytestmark = pytest.mark.skipif(not SIMULATOR, reason="needs NUMBA_ENABLE_CUDASIM=1")


@pytest.fixture(autouse=True)
def tiny_blocks():
    with few_threads(partial_sum, 8):
        yield


@pytest.mark.parametrize("splits", [2, 4, 9])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_partial_sums_are_added_up_with_the_bias(dtype, has_bias, groups, splits):
    p = Problem(2, 8, 6, 3, 3, stride=2, groups=groups, bias=has_bias)
    torch.manual_seed(splits)
    partials = torch.randn(p.batch, groups, splits, p.out_channels_per_group, p.out_length)
    bias = torch.randn(p.out_channels).to(dtype)
    y = torch.full((p.batch, p.out_channels, p.out_length), torch.nan, dtype=dtype)
    partial_sum.prepare(p, dtype, splits, has_bias)(partials.flatten(), bias, y)
    expected = torch.zeros(y.shape)
    if has_bias:
        expected += bias.float()[:, None]
    for part in partials.unbind(2):  # in this order, in float32
        expected += part.reshape(y.shape)
    assert torch.equal(y, expected.to(dtype))
