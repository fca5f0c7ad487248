"""Tiles of the gradients."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from numba_tconv.formula.alias_free import AliasFree
from numba_tconv.kernels.alias_free.filters import Down, Up, whole
from numba_tconv.kernels.alias_free.tile import ENOUGH_BLOCKS, MOST_PASSES, THREADS, RowTile

LANES = 1024  # of a multiprocessor: 64 registers each
MOST_TAPS = 24  # of both filters, for so few registers
FAR = 1024  # keeps dividends positive


@dataclass(frozen=True)
class Config(RowTile):
    """A tile is ``threads * run`` positions of a row, and the samples of x's gradient from their up-samples.

    ``up`` makes x's up-samples again. Turned round, the filter down gives the gradient of activated up-samples
    (``turned``; by single up-samples unless ``same_ratio``), the filter up x's (``down``)."""

    parameters: bool = True
    threads: int = 128
    run: int = 4  # positions, then outputs, of a thread; a multiple of ``vector``
    min_blocks: int = 1

    @cached_property
    def up(self) -> Up:
        return Up(self.up_taps, self.up_ratio, self.sizes.up_shift, self.run, self.vector)

    @cached_property
    def turned(self) -> Up:
        return Up(self.down_taps, self.down_ratio, self.sizes.down_shift, self.run, self.vector)

    @property
    def takes_sums(self) -> bool:
        """Whether alpha and beta receive gradients."""
        return self.activation == "snake" and self.parameters

    @cached_property
    def down(self) -> Down:
        return Down(self.up_taps, self.up_ratio, -self.sizes.up_shift % self.up_ratio, self.run, self.vector)

    @cached_property
    def samples(self) -> int:
        return self.positions - self.run + self.up.window

    @cached_property
    def grads(self) -> int:
        """Samples of y's gradient in shared memory, in whole vectors."""
        if self.same_ratio:
            return self.positions - self.run + self.turned.window
        return whole((self.positions * self.up_ratio + self.down_taps) // self.down_ratio + 2, self.vector)

    @cached_property
    def outputs(self) -> int:
        """Samples of x's gradient: whole sectors and runs."""
        step = max(self.aligned, self.run)
        return (self.positions - self.down.reach) // step * step

    @cached_property
    def plane(self) -> int:
        read = whole(self.outputs + self.run, self.vector) + self.down.window
        return whole(max(self.positions, read), self.vector)


@lru_cache(maxsize=1024)
def choose(sizes: AliasFree, dtype: torch.dtype, activation: str, log_scale: bool, parameters: bool) -> Config:
    """The smallest block that holds a row, else the largest."""
    full = dtype != torch.float64 and sizes.up_taps + sizes.down_taps <= MOST_TAPS
    for threads in THREADS:
        blocks = LANES // threads if full else 1
        config = Config(dtype, *sizes[3:], activation, log_scale, parameters, threads, min_blocks=blocks)
        if config.outputs >= sizes.length + config.aligned:
            break
    return config


def tiles_of(sizes: AliasFree, config: Config) -> tuple[int, int]:
    """Tiles of a block, and blocks of a row."""
    tiles = config.tiles(sizes.length)
    passes = max(1, min(MOST_PASSES, tiles, sizes.rows * tiles // ENOUGH_BLOCKS))
    return passes, -(-tiles // passes)
