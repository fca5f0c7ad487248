"""The backward operators: derivatives on CPU tensors, torch.library's own check, and who computes what."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import numba_tconv
from numba_tconv.formula.precision import TF32_ALLOWED
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure import workloads
from numba_tconv.runtime.device import A100, H200, Device
from numba_tconv.runtime.layout import layout_of
from numba_tconv.selection import gradient as gradients
from numba_tconv.torch_api import functional
from numba_tconv.torch_api import gradient_operators as grad_ops
from numba_tconv.torch_api import operators as ops
from tests.gradient_parity import (
    OF,
    OPERATORS,
    as_on_a_gpu,
    forget_what_is_ready,
    gradient_operands,
    inputs_of,
    operator_arguments,
    references_gradient,
    torchs_gradient,
)
from tests.parity import SMALL, parameters, verdict
from tests.thorough import thorough

FEW = [
    "stride 1, dilation",
    "K = 2s, the usual decoder layer",
    "output_padding and padding",
    "output_padding at its limit, set by dilation",
    "groups, unequal channels",
    "gcd(stride, dilation) = 2, three rows",
    "depthwise, two outputs a channel",
]
GROUPS = FEW[4]
TURING = Device((7, 5), 68, 64 * 1024)
reasons = pytest.mark.parametrize("reason", thorough(FEW, always=FEW[1:5]))
of_each = pytest.mark.parametrize("of", OF)


def differentiable(problem):
    """grad_output, input, weight and bias in float64."""
    tensors = *gradient_operands(problem, torch.float64), torch.randn(problem.out_channels, dtype=torch.float64)
    return [tensor.requires_grad_() for tensor in tensors]


def test_derivatives_do_not_follow_autocast():
    """Torch's own do not either."""
    _, *tensors = (one.detach().float().requires_grad_() for one in differentiable(SMALL[GROUPS]))

    def derivatives(**autocast):
        y = ops.conv_transpose1d(*tensors, *SMALL[GROUPS].parameters, "", "ieee")
        with torch.autocast("cpu", torch.bfloat16, **autocast):
            first = torch.autograd.grad(y.square().sum(), tensors, create_graph=True)
            return *first, *torch.autograd.grad(sum(one.square().sum() for one in first), tensors)

    assert all(map(torch.equal, derivatives(), derivatives(enabled=False)))


@pytest.fixture
def through_the_operator(monkeypatch):
    """The public function takes CPU tensors as a GPU's."""
    monkeypatch.setattr(functional, "_ours", lambda *_: True)


# The operators


@reasons
@of_each
def test_gradients(of, reason):
    problem = SMALL[reason]
    g, x, w = gradient_operands(problem, torch.float32)
    oracle = references_gradient(of, g, x, w, problem)
    assert verdict(OPERATORS[of](*operator_arguments(of, problem, g, x, w)), oracle.float(), oracle, 100) is None


@pytest.mark.parametrize("reason", thorough(FEW, always=[GROUPS]))
@of_each
def test_derivatives(of, reason):
    operands = operator_arguments(of, SMALL[reason], *differentiable(SMALL[reason])[:3])
    assert torch.autograd.gradcheck(OPERATORS[of], operands, nondet_tol=0.0)
    assert torch.autograd.gradgradcheck(OPERATORS[of], operands, nondet_tol=0.0)


@pytest.mark.parametrize("reason", thorough(FEW, always=[FEW[3], GROUPS]))
@of_each
def test_torchs_check_of_operators(of, reason):
    torch.library.opcheck(OPERATORS[of], operator_arguments(of, SMALL[reason], *differentiable(SMALL[reason])[:3]))


def test_a_grad_output_of_another_length_is_refused():
    problem = Problem(1, 2, 3, 4, 5, stride=2)
    g, x, w = gradient_operands(problem, torch.float32)
    for of in ("grad_input", "grad_weight"):
        with pytest.raises(RuntimeError, match="grad_output must have the 12 samples"):
            OPERATORS[of](*operator_arguments(of, problem, g[..., 1:], x, w))


@pytest.mark.parametrize("empty", [Problem(2, 2, 3, 3, 12, padding=7), Problem(0, 2, 3, 3, 12)], ids=str)
def test_what_no_output_reached_is_zero(empty):
    g, x, w = gradient_operands(empty, torch.float32)
    before = x.clone(), w.clone()
    assert not g.numel()
    for of in OF:
        result = OPERATORS[of](*operator_arguments(of, empty, g, x, w))
        assert result.shape == torchs_gradient(of, g, x, w, empty).shape
        assert result.eq(0).all()
        result.fill_(1)
    assert all(map(torch.equal, (x, w), before))


ROOM = {
    "in what is read": (Problem(2, 6, 6, 4, 100, stride=2, groups=6), "contiguous", True),
    "nowhere: what is read is smaller": (Problem(1, 64, 1, 8, 4, padding=3), "contiguous", False),
    "nowhere: what is read lies otherwise": (Problem(2, 6, 6, 4, 100, stride=2, groups=6), "transposed", False),
}


