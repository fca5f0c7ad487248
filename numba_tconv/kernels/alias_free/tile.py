"""Tiles of the alias-free activation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from numba_tconv.formula.alias_free import AliasFree
from numba_tconv.kernels.common.sectors import SECTOR
from numba_tconv.runtime.elements import ELEMENTS

from .filters import Down, Up, whole

ENOUGH_BLOCKS = 2048  # beyond, blocks take more tiles
MOST_PASSES = 4
THREADS = (32, 64, 128)
MOST_NUMBERS = 32  # up-samples and samples of a thread, in 64 registers
RESIDENT_THREADS = 1280  # with 48 registers each
MOST_BLOCKS_RESIDENT = 32
MOST_ROW_BLOCKS = 65535  # of a grid in y


@dataclass(frozen=True)
class RowTile:
    """What both directions share; each adds ``threads``, ``run`` (a thread's positions) and ``outputs``."""

    dtype: torch.dtype
    up_taps: int
    down_taps: int
    up_ratio: int
    down_ratio: int
    activation: str
    log_scale: bool = True

    @cached_property
    def sizes(self) -> AliasFree:
        """The index formula, without batch, channels and length."""
        return AliasFree(1, 1, 1, self.up_taps, self.down_taps, self.up_ratio, self.down_ratio)

    @cached_property
    def vector(self) -> int:
        return 128 // ELEMENTS[self.dtype].accumulator.bitwidth

    @cached_property
    def aligned(self) -> int:
        """Outputs in a sector; tiles begin on sectors."""
        return SECTOR // self.dtype.itemsize

    @cached_property
    def same_ratio(self) -> bool:
        return self.up_ratio == self.down_ratio

    @cached_property
    def positions(self) -> int:
        return self.threads * self.run

    def tiles(self, length: int) -> int:
        """Tiles of a row; one begins before a row that begins inside a sector."""
        ahead = 0 if length % self.aligned == 0 else self.aligned - 1
        return -(-(length + ahead) // self.outputs)


@dataclass(frozen=True)
class Config(RowTile):
    """A tile is ``threads * run`` positions of a row, and the outputs of their up-samples."""

    threads: int = 128
    vectors: int = 2  # of a thread: 1, 2, 4 or 8
    min_blocks: int = 1

    @cached_property
    def run(self) -> int:
        return self.vectors * self.vector

    @cached_property
    def lanes(self) -> int:
        return 16 // self.dtype.itemsize

    @cached_property
    def up(self) -> Up:
        """The filter up; spare samples align the tile's loads of x."""
        up = Up(self.up_taps, self.up_ratio, self.sizes.up_shift, self.run, self.vector)
        return replace(up, spare=-(up.needed + self.early) % self.lanes) if self.same_ratio else up

    @cached_property
    def down(self) -> Down:
        return Down(self.down_taps, self.down_ratio, self.lead, self.run, self.vector)

    @cached_property
    def early(self) -> int:
        """Positions before the first output's."""
        return (self.sizes.down_shift + self.lead) // self.down_ratio

    @cached_property
    def reads_zeros(self) -> bool:
        """Whether up-samples need more than a row's repeated ends."""
        return max(self.up.needed, self.up.after) > self.sizes.pad

    @cached_property
    def samples(self) -> int:
        """A tile's. At the same ratio the last positions, which no output needs, lack theirs."""
        return self.positions if self.same_ratio else whole(self.windows, self.lanes)

    @property
    def windows(self) -> int:
        """Samples of all threads' windows."""
        return self.positions - self.run + self.up.window

    @cached_property
    def lead(self) -> int:
        """Up-samples before the first output's."""
        return -self.sizes.down_shift % self.down_ratio if self.same_ratio else 0

    @cached_property
    def outputs(self) -> int:
        """Outputs of a tile, in whole sectors."""
        if self.same_ratio:
            most = self.positions - self.up.before - self.up.after - self.down.reach
        else:
            most = (self.positions * self.up_ratio - self.down_taps - self.up_ratio + 1) // self.down_ratio + 1
        return most // self.aligned * self.aligned

    @cached_property
    def entries(self) -> int:
        written = self.positions * self.up_ratio // self.down_ratio + 1
        read = whole(self.outputs, self.run) - self.run + self.down.window
        return whole(max(self.positions if self.same_ratio else written, read), self.vector)

    @cached_property
    def plane(self) -> int:
        return self.room(self.entries)

    @property
    def stride(self) -> int:
        """From thread to thread: an odd number of vectors, against bank conflicts."""
        return (self.vectors | 1) * self.vector

    def room(self, count: int) -> int:
        """Accumulators that ``count`` entries take."""
        return -(-count // self.run) * self.stride

    @cached_property
    def place(self) -> Callable[[int], int]:
        """Where entry i of a row or plane lies in shared memory."""
        run, gap = self.run, self.stride - self.run
        return lambda i: type(i)(i + i // type(i)(run) * type(i)(gap))


@lru_cache(maxsize=1024)
def choose(sizes: AliasFree, dtype: torch.dtype, activation: str, log_scale: bool) -> Config:
    """The smallest block that holds a row, else the largest."""
    for threads in THREADS:
        config = Config(dtype, *sizes[3:], activation, log_scale, threads)
        if config.outputs >= sizes.out_length + config.aligned:
            break
    if config.run * config.up_ratio + config.up.window <= MOST_NUMBERS and dtype != torch.float64:
        return replace(config, min_blocks=min(RESIDENT_THREADS // config.threads, MOST_BLOCKS_RESIDENT))
    return config


def tiles_of(sizes: AliasFree, config: Config) -> tuple[int, int]:
    """Tiles of a block, and blocks of a row."""
    tiles = config.tiles(sizes.out_length)
    passes = max(1, min(MOST_PASSES, tiles, sizes.rows * tiles // ENOUGH_BLOCKS), -(-tiles // MOST_ROW_BLOCKS))
    return passes, -(-tiles // passes)
