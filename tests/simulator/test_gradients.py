"""Every gradient in the CUDA simulator, in tiny tiles with seams, tails and splits, against the reference."""

from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.bias import splits_of
from numba_tconv.gradients.input.split_k import split
from numba_tconv.gradients.input.tile import pack
from numba_tconv.gradients.input.tile import tile as grad_input_config
from numba_tconv.gradients.input.tile.choose import JOINED
from numba_tconv.gradients.weight.split import kernel as grad_weight_split
from numba_tconv.gradients.weight.split import tile as grad_weight_config
from numba_tconv.gradients.weight.split.choose import splits_of as splits_of_weight
from numba_tconv.runtime import device
from numba_tconv.runtime.layout import Layout
from numba_tconv.selection.gradient import GRADIENTS, grad_bias, grad_input, grad_weight
from tests.gradient_parity import (
    OF,
    ON_CUDA_CORES,
    as_on_a_gpu,
    check_gradient_configs,
    gradient_answers,
    gradient_operands,
    operator_arguments,
    poisoned_gradient,
    references_gradient,
)
from tests.parity import CROPPED, DTYPES, LAYOUTS, SMALL, far_apart, verdict
from tests.thorough import thorough

gradients = pytest.mark.parametrize("rung", ON_CUDA_CORES.values(), ids=ON_CUDA_CORES)

# Independent of the index formula: strided, grouped, gaps between phases, several tiles.
FEW = [
    "K = 2s, the usual decoder layer",
    "groups, unequal channels",
    "gcd(stride, dilation) = 2, three rows",
    "positions past one tile, strided",
]
SMALL_GPU = replace(device.H200, multiprocessors=2)  # splits of several stages


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    monkeypatch.setattr(device, "of", lambda index: SMALL_GPU)


def check(rung, problem, dtype, layout="contiguous", place=lambda tensor: tensor):
    """Every tiny configuration computes the gradient."""
    check_gradient_configs(rung, problem, dtype, rung.tiny_configs(problem, dtype), layout, place)


@gradients
@pytest.mark.parametrize("dtype", thorough([torch.float32, torch.float16], always=[torch.float32]), ids=str)
@pytest.mark.parametrize("reason", thorough(CROPPED, always=[*CROPPED][::2]))
def test_each_end_is_cropped_by_its_own_number(rung, dtype, reason):
    check(rung, CROPPED[reason], dtype)


@gradients
@pytest.mark.parametrize("reason", thorough(SMALL, always=[*[*SMALL][::6], "depthwise"]))
def test_small_problems(rung, reason):
    check(rung, SMALL[reason], torch.float32)


@gradients
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
@pytest.mark.parametrize("reason", thorough(FEW, always=FEW[2:3]))
def test_dtypes(rung, dtype, reason):
    check(rung, SMALL[reason], dtype)


@gradients
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
@pytest.mark.parametrize("reason", thorough(FEW[:2], always=FEW[:1]))
def test_layouts(rung, layout, reason):
    check(rung, SMALL[reason], torch.float32, layout)


@gradients
def test_samples_far_apart(rung):
    check(rung, SMALL["output_padding and padding"], torch.float32, place=far_apart)


