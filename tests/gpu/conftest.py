"""torch multiplies float32 without TF32; a list of packing launches; tests of many gigabytes take turns; captures are
left alone."""

import fcntl
import tempfile
from pathlib import Path

import pytest
import torch

from numba_tconv.runtime.kernel import Prepared

PACKING = "pack_weights", "pack_split", "k4_pack"  # kernels of the forward pass
# A graph of an earlier test, collected during a capture, would end it.
torch.compiler.config.force_cudagraph_gc = True


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


@pytest.fixture
def packings(monkeypatch):
    """A list of the launches that pack weights for the forward pass, each the Prepared that was called."""
    seen, launch = [], Prepared.__call__

    def counted(prepared, *given):
        if prepared.kernel.name in PACKING:
            seen.append(prepared)
        return launch(prepared, *given)

    monkeypatch.setattr(Prepared, "__call__", counted)
    return seen
