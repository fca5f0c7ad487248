"""grad_input_planes: a transposed convolution on the forward rungs.

On planes (gradients/planes.py) it has stride 1, pairs of an output channel and a phase as channels, and a row's taps
reversed. With stride 1 grad_output is its own plane."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients import planes
from numba_tconv.gradients.rung import FEWEST_CHANNELS, GradientRung, too_few
from numba_tconv.kernels.common.tensor_core.rung import default_precision
from numba_tconv.kernels.k5_dmma.kernel import DoubleMatrix
from numba_tconv.kernels.k5_mma.kernel import WarpMatrix
from numba_tconv.kernels.k6_wgmma.kernel import WarpgroupMatrix
from numba_tconv.kernels.rung import Rung, Step
from numba_tconv.runtime import device as gpu
from numba_tconv.runtime.layout import NO_GPU, Layout

FORWARD: tuple[Rung, ...] = (WarpgroupMatrix(), WarpMatrix(), DoubleMatrix())  # by preference

MOST_WEIGHTS = 1 << 20  # for 16 bits and few phases: calls reorder weights


def reads_grad_output(problem: Problem) -> bool:
    p = problem
    return p.stride == 1 and p.output_padding == 0 and p.padding <= p.dilation * (p.kernel_size - 1)


@lru_cache(maxsize=1024)
def adjoint(problem: Problem) -> Problem:
    """The transposed convolution whose output is grad_input."""
    p, t = problem, problem.taps
    exchanged = dict(out_channels=p.in_channels, stride=1, output_padding=0, bias=False)
    if reads_grad_output(p):
        padding = p.dilation * (p.kernel_size - 1) - p.padding
        return replace(p, in_channels=p.out_channels, length=p.out_length, padding=padding, **exchanged)
    channels = p.out_channels * min(t.rows, p.kernel_size)
    sizes = dict(kernel_size=t.taps_per_row, dilation=t.step, padding=(t.taps_per_row - 1) * t.step)
    return replace(p, in_channels=channels, length=planes.columns_of(p), **sizes, **exchanged)


def adjoint_weight(weight: torch.Tensor, problem: Problem) -> torch.Tensor:
    """``adjoint``'s weight (C_out * phases, C_in/groups, taps of a row), zeros for missing taps."""
    p, t = problem, problem.taps
    phases = min(t.rows, p.kernel_size)
    missing = phases * t.taps_per_row - p.kernel_size
    padded = torch.nn.functional.pad(weight, (0, missing)) if missing else weight
    taps = padded.reshape(p.groups, p.in_channels_per_group, p.out_channels_per_group, t.taps_per_row, phases)
    exchanged = taps.flip(3).permute(0, 2, 4, 1, 3)
    return exchanged.reshape(p.out_channels * phases, p.in_channels_per_group, t.taps_per_row)


class Config(NamedTuple):
    planes: planes.Config | None  # None: read in place
    rung: str
    of_rung: object


class InputPlanes(GradientRung):
    name = "grad_input_planes"
    of = "grad_input"
    tensor_cores = True
    idea = "a transposed convolution again, of stride 1: the forward pass's tensor-core rungs on phases taken apart"
    minimum_cc = WarpMatrix.minimum_cc

    def supports(self, problem, dtype, precision):
        if not reads_grad_output(problem) and (reason := planes.refusal(problem, dtype)):
            return reason
        _, *anywhere = (rung.supports(adjoint(problem), dtype, precision) for rung in FORWARD)
        return None if None in anywhere else anywhere[0]

    def unsuited(self, problem, dtype, precision, device):
        p = adjoint(problem)
        fewest = min(p.in_channels_per_group, p.out_channels_per_group)
        if fewest < FEWEST_CHANNELS:
            return too_few(fewest)
        weights = problem.in_channels * problem.out_channels_per_group * problem.kernel_size
        phases = min(problem.taps.rows, problem.kernel_size)
        if dtype == torch.float64 and not reads_grad_output(problem) and problem.kernel_size % phases:
            return "in fp64 it is for phases of equally many taps: zeros in the place of others would meet infinities"
        few_phases = not (reads_grad_output(problem) or planes.make_config(problem, dtype).transposed)
        if dtype.itemsize == 2 and weights > MOST_WEIGHTS and few_phases:
            return f"with 16-bit elements it is for at most {MOST_WEIGHTS:,} weights, not {weights:,}: torch is faster"
        return None

    def forward_rung(self, problem, dtype, precision, device) -> Rung:
        able = [r for r in FORWARD if r.refusal(adjoint(problem), dtype, precision, device) is None]
        return next((r for r in able if not r.unsuited(adjoint(problem), dtype, precision, device)), able[-1])

    def config(self, problem, dtype, device=None, precision=None):
        """Assumes a contiguous grad_output."""
        precision, device = precision or _precision_of(dtype), device or gpu.H200
        rung = self.forward_rung(problem, dtype, precision, device)
        planes_config = None if reads_grad_output(problem) else planes.make_config(problem, dtype)
        p = adjoint(problem)
        pitch = planes.pitch_of(problem, dtype) if planes_config else p.length
        x = Layout(p.in_shape, (p.in_channels * pitch, pitch, 1), dtype, NO_GPU, 0)
        return Config(planes_config, rung.name, rung.config_of(x, p, precision, device))

    def steps(self, config, problem, device=gpu.H200):
        apart = [] if config.planes is None else [Step("planes", planes.make_kernel(config.planes))]
        forward = _forward(config.rung).steps(config.of_rung, adjoint(problem), device)
        return [*apart, *forward]

    def prepare(self, grad_output, weight, result, problem, config=None, precision=None):
        precision = precision or _precision_of(result.dtype)
        if config:
            rung, of_rung = _forward(config.rung), config.of_rung
        else:  # the input's address counts
            rung, of_rung = self.forward_rung(problem, result.dtype, precision, gpu.of(result.index)), None
        p, in_place, where, launch = adjoint(problem), reads_grad_output(problem), result, None

        def fill(grad_output, weight, result):
            nonlocal launch
            x = grad_output if in_place else planes.make_planes(grad_output, problem)
            w = adjoint_weight(weight, problem)
            if launch is None:
                launch = rung.prepare(Layout.of(x), Layout.of(w), None, where, p, of_rung, precision)
            launch(x, w, None, result)

        return fill


def _precision_of(dtype: torch.dtype) -> str:
    return "fp64" if dtype == torch.float64 else default_precision(dtype)


def _forward(name: str) -> Rung:
    return next(rung for rung in FORWARD if rung.name == name)
