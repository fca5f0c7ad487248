"""Which inputs are copied before kernels that load each element several times."""

import torch

from numba_tconv.kernels.rung import adjacent


def test_positions_that_lie_apart_are_copied():
    x = torch.randn(2, 5, 3).transpose(1, 2)
    y = adjacent(x)
    assert y.stride(2) == 1
    assert torch.equal(x, y)


def test_others_are_not():
    x = torch.randn(2, 3, 10)
    for same in (x, x[:, ::2], x[:1].expand(4, -1, -1), x[..., :1].expand(-1, -1, 7), x[..., ::10]):
        assert adjacent(same) is same
