"""Limits, blocks of rows, and what gradients' positions meet."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch

from numba_tconv.formula.taps import Taps
from numba_tconv.ptx import multiply_runs, vectors_of
from numba_tconv.runtime.elements import ELEMENTS

MOST_CHANNELS = 8  # of a group, in or out
FEW_CHANNELS = 2  # the same for gradients
MOST_TAPS = 32
MOST_WINDOW = 40
MOST_PRODUCTS = 512
MOST_FROM_MEMORY = 128
MOST_SAMPLES = 2**30  # of a row, in 32 bits
MOST_ROWS = 2**31 - 1  # along x of the grid
ENOUGH_BLOCKS = 2048  # beyond, stretches take more passes


class Meeting:
    """A gradient's positions and what they meet."""

    dtype: torch.dtype
    taps: Taps
    positions: int

    @cached_property
    def vector(self) -> int:
        return 16 // self.dtype.itemsize

    @cached_property
    def window(self) -> int:
        """Elements of a grad_output channel that positions meet."""
        return (self.positions - 1) * self.taps.stride + (self.taps.kernel_size - 1) * self.taps.dilation + 1

    @cached_property
    def meetings(self) -> tuple:
        """(position, tap, place in the window) of every product."""
        t = self.taps
        return tuple((z, k, z * t.stride + k * t.dilation) for z in range(self.positions) for k in range(t.kernel_size))


def fitting(dtype: torch.dtype, make: Callable[[int], Meeting]) -> Meeting:
    """The configuration of most ``positions`` whose window and products fit."""
    most = 16 // dtype.itemsize
    for positions in (most >> e for e in range(4) if most >> e):
        config = make(positions)
        if config.window <= MOST_WINDOW and len(config.products) <= MOST_PRODUCTS:
            break
    return replace(config, from_memory=multiplies_from_memory(config))


def blocks_of(dtype: torch.dtype, numbers: int) -> int:
    """Blocks of 128 threads with registers for ``numbers`` each."""
    words = numbers * (2 if dtype == torch.float64 else 1)
    return next((blocks for limit, blocks in ((36, 8), (56, 6), (80, 4)) if words <= limit), 3)


def make_multiply_from_memory(config, sums: int):
    """Build products with a window in memory, if ``from_memory``."""
    if not config.from_memory:
        return None
    element, cases = ELEMENTS[config.dtype], placed(config.products, config.vector)
    return multiply_runs(element, cases, sums, config.vector, vectors_of(element, config.window), 1)


def depthwise_refusal(problem) -> str | None:
    """Why no depthwise kernel takes ``problem``."""
    if max(problem.in_channels_per_group, problem.out_channels_per_group) > MOST_CHANNELS:
        return f"it takes up to {MOST_CHANNELS} input and {MOST_CHANNELS} output channels a group"
    if problem.kernel_size > MOST_TAPS:
        return f"it takes up to {MOST_TAPS} taps, not {problem.kernel_size}"
    if (problem.kernel_size - 1) * problem.dilation >= MOST_WINDOW:
        return f"it takes taps that span up to {MOST_WINDOW} samples"
    if (problem.length + MOST_WINDOW) * problem.stride + problem.padding >= MOST_SAMPLES:
        return f"it takes rows of up to {MOST_SAMPLES} samples"
    return None


def many_channels(problem) -> str | None:
    if max(problem.in_channels_per_group, problem.out_channels_per_group) > FEW_CHANNELS:
        return f"it is for up to {FEW_CHANNELS} channels a group: it reads a row for each that the row meets"
    return None


def split(rows: int, vectors: int, config) -> tuple[int, int]:
    """Passes over a stretch, and stretches of a row of ``vectors``."""
    most = max(1, min(config.passes, rows * vectors // (config.threads * ENOUGH_BLOCKS)))
    stretches = -(-vectors // (most * config.lanes))
    return -(-vectors // (stretches * config.lanes)), stretches


def multiplies_from_memory(config) -> bool:
    """Whether a gradient multiplies grad_output from memory, in vectors of 16 bytes.

    For 16 bits, few products, and runs at equal places of vectors in all threads."""
    same = config.positions * config.taps.stride % config.vector == 0
    return config.dtype.itemsize == 2 and same and len(config.products) <= MOST_FROM_MEMORY


def placed(products: tuple, vector: int) -> tuple:
    """The products (sum, factor, place in the run), by place of a vector where runs begin."""
    return tuple(tuple((s, i, lead + j) for s, i, j in products) for lead in range(vector))
