"""``explain``."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from numba_tconv.formula.padding import parts_of
from numba_tconv.formula.precision import PRECISIONS, TF32_ALLOWED
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure import rows, workloads
from numba_tconv.runtime import device as devices
from numba_tconv.runtime.device import H200, Device
from numba_tconv.selection.forward import Decision, arithmetic, decide
from numba_tconv.selection.joined import joined
from numba_tconv.selection.registry import RUNGS
from numba_tconv.torch_api.functional import default_precision, require_known
from numba_tconv.torch_api.module import ConvTranspose1d
from numba_tconv.torch_api.sizes import check_output_padding

from .explanation import Candidate, Explanation, name_of

DATA = Path(__file__).parents[3] / "plots" / "data"  # not installed
NAMES = {gpu: name for name, gpu in devices.GPUS.items()}


def explain(
    what: Problem | nn.ConvTranspose1d | str,
    input_shape: tuple[int, ...] | None = None,
    *,
    dtype: torch.dtype | None = None,
    precision: str | None = None,
    variant: str | None = None,
    device: Device | torch.device | str | int | None = None,
    data: str | Path | None = None,
) -> Explanation:
    """How ``conv_transpose1d`` computes a problem on a GPU, and why. Nothing is allocated, compiled or run.

        >>> explain("kb64", precision="ieee", device=H200).taken.rung
        'k4_register_tile'

    Args:
        what: a Problem, a workload's name, or a layer (torch's or this package's).
        input_shape: (N, C_in, L) or (C_in, L); only for a layer.
        dtype, precision, variant: as in ``conv_transpose1d``; None is the layer's, else the call's default.
        device: a GPU's name or index, or a ``runtime.device.Device``; None is torch's current GPU, else the H200.
        data: directory of rows, with or without a bias; None is the checkout's.

    Raises:
        TypeError: ``what`` cannot be explained.
        ValueError: an unknown workload, dtype, precision or variant; a device that is no GPU; a missing or superfluous
            ``input_shape``; a lazy layer before its first call; a padding_mode other than "zeros"; an empty output.
        RuntimeError: sizes that torch refuses.
        NotImplementedError: ``variant`` cannot do the problem.
        RowsError: a file in ``data`` cannot be read.
    """
    layer = what if isinstance(what, nn.ConvTranspose1d) else None
    problem = _problem_of(what, input_shape)
    if dtype is None:
        dtype = layer.weight.dtype if layer else torch.float32
    if dtype not in PRECISIONS:
        raise ValueError(f"dtype must be one of {', '.join(map(str, PRECISIONS))}, got {dtype}")
    variant = variant or (layer.variant if isinstance(layer, ConvTranspose1d) else None)
    require_known(variant, None)
    precision = precision or (layer.precision if isinstance(layer, ConvTranspose1d) else None)
    if precision not in (None, *PRECISIONS[dtype]):
        raise ValueError(f"unknown precision {precision!r}: {dtype} has {', '.join(PRECISIONS[dtype])}")
    if not problem.batch or not problem.out_length:
        raise ValueError(f"{problem} has no outputs")
    assumed = device is None and not torch.cuda.is_available()
    here, gpu = _device_of(device)

    asked = precision or default_precision(dtype)
    computed = arithmetic(problem, dtype, variant or "", asked, here)
    decision = decide(problem, dtype, computed, here)
    if variant:
        decision = _named(variant, problem, dtype, computed, here)
    data = DATA if data is None else Path(data)
    joint = None if variant else joined(problem, dtype, asked, here)
    launched = joint.problem if joint else problem
    if joint:
        decision = decide(launched, dtype, computed, here)
    recorded = _recorded_for(problem, dtype, computed, gpu, data)
    candidates = tuple(
        _candidate(name, decision, launched, dtype, computed, here, recorded.get(name)) for name in RUNGS
    )
    why = _why(precision, asked, computed, dtype)
    return Explanation(
        *(problem, dtype, computed, why, gpu, here, candidates),
        by_torch=decision.by_torch,
        has_rows=data.is_dir(),
        assumed=assumed,
        joint=joint,
    )


def _problem_of(what, input_shape) -> Problem:
    if isinstance(what, nn.ConvTranspose1d):
        return _problem_of_layer(what, input_shape)
    if input_shape is not None:
        raise ValueError("input_shape is for a layer: a problem and a workload have their sizes")
    if isinstance(what, str):
        return workloads.get(what).problem
    if isinstance(what, Problem):
        return what
    raise TypeError(
        f"only a Problem, a workload's name or a ConvTranspose1d can be explained, not {type(what).__name__}"
    )


def _problem_of_layer(layer, input_shape) -> Problem:
    if layer.padding_mode != "zeros":
        raise ValueError(f"padding_mode must be 'zeros', got {layer.padding_mode!r}")
    if isinstance(layer, LazyModuleMixin):
        raise ValueError("a lazy layer has no sizes before its first call")
    if input_shape is None:
        raise ValueError("a layer needs input_shape, (N, C_in, L) or (C_in, L)")
    shape = tuple(input_shape) if len(input_shape) != 2 else (1, *input_shape)
    if len(shape) != 3 or shape[1] != layer.in_channels:
        raise RuntimeError(
            f"input_shape must be (N, {layer.in_channels}, L) or ({layer.in_channels}, L), got {tuple(input_shape)}"
        )
    (taps,), (stride,), (dilation,) = layer.kernel_size, layer.stride, layer.dilation
    check_output_padding(layer.output_padding[0], stride, dilation)
    padding = layer.padding[0] if len(layer.padding) == 1 else layer.padding
    parts = parts_of(padding, taps, stride, layer.output_padding[0], dilation)
    return Problem(
        *(shape[0], layer.in_channels, layer.out_channels, taps, shape[2]),
        *(stride, parts.padding, parts.output_padding, layer.groups, dilation),
        bias=layer.bias is not None,
    )


def _device_of(device) -> tuple[Device, str]:
    if device is None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else H200
    if isinstance(device, str):
        device = devices.GPUS.get(device, device)
    if isinstance(device, Device):
        version = ".".join(map(str, device.cc))
        return device, NAMES.get(device, f"a GPU of compute capability {version}")
    try:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        known = ", ".join(devices.GPUS)
        raise ValueError(f"device must be a GPU, as torch has it, or one of {known}, got {device!r}") from error
    if device.type != "cuda":
        raise ValueError(
            f"device must be a GPU, got {str(device)!r}: torch's own operator computes tensors on other devices"
        )
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"torch sees {torch.cuda.device_count()} GPUs, and {str(device)!r} is none of them")
    index = torch.cuda.current_device() if device.index is None else device.index
    return devices.of(index), torch.cuda.get_device_name(index)


def _named(variant: str, problem, dtype, precision, device) -> Decision:
    refusals = {name: rung.refusal(problem, dtype, precision, device) for name, rung in RUNGS.items()}
    if reason := refusals.pop(variant):
        raise NotImplementedError(f"{variant} cannot do {problem}: {reason}")
    return Decision(RUNGS[variant], {name: why or f"variant is {variant}" for name, why in refusals.items()})


def _candidate(name: str, decision: Decision, problem, dtype, precision, device, row) -> Candidate:
    rung, reason = RUNGS[name], decision.passed_over.get(name)
    if rung.refusal(problem, dtype, precision, device):
        return Candidate(name, reason)
    config = rung.config_on(device, problem, dtype, precision)
    model_holds = rung.unsuited(problem, dtype, precision, device) is None
    predicted = rung.predicted_ms(problem, config, device) if model_holds else None
    return Candidate(name, reason, rung.tile(config), config, predicted, row)


def _why(named: str | None, asked: str, computed: str, dtype: torch.dtype) -> str:
    if asked == TF32_ALLOWED:
        gains = "" if computed == "tf32" else ", but no rung gains by it here"
        return f"torch's switch allows TF32{gains}"
    if asked != computed:
        return f"no tensor-core rung takes it in {asked}"
    if named:
        return "as named"
    return "torch's switch does not allow TF32" if dtype == torch.float32 else f"the only precision of {name_of(dtype)}"


def _recorded_for(problem: Problem, dtype, precision: str, gpu: str, data) -> dict[str, rows.Row]:
    arithmetic_of = name_of(dtype), precision if len(PRECISIONS[dtype]) > 1 else name_of(dtype)
    fitting = (
        row
        for row in rows.read_all(data)
        if (row.gpu, row.direction) == (gpu, "forward")
        and (row.dtype, row.precision) == arithmetic_of
        and _same_sizes(row, problem)
    )
    return {row.rung: row for row in sorted(fitting, key=lambda row: (row.weights == rows.CALL, row.time))}


def _same_sizes(row: rows.Row, problem: Problem) -> bool:
    measured = workloads.of_row(row.workload, row.length)
    return measured is not None and replace(measured.problem, bias=problem.bias) == problem
