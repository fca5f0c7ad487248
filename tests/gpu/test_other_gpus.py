"""What other GPUs get, tried on this one: torch's operator below compute capability 8.0, PTX for 9.0 above it."""

import copy

import pytest
import torch
from torch import nn

import numba_tconv
from numba_tconv.runtime import kernel as launch
from numba_tconv.runtime.device import GPUS, current_device
from numba_tconv.runtime.kernel import Prepared
from numba_tconv.selection import gradient as gradients
from numba_tconv.selection.registry import RUNGS
from numba_tconv.torch_api import functional
from numba_tconv.torch_api import operators as ops

from .common import LARGE, check

pytestmark = pytest.mark.gpu
PROBLEM = LARGE["HiFi-GAN's third layer"]


def forget():
    for remembered in (functional._call, ops.ready, ops.ready_input, ops.ready_weight, ops.ready_bias, gradients.ready):
        remembered.cache_clear()
    ops._ready_gradients.cache_clear()


@pytest.fixture
def turing(monkeypatch):
    """This GPU counts as an older one."""
    forget()
    monkeypatch.setattr(ops.device, "of", lambda index: GPUS["Tesla T4"])
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("through", ["convert", "routed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dense_layers_of_older_gpus_are_torchs(turing, monkeypatch, dtype, through):
    monkeypatch.setattr(Prepared, "__call__", lambda launch, *_: pytest.fail(f"{launch.kernel.name} was launched"))
    theirs = nn.ConvTranspose1d(64, 32, 8, 4, 2, bias=False, device="cuda", dtype=dtype)
    ours = copy.deepcopy(theirs)
    if through == "convert":
        ours = nn.Sequential(ours)
        assert numba_tconv.convert(ours).replaced == 1
    x = torch.randn(4, 64, 3000, device="cuda", dtype=dtype)
    results = []
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        for layer in (theirs, ours):
            own = x.detach().requires_grad_()
            if layer is ours and through == "routed":
                with numba_tconv.routed():
                    y = layer(own)
            else:
                y = layer(own)
            y.float().square().sum().backward()
            results.append((y, own.grad, next(layer.parameters()).grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
        assert b.is_contiguous()


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "tf32"), (torch.bfloat16, "bf16")])
def test_ptx_for_newer_gpus_runs(monkeypatch, dtype, precision):
    """The PTX has none of 9.0a's own instructions; the driver makes this GPU's machine code of it."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("it is older than 9.0")
    monkeypatch.setattr(launch, "target", lambda cc: (9, 0))
    rung = RUNGS["k5_mma"]
    kernel = rung.kernel(rung.config_on(current_device(), PROBLEM, dtype, precision))
    monkeypatch.setattr(kernel, "_handles", {})  # not loaded yet
    check(rung, PROBLEM, dtype, precision)
    assert kernel._handles
