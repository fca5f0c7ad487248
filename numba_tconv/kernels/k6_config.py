"""Configurations of k6: what a block holds in shared memory, and which configuration a problem gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ..problem import Problem
from .device import H200
from .tensor_tile import COLUMNS, ROWS, Tile, make_tile, round_sizes

CONSUMERS, PRODUCERS = 2, 4  # warpgroups that multiply; warps that copy
THREADS = CONSUMERS * 128 + PRODUCERS * 32
BLOCKS = 2  # of 64 columns, in a tile
SHARED_PER_BLOCK = H200.shared_per_block  # bytes; the rung runs on this compute capability only
MOST_STAGES = 12
LARGEST_STAGING = 24 * 1024  # bytes of one buffer, where smaller rounds are possible
LANE_OPERANDS = 48  # registers for the operands of two stages, beside 128 accumulators


@dataclass(frozen=True)
class Config:
    tile: Tile
    resident: bool  # all weights of the row tile stay in shared memory
    weights: int  # bytes of them
    stages: int
    unroll: int  # stages whose operands are in registers at a time
    buffers: int  # staging buffers: one for each warpgroup, or one that they pass to each other

    @property
    def width(self) -> int:
        """Columns of x in a stage; with streamed weights those of both warpgroups."""
        return self.tile.lead + COLUMNS + (0 if self.resident else self.tile.advance)

    @property
    def pitch(self) -> int:
        """Elements from one channel of a stage to the next: 8 or 24 modulo 32, so that the four channels that a
        quarter-warp reads lie in different banks."""
        return next(p for p in range(self.width, self.width + 32) if p % 32 in (8, 24))

    @property
    def x_stage(self) -> int:
        """Bytes of x in a stage."""
        return self.tile.depth * self.pitch * self.tile.itemsize

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that multiplies, and of one that copies; all start with 168, and the sum stays. The
        wider windows of streamed weights take a copying thread more pieces to keep account of."""
        return (224, 56) if self.resident else (208, 88)

    @property
    def slot(self) -> int:
        """Bytes of a stage."""
        return self.x_stage + (0 if self.resident else self.tile.stage_weights)

    # Where things lie in shared memory, in bytes: resident weights, ring, staging buffers, mbarriers.

    @property
    def ring(self) -> int:
        return self.weights

    @property
    def staging(self) -> int:
        return self.ring + self.stages * self.slot

    @property
    def barriers(self) -> int:
        return self.staging + self.buffers * self.tile.staging * 4

    @property
    def shared_bytes(self) -> int:
        """One mbarrier that says full and one that says empty for each stage, one for the resident weights, and two for
        each warpgroup's turns."""
        return self.barriers + 8 * (2 * self.stages + 5)


def unroll_of(tile: Tile) -> int:
    """Stages whose operands are held: two, so that a window is loaded while products run, if the registers suffice."""
    operands = 2 * (4 + tile.halo)
    return 2 if tile.parts == 1 and 2 * operands <= LANE_OPERANDS + 128 - tile.rows else 1


def channel_chunks(problem: Problem, config: Config) -> int:
    """Stages a tap chunk: whole turns of the unrolled loop; the channels beyond the last are zeros."""
    return -(-config.tile.channel_chunks(problem) // config.unroll) * config.unroll


@lru_cache(maxsize=1024)
def choose(problem: Problem, precision: str) -> Config | None:
    """The configuration of a problem; None if it has none."""
    # Split operands need a second set of sums (k6_wgmma.py), and 64 rows leave registers for it.
    tile = make_tile(problem, precision, ROWS // 2 if precision == "tf32x3" else ROWS)
    if tile is None:
        return None
    unroll = unroll_of(tile)
    chunks = -(-tile.channel_chunks(problem) // unroll) * unroll
    weights = tile.tap_chunks(problem) * chunks * tile.stage_weights
    for resident in (True, False):
        # Depth of the ring first, then a buffer for each warpgroup, then the largest rounds.
        for fewest in (8, 7, 6, 4):
            for buffers in (2, 1):
                for round_channels in round_sizes(tile):
                    staged = replace(tile, round_channels=round_channels)
                    if staged.staging * 4 > LARGEST_STAGING and round_channels > tile.round_channels:
                        continue
                    config = Config(staged, resident, weights if resident else 0, fewest, unroll, buffers)
                    spare = SHARED_PER_BLOCK - config.shared_bytes
                    if spare >= 0:
                        return replace(config, stages=min(MOST_STAGES, fewest + spare // (config.slot + 16)))
    return None
