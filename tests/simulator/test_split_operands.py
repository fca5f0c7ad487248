"""Float32 numbers as split operands, in Python."""

from types import SimpleNamespace

import numpy as np
import pytest

from numba_tconv.kernels.common.tensor_core import split_operand as tensor_operand
from numba_tconv.kernels.common.tensor_core.split_operand import LEAST, SPLIT_ROWS, make_split, put_tf32
from numba_tconv.ptx import round_tf32

IGNORED = (1 << 13) - 1
RANDOM = np.random.default_rng(0).standard_normal(500).astype(np.float32)
# The last 23 bits: none left over; rounded up into the next power of two; the least one alone; half way between two
# TF32 numbers, above an even and above an odd one; a little to either side.
LAST_BITS = np.array([1 << 22, (1 << 23) - 1, 1, 1 << 12, 3 << 12, (1 << 12) - 1, (1 << 12) + 1])
EDGES = (1 + LAST_BITS * 2.0**-23).astype(np.float32)
VALUES = np.concatenate([RANDOM, EDGES, -EDGES, np.zeros(2, np.float32)])


def hex_of(value):
    return hex(value.view(np.uint32))


# The second and the last are the NaNs whose bits are the largest.
NANS = np.array([0x7FC00000, 0x7FFFFFFF, 0x7F800001, -0x400000, -1], dtype=np.int32).view(np.float32)


def one_part(value):
    """The number for which a tensor core takes a TF32 operand."""
    untouched = 12345
    v = np.full(3, untouched, dtype=np.int32)
    put_tf32(v, 1, value)
    assert v[0] == v[2] == untouched
    return (v[1:2] & np.int32(~IGNORED)).view(np.float32)[0]


@pytest.mark.parametrize("scale", [1, 1e-30, 1e30])
def test_one_part_is_the_nearest_tf32_number(scale):
    for value in VALUES * np.float32(scale):
        assert one_part(value) == round_tf32(value)


@pytest.mark.parametrize("value", NANS, ids=hex_of)
def test_nan_stays(value):
    assert np.isnan(one_part(value))


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_an_infinity_stays(value):
    assert one_part(np.float32(value)) == value


AT = 3  # where the windows begin among the registers


@pytest.fixture
def split(monkeypatch):
    """High and low halves of a lone lane's rows, and the products' scale. ``inverse``: of the weights' scale."""
    monkeypatch.setattr(tensor_operand, "redux_max", lambda bits: bits)
    arrays = SimpleNamespace(array=lambda size, dtype: np.zeros(size, np.float32))
    monkeypatch.setattr(tensor_operand, "cuda", SimpleNamespace(local=arrays))

    def parts(rows, first=0, inverse=1.0):
        rows = np.asarray(rows, np.float32)
        window, untouched = rows.shape[1], 12345
        v = np.full(AT + rows.size + 1, untouched, np.int32)
        v[AT:-1] = rows.ravel().view(np.int32)
        with np.errstate(invalid="ignore", over="ignore"):
            found = make_split(window, first)(v, AT, tensor_operand.scales_of(np.float32(inverse)))
        assert (v[:AT] == untouched).all()
        assert v[-1] == untouched
        words = v[AT:-1].reshape(2, 2, window)  # part, pair of rows
        halves = np.ascontiguousarray(words).view(np.float16).reshape(2, 2, window, 2)
        larger, smaller = halves.transpose(0, 1, 3, 2).reshape(2, SPLIT_ROWS, window)[:, :, first:].astype(np.float64)
        return larger, smaller, float(found)

    return parts


@pytest.mark.parametrize("scale", [1, 1e-30, 1e30, 2.0**-112, 2.0**125])
def test_two_parts_hold_a_number(split, scale):
    rows = (VALUES * np.float32(scale)).reshape(SPLIT_ROWS, -1)
    larger, smaller, inverse = split(rows)
    exact, largest = rows.astype(np.float64), abs(rows).max()
    assert 2**14 <= abs(larger).max() <= 2**15
    assert (larger == (exact / inverse).astype(np.float16)).all(), "the nearest number of eleven bits"
    error = abs((larger + smaller) * inverse - exact)
    assert (error <= np.maximum(2.0**-22 * abs(exact), 2.0**-39 * largest)).all()


def test_small_numbers_lose_accuracy_gradually(split):
    """Beside one that is up to 2^60 times as large."""
    powers = 2.0 ** -np.arange(60).reshape(SPLIT_ROWS, 15)
    larger, smaller, inverse = split(1.75 * powers + powers * 2.0**-20)
    error = abs((larger + smaller) * inverse / (1.75 * powers + powers * 2.0**-20) - 1)
    assert (error <= np.maximum(2.0**-22, 2.0**-39 / powers)).all()
    assert (error[powers >= 2.0**-17] <= 2.0**-22).all()
    assert error[powers < 2.0**-41].min() == 1


def test_every_lane_of_a_warp_has_the_scale_of_the_largest(split, monkeypatch):
    largest = np.float32(1000).view(np.int32)
    monkeypatch.setattr(tensor_operand, "redux_max", lambda bits: max(bits, largest))
    larger, _, inverse = split(np.full((SPLIT_ROWS, 4), 3))
    assert inverse == 2.0 ** (9 - 14)
    assert (larger == 3 / inverse).all()


def test_nothing_is_as_large_as_zeros(split):
    larger, smaller, inverse = split(np.zeros((SPLIT_ROWS, 4)))
    assert not larger.any()
    assert not smaller.any()
    assert 0 < inverse < np.inf


def test_columns_that_no_tap_reads_do_not_count(split):
    rows = np.ones((SPLIT_ROWS, 8))
    rows[:, :3] = [1e30, np.inf, np.nan]
    larger, smaller, inverse = split(rows, first=3)
    assert (larger * inverse == 1).all()
    assert not smaller.any()


@pytest.mark.parametrize("value", [*NANS, *map(np.float32, (np.inf, -np.inf))], ids=hex_of)
def test_what_is_no_number_is_none_in_two_parts(split, value):
    """Numbers beside it keep their halves, however large and small they are."""
    rows = np.full((SPLIT_ROWS, 4), 1e20 * (1 + 2.0**-20), np.float32)
    rows[1, 2] = value
    larger, smaller, inverse = split(rows)
    assert np.isnan(larger[1, 2] + smaller[1, 2])
    numbers = np.isfinite(rows)
    assert numbers.sum() == rows.size - 1
    assert np.allclose(((larger + smaller) * inverse)[numbers], rows[numbers], rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("weights", [2.0**-126, 1e-20, 1, 1e20, 2.0**113])
@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1, 1e20, 3e38])
def test_sums_are_scaled_back_by_both_scales(split, scale, weights):
    """By a number that is not subnormal; by infinity where that would be too large."""
    inverse = 2.0 ** (max(int(np.floor(np.log2(weights))), LEAST - 127) - 14)
    rows = np.full((SPLIT_ROWS, 4), scale)
    larger, smaller, found = split(rows, inverse=inverse)
    assert found == np.inf or 2.0**-126 <= found < 2.0**128
    _, _, alone = split(rows)
    both = alone * inverse
    if 2.0**-126 <= both < 2.0**128:
        assert found == both
        assert np.allclose((larger + smaller) * found / inverse, rows, rtol=2.0**-22, atol=0)
    elif both > 1:
        assert found == np.inf
    else:
        assert np.allclose((larger + smaller) * (found / inverse), rows, rtol=1e-2, atol=2.0**-126 / inverse)
