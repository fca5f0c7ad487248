"""Chooses a configuration that fits in registers and shared memory."""

from dataclasses import fields, replace
from functools import lru_cache
from itertools import takewhile

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_core.rung import by_vectors, contiguous_rows
from numba_tconv.kernels.common.tensor_core.split_operand import MOST_SPLIT_TAPS
from numba_tconv.kernels.common.tensor_core.store_rows import ROUND_ROWS
from numba_tconv.kernels.common.tensor_core.tile import Tile, at_any_length, make_tile, round_sizes
from numba_tconv.runtime.device import H200, REGISTERS, RESERVED_SHARED, Device

from .tile import RUN, Config, MmaTile

# {operand halves: {fragments of a tile: of a warp}}
FRAGMENTS = {1: {1: 1, 2: 2, 3: 3, 4: 2, 6: 3, 8: 4}, 2: {1: 1, 2: 2, 3: 1, 4: 2, 6: 2, 8: 2}}
MOST_FRAGMENTS = {1: 8, 2: 4}
FEWEST_WARPS = 4
# Unrolled; more compile longer than they save.
MOST_PRODUCTS = {1: 160, 2: 300}
FEWEST_PRODUCTS = 64  # between barriers
WINDOW_LIMIT = {1: 28, 2: 16}  # columns
MOST_STAGES, MOST_BLOCKS = 4, 4
# Resident weights: tiles of two warps, whose barriers wait least.
RESIDENT_FRAGMENTS = {1: {1: 1, 2: 2, 3: 3, 4: 4}, 2: {1: 1, 2: 2, 3: 1, 4: 2}}
# Channels of a round; tiles of a block; share of busy multiprocessors.
FEWEST_ROUND, FEWEST_TILES, LEAST_BUSY = ROUND_ROWS, 16, 0.85
# FLOPs a byte from which products outlast memory: tiles compute no column twice.
LEAST_INTENSITY = 60


