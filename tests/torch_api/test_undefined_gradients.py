"""An output whose gradient is undefined leaves its operands without one, as torch's operators do."""

import pytest
import torch

from numba_tconv.torch_api import alias_free_operators
from numba_tconv.torch_api import fast_path as direct
from tests.around import call, tensors_of
from tests.parity import SMALL

pytest_plugins = ["tests.around"]
pytestmark = pytest.mark.usefixtures("made_ready")


class Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@pytest.fixture(params=["around the dispatcher", "by the operator"])
def way(request, monkeypatch):
    if request.param == "by the operator":
        monkeypatch.setattr(direct, "is_clear", lambda *_: False)


def cut_gradients(output, tensors):
    return torch.autograd.grad(Cut.apply(output).sum(), tensors, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("problem", [SMALL["groups, unequal channels"], SMALL["output_padding and padding"]], ids=str)
def test_of_a_layer(way, problem):
    tensors = tensors_of(problem)
    assert cut_gradients(call(*tensors, problem=problem), tensors) == (None, None, None)


def test_of_a_gradient(way):
    tensors = tensors_of(SMALL["groups, unequal channels"])
    gradients = torch.autograd.grad(call(*tensors).square().sum(), tensors, create_graph=True)
    for gradient in gradients:
        assert cut_gradients(gradient, tensors) == (None, None, None)


def test_of_an_activation(way):
    x, alpha = torch.ones(2, 3, 9, requires_grad=True), torch.ones(3, requires_grad=True)
    taps = torch.ones(12)
    y = alias_free_operators.apply(x, taps, taps, alpha, None, 2, 2, True, "snake")
    assert cut_gradients(y, (x, alpha)) == (None, None)


def test_an_optimizer_skips_such_parameters(way):
    x, weight, bias = tensors_of(SMALL["groups, unequal channels"])
    before = weight.detach().clone()
    Cut.apply(call(x, weight, bias)).sum().backward()
    torch.optim.AdamW([weight, bias], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(weight, before)
