"""How a float32 of x becomes an operand of a TF32 product, or the two of a split one."""

from __future__ import annotations

from numba import float32

from ..ptx import device_function, float_of, tf32_operand

LAST_BIT_OF_TF32 = -(1 << 13)  # and all above it: the mask of what a TF32 number keeps of a float32


def make_put(parts: int, apart: int):
    """A device function: the operand of ``value`` into ``v[at]``; with two parts, what rounding left over into
    ``v[at + apart]``."""

    @device_function
    def put(v, at, value):
        if parts == 1:
            v[at] = tf32_operand(value)
        else:
            bits = tf32_operand(value) & LAST_BIT_OF_TF32
            high = float_of(bits)
            v[at] = bits
            # An infinity leaves nothing over.
            v[at + apart] = tf32_operand(value - high if high != value else float32(0))

    return put
