"""The loading half of k6: the tiles of a block, the place of their windows, and the producer warps.

The copy engine fetches a window of one sample as a box (boxes.py). A window shared by samples, or without a tensor map,
is filled row by row.
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
    """Build ``turns`` (turns of a block) and ``locate`` (a turn's row tile and first column tile), in 32-bit counts."""
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
        if resident:
            rank = divided(block, row_tiles)
            return int32(block - rank * row_tiles), int32((rank + turn * divided(blocks, row_tiles)) * together)
        # Concurrent blocks share ``band`` groups of column tiles and a few row tiles, so that both stay in L2.
        groups = divided(column_tiles + together - 1, together)
        rank = int32(block + turn * blocks)
        first = divided(rank, band * row_tiles)
        rest, here = int32(rank - first * (band * row_tiles)), int32(min(band, groups - first * band))
        row_tile = divided(rest, here)
        return row_tile, int32((first * band + rest - row_tile * here) * together)

    return turns, locate


def make_walk(config: Config):
    """Build ``sample_of`` and ``walk``, which return the sample and its column where a tile's own outputs begin.

    ``sample_of`` takes a column tile; ``walk`` adds a step without a division. ``columns``: of a sample.
    """
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
    """Build ``first_tile`` and ``tile_after`` for a warpgroup that takes every ``turns_on``-th turn of its block.

    Both return row tile, sample and column; ``first_tile`` also returns the step (samples, columns) to the next tile.
    ``tiles``: row tiles, column tiles, band, the warpgroup's tile in a pair, columns of a sample.
    """
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
        if resident:
            n, j = walk(n, j, steps[0], steps[1], columns)
            return row_tile, n, j
        row_tile, column_tile = locate(turn, row_tiles, column_tiles, band)
        n, j = sample_of(column_tile + own, columns)
        return row_tile, n, j

    return first_tile, tile_after


def make_window_start(config: Config, integer=int64):
    """Build ``window_start``, in ``integer`` arithmetic; the faster int32 suffices wherever boxes are fetched."""
    tile, width = config.tile, config.width
    shift, before = tile.chunk_shift, tile.overlap + tile.lead
    unused = tile.lead - tile.reach  # columns at the window's start that no tap reaches

    @device_function
    def window_start(n, j, chunk, boxed, apart, length, columns, first):
        """Return the sample and element where a tile's window begins, and whether it is fetched as a box.

        A box requires that its used columns hold no inputs of another sample. ``n``, ``j``: as in make_walk. ``boxed``:
        boxes are fetched at all. ``apart``: samples share no tile.
        """
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


# 16-bit elements that a lane loads before it stores any; more would spill.
TOGETHER = 2


def make_fill(config: Config):
    """Build ``fill_in_vectors`` and ``fill``, by which a warp fills a window without a box.

    Column 0 is element ``i`` of sample ``n``. A warp fills before it arrives at ``barrier``, whose phase waits for the
    copies.
    """
    width, itemsize, depth = config.width, config.tile.itemsize, config.depth
    storage, asynchronous, vector = ELEMENTS[config.tile.dtype].storage, itemsize == 4, 16 // itemsize
    copy, copy_vector = cp_async_to(4), cp_async_to(16)
    row_vectors = width // vector
    all_vectors = depth * row_vectors

    @device_function
    def fill_in_vectors(x, stride_n, stride_c, n, i, channel, channels_left, address, in_stage, batch, length, columns,
                        lane, barrier):  # fmt: skip
        """Fill from rows that begin and end at multiples of 16 bytes; a lane copies every 32nd vector."""
        alike_log, pitch, shear, _, _, _ = in_stage
        e = recomputed(lane)  # saves registers
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
        """Return the byte address of element ``p`` of a window's channel ``c``."""
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
        """Fill from rows of any alignment; a lane copies every 32nd element."""
        early = int32(0 if aligned else int32(x_early + i) & (vector - 1))  # as in a box
        window = in_stage, int32(region + early * itemsize)
        lane = recomputed(lane)  # saves registers
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
                nounroll()  # unrolled, it would spill
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
    """Build ``produce``, the life of a producer warp.

    Each warp brings every fourth stage alone, so issuing copies and waiting for slots overlap. There is at most one
    warp a slot: two rounds ahead of its slot, a warp would mistake an older phase for its own.
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
        # The loop over stages limits the copies, so it counts and does not divide.
        together = int32(min(PRODUCERS, stages))  # warps that copy
        at, barrier, ahead = int32(ring_at + warp * slot), int32(full + 8 * warp), int32(stages - warp)
        parity, to_empty, ring = int32(1), int32(empty - full), int32(stages * slot)
        # Sample and column of each window's tile.
        tile_n, tile_j = cuda.local.array(regions, dtype=int32), cuda.local.array(regions, dtype=int64)
        turn, count = int32(0), turns(row_tiles, column_tiles) if warp < together else int32(0)
        row_tile, column_tile = locate(turn, row_tiles, column_tiles, band)
        if resident:
            _, next_tile = locate(int32(turn + 1), row_tiles, column_tiles, band)
            n_step, j_step = sample_of(next_tile - column_tile, columns)
            for z in range(regions):
                tile_n[z], tile_j[z] = sample_of(column_tile + z, columns)
        stage = int32(warp)  # in the tap chunk
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
                    if split_ahead:  # the row's elements: its share of a box, or all that was filled
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
                            if by_box[z]:  # even beyond the last channel (tile.unroll_of)
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
                            fence_async()  # the copy engine may write here next
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
