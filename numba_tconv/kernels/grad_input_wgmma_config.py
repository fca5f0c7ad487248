"""Tiles of grad_input_wgmma: what they are, and which one a problem gets.

The letters of wgmma: m counts positions of a sample, n input channels of a group, and k entries, the pairs of an output
channel and a tap in the order in which the weight has them, over which the sums run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ..problem import Problem
from .device import H200
from .tensor_map import ALIGNMENT, LARGEST_BOX
from .tensor_tile import DTYPES, KINDS

CONSUMERS = 2  # warpgroups that multiply
THREADS = (CONSUMERS + 1) * 128  # one warp of the last warpgroup copies
REGISTERS = 240, 24  # of a thread that multiplies, and of one that copies
BLOCK = 64  # positions of one product
ROW = 128  # bytes of a row of weights in a stage
PRODUCTS = 4  # along k, in a stage: each takes 32 bytes of a row
MOST_SUMS = 160  # of a thread that multiplies
MOST_CHANNELS = 256  # of one product
MOST_STAGES, FEWEST_STAGES = 8, 3
# Rates of a multiprocessor, a clock: bytes that arrive from L2, and bytes that leave to memory.
ARRIVING, LEAVING = 28, 16
STAGE_CLOCKS = 100  # that a stage takes beside its products


@dataclass(frozen=True)
class Config:
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

    @property
    def itemsize(self) -> int:
        return DTYPES[self.precision].itemsize

    @property
    def kind(self) -> str:
        return KINDS[self.precision][0]

    @property
    def positions(self) -> int:
        """Of a tile."""
        return BLOCK * self.blocks * (1 if self.in_turns else CONSUMERS)

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
        """Positions whose elements one box holds, for a box is at most 256 elements wide. 0: not even 8."""
        return next((piece for piece in (64, 32, 16, 8) if self._width(piece) <= LARGEST_BOX), 0)

    def _width(self, piece: int) -> int:
        vector = 16 // self.itemsize
        elements = (piece - 1) * self.stride + (self.kernel_size - 1) * self.dilation + 1
        # A box begins at a multiple of 16 bytes, which may be before the first element.
        return -(-(elements + vector - 1) // vector) * vector

    @property
    def width(self) -> int:
        """Elements of a box's row."""
        return self._width(self.piece)

    @property
    def boxes(self) -> int:
        """Of grad_output, in a stage."""
        return self.positions // self.piece

    @property
    def sums(self) -> int:
        """Of a thread that multiplies."""
        return self.blocks * self.channels // 2

    # A stage is rows of weights, a multiple of 1,024 bytes, and boxes of grad_output, each at a multiple of 128.

    @property
    def w_bytes(self) -> int:
        return self.channels * ROW

    @property
    def box_bytes(self) -> int:
        return self.g_channels * self.width * self.itemsize

    @property
    def spacing(self) -> int:
        """Bytes from one box to the next."""
        return -(-self.box_bytes // 128) * 128

    @property
    def slot(self) -> int:
        """Bytes from one stage to the next."""
        return -(-(self.w_bytes + self.boxes * self.spacing) // 1024) * 1024

    # Where things lie in shared memory, in bytes from the first multiple of 1,024: ring, mbarriers (two a stage and one
    # for each warpgroup's turns), a tensor map.

    @property
    def barriers(self) -> int:
        return self.stages * self.slot

    @property
    def map(self) -> int:
        return -(-(self.barriers + 16 * self.stages + 8 * CONSUMERS) // 128) * 128

    @property
    def shared_bytes(self) -> int:
        return 1024 + self.map + 128

    def tiles(self, problem: Problem) -> tuple[int, int, int]:
        """Of a sample along positions; of a group along input channels; of the whole gradient."""
        along = -(-problem.length // self.positions)
        across = -(-problem.in_channels_per_group // self.channels)
        return along, across, problem.batch * problem.groups * along * across

    def stages_of(self, problem: Problem) -> int:
        """Stages of a tile."""
        return -(-problem.out_channels_per_group // self.g_channels)

    def clocks(self, problem: Problem) -> float:
        """Estimated clocks that a position of a sample keeps a multiprocessor, times those of a tile."""
        products = PRODUCTS * self.blocks * (1 if self.in_turns else CONSUMERS)
        loading = (self.w_bytes + self.boxes * self.box_bytes) / ARRIVING
        multiplying = self.stages_of(problem) * (max(products * self.channels / 2, loading) + STAGE_CLOCKS)
        storing = self.positions * self.channels * self.itemsize / LEAVING
        return max(multiplying, storing) if self.in_turns else multiplying + storing


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
    return across * config.clocks(problem) / config.positions


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
            if config.piece and (deep := _deepest(config)):
                yield deep


def _deepest(config: Config) -> Config | None:
    """The configuration with as many stages as shared memory holds; None if they are too few."""
    rings = (replace(config, stages=stages) for stages in range(MOST_STAGES, FEWEST_STAGES - 1, -1))
    return next((ring for ring in rings if ring.shared_bytes <= H200.shared_per_block), None)
