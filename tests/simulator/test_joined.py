"""Signals joined to one, and what comes back, by the copies of the simulator and torch's convolution."""

from types import SimpleNamespace

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.runtime.layout import Layout
from numba_tconv.runtime.ready import Ready
from numba_tconv.selection import joined as module

PROBLEMS = {
    "K = 2s, cropped": Problem(3, 4, 6, 4, 5, stride=2, padding=1, bias=True),
    "K = s": Problem(2, 3, 2, 3, 4, stride=3),
    "K = 2s + 1": Problem(2, 3, 2, 7, 4, stride=3, bias=True),
    "outputs after the last tap": Problem(3, 2, 4, 2, 3, stride=2, output_padding=1, bias=True),
    "one position": Problem(5, 4, 2, 6, 1, stride=2, padding=2, bias=True),
    "stride 1": Problem(2, 3, 3, 5, 7, padding=3),
    "groups": Problem(4, 6, 4, 4, 3, stride=2, padding=1, groups=2, bias=True),
    "causal": Problem(3, 4, 2, 8, 6, stride=4, output_padding=-4),
}


@pytest.fixture
def joint(monkeypatch):
    monkeypatch.setattr(module, "arithmetic", lambda *_: "tf32")
    rung = SimpleNamespace(config_on=lambda *_: None, slowdown=lambda *_: 1.0, predicted_ms=lambda *_: 1.0)
    monkeypatch.setattr(module, "select", lambda *_: rung)
    monkeypatch.setattr(module, "MARGIN", 0)
    module.joined.cache_clear()
    yield lambda p, dtype: module.joined(p, dtype, "tf32", None)
    module.joined.cache_clear()


def whole(x, w, bias, p):
    """All outputs of one signal: ``stride`` a position."""
    return torch.conv_transpose1d(x, w, bias, p.stride, 0, 0, p.groups)[:, :, : p.length * p.stride]


def torchs(x, w, bias, p):
    y = torch.conv_transpose1d(x, w, bias, p.stride, 0, max(p.output_padding, 0), p.groups)
    return y[:, :, p.padding :][:, :, : p.out_length]


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "a slice"])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_outputs_and_gradients(name, layout, dtype, joint):
    p = PROBLEMS[name]
    x = torch.randn(p.in_shape, dtype=dtype)
    if layout == "channels last":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "a slice":
        x = torch.randn(p.batch, p.in_channels, p.length + 3, dtype=dtype)[:, :, 1 : p.length + 1]
    w = torch.randn(p.weight_shape, dtype=dtype)
    bias = torch.randn(p.out_channels, dtype=dtype) if p.bias else None
    found, close = joint(p, dtype), dict(rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-12)

    compute = Ready(
        (1, p.out_channels, found.problem.out_length), dtype, -1, lambda *t: t[-1].copy_(whole(*t[:-1], found.problem))
    )
    x, w = x.requires_grad_(), w.requires_grad_()
    expected = torchs(x, w, bias, p)
    y = torch.full(expected.shape, torch.nan, dtype=dtype)
    with torch.no_grad():
        module.forward(found, p, Layout.of(x), compute)(x, w, bias, y)
    torch.testing.assert_close(y, expected, **close)

    def ready(of, problem, grad_output, operand):
        assert problem == found.problem
        assert grad_output.shape == (1, p.out_channels, problem.out_length)
        assert tuple(operand.shape) == tuple(w.shape if of == "grad_input" else (1, p.in_channels, problem.length))

        def fill(grad_output, operand, result):
            sizes = (1, p.in_channels, problem.length), w.shape
            one_x, one_w = (torch.zeros(size, dtype=dtype, requires_grad=True) for size in sizes)
            one_x, one_w = (one_x, operand) if of == "grad_input" else (operand, one_w)
            with torch.enable_grad():
                one_x, one_w = one_x.requires_grad_(), one_w.requires_grad_()
                own = torch.autograd.grad(whole(one_x, one_w, None, problem), (one_x, one_w), grad_output)
            result.copy_(own[of == "grad_weight"])

        shape = (1, p.in_channels, problem.length) if of == "grad_input" else w.shape
        return Ready(tuple(shape), dtype, -1, fill)

    grad_output = torch.randn(expected.shape, dtype=dtype)
    wanted = torch.autograd.grad(expected, (x, w), grad_output)
    for of, operand, result in (("grad_input", w, wanted[0]), ("grad_weight", x, wanted[1])):
        operand = operand.detach()
        compute = module.gradient(of, found, p, Layout.of(grad_output), Layout.of(operand), ready)
        torch.testing.assert_close(compute(grad_output, operand), result, **close)


def test_nothing_where_the_joined_gradient_is_torchs(joint):
    p = PROBLEMS["K = 2s, cropped"]
    y, w = torch.empty(3, 6, p.out_length), torch.empty(4, 6, 4)
    found = joint(p, torch.float32)
    assert module.gradient("grad_input", found, p, Layout.of(y), Layout.of(w), lambda *_: None) is None
