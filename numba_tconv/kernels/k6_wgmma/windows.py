"""A stage's windows of x: a box each (boxes.py), or filled (fill.py)."""

from typing import NamedTuple

from numba import int32, int64

from numba_tconv.kernels.common.tensor_map import ALIGNMENT
from numba_tconv.ptx import cp_async_bulk_tensor_4d, device_function, fence_async, recomputed

from .arguments import Origin
from .fill import make_fill
from .tile import Config


def make_window_start(config: Config, integer=int64):
    """Build ``window_start``; for boxes, int32 suffices."""
    tile, width = config.tile, config.width
    shift, before = tile.chunk_shift, tile.overlap + tile.lead
    unused = tile.lead - tile.reach  # no tap reaches them

    @device_function
    def window_start(n, j, chunk, boxed, whole_tiles, length, columns, first):
        """A window's first sample and element, and whether it is a box: used columns lie in one sample.

        ``n``, ``j``: of the tile."""
        length, columns, first = integer(length), integer(columns), integer(first)
        j = integer(j - (before + chunk * shift))
        if whole_tiles:
            return n, integer(first + j), boxed
        while j < 0:
            n, j = int32(n - 1), integer(j + columns)
        i = integer(first + j)
        if boxed and integer(i + unused) >= length and integer(i - columns) <= integer(columns - width):
            return int32(n + 1), integer(i - columns), True  # from the zeros before a sample
        return n, i, boxed and i <= integer(columns - width)

    return window_start


class Tiles(NamedTuple):
    sample: object
    column: object


class Windows(NamedTuple):
    """A tap chunk's, an element each."""

    sample: object
    start: object  # first element
    is_box: object


class Bounds(NamedTuple):
    """A window's elements of its sample."""

    begins: object
    ends: object


def make_windows(config: Config):
    """Build ``locate_windows``, ``copy_boxes`` (one lane) and ``fill_rest`` (a warp)."""
    tile, regions, depth, width = config.tile, config.regions, config.depth, config.width
    vector, last, split_ahead, farthest = ALIGNMENT // tile.itemsize, regions - 1, config.split_ahead, int64(1 << 20)
    (fill_in_vectors, fill), window_start = make_fill(config), make_window_start(config)

    @device_function
    def locate_windows(windows, bounds, tiles, chunk, x, box_bytes, announced):
        boxed, aligned, whole_tiles = x.fetch.boxed, x.fetch.aligned, x.fetch.whole_tiles
        length, columns, first = x.samples.length, x.samples.columns, x.samples.first_column
        for z in range(regions):
            n, j = tiles.sample[z], tiles.column[z]
            n, i, in_box = window_start(n, j, chunk, boxed, whole_tiles, length, columns, first)
            windows.sample[z], windows.start[z], windows.is_box[z] = n, int64(i), int32(in_box)
            announced += box_bytes if in_box else 0
            if split_ahead:
                early = int64(0 if aligned else (x.early + i) & (vector - 1))
                bounds.begins[z] = int32(early + (max(-i, -farthest) if in_box and not aligned else 0))
                end = farthest if aligned else min(length - i, farthest)
                bounds.ends[z] = int32(early + (end if in_box else width))
        return announced

    @device_function
    def fill_rest(windows, x, at, channel0, stage, in_per_group, shared, lane, barrier):
        z = int32(0)
        while z < regions:
            if not (windows.is_box[0] if z == 0 else windows.is_box[last]):
                n, i = (windows.sample[0], windows.start[0]) if z == 0 else (windows.sample[last], windows.start[last])
                region, done = int32(at + z * x.window.region), int32(stage * depth)
                origin = Origin(n, i, channel0 + done, int32(in_per_group) - done)
                if x.fetch.in_vectors:
                    fill_in_vectors(x, origin, shared.base + region, lane, barrier)
                else:
                    fill(x, origin, region, shared, lane, barrier)
                fence_async()  # the copy engine may write here next
            z = recomputed(int32(z + 1))

    @device_function
    def copy_boxes(windows, x, x_map, base, at, row, barrier):
        for z in range(regions):
            if windows.is_box[z]:  # even beyond the last channel (tile.unroll_of)
                begin = int32(int32(x.early + windows.start[z]) & -vector)
                to = base + at + z * x.window.region
                cp_async_bulk_tensor_4d(to, x_map, begin, int32(0), row, windows.sample[z], barrier)

    return locate_windows, copy_boxes, fill_rest
