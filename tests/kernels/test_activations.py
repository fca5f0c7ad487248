"""The activations between the filters and their derivatives, in Python against torch's."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from numba_tconv.gradients.alias_free import through
from numba_tconv.kernels.alias_free import activation
from numba_tconv.ptx import SIMULATOR

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has these functions compiled to its own")

TORCHS = {"silu": F.silu, "leaky_relu": F.leaky_relu, "elu": F.elu, "gelu": F.gelu, "identity": torch.Tensor.clone}
PLACES = np.array([-30, -3.5, -1, -0.25, 0, 1e-9, 0.5, 1, 2, 7, 40])


@pytest.mark.parametrize("name", TORCHS)
def test_an_activation_and_its_slope_are_torchs(name):
    assert TORCHS.keys() == activation.POINTWISE.keys() == through.DERIVATIVES.keys()
    u = torch.tensor(PLACES, requires_grad=True)
    y = TORCHS[name](u)
    y.sum().backward()
    ours = activation.of(name, torch.float64).py_func
    np.testing.assert_allclose([ours(one, None) for one in PLACES], y.detach(), rtol=1e-12, atol=1e-15)
    slope = through.DERIVATIVES[name].py_func
    np.testing.assert_allclose([slope(one) for one in PLACES], u.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("log_scale", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_snake_is_what_its_constants_say(monkeypatch, dtype, log_scale):
    monkeypatch.setattr(activation, "device_function", lambda function: function)
    monkeypatch.setattr(activation, "cuda", SimpleNamespace(fma=lambda a, b, c: a * b + c))
    monkeypatch.setattr(activation, "nearest_integer", round)
    monkeypatch.setattr(activation, "sine_approx", math.sin)
    monkeypatch.setattr(activation, "float32", float)
    monkeypatch.setattr(activation, "float64", float)
    fill, snake = activation.make_constants(dtype, log_scale), activation.of("snake", dtype).py_func
    for alpha, beta in ((0.75, 0.5), (-0.3, 1.25), (0.0, 2.0)):
        constants = [None, None]
        scale = fill(constants, alpha, beta)
        a, b = (math.exp(alpha), math.exp(beta)) if log_scale else (alpha, beta)
        for u in PLACES:
            found = snake(u * scale, constants) / scale
            assert found == pytest.approx(u + math.sin(a * u) ** 2 / (b + 1e-9), rel=1e-6, abs=1e-6)


def test_16_bits_have_a_scale_that_is_not_zero():
    """It divides what the filters give."""
    least, constants = activation.LEAST_SCALE, [None, None]
    fill = activation.make_constants(torch.float16, False).py_func
    for alpha, scale in ((0.0, least), (least / 2, least), (-least / 2, least), (2 * least, 2 * least), (-1.0, -1.0)):
        assert float(fill(constants, alpha, 1.0)) == pytest.approx(scale)
