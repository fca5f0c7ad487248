"""Tests of the suite itself: a mistake in a gradient's kernel must fail the parity check.

A mistake is a problem that states a wrong offset, or operands in a wrong order.
"""

from dataclasses import replace

import pytest
import torch

from numba_tconv.runtime import device
from tests.gradient_parity import ON_CUDA_CORES, gradient_answers, gradient_operands, inputs_of, poisoned_gradient
from tests.parity import SMALL, misstated, verdict

# The rows that the mistakes are looked for in.
ROWS = ["output_padding and padding", "groups, unequal channels", "positions past one tile, strided"]


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    monkeypatch.setattr(device, "of", lambda index: replace(device.H200, multiprocessors=2))


SPOILT = {
    "none": lambda o, p: (o, p),
    "padding subtracted twice": lambda o, p: (o, misstated(p, padding=2 * p.padding)),
    "output_padding added to the index": lambda o, p: (o, misstated(p, padding=p.padding + p.output_padding)),
    "second operand reversed": lambda o, p: ((o[0], o[1].flip(2)), p),
    "channels of the groups exchanged": lambda o, p: ((o[0].roll(p.out_channels_per_group, 1), *o[1:]), p),
}


@pytest.mark.parametrize("rung", [r for r in ON_CUDA_CORES.values() if r.of != "grad_bias"], ids=lambda rung: rung.name)
@pytest.mark.parametrize("mistake", SPOILT)
def test_a_mistake_is_caught(rung, mistake):
    caught = []
    for reason in ROWS:
        problem = SMALL[reason]
        g, x, w = gradient_operands(problem, torch.float32)
        wrong_operands, wrong_problem = SPOILT[mistake](inputs_of(rung.of, g, x, w), problem)
        result = poisoned_gradient(rung.of, problem, torch.float32)
        rung.run(*wrong_operands, result, wrong_problem, rung.tiny_configs(problem, torch.float32)[0])
        if verdict(result, *gradient_answers(rung.of, g, x, w, problem)):
            caught.append(reason)
    assert bool(caught) == (mistake != "none"), caught
