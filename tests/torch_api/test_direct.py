"""Calls around the dispatcher compute what the operator computes; anything else active in torch takes the operator."""

import contextlib
import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parameter import Parameter
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import numba_tconv
from numba_tconv.torch_api import fast_path as direct
from numba_tconv.torch_api import operators as ops
from numba_tconv.torch_api import transforms
from tests.around import PROBLEM, assert_same, call, tensors_of
from tests.gradient_parity import OF, OPERATORS, gradient_operands, operator_arguments
from tests.parity import SMALL

pytest_plugins = ["tests.around"]
pytestmark = pytest.mark.usefixtures("made_ready")

REASONS = ["groups, unequal channels", "output_padding and padding", "one output sample left", "stride 1, dilation"]


# Which call takes which way


def plainly():
    x, w, bias = tensors_of(PROBLEM, requires_grad=False)
    call(x, Parameter(w, requires_grad=False), bias)
    call(x, w)


def without_gradients():
    with torch.no_grad():
        call(*tensors_of(PROBLEM))


def in_inference_mode():
    x, w, bias = tensors_of(PROBLEM)
    with torch.inference_mode():
        call(x.clone(), w, bias)


def under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        call(*(tensor.float() for tensor in tensors_of(PROBLEM)))


def with_output_padding_below_the_dilation():
    sizes = dict(stride=1, output_padding=2, dilation=3, groups=PROBLEM.groups)
    numba_tconv.conv_transpose1d(*tensors_of(PROBLEM, requires_grad=False), **sizes)


def with_gradients():
    tensors = tensors_of(PROBLEM)
    gradients = torch.autograd.grad(call(*tensors).square().sum(), tensors, create_graph=True)
    torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), tensors)


def unbatched():
    x, w, bias = tensors_of(PROBLEM)
    call(x[0], w, bias)


AT_ONCE = (plainly, without_gradients, in_inference_mode, with_output_padding_below_the_dilation, with_gradients)
AROUND = (*AT_ONCE, under_autocast, unbatched)


@pytest.mark.parametrize("situation", AROUND, ids=lambda situation: situation.__name__)
def test_plain_tensors_go_around_the_dispatcher(routes, situation):
    situation()
    assert not routes["through"]
    assert bool(routes["at once"]) == (situation in AT_ONCE)
    assert bool(routes["around"]) == (situation not in AT_ONCE[:-1])  # or in second derivatives


class Passed(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


class PassedFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.passed = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.passed.append(function)
        return function(*args, **kwargs or {})


class Subclass(torch.Tensor):
    pass


def in_a_dispatch_mode(x, w, bias):
    with Passed():
        call(x, w, bias)


def traced_by_make_fx(x, w, bias):
    graph = make_fx(lambda *tensors: call(*tensors))(x, w, bias).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [ops.conv_transpose1d]


def traced_by_jit(x, w, bias):
    traced = torch.jit.trace(lambda *tensors: call(*tensors), (x, w, bias), check_trace=False)
    assert "numba_tconv::conv_transpose1d" in str(traced.graph)


def of_fake_tensors(x, w, bias):
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (x, w, bias)]
    call(*fakes)


def of_a_subclass(x, w, bias):
    call(x, w.as_subclass(Subclass), bias)


def of_a_subclass_that_dispatches(x, w, bias):
    call(TwoTensor(x, x), TwoTensor(w, w), TwoTensor(bias, bias))


def of_a_negation_not_yet_done(x, w, bias):
    negated = torch._neg_view(w)
    torch.testing.assert_close(call(x, negated, bias), call(x, -w, bias))


def of_zeros_without_memory(x, w, bias):
    zeros = torch._efficientzerotensor(bias.shape, dtype=bias.dtype)
    with contextlib.suppress(RuntimeError, NotImplementedError):  # torch's own convolution cannot do these either
        call(x, w, zeros)


def profiled(x, w, bias):
    with torch.profiler.profile() as profile:
        call(x, w, bias)
    assert "numba_tconv::conv_transpose1d" in {event.name for event in profile.events()}


def inside_of_an_operator(x, w, bias):
    with torch._C._AutoDispatchBelowAutograd():
        assert not call(x, w, bias).requires_grad


