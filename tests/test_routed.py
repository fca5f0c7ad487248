"""``routed``: torch's functional transposed convolution is this package's while it is active, and torch's otherwise."""

import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import numba_tconv
from numba_tconv import accuracy, bench, routed
from numba_tconv.directions import Operands
from numba_tconv.problem import Problem
from numba_tconv.workloads import Workload

CHANNELS = 6


def upsample(x, filter):
    """As in BigVGAN: one filter, expanded over the channels."""
    channels = x.shape[1]
    return F.conv_transpose1d(x, filter.expand(channels, -1, -1), stride=2, padding=5, groups=channels)


@pytest.fixture
def calls(monkeypatch):
    seen = []

    def counted(*args, **kwargs):
        seen.append(kwargs)
        return numba_tconv.conv_transpose1d(*args, **kwargs)

    monkeypatch.setattr(sys.modules[routed.__module__], "conv_transpose1d", counted)
    return seen


@pytest.fixture
def tensors():
    return torch.randn(2, CHANNELS, 9), torch.randn(1, 1, 12)


def test_calls_are_ours_while_it_is_active(calls, tensors):
    expected = upsample(*tensors)
    with routed():
        assert torch.equal(upsample(*tensors), expected)
    assert calls == [dict(stride=2, padding=5, groups=CHANNELS)]
    upsample(*tensors)
    assert len(calls) == 1


def test_it_reaches_torchs_layers_and_both_names_of_the_function(calls):
    layer, x = nn.ConvTranspose1d(3, 2, 3), torch.randn(1, 3, 5)
    with routed():
        layer(x)
        torch.conv_transpose1d(x, weight=layer.weight)
        nn.Conv1d(3, 2, 1)(x)
        F.conv_transpose2d(x[None], torch.randn(1, 3, 1, 1))
    assert len(calls) == 2


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


def test_calls_of_tensors_that_compute_it_themselves_stay_theirs(calls, tensors):
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "its own"

    with routed():
        assert F.conv_transpose1d(tensors[0].as_subclass(Own), tensors[1]) == "its own"
    assert calls == []


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


def test_torch_compile_traces_through_it(calls, tensors):
    torch.compiler.reset()
    compiled = torch.compile(upsample, backend="eager", fullgraph=True)
    expected = upsample(*tensors)
    with routed():
        assert torch.equal(compiled(*tensors), expected)
        assert calls
    del calls[:]
    assert torch.equal(compiled(*tensors), expected)
    assert calls == []


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
