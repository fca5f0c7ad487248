"""Derivatives of activations: device functions u -> derivative."""

import math

from numba_tconv.ptx import device_function


@device_function
def silu(u):
    s = type(u)(1) / (type(u)(1) + math.exp(-u))
    return s * (type(u)(1) + u * (type(u)(1) - s))


@device_function
def leaky_relu(u):
    return type(u)(1) if u > 0 else type(u)(0.01)


@device_function
def elu(u):
    return type(u)(1) if u > 0 else math.exp(u)


@device_function
def gelu(u):
    below = type(u)(0.5) * (type(u)(1) + math.erf(u * type(u)(math.sqrt(0.5))))
    return below + u * math.exp(type(u)(-0.5) * u * u) * type(u)(1 / math.sqrt(2 * math.pi))


@device_function
def identity(u):
    return type(u)(1)


POINTWISE = {"silu": silu, "leaky_relu": leaky_relu, "elu": elu, "gelu": gelu, "identity": identity}
