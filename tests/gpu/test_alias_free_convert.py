"""Converted alias-free activations on a GPU: as close to float64 as torch's, in training, frozen and in CUDA graphs."""

import copy

import pytest
import torch

from numba_tconv import AliasFreeActivation, alias_free_activation, convert, freeze, routed
from numba_tconv.lab.measure import bench
from numba_tconv.lab.studies.decoder_times import error
from tests.published_activations import Tiny, TorchActivation1d, taps

pytestmark = pytest.mark.gpu
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
LEAST = {torch.float64: 1e-14, torch.float32: 1e-7, torch.float16: 1e-4, torch.bfloat16: 1e-3}  # allowed in any case


@pytest.fixture(autouse=True)
def exact_products():
    torch.manual_seed(3)
    with bench.torch_switches(tf32=False):
        yield


def pair(dtype, make=None):
    """A tiny model, its converted copy, a float64 copy, and an input."""
    theirs = (Tiny(make) if make else Tiny()).cuda().to(dtype)
    ours = copy.deepcopy(theirs)
    assert convert(ours).activations == 2
    return theirs, ours, copy.deepcopy(theirs).double(), torch.randn(3, 16, 301, device="cuda").to(dtype)


def assert_as_close(ours, theirs, exact, dtype):
    found, of_torch = error(ours, exact), error(theirs, exact)
    assert found.norm <= 2 * of_torch.norm + LEAST[dtype]
    assert found.largest <= 2 * of_torch.largest + LEAST[dtype]


@dtypes
@pytest.mark.parametrize("make", [None, TorchActivation1d], ids=["NVIDIA's", "transformers'"])
@torch.no_grad()
def test_a_converted_model_is_as_close_to_float64(dtype, make):
    theirs, ours, exact, x = pair(dtype, make)
    expected, of_torch = exact(x.double()), theirs(x)
    assert_as_close(ours(x), of_torch, expected, dtype)
    with routed():
        assert_as_close(ours(x), of_torch, expected, dtype)
    freeze(ours.eval())
    assert_as_close(ours(x), of_torch, expected, dtype)


@dtypes
def test_a_training_step(dtype):
    theirs, ours, exact, x = pair(dtype)
    gradients = []
    for model in (ours, theirs, exact):
        given = x.to(next(model.parameters()).dtype).detach().requires_grad_()
        model(given).square().mean().backward()
        gradients.append([given.grad, *(one.grad for one in model.parameters())])
    for mine, other, right in zip(*gradients, strict=True):
        assert_as_close(mine, other, right, dtype)


@torch.no_grad()
def test_a_captured_graph_of_a_frozen_model_replays():
    _, ours, _, x = pair(torch.float32)
    freeze(ours.eval())
    expected, graph = ours(x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ours(x)
    x.mul_(0.5)
    graph.replay()
    assert not torch.equal(y, expected)
    assert torch.equal(y, ours(x))


def test_compiled_it_is_one_graph():
    layer = AliasFreeActivation(8).cuda()
    x = torch.randn(2, 8, 100, device="cuda")
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast(dtype):
    theirs, ours, exact, x = pair(torch.float32)
    with torch.no_grad(), torch.autocast("cuda", dtype):
        mine, other = ours(x), theirs(x)
    assert mine.dtype == other.dtype
    assert_as_close(mine, other, exact(x.double()).detach(), dtype)


def test_bad_calls_launch_nothing():
    x, filters = torch.randn(2, 4, 9, device="cuda"), dict(up_filter=taps(12).cuda(), down_filter=taps(12).cuda())
    alpha = torch.zeros(4, device="cuda")
    for given, kind in (
        ({"alpha": alpha.cpu()}, RuntimeError),
        ({"up_filter": taps(33).cuda()}, RuntimeError),
        ({"up_ratio": 5}, RuntimeError),
        ({"x": x[..., :0]}, RuntimeError),
        ({"x": x.int()}, RuntimeError),
    ):
        arguments = {"x": x, "alpha": alpha, **filters} | given
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with pytest.raises(kind):
            alias_free_activation(arguments.pop("x"), arguments.pop("alpha"), **arguments)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert alias_free_activation(x[:0], alpha, **filters).shape == (0, 4, 9)
