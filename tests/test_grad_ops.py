"""The operators of the backward pass on CPU tensors: their derivatives, and what torch.library's own check says."""

import pytest
import torch

from numba_tconv import ops
from numba_tconv.kernels import grad_ops
from numba_tconv.problem import Problem
from tests.gradient_parity import gradient_operands, references_gradient
from tests.parity import SMALL, verdict

FEW = [
    "stride 1, dilation",
    "K = 2s, the usual decoder layer",
    "output_padding and padding",
    "groups, unequal channels",
    "gcd(stride, dilation) = 2, three rows",
    "depthwise, two outputs a channel",
]
reasons = pytest.mark.parametrize("reason", FEW)


def arguments(problem):
    p = problem
    return p.stride, p.padding, p.output_padding, p.groups, p.dilation


def calls(problem, g, x, w):
    """Every operator and its arguments, for a problem."""
    parameters = *arguments(problem), "ieee"
    return {
        "grad_input": (grad_ops.grad_input, (g, w, problem.length, *parameters)),
        "grad_weight": (grad_ops.grad_weight, (g, x, problem.kernel_size, *parameters)),
        "grad_bias": (grad_ops.grad_bias, (g,)),
    }


def differentiable(problem):
    return [tensor.requires_grad_() for tensor in gradient_operands(problem, torch.float64)]


@reasons
def test_gradients(reason):
    problem = SMALL[reason]
    g, x, w = gradient_operands(problem, torch.float32)
    for of, (operator, operands) in calls(problem, g, x, w).items():
        oracle = references_gradient(of, g, x, w, problem)
        assert verdict(operator(*operands), oracle.float(), oracle, 100) is None, of


@reasons
@pytest.mark.parametrize("of", ["grad_input", "grad_weight", "grad_bias"])
def test_derivatives(of, reason):
    operator, operands = calls(SMALL[reason], *differentiable(SMALL[reason]))[of]
    assert torch.autograd.gradcheck(operator, operands, nondet_tol=0.0)
    assert torch.autograd.gradgradcheck(operator, operands, nondet_tol=0.0)


@pytest.mark.parametrize("of", ["grad_input", "grad_weight", "grad_bias"])
def test_torchs_check_of_operators(of):
    operator, operands = calls(SMALL[FEW[3]], *differentiable(SMALL[FEW[3]]))[of]
    torch.library.opcheck(operator, operands)


class Layer(torch.autograd.Function):
    """The forward operator with the derivative that grad_ops states for it."""

    @staticmethod
    def forward(*arguments):
        return ops.conv_transpose1d(*arguments)

    setup_context = staticmethod(grad_ops.setup_context)
    backward = staticmethod(grad_ops.backward)


@reasons
def test_the_forward_operators_derivative(reason):
    problem = SMALL[reason]
    _, x, w = differentiable(problem)
    bias = torch.randn(problem.out_channels, dtype=torch.float64, requires_grad=True)

    def layer(x, w, bias):
        return Layer.apply(x, w, bias, *arguments(problem), "", "ieee")

    assert torch.autograd.gradcheck(layer, (x, w, bias), nondet_tol=0.0)
    assert torch.autograd.gradgradcheck(layer, (x, w, bias), nondet_tol=0.0)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_is_wanted_is_kept_and_computed(wanted):
    problem = SMALL[FEW[1]]
    _, x, w = gradient_operands(problem, torch.float64)
    operands = [x, w, torch.randn(problem.out_channels, dtype=torch.float64)]
    for operand, requires in zip(operands, wanted, strict=True):
        operand.requires_grad_(requires)
    y = Layer.apply(*operands, *arguments(problem), "", "ieee")
    assert [saved is not None for saved in y.grad_fn.saved_tensors] == [wanted[1], wanted[0]]
    y.sum().backward()
    assert [operand.grad is not None for operand in operands] == list(wanted)


def test_a_grad_output_of_another_length_is_refused():
    problem = Problem(1, 2, 3, 4, 5, stride=2)
    g, x, w = gradient_operands(problem, torch.float32)
    for operator, operands in list(calls(problem, g[..., 1:], x, w).values())[:2]:
        with pytest.raises(RuntimeError, match="grad_output must have the 12 samples"):
            operator(*operands)
