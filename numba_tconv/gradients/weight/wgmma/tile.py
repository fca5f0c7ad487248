"""Tiles, and a lane's registers.

m counts pairs of an output channel and a phase (gradients/window.py), n a group's input channels, k positions, the
depth. A tile is ``pairs x channels`` sums for each tap of a chunk, which read the same rows. With ``by_taps`` a pair is
a channel and any tap; tiles may begin anywhere in a channel."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd, prod
from typing import NamedTuple

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.wgmma_ring import ROW, Ring
from numba_tconv.kernels.common.tensor_map import LARGEST_BOX

MOST_BEGINS = 16


@dataclass(frozen=True)
class Window:
    """Column j of phase a is element ``j*stride + a*dilation`` of a row."""

    stride: int
    dilation: int
    phases: int
    step: int  # columns between taps of a row
    odd: bool  # column 0 of phase 0 is an odd element of a box


class Tiles(NamedTuple):
    """Numbers of a group's tiles."""

    tap_chunks: int
    pair_tiles: int
    channel_tiles: int


@dataclass(frozen=True)
class Config(Ring):
    precision: str
    window: Window
    alike: int
    clears: int  # elements before a row in a box
    tap_chunk: int
    blocks: int  # of 64 pairs in a warpgroup
    channels: int
    alternate: bool  # warpgroups take alternate stages of the same pairs
    sets: int = 2  # of operands; with two, one is loaded during products
    stages: int = 0
    direct: bool = False  # whole sums, stored as the gradient
    by_taps: bool = False
    plane_phases: int = 0  # with planes and direct stores

    @cached_property
    def g_channels(self) -> int:
        rows, phases, alike = self.rows, self.window.phases, self.alike
        if not self.by_taps:
            return rows // phases // alike * alike
        of_set = phases * alike  # boxes begin with a channel of the first set
        most = max(first + rows for first in range(0, of_set, gcd(rows, of_set)))
        return -(-most // of_set) * alike

    @property
    def own_words(self) -> int:
        """Flags of samples' first stages."""
        return self.stages if self.clears else 0

    @property
    def pairs(self) -> int:
        """Rows without padding."""
        return self.rows if self.by_taps else self.g_channels * self.window.phases

    @property
    def positions(self) -> int:
        return ROW // self.itemsize

    @property
    def reach(self) -> int:
        """Elements that a position's taps and phases span, less one."""
        w = self.window
        return (self.tap_chunk - 1) * w.step * w.stride + (w.phases - 1) * w.dilation

    @property
    def pieces(self) -> int:
        """Boxes of a set's rows in a stage: for all positions, half, or one product's; 0 if none fits."""
        return next((pieces for pieces in (1, 2, 4) if self._width(pieces) <= LARGEST_BOX), 0)

    @property
    def boxes(self) -> int:
        return self.alike * self.pieces

    def _width(self, pieces: int) -> int:
        return self.width_of((self.positions // pieces - 1) * self.window.stride + self.reach + 1)

    @cached_property
    def width(self) -> int:
        """Elements of a box's row, against bank conflicts."""
        return _width_of(self.window, self.alike, self.itemsize, self.by_taps, self._width(self.pieces))

    @cached_property
    def entries(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(set(operand_places(self))))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where a lane of t = 0 reads, in bytes from a product's first position."""
        return tuple(sorted({place for entry in self.entries for place in entry}))

    @property
    def lane_bytes(self) -> int:
        return 4 * self.window.stride

    @property
    def sums(self) -> int:
        return self.blocks * self.tap_chunk * self.channels // 2

    @property
    def operands(self) -> int:
        return self.blocks * 2 * len(self.entries)

    @property
    def odd(self) -> int:
        """1 if words of two begin an element before a position."""
        return int(self.window.odd and self.itemsize == 2 and self.window.stride == 1)

    @property
    def tile_sums(self) -> int:
        return self.tap_chunk * self.rows * self.channels

    def phases_of(self, problem: Problem) -> int:
        return problem.kernel_size if self.by_taps else min(problem.taps.rows, problem.kernel_size)

    def tiles_of(self, problem: Problem) -> Tiles:
        p = problem
        taps = 1 if self.by_taps else p.taps.taps_per_row
        counts = taps, p.out_channels_per_group * self.phases_of(p), p.in_channels_per_group
        sizes = self.tap_chunk, self.pairs, self.channels
        return Tiles(*(-(-count // size) for count, size in zip(counts, sizes, strict=True)))

    def blocks_of(self, problem: Problem) -> int:
        return problem.groups * prod(self.tiles_of(problem))

    def stages_of(self, problem: Problem) -> tuple[int, int]:
        """Stages of a sample, and in all."""
        of_sample = -(-problem.length // self.positions)
        return of_sample, problem.batch * of_sample


@lru_cache(maxsize=8192)
def _width_of(window: Window, alike: int, itemsize: int, by_taps: bool, least: int) -> int:
    vector = 16 // itemsize
    widths = range(least, min(least + 8 * vector, LARGEST_BOX) + 1, vector)
    return min(widths, key=lambda width: (accesses(window, alike, itemsize, by_taps, width), width))


@lru_cache(maxsize=8192)
def accesses(window: Window, alike: int, itemsize: int, by_taps: bool, width: int) -> float:
    """Shared accesses of a warp's load, on average."""
    begins = range(0, window.phases, -(-window.phases // MOST_BEGINS)) if by_taps else range(1)
    return sum(_accesses_from(begin, window, alike, itemsize, width) for begin in begins) / len(begins)


def _accesses_from(begin: int, window: Window, alike: int, itemsize: int, width: int) -> int:
    neighbours, vector = 4 // itemsize, 16 // itemsize
    words = set()
    for m in range(begin, begin + 8):
        channel = m // window.phases  # rows begin anywhere in 16 bytes, boxes in bank 0
        row = channel // alike * width + channel % alike * (vector // alike) % vector
        for t in range(4):
            words.add((row + m % window.phases * window.dilation + t * neighbours * window.stride) * itemsize // 4)
    return max(Counter(word % 32 for word in words).values())


def operand_places(config: Config) -> tuple[tuple[int, int], ...]:
    """Byte offsets of A's registers, a pair for each tap of a chunk and each half of a product's depth.

    They count from the product's first position in a pair's row, for registers 0 and 2 (1 and 3: eight rows on) and t =
    0; other lanes read ``t * lane_bytes`` further. Two 16-bit elements are a word, halves of adjacent words, or
    ``stride`` apart; 32-bit elements repeat the offset."""
    neighbours, stride, found = 4 // config.itemsize, config.window.stride, []
    for b in range(config.tap_chunk):
        for half in range(2):
            element = (b * config.window.step + 4 * neighbours * half) * stride + config.odd
            if neighbours == 2 and stride > 1:
                found.append((2 * element, 2 * (element + stride)))
            else:
                found.append((element // neighbours * 4, -(-element // neighbours) * 4))
    return tuple(found)
