"""Parity: the small problems, the memory layouts, the oracle, and the verdict, for simulator, GPU and mutant tests."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

import reference
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure import accuracy
from numba_tconv.torch_api import torchs

from .fences import Fenced

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# TF32's cost in norm and in the largest element, from rounding both operands to 11 bits. Few elements may all be moved
# by more, a product by up to 2**-10.
TF32_LIMITS, FEW_ELEMENTS, FEW_ELEMENTS_FACTOR = (4e-4, 6e-4), 1000, 2.5
FEW_VALUES = 4  # errors of fewer values do not average out


def _problem(batch, channels, kernel_size, length, **parameters):
    return Problem(batch, *channels, kernel_size, length, **parameters)


# Reason and problem, small enough for the simulator.
SMALL = {
    "one element": _problem(1, (1, 1), 1, 1),
    "one input sample, all taps": _problem(4, (2, 3), 5, 1, stride=2, bias=True),
    "stride 1": _problem(2, (3, 4), 3, 10, bias=True),
    "stride 1, dilation": _problem(1, (2, 3), 5, 12, dilation=3),
    "K = 2s, the usual decoder layer": _problem(2, (4, 2), 8, 6, stride=4, padding=2, bias=True),
    "K not a multiple of the stride": _problem(1, (3, 2), 5, 9, stride=2, padding=1),
    "K = s, patches that do not overlap": _problem(1, (2, 2), 3, 6, stride=3),
    "K < s, phases without taps": _problem(1, (2, 2), 2, 6, stride=5, padding=1, bias=True),
    "K = 1, nearly all outputs are bias": _problem(1, (2, 2), 1, 5, stride=4, bias=True),
    "output_padding at its limit, set by stride": _problem(1, (2, 2), 3, 5, stride=4, output_padding=3, bias=True),
    "output_padding at its limit, set by dilation": _problem(1, (2, 2), 3, 6, stride=2, dilation=5, output_padding=4),
    "output_padding and padding": _problem(2, (2, 3), 4, 6, stride=3, padding=2, output_padding=1),
    "dilation above stride, coprime": _problem(1, (3, 2), 4, 9, stride=2, dilation=3, padding=1, bias=True),
    "dilation below stride, coprime": _problem(1, (2, 3), 4, 7, stride=5, dilation=3, padding=2),
    "dilation = stride, every tap in one phase": _problem(1, (2, 2), 3, 7, stride=2, dilation=2, padding=1, bias=True),
    "gcd(stride, dilation) = 2, three rows": _problem(1, (2, 2), 4, 6, stride=6, dilation=4, padding=3, bias=True),
    "gcd 2, dilation above stride": _problem(1, (2, 2), 3, 8, stride=4, dilation=6, output_padding=5, padding=1),
    "stride 16": _problem(1, (2, 1), 16, 3, stride=16, padding=8),
    "padding larger than the kernel": _problem(1, (2, 2), 3, 11, padding=4, bias=True),
    "padding larger than the kernel, strided": _problem(1, (2, 2), 4, 9, stride=3, padding=7, output_padding=2),
    "one output sample left": _problem(2, (3, 3), 3, 6, stride=2, padding=6),
    "groups, unequal channels": _problem(2, (4, 6), 4, 6, stride=2, padding=1, groups=2, bias=True),
    "depthwise": _problem(1, (5, 5), 4, 9, stride=2, padding=1, groups=5, bias=True),
    "depthwise, two outputs a channel": _problem(1, (3, 6), 3, 6, stride=2, groups=3),
    "one output channel": _problem(1, (9, 1), 8, 6, stride=4, padding=2),
    "one input channel": _problem(1, (1, 9), 5, 7, stride=2, padding=2, bias=True),
    "channels past one tile": _problem(2, (5, 9), 3, 6, padding=1, bias=True),
    "positions past one tile": _problem(2, (3, 2), 3, 21, padding=1, bias=True),
    "positions past one tile, strided": _problem(2, (2, 3), 4, 17, stride=2, padding=1, bias=True),
    "many samples, short": _problem(11, (2, 2), 3, 2, stride=2, padding=1, bias=True),
    "more channels than are summed at once": _problem(3, (70, 3), 1, 20, bias=True),
    "a window longer than the input": _problem(1, (2, 3), 9, 3, dilation=2, padding=3, bias=True),
}

# Ends that no call with an int for padding crops so (formula/padding.py).
CROPPED = {
    "causal": _problem(2, (3, 2), 8, 5, stride=4, output_padding=-4, bias=True),
    "causal, depthwise": _problem(2, (3, 3), 8, 5, stride=4, output_padding=-4, groups=3, bias=True),
    "causal, stride 1, dilation": _problem(2, (2, 3), 3, 9, output_padding=-4, dilation=2),
    "same, odd": _problem(2, (3, 2), 7, 5, stride=4, padding=1, output_padding=-1, bias=True),
    "cropped on the left alone": _problem(2, (3, 2), 8, 5, stride=4, padding=7, output_padding=7, bias=True),
    "cropped on the left, added on the right": _problem(
        1, (2, 2), 4, 5, stride=3, padding=5, output_padding=7, bias=True
    ),
    "cropped on the right to one output": _problem(1, (2, 2), 5, 4, stride=2, padding=1, output_padding=-8, bias=True),
}


def _contiguous(tensor):
    return tensor


def _transposed(tensor):
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _every_second(tensor):
    spread = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), math.nan)
    spread[..., ::2] = tensor
    return spread[..., ::2]


def _expanded(tensor):
    """Stride 0 in dimensions 0 and 1: one repeated row without memory beyond."""
    return tensor[:1, :1].clone().expand_as(tensor)


def _misaligned(tensor):
    """One element past an aligned address: no vector load may start at the tensor."""
    storage = tensor.new_full((tensor.numel() + 1,), math.nan)
    storage[1:] = tensor.flatten()
    return storage[1:].view(tensor.shape)


# Memory layouts of input and weight.
LAYOUTS = {f.__name__[1:]: f for f in (_contiguous, _transposed, _every_second, _expanded, _misaligned)}


def far_apart(tensor):
    """The same values with samples 2**31 elements apart: 32-bit indices read elsewhere."""
    size = 2**31 * (tensor.shape[0] - 1) + tensor[0].numel()
    if tensor.device.type == "cpu":  # NumPy's zeros take no memory until touched
        storage = torch.from_numpy(np.zeros(size * tensor.itemsize, dtype=np.uint8)).view(tensor.dtype)
    else:
        storage = tensor.new_zeros(size)
    return storage.as_strided(tensor.shape, (2**31, *tensor[0].contiguous().stride())).copy_(tensor)


def operands(problem, dtype, device="cpu", layout="contiguous"):
    p = problem
    arrange = LAYOUTS[layout]
    x = arrange(torch.randn(p.in_shape, device=device).to(dtype))
    w = arrange(torch.randn(p.weight_shape, device=device).to(dtype))
    return x, w, torch.randn(p.out_channels, device=device).to(dtype) if p.bias else None


def poisoned(problem, dtype, device="cpu"):
    return torch.full(problem.out_shape, math.nan, dtype=dtype, device=device)


def computed(rung, x, w, bias, problem, config=None, precision=None):
    """The rung's output, in memory full of NaN."""
    y = poisoned(problem, x.dtype, x.device)
    rung.run(x, w, bias, y, problem, config, precision)
    return y


