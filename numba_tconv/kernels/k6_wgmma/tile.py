"""Configurations of k6: what a block holds in shared memory, and which configuration a problem gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_core.store_rows import ROUND_ROWS
from numba_tconv.kernels.common.tensor_core.store_runs import keeps_runs
from numba_tconv.kernels.common.tensor_core.tile import ANY_LENGTH, COLUMNS, WINDOW_LIMIT, Tile, make_tile, round_sizes
from numba_tconv.runtime.device import H200

CONSUMERS, PRODUCERS = 2, 4  # warpgroups that multiply; warps that copy
STORE_WARPS = 4  # of a warpgroup, which store together
THREADS = CONSUMERS * 128 + PRODUCERS * 32
# Of a thread that multiplies, and of one that copies, so many that neither spills; all threads start with 168, and the
# sum stays.
REGISTERS = 216, 72
BLOCKS = 2  # of 64 columns, in a tile
WIDEST = 2 * COLUMNS  # columns of a window, at most
SHARED_PER_BLOCK = H200.shared_per_block  # bytes; the rung runs on this compute capability only
MOST_STAGES = 12
FEWEST_STAGES = 4
ROW_CHOICES = 128, 96, 80, 64  # of a tile, at most
# Columns of a sample, over those that it needs, that cost less than windows shared by samples, which are filled in
# vectors of 16 bytes or, where a sample ends within one, by elements (producer.py). Of hifigan_u1's 16 samples 44
# positions take 0.059 ms in TF32 in vectors, 43 in whole tiles 0.035; in bfloat16 43 take 0.110 or more by elements,
# 0.027 in whole tiles (H200, a script; no recorded rows).
MOST_PADDING, MOST_PADDING_OF_ELEMENTS = 3, 4
# Stages, with fewer of which a ring is worth a warpgroup's own buffer for rounds: on kb64 seven stages and a buffer
# that is passed on take 2 or 3% less than six and one for each (H200, a script; no recorded rows).
SHALLOW_RING = 7
# Taps with which split operands are split ahead, and columns of a window that lanes have registers for then. Kb74's
# five taps, which share one window of 16 columns so, take 0.58 ms, and 0.84 as chunks of three whose lanes split their
# windows of 12; waveglow's four 0.094 and 0.098. Fewer take longer: kb64 with its three taps took 2.53 ms instead of
# 2.30, hifigan_u1 with two 0.284 instead of 0.230 (H200, a script; no recorded rows).
FEWEST_TAPS_AHEAD, WIDEST_SPLIT_AHEAD = 4, 16
LARGEST_STAGING = 24 * 1024  # bytes of one buffer, where smaller rounds are possible
LANE_OPERANDS = 48  # registers for the operands of two stages, beside 128 accumulators
LANE_OPERANDS_OF_PARTS = 24  # the same where the sums are stored from their registers, and for more than two taps


@dataclass(frozen=True)
class Config:
    tile: Tile
    resident: bool  # all weights of the row tile stay in shared memory
    weights: int  # bytes of them
    stages: int
    unroll: int  # products' depths whose operands are in registers at a time
    # Staging buffers: one for each warpgroup, or one that they pass to each other; in bulk, of each one. None where the
    # sums leave straight from their registers (epilogue/part.py).
    buffers: int
    bulk_channels: int = 0  # output channels that a warpgroup hands to the copy engine together (bulk.py); 0: none
    round_buffers: int = 1  # of each of these, where rows leave in rounds (epilogue/rows.py)
    joined: bool = False  # the samples are laid end to end beforehand (input.py)
    depths: int = 1  # products' depths of a stage: one, or all that are unrolled
    splits: int = 1  # parts of the input channels, whose sums another kernel adds up (kernels/common/channel_parts.py)
    early_sums: ClassVar[bool] = True  # that kernel is launched early (Kernel.prepare)
    tail: bool = False  # a sample's last column, one more than whole tiles have, is computed apart (tail.py)

    @property
    def compiled(self) -> Config:
        """What the kernel is compiled for: it knows nothing of what other kernels do."""
        return replace(self, splits=1, tail=False)

    @property
    def paired(self) -> bool:
        """The warpgroups compute neighbouring tiles from the same stages; otherwise they take tiles in turn."""
        return not self.resident or self.tile.parts == 2

    @property
    def split_ahead(self) -> bool:
        """Operands are split by the warps that copy, not by those that multiply."""
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

    # A window as the copy engine fetches it (boxes.py), for rows of x that begin at multiples of 16 bytes.

    @property
    def pitch(self) -> int:
        """Elements from one channel to the next: 8 or 24 modulo 32, so that the four channels that a quarter-warp reads
        lie in different banks."""
        return next(p for p in range(self.width, self.width + 32) if p % 32 in (8, 24))

    def region(self, pitch: int) -> int:
        """Bytes of a window, a multiple of 128, of rows of ``pitch`` bytes."""
        return -(-self.depth * pitch // 128) * 128

    def slot_of(self, region: int) -> int:
        """Bytes of a stage, of windows of ``region`` bytes."""
        return self.regions * region + (0 if self.resident else self.stage_weights)

    @property
    def slot(self) -> int:
        return self.slot_of(self.region(self.pitch * self.tile.itemsize))

    # The staging of a warpgroup, if its outputs leave in bulk.

    @property
    def bulk_pitch(self) -> int:
        """Elements from one channel's run to the next, a multiple of 16 bytes; less than that is added
        (epilogue/bulk.py). A vector more than a run needs that is moved by less than one, so that runs begin in other
        banks."""
        vector = 16 // self.tile.out_dtype.itemsize
        run = COLUMNS * self.tile.span + self.tile.spread * (self.tile.phases - 1) + vector - 1
        return (-(-run // vector) + 1) * vector

    @property
    def by_lanes(self) -> bool:
        """What is staged for the copy engine is written by the warps' lanes: where a tile has a run for each row."""
        return self.bulk_channels > 0 and self.tile.span == 1

    @property
    def by_rows(self) -> bool:
        """The rows of a tile leave eight at a time, by the warps' stores (epilogue/rows.py)."""
        tile = self.tile
        rounds = tile.whole and tile.span == 1 and tile.round_channels == ROUND_ROWS
        return rounds and self.buffers > 0 and not self.bulk_channels and tile.out_dtype.itemsize == 4

    @property
    def spreads(self) -> bool:
        """The runs of a tile leave one after another, while the next tile's products run."""
        return self.paired and 0 < self.bulk_channels == self.tile.channels and not self.by_lanes

    @property
    def bulk_runs(self) -> int:
        """Runs in a buffer: those of the channels, and of what fills up the last core matrix."""
        return -(-self.tile.rows * self.bulk_channels // (self.tile.channels * self.tile.phases))

    @property
    def buffer_bytes(self) -> int:
        vector = 16 // self.tile.out_dtype.itemsize
        return -(-self.bulk_runs * (self.bulk_pitch + vector - 1) // vector) * 16

    @property
    def own_staging(self) -> int:
        """Bytes from one warpgroup's staging to the next: none if they pass one buffer to each other. In bulk, that of
        tiles that several samples share (kernels/common/tensor_core/store_any.py) lies in the same place."""
        if self.bulk_channels:
            return max(self.buffers * self.buffer_bytes, self.tile.staging * 4)
        return self.staging_buffer if self.buffers > 1 else 0

    @property
    def staging_buffer(self) -> int:
        """Bytes that a warpgroup stages in, where its outputs do not leave in bulk."""
        return self.round_buffers * self.round_bytes if self.by_rows else self.tile.staging * 4

    @property
    def round_bytes(self) -> int:
        """Of the buffer of a round, where rows leave in rounds. Beyond its last row lanes read, by less than a vector,
        what they do not write."""
        return self.tile.staging * 4 + 16

    @property
    def extras(self) -> int:
        """Bytes of a warpgroup's biases."""
        runs = self.bulk_runs * (self.tile.channels // self.bulk_channels) if self.bulk_channels else 0
        return -(-runs * 4 // 16) * 16

    @property
    def staging_bytes(self) -> int:
        """Of the block."""
        return CONSUMERS * self.own_staging or (self.staging_buffer if self.buffers else 0)

    @property
    def extras_at(self) -> int:
        return self.staging + self.staging_bytes

    # Where things lie in shared memory, in bytes: resident weights, ring, staging buffers, biases, mbarriers, a tensor
    # map.

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
        """Of operands that are split ahead: an mbarrier that says split for each stage; then, for each, what the sums
        of each of its windows are multiplied by (split_ahead.py)."""
        return self.barriers + 8 * (2 * self.stages + 1 + 2 * CONSUMERS)

    @property
    def map(self) -> int:
        """Behind the mbarriers: one that says full and one that says empty for each stage, one for the resident
        weights, and two for each warpgroup's turns; and behind what ``ready`` says."""
        return -(-(self.ready + 16 * self.stages * self.split_ahead) // 128) * 128

    @property
    def shared_bytes(self) -> int:
        return self.map + 128


def unroll_of(problem: Problem, tile: Tile, splits: int) -> int:
    """Depths whose operands are held: two, so that a window is loaded while products run, if the registers suffice.

    Not where one of two would lie beyond the channels of its group: the copy engine would bring the next group's. The
    next of ``splits`` parts of the same group it may bring: the weights there are zeros.
    """
    if problem.groups > splits and problem.in_channels_per_group % (2 * tile.depth):
        return 1
    operands = 2 * (4 + tile.halo)
    spare = (LANE_OPERANDS_OF_PARTS if tile.part else LANE_OPERANDS) + 128 - tile.rows
    return 2 if tile.parts == 1 and 2 * operands <= spare else 1


def last_column(problem: Problem) -> int:
    """The last one that has outputs."""
    return (problem.padding + problem.out_length - 1) // problem.stride


def tail_column(problem: Problem, config: Config) -> int | None:
    """The one column of a sample that is left over where the others fill whole tiles and each tile computes its own
    alone, of shapes that tail.py computes; None where there is none."""
    tile, last = config.tile, last_column(problem)
    if not tile.whole or tile.overlap or tile.empty_slots or tile.several_chunks or tile.wide_outputs:
        return None
    between = last - tile.columns(problem)[0]
    alone = between > 0 and between % tile.advance == 0 and problem.dilation == 1
    return last if alone else None


def sample_columns(problem: Problem, config: Config) -> tuple[int, int]:
    """First column, and columns a sample: as many as whole tiles have, if that is not too many more. Then no tile is
    shared by two samples, and each window is of one sample alone."""
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
    """Tiles along the columns: none for what the last sample is padded with."""
    columns, needed = sample_columns(problem, config)[1], config.tile.columns(problem)[1]
    return config.tile.tiles_along((problem.batch - 1) * columns + min(columns, needed))


def channel_chunks(problem: Problem, config: Config) -> int:
    """Stages a tap chunk: whole turns of the unrolled loop; the channels beyond the last are zeros."""
    return -(-config.tile.channel_chunks(problem) // config.unroll) * config.unroll


def configs(problem: Problem, precision: str, wide_outputs: bool = False, splits: int = 1) -> tuple[Config, ...]:
    """The configurations that a problem may have: tiles of several heights, weights resident if they fit (of a long
    stride, which may have more tiles of rows than there are multiprocessors, also streamed), and ways to stage the
    outputs. What is compiled depends on neither batch nor length. ``wide_outputs``: they are float32 in any case.
    ``splits``: parts of a group's channels, which are groups of ``problem`` (channel_parts.split)."""
    found = _configs(replace(problem, batch=1, length=ANY_LENGTH), precision, wide_outputs, splits)
    tails = (replace(config, tail=True) for config in found if tail_column(problem, config) is not None)
    return (*found, *tails)


@lru_cache(maxsize=1024)
def _configs(problem: Problem, precision: str, wide_outputs: bool, splits: int = 1) -> tuple[Config, ...]:
    found = []
    for rows in ROW_CHOICES:
        # Split operands need a second set of sums (mainloop.py), and half the rows leave registers for it.
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
    """The configuration with the deepest ring that fits; None if none does."""
    rings = (replace(config, stages=stages) for stages in range(MOST_STAGES, FEWEST_STAGES - 1, -1))
    return next((ring for ring in rings if ring.shared_bytes <= SHARED_PER_BLOCK), None)


def with_deep_stages(problem: Problem, config: Config) -> Config:
    """The configuration with stages of all depths that are unrolled, where that is better and a stage is of one group.

    A depth then costs half as much to copy and to wait for, but half as many stages are left. Where the ring holds the
    most, the patch takes 8% less in TF32, dac_u4 and hifigan_u2 in bfloat16 3%, hifigan_u4 in TF32 2% more (rows of two
    runs). Where it does not, dac_u2 in bfloat16 took 5% more and encodec_u2 in TF32 7% (a script; no recorded rows).
    """
    unroll, own = config.unroll, problem.in_channels_per_group
    of_one_group = problem.groups == 1 or own % (unroll * config.tile.depth) == 0
    if config.stages < MOST_STAGES or not of_one_group:
        return config
    return replace(config, stages=MOST_STAGES // unroll, depths=unroll)


def stagings(config: Config) -> Iterator[Config]:
    """Ways to stage the outputs: in bulk, all channels of a tile or half of them at a time; and by
    kernels/common/tensor_core/store_runs.py, in the largest rounds, with a buffer for each warpgroup or, where that
    does not fit or leaves the ring shallow, one for both; with columns that are computed twice, so that runs begin on
    sectors, and without. Those of a part of the phases are not staged."""
    tile = config.tile
    if tile.part:
        yield from (replace(config, buffers=0, joined=joined) for joined in (False, True))
        return
    # With split operands, whose sums take all registers, staging in bulk was slower wherever it was tried: by 6 to 19%
    # on seven workloads (H200, against older rows; no recorded rows of its own).
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
    """The configuration that stages in the largest rounds that keep their runs in registers, or in the smallest; with
    two buffers for rounds of rows, unless the ring were shallower for it."""
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
    """The tile with as many channels staged together as ``staging`` bytes hold, or as few as possible."""
    tiles = [replace(tile, round_channels=channels) for channels in round_sizes(tile)]
    return next((staged for staged in tiles if staged.staging * 4 <= staging), tiles[-1])
