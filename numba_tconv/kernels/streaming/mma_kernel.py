"""The kernel of a step on tensor cores: a matrix product with the weights as they lie (drawing: kernels/README.md).

A row is an output channel and a phase r, a column a slot's new frame. A stage holds the rows' taps and all frames of
some input channels. Tap r + q*stride multiplies the frames q before the columns' own. Warps add up their sums in one
order.

Frames lie by time, then by slot: the columns' are adjacent for every q, and so is the new state."""

from functools import cache

from numba import cuda, float32, int32, int64, types, uint32, uint64

from numba_tconv.kernels.common.arguments import arguments
from numba_tconv.kernels.common.tensor_core.split_operand import put_tf32
from numba_tconv.ptx import (
    cp_async_commit,
    cp_async_wait,
    device_function,
    float_of,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ld_shared,
    ld_shared_u16,
    ldmatrix,
    mma,
    prmt,
    shared_address,
    st_global_vector,
)
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, flat

from .arguments import Columns, Place, signature_of
from .kernel import is_live
from .mma_load import make_load_frames, make_load_weights
from .mma_tile import COLUMNS, KINDS, ROWS, VECTOR, Config

LOW_HALVES = 0x5410  # prmt's selector
load_number, load_words = ld_shared(1, float32), ld_shared(4, int32)
load_rows, load_few_rows, load_columns = ldmatrix(4), ldmatrix(2), ldmatrix(4, transposed=True)


def make_multiply(config: Config):
    """Build ``multiply``: adds a warp's products of a stage.

    ``weights``, ``frames``: this lane's addresses of the warp's first slice; ``rows``: bytes to the weights of its
    rows; ``shift``: bytes between two frames of a slot."""
    kept, stride, itemsize, halves = config.kept, config.stride, config.itemsize, 4 // config.itemsize
    row_blocks, column_blocks, operands = config.row_blocks, config.column_blocks, 4 * config.row_blocks
    pitch, next_columns, by_matrix = config.weight_pitch, COLUMNS * config.frame_pitch, config.by_matrix
    slices, slice_channels = config.slices, config.channel_warps * config.depth
    product, blocks_at_once = mma(KINDS[config.dtype]), min(2, config.column_blocks)
    load_frames, frame_words = load_rows if blocks_at_once == 2 else load_few_rows, 2 * blocks_at_once

    @device_function
    def load_weights(a, at, address):
        if halves == 1:
            put_tf32(a, at, load_number(address))
        else:
            a[at] = prmt(ld_shared_u16(address), ld_shared_u16(address + pitch), LOW_HALVES)

    @device_function
    def load_block(a, i, rows, weights):
        if by_matrix:
            words = load_columns(int32(weights + rows[i]))
            for z in range(4):
                a[4 * i + z] = words[z]
        else:
            for h in range(2):
                for k in range(2):
                    address = int32(weights + rows[2 * i + h] + k * 4 * halves * pitch)
                    load_weights(a, 4 * i + 2 * k + h, address)

    @device_function
    def multiply_slice(acc, rows, weights, frames, shift):
        a = cuda.local.array(operands, dtype=int32)
        b = cuda.local.array(frame_words, dtype=int32)
        q = int32(0)
        frames += int32(kept * shift)
        while q <= kept:
            for i in range(row_blocks):
                load_block(a, i, rows, weights)
            for j in range(0, column_blocks, blocks_at_once):
                words = load_frames(int32(frames + j * next_columns))
                for z in range(frame_words):
                    if halves == 1:
                        put_tf32(b, z, float_of(words[z]))
                    else:
                        b[z] = words[z]
                for z in range(blocks_at_once):
                    for i in range(row_blocks):
                        product(acc, (i * column_blocks + j + z) * 4, a, 4 * i, b[2 * z], b[2 * z + 1])
            weights = int32(weights + stride * itemsize)
            frames = int32(frames - shift)
            q = int32(q + 1)

    @device_function
    def multiply(acc, rows, weights, frames, shift):
        for z in range(slices):
            along_w, along_f = z * (slice_channels * pitch), z * (slice_channels * itemsize)
            multiply_slice(acc, rows, int32(weights + along_w), int32(frames + along_f), shift)

    return multiply


