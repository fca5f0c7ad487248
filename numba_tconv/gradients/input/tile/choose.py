"""The tile by a cost model; with few blocks also splits (split_k.py)."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.input.split_k import numbers_of_parts, split, summed
from numba_tconv.kernels.common.sectors import ENTRY
from numba_tconv.kernels.common.split_sums import second_stage_ms
from numba_tconv.runtime.device import H200, RESERVED_SHARED, Device
from numba_tconv.runtime.elements import ELEMENTS

from .pack import pack_blocks
from .tile import MOST_PAIRS, Config, make


class Shape(NamedTuple):
    block_m: int
    block_n: int
    thread_m: int
    thread_n: int
    lanes_m: int
    min_blocks: int


# Fields of Shape, by itemsize.
TILES = {
    4: (
        (128, 128, 16, 8, 8, 2),
        (128, 128, 8, 8, 8, 2),
        (64, 128, 8, 8, 8, 4),
        (32, 256, 8, 8, 4, 3),
        (16, 256, 4, 8, 4, 4),
        (8, 512, 4, 8, 2, 4),
        (4, 512, 4, 4, 1, 4),
        (2, 512, 2, 4, 1, 6),
        (1, 512, 1, 4, 1, 6),
        (32, 64, 4, 4, 4, 6),
        (16, 64, 4, 4, 4, 8),
    ),
    8: (
        (64, 64, 4, 8, 8, 2),
        (32, 128, 4, 8, 8, 2),
        (16, 256, 4, 8, 4, 2),
        (8, 256, 4, 8, 2, 4),
        (4, 256, 4, 4, 1, 4),
        (1, 256, 1, 4, 1, 6),
        (16, 32, 2, 4, 4, 8),
    ),
}
# For sizes that powers of two leave empty.
TALL = Shape(192, 96, 12, 12, 16, 2)
NARROWER = Shape(128, 96, 8, 12, 16, 2)
JOINED = Shape(256, 128, 8, 16, 16, 1)
STAGE_BYTES = 18 * 1024  # of several pairs
STAGE_BYTES_ALONE = 32 * 1024  # with LARGE sums and no partial ones

CLEARLY = 0.98  # of others' time; below, JOINED and TALL are taken
FEW_ROUNDS = 4  # of the usual tile; beyond, no others or splits
CLEARLY_OF_FEW = 0.95  # of its time; below, they are taken
NEARLY_ALL = 0.9  # of the GPU's places

# Costs in multiply-adds: vector loaded; element copied; column located; stage; partial sum added.
SHARED_LOAD, COPY, FIND, STAGE, ASIDE = 3, 8, 60, 240, 3
WARPS = 4  # for half of a multiprocessor's speed; with LARGE sums they count double
LARGE, FEWEST_LARGE = 128, 8  # sums of a thread; fewer warps take as long
ALONE = 40  # a sum, while a lone block waits and stores
MULTIPLY_ADDS = 250e6  # of a multiprocessor a millisecond


@lru_cache(maxsize=1024)
def choose(problem: Problem, dtype: torch.dtype, device: Device = H200) -> Config:
    best = usual(problem, dtype, device)
    if dtype == torch.float32 and rounds(problem, best, device) <= FEW_ROUNDS * best.min_blocks:
        best = clearly_better(problem, best, device)
    overlaps_packing = begins_while_packing(problem, best, device)
    return replace(best, early_launch=device.launches_early, overlaps_packing=overlaps_packing)


def usual(problem: Problem, dtype: torch.dtype, device: Device = H200) -> Config:
    def time(config):
        return milliseconds(problem, config, device)

    tile = min(candidates(problem, dtype, device), key=time)
    others = [*joined(problem, tile, device)]
    if dtype == torch.float32 and (tall := with_stages(problem, dtype, TALL, device)):
        others.append(tall)
    other = min(others, key=time, default=tile)
    return other if time(other) < CLEARLY * time(tile) else tile


def clearly_better(problem: Problem, best: Config, device: Device) -> Config:
    """A tile and splits clearly faster than ``best``, or ``best``."""
    least = CLEARLY_OF_FEW * milliseconds(problem, best, device)
    for splits in numbers_of_parts(problem):
        part, second = split(problem, splits), second_stage_ms(summed(problem), splits, 4)
        for config in tiles_of_few(part.layer, device):
            time = milliseconds(part, config, device) + second
            if time < least:
                least, best = time, replace(config, splits=splits)
    return best


def begins_while_packing(problem: Problem, config: Config, device: Device) -> bool:
    """Whether main blocks may begin once all packing blocks have begun.

    Early blocks gather on few multiprocessors, unless they fill the GPU or multiprocessors pack at most one block."""
    part = split(problem, config.splits)
    full = blocks_of(part, config) >= NEARLY_ALL * config.min_blocks * device.multiprocessors
    return device.launches_early and (full or pack_blocks(problem, config) <= device.multiprocessors)


def candidates(problem: Problem, dtype: torch.dtype, device: Device) -> list[Config]:
    tiles = TILES[ELEMENTS[dtype].accumulator.bitwidth // 8]
    return [config for sizes in tiles if (config := with_stages(problem, dtype, Shape(*sizes), device))]


@lru_cache(maxsize=1024)
def tiles_of_few(layer: Problem, device: Device) -> tuple[Config, ...]:
    others = with_stages(layer, torch.float32, NARROWER, device), next(joined_stages(layer, device), None)
    return (*candidates(layer, torch.float32, device), *filter(None, others))


def with_stages(problem: Problem, dtype: torch.dtype, shape: Shape, device: Device) -> Config | None:
    pairs, blocks, large = MOST_PAIRS, 0, shape.thread_m * shape.thread_n >= LARGE
    while pairs:
        config = make(problem, dtype, pairs, **shape._asdict())
        blocks = min(config.min_blocks, device.shared_per_multiprocessor // shared_need(config))
        most = STAGE_BYTES_ALONE if large and not config.partial else STAGE_BYTES
        if blocks > 1 and config.stage * config.itemsize <= most:
            return replace(config, min_blocks=blocks)
        pairs //= 2
    return replace(config, min_blocks=blocks) if blocks else None


def joined(problem: Problem, tile: Config, device: Device) -> Iterator[Config]:
    """Blocks that join two of ``tile``, with stages as deep, unless more multiprocessors would idle."""
    pair = tile.block_m * 2, tile.block_n, tile.thread_m * tile.thread_n, tile.min_blocks
    if tile.dtype != torch.float32 or pair != (JOINED.block_m, JOINED.block_n, LARGE, 2):
        return
    for config in joined_stages(problem, device):
        if config.pairs >= tile.pairs and 2 * rounds(problem, config, device) <= rounds(problem, tile, device):
            yield config


def joined_stages(problem: Problem, device: Device) -> Iterator[Config]:
    for pairs in range(MOST_PAIRS, 0, -1):
        config = make(problem, torch.float32, pairs, **JOINED._asdict())
        if shared_need(config) <= device.shared_per_multiprocessor:
            yield config


def shared_need(config: Config) -> int:
    return config.shared_bytes + ENTRY * config.entries + RESERVED_SHARED


def blocks_of(problem: Problem, config: Config) -> int:
    return config.column_tiles(problem) * config.row_tiles(problem) * problem.groups


def rounds(problem: Problem, config: Config, device: Device) -> int:
    return -(-blocks_of(problem, config) // device.multiprocessors)


def milliseconds(problem: Problem, config: Config, device: Device) -> float:
    sums = config.thread_m * config.thread_n
    taps = config.channel_taps / config.phases
    vectors = (config.thread_n + config.halo) // config.vector + taps * config.thread_m / config.vector_m
    products = taps * sums
    a_pair = config.threads * (products + SHARED_LOAD * vectors) + COPY * config.pitch
    a_stage = config.pairs * a_pair + STAGE * config.threads
    tap_chunks, channel_chunks, phase_chunks = config.chunks_of(problem)
    a_block = tap_chunks * phase_chunks * (channel_chunks * a_stage + FIND * config.table_entries)
    if config.partial:
        times = tap_chunks * phase_chunks * channel_chunks / config.partial
        a_block += times * ASIDE * sums * config.threads
    if config.min_blocks == 1:
        a_block += ALONE * config.block_m * config.block_n

    def a_round(blocks):
        warps = config.threads // 32
        if sums < LARGE:
            return blocks * (1 + WARPS / (blocks * warps))
        blocks = max(blocks, FEWEST_LARGE // warps)
        return blocks * (1 + WARPS / (blocks * warps * 2))

    whole, last = divmod(rounds(problem, config, device), config.min_blocks)
    multiply_adds = a_block * (whole * a_round(config.min_blocks) + (a_round(last) if last else 0))
    return multiply_adds / MULTIPLY_ADDS
