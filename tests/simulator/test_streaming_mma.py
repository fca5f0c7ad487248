"""Steps on tensor cores in the CUDA simulator, with the meanings of warps.py: outputs, states, masks, seams of tiles.

Needs NUMBA_ENABLE_CUDASIM=1 from the start of the process (`make test`).
"""

from dataclasses import replace

import pytest
import torch
from numba.cuda.simulator import kernelapi

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.streaming import (
    mma_epilogue,
    mma_kernel,
    mma_load,
    mma_mainloop,
    mma_tile,
    plan,
    tickets,
)
from numba_tconv.runtime.layout import Layout
from tests.gpu.sanitized_streaming import PRODUCT, TF32_EPS, step_cases
from tests.streams import stream
from tests.thorough import thorough

from .warps import played


@pytest.fixture(autouse=True)
def warps(monkeypatch):
    played((mma_kernel, mma_load, mma_mainloop, mma_epilogue), monkeypatch, kernelapi.FakeCUDAModule)
    yield
    mma_kernel.make_kernel.cache_clear()


CASES = [case for case in step_cases() if case.kernel == PRODUCT]
OF_ALL = {(torch.float32, 1), (torch.float16, 0), (torch.bfloat16, 1), (torch.bfloat16, 2)}
FIRST, *OTHERS = (case for case in CASES if (case.dtype, case.config) in OF_ALL)
USUAL = OTHERS[::2] + OTHERS[-1:]


@pytest.mark.parametrize("case", thorough(CASES, always=USUAL), ids=str)
def test_what_the_sanitizer_plays(case):
    assert case.wrong("cpu") is None


def test_more_slots_than_threads():
    s = stream(Problem(1, 8, 4, 4, 1, 2), 40, 1)
    p = replace(s.layer, batch=40, length=1)
    config = replace(mma_tile.choose(p, s.x.dtype), columns=64, channels=1, warps=1, slices=1)
    mask = torch.arange(40) == 39
    state, y = torch.zeros(40, 8, 1), torch.full((40, 4, 2), torch.nan)
    laid_out = (Layout.of(s.x), Layout.of(s.weight), None)
    plan.prepare(*laid_out, True, p, config)(s.x, state, s.weight, None, mask, y)
    torch.testing.assert_close(y[39], s.offline()[39], rtol=TF32_EPS, atol=8 * TF32_EPS)
    assert not y[:39].any()
    assert torch.equal(state[39], s.x[39])
    assert not state[:39].any()


@pytest.mark.parametrize("channels", [4, 8, 12])
def test_vectors_behind_the_last_output_channel_are_zeros(channels):
    """The last block has one output channel of four, a quarter of a row of weights; or five of eight or twelve."""
    s = stream(Problem(1, 8, 5, 8, 1, 4), 8, 1)
    p = replace(s.layer, batch=8, length=1)
    config = replace(mma_tile.choose(p, s.x.dtype), columns=8, channels=channels, warps=1, slices=1)
    y = torch.full((8, 5, 4), torch.nan)
    plan.prepare(Layout.of(s.x), Layout.of(s.weight), None, False, p, config)(s.x, s.state(), s.weight, None, None, y)
    torch.testing.assert_close(y, s.offline(), rtol=TF32_EPS, atol=8 * TF32_EPS)


def test_the_last_readers_of_a_state_leave_no_ticket(monkeypatch):
    taken, take = [], tickets.take
    monkeypatch.setattr(tickets, "take", lambda *sizes: taken.append(take(*sizes)) or taken[-1])
    assert FIRST.wrong("cpu") is None
    assert len(taken) == 2  # steps
    assert len(taken[0]) > 2  # a ticket for each stage and tile of slots
    assert not any(counters.any() for counters in taken)


@pytest.mark.parametrize("stages", [3, 4])
def test_states_of_more_steps_than_stages(stages, monkeypatch):
    """Each of two readers of a state draws a ticket a step; from four stages on it reads it a step later."""
    taken, take = [], tickets.take
    monkeypatch.setattr(tickets, "take", lambda *sizes: taken.append(take(*sizes)) or taken[-1])
    s = stream(Problem(1, 40, 2, 4, 1, 2), 2, 1)
    p = replace(s.layer, batch=2, length=1)
    config = replace(mma_tile.tiny(p, s.x.dtype)[1], stages=stages)
    assert -(-p.in_channels // config.stage_channels) > stages
    state, y = s.state(), torch.full((2, 2, 2), torch.nan)
    plan.prepare(Layout.of(s.x), Layout.of(s.weight), None, False, p, config)(s.x, state, s.weight, None, None, y)
    torch.testing.assert_close(y, s.offline(), rtol=TF32_EPS, atol=8 * TF32_EPS)
    assert torch.equal(state, s.x)
    assert not taken[0].any()
