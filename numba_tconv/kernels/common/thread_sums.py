"""The sums of a thread's tile: in which order they are multiplied, and where they lie among its registers.

Registers lie in two banks, the even and the odd ones, and a bank reads one operand a clock: a product of three would
wait, but what the product before has read in the same place is kept. So a tile is multiplied row by row, forth and
back: a row shares its weight, a turn its column. And neighbouring sums may be exchanged (``WarpTile.exchanged``), so
that a sum and its column lie in different banks. tests/register_banks.py counts what products wait; on an H200 the
profiler's stalls agree, of which there are no recorded rows.
"""

from __future__ import annotations

from functools import cache

from numba_tconv.ptx import device_function


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
