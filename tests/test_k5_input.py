"""How k5 takes its input: rows that are slow to copy by elements are copied first, if they are many."""

import torch

from numba_tconv.kernels import k5_input
from numba_tconv.kernels.device import A100
from numba_tconv.kernels.k5_config import choose, config_of
from numba_tconv.kernels.k5_input import input_of
from numba_tconv.kernels.tensor_map import to_rows
from numba_tconv.kernels.tensor_rung import by_vectors
from numba_tconv.problem import Problem

SHAPE = 2, 64, 131073


def taken(precision, shape=SHAPE, strides=None, offset=0):
    tile = choose(Problem(*shape[:2], 32, 4, shape[2], stride=2, padding=1), precision).tile
    return tile, *input_of(shape, strides or (shape[1] * shape[2], shape[2], 1), offset, tile)


def test_odd_rows_of_16_bits_are_copied_first():
    for precision in ("fp16", "bf16"):
        tile, strides, offset, copy = taken(precision)
        assert copy is to_rows
        assert by_vectors(SHAPE, strides, offset, tile)
        x = torch.empty(SHAPE, dtype=tile.dtype, device="meta")
        assert to_rows(x).stride() == strides


def test_an_input_that_begins_anywhere_is_copied_first():
    even = 2, 64, 2**17
    assert taken("bf16", even)[3] is None
    assert taken("bf16", even, offset=2)[3] is to_rows


def test_odd_rows_of_32_bits_are_not():
    _, strides, offset, copy = taken("tf32")
    assert copy is None
    assert (strides, offset) == ((64 * SHAPE[2], SHAPE[2], 1), 0)
    assert taken("tf32", strides=(64 * SHAPE[2], 1, 64))[3] is to_rows  # but where neighbours are apart


def test_small_inputs_are_not():
    shape = 1, 64, 1001
    assert k5_input.FEWEST_BYTES > 2 * 64 * 1001
    assert taken("bf16", shape)[3] is None


def test_the_configuration_is_that_of_the_copy():
    p = Problem(*SHAPE[:2], 32, 4, SHAPE[2], stride=2, padding=1)
    contiguous = SHAPE, (SHAPE[1] * SHAPE[2], SHAPE[2], 1), 0
    assert config_of(p, "bf16", A100, *contiguous) == choose(p, "bf16", A100)
    assert config_of(p, "tf32", A100, *contiguous) == choose(p, "tf32", A100, aligned=False)
