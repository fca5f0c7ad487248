"""Planes: grad_output with its phases separated, for the copy engine.

A plane is the row of a pair (window.py), zero outside, with adjacent elements, 16-byte aligned. planes_transposed.py is
for long strides."""

from dataclasses import dataclass
from functools import cache

import torch
from numba import cuda, int64, types, uint32, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.arguments import Signal, arguments, of_problem, over_planes
from numba_tconv.kernels.common.tensor_map import ALIGNMENT
from numba_tconv.runtime.kernel import Kernel, flat

from . import planes_transposed
from .planes_transposed import Sizes

THREADS = 128
LOADS = 8  # words in flight, at least
BITS = {2: types.uint16, 4: types.float32, 8: types.float64}  # by itemsize
WORD = 4  # bytes
MOST_PHASES = 16  # copied by a thread


@dataclass(frozen=True)
class Config:
    itemsize: int
    stride: int
    dilation: int
    phases: int

    @property
    def kind(self):
        return BITS[self.itemsize]

    @property
    def transposed(self) -> bool:
        return self.phases > MOST_PHASES

    @property
    def elements(self) -> int:
        return max(1, WORD // self.itemsize)

    @property
    def words(self) -> int:
        return -(-LOADS // self.phases)

    def along(self, columns: int) -> int:
        if self.transposed:
            return planes_transposed.along(columns, self.phases, self.itemsize)
        return -(-columns // (THREADS * self.words * self.elements))


def make_config(problem: Problem, dtype: torch.dtype) -> Config:
    return Config(dtype.itemsize, problem.stride, problem.dilation, min(problem.taps.rows, problem.kernel_size))


@cache
def make_kernel(config: Config) -> Kernel:
    if config.transposed:
        return planes_transposed.make_kernel(config)
    stride, dilation, phases = config.stride, config.dilation, config.phases
    kind, elements, words = config.kind, config.elements, config.words
    all_elements = phases * words * elements

    def planes(grad_output, planes, sizes):
        row = int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y
        first_column = (int64(cuda.blockIdx.x) * (THREADS * words) + cuda.threadIdx.x) * elements
        if row >= sizes.rows:
            return
        sample = int64(uint32(row) // uint32(sizes.out_channels))
        source = sample * grad_output.stride_n + (row - sample * sizes.out_channels) * grad_output.stride_c
        target = row * phases * sizes.pitch
        values = cuda.local.array(all_elements, dtype=kind)
        for z in range(words):
            for a in range(phases):
                for e in range(elements):
                    column = first_column + z * (THREADS * elements) + e
                    o = column * stride - sizes.padding + a * dilation
                    inside = o >= 0 and o < sizes.out_length
                    value = grad_output.data[uint64(source + o * grad_output.stride_l)] if inside else kind(0)
                    values[(z * phases + a) * elements + e] = value
        for z in range(words):
            column = first_column + z * (THREADS * elements)
            for a in range(phases):
                for e in range(elements):
                    if column + e < sizes.columns:
                        planes[uint64(target + a * sizes.pitch + column + e)] = values[(z * phases + a) * elements + e]

    signature = (arguments(Signal, data=flat(kind)), flat(kind), arguments(Sizes))
    return Kernel("planes", planes, signature, THREADS, key=repr(config))


def columns_of(problem: Problem) -> int:
    """Positions, and columns that taps reach beyond."""
    return problem.length + (problem.taps.taps_per_row - 1) * problem.taps.step


def pitch_of(problem: Problem, dtype: torch.dtype) -> int:
    """Elements between planes, a multiple of 16 bytes."""
    vector = ALIGNMENT // dtype.itemsize
    return -(-columns_of(problem) // vector) * vector


def pairs_of(problem: Problem) -> int:
    return problem.out_channels_per_group * min(problem.taps.rows, problem.kernel_size)


def refusal(problem: Problem, dtype: torch.dtype) -> str | None:
    if dtype.itemsize > WORD and make_config(problem, dtype).transposed:
        return f"it takes up to {MOST_PHASES} phases of 64-bit elements apart, not {problem.taps.rows}"
    return too_many_rows(problem)


def too_many_rows(problem: Problem) -> str | None:
    rows = problem.batch * problem.out_channels
    return f"it counts rows of grad_output in 32 bits: {rows:,} are too many" if rows >= 1 << 32 else None


def make_planes(grad_output: torch.Tensor, problem: Problem) -> torch.Tensor:
    """The planes of ``grad_output`` (N, C_out, L_out), of any strides: a view (N, C_out * phases, columns).

    Rows are 16-byte aligned. Launched on torch's current stream."""
    config, columns = make_config(problem, grad_output.dtype), columns_of(problem)
    pitch = pitch_of(problem, grad_output.dtype)
    result = grad_output.new_empty((problem.batch, problem.out_channels * config.phases, pitch))
    rows = problem.batch * problem.out_channels
    make_kernel(config).launch(
        over_planes(config.along(columns), rows),
        Signal(grad_output, *grad_output.stride()),
        result,
        of_problem(Sizes, problem, columns=columns, pitch=pitch, rows=rows),
    )
    return result[:, :, :columns]
