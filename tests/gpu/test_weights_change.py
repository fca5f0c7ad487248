"""A layer computes with its present weights, whatever wrote them: forward, and both gradients.

Writers are weight_writes.py's changes, optimizers, averages and CUDA graphs, on several streams.
"""

import gc

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

from numba_tconv import ConvTranspose1d
from numba_tconv.selection.directions import FORWARD
from numba_tconv.selection.registry import RUNGS

from .common import TENSOR_CORES, able
from .weight_writes import CHANGES, another, another_parameter, copied_data, other_data, written_by_a_foreign_kernel
from .weights_now import (
    ARITHMETICS,
    HOT,
    PROBLEM,
    arithmetics,
    assert_close,
    assert_results,
    assert_right,
    assert_step,
    call_often,
    copied,
    fresh,
    gradients,
    layer,
    losses,
    precision_of,
)

pytestmark = pytest.mark.gpu

# Learning rates that change the weights much in STEPS steps.
RATES = {
    "AdamW": 1e-2,
    "Adam": 1e-2,
    "SGD": 0.1,
    "Adagrad": 2e-2,
    "Adadelta": 5.0,
    "Adamax": 1e-2,
    "ASGD": 0.1,
    "NAdam": 1e-2,
    "RAdam": 0.2,
    "RMSprop": 1e-2,
    "Rprop": 1e-2,
}
OPTIMIZERS = [(name, "fused") for name in ("AdamW", "Adam", "SGD", "Adagrad")]
OPTIMIZERS += [(name, "foreach") for name in RATES]
optimizers = pytest.mark.parametrize(("optimizer", "kind"), OPTIMIZERS, ids=["-".join(one) for one in OPTIMIZERS])


def name_of(change):
    return change.__name__


@pytest.mark.parametrize("change", CHANGES, ids=name_of)
@arithmetics
def test_the_weights_of_now(arithmetic, change):
    module = layer(arithmetic)
    steps = change(module)
    next(steps)
    call_often(module, arithmetic)
    before, _ = copied(module)
    next(steps, None)
    assert not torch.equal(module.weight, before)
    assert_right(module, arithmetic)


PACKED = ["k4_register_tile", *(rung.name for rung in TENSOR_CORES)]


@pytest.mark.parametrize("change", [copied_data, written_by_a_foreign_kernel], ids=name_of)
@pytest.mark.parametrize("rung", PACKED)
def test_every_rung_that_packs(rung, change):
    arithmetic = "ieee" if rung == "k4_register_tile" else "tf32"
    able(RUNGS[rung], PROBLEM, *ARITHMETICS[arithmetic])
    module = layer(arithmetic, variant=rung)
    steps = change(module)
    next(steps)
    call_often(module, arithmetic)
    next(steps, None)
    assert_right(module, arithmetic)


@arithmetics
def test_weights_in_the_memory_of_others_are_not_mistaken_for_them(arithmetic):
    """The allocator gives each layer's weights the same memory."""
    module, places = layer(arithmetic), set()
    for _ in range(4):
        module.weight = None
        gc.collect()
        module.weight = nn.Parameter(torch.randn(128, 64, 4, device="cuda", dtype=ARITHMETICS[arithmetic][0]))
        places.add(module.weight.data_ptr())
        call_often(module, arithmetic)
    assert len(places) < 4


# --- optimizers -------------------------------------------------------------------------------------------------------


def optimizer_of(name, kind, parameters, **options):
    """Skips optimizers that torch lacks on this GPU."""
    make = getattr(torch.optim, name)
    probe = nn.Parameter(torch.ones(4, device="cuda"))
    probe.grad = torch.ones_like(probe)
    try:
        make([probe], **{kind: True}).step()
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"torch: {error}")
    return make(parameters, **{kind: True}, **options)


@optimizers
@arithmetics
def test_an_optimizers_step(arithmetic, optimizer, kind):
    module = layer(arithmetic)
    step = optimizer_of(optimizer, kind, module.parameters(), lr=10 if optimizer == "Adadelta" else 0.05).step
    for _ in range(3):
        call_often(module, arithmetic)
        before, _ = copied(module)
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        step()
        assert not torch.equal(module.weight, before)
        assert_right(module, arithmetic)


@optimizers
@arithmetics
def test_training_beside_torchs_layer(arithmetic, optimizer, kind):
    ours = layer(arithmetic)
    theirs = layer(arithmetic, nn.ConvTranspose1d)
    theirs.load_state_dict(ours.state_dict())
    found = []
    for module in (ours, theirs):
        with precision_of(arithmetic):
            made = optimizer_of(optimizer, kind, module.parameters(), lr=RATES[optimizer])
            found.append(losses(module, made, module.weight.dtype))
    assert_close(*found, arithmetic)
    assert_right(ours, arithmetic)


AVERAGES = {"exponential": swa_utils.get_ema_multi_avg_fn(0.5), "equal": swa_utils.get_swa_multi_avg_fn()}


@pytest.mark.parametrize("average", AVERAGES)
@arithmetics
def test_an_averaged_model(arithmetic, average):
    module = layer(arithmetic)
    averaged = swa_utils.AveragedModel(module, multi_avg_fn=AVERAGES[average])
    for _ in range(4):
        call_often(averaged.module, arithmetic)
        before, _ = copied(averaged.module)
        module.weight.data.copy_(another(module.weight))
        averaged.update_parameters(module)
        assert not torch.equal(averaged.module.weight, before)
        assert_right(averaged.module, arithmetic)
        assert_right(module, arithmetic)


