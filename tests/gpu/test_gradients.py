"""Every gradient on the GPU against float64: at most twice torch's own error, in norm and in the largest element.

torch computes in the same precision, without TF32 (conftest.py). Results start as NaN.
"""

from dataclasses import replace

import pytest
import torch

import numba_tconv
from numba_tconv.formula.problem import Problem
from numba_tconv.gradients import planes
from numba_tconv.gradients.weight.wgmma import epilogue as grad_weight_direct
from numba_tconv.gradients.weight.wgmma.choose import candidates
from numba_tconv.kernels.common.tensor_map import rows_alike
from numba_tconv.selection.gradient import EXACT, GRADIENTS, grad_bias, grad_input, grad_weight
from tests.gradient_parity import (
    OF,
    ON_CUDA_CORES,
    ON_TENSOR_CORES,
    computed_gradient,
    gradient_operands,
    gradient_terms,
)
from tests.parity import DTYPES, LAYOUTS, SMALL, far_apart, parameters, verdict

from .common import FEW, LARGE, able, arithmetic, tensor_arithmetic
from .common import check_gradient as check
from .common import expected_gradient as expected

pytestmark = pytest.mark.gpu
gradients = pytest.mark.parametrize("rung", GRADIENTS.values(), ids=GRADIENTS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
tensor_cores = pytest.mark.parametrize("rung", ON_TENSOR_CORES.values(), ids=ON_TENSOR_CORES)
tf32_and_bf16 = pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float32, "tf32"), (torch.bfloat16, "bf16")], ids=str
)
OURS = [(torch.float64, "fp64"), (torch.float32, "ieee"), (torch.float32, "tf32x3")]
ours = pytest.mark.parametrize(("dtype", "precision"), OURS, ids=[precision for _, precision in OURS])

# Sums over millions of positions, whose error must not grow with their number.
LONG = {
    "four million positions": Problem(64, 16, 32, 3, 65536, bias=True),
    "four million positions, strided": Problem(4, 8, 16, 8, 2**20, stride=4, padding=2, bias=True),
    "depthwise, four million positions": Problem(8, 24, 24, 12, 2**19, stride=2, groups=24, bias=True),
}


@gradients
@arithmetic
@pytest.mark.parametrize("reason", SMALL)
def test_small_problems(rung, dtype, precision, reason):
    check(rung, SMALL[reason], dtype, precision)


@pytest.mark.parametrize("rung", ON_CUDA_CORES.values(), ids=ON_CUDA_CORES)
@dtypes
@pytest.mark.parametrize("reason", ["positions past one tile, strided", "groups, unequal channels"])
def test_tiny_tiles(rung, dtype, reason):
    check(rung, SMALL[reason], dtype, EXACT[dtype], configs=rung.tiny_configs(SMALL[reason], dtype))


@gradients
@arithmetic
@pytest.mark.parametrize("reason", LARGE)
def test_large_problems(rung, dtype, precision, reason):
    check(rung, LARGE[reason], dtype, precision)


# Lengths around a stage's positions (32, or 64 in 16 bits) and a tile's (128, 256).
SEAMS = [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513]


