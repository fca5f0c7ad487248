"""Zeros for what lies before the rows of grad_output (kernel.py).

Taps may meet positions before a row's first, up to the padding. Maps of rows that begin unlike modulo 16 bytes begin
earlier, so a sample's first boxes hold memory before their rows. The warps that read a stage clear each of its rows
once, and synchronise before they read."""

from __future__ import annotations

from numba import float32, int32

from numba_tconv.gradients.wgmma_ring import CONSUMERS
from numba_tconv.ptx import barrier_sync, device_function, fence_async, ld_shared, st_shared_f32, st_shared_halves

from .tile import Config

BARRIER = 2  # named barrier; warpgroups in turn use this and the next
NOT_MINE = -1  # the start of a row that another lane clears


def make_clear(config: Config):
    """A device function for the mainloop: clear what a sample's first stage holds before its rows, four lanes a row.

    ``starts``: addresses in stage 0 of the rows that the lane clears, or NOT_MINE. In each row it clears elements from
    ``t`` to ``before``."""
    itemsize, lane_rows = config.itemsize, 2 * config.blocks
    threads = 128 if config.in_turns else 128 * CONSUMERS
    load_word = ld_shared(1, int32)

    @device_function
    def clear(lane, s, offset):
        _, starts, flags, t, before, barrier = lane
        if load_word(int32(flags + 8 * s)):
            e = int32(t)
            while e < before:
                for z in range(lane_rows):
                    at = int32(starts[z] + offset + e * itemsize)
                    if starts[z] != NOT_MINE:
                        if itemsize == 4:
                            st_shared_f32(at, float32(0))
                        else:
                            st_shared_halves(at, at, int32(0))
                e = int32(e + 4)
            fence_async()  # the copy engine writes here next
            barrier_sync(barrier, threads)

    return clear
