"""The mainloop of k4 on CUDA cores: a thread's weights and window of x in registers, and all products."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from numba import int32

from numba_tconv.kernels.common.thread_sums import make_sums
from numba_tconv.ptx import device_function, load_vector_at, repeated, store_vector

from .tile import Config


class Multiply(NamedTuple):
    """How a block multiplies: elements of a thread's local operand arrays, and device functions.

    * ``place(thread)``: first row and column of the thread's sums; offsets of its weights and columns of x in a stage.
    * ``tails_of(row_at, last_row)``: a bit for each of the thread's rows whose phase is below ``last_row``: it has the
      last tap.
    * ``stage(acc, xs, ws, shared, x_at, w_at, tails)``: the products of a stage at two addresses.
    * ``put(shared, acc, results, row_at, column_at)``: the sums into the staged tile, a vector of ``results`` at a
      time.
    """

    xs: int
    ws: int
    place: Callable
    tails_of: Callable
    stage: Callable
    put: Callable


def make_multiply(config: Config) -> Multiply:
    vector, block_m, block_k, tap_chunk = config.vector, config.block_m, config.block_k, config.tap_chunk
    thread_m, thread_n, lanes_m, lanes_n = config.thread_m, config.thread_n, config.lanes_m, 32 // config.lanes_m
    warps_n, halo, window, pitch, step = config.warps_n, config.halo, config.window, config.pitch, config.taps.step
    phases, channels, ragged = config.phases, config.channels, config.ragged
    uniform, apart, lead = config.uniform, config.apart, config.lead
    whole_taps = tap_chunk - 1 if ragged else tap_chunk  # taps of a chunk that every row has
    at_once, itemsize = config.at_once, config.itemsize
    x_row, w_row = itemsize * config.width, itemsize * tap_chunk * block_m
    add_products, copy_sums = make_sums(thread_n, vector, config.exchanged)

    @device_function
    def place(thread):
        warp, lane = thread // 32, thread % 32
        row_at = int32(warp // warps_n * (lanes_m * thread_m) + lane // lanes_n * vector)
        column_at = int32(warp % warps_n * (lanes_n * thread_n) + lane % lanes_n * thread_n)
        return row_at, column_at, row_at, int32(column_at + lead)

    @device_function
    def load_weights(ws, shared, w_at, b):
        for h in range(thread_m // vector):
            load_vector_at(ws, h * vector, shared, int32(w_at + itemsize * (b * block_m + h * vector * lanes_m)))

    @device_function
    def product(b, state):
        """A tap that every row has; taps read the same register window at different offsets."""
        acc, xs, ws, shared, w_at = state
        load_weights(ws, shared, w_at, b)
        for m in range(thread_m):
            add_products(acc, ws, xs, m, halo - b * step)

    products = repeated(product, max(1, whole_taps))

    @device_function
    def multiply(z, state):
        """Channel ``z`` of a turn, with the taps that every row has."""
        acc, xs, ws, shared, x_at, w_at = state
        for q in range(0, window, vector):
            load_vector_at(xs, q, shared, int32(x_at + z * x_row + itemsize * q))
        if whole_taps:
            products(int32(0), (acc, xs, ws, shared, int32(w_at + z * w_row)))

    multiply_turn = repeated(multiply, at_once)

    @device_function
    def multiply_last(acc, xs, ws, shared, w_at, tails):
        """The last tap, with the window in ``xs``, for the rows that have it."""
        load_weights(ws, shared, w_at, whole_taps)
        for m in range(thread_m):
            # A missing tap must not multiply: zero times NaN is NaN.
            if uniform or tails >> m & 1:
                add_products(acc, ws, xs, m, halo - whole_taps * step)

    @device_function
    def multiply_stage(acc, xs, ws, shared, x_at, w_at, tails):
        """The last tap of rows of one phase is tested for outside the loop: loads of one channel then do not wait for
        products of another.
        """
        c = int32(0)
        if not ragged or (uniform and tails == 0):
            while c < block_k:
                multiply_turn(int32(0), (acc, xs, ws, shared, x_at, w_at))
                x_at, w_at = int32(x_at + at_once * x_row), int32(w_at + at_once * w_row)
                c = int32(c + at_once)
        else:
            while c < block_k:
                multiply(int32(0), (acc, xs, ws, shared, x_at, w_at))
                multiply_last(acc, xs, ws, shared, w_at, tails)
                x_at, w_at, c = int32(x_at + x_row), int32(w_at + w_row), int32(c + 1)

    @device_function
    def tails_of(row_at, last_row):
        tails = int32(0)
        for m in range(thread_m):
            row = row_at + m // vector * (vector * lanes_m) + m % vector
            if (row // channels if apart else row % phases) < last_row:
                tails |= int32(1 << m)
        return tails

    @device_function
    def put(shared, acc, results, row_at, column_at):
        for m in range(thread_m):
            row = row_at + m // vector * (vector * lanes_m) + m % vector
            for n in range(0, thread_n, vector):
                copy_sums(results, acc, m, n)
                store_vector(shared, row * pitch + column_at + n, results, 0)

    return Multiply(window, thread_m, place, tails_of, multiply_stage, put)
