"""What the lab says without a GPU, for the record of tests/plans.py: options, explanations, cases, studies, figures."""

import argparse
import contextlib
import importlib
import inspect
import io
import pkgutil
import tempfile
from dataclasses import asdict, replace
from unittest.mock import patch

import torch
from torch.nn.utils.parametrizations import weight_norm

from numba_tconv import lab
from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.cli import parser as cli
from numba_tconv.lab.explain.explain import explain
from numba_tconv.lab.explain.traffic import traffic
from numba_tconv.lab.measure import accuracy, bench, fuzz, fuzz_activations, fuzz_steps, workloads
from numba_tconv.lab.studies import activations, bigvgan, decoders, kernelbench, streaming, training
from numba_tconv.runtime.device import H200
from numba_tconv.selection.directions import RESULTS
from numba_tconv.selection.registry import RUNGS

from . import drawn

EXPLAINED = (
    "kb64 --cc 9.0 --precision tf32", "kb79 --cc 8.0 --dtype bfloat16", "istft --cc 9.0 --precision tf32x3",
    "depthwise --cc 9.0", "pqmf --cc 7.5 --dtype float16", "head --cc 12.0 --precision ieee",
    "xcodec_u1 --cc 9.0 --rung k4_register_tile --precision ieee", "waveglow --cc 9.0 --dtype float64",
    "--batch 2 --in-channels 6 --out-channels 4 --kernel-size 7 --length 50 --stride 3 --dilation 2 --cc 9.0",
    "kb64 --cc 7.5 --precision tf32", "dac_u1 --cc 7.5 --precision ieee",
    "--batch 32 --in-channels 512 --out-channels 256 --kernel-size 16 --length 32 --stride 8 --padding 4 --cc 9.0 "
    "--precision tf32",
)  # fmt: skip
SHOWN = {
    "few taps": Problem(3, 4, 6, 3, 5, stride=1, dilation=2, padding=1),
    "a phase without taps": Problem(1, 4, 6, 2, 5, stride=3, padding=2, bias=True),
    "many phases": Problem(1, 4, 6, 40, 9, stride=11),
    "many taps": Problem(1, 4, 6, 28, 9, stride=2, padding=3),
}
TRAFFIC = ("k1_gather", "k2_polyphase", "k3_shared_tile", "k4_register_tile")
CASES = 60  # of each kind


def options() -> dict[str, dict]:
    """Each command's description and arguments, with what argparse does with them; first those before a command."""
    top = cli.parser()
    (verbs,) = [one for one in top._actions if isinstance(one, argparse._SubParsersAction)]
    return {
        name: {"description": of.description} | {_flags(one): _action(one) for one in of._actions} | _defaults(of)
        for name, of in {"numba_tconv": top, **verbs.choices}.items()
    }


def _flags(action: argparse.Action) -> str:
    return " ".join(action.option_strings) or action.dest


def _action(action: argparse.Action) -> str:
    kind = getattr(action.type, "__name__", None)
    choices = action.choices and list(map(str, action.choices))
    says = action.dest, action.nargs, kind, choices, action.required, action.metavar, action.help
    default = None if action.default is argparse.SUPPRESS else str(action.default)
    return f"{type(action).__name__} {default} {says}"


def _defaults(parser: argparse.ArgumentParser) -> dict[str, str]:
    return {f"set {name}": str(getattr(value, "__name__", value)) for name, value in parser._defaults.items()}


def explanations() -> dict[str, dict[str, str]]:
    """What ``explain`` prints without recorded rows, by what is typed."""
    return {typed: printed("explain", *typed.split(), "--data", "EMPTY") for typed in EXPLAINED}


def printed(*argv: str) -> dict[str, str]:
    """Lines that a command prints, by number; "EMPTY" is an empty folder."""
    out = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out):
        code = cli.main([folder if one == "EMPTY" else one for one in argv])
    return {"exit code": str(code)} | {str(at): line for at, line in enumerate(out.getvalue().splitlines())}


def sizes() -> dict[str, dict]:
    """Each workload's problem and what is derived from it."""
    return {name: _derived(one.problem) for name, one in workloads.WORKLOADS.items()}


def _derived(p: Problem) -> dict[str, str]:
    numbers = dict(
        out_length=p.out_length, flops=p.flops, min_bytes=p.min_bytes(2), floor_ms=f"{p.floor_ms(4, 'ieee'):.6g}"
    )
    return {name: str(value) for name, value in {**asdict(p), **numbers}.items()}


