"""``convert`` of other packages' alias-free activations."""

import copy
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from numba_tconv.torch_api.alias_free import SNAKE, AliasFreeActivation, computed, tensors_of
from numba_tconv.torch_api.alias_free_operators import Form, Tensors

from .counterparts import HOOKS, MOST_ERROR, counterpart, one_thread, other_arguments, relative_error

PARTS = {"", "act", "upsample", "downsample"}  # submodules; NVIDIA's also has downsample.lowpass
OTHERS = {
    nn.SiLU: "silu",
    nn.LeakyReLU: "leaky_relu",
    nn.ELU: "elu",
    nn.GELU: "gelu",
    nn.Identity: "identity",
}
LENGTHS = 1, 11
IN_TWO = {torch.conv1d: torch.conv2d, torch.conv_transpose1d: torch.conv_transpose2d}


def is_one(module: nn.Module) -> bool:
    if type(module) is nn.Module or not PARTS - {""} <= {name for name, _ in module.named_children()}:
        return False
    down = getattr(module.downsample, "lowpass", module.downsample)
    return all(isinstance(getattr(one, "filter", None), torch.Tensor) for one in (module.upsample, down))


def obstacle(module: nn.Module) -> str | None:
    """Change the class of ``module``, or say why not."""
    try:
        if reason := _unusual(module):
            return reason
        form, reason = _form(module)
    except Exception as error:  # from unknown code
        return f"it could not be compared with this package's: {type(error).__name__}: {error}".rstrip(": ")
    if form is None:
        return reason
    try:
        module.__class__ = counterpart(AliasFreeActivation, type(module))
    except Exception as error:  # as in convert
        return f"its class {type(module).__qualname__} takes no other base: {error}"
    module._form = form
    return None


def _unusual(module: nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "it is scripted"
    if isinstance(module, torch.fx.GraphModule):
        return "it is a torch.fx.GraphModule, which computes its graph"
    if reason := other_arguments(module):
        return reason
    names = {name for name, _ in module.named_modules()} - {"downsample.lowpass"}
    if names != PARTS:
        return f"it has a submodule of its own, {min(names - PARTS)!r}"
    if any(is_lazy(one) for one in (*module.parameters(), *module.buffers())):
        return "it is lazy: convert it after its first call, when it knows its sizes"
    for name, part in module.named_modules():
        if "forward" in vars(part):
            return f"its forward was replaced on the layer itself{name and f', in its {name}'}"
        if name and any(getattr(part, hooks) for hooks in HOOKS):
            return f"its {name} has a hook, which would no longer run"
    return None


def _form(module: nn.Module) -> tuple[Form | None, str]:
    """The form that gives the same numbers, or None and the reason."""
    alpha = tensors_of(module)[0]
    activation = SNAKE if alpha is not None else OTHERS.get(type(module.act))
    if alpha is not None and alpha.numel() == 1:
        return None, "its alpha is one number, for any number of channels"
    if activation is None:
        return None, f"its activation {type(module.act).__qualname__} is not known"
    up, down = (_ratio(one) for one in (module.upsample, module.downsample))
    scales = (True, False) if activation == SNAKE else (True,)
    errors = []
    # The caller's random state and settings must not matter.
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
        one_thread(),
        _OneFilter(),
    ):
        cases = list(_cases(module))
        for log_scale in scales:
            form = Form(up, down, log_scale, activation)
            errors.append(max(_error(tensors, form, x, y) for tensors, x, y in cases))
            if errors[-1] <= MOST_ERROR:
                return form, ""
    return None, f"it computes something else: in float64 the two differ by {min(errors):.1e} of the largest output"


def _ratio(sampler: nn.Module) -> int:
    for name in ("ratio", "stride"):
        if type(value := getattr(sampler, name, None)) is int:
            return value
    raise AttributeError(f"{type(sampler).__qualname__} has no ratio")


def _cases(module: nn.Module) -> Iterator[tuple[list, torch.Tensor, torch.Tensor]]:
    """Tensors of a float64 copy of ``module`` on the CPU, inputs, and its outputs.

    First with its own numbers, then random ones of both signs; in both modes.
    """
    generator = torch.Generator().manual_seed(0)
    copied = _copied(module)
    for drawn in (False, True):
        if drawn:
            for one in (*copied.parameters(), *copied.buffers()):
                signs = torch.arange(one.numel()).view(one.shape) % 2 * 2 - 1
                one.data = signs * (0.3 + torch.rand(one.shape, dtype=torch.float64, generator=generator))
        tensors = [one if one is None else one.detach() for one in tensors_of(copied)]
        channels = 3 if tensors[0] is None else tensors[0].numel()
        for length in LENGTHS:
            copied.train(length == LENGTHS[-1])
            x = torch.randn(2, channels, length, dtype=torch.float64, generator=generator)
            yield tensors, x, type(copied).forward(copied, x)


class _OneFilter(TorchFunctionMode):
    """Computes depthwise convolutions with one filter as 2-D ones: torch on CPUs goes channel by channel."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in IN_TWO and len(args) == 2 and kwargs.keys() == {"stride", "groups"}:
            (x, weight), stride = args, kwargs["stride"]
            one = weight.dim() == 3 and weight.stride(0) == 0 and weight.shape[:2] == (kwargs["groups"], 1)
            if one and x.dim() == 3 and x.shape[1] == len(weight) and type(stride) is int:
                y = IN_TWO[func](x.reshape(1, 1, -1, x.shape[-1]), weight[:1, :, None], stride=(1, stride))
                return y.view(*x.shape[:2], y.shape[-1])
        return func(*args, **kwargs)


def _copied(module: nn.Module) -> nn.Module:
    empty = {id(getattr(module, hooks)): {} for hooks in HOOKS}
    copied = copy.deepcopy(module, empty).to("cpu", torch.float64).requires_grad_(False)
    if hasattr(copied, "fused"):
        copied.fused = False
    return copied


def _error(tensors: list, form: Form, x: torch.Tensor, expected: torch.Tensor) -> float:
    alpha, beta, *filters = tensors
    return relative_error(computed(Tensors(x, *filters, alpha, beta), form), expected)