@pytest.mark.parametrize("variant", [name for name, rung in ON_CUDA_CORES.items() if rung.of == "grad_input"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("reason", thorough(FEW, always=FEW[2:3]))
def test_nan_and_infinity_go_where_the_definition_sends_them(variant, value, reason):
    problem = SMALL[reason]
    g, x, w = gradient_operands(problem, torch.float32)
    g[0, 0, 0] = g[-1, -1, problem.out_length // 2] = g[0, 1, -1] = value
    oracle = references_gradient("grad_input", g, x, w, problem)
    for config in GRADIENTS[variant].tiny_configs(problem, torch.float32):
        result = grad_input(g, w, problem, variant, config)
        for which in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(which(result), which(oracle)), config


def test_short_samples_begin_tiles_of_their_own():
    """Where joined samples would need more tiles; windows hold what follows a tile's last column."""
    rung, problem = GRADIENTS["grad_input_tile"], Problem(4, 3, 2, 4, 32, stride=2, padding=1)
    assert (32, 33) in [config.columns(problem) for config in rung.tiny_configs(problem, torch.float32)]
    check(rung, problem, torch.float32)


def test_more_tiles_of_columns_than_an_axis_of_the_grid_has(monkeypatch):
    monkeypatch.setattr("numba_tconv.kernels.common.arguments.GRID_AXIS", 2)
    check(GRADIENTS["grad_input_tile"], Problem(1, 1, 2, 4, 80, stride=2, padding=1), torch.float32)


# Some phases have one more tap.
UNEQUAL = {
    "two phases": Problem(2, 4, 6, 5, 13, stride=2, padding=1),
    "one tap left over": Problem(2, 3, 4, 11, 12, stride=5, padding=3),
    "groups, three left over": Problem(2, 6, 4, 8, 9, stride=5, padding=11, output_padding=2, groups=2),
    "dilation, three phases": Problem(1, 3, 5, 7, 16, stride=6, padding=5, dilation=4),
    "one tap of each phase, one position": Problem(1, 5, 3, 3, 1, stride=2),
    "chunks that are not whole": Problem(1, 2, 3, 19, 11, stride=2, dilation=3),
}


@pytest.mark.parametrize(
    ("reason", "dtype"),
    [
        *((reason, torch.float32) for reason in UNEQUAL),
        ("one tap left over", torch.bfloat16),
        *thorough([("one tap left over", dtype) for dtype in (torch.float64, torch.float16)], always=[]),
    ],
    ids=str,
)
def test_two_kinds_of_blocks(reason, dtype):
    """Whole rows of taps, and the rest."""
    rung, problem = GRADIENTS["grad_weight_split"], UNEQUAL[reason]
    assert any(config.rest_tile for config in rung.tiny_configs(problem, dtype))
    check(rung, problem, dtype)


def test_two_kinds_of_blocks_are_split_alike(monkeypatch):
    """Sums of the rest lie among the others, also in a split that has no stage of the rest."""
    gpu = replace(device.H200, multiprocessors=24)
    monkeypatch.setattr(device, "of", lambda index: gpu)
    problem = Problem(1, 2, 3, 5, 64, stride=2, padding=1)
    check(GRADIENTS["grad_weight_split"], problem, torch.float32)
    of_two = [config for config in grad_weight_config.tiny(problem, torch.float32) if config.rest_tile]
    splits = [splits_of_weight(problem, config, gpu)[0] for config in of_two]
    without = [config.rest_tile.stages(problem) < count for config, count in zip(of_two, splits, strict=True)]
    assert {(count > 1, none) for count, none in zip(splits, without, strict=True)} >= {(True, False), (True, True)}


@pytest.mark.parametrize("reason", UNEQUAL)
def test_blocks_of_whole_rows_leave_the_rest_alone(reason):
    """Nobody knows which of them come first."""
    problem = UNEQUAL[reason]
    g, x, _ = gradient_operands(problem, torch.float32)
    whole = problem.kernel_size // problem.taps.rows * problem.taps.rows
    for config in grad_weight_config.tiny(problem, torch.float32):
        if config.rest_tile:
            splits, launch = grad_weight_split._prepared.__wrapped__(
                problem, config, Layout.of(g), Layout.of(x), SMALL_GPU
            )
            assert splits == 1
            launch.grid = (config.own_blocks(problem), 1, 1)
            result = poisoned_gradient("grad_weight", problem, torch.float32)
            launch(g, x, result)
            assert result[..., :whole].isfinite().all(), config
            assert result[..., whole:].isnan().all(), config


def test_vectors_of_the_input():
    """Copies of 16 bytes, where rows and samples begin at multiples of them."""
    rung = GRADIENTS["grad_weight_split"]
    for problem in (SMALL["stride 1, dilation"], UNEQUAL["one tap left over"]):
        g, x, w = gradient_operands(problem, torch.float32)
        oracle = references_gradient("grad_weight", g, x, w, problem)
        for config in rung.tiny_configs(problem, torch.float32):
            result = grad_weight(g, x, problem, config=config.copying_vectors())
            assert verdict(result, oracle.float(), oracle) is None, config


@pytest.mark.parametrize("layout", ["contiguous", "misaligned"])
def test_the_configurations_that_are_chosen(layout):
    problem = SMALL["stride 1, dilation"]
    g, x, w = gradient_operands(problem, torch.float32, layout=layout)
    results = {
        "grad_input": grad_input(g, w, problem),
        "grad_weight": grad_weight(g, x, problem),
        "grad_bias": grad_bias(g, problem),
    }
    for of, result in results.items():
        assert verdict(result, *gradient_answers(of, g, x, w, problem)) is None, of


def test_the_threads_of_joined_blocks():
    """Two groups of rows and four vectors of columns a thread, in one warp, mostly past the end; three stages."""
    problem = Problem(1, 126, 3, 4, 9, stride=2, padding=1)
    sizes = JOINED._asdict() | dict(block_m=128, block_n=32, partial=1)
    config = grad_input_config.make(problem, torch.float32, 2, **sizes)
    check_gradient_configs(GRADIENTS["grad_input_tile"], problem, torch.float32, [config])


def test_tiles_that_are_no_powers_of_two():
    """Twelve rows and columns a thread, the last not whole; two splits; weights of a stage in two squares."""
    problem = Problem(2, 100, 24, 4, 51, stride=2, padding=1)
    sizes = dict(block_m=96, block_n=96, thread_m=12, thread_n=12, lanes_m=4, min_blocks=1, partial=1, splits=2)
    config = grad_input_config.make(split(problem, 2), torch.float32, 24, **sizes)
    assert config.block_n % config.threads
    assert config.channels * config.tap_chunk * config.phases > pack.SIDE
    check_gradient_configs(GRADIENTS["grad_input_tile"], problem, torch.float32, [config])


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("reason", FEW[:2])
def test_the_operators_of_the_backward_pass(of, reason):
    problem = SMALL[reason]
    g, x, w = gradient_operands(problem, torch.float32)
    result = as_on_a_gpu(of, *operator_arguments(of, problem, g, x, w))
    assert verdict(result, *gradient_answers(of, g, x, w, problem)) is None


def test_what_cannot_be_computed_is_refused():
    problem = SMALL["stride 1, dilation"]
    g, x, w = gradient_operands(problem, torch.float32)
    with pytest.raises(NotImplementedError, match="takes float64"):
        grad_input(g.to(torch.complex64), w.to(torch.complex64), problem)
    with pytest.raises(ValueError, match="grad_weight_split computes grad_weight"):
        grad_input(g, w, problem, "grad_weight_split")
    with pytest.raises(ValueError, match="unknown"):
        grad_weight(g, x, problem, "grad_weight")


def test_no_outputs_no_gradient():
    """torch allows an output without samples; nothing reached it."""
    problem = Problem(2, 2, 3, 3, 12, padding=7)
    assert problem.out_length == 0
    g, x, w = gradient_operands(problem, torch.float32)
    for result in (grad_input(g, w, problem), grad_weight(g, x, problem), grad_bias(g, problem)):
        assert result.eq(0).all()


def test_the_reductions_are_split_into_several_stages():
    """Else splits, stages and partial sums would not be tested."""
    problem = SMALL["positions past one tile, strided"]
    tiny = [config for config in grad_weight_config.tiny(problem, torch.float32) if config.partial]
    splits = [splits_of_weight(problem, config, SMALL_GPU) for config in tiny]
    assert any(count > 1 for count, _ in splits)
    assert any(length > 2 * config.partial for (_, length), config in zip(splits, tiny, strict=True))
    assert any(
        splits_of(problem, config, SMALL_GPU)[0] > 1
        for config in GRADIENTS["grad_bias"].tiny_configs(problem, torch.float32)
    )
