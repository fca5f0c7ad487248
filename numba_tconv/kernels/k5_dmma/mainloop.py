"""Products of 16 rows, 8 columns and ``depth`` channels, in TF32's fragments.

A lane's two weights of four channels are 16 packed bytes. Inputs are read for each tap."""

from numba import float64, int32

from numba_tconv.kernels.k4_register_tile.arguments import Lane, Stage
from numba_tconv.kernels.k4_register_tile.mainloop import Multiply
from numba_tconv.ptx import device_function, ld_shared, load_vector_at, mma_f64, recomputed, repeated, store_vector

from .tile import CHANNELS, COLUMNS, ROWS, Config


def make_multiply(config: Config) -> Multiply:
    block_k, tap_chunk, fours, at_once = config.block_k, config.tap_chunk, config.fours, config.at_once
    rows, columns, warps_n = 8 * config.thread_m, 4 * config.thread_n, config.warps_n
    tiles_m, tiles_n, all_tiles = rows // ROWS, columns // COLUMNS, config.block_m // ROWS
    width, halo, pitch, step, ragged = config.width, config.halo, config.result_pitch, config.taps.step, config.ragged
    before = config.lead - halo
    whole_taps = tap_chunk - 1 if ragged else tap_chunk
    # Bytes: weights of a product; weights, inputs of four channels.
    fragment = ROWS * CHANNELS * 8
    w_four, x_four = tap_chunk * all_tiles * fragment, CHANNELS * width * 8
    load, multiply_tile = ld_shared(1, float64), mma_f64(config.depth)

    @device_function
    def lane_of(thread):
        warp, lane = int32(thread // 32), int32(thread % 32)
        row, column = int32(warp // warps_n * rows), int32(warp % warps_n * columns)
        weights, window = int32(row * CHANNELS + lane * 2), int32(column + before + lane % 4 * width + lane // 4)
        return Lane(int32(row + lane // 4), int32(column + lane % 4 * 2), weights, window)

    @device_function
    def product(tap, state):
        registers, stage = state
        window, weights = registers.window, registers.weights
        for n in range(tiles_n):
            for z in range(fours):
                address = int32(stage.window + z * x_four + (halo - tap * step + COLUMNS * n) * 8)
                window[n * fours + z] = load(address)
        for m in range(tiles_m):
            for z in range(fours):
                address = int32(stage.weights + z * w_four + (tap * all_tiles + m) * fragment)
                load_vector_at(weights, 2 * z, stage.shared, address)
            for n in range(tiles_n):
                multiply_tile(registers.sums, (m * tiles_n + n) * 4, weights, 0, window, n * fours)

    products = repeated(product, max(1, whole_taps))

    @device_function
    def depth_of(stage, z):
        return Stage(stage.shared, int32(stage.window + z * fours * x_four), int32(stage.weights + z * fours * w_four))

    @device_function
    def multiply_depth(z, state):
        registers, stage = state
        if whole_taps:
            products(int32(0), (registers, depth_of(stage, z)))

    multiply_depths = repeated(multiply_depth, at_once)

    @device_function
    def multiply(registers, stage, tails):
        in_window, in_weights, c = stage.window, stage.weights, int32(0)
        while c < block_k:
            first = Stage(stage.shared, in_window, in_weights)
            multiply_depths(int32(0), (registers, first))
            if ragged and tails != 0:
                for z in range(at_once):
                    product(int32(whole_taps), (registers, depth_of(first, z)))
            in_window = int32(in_window + at_once * fours * x_four)
            in_weights = int32(in_weights + at_once * fours * w_four)
            c = recomputed(int32(c + at_once * fours * CHANNELS))  # unrolled, it would spill

    @device_function
    def tails_of(lane, full_phases):
        return int32(-1) if full_phases > 0 else int32(0)  # ragged rows are of one phase

    @device_function
    def put(shared, sums, results, lane):
        for m in range(2 * tiles_m):
            for n in range(tiles_n):
                for e in range(2):
                    results[e] = sums[(m // 2 * tiles_n + n) * 4 + m % 2 * 2 + e]
                store_vector(shared, (lane.row + 8 * m) * pitch + lane.column + COLUMNS * n, results, 0)

    return Multiply(tiles_n * fours, 2 * fours, lane_of, tails_of, multiply, put)
