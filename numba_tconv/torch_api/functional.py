"""``conv_transpose1d``: torch's function, computed by this package's kernels where the tensors are on a GPU."""

from __future__ import annotations

import contextlib
import operator
from functools import lru_cache, partial

import torch
from torch.overrides import handle_torch_function, has_torch_function_variadic

from numba_tconv.formula.precision import PRECISIONS, TF32_ALLOWED
from numba_tconv.runtime.layout import Layout, layout_of
from numba_tconv.selection.registry import RUNGS

from . import fast_path as direct
from . import gradient_operators as grad_ops
from . import operators as ops
from . import sharding, transforms

# Of torch.backends.cudnn.conv, whose attribute fp32_precision asks the same, but takes a microsecond to be found.
CUDNN_CONVOLUTIONS = "cuda", "conv"
NAMES = (str, type(None))  # the types of `variant` and `precision`
# The arguments that are integers, in torch's order.
INTEGERS = ("stride", "padding", "output_padding", "groups", "dilation")


def conv_transpose1d(
    input,
    weight,
    bias=None,
    stride=1,
    padding=0,
    output_padding=0,
    groups=1,
    dilation=1,
    *,
    variant=None,
    precision=None,
):
    """Transposed 1-D convolution: ``torch.nn.functional.conv_transpose1d`` with two more, keyword-only, arguments.

    ``y[n, co, o] = bias[co] + sum of x[n, ci, i] * w[ci, co, k]`` over all ``i``, ``k`` of the group of ``co`` with
    ``o = i*stride - padding + k*dilation``, and
    ``L_out = (L - 1)*stride - 2*padding + dilation*(K - 1) + output_padding + 1``.

    Args:
        input: (N, C_in, L), or unbatched (C_in, L); of any strides.
        weight: (C_in, C_out/groups, K), of any strides.
        bias: (C_out,) or None.
        stride, padding, output_padding, dilation: in samples; an int or a tuple of one int.
        groups: int.
        variant: the name of the rung of the ladder that shall compute it (see ``rungs``); None selects one.
        precision: how the products are formed. float32: "ieee" (exact products, float32 sums), "tf32" (operands
            rounded to 11 bits, on tensor cores) or "tf32x3" (operands split in two of 11 bits, three products on tensor
            cores: errors of float32's order, but for inputs and weights that are less than 2^-17 of the largest near
            them, which are off by up to 2^-39 of that one; without a ``variant``, what no tensor-core rung takes is
            computed as "ieee", so depthwise layers and those of fewer than 8 input channels a group). The other dtypes
            know only their own: "fp64"; "fp16" and "bf16", which sum in float32. None follows torch's switch for
            convolutions: "tf32" where ``torch.backends.cudnn.conv.fp32_precision`` (or, which is the same,
            ``torch.backends.cudnn.allow_tf32``) allows it and a rung gains by it, else "ieee"; likewise each gradient,
            by its own rungs. Under torch.compile the switch is read while tracing. Where torch.autocast takes the dtype
            from float32 to another, what is named for float32 has no meaning, and is taken as None.

    Returns:
        (N, C_out, L_out) or (C_out, L_out), contiguous, of the dtype and on the device of input. Equal calls give
        bitwise equal results.

    CUDA tensors of float64, float32, float16 and bfloat16 are computed by this package, on torch's current stream and
    without synchronising; torch.autocast is followed. All else is handed to torch's own operator: CPU tensors, complex
    dtypes, an empty batch, no output channels, and below compute capability 8.0 dense layers and bfloat16. Gradients
    are computed by kernels of this package too, and by torch where none of them is meant for the layer. Derivatives may
    be of any order, in reverse and in forward mode, and taken by the transforms of torch.func, vmap included, which
    computes one slice after the other.

    An infinity or NaN reaches the outputs that the definition sends it to. Where kernels multiply zeros in the place of
    what is absent, it also makes NaN of these, of the same sample:

    | computed by | one in the input | one in the weight |
    | --- | --- | --- |
    | k1_gather, k2_polyphase, torch on CPUs | none | none |
    | k3_shared_tile, k4_register_tile, depthwise, k5_dmma | none | those at the ends |
    | k5_mma, k6_wgmma | those nearby | those at the ends |
    | gradient for the input | those nearby, by tensor cores or of depthwise layers | those at the ends |
    | gradient for the weight | other taps of its channels | |

    The ends are ``dilation*(K - 1) + stride + output_padding`` outputs long. On tensor cores, but in "fp64", an
    infinity may itself become NaN: always in "tf32x3", else where sums are split over channels, as for few samples.

    torch.export and torch.onnx.export write torch's own operator into their programs, unless ``variant`` or
    ``precision`` is named: such a program runs anywhere, and by this package's kernels within ``routed``. Tensors and
    modes with a ``__torch_function__`` are given this function.

    Raises:
        TypeError: an argument of the wrong type, as in torch.
        RuntimeError: shapes, dtypes, devices or values that torch refuses.
        ValueError: an unknown ``variant``, or a ``precision`` that the dtype does not have.
        NotImplementedError: the named ``variant`` cannot do this problem, or no rung can in the named ``precision``
            (but see "tf32x3"), or one was named for tensors that are handed to torch.
    """
    if not torch.compiler.is_dynamo_compiling():
        call = _at_once(input, weight, bias, stride, padding, output_padding, groups, dilation, variant, precision)
        if call:
            return call(input, weight, bias)
    if has_torch_function_variadic(input, weight, bias):
        return handle_torch_function(
            *(conv_transpose1d, (input, weight, bias), input, weight, bias),
            *(stride, padding, output_padding, groups, dilation),
            variant=variant,
            precision=precision,
        )

    for name, tensor in (("input", input), ("weight", weight), ("bias", bias)):
        if not isinstance(tensor, torch.Tensor) and not (name == "bias" and tensor is None):
            raise TypeError(f"{name} must be a Tensor, not {type(tensor).__name__}")
    require_known(variant, None)

    dtype, unbatched = input.dtype, input.dim() == 2
    if autocasts(input):
        dtype = torch.get_autocast_dtype(input.device.type)
        if input.is_cuda:  # for CPU tensors torch's own function does it
            input, weight, bias = (t.to(dtype) if t is not None and autocasts(t) else t for t in (input, weight, bias))
        if dtype != torch.float32 and precision in PRECISIONS[torch.float32]:
            precision = None
    precisions = PRECISIONS.get(dtype, ())
    if precision is not None and precision not in precisions:
        raise ValueError(f"unknown precision {precision!r}: {dtype} has {', '.join(precisions) or 'none to name'}")

    ours = _ours(input, weight, bias)
    if not ours and (variant is not None or precision not in (None, *precisions[:1])):
        choice = f"variant {variant!r}" if variant is not None else f"precision {precision!r}"
        raise NotImplementedError(
            f"{choice} needs dense CUDA tensors of {', '.join(map(str, PRECISIONS))}, "
            f"got {dtype} on {input.device}, which torch's own operator computes"
        )
    exported = variant is precision is None and torch.compiler.is_exporting()
    if not ours or exported or _is_empty(input, weight):
        output = torch.conv_transpose1d(input, weight, bias, stride, padding, output_padding, groups, dilation)
        return output if exported or output.layout != torch.strided else output.contiguous()

    sharding.prepare()
    output = transforms.apply(
        ops.conv_transpose1d,
        *(input.unsqueeze(0) if unbatched else input, weight, bias),
        *_integers(stride, padding, output_padding, groups, dilation),
        *(variant or "", precision or default_precision(input.dtype)),
    )
    return output.squeeze(0) if unbatched else output


