"""Tiles, and where a lane reads in a window.

m counts a sample's positions, n a group's input channels, k entries: pairs of an output channel and a tap in the
weight's order. A stage's entries fill a row of weights. Where these are not whole channels, stages run ``through`` the
channels (operands.py)."""

from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import NamedTuple

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.wgmma_ring import CONSUMERS, ROW, Ring
from numba_tconv.kernels.common.tensor_map import ALIGNMENT, LARGEST_BOX


class Tiles(NamedTuple):
    position_tiles: int  # of a sample
    channel_tiles: int  # of a group
    tiles: int  # in all


@dataclass(frozen=True)
class Config(Ring):
    precision: str
    stride: int
    dilation: int
    kernel_size: int
    odd: bool  # odd padding: windows begin at odd elements
    sheared: int  # channels between rows alike modulo 16 bytes
    clears: bool  # windows hold memory beside their rows, as zeros
    through: bool
    g_channels: int  # of a stage
    blocks: int  # of 64 positions in a warpgroup
    channels: int
    alternate: bool  # ping-pong
    stages: int = 0
    split_k: bool = False

    alike = 1  # one box holds all rows

    @property
    def dtype(self):
        return DTYPES[self.precision]

    @property
    def own_words(self) -> int:
        """Words of turns' mbarriers and of the table."""
        return CONSUMERS + -(-self.table_entries * self.table_bytes // 8)

    @property
    def entries(self) -> int:
        """A stage's entries, unpadded."""
        return ROW // self.itemsize if self.through else self.g_channels * self.kernel_size

    @property
    def halves(self) -> bool:
        """Whether 16-bit elements are loaded one by one."""
        uneven = self.odd or self.stride % 2 or self.kernel_size % 2 or self.dilation > 1 or self.sheared > 4
        return self.itemsize == 2 and bool(uneven)

    # Phases repeat ``period`` entries apart.

    @property
    def period(self) -> int:
        return self.kernel_size * self.sheared

    @property
    def phase_step(self) -> int:
        """Entries between stages' phases, modulo the period."""
        return self.entries % self.period if self.through else 0

    @property
    def row_step(self) -> int:
        """Map rows between stages' windows; one more where phases restart."""
        return self.entries // self.period if self.through else self.g_channels // self.sheared

    @property
    def table_entries(self) -> int:
        return self.period - gcd(self.entries, self.period) + self.entries if self.through else 0

    @property
    def table_bytes(self) -> int:
        """Bytes of an entry: its place, or also the next's."""
        return 8 if self.halves else 4

    @property
    def phases(self) -> range:
        return range(0, self.period, gcd(self.entries, self.period)) if self.through else range(1)

    @cached_property
    def piece(self) -> int:
        """Positions of a box: a multiple of 8 that evenly shares the tile's rows, or 0."""
        most = next((piece for piece in range(self.rows, 0, -8) if self._width(piece) <= LARGEST_BOX), 0)
        return -(-self.rows // -(-self.rows // most) // 8) * 8 if most else 0

    def _width(self, piece: int) -> int:
        return self.width_of(self._reach(piece) + (self.sheared - 1) * self.most_shear)

    def _reach(self, piece: int) -> int:
        return (piece - 1) * self.stride + (self.kernel_size - 1) * self.dilation + 1

    @property
    def reach(self) -> int:
        return self._reach(self.piece)

    @property
    def most_shear(self) -> int:
        vector = ALIGNMENT // self.itemsize
        return vector - vector // self.sheared

    @property
    def width(self) -> int:
        return self._width(self.piece)

    @property
    def boxes(self) -> int:
        return -(-self.rows // self.piece)

    @property
    def sums(self) -> int:
        return self.blocks * self.channels // 2

    def tiles_of(self, problem: Problem) -> Tiles:
        along = -(-problem.length // self.rows)
        across = -(-problem.in_channels_per_group // self.channels)
        return Tiles(along, across, problem.batch * problem.groups * along * across)

    def stages_of(self, problem: Problem) -> int:
        if self.through:
            return -(-problem.out_channels_per_group * self.kernel_size // self.entries)
        return -(-problem.out_channels_per_group // self.g_channels)


def entry_of(z, t, neighbours):
    """A lane's first entry for registers 0 and 1 (even ``z``) or 2 and 3 of product ``z // 2``."""
    return (4 * z + t) * neighbours


def place_of(entry, kernel_size, width, dilation, sheared, shear):
    """Elements from a position's first to ``entry``'s, in a box of rows of ``width``.

    Each row begins ``shear`` further right than the last, every ``sheared``-th like the first."""
    channel = entry // kernel_size
    return channel * width + channel % sheared * shear + entry % kernel_size * dilation
