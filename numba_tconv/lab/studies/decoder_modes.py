"""Whole decoders eager, under torch.compile and in a CUDA graph, with torch's operators and converted.

Wall times in turns, without cuDNN's search.
"""

import contextlib
import copy
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from numba_tconv.lab.measure import ahead, bench, machine, rows, timing
from numba_tconv.lab.report import tables as table
from numba_tconv.runtime.device import current_device
from numba_tconv.torch_api import compile_ahead
from numba_tconv.torch_api.convert import convert
from numba_tconv.torch_api.freeze import freeze
from numba_tconv.torch_api.noted import computations
from numba_tconv.torch_api.routed import routed

from . import bigvgan, decoders
from .decoder_times import DEVICE, error, in_dtype

FILE = Path("decoders", "modes.csv")
STARTED = time.perf_counter()
MODES = "eager", "compile", "graph"
NAMES = *decoders.DECODERS, *bigvgan.SIZES
HEADER = ["decoder", "dtype", "batch", "mode", "torch, ms", "ours, ms", "speed-up", "error", "torch's error"]


@dataclass(frozen=True)
class Timed(machine.Measured):
    """Median wall ms of torch and the converted, frozen model; the waveform's errors.

    float32 is computed in TF32.
    """

    decoder: str
    mode: str
    dtype: str
    batch: int
    seconds: float
    activations: int
    ms_p50: float
    torch_ms_p50: float
    relerr: float
    torch_relerr: float


def make(name: str, batch: int, seconds: float) -> tuple[nn.Module, torch.Tensor]:
    """An evaluation model and its input, on torch's default device. Raises ValueError for unknown names."""
    if name not in bigvgan.SIZES:
        return decoders.get(name).make(batch, seconds)
    sizes = bigvgan.SIZES[name]
    model = bigvgan.BigVGAN(sizes)
    decoders.randomise(model)
    return model.eval(), torch.randn(batch, sizes.bands, max(1, round(seconds * sizes.sampling_rate / sizes.hop)))


