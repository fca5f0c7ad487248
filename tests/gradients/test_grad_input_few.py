"""Which problems grad_input_tile splits, in which tiles and splits."""

import re
from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.input.split_k import numbers_of_parts, split, summed
from numba_tconv.gradients.input.tile.choose import NARROWER, TALL, choose, rounds, tiles_of_few, usual, with_stages
from numba_tconv.gradients.input.tile.kernel import InputTile, make_kernel
from numba_tconv.gradients.input.tile.pack import make_kernel as make_pack
from numba_tconv.gradients.input.tile.pack import pack_blocks, prepare_pack
from numba_tconv.kernels.common import split_sums
from numba_tconv.lab.machine_code import offline
from numba_tconv.lab.measure import workloads
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.device import A100, H200
from numba_tconv.runtime.kernel import Kernel
from numba_tconv.runtime.layout import NO_GPU, Layout
from tests.lab.test_offline import AMPERE, HOPPER, check_memory, needs_sass
from tests.parity import SMALL

F32 = torch.float32


def of(name, **changes):
    return replace(workloads.get(name).problem, **changes)


SHORT = {
    "hifigan_u1, one sample": of("hifigan_u1", batch=1),
    "oobleck_u1": of("oobleck_u1"),
    "oobleck_u1, one sample": of("oobleck_u1", batch=1),
    "seamless_u1, one sample": of("seamless_u1", batch=1),
    "dac_u1": of("dac_u1"),
    "waveglow": of("waveglow"),
    "patch, one sample": of("patch", batch=1),
    "head": of("head"),
}
short = pytest.mark.parametrize("reason", SHORT)


@short
def test_few_blocks_become_many(reason):
    """Most multiprocessors are busy most of the time, unlike with whole sums."""
    problem, config = SHORT[reason], choose(SHORT[reason], F32)
    assert config.splits > 1
    part = split(problem, config.splits)
    assert replace(config.alone, early_launch=False) in tiles_of_few(part.layer, H200)
    blocks = config.column_tiles(part) * config.row_tiles(part) * part.groups
    assert blocks / (rounds(part, config, H200) * H200.multiprocessors) > 0.75


