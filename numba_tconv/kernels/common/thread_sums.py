"""The sums of a thread's tile: the order of their products, and their places among the registers.

Registers lie in two banks, and a bank reads one operand a clock, unless the operand is kept from the product before. So
rows are multiplied forth and back, and neighbouring sums may be exchanged (``WarpTile.exchanged``), so that a sum and
its column lie in different banks. tests/register_banks.py counts the waits.
"""

from __future__ import annotations

from functools import cache

from numba_tconv.ptx import device_function


@cache
def make_sums(thread_n: int, vector: int, exchanged: bool):
    """Two device functions on the sums ``acc`` of a tile with rows of ``thread_n`` columns.

    ``(acc, ws, xs, m, at)`` adds the products of row ``m``: weight ``ws[m]`` times the columns from ``xs[at]`` on.
    ``(values, acc, m, n)`` copies ``vector`` sums of row ``m`` from column ``n`` on.
    """
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
