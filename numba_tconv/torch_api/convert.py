"""``convert``: the transposed convolutions of a finished model, computed by this package from then on.

A layer stays the object that it is; only its class changes, from torch's to this package's subclass of it. So all that
belongs to the object stays: parameters, which an optimizer may know already, buffers, hooks, training mode.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import cache

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from .freeze import Freezing, check_frozen_mode
from .freeze import freeze as freeze_layers
from .module import ConvTranspose1d


@dataclass(frozen=True)
class Conversion:
    """What ``convert`` did; ``str`` tells it in lines.

    ``replaced`` is the number of layers replaced, and so is ``int(conversion)``. ``left`` has the reason for each layer
    that was left, by its name in ``model.named_modules()``. ``freezing`` is the report of ``freeze``, where asked.
    """

    replaced: int
    left: dict[str, str] = field(default_factory=dict)
    freezing: Freezing | None = None

    def __int__(self) -> int:
        return self.replaced

    def __str__(self) -> str:
        lines = [f"{self.replaced} replaced, {len(self.left)} left"]
        lines += [f"{name or 'the model itself'}: {why}" for name, why in self.left.items()]
        return "\n".join(lines + ([str(self.freezing)] if self.freezing else []))


def convert(model: nn.Module, *, freeze: bool = False) -> Conversion:
    """Let this package compute every ``torch.nn.ConvTranspose1d`` in ``model``, in place.

    The layers stay the same objects, with the same parameters, so checkpoints load as before, whether saved before the
    conversion or after it. Shared layers stay shared; ``model`` may itself be a layer. Layers under
    ``torch.nn.utils.weight_norm`` or a parametrization are converted too. So are those of subclasses that leave
    ``forward`` to torch, or whose own calls ``super().forward`` and, say, crops its output; both keep their class's
    name and methods. What is left as it is, is reported with the reason: what has another ``forward`` of its own, lazy
    layers before their first call, layers of other families by the same name (scripted, quantized). Layers of this
    package are neither counted nor reported. What a model computes by calling
    ``torch.nn.functional.conv_transpose1d`` is not seen: ``routed`` is for such.

    Args:
        model: changed in place.
        freeze: whether ``numba_tconv.freeze`` is applied afterwards, for a model that is served.

    Returns:
        A Conversion: ``replaced``, a number, and ``left``, reasons by the names of ``model.named_modules()``.

    Raises:
        TypeError: ``model`` is no torch.nn.Module.
        RuntimeError: what ``freeze`` raises. Nothing was converted.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if freeze:
        check_frozen_mode(model)
    replaced, left = 0, {}
    for name, module in model.named_modules():
        if isinstance(module, ConvTranspose1d) or not _is_one(module):
            continue
        if reason := _obstacle(module):
            left[name] = reason
            continue
        try:
            module.__class__ = _class_for(module)
        except TypeError as error:  # of metaclasses or layouts that do not go together
            left[name] = f"its class {type(module).__qualname__} takes no other base: {error}"
            continue
        module.variant = module.precision = None
        replaced += 1
    return Conversion(replaced, left, freeze_layers(model) if freeze else None)


def _is_one(module: nn.Module) -> bool:
    """Whether it is torch's layer, or something else that goes by its name."""
    name = getattr(module, "original_name", type(module).__name__)  # the first is that of a scripted module
    return isinstance(module, nn.ConvTranspose1d) or name == nn.ConvTranspose1d.__name__


def _obstacle(module: nn.Module) -> str | None:
    """Why a layer has to stay what it is; None if it can be converted."""
    if not isinstance(module, nn.ConvTranspose1d):
        return f"it is no torch.nn.ConvTranspose1d but a {type(module).__module__}.{type(module).__qualname__}"
    if isinstance(module, LazyModuleMixin):
        return "it is lazy: convert it after its first call, when it knows its sizes"
    if "forward" in vars(module):
        return "its forward was replaced on the layer itself"
    if not _reaches_torchs_forward(type(module)):
        return f"its class {type(module).__qualname__} has a forward of its own, which does not call super().forward"
    if module.padding_mode != "zeros":
        return f"its padding_mode is {module.padding_mode!r}, which torch's layer refuses when it is called"
    if own := [name for name in ("variant", "precision") if hasattr(module, name)]:
        return f"it has an attribute {own[0]!r} of its own, which would mean something else here"
    return None


def _reaches_torchs_forward(cls: type) -> bool:
    """Whether ``forward`` is torch's, or calls ``super().forward`` down to torch's, which will be this package's."""
    for one in cls.__mro__:
        if one is nn.ConvTranspose1d:
            return True
        if own := vars(one).get("forward"):
            code = getattr(inspect.unwrap(own), "__code__", None)
            if code is None or not {"super", "forward"} <= set(code.co_names):
                return False
    return False


def _class_for(module: nn.Module) -> type:
    """The class of this package that takes the place of the layer's own."""
    cls = type(module)
    if not is_parametrized(module) or not vars(cls).keys() >= module.parametrizations.keys():
        return _counterpart(cls)
    # torch made this class for this layer: it holds the parametrized tensors' properties, and as its first base what
    # the layer becomes when they are removed. So it has to be made again over another base.
    kept = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__, tuple(map(_counterpart, cls.__bases__)), kept)


@cache
def _counterpart(cls: type) -> type:
    """Of torch's layer this package's; of a subclass one more, which finds our ``forward`` before torch's."""
    if cls is nn.ConvTranspose1d:
        return ConvTranspose1d
    return type(cls.__name__, (cls, _OfSubclass), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


class _OfSubclass(ConvTranspose1d):
    """A layer of somebody's subclass. Its class has the name of that subclass, which is made again when it is loaded or
    copied."""

    def __reduce_ex__(self, protocol):
        return _new, (type(self).__bases__[0],), self.__getstate__()


def _new(cls: type) -> nn.Module:
    made = _counterpart(cls)
    return made.__new__(made)
