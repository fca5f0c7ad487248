"""How a float32 of x becomes an operand of a TF32 product, or the two of a split one."""

from __future__ import annotations

from numba import float32

from ..ptx import device_function, float_of, tf32_operand

MOST_SPLIT_TAPS = 3  # whose products are added up on tensor cores, which cut off what an addition cannot hold
TF32_BITS = -(1 << 13)  # those of a float32 that a TF32 number keeps


def make_put(parts: int, apart: int):
    """A device function: the operand of ``value`` into ``v[at]``; with two parts, what rounding left over into
    ``v[at + apart]``."""

    @device_function
    def put(v, at, value):
        if parts == 1:
            v[at] = tf32_operand(value)
        else:
            bits = tf32_operand(value) & TF32_BITS
            high = float_of(bits)
            v[at] = bits
            # An infinity leaves nothing over.
            v[at + apart] = tf32_operand(value - high if high != value else float32(0))

    return put
