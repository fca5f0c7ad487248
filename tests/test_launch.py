"""What launching does before it reaches the GPU."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from numba_tconv.launch import Kernel


def test_threads_wait_for_one_compilation(monkeypatch):
    loads, threads = [], 8
    together = threading.Barrier(threads)

    def load(kernel, device, shared_bytes):
        loads.append((device, shared_bytes))
        time.sleep(0.05)  # long enough for every thread to ask
        return f"loaded on {device}"

    def ask(device):
        together.wait()
        return kernel.handle(device, shared_bytes=0)

    monkeypatch.setattr(Kernel, "_load", load)
    kernel = Kernel("kernel", lambda: None, (), threads=32)
    with ThreadPoolExecutor(threads) as pool:
        handles = list(pool.map(ask, [0, 1] * (threads // 2)))
    assert handles == ["loaded on 0", "loaded on 1"] * (threads // 2)
    assert sorted(loads) == [(0, 0), (1, 0)]


def test_more_shared_memory_is_asked_for_and_less_is_not(monkeypatch):
    loads = []
    monkeypatch.setattr(Kernel, "_load", lambda kernel, device, shared_bytes: loads.append(shared_bytes))
    kernel = Kernel("kernel", lambda: None, (), threads=32)
    for shared_bytes in (100, 50, 200, 100):
        kernel.handle(0, shared_bytes)
    assert loads == [100, 200]
