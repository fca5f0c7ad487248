"""Tiles, and their cost model."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.sectors import SECTOR
from numba_tconv.kernels.k4_register_tile import tile as k4_config
from numba_tconv.kernels.k4_register_tile.choose import rounds
from numba_tconv.runtime.device import H200, Device

ROWS, COLUMNS, CHANNELS = 16, 8, 4  # of the smallest product


class Sizes(NamedTuple):
    block_m: int
    block_n: int
    rows: int  # of a warp
    columns: int
    depth: int  # channels of a product
    blocks: int  # on a multiprocessor


TILES = (
    Sizes(64, 128, 64, 32, 8, 2),
    Sizes(64, 128, 32, 32, 4, 2),
    Sizes(64, 64, 32, 32, 4, 4),
    Sizes(32, 128, 32, 32, 4, 4),
    Sizes(64, 32, 16, 32, 4, 4),
    Sizes(32, 64, 16, 32, 4, 4),
    Sizes(16, 256, 16, 64, 4, 4),
    Sizes(16, 128, 16, 32, 4, 4),
)
RING = Sizes(64, 128, 64, 32, 8, 2)  # ring.py's
FEWEST_STAGES, MOST_STAGES = 3, 6
MOST_CHANNELS, STAGE_CHANNELS = 32, 3  # most of a stage; a stage's latency, in channels
MOST_PRODUCTS = 96  # unrolled
TURN_PRODUCTS = 32  # in a turn; more spill

RATE = 2.5e8  # multiply-adds a ms
FEWEST_WARPS, STORING_WARPS = 5.2, 11.5  # that hide latency
COPY = 12  # multiply-adds of a copy
LOAD = 0.25  # multiply-adds of a shared load
STAGE = 3.3e-4  # ms of latency
STORE = 2.7e-7  # ms a sum of a block
# The same for rings:
RING_RATE, RING_FEWEST_WARPS, RING_STORING_WARPS = 2.3e8, 6.7, 9.3
FIRST_COPIES = 1e-3  # ms a round
BY_ELEMENTS = 1.15  # factor without vectors of x


@dataclass(frozen=True)
class Config(k4_config.Config):
    """A warp computes 8 * ``thread_m`` rows by 4 * ``thread_n`` columns (``lanes_m`` is 8)."""

    depth: int = 0  # channels of a product; 0: 4, in two products (Ampere)
    ring: bool = False  # ring.py; Hopper only

    fragments = True

    @property
    def fours(self) -> int:
        return max(1, self.depth // CHANNELS)

    @property
    def at_once(self) -> int:
        step = self.thread_m // 2 * (self.thread_n // 2) * self.fours * self.tap_chunk
        steps = self.block_k // (CHANNELS * self.fours)
        return max(z for z in range(1, steps + 1) if steps % z == 0 and (z == 1 or z * step <= TURN_PRODUCTS))

    @property
    def barriers(self) -> int:
        return 2 * self.stages if self.ring else 0

    @property
    def begin(self) -> int:
        """Windows begin at multiples of so many columns."""
        return SECTOR // self.itemsize if self.x_vector > 1 else 1

    @property
    def width(self) -> int:
        """Columns between channels, against bank conflicts."""
        return -(-(self.copied - 4) // 8) * 8 + 4

    @property
    def result_pitch(self) -> int:
        return self.block_n + 8


def tap_chunk(problem: Problem, products: int, block_n: int) -> int:
    """The most taps that divide a row and widen windows by at most half a block."""
    t = problem.taps
    most = min(t.taps_per_row, max(1, MOST_PRODUCTS // products))
    fitting = (c for c in range(1, most + 1) if c == 1 or (c - 1) * t.step <= block_n // 2)
    return max(c for c in fitting if t.taps_per_row % c == 0)


def make(problem: Problem, block_k: int, sizes: Sizes, x_vector: int, ring: bool = False) -> Config:
    s, one_phase = sizes, problem.kernel_size % problem.taps.rows != 0
    of_block = dict(block_m=s.block_m, block_n=s.block_n, thread_m=s.rows // 8, thread_n=s.columns // 4, lanes_m=8)
    of_block |= dict(min_blocks=s.blocks, x_vector=x_vector, one_phase=one_phase)
    chunk = tap_chunk(problem, s.rows // ROWS * (s.columns // COLUMNS), s.block_n)
    usual = k4_config.make(problem, torch.float64, block_k, tap_chunk=chunk, **of_block)
    return Config(**{f.name: getattr(usual, f.name) for f in fields(usual)}, depth=s.depth, ring=ring)


def candidates(problem: Problem, x_vector: int, device: Device) -> Iterator[Config]:
    """Tiles that fit, with the depth that wastes the least."""
    channels = problem.in_channels_per_group
    share = device.shared_per_multiprocessor / H200.shared_per_multiprocessor
    for sizes in TILES:
        depth = sizes.depth if device.cc >= (9, 0) else 0
        unit = max(CHANNELS, depth)
        # Beside 32 x 32 sums, the addresses of single elements spill.
        fewer = x_vector == 1 and sizes.rows * sizes.columns == 1024
        blocks = max(2, round(sizes.blocks * share)) - fewer
        if blocks == 1:
            continue  # alone, it would idle while it waits
        here = sizes._replace(depth=depth, blocks=blocks)
        depths = range(unit, MOST_CHANNELS + 1, unit)
        for block_k in sorted(depths, key=lambda k: -(-channels // k) * (k + STAGE_CHANNELS)):
            config = make(problem, block_k, here, x_vector)
            if k4_config.fits(config, device):
                yield config
                break
    if device.cc == (9, 0) and (ring := of_ring(problem, x_vector, device)):
        yield ring


def of_ring(problem: Problem, x_vector: int, device: Device) -> Config | None:
    """The deepest ring with fewest wasted channels."""
    channels, depth = problem.in_channels_per_group, RING.depth
    for block_k in sorted(range(depth, MOST_CHANNELS + 1, depth), key=lambda k: (-(-channels // k) * k, -k)):
        config = make(problem, block_k, RING, x_vector, ring=True)
        for stages in range(MOST_STAGES, FEWEST_STAGES - 1, -1):
            if k4_config.fits(replace(config, stages=stages), device):
                return replace(config, stages=stages)
    return None


def cost(problem: Problem, config: Config, device: Device) -> float:
    c = config
    stages = c.channel_chunks(problem) * c.tap_chunks(problem)
    products = stages * c.block_m * c.block_n * c.block_k * c.multiplied_taps(problem)
    if c.ring:
        block, once = products * (BY_ELEMENTS if c.x_vector == 1 else 1) / RING_RATE, FIRST_COPIES
        fewest = RING_FEWEST_WARPS, RING_STORING_WARPS
    else:
        loads = LOAD * (2 / c.thread_n + 1 / c.thread_m)
        copies = stages * (c.x_stage / c.x_vector + c.w_stage / c.vector)
        block, once = (products * (1 + loads) + COPY * copies) / RATE, stages * STAGE
        fewest = FEWEST_WARPS, STORING_WARPS

    def milliseconds(resident):
        multiplying, storing = (max(1, warps / (resident * c.threads / 32)) for warps in fewest)
        return resident * (multiplying * block + storing * STORE * c.block_m * c.block_n) + once

    full, last = rounds(problem, config, device)
    return full * milliseconds(c.min_blocks) + (milliseconds(last) if last else 0)


@lru_cache(maxsize=1024)
def choose(problem: Problem, x_vector: int = 1, device: Device = H200) -> Config:
    return min(candidates(problem, x_vector, device), key=lambda config: cost(problem, config, device))
