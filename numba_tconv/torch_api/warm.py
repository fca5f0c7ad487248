"""``warm``: the kernels that a model will launch, compiled ahead by all processors."""

from __future__ import annotations

import os
from collections.abc import Callable

from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime import cache
from numba_tconv.runtime.device import current_device
from numba_tconv.runtime.kernel import target
from numba_tconv.selection.directions import FORWARD, STEP

from . import compile_ahead
from .noted import transposed_convolutions


def warm(model: Callable, *inputs, training: bool = False, jobs: int | None = None, **keywords) -> int:
    """Compile what ``model(*inputs, **keywords)`` will launch, into the cache on disk, so that no call waits for it.

    The model is called once on tensors that have sizes but no values, so nothing is computed, and large models and
    inputs cost nothing; its transposed convolutions are found whether they are torch's, of which all are taken to be
    computed by this package then (see ``convert``, ``routed``), or this package's already. What it will meet should be
    met now, too: shapes, dtypes, torch.autocast, torch's switch for TF32. Other lengths and batches mostly launch the
    same kernels. Tensors are taken to be contiguous; others may launch a few kernels more.

        model = vocoder.eval().cuda()
        numba_tconv.convert(model)
        numba_tconv.warm(model, torch.empty(1, 80, 1000, device="cuda"))

    Kernels are compiled for the current GPU and, where there is none, for compute capability 9.0: before a model is
    served, or while a container is built. The processes that compile import this package alone, nothing of the caller.

    Args:
        model: a module, or anything that is called.
        inputs, keywords: what it is called with; tensors of any device, the meta device included.
        training: compile the kernels of the gradients too.
        jobs: processes at a time; None: as many as there are processors. With 1, this process compiles.

    Returns:
        How many kernels were compiled; the others were there already.

    Raises:
        TypeError: ``model`` cannot be called, or ``jobs`` is no integer.
        ValueError: ``jobs`` is not positive.
        NotImplementedError: a layer's ``variant`` cannot do its problem.
        RuntimeError: the model refuses its inputs, asks for values of tensors, or has lazy parameters; there is no
            cache on disk (``NUMBA_TCONV_CACHE`` is empty); or the simulator is used, which compiles nothing.
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
    noted = transposed_convolutions(model, *inputs, **keywords)
    calls = compile_ahead.calls_of(noted, device, STEP if training else FORWARD)
    compiled, _ = compile_ahead.fill(calls, target(device.cc), jobs or os.cpu_count() or 1)
    return compiled
