"""Weights in the order in which k4's blocks read them: (group, row tile, tap chunk, channel chunk, k, tap, m).

What is no weight (channels, phases and taps beyond the last) is zero, so the main loop has no tail in w.
"""

from __future__ import annotations

from functools import cache

from numba import cuda, types

from ..elements import ELEMENTS
from ..launch import Kernel, Prepared, alike, flat, strided
from ..layout import Layout
from ..problem import Problem
from .k4_config import Config

THREADS = 256


@cache
def make_kernel(config: Config) -> Kernel:
    block_m, block_k, tap_chunk = config.block_m, config.block_k, config.tap_chunk
    rows, phases, channels, parts = config.taps.rows, config.phases, config.channels, config.parts
    storage = ELEMENTS[config.dtype].storage

    def k4_pack(w, packed, row_tiles, tap_chunks, channel_chunks, in_per_group):
        e = cuda.grid(1)
        if e >= packed.size:
            return
        rest, m = divmod(e, block_m)
        rest, tap = divmod(rest, tap_chunk)
        rest, k = divmod(rest, block_k)
        rest, channel_chunk = divmod(rest, channel_chunks)
        rest, chunk = divmod(rest, tap_chunks)
        group, row_tile = divmod(rest, row_tiles)
        c = channel_chunk * block_k + k
        co = row_tile // parts * channels + m // phases
        a = row_tile % parts * block_m + m % phases
        t = a + (chunk * tap_chunk + tap) * rows
        inside = c < in_per_group and m < channels * phases and co < w.shape[1] and a < rows and t < w.shape[2]
        packed[e] = w[group * in_per_group + c, co, t] if inside else storage(0)

    signature = (strided(storage, 3), flat(storage)) + (types.int64,) * 4
    return Kernel("k4_pack", k4_pack, signature, THREADS, key=repr(config))


def prepare(w: Layout, problem: Problem, config: Config) -> tuple[int, Prepared]:
    """Elements of the packed weights, and the launch that packs weights which lie as ``w``: it takes them and the room
    for the packed ones."""
    row_tiles, tap_chunks = config.row_tiles(problem), config.tap_chunks(problem)
    channel_chunks = config.channel_chunks(problem)
    size = problem.groups * row_tiles * tap_chunks * channel_chunks * config.w_stage
    launch = make_kernel(config).prepare(
        *(-(-size // THREADS), alike(w.shape, w.dtype, w.strides), alike((size,), w.dtype)),
        *(row_tiles, tap_chunks, channel_chunks, problem.in_channels_per_group),
    )
    return size, launch
