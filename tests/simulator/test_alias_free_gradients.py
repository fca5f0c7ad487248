"""The alias-free activation's gradient kernels in the simulator, against autograd through torch's operators."""

import dataclasses
import itertools

import pytest
import torch

from numba_tconv.formula.alias_free import alias_free
from numba_tconv.gradients.alias_free import plan
from numba_tconv.gradients.alias_free.tile import Config, choose
from numba_tconv.gradients.sum import accumulator_of
from numba_tconv.torch_api import alias_free_operators
from numba_tconv.torch_api.alias_free_operators import composed
from tests.thorough import thorough

CASES = [
    # up taps, down taps, up ratio, down ratio, activation, beta is given, logarithms
    (12, 12, 2, 2, "snake", True, True),
    (7, 9, 2, 2, "snake", False, False),
    (6, 11, 3, 3, "snake", False, True),
    (12, 8, 4, 1, "snake", True, False),
    (1, 12, 1, 4, "snake", True, True),
    (12, 12, 1, 1, "identity", False, True),
    (3, 5, 2, 2, "silu", False, True),
    (9, 7, 3, 3, "gelu", False, True),
    (32, 31, 4, 4, "elu", False, True),
    (11, 13, 2, 3, "leaky_relu", False, True),
    (13, 2, 3, 2, "silu", False, True),
]
LENGTHS = [*range(1, 20), 56, 57, 61, 117]
TOLERANCE = {torch.float32: 3e-5, torch.float64: 1e-12, torch.float16: 2e-3}


def operands(case, length, dtype, batch=2):
    torch.manual_seed(0)
    up_taps, down_taps, up_ratio, down_ratio, activation, has_beta, _ = case
    x = torch.randn(batch, length, 2).mT.to(dtype)
    sizes = alias_free(x.shape, up_taps, down_taps, up_ratio, down_ratio)
    dy = torch.randn(batch, sizes.out_length, 2).mT.to(dtype)
    up, down = (torch.randn(count).to(dtype) for count in (up_taps, down_taps))
    alpha = torch.rand(2).add(0.5).to(dtype) if activation == "snake" else None
    beta = torch.rand(2).add(0.5).to(dtype) if has_beta else None
    return sizes, x, dy, up, down, alpha, beta


def computed(config, sizes, x, dy, up, down, alpha, beta):
    dx = torch.full(x.shape, torch.nan, dtype=x.dtype)
    partials = torch.full((plan.partials_of(sizes, config),), torch.nan, dtype=accumulator_of(x.dtype))
    tied = beta is None
    alpha = up if alpha is None else alpha
    beta = alpha if tied else beta
    plan.prepare(sizes, x.stride(), dy.stride(), config)(x, dy, up, down, alpha, beta, dx, partials)
    if config.activation != "snake" or not config.parameters:
        return dx, None, None
    found = [torch.full_like(alpha, torch.nan) for _ in range(2)]
    plan.prepare_parameters(sizes, config, tied)(partials, alpha, beta, *found)
    return dx, found[0], None if tied else found[1]


def wanted(case, x, dy, up, down, alpha, beta):
    tensors = [one if one is None else one.double().requires_grad_() for one in (x, up, down, alpha, beta)]
    y = composed(*tensors, *case[2:4], case[6], case[4])
    x, _, _, *parameters = tensors
    found = iter(torch.autograd.grad(y, [x, *(one for one in parameters if one is not None)], dy.double()))
    return [next(found), *(one if one is None else next(found) for one in parameters)]


def assert_close(config, case, length, **others):
    sizes, *tensors = operands(case, length, config.dtype, **others)
    for ours, truth in zip(computed(config, sizes, *tensors), wanted(case, *tensors), strict=True):
        if truth is None:
            assert ours is None
        else:
            error = (ours.double() - truth).abs().max()
            assert error <= TOLERANCE[config.dtype] * max(1, truth.abs().max())


@pytest.mark.parametrize(
    ("case", "dtype"),
    thorough(
        itertools.product(CASES, TOLERANCE),
        always=[*((case, torch.float32) for case in CASES[::2]), *((CASES[0], dtype) for dtype in TOLERANCE)],
    ),
    ids=str,
)
def test_every_gradient(case, dtype):
    *sizes, activation, _, log_scale = case
    config = Config(dtype, *sizes, activation, log_scale, threads=32, parameters=activation == "snake")
    for length in (1, 2, 7, config.outputs, 150):  # the fourth: all of one tile
        assert_close(config, case, length)


