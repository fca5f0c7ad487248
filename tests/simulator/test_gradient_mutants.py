"""Tests of the suite itself: a mistake in a gradient's kernel must fail the parity check.

A mistake is a problem that states a wrong offset, operands in a wrong order, or a change of the kernel's text.
"""

import inspect
from dataclasses import replace

import pytest
import torch

from numba_tconv.gradients import bias as grad_bias
from numba_tconv.gradients import sum as grad_sum
from numba_tconv.gradients import window as grad_window
from numba_tconv.gradients.input.tile import kernel as grad_input_tile
from numba_tconv.gradients.input.tile import producer as grad_input_producer
from numba_tconv.gradients.weight.split import epilogue as grad_weight_epilogue
from numba_tconv.gradients.weight.split import kernel as grad_weight_split
from numba_tconv.gradients.weight.split import producer as grad_weight_producer
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime import device
from numba_tconv.selection.gradient import GRADIENTS
from tests.gradient_parity import ON_CUDA_CORES, gradient_answers, gradient_operands, inputs_of, poisoned_gradient
from tests.parity import SMALL, misstated, verdict

pytestmark = pytest.mark.skipif(not SIMULATOR, reason="needs NUMBA_ENABLE_CUDASIM=1")

# The rows that the mistakes are looked for in.
ROWS = ["output_padding and padding", "groups, unequal channels", "positions past one tile, strided"]


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    monkeypatch.setattr(device, "of", lambda index: replace(device.H200, multiprocessors=2))


def caught(rung, spoil=lambda operands, problem: (operands, problem)):
    """The rows whose verdict is bad, where ``spoil`` changes what the kernel is given."""
    bad = []
    for reason in ROWS:
        problem = SMALL[reason]
        g, x, w = gradient_operands(problem, torch.float32)
        wrong_operands, wrong_problem = spoil(inputs_of(rung.of, g, x, w), problem)
        result = poisoned_gradient(rung.of, problem, torch.float32)
        rung.run(*wrong_operands, result, wrong_problem, rung.tiny_configs(problem, torch.float32)[0])
        if verdict(result, *gradient_answers(rung.of, g, x, w, problem)):
            bad.append(reason)
    return bad


SPOILT = {
    "padding subtracted twice": lambda o, p: (o, misstated(p, padding=2 * p.padding)),
    "output_padding added to the index": lambda o, p: (o, misstated(p, padding=p.padding + p.output_padding)),
    "second operand reversed": lambda o, p: ((o[0], o[1].flip(2)), p),
    "channels of the groups exchanged": lambda o, p: ((o[0].roll(p.out_channels_per_group, 1), *o[1:]), p),
}


@pytest.mark.parametrize("rung", [r for r in ON_CUDA_CORES.values() if r.of != "grad_bias"], ids=lambda rung: rung.name)
@pytest.mark.parametrize("mistake", SPOILT)
def test_a_wrong_statement_is_caught(rung, mistake):
    assert caught(rung, SPOILT[mistake])


# The module whose text is changed, the text, what it becomes, and the rung that must then fail.
MISTAKES = {
    "the last output left out": (
        grad_window,
        "o < columns.out_length",
        "o < columns.out_length - 1",
        "grad_input_tile",
    ),
    "the phase left out of the offset": (
        grad_window,
        "(columns.tap + a) * dilation",
        "columns.tap * dilation",
        "grad_weight_split",
    ),
    "a partial sum lost": (grad_input_tile, "vector, s >= partial)", "vector, s > partial)", "grad_input_tile"),
    "all channels in one place": (grad_window, "slot * hop + turn * channel_hop", "slot * hop", "grad_weight_split"),
    "columns fetched twice": (grad_window, "column + slot * hop, a)", "column, a)", "grad_input_tile"),
    "the table kept for the next phases": (grad_input_tile, "if channel == 0:", "if s < 0:", "grad_input_tile"),
    "the other buffer multiplied": (
        grad_input_tile,
        "load_slot, multiply_slot = int32(0), int32(0)",
        "load_slot, multiply_slot = int32(0), int32(stage)",
        "grad_input_tile",
    ),
    "the last position left out": (
        grad_weight_producer,
        "i < columns.length",
        "i < columns.length - 1",
        "grad_weight_split",
    ),
    "a split without its end": (
        grad_weight_split,
        "while s < total",
        "while s < total - 1",
        "grad_weight_split",
    ),
    "a slice not added": (grad_weight_epilogue, "while z < slices", "while z < slices - 1", "grad_weight_split"),
    "taps of a row as neighbours": (grad_weight_epilogue, "a + b * rows", "a + b", "grad_weight_split"),
    "the first split alone": (grad_sum, "first + z < splits", "first + z < 1", "grad_bias"),
    "only what was loaded last": (grad_bias, "total += float64(part)", "total = float64(part)", "grad_bias"),
    "a quarter instead of a half added": (grad_bias, "threads >> (h + 1)", "threads >> (h + 2)", "grad_bias"),
    "splits that overlap": (
        grad_bias,
        "(split + 1) * sizes.split_length",
        "(split + 2) * sizes.split_length",
        "grad_bias",
    ),
}
KERNELS = (grad_bias, grad_input_tile, grad_sum, grad_weight_split)
USERS = (*KERNELS, grad_input_producer, grad_weight_producer)  # modules that use what may be mistaken


def forget_kernels():
    for module in KERNELS:
        module.make_kernel.cache_clear()
        module._prepared.cache_clear()


@pytest.fixture
def mistaken(monkeypatch):
    """A function that makes all modules use ``module`` with a piece of its text replaced."""

    def install(module, old, new):
        source = inspect.getsource(module)
        assert old in source
        changed = {"__name__": module.__name__, "__package__": module.__package__}
        exec(compile(source.replace(old, new), module.__file__, "exec"), changed)
        factories = {id(value): name for name, value in vars(module).items() if name.startswith("make_")}
        for user in USERS:
            for name, value in list(vars(user).items()):
                if id(value) in factories:
                    monkeypatch.setattr(user, name, changed[factories[id(value)]])

    forget_kernels()
    yield install
    monkeypatch.undo()
    forget_kernels()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_text_is_caught(mistaken, mistake):
    module, old, new, name = MISTAKES[mistake]
    mistaken(module, old, new)
    assert caught(GRADIENTS[name])


@pytest.mark.parametrize("rung", ON_CUDA_CORES.values(), ids=ON_CUDA_CORES)
def test_without_a_mistake_every_row_passes(rung):
    assert caught(rung) == []
