"""Instructions that a sine is made of."""

from __future__ import annotations

import numpy as np
from numba import types

from .core import asm, f32, instruction


def _of_one(text, meaning):
    """An instruction (float32) -> float32."""

    @instruction(meaning)
    def of_one(typingctx, value):
        def codegen(context, builder, sig, args):
            return asm(builder, f32, args, text, "=f,f")

        return types.float32(types.float32), codegen

    return of_one


def _sine(value):
    with np.errstate(invalid="ignore"):
        return np.float32(np.sin(np.float64(value)))


# Error 2^-21 within a period; beyond it that of the period's number, relative to the angle, too.
sine_approx = _of_one("sin.approx.f32 $0, $1;", _sine)
nearest_integer = _of_one("cvt.rni.f32.f32 $0, $1;", lambda value: np.rint(np.float32(value)))
