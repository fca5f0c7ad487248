"""Frozen layers on a GPU: equal bits, one packing for each order, streams, graphs, memory."""

import gc

import pytest
import torch
from torch.nn.utils import parametrizations

import numba_tconv

from .common import LARGE, arithmetic

pytestmark = pytest.mark.gpu


def layer(problem, dtype=torch.float32, precision=None):
    p = problem
    made = numba_tconv.ConvTranspose1d(
        *(p.in_channels, p.out_channels, p.kernel_size, p.stride, p.padding, p.output_padding, p.groups, p.bias),
        *(p.dilation, "zeros", "cuda", dtype),
        precision=precision,
    )
    return made.eval().requires_grad_(False)


def signal(problem, dtype=torch.float32, length=None):
    return torch.randn(problem.batch, problem.in_channels, length or problem.length, device="cuda", dtype=dtype)


DENSE = "HiFi-GAN's third layer"
FEW = (
    DENSE,
    "HiFi-GAN's first layer",
    "sizes that divide nothing",
    "depthwise, 512 groups",
    "PQMF: four input channels, long kernel",
)


@arithmetic
@pytest.mark.parametrize("reason", FEW)
def test_a_frozen_layer_gives_the_same_bits(reason, dtype, precision):
    p = LARGE[reason]
    module = layer(p, dtype, precision)
    inputs = [signal(p, dtype), signal(p, dtype), signal(p, dtype, 1), signal(p, dtype, p.length + 1)]
    try:
        expected = [module(x) for x in inputs]
    except NotImplementedError as error:
        pytest.skip(str(error))
    numba_tconv.freeze(module)
    for _ in range(2):
        for x, y in zip(inputs, expected, strict=True):
            assert torch.equal(module(x), y)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_weights_are_packed_once_for_each_order(precision, packings):
    p = LARGE[DENSE]
    module = layer(p, precision=precision)
    report = numba_tconv.freeze(module)
    assert report.bytes == 0
    for length in (p.length, 40, p.length, 40):
        module(signal(p, length=length))
        module(signal(p, length=length))
    assert 1 <= len(packings) == len(set(packings))
    assert numba_tconv.freeze(module).bytes >= module.weight.nbytes // (2 if precision == "tf32x3" else 1)
    packings.clear()
    numba_tconv.unfreeze(module)
    for _ in range(3):
        module(signal(p))
    assert len(packings) == 3


def test_another_stream_waits_for_the_packing():
    p = LARGE[DENSE]
    module = layer(p, precision="tf32")
    x = signal(p)
    expected = module(x)
    numba_tconv.freeze(module)
    torch.cuda.synchronize()
    packing, using = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(packing):
        torch.cuda._sleep(1_000_000_000)  # half a second or so, before the packing
        module(x)
    with torch.cuda.stream(using):
        y = module(x)
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("called_before", [True, False])
def test_a_graph_of_a_frozen_layer(called_before, packings):
    p = LARGE[DENSE]
    module = layer(p, precision="tf32")
    x = signal(p)
    module(x)  # compiled before the capture
    numba_tconv.freeze(module)
    if called_before:
        module(x)
    packings.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
    assert len(packings) == (0 if called_before else 1)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, module(x))
    numba_tconv.unfreeze(module)
    assert torch.equal(y, module(x))


def test_what_was_packed_goes_with_the_layer():
    p = LARGE["patches, 1280 channels"]
    x = signal(p)
    with torch.no_grad():
        layer(p)(x)
    gc.collect()
    before = torch.cuda.memory_allocated()
    module = layer(p)
    numba_tconv.freeze(module)
    module(x)
    held = torch.cuda.memory_allocated() - before
    assert held > 1.9 * module.weight.nbytes
    gc.disable()  # reference counts alone must free it
    try:
        numba_tconv.unfreeze(module)
        assert torch.cuda.memory_allocated() - before < 1.1 * module.weight.nbytes
        numba_tconv.freeze(module)
        module(x)
        del module
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


def test_weight_norm_and_autocast_are_paid_once():
    p = LARGE[DENSE]
    module = parametrizations.weight_norm(layer(p)).requires_grad_(False)
    x = signal(p)
    with torch.autocast("cuda", torch.bfloat16):
        expected = module(x)
        numba_tconv.freeze(module)
        assert torch.equal(module(x), expected)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            module(x.bfloat16())
    names = [event.key for event in profile.key_averages()]
    assert not [name for name in names if any(part in name.lower() for part in ("norm", "pack", "largest"))]
