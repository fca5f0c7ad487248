"""Layouts of tensor-core operands, against the PTX ISA, and the bank conflicts that follow.

The definitions are the manual's, sections "Matrix Fragments for mma.m16n8k8", "... m16n8k16", "Register Fragments for
wgmma.mma_async" and "Shared Memory Matrix Layout", independent of the package.
"""

import itertools

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_core import fragments
from numba_tconv.kernels.common.tensor_core.tile import COLUMNS
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.lab.measure import workloads

LANES, WARPS = range(32), range(4)


def group(lane):
    return lane >> 2


def in_group(lane):
    return lane % 4


def tf32_a(lane, i, _):
    """m16n8k8, .tf32: a0 to a3."""
    return group(lane) if i in (0, 2) else group(lane) + 8, in_group(lane) if i in (0, 1) else in_group(lane) + 4


def tf32_b(lane, i, _):
    """m16n8k8, .tf32: b0 and b1; (row, column) of B, which is (k, n)."""
    return in_group(lane) if i == 0 else in_group(lane) + 4, group(lane)


def half_a(lane, i, h):
    """m16n8k16, .f16 and .bf16: a0 to a7, two in a register."""
    a = 2 * i + h
    row = group(lane) if 0 <= a < 2 or 4 <= a < 6 else group(lane) + 8
    return row, in_group(lane) * 2 + (a & 1) if a < 4 else in_group(lane) * 2 + (a & 1) + 8


def half_b(lane, i, h):
    """m16n8k16: b0 to b3."""
    b = 2 * i + h
    return in_group(lane) * 2 + (b & 1) if b < 2 else in_group(lane) * 2 + (b & 1) + 8, group(lane)


def float_d(lane, i):
    """m16n8k8 and m16n8k16: c0 to c3 in .f32."""
    return group(lane) if i < 2 else group(lane) + 8, in_group(lane) * 2 + (i & 1)


def wgmma_d(warp, lane, i):
    """D of wgmma m64: d0, d1, ... of a lane of one of the four warps."""
    row = warp * 16 + lane // 4 + 8 * (i // 2 % 2)
    return row, i // 4 * 8 + lane % 4 * 2 + i % 2


KINDS = {"tf32": (1, 8, tf32_a, tf32_b), "f16": (2, 16, half_a, half_b)}
kinds = pytest.mark.parametrize("kind", KINDS)


def is_bijection(places, *sizes):
    """Every element of a matrix is held once."""
    return sorted(places) == list(itertools.product(*map(range, sizes)))


@kinds
def test_mma_operands_are_the_manuals(kind):
    halves, depth, a, b = KINDS[kind]
    held_a = {(lane, i, h): a(lane, i, h) for lane in LANES for i in range(4) for h in range(halves)}
    held_b = {(lane, i, h): b(lane, i, h) for lane in LANES for i in range(2) for h in range(halves)}
    assert is_bijection(held_a.values(), 16, depth)
    assert is_bijection(held_b.values(), depth, 8)
    assert all(fragments.mma_a(*place, halves) == at for place, at in held_a.items())
    assert all(fragments.mma_b(*place, halves) == at for place, at in held_b.items())


def test_mma_sums_are_the_manuals():
    held = {(lane, i): float_d(lane, i) for lane in LANES for i in range(4)}
    assert is_bijection(held.values(), 16, 8)
    assert all(fragments.mma_d(*place) == at for place, at in held.items())


@kinds
def test_wgmma_operands_in_registers_are_four_times_mmas(kind):
    halves, depth, a, _ = KINDS[kind]
    places = itertools.product(WARPS, LANES, range(4), range(halves))
    held = {}
    for warp, lane, i, h in places:
        row, k = a(lane, i, h)
        held[warp, lane, i, h] = row + 16 * warp, k
    assert is_bijection(held.values(), 64, depth)
    assert all(fragments.wgmma_a(*place, halves) == at for place, at in held.items())


