"""The alias-free activation's kernel in the simulator, against the plain-Python definition."""

import itertools

import pytest
import torch

import reference
from numba_tconv.formula.alias_free import alias_free
from numba_tconv.kernels.alias_free.plan import prepare
from numba_tconv.kernels.alias_free.tile import Config
from tests.thorough import thorough

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
@pytest.mark.parametrize("length", thorough([1, 2, 7, 90], always=[1, 90]))
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


@pytest.mark.parametrize(
    "sizes", [(12, 12, 2, 2), (3, 5, 2, 2), (32, 32, 2, 2), (9, 7, 3, 3), (16, 13, 4, 4), (7, 6, 1, 1)], ids=str
)
@pytest.mark.parametrize("excess", [0, 5])
def test_tiles_inside_a_row(sizes, excess):
    """Rows of several tiles, whole vectors or not; the first and the last tile repeat the ends."""
    torch.manual_seed(0)
    config = Config(torch.float32, *sizes, "snake", threads=32)
    x = torch.randn(1, 2, 3 * config.outputs + excess)
    up, down, alpha, beta = (torch.randn(n) for n in (sizes[0], sizes[1], 2, 2))
    y = computed(config, x, up, down, alpha, beta)
    wanted = torch.from_numpy(reference.alias_free_activation(x, up, down, alpha, beta, *sizes[2:], True))
    assert (y.double() - wanted).abs().max() <= 2e-5 * max(1, wanted.abs().max())


def test_large_phases():
    """Snake lies between its input and its input + 1/b; where float32 has no phase left, only that holds."""
    tap, a, inverse = torch.ones(1), 3.0, 4.0
    alpha, beta = torch.tensor([a]), torch.tensor([1 / inverse])
    for scale in (1.0, 300.0, 1e5, 1e20):
        x = torch.randn(1, 1, 40, generator=torch.Generator().manual_seed(0)) * scale
        y = computed(Config(x.dtype, 1, 1, 1, 1, "snake", False, threads=32), x, tap, tap, alpha, beta)
        exact = x.double() + inverse * torch.sin(a * x.double()).square()
        phase_error = (a * x.double()).abs() * 2.0**-23 + 2.0**-22
        assert ((y - exact).abs() <= inverse * phase_error.clamp(max=1) + x.abs() * 2.0**-23).all()


@pytest.mark.parametrize("a", [0.0, 6e-8, 1e-3, -1.5, 30.0])
def test_16_bits_with_any_factor_of_the_angle(a):
    torch.manual_seed(0)
    x, up, down = (torch.randn(shape).half() for shape in ((1, 1, 90), (12,), (12,)))
    alpha, beta = torch.tensor([a]).half(), torch.tensor([0.5]).half()
    y = computed(Config(x.dtype, 12, 12, 2, 2, "snake", False, threads=32), x, up, down, alpha, beta)
    wanted = torch.from_numpy(reference.alias_free_activation(x, up, down, alpha, beta, 2, 2, False))
    assert (y.double() - wanted).abs().max() <= 1e-3 * wanted.abs().max()


@pytest.mark.parametrize("a", [0.0, 1e-12])
def test_loud_16_bits_with_a_factor_that_is_next_to_nothing(a):
    torch.manual_seed(0)
    x = (1e8 * torch.randn(1, 1, 90)).bfloat16()
    up, down, alpha, beta = (
        t.bfloat16() for t in (torch.randn(12), torch.randn(12), torch.tensor([a]), torch.zeros(1))
    )
    y = computed(Config(x.dtype, 12, 12, 2, 2, "snake", False, threads=32), x, up, down, alpha, beta)
    wanted = torch.from_numpy(
        reference.alias_free_activation(x.float(), *(t.float() for t in (up, down, alpha, beta)), 2, 2, False)
    )
    assert (y.double() - wanted).abs().max() <= 8e-3 * wanted.abs().max()


@pytest.mark.parametrize(
    ("vectors", "dtype"),
    thorough(
        itertools.product([1, 2, 4], [torch.float32, torch.float16, torch.float64]),
        always=[(2, torch.float32), (1, torch.float16), (2, torch.float64), (4, torch.float32)],
    ),
    ids=str,
)
def test_vectors_of_x_and_single_samples(vectors, dtype):
    """x from each place in 16 bytes; tiles in the middle of a row, at its ends and of a row shorter than a vector."""
    for length in (3, 32 * 4 * vectors * 3):
        for begin in (0, 1, 8):
            torch.manual_seed(0)
            x = torch.randn(1, 2, length + 8).to(dtype)[:, :, begin : begin + length]
            up, down, alpha, beta = (torch.randn(n).to(dtype) for n in (12, 12, 2, 2))
            y = computed(Config(dtype, 12, 12, 2, 2, "snake", threads=32, vectors=vectors), x, up, down, alpha, beta)
            wanted = torch.from_numpy(reference.alias_free_activation(x, up, down, alpha, beta, 2, 2, True))
            tolerance = {torch.float32: 2e-5, torch.float64: 1e-12, torch.float16: 1e-3}[dtype]
            assert (y.double() - wanted).abs().max() <= tolerance * max(1, wanted.abs().max())


@pytest.mark.parametrize("vectors", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_load_their_windows_from_all_banks(vectors, dtype):
    """Eight threads load 16 bytes each at a time: from different groups of four banks."""
    config = Config(dtype, 12, 12, 2, 2, "snake", vectors=vectors)
    for g in range(0, config.up.window, config.vector):
        for first in range(0, config.threads, 8):
            places = [config.place((first + t) * config.run + g) for t in range(8)]
            assert all(place % config.vector == 0 for place in places)
            assert len({place // config.vector % 8 for place in places}) == 8


def test_samples_of_a_tile_serve_all_its_outputs():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for taps in range(2, 33):
            for ratio in (1, 2, 3, 4):
                config = Config(dtype, max(taps, ratio), taps, ratio, ratio, "snake")
                positions = config.outputs + config.down.reach
                assert positions + config.up.before + config.up.after <= config.samples
                assert config.outputs > 0
                products = len(config.down.own()) + len(config.down.others())
                assert products == len(config.down.products) == taps * config.run


def test_x_is_read_from_a_multiple_of_16_bytes():
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for taps in range(2, 33):
            for ratio in (1, 2, 3, 4):
                config = Config(dtype, max(taps, ratio), taps, ratio, ratio, "snake")
                assert (config.early + config.up.before) % config.lanes == 0
                assert config.outputs % config.aligned == config.samples % config.lanes == 0
