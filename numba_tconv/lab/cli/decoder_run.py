"""The command that times whole decoders."""

from __future__ import annotations

import os
import sys

import torch

from numba_tconv.lab.measure import bench, rows
from numba_tconv.lab.studies import decoder_times, decoders
from numba_tconv.lab.studies.decoder_times import Timed
from numba_tconv.runtime import cache
from numba_tconv.runtime.device import current_device
from numba_tconv.runtime.kernel import target
from numba_tconv.torch_api import compile_ahead
from numba_tconv.torch_api.functional import default_precision

from . import commands, named_calls


def run_decoders(arguments) -> int:
    names = list(dict.fromkeys(arguments.decoders or decoders.DECODERS))
    dtypes = [bench.DTYPES[name] for name in dict.fromkeys(arguments.dtype or decoder_times.DTYPES)]
    with commands.mistakes():
        chosen = [decoders.get(name) for name in names]
        decoders.require_transformers()
    commands.require_gpu()
    rows.check_writable(arguments.out, Timed)
    compile_all(chosen, dtypes, arguments.batch, arguments.seconds)
    wrong = False
    for name in names:
        for dtype in dtypes:
            try:
                row = decoder_times.measure(
                    name, dtype, batch=arguments.batch, seconds=arguments.seconds, repeats=arguments.repeats
                )
            except bench.WrongResult as error:
                wrong = True
                print(f"numba_tconv: {error}", file=sys.stderr)
                continue
            finally:
                torch.cuda.empty_cache()
            rows.append(arguments.out, [row], Timed)
            print(describe(row), flush=True)
    print(f"rows added to {arguments.out}")
    return commands.FAILED if wrong else 0


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
