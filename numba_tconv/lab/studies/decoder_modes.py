"""Whole decoders eager, under torch.compile and in a CUDA graph, with torch's operators and converted.

    python -m numba_tconv.lab.studies.decoder_modes bigvgan --dtype float32 --batch 4 --mode eager graph

Times are wall times of a call, until the GPU is idle, all modes and sides of a decoder in turns. Rows go to FILE.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from numba_tconv.lab.measure import bench, machine, rows
from numba_tconv.lab.measure.timing import WARMUP_CALLS, wall_times
from numba_tconv.torch_api.convert import convert
from numba_tconv.torch_api.freeze import freeze
from numba_tconv.torch_api.routed import routed
from numba_tconv.torch_api.warm import warm

from . import bigvgan, decoders
from .decoder_times import DEVICE, error

FILE = Path("plots", "data", "decoders", "modes.csv")
STARTED = time.perf_counter()
MODES = "eager", "compile", "graph"
NAMES = *decoders.DECODERS, *bigvgan.SIZES


@dataclass(frozen=True)
class Timed(machine.Measured):
    """A decoder in one mode: median wall ms of torch and of the converted, frozen model.

    ``activations`` counts the converted alias-free activations. Errors are the waveform's relative norms against
    float64; float32 is computed in TF32.
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
    """A model in evaluation mode and its input, on torch's default device. Raises ValueError for an unknown name."""
    if name not in bigvgan.SIZES:
        return decoders.get(name).make(batch, seconds)
    sizes = bigvgan.SIZES[name]
    model = bigvgan.BigVGAN(sizes)
    decoders.randomise(model)
    return model.eval(), torch.randn(batch, sizes.bands, max(1, round(seconds * sizes.sampling_rate / sizes.hop)))


def captured(call: Callable[[], torch.Tensor], model: nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """``call`` as a replayed CUDA graph.

    Qwen2.5-Omni's decoder scales its input with a constant of the CPU and copies its output there, which a graph cannot
    hold: neither is captured.
    """
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch.Tensor, "cpu", lambda self: self))
        if hasattr(model, "process_mel_spectrogram"):
            x.copy_(model.process_mel_spectrogram(x))
            patches.enter_context(mock.patch.object(model, "process_mel_spectrogram", lambda given: given))
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(WARMUP_CALLS):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return y

    return replay


def calls_of(model: nn.Module, x: torch.Tensor, mode: str, *, ours: bool) -> Callable[[], torch.Tensor]:
    """The call that is timed; ``mode`` is one of MODES."""

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
    name: str, dtype: torch.dtype, batches: list[int], seconds: float, modes: list[str], repeats: int
) -> Iterator[Timed]:
    """A row for each batch and mode.

    Raises ValueError for an unknown decoder and bench.WrongResult for a wrong waveform.
    """
    torch.manual_seed(0)
    precision = "tf32" if dtype == torch.float32 else str(dtype).removeprefix("torch.")
    with torch.no_grad(), bench.torch_switches(dtype == torch.float32):
        say(f"{name} {precision}: making it")
        with torch.device(DEVICE):
            theirs, x = make(name, max(batches), seconds)
        theirs, x = theirs.to(dtype), _to(x, dtype)
        say("float64 reference")
        exact = decoders.decode(copy.deepcopy(theirs).double(), _to(x, torch.float64)).reshape(len(x), -1)
        say("converting it")
        converted = copy.deepcopy(theirs)
        report = convert(converted)
        say(f"compiling kernels for {report.replaced} layers and {report.activations} activations")
        if x.is_cuda:
            warm(functools.partial(decoders.decode, converted), x)
        freeze(converted)
        for batch, mode in itertools.product(batches, modes):
            say(f"{batch} inputs, {mode}")
            sides = [calls_of(one, x[:batch].clone(), mode, ours=one is converted) for one in (theirs, converted)]
            exactly = exact[:batch].flatten()  # some decoders drop dimensions of size one
            of_torch, of_ours = (error(side().to(exact.device).flatten(), exactly) for side in sides)
            if not of_ours.within(of_torch, dtype, precision, terms=1):
                raise bench.WrongResult(f"wrong on {name} {mode} {precision}: ours {of_ours}; torch's {of_torch}", [])
            torch_ms, ms = wall_times(sides, repeats)
            yield Timed(
                time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                **asdict(machine.describe()),
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
            del sides
            torch.compiler.reset()


def say(what: str) -> None:
    """Print a step and the seconds since the study began, to stderr."""
    print(f"{time.perf_counter() - STARTED:6.1f} s: {what}", file=sys.stderr, flush=True)


def _to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("decoders", nargs="*", help=f"{', '.join(NAMES)} (all)")
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each input (4)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args()
    rows.check_writable(given.out, Timed)
    for name in given.decoders or NAMES:
        for dtype in given.dtype:
            for row in measure(name, getattr(torch, dtype), given.batch, given.seconds, given.mode, given.repeats):
                rows.append(given.out, [row], Timed)
                print(
                    f"{name} {dtype} {row.batch} x {given.seconds:g} s, {row.mode}: {row.ms_p50:.4g} ms"
                    f" (torch {row.torch_ms_p50:.4g}), {row.activations} activations,"
                    f" error {row.relerr:.2e} (torch {row.torch_relerr:.2e})",
                    flush=True,
                )
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
