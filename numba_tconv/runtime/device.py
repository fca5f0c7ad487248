"""What a GPU offers: the limits that the choice of a tile rests on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

# Per multiprocessor, by compute capability: threads, blocks, shared memory in bytes. Registers: 65,536 everywhere.
LIMITS = {
    (7, 5): (1024, 16, 64 * 1024),
    (8, 0): (2048, 32, 164 * 1024),
    (8, 6): (1536, 16, 100 * 1024),
    (8, 9): (1536, 24, 100 * 1024),
    (9, 0): (2048, 32, 228 * 1024),
    (10, 0): (2048, 32, 228 * 1024),
    (12, 0): (1536, 24, 100 * 1024),
}
REGISTERS = 65_536
RESERVED_SHARED = 1024  # bytes of shared memory that the system takes from each block


@dataclass(frozen=True)
class Device:
    """The limits of a GPU."""

    cc: tuple[int, int]  # compute capability
    multiprocessors: int
    shared_per_multiprocessor: int  # bytes

    @property
    def shared_per_block(self) -> int:
        """The most shared memory that one block can have, in bytes."""
        return self.shared_per_multiprocessor - RESERVED_SHARED

    @property
    def launches_early(self) -> bool:
        """Whether a kernel's blocks can begin before the kernel before it has ended (Kernel.prepare)."""
        return self.cc >= (9, 0)

    def spreads_early(self, blocks: int, shared_bytes: int, others: int) -> bool:
        """Whether ``blocks`` with ``shared_bytes`` each spread over the multiprocessors as they do alone, if they begin
        beside ``others`` of the kernel before. They do if each multiprocessor has room for one only, or if there is a
        multiprocessor for every block. Else they gather on those that are free first."""
        one_fits = 2 * (shared_bytes + RESERVED_SHARED) > self.shared_per_multiprocessor
        return self.launches_early and (one_fits or blocks + others <= self.multiprocessors)


# GPUs that need not be there, by name: one of each compute capability.
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


@cache
def of(index: int | None) -> Device:
    """The GPU with torch's ``index``. None, or below 0, as of a tensor in the simulator: an H200, so that its tiles are
    checked."""
    if index is None or index < 0:
        return H200
    p = torch.cuda.get_device_properties(index)
    return Device((p.major, p.minor), p.multi_processor_count, p.shared_memory_per_multiprocessor)


def is_current(index: int) -> bool:
    """Whether the GPU with torch's ``index`` is the current one; below 0: there is none, in the simulator."""
    return index < 0 or index == torch._C._cuda_getDevice()


def current_device() -> Device:
    """torch's current GPU; an H200 where there is none."""
    return of(torch.cuda.current_device() if torch.cuda.is_available() else None)
