"""Tiles of grad_input_wgmma: what they are, and which one a problem gets.

The letters of wgmma: m counts positions of a sample, n input channels of a group, and k entries, the pairs of an output
channel and a tap in the order in which the weight has them, over which the sums run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ..problem import Problem
from .grad_ring import CONSUMERS, MOST_CHANNELS, PRODUCTS, ROW, SHARED, STAGE_CLOCKS, Ring, deepest
from .tensor_map import ALIGNMENT, LARGEST_BOX
from .tensor_tile import DTYPES

MOST_SUMS = 160  # of a thread that multiplies
# Fitted likewise: clocks more of a stage, where only one warpgroup multiplies at a time; sums that a multiprocessor
# stores a clock, while it multiplies nothing.
TURN_CLOCKS, LEAVING = 200, 4


@dataclass(frozen=True)
class Config(Ring):
    precision: str
    stride: int
    dilation: int
    kernel_size: int
    odd: bool  # of the padding: windows begin at odd elements
    g_channels: int  # output channels of a stage
    blocks: int  # of 64 positions, of a warpgroup
    channels: int  # input channels of a tile
    in_turns: bool  # the warpgroups take tiles in turn, so that one stores while the other multiplies
    stages: int = 0

    alike = 1
    own_words = CONSUMERS  # mbarriers, one for each warpgroup's turns

    @property
    def entries(self) -> int:
        """Of a stage, that mean something."""
        return self.g_channels * self.kernel_size

    @property
    def halves(self) -> bool:
        """Whether the two 16-bit elements of a register are loaded one by one; else they are one word."""
        return self.itemsize == 2 and bool(self.odd or self.stride % 2 or self.kernel_size % 2 or self.dilation > 1)

    @cached_property
    def piece(self) -> int:
        """Positions whose elements one box holds: as many as a box of at most 256 elements a row can, but no more than
        share the tile's rows evenly; a multiple of 8. 0: not even 8."""
        most = next((piece for piece in range(self.rows, 0, -8) if self._width(piece) <= LARGEST_BOX), 0)
        return -(-self.rows // -(-self.rows // most) // 8) * 8 if most else 0

    def _width(self, piece: int) -> int:
        return self.width_of((piece - 1) * self.stride + (self.kernel_size - 1) * self.dilation + 1)

    @property
    def width(self) -> int:
        """Elements of a box's row."""
        return self._width(self.piece)

    @property
    def boxes(self) -> int:
        """Of grad_output, in a stage."""
        return -(-self.rows // self.piece)

    @property
    def sums(self) -> int:
        """Of a thread that multiplies."""
        return self.blocks * self.channels // 2

    def tiles(self, problem: Problem) -> tuple[int, int, int]:
        """Of a sample along positions; of a group along input channels; of the whole gradient."""
        along = -(-problem.length // self.rows)
        across = -(-problem.in_channels_per_group // self.channels)
        return along, across, problem.batch * problem.groups * along * across

    def stages_of(self, problem: Problem) -> int:
        """Stages of a tile."""
        return -(-problem.out_channels_per_group // self.g_channels)

    def clocks(self, problem: Problem) -> float:
        """Estimated clocks that a position of a sample keeps a multiprocessor, times those of a tile."""
        warpgroups = 1 if self.in_turns else CONSUMERS
        products = PRODUCTS * self.blocks * warpgroups
        operands = PRODUCTS * warpgroups * 4 * self._reads
        shared = operands + (products * self.channels * 32 + self.stage_bytes) / SHARED
        beside = STAGE_CLOCKS + (TURN_CLOCKS if self.in_turns else 0)
        multiplying = self.stages_of(problem) * (max(products * self.channels / 2, shared, self.arriving) + beside)
        storing = self.rows * self.channels / LEAVING
        return max(multiplying, storing) if self.in_turns else multiplying + storing

    @cached_property
    def _reads(self) -> float:
        """Clocks that shared memory takes to give a warp the operands of one product."""
        neighbours, clocks = 4 // self.itemsize, 0
        for half in range(2):
            for e in range(2 if self.halves else 1):
                entries = (min(entry_of(half, t, neighbours) + e, self.entries - 1) for t in range(4))
                places = [place_of(entry, self.kernel_size, self.width, self.dilation) for entry in entries]
                words = {(m * self.stride + place) * self.itemsize // 4 for m in range(8) for place in places}
                clocks += max(Counter(word % 32 for word in words).values())
        return 2 * self.blocks * clocks


# Plain functions of numbers, which the kernel calls too.


def entry_of(z, t, neighbours):
    """The entry, or the first of two neighbours, that a lane of t loads for register 0 and 1 (even ``z``) or 2 and 3 of
    product ``z // 2`` of a stage."""
    return (4 * z + t) * neighbours


def place_of(entry, kernel_size, width, dilation):
    """Elements from a position's first to the one that meets ``entry``, in a box of rows of ``width``."""
    return entry // kernel_size * width + entry % kernel_size * dilation


def stage_channels(problem: Problem, precision: str) -> int:
    """Output channels of a stage: as many as fill a row of weights. 0: there is no such number.

    A box of weights begins at a multiple of 16 bytes, so only the last stage has any number of taps; and with groups a
    stage must not take channels of the next group.
    """
    itemsize, channels = DTYPES[precision].itemsize, problem.out_channels_per_group
    for count in range(min(ROW // itemsize // problem.kernel_size, channels), 0, -1):
        aligned = count == channels or count * problem.kernel_size * itemsize % ALIGNMENT == 0
        if aligned and (problem.groups == 1 or channels % count == 0):
            return count
    return 0


@lru_cache(maxsize=1024)
def choose(problem: Problem, precision: str) -> Config | None:
    """The tile with the fewest estimated clocks; None if none fits. It depends on neither batch nor length."""
    return min(candidates(problem, precision), key=lambda c: _cost(problem, c), default=None)


def _cost(problem: Problem, config: Config) -> float:
    _, across, _ = config.tiles(problem)
    return across * config.clocks(problem) / config.rows


def candidates(problem: Problem, precision: str):
    """Every tile that fits in registers and shared memory."""
    p, g_channels = problem, stage_channels(problem, precision)
    for blocks in (1, 2) if g_channels else ():
        most = min(MOST_CHANNELS, 2 * MOST_SUMS // blocks // 8 * 8)
        across = -(-p.in_channels_per_group // most)
        channels = -(-p.in_channels_per_group // across // 8) * 8
        for in_turns in (False, True):
            taps = p.stride, p.dilation, p.kernel_size, p.padding % 2 == 1
            config = Config(precision, *taps, g_channels, blocks, channels, in_turns)
            if config.piece and (deep := deepest(config)):
                yield deep
