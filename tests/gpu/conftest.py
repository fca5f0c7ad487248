"""torch as the kernels' equal: float32 products without TF32; and a GPU's memory for one test at a time."""

import fcntl
import tempfile
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def exact_torch():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture
def much_memory():
    """For tests of many gigabytes: those of processes that share the tests, and the GPU, take turns."""
    with (Path(tempfile.gettempdir()) / "numba_tconv_much_memory").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()
