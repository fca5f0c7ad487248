"""Calls that skip torch's dispatcher, which costs more than a small problem.

Where ``is_clear``, the implementation or its torch.autograd.Function is called.
"""

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
    implementations: dict[str, Callable] = field(default_factory=dict)
    differentiable: Callable | None = None
    setup_context: Callable | None = None


_ways: defaultdict[torch._ops.OpOverload, _Ways] = defaultdict(_Ways)


# routed.py's key, unused by torch's operators.
ROUTED_NAME = "TESTING_ONLY_GenericMode"


def _bits(*names: str) -> int:
    keys = (torch._C.DispatchKeySet(torch._C._dispatch_key_parse(name)) for name in names)
    return reduce(or_, (key.raw_repr() for key in keys))


# Other keys mean a trace, a mode, a pending negation or zeros without memory.
USUAL = _bits(
    *("CPU", "AutogradCPU", "AutocastCPU", "CUDA", "AutogradCUDA", "AutocastCUDA"),
    *("ADInplaceOrView", "BackendSelect", ROUTED_NAME),
)
UNUSUAL = ~USUAL
AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
PLAIN = (torch.Tensor, Parameter)  # others may have a __torch_function__
NUMBERS = (int, str)


def implementation(operator: torch._ops.OpOverload, device: str) -> Callable:
    """Decorator: register a function as ``operator`` on ``device``."""

    def register(function: Callable) -> Callable:
        torch.library.impl(operator.name(), device, function)
        _ways[operator].implementations[device] = function
        return function

    return register


class Call(NamedTuple):
    """A call that lacks only its tensors."""

    compute: Callable[..., torch.Tensor]  # tensors -> result
    keep: Callable[..., None]  # (context, *tensors): save for the backward pass
    record: Callable[..., torch.Tensor]  # (*tensors, call) -> recorded result

    def __call__(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        if torch.is_grad_enabled() and wants_gradient(*tensors):  # the first is faster
            return self.record(*tensors, self)
        return self.compute(*tensors)


def call(operator: torch._ops.OpOverload, compute: Callable, keep: Callable) -> Call:
    return Call(compute, keep, _ways[operator].differentiable)


def register(operator: torch._ops.OpOverload, backward: Callable, setup_context: Callable) -> None:
    """Make ``operator`` differentiable; ``setup_context`` gets None as output."""

    count, nothing = _tensors(operator), (None,) * len(operator._schema.arguments)

    def setup(ctx, inputs, output):
        setup_context(ctx, inputs, output)
        ctx.set_materialize_grads(False)

    def defined(ctx, grad_output):
        return nothing if grad_output is None else backward(ctx, grad_output)

    torch.library.register_autograd(operator, defined, setup_context=setup)

    def forward(ctx, *arguments):
        *tensors, call = arguments
        output = call.compute(*tensors)
        call.keep(ctx, *tensors)
        ctx.set_materialize_grads(False)
        return output

    def gradients(ctx, grad_output):
        return *defined(ctx, grad_output)[:count], None

    methods = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
    function = type(operator._opname, (torch.autograd.Function,), methods)
    # Function.apply without functorch.
    _ways[operator].differentiable = super(torch.autograd.Function, function).apply
    _ways[operator].setup_context = setup_context


def is_clear(
    first: torch.Tensor,
    second: torch.Tensor | None = None,
    third: torch.Tensor | None = None,
    fourth: torch.Tensor | None = None,
    fifth: torch.Tensor | None = None,
) -> bool:
    """Whether the dispatcher would only compute and record a gradient."""
    if (
        forward_ad._current_level >= 0
        or functorch_is_active()
        or included().raw_repr() & UNUSUAL
        or functions_that_override()
        or is_profiled()
        # Inside another operator nothing is recorded.
        or (torch.is_grad_enabled() and is_excluded(AUTOGRAD))
    ):
        return False
    return (
        type(first) in PLAIN
        and not keys_of(first).raw_repr() & UNUSUAL
        and (second is None or (type(second) in PLAIN and not keys_of(second).raw_repr() & UNUSUAL))
        and (third is None or (type(third) in PLAIN and not keys_of(third).raw_repr() & UNUSUAL))
        and (fourth is None or (type(fourth) in PLAIN and not keys_of(fourth).raw_repr() & UNUSUAL))
        and (fifth is None or (type(fifth) in PLAIN and not keys_of(fifth).raw_repr() & UNUSUAL))
    )


def wants_gradient(
    first: torch.Tensor,
    second: torch.Tensor | None = None,
    third: torch.Tensor | None = None,
    fourth: torch.Tensor | None = None,
    fifth: torch.Tensor | None = None,
) -> bool:
    return torch.is_grad_enabled() and (
        first.requires_grad
        or (second is not None and second.requires_grad)
        or (third is not None and third.requires_grad)
        or (fourth is not None and fourth.requires_grad)
        or (fifth is not None and fifth.requires_grad)
    )


def route(operator: torch._ops.OpOverload, arguments: tuple) -> Callable:
    """The shortest way to compute ``operator``: an implementation, its Function, or the operator itself."""
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
    return sum("Tensor" in str(argument.type) for argument in operator._schema.arguments)


# The key of ``routed``

_ROUTED = torch._C._dispatch_key_parse(ROUTED_NAME)
is_routed = partial(torch._C._dispatch_tls_is_dispatch_key_included, _ROUTED)  # in this thread
set_routed = partial(torch._C._dispatch_tls_set_dispatch_key_included, _ROUTED)


def pass_routed_key() -> None:
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_ROUTED)
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(_ROUTED)
