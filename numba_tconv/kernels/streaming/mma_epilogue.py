"""Outputs and the new state."""

from numba import cuda, float32, int32, int64, uint32, uint64

from numba_tconv.ptx import device_function, ld_shared, st_global_vector
from numba_tconv.runtime.elements import ELEMENTS

from .kernel import is_live
from .mma_tile import COLUMNS, ROWS, VECTOR, Config

load_words = ld_shared(4, int32)


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
    def store_columns(y, shared, bias, mask, block, sizes):
        slots, frames = int32(sizes.slots), int32(sizes.frames)
        e = int32(cuda.threadIdx.x)
        while e < columns * rows_of_tile:
            column, row = divmod(uint32(e), uint32(rows_of_tile))
            out, phase = divmod(row, uint32(stride))
            t, slot = divmod(column, uint32(slots))
            t, out, n = int32(t), int32(out), block.first_slot + int64(slot)
            if t < frames and n < sizes.batch and out < block.outs:
                co = block.group * sizes.out_per_group + block.first_out + int64(out)
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


def make_keep(config: Config):
    """Build ``keep``: writes the new state of stage ``number`` from the array ``shared`` at address ``base``."""
    threads, itemsize, pitch, kept = config.threads, config.itemsize, config.frame_pitch, config.kept
    vector, stage_channels, stages = VECTOR // config.itemsize, config.stage_channels, config.stages
    stage_bytes, weights_bytes = config.stage_bytes, config.weights_bytes
    pieces = stage_channels // vector

    @device_function
    def keep_vectors(number, shared, base, state, mask, block, sizes):
        e, slots, channel = int32(cuda.threadIdx.x), int32(sizes.slots), int32(number * stage_channels)
        stage = int32(base + number % stages * stage_bytes + weights_bytes)
        first_row = int32(sizes.frames) * slots
        while e < slots * pieces:
            s, piece = divmod(uint32(e), uint32(pieces))
            n, c = block.first_slot + int64(s), int32(channel + int32(piece) * vector)
            wanted = n < sizes.batch and c < sizes.in_per_group
            if wanted:
                wanted = is_live(mask, n)
            to = n * sizes.groups * sizes.in_per_group + block.first_in + c if wanted else int64(0)
            words = load_words(int32(stage + (first_row + int32(s)) * pitch + int32(piece) * VECTOR))
            st_global_vector(wanted, state, uint64(to), words)
            e = int32(e + threads)

    @device_function
    def keep(number, shared, base, state, mask, block, sizes):
        e, slots, channel = int32(cuda.threadIdx.x), int32(sizes.slots), int32(number * stage_channels)
        at = int32((number % stages * stage_bytes + weights_bytes) // itemsize)
        while e < slots * (stage_channels * kept):
            s, rest = divmod(uint32(e), uint32(stage_channels * kept))
            c, f = divmod(rest, uint32(kept))
            s, c, f = int32(s), int32(c), int32(f)
            n = block.first_slot + s
            if n < sizes.batch and channel + c < sizes.in_per_group and is_live(mask, n):
                row = int32((int32(sizes.frames) + f) * slots + s)
                to = (n * sizes.groups * sizes.in_per_group + block.first_in + channel + c) * kept + f
                state[uint64(to)] = shared[uint32(at + row * (pitch // itemsize) + c)]
            e = int32(e + threads)

    return keep_vectors if kept == 1 else keep
