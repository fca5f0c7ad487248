"""The cost model of k4: which tile a problem gets, and into how many parts its input channels are split."""

from __future__ import annotations

from functools import lru_cache

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.channel_parts import LEAST_GAIN, second_stage_ms, split, worthwhile
from numba_tconv.runtime.device import H200, Device

from .few import FEW_ROUNDS, clearly_better
from .tile import Config, candidates

# Fitted to measured launches.
RATE = 2.8e8  # float32 multiply-adds of a multiprocessor in a millisecond
FEWEST_WARPS = 5.2  # warps of a multiprocessor that hide each other's latencies: fewer take as long
COPY = 92  # multiply-adds that take as long as a copy to shared memory
STAGE = 7.5e-5  # ms: latency of a stage
STORE = 5.4e-7  # ms for a sum of a block; meanwhile its successor does not multiply
LOAD = 0.92  # multiply-adds that take as long as a load from shared memory
CALL = 0.02  # ms: host time of a call; below it another launch gains nothing
MOST_ROUNDS = 4  # rounds of blocks; with more, splitting gains too little to be weighed


def blocks(problem: Problem, config: Config) -> int:
    column_tiles = -(-problem.batch * config.columns(problem)[1] // config.block_n)
    return column_tiles * config.row_tiles(problem) * problem.groups


def rounds(problem: Problem, config: Config, device: Device) -> tuple[int, int]:
    """Full rounds of ``min_blocks`` blocks a multiprocessor, and the most blocks of one in the last, partial round."""
    full, rest = divmod(blocks(problem, config), device.multiprocessors * config.min_blocks)
    return full, -(-rest // device.multiprocessors)


def cost(problem: Problem, config: Config, device: Device) -> float:
    """Estimated milliseconds, second stage included, launch overhead excluded."""
    c, part = config, split(problem, config.splits)
    stages = c.channel_chunks(part) * c.tap_chunks(part)
    copies = c.x_stage / c.x_vector + c.w_stage / c.vector
    loads = LOAD * (1 / c.thread_m + 1 / c.block_k)
    products = c.block_m * c.block_n * c.block_k * c.multiplied_taps(part)
    block = stages * (products * (1 + loads) + COPY * copies)
    rate = RATE * 4 / c.itemsize

    def milliseconds(resident):
        idle = max(1, FEWEST_WARPS / (resident * c.threads / 32))
        store = STORE * c.block_m * c.block_n * c.itemsize / 4
        return resident * idle * block / rate + stages * STAGE + store

    full, last = rounds(part, config, device)
    first = full * milliseconds(c.min_blocks) + (milliseconds(last) if last else 0)
    return first + second_stage_ms(problem, c.splits, c.itemsize)


@lru_cache(maxsize=1024)
def choose(problem: Problem, dtype: torch.dtype, x_vector: int = 1, device: Device = H200) -> Config:
    """The configuration with the least estimated time. ``x_vector``: elements of x that one copy takes."""

    def time(config):
        return cost(problem, config, device)

    whole = min(candidates(problem, dtype, x_vector, device), key=time)
    share = blocks(problem, whole) / (whole.min_blocks * device.multiprocessors)
    if dtype != torch.float32 or share >= MOST_ROUNDS:  # partial sums are in float32
        return whole
    parts = worthwhile(problem, share, MOST_ROUNDS) if time(whole) >= CALL else []
    split_sums = (c for splits in parts for c in candidates(problem, dtype, x_vector, device, splits))
    best = min(split_sums, key=time, default=whole)
    usual = best if time(best) + LEAST_GAIN < time(whole) else whole
    few = share < FEW_ROUNDS and device.cc >= (9, 0)  # few.py was fitted to Hopper
    return clearly_better(problem, usual, x_vector, device, [1, *parts]) if few else usual
