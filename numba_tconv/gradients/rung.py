"""The interface of a gradient's rung."""

from __future__ import annotations

from collections.abc import Callable

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.rung import Rung
from numba_tconv.runtime.device import Device
from numba_tconv.runtime.kernel import Kernel
from numba_tconv.runtime.layout import Layout

FEWEST_CHANNELS = 16  # of a group, and pairs of a channel and a phase or tap, for tensor cores


def too_few(channels: int) -> str:
    """Why a rung on tensor cores is not meant for a problem with so few channels."""
    return f"it is for at least {FEWEST_CHANNELS} channels a group, not {channels}: most of its products would be zeros"


class GradientRung(Rung):
    """One way to compute one of the three gradients. A subclass is named like its file or folder.

    ``problem`` is always that of the forward pass. A rung states its demands on GPU and precision as a ``Rung`` does.
    """

    of: str  # "grad_input", "grad_weight" or "grad_bias"
    tensor_cores = False  # whether it multiplies on tensor cores
    memory_bound = False  # whether memory is the limit, which tensor cores do not lift

    def config(self, problem: Problem, dtype: torch.dtype, device: Device | None = None, precision: str | None = None):
        """The compile-time choices for ``problem`` on ``device`` (None: an H200), equal for equal machine code.

        ``precision`` matters where a rung has several for a dtype; None is the fastest of them."""
        raise NotImplementedError

    def kernels(self, config) -> list[tuple[Kernel, int]]:
        """Every kernel that a run with ``config`` launches, with its dynamic shared memory in bytes."""
        raise NotImplementedError

    def run(self, *operands_result_problem, **choice) -> None:
        """Launch on torch's current stream: operands of any strides, the contiguous result, the problem. Nothing is
        checked.

        grad_input: (grad_output, weight, result, problem); grad_weight: (grad_output, x, result, problem); grad_bias:
        (grad_output, result, problem); then ``config`` and ``precision``, None by default. ``config`` must be of
        ``precision``. No operand may be empty."""
        tensors = [argument for argument in operands_result_problem if isinstance(argument, torch.Tensor)]
        rest = operands_result_problem[len(tensors) :]
        self.prepare(*map(Layout.of, tensors), *rest, **choice)(*tensors)

    def prepare(self, *layouts_problem, config=None, precision: str | None = None) -> Callable[..., None]:
        """Work out ``run`` for tensors of the given layouts: a function of the operands and the result.

        Arguments as for ``run``, with a Layout in place of each tensor."""
        raise NotImplementedError
