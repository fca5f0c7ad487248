"""What a stage of grad_input_wgmma has of its own: where its windows begin, where a lane reads in them, and zeros for
what lies beside the signal.

Idea: the weight's row is cut into stages of 128 bytes, wherever that is within a channel's taps, so that no product
multiplies padding. A stage's windows begin with the channel of its first entry, ``phase`` entries of which stages
before have taken. A table in shared memory has the place of every entry of a period; a lane takes its places from
there, from its stage's phase on, which costs two loads a product instead of divisions.

Rows that begin unlike modulo 16 bytes come by one sheared map, as in k6_box.py, and boxes hold some of the memory
before and after their rows. Where a tap may meet that, in a sample's first and last tile, those who multiply clear it
together before they read.
"""

from __future__ import annotations

from numba import cuda, float32, int32

from ..ptx import (
    barrier_sync,
    device_function,
    fence_async,
    ld_shared,
    recomputed,
    st_shared_b32,
    st_shared_f32,
    st_shared_halves,
    st_shared_v2_b32,
)
from .grad_input_wgmma_config import Config, place_of
from .grad_ring import CONSUMERS, PRODUCTS, THREADS, as_it_came


def make_advance(config: Config):
    """A device function: from the row of the map with which a stage's windows begin, and its phase, to the next's."""
    rows, step, period = config.row_step, config.phase_step, config.period

    @device_function
    def advance(row, phase):
        row, phase = int32(row + rows), int32(phase + step)
        if step and phase >= period:
            row, phase = int32(row + 1), int32(phase - period)
        return row, phase

    return advance


def make_start(config: Config):
    """A device function: the row of the map with which the windows of any stage begin, and its phase."""
    rows, entries, period, through = config.row_step, config.entries, config.period, config.through

    @device_function
    def start(stage):
        if through:
            return int32(stage * entries // period), int32(stage * entries % period)
        return int32(stage * rows), int32(0)

    return start


def make_fill(config: Config):
    """A device function, by all threads of a block: the table of places, in bytes, at ``table``."""
    entries, entry_bytes, itemsize, halves = config.table_entries, config.table_bytes, config.itemsize, config.halves
    kernel_size, width, dilation, sheared = config.kernel_size, config.width, config.dilation, config.sheared
    place = device_function(place_of)

    @device_function
    def fill(table, thread, shear):
        entry = int32(thread)
        while entry < entries:
            at = int32(table + entry * entry_bytes)
            own = int32(place(entry, kernel_size, width, dilation, sheared, shear) * itemsize)
            if halves:
                after = int32(place(int32(entry + 1), kernel_size, width, dilation, sheared, shear) * itemsize)
                st_shared_v2_b32(at, own, after)
            else:
                st_shared_b32(at, own)
            entry = recomputed(int32(entry + THREADS))

    return fill


def make_prepare(config: Config):
    """A device function for the main loop: a lane's places in a stage, and zeros for what is not of the signal.

    Of ``lane`` it takes: places, the table from the lane's first entry on, the stage's phase in bytes of the table,
    which it moves on; the address of the first window's first element in slot 0, a row's shear, the elements that lie
    before the signal in the first window (fewer than none: it begins within), the signal's elements, and those after
    it that taps meet.
    """
    through, clears = config.through, config.clears
    if not through and not clears:
        return as_it_came
    itemsize, halves, entry_bytes, spacing = config.itemsize, config.halves, config.table_bytes, config.spacing
    step, period = config.phase_step * entry_bytes, config.period * entry_bytes
    product_half = 4 * 4 // itemsize * entry_bytes  # from a lane's places to those eight registers' columns on
    load_word, load_pair = ld_shared(1, int32), ld_shared(2, int32)
    channels, sheared, pitch, reach = config.g_channels, config.sheared, config.width * itemsize, config.reach
    boxes, hop, tile_reach = config.boxes, config.piece * config.stride, config.tile_reach
    in_turns, together = config.in_turns, 128 if config.in_turns else 128 * CONSUMERS  # threads that read a stage

    @device_function
    def clear_elements(at, e, end):
        """Every fourth element of a row from ``e`` to ``end``; ``at``: the address of element 0."""
        while e < end:
            if itemsize == 4:
                st_shared_f32(int32(at + e * itemsize), float32(0))
            else:
                st_shared_halves(int32(at + e * itemsize), int32(at + e * itemsize), int32(0))
            e = recomputed(int32(e + 4))

    @device_function
    def clear(first, shear, before, length, after):
        """Four threads a row. Barrier 0 is the whole block's."""
        thread = int32(cuda.threadIdx.x)
        t, c = int32(thread & 3), int32((thread & (together - 1)) >> 2)
        while c < channels:
            box, at = int32(0), int32(first + c * pitch + c % sheared * (shear * itemsize))
            ahead = int32(before)
            while box < boxes:
                clear_elements(at, t, int32(min(ahead, reach)))
                end = int32(max(length + ahead, 0))
                clear_elements(at, int32(end + t), int32(min(end + after, reach)))
                ahead, at, box = int32(ahead - hop), int32(at + spacing), recomputed(int32(box + 1))
            c = recomputed(int32(c + together // 4))
        fence_async()  # the next to write here is the copy engine
        cuda.syncwarp()
        barrier_sync(int32(1 + thread // 128 if in_turns else 1), int32(together))

    @device_function
    def prepare(lane, s, offset):
        _, places, _, table, phase, first, shear, before, length, after = lane
        if through:
            at = int32(table + phase[0])
            for z in range(2 * PRODUCTS):
                if halves:
                    places[2 * z], places[2 * z + 1] = load_pair(int32(at + z * product_half))
                else:
                    places[z] = load_word(int32(at + z * product_half))
            ahead = int32(phase[0] + step)
            phase[0] = int32(ahead - period if ahead >= period else ahead)
        if clears and (before > 0 or length + before < tile_reach):
            clear(int32(first + offset), shear, before, length, after)

    return prepare
