"""The problems of the memory checks reach every path of the gradients' kernels (see test_sanitized.py)."""

import pytest
import torch

from numba_tconv.gradients import bias as grad_bias
from numba_tconv.gradients.weight.split import choose as grad_weight_choose
from numba_tconv.gradients.weight.wgmma import choose as grad_weight_wgmma_choose
from numba_tconv.gradients.weight.wgmma import sum as grad_weight_sum
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime import device
from numba_tconv.selection.gradient import GRADIENTS

from .gpu.sanitized import as_if_large
from .gradient_parity import ON_CUDA_CORES
from .test_sanitized import BOTH, of_rung, values


@pytest.fixture(scope="module", autouse=True)
def small_gpu():
    with as_if_large():
        yield


def gradient_properties(case):
    """Properties of the two gradients in tiles."""
    gpu, p = device.current_device(), case.problem
    config = case.config or GRADIENTS[case.rung].config(p, case.dtype, gpu)
    if case.rung == "grad_weight_split":
        own = {"splits": grad_weight_choose.splits_of(p, config, gpu)[0] > 1, "two kinds": config.rest_tile is not None}
    else:
        own = {
            "parts": config.splits > 1,
            "phases of one tap less": config.long_phases > 0,
        }
    return {
        **own,
        "partial sums": config.partial > 0,
        "chunks of taps": config.tap_chunk < p.taps.taps_per_row,
        "parts of the phases": config.phases < min(p.taps.rows, p.kernel_size),
        "rows at 16 bytes": p.length * case.dtype.itemsize % 16 == 0,
    }


@pytest.mark.parametrize("rung", ["grad_input_tile", "grad_weight_split"])
def test_gradients(rung):
    found = values(map(gradient_properties, of_rung(rung)))
    assert all(occurring == BOTH for occurring in found.values()), found


def test_splits_of_the_bias():
    gpu = device.current_device()
    configs = [
        (case, case.config or GRADIENTS["grad_bias"].config(case.problem, case.dtype)) for case in of_rung("grad_bias")
    ]
    assert {grad_bias.splits_of(case.problem, config, gpu)[0] > 1 for case, config in configs} == BOTH


@pytest.mark.parametrize("rung", ON_CUDA_CORES)
def test_dtypes_of_gradients(rung):
    assert {case.dtype for case in of_rung(rung)} == {torch.float32, torch.float64, torch.bfloat16}


@pytest.mark.parametrize("rung", ["grad_input_depthwise", "grad_weight_depthwise"])
def test_gradients_of_few_channels(rung):
    configs = [case.config or GRADIENTS[rung].config(case.problem, case.dtype) for case in of_rung(rung)]
    assert {config.from_memory for config in configs} == BOTH
    assert {case.layout for case in of_rung(rung)} >= {"contiguous", "expanded"}
    assert {config.positions == config.vector for config in configs} == BOTH


def weight_properties(case):
    """Properties of grad_weight_wgmma's cases."""
    gpu = device.current_device()
    apart, config = GRADIENTS[case.rung].config(case.problem, case.dtype, gpu, case.precision)
    _, pairs, channels = config.tiles_of(case.problem)
    second = grad_weight_sum.config_of(case.problem, case.dtype, aligned=True)
    return {
        "stored as the gradient": config.direct,
        "second stage by vectors": not config.direct and second.run > 1,
        "several channels a thread": not config.direct and second.channels > 1,
        "precision": case.precision,
        "planes": apart is not None,
        "planes, stored as the gradient": config.plane_phases > 0,
        "warpgroups in turn": config.alternate,
        "rows that begin unlike": config.alike > 1,
        "beginnings cleared": config.clears > 0,
        "boxes in pieces": config.pieces > 1,
        "pairs of any tap": config.by_taps,
        "pairs of any tap, rows that begin unlike": config.by_taps and config.alike > 1,
        "pairs of any tap, beginnings cleared": config.by_taps and config.clears > 0,
        "pairs of any tap, stored as the gradient": config.by_taps and config.direct,
        "pairs of any tap, in turn": config.by_taps and config.alternate,
        "words at odd places": bool(config.odd),
        "chunks of taps": config.tap_chunk < case.problem.taps.taps_per_row,
        "several tiles": pairs * channels > 1,
        "splits": grad_weight_wgmma_choose.splits_of(case.problem, config, gpu) > 1,
    }


def input_properties(case):
    """Properties of grad_input_wgmma's cases."""
    config = GRADIENTS[case.rung].config(case.problem, case.dtype, precision=case.precision)
    along, across, _ = config.tiles_of(case.problem)
    return {
        "precision": case.precision,
        "warpgroups in turn": config.alternate,
        "elements one by one": config.halves,
        "masked": config.entries * config.itemsize < 128,
        "several stages": config.stages_of(case.problem) > 1,
        "stages run through": config.through,
        "stages run through in turn": config.through and config.alternate,
        "stages run through, elements one by one": config.through and config.halves,
        "stages run through, groups": config.through and case.problem.groups > 1,
        "rows that begin unlike": config.sheared > 1,
        "rows of eight kinds": config.sheared == 8,
        "rows that begin unlike, stages run through": config.sheared > 1 and config.through,
        "beginnings and ends cleared": config.clears,
        "cleared in a tile that is not the first": config.clears and along > 1,
        "cleared in turn": config.clears and config.alternate,
        "several tiles": along * across > 1,
        "parts of a tile": config.split_k,
        "parts of a tile that run through": config.split_k and config.through,
        "parts of a tile, cleared": config.split_k and config.clears,
        "pairs of positions": case.problem.length % 2 == 0,
    }


def planes_properties(case):
    """Properties of grad_input_planes' cases."""
    apart, rung, _ = GRADIENTS[case.rung].config(case.problem, case.dtype, precision=case.precision)
    return {"precision": case.precision, "planes": apart is not None, "k6": rung == "k6_wgmma"}


@pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")
@pytest.mark.parametrize(
    ("rung", "properties"),
    [
        ("grad_weight_wgmma", weight_properties),
        ("grad_input_wgmma", input_properties),
        ("grad_input_planes", planes_properties),
    ],
)
def test_gradients_on_tensor_cores(rung, properties):
    found = values(map(properties, of_rung(rung)))
    in_float64 = {"fp64"} if rung == "grad_input_planes" else set()
    assert found.pop("precision") == {"tf32", "bf16", *in_float64}
    assert all(occurring == BOTH for occurring in found.values()), found
