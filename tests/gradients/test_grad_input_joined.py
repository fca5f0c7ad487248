"""Which problems get joined blocks in grad_input_tile, of 256 rows and alone on a multiprocessor, and their code."""

from dataclasses import replace

import pytest
import torch

from numba_tconv.gradients.input.tile.choose import (
    JOINED,
    candidates,
    joined,
    joined_stages,
    milliseconds,
    rounds,
    shared_need,
    usual,
)
from numba_tconv.gradients.input.tile.kernel import make_kernel
from numba_tconv.lab.machine_code import offline
from numba_tconv.lab.measure import workloads
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.device import A100, H200
from tests.lab.test_offline import AMPERE, DEVICES, HOPPER, check_memory, check_order, needs_sass, product_loops
from tests.thorough import thorough

F32 = torch.float32
HIFIGAN = workloads.get("hifigan_u1").problem


def is_joined(config):
    return all(getattr(config, name) == size for name, size in JOINED._asdict().items())


@pytest.mark.parametrize(
    ("workload", "pairs"),
    [
        ("hifigan_u1", (8, 2)),
        ("dac_u2", (8, 2)),
        ("oobleck_u3", (4, 4)),
        ("seamless_u1", (5, 3)),
        ("encodec_u2", (5, 3)),
    ],
)
def test_large_layers_get_joined_blocks(workload, pairs):
    """With at least as many pairs a stage as the joined blocks have."""
    config = usual(workloads.get(workload).problem, F32)
    assert is_joined(config)
    assert (config.phases, config.channels) == pairs


KEPT = {
    "half a tile of rows": workloads.get("kb64").problem,
    "three tiles of rows": workloads.get("dac_u3").problem,
    "half a round more": workloads.get("patch").problem,
    "two rounds and a half": workloads.get("dac_u1").problem,
    "one sample": replace(HIFIGAN, batch=1),
    "one sample, long": replace(workloads.get("dac_u2").problem, batch=1),
    "less than a round": replace(HIFIGAN, batch=7),
    "stages as deep as before": workloads.get("convtasnet").problem,
    "sums too short for what stands still around them": replace(HIFIGAN, out_channels=16),
}


@pytest.mark.parametrize("reason", KEPT)
def test_what_joined_blocks_would_not_serve(reason):
    assert not is_joined(usual(KEPT[reason], F32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_types_that_keep_their_tiles(dtype):
    """Half types are converted by the threads that multiply; doubles have tiles of their own."""
    assert not is_joined(usual(HIFIGAN, dtype))


@pytest.mark.parametrize("device", [H200, A100], ids=["H200", "A100"])
def test_joined_blocks_waste_no_more(device):
    """Rows, columns and multiprocessors; all candidates fit."""
    found = 0
    for workload in workloads.WORKLOADS.values():
        for batch in {1, 3, workload.problem.batch, 2 * workload.problem.batch}:
            problem = replace(workload.problem, batch=batch)
            before = min(candidates(problem, F32, device), key=lambda c: milliseconds(problem, c, device))
            weighed = [*joined(problem, before, device)]
            found += len(weighed)
            for config in weighed:
                assert 2 * rounds(problem, config, device) <= rounds(problem, before, device), workload.name
                assert config.pairs >= before.pairs, workload.name
                assert shared_need(config) <= device.shared_per_multiprocessor, workload.name
            config = usual(problem, F32, device)
            assert not is_joined(config) or config in weighed
    assert found


COMPILED = {
    "eight phases": ("hifigan_u1", HOPPER),
    "four phases": ("oobleck_u3", HOPPER),
    "three channels of five phases": ("encodec_u2", HOPPER),
    "three taps, rows of unequal taps": ("seamless_u1", HOPPER),
    "one tap, on Ampere": ("patch", AMPERE),
}


@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@needs_sass
@pytest.mark.parametrize("reason", thorough(COMPILED, always=["three taps, rows of unequal taps"]))
def test_joined_blocks_stay_in_their_registers(reason):
    """More than three quarters of a stage's instructions are products."""
    workload, cc = COMPILED[reason]
    problem = workloads.get(workload).problem
    # On Ampere the workloads get other tiles: the deepest that fits stands for other layers'.
    config = usual(problem, F32) if cc == HOPPER else next(joined_stages(problem, DEVICES[cc]))
    assert is_joined(config)
    report = offline.report(make_kernel(config), cc)
    check_memory(report, 255)
    check_order(report)
    loops = product_loops(report.sass)
    inner, stage = (offline.instructions(pick(loops, key=len)) for pick in (min, max))
    products = config.pairs * config.tap_chunk * config.thread_m * config.thread_n
    share = products / (products // inner["FFMA"] * inner.total() + stage.total() - inner.total())
    assert share > (0.75 if config.tap_chunk > 1 else 0.6), share
