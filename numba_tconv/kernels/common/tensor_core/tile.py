"""What a tile of the tensor-core rungs is: which rows and columns it computes, and which outputs it owns.

The letters are those of kernels/k4_register_tile/tile.py: m counts rows (output channel, row of taps), n columns
(positions of all samples laid end to end), k input channels. Here a tile is ``rows`` x COLUMNS, and a product takes
``depth`` channels.

**Outputs of a tile.** A column contributes ``span`` consecutive outputs to each channel of the tile. Three shapes:

* Whole: all rows of a channel lie in one tile and span = stride: the phases interleave in the staging buffer, and a
  channel's outputs leave as one run.
* Part: a long stride, no dilation: a tile takes as many phases as it has rows, and a column leaves as one run of them.
* Single: stride and dilation so far apart that the phases of neighbouring outputs belong to columns far away: a tile
  takes one row of taps, whose outputs lie ``stride`` apart.

**Aligned runs.** Memory is written in sectors of 32 bytes, and a sector that is written in two pieces costs a read and
two writes. So, in the whole shape, a tile computes a few columns twice: it advances by fewer columns than it computes,
and each channel's run begins and ends on a sector, wherever the rows of the output begin. Where products take longer
than memory, a tile that computes no column twice is better (``aligned`` is false).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from numba_tconv.formula.precision import DTYPES, KINDS
from numba_tconv.formula.problem import Problem
from numba_tconv.formula.taps import Taps

COLUMNS = 128
ROWS = 128  # of a tile, at most
SECTOR = 32  # bytes
ANY_LENGTH = 1 << 16  # of a signal, where it does not count
# Columns of a window that a lane holds in registers, two each; in tf32x3 four. There, if the lane splits them, the
# compiler spills with more.
WINDOW_LIMIT = {"tf32": 24, "tf32x3": 12, "fp16": 24, "bf16": 24}
MOST_TAPS_OF_PARTS = 5
LONGEST_STAGED_SPAN = 96


@dataclass(frozen=True)
class Tile:
    precision: str
    stride: int
    dilation: int
    tap_chunk: int  # taps of a row that share one window
    several_chunks: bool  # a row has more taps than one chunk
    phases: int  # rows of one output channel in a tile
    channels: int  # output channels in a tile
    span: int  # outputs that one column contributes to a channel
    round_channels: int  # output channels that are staged together
    wide_outputs: bool = False  # float32, of 16-bit operands: parts of sums (kernels/common/channel_parts.py)
    aligned: bool = True  # runs begin and end on sectors

    @cached_property
    def taps(self) -> Taps:
        return Taps(1, self.stride, self.dilation)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @cached_property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def out_dtype(self) -> torch.dtype:
        """Of the outputs."""
        return torch.float32 if self.wide_outputs else self.dtype

    @property
    def kind(self) -> str:
        """The type of the operands, as PTX calls it."""
        return KINDS[self.precision][0]

    @property
    def depth(self) -> int:
        """Channels of one product."""
        return KINDS[self.precision][1]

    @property
    def parts(self) -> int:
        """Terms that an operand is split into: 2 for tf32x3 (split_operand.py)."""
        return KINDS[self.precision][2]

    @property
    def operand_size(self) -> int:
        """Bytes of an operand of a product."""
        return 4 if self.kind == "tf32" else 2

    @property
    def rows(self) -> int:
        """Rows of the tile: a whole number of core matrices."""
        return -(-self.channels * self.phases // 8) * 8

    @property
    def whole(self) -> bool:
        """A channel's outputs leave as one run."""
        return self.span == self.stride

    @property
    def part(self) -> bool:
        """Of a long stride the tile has neighbouring phases of one channel: each column is a run of its own."""
        return not self.whole and self.dilation == 1

    @property
    def spread(self) -> int:
        """Outputs between two phases of one column, in the staging buffer."""
        return self.dilation if self.whole else 1

    @property
    def row_parts(self) -> int:
        """Tiles that share the rows of one output channel."""
        return 1 if self.whole else -(-self.taps.rows // self.phases)

    @property
    def reach(self) -> int:
        """Columns that the taps of a chunk reach back."""
        return (self.tap_chunk - 1) * self.taps.step

    @property
    def halo(self) -> int:
        """Columns before its own four that a lane's window holds, a multiple of four."""
        return -(-self.reach // 4) * 4

    @property
    def lead(self) -> int:
        """Columns before the tile in the stage: those that its taps reach; a multiple of eight."""
        return -(-self.reach // 8) * 8

    @property
    def chunk_shift(self) -> int:
        """Columns between the windows of two successive tap chunks."""
        return self.tap_chunk * self.taps.step if self.several_chunks else 0

    @cached_property
    def sector(self) -> int:
        """Outputs in a sector; 1 where runs are not aligned."""
        return SECTOR // self.out_dtype.itemsize if self.whole and self.aligned else 1

    @cached_property
    def overlap(self) -> int:
        """Columns that a tile computes before the outputs it owns, a multiple of eight: those of which an output of
        the run needs phases, and those of a run that begins up to one sector early."""
        needed = _lag(self.taps) if self.whole else 0
        return -(-(needed + -(-(self.sector - 1) // self.span)) // 8) * 8

    @property
    def may_be_unaligned(self) -> bool:
        """Computing no column twice spares columns, and the lanes of a warp can write runs that begin anywhere: of
        16-bit outputs they write two at least."""
        return self.whole and self.out_dtype.itemsize == 4 and replace(self, aligned=False).overlap < self.overlap

    @cached_property
    def advance(self) -> int:
        """Columns between two tiles."""
        return COLUMNS - self.overlap

    @property
    def depth_weights(self) -> int:
        """Bytes of packed weights for one product's depth, with all taps of a chunk."""
        return self.tap_chunk * self.parts * self.rows * self.depth * self.operand_size

    # The staging buffer: float32, a run of a channel after another.

    @property
    def rounds(self) -> int:
        return self.channels // self.round_channels

    @property
    def skip(self) -> int:
        """Unused elements after every 32 of a run (``staged_at``): they spread the phases of neighbouring columns over
        the banks."""
        return 0 if self.span == 1 else 8 if self.span % 4 == 0 else 4

    @property
    def reciprocal(self) -> int:
        """``m * reciprocal >> 16`` is ``m // phases`` for every row m of a tile: a quotient without a division."""
        return 65536 // self.phases + 1

    @property
    def pitch(self) -> int:
        """Elements from one channel's run to the next."""
        run = COLUMNS * self.span + (self.spread * (self.phases - 1) if self.whole else 0)
        return -(-(staged_at(run, self.skip) + 4 + self.skip) // 4) * 4

    @property
    def staging(self) -> int:
        """Elements of the staging buffer, a multiple of four."""
        runs = self.rows // self.rounds if self.span == 1 else self.round_channels
        return -(-runs * self.pitch // 4) * 4

    @property
    def empty_slots(self) -> bool:
        """Some outputs of a run are reached by no row of the tile: they are staged as zeros, once."""
        return self.span != self.phases

    def columns(self, problem: Problem) -> tuple[int, int]:
        """First column, and columns a sample; multiples of eight, so that vectors of x begin on sectors."""
        t = problem.taps
        columns = t.columns(problem.length, problem.out_length, problem.padding)
        # The zeros between two samples must be as many as the taps of the last chunk reach back, existing or not.
        stop = max(columns.stop, problem.length + (self.tap_chunks(problem) * self.tap_chunk - 1) * t.step)
        first = columns.start // 8 * 8
        return first, -(-(stop - first) // 8) * 8

    def column_tiles(self, problem: Problem) -> int:
        return self.tiles_along(problem.batch * self.columns(problem)[1])

    def tiles_along(self, columns: int) -> int:
        """Tiles along the columns of all samples; the last run may end a sector early, so there is one more where that
        matters."""
        return -(-(columns + -(-(self.sector - 1) // self.span)) // self.advance)

    def row_tiles(self, problem: Problem) -> int:
        """Tiles along the rows of one group."""
        return -(-problem.out_channels_per_group // self.channels) * self.row_parts

    def tap_chunks(self, problem: Problem) -> int:
        return -(-problem.taps.taps_per_row // self.tap_chunk)

    def last_taps(self, problem: Problem) -> int:
        """Taps of the last chunk, of the longest row."""
        return problem.taps.taps_per_row - (self.tap_chunks(problem) - 1) * self.tap_chunk

    def channel_chunks(self, problem: Problem) -> int:
        return -(-problem.in_channels_per_group // self.depth)


def staged_at(u, skip):
    """Where output ``u`` of a run stands in the run's part of the staging buffer; kernels call it too."""
    return u + (u >> 5) * skip


def _lag(taps: Taps) -> int:
    """Columns from the first to the last that the outputs of one stride need, if each has its own row of taps."""
    return ((taps.rows - 1) * taps.dilation + taps.gap - 1) // taps.stride


def _row_shape(problem: Problem, most_rows: int) -> tuple[int, int] | None:
    """Phases in a tile and span; None if there is no tile for the problem."""
    t, s, d = problem.taps, problem.stride, problem.dilation
    needed = _lag(t)
    active = min(t.rows, problem.kernel_size)
    if s <= LONGEST_STAGED_SPAN and needed <= COLUMNS // 4 and active <= most_rows:
        return active, s
    if d == 1:
        return min(s, most_rows), min(s, most_rows)
    return (1, t.gap) if t.gap <= LONGEST_STAGED_SPAN else None


def _tap_chunk(problem: Problem, precision: str, limit: int) -> int:
    """Taps of a row that share a window: all of them, if a lane can hold their window, else as many as leave the fewest
    taps that do not exist and, if possible, windows that begin where x can be copied in 16 bytes."""
    t, itemsize = problem.taps, DTYPES[precision].itemsize
    split = KINDS[precision][2] == 2
    most = min(t.taps_per_row, MOST_TAPS_OF_PARTS) if split else t.taps_per_row
    fitting = [c for c in range(1, most + 1) if c == 1 or 4 + -(-(c - 1) * t.step // 4) * 4 <= limit]
    if fitting[-1] == t.taps_per_row:
        return fitting[-1]

    # Of split operands the sums of every chunk are added up on CUDA cores, and taps that do not exist are left out. Of
    # TF32, split by the lanes that multiply, kb74's five taps, three apart, took 1.51 ms one by one, 1.36 by twos, 1.22
    # to 1.24 by threes (H200, a script; no recorded rows).
    of_chunk = 1 if split else 0.5

    def cost(chunk):
        chunks = -(-t.taps_per_row // chunk)
        taps = t.taps_per_row if split else chunks * chunk
        return taps * (1 if chunk * t.step * itemsize % 16 == 0 else 1.25) + chunks * of_chunk

    return min(fitting, key=cost)


def make_tile(problem: Problem, precision: str, most_rows: int = ROWS, widest_window: int | None = None) -> Tile | None:
    """The tile of a problem with at most ``most_rows`` rows, and windows of ``widest_window`` columns, if not of
    WINDOW_LIMIT; None where a problem has no tile."""
    shape = _row_shape(problem, most_rows)
    chunk = _tap_chunk(problem, precision, widest_window or WINDOW_LIMIT[precision])
    if shape is None:
        return None
    phases, span = shape
    fewest = 8 // math.gcd(8, phases)  # channels whose rows fill whole core matrices
    most = max(1, most_rows // phases)
    if most >= fewest:
        most = most // fewest * fewest
    tiles = -(-problem.out_channels_per_group // most)
    channels = -(-problem.out_channels_per_group // tiles)
    if channels > fewest:
        channels = -(-channels // fewest) * fewest
    return Tile(
        *(precision, problem.stride, problem.dilation, chunk, chunk < problem.taps.taps_per_row),
        *(phases, channels, span, fewest if channels % fewest == 0 else channels),
    )


def round_sizes(tile: Tile) -> list[int]:
    """How many channels may be staged together, the most first: those that divide the tile into equal rounds."""
    fewest = tile.round_channels
    return [c for c in range(tile.channels, 0, -fewest) if tile.channels % c == 0 and c % fewest == 0]
