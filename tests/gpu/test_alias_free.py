"""The alias-free activation on the GPU, against its composition of torch's operators in float64."""

import pytest
import torch

from numba_tconv.formula.alias_free import ACTIVATIONS
from numba_tconv.torch_api.alias_free_operators import alias_free_activation, composed

pytestmark = pytest.mark.gpu
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def operands(shape, dtype, activation="snake", up=12, down=12, scale=1.0):
    torch.manual_seed(0)
    x = (torch.randn(shape, device="cuda") * scale).to(dtype)
    filters = [torch.softmax(torch.randn(n, device="cuda"), 0).to(dtype) for n in (up, down)]
    parameters = [torch.randn(shape[1], device="cuda").to(dtype) if activation == "snake" else None for _ in range(2)]
    return x, *filters, *parameters


def error(y, wanted):
    assert y.shape == wanted.shape
    assert y.is_contiguous()
    return float((y.double() - wanted).abs().max())


def assert_close(cases, choices):
    """At most twice torch's error in the same dtype; in 16 bits at most torch's, or half a unit of the largest.

    In float64 both sums are rounded alike: four units. Largest of all ``cases``: in few outputs chance decides."""
    errors = [errors_of(tensors, choices) for tensors in cases]
    ours, theirs, largest = map(max, zip(*errors, strict=True))
    dtype = cases[0][0].dtype
    units = 4 if dtype == torch.float64 else 1
    assert ours <= max(theirs if dtype.itemsize == 2 else 2 * theirs, units * largest * torch.finfo(dtype).eps)


def errors_of(tensors, choices):
    """The largest error of ours and of torch, and the largest output."""
    wanted = composed(*(one if one is None else one.double() for one in tensors), *choices)
    torch.full_like(wanted, torch.nan, dtype=tensors[0].dtype)  # freed: the result's memory
    ours = error(alias_free_activation(*tensors, *choices), wanted)
    return ours, error(composed(*tensors, *choices), wanted), float(wanted.abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_activation(dtype, activation):
    cases = [operands((2, 3, length), dtype, activation) for length in (37, 3001)]
    assert_close(cases, (2, 2, True, activation))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_length_to_40(dtype):
    assert_close([operands((2, 3, length), dtype) for length in range(1, 41)], (2, 2, True, "snake"))


@pytest.mark.parametrize("ratios", [(1, 1), (2, 2), (3, 3), (4, 4), (2, 1), (1, 2), (3, 4), (4, 3)], ids=str)
@pytest.mark.parametrize("taps", [(4, 1), (7, 12), (32, 32)], ids=str)
def test_ratios_and_taps(ratios, taps):
    cases = [operands((64, 2, length), torch.float32, "snake", *taps) for length in (1, 5, 1500)]
    assert_close(cases, (*ratios, True, "snake"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_shapes(dtype):
    for shape in ((4, 768, 2000), (2, 24, 96_001), (1, 1, 1_000_003), (70_000, 1, 9)):
        assert_close([operands(shape, dtype)], (2, 2, True, "snake"))


@pytest.mark.parametrize("scale", [1e2, 1e5, 1e9])
def test_large_phases(scale):
    """Snake lies between its input and its input + 1/b; where float32 has no phase left, only that holds."""
    x, _, _, alpha, _ = operands((2, 3, 500), torch.float32, scale=scale)
    tap, beta = torch.ones(1, device="cuda"), torch.zeros(3, device="cuda")
    y = alias_free_activation(x, tap, tap, alpha, beta, 1, 1, True, "snake")
    a = alpha.double().exp()[:, None]
    wanted = x.double() + torch.sin(a * x.double()).square()
    assert ((y.double() - wanted).abs() <= 2e-7 * (1 + x.abs() * (1 + a))).all()


def test_every_stride():
    x, *others = operands((3, 4, 500), torch.float32)
    choices = 2, 2, True, "snake"
    wanted = alias_free_activation(x, *others, *choices)
    wide = torch.randn(3, 4, 1003, device="cuda")
    wide[:, :, 3::2] = x
    for view in (x.mT.contiguous().mT, x.transpose(0, 1).contiguous().transpose(0, 1), wide[:, :, 3::2]):
        assert torch.equal(alias_free_activation(view, *others, *choices), wanted)
    wide[:, :, 1:501] = x
    assert torch.equal(alias_free_activation(wide[:, :, 1:501], *others, *choices), wanted)


def test_repeated_on_a_side_stream_and_in_a_graph():
    tensors, choices = operands((2, 8, 5000), torch.float32), (2, 2, True, "snake")
    wanted = alias_free_activation(*tensors, *choices)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.equal(alias_free_activation(*tensors, *choices), wanted)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = alias_free_activation(*tensors, *choices)
    y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, wanted)


def test_operator_and_gradients():
    x, up, down, alpha, beta = operands((2, 3, 9), torch.float64)
    for one in (x, alpha, beta):
        one.requires_grad_()
    torch.library.opcheck(alias_free_activation, (x, up, down, alpha, beta, 2, 2, True, "snake"))

    def function(x, alpha, beta):
        return alias_free_activation(x, up, down, alpha, beta, 2, 2, True, "snake")

    assert torch.autograd.gradcheck(function, (x, alpha, beta))
    assert torch.autograd.gradgradcheck(function, (x, alpha, beta))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_phases_in_16_bits(dtype):
    """Snake lies between its input and its input + 1/b even where float32 has no phase left."""
    x, _, _, alpha, beta = operands((2, 3, 500), torch.float32)
    tap = torch.ones(1, device="cuda", dtype=dtype)
    for scale in (1.0, 1e2, 3e4):
        y = alias_free_activation(
            (x * scale).clamp(-6e4, 6e4).to(dtype), tap, tap, alpha.to(dtype) + 8, beta.to(dtype), 1, 1, True, "snake"
        ).float()
        u, inverse = (x * scale).clamp(-6e4, 6e4).to(dtype).float(), torch.exp(-beta.to(dtype).float())[:, None]
        slack = torch.finfo(dtype).eps * (u.abs() + inverse)
        assert (y >= u - slack).all()
        assert (y <= u + inverse + slack).all()