@pytest.mark.parametrize("length", thorough(LENGTHS, always=[*LENGTHS[:-4:3], *LENGTHS[-4:]]))
def test_rows_shorter_and_longer_than_a_tile(length):
    """Tiles have 64 positions and 56 outputs; the first begins three positions before the row."""
    *sizes, activation, _, log_scale = CASES[0]
    assert_close(Config(torch.float64, *sizes, activation, log_scale, threads=16), CASES[0], length)


def test_a_tile_that_ends_with_the_row():
    """Its last output needs the row's last up-sample, and another tile follows."""
    case = (17, 12, *CASES[0][2:])
    *sizes, activation, _, log_scale = case
    config = Config(torch.float64, *sizes, activation, log_scale, threads=16)
    assert config.outputs + config.down.reach == config.positions
    assert_close(config, case, config.outputs + config.positions - 4)


def test_several_tiles_a_block(monkeypatch):
    """An odd length: rows begin inside sectors."""
    monkeypatch.setattr("numba_tconv.gradients.alias_free.tile.ENOUGH_BLOCKS", 4)
    plan.prepare.cache_clear(), plan.prepare_parameters.cache_clear()
    for case in (CASES[0], CASES[3]):
        *sizes, activation, _, log_scale = case
        for run in (4, 8):
            config = Config(torch.float64, *sizes, activation, log_scale, threads=16, run=run)
            assert_close(config, case, 301)
    plan.prepare.cache_clear(), plan.prepare_parameters.cache_clear()


def test_x_alone():
    *sizes, activation, _, log_scale = CASES[0]
    config = Config(torch.float64, *sizes, activation, log_scale, threads=16)
    sizes, *tensors = operands(CASES[0], 90, torch.float64)
    dx, *parameters = computed(dataclasses.replace(config, parameters=False), sizes, *tensors)
    assert parameters == [None, None]
    assert torch.equal(dx, computed(config, sizes, *tensors)[0])


@pytest.mark.parametrize("down_ratio", [1, 2])
@pytest.mark.parametrize("value", [3.0e7, -3.0e7])
def test_a_large_phase_is_reduced_in_float64(value, down_ratio):
    """Slopes lie within 1 + 2a/b, whatever the phase."""
    x, tap, alpha, beta = torch.full((1, 1, 4), value), torch.ones(1), torch.tensor([1.0]), torch.tensor([1.0e-3])
    sizes = alias_free(x.shape, 1, 1, 1, down_ratio)
    config = Config(x.dtype, 1, 1, 1, down_ratio, "snake", False, threads=16)
    dy = torch.ones(1, 1, sizes.out_length)
    dx, _, dbeta = computed(config, sizes, x, dy, tap, tap, alpha, beta)
    truth = 1 + torch.sin(2 * x.double()) / 1e-3
    assert (dx.double() - truth)[..., ::down_ratio].abs().max() <= 1e-3
    assert abs(float(dbeta) + sizes.out_length * float(torch.sin(x[0, 0, 0].double()).square()) / 1e-6) < 10


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("parameters", [False, True])
def test_the_operators_function(tied, parameters):
    """Allocates the results; those of parameters that are not wanted have no element."""
    case = (12, 12, 2, 2, "snake", not tied, True)
    sizes, x, dy, up, down, alpha, beta = operands(case, 23, torch.float64)
    config = choose(sizes, x.dtype, "snake", True, parameters)
    compute = alias_free_operators.ready_gradients(sizes, x.stride(), dy.stride(), config, -1, tied)
    found = compute(x, dy, up, down, alpha, alpha if tied else beta)
    assert [len(one) for one in found[1:]] == [2 * parameters, 2 * (parameters and not tied)]
    for ours, truth in zip(found, wanted(case, x, dy, up, down, alpha, beta), strict=True):
        if len(ours):
            torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


def test_a_large_phase_in_float64():
    x, tap = torch.tensor([[[1e8, 3e8, 1e300]]], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    sizes = alias_free(x.shape, 1, 1, 1, 1)
    config = Config(x.dtype, 1, 1, 1, 1, "snake", False, threads=16)
    dx, *_ = computed(config, sizes, x, torch.ones_like(x), tap, tap, tap, None)
    truth = 1 + torch.sin(2 * x)
    assert (dx - truth)[..., :2].abs().max() <= 1e-6  # the simulator rounds products
    assert 0 <= dx[0, 0, 2] <= 2
