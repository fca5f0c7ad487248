"""The loading half of k6: which tiles a block takes, where their input windows lie, and the warps that copy them.

A window that meets one sample alone is fetched in boxes by the copy engine (k6_boxes.py), with zeros where it reaches
beyond the ends of the signal. One that several samples share, or of a tensor that no tensor map describes, is filled
row by row: what each sample has of it, and zeros between them.
"""

from __future__ import annotations

from numba import cuda, float32, int32, int64, uint32, uint64

from ..elements import ELEMENTS
from ..ptx import (
    cp_async_bulk,
    cp_async_bulk_tensor,
    cp_async_to,
    device_function,
    mbarrier_arrive,
    mbarrier_await_copies,
    mbarrier_expect_tx,
    mbarrier_wait,
    recomputed,
    st_shared,
)
from .k6_boxes import make_box_start, make_place
from .k6_config import PRODUCERS, Config
from .tensor_map import MAP_BYTES


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


def make_window_start(config: Config):
    """A device function on the input window of a tile: where it starts, and whether it is fetched in boxes."""
    tile, width = config.tile, config.width
    shift, before = tile.chunk_shift, tile.overlap + tile.lead

    @device_function
    def window_start(n, j, chunk, boxes, length, columns, first):
        """``n``, ``j``: as in make_walk. Sample, and its element, at the window's start; whether the window is fetched
        in boxes: no other sample has inputs in it."""
        j -= before + chunk * shift
        while j < 0:
            n, j = int32(n - 1), j + columns
        i = first + j
        if boxes > 0 and i >= length and i + width <= 2 * columns:
            return int32(n + 1), i - columns, True  # from the zeros before a sample on
        return n, i, boxes > 0 and i + width <= columns

    return window_start


