"""The causal transposed convolution of signals that arrive a few frames at a time.

An output needs the F input frames before its own: F = max(0, ceil((k - stride) / stride)), k = dilation*(K - 1) + 1.
The state holds them: (N, C_in, F), zeros at the start. Its N slots advance together or rest by a mask;
``state[i].zero_()`` starts slot i anew.

    >>> weight, bias = torch.randn(8, 4, 6), torch.randn(4)
    >>> state = initial_state(1, weight, stride=3)
    >>> x = torch.randn(1, 8, 10)
    >>> steps = [step(chunk, state, weight, bias, stride=3) for chunk in x.split(2, dim=2)]
    >>> whole = torch.conv_transpose1d(x, weight, bias, stride=3)[:, :, : 10 * 3]
    >>> torch.allclose(torch.cat(steps, dim=2), whole, atol=1e-5)
    True

With left padding p, drop the stream's first p samples: ``torch.cat(steps, dim=2)[:, :, p:]``.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch.autograd import forward_ad

from numba_tconv.formula.precision import PRECISIONS, TF32_ALLOWED
from numba_tconv.formula.problem import Problem
from numba_tconv.formula.taps import Taps
from numba_tconv.kernels.streaming import mma_tile, plan, tile
from numba_tconv.runtime import device
from numba_tconv.runtime.layout import Layout, layout_of
from numba_tconv.runtime.ready import Ready

from . import fast_path as direct
from . import operators as ops
from .functional import autocasts, default_precision, require_known
from .sizes import integer, integers

# Most new frames of a slot, of all, of all on tensor cores.
MOST_FRAMES, MOST_COLUMNS, MOST_MMA_COLUMNS = 32, 256, 512
PINNED = ("ieee", "fp64")  # the same sums for all chunks
NAME = "numba_tconv::streaming_step"

torch.library.define(
    NAME,
    "(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, Tensor? mask, SymInt stride, SymInt groups, "
    "SymInt dilation, str precision) -> Tensor",
)
_operator = torch.ops.numba_tconv.streaming_step.default


def initial_state(
    batch_size: int, weight: torch.Tensor, stride=1, dilation=1, *, dtype=None, device=None
) -> torch.Tensor:
    """The state of ``batch_size`` streams at their start: zeros (batch_size, C_in, F).

    ``weight``: (C_in, C_out/groups, K), whose dtype and device are the defaults. Raises TypeError and RuntimeError for
    sizes that no layer has.
    """
    stride, _, dilation = _step_integers(stride, 1, dilation)
    batch_size = integer("batch_size", batch_size)
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"weight must be a Tensor, not {type(weight).__name__}")
    if weight.dim() != 3:
        raise RuntimeError(f"weight must be (C_in, C_out/groups, K), got shape {tuple(weight.shape)}")
    if batch_size < 0:
        raise RuntimeError(f"batch_size must not be negative, got {batch_size}")
    in_channels, out_channels, kernel_size = weight.shape
    kept = kept_frames(Problem(1, in_channels, out_channels, kernel_size, 1, stride=stride, dilation=dilation))
    return weight.new_zeros((batch_size, in_channels, kept), dtype=dtype, device=device, requires_grad=False)


def kept_frames(problem: Problem) -> int:
    """F, the frames of a slot's state."""
    return Taps(problem.kernel_size, problem.stride, problem.dilation).shift(problem.kernel_size - 1)


