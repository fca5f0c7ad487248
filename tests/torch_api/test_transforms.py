"""Forward mode and torch.func: the public function's derivatives are torch's.

CPU tensors count as a GPU's, so the operators compute as they do under a trace.
"""

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

import numba_tconv
from numba_tconv.torch_api import functional
from tests.parity import SMALL, operands, parameters

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
PROBLEMS = [SMALL["groups, unequal channels"], SMALL["output_padding and padding"]]
problems = pytest.mark.parametrize("problem", PROBLEMS, ids=str)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "cpu":
        monkeypatch.setattr(functional, "_ours", lambda *_: True)
    return request.param


def ours_and_torchs(problem, device):
    """Both functions of x, w and b, and short operands."""
    x, w, _ = operands(problem, torch.float64, device)
    bias = torch.randn(problem.out_channels, dtype=torch.float64, device=device)
    functions = (
        lambda *tensors, f=f: f(*tensors, **parameters(problem))
        for f in (numba_tconv.conv_transpose1d, torch.conv_transpose1d)
    )
    return *functions, (x[..., :5], w, bias)


@pytest.fixture
def agree(device):
    """Checks that ``transformed``, of a function and its operands, is equal for our function and torch's."""

    def agree(transformed, problem):
        ours, torchs, tensors = ours_and_torchs(problem, device)
        expected = transformed(torchs, tensors)
        assert any(tensor.any() for tensor in torch.utils._pytree.tree_leaves(expected))
        torch.testing.assert_close(transformed(ours, tensors), expected)

    return agree


def summed(f):
    return lambda *tensors: f(*tensors).square().sum()


@problems
@pytest.mark.parametrize("has_tangent", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=str)
def test_forward_mode(agree, problem, has_tangent):
    def tangent(f, tensors):
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(tensor, tensor.cos()) if has else tensor
                for tensor, has in zip(tensors, has_tangent, strict=True)
            ]
            return forward_ad.unpack_dual(f(*duals)).tangent

    agree(tangent, problem)


@problems
def test_forward_mode_for_unbatched_input_and_without_bias(agree, problem):
    agree(lambda f, tensors: func.jvp(f, (tensors[0][0], tensors[1]), (tensors[0][1], tensors[1].cos())), problem)


@problems
def test_forward_over_reverse_and_reverse_over_forward(agree, problem):
    def of_gradients(f, tensors):
        tensors = [tensor.requires_grad_() for tensor in tensors]
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(tensor, tensor.detach().sin()) for tensor in tensors]
            gradients = torch.autograd.grad(summed(f)(*duals), duals, create_graph=True)
            return [forward_ad.unpack_dual(gradient).tangent.detach() for gradient in gradients]

    def of_tangents(f, tensors):
        return func.grad(lambda *tensors: func.jvp(summed(f), tensors, tensors)[1], (0, 1, 2))(*tensors)

    agree(of_gradients, problem)
    agree(of_tangents, problem)


@problems
@pytest.mark.parametrize("derivative", [func.jacrev, func.jacfwd], ids=lambda derivative: derivative.__name__)
def test_jacobians(agree, problem, derivative):
    agree(lambda f, tensors: derivative(lambda *tensors: f(*tensors).flatten()[::7], (0, 1, 2))(*tensors), problem)


@problems
def test_hessians(agree, problem):
    agree(lambda f, tensors: func.hessian(lambda x: summed(f)(x, *tensors[1:]))(tensors[0]), problem)


@problems
def test_third_derivatives(agree, problem):
    """Derivatives of the backward pass's operators, under a transform again."""

    def third(f, tensors):
        def second(*tensors):
            gradients = func.grad(summed(f), (0, 1))(*tensors)
            return sum(gradient.square().sum() for gradient in gradients)

        return func.jvp(func.grad(second, (0, 1)), tensors[:2], tensors[:2])

    agree(third, problem)


