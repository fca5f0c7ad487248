"""What the configurations share whose kernels multiply on CUDA cores from tiles in a thread's registers."""

from __future__ import annotations

from functools import cached_property

import torch

from numba_tconv.formula.taps import Taps
from numba_tconv.runtime.elements import ELEMENTS


class ThreadTile:
    dtype: torch.dtype
    stride: int
    dilation: int

    @cached_property
    def taps(self) -> Taps:
        return Taps(1, self.stride, self.dilation)

    @cached_property
    def itemsize(self) -> int:
        """Bytes of an element in shared memory, where it is of the accumulator's type."""
        return ELEMENTS[self.dtype].accumulator.bitwidth // 8

    @cached_property
    def vector(self) -> int:
        """Elements in 16 bytes."""
        return 16 // self.itemsize


class WarpTile(ThreadTile):
    """A block is ``warps_m x warps_n`` warps, a warp ``lanes_m`` by ``32 / lanes_m`` threads, a thread
    ``thread_m x thread_n`` sums."""

    block_m: int
    block_n: int
    thread_m: int
    thread_n: int
    lanes_m: int

    @property
    def exchanged(self) -> bool:
        """Whether neighbouring sums of a thread's row are in each other's place, in the other bank of registers. In
        wider rows the compiler then finds a worse order of the products."""
        return self.thread_n <= 8

    @property
    def warps_m(self) -> int:
        return self.block_m // (self.lanes_m * self.thread_m)

    @property
    def warps_n(self) -> int:
        return self.block_n // (32 // self.lanes_m * self.thread_n)

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n
