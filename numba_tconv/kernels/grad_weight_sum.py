"""The second stage of grad_weight_wgmma: the splits' sums added up, in the order of the weight.

The first stage leaves, for every split and tile, the sums of a tile's taps by its pairs by its channels, the channels
side by side; the weight's gradient has output channels and taps side by side. A block adds up 32 channels of elements
that are neighbours in the weight, reading along channels and writing, through shared memory, along the weight. With
many weights a thread adds up several elements, so that runs are long in both directions; with few, one.

It adds up in float64, so that however many splits there are, they cost no digit.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from numba import cuda, float32, float64, int32, int64, types, uint32, uint64

from ..elements import ELEMENTS
from ..launch import Kernel, Prepared, alike, flat
from ..problem import Problem
from ..ptx import recomputed
from .device import H200
from .grad_weight_wgmma_config import Config

CHANNELS, WARPS = 32, 8  # of a block: a lane for each channel
THREADS = CHANNELS * WARPS
SEVERAL = 8  # elements of a thread, where there are many weights
LOADS = {1: 32, SEVERAL: 8}  # that a thread has under way, by its elements: of so many splits
GRID_AXIS = 65_535  # blocks along y or z of a grid, at most


@cache
def make_kernel(dtype: torch.dtype, elements: int) -> Kernel:
    """``elements`` of a thread: 1 or SEVERAL."""
    store, neighbours, loads = ELEMENTS[dtype].store, WARPS * elements, LOADS[elements]
    together, turned_shape = loads // elements, (neighbours, CHANNELS + 1)

    def grad_weight_sum(
        partials, result, splits, tile_sums, tiles, groups, group_channels, weight_row, kernel_size, phases,
        tap_chunk, tap_chunks, rows, pairs, pair_tiles, channels, channel_tiles,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        turned = cuda.shared.array(turned_shape, dtype=float32)
        rows_at = cuda.shared.array(neighbours, dtype=int64)  # of the block's elements: their sums for channel 0
        element0, channel0 = int64(cuda.blockIdx.x) * neighbours, int64(cuda.blockIdx.y) * CHANNELS
        if thread < neighbours:
            element = min(element0 + thread, weight_row - 1)
            co = int64(uint32(element) // uint32(kernel_size))
            k = uint32(element - co * kernel_size)
            b = k // uint32(phases)
            pair = uint32(co * phases + (k - b * uint32(phases)))
            tile = int64(b // uint32(tap_chunk)) * pair_tiles + pair // uint32(pairs)
            row = int64(b % uint32(tap_chunk)) * rows + pair % uint32(pairs)
            rows_at[thread] = tile * channel_tiles * tile_sums + row * channels
        cuda.syncthreads()
        channel = min(channel0 + thread % CHANNELS, group_channels - 1)
        tile = int64(uint32(channel) // uint32(channels))
        channel_at = tile * tile_sums + channel - tile * channels
        values, totals = cuda.local.array(loads, dtype=float32), cuda.local.array(elements, dtype=float64)
        warp_row = thread // CHANNELS * elements
        group, all_sums = int64(cuda.blockIdx.z), tiles * tile_sums
        while group < groups:
            at = channel_at + group * (tap_chunks * pair_tiles * channel_tiles * tile_sums)
            for e in range(elements):
                totals[e] = float64(0)
            first = int32(0)
            while first < splits:
                for z in range(loads):
                    split, there = first + z // elements, first + z // elements < splits
                    source = at + rows_at[warp_row + z % elements] + split * all_sums
                    values[z] = partials[uint64(source)] if there else float32(0)
                for z in range(loads):
                    totals[z % elements] += float64(values[z])
                first = recomputed(int32(first + together))  # not worth unrolling further
            for e in range(elements):
                turned[warp_row + e, thread % CHANNELS] = float32(totals[e])
            cuda.syncthreads()
            place = int32(thread)
            while place < THREADS * elements:
                to, to_channel = element0 + place % neighbours, channel0 + place // neighbours
                if to < weight_row and to_channel < group_channels:
                    target = (group * group_channels + to_channel) * weight_row + to
                    result[uint64(target)] = store(turned[place % neighbours, place // neighbours])
                place = recomputed(int32(place + THREADS))
            cuda.syncthreads()
            group += cuda.gridDim.z

    signature = (flat(float32), flat(ELEMENTS[dtype].storage), *(types.int64,) * 15)
    return Kernel("grad_weight_sum", grad_weight_sum, signature, THREADS, key=f"{dtype} {elements}")


def blocks_of(problem: Problem, elements: int) -> int:
    """Along the weight, for 32 channels of a group each."""
    return -(-problem.out_channels_per_group * problem.kernel_size // (WARPS * elements))


def elements_of(problem: Problem) -> int:
    """Of a thread: several, if there are blocks enough for all multiprocessors."""
    blocks = blocks_of(problem, SEVERAL) * -(-problem.in_channels_per_group // CHANNELS) * problem.groups
    return SEVERAL if blocks >= H200.multiprocessors else 1


@lru_cache(maxsize=1024)
def prepare(problem: Problem, config: Config, splits: int, dtype: torch.dtype) -> Prepared:
    """The launch that fills the gradient for the weight: of the sums of ``splits`` splits, and the gradient."""
    p, elements = problem, elements_of(problem)
    weight_row = p.out_channels_per_group * p.kernel_size
    taps, pair_tiles, channel_tiles = config.tiles(p)
    partials = alike((splits * config.blocks_of(p) * config.tile_sums,), torch.float32)
    return make_kernel(dtype, elements).prepare(
        (blocks_of(p, elements), -(-p.in_channels_per_group // CHANNELS), min(p.groups, GRID_AXIS)),
        *(
            partials,
            alike((p.in_channels * weight_row,), dtype),
            splits,
            config.tile_sums,
            config.blocks_of(p),
            p.groups,
            p.in_channels_per_group,
        ),
        *(weight_row, p.kernel_size, min(p.taps.rows, p.kernel_size), config.tap_chunk, taps),
        *(config.rows, config.pairs, pair_tiles, config.channels, channel_tiles),
    )
