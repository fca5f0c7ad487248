"""Staging of k6 in 16 bits, without a stride, where runs do not all begin at words: a lane's four columns of a row are
two words, or a word between two single outputs if they begin within one.

Which of a lane's two rows begin within a word is the same for all lanes, and for all core matrices of a round: the rows
are neighbouring channels, and a core matrix has eight of them. Written one by one, kb64's channels took 1.06 times as
long at length 65537, and 1.04 times with a padding of 1 (bfloat16, an H100, scripts; no rows).
"""

from __future__ import annotations

from numba import int32

from ..ptx import device_function, st_shared_b32, st_shared_halves

# Rows of a lane that begin within a word: where y's rows have an odd length, either; else both.
FIRST, SECOND, BOTH = (True, False), (False, True), (True, True)


def make_words(staged, narrow, sums: int, within: tuple[bool, bool]):
    """A device function (core matrix, state), as k6_stage.py has it. ``staged``: where a row of the lane stands, and
    its bias; ``narrow``: two sums as a word; ``sums``: of a lane, in 64 columns; ``within``: one of the above."""

    @device_function
    def write(at, begins_within, z0, z1, z2, z3):
        if begins_within:
            st_shared_halves(at, at + 6, narrow(z0, z3))
            st_shared_b32(at + 2, narrow(z1, z2))
        else:
            st_shared_b32(at, narrow(z0, z1))
            st_shared_b32(at + 4, narrow(z2, z3))

    @device_function
    def words(k, state):
        acc, columns, _, _, where = state
        for z in range(2):
            at, extra = staged(k, z, where)
            a = 4 * k + z
            write(int32(columns[0] + at), within[z], acc[a] + extra, acc[a + 2] + extra, acc[a + sums] + extra,
                  acc[a + sums + 2] + extra)  # fmt: skip

    return words
