"""``alias_free_activation`` and its layer."""

import math

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

from numba_tconv.formula.alias_free import ACTIVATIONS, MOST_RATIO, MOST_TAPS
from numba_tconv.runtime.layout import layout_of

from . import alias_free_operators as ops
from . import fast_path as direct
from . import sharding
from .alias_free_operators import Form
from .freezable import Freezable
from .functional import autocasts, is_exporting
from .sizes import is_zero

SNAKE = "snake"


def alias_free_activation(
    x,
    alpha,
    beta=None,
    *,
    up_filter,
    down_filter,
    up_ratio=2,
    down_ratio=2,
    log_scale=True,
    activation="snake",
):
    """An activation at ``up_ratio`` times the rate, filtered before and after, so that no overtone folds back.

    ``y = down(act(up(x)))``, as in BigVGAN's family:

    1. up: x with repeated ends, a transposed convolution with ``up_ratio * up_filter``, cropped to L*up_ratio;
    2. act, "snake": ``u + sin(a*u)^2 / (b + 1e-9)``; a is alpha, b beta or else alpha; in log scale their exponentials;
    3. down: ends repeated, a convolution with ``down_filter`` and stride ``down_ratio``.

        >>> x, taps = torch.ones(1, 8, 10), torch.full((12,), 1 / 12)
        >>> alias_free_activation(x, torch.zeros(8), up_filter=taps, down_filter=taps).shape
        torch.Size([1, 8, 10])

    Args:
        x: (N, C, L) or (C, L), any strides, L at least 1; float64, float32, float16 or bfloat16.
        alpha, beta: (C,), or with more dimensions of size one; None unless "snake".
        up_filter, down_filter: (K,) or (1, 1, K), K up to 32, for all channels; ``up_filter`` has ``up_ratio`` or more.
        up_ratio, down_ratio: int from 1 to 4.
        log_scale: alpha and beta are logarithms.
        activation: "snake", or "silu", "leaky_relu", "elu", "gelu", "identity" with torch's defaults.

    Returns:
        (N, C, L_out) or (C, L_out), contiguous, dtype and device of x; ``L_out = ceil(L*up_ratio / down_ratio)``.

    Raises:
        TypeError: wrong type.
        ValueError: ``activation`` is unknown.
        RuntimeError: a shape, dtype, device, layout, filter or ratio is refused.

    This package's kernels compute CUDA tensors, in float32 for 16-bit dtypes, and gradients for x, alpha and beta.
    torch's operators compute CPU tensors, exported programs, higher derivatives, forward mode and torch.func.
    torch.autocast casts as for convolutions. A ``__torch_function__`` receives this function.
    """
    if not torch.compiler.is_dynamo_compiling():
        y = _at_once(x, up_filter, down_filter, alpha, beta, up_ratio, down_ratio, log_scale, activation)
        if y is not None:
            return y
    tensors = ops.Tensors(x, up_filter, down_filter, alpha, beta)
    if has_torch_function(tensors):
        return handle_torch_function(
            *(alias_free_activation, tensors, x, alpha, beta),
            up_filter=up_filter,
            down_filter=down_filter,
            up_ratio=up_ratio,
            down_ratio=down_ratio,
            log_scale=log_scale,
            activation=activation,
        )
    return computed(tensors, Form(up_ratio, down_ratio, log_scale, activation))


def computed(tensors: ops.Tensors, form: Form) -> torch.Tensor:
    """``alias_free_activation`` without ``__torch_function__``."""
    _check_types(tensors, form)
    if autocasts(tensors.x):
        dtype = torch.get_autocast_dtype(tensors.x.device.type)
        tensors = ops.Tensors(*(t.to(dtype) if t is not None and autocasts(t) else t for t in tensors))
    _check_tensors(tensors)
    unbatched = tensors.x.dim() == 2
    x = tensors.x.unsqueeze(0) if unbatched else tensors.x
    arguments = x, *map(_flat, tensors[1:]), *form
    on_gpu = x.is_cuda or (not torch.compiler.is_dynamo_compiling() and ops.as_on_a_gpu.get())
    ours = on_gpu and not (is_zero(x.shape[0]) or is_exporting() or sharding.compute_themselves(*tensors))
    y = (ops.apply if ours else ops.composed)(*arguments)
    return y.squeeze(0) if unbatched else y