@problems
@pytest.mark.parametrize("in_dims", [(0, None, None), (None, 0, None), (0, 0, 0), (2, 1, 0)], ids=str)
def test_vmap(agree, problem, in_dims):
    def mapped(f, tensors):
        stacked = [
            tensor if dim is None else torch.stack([tensor, tensor.cos(), -tensor], dim)
            for tensor, dim in zip(tensors, in_dims, strict=True)
        ]
        return func.vmap(f, in_dims)(*stacked)

    agree(mapped, problem)


@problems
@pytest.mark.parametrize("in_dims", [(0, None, None), (None, 0, None), (None, None, 0), (2, 1, 0)], ids=str)
def test_gradients_through_vmap(agree, problem, in_dims):
    """Of the operator, and of its gradients."""

    def stack(tensor, dim):
        return tensor if dim is None else torch.stack([tensor, tensor.cos(), -tensor], dim)

    def mapped(f):
        return lambda *tensors: func.vmap(f, in_dims)(*map(stack, tensors, in_dims))

    def second(f):
        gradients = func.vmap(func.grad(summed(f), (0, 1, 2)), in_dims)
        return lambda *tensors: gradients(*map(stack, tensors, in_dims))[1].square().sum()

    agree(lambda f, tensors: func.grad(summed(mapped(f)), (0, 1, 2))(*tensors), problem)
    agree(lambda f, tensors: func.grad(second(f), (0, 1, 2))(*tensors), problem)


def of_forward_mode(f, tensors):
    return func.jacfwd(func.jacfwd(summed(f), (0, 1, 2)), (0, 1, 2))(*tensors)


@problems
def test_forward_mode_inside_forward_mode(agree, problem):
    """A Function's jvp would lose the outer tangent of the other operand."""
    agree(of_forward_mode, problem)


def test_forward_mode_inside_forward_mode_with_an_own_padding():
    x, w, _ = operands(PROBLEMS[0], torch.float64)
    tensors = x[..., :3], w, torch.randn(PROBLEMS[0].out_channels, dtype=torch.float64)
    sizes = parameters(PROBLEMS[0]) | {"padding": 0}
    found = of_forward_mode(lambda *one: numba_tconv.conv_transpose1d(*one, **sizes | {"padding": (2, 1)}), tensors)
    expected = of_forward_mode(lambda *one: torch.conv_transpose1d(*one, **sizes)[..., 2:-1], tensors)
    torch.testing.assert_close(found, expected)


def test_a_gradient_in_nested_forward_mode_is_refused(device):
    ours, _, (x, w, bias) = ours_and_torchs(PROBLEMS[0], device)

    def inner(w):
        y, back = func.vjp(lambda x: ours(x, w, bias), x)
        return func.jvp(lambda g: back(g)[0], (y,), (y,))[1]

    with pytest.raises(NotImplementedError, match="forward mode inside forward mode"):
        func.jvp(inner, (w,), (w,))


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: func.functionalize(f),
        lambda f: func.functionalize(func.grad(summed(f), (0, 1, 2))),
        lambda f: func.grad(func.functionalize(summed(f)), (0, 1, 2)),
        lambda f: func.functionalize(lambda *tensors: func.jvp(f, tensors, tensors)),
    ],
    ids=["alone", "of a gradient", "inside a gradient", "of forward mode"],
)
def test_functionalize(agree, transformed):
    """Functions of autograd have no rule for it."""
    agree(lambda f, tensors: transformed(f)(*tensors), PROBLEMS[0])


@problems
def test_gradients_for_each_sample(agree, problem):
    def per_sample(f, tensors):
        x, *others = tensors
        return func.vmap(func.grad(summed(f), (1, 2)), (0, None, None))(x, *others)

    agree(per_sample, problem)


def test_torch_compile_refuses_what_it_cannot_trace(device):
    """The operator alone would lose its tangents."""
    ours, _, tensors = ours_and_torchs(PROBLEMS[0], device)
    torch.compiler.reset()
    compiled = torch.compile(lambda w: func.jvp(lambda w: ours(tensors[0], w), (w,), (w,)), fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
        compiled(tensors[1])