@pytest.mark.parametrize("workload", ["kb64", "hifigan_u2", "dac_u2", "oobleck_u4", "patch", "seamless_u1"])
def test_many_blocks_keep_their_sums(workload):
    problem = of(workload)
    assert choose(problem, F32) == replace(usual(problem, F32), early_launch=True, overlaps_packing=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@short
def test_other_types_keep_their_sums(reason, dtype):
    """Partial sums are float32, too few digits for a double; half types have tensor cores, but in odd layers."""
    assert choose(SHORT[reason], dtype).splits == 1


@short
def test_early_where_the_gpu_can(reason):
    for device, early in ((H200, True), (A100, False)):
        config = choose(SHORT[reason], F32, device)
        assert config.early_launch == early


@pytest.mark.thorough
@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
def test_windows_are_copied_while_weights_are_packed():
    """The main kernel waits between its first window, copied by elements, and its first weights, in vectors."""

    def words(kernel, cc):
        return re.findall(r"griddepcontrol\.\w+|\bld\.(?!param)|cp\.async\.c\w", offline.report(kernel, cc).ptx)

    config = choose(of("hifigan_u4", batch=1), F32)
    assert config.overlaps_packing
    config = config.alone
    assert words(make_pack(config, overlapped=True), HOPPER)[:2] == ["griddepcontrol.launch_dependents", "ld."]
    assert words(make_pack(config, overlapped=False), HOPPER)[0] == "ld."
    main = words(make_kernel(config), HOPPER)
    assert main.count("griddepcontrol.wait") == 1
    window, weights = (main.index(copy) for copy in ("cp.async.ca", "cp.async.cg"))
    assert window < main.index("griddepcontrol.wait") < weights
    older = choose(of("hifigan_u4", batch=1), F32, A100)
    assert not older.overlaps_packing
    for kernel in (make_pack(older.alone, older.overlaps_packing), make_kernel(older.alone)):
        assert not any(word.startswith("griddepcontrol") for word in words(kernel, AMPERE))


# Slower at batch 1 where all begin beside the pack.
SLOWER = "waveglow", "istft", "head"  # by 1.3 to 2.4 times
FASTER = (
    *(
        "small",
        "pqmf",
        "convtasnet",
        "hifigan_u3",
        "hifigan_u4",
        "kb74",
        "kb79",
        "encodec_u4",
    ),  # the pack has few blocks
    *("encodec_u1", "demucs_u2", "xcodec_u1", "seamless_u1", "hifigan_u2"),  # the pack has many, the main kernel enough
)


def test_blocks_begin_beside_the_pack_where_they_spread():
    assert not any(choose(of(name, batch=1), F32).overlaps_packing for name in SLOWER)
    assert not choose(of("waveglow"), F32).overlaps_packing
    assert all(choose(of(name, batch=1), F32).overlaps_packing for name in FASTER)
    assert not any(choose(of(name, batch=1), F32, A100).overlaps_packing for name in (*SLOWER, *FASTER))


@short
def test_the_blocks_that_pack_are_as_many_as_counted(reason):
    problem, config = SHORT[reason], choose(SHORT[reason], F32)
    packed, launch = prepare_pack(problem, config, Layout.contiguous(problem.weight_shape, F32, NO_GPU))
    assert launch.grid == (pack_blocks(problem, config), 1, 1)
    assert launch.kernel is make_pack(config.alone, config.overlaps_packing)
    assert packed.numel() == pack_blocks(problem, config) // -(-config.block_m // 32) * config.w_stage


def test_parts_are_of_whole_channels_and_counted_in_32_bits():
    for problem in (*SHORT.values(), *SMALL.values(), of("kb64"), Problem(1, 64, 48, 4, 2**25, 2)):
        for splits in numbers_of_parts(problem):
            part = split(problem, splits)
            assert part.out_channels_per_group * splits == problem.out_channels_per_group
            assert part.in_channels_per_group == problem.in_channels_per_group
            assert part.out_length == problem.out_length
            assert splits == 1 or split_sums.partial_sums(summed(problem), splits) <= split_sums.MOST_SUMS
    assert numbers_of_parts(Problem(1, 64, 48, 4, 2**25, 2)) == [1]


@short
def test_any_number_of_parts_shares_the_kernels(reason):
    problem = SHORT[reason]
    rung, config = InputTile(), choose(problem, F32)
    assert [step.name for step in rung.steps(config, problem)] == ["pack", "main", "add up"]
    kernels = [step.kernel for step in rung.steps(config, problem)]
    assert [kernel.name for kernel in kernels] == ["grad_input_pack", "grad_input_tile", "partial_sum"]
    assert all(isinstance(kernel, Kernel) for kernel in kernels)
    others = [step.kernel for step in rung.steps(replace(config, splits=2 * config.splits), problem)]
    assert [kernel.key for kernel in kernels] == [kernel.key for kernel in others]
    alone = [step.kernel.key for step in rung.steps(replace(config, splits=1), problem)]
    assert alone == [kernel.key for kernel in kernels[:2]]


def test_a_layer_has_few_tiles_whatever_the_length():
    for name in ("hifigan_u1", "oobleck_u1", "seamless_u1"):
        lengths = (int(2 ** (e / 4)) for e in range(12, 60))
        found = {choose(of(name, batch=batch, length=n), F32).alone for n in lengths for batch in (1, 8)}
        assert len(found) <= 8, name


def test_tall_tiles_are_for_rows_that_others_leave_empty():
    def is_tall(config):
        return (config.block_m, config.block_n) == TALL[:2]

    assert is_tall(usual(of("dac_u4"), F32))
    assert is_tall(usual(of("dac_u3"), F32))
    assert not is_tall(usual(of("dac_u2"), F32))  # joined blocks have no empty rows there, either
    assert not is_tall(usual(of("dac_u4"), torch.bfloat16))


@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@needs_sass
@pytest.mark.parametrize(
    ("sizes", "workload"), [(TALL, "dac_u4"), pytest.param(NARROWER, "seamless_u1", marks=pytest.mark.thorough)]
)
def test_tiles_that_are_no_powers_of_two_stay_in_their_registers(sizes, workload):
    config = with_stages(of(workload), F32, sizes, H200)
    report = offline.report(make_kernel(config), HOPPER)
    check_memory(report, 255)
    assert report.blocks_per_multiprocessor >= config.min_blocks == 2


def test_the_last_window_needs_no_tile_of_its_own():
    """What follows a batch's last position is only read: 256 positions of one sample are two tiles of 128."""
    problem = of("oobleck_u1", batch=1)
    config = replace(usual(problem, F32), block_n=128)
    assert config.tap_chunk == 2
    assert config.column_tiles(problem) == 2


def test_short_samples_begin_tiles_where_those_are_fewer():
    """End to end, two samples of 256 positions are 257 columns and 256, which would be five tiles of 128."""
    problem = of("oobleck_u1", batch=2)
    config = replace(usual(problem, F32), block_n=128)
    assert config.tap_chunk == 2
    assert config.columns(problem) == (256, 257)
    assert config.column_tiles(problem) == 4
    shorter = replace(problem, length=200)  # end to end 401 columns, four tiles, and so are two of two
    assert config.columns(shorter) == (201, 201)
    assert config.column_tiles(shorter) == 4
