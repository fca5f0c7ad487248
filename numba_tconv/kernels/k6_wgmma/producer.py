"""Producer warps fill the ring: a window by a box (boxes.py) or, where samples share it, by rows."""

from typing import NamedTuple

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

from .arguments import Origin
from .boxes import place
from .schedule import Schedule
from .split_ahead import make_split_stage
from .tile import PRODUCERS, Config
from .unpacked import make_bring, make_order, run_of


def make_window_start(config: Config, integer=int64):
    """Build ``window_start``; for boxes, int32 suffices."""
    tile, width = config.tile, config.width
    shift, before = tile.chunk_shift, tile.overlap + tile.lead
    unused = tile.lead - tile.reach  # no tap reaches them

    @device_function
    def window_start(n, j, chunk, boxed, apart, length, columns, first):
        """A window's first sample and element, and whether it is a box: used columns lie in one sample.

        ``n``, ``j``: of the tile. ``apart``: Fetch.whole_tiles."""
        length, columns, first = integer(length), integer(columns), integer(first)
        j = integer(j - (before + chunk * shift))
        if apart:
            return n, integer(first + j), boxed
        while j < 0:
            n, j = int32(n - 1), integer(j + columns)
        i = integer(first + j)
        if boxed and integer(i + unused) >= length and integer(i - columns) <= integer(columns - width):
            return int32(n + 1), integer(i - columns), True  # from the zeros before a sample
        return n, i, boxed and i <= integer(columns - width)

    return window_start


TOGETHER = 2  # 16-bit elements in flight; more would spill


class Piece(NamedTuple):
    """Elements under way, of TOGETHER channels."""

    x: object
    values: object
    source: int  # index in x
    channel: int
    channels_left: int
    shared: object
    element: int  # of the window
    stride_c: int
    window: object
    at: int  # byte of the window


