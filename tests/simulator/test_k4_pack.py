"""Where k4's weights are packed, in the CUDA simulator."""

import numpy as np
import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common import packed_weights
from numba_tconv.kernels.k4_register_tile import pack as k4_pack
from numba_tconv.kernels.k4_register_tile import tile as k4_config
from numba_tconv.runtime.layout import Layout
from tests.few_blocks import few_threads

PROBLEMS = {
    "several row tiles": Problem(1, 5, 9, 8, 5, stride=4),
    "rows left over": Problem(1, 3, 4, 7, 5, stride=3),
    "groups": Problem(1, 6, 8, 5, 4, stride=2, groups=2),
    "parts of a stride": Problem(1, 3, 2, 75, 4, stride=37),
    "stride 1": Problem(1, 3, 5, 3, 8),
}


@pytest.fixture(autouse=True)
def tiny_blocks():
    with few_threads(k4_pack, 24, packed_weights._made):
        yield


def expected(w, p, c):
    """(group, row tile, tap chunk, channel chunk, k, tap, m), zeros where there is no weight."""
    outer = p.groups, c.row_tiles(p), c.tap_chunks(p), c.channel_chunks(p)
    packed = np.zeros((*outer, c.block_k, c.tap_chunk, c.block_m), np.float32)
    for group, row_tile, chunk, channels, k, tap, m in np.ndindex(packed.shape):
        of_phase, of_channel = divmod(m, c.channels) if c.apart else divmod(m, c.phases)[::-1]
        i, co = channels * c.block_k + k, row_tile // c.row_parts * c.channels + of_channel
        a = row_tile % c.row_parts * c.phases + of_phase
        t = a + (chunk * c.tap_chunk + tap) * p.taps.rows
        inside = i < p.in_channels_per_group and m < c.channels * c.phases and co < w.shape[1]
        if inside and a < p.taps.rows and t < p.kernel_size:
            packed[group, row_tile, chunk, channels, k, tap, m] = w[group * p.in_channels_per_group + i, co, t]
    return packed.flatten()


@pytest.mark.parametrize("what", PROBLEMS)
def test_every_weight_is_in_its_place(what):
    problem = PROBLEMS[what]
    w = torch.randn(problem.weight_shape)
    for config in k4_config.tiny(problem, torch.float32):
        packing = k4_pack.packing_of(problem, config, Layout.of(w))
        packed = torch.full((packing.size,), torch.nan)
        packing.launch(w, packed)
        assert np.array_equal(packed.numpy(), expected(w.numpy(), problem, config)), config
