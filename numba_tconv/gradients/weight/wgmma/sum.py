"""Adds up splits in float64, in the weight's order.

A split's tile has sums (tap, pair, channel); the gradient's output channels and taps are adjacent. A block transposes
32 channels of neighbouring elements through shared memory."""

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from numba import cuda, float32, float64, int32, int64, uint32, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.arguments import arguments
from numba_tconv.kernels.common.integer import divided
from numba_tconv.kernels.common.tensor_map import ALIGNMENT
from numba_tconv.ptx import device_function, griddepcontrol_wait, load_vector, recomputed, repeated, store_run
from numba_tconv.runtime.device import H200
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat

from .tile import Config as Tile

CHANNELS, THREADS = 32, 256
VECTOR = 4  # channels of a thread, for many weights
ELEMENTS_OF = {1: 1, VECTOR: 2}
LOADS = {1: 32, VECTOR: 4}  # splits times elements in flight, by channels
GRID_AXIS = 65_535


@dataclass(frozen=True)
class Config:
    dtype: torch.dtype
    channels: int
    run: int  # elements of a store: 1 or 16 bytes

    @property
    def neighbours(self) -> int:
        return THREADS * self.channels // CHANNELS * ELEMENTS_OF[self.channels]


class Splits(NamedTuple):
    splits: int
    tile_sums: int  # in one split
    tiles: int


class Weight(NamedTuple):
    groups: int
    group_channels: int
    row: int  # elements of an input channel
    kernel_size: int
    phases: int


class Tiling(NamedTuple):
    """A group's tiles: ``rows`` of which ``pairs`` (output channel, phase) exist, ``channels`` a row."""

    tap_chunk: int
    tap_chunks: int
    rows: int
    pairs: int
    pair_tiles: int
    channels: int
    channel_tiles: int


class Load(NamedTuple):
    values: object
    partials: object
    row_starts: object
    first_sum: int  # of the thread's first channel
    first_row: int
    first_split: int
    splits: int
    all_sums: int


