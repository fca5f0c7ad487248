"""Sectors of 32 bytes. Copies that put a sector's halves into two sectors of shared memory fetch it twice."""

from __future__ import annotations

SECTOR = 32
ENTRY = 8  # bytes of an entry of the fixed-size arrays before dynamic shared memory


def entries_before(entries: int, distance: int = 0) -> int:
    """Round ``entries`` up, so that the byte ``distance`` (a multiple of 16) behind them begins a sector."""
    return entries + -(entries + distance // ENTRY) % (SECTOR // ENTRY)