def make_keep(config: Config):
    """Build ``keep``: writes the new state of stage ``number`` from the array ``shared`` at address ``base``."""
    threads, itemsize, pitch, kept = config.threads, config.itemsize, config.frame_pitch, config.kept
    vector, stage_channels, stages = VECTOR // config.itemsize, config.stage_channels, config.stages
    stage_bytes, weights_bytes = config.stage_bytes, config.weights_bytes
    pieces = stage_channels // vector

    @device_function
    def keep_vectors(number, shared, base, state, mask, place, sizes):
        e, slots, channel = int32(cuda.threadIdx.x), int32(sizes.slots), int32(number * stage_channels)
        stage = int32(base + number % stages * stage_bytes + weights_bytes)
        first_row = int32(sizes.frames) * slots
        while e < slots * pieces:
            s, piece = divmod(uint32(e), uint32(pieces))
            n, c = place.first_slot + int64(s), int32(channel + int32(piece) * vector)
            wanted = n < sizes.batch and c < sizes.in_per_group
            if wanted:
                wanted = is_live(mask, n)
            to = n * sizes.groups * sizes.in_per_group + place.first_in + c if wanted else int64(0)
            words = load_words(int32(stage + (first_row + int32(s)) * pitch + int32(piece) * VECTOR))
            st_global_vector(wanted, state, uint64(to), words)
            e = int32(e + threads)

    @device_function
    def keep(number, shared, base, state, mask, place, sizes):
        e, slots, channel = int32(cuda.threadIdx.x), int32(sizes.slots), int32(number * stage_channels)
        at = int32((number % stages * stage_bytes + weights_bytes) // itemsize)
        while e < slots * (stage_channels * kept):
            s, rest = divmod(uint32(e), uint32(stage_channels * kept))
            c, f = divmod(rest, uint32(kept))
            s, c, f = int32(s), int32(c), int32(f)
            n = place.first_slot + s
            if n < sizes.batch and channel + c < sizes.in_per_group and is_live(mask, n):
                row = int32((int32(sizes.frames) + f) * slots + s)
                to = (n * sizes.groups * sizes.in_per_group + place.first_in + channel + c) * kept + f
                state[uint64(to)] = shared[uint32(at + row * (pitch // itemsize) + c)]
            e = int32(e + threads)

    return keep_vectors if kept == 1 else keep


def make_store(config: Config):
    """Build ``store_sums``, a warp's into shared memory, and ``store_columns``, the warps' sums, added up, to y."""
    element, threads, columns, stride = ELEMENTS[config.dtype], config.threads, config.columns, config.stride
    load, store, row_blocks, column_blocks = element.load, element.store, config.row_blocks, config.column_blocks
    sums_at, sum_pitch, channel_warps = config.sums_at // 4, config.sum_pitch, config.channel_warps
    rows_of_tile = config.rows

    @device_function
    def store_sums(acc, shared, first_sum):
        lane = int32(cuda.threadIdx.x & 31)
        for i in range(row_blocks):
            for j in range(column_blocks):
                for z in range(4):
                    row = int32(ROWS * i + (lane >> 2) + 8 * (z >> 1))
                    column = int32(first_sum + COLUMNS * j + (lane & 3) * 2 + (z & 1))
                    shared[uint32(sums_at + column * sum_pitch + row)] = acc[(i * column_blocks + j) * 4 + z]

    @device_function
    def store_columns(y, shared, bias, mask, place, group, first_out, outs, sizes):
        slots, frames = int32(sizes.slots), int32(sizes.frames)
        e = int32(cuda.threadIdx.x)
        while e < columns * rows_of_tile:
            column, row = divmod(uint32(e), uint32(rows_of_tile))
            out, phase = divmod(row, uint32(stride))
            t, slot = divmod(column, uint32(slots))
            t, out, n = int32(t), int32(out), place.first_slot + int64(slot)
            if t < frames and n < sizes.batch and out < outs:
                co = group * sizes.out_per_group + first_out + int64(out)
                total = float32(0)
                if is_live(mask, n):
                    total = load(bias.data[uint64(co)]) if bias.exists else float32(0)
                    at = uint32(sums_at + column * uint32(sum_pitch) + row)
                    for z in range(channel_warps):
                        total += shared[at + uint32(z * columns * sum_pitch)]
                to = ((n * sizes.groups * sizes.out_per_group + co) * frames + int64(t)) * stride + int64(phase)
                y[uint64(to)] = store(total)
            e = int32(e + threads)

    return store_sums, store_columns


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
    def advances(mask, place, slots, sizes):
        advance, slot = int32(0), int32(cuda.threadIdx.x)
        while slot < slots:
            n = place.first_slot + slot
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
    def keep_rest(steps, is_last, shared, base, state, mask, place, sizes):
        for z in range(delay):
            number = int32(steps - delay + z)
            if number >= 0 and is_last[number & 3]:
                keep(number, shared, base, state, mask, place, sizes)

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
        place = Place(slot_tile * slots, group * sizes.in_per_group)
        w_first = place.first_in * w.stride_i + int64(first_out) * kernel_size
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
        if mask.exists and not advances(mask, place, slots, sizes):
            steps = int32(0)

        for s in range(ahead):
            stage, channel = int32(base + s * stage_bytes), int32(s * stage_channels)
            if s < steps:
                load_weights(stage, w, w_first, channel, in_channels, outs)
                begin(values, stage + weights_bytes, x, state, place, channel, sizes)
                end(values, stage + weights_bytes, sizes)
            cp_async_commit()
        s, now, after = int32(0), int32(0), int32(ahead * stage_bytes)  # the stages multiplied and loaded
        drawn, earlier = int32(sizes.row_tiles - 1), int32(0)
        while s < steps:
            await_stage()
            cuda.syncthreads()  # the stage has landed; all have left the place loaded next
            loads = s + ahead < steps
            if loads:
                channel = int32((s + ahead) * stage_channels)
                load_weights(base + after, w, w_first, channel, in_channels, outs)
                begin(values, base + after + weights_bytes, x, state, place, channel, sizes)
            cp_async_commit()
            if kept:
                if s >= delay and is_last[(s - delay) & 3]:
                    keep(int32(s - delay), typed, base, state, mask, place, sizes)
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
                keep_rest(steps, is_last, typed, base, state, mask, place, sizes)
            cuda.syncthreads()  # sums overwrite the ring
        store_sums(acc, shared, int32(int32(channel_warp) * columns + first_column))
        cuda.syncthreads()
        store_columns(y, shared, bias, mask, place, group, first_out, outs, sizes)
        if apart and kept:
            if thread == 0 and steps > 0:
                judge(is_last, tickets, ticket, int32(steps - 1), drawn, sizes)
            cuda.syncthreads()
            keep_rest(steps, is_last, typed, base, state, mask, place, sizes)

    signature = signature_of(storage, flat(types.int32), arguments(Columns))
    return Kernel("streaming_mma", streaming_mma, signature, threads, config.shared_bytes, key=repr(config))
