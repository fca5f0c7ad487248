"""Configurations of k5: how a tile is dealt out to warps, and what a block holds. choose.py chooses them.

A block computes ``tiles`` neighbouring tiles (kernels/common/tensor_core/tile.py) from the same weights. Two warps
share the columns of a tile, 64 each; the rows are dealt out in fragments of 16, ``fragments`` of them to a warp."""

from __future__ import annotations

from dataclasses import dataclass

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_core.store_rows import ROUND_ROWS
from numba_tconv.kernels.common.tensor_core.tile import COLUMNS, Tile

WARP_COLUMNS = 64
RUN = 8  # consecutive columns that a lane owns: one of each product of 8 columns
COLUMN_WARPS = COLUMNS // WARP_COLUMNS
# A lane's, beside sums and window. With fewer patch had three blocks a multiprocessor, whose kernels spilled registers,
# and took 1.2 times as long in bfloat16 (H100, a script; no recorded rows).
OTHER_REGISTERS = {1: 32, 2: 52}
MOST_STORES = 16  # of a warp, in one piece of code


@dataclass(frozen=True)
class MmaTile(Tile):
    """A tile whose rows are a whole number of fragments for every warp."""

    row_unit: int = 16

    @property
    def rows(self) -> int:
        return -(-self.channels * self.phases // self.row_unit) * self.row_unit


@dataclass(frozen=True)
class Config:
    tile: MmaTile
    fragments: int  # of 16 rows, in a warp
    tiles: int  # neighbouring tiles of a block, which share its weights
    chunks: int  # products' depths of a stage
    stages: int
    min_blocks: int  # blocks that must fit on a multiprocessor: the register budget
    x_vector: int  # elements of x that one copy takes: 16 bytes or 4
    # Of a block whose weights stay in shared memory: bytes of all of them, and teams of warps; else 0 and 1.
    resident_weights: int = 0
    teams: int = 1
    in_steps: bool = True  # windows may lie within a sample's signal, where a thread's copies follow in steps

    @property
    def row_warps(self) -> int:
        return self.tile.rows // (16 * self.fragments)

    @property
    def tile_warps(self) -> int:
        """Warps that compute and store one tile."""
        return self.row_warps * COLUMN_WARPS

    @property
    def threads(self) -> int:
        return 32 * self.tile_warps * self.tiles * self.teams

    @property
    def halo(self) -> int:
        """Columns before its own that a lane's window holds: whole 16-byte vectors."""
        vector = 16 // self.tile.itemsize
        return -(-self.tile.reach // vector) * vector

    @property
    def window(self) -> int:
        return RUN + self.halo

    @property
    def depth(self) -> int:
        """Channels of a stage."""
        return self.tile.depth * self.chunks

    @property
    def width(self) -> int:
        """Columns of x in a stage."""
        return self.tile.lead + COLUMNS + (self.tiles - 1) * self.tile.advance

    @property
    def by_words(self) -> bool:
        """Rows of x begin anywhere (producer.py)."""
        return self.x_vector * self.tile.itemsize == 4

    @property
    def turned(self) -> bool:
        """They may begin within a word."""
        return self.by_words and self.tile.itemsize == 2

    @property
    def pitch(self) -> int:
        """Elements from one channel of a stage to the next, so that the 16-byte vectors of a quarter-warp, two runs of
        four channels, lie in different banks (see ``run_of``)."""
        suits = (lambda p: p % 8 == 4) if self.tile.itemsize == 4 else (lambda p: p % 32 in (8, 24))
        least = self.copies_a_row * self.x_vector
        return next(p for p in range(least, least + 32) if suits(p))

    @property
    def x_stage(self) -> int:
        """Bytes of x in a stage."""
        return self.depth * self.pitch * self.tile.itemsize

    @property
    def w_stage(self) -> int:
        """Bytes of weights in a stage."""
        return self.chunks * self.tile.depth_weights

    @property
    def copies_a_row(self) -> int:
        return self.width // self.x_vector + self.turned

    @property
    def by_rows(self) -> bool:
        """The rows of a tile leave eight at a time (kernels/common/tensor_core/store_rows.py), as many from each
        warp."""
        tile = self.tile
        fill = ROUND_ROWS % self.tile_warps == 0 and tile.staging >= ROUND_ROWS * tile.pitch
        return fill and tile.whole and tile.span == 1 and tile.itemsize == 4

    @property
    def round_bytes(self) -> int:
        """Of the buffer of eight rows, where they leave in rounds. Beyond its last row lanes read, by less than a
        vector, what they do not write."""
        return ROUND_ROWS * self.tile.pitch * 4 + 16

    @property
    def staging_bytes(self) -> int:
        """Of a tile's staging buffer, or of two for rounds."""
        return self.tile.staging * 4 + (32 if self.by_rows else 0)

    @property
    def staging_buffers(self) -> int:
        """For rounds of rows."""
        return min(2, self.staging_bytes // self.round_bytes)

    @property
    def row_lanes(self) -> int:
        """Lanes of a team that copy one row of a stage: those that make the fewest copies of a thread. Of words, twice
        as many for 16-bit elements, of six layers 2% faster so; float32 took as long with 32 lanes, but kb74, whose
        kernel then spills registers, 5% longer (H100, a script; no recorded rows)."""
        of_team = self.threads // self.teams
        if self.by_words:
            return 32 if self.turned else 16

        def copies(lanes):
            return -(-self.depth // (of_team // lanes)) * -(-self.copies_a_row // lanes)

        return min((32, 16, 8, 4), key=copies)

    @property
    def rows_at_once(self) -> int:
        """Rows of a stage that a team copies at a time."""
        return self.threads // self.teams // self.row_lanes

    @property
    def row_copies(self) -> int:
        """Copies that a lane makes of a row."""
        return -(-self.copies_a_row // self.row_lanes)

    @property
    def team_bytes(self) -> int:
        """Of shared memory, for a team of its own: a ring of inputs and a staging buffer."""
        return self.stages * self.x_stage + self.staging_bytes

    @property
    def channels_at_once(self) -> int:
        """Channels that the warps of a tile store at a time: few steps of straight-line code, no warp without work."""
        steps = self.tile.advance * self.tile.span * self.tile.itemsize // 128
        most = max(1, MOST_STORES // max(1, steps))  # channels of a warp
        rounds = {c: -(-c // self.tile_warps) for c in range(1, self.tile.round_channels + 1)}
        fitting = [c for c, r in rounds.items() if self.tile.round_channels % c == 0 and r <= most]
        return max(fitting, key=lambda c: (c / rounds[c], c))

    @property
    def table_entries(self) -> int:
        """Vectors of a row or, where they would be words, elements."""
        return self.width if self.by_words else self.copies_a_row

    @property
    def table(self) -> int:
        """Where the table of the window's sources lies in shared memory, 16 bytes an entry: behind the stages."""
        return self.stages * (self.x_stage + self.w_stage)

    @property
    def shared_bytes(self) -> int:
        """The staging buffers lie where the stages were, unless weights are resident."""
        if self.resident_weights:
            return self.resident_weights + self.teams * self.team_bytes
        return max(self.table + self.table_entries * 16, self.tiles * self.staging_bytes)

    @property
    def registers(self) -> int:
        """About the registers that a lane needs."""
        parts = self.tile.parts
        return parts * (self.fragments * RUN * 4 + 2 * self.window) + OTHER_REGISTERS[parts]

    def channel_chunks(self, problem: Problem) -> int:
        """Products' depths of a tap chunk: whole stages; the channels beyond the last are zeros."""
        return -(-self.tile.channel_chunks(problem) // self.chunks) * self.chunks


def run_of(g, itemsize):
    """Which of a warp's eight runs of columns means column ``g`` of a product.

    Even columns take the first four runs and odd ones the last four, so that a lane's sums (columns 2*t and 2*t + 1) of
    t = 0, 1, 2, 3 lie eight banks apart. Odd columns are turned by two runs (4-byte elements) or one (2-byte elements),
    so that the two columns and four channels that a quarter-warp reads at once lie in different banks.
    """
    return g >> 1 ^ (g & 1) * (6 if itemsize == 4 else 5)
