"""``conv_transpose1d``: torch's function on this package's kernels."""

from functools import lru_cache, partial

import torch
from torch.overrides import handle_torch_function, has_torch_function_variadic

from numba_tconv.formula.padding import WORDS, parts_of
from numba_tconv.formula.precision import PRECISIONS, TF32_ALLOWED
from numba_tconv.formula.problem import Parameters
from numba_tconv.runtime.layout import Layout, layout_of
from numba_tconv.selection.registry import RUNGS

from . import fast_path as direct
from . import gradient_operators as grad_ops
from . import operators as ops
from . import sharding, torchs, transforms
from .sizes import check_output_padding, fits, integers, is_own_padding, is_zero, out_length, own_sizes, with_ends

# torch.backends.cudnn.conv, whose attribute fp32_precision is slower to ask.
CUDNN_CONVOLUTIONS = "cuda", "conv"
NAMES = (str, type(None))  # types of `variant`, `precision`


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
    """``torch.nn.functional.conv_transpose1d``, with ``variant`` and ``precision`` added.

    ``y[n, co, o] = bias[co] + sum of x[n, ci, i] * w[ci, co, k]`` over co's group, with
    ``o = i*stride - padding + k*dilation`` and
    ``L_out = (L - 1)*stride - 2*padding + dilation*(K - 1) + output_padding + 1``.

        >>> conv_transpose1d(torch.ones(1, 8, 10), torch.ones(8, 4, 6), stride=2).shape
        torch.Size([1, 4, 24])

    Args:
        input: (N, C_in, L) or (C_in, L), any strides.
        weight: (C_in, C_out/groups, K), any strides.
        bias: (C_out,) or None.
        stride, output_padding, dilation: samples; an int or a tuple of one.
        padding: an int or a tuple of one, or a pair or word, see below.
        groups: int.
        variant: name of a rung (see ``rungs``); None selects.
        precision: see below; None follows torch's switch.

    Returns:
        (N, C_out, L_out) or (C_out, L_out), contiguous, dtype and device of input. Equal calls give equal bits.

    Raises:
        TypeError: wrong type, as in torch.
        RuntimeError: torch refuses shapes, dtypes, devices or values; no output is left.
        ValueError: unknown ``variant`` or padding word, or the dtype lacks ``precision``.
        NotImplementedError: the named ``variant`` or ``precision`` cannot compute this, or torch computes it.

    **Padding.** An int crops both ends. A pair ``(left, right)`` crops each end by its own number; a negative number
    adds outputs, bias alone unless a tap reaches them. With ``k = dilation*(K - 1) + 1``:

    * "valid" is ``(0, 0)``.
    * "causal" is ``(0, k - stride)``: ``L*stride`` outputs, none of which depends on a later input.
    * "same" has ``L*stride`` outputs too: half of ``k - stride``, rounded down, is cropped left, the rest right. Where
      ``k < stride``, ``stride - k`` outputs are added right.

    ``output_padding`` is added right. Cropped outputs are not computed.

    **Precision.** float32 has three:

    * "ieee": exact products, float32 sums.
    * "tf32": operands rounded to 11 bits, on tensor cores.
    * "tf32x3": operands split in two parts of 11 bits, three products on tensor cores. Errors have float32's order, but
      numbers below 2^-17 of the largest nearby are off by up to 2^-39 of it. Without ``variant``, "ieee" computes what
      no tensor-core rung takes (depthwise, fewer than 8 input channels a group).

    Other dtypes have one: "fp64", "fp16", "bf16"; the last two sum in float32. None means "tf32" where
    ``torch.backends.cudnn.conv.fp32_precision`` (or ``torch.backends.cudnn.allow_tf32``) allows it and a rung gains,
    else "ieee", for each gradient separately. torch.compile reads the switch while tracing. Autocast to another dtype
    overrides a float32 precision.

    **Who computes.** This package computes CUDA tensors of float64, float32, float16 and bfloat16, on torch's current
    stream, without synchronising, and follows torch.autocast. torch computes CPU tensors, complex dtypes, empty
    batches, zero output channels, gradients that no kernel suits, subclasses whose ``__torch_dispatch__`` knows torch's
    operators alone, functionalize, forward mode inside forward mode, and, below compute capability 8.0, dense layers
    and bfloat16. Derivatives have any order, in reverse and forward mode and under torch.func; vmap goes slice by
    slice.

    **Infinities and NaN** go where the definition sends them. Kernels that multiply zeros in place of absent values
    make more outputs of the sample NaN:

    | computed by | one in the input | one in the weight |
    | --- | --- | --- |
    | k1_gather, k2_polyphase, torch on CPUs | none | none |
    | k3_shared_tile, k4_register_tile, depthwise, k5_dmma | none | those at the ends |
    | k5_mma, k6_wgmma | those nearby | those at the ends |
    | gradient for the input | those nearby, by tensor cores or of depthwise layers | those at the ends |
    | gradient for the weight | other taps of its channels | |

    An end is ``dilation*(K - 1) + stride + output_padding`` outputs long. On tensor cores, except in "fp64", an
    infinity may become NaN: always in "tf32x3", else where sums are split over channels, as for few samples.

    **Export.** torch.export and torch.onnx.export write torch's operator, unless ``variant`` or ``precision`` is named.
    It runs anywhere, and within ``routed`` by this package. A ``__torch_function__`` receives this function.
    """
    if not torch.compiler.is_dynamo_compiling():
        call = at_once(input, weight, bias, stride, padding, output_padding, groups, dilation, variant, precision)
        if call:
            return call(input, weight, bias)
    if has_torch_function_variadic(input, weight, bias):
        return handle_torch_function(
            *(conv_transpose1d, (input, weight, bias), input, weight, bias),
            *(stride, padding, output_padding, groups, dilation),
            variant=variant,
            precision=precision,
        )
    parameters = Parameters(stride, padding, output_padding, groups, dilation)
    return _computed(input, weight, bias, parameters, variant, precision)


