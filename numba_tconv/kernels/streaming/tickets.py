"""Counters by which blocks find out which of them is the last; zero before and after each launch."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

MOST = 1 << 18  # counters of a GPU for launches in CUDA graphs
LEAST = 1 << 10  # counters of a stream

_lock = threading.Lock()
_of_stream: dict[tuple[int, int], torch.Tensor] = {}  # by GPU and stream
_of_graphs: dict[int, list] = {}  # by GPU: counters, and how many are taken
_outgrown: list[torch.Tensor] = []  # a launch may still use them


def take(count: int, index: int) -> torch.Tensor:
    """At least ``count`` zeros for a launch on torch's current stream of the GPU ``index``, which must be current.

    Launches on a stream share counters. A captured launch may run beside others, so it has its own for ever; when they
    are used up, the graph sets new ones to zero."""
    if index < 0:
        return torch.zeros(count, dtype=torch.int32)
    if torch.cuda.is_current_stream_capturing():
        with _lock:
            counters, taken = _of_graphs.get(index, (None, MOST))
            if taken + count <= MOST:
                _of_graphs[index][1] += count
                return counters[taken : taken + count]
        return torch.zeros(count, dtype=torch.int32, device=torch.device("cuda", index))
    key = index, torch._C._cuda_getCurrentRawStream(index)
    known = _of_stream.get(key)
    if known is None or len(known) < count:
        with _lock:
            if index not in _of_graphs:
                _of_graphs[index] = [_lasting(MOST, index), 0]
            known = _of_stream.get(key)  # another thread's, meanwhile
            if known is None or len(known) < count:
                if known is not None:
                    _outgrown.append(known)
                known = _of_stream[key] = _lasting(max(count, LEAST), index)
    return known


def _lasting(count: int, index: int) -> torch.Tensor:
    """``count`` zeros of GPU ``index`` for any stream and graph.

    Another thread makes them, because the caller may allocate in a graph's pool, which is used again."""

    def make():
        with torch.cuda.device(index):
            counters = torch.zeros(count, dtype=torch.int32, device=torch.device("cuda", index))
            torch.cuda.current_stream().synchronize()
            return counters

    with ThreadPoolExecutor(1) as one:
        return one.submit(make).result()
