"""Tiles of the alias-free activation: ``Config`` fixes the machine code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from numba_tconv.formula.alias_free import AliasFree
from numba_tconv.kernels.common.sectors import SECTOR
from numba_tconv.runtime.elements import ELEMENTS

ENOUGH_BLOCKS = 2048  # several for every place on a large GPU, before blocks take more tiles
MOST_PASSES = 4
THREADS = (32, 64, 128)
MOST_NUMBERS = 32  # up-samples and samples of a thread's window, float32, that 64 registers hold
RESIDENT_THREADS = 1024  # of a multiprocessor, with 64 registers each


@dataclass(frozen=True)
class Config:
    """A tile is the up-samples of ``threads * run`` positions of a row, ``run`` a thread, and the outputs they give."""

    dtype: torch.dtype
    up_taps: int
    down_taps: int
    up_ratio: int
    down_ratio: int
    activation: str
    log_scale: bool = True
    threads: int = 128
    vectors: int = 2  # of positions, then of outputs, of a thread: 1, 2, 4 or 8
    min_blocks: int = 1

    @cached_property
    def sizes(self) -> AliasFree:
        """The index formula; its batch, channels and length have no meaning."""
        return AliasFree(1, 1, 1, self.up_taps, self.down_taps, self.up_ratio, self.down_ratio)

    @cached_property
    def vector(self) -> int:
        """Accumulators in 16 bytes."""
        return 128 // ELEMENTS[self.dtype].accumulator.bitwidth

    @cached_property
    def run(self) -> int:
        """Positions, then outputs, of a thread."""
        return self.vectors * self.vector

    @cached_property
    def lanes(self) -> int:
        """Elements in 16 bytes of x."""
        return 16 // self.dtype.itemsize

    @cached_property
    def aligned(self) -> int:
        """Outputs in a sector, at a multiple of which each tile begins in memory."""
        return SECTOR // self.dtype.itemsize

    @cached_property
    def same_ratio(self) -> bool:
        return self.up_ratio == self.down_ratio

    @cached_property
    def before(self) -> int:
        """Samples before its own position in a thread's window.

        With more than the least, tiles that begin at a multiple of ``aligned`` read x from a multiple of ``lanes``.
        """
        least = self.least_before
        return least + -(least + self.early) % self.lanes if self.same_ratio else least

    @cached_property
    def least_before(self) -> int:
        """Samples before its own position that the up-samples of a position need."""
        return -((self.sizes.up_shift - self.up_taps + 1) // self.up_ratio)

    @cached_property
    def early(self) -> int:
        """Positions of a tile before its first output's."""
        return (self.sizes.down_shift + self.lead) // self.down_ratio

    @cached_property
    def after(self) -> int:
        return (self.up_ratio - 1 + self.sizes.up_shift) // self.up_ratio

    @cached_property
    def reads_zeros(self) -> bool:
        """Whether up-samples of a row need samples beyond its repeated ends."""
        return max(self.least_before, self.after) > self.sizes.pad

    @cached_property
    def positions(self) -> int:
        """Positions of a tile."""
        return self.threads * self.run

    @cached_property
    def up_window(self) -> int:
        """Samples that a thread loads for its positions, in whole vectors."""
        return self._whole(self.run + self.before + self.after)

    @cached_property
    def samples(self) -> int:
        """Samples of a tile in shared memory: whole vectors of x."""
        return -(-(self.positions - self.run + self.up_window) // self.lanes) * self.lanes

    @cached_property
    def lead(self) -> int:
        """Up-samples of a tile before the first that its first output needs."""
        return -self.sizes.down_shift % self.down_ratio if self.same_ratio else 0

    @cached_property
    def reach(self) -> int:
        """Entries of a plane after its own that an output needs."""
        return (self.down_taps - 1 + self.lead) // self.down_ratio

    @cached_property
    def outputs(self) -> int:
        """Outputs of a tile: whole sectors."""
        if self.same_ratio:
            most = self.positions - self.reach
        else:
            most = (self.positions * self.up_ratio - self.down_taps - self.up_ratio + 1) // self.down_ratio + 1
        return most // self.aligned * self.aligned

    @cached_property
    def down_window(self) -> int:
        """Entries of each plane that a thread loads for its outputs, in whole vectors."""
        return self._whole(self.run + self.reach)

    @cached_property
    def entries(self) -> int:
        """Entries of a plane: up-sample ``n`` of a tile is entry ``n // down_ratio`` of plane ``n % down_ratio``."""
        written = self.positions * self.up_ratio // self.down_ratio + 1
        read = -(-self.outputs // self.run) * self.run - self.run + self.down_window
        return self._whole(max(self.positions if self.same_ratio else written, read))

    @cached_property
    def plane(self) -> int:
        """Accumulators from one plane to the next."""
        return self.room(self.entries)

    def room(self, count: int) -> int:
        """Accumulators that the places of ``count`` entries take."""
        block = 8 * self.vector
        return -(-count // block) * block

    @cached_property
    def place(self) -> Callable[[int], int]:
        """Where entry i of a row or plane lies in shared memory, for Python and for the kernel.

        Threads load vectors that lie ``vectors`` apart. Exchanged within each 128 bytes, they come from all banks.
        """
        vector, block, most = self.vector, 8 * self.vector, self.vectors - 1
        return lambda i: i ^ type(i)((i // type(i)(block) & type(i)(most)) * type(i)(vector))

    @cached_property
    def up_products(self) -> tuple:
        """(value, tap, place in the window); values are ordered by phase, then by position."""
        s = self.sizes
        return tuple(
            (p * self.run + z, k, z + (p + s.up_shift - k) // self.up_ratio + self.before)
            for k in range(self.up_taps)
            for z in range(self.run)
            for p in range(self.up_ratio)
            if (p + s.up_shift - k) % self.up_ratio == 0
        )

    @cached_property
    def down_products(self) -> tuple:
        """(output, tap, place in the windows of all planes)."""
        return tuple(
            (z, k, (k + self.lead) % self.down_ratio * self.down_window + z + (k + self.lead) // self.down_ratio)
            for k in range(self.down_taps)
            for z in range(self.run)
        )

    def _whole(self, count: int) -> int:
        return -(-count // self.vector) * self.vector


@lru_cache(maxsize=1024)
def choose(sizes: AliasFree, dtype: torch.dtype, activation: str, log_scale: bool) -> Config:
    """The smallest block that holds a row, otherwise the largest."""
    for threads in THREADS:
        config = Config(dtype, *sizes[3:], activation, log_scale, threads)
        if config.outputs >= sizes.out_length + config.aligned:
            break
    if config.run * config.up_ratio + config.up_window <= MOST_NUMBERS and dtype != torch.float64:
        return replace(config, min_blocks=RESIDENT_THREADS // config.threads)
    return config


def tiles_of(sizes: AliasFree, config: Config) -> tuple[int, int]:
    """Tiles of a block, and blocks of a row. A row that begins inside a sector has a tile that begins before it."""
    ahead = 0 if sizes.out_length % config.aligned == 0 else config.aligned - 1
    tiles = -(-(sizes.out_length + ahead) // config.outputs)
    passes = max(1, min(MOST_PASSES, tiles, sizes.rows * tiles // ENOUGH_BLOCKS))
    return passes, -(-tiles // passes)
