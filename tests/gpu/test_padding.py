"""Pairs and words for ``padding`` on the GPU: every rung and gradient, and the public function, against float64.

Bounds are those of test_parity.py. Outputs start as NaN.
"""

from dataclasses import replace

import pytest
import torch

import numba_tconv
from numba_tconv.formula.padding import WORDS, ends_of, parts_of
from numba_tconv.formula.problem import Problem
from numba_tconv.selection.gradient import GRADIENTS
from tests.parity import operands, poisoned, terms, verdict

from .common import ARITHMETIC, check, check_gradient, expected, rungs

pytestmark = pytest.mark.gpu
gradients = pytest.mark.parametrize("rung", GRADIENTS.values(), ids=GRADIENTS)
# Without padding: these share kernels with all their crops.
LAYERS = {
    "K = 2s": Problem(3, 128, 64, 8, 333, stride=4, bias=True),
    "K = 2s, short": Problem(16, 64, 32, 16, 32, stride=8, bias=True),
    "odd, groups": Problem(2, 48, 80, 7, 501, stride=3, groups=2, bias=True),
    "dilated": Problem(2, 32, 24, 5, 400, stride=2, dilation=3),
    "stride 1": Problem(2, 64, 64, 7, 1000, bias=True),
    "K < s": Problem(2, 32, 16, 3, 301, stride=7, bias=True),
    "depthwise": Problem(2, 96, 96, 4, 1001, stride=2, groups=96, bias=True),
}
PAIRS = (0, 3), (5, 0), (2, 9), (1, 40)
layers = pytest.mark.parametrize("name", LAYERS)
# One of each kind for every rung; float16 shares its code with bfloat16.
few_layers = pytest.mark.parametrize("name", ["K = 2s", "odd, groups", "K < s", "depthwise"])


def arithmetic(*names):
    return pytest.mark.parametrize(("dtype", "precision"), [pair for pair in ARITHMETIC if pair[1] in names], ids=str)


most = arithmetic("fp64", "ieee", "tf32", "tf32x3", "bf16")


def cropped(layer):
    """The problems of a layer's words and pairs, each once."""
    found = []
    for padding in (*WORDS, *PAIRS):
        parts = parts_of(padding, layer.kernel_size, layer.stride, 0, layer.dilation)
        found.append(replace(layer, padding=parts.padding, output_padding=parts.output_padding))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("padding", [(1, 2), "same", "causal"], ids=str)
def test_a_graph(padding):
    layer = numba_tconv.ConvTranspose1d(64, 32, 8, 4, padding=padding, device="cuda")
    x = torch.randn(2, 64, 100, device="cuda")
    with torch.no_grad():
        expected = layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        y.fill_(float("nan"))
        graph.replay()
    assert torch.equal(y, expected)


def test_a_compiled_layer():
    layer = numba_tconv.ConvTranspose1d(64, 32, 8, 4, padding="causal", device="cuda")
    x = torch.randn(2, 64, 100, device="cuda")
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))


@rungs
@most
@few_layers
def test_every_rung(rung, dtype, precision, name):
    for problem in cropped(LAYERS[name]):
        check(rung, problem, dtype, precision)


@gradients
@most
@few_layers
def test_every_gradient(rung, dtype, precision, name):
    for problem in cropped(LAYERS[name]):
        check_gradient(rung, problem, dtype, precision)


@arithmetic("ieee", "tf32", "bf16")
@layers
@pytest.mark.parametrize("padding", [*WORDS, (0, 3), (5, 0), (1, 40), (-4, 1), (2, -9)], ids=str)
def test_public_function(padding, dtype, precision, name):
    """An int's outputs, cropped or between bias."""
    layer = LAYERS[name]
    if name == "depthwise" and precision == "tf32":
        pytest.skip("no tensor core computes it")
    x, w, bias = operands(layer, dtype, "cuda")
    left, right = ends_of(padding, layer.kernel_size, layer.stride, layer.dilation)
    before, after = max(-left, 0), max(-right, 0)

    def whole(output):
        shape = *output.shape[:-1], before + output.shape[-1] + after
        around = output.new_zeros(shape) if bias is None else bias.to(output.dtype)[:, None].expand(shape).clone()
        around[..., before : before + output.shape[-1]] = output
        return around[..., max(left, 0) : shape[-1] - max(right, 0)]

    torchs, oracle = (whole(one) for one in expected(x, w, bias, layer, precision))
    poisoned(layer, dtype, "cuda")
    y = numba_tconv.conv_transpose1d(
        x, w, bias, layer.stride, padding, 0, layer.groups, layer.dilation, precision=precision
    )
    assert y.is_contiguous()
    assert verdict(y, torchs, oracle, terms(layer), precision) is None


@layers
@pytest.mark.parametrize("padding", [*WORDS, (-4, 1), (2, -9)], ids=str)
def test_gradients_through_autograd(padding, name):
    layer = LAYERS[name]
    x, w, bias = (one.double().requires_grad_() for one in operands(replace(layer, bias=True), torch.float64, "cuda"))
    sizes = layer.stride, padding, 0, layer.groups, layer.dilation
    on_gpu = numba_tconv.conv_transpose1d(x, w, bias, *sizes)
    g = torch.randn_like(on_gpu)
    found = torch.autograd.grad(on_gpu, (x, w, bias), g)
    on_cpu = [one.detach().cpu().requires_grad_() for one in (x, w, bias)]
    theirs = torch.autograd.grad(numba_tconv.conv_transpose1d(*on_cpu, *sizes), on_cpu, g.cpu())
    for one, other in zip(found, theirs, strict=True):
        torch.testing.assert_close(one.cpu(), other)
