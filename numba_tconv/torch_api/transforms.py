"""Derivatives in reverse mode, forward mode and under torch.func."""

from collections.abc import Callable

import torch
from torch._C._functorch import TransformType
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

from . import fast_path as direct

_functions: dict[torch._ops.OpOverload, type[torch.autograd.Function]] = {}


def register(operator: torch._ops.OpOverload, backward: Callable, setup_context: Callable, jvp: Callable) -> None:
    """Register derivatives, as torch.autograd.Function defines them.

    ``jvp`` takes tangents (zeros without one) and arguments.
    """
    direct.register(operator, backward, setup_context)

    class Applied(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments):
            return operator(*arguments)

        @staticmethod
        def setup_context(ctx, inputs, output):
            setup_context(ctx, inputs, output)
            operands = [value for value in inputs[:2] if isinstance(value, torch.Tensor)]
            ctx.save_for_backward(*operands)  # vmap wants both alike
            ctx.save_for_forward(*operands)
            ctx.plain = [None if isinstance(value, torch.Tensor) else value for value in inputs[len(operands) :]]

        @staticmethod
        def backward(ctx, grad_output):
            return backward(ctx, grad_output)

        @staticmethod
        def jvp(ctx, *tangents):
            return jvp(tangents, [*ctx.saved_tensors, *ctx.plain])

    _functions[operator] = Applied


def apply(operator: torch._ops.OpOverload, *arguments):
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return _applied(operator, *arguments)
    if torch.compiler.is_dynamo_compiling():
        return operator(*arguments)
    return direct.route(operator, arguments)(*arguments)


def nests_forward_mode() -> bool:
    """Whether ``jvp`` would lose outer tangents."""
    return eager_transforms.JVP_NESTING > 1


def is_functionalized() -> bool:
    if torch.compiler.is_dynamo_compiling():
        return False
    return any(one.key() == TransformType.Functionalize for one in retrieve_all_functorch_interpreters())


def _applied(operator: torch._ops.OpOverload, *arguments):
    if nests_forward_mode():
        raise NotImplementedError(f"{operator} has no forward mode inside forward mode: use reverse mode for one")
    return _functions[operator].apply(*arguments)


# As torch.compiler.disable, which would import torch._dynamo: a Function with forward mode is not traceable.
_applied._torchdynamo_disable = True
