"""What the driver reads at a launch."""

import ctypes
import functools
import os
from array import array
from collections.abc import Callable

EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class Launch:
    """A launch's argument slots and configuration, at fixed addresses."""

    def __init__(self, slots: array, config: "Config"):
        self.slots, self.config = slots, config
        first, count = slots.buffer_info()  # never grows, so it stays in place
        self._pointers = array("q", range(first, first + 8 * count, 8))
        self.addresses, _ = self._pointers.buffer_info()
        self.config_address = ctypes.addressof(config)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("gridDim", ctypes.c_uint * 3),
        ("blockDim", ctypes.c_uint * 3),
        ("sharedMemBytes", ctypes.c_uint),
        ("hStream", ctypes.c_void_p),
        ("attrs", ctypes.POINTER(_Attribute)),
        ("numAttrs", ctypes.c_uint),
    )

    @classmethod
    def of(cls, grid: tuple[int, int, int], threads: int, shared_bytes: int, early: bool = False) -> "Config":
        """A configuration without the stream. ``early``: see Kernel.prepare."""
        config = cls(grid, (threads, 1, 1), shared_bytes)
        if early:
            attribute = _Attribute(EARLY)
            attribute.value[0] = 1
            config.attrs, config.numAttrs = ctypes.pointer(attribute), 1
        return config


@functools.cache
def launch_kernel() -> Callable[[int, int, int, None], int]:
    """The driver's cuLaunchKernelEx(config, function, arguments, extra), without the bindings' conversions."""
    function = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1").cuLaunchKernelEx
    function.argtypes, function.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    return function
