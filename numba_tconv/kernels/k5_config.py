"""Configurations of k5: how a tile is dealt out to warps, what a block holds, and which configuration a problem gets.

A block computes ``tiles`` neighbouring tiles (tensor_tile.py) from the same weights. Two warps share the columns of a
tile, 64 each; the rows are dealt out in fragments of 16, ``fragments`` of them to a warp.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

from ..offline import REGISTERS, RESERVED_SHARED
from ..problem import Problem
from .device import H200, Device
from .tensor_operand import MOST_SPLIT_TAPS
from .tensor_rows import ROUND_ROWS
from .tensor_rung import by_vectors, contiguous_rows
from .tensor_tile import ANY_LENGTH, COLUMNS, Tile, make_tile, round_sizes

WARP_COLUMNS = 64
RUN = 8  # consecutive columns that a lane owns: one of each product of 8 columns
COLUMN_WARPS = COLUMNS // WARP_COLUMNS
# Fragments of 16 rows in a tile, and how many of them a warp takes; by parts, since split operands need a second set of
# sums. The larger half of the split tiles is for channels whose phases need them.
FRAGMENTS = {1: {1: 1, 2: 2, 3: 3, 4: 2, 6: 3, 8: 4}, 2: {1: 1, 2: 2, 3: 1, 4: 2, 6: 2, 8: 2}}
MOST_FRAGMENTS = {1: 8, 2: 4}
FEWEST_WARPS = 4
# Products that stand in the code of one step; more take longer to compile than they save.
MOST_PRODUCTS = {1: 160, 2: 300}
FEWEST_PRODUCTS = 64  # of a warp between two barriers
WINDOW_LIMIT = {1: 28, 2: 16}  # window elements that a lane holds in registers, twice; by parts
# A lane's, beside sums and window. With fewer patch had three blocks a multiprocessor, whose kernels spilled registers,
# and took 1.2 times as long in bfloat16 (H100, a script; no recorded rows).
OTHER_REGISTERS = {1: 32, 2: 52}
MOST_STORES = 16  # of a warp, in one piece of code
MOST_STAGES, MOST_BLOCKS = 4, 4
# With resident weights. Tiles of two warps: the fewer meet at a team's barrier, the less each waits for another that
# finds its tensor core taken: with four, kb64 took 3% longer and kb74 13% (H200, a script; no recorded rows).
RESIDENT_FRAGMENTS = {1: {1: 1, 2: 2, 3: 3, 4: 4}, 2: {1: 1, 2: 2, 3: 1, 4: 2}}
# Channels of a round of the store; tiles of a block, and the share of multiprocessors that have one, that are worth
# loading weights for.
FEWEST_ROUND, FEWEST_TILES, LEAST_BUSY = ROUND_ROWS, 16, 0.85
# Products' FLOPs a byte from which on tiles compute no column twice: kb64 (96) then takes 0.93 of the time, hifigan_u3
# (64) 0.95, but kb74 (53) 1.08 and kb79 (19) 1.14 (H200, a script; no recorded rows).
LEAST_INTENSITY = 60


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
        """Rows of x begin anywhere (k5_load.py)."""
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
        """The rows of a tile leave eight at a time (tensor_rows.py), as many from each warp."""
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
        as many for 16-bit elements, of six layers 2% faster so; float32 took 1% longer with 32 lanes, and kb74, whose
        kernel then spills registers, 5% (H100, a script; no recorded rows)."""
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


