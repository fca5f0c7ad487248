"""Products of a thread's operands in registers."""

from collections.abc import Callable
from typing import NamedTuple

from numba import int32

from numba_tconv.kernels.common.register_tile import make_sums
from numba_tconv.ptx import device_function, load_vector_at, repeated, store_vector

from .arguments import Lane, Stage
from .tile import Config


class Multiply(NamedTuple):
    """Sizes of operand arrays, and device functions."""

    window: int
    weights: int
    lane_of: Callable  # (thread): Lane
    tails_of: Callable  # (lane, full_phases): a bit for each row of a phase below ``full_phases``
    multiply: Callable  # (registers, stage, tails): adds a stage's products
    put: Callable  # (shared, sums, results, lane): stages the sums; ``results``: a vector


def make_multiply(config: Config) -> Multiply:
    vector, block_m, block_k, tap_chunk = config.vector, config.block_m, config.block_k, config.tap_chunk
    thread_m, thread_n, lanes_m, lanes_n = config.thread_m, config.thread_n, config.lanes_m, 32 // config.lanes_m
    warps_n, halo, window, step = config.warps_n, config.halo, config.window, config.taps.step
    phases, channels, ragged, pitch = config.phases, config.channels, config.ragged, config.result_pitch
    uniform, apart, before = config.uniform, config.apart, config.lead - halo
    whole_taps = tap_chunk - 1 if ragged else tap_chunk  # that every row has
    at_once, itemsize = config.at_once, config.itemsize
    x_row, w_row = itemsize * config.width, itemsize * tap_chunk * block_m
    add_products, copy_sums = make_sums(thread_n, vector, config.exchanged)

    @device_function
    def lane_of(thread):
        warp, lane = thread // 32, thread % 32
        row = int32(warp // warps_n * (lanes_m * thread_m) + lane // lanes_n * vector)
        column = int32(warp % warps_n * (lanes_n * thread_n) + lane % lanes_n * thread_n)
        return Lane(row, column, weights=row, window=int32(column + before))

    @device_function
    def load_weights(weights, stage, tap):
        for h in range(thread_m // vector):
            address = int32(stage.weights + itemsize * (tap * block_m + h * vector * lanes_m))
            load_vector_at(weights, h * vector, stage.shared, address)

    @device_function
    def product(tap, state):
        registers, stage = state
        load_weights(registers.weights, stage, tap)
        for m in range(thread_m):
            add_products(registers.sums, registers.weights, registers.window, m, halo - tap * step)

    products = repeated(product, max(1, whole_taps))

    @device_function
    def multiply_channel(z, state):
        registers, stage = state
        for q in range(0, window, vector):
            load_vector_at(registers.window, q, stage.shared, int32(stage.window + z * x_row + itemsize * q))
        if whole_taps:
            channel = Stage(stage.shared, stage.window, int32(stage.weights + z * w_row))
            products(int32(0), (registers, channel))

    multiply_channels = repeated(multiply_channel, at_once)

    @device_function
    def multiply_last(registers, stage, tails):
        load_weights(registers.weights, stage, whole_taps)
        for m in range(thread_m):
            # A missing tap must not multiply: zero times NaN is NaN.
            if uniform or tails >> m & 1:
                add_products(registers.sums, registers.weights, registers.window, m, halo - whole_taps * step)

    @device_function
    def multiply(registers, stage, tails):
        """Rows of one phase test the last tap outside the loop: loads do not wait."""
        in_window, in_weights, c = stage.window, stage.weights, int32(0)
        if not ragged or (uniform and tails == 0):
            while c < block_k:
                multiply_channels(int32(0), (registers, Stage(stage.shared, in_window, in_weights)))
                in_window, in_weights = int32(in_window + at_once * x_row), int32(in_weights + at_once * w_row)
                c = int32(c + at_once)
        else:
            while c < block_k:
                channel = Stage(stage.shared, in_window, in_weights)
                multiply_channel(int32(0), (registers, channel))
                multiply_last(registers, channel, tails)
                in_window, in_weights, c = int32(in_window + x_row), int32(in_weights + w_row), int32(c + 1)

    @device_function
    def tails_of(lane, full_phases):
        tails = int32(0)
        for m in range(thread_m):
            row = lane.row + m // vector * (vector * lanes_m) + m % vector
            if (row // channels if apart else row % phases) < full_phases:
                tails |= int32(1 << m)
        return tails

    @device_function
    def put(shared, sums, results, lane):
        for m in range(thread_m):
            row = lane.row + m // vector * (vector * lanes_m) + m % vector
            for n in range(0, thread_n, vector):
                copy_sums(results, sums, m, n)
                store_vector(shared, row * pitch + lane.column + n, results, 0)

    return Multiply(window, thread_m, lane_of, tails_of, multiply, put)
