"""From torch tensors to a running kernel: compile once, launch on the caller's stream.

Kernels are launched through the driver with arguments laid out as Numba's calling convention wants them, without
Numba's own launch path, which costs tens of microseconds a call and knows neither bfloat16 nor torch's streams.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import threading
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace

import numpy as np
import torch
from numba import cuda, types

from numba_tconv.ptx import SIMULATOR

from . import cache

if SIMULATOR:
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray
else:
    from cuda.bindings import driver
    from numba.cuda.dispatcher import CUDADispatcher as Dispatcher

    from .numba_patches import remembered_call_types


class _Thread(threading.local):
    has_context = False


_thread = _Thread()
_compiling = threading.RLock()
UNKNOWN = None, -1  # of a kernel that is not loaded, its function, and shared memory that it may have
ADDRESS = 4  # of a tensor's slots, the one that holds its address
STATIC_SHARED_LIMIT = 48 * 1024  # bytes of shared memory, static and dynamic, that a kernel gets without asking


def strided(storage: types.Type, ndim: int) -> types.Array:
    """The type of an argument that is read through its strides."""
    return types.Array(storage, ndim, "A")


def contiguous(storage: types.Type, ndim: int) -> types.Array:
    """The type of a contiguous argument."""
    return types.Array(storage, ndim, "C")


def flat(storage: types.Type) -> types.Array:
    """The type of an argument passed as the span of memory from its first to its last element."""
    return types.Array(storage, 1, "C")


def target(cc: tuple[int, int]) -> tuple:
    """What PTX is made for on a GPU of compute capability ``cc``; "a" adds what only that one has: wgmma.

    Above 9.0 it is made for 9.0 without that, and ptxas makes any newer GPU's machine code of it: the NVVM for newer
    ones leaves a thread's arrays in local memory.
    """
    return architecture(cc) if cc <= (9, 0) else (9, 0)


def architecture(cc: tuple) -> tuple:
    """What machine code is made for on a GPU of compute capability ``cc``."""
    return (*cc, "a") if cc == (9, 0) else cc


@dataclass(eq=False)
class Kernel:
    """A ``@cuda.jit`` function with everything fixed that its machine code depends on.

    ``signature`` holds the Numba type of each argument; ``threads`` is the block size; ``shared_bytes`` the dynamic
    shared memory of a block, where it does not depend on the problem; ``min_blocks`` the blocks that must fit on one
    multiprocessor (launch bounds); ``key`` all that tells this kernel from others of its name, for the cache on disk.
    """

    name: str
    function: Callable
    signature: tuple
    threads: int
    shared_bytes: int = 0
    min_blocks: int = 1
    fastmath: bool = False
    key: str = ""
    _handles: dict = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def simulated(self):
        return cuda.jit(self.function)

    def ptx(self, cc: tuple) -> str:
        """PTX for a compute capability such as (8, 0) or (9, 0, "a"); needs no GPU."""
        return _to_the_end(self._compile, cc)

    def _compile(self, cc: tuple) -> str:
        bounds = (self.threads, self.min_blocks)
        with _no_collection(), _compiling_for(cc), remembered_call_types():
            ptx, _ = cuda.compile_ptx(
                self.function, self.signature, cc=cc, launch_bounds=bounds, fastmath=self.fastmath
            )
        # GPUs below 9.0 launch nothing early, so there these instructions would mean nothing, and do not exist.
        return ptx if cc >= (9, 0) else re.sub(r"griddepcontrol\.\w+;", "", ptx)

    def kept_ptx(self, cc: tuple) -> str:
        """PTX as it is kept on disk, or compiled now and kept."""
        return cache.ptx(self.name, self.key, cc, lambda: self.ptx(cc)) if self.key else self.ptx(cc)

    def handle(self, device: int, shared_bytes: int) -> int:
        """The driver's function for ``device``, compiled and loaded at the first call.

        Raises RuntimeError if that were to happen while a CUDA graph is captured.
        """
        known = self._handles.get(device, UNKNOWN)
        if known[1] < shared_bytes:
            # Threads that call at the same time wait for one compilation, and none lowers another's shared memory.
            with self._lock:
                known = self._handles.get(device, UNKNOWN)
                if known[1] < shared_bytes:
                    self._refuse_capture()
                    known = self._handles[device] = self._load(device, shared_bytes), shared_bytes
        return known[0]

    def _refuse_capture(self):
        """Loading allocates and may wait for the GPU, for which a capture, now or at a replay, has no place."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.name} is not compiled and loaded yet, which cannot be done while a CUDA graph is captured: "
                "run what is to be captured once before, with the same sizes"
            )

    def _load(self, device: int, shared_bytes: int):
        """Compile, load on ``device``, which is the current one, and allow blocks ``shared_bytes``.

        The driver turns the PTX into machine code, as the whole program that it is. Numba's own way is a linker, which
        must expect other code beside it: it ignores setmaxnreg and runs wgmma one by one.
        """
        ptx = self.kept_ptx(target(torch.cuda.get_device_capability(device)))
        entry = re.search(r"\.entry\s+([\w$]+)", ptx)[1]
        module = _check(driver.cuModuleLoadData(ptx.encode() + b"\0"))
        function = _check(driver.cuModuleGetFunction(module, entry.encode()))
        if shared_bytes:  # however few: what the kernel declares itself counts against the limit too
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        return function

    @cached_property
    def _forms(self) -> list[str]:
        return [_form(kind) for kind in self.signature]

    def _slots(self, arguments) -> list[int]:
        """The arguments in Numba's layout; every slot is eight bytes, of which an int32 uses the lower four."""
        slots = []
        for form, argument in zip(self._forms, arguments, strict=True):
            if form == "number":
                slots.append(argument)
            else:
                slots += argument if form == "tuple" else _tensor_slots(form, argument)
        return slots

    def launch(self, blocks: int | tuple[int, int, int], *arguments, shared_bytes: int | None = None):
        """Run on torch's current stream of the current device; arguments are tensors, integers and tuples of them."""
        shared_bytes = self.shared_bytes if shared_bytes is None else shared_bytes
        grid = blocks if isinstance(blocks, tuple) else (blocks, 1, 1)
        if SIMULATOR:
            views = [_simulated(t, a) for t, a in zip(self.signature, arguments, strict=True)]
            self.simulated[grid, self.threads, 0, shared_bytes](*views)
            return
        self._launch(grid, shared_bytes, _Parameters(array("q", self._slots(arguments))))

    def _launch(self, grid: tuple[int, int, int], shared_bytes: int, parameters: _Parameters, early: bool = False):
        """Run with the arguments in Numba's layout."""
        device = torch._C._cuda_getDevice()
        if not _thread.has_context:
            enter_context(device)
        known, (x, y, z) = self._handles.get(device, UNKNOWN), grid
        function = known[0] if known[1] >= shared_bytes else self.handle(device, shared_bytes)
        stream = torch._C._cuda_getCurrentRawStream(device)
        if early:
            config = parameters.early_launch(grid, self.threads, shared_bytes)
            config.hStream = stream
            result = driver.cuLaunchKernelEx(config, function, parameters.addresses, 0)
        else:
            result = driver.cuLaunchKernel(
                function, x, y, z, self.threads, 1, 1, shared_bytes, stream, parameters.addresses, 0
            )
        if result[0]:
            _check(result)

    def prepare(
        self, blocks: int | tuple[int, int, int], *arguments, shared_bytes: int | None = None, early: bool = False
    ) -> Prepared:
        """A launch that may be made many times, with other tensors laid out alike: ``arguments`` are as those of
        ``launch``, but for the tensors, which are ``alike`` the later ones, and GIVEN for integers told later.

        ``early``: blocks may begin before the kernel that is before it on the stream has ended (ptx/grids.py, from
        compute capability 9.0). This one waits itself, before it reads what that one writes and in any case before it
        ends, since what comes after it on the stream waits for it alone.
        """
        shared_bytes = self.shared_bytes if shared_bytes is None else shared_bytes
        return Prepared(self, blocks if isinstance(blocks, tuple) else (blocks, 1, 1), shared_bytes, arguments, early)


