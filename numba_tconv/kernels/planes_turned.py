"""Planes of a long stride: grad_output's phases taken apart through shared memory.

A thread that copied a column of every phase, as planes.py does, would hold hundreds of elements, and its neighbours
would read a stride apart. So a block turns a tile around: its warps read runs of phases, which lie side by side in
grad_output, and write runs of columns, which lie side by side in the planes. A thread keeps its phase while it reads
and its column while it writes, so that from one element to the next an address moves on by the same number. Of
waveglow's grad_output in bfloat16 that takes 48 us, a column of every phase a thread took 193 (H200, scripts; no
recorded rows).
"""

from __future__ import annotations

from functools import cache

from numba import cuda, int32, int64, types, uint32, uint64

from ..launch import Kernel, flat
from ..ptx import recomputed

THREADS = 256
COLUMNS = PHASES = 64  # of a tile
LOADS = 8  # elements that a thread has under way


@cache
def make_kernel(config) -> Kernel:
    """The kernel of a configuration of planes.py, with the arguments that its own has, but another grid."""
    stride, dilation, phases, kind = config.stride, config.dilation, config.phases, config.kind
    # A word more than the columns have: so the phases that a warp writes at once lie in different banks.
    pitch = COLUMNS + 4 // config.itemsize
    tile, tiles = PHASES * pitch, -(-phases // PHASES)
    hop = THREADS // PHASES  # columns, or phases, that the block takes at a time

    def planes_turned(g, g_n, g_c, g_l, result, channels, out_length, padding, columns, out_pitch, rows):
        row = int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y
        if row >= rows:
            return
        turned = cuda.shared.array(tile, dtype=kind)
        values = cuda.local.array(LOADS, dtype=kind)
        thread, block = int32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        across, along = int32(thread % PHASES), int32(thread // PHASES)
        column0, phase0 = int64(block // uint32(tiles)) * COLUMNS, int32(block % uint32(tiles)) * PHASES
        left = int32(min(columns - column0, int64(COLUMNS)))
        sample = int64(uint32(row) // uint32(channels))
        o = (column0 + along) * stride - padding + int64(phase0 + across) * dilation
        source = sample * g_n + (row - sample * channels) * g_c + o * g_l
        step = hop * stride * g_l
        there = phase0 + across < phases
        at = int32(across * pitch + along)
        column = along
        while column < left:  # all loads of a round go first, so that they are under way together
            for z in range(LOADS):
                inside = there and column + z * hop < left and uint64(o + z * hop * stride) < uint64(out_length)
                values[z] = g[uint64(source + z * step)] if inside else kind(0)
            for z in range(LOADS):
                if column + z * hop < left:
                    turned[uint64(int32(at + z * hop))] = values[z]
            column, at = int32(column + LOADS * hop), int32(at + LOADS * hop)
            o, source = o + LOADS * hop * stride, source + LOADS * step
        cuda.syncthreads()
        if across >= left:
            return
        phase, last = along, int32(min(phases - phase0, PHASES))
        target = (row * phases + phase0 + phase) * out_pitch + column0 + across
        at = int32(phase * pitch + across)
        while phase < last:
            result[uint64(target)] = turned[uint64(at)]
            phase, at, target = recomputed(int32(phase + hop)), int32(at + hop * pitch), target + hop * out_pitch

    stored, integers = flat(kind), (types.int64,)
    key = repr(config)
    return Kernel("planes_turned", planes_turned, (stored, *integers * 3, stored, *integers * 6), THREADS, key=key)


def along(columns: int, phases: int) -> int:
    """Blocks of a row: tiles of columns, each of as many tiles of phases as there are."""
    return -(-columns // COLUMNS) * -(-phases // PHASES)
