"""A thread block in Python: warps run one at a time, in a drawn order, mbarriers count, copies land late.

Two lanes stand for a warp: lane 0 for itself, lane OTHER for the others. They go on together, as on a GPU: k6's lane 0
gives its warpgroup's turn away when it has released a stage itself."""

import random
import threading
from bisect import bisect_right
from types import SimpleNamespace

from numba import float32

from tests.kernels.test_tensor_store import cast_quickly

OTHER = 29


class Over(BaseException):
    """Ends a thread whose block has ended."""


class Memory:
    """Shared memory: pieces by address, each of a source from one of its bytes on."""

    def __init__(self):
        self.pieces, self.begins = [], []  # a piece: begin, end, source, byte

    def write(self, at, size, source, byte=0):
        kept = [piece for piece in self.pieces if piece[1] <= at or at + size <= piece[0]]
        self.pieces = sorted([*kept, (at, at + size, source, byte)], key=lambda piece: piece[0])
        self.begins = [begin for begin, *_ in self.pieces]

    def read(self, at, size=1):
        """The source of ``size`` bytes, and the first byte in it."""
        first, to, found = at, at + size, None
        for begin, end, source, byte in self.pieces[max(bisect_right(self.begins, at) - 1, 0) :]:
            if not begin <= at < end:
                break
            here = source, byte + first - begin
            found = found or here
            assert found == here, "of several sources"
            at = end
            if at >= to:
                return found
        raise AssertionError("nothing has arrived there")


class Thread:
    def __init__(self, block, number, function):
        self.block, self.number, self.lane, self.warp = block, number, number % 32, number // 32
        self.stands_for = 1 if self.lane == 0 else 31
        self.ready, self.rank, self.ended = (lambda: True), block.rng.random(), False
        self.products = []  # under way: the shared memory that they read, of each group
        self.stored, self.marks, self.views, self.at = [], set(), 0, None  # at: what it waits for
        self.go = threading.Semaphore(0)
        self.runs = threading.Thread(target=self.run, args=(function,), daemon=True)
        self.runs.start()

    def run(self, function):
        try:
            self.pause(lambda: True, first=True)
            function()
        except Over:
            pass
        except BaseException as error:
            self.block.error = self.block.error or error
        self.ended = True
        self.block.back.release()

    def pause(self, ready, first=False):
        self.ready = ready
        if not first:
            self.block.back.release()
        self.go.acquire()
        if self.block.over:
            raise Over


class Block:
    def __init__(self, number, blocks, seed):
        self.number, self.blocks, self.rng = number, blocks, random.Random(f"{seed} {number}")
        self.back, self.error, self.over, self.now = threading.Semaphore(0), None, False, None
        self.barriers, self.met, self.copies, self.memory, self.threads = {}, {}, [], Memory(), []
        self.words, self.elements, self.marks, self.parties = {}, {}, {}, {}  # words: float32's view of shared memory

    def run(self, function, warps):
        """Run ``function()`` in each of ``warps``' threads."""
        self.threads = [Thread(self, 32 * warp + lane, function) for warp in warps for lane in (0, OTHER)]
        try:
            while self.error is None and not all(thread.ended for thread in self.threads):
                self.step()
        finally:
            self.over = True
            for thread in self.threads:
                thread.go.release()
                thread.runs.join()
        if self.error:
            raise self.error
        assert not self.copies, "that nobody waited for"
        for (name, count), threads in self.parties.items():
            assert sum(thread.stands_for for thread in threads) == count, ("threads that meet", name)

    def step(self):
        ready = [thread for thread in self.threads if not thread.ended and thread.ready()]
        if self.copies and (not ready or self.rng.random() < 0.1):
            self.land(self.copies.pop(self.rng.randrange(len(self.copies))))
            return
        assert ready, ("all wait", [(thread.number, thread.at) for thread in self.threads if not thread.ended])
        drawn = self.rng.random() < 0.2
        first = self.rng.choice(ready) if drawn else max(ready, key=lambda thread: thread.rank)
        if drawn:
            first.rank = self.rng.random()
        for thread in (first, *(other for other in ready if other.warp == first.warp and other is not first)):
            if thread.ready():
                self.now = thread
                thread.go.release()
                self.back.acquire()

    # mbarriers: [arrivals of a phase, missing ones, missing bytes, ended phases]

    def init(self, at, count):
        assert at not in self.barriers
        self.barriers[at] = [count, count, 0, 0]

    def arrive(self, at, size=0):
        barrier = self.barriers[at]
        barrier[1] -= self.now.stands_for
        barrier[2] += size
        assert barrier[1] >= 0, ("too many arrivals", at, barrier, self.now.number)
        self.settle(barrier)

    def expect(self, at, size):
        self.barriers[at][2] += size

    def settle(self, barrier):
        if barrier[1] == barrier[2] == 0:
            barrier[1], barrier[3] = barrier[0], barrier[3] + 1

    def wait(self, at, parity):
        assert parity in (0, 1)
        barrier = self.barriers[at]
        self.now.at = at, parity
        self.now.pause(lambda: barrier[3] % 2 != parity)

    def meet(self, name, count):
        """A barrier of ``count`` threads."""
        arrived, times = self.met.get(name, (0, 0))
        arrived += self.now.stands_for
        assert arrived <= count
        self.parties.setdefault((name, count), set()).add(self.now)
        self.met[name] = (0, times + 1) if arrived == count else (arrived, times)
        self.now.at = name
        self.now.pause(lambda: self.met[name][1] > times)

    # The copy engine, and products.

    def copy(self, at, size, source, byte, barrier):
        self.copies.append((at, size, source, byte, barrier))

    def land(self, copy):
        at, size, source, byte, barrier = copy
        for thread in self.threads:
            for begin, end in (place for group in thread.products for place in group):
                assert end <= at or at + size <= begin, "products that are under way read there"
        self.memory.write(at, size, source, byte)
        if barrier is not None:
            self.barriers[barrier][2] -= size
            self.settle(self.barriers[barrier])

    def wait_for_products(self, most):
        def wait():
            self.now.products[: len(self.now.products) - most] = []

        return wait


