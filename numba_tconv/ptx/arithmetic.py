"""Maxima, and the parts of a sine."""

import numpy as np
from numba import types

from .core import operation


def _larger_magnitude(value, other):
    return value if other != other else max(value, abs(other))


larger_magnitude = operation(
    "{ .reg .f32 magnitude; abs.f32 magnitude, $2; max.f32 $0, $1, magnitude; }",
    *[types.float32] * 3,
    meaning=_larger_magnitude,
)
larger_magnitude.__doc__ = """(value, other): the larger of ``value`` (>= 0) and ``|other|``; ``value`` if ``other`` is
NaN."""

redux_max = operation("redux.sync.max.u32 $0, $1, 0xffffffff;", types.int32, types.int32)
redux_max.__doc__ = """(value): the largest of a warp's non-negative numbers (from sm_80)."""


def _sine(value):
    with np.errstate(invalid="ignore"):
        return np.float32(np.sin(np.float64(value)))


# Error 2^-21 within a period; for larger angles, also one relative to the angle.
sine_approx = operation("sin.approx.f32 $0, $1;", *[types.float32] * 2, meaning=_sine)
nearest_integer = operation(
    "cvt.rni.f32.f32 $0, $1;", *[types.float32] * 2, meaning=lambda value: np.rint(np.float32(value))
)
