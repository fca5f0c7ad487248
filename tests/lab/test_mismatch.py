"""Where an output is wrong, in words."""

import math
import re

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure.mismatch import mismatch

PROBLEM = Problem(2, 4, 6, 5, 13, stride=3, padding=2, groups=2)  # output o has phase (o + 2) mod 3
SHAPE = PROBLEM.out_shape
ALL = slice(None)


def spoilt(where, by=1.0):
    expected = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = expected.float()
    got[where] += by
    return got, expected


@pytest.mark.parametrize(
    ("where", "pattern"),
    [
        ((ALL, ALL, ALL), "all of the outputs"),
        ((ALL, ALL, slice(2, None, 3)), "all of phase 1"),
        ((ALL, slice(2, None, 3), ALL), "all of the last channel of each group"),
        ((ALL, slice(3, 5), ALL), "all of the first 2 channels of group 1"),
        ((1, 0, slice(0, None, 3)), "all of sample 1, channel 0 of group 0, phase 2"),
        ((ALL, ALL, slice(0, 4)), "all of positions 0 to 3"),
        ((ALL, ALL, slice(-3, None)), f"all of positions from {SHAPE[2] - 3} on"),
        ((ALL, ALL, slice(7, None, 8)), f"all of positions 7, 15, ... {range(7, SHAPE[2], 8)[-1]}"),
        ((ALL, ALL, slice(7, 24, 8)), "all of positions 7, 15, ... 23"),
        ((0, 4, 6), "all of sample 0, channel 1 of group 1, phase 2, position 6"),
    ],
)
def test_what_is_wrong_is_told_in_words(where, pattern):
    got, expected = spoilt(where)
    found = mismatch(got, expected, PROBLEM)
    assert found.pattern == pattern
    assert (found.wrong, found.outputs) == (torch.zeros(SHAPE)[where].numel(), got.numel())


def test_the_first_wrong_output_has_its_place_and_values():
    got, expected = spoilt((1, slice(2, None), slice(5, None)))
    found = mismatch(got, expected, PROBLEM)
    assert (found.n, found.channel, found.position, found.phase) == (1, 2, 5, 1)
    assert (found.got, found.expected) == (got[1, 2, 5].item(), expected[1, 2, 5].item())
    assert "n 1, channel 2, position 5 (phase 1): got" in str(found)


def test_a_pattern_with_holes_tells_how_much_of_it_is_wrong():
    got, expected = spoilt((ALL, ALL, slice(1, None, 3)))
    some = torch.zeros(SHAPE[2], dtype=torch.bool)
    some[[1, 10, SHAPE[2] - 3]] = True
    got[..., ~some] = expected[..., ~some].float()
    found = mismatch(got, expected, PROBLEM)
    assert re.fullmatch(r"\d\d% of phase 0", found.pattern)


def test_all_is_said_of_all_alone():
    p = Problem(1, 1, 1, 1, 1000)
    expected = torch.ones(1, 1, 1000)
    got = torch.zeros(1, 1, 1000)
    got[0, 0, 500] = 1
    assert mismatch(got, expected, p).pattern == "99% of the outputs"


def test_channels_of_a_single_group_are_not_told_by_group():
    p = Problem(1, 2, 32, 1, 4)
    got, expected = torch.zeros(1, 32, 4), torch.zeros(1, 32, 4)
    got[0, 3::4] = 1
    assert mismatch(got, expected, p).pattern == "all of channels 3, 7, ... 31"
    got[0, 9] = 1
    assert mismatch(got, expected, p).pattern == "all of 9 of 32 channels"
    got[0, 8:] = 0
    assert mismatch(got, expected, p).pattern == "all of channels 3, 7"


@pytest.mark.parametrize(
    ("channels", "said"),
    [([1, 2, 4, 7, 8, 9], "channels 1, 2, 4, 7, 8, 9"), ([1, 2, 4, 7, 8, 9, 12], "7 of 32 channels")],
)
def test_six_places_are_listed_and_seven_counted(channels, said):
    p = Problem(1, 2, 32, 1, 4)
    got, expected = torch.zeros(1, 32, 4), torch.zeros(1, 32, 4)
    got[0, channels] = 1
    assert mismatch(got, expected, p).pattern == f"all of {said}"


def test_nan_is_wrong_and_rounding_is_not():
    got, expected = spoilt((0, 0, 0), by=math.nan)
    assert math.isnan(mismatch(got, expected, PROBLEM).got)
    assert mismatch(*spoilt((ALL, ALL, ALL), by=1e-6), PROBLEM) is None
    tf32 = spoilt((ALL, ALL, ALL), by=3e-4)
    assert mismatch(*tf32, PROBLEM).wrong == tf32[0].numel()
    assert mismatch(*tf32, PROBLEM, tolerance=1e-3) is None
    assert mismatch(expected.bfloat16(), expected, PROBLEM) is None


def test_another_shape_is_refused():
    got, expected = spoilt((0, 0, 0))
    for one, other in ((got[:1], expected), (got, expected[..., 1:])):
        with pytest.raises(ValueError, match="must have the shape"):
            mismatch(one, other, PROBLEM)


def test_without_outputs_nothing_is_wrong():
    empty = torch.empty(0, 3, 12)
    assert mismatch(empty, empty, Problem(0, 2, 3, 1, 12)) is None
