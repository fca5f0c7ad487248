"""The loading half of k6: which tiles a block takes, where their input windows lie, and the warps that copy them.

A window whose rows lie inside the signal is copied row by row by the copy engine (cp.async.bulk). That takes 16-byte
boundaries at both ends, and where the rows of x do not begin at any, a row is copied from its next boundary on; the
lead of a stage leaves room for what is skipped, and ``skipped`` tells the warps that multiply where the row begins. A
window that reaches beyond the signal, or into the next sample, is copied piece by piece by cp.async, with zeros where
nothing lies.
"""

from __future__ import annotations

from numba import cuda, int32, int64, uint64

from ..elements import ELEMENTS
from ..ptx import (
    cp_async_bulk,
    cp_async_to,
    mbarrier_arrive,
    mbarrier_arrive_after_copies,
    mbarrier_arrive_expect_tx,
    mbarrier_wait,
)
from .k6_config import CONSUMERS, PRODUCERS, Config
from .tensor_rung import ALIGNED, SCATTERED, UNALIGNED


def make_locate(config: Config):
    """Two device functions: how many turns a block has, and the row tile and (first) column tile of a turn."""
    resident = config.resident

    @cuda.jit(device=True, inline="always")
    def turns(row_tiles, column_tiles):
        block, blocks = int64(cuda.blockIdx.x), int64(cuda.gridDim.x)
        if resident:
            return (column_tiles - block // row_tiles + blocks // row_tiles - 1) // (blocks // row_tiles)
        return ((column_tiles + CONSUMERS - 1) // CONSUMERS * row_tiles - block + blocks - 1) // blocks

    @cuda.jit(device=True, inline="always")
    def locate(turn, row_tiles, column_tiles, band):
        block, blocks = int64(cuda.blockIdx.x), int64(cuda.gridDim.x)
        if resident:  # one row tile for good
            return block % row_tiles, block // row_tiles + turn * (blocks // row_tiles)
        # Blocks that run together share ``band`` pairs of column tiles and a few row tiles, so that both stay in L2.
        pairs = (column_tiles + CONSUMERS - 1) // CONSUMERS
        first, rest = divmod(block + turn * blocks, band * row_tiles)
        here = min(band, pairs - first * band)
        return rest // here, (first * band + rest % here) * CONSUMERS

    return turns, locate


def make_window_start(config: Config):
    """Device functions on the input window of a tile: where it starts, and where its rows do in their 16 bytes."""
    tile, width = config.tile, config.width
    vector, shift, before = 16 // tile.itemsize, tile.chunk_shift, tile.overlap + tile.lead
    advance = tile.advance

    @cuda.jit(device=True, inline="always")
    def window_start(column_tile, chunk, layout, batch, length, columns, first):
        """Sample and column of the window's start, and whether its rows can be copied as they lie: all of it, and the
        16 bytes around it, in one sample."""
        n, j = divmod(column_tile * advance - before - chunk * shift, columns)
        i = first + j
        inside = n >= 0 and n < batch and j + width <= columns and i >= 0 and i + width + vector <= length
        return n, j, inside and layout != SCATTERED

    @cuda.jit(device=True, inline="always")
    def skipped(layout, inside, x_shift, at):
        """Elements from ``x[at]`` to the 16-byte boundary where its row's copy begins; ``x_shift``: of x itself."""
        return int32(-(x_shift + at) & (vector - 1)) if layout == UNALIGNED and inside else int32(0)

    return window_start, skipped


def make_fill(config: Config, vector: int):
    """Device functions that copy a window piece by piece, ``vector`` elements at a time: ``plan`` works out once a
    window where a lane's pieces lie and how many bytes of each exist, ``fill`` copies one stage."""
    width, pitch, itemsize = config.width, config.pitch, config.tile.itemsize
    pieces, depth, storage = -(-config.width // (32 * vector)), config.tile.depth, ELEMENTS[config.tile.dtype].storage
    asynchronous = vector * itemsize >= 4
    copy = cp_async_to(16 if vector > 1 else 4)

    @cuda.jit(device=True, inline="always")
    def plan(source, lane, stride_n, stride_l, n0, j0, batch, length, columns, first):
        """The pieces' places at channel 0, and their sizes in bytes, five bits each."""
        used = int64(0)
        for z in range(pieces):
            n, j = n0, j0 + (lane + 32 * z) * vector
            while j >= columns:
                n, j = n + 1, j - columns
            i = first + j
            inside = n >= 0 and n < batch and i >= 0 and i < length and (lane + 32 * z) * vector < width
            source[z] = n * stride_n + i * stride_l if inside else int64(0)
            if inside:
                used |= int64(min(int64(vector), length - i) * itemsize) << 5 * z
        return used

    @cuda.jit(device=True, inline="always")
    def fill(source, used, x, stride_c, channel, channels_left, target, shared, shared_at, lane, warp):
        for r in range(depth // PRODUCERS):
            c = int32(warp + r * PRODUCERS)
            exists = c < channels_left
            row = (channel + c) * stride_c if exists else int64(0)
            for z in range(pieces):
                p = int32((lane + 32 * z) * vector)
                size = int32(used >> 5 * z & 31) if exists else int32(0)
                if z < pieces - 1 or p < width:
                    if asynchronous:
                        copy(target + (c * pitch + p) * itemsize, x, source[z] + row, size)
                    else:
                        value = x[uint64(source[z] + row)]
                        shared[uint64(shared_at + c * pitch + p)] = value if size else storage(0)

    return plan, fill


def make_produce(config: Config):
    """Load: a device function, the life of a warp that copies."""
    tile, stages, width, pitch = config.tile, config.stages, config.width, config.pitch
    itemsize, depth, resident = tile.itemsize, tile.depth, config.resident
    slot, x_stage, stage_weights = config.slot, config.x_stage, tile.stage_weights
    x_bytes, w_bytes = depth * width * itemsize, 0 if config.resident else tile.stage_weights
    row_bytes, rows_a_warp, words = width * itemsize, tile.depth // PRODUCERS, itemsize == 4
    vector = 16 // itemsize
    singles = -(-width // 32)  # pieces of a lane, at most
    plan_vectors, fill_vectors = make_fill(config, vector)
    plan_singles, fill_singles = make_fill(config, 1)
    turns, locate = make_locate(config)
    window_start, skipped = make_window_start(config)

    @cuda.jit(device=True, inline="always")
    def produce(lane, warp, x, stride_n, stride_c, stride_l, layout, x_shift, w, base, ring, full, empty, shared,
                tap_chunks, channel_chunks, in_per_group, group_tiles, row_tiles, column_tiles, band, batch, length,
                columns, first):  # fmt: skip
        source = cuda.local.array(singles, dtype=int64)
        used = int64(0)
        s, parity = int32(0), int32(1)
        turn, count = int64(0), turns(row_tiles, column_tiles)
        while turn < count:
            row_tile, column_tile = locate(turn, row_tiles, column_tiles, band)
            channel0 = row_tile // group_tiles * in_per_group
            weights = row_tile * (tap_chunks * channel_chunks) * (stage_weights // itemsize)
            chunk = int64(0)
            while chunk < tap_chunks:
                n, j, inside = window_start(column_tile, chunk, layout, batch, length, columns, first)
                if layout == ALIGNED:
                    used = plan_vectors(source, lane, stride_n, stride_l, n, j, batch, length, columns, first)
                elif not inside:
                    used = plan_singles(source, lane, stride_n, stride_l, n, j, batch, length, columns, first)
                begin = n * stride_n + (first + j) + (channel0 + warp) * stride_c
                left = int32(min(in_per_group, int64(1) << 30))
                stage = int32(0)
                while stage < channel_chunks:
                    mbarrier_wait(empty + 8 * s, parity)
                    target = int32(ring + s * slot)
                    rows = inside and left >= depth
                    if lane == 0:
                        if warp == 0:
                            mbarrier_arrive_expect_tx(full + 8 * s, (x_bytes if rows else 0) + w_bytes)
                            if not resident:
                                cp_async_bulk(target + x_stage, w, weights, stage_weights, full + 8 * s)
                        if rows:  # each warp its share: a warp starts one copy after the other
                            for z in range(rows_a_warp):
                                at = begin + z * (PRODUCERS * stride_c)
                                at += skipped(layout, inside, x_shift, at)
                                row = int32(target + (warp + z * PRODUCERS) * pitch * itemsize)
                                cp_async_bulk(row, x, at, row_bytes, full + 8 * s)
                    if rows:
                        mbarrier_arrive(full + 8 * s)
                    else:
                        channel = channel0 + stage * depth
                        shared_at = int32((target - base) // itemsize)
                        if layout == ALIGNED:
                            fill_vectors(
                                source, used, x, stride_c, channel, left, target, shared, shared_at, lane, warp
                            )
                        else:
                            fill_singles(
                                source, used, x, stride_c, channel, left, target, shared, shared_at, lane, warp
                            )
                        if words or layout == ALIGNED:
                            mbarrier_arrive_after_copies(full + 8 * s)
                        else:
                            mbarrier_arrive(full + 8 * s)
                    weights += stage_weights // itemsize
                    begin += depth * stride_c
                    left = int32(left - depth)
                    stage = int32(stage + 1)
                    s = int32(s + 1)
                    if s == stages:
                        s, parity = int32(0), int32(parity ^ 1)
                chunk += 1
            turn += 1

    return produce
