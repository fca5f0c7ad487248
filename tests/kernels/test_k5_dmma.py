"""k5_dmma without a GPU: fragments as PTX defines them, their memory, chosen tiles, compiled code."""

import itertools
import re
from dataclasses import replace
from functools import cache

import pytest
import torch

from numba_tconv.formula.problem import PEAK_FLOPS, Problem
from numba_tconv.gradients.input.by_planes import InputPlanes, adjoint
from numba_tconv.kernels.common.tensor_core import fragments
from numba_tconv.kernels.k4_register_tile import pack as k4_pack
from numba_tconv.kernels.k4_register_tile import tile as k4_config
from numba_tconv.kernels.k4_register_tile.arguments import Registers, Stage
from numba_tconv.kernels.k5_dmma import mainloop as k5_dmma_mainloop
from numba_tconv.kernels.k5_dmma import ring as k5_dmma_ring
from numba_tconv.kernels.k5_dmma import tile as k5_dmma_config
from numba_tconv.kernels.k5_dmma.tile import candidates, choose, cost
from numba_tconv.lab.machine_code import offline
from numba_tconv.lab.measure import workloads
from numba_tconv.runtime.device import A100, H200
from numba_tconv.runtime.layout import NO_GPU, Layout
from numba_tconv.selection.forward import select
from numba_tconv.selection.gradient import select as select_gradient
from numba_tconv.selection.registry import RUNGS
from tests.thorough import thorough

K5 = RUNGS["k5_dmma"]
LANES = range(32)
DENSE = [w.problem for w in workloads.WORKLOADS.values() if K5.unsuited(w.problem, torch.float64, "fp64", H200) is None]
UNEQUAL = Problem(2, 24, 32, 11, 200, stride=5, padding=3)
SHAPES = [*DENSE, UNEQUAL, Problem(2, 10, 40, 41, 300), Problem(2, 7, 9, 4, 400, stride=4, dilation=134)]
needs_sass = pytest.mark.skipif(offline.tool("nvdisasm", optional=True) is None, reason="nvdisasm is missing")


def a_of(lane, i):
    """The manual's m16n8k4, m16n8k8 and m16n8k16 in .f64: (row, k) of a0, a1, ... of a lane."""
    return lane // 4 + (8 if i % 2 else 0), lane % 4 + 4 * (i // 2)


def b_of(lane, i):
    """(k, n) of b0, b1, ..."""
    return lane % 4 + 4 * i, lane // 4


def c_of(lane, i):
    """(row, n) of c0 to c3."""
    return lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + i % 2


def configs(device=H200):
    for problem, x_vector in itertools.product(SHAPES, (1, 2)):
        for config in candidates(problem, x_vector, device):
            yield problem, config


@cache
def orders():
    return {k4_pack.order_of(config): config for _, config in configs()}


