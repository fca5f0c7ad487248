"""Every rung and gradient in the simulator on views of any strides, which they leave alone, between fences."""

from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.runtime import device
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS
from tests.exact import RANGES, exact_operands
from tests.fences import VIEWS, fenced
from tests.gradient_parity import gradient_answers, gradient_operands, inputs_of, poisoned_gradient
from tests.parity import SMALL, answers, computed, operands, poisoned, terms, verdict
from tests.thorough import thorough

views = pytest.mark.parametrize("view", thorough(VIEWS, always=[*VIEWS][::2]))
rungs = pytest.mark.parametrize("rung", RUNGS.values(), ids=RUNGS)
PROBLEM = SMALL["groups, unequal channels"]


def able(rung, dtype):
    if reason := rung.supports(PROBLEM, dtype, PRECISIONS[dtype][0]):
        pytest.skip(f"{rung.name}: {reason}")


def chosen(rung, view):
    """A configuration, and a shift: with each view others."""
    number, configs = list(VIEWS).index(view), rung.tiny_configs(PROBLEM, torch.float32)
    return configs[number % len(configs)], number // len(configs) % 2


@rungs
@views
def test_rungs(rung, view):
    able(rung, torch.float32)
    x, w, bias = operands(PROBLEM, torch.float32)
    x, w = VIEWS[view](x), VIEWS[view](w)
    config, shift = chosen(rung, view)
    y = fenced(
        lambda *tensors: rung.run(*tensors, PROBLEM, config), (x, w, bias), poisoned(PROBLEM, torch.float32), shift
    )
    assert verdict(y, *answers(x, w, bias, PROBLEM), terms(PROBLEM)) is None, config


@pytest.mark.parametrize("rung", GRADIENTS.values(), ids=GRADIENTS)
@views
def test_gradients(rung, view, monkeypatch):
    able(rung, torch.float32)
    monkeypatch.setattr(device, "of", lambda index: replace(device.H200, multiprocessors=2))
    g, x, w = (VIEWS[view](tensor) for tensor in gradient_operands(PROBLEM, torch.float32))
    config, shift = chosen(rung, view)
    result = fenced(
        lambda *tensors: rung.run(*tensors, PROBLEM, config),
        *(inputs_of(rung.of, g, x, w), poisoned_gradient(rung.of, PROBLEM, torch.float32), shift),
    )
    assert verdict(result, *gradient_answers(rung.of, g, x, w, PROBLEM)) is None, config


@rungs
@pytest.mark.parametrize("name", RANGES)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_the_ends_of_a_range(rung, name):
    able(rung, RANGES[name][0])
    x, w, bias, exact = exact_operands(PROBLEM, name)
    config = rung.tiny_configs(PROBLEM, x.dtype)[0]
    assert torch.equal(computed(rung, x, w, bias, PROBLEM, config), exact)
