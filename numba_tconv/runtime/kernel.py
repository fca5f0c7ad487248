"""Kernels, compiled once, launched on the caller's stream.

Numba's launch is slow and knows neither bfloat16 nor torch's streams.
"""

import contextlib
import gc
import re
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from numba import cuda, types

from numba_tconv.ptx import OPTIONS, SIMULATOR

from . import cache
from .launch import Config, Launch, launch_kernel

if SIMULATOR:
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray
else:
    from cuda.bindings import driver
    from numba.cuda.dispatcher import CUDADispatcher as Dispatcher

    from .numba_patches import remembered_call_types, shortened


class _Thread(threading.local):
    has_context = False


_thread = _Thread()
_compiling = threading.RLock()
UNKNOWN = None, -1  # (function, allowed shared bytes) of a kernel not loaded
ADDRESS = 4  # the slot, among a tensor's slots, that holds its address
STATIC_SHARED_LIMIT = 48 * 1024  # bytes that a block gets without asking


def strided(storage: types.Type, ndim: int) -> types.Array:
    return types.Array(storage, ndim, "A")


def contiguous(storage: types.Type, ndim: int) -> types.Array:
    return types.Array(storage, ndim, "C")


def flat(storage: types.Type) -> types.Array:
    """A tensor passed as its memory, first to last element."""
    return types.Array(storage, 1, "C")


def named(fields: type, **kinds: types.Type) -> types.BaseTuple:
    """Numba's type of the NamedTuple ``fields``, of types ``kinds``."""
    ordered = tuple(kinds[name] for name in fields._fields)
    return (
        types.NamedUniTuple(ordered[0], len(ordered), fields)
        if len(set(ordered)) == 1
        else types.NamedTuple(ordered, fields)
    )


def target(cc: tuple[int, int]) -> tuple:
    """PTX's target: at most 9.0; for newer GPUs NVVM keeps local arrays in memory."""
    return architecture(cc) if cc <= (9, 0) else (9, 0)


def architecture(cc: tuple) -> tuple:
    """Target of machine code; "a" adds wgmma."""
    return (*cc, "a") if cc == (9, 0) else cc


@dataclass(eq=False)
class Kernel:
    """A ``@cuda.jit`` function and what its machine code depends on.

    ``signature`` has Numba's types. A block has ``threads`` threads and by default ``shared_bytes`` of dynamic shared
    memory; at least ``min_blocks`` fit on a multiprocessor (launch bounds). ``key`` tells kernels of one name apart in
    the cache; with "" a kernel is never cached.
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
        """PTX for (8, 0) or (9, 0, "a"); needs no GPU."""
        return _to_the_end(self._compile, cc)

    def _compile(self, cc: tuple) -> str:
        bounds = (self.threads, self.min_blocks)
        with _no_collection(), _compiling_for(cc), remembered_call_types(), shortened():
            ptx, _ = cuda.compile_ptx(
                self.function, self.signature, cc=cc, launch_bounds=bounds, fastmath=self.fastmath, **OPTIONS
            )
        # Early launches exist from 9.0 on.
        return ptx if cc >= (9, 0) else re.sub(r"griddepcontrol\.\w+;", "", ptx)

    def kept_ptx(self, cc: tuple) -> str:
        return cache.ptx(self.name, self.key, cc, lambda: self.ptx(cc)) if self.key else self.ptx(cc)

    def handle(self, device: int, shared_bytes: int) -> int:
        """The driver's function on GPU ``device``, loaded at the first call.

        Raises RuntimeError where a graph capture would have to load it."""
        known = self._handles.get(device, UNKNOWN)
        if known[1] < shared_bytes:
            # One thread compiles; none lowers another's limit.
            with self._lock:
                known = self._handles.get(device, UNKNOWN)
                if known[1] < shared_bytes:
                    self._refuse_capture()
                    known = self._handles[device] = self._load(device, shared_bytes), shared_bytes
        return known[0]

    def _refuse_capture(self):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.name} is not compiled and loaded yet, which cannot be done while a CUDA graph is captured: "
                "run what is to be captured once before, with the same sizes"
            )

    def _load(self, device: int, shared_bytes: int):
        """Compile, load, and allow blocks ``shared_bytes``.

        The driver loads the PTX: Numba's linker would ignore setmaxnreg and serialise wgmma."""
        ptx = self.kept_ptx(target(torch.cuda.get_device_capability(device)))
        entry = re.search(r"\.entry\s+([\w$]+)", ptx)[1]
        module = _check(driver.cuModuleLoadData(ptx.encode() + b"\0"))
        function = _check(driver.cuModuleGetFunction(module, entry.encode()))
        if shared_bytes:  # the limit counts static memory too
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        return int(function)

    def launch(self, blocks: int | tuple[int, int, int], *arguments, shared_bytes: int | None = None):
        """Launch ``blocks`` once on torch's current stream; arguments as in ``prepare``."""
        tensors = [value for kind, value in _leaves(self.signature, arguments) if isinstance(kind, types.Array)]
        self.prepare(blocks, *arguments, shared_bytes=shared_bytes)(*tensors)

    def prepare(
        self, blocks: int | tuple[int, int, int], *arguments, shared_bytes: int | None = None, early: bool = False
    ) -> "Prepared":
        """A launch to be repeated with other tensors of the same layout.

        ``arguments`` are tensors (or ``alike``), integers and tuples of them. Each call passes all tensors anew, and an
        integer for each GIVEN, in order. ``early``: from compute capability 9.0, blocks may begin before the previous
        kernel ends; they must wait (ptx/grids.py) before they read its results and before they end.
        """
        shared_bytes = self.shared_bytes if shared_bytes is None else shared_bytes
        return Prepared(self, blocks if isinstance(blocks, tuple) else (blocks, 1, 1), shared_bytes, arguments, early)