@cache
def make_kernel(config: Config) -> Kernel:
    channels_of_thread, run, neighbours = config.channels, config.run, config.neighbours
    elements, loads, lanes = ELEMENTS_OF[config.channels], LOADS[config.channels], CHANNELS // config.channels
    together, all_loads, all_totals = loads // elements, loads * channels_of_thread, elements * channels_of_thread
    transposed_shape, runs = (neighbours, CHANNELS + 1), neighbours // run
    element = ELEMENTS[config.dtype]
    store = store_run(element) if run > 1 else element.store

    @device_function
    def load_one(values, z, partials, source):
        values[z] = partials[uint64(source)]

    load = load_vector if channels_of_thread == VECTOR else load_one

    @device_function
    def load_piece(z, state):
        split = int32(state.first_split + z // elements)
        if split < state.splits:
            source = state.first_sum + state.row_starts[state.first_row + z % elements] + split * state.all_sums
            load(state.values, z * channels_of_thread, state.partials, source)

    load_all = repeated(load_piece, loads)

    def grad_weight_sum(partials, result, sums, weight, tiling):
        thread = int32(cuda.threadIdx.x)
        transposed = cuda.shared.array(transposed_shape, dtype=float32)
        row_starts = cuda.shared.array(neighbours, dtype=int64)  # elements' sums for channel 0
        element0, channel0 = int64(cuda.blockIdx.x) * neighbours, int64(cuda.blockIdx.y) * CHANNELS
        if thread < neighbours:
            e = min(element0 + thread, weight.row - 1)
            co = int64(uint32(e) // uint32(weight.kernel_size))
            k = uint32(e - co * weight.kernel_size)
            b = k // uint32(weight.phases)
            pair = uint32(co * weight.phases + (k - b * uint32(weight.phases)))
            tile = int64(b // uint32(tiling.tap_chunk)) * tiling.pair_tiles + pair // uint32(tiling.pairs)
            row = int64(b % uint32(tiling.tap_chunk)) * tiling.rows + pair % uint32(tiling.pairs)
            row_starts[thread] = tile * tiling.channel_tiles * sums.tile_sums + row * tiling.channels
        cuda.syncthreads()
        griddepcontrol_wait()
        # A vector of channels is in one tile: tiles have a multiple of eight.
        lane, first_row = int32(thread % lanes * channels_of_thread), int32(thread // lanes * elements)
        channel = min(channel0 + lane, (weight.group_channels - 1) // channels_of_thread * channels_of_thread)
        tile = int64(uint32(channel) // uint32(tiling.channels))
        channel_sum = tile * sums.tile_sums + channel - tile * tiling.channels
        values, totals = cuda.local.array(all_loads, dtype=float32), cuda.local.array(all_totals, dtype=float64)
        out = cuda.local.array(run, dtype=float32)
        group, all_sums = int64(cuda.blockIdx.z), sums.tiles * sums.tile_sums
        while group < weight.groups:
            tiles = tiling.tap_chunks * tiling.pair_tiles * tiling.channel_tiles
            first_sum = channel_sum + group * (tiles * sums.tile_sums)
            for z in range(all_totals):
                totals[z] = float64(0)
            first = int32(0)
            while first < sums.splits:
                state = Load(values, partials, row_starts, first_sum, first_row, first, sums.splits, all_sums)
                load_all(int32(0), state)
                for z in range(all_loads):
                    if first + z // all_totals < sums.splits:
                        totals[z % all_totals] += float64(values[z])
                first = recomputed(int32(first + together))
            for z in range(all_totals):
                transposed[first_row + z // channels_of_thread, lane + z % channels_of_thread] = float32(totals[z])
            cuda.syncthreads()
            place = int32(thread)
            while place < runs * CHANNELS:
                n, offset = divided(place, int32(runs))
                offset = int32(offset * run)
                if element0 + offset < weight.row and channel0 + n < weight.group_channels:
                    target = (group * weight.group_channels + channel0 + n) * weight.row + element0 + offset
                    if run > 1:
                        for u in range(run):
                            out[u] = transposed[offset + u, n]
                        store(result, target, out, 0)
                    else:
                        result[uint64(target)] = store(transposed[offset, n])
                place = recomputed(int32(place + THREADS))
            cuda.syncthreads()
            group += cuda.gridDim.z

    signature = flat(float32), flat(element.storage), arguments(Splits), arguments(Weight), arguments(Tiling)
    return Kernel("grad_weight_sum", grad_weight_sum, signature, THREADS, min_blocks=3, key=repr(config))


def config_of(problem: Problem, dtype: torch.dtype, aligned: bool) -> Config:
    p, vector = problem, ALIGNMENT // dtype.itemsize
    run = vector if aligned and p.out_channels_per_group * p.kernel_size % vector == 0 else 1
    many = Config(dtype, VECTOR, run)  # if it fills all multiprocessors
    return many if math.prod(_grid(p, many)) >= H200.multiprocessors else Config(dtype, 1, run)


def configs(dtype: torch.dtype) -> list[Config]:
    return [Config(dtype, channels, run) for channels in ELEMENTS_OF for run in (1, ALIGNMENT // dtype.itemsize)]


def _grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    p = problem
    along = -(-p.out_channels_per_group * p.kernel_size // config.neighbours)
    return along, -(-p.in_channels_per_group // CHANNELS), min(p.groups, GRID_AXIS)


@lru_cache(maxsize=1024)
def prepare(problem: Problem, tile: Tile, splits: int, config: Config) -> Prepared:
    p = problem
    weight_row = p.out_channels_per_group * p.kernel_size
    tiles = tile.tiles_of(p)._asdict()
    partials = alike((splits * tile.blocks_of(p) * tile.tile_sums,), torch.float32)
    return make_kernel(config).prepare(
        _grid(p, config),
        *(partials, alike((p.in_channels * weight_row,), config.dtype)),
        Splits(splits, tile.tile_sums, tiles=tile.blocks_of(p)),
        Weight(p.groups, p.in_channels_per_group, weight_row, p.kernel_size, tile.phases_of(p)),
        Tiling(tap_chunk=tile.tap_chunk, rows=tile.rows, pairs=tile.pairs, channels=tile.channels, **tiles),
        early=True,
    )
