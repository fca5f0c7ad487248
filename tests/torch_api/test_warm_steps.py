"""``warm`` finds streaming steps too: their kernels are those that a step launches."""

import contextlib
import pickle
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import numba_tconv
from numba_tconv.formula.precision import PRECISIONS, TF32_ALLOWED
from numba_tconv.formula.problem import Problem
from numba_tconv.runtime.device import A100, GPUS, H200
from numba_tconv.runtime.kernel import Kernel
from numba_tconv.runtime.layout import Layout
from numba_tconv.selection.directions import FORWARD, STEP
from numba_tconv.torch_api import streaming
from numba_tconv.torch_api.compile_ahead import StepCall, calls_of
from numba_tconv.torch_api.noted import Noted, NotedStep, computations

T4 = GPUS["Tesla T4"]
PROBLEM = Problem(2, 64, 32, 4, 1, stride=2, bias=True)


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_steps_are_found_on_every_device(device):
    with FakeTensorMode() if device == "cuda" else contextlib.nullcontext():
        shapes = PROBLEM.in_shape, (2, 64, 1), PROBLEM.weight_shape, (32,)
        x, state, weight, bias = (torch.empty(shape, device=device) for shape in shapes)

    def step(x, state):
        return streaming.step(x, state, weight, bias, stride=2)

    assert computations(step, x, state) == [NotedStep(PROBLEM, torch.float32, TF32_ALLOWED)]


def test_a_step_that_is_found_leaves_its_state():
    layer = numba_tconv.ConvTranspose1d(64, 32, 4, stride=2, precision="ieee")
    x, state = torch.ones(2, 64, 1), layer.initial_state(2)
    assert computations(layer.step, x, state) == [NotedStep(PROBLEM, torch.float32, "ieee")]
    assert not state.any()
    assert computations(layer.step, x[:0], state[:0]) == []


LAYERS = {
    "dense": (PROBLEM, torch.float32),
    "bfloat16": (PROBLEM, torch.bfloat16),
    "large, bfloat16": (replace(PROBLEM, in_channels=1024, out_channels=512, kernel_size=16, stride=8), torch.bfloat16),
    "depthwise": (replace(PROBLEM, out_channels=64, groups=64), torch.float16),
    "many slots": (replace(PROBLEM, batch=600), torch.float32),
    "many frames, dilation": (replace(PROBLEM, length=600, dilation=3), torch.float64),
    "many frames": (replace(PROBLEM, length=600), torch.float16),
}


def launched(problem, dtype, precision, gpu, monkeypatch) -> list:
    """Configuration of the launch, or problem, variant and precision of the convolution."""
    p, found = problem, []
    monkeypatch.setattr(streaming.device, "of", lambda _: gpu)
    monkeypatch.setattr(streaming.plan, "prepare", lambda *given: found.append(given[-1]))
    state = p.batch, p.in_channels, streaming.kept_frames(p)

    def convolve(x, weight, bias, stride, padding, output_padding, groups, dilation, *choice):
        sizes = *x.shape[:2], p.out_channels, p.kernel_size, x.shape[2]
        found.append((Problem(*sizes, stride, padding, output_padding, groups, dilation, p.bias), dtype, *choice))
        return torch.empty(1)

    monkeypatch.setattr(streaming.ops, "conv_transpose1d", convolve)
    streaming._ready.cache_clear()
    shapes = p.in_shape, state, p.weight_shape, (p.out_channels,)
    laid_out = [Layout.contiguous(shape, dtype, -1) for shape in shapes]
    compute = streaming._ready(*laid_out, False, p.stride, p.groups, p.dilation, precision)
    streaming._ready.cache_clear()
    if not found:
        compute(*(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes), None)
    return found


@pytest.mark.parametrize("gpu", [H200, A100, T4], ids=["9.0", "8.0", "7.5"])
@pytest.mark.parametrize("what", LAYERS)
def test_the_kernels_of_a_step_are_those_that_it_launches(what, gpu, monkeypatch):
    problem, dtype = LAYERS[what]
    for precision in PRECISIONS[dtype]:
        (found,) = launched(problem, dtype, precision, gpu, monkeypatch)
        expected = calls_of([Noted(*found)], gpu) if isinstance(found, tuple) else [StepCall(found)]
        for direction in (FORWARD, STEP):
            calls = pickle.loads(pickle.dumps(calls_of([NotedStep(problem, dtype, precision)], gpu, direction)))
            assert calls == expected


def test_every_way_is_taken():
    calls = [calls_of([NotedStep(*given, PRECISIONS[given[1]][0])], H200)[0] for given in LAYERS.values()]
    names = {call.kernels()[0].name for call in calls if isinstance(call, StepCall)}
    assert names == {"streaming_step", "streaming_mma", "streaming_depthwise"}
    assert not all(isinstance(call, StepCall) for call in calls)


def test_warm_compiles_them(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_TCONV_CACHE", str(tmp_path))
    monkeypatch.setattr(Kernel, "ptx", lambda kernel, _: kernel.name)  # other tests compile them
    layer = numba_tconv.ConvTranspose1d(64, 32, 4, stride=2).requires_grad_(False)
    x, state = torch.empty(2, 64, 1), layer.initial_state(2)
    assert [numba_tconv.warm(layer.step, x, state, jobs=1) for _ in range(2)] == [1, 0]