@pytest.mark.parametrize("of", ["grad_input", "grad_weight"])
@pytest.mark.parametrize("place", ROOM)
def test_what_torchs_own_gradient_does_not_read_takes_no_memory_where_it_finds_room(monkeypatch, of, place):
    problem, layout, shared = ROOM[place]
    g, x, w = gradient_operands(problem, torch.float32, layout=layout)
    unread, number, read = {"grad_input": (x, 1, g), "grad_weight": (w, 2, x)}[of]
    given, compute = [], grad_ops._torchs
    monkeypatch.setattr(grad_ops, "_torchs", lambda *arguments: given.append(arguments[number]) or compute(*arguments))
    result = OPERATORS[of](*operator_arguments(of, problem, g, x, w))
    assert given[0].shape == unread.shape
    assert given[0].is_contiguous()
    assert (given[0].untyped_storage().data_ptr() == read.untyped_storage().data_ptr()) == shared
    torch.testing.assert_close(result, torchs_gradient(of, g, x, w, problem))


# The derivative of the public function


@pytest.mark.parametrize(
    ("reason", "batched", "biased"),
    thorough(
        itertools.product(FEW, [True, False], [True, False]),
        always=[*itertools.product([GROUPS], [True, False], [True, False]), (FEW[2], True, True)],
    ),
)
def test_first_and_second_derivatives(through_the_operator, reason, batched, biased):
    _, x, w, bias = differentiable(SMALL[reason])
    tensors = [x if batched else x[0].detach().requires_grad_(), w, *[bias] * biased]

    def function(x, w, bias=None):
        return numba_tconv.conv_transpose1d(x, w, bias, **parameters(SMALL[reason]))

    assert torch.autograd.gradcheck(function, tensors, nondet_tol=0.0)
    assert torch.autograd.gradgradcheck(function, tensors, nondet_tol=0.0)