def require_known(variant, precision) -> None:
    """Raise ValueError for a ``variant`` that is no rung, and for a ``precision`` that no dtype has."""
    if variant is not None and variant not in RUNGS:
        raise ValueError(f"unknown variant {variant!r}: the rungs are {', '.join(RUNGS)}")
    if precision is not None and not any(precision in precisions for precisions in PRECISIONS.values()):
        known = ", ".join(one for precisions in PRECISIONS.values() for one in precisions)
        raise ValueError(f"unknown precision {precision!r}: there are {known}")


def _at_once(
    input, weight, bias, stride, padding, output_padding, groups, dilation, variant, precision
) -> direct.Call | None:
    """What computes this call and all that are like it; None where that takes a closer look."""
    if type(stride) is tuple:  # as layers have them
        try:
            (stride,), (padding,), (output_padding,), (dilation,) = stride, padding, output_padding, dilation
        except (TypeError, ValueError):
            return None
    # What is equal need not be as good: True is 1, and so is 1.0.
    if not type(stride) is type(padding) is type(output_padding) is type(groups) is type(dilation) is int:
        return None
    if type(variant) not in NAMES or type(precision) not in NAMES or torch._C._is_any_autocast_enabled():
        return None
    if weight is None or not direct.is_clear(input, weight, bias):
        return None
    laid_out, tf32 = layout_of(input), precision is None and input.dtype is torch.float32 and _torch_allows_tf32()
    of_weight, of_bias = layout_of(weight), None if bias is None else layout_of(bias)
    # Not unpacked from tuples, which would take a third of a microsecond.
    return _call(
        laid_out, of_weight, of_bias, stride, padding, output_padding, groups, dilation, variant, precision, tf32
    )


