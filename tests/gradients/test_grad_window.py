"""Windows of the gradients on CUDA cores: the threads of a block are enough to fetch them."""

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure import fuzz
from numba_tconv.runtime.device import H200
from numba_tconv.selection.gradient import GRADIENTS
from tests.thorough import thorough

# Stride, kernel size, dilation; channels of a group: those of the random problems, and more phases than threads.
STRUCTURES = [*fuzz.STRUCTURES, (300, 600, 1, 8, 1), (512, 1024, 1, 1, 1), (1000, 1000, 1, 3, 2), (129, 258, 2, 8, 1)]


@pytest.mark.parametrize("name", ["grad_input_tile", "grad_weight_split"])
@pytest.mark.parametrize("groups", thorough([1, 2], always=[2]))
@pytest.mark.parametrize(
    "dtype", thorough([torch.float16, torch.float32, torch.float64], always=[torch.float32]), ids=str
)
def test_each_phase_of_a_window_has_a_thread(name, groups, dtype):
    for stride, kernel_size, dilation, in_per_group, out_per_group in STRUCTURES:
        channels = groups * in_per_group, groups * out_per_group
        problem = Problem(2, *channels, kernel_size, 75, stride=stride, dilation=dilation, groups=groups)
        config = GRADIENTS[name].config(problem, dtype, device=H200)
        for tile in config.tiles if name == "grad_weight_split" else (config,):
            assert 1 <= tile.window.phases <= tile.threads, problem
            fetched = tile.window.slots * tile.window.lanes * tile.window.vector
            assert fetched >= tile.window.width, "all columns"
            if name == "grad_weight_split":
                pairs = tile.phases_of(problem) * out_per_group
                division = tile.division(problem)
                assert division.channel_tiles * tile.channels * division.phase_chunks * tile.phases >= pairs, (
                    "all pairs"
                )
