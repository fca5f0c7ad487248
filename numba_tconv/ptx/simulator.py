"""Mends for the CUDA simulator, whose threads are threads of Python: the shared arrays of a block, and its barriers.

Its own ``cuda.shared.array`` looks an array up and then allocates it, so two threads that come at the same time may get
one each, and what the block computes is wrong. Here the first to come allocates.

Its own blocks ask all their threads, over and over, whether they wait, and so keep the interpreter from those that
compute: most of the time. Here the last thread to come to a barrier, or to its end, says so.

Its own device functions, at every call, put what ``cuda`` shall mean in a kernel into their module, and count who else
has; and types, at every conversion of a number, ask first whether a signature is meant. Together that takes longer than
what the kernels compute. Here a launch does the former once for all modules, and numbers are converted at once.
"""

from __future__ import annotations

import contextlib
import sys
import threading

import numpy as np
from numba import types
from numba.cuda.simulator import kernel
from numba.cuda.simulator.kernelapi import FakeCUDAShared
from numba.np import numpy_support

MODULE = sys.modules["numba.cuda"]
NAMES = {}  # by where they are
NUMBERS = {bool, int, float, np.bool_, *(np.dtype(letter).type for letter in "bBhHiIlLqQefd")}
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


class Thread(kernel.BlockThread):
    """A thread that tells its block when it waits or has ended."""

    def __init__(self, function, block: Block, *where):
        super().__init__(function, block, *where)
        self.block, self.ended, self.passes = block, False, _locked()

    def run(self):
        try:
            super().run()  # which keeps exceptions
        finally:
            self.ended = True
            self.block.arrive()

    def syncthreads(self):
        self.block.arrive()
        self.passes.acquire()
        if self.abort:
            raise RuntimeError("another thread of the block failed")


class Block(kernel.BlockManager):
    """A block that is woken when all its threads wait or have ended, and lets those go on that wait."""

    def run(self, grid_point, *arguments):
        self.turn, self.everyone_is_here = threading.Lock(), _locked()
        threads = [
            Thread(lambda: self._f(*arguments), self, grid_point, point, self._debug)
            for point in np.ndindex(*self._block_dim)
        ]
        self.under_way = len(threads)
        for thread in threads:
            thread.start()
        while threads:
            self.everyone_is_here.acquire()
            failed = next((thread for thread in threads if thread.exception), None)
            threads = [thread for thread in threads if not thread.ended]
            self.under_way = len(threads)
            for thread in threads:
                thread.abort = failed is not None
                thread.passes.release()
            if failed:
                error, where = failed.exception
                raise error.with_traceback(where)

    def arrive(self):
        with self.turn:
            self.under_way -= 1
            is_last = self.under_way == 0
        if is_last:
            self.everyone_is_here.release()


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


_make, _launch = kernel.FakeCUDAKernel.__init__, kernel.FakeCUDAKernel.__call__


def make(made: kernel.FakeCUDAKernel, function, *arguments, **options):
    """Of a kernel or a device function, remember the names that its module has."""
    _make(made, function, *arguments, **options)
    NAMES[id(function.__globals__)] = function.__globals__


@contextlib.contextmanager
def meaning_everywhere(function, of_kernel):
    """While a kernel runs, ``cuda`` is ``of_kernel`` in every module that has kernels or device functions."""
    having = [names for names in NAMES.values() if names.get("cuda") is MODULE]
    for names in having:
        names["cuda"] = of_kernel
    try:
        yield
    finally:
        for names in having:
            names["cuda"] = MODULE


def call(function: kernel.FakeCUDAKernel, *arguments):
    """A device function is what it is in Python; a kernel is launched."""
    if function._device or kernel._kernel_context is not None:
        return function.fn(*arguments)
    return _launch(function, *arguments)


def convert(kind: types.Number, *arguments):
    """``kind`` of a number; else what Numba makes of it."""
    if len(arguments) == 1 and type(arguments[0]) in NUMBERS:
        return getattr(np, kind.name)(arguments[0])
    return types.Type.__call__(kind, *arguments)


def mend() -> None:
    FakeCUDAShared.array = array
    kernel.BlockManager, kernel.swapped_cuda_module = Block, meaning_everywhere
    kernel.FakeCUDAKernel.__init__, kernel.FakeCUDAKernel.__call__ = make, call
    types.Integer.__call__ = types.Float.__call__ = convert
