"""What launches of the gradients on tensor cores tell their kernels, by name; stand-ins for tensor maps are told."""

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients import planes
from numba_tconv.gradients.input.wgmma import arguments as of_input
from numba_tconv.gradients.input.wgmma import kernel as grad_input_wgmma
from numba_tconv.gradients.weight.wgmma import arguments as of_weight
from numba_tconv.gradients.weight.wgmma import kernel as grad_weight_wgmma
from numba_tconv.gradients.weight.wgmma import sum as grad_weight_sum
from numba_tconv.gradients.wgmma_ring import LONGEST_SIGNAL
from numba_tconv.lab.measure import workloads
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.device import H200
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.layout import NO_GPU, Layout
from numba_tconv.selection.gradient import GRADIENTS

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")
PROBLEM = Problem(3, 128, 96, 8, 513, stride=4, padding=2, groups=2)
CROPPED_RIGHT = Problem(3, 128, 96, 8, 513, stride=4, output_padding=-3, groups=2)
WHOLE = Problem(3, 128, 96, 8, 513, stride=4, groups=2)
FEW_TILES = Problem(1, 128, 1024, 16, 65, stride=4, padding=2, groups=2)


def contiguous(*shape, dtype=torch.float32):
    return Layout.contiguous(shape, dtype, NO_GPU)


@pytest.fixture(autouse=True)
def no_maps(monkeypatch):
    for module in (grad_input_wgmma, grad_weight_wgmma):
        for name in ("template", "template_of_rows", "template_of_b"):
            monkeypatch.setattr(module, name, lambda *_: tuple(range(100, 116)), raising=False)


@pytest.mark.parametrize("sheared", [1, 2])
@pytest.mark.parametrize(
    "p", [PROBLEM, CROPPED_RIGHT, WHOLE, FEW_TILES], ids=["padding", "cropped right", "whole", "few tiles"]
)
def test_grad_input(p, sheared):
    config = grad_input_wgmma.choose_for.__wrapped__(p, "tf32", sheared, H200)
    g = contiguous(*p.out_shape)
    w = contiguous(1, p.in_channels, p.out_channels_per_group * p.kernel_size)
    blocks, launch, second = grad_input_wgmma._prepared.__wrapped__(p, config, g, w, H200)
    _, sums, shape, grid, rows, splits = launch.arguments
    assert config.sheared == sheared
    assert shape == of_input.Shape(-p.padding, p.length, 2, p.out_channels // (2 * sheared), 64)
    assert grid.tile_stages * splits == config.stages_of(p)
    assert grid.tiles == p.batch * 2 * grid.position_tiles * grid.channel_tiles * splits
    assert blocks == min(grid.tiles, H200.multiprocessors)
    assert rows.length == (LONGEST_SIGNAL if p is WHOLE else p.out_length)
    assert (second is not None) == (splits > 1) == (p is FEW_TILES)
    assert sums.numel() == p.batch * 128 * p.length * splits


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("p", "direct"), [(PROBLEM, False), (workloads.get("dac_u1").problem, True)], ids=str)
def test_grad_weight(p, direct, dtype, in_place):
    """In place, or from planes: the same launch but for grad_output's rows and their first element."""
    _, own = GRADIENTS["grad_weight_wgmma"].config(p, dtype, H200, "tf32" if dtype == torch.float32 else "bf16")
    channels = p.out_channels_per_group if in_place else planes.pairs_of(p)
    g = contiguous(p.batch, channels * p.groups, 4000, dtype=dtype)
    x = contiguous(*p.in_shape, dtype=dtype)
    blocks, sums, launch = grad_weight_wgmma._prepared.__wrapped__(p, own, in_place, g, x, H200)
    _, stored, rows, grid = launch.arguments
    assert own.direct == direct
    assert rows == of_weight.Rows(4000, 4000, channels * p.groups, -p.padding if in_place else 0)
    assert (grid.group_rows, grid.group_channels) == (channels, p.in_channels_per_group)
    assert grid.tiles == p.groups * grid.pair_tiles * grid.channel_tiles * grid.tap_chunks
    assert grid.all_stages == p.batch * grid.sample_stages
    assert blocks == grid.splits * grid.tiles
    weights = p.in_channels * p.out_channels_per_group * p.kernel_size
    assert stored.numel() == (weights if direct else sums * grid.tiles * own.tile_sums)
    assert launch.kernel.signature[1].dtype == ELEMENTS[dtype if direct else torch.float32].storage


@pytest.mark.parametrize(("dtype", "taken"), [(torch.bfloat16, "bf16"), (torch.float32, "tf32")])
@pytest.mark.parametrize("module", [grad_input_wgmma, grad_weight_wgmma], ids=["grad_input", "grad_weight"])
def test_a_tile_is_of_the_dtypes_precision_if_none_is_told(module, dtype, taken, monkeypatch):
    chosen, choose_for, p = [], module.choose_for, PROBLEM

    def choose(problem, precision, *others):
        chosen.append(precision)
        return choose_for(problem, precision, *others)

    monkeypatch.setattr(module, "choose_for", choose)
    monkeypatch.setattr(module.gpu, "of", lambda index: H200)
    operand, result = (p.weight_shape, p.in_shape)[:: 1 if module is grad_input_wgmma else -1]
    rung = GRADIENTS["grad_input_wgmma" if module is grad_input_wgmma else "grad_weight_wgmma"]
    rung.config(p, dtype, H200)
    rung.prepare(*(contiguous(*shape, dtype=dtype) for shape in (p.out_shape, operand, result)), p)
    assert chosen == [taken, taken]


@pytest.mark.parametrize(
    ("dtype", "told", "taken"),
    [(torch.bfloat16, None, "bf16"), (torch.float64, None, "fp64"), (torch.float32, "tf32x3", "tf32x3")],
)
def test_planes_are_computed_in_the_precision_told_or_else_the_dtypes(dtype, told, taken, monkeypatch):
    rung, chosen, p = GRADIENTS["grad_input_planes"], [], PROBLEM
    monkeypatch.setattr(rung, "forward_rung", lambda problem, dtype, precision, device: chosen.append(precision))
    operands = (contiguous(*shape, dtype=dtype) for shape in (p.out_shape, p.weight_shape, p.in_shape))
    rung.prepare(*operands, p, precision=told)
    assert chosen == [taken]


def test_grad_weight_is_added_up():
    p = PROBLEM
    _, tile = GRADIENTS["grad_weight_wgmma"].config(p, torch.float32, H200, "tf32")
    own = grad_weight_sum.config_of(p, torch.float32, True)
    launch = grad_weight_sum.prepare.__wrapped__(p, tile, 5, own)
    partials, result, splits, weight, tiling = launch.arguments
    taps, pairs, channels = tile.tiles_of(p)
    assert pairs != channels
    assert partials.numel() == 5 * p.groups * taps * pairs * channels * tile.tile_sums
    assert result.numel() == p.in_channels * p.out_channels_per_group * p.kernel_size
    assert splits == (5, tile.tile_sums, p.groups * taps * pairs * channels)
    assert weight[:4] == (p.groups, p.in_channels_per_group, p.out_channels_per_group * p.kernel_size, p.kernel_size)
    assert (tiling.tap_chunks, tiling.pair_tiles, tiling.channel_tiles) == (taps, pairs, channels)
