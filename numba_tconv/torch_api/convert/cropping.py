"""``convert`` of modules that crop a layer's output."""

import math
from collections import Counter
from itertools import product

import torch
from torch import nn

from numba_tconv.torch_api.module import ConvTranspose1d

from .counterparts import HOOKS, MOST_ERROR, counterpart, other_arguments, relative_error

NAMES = {
    "EncodecConvTranspose1d",
    "MimiConvTranspose1d",
    "PocketTTSAudioTokenizerConvTranspose1d",
    "SConvTranspose1d",
    "StreamableConvTranspose1d",
}
LENGTHS = 1, 2, 7


class Cropping(nn.Module):
    """The base class that converted modules get before their own class."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_of(self)(x)


def is_one(module: nn.Module) -> bool:
    return not isinstance(module, Cropping) and any(one.__name__ in NAMES for one in type(module).__mro__)


def layer_of(module: nn.Module) -> nn.Module:
    """The cropped layer; encodec holds it in a module with its norm."""
    children = module._modules
    return children["conv"] if "conv" in children else children["convtr"].convtr


def obstacle(module: nn.Module, owners: Counter) -> str | None:
    """Change the class of ``module`` and its layer's padding, or say why not.

    ``owners`` counts holders by module id.
    """
    try:
        if reason := _unusual(module, owners):
            return reason
        left, right = _crops(module)
        if min(left, right) < 0:
            return f"it crops {left} and {right} outputs: a slice from a negative index is no crop"
        (taps,) = layer_of(module).kernel_size
        if left + right >= taps:
            return f"it crops {left} and {right} outputs, which may leave none"
        if (largest := _largest_error(module, (left, right))) > MOST_ERROR:
            return f"it computes something else: in float64 the two differ by {largest:.1e} of the largest output"
        module.__class__ = counterpart(Cropping, type(module))
    except Exception as caught:  # from unknown code
        return f"it could not be compared with this package's: {type(caught).__name__}: {caught}".rstrip(": ")
    layer_of(module).padding = left, right
    return None


def _unusual(module: nn.Module, owners: Counter) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "it is scripted"
    if reason := other_arguments(module):
        return reason
    children = set(module._modules)
    if children not in ({"conv"}, {"convtr"}):
        return f"it has the submodules {', '.join(sorted(children))}"
    layer = layer_of(module)
    between = [module.convtr, module.convtr.norm] if layer is not module._modules.get("conv") else []
    if between and (set(module.convtr._modules) != {"convtr", "norm"} or type(between[1]) is not nn.Identity):
        return "its norm sees the outputs that it crops"
    if not isinstance(layer, ConvTranspose1d) or type(layer).forward is not ConvTranspose1d.forward:
        return "its layer is not a plain one of this package"
    if layer.padding != (0,) or layer.output_padding != (0,) or layer.dilation != (1,):
        return "its layer has padding, output_padding or dilation of its own"
    if any("forward" in vars(one) for one in (module, layer, *between)):
        return "its forward was replaced on the module itself"
    if any(getattr(one, hooks) for one in between for hooks in HOOKS) or any(
        getattr(layer, hooks) for hooks in HOOKS if hooks != "_forward_pre_hooks"
    ):
        return "its layer has a hook, which sees the outputs that it crops"
    if any(owners[id(one)] > 1 for one in (layer, *between)):
        return "its layer is a part of another module too"
    return None


def _crops(module: nn.Module) -> tuple[int, int]:
    if hasattr(module, "padding_left"):
        return module.padding_left, module.padding_right
    layer = layer_of(module)
    total = layer.kernel_size[0] - layer.stride[0]
    right = math.ceil(total * module.trim_right_ratio) if module.causal else total // 2
    return total - right, right


def _largest_error(module: nn.Module, crops: tuple[int, int]) -> float:
    """Error of ``crops``, with a small layer on the CPU."""
    layer, generator = layer_of(module), torch.Generator().manual_seed(0)
    # The caller's settings must not matter.
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        sizes = 2, 2, layer.kernel_size, layer.stride
        tiny = nn.ConvTranspose1d(*sizes, device="meta").to_empty(device="cpu").double()
        for one in tiny.parameters():
            one.copy_(torch.randn(one.shape, dtype=torch.float64, generator=generator))
        copied = _with_layer(module, tiny)
        ours = ConvTranspose1d(*sizes, crops, device="meta")
        ours._parameters = tiny._parameters
        errors = []
        for length, copied.training in product(LENGTHS, (False, True)):
            x = torch.randn(2, 2, length, dtype=torch.float64, generator=generator)
            errors.append(relative_error(ours(x), type(copied).forward(copied, x)))
    return max(errors)


def _with_layer(module: nn.Module, layer: nn.Module) -> nn.Module:
    copied = type(module).__new__(type(module))
    vars(copied).update(vars(module))
    if "conv" in module._modules:
        copied._modules = {"conv": layer}
    else:
        between = type(module.convtr).__new__(type(module.convtr))
        vars(between).update(vars(module.convtr))
        between._modules = {"convtr": layer, "norm": nn.Identity()}
        copied._modules = {"convtr": between}
    return copied
