"""Sectors: the 32 bytes that memory gives at once, and how copies of 16 bytes take each of them but once.

A sector whose halves cp.async puts into two different places of 32 bytes of shared memory is fetched for each of them:
a tile that lay 16 bytes beside them was read twice (39 GB for 20; counted by ncu on an H200, in float64).
"""

from __future__ import annotations

SECTOR = 32
ENTRY = 8  # bytes of an entry of the arrays of fixed size that lie before what the launch allocates


def entries_before(entries: int, distance: int = 0) -> int:
    """``entries``, and as many more, that what lies ``distance`` bytes behind them begins a sector's place. A block's
    shared memory begins one; ``distance`` is a multiple of 16 bytes, as the compiler aligns what follows."""
    return entries + -(entries + distance // ENTRY) % (SECTOR // ENTRY)