def make_fill(config: Config):
    """Build ``fill_in_vectors`` and ``fill``, for windows that are no boxes."""
    width, itemsize, depth = config.width, config.tile.itemsize, config.depth
    storage, asynchronous, vector = ELEMENTS[config.tile.dtype].storage, itemsize == 4, 16 // itemsize
    copy, copy_vector = cp_async_to(4), cp_async_to(16)
    row_vectors = width // vector
    all_vectors = depth * row_vectors

    @device_function
    def fill_in_vectors(x, origin, address, lane, barrier):
        """Copies rows whose ends are 16-byte aligned."""
        window, samples = x.window, x.samples
        e = recomputed(lane)  # saves registers
        while e < all_vectors:
            c = int32(e // row_vectors)
            p = int32((e - c * row_vectors) * vector)
            sample, element = int64(origin.sample), origin.element + p
            while element >= samples.columns:
                sample, element = sample + 1, element - samples.columns
            exists = (
                c < origin.channels_left
                and sample >= 0
                and sample < samples.batch
                and element >= 0
                and element < samples.length
            )
            source = sample * x.stride_n + (origin.channel + c) * x.stride_c + element if exists else int64(0)
            row = int32(address + place(c, window.alike_log, window.pitch, window.shear))
            copy_vector(row + p * itemsize, x.data, source, 16 if exists else 0)
            e = int32(e + 32)
        mbarrier_await_copies(barrier)

    @device_function
    def element_at(c, p, window, at):
        return int32(at + place(c, window.alike_log, window.pitch, window.shear) + p * itemsize)

    @device_function
    def load(z, piece):
        exists = piece.channel + z < piece.channels_left
        value = piece.x[uint64(piece.source + z * piece.stride_c if exists else int64(0))]
        piece.values[z] = value if exists else storage(0)

    @device_function
    def store(z, piece):
        at = element_at(int32(piece.channel + z), piece.element, piece.window, piece.at)
        piece.shared[uint64(at // itemsize)] = piece.values[z]

    load_all, store_all = repeated(load, TOGETHER), repeated(store, TOGETHER)

    @device_function
    def fill(x, origin, base, region, shared, lane, barrier):
        window, samples = x.window, x.samples
        early = int32(0 if x.fetch.aligned else int32(x.early + origin.element) & (vector - 1))
        at = int32(region + early * itemsize)
        lane = recomputed(lane)  # saves registers
        values = cuda.local.array(TOGETHER, dtype=storage)
        p = int32(lane)
        while p < width:
            sample, element = int64(origin.sample), origin.element + p
            while element >= samples.columns:
                sample, element = sample + 1, element - samples.columns
            inside = sample >= 0 and sample < samples.batch and element >= 0 and element < samples.length
            channels_left = int32(min(origin.channels_left, depth) if inside else 0)
            c = int32(0)
            while c < depth:
                nounroll()  # unrolled, it would spill
                exists = c < channels_left
                source = sample * x.stride_n + (origin.channel + c) * x.stride_c + element if exists else int64(0)
                if asynchronous:
                    copy(base + element_at(c, p, window, at), x.data, source, itemsize if exists else 0)
                    c = recomputed(int32(c + 1))
                else:
                    piece = Piece(x.data, values, source, c, channels_left, shared, p, x.stride_c, window, at)
                    load_all(int32(0), piece)
                    store_all(int32(0), piece)
                    c = recomputed(int32(c + TOGETHER))
            p = int32(p + 32)
        mbarrier_await_copies(barrier)

    return fill_in_vectors, fill


def make_produce(config: Config, schedule: Schedule):
    """Build ``produce``: a producer warp brings every fourth stage.

    At most one warp a slot copies: a warp two rounds ahead would mistake an older phase for its own."""
    tile, regions, resident, streamed = config.tile, config.regions, config.resident, not config.resident
    itemsize, depth, stage_weights, ring_at = tile.itemsize, config.depth, config.stage_weights, config.ring
    vector, config_depths, last = ALIGNMENT // itemsize, config.depths, regions - 1
    turns, locate, sample_of, walk = schedule.turns, schedule.locate, schedule.sample_of, schedule.walk
    (fill_in_vectors, fill), window_start = make_fill(config), make_window_start(config)
    split_ahead, width, farthest = config.split_ahead, config.width, int64(1 << 20)
    split_stage = make_split_stage(config)
    unpacked, run = config.unpacked, run_of(config)
    bring, order = (make_bring(config), make_order(config)) if unpacked else (None, None)

    @device_function
    def produce(lane, warp, x, x_map, w, grid, in_per_group, pipe, base, shared, split):
        channel_stages = grid.channel_chunks // config_depths
        boxed, aligned, apart = x.fetch.boxed, x.fetch.aligned, x.fetch.whole_tiles
        length, columns, first = x.samples.length, x.samples.columns, x.samples.first_column
        full, region_bytes, slot, stages = pipe.full, x.window.region, x.window.slot, pipe.stages
        sample, by_box = cuda.local.array(regions, dtype=int32), cuda.local.array(regions, dtype=int32)
        start = cuda.local.array(regions, dtype=int64)
        firsts, lasts = cuda.local.array(regions, dtype=int32), cuda.local.array(regions, dtype=int32)
        weights_at = int32(regions * region_bytes)
        window_bytes, own_weights = int32(depth * x.window.pitch), int32(stage_weights if streamed else 0)
        # This loop limits the copies, so it divides nothing.
        together = int32(min(PRODUCERS, stages))
        at, barrier, ahead = int32(ring_at + warp * slot), int32(full + 8 * warp), int32(stages - warp)
        parity, to_empty, ring = int32(1), int32(pipe.empty - full), int32(stages * slot)
        tile_n, tile_j = cuda.local.array(regions, dtype=int32), cuda.local.array(regions, dtype=int64)
        turn, count = int32(0), turns(grid) if warp < together else int32(0)
        row_tile, column_tile = locate(turn, grid)
        if resident:
            _, next_tile = locate(int32(turn + 1), grid)
            n_step, j_step = sample_of(next_tile - column_tile, columns)
            for z in range(regions):
                tile_n[z], tile_j[z] = sample_of(column_tile + z, columns)
        stage = int32(warp)
        while turn < count:
            if not resident:
                row_tile, column_tile = locate(turn, grid)
                for z in range(regions):
                    tile_n[z], tile_j[z] = sample_of(column_tile + z, columns)
            channel0 = int32(int32(uint32(row_tile) // uint32(grid.group_tiles)) * in_per_group)
            weights = int64(row_tile) * (grid.tap_chunks * channel_stages) * (stage_weights // itemsize)
            if unpacked:
                group_tile = int32(uint32(row_tile) % uint32(grid.group_tiles))
                weights = (int64(channel0) * grid.group_tiles + group_tile) * run
            chunk = int32(0)
            while chunk < grid.tap_chunks:
                announced = own_weights
                for z in range(regions):
                    n, i, in_box = window_start(tile_n[z], tile_j[z], chunk, boxed, apart, length, columns, first)
                    sample[z], start[z], by_box[z] = n, int64(i), int32(in_box)
                    announced += window_bytes if in_box else 0
                    if split_ahead:
                        early = int64(0 if aligned else (x.early + i) & (vector - 1))
                        firsts[z] = int32(early + (max(-i, -farthest) if in_box and not aligned else 0))
                        end = farthest if aligned else min(length - i, farthest)
                        lasts[z] = int32(early + (end if in_box else width))
                while stage < channel_stages:
                    mbarrier_wait(barrier + to_empty, parity)
                    if elected():
                        mbarrier_expect_tx(barrier, announced)
                        row = int32(int32(channel0 + stage * depth) >> x.window.alike_log)
                        for z in range(regions):
                            if by_box[z]:  # even beyond the last channel (tile.unroll_of)
                                begin = int32(int32(x.early + start[z]) & -vector)
                                cp_async_bulk_tensor_4d(
                                    base + at + z * region_bytes, x_map, begin, int32(0), row, sample[z], barrier
                                )
                        if streamed and not unpacked:
                            cp_async_bulk(base + at + weights_at, w, weights + stage * (stage_weights // itemsize),
                                          stage_weights, barrier)  # fmt: skip
                    if unpacked:
                        cuda.syncwarp()
                        runs_at = weights + int64(stage * depth) * grid.group_tiles * run
                        bring(lane, base + at + weights_at + stage_weights, w, runs_at, grid.group_tiles, barrier)
                    z = int32(0)
                    while z < regions:
                        if not (by_box[0] if z == 0 else by_box[last]):
                            n, i = (sample[0], start[0]) if z == 0 else (sample[last], start[last])
                            region, done = int32(at + z * region_bytes), int32(stage * depth)
                            origin = Origin(n, i, channel0 + done, int32(in_per_group) - done)
                            if x.fetch.in_vectors:
                                fill_in_vectors(x, origin, base + region, lane, barrier)
                            else:
                                fill(x, origin, base, region, shared, lane, barrier)
                            fence_async()  # the copy engine may write here next
                        z = recomputed(int32(z + 1))
                    cuda.syncwarp()
                    if lane == 0:
                        mbarrier_arrive(barrier)
                    if split_ahead:
                        mbarrier_wait(barrier, parity ^ 1)
                        split_stage(lane, int32(base + at), int32(barrier - full), split, x.window, firsts, lasts)
                    if unpacked:
                        mbarrier_wait(barrier, parity ^ 1)
                        ordered = int32(base + at + weights_at)
                        order(lane, ordered + stage_weights, ordered, int32(split.ready + barrier - full))
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
