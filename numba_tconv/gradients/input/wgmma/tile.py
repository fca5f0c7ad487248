"""Tiles of grad_input_wgmma, and where a lane reads in a window.

m counts positions of a sample, n input channels of a group, and k entries: pairs of an output channel and a tap in the
weight's order, over which the sums run. A stage's entries fill a row of weights. Where that is not whole channels,
stages run on through the channels: each begins ``phase`` entries after the first of its windows' first channel
(operands.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.wgmma_ring import CONSUMERS, ROW, Ring
from numba_tconv.kernels.common.tensor_map import ALIGNMENT, LARGEST_BOX


@dataclass(frozen=True)
class Config(Ring):
    precision: str
    stride: int
    dilation: int
    kernel_size: int
    odd: bool  # padding is odd: windows begin at odd elements
    sheared: int  # channels so far apart have rows alike modulo 16 bytes, for one sheared map
    clears: bool  # windows hold memory beside their rows, as zeros
    through: bool  # stages run on through the channels
    g_channels: int  # output channels of a stage's windows
    blocks: int  # blocks of 64 positions, of a warpgroup
    channels: int  # input channels of a tile
    alternate: bool  # ping-pong: warpgroups take alternate tiles, and one stores while the other multiplies
    stages: int = 0
    partial: bool = False  # a part's sums, stored as float32

    alike = 1  # one box holds all rows

    @property
    def dtype(self):
        """The tensors' dtype."""
        return DTYPES[self.precision]

    @property
    def own_words(self) -> int:
        """64-bit words for mbarriers, one for each warpgroup's turns, and for the table of places."""
        return CONSUMERS + -(-self.table_entries * self.table_bytes // 8)

    @property
    def entries(self) -> int:
        """Entries of a stage, without padding."""
        return ROW // self.itemsize if self.through else self.g_channels * self.kernel_size

    @property
    def halves(self) -> bool:
        """Whether the two 16-bit elements of a register are loaded one by one; otherwise they are one word."""
        uneven = self.odd or self.stride % 2 or self.kernel_size % 2 or self.dilation > 1 or self.sheared > 4
        return self.itemsize == 2 and bool(uneven)

    # Stages that run through the channels have equal phases ``period`` entries apart, where windows begin alike again.

    @property
    def period(self) -> int:
        return self.kernel_size * self.sheared

    @property
    def phase_step(self) -> int:
        """Entries between the phases of two stages, modulo the period."""
        return self.entries % self.period if self.through else 0

    @property
    def row_step(self) -> int:
        """Map rows between two stages' windows; one more where the phases begin anew."""
        return self.entries // self.period if self.through else self.g_channels // self.sheared

    @property
    def table_entries(self) -> int:
        """Entries of the table of places; the stage with the latest phase uses the last ones."""
        return self.period - gcd(self.entries, self.period) + self.entries if self.through else 0

    @property
    def table_bytes(self) -> int:
        """Bytes of a table entry: one place, or its own and the next one's."""
        return 8 if self.halves else 4

    @property
    def phases(self) -> range:
        """The phases of all stages."""
        return range(0, self.period, gcd(self.entries, self.period)) if self.through else range(1)

    @cached_property
    def piece(self) -> int:
        """Positions whose elements one box holds: a multiple of 8 that shares the tile's rows evenly; 0 if not even 8
        fit."""
        most = next((piece for piece in range(self.rows, 0, -8) if self._width(piece) <= LARGEST_BOX), 0)
        return -(-self.rows // -(-self.rows // most) // 8) * 8 if most else 0

    def _width(self, piece: int) -> int:
        return self.width_of(self._reach(piece) + (self.sheared - 1) * self.most_shear)

    def _reach(self, piece: int) -> int:
        return (piece - 1) * self.stride + (self.kernel_size - 1) * self.dilation + 1

    @property
    def reach(self) -> int:
        """Elements of a box's row that the positions of a piece span."""
        return self._reach(self.piece)

    @property
    def most_shear(self) -> int:
        """The most elements by which a row stands further to the right than its predecessor."""
        vector = ALIGNMENT // self.itemsize
        return vector - vector // self.sheared

    @property
    def width(self) -> int:
        """Elements of a box's row."""
        return self._width(self.piece)

    @property
    def boxes(self) -> int:
        """Boxes of grad_output in a stage."""
        return -(-self.rows // self.piece)

    @property
    def sums(self) -> int:
        """Sums of a consumer thread."""
        return self.blocks * self.channels // 2

    def tiles(self, problem: Problem) -> tuple[int, int, int]:
        """Tiles of a sample along positions, of a group along input channels, and of the whole gradient."""
        along = -(-problem.length // self.rows)
        across = -(-problem.in_channels_per_group // self.channels)
        return along, across, problem.batch * problem.groups * along * across

    def stages_of(self, problem: Problem) -> int:
        """Stages of a tile."""
        if self.through:
            return -(-problem.out_channels_per_group * self.kernel_size // self.entries)
        return -(-problem.out_channels_per_group // self.g_channels)


# Plain functions, which the kernel calls too.


def entry_of(z, t, neighbours):
    """The first entry that a lane of t loads for registers 0 and 1 (even ``z``) or 2 and 3 of product ``z // 2``."""
    return (4 * z + t) * neighbours


def place_of(entry, kernel_size, width, dilation, sheared, shear):
    """Elements from a position's first to the one that meets ``entry``, in a box of rows of ``width``.

    Each row begins ``shear`` further to the right than its predecessor, but every ``sheared``-th one like the first."""
    channel = entry // kernel_size
    return channel * width + channel % sheared * shear + entry % kernel_size * dilation
