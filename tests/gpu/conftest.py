"""torch multiplies float32 without TF32; tests of many gigabytes take turns."""

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
    """A lock for tests of many gigabytes: processes that share the GPU take turns."""
    with (Path(tempfile.gettempdir()) / "numba_tconv_much_memory").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()
