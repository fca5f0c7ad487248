"""One problem by every rung, against float64."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.device import current_device
from numba_tconv.selection.directions import FORWARD, RESULTS, rungs_of

from . import bench
from .accuracy import Error, errors, in_float64, right
from .directions import Operands, by_torch
from .mismatch import Mismatch, mismatch
from .workloads import Workload

# Products; some seconds each.
SIMULATOR_PRODUCTS = 100_000
REFERENCE_PRODUCTS = 500_000
REFERENCE_TOLERANCE = 1e-12

# Phases without taps, dilation; more than SUM_CHANNELS output, then input channels.
SMALL = (
    Problem(2, 4, 6, 5, 15, stride=6, padding=2, output_padding=1, groups=2, dilation=4, bias=True),
    Problem(1, 3, 70, 3, 20),
    Problem(1, 70, 2, 16, 4, stride=8, padding=4),
)


@dataclass(frozen=True)
class Outcome:
    """``error`` None: not computed, as ``note`` says. ``where``: of a wrong forward output."""

    name: str
    error: Error | None
    right: bool
    note: str = ""
    where: Mismatch | None = None

    def cells(self) -> list[str]:
        if self.error is None:
            return [self.name, "-", "-", self.note]
        verdict = "right" if self.right else "WRONG"
        return [self.name, f"{self.error.norm:.2e}", f"{self.error.largest:.2e}", self.note or verdict]


def where() -> str:
    return "in the CUDA simulator" if SIMULATOR else f"on {torch.cuda.get_device_name()}"


def require_checkable(problem: Problem) -> None:
    if not math.prod(problem.out_shape):
        raise ValueError(f"{problem} has no outputs, so there is nothing to check")


def require_simulable(problem: Problem) -> None:
    products = problem.flops // 2
    if products > SIMULATOR_PRODUCTS:
        raise ValueError(
            f"{problem} has {products:,} products, and the CUDA simulator, used where there is no GPU, takes problems "
            f"of at most {SIMULATOR_PRODUCTS:,}"
        )


def steps() -> int:
    return sum(2 + len(rungs_of(result)) for result in RESULTS)


def parity(problem: Problem, dtype: torch.dtype, precision: str) -> Iterator[tuple[str, Outcome]]:
    """Yield names and outcomes: the reference's, torch's and every rung's."""
    device = "cpu" if SIMULATOR else "cuda"
    operands = bench.make_operands(Workload("", problem, "", ""), dtype, device, gradients=True)
    with bench.torch_switches(tf32=precision == "tf32"), torch.no_grad():
        for result in RESULTS:
            for outcome in _parity(result, operands, problem, precision):
                yield result, outcome


def _parity(result: str, operands: Operands, p: Problem, precision: str) -> Iterator[Outcome]:
    dtype, device = operands.x.dtype, operands.x.device
    peak = bench.peak_name(dtype, precision)

    def error(values):
        return errors({"": values}, operands, p, result)[""]

    if p.flops // 2 <= REFERENCE_PRODUCTS:
        yield _by_reference(result, operands, p, error)
    of_torch = error(by_torch(result, operands, p))
    yield Outcome("torch", of_torch, True, "the measure")
    for name, rung in rungs_of(result).items():
        if reason := rung.refusal(p, dtype, peak, current_device()):
            yield Outcome(name, None, True, f"cannot do it: {reason}")
            continue
        values = torch.full(p.shape_of(result), math.nan, dtype=dtype, device=device)
        rung.run(*operands.of(result), values, p, precision=peak)
        found = error(values)
        is_right, where = right(result, found, of_torch, operands, precision, p), None
        if result == FORWARD and not is_right:
            truth = torch.cat([piece for _, piece in in_float64(result, operands, p)])
            where = mismatch(values, truth, p, max(2 * of_torch.largest, torch.finfo(dtype).eps))
        yield Outcome(name, found, is_right, where=where)


def _by_reference(result: str, operands: Operands, p: Problem, error) -> Outcome:
    """``reference`` may not be installed."""
    try:
        import reference
    except ImportError:
        return Outcome("scatter loops", None, True, "only in a checkout of the repository")
    arrays = (None if tensor is None else tensor.double().cpu().numpy() for tensor in operands.of(result))
    sizes = dict(stride=p.stride, padding=p.padding, groups=p.groups, dilation=p.dilation)
    compute, parameters = {
        FORWARD: (reference.conv_transpose1d, dict(output_padding=p.output_padding) | sizes),
        "grad_input": (reference.grad_input, dict(length=p.length) | sizes),
        "grad_weight": (reference.grad_weight, dict(kernel_size=p.kernel_size) | sizes),
        "grad_bias": (reference.grad_bias, {}),
    }[result]
    found = error(torch.from_numpy(compute(*arrays, **parameters)).to(operands.x.device))
    return Outcome("scatter loops", found, found.norm <= REFERENCE_TOLERANCE)
