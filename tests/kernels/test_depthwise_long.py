"""The depthwise rung's form for long filters: its layers, tiles and products."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.precision import TF32_ALLOWED
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.depthwise import direct as depthwise_direct
from numba_tconv.kernels.depthwise import long_tile as depthwise_long_config
from numba_tconv.kernels.depthwise import tile as depthwise_config
from numba_tconv.kernels.depthwise.long_tile import COLUMNS, LongConfig, fits, plan, tiles, tiny
from numba_tconv.lab.measure import workloads
from numba_tconv.ptx import GRANULE, SIMULATOR
from numba_tconv.runtime.device import A100, H200, Device
from numba_tconv.runtime.kernel import STATIC_SHARED_LIMIT
from numba_tconv.selection.forward import arithmetic, decide, select
from numba_tconv.selection.registry import RUNGS
from tests.parity import DTYPES, SMALL

PQMF = workloads.get("pqmf").problem
TURING = Device((7, 5), 68, 64 * 1024)
VARIED = {
    "pqmf": PQMF,
    "stride 1": Problem(4, 8, 8, 301, 20_000, padding=150, groups=8),
    "several outputs, a tap more in some phases": Problem(3, 3, 2, 101, 5000, 3, padding=7, output_padding=2),
    "dilation above stride": Problem(2, 4, 2, 41, 3001, 2, padding=40, dilation=3),
    "phases without taps": Problem(2, 2, 2, 33, 3001, 4, dilation=2),
    "eight channels": Problem(2, 8, 8, 40, 3001, 2),
    "sixteen phases": Problem(2, 2, 1, 200, 999, 16, padding=90),
}
selection = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores to select")
varied = pytest.mark.parametrize("name", VARIED)


def configs(problem, dtypes=DTYPES):
    found = [config for dtype in dtypes for config in (*tiles(problem, dtype), *tiny(problem, dtype))]
    assert found
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pqmf_takes_it(dtype):
    assert isinstance(RUNGS["depthwise"].config(PQMF, dtype), LongConfig)
    assert isinstance(RUNGS["depthwise"].config_on(A100, PQMF, dtype, ""), LongConfig)


def test_it_needs_asynchronous_copies():
    assert isinstance(RUNGS["depthwise"].config_on(TURING, PQMF, torch.float32, "ieee"), depthwise_config.Config)


OTHERS = {
    "weights that registers hold": replace(PQMF, in_channels=1, kernel_size=16),
    "more channels": replace(PQMF, in_channels=9),
    "more rows": replace(PQMF, out_channels=5),
    "inputs too far apart": replace(PQMF, dilation=29),
}


@pytest.mark.parametrize("why", OTHERS)
def test_the_rest_does_not(why):
    assert depthwise_long_config.choose(OTHERS[why], torch.float32) is None


def test_what_is_computed_in_registers_stays_there():
    problem = Problem(16, 512, 512, 8, 4096, 4, 2, groups=512)
    assert isinstance(RUNGS["depthwise"].config(problem, torch.bfloat16), depthwise_direct.DirectConfig)


def test_a_problem_of_few_blocks_has_smaller_ones():
    sizes = []
    for length in (65_536, 4000, 400, 40):
        config = depthwise_long_config.choose(replace(PQMF, length=length), torch.float32)
        sizes.append(config.span)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] >= 8 * sizes[-1]


def test_long_sums_are_added_up_in_parts():
    for kernel_size, apart in ((64, False), (65, True), (1000, True)):
        problem = replace(PQMF, kernel_size=kernel_size)
        for config in (*tiles(problem, torch.float32), tiny(problem, torch.float32)[-1]):
            assert config.apart == apart
        assert not any(config.apart for config in tiles(problem, torch.bfloat16))


def test_parts_are_as_many_as_leave_the_smallest_error():
    """136 products: 8 of 17 each instead of 40 of three or four; but not one of all 101 of a lone channel."""
    several = Problem(16, 8, 4, 33, 65536, 2, padding=20, dilation=3)
    alone = Problem(16, 64, 64, 101, 65536, padding=50, groups=64)
    for problem, by_channel in ((several, True), (alone, False)):
        for config in tiles(problem, torch.float32):
            assert config.apart
            assert config.chunk < problem.kernel_size
            assert config.by_channel == by_channel


@varied
def test_tiles_are_what_a_gpu_has(name):
    for config in configs(VARIED[name]):
        assert fits(config)
        assert config.shared_bytes() <= STATIC_SHARED_LIMIT
        assert config.min_blocks * config.threads <= 2048
        assert config.min_blocks <= 32


def met(config):
    """Every sum's taps and inputs, counted from the block's first, of thread 0.

    As the kernel walks: chunk by chunk, each with its window; weights in the order of taps.
    """
    found = {}
    chunks = [config.chunk] * config.full_chunks + [config.last_taps] * (config.last_taps > 0)
    for number, taps in enumerate(chunks):
        begin = config.halo - number * config.hop - config.reach(taps)
        assert begin >= 0
        assert begin % GRANULE == 0
        assert number * config.chunk * config.out_per_group * config.sum_bytes % 16 == 0 or number == 0
        for s, weight, place in config.products(taps):
            assert 0 <= place < config.reach(taps) + config.columns
            k, j = divmod(number * config.chunk * config.out_per_group + weight, config.out_per_group)
            found.setdefault(s, []).append((j, k, begin + place))
    return found


@varied
def test_every_sum_meets_what_the_definition_says(name):
    """Output u reads x[u div stride - shift(k)] by each tap k of its phase."""
    for config in configs(VARIED[name]):
        t, found = config.taps, met(config)
        for j in range(config.out_per_group):
            for p in range(config.columns):
                for r in range(t.stride):
                    expected = [(j, k, config.halo + p - t.shift(k)) for k in t.of_phase(r)]
                    assert sorted(found.pop((j * config.columns + p) * t.stride + r, [])) == expected
        assert not found


@varied
def test_the_window_is_as_wide_as_what_is_read(name):
    for config in configs(VARIED[name]):
        read = [at for places in met(config).values() for *_, at in places]
        last = max(read) + (config.threads - 1) * config.columns
        assert 0 <= min(read) <= last < config.width
        assert config.width % config.vector == 0


@pytest.mark.parametrize("problem", [*VARIED.values(), *SMALL.values()], ids=str)
def test_blocks_cover_a_row(problem):
    """Wherever its inputs, and so its columns, begin in a vector."""
    p = problem
    for config in tiny(p, torch.bfloat16):
        passes, stretches = plan(p, config)
        first = p.padding // p.stride
        for lead in range(config.vector):
            end = (first - lead + stretches * config.span) * p.stride - p.padding
            assert passes == 1
            assert end >= p.out_length
        assert (stretches - 2) * config.span <= p.out_length // p.stride + 1


def test_stores_come_to_the_same_place_of_a_run_again():
    for problem in VARIED.values():
        for config in configs(problem):
            assert config.active * config.vector % config.run == 0
            assert 0 < config.active <= config.threads
            assert config.pitch % 2 == 1


def test_windows_of_neighbours_meet_two_to_a_bank_at_most():
    """Eight lanes load 16 bytes at a time, or sixteen 8 bytes."""
    for columns in COLUMNS:
        for lanes, words in ((8, 4), (16, 2)):
            first = [lane * columns // GRANULE * words for lane in range(lanes)]
            banks = Counter((at + z) % 32 for at in first for z in range(words))
            assert max(banks.values()) <= 2


@selection
def test_the_selection_takes_it_for_short_sums():
    for device in (H200, A100):
        for dtype, precision in ((torch.float32, "ieee"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")):
            assert select(PQMF, dtype, precision, device).name == "depthwise"
        assert arithmetic(PQMF, torch.float32, "", TF32_ALLOWED, device) == "ieee"
    assert select(PQMF, torch.float32, "tf32", H200).name == "k5_mma"
    reasons = decide(PQMF, torch.float32, "ieee", H200).passed_over
    assert reasons["k4_register_tile"].startswith("depthwise is for few channels a group, of up to 128 products")


@selection
def test_long_sums_go_to_tensor_cores():
    problem = replace(PQMF, kernel_size=132, padding=65)
    assert depthwise_long_config.choose(problem, torch.bfloat16)
    assert select(problem, torch.bfloat16, "bf16", H200).name != "depthwise"
    assert select(replace(problem, kernel_size=128), torch.bfloat16, "bf16", H200).name == "depthwise"


def test_the_selection_asks_for_asynchronous_copies():
    assert depthwise_long_config.is_meant(PQMF, torch.float32, A100.cc)
    assert not depthwise_long_config.is_meant(PQMF, torch.float32, TURING.cc)
