"""When k4 and grad_input_tile accumulate sums in blocks."""

from dataclasses import replace

import pytest
import torch

from numba_tconv.gradients.input.tile import choose as grad_input_choose
from numba_tconv.gradients.input.tile.tile import PARTIAL_TERMS, PARTIAL_TERMS_OF_MANY
from numba_tconv.kernels.common.split_sums import split
from numba_tconv.kernels.k4_register_tile.choose import choose as choose_k4
from numba_tconv.lab.measure import workloads

F32 = torch.float32


def of(name, **changes):
    return replace(workloads.get(name).problem, **changes)


def test_only_float32_sums_are_put_aside():
    for dtype in (torch.float64, torch.bfloat16):
        assert not grad_input_choose.usual(of("encodec_u3"), dtype).partial


@pytest.mark.parametrize("direction", ["forward", "grad_input"])
def test_sums_are_no_longer_than_torchs(direction):
    """Forward, than torch's over input channels; gradient, than half of its one sum; but where all are short."""
    for workload in workloads.WORKLOADS.values():
        for batch in (1, workload.problem.batch):
            problem = replace(workload.problem, batch=batch)
            if direction == "forward":
                config = choose_k4(problem, F32, 1)
                part, taps = split(problem, config.splits), problem.taps.taps_per_row
                terms = config.partial * config.block_k * config.tap_chunk
                limit = max(192, min(256, problem.in_channels_per_group))  # torch adds up the taps' sums over them
                depth = part.in_channels_per_group * taps
            else:
                config = grad_input_choose.choose(problem, F32)
                terms = config.partial * config.channels * config.channel_taps
                depth = problem.out_channels_per_group * problem.kernel_size // config.splits
                limit = max(PARTIAL_TERMS, min(PARTIAL_TERMS_OF_MANY, depth // 2))
            assert (terms if config.partial else depth) <= limit, problem
