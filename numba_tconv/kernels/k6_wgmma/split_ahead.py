"""Split operands (tf32x3): producer warps replace a stage's float32 by fp16 halves, in place.

With many taps (Config.split_ahead) it saves work and registers; with few, lanes split (operands.py). Channels t and t +
4 share a word: hi in row t, lo in row t + 4."""

from numba import float32, int32

from numba_tconv.kernels.common.tensor_core.split_operand import (
    NO_NUMBER,
    exponent_of_warp,
    inverse_of_sums,
    larger_finite,
    scale_of,
    split_pair,
)
from numba_tconv.ptx import (
    device_function,
    fence_async,
    float_of,
    larger_magnitude,
    ld_shared,
    mbarrier_arrive,
    recomputed,
    st_shared,
    st_shared_f32,
)

from .tile import Config

LANES = 4  # a row
VECTOR, BYTES = 4, 16  # of a lane's load
STEP = LANES * BYTES


def row_of(lane):
    """A lane's channel; eight lanes read all banks (Config.pitch)."""
    return (lane >> 2 & 1) * 2 + (lane >> 3 & 1) + (lane >> 4) * 8


def make_split_window():
    """Build ``split_window``: a warp splits a window, returns the products' factor.

    Elements before ``first`` and from ``last`` on (in a row without shear) become zeros. ``scales``: of the weights."""
    load, own_row = ld_shared(VECTOR, float32), device_function(row_of)

    @device_function
    def clear(at, e, first, last):
        a, b, c, d = load(at)
        st_shared(at, a if first <= e < last else float32(0), b if first <= e + 1 < last else float32(0),
                  c if first <= e + 2 < last else float32(0), d if first <= e + 3 < last else float32(0))  # fmt: skip

    @device_function
    def split(at, below, upper, lower, scale):
        a, e = split_pair(upper[0] * scale, lower[0] * scale)
        b, f = split_pair(upper[1] * scale, lower[1] * scale)
        c, g = split_pair(upper[2] * scale, lower[2] * scale)
        d, h = split_pair(upper[3] * scale, lower[3] * scale)
        st_shared(at, float_of(a), float_of(b), float_of(c), float_of(d))
        st_shared(at + below, float_of(e), float_of(f), float_of(g), float_of(h))

    @device_function
    def split_window(window_at, window, first, last, scales, lane):
        alike_log, pitch, shear = window.alike_log, window.pitch, window.shear
        least, of_weights = scales
        channel, below = int32(own_row(lane)), int32(4 * pitch)
        alike = int32((1 << alike_log) - 1)
        begin = int32(window_at + channel * pitch + (lane & LANES - 1) * BYTES)
        end = int32(window_at + channel * pitch + pitch)
        if first + alike * (shear >> 2) > 0 or last < pitch >> 2:
            moved, at = int32((channel & alike) * (shear >> 2)), int32(begin)
            e = int32((lane & LANES - 1) * VECTOR - moved)
            while at < end:
                clear(at, e, first, last)
                clear(at + below, e, first, last)
                at, e = int32(at + STEP), int32(e + LANES * VECTOR)
        largest, other, at = float32(0), float32(0), int32(begin)
        while at < end:
            upper, lower = load(at), load(at + below)
            for z in range(VECTOR):
                largest, other = larger_magnitude(largest, upper[z]), larger_magnitude(other, lower[z])
            at = int32(at + STEP)
        exponent = exponent_of_warp(larger_magnitude(largest, other))
        if exponent == NO_NUMBER:  # scale by the finite numbers
            largest, at = float32(0), int32(begin)
            while at < end:
                upper, lower = load(at), load(at + below)
                for z in range(VECTOR):
                    largest = larger_finite(larger_finite(largest, upper[z]), lower[z])
                at = int32(at + STEP)
            exponent = exponent_of_warp(largest)
        exponent = max(exponent, least)
        scale, at = scale_of(exponent), int32(begin)
        while at + STEP < end:  # two at a time, for latency
            upper, lower = load(at), load(at + below)
            next_upper, next_lower = load(at + STEP), load(at + STEP + below)
            split(at, below, upper, lower, scale)
            split(at + STEP, below, next_upper, next_lower, scale)
            at = int32(at + 2 * STEP)
        if at < end:
            split(at, below, load(at), load(at + below), scale)
        return inverse_of_sums(exponent, of_weights)

    return split_window


def make_split_stage(config: Config):
    """Build ``split_stage``: a warp splits the stage at address ``at``; ``barrier``: bytes from the first."""
    last, regions, split_window = config.regions - 1, config.regions, make_split_window()

    @device_function
    def split_stage(lane, at, barrier, split, window, begins, ends):
        ready, inverses, scales = split
        region = window.region
        z = int32(0)
        while z < regions:  # a loop spares the instruction cache
            first, end = (begins[0], ends[0]) if z == 0 else (begins[last], ends[last])
            inverse = split_window(int32(at + z * region), window, first, end, scales, lane)
            if lane == 0:
                st_shared_f32(int32(inverses + barrier + 4 * z), inverse)
            z = recomputed(int32(z + 1))
        fence_async()  # the copy engine writes here next
        mbarrier_arrive(int32(ready + barrier))  # every lane, for racecheck

    return split_stage
