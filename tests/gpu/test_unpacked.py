"""k6 with unpacked weights, on the GPU: against float64, and against packed weights bit for bit."""

from dataclasses import replace

import pytest
import torch

import numba_tconv
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.packed_weights import FrozenWeights
from numba_tconv.kernels.common.split_sums import split
from numba_tconv.kernels.k6_wgmma.choose import choose, split_configs
from numba_tconv.kernels.k6_wgmma.tile import configs
from numba_tconv.kernels.k6_wgmma.unpacked import with_unpacked
from numba_tconv.selection.registry import RUNGS
from tests.parity import LAYOUTS, computed, operands

from .common import able, check

pytestmark = pytest.mark.gpu

K6 = RUNGS["k6_wgmma"]
# Two taps, four and one; groups; a lone last column; windows that samples share; columns for several pairs of tiles.
PROBLEMS = {
    "two taps": Problem(2, 1024, 96, 16, 300, stride=8, padding=4, bias=True),
    "four taps": Problem(1, 1024, 32, 16, 1500, stride=4, padding=7),
    "one tap, few columns": Problem(5, 2048, 128, 8, 9, stride=8, bias=True),
    "groups, a lone last column": Problem(3, 2048, 64, 4, 128, stride=2, padding=1, groups=2, bias=True),
}
in_both = pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "tf32"), (torch.bfloat16, "bf16")], ids=str)


def unpacked_configs(problem, precision):
    """Ways to compute the problem with unpacked weights that differ in more than the tile's size."""
    found = [*configs(problem, precision), *split_configs(problem, precision)]
    ways = {}
    for config in found:
        if way := with_unpacked(split(problem, config.splits), config):
            ways.setdefault((bool(way.bulk_channels), way.tail, way.depths, way.splits > 1), way)
    return list(ways.values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reason", PROBLEMS)
@in_both
def test_against_float64(reason, layout, dtype, precision):
    problem = PROBLEMS[reason]
    able(K6, problem, dtype, precision)
    check(K6, problem, dtype, precision, layout, unpacked_configs(problem, precision))


@pytest.mark.parametrize("reason", PROBLEMS)
@in_both
def test_the_bits_of_packed_weights(reason, dtype, precision):
    problem = PROBLEMS[reason]
    able(K6, problem, dtype, precision)
    x, w, bias = operands(problem, dtype, "cuda")
    for way in unpacked_configs(problem, precision):
        of_both = (computed(K6, x, w, bias, problem, one, precision) for one in (way, replace(way, unpacked=False)))
        assert torch.equal(*of_both), way


@in_both
def test_a_default_call_reads_large_weights_as_they_lie(dtype, precision, packings, monkeypatch):
    """Frozen weights are packed, once. Both give the same bits, and what is written between two calls counts."""
    p = Problem(1, 2048, 1024, 16, 256, stride=8, padding=4)
    able(K6, p, dtype, precision)
    assert choose(p, precision).unpacked
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    x, w, _ = operands(p, dtype, "cuda")
    with torch.no_grad():
        call = lambda weights: numba_tconv.conv_transpose1d(x, weights, None, 8, 4)  # noqa: E731
        first = call(w)
        assert not packings
        frozen = FrozenWeights(w)
        assert torch.equal(first, call(frozen.tensor))
        assert torch.equal(first, call(frozen.tensor))
        assert len(packings) == 1
        w.data.mul_(2)
        assert torch.equal(2 * first, call(w))
