"""The second stage of grad_weight_wgmma: the splits' sums added up, in the order of the weight.

The first stage leaves, for every split and tile, the sums of a tile's taps by its pairs by its channels, the channels
side by side; the weight's gradient has output channels and taps side by side. A block adds up 32 channels of eight
elements that are neighbours in the weight, reading along channels and writing, through shared memory, along the weight.
It adds up in float64, so that however many splits there are, they cost no digit.
"""

from __future__ import annotations

from functools import cache

import torch
from numba import cuda, float32, float64, int64, types, uint32, uint64

from ..elements import ELEMENTS
from ..launch import Kernel, flat
from ..problem import Problem
from .grad_weight_wgmma_config import Config

CHANNELS, NEIGHBOURS = 32, 8  # of a block, which has a thread for each
BATCH = 8  # loads that a thread has under way
GRID_AXIS = 65_535  # blocks along y or z of a grid, at most


@cache
def make_kernel(dtype: torch.dtype) -> Kernel:
    store, turned_shape = ELEMENTS[dtype].store, (NEIGHBOURS, CHANNELS + 1)

    def grad_weight_sum(
        partials, result, splits, tile_sums, tiles, groups, group_channels, weight_row, kernel_size, phases,
        tap_chunk, tap_chunks, rows, pairs, pair_tiles, channels, channel_tiles,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        turned = cuda.shared.array(turned_shape, dtype=float32)
        element = int64(cuda.blockIdx.x) * NEIGHBOURS + thread // CHANNELS
        channel0 = int64(cuda.blockIdx.y) * CHANNELS
        channel = channel0 + thread % CHANNELS
        values = cuda.local.array(BATCH, dtype=float32)
        group = int64(cuda.blockIdx.z)
        while group < groups:
            if element < weight_row and channel < group_channels:
                co = int64(uint32(element) // uint32(kernel_size))
                k = uint32(element - co * kernel_size)
                b = k // uint32(phases)
                pair = uint32(co * phases + (k - b * uint32(phases)))
                tile = group * tap_chunks + b // uint32(tap_chunk)
                tile = tile * pair_tiles + pair // uint32(pairs)
                tile = tile * channel_tiles + uint32(channel) // uint32(channels)
                row = int64(b % uint32(tap_chunk)) * rows + pair % uint32(pairs)
                at = tile * tile_sums + row * channels + uint32(channel) % uint32(channels)
                total = float64(0)
                for first in range(0, splits, BATCH):
                    for z in range(BATCH):
                        there = first + z < splits
                        values[z] = partials[uint64(at + (first + z) * tiles * tile_sums)] if there else float32(0)
                    for z in range(BATCH):
                        total += float64(values[z])
                turned[thread // CHANNELS, thread % CHANNELS] = float32(total)
            cuda.syncthreads()
            to = int64(cuda.blockIdx.x) * NEIGHBOURS + thread % NEIGHBOURS
            to_channel = channel0 + thread // NEIGHBOURS
            if to < weight_row and to_channel < group_channels:
                target = (group * group_channels + to_channel) * weight_row + to
                result[uint64(target)] = store(turned[thread % NEIGHBOURS, thread // NEIGHBOURS])
            cuda.syncthreads()
            group += cuda.gridDim.z

    signature = (flat(float32), flat(ELEMENTS[dtype].storage), *(types.int64,) * 15)
    return Kernel("grad_weight_sum", grad_weight_sum, signature, CHANNELS * NEIGHBOURS, key=str(dtype))


def add_up(partials: torch.Tensor, result: torch.Tensor, problem: Problem, config: Config, splits: int) -> None:
    """Fill ``result``, the gradient for the weight, from the sums of ``splits`` splits, on the current stream."""
    p = problem
    weight_row = p.out_channels_per_group * p.kernel_size
    taps, pair_tiles, channel_tiles = config.tiles(p)
    make_kernel(result.dtype).launch(
        (-(-weight_row // NEIGHBOURS), -(-p.in_channels_per_group // CHANNELS), min(p.groups, GRID_AXIS)),
        *(partials, result, splits, config.tile_sums, config.blocks_of(p), p.groups, p.in_channels_per_group),
        *(weight_row, p.kernel_size, min(p.taps.rows, p.kernel_size), config.tap_chunk, taps),
        *(config.rows, config.pairs, pair_tiles, config.channels, channel_tiles),
    )
