"""How a float32 of x becomes an operand of a TF32 product, or the two of a split one."""

from __future__ import annotations

from numba import float32

from ..ptx import bits_of, device_function, round_tf32, tf32_operand


def make_put(parts: int, apart: int):
    """A device function: the operand of ``value`` into ``v[at]``; with two parts, what rounding left over into
    ``v[at + apart]``."""

    @device_function
    def put(v, at, value):
        if parts == 1:
            v[at] = tf32_operand(value)
        else:
            high = round_tf32(value)
            v[at] = bits_of(high)
            # An infinity leaves nothing over.
            v[at + apart] = bits_of(round_tf32(value - high) if high != value else float32(0))

    return put
