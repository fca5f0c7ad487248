"""What a row's ends receive from their repetitions."""

from collections.abc import Callable
from typing import NamedTuple

from numba import uint32, uint64

from numba_tconv.ptx import device_function, repeated
from numba_tconv.runtime.elements import ELEMENTS

from .tile import Config


class Ends(NamedTuple):
    """Device functions; ``row``: the element of dy's first sample."""

    before_row: Callable  # (filter_down, dy, row, out_length): by the first activated up-sample
    after_row: Callable  # (filter_down, dy, row, out_length, up_length): by the last
    add: Callable  # (0, edge): zeroes dv outside the row, adds to it at the ends
    repetitions: Callable  # (filter_up, planes, first, end, origin, up_length): by an end of x


def make_ends(config: Config) -> Ends:
    load, accumulator = ELEMENTS[config.dtype].load, ELEMENTS[config.dtype].accumulator
    up_taps, down_taps, up_ratio, down_ratio = config.up_taps, config.down_taps, config.up_ratio, config.down_ratio
    up_shift, down_shift, plane = config.sizes.up_shift, config.sizes.down_shift, config.plane
    wide, run = accumulator.bitwidth == 64, config.run

    @device_function
    def before_row(filter_down, dy, row, out_length):
        total = accumulator(0)
        for o in range(min(-(-down_shift // down_ratio), out_length)):
            value = load(dy.data[uint64(row + o * dy.stride_l)])
            for k in range(min(down_shift - o * down_ratio, down_taps)):
                total += load(filter_down[uint64(k)]) * value
        return total

    @device_function
    def after_row(filter_down, dy, row, out_length, up_length):
        total = accumulator(0)
        first = max(0, (up_length + down_shift - down_taps) // down_ratio)
        for o in range(first, out_length):
            value = load(dy.data[uint64(row + o * dy.stride_l)])
            for k in range(max(0, up_length + down_shift - o * down_ratio), down_taps):
                total += load(filter_down[uint64(k)]) * value
        return total

    @device_function
    def repetitions(filter_up, planes, first, end, origin, up_length):
        """The sum over repetitions ``first`` to ``end - 1``.

        In float32 each repetition is summed apart: shorter sums round less."""
        total = accumulator(0)
        for j in range(first, end):
            place = j * up_ratio - up_shift  # the up-sample of the first tap
            taps = accumulator(0)
            for k in range(max(0, -place), min(up_taps, up_length - place)):
                n = uint32(place + k - origin)
                value = planes[n % uint32(up_ratio) * uint32(plane) + n // uint32(up_ratio)]
                if wide:
                    total += load(filter_up[uint64(k)]) * value
                else:
                    taps += load(filter_up[uint64(k)]) * value
            if not wide:
                total += taps
        return accumulator(up_ratio) * total

    @device_function
    def at_ends(z, edge):
        """Phases first, then positions."""
        m = edge.first + z % run * up_ratio + z // run
        if m < 0 or m >= edge.up_length:
            edge.dv[z] = accumulator(0)
        if m == 0:
            edge.dv[z] += edge.head
        if m == edge.up_length - 1:
            edge.dv[z] += edge.tail

    return Ends(before_row, after_row, repeated(at_ends, run * up_ratio), repetitions)
