"""Packed weights: kept while the weights stay as they are, and never longer."""

import gc

import pytest
import torch

import numba_tconv
from numba_tconv.kernels import RUNGS, weight_cache
from tests.gpu.common import LARGE, TENSOR_CORES, able
from tests.parity import operands, parameters

pytestmark = pytest.mark.gpu

PROBLEM = LARGE["HiFi-GAN's third layer"]


@pytest.fixture(params=["k4_register_tile", *(rung.name for rung in TENSOR_CORES)])
def layer(request):
    """A layer that computes by one rung, in TF32 where it can."""
    precision = "ieee" if request.param == "k4_register_tile" else "tf32"
    able(RUNGS[request.param], PROBLEM, torch.float32, precision)
    p, choice = PROBLEM, {"variant": request.param, "precision": precision}
    return numba_tconv.ConvTranspose1d(
        *(p.in_channels, p.out_channels, p.kernel_size, p.stride, p.padding), device="cuda", **choice
    )


@pytest.fixture(autouse=True)
def no_weights_before(monkeypatch):
    """After many that came once, as those of other tests, weights are not always kept from the second time on."""
    monkeypatch.setattr(weight_cache, "_once", {})


@pytest.fixture
def x():
    return operands(PROBLEM, torch.float32, "cuda")[0]


@pytest.fixture
def packings(monkeypatch):
    """A list that grows by an entry for each time that weights are packed."""
    seen, pack = [], weight_cache._pack

    def counted(*arguments):
        seen.append(arguments[0].data_ptr())
        return pack(*arguments)

    monkeypatch.setattr(weight_cache, "_pack", counted)
    return seen


def fresh(layer, x):
    """What the layer shall compute: by a copy of its weights, which nobody has packed yet."""
    choice = {"variant": layer.variant, "precision": layer.precision}
    weight = layer.weight.detach().clone()
    return numba_tconv.conv_transpose1d(x, weight, layer.bias.detach(), **parameters(PROBLEM), **choice)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_packs_the_first_two_times(layer, x, packings, mode):
    with mode():
        first, second, third = layer(x), layer(x), layer(x)
    assert len(packings) == 2
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    assert torch.equal(first, fresh(layer, x))


def test_weights_that_are_computed_for_each_call_are_not_kept(layer, x, packings):
    entries, memory = len(weight_cache._kept), []
    torch.nn.utils.parametrizations.weight_norm(layer)
    gc.collect()  # what that left behind must not be set free while the memory is looked at
    with torch.no_grad():
        for _ in range(5):
            layer.parametrizations.weight.original0.mul_(1.1)
            packings.clear()
            y = layer(x)
            assert len(packings) == 1
            assert torch.equal(y, fresh(layer, x))
            del y
            memory.append(torch.cuda.memory_allocated())
    assert len(weight_cache._kept) == entries
    assert len(set(memory)) == 1


def test_other_precisions_are_packed_apart(layer, x, packings):
    if layer.precision == "ieee":
        pytest.skip("k4 has one")
    with torch.no_grad():
        for _ in range(3):
            layer(x)
        layer.precision = "tf32x3"
        for _ in range(3):
            split = layer(x)
        assert len(packings) == 4
        assert torch.equal(split, fresh(layer, x))


def in_place(layer, x):
    with torch.no_grad():
        layer.weight.mul_(2)


def through_a_view(layer, x):
    with torch.no_grad():
        layer.weight.flatten()[:100].zero_()


def optimizer_step(layer, x):
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(x).square().mean().backward()
    optimizer.step()


def new_data(layer, x):
    layer.weight.data = torch.randn_like(layer.weight)


def new_parameter(layer, x):
    layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight))


def load_state_dict(layer, x):
    layer.load_state_dict({name: torch.randn_like(value) for name, value in layer.state_dict().items()})


CHANGES = (in_place, through_a_view, optimizer_step, new_data, new_parameter, load_state_dict)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_weights_are_packed_anew(layer, x, packings, change):
    with torch.no_grad():
        before = [layer(x) for _ in range(3)][-1]
    change(layer, x)
    packings.clear()
    with torch.no_grad():
        after = layer(x)
    assert len(packings) == 1
    assert not torch.equal(after, before)
    assert torch.equal(after, fresh(layer, x))


def test_weights_in_the_memory_of_others_are_not_mistaken_for_them(layer, x):
    """The allocator hands the same memory to each of these layers' weights."""
    with torch.no_grad():
        for _ in range(5):
            layer.weight = None
            gc.collect()
            layer.weight = torch.nn.Parameter(torch.randn(128, 64, 4, device="cuda"))
            for _ in range(3):
                assert torch.equal(layer(x), fresh(layer, x))


def test_packed_weights_do_not_outlive_their_weights(layer, x):
    with torch.no_grad():
        for _ in range(2):
            layer(x)
        entries = len(weight_cache._kept)
        for _ in range(5):
            layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight))
            for _ in range(2):
                layer(x)
    gc.collect()
    assert len(weight_cache._kept) <= entries + 1


def test_another_stream_waits_for_the_packing(layer, x):
    right = fresh(layer, x)
    torch.cuda.synchronize()
    packing, using = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.no_grad():
        layer(x)
        with torch.cuda.stream(packing):
            torch.cuda._sleep(1_000_000_000)  # about half a second of clock cycles, before the weights are packed
            layer(x)
        with torch.cuda.stream(using):
            y = layer(x)
    torch.cuda.synchronize()
    assert torch.equal(y, right)


def test_a_captured_graph_packs_at_every_replay(layer, x):
    with torch.no_grad():
        for _ in range(2):
            layer(x)  # compiled now, and packed: the capture must not take these
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
        assert torch.equal(y, fresh(layer, x))
        layer.weight.copy_(torch.randn_like(layer.weight))
        graph.replay()
        assert torch.equal(y, fresh(layer, x))


def test_what_a_replay_wrote_is_seen_outside_of_the_graph(layer, x):
    """Torch does not count the writes of a replay."""
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
            layer.weight.mul_(1.5)
        for _ in range(2):
            layer(x)  # kept from here on, if anything is
        graph.replay()
        assert torch.equal(layer(x), fresh(layer, x))
        assert not torch.equal(layer(x), y)
