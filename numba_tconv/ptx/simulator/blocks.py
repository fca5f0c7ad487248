"""Patches of the CUDA simulator, whose threads are Python threads.

* Its ``cuda.shared.array`` may give concurrent threads an array each. Here the first allocates NaN.
* Its polling starves new threads. Here threads are reused, and pass the turn at a barrier or their end.
* Its device functions patch their module in every call. Here a launch patches all. Plain numbers convert directly."""

import contextlib
import os
import sys
import threading

import numpy as np
from numba import types
from numba.cuda.simulator import kernel
from numba.cuda.simulator.kernelapi import FakeCUDAShared
from numba.np import numpy_support

MODULE = sys.modules["numba.cuda"]
NAMES = {}  # kernels' modules' globals, by id
NUMBERS = {bool, int, float, np.bool_, *(np.dtype(letter).type for letter in "bBhHiIlLqQefd")}
_turn = threading.Lock()
_dynamic = FakeCUDAShared.array


def array(shared: FakeCUDAShared, shape, dtype, alignment=None):
    """cuda.shared.array: one a source line and block; dynamic memory if ``shape`` is 0."""
    if shape == 0 or alignment is not None:
        return _dynamic(shared, shape, dtype, alignment)
    caller = sys._getframe(1)
    place = caller.f_code.co_filename, caller.f_lineno
    with _turn:
        if place not in shared._allocations:
            kind = numpy_support.as_dtype(dtype) if isinstance(dtype, types.Type) else dtype
            shared._allocations[place] = np.empty(shape, kind)
            shared._allocations[place].view(np.uint8).fill(0xFF)
        return shared._allocations[place]


class Thread(kernel.BlockThread):
    def __init__(self, block: "Block"):
        super().__init__(None, block, (0, 0, 0), (0, 0, 0), False)
        self.turn = _locked()
        self.start()

    def serve(self, block: "Block", function, block_index, thread_index):
        self._manager, self.ended, self.abort, self.exception = block, False, False, None
        self.blockIdx, self.threadIdx = kernel.Dim3(*block_index), kernel.Dim3(*thread_index)
        (x, y, z), (width, height, _) = thread_index, block._block_dim
        self.thread_id = x + width * (y + height * z)
        self._target, self._args, self._kwargs = function, (), {}

    def run(self):
        while True:
            self.turn.acquire()
            try:
                super().run()
            except BaseException as error:
                self.exception = error, error.__traceback__
            self.ended = True
            self._manager.next_turn()

    def syncthreads(self):
        self._manager.next_turn()
        self.turn.acquire()
        if self.abort:
            raise RuntimeError("another thread of the block failed")


class Block(kernel.BlockManager):
    """Threads run one by one up to a barrier, in reverse up to the next, to expose missing barriers."""

    def run(self, grid_point, *arguments):
        points = list(np.ndindex(*self._block_dim))
        threads = [_idle.pop() if _idle else Thread(self) for _ in points]
        serving, failed, self.all_had_it = threads, None, _locked()
        for thread, point in zip(threads, points, strict=True):
            thread.serve(self, lambda: self.compute(arguments), grid_point, point)
        while threads:
            self.waiting = iter(threads)
            self.next_turn()
            self.all_had_it.acquire()
            failed = failed or next((thread.exception for thread in threads if thread.exception), None)
            threads = [thread for thread in reversed(threads) if not thread.ended]
            for thread in threads:
                thread.abort = failed is not None
        _idle.extend(serving)
        if failed:
            error, where = failed
            raise error.with_traceback(where)

    def compute(self, arguments):
        with np.errstate(divide="raise") if self._debug else contextlib.nullcontext():
            self._f(*arguments)

    def next_turn(self):
        thread = next(self.waiting, None)
        (thread.turn if thread else self.all_had_it).release()


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


_idle: list[Thread] = []
os.register_at_fork(after_in_child=_idle.clear)  # a child has no such threads
_make, _launch = kernel.FakeCUDAKernel.__init__, kernel.FakeCUDAKernel.__call__


def make(made: kernel.FakeCUDAKernel, function, *arguments, **options):
    _make(made, function, *arguments, **options)
    NAMES[id(function.__globals__)] = function.__globals__


@contextlib.contextmanager
def meaning_everywhere(function, of_kernel):
    """Let ``cuda`` mean ``of_kernel`` in all known modules."""
    having = [names for names in NAMES.values() if names.get("cuda") is MODULE]
    for names in having:
        names["cuda"] = of_kernel
    try:
        yield
    finally:
        for names in having:
            names["cuda"] = MODULE


def call(function: kernel.FakeCUDAKernel, *arguments):
    if function._device or kernel._kernel_context is not None:
        return function.fn(*arguments)
    return _launch(function, *arguments)


def convert(kind: types.Number, *arguments):
    """``kind`` of a number, else Numba's own."""
    if len(arguments) == 1 and type(arguments[0]) in NUMBERS:
        return getattr(np, kind.name)(arguments[0])
    return types.Type.__call__(kind, *arguments)


def mend() -> None:
    FakeCUDAShared.array = array
    kernel.BlockManager, kernel.swapped_cuda_module = Block, meaning_everywhere
    kernel.FakeCUDAKernel.__init__, kernel.FakeCUDAKernel.__call__ = make, call
    types.Integer.__call__ = types.Float.__call__ = convert