GIVEN = object()  # in the place of an integer that is told at each launch


def alike(shape: tuple, dtype: torch.dtype, strides: tuple | None = None) -> torch.Tensor:
    """A tensor without memory, in the place of those that are told at each launch; None: contiguous."""
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


class Prepared:
    """A launch with everything worked out but the addresses: see Kernel.prepare."""

    def __init__(
        self, kernel: Kernel, grid: tuple[int, int, int], shared_bytes: int, arguments: tuple, early: bool = False
    ):
        self.kernel, self.grid, self.shared_bytes, self.arguments = kernel, grid, shared_bytes, arguments
        self.early = early
        self.given = [at for at, a in enumerate(arguments) if a is GIVEN or isinstance(a, torch.Tensor)]
        self.slots, self.places = array("q"), []
        # Taken out and put back whole, which lists do in one step, whatever the thread.
        self._idle: list[_Parameters] = []
        for form, argument in zip(kernel._forms, arguments, strict=True):
            start = len(self.slots)
            if argument is GIVEN:
                self.places.append(start)
                self.slots.append(0)
            elif form == "number":
                self.slots.append(argument)
            elif form == "tuple":
                self.slots.extend(argument)
            else:
                self.places.append(start + ADDRESS)
                self.slots.extend(_tensor_slots(form, argument))

    @cached_property
    def ordinary(self) -> Prepared:
        """The same launch, but not early."""
        return Prepared(self.kernel, self.grid, self.shared_bytes, self.arguments) if self.early else self

    def __call__(self, *given):
        """Launch with the tensors and integers that ``prepare`` left open, in their order."""
        if SIMULATOR:
            arguments = list(self.arguments)
            for at, value in zip(self.given, given, strict=True):
                arguments[at] = value
            self.kernel.launch(self.grid, *arguments, shared_bytes=self.shared_bytes)
            return
        try:
            parameters = self._idle.pop()
        except IndexError:
            parameters = _Parameters(self.slots[:])
        slots = parameters.slots
        if len(given) != len(self.places):  # sooner found than by a strict zip, which takes a quarter of a microsecond
            raise ValueError(f"{len(self.places)} arguments were left open, {len(given)} are given")
        for at, value in zip(self.places, given):  # noqa: B905
            slots[at] = value if type(value) is int else value.data_ptr()
        self.kernel._launch(self.grid, self.shared_bytes, parameters, self.early)
        self._idle.append(parameters)