def test_packed_weights_are_the_manuals_fragments():
    """For every product (four channels, a tap, sixteen rows) a lane's two weights are adjacent, lane after lane."""
    for order, config in orders().items():
        place, at = k4_pack.place_by_fragments(order, fragments.mma_a), 0
        assert order.stage == config.w_stage
        for four, tap, tile in itertools.product(
            range(config.block_k // 4), range(config.tap_chunk), range(config.block_m // 16)
        ):
            for lane, i in itertools.product(LANES, range(2)):
                row, k = a_of(lane, i)
                assert place(at) == (4 * four + k, tap, 16 * tile + row)
                at += 1
        assert at == order.stage


def test_operands_of_deeper_products_are_those_of_four_channels_side_by_side():
    for lane, i in itertools.product(LANES, range(8)):
        row, k = fragments.mma_a(lane, i % 2, 0, 1)
        assert a_of(lane, i) == (row, k + 4 * (i // 2))
    for lane, i in itertools.product(LANES, range(4)):
        k, n = fragments.mma_b(lane, 0, 0, 1)
        assert b_of(lane, i) == (k + 4 * i, n)
    assert all(c_of(lane, i) == fragments.mma_d(lane, i) for lane in LANES for i in range(4))


@pytest.mark.parametrize("tails", [-1, 0])
@pytest.mark.parametrize("device", [A100, H200], ids=["A100", "H200"])
@pytest.mark.parametrize("problem", [UNEQUAL, Problem(2, 16, 64, 4, 300)], ids=["unequal", "stride 1"])
def test_a_stage_is_multiplied_once(monkeypatch, problem, device, tails):
    """In Python: every tap of every four channels, but for a last one that the block's rows lack."""

    def load_pair(pair, at, shared, address):
        pair[at : at + 2] = address, address + 8

    def repeated(function, count):
        return lambda k, state: [function(k + z, state) for z in range(count)]

    for name in ("device_function", "recomputed"):
        monkeypatch.setattr(k5_dmma_mainloop, name, lambda value: value)
    monkeypatch.setattr(k5_dmma_mainloop, "repeated", repeated)
    monkeypatch.setattr(k5_dmma_mainloop, "ld_shared", lambda count, kind: lambda address: address)
    monkeypatch.setattr(k5_dmma_mainloop, "load_vector_at", load_pair)
    for c in candidates(problem, 1, device):
        products, expected = [], []

        def multiply(sums, at, a, a_at, b, b_at, products=products, fours=c.fours):
            for z in range(fours):
                products.append((at, *a[a_at + 2 * z : a_at + 2 * z + 2], b[b_at + z]))

        monkeypatch.setattr(k5_dmma_mainloop, "mma_f64", lambda depth, multiply=multiply: multiply)
        parts = k5_dmma_mainloop.make_multiply(c)
        registers = Registers(None, [None] * parts.window, [None] * parts.weights)
        parts.multiply(registers, Stage(None, 0, 0), tails)
        tiles_m, tiles_n, taps = c.thread_m // 2, c.thread_n // 2, c.tap_chunk - (c.ragged and tails == 0)
        for four, tap, m, n in itertools.product(*map(range, (c.block_k // 4, taps, tiles_m, tiles_n))):
            w = ((four * c.tap_chunk + tap) * (c.block_m // 16) + m) * 16 * 4 * 8
            x = (4 * four * c.width + c.halo - tap * c.taps.step + 8 * n) * 8
            expected.append(((m * tiles_n + n) * 4, w, w + 8, x))
        assert sorted(products) == sorted(expected)


@pytest.mark.parametrize("device", [A100, H200], ids=["A100", "H200"])
def test_sums_are_staged_in_their_rows_and_columns(monkeypatch, device):
    staged = {}

    def store_vector(shared, at, values, first):
        staged.update({at: values[first], at + 1: values[first + 1]})

    monkeypatch.setattr(k5_dmma_mainloop, "device_function", lambda function: function)
    monkeypatch.setattr(k5_dmma_mainloop, "store_vector", store_vector)
    for c in candidates(UNEQUAL, 1, device):
        parts = k5_dmma_mainloop.make_multiply(c)
        for thread in (5, c.threads - 1):
            staged.clear()
            warp, lane = divmod(thread, 32)
            parts.put(None, range(c.thread_m * c.thread_n), [None] * 2, parts.lane_of(thread))
            first_row, first_column = warp // c.warps_n * 8 * c.thread_m, warp % c.warps_n * 4 * c.thread_n
            expected = {}
            for m, n, i in itertools.product(range(c.thread_m // 2), range(c.thread_n // 2), range(4)):
                row, column = c_of(lane, i)
                at = (first_row + 16 * m + row) * c.result_pitch + first_column + 8 * n + column
                expected[at] = (m * (c.thread_n // 2) + n) * 4 + i
            assert staged == expected


def test_inputs_and_sums_lie_in_different_banks():
    """Half a warp reads 16 inputs of 8 bytes at once; a quarter stores eight pairs of sums."""
    sizes = {(config.width, config.result_pitch) for _, config in configs()}
    assert len(sizes) > 5
    for width, pitch in sizes:
        for first in (0, 16):
            places = [b_of(lane, 0) for lane in range(first, first + 16)]
            assert len({(k * width + n) % 16 for k, n in places}) == 16
        for first in range(0, 32, 8):
            places = [c_of(lane, 0) for lane in range(first, first + 8)]
            assert len({(row * pitch + n) // 2 % 8 for row, n in places}) == 8


def test_the_windows_and_tiles_are_whole():
    for problem, c in configs():
        assert c.width >= c.block_n + c.halo
        assert c.width % c.x_vector == 0
        assert c.block_k % (4 * c.fours) == 0
        assert c.block_k // (4 * c.fours) % c.at_once == 0
        assert c.warps_m * 8 * c.thread_m == c.block_m
        assert c.warps_n * 4 * c.thread_n == c.block_n
        assert c.fours == (c.depth or 4) // 4
        assert problem.taps.taps_per_row % c.tap_chunk == 0
        assert c.partial == 0
        # Only blocks whose rows all have a tap multiply it.
        assert c.one_phase or not c.ragged


def test_ampere_has_products_of_eight_rows():
    assert {config.depth for _, config in configs(A100)} == {0}
    assert {config.depth for _, config in configs(H200)} == {4, 8}


def test_stages_are_deep_even_if_channels_are_no_multiple_of_much():
    istft = workloads.get("istft").problem
    assert istft.in_channels == 1026
    assert choose(istft, 2).block_k >= 12, "stages of four channels would waste two, but 257 barriers take longer"
    assert {c.block_k for c in candidates(Problem(1, 4, 64, 3, 400), 2, H200)} == {4, 8}, "8 where a product takes 8"


@pytest.mark.parametrize("x_vector", [1, 2])
def test_no_block_is_alone_on_a_multiprocessor(x_vector):
    """A single block computes nothing while it waits."""
    for problem in SHAPES:
        assert all(config.min_blocks >= 2 for config in candidates(problem, x_vector, H200))
        assert choose(problem, x_vector, A100).min_blocks >= 2


def test_the_choice_is_the_cheapest_tile():
    for problem in DENSE:
        chosen, all_tiles = choose(problem, 2), list(candidates(problem, 2, H200))
        assert chosen in all_tiles
        assert cost(problem, chosen, H200) == min(cost(problem, config, H200) for config in all_tiles)


# ms of launches on an H200 by height and width of TILES and stages, without rings.
MEASURED = {
    "patch@batch1": {(64, 128, 64, 32): 0.547, (64, 128, 32, 32): 0.555, (64, 32, 16, 32): 0.620},
    "oobleck_u1@batch1": {(64, 64, 32, 32): 0.466, (32, 128, 32, 32): 0.496, (64, 128, 64, 32): 0.553},
    "hifigan_u3": {(64, 128, 64, 32): 0.753, (64, 64, 32, 32): 0.748, (64, 128, 32, 32): 0.768},
    "head": {(32, 64, 16, 32): 0.0297, (64, 32, 16, 32): 0.0308, (64, 64, 32, 32): 0.0369},
    "seamless_u1": {(64, 128, 32, 32): 0.542, (64, 128, 64, 32): 0.553, (64, 32, 16, 32): 0.629},
    "encodec_u3@batch1": {(64, 64, 32, 32): 0.0977, (64, 128, 32, 32): 0.106, (32, 64, 16, 32): 0.113},
    "demucs_out": {(32, 128, 32, 32): 0.156, (32, 64, 16, 32): 0.174, (16, 256, 16, 64): 0.186},
    "istft": {(64, 128, 32, 32): 0.188, (64, 64, 32, 32): 0.190, (64, 128, 64, 32): 0.213},
    "waveglow": {(64, 64, 32, 32): 0.297, (64, 128, 32, 32): 0.303, (64, 128, 64, 32): 0.402},
    "convtasnet": {(16, 256, 16, 64): 0.162, (16, 128, 16, 32): 0.175},
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_choice_is_hardly_slower_than_the_fastest_measured(name):
    workload, _, batch = name.partition("@batch")
    problem, ms = workloads.expand([workload], int(batch) if batch else None)[0].problem, MEASURED[name]
    tiles = (c for c in candidates(problem, 1 if problem.length % 2 else 2, H200) if not c.ring)
    c = min(tiles, key=lambda config: cost(problem, config, H200))
    assert ms[c.block_m, c.block_n, 8 * c.thread_m, 4 * c.thread_n] <= 1.07 * min(ms.values())


# ms of the fastest other tile, by the model, and of the ring.
MEASURED_RINGS = {
    "kb64": (7.7675, 7.4188),
    "kb74": (1.9164, 1.7964),
    "kb79": (0.8742, 0.9102),
    "hifigan_u1@batch1": (0.1239, 0.1360),
    "hifigan_u2@batch1": (0.1463, 0.1310),
    "hifigan_u4": (0.4743, 0.4106),
    "dac_u1": (4.9011, 4.3951),
    "dac_u4@batch1": (0.6969, 0.6228),
    "encodec_u4@batch1": (0.1011, 0.0954),
    "oobleck_u1@batch1": (0.4870, 0.4994),
    "seamless_u1": (0.6020, 0.5244),
    "xcodec_u1@batch1": (0.0903, 0.0922),
    "demucs_u2": (0.3584, 0.3322),
    "demucs_out": (0.1898, 0.2593),
    "istft": (0.2335, 0.2482),
    "patch": (3.9926, 3.5293),
    "patch@batch1": (0.5852, 0.5130),
    "waveglow": (0.3283, 0.3766),
    "waveglow@batch1": (0.0866, 0.1020),
}


@pytest.mark.parametrize("name", MEASURED_RINGS)
def test_the_ring_is_taken_where_it_was_measured_to_be_faster(name):
    workload, _, batch = name.partition("@batch")
    problem = workloads.expand([workload], int(batch) if batch else None)[0].problem
    others, ring = MEASURED_RINGS[name]
    assert choose(problem, 1 if problem.length % 2 else 2).ring == (ring < others)


def test_only_hopper_has_the_ring():
    assert any(config.ring for _, config in configs(H200))
    assert not any(config.ring for _, config in configs(A100))


def test_the_ring_has_several_stages_of_channels_that_its_warps_share_out():
    rings = [(problem, config) for problem, config in configs() if config.ring]
    assert {config.x_vector for _, config in rings} == {1, 2}
    for _, c in rings:
        assert k5_dmma_config.FEWEST_STAGES <= c.stages <= k5_dmma_config.MOST_STAGES
        assert c.block_k % k5_dmma_ring.COPYING == 0
        assert c.block_k // k5_dmma_ring.COPYING <= 32, "a row of x for each lane"
        more = replace(c, stages=c.stages + 1)
        assert c.stages == k5_dmma_config.MOST_STAGES or not k4_config.fits(more, H200)
        assert k4_config.fits(c, H200)
        assert c.entries >= c.copied // c.x_vector + 2 + 2 * c.stages, "of vectors, two numbers, two barriers a stage"
        # Multiples of 16 bytes for the copy engine.
        for elements in (c.copied, c.width, c.x_stage, c.w_stage):
            assert c.x_vector == 1 or elements * c.itemsize % 16 == 0


def test_it_is_selected_in_float64_where_its_products_are_full():
    def name(problem, device=H200):
        return select(problem, torch.float64, "fp64", device).name

    few_rows, few_channels = Problem(4, 64, 4, 3, 100_000), Problem(4, 3, 64, 3, 100_000)
    for device in (H200, A100):
        assert {name(problem, device) for problem in DENSE if problem.flops > 1e7} == {"k5_dmma"}
        assert name(few_rows, device) == name(few_channels, device) == "k4_register_tile"
    assert "at least 8 pairs" in K5.unsuited(few_rows, torch.float64, "fp64", H200)
    assert "at least 4 input channels" in K5.unsuited(few_channels, torch.float64, "fp64", H200)
    assert K5.supports(few_rows, torch.float32, "ieee") == "it multiplies on tensor cores, in fp64, not in ieee"
    assert select(DENSE[0], torch.float32, "ieee", H200).name == "k4_register_tile"


def test_its_gradient_for_the_input_is_taken_where_it_is_exact():
    """Unequal phases are padded with zeros, which an infinity would turn into NaN."""

    def name(problem):
        return select_gradient("grad_input", problem, torch.float64, H200, precision="fp64").name

    wide = Problem(2, 64, 64, 16, 300, stride=8, padding=4)
    assert name(wide) == name(Problem(2, 64, 64, 3, 300)) == "grad_input_planes"
    assert name(UNEQUAL) == "grad_input_tile"
    assert name(workloads.get("waveglow").problem) == "grad_input_tile"
    reason = InputPlanes().supports(workloads.get("waveglow").problem, torch.float64, "fp64")
    assert reason == "it takes up to 16 phases of 64-bit elements apart, not 256"
    of_planes, rung, config = InputPlanes().config(wide, torch.float64)
    assert (of_planes.itemsize, of_planes.elements, rung) == (8, 1, "k5_dmma")
    assert adjoint(wide).length == 301  # not all vectors of a plane's columns lie inside
    assert config.x_vector == 1
    assert InputPlanes().config(Problem(2, 64, 64, 3, 300), torch.float64).of_rung.x_vector == 2
    odd = Problem(2, 64, 64, 3, 301)  # whose grad_output is read as it lies
    assert InputPlanes().config(odd, torch.float64).of_rung.x_vector == 1
    assert adjoint(odd).length % 2 == 1


@cache
def report(name, x_vector, device):
    problem = UNEQUAL if name == "unequal" else workloads.get(name).problem
    config = choose(problem, x_vector, device)
    return config, offline.report(K5.kernel(config), (9, 0, "a") if device is H200 else device.cc, config.shared_bytes)


compiled = pytest.mark.parametrize(
    ("name", "x_vector", "device"),
    thorough(
        [("patch", 2, H200), ("head", 2, H200), ("waveglow", 1, H200), ("unequal", 2, H200), ("kb79", 2, A100)],
        always=[("patch", 2, H200), ("kb79", 2, A100)],
    ),
    ids=lambda value: {H200: "H200", A100: "A100"}.get(value, str(value)) if not isinstance(value, int) else str(value),
)


@compiled
def test_it_stays_in_its_registers(name, x_vector, device):
    config, found = report(name, x_vector, device)
    assert found.spill_bytes == found.local_bytes == 0
    assert found.blocks_per_multiprocessor >= config.min_blocks
    assert not re.search(r"\b(atom|red)\.", found.ptx)


@needs_sass
@compiled
def test_it_multiplies_on_tensor_cores_alone(name, x_vector, device):
    config, found = report(name, x_vector, device)
    shape = f"m16n8k{config.depth}" if config.depth else "m8n8k4"
    products = re.findall(r"mma\.sync\.aligned\.(m\d+n\d+k\d+)\.row\.col\.f64", found.ptx)
    assert set(products) == {shape}
    turns = [loop for loop in offline.loops(found.sass) if re.search(r"\bDMMA\b", loop)]
    turn = min(turns, key=len)  # the others are around it
    tiles = config.thread_m * config.thread_n // 4
    taps = config.tap_chunk - config.ragged  # the last one is kept apart
    of_turn = config.at_once * taps * tiles * (1 if config.depth else 2)
    assert len(re.findall(r"\bDMMA\b", turn)) >= of_turn
    assert not re.search(r"\bDFMA\b", turn)
    # A vector of weights, and inputs of all its columns once a tap.
    loads = config.at_once * taps * config.fours
    assert len(re.findall(r"\bLDS\.128\b", turn)) >= loads * config.thread_m // 2
    assert len(re.findall(r"\bLDS\.64\b", turn)) >= loads * config.thread_n // 2


RINGS = thorough([("patch", 2), ("encodec_u3", 1)], always=[("patch", 2)])


@needs_sass
@pytest.mark.parametrize(("name", "x_vector"), RINGS)
def test_warps_that_multiply_meet_no_barrier_and_copy_nothing(name, x_vector):
    """From the first product to the arrival after the last; producers gave up registers."""
    config, found = report(name, x_vector, H200)
    assert config.ring
    assert len(re.findall(r"cp\.async\.bulk\.shared", found.ptx)) == x_vector, "of weights, and of rows in vectors"
    multiplied = found.sass.rindex("DMMA")
    arrived = found.sass.index("SYNCS.ARRIVE", multiplied)
    assert not re.search(r"\b(BAR|LDGSTS|UBLKCP|LDG|LDL|STL)\b", found.sass[found.sass.index("DMMA") : arrived])
    # The memory model, and racecheck, want a fence between reads and the engine's copies.
    assert "FENCE.VIEW.ASYNC" in found.sass[multiplied:arrived]
    groups = config.threads // 128, k5_dmma_ring.COPYING * 32 // 128
    multiplying, copying = k5_dmma_ring.REGISTERS
    assert multiplying * groups[0] + copying * groups[1] <= found.registers * sum(groups)


def test_its_configuration_depends_on_where_x_lies():
    problem = Problem(2, 64, 64, 3, 300)
    aligned = Layout.contiguous((2, 64, 300), torch.float64, NO_GPU)
    assert K5.choose(aligned, problem, H200).x_vector == 2
    assert K5.choose(aligned._replace(offset=8), problem, H200).x_vector == 1
    assert K5.config_on(H200, problem, torch.float64, "fp64").x_vector == 2
    tile = "64 rows by 128 columns, 64 by 32 a warp; 4 stages of 16 input channels, a ring that warps of its own fill"
    assert K5.tile(K5.config(workloads.get("patch").problem, torch.float64)) == tile
    tile = "32 rows by 64 columns, 16 by 32 a warp; 2 stages of 24 input channels"
    assert K5.tile(K5.config(workloads.get("head").problem, torch.float64)) == tile


def test_the_rate_of_the_model_is_below_the_peak():
    peak = PEAK_FLOPS["fp64"] / 2 / H200.multiprocessors / 1e3  # multiply-adds of a multiprocessor in a millisecond
    assert 0.7 * peak < k5_dmma_config.RING_RATE < k5_dmma_config.RATE < peak
