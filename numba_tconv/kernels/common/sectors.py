"""Sectors of 32 bytes. Copies that put a sector's halves into two shared sectors fetch it twice."""

from __future__ import annotations

SECTOR = 32
ENTRY = 8  # bytes of an entry before dynamic shared memory


def entries_before(entries: int, distance: int = 0) -> int:
    """Round ``entries`` up: the byte ``distance`` (a multiple of 16) behind them begins a sector."""
    return entries + -(entries + distance // ENTRY) % (SECTOR // ENTRY)
