"""The operator ``numba_tconv::alias_free_activation``.

Kernels compute CUDA tensors and first derivatives, ``composed`` the rest.
"""

import math
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from numba_tconv.formula.alias_free import ACTIVATIONS, AliasFree, alias_free
from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.gradients.alias_free import plan as gradient_plan
from numba_tconv.gradients.alias_free import tile as gradient_tile
from numba_tconv.gradients.sum import accumulator_of
from numba_tconv.kernels.alias_free import plan, tile
from numba_tconv.kernels.rung import BFLOAT16_CC, adjacent, are_adjacent
from numba_tconv.runtime import device
from numba_tconv.runtime.layout import Layout, room
from numba_tconv.runtime.ready import Ready

from . import fast_path as direct
from . import flops, torchs

NAME = "numba_tconv::alias_free_activation"
TENSORS = "Tensor x, Tensor up_filter, Tensor down_filter, Tensor? alpha, Tensor? beta"
CHOICES = "int up_ratio, int down_ratio, bool log_scale, str activation"

torch.library.define(NAME, f"({TENSORS}, {CHOICES}) -> Tensor")
alias_free_activation = torch.ops.numba_tconv.alias_free_activation.default


class Form(NamedTuple):
    """What an activation computes, beside its tensors."""

    up_ratio: int
    down_ratio: int
    log_scale: bool = True
    activation: str = "snake"


class Tensors(NamedTuple):
    """The operator's tensors; alpha and beta may be None."""

    x: torch.Tensor
    up_filter: torch.Tensor
    down_filter: torch.Tensor
    alpha: torch.Tensor | None
    beta: torch.Tensor | None

    def beside_x(self) -> tuple:
        """What kernels take beside x: a missing beta is alpha, a missing alpha is not read."""
        beta = self.alpha if self.beta is None else self.beta
        others = self.up_filter, self.down_filter, self.alpha, beta
        return tuple((self.up_filter if one is None else one).contiguous() for one in others)


TENSOR_COUNT, BESIDE_X = len(Tensors._fields), Tensors._fields[1:]


def named(arguments) -> tuple[Tensors, Form]:
    """The operator's arguments by name."""
    return Tensors(*arguments[:TENSOR_COUNT]), Form(*arguments[TENSOR_COUNT:])


# Whether CPU tensors take the operator (noted.py).
as_on_a_gpu = ContextVar("as_on_a_gpu", default=False)
POINTWISE = {
    "silu": F.silu,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "gelu": F.gelu,
    "identity": lambda u: u,
}


def check(tensors: Tensors, form: Form) -> AliasFree:
    """The sizes, validated by shapes, dtypes and devices alone.

    x is (N, C, L), filters (K,), alpha and beta (C,) or None. Raises RuntimeError (NotImplementedError for a dtype),
    or ValueError for an unknown activation.
    """
    x, activation = tensors.x, form.activation
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}: there are {', '.join(ACTIVATIONS)}")
    if x.dtype not in PRECISIONS:
        raise NotImplementedError(f"alias_free_activation takes {', '.join(map(str, PRECISIONS))}, not {x.dtype}")
    if (tensors.alpha is None) == (activation == "snake") or (tensors.alpha is None and tensors.beta is not None):
        raise RuntimeError(f"alpha is needed by activation 'snake' and, as beta, by no other; got {activation!r}")
    for name, tensor in zip(BESIDE_X, tensors[1:], strict=True):
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            raise RuntimeError(f"{name} must have the dtype of x, {x.dtype}, got {tensor.dtype}")
        if tensor.device != x.device:
            raise RuntimeError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")
        if tensor.dim() != 1:
            raise RuntimeError(f"{name} must have one dimension, got shape {tuple(tensor.shape)}")
    sizes = alias_free(x.shape, len(tensors.up_filter), len(tensors.down_filter), form.up_ratio, form.down_ratio)
    for name, tensor in (("alpha", tensors.alpha), ("beta", tensors.beta)):
        if tensor is not None and len(tensor) != sizes.channels:
            raise RuntimeError(f"{name} must have shape ({sizes.channels},), got {tuple(tensor.shape)}")
    return sizes