@pytest.mark.parametrize("n", [8, 24, 64, 128, 256])
def test_wgmma_sums_are_the_manuals(n):
    held = {place: wgmma_d(*place) for place in itertools.product(WARPS, LANES, range(n // 2))}
    assert is_bijection(held.values(), 64, n)
    assert all(fragments.wgmma_d(*place) == at for place, at in held.items())


@kinds
@pytest.mark.parametrize("n", [8, 24, 128])
def test_wgmma_operands_in_shared_memory_are_core_matrices(kind, n):
    """K-major without swizzle: core matrices of 8 rows (here of n) of 16 bytes (along k), each 128 consecutive bytes.

    The descriptor (kernels/k6_wgmma/consumer.py) gives their distance along k as the leading one, n * 16 bytes, and
    along n as the stride, 128 bytes.
    """
    halves, depth, *_ = KINDS[kind]
    itemsize = 4 // halves
    elements = 16 // itemsize
    stored = {}
    for column, k in itertools.product(range(n), range(depth)):
        core = k * itemsize // 16 * (n * 16) + column // 8 * 128
        stored[column, k] = core + column % 8 * 16 + k * itemsize % 16
    assert sorted(stored.values()) == list(range(0, n * depth * itemsize, itemsize))
    for (column, k), at in stored.items():
        assert fragments.wgmma_b(column, k, n, elements) * itemsize == at
        assert fragments.wgmma_b_at(at // itemsize, n, elements) == (column, k)


def test_a_lane_of_k6_owns_four_consecutive_columns():
    """Its two m64 blocks' rows are dealt out so; each of the tile's columns goes to one of them."""
    columns = {}
    for warp, lane, block, half in itertools.product(WARPS, LANES, range(2), range(2)):
        row = 64 * block + wgmma_d(warp, lane, 2 * half)[0]
        columns.setdefault(row, set()).add(fragments.column_of(warp, lane, block, half))
    assert all(len(owned) == 1 for owned in columns.values())
    assert is_bijection([(owned.pop(),) for owned in columns.values()], COLUMNS)
    for warp, lane in itertools.product(WARPS, LANES):
        first = fragments.column_of(warp, lane, 0, 0)
        owned = [fragments.column_of(warp, lane, block, half) for block in range(2) for half in range(2)]
        assert owned == [first, first + 1, first + 2, first + 3]
        assert first % 4 == 0


# Bank conflicts of k6: 16 bytes a lane are read by a quarter-warp at a time, 8 bytes by a half-warp.

PROBLEMS = [workload.problem for workload in workloads.WORKLOADS.values()]
PROBLEMS += [Problem(2, 64, 64, k, 100, s, dilation=d) for k, s, d in ((31, 1, 1), (16, 1, 3), (9, 6, 4), (41, 2, 5))]


def configs():
    for problem, precision in itertools.product(PROBLEMS, ("tf32", "tf32x3", "fp16", "bf16")):
        for config in k6_config.configs(problem, precision):
            yield precision, config


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "fp16", "bf16"])
def test_windows_are_read_without_bank_conflicts(precision):
    pitches = {c.pitch: c for p, c in configs() if p == precision}
    assert pitches
    for pitch, config in pitches.items():
        itemsize, halves = config.tile.itemsize, 4 // config.tile.itemsize
        at_once = 16 // itemsize * 2  # lanes: 8 with 16 bytes each, 16 with 8
        for warp, first in itertools.product(WARPS, range(0, 32, at_once)):
            words = []
            for lane in range(first, first + at_once):
                channel, column = in_group(lane) * halves, fragments.column_of(warp, lane, 0, 0)
                byte = (channel * pitch + column) * itemsize
                assert byte % (4 * itemsize) == 0
                words += range(byte // 4, (byte + 4 * itemsize) // 4)
            assert len({word % 32 for word in words}) == 32, pitch


def test_every_dtype_has_configurations():
    assert {c.tile.dtype for _, c in configs()} == {torch.float32, torch.float16, torch.bfloat16}


def test_split_operands_are_those_of_a_lanes_four_channels():
    """Lower and upper half of register i: rows 2*i and 2*i + 1 of a lane's four, four apart."""
    for lane, i, h in itertools.product(range(32), range(2), range(2)):
        k, _ = fragments.mma_b(lane, i, h, 2)
        assert fragments.split_channel(k) == lane % 4 + 4 * (2 * i + h)
    assert sorted(map(fragments.split_channel, range(32))) == list(range(32))
