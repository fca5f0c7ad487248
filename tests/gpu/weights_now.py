"""A layer in three arithmetics, and checks that it computes with its present weights.

A result is right within twice torch's distance from float64 (tests/parity.py).
"""

import pytest
import torch
from torch import nn

from numba_tconv import ConvTranspose1d
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure import fuzz
from numba_tconv.lab.measure.directions import Operands, by_torch
from numba_tconv.selection.directions import FORWARD
from tests.gradient_parity import OF
from tests.parity import verdict

from .common import rounding_of

PROBLEM = Problem(4, 128, 64, 4, 400, stride=2, padding=1, bias=True)
ARITHMETICS = {
    "ieee": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "bf16": (torch.bfloat16, "bf16"),
}
arithmetics = pytest.mark.parametrize("arithmetic", ARITHMETICS)
HOT = 5  # calls after which all that may be kept of weights is kept

STEPS = 20
CLOSE = {"ieee": 1e-4, "tf32": 2e-3, "bf16": 1e-2}  # losses, relative to the first


def layer(arithmetic, kind=ConvTranspose1d, **choice):
    """Our layer, or torch's, on the GPU, with random weights and biases."""
    dtype, precision = ARITHMETICS[arithmetic]
    if kind is ConvTranspose1d:
        choice["precision"] = precision
    p = PROBLEM
    sizes = p.in_channels, p.out_channels, p.kernel_size, p.stride, p.padding
    return kind(*sizes, device="cuda", dtype=dtype, **choice)


def precision_of(arithmetic):
    """A context in which torch computes in the arithmetic's precision."""
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=arithmetic == "tf32")


def fresh(dtype):
    p = PROBLEM
    return torch.randn(p.in_shape, device="cuda").to(dtype).requires_grad_()


def copied(module):
    return module.weight.detach().clone(), module.bias.detach().clone()


def assert_results(results, x, parameters, precision, grad_output=None):
    """``results``, by name, belong to these operands."""
    given = Operands(x.detach(), *parameters, grad_output)
    for name, result in results.items():
        with precision_of(precision):
            torchs = by_torch(name, given, PROBLEM)
        oracle = fuzz.in_float64(name, given.of(name), PROBLEM)
        rounding = rounding_of(name, given, PROBLEM, precision)
        wrong = verdict(result.detach(), torchs, oracle, PROBLEM.terms(name), precision, rounding)
        assert wrong is None, f"{name}: {wrong}"


def gradients(y, x, module, grad_output):
    return dict(zip(OF, torch.autograd.grad(y, (x, module.weight, module.bias), grad_output), strict=True))


def assert_step(module, arithmetic):
    """Output and gradients of fresh operands are right."""
    x = fresh(module.weight.dtype)
    y = module(x)
    g = torch.randn_like(y)
    assert_results({FORWARD: y} | gradients(y, x, module, g), x, copied(module), arithmetic, g)


def assert_right(module, arithmetic):
    """A training step and a call of each kind without a gradient are right, twice."""
    for _ in range(2):
        assert_step(module, arithmetic)
        for mode in (torch.no_grad, torch.inference_mode):
            x = fresh(module.weight.dtype)
            with mode():
                y = module(x)
            assert_results({FORWARD: y}, x, copied(module), arithmetic)


def call_often(module, arithmetic):
    """HOT training steps and calls without a gradient, on the same weights."""
    x = fresh(module.weight.dtype)
    for _ in range(HOT):
        assert_step(module, arithmetic)
        with torch.no_grad():
            module(x)


def losses(model, optimizer, dtype, part=slice(None)):
    """The losses of STEPS steps towards a layer of other weights, on ``part`` of each batch."""
    generator = torch.Generator("cuda").manual_seed(3)
    teacher = layer("ieee", nn.ConvTranspose1d)
    for parameter in teacher.parameters():
        nn.init.normal_(parameter, std=0.05, generator=generator)
    p, found = PROBLEM, []
    for _ in range(STEPS):
        x = torch.randn(p.in_shape, device="cuda", generator=generator)[part]
        with torch.no_grad():
            wanted = teacher(x)
        loss = (model(x.to(dtype)).float() - wanted).square().mean()
        optimizer.zero_grad()
        (p.out_channels * loss).backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found).tolist()


def assert_close(ours, theirs, arithmetic):
    """Two runs of losses fall, and agree but for rounding."""
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / theirs[0]
    assert apart <= CLOSE[arithmetic], f"losses are {apart:.2g} apart"
    assert theirs[-1] < 0.8 * theirs[0], "the weights must have changed, or nothing is compared"
