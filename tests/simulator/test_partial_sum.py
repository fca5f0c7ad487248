"""The kernel that adds up partial sums, in the CUDA simulator."""

import itertools

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common import split_sums
from numba_tconv.ptx.unrolled import runs
from tests.fences import Fenced
from tests.parity import poisoned
from tests.thorough import thorough

# Output channels and length, for one group and two; and those among them whose threads take one output.
SIZES = {
    "channels of whole vectors": (6, 8),
    "channels that end within a vector": (8, 5),
    "channels shorter than a vector": (8, 3),
    "a channel for each output": (8, 1),
    "vectors of one group, not of two": (4, 5),
    "no vectors": (6, 5),
}
SINGLE = {("vectors of one group, not of two", 2), ("no vectors", 1), ("no vectors", 2)}
dtypes = pytest.mark.parametrize(
    "dtype",
    thorough([torch.float32, torch.float16, torch.bfloat16], always=[torch.float32, torch.bfloat16]),
    ids=str,
)


@pytest.fixture
def vectors(monkeypatch):
    """The first outputs of the vectors that were stored."""
    stored, store = [], runs.stored_run
    monkeypatch.setattr(runs, "stored_run", lambda *told: (stored.append(int(told[2])), store(*told)))
    return stored


def check(p, dtype, splits, shift):
    """``shift``: elements by which the output begins after a multiple of 16 bytes."""
    torch.manual_seed(splits)
    partials = torch.randn(p.batch, p.groups, splits, p.out_channels_per_group, p.out_length)
    bias, y = torch.randn(p.out_channels).to(dtype), Fenced(poisoned(p, dtype), shift)
    split_sums.prepare(p, dtype, splits, p.bias)(partials.flatten(), bias, y.tensor)
    expected = torch.zeros(y.tensor.shape)
    if p.bias:
        expected += bias.float()[:, None]
    for part in partials.unbind(2):  # in this order, in float32
        expected += part.reshape(expected.shape)
    assert torch.equal(y.tensor, expected.to(dtype))
    assert y.is_fence_whole()


@pytest.mark.parametrize("size", thorough(SIZES, always=[*[*SIZES][::2], "no vectors"]))
@pytest.mark.parametrize("has_bias", [False, True])
@dtypes
def test_partial_sums_are_added_up_with_the_bias(vectors, dtype, has_bias, size):
    channels, length = SIZES[size]
    parts_and_shifts = [*((splits, 0) for splits in range(1, 10)), (2, 1), (3, 2), (5, 4)]
    for groups, (splits, shift) in itertools.product((1, 2), parts_and_shifts):
        p = Problem(2, 8, channels, 1, length, groups=groups, bias=has_bias)
        vectors.clear()
        check(p, dtype, splits, shift)
        in_vectors = shift % 4 == 0 and (size, groups) not in SINGLE
        assert sorted(vectors) == (list(range(0, 2 * channels * length, 4)) if in_vectors else [])
