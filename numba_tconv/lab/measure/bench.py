"""Rungs, torch's op, conv1d and a device copy take turns (timing.py) and are checked.

The copy's bandwidth gives the roofline. Results start as NaN; a wrong one gives no row.
"""

import math

import torch

from numba_tconv.formula.precision import PRECISIONS, TF32_ALLOWED, peak_name
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.packed_weights import FrozenWeights
from numba_tconv.selection.directions import FORWARD, STEP, results_of, rungs_of

from . import expert, machine
from .accuracy import Error, errors, right
from .contestants import AUTO, CUDNN, rungs_for
from .directions import Operands, by_autograd, by_selection, by_torch, costs_of, our_forward, torch_forward
from .rows import CALL, FROZEN, Row
from .timing import FLUSHES, Contestant, interleave, quantile
from .workloads import Workload

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in PRECISIONS}
CONV1D = "conv1d"
PEAKS_KNOWN = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")  # others get no roofline

# Python queues steps more slowly.
FLUSHES_OF = {STEP: 4 * FLUSHES}
COPY_BYTES = 2 << 30


class WrongResult(Exception):
    """Holds right contestants' ``rows``."""

    def __init__(self, message: str, rows: list[Row]):
        super().__init__(message)
        self.rows = rows


def torch_switches(tf32: bool, search: bool = True):
    """A context in which cuDNN computes with or without TF32, by default searching its algorithms."""
    return torch.backends.cudnn.flags(enabled=True, benchmark=search, allow_tf32=tf32)


