"""A stage's weights and frames for tensor cores, from global to shared memory."""

from numba import cuda, int32, int64, uint32, uint64

from numba_tconv.ptx import (
    cp_async_to,
    device_function,
    ld_global_vector,
    recomputed,
    st_shared_b32,
    st_shared_u16,
)

from .mma_tile import VECTOR, Config

copy = cp_async_to(VECTOR)


def make_load_weights(config: Config):
    """Build ``load``: begins to copy a stage's weights.

    ``first``: element of the block's first weight; ``channel``: the stage's first input channel; ``outs``: output
    channels that exist. The rest is zeros."""
    threads, itemsize = config.threads, config.itemsize
    pitch, stage_channels = config.weight_pitch, config.stage_channels
    pieces, tap_bytes, elements = config.weight_row // VECTOR, config.kernel_size * config.itemsize, VECTOR // itemsize
    total = stage_channels * pieces

    @device_function
    def load(stage, w, first, channel, channels, outs):
        row_bytes = int32(outs * tap_bytes)
        for z in range(-(-total // threads)):
            e = int32(cuda.threadIdx.x + z * threads)
            c, piece = divmod(uint32(e), uint32(pieces))
            c, piece = int32(c), int32(piece)
            if total % threads == 0 or e < total:
                used = min(int32(VECTOR), int32(row_bytes - piece * VECTOR))
                if channel + c >= channels or used < 0:
                    used = int32(0)
                at = first + int64(channel + c) * w.stride_i + piece * elements if used else first
                copy(int32(stage + c * pitch + piece * VECTOR), w.data, uint64(at), used)

    return load


def make_load_frames(config: Config):
    """Build ``begin`` and ``end``, which bring frames to address ``stage`` of shared memory.

    ``begin`` starts the loads, ``end`` stores. ``straight`` frames bypass registers. The third result is the length of
    ``values``."""
    threads, pitch, kept = config.threads, config.frame_pitch, config.kept
    columns, vector, stage_channels = config.columns, VECTOR // config.itemsize, config.stage_channels
    pieces = stage_channels // vector
    copies, (old, new) = (kept + 1) * columns * pieces, config.vectors
    put = _make_put(config)

    @device_function
    def begin_straight(values, stage, x, state, block, channel, sizes):
        for z in range(-(-copies // threads)):
            e = int32(cuda.threadIdx.x + z * threads)
            row, piece = divmod(uint32(e), uint32(pieces))
            f, s = divmod(row, uint32(columns))
            f, s, c = int32(f), int32(s), int32(channel + int32(piece) * vector)
            if copies % threads == 0 or e < copies:
                exists = block.first_slot + s < sizes.batch and c < sizes.in_per_group
                used = int32(VECTOR) if exists else int32(0)
                n = block.first_slot + s if exists else int64(0)
                first = int64(block.first_in + c) if exists else int64(0)
                to = int32(stage + int32(row) * pitch + int32(piece) * VECTOR)
                if f < kept:
                    copy(to, state, uint64(n * sizes.groups * sizes.in_per_group + first), used)
                else:
                    copy(to, x.data, uint64(n * x.stride_n + first), used)

    @device_function
    def end_straight(values, stage, sizes):
        pass

    @device_function
    def load_rows(values, first_value, count, source, stride_n, frames, block, channel, sizes):
        vectors = int32(frames * pieces)  # of a slot
        thread = recomputed(int32(cuda.threadIdx.x))  # else all places stay in registers
        for z in range(count):
            s, v = divmod(uint32(thread + z * threads), uint32(vectors))
            s = int32(s)
            n, flat_at = block.first_slot + int64(s), channel * int64(frames) + int64(v) * vector
            exists = s < int32(sizes.slots) and n < sizes.batch and flat_at < sizes.in_per_group * int64(frames)
            at = n * stride_n + block.first_in * int64(frames) + flat_at if exists else int64(0)
            words = ld_global_vector(exists, source, uint64(at))
            for q in range(4):
                values[first_value + 4 * z + q] = words[q]

    @device_function
    def store_rows(values, first_value, count, stage, first_row, frames, sizes):
        vectors, thread = int32(frames * pieces), recomputed(int32(cuda.threadIdx.x))
        for z in range(count):
            s, v = divmod(uint32(thread + z * threads), uint32(vectors))
            if int32(s) < int32(sizes.slots):
                c, f = divmod(uint32(v * uint32(vector)), uint32(frames))
                put(values, first_value + 4 * z, stage, int32(c), int32(f), int32(frames), int32(s), first_row, sizes)

    @device_function
    def begin(values, stage, x, state, block, channel, sizes):
        if kept:
            stride = sizes.groups * sizes.in_per_group * kept
            load_rows(values, 0, old, state, stride, int32(kept), block, channel, sizes)
        load_rows(values, 4 * old, new, x.data, x.stride_n, int32(sizes.frames), block, channel, sizes)

    @device_function
    def end(values, stage, sizes):
        if kept:
            store_rows(values, 0, old, stage, int32(0), int32(kept), sizes)
        store_rows(values, 4 * old, new, stage, int32(kept), int32(sizes.frames), sizes)

    words = 1 if config.straight else 4 * (old + new)
    return (begin_straight, end_straight, words) if config.straight else (begin, end, words)


def _make_put(config: Config):
    """Build the store of 16 bytes of a slot to their frames' rows."""
    itemsize, pitch, halves = config.itemsize, config.frame_pitch, 4 // config.itemsize

    @device_function
    def put(values, at, stage, c, f, frames, s, first_row, sizes):
        for z in range(4):
            for h in range(halves):
                row = int32((first_row + f) * int32(sizes.slots) + s)
                to = int32(stage + row * pitch + c * itemsize)
                if halves == 1:
                    st_shared_b32(to, values[at + z])
                else:
                    st_shared_u16(to, int32(values[at + z] >> (16 * h)))
                f = int32(f + 1)
                if f == frames:
                    f, c = int32(0), int32(c + 1)

    return put
