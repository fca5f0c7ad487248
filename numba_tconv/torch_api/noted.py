"""Finds a function's transposed convolutions, activations and steps without computing them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from numba_tconv.formula.alias_free import AliasFree
from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.formula.problem import Problem

from . import alias_free_operators as activations
from . import gradient_operators as grad_ops
from . import operators as ops
from . import streaming
from .functional import default_precision

MOST_VALUES = 1024  # of a readable integer buffer


class Noted(NamedTuple):
    """A call; ``variant`` and ``precision`` as in operators.py."""

    problem: Problem
    dtype: torch.dtype
    variant: str
    precision: str


class NotedActivation(NamedTuple):
    """An activation's call; ``tied``: beta is alpha."""

    sizes: AliasFree
    dtype: torch.dtype
    activation: str
    log_scale: bool
    tied: bool


class NotedStep(NamedTuple):
    """A step's call."""

    problem: Problem
    dtype: torch.dtype
    precision: str


AnyNoted = Noted | NotedActivation | NotedStep


def transposed_convolutions(function: Callable, *arguments, **keywords) -> list[Noted]:
    return [one for one in computations(function, *arguments, **keywords) if isinstance(one, Noted)]


def computations(function: Callable, *arguments, **keywords) -> list[AnyNoted]:
    """The transposed convolutions (torch's too), activations and steps that ``function`` computes, each once.

    It is called with fake tensors. Raises RuntimeError if it asks for values, refuses its arguments, or has lazy
    parameters.
    """
    owner = getattr(function, "__self__", function)
    modules = owner.modules() if isinstance(owner, nn.Module) else ()
    modules = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    if lazy := [name for module in modules for name, one in module.named_parameters(recurse=False) if is_lazy(one)]:
        raise RuntimeError(f"{lazy[0]} is lazy: its sizes are known after the first call of the model")
    mode = detect_fake_mode((arguments, keywords)) or FakeTensorMode(allow_non_fake_inputs=True)
    arguments, keywords = tree_map_only(torch.Tensor, mode.from_tensor, (arguments, keywords))
    # Inference mode hides composite operators' parts.
    plain = torch.inference_mode(False)
    before = activations.as_on_a_gpu.set(True)
    try:
        with plain, torch.no_grad(), _as_if_not_called(modules, mode) as real, mode, _Noting(real) as noting:
            function(*arguments, **keywords)
    finally:
        activations.as_on_a_gpu.reset(before)
    return list(dict.fromkeys(noting.found))


@contextlib.contextmanager
def _as_if_not_called(modules: list[nn.Module], mode: FakeTensorMode) -> Iterator[list[torch.Tensor]]:
    """Give modules fake tensors; yield copies of small integer buffers."""
    real = {}

    def stand_in(one):
        if not isinstance(one, nn.Parameter) and _has_values(one):
            return real.setdefault(id(one), one.clone())
        return mode.from_tensor(one)

    kept = torch.is_autocast_cache_enabled()
    places = [one for m in modules for one in (vars(m), m._parameters, m._buffers, m._modules)]
    before = [dict(place) for place in places]
    torch.set_autocast_cache_enabled(False)
    try:
        for place in places:
            place.update({name: stand_in(one) for name, one in place.items() if isinstance(one, torch.Tensor)})
        yield [*real.values()]
    finally:
        torch.set_autocast_cache_enabled(kept)
        for place, then in zip(places, before, strict=True):
            place.clear()
            place.update(then)


def _has_values(one: torch.Tensor) -> bool:
    fake = isinstance(one, FakeTensor) or one.is_meta
    return not (fake or one.is_floating_point() or one.is_complex()) and one.numel() <= MOST_VALUES


class _Noting(TorchDispatchMode):
    """Sees operators below autocast; computes those on small integer tensors; undoes writes but to ``real``."""

    def __init__(self, real: list[torch.Tensor]):
        super().__init__()
        self.found, self.real = [], {id(one): one for one in real}  # kept: ids stay unique
        self.written = []

    def __exit__(self, *error):
        super().__exit__(*error)
        with unset_fake_temporarily():
            for one, before in reversed(self.written):
                one.copy_(before)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        may_read = not func._schema.is_mutable
        if tensors and all(id(one) in self.real or (may_read and _has_values(one)) for one in tensors):
            with unset_fake_temporarily():
                result = func(*args, **(kwargs or {}))
            made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor) and one.numel() <= MOST_VALUES]
            self.real |= {id(one): one for one in made}
            return result
        if func._schema.is_mutable and not any(isinstance(one, FakeTensor) for one in tensors):
            with unset_fake_temporarily():
                self.written += [(one, one.clone()) for one in tensors]
        result = func(*args, **(kwargs or {}))
        if func is ops.conv_transpose1d:
            given = grad_ops.Arguments(*args)
            self._note(*given[:3], given.parameters, given.variant, given.precision)
        elif func is activations.alias_free_activation:
            tensors, form = activations.named(args)
            sizes, tied = activations.check(tensors, form), tensors.beta is None
            self.found.append(NotedActivation(sizes, tensors.x.dtype, form.activation, form.log_scale, tied))
        elif func is streaming._operator:
            *given, precision = args
            problem = streaming._problem(*given)
            if problem.batch:
                self.found.append(NotedStep(problem, args[0].dtype, precision))
        elif func is torch.ops.aten.convolution.default:
            x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
            if transposed:
                self._note_torchs(x, weight, bias, stride, padding, output_padding, groups, dilation)
        elif func is torch.ops.aten.conv_transpose1d.default:
            self._note_torchs(*args, **(kwargs or {}))
        return result

    def _note_torchs(
        self, x, weight, bias=None, stride=(1,), padding=(0,), output_padding=(0,), groups=1, dilation=(1,)
    ):
        x = x if weight.dim() == x.dim() else x[None]
        if x.dim() == 3 and x.dtype in PRECISIONS:
            parameters = stride[0], padding[0], output_padding[0], groups, dilation[0]
            self._note(x, weight, bias, parameters, "", default_precision(x.dtype))

    def _note(self, x, weight, bias, parameters, variant, precision):
        if x.size(0) and weight.size(1):  # torch computes empty ones
            problem = ops.check(x, weight, bias, *parameters)
            self.found.append(Noted(problem, x.dtype, variant, precision))
