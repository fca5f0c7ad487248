"""What a rung of the ladder is to the rest of the package."""

from __future__ import annotations

from collections.abc import Callable

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.runtime.device import Device
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel
from numba_tconv.runtime.layout import Layout

# The error of a sum grows with its length, so rungs add up the products of this many input channels apart.
SUM_CHANNELS = 64
BFLOAT16_CC = 8, 0  # the first compute capability that converts to bfloat16


class Rung:
    """One way to compute the forward pass. Subclasses live in one file each, named like the rung.

    ``name`` is what ``variant=`` takes, ``idea`` a line for those who read the list of rungs.
    """

    name: str
    idea: str
    minimum_cc = (0, 0)  # the compute capability whose instructions the kernels need
    exact_cc: tuple[int, int] | None = None  # where they need instructions that no other one has

    def supports(self, problem: Problem, dtype: torch.dtype, precision: str) -> str | None:
        """None if this rung computes ``problem``, otherwise the reason why it cannot; on whatever GPU."""
        raise NotImplementedError

    def runs_on(self, device: Device) -> str | None:
        """None if ``device`` has the instructions of this rung, otherwise the reason why it cannot run there."""
        if self.exact_cc not in (None, device.cc):
            return f"it needs a GPU of compute capability {_version(self.exact_cc)}, not {_version(device.cc)}"
        if device.cc < self.minimum_cc:
            least, here = _version(self.minimum_cc), _version(device.cc)
            return f"it needs a GPU of compute capability {least} or above, not {here}"
        return None

    def refusal(self, problem: Problem, dtype: torch.dtype, precision: str, device: Device) -> str | None:
        """None if this rung computes ``problem`` on ``device``, otherwise the reason why it cannot."""
        return self.supports(problem, dtype, precision) or self.runs_on(device) or _lacks(device, dtype)

    def unsuited(self, problem: Problem, dtype: torch.dtype, precision: str, device: Device) -> str | None:
        """None if this rung is meant for ``problem``, which it computes; otherwise why the selection takes a lower
        rung, if one can do it."""
        return None

    def config(self, problem: Problem, dtype: torch.dtype, precision: str | None = None):
        """The compile-time choices for ``problem``: a frozen dataclass, equal for equal machine code.

        ``precision`` counts where a rung has several for a dtype; None is the fastest of them.
        """
        raise NotImplementedError

    def config_on(self, device: Device, problem: Problem, dtype: torch.dtype, precision: str):
        """The configuration that ``run`` takes for contiguous tensors on ``device``.

        Their addresses are taken to be aligned, as they are in memory of torch's allocator.
        """
        return self.config(problem, dtype, precision)

    def tile(self, config) -> str:
        """The work of a block of the kernel of ``config``, in words."""
        raise NotImplementedError

    def predicted_ms(self, problem: Problem, config, device: Device) -> float | None:
        """Milliseconds by the model that chose ``config``, which leaves out what every launch costs; None without one,
        or with one that is good for choosing alone."""
        return None

    def tiny_configs(self, problem: Problem, dtype: torch.dtype) -> list:
        """Configurations with tiles so small that seams and tails occur in tiny problems."""
        return [self.config(problem, dtype)]

    def kernel(self, config) -> Kernel:
        """The kernel of a configuration, made once."""
        raise NotImplementedError

    def shared_bytes(self, problem: Problem, config) -> int:
        """Dynamic shared memory of a block, in bytes."""
        return self.kernel(config).shared_bytes

    def run(self, x, w, bias, y, problem: Problem, config=None, precision: str | None = None) -> None:
        """Launch: x (N, C_in, L) and w (C_in, C_out/groups, K) of any strides, bias (C_out,) or None, into y.

        ``y`` is contiguous (N, C_out, L_out). ``config``, where given, is of ``precision``. Nothing is checked here.
        """
        layouts = (None if tensor is None else Layout.of(tensor) for tensor in (x, w, bias, y))
        self.prepare(*layouts, problem, config, precision)(x, w, bias, y)

    def prepare(
        self, x: Layout, w: Layout, bias: Layout | None, y: Layout, problem: Problem, config=None, precision=None
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]:
        """``run`` for any tensors that lie as these do, with everything worked out that is the same for all of them.

        A rung states one of the two, and the other follows.
        """
        return lambda *tensors: self.run(*tensors, problem, config, precision)


def _lacks(device: Device, dtype: torch.dtype) -> str | None:
    """Why no kernel can convert ``dtype`` on ``device``, or None."""
    if dtype == torch.bfloat16 and device.cc < BFLOAT16_CC:
        least, here = _version(BFLOAT16_CC), _version(device.cc)
        return f"bfloat16 needs a GPU of compute capability {least} or above, not {here}"
    return None


def _version(cc: tuple[int, int]) -> str:
    return ".".join(map(str, cc))


def adjacent(x: torch.Tensor) -> torch.Tensor:
    """``x`` (N, C_in, L) itself, or a copy if its positions lie apart."""
    return x if are_adjacent(x.shape, x.stride()) else x.contiguous()


def are_adjacent(shape: tuple, strides: tuple) -> bool:
    """Whether the positions of an input (N, C_in, L), ``strides`` in elements, are where rungs want them that load each
    element several times.

    With an input of channels last a warp's loads fall apart into one sector each. On HiFi-GAN's third layer (H200, a
    script; no recorded row) k2 took 37.7 ms on the strides and 13.8 with the copy, k3 4.7 and 3.3; k1 and k4 gained
    nothing by a copy, and k5, which loads an element once, lost: 0.46 and 0.76.
    """
    return strides[2] in (0, 1) or shape[2] == 1


def taking_bias(launch: Callable, bias: Layout | None) -> Callable:
    """``launch`` of (x, w, bias, y), which wants a contiguous bias, and any memory in the place of none, for a bias of
    that layout."""
    if bias is None:
        return lambda x, w, bias, y: launch(x, w, w, y)
    return launch if bias.is_contiguous else lambda x, w, bias, y: launch(x, w, bias.contiguous(), y)


def cuda_core_reason(dtype: torch.dtype, precision: str) -> str | None:
    """Why a kernel on CUDA cores cannot take ``dtype`` in ``precision``; None if it can."""
    if dtype not in ELEMENTS:
        return f"it takes {', '.join(e.name for e in ELEMENTS.values())}, not {str(dtype).removeprefix('torch.')}"
    if precision in ("tf32", "tf32x3"):
        return f"it multiplies on CUDA cores, in full precision, not in {precision}"
    return None
