"""Tiles of k4 for few blocks: where the last tile of columns would be nearly empty, and a multiprocessor has a block or
two.

With many blocks, what a multiprocessor multiplies in a round is all that counts (cost.py). Of few blocks those of
the multiprocessor with the most of them do: which of their warps have columns, how many warps of theirs share a
scheduler, and how long a warp alone waits for its loads. Four columns more than whole tiles of 128 take half as long
again (oobleck_u1 at batch 1, of a script: 616 us with 260 columns, 416 with 256), in tiles of 96 next to nothing: 455
and 456. By rows it takes 0.456 ms instead of 0.615, hifigan_u1 0.076 instead of 0.088, waveglow 0.048 instead of 0.075
(490f28d and ee6b210).
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

FEW_ROUNDS = 2  # of blocks of the tile that cost.py picks: below, all are weighed anew,
CLEARLY = 0.98  # and taken where they are estimated to take less than this share of its time
# (block_m, block_n, thread_m, thread_n, lanes_m, min_blocks, channels of the deepest stage). More sums a thread than
# usual, of which few warps keep a multiprocessor busy; few columns; few sums, for problems of a few blocks.
TILES = (
    (192, 96, 12, 12, 16, 2, 16),
    (96, 192, 12, 12, 8, 2, 16),
    (256, 24, 8, 4, 16, 2, 16),
    (32, 64, 4, 4, 4, 5, 32),
)
# For rows of unequal taps: 16 channels of a phase for each warp, and as many warps as phases. SeamlessM4T's layer takes
# 0.056 ms; in blocks of one phase it took 0.068 (H100, a script; no recorded rows).
APART = dict(block_n=64, thread_m=4, thread_n=8, lanes_m=4, min_blocks=4, deepest=8, stages=(2,))
MOST_PHASES = 8
# Fitted to times of 237 launches, of 57 problems with few blocks (H100 and H200, scripts; no recorded rows). The root
# mean square of what the model is off is 11%; what it picks of them takes 1.003 times as long as the fastest in
# geometric mean, at most 1.07 times. A clock is that of a scheduler, in which one of its warps multiplies and adds.
SCHEDULERS = 4  # of a multiprocessor
CLOCKS = 1.64e6  # in a millisecond
CHANNEL = 31  # of a warp, for the loads of a turn of the loop over channels, and its end
LATENCY = 32  # until they have arrived, unless other warps multiply meanwhile
ALONE = 360  # of a block that is alone on a multiprocessor, for the barriers of a stage; a quarter, of two blocks
COPY = 0.26  # of a copy to shared memory
POSITION = 1.33  # for where an output lies, worked out once for all output channels of a block
LAUNCH = 0.0049  # ms


def rounds(problem: Problem, config: Config, device: Device) -> Iterator[tuple[int, int, int]]:
    """Of the multiprocessor with the most blocks: (rounds that are alike, blocks in each, warps of theirs that have
    columns). The tiles of the last columns, some of whose warps may have none, come last."""
    columns, rows = problem.batch * config.columns(problem)[1], config.row_tiles(problem) * problem.groups
    column_tiles, warp_columns = -(-columns // config.block_n), config.block_n // config.warps_n
    warps = config.warps_m * config.warps_n
    of_last = config.warps_m * -(-(columns - (column_tiles - 1) * config.block_n) // warp_columns)
    most = -(-column_tiles * rows // device.multiprocessors)
    full = most if of_last == warps else min(most, -(-(column_tiles - 1) * rows // device.multiprocessors))
    whole, rest = divmod(full, config.min_blocks)
    beside = min(-full % config.min_blocks, most - full)  # last ones, in the round of the rest
    last_whole, last_rest = divmod(most - full - beside, config.min_blocks)
    yield whole, config.min_blocks, config.min_blocks * warps
    yield min(rest, 1), rest + beside, rest * warps + beside * of_last
    yield last_whole, config.min_blocks, config.min_blocks * of_last
    yield min(last_rest, 1), last_rest, last_rest * of_last


def milliseconds(problem: Problem, config: Config, device: Device) -> float:
    """An estimate of a launch that does not add up partial sums."""
    c = config
    alike = [r for r in rounds(problem, c, device) if r[0]]
    taps = c.multiplied_taps(problem) if c.apart else c.tap_chunk  # of blocks of one phase the longest decide
    a_warp = c.block_k * (taps * c.thread_m * c.thread_n + CHANNEL / c.at_once)
    waits = c.block_k * LATENCY / c.at_once
    copies = COPY * (c.x_stage / c.x_vector + c.w_stage / c.vector)
    store = POSITION * max(c.block_n * c.phases * c.taps.gap, c.threads)
    stages = c.channel_chunks(problem) * c.tap_chunks(problem)

    def clocks(resident, warps):
        busy = -(-warps // SCHEDULERS) * a_warp + resident * copies
        alone = a_warp + waits + resident * copies
        hidden = (busy**4 + alone**4) ** 0.25  # they hide each other, but for a part
        return stages * (hidden + ALONE / resident**2) + resident * store

    return LAUNCH + sum(number * clocks(resident, warps) for number, resident, warps in alike) / CLOCKS


def cost(problem: Problem, config: Config, device: Device) -> float:
    """Milliseconds of an H200, with the second stage."""
    first = milliseconds(split(problem, config.splits), config, device)
    return first + second_stage_ms(problem, config.splits, config.itemsize)


@lru_cache(maxsize=1024)
def tiles(layer: Problem, x_vector: int, device: Device) -> tuple[Config, ...]:
    """Those that a layer may have, at any batch and length; none on other GPUs than Hopper's."""
    if device.cc < (9, 0):
        return ()
    names = ("block_m", "block_n", "thread_m", "thread_n", "lanes_m", "min_blocks")
    if layer.kernel_size % layer.taps.rows:
        # Rows of unequal taps: a warp has channels of one phase, and a block all phases of them.
        several = 1 < layer.taps.rows <= MOST_PHASES
        sized = [dict(APART, block_m=16 * layer.taps.rows, apart=True)] if several else []
    else:
        sized = [dict(zip(names, sizes, strict=True), deepest=deepest) for *sizes, deepest in TILES]
    deep = (with_stages(layer, device, x_vector=x_vector, **size) for size in sized)
    return tuple(config for config in deep if config)


