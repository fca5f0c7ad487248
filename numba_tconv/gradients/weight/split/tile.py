"""What a block holds.

m counts a group's input channels, p pairs of an output channel and a phase (gradients/window.py), l positions of all
samples, the depth. A block has ``block_m x block_p x tap_chunk`` sums and ``block_l`` positions a stage, shared by
slices of ``lanes_m x lanes_p`` threads; a thread ``thread_m x thread_p x tap_chunk`` sums.

Where some phases have a tap more, blocks may be of two kinds: for the taps of every phase, and the rest."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.window import Window, columns, evenly
from numba_tconv.kernels.common.register_tile import ThreadTile
from numba_tconv.runtime.elements import ELEMENTS

THREADS = 128
WINDOW_LIMIT = 20  # columns in registers
MOST_TAPS = 8  # of a window
PARTIAL_TERMS = 128  # of a float32 partial sum
SPLIT_COLUMNS = 8192  # where sums are partial
LOCATING = 20  # instructions a column, about
# A tile's taps: all; the taps that every phase has; the last tap, which some phases have.
ALL, WHOLE, REST = "all", "whole", "rest"


class Division(NamedTuple):
    row_tiles: int
    channel_tiles: int
    phase_chunks: int
    tap_chunks: int


@dataclass(frozen=True)
class Config(ThreadTile):
    dtype: torch.dtype
    stride: int
    dilation: int
    tap_chunk: int  # of a row in one window
    phases: int
    channels: int
    thread_m: int
    thread_p: int
    lanes_m: int
    lanes_p: int
    slices: int
    block_l: int
    min_blocks: int = 1  # the register budget
    partial: int = 0  # stages of a partial sum; 0: all
    x_vector: int = 1  # elements of a cp.async
    whole_rows: bool = False  # a group's rows fill whole blocks
    whole_channels: bool = False  # a group's channels fill whole blocks
    part: str = ALL
    rest_tile: "Config | None" = None  # the REST's tile, if ``part`` is WHOLE

    @property
    def tiles(self) -> tuple["Config", ...]:
        return (self, self.rest_tile) if self.rest_tile else (self,)

    def copying_vectors(self) -> "Config":
        return replace(self, x_vector=self.vector, rest_tile=self.rest_tile and self.rest_tile.copying_vectors())

    @property
    def block_m(self) -> int:
        return self.thread_m * self.lanes_m

    @property
    def block_p(self) -> int:
        """Pairs with sums; the first ``phases * channels`` exist."""
        return self.thread_p * self.lanes_p

    @property
    def slice_threads(self) -> int:
        return self.lanes_m * self.lanes_p

    @property
    def threads(self) -> int:
        return self.slice_threads * self.slices

    @property
    def sums(self) -> int:
        return self.thread_m * self.thread_p * self.tap_chunk

    @property
    def vectors_a_turn(self) -> int:
        """Two if registers hold both windows, else one."""
        even = self.block_l // (self.slices * self.vector) % 2 == 0
        return 1 + (even and (self.thread_p <= 4 or self.threads * self.min_blocks <= 2 * THREADS))

    @cached_property
    def window_columns(self) -> int:
        return self.vector + -(-(self.tap_chunk - 1) * self.taps.step // self.vector) * self.vector

    @property
    def width(self) -> int:
        return self.block_l - self.vector + self.window_columns

    def pitch(self, width: int) -> int:
        """Elements between rows, against bank conflicts."""
        return (-(-width // self.vector) // 2 * 2 + 1) * self.vector

    @property
    def window(self) -> Window:
        return Window(
            self.dtype,
            phases=self.phases,
            channels=self.channels,
            width=self.block_l + (self.tap_chunk - 1) * self.taps.step,
            pitch=self.pitch(self.width),
            threads=self.threads,
            locating=LOCATING,
            whole=self.whole_channels,
        )

    @property
    def x_window(self) -> Window:
        return Window(
            self.dtype,
            phases=1,
            channels=self.block_m,
            width=self.block_l,
            pitch=self.pitch(self.block_l),
            threads=self.threads,
            locating=LOCATING,
            vector=self.x_vector,
            whole=self.whole_rows,
        )

    @property
    def x_stage(self) -> int:
        return self.block_m * self.pitch(self.block_l)

    @property
    def stage(self) -> int:
        return self.x_stage + self.block_p * self.pitch(self.width)

    @property
    def shared_bytes(self) -> int:
        partials = self.sums * self.threads
        own = max(2 * self.stage + partials * bool(self.partial), partials) * self.itemsize
        return max(own, self.rest_tile.shared_bytes) if self.rest_tile else own

    def phases_of(self, problem: Problem) -> int:
        return rows_of(problem, self.part)[0]

    def division(self, problem: Problem) -> Division:
        phases, taps = rows_of(problem, self.part)
        rows, channels = problem.in_channels_per_group, problem.out_channels_per_group
        phase_chunks, tap_chunks = -(-phases // self.phases), -(-taps // self.tap_chunk)
        return Division(-(-rows // self.block_m), -(-channels // self.channels), phase_chunks, tap_chunks)

    def own_blocks(self, problem: Problem) -> int:
        return problem.groups * math.prod(self.division(problem))

    def blocks(self, problem: Problem) -> int:
        return sum(tile.own_blocks(problem) for tile in self.tiles)

    def columns(self, problem: Problem) -> int:
        """Columns of a sample in copies of x."""
        return -(-columns(problem, self.tap_chunk) // self.x_vector) * self.x_vector

    def stages(self, problem: Problem) -> int:
        return -(-problem.batch * self.columns(problem) // self.block_l)


def rows_of(problem: Problem, part: str) -> tuple[int, int]:
    """Phases with taps of ``part``, and their most taps."""
    rows, taps = problem.taps.rows, problem.kernel_size
    if part == REST:
        return taps % rows, 1
    return (rows, taps // rows) if part == WHOLE else (min(rows, taps), -(-taps // rows))


def unequal(problem: Problem) -> bool:
    """Whether some phases, but not all, have a tap more."""
    return problem.kernel_size > problem.taps.rows and problem.kernel_size % problem.taps.rows > 0


def make(
    problem: Problem,
    dtype: torch.dtype,
    most_taps: int = MOST_TAPS,
    most_phases: int = THREADS,
    block_l: int = 32,
    part: str = ALL,
    **tile,
) -> Config:
    v = 16 // (ELEMENTS[dtype].accumulator.bitwidth // 8)
    all_phases, taps = rows_of(problem, part)
    tap_chunk, _ = evenly(taps, max(1, min(most_taps, 1 + (WINDOW_LIMIT - v) // problem.taps.step)))
    block_p = tile["thread_p"] * tile["lanes_p"]
    most_phases = min(most_phases, block_p, tile["lanes_m"] * tile["lanes_p"] * tile["slices"])
    phases, _ = evenly(all_phases, most_phases)
    block_l = max(block_l, tile["slices"] * v)
    if dtype == torch.float32 and PARTIAL_TERMS * tile["slices"] < SPLIT_COLUMNS:
        tile.setdefault("partial", max(1, PARTIAL_TERMS * tile["slices"] // block_l))
    channels = min(block_p // phases, problem.out_channels_per_group)
    sizes = dict(tap_chunk=tap_chunk, phases=phases, channels=channels, block_l=block_l)
    sizes["whole_rows"] = problem.in_channels_per_group % (tile["thread_m"] * tile["lanes_m"]) == 0
    sizes["whole_channels"] = problem.out_channels_per_group % channels == 0
    return Config(dtype, problem.stride, problem.dilation, **sizes, **tile, part=part)


def tiny(problem: Problem, dtype: torch.dtype) -> list[Config]:
    v = 16 // (ELEMENTS[dtype].accumulator.bitwidth // 8)
    shapes = (
        dict(thread_m=2, thread_p=2, lanes_m=1, lanes_p=2, slices=2, partial=1),
        dict(thread_m=1, thread_p=1, lanes_m=4, lanes_p=2, slices=1, most_taps=1),
        dict(thread_m=4, thread_p=1, lanes_m=1, lanes_p=8, slices=1, most_taps=2, partial=2),
        dict(thread_m=1, thread_p=4, lanes_m=2, lanes_p=2, slices=1, most_phases=2, partial=1),
    )

    def of(part):
        return [make(problem, dtype, block_l=2 * v, part=part, **shape) for shape in shapes]

    if not unequal(problem):
        return of(ALL)
    return of(ALL) + [replace(whole, rest_tile=rest) for whole, rest in zip(of(WHOLE), of(REST)[::-1], strict=True)]
