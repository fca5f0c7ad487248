"""How k6 takes its input: in place, or copied, to be contiguous or

* in aligned rows, where no tensor map describes x (boxes.py);
* joined, for short samples of tiles of some phases (epilogue/by_phases.py): a channel's samples lie end to end with
  zeros between. Every window is one box, and few columns are wasted."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.rows import copied, to_rows
from numba_tconv.kernels.common.split_sums import split
from numba_tconv.kernels.common.tensor_map import row_pitch

from .boxes import RowAlignment, row_alignment
from .tile import Config, sample_columns

COPY, FILL = 0.004, 0.0015  # ms: launch; more if joined
BANDWIDTH = 1.5e9  # bytes a millisecond


@dataclass(frozen=True)
class Input:
    """An input as k6 reads it, after ``copy``; fields as in ``row_alignment``."""

    shape: tuple
    strides: tuple
    offset: int
    rows: RowAlignment | None
    copy: Callable[[torch.Tensor], torch.Tensor] | None = None


def join(x: torch.Tensor, first: int, columns: int) -> torch.Tensor:
    """``x`` (N, C, L) as (1, C, N*columns): element i of sample n at ``n*columns + i - first``, else 0."""
    batch, channels, _ = x.shape
    return copied(x.transpose(0, 1), columns, first).view(1, channels, batch * columns)


def to_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def input_of(shape: tuple, strides: tuple, offset: int, config: Config, groups: int, samples: tuple[int, int]) -> Input:
    """How k6 takes an input; ``samples``: tile.sample_columns."""
    batch, channels, length = shape
    if config.joined:
        row = batch * samples[1]
        joined = (1, channels, row), (channels * row, row, 1), 0
        return Input(
            *joined, row_alignment(*joined, config, groups), partial(join, first=samples[0], columns=samples[1])
        )
    if rows := row_alignment(shape, strides, offset, config, groups):
        return Input(shape, strides, offset, rows)
    pitch, contiguous = row_pitch(length, config.tile.itemsize), (channels * length, length, 1)
    in_rows = shape, (channels * pitch, pitch, 1), 0
    if rows := row_alignment(*in_rows, config, groups):
        return Input(*in_rows, rows, to_rows)
    if strides != contiguous:
        return Input(shape, contiguous, 0, None, to_contiguous)
    return Input(shape, strides, offset, None)


def is_copied(problem: Problem, config: Config) -> bool:
    """Whether a kernel copies a contiguous input."""
    p = split(problem, config.splits)
    shape, strides = p.in_shape, (p.in_channels * p.length, p.length, 1)
    copy = input_of(shape, strides, 0, config, problem.groups, sample_columns(p, config)).copy
    return copy is not None and copy != to_contiguous


def copy_ms(shape: tuple, config: Config) -> float:
    batch, channels, length = shape
    return COPY + batch * channels * length * config.tile.itemsize / BANDWIDTH


def cost(shape: tuple, config: Config, groups: int, samples: tuple[int, int]) -> float:
    """Milliseconds of copying a contiguous input, if needed."""
    _, channels, length = shape
    taken = input_of(shape, (channels * length, length, 1), 0, config, groups, samples)
    return 0 if taken.copy is None else copy_ms(taken.shape, config) + FILL * config.joined
