"""k4's choice of a tile, and of vector copies and stores."""

import math
from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common import split_sums
from numba_tconv.kernels.common.split_sums import second_stage_ms, split
from numba_tconv.kernels.k4_register_tile import choose as k4_choose
from numba_tconv.kernels.k4_register_tile import kernel as k4_register_tile
from numba_tconv.kernels.k4_register_tile import pack as k4_pack
from numba_tconv.kernels.k4_register_tile.choose import (
    blocks,
    candidates,
    choose,
    cost,
    few_cost,
    register_window,
    rounds,
)
from numba_tconv.kernels.k4_register_tile.plan import config_for, plan_of, vector_of
from numba_tconv.kernels.k4_register_tile.tile import fits, make, terms_of_a_partial_sum
from numba_tconv.lab.measure import workloads
from numba_tconv.runtime.device import A100, H200, RESERVED_SHARED
from numba_tconv.runtime.layout import NO_GPU, Layout
from numba_tconv.selection.registry import RUNGS

HEAD, ISTFT, KB64, DEMUCS = (workloads.get(name).problem for name in ("head", "istft", "kb64", "demucs_u2"))
# us of k4 at batch 1 on an H200, medians on a cold L2: (workload, length): [(time, splits, sizes of TILE)], the fastest
# first, for oobleck_u1 then a usual tile.
MEASURED = {
    ("waveglow", 63): [
        (46.5, 1, 256, 24, 8, 4, 16, 10, 2, 2),
        (60.0, 2, 256, 24, 8, 4, 16, 10, 2, 2),
        (70.6, 1, 64, 128, 8, 8, 8, 4, 2, 4),
        (84.4, 1, 128, 128, 8, 8, 8, 8, 2, 2),
    ],
    ("oobleck_u1", 256): [
        (432.6, 2, 256, 144, 8, 12, 16, 16, 2, 1),
        (596.0, 2, 128, 128, 8, 8, 8, 16, 2, 2),
        (461.0, 2, 128, 144, 8, 12, 16, 8, 2, 2),
        (500.4, 1, 192, 96, 12, 12, 16, 8, 2, 2),
    ],
    ("small", 128): [
        (7.8, 1, 32, 64, 4, 4, 2, 64, 2, 3),
        (8.1, 2, 32, 64, 4, 4, 4, 32, 2, 5),
        (8.3, 1, 32, 64, 4, 4, 4, 32, 2, 5),
        (14.1, 1, 32, 256, 4, 8, 8, 16, 2, 2),
    ],
}
WHOLE_TILES = {  # the same where all columns belong to whole tiles
    ("oobleck_u1", 252): [(399.3, 2, 128, 128, 8, 8, 8, 16, 2, 2), (449.2, 2, 192, 96, 12, 12, 16, 8, 2, 2)],
}
TILE = "block_m", "block_n", "thread_m", "thread_n", "lanes_m", "block_k", "stages", "min_blocks"
LAUNCH = 0.008  # ms that every launch costs and the model leaves out


def test_few_tiles_with_long_sums_are_split():
    for problem in (HEAD, ISTFT):
        config = choose(problem, torch.float32)
        assert config.splits > 1
        assert choose(problem, torch.float64).splits == 1, "partial sums are in float32"
    for name in ("kb64", "dac_u1", "waveglow"):
        assert choose(workloads.get(name).problem, torch.float32, 4).splits == 1


def test_more_than_a_round_of_blocks_may_be_split():
    problem = replace(DEMUCS, batch=18)
    config = choose(problem, torch.float32, 4)
    assert config.splits > 1
    assert blocks(problem, config) > config.min_blocks * H200.multiprocessors


def test_what_takes_the_gpu_less_than_a_call_takes_the_host_is_not_split(monkeypatch):
    short = Problem(1, 128, 64, 8, 256, stride=4, padding=2)
    assert choose(short, torch.float32, 4).splits == 1
    k4_choose.choose.cache_clear()
    monkeypatch.setattr(k4_choose, "CALL", 0.0)
    assert choose(short, torch.float32, 4).splits > 1
    k4_choose.choose.cache_clear()


