"""The KernelBench entries: constructors, weights and sizes of the benchmark, and on a GPU its rules."""

import inspect

import pytest
import torch

from numba_tconv import kernelbench
from numba_tconv.accuracy import Error
from numba_tconv.kernelbench import CORRECTNESS_TRIALS, ENTRIES, Verdict

CONSTRUCTORS = {
    64: "in_channels out_channels kernel_size stride=1 padding=0 output_padding=0 groups=1 bias=False",
    74: "in_channels out_channels kernel_size stride=1 padding=0 dilation=1 bias=False",
    79: "in_channels out_channels kernel_size stride=1 padding=0 dilation=1 bias=False",
}


@pytest.mark.parametrize("number", ENTRIES)
def test_constructors_are_the_benchmarks(number):
    parameters = inspect.signature(ENTRIES[number].model).parameters.values()
    spelled = (p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters)
    assert " ".join(spelled) == CONSTRUCTORS[number]


@pytest.mark.parametrize("number", ENTRIES)
def test_the_same_seed_gives_the_same_layer(number):
    torch.manual_seed(7)
    theirs = kernelbench.torch_model(number)
    torch.manual_seed(7)
    ours = ENTRIES[number].model(*ENTRIES[number].arguments)
    assert list(ours.state_dict()) == ["conv1d_transpose.weight"]
    assert torch.equal(ours.conv1d_transpose.weight, theirs.weight)
    x = torch.rand(2, theirs.in_channels, 50)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("number", ENTRIES)
def test_all_arguments_reach_the_layer(number):
    others = dict(stride=3, padding=2, bias=True) | (
        dict(output_padding=1, groups=2) if number == 64 else dict(dilation=4)
    )
    layer = ENTRIES[number].model(4, 6, 5, **others).conv1d_transpose
    for name, value in others.items():
        assert (layer.bias is not None if name == "bias" else getattr(layer, name)) in (value, (value,)), name


def verdict(passed, error, torch_error):
    return Verdict(64, passed, True, Error(error, error), Error(torch_error, torch_error), 1.0, 2.0)


def test_a_failed_comparison_is_laid_to_the_side_that_is_less_exact():
    assert verdict(CORRECTNESS_TRIALS, 1e-7, 3e-4).accepted
    failed = verdict(0, 1e-7, 3e-4)
    assert not failed.accepted
    assert failed.torch_is_the_inexact_side
    assert not verdict(0, 3e-4, 1e-7).torch_is_the_inexact_side
    assert not verdict(0, float("nan"), 1e-7).torch_is_the_inexact_side


def test_nan_in_any_trial_is_the_largest_error():
    nan = float("nan")
    found = [{"ours": Error(1.0, 2.0)}, {"ours": Error(nan, nan)}, {"ours": Error(3.0, 1.0)}]
    assert str(kernelbench._largest(found, "ours")) == str(Error(nan, nan))
    assert kernelbench._largest(found[::2], "ours") == Error(3.0, 2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("number", ENTRIES)
def test_entries_at_full_size(number):
    verdict = kernelbench.run(number)
    assert verdict.same_shape
    assert verdict.accepted or verdict.torch_is_the_inexact_side
    assert verdict.error.norm <= max(2 * verdict.torch_error.norm, 1e-7)
