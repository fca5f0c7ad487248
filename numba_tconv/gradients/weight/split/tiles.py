"""The tile of grad_weight_split for a problem, and the number of splits of its reduction."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.runtime.device import H200, Device

from .cost import instructions, least_ms, milliseconds, products
from .tile import PARTIAL_TERMS, REST, SPLIT_COLUMNS, WHOLE, Config, candidates, unequal

CLEARLY = 0.95  # share of the usual tile's time below which another is taken
LENGTHS = 128, 512, 8192  # for which a layer may have a tile of its own
MOST_ROUNDS = 4  # of blocks that splits are tried for; more where sums need them


@lru_cache(maxsize=1024)
def tiles(layer: Problem, dtype: torch.dtype, device: Device) -> tuple[Config, ...]:
    """Tiles of a layer, for any batch and length.

    The usual tile has the fewest estimated instructions. Except in 16 bits or on GPUs older than Hopper, the tiles with
    the least estimated time at LENGTHS follow."""
    found = [*candidates(layer, dtype, device), *_of_two_kinds(layer, dtype, device)]

    def best(cost, least):
        """The tile with the least ``cost``; ``least`` is a lower bound of it that is quicker to compute."""
        lowest, chosen = math.inf, None
        # Among equal bounds more vectors a turn are faster.
        for bound, _, z in sorted((least(config), -config.vectors_a_turn, z) for z, config in enumerate(found)):
            if bound >= lowest:
                break
            if (of_this := cost(found[z])) < lowest:
                lowest, chosen = of_this, found[z]
        return chosen

    usual = best(partial(instructions, layer), partial(products, layer))
    if dtype.itemsize < 4 or device.cc < (9, 0):
        return (usual,)
    samples = (replace(layer, length=max(layer.length, length)) for length in LENGTHS)
    others = (best(partial(_time, sample, device), partial(least_ms, sample, device)) for sample in samples)
    return tuple(dict.fromkeys((usual, *others)))


def _of_two_kinds(layer: Problem, dtype: torch.dtype, device: Device) -> Iterator[Config]:
    """Tiles of WHOLE taps, each with the REST tile of the fewest estimated instructions among those that share a
    multiprocessor with as many others."""
    if not unequal(layer):
        return
    rests = sorted(candidates(layer, dtype, device, REST), key=partial(instructions, layer))
    for whole in candidates(layer, dtype, device, WHOLE):
        rest = next((rest for rest in rests if rest.min_blocks >= whole.min_blocks), None)
        if rest:
            yield replace(whole, rest=replace(rest, min_blocks=whole.min_blocks))


@lru_cache(maxsize=1024)
def choose(problem: Problem, dtype: torch.dtype, device: Device = H200) -> Config:
    """The layer's usual tile, or one that clearly takes less time, as with short sums."""
    usual, *others = tiles(problem.layer, dtype, device)
    time = partial(_time, problem, device)
    best = min(others, key=time, default=usual)
    return best if time(best) < CLEARLY * time(usual) else usual


def _time(problem: Problem, device: Device, config: Config) -> float:
    """Estimated milliseconds, in the best number of splits."""
    estimate = milliseconds(problem, config, device)
    return min(estimate(*parts) for parts in divisions(problem, config, device))


@lru_cache(maxsize=1024)
def splits_of(problem: Problem, config: Config, device: Device = H200) -> tuple[int, int]:
    """Splits, and the stages of each, with the least estimated time within the longest sum."""
    estimate = milliseconds(problem, config, device)
    return min(divisions(problem, config, device), key=lambda parts: estimate(*parts))


def divisions(problem: Problem, config: Config, device: Device) -> list[tuple[int, int]]:
    """Candidate splits, with the stages of each: the most that keep within a number of blocks a multiprocessor."""
    stages, blocks = max(1, config.stages(problem)), config.blocks(problem)
    longest = min(max(SPLIT_COLUMNS, PARTIAL_TERMS * tile.slices) for tile in config.tiles)
    least = -(-stages * config.block_l // longest)
    fewest = -(-least * blocks // device.multiprocessors)  # blocks of a multiprocessor
    most = max(MOST_ROUNDS * config.min_blocks, fewest)
    found = (min(stages, device.multiprocessors * each // blocks) for each in range(fewest, most + 1))
    lengths = {-(-stages // splits) for splits in found}
    return [(-(-stages // length), length) for length in sorted(lengths, reverse=True)]
