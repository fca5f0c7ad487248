"""Tiles of tensor-core rungs: the rows and columns they compute, the outputs they own.

Letters as in k4_register_tile/tile.py. A tile is ``rows`` x COLUMNS; a column gives ``span`` outputs of each channel.

* Whole: all rows of a channel, one run with interleaved phases.
* By phases: a long stride, no dilation. Rows are phases, columns runs.
* Single: one row of taps, where neighbouring phases are columns apart.

A whole tile computes a few columns twice, so that runs begin and end on sectors, unless products outlast memory (not
``aligned``)."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

import torch

from numba_tconv.formula.precision import DTYPES, KINDS
from numba_tconv.formula.problem import Problem
from numba_tconv.formula.taps import Taps

COLUMNS = 128
ROWS = 128
SECTOR = 32  # bytes
ANY_LENGTH = 1 << 16
# Columns; wider windows spill.
WINDOW_LIMIT = {"tf32": 24, "tf32x3": 12, "fp16": 24, "bf16": 24}
MOST_SPLIT_TAPS = 5
LONGEST_STAGED_SPAN = 96


@dataclass(frozen=True)
class Tile:
    precision: str
    stride: int
    dilation: int
    tap_chunk: int  # taps of a window
    several_chunks: bool
    phases: int  # rows of a channel
    channels: int
    span: int
    round_channels: int  # staged together
    wide_outputs: bool = False  # float32 sums
    aligned: bool = True

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
        return torch.float32 if self.wide_outputs else self.dtype

    @property
    def kind(self) -> str:
        return KINDS[self.precision][0]

    @property
    def depth(self) -> int:
        """Channels of a product."""
        return KINDS[self.precision][1]

    @property
    def operand_halves(self) -> int:
        """Operand halves: 2 in tf32x3, else 1."""
        return KINDS[self.precision][2]

    @property
    def operand_size(self) -> int:
        """Bytes of a multiplied element."""
        return 4 if self.kind == "tf32" else 2

    @property
    def rows(self) -> int:
        """Rows, in whole core matrices."""
        return -(-self.channels * self.phases // 8) * 8

    @property
    def whole(self) -> bool:
        return self.span == self.stride

    @property
    def by_phases(self) -> bool:
        return not self.whole and self.dilation == 1

    @property
    def spread(self) -> int:
        """Staged outputs between phases of a column."""
        return self.dilation if self.whole else 1

    @property
    def row_parts(self) -> int:
        return 1 if self.whole else -(-self.taps.rows // self.phases)

    @property
    def reach(self) -> int:
        """Columns that a chunk reaches back."""
        return (self.tap_chunk - 1) * self.taps.step

    @property
    def halo(self) -> int:
        """Window columns before the lane's four, in fours."""
        return -(-self.reach // 4) * 4

    @property
    def lead(self) -> int:
        """Columns of a stage before the tile, in eights."""
        return -(-self.reach // 8) * 8

    @property
    def chunk_shift(self) -> int:
        """Columns between chunks' windows."""
        return self.tap_chunk * self.taps.step if self.several_chunks else 0

    @cached_property
    def sector(self) -> int:
        """Outputs in a sector; 1 if not aligned."""
        return SECTOR // self.out_dtype.itemsize if self.whole and self.aligned else 1

    @cached_property
    def overlap(self) -> int:
        """Columns before the tile's own, in eights: a run's first phases and early sector."""
        needed = _lag(self.taps) if self.whole else 0
        return -(-(needed + -(-(self.sector - 1) // self.span)) // 8) * 8

    @property
    def may_be_unaligned(self) -> bool:
        """Whether unaligned runs save columns."""
        return self.whole and self.out_dtype.itemsize == 4 and replace(self, aligned=False).overlap < self.overlap

    @cached_property
    def advance(self) -> int:
        return COLUMNS - self.overlap

    @property
    def depth_weights(self) -> int:
        return self.tap_chunk * self.operand_halves * self.rows * self.depth * self.operand_size

    # The staging buffer: float32, run after run.

    @property
    def rounds(self) -> int:
        return self.channels // self.round_channels

    @property
    def skip(self) -> int:
        """Unused elements after every 32, against bank conflicts."""
        return 0 if self.span == 1 else 8 if self.span % 4 == 0 else 4

    @property
    def reciprocal(self) -> int:
        """``m * reciprocal >> 16`` is ``m // phases`` for each row m."""
        return 65536 // self.phases + 1

    @property
    def pitch(self) -> int:
        run = COLUMNS * self.span + (self.spread * (self.phases - 1) if self.whole else 0)
        return -(-(staged_at(run, self.skip) + 4 + self.skip) // 4) * 4

    @property
    def staging(self) -> int:
        runs = self.rows // self.rounds if self.span == 1 else self.round_channels
        return -(-runs * self.pitch // 4) * 4

    @property
    def has_gaps(self) -> bool:
        """Whether some outputs, staged as zeros, have no row."""
        return self.span != self.phases

    def columns(self, problem: Problem) -> tuple[int, int]:
        """First column, and columns a sample, in eights."""
        t = problem.taps
        columns = t.columns(problem.length, problem.out_length, problem.padding)
        # Zeros between samples cover all taps' reach.
        stop = max(columns.stop, problem.length + (self.tap_chunks(problem) * self.tap_chunk - 1) * t.step)
        first = columns.start // 8 * 8
        return first, -(-(stop - first) // 8) * 8

    def column_tiles(self, problem: Problem) -> int:
        return self.tiles_along(problem.batch * self.columns(problem)[1])

    def tiles_along(self, columns: int) -> int:
        return -(-(columns + -(-(self.sector - 1) // self.span)) // self.advance)

    def row_tiles(self, problem: Problem) -> int:
        return -(-problem.out_channels_per_group // self.channels) * self.row_parts

    def tap_chunks(self, problem: Problem) -> int:
        return -(-problem.taps.taps_per_row // self.tap_chunk)

    def last_taps(self, problem: Problem) -> int:
        return problem.taps.taps_per_row - (self.tap_chunks(problem) - 1) * self.tap_chunk

    def channel_chunks(self, problem: Problem) -> int:
        return -(-problem.in_channels_per_group // self.depth)


def staged_at(u, skip):
    """Offset of output ``u`` of a run."""
    return u + (u >> 5) * skip


def _lag(taps: Taps) -> int:
    """Columns that a stride's outputs span."""
    return ((taps.rows - 1) * taps.dilation + taps.gap - 1) // taps.stride


def _row_shape(problem: Problem, most_rows: int) -> tuple[int, int] | None:
    """Phases and span."""
    t, s, d = problem.taps, problem.stride, problem.dilation
    needed = _lag(t)
    active = min(t.rows, problem.kernel_size)
    if s <= LONGEST_STAGED_SPAN and needed <= COLUMNS // 4 and active <= most_rows:
        return active, s
    if d == 1:
        return min(s, most_rows), min(s, most_rows)
    return (1, t.gap) if t.gap <= LONGEST_STAGED_SPAN else None


def _tap_chunk(problem: Problem, precision: str, limit: int) -> int:
    """Taps of a window: a whole row, or a chunk with few missing."""
    t, itemsize = problem.taps, DTYPES[precision].itemsize
    split = KINDS[precision][2] == 2
    most = min(t.taps_per_row, MOST_SPLIT_TAPS) if split else t.taps_per_row
    fitting = [1, *takewhile(lambda c: 4 + -(-(c - 1) * t.step // 4) * 4 <= limit, range(2, most + 1))]
    if fitting[-1] == t.taps_per_row:
        return fitting[-1]

    of_chunk = 1 if split else 0.5  # split operands: additions on CUDA cores

    def cost(chunk):
        chunks = -(-t.taps_per_row // chunk)
        taps = t.taps_per_row if split else chunks * chunk
        return taps * (1 if chunk * t.step * itemsize % 16 == 0 else 1.25) + chunks * of_chunk

    return min(fitting, key=cost)


def at_any_length(problem: Problem) -> Problem:
    """One long sample: lengths share kernels."""
    length = max(ANY_LENGTH, problem.layer.length)
    return replace(problem, batch=1, length=length, output_padding=max(problem.output_padding, 0))


def make_tile(problem: Problem, precision: str, most_rows: int = ROWS, widest_window: int | None = None) -> Tile | None:
    """The tile of at most ``most_rows``; ``widest_window``: columns."""
    shape = _row_shape(problem, most_rows)
    chunk = _tap_chunk(problem, precision, widest_window or WINDOW_LIMIT[precision])
    if shape is None:
        return None
    phases, span = shape
    fewest = 8 // math.gcd(8, phases)
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
    fewest = tile.round_channels
    return [c for c in range(tile.channels, 0, -fewest) if tile.channels % c == 0 and c % fewest == 0]
