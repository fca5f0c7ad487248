"""The alias-free activation's kernels as compiled, with BigVGAN's sizes: few registers, vectors, no spill."""

import itertools
import re
from functools import cache

import pytest

from numba_tconv.formula.alias_free import AliasFree
from numba_tconv.gradients.alias_free import plan as gradient_plan
from numba_tconv.gradients.alias_free import tile as gradient_tile
from numba_tconv.gradients.alias_free.kernel import make_kernel
from numba_tconv.kernels.alias_free import plan, tile
from numba_tconv.lab.machine_code import offline
from numba_tconv.runtime.device import REGISTERS
from tests.thorough import thorough

from .test_offline import BF16, F16, F32, F64, HOPPER, check_memory, needs_sass

SIZES = AliasFree(4, 24, 96_000, 12, 12)
FEW_REGISTERS = 64  # with them 1024 threads fit on a multiprocessor
DTYPES = {"float32": F32, "float64": F64, "bfloat16": BF16, "float16": F16}
dtypes = pytest.mark.parametrize("name", thorough(DTYPES, always=("float32",)))


@cache
def forward_report(name):
    config = tile.choose(SIZES, DTYPES[name], "snake", True)
    (step,) = plan.steps(SIZES, DTYPES[name], "snake")
    return config, offline.report(step.kernel, HOPPER)


@cache
def gradient_report(name, parameters=True):
    config = gradient_tile.choose(SIZES, DTYPES[name], "snake", True, parameters)
    step, *_ = gradient_plan.steps(SIZES, DTYPES[name], "snake", True, parameters, False)
    return config, offline.report(step.kernel, HOPPER)


def products(config):
    """Products of the filters that a thread of the gradients' kernel makes for a tile."""
    return sum(len(half.products) for half in (config.up, config.turned, config.down))


@dtypes
def test_forward_stays_in_its_registers(name):
    """Except for the slow path of float64's sine."""
    config, report = forward_report(name)
    assert report.spill_bytes == 0
    if DTYPES[name] != F64:
        check_memory(report, REGISTERS // (config.threads * config.min_blocks) // 8 * 8)


@needs_sass
@pytest.mark.parametrize(("name", "most"), [("float32", 66), ("bfloat16", 53)])
def test_forward_instructions_of_a_sample(name, most):
    """From a tile's first barrier to its last whole store, with what a row's ends need besides."""
    config, report = forward_report(name)
    assert report.registers <= FEW_REGISTERS
    assert report.blocks_per_multiprocessor >= config.min_blocks
    code = re.findall(r"/\*[0-9a-f]{4}\*/\s+(.*?);", report.sass)
    begin = next(at for at, one in enumerate(code) if "BAR.SYNC" in one)
    last = max(at for at, one in enumerate(code) if re.search(r"STG\.E\.128", one))
    assert sum("FFMA" in one for one in code[begin:last]) >= 2 * 12 * config.run  # the filters' products are in it
    assert (last - begin) / config.run <= most


@dtypes
def test_gradients_stay_in_their_registers(name):
    config, report = gradient_report(name)
    check_memory(report, 255 if DTYPES[name] == F64 else FEW_REGISTERS)
    assert report.blocks_per_multiprocessor >= config.min_blocks


@dtypes
def test_gradients_move_vectors(name):
    config, report = gradient_report(name)
    vector = r"v2\.[ubf]64" if DTYPES[name] == F64 else r"v4\.[ubf]32"
    windows = config.up.window + config.turned.window + config.up_ratio * config.down.window
    assert len(re.findall(rf"\bld\.shared\.{vector}", report.ptx)) == windows // config.vector
    stored = {F64: r"v2\.[ubf]64", F32: r"v4\.[ubf]32", BF16: r"v2\.[ubf]32", F16: r"v2\.[ubf]32"}[DTYPES[name]]
    assert len(re.findall(rf"\bst\.global\.{stored}", report.ptx)) == max(1, config.run * config.dtype.itemsize // 16)


@needs_sass
@dtypes
def test_gradients_multiply_as_often_as_they_must(name):
    """The rest is the activation, in two paths, the ends of rows, and in float64 a row's exponentials and division."""
    config, report = gradient_report(name)
    multiply = "DFMA" if DTYPES[name] == F64 else "FFMA"
    found = offline.instructions(report.sass)[multiply]
    sine_and_cosine = 23 if DTYPES[name] == F64 else 9
    ups = config.run * config.up_ratio
    assert found - products(config) <= 2 * ups * (sine_and_cosine + 7) + (100 if DTYPES[name] == F64 else 40)


@pytest.mark.thorough
def test_sums_that_nobody_wants_cost_nothing():
    """Neither shared memory nor products."""
    (_, whole), (_, alone) = gradient_report("float32"), gradient_report("float32", parameters=False)
    assert alone.shared_bytes < whole.shared_bytes
    ptx = [len(re.findall(r"fma\.rn\.f32", report.ptx)) for report in (whole, alone)]
    assert ptx[1] <= ptx[0] - 2 * 8 * 2


@pytest.mark.parametrize(
    ("dtype", "sizes", "parameters"),
    thorough(
        itertools.product([F32, F64], [(12, 12, 2, 2), (12, 9, 2, 3)], [False, True]),
        always=[(F32, (12, 9, 2, 3), False)],
    ),
    ids=str,
)
def test_shared_arrays_are_whole_vectors(dtype, sizes, parameters):
    """The compiler aligns each to one element, and places one behind the other."""
    config = gradient_tile.Config(dtype, *sizes, "snake", parameters=parameters)
    found = re.findall(r"\.shared .*\[(\d+)\];", make_kernel(config).kept_ptx(HOPPER))
    assert len(found) == 5
    assert all(int(size) % 16 == 0 for size in found)
