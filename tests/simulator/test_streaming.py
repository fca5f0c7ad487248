"""Steps in the CUDA simulator: the bits of k2_polyphase on the whole signal, whatever the chunks, tiles and masks."""

from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.streaming import depthwise, plan, tickets, tile
from numba_tconv.runtime.layout import Layout
from numba_tconv.selection.registry import RUNGS
from numba_tconv.torch_api import operators
from tests.gpu.sanitized_streaming import PRODUCT, step_cases
from tests.parity import DTYPES
from tests.streams import LAYERS, chunked, stream
from tests.thorough import thorough

layers = pytest.mark.parametrize("reason", thorough(LAYERS, always=[*LAYERS][::2]))


def by_gather(x, weight, bias, *parameters):
    """k2_polyphase on the whole signal; ``parameters`` from stride on, in torch's order."""
    p = operators.check(x, weight, bias, *parameters)
    y = x.new_empty(p.out_shape)
    RUNGS["k2_polyphase"].run(x, weight, bias, y, p)
    return y


def step(x, state, s, mask=None, config=0):
    """A step by ``config``, or by the tiny configuration of this number."""
    p = replace(s.layer, batch=x.shape[0], length=x.shape[2])
    y = torch.full((p.batch, p.out_channels, p.length * p.stride), torch.nan).to(x.dtype)
    laid_out = (None if t is None else Layout.of(t) for t in (x, s.weight, s.bias))
    config = tile.tiny(p, x.dtype)[config] if isinstance(config, int) else config
    launch = plan.prepare(*laid_out, mask is not None, p, config)
    launch(x, state, s.weight, s.bias, mask, y)
    return y


@layers
@pytest.mark.parametrize("config", range(3))
def test_steps_are_the_whole_signal_bit_for_bit(reason, config):
    s = stream(LAYERS[reason], 3, 6)
    state = s.state()
    y = torch.cat([step(chunk, state, s, config=config) for chunk in chunked(s.x, (1, 3, 2))], dim=2)
    assert torch.equal(y, s.offline(by_gather))
    assert torch.equal(state, torch.cat([s.state(), s.x], dim=2)[:, :, 6:])


@pytest.mark.parametrize("reason", ["depthwise", "depthwise with dilation"])
def test_a_thread_a_channel_gives_the_same_bits(reason):
    s = stream(LAYERS[reason], 3, 10)
    state, outputs = s.state(), []
    for x in chunked(s.x, (1, 4, 3, 2)):
        p = replace(s.layer, batch=3, length=x.shape[2])
        outputs.append(step(x, state, s, config=depthwise.choose(p, x.dtype)))
    assert torch.equal(torch.cat(outputs, dim=2), s.offline(by_gather))
    assert torch.equal(state, s.x[:, :, 10 - s.kept :])


def test_the_last_block_has_fewer_output_channels():
    s = stream(LAYERS["channels of two parts"], 1, 2)
    config = replace(tile.tiny(replace(s.layer, length=2), s.x.dtype)[1], channels=2)
    assert s.layer.out_channels == 3
    assert torch.equal(step(s.x, s.state(), s, config=config), s.offline(by_gather))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype):
    s = stream(LAYERS["channels of two parts"], 2, 4, dtype)
    state = s.state()
    y = torch.cat([step(chunk, state, s) for chunk in chunked(s.x, (3, 1))], dim=2)
    assert torch.equal(y, s.offline(by_gather))


@pytest.mark.parametrize("config", range(3))
@pytest.mark.parametrize("resting", [(), (0,), (1, 2), (0, 1, 2)], ids=str)
def test_a_slot_that_rests_keeps_its_state_and_puts_out_zeros(resting, config):
    s = stream(LAYERS["K = 2s, the usual decoder layer"], 3, 3)
    mask = torch.tensor([n not in resting for n in range(3)])
    state = torch.randn(s.state().shape)
    before, all_state = state.clone(), state.clone()
    x = s.x.clone()
    x[~mask] = torch.nan  # reaches nobody
    everything = step(s.x, all_state, s, config=config)
    y = step(x, state, s, mask, config)
    assert torch.equal(y[mask], everything[mask])
    assert torch.equal(state[mask], all_state[mask])
    assert not y[~mask].any()
    assert torch.equal(state[~mask], before[~mask])


@pytest.mark.parametrize("layout", ["transposed", "every second"])
def test_inputs_and_weights_of_any_strides(layout):
    s = stream(LAYERS["groups"], 2, 4)
    expected = s.offline(by_gather)
    if layout == "transposed":
        s.x = s.x.transpose(1, 2).contiguous().transpose(1, 2)
        s.weight = s.weight.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    else:
        s.x = s.x.repeat_interleave(2, 2)[:, :, ::2]
    state = s.state()
    assert torch.equal(torch.cat([step(chunk, state, s) for chunk in chunked(s.x, (1, 3))], dim=2), expected)
    assert torch.equal(state, s.x[:, :, 3:])


@pytest.mark.parametrize("layout", ["every second", "expanded"])
@pytest.mark.parametrize("reason", ["groups", "depthwise"])
def test_a_bias_of_any_stride(reason, layout):
    s = stream(LAYERS[reason], 2, 3)
    s.bias = s.bias[:1].expand(s.bias.shape) if layout == "expanded" else s.bias.repeat_interleave(2)[::2]
    p = replace(s.layer, batch=2, length=3)
    for config in (0, depthwise.choose(p, s.x.dtype)) if reason == "depthwise" else (0, 1):
        assert torch.equal(step(s.x, s.state(), s, config=config), s.offline(by_gather))


@pytest.mark.parametrize(
    "layer",
    [LAYERS["K = 2s, the usual decoder layer"], Problem(1, 2, 3, 34, 1, 17)],
    ids=["blocks of one warp", "of two"],
)
def test_the_last_reader_of_a_state_leaves_no_ticket(layer, monkeypatch):
    """One thread of a block draws one: three blocks of 64 threads would end as they began."""
    taken, take = [], tickets.take
    monkeypatch.setattr(tickets, "take", lambda *sizes: taken.append(take(*sizes)) or taken[-1])
    s = stream(layer, 3, 2)
    state, slot_tiles = s.state(), 2
    y = torch.cat([step(chunk, state, s, config=1) for chunk in chunked(s.x, (1, 1))], dim=2)
    assert torch.equal(y, s.offline(by_gather))
    assert torch.equal(state, s.x[:, :, 2 - s.kept :])
    assert [len(one) for one in taken] == [slot_tiles] * 2
    assert not any(one.any() for one in taken)


@pytest.mark.parametrize("case", [case for case in step_cases() if case.kernel != PRODUCT], ids=str)
def test_what_the_sanitizer_plays(case):
    assert case.wrong("cpu") is None
