"""Tiles of grad_input_tile: configurations, the cost model, and the tile of a problem.

m counts rows (input channels of a group), n counts columns (positions of all samples, gradients/window.py), and the
depth counts pairs of an output channel and a phase. A block computes ``block_m x block_n`` sums from ``pairs`` pairs a
stage. A warp is ``lanes_m`` by ``32 / lanes_m`` threads; a thread holds ``thread_m x thread_n`` sums."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.input.parts import split
from numba_tconv.gradients.window import Window, columns, split_phases, split_taps
from numba_tconv.kernels.common.register_tile import WarpTile
from numba_tconv.kernels.common.sectors import ENTRY, entries_before
from numba_tconv.runtime.device import H200, RESERVED_SHARED, Device
from numba_tconv.runtime.elements import ELEMENTS

WINDOW_LIMIT = 20  # columns that a thread may hold in registers
UNROLL_LIMIT = 400  # multiply-adds of a pair, which are all unrolled
TURN = 512  # multiply-adds of a thread in a turn of the loop
MOST_PAIRS = 16  # of a stage
STAGE_BYTES = 18 * 1024  # most bytes of a stage of several pairs
STAGE_BYTES_ALONE = 32 * 1024  # where a thread has LARGE sums, and none is put aside
# In multiply-adds: a vector loaded, an element copied, a column located in memory, a stage's overhead.
SHARED_LOAD, COPY, FIND, STAGE = 3, 8, 60, 240
AIM = 3  # instructions, about, that read a column's place
ASIDE = 3  # cost of putting a sum aside
WARPS = 4  # warps at which a multiprocessor reaches half its speed; those of LARGE sums a thread count double
LARGE, FEWEST_LARGE = 128, 8  # sums of a thread; warps of such that take as long as fewer
ALONE = 40  # a guess: multiply-adds a sum while a lone block waits and stores
# Products, about, that a float32 sum takes before it is put aside, if few in all and if MANY: its error grows with its
# length.
PARTIAL_TERMS, PARTIAL_TERMS_OF_MANY, MANY = 128, 256, 512


@dataclass(frozen=True)
class Config(WarpTile):
    dtype: torch.dtype
    stride: int
    dilation: int
    tap_chunk: int  # taps of a row that share one window
    whole: bool  # every row has all taps of every chunk
    whole_channels: bool  # channels of a group fill whole stages
    phases: int  # of a stage
    channels: int  # of a stage
    block_m: int
    block_n: int
    thread_m: int
    thread_n: int
    lanes_m: int
    min_blocks: int  # blocks on a multiprocessor: the register budget
    partial: int = 0  # stages of one partial sum; 0: all
    stages: int = 2
    # In a stage of all phases and taps: the phases of tap_chunk taps, before those of one less; 0: none has less.
    long_phases: int = 0
    splits: int = 1  # parts of the output channels (few.py)
    early: bool = False  # kernels are launched before their predecessors end (Kernel.prepare)
    beside: bool = False  # the main kernel begins beside the packing one (few.py)

    @property
    def alone(self) -> Config:
        """The configuration that the main kernel is compiled for, without ``splits`` and ``beside``."""
        return replace(self, splits=1, beside=False)

    @property
    def early_sums(self) -> bool:
        """``early``, under the name that partial_sum.kernels_of reads."""
        return self.early

    @property
    def vector_m(self) -> int:
        """Neighbouring rows of a thread, whose weights one load may fetch."""
        return min(self.vector, self.thread_m)

    @property
    def pairs(self) -> int:
        """Pairs of a stage."""
        return self.phases * self.channels

    @property
    def pairs_a_turn(self) -> int:
        """Pairs in one turn of the loop: with several, loads of one overlap products of another."""
        products = self.tap_chunk * self.thread_m * self.thread_n
        return math.gcd(self.pairs, 4 if 4 * products <= TURN else 2)

    @property
    def short_a_turn(self) -> int:
        """Pairs with a tap less in one turn of the loop."""
        return math.gcd(self.phases - self.long_phases, 2)

    @property
    def halo(self) -> int:
        """Columns after the block that its taps reach, in whole vectors."""
        return -(-(self.tap_chunk - 1) * self.taps.step // self.vector) * self.vector

    @property
    def pitch(self) -> int:
        """Elements between two rows of a window: phases written together go to different banks."""
        width, banks = self.block_n + self.halo, 128 // self.itemsize
        start = 0 if self.phases == 1 else max(self.vector, banks // self.phases // self.vector * self.vector)
        return width + (start - width) % banks if start else width

    @property
    def window(self) -> Window:
        return Window(
            self.dtype,
            self.phases,
            self.channels,
            self.block_n + (self.tap_chunk - 1) * self.taps.step,
            self.pitch,
            self.threads,
            AIM,
            whole=self.whole_channels,
        )

    @property
    def table(self) -> int:
        """Columns of the window in all its phases, each of which is located once."""
        return self.window.width * self.phases

    @property
    def entries(self) -> int:
        """Entries of the table, enlarged so that copies of weights take whole sectors (kernels/common/sectors.py)."""
        return entries_before(self.table, self.g_stage * self.itemsize)

    @property
    def g_stage(self) -> int:
        """Elements of grad_output in one stage."""
        return self.pairs * self.pitch

    @property
    def channel_taps(self) -> int:
        """Taps of one channel in a stage, of all its phases."""
        short_phases = self.phases - self.long_phases if self.long_phases else 0
        return self.phases * self.tap_chunk - short_phases

    @property
    def w_stage(self) -> int:
        """Packed weights in one stage, in whole vectors."""
        return -(-self.channels * self.channel_taps * self.block_m // self.vector) * self.vector

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage."""
        return (self.g_stage + self.w_stage) * self.itemsize

    @property
    def partials(self) -> int:
        """Offset of the partial sums in shared memory, in elements: behind the stages."""
        return self.stages * (self.g_stage + self.w_stage)

    @property
    def result_pitch(self) -> int:
        """Row length of the staged result; one vector more than the tile, so that rows start in other banks."""
        return self.block_n + self.vector

    @property
    def shared_bytes(self) -> int:
        partials = self.thread_m * self.thread_n * self.threads if self.partial else 0
        return max(self.partials + partials, self.block_m * self.result_pitch) * self.itemsize

    def row_tiles(self, problem: Problem) -> int:
        """Blocks along the rows of one group."""
        return -(-problem.in_channels_per_group // self.block_m)

    def columns(self, problem: Problem) -> tuple[int, int]:
        """Columns between the starts of two samples, as tiles count and as windows count.

        Samples lie end to end, separated by columns that only windows read; or each begins a tile, where that takes
        fewer."""
        in_windows = columns(problem, self.tap_chunk)
        alone = -(-problem.length // self.block_n) * self.block_n
        end_to_end = -(-((problem.batch - 1) * in_windows + problem.length) // self.block_n)
        if problem.batch * alone < end_to_end * self.block_n:
            return alone, alone + in_windows - problem.length
        return in_windows, in_windows

    def column_tiles(self, problem: Problem) -> int:
        of_tiles, _ = self.columns(problem)  # columns after the last position need no tile
        return -(-((problem.batch - 1) * of_tiles + problem.length) // self.block_n)

    def depth(self, problem: Problem) -> tuple[int, int, int]:
        """Tap chunks, channel chunks and parts of the phases. A stage is one of each; channel chunks run fastest."""
        tap_chunks = -(-problem.taps.taps_per_row // self.tap_chunk)
        phases = min(problem.taps.rows, problem.kernel_size)
        return tap_chunks, -(-problem.out_channels_per_group // self.channels), -(-phases // self.phases)


# Tiles by the size of an element: (block_m, block_n, thread_m, thread_n, lanes_m, min_blocks on an H200).
TILES = {
    4: (
        (128, 128, 16, 8, 8, 2),
        (128, 128, 8, 8, 8, 2),
        (64, 128, 8, 8, 8, 4),
        (32, 256, 8, 8, 4, 3),
        (16, 256, 4, 8, 4, 4),
        (8, 512, 4, 8, 2, 4),
        (4, 512, 4, 4, 1, 4),
        (2, 512, 2, 4, 1, 6),
        (1, 512, 1, 4, 1, 6),
        (32, 64, 4, 4, 4, 6),
        (16, 64, 4, 4, 4, 8),
    ),
    8: (
        (64, 64, 4, 8, 8, 2),
        (32, 128, 4, 8, 8, 2),
        (16, 256, 4, 8, 4, 2),
        (8, 256, 4, 8, 2, 4),
        (4, 256, 4, 4, 1, 4),
        (1, 256, 1, 4, 1, 6),
        (16, 32, 2, 4, 4, 8),
    ),
}

# For float32 rows that powers of two leave partly empty, such as 192 channels.
TALL = (192, 96, 12, 12, 16, 2)

# Two blocks of 128 x 128 on a multiprocessor, as one.
JOINED = dict(block_m=256, block_n=128, thread_m=8, thread_n=16, lanes_m=16, min_blocks=1)
CLEARLY = 0.98  # share of other tiles' estimated time below which JOINED and TALL are taken


def make(problem: Problem, dtype: torch.dtype, most_pairs: int = MOST_PAIRS, most_taps: int = 64, **tile) -> Config:
    """Make the configuration of a tile, with what follows from the problem."""
    t = problem.taps
    sums = tile["thread_m"] * tile["thread_n"]
    by_window = 1 + max(0, WINDOW_LIMIT - tile["thread_n"]) // t.step
    tap_chunk, tap_chunks = split_taps(problem, max(1, min(most_taps, by_window, UNROLL_LIMIT // sums)))
    total, phases, parts = split_phases(problem, most_pairs)
    channels = min(max(1, most_pairs // phases), problem.out_channels_per_group)
    whole = tap_chunk * tap_chunks == t.taps_per_row and problem.kernel_size % total == 0
    config = Config(
        dtype,
        problem.stride,
        problem.dilation,
        tap_chunk=tap_chunk,
        whole=whole,
        whole_channels=problem.out_channels_per_group % channels == 0,
        phases=phases,
        channels=channels,
        long_phases=problem.kernel_size % total if tap_chunks == parts == 1 else 0,
        **tile,
    )
    depth = problem.out_channels_per_group * problem.kernel_size
    if dtype == torch.float32 and depth > PARTIAL_TERMS and "partial" not in tile:
        terms = PARTIAL_TERMS_OF_MANY if depth >= MANY else PARTIAL_TERMS
        terms = max(terms, math.isqrt(depth))  # more where the sum of partial sums would be longer
        config = replace(config, partial=max(1, terms // (channels * config.channel_taps)))
    return config


def shared_need(config: Config) -> int:
    """Bytes of a multiprocessor's shared memory that a block takes, with the table of the window's columns."""
    return config.shared_bytes + ENTRY * config.entries + RESERVED_SHARED


def with_stages(problem: Problem, dtype: torch.dtype, sizes: tuple, device: Device) -> Config | None:
    """A tile of ``sizes``, as in TILES, with the deepest stage within the limits; None where not even one block fits.

    Less shared memory reduces ``min_blocks``."""
    names = ("block_m", "block_n", "thread_m", "thread_n", "lanes_m", "min_blocks")
    tile, pairs, blocks = dict(zip(names, sizes, strict=True)), MOST_PAIRS, 0
    large = tile["thread_m"] * tile["thread_n"] >= LARGE
    while pairs:
        config = make(problem, dtype, pairs, **tile)
        blocks = min(config.min_blocks, device.shared_per_multiprocessor // shared_need(config))
        if blocks > 1 and config.stage_bytes <= (STAGE_BYTES_ALONE if large and not config.partial else STAGE_BYTES):
            return replace(config, min_blocks=blocks)
        pairs //= 2
    return replace(config, min_blocks=blocks) if blocks else None


def candidates(problem: Problem, dtype: torch.dtype, device: Device) -> list[Config]:
    """Every tile of TILES that fits."""
    tiles = TILES[ELEMENTS[dtype].accumulator.bitwidth // 8]
    return [config for sizes in tiles if (config := with_stages(problem, dtype, sizes, device))]


def turns(problem: Problem, config: Config, device: Device) -> int:
    """Blocks that a multiprocessor gets, at most."""
    blocks = config.column_tiles(problem) * config.row_tiles(problem) * problem.groups
    return -(-blocks // device.multiprocessors)


def joined(problem: Problem, tile: Config, device: Device):
    """Two float32 blocks of ``tile`` on a multiprocessor as one block, with every stage at least as deep.

    It yields nothing where more rows, columns or multiprocessors would idle."""
    pair = tile.block_m * 2, tile.block_n, tile.thread_m * tile.thread_n, tile.min_blocks
    if tile.dtype != torch.float32 or pair != (JOINED["block_m"], JOINED["block_n"], LARGE, 2):
        return
    for config in joined_stages(problem, device):
        if config.pairs >= tile.pairs and 2 * turns(problem, config, device) <= turns(problem, tile, device):
            yield config


def joined_stages(problem: Problem, device: Device):
    """Blocks of JOINED, in float32, with every stage that fits, the deepest first."""
    for pairs in range(MOST_PAIRS, 0, -1):
        config = make(problem, torch.float32, pairs, **JOINED)
        if shared_need(config) <= device.shared_per_multiprocessor:
            yield config


def cost(problem: Problem, config: Config, device: Device) -> float:
    """Estimated time, in multiply-adds: the instructions of the blocks that a multiprocessor gets, in rounds."""
    sums = config.thread_m * config.thread_n
    taps = config.channel_taps / config.phases  # taps of a pair, on average
    vectors = (config.thread_n + config.halo) // config.vector + taps * config.thread_m / config.vector_m
    products = taps * sums
    a_pair = config.threads * (products + SHARED_LOAD * vectors) + COPY * config.pitch
    a_stage = config.pairs * a_pair + STAGE * config.threads
    tap_chunks, channel_chunks, parts = config.depth(problem)
    a_block = tap_chunks * parts * (channel_chunks * a_stage + FIND * config.table)
    if config.partial:
        times = tap_chunks * parts * channel_chunks / config.partial
        a_block += times * ASIDE * sums * config.threads
    if config.min_blocks == 1:
        a_block += ALONE * config.block_m * config.block_n

    def a_round(blocks):
        warps = config.threads // 32
        if sums < LARGE:
            return blocks * (1 + WARPS / (blocks * warps))
        blocks = max(blocks, FEWEST_LARGE // warps)
        return blocks * (1 + WARPS / (blocks * warps * 2))

    rounds, rest = divmod(turns(problem, config, device), config.min_blocks)
    return a_block * (rounds * a_round(config.min_blocks) + (a_round(rest) if rest else 0))


def usual(problem: Problem, dtype: torch.dtype, device: Device = H200) -> Config:
    """The tile with the least estimated time, without parts."""

    def time(config):
        return cost(problem, config, device)

    tile = min(candidates(problem, dtype, device), key=time)
    others = [*joined(problem, tile, device)]
    if dtype == torch.float32 and (tall := with_stages(problem, dtype, TALL, device)):
        others.append(tall)
    other = min(others, key=time, default=tile)
    return other if time(other) < CLEARLY * time(tile) else tile


def tiny(problem: Problem, dtype: torch.dtype) -> list[Config]:
    """Tiles of one warp for tests: several tiles and stages, chunks of one tap, phases in parts, partial sums, sums in
    parts."""
    v = 16 // (ELEMENTS[dtype].accumulator.bitwidth // 8)
    in_two = 2 if dtype == torch.float32 and problem.out_channels_per_group % 2 == 0 else 1
    first = dict(block_m=4, block_n=32 * v, thread_m=4, thread_n=v, lanes_m=1, min_blocks=1, partial=1, splits=in_two)
    third = dict(block_m=16, block_n=8 * v, thread_m=4, thread_n=v, lanes_m=4, min_blocks=1, partial=1)
    return [
        make(split(problem, in_two), dtype, 2, **first),
        make(problem, dtype, 3, 1, block_m=2 * v, block_n=16, thread_m=1, thread_n=v, lanes_m=2 * v, min_blocks=1),
        make(problem, dtype, 8, **third),
    ]