def parameters(problem):
    p = problem
    return {
        "stride": p.stride,
        "padding": p.padding,
        "output_padding": p.output_padding,
        "groups": p.groups,
        "dilation": p.dilation,
    }


def terms(problem) -> int:
    """Products in the longest sum of one output."""
    return problem.terms()


def scatter(x, w, bias, problem):
    arrays = (None if t is None else t.double().numpy() for t in (x, w, bias))
    return torch.from_numpy(reference.conv_transpose1d(*arrays, **parameters(problem)))


def answers(x, w, bias, problem):
    """torch's result and the reference's, on the CPU: for ``verdict``."""
    return torchs.forward(x, w, bias, **parameters(problem)), scatter(x, w, bias, problem)


def check_configs(rung, problem, dtype, configs, layout="contiguous", place=lambda x: x):
    """Each configuration of the rung computes the problem on the CPU; ``place`` moves the input."""
    assert configs
    x, w, bias = operands(problem, dtype, layout=layout)
    right = answers(x, w, bias, problem)
    for config in configs:
        assert verdict(computed(rung, place(x), w, bias, problem, config), *right) is None, config


def shifted(tensor, by):
    """A copy that begins ``by`` elements after a multiple of 16 bytes."""
    return torch.cat([tensor.new_zeros(by), tensor.flatten()])[by:].view(tensor.shape)


