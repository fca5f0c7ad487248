"""Tiles for long filters, and when the selection takes them."""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.formula.taps import Taps
from numba_tconv.ptx import GRANULE
from numba_tconv.runtime.device import REGISTERS
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import STATIC_SHARED_LIMIT

from . import tile
from .rows import MOST_CHANNELS

COLUMNS = 8, 4  # twelve leave too few threads
THREADS = 128, 64, 32
MOST_SUMS = 64
MOST_ROWS = 16  # phases times output channels
MOST_REACH = 16
MOST_PRODUCTS = 1024
OTHER_REGISTERS = 4, 12  # with one chunk, with several
MOST_BLOCKS = 24
WARP, PARTITIONS = 32, 4
LONGEST_SUM = 64  # of float32 products
ENOUGH_BLOCKS = 264
MOST_TERMS = 128  # more favour tensor cores
MINIMUM_CC = (8, 0)  # for cp.async
MOST_TINY_PARTS = 24  # more lose too many digits


@dataclass(frozen=True)
class LongConfig:
    """A thread has ``columns`` neighbouring columns of all phases and output channels.

    ``chunk`` taps are one piece of code; ``batch`` channels are copied together."""

    dtype: torch.dtype
    taps: Taps
    in_per_group: int
    out_per_group: int
    chunk: int
    columns: int = 8
    threads: int = 128
    batch: int = 1
    min_blocks: int = 1
    apart: bool = False  # sums in pieces, for a smaller error

    @property
    def lanes(self) -> int:
        return self.threads

    @property
    def vector(self) -> int:
        return 16 // self.dtype.itemsize

    @property
    def sum_bytes(self) -> int:
        return ELEMENTS[self.dtype].accumulator.bitwidth // 8

    @property
    def run(self) -> int:
        return self.columns * self.taps.stride

    @property
    def span(self) -> int:
        return self.threads * self.columns

    @property
    def full_chunks(self) -> int:
        return self.taps.kernel_size // self.chunk

    @property
    def last_taps(self) -> int:
        return self.taps.kernel_size % self.chunk

    @property
    def by_channel(self) -> bool:
        """Whether pieces of sums are input channels, not chunks."""
        channels, taps = self.in_per_group, self.taps.taps_per_row
        pieces = channels * (self.full_chunks + (self.last_taps > 0))
        return self.apart and channels + taps < pieces + channels * taps / pieces

    @property
    def hop(self) -> int:
        return self.chunk // self.taps.rows * self.taps.step

    def reach(self, taps: int) -> int:
        """Inputs, in granules, that ``taps`` taps reach back."""
        return -(-self.taps.shift(taps - 1) // GRANULE) * GRANULE

    @cached_property
    def halo(self) -> int:
        """Inputs before a block's first column."""
        last = self.full_chunks * self.hop + self.reach(self.last_taps) if self.last_taps else 0
        return max(last, (self.full_chunks - 1) * self.hop + self.reach(self.chunk))

    @cached_property
    def width(self) -> int:
        return -(-(self.halo + self.span) // self.vector) * self.vector

    @cached_property
    def weight_pitch(self) -> int:
        each = 16 // self.sum_bytes
        return -(-self.taps.kernel_size * self.out_per_group // each) * each

    @cached_property
    def pitch(self) -> int:
        """Staged outputs between threads, odd against bank conflicts."""
        return self.run | 1

    @cached_property
    def period(self) -> int:
        """Threads until outputs begin a vector again."""
        return self.run // math.gcd(self.run, self.vector)

    @cached_property
    def active(self) -> int:
        """Threads that store: whole periods."""
        return self.threads // self.period * self.period

    def products(self, taps: int) -> tuple:
        """(sum, weight, place in the window) of a chunk's first ``taps``.

        Sum (j * columns + p) * stride + r is output channel j, column p, phase r. Weights: by tap, then output channel.
        """
        t, reach, outs = self.taps, self.reach(taps), self.out_per_group
        return tuple(
            ((j * self.columns + p) * t.stride + t.phase(k), k * outs + j, reach + p - t.shift(k))
            for k in range(taps)
            for j in range(outs)
            for p in range(self.columns)
        )

    def shared_bytes(self, passes: int = 1) -> int:
        inputs = self.in_per_group * self.width * self.dtype.itemsize
        outputs = self.out_per_group * self.threads * self.pitch * self.sum_bytes
        return self.in_per_group * self.weight_pitch * self.sum_bytes + max(inputs, outputs)

    def arguments(self, rows: int, passes: int) -> tuple:
        return ()

    def work(self) -> str:
        sums = self.columns * self.taps.stride * self.out_per_group
        return f"{self.threads} threads, {sums} sums each; inputs and weights in shared memory"


def fits(config: LongConfig) -> bool:
    each = 16 // config.sum_bytes
    whole = config.chunk % config.taps.rows == 0 and config.hop % GRANULE == 0
    whole = whole and config.chunk * config.out_per_group % each == 0
    single = config.chunk == config.taps.kernel_size
    return (whole or single) and config.active > 0 and config.span % config.vector == 0


def _chunks(config: LongConfig) -> list[int]:
    """Chunk sizes whose windows and weights advance by whole vectors."""
    t = config.taps
    each = 16 // config.sum_bytes
    least = math.lcm(GRANULE // math.gcd(GRANULE, t.step), each // math.gcd(each, t.rows * config.out_per_group))
    least *= t.rows
    return [t.kernel_size, *range((t.kernel_size - 1) // least * least, 0, -least)]


def tiles(problem: Problem, dtype: torch.dtype) -> list[LongConfig]:
    p, t = problem, problem.taps
    rows = p.out_channels_per_group * t.stride
    if max(p.in_channels_per_group, p.out_channels_per_group) > MOST_CHANNELS or rows > MOST_ROWS:
        return []
    sizes, apart = (dtype, t, p.in_channels_per_group, p.out_channels_per_group), _adds_apart(p, dtype)
    found = []
    for threads in THREADS:
        for columns in COLUMNS:
            config = LongConfig(*sizes, t.kernel_size, columns, threads, apart=apart)
            sums = rows * columns * config.sum_bytes // 4
            if sums * (1 + apart) > MOST_SUMS and columns > min(COLUMNS):
                continue
            config = next((c for chunk in _chunks(config) if _small(c := replace(config, chunk=chunk))), None)
            if config is None or config.shared_bytes() > STATIC_SHARED_LIMIT:
                continue
            window = (columns + config.reach(config.chunk)) * config.sum_bytes // 4
            others = OTHER_REGISTERS[config.chunk < t.kernel_size]
            registers = -(-(sums * (1 + apart) + window + others) // 8) * 8
            warps = REGISTERS // (WARP * registers) // PARTITIONS * PARTITIONS
            found.append(replace(config, min_blocks=max(1, min(MOST_BLOCKS, warps * WARP // threads))))
    return found


def _adds_apart(problem: Problem, dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and problem.terms() > LONGEST_SUM


def _small(config: LongConfig) -> bool:
    """Whether registers hold a chunk's window, and the code is short."""
    products = config.chunk * config.out_per_group * config.columns
    return fits(config) and config.reach(config.chunk) <= MOST_REACH and products <= MOST_PRODUCTS


@lru_cache(maxsize=1024)
def choose(problem: Problem, dtype: torch.dtype) -> LongConfig | None:
    if tile.choose(problem, dtype).keeps_weights:
        return None
    found = tiles(problem, dtype)
    enough = (c for c in found if problem.batch * problem.groups * plan(problem, c)[1] >= ENOUGH_BLOCKS)
    return next(enough, found[-1] if found else None)


def is_meant(problem: Problem, dtype: torch.dtype, cc: tuple[int, int]) -> bool:
    """Whether this form is preferred to k4 and tensor cores, whose tiles stay partly empty."""
    return cc >= MINIMUM_CC and problem.terms() <= MOST_TERMS and choose(problem, dtype) is not None


def tiny(problem: Problem, dtype: torch.dtype) -> list[LongConfig]:
    """As Rung.tiny_configs.

    One has many stretches and pieces of sums; the other all taps at once, two channels a copy."""
    p = problem
    if p.out_channels_per_group * p.stride > MOST_ROWS:
        return []
    sizes = dtype, p.taps, p.in_channels_per_group, p.out_channels_per_group
    second = LongConfig(*sizes, p.kernel_size, batch=2, apart=_adds_apart(p, dtype))
    few = [c for c in _chunks(second) if p.in_channels_per_group * -(-p.kernel_size // c) <= MOST_TINY_PARTS]
    shortest = few[-1] if few else p.kernel_size
    configs = [replace(second, chunk=shortest, columns=4, batch=1, apart=True), second]
    configs = [replace(config, threads=max(4, config.period + config.period % 2)) for config in configs]
    return [config for config in configs if fits(config) and config.shared_bytes() <= STATIC_SHARED_LIMIT]


@lru_cache(maxsize=1024)
def plan(problem: Problem, config: LongConfig) -> tuple[int, int]:
    """Passes (one), and stretches of a row."""
    p = problem
    columns = (p.padding + p.out_length - 1) // p.stride - p.padding // p.stride + 1
    return 1, -(-(columns + config.vector - 1) // config.span)
