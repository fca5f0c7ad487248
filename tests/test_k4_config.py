"""How k4 chooses its tile, and when it copies vectors; on the CPU."""

import torch

from numba_tconv import workloads
from numba_tconv.kernels.device import H200
from numba_tconv.kernels.k4_config import choose, rounds
from numba_tconv.kernels.k4_register_tile import vectors_align
from numba_tconv.layout import NO_GPU, Layout

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
