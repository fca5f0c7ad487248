"""The alias-free activation's forward kernel as compiled with BigVGAN's sizes: few registers and instructions."""

import re

import pytest

from numba_tconv.formula.alias_free import AliasFree
from numba_tconv.kernels.alias_free import plan, tile
from numba_tconv.lab.machine_code import offline
from numba_tconv.ptx import SIMULATOR

from .test_offline import BF16, F32, HOPPER, needs_sass

pytestmark = [pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing"), needs_sass]

SIZES = AliasFree(4, 24, 96_000, 12, 12)


@pytest.mark.parametrize(("dtype", "most"), [(F32, 66), (BF16, 53)], ids=str)
def test_instructions_of_a_sample(dtype, most):
    """From a tile's first barrier to its last whole store, with what a row's ends need besides."""
    config = tile.choose(SIZES, dtype, "snake", True)
    (step,) = plan.steps(SIZES, dtype, "snake")
    report = offline.report(step.kernel, HOPPER)
    assert (report.spill_bytes, report.local_bytes) == (0, 0)
    assert report.registers <= 64
    assert report.blocks_per_multiprocessor >= config.min_blocks
    code = re.findall(r"/\*[0-9a-f]{4}\*/\s+(.*?);", report.sass)
    begin = next(at for at, one in enumerate(code) if "BAR.SYNC" in one)
    last = max(at for at, one in enumerate(code) if re.search(r"STG\.E\.128", one))
    assert sum("FFMA" in one for one in code[begin:last]) >= 2 * 12 * config.run  # the filters' products are in it
    assert (last - begin) / config.run <= most
