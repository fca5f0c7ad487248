"""How many splits grad_weight_wgmma's sums have, and when they are stored as the gradient."""

from dataclasses import replace

import pytest
import torch

from numba_tconv.gradients.weight.wgmma import epilogue as grad_weight_direct
from numba_tconv.gradients.weight.wgmma.choose import LONGEST_SUM, candidates, splits_of, whole_is_faster
from numba_tconv.gradients.weight.wgmma.producer import make_first_pair
from numba_tconv.lab.measure import workloads
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.device import H200
from numba_tconv.selection.gradient import GRADIENTS

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")


def config_of(name, **sizes):
    problem = replace(workloads.get(name).problem, **sizes)
    apart, config = GRADIENTS["grad_weight_wgmma"].config(problem, torch.bfloat16, H200, "bf16")
    assert apart is None
    return problem, config


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("head", True),
        ("small", True),
        ("dac_u1", True),
        ("hifigan_u1", False),
        ("hifigan_u3", False),
        ("dac_u2", False),
    ],
)
def test_sums_of_short_signals_are_stored_at_once(name, whole):
    problem, config = config_of(name)
    assert grad_weight_direct.suits(problem, replace(config, direct=False))
    assert config.direct == whole
    if name == "small":
        assert splits_of(problem, config) > 1  # would fill more multiprocessors, but takes a second launch


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_whole_sums_of_planes_are_stored_at_once(precision):
    """Where a tile has all taps of its phases, within one channel, and tiles are enough."""

    def found(name, **sizes):
        problem = replace(workloads.get(name).problem, **sizes)
        dtype = torch.float32 if precision == "tf32" else torch.bfloat16
        apart, config = GRADIENTS["grad_weight_wgmma"].config(problem, dtype, H200, precision)
        assert apart is not None
        assert config.plane_phases == (apart.phases if config.direct else 0)
        return config.direct

    assert found("waveglow")
    assert found("waveglow", batch=1)
    assert not found("waveglow", kernel_size=1000)  # a tile's last tap does not exist everywhere
    assert not found("waveglow", stride=250, kernel_size=1000)  # a tile's pairs would be of two channels
    assert not found("waveglow", length=100_000)  # too long for one sum
    assert not found("istft")  # tiles of half of the taps


@pytest.mark.parametrize(
    ("name", "by_taps", "sizes"),
    [
        ("seamless_u1", True, {}),  # of eleven taps, five phases have fifteen
        ("hifigan_u1", True, {}),  # the usual tiles, 48, fill 96 multiprocessors
        ("hifigan_u1", False, dict(batch=256)),  # what a lane reads serves two taps
        ("patch", False, {}),  # a tap a phase anyway
        ("kb64", False, {}),
    ],
)
def test_which_tiles_have_pairs_of_any_tap(name, by_taps, sizes):
    problem, config = config_of(name, **sizes)
    assert config.by_taps == by_taps
    assert config.phases_of(problem) == config.window.phases


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("alike", [1, 2, 4])
def test_rows_of_tiles_by_taps_are_the_next_ones(precision, alike):
    """A tile's rows are consecutive pairs, of channels in its boxes."""
    kinds = set()
    for name in ("seamless_u1", "encodec_u2", "demucs_u2"):
        problem = workloads.get(name).problem
        for config in candidates(problem, precision, alike):
            kinds.add(config.by_taps)
            first_pair = make_first_pair(config).py_func
            pair_tiles = config.tiles_of(problem).pair_tiles
            pair, reached = 0, 0
            for tile in range(pair_tiles):
                channel, begin = map(int, first_pair(tile))
                assert channel % alike == 0
                for row in range(config.pairs):
                    of_box, phase = divmod(begin + row, config.window.phases)
                    assert (channel + of_box, phase) == divmod(pair, config.window.phases)
                    reached = max(reached, of_box)
                    pair += 1
            assert pair >= problem.out_channels_per_group * config.phases_of(problem)
            assert config.g_channels - alike <= reached < config.g_channels
    assert kinds == {False, True}


@pytest.mark.parametrize("name", ["hifigan_u1", "small", "oobleck_u3"])
def test_of_longer_signals_they_are_added_up(name):
    """Once a signal is long enough for splits, every longer one is."""
    found = [config_of(name, batch=1, length=1 << log)[1].direct for log in range(3, 17)]
    assert found[0]
    assert not found[-1]
    assert found == sorted(found, reverse=True)


def test_no_sum_is_longer_than_it_may_be():
    problem, config = config_of("small", length=2 * LONGEST_SUM)
    assert splits_of(problem, config) > 1
    assert not config.direct
    one_multiprocessor = replace(H200, multiprocessors=1)  # where parts gain nothing
    assert not whole_is_faster(problem, config, one_multiprocessor)
    assert whole_is_faster(replace(problem, length=LONGEST_SUM), config, one_multiprocessor)
