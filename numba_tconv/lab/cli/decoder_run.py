"""Command ``decoders``."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import torch

from numba_tconv.lab.measure import bench, rows
from numba_tconv.lab.studies import bigvgan, decoder_modes, decoder_times, decoders
from numba_tconv.lab.studies.decoder_times import Timed
from numba_tconv.runtime import cache
from numba_tconv.runtime.device import current_device
from numba_tconv.runtime.kernel import target
from numba_tconv.torch_api import compile_ahead
from numba_tconv.torch_api.functional import default_precision

from . import commands, named_calls

BATCH = 4


def run_decoders(arguments) -> int:
    if arguments.mode:
        return run_modes(arguments)
    names = list(dict.fromkeys(arguments.decoders or decoders.DECODERS))
    dtypes, batches, out = sizes(arguments, decoder_times.FILE)
    with commands.mistakes():
        chosen = [decoders.get(name) for name in names]
        decoders.require_transformers()
    commands.require_gpu()
    rows.check_writable(out, Timed)
    for batch in batches:
        compile_all(chosen, dtypes, batch, arguments.seconds)

    def measure(name, dtype, batch):
        return decoder_times.measure(name, dtype, batch=batch, seconds=arguments.seconds, repeats=arguments.repeats)

    return commands.record_each(itertools.product(names, dtypes, batches), measure, describe, out)


def run_modes(arguments) -> int:
    names, modes = (list(dict.fromkeys(one)) for one in (arguments.decoders or decoder_modes.NAMES, arguments.mode))
    dtypes, batches, out = sizes(arguments, decoder_modes.FILE)
    with commands.mistakes():
        if [decoders.get(name) for name in names if name not in bigvgan.SIZES]:
            decoders.require_transformers()
    commands.require_gpu()
    rows.check_writable(out, decoder_modes.Timed)
    failed = False
    for name in names:
        try:
            for row in decoder_modes.measure(name, dtypes, batches, arguments.seconds, modes, arguments.repeats):
                rows.append(out, [row], decoder_modes.Timed)
                print(decoder_modes.describe(row), flush=True)
        except (bench.WrongResult, RuntimeError) as error:  # not capturable, or out of memory
            failed = True
            print(f"numba_tconv: {name}: {error}", file=sys.stderr)
        finally:
            torch.cuda.empty_cache()
    print(f"rows added to {out}")
    return commands.FAILED if failed else 0


def sizes(arguments, file: Path) -> tuple[list[torch.dtype], list[int], Path]:
    """Dtypes, batches and output, by default ``file`` in the data directory."""
    dtypes = [bench.DTYPES[name] for name in dict.fromkeys(arguments.dtype or decoder_times.DTYPES)]
    return dtypes, list(dict.fromkeys(arguments.batch or [BATCH])), arguments.out or arguments.data / file


def compile_all(chosen: list[decoders.Decoder], dtypes: list[torch.dtype], batch: int, seconds: float) -> None:
    if not cache.directory():
        return
    device = current_device()
    problems = [problem for decoder in chosen for problem in decoders.problems(decoder, batch, seconds)]
    with bench.torch_switches(tf32=True):
        arithmetics = [(dtype, default_precision(dtype)) for dtype in dtypes]
    calls = named_calls.calls([bench.AUTO], problems, arithmetics, device)
    compile_ahead.fill(calls, target(device.cc), os.cpu_count() or 1)


def describe(row: Timed) -> str:
    return (
        f"{row.decoder} {row.precision}, {row.batch} x {row.seconds:g} s: whole {row.ms_p50:.4g} ms"
        f" (torch {row.torch_ms_p50:.4g}), {row.calls} transposed convolutions {row.layers_ms_p50:.4g} ms"
        f" (torch {row.torch_layers_ms_p50:.4g}), error {row.relerr:.2e} (torch {row.torch_relerr:.2e})"
    )