@lru_cache(maxsize=1024)
def _call(
    input, weight, bias, stride, padding, output_padding, groups, dilation, variant, precision, tf32
) -> direct.Call | None:
    """The call of tensors of these layouts; None if it is none of ours, or bad in ways that it takes the arguments
    themselves to tell. ``tf32``: torch allows it. Raises what the operator raises."""
    laid_out = [Layout(*one) for one in (input, weight, bias) if one]
    (shape, _, dtype, index, _), precisions = laid_out[0], PRECISIONS.get(laid_out[0].dtype, ())
    if not (
        ops.computes_on(index) and len(shape) == 3 and shape[0] and all(one[2:4] == (dtype, index) for one in laid_out)
    ):
        return None
    if not precisions or 0 in laid_out[1].shape:
        return None
    if precision not in (None, *precisions) or variant not in (None, *RUNGS):
        return None
    precision = precision or (TF32_ALLOWED if tf32 else precisions[0])
    others = stride, padding, output_padding, groups, dilation, variant or "", precision
    if not all(_fits(number) for number in others[:5]):
        return None
    compute = ops.ready(input, weight, bias, *others)
    constants = grad_ops.constants_of(input[0], weight[0], others)
    return direct.call(ops.conv_transpose1d, compute, partial(grad_ops.keep, constants))


def _ours(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether this package's operator computes it; torch's own does otherwise."""
    return (
        input.is_cuda
        and input.dtype in PRECISIONS
        and input.layout == weight.layout == torch.strided
        and (bias is None or bias.layout == torch.strided)
    )


def _is_empty(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there are no samples, or no output channels: which of them it accepts, torch decides by device."""
    return (input.dim() == 3 and input.size(0) == 0) or (weight.dim() == 3 and weight.size(1) == 0)


def default_precision(dtype: torch.dtype) -> str:
    """What ``precision=None`` means for a dtype of PRECISIONS, by torch's switch now; see selection.arithmetic."""
    return TF32_ALLOWED if dtype == torch.float32 and _torch_allows_tf32() else PRECISIONS[dtype][0]


def _torch_allows_tf32() -> bool:
    """Whether torch may compute convolutions of float32 in TF32, by the question that its own convolutions ask.

    It sees what was set in either way, while the older ``cudnn.allow_tf32`` raises once the newer settings were used.
    """
    return torch._C._get_fp32_precision_getter(*CUDNN_CONVOLUTIONS) == "tf32"


# As torch.compiler.assume_constant_result marks it, which would import torch._dynamo, for seconds, with this package:
# torch.compile cannot trace the setting, so it takes the answer.
_torch_allows_tf32._dynamo_marked_constant = True


def autocasts(tensor: torch.Tensor) -> bool:
    """Whether torch.autocast is on, and hands such a tensor to torch's convolutions in the dtype that it was given."""
    device = tensor.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return False
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _integers(*arguments) -> list[int]:
    """The arguments that INTEGERS names, each an int, or what stands for one, or but for groups a sequence of one.

    Of several bad ones, the error is about the one that torch finds first. It looks at the types of all of them, of a
    sequence at its first; then whether all of each are integers of 64 bits; then at the lengths of sequences.
    """
    plain = []
    for value in arguments:
        if type(value) is tuple and len(value) == 1:
            value = value[0]
        if type(value) is not int or not _fits(value):
            break
        plain.append(value)
    else:
        if type(arguments[INTEGERS.index("groups")]) is int:
            return plain
    given = [
        (name, value, TypeError)
        if isinstance(value, (tuple, list)) and name != "groups"
        else (name, (value,), ValueError)
        for name, value in zip(INTEGERS, arguments, strict=True)
    ]
    for name, values, _ in given:
        for value in values[:1]:
            _int(name, value)
    for name, values, too_large in given:
        for value in values:
            if not _fits(_int(name, value)):
                raise too_large(f"{name} must fit in 64 bits, got {value}")
    for name, values, _ in given:
        if len(values) != 1:
            raise RuntimeError(f"{name} must be one integer or a tuple of one, got {values}")
    return [_int(name, value) for name, (value,), _ in given]


def _fits(number: int) -> bool:
    """Whether 64 bits hold it."""
    return -(2**63) <= number < 2**63


def _int(name: str, value) -> int:
    """An integer: int, or what stands for one (a NumPy integer, a tensor of one), but no bool."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
