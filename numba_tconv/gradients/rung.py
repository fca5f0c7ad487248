"""The interface of gradient rungs."""

from collections.abc import Callable

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.rung import Rung
from numba_tconv.runtime.device import Device
from numba_tconv.runtime.layout import Layout

FEWEST_CHANNELS = 16  # of a group (or pairs with a phase or tap) that tensor cores need


def too_few(channels: int) -> str:
    return f"it is for at least {FEWEST_CHANNELS} channels a group, not {channels}: most of its products would be zeros"


class GradientRung(Rung):
    """Computes a gradient; ``problem`` is the forward pass's."""

    of: str  # "grad_input", "grad_weight" or "grad_bias"
    tensor_cores = False
    memory_bound = False  # tensor cores do not help

    def config(self, problem: Problem, dtype: torch.dtype, device: Device | None = None, precision: str | None = None):
        """Compile-time choices on ``device`` (None: the H200), equal for equal machine code. ``precision`` None: the
        dtype's fastest."""
        raise NotImplementedError

    def config_on(self, device: Device, problem: Problem, dtype: torch.dtype, precision: str):
        return self.config(problem, dtype, device=device, precision=precision)

    def run(self, *operands_result_problem, **choice) -> None:
        """Launch on torch's current stream, unchecked; ``config`` and ``precision``, None by default, agree.

        grad_input: (grad_output, weight, result, problem); grad_weight: (grad_output, x, result, problem); grad_bias:
        (grad_output, result, problem). Operands have any strides, none is empty; the result is contiguous."""
        tensors = [argument for argument in operands_result_problem if isinstance(argument, torch.Tensor)]
        (problem, *config) = operands_result_problem[len(tensors) :]
        self.prepare(*map(Layout.of, tensors), problem, *config, **choice)(*tensors)

    def prepare(self, *layouts_problem, config=None, precision: str | None = None) -> Callable[..., None]:
        """``run`` for Layouts: a function of operands and result."""
        raise NotImplementedError
