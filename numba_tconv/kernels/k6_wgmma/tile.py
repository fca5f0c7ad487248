"""Configurations, and the layout of shared memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_core.store_rows import ROUND_ROWS
from numba_tconv.kernels.common.tensor_core.store_runs import keeps_runs
from numba_tconv.kernels.common.tensor_core.tile import (
    COLUMNS,
    WINDOW_LIMIT,
    Tile,
    at_any_length,
    make_tile,
    round_sizes,
)
from numba_tconv.runtime.device import H200

CONSUMERS, PRODUCERS = 2, 4  # warpgroups; warps
STORE_WARPS = 4
THREADS = CONSUMERS * 128 + PRODUCERS * 32
# A consumer thread's and a producer thread's; on average at most the launch's 168.
REGISTERS = 216, 72
BLOCKS = 2  # of 64 columns
WIDEST = 2 * COLUMNS
SHARED_PER_BLOCK = H200.shared_per_block  # of compute capability 9.0
MOST_STAGES = 12
FEWEST_STAGES = 4
ROW_CHOICES = 128, 96, 80, 64  # most rows of a tile
# Padding may multiply a sample's columns by this, so that samples share no window (filled by vectors; by elements).
MOST_PADDING, MOST_PADDING_OF_ELEMENTS = 3, 4
# Below, a deeper ring beats a second staging buffer.
SHALLOW_RING = 7
FEWEST_TAPS_AHEAD, WIDEST_SPLIT_AHEAD = 4, 16  # taps; columns
LARGEST_STAGING = 24 * 1024  # bytes of a buffer, if rounds can be smaller
LANE_OPERANDS = 48  # registers of two depths, beside 128 sums
LANE_OPERANDS_BY_PHASES = 24  # without staging


@dataclass(frozen=True)
class Config:
    tile: Tile
    resident: bool  # weights stay in shared memory
    weights: int  # bytes, if resident
    stages: int
    unroll: int  # depths in registers
    # Staging: 2 (one a warpgroup), 1 (shared by turns), 0 (epilogue/by_phases.py).
    buffers: int
    bulk_channels: int = 0  # a bulk copy's, or 0
    round_buffers: int = 1  # of a staging buffer (epilogue/rows.py)
    joined: bool = False  # samples lie end to end (input.py)
    depths: int = 1  # of a stage: 1 or ``unroll``
    splits: int = 1
    tail: bool = False  # tail.py computes last columns
    unpacked: bool = False  # producers order weights (unpacked.py)

    @property
    def compiled(self) -> "Config":
        """What k6's kernel depends on."""
        return replace(self, splits=1, tail=False)

    @property
    def paired(self) -> bool:
        """Cooperative, not ping-pong (kernel.py)."""
        return not self.resident or self.tile.operand_halves == 2

    @property
    def split_ahead(self) -> bool:
        """Producers split operands (split_ahead.py)."""
        tile = self.tile
        return tile.operand_halves == 2 and (
            tile.tap_chunk >= FEWEST_TAPS_AHEAD or 4 + tile.halo > WINDOW_LIMIT["tf32x3"]
        )

    @property
    def makes_ready(self) -> bool:
        """Producers work on a stage that has arrived."""
        return self.split_ahead or self.unpacked

    @property
    def regions(self) -> int:
        """Windows in a stage."""
        return CONSUMERS if self.paired else 1

    @property
    def depth(self) -> int:
        """Channels of a stage."""
        return self.depths * self.tile.depth

    @property
    def stage_weights(self) -> int:
        return self.depths * self.tile.depth_weights

    @property
    def width(self) -> int:
        """Columns of a window."""
        return self.tile.lead + COLUMNS

    @property
    def pitch(self) -> int:
        """Elements between channels of aligned windows, against bank conflicts."""
        return next(p for p in range(self.width, self.width + 32) if p % 32 in (8, 24))

    def region(self, pitch: int) -> int:
        """Bytes of a window, a multiple of 128; ``pitch``: bytes between channels."""
        return -(-self.depth * pitch // 128) * 128

    def stage_bytes_of(self, region: int) -> int:
        """Bytes of a stage; ``region``: of a window."""
        return self.regions * region + (0 if self.resident else self.stage_weights * (1 + self.unpacked))

    @property
    def stage_bytes(self) -> int:
        return self.stage_bytes_of(self.region(self.pitch * self.tile.itemsize))

    @property
    def bulk_pitch(self) -> int:
        """Elements between bulk runs, against bank conflicts."""
        vector = 16 // self.tile.out_dtype.itemsize
        run = COLUMNS * self.tile.span + self.tile.spread * (self.tile.phases - 1) + vector - 1
        return (-(-run // vector) + 1) * vector

    @property
    def by_lanes(self) -> bool:
        """Stored by epilogue/vectors.py."""
        return self.bulk_channels > 0 and self.tile.span == 1

    @property
    def by_rows(self) -> bool:
        """Stored by epilogue/rows.py."""
        tile = self.tile
        rounds = tile.whole and tile.span == 1 and tile.round_channels == ROUND_ROWS
        return rounds and self.buffers > 0 and not self.bulk_channels and tile.out_dtype.itemsize == 4

    @property
    def spreads(self) -> bool:
        """Runs leave during the next tile."""
        return self.paired and 0 < self.bulk_channels == self.tile.channels and not self.by_lanes

    @property
    def bulk_runs(self) -> int:
        return -(-self.tile.rows * self.bulk_channels // (self.tile.channels * self.tile.phases))

    @property
    def buffer_bytes(self) -> int:
        vector = 16 // self.tile.out_dtype.itemsize
        return -(-self.bulk_runs * (self.bulk_pitch + vector - 1) // vector) * 16

    @property
    def own_staging(self) -> int:
        """Bytes between warpgroups' stagings, or 0; any tile must fit."""
        if self.bulk_channels:
            return max(self.buffer_bytes, self.tile.staging * 4)
        return self.staging_buffer if self.buffers > 1 else 0

    @property
    def staging_buffer(self) -> int:
        """Bytes of a buffer, unless in bulk."""
        return self.round_buffers * self.round_bytes if self.by_rows else self.tile.staging * 4

    @property
    def round_bytes(self) -> int:
        """Bytes of a round, and reads beyond."""
        return self.tile.staging * 4 + 16

    @property
    def bias_bytes(self) -> int:
        """Bytes of a warpgroup's staged biases."""
        runs = self.bulk_runs * (self.tile.channels // self.bulk_channels) if self.bulk_channels else 0
        return -(-runs * 4 // 16) * 16

    @property
    def staging_bytes(self) -> int:
        return CONSUMERS * self.own_staging or (self.staging_buffer if self.buffers else 0)

    @property
    def biases_at(self) -> int:
        return self.staging + self.staging_bytes

    # Byte offsets, in order.

    @property
    def ring(self) -> int:
        return self.weights

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def staging(self) -> int:
        return self.ring + self.ring_bytes

    @property
    def barriers(self) -> int:
        return self.biases_at + CONSUMERS * self.bias_bytes

    @property
    def ready(self) -> int:
        """If ``makes_ready``: an mbarrier and 8 bytes of inverse scales a stage."""
        return self.barriers + 8 * (2 * self.stages + 1 + 2 * CONSUMERS)

    @property
    def map(self) -> int:
        """The tensor map, behind mbarriers: two a stage, one for weights, two a warpgroup."""
        return -(-(self.ready + 16 * self.stages * self.makes_ready) // 128) * 128

    @property
    def shared_bytes(self) -> int:
        return self.map + 128


def unroll_of(problem: Problem, tile: Tile, splits: int) -> int:
    """Depths of operands in registers: 2 if they fit and none lies in the next group.

    The next of ``splits`` parts may be read: its weights are zeros."""
    if problem.groups > splits and problem.in_channels_per_group % (2 * tile.depth):
        return 1
    operands = 2 * (4 + tile.halo)
    spare = (LANE_OPERANDS_BY_PHASES if tile.by_phases else LANE_OPERANDS) + 128 - tile.rows
    return 2 if tile.operand_halves == 1 and 2 * operands <= spare else 1


def last_column(problem: Problem) -> int:
    """A sample's last column with outputs."""
    return (problem.padding + problem.out_length - 1) // problem.stride


def tail_column(problem: Problem, config: Config) -> int | None:
    """A sample's lone column beyond whole tiles, if tail.py can compute it."""
    tile, last = config.tile, last_column(problem)
    if not tile.whole or tile.overlap or tile.has_gaps or tile.several_chunks or tile.wide_outputs:
        return None
    alone = last > 0 and last % tile.advance == 0 and problem.dilation == 1  # columns begin at 0
    return last if alone else None


def sample_columns(problem: Problem, config: Config) -> tuple[int, int]:
    """A sample's first column and columns, whole tiles if padding permits."""
    tile = config.tile
    first, needed = tile.columns(problem)
    if config.joined:
        return first, needed
    if config.tail:
        return first, tail_column(problem, config)
    whole = -(-(last_column(problem) + 1 - first) // tile.advance) * tile.advance
    in_vectors = problem.length * tile.itemsize % 16 == 0
    in_boxes = problem.groups == 1 or problem.in_channels_per_group % config.depth == 0
    most = MOST_PADDING if in_vectors or not in_boxes else MOST_PADDING_OF_ELEMENTS
    # No sample follows the last, so its padding costs nothing.
    return first, whole if problem.batch == 1 or whole <= most * needed else needed


def column_tiles(problem: Problem, config: Config) -> int:
    """Tiles of columns, without the last sample's padding."""
    columns, needed = sample_columns(problem, config)[1], config.tile.columns(problem)[1]
    return config.tile.tiles_along((problem.batch - 1) * columns + min(columns, needed))


def channel_chunks(problem: Problem, config: Config) -> int:
    """Depths of a tap chunk, a multiple of ``unroll``."""
    return -(-config.tile.channel_chunks(problem) // config.unroll) * config.unroll


def configs(problem: Problem, precision: str, wide_outputs: bool = False, splits: int = 1) -> tuple[Config, ...]:
    """Configurations for any batch and length; weights are resident if they fit.

    ``wide_outputs``: float32. ``splits``: parts of ``problem`` (split_sums.split)."""
    found = _configs(at_any_length(problem), precision, wide_outputs, splits)
    tails = (replace(config, tail=True) for config in found if tail_column(problem, config) is not None)
    return (*found, *tails)


@lru_cache(maxsize=1024)
def _configs(problem: Problem, precision: str, wide_outputs: bool, splits: int = 1) -> tuple[Config, ...]:
    found = []
    for rows in ROW_CHOICES:
        # Split operands have two sets of sums.
        split = precision == "tf32x3"
        tile = make_tile(problem, precision, rows // 2 if split else rows, WIDEST_SPLIT_AHEAD if split else None)
        if tile is None:
            continue
        if wide_outputs and tile.itemsize == 2:
            tile = replace(tile, wide_outputs=True)
        unroll = unroll_of(problem, tile, splits)
        chunks = -(-tile.channel_chunks(problem) // unroll) * unroll
        weights = tile.tap_chunks(problem) * chunks * tile.depth_weights
        for resident in (True, False):
            base = Config(tile, resident, weights if resident else 0, 0, unroll, 0)
            fitting = [fit for config in stagings(base) if (fit := deepest(config))]
            found += (with_deep_stages(problem, config) for config in fitting)
            if fitting and not tile.by_phases:
                break
    return tuple(replace(config, splits=splits) for config in dict.fromkeys(found))


def deepest(config: Config) -> Config | None:
    rings = (replace(config, stages=stages) for stages in range(MOST_STAGES, FEWEST_STAGES - 1, -1))
    return next((ring for ring in rings if ring.shared_bytes <= SHARED_PER_BLOCK), None)


def with_deep_stages(problem: Problem, config: Config) -> Config:
    """Stages of ``unroll`` depths, for fewer copies, if the ring is deepest and no stage spans groups."""
    unroll, own = config.unroll, problem.in_channels_per_group
    of_one_group = problem.groups == 1 or own % (unroll * config.tile.depth) == 0
    if config.stages < MOST_STAGES or not of_one_group:
        return config
    return replace(config, stages=MOST_STAGES // unroll, depths=unroll)


def stagings(config: Config) -> Iterator[Config]:
    """Ways to stage: in bulk, for warps' stores, or not (parts of the phases); runs aligned or not."""
    tile = config.tile
    if tile.by_phases:
        yield from (replace(config, buffers=0, joined=joined) for joined in (False, True))
        return
    if tile.whole and tile.operand_halves == 1 and (tile.phases == 1 or not tile.has_gaps):
        for channels in round_sizes(tile):
            if 2 * channels >= tile.channels:
                bulk = replace(config, tile=_largest_rounds(tile, 0), buffers=1, bulk_channels=channels)
                staged = _largest_rounds(tile, bulk.buffer_bytes)
                yield from (replace(bulk, tile=replace(staged, aligned=aligned)) for aligned in (True, False))
    for aligned in (True, False) if tile.may_be_unaligned else (True,):
        base = replace(config, tile=replace(tile, aligned=aligned))
        own, passed_on = _runs(base, 2), _runs(base, 1)
        own_fit, passed_on_fit = deepest(own), deepest(passed_on)
        shallow = own_fit and own.by_rows and not own.paired and own_fit.stages < SHALLOW_RING
        deeper = shallow and passed_on_fit.stages > own_fit.stages
        yield own if own_fit and not deeper else passed_on


def _runs(config: Config, buffers: int) -> Config:
    """The largest rounds with runs in registers, else the smallest; two buffers if the ring stays as deep."""
    for channels in round_sizes(config.tile):
        staged = replace(config.tile, round_channels=channels)
        if staged.staging * 4 <= LARGEST_STAGING and keeps_runs(staged, STORE_WARPS):
            break
    runs = replace(config, tile=staged, buffers=buffers)
    if not runs.by_rows:
        return runs
    twice = replace(runs, round_buffers=2)
    once_fits, twice_fits = deepest(runs), deepest(twice)
    return twice if once_fits and twice_fits and once_fits.stages == twice_fits.stages else runs


def _largest_rounds(tile: Tile, staging: int) -> Tile:
    """The most channels a round in ``staging`` bytes, or the fewest."""
    tiles = [replace(tile, round_channels=channels) for channels in round_sizes(tile)]
    return next((staged for staged in tiles if staged.staging * 4 <= staging), tiles[-1])
