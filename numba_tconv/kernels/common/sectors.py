"""Sectors of 32 bytes. A copy fetches a sector twice if its halves go to two sectors of shared memory."""

SECTOR = 32
ENTRY = 8  # bytes of an entry before dynamic shared memory


def entries_before(entries: int, distance: int = 0) -> int:
    """``entries`` rounded up, so that the byte ``distance`` (a multiple of 16) behind them begins a sector."""
    return entries + -(entries + distance // ENTRY) % (SECTOR // ENTRY)
