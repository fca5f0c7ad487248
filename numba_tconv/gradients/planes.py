"""Planes: grad_output with its phases separated, so that the copy engine can fetch them.

Column j of the row of an output channel and a phase (co, a) holds ``grad_output[co, j*stride - padding + a*dilation]``,
and zero outside of grad_output (window.py). Memory interleaves the phases, but the copy engine needs adjacent elements
and rows at multiples of 16 bytes. Gradients that can read grad_output in place do without planes.

A thread copies words (one element, or two of 16 bits) of each of a channel's rows. Long strides take planes_turned.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from numba import cuda, int64, types, uint32, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_map import ALIGNMENT
from numba_tconv.runtime.kernel import Kernel, flat

from . import planes_turned

THREADS = 128
LOADS = 8  # words in flight, at least
GRID_AXIS = 65_535  # blocks along y or z of a grid, at most
BITS = {2: types.uint16, 4: types.float32, 8: types.float64}  # the type an element is copied as, by its bytes
WORD = 4  # bytes
MOST_PHASES = 16  # that a thread copies


@dataclass(frozen=True)
class Config:
    itemsize: int
    stride: int
    dilation: int
    phases: int  # of a channel, those that have taps

    @property
    def kind(self):
        """The type an element is copied as."""
        return BITS[self.itemsize]

    @property
    def turned(self) -> bool:
        return self.phases > MOST_PHASES

    @property
    def elements(self) -> int:
        """Elements of a word; 1 where an element is longer."""
        return max(1, WORD // self.itemsize)

    @property
    def words(self) -> int:
        """Words that a thread copies of each row."""
        return -(-LOADS // self.phases)

    def along(self, columns: int) -> int:
        """Blocks along a row."""
        if self.turned:
            return planes_turned.along(columns, self.phases, self.itemsize)
        return -(-columns // (THREADS * self.words * self.elements))


def make_config(problem: Problem, dtype: torch.dtype) -> Config:
    return Config(dtype.itemsize, problem.stride, problem.dilation, min(problem.taps.rows, problem.kernel_size))


@cache
def make_kernel(config: Config) -> Kernel:
    if config.turned:
        return planes_turned.make_kernel(config)
    stride, dilation, phases = config.stride, config.dilation, config.phases
    kind, elements, words = config.kind, config.elements, config.words
    all_elements = phases * words * elements

    def planes(g, g_n, g_c, g_l, result, channels, out_length, padding, columns, pitch, rows):
        row = int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y
        first = (int64(cuda.blockIdx.x) * (THREADS * words) + cuda.threadIdx.x) * elements
        if row >= rows:
            return
        sample = int64(uint32(row) // uint32(channels))
        source = sample * g_n + (row - sample * channels) * g_c
        target = row * phases * pitch
        values = cuda.local.array(all_elements, dtype=kind)
        for z in range(words):
            for a in range(phases):
                for e in range(elements):
                    o = (first + z * (THREADS * elements) + e) * stride - padding + a * dilation
                    inside = o >= 0 and o < out_length
                    values[(z * phases + a) * elements + e] = g[uint64(source + o * g_l)] if inside else kind(0)
        for z in range(words):
            j = first + z * (THREADS * elements)
            for a in range(phases):
                for e in range(elements):
                    if j + e < columns:
                        result[uint64(target + a * pitch + j + e)] = values[(z * phases + a) * elements + e]

    stored, integers = flat(kind), (types.int64,)
    return Kernel("planes", planes, (stored, *integers * 3, stored, *integers * 6), THREADS, key=repr(config))


def columns_of(problem: Problem) -> int:
    """Columns of a plane: the positions, and those that the taps of a row reach beyond the last one."""
    return problem.length + (problem.taps.taps_per_row - 1) * problem.taps.step


def pitch_of(problem: Problem, dtype: torch.dtype) -> int:
    """Elements between the starts of two planes, a multiple of 16 bytes."""
    vector = ALIGNMENT // dtype.itemsize
    return -(-columns_of(problem) // vector) * vector


def pairs_of(problem: Problem) -> int:
    """Pairs of a group: output channels times phases that have taps."""
    return problem.out_channels_per_group * min(problem.taps.rows, problem.kernel_size)


def refusal(problem: Problem, dtype: torch.dtype) -> str | None:
    """Why the problem's grad_output has no planes; None if it has."""
    if dtype.itemsize > WORD and make_config(problem, dtype).turned:
        return f"it takes up to {MOST_PHASES} phases of 64-bit elements apart, not {problem.taps.rows}"
    return too_many_rows(problem)


def too_many_rows(problem: Problem) -> str | None:
    """Why 32 bits cannot count the rows of grad_output; None if they can."""
    rows = problem.batch * problem.out_channels
    return f"it counts rows of grad_output in 32 bits: {rows:,} are too many" if rows >= 1 << 32 else None


def make_planes(grad_output: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Copy ``grad_output`` (N, C_out, L_out), of any strides, into planes on torch's current stream.

    Returns a view (N, C_out * phases, columns), whose rows begin at multiples of 16 bytes."""
    config, columns = make_config(problem, grad_output.dtype), columns_of(problem)
    pitch = pitch_of(problem, grad_output.dtype)
    result = grad_output.new_empty((problem.batch, problem.out_channels * config.phases, pitch))
    rows = problem.batch * problem.out_channels
    layers = -(-rows // GRID_AXIS)
    make_kernel(config).launch(
        (config.along(columns), -(-rows // layers), layers),
        *(_bits(grad_output), *grad_output.stride(), _bits(result)),
        *(problem.out_channels, problem.out_length, problem.padding, columns, pitch, rows),
    )
    return result[:, :, :columns]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor as the kernel takes it: 16-bit elements as their bits."""
    return tensor.view(torch.uint16) if tensor.element_size() == 2 else tensor
