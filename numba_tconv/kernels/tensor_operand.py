"""How a float32 of x becomes an operand of a TF32 product, or the two of a split one."""

from __future__ import annotations

from ..ptx import bits_of, device_function, float_of, tf32_operand, tf32_part

MOST_SPLIT_TAPS = 3  # whose products are added up on tensor cores, which cut off what an addition cannot hold


def make_put(parts: int, apart: int):
    """A device function: the operand of ``value`` into ``v[at]``; with two parts, what rounding left over into
    ``v[at + apart]``.

    That has up to twelve significant bits. The tensor core cuts off the last, and to round it there would be as wrong.
    Each element of a window takes these three instructions. With eight, which rounded twice and left nothing over of an
    infinity, kb79 took 1% longer, kb64 6%, kb74 17% and hifigan_u1 21%, and errors were the same to 1% (k6 on H200, a
    script by turns; no recorded rows).
    """

    @device_function
    def put(v, at, value):
        if parts == 1:
            v[at] = tf32_operand(value)
        else:
            v[at] = tf32_part(value)
            v[at + apart] = bits_of(value - float_of(v[at]))

    return put
