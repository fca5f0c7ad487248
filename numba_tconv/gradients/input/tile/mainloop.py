"""Products: a pair's taps read one register window. Addresses are shared, in bytes."""

from collections.abc import Callable
from typing import NamedTuple

from numba import int32, uint32, uint64

from numba_tconv.kernels.common.register_tile import make_sums
from numba_tconv.ptx import device_function, load_vector_at, repeated

from .tile import Config


class Registers(NamedTuple):
    sums: object
    columns: object
    weights: object
    shared: object
    base: int


class Pair(NamedTuple):
    columns: int  # address
    weights: int  # address
    weights_pitch: int  # to the next pair's
    number: int
    full_phases: int  # with ``taps`` taps; others have one less
    taps: int


class Tap(NamedTuple):
    weights: int  # address
    taps: int


class Multiply(NamedTuple):
    taps_of_stage: Callable  # (s, grid): phases of stage ``s`` with all taps; the taps
    long: Callable  # (0, (registers, pair)): a pair of all taps
    turn: Callable  # for pairs_a_turn pairs of all taps
    short_turn: Callable  # for short_a_turn pairs with one tap less


def make_multiply(config: Config) -> Multiply:
    vector, vector_m, itemsize, step = config.vector, config.vector_m, config.itemsize, config.taps.step
    block_m, thread_m, thread_n, lanes_m = config.block_m, config.thread_m, config.thread_n, config.lanes_m
    tap_chunk, phases, pitch = config.tap_chunk, config.phases, config.itemsize * config.pitch
    tests_taps = not (config.whole or config.long_phases)
    add_products, _ = make_sums(thread_n, vector, config.exchanged)

    @device_function
    def taps_of_stage(s, grid):
        if not tests_taps:
            return int32(phases), int32(tap_chunk)
        quotient = uint32(s) // uint32(grid.channel_chunks)
        chunk = quotient // uint32(grid.phase_chunks)
        first_phase = int32(quotient - chunk * uint32(grid.phase_chunks)) * phases
        return int32(grid.full_phases - first_phase), int32(grid.taps_per_row - int32(chunk) * tap_chunk)

    @device_function
    def multiply_tap(b, state):
        registers, tap = state
        # A missing tap must not multiply: zero times NaN is NaN.
        if not tests_taps or b < tap.taps:
            for m in range(0, thread_m, vector_m):
                address = int32(tap.weights + itemsize * (b * block_m + m * lanes_m))
                if vector_m == vector:
                    load_vector_at(registers.weights, m, registers.shared, address)
                else:
                    for z in range(vector_m):
                        e = (address - registers.base) // itemsize + z
                        registers.weights[m + z] = registers.shared[uint64(e)]
            for m in range(thread_m):
                add_products(registers.sums, registers.weights, registers.columns, m, b * step)

    def make_multiply_pair(taps):
        multiply_taps = repeated(multiply_tap, taps)
        window = thread_n + -(-(taps - 1) * step // vector) * vector

        @device_function
        def multiply_pair(z, state):
            registers, pair = state
            for q in range(0, window, vector):
                address = int32(pair.columns + z * pitch + itemsize * q)
                load_vector_at(registers.columns, q, registers.shared, address)
            is_full = uint32(pair.number + z) % uint32(phases) < pair.full_phases
            tap = Tap(int32(pair.weights + z * pair.weights_pitch), pair.taps if is_full else pair.taps - 1)
            multiply_taps(int32(0), (registers, tap))

        return multiply_pair

    long, short = make_multiply_pair(tap_chunk), make_multiply_pair(max(1, tap_chunk - 1))
    return Multiply(taps_of_stage, long, repeated(long, config.pairs_a_turn), repeated(short, config.short_a_turn))
