"""Steps on tensor cores in the CUDA simulator, with the meanings of warps.py: outputs, states, masks, seams of tiles.

Needs NUMBA_ENABLE_CUDASIM=1 from the start of the process (`make test`).
"""

import pytest
from numba.cuda.simulator import kernelapi

from numba_tconv.kernels.streaming import mma_kernel
from numba_tconv.ptx import SIMULATOR
from tests.gpu.sanitized_streaming import PRODUCT, step_cases

from .warps import played

pytestmark = pytest.mark.skipif(not SIMULATOR, reason="needs NUMBA_ENABLE_CUDASIM=1")


@pytest.fixture(autouse=True)
def warps(monkeypatch):
    played(mma_kernel, monkeypatch, kernelapi.FakeCUDAModule)
    yield
    mma_kernel.make_kernel.cache_clear()


@pytest.mark.parametrize("case", [case for case in step_cases() if case.kernel == PRODUCT], ids=str)
def test_what_the_sanitizer_plays(case):
    assert case.wrong("cpu") is None
