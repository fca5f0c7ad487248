"""What a call costs on the host, ours against torch's: a small problem takes no more."""

import gc
import math
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import numba_tconv
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure import workloads
from tests.parity import operands

pytestmark = pytest.mark.gpu

PROBLEM = workloads.get("small").problem
DECODER = Problem(1, 128, 64, 8, 512, stride=4, padding=2)  # a layer whose weights are packed
ROUNDS, CALLS = 60, 20  # as many calls in a round as the driver queues without waiting for the GPU
TURNS, PAUSE_S = 10, 1  # of the rounds, at most, and between two of them
FACTOR = 1.5  # for whole steps, and for calls whose weights are computed for them


def compare(ours, theirs, limit=lambda seconds: FACTOR * seconds):
    """A call of ``ours`` takes the host at most ``limit`` of the seconds of one of ``theirs``.

    Each counts in its fastest round. Other processes only make a round slower, so more rounds follow, later, until one
    shows it."""
    best = [math.inf, math.inf]
    for turn in range(TURNS):
        time.sleep(PAUSE_S if turn else 0)
        best = [min(pair) for pair in zip(best, fastest(ours, theirs), strict=True)]
        if best[0] <= limit(best[1]):
            return
    pytest.fail(f"{1e6 * best[0]:.1f} us against {1e6 * best[1]:.1f}")


def fastest(*functions):
    """Host seconds of a call of each function in its fastest round, by turns. Waiting for the GPU is not timed."""
    for function in functions:
        for _ in range(CALLS):
            function()
    seconds = [[] for _ in functions]
    gc.collect()
    gc.disable()
    try:
        for _ in range(ROUNDS):
            for function, taken in zip(functions, seconds, strict=True):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(CALLS):
                    function()
                taken.append((time.perf_counter() - start) / CALLS)
    finally:
        gc.enable()
        torch.cuda.synchronize()
    return [min(taken) for taken in seconds]


def layers(problem, dtype):
    p = problem
    sizes = p.in_channels, p.out_channels, p.kernel_size, p.stride, p.padding
    return [
        kind(*sizes, groups=p.groups, device="cuda", dtype=dtype)
        for kind in (numba_tconv.ConvTranspose1d, nn.ConvTranspose1d)
    ]


LAYERS = ("small", "hifigan_u1", "hifigan_u3", "encodec_u4", "oobleck_u5", "mimi")
DTYPES = {"ieee": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Times torch's host time in the same run.
MOST = {"inference": 1.1, "training": 1.2, "frozen": 1.0}
# Known to miss it, by up to a fifth on some hosts: two or three launches where torch's call is at its shortest.
SHORT = {("small", "ieee"), ("small", "tf32"), ("hifigan_u1", "ieee")}
SHORT |= {("encodec_u4", precision) for precision in ("ieee", "tf32", "fp16")}
# Recording costs more than a fifth of torch's call in these, too.
RECORDED = {("small", "fp16"), ("encodec_u4", "fp16")}
LONGER = {("hifigan_u1", "ieee"), ("small", "tf32")}  # frozen, too


def misses(name, precision, mode):
    """Why a case is known to miss its limit, or None. torch.autograd.Function alone takes a quarter of torch's call."""
    if mode == "training" and (precision in ("ieee", "tf32") or (name, precision) in RECORDED):
        return "recording a call in Python costs more than the limit leaves"
    if (name, precision) in SHORT and (mode == "inference" or (name, precision) in LONGER):
        return "several launches against torch's shortest call"
    return None


@pytest.mark.parametrize("mode", MOST)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_call_costs_the_host_about_what_torchs_does(name, precision, mode, monkeypatch, request):
    """At batch 1, weights packed in the call."""
    if reason := misses(name, precision, mode):
        request.applymarker(pytest.mark.xfail(reason=reason, strict=False))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")
    problem, dtype = replace(workloads.get(name).problem, batch=1), DTYPES[precision]
    x = torch.randn(1, problem.in_channels, min(problem.length, 512), device="cuda", dtype=dtype)
    ours, theirs = layers(problem, dtype)
    if mode == "frozen":
        numba_tconv.freeze(ours.eval())
    with torch.set_grad_enabled(mode == "training"):
        x.requires_grad_(mode == "training")
        compare(lambda: ours(x), lambda: theirs(x), lambda seconds: MOST[mode] * seconds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_so_does_a_small_step(dtype):
    x = torch.randn(PROBLEM.in_shape, device="cuda", dtype=dtype).requires_grad_()

    def step(layer):
        y = layer(x)
        torch.autograd.grad(y, (x, *layer.parameters()), y.detach())

    compare(*(lambda layer=layer: step(layer) for layer in layers(PROBLEM, dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_so_does_a_call_with_weights_that_are_computed_for_it(dtype):
    p = DECODER
    x, w, _ = operands(p, dtype, "cuda")
    norms = torch.ones(p.in_channels, 1, 1, device="cuda", dtype=dtype)

    def call(function):
        return function(x, torch._weight_norm(w, norms), None, p.stride, p.padding)

    with torch.no_grad():
        functions = numba_tconv.conv_transpose1d, torch.conv_transpose1d
        compare(*(lambda function=function: call(function) for function in functions))
