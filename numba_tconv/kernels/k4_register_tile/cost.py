"""How long k4 takes, and by that which tile a problem gets, and in how many parts it sums the input channels."""

from __future__ import annotations

from functools import lru_cache

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.channel_parts import LEAST_GAIN, second_stage_ms, split, worthwhile
from numba_tconv.runtime.device import H200, Device

from .few import FEW_ROUNDS, clearly_better
from .tile import Config, candidates

# Fitted to times of 339 configurations of 57 problems (H100, a script; no recorded rows), so that what the model picks
# takes hardly longer than the fastest: 1.008 times as long in geometric mean; up to 1.29 times where blocks are few,
# which few.py weighs anew. The root mean square of what it is off is 13%, and 11% where a launch takes over 50 us.
# Sums were then put aside twice as often, and of more than two parts whole.
RATE = 2.8e8  # multiply-adds, of float32, of a multiprocessor in a millisecond
FEWEST_WARPS = 5.2  # of a multiprocessor, that hide each other's latencies: fewer take as long
COPY = 92  # multiply-adds that take as long as a copy to shared memory
STAGE = 7.5e-5  # ms, of the latency of each stage
STORE = 5.4e-7  # ms, of each sum of a block: while they leave, blocks beside it multiply, but not the next one
LOAD = 0.92  # multiply-adds that take as long as a load from shared memory
CALL = 0.02  # ms that a call takes the host at least: where the GPU takes less, another launch gains nothing
MOST_ROUNDS = 4  # of blocks; from there on, more of them gain too little to be weighed


def blocks(problem: Problem, config: Config) -> int:
    column_tiles = -(-problem.batch * config.columns(problem)[1] // config.block_n)
    return column_tiles * config.row_tiles(problem) * problem.groups


def rounds(problem: Problem, config: Config, device: Device) -> tuple[int, int]:
    """Full rounds, in which every multiprocessor has min_blocks blocks of a launch, and the most blocks that one has in
    the round after them."""
    full, rest = divmod(blocks(problem, config), device.multiprocessors * config.min_blocks)
    return full, -(-rest // device.multiprocessors)


def cost(problem: Problem, config: Config, device: Device) -> float:
    """Milliseconds with an H200's arithmetic, but for what every launch costs: those of a multiprocessor's rounds of
    blocks."""
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
    """The configuration with the least estimated time."""

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
    few = share < FEW_ROUNDS and device.cc >= (9, 0)  # on whose GPUs that was measured
    return clearly_better(problem, usual, x_vector, device, [1, *parts]) if few else usual