def make_fill(config: Config):
    """Two device functions that fill a window of which no box can be taken, each warp its share of the rows.

    The window's column 0 is element i of sample n. Before the warp's arrival at ``barrier``.
    """
    width, itemsize, depth = config.width, config.tile.itemsize, config.tile.depth
    storage, asynchronous, vector = ELEMENTS[config.tile.dtype].storage, itemsize == 4, 16 // itemsize
    copy, place = cp_async_to(4), make_place(config)
    rows = depth // PRODUCERS  # of a warp

    @device_function
    def fill_in_bulk(x, stride_n, stride_c, n, i, channel, channels_left, address, in_stage, batch, length, columns,
                     first, lane, warp, barrier):  # fmt: skip
        """Where the rows of x and their ends are at multiples of 16 bytes. A lane takes one row of one sample."""
        boxes_log, pitch, spacing, shift_step, _, _ = in_stage
        lane, warp = recomputed(lane), recomputed(warp)  # what follows from them is not worth registers
        c = int32(warp + lane % rows * PRODUCERS)
        row = int32(address + place(c, boxes_log, pitch, spacing, shift_step))
        sample = int64(n + lane // rows)
        start = int64(lane // rows * columns - i)  # column of the sample's first element
        while start + first < width:
            # Of a window that begins before its first sample does, that sample's lane clears the beginning, too.
            column = int32(max(start + first, int64(0)) if sample > n else int64(0))
            stop = int32(min(start + first + columns, int64(width)))
            begin = int32(min(max(start, int64(column)), int64(stop)))
            end = int32(min(max(start + length, int64(begin)), int64(stop)))
            if c >= channels_left or sample < 0 or sample >= batch:
                begin = end
            if end > begin:
                size = int32((end - begin) * itemsize)
                mbarrier_expect_tx(barrier, size)
                source = sample * stride_n + (channel + c) * stride_c + begin - start
                cp_async_bulk(row + begin * itemsize, x, source, size, barrier)
            while column < stop:
                if column == begin:
                    column = end
                if column < stop:
                    st_shared(row + column * itemsize, float32(0), float32(0), float32(0), float32(0))
                column = int32(column + vector)
            sample += 32 // rows
            start += 32 // rows * columns

    @device_function
    def fill(x, stride_n, stride_c, x_early, n, i, channel, channels_left, base, region, shared, in_stage, batch,
             length, columns, lane, warp, barrier):  # fmt: skip
        """Wherever the rows of x are. A lane takes every 32nd element of the warp's rows."""
        boxes_log, pitch, spacing, shift_step, _, _ = in_stage
        lane, warp = recomputed(lane), recomputed(warp)  # what follows from them is not worth registers
        p = int32(lane)
        while p < width:
            sample, element = int64(n), i + p
            while element >= columns:
                sample, element = sample + 1, element - columns
            inside = sample >= 0 and sample < batch and element >= 0 and element < length
            for r in range(rows):
                c = int32(warp + r * PRODUCERS)
                at = int32(region + place(c, boxes_log, pitch, spacing, shift_step) + p * itemsize)
                if boxes_log > 0:  # where it would stand in a box
                    at = int32(at + (int32(x_early + c * stride_c + i) & (vector - 1)) * itemsize)
                exists = inside and c < channels_left
                source = sample * stride_n + (channel + c) * stride_c + element if exists else int64(0)
                if asynchronous:
                    copy(base + at, x, source, itemsize if exists else 0)
                else:
                    shared[uint64(at // itemsize)] = x[uint64(source)] if exists else storage(0)
            p = int32(p + 32)
        mbarrier_await_copies(barrier)

    return fill_in_bulk, fill


def make_produce(config: Config):
    """Load: a device function, the life of a warp that copies. Each warp fetches every fourth box of a window."""
    tile, regions, resident, streamed = config.tile, config.regions, config.resident, not config.resident
    itemsize, depth, stage_weights, ring_at = tile.itemsize, tile.depth, tile.stage_weights, config.ring
    own_boxes = max(1, 16 // itemsize // PRODUCERS)  # of a warp, at most
    starts, last = own_boxes * regions, regions - 1
    turns, locate = make_locate(config)
    sample_of, walk = make_walk(config)
    window_start = make_window_start(config)
    fill_in_bulk, fill = make_fill(config)
    box_start = make_box_start(config)

    @device_function
    def produce(lane, warp, x, stride_n, stride_c, maps, boxes, in_stage, x_early, in_bulk, w, base, full, empty,
                shared, tap_chunks, channel_chunks, in_per_group, group_tiles, row_tiles, column_tiles, band,
                batch, length, columns, first):  # fmt: skip
        boxes_log, pitch, spacing, shift_step, slot, stages = in_stage
        sample, boxed = cuda.local.array(regions, dtype=int32), cuda.local.array(regions, dtype=int32)
        start, begin = cuda.local.array(regions, dtype=int64), cuda.local.array(starts, dtype=int32)
        region_bytes = int32(spacing << boxes_log)
        weights_at = int32(regions * region_bytes)
        brings_weights = streamed and warp == PRODUCERS - 1
        box_bytes = int32((boxes - warp + PRODUCERS - 1) // PRODUCERS * (depth >> boxes_log) * pitch)
        stage_bytes = int32(box_bytes * regions + (stage_weights if brings_weights else 0))
        own_map, own_at = maps + warp * MAP_BYTES, int32(base + warp * spacing)
        missing = int32(channel_chunks - (in_per_group + depth - 1) // depth)  # stages without channels, at the end
        # What a stage needs is counted down or moved on: the loop over stages is what the copies of a block wait for.
        at, barrier, ahead, parity = int32(ring_at), int32(full), int32(stages), int32(1)
        to_empty = int32(empty - full)
        # Of each window's tile: sample and column; with resident weights, a turn is so much further on than the last.
        tile_n, tile_j = cuda.local.array(regions, dtype=int32), cuda.local.array(regions, dtype=int64)
        turn, count = int32(0), turns(row_tiles, column_tiles)
        row_tile, column_tile = locate(turn, row_tiles, column_tiles, band)
        if resident:
            _, next_tile = locate(int32(turn + 1), row_tiles, column_tiles, band)
            n_step, j_step = sample_of(next_tile - column_tile, columns)
            for z in range(regions):
                tile_n[z], tile_j[z] = sample_of(column_tile + z, columns)
        while turn < count:
            if not resident:
                row_tile, column_tile = locate(turn, row_tiles, column_tiles, band)
                for z in range(regions):
                    tile_n[z], tile_j[z] = sample_of(column_tile + z, columns)
            channel0 = int32(int32(uint32(row_tile) // uint32(group_tiles)) * in_per_group)
            weights = int64(row_tile) * (tap_chunks * channel_chunks) * (stage_weights // itemsize)
            chunk = int32(0)
            while chunk < tap_chunks:
                all_boxed = True
                for z in range(regions):
                    n, i, in_boxes = window_start(tile_n[z], tile_j[z], chunk, boxes, length, columns, first)
                    sample[z], start[z], boxed[z] = n, int64(i), int32(in_boxes)
                    all_boxed = all_boxed and in_boxes
                    for b in range(own_boxes):
                        begin[z * own_boxes + b] = box_start(int32(i), warp + b * PRODUCERS, x_early, stride_c,
                                                             shift_step)  # fmt: skip
                row, left = int32(channel0 >> boxes_log), int32(channel_chunks)
                while left > 0:
                    mbarrier_wait(barrier + to_empty, parity)
                    exists = left > missing
                    if lane == 0:
                        announced = stage_bytes
                        if not (all_boxed and exists):
                            announced = int32(stage_weights if brings_weights else 0)
                            for z in range(regions):
                                announced += box_bytes if boxed[z] and exists else 0
                        mbarrier_expect_tx(barrier, announced)
                        for z in range(regions):
                            for b in range(own_boxes):
                                if boxed[z] and exists and warp + b * PRODUCERS < boxes:
                                    cp_async_bulk_tensor(own_at + at + z * region_bytes + b * PRODUCERS * spacing,
                                                         own_map + b * PRODUCERS * MAP_BYTES, begin[z * own_boxes + b],
                                                         row, sample[z], barrier)  # fmt: skip
                        if brings_weights:
                            cp_async_bulk(base + at + weights_at, w, weights, stage_weights, barrier)
                    if not (all_boxed and exists):
                        done = int32((channel_chunks - left) * depth)
                        z = int32(0)
                        while z < regions:
                            # Channels that do not exist are not fetched: they may be the next group's.
                            if not ((boxed[0] if z == 0 else boxed[last]) and exists):
                                n, i = (sample[0], start[0]) if z == 0 else (sample[last], start[last])
                                region = int32(at + z * region_bytes)
                                if in_bulk:
                                    fill_in_bulk(x, stride_n, stride_c, n, i, channel0 + done,
                                                 int32(in_per_group) - done, base + region, in_stage, batch, length,
                                                 columns, first, lane, warp, barrier)  # fmt: skip
                                else:
                                    fill(x, stride_n, stride_c, x_early, n, i, channel0 + done,
                                         int32(in_per_group) - done, base, region, shared, in_stage, batch, length,
                                         columns, lane, warp, barrier)  # fmt: skip
                            z = recomputed(int32(z + 1))
                        cuda.syncwarp()
                    if lane == 0:
                        mbarrier_arrive(barrier)
                    weights += stage_weights // itemsize
                    row, left = int32(row + (depth >> boxes_log)), int32(left - 1)
                    at, barrier, ahead = int32(at + slot), int32(barrier + 8), int32(ahead - 1)
                    if ahead == 0:
                        at, barrier, ahead, parity = int32(ring_at), int32(full), int32(stages), int32(parity ^ 1)
                chunk = int32(chunk + 1)
            turn = int32(turn + 1)
            if resident:
                for z in range(regions):
                    tile_n[z], tile_j[z] = walk(tile_n[z], tile_j[z], n_step, j_step, columns)

    return produce
