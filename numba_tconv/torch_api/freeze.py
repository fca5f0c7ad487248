"""``freeze`` and ``unfreeze`` of a served model."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import is_

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from numba_tconv.kernels.common.packed_weights import FrozenWeights
from numba_tconv.runtime.layout import layout_of

from . import fast_path as direct
from . import functional, torchs
from .alias_free import AliasFreeActivation, tensors_of
from .freezable import Freezable, computing_hooks
from .functional import autocasts
from .module import ConvTranspose1d

MOST_CALLS = 1024  # remembered by a layer


@dataclass(frozen=True)
class Freezing:
    """Report of ``freeze``; ``str`` gives it as text.

    ``frozen``, also ``int(freezing)``: the number of frozen layers. ``bytes``: what they hold beside parameters, with
    packed weights so far. ``left``: why others were left, by name.
    """

    frozen: int
    bytes: int
    left: dict[str, str] = field(default_factory=dict)

    def __int__(self) -> int:
        return self.frozen

    def __str__(self) -> str:
        lines = [f"{self.frozen} frozen, {self.bytes:,} bytes beside their parameters, {len(self.left)} left"]
        return "\n".join(lines + [f"{name or 'the model itself'}: {why}" for name, why in self.left.items()])


def freeze(model: nn.Module) -> Freezing:
    """Let every layer of this package in ``model`` treat its weights as constant, in place.

    A frozen ConvTranspose1d computes ``weight_norm`` or another parametrization now, and packs its weights at its
    first call. A frozen AliasFreeActivation takes alpha and beta out of log scale. Outputs, parameters, state_dict and
    hooks stay. Copies, torch.jit.trace, torch.fx.symbolic_trace, torch.compile, torch.export see an unfrozen layer.

        >>> model = nn.Sequential(ConvTranspose1d(8, 4, 6)).eval()
        >>> freeze(model).frozen
        1

    A layer is frozen until one of these:

    * ``unfreeze``, ``train()``, ``load_state_dict``, the layer's ``requires_grad_``
    * ``to``, ``cuda``, ``half`` or another move or cast
    * a call that wants a gradient for its weights: use ``torch.no_grad`` or ``torch.inference_mode``

    A replaced parameter, submodule or parametrization is used from the next call on. Other writes to the weights
    (``weight.data``, an optimizer) go unseen: unfreeze before, freeze after. CUDA graphs: call the model with the
    graph's sizes before the capture, else every replay packs; unfreezing frees packed weights, so never replay after.

    Args:
        model: a module or layer in eval mode, changed in place.

    Returns:
        A Freezing. Layers whose weight a foreign hook computes are left.

    Raises:
        TypeError: ``model`` is no torch.nn.Module.
        RuntimeError: ``model`` or a layer is in train mode. Nothing was frozen.
    """
    check_frozen_mode(model)
    frozen, left = [], {}
    for name, layer in model.named_modules():
        is_convolution = isinstance(layer, ConvTranspose1d)
        if is_convolution and (unknown := _computed_by_others(layer)):
            left[name] = f"its {unknown} is neither a parameter nor computed by a known hook"
        elif isinstance(layer, Freezable):
            if layer._frozen is None or not layer._frozen.stands(layer):
                layer._unfreeze()
                vars(layer)["_frozen"] = (FrozenLayer if is_convolution else FrozenActivation)(layer)
            frozen.append(layer._frozen)
        elif isinstance(layer, nn.ConvTranspose1d):
            left[name] = "it is torch's layer: convert it first"
    return Freezing(len(frozen), sum(one.nbytes for one in frozen), left)


def unfreeze(model: nn.Module) -> int:
    """Undo ``freeze`` in place; returns the number of layers that were frozen.

    Raises TypeError if ``model`` is no torch.nn.Module.
    """
    _check_module(model)
    layers = [one for one in model.modules() if isinstance(one, Freezable) and one._frozen is not None]
    for layer in layers:
        layer._unfreeze()
    return len(layers)


def check_frozen_mode(model: nn.Module, becomes_one: Callable[[nn.Module], bool] = lambda module: False) -> None:
    _check_module(model)
    for name, module in model.named_modules():
        is_one = module is model or isinstance(module, (nn.ConvTranspose1d, Freezable))
        if module.training and (is_one or becomes_one(module)):
            raise RuntimeError(f"{name or 'the model'} is in train mode: call eval() before it is frozen")


def _check_module(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")


def _computed_by_others(layer: ConvTranspose1d) -> str | None:
    """A tensor that an unknown hook computes."""
    known = {hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name for hook in computing_hooks(layer)}
    for name in ("weight", "bias"):
        if name not in layer._parameters and name not in known and not is_parametrized(layer, name):
            return name
    return None


class _Kept:
    """What a frozen layer computes with; None in copies and pickles."""

    def __init__(self, layer: nn.Module):
        self.layer = weakref.ref(layer)
        places = (place for one in layer.modules() for place in (one._parameters, one._buffers, one._modules))
        self.places = [place for place in places if place]
        self.counts = [*map(len, self.places)]
        self.sources = [(place, name, source) for place in self.places for name, source in place.items()]
        self.tensors = [*layer.parameters(), *layer.buffers()]

    def restore(self, layer: nn.Module) -> None:
        """Undo what freezing changed."""

    def stands(self, layer: nn.Module) -> bool:
        if self.layer() is not layer:
            return False
        for place, name, source in self.sources:
            if place.get(name) is not source:
                return False
        return [*map(len, self.places)] == self.counts

    def serves(self, layer: nn.Module) -> bool:
        """Whether a call may use it. Unfreezes a layer that trains."""
        if torch.compiler.is_compiling() or not self.stands(layer):
            return False
        if layer.training or (torch.is_grad_enabled() and any(one.requires_grad for one in self.tensors)):
            layer._unfreeze()
            return False
        return True

    def __reduce__(self):
        return type(None), ()


class FrozenLayer(_Kept):
    def __init__(self, layer: ConvTranspose1d):
        super().__init__(layer)
        with torch.inference_mode(False), torch.no_grad(), torchs.without_autocast(self.tensors[0]):
            for hook in computing_hooks(layer):  # else their tensors may be old
                hook(layer, ())
            weights, self.bias = FrozenWeights(layer.weight), None if layer.bias is None else layer.bias.detach()
        self.weights, self.own = {weights.tensor.dtype: weights}, weights
        self._calls: dict[tuple, tuple] = {}  # input's layout, TF32: choices, call
        for hook in computing_hooks(layer):
            hook.__class__ = HELD.get(type(hook), type(hook))

    def restore(self, layer: ConvTranspose1d) -> None:
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, _Held):
                hook.__class__ = type(hook).__mro__[2]

    @property
    def nbytes(self) -> int:
        shared = {tensor.data_ptr() for tensor in self.tensors}
        own = [one.tensor for one in self.weights.values() if one.tensor.data_ptr() not in shared]
        return sum(t.nbytes for t in own) + sum(one.packed_bytes for one in self.weights.values())

    def operands(self, layer: ConvTranspose1d) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Weight and bias for a call; None for the layer's own."""
        if not self.serves(layer) or torch._C._is_tracing():
            return None
        weights = self.own
        if torch._C._is_any_autocast_enabled() and autocasts(weights.tensor):
            dtype = torch.get_autocast_dtype(weights.tensor.device.type)
            if dtype not in self.weights:
                with torch.inference_mode(False), torch.no_grad():
                    self.weights[dtype] = FrozenWeights(weights.tensor.to(dtype))
            weights = self.weights[dtype]
        return weights.tensor, self.bias

    def output(self, layer: ConvTranspose1d, input: torch.Tensor) -> torch.Tensor | None:
        """The output by a remembered call; None where the layer must decide. Nobody else holds the weights."""
        if not self.serves(layer) or torch._C._is_any_autocast_enabled() or not direct.is_clear(input):
            return None
        if layer.padding_mode != "zeros":
            return None
        key = layout_of(input), input.dtype is torch.float32 and functional.torch_allows_tf32()
        choices = layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
        choices = *choices, layer.variant, layer.precision
        known, call = self._calls.get(key, (choices, None))
        if call is None or not all(map(is_, known, choices)):
            if not isinstance(layer.padding, (tuple, str)):
                return None
            call = functional.at_once(input, self.own.tensor, self.bias, *choices)
            if call is None:
                return None
            if len(self._calls) >= MOST_CALLS:
                self._calls.clear()
            self._calls[key] = choices, call
        return call(input, self.own.tensor, self.bias)


