"""Peak memory of a layer in torch's allocator, beside torch's layer.

Ours packs weights and keeps partial sums; torch's has workspaces, which cudnn.benchmark may enlarge. The baseline is
read before packed weights are made.
"""

import pytest
import torch
from torch import nn

from numba_tconv import ConvTranspose1d
from numba_tconv.formula.problem import Problem

pytestmark = pytest.mark.gpu

TOLERANCE = 1.05  # packed weights and partial sums are megabytes, the signals hundreds
LAYERS = {
    "stride 1": Problem(8, 128, 128, 3, 65536, bias=True),
    "the usual decoder layer": Problem(8, 128, 64, 4, 65536, stride=2, padding=1, bias=True),
    "many weights": Problem(16, 512, 256, 16, 4096, stride=8, padding=4, bias=True),
    "depthwise": Problem(8, 512, 512, 4, 8192, stride=2, padding=1, groups=512, bias=True),
}
ARITHMETICS = {  # dtype, and float32's precision
    "ieee": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "bf16": (torch.bfloat16, None),
}


def peak(layer, x, train):
    """Bytes beyond those before the layer's first call, at the peak of a later call."""

    def call():
        if not train:
            with torch.no_grad():
                layer(x)
            return
        layer.zero_grad()
        x.grad = None
        y = layer(x)
        y.backward(y.detach())

    layer.zero_grad()
    x.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(2):  # compiles kernels, searches algorithms, packs weights
        call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("search", [False, True], ids=["heuristics", "benchmark"])
@pytest.mark.parametrize("train", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", LAYERS)
def test_peak_memory_is_at_most_torchs(name, arithmetic, train, search):
    p, (dtype, precision) = LAYERS[name], ARITHMETICS[arithmetic]
    if precision == "tf32" and p.groups > 1:
        pytest.skip("tensor cores need 8 channels a group")
    arguments = (p.in_channels, p.out_channels, p.kernel_size, p.stride, p.padding, p.output_padding, p.groups)
    where = dict(device="cuda", dtype=dtype)
    x = torch.randn(p.in_shape, **where).requires_grad_(train)
    with torch.backends.cudnn.flags(enabled=True, benchmark=search, allow_tf32=precision == "tf32"):
        theirs = peak(nn.ConvTranspose1d(*arguments, **where), x, train)
        ours = peak(ConvTranspose1d(*arguments, **where, precision=precision), x, train)
    assert ours > 0
    assert ours <= TOLERANCE * theirs
