"""Tiles of sums in registers: sizes and the order of products.

A register bank delivers one operand a clock; one that the last product used is at hand. So every other row is
multiplied backwards, and ``exchanged`` sums lie in another bank than their columns."""

from functools import cache, cached_property

import torch

from numba_tconv.formula.taps import Taps
from numba_tconv.ptx import add_vectors, device_function, store_vectors
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
        return ELEMENTS[self.dtype].accumulator.bitwidth // 8

    @cached_property
    def vector(self) -> int:
        return 16 // self.itemsize


class WarpTile(ThreadTile):
    """``warps_m x warps_n`` warps of ``lanes_m x 32/lanes_m`` threads of ``thread_m x thread_n`` sums."""

    block_m: int
    block_n: int
    thread_m: int
    thread_n: int
    lanes_m: int
    stages: int
    partial: int  # stages of a partial sum; 0: all
    stage: int  # elements of a stage

    @property
    def exchanged(self) -> bool:
        """Whether neighbouring columns' sums are swapped (see the module)."""
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

    @property
    def partials(self) -> int:
        """First element of partial sums in shared memory."""
        return self.stages * self.stage

    @property
    def result_pitch(self) -> int:
        """Elements between staged rows of results, against bank conflicts."""
        return self.block_n + self.vector

    @property
    def shared_bytes(self) -> int:
        partials = self.thread_m * self.thread_n * self.threads if self.partial else 0
        return max(self.partials + partials, self.block_m * self.result_pitch) * self.itemsize


def make_put_aside(config, all_sums: int):
    """Build ``put_aside``, which adds the partial sums at ``e`` if ``adds``, stores the sums there and zeroes them; and
    ``add``."""
    vectors, hop = all_sums // config.vector, config.threads * config.vector
    add, store = add_vectors(vectors, hop), store_vectors(vectors, hop)
    accumulator = ELEMENTS[config.dtype].accumulator

    @device_function
    def put_aside(sums, shared, e, adds):
        if adds:
            add(sums, shared, e)
        store(shared, e, sums)
        for z in range(all_sums):
            sums[z] = accumulator(0)

    return put_aside, add


@cache
def make_sums(thread_n: int, vector: int, exchanged: bool):
    """Build two functions on sums ``acc``, in rows of ``thread_n`` columns.

    * ``add_products(acc, ws, xs, m, at)`` adds ``ws[m]`` times the columns from ``xs[at]`` on.
    * ``copy_sums(values, acc, m, n)`` copies ``vector`` sums of row ``m`` from column ``n`` on."""
    other = int(exchanged)

    @device_function
    def add_products(acc, ws, xs, m, at):
        for e in range(thread_n):
            n = thread_n - 1 - e if m % 2 else e
            acc[m * thread_n + (n ^ other)] += ws[m] * xs[at + n]

    @device_function
    def copy_sums(values, acc, m, n):
        for z in range(vector):
            values[z] = acc[m * thread_n + (n + z ^ other)]

    return add_products, copy_sums
