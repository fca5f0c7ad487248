"""Weights in the order in which grad_input_tile's blocks read them, in the type of the sums.

(group, row tile, tap chunk, part of the phases, channel chunk) is a stage; in it (channel, phase, tap, m). What is no
weight (channels, phases and taps beyond the last) is zero, so the main loop has no tail in w.
"""

from __future__ import annotations

from functools import cache

import torch
from numba import cuda, types

from ..elements import ELEMENTS
from ..launch import Kernel, Prepared, alike, flat, strided
from ..problem import Problem
from .grad_input_config import Config

THREADS = 256
TORCH = {32: torch.float32, 64: torch.float64}


@cache
def make_kernel(config: Config) -> Kernel:
    block_m, tap_chunk, w_stage, rows = config.block_m, config.tap_chunk, config.w_stage, config.taps.rows
    phases, channels = config.phases, config.channels
    element = ELEMENTS[config.dtype]
    load, accumulator = element.load, element.accumulator

    def grad_input_pack(w, packed, row_tiles, tap_chunks, channel_chunks, parts, phases_total, in_per_group):
        e = cuda.grid(1)
        if e >= packed.size:
            return
        rest, place = divmod(e, w_stage)
        rest, channel_chunk = divmod(rest, channel_chunks)
        rest, part = divmod(rest, parts)
        rest, chunk = divmod(rest, tap_chunks)
        group, row_tile = divmod(rest, row_tiles)
        place, m = divmod(place, block_m)
        pair, tap = divmod(place, tap_chunk)
        channel, phase = divmod(pair, phases)
        ci = row_tile * block_m + m
        co = channel_chunk * channels + channel
        a = part * phases + phase
        k = a + (chunk * tap_chunk + tap) * rows
        inside = channel < channels and ci < in_per_group and co < w.shape[1] and a < phases_total and k < w.shape[2]
        packed[e] = load(w[group * in_per_group + ci, co, k]) if inside else accumulator(0)

    signature = (strided(element.storage, 3), flat(accumulator)) + (types.int64,) * 6
    return Kernel("grad_input_pack", grad_input_pack, signature, THREADS, key=repr(config))


def prepare_pack(problem: Problem, config: Config, strides: tuple) -> tuple[torch.Tensor, Prepared]:
    """What the packed weights are like, and the launch that packs weights of ``strides`` into such."""
    p, (tap_chunks, channel_chunks, parts) = problem, config.depth(problem)
    row_tiles, phases = config.row_tiles(p), min(p.taps.rows, p.kernel_size)
    size = p.groups * row_tiles * tap_chunks * channel_chunks * parts * config.w_stage
    w = alike((p.in_channels, p.out_channels_per_group, p.kernel_size), config.dtype, strides)
    packed = alike((size,), TORCH[ELEMENTS[config.dtype].accumulator.bitwidth])
    integers = (row_tiles, tap_chunks, channel_chunks, parts, phases, p.in_channels_per_group)
    return packed, make_kernel(config).prepare(-(-size // THREADS), w, packed, *integers)
