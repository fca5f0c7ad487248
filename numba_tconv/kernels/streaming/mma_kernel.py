"""A step on tensor cores: a matrix product with the weights as they lie (drawing: kernels/README.md).

A row is an output channel and a phase r, a column a slot's new frame. A stage holds the rows' taps and all frames of
some input channels. Tap r + q*stride multiplies the frames q before the columns' own. Warps add up their sums in one
order.

Frames lie by time, then by slot: the columns' are adjacent for every q, and so is the new state."""

from functools import cache

from numba import cuda, float32, int32, int64, types, uint32, uint64

from numba_tconv.kernels.common.arguments import arguments
from numba_tconv.ptx import (
    cp_async_commit,
    cp_async_wait,
    device_function,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    shared_address,
)
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, flat

from .arguments import Block, MmaSizes, signature_of
from .kernel import is_live
from .mma_epilogue import make_keep, make_store
from .mma_load import make_load_frames, make_load_weights
from .mma_mainloop import make_multiply
from .mma_tile import ROWS, VECTOR, Config


@device_function
def judge(is_last, tickets, ticket, number, drawn, sizes):
    """Note whether this block, which drew ``drawn``, is the last to read stage ``number``, and reset the ticket."""
    is_last[number & 3] = int32(drawn == sizes.row_tiles - 1)
    if drawn == sizes.row_tiles - 1 and sizes.row_tiles > 1:
        tickets[uint64(ticket + number)] = int32(0)


def make_advances(config: Config):
    """Build ``advances``: whether a slot of the block does. All threads call it."""
    threads = config.threads

    @device_function
    def advances(mask, block, slots, sizes):
        advance, slot = int32(0), int32(cuda.threadIdx.x)
        while slot < slots:
            n = block.first_slot + slot
            if n < sizes.batch and is_live(mask, n):
                advance = int32(1)
            slot = int32(slot + threads)
        return cuda.syncthreads_or(advance)

    return advances


