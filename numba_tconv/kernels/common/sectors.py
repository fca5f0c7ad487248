"""Sectors of 32 bytes. A sector is fetched twice if 16-byte copies put its halves into two sectors of shared memory."""

from __future__ import annotations

SECTOR = 32
ENTRY = 8  # bytes of an entry of the fixed-size arrays before dynamic shared memory


def entries_before(entries: int, distance: int = 0) -> int:
    """``entries`` rounded up, so that what lies ``distance`` bytes (a multiple of 16) behind them begins on a
    sector."""
    return entries + -(entries + distance // ENTRY) % (SECTOR // ENTRY)
