"""From y's gradient through the activation to the up-samples'."""

import math
from typing import NamedTuple

from numba import cuda, int32

from numba_tconv.ptx import device_function, repeated
from numba_tconv.runtime.elements import ELEMENTS

from .arguments import UpSamples
from .tile import Config
from .trigonometry import Constants, trigonometry


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


DERIVATIVES = {"silu": silu, "leaky_relu": leaky_relu, "elu": elu, "gelu": gelu, "identity": identity}


class State(NamedTuple):
    up_samples: UpSamples
    constants: Constants


def make_through(config: Config):
    """Build ``one`` and ``through_all``: gradients of an up-sample, from its activation's, and of all of a thread's.

    Snake's add alpha's and beta's to ``sums``."""
    accumulator, ups = ELEMENTS[config.dtype].accumulator, config.run * config.up_ratio
    is_snake, takes_sums = config.activation == "snake", config.takes_sums
    trig = trigonometry(accumulator.bitwidth == 64)
    near_t, far_t, sine, cosine = trig.near, trig.far, trig.sine, trig.cosine
    pointwise = identity if is_snake else DERIVATIVES[config.activation]

    @device_function
    def through_snake(t, u, grad, sums, constants):
        s, co = sine(t), cosine(t)
        part = grad * s
        if takes_sums:
            sums[0] = cuda.fma(u * co, part, sums[0])
            sums[1] = cuda.fma(s, part, sums[1])
        return cuda.fma(constants.slope * co, part, grad)

    @device_function
    def one(u, grad, sums, constants):
        if is_snake:
            t = near_t(u, constants) if abs(u) <= constants.most else far_t(u, constants)
            return through_snake(t, u, grad, sums, constants)
        return grad * pointwise(u)

    @device_function
    def near(z, state):
        u, grad = state.up_samples.values[z], state.up_samples.dv[z]
        if is_snake:
            t = near_t(u, state.constants)
            state.up_samples.values[z] = through_snake(t, u, grad, state.up_samples.sums, state.constants)
        else:
            state.up_samples.values[z] = grad * pointwise(u)

    @device_function
    def far(z, state):
        u, grad = state.up_samples.values[z], state.up_samples.dv[z]
        t = far_t(u, state.constants)
        state.up_samples.values[z] = through_snake(t, u, grad, state.up_samples.sums, state.constants)

    all_near, all_far = repeated(near, ups), repeated(far, ups)

    @device_function
    def through_all(up_samples, constants):
        are_near = True
        if is_snake:
            largest = accumulator(0)
            for z in range(ups):
                largest = max(largest, abs(up_samples.values[z]))
            are_near = largest <= constants.most
        if are_near:
            all_near(int32(0), State(up_samples, constants))
        if is_snake and not are_near:
            all_far(int32(0), State(up_samples, constants))

    return one, through_all
