"""Configurations of k6: what a block holds in shared memory, and which configuration a problem gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ..problem import Problem
from .device import H200
from .tensor_runs import keeps_runs
from .tensor_tile import COLUMNS, ROWS, Tile, make_tile, round_sizes

CONSUMERS, PRODUCERS = 2, 4  # warpgroups that multiply; warps that copy
STORE_WARPS = 4  # of a warpgroup, which store together
THREADS = CONSUMERS * 128 + PRODUCERS * 32
BLOCKS = 2  # of 64 columns, in a tile
SHARED_PER_BLOCK = H200.shared_per_block  # bytes; the rung runs on this compute capability only
MOST_STAGES = 12
MOST_PADDING = 2  # columns of a sample, over those that it needs
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
    def paired(self) -> bool:
        """The warpgroups compute neighbouring tiles from the same stages; otherwise they take tiles in turn."""
        return not self.resident or self.tile.parts == 2

    @property
    def regions(self) -> int:
        """Windows in a stage."""
        return CONSUMERS if self.paired else 1

    @property
    def width(self) -> int:
        """Columns of a window."""
        return self.tile.lead + COLUMNS

    # A window is fetched in a number of boxes (k6_boxes.py), mostly one.

    def bank_shift(self, boxes: int) -> int:
        """Columns by which the boxes of a window are shifted in all, so that their rows lie in different banks: as many
        as there are in the 128 bytes of all banks."""
        return 128 // self.tile.itemsize if boxes * self.tile.itemsize > 4 else 0

    def pitch(self, boxes: int) -> int:
        """Elements from one row of a box to the next: 8 or 24 modulo 32, so that the four channels that a quarter-warp
        reads lie in different banks."""
        spare = 0 if boxes == 1 else max(16 // self.tile.itemsize, self.bank_shift(boxes))  # windows begin in their box
        width, suits = self.width + spare, (8, 24) if boxes == 1 else (8,)
        return next(p for p in range(width, width + 32) if p % 32 in suits)

    def spacing(self, boxes: int) -> int:
        """Bytes from one box to the next, a multiple of 128."""
        return -(-self.tile.depth // boxes * self.pitch(boxes) * self.tile.itemsize // 128) * 128

    def slot(self, boxes: int = 1) -> int:
        """Bytes of a stage."""
        weights = 0 if self.resident else self.tile.stage_weights
        return self.regions * boxes * self.spacing(boxes) + weights

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that multiplies, and of one that copies; all start with 168, and the sum stays. Two
        windows and 16-bit elements (eight boxes) take a copying thread more to keep account of."""
        if not self.resident:
            return 200, 104
        return (216, 72) if self.tile.itemsize == 4 else (208, 88)

    # Where things lie in shared memory, in bytes: resident weights, ring, staging buffers, mbarriers, a tensor map.

    @property
    def ring(self) -> int:
        return self.weights

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.slot()

    @property
    def staging(self) -> int:
        return self.ring + self.ring_bytes

    @property
    def barriers(self) -> int:
        return self.staging + self.buffers * self.tile.staging * 4

    @property
    def map(self) -> int:
        """Behind the mbarriers: one that says full and one that says empty for each stage, one for the resident
        weights, and two for each warpgroup's turns."""
        return -(-(self.barriers + 8 * (2 * self.stages + 1 + 2 * CONSUMERS)) // 128) * 128

    @property
    def shared_bytes(self) -> int:
        return self.map + 128


def unroll_of(tile: Tile) -> int:
    """Stages whose operands are held: two, so that a window is loaded while products run, if the registers suffice."""
    operands = 2 * (4 + tile.halo)
    return 2 if tile.parts == 1 and 2 * operands <= LANE_OPERANDS + 128 - tile.rows else 1


def sample_columns(problem: Problem, config: Config) -> tuple[int, int]:
    """First column, and columns a sample: as many as whole tiles have, if that is not many more. Then hardly a window
    is shared by two samples."""
    first, needed = config.tile.columns(problem)
    whole = -(-needed // config.tile.advance) * config.tile.advance
    return first, whole if whole <= MOST_PADDING * needed else needed


def column_tiles(problem: Problem, config: Config) -> int:
    """Tiles along the columns: none for what the last sample is padded with."""
    padded, needed = sample_columns(problem, config)[1], config.tile.columns(problem)[1]
    return config.tile.tiles_along((problem.batch - 1) * padded + needed)


def channel_chunks(problem: Problem, config: Config) -> int:
    """Stages a tap chunk: whole turns of the unrolled loop; the channels beyond the last are zeros."""
    return -(-config.tile.channel_chunks(problem) // config.unroll) * config.unroll


@lru_cache(maxsize=1024)
def choose(problem: Problem, precision: str) -> Config | None:
    """The configuration of a problem; None if it has none."""
    # Split operands need a second set of sums (k6_multiply.py), and 64 rows leave registers for it.
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
                    too_large = staged.staging * 4 > LARGEST_STAGING or not keeps_runs(staged, STORE_WARPS)
                    if too_large and round_channels > tile.round_channels:
                        continue
                    config = Config(staged, resident, weights if resident else 0, fewest, unroll, buffers)
                    for stages in range(MOST_STAGES, fewest - 1, -1):
                        if replace(config, stages=stages).shared_bytes <= SHARED_PER_BLOCK:
                            return replace(config, stages=stages)
    return None