class _Parameters:
    """Where the driver reads the arguments of one launch: the slots, and the address of each."""

    def __init__(self, slots: array):
        self.slots = slots  # which stay where they are, for as long as none is added
        first, count = slots.buffer_info()
        self._pointers = array("q", range(first, first + 8 * count, 8))
        self.addresses, _ = self._pointers.buffer_info()
        self._early = None

    def early_launch(self, grid: tuple[int, int, int], threads: int, shared_bytes: int) -> driver.CUlaunchConfig:
        """How an early kernel is launched, but for the stream; a launch that is made again makes it once."""
        if self._early is None:
            attribute, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
            config.sharedMemBytes = shared_bytes
            config.attrs, config.numAttrs = [attribute], 1
            self._early = config
        return self._early


def _to_the_end(function: Callable, *arguments):
    """What the function returns. An interrupt is raised when it has ended, or at a second one: within Numba it might
    end a generator by which Numba reads its registries, and no kernel would compile in this process any more. Python
    gives interrupts to the main thread alone, so the function gets a thread of its own."""
    if threading.current_thread() is not threading.main_thread():
        return function(*arguments)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # a thread that an interrupt meets while it starts is not waited for: let it start
        return pool.submit(function, *arguments).result()


@contextlib.contextmanager
def _no_collection():
    """No garbage collection meanwhile: a compiler makes millions of objects, and each round would walk all of them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _compiling_for(cc: tuple):
    """Device functions that are called, not copied into their callers by Numba, are compiled for ``cc``.

    Numba would compile them for the current GPU, which need not be the one, and need not exist.
    """
    dispatcher = sys.modules[Dispatcher.__module__]
    with _compiling:
        current, dispatcher.get_current_device = (
            dispatcher.get_current_device,
            lambda: SimpleNamespace(compute_capability=cc),
        )
        try:
            yield
        finally:
            dispatcher.get_current_device = current


@contextlib.contextmanager
def capture_ignored():
    """Meanwhile this thread may ask the driver what is unsafe within a capture, of what is not part of it."""
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = _check(driver.cuThreadExchangeStreamCaptureMode(mode))
    try:
        yield
    finally:
        _check(driver.cuThreadExchangeStreamCaptureMode(before))


def _check(result):
    """The value that a driver call returned beside its status, if any. Raises RuntimeError if it failed."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"CUDA driver: {driver.cuGetErrorString(status)[1].decode()} ({status.name})")
    return values[0] if values else None


def enter_context(device: int):
    """Give torch's context to a thread that has none yet: torch's functions need none, the driver's launches and tensor
    maps do."""
    if _thread.has_context:
        return
    if not int(_check(driver.cuCtxGetCurrent())):
        _check(driver.cuCtxSetCurrent(_check(driver.cuDevicePrimaryCtxRetain(driver.CUdevice(device)))))
    _thread.has_context = True


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one, both included."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _tensor_slots(form: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor in Numba's layout; slot ADDRESS of it is its address."""
    itemsize = tensor.element_size()
    if form == "flat":  # an expanded tensor has more elements than memory
        span = _span(tensor)
        return 0, 0, span, itemsize, tensor.data_ptr(), span, itemsize
    sizes = *tensor.shape, *(stride * itemsize for stride in tensor.stride())
    return 0, 0, tensor.numel(), itemsize, tensor.data_ptr(), *sizes


def _form(kind: types.Type) -> str:
    if isinstance(kind, types.UniTuple):
        return "tuple"
    if isinstance(kind, types.Array):
        return "flat" if kind.ndim == 1 and kind.layout == "C" else "strided"
    return "number"


def _simulated(kind: types.Type, argument):
    """The argument as the simulator's device array over the same memory."""
    if not isinstance(kind, types.Array):
        return argument
    if kind.ndim == 1 and kind.layout == "C":
        argument = argument.as_strided((_span(argument),), (1,))
    if argument.dtype == torch.bfloat16:
        return FakeCUDAArray(argument.view(torch.int16).numpy().view(np.uint16))
    return FakeCUDAArray(argument.numpy())
