"""Which partial sums k4 and grad_input_tile put aside whole, and which by their upper halves; on the CPU.

Halves leave room for deeper stages (ptx/halves.py), at the price of more instructions.
"""

from dataclasses import replace

import pytest
import torch

from numba_tconv import workloads
from numba_tconv.kernels import grad_input_config, k4_config
from numba_tconv.kernels.channel_parts import split
from numba_tconv.kernels.device import H200, Device
from numba_tconv.kernels.grad_input_config import (
    MOST_PAIRS,
    PARTIAL_TERMS,
    PARTIAL_TERMS_OF_MANY,
    by_halves,
    shared_need,
    with_stages,
)
from numba_tconv.kernels.grad_input_few import choose as choose_grad_input
from numba_tconv.kernels.k4_cost import choose as choose_k4

F32 = torch.float32


def of(name, **changes):
    return replace(workloads.get(name).problem, **changes)


@pytest.mark.parametrize(
    "problem",
    [of("encodec_u3"), of("encodec_u3", batch=1), of("hifigan_u1", batch=1), of("dac_u3"), of("oobleck_u4")],
    ids=str,
)
def test_halves_make_room_for_stages_of_twice_the_pairs(problem):
    config = choose_grad_input(problem, F32)
    assert config.halves
    assert config.pairs == MOST_PAIRS
    assert config.min_blocks * shared_need(config) <= H200.shared_per_multiprocessor
    assert config.min_blocks * shared_need(replace(config, halves=False)) > H200.shared_per_multiprocessor


@pytest.mark.parametrize("name", ["patch", "kb79", "kb74", "kb64"])
def test_sums_are_put_aside_whole_where_there_is_room_or_a_thread_has_few(name):
    config = choose_grad_input(of(name), F32)
    assert config.partial
    assert not config.halves


def test_threads_of_few_sums_put_them_aside_whole_on_gpus_with_less_shared_memory_too():
    small, sizes = Device((8, 6), 84, 100 * 1024), (64, 128, 8, 8, 8, 4)
    config = with_stages(of("encodec_u3"), F32, sizes, small)
    assert (config.partial > 0, config.halves, config.min_blocks) == (True, False, 2)


def test_only_float32_sums_are_put_aside():
    for dtype in (torch.float64, torch.bfloat16):
        config = grad_input_config.usual(of("encodec_u3"), dtype)
        assert by_halves(config) is config
        assert not config.partial


@pytest.mark.parametrize("direction", ["forward", "grad_input"])
def test_sums_are_no_longer_than_torchs(direction):
    """Forward, than torch's over input channels; of the gradient, than half of its one sum; but where all are short."""
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
                config = choose_grad_input(problem, F32)
                terms = config.partial * config.channels * config.channel_taps
                depth = problem.out_channels_per_group * problem.kernel_size // config.splits
                limit = max(PARTIAL_TERMS, min(PARTIAL_TERMS_OF_MANY, depth // 2))
            assert (terms if config.partial else depth) <= limit, problem


def test_k4_takes_halves_for_deeper_stages_and_for_two_parts_of_few_sums():
    config = choose_k4(of("encodec_u1"), F32, 2)
    assert (config.block_k, config.halves) == (16, True)
    assert not k4_config.fits(replace(config, halves=False), H200)
    part = split(of("demucs_u2"), 3)
    sizes = dict(block_m=128, block_n=128, thread_m=8, thread_n=8, lanes_m=8, min_blocks=2, x_vector=4)
    first, second = k4_config.ways_aside(part, k4_config.make(part, F32, 16, **sizes))
    assert first.halves
    assert not second.halves
    assert k4_config.fits(second, H200)


def test_k4_puts_128_sums_aside_whole_where_they_fit_and_those_of_unequal_taps():
    for problem in (of("hifigan_u1"), of("hifigan_u2", batch=1), of("patch"), of("seamless_u1")):
        config = choose_k4(problem, F32, 4)
        assert config.partial
        assert not config.halves
