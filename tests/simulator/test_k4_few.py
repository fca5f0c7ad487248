"""k4 with few blocks, in the CUDA simulator: thread tiles of one to three warps, and split-K."""

from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.split_sums import split
from numba_tconv.kernels.k4_register_tile import choose as k4_choose
from numba_tconv.kernels.k4_register_tile.tile import make, tiny
from numba_tconv.selection.registry import RUNGS
from tests.parity import check_configs
from tests.thorough import thorough

# Rows and columns past a tile, samples that end in it, warps behind the last column, runs unaligned to a block.
PROBLEMS = {
    "a decoder's layer, several samples": Problem(3, 6, 26, 8, 9, stride=4, padding=2, bias=True),
    "groups, without a bias": Problem(1, 12, 6, 4, 26, stride=2, groups=2),
    "unequal taps": Problem(3, 6, 34, 7, 5, stride=3, padding=1, output_padding=1, bias=True),
    "stride 1, dilation": Problem(2, 6, 7, 3, 27, dilation=2, padding=2, bias=True),
    "a long stride, parts of its phases": Problem(1, 6, 1, 260, 3, stride=130),
}
IN_PARTS = ("a decoder's layer, several samples", "groups, without a bias")
# With 2 warps along the columns, or as many as a tile of 24 has; two and three stages; one or more blocks of sums.
SHAPES = [
    dict(thread_m=12, thread_n=12, lanes_m=16, block_m=192, block_n=48, partial=1),
    dict(thread_m=12, thread_n=12, lanes_m=8, block_m=96, block_n=48, stages=3, partial=1),
    dict(thread_m=8, thread_n=4, lanes_m=16, block_m=128, block_n=24, partial=2),
    dict(thread_m=4, thread_n=4, lanes_m=4, block_m=32, block_n=32, stages=3, partial=1),
]
# Unequal taps: a block has the rows of three phases, each in its own warp.
APART = dict(thread_m=4, thread_n=8, lanes_m=4, block_m=48, block_n=64, partial=1, apart=True)


def check(problem, splits, configs):
    configs = [replace(config, splits=splits) for config in configs]
    check_configs(RUNGS["k4_register_tile"], problem, torch.float32, configs)


def test_the_shapes_are_those_of_the_tiles():
    warps = {(tile[2], tile[3], tile[4]) for tile in k4_choose.FEW_TILES}
    assert warps == {(shape["thread_m"], shape["thread_n"], shape["lanes_m"]) for shape in SHAPES}
    assert all(APART[name] == k4_choose.APART[name] for name in ("thread_m", "thread_n", "lanes_m", "block_n"))


@pytest.mark.parametrize(
    ("reason", "splits"),
    thorough(
        [*((reason, 1) for reason in PROBLEMS), *((reason, 2) for reason in IN_PARTS)],
        always=[("unequal taps", 1), ("a long stride, parts of its phases", 1), ("groups, without a bias", 2)],
    ),
)
def test_tiles_of_few_blocks(reason, splits):
    shapes = [*SHAPES, APART] if reason == "unequal taps" else SHAPES
    check(
        PROBLEMS[reason], splits, [make(split(PROBLEMS[reason], splits), torch.float32, 2, **shape) for shape in shapes]
    )


SPLIT = {
    "a decoder's layer": Problem(2, 12, 3, 8, 5, stride=4, padding=2, bias=True),
    "groups, without a bias": Problem(1, 12, 4, 5, 6, stride=2, groups=2),
    "unequal taps": Problem(1, 6, 2, 7, 5, stride=3, padding=1, output_padding=1, bias=True),
    "stride 1, dilation": Problem(1, 6, 2, 3, 9, dilation=2, bias=True),
}


@pytest.mark.parametrize("splits", thorough([2, 3], always=[3]))
@pytest.mark.parametrize("reason", SPLIT)
def test_split_sums(reason, splits):
    check(SPLIT[reason], splits, tiny(split(SPLIT[reason], splits), torch.float32))
