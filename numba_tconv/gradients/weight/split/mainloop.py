"""Products: a pair's taps read one register window."""

from collections.abc import Callable
from typing import NamedTuple

from numba_tconv.ptx import device_function, load_vector

from .tile import Config


class Registers(NamedTuple):
    sums: object
    xs: object  # a vector a row
    gs: object  # a pair's columns that it meets
    shared: object


def make_multiply(config: Config) -> Callable:
    """Build the products of a vector of positions; ``x``, ``g``: shared elements of the thread's first row and pair."""
    vector, tap_chunk, step, window = config.vector, config.tap_chunk, config.taps.step, config.window_columns
    thread_m, thread_p, lanes_m, lanes_p = config.thread_m, config.thread_p, config.lanes_m, config.lanes_p
    x_pitch, g_pitch = config.pitch(config.block_l), config.pitch(config.width)

    @device_function
    def multiply(registers, x, g):
        sums, xs, gs = registers.sums, registers.xs, registers.gs
        for m in range(thread_m):
            load_vector(xs, m * vector, registers.shared, x + m * (lanes_m * x_pitch))
        for p in range(thread_p):
            for q in range(0, window, vector):
                load_vector(gs, q, registers.shared, g + p * (lanes_p * g_pitch) + q)
            for b in range(tap_chunk):
                for m in range(thread_m):
                    for z in range(vector):
                        sums[(m * thread_p + p) * tap_chunk + b] += xs[m * vector + z] * gs[z + b * step]

    return multiply
