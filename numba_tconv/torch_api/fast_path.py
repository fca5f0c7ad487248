"""Calls of the operators that go around torch's dispatcher, where all it would do is to find the implementation.

The dispatcher's way to an operator in Python costs tens of microseconds on the host, and with a gradient a hundred:
more than a small problem takes on the GPU. So ``is_clear`` looks for what gives the dispatcher anything else to do:
modes and transforms, a trace, tensors that are more than memory, a profiler that wants the operator's name. Where there
is nothing, the implementation is called as it is, or, where a gradient is wanted, as a torch.autograd.Function: by
``route``, or as a ``Call``, which functional.py remembers, so that one look-up finds all that an earlier call found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from operator import or_
from typing import NamedTuple

import torch
from torch._C import _are_functorch_transforms_active as functorch_is_active
from torch._C import _dispatch_keys as keys_of
from torch._C import _dispatch_tls_is_dispatch_key_excluded as is_excluded
from torch._C import _dispatch_tls_local_include_set as included
from torch._C import _len_torch_function_stack as functions_that_override
from torch.autograd import _profiler_enabled as is_profiled
from torch.autograd import forward_ad
from torch.nn.parameter import Parameter


@dataclass
class _Ways:
    """Around the dispatcher to one operator: its implementation by device, and the Function of them."""

    implementations: dict[str, Callable] = field(default_factory=dict)
    differentiable: Callable | None = None
    setup_context: Callable | None = None


_ways: defaultdict[torch._ops.OpOverload, _Ways] = defaultdict(_Ways)


# The key by which routed.py gets one operator: torch's own operators know it and none of them uses it.
ROUTED_NAME = "TESTING_ONLY_GenericMode"


def _bits(*names: str) -> int:
    keys = (torch._C.DispatchKeySet(torch._C._dispatch_key_parse(name)) for name in names)
    return reduce(or_, (key.raw_repr() for key in keys))


# Where the dispatcher stops on the way to the implementation, or passes without stopping, for memory of a CPU or a GPU.
# A bit beside these is an operation between: a trace, a mode, a negation not yet done, zeros without memory, ...
USUAL = _bits(
    *("CPU", "AutogradCPU", "AutocastCPU", "CUDA", "AutogradCUDA", "AutocastCUDA"),
    *("ADInplaceOrView", "BackendSelect", ROUTED_NAME),
)
UNUSUAL = ~USUAL
AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
PLAIN = (torch.Tensor, Parameter)  # no subclass: it may have a __torch_function__
NUMBERS = (int, str)


def implementation(operator: torch._ops.OpOverload, device: str) -> Callable:
    """A decorator: what computes ``operator`` on ``device``, with and without the dispatcher."""

    def register(function: Callable) -> Callable:
        torch.library.impl(operator.name(), device, function)
        _ways[operator].implementations[device] = function
        return function

    return register


class Call(NamedTuple):
    """A call of an operator, but for its tensors, which are its first arguments."""

    compute: Callable[..., torch.Tensor]  # the result, of the tensors
    keep: Callable[..., None]  # for the backward pass, of its context and the tensors
    record: Callable[..., torch.Tensor]  # the result and how it came about, of the tensors and this

    def __call__(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        """The result for tensors that are clear."""
        if torch.is_grad_enabled() and wants_gradient(*tensors):  # the first, alone, is the sooner answered
            return self.record(*tensors, self)
        return self.compute(*tensors)


def call(operator: torch._ops.OpOverload, compute: Callable, keep: Callable) -> Call:
    """A call of ``operator``, which is registered."""
    return Call(compute, keep, _ways[operator].differentiable)


def register(operator: torch._ops.OpOverload, backward: Callable, setup_context: Callable) -> None:
    """Make ``operator`` differentiable without the dispatcher; the functions are those of torch.library, but that
    ``setup_context`` is told no output."""

    count = _tensors(operator)

    def forward(ctx, *arguments):
        *tensors, call = arguments
        output = call.compute(*tensors)
        call.keep(ctx, *tensors)
        return output

    def gradients(ctx, grad_output):
        return *backward(ctx, grad_output)[:count], None

    methods = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
    function = type(operator._opname, (torch.autograd.Function,), methods)
    # Beneath what Function.apply does for functorch, whose transforms are not active and whose tensors are not plain.
    _ways[operator].differentiable = super(torch.autograd.Function, function).apply
    _ways[operator].setup_context = setup_context


def is_clear(first: torch.Tensor, second: torch.Tensor | None = None, third: torch.Tensor | None = None) -> bool:
    """Whether an operator of these tensors has only to be computed and, where a gradient is wanted, recorded: nothing
    else is active in torch, and the dispatcher would find the implementation for them and do no more."""
    if (
        forward_ad._current_level >= 0
        or functorch_is_active()
        or included().raw_repr() & UNUSUAL
        or functions_that_override()
        or is_profiled()
        # Inside of another operator's implementation torch records nothing.
        or (torch.is_grad_enabled() and is_excluded(AUTOGRAD))
    ):
        return False
    # Of a call's few microseconds these are one: written out, since a loop would double it.
    return (
        type(first) in PLAIN
        and not keys_of(first).raw_repr() & UNUSUAL
        and (second is None or (type(second) in PLAIN and not keys_of(second).raw_repr() & UNUSUAL))
        and (third is None or (type(third) in PLAIN and not keys_of(third).raw_repr() & UNUSUAL))
    )


def wants_gradient(first: torch.Tensor, second: torch.Tensor | None = None, third: torch.Tensor | None = None) -> bool:
    """Whether torch records an operator of these tensors."""
    return torch.is_grad_enabled() and (
        first.requires_grad
        or (second is not None and second.requires_grad)
        or (third is not None and third.requires_grad)
    )


def route(operator: torch._ops.OpOverload, arguments: tuple) -> Callable:
    """What to call with ``arguments``, of which the first is a tensor: the implementation of ``operator``, the Function
    of it, or ``operator`` itself."""
    ways = _ways.get(operator)
    count = _tensors(operator) if ways else 0
    tensors, others = arguments[:count], arguments[count:]
    if not ways or not is_clear(*tensors) or any(type(value) not in NUMBERS for value in others):
        return operator
    implementation = ways.implementations[tensors[0].device.type]
    if not wants_gradient(*tensors):
        return implementation

    def compute(*tensors):
        return implementation(*tensors, *others)

    def keep(ctx, *tensors):
        ways.setup_context(ctx, (*tensors, *others), None)

    return lambda *_: call(operator, compute, keep)(*tensors)


@cache
def _tensors(operator: torch._ops.OpOverload) -> int:
    """How many of its arguments are tensors: they are the first ones."""
    return sum("Tensor" in str(argument.type) for argument in operator._schema.arguments)


# The key of ``routed``

_ROUTED = torch._C._dispatch_key_parse(ROUTED_NAME)
is_routed = partial(torch._C._dispatch_tls_is_dispatch_key_included, _ROUTED)  # whether this thread's set has the key
set_routed = partial(torch._C._dispatch_tls_set_dispatch_key_included, _ROUTED)  # put it there, or take it out


def pass_routed_key() -> None:
    """Let torch's operators of higher order pass the key, too: those there are, and those to come."""
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_ROUTED)
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(_ROUTED)