def studies() -> dict[str, str | dict[str, str]]:
    """What studies measure: sizes, calls, modules and their numbers, random inputs."""
    found = {f"stream {name}": str(layer) for name, layer in streaming.LAYERS.items()}
    found |= {name: str(sizes) for name, sizes in bigvgan.SIZES.items()}
    found |= {name: str(replace(one, construct=None)) for name, one in decoders.DECODERS.items()}
    found |= {f"entry {number}": str(kernelbench.torch_model(number)) for number in kernelbench.ENTRIES}
    for at, (case, call) in enumerate(
        zip(activations.cases(activations.DTYPES), activations.calls(["float64"]) * 4, strict=True)
    ):
        found[f"activation {at}"] = f"{case} {call}"
    torch.manual_seed(0)
    model = bigvgan.BigVGAN(
        bigvgan.Sizes(5, 120, (4, 3), (8, 7), channels=8, block_kernel_sizes=(3, 5), dilations=(1, 3))
    )
    layers = [torch.nn.Conv1d(4, 6, 5), torch.nn.ConvTranspose1d(4, 6, 5, 2, groups=2, bias=False)]
    model.others = torch.nn.ModuleList([*layers, weight_norm(torch.nn.Conv1d(6, 4, 3))])
    model.embed_sum, model.untouched = torch.nn.Buffer(torch.zeros(99)), torch.nn.Buffer(torch.ones(5))
    decoders.randomise(model)
    found["model"] = {str(at): line for at, line in enumerate(str(model).splitlines())}
    found["numbers"] = {name: _sums(values.double()) for name, values in model.state_dict().items()}
    found["output"] = _sums(model(torch.randn(2, 5, 9)).double())
    found["trained"] = str(training.decoder(torch.nn.ConvTranspose1d, (8, 4)))
    for name, gradients in (("head", True), ("bigvgan_24", False), ("small", True)):
        given = workloads.at_length(workloads.get(name), 50, 2)
        given = replace(given, problem=replace(given.problem, bias=gradients))
        made = bench.make_operands(given, torch.float32, "cpu", gradients)
        found[f"operands {name}"] = "; ".join("none" if one is None else _sums(one.double()) for one in made)
    return found


def defaults() -> dict[str, str]:
    """Default arguments of public functions and classes."""
    plain, found = (bool, int, float, str, tuple, torch.dtype, type(None)), {}
    for module in pkgutil.walk_packages(lab.__path__, f"{lab.__name__}."):
        for name, one in sorted(vars(importlib.import_module(module.name)).items()):
            some = inspect.isroutine(one) or (inspect.isclass(one) and not issubclass(one, BaseException))
            if some and one.__module__ == module.name and not name.startswith("_"):
                parameters = inspect.signature(one).parameters.values()
                given = [f"{p.name}={p.default!r}" for p in parameters if isinstance(p.default, plain)]
                found |= {f"{module.name}.{name}": ", ".join(given)} if given else {}
    return found


def waveforms() -> dict[str, str]:
    made = training.waveforms(3, 4 * training.FRAME, torch.Generator().manual_seed(1)).double()
    frames = training.representation(made.float())
    return {"waves": _sums(made), "frames": _sums(frames)}


def _sums(values: torch.Tensor) -> str:
    return f"{values.abs().sum():.3g} {values.square().sum():.3g} {tuple(values.shape)}"


def roundings() -> dict[str, str]:
    """The error that each result may have of rounding alone."""
    p = Problem(3, 4, 5, 4, 50, stride=2, padding=1, bias=True)
    operands = bench.make_operands(workloads.Workload("", p, "", ""), torch.float32, "cpu", gradients=True)
    return {
        f"{result} {precision}": str(accuracy.rounding(result, operands, p, precision))
        for result in RESULTS
        for precision in PRECISIONS[torch.float32]
    }


def bounds() -> dict[str, dict[str, str]]:
    """What random cases may be off by, and what k1 to k4 load."""
    p, found = Problem(2, 6, 4, 5, 9, stride=2, padding=1, groups=2, bias=True), {}
    for dtype, precisions in PRECISIONS.items():
        made = bench.make_operands(workloads.Workload("", p, "", ""), dtype, "cpu", gradients=True)
        found |= {
            f"{of} {dtype} {precision}": f"{fuzz.bound(of, made.of(of), p, dtype, precision).sum():.4g}"
            for of in RESULTS
            for precision in precisions
        }
    with patch.object(fuzz_activations, "SIMULATOR", True):
        for number in range(CASES):
            case = fuzz_activations.draw(7, number)
            tensors, dy = case.operands()
            found[f"activation {number}"] = " ".join(f"{one:.4g}" for one in case.limits(tensors, dy))
    loads = {
        f"{name} {rung}": str(
            traffic(rung, one.problem, RUNGS[rung].config_on(H200, one.problem, torch.float32, "ieee"))
        )
        for name, one in list(workloads.WORKLOADS.items())[::4]
        for rung in TRAFFIC
        if RUNGS[rung].refusal(one.problem, torch.float32, "ieee", H200) is None
    }
    return {"bounds": found, "loads": loads}


def shown() -> dict[str, str]:
    """What notebooks show of problems."""
    return {name: explain(of, device=H200, data="none", precision="ieee")._repr_html_() for name, of in SHOWN.items()}


def everything() -> dict[str, dict]:
    draws = {"a problem": fuzz.draw, "a stream": fuzz_steps.draw, "an activation": fuzz_activations.draw}
    with patch.object(torch.cuda, "is_available", lambda: False):  # sizes of cases depend on it
        cases = {name: {str(n): draw(7, n).line() for n in range(CASES)} for name, draw in draws.items()}
        found = {"options": options(), "explanations": explanations(), "cases": cases}
    found |= {"workloads": sizes(), "waveforms": waveforms(), "roundings": roundings()}
    found |= bounds() | {"shown": shown()}
    found |= {"studies": studies(), "defaults": defaults()}
    return found | {"pages": drawn.pages(), "figures": drawn.pictures()}
