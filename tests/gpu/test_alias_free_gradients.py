"""The alias-free activation's gradients on the GPU, against autograd through torch's operators in float64."""

import math
from unittest import mock

import pytest
import torch

from numba_tconv.formula.alias_free import ACTIVATIONS
from numba_tconv.lab.measure import fuzz_activations
from numba_tconv.torch_api import alias_free_operators as ops
from numba_tconv.torch_api.alias_free_operators import alias_free_activation, composed

pytestmark = pytest.mark.gpu
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CHOICES = 2, 2, True, "snake"
DRAWS = 24  # in whose mean one element's rounding counts little
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def no_composition():
    """Fails where torch's operators compute a gradient of ours."""
    with mock.patch.object(ops, "composed_gradients", side_effect=AssertionError("torch's operators")):
        yield


def operands(shape, dtype, choices=CHOICES, taps=(12, 12), beta=True, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(shape, device="cuda").to(dtype)
    filters = [torch.softmax(torch.randn(count, device="cuda"), 0).to(dtype) for count in taps]
    alpha, beta = (torch.rand(shape[1], device="cuda").to(dtype) if given else None for given in (True, beta))
    return [x, *filters, *((alpha, beta) if choices[3] == "snake" else (None, None))]


def gradients(function, tensors, choices, dy=None, wanted=(0, 3, 4), **kind):
    """The wanted gradients that exist; ``dy`` None: a random one."""
    tensors = [one if one is None else one.detach().to(**kind) for one in tensors]
    given = [tensors[z].requires_grad_() for z in wanted if tensors[z] is not None]
    y = function(*tensors, *choices)
    if dy is None:
        dy = torch.randn(y.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    return torch.autograd.grad(y, given, dy.to(tensors[0].dtype).to(y.dtype))


def errors(tensors, choices):
    """Of each gradient, ours and torch's: errors in norm and in the largest element, relative to the truth's."""
    x = tensors[0]
    y = composed(*tensors, *choices)
    dy = torch.randn(y.shape, device="cuda").to(x.dtype)
    truth = gradients(composed, tensors, choices, dy.double(), dtype=torch.float64)
    found = []
    for function in (alias_free_activation, composed):
        found.append([])
        for one, right in zip(gradients(function, tensors, choices, dy), truth, strict=True):
            assert one.shape == right.shape
            assert one.dtype == x.dtype
            wrong = one.double() - right
            found[-1].append(torch.stack([wrong.norm() / right.norm(), wrong.abs().max() / right.abs().max()]))
    return [torch.stack(side).tolist() for side in found]


def assert_close(*draws, choices=CHOICES):
    """At most twice torch's error in the same dtype, in norm and in the largest element, in the mean of ``draws``.

    Where torch's is small by luck, one rounding of the result is allowed, in float64 that of its sum. The gradients of
    alpha and beta have one number a channel: of a few numbers, torch's error is often small by luck.
    """
    x = draws[0][0]
    found = torch.tensor([errors(tensors, choices) for tensors in draws], dtype=torch.float64)
    for z, (ours, theirs) in enumerate(found.mean(dim=0).unbind(dim=1)):
        terms = 64 if z == 0 else 2 * x.numel() // x.shape[1]
        epsilon = torch.finfo(x.dtype).eps * (math.sqrt(terms) if x.dtype == torch.float64 else 1)
        assert ours[0] <= max(2 * theirs[0], epsilon)
        assert ours[1] <= max(2 * theirs[1], 2 * epsilon)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_activation(dtype, activation):
    choices = 2, 2, True, activation
    for length in (37, 3001):
        assert_close(operands((8, 3, length), dtype, choices), choices=choices)


@dtypes
@pytest.mark.parametrize("log_scale", [True, False])
def test_beta_is_alpha(dtype, log_scale):
    tensors = operands((8, 3, 1000), dtype, beta=False)
    tensors[3] += 0.5
    assert_close(tensors, choices=(2, 2, log_scale, "snake"))


@dtypes
def test_each_length_to_40(dtype):
    for length in range(1, 41):
        assert_close(operands((2, 64, length), dtype))


@pytest.mark.parametrize("ratios", [(1, 1), (2, 2), (3, 3), (4, 4), (2, 1), (1, 2), (3, 4), (4, 3)], ids=str)
@pytest.mark.parametrize("taps", [(4, 1), (7, 12), (32, 32)], ids=str)
def test_ratios_and_taps(ratios, taps):
    """The largest error is that of one element, mostly of the rounding of its up-sample: each draw's is luck.

    Torch's own, its taps added in the other order, is up to a third of the times more than twice as large.
    """
    choices = *ratios, True, "snake"
    for length in (1, 5, 1500):
        draws = (operands((2, 64, length), torch.float32, choices, taps, seed=seed) for seed in range(DRAWS))
        assert_close(*draws, choices=choices)


@dtypes
@pytest.mark.parametrize("shape", [(4, 768, 2000), (2, 24, 96_001), (1, 32, 100_003), (600, 64, 9)], ids=str)
def test_large_shapes_and_long_sums(dtype, shape):
    assert_close(operands(shape, dtype))


@dtypes
def test_the_same_bits_again(dtype):
    tensors = operands((4, 24, 20_000), dtype)
    first = gradients(alias_free_activation, tensors, CHOICES)
    for _ in range(5):
        for one, other in zip(gradients(alias_free_activation, tensors, CHOICES), first, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("wanted", [(0,), (3,), (4,), (3, 4), (0, 4)], ids=str)
def test_some_gradients(wanted):
    tensors = operands((2, 8, 5000), torch.float32)
    whole = dict(zip((0, 3, 4), gradients(alias_free_activation, tensors, CHOICES), strict=True))
    for z, one in zip(wanted, gradients(alias_free_activation, tensors, CHOICES, wanted=wanted), strict=True):
        assert torch.equal(one, whole[z])


def test_every_stride():
    tensors = operands((3, 4, 500), torch.float32)
    dy = torch.randn(3, 4, 500, device="cuda")
    right = gradients(alias_free_activation, tensors, CHOICES, dy)
    wide = torch.randn(3, 4, 1003, device="cuda")
    wide[:, :, 1:501], wide[:, :, 502:1002] = tensors[0], dy
    for view in (lambda one: one.mT.contiguous().mT, lambda one: one.transpose(0, 1).contiguous().transpose(0, 1)):
        found = gradients(alias_free_activation, [view(tensors[0]), *tensors[1:]], CHOICES, view(dy))
        assert all(map(torch.equal, found, right))
    found = gradients(alias_free_activation, [wide[:, :, 1:501], *tensors[1:]], CHOICES, wide[:, :, 502:1002])
    assert all(map(torch.equal, found, right))
    ones = torch.ones(3, 4, 500, device="cuda")
    found = gradients(alias_free_activation, tensors, CHOICES, ones[:1, :1, :1].expand(3, 4, 500))
    assert all(map(torch.equal, found, gradients(alias_free_activation, tensors, CHOICES, ones)))


def test_on_a_side_stream_and_in_a_graph():
    tensors = operands((2, 8, 5000), torch.float32)
    for z in (0, 3, 4):
        tensors[z].requires_grad_()
    given, dy = [tensors[z] for z in (0, 3, 4)], torch.randn(2, 8, 5000, device="cuda")

    def step():
        return torch.autograd.grad(alias_free_activation(*tensors, *CHOICES), given, dy)

    right = step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert all(map(torch.equal, step(), right))
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for one in found:
        one.fill_(torch.nan)
    graph.replay()
    assert all(map(torch.equal, found, right))


def test_compiled():
    tensors = operands((2, 8, 5000), torch.float32)
    right = gradients(alias_free_activation, tensors, CHOICES)

    @torch.compile(fullgraph=True)
    def compiled(*arguments):
        return alias_free_activation(*arguments)

    found = gradients(compiled, tensors, CHOICES)
    assert all(map(torch.equal, found, right))


def test_a_large_phase():
    """Slopes lie within 1 + 2a/b, whatever the phase."""
    tap, parameter, choices = torch.ones(1, device="cuda"), torch.zeros(3, device="cuda"), (1, 1, True, "snake")
    for scale in (1e2, 1e5, 1e9):
        x = torch.randn(2, 3, 500, device="cuda") * scale
        found = gradients(alias_free_activation, [x, tap, tap, parameter, None], choices, torch.ones_like(x))
        truth = 1 + torch.sin(2 * x.double())
        assert ((found[0].double() - truth).abs() <= 2e-6 + 1e-13 * x.abs()).all()


def test_a_large_phase_in_float64():
    """Beyond 2^50 half periods only the bounds hold, also beside smaller phases."""
    x = torch.tensor([[[1e8, 3e8, 1e300]]], device="cuda", dtype=torch.float64)
    tap, choices = torch.ones(1, device="cuda", dtype=torch.float64), (1, 1, False, "snake")
    (found,) = gradients(alias_free_activation, [x, tap, tap, tap, None], choices, torch.ones_like(x), wanted=(0,))
    assert (found - 1 - torch.sin(2 * x))[..., :2].abs().max() <= 1e-9
    assert 0 <= found[0, 0, 2] <= 2


def test_gradcheck():
    x, up, down, alpha, beta = operands((2, 3, 9), torch.float64)
    given = [one.requires_grad_() for one in (x, alpha, beta)]
    assert torch.autograd.gradcheck(
        lambda x, alpha, beta: alias_free_activation(x, up, down, alpha, beta, *CHOICES), given
    )


@dtypes
@pytest.mark.parametrize("activation", ["snake", "silu"])
@pytest.mark.parametrize("beta", [False, True])
def test_operator(dtype, activation, beta):
    choices = 2, 3, True, activation
    tensors = operands((2, 3, 9), dtype, choices, beta=beta)
    dy = torch.randn(2, 3, 6, device="cuda").to(dtype)
    for parameters in (False, activation == "snake"):
        torch.library.opcheck(ops.alias_free_gradients, (dy, *tensors, *choices, parameters))


def test_random_activations():
    """Some of those of `python -m numba_tconv fuzz-activations`, whose kernels are mostly compiled first."""
    for number in range(5):
        fuzz_activations.draw(1, number).check()
