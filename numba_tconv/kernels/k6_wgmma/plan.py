"""Plans launches for tensors laid out alike."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.arguments import of_problem
from numba_tconv.kernels.common.split_sums import SecondStage, second_stage, split
from numba_tconv.kernels.common.tensor_core.pack import TensorPacking, packing_of
from numba_tconv.kernels.common.tensor_core.rung import by_vectors
from numba_tconv.kernels.common.tensor_core.store_any import alignment_of
from numba_tconv.kernels.common.tensor_map import ALIGNMENT, MAP_BYTES, MAP_WORDS
from numba_tconv.runtime import device
from numba_tconv.runtime.kernel import GIVEN, Kernel, Prepared, alike
from numba_tconv.runtime.layout import Layout

from . import tail as k6_tail
from .arguments import Channels, Columns, Fetch, Grid, Input, Samples, Target, TensorMap, Weights
from .boxes import geometry, template_map
from .choose import blocks_and_band
from .input import input_of
from .tile import WIDEST, Config, channel_chunks, column_tiles, sample_columns

NO_MAP = (0,) * MAP_WORDS


@dataclass(frozen=True)
class Plan:
    copy: Callable[[torch.Tensor], torch.Tensor] | None
    map_bytes: int
    packing: TensorPacking | None  # None: weights are read as they lie
    launch: Prepared
    tail: Prepared | None
    second: SecondStage | None


@lru_cache(maxsize=1024)
def plan_of(
    make_kernel: Callable[[Config], Kernel],
    problem: Problem,
    config: Config,
    x: Layout,
    w: Layout,
    has_bias: bool,
    y_offset: int,
) -> Plan:
    """The plan; ``y_offset``: bytes from a sector to y."""
    dtype = x.dtype
    second = second_stage(problem, dtype, config.splits, has_bias, early=True)
    if second:
        has_bias, y_offset = False, 0  # torch's allocator aligns partial sums
    p, tile = split(problem, config.splits), config.tile
    chunks = channel_chunks(p, config)
    first, columns = sample_columns(p, config)
    x_shape = p.in_shape
    taken = input_of(x_shape, x.strides, x.offset % ALIGNMENT, config, problem.groups, (first, columns))
    shape, strides, offset, rows = taken.shape, taken.strides, taken.offset, taken.rows
    template = template_map(shape, strides, offset, config, rows) if rows else NO_MAP
    tiles_along = column_tiles(p, config)
    group_tiles = tile.row_tiles(p)
    multiprocessors = device.of(x.index).multiprocessors
    blocks, band = blocks_and_band(config, group_tiles * p.groups, tiles_along, multiprocessors)
    in_vectors = by_vectors(shape, strides, offset, tile) and shape[2] * tile.itemsize % ALIGNMENT == 0
    samples = Samples(p.batch, p.length, columns, first)
    if config.joined:  # one sample, with more zeros than a window
        samples = Samples(1, p.batch * columns, p.batch * columns + WIDEST, 0)
    whole_tiles = samples.columns % tile.advance == 0
    packing = None if config.unpacked else packing_of(p, tile, "wgmma", chunks, w)
    packed = alike((packing.size if packing else math.prod(w.shape),), dtype)
    arguments = (
        TensorMap(template, room=GIVEN),
        Input(
            data=alike(shape, dtype, strides),
            address=GIVEN,
            stride_n=strides[0],
            stride_c=strides[1],
            early=offset // tile.itemsize,
            window=geometry(config, rows),
            fetch=Fetch(int(rows is not None), int(rows is None or rows.aligned), int(whole_tiles), int(in_vectors)),
            samples=samples,
        ),
        Weights(packed, alike((p.out_channels,), dtype) if has_bias else packed, has_bias),
        Target(alike(p.out_shape, tile.out_dtype), p.batch, p.out_length),
        of_problem(Channels, p),
        Columns(p.padding, columns, first),
        Grid(
            tap_chunks=tile.tap_chunks(p),
            last_taps=tile.last_taps(p),
            channel_chunks=chunks,
            group_tiles=group_tiles,
            row_tiles=group_tiles * p.groups,
            column_tiles=tiles_along,
            band=band,
        ),
        alignment_of(y_offset, p, tile),
    )
    launch = make_kernel(config.compiled).prepare(blocks, *arguments, early=True)
    tail = k6_tail.prepare(p, config, shape, strides, dtype, chunks, has_bias) if config.tail else None
    return Plan(taken.copy, blocks * MAP_BYTES if rows else 0, packing, launch, tail, second)
