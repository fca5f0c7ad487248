"""``convert``: let this package compute the transposed convolutions and alias-free activations of a finished model.

Only a layer's class changes, and the padding of one whose output is cropped. Parameters, buffers, hooks and training
mode stay, and an optimizer keeps its references.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from numba_tconv.torch_api.alias_free import AliasFreeActivation
from numba_tconv.torch_api.freeze import Freezing, check_frozen_mode
from numba_tconv.torch_api.freeze import freeze as freeze_layers
from numba_tconv.torch_api.module import ConvTranspose1d

from . import activations, cropping


@dataclass(frozen=True)
class Conversion:
    """Report of ``convert``; ``str`` gives it as text.

    ``replaced`` counts the replaced ConvTranspose1d; ``int(conversion)`` returns it. ``activations`` counts the
    replaced alias-free activations, ``cropping`` the modules whose crop became their layer's padding. ``left`` maps
    each of these modules that was left as it was, by its name in ``model.named_modules()``, to the reason. ``freezing``
    is the report of ``freeze``, or None.
    """

    replaced: int
    left: dict[str, str] = field(default_factory=dict)
    freezing: Freezing | None = None
    activations: int = 0
    cropping: int = 0

    def __int__(self) -> int:
        return self.replaced

    def __str__(self) -> str:
        both = f"{self.replaced} layers and {self.activations} activations" if self.activations else self.replaced
        cropping = f", {self.cropping} of them with their crop" if self.cropping else ""
        lines = [f"{both} replaced{cropping}, {len(self.left)} left"]
        lines += [f"{name or 'the model itself'}: {why}" for name, why in self.left.items()]
        return "\n".join(lines + ([str(self.freezing)] if self.freezing else []))


def convert(model: nn.Module, *, freeze: bool = False) -> Conversion:
    """Let this package compute every ConvTranspose1d and alias-free activation in ``model``, in place.

    Layers stay the same objects with the same parameters, so older checkpoints load.

    * Converted: torch's layers, also under ``torch.nn.utils.weight_norm`` or a parametrization, and subclasses that
      inherit torch's ``forward`` or call ``super().forward``. They keep their class's name and methods.
    * Left, with the reason: layers with any other ``forward``, lazy layers before their first call, and other layers of
      that name (scripted, quantized).
    * Alias-free activations (NVIDIA's and alias-free-torch's ``Activation1d``, transformers'): modules with children
      ``act``, ``upsample`` and ``downsample`` and their filters, if ``alias_free_activation`` gives the same numbers in
      float64 for copies on the CPU, to 1e-10 of the largest. NVIDIA's own kernel (``fused``) is replaced too.
    * Modules that compute a layer and crop its output (transformers' ``EncodecConvTranspose1d``,
      ``MimiConvTranspose1d`` and ``PocketTTSAudioTokenizerConvTranspose1d``, encodec's ``SConvTranspose1d``,
      audiocraft's ``StreamableConvTranspose1d``): the layer's ``padding`` becomes the pair of crops, so that cropped
      outputs are not computed, if that gives the same numbers in float64 and nothing else sees the layer's output: no
      norm after it, no hook of the layer, no other module that holds it. Later changes of the module's attributes go
      unseen.
    * Not counted: layers of this package.
    * Not seen: calls of ``torch.nn.functional.conv_transpose1d``; see ``routed``.

        >>> print(convert(nn.Sequential(nn.ConvTranspose1d(8, 4, 6), nn.ReLU())))
        1 replaced, 0 left

    Args:
        model: a module, changed in place; it may itself be a layer.
        freeze: also apply ``numba_tconv.freeze``, for a model that is served.

    Returns:
        A Conversion: the number of layers replaced, and why others were left.

    Raises:
        TypeError: ``model`` is no torch.nn.Module.
        RuntimeError: raised by ``freeze``. Nothing was converted.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if freeze:
        check_frozen_mode(model)
    replaced, activations_replaced, cropping_replaced, left = 0, 0, 0, {}
    for name, module in model.named_modules():
        if not isinstance(module, AliasFreeActivation) and activations.is_one(module):
            if reason := activations.obstacle(module):
                left[name] = reason
            else:
                activations_replaced += 1
            continue
        if isinstance(module, ConvTranspose1d) or not _is_one(module):
            continue
        if reason := _obstacle(module):
            left[name] = reason
            continue
        try:
            module.__class__ = _class_for(module)
        except TypeError as error:  # incompatible metaclasses or layouts
            left[name] = f"its class {type(module).__qualname__} takes no other base: {error}"
            continue
        module.variant = module.precision = None
        replaced += 1
    owners = Counter(id(child) for module in model.modules() for child in module._modules.values())
    for name, module in model.named_modules():
        if cropping.is_one(module):
            if reason := cropping.obstacle(module, owners):
                left[name] = reason
            else:
                cropping_replaced += 1
    frozen = freeze_layers(model) if freeze else None
    return Conversion(replaced, left, frozen, activations_replaced, cropping_replaced)


def _is_one(module: nn.Module) -> bool:
    name = getattr(module, "original_name", type(module).__name__)  # of a scripted module
    return isinstance(module, nn.ConvTranspose1d) or name == nn.ConvTranspose1d.__name__


def _obstacle(module: nn.Module) -> str | None:
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
    for one in cls.__mro__:
        if one is nn.ConvTranspose1d:
            return True
        if own := vars(one).get("forward"):
            code = getattr(inspect.unwrap(own), "__code__", None)
            if code is None or not {"super", "forward"} <= set(code.co_names):
                return False
    return False


def _class_for(module: nn.Module) -> type:
    cls = type(module)
    if not is_parametrized(module) or not vars(cls).keys() >= module.parametrizations.keys():
        return _counterpart(cls)
    # torch made this class for one layer: properties of the parametrized tensors over the plain class.
    kept = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__, tuple(map(_counterpart, cls.__bases__)), kept)


@cache
def _counterpart(cls: type) -> type:
    """This package's layer for torch's; for a subclass, one with this package's ``forward``."""
    if cls is nn.ConvTranspose1d:
        return ConvTranspose1d
    return type(cls.__name__, (cls, _OfSubclass), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


class _OfSubclass(ConvTranspose1d):
    """A converted layer of a subclass. Loading or copying makes its class again."""

    def __reduce_ex__(self, protocol):
        return _new, (type(self).__bases__[0],), self.__getstate__()


def _new(cls: type) -> nn.Module:
    made = _counterpart(cls)
    return made.__new__(made)
