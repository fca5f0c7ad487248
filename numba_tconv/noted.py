"""The transposed convolutions that a function computes, found by a call that computes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from . import ops
from .functional import PRECISIONS, default_precision
from .problem import Problem


class Noted(NamedTuple):
    """A call: ``variant`` and ``precision`` are those of the operator (ops.py), as this package would compute it."""

    problem: Problem
    dtype: torch.dtype
    variant: str
    precision: str


def transposed_convolutions(function: Callable, *arguments, **keywords) -> list[Noted]:
    """Those of ``function(*arguments, **keywords)``, each once, by torch's operator or by this package's; of one
    dimension, and of dtypes that this package has. It is called on fake tensors, which have sizes and no values.

    Raises:
        RuntimeError: the function asks for values of tensors, or refuses its arguments; or it is a module, or a method
            of one, with lazy parameters, which such a call would initialise.
    """
    owner = getattr(function, "__self__", function)
    modules = owner.modules() if isinstance(owner, nn.Module) else ()
    modules = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]  # which keep nothing
    if lazy := [name for module in modules for name, one in module.named_parameters(recurse=False) if is_lazy(one)]:
        raise RuntimeError(f"{lazy[0]} is lazy: its sizes are known after the first call of the model")
    mode = detect_fake_mode((arguments, keywords)) or FakeTensorMode(allow_non_fake_inputs=True)
    arguments, keywords = tree_map_only(torch.Tensor, mode.from_tensor, (arguments, keywords))
    # In inference mode operators that are made of others are not taken apart.
    with _as_if_not_called(modules, mode), torch.inference_mode(False), torch.no_grad(), mode, _Noting() as noting:
        function(*arguments, **keywords)
    return list(dict.fromkeys(noting.found))


@contextlib.contextmanager
def _as_if_not_called(modules: list[nn.Module], mode: FakeTensorMode) -> Iterator[None]:
    """The modules have fake parameters and buffers, and none is left behind: nor as the cast of a parameter that
    autocast keeps, or an attribute that the call sets of a module."""
    kept = torch.is_autocast_cache_enabled()
    places = [one for module in modules for one in (vars(module), module._parameters, module._buffers)]
    before = [dict(place) for place in places]
    torch.set_autocast_cache_enabled(False)
    try:
        for place in places:
            place.update({name: mode.from_tensor(one) for name, one in place.items() if isinstance(one, torch.Tensor)})
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)
        for place, then in zip(places, before, strict=True):
            place.clear()
            place.update(then)


class _Noting(TorchDispatchMode):
    """Sees what is left of a call when autocast and all that wraps tensors are done with it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))  # which raises what torch raises
        if func is ops.conv_transpose1d:
            x, weight, bias, *parameters, variant, precision = args
            self._note(x, weight, bias, parameters, variant, precision)
        elif func is torch.ops.aten.convolution.default:
            x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
            if transposed and x.dim() == 3 and x.dtype in PRECISIONS:
                parameters = stride[0], padding[0], output_padding[0], groups, dilation[0]
                self._note(x, weight, bias, parameters, "", default_precision(x.dtype))
        return result

    def _note(self, x, weight, bias, parameters, variant, precision):
        if x.size(0) and weight.size(1):  # torch computes the others, which are empty
            problem = ops.check(x, weight, bias, *parameters)
            self.found.append(Noted(problem, x.dtype, variant, precision))