@tensor_cores
@tf32_and_bf16
@pytest.mark.parametrize("stride", [1, 2, 5, 8])
def test_seams_on_tensor_cores(rung, dtype, precision, stride):
    for length in SEAMS:
        for padding in (0, 1, stride // 2):
            problem = Problem(3, 40, 24, 2 * stride, length, stride=stride, padding=min(padding, length * stride // 2))
            check(rung, problem, dtype, precision)


# For grad_input_wgmma: stages that run on through the channels; rows of grad_output that begin differently, whose
# neighbours no tap may meet.
THROUGH = {
    "ten taps": Problem(3, 72, 40, 10, 501, stride=5, padding=3, output_padding=1),
    "eleven taps": Problem(3, 72, 40, 11, 500, stride=5, padding=3),
    "seven taps, dilated": Problem(2, 56, 24, 7, 257, stride=3, padding=5, dilation=3, output_padding=2),
    "more taps than a stage": Problem(2, 64, 16, 77, 130, stride=9, padding=33),
    "one tap, a group's end in a stage": Problem(2, 96, 72, 3, 255, stride=2, padding=1, groups=2),
    "groups, stages to their ends": Problem(2, 128, 128, 6, 256, stride=3, padding=2, groups=2),
    "padding longer than a tile": Problem(2, 64, 32, 5, 700, stride=2, padding=600),
    "many tiles a block, in turn": Problem(40, 64, 24, 6, 3001, stride=3, padding=1),
    "channels of no set": Problem(2, 64, 33, 10, 301, stride=5, padding=2),
    "few tiles, in parts": Problem(1, 512, 256, 16, 86, stride=8, padding=4),
    "few tiles, in parts that run through": Problem(1, 512, 256, 11, 125, stride=5, padding=3),
}


@tensor_arithmetic
@pytest.mark.parametrize("reason", THROUGH)
@pytest.mark.parametrize("padding", [0, None])
def test_stages_that_run_through(dtype, precision, reason, padding):
    """Each length differs from the next by one element."""
    problem = THROUGH[reason]
    for more in range(4):
        p = replace(problem, length=problem.length + more)
        p = p if padding is None else replace(p, padding=0)
        check(GRADIENTS["grad_input_wgmma"], p, dtype, precision)


@tf32_and_bf16
def test_parts_are_bitwise_reproducible(dtype, precision):
    reproducible(GRADIENTS["grad_input_wgmma"], THROUGH["few tiles, in parts"], dtype, precision)


@tf32_and_bf16
def test_rows_of_a_view_have_junk_between_them(dtype, precision):
    """NaN lies around the rows, and must not reach a sum."""
    problem, rung = Problem(2, 64, 32, 11, 301, stride=5, padding=7), GRADIENTS["grad_input_wgmma"]
    for gap in range(8, 17):

        def among_nan(tensor, gap=gap):
            batch, channels, length = tensor.shape
            if length != problem.out_length:
                return tensor
            around = tensor.new_full((batch, channels, length + gap), torch.nan)
            around[:, :, :length] = tensor
            return around[:, :, :length]

        check(rung, problem, dtype, precision, place=among_nan)


@tensor_cores
@tf32_and_bf16
@pytest.mark.parametrize("reason", LONG)
def test_long_sums_on_tensor_cores(rung, dtype, precision, reason):
    check(rung, LONG[reason], dtype, precision)


# Tiles that end at the last channels and outputs, and within them; groups; a stage and a half of positions.
WHOLE = {
    "one tile": Problem(2, 64, 16, 16, 96, stride=8, padding=4),
    "tiles in both directions, the last not full": Problem(1, 392, 152, 16, 48, stride=8, padding=4),
    "groups": Problem(3, 144, 80, 4, 33, stride=2, padding=1, groups=2),
    "dilation, three taps": Problem(2, 48, 40, 6, 65, stride=2, padding=3, dilation=3),
}


@tf32_and_bf16
@pytest.mark.parametrize("reason", WHOLE)
def test_whole_sums_are_stored_as_the_gradient(dtype, precision, reason):
    problem, rung = WHOLE[reason], GRADIENTS["grad_weight_wgmma"]
    g = torch.empty(problem.out_shape, device="meta")
    tiles = candidates(problem, precision, rows_alike(g.shape, g.stride(), dtype.itemsize))
    suiting = {tile.blocks: tile for tile in tiles if grad_weight_direct.suits(problem, tile)}
    assert set(suiting) == {1, 2}
    configs = [(None, replace(tile, direct=True)) for tile in suiting.values()]
    check(rung, problem, dtype, precision, configs=configs)


PLANES = {
    "half of a channel's phases": Problem(2, 44, 5, 1024, 33, stride=256, padding=300),
    "all of them, groups": Problem(3, 48, 10, 256, 70, stride=128, padding=7, output_padding=3, groups=2),
}


@tf32_and_bf16
@pytest.mark.parametrize("reason", PLANES)
def test_whole_sums_of_planes_are_stored_as_the_gradient(dtype, precision, reason):
    problem, rung = PLANES[reason], GRADIENTS["grad_weight_wgmma"]
    apart = planes.make_config(problem, dtype)
    tiles = candidates(problem, precision, 0)
    suiting = {tile.blocks: tile for tile in tiles if grad_weight_direct.planes_suit(problem, tile, apart.phases)}
    configs = [(apart, replace(tile, direct=True, plane_phases=apart.phases)) for tile in suiting.values()]
    assert configs
    check(rung, problem, dtype, precision, configs=configs)


@gradients
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("reason", LONG)
def test_long_sums(rung, dtype, reason):
    check(rung, LONG[reason], dtype, EXACT[dtype])


@gradients
@arithmetic
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
@pytest.mark.parametrize("reason", FEW)
def test_layouts(rung, dtype, precision, layout, reason):
    check(rung, LARGE[reason], dtype, precision, layout)


@gradients
@pytest.mark.parametrize("reason", ["HiFi-GAN's third layer", "depthwise, 512 groups"])
def test_samples_far_apart(rung, reason):
    check(rung, LARGE[reason], torch.float32, EXACT[torch.float32], place=far_apart)


def reproducible(rung, problem, dtype, precision):
    able(rung, problem, dtype, precision)
    g, x, w = gradient_operands(problem, dtype, "cuda")
    first = computed_gradient(rung, g, x, w, problem, precision=precision)
    for _ in range(20):
        assert torch.equal(first, computed_gradient(rung, g, x, w, problem, precision=precision))


@gradients
@arithmetic
@pytest.mark.parametrize("reason", FEW)
def test_bitwise_reproducible(rung, dtype, precision, reason):
    reproducible(rung, LARGE[reason], dtype, precision)


@dtypes
@pytest.mark.parametrize("reason", FEW)
def test_functions(dtype, reason):
    problem = LARGE[reason]
    g, x, w = gradient_operands(problem, dtype, "cuda")
    results = {
        "grad_input": grad_input(g, w, problem),
        "grad_weight": grad_weight(g, x, problem),
        "grad_bias": grad_bias(g, problem),
    }
    for of, result in results.items():
        assert result.dtype == dtype
        assert verdict(result, *expected(of, g, x, w, problem), gradient_terms(of, problem)) is None


@pytest.mark.parametrize("reason", FEW)
def test_on_a_side_stream(reason):
    problem = LARGE[reason]
    g, x, _ = gradient_operands(problem, torch.float32, "cuda")
    here = grad_weight(g, x, problem)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there = grad_weight(g, x, problem)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(here, there)


def layer_operands(problem, dtype):
    """grad_output, input and weight; and the public function's arguments: the same with bias, requiring gradients."""
    g, x, w = gradient_operands(problem, dtype, "cuda")
    bias = torch.randn(problem.out_channels, device="cuda", dtype=dtype)
    return (g, x, w), [tensor.detach().requires_grad_() for tensor in (x, w, bias)]


def backward(function, g, tensors, problem, precision):
    """The gradients for input, weight and bias, by name."""
    y = function(*tensors, **parameters(problem), precision=precision)
    return dict(zip(OF, torch.autograd.grad(y, tensors, g), strict=True))


@arithmetic
@pytest.mark.parametrize("reason", FEW)
def test_autograd(dtype, precision, reason):
    problem = LARGE[reason]
    (g, x, w), tensors = layer_operands(problem, dtype)
    for of, result in backward(numba_tconv.conv_transpose1d, g, tensors, problem, precision).items():
        both = expected(of, g, x, w, problem, precision)
        assert verdict(result, *both, gradient_terms(of, problem), precision) is None, of


@ours
@pytest.mark.parametrize("reason", FEW)
def test_autograd_by_these_kernels(dtype, precision, reason):
    problem = LARGE[reason]
    (g, x, w), tensors = layer_operands(problem, dtype)
    first = backward(numba_tconv.conv_transpose1d, g, tensors, problem, precision)
    assert torch.equal(first["grad_input"], grad_input(g, w, problem))
    assert torch.equal(first["grad_weight"], grad_weight(g, x, problem))
    assert torch.equal(first["grad_bias"], grad_bias(g, problem))
    for _ in range(20):
        again = backward(numba_tconv.conv_transpose1d, g, tensors, problem, precision)
        assert all(torch.equal(first[of], again[of]) for of in OF)


@ours
def test_a_compiled_training_step(dtype, precision):
    problem = LARGE[FEW[0]]
    (g, _, _), tensors = layer_operands(problem, dtype)
    eager = backward(numba_tconv.conv_transpose1d, g, tensors, problem, precision)
    compiled = backward(torch.compile(numba_tconv.conv_transpose1d, fullgraph=True), g, tensors, problem, precision)
    assert all(torch.equal(eager[of], compiled[of]) for of in OF)


@pytest.mark.parametrize("reason", ["output_padding and padding", "groups, unequal channels"])
def test_first_and_second_derivatives(reason):
    _, tensors = layer_operands(SMALL[reason], torch.float64)

    def function(x, w, bias):
        return numba_tconv.conv_transpose1d(x, w, bias, **parameters(SMALL[reason]))

    assert torch.autograd.gradcheck(function, tensors, nondet_tol=0.0)
    assert torch.autograd.gradgradcheck(function, tensors, nondet_tol=0.0)