GIVEN = object()  # an integer, or a tensor's address, passed at each launch


def alike(shape: tuple, dtype: torch.dtype, strides: tuple | None = None) -> torch.Tensor:
    """A tensor without memory, in place of one passed at each launch; contiguous unless ``strides`` are given."""
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


class Prepared:
    """A launch that lacks only what each call passes. ``slots``: Numba's arguments, eight bytes each."""

    def __init__(
        self, kernel: Kernel, grid: tuple[int, int, int], shared_bytes: int, arguments: tuple, early: bool = False
    ):
        self.kernel, self.grid, self.shared_bytes, self.arguments = kernel, grid, shared_bytes, arguments
        self.early = early
        self.slots, self.places = array("q"), []
        # Threads share it: pop and append are atomic.
        self._idle: list[Launch] = []
        for kind, value in _leaves(kernel.signature, arguments):
            start = len(self.slots)
            if value is GIVEN:
                self.places.append(start)
                self.slots.append(0)
            elif isinstance(kind, types.Array):
                self.places.append(start + ADDRESS)
                self.slots.extend(_tensor_slots(kind, value))
            else:
                self.slots.append(value)

    @cached_property
    def ordinary(self) -> "Prepared":
        """The same launch, but never early."""
        return Prepared(self.kernel, self.grid, self.shared_bytes, self.arguments) if self.early else self

    def __call__(self, *given):
        """Launch with the arguments left open, in order. Raises ValueError if their number is wrong."""
        if SIMULATOR:
            arguments = _filled(self.arguments, iter(given))
            views = [_simulated(t, a) for t, a in zip(self.kernel.signature, arguments, strict=True)]
            self.kernel.simulated[self.grid, self.kernel.threads, 0, self.shared_bytes](*views)
            return
        try:
            launch = self._idle.pop()
        except IndexError:
            config = Config.of(self.grid, self.kernel.threads, self.shared_bytes, self.early)
            launch = Launch(self.slots[:], config)
        slots = launch.slots
        if len(given) != len(self.places):  # faster than a strict zip
            raise ValueError(f"{len(self.places)} arguments were left open, {len(given)} are given")
        for at, value in zip(self.places, given):  # noqa: B905
            slots[at] = value if type(value) is int else value.data_ptr()
        device, config = torch._C._cuda_getDevice(), launch.config
        if not _thread.has_context:
            enter_context(device)
        function, allowed = self.kernel._handles.get(device, UNKNOWN)
        if allowed < self.shared_bytes:
            function = self.kernel.handle(device, self.shared_bytes)
        config.hStream = torch._C._cuda_getCurrentRawStream(device)
        status = launch_kernel()(launch.config_address, function, launch.addresses, None)
        if status:
            _check((driver.CUresult(status),))
        self._idle.append(launch)