def cuda_of(current):
    """``numba.cuda`` of the block ``current()``'s running thread."""

    class Cuda:
        shared = SimpleNamespace(array=lambda size, dtype: current().words if dtype is float32 else current().elements)
        local = SimpleNamespace(array=lambda size, dtype: [None] * size)
        threadIdx = property(lambda self: SimpleNamespace(x=current().now.number))
        blockIdx = property(lambda self: SimpleNamespace(x=current().number))
        gridDim = property(lambda self: SimpleNamespace(x=current().blocks))

        def syncthreads(self):
            current().meet("all", 32 * len({thread.warp for thread in current().threads}))

        def syncwarp(self):
            current().meet(("warp", current().now.warp), 32)

        def shfl_sync(self, mask, value, source):
            return value

    return Cuda()


def in_python(monkeypatch, current, modules, **fakes):
    """Device functions of the modules are Python, their instructions those of the block ``current()``."""
    fakes = {
        "device_function": lambda function: function,
        "cuda": cuda_of(current),
        "Kernel": lambda name, function, *_, **__: function,
        "recomputed": lambda value: value,
        "opaque": lambda value: value,
        "repeated": lambda function, count: lambda k, state: [function(k + z, state) for z in range(count)] and None,
        "elected": lambda: current().now.lane == 0,
        "mbarrier_init": lambda at, count: current().init(at, count),
        "mbarrier_arrive": lambda at: current().arrive(at),
        "mbarrier_expect_tx": lambda at, size: current().expect(at, size),
        "mbarrier_arrive_expect_tx": lambda at, size: current().arrive(at, size),
        "mbarrier_wait": lambda at, parity: current().wait(at, parity),
        "fence_mbarrier_init": lambda: current().now.marks.add("fence"),
        "barrier_sync": lambda name, count: current().meet(name, count),
        "wgmma_fence": lambda: None,
        "wgmma_commit": lambda: None,
        "wgmma_wait": lambda most: lambda: current().wait_for_products(most)(),
        "setmaxnreg": lambda count, grow: lambda: current().now.marks.add("grow" if grow else "shrink"),
        "griddepcontrol_wait": lambda: current().now.marks.add("waited"),
        "griddepcontrol_launch_dependents": lambda: current().now.marks.add("launched"),
    } | fakes
    cast_quickly(monkeypatch, *modules)
    for module in modules:
        for name, value in [*vars(module).items()]:
            if name in fakes:
                monkeypatch.setattr(module, name, fakes[name])
            elif hasattr(value, "py_func"):
                monkeypatch.setattr(module, name, value.py_func)
