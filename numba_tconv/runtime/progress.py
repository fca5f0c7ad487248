"""Progress bars."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
DELAY_S = 2


def progress(items: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
    """``items``, with a bar after DELAY_S seconds on a terminal, else a line on stderr; TQDM_DISABLE hides both."""
    if sys.stderr.isatty():
        return iter(tqdm(items, desc=label, total=total, leave=False, delay=DELAY_S))
    if not os.environ.get("TQDM_DISABLE"):
        print(f"{label} ...", file=sys.stderr, flush=True)
    return iter(items)
