"""Sectors: memory delivers 32 bytes at once.

A sector is fetched twice if 16-byte copies (cp.async) put its halves into two different sectors of shared memory.
"""

from __future__ import annotations

SECTOR = 32
ENTRY = 8  # bytes of an entry of the fixed-size arrays before the dynamic shared memory


def entries_before(entries: int, distance: int = 0) -> int:
    """``entries`` rounded up so that what lies ``distance`` bytes behind them begins on a sector.

    A block's shared memory begins on a sector. ``distance`` must be a multiple of 16 bytes, the compiler's alignment.
    """
    return entries + -(entries + distance // ENTRY) % (SECTOR // ENTRY)
