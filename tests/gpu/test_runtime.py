"""Kernels inside torch: streams, graphs, compilation, training, refusals before anything happens."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

import numba_tconv
from numba_tconv.selection.registry import RUNGS
from tests.parity import DTYPES, operands, parameters, verdict

from .common import LARGE, able, expected

pytestmark = pytest.mark.gpu

PROBLEM = LARGE["HiFi-GAN's third layer"]
# Every able rung, in its precisions of float32.
VARIANTS = [
    (name, precision)
    for name, rung in RUNGS.items()
    for precision in ("ieee", "tf32", "tf32x3")
    if rung.supports(PROBLEM, torch.float32, precision) is None
]
parametrized = pytest.mark.parametrize(("variant", "precision"), VARIANTS)


@pytest.fixture(autouse=True)
def skip_what_this_gpu_cannot_run(request):
    if "variant" in request.fixturenames:
        able(RUNGS[request.getfixturevalue("variant")], PROBLEM, torch.float32, request.getfixturevalue("precision"))


def run(x, w, bias, variant, precision):
    return numba_tconv.conv_transpose1d(x, w, bias, **parameters(PROBLEM), variant=variant, precision=precision)


@parametrized
def test_runs_on_the_current_stream_without_synchronising(variant, precision):
    x, w, bias = operands(PROBLEM, torch.float32, "cuda")
    run(2 * x, 2 * w, bias, variant, precision)
    torchs, oracle = expected(2 * x, w, bias, PROBLEM, precision)
    torch.cuda.synchronize()

    done = torch.cuda.Event()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(1_000_000_000)  # about half a second
        doubled = 2 * x  # after the sleep: a launch on another stream would read memory not yet written
        y = run(doubled, w, bias, variant, precision)
        done.record()
        assert not done.query(), "the call waited for the GPU"
    done.synchronize()
    assert verdict(y, torchs, oracle, precision=precision) is None


@parametrized
def test_is_captured_in_a_graph(variant, precision):
    x, w, bias = operands(PROBLEM, torch.float32, "cuda")
    run(x, w, bias, variant, precision)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x, w, bias, variant, precision)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert verdict(y, *expected(x, w, bias, PROBLEM, precision), precision=precision) is None


@parametrized
def test_runs_in_threads_that_have_not_used_cuda(variant, precision):
    x, w, bias = operands(PROBLEM, torch.float32, "cuda")
    y = run(x, w, bias, variant, precision)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda _: run(x, w, bias, variant, precision), range(8)))
    torch.cuda.synchronize()
    assert all(torch.equal(output, y) for output in outputs)


def layers():
    """torch's layer and ours with the same parameters."""
    arguments = {"stride": 4, "padding": 2, "device": "cuda"}
    theirs, ours = nn.ConvTranspose1d(32, 24, 8, **arguments), numba_tconv.ConvTranspose1d(32, 24, 8, **arguments)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def test_layer_compiles_in_one_graph():
    _, layer = layers()
    x = torch.randn(2, 32, 500, device="cuda")
    assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))


def test_training_step():
    theirs, ours = layers()
    x = torch.randn(2, 32, 500, device="cuda")
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for layer, input in zip((theirs, ours), inputs, strict=True):
        layer(input).square().mean().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    torch.testing.assert_close(ours.bias.grad, theirs.bias.grad)


