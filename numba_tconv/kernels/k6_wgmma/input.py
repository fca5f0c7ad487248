"""How k6 takes its input: as it lies, or copied first.

* In rows, each beginning at a multiple of 16 bytes: where no tensor map describes x as it lies (boxes.py).
* Joined, for short samples: laid end to end as one long row a channel, with the zeros between them that the columns of
  a tile count anyway (Tile.columns). A tile of 128 columns is more than a short sample has, and a window that several
  samples share would be copied row by row; of joined samples every window is one box, and few columns are computed for
  nothing. Where the outputs go is worked out sample by sample as before, which is simple for tiles that are written
  straight from their registers (epilogue/part.py), so it is done for those.

The constants were fitted to a script's measurements of torch's copies (H200; no recorded rows); those of
kernels/common/rows.py take less, to which they have not been fitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.channel_parts import split
from numba_tconv.kernels.common.rows import copied, kernels_of, to_rows
from numba_tconv.kernels.common.tensor_map import row_pitch
from numba_tconv.runtime.kernel import Kernel

from .boxes import Rows, rows_of
from .tile import Config, sample_columns

COPY, FILL = 0.004, 0.0015  # ms, of the launch that copies, and of what joined samples take besides
BANDWIDTH = 1.5e9  # bytes of the input that are copied in a millisecond


@dataclass(frozen=True)
class Input:
    """``copy``: what must be done to x, if anything, before it lies as the other fields say: ``shape`` and ``strides``,
    in elements; ``offset``, bytes by which it begins after a multiple of 16; ``rows``: see ``rows_of``."""

    shape: tuple
    strides: tuple
    offset: int
    rows: Rows | None
    copy: Callable[[torch.Tensor], torch.Tensor] | None = None


def join(x: torch.Tensor, first: int, columns: int) -> torch.Tensor:
    """The samples of ``x`` (N, C, L) as one, (1, C, N*columns): sample n's element i at ``n*columns + i - first``, and
    zeros elsewhere."""
    batch, channels, _ = x.shape
    return copied(x.transpose(0, 1), columns, first).view(1, channels, batch * columns)


def to_contiguous(x: torch.Tensor) -> torch.Tensor:
    """A copy in any case: it begins at a multiple of 16 bytes."""
    return x.clone(memory_format=torch.contiguous_format)


def input_of(shape: tuple, strides: tuple, offset: int, config: Config, groups: int, samples: tuple[int, int]) -> Input:
    """How an input is taken that lies as told. ``groups``: of the problem; ``samples``: first column, and columns a
    sample."""
    batch, channels, length = shape
    if config.joined:
        row = batch * samples[1]
        joined = (1, channels, row), (channels * row, row, 1), 0
        return Input(*joined, rows_of(*joined, config, groups), partial(join, first=samples[0], columns=samples[1]))
    if rows := rows_of(shape, strides, offset, config, groups):
        return Input(shape, strides, offset, rows)
    pitch, contiguous = row_pitch(length, config.tile.itemsize), (channels * length, length, 1)
    in_rows = shape, (channels * pitch, pitch, 1), 0
    if rows := rows_of(*in_rows, config, groups):
        return Input(*in_rows, rows, to_rows)
    if strides != contiguous:
        return Input(shape, contiguous, 0, None, to_contiguous)
    return Input(shape, strides, offset, None)


def copy_kernels(problem: Problem, config: Config) -> list[Kernel]:
    """The kernel that copies a contiguous input of ``problem``, if one does."""
    p = split(problem, config.splits)
    shape, strides = (p.batch, p.in_channels, p.length), (p.in_channels * p.length, p.length, 1)
    copy = input_of(shape, strides, 0, config, problem.groups, sample_columns(p, config)).copy
    return kernels_of(config.tile.dtype) if copy and copy != to_contiguous else []


def copy_ms(shape: tuple, config: Config) -> float:
    """What a copy in rows costs."""
    batch, channels, length = shape
    return COPY + batch * channels * length * config.tile.itemsize / BANDWIDTH


def cost(shape: tuple, config: Config, groups: int, samples: tuple[int, int]) -> float:
    """Milliseconds that it takes beside products and stores, of a contiguous input."""
    _, channels, length = shape
    taken = input_of(shape, (channels * length, length, 1), 0, config, groups, samples)
    return 0 if taken.copy is None else copy_ms(taken.shape, config) + FILL * config.joined
