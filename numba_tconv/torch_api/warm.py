"""``warm``: kernels compiled ahead."""

import os
from collections.abc import Callable

from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime import cache
from numba_tconv.runtime.device import current_device
from numba_tconv.runtime.kernel import target
from numba_tconv.selection.directions import FORWARD, STEP

from . import compile_ahead
from .noted import computations


def warm(model: Callable, *inputs, training: bool = False, jobs: int | None = None, **keywords) -> int:
    """Compile the kernels that ``model(*inputs, **keywords)`` launches into the cache on disk.

    The model is called once on tensors without values. torch's transposed convolutions count as this package's. Use the
    dtypes, torch.autocast and TF32 switch of later calls. Other lengths and batches mostly need the same kernels;
    non-contiguous tensors may need more.

        model = vocoder.eval().cuda()
        numba_tconv.convert(model)
        numba_tconv.warm(model, torch.empty(1, 80, 1000, device="cuda"))

    Kernels are for the current GPU; without one, for compute capability 9.0.

    Args:
        model: a module or other callable.
        inputs, keywords: its arguments; tensors on any device, meta included.
        training: also compile the gradients.
        jobs: processes; None: one a processor; 1: this one.

    Returns:
        The number of kernels compiled; the others were cached.

    Raises:
        TypeError: ``model`` or ``jobs`` has a wrong type.
        ValueError: ``jobs`` is not positive.
        NotImplementedError: a layer's ``variant`` cannot do its problem.
        RuntimeError: the model refuses its inputs, asks for values, or has lazy parameters; the cache is off; or in the
            simulator.
        OSError: the cache cannot be written.
    """
    if not callable(model):
        raise TypeError(f"model must be a module or a function, not {type(model).__name__}")
    if jobs is not None and type(jobs) is not int:
        raise TypeError(f"jobs must be an int or None, not {type(jobs).__name__}")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if SIMULATOR:
        raise RuntimeError("the simulator compiles nothing: unset NUMBA_ENABLE_CUDASIM")
    cache.writable()
    device = current_device()
    noted = computations(model, *inputs, **keywords)
    calls = compile_ahead.calls_of(noted, device, STEP if training else FORWARD)
    compiled, _ = compile_ahead.fill(calls, target(device.cc), jobs or os.cpu_count() or 1)
    return compiled