@cache
def make_kernel(config: Config) -> Kernel:
    storage, threads, kept, itemsize = ELEMENTS[config.dtype].storage, config.threads, config.kept, config.itemsize
    kernel_size, stride, channels, columns = config.kernel_size, config.stride, config.channels, config.columns
    channel_warps, stages, depth, halves = config.channel_warps, config.stages, config.depth, 4 // config.itemsize
    warp_columns = columns // config.column_warps
    stage_bytes, weights_bytes, stage_channels = config.stage_bytes, config.weights_bytes, config.stage_channels
    row_blocks, column_blocks, rows_of_tile = config.row_blocks, config.column_blocks, config.rows
    weight_pitch, frame_pitch = config.weight_pitch, config.frame_pitch
    sums, by_matrix = 4 * row_blocks * column_blocks, config.by_matrix
    lane_rows, next_rows = (row_blocks, ROWS) if by_matrix else (2 * row_blocks, ROWS // 2)
    apart, ahead, delay = config.apart, config.ahead, config.delay
    load_weights, (begin, end, words) = make_load_weights(config), make_load_frames(config)
    multiply, advances, keep = make_multiply(config), make_advances(config), make_keep(config)
    await_stage, (store_sums, store_columns) = cp_async_wait(ahead - 1), make_store(config)

    @device_function
    def keep_rest(steps, is_last, shared, base, state, mask, block, sizes):
        for z in range(delay):
            number = int32(steps - delay + z)
            if number >= 0 and is_last[number & 3]:
                keep(number, shared, base, state, mask, block, sizes)

    def streaming_mma(x, state, w, bias, mask, y, tickets, sizes):
        shared = cuda.shared.array(0, dtype=float32)
        typed = cuda.shared.array(0, dtype=storage)
        is_last = cuda.shared.array(4, dtype=int32)
        acc = cuda.local.array(sums, dtype=float32)
        rows = cuda.local.array(lane_rows, dtype=int32)
        values = cuda.local.array(words, dtype=int32)
        base = shared_address(shared, 0)
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(cuda.shfl_sync(0xFFFFFFFF, thread >> 5, 0))

        # Blocks that read the same weights are neighbours in the grid.
        tile, slot_tile = divmod(int64(cuda.blockIdx.x), sizes.slot_tiles)
        group, row_tile = divmod(tile, sizes.row_tiles)
        slots, in_channels = int32(sizes.slots), int32(sizes.in_per_group)
        first_out = int32(row_tile * channels)
        outs = min(int32(channels), int32(sizes.out_per_group - first_out))
        block = Block(group, slot_tile * slots, group * sizes.in_per_group, first_out, outs)
        w_first = block.first_in * w.stride_i + int64(first_out) * kernel_size
        steps = int32((in_channels + stage_channels - 1) // stage_channels)
        ticket = (group * sizes.slot_tiles + slot_tile) * steps
        for z in range(sums):
            acc[z] = float32(0)
        # Lane 8*m + r gives row r of matrix m; without, lane 4*r + c has rows r, r + 8 and channels c, c + 4.
        matrix, matrix_row = int32(lane >> 3), int32(lane & 7)
        if by_matrix:
            first_row, lane_channel = int32(8 * (matrix & 1)), int32(8 * (matrix >> 1) + matrix_row)
        else:
            first_row, lane_channel = int32(lane >> 2), int32((lane & 3) * halves)
        for z in range(lane_rows):
            row = int32(next_rows * z + first_row)
            out, phase = divmod(uint32(row), uint32(stride))
            rows[z] = int32((out * uint32(kernel_size) + phase) * uint32(itemsize)) if row < rows_of_tile else int32(0)
        column_warp, channel_warp = divmod(uint32(warp), uint32(channel_warps))
        first_column = int32(int32(column_warp) * warp_columns)
        first_channel = int32(int32(channel_warp) * depth)
        weights_at = int32(base + (first_channel + lane_channel) * weight_pitch)
        first_frame = int32(first_column + 8 * (matrix >> 1) + matrix_row)
        lane_bytes = int32(first_channel * itemsize + VECTOR * (matrix & 1))
        frames_at = int32(base + weights_bytes + first_frame * frame_pitch + lane_bytes)

        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        if mask.exists and not advances(mask, block, slots, sizes):
            steps = int32(0)

        for s in range(ahead):
            stage, channel = int32(base + s * stage_bytes), int32(s * stage_channels)
            if s < steps:
                load_weights(stage, w, w_first, channel, in_channels, outs)
                begin(values, stage + weights_bytes, x, state, block, channel, sizes)
                end(values, stage + weights_bytes, sizes)
            cp_async_commit()
        s, now, after = int32(0), int32(0), int32(ahead * stage_bytes)  # the stages multiplied and loaded
        drawn, earlier = int32(sizes.row_tiles - 1), int32(0)
        while s < steps:
            await_stage()
            cuda.syncthreads()  # the stage has landed; all have left the one loaded next
            loads = s + ahead < steps
            if loads:
                channel = int32((s + ahead) * stage_channels)
                load_weights(base + after, w, w_first, channel, in_channels, outs)
                begin(values, base + after + weights_bytes, x, state, block, channel, sizes)
            cp_async_commit()
            if kept:
                if s >= delay and is_last[(s - delay) & 3]:
                    keep(int32(s - delay), typed, base, state, mask, block, sizes)
                earlier = drawn
                if thread == 0 and sizes.row_tiles > 1:
                    # No fence: the frames have landed, so no write of the last reader reaches them.
                    drawn = int32(cuda.atomic.add(tickets, ticket + s, int32(1)))
            multiply(acc, rows, weights_at + now, frames_at + now, int32(slots * frame_pitch))
            if kept and thread == 0:
                if delay == 1 and s + 1 < steps:
                    judge(is_last, tickets, ticket, s, drawn, sizes)
                if delay == 2 and s > 0:
                    judge(is_last, tickets, ticket, int32(s - 1), earlier, sizes)
            if loads:
                end(values, base + after + weights_bytes, sizes)
            now = int32(now + stage_bytes if now < (stages - 1) * stage_bytes else 0)
            after = int32(after + stage_bytes if after < (stages - 1) * stage_bytes else 0)
            s = int32(s + 1)

        if not apart:
            if kept and thread == 0 and steps > 0:
                judge(is_last, tickets, ticket, int32(steps - 1), drawn, sizes)
            cuda.syncthreads()
            if kept:
                keep_rest(steps, is_last, typed, base, state, mask, block, sizes)
            cuda.syncthreads()  # sums overwrite the ring
        store_sums(acc, shared, int32(int32(channel_warp) * columns + first_column))
        cuda.syncthreads()
        store_columns(y, shared, bias, mask, block, sizes)
        if apart and kept:
            if thread == 0 and steps > 0:
                judge(is_last, tickets, ticket, int32(steps - 1), drawn, sizes)
            cuda.syncthreads()
            keep_rest(steps, is_last, typed, base, state, mask, block, sizes)

    signature = signature_of(storage, flat(types.int32), arguments(MmaSizes))
    return Kernel("streaming_mma", streaming_mma, signature, threads, config.shared_bytes, key=repr(config))