def make_inputs(workload: Workload, dtype: torch.dtype, device: str, seed: int = 0):
    """Random x (N, C_in, L), weight (C_in, C_out/groups, K), for outputs near 1, and bias (C_out,) or None."""
    p = workload.problem
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    terms = max(1, p.in_channels_per_group * p.kernel_size // p.stride)
    filters = 1 if workload.expanded_weight else p.in_channels
    weight = normal(filters, p.out_channels_per_group, p.kernel_size) / math.sqrt(terms)
    return (
        normal(*p.in_shape),
        weight.expand(p.in_channels, -1, -1),
        normal(p.out_channels) if p.bias else None,
    )


def make_operands(workload: Workload, dtype: torch.dtype, device: str, gradients: bool) -> Operands:
    """``gradients``: with a random grad_output (N, C_out, L_out)."""
    inputs = Operands(*make_inputs(workload, dtype, device))
    if not gradients:
        return inputs
    generator = torch.Generator(device).manual_seed(1)
    grad_output = torch.randn(workload.problem.out_shape, generator=generator, device=device)
    return inputs._replace(grad_output=grad_output.to(dtype))


def measure(
    workload: Workload,
    rungs: list[str],
    dtype: torch.dtype = torch.float32,
    precision: str = "ieee",
    direction: str = FORWARD,
    *,
    weights: str = CALL,
    repeats: int = 30,
    budget_s: float = 1.0,
) -> list[Row]:
    """Rows of ``rungs`` (names for ``rungs_for``) on ``workload``, from one interleaved run on torch's current GPU.

    Args:
        precision: of float32, torch's too ("ieee" beside our "tf32x3"); in "tf32" ``auto`` follows torch's switch.
        weights: "call" packs them in the timed call; "frozen" before it (forward pass only).
        repeats: timed rounds.
        budget_s: GPU seconds of each contestant.

    Raises:
        WrongResult: a result is wrong.
        ValueError: ``weights`` and ``direction`` exclude each other.
    """
    check_weights(weights, direction)
    p, peak = workload.problem, peak_name(dtype, precision)
    names, _ = rungs_for(rungs, p, dtype, precision, direction=direction)
    title = f"{workload.name} {peak}" if direction == FORWARD else f"{workload.name} {direction} {peak}"
    with torch_switches(tf32=precision == "tf32"), torch.no_grad():
        operands = make_operands(workload, dtype, "cuda", gradients=direction != FORWARD)
        given = operands if weights == CALL else operands._replace(weight=FrozenWeights(operands.weight).tensor)
        ours = {name: _ours(name, direction, given, p, peak) for name in names if name != CUDNN}
        everyone = ours | _theirs(direction, operands, p)
        copy = _copy()
        flushes = FLUSHES_OF.get(direction, FLUSHES)
        interleave([*everyone.values(), copy], repeats, budget_s, title, flushes)
        found = {
            result: errors({name: one.output[result] for name, one in everyone.items()}, operands, p, result)
            for result in results_of(direction, p)
        }

        wrong = {name: said for name in names if (said := _wrong(name, found, operands, precision, p))}

    times = {name: contestant.times() for name, contestant in everyone.items()}
    bandwidth = 2 * copy.output.nbytes / (1e-3 * quantile(copy.times(), 0.5))
    kept = [name for name in names if name not in wrong]
    rows = _rows(kept, workload, dtype, precision, direction, weights, times, found, bandwidth)
    if wrong:
        said = "; ".join(line for lines in wrong.values() for line in lines)
        raise WrongResult(f"wrong on {title}: {said}; no row of it is kept", rows)
    return rows


def check_weights(weights: str, direction: str) -> None:
    if weights == FROZEN and direction != FORWARD:
        raise ValueError(f"frozen weights are for the forward pass, not for {direction}: training changes them")


def _wrong(name: str, found: dict[str, dict[str, Error]], operands: Operands, precision: str, p: Problem) -> list[str]:
    return [
        f"{name} ({f'{result}: ' if len(found) > 1 else ''}{error}; torch's own {of[CUDNN]})"
        for result, of in found.items()
        if not right(result, error := of[name], of[CUDNN], operands, precision, p)
    ]


def _ours(name: str, direction: str, operands: Operands, p: Problem, precision: str) -> Contestant:
    asked = TF32_ALLOWED if precision == "tf32" else precision
    shapes = [p.shape_of(result) for result in results_of(direction, p)]

    def poison():
        return [torch.full(shape, math.nan, dtype=operands.x.dtype, device=operands.x.device) for shape in shapes]

    def step():
        return by_autograd(lambda *inputs: our_forward(*inputs, p, asked), operands, p)

    def selected():
        return {direction: by_selection(direction, operands, p, asked)}

    if name == AUTO:
        return Contestant(step if direction == STEP else selected, prepare=poison)
    rung, (result,) = rungs_of(direction)[name], poison()

    def call():
        rung.run(*operands.of(direction), result, p, precision=precision)
        return {direction: result}

    return Contestant(call, prepare=lambda: result.fill_(math.nan))


def _theirs(direction: str, operands: Operands, p: Problem) -> dict[str, Contestant]:
    if direction == STEP:
        return {CUDNN: Contestant(lambda: by_autograd(lambda *inputs: torch_forward(*inputs, p), operands, p))}
    contestants = {CUDNN: Contestant(lambda: {direction: by_torch(direction, operands, p)})}
    if direction == FORWARD and expert.applies(p):
        packed, packed_bias = expert.pack(operands.weight, p), expert.pack_bias(operands.bias, p)
        contestants[CONV1D] = Contestant(lambda: {FORWARD: expert.run(operands.x, packed, packed_bias, p)})
    return contestants


def _rows(
    names: list[str],
    workload: Workload,
    dtype: torch.dtype,
    precision: str,
    direction: str,
    weights: str,
    times: dict[str, list[float]],
    found: dict[str, dict[str, Error]],
    bandwidth: float,
) -> list[Row]:
    """``bandwidth``: the copy's, in bytes/s."""
    costs, itemsize, peak = costs_of(direction, workload.problem), dtype.itemsize, peak_name(dtype, precision)
    where, dtype_name = machine.measured(), str(dtype).removeprefix("torch.")
    known = where["gpu"] in PEAKS_KNOWN
    floor = sum(cost.floor_ms(itemsize, peak, bandwidth) for cost in costs) if known else None
    min_bytes, flops = sum(cost.min_bytes(itemsize) for cost in costs), sum(cost.flops for cost in costs)

    def error(name):
        return max(of[name].norm for of in found.values())

    common = dict(
        **where,
        workload=workload.name,
        direction=direction,
        dtype=dtype_name,
        precision=precision if len(PRECISIONS[dtype]) > 1 else dtype_name,
        length=workload.problem.length,
        cudnn_ms_p50=quantile(times[CUDNN], 0.5),
        conv1d_ms_p50=quantile(times[CONV1D], 0.5) if CONV1D in times else None,
        cudnn_relerr=error(CUDNN),
    )
    rows = []
    for name in names:
        p20, p50, p80 = (quantile(times[name], share) for share in (0.2, 0.5, 0.8))
        rates = dict(gbps=min_bytes / p50 / 1e6, tflops=flops / p50 / 1e9)
        share = None if floor is None else floor / p50
        quantiles = dict(ms_p20=p20, ms_p50=p50, ms_p80=p80)
        own = dict(rung=name, weights=CALL if name == CUDNN else weights, roofline=share, relerr=error(name))
        rows.append(Row(**common, **quantiles, **rates, **own))
    return rows


def _copy() -> Contestant:
    size = min(COPY_BYTES, torch.cuda.mem_get_info()[0] // 8)
    source, target = torch.ones(size // 4, device="cuda"), torch.empty(size // 4, device="cuda")
    return Contestant(lambda: target.copy_(source))
