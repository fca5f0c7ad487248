"""What configurations share whose kernels keep tiles of sums in a thread's registers, on CUDA cores."""

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
        """Bytes of an element in shared memory, where it has the accumulator's type."""
        return ELEMENTS[self.dtype].accumulator.bitwidth // 8

    @cached_property
    def vector(self) -> int:
        """Elements in 16 bytes."""
        return 16 // self.itemsize


class WarpTile(ThreadTile):
    """A block is ``warps_m x warps_n`` warps, a warp ``lanes_m`` by ``32 / lanes_m`` threads, a thread ``thread_m x
    thread_n`` sums.
    """

    block_m: int
    block_n: int
    thread_m: int
    thread_n: int
    lanes_m: int

    @property
    def exchanged(self) -> bool:
        """Whether neighbouring sums of a thread's row change register banks (thread_sums.py). In wider rows the
        compiler finds a worse order of products.
        """
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
