"""The order of products in k4 and grad_input_tile: registers of one bank seldom make them wait."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from numba_tconv.gradients.input.tile import kernel as grad_input_tile
from numba_tconv.gradients.input.tile.choose import choose
from numba_tconv.kernels.common.register_tile import WarpTile
from numba_tconv.kernels.k4_register_tile import kernel as k4_register_tile
from numba_tconv.kernels.k4_register_tile.choose import choose as choose_forward
from numba_tconv.lab.machine_code import offline
from numba_tconv.lab.machine_code.offline import product_loops
from numba_tconv.lab.measure import workloads
from tests.register_banks import clocks_a_product
from tests.thorough import thorough

from .test_offline import HOPPER, needs_sass


def line(text):
    return f"        /*0010*/                   {text} ;"


def test_the_count():
    """Two banks, kept registers, and waits."""
    balanced = [line("FFMA R8, R0, R3.reuse, R9"), line("FFMA R9, R1, R3.reuse, R10")] * 50
    assert clocks_a_product("\n".join(balanced)) == pytest.approx(1, abs=0.02)
    one_bank = [line("FFMA R8, R0, R3.reuse, R8"), line("FFMA R10, R2, R3.reuse, R10")] * 50
    assert clocks_a_product("\n".join(one_bank)) == pytest.approx(2, abs=0.02)
    nothing_kept = [line("FFMA R8, R0, R3, R9")] * 100
    assert clocks_a_product("\n".join(nothing_kept)) == pytest.approx(2, abs=0.02)
    in_another_place = [line("FFMA R8, R3.reuse, R0, R9"), line("FFMA R8, R0, R3, R9")] * 50
    assert clocks_a_product("\n".join(in_another_place)) == pytest.approx(2, abs=0.02)
    with_a_load = [line("FFMA R8, R0, R3.reuse, R9"), line("@!P0 LDS.128 R4, [R2+UR4+0x10]")] * 50
    assert clocks_a_product("\n".join(with_a_load)) == pytest.approx(2, abs=0.02)


def clocks_of(kernel):
    report = offline.report(kernel, HOPPER)
    return [clocks_a_product(loop) for loop in sorted(product_loops(report.sass), key=len)]


# Kernels must not be cached: a test changes them by ``exchanged``.
@cache
def clocks(workload, exchanged=True):
    config = choose(workloads.get(workload).problem, torch.float32).alone
    return clocks_of(grad_input_tile.make_kernel.__wrapped__(config))


@cache
def clocks_forward(workload, exchanged=True):
    config = choose_forward(workloads.get(workload).problem, torch.float32, 4)
    return clocks_of(k4_register_tile.make_kernel.__wrapped__(replace(config, splits=1)))


@needs_sass
@pytest.mark.parametrize(
    ("workload", "most"),
    thorough(
        [("patch", 1.15), ("kb64", 1.17), ("hifigan_u3", 1.22), ("oobleck_u4", 1.22), ("dac_u4", 1.22)],
        always=[("kb64", 1.17)],
    ),
)
def test_products_seldom_wait_for_registers(workload, most):
    """Loads and the loop itself take 5 to 8%."""
    assert clocks(workload)[0] < most


@needs_sass
@pytest.mark.thorough
def test_nor_where_phases_have_unequal_taps():
    """The loop of phases with a tap less is inside the others' products."""
    inner, channel, _ = clocks("seamless_u1")
    assert inner < 1.22
    assert channel < 1.22


@needs_sass
@pytest.mark.thorough
def test_sums_in_the_bank_of_their_columns_would_wait(monkeypatch):
    monkeypatch.setenv("NUMBA_TCONV_CACHE", "")  # the cache has the unchanged kernel
    own, forward = clocks("patch")[0], clocks_forward("patch")[0]
    monkeypatch.setattr(WarpTile, "exchanged", False)
    assert clocks("patch", exchanged=False)[0] > 1.05 * own
    assert clocks_forward("patch", exchanged=False)[0] > 1.05 * forward


@needs_sass
@pytest.mark.parametrize(
    ("workload", "most"),
    thorough(
        [("patch", 1.15), ("kb64", 1.22), ("hifigan_u1", 1.22), ("dac_u4", 1.31)],
        always=[("kb64", 1.22)],
    ),
)
def test_products_of_the_forward_pass_seldom_wait(workload, most):
    assert clocks_forward(workload)[0] < most


@needs_sass
@pytest.mark.thorough
def test_nor_where_some_rows_lack_the_last_tap():
    two_taps, three_taps, *_ = clocks_forward("seamless_u1")
    assert two_taps < 1.22
    assert three_taps < 1.22
