"""Measurement: our kernels, torch's own op and the conv1d formulation, interleaved in one run and checked.

Every call is timed with CUDA events, after the cache was flushed. The events are queued behind that flush, so what is
timed is the work of the GPU; the time that Python takes to launch it is hidden as long as it is below the flush's.
All contestants take turns, so a change of clocks or temperature meets them alike, and so does the copy that gives the
bandwidth for the roofline.

What is timed is also what is checked: before each timed call of ours the output's memory is filled with NaN, and the
output of the last timed call is compared with a float64 result, every element. No row comes of a wrong output.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

import torch
from torch.nn.functional import conv_transpose1d as torch_conv_transpose1d

from . import expert, machine
from .functional import PRECISIONS, conv_transpose1d
from .kernels import RUNGS
from .kernels.device import Device, current_device
from .problem import Problem
from .progress import progress
from .rows import Row
from .workloads import Workload

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in PRECISIONS}
AUTO, CUDNN, CONV1D = "auto", "cudnn", "conv1d"

WARMUP_CALLS = 2
FEWEST_REPEATS = 5
FLUSHES = 4
COPY_BYTES = 2 << 30
ORACLE_ELEMENTS = 1 << 27  # float64 outputs held at once, 1 GiB
NO_TF32 = 1e-5  # relative norms: below, torch has not computed in TF32, which rounds operands to 11 bits


class WrongResult(Exception):
    """An output that was timed is wrong. ``rows`` are the rows of the contestants that were right."""

    def __init__(self, message: str, rows: list[Row]):
        super().__init__(message)
        self.rows = rows


def peak_name(dtype: torch.dtype, precision: str) -> str:
    """The name of the arithmetic: ``precision`` where the dtype leaves a choice, else its only one."""
    return precision if len(PRECISIONS[dtype]) > 1 else PRECISIONS[dtype][0]


@contextlib.contextmanager
def torch_switches(tf32: bool) -> Iterator[None]:
    """cuDNN searches for its fastest algorithm, with or without TF32; both switches are put back afterwards."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.allow_tf32
    cudnn.benchmark, cudnn.allow_tf32 = True, tf32
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32 = before