THROUGH = (
    *(in_a_dispatch_mode, traced_by_make_fx, traced_by_jit, of_fake_tensors, of_a_subclass),
    *(of_a_subclass_that_dispatches, of_a_negation_not_yet_done, of_zeros_without_memory),
    *(profiled, inside_of_an_operator),
)


@pytest.mark.parametrize("situation", THROUGH, ids=lambda situation: situation.__name__)
def test_whatever_else_is_active_takes_the_operator(routes, situation):
    call(*tensors_of(PROBLEM))  # remembered, but not for the others
    routes["at once"].clear()
    situation(*tensors_of(PROBLEM))
    assert ops.conv_transpose1d in routes["through"]
    assert not routes["at once"] or situation is of_a_negation_not_yet_done  # it compares with a plain call


UNUSUAL = {
    "a subclass": lambda tensor: tensor.as_subclass(Subclass),
    "a negation not yet done": torch._neg_view,
    "no tensor": lambda tensor: tensor.tolist(),
}


@pytest.mark.parametrize("what", UNUSUAL)
@pytest.mark.parametrize("place", range(3))
def test_one_unusual_tensor_among_plain_ones_is_not_clear(what, place):
    tensors = tensors_of(PROBLEM, requires_grad=False)
    assert direct.is_clear(*tensors)
    tensors[place] = UNUSUAL[what](tensors[place])
    assert not direct.is_clear(*tensors)


@pytest.mark.parametrize("number", [True, 1.0, torch.tensor(1)], ids=str)
def test_a_number_that_is_no_plain_one_takes_the_operator(number):
    arguments = [*tensors_of(PROBLEM), 1, 0, 0, 2, 1, "", "ieee"]
    assert direct.route(ops.conv_transpose1d, tuple(arguments)) is not ops.conv_transpose1d
    arguments[3] = number
    assert direct.route(ops.conv_transpose1d, tuple(arguments)) is ops.conv_transpose1d


def test_a_function_mode_is_given_the_function(routes):
    tensors = tensors_of(PROBLEM)
    with PassedFunctions() as mode:
        found = call(*tensors)
    assert_same([found], [call(*tensors)])
    assert mode.passed == [numba_tconv.conv_transpose1d]
    assert len(routes["at once"]) == 2  # the mode is not asked again


def test_an_operator_that_nobody_described_is_called_itself():
    assert direct.route(torch.ops.aten.relu.default, (torch.randn(3),)) is torch.ops.aten.relu.default


@pytest.mark.parametrize("operand", range(3), ids=("input", "weight", "bias"))
def test_an_operands_torch_function_receives_the_call(operand):
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return func

    tensors = list(tensors_of(PROBLEM))
    tensors[operand] = tensors[operand].as_subclass(Own)
    assert call(*tensors) is numba_tconv.conv_transpose1d


# The results


def everything(f, wanted, problem=PROBLEM, hooks=contextlib.nullcontext):
    """The output of ``f``, the gradients that are ``wanted``, and the gradients of those."""
    torch.manual_seed(1)
    tensors = [tensor.requires_grad_(bool(want)) for tensor, want in zip(tensors_of(problem), wanted, strict=True)]
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    with hooks():
        y = f(*tensors, problem=problem)
    if not leaves:
        return [y]
    first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves, allow_unused=True)
    return [y, *first, *(torch.zeros(0) if g is None else g for g in second)]


WANTED = [(0, 0, 0), (1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)]


@pytest.mark.parametrize("wanted", WANTED, ids=str)
@pytest.mark.parametrize("reason", REASONS)
def test_outputs_and_gradients_are_the_operators(by_operator, wanted, reason):
    compute = functools.partial(everything, call, wanted, SMALL[reason])
    assert_same(compute(), by_operator(compute))


def recomputed(*tensors, problem):
    return checkpoint(call, *tensors, problem=problem, use_reentrant=False)


def test_checkpoints_and_hooks_on_what_is_saved_see_the_operators(by_operator):
    def compute():
        return everything(recomputed, (1, 1, 1))

    assert_same(compute(), by_operator(compute))
    packed = {}

    def saved(way):
        def pack(tensor):
            packed.setdefault(way, []).append(tensor.detach().clone())
            return tensor

        hooks = functools.partial(torch.autograd.graph.saved_tensors_hooks, pack, lambda tensor: tensor)
        return everything(call, (1, 1, 0), hooks=hooks)

    assert_same(saved("around"), by_operator(lambda: saved("through")))
    assert len(packed["around"]) == 2
    assert_same(packed["around"], packed["through"])


