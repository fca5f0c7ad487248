"""Weights packed in the call: kernels read what was packed, whatever runs before and after."""

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.packed_weights import FrozenWeights
from numba_tconv.kernels.k6_wgmma import choose as k6_choose
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.selection.registry import RUNGS
from tests.parity import computed, operands

from .common import ARITHMETIC, able, check

pytestmark = pytest.mark.gpu

# Reason and problem: how a box of weights is copied (kernels/common/weight_box.py), in "a decoder's head" along phases;
# and work beside the packing: split-K, a copy of x.
PROBLEMS = {
    "along channels": Problem(3, 128, 128, 3, 514, bias=True),
    "a decoder's head": Problem(1, 512, 64, 16, 86, stride=8, padding=4, bias=True),
    "whole tiles": Problem(2, 256, 64, 16, 256, stride=8, padding=4),
    "odd lengths": Problem(2, 96, 48, 10, 131, stride=5, padding=2, bias=True),
    "one by one": Problem(2, 37, 53, 7, 301, stride=3, padding=2, output_padding=1),
    "groups": Problem(2, 64, 96, 4, 250, stride=2, groups=4),
    "parts of the phases": Problem(9, 80, 8, 512, 20, stride=256),
}
PACKING = "k4_register_tile", "k5_mma", "k5_dmma", "k6_wgmma"
cases = pytest.mark.parametrize(
    ("rung", "what", "dtype", "precision"),
    [(rung, what, *pair) for rung in PACKING for what in PROBLEMS for pair in ARITHMETIC],
)


def runner(rung, what, dtype, precision):
    """Run a rung on x, w and bias, into memory full of NaN."""
    problem = PROBLEMS[what]
    able(RUNGS[rung], problem, dtype, precision)

    def run(x, w, bias):
        return computed(RUNGS[rung], x, w, bias, problem, None, precision)

    return run, *operands(problem, dtype, "cuda")


@cases
def test_outputs_are_those_of_weights_packed_before(rung, what, dtype, precision):
    run, x, w, bias = runner(rung, what, dtype, precision)
    assert torch.equal(run(x, w, bias), run(x, FrozenWeights(w).tensor, bias))
    check(RUNGS[rung], PROBLEMS[what], dtype, precision)


@cases
def test_what_was_written_just_before_is_what_is_read(rung, what, dtype, precision):
    """Kernels that still run at the call write x and w, many times and into the same memory."""
    run, x, w, bias = runner(rung, what, dtype, precision)
    own_x, own_w, frozen = torch.empty_like(x), torch.empty_like(w), FrozenWeights(w)
    wanted = [run(x * number, w, bias) for number in (1, 2)], [run(x, w * number, bias) for number in (1, 2)]
    for turn in range(6):
        torch.cuda._sleep(100_000)
        torch.mul(x, 1 + turn % 2, out=own_x)
        of_frozen = run(own_x, frozen.tensor, bias)
        own_x.fill_(torch.nan)
        torch.mul(w, 1 + turn % 2, out=own_w)
        packed_now = run(x, own_w, bias)
        own_w.fill_(torch.nan)
        assert torch.equal(of_frozen, wanted[0][turn % 2])
        assert torch.equal(packed_now, wanted[1][turn % 2])


@cases
def test_a_graph_packs_at_every_replay(rung, what, dtype, precision):
    run, x, w, bias = runner(rung, what, dtype, precision)
    own_x, own_w = x.clone(), w.clone()
    run(own_x, own_w, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = own_x * 1
        y = run(captured, own_w * 1, bias)
        captured.zero_()
    for number in (1, -2, 3):
        torch.mul(x, number, out=own_x)
        torch.mul(w, number, out=own_w)
        graph.replay()
        assert torch.equal(y, run(x * number, w * number, bias))


@pytest.mark.parametrize(
    "candidates", [k6_config.configs, k6_choose.split_configs], ids=["whole sums", "parts of sums"]
)
def test_a_last_column_apart_follows_a_packing(candidates):
    problem = Problem(2, 512, 64, 16, 256, stride=8, padding=4)
    able(RUNGS["k6_wgmma"], problem, torch.float32, "tf32")
    config = next(c for c in candidates(problem, "tf32") if c.tail)
    x, w, bias = operands(problem, torch.float32, "cuda")
    first, *others = (
        computed(RUNGS["k6_wgmma"], x, weights, bias, problem, config, "tf32")
        for weights in (w, FrozenWeights(w).tensor, w)
    )
    assert all(torch.equal(first, other) for other in others)
    check(RUNGS["k6_wgmma"], problem, torch.float32, "tf32", configs=[config])
