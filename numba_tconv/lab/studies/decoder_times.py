"""Whole decoders, with torch's transposed convolutions and ours, in turns.

Wall times are of the model and a copy under ``convert`` and ``routed``.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from numba_tconv.lab.measure import bench, machine, rows
from numba_tconv.lab.measure.accuracy import Error
from numba_tconv.lab.measure.timing import FLUSHES, Contestant, interleave, quantile, wall_times
from numba_tconv.lab.report import tables as table
from numba_tconv.torch_api import functional
from numba_tconv.torch_api.convert import convert
from numba_tconv.torch_api.routed import routed

from . import decoders

FILE = Path("decoders", "transformers.csv")
DTYPES = ("float32", "bfloat16")
DEVICE = "cuda"
FEWEST_WALLS = 30
WHOLE_FLUSHES = 20 * FLUSHES  # Python queues much meanwhile
HEADER = [
    *("decoder", "calls", "calls: torch", "ours", "speed-up"),
    *("whole: torch", "ours", "speed-up", "share of the calls in torch's"),
]


@dataclass(frozen=True)
class Timed(machine.Measured):
    """Median ms of the decoder and of its ``calls`` together, and the waveform's errors."""

    transformers: str
    decoder: str
    dtype: str
    precision: str
    weights: str
    batch: int
    seconds: float
    calls: int
    layers_ms_p50: float
    torch_layers_ms_p50: float
    ms_p50: float
    torch_ms_p50: float
    relerr: float
    torch_relerr: float
    wall_ms_p50: float | None = None
    torch_wall_ms_p50: float | None = None


class Stopwatch(TorchFunctionMode):
    """Computes torch.conv_transpose1d by ``function``, between events in ``spans``."""

    def __init__(self, function: Callable[..., torch.Tensor]):
        super().__init__()
        self.function, self.spans = function, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.conv_transpose1d:
            return func(*args, **(kwargs or {}))
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        y = self.function(*args, **(kwargs or {}))
        stop.record()
        self.spans.append((start, stop))
        return y


class Side(Contestant):
    def __init__(self, model: torch.nn.Module, x: torch.Tensor, function: Callable[..., torch.Tensor]):
        super().__init__(self._decode)
        self.model, self.x, self.function = model, x, function
        self.spans = []  # of each call, its convolutions' events

    def _decode(self) -> torch.Tensor:
        with Stopwatch(self.function) as watch:
            y = decoders.decode(self.model, self.x)
        self.spans.append(watch.spans)
        return y

    def layers_times(self) -> list[float]:
        """ms of the transposed convolutions in each timed call."""
        timed = self.spans[len(self.spans) - len(self.events) :]
        return [sum(start.elapsed_time(stop) for start, stop in spans) for spans in timed]


