"""Several GPUs in one process: tensors on another than the current GPU, and on two at once."""

import copy

import pytest
import torch

import numba_tconv
from tests.parity import operands, parameters

from .common import ARITHMETIC, LARGE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
PROBLEM = LARGE["HiFi-GAN's third layer"]
arithmetic = pytest.mark.parametrize(("dtype", "precision"), ARITHMETIC, ids=[name for _, name in ARITHMETIC])


def step(x, w, bias, precision):
    tensors = [tensor.detach().requires_grad_() for tensor in (x, w, bias)]
    y = numba_tconv.conv_transpose1d(*tensors, **parameters(PROBLEM), precision=precision)
    return y, *torch.autograd.grad(y, tensors, y.detach().cos())


@arithmetic
def test_tensors_of_a_gpu_that_is_not_the_current_one(dtype, precision):
    """Both GPUs give the same bits; the current GPU stays current."""
    tensors = operands(PROBLEM, dtype, "cuda:0")
    there = [tensor.to("cuda:1") for tensor in tensors]
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        for current in (0, 1):
            with torch.cuda.device(current):
                first, second = step(*tensors, precision), step(*there, precision)
                assert torch.cuda.current_device() == current
            for a, b in zip(first, second, strict=True):
                assert (a.device.index, b.device.index) == (0, 1)
                assert torch.equal(a, b.to("cuda:0"))


@arithmetic
def test_runs_on_the_current_stream_of_the_tensors_gpu(dtype, precision):
    choice = parameters(PROBLEM) | {"precision": precision}
    tensors = operands(PROBLEM, dtype, "cuda:1")
    right = numba_tconv.conv_transpose1d(*(2 * tensor for tensor in tensors), **choice)
    torch.cuda.synchronize(1)
    with torch.cuda.stream(torch.cuda.Stream(1)):
        torch.cuda._sleep(500_000_000)
        doubled = [2 * tensor for tensor in tensors]
        with torch.cuda.device(0):
            y = numba_tconv.conv_transpose1d(*doubled, **choice)
    torch.cuda.synchronize(1)
    assert torch.equal(y, right)


def test_a_layer_that_moves_takes_its_packed_weights_along():
    layer = numba_tconv.ConvTranspose1d(128, 64, 4, stride=2, padding=1, device="cuda:0", precision="tf32")
    x = torch.randn(2, 128, 500, device="cuda:0")
    with torch.no_grad():
        here = layer(x)
        moved = copy.deepcopy(layer).to("cuda:1")
        assert torch.equal(moved(x.to("cuda:1")).to("cuda:0"), here)
        assert torch.equal(layer.to("cuda:1")(x.to("cuda:1")).to("cuda:0"), here)


@pytest.mark.parametrize("elsewhere", ["input", "weight", "bias"])
def test_tensors_of_two_gpus_are_refused_as_in_torch(elsewhere):
    tensors = dict(zip(("input", "weight", "bias"), operands(PROBLEM, torch.float32, "cuda:0"), strict=True))
    tensors[elsewhere] = tensors[elsewhere].to("cuda:1")
    with pytest.raises(RuntimeError):
        torch.conv_transpose1d(**tensors, **parameters(PROBLEM))
    with pytest.raises(RuntimeError, match="must be on the device of input"):
        numba_tconv.conv_transpose1d(**tensors, **parameters(PROBLEM))
