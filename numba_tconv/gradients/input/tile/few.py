"""Tiles of grad_input_tile for few blocks: in parts of their sums, or narrower.

With many blocks, what a multiprocessor multiplies counts alone (tile.py). Few leave multiprocessors idle; then their
output channels are dealt out to parts (gradients/input/parts.py), and any tile may be the best. Of nine layers at batch
1, what the estimate picks of 53 to 99 tiles and numbers of parts took 1.02 times as long as the best in geometric mean,
and 1.08 times at most (H200, a script with more tiles than were kept, and weights packed more slowly)."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.input.parts import numbers_of_parts, split, summed
from numba_tconv.kernels.common.channel_parts import second_stage_ms
from numba_tconv.runtime.device import H200, Device

from .pack import pack_blocks
from .tile import Config, candidates, cost, joined_stages, turns, usual, with_stages

FEW_ROUNDS = 4  # of blocks of the usual tile: up to so many, others are weighed,
CLEARLY = 0.95  # and taken where they are estimated to take less than this share of its time
NARROWER = (128, 96, 8, 12, 16, 2)  # columns that 128 would leave mostly empty
NEARLY_ALL = 0.9  # of the places for blocks
MULTIPLY_ADDS = 250e6  # that a multiprocessor issues in a millisecond, by rows of 490f28d


@lru_cache(maxsize=1024)
def choose(problem: Problem, dtype: torch.dtype, device: Device = H200) -> Config:
    """The tile, and the number of parts, with the least estimated time."""
    best = usual(problem, dtype, device)
    if dtype == torch.float32 and turns(problem, best, device) <= FEW_ROUNDS * best.min_blocks:
        best = clearly_better(problem, best, device)
    return replace(best, early=device.launches_early, beside=begins_beside(problem, best, device))


def begins_beside(problem: Problem, config: Config, device: Device) -> bool:
    """Whether the main kernel's blocks may begin as soon as all of those that pack the weights have: where they need
    nearly all places, or where at most one packs on each multiprocessor. Else they would gather on the multiprocessors
    that are free first: at batch 1, 40 blocks of waveglow took 0.90 ms instead of 0.38, 264 of istft 0.105 instead of
    0.060, 512 of head 0.048 instead of 0.038 (H200, 4b392e3, of which these rows are not kept, and rows of 093b366)."""
    part = split(problem, config.splits)
    blocks = config.column_tiles(part) * config.row_tiles(part) * part.groups
    full = blocks >= NEARLY_ALL * config.min_blocks * device.multiprocessors
    return device.launches_early and (full or pack_blocks(problem, config) <= device.multiprocessors)


def clearly_better(problem: Problem, best: Config, device: Device) -> Config:
    """Any tile in any number of parts, or ``best`` where none takes clearly less."""
    least = CLEARLY * milliseconds(problem, best, device)
    for splits in numbers_of_parts(problem):
        part, second = split(problem, splits), second_stage_ms(summed(problem), splits, 4)
        for config in tiles(part.layer, device):
            time = milliseconds(part, config, device) + second
            if time < least:
                least, best = time, replace(config, splits=splits)
    return best


@lru_cache(maxsize=1024)
def tiles(layer: Problem, device: Device) -> tuple[Config, ...]:
    """Those that a layer may have, at any batch and length."""
    others = with_stages(layer, torch.float32, NARROWER, device), next(joined_stages(layer, device), None)
    return (*candidates(layer, torch.float32, device), *filter(None, others))


def milliseconds(problem: Problem, config: Config, device: Device) -> float:
    """An estimate of a launch that does not add up parts."""
    return cost(problem, config, device) / MULTIPLY_ADDS