def _computed(input, weight, bias, parameters: Parameters, variant, precision) -> torch.Tensor:
    """``conv_transpose1d`` without ``__torch_function__``; ``parameters`` are its arguments."""
    for name, tensor in (("input", input), ("weight", weight), ("bias", bias)):
        if not isinstance(tensor, torch.Tensor) and not (name == "bias" and tensor is None):
            raise TypeError(f"{name} must be a Tensor, not {type(tensor).__name__}")
    require_known(variant, None)

    dtype, unbatched, parts = input.dtype, input.dim() == 2, None
    if is_own_padding(parameters.padding):
        parameters, parts, inside = own_sizes(input, weight, *parameters)
    if autocasts(input):
        dtype = torch.get_autocast_dtype(input.device.type)
        if input.is_cuda or parts:  # torch casts CPU tensors
            input, weight, bias = (t.to(dtype) if t is not None and autocasts(t) else t for t in (input, weight, bias))
        if dtype != torch.float32 and precision in PRECISIONS[torch.float32]:
            precision = None
    precisions = PRECISIONS.get(dtype, ())
    if precision is not None and precision not in precisions:
        raise ValueError(f"unknown precision {precision!r}: {dtype} has {', '.join(precisions) or 'none to name'}")

    passed = transforms.nests_forward_mode() or transforms.is_functionalized()
    passed = passed or (torch.compiler.is_dynamo_compiling() and sharding.compute_themselves(input, weight, bias))
    ours = _ours(input, weight, bias) and not passed
    if not ours and (variant is not None or precision not in (None, *precisions[:1])):
        choice = f"variant {variant!r}" if variant is not None else f"precision {precision!r}"
        raise NotImplementedError(
            f"{choice} needs dense CUDA tensors of {', '.join(map(str, PRECISIONS))}, "
            "outside of nested forward mode and functionalize, "
            f"got {dtype} on {input.device}, which torch's own operator computes"
        )
    exported = variant is precision is None and is_exporting()
    if parts and not exported:
        ours = ours or (_ours(input, weight, bias, cpu=True) and not passed)  # for `warm`
    if not ours or exported or _is_empty(input, weight):
        compute = torchs.forward if parts else torch.conv_transpose1d
        output = compute(input, weight, bias, *parameters)
        if parts:
            output = with_ends(output, bias, parts, inside)
        return output if exported or output.layout != torch.strided else output.contiguous()

    sharding.prepare()
    if not parts:
        parameters = Parameters(*integers(*parameters))
        check_output_padding(parameters.output_padding, parameters.stride, parameters.dilation)
    operands = input.unsqueeze(0) if unbatched else input, weight, bias
    choice = variant or "", precision or default_precision(input.dtype)
    try:
        output = transforms.apply(ops.conv_transpose1d, *operands, *parameters, *choice)
    except (NotImplementedError, TypeError):
        if variant or precision or not sharding.compute_themselves(*operands):
            raise
        output = (torchs.forward if parts else torch.conv_transpose1d)(*operands, *parameters)
    output = output.squeeze(0) if unbatched else output
    return with_ends(output, bias, parts, inside) if parts else output


