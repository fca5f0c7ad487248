"""GPU timing: contestants take turns. Each call is between two events, on a cold cache."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from numba_tconv.runtime.progress import progress

WARMUP_CALLS = 2
FEWEST_REPEATS = 5
FLUSHES = 4  # before a timed call


@dataclass
class Contestant:
    """``call`` enqueues one computation; ``prepare`` runs before, untimed."""

    call: Callable[[], Any]
    prepare: Callable[[], object] = lambda: None
    output: Any = None
    every: int = 1  # rounds for each turn
    events: list = field(default_factory=list)

    def times(self) -> list[float]:
        return [start.elapsed_time(stop) for start, stop in self.events]


class Flush:
    """Evicts L2, and so hides Python's launch time."""

    def __init__(self, times: int):
        size = 8 * torch.cuda.get_device_properties().L2_cache_size
        self._buffer = torch.zeros(size // 4, device="cuda")
        self._sum = torch.zeros((), device="cuda")
        self._times = times

    def __call__(self):
        for _ in range(self._times):
            torch.sum(self._buffer, dim=0, out=self._sum)


def timed_call(contestant: Contestant, flush: Flush) -> None:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    contestant.output = None
    contestant.prepare()
    flush()
    start.record()
    contestant.output = contestant.call()
    stop.record()
    contestant.events.append((start, stop))


def interleave(
    contestants: list[Contestant], repeats: int, budget_s: float, label: str, flushes: int = FLUSHES
) -> None:
    """Time each contestant ``repeats`` times in turns, after ``flushes`` cache flushes.

    One that would exceed ``budget_s`` seconds sits out rounds, but gets FEWEST_REPEATS calls.
    """
    flush = Flush(flushes)
    for contestant in progress(contestants, f"{label}: compile and warm up"):
        for _ in range(WARMUP_CALLS):
            contestant.events.clear()
            timed_call(contestant, flush)
        torch.cuda.synchronize()
        affordable = 1e3 * budget_s / max(contestant.times()[0], 1e-3)
        contestant.every = max(1, int(repeats // min(repeats, max(FEWEST_REPEATS, affordable))))
        contestant.events.clear()
    for turn in progress(range(repeats), f"{label}: timed rounds"):
        for contestant in contestants:
            if turn % contestant.every == 0:
                timed_call(contestant, flush)
        torch.cuda.synchronize()


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of ``call``, and the output that a replay renews."""
    torch.cuda.synchronize()  # what it reads is written by the current stream
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(WARMUP_CALLS):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    return graph, output


def quantile(times: list[float], share: float) -> float:
    return torch.tensor(times, dtype=torch.float64).quantile(share).item()


def wall_times(calls: list[Callable], repeats: int) -> list[float]:
    """Median ms of each call until the GPU is idle, in alternating order."""
    taken = [[] for _ in calls]
    gc.collect()
    gc.disable()
    try:
        for turn in range(WARMUP_CALLS + repeats):
            for call, times in list(zip(calls, taken, strict=True))[:: 1 if turn % 2 else -1]:
                torch.cuda.synchronize()
                start = time.perf_counter()
                call()
                torch.cuda.synchronize()
                if turn >= WARMUP_CALLS:
                    times.append(1e3 * (time.perf_counter() - start))
    finally:
        gc.enable()
    return [quantile(times, 0.5) for times in taken]
