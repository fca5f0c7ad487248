"""A GPU's compute capability and limits."""

from dataclasses import dataclass, replace
from functools import cache

import torch

from numba_tconv.ptx import SIMULATOR

# By compute capability: a multiprocessor's threads, blocks, shared bytes.
LIMITS = {
    (7, 5): (1024, 16, 64 * 1024),
    (8, 0): (2048, 32, 164 * 1024),
    (8, 6): (1536, 16, 100 * 1024),
    (8, 9): (1536, 24, 100 * 1024),
    (9, 0): (2048, 32, 228 * 1024),
    (10, 0): (2048, 32, 228 * 1024),
    (12, 0): (1536, 24, 100 * 1024),
}
REGISTERS = 65_536  # of a multiprocessor
RESERVED_SHARED = 1024  # bytes that the system takes from each block


@dataclass(frozen=True)
class Device:
    """A GPU's limits."""

    cc: tuple[int, int]  # compute capability
    multiprocessors: int
    shared_per_multiprocessor: int  # bytes

    @property
    def shared_per_block(self) -> int:
        """Most shared memory of a block, in bytes."""
        return self.shared_per_multiprocessor - RESERVED_SHARED

    @property
    def launches_early(self) -> bool:
        """Whether a kernel can begin before the previous one ends."""
        return self.cc >= (9, 0)

    def spreads_early(self, blocks: int, shared_bytes: int, others: int) -> bool:
        """Whether ``blocks``, begun beside ``others`` of the previous kernel, spread over all multiprocessors."""
        one_fits = 2 * (shared_bytes + RESERVED_SHARED) > self.shared_per_multiprocessor
        return self.launches_early and (one_fits or blocks + others <= self.multiprocessors)


GPUS = {
    name: Device(cc, multiprocessors, LIMITS[cc][2])
    for name, cc, multiprocessors in (
        ("Tesla T4", (7, 5), 40),
        ("NVIDIA A100", (8, 0), 108),
        ("NVIDIA GeForce RTX 3090", (8, 6), 82),
        ("NVIDIA L40S", (8, 9), 142),
        ("NVIDIA H200", (9, 0), 132),
        ("NVIDIA B200", (10, 0), 148),
        ("NVIDIA GeForce RTX 5090", (12, 0), 170),
    )
}
H200, A100 = GPUS["NVIDIA H200"], GPUS["NVIDIA A100"]
SIMULATED = replace(H200, multiprocessors=4)  # its blocks run one by one, so few are launched


@cache
def of(index: int | None) -> Device:
    """The GPU with torch's ``index``; ``H200`` if None or negative, but ``SIMULATED`` if negative in the simulator."""
    if index is None or index < 0:
        return SIMULATED if SIMULATOR and index is not None else H200
    p = torch.cuda.get_device_properties(index)
    return Device((p.major, p.minor), p.multi_processor_count, p.shared_memory_per_multiprocessor)


def is_current(index: int) -> bool:
    """Whether torch's GPU ``index`` is current; also if negative (simulator)."""
    return index < 0 or index == torch._C._cuda_getDevice()


def current_device() -> Device:
    """torch's current GPU; ``H200`` if none."""
    return of(torch.cuda.current_device() if torch.cuda.is_available() else None)
