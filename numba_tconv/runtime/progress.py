"""Progress bars for slow work."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
DELAY_S = 2


def progress(items: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
    """``items``; on a terminal with a bar on stderr after DELAY_S seconds, else with one line at the start."""
    if sys.stderr.isatty():
        return iter(tqdm(items, desc=label, total=total, leave=False, delay=DELAY_S))
    print(f"{label} ...", file=sys.stderr, flush=True)
    return iter(items)
