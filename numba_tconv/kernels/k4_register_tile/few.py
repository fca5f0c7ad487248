"""Tiles of k4 for launches of few blocks.

The multiprocessor with the most blocks decides: by its warps that have columns, by the warps that share a scheduler,
and by the latency that a lone warp cannot hide. Other tile shapes leave the last tile of columns less empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.channel_parts import second_stage_ms, split
from numba_tconv.runtime.device import Device

from .tile import Config, candidates, fits, make, register_window, storing_vectors, terms_of_a_partial_sum

FEW_ROUNDS = 2  # rounds of blocks of the tile that cost.py picks: below, all tiles are weighed anew,
CLEARLY = 0.98  # and taken where their estimate is less than this share of its time
# (block_m, block_n, thread_m, thread_n, lanes_m, min_blocks, channels of the deepest stage): many sums a thread, few
# columns, few sums.
TILES = (
    (192, 96, 12, 12, 16, 2, 16),
    (96, 192, 12, 12, 8, 2, 16),
    (256, 24, 8, 4, 16, 2, 16),
    (32, 64, 4, 4, 4, 5, 32),
)
# For rows of unequal taps: 16 channels of one phase a warp, and as many warps as phases.
APART = dict(block_n=64, thread_m=4, thread_n=8, lanes_m=4, min_blocks=4, deepest=8, stages=(2,))
MOST_PHASES = 8
# Fitted to measured launches of few blocks. Unit: clocks of a scheduler, each a multiply-add of one warp.
SCHEDULERS = 4  # of a multiprocessor
CLOCKS = 1.64e6  # in a millisecond
CHANNEL = 31  # loads of a turn of the loop over channels, and its end, for a warp
LATENCY = 32  # latency of these loads, unless other warps multiply meanwhile
ALONE = 360  # barriers of a stage, for a block alone on a multiprocessor; a quarter with two blocks
COPY = 0.26  # a copy to shared memory
POSITION = 1.33  # the place of an output, computed once for all output channels of a block
LAUNCH = 0.0049  # ms


def rounds(problem: Problem, config: Config, device: Device) -> Iterator[tuple[int, int, int]]:
    """Rounds of the multiprocessor with the most blocks: (equal rounds, blocks in each, their warps that have columns),
    tiles of the last columns last.
    """
    columns, rows = problem.batch * config.columns(problem)[1], config.row_tiles(problem) * problem.groups
    column_tiles, warp_columns = -(-columns // config.block_n), config.block_n // config.warps_n
    warps = config.warps_m * config.warps_n
    of_last = config.warps_m * -(-(columns - (column_tiles - 1) * config.block_n) // warp_columns)
    most = -(-column_tiles * rows // device.multiprocessors)
    full = most if of_last == warps else min(most, -(-(column_tiles - 1) * rows // device.multiprocessors))
    whole, rest = divmod(full, config.min_blocks)
    beside = min(-full % config.min_blocks, most - full)  # last tiles that share the round of the rest
    last_whole, last_rest = divmod(most - full - beside, config.min_blocks)
    yield whole, config.min_blocks, config.min_blocks * warps
    yield min(rest, 1), rest + beside, rest * warps + beside * of_last
    yield last_whole, config.min_blocks, config.min_blocks * of_last
    yield min(last_rest, 1), last_rest, last_rest * of_last


def milliseconds(problem: Problem, config: Config, device: Device) -> float:
    """Estimated milliseconds of a launch, second stage excluded."""
    c = config
    alike = [r for r in rounds(problem, c, device) if r[0]]
    taps = c.multiplied_taps(problem) if c.apart else c.tap_chunk  # with one phase a block, the longest row decides
    a_warp = c.block_k * (taps * c.thread_m * c.thread_n + CHANNEL / c.at_once)
    waits = c.block_k * LATENCY / c.at_once
    copies = COPY * (c.x_stage / c.x_vector + c.w_stage / c.vector)
    store = POSITION * max(c.block_n * c.phases * c.taps.gap, c.threads)
    stages = c.channel_chunks(problem) * c.tap_chunks(problem)

    def clocks(resident, warps):
        busy = -(-warps // SCHEDULERS) * a_warp + resident * copies
        alone = a_warp + waits + resident * copies
        hidden = (busy**4 + alone**4) ** 0.25  # a smooth maximum: they hide each other almost entirely
        return stages * (hidden + ALONE / resident**2) + resident * store

    return LAUNCH + sum(number * clocks(resident, warps) for number, resident, warps in alike) / CLOCKS


def cost(problem: Problem, config: Config, device: Device) -> float:
    """Estimated milliseconds, second stage included."""
    first = milliseconds(split(problem, config.splits), config, device)
    return first + second_stage_ms(problem, config.splits, config.itemsize)


@lru_cache(maxsize=1024)
def tiles(layer: Problem, x_vector: int, device: Device) -> tuple[Config, ...]:
    """The tiles of a layer, for every batch and length; none before Hopper."""
    if device.cc < (9, 0):
        return ()
    names = ("block_m", "block_n", "thread_m", "thread_n", "lanes_m", "min_blocks")
    if layer.kernel_size % layer.taps.rows:
        # A warp has channels of one phase, and a block all phases of them.
        several = 1 < layer.taps.rows <= MOST_PHASES
        sized = [dict(APART, block_m=16 * layer.taps.rows, apart=True)] if several else []
    else:
        sized = [dict(zip(names, sizes, strict=True), deepest=deepest) for *sizes, deepest in TILES]
    deep = (with_stages(layer, device, x_vector=x_vector, **size) for size in sized)
    return tuple(config for config in deep if config)


def with_stages(layer: Problem, device: Device, deepest: int, stages=(3, 2), **tile) -> Config | None:
    """The tile whose stages waste the fewest channels, deepest first, with the first number of ``stages`` that fits;
    None if none fits, or the window is too wide for the registers.
    """
    depth = layer.in_channels_per_group
    for block_k in sorted(range(2, deepest + 1, 2), key=lambda k: (-(-depth // k) * k, -k)):
        config = make(layer, torch.float32, block_k, **tile)
        short = config.partial == 0 or block_k * config.tap_chunk <= terms_of_a_partial_sum(layer)
        fitting = (way for n in stages if fits(way := replace(config, stages=n), device))
        if short and config.window <= register_window(device) and (found := next(fitting, None)):
            return found
    return None


def clearly_better(problem: Problem, usual: Config, x_vector: int, device: Device, parts: Iterable[int]) -> Config:
    """The fastest of these and the usual tiles, in a number of ``parts``; ``usual`` unless CLEARLY slower."""
    least, best, number = CLEARLY * cost(problem, usual, device), usual, usual.splits
    for splits in parts:
        part, second = split(problem, splits), second_stage_ms(problem, splits, 4)
        usual_tiles = candidates(problem, torch.float32, x_vector, device, splits)
        for config in (*usual_tiles, *tiles(part.layer, x_vector, device)):
            time = milliseconds(part, config, device) + second
            if time < least:
                least, best, number = time, config, splits
    return replace(storing_vectors(best, split(problem, number)), splits=number)