def _to_the_end(function: Callable, *arguments):
    """The function's result. Interrupts wait: an unfinished compilation could break Numba's registries."""
    if threading.current_thread() is not threading.main_thread():
        return function(*arguments)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # an interrupted start is not waited for
        return pool.submit(function, *arguments).result()


@contextlib.contextmanager
def _no_collection():
    """Pauses garbage collection, which would walk the compiler's objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _compiling_for(cc: tuple):
    device = partial(SimpleNamespace, compute_capability=cc)
    with _compiling, mock.patch.object(sys.modules[Dispatcher.__module__], "get_current_device", device):
        yield


@contextlib.contextmanager
def capture_ignored():
    """Lets this thread make driver calls that a capture forbids."""
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = _check(driver.cuThreadExchangeStreamCaptureMode(mode))
    try:
        yield
    finally:
        _check(driver.cuThreadExchangeStreamCaptureMode(before))


def _check(result):
    status, *values = result
    if int(status):
        raise RuntimeError(f"CUDA driver: {driver.cuGetErrorString(status)[1].decode()} ({status.name})")
    return values[0] if values else None


def enter_context(device: int):
    """Give the thread torch's context, for driver calls."""
    if _thread.has_context:
        return
    if not int(_check(driver.cuCtxGetCurrent())):
        _check(driver.cuCtxSetCurrent(_check(driver.cuDevicePrimaryCtxRetain(driver.CUdevice(device)))))
    _thread.has_context = True


def _span(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _tensor_slots(kind: types.Array, tensor: torch.Tensor) -> tuple[int, ...]:
    itemsize = tensor.element_size()
    if _is_flat(kind):  # expanded tensors have more elements than memory
        span = _span(tensor)
        return 0, 0, span, itemsize, tensor.data_ptr(), span, itemsize
    sizes = *tensor.shape, *(stride * itemsize for stride in tensor.stride())
    return 0, 0, tensor.numel(), itemsize, tensor.data_ptr(), *sizes


def _is_flat(kind: types.Array) -> bool:
    return kind.ndim == 1 and kind.layout == "C"


def _leaves(kinds, arguments) -> Iterator[tuple[types.Type, object]]:
    """Arguments with types, tuples flattened as in Numba."""
    for kind, argument in zip(kinds, arguments, strict=True):
        if isinstance(kind, types.BaseTuple):
            yield from _leaves(kind, argument)
        else:
            yield kind, argument


def _like(argument: tuple, fields) -> tuple:
    return type(argument)(*fields) if hasattr(argument, "_fields") else tuple(fields)


def _filled(argument, given: Iterator):
    if isinstance(argument, tuple):
        return _like(argument, [_filled(field, given) for field in argument])
    return next(given) if argument is GIVEN or isinstance(argument, torch.Tensor) else argument


def _simulated(kind: types.Type, argument):
    """Tensors become arrays over the same memory."""
    if isinstance(kind, types.BaseTuple):
        return _like(argument, [_simulated(*field) for field in zip(kind, argument, strict=True)])
    if not isinstance(kind, types.Array):
        return argument
    if _is_flat(kind):
        argument = argument.as_strided((_span(argument),), (1,))
    if argument.dtype == torch.bfloat16 or kind.dtype == types.uint16:  # bits
        return FakeCUDAArray(argument.view(torch.int16).numpy().view(np.uint16))
    return FakeCUDAArray(argument.numpy())
