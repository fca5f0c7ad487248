"""A float32 as two TF32 operands: together they are the number, but for its last bit."""

import numpy as np
import pytest

from numba_tconv.kernels.tensor_operand import make_put

VALUES = np.random.default_rng(0).standard_normal(200).astype(np.float32)


def split(value):
    v = np.zeros(2, dtype=np.int32)
    make_put(2, 1)(v, 0, value)
    return v.view(np.float32)


@pytest.mark.parametrize("scale", [1, 1e-30, 1e30])
def test_two_parts_hold_a_number(scale):
    for value in VALUES * np.float32(scale):
        high, low = split(value)
        assert abs(np.float64(high) + np.float64(low) - np.float64(value)) <= 2.0**-23 * abs(value)
        assert not high.view(np.int32) & 0x1FFF  # the small part is the rest of what the tensor core reads
        assert abs(low) <= 2.0**-11 * abs(value)


def test_a_tf32_number_an_infinity_and_nan():
    assert list(split(np.float32(1.5))) == [1.5, 0]
    assert list(split(np.float32(np.inf))) == [np.inf, 0]
    assert np.isnan(split(np.float32(np.nan))[0])
