"""k6's split-K, on the CPU: what it computes, and when it is chosen."""

import itertools
from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common import split_sums
from numba_tconv.kernels.k6_wgmma import choose as k6_choose
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.kernels.k6_wgmma.boxes import RowAlignment, row_alignment
from numba_tconv.kernels.k6_wgmma.tile import SHARED_PER_BLOCK, column_tiles
from numba_tconv.lab.measure import workloads
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.device import H200
from numba_tconv.selection.registry import RUNGS
from tests.parity import operands, parameters

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")

K6 = RUNGS["k6_wgmma"]
LAUNCH = 0.007  # ms, about what every launch costs, which the model leaves out
HEAD, ISTFT = (workloads.get(name).problem for name in ("head", "istft"))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("splits", [2, 3])
def test_partial_sums_add_up_to_the_outputs(splits, groups):
    """By torch: the split problem has the same tensors, and its outputs add up."""
    p = Problem(2, 12, 6, 5, 9, stride=2, padding=1, groups=groups, bias=True)
    x, w, bias = operands(p, torch.float64, "cpu")
    part = split_sums.split(p, splits)
    assert part.out_channels_per_group == p.out_channels_per_group
    assert not part.bias
    partials = torch.conv_transpose1d(x, w, None, **parameters(part))
    assert partials.numel() == split_sums.partial_sums(p, splits)
    sums = partials.reshape(p.batch, groups, splits, p.out_channels_per_group, -1).sum(2)
    whole = torch.conv_transpose1d(x, w, bias, **parameters(p))
    torch.testing.assert_close(sums.reshape(whole.shape) + bias[:, None], whole)