# --- graphs -----------------------------------------------------------------------------------------------------------


def captured(work, warm_up=3):
    """A graph of ``work``, and its return value."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=lambda options: next(iter(options)))
@arithmetics
def test_a_graph_of_the_optimizers_step_alone(arithmetic, options):
    module = layer(arithmetic)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, capturable=True, **options)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    graph, _ = captured(optimizer.step)
    for _ in range(3):
        call_often(module, arithmetic)
        before, _ = copied(module)
        graph.replay()
        assert not torch.equal(module.weight, before)
        assert_right(module, arithmetic)


IN_PLACE = [change for change in CHANGES if change not in (other_data, another_parameter)]


@pytest.mark.parametrize("change", IN_PLACE, ids=name_of)
@arithmetics
def test_a_graph_of_the_forward_pass_alone(arithmetic, change):
    """A replay packs the weights of its moment."""
    module = layer(arithmetic)
    x = fresh(module.weight.dtype).detach()
    steps = change(module)
    next(steps)
    call_often(module, arithmetic)

    def forward():
        with torch.no_grad():
            return module(x)

    address = module.weight.data_ptr()
    graph, y = captured(forward)
    call_often(module, arithmetic)
    next(steps, None)
    assert module.weight.data_ptr() == address, "which is all that a graph knows"
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_results({FORWARD: y}, x, copied(module), arithmetic)
        assert_right(module, arithmetic)


@arithmetics
def test_a_graph_of_the_whole_step(arithmetic):
    module = layer(arithmetic)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, capturable=True, fused=True)
    x = fresh(module.weight.dtype)
    with torch.no_grad():
        g = torch.randn_like(module(x))

    def step():
        y = module(x)
        found = gradients(y, x, module, g)
        for parameter, name in ((module.weight, "grad_weight"), (module.bias, "grad_bias")):
            parameter.grad = found[name]
        optimizer.step()
        return {FORWARD: y.detach()} | found

    graph, found = captured(step)
    for _ in range(3):
        call_often(module, arithmetic)
        before = copied(module)
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            g.copy_(torch.randn_like(g))
        graph.replay()
        assert_results(found, x, before, arithmetic, g)
        assert not torch.equal(module.weight, before[0])
        assert_right(module, arithmetic)


@pytest.mark.parametrize("kind", ["foreach", "fused"])
@arithmetics
def test_graphed_callables(arithmetic, kind):
    """Forward and backward are graphs, and an ordinary optimizer steps between them."""
    module = layer(arithmetic)
    module = torch.cuda.make_graphed_callables(module, (fresh(module.weight.dtype),))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, **{kind: True})
    for _ in range(HOT):
        assert_step(module, arithmetic)
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()


@arithmetics
def test_training_by_graphed_callables_beside_torchs_layer(arithmetic):
    ours = layer(arithmetic)
    theirs = layer(arithmetic, nn.ConvTranspose1d)
    theirs.load_state_dict(ours.state_dict())
    dtype = ours.weight.dtype
    graphed = torch.cuda.make_graphed_callables(ours, (fresh(dtype).detach(),))
    found = []
    for module in (graphed, theirs):
        with precision_of(arithmetic):
            found.append(losses(module, torch.optim.AdamW(module.parameters(), lr=1e-2), dtype))
    assert_close(*found, arithmetic)


# --- streams ----------------------------------------------------------------------------------------------------------

CYCLES = 200_000_000  # a tenth of a second: queued work has not run when the host goes on


@arithmetics
def test_weights_written_on_the_stream_of_the_call(arithmetic):
    """The call reads the weights in stream order, not when the host gets there."""
    module = layer(arithmetic)
    call_often(module, arithmetic)
    x, new = fresh(module.weight.dtype).detach(), another(module.weight)
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(CYCLES)
        module.weight.data.copy_(new)
        y = module(x)
    torch.cuda.synchronize()
    assert torch.equal(module.weight, new)
    assert_results({FORWARD: y}, x, copied(module), arithmetic)


@arithmetics
def test_two_streams_call_a_layer_at_once(arithmetic):
    """One call's packed weights are no other's memory."""
    module = layer(arithmetic)
    call_often(module, arithmetic)
    inputs = [fresh(module.weight.dtype).detach() for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    outputs = []
    with torch.no_grad():
        for number, (x, stream) in enumerate(zip(inputs, streams, strict=True)):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(CYCLES // (1 + number))
                outputs.append(module(x))
                torch.full_like(module.weight, torch.nan)  # takes memory that is free by then
    torch.cuda.synchronize()
    for x, y in zip(inputs, outputs, strict=True):
        assert_results({FORWARD: y}, x, copied(module), arithmetic)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [False, True], ids=["forward", "step"])
@arithmetics
def test_a_model_that_is_gone_gives_its_memory_back(arithmetic, train):
    dtype, precision = ARITHMETICS[arithmetic]

    def memory():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    def model(kind, **choice):
        layers = (kind(1024, 512, 4, 2, 1, device="cuda", dtype=dtype, **choice) for _ in range(2))
        return nn.ModuleList(layers)

    def use(model):
        for _ in range(HOT):
            for one in model:
                with torch.set_grad_enabled(train):
                    y = one(torch.randn(1, 1024, 64, device="cuda", dtype=dtype))
                if train:
                    y.backward(torch.randn_like(y))

    with precision_of(arithmetic):
        use(model(nn.ConvTranspose1d))  # memory that torch's libraries take once
    before = memory()
    ours = model(ConvTranspose1d, precision=precision)
    use(ours)
    del ours
    assert memory() - before < 2**20