class FrozenActivation(_Kept):
    """An AliasFreeActivation's alpha, beta and filters, each (n,).

    ``folded``: out of log scale; not in 16 bits, which would round the exponentials.
    """

    def __init__(self, layer: AliasFreeActivation):
        super().__init__(layer)
        with torch.inference_mode(False), torch.no_grad():
            alpha, beta, *filters = tensors_of(layer)
            self.folded = alpha is not None and layer._form.log_scale and alpha.dtype.itemsize > 2
            if alpha is not None:  # else a call casts them
                filters = [one.to(alpha.dtype) for one in filters]
            both = [one.exp() if self.folded and one is not None else one for one in (alpha, beta)]
            self.kept = [None if one is None else one.detach().reshape(-1) for one in (*both, *filters)]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.kept[:2] if self.folded and one is not None)

    def operands(self, layer: AliasFreeActivation) -> list[torch.Tensor | None] | None:
        """alpha, beta and filters for a call; None for the layer's own."""
        rounded = self.folded and torch._C._is_any_autocast_enabled()
        return self.kept if self.serves(layer) and not torch._C._is_tracing() and not rounded else None


class _Held:
    """A hook that computes the weight unless frozen."""

    def __call__(self, module, inputs):
        frozen = module._frozen
        given = isinstance(inputs[0], torch.Tensor) if inputs else True
        if frozen is None or not given or frozen.operands(module) is None:
            kind = next(kind for kind in HELD if isinstance(self, kind))  # by now this may be the plain hook
            kind.__call__(self, module, inputs)


class _HeldWeightNorm(_Held, WeightNorm):
    pass


class _HeldSpectralNorm(_Held, SpectralNorm):
    pass


HELD = {WeightNorm: _HeldWeightNorm, SpectralNorm: _HeldSpectralNorm}
