"""Tiles of the staged form."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.formula.taps import Taps
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import STATIC_SHARED_LIMIT

from . import rows as depthwise_rows

WEIGHT_WORDS = 32
PRODUCTS = 256  # of straight-line code
GOOD_SHARED = 24 * 1024  # bytes


@dataclass(frozen=True)
class Config:
    """``lanes`` threads share a window, for at most ``stretch`` outputs of a channel."""

    dtype: torch.dtype
    taps: Taps
    in_per_group: int
    out_per_group: int
    lanes: int = 256
    threads: int = 256
    stretch: int = 8192

    @property
    def words(self) -> int:
        return ELEMENTS[self.dtype].accumulator.bitwidth // 32

    @cached_property
    def vector(self) -> int:
        return 16 // self.dtype.itemsize

    @cached_property
    def families(self) -> int:
        """Output z belongs to family z mod families; a family has one phase."""
        return self.taps.stride if self.vector % self.taps.stride == 0 else self.vector

    @cached_property
    def weights(self) -> int:
        """A thread's weights of an output channel."""
        return self.families * self.in_per_group * self.taps.taps_per_row

    @cached_property
    def period(self) -> int:
        """Vectors after which phases repeat."""
        return self.taps.stride // math.gcd(self.taps.stride, self.vector)

    @cached_property
    def keeps_weights(self) -> bool:
        """Whether phases repeat in every pass, and registers hold the weights."""
        products = self.vector * self.in_per_group * self.taps.taps_per_row
        return self.period <= self.lanes and self.weights * self.words <= WEIGHT_WORDS and products <= PRODUCTS

    @property
    def min_blocks(self) -> int:
        """Leaves 48, 64 or 128 registers a thread."""
        words = self.weights * self.words if self.keeps_weights else WEIGHT_WORDS
        return 5 if words <= 12 and self.vector < 8 and self.taps.gap == 1 else 4 if words <= 16 else 2

    @cached_property
    def active(self) -> int:
        """Lanes that compute: whole periods."""
        return self.lanes // self.period * self.period if self.keeps_weights else self.lanes

    @cached_property
    def step(self) -> int:
        return self.active * self.vector

    @cached_property
    def halo(self) -> int:
        """Inputs before an output's own column."""
        return self.taps.shift(self.taps.kernel_size - 1)

    def width(self, passes: int) -> int:
        columns = (self.taps.stride - 1 + self.vector - 1 + passes * self.step - 1) // self.taps.stride + 1
        return -(-(self.halo + columns + self.vector - 1) // self.vector) * self.vector

    def shared_bytes(self, passes: int) -> int:
        return self.threads // self.lanes * self.in_per_group * self.width(passes) * 4 * self.words

    def arguments(self, rows: int, passes: int) -> tuple:
        return rows, passes, self.width(passes)

    def work(self) -> str:
        weights = "registers" if self.keeps_weights else "the caches"
        teams = self.threads // self.lanes
        windows = "a window of inputs" if teams == 1 else f"{teams} windows of inputs"
        return f"{windows}, {self.lanes} threads each; weights in {weights}"


@lru_cache(maxsize=1024)
def choose(problem: Problem, dtype: torch.dtype) -> Config:
    """A warp a row if eight passes suffice."""
    sizes = dtype, problem.taps, problem.in_channels_per_group, problem.out_channels_per_group
    whole = [Config(*sizes, lanes=threads, threads=threads) for threads in (256, 128, 64, 32)]
    narrow = Config(*sizes, lanes=32)
    passes = -(-problem.out_length // narrow.step)
    if passes <= 8 and narrow.keeps_weights == whole[0].keeps_weights and narrow.shared_bytes(passes) <= GOOD_SHARED:
        return narrow
    fitting = (c for limit in (GOOD_SHARED, STATIC_SHARED_LIMIT) for c in whole if c.shared_bytes(1) <= limit)
    return next(fitting, whole[-1])


@lru_cache(maxsize=1024)
def plan(problem: Problem, config: Config) -> tuple[int, int]:
    outputs = problem.out_length + config.vector - 1  # the first vector may begin early
    vectors = problem.batch * problem.groups * outputs // config.vector
    passes = min(config.stretch // config.step, vectors // (config.threads * depthwise_rows.ENOUGH_BLOCKS))
    while passes > 1 and config.shared_bytes(passes) > GOOD_SHARED:
        passes -= 1
    stretches = -(-outputs // (max(1, passes) * config.step))
    return -(-outputs // (stretches * config.step)), stretches