class Recorded(TorchDispatchMode):
    """The names of this package's operators that were called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "numba_tconv":
            self.names.append(function.name().removeprefix("numba_tconv::"))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("wanted", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)], ids=str)
def test_only_what_is_wanted_is_kept_and_computed(through_the_operator, wanted):
    _, *tensors = differentiable(SMALL[GROUPS])
    for tensor, want in zip(tensors, wanted, strict=True):
        tensor.requires_grad_(bool(want))
    y = numba_tconv.conv_transpose1d(*tensors, **parameters(SMALL[GROUPS]))
    assert [saved is not None for saved in y.grad_fn.saved_tensors] == [bool(wanted[1]), bool(wanted[0])]
    with Recorded() as recorded:
        y.sum().backward()
    assert recorded.names == [of for of, want in zip(OF, wanted, strict=True) if want]
    assert [tensor.grad is not None for tensor in tensors] == [bool(want) for want in wanted]


def test_a_training_step_is_compiled_whole(through_the_operator):
    """One graph forward and one backward, for any batch and length; the operators stay opaque."""
    from torch._dynamo.backends.common import aot_autograd  # takes seconds
    from torch._functorch.aot_autograd import make_boxed_func

    graphs = {"forward": [], "backward": []}

    def keep(name):
        def compiler(graph, _):
            graphs[name].append([node.target for node in graph.graph.nodes])
            return make_boxed_func(graph)

        return compiler

    backend = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))
    torch.compiler.reset()
    compiled = torch.compile(numba_tconv.conv_transpose1d, fullgraph=True, dynamic=True, backend=backend)
    w, bias = (torch.randn(shape, requires_grad=True) for shape in ((4, 3, 5), (6,)))
    for shape in ((2, 4, 9), (3, 4, 14)):
        x = torch.randn(shape, requires_grad=True)
        ours, theirs = (
            torch.autograd.grad(f(x, w, bias, stride=2, padding=1, groups=2).square().sum(), (x, w, bias))
            for f in (compiled, torch.conv_transpose1d)
        )
        torch.testing.assert_close(ours, theirs)
    (forward,), (backward,) = graphs["forward"], graphs["backward"]
    assert forward.count(ops.conv_transpose1d) == 1
    assert [backward.count(operator) for operator in OPERATORS.values()] == [1, 1, 1]


# Gradients that a GPU leaves to torch

KB64, SMALL_LAYER, DEPTHWISE, PQMF = (workloads.get(name).problem for name in ("kb64", "small", "depthwise", "pqmf"))
FOUR_A_GROUP, SHORT_SUMS = replace(DEPTHWISE, groups=128), replace(SMALL_LAYER, in_channels=16)
STRIDED, DAC = (workloads.get(name).problem for name in ("hifigan_u1", "dac_u1"))
# This package's precisions of grad_input, grad_weight and grad_bias; None: torch's.
DECISIONS = {
    "float32, which nothing rounds": (KB64, torch.float32, "ieee", H200, ["ieee"] * 3),
    "float64": (KB64, torch.float64, "fp64", H200, ["fp64"] * 3),
    "float32's errors, promised": (KB64, torch.float32, "tf32x3", H200, ["ieee"] * 3),
    "tensor cores in TF32": (KB64, torch.float32, "tf32", H200, ["tf32", "tf32", None]),
    "tensor cores in TF32, strided": (STRIDED, torch.float32, "tf32", H200, ["tf32", "tf32", None]),
    "16-bit elements, two million weights": (STRIDED, torch.bfloat16, "bf16", H200, ["bf16", "bf16", None]),
    "16-bit elements, nineteen million weights": (DAC, torch.float16, "fp16", H200, ["fp16", "fp16", None]),
    "16-bit elements, nineteen million weights, without wgmma": (DAC, torch.float16, "fp16", A100, [None] * 3),
    "16-bit elements, seven million weights, a long stride": (
        *(workloads.get("waveglow").problem, torch.bfloat16, "bf16", H200),
        ["bf16", "bf16", None],
    ),
    "tensor cores in float16": (KB64, torch.float16, "fp16", H200, ["fp16", "fp16", None]),
    "tensor cores without wgmma": (KB64, torch.bfloat16, "bf16", A100, ["bf16", None, None]),
    "four channels, of one group": (PQMF, torch.bfloat16, "bf16", H200, ["bf16", "bf16", None]),
    "16-bit elements, one channel a group": (DEPTHWISE, torch.bfloat16, "bf16", H200, ["bf16", "bf16", None]),
    "16-bit elements, four channels a group": (FOUR_A_GROUP, torch.bfloat16, "bf16", H200, [None] * 3),
    "one channel a group, without wgmma": (DEPTHWISE, torch.float16, "fp16", A100, ["fp16", "fp16", None]),
    "TF32 allowed and used": (KB64, torch.float32, TF32_ALLOWED, H200, ["tf32", "tf32", None]),
    "TF32 allowed, too small for it": (SHORT_SUMS, torch.float32, TF32_ALLOWED, A100, ["tf32", "ieee", "ieee"]),
    "TF32 allowed, for gradients alone": (SHORT_SUMS, torch.float32, TF32_ALLOWED, H200, ["tf32", "tf32", "ieee"]),
    "TF32 allowed, depthwise": (DEPTHWISE, torch.float32, TF32_ALLOWED, H200, ["ieee"] * 3),
}


@pytest.mark.parametrize("why", DECISIONS)
def test_what_is_left_to_torch(why):
    *case, expected = DECISIONS[why]
    assert [ops.gradient_precision(of, *case) for of in OF] == expected


def test_what_no_kernel_can_do_on_a_gpu_is_left_to_torch():
    """cp.async came with compute capability 8.0; grad_input and grad_bias have kernels without it."""
    left = [of for of in OF if ops.gradient_precision(of, SHORT_SUMS, torch.float32, "ieee", TURING) is None]
    assert left == ["grad_weight"]


def test_the_bias_is_summed_by_our_kernels_whatever_the_channels():
    """The sum has no products, so it is no work for tensor cores."""
    problem = ops.sum_problem((16, 512, 4096))
    assert problem == Problem(16, 512, 512, 1, 4096, groups=512)
    for device in (H200, A100):
        assert ops.gradient_precision("grad_bias", problem, torch.float32, TF32_ALLOWED, device) == "ieee"


@of_each
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_a_gpu_computes_what_is_not_left_to_torch(monkeypatch, of, precision):
    problem, seen = SMALL[GROUPS], []
    g, x, w = gradient_operands(problem, torch.float32)

    def ready(*what, precision):
        def ours(*operands):
            seen.append((what, operands, precision))
            return references_gradient(of, g, x, w, problem).float()

        return ours

    forget_what_is_ready()
    monkeypatch.setattr(gradients, "ready", ready)
    result = as_on_a_gpu(of, *operator_arguments(of, problem, g, x, w, precision))
    oracle = references_gradient(of, g, x, w, problem)
    assert verdict(result, oracle.float(), oracle, 100) is None
    monkeypatch.undo()
    forget_what_is_ready()
    operands = inputs_of(of, g, x, w)
    problem = replace(problem, bias=False) if of != "grad_bias" else ops.sum_problem(g.shape)
    what = of, problem, *map(layout_of, operands)
    assert seen == ([(what, operands, "ieee")] if precision == "ieee" else [])


@pytest.mark.parametrize("name", ["grad_output", "input", "weight"])
@pytest.mark.parametrize("change", [torch._neg_view, lambda tensor: tensor.clone().requires_grad_()])
def test_gradients_of_what_has_a_gradient_or_waits_for_its_sign_are_the_operators(monkeypatch, name, change):
    taken, given = [], {one: torch.ones(1, 1, 3) for one in ("grad_output", "input", "weight")}
    monkeypatch.setattr(ops, "computes_on", lambda index: True)
    monkeypatch.setattr(ops, "_ready_gradients", lambda *_: taken.append("at once") or [None] * 3)
    monkeypatch.setattr(ops.grad_ops, "backward", lambda *_: taken.append("by operators") or [None] * 3)
    for some in (given, given | {name: change(given[name])}):
        ctx = SimpleNamespace(saved_tensors=(some["input"], some["weight"]), needs_input_grad=[True] * 3, constants=())
        ops.backward(ctx, some["grad_output"])
    assert taken == ["at once", "by operators"]