def test_a_split_must_gain_more_than_the_model_errs(monkeypatch):
    k4_choose.choose.cache_clear()
    monkeypatch.setattr(k4_choose, "LEAST_GAIN", 1.0)
    monkeypatch.setattr(k4_choose, "CLEARLY", 0.0)
    assert choose(HEAD, torch.float32).splits == 1
    k4_choose.choose.cache_clear()


def test_the_second_stage_costs_time():
    config = choose(HEAD, torch.float32)
    first = cost(split(HEAD, config.splits), replace(config, splits=1), H200)
    assert cost(HEAD, config, H200) == first + second_stage_ms(HEAD, config.splits, 4)


def test_float64_is_multiplied_at_half_the_rate():
    config, *_ = candidates(HEAD, torch.float64, 1, H200)
    double, single = (cost(HEAD, replace(config, dtype=dtype), H200) for dtype in (torch.float64, torch.float32))
    assert 1.9 < double / single < 2.3


def test_few_warps_take_as_long_as_more():
    config, *_ = candidates(HEAD, torch.float32, 1, H200)
    assert (config.threads, rounds(HEAD, config, H200)) == (128, (0, 1))
    wide = replace(config, block_n=2 * config.block_n)
    assert (wide.threads, rounds(HEAD, wide, H200)) == (256, (0, 1))
    time, of_twice_the_warps = cost(HEAD, config, H200), cost(HEAD, wide, H200)
    assert time < of_twice_the_warps < 1.6 * time


@pytest.mark.parametrize("batch", [1, 4])
def test_time_is_flat_over_lengths(batch):
    """A shorter length is never predicted to take much longer."""
    problems = [replace(HEAD, batch=batch, length=length) for length in range(1, 1000, 31)]
    costs = [LAUNCH + cost(p, choose(p, torch.float32), H200) for p in problems]
    least = [min(costs[z:]) for z in range(len(costs))]
    assert max(time / longer for time, longer in zip(costs, least, strict=True)) < 1.3


def test_the_split_is_told_and_one_kernel_serves_all_numbers_of_parts():
    config, rung = choose(HEAD, torch.float32), RUNGS["k4_register_tile"]
    assert f"input channels in {config.splits} parts" in rung.tile(config)
    assert "parts" not in rung.tile(replace(config, splits=1))
    assert rung.kernel(config) is rung.kernel(replace(config, splits=1))


def test_the_last_blocks_share_a_multiprocessor_with_fewer():
    config = choose(KB64, torch.float32, 4)
    assert config.min_blocks == 2
    assert rounds(KB64, config, H200) == (124, 1)


def test_rows_of_unequal_taps_get_blocks_of_one_phase_where_channels_are_many():
    seamless = workloads.get("seamless_u1").problem
    config = choose(seamless, torch.float32, 4)
    assert (config.ragged, config.one_phase, config.phases, config.channels) == (True, True, 1, config.block_m)
    assert config.row_parts == seamless.taps.rows == 5
    assert config.multiplied_taps(seamless) == 11 / 5 < config.tap_chunk == 3
    assert not choose(replace(seamless, out_channels=4), torch.float32, 4).one_phase
    equal = choose(replace(seamless, kernel_size=10), torch.float32, 4)
    assert (equal.ragged, equal.one_phase, equal.phases) == (False, False, 5)


def test_of_few_blocks_they_get_blocks_of_all_phases_each_warp_of_one():
    """Blocks of one phase would be slower."""
    seamless = replace(workloads.get("seamless_u1").problem, batch=1)
    config = choose(seamless, torch.float32, 4)
    assert config.apart
    assert config.uniform
    assert (config.one_phase, config.phases, config.channels) == (False, 5, 16)
    assert config.multiplied_taps(seamless) == 11 / 5
    assert not choose(replace(seamless, kernel_size=10), torch.float32, 4).apart
    assert not choose(replace(seamless, kernel_size=19, stride=9), torch.float32, 4).apart, "as many warps as phases"


def measured(key):
    """The problem, and its times by configuration."""
    problem = replace(workloads.get(key[0]).problem, batch=1, length=key[1])
    x = Layout.contiguous((1, problem.in_channels, problem.length), torch.float32, NO_GPU)

    def config(splits, *sizes):
        part, tile = split(problem, splits), dict(zip(TILE, sizes, strict=True), x_vector=vector_of(x), splits=splits)
        config = make(part, torch.float32, **tile)
        assert fits(config, H200)
        return config

    return problem, vector_of(x), {config(*row): time for time, *row in (MEASURED | WHOLE_TILES)[key]}


