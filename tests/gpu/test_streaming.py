"""Steps on a GPU: the bits of the whole signal, masks, resets, graphs, torch.compile, streams, bad calls."""

from dataclasses import replace

import pytest
import torch

import numba_tconv
from numba_tconv import streaming
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.streaming import depthwise, mma_tile, plan, tickets, tile
from numba_tconv.lab.measure import fuzz_steps
from numba_tconv.runtime.layout import Layout
from tests.streams import LAYERS, chunked, stream

from .common import arithmetic

pytestmark = pytest.mark.gpu

# Reason and layer: sizes too large for the simulator.
LARGE = {
    "Mimi's upsampling": Problem(1, 512, 512, 4, 1, 2, groups=512),
    "Mimi's first layer": Problem(1, 1024, 512, 16, 1, 8, bias=True),
    "Mimi's last layer": Problem(1, 128, 64, 8, 1, 4, bias=True),
    "dilated, stride 1": Problem(1, 32, 64, 5, 1, 1, dilation=3, bias=True),
    "channels that divide nothing": Problem(1, 333, 77, 7, 1, 3, dilation=2, bias=True),
    "more frames than shared memory holds": Problem(1, 16, 16, 9, 1, 1, dilation=700),
}
ALL = LARGE | LAYERS
layers = pytest.mark.parametrize("reason", ALL)
USUAL = "Mimi's last layer"


def offline(s, precision=None, variant=None):
    def convolve(*arguments):
        return numba_tconv.conv_transpose1d(*arguments, precision=precision, variant=variant)

    return s.offline(convolve)


def steps(s, chunks, state, mask=None, precision=None):
    operands = s.weight, s.bias, *s.parameters, mask
    return torch.cat(
        [streaming.step(chunk, state, *operands, precision=precision) for chunk in chunked(s.x, chunks)], 2
    )


@layers
@pytest.mark.parametrize("chunks", [(1,) * 5, (2, 3), (5,)], ids=str)
@pytest.mark.parametrize("slots", [1, 5, 33])
def test_ieee_steps_are_the_whole_signal_bit_for_bit(reason, chunks, slots):
    s = stream(ALL[reason], slots, 5, device="cuda")
    state = s.state()
    y = steps(s, chunks, state, precision="ieee")
    assert torch.equal(y, offline(s, "ieee", "k2_polyphase"))
    assert torch.equal(state, torch.cat([s.state(), s.x], dim=2)[:, :, 5:])


@arithmetic
@pytest.mark.parametrize("reason", ["Mimi's upsampling", USUAL, "dilated, stride 1", "channels that divide nothing"])
@pytest.mark.parametrize("chunks", [(1, 3, 6), (90, 10)], ids=str)
def test_steps_are_the_whole_signal_in_every_precision(reason, chunks, dtype, precision):
    s = stream(ALL[reason], 2, sum(chunks), dtype, "cuda")
    y, whole = steps(s, chunks, s.state(), precision=precision), s.offline()
    exact = offline(replace_operands(s, torch.float64), "fp64")
    error = {name: (one.double() - exact).norm() / exact.norm() for name, one in (("ours", y), ("torch", whole))}
    rounded = {"tf32": 5e-4, "tf32x3": 5e-7}.get(precision, 0)  # operands; torch's are not
    assert error["ours"] <= 2 * error["torch"] + rounded


def replace_operands(s, dtype):
    return replace(s, x=s.x.to(dtype), weight=s.weight.to(dtype), bias=None if s.bias is None else s.bias.to(dtype))


# Reason, layer, slots and chunks of steps on tensor cores.
PRODUCTS = {
    "many slots": (Problem(1, 1024, 512, 16, 1, 8, bias=True), 64, (1, 1)),
    "many slots, several frames": (Problem(1, 512, 256, 12, 1, 6, bias=True), 33, (1, 4, 3)),
    "blocks of 128 columns": (Problem(1, 1024, 512, 16, 1, 8, bias=True), 64, (3, 4, 8)),
    "two warps share input channels": (Problem(1, 1536, 768, 16, 1, 8, bias=True), 64, (2, 4)),
    "warps of 64 columns": (Problem(1, 768, 384, 10, 1, 5, bias=True), 64, (4,)),
    "one column": (Problem(1, 512, 256, 12, 1, 6, bias=True), 1, (1, 1)),
    "rows that fill no product": (Problem(1, 256, 128, 10, 1, 5, bias=True), 17, (1, 2)),
    "several tiles of slots": (Problem(1, 128, 64, 8, 1, 4, bias=True), 150, (1, 1)),
    "two frames kept": (Problem(1, 64, 48, 12, 1, 4, bias=True), 9, (1, 2, 5)),
    "nothing kept": (Problem(1, 96, 40, 2, 1, 2), 21, (1, 3)),
    "groups": (Problem(1, 192, 96, 8, 1, 4, groups=3, bias=True), 8, (1, 6)),
    "one slot of many frames": (Problem(1, 128, 64, 8, 1, 4, bias=True), 1, (9, 32)),
    "ragged output channels and stages": (Problem(1, 264, 50, 8, 1, 4, bias=True), 10, (1, 2)),
}


