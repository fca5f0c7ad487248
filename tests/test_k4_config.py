"""How k4 chooses its tile, and when it copies and stores vectors; on the CPU."""

from dataclasses import replace

import pytest
import torch

from numba_tconv import workloads
from numba_tconv.kernels import RUNGS, k4_cost, k4_pack, k4_register_tile
from numba_tconv.kernels.channel_parts import second_stage_ms, split
from numba_tconv.kernels.device import H200
from numba_tconv.kernels.k4_config import candidates
from numba_tconv.kernels.k4_cost import blocks, choose, cost, rounds
from numba_tconv.kernels.k4_plan import vector_of
from numba_tconv.layout import NO_GPU, Layout
from numba_tconv.problem import Problem

HEAD, ISTFT, KB64, DEMUCS = (workloads.get(name).problem for name in ("head", "istft", "kb64", "demucs_u2"))
LAUNCH = 0.008  # ms, about what every launch costs, which the model leaves out


def test_few_tiles_with_long_sums_are_split():
    for problem in (HEAD, ISTFT):
        config = choose(problem, torch.float32)
        assert config.splits > 1
        assert choose(problem, torch.float64).splits == 1, "partial sums are in float32"
    for name in ("kb64", "dac_u1", "waveglow"):
        assert choose(workloads.get(name).problem, torch.float32, 4).splits == 1


def test_more_than_a_round_of_blocks_may_be_split():
    config = choose(DEMUCS, torch.float32, 4)
    assert config.splits > 1
    assert blocks(DEMUCS, config) > config.min_blocks * H200.multiprocessors


def test_what_takes_the_gpu_less_than_a_call_takes_the_host_is_not_split(monkeypatch):
    short = Problem(1, 128, 64, 8, 512, stride=4, padding=2)
    assert choose(short, torch.float32, 4).splits == 1
    k4_cost.choose.cache_clear()
    monkeypatch.setattr(k4_cost, "CALL", 0.0)
    assert choose(short, torch.float32, 4).splits > 1
    k4_cost.choose.cache_clear()


def test_a_split_must_gain_more_than_the_model_errs(monkeypatch):
    k4_cost.choose.cache_clear()
    monkeypatch.setattr(k4_cost, "LEAST_GAIN", 1.0)
    assert choose(HEAD, torch.float32).splits == 1
    k4_cost.choose.cache_clear()


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
    """No length is predicted to take much longer than a longer one."""
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
    assert config.parts == seamless.taps.rows == 5
    assert config.multiplied_taps(seamless) == 11 / 5 < config.tap_chunk == 3
    assert not choose(replace(seamless, out_channels=4), torch.float32, 4).one_phase
    equal = choose(replace(seamless, kernel_size=10), torch.float32, 4)
    assert (equal.ragged, equal.one_phase, equal.phases) == (False, False, 5)


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
    monkeypatch.setattr(k4_register_tile, "make_kernel", lambda config: found.append(config) or make_kernel(config))
    x, w, y = (
        Layout.contiguous(shape, torch.float32, NO_GPU)
        for shape in ((p.batch, p.in_channels, p.length), (p.in_channels, p.out_channels, 5), (2, 8, p.out_length))
    )
    RUNGS["k4_register_tile"].prepare(x, w, None, y._replace(offset=offset), p)
    assert [config.y_vector for config in found] == [vector]


def test_partial_sums_are_stored_in_vectors_wherever_the_output_begins(monkeypatch):
    p, found, make_kernel = Problem(1, 256, 32, 9, 64, padding=4), [], k4_register_tile.make_kernel
    monkeypatch.setattr(k4_register_tile, "make_kernel", lambda config: found.append(config) or make_kernel(config))
    assert choose(p, torch.float32, 4).splits > 1
    x, w, y = (Layout.contiguous(shape, torch.float32, NO_GPU) for shape in ((1, 256, 64), (256, 32, 9), (1, 32, 64)))
    RUNGS["k4_register_tile"].prepare(x, w, None, y._replace(offset=4), p)
    assert [config.y_vector for config in found] == [4]


def test_packings_that_are_equal_are_one_whatever_the_length_and_batch():
    def packing(problem=HEAD, **changes):
        config = replace(choose(HEAD, torch.float32), **changes)
        shape = problem.in_channels, problem.out_channels_per_group, problem.kernel_size
        return k4_pack.packing_of(problem, config, Layout.contiguous(shape, torch.float32, 0))

    assert packing() is packing(replace(HEAD, length=7, batch=3)) is packing(x_vector=2, stages=3, partial=1, splits=5)
    others = packing(block_k=4), packing(block_m=32), packing(tap_chunk=1), packing(dtype=torch.float64)
    assert len({packing(), *others, packing(split(HEAD, 2)), packing(replace(HEAD, in_channels=256))}) == 7
    few = replace(HEAD, in_channels=4)  # which are one stage, of whatever depth
    assert packing(few, block_k=4) is not packing(few, block_k=8)
