"""Tests of the suite itself: with a mistake in its formula, each kernel fails the parity check.

A mistake is a problem that states a wrong offset, or weights in a wrong order. tests/test_mutants.py has those that
only a kernel's text can make.
"""

import pytest
import torch

from numba_tconv.selection.registry import RUNGS
from tests.parity import SMALL, answers, computed, misstated, operands, verdict

# The rows that the mistakes are looked for in; test_mutants.py looks in all.
ROWS = ["output_padding and padding", "groups, unequal channels"]

CUDA_CORES = [r for r in RUNGS.values() if all(r.supports(SMALL[row], torch.float32, "ieee") is None for row in ROWS)]


MISTAKES = {
    "none": lambda w, p: (w, p),
    "taps flipped": lambda w, p: (w.flip(2), p),
    "weight indexed (out, in, k)": lambda w, p: (w.reshape(w.shape[1], w.shape[0], -1).transpose(0, 1), p),
    "padding subtracted twice": lambda w, p: (w, misstated(p, padding=2 * p.padding)),
    "output_padding added to the index": lambda w, p: (w, misstated(p, padding=p.padding + p.output_padding)),
}


@pytest.mark.parametrize("rung", CUDA_CORES, ids=lambda rung: rung.name)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(rung, mistake):
    caught = []
    for reason in ROWS:
        problem = SMALL[reason]
        x, w, bias = operands(problem, torch.float32)
        wrong_w, wrong_problem = MISTAKES[mistake](w, problem)
        config = rung.tiny_configs(problem, torch.float32)[0]
        y = computed(rung, x, wrong_w, bias, wrong_problem, config)
        if verdict(y, *answers(x, w, bias, problem)):
            caught.append(reason)
    assert bool(caught) == (mistake != "none"), caught
