"""Kernels that were prepared for a layout compute with the weights as they are at each call, in the CUDA simulator."""

import pytest
import torch

from numba_tconv.runtime.layout import Layout
from numba_tconv.selection.registry import RUNGS
from tests.gradient_parity import ON_CUDA_CORES, gradient_operands, poisoned_gradient, references_gradient
from tests.parity import SMALL, operands, poisoned, scatter

PROBLEM = SMALL["groups, unequal channels"]
DTYPE = torch.float32
CALLS = 2


def data(w):
    w.data.mul_(2)


def foreign_memory(w):
    w.numpy()[...] = torch.randn(w.shape).numpy()


def foreach(w):
    torch._foreach_lerp_([w.data], [torch.randn_like(w)], 0.5)


WRITES = (data, foreign_memory, foreach)


def follows(prepared, others, w, make_result, reference):
    """``prepared`` has the result of the weights as they are, after each write that torch does not count."""
    version = w._version
    for write in WRITES:
        for _ in range(CALLS):
            result = make_result()
            prepared(*others[:1], w, *others[1:], result)
        torch.testing.assert_close(result.double(), reference(), rtol=0, atol=1e-4)
        write(w)
        result = make_result()
        prepared(*others[:1], w, *others[1:], result)
        torch.testing.assert_close(result.double(), reference(), rtol=0, atol=1e-4)
    assert w._version == version


def simulated(rungs):
    return {name: rung for name, rung in rungs.items() if rung.supports(PROBLEM, DTYPE, "ieee") is None}


OUTPUTS = simulated(RUNGS)
GRAD_INPUTS = simulated({name: rung for name, rung in ON_CUDA_CORES.items() if rung.of == "grad_input"})


@pytest.mark.parametrize("rung", OUTPUTS.values(), ids=OUTPUTS)
def test_outputs(rung):
    x, w, bias = operands(PROBLEM, DTYPE)
    result = poisoned(PROBLEM, DTYPE)
    config = rung.tiny_configs(PROBLEM, DTYPE)[0]
    prepared = rung.prepare(*map(Layout.of, (x, w, bias, result)), PROBLEM, config)
    follows(prepared, (x, bias), w, lambda: poisoned(PROBLEM, DTYPE), lambda: scatter(x, w, bias, PROBLEM))


@pytest.mark.parametrize("rung", GRAD_INPUTS.values(), ids=GRAD_INPUTS)
def test_gradients_for_the_input(rung):
    g, x, w = gradient_operands(PROBLEM, DTYPE)
    result = poisoned_gradient("grad_input", PROBLEM, DTYPE)
    config = rung.tiny_configs(PROBLEM, DTYPE)[0]
    prepared = rung.prepare(*map(Layout.of, (g, w, result)), PROBLEM, config)
    follows(
        *(prepared, (g,), w, lambda: poisoned_gradient("grad_input", PROBLEM, DTYPE)),
        lambda: references_gradient("grad_input", g, x, w, PROBLEM),
    )
