"""Compilation before a measurement."""

import contextlib
import os
from collections.abc import Iterable

from numba_tconv.runtime import cache
from numba_tconv.runtime.device import current_device
from numba_tconv.runtime.kernel import target
from numba_tconv.torch_api import compile_ahead


def compile_all(calls: Iterable) -> None:
    """Compile the kernels of ``calls`` for the current GPU, in parallel, if the cache keeps them."""
    try:
        cache.writable()
    except (RuntimeError, OSError):
        return
    with contextlib.suppress(OSError):
        compile_ahead.fill(list(calls), target(current_device().cc), os.cpu_count() or 1)