@pytest.mark.parametrize("reason", PRODUCTS)
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float32, "tf32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")], ids=str
)
def test_many_columns_are_computed_on_tensor_cores(reason, dtype, precision):
    layer, slots, chunks = PRODUCTS[reason]
    s = stream(layer, slots, sum(chunks), dtype, "cuda")
    mask = torch.arange(slots, device="cuda") % 4 != 2
    state, outputs = torch.randn(s.state().shape, device="cuda").to(dtype), []
    before = state.clone()
    for x in chunked(s.x.where(mask[:, None, None], torch.nan), chunks):
        x, p = x.contiguous(), replace(layer, batch=slots, length=x.shape[2])
        laid_out = (Layout.of(tensor) for tensor in (x, state, s.weight))
        assert isinstance(plan.choose(*laid_out, p, precision), mma_tile.Config)
        outputs.append(streaming.step(x, state, s.weight, s.bias, *s.parameters, mask, precision=precision))
    y, all_frames = torch.cat(outputs, dim=2), torch.cat([before, s.x], dim=2)
    whole = replace(s, x=all_frames)
    exact = replace_operands(whole, torch.float64).offline()[mask][:, :, s.kept * layer.stride :]
    torchs = whole.offline()[mask][:, :, s.kept * layer.stride :]
    assert relative(y[mask], exact) <= 2 * relative(torchs, exact) + (5e-4 if precision == "tf32" else 0)
    assert not y[~mask].any()
    assert torch.equal(state[mask], all_frames[mask][:, :, sum(chunks) :])
    assert torch.equal(state[~mask], before[~mask])


def relative(y, exact) -> float:
    return ((y.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("layout", ["an address that no vector has", "channels last", "weights transposed", "a slice"])
def test_what_tensor_cores_do_not_take_is_computed_elsewhere(layout):
    s = stream(ALL[USUAL], 16, 2, device="cuda")
    expected, x, state = offline(s, "ieee", "k2_polyphase"), s.x, s.state()
    if layout == "an address that no vector has":
        x = x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    elif layout == "channels last":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "weights transposed":
        s.weight = s.weight.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    else:
        x = torch.cat([x, x], dim=2)[:, :, :2]
    laid_out = (Layout.of(tensor) for tensor in (x, state, s.weight))
    assert isinstance(plan.choose(*laid_out, replace(s.layer, batch=16, length=2), "tf32"), tile.Config)
    assert torch.equal(streaming.step(x, state, s.weight, s.bias, *s.parameters, precision="tf32"), expected)


def test_depthwise_steps_have_a_thread_a_channel():
    s = stream(ALL["Mimi's upsampling"], 64, 2, device="cuda")
    laid_out = (Layout.of(tensor) for tensor in (s.x, s.state(), s.weight))
    assert isinstance(plan.choose(*laid_out, replace(s.layer, batch=64, length=2), "ieee"), depthwise.Config)


@pytest.mark.parametrize("reason", ["Mimi's first layer", "Mimi's upsampling", "groups"])
@pytest.mark.parametrize("frames", [1, 3])
def test_a_slot_that_rests_keeps_its_state_and_puts_out_zeros(reason, frames):
    s = stream(ALL[reason], 20, frames, device="cuda")
    mask = torch.rand(20, device="cuda") < 0.5
    mask[:8] = False  # a whole tile
    state = torch.randn_like(s.state())
    before, everybodys = state.clone(), state.clone()
    everything = steps(s, (frames,), everybodys, precision="ieee")
    s.x[~mask] = torch.nan
    y = steps(s, (frames,), state, mask, "ieee")
    assert torch.equal(y[mask], everything[mask])
    assert torch.equal(state[mask], everybodys[mask])
    assert not y[~mask].any()
    assert torch.equal(state[~mask], before[~mask])


def test_a_reset_slot_starts_anew():
    s = stream(ALL[USUAL], 3, 6, device="cuda")
    state = s.state()
    first = steps(s, (6,), state, precision="ieee")
    state[1].zero_()
    again = steps(s, (2, 4), state, precision="ieee")
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], again[0])


