"""Batches of short signals on the GPU, joined to one signal: outputs and gradients against float64."""

from dataclasses import replace

import pytest
import torch

import numba_tconv
from numba_tconv.formula.problem import Problem
from numba_tconv.runtime import device
from numba_tconv.selection.joined import joined

pytestmark = pytest.mark.gpu
PROBLEMS = {
    "HiFi-GAN's segments": Problem(16, 512, 256, 16, 32, stride=8, padding=4, bias=True),
    "BigVGAN's segments": Problem(24, 768, 384, 8, 32, stride=4, padding=2, bias=True),
    "one position": Problem(64, 1024, 512, 16, 1, stride=8, bias=True),
    "odd sizes": Problem(40, 330, 250, 11, 29, stride=5, padding=3, output_padding=1, bias=True),
    "tiles of one signal each": Problem(16, 1536, 768, 16, 64, stride=8, padding=4),
    "stride 1": Problem(64, 512, 512, 3, 20, padding=1, bias=True),
    "groups": Problem(64, 1024, 1024, 8, 17, stride=4, padding=2, groups=2, bias=True),
}
NOT_SHARED = "odd sizes", "tiles of one signal each"  # windows in tf32x3, so these are not joined
PRECISIONS = {"tf32": torch.float32, "tf32x3": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
named = pytest.mark.parametrize("name", PROBLEMS)
precisions = pytest.mark.parametrize("precision", PRECISIONS)


@pytest.fixture(autouse=True)
def only_where_joined():
    if device.current_device().cc != (9, 0):
        pytest.skip("signals are joined for k6_wgmma, which needs compute capability 9.0")


def operands(p, dtype):
    x = torch.randn(p.in_shape, device="cuda").to(dtype)
    scale = (p.in_channels_per_group * p.kernel_size / p.stride) ** -0.5
    w = (scale * torch.randn(p.weight_shape, device="cuda")).to(dtype)
    return x, w, torch.randn(p.out_channels, device="cuda").to(dtype) if p.bias else None


def parameters(p):
    return p.stride, p.padding, p.output_padding, p.groups, p.dilation


def results(x, w, bias, p, convolve, grad_output):
    """Output and gradients, in memory that was full of NaN."""
    wanted = [t.detach().clone().requires_grad_() for t in (x, w, bias) if t is not None]
    for _ in range(4):
        torch.full((grad_output.numel() + (1 << 20),), torch.nan, device="cuda")
    y = convolve(*wanted, *([None] if len(wanted) < 3 else []), *parameters(p))
    return y.detach(), *torch.autograd.grad(y, wanted, grad_output)


def far(one, exact):
    difference = (one.double() - exact).abs()
    return difference.norm() / exact.norm(), difference.max() / exact.abs().max()


@precisions
@named
def test_outputs_and_gradients(name, precision):
    p, dtype = PROBLEMS[name], PRECISIONS[precision]
    alone = precision == "tf32x3" and name in NOT_SHARED
    assert (joined(p, dtype, precision, device.current_device()) is None) == alone
    x, w, bias = operands(p, dtype)
    grad_output = torch.randn(p.out_shape, device="cuda").to(dtype)
    wide = [None if t is None else t.double() for t in (x, w, bias)]
    exact = results(*wide, p, torch.conv_transpose1d, grad_output.double())
    ours = results(x, w, bias, p, lambda *t: numba_tconv.conv_transpose1d(*t, precision=precision), grad_output)
    allowed = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        torchs = results(x, w, bias, p, torch.conv_transpose1d, grad_output)
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    least = 5e-4 if precision == "tf32" else torch.finfo(dtype).eps / 2  # operands', or the result's, rounding
    for one, theirs, true in zip(ours, torchs, exact, strict=True):
        for own, limit in zip(far(one, true), far(theirs, true), strict=True):
            assert own <= max(2 * limit, least)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@named
def test_a_signal_of_nan_stays_alone(name, precision):
    p, dtype = PROBLEMS[name], PRECISIONS[precision]
    x, w, bias = operands(p, dtype)
    x.requires_grad_()
    before = numba_tconv.conv_transpose1d(x, w, bias, *parameters(p), precision=precision)
    grad_output = torch.randn_like(before)
    (grad,) = torch.autograd.grad(before, x, grad_output)
    with torch.no_grad():
        x[3], grad_output[5] = torch.nan, torch.inf
    after = numba_tconv.conv_transpose1d(x, w, bias, *parameters(p), precision=precision)
    (grad_after,) = torch.autograd.grad(after, x, grad_output)
    others, all_but_5 = torch.arange(p.batch) != 3, torch.arange(p.batch) != 5
    assert torch.equal(after[others], before[others])
    assert after[3].isnan().all()
    assert torch.equal(grad_after[all_but_5], grad[all_but_5])


@pytest.mark.parametrize("layout", ["channels last", "a slice", "expanded"])
def test_layouts_and_padding_forms(layout):
    p = PROBLEMS["HiFi-GAN's segments"]
    x, w, bias = operands(replace(p, length=40), torch.bfloat16)
    x = {
        "channels last": lambda: x[:, :, :32].transpose(1, 2).contiguous().transpose(1, 2),
        "a slice": lambda: x[:, :, 5:37],
        "expanded": lambda: x[:1, :, :32].expand(16, -1, -1),
    }[layout]()
    for padding in (0, 4, (1, 6), "same", "causal"):
        y = numba_tconv.conv_transpose1d(x, w, bias, 8, padding)
        alone = torch.cat([numba_tconv.conv_transpose1d(one[None], w, bias, 8, padding) for one in x])
        torch.testing.assert_close(y, alone, rtol=2e-2, atol=2e-2)


def test_in_a_graph_and_frozen():
    p = PROBLEMS["HiFi-GAN's segments"]
    layer = numba_tconv.ConvTranspose1d(512, 256, 16, 8, 4, device="cuda").eval()
    x = torch.randn(p.batch, 512, 32, device="cuda")
    with torch.no_grad():
        expected = layer(x)
        numba_tconv.freeze(layer)
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
        torch.testing.assert_close(y, expected, rtol=0, atol=0)
        x.normal_()
        graph.replay()
        torch.testing.assert_close(y, layer(x), rtol=0, atol=0)