def with_stages(layer: Problem, device: Device, deepest: int, stages=(3, 2), **tile) -> Config | None:
    """The tile with the deepest stages that waste the fewest channels, and with the first number of them that fits;
    None where none does, or the window is wider than registers hold."""
    depth = layer.in_channels_per_group
    for block_k in sorted(range(2, deepest + 1, 2), key=lambda k: (-(-depth // k) * k, -k)):
        config = make(layer, torch.float32, block_k, **tile)
        short = config.partial == 0 or block_k * config.tap_chunk <= terms_of_a_partial_sum(layer)
        fitting = (way for n in stages if fits(way := replace(config, stages=n), device))
        if short and config.window <= register_window(device) and (found := next(fitting, None)):
            return found
    return None


def clearly_better(problem: Problem, usual: Config, x_vector: int, device: Device, parts: Iterable[int]) -> Config:
    """The best of these and the usual tiles, in one of the numbers of ``parts``, or ``usual`` where that takes hardly
    longer."""
    least, best, number = CLEARLY * cost(problem, usual, device), usual, usual.splits
    for splits in parts:
        part, second = split(problem, splits), second_stage_ms(problem, splits, 4)
        usual_tiles = candidates(problem, torch.float32, x_vector, device, splits)
        for config in (*usual_tiles, *tiles(part.layer, x_vector, device)):
            time = milliseconds(part, config, device) + second
            if time < least:
                least, best, number = time, config, splits
    return replace(storing_vectors(best, split(problem, number)), splits=number)
