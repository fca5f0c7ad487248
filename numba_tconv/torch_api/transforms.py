"""Derivatives in reverse mode, forward mode and under torch.func."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from . import fast_path as direct

_functions: dict[torch._ops.OpOverload, type[torch.autograd.Function]] = {}


def register(operator: torch._ops.OpOverload, backward: Callable, setup_context: Callable, jvp: Callable) -> None:
    """Register derivatives, as torch.autograd.Function defines them.

    ``jvp`` takes tangents (zeros without one) and arguments.
    """
    torch.library.register_autograd(operator, backward, setup_context=setup_context)
    direct.register(operator, backward, setup_context)

    class Applied(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments):
            return operator(*arguments)

        @staticmethod
        def setup_context(ctx, inputs, output):
            setup_context(ctx, inputs, output)
            ctx.save_for_forward(*(value if isinstance(value, torch.Tensor) else None for value in inputs))
            ctx.plain = [None if isinstance(value, torch.Tensor) else value for value in inputs]

        @staticmethod
        def backward(ctx, grad_output):
            return backward(ctx, grad_output)

        @staticmethod
        def jvp(ctx, *tangents):
            pairs = zip(ctx.saved_tensors, ctx.plain, strict=True)
            return jvp(tangents, [plain if tensor is None else tensor for tensor, plain in pairs])

    _functions[operator] = Applied


def apply(operator: torch._ops.OpOverload, *arguments):
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return _applied(operator, *arguments)
    if torch.compiler.is_dynamo_compiling():
        return operator(*arguments)
    return direct.route(operator, arguments)(*arguments)


def _applied(operator: torch._ops.OpOverload, *arguments):
    return _functions[operator].apply(*arguments)


# As torch.compiler.disable, which would import torch._dynamo: a Function with forward mode is not traceable.
_applied._torchdynamo_disable = True
