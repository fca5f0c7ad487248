"""How k4 chooses its tile, and when it copies and stores vectors; on the CPU."""

import pytest
import torch

from numba_tconv import workloads
from numba_tconv.kernels import RUNGS, k4_register_tile
from numba_tconv.kernels.device import H200
from numba_tconv.kernels.k4_config import choose, rounds
from numba_tconv.kernels.k4_register_tile import vectors_align
from numba_tconv.layout import NO_GPU, Layout
from numba_tconv.problem import Problem

HEAD, KB64 = (workloads.get(name).problem for name in ("head", "kb64"))


def test_few_blocks_are_weighed_as_few():
    config = choose(HEAD, torch.float32)
    assert (config.block_m, config.block_n) == (32, 256)
    assert rounds(HEAD, config, H200) == (0, 1)


def test_the_last_blocks_share_a_multiprocessor_with_fewer():
    config = choose(KB64, torch.float32, 4)
    assert config.min_blocks == 2
    assert rounds(KB64, config, H200) == (124, 1)


def test_vectors_align():
    x = Layout.contiguous((2, 8, 64), torch.float32, NO_GPU)
    assert vectors_align(x)
    assert vectors_align(x._replace(offset=16))
    assert not vectors_align(x._replace(offset=8))
    assert not vectors_align(x._replace(strides=(512, 66, 1)))
    assert not vectors_align(x._replace(strides=(1024, 128, 2)))
    assert not vectors_align(Layout.contiguous((2, 8, 66), torch.float32, NO_GPU))


@pytest.mark.parametrize(("offset", "vector"), [(0, 4), (16, 4), (8, 1)])
def test_vectors_of_outputs_begin_at_multiples_of_16_bytes(offset, vector, monkeypatch):
    p, found, make_kernel = Problem(2, 8, 8, 5, 60), [], k4_register_tile.make_kernel
    monkeypatch.setattr(k4_register_tile, "make_kernel", lambda config: found.append(config) or make_kernel(config))
    k4_register_tile._prepared.cache_clear()
    x, w, y = (
        Layout.contiguous(shape, torch.float32, NO_GPU)
        for shape in ((p.batch, p.in_channels, p.length), (p.in_channels, p.out_channels, 5), (2, 8, p.out_length))
    )
    RUNGS["k4_register_tile"].prepare(x, w, None, y._replace(offset=offset), p)
    assert [config.y_vector for config in found] == [vector]
