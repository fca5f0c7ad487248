"""The mainloop of k5_dmma: a warp's weights and columns of x as tensor-core operands, and all products.

A product takes 16 rows, 8 columns and ``depth`` channels, in TF32's fragments
(kernels/common/tensor_core/fragments.py). A lane's two weights of four channels are 16 packed bytes. Inputs are read
anew for each tap.
"""

from __future__ import annotations

from numba import float64, int32

from numba_tconv.kernels.k4_register_tile.mainloop import Multiply
from numba_tconv.ptx import device_function, ld_shared, load_vector_at, mma_f64, recomputed, repeated, store_vector

from .tile import CHANNELS, COLUMNS, ROWS, Config


def make_multiply(config: Config) -> Multiply:
    block_k, tap_chunk, fours, at_once = config.block_k, config.tap_chunk, config.fours, config.at_once
    rows, columns, warps_n = 8 * config.thread_m, 4 * config.thread_n, config.warps_n
    tiles_m, tiles_n, all_tiles = rows // ROWS, columns // COLUMNS, config.block_m // ROWS
    width, halo, pitch, step, ragged = config.width, config.halo, config.pitch, config.taps.step, config.ragged
    lead = config.lead
    whole_taps = tap_chunk - 1 if ragged else tap_chunk
    # Bytes: weights of a product; weights of four channels of a block; inputs of four channels.
    fragment = ROWS * CHANNELS * 8
    w_four, x_four = tap_chunk * all_tiles * fragment, CHANNELS * width * 8
    load, multiply_tile = ld_shared(1, float64), mma_f64(config.depth)

    @device_function
    def place(thread):
        warp, lane = int32(thread // 32), int32(thread % 32)
        row, column = int32(warp // warps_n * rows), int32(warp % warps_n * columns)
        of_weights, of_columns = int32(row * CHANNELS + lane * 2), int32(column + lead + lane % 4 * width + lane // 4)
        return int32(row + lane // 4), int32(column + lane % 4 * 2), of_weights, of_columns

    @device_function
    def product(b, state):
        acc, xs, ws, shared, x_at, w_at = state
        for n in range(tiles_n):
            for z in range(fours):
                xs[n * fours + z] = load(int32(x_at + z * x_four + (halo - b * step + COLUMNS * n) * 8))
        for m in range(tiles_m):
            for z in range(fours):
                load_vector_at(ws, 2 * z, shared, int32(w_at + z * w_four + (b * all_tiles + m) * fragment))
            for n in range(tiles_n):
                multiply_tile(acc, (m * tiles_n + n) * 4, ws, 0, xs, n * fours)

    products = repeated(product, max(1, whole_taps))

    @device_function
    def multiply(z, state):
        """Step ``z`` of a turn of the loop, with the taps that every row has."""
        acc, xs, ws, shared, x_at, w_at = state
        if whole_taps:
            at = int32(x_at + z * fours * x_four), int32(w_at + z * fours * w_four)
            products(int32(0), (acc, xs, ws, shared, *at))

    multiply_turn = repeated(multiply, at_once)

    @device_function
    def multiply_stage(acc, xs, ws, shared, x_at, w_at, tails):
        c = int32(0)
        while c < block_k:
            multiply_turn(int32(0), (acc, xs, ws, shared, x_at, w_at))
            if ragged and tails != 0:
                for z in range(at_once):
                    at = int32(x_at + z * fours * x_four), int32(w_at + z * fours * w_four)
                    product(int32(whole_taps), (acc, xs, ws, shared, *at))
            x_at, w_at = int32(x_at + at_once * fours * x_four), int32(w_at + at_once * fours * w_four)
            c = recomputed(int32(c + at_once * fours * CHANNELS))  # keeps turns from being unrolled, which spills

    @device_function
    def tails_of(row_at, last_row):
        return int32(-1) if last_row > 0 else int32(0)  # ragged rows are of one phase

    @device_function
    def put(shared, acc, results, row_at, column_at):
        for m in range(2 * tiles_m):
            for n in range(tiles_n):
                for e in range(2):
                    results[e] = acc[(m // 2 * tiles_n + n) * 4 + m % 2 * 2 + e]
                store_vector(shared, (row_at + 8 * m) * pitch + column_at + COLUMNS * n, results, 0)

    return Multiply(tiles_n * fours, 2 * fours, place, tails_of, multiply_stage, put)