@pytest.mark.parametrize("of", OF)
def test_the_operators_of_the_backward_pass(by_operator, of):
    arguments = operator_arguments(of, PROBLEM, *gradient_operands(PROBLEM, torch.float64))

    def compute():
        return [transforms.apply(OPERATORS[of], *arguments)]

    assert_same(compute(), by_operator(compute))


BAD = {
    "stride": {"stride": 0},
    "stride of two": {"stride": (1, 1)},
    "groups": {"groups": 3},
    "output length": {"padding": 80},
    "ranks": {"input": torch.randn(7)},
    "weight rank": {"weight": torch.randn(4, 6)},
    "channels": {"input": torch.randn(2, 3, 7)},
    "dtypes": {"weight": torch.randn(4, 6, 3).half()},
    "dtype and shape of bias": {"bias": torch.randn(5).double()},
    "bias shape": {"bias": torch.randn(5)},
    "of several, the first": {"bias": torch.randn(5), "stride": 0},
    "devices": {"weight": torch.randn(4, 6, 3, device="meta")},
    "dtype of all": {"input": torch.randn(2, 4, 7).to(torch.complex64), "weight": torch.randn(4, 6, 3).half()},
    "no dimensions": {"input": torch.randn(())},
    "a number of more than 64 bits": {"input": torch.randn(2, 4, 1), "stride": 2**64},
    "a number below those of 64 bits": {"padding": -(2**64)},
    "no weight": {"weight": None},
    "no tensor": {"input": [1.0]},
}


@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("fault", BAD)
def test_errors_are_the_operators(by_operator, made_ready, fault, gradients):
    good = {"input": torch.randn(2, 4, 7), "weight": torch.randn(4, 6, 3), "bias": torch.randn(6)}
    arguments = good | BAD[fault]
    if isinstance(arguments["input"], torch.Tensor):
        arguments["input"] = arguments["input"].clone().requires_grad_(gradients)

    def raised():
        with pytest.raises(Exception) as error:  # noqa: PT011  (its type is compared)
            numba_tconv.conv_transpose1d(**arguments)
        return type(error.value), str(error.value)

    assert raised() == by_operator(raised) == raised()
    assert not made_ready


def of_dual_numbers(x, w, bias):
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(x.detach(), x.detach().flip(0)), w.detach(), bias.detach())


def differentiated_by_torch_func(x, w, bias):
    return torch.func.grad(lambda x: call(x, w.detach(), bias.detach()).square().sum())(x.detach())


def one_by_one(x, w, bias):
    return torch.vmap(lambda x: call(x, w.detach(), bias.detach()))(x.detach()[:, None])


@pytest.mark.parametrize("situation", [of_dual_numbers, differentiated_by_torch_func, one_by_one])
def test_other_modes_of_differentiation_have_ways_of_their_own(routes, by_operator, situation):
    call(*tensors_of(PROBLEM))
    routes["at once"].clear()
    compute = functools.partial(situation, *tensors_of(PROBLEM))
    found = compute()
    assert not routes["at once"]
    torch.testing.assert_close(found, by_operator(compute))


def seen_by_a_mode(y, g):
    with SeenOperators() as mode:
        y.backward(g)
    return mode.seen


def seen_by_a_profiler(y, g):
    with torch.profiler.profile() as profile:
        y.backward(g)
    return {event.name for event in profile.events()}


class SeenOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(function.name())
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("see", [seen_by_a_mode, seen_by_a_profiler])
def test_whoever_looks_on_sees_the_operators_of_the_backward_pass(see, made_ready):
    y = call(*tensors_of(PROBLEM))
    assert see(y, torch.ones_like(y)) >= {operator.name() for operator in OPERATORS.values()}
    assert [name for name, _ in made_ready] == ["ready"]


def test_a_graph_names_the_operator():
    assert call(*tensors_of(PROBLEM)).grad_fn.name() == "conv_transpose1dBackward"


@pytest.mark.parametrize("place", range(5))
def test_one_of_five_tensors_wants_a_gradient(place):
    tensors = [torch.zeros(1) for _ in range(5)]
    assert not direct.wants_gradient(*tensors)
    tensors[place].requires_grad_()
    assert direct.wants_gradient(*tensors)
    with torch.no_grad():
        assert not direct.wants_gradient(*tensors)
