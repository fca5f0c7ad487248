"""Commands ``activations``, ``decoders``, ``kernelbench`` and ``streaming``."""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from numba_tconv.lab.measure import ahead, bench, rows
from numba_tconv.lab.studies import activations, bigvgan, decoder_modes, decoder_times, decoders, kernelbench, streaming
from numba_tconv.runtime.device import current_device
from numba_tconv.runtime.progress import progress
from numba_tconv.torch_api.functional import default_precision

from . import commands, named_calls

BATCH = 4


def run_activations(arguments) -> int:
    dtypes = distinct(arguments.dtype, activations.DTYPES)
    commands.require_gpu()
    rows.check_writable(arguments.out, activations.Timed)
    ahead.compile_all(activations.calls(dtypes))

    def measure(*case):
        yield activations.measure(*case)

    return record_each(activations.cases(dtypes), measure, activations.describe, arguments.out)


def run_decoders(arguments) -> int:
    if arguments.mode:
        return run_modes(arguments)
    names = distinct(arguments.decoders, decoders.DECODERS)
    dtypes, batches, out = sizes(arguments, decoder_times.FILE)
    with commands.mistakes():
        chosen = [decoders.get(name) for name in names]
        decoders.require_transformers()
    commands.require_gpu()
    rows.check_writable(out, decoder_times.Timed)
    for batch in batches:
        ahead.compile_all(calls_of(chosen, dtypes, batch, arguments.seconds))

    def measure(name, dtype, batch):
        yield decoder_times.measure(name, dtype, batch=batch, seconds=arguments.seconds, repeats=arguments.repeats)

    return record_each(itertools.product(names, dtypes, batches), measure, decoder_times.describe, out)


def run_modes(arguments) -> int:
    names, modes = distinct(arguments.decoders, decoder_modes.NAMES), distinct(arguments.mode)
    dtypes, batches, out = sizes(arguments, decoder_modes.FILE)
    with commands.mistakes():
        if [decoders.get(name) for name in names if name not in bigvgan.SIZES]:
            decoders.require_transformers()
    commands.require_gpu()
    rows.check_writable(out, decoder_modes.Timed)

    def measure(name):
        try:
            yield from decoder_modes.measure(name, dtypes, batches, arguments.seconds, modes, arguments.repeats)
        except RuntimeError as error:  # not capturable, or out of memory
            raise bench.WrongResult(f"{name}: {error}", []) from error

    return record_each(((name,) for name in names), measure, decoder_modes.describe, out)


def run_kernelbench(arguments) -> int:
    numbers = arguments.problem or list(kernelbench.ENTRIES)
    if unknown := set(numbers) - set(kernelbench.ENTRIES):
        raise commands.Mistake(
            f"no entry for problem {min(unknown)}; there are {', '.join(map(str, kernelbench.ENTRIES))}"
        )
    commands.require_gpu()
    rows.check_writable(arguments.out, kernelbench.Result)
    results = []
    for number in progress(numbers, "KernelBench"):
        results.append(kernelbench.run(number))
        if results[-1].right:
            rows.append(arguments.out, results[-1:], kernelbench.Result)
        torch.cuda.empty_cache()
    print(f"KernelBench level 1 on {torch.cuda.get_device_name()}; errors are relative norms against float64,")
    print(f"times the mean of {kernelbench.TIMED_TRIALS} calls on a cold L2, torch with its default switches\n")
    print(f"{kernelbench.markdown(results)}\n")
    for result in results:
        if not result.right:
            print(f"Problem {result.problem}: our output is too far from float64, or of another shape; no row is kept.")
        elif not result.accepted and result.torch_is_the_inexact_side:
            print(f"Problem {result.problem} fails the comparison because of torch's output, not of ours: torch's is "
                  f"{result.torch_relerr / result.relerr:,.0f} times as far from float64. By default torch multiplies "
                  f"float32 in TF32.")  # fmt: skip
    print(f"rows added to {arguments.out}")
    return 0 if all(r.right and (r.accepted or r.torch_is_the_inexact_side) for r in results) else commands.FAILED


def run_streaming(arguments) -> int:
    names = distinct(arguments.layers, streaming.LAYERS)
    if unknown := set(names) - set(streaming.LAYERS):
        raise commands.Mistake(f"no layer {min(unknown)!r}; there are {', '.join(streaming.LAYERS)}")
    commands.require_gpu()
    rows.check_writable(arguments.out, streaming.Timed)
    given = (
        arguments.dtype or streaming.DTYPES,
        arguments.batch or streaming.BATCHES,
        arguments.frames or streaming.FRAMES,
    )
    return record_each(itertools.product(names, *given), streaming.measure, streaming.describe, arguments.out)


def record_each(
    cases: Iterable[tuple], measure: Callable[..., Iterable], describe: Callable[[Any], str], out: Path
) -> int:
    """Add each case's rows to ``out`` and print them; returns the exit code."""
    code = 0
    for case in cases:
        try:
            for row in measure(*case):
                rows.append(out, [row], type(row))
                print(describe(row), flush=True)
        except bench.WrongResult as error:
            code = commands.FAILED
            print(f"numba_tconv: {error}", file=sys.stderr)
        finally:
            torch.cuda.empty_cache()
    print(f"rows added to {out}")
    return code


def sizes(arguments, file: Path) -> tuple[list[torch.dtype], list[int], Path]:
    """Dtypes, batches and output, by default ``file`` in the data directory."""
    dtypes = [bench.DTYPES[name] for name in distinct(arguments.dtype, decoder_times.DTYPES)]
    return dtypes, distinct(arguments.batch, [BATCH]), arguments.out or arguments.data / file


def distinct(given: Iterable | None, usual: Iterable = ()) -> list:
    return list(dict.fromkeys(given or usual))


def calls_of(chosen: list[decoders.Decoder], dtypes: list[torch.dtype], batch: int, seconds: float) -> Iterator:
    problems = [problem for decoder in chosen for problem in decoders.problems(decoder, batch, seconds)]
    with bench.torch_switches(tf32=True):
        arithmetics = [(dtype, default_precision(dtype)) for dtype in dtypes]
    yield from named_calls.calls([bench.AUTO], problems, arithmetics, current_device())
