"""Calls without outputs, or without samples, on a GPU: empty outputs and zero gradients, whatever a rung would say."""

import pytest
import torch

from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.cli import commands
from numba_tconv.runtime import device
from numba_tconv.runtime.layout import layout_of
from numba_tconv.selection.directions import STEP
from numba_tconv.torch_api import compile_ahead, operators
from numba_tconv.torch_api.noted import Noted
from tests.gradient_parity import OF, as_on_a_gpu, forget_what_is_ready, operator_arguments

# A batch that another process holds whole; a crop that leaves nothing.
EMPTY = {
    "no samples": Problem(0, 64, 4, 300, 1000, stride=100, bias=True),
    "no samples, grouped": Problem(0, 9, 12, 1, 64, stride=2, groups=3, bias=True),
    "no outputs": Problem(4, 24, 8, 16, 5, padding=10, groups=8, bias=True),
    "no outputs of a dense layer": Problem(4, 64, 64, 4, 1, stride=2, output_padding=-4, bias=True),
}
empty_calls = pytest.mark.parametrize("empty", EMPTY.values(), ids=EMPTY)


@pytest.fixture(params=commands.DEVICES)
def gpu(request, monkeypatch):
    monkeypatch.setattr(device, "of", lambda index: commands.DEVICES[request.param])
    operators.ready.cache_clear()
    forget_what_is_ready()
    yield commands.DEVICES[request.param]
    operators.ready.cache_clear()
    forget_what_is_ready()


def arithmetics():
    return [(dtype, precision) for dtype, precisions in PRECISIONS.items() for precision in precisions]


@empty_calls
def test_an_empty_output(gpu, empty):
    p = empty
    for dtype, precision in arithmetics():
        x, w = (torch.randn(shape).to(dtype) for shape in (p.in_shape, p.weight_shape))
        bias = torch.randn(p.out_channels).to(dtype)
        y = operators.ready(*map(layout_of, (x, w, bias)), *p.parameters, "", precision)(x, w, bias)
        assert (y.shape, y.dtype) == (p.out_shape, dtype)


@empty_calls
def test_zero_gradients(gpu, empty):
    p = empty
    for dtype, precision in arithmetics():
        g, x, w = (torch.randn(shape).to(dtype) for shape in (p.out_shape, p.in_shape, p.weight_shape))
        for of in OF:
            result = as_on_a_gpu(of, *operator_arguments(of, p, g, x, w, precision))
            assert (result.shape, result.dtype) == (p.shape_of(of), dtype)
            assert not result.any()


@empty_calls
def test_nothing_is_compiled(gpu, empty):
    for dtype, precision in arithmetics():
        assert compile_ahead.calls_of([Noted(empty, dtype, "", precision)], gpu, STEP) == []
