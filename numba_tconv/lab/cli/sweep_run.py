"""Command ``sweep``."""

import dataclasses

import torch

from numba_tconv.lab.measure import ahead, bench, rows, sweep, workloads
from numba_tconv.lab.measure import contestants as named
from numba_tconv.lab.measure.workloads import Workload
from numba_tconv.runtime.device import current_device

from . import commands, named_calls

TORCHS_LIMIT = "canUse32BitIndexMath"  # in torch's refusal of long signals


def run_sweep(arguments) -> int:
    arithmetic = bench.DTYPES[arguments.dtype], commands.named_precision(arguments)
    names = arguments.rung or ["all"]
    with commands.mistakes():
        bench.check_weights(arguments.weights, arguments.direction)
        curves = [curve_of(layer, arguments) for layer in swept_layers(arguments)]
        plans = [
            [commands.plan(names, one.problem, *arithmetic, arguments.direction, 2) for one in curve]
            for curve in curves
        ]
        if not any(rungs for of_curve in plans for rungs, _ in of_curve):
            raise ValueError(f"none of the layers can be done: {plans[0][0][1][0]}")
    commands.require_gpu()
    rows.check_writable(arguments.out)
    every = [(curve, of_curve) for curve, of_curve in zip(curves, plans, strict=True) if any(r for r, _ in of_curve)]
    problems = [one.problem for curve, _ in every for one in curve]
    ahead.compile_all(named_calls.calls(names, problems, [arithmetic], current_device(), arguments.direction))
    wrong = [line for curve, of_curve in every for line in record_curve(curve, of_curve, arguments)]
    print(f"rows added to {arguments.out}")
    return commands.FAILED if wrong else 0


def swept_layers(arguments) -> list[Workload]:
    sizes = {name: value for name, value in commands.given_sizes(arguments).items() if name != "length"}
    if sizes:
        if arguments.workloads:
            raise ValueError("name layers, or give sizes, not both")
        commands.require_sizes(arguments, but="length")
        return [
            workloads.of_sizes(
                dataclasses.replace(commands.ONE_ELEMENT, length=2 * sizes.get("padding", 0) + 1, **sizes)
            )
        ]
    return [workloads.layer(name) for name in arguments.workloads or sweep.LAYERS]


def curve_of(layer: Workload, arguments) -> list[Workload]:
    chosen = arguments.length or sweep.lengths(layer.problem, arguments.min, arguments.max, arguments.factor)
    if arguments.neighbours:
        chosen = sweep.neighbours(sorted(chosen))
    return sweep.curve(layer, chosen, arguments.samples)


def record_curve(curve: list[Workload], plans: list[tuple], arguments) -> list[str]:
    """Record a layer's curve, shortest first; returns what was wrong.

    Contestants beyond the budget sit out, and all but ``auto`` where memory is short. A length without contestants ends
    the curve.
    """
    wrong, before = [], {}
    for line in dict.fromkeys(line for _, left_out in plans for line in left_out[:1]):
        print(f"left out: {line}")
    for workload, (rungs, _) in zip(curve, plans, strict=True):
        names = sweep.affordable(rungs, before.values(), workload.problem, arguments.budget)
        if not names:
            print(f"left out: {workload.name} from L {workload.problem.length} on: it takes longer than the budget")
            break
        measured = None
        for some in dict.fromkeys((tuple(names), tuple(name for name in names if name == named.AUTO))):
            try:
                measured = some and commands.record_one(workload, list(some), arguments, wrong)
            except torch.OutOfMemoryError:
                measured = None  # the traceback kept tensors
            except RuntimeError as error:
                if TORCHS_LIMIT not in str(error):
                    raise
            torch.cuda.empty_cache()
            if measured is not None:
                break
        if not measured:
            print(f"left out: {workload.name} from L {workload.problem.length} on: too long for memory or torch")
            break
        before |= {row.rung: row for row in measured}
    return wrong
