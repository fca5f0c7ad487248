"""Activations as device functions (u, constants) -> value."""

import math
from collections.abc import Callable

import torch
from numba import cuda, float32, float64

from numba_tconv.ptx import device_function, nearest_integer, sine_approx

LEAST_SCALE = 2.0**-48  # sin^2 of so small an angle, over 1e-9, vanishes beside u

SQUARED_SINE = (
    -3.3362109661102295,
    13.03711223602295,
    -30.098552703857422,
    42.7269287109375,
    -32.469661712646484,
    9.869604110717773,
)  # of sin^2(pi*t)/t^2, |t| <= 1/2, by t^2, highest first


def make_constants(dtype: torch.dtype, log_scale: bool) -> Callable:
    """Build (constants, alpha, beta) -> scale, by which the filters multiply u.

    Constants: half periods (float32) or radians per unit of u, and 1/(b + 1e-9). For 16-bit elements u has radians."""
    unit = math.pi if dtype == torch.float32 else 1.0
    real = float64 if dtype == torch.float64 else float32
    in_radians = dtype.itemsize == 2

    @device_function
    def fill(constants, alpha, beta):
        a, b = float64(alpha), float64(beta)
        if log_scale:
            a, b = math.exp(a), math.exp(b)
        inverse = 1.0 / (b + 1e-9)
        if not in_radians:
            constants[0], constants[1] = real(a / unit), real(inverse)
            return real(1)
        scale = LEAST_SCALE if abs(a) < LEAST_SCALE else a
        constants[0], constants[1] = real(1), real(scale * inverse)
        return real(scale)

    return fill


@device_function
def snake(u, constants):
    """In float32; an angle too large to tell multiples of pi apart rounds to one."""
    turns, inverse = constants
    phase = u * turns
    t = phase - nearest_integer(phase)
    q = t * t
    p = float32(SQUARED_SINE[0])
    for k in range(1, len(SQUARED_SINE)):
        p = cuda.fma(p, q, float32(SQUARED_SINE[k]))
    return cuda.fma(p, q * inverse, u)


@device_function
def coarse_snake(u, constants):
    """``snake`` for 16-bit elements: of u in radians."""
    sine = sine_approx(u)
    return cuda.fma(sine * sine, constants[1], u)


@device_function
def wide_snake(u, constants):
    a, inverse = constants
    sine = math.sin(a * u)
    return u + inverse * (sine * sine)


@device_function
def silu(u, constants):
    return u / (type(u)(1) + math.exp(-u))


@device_function
def leaky_relu(u, constants):
    return u if u > 0 else u * type(u)(0.01)


@device_function
def elu(u, constants):
    return u if u > 0 else math.expm1(u)


@device_function
def gelu(u, constants):
    return type(u)(0.5) * u * (type(u)(1) + math.erf(u * type(u)(math.sqrt(0.5))))


@device_function
def identity(u, constants):
    return u


POINTWISE = {"silu": silu, "leaky_relu": leaky_relu, "elu": elu, "gelu": gelu, "identity": identity}


SNAKE = {torch.float64: wide_snake, torch.float32: snake}


def of(activation: str, dtype: torch.dtype) -> Callable:
    return SNAKE.get(dtype, coarse_snake) if activation == "snake" else POINTWISE[activation]
