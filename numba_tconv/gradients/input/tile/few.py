"""Tiles of grad_input_tile where blocks are few: with the output channels in parts, or narrower.

Few blocks leave multiprocessors idle, so every tile and every number of parts (gradients/input/parts.py) is a
candidate."""

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

FEW_ROUNDS = 4  # of the usual tile: up to so many, others are considered,
CLEARLY = 0.95  # and taken below this share of its time
NARROWER = (128, 96, 8, 12, 16, 2)  # columns that 128 would leave mostly empty
NEARLY_ALL = 0.9  # of the places for blocks
MULTIPLY_ADDS = 250e6  # of a multiprocessor in a millisecond, fitted on an H200


@lru_cache(maxsize=1024)
def choose(problem: Problem, dtype: torch.dtype, device: Device = H200) -> Config:
    """The tile and the number of parts with the least estimated time."""
    best = usual(problem, dtype, device)
    if dtype == torch.float32 and turns(problem, best, device) <= FEW_ROUNDS * best.min_blocks:
        best = clearly_better(problem, best, device)
    return replace(best, early=device.launches_early, beside=begins_beside(problem, best, device))


def begins_beside(problem: Problem, config: Config, device: Device) -> bool:
    """Whether the main kernel's blocks may begin once all blocks that pack the weights have.

    They may where they need nearly all places, or where a multiprocessor packs at most one block. Otherwise they would
    gather on the first free multiprocessors."""
    part = split(problem, config.splits)
    blocks = config.column_tiles(part) * config.row_tiles(part) * part.groups
    full = blocks >= NEARLY_ALL * config.min_blocks * device.multiprocessors
    return device.launches_early and (full or pack_blocks(problem, config) <= device.multiprocessors)


def clearly_better(problem: Problem, best: Config, device: Device) -> Config:
    """The tile in the number of parts with the least estimated time, or ``best`` where none takes clearly less."""
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
    """Candidate float32 tiles of a layer, for any batch and length."""
    others = with_stages(layer, torch.float32, NARROWER, device), next(joined_stages(layer, device), None)
    return (*candidates(layer, torch.float32, device), *filter(None, others))


def milliseconds(problem: Problem, config: Config, device: Device) -> float:
    """Estimated milliseconds of a launch, without adding up parts."""
    return cost(problem, config, device) / MULTIPLY_ADDS
