"""The activations between the filters, as device functions (u, row constants) -> value."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from numba import cuda, float32, float64

from numba_tconv.ptx import device_function

ROUND = 12582912.0  # 1.5 * 2^23: adding it rounds a float32 below 2^22 to an integer
MOST_TURNS = 2.0**20  # half periods of sin that float32 reduces
SINE = (
    0.07755863666534424,
    -0.5982412099838257,
    2.550069570541382,
    -5.167709827423096,
    3.1415927410125732,
)  # of sin(pi*t)/t by powers of t^2, highest first


def make_constants(wide: bool, log_scale: bool) -> Callable:
    """(constants, alpha, beta): what a row's Snake needs.

    In float32: the half periods per unit in two parts, 1/(b + 1e-9), the largest |u| reduced in float32. In float64
    (``wide``): a and 1/(b + 1e-9).
    """

    @device_function
    def fill(constants, alpha, beta):
        a, b = float64(alpha), float64(beta)
        if log_scale:
            a, b = math.exp(a), math.exp(b)
        if wide:
            constants[0] = a
            constants[1] = 0.0
            constants[2] = 1.0 / (b + 1e-9)
            constants[3] = 0.0
        else:
            turns = a / math.pi
            constants[0] = float32(turns)
            constants[1] = float32(turns - float64(float32(turns)))
            constants[2] = float32(1.0 / (b + 1e-9))
            constants[3] = float32(MOST_TURNS / max(abs(turns), 1e-30))

    return fill


@device_function
def squared_sine(t):
    """sin^2(pi*t) for |t| <= 1/2."""
    q = t * t
    p = cuda.fma(float32(SINE[0]), q, float32(SINE[1]))
    p = cuda.fma(p, q, float32(SINE[2]))
    p = cuda.fma(p, q, float32(SINE[3]))
    p = cuda.fma(p, q, float32(SINE[4])) * t
    return p * p


@device_function
def snake(u, constants):
    turns, rest, inverse, _ = constants
    n = cuda.fma(u, turns, float32(ROUND)) - float32(ROUND)
    t = cuda.fma(u, rest, cuda.fma(u, turns, -n))
    return cuda.fma(squared_sine(t), inverse, u)


@device_function
def distant_snake(u, constants):
    """Snake of any float32: the phase in float64."""
    turns, rest, inverse, _ = constants
    phase = float64(u) * (float64(turns) + float64(rest))
    return cuda.fma(squared_sine(float32(phase - math.floor(phase + 0.5))), inverse, u)


@device_function
def wide_snake(u, constants):
    a, _, inverse, _ = constants
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


def of(activation: str, dtype: torch.dtype) -> Callable:
    if activation == "snake":
        return wide_snake if dtype == torch.float64 else snake
    return POINTWISE[activation]
