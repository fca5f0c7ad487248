"""``routed``: torch's functional transposed convolution is this package's while it is active, else torch's."""

import contextlib
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import conv_transpose1d as by_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import numba_tconv
from numba_tconv import routed
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure import accuracy, bench
from numba_tconv.lab.measure.directions import Operands
from numba_tconv.lab.measure.workloads import Workload
from numba_tconv.torch_api import fast_path as direct
from numba_tconv.torch_api import functional
from numba_tconv.torch_api import operators as ops

CHANNELS = 6


def upsample(x, filter):
    """As in BigVGAN: one filter, expanded over the channels."""
    channels = x.shape[1]
    return F.conv_transpose1d(x, filter.expand(channels, -1, -1), stride=2, padding=5, groups=channels)


@pytest.fixture
def calls(monkeypatch):
    seen = []

    def counted(input, weight, bias, *parameters):
        seen.append(parameters)
        return numba_tconv.conv_transpose1d(input, weight, bias, *parameters)

    monkeypatch.setattr(sys.modules[routed.__module__], "conv_transpose1d", counted)
    return seen


@pytest.fixture
def tensors():
    return torch.randn(2, CHANNELS, 9), torch.randn(1, 1, 12)


def test_calls_are_ours_while_it_is_active(calls, tensors):
    expected = upsample(*tensors)
    with routed():
        assert torch.equal(upsample(*tensors), expected)
    assert calls == [(2, 5, 0, CHANNELS, 1)]
    upsample(*tensors)
    assert len(calls) == 1


def test_it_reaches_torchs_layers_and_every_name_of_the_function(calls):
    layer, x = nn.ConvTranspose1d(3, 2, 3), torch.randn(1, 3, 5)
    scripted = torch.jit.script(layer)
    with routed():
        layer(x)
        torch.conv_transpose1d(x, weight=layer.weight)
        by_name(x, layer.weight)
        torch.ops.aten.conv_transpose1d(x, layer.weight)
        scripted(x)
        nn.Conv1d(3, 2, 1)(x)
        F.conv_transpose2d(x[None], torch.randn(1, 3, 1, 1))
    assert len(calls) == 5


def test_it_nests_and_ends_with_an_exception(calls, tensors):
    expected = upsample(*tensors)
    with routed():
        with routed():
            assert torch.equal(upsample(*tensors), expected)
        del calls[:]
        upsample(*tensors)
    assert len(calls) == 1
    with pytest.raises(RuntimeError), routed():
        upsample(torch.randn(1, 2), tensors[1])
    upsample(*tensors)
    assert len(calls) == 2


def test_one_object_may_be_entered_again_and_in_several_threads(calls, tensors):
    route = routed()
    entered, left = threading.Event(), threading.Event()

    def other():
        with route, route:
            entered.set()
            left.wait(60)
        upsample(*tensors)
        with route:
            upsample(*tensors)

    thread = threading.Thread(target=other)
    with route:
        thread.start()
        entered.wait(60)
        with route:
            pass
        upsample(*tensors)
    upsample(*tensors)
    left.set()
    thread.join()
    assert len(calls) == 2


def test_it_holds_in_its_own_thread_only(calls, tensors):
    with routed():
        other = threading.Thread(target=upsample, args=tensors)
        other.start()
        other.join()
    assert calls == []


def test_gradients(calls, tensors):
    def gradients():
        x, filter = (tensor.clone().requires_grad_() for tensor in tensors)
        upsample(x, filter).square().sum().backward()
        return x.grad, filter.grad

    expected = gradients()
    with routed():
        assert all(torch.equal(got, want) for got, want in zip(gradients(), expected, strict=True))
    assert len(calls) == 1


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_a_backward_pass_computes_again_is_ours_too(calls, tensors, reentrant, device):
    """For a GPU torch does so in a thread of its own."""
    x, filter = (tensor.to(device) for tensor in tensors)
    x.requires_grad_()
    with routed():
        checkpoint(upsample, x, filter, use_reentrant=reentrant).sum().backward()
    assert len(calls) == 2


