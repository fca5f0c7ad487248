"""Progress bars."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
DELAY_S = 2


def progress(items: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
    """``items``, with a bar after DELAY_S seconds on a terminal, else a line on stderr; TQDM_DISABLE hides both."""
    stream = sys.stderr
    with contextlib.suppress(OSError, ValueError):  # unwritable
        if getattr(stream, "isatty", bool)():
            return iter(tqdm(items, desc=label, total=total, leave=False, delay=DELAY_S))
        if stream and not os.environ.get("TQDM_DISABLE"):
            print(f"{label} ...", file=stream, flush=True)
    return iter(items)