def require_known(variant, precision) -> None:
    if variant is not None and variant not in RUNGS:
        raise ValueError(f"unknown variant {variant!r}: the rungs are {', '.join(RUNGS)}")
    if precision is not None and not any(precision in precisions for precisions in PRECISIONS.values()):
        known = ", ".join(one for precisions in PRECISIONS.values() for one in precisions)
        raise ValueError(f"unknown precision {precision!r}: there are {known}")


def at_once(
    input, weight, bias, stride, padding, output_padding, groups, dilation, variant, precision
) -> direct.Call | None:
    """The remembered call; None if full checks must decide."""
    kind = type(padding)
    if type(stride) is tuple:  # from a layer
        try:
            (stride,), (output_padding,), (dilation,) = stride, output_padding, dilation
        except (TypeError, ValueError):
            return None
        if kind is tuple and len(padding) == 1:
            (padding,) = padding
            if (kind := type(padding)) is not int:
                return None
    if not type(stride) is type(output_padding) is type(groups) is type(dilation) is int:
        return None
    if (
        kind is not int
        and kind is not str
        and not (kind is tuple and len(padding) == 2 and type(padding[0]) is type(padding[1]) is int)
    ):
        return None
    if type(variant) not in NAMES or type(precision) not in NAMES or torch._C._is_any_autocast_enabled():
        return None
    if weight is None or not direct.is_clear(input, weight, bias):
        return None
    laid_out, tf32 = layout_of(input), precision is None and input.dtype is torch.float32 and torch_allows_tf32()
    of_weight, of_bias = layout_of(weight), None if bias is None else layout_of(bias)
    return _call(
        laid_out, of_weight, of_bias, stride, padding, output_padding, groups, dilation, variant, precision, tf32
    )


@lru_cache(maxsize=1024)
def _call(
    input, weight, bias, stride, padding, output_padding, groups, dilation, variant, precision, tf32
) -> direct.Call | None:
    """The call for these layouts; None if full checks must decide. Raises as the operator."""
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
    if not all(fits(number) for number in (stride, output_padding, groups, dilation)):
        return None
    if stride < 1 or dilation < 1 or not 0 <= output_padding < max(stride, dilation) or len(weight[0]) != 3:
        return None
    if not isinstance(padding, int):
        if padding not in WORDS and not (type(padding) is tuple and all(map(fits, padding))):
            return None
        parts = parts_of(padding, weight[0][2], stride, output_padding, dilation)
        padding, output_padding = parts.padding, parts.output_padding
        inside = out_length(shape[2], weight[0][2], stride, padding, output_padding, dilation)
        if parts.before or parts.after or inside < 1:
            return None
    if not fits(padding):
        return None
    numbers = Parameters(stride, padding, output_padding, groups, dilation)
    compute = ops.ready(input, weight, bias, *numbers, variant or "", precision)
    constants = grad_ops.constants_of(input[0], weight[0], numbers, precision)
    return direct.call(ops.conv_transpose1d, compute, partial(grad_ops.keep, constants))


def _ours(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cpu: bool = False) -> bool:
    return (
        (input.is_cuda or (cpu and input.is_cpu))
        and input.dtype in PRECISIONS
        and input.layout == weight.layout == torch.strided
        and (bias is None or bias.layout == torch.strided)
    )


def is_exporting() -> bool:
    """``torch.compiler.is_exporting()`` is also True under torch.compile (pytorch issue 176347)."""
    return torch.compiler._is_exporting_flag


def _is_empty(input: torch.Tensor, weight: torch.Tensor) -> bool:
    return (input.dim() == 3 and is_zero(input.size(0))) or (weight.dim() == 3 and is_zero(weight.size(1)))


def default_precision(dtype: torch.dtype) -> str:
    return TF32_ALLOWED if dtype == torch.float32 and torch_allows_tf32() else PRECISIONS[dtype][0]


def torch_allows_tf32() -> bool:
    """``cudnn.allow_tf32`` raises once a newer setting was used."""
    return torch._C._get_fp32_precision_getter(*CUDNN_CONVOLUTIONS) == "tf32"


# As torch.compiler.assume_constant_result, which would import torch._dynamo.
torch_allows_tf32._dynamo_marked_constant = True


def autocasts(tensor: torch.Tensor) -> bool:
    """Whether torch.autocast casts ``tensor`` for convolutions."""
    device = tensor.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return False
    return tensor.is_floating_point() and tensor.dtype != torch.float64