def _deal(problem: Problem, base: Tile, known: dict[int, int], most: int) -> tuple[int, int] | None:
    """A tile's channels and fragments with fewest empty rows.

    ``most``: fragments, unless a channel needs more."""

    def fragments(channels):
        return next(f for f in known if 16 * f >= channels * base.phases)

    def cost(channels):
        return -(-problem.out_channels_per_group // channels) * (fragments(channels) + 0.5), -channels

    if base.phases > 16 * max(known):
        return None
    channels = min(range(1, max(1, 16 * most // base.phases) + 1), key=cost)
    return channels, fragments(channels)


def _tap_chunk(problem: Problem, base: Tile, fragments: int) -> int:
    """Taps of a window: a whole row, or a chunk with few missing."""
    t, vector = problem.taps, 16 // base.itemsize
    products = fragments * RUN * (2 * base.operand_halves - 1)

    def fits(chunk):
        window = RUN + -(-(chunk - 1) * t.step // vector) * vector
        short = base.operand_halves == 1 or chunk <= MOST_SPLIT_TAPS
        return chunk == 1 or (
            chunk * products <= MOST_PRODUCTS[base.operand_halves]
            and window <= WINDOW_LIMIT[base.operand_halves]
            and short
        )

    fitting = list(takewhile(fits, range(1, t.taps_per_row + 1)))
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
    """The configuration; ``aligned``: x is copied by 16 bytes; ``contiguous``: its rows are."""
    base = make_tile(problem, precision)
    if base is None:
        return None
    if base.may_be_unaligned and _intensity(problem, base) >= LEAST_INTENSITY:
        base = replace(base, aligned=False)
    vector = (16 if aligned else 4) // base.itemsize
    resident = _resident(problem, base, device, vector) if contiguous else None
    return resident or _streamed(problem, base, device, vector)


def _intensity(problem: Problem, tile: Tile) -> float:
    """FLOPs a byte."""
    p = at_any_length(problem)
    return p.flops * (2 * tile.operand_halves - 1) / p.min_bytes(tile.itemsize)


def _config(problem: Problem, base: Tile, known: dict[int, int], most: int, x_vector: int) -> Config | None:
    """``base`` dealt out to warps; ``known``: {fragments of a tile: in a warp}."""
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

    products = chunk * fragments * RUN
    chunks = 1
    deepest = 4 if tile.operand_halves == 1 else 1  # each split depth has its own scale
    while chunks < deepest and chunks * products < FEWEST_PRODUCTS and 2 * chunks <= tile.channel_chunks(problem):
        chunks *= 2
    return Config(tile, fragments, 1, chunks, 2, 1, x_vector)


def _streamed(problem: Problem, base: Tile, device: Device, x_vector: int) -> Config | None:
    config = _config(problem, base, FRAGMENTS[base.operand_halves], MOST_FRAGMENTS[base.operand_halves], x_vector)
    # Empty slots leave registers for half the split sums.
    if base.operand_halves == 2 and base.span > base.phases:
        config = replace(config, fragments=1)
    config = replace(config, tiles=max(1, FEWEST_WARPS // config.tile_warps))
    # A kernel with both ways of loading is slower.
    fits = problem.length >= config.copies_a_row * x_vector
    config = replace(config, in_steps=fits and config.tile.chunk_shift % x_vector == 0)
    # The most blocks: one stores while another multiplies.
    most = max(1, min(MOST_BLOCKS, REGISTERS // (config.threads * -(-config.registers // 8) * 8)))
    for blocks in range(most, 0, -1):
        for stages in range(MOST_STAGES, 2 if blocks > 1 else 1, -1):
            config = replace(config, stages=stages, min_blocks=blocks)
            if blocks * (config.shared_bytes + RESERVED_SHARED) <= device.shared_per_multiprocessor:
                return _staged(config, device.shared_per_multiprocessor // blocks)
    return None


def _resident(problem: Problem, base: Tile, device: Device, x_vector: int) -> Config | None:
    """The configuration with resident weights.

    None if they do not fit, tiles are few, windows begin inside copies or counts exceed 32 bits."""
    known = RESIDENT_FRAGMENTS[base.operand_halves]
    config = _config(problem, base, known, max(known), x_vector)
    if config is None or 4 % config.tile_warps:  # its warps would load schedulers unequally
        return None
    if config.tile.chunk_shift % x_vector:
        return None
    tile, of_team = config.tile, config.tile_warps
    far = max(problem.length, 2 * tile.columns(problem)[1], tile.column_tiles(problem)) >= 2**31
    if far or not _fills(problem, tile, device):
        return None
    weights = tile.tap_chunks(problem) * config.channel_chunks(problem) // config.chunks * config.w_stage
    registers = -(-(config.registers + _carried(tile)) // 8) * 8
    for warps in range(REGISTERS // (32 * registers) // 4 * 4, 7, -4):  # as many on each scheduler
        teams = warps // of_team
        for stages in range(MOST_STAGES, 2, -1):
            for channels in round_sizes(tile):
                staged = replace(tile, round_channels=channels)
                resident = replace(config, tile=staged, stages=stages, resident_weights=weights, teams=teams)
                if channels >= min(FEWEST_ROUND, tile.channels) and resident.shared_bytes <= device.shared_per_block:
                    return resident
    return None


def _carried(tile: Tile) -> int:
    if tile.span == 1 and tile.itemsize == 4:
        return 16
    return 48 if tile.itemsize == 2 and tile.phases > 1 else 32


def resident_blocks(problem: Problem, tile: Tile, device: Device) -> int:
    return max(1, device.multiprocessors // (tile.row_tiles(problem) * problem.groups))


def _fills(problem: Problem, tile: Tile, device: Device) -> bool:
    """Whether tiles fill the GPU with weights loaded once."""
    along = resident_blocks(problem, tile, device)
    blocks = tile.row_tiles(problem) * problem.groups * along
    waves = -(-blocks // device.multiprocessors)
    busy = blocks / (waves * device.multiprocessors)
    return busy >= LEAST_BUSY and tile.column_tiles(problem) >= FEWEST_TILES * along


def _staged(config: Config, shared: int) -> Config:
    for channels in round_sizes(config.tile):
        staged = replace(config, tile=replace(config.tile, round_channels=channels))
        if staged.shared_bytes + RESERVED_SHARED <= shared:
            return staged
    return config


def config_of(problem: Problem, precision: str, here: Device, shape: tuple, strides: tuple, offset: int) -> Config:
    """The configuration for x as in ``by_vectors``."""
    config = choose(problem, precision, here)
    if by_vectors(shape, strides, offset, config.tile):
        return config
    return choose(problem, precision, here, aligned=False, contiguous=contiguous_rows(shape, strides))
