"""When grad_input_tile waits for its weights, in the CUDA simulator."""

import threading
from dataclasses import replace

import pytest
import torch

from numba_tconv.gradients.input.split_k import split
from numba_tconv.gradients.input.tile import kernel as grad_input_tile
from numba_tconv.selection.gradient import GRADIENTS
from tests.gradient_parity import computed_gradient, gradient_operands, torchs_gradient
from tests.parity import SMALL

F32 = torch.float32


@pytest.fixture
def events(monkeypatch):
    """Each thread's waits for weights, and copies of them, by block."""
    found, cp_async = {}, grad_input_tile.cp_async

    def note(event):
        found.setdefault(threading.get_ident(), []).append(event)

    def noting_copies(elements):
        copy = cp_async(elements)

        def copy_weights(*arguments):
            note("copy")
            copy(*arguments)

        return copy_weights

    monkeypatch.setattr(grad_input_tile, "cp_async", noting_copies)
    monkeypatch.setattr(grad_input_tile, "griddepcontrol_wait", lambda: note("wait"))
    grad_input_tile.make_kernel.cache_clear()
    yield found
    grad_input_tile.make_kernel.cache_clear()


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("reason", ["K = 2s, the usual decoder layer", "gcd(stride, dilation) = 2, three rows"])
def test_each_thread_waits_before_it_copies_weights(reason, early, events):
    problem, rung = SMALL[reason], GRADIENTS["grad_input_tile"]
    g, x, w = gradient_operands(problem, F32)
    for tiny in rung.tiny_configs(problem, F32):
        config, part = replace(tiny, early_launch=early), split(problem, tiny.splits)
        events.clear()
        result = computed_gradient(rung, g, x, w, problem, config)
        assert torch.allclose(result, torchs_gradient(rung.of, g, x, w, problem), atol=1e-4), config
        every = [event for of_thread in events.values() for event in of_thread]
        assert "copy" in every
        assert {of_thread[0] for of_thread in events.values()} == {"wait" if early else "copy"}
        blocks = config.row_tiles(part) * config.column_tiles(part) * part.groups
        assert early == (every.count("wait") >= blocks * config.threads)