def make_inputs(workload: Workload, dtype: torch.dtype, device: str, seed: int = 0):
    """Random x (N, C_in, L), weight (C_in, C_out/groups, K), scaled for outputs near 1, and bias (C_out,) or None."""
    p = workload.problem
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    terms = max(1, p.in_channels_per_group * p.kernel_size // p.stride)
    filters = 1 if workload.expanded_weight else p.in_channels
    weight = normal(filters, p.out_channels_per_group, p.kernel_size) / math.sqrt(terms)
    return (
        normal(p.batch, p.in_channels, p.length),
        weight.expand(p.in_channels, -1, -1),
        normal(p.out_channels) if p.bias else None,
    )


def torch_result(x, weight, bias, p: Problem) -> torch.Tensor:
    """torch's own transposed convolution."""
    return torch_conv_transpose1d(x, weight, bias, p.stride, p.padding, p.output_padding, p.groups, p.dilation)


# --- checking ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Error:
    """How far an output is from the float64 result: the relative norm, and the largest element error, which is
    relative to the largest element of the result."""

    norm: float
    largest: float

    def __str__(self) -> str:
        return f"error norm {self.norm:.2e}, largest {self.largest:.2e}"

    def within(self, of_torch: Error, dtype: torch.dtype, precision: str, p: Problem) -> bool:
        """At most twice torch's own error in the same precision, in both measures.

        TF32 is only a permission, and cuDNN does not always use it (for groups of few channels, or with weights of
        many megabytes): its error is then that of float32, which says nothing about TF32. In its place stands what
        rounding both operands to 11 bits costs, 2.9e-4 of the norm for random data, with a margin.

        Nothing is asked to be closer than the spacing of the dtype's numbers: torch's error can be next to nothing by
        luck where few products are summed. In float64 the result that both are held against is itself rounded, at
        random in each of its sums.
        """
        if precision == "tf32" and of_torch.norm < NO_TF32:
            return self.norm <= TF32_ERROR.norm and self.largest <= TF32_ERROR.largest
        spacing = torch.finfo(dtype).eps
        if dtype == torch.float64:
            spacing *= math.sqrt(p.in_channels_per_group * p.taps.taps_per_row)
        return self.norm <= max(2 * of_torch.norm, spacing) and self.largest <= max(2 * of_torch.largest, spacing)


TF32_ERROR = Error(4e-4, 6e-4)


def errors(outputs: dict[str, torch.Tensor], x, weight, bias, p: Problem) -> dict[str, Error]:
    """The error of each output (N, C_out, L_out) against torch in float64, over every sample; NaN stays NaN.

    The float64 result comes from torch without cuDNN, a few samples at a time.
    """
    device, zero = x.device, torch.zeros((), dtype=torch.float64, device=x.device)
    squares, largest = dict.fromkeys(outputs, zero), dict.fromkeys(outputs, zero)
    truth_square = truth_largest = zero
    weight64, bias64 = weight.double(), None if bias is None else bias.double()
    step = max(1, ORACLE_ELEMENTS // max(1, p.out_channels * p.out_length))
    for first in range(0, p.batch, step):
        some = slice(first, first + step)
        with _without_cudnn() if device.type == "cuda" else contextlib.nullcontext():
            truth = torch_result(x[some].double(), weight64, bias64, p)
        truth_square, truth_largest = truth_square + truth.square().sum(), torch.maximum(truth_largest, _peak(truth))
        for name, y in outputs.items():
            difference = y[some].double() - truth
            squares[name] = squares[name] + difference.square().sum()
            largest[name] = torch.maximum(largest[name], _peak(difference))

    def relative(value, to):
        return (value / to).item() if to else value.item()

    return {
        name: Error(relative(squares[name].sqrt(), truth_square.sqrt()), relative(largest[name], truth_largest))
        for name in outputs
    }


def _peak(values: torch.Tensor) -> torch.Tensor:
    return values.abs().amax() if values.numel() else values.sum()


@contextlib.contextmanager
def _without_cudnn() -> Iterator[None]:
    before, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


# --- timing -----------------------------------------------------------------------------------------------------------


@dataclass
class Contestant:
    """``call`` enqueues one computation and returns its output; ``prepare`` runs before it, untimed."""

    call: Callable[[], torch.Tensor]
    prepare: Callable[[], object] = lambda: None
    output: torch.Tensor | None = None
    every: int = 1  # takes part in every so many rounds
    events: list = field(default_factory=list)

    def times(self) -> list[float]:
        """Milliseconds of the timed calls."""
        return [start.elapsed_time(stop) for start, stop in self.events]


class Flush:
    """Drives everything out of the L2 cache by reading a buffer of eight times its size; so often that Python queues
    the timed call meanwhile (half a millisecond by an H200's bandwidth)."""

    def __init__(self):
        size = 8 * torch.cuda.get_device_properties().L2_cache_size
        self._buffer = torch.zeros(size // 4, device="cuda")
        self._sum = torch.zeros((), device="cuda")

    def __call__(self):
        for _ in range(FLUSHES):
            torch.sum(self._buffer, dim=0, out=self._sum)


def timed_call(contestant: Contestant, flush: Flush) -> None:
    """One call of the contestant between two events, on a cold cache."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    contestant.output = None
    contestant.prepare()
    flush()
    start.record()
    contestant.output = contestant.call()
    stop.record()
    contestant.events.append((start, stop))


def interleave(contestants: list[Contestant], repeats: int, budget_s: float, label: str) -> None:
    """Time the contestants in turns, ``repeats`` times each; one that would take longer than ``budget_s`` for that
    sits out rounds, but is called FEWEST_REPEATS times at least."""
    flush = Flush()
    for contestant in progress(contestants, f"{label}: compile and warm up"):
        for _ in range(WARMUP_CALLS):
            contestant.events.clear()
            timed_call(contestant, flush)
        torch.cuda.synchronize()
        affordable = int(1e3 * budget_s / max(contestant.times()[0], 1e-3))
        contestant.every = max(1, repeats // min(repeats, max(FEWEST_REPEATS, affordable)))
        contestant.events.clear()
    for turn in progress(range(repeats), f"{label}: timed rounds"):
        for contestant in contestants:
            if turn % contestant.every == 0:
                timed_call(contestant, flush)
        torch.cuda.synchronize()


def quantile(times: list[float], share: float) -> float:
    return torch.tensor(times, dtype=torch.float64).quantile(share).item()


# --- rows -------------------------------------------------------------------------------------------------------------


def rungs_for(
    names: list[str], problem: Problem, dtype: torch.dtype, precision: str, device: Device | None = None
) -> tuple[list[str], list[str]]:
    """The contestants that ``names`` stand for, and a line on each that is left out.

    "all" is every rung that can do the problem on ``device`` (torch's current GPU; where there is none, an H200) and
    ``auto``; where no rung computes in that precision, ``cudnn``. Nor is there then an ``auto``: the public function
    may compute "tf32x3" as "ieee", and a row says what was computed.
    Raises ValueError for an unknown name, NotImplementedError for a rung named alone that cannot do the problem.
    """
    peak, device = peak_name(dtype, precision), device or current_device()
    refusals = {name: rung.refusal(problem, dtype, peak, device) for name, rung in RUNGS.items()}
    chosen, left_out = [], []
    for name in dict.fromkeys(names):
        if name == "all":
            able = [rung for rung in RUNGS if refusals[rung] is None]
            left_out += [f"{rung} cannot do {problem} in {peak}: {why}" for rung, why in refusals.items() if why]
            chosen += [*able, AUTO] if able else [CUDNN]
        elif name == CUDNN:
            chosen.append(name)
        elif name == AUTO:
            if all(refusals.values()):
                raise NotImplementedError(f"no rung can do {problem} in {peak}, so there is none to select")
            chosen.append(name)
        elif name not in RUNGS:
            raise ValueError(f"no rung is called {name!r}; there are {', '.join([*RUNGS, AUTO, CUDNN, 'all'])}")
        elif refusals[name]:
            raise NotImplementedError(f"{name} cannot do {problem} in {peak}: {refusals[name]}")
        else:
            chosen.append(name)
    return list(dict.fromkeys(chosen)), left_out


def measure(
    workload: Workload,
    rungs: list[str],
    dtype: torch.dtype = torch.float32,
    precision: str = "ieee",
    *,
    repeats: int = 30,
    budget_s: float = 1.0,
) -> list[Row]:
    """Rows for ``rungs`` on ``workload``, forward, all from one interleaved run on torch's current GPU.

    ``rungs`` are registry names, ``auto`` or ``cudnn`` (see ``rungs_for``, which also refuses what cannot be done).
    ``precision`` counts for float32 only, and is torch's too, which computes "ieee" beside our "tf32x3". ``budget_s``
    is the time on the GPU, in seconds, that each contestant may take. Raises WrongResult when an output is wrong; it
    then holds the rows of those that are not.
    """
    p, peak = workload.problem, peak_name(dtype, precision)
    names, _ = rungs_for(rungs, p, dtype, precision)
    with torch_switches(tf32=precision == "tf32"), torch.no_grad():
        x, weight, bias = make_inputs(workload, dtype, "cuda")
        ours = {name: _ours(name, x, weight, bias, p, precision) for name in names if name != CUDNN}
        everyone = ours | _theirs(x, weight, bias, p)
        copy = _copy()
        interleave([*everyone.values(), copy], repeats, budget_s, f"{workload.name} {peak}")
        found = errors({name: contestant.output for name, contestant in everyone.items()}, x, weight, bias, p)

    times = {name: contestant.times() for name, contestant in everyone.items()}
    bandwidth = 2 * copy.output.nbytes / (1e-3 * quantile(copy.times(), 0.5))
    wrong = [name for name in names if not found[name].within(found[CUDNN], dtype, precision, p)]
    rows = _rows([name for name in names if name not in wrong], workload, dtype, precision, times, found, bandwidth)
    if wrong:
        which = ", ".join(f"{name} ({found[name]})" for name in wrong)
        message = f"wrong on {workload.name} ({peak}): {which}; torch's own error: {found[CUDNN]}; no row of it is kept"
        raise WrongResult(message, rows)
    return rows


def _ours(name: str, x, weight, bias, p: Problem, precision: str) -> Contestant:
    """A rung, or the public function, with its output's memory full of NaN before every call."""
    shape, arithmetic = (p.batch, p.out_channels, p.out_length), peak_name(x.dtype, precision)
    if name == AUTO:
        arguments = x, weight, bias, p.stride, p.padding, p.output_padding, p.groups, p.dilation
        # The allocator hands the block that was just filled with NaN and freed to the output, which has its size.
        return Contestant(
            call=lambda: conv_transpose1d(*arguments, precision=arithmetic),
            prepare=lambda: torch.full(shape, math.nan, dtype=x.dtype, device=x.device),
        )
    y = torch.empty(shape, dtype=x.dtype, device=x.device)

    def call():
        RUNGS[name].run(x, weight, bias, y, p, precision=arithmetic)
        return y

    return Contestant(call, prepare=lambda: y.fill_(math.nan))


def _theirs(x, weight, bias, p: Problem) -> dict[str, Contestant]:
    """torch's own op, and the conv1d formulation where it applies, its weight packed beforehand."""
    contestants = {CUDNN: Contestant(lambda: torch_result(x, weight, bias, p))}
    if expert.applies(p):
        packed, packed_bias = expert.pack(weight, p), expert.pack_bias(bias, p)
        contestants[CONV1D] = Contestant(lambda: expert.run(x, packed, packed_bias, p))
    return contestants


def _rows(
    names: list[str],
    workload: Workload,
    dtype: torch.dtype,
    precision: str,
    times: dict[str, list[float]],
    found: dict[str, Error],
    bandwidth: float,
) -> list[Row]:
    """The rows of ``names``; ``bandwidth`` is the copy's, in bytes a second."""
    p, itemsize, peak = workload.problem, dtype.itemsize, peak_name(dtype, precision)
    where, dtype_name = machine.describe(), str(dtype).removeprefix("torch.")
    # PEAK_FLOPS are an H200's: elsewhere the roofline is not known.
    floor = p.floor_ms(itemsize, peak, bandwidth) if "H200" in where.gpu else None
    common = dict(
        time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **asdict(where),
        workload=workload.name,
        direction="forward",
        dtype=dtype_name,
        precision=precision if len(PRECISIONS[dtype]) > 1 else dtype_name,
        length=p.length,
        cudnn_ms_p50=quantile(times[CUDNN], 0.5),
        conv1d_ms_p50=quantile(times[CONV1D], 0.5) if CONV1D in times else None,
        cudnn_relerr=found[CUDNN].norm,
    )
    rows = []
    for name in names:
        p20, p50, p80 = (quantile(times[name], share) for share in (0.2, 0.5, 0.8))
        rates = dict(gbps=p.min_bytes(itemsize) / p50 / 1e6, tflops=p.flops / p50 / 1e9)
        share = None if floor is None else floor / p50
        quantiles = dict(ms_p20=p20, ms_p50=p50, ms_p80=p80)
        rows.append(Row(**common, **quantiles, **rates, rung=name, roofline=share, relerr=found[name].norm))
    return rows


def _copy() -> Contestant:
    """A device-to-device copy, whose reads and writes give the bandwidth of the roofline."""
    size = min(COPY_BYTES, torch.cuda.mem_get_info()[0] // 8)
    source, target = torch.ones(size // 4, device="cuda"), torch.empty(size // 4, device="cuda")
    return Contestant(lambda: target.copy_(source))


def powers_of_two(shortest: int, longest: int) -> list[int]:
    """The powers of two from ``shortest`` to ``longest``, both included when they are powers of two."""
    powers = (2**exponent for exponent in itertools.count())
    return [n for n in itertools.takewhile(lambda n: n <= longest, powers) if n >= shortest]
