"""Kernels that add partial sums, and kernels that are launched early, as compiled."""

import pytest

from numba_tconv.gradients.weight.wgmma import sum as grad_weight_sum
from numba_tconv.kernels.common import split_sums
from numba_tconv.kernels.k6_wgmma import tail as k6_tail
from numba_tconv.lab.machine_code import offline
from numba_tconv.lab.measure import workloads
from numba_tconv.selection.registry import RUNGS
from tests.thorough import thorough

from .test_offline import AMPERE, BF16, F16, F32, HOPPER, check_memory


# Kernels launched early wait for the kernel before, whose blocks let them begin.
@pytest.mark.parametrize("what", ["last columns", "parts of sums", "splits"])
def test_what_is_launched_early_waits(what):
    tile = RUNGS["k6_wgmma"].config(workloads.get("oobleck_u1").problem, BF16, "bf16").tile
    kernel = {
        "last columns": k6_tail.make_kernel(tile),
        "parts of sums": split_sums.make_kernel(BF16, early=True),
        "splits": grad_weight_sum.make_kernel(grad_weight_sum.configs(BF16)[0]),
    }[what]
    assert offline.report(kernel, HOPPER).ptx.count("griddepcontrol.wait") == 1


def test_sums_on_other_gpus_do_not_wait():
    assert "griddepcontrol" not in offline.report(split_sums.make_kernel(BF16, early=False), AMPERE).ptx


@pytest.mark.parametrize("dtype", thorough([F32, F16, BF16], always=[F32, BF16]), ids=str)
@pytest.mark.parametrize(("early", "cc"), thorough([(True, HOPPER), (False, AMPERE)], always=[(True, HOPPER)]))
def test_partial_sums_are_loaded_and_stored_in_vectors(dtype, early, cc):
    """Loads of a batch of neighbouring outputs' parts are issued together."""
    report = offline.report(split_sums.make_kernel(dtype, early), cc)
    check_memory(report, 64)
    assert max(part.count("ld.global.v4") for part in report.ptx.split("add.f32")) == split_sums.BATCH
    assert report.ptx.count(f"st.global.v{4 if dtype == F32 else 2}") == 1
