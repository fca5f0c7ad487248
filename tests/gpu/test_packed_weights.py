"""Every rung that packs weights: in every call, and with FrozenWeights once for each order."""

import gc

import pytest
import torch

import numba_tconv
from numba_tconv.kernels.common.packed_weights import FrozenWeights
from numba_tconv.selection.registry import RUNGS
from tests.parity import operands, parameters

from .common import LARGE, TENSOR_CORES, able

pytestmark = pytest.mark.gpu

PROBLEM = LARGE["HiFi-GAN's third layer"]


@pytest.fixture(params=["k4_register_tile", *(rung.name for rung in TENSOR_CORES)])
def choice(request):
    """A rung that packs, in TF32 where it can."""
    precision = "ieee" if request.param == "k4_register_tile" else "tf32"
    able(RUNGS[request.param], PROBLEM, torch.float32, precision)
    return {"variant": request.param, "precision": precision}


@pytest.fixture
def tensors():
    return operands(PROBLEM, torch.float32, "cuda")


def compute(x, w, bias, choice):
    with torch.no_grad():
        return numba_tconv.conv_transpose1d(x, w, bias, **parameters(PROBLEM), **choice)


def test_every_call_packs(tensors, choice, packings):
    x, w, bias = tensors
    outputs = [compute(x, w, bias, choice) for _ in range(5)]
    assert len(packings) == 5
    assert all(torch.equal(y, outputs[0]) for y in outputs)


def test_a_training_step_packs(tensors, choice, packings):
    x, w, bias = (tensor.requires_grad_() for tensor in tensors)
    for number in range(1, 5):
        y = numba_tconv.conv_transpose1d(x, w, bias, **parameters(PROBLEM), **choice)
        y.backward(torch.ones_like(y))
        assert len(packings) == number


def test_calls_keep_no_memory(tensors, choice):
    x, w, bias = tensors
    compute(x, w, bias, choice)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        compute(x, w, bias, choice)
        assert torch.cuda.memory_allocated() == before


def test_frozen_weights_are_packed_once_for_each_order(tensors, choice, packings):
    x, w, bias = tensors
    frozen = FrozenWeights(w)
    right = compute(x, w, bias, choice)
    packings.clear()
    for _ in range(5):
        assert torch.equal(compute(x, frozen.tensor, bias, choice), right)
    assert len(packings) == 1
    if choice["precision"] == "tf32":
        split = {**choice, "precision": "tf32x3"}
        found = [compute(x, frozen.tensor, bias, split) for _ in range(3)]
        assert len(packings) == 2
        assert torch.equal(found[-1], compute(x, w, bias, split))


def test_other_tensors_on_the_memory_of_frozen_weights_are_packed_in_the_call(tensors, choice, packings):
    x, w, bias = tensors
    frozen = FrozenWeights(w)
    compute(x, frozen.tensor, bias, choice)
    w.mul_(2)
    packings.clear()
    for other in (w, frozen.tensor.detach(), frozen.tensor.view_as(w), frozen.tensor.clone()):
        found = compute(x, other, bias, choice)
        assert torch.equal(found, compute(x, w.clone(), bias, choice))
    assert len(packings) == 8


def test_another_stream_waits_for_the_packing(tensors, choice):
    x, w, bias = tensors
    right = compute(x, w, bias, choice)
    frozen = FrozenWeights(w)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(1_000_000_000)  # about half a second, before the packing
        compute(x, frozen.tensor, bias, choice)
    with torch.cuda.stream(torch.cuda.Stream()):
        y = compute(x, frozen.tensor, bias, choice)
    torch.cuda.synchronize()
    assert torch.equal(y, right)


def capture(work):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


def test_a_captured_graph_packs_at_every_replay(tensors, choice):
    x, w, bias = tensors
    compute(x, w, bias, choice)  # compiles
    graph, y = capture(lambda: compute(x, w, bias, choice))
    for _ in range(3):
        w.data.copy_(torch.randn_like(w))
        graph.replay()
        assert torch.equal(y, compute(x, w.clone(), bias, choice))


def test_a_graph_in_which_frozen_weights_come_first_packs_them_itself(tensors, choice, packings):
    """The graph packs into its own memory, which may be gone while the layer is called."""
    x, w, bias = tensors
    right = compute(x, w, bias, choice)
    frozen = FrozenWeights(w)
    packings.clear()
    graph, y = capture(lambda: compute(x, frozen.tensor, bias, choice))
    assert frozen.packed_bytes == 0
    graph.replay()
    assert torch.equal(y, right)
    del graph, y
    torch.cuda.empty_cache()
    assert torch.equal(compute(x, frozen.tensor, bias, choice), right)
    assert torch.equal(compute(x, frozen.tensor, bias, choice), right)
    assert len(packings) == 2


def test_a_graph_takes_what_was_packed_of_frozen_weights_before(tensors, choice, packings):
    x, w, bias = tensors
    frozen = FrozenWeights(w)
    right = compute(x, frozen.tensor, bias, choice)
    packings.clear()
    graph, y = capture(lambda: compute(x, frozen.tensor, bias, choice))
    graph.replay()
    assert packings == []
    assert torch.equal(y, right)