def step(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride=1,
    groups=1,
    dilation=1,
    mask: torch.Tensor | None = None,
    *,
    precision: str | None = None,
) -> torch.Tensor:
    """The next outputs of N streams, (N, C_out, T*stride), from T new frames; ``state`` is updated in place.

    Args:
        x: (N, C_in, T), T from 1 up, any strides.
        state: (N, C_in, F), contiguous (see ``initial_state``); shares no memory with other arguments.
        weight: (C_in, C_out/groups, K), any strides.
        bias: (C_out,) or None, once in each output.
        stride, groups, dilation: as for ``conv_transpose1d``.
        mask: (N,) bool, contiguous. False slots keep their state and output zeros.
        precision: as for ``conv_transpose1d``, but a step in "tf32" may be exact.

    Concatenated steps are the first T*stride outputs of ``conv_transpose1d`` of all T frames without padding, within
    rounding. On GPUs in "ieee" and "fp64" they have the bits of its ``variant`` k2_polyphase, whatever the chunks and
    the mask. In others, None included, the order of sums depends on the numbers of slots and new frames.

    A step has no gradient and no rule for torch.func.vmap. torch.compile compiles it, and a CUDA graph captures it
    after one step of the same sizes. The zeros before a stream are multiplied: an infinite weight makes the first
    outputs NaN where the whole signal's are finite.

    Raises:
        TypeError: wrong type.
        RuntimeError: a shape, dtype, device or layout is wrong, state shares memory, a gradient or tangent is wanted,
            or torch.autocast would cast x. The state is unchanged.
        ValueError: the dtype does not have ``precision``.
    """
    for name, tensor in (("x", x), ("state", state), ("weight", weight), ("bias", bias), ("mask", mask)):
        if not isinstance(tensor, torch.Tensor) and not (name in ("bias", "mask") and tensor is None):
            raise TypeError(f"{name} must be a Tensor, not {type(tensor).__name__}")
    if torch.is_grad_enabled():
        for name, tensor in (("x", x), ("state", state), ("weight", weight), ("bias", bias)):
            if tensor is not None and tensor.requires_grad:
                raise RuntimeError(f"a step has no gradient, but {name} requires one: call it under torch.no_grad()")
    if forward_ad._current_level >= 0:
        for name, tensor in (("x", x), ("state", state), ("weight", weight), ("bias", bias)):
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                raise RuntimeError(f"a step has no derivative in forward mode, but {name} has a tangent")
    if autocasts(x) and x.dtype != torch.get_autocast_dtype(x.device.type):
        raise RuntimeError(
            "a step does not follow torch.autocast, which would change the dtype of x but not of the state: "
            "call it outside, with layer, x and state in one dtype"
        )
    require_known(None, precision)
    precisions = PRECISIONS.get(x.dtype, ())
    if precision is not None and precision not in precisions:
        raise ValueError(f"unknown precision {precision!r}: {x.dtype} has {', '.join(precisions) or 'none to name'}")
    if not precisions:
        raise RuntimeError(f"x must be of {', '.join(map(str, PRECISIONS))}, got {x.dtype}")
    precision = precision or default_precision(x.dtype)
    stride, groups, dilation = _step_integers(stride, groups, dilation)
    if (
        not torch.compiler.is_dynamo_compiling()
        and x.is_cuda
        and direct.is_clear(x, weight, bias)
        and direct.is_clear(state, mask)
    ):
        return _cuda(x, state, weight, bias, mask, stride, groups, dilation, precision)
    return _operator(x, state, weight, bias, mask, stride, groups, dilation, precision)


def _step_integers(stride, groups, dilation) -> tuple[int, int, int]:
    stride, _, _, groups, dilation = integers(stride, 0, 0, groups, dilation)
    return stride, groups, dilation