def test_nothing_is_in_the_way_of_other_calls(tensors):
    """No function mode, through which every torch function would call Python; our own calls take the short way."""
    with routed():
        assert torch._C._len_torch_function_stack() == 0
        assert direct.is_clear(*tensors)


def test_other_functions_pass_by(calls, tensors):
    """Also higher-order operators, which read the dispatcher's keys themselves."""

    class Doubled(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

    x, _ = tensors
    with routed():
        assert torch.equal(torch.vmap(Doubled.apply)(x), 2 * x)
        assert torch.equal(torch.cond(torch.tensor(True), torch.sin, torch.cos, (x,)), x.sin())
    assert calls == []


def test_transforms(calls, tensors):
    x, filter = tensors
    expected = torch.func.hessian(lambda filter: upsample(x, filter).square().sum())(filter)
    batched = torch.vmap(upsample, (0, None))(x[None], filter)
    with routed():
        found = torch.func.hessian(lambda filter: upsample(x, filter).square().sum())(filter)
        torch.testing.assert_close(torch.vmap(upsample, (0, None))(x[None], filter), batched)
    torch.testing.assert_close(found, expected)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", ["unbatched", "complex", "autocast", "float64"])
def test_results_are_torchs_for_whatever_tensors(calls, kind):
    def call():
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            return by_name(x, w, bias, stride=(2,), output_padding=1)

    dtype = dict(complex=torch.complex64, float64=torch.float64).get(kind, torch.float32)
    x, w, bias = (torch.randn(*size, dtype=dtype) for size in ((2, 3, 5), (3, 2, 4), (2,)))
    x = x[0] if kind == "unbatched" else x
    expected = call()
    with routed():
        found = call()
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert calls == [(2, 0, 1, 1, 1)]


@pytest.mark.parametrize("bad", [dict(stride=0), dict(padding=(1, 1)), dict(groups=2), dict(stride="same")], ids=str)
def test_errors_have_torchs_types_and_leave_it_as_it_was(calls, bad):
    x, w = torch.randn(1, 3, 5), torch.randn(3, 2, 3)
    with pytest.raises((RuntimeError, TypeError)) as of_torch:
        by_name(x, w, **bad)
    with routed():
        with pytest.raises(of_torch.type):
            by_name(x, w, **bad)
        assert direct.is_routed()
    assert not direct.is_routed()


def test_calls_of_tensors_that_compute_it_themselves_stay_theirs(calls, tensors):
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "its own"

    with routed():
        assert F.conv_transpose1d(tensors[0].as_subclass(Own), tensors[1]) == "its own"
    assert calls == []


class Dispatched(torch.Tensor):
    """Knows torch's operators alone."""

    __torch_function__, __repr__ = torch._C._disabled_torch_function_impl, object.__repr__

    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts, *_):
        return Dispatched(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.namespace != "aten":
            raise NotImplementedError(func)
        return func(*(one.inner if isinstance(one, cls) else one for one in args), **(kwargs or {}))


@pytest.mark.parametrize("operand", range(3), ids=("input", "weight", "bias"))
def test_calls_with_an_operand_that_dispatches_itself_stay_torchs(calls, operand):
    operands = [torch.randn(2, 3, 5), torch.randn(3, 4, 2), torch.randn(4)]
    expected = F.conv_transpose1d(*operands)
    operands[operand] = Dispatched(operands[operand])
    with routed():
        assert torch.equal(F.conv_transpose1d(*operands), expected)
    assert calls == []


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("operand", range(3), ids=("input", "weight", "bias"))
def test_torch_computes_an_operand_that_knows_its_operators_alone(operand, compiled):
    operands = [torch.randn(2, 3, 5), torch.randn(3, 4, 2), torch.randn(4)]
    expected = numba_tconv.conv_transpose1d(*operands, padding="causal")
    operands[operand] = Dispatched(operands[operand])
    torch.compiler.reset()
    compute = numba_tconv.conv_transpose1d
    compute = torch.compile(compute, backend="aot_eager", fullgraph=True) if compiled else compute
    assert torch.equal(compute(*operands, padding="causal"), expected)


def test_a_cuda_tensor_gets_to_our_operator():
    """On a machine without a GPU too, as tensors without memory."""
    ops = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ops.append(func)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():
        x, filter = torch.empty(2, CHANNELS, 9, device="cuda"), torch.empty(1, 1, 12, device="cuda")
        with Log(), routed():
            y = upsample(x, filter)
    assert torch.ops.numba_tconv.conv_transpose1d.default in ops
    assert y.shape == (2, CHANNELS, 18)


@pytest.fixture
def on_gpu(monkeypatch):
    """CPU tensors count as a GPU's, so that the operator is traced."""
    monkeypatch.setattr(functional, "_ours", lambda *_: True)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("first", [False, True], ids=["outside first", "inside first"])
def test_what_torch_compile_compiled_inside_is_not_used_outside(on_gpu, tensors, first):
    from torch._dynamo.backends.common import aot_autograd  # takes seconds

    ran = []

    def compiler(graph, inputs):
        ours = ops.conv_transpose1d in [node.target for node in graph.graph.nodes]

        def run(*arguments):
            ran.append(ours)
            return graph(*arguments)

        return run

    compiled = torch.compile(upsample, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    expected = upsample(*tensors)
    for inside in (first, not first, first, not first):
        with routed() if inside else contextlib.nullcontext():
            assert torch.equal(compiled(*tensors), expected)
        assert ran.pop() == inside
    assert not ran


def test_graphs_that_torch_keeps_on_the_disk_are_told_apart(tensors):
    """torch finds them by function names, which are the same inside and outside."""
    before = torch.compiler.config.cache_key_tag
    route = routed()
    with route:
        tag = torch.compiler.config.cache_key_tag
        assert tag != before
        with route, routed():
            assert torch.compiler.config.cache_key_tag == tag
        assert torch.compiler.config.cache_key_tag == tag
    assert torch.compiler.config.cache_key_tag == before


def test_torch_compile_traces_the_entry(on_gpu, tensors):
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return graph

    def twice(x, filter):
        with routed():
            x = upsample(x, filter)
        return upsample(x, filter)

    assert torch.equal(torch.compile(twice, backend=compiler, fullgraph=True)(*tensors), twice(*tensors))
    targets = [node.target for node in graphs[0].graph.nodes]
    assert targets.count(ops.conv_transpose1d) == targets.count(torch.conv_transpose1d) == 1


SCRIPT = """
import torch
from torch.export import export
layer, x = torch.nn.ConvTranspose1d(3, 2, 3), torch.randn(2, 3, 5)
def described():
    operator = torch.ops.aten.conv_transpose1d.default
    exported = export(layer, (x,)).run_decompositions()
    return (
        torch._C._dispatch_dump_table(operator.name()).count("Python"),
        [str(node.target) for node in exported.graph.nodes],
        torch.equal(torch.compile(layer, backend="aot_eager")(x), layer(x)),
        torch.func.vmap(layer)(x).shape,
    )
before = described()
import numba_tconv
assert described() == before
with numba_tconv.routed():
    layer(x)
torch.compiler.reset()
assert described()[1:] == before[1:]
"""


@pytest.mark.thorough
def test_torch_is_as_it_was_before_and_after_without_a_word():
    """In a fresh interpreter, since the kernel stays registered."""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", SCRIPT], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert "numba_tconv" not in done.stderr
    assert "egister" not in done.stderr


@pytest.mark.gpu
def test_an_expanded_filter_on_the_gpu(calls):
    problem = Problem(2, 24, 24, 12, 500, stride=2, padding=5, groups=24)
    x, weight, _ = bench.make_inputs(Workload("", problem, "", "", expanded_weight=True), torch.float32, "cuda")
    with bench.torch_switches(tf32=False):
        torchs = upsample(x, weight[:1])
        with routed():
            ours = upsample(x, weight[:1])
    operands = Operands(x, weight, None)
    found = accuracy.errors({"torch": torchs, "ours": ours}, operands, problem)
    assert accuracy.right("forward", found["ours"], found["torch"], operands, "ieee", problem)
    assert len(calls) == 1
