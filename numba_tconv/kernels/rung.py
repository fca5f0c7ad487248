"""A rung's interface."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.runtime.device import H200, Device
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel
from numba_tconv.runtime.layout import NO_GPU, Layout

SUM_CHANNELS = 64  # summed apart, because long float32 sums lose digits
BFLOAT16_CC = 8, 0


class Step(NamedTuple):
    """A kernel that a rung launches.

    ``name``: "copy" (x in aligned rows), "planes" (its phases apart), "scale" and "pack" (weights), "main", "tail"
    (each sample's last column), "add up" (partial sums); "frozen" (of frozen weights, which are packed)."""

    name: str
    kernel: Kernel
    shared_bytes: int = 0  # dynamic


class Rung:
    """One way to compute the forward pass, named like its file or folder.

    ``name`` is a value of ``variant=``, ``idea`` a line in the list of rungs."""

    name: str
    idea: str
    make_kernel: Callable[..., Kernel]  # cached
    minimum_cc = (0, 0)  # least compute capability
    exact_cc: tuple[int, int] | None = None  # the only one, if any
    most_stride = 2**30  # 32-bit phases

    def supports(self, problem: Problem, dtype: torch.dtype, precision: str) -> str | None:
        """None if this rung computes ``problem`` on some GPU, else why not; by default, all that CUDA cores take."""
        return _no_cuda_cores(dtype, precision)

    def runs_on(self, device: Device) -> str | None:
        """None if ``device`` has this rung's instructions, else why not."""
        if self.exact_cc not in (None, device.cc):
            return f"it needs a GPU of compute capability {_version(self.exact_cc)}, not {_version(device.cc)}"
        if device.cc < self.minimum_cc:
            least, here = _version(self.minimum_cc), _version(device.cc)
            return f"it needs a GPU of compute capability {least} or above, not {here}"
        return None

    def refusal(self, problem: Problem, dtype: torch.dtype, precision: str, device: Device) -> str | None:
        """None if this rung computes ``problem`` on ``device``, else why not."""
        if reason := self.supports(problem, dtype, precision) or self.runs_on(device) or _lacks(device, dtype):
            return reason
        if problem.stride >= self.most_stride:
            return f"it counts phases in 32 bits: a stride of {problem.stride:,} has too many"
        return None

    def unsuited(self, problem: Problem, dtype: torch.dtype, precision: str, device: Device) -> str | None:
        """None if this rung is meant for a supported ``problem``, else why a lower one is preferred."""
        return None

    def config(self, problem: Problem, dtype: torch.dtype, precision: str | None = None):
        """The compile-time choices: a frozen dataclass, equal for equal machine code.

        ``precision``: by default the dtype's fastest."""
        raise NotImplementedError

    def config_of(self, x: Layout, problem: Problem, precision: str, device: Device):
        """The configuration of ``run`` on ``device`` for inputs like ``x``."""
        return self.config(problem, x.dtype, precision)

    def config_on(self, device: Device, problem: Problem, dtype: torch.dtype, precision: str):
        """The configuration of ``run`` on ``device`` for contiguous tensors of torch's allocator."""
        return self.config_of(Layout.contiguous(problem.in_shape, dtype, NO_GPU), problem, precision, device)

    def tile(self, config) -> str:
        """A block's work, in words."""
        raise NotImplementedError

    def predicted_ms(self, problem: Problem, config, device: Device) -> float | None:
        """Milliseconds by the cost model, or None."""
        return None

    def slowdown(self, problem: Problem, config) -> float | None:
        """``predicted_ms``' factor for a batch of short signals; None if joining gains nothing."""
        return None

    def tiny_configs(self, problem: Problem, dtype: torch.dtype) -> list:
        """Configurations with seams and tails in tiny problems, for tests."""
        return [self.config(problem, dtype)]

    def kernel(self, config) -> Kernel:
        """The kernel of a configuration, made once."""
        return self.make_kernel(config)

    def steps(self, config, problem: Problem, device: Device = H200) -> list[Step]:
        """What ``run`` launches for contiguous tensors, in order."""
        return [Step("main", self.kernel(config), self.shared_bytes(problem, config))]

    def shared_bytes(self, problem: Problem, config) -> int:
        """Dynamic shared memory of a block."""
        return self.kernel(config).shared_bytes

    def run(self, x, w, bias, y, problem: Problem, config=None, precision: str | None = None) -> None:
        """Compute ``y`` on torch's current stream, unchecked.

        x (N, C_in, L) and w (C_in, C_out/groups, K) have any strides; bias is (C_out,) or None; ``y`` is contiguous (N,
        C_out, L_out). ``config`` must be of ``precision``."""
        layouts = (None if tensor is None else Layout.of(tensor) for tensor in (x, w, bias, y))
        self.prepare(*layouts, problem, config, precision)(x, w, bias, y)

    def prepare(
        self, x: Layout, w: Layout, bias: Layout | None, y: Layout, problem: Problem, config=None, precision=None
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]:
        """Prepare ``run`` for these layouts: a function (x, w, bias, y).

        A rung overrides ``run`` or ``prepare``; each default calls the other."""
        return lambda *tensors: self.run(*tensors, problem, config, precision)


def _lacks(device: Device, dtype: torch.dtype) -> str | None:
    if dtype == torch.bfloat16 and device.cc < BFLOAT16_CC:
        least, here = _version(BFLOAT16_CC), _version(device.cc)
        return f"bfloat16 needs a GPU of compute capability {least} or above, not {here}"
    return None


def _version(cc: tuple[int, int]) -> str:
    return ".".join(map(str, cc))


def adjacent(x: torch.Tensor) -> torch.Tensor:
    """``x`` (N, C_in, L), or an adjacent copy."""
    return x if are_adjacent(x.shape, x.stride()) else x.contiguous()


def are_adjacent(shape: tuple, strides: tuple) -> bool:
    """Whether positions of (N, C, L) are adjacent; ``strides`` in elements.

    Rungs that load elements several times copy other inputs."""
    return strides[2] in (0, 1) or shape[2] == 1


def taking_bias(launch: Callable, bias: Layout | None) -> Callable:
    """Wrap ``launch`` (x, w, bias, y): its bias becomes contiguous, or w if there is none."""
    if bias is None:
        return lambda x, w, bias, y: launch(x, w, w, y)
    return launch if bias.is_contiguous else lambda x, w, bias, y: launch(x, w, bias.contiguous(), y)


def _no_cuda_cores(dtype: torch.dtype, precision: str) -> str | None:
    if dtype not in ELEMENTS:
        return f"it takes {', '.join(e.name for e in ELEMENTS.values())}, not {str(dtype).removeprefix('torch.')}"
    if precision in ("tf32", "tf32x3"):
        return f"it multiplies on CUDA cores, in full precision, not in {precision}"
    return None