def _problem(x, state, weight, bias, mask, stride, groups, dilation) -> Problem:
    """The step's problem, of T positions. Raises RuntimeError, and TypeError for the mask."""
    for name, tensor in (("state", state), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise RuntimeError(f"{name} must have the dtype of x, {x.dtype}, got {tensor.dtype}")
    for name, tensor in (("state", state), ("weight", weight), ("bias", bias), ("mask", mask)):
        if tensor is not None and tensor.device != x.device:
            raise RuntimeError(f"{name} must be on the device of x, {x.device}, got {tensor.device}")
    if len(x.shape) != 3:
        raise RuntimeError(f"x must be (N, C_in, T), got shape {tuple(x.shape)}")
    if x.shape[2] == 0:
        raise RuntimeError(f"x must have one frame or more, got shape {tuple(x.shape)}")
    shapes = x.shape, weight.shape, None if bias is None else bias.shape
    problem = ops._problem(*shapes, stride, 0, 0, groups, dilation)
    wanted = problem.batch, problem.in_channels, kept_frames(problem)
    if tuple(state.shape) != wanted:
        raise RuntimeError(
            f"state must be (N, C_in, F) = {wanted} for x {tuple(x.shape)} and weight {tuple(weight.shape)} with "
            f"stride {stride} and dilation {dilation}, got {tuple(state.shape)}: see initial_state"
        )
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask must be of torch.bool, got {mask.dtype}")
    if mask is not None and tuple(mask.shape) != wanted[:1]:
        raise RuntimeError(f"mask must be (N,) = ({wanted[0]},), got {tuple(mask.shape)}")
    if not state.is_contiguous():
        raise RuntimeError(f"state must be contiguous, got strides {tuple(state.stride())}")
    if mask is not None and not mask.is_contiguous():
        raise RuntimeError(f"mask must be contiguous, got strides {tuple(mask.stride())}")
    return problem


def _refuse_overlap(state: torch.Tensor, **others: torch.Tensor | None) -> None:
    first = state.data_ptr()
    end = first + state.nbytes
    for name, tensor in others.items():
        if tensor is None or not tensor.numel():
            continue
        start = tensor.data_ptr()
        if start < end and first < start + _bytes(tensor):
            raise RuntimeError(f"state must not share memory with {name}, because a step overwrites it")


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes from first to last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@torch.library.register_fake(NAME)
def _fake(x, state, weight, bias, mask, stride, groups, dilation, precision):
    problem = _problem(x, state, weight, bias, mask, stride, groups, dilation)
    return x.new_empty((problem.batch, problem.out_channels, problem.length * problem.stride))


@lru_cache(maxsize=1024)
def convolution_of(problem: Problem) -> Problem:
    """The problem of state and new frames, for the new outputs alone."""
    p, kept = problem, kept_frames(problem)
    padding = kept * p.stride
    beyond = padding - (p.dilation * (p.kernel_size - 1) + 1 - p.stride)
    return replace(p, length=kept + p.length, padding=padding, output_padding=beyond)


def convolutions_choice(precision: str) -> tuple[str, str]:
    """Variant and precision; "tf32" may be exact."""
    return "k2_polyphase" if precision in PINNED else "", TF32_ALLOWED if precision == "tf32" else precision


def _by_convolution(x, state, weight, bias, mask, problem: Problem, convolve: Callable) -> torch.Tensor:
    """A step of several launches."""
    p = convolution_of(problem)
    frames = torch.cat([state, x], dim=2)
    y = convolve(frames, weight, bias, p.stride, p.padding, p.output_padding, p.groups, p.dilation)
    new = frames[:, :, problem.length :]
    if mask is not None:
        y.masked_fill_(~mask[:, None, None], 0)
        new = torch.where(mask[:, None, None], new, state)
    state.copy_(new)
    return y


@direct.implementation(_operator, "cpu")
def _cpu(x, state, weight, bias, mask, stride, groups, dilation, precision):
    problem = _problem(x, state, weight, bias, mask, stride, groups, dilation)
    _refuse_overlap(state, x=x, weight=weight, bias=bias, mask=mask)
    return _by_convolution(
        x, state, weight, bias, mask, problem, lambda *operands: torch.conv_transpose1d(*operands).contiguous()
    )


@direct.implementation(_operator, "cuda")
def _cuda(x, state, weight, bias, mask, stride, groups, dilation, precision):
    compute = _ready(
        *(layout_of(x), layout_of(state), layout_of(weight), bias is not None and layout_of(bias)),
        *(mask is not None and layout_of(mask), stride, groups, dilation, precision),
    )
    _refuse_overlap(state, x=x, weight=weight, bias=bias, mask=mask)
    if not state.is_inference():
        torch.autograd.graph.increment_version(state)
    return compute(x, state, weight, bias, mask)


class _Told:
    """A layout with what ``_problem`` reads of tensors."""

    def __init__(self, laid_out: tuple):
        self.shape, self.strides, self.dtype, index, _ = self.layout = Layout(*laid_out)
        self.device = torch.device("cpu") if index < 0 else torch.device("cuda", index)

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def is_contiguous(self) -> bool:
        return self.layout.is_contiguous


@lru_cache(maxsize=1024)
def _ready(x, state, weight, bias, mask, stride, groups, dilation, precision) -> Callable[..., torch.Tensor]:
    """The function (x, state, weight, bias, mask) -> outputs for these layouts; raises as ``step``."""
    told = [_Told(one) if one else None for one in (x, state, weight, bias, mask)]
    problem = _problem(*told, stride, groups, dilation)
    p, (_, _, dtype, index, _) = problem, x
    shape = p.batch, p.out_channels, p.length * p.stride
    if 0 in shape:
        return Ready(shape, dtype, index, lambda *_: None)
    of_x, of_state, of_weight, of_bias = (one and one.layout for one in told[:4])
    if config := config_of(of_x, of_state, of_weight, p, precision, device.of(index)):
        return Ready(shape, dtype, index, plan.prepare(of_x, of_weight, of_bias, bool(mask), p, config))
    choice = convolutions_choice(precision)

    def compute(x, state, weight, bias, mask):
        return _by_convolution(
            x, state, weight, bias, mask, p, lambda *operands: ops.conv_transpose1d(*operands, *choice)
        )

    return compute


def config_of(
    x: Layout, state: Layout, weight: Layout, problem: Problem, precision: str, gpu: device.Device
) -> plan.AnyConfig | None:
    """The tile of a step of one launch; None for several."""
    pinned, columns = precision in PINNED, problem.batch * problem.length
    is_short = problem.length <= MOST_FRAMES and columns <= MOST_MMA_COLUMNS
    if gpu.cc < tile.MINIMUM_CC or not (pinned or is_short):
        return None
    config = plan.choose(x, state, weight, problem, precision, gpu)
    return config if pinned or columns <= MOST_COLUMNS or isinstance(config, mma_tile.Config) else None