def measure(
    name: str,
    dtype: torch.dtype = torch.float32,
    *,
    batch: int = 4,
    seconds: float = 4.0,
    repeats: int = 20,
    budget_s: float = 2.0,
) -> Timed:
    """The row of a decoder on torch's current GPU; float32 is computed in TF32.

    ``seconds``: each input's; ``budget_s``: a side's GPU time. Raises ValueError for an unknown name, RuntimeError
    without transformers, WrongResult.
    """
    decoder = decoders.get(name)
    decoders.require_transformers()
    tf32 = dtype == torch.float32
    torch.manual_seed(0)
    with torch.no_grad():
        with torch.device(DEVICE):
            model, x = decoder.make(batch, seconds)
        model = model.to(dtype)
        x = in_dtype(x, dtype)
        in_float64, converted = copy.deepcopy(model).double(), copy.deepcopy(model)
        for module in converted.modules():
            if isinstance(module, torch.nn.RNNBase):
                module.flatten_parameters()  # else cuDNN copies weights in each call
        convert(converted)
        theirs, ours = Side(model, x, torch.conv_transpose1d), Side(model, x, functional.conv_transpose1d)
        with bench.torch_switches(tf32):
            interleave([theirs, ours], repeats, budget_s, f"{name} {bench.peak_name(dtype, 'tf32')}", WHOLE_FLUSHES)
        exact = decoders.decode(in_float64, in_dtype(x, torch.float64))
        found, of_torch = error(ours.output, exact), error(theirs.output, exact)
        with bench.torch_switches(tf32), routed():
            whole = error(decoders.decode(converted, x), exact)
        del in_float64, exact, theirs.output, ours.output

        def routed_call():
            with routed():
                return decoders.decode(converted, x)

        calls = [lambda: decoders.decode(model, x), routed_call]
        with bench.torch_switches(tf32):
            torch_wall, wall = wall_times(calls, max(repeats, FEWEST_WALLS))
    precision = "tf32" if tf32 else str(dtype).removeprefix("torch.")
    for one in (found, whole):
        if not one.within(of_torch, dtype, precision, terms=1):
            raise bench.WrongResult(
                f"wrong on {name} {precision}: ours {one}; torch's own {of_torch}; no row is kept", []
            )
    return Timed(
        **machine.measured(),
        transformers=machine.version("transformers"),
        decoder=name,
        dtype=str(dtype).removeprefix("torch."),
        precision=precision,
        weights=rows.CALL,
        batch=batch,
        seconds=seconds,
        calls=len(ours.spans[-1]),
        layers_ms_p50=quantile(ours.layers_times(), 0.5),
        torch_layers_ms_p50=quantile(theirs.layers_times(), 0.5),
        ms_p50=quantile(ours.times(), 0.5),
        torch_ms_p50=quantile(theirs.times(), 0.5),
        relerr=found.norm,
        torch_relerr=of_torch.norm,
        wall_ms_p50=wall,
        torch_wall_ms_p50=torch_wall,
    )


def in_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A decoder's input; codes stay."""
    return x.to(dtype) if x.is_floating_point() else x


def error(y: torch.Tensor, exact: torch.Tensor) -> Error:
    difference = y.double() - exact
    return Error((difference.norm() / exact.norm()).item(), (difference.abs().amax() / exact.abs().amax()).item())


def grouped(timed: Iterable[Timed]) -> list[list[Timed]]:
    """Newest rows in DECODERS' order, by GPU, dtype (float32 first), precision and input size."""

    def group(row):
        return row.gpu, row.dtype != "float32", row.dtype, row.precision, row.batch, row.seconds

    newest = rows.newest(timed, lambda row: (*group(row), row.decoder)).values()
    usual = [*decoders.DECODERS, *sorted({row.decoder for row in newest} - set(decoders.DECODERS))]
    ordered = sorted(newest, key=lambda row: (group(row), usual.index(row.decoder)))
    return list(rows.grouped(ordered, group).values())


def render(timed: Iterable[Timed]) -> str:
    parts = []
    for some in grouped(timed):
        first = some[0]
        arithmetic = table.arithmetic(first)
        said = f"{first.batch} inputs of {first.seconds:g} s, milliseconds (median)"
        where = f"{table.where(some)}, transformers {first.transformers}"
        parts.append(f"**{arithmetic}**, {said}, {where} {table.note(some)}".rstrip())
        parts.append(table.markdown(HEADER, [_cells(row) for row in some]))
    return "\n\n".join(parts) or table.EMPTY


def describe(row: Timed) -> str:
    return (
        f"{row.decoder} {row.precision}, {row.batch} x {row.seconds:g} s: whole {row.ms_p50:.4g} ms"
        f" (torch {row.torch_ms_p50:.4g}), {row.calls} transposed convolutions {row.layers_ms_p50:.4g} ms"
        f" (torch {row.torch_layers_ms_p50:.4g}), error {row.relerr:.2e} (torch {row.torch_relerr:.2e})"
    )


def _cells(row: Timed) -> list[str]:
    mark = table.MARK * (row.weights == rows.FROZEN)

    def pair(theirs, ours):
        return [f"{theirs:.3g}", f"{ours:.3g}{mark}", f"{theirs / ours:.2f}x"]

    layers, whole = (row.torch_layers_ms_p50, row.layers_ms_p50), (row.torch_ms_p50, row.ms_p50)
    if row.wall_ms_p50 is not None:
        whole = row.torch_wall_ms_p50, row.wall_ms_p50
    share = f"{row.torch_layers_ms_p50 / row.torch_ms_p50:.0%}"
    return [decoders.title(row.decoder), str(row.calls), *pair(*layers), *pair(*whole), share]
