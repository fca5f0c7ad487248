"""What the depthwise kernels share: limits, how rows are laid over blocks, and what a gradient's positions meet."""

from __future__ import annotations

from functools import cached_property

import torch

from numba_tconv.formula.taps import Taps
from numba_tconv.runtime.layout import Layout

MOST_CHANNELS = 8  # of a group, in or out
FEW_CHANNELS = 2  # of a group, in or out, for the gradients; more have not been timed
MOST_TAPS = 32  # whose weights, or sums, a thread has in registers
MOST_WINDOW = 40  # elements that a thread has in registers
MOST_PRODUCTS = 512  # as straight-line code
MOST_IN_PLACE = 128  # of those, where each place of the first element has its own
MOST_SAMPLES = 2**30  # of a row, which are counted in 32 bits, beyond its end by the work of a block
MOST_ROWS = 2**31 - 1  # rows are counted in 32 bits, and along x of the grid
ENOUGH_BLOCKS = 2048  # several for every place on a large GPU; only then are stretches made longer
GRID_AXIS = 65_535  # blocks along y or z of a grid, at most


class Meeting:
    """Of a gradient's configuration: what a thread's positions of the input meet in grad_output."""

    dtype: torch.dtype
    taps: Taps
    positions: int

    @cached_property
    def vector(self) -> int:
        """Elements in 16 bytes."""
        return 16 // self.dtype.itemsize

    @cached_property
    def window(self) -> int:
        """Elements of one channel of grad_output that the positions meet."""
        return (self.positions - 1) * self.taps.stride + (self.taps.kernel_size - 1) * self.taps.dilation + 1

    @cached_property
    def meetings(self) -> tuple:
        """(position, tap, place in the window) of every product: where the two meet by formula/taps.py's first
        formula."""
        t = self.taps
        return tuple((z, k, z * t.stride + k * t.dilation) for z in range(self.positions) for k in range(t.kernel_size))


def reason(problem) -> str | None:
    """Why such a kernel does not take the sizes of ``problem``, whatever its tile; None if it does."""
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
    """Why a gradient's kernel, which reads a row once for each channel that it meets, is not meant for ``problem``."""
    if max(problem.in_channels_per_group, problem.out_channels_per_group) > FEW_CHANNELS:
        return f"it is for up to {FEW_CHANNELS} channels a group: it reads a row for each that the row meets"
    return None


def split(rows: int, vectors: int, config) -> tuple[int, int]:
    """Passes of a team over a stretch of a row of ``vectors``, as even as may be, and stretches of a row.

    ``config`` has the threads of a block and of a team (``lanes``), and how many ``passes`` a stretch may have.
    """
    most = max(1, min(config.passes, rows * vectors // (config.threads * ENOUGH_BLOCKS)))
    stretches = -(-vectors // (most * config.lanes))
    return -(-vectors // (stretches * config.lanes)), stretches


def grid(rows: int, teams: int, stretches: int) -> tuple[int, int, int]:
    """Rows along x, their stretches along y and z."""
    planes = -(-stretches // GRID_AXIS)
    return -(-rows // teams), -(-stretches // planes), planes


def offset_of(tensor: Layout) -> int:
    """Elements from a multiple of 16 bytes to the tensor's first."""
    return tensor.offset % 16 // tensor.dtype.itemsize


def read_in_place(config) -> bool:
    """Whether a gradient's kernel converts the elements of grad_output from where they lie in vectors of 16 bytes.

    It takes elements of two to a word, that neighbouring threads' runs begin at the same place of a vector, and few
    products.
    """
    same = config.positions * config.taps.stride % config.vector == 0
    return config.dtype.itemsize == 2 and same and len(config.products) <= MOST_IN_PLACE


def placed(products: tuple, vector: int) -> tuple:
    """The products (sum, factor, place in the run) for each place of a vector at which the run may begin."""
    return tuple(tuple((s, i, lead + j) for s, i, j in products) for lead in range(vector))
