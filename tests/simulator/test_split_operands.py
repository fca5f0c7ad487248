"""A float32 as operands of TF32 products: what the tensor core reads of them, which is all but their last 13 bits."""

import numpy as np
import pytest

from numba_tconv.kernels.tensor_operand import make_put
from numba_tconv.ptx import SIMULATOR, round_tf32

pytestmark = pytest.mark.skipif(not SIMULATOR, reason="needs NUMBA_ENABLE_CUDASIM=1")

IGNORED = (1 << 13) - 1
RANDOM = np.random.default_rng(0).standard_normal(500).astype(np.float32)
# The last 23 bits of a number: none left over; rounded up into the next power of two; the least one alone; half way
# between two TF32 numbers, above an even and above an odd one; a little to either side of that.
LAST_BITS = np.array([1 << 22, (1 << 23) - 1, 1, 1 << 12, 3 << 12, (1 << 12) - 1, (1 << 12) + 1])
EDGES = (1 + LAST_BITS * 2.0**-23).astype(np.float32)
VALUES = np.concatenate([RANDOM, EDGES, -EDGES, np.zeros(1, np.float32)])
scales = pytest.mark.parametrize("scale", [1, 1e-30, 1e30])


def operands(value, parts):
    """The bits that ``put`` writes for ``value``, which are to be nowhere else."""
    at, apart, untouched = 1, 3, 12345
    v = np.full(6, untouched, dtype=np.int32)
    make_put(parts, apart)(v, at, value)
    places = [at + part * apart for part in range(parts)]
    assert (np.delete(v, places) == untouched).all()
    return v[places]


def read(bits):
    """The number that a tensor core takes an operand for."""
    return (bits & np.int32(~IGNORED)).view(np.float32)


@scales
def test_one_part_is_the_nearest_tf32_number(scale):
    for value in VALUES * np.float32(scale):
        assert read(operands(value, 1)) == [round_tf32(value)]


@scales
def test_two_parts_hold_a_number(scale):
    for value in VALUES * np.float32(scale):
        high, low = operands(value, 2)
        # The second part is the rest of what is read of the first, so there must be no bits that are not.
        assert not high & IGNORED
        assert read(high) == round_tf32(value)
        assert low.view(np.float32) == value - read(high)
        assert abs(np.float64(read(high)) + np.float64(read(low)) - np.float64(value)) <= 2.0**-23 * abs(value)


@pytest.mark.parametrize("value", [1.5, 0.0])
def test_a_tf32_number_leaves_nothing_over(value):
    assert list(read(operands(np.float32(value), 2))) == [value, 0]


def hex_of(value):
    return hex(value.view(np.uint32))


# The second and the last are the NaNs whose bits are the largest: rounded up, they are zeros.
NANS = np.array([0x7FC00000, 0x7FFFFFFF, 0x7F800001, -0x400000, -1], dtype=np.int32).view(np.float32)


@pytest.mark.parametrize("value", [*NANS, *map(np.float32, (np.inf, -np.inf))], ids=hex_of)
def test_what_is_no_number_is_none_in_two_parts(value):
    with np.errstate(invalid="ignore"):
        assert np.isnan(read(operands(value, 2))).any()


@pytest.mark.parametrize("value", NANS, ids=hex_of)
def test_nan_stays(value):
    assert np.isnan(read(operands(value, 1))).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_an_infinity_stays(value):
    assert list(read(operands(np.float32(value), 1))) == [value]
