"""The loading half of k6: which tiles a block takes, where their input windows lie, and the warps that copy them.

A window that meets one sample alone is fetched in a box by the copy engine (boxes.py). One that several samples share,
or of a tensor that no tensor map describes, is filled row by row: what each sample has of it, and zeros between them.
"""

from __future__ import annotations

from numba import cuda, int32, int64, uint32, uint64

from numba_tconv.kernels.common.tensor_map import ALIGNMENT
from numba_tconv.ptx import (
    cp_async_bulk,
    cp_async_bulk_tensor_4d,
    cp_async_to,
    device_function,
    elected,
    fence_async,
    mbarrier_arrive,
    mbarrier_await_copies,
    mbarrier_expect_tx,
    mbarrier_wait,
    nounroll,
    recomputed,
    repeated,
)
from numba_tconv.runtime.elements import ELEMENTS

from .boxes import place
from .split_ahead import make_split_stage
from .tile import PRODUCERS, Config


def make_locate(config: Config):
    """Two device functions: how many turns a block has, and the row tile and (first) column tile of a turn.

    Tiles are counted in 32 bits: as many as that do not fit in any memory.
    """
    resident, together = config.resident, config.regions

    @device_function
    def divided(a, b):
        return int32(uint32(a) // uint32(b))

    @device_function
    def turns(row_tiles, column_tiles):
        block, blocks = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        groups = divided(column_tiles + together - 1, together)
        if resident:
            return divided(groups - divided(block, row_tiles) - 1, divided(blocks, row_tiles)) + 1
        return divided(groups * row_tiles - block - 1, blocks) + 1

    @device_function
    def locate(turn, row_tiles, column_tiles, band):
        block, blocks = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        if resident:  # one row tile for good
            rank = divided(block, row_tiles)
            return int32(block - rank * row_tiles), int32((rank + turn * divided(blocks, row_tiles)) * together)
        # Blocks that run together share ``band`` groups of column tiles and a few row tiles, so that both stay in L2.
        groups = divided(column_tiles + together - 1, together)
        rank = int32(block + turn * blocks)
        first = divided(rank, band * row_tiles)
        rest, here = int32(rank - first * (band * row_tiles)), int32(min(band, groups - first * band))
        row_tile = divided(rest, here)
        return row_tile, int32((first * band + rest - row_tile * here) * together)

    return turns, locate


def make_walk(config: Config):
    """Two device functions on the sample and the column in it where a tile's own outputs begin: that of a column tile,
    and that of so many columns further on, without a division. ``columns``: of a sample."""
    advance = config.tile.advance

    @device_function
    def sample_of(column_tile, columns):
        n, j = divmod(int64(column_tile) * advance, columns)
        return int32(n), j

    @device_function
    def walk(n, j, n_step, j_step, columns):
        n, j = int32(n + n_step), j + j_step
        return (int32(n + 1), j - columns) if j >= columns else (n, j)

    return sample_of, walk


def make_follow(config: Config, turns_on: int):
    """Two device functions on the tiles of a warpgroup, which takes every ``turns_on``-th turn of its block: the row
    tile, sample and column of its first, and how far in samples and columns it is from there to its next; and those of
    its next, from those of its last. ``tiles``: of rows, of columns, the band, the warpgroup's own tile of those that
    are computed together, and the columns of a sample."""
    resident = config.resident
    _, locate = make_locate(config)
    sample_of, walk = make_walk(config)

    @device_function
    def first_tile(turn, tiles):
        row_tiles, column_tiles, band, own, columns = tiles
        row_tile, column_tile = locate(turn, row_tiles, column_tiles, band)
        n, j = sample_of(column_tile + own, columns)
        if not resident:
            return row_tile, n, j, (int32(0), int64(0))
        _, next_tile = locate(int32(turn + turns_on), row_tiles, column_tiles, band)
        return row_tile, n, j, sample_of(next_tile - column_tile, columns)

    @device_function
    def tile_after(turn, row_tile, n, j, steps, tiles):
        row_tiles, column_tiles, band, own, columns = tiles
        if resident:  # one row tile for good
            n, j = walk(n, j, steps[0], steps[1], columns)
            return row_tile, n, j
        row_tile, column_tile = locate(turn, row_tiles, column_tiles, band)
        n, j = sample_of(column_tile + own, columns)
        return row_tile, n, j

    return first_tile, tile_after


def make_window_start(config: Config, integer=int64):
    """A device function on the input window of a tile: where it starts, and whether it is fetched in a box. It reckons
    in ``integer``; int32, which is faster, holds the places of any window if boxes are fetched at all."""
    tile, width = config.tile, config.width
    shift, before = tile.chunk_shift, tile.overlap + tile.lead
    unused = tile.lead - tile.reach  # columns at the window's start, which no tap reaches

    @device_function
    def window_start(n, j, chunk, boxed, apart, length, columns, first):
        """``n``, ``j``: as in make_walk. Sample, and its element, at the window's start; whether the window is fetched
        in a box: no other sample has inputs in what is used of it. ``boxed``: whether any is; ``apart``: no tile is
        shared by two samples."""
        length, columns, first = integer(length), integer(columns), integer(first)
        j = integer(j - (before + chunk * shift))
        if apart:
            return n, integer(first + j), boxed
        while j < 0:
            n, j = int32(n - 1), integer(j + columns)
        i = integer(first + j)
        if boxed and integer(i + unused) >= length and integer(i - columns) <= integer(columns - width):
            return int32(n + 1), integer(i - columns), True  # from the zeros before a sample on
        return n, i, boxed and i <= integer(columns - width)

    return window_start


# Channels of a 16-bit element that a lane loads before it stores the first; with four or eight, registers are spilled.
TOGETHER = 2


def make_fill(config: Config):
    """Two device functions by which a warp fills a window of which no box can be taken.

    The window's column 0 is element i of sample n. Before the warp's arrival at ``barrier``.
    """
    width, itemsize, depth = config.width, config.tile.itemsize, config.depth
    storage, asynchronous, vector = ELEMENTS[config.tile.dtype].storage, itemsize == 4, 16 // itemsize
    copy, copy_vector = cp_async_to(4), cp_async_to(16)
    row_vectors = width // vector
    all_vectors = depth * row_vectors

    @device_function
    def fill_in_vectors(x, stride_n, stride_c, n, i, channel, channels_left, address, in_stage, batch, length, columns,
                        lane, barrier):  # fmt: skip
        """Where the rows of x and their ends are at multiples of 16 bytes. A lane takes every 32nd vector of them."""
        alike_log, pitch, shear, _, _, _ = in_stage
        e = recomputed(lane)  # what follows from it is not worth registers
        while e < all_vectors:
            c = int32(e // row_vectors)
            p = int32((e - c * row_vectors) * vector)
            sample, element = int64(n), i + p
            while element >= columns:
                sample, element = sample + 1, element - columns
            exists = c < channels_left and sample >= 0 and sample < batch and element >= 0 and element < length
            source = sample * stride_n + (channel + c) * stride_c + element if exists else int64(0)
            row = int32(address + place(c, alike_log, pitch, shear))
            copy_vector(row + p * itemsize, x, source, 16 if exists else 0)
            e = int32(e + 32)
        mbarrier_await_copies(barrier)

    @device_function
    def element_at(c, p, window):
        """Bytes to element ``p`` of a window's channel ``c``."""
        (alike_log, pitch, shear, _, _, _), at = window
        return int32(at + place(c, alike_log, pitch, shear) + p * itemsize)

    @device_function
    def load(z, state):
        x, values, source, c, channels_left, _, _, stride_c, _ = state
        exists = c + z < channels_left
        value = x[uint64(source + z * stride_c if exists else int64(0))]
        values[z] = value if exists else storage(0)

    @device_function
    def store(z, state):
        _, values, _, c, _, shared, p, _, window = state
        shared[uint64(element_at(int32(c + z), p, window) // itemsize)] = values[z]

    load_all, store_all = repeated(load, TOGETHER), repeated(store, TOGETHER)

    @device_function
    def fill(x, stride_n, stride_c, aligned, x_early, n, i, channel, channels_left, base, region, shared, in_stage,
             batch, length, columns, lane, barrier):  # fmt: skip
        """Wherever the rows of x are. A lane takes every 32nd element of the rows."""
        early = int32(0 if aligned else int32(x_early + i) & (vector - 1))  # as in a box
        window = in_stage, int32(region + early * itemsize)
        lane = recomputed(lane)  # what follows from it is not worth registers
        values = cuda.local.array(TOGETHER, dtype=storage)
        p = int32(lane)
        while p < width:
            sample, element = int64(n), i + p
            while element >= columns:
                sample, element = sample + 1, element - columns
            inside = sample >= 0 and sample < batch and element >= 0 and element < length
            there = int32(min(channels_left, depth) if inside else 0)
            c = int32(0)
            while c < depth:
                nounroll()  # copies of this take registers that there are not
                source = sample * stride_n + (channel + c) * stride_c + element if c < there else int64(0)
                if asynchronous:
                    copy(base + element_at(c, p, window), x, source, itemsize if c < there else 0)
                    c = recomputed(int32(c + 1))
                else:
                    state = x, values, source, c, there, shared, p, stride_c, window
                    load_all(int32(0), state)
                    store_all(int32(0), state)
                    c = recomputed(int32(c + TOGETHER))
            p = int32(p + 32)
        mbarrier_await_copies(barrier)

    return fill_in_vectors, fill


def make_produce(config: Config):
    """Load: a device function, the life of a warp that copies.

    A warp brings every fourth stage, alone: what it costs to issue the engine's copies and to wait for a free slot is
    then paid by four warps side by side. No more warps copy than there are slots: a warp that were two rounds ahead of
    its slot would take the end of an older phase for the one that it waits for.
    """
    tile, regions, resident, streamed = config.tile, config.regions, config.resident, not config.resident
    itemsize, depth, stage_weights, ring_at = tile.itemsize, config.depth, config.stage_weights, config.ring
    vector = ALIGNMENT // itemsize
    last = regions - 1
    turns, locate = make_locate(config)
    sample_of, walk = make_walk(config)
    window_start = make_window_start(config)
    fill_in_vectors, fill = make_fill(config)
    split_ahead, width, farthest = config.split_ahead, config.width, int64(1 << 20)
    split_stage = make_split_stage(config)

    @device_function
    def produce(lane, warp, x, stride_n, stride_c, x_map, in_stage, x_early, boxed, aligned, apart, in_vectors, w,
                base, full, empty, split, shared, tap_chunks, channel_stages, in_per_group, group_tiles, row_tiles,
                column_tiles, band, batch, length, columns, first):  # fmt: skip
        alike_log, pitch, _, region_bytes, slot, stages = in_stage
        sample, by_box = cuda.local.array(regions, dtype=int32), cuda.local.array(regions, dtype=int32)
        start = cuda.local.array(regions, dtype=int64)
        firsts, lasts = cuda.local.array(regions, dtype=int32), cuda.local.array(regions, dtype=int32)
        weights_at = int32(regions * region_bytes)
        window_bytes, own_weights = int32(depth * pitch), int32(stage_weights if streamed else 0)
        # What a stage needs is counted down or moved on: the loop over stages is what the copies of a block wait for.
        # With one question more in it, the compiler moved the walk over tiles to uniform registers, and dac_u3 in
        # bfloat16 took 0.877 instead of 0.824 ms (scripts).
        together = int32(min(PRODUCERS, stages))  # warps that copy
        at, barrier, ahead = int32(ring_at + warp * slot), int32(full + 8 * warp), int32(stages - warp)
        parity, to_empty, ring = int32(1), int32(empty - full), int32(stages * slot)
        # Of each window's tile: sample and column; with resident weights, a turn is so much further on than the last.
        tile_n, tile_j = cuda.local.array(regions, dtype=int32), cuda.local.array(regions, dtype=int64)
        turn, count = int32(0), turns(row_tiles, column_tiles) if warp < together else int32(0)
        row_tile, column_tile = locate(turn, row_tiles, column_tiles, band)
        if resident:
            _, next_tile = locate(int32(turn + 1), row_tiles, column_tiles, band)
            n_step, j_step = sample_of(next_tile - column_tile, columns)
            for z in range(regions):
                tile_n[z], tile_j[z] = sample_of(column_tile + z, columns)
        stage = int32(warp)  # the warp's next one, from the first of the tap chunk
        while turn < count:
            if not resident:
                row_tile, column_tile = locate(turn, row_tiles, column_tiles, band)
                for z in range(regions):
                    tile_n[z], tile_j[z] = sample_of(column_tile + z, columns)
            channel0 = int32(int32(uint32(row_tile) // uint32(group_tiles)) * in_per_group)
            weights = int64(row_tile) * (tap_chunks * channel_stages) * (stage_weights // itemsize)
            chunk = int32(0)
            while chunk < tap_chunks:
                announced = own_weights
                for z in range(regions):
                    n, i, in_box = window_start(tile_n[z], tile_j[z], chunk, boxed, apart, length, columns, first)
                    sample[z], start[z], by_box[z] = n, int64(i), int32(in_box)
                    announced += window_bytes if in_box else 0
                    if split_ahead:  # elements of the window: those of its row in a box, or all that have been filled
                        early = int64(0 if aligned else (x_early + i) & (vector - 1))
                        firsts[z] = int32(early + (max(-i, -farthest) if in_box and not aligned else 0))
                        end = farthest if aligned else min(length - i, farthest)
                        lasts[z] = int32(early + (end if in_box else width))
                while stage < channel_stages:
                    mbarrier_wait(barrier + to_empty, parity)
                    if elected():
                        mbarrier_expect_tx(barrier, announced)
                        row = int32(int32(channel0 + stage * depth) >> alike_log)
                        for z in range(regions):
                            if by_box[z]:  # beyond the last channel, too, where zeros are (k6_config.unroll_of)
                                begin = int32(int32(x_early + start[z]) & -vector)
                                cp_async_bulk_tensor_4d(base + at + z * region_bytes, x_map, begin, int32(0), row,
                                                     sample[z], barrier)  # fmt: skip
                        if streamed:
                            cp_async_bulk(base + at + weights_at, w, weights + stage * (stage_weights // itemsize),
                                          stage_weights, barrier)  # fmt: skip
                    z = int32(0)
                    while z < regions:
                        if not (by_box[0] if z == 0 else by_box[last]):
                            n, i = (sample[0], start[0]) if z == 0 else (sample[last], start[last])
                            region, done = int32(at + z * region_bytes), int32(stage * depth)
                            if in_vectors:
                                fill_in_vectors(x, stride_n, stride_c, n, i, channel0 + done,
                                                int32(in_per_group) - done, base + region, in_stage, batch, length,
                                                columns, lane, barrier)  # fmt: skip
                            else:
                                fill(x, stride_n, stride_c, aligned, x_early, n, i, channel0 + done,
                                     int32(in_per_group) - done, base, region, shared, in_stage, batch, length,
                                     columns, lane, barrier)  # fmt: skip
                            fence_async()  # the next to write where this lane has written may be the copy engine
                        z = recomputed(int32(z + 1))
                    cuda.syncwarp()
                    if lane == 0:
                        mbarrier_arrive(barrier)
                    if split_ahead:
                        mbarrier_wait(barrier, parity ^ 1)
                        split_stage(lane, int32(base + at), int32(barrier - full), split, in_stage, firsts, lasts)
                    at, barrier = int32(at + together * slot), int32(barrier + 8 * together)
                    ahead, stage = int32(ahead - together), int32(stage + together)
                    if ahead <= 0:
                        at, barrier, ahead = int32(at - ring), int32(barrier - 8 * stages), int32(ahead + stages)
                        parity = int32(parity ^ 1)
                weights += int64(channel_stages) * (stage_weights // itemsize)
                stage, chunk = int32(stage - channel_stages), int32(chunk + 1)
            turn = int32(turn + 1)
            if resident:
                for z in range(regions):
                    tile_n[z], tile_j[z] = walk(tile_n[z], tile_j[z], n_step, j_step, columns)

    return produce
