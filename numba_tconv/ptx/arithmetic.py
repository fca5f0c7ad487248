"""Maxima, and the parts of a sine."""

from __future__ import annotations

import numpy as np
from numba import types

from .core import asm, f32, i32, instruction, no_meaning


def _larger_magnitude(value, other):
    return value if other != other else max(value, abs(other))


@instruction(_larger_magnitude)
def larger_magnitude(typingctx, value, other):
    """The larger of ``value`` (>= 0) and ``|other|``; ``value`` if ``other`` is NaN."""

    def codegen(context, builder, sig, args):
        text = "{ .reg .f32 magnitude; abs.f32 magnitude, $2; max.f32 $0, $1, magnitude; }"
        return asm(builder, f32, args, text, "=f,f,f")

    return types.float32(types.float32, types.float32), codegen


@instruction(no_meaning)
def redux_max(typingctx, value):
    """redux.sync.max.u32: the largest of a warp's non-negative numbers (from sm_80)."""

    def codegen(context, builder, sig, args):
        return asm(builder, i32, args, "redux.sync.max.u32 $0, $1, 0xffffffff;", "=r,r")

    return types.int32(types.int32), codegen


def _of_one(text, meaning):
    @instruction(meaning)
    def of_one(typingctx, value):
        def codegen(context, builder, sig, args):
            return asm(builder, f32, args, text, "=f,f")

        return types.float32(types.float32), codegen

    return of_one


def _sine(value):
    with np.errstate(invalid="ignore"):
        return np.float32(np.sin(np.float64(value)))


# Error 2^-21 within a period; for larger angles, also one relative to the angle.
sine_approx = _of_one("sin.approx.f32 $0, $1;", _sine)
nearest_integer = _of_one("cvt.rni.f32.f32 $0, $1;", lambda value: np.rint(np.float32(value)))
