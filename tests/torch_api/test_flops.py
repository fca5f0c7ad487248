"""torch's flop counter counts the same for our operators as for torch's."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from numba_tconv import convert
from numba_tconv.torch_api import alias_free_operators
from tests.around import PROBLEM, call, tensors_of
from tests.parity import SMALL, parameters

pytest_plugins = ["tests.around"]

PROBLEMS = [PROBLEM, SMALL["output_padding and padding"], SMALL["one output sample left"]]


def counts(function, tensors, wanted):
    """Counts of the forward pass, and of the gradients for the tensors ``wanted``."""
    tensors = [tensor.requires_grad_(index in wanted) for index, tensor in enumerate(tensors)]
    with FlopCounterMode(display=False) as forward:
        y = function(*tensors)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(y.sum(), [tensors[index] for index in wanted])
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.usefixtures("made_ready")
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1), (0, 1, 2)], ids=str)
def test_both_passes_count_as_torchs(problem, wanted):
    functions = call, torch.conv_transpose1d
    ours, theirs = (
        counts(functools.partial(function, **keywords), tensors_of(problem), wanted)
        for function, keywords in zip(functions, (dict(problem=problem), parameters(problem)), strict=True)
    )
    assert ours == theirs
    assert all(ours)


@pytest.mark.usefixtures("made_ready")
def test_a_converted_model_counts_by_its_layers():
    def model():
        return nn.Sequential(nn.ConvTranspose1d(4, 6, 4, stride=2), nn.ReLU(), nn.ConvTranspose1d(6, 2, 3, groups=2))

    def counted(model):
        with FlopCounterMode(display=False) as counter:
            model(torch.randn(2, 4, 9)).sum().backward()
        return {module: sum(by.values()) for module, by in counter.get_flop_counts().items()}

    converted = model()
    convert(converted)
    assert counted(converted) == counted(model())


def test_an_activations_filters():
    """Two for each product: 12 taps a sample of x, 8 an output; the gradients make up-samples again."""
    x, alpha, up, down = (torch.empty(shape, device="meta") for shape in ((2, 3, 50), 3, 12, 8))
    tensors, choices = (x, up, down, alpha, None), (2, 1, True, "snake")
    with FlopCounterMode(display=False) as forward:
        y = alias_free_operators.alias_free_activation(*tensors, *choices)
    assert forward.get_total_flops() == 2 * 6 * (50 * 12 + 100 * 8)
    with FlopCounterMode(display=False) as backward:
        alias_free_operators.alias_free_gradients(y, *tensors, *choices, True)
    assert backward.get_total_flops() == 2 * 6 * (2 * 50 * 12 + 100 * 8)
