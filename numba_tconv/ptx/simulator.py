"""A mend for the CUDA simulator, whose threads are threads of Python: the shared arrays of a block.

Its own ``cuda.shared.array`` looks an array up and then allocates it, so two threads that come at the same time may get
one each, and what the block computes is wrong. Here the first to come allocates.
"""

from __future__ import annotations

import sys
import threading

import numpy as np
from numba import types
from numba.cuda.simulator.kernelapi import FakeCUDAShared
from numba.np import numpy_support

_turn = threading.Lock()
_dynamic = FakeCUDAShared.array


def array(shared: FakeCUDAShared, shape, dtype, alignment=None):
    """cuda.shared.array: one array for each line of a block's code, all of dynamic memory if ``shape`` is 0."""
    if shape == 0 or alignment is not None:
        return _dynamic(shared, shape, dtype, alignment)
    caller = sys._getframe(1)
    place = caller.f_code.co_filename, caller.f_lineno
    with _turn:
        if place not in shared._allocations:
            kind = numpy_support.as_dtype(dtype) if isinstance(dtype, types.Type) else dtype
            shared._allocations[place] = np.empty(shape, kind)
        return shared._allocations[place]


def mend() -> None:
    FakeCUDAShared.array = array
