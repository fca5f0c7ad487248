"""Steps on tensor cores in the CUDA simulator, with the meanings of warps.py: outputs, states, masks, seams of tiles.

Needs NUMBA_ENABLE_CUDASIM=1 from the start of the process (`make test`).
"""

import pytest
import torch
from numba.cuda.simulator import kernelapi

from numba_tconv.kernels.streaming import mma_kernel, tickets
from numba_tconv.ptx import SIMULATOR
from tests.gpu.sanitized_streaming import PRODUCT, step_cases
from tests.thorough import thorough

from .warps import played

pytestmark = pytest.mark.skipif(not SIMULATOR, reason="needs NUMBA_ENABLE_CUDASIM=1")


@pytest.fixture(autouse=True)
def warps(monkeypatch):
    played(mma_kernel, monkeypatch, kernelapi.FakeCUDAModule)
    yield
    mma_kernel.make_kernel.cache_clear()


CASES = [case for case in step_cases() if case.kernel == PRODUCT]
USUAL = [case for case in CASES if case.config == 1 or case.dtype != torch.float32]


@pytest.mark.parametrize("case", thorough(CASES, always=USUAL), ids=str)
def test_what_the_sanitizer_plays(case):
    assert case.wrong("cpu") is None


def test_the_last_readers_of_a_state_leave_no_ticket(monkeypatch):
    taken, take = [], tickets.take
    monkeypatch.setattr(tickets, "take", lambda *sizes: taken.append(take(*sizes)) or taken[-1])
    case = next(case for case in CASES if case.config == 1)
    assert case.wrong("cpu") is None
    assert len(taken) == 2  # steps
    assert len(taken[0]) > 2  # a ticket for each stage and tile of slots
    assert not any(counters.any() for counters in taken)
