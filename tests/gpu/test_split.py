"""k6 and k4 split-K, and k6's tiles with some of the phases, on the GPU."""

import pytest
import torch

import numba_tconv
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common import split_sums
from numba_tconv.kernels.k4_register_tile import choose as k4_choose
from numba_tconv.kernels.k6_wgmma import choose as k6_choose
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.runtime.device import current_device
from numba_tconv.selection.registry import RUNGS
from tests.parity import LAYOUTS, computed, operands, parameters, poisoned

from .common import TENSOR_ARITHMETIC, able, check, tensor_arithmetic

pytestmark = pytest.mark.gpu

K4, K6 = RUNGS["k4_register_tile"], RUNGS["k6_wgmma"]
# Purpose of each. In "odd parts" a split is no whole number of products' depths, and rows of x begin anywhere.
SPLIT = {
    "a decoder's head": Problem(1, 256, 40, 16, 86, stride=8, padding=4, bias=True),
    "samples that share a tile": Problem(3, 96, 24, 7, 21, stride=3, dilation=2, padding=2, bias=True),
    "groups": Problem(2, 192, 48, 5, 130, stride=2, groups=2, bias=True),
    "odd parts": Problem(2, 114, 16, 4, 83, stride=2, padding=1),
    "parts of the phases": Problem(2, 114, 2, 512, 20, stride=256, padding=128, bias=True),
}
# Several samples in a tile; a last tile of few phases; an odd first output; many phases without taps.
PART = {
    "short samples": Problem(13, 24, 3, 512, 9, stride=256, bias=True),
    "few phases more": Problem(2, 16, 3, 131, 150, stride=130, bias=True),
    "odd padding": Problem(2, 16, 2, 300, 70, stride=150, padding=33, output_padding=1),
    "odd stride": Problem(3, 16, 2, 300, 70, stride=151, padding=40),
    "K < stride": Problem(2, 16, 2, 50, 140, stride=200, output_padding=7, bias=True),
}


def cases(problems):
    """The first problem in every precision, the others in two."""
    first, *_ = problems
    few = [pair for pair in TENSOR_ARITHMETIC if pair[1] in ("tf32", "bf16")]
    found = [(reason, *pair) for reason in problems for pair in (TENSOR_ARITHMETIC if reason == first else few)]
    return pytest.mark.parametrize(("reason", "dtype", "precision"), found, ids=[f"{r}-{p}" for r, _, p in found])


def configs_of(problem, precision):
    """One with the fewest and one with the most splits."""
    found = k6_choose.split_configs(problem, precision)
    return [min(found, key=lambda config: config.splits), max(found, key=lambda config: config.splits)]


@cases(SPLIT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_sums(reason, layout, dtype, precision):
    able(K6, SPLIT[reason], dtype, precision)
    check(K6, SPLIT[reason], dtype, precision, layout, configs_of(SPLIT[reason], precision))


@pytest.mark.parametrize("reason", SPLIT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_sums_on_cuda_cores(reason, layout):
    """Fewest and most splits, the better tile and the worse of the first three."""
    problem, here, found = SPLIT[reason], current_device(), []
    for splits in (min(numbers := split_sums.numbers_of_parts(problem)), max(numbers)):
        tiles = k4_choose.candidates(problem, torch.float32, 1, here, splits)[:3]
        best, *_, worst = sorted(tiles, key=lambda tile: k4_choose.cost(problem, tile, here))
        found += [best, worst]
    check(K4, problem, torch.float32, "ieee", layout, [None, *found])


def test_split_sums_on_cuda_cores_into_outputs_that_begin_anywhere():
    problem = Problem(1, 256, 32, 9, 64, padding=4)
    able(K4, problem, torch.float32, "ieee")
    assert k4_choose.choose(problem, torch.float32, 4).splits > 1
    x, w, bias = operands(problem, torch.float32, "cuda")
    aligned, memory = poisoned(problem, torch.float32, "cuda"), torch.full((problem.out_length * 32 + 1,), torch.nan)
    apart = memory.to("cuda")[1:].view(aligned.shape)
    for y in (aligned, apart):
        K4.run(x, w, bias, y, problem)
    assert torch.equal(aligned, apart)


@cases(PART)
@pytest.mark.parametrize("layout", ["contiguous", "misaligned"])
def test_parts_of_the_phases(reason, layout, dtype, precision):
    """By k5, and by k6 with samples joined and as they lie."""
    check(RUNGS["k5_mma"], PART[reason], dtype, precision, layout)
    if K6.refusal(PART[reason], dtype, precision, current_device()) is None:
        found = {config.joined: config for config in k6_config.configs(PART[reason], precision)}
        assert found.keys() == {False, True}
        check(K6, PART[reason], dtype, precision, layout, found.values())


@tensor_arithmetic
def test_split_sums_are_the_same_every_time(dtype, precision):
    problem = SPLIT["a decoder's head"]
    able(K6, problem, dtype, precision)
    x, w, bias = operands(problem, dtype, "cuda")
    config = configs_of(problem, precision)[-1]
    results = [computed(K6, x, w, bias, problem, config, precision) for _ in range(5)]
    assert all(torch.equal(y, results[0]) for y in results)


def test_a_graph_captures_split_sums():
    problem = Problem(1, 512, 256, 16, 86, stride=8, padding=4, bias=True)
    able(K6, problem, torch.bfloat16, "bf16")
    assert k6_choose.choose(problem, "bf16").splits > 1
    x, w, bias = operands(problem, torch.bfloat16, "cuda")

    def run():
        return numba_tconv.conv_transpose1d(x, w, bias, **parameters(problem), variant="k6_wgmma")

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, run())


def test_partial_sums_and_packed_weights_are_all_the_memory_that_a_split_takes():
    problem = Problem(1, 512, 256, 16, 86, stride=8, padding=4)
    able(K6, problem, torch.float32, "tf32")
    x, w, _ = operands(problem, torch.float32, "cuda")
    y = poisoned(problem, torch.float32, "cuda")
    config = k6_choose.choose(problem, "tf32")
    for _ in range(2):
        K6.run(x, w, None, y, problem, config, "tf32")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    K6.run(x, w, None, y, problem, config, "tf32")
    taken = torch.cuda.max_memory_allocated() - before
    sums, packed = 4 * split_sums.partial_sums(problem, config.splits), 4 * w.numel()
    maps = 1 << 18
    assert config.splits > 1
    assert sums + packed <= taken <= sums + packed + maps
