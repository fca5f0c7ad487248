"""Tiles and splits of grad_weight_split: their coverage, and how short sums fill a GPU."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.weight.split import choose as grad_weight_choose
from numba_tconv.gradients.weight.split.choose import (
    BANKED,
    choose,
    milliseconds,
    min_blocks,
    second_stage_ms,
    splits_of,
    tiles,
)
from numba_tconv.gradients.weight.split.kernel import make_kernel
from numba_tconv.gradients.weight.split.tile import ALL, REST, WHOLE, tiny, unequal
from numba_tconv.lab.machine_code import offline
from numba_tconv.lab.measure import workloads
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.device import A100, H200
from tests.thorough import thorough

F32 = torch.float32
UNGROUPED = [name for name, workload in workloads.WORKLOADS.items() if workload.problem.groups == 1]
ungrouped = pytest.mark.parametrize("name", thorough(UNGROUPED, always=UNGROUPED[::3]))


def problem_of(name, **sizes):
    return replace(workloads.get(name).problem, **sizes)


def taps_of(problem, config):
    """How often the blocks of one row tile have each output channel and tap."""
    rows = problem.taps.rows
    whole = problem.kernel_size // rows * rows
    found = Counter()
    for tile in config.tiles:
        begin, end = whole if tile.part == REST else 0, whole if tile.part == WHOLE else problem.kernel_size
        division = tile.division(problem)
        every = division.channel_tiles, division.phase_chunks, division.tap_chunks
        for channel_tile, part, chunk in product(*map(range, every)):
            for pair in range(tile.channels * tile.phases):
                c = channel_tile * tile.channels + pair // tile.phases
                a = part * tile.phases + pair % tile.phases
                if c < problem.out_channels_per_group and a < tile.phases_of(problem):
                    taps = (begin + a + (chunk * tile.tap_chunk + b) * rows for b in range(tile.tap_chunk))
                    found.update((c, k) for k in taps if k < end)
    return found


@pytest.mark.parametrize("dtype", [F32, torch.float64], ids=str)
def test_partial_sums_are_whole_vectors(dtype):
    """A thread of fewer sums than a vector holds would lose them."""
    every = product((1, 2, 8), (1, 2, 8), (1, 2, 3))
    problems = (Problem(16, i, o, kernel_size, 4096, stride=kernel_size) for i, o, kernel_size in every)
    found = [config for p in problems for config in grad_weight_choose.candidates(p, dtype, H200)]
    assert all(config.sums % config.vector == 0 for config in found if config.partial)
    assert any(config.sums % config.vector for config in found)
    assert any(config.partial for config in found) == (dtype == F32)


@pytest.mark.parametrize("name", ["seamless_u1", "kb79", "hifigan_u1", "small"])
def test_each_tap_is_in_one_tile(name):
    problem = problem_of(name)
    configs = [*tiles(problem.layer, F32, H200), *tiny(problem, F32)]
    every = {(c, k): 1 for c in range(problem.out_channels) for k in range(problem.kernel_size)}
    for config in configs:
        assert taps_of(problem, config) == every, config


@ungrouped
def test_unequal_rows_have_two_kinds_of_blocks(name):
    layer = problem_of(name).layer
    assert unequal(layer) == (name == "seamless_u1")  # eleven taps; five phases of three would have fifteen
    for config in tiles(layer, F32, H200):
        assert [tile.part for tile in config.tiles] == ([WHOLE, REST] if unequal(layer) else [ALL])
    for config in tiny(layer, F32):
        assert unequal(layer) or config.part == ALL


@pytest.mark.parametrize("gpu", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize("dtype", [F32, torch.float64, torch.float16], ids=str)
def test_two_kinds_of_blocks_share_the_multiprocessors(gpu, dtype):
    """As many of either are resident as of both together."""
    for config in grad_weight_choose._of_two_kinds(problem_of("seamless_u1").layer, dtype, gpu):
        assert config.min_blocks == config.rest_tile.min_blocks
    for config in tiles(problem_of("seamless_u1").layer, dtype, gpu):
        whole, rest = config.tiles
        assert whole.threads == rest.threads
        assert whole.min_blocks == rest.min_blocks
        for tile in config.tiles:
            assert min_blocks(replace(tile, rest_tile=None), gpu) >= config.min_blocks
        assert config.shared_bytes == max(replace(whole, rest_tile=None).shared_bytes, rest.shared_bytes)
        assert config.copying_vectors().rest_tile.x_vector == config.copying_vectors().x_vector == config.vector


@pytest.mark.parametrize("batch", [1, 16])
def test_the_rest_is_cheaper_than_taps_that_phases_lack(batch):
    """Eleven taps of five phases take at most a fifth more than ten, clearly less than tiles' fifteen."""
    problem = problem_of("seamless_u1", batch=batch)

    def time(problem):
        config = choose(problem, F32)
        return milliseconds(problem, config, H200)(*splits_of(problem, config))

    ten, fifteen = (time(replace(problem, kernel_size=taps)) for taps in (10, 15))
    assert choose(problem, F32).rest_tile
    assert ten <= time(problem) < min(1.2 * ten, 0.85 * fifteen)


@pytest.mark.parametrize("batch", [1, 12])
def test_channels_share_where_a_column_lies(batch):
    """With many phases a block takes few, whose columns lie in banks of their own."""
    config = choose(problem_of("waveglow", batch=batch), F32)
    assert config.channels >= 4
    assert config.phases <= BANKED


