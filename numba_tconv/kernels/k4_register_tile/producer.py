"""k4's and k5_dmma's producer, by cp.async."""

from numba import cuda, int32, int64, uint64

from numba_tconv.ptx import cp_async, device_function

from .tile import Config


def make_aim(config: Config, warps: int, first_thread: int = 0):
    """Build ``aim``: writes ``block.offsets`` and ``block.start``; ``shift``: columns from the window to its tile."""
    x_vector, x_per_row = config.x_vector, config.copied // config.x_vector

    @device_function
    def aim(block, shift, x, sizes, grid):
        p = int32(cuda.threadIdx.x - first_thread)
        while p < x_per_row:
            n, column = divmod(block.first_column + p * x_vector - shift, grid.columns)
            if p * x_vector == shift:
                block.start[0], block.start[1] = n, column
            i = grid.first_column + column
            inside = n >= 0 and n < sizes.batch and i >= 0 and i < sizes.length
            block.offsets[uint64(p)] = n * x.stride_n + i * x.stride_l if inside else int64(-1)
            p = int32(p + 32 * warps)

    return aim


def make_load_window(config: Config, warps: int, first_thread: int = 0):
    """Build ``load_window``: copies a stage's window to element ``slot`` of shared memory.

    ``channel``: offset in x of the stage's first channel. Channels from ``channels_left`` on become zeros."""
    x_vector, x_per_row = config.x_vector, config.copied // config.x_vector
    width, block_k = config.width, config.block_k
    x_copies, whole_chunks, copy = -(-x_per_row // 32), config.whole_chunks, cp_async(x_vector)

    @device_function
    def load_window(block, slot, x, channel, channels_left):
        warp, lane = int32((cuda.threadIdx.x - first_thread) // 32), int32(cuda.threadIdx.x % 32)
        # A warp copies whole channels: one place serves them all.
        for j in range(x_copies):
            p = int32(lane + 32 * j)
            if 32 * (j + 1) <= x_per_row or p < x_per_row:
                offset = block.offsets[uint64(p)]
                inside = offset >= 0
                element = offset + channel + warp * x.stride_c if inside else int64(0)
                next_channel = warps * x.stride_c if inside else int64(0)
                target = int32(slot + warp * width + p * x_vector)
                for z in range(-(-block_k // warps)):
                    if z < block_k // warps or warp < block_k % warps:
                        exists = whole_chunks or warp + z * warps < channels_left
                        copy(block.shared, target + z * warps * width, x.data, element, inside and exists)
                        element += next_channel

    return load_window
