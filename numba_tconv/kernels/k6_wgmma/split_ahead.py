"""Split operands of k6 (tf32x3): the float32 of a stage become parts of fp16, in their place.

A number of x is in the windows of up to four lanes. With few taps each of them splits what it reads (window.py);
with more, the warp that has copied a stage does it once for all, before they see it (Config.split_ahead). Then a window
takes fewer registers, and may be wider: taps that lie further apart share it.

Channels t and t + 4 of a stage, which meet in a word of an operand (``split_channel``), have their larger parts where t
was, and their smaller ones where t + 4 was, both beside their column. So a window is loaded as before, but as words.
"""

from __future__ import annotations

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

LANES = 4  # which share a row: each takes every fourth vector of it
VECTOR, BYTES = 4, 16  # numbers that a lane loads at a time
STEP = LANES * BYTES  # from a lane's vector to its next


def row_of(lane):
    """The channel whose pair a lane splits: neighbouring lanes' are two apart, so that eight lanes read from all banks
    (Config.pitch)."""
    return (lane >> 2 & 1) * 2 + (lane >> 3 & 1) + (lane >> 4) * 8


def make_split_window():
    """Split: a device function, what a warp does with a window that it has copied.

    ``window_at``: its address, ``in_stage``: how it lies (boxes.py), ``first`` and ``last``: where its elements begin
    and end, in the row of a channel that is not sheared. What is beside them, of other rows or an older stage, becomes
    zeros. ``scales``: of the weights. Returns what sums of products are to be multiplied by.
    """
    load, own_row = ld_shared(VECTOR, float32), device_function(row_of)

    @device_function
    def clear(at, e, first, last):
        a, b, c, d = load(at)
        st_shared(at, a if first <= e < last else float32(0), b if first <= e + 1 < last else float32(0),
                  c if first <= e + 2 < last else float32(0), d if first <= e + 3 < last else float32(0))  # fmt: skip

    @device_function
    def split(at, below, upper, lower, scale):
        """A vector of each of the pair's rows."""
        a, e = split_pair(upper[0] * scale, lower[0] * scale)
        b, f = split_pair(upper[1] * scale, lower[1] * scale)
        c, g = split_pair(upper[2] * scale, lower[2] * scale)
        d, h = split_pair(upper[3] * scale, lower[3] * scale)
        st_shared(at, float_of(a), float_of(b), float_of(c), float_of(d))
        st_shared(at + below, float_of(e), float_of(f), float_of(g), float_of(h))

    @device_function
    def split_window(window_at, in_stage, first, last, scales, lane):
        alike_log, pitch, shear, _, _, _ = in_stage
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
        if exponent == NO_NUMBER:  # an infinity has no scale, but numbers beside it have
            largest, at = float32(0), int32(begin)
            while at < end:
                upper, lower = load(at), load(at + below)
                for z in range(VECTOR):
                    largest = larger_finite(larger_finite(largest, upper[z]), lower[z])
                at = int32(at + STEP)
            exponent = exponent_of_warp(largest)
        exponent = max(exponent, least)
        scale, at = scale_of(exponent), int32(begin)
        while at + STEP < end:  # two vectors at a time: what one waits for, the other does not
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
    """Split: a device function, what a warp does with a stage when its copies have arrived. ``at``: the stage's
    address; ``slot``: 8 bytes for each before it; ``split``: where the mbarriers are that say split, where the inverses
    of the windows' scales go, both of the first slot, and the weights' scales; ``firsts``, ``lasts``: of each window.
    """
    last, regions, split_window = config.regions - 1, config.regions, make_split_window()

    @device_function
    def split_stage(lane, at, slot, split, in_stage, firsts, lasts):
        _, _, _, region, _, _ = in_stage
        ready, inverses, scales = split
        z = int32(0)
        while z < regions:  # by one piece of code, as instructions are cached
            first, end = (firsts[0], lasts[0]) if z == 0 else (firsts[last], lasts[last])
            inverse = split_window(int32(at + z * region), in_stage, first, end, scales, lane)
            if lane == 0:
                st_shared_f32(int32(inverses + slot + 4 * z), inverse)
            z = recomputed(int32(z + 1))
        fence_async()  # the next to write here is the copy engine
        mbarrier_arrive(int32(ready + slot))  # each lane for what it has written, which racecheck understands

    return split_stage
