"""Compile kernels ahead, on any machine."""

from dataclasses import dataclass, replace

import torch

from numba_tconv.formula.alias_free import AliasFree
from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.alias_free import plan as activation_gradients
from numba_tconv.kernels.alias_free import plan as activations
from numba_tconv.kernels.common import rows
from numba_tconv.kernels.rung import BFLOAT16_CC
from numba_tconv.kernels.streaming import plan as streaming_plan
from numba_tconv.runtime import cache, workers
from numba_tconv.runtime.device import Device
from numba_tconv.runtime.kernel import Kernel
from numba_tconv.selection import gradient as gradients
from numba_tconv.selection.directions import FORWARD, OF_GRADIENTS, STEP
from numba_tconv.selection.forward import arithmetic, select
from numba_tconv.selection.joined import joined
from numba_tconv.selection.registry import RUNGS

from . import operators as ops
from . import streaming
from .noted import AnyNoted, Noted, NotedActivation, NotedStep


@dataclass(frozen=True)
class Call:
    """A rung's computation of contiguous tensors; ``joins``: of signals joined to one."""

    rung: str
    problem: Problem
    dtype: torch.dtype
    precision: str
    device: Device
    joins: bool = False

    def kernels(self) -> list[Kernel]:
        rung = RUNGS.get(self.rung) or gradients.GRADIENTS[self.rung]
        config = rung.config_on(self.device, self.problem, self.dtype, self.precision)
        steps = [step.kernel for step in rung.steps(config, self.problem, self.device)]
        return [rows.make_kernel(self.dtype)] * self.joins + steps


@dataclass(frozen=True)
class ActivationCall:
    """An activation of contiguous tensors; ``step``: with all gradients."""

    sizes: AliasFree
    dtype: torch.dtype
    activation: str
    log_scale: bool
    tied: bool
    step: bool

    def kernels(self) -> list[Kernel]:
        chosen = self.sizes, self.dtype, self.activation, self.log_scale
        steps = activations.steps(*chosen)
        if self.step:
            steps += activation_gradients.steps(*chosen, self.activation == "snake", self.tied)
        return [step.kernel for step in steps]


@dataclass(frozen=True)
class StepCall:
    """A step of contiguous tensors in one launch."""

    config: streaming_plan.AnyConfig

    def kernels(self) -> list[Kernel]:
        return [streaming_plan.kernel_of(self.config)]


AnyCall = Call | ActivationCall | StepCall


def calls_of(noted: list[AnyNoted], device: Device, direction: str = FORWARD) -> list[AnyCall]:
    """The calls of ``noted``. Raises NotImplementedError for a variant that cannot do its problem."""
    found = []
    for call in noted:
        if isinstance(call, NotedActivation):
            if call.dtype != torch.bfloat16 or device.cc >= BFLOAT16_CC:
                found.append(ActivationCall(*call, step=direction == STEP))
                if direction == FORWARD and call.activation == "snake" and call.dtype.itemsize > 2:
                    found.append(replace(found[-1], log_scale=False))  # once frozen
            continue
        if isinstance(call, NotedStep):
            found += _of_step(call, device)
            continue
        problem, dtype, variant = call.problem, call.dtype, call.variant
        for one in parts(direction):
            if one != FORWARD or not variant:
                found += selected(one, problem, dtype, call.precision, device)
                continue
            own = arithmetic(problem, dtype, variant, call.precision, device)
            if refusal := RUNGS[variant].refusal(problem, dtype, own, device):
                raise NotImplementedError(f"{variant} cannot do {problem}: {refusal}")
            found.append(Call(variant, problem, dtype, own, device))
    return list(dict.fromkeys(found))


def _of_step(call: NotedStep, device: Device) -> list[AnyCall]:
    p, dtype, precision = call
    if config := streaming.config_of(*streaming_plan.contiguous(p, dtype), p, precision, device):
        return [StepCall(config)]
    whole = Noted(streaming.convolution_of(p), dtype, *streaming.convolutions_choice(precision))
    return calls_of([whole], device)


def parts(direction: str) -> tuple[str, ...]:
    return (FORWARD, *OF_GRADIENTS) if direction == STEP else (direction,)


def selected(direction: str, problem: Problem, dtype: torch.dtype, precision: str, device: Device) -> list[Call]:
    """A direction's calls; none where torch computes. ``precision``: one of PRECISIONS, or TF32_ALLOWED."""
    if 0 in problem.out_shape:
        return []
    own = precision
    if direction in OF_GRADIENTS[:2]:
        own = ops.gradient_precision(direction, problem, dtype, precision, device)
    if own and direction != "grad_bias" and (joint := joined(problem, dtype, own, device)):
        return [replace(one, joins=True) for one in selected(direction, joint.problem, dtype, precision, device)]
    if direction == FORWARD:
        own = arithmetic(problem, dtype, "", precision, device)
        picked = select(problem, dtype, own, device)
        return [Call(picked.name, problem, dtype, own, device)] if picked else []
    p = problem
    if direction == "grad_bias":
        p = ops.sum_problem(p.out_shape)
    named = ops.gradient_precision(direction, p, dtype, precision, device)
    if not named:
        return []
    rung = gradients.select(direction, p, dtype, device, precision=named)
    return [Call(rung.name, p, dtype, named, device)]


def fill(calls: list[AnyCall], cc: tuple, jobs: int) -> tuple[int, int]:
    """Compile in up to ``jobs`` processes; returns how many kernels the cache lacked and had.

    Raises OSError if it did not keep them."""
    needed = {(kernel.name, kernel.key): call for call in calls for kernel in call.kernels() if kernel.key}
    missing = [(call, name, key) for (name, key), call in needed.items() if not cache.holds(name, key, cc)]
    workers.run(_compile, [(*one, cc) for one in missing], jobs, f"kernels to compile: {len(missing)}")
    if lost := sum(not cache.holds(name, key, cc) for _, name, key in missing):
        raise OSError(f"{lost} of {len(missing)} compiled kernels were not kept in {cache.directory()}")
    return len(missing), len(needed) - len(missing)


def _compile(call: AnyCall, name: str, key: str, cc: tuple) -> None:
    next(kernel for kernel in call.kernels() if (kernel.name, kernel.key) == (name, key)).kept_ptx(cc)