def _at_once(
    x, up_filter, down_filter, alpha, beta, up_ratio, down_ratio, log_scale, activation
) -> torch.Tensor | None:
    """The output by a remembered call; None if full checks must decide."""
    if not (type(up_ratio) is type(down_ratio) is int and type(log_scale) is bool and type(activation) is str):
        return None
    if up_filter is None or down_filter is None or torch._C._is_any_autocast_enabled():
        return None
    if not direct.is_clear(x, up_filter, down_filter, alpha, beta):
        return None
    if torch.is_grad_enabled() and direct.wants_gradient(x, up_filter, down_filter, alpha, beta):
        up_filter, down_filter, alpha, beta = map(_flat, (up_filter, down_filter, alpha, beta))
    # Faster than a tuple with *.
    call = ops.remembered(
        layout_of(x),
        layout_of(up_filter),
        layout_of(down_filter),
        None if alpha is None else layout_of(alpha),
        None if beta is None else layout_of(beta),
        up_ratio,
        down_ratio,
        log_scale,
        activation,
    )
    return call and call(x, up_filter, down_filter, alpha, beta)


def _flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.dim() == 1 else tensor.reshape(-1)


def _check_types(tensors: ops.Tensors, form: Form) -> None:
    for name in ("x", "up_filter", "down_filter"):
        tensor = getattr(tensors, name)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a Tensor, not {type(tensor).__name__}")
    for name, ratio in (("up_ratio", form.up_ratio), ("down_ratio", form.down_ratio)):
        if isinstance(ratio, bool) or not isinstance(ratio, (int, torch.SymInt)):
            raise TypeError(f"{name} must be an int, not {type(ratio).__name__}")
    if not isinstance(form.log_scale, bool):
        raise TypeError(f"log_scale must be a bool, not {type(form.log_scale).__name__}")
    activation = form.activation
    if not isinstance(activation, str):
        raise TypeError(f"activation must be a string, not {type(activation).__name__}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}: there are {', '.join(ACTIVATIONS)}")
    for name, tensor in (("alpha", tensors.alpha), ("beta", tensors.beta)):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a Tensor or None, not {type(tensor).__name__}")
        if tensor is not None and activation != SNAKE:
            raise TypeError(f"{name} must be None: {activation!r} has no parameters")
    if tensors.alpha is None and activation == SNAKE:
        raise TypeError("alpha must be a Tensor: 'snake' needs it")


def _check_tensors(tensors: ops.Tensors) -> None:
    """Raise RuntimeError for what ``ops.check`` does not see."""
    x = tensors.x
    if x.dim() not in (2, 3) or x.shape[-2] == 0:
        raise RuntimeError(f"x must be (N, C, L) or (C, L), of one channel or more, got shape {tuple(x.shape)}")
    for name, tensor in zip(tensors._fields, tensors, strict=True):
        if tensor is None:
            continue
        if tensor.layout != torch.strided:
            raise RuntimeError(f"{name} must be a dense tensor, got layout {tensor.layout}")
        if tensor is not x and (tensor.dim() == 0 or tensor.numel() != max(tensor.shape)):
            raise RuntimeError(
                f"{name} must have one dimension, or others of size one, got shape {tuple(tensor.shape)}"
            )


def kaiser_sinc(ratio: int, taps: int) -> torch.Tensor:
    """BigVGAN's low-pass filter (1, 1, taps) for ``ratio`` times the rate: a windowed sinc, sum 1.

    Cutoff 0.5/ratio, transition 1.2/ratio cycles a sample.
    """
    cutoff, width, half = 0.5 / ratio, 4 * 0.6 / ratio, taps // 2
    attenuation = 2.285 * (half - 1) * math.pi * width + 7.95  # dB; Kaiser's formulas
    if attenuation > 50:
        shape = 0.1102 * (attenuation - 8.7)
    else:
        shape = 0.5842 * max(attenuation - 21, 0) ** 0.4 + 0.07886 * max(attenuation - 21, 0)
    window = torch.kaiser_window(taps, periodic=False, beta=shape, dtype=torch.float32)
    times = torch.arange(taps, dtype=torch.float32) - half + (0.5 if taps % 2 == 0 else 0)
    filter = 2 * cutoff * window * torch.sinc(2 * cutoff * times)
    return (filter / filter.sum()).view(1, 1, taps)


