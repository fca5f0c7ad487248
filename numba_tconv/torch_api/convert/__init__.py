"""``convert`` changes only classes, and the padding of cropped layers, so an optimizer keeps its references."""

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

OWN = "variant", "precision", "_frozen", "_unfreeze", "_require_zeros", "_padding_for"


@dataclass(frozen=True)
class Conversion:
    """Report of ``convert``; ``str`` gives it as text.

    Counts: ``replaced``, also ``int(conversion)``, of ConvTranspose1d; ``activations``; ``cropping`` of modules whose
    crop became padding. ``left``: why others were left, by name in ``model.named_modules()``. ``freezing``: the report
    of ``freeze``, or None.
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

    Layers stay the same objects with the same parameters and hooks, so older checkpoints load.

    * Converted: torch's layers, also under ``torch.nn.utils.weight_norm`` or a parametrization, and subclasses that
      inherit torch's ``forward`` or call ``super().forward``. They keep their class's name and methods.
    * Left: layers with another ``forward``, lazy before their first call, scripted or quantized.
    * Alias-free activations (``Activation1d`` of NVIDIA and alias-free-torch, transformers'): modules with children
      ``act``, ``upsample`` and ``downsample`` whose float64 copies on the CPU compute what ``alias_free_activation``
      does, to 1e-10 of the largest output. NVIDIA's kernel (``fused``) is replaced too.
      Another class of ``act`` and hooks of the children go unseen later.
    * Modules that crop a layer's output (transformers' ``EncodecConvTranspose1d``, ``MimiConvTranspose1d`` and
      ``PocketTTSAudioTokenizerConvTranspose1d``, encodec's ``SConvTranspose1d``, audiocraft's
      ``StreamableConvTranspose1d``): the crops become the layer's ``padding``, so cropped outputs are not computed, if
      the same test passes and no norm, hook or other owner sees the layer's output. Later changes of the module's
      attributes go unseen.
    * Not seen: calls of ``torch.nn.functional.conv_transpose1d``; see ``routed``.

        >>> print(convert(nn.Sequential(nn.ConvTranspose1d(8, 4, 6), nn.ReLU())))
        1 replaced, 0 left

    Args:
        model: a module or layer, changed in place.
        freeze: also apply ``numba_tconv.freeze``.

    Returns:
        A Conversion. Layers of this package are not counted.

    Raises:
        TypeError: ``model`` is no torch.nn.Module.
        RuntimeError: raised by ``freeze``. Nothing was converted.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if freeze:
        check_frozen_mode(model, activations.is_one)
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
        except Exception as error:  # incompatible bases, or from __init_subclass__
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
    name = getattr(module, "original_name", type(module).__name__)  # if scripted
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
    if getattr(module._output_padding, "__func__", None) is not nn.ConvTranspose1d._output_padding:
        return "its _output_padding is not torch's"
    if module.padding_mode != "zeros":
        return f"its padding_mode is {module.padding_mode!r}, which torch's layer refuses when it is called"
    if own := [name for name in OWN if hasattr(module, name)]:
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
    # torch made this class for one layer: properties over the plain class.
    kept = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__, tuple(map(_counterpart, cls.__bases__)), kept)


@cache
def _counterpart(cls: type) -> type:
    if cls is nn.ConvTranspose1d:
        return ConvTranspose1d
    return type(cls.__name__, (cls, _OfSubclass), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


class _OfSubclass(ConvTranspose1d):
    """Loading or copying makes the class again."""

    def __reduce_ex__(self, protocol):
        return _new, (type(self).__bases__[0],), self.__getstate__()


def _new(cls: type) -> nn.Module:
    made = _counterpart(cls)
    return made.__new__(made)
