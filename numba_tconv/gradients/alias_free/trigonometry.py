"""Sines and cosines of a*u: polynomials of its distance from the nearest whole half period."""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from numba import cuda, float32, float64

from numba_tconv.ptx import device_function

# Adding it rounds a smaller number to an integer.
ROUND, WIDE_ROUND = 1.5 * 2.0**23, 1.5 * 2.0**52
MOST_TURNS, WIDE_MOST_TURNS = 2.0**20, 2.0**50  # half periods that ``near`` reduces
REST_OF_PI = 1.967867667518249e-17  # 1/pi = float64(1/pi) - REST_OF_PI
# By t^2, highest first.
SINE = (0.07755863666534424, -0.5982412099838257, 2.550069570541382, -5.167709827423096, 3.1415927410125732)
COSINE = (-0.024396715685725212, 0.23493756353855133, -1.3352121114730835, 4.058709144592285, -4.934802055358887, 1.0)
WIDE_SINE = tuple((-1) ** k * math.pi ** (2 * k + 1) / math.factorial(2 * k + 1) for k in reversed(range(12)))
WIDE_COSINE = tuple((-1) ** k * math.pi ** (2 * k) / math.factorial(2 * k) for k in reversed(range(13)))


class Constants(NamedTuple):
    """Snake's, of a row."""

    turns: float  # half periods a unit; ``rest`` is the part that they lack
    rest: float
    inverse: float  # 1/(b + 1e-9)
    most: float  # the largest |u| of ``near``
    slope: float  # of Snake's derivative 1 + slope*sin(pi*t)*cos(pi*t)


class Trigonometry(NamedTuple):
    """Device functions of an accumulator's type; t is a*u in half periods, less the nearest integer."""

    fill: Callable  # (array of 4, a, b), both float64
    constants: Callable  # (array) -> Constants
    near: Callable  # (u, constants) -> t
    far: Callable  # (u, constants) -> t of any u
    sine: Callable  # t -> sin(pi*t)
    cosine: Callable  # t -> cos(pi*t)


@cache
def trigonometry(wide: bool) -> Trigonometry:
    """The functions, in float64 if ``wide``, else float32."""
    real = float64 if wide else float32
    offset, most = (WIDE_ROUND, WIDE_MOST_TURNS) if wide else (ROUND, MOST_TURNS)

    @device_function
    def fill(constants, a, b):
        turns = a * (1 / math.pi)
        constants[0] = real(turns)
        if wide:
            constants[1] = cuda.fma(a, 1 / math.pi, -turns) - a * REST_OF_PI
        else:
            constants[1] = real(turns - float64(real(turns)))
        constants[2] = real(1.0 / (b + 1e-9))
        constants[3] = real(most / max(abs(turns), 1e-30))

    @device_function
    def constants_of(filled):
        turns, rest, inverse = filled[0], filled[1], filled[2]
        return Constants(turns, rest, inverse, filled[3], real(2 * math.pi) * turns * inverse)

    @device_function
    def near(u, constants):
        n = cuda.fma(u, constants.turns, real(offset)) - real(offset)
        return cuda.fma(u, constants.rest, cuda.fma(u, constants.turns, -n))

    @device_function
    def far(u, constants):
        if wide:
            # Beyond, neighbours lie whole periods apart.
            return near(u, constants) if abs(u) <= constants.most else real(0)
        whole = float64(u) * (float64(constants.turns) + float64(constants.rest))
        return real(whole - math.floor(whole + 0.5))

    sine = _polynomial(WIDE_SINE if wide else SINE, True, real)
    cosine = _polynomial(WIDE_COSINE if wide else COSINE, False, real)
    return Trigonometry(fill, constants_of, near, far, sine, cosine)


def _polynomial(factors: tuple, odd: bool, real) -> Callable:
    others = len(factors) - 1

    @device_function
    def polynomial(t):
        q, p = t * t, real(factors[0])
        for k in range(others):
            p = cuda.fma(p, q, real(factors[k + 1]))
        return p * t if odd else p

    return polynomial
