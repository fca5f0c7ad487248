"""Entries for KernelBench, level 1, and their run under its rules.

The benchmark looks for ``ModelNew`` in a source file:

    from numba_tconv.lab.studies.kernelbench import ModelNew64 as ModelNew
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from numba_tconv.lab.measure import machine, rows
from numba_tconv.lab.measure.accuracy import Error, errors
from numba_tconv.lab.measure.directions import Operands
from numba_tconv.lab.measure.workloads import get
from numba_tconv.lab.report import tables as table
from numba_tconv.torch_api.module import ConvTranspose1d

FILE = Path("kernelbench", "level1.csv")
HEADER = ["problem", "allclose 1e-4", "our error", "torch's error", "our ms", "torch's ms", "speed-up"]
CORRECTNESS_TRIALS = 5
TIMED_TRIALS = 100
TOLERANCE = 1e-4  # the benchmark's atol and rtol for float32
SEED = 42
FLUSH_BYTES = 256 << 20


class _Model(torch.nn.Module):
    def __init__(self, *arguments, **choices):
        super().__init__()
        self.conv1d_transpose = ConvTranspose1d(*arguments, **choices)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv1d_transpose(x)


class ModelNew64(_Model):
    """Problem 64. A seed gives the weights of the benchmark's ``Model``."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        output_padding: int = 0,
        groups: int = 1,
        bias: bool = False,
    ):
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias)


class ModelNew74(_Model):
    """Problem 74: dilated. Seeds as in ModelNew64."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        bias: bool = False,
    ):
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, bias=bias, dilation=dilation)


class ModelNew79(ModelNew74):
    """Problem 79: dilated, padded and strided."""


@dataclass(frozen=True)
class Entry:
    model: type[torch.nn.Module]
    arguments: tuple
    workload: str


ENTRIES = {
    64: Entry(ModelNew64, (128, 128, 3), "kb64"),
    74: Entry(ModelNew74, (32, 64, 5, 1, 0, 3), "kb74"),
    79: Entry(ModelNew79, (32, 64, 3, 2, 1, 2), "kb79"),
}


@dataclass(frozen=True)
class Result(machine.Measured):
    """Mean ms with torch's default switches; ``passed`` of ``trials`` outputs allclose to torch's.

    Errors are the trials' largest; NaN for an output of another shape.
    """

    problem: int
    weights: str
    ms_mean: float
    torch_ms_mean: float
    trials: int
    passed: int
    relerr: float
    torch_relerr: float
    largest_error: float
    torch_largest_error: float

    @property
    def accepted(self) -> bool:
        return self.passed == self.trials

    @property
    def torch_is_the_inexact_side(self) -> bool:
        return self.relerr < self.torch_relerr

    @property
    def right(self) -> bool:
        of_torch = Error(self.torch_relerr, self.torch_largest_error)
        return Error(self.relerr, self.largest_error).within(of_torch, torch.float32, "tf32", terms=1)


def torch_model(number: int) -> torch.nn.Module:
    p = get(ENTRIES[number].workload).problem
    return torch.nn.ConvTranspose1d(
        *(p.in_channels, p.out_channels, p.kernel_size, p.stride, p.padding, p.output_padding, p.groups, p.bias),
        dilation=p.dilation,
    )


def run(number: int) -> Result:
    """Judge and time a problem on the GPU, with torch's switches as they are."""
    entry = ENTRIES[number]
    p = get(entry.workload).problem
    torch.manual_seed(SEED)
    theirs = torch_model(number).cuda()
    torch.manual_seed(SEED)
    ours = entry.model(*entry.arguments).cuda()
    passed, found = 0, []
    with torch.no_grad():
        for trial in range(CORRECTNESS_TRIALS):
            torch.manual_seed(SEED + trial)
            x = torch.rand(p.in_shape, device="cuda")
            expected, y = theirs(x), ours(x)
            if y.shape != expected.shape:
                y = torch.full_like(expected, math.nan)
            passed += torch.allclose(expected, y, atol=TOLERANCE, rtol=TOLERANCE)
            found.append(errors({"ours": y, "torch": expected}, Operands(x, theirs.weight, None), p))
        torch_ms, ms = mean_ms(theirs, x), mean_ms(ours, x)
    error, torch_error = largest(found, "ours"), largest(found, "torch")
    return Result(
        **machine.measured(),
        problem=number,
        weights=rows.CALL,
        ms_mean=ms,
        torch_ms_mean=torch_ms,
        trials=CORRECTNESS_TRIALS,
        passed=passed,
        relerr=error.norm,
        torch_relerr=torch_error.norm,
        largest_error=error.largest,
        torch_largest_error=torch_error.largest,
    )


def mean_ms(model: torch.nn.Module, x: torch.Tensor) -> float:
    flush = torch.empty(FLUSH_BYTES // 8, dtype=torch.int64, device="cuda")
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        model(x)
    total = 0.0
    for _ in range(TIMED_TRIALS):
        flush.fill_(42)
        torch.cuda.synchronize()
        start.record()
        model(x)
        stop.record()
        torch.cuda.synchronize()
        total += start.elapsed_time(stop)
    return total / TIMED_TRIALS


def largest(found: list[dict[str, Error]], name: str) -> Error:
    """The trials' largest; NaN if one is NaN."""
    measures = [(trial[name].norm, trial[name].largest) for trial in found]
    return Error(*torch.tensor(measures, dtype=torch.float64).amax(0).tolist())


def markdown(results: Iterable[Result]) -> str:
    return table.markdown(HEADER, [_cells(result) for result in results])


def render(results: Iterable[Result]) -> str:
    newest = sorted(rows.newest(results, lambda row: (row.gpu, row.problem)).values(), key=lambda row: row.problem)
    tables = sorted(rows.grouped(newest, lambda row: row.gpu).items())
    said = f"milliseconds (mean of {TIMED_TRIALS} calls)"
    parts = [
        f"**KernelBench level 1**, {said}, {table.where(some)} {table.note(some)}".rstrip() + f"\n\n{markdown(some)}"
        for _, some in tables
    ]
    return "\n\n".join(parts) or table.EMPTY


def _cells(result: Result) -> list:
    errors = f"{result.relerr:.1e}", f"{result.torch_relerr:.1e}"
    mark = table.MARK * (result.weights == rows.FROZEN)
    times = f"{result.ms_mean:.3g}{mark}", f"{result.torch_ms_mean:.3g}"
    speedup = f"{result.torch_ms_mean / result.ms_mean:.2f}x"
    return [result.problem, f"{result.passed} of {result.trials}", *errors, *times, speedup]
