"""The sums of a thread's tile: in which order they are multiplied, where they lie among its registers, and how those
that grow long are put aside.

Registers lie in two banks, the even and the odd ones, and a bank reads one operand a clock: a product of three would
wait, but what the product before has read in the same place is kept. So a tile is multiplied row by row, forth and
back: a row shares its weight, a turn its column. And neighbouring sums may be exchanged (``WarpTile.exchanged``), so
that a sum and its column lie in different banks. tests/register_banks.py counts what products wait; on an H200 the
profiler's stalls agree, of which there are no recorded rows.
"""

from __future__ import annotations

from functools import cache

from ..ptx import add_upper_halves, add_vectors, device_function, store_upper_halves, store_vectors
from ..ptx.halves import SUMS


@cache
def make_sums(thread_n: int, vector: int, exchanged: bool):
    """Two device functions, ``(acc, ws, xs, m, at)``: add the products of row ``m`` with its weight ``ws[m]`` and the
    columns from ``xs[at]`` on; and ``(values, acc, m, n)``: copy ``vector`` sums of a row, from column ``n`` on."""
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


def sums_aside(sums: int, vector: int, threads: int, halves: bool):
    """Two device functions that add to a thread's sums what was put aside, and that put them aside: all of them, or
    the upper halves (ptx/halves.py). Vectors of all ``threads`` lie side by side."""
    if halves:
        return add_upper_halves(sums // SUMS, threads * vector), store_upper_halves(sums // SUMS, threads * vector)
    return add_vectors(sums // vector, threads * vector), store_vectors(sums // vector, threads * vector)
