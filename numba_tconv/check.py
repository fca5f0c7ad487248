"""Parity of one problem: every rung against float64, beside torch's own error and the scatter reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from . import bench
from .kernels import RUNGS
from .kernels.device import current_device
from .problem import Problem
from .ptx import SIMULATOR
from .workloads import Workload

# The simulator runs some ten thousand products a second, the reference a few hundred thousand.
SIMULATOR_PRODUCTS = 100_000
REFERENCE_PRODUCTS = 500_000
REFERENCE_TOLERANCE = 1e-12

SMALL = (
    Problem(2, 4, 6, 5, 23, stride=3, padding=2, output_padding=1, groups=2, dilation=2, bias=True),
    Problem(1, 3, 5, 3, 40),
    Problem(1, 2, 4, 16, 12, stride=8, padding=4),
)


@dataclass(frozen=True)
class Outcome:
    """What came out for one way to compute a problem. ``error`` is None where it cannot; ``note`` then says why."""

    name: str
    error: bench.Error | None
    right: bool
    note: str = ""

    def cells(self) -> list[str]:
        if self.error is None:
            return [self.name, "-", "-", self.note]
        verdict = "right" if self.right else "WRONG"
        return [self.name, f"{self.error.norm:.2e}", f"{self.error.largest:.2e}", self.note or verdict]


def where() -> str:
    """In words, what computes the rungs: the GPU's name, or the simulator."""
    return "in the CUDA simulator" if SIMULATOR else f"on {torch.cuda.get_device_name()}"


def require_simulable(problem: Problem) -> None:
    """Raise ValueError for a problem that would keep the simulator busy for minutes."""
    products = problem.flops // 2
    if products > SIMULATOR_PRODUCTS:
        raise ValueError(
            f"{problem} has {products:,} products, and the CUDA simulator, used where there is no GPU, takes problems "
            f"of at most {SIMULATOR_PRODUCTS:,}"
        )


def parity(problem: Problem, dtype: torch.dtype, precision: str) -> Iterator[Outcome]:
    """Compute ``problem`` on random data by the reference, by torch and by every rung, one outcome after the other.

    On the GPU, or in the CUDA simulator where that is on. Right is: at most twice torch's own error in the same
    precision (see bench.Error.within), with the output's memory full of NaN before.
    """
    device, peak = "cpu" if SIMULATOR else "cuda", bench.peak_name(dtype, precision)
    inputs = bench.make_inputs(Workload("", problem, "", ""), dtype, device)
    x, weight, bias = inputs

    def error(y):
        return bench.errors({"": y}, x, weight, bias, problem)[""]

    with bench.torch_switches(tf32=precision == "tf32"), torch.no_grad():
        if problem.flops // 2 <= REFERENCE_PRODUCTS:
            yield _by_reference(inputs, problem, error)
        of_torch = error(bench.torch_result(x, weight, bias, problem))
        yield Outcome("torch", of_torch, True, "the measure")
        for name, rung in RUNGS.items():
            if reason := rung.refusal(problem, dtype, peak, current_device()):
                yield Outcome(name, None, True, f"cannot do it: {reason}")
                continue
            shape = (problem.batch, problem.out_channels, problem.out_length)
            y = torch.full(shape, math.nan, dtype=dtype, device=device)
            rung.run(x, weight, bias, y, problem, precision=peak)
            found = error(y)
            yield Outcome(name, found, found.within(of_torch, dtype, precision, problem))


def _by_reference(inputs, p: Problem, error) -> Outcome:
    """The plain loops of ``reference``, which stands beside this package in its repository and is not installed."""
    try:
        from reference import conv_transpose1d
    except ImportError:
        return Outcome("scatter loops", None, True, "only in a checkout of the repository")
    x, weight, bias = (None if tensor is None else tensor.double().cpu().numpy() for tensor in inputs)
    y = conv_transpose1d(x, weight, bias, p.stride, p.padding, p.output_padding, p.groups, p.dilation)
    found = error(torch.from_numpy(y).to(inputs[0].device))
    return Outcome("scatter loops", found, found.norm <= REFERENCE_TOLERANCE)
