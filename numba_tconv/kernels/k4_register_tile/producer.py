"""The producer of k4 and of k5_dmma's ring: where a block's window lies in x, and its cp.async copies."""

from __future__ import annotations

from numba import cuda, int32, int64, uint64

from numba_tconv.ptx import cp_async, device_function

from .tile import Config


def make_aim(config: Config, warps: int, first_thread: int = 0):
    """A device function ``aim``, called by ``warps`` warps from thread ``first_thread`` on."""
    x_vector, x_per_row = config.x_vector, config.copied // config.x_vector

    @device_function
    def aim(source, place, first, shift, columns, first_column, batch, length, stride_n, stride_l):
        """Write to ``source`` where each vector of the window lies in x at channel 0, or -1 outside the signal, and to
        ``place`` sample and column of the block. The table is in shared memory to save registers.
        """
        p = int32(cuda.threadIdx.x - first_thread)
        while p < x_per_row:
            n, column = divmod(first + p * x_vector - shift, columns)
            if p * x_vector == shift:  # kept here, so that the store need not keep the division's result in registers
                place[0], place[1] = n, column
            i = first_column + column
            inside = n >= 0 and n < batch and i >= 0 and i < length
            source[uint64(p)] = n * stride_n + i * stride_l if inside else int64(-1)
            p = int32(p + 32 * warps)

    return aim


def make_load_window(config: Config, warps: int, first_thread: int = 0):
    """The same warps' device function ``load_window`` that starts the copies of a stage's window."""
    x_vector, x_per_row = config.x_vector, config.copied // config.x_vector
    width, block_k = config.width, config.block_k
    x_copies, whole_chunks, copy = -(-x_per_row // 32), config.whole_chunks, cp_async(x_vector)

    @device_function
    def load_window(shared, base, x, source, offset, stride_c, channels_left):
        warp, lane = int32((cuda.threadIdx.x - first_thread) // 32), int32(cuda.threadIdx.x % 32)
        # A warp copies whole channels: p needs no division, and the place of a vector serves all of them.
        for j in range(x_copies):
            p = int32(lane + 32 * j)
            if 32 * (j + 1) <= x_per_row or p < x_per_row:
                first = source[uint64(p)]
                inside = first >= 0
                element = first + offset + warp * stride_c if inside else int64(0)
                forth = warps * stride_c if inside else int64(0)
                at = int32(base + warp * width + p * x_vector)
                for z in range(-(-block_k // warps)):
                    if z < block_k // warps or warp < block_k % warps:
                        exists = whole_chunks or warp + z * warps < channels_left
                        copy(shared, at + z * warps * width, x, element, inside and exists)
                        element += forth

    return load_window