def test_layer_moves_between_devices():
    theirs, ours = layers()
    x = torch.randn(2, 32, 500)
    assert torch.equal(ours.cpu()(x), theirs.cpu()(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_is_followed(dtype):
    theirs, ours = layers()
    x = torch.randn(2, 32, 500, device="cuda")
    with torch.autocast("cuda", dtype):
        assert ours(x).dtype == theirs(x).dtype == dtype
        assert ours(x.to(dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 32, 500), (0, 32, 0)], ids=str)
def test_an_empty_batch(shape, dtype):
    theirs, ours = (layer.to(dtype) for layer in layers())
    x = torch.empty(shape, dtype=dtype, device="cuda")
    assert ours(x).shape == theirs(x).shape
    assert ours(x).dtype == dtype


@parametrized
def test_an_output_without_samples(variant, precision):
    x, w = torch.randn(2, 8, 10, device="cuda"), torch.randn(8, 6, 3, device="cuda")
    choice = {"variant": variant, "precision": precision}
    assert numba_tconv.conv_transpose1d(x, w, padding=6, **choice).shape == (2, 6, 0)


def test_complex_goes_to_torch():
    x, w = (torch.randn(shape, dtype=torch.complex64, device="cuda") for shape in ((2, 4, 10), (4, 6, 3)))
    theirs = torch.conv_transpose1d(x, w, stride=2)
    torch.testing.assert_close(numba_tconv.conv_transpose1d(x, w, stride=2), theirs)


BAD = {
    "stride": {"stride": 0},
    "padding": {"padding": -1},
    "dilation": {"dilation": 0},
    "output_padding": {"output_padding": 1},
    "output length": {"padding": 8},
    "groups": {"groups": 3},
    "stride of two": {"stride": (1, 1)},
    "stride type": {"stride": 1.0},
    "groups type": {"groups": True},
    "input rank": {"input": torch.randn(7)},
    "input channels": {"input": torch.randn(2, 3, 7)},
    "input length": {"input": torch.randn(2, 4, 0)},
    "weight rank": {"weight": torch.randn(4, 6)},
    "kernel size": {"weight": torch.randn(4, 6, 0)},
    "weight dtype": {"weight": torch.randn(4, 6, 3).half()},
    "weight type": {"weight": None},
    "bias shape": {"bias": torch.randn(5)},
    "bias dtype": {"bias": torch.randn(6).double()},
}
HANDED_TO_TORCH = {
    "sparse input": {"input": torch.randn(2, 4, 7).to_sparse()},
    "sparse weight": {"weight": torch.randn(4, 6, 3).to_sparse()},
    "integers": {"input": torch.ones(2, 4, 7).long(), "weight": torch.ones(4, 6, 3).long(), "bias": None},
}


def raised(function, arguments):
    with pytest.raises(Exception) as error:  # noqa: PT011  (its type is compared)
        function(**arguments)
    return error.value


def on_gpu(change):
    good = {"input": torch.randn(2, 4, 7), "weight": torch.randn(4, 6, 3), "bias": torch.randn(6)}
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in (good | change).items()}


@pytest.mark.parametrize("fault", BAD)
def test_refuses_what_torch_refuses_before_allocating(fault):
    arguments = on_gpu(BAD[fault])
    theirs = raised(torch.conv_transpose1d, arguments)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert type(raised(numba_tconv.conv_transpose1d, arguments)) is type(theirs)
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.parametrize("fault", HANDED_TO_TORCH)
def test_what_is_handed_to_torch_fails_as_in_torch(fault):
    arguments = on_gpu(HANDED_TO_TORCH[fault])
    assert type(raised(numba_tconv.conv_transpose1d, arguments)) is type(raised(torch.conv_transpose1d, arguments))


@pytest.mark.parametrize("name", ["input", "weight", "bias"])
def test_refuses_tensors_on_different_devices(name):
    tensors = {"input": torch.randn(2, 4, 7), "weight": torch.randn(4, 6, 3), "bias": torch.randn(6)}
    arguments = {k: v if k == name else v.cuda() for k, v in tensors.items()}
    theirs = raised(torch.conv_transpose1d, arguments)
    assert type(raised(numba_tconv.conv_transpose1d, arguments)) is type(theirs)


@pytest.mark.parametrize(
    ("name", "wrong"), [(name, wrong) for name in RUNGS for wrong in ("ieee", "tf32") if (name, wrong) not in VARIANTS]
)
def test_a_named_variant_that_cannot_says_why(name, wrong):
    x, w, _ = operands(PROBLEM, torch.float32, "cuda")
    reason = RUNGS[name].supports(PROBLEM, torch.float32, wrong)
    with pytest.raises(NotImplementedError) as refusal:
        run(x, w, None, name, wrong)
    assert str(refusal.value) == f"{name} cannot do {replace(PROBLEM, bias=False)}: {reason}"