def captured(call: Callable[[], torch.Tensor], model: nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """``call`` as a replayed CUDA graph, which reads the memory of ``model`` and ``x``.

    Without Qwen2.5-Omni's scaling, which no graph holds. EnCodec's and Mimi's integer buffers, which
    Python reads, are on the CPU meanwhile.
    """
    with contextlib.ExitStack() as patches:
        for module in model.modules():
            buffers = {name: b for name, b in module.named_buffers(recurse=False) if not b.is_floating_point()}
            numbers = {name: b.cpu() for name, b in buffers.items() if not b.dim()}
            patches.enter_context(mock.patch.dict(module._buffers, numbers))
        patches.enter_context(mock.patch.object(torch.Tensor, "cpu", lambda self: self))
        if hasattr(model, "process_mel_spectrogram"):
            x.copy_(model.process_mel_spectrogram(x))
            patches.enter_context(mock.patch.object(model, "process_mel_spectrogram", lambda given: given))
        graph, y = timing.captured(call)

    def replay(_read: tuple = (model, x)) -> torch.Tensor:
        graph.replay()
        return y

    return replay


def calls_of(model: nn.Module, x: torch.Tensor, mode: str, *, ours: bool) -> Callable[[], torch.Tensor]:
    def call():
        if not ours:
            return decoders.decode(model, x)
        with routed():
            return decoders.decode(model, x)

    if mode == "graph":
        return captured(call, model, x)
    if mode == "compile":
        compiled = torch.compile(decoders.decode)
        return lambda: compiled(model, x)
    return call


def measure(
    name: str, dtypes: list[torch.dtype], batches: list[int], seconds: float, modes: list[str], repeats: int
) -> Iterator[Timed]:
    """A row for each dtype, batch and mode. Raises ValueError for an unknown decoder, bench.WrongResult."""
    torch.manual_seed(0)
    with torch.no_grad():
        say(f"{name}: making and converting it")
        with torch.device(DEVICE):
            model, x = make(name, max(batches), seconds)
        converted = copy.deepcopy(model)
        report = convert(converted)
        models = {dtype: [copy.deepcopy(one).to(dtype) for one in (model, converted)] for dtype in dtypes}
        del model, converted
        if x.is_cuda:
            say(f"compiling kernels for {report.replaced} layers and {report.activations} activations")
            inputs = [x[:batch] for batch in batches]
            ahead.compile_all(calls_ahead({dtype: ours for dtype, (_, ours) in models.items()}, inputs))
        for dtype in dtypes:
            precision = "tf32" if dtype == torch.float32 else str(dtype).removeprefix("torch.")
            theirs, ours = models.pop(dtype)
            given = in_dtype(x, dtype)
            say(f"{precision}: float64 reference")
            exact = decoders.decode(copy.deepcopy(theirs).double(), in_dtype(given, torch.float64)).reshape(len(x), -1)
            freeze(ours)
            with bench.torch_switches(dtype == torch.float32, search=False):
                for batch, mode in itertools.product(batches, modes):
                    say(f"{precision}: {batch} inputs, {mode}")
                    found = measure_mode([theirs, ours], given[:batch], mode, exact[:batch], repeats)
                    (of_torch, of_ours), (torch_ms, ms) = found
                    if not of_ours.within(of_torch, dtype, precision, terms=1):
                        said = f"wrong on {name} {mode} {precision}: ours {of_ours}; torch's {of_torch}"
                        raise bench.WrongResult(said, [])
                    yield Timed(
                        **machine.measured(),
                        decoder=name,
                        mode=mode,
                        dtype=str(dtype).removeprefix("torch."),
                        batch=batch,
                        seconds=seconds,
                        activations=report.activations,
                        ms_p50=ms,
                        torch_ms_p50=torch_ms,
                        relerr=of_ours.norm,
                        torch_relerr=of_torch.norm,
                    )
                    torch.compiler.reset()


def measure_mode(models: list[nn.Module], x: torch.Tensor, mode: str, exact: torch.Tensor, repeats: int) -> tuple:
    theirs, ours = (calls_of(model, x.clone(), mode, ours=side) for side, model in enumerate(models))
    exact = exact.flatten()  # some decoders drop dimensions of size one
    errors = [error(side().to(exact.device).flatten(), exact) for side in (theirs, ours)]
    return errors, timing.wall_times([theirs, ours], repeats)


def calls_ahead(models: dict[torch.dtype, nn.Module], inputs: list[torch.Tensor]) -> list:
    found = []
    for dtype, model in models.items():
        decode = model.decode if hasattr(model, "decode") else model  # bound: ``computations`` sees the modules
        with bench.torch_switches(dtype == torch.float32, search=False):
            for x in inputs:
                found += compile_ahead.calls_of(computations(decode, in_dtype(x, dtype)), current_device())
    return found


def say(what: str) -> None:
    print(f"{time.perf_counter() - STARTED:6.1f} s: {what}", file=sys.stderr, flush=True)


def describe(row: Timed) -> str:
    return (
        f"{row.decoder} {row.dtype}, {row.batch} x {row.seconds:g} s, {row.mode}: {row.ms_p50:.4g} ms"
        f" (torch {row.torch_ms_p50:.4g}), error {row.relerr:.2e} (torch {row.torch_relerr:.2e})"
    )


def newest(timed: Iterable[Timed]) -> list[Timed]:
    """The newest row of each measurement, in the order of the table."""
    found = rows.newest(timed, lambda row: (row.gpu, row.decoder, row.dtype, row.batch, row.seconds, row.mode))
    return sorted(found.values(), key=_order)


def render(timed: Iterable[Timed]) -> str:
    parts = []
    for (_, seconds), some in rows.grouped(newest(timed), lambda row: (row.gpu, row.seconds)).items():
        parts.append(
            "**Whole decoders by mode**, transposed convolutions and alias-free activations torch's or ours, weights"
            " frozen, cuDNN without a search: wall time of a call,"
            f" inputs of {seconds:g} s, milliseconds (median), {table.where(some)}."
        )
        parts.append(table.markdown(HEADER, map(_cells, some), texts=2))
    return "\n\n".join(parts)


def _order(row: Timed) -> tuple:
    known = [*NAMES, row.decoder].index(row.decoder)
    return row.gpu, row.seconds, known, row.decoder, row.dtype != "float32", row.dtype, row.batch, MODES.index(row.mode)


def _cells(row: Timed) -> list[str]:
    times = f"{row.torch_ms_p50:.3g}", f"{row.ms_p50:.3g}", f"{row.torch_ms_p50 / row.ms_p50:.2f}x"
    return [
        decoders.title(row.decoder),
        row.dtype,
        str(row.batch),
        row.mode,
        *times,
        f"{row.relerr:.1e}",
        f"{row.torch_relerr:.1e}",
    ]
