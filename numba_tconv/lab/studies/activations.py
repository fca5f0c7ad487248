"""The alias-free activation at BigVGAN's sizes: one kernel against the published operators, in turns.

GPU times on a cold cache.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from numba_tconv.formula.alias_free import AliasFree
from numba_tconv.lab.measure import bench, machine, rows
from numba_tconv.lab.measure.accuracy import Error
from numba_tconv.lab.measure.timing import Contestant, interleave, quantile
from numba_tconv.lab.report import tables as table
from numba_tconv.selection.directions import FORWARD, STEP
from numba_tconv.torch_api.compile_ahead import ActivationCall
from numba_tconv.torch_api.convert import convert

from . import bigvgan
from .decoder_times import DEVICE, WHOLE_FLUSHES, error

FILE = Path("activations", "bigvgan.csv")
BATCH, SECONDS = 4, 4.0
DTYPES, DIRECTIONS = ("float32", "bfloat16"), (FORWARD, STEP)
HEADER = ["channels, length", "dtype", "direction", "torch, ms", "ours, ms", "speed-up", "error", "torch's error"]


@dataclass(frozen=True)
class Timed(machine.Measured):
    """Median ms of ``batch`` inputs, and errors: in a step, of x's gradient."""

    batch: int
    channels: int
    length: int
    dtype: str
    direction: str
    ms_p50: float
    torch_ms_p50: float
    relerr: float
    torch_relerr: float


def shapes(name: str = "bigvgan_v2_24khz") -> list[tuple[int, int]]:
    """Channels and length after the first, middle and last stage."""
    sizes = bigvgan.SIZES[name]
    length, found = round(SECONDS * sizes.sampling_rate / sizes.hop), []
    for stage, rate in enumerate(sizes.rates, start=1):
        length *= rate
        found.append((sizes.channels >> stage, length))
    return [found[0], found[len(found) // 2], found[-1]]


def side(module: nn.Module, x: torch.Tensor, dy: torch.Tensor, direction: str) -> Contestant:
    module, x = module.to(x.dtype), x.clone()

    def forward():
        with torch.no_grad():
            return module(x)

    def step():
        return torch.autograd.grad(module(x), [x, *module.parameters()], dy)

    x.requires_grad_(direction == STEP)
    return Contestant(forward if direction == FORWARD else step)


def measure(
    channels: int, length: int, dtype: torch.dtype, direction: str, *, batch: int = BATCH, repeats: int = 20
) -> Timed:
    """The row of one size, on torch's current GPU with its default switches. Raises bench.WrongResult."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        module = bigvgan.Activation(channels).to(dtype)
        x, dy = (torch.randn(batch, channels, length).to(dtype) for _ in range(2))
    ours = copy.deepcopy(module)
    if not convert(ours).activations:
        raise RuntimeError("the activation was not converted")
    both = [side(one, x, dy, direction) for one in (ours, copy.deepcopy(module))]
    exact = side(module.double(), x.double(), dy.double(), direction).call()
    with bench.torch_switches(tf32=True):
        interleave(both, repeats, 1.0, f"{channels} x {length} {dtype} {direction}", WHOLE_FLUSHES)
        found = [one.call() for one in both]
    pairs = [errors(one, exact) for one in found]
    for of_ours, of_torch in zip(*pairs, strict=True):
        if not of_ours.within(of_torch, dtype, "ieee", terms=1):
            said = f"wrong on {channels} x {length} {dtype} {direction}: ours {of_ours}; torch's {of_torch}"
            raise bench.WrongResult(said, [])
    return Timed(
        **machine.measured(),
        batch=batch,
        channels=channels,
        length=length,
        dtype=str(dtype).removeprefix("torch."),
        direction=direction,
        ms_p50=quantile(both[0].times(), 0.5),
        torch_ms_p50=quantile(both[1].times(), 0.5),
        relerr=pairs[0][0].norm,
        torch_relerr=pairs[1][0].norm,
    )


def errors(found, exact) -> list[Error]:
    """Errors of an output, or of gradients; alpha's and beta's by norm alone."""
    if isinstance(found, torch.Tensor):
        return [error(found, exact)]
    of_x, *others = (error(*pair) for pair in zip(found, exact, strict=True))
    return [of_x, *(Error(one.norm, one.norm) for one in others)]


def cases(dtypes: list[str]) -> list[tuple]:
    return [(*shape, bench.DTYPES[dtype], way) for shape in shapes() for dtype in dtypes for way in DIRECTIONS]


def calls(dtypes: list[str]) -> list[ActivationCall]:
    same = bigvgan.TAPS, bigvgan.TAPS, bigvgan.RATIO, bigvgan.RATIO
    return [
        ActivationCall(AliasFree(BATCH, *shape, *same), bench.DTYPES[dtype], "snake", True, False, True)
        for shape in shapes()
        for dtype in dtypes
    ]


def describe(row: Timed) -> str:
    return (
        f"{row.batch} x {row.channels} x {row.length} {row.dtype} {row.direction}: {row.ms_p50:.4g} ms"
        f" (torch {row.torch_ms_p50:.4g}), error {row.relerr:.2e} (torch {row.torch_relerr:.2e})"
    )


def render(timed: Iterable[Timed]) -> str:
    newest = rows.newest(
        timed, lambda row: (row.gpu, row.batch, row.channels, row.length, row.dtype, row.direction)
    ).values()
    parts = []
    for gpu, batch in sorted({(row.gpu, row.batch) for row in newest}):
        some = sorted((row for row in newest if (row.gpu, row.batch) == (gpu, batch)), key=_order)
        parts.append(
            "**One alias-free activation** of BigVGAN: GPU time on a cold cache, milliseconds (median),"
            f" {batch} inputs, {table.where(some)}. In a step the error is that of x's gradient."
        )
        parts.append(table.markdown(HEADER, map(_cells, some), texts=3))
    return "\n\n".join(parts)


def _order(row: Timed) -> tuple:
    return -row.channels, row.length, row.dtype != "float32", row.dtype, row.direction != FORWARD


def _cells(row: Timed) -> list[str]:
    times = f"{row.torch_ms_p50:.3g}", f"{row.ms_p50:.3g}", f"{row.torch_ms_p50 / row.ms_p50:.1f}x"
    size = f"{row.channels}, {row.length}"
    return [size, row.dtype, row.direction, *times, f"{row.relerr:.1e}", f"{row.torch_relerr:.1e}"]