@pytest.mark.parametrize("channels", [16, 31, 80, 512, 1026])
def test_parts_are_equal_and_hold_channels_for_a_product(channels):
    numbers = split_sums.numbers_of_parts(replace(HEAD, in_channels=channels))
    assert (numbers == []) == (channels in (16, 31))
    assert all(channels % parts == 0 and channels // parts >= split_sums.FEWEST_CHANNELS for parts in numbers)
    assert len(set(numbers)) == len(numbers) <= len(split_sums.PARTS)


def test_more_partial_sums_than_the_second_stage_counts_are_not_made():
    long = replace(HEAD, length=200_000)
    assert split_sums.partial_sums(long, 8) > split_sums.MOST_SUMS > split_sums.partial_sums(long, 2)
    assert max(split_sums.numbers_of_parts(long)) < 8 <= max(split_sums.numbers_of_parts(HEAD))


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_few_tiles_with_long_sums_are_split(precision):
    for problem in (HEAD, *([ISTFT] if precision == "tf32" else [])):  # in bfloat16 either way takes as long
        config, whole = k6_choose.choose(problem, precision), k6_choose.choose_whole(problem, precision)
        assert config.splits > 1
        assert k6_choose.cost(problem, config, H200) < k6_choose.cost(problem, whole, H200)
        assert config.shared_bytes <= SHARED_PER_BLOCK
    for name in ("kb64", "dac_u1", "waveglow"):
        problem = workloads.get(name).problem
        assert k6_choose.choose(problem, precision) == k6_choose.choose_whole(problem, precision)
        assert k6_choose.choose(problem, precision).splits == 1


def test_partial_sums_are_float32_and_one_kernel_serves_all_numbers_of_parts():
    for precision, wide in (("tf32", False), ("tf32x3", False), ("bf16", True), ("fp16", True)):
        config = next(iter(k6_choose.split_configs(HEAD, precision)))
        assert config.splits > 1
        assert config.tile.wide_outputs == wide
        assert config.tile.out_dtype == torch.float32
        assert K6.kernel(config) is K6.kernel(replace(config, splits=1))
    assert k6_choose.choose_whole(HEAD, "bf16").tile.out_dtype == torch.bfloat16


def test_a_part_may_begin_wherever_boxes_do():
    """A split's last stage may take channels of the next one, with zero weights; not another group's."""
    shape, strides = (1, 1026, 512), (1026 * 512, 512, 1)
    config = replace(k6_choose.choose(ISTFT, "tf32"), splits=6)
    assert 1026 // 6 % config.tile.depth
    assert row_alignment(shape, strides, 0, config, 1) == RowAlignment()
    odd_rows = (1, 1028, 511), (1028 * 511, 511, 1)
    assert row_alignment(*odd_rows, 0, replace(config, splits=1), 1) == RowAlignment(4, 3, False)
    assert row_alignment(*odd_rows, 0, replace(config, splits=4), 1) is None, "257 channels do not begin a set of four"
    odd_rows = (1, 1026, 511), (1026 * 511, 511, 1)
    assert row_alignment(*odd_rows, 0, config, 1) is None, "171 channels do not begin the first of four rows"
    assert row_alignment(shape, strides, 0, config, 2) is None


def test_half_a_turn_of_the_unrolled_loop_may_be_of_the_next_part_but_of_no_other_group():
    for precision in ("tf32", "bf16"):
        whole = k6_choose.choose_whole(ISTFT, precision)
        assert whole.unroll == 2
        like_it = (c for c in k6_choose.split_configs(ISTFT, precision) if c.tile.rows == whole.tile.rows)
        in_halves = [c for c in like_it if ISTFT.in_channels // c.splits % (2 * c.tile.depth)]
        assert {(c.unroll, c.depths) for c in in_halves} == {(2, 1)}
        grouped = replace(ISTFT, groups=2, in_channels=2 * ISTFT.in_channels, out_channels=2 * ISTFT.out_channels)
        assert {c.unroll for c in k6_choose.split_configs(grouped, precision)} == {1}


def test_no_more_parts_are_weighed_than_have_two_tiles_for_each_multiprocessor():
    def parts(share):
        return {config.splits for config in k6_choose.split_configs(HEAD, "tf32", share)}

    everything = {2, 4, 8, 16}
    assert parts(0.0) == everything
    assert parts(0.25) == {2, 4, 8}
    assert parts(0.9) == {2, 4}
    tiles = k6_choose.choose_whole(HEAD, "tf32")
    whole = tiles.tile.row_tiles(HEAD) * column_tiles(HEAD, tiles)
    assert k6_choose.share(HEAD, tiles, H200) == whole / tiles.regions / H200.multiprocessors


@pytest.mark.parametrize("precision", ["tf32", "bf16", "tf32x3"])
@pytest.mark.parametrize("problem", [HEAD, ISTFT, workloads.get("kb64").problem], ids=["head", "istft", "kb64"])
def test_configurations_are_those_of_any_length(problem, precision):
    for own in (problem, replace(problem, batch=9, length=77)):
        assert k6_config.configs(own, precision) == k6_config._configs(own, precision, False)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_time_is_flat_over_lengths(precision):
    """A shorter length, odd or not, is never predicted to take much longer."""
    problems = [replace(HEAD, length=length) for length in range(1, 1000, 31)]
    costs = [LAUNCH + k6_choose.cost(p, k6_choose.choose(p, precision), H200) for p in problems]
    least = [min(costs[z:]) for z in range(len(costs))]
    assert max(cost / longer for cost, longer in zip(costs, least, strict=True)) < 1.3


def test_the_split_is_told():
    config = k6_choose.choose(HEAD, "tf32")
    assert f"input channels in {config.splits} parts" in K6.tile(config)
    assert "parts" not in K6.tile(k6_choose.choose_whole(HEAD, "tf32"))
    assert K6.predicted_ms(HEAD, config, H200) == k6_choose.cost(HEAD, config, H200)


def test_one_kernel_adds_up_all_sums():
    """Whatever their number, and the outputs'; with vectors, a quarter of the threads."""
    for splits, (length, blocks) in itertools.product((2, 3), ((1000, 2), (1001, 8))):
        launch = split_sums.prepare(Problem(1, 16, 1, 1, length), torch.bfloat16, splits, has_bias=False, early=True)
        assert launch.kernel is split_sums.make_kernel(torch.bfloat16, True)
        assert launch.grid == (blocks, 1, 1)


@pytest.mark.parametrize("name", ["hifigan_u1", "dac_u4"])
def test_a_last_column_apart_costs_a_launch_and_its_stages(monkeypatch, name):
    problem = workloads.get(name).problem
    config = next(c for c in k6_config.configs(problem, "tf32") if c.tail)
    stages = config.tile.tap_chunks(problem) * k6_config.channel_chunks(problem, config)
    whole = k6_choose.cost(problem, config, H200)
    for term, times in (("TAIL", 1), ("TAIL_STAGE", stages)):
        with monkeypatch.context() as without:
            without.setattr(k6_choose, term, 0)
            less = k6_choose.cost(problem, config, H200)
        assert whole - less == pytest.approx(times * getattr(k6_choose, term)), term
