"""k6's unpacked weights, on the CPU: for which problems, and how a warp orders a stage."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_core.pack import make_place
from numba_tconv.kernels.k6_wgmma import unpacked
from numba_tconv.kernels.k6_wgmma.choose import choose, choose_packed, choose_whole
from numba_tconv.lab.measure.workloads import WORKLOADS
from numba_tconv.ptx import SIMULATOR

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")

LARGE = Problem(1, 1024, 512, 16, 256, stride=8, padding=4)


def with_unpacked(problem, precision="tf32"):
    return unpacked.with_unpacked(problem, choose_whole(problem, precision))


def test_only_large_weights_and_few_columns_are_taken_unpacked():
    large = WORKLOADS["oobleck_u1"].problem
    for precision in ("tf32", "bf16"):
        for batch, taken in ((1, True), (8, False)):
            p = replace(large, batch=batch)
            config, packed = choose(p, precision), choose_packed(p, precision)
            assert config.unpacked == taken
            assert not packed.unpacked
            assert replace(config, unpacked=False, stages=packed.stages) == packed
    assert not choose(replace(large, batch=1), "tf32x3").unpacked
    assert not choose(LARGE, "bf16").unpacked, "16 MB"
    assert choose(replace(LARGE, out_channels=1024), "bf16").unpacked


@pytest.mark.parametrize(
    "change",
    [
        {"kernel_size": 15},  # a phase lacks a tap
        {"kernel_size": 12, "stride": 4, "out_channels": 32},  # twelve words a channel
        {"dilation": 3},
        {"out_channels": 521},  # the last tile has fewer channels
        {"in_channels": 1020},  # a stage has fewer channels
        {"in_channels": 32, "out_channels": 64},  # resident
        {"out_channels": 1, "in_channels": 4096},  # fewer words than lanes
        {"out_channels": 4, "kernel_size": 8, "stride": 1},  # rows that no channel has
        {"kernel_size": 1024, "stride": 256},  # part of the phases
    ],
    ids=str,
)
def test_what_tiles_cannot_take_whole_is_packed(change):
    assert with_unpacked(LARGE).unpacked
    assert with_unpacked(replace(LARGE, **change)) is None


def test_16_bit_weights_are_read_in_pairs():
    odd = replace(LARGE, kernel_size=1, stride=1, padding=0)
    for problem in (odd, replace(LARGE, kernel_size=4, stride=1, padding=0)):
        assert with_unpacked(problem, "bf16") is None
    assert with_unpacked(LARGE, "bf16").unpacked


@pytest.fixture
def memory(monkeypatch):
    """Shared memory in 16-bit halves, which a warp's instructions read and write."""
    halves = {}

    def load(at):
        assert at % 4 == 0
        return halves[at], halves[at + 2]

    def store(at, *words):
        assert at % 16 == 0
        for z, word in enumerate(words):
            halves[at + 4 * z], halves[at + 4 * z + 2] = word

    def prmt(low, high, half):
        return low[half], high[half]

    for name, stand_in in {
        "device_function": lambda function: function,
        "int32": int,
        "int64": int,
        "ld_shared": lambda count, kind: load,
        "st_shared": store,
        "prmt": prmt,
        "float_of": lambda word: word,
        "round_tf32": lambda word: word,
        "fence_async": lambda: halves.update(fenced=True),
        "mbarrier_arrive": lambda barrier: halves.update(arrived=barrier),
        "cuda": SimpleNamespace(local=SimpleNamespace(array=lambda size, dtype: np.empty(size, object))),
        "LOWER": 0,
        "UPPER": 1,
    }.items():
        monkeypatch.setattr(unpacked, name, stand_in)
    return halves


@pytest.mark.parametrize(
    ("problem", "precision"),
    [
        *itertools.product(
            [
                LARGE,
                replace(LARGE, kernel_size=4, stride=2, in_channels=4096),
                replace(LARGE, kernel_size=32, stride=16),
            ],
            ["tf32", "bf16"],
        ),
        (replace(LARGE, kernel_size=2, stride=1, padding=0, in_channels=8192), "tf32"),
    ],
    ids=str,
)
def test_a_warp_orders_a_stage_as_if_it_were_packed(memory, monkeypatch, problem, precision):
    config = with_unpacked(problem, precision)
    tile, run, itemsize = config.tile, unpacked.run_of(config), config.tile.itemsize
    assert config.stage_bytes == config.regions * config.region(config.pitch * itemsize) + 2 * config.stage_weights
    assert config.ready + 8 * config.stages <= config.map
    raw, address, base = 1 << 20, 1 << 21, 3 * problem.kernel_size
    copied = []
    monkeypatch.setattr(unpacked, "cp_async_bulk", lambda *copy: copied.append(copy))
    bring = unpacked.make_bring(config)
    for lane in range(32):
        bring(lane, raw, "w", base, 2, "barrier")  # 2 row tiles
    assert copied == [
        (raw + c * run * itemsize, "w", base + c * 2 * run, run * itemsize, "barrier") for c in range(config.depth)
    ]
    for c in range(config.depth):  # a weight's name is its channel and place in the run
        for i in range(run):
            at = raw + (c * run + i) * itemsize
            memory[at], memory[at + itemsize - 2] = (c, i), (c, i)
    order = unpacked.make_order(config)
    for lane in range(32):
        order(lane, raw, address, "ready")
    assert memory["fenced"]
    assert memory["arrived"] == "ready"
    place, e = make_place(tile, "wgmma"), 0
    of_tap = tile.rows * tile.depth
    for depth in range(config.depths):
        for tap in range(tile.tap_chunk):
            for of_lane in range(of_tap):
                m, k = map(int, place(of_lane))
                channel, phase = divmod(m, tile.phases)
                weight = channel * problem.kernel_size + tap * tile.stride + phase
                assert memory[address + e * itemsize] == (depth * tile.depth + k, weight)
                e += 1
    assert e * itemsize == config.stage_weights