@pytest.mark.parametrize("reason", ["Mimi's first layer", "Mimi's upsampling"])
def test_a_graph_replays_steps(reason):
    s = stream(ALL[reason], 4, 12, device="cuda")
    expected, state, x = offline(s, "ieee", "k2_polyphase"), s.state(), s.x[:, :, :1].clone()

    def step():
        return streaming.step(x, state, s.weight, s.bias, *s.parameters, precision="ieee")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = step(), step()
    state.zero_()
    for t in range(0, 12, 2):
        # Between replays the kernel runs outside the graph, on another stream, with other counters.
        with torch.cuda.stream(torch.cuda.Stream()):
            streaming.step(x.clone(), s.state(), s.weight, s.bias, *s.parameters, precision="ieee")
        x.copy_(s.x[:, :, t : t + 1])
        before = state.clone()
        graph.replay()
        p = s.layer
        assert torch.equal(first, expected[:, :, t * p.stride : (t + 1) * p.stride])
        # The second step has the same frame.
        again = torch.cat([before, x, x], dim=2)
        assert torch.equal(state, again[:, :, 2:])
        assert second.isfinite().all()
        state.copy_(torch.cat([before, s.x[:, :, t : t + 2]], dim=2)[:, :, 2:])


def test_counters_are_zero_after_every_launch():
    s = stream(ALL["Mimi's first layer"], 33, 3, device="cuda")
    steps(s, (1, 2), s.state())
    torch.cuda.synchronize()
    assert tickets._of_stream
    assert not any(counters.any() for counters in tickets._of_stream.values())
    assert not any(counters.any() for counters, _ in tickets._of_graphs.values())


def test_compiles_without_a_break():
    s = stream(ALL[USUAL], 2, 4, device="cuda")

    @torch.compile(fullgraph=True)
    def compiled(x, state):
        return streaming.step(x, state, s.weight, s.bias, *s.parameters, precision="ieee")

    state = s.state()
    y = torch.cat([compiled(chunk.contiguous(), state) for chunk in chunked(s.x, (2, 2))], dim=2)
    assert torch.equal(y, offline(s, "ieee", "k2_polyphase"))


def test_on_another_stream():
    s = stream(ALL["Mimi's first layer"], 2, 4, device="cuda")
    expected = offline(s, "ieee", "k2_polyphase")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        y = steps(s, (1, 1, 2), s.state(), precision="ieee")
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


def test_equal_steps_give_equal_bits():
    s = stream(ALL["Mimi's first layer"], 64, 1, device="cuda")
    state = torch.randn_like(s.state())
    results = set()
    for _ in range(20):
        own = state.clone()
        results.add((steps(s, (1,), own).double().sum().item(), own.double().sum().item()))
    assert len(results) == 1


def bad(**changes):
    s = stream(ALL[USUAL], 2, 3, device="cuda")
    return dict(x=s.x, state=torch.randn_like(s.state()), weight=s.weight, bias=s.bias, stride=4) | changes


@pytest.mark.parametrize(
    "changes",
    [
        dict(x=torch.ones(2, 128, 0, device="cuda") if torch.cuda.is_available() else None),
        dict(x=torch.ones(3, 128, 1, device="cuda") if torch.cuda.is_available() else None),
        dict(x=torch.ones(2, 128, 3)),
        dict(mask=torch.ones(2, dtype=torch.bool)),
        dict(weight=torch.ones(128, 64, 8)),
    ],
    ids=str,
)
def test_bad_calls_leave_the_state(changes):
    arguments = bad(**changes)
    before = arguments["state"].clone()
    with pytest.raises(RuntimeError):
        streaming.step(**arguments)
    assert torch.equal(arguments["state"], before)


def test_a_state_within_the_input_is_refused():
    memory = torch.randn(2 * 128 * 4, device="cuda")
    arguments = bad(state=memory[: 2 * 128].view(2, 128, 1), x=memory[128 : 128 + 2 * 128].view(2, 128, 1))
    before = memory.clone()
    with pytest.raises(RuntimeError, match="share memory with x"):
        streaming.step(**arguments)
    assert torch.equal(memory, before)


def test_what_no_block_holds_is_passed_on():
    assert tile.refusal(ALL["more frames than shared memory holds"], torch.float32)
    assert tile.refusal(ALL[USUAL], torch.float32) is None


@pytest.mark.parametrize("first", range(0, 60, 3))
def test_random_streams(first):
    """Some of those of `python -m numba_tconv fuzz-steps`; a few a test, so that processes share the compilations."""
    with torch.no_grad():
        for number in range(first, first + 3):
            fuzz_steps.draw(1, number).check()
