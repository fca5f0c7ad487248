"""Calls of the operators that go around torch's dispatcher, where all it would do is to find the implementation.

The dispatcher's way to an operator in Python costs tens of microseconds on the host, and with a gradient a hundred:
more than a small problem takes on the GPU. So ``route`` looks for what gives the dispatcher anything else to do: modes
and transforms, a trace, tensors that are more than memory, a profiler that wants the operator's name. Where there is
nothing, the implementation is called as it is, or, where a gradient is wanted, as a torch.autograd.Function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

import torch
from torch.nn.parameter import Parameter


@dataclass
class _Ways:
    """Around the dispatcher to one operator: its implementation by device, and the Function of them."""

    implementations: dict[str, Callable] = field(default_factory=dict)
    differentiable: Callable | None = None


_ways: defaultdict[torch._ops.OpOverload, _Ways] = defaultdict(_Ways)


def _bits(*names: str) -> int:
    keys = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names)
    return reduce(or_, (key.raw_repr() for key in keys))


# Where the dispatcher stops on the way to the implementation, or passes without stopping, for memory of a CPU or a GPU.
# A bit beside these is an operation between: a trace, a mode, a negation not yet done, zeros without memory, ...
USUAL = _bits(
    *("CPU", "AutogradCPU", "AutocastCPU", "CUDA", "AutogradCUDA", "AutocastCUDA"),
    *("ADInplaceOrView", "BackendSelect"),
)
AUTOGRAD = _bits("AutogradCPU") & _bits("AutogradCUDA")
PLAIN = (torch.Tensor, Parameter)  # no subclass: it may have a __torch_function__
NUMBERS = (int, str, type(None))


def implementation(operator: torch._ops.OpOverload, device: str) -> Callable:
    """A decorator: what computes ``operator`` on ``device``, with and without the dispatcher."""

    def register(function: Callable) -> Callable:
        torch.library.impl(operator.name(), device, function)
        _ways[operator].implementations[device] = function
        return function

    return register


def register(operator: torch._ops.OpOverload, backward: Callable, setup_context: Callable) -> None:
    """Make ``operator`` differentiable without the dispatcher; the functions are those of torch.library."""
    implementations = _ways[operator].implementations

    def forward(ctx, *arguments):
        output = implementations[arguments[0].device.type](*arguments)
        setup_context(ctx, arguments, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(operator._opname, (torch.autograd.Function,), methods)
    # Beneath what Function.apply does for functorch, whose transforms are not active and whose tensors are not plain.
    _ways[operator].differentiable = super(torch.autograd.Function, function).apply


def route(operator: torch._ops.OpOverload, arguments: tuple) -> Callable:
    """What to call with ``arguments``, of which the first is a tensor and only the first three may be tensors: the
    implementation of ``operator``, the Function of it, or ``operator`` itself."""
    ways = _ways.get(operator)
    if (
        ways is None
        or torch._C._dispatch_tls_local_include_set().raw_repr() & ~USUAL
        or torch._C._len_torch_function_stack()
        or torch.autograd._profiler_enabled()
    ):
        return operator
    wants_gradient = False
    for value in arguments[:3]:
        kind = type(value)
        if kind in PLAIN:
            if torch._C._dispatch_keys(value).raw_repr() & ~USUAL:
                return operator
            wants_gradient = wants_gradient or value.requires_grad
        elif kind not in NUMBERS:
            return operator
    if not (wants_gradient and torch.is_grad_enabled()):
        return ways.implementations[arguments[0].device.type]
    # Inside of another operator's implementation torch records nothing.
    excluded = torch._C._dispatch_tls_local_exclude_set().raw_repr()
    return operator if excluded & AUTOGRAD else ways.differentiable