def composed(x, up_filter, down_filter, alpha, beta, up_ratio, down_ratio, log_scale, activation):
    """The activation in torch's operators."""
    tensors = Tensors(x, up_filter, down_filter, alpha, beta)
    sizes = check(tensors, Form(up_ratio, down_ratio, log_scale, activation))
    up, down = (one.expand(sizes.channels, 1, -1) for one in (up_filter, down_filter))
    u = F.pad(x, (sizes.pad, sizes.pad), mode="replicate")
    u = up_ratio * F.conv_transpose1d(u, up, stride=up_ratio, groups=sizes.channels)
    u = u[..., sizes.crop_left : u.shape[-1] - sizes.crop_right]
    if activation == "snake":
        beta = alpha if beta is None else beta
        alpha, beta = (one.exp() if log_scale else one for one in (alpha, beta))
        v = u + 1.0 / (beta[:, None] + 1e-9) * torch.sin(u * alpha[:, None]).pow(2)
    else:
        v = POINTWISE[activation](u)
    v = F.pad(v, (sizes.down_shift, sizes.down_taps // 2), mode="replicate")
    return F.conv1d(v, down, stride=down_ratio, groups=sizes.channels)


def apply(*arguments):
    """The operator, differentiable in every mode."""
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return composed(*arguments)
    return alias_free_activation(*arguments)


@direct.implementation(alias_free_activation, "cpu")
def _cpu(*arguments):
    sizes = check(*named(arguments))
    return composed(*arguments).contiguous() if sizes.rows else _fake(*arguments)


@direct.implementation(alias_free_activation, "cuda")
def _cuda(*arguments):
    tensors, form = named(arguments)
    sizes = check(tensors, form)
    if not sizes.rows:
        return _fake(*arguments)
    x = adjacent(tensors.x)
    compute = ready(sizes, x.stride(), x.dtype, x.get_device(), form.activation, form.log_scale)
    if compute is None:
        return composed(*arguments).contiguous()
    return compute(x, *tensors.beside_x())


@lru_cache(maxsize=1024)
def ready(
    sizes: AliasFree, strides: tuple, dtype: torch.dtype, index: int, activation: str, log_scale: bool
) -> Callable | None:
    """(x, up_filter, down_filter, alpha, beta) -> y on GPU ``index``; None if torch computes."""
    config = tile.choose(sizes, dtype, activation, log_scale)
    if plan.refusal(sizes) or (dtype == torch.bfloat16 and device.of(index).cc < BFLOAT16_CC):
        return None
    shape = sizes.batch, sizes.channels, sizes.out_length
    return Ready(shape, dtype, index, plan.prepare(sizes, strides, config))


@lru_cache(maxsize=1024)
def remembered(
    x, up_filter, down_filter, alpha, beta, up_ratio: int, down_ratio: int, log_scale: bool, activation: str
) -> direct.Call | None:
    """The call for these layouts (None without alpha or beta); None if full checks must decide.

    Operands may have dimensions of size one if no gradient is wanted. Raises as ``check``.
    """
    operands = [Layout(*one) for one in (up_filter, down_filter, alpha, beta) if one]
    of_x = Layout(*x)
    shape, dtype, index = of_x.shape, of_x.dtype, of_x.index
    if not (computes_on(index) and len(shape) == 3 and 0 not in shape and dtype in PRECISIONS):
        return None
    if activation not in ACTIVATIONS or (alpha is None) == (activation == "snake") or (beta and not alpha):
        return None
    sizes = [max(one.shape, default=0) for one in operands]
    if not all(
        (one.dtype, one.index) == (dtype, index) and one.is_contiguous and math.prod(one.shape) == size
        for one, size in zip(operands, sizes, strict=True)
    ):
        return None
    up_taps, down_taps, *channels = sizes
    if any(count != shape[1] for count in channels) or not are_adjacent(shape, of_x.strides):
        return None
    problem = alias_free(shape, up_taps, down_taps, up_ratio, down_ratio)
    made = ready(problem, tuple(of_x.strides), dtype, index, activation, log_scale)
    if made is None:
        return None

    def tied(x, up_filter, down_filter, alpha, beta):
        return made(x, up_filter, down_filter, alpha, alpha)

    def without(x, up_filter, down_filter, alpha, beta):
        return made(x, up_filter, down_filter, up_filter, up_filter)

    def keep(ctx, *tensors):
        _setup_context(ctx, (*tensors, up_ratio, down_ratio, log_scale, activation), None)

    return direct.call(alias_free_activation, made if beta else tied if alpha else without, keep)


def computes_on(index: int) -> bool:
    return index >= 0


@torch.library.register_fake(NAME)
def _fake(*arguments):
    tensors, form = named(arguments)
    sizes = check(tensors, form)
    return tensors.x.new_empty((sizes.batch, sizes.channels, sizes.out_length))


# The derivative


def _setup_context(ctx, inputs, output):
    # Named in backward: forward calls cost less.
    ctx.choices = inputs[TENSOR_COUNT:]
    ctx.save_for_backward(*inputs[:TENSOR_COUNT])


def _backward(ctx, grad_output):
    form, tensors = Form(*ctx.choices), Tensors(*ctx.saved_tensors)
    wanted = Tensors(*ctx.needs_input_grad[:TENSOR_COUNT])
    if torch.is_grad_enabled() or wanted.up_filter or wanted.down_filter or not _has_kernels(tensors, form):
        return *composed_gradients(grad_output, tensors, wanted, form), *[None] * 4
    parameters = wanted.alpha or wanted.beta
    for_x, for_alpha, for_beta = alias_free_gradients(grad_output, *tensors, *form, parameters)
    found = for_x, None, None, for_alpha, for_beta
    return *(one if w else None for one, w in zip(found, wanted, strict=True)), *[None] * 4


def _has_kernels(tensors: Tensors, form: Form) -> bool:
    x = tensors.x
    if not x.is_cuda or (x.dtype == torch.bfloat16 and device.of(x.get_device()).cc < BFLOAT16_CC):
        return False
    sizes = check(tensors, form)
    return sizes.rows > 0 and gradient_plan.refusal(sizes) is None


def composed_gradients(grad_output, tensors: Tensors, wanted, form: Form) -> list:
    """Gradients through ``composed``, differentiable if recorded; None if not wanted."""
    again = torch.is_grad_enabled()

    def own(tensor, wanted):  # operands may depend on each other
        return tensor.view_as(tensor) if again else tensor.detach().requires_grad_(wanted)

    with torch.enable_grad(), torchs.without_autocast(grad_output):
        tensors = [one if one is None else own(one, w) for one, w in zip(tensors, wanted, strict=True)]
        outputs = composed(*tensors, *form)
        operands = [one for one, w in zip(tensors, wanted, strict=True) if w]
        found = iter(torch.autograd.grad(outputs, operands, grad_output, create_graph=again, allow_unused=True))
    return [next(found) if w else None for w in wanted]


direct.register(alias_free_activation, _backward, _setup_context)


GRADIENTS = "numba_tconv::alias_free_gradients"

torch.library.define(
    GRADIENTS, f"(Tensor grad_output, {TENSORS}, {CHOICES}, bool parameters) -> (Tensor, Tensor, Tensor)"
)
alias_free_gradients = torch.ops.numba_tconv.alias_free_gradients.default


@direct.implementation(alias_free_gradients, "cuda")
def _gradients_cuda(grad_output, *arguments):
    *arguments, parameters = arguments
    tensors, form = named(arguments)
    sizes = check(tensors, form)
    x, grad_output = adjacent(tensors.x), adjacent(grad_output)
    config = gradient_tile.choose(sizes, x.dtype, form.activation, form.log_scale, parameters)
    tied = tensors.beta is None
    compute = ready_gradients(sizes, x.stride(), grad_output.stride(), config, x.get_device(), tied)
    return compute(x, grad_output, *tensors.beside_x())


@lru_cache(maxsize=1024)
def ready_gradients(
    sizes: AliasFree, strides: tuple, grad_strides: tuple, config: gradient_tile.Config, index: int, tied: bool
) -> Callable[..., tuple]:
    """(x, grad_output, up_filter, down_filter, alpha, beta) -> results on GPU ``index``. ``tied``: beta is alpha."""
    dtype, partials = config.dtype, gradient_plan.partials_of(sizes, config)
    x_room = room((sizes.batch, sizes.channels, sizes.length), dtype, index)
    has_alpha, has_beta = config.parameters, config.parameters and not tied
    alpha_room, beta_room = (room((sizes.channels if has else 0,), dtype, index) for has in (has_alpha, has_beta))
    partials_room = room((partials,), accumulator_of(dtype), index)
    launch = gradient_plan.prepare(sizes, strides, grad_strides, config)
    add_up = gradient_plan.prepare_parameters(sizes, config, tied) if config.parameters else None

    def compute(x, grad_output, up_filter, down_filter, alpha, beta):
        if not device.is_current(index):
            with torch.cuda.device(index):
                return compute(x, grad_output, up_filter, down_filter, alpha, beta)
        found, sums = (x_room(), alpha_room(), beta_room()), partials_room()
        launch(x, grad_output, up_filter, down_filter, alpha, beta, found[0], sums)
        if add_up:
            add_up(sums, alpha, beta, *found[1:])
        return found

    return compute


@torch.library.register_fake(GRADIENTS)
def _gradients_fake(grad_output, *arguments):
    *arguments, parameters = arguments
    tensors, form = named(arguments)
    sizes = check(tensors, form)
    has_alpha, has_beta = parameters, parameters and tensors.beta is not None
    counts = (sizes.channels if has else 0 for has in (has_alpha, has_beta))
    x = tensors.x
    return x.new_empty((sizes.batch, sizes.channels, sizes.length)), *(x.new_empty((count,)) for count in counts)


flops.register_activation(alias_free_activation, alias_free_gradients)
