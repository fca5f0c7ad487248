"""The command line."""

import argparse
import dataclasses
import errno
import math
import os
import re
import sys
from pathlib import Path

import torch

from numba_tconv import __version__
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure import bench, rows, search, sweep
from numba_tconv.lab.measure.fuzz import run_fuzz
from numba_tconv.lab.measure.fuzz_activations import run_fuzz_activations
from numba_tconv.lab.measure.fuzz_steps import run_fuzz_steps
from numba_tconv.lab.studies import (
    activations,
    bigvgan,
    decoder_modes,
    decoder_times,
    decoders,
    kernelbench,
    streaming,
    training,
)
from numba_tconv.selection.directions import DIRECTIONS, FORWARD, STEP, rungs_of
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS

from . import commands, compile_run, study_runs, sweep_run
from .demo import run_demo

SIZES = {
    "batch": "samples",
    "in_channels": "channels of the input",
    "out_channels": "channels of the output",
    "kernel_size": "taps",
    "length": "positions of the input",
    "stride": "outputs from one input position to the next (1)",
    "padding": "outputs cropped at each end (0)",
    "output_padding": "outputs added at the right end (0)",
    "groups": "that the channels fall into (1)",
    "dilation": "outputs from tap to tap (1)",
    "bias": "whether there is one",
}
SCRIPT = "numba-tconv"
PLOTS = Path("plots")
DATA = PLOTS / "data"
SEARCH = DATA / search.FILE
TIMED_DTYPES = [dtype for dtype in bench.DTYPES if dtype != "float64"]
NAMES = "; ".join(f"{direction}: {', '.join(rungs_of(direction))}" for direction in DIRECTIONS if direction != STEP)


