"""Configurations of k6: a block's tile, ring and staging, and the layout of its shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_core.store_rows import ROUND_ROWS
from numba_tconv.kernels.common.tensor_core.store_runs import keeps_runs
from numba_tconv.kernels.common.tensor_core.tile import ANY_LENGTH, COLUMNS, WINDOW_LIMIT, Tile, make_tile, round_sizes
from numba_tconv.runtime.device import H200

CONSUMERS, PRODUCERS = 2, 4  # warpgroups; warps
STORE_WARPS = 4  # a warpgroup's
THREADS = CONSUMERS * 128 + PRODUCERS * 32
# A consumer's and a producer's thread, without spills; all start with 168, and the block's sum must not grow.
REGISTERS = 216, 72
BLOCKS = 2  # of 64 columns, in a tile
WIDEST = 2 * COLUMNS  # columns of a window, at most
SHARED_PER_BLOCK = H200.shared_per_block  # bytes; k6 needs compute capability 9.0
MOST_STAGES = 12
FEWEST_STAGES = 4
ROW_CHOICES = 128, 96, 80, 64  # of a tile, at most
# A sample may be padded to so many times its columns, to avoid windows shared by samples. Shared windows are filled in
# vectors of 16 bytes or, where samples end within one, by elements.
MOST_PADDING, MOST_PADDING_OF_ELEMENTS = 3, 4
# With fewer stages, a deeper ring is worth more than a second staging buffer.
SHALLOW_RING = 7
# The least taps with which operands are split ahead, and the columns that a window may have then.
FEWEST_TAPS_AHEAD, WIDEST_SPLIT_AHEAD = 4, 16
LARGEST_STAGING = 24 * 1024  # bytes of one buffer, where smaller rounds are possible
LANE_OPERANDS = 48  # registers of two depths, beside 128 accumulators
LANE_OPERANDS_OF_PARTS = 24  # the same where sums are stored straight from registers


@dataclass(frozen=True)
class Config:
    tile: Tile
    resident: bool  # the row tile's weights stay in shared memory
    weights: int  # bytes of them
    stages: int
    unroll: int  # product depths in registers at a time
    # Staging buffers: 2 (one a warpgroup), 1 (shared by turns) or 0 (epilogue/part.py); in bulk, of each warpgroup.
    buffers: int
    bulk_channels: int = 0  # output channels handed to the copy engine together (bulk.py), or 0
    round_buffers: int = 1  # buffers in each, for rows in rounds (epilogue/rows.py)
    joined: bool = False  # samples are laid end to end first (input.py)
    depths: int = 1  # product depths of a stage: 1 or ``unroll``
    splits: int = 1  # split-K: parts of the input channels (kernels/common/split_sums.py)
    tail: bool = False  # the last column of every sample is left to tail.py

    @property
    def compiled(self) -> Config:
        """The part of the configuration that k6's kernel depends on."""
        return replace(self, splits=1, tail=False)

    @property
    def paired(self) -> bool:
        """The warpgroups compute neighbouring tiles from the same stages, not alternate tiles."""
        return not self.resident or self.tile.parts == 2

    @property
    def split_ahead(self) -> bool:
        """Producers, not consumers, split the operands of tf32x3."""
        tile = self.tile
        return tile.parts == 2 and (tile.tap_chunk >= FEWEST_TAPS_AHEAD or 4 + tile.halo > WINDOW_LIMIT["tf32x3"])

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
        """Bytes of packed weights of a stage."""
        return self.depths * self.tile.depth_weights

    @property
    def width(self) -> int:
        """Columns of a window."""
        return self.tile.lead + COLUMNS

    # A window in a box (boxes.py), for rows of x that begin at multiples of 16 bytes.

    @property
    def pitch(self) -> int:
        """Elements from channel to channel: 8 or 24 modulo 32, so that four channels lie in different banks."""
        return next(p for p in range(self.width, self.width + 32) if p % 32 in (8, 24))

    def region(self, pitch: int) -> int:
        """Bytes of a window, a multiple of 128; ``pitch``: bytes from one channel to the next."""
        return -(-self.depth * pitch // 128) * 128

    def slot_of(self, region: int) -> int:
        """Bytes of a stage; ``region``: bytes of a window."""
        return self.regions * region + (0 if self.resident else self.stage_weights)

    @property
    def slot(self) -> int:
        return self.slot_of(self.region(self.pitch * self.tile.itemsize))

    # Staging of a warpgroup for bulk stores.

    @property
    def bulk_pitch(self) -> int:
        """Elements from run to run, a multiple of 16 bytes; the kernel adds less than that (epilogue/bulk.py).

        The spare vector lets runs begin in different banks.
        """
        vector = 16 // self.tile.out_dtype.itemsize
        run = COLUMNS * self.tile.span + self.tile.spread * (self.tile.phases - 1) + vector - 1
        return (-(-run // vector) + 1) * vector

    @property
    def by_lanes(self) -> bool:
        """Lanes write the bulk runs, because each row of the tile is one (epilogue/vectors.py)."""
        return self.bulk_channels > 0 and self.tile.span == 1

    @property
    def by_rows(self) -> bool:
        """The warps store a tile eight rows at a time (epilogue/rows.py)."""
        tile = self.tile
        rounds = tile.whole and tile.span == 1 and tile.round_channels == ROUND_ROWS
        return rounds and self.buffers > 0 and not self.bulk_channels and tile.out_dtype.itemsize == 4

    @property
    def spreads(self) -> bool:
        """A tile's runs leave one after another during the next tile's products."""
        return self.paired and 0 < self.bulk_channels == self.tile.channels and not self.by_lanes

    @property
    def bulk_runs(self) -> int:
        """Runs in a buffer, with those that fill the last core matrix."""
        return -(-self.tile.rows * self.bulk_channels // (self.tile.channels * self.tile.phases))

    @property
    def buffer_bytes(self) -> int:
        vector = 16 // self.tile.out_dtype.itemsize
        return -(-self.bulk_runs * (self.bulk_pitch + vector - 1) // vector) * 16

    @property
    def own_staging(self) -> int:
        """Bytes from one warpgroup's staging to the next; 0 if they share a buffer.

        In bulk, it also holds tiles that samples share (kernels/common/tensor_core/store_any.py).
        """
        if self.bulk_channels:
            return max(self.buffers * self.buffer_bytes, self.tile.staging * 4)
        return self.staging_buffer if self.buffers > 1 else 0

    @property
    def staging_buffer(self) -> int:
        """Bytes of a staging buffer, unless outputs leave in bulk."""
        return self.round_buffers * self.round_bytes if self.by_rows else self.tile.staging * 4

    @property
    def round_bytes(self) -> int:
        """Bytes of a round's buffer; lanes read up to a vector beyond its last row."""
        return self.tile.staging * 4 + 16

    @property
    def extras(self) -> int:
        """Bytes of a warpgroup's staged biases."""
        runs = self.bulk_runs * (self.tile.channels // self.bulk_channels) if self.bulk_channels else 0
        return -(-runs * 4 // 16) * 16

    @property
    def staging_bytes(self) -> int:
        """Bytes of the block's staging."""
        return CONSUMERS * self.own_staging or (self.staging_buffer if self.buffers else 0)

    @property
    def extras_at(self) -> int:
        return self.staging + self.staging_bytes

    # Offsets in shared memory, in bytes: resident weights, ring, staging, biases, mbarriers, a tensor map.

    @property
    def ring(self) -> int:
        return self.weights

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.slot

    @property
    def staging(self) -> int:
        return self.ring + self.ring_bytes

    @property
    def barriers(self) -> int:
        return self.extras_at + CONSUMERS * self.extras

    @property
    def ready(self) -> int:
        """Offset for operands split ahead: one mbarrier a stage, then 8 bytes of inverse scales a stage
        (split_ahead.py).
        """
        return self.barriers + 8 * (2 * self.stages + 1 + 2 * CONSUMERS)

    @property
    def map(self) -> int:
        """Offset of the tensor map.

        Before ``ready`` lie a full and an empty mbarrier for each stage, one for resident weights, and two turns for
        each warpgroup.
        """
        return -(-(self.ready + 16 * self.stages * self.split_ahead) // 128) * 128

    @property
    def shared_bytes(self) -> int:
        return self.map + 128


def unroll_of(problem: Problem, tile: Tile, splits: int) -> int:
    """Return the depths of operands that a lane holds: 2, to load during products, if the registers suffice.

    It is 1 where the second depth could lie in the next group. The next of ``splits`` parts may be read: its weights
    are zeros.
    """
    if problem.groups > splits and problem.in_channels_per_group % (2 * tile.depth):
        return 1
    operands = 2 * (4 + tile.halo)
    spare = (LANE_OPERANDS_OF_PARTS if tile.part else LANE_OPERANDS) + 128 - tile.rows
    return 2 if tile.parts == 1 and 2 * operands <= spare else 1


def last_column(problem: Problem) -> int:
    """Return the last column of a sample that has outputs."""
    return (problem.padding + problem.out_length - 1) // problem.stride


def tail_column(problem: Problem, config: Config) -> int | None:
    """Return a sample's single column beyond whole tiles, if tail.py can compute it; else None."""
    tile, last = config.tile, last_column(problem)
    if not tile.whole or tile.overlap or tile.empty_slots or tile.several_chunks or tile.wide_outputs:
        return None
    between = last - tile.columns(problem)[0]
    alone = between > 0 and between % tile.advance == 0 and problem.dilation == 1
    return last if alone else None


def sample_columns(problem: Problem, config: Config) -> tuple[int, int]:
    """Return a sample's first column and number of columns.

    If the padding is not too much, the columns are whole tiles, and samples share no tile and no window.
    """
    tile = config.tile
    first, needed = tile.columns(problem)
    if config.joined:
        return first, needed
    if config.tail:
        return first, tail_column(problem, config) - first
    whole = -(-(last_column(problem) + 1 - first) // tile.advance) * tile.advance
    in_vectors = problem.length * tile.itemsize % 16 == 0
    in_boxes = problem.groups == 1 or problem.in_channels_per_group % config.depth == 0
    most = MOST_PADDING if in_vectors or not in_boxes else MOST_PADDING_OF_ELEMENTS
    return first, whole if whole <= most * needed else needed


def column_tiles(problem: Problem, config: Config) -> int:
    """Return the tiles along the columns, without the last sample's padding."""
    columns, needed = sample_columns(problem, config)[1], config.tile.columns(problem)[1]
    return config.tile.tiles_along((problem.batch - 1) * columns + min(columns, needed))


def channel_chunks(problem: Problem, config: Config) -> int:
    """Return the depths of a tap chunk, a multiple of ``unroll``; missing channels are zeros."""
    return -(-config.tile.channel_chunks(problem) // config.unroll) * config.unroll


def configs(problem: Problem, precision: str, wide_outputs: bool = False, splits: int = 1) -> tuple[Config, ...]:
    """Return a problem's configurations: tile heights, stagings, weights resident if they fit, else streamed (parts:
    both).

    Batch and length do not change what is compiled. ``wide_outputs``: float32 outputs in any case. ``splits``: parts of
    a group's channels, which are groups of ``problem`` (split_sums.split).
    """
    found = _configs(replace(problem, batch=1, length=ANY_LENGTH), precision, wide_outputs, splits)
    tails = (replace(config, tail=True) for config in found if tail_column(problem, config) is not None)
    return (*found, *tails)


@lru_cache(maxsize=1024)
def _configs(problem: Problem, precision: str, wide_outputs: bool, splits: int = 1) -> tuple[Config, ...]:
    found = []
    for rows in ROW_CHOICES:
        # Split operands need a second set of sums (mainloop.py), so half the rows.
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
            if fitting and not tile.part:
                break
    return tuple(replace(config, splits=splits) for config in dict.fromkeys(found))


def deepest(config: Config) -> Config | None:
    """Return the configuration with the deepest ring that fits, or None."""
    rings = (replace(config, stages=stages) for stages in range(MOST_STAGES, FEWEST_STAGES - 1, -1))
    return next((ring for ring in rings if ring.shared_bytes <= SHARED_PER_BLOCK), None)


def with_deep_stages(problem: Problem, config: Config) -> Config:
    """Return the configuration with stages of ``unroll`` depths, if the ring is deepest and no stage spans groups.

    Deep stages halve a depth's cost to copy and wait for, but also the number of stages.
    """
    unroll, own = config.unroll, problem.in_channels_per_group
    of_one_group = problem.groups == 1 or own % (unroll * config.tile.depth) == 0
    if config.stages < MOST_STAGES or not of_one_group:
        return config
    return replace(config, stages=MOST_STAGES // unroll, depths=unroll)


def stagings(config: Config) -> Iterator[Config]:
    """Yield the ways to stage the outputs, with aligned runs and, where possible, without.

    * Bulk: all or half of a tile's channels at a time; not with split operands, whose sums take the registers.
    * Warps' stores in the largest rounds: two buffers, or one if two do not fit or leave the ring shallow.
    * A part of the phases: no staging, input joined or not (input.py).
    """
    tile = config.tile
    if tile.part:
        yield from (replace(config, buffers=0, joined=joined) for joined in (False, True))
        return
    if tile.whole and tile.parts == 1 and (tile.phases == 1 or not tile.empty_slots):
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
    """Return the configuration with the largest rounds that keep runs in registers, else the smallest.

    Rounds of rows get two buffers, if the ring stays as deep.
    """
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
    """Return the tile with the most channels a round that ``staging`` bytes hold, or the fewest possible."""
    tiles = [replace(tile, round_channels=channels) for channels in round_sizes(tile)]
    return next((staged for staged in tiles if staged.staging * 4 <= staging), tiles[-1])
