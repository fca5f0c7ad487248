"""Kernels compiled ahead of their first use, into the cache on disk (cache.py), by several processes at a time.

A call compiles what it lacks, one kernel after the other. Which kernels those will be follows from sizes, precision and
GPU alone, so that they can be compiled together and anywhere: before a measurement, or while a container is built.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import torch

from . import bench, cache
from .kernels import RUNGS, k4_pack, tensor_pack
from .kernels.device import Device
from .launch import Kernel
from .problem import Problem
from .progress import progress
from .select import arithmetic, select

PACKED_FOR = {"k5_mma": "mma", "k6_wgmma": "wgmma"}  # whose order the packed weights have


@dataclass(frozen=True)
class Call:
    """A rung's computation of contiguous tensors. Unlike the kernels that it launches, it can be told to a process."""

    rung: str
    problem: Problem
    dtype: torch.dtype
    precision: str
    device: Device

    def kernels(self) -> list[Kernel]:
        """What ``run`` of the rung launches: its kernel, and the one that packs the weights, where it has one."""
        rung = RUNGS[self.rung]
        config = rung.config_on(self.device, self.problem, self.dtype, self.precision)
        kernels = [rung.kernel(config)]
        if self.rung == "k4_register_tile":
            kernels.append(k4_pack.make_kernel(config))
        if self.rung in PACKED_FOR:
            kernels.append(tensor_pack.make_kernel(config.tile, PACKED_FOR[self.rung]))
        return kernels


def calls(
    names: list[str], problems: list[Problem], arithmetics: list[tuple[torch.dtype, str]], device: Device
) -> list[Call]:
    """Every problem on ``device`` in each dtype and precision, by the rungs that ``names`` stand for as in
    ``bench.rungs_for``; "auto" is the one that the selection picks. What a rung cannot do is passed over.

    Raises ValueError for an unknown name.
    """
    found = []
    for problem in problems:
        for dtype, named in arithmetics:
            precision = bench.peak_name(dtype, named)
            for name in names:
                if name == bench.AUTO:
                    own = arithmetic(problem, dtype, "", precision, device)
                    picked = select(problem, dtype, own, device)
                    found += [Call(picked.name, problem, dtype, own, device)] if picked else []
                    continue
                with contextlib.suppress(NotImplementedError):
                    rungs, _ = bench.rungs_for([name], problem, dtype, named, device)
                    found += [Call(rung, problem, dtype, precision, device) for rung in rungs if rung in RUNGS]
    return list(dict.fromkeys(found))


def fill(calls: list[Call], cc: tuple, jobs: int) -> tuple[int, int]:
    """Compile the kernels of ``calls`` that the cache lacks, in up to ``jobs`` processes.

    Returns how many were compiled, and how many were there. Kernels without a key, which are not kept, do not count.
    """
    # Of the calls that share a kernel, one that leads to it.
    needed = {(kernel.name, kernel.key): call for call in calls for kernel in call.kernels() if kernel.key}
    missing = [(call, name) for (name, key), call in needed.items() if not cache.holds(name, key, cc)]
    if missing:
        # Spawned, because a fork would inherit CUDA and the threads of torch, which do not survive it.
        with ProcessPoolExecutor(
            min(jobs, len(missing)),
            multiprocessing.get_context("spawn"),
            initializer=signal.signal,  # an interrupt is the parent's, which then sends no more
            initargs=(signal.SIGINT, signal.SIG_IGN),
        ) as pool:
            futures = [pool.submit(_compile, call, name, cc) for call, name in missing]
            try:
                for future in progress(as_completed(futures), f"kernels to compile: {len(futures)}", len(futures)):
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return len(missing), len(needed) - len(missing)


def _compile(call: Call, name: str, cc: tuple) -> None:
    """In a process of its own: the kernel called ``name`` of those that ``call`` launches."""
    (kernel,) = [kernel for kernel in call.kernels() if kernel.name == name]
    kernel.kept_ptx(cc)