def check_places(rung, problem, dtype, configs, places, layout="contiguous"):
    """As ``check_configs``, of an input and an output that begin so many elements after a multiple of 16 bytes."""
    x, w, bias = operands(problem, dtype, layout=layout)
    right = answers(x, w, bias, problem)
    for config in configs:
        for x_place, y_place in places:
            y = Fenced(poisoned(problem, dtype), y_place)
            rung.run(shifted(x, x_place) if x_place else x, w, bias, y.tensor, problem, config)
            assert verdict(y.tensor, *right, terms(problem)) is None, (config, x_place, y_place)
            assert y.is_fence_whole()


def check_nan(rung, problem, dtype, configs, place):
    """A NaN at ``place`` of the input reaches only the outputs that the definition sends it to."""
    x, w, bias = operands(problem, dtype)
    x[place] = math.nan
    oracle = scatter(x, w, bias, problem)
    for config in configs:
        assert torch.equal(computed(rung, x, w, bias, problem, config).isnan(), oracle.isnan()), (config, place)


def misstated(problem, **wrong):
    """The problem with some of its values changed and its output length kept."""
    changed = copy.copy(problem)
    changed.__dict__.update(wrong)
    object.__setattr__(changed, "__class__", type("Misstated", (Problem,), {"out_length": problem.out_length}))
    return changed


@dataclass(frozen=True)
class Error:
    """Distance from the oracle: relative norm, and largest element against the oracle's largest."""

    norm: float
    largest: float


def error(result, oracle) -> Error:
    """The error; infinite where shapes differ or anything is not finite."""
    if result.shape != oracle.shape or not result.isfinite().all():
        return Error(math.inf, math.inf)
    difference = result.double() - oracle
    scales = oracle.norm().item(), oracle.abs().max().item()
    distances = difference.norm().item(), difference.abs().max().item()
    return Error(*(d / s if s else (math.inf if d else 0.0) for d, s in zip(distances, scales, strict=True)))


def verdict(
    result,
    torchs,
    oracle,
    terms: int = 1,
    precision: str | None = None,
    rounding: Callable[[], accuracy.Error] | None = None,
) -> str | None:
    """None if ``result`` is as good as torch's, else what is wrong with it.

    Norm error and largest error may each be twice torch's in the same dtype and precision. As torch's own error can be
    tiny by luck, the norm may be off by eps, one rounding of the oracle, and an element by 2 eps of the largest, one
    rounding of the sum and one of a partial sum. Where all elements are a few values, their norm may be as wrong as
    one. The float64 oracle is itself a sum of ``terms`` rounded products; two such sums differ by about eps *
    sqrt(terms).

    In ``precision`` "tf32" torch may use TF32 or not; if not, TF32_LIMITS count. Beyond them, a result may be as far
    away as ``rounding`` allows.
    """
    eps = torch.finfo(result.dtype).eps * (math.sqrt(terms) if result.dtype == torch.float64 else 1)
    ours, theirs = error(result, oracle), error(torchs, oracle)
    floors = (eps, 2 * eps)
    if precision == "tf32":
        floors = (limit * (FEW_ELEMENTS_FACTOR if result.numel() < FEW_ELEMENTS else 1) for limit in TF32_LIMITS)
    for name, floor in zip(("norm", "largest"), floors, strict=True):
        limit = max(2 * getattr(theirs, name), floor)
        if getattr(ours, name) > limit and oracle.numel() < FEW_ELEMENTS and oracle.unique().numel() <= FEW_VALUES:
            limit = max(limit, 2 * eps)
        if not getattr(ours, name) <= limit and rounding is not None:
            limit = max(limit, getattr(rounding(), name))
        if not getattr(ours, name) <= limit:
            return f"{name} error {getattr(ours, name):.3g} exceeds {limit:.3g} (torch: {getattr(theirs, name):.3g})"
    return None
