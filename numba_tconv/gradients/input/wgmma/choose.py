"""Chooses by a cost model how tiles fill a GPU.

Narrower tiles can fill the last round; few tiles are split along stages."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.wgmma_ring import (
    CONSUMERS,
    MOST_CHANNELS,
    PRODUCTS,
    ROW,
    SHARED,
    STAGE_CLOCKS,
    deepest,
)
from numba_tconv.kernels.common import split_sums
from numba_tconv.kernels.common.tensor_map import ALIGNMENT, LARGEST_BOX
from numba_tconv.runtime.device import Device

from .tile import Config, entry_of, place_of

MOST_SUMS = 160
MOST_PHASES = 16
# Fitted: extra clocks of a ping-pong stage; sums that a multiprocessor stores, bytes copied a clock; clocks of a
# launch.
TURN_CLOCKS, LEAVING, COPYING, LAUNCH_CLOCKS = 200, 4, 2400, 5000
# Shares of whole sums' clocks, and of the widest tiles'; below, others are taken.
LARGEST_SHARE, LARGEST_SHARE_OF_WIDEST = 3 / 4, 0.95


@lru_cache(maxsize=1024)
def choose_for(problem: Problem, precision: str, sheared: int, device: Device) -> Config | None:
    """The tile; every ``sheared``-th row of grad_output begins alike.

    Without a sheared map rows must be 16-byte aligned, or are copied; clocks decide."""
    plain = choose(problem, precision)
    in_place = choose(problem, precision, sheared) if sheared > 1 else None
    if in_place is None or plain is None:
        return plain and filling(problem, plain, device)
    copied = 2 * problem.batch * problem.out_channels * problem.out_length * plain.itemsize / COPYING + LAUNCH_CLOCKS

    def clocks(config):
        return max(1, config.tiles_of(problem).tiles / device.multiprocessors) * tile_clocks(problem, config)

    return filling(problem, in_place if clocks(in_place) <= clocks(plain) + copied else plain, device)


def choose(problem: Problem, precision: str, sheared: int = 1) -> Config | None:
    return _choose(problem.layer, precision, sheared)


@lru_cache(maxsize=1024)
def _choose(layer: Problem, precision: str, sheared: int) -> Config | None:
    def cost(config):
        return config.tiles_of(layer).channel_tiles * tile_clocks(layer, config) / config.rows

    return min(candidates(layer, precision, sheared), key=cost, default=None)


@lru_cache(maxsize=1024)
def filling(problem: Problem, config: Config, device: Device) -> Config:
    """``config`` or clearly better narrower tiles, with ``split_k`` set.

    A narrower one has one more tile along the input channels, or twice as many: a layer has three widths."""

    def clocks(config):
        return clocks_of(problem, config, splits_of(problem, config, device), device)

    channel_tiles = config.tiles_of(problem).channel_tiles
    widths = [-(-problem.in_channels_per_group // tiles // 8) * 8 for tiles in (channel_tiles + 1, 2 * channel_tiles)]
    narrower = (deepest(replace(config, channels=width, stages=0)) for width in widths)
    best = min(filter(None, narrower), key=clocks, default=config)
    if clocks(best) > LARGEST_SHARE_OF_WIDEST * clocks(config):
        best = config
    return replace(best, split_k=splits_of(problem, best, device) > 1)


def candidates(problem: Problem, precision: str, sheared: int = 1) -> Iterator[Config]:
    p = problem
    if p.out_channels_per_group % sheared:
        return  # a group begins in another set, or the last set has fewer rows
    through, g_channels = stage_channels(p, precision, sheared)
    clears = sheared > 1 and max(p.padding, p.padding - p.output_padding) > 0
    for blocks in (1, 2) if g_channels else ():
        most = min(MOST_CHANNELS, 2 * MOST_SUMS // blocks // 8 * 8)
        channel_tiles = -(-p.in_channels_per_group // most)
        channels = -(-p.in_channels_per_group // channel_tiles // 8) * 8
        for alternate in (False, True):
            taps = p.stride, p.dilation, p.kernel_size, p.padding % 2 == 1
            config = Config(precision, *taps, sheared, clears, through, g_channels, blocks, channels, alternate)
            if g_channels <= LARGEST_BOX and config.piece and (deep := deepest(config)):
                yield deep


def stage_channels(problem: Problem, precision: str, sheared: int) -> tuple[bool, int]:
    """Whether stages run through channels, and the output channels of a stage's windows; 0 if impossible.

    Windows begin at a multiple of ``sheared`` channels, boxes of weights at 16 bytes. A stage must not reach the next
    group, whose NaNs would count."""
    itemsize, channels, kernel_size = DTYPES[precision].itemsize, problem.out_channels_per_group, problem.kernel_size
    row, entries = ROW // itemsize, channels * kernel_size
    if entries <= row:
        return False, channels
    whole = row // kernel_size
    if row % kernel_size == 0 == whole % sheared and (problem.groups == 1 or channels % whole == 0):
        return False, whole
    if problem.groups == 1 or entries % row == 0:
        period = kernel_size * sheared
        starts = (s * row % period for s in range(min(-(-entries // row), period)))
        span = max((start + row - 1) // kernel_size + 1 for start in starts)
        return True, -(-span // sheared) * sheared
    for count in range(whole, 0, -1):
        if count * kernel_size * itemsize % ALIGNMENT == 0 == channels % count and count % sheared == 0:
            return False, count
    return False, 0


def clocks_of(problem: Problem, config: Config, splits: int, device: Device) -> float:
    p, tiles = problem, config.tiles_of(problem).tiles
    rounds = -(-tiles * splits // device.multiprocessors)
    if splits == 1:
        return rounds * tile_clocks(p, config)
    first = rounds * (config.stages_of(p) // splits * stage_clocks(config) + storing_clocks(config))
    sums = p.batch * p.in_channels * p.length
    return first + (2 * 4 * splits + config.itemsize) * sums / COPYING + LAUNCH_CLOCKS


@lru_cache(maxsize=1024)
def splits_of(problem: Problem, config: Config, device: Device) -> int:
    """Splits with the fewest clocks; 1 if over half of the multiprocessors have a tile."""
    p, stages, tiles = problem, config.stages_of(problem), config.tiles_of(problem).tiles
    sums = p.batch * p.in_channels * p.length
    if 2 * tiles > device.multiprocessors:
        return 1

    def clocks(splits):
        return clocks_of(p, config, splits, device)

    fitting = range(1, min(stages, 2 * device.multiprocessors // tiles, split_sums.MOST_SUMS // sums) + 1)
    best = min((splits for splits in fitting if stages % splits == 0), key=clocks, default=1)
    return best if clocks(best) < LARGEST_SHARE * clocks(1) else 1


def tile_clocks(problem: Problem, config: Config) -> float:
    multiplying, storing = config.stages_of(problem) * stage_clocks(config), storing_clocks(config)
    return max(multiplying, storing) if config.alternate else multiplying + storing


@lru_cache(maxsize=8192)
def stage_clocks(config: Config) -> float:
    warpgroups = 1 if config.alternate else CONSUMERS
    products = PRODUCTS * config.blocks * warpgroups
    operands = PRODUCTS * warpgroups * 4 * load_clocks(config)
    shared = operands + (products * config.channels * 32 + config.stage_bytes) / SHARED
    overhead = STAGE_CLOCKS + (TURN_CLOCKS if config.alternate else 0)
    return max(products * config.channels / 2, shared, config.arriving) + overhead


def storing_clocks(config: Config) -> float:
    return config.rows * config.channels / LEAVING


def load_clocks(config: Config) -> float:
    """Shared memory's clocks for a warp's operands of one product."""
    c, neighbours, clocks, phases = config, 4 // config.itemsize, 0, config.phases[:MOST_PHASES]
    rows = c.kernel_size, c.width, c.dilation, c.sheared, c.most_shear
    for phase in phases:
        for half in range(2):
            for e in range(2 if c.halves else 1):
                entries = (min(entry_of(half, t, neighbours) + e, c.entries - 1) for t in range(4))
                places = [place_of(phase + entry, *rows) for entry in entries]
                words = {(m * c.stride + place) * c.itemsize // 4 for m in range(8) for place in places}
                clocks += max(Counter(word % 32 for word in words).values())
    return 2 * c.blocks * clocks / len(phases)