def main(argv: list[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser().parse_args(argv, argparse.Namespace(argv=argv))
    try:
        data = getattr(arguments, "data", None)
        if data not in (None, DATA) and not data.is_dir():
            raise commands.Mistake(f"there is no folder {data}")
        code = arguments.command(arguments) or 0
        if sys.stdout:
            sys.stdout.flush()
        return code
    except (commands.Mistake, rows.RowsError) as error:
        print(f"numba_tconv: {error}", file=sys.stderr)
        return commands.MISTAKE
    except torch.OutOfMemoryError as error:
        print(f"numba_tconv: not enough GPU memory: {str(error).splitlines()[0]}", file=sys.stderr)
        return commands.MISTAKE
    except KeyboardInterrupt:
        print("numba_tconv: interrupted; what was finished is kept", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        _drop_what_cannot_be_written()
        if isinstance(error, BrokenPipeError):
            return 141
        print(f"numba_tconv: {error.strerror}", file=sys.stderr)
        return commands.MISTAKE


def _drop_what_cannot_be_written() -> None:
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def whole_number(text: str) -> int:
    """An integer or a power, such as 2**10."""
    match = re.fullmatch(r"(\d{1,18})(?:\*\*(\d{1,2}))?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number (as in 1024 or 2**10)")
    if (number := int(match[1]) ** int(match[2] or 1)) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not below 2**63")
    return number


def positive(text: str) -> int:
    number = whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def duration(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds (as in 4 or 0.5)")
    return seconds


def typed() -> str:
    return SCRIPT if Path(sys.argv[0]).stem == SCRIPT else "python -m numba_tconv"


def _arithmetic(one, products=", torch's too except in tf32x3 (ieee)", precisions=bench.PRECISIONS[torch.float32]):
    one.add_argument("--dtype", choices=bench.DTYPES, default="float32", help="of all tensors (float32)")
    one.add_argument("--precision", choices=precisions, help=f"of float32 products{products}")


def _capability(one, **default):
    text = "9.0" if default else "that of the GPU; where there is none, 9.0"
    one.add_argument("--cc", choices=commands.DEVICES, **default, help=f"compute capability ({text})")


def _out(one, file, text="the file to add to"):
    one.add_argument("--out", type=Path, default=file, metavar="FILE", help=f"{text} ({file})")


def _several(one, flag, text, usual, **options):
    one.add_argument(flag, action="append", help=f"{text}may be repeated ({usual})", **options)


def _sizes(one, but=()):
    for field in dataclasses.fields(Problem):
        if field.name in but:
            continue
        flag = "--" + field.name.replace("_", "-")
        if field.type is bool:
            one.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=SIZES[field.name])
        else:
            one.add_argument(flag, type=whole_number, metavar="N", help=SIZES[field.name])


def _places(one):
    one.add_argument("--data", type=Path, default=DATA, metavar="DIR", help=f"where the rows are ({DATA})")
    one.add_argument("--plots", type=Path, default=PLOTS, metavar="DIR", help=f"where figures go ({PLOTS})")


def _directed(one, text):
    one.add_argument("--direction", choices=DIRECTIONS, default=FORWARD, help=f"{text} ({FORWARD})")


def _measurement(one, out):
    _directed(one, "the forward pass, a gradient, or a training step: the forward pass and all gradients")
    _several(one, "--rung", f"{NAMES}; auto, cudnn or all; ", "all", metavar="NAME")
    _arithmetic(one)
    one.add_argument("--weights", choices=rows.WEIGHTS, default=rows.CALL,
                     help="call: packed in the timed call; frozen: packed before it (call)")  # fmt: skip
    one.add_argument("--repeats", type=positive, default=30, help="timed calls of each contestant (30)")
    one.add_argument("--budget", type=duration, default=1.0, metavar="S",
                     help="most seconds of timing for one contestant, but at least 5 calls (1.0)")  # fmt: skip
    _out(one, out, "the rows file to add to")


def _drawn(one, count):
    one.add_argument("--seed", type=whole_number, default=0, metavar="S", help="seed of the cases (0)")
    one.add_argument("--first", type=whole_number, default=0, metavar="N", help="number of the first case (0)")
    one.add_argument("--count", type=positive, default=count, metavar="N", help=f"number of cases ({count:,})")


def _add_demonstrations(command) -> None:
    one = command("demo", run_demo, "check and compile the rungs and show results; with a GPU, also time them")
    _places(one)

    one = command("check", commands.run_check, "compare every rung, also the gradients', with float64")
    one.add_argument("workload", nargs="?", metavar="WORKLOAD", help="the problem to check (a small one)")
    _sizes(one)
    one.add_argument("--small", action="store_true", help="check three small problems, as `demo` does")
    _arithmetic(one)

    one = command("explain", commands.run_explain, "which rung computes a problem, and why not another; needs no GPU")
    one.add_argument(
        "workload", nargs="?", metavar="WORKLOAD", help="the problem to explain; without it, give all sizes"
    )
    _sizes(one)
    _arithmetic(one, " (what torch's switch allows)")
    _capability(one)
    one.add_argument("--rung", choices=RUNGS, help="explain this rung, whichever a call takes (the one that it takes)")
    one.add_argument("--data", type=Path, metavar="DIR", help=f"where the rows are ({DATA} of the checkout)")


def _add_measurements(command) -> None:
    one = command("bench", commands.run_bench, "measure workloads at full size, and add the rows to a file")
    one.add_argument("workloads", nargs="*", default=["kernelbench", "audio"], metavar="WORKLOAD",
                     help="names, or the sets kernelbench, audio, all (kernelbench audio)")  # fmt: skip
    one.add_argument("--batch", type=positive, metavar="N", help="of every workload (its own)")
    _measurement(one, DATA / "workloads.csv")

    one = command("sweep", sweep_run.run_sweep, "measure throughput against length, and add the rows to a file")
    one.add_argument("workloads", nargs="*", metavar="LAYER",
                     help=f"names of workloads; or give sizes ({' '.join(sweep.LAYERS)})")  # fmt: skip
    _sizes(one, but=("batch", "length"))
    one.add_argument(
        "--batch", type=positive, default=sweep.BATCH, dest="samples", metavar="N", help=f"batch of all ({sweep.BATCH})"
    )
    one.add_argument(
        "--min", type=positive, default=sweep.SHORTEST, metavar="N", help="fewest samples of output (2**10)"
    )
    one.add_argument("--max", type=positive, default=sweep.LONGEST, metavar="N", help="most samples of output (2**20)")
    one.add_argument("--factor", type=positive, choices=(2, 4, 8, 16), default=2, help="from length to length (2)")
    _several(one, "--length", "this input length; ", "as --min, --max and --factor say", type=positive, metavar="L")
    one.add_argument("--neighbours", action="store_true", help="instead L - 1 and L + 1 of three of these lengths")
    _measurement(one, DATA / "sweep.csv")

    one = command("figures", commands.run_figures, "draw the figures and fill README's tables from the recorded rows")
    _places(one)
    one.add_argument("--readme", type=Path, metavar="FILE", help=f"whose tables are renewed ({commands.README})")


def _add_compilations(command) -> None:
    one = command("inspect", commands.run_inspect, "what the compiler made of a rung; needs no GPU")
    one.add_argument("rung", metavar="RUNG", help=f"{', '.join([*RUNGS, *GRADIENTS])}, or all")
    one.add_argument("workload", nargs="?", default="kb64", metavar="WORKLOAD", help="that it is configured for (kb64)")
    _arithmetic(one, " (the first of these that the rung has)")
    text = "another value of the configuration, as inspect prints it; "
    _several(one, "--set", text, "none", default=[], metavar="FIELD=VALUE")
    _capability(one, default="9.0")

    one = command("compile", compile_run.run_compile, "compile kernels ahead, into the cache; needs no GPU",
                  aliases=["warm"])  # fmt: skip
    one.add_argument("what", nargs="*", metavar="WORKLOAD or MODULE:FUNCTION",
                     help="workloads by name, or the sets kernelbench, audio, all (kernelbench audio); or a function "
                     "that returns a model and the inputs of a call, with their own dtypes and arithmetic; sizes "
                     "without a name: a layer of those sizes")  # fmt: skip
    _sizes(one)
    _directed(one, "of the kernels; step: all that training launches")
    _several(one, "--rung", f"{NAMES}; auto (what a call launches) or all; ", "auto", metavar="NAME")
    _several(one, "--dtype", "", "float32", choices=bench.DTYPES)
    known = bench.PRECISIONS[torch.float32]
    _several(one, "--precision", "of float32 products; ", "what torch's switch allows", choices=known)
    _capability(one)
    one.add_argument("--jobs", type=positive, metavar="N", help="processes at a time (as many as processors)")

    one = command("search", commands.run_search, "measure every configuration of k6 and mark the one that it chooses")
    one.add_argument("workloads", nargs="*", default=["all"], metavar="WORKLOAD",
                     help="names, or the sets kernelbench, audio, all (all)")  # fmt: skip
    _arithmetic(one, " (tf32)", ("tf32", "tf32x3"))
    _out(one, SEARCH)


def _add_random_cases(command) -> None:
    one = command("fuzz", run_fuzz, "random problems on all rungs and gradients against float64; tiny without a GPU")
    _drawn(one, 20_000)

    one = command("fuzz-steps", run_fuzz_steps, "random streams, step by step, against the whole signal")
    _drawn(one, 2_000)

    one = command(
        "fuzz-activations", run_fuzz_activations, "random alias-free activations and gradients; tiny without a GPU"
    )
    _drawn(one, 2_000)


def _add_studies(command) -> None:
    one = command("train", training.run_train, "train a small decoder with torch's layers and with ours, and record it")
    one.add_argument("--steps", type=positive, default=300, metavar="N", help="steps with each kind of layer (300)")
    _out(one, DATA / "training" / "decoder.csv", "the file to replace")

    one = command("decoders", study_runs.run_decoders, "time whole decoders with torch's layers and with ours")
    one.add_argument(
        "decoders",
        nargs="*",
        metavar="NAME",
        help=f"{', '.join(decoders.DECODERS)} (all); with --mode also {', '.join(bigvgan.SIZES)}",
    )
    text = "time the whole decoder in this mode, its alias-free activations ours too; "
    _several(one, "--mode", text, "none", choices=decoder_modes.MODES)
    _several(one, "--dtype", "float32 is computed in TF32; ", "float32 and bfloat16", choices=TIMED_DTYPES)
    _several(one, "--batch", "inputs; ", 4, type=positive, metavar="N")
    one.add_argument("--seconds", type=duration, default=4.0, metavar="S", help="seconds of sound in each input (4)")
    one.add_argument("--repeats", type=positive, default=20, help="timed calls of each side (20)")
    files = f"{DATA / decoder_times.FILE}; with --mode {DATA / decoder_modes.FILE}"
    one.add_argument("--out", type=Path, metavar="FILE", help=f"the file to add to ({files})")
    one.set_defaults(data=DATA)

    one = command("activations", study_runs.run_activations, "time BigVGAN's alias-free activations, and record it")
    _several(one, "--dtype", "", "both", choices=activations.DTYPES)
    _out(one, DATA / activations.FILE)

    one = command("streaming", study_runs.run_streaming, "time steps of decoders' layers against the form by hand")
    one.add_argument("layers", nargs="*", metavar="NAME", help=f"{', '.join(streaming.LAYERS)} (all)")
    _several(one, "--dtype", "", "both", choices=streaming.DTYPES)
    _several(one, "--batch", "slots; ", "1, 8, 64", type=positive, metavar="N")
    _several(one, "--frames", "new frames of a step; ", "1, 2, 4, 8", type=positive, metavar="T")
    _out(one, DATA / streaming.FILE)

    command("workloads", commands.run_workloads, "the layers that are measured: names, models, sizes")

    command("info", commands.run_info, "GPU, driver, versions, and what is missing")

    one = command(
        "kernelbench", study_runs.run_kernelbench, "the KernelBench entries under the benchmark's rules; adds rows"
    )
    one.add_argument("problem", nargs="*", type=int, metavar="PROBLEM", help="64, 74, 79 (all)")
    _out(one, DATA / kernelbench.FILE)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog=typed(),
        description="Transposed 1-D convolution in CUDA kernels written in Python: see, check and measure them.",
    )
    top.add_argument("--version", action="version", version=f"numba_tconv {__version__}")
    verbs = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name, run, text, **options):
        one = verbs.add_parser(name, help=text, description=text, **options)
        one.set_defaults(command=run)
        return one

    for add in (_add_demonstrations, _add_measurements, _add_compilations, _add_random_cases, _add_studies):
        add(command)
    return top