def _deal(problem: Problem, base: Tile, known: dict[int, int], most: int) -> tuple[int, int] | None:
    """Channels and fragments of a tile that leave the fewest rows empty; larger tiles read less. ``known``: numbers of
    fragments; ``most`` of them, unless a channel's phases need more; None if those are too many."""

    def fragments(channels):
        return next(f for f in known if 16 * f >= channels * base.phases)

    def cost(channels):
        return -(-problem.out_channels_per_group // channels) * (fragments(channels) + 0.5), -channels

    if base.phases > 16 * max(known):
        return None
    channels = min(range(1, max(1, 16 * most // base.phases) + 1), key=cost)
    return channels, fragments(channels)


def _tap_chunk(problem: Problem, base: Tile, fragments: int) -> int:
    """Taps that share a window: all of a row, if a lane can hold their window and the code of their products is short,
    else as many as leave the fewest taps that do not exist and windows that begin where 16 bytes can be copied."""
    t, vector = problem.taps, 16 // base.itemsize
    products = fragments * RUN * (2 * base.parts - 1)

    def fits(chunk):
        window = RUN + -(-(chunk - 1) * t.step // vector) * vector
        short = base.parts == 1 or chunk <= MOST_SPLIT_TAPS
        return chunk == 1 or (
            chunk * products <= MOST_PRODUCTS[base.parts] and window <= WINDOW_LIMIT[base.parts] and short
        )

    fitting = [chunk for chunk in range(1, t.taps_per_row + 1) if fits(chunk)]
    if fitting[-1] == t.taps_per_row:
        return fitting[-1]

    def cost(chunk):
        chunks = -(-t.taps_per_row // chunk)
        return chunks * chunk * (1 if chunk * t.step % vector == 0 else 1.25) + chunks / 2

    return min(fitting, key=cost)


@lru_cache(maxsize=1024)
def choose(
    problem: Problem, precision: str, device: Device = H200, aligned: bool = True, contiguous: bool = True
) -> Config | None:
    """The configuration of a problem; None if it has none. ``aligned``: x can be copied in 16-byte vectors;
    ``contiguous``: at least the elements of its rows are neighbours."""
    base = make_tile(problem, precision)
    if base is None:
        return None
    if base.may_be_unaligned and _intensity(problem, base) >= LEAST_INTENSITY:
        base = replace(base, aligned=False)
    vector = (16 if aligned else 4) // base.itemsize
    resident = _resident(problem, base, device, vector) if contiguous else None
    return resident or _streamed(problem, base, device, vector)


def _intensity(problem: Problem, tile: Tile) -> float:
    """FLOPs of the products a byte of memory, of a long signal: one kernel for all lengths."""
    p = replace(problem, batch=1, length=ANY_LENGTH)
    return p.flops * (2 * tile.parts - 1) / p.min_bytes(tile.itemsize)


def _config(problem: Problem, base: Tile, known: dict[int, int], most: int, x_vector: int) -> Config | None:
    """``base`` dealt out to warps (``known``: of numbers of fragments those of a warp), with the smallest rounds and
    ring."""
    dealt = _deal(problem, base, known, most)
    if dealt is None:
        return None
    channels, count = dealt
    fragments = known[count]
    chunk = _tap_chunk(problem, base, fragments)
    of_tile = {f.name: getattr(base, f.name) for f in fields(base)}
    of_tile |= dict(tap_chunk=chunk, several_chunks=chunk < problem.taps.taps_per_row)
    of_tile |= dict(channels=channels, round_channels=1)
    tile = MmaTile(**of_tile, row_unit=16 * count)

    products = chunk * fragments * RUN * (2 * tile.parts - 1)
    chunks = 1
    deepest = 4 if tile.parts == 1 else 1
    while chunks < deepest and chunks * products < FEWEST_PRODUCTS and 2 * chunks <= tile.channel_chunks(problem):
        chunks *= 2
    return Config(tile, fragments, 1, chunks, 2, 1, x_vector)


def _streamed(problem: Problem, base: Tile, device: Device, x_vector: int) -> Config | None:
    """The configuration whose weights stream beside x."""
    config = _config(problem, base, FRAGMENTS[base.parts], MOST_FRAGMENTS[base.parts], x_vector)
    config = replace(config, tiles=max(1, FEWEST_WARPS // config.tile_warps))
    # A kernel that has both ways took 1.08 times as long on head in TF32, 1.03 on waveglow (H100, a script).
    fits = problem.length >= config.copies_a_row * x_vector
    config = replace(config, in_steps=fits and config.tile.chunk_shift % x_vector == 0)
    # Blocks that the registers allow first: one's stores hide behind another's products. Then the depth of the ring.
    most = max(1, min(MOST_BLOCKS, REGISTERS // (config.threads * -(-config.registers // 8) * 8)))
    for blocks in range(most, 0, -1):
        for stages in range(MOST_STAGES, 2 if blocks > 1 else 1, -1):
            config = replace(config, stages=stages, min_blocks=blocks)
            if blocks * (config.shared_bytes + RESERVED_SHARED) <= device.shared_per_multiprocessor:
                return _staged(config, device.shared_per_multiprocessor // blocks)
    return None


def _resident(problem: Problem, base: Tile, device: Device, x_vector: int) -> Config | None:
    """The configuration whose weights stay in shared memory; None if they do not fit there beside teams enough, or if
    the tiles do not keep as many blocks busy as there are multiprocessors, or if windows begin within words of 4 bytes
    by turns."""
    known = RESIDENT_FRAGMENTS[base.parts]
    config = _config(problem, base, known, max(known), x_vector)
    if config is None or 4 % config.tile_warps:  # a team has a warp on two of the four schedulers, or on each
        return None
    if config.tile.chunk_shift % x_vector:
        return None
    tile, of_team = config.tile, config.tile_warps
    far = max(problem.length, 2 * tile.columns(problem)[1], tile.column_tiles(problem)) >= 2**31  # for its counters
    if far or not _fills(problem, tile, device):
        return None
    weights = tile.tap_chunks(problem) * config.channel_chunks(problem) // config.chunks * config.w_stage
    registers = -(-(config.registers + _carried(tile)) // 8) * 8
    for warps in range(REGISTERS // (32 * registers) // 4 * 4, 7, -4):  # as many on each of the four schedulers
        teams = warps // of_team
        for stages in range(MOST_STAGES, 2, -1):
            for channels in round_sizes(tile):
                staged = replace(tile, round_channels=channels)
                resident = replace(config, tile=staged, stages=stages, resident_weights=weights, teams=teams)
                if channels >= min(FEWEST_ROUND, tile.channels) and resident.shared_bytes <= device.shared_per_block:
                    return resident
    return None


def _carried(tile: Tile) -> int:
    """About the registers by which a kernel with resident weights needs more: for what it carries from tile to tile,
    beside a store that is worked out meanwhile."""
    if tile.span == 1 and tile.itemsize == 4:
        return 16
    return 48 if tile.itemsize == 2 and tile.phases > 1 else 32


def resident_blocks(problem: Problem, tile: Tile, device: Device) -> int:
    """Blocks that share the tiles along the columns."""
    return max(1, device.multiprocessors // (tile.row_tiles(problem) * problem.groups))


def _fills(problem: Problem, tile: Tile, device: Device) -> bool:
    """Whether blocks with resident weights have tiles enough to be worth loading them, and keep the GPU busy."""
    along = resident_blocks(problem, tile, device)
    blocks = tile.row_tiles(problem) * problem.groups * along
    waves = -(-blocks // device.multiprocessors)
    busy = blocks / (waves * device.multiprocessors)
    return busy >= LEAST_BUSY and tile.column_tiles(problem) >= FEWEST_TILES * along


def _staged(config: Config, shared: int) -> Config:
    """With the largest rounds of the store that take no shared memory from another block."""
    for channels in round_sizes(config.tile):
        staged = replace(config, tile=replace(config.tile, round_channels=channels))
        if staged.shared_bytes + RESERVED_SHARED <= shared:
            return staged
    return config


def config_of(problem: Problem, precision: str, here: Device, shape: tuple, strides: tuple, offset: int) -> Config:
    """The configuration for an input as ``by_vectors`` takes it."""
    config = choose(problem, precision, here)
    if by_vectors(shape, strides, offset, config.tile):
        return config
    return choose(problem, precision, here, aligned=False, contiguous=contiguous_rows(shape, strides))
