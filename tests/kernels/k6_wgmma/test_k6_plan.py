"""What a launch of k6 tells its kernel, by name; a tensor map needs the driver, so a stand-in is told."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.k6_wgmma import boxes, kernel, plan
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.kernels.k6_wgmma.arguments import Channels, Columns, Fetch, Samples, TensorMap
from numba_tconv.kernels.k6_wgmma.choose import choose
from numba_tconv.lab.measure import workloads
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.kernel import GIVEN
from numba_tconv.runtime.layout import NO_GPU, Layout

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")
TEMPLATE = tuple(range(100, 116))


def told(monkeypatch, problem, offset=0, has_bias=True, y_offset=0, splits=1):
    """The arguments of the launch for a contiguous x that begins ``offset`` bytes after a multiple of 16."""
    p = problem
    monkeypatch.setattr(plan, "template_map", lambda *_: TEMPLATE)
    w = Layout.of(torch.empty(p.weight_shape, device="meta"))
    x = Layout.contiguous(p.in_shape, torch.float32, NO_GPU)._replace(offset=offset)
    config = replace(choose(p, "tf32"), splits=splits)
    given = p, config, x, w, has_bias, y_offset
    return config, plan.plan_of.__wrapped__(kernel.make_kernel, *given).launch.arguments


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_problem_is_told_by_name(monkeypatch, has_bias):
    p = Problem(3, 96, 80, 8, 1024, stride=4, padding=2, groups=2)
    config, (tensor_map, x, weights, y, channels, columns, grid, alignment) = told(monkeypatch, p, has_bias=has_bias)
    tile, (first, per_sample) = config.tile, k6_config.sample_columns(p, config)
    assert tensor_map == TensorMap(TEMPLATE, GIVEN)
    assert (x.data.shape, x.address, x.stride_n, x.stride_c, x.early) == ((3, 96, 1024), GIVEN, 96 * 1024, 1024, 0)
    assert x.samples == Samples(3, 1024, per_sample, first)
    assert (y.data.shape, y.batch, y.length) == ((3, 80, p.out_length), 3, p.out_length)
    assert (weights.has_bias, weights.bias is weights.packed) == (has_bias, not has_bias)
    assert channels == Channels(48, 40, 2)
    assert columns == Columns(2, per_sample, first)
    assert (grid.tap_chunks, grid.last_taps) == (tile.tap_chunks(p), tile.last_taps(p))
    assert grid.channel_chunks * tile.depth >= 48
    assert (grid.row_tiles, grid.group_tiles) == (2 * tile.row_tiles(p), tile.row_tiles(p))
    assert grid.column_tiles == k6_config.column_tiles(p, config)
    assert alignment.shift == 0


@pytest.mark.parametrize(
    ("length", "offset", "alike"), [(1024, 0, 1), (1024, 8, 1), (1022, 0, 2), (1021, 4, 4)], ids=str
)
def test_how_windows_are_fetched_follows_from_where_rows_begin(monkeypatch, length, offset, alike):
    p = Problem(2, 64, 64, 8, length, stride=4)
    config, (_, x, *_) = told(monkeypatch, p, offset=offset, y_offset=4)
    aligned = alike == 1 and offset == 0
    rows = boxes.RowAlignment(alike, length % 4 if alike > 1 else 0, aligned)
    g = boxes.geometry(config, rows)
    assert x.early == offset // 4
    assert x.window == (alike.bit_length() - 1, g.pitch, g.shear, g.region, g.stage_bytes, g.stages)
    whole = k6_config.sample_columns(p, config)[1] % config.tile.advance == 0
    assert x.fetch == Fetch(boxed=1, aligned=int(aligned), whole_tiles=int(whole), in_vectors=int(aligned))


def test_joined_samples_are_told_as_one_with_more_zeros_behind_than_a_window(monkeypatch):
    p = workloads.get("waveglow").problem
    config, (_, x, *_) = told(monkeypatch, p)
    assert config.joined
    together = p.batch * k6_config.sample_columns(p, config)[1]
    assert x.samples == Samples(1, together, x.samples.columns, 0)
    assert x.samples.columns - together > config.width


def test_the_output_is_told_where_it_begins(monkeypatch):
    _, (*_, alignment) = told(monkeypatch, Problem(2, 64, 64, 8, 1024, stride=4), y_offset=12)
    assert alignment.shift == 3


def test_no_box_spans_parts_of_the_channels(monkeypatch):
    """Every second row begins alike: rows in pairs fill parts of 18 channels, but not of 17."""
    for channels, stride_c in ((36, 1022), (34, 1024)):
        p = Problem(2, channels, 64, 8, 1022, stride=4)
        config, (_, x, _, y, of_groups, _, grid, _) = told(monkeypatch, p, splits=2)
        assert grid.channel_chunks * config.tile.depth < channels
        assert (x.stride_c, x.fetch.boxed) == (stride_c, 1)
        assert of_groups == Channels(channels // 2, 64, 2)
        assert y.data.shape == (2, 128, p.out_length)


@pytest.mark.parametrize("now", [False, True])
def test_only_weights_packed_in_the_call_take_the_early_launch(monkeypatch, now):
    done = []

    def launch(*_):
        done.append("early")

    launch.ordinary = lambda *_: done.append("ordinary")
    of_all = SimpleNamespace(packing=object(), launch=launch, map_bytes=0, tail=None, copy=None, second=None)
    monkeypatch.setattr(kernel, "plan_of", lambda *_: of_all)
    monkeypatch.setattr(kernel, "packed_weights", lambda w, _: (w, now))
    one, layout = torch.empty(1), Layout.contiguous((1, 1, 1), torch.float32, NO_GPU)
    kernel.WarpgroupMatrix().prepare(layout, layout, None, layout, Problem(1, 1, 1, 1, 1))(one, one, None, one)
    assert done == ["early" if now else "ordinary"]


def test_weights_are_packed_where_they_are_frozen_or_lie_badly(monkeypatch):
    p = Problem(1, 2048, 1024, 16, 256, stride=8, padding=4)
    config, done = choose(p, "tf32"), []
    assert config.unpacked
    monkeypatch.setattr(kernel.WarpgroupMatrix, "_prepare", lambda *given: lambda *_: done.append(given[-1].unpacked))
    x, w, y = (Layout.contiguous(shape, torch.float32, NO_GPU) for shape in (p.in_shape, p.weight_shape, p.out_shape))
    ordinary, frozen = torch.empty(1), torch.empty(1)
    frozen.packings = None
    for laid_out in (w, w._replace(offset=8), w._replace(strides=(16, 2048 * 16, 1))):
        launch = kernel.WarpgroupMatrix().prepare(x, laid_out, None, y, p, precision="tf32")
        launch(ordinary, ordinary, None, ordinary)
        launch(ordinary, frozen, None, ordinary)
    assert done == [True, False, False, False, False, False]


def test_unpacked_weights_are_told_as_they_lie(monkeypatch):
    p = Problem(1, 2048, 1024, 16, 256, stride=8, padding=4)
    config, (_, _, weights, *_) = told(monkeypatch, p, splits=choose(p, "tf32").splits)
    assert config.unpacked
    assert weights.packed.numel() == 2048 * 1024 * 16
    steps = kernel.WarpgroupMatrix().steps(config, p)
    assert [step.name for step in steps if step.name != "frozen"] == ["main", "tail", "add up"]
    assert next(step.kernel.name for step in steps if step.name == "frozen") == "pack_weights"


@pytest.mark.parametrize("rows", [8, 64, 128])
@pytest.mark.parametrize("by_phases", [False, True])
def test_two_depths_of_operands_where_registers_hold_them(by_phases, rows):
    """Beside the sums: two depths of two rows of four and the halo."""
    p, tile = Problem(1, 64, 64, 3, 100), SimpleNamespace(depth=8, operand_halves=1, by_phases=by_phases, rows=rows)

    def unroll(halo, problem=p, splits=1, halves=1):
        tile.halo, tile.operand_halves = halo, halves
        return k6_config.unroll_of(problem, tile, splits)

    fitting = [halo for halo in range(64) if unroll(halo) == 2]
    spare = (24 if by_phases else 48) + 128 - rows
    assert fitting == [halo for halo in range(64) if 2 * 2 * (4 + halo) <= spare]
    assert unroll(0, halves=2) == 1, "of split operands"
    assert unroll(0, replace(p, groups=2)) == 2
    odd = replace(p, in_channels=48, groups=2)  # three depths a group
    assert (unroll(0, odd), unroll(0, odd, splits=2)) == (1, 2)
    assert unroll(0, replace(p, in_channels=24)) == 2
