"""The alias-free activation's kernel in the simulator, against the plain-Python definition."""

import pytest
import torch

import reference
from numba_tconv.formula.alias_free import alias_free
from numba_tconv.kernels.alias_free.plan import prepare
from numba_tconv.kernels.alias_free.tile import Config

CASES = [
    # up taps, down taps, up ratio, down ratio, activation
    (12, 12, 2, 2, "snake"),
    (3, 5, 2, 2, "silu"),
    (9, 7, 3, 3, "gelu"),
    (12, 8, 4, 1, "elu"),
    (1, 12, 1, 4, "leaky_relu"),
    (11, 13, 2, 3, "identity"),
]


def computed(config, x, up, down, alpha, beta):
    sizes = alias_free(x.shape, *config.sizes[3:])
    y = torch.full((sizes.batch, sizes.channels, sizes.out_length), torch.nan, dtype=x.dtype)
    prepare(sizes, x.stride(), config)(x, up, down, alpha, beta, y)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("length", [1, 2, 7, 90])
def test_every_output(case, dtype, length):
    torch.manual_seed(0)
    *sizes, activation = case
    x = torch.randn(1, length, 2).mT.to(dtype)
    up, down, alpha, beta = (torch.randn(n).to(dtype) for n in (sizes[0], sizes[1], 2, 2))
    config = Config(dtype, *sizes, activation, True, threads=32)
    y = computed(config, x, up, down, alpha, beta)
    wanted = reference.alias_free_activation(x, up, down, alpha, beta, *sizes[2:], True, activation)
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12, torch.float16: 1e-3}[dtype]
    error = (y.double() - torch.from_numpy(wanted)).abs().max()
    assert error <= tolerance * max(1, abs(wanted).max())


def test_a_large_phase_is_reduced_in_float64():
    x = torch.full((1, 1, 4), 3.0e7)
    tap, alpha, beta = torch.ones(1), torch.tensor([1.0]), torch.tensor([1.0e-7])
    y = computed(Config(x.dtype, 1, 1, 1, 1, "snake", False, threads=16), x, tap, tap, alpha, beta)
    wanted = reference.alias_free_activation(x, tap, tap, alpha, beta, 1, 1, False)
    assert abs(y.double() - torch.from_numpy(wanted)).max() <= 4
