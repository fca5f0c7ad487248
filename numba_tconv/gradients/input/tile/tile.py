"""What a block holds.

m counts a group's input channels, n columns (positions of all samples), k pairs of an output channel and a phase. A
block has ``block_m x block_n`` sums, divided as WarpTile describes, and ``pairs`` a stage."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.input.split_k import split
from numba_tconv.gradients.window import Window, columns, evenly
from numba_tconv.kernels.common.register_tile import WarpTile
from numba_tconv.kernels.common.sectors import entries_before
from numba_tconv.runtime.elements import ELEMENTS

WINDOW_LIMIT = 20  # columns in registers
UNROLL_LIMIT = 400  # multiply-adds of a pair
TURN = 512  # multiply-adds of a thread
MOST_PAIRS = 16
LOCATING = 3  # instructions a column, about
# Products of a float32 partial sum, if few in all, and if MANY.
PARTIAL_TERMS, PARTIAL_TERMS_OF_MANY, MANY = 128, 256, 512


class Chunks(NamedTuple):
    """A tile's; channels run fastest, then phases."""

    tap_chunks: int
    channel_chunks: int
    phase_chunks: int


@dataclass(frozen=True)
class Config(WarpTile):
    dtype: torch.dtype
    stride: int
    dilation: int
    tap_chunk: int  # of a row in one window
    whole: bool  # every row has all taps of every chunk
    whole_channels: bool  # a group's channels fill whole stages
    phases: int
    channels: int
    block_m: int
    block_n: int
    thread_m: int
    thread_n: int
    lanes_m: int
    min_blocks: int  # the register budget
    partial: int = 0  # stages of a partial sum; 0: all
    stages: int = 2
    long_phases: int = 0  # phases with tap_chunk taps, before phases with one less; 0: no phase has less
    splits: int = 1
    early_launch: bool = False  # see Kernel.prepare
    overlaps_packing: bool = False

    @property
    def alone(self) -> "Config":
        return replace(self, splits=1, overlaps_packing=False)

    @property
    def vector_m(self) -> int:
        return min(self.vector, self.thread_m)

    @property
    def pairs(self) -> int:
        return self.phases * self.channels

    @property
    def pairs_a_turn(self) -> int:
        products = self.tap_chunk * self.thread_m * self.thread_n
        return math.gcd(self.pairs, 4 if 4 * products <= TURN else 2)

    @property
    def short_a_turn(self) -> int:
        return math.gcd(self.phases - self.long_phases, 2)

    @property
    def halo(self) -> int:
        """Columns beyond the block's that taps reach, in vectors."""
        return -(-(self.tap_chunk - 1) * self.taps.step // self.vector) * self.vector

    @property
    def pitch(self) -> int:
        """Columns between rows, against bank conflicts."""
        width, banks = self.block_n + self.halo, 128 // self.itemsize
        start = 0 if self.phases == 1 else max(self.vector, banks // self.phases // self.vector * self.vector)
        return width + (start - width) % banks if start else width

    @property
    def window(self) -> Window:
        width = self.block_n + (self.tap_chunk - 1) * self.taps.step
        return Window(
            self.dtype,
            phases=self.phases,
            channels=self.channels,
            width=width,
            pitch=self.pitch,
            threads=self.threads,
            locating=LOCATING,
            whole=self.whole_channels,
        )

    @property
    def table_entries(self) -> int:
        return self.window.width * self.phases

    @property
    def entries(self) -> int:
        """Room for the table, up to a sector."""
        return entries_before(self.table_entries, self.g_stage * self.itemsize)

    @property
    def g_stage(self) -> int:
        return self.pairs * self.pitch

    @property
    def channel_taps(self) -> int:
        short_phases = self.phases - self.long_phases if self.long_phases else 0
        return self.phases * self.tap_chunk - short_phases

    @property
    def w_stage(self) -> int:
        return -(-self.channels * self.channel_taps * self.block_m // self.vector) * self.vector

    @property
    def stage(self) -> int:
        return self.g_stage + self.w_stage

    def row_tiles(self, problem: Problem) -> int:
        return -(-problem.in_channels_per_group // self.block_m)

    def columns(self, problem: Problem) -> tuple[int, int]:
        """Columns between samples, for tiles and windows: end to end or in whole tiles, for fewest tiles."""
        in_windows = columns(problem, self.tap_chunk)
        alone = -(-problem.length // self.block_n) * self.block_n
        end_to_end = -(-((problem.batch - 1) * in_windows + problem.length) // self.block_n)
        if problem.batch * alone < end_to_end * self.block_n:
            return alone, alone + in_windows - problem.length
        return in_windows, in_windows

    def column_tiles(self, problem: Problem) -> int:
        of_tiles, _ = self.columns(problem)
        return -(-((problem.batch - 1) * of_tiles + problem.length) // self.block_n)

    def chunks_of(self, problem: Problem) -> Chunks:
        tap_chunks = -(-problem.taps.taps_per_row // self.tap_chunk)
        phases = min(problem.taps.rows, problem.kernel_size)
        return Chunks(tap_chunks, -(-problem.out_channels_per_group // self.channels), -(-phases // self.phases))


def make(problem: Problem, dtype: torch.dtype, most_pairs: int = MOST_PAIRS, most_taps: int = 64, **tile) -> Config:
    t = problem.taps
    sums = tile["thread_m"] * tile["thread_n"]
    by_window = 1 + max(0, WINDOW_LIMIT - tile["thread_n"]) // t.step
    tap_chunk, tap_chunks = evenly(t.taps_per_row, max(1, min(most_taps, by_window, UNROLL_LIMIT // sums)))
    total = min(t.rows, problem.kernel_size)
    phases, parts = evenly(total, most_pairs)
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
        terms = max(terms, math.isqrt(depth))  # else their sum is longer
        config = replace(config, partial=max(1, terms // (channels * config.channel_taps)))
    return config


def tiny(problem: Problem, dtype: torch.dtype) -> list[Config]:
    v = 16 // (ELEMENTS[dtype].accumulator.bitwidth // 8)
    in_two = 2 if dtype == torch.float32 and problem.out_channels_per_group % 2 == 0 else 1
    first = dict(block_m=4, block_n=32 * v, thread_m=4, thread_n=v, lanes_m=1, min_blocks=1, partial=1, splits=in_two)
    third = dict(block_m=16, block_n=8 * v, thread_m=4, thread_n=v, lanes_m=4, min_blocks=1, partial=1)
    return [
        make(split(problem, in_two), dtype, 2, **first),
        make(problem, dtype, 3, 1, block_m=2 * v, block_n=16, thread_m=1, thread_n=v, lanes_m=2 * v, min_blocks=1),
        make(problem, dtype, 8, **third),
    ]