class AliasFreeActivation(Freezable, nn.Module):
    """``alias_free_activation`` as a layer, with BigVGAN's filters.

    Input is (N, C, L) or (C, L). Checkpoints of NVIDIA's ``Activation1d`` load, with or without filters.
    """

    _form: Form

    def __init__(
        self,
        channels,
        up_ratio=2,
        down_ratio=2,
        up_kernel_size=12,
        down_kernel_size=12,
        *,
        activation="snake",
        beta=True,
        log_scale=True,
        device=None,
        dtype=None,
    ):
        """``beta``: "snake" has a beta of its own. Raises as the function."""
        super().__init__()
        self._form = Form(up_ratio, down_ratio, log_scale, activation)
        like = {"device": device, "dtype": dtype}
        names = ("alpha", "beta")[: 1 + bool(beta)] if activation == SNAKE else ()
        start = torch.zeros if log_scale else torch.ones
        self.act = nn.ParameterDict({name: nn.Parameter(start(channels, **like)) for name in names})
        self.upsample = _Filter(up_ratio, up_kernel_size, like)
        self.downsample = nn.ModuleDict({"lowpass": _Filter(down_ratio, down_kernel_size, like)})
        alpha, beta, *filters = tensors_of(self)
        tensors = ops.Tensors(filters[0].new_empty((1, channels, 1)), *filters, alpha, beta)
        _check_types(tensors, self._form)
        _check_tensors(tensors)
        ops.check(ops.Tensors(tensors.x, *map(_flat, tensors[1:])), self._form)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The function's output; filters are cast to the dtype of ``x``."""
        (up_ratio, down_ratio, log_scale, activation), frozen = self._form, self._frozen
        is_tensor = isinstance(x, torch.Tensor)
        kept = is_tensor and frozen and frozen.operands(self)
        alpha, beta, up_filter, down_filter = kept or tensors_of(self)
        if is_tensor and not up_filter.dtype is down_filter.dtype is x.dtype:
            up_filter, down_filter = up_filter.to(x.dtype), down_filter.to(x.dtype)
        return alias_free_activation(
            *(x, alpha, beta),
            up_filter=up_filter,
            down_filter=down_filter,
            up_ratio=up_ratio,
            down_ratio=down_ratio,
            log_scale=log_scale and not (kept and frozen.folded),
            activation=activation,
        )

    def extra_repr(self) -> str:
        """Sizes and choices."""
        return ", ".join(filter(None, [super().extra_repr(), *(f"{k}={v!r}" for k, v in self._form._asdict().items())]))


class _Filter(nn.Module):
    """A filter that a checkpoint may lack."""

    def __init__(self, ratio: int, taps: int, like: dict):
        super().__init__()
        for name, value, most in (("ratio", ratio, MOST_RATIO), ("kernel_size", taps, MOST_TAPS)):
            if type(value) is not int:
                raise TypeError(f"{name} must be an int, not {type(value).__name__}")
            if not 1 <= value <= most:
                raise RuntimeError(f"{name} must be from 1 to {most}, got {value}")
        self.ratio = ratio
        self.register_buffer("filter", torch.empty((1, 1, taps), **like))
        self._fill()

    def _made(self) -> torch.Tensor:
        with torch.device("cpu"):
            return kaiser_sinc(self.ratio, self.filter.shape[-1])

    def _fill(self) -> None:
        self.filter.copy_(self._made())

    def _apply(self, *args, **kwargs):
        was_meta = self.filter.is_meta
        super()._apply(*args, **kwargs)
        if was_meta:  # to_empty
            self._fill()
        return self

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, *others):
        missing = []
        if self.filter.is_meta:
            state_dict.setdefault(prefix + "filter", self._made())
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, *others)
        missing_keys += [key for key in missing if key != prefix + "filter"]


def tensors_of(layer: nn.Module) -> tuple:
    """alpha, beta, up_filter and down_filter by the published names; None if missing."""
    parts = layer._modules  # faster than attributes
    down, act = parts["downsample"], parts["act"]
    down = down._modules.get("lowpass", down)
    alpha, beta = _tensor(act, "alpha"), _tensor(act, "beta")
    return alpha, beta, _tensor(parts["upsample"], "filter"), _tensor(down, "filter")


def _tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    for place in (module._parameters, module._buffers):
        if name in place:
            return place[name]
    found = getattr(module, name, None)
    return None if isinstance(found, (int, float)) else found  # ELU's alpha
