"""torch as the kernels' equal: float32 products without TF32."""

import pytest
import torch


@pytest.fixture(autouse=True)
def exact_torch():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