def test_few_blocks_get_a_tile_within_five_percent_of_the_fastest():
    """In geometric mean; none takes over ten percent more."""
    shares = []
    for key in (("waveglow", 63), ("small", 128)):
        problem, x_vector, times = measured(key)
        shares.append(times[choose(problem, torch.float32, x_vector)] / min(times.values()))
    assert math.prod(shares) ** (1 / len(shares)) < 1.05
    assert max(shares) < 1.1


@pytest.mark.parametrize("key", WHOLE_TILES)
def test_whole_tiles_stay(key):
    problem, x_vector, times = measured(key)
    config, (usual, other) = choose(problem, torch.float32, x_vector), times
    assert (config.block_m, config.block_n) not in {tile[:2] for tile in k4_choose.FEW_TILES}
    assert few_cost(problem, usual, H200) < few_cost(problem, other, H200)


def test_the_estimate_of_few_blocks():
    """Within a quarter of each measurement; root mean square within 12%."""
    errors = []
    for key in MEASURED | WHOLE_TILES:
        problem, _, times = measured(key)
        errors += [1e3 * few_cost(problem, config, H200) / time - 1 for config, time in times.items()]
    assert max(map(abs, errors)) < 0.25
    assert sum(e * e for e in errors) / len(errors) < 0.12**2


def test_other_tiles_are_for_few_blocks_alone():
    others = {tile[:2] for tile in k4_choose.FEW_TILES}
    layers = "waveglow", "oobleck_u1", "hifigan_u1", "seamless_u1", "small", "istft", "head"

    def few(config):
        return (config.block_m, config.block_n) in others or config.apart

    for name, workload in workloads.WORKLOADS.items():
        for problem in (workload.problem, replace(workload.problem, batch=1)):
            x = Layout.contiguous(problem.in_shape, torch.float32, NO_GPU)
            config = choose(problem, torch.float32, vector_of(x))
            assert few(config) == (problem.batch == 1 and name in layers), problem
            assert not few(choose(problem, torch.float64))
            assert not few(choose(problem, torch.float32, vector_of(x), A100))


def test_two_rounds_of_blocks_are_not_few(monkeypatch):
    problem, others = replace(DEMUCS, batch=3, length=2049), {tile[:2] for tile in k4_choose.FEW_TILES}
    config = choose(problem, torch.float32)
    assert (config.block_m, config.block_n) not in others
    k4_choose.choose.cache_clear()
    monkeypatch.setattr(k4_choose, "FEW_ROUNDS", 4)
    config = choose(problem, torch.float32)
    assert (config.block_m, config.block_n) in others
    k4_choose.choose.cache_clear()


def test_a_new_length_makes_no_tile(monkeypatch):
    """A layer's tiles, for each number of splits, are found once; a length only weighs them."""
    made = []
    monkeypatch.setattr(k4_choose, "make", lambda *problem, **tile: made.append(tile) or make(*problem, **tile))
    layer = replace(HEAD, in_channels=448)  # of no other test
    choose(layer, torch.float32)
    assert len(made) > 20
    made.clear()
    choose(replace(layer, length=HEAD.length + 1), torch.float32)
    assert not made