@pytest.mark.parametrize(
    "name", ["small", "head", "seamless_u1", "xcodec_u1", "hifigan_u1", "hifigan_u4", "istft", "waveglow", "demucs_u2"]
)
def test_short_sums_fill_the_multiprocessors(name):
    problem = problem_of(name, batch=1)
    config = choose(problem, F32)
    splits, length = splits_of(problem, config)
    blocks = splits * config.blocks(problem)
    assert blocks >= H200.multiprocessors
    # None does more than twice the average.
    assert -(-blocks // H200.multiprocessors) < 2 * blocks / H200.multiprocessors
    assert splits * length < config.stages(problem) + splits


@ungrouped
def test_other_tiles_are_clearly_better(name):
    problem = problem_of(name, batch=1)
    usual = tiles(problem.layer, F32, H200)[0]
    config = choose(problem, F32)

    def time(config):
        return milliseconds(problem, config, H200)(*splits_of(problem, config))

    assert config == usual or time(config) < 0.95 * time(usual)


@pytest.mark.parametrize(("splits", "ms"), [(1, 0), (8, 0.0033112), (9, 0.0035125), (64, 0.0047812)])
def test_adding_up_costs_a_launch_its_waits_and_its_bytes(splits, ms):
    """512 weights: a wait for each eight splits that are begun."""
    assert second_stage_ms(Problem(1, 16, 8, 4, 100), splits) == pytest.approx(ms, rel=1e-4)


# Measured tiles of long sums: (thread_m, lanes_m, thread_p, lanes_p), splits.
LONG = {
    "kb64": ((8, 8, 4, 16), 527),
    "kb74": ((8, 4, 2, 32), 527),
    "kb79": ((8, 4, 4, 16), 264),
    "hifigan_u1": ((8, 8, 4, 16), 3),
    "hifigan_u2": ((8, 8, 4, 16), 12),
    "hifigan_u3": ((8, 8, 4, 16), 99),
    "hifigan_u4": ((8, 8, 4, 16), 395),
    "dac_u1": ((8, 8, 4, 16), 1),
    "dac_u2": ((8, 8, 4, 16), 7),
    "dac_u3": ((8, 8, 4, 16), 55),
    "dac_u4": ((8, 8, 4, 16), 220),
    "encodec_u4": ((8, 8, 4, 16), 395),
    "oobleck_u1": ((8, 8, 4, 16), 1),
    "oobleck_u5": ((8, 8, 4, 16), 148),
    "patch": ((8, 8, 8, 16), 4),
}


@pytest.mark.parametrize("name", LONG)
def test_long_sums_keep_their_tiles(name):
    problem = problem_of(name)
    config = choose(problem, F32)
    assert (config.thread_m, config.lanes_m, config.thread_p, config.lanes_p) == LONG[name][0]
    assert splits_of(problem, config)[0] == LONG[name][1]


@ungrouped
def test_a_layer_has_few_tiles(name):
    layer = problem_of(name).layer
    assert len(tiles(layer, F32, H200)) <= 4
    assert len(tiles(layer, F32, A100)) == len(tiles(layer, torch.float16, H200)) == 1
    lengths = range(max(1, layer.length), 3000, 171)
    assert {choose(problem_of(name, length=n), F32) for n in lengths} <= set(tiles(layer, F32, H200))


def test_a_new_length_does_not_look_for_tiles(monkeypatch):
    problem = problem_of("seamless_u1")
    choose(problem, F32)
    monkeypatch.setattr(grad_weight_choose, "candidates", None)
    for length in (3, 50, 777, 12_345):
        choose(replace(problem, length=length, batch=2), F32)


def test_few_splits_are_looked_at(monkeypatch):
    """However long the sums, and however many the blocks."""
    looked_at = []
    monkeypatch.setattr(
        grad_weight_choose, "range", lambda *ends: looked_at.append(range(*ends)) or range(*ends), False
    )
    for channels, length in ((64, 2**33), (8192, 2**20), (8192, 2**31), (1, 1)):
        problem = Problem(1, channels, channels, 4, length, stride=2)
        config = choose(problem, F32)
        looked_at.clear()
        for splits, stages in grad_weight_choose.divisions(problem, config, H200):
            assert (splits - 1) * stages < config.stages(problem) <= splits * stages
            assert stages * config.block_l <= 8192
        assert 1 <= len(looked_at[0]) <= 32


@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.thorough
@pytest.mark.parametrize(("name", "slices"), [("hifigan_u1", 1), ("kb79", 2)])
def test_sums_of_one_slice_go_straight_from_registers(name, slices):
    config = choose(problem_of(name), F32)
    assert config.slices == slices
    ptx = offline.report(make_kernel(config), (9, 0), config.shared_bytes).ptx
    stores = ptx.count("st.global.f32")
    assert stores == config.sums if slices == 1 else 1 <= stores < 8
    assert ("st.shared.f32" in ptx) == (slices > 1)


@pytest.mark.parametrize("batch", [1, 8])
def test_of_equal_tiles_that_which_multiplies_more_in_a_turn(batch):
    """A patch's rows and pairs are alike: tiles of 8 x 4 and of 4 x 8 sums a thread load as much."""
    problem = problem_of("patch", batch=batch)
    config = choose(problem, F32)
    mirrored = replace(
        config, thread_m=config.thread_p, thread_p=config.thread_m, lanes_m=config.lanes_p, lanes_p=config.lanes_m
    )
    assert config.vectors_a_turn >= mirrored.vectors_a_turn
    assert config.vectors_a_turn == 2
