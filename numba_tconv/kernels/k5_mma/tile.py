"""Configurations: two warps share a tile's columns; rows come in fragments of 16."""

from dataclasses import dataclass

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_core.store_rows import ROUND_ROWS
from numba_tconv.kernels.common.tensor_core.tile import COLUMNS, Tile

WARP_COLUMNS = 64
RUN = 8  # columns of a lane
COLUMN_WARPS = COLUMNS // WARP_COLUMNS
# Besides sums and windows, by operand halves.
OTHER_REGISTERS = {1: 32, 2: 52}
MOST_STORES = 16  # unrolled


@dataclass(frozen=True)
class MmaTile(Tile):
    row_unit: int = 16

    @property
    def rows(self) -> int:
        return -(-self.channels * self.phases // self.row_unit) * self.row_unit


@dataclass(frozen=True)
class Config:
    tile: MmaTile
    fragments: int  # of 16 rows in a warp
    tiles: int  # of a block
    chunks: int  # depths of a stage
    stages: int
    min_blocks: int  # the register budget
    x_vector: int  # elements of a copy: 16 bytes or 4
    resident_weights: int = 0  # bytes; 0: streamed
    teams: int = 1
    in_steps: bool = True  # windows within a signal are copied in steps

    @property
    def row_warps(self) -> int:
        return self.tile.rows // (16 * self.fragments)

    @property
    def tile_warps(self) -> int:
        return self.row_warps * COLUMN_WARPS

    @property
    def threads(self) -> int:
        return 32 * self.tile_warps * self.tiles * self.teams

    @property
    def halo(self) -> int:
        """Columns before the lane's own, in vectors."""
        vector = 16 // self.tile.itemsize
        return -(-self.tile.reach // vector) * vector

    @property
    def window(self) -> int:
        return RUN + self.halo

    @property
    def depth(self) -> int:
        return self.tile.depth * self.chunks

    @property
    def width(self) -> int:
        return self.tile.lead + COLUMNS + (self.tiles - 1) * self.tile.advance

    @property
    def by_words(self) -> bool:
        """Whether rows of x may begin anywhere."""
        return self.x_vector * self.tile.itemsize == 4

    @property
    def shifted(self) -> bool:
        """Whether rows of x may begin within a word."""
        return self.by_words and self.tile.itemsize == 2

    @property
    def pitch(self) -> int:
        """Elements between channels, against bank conflicts."""
        suits = (lambda p: p % 8 == 4) if self.tile.itemsize == 4 else (lambda p: p % 32 in (8, 24))
        least = self.copies_a_row * self.x_vector
        return next(p for p in range(least, least + 32) if suits(p))

    @property
    def x_stage(self) -> int:
        """Bytes of x in a stage."""
        return self.depth * self.pitch * self.tile.itemsize

    @property
    def w_stage(self) -> int:
        return self.chunks * self.tile.depth_weights

    @property
    def copies_a_row(self) -> int:
        return self.width // self.x_vector + self.shifted

    @property
    def by_rows(self) -> bool:
        """Stored by store_rows.py."""
        tile = self.tile
        fill = ROUND_ROWS % self.tile_warps == 0 and tile.staging >= ROUND_ROWS * tile.pitch
        return fill and tile.whole and tile.span == 1 and tile.itemsize == 4

    @property
    def round_bytes(self) -> int:
        """Bytes of eight rows, and reads beyond."""
        return ROUND_ROWS * self.tile.pitch * 4 + 16

    @property
    def staging_bytes(self) -> int:
        return self.tile.staging * 4 + (32 if self.by_rows else 0)

    @property
    def staging_buffers(self) -> int:
        """Buffers of eight rows."""
        return min(2, self.staging_bytes // self.round_bytes)

    @property
    def row_lanes(self) -> int:
        of_team = self.threads // self.teams
        if self.by_words:
            return 32 if self.shifted else 16

        def copies(lanes):
            return -(-self.depth // (of_team // lanes)) * -(-self.copies_a_row // lanes)

        return min((32, 16, 8, 4), key=copies)

    @property
    def rows_at_once(self) -> int:
        return self.threads // self.teams // self.row_lanes

    @property
    def row_copies(self) -> int:
        return -(-self.copies_a_row // self.row_lanes)

    @property
    def team_bytes(self) -> int:
        return self.stages * self.x_stage + self.staging_bytes

    @property
    def channels_at_once(self) -> int:
        steps = self.tile.advance * self.tile.span * self.tile.itemsize // 128
        most = max(1, MOST_STORES // max(1, steps))
        rounds = {c: -(-c // self.tile_warps) for c in range(1, self.tile.round_channels + 1)}
        fitting = [c for c, r in rounds.items() if self.tile.round_channels % c == 0 and r <= most]
        return max(fitting, key=lambda c: (c / rounds[c], c))

    @property
    def table_entries(self) -> int:
        """Entries of 16 bytes."""
        return self.width if self.by_words else self.copies_a_row

    @property
    def table(self) -> int:
        """Byte offset."""
        return self.stages * (self.x_stage + self.w_stage)

    @property
    def shared_bytes(self) -> int:
        """Streamed: staging reuses the stages."""
        if self.resident_weights:
            return self.resident_weights + self.teams * self.team_bytes
        return max(self.table + self.table_entries * 16, self.tiles * self.staging_bytes)

    @property
    def registers(self) -> int:
        halves = self.tile.operand_halves
        return halves * (self.fragments * RUN * 4 + 2 * self.window) + OTHER_REGISTERS[halves]

    def channel_chunks(self, problem: Problem) -> int:
        """Depths of a tap chunk."""
        return -(-self.tile.channel_chunks(problem) // self.chunks) * self.chunks


def run_of(g, itemsize):
    """Which of a warp's eight runs is column ``g`` of a product, so that a quarter-warp accesses different banks."""
    return g >> 1 ^ (g & 1) * (6 if itemsize == 4 else 5)