def test_tiles_of_few_blocks_are_legal():
    layers = {workload.problem.layer for workload in workloads.WORKLOADS.values()}
    layers |= {replace(p, dilation=4) for p in layers} | {split(p, 2) for p in layers if p.in_channels_per_group > 2}
    seamless = workloads.get("seamless_u1").problem.layer
    layers |= {replace(seamless, kernel_size=2 * rows + 1, stride=rows) for rows in range(2, 12)}
    found = [(p, c) for p in layers for x_vector in (1, 2, 4) for c in k4_choose.few_tiles(p, x_vector, H200)]
    assert {(c.block_m, c.block_n) for _, c in found if not c.apart} == {tile[:2] for tile in k4_choose.FEW_TILES}
    assert {(c.taps.rows, c.block_m) for _, c in found if c.apart} == {(rows, 16 * rows) for rows in range(2, 9)}
    for p, c in found:
        assert fits(c, H200)
        assert c.shared_bytes <= H200.shared_per_block
        assert c.window <= register_window(H200)
        assert c.apart == (p.kernel_size % p.taps.rows != 0)
        assert not c.apart or c.channels % (c.lanes_m * c.thread_m) == 0, "rows of a warp are of one phase"
        assert (c.block_m, c.block_n) == (c.lanes_m * c.thread_m * c.warps_m, 32 // c.lanes_m * c.thread_n * c.warps_n)
        stages = c.channel_chunks(p) * c.tap_chunks(p)
        longest = c.partial or stages
        assert longest * c.block_k * c.tap_chunk <= terms_of_a_partial_sum(p) or stages == 1, "a float32 sum"
    assert {c.stages for _, c in found} == {2, 3}


def test_the_blocks_of_the_last_columns_come_last():
    problem, _, times = measured(("oobleck_u1", 256))
    usual, narrow = list(times)[1], next(config for config in times if config.block_n == 96)
    part = split(problem, 2)
    # Three tiles of 128 rows on 132 multiprocessors: two full ones share one, then one with one warp in four.
    assert [r for r in k4_choose.busiest_rounds(part, usual, H200) if r[0]] == [(1, 2, 16), (1, 1, 2)]
    # Three tiles of 96: the last has 68 columns, three warps of four.
    assert [r for r in k4_choose.busiest_rounds(part, narrow, H200) if r[0]] == [(1, 2, 8)]
    assert [r for r in k4_choose.busiest_rounds(part, replace(narrow, min_blocks=1), H200) if r[0]] == [(2, 1, 4)]
    long = replace(part, length=10 * 256)
    blocks_of_it = blocks(long, narrow)
    assert sum(number * beside for number, beside, _ in k4_choose.busiest_rounds(long, narrow, H200)) == -(
        -blocks_of_it // 132
    )


def test_tiles_of_few_blocks_store_vectors_where_they_are_aligned(monkeypatch):
    monkeypatch.setattr(k4_choose, "CLEARLY", 100)
    problem = Problem(1, 64, 64, 9, 64, padding=4)
    usual = choose(problem, torch.float64)
    for length, y_vector in ((64, 4), (66, 1), (68, 4)):
        config = k4_choose.clearly_better(replace(problem, length=length), usual, 2, H200, [1, 2])
        assert config.y_vector == y_vector


def test_the_largest_vectors_of_the_input():
    x = Layout.contiguous((2, 8, 64), torch.float32, NO_GPU)
    assert vector_of(x) == vector_of(x._replace(offset=16)) == 4
    assert vector_of(x._replace(offset=8)) == vector_of(x._replace(strides=(512, 66, 1))) == 2
    assert vector_of(x._replace(offset=4)) == vector_of(x._replace(strides=(1024, 65, 1))) == 1
    assert vector_of(x._replace(strides=(1024, 128, 2))) == 1
    assert vector_of(Layout.contiguous((2, 8, 66), torch.float32, NO_GPU)) == 2
    assert vector_of(Layout.contiguous((2, 8, 67), torch.float32, NO_GPU)) == 1
    assert vector_of(Layout.contiguous((2, 8, 66), torch.float64, NO_GPU)) == 2
    assert vector_of(Layout.contiguous((2, 8, 66), torch.float64, NO_GPU)._replace(offset=8)) == 1


@pytest.mark.parametrize(("offset", "vector"), [(0, 4), (16, 4), (8, 1)])
def test_vectors_of_outputs_begin_at_multiples_of_16_bytes(offset, vector, monkeypatch):
    p, found, make_kernel = Problem(2, 8, 8, 5, 60), [], k4_register_tile.make_kernel
    looking = staticmethod(lambda config: found.append(config) or make_kernel(config))
    monkeypatch.setattr(k4_register_tile.RegisterTile, "make_kernel", looking)
    x, w, y = (
        Layout.contiguous(shape, torch.float32, NO_GPU)
        for shape in (p.in_shape, (p.in_channels, p.out_channels, 5), (2, 8, p.out_length))
    )
    RUNGS["k4_register_tile"].prepare(x, w, None, y._replace(offset=offset), p)
    assert [config.y_vector for config in found] == [vector]


def test_partial_sums_are_stored_in_vectors_wherever_the_output_begins(monkeypatch):
    p, found, make_kernel = Problem(1, 256, 32, 9, 64, padding=4), [], k4_register_tile.make_kernel
    looking = staticmethod(lambda config: found.append(config) or make_kernel(config))
    monkeypatch.setattr(k4_register_tile.RegisterTile, "make_kernel", looking)
    assert choose(p, torch.float32, 4).splits > 1
    x, w, y = (Layout.contiguous(shape, torch.float32, NO_GPU) for shape in ((1, 256, 64), (256, 32, 9), (1, 32, 64)))
    RUNGS["k4_register_tile"].prepare(x, w, None, y._replace(offset=4), p)
    assert [config.y_vector for config in found] == [4]


@pytest.mark.parametrize("gpu", [H200, A100], ids=["H200", "A100"])
def test_launches_are_early_on_gpus_that_have_it(gpu):
    """Few blocks beside those that pack; many would gather, so only the sum of partial sums begins early."""
    for p, few in ((replace(HEAD, in_channels=256, out_channels=16, length=20), True), (HEAD, False)):
        x, w = (
            Layout.contiguous(shape, torch.float32, NO_GPU)
            for shape in ((1, p.in_channels, p.length), (p.in_channels, p.out_channels, p.kernel_size))
        )
        _, first, second = plan_of(k4_register_tile.make_kernel, config_for, p, None, x, w, False, True, gpu)
        assert (first.early, second.launch.early) == (gpu == H200 and few, gpu == H200)
        assert second.launch.kernel is split_sums.make_kernel(torch.float32, gpu == H200)


@pytest.mark.parametrize("axis", [65_535, 4])
def test_blocks_are_those_that_have_columns(monkeypatch, axis):
    """Of all samples, one after the other; on two axes of the grid where one is too short."""
    monkeypatch.setattr("numba_tconv.kernels.common.arguments.GRID_AXIS", axis)
    p = Problem(5, 8, 40, 8, 100, stride=4, groups=2)
    config = make(p, torch.float32, 4, thread_m=4, thread_n=4, lanes_m=8, block_m=64, block_n=64)
    x, w = (Layout.contiguous(shape, torch.float32, NO_GPU) for shape in ((5, 8, 100), (8, 20, 8)))
    given = k4_register_tile.make_kernel, config_for, p, config, x, w, False, True, H200
    rows, along, planes = plan_of.__wrapped__(*given)[1].grid
    blocks = -(-5 * config.columns(p)[1] // 64)
    assert rows == 2 * config.row_tiles(p) > 2
    assert along <= axis
    assert planes == -(-blocks // axis)
    assert blocks <= along * planes < blocks + planes


def test_blocks_that_begin_early_spread_where_one_fits_or_each_has_a_multiprocessor():
    half = H200.shared_per_multiprocessor // 2 - RESERVED_SHARED  # of which two fit
    assert H200.spreads_early(10_000, half + 1, 10_000)
    assert not H200.spreads_early(10_000, half, 1)
    assert H200.spreads_early(100, half, 32)
    assert not H200.spreads_early(100, half, 33)
    assert not A100.spreads_early(1, A100.shared_per_block, 1)


def test_packings_that_are_equal_are_one_whatever_the_length_and_batch():
    def packing(problem=HEAD, **changes):
        config = replace(choose(HEAD, torch.float32), **changes)
        return k4_pack.packing_of(problem, config, Layout.contiguous(problem.weight_shape, torch.float32, 0))

    assert packing() is packing(replace(HEAD, length=7, batch=3)) is packing(x_vector=2, stages=3, partial=1, splits=5)
    others = packing(block_k=4), packing(block_m=32), packing(tap_chunk=1), packing(dtype=torch.float64)
    assert len({packing(), *others, packing(split(HEAD, 2)), packing(replace(HEAD, in_channels=256))}) == 7
    few = replace(HEAD, in_channels=4)  # which are one stage, of whatever depth
    assert packing(few, block_k=4) is not packing(few, block_k=8)
