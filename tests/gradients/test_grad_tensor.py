"""Formulas of the gradients on tensor cores: grad_input as a forward pass, what a lane loads, where boxes begin."""

import itertools
import math
import weakref
from collections import Counter
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.gradients import planes, wgmma_ring
from numba_tconv.gradients.input import by_planes as grad_input_planes
from numba_tconv.gradients.input.wgmma import choose as grad_input_wgmma_choose
from numba_tconv.gradients.input.wgmma import tile as grad_input_wgmma_config
from numba_tconv.gradients.weight.wgmma import choose as grad_weight_wgmma_choose
from numba_tconv.gradients.weight.wgmma import kernel as grad_weight_wgmma
from numba_tconv.gradients.weight.wgmma import operands as grad_weight_wgmma_operands
from numba_tconv.gradients.weight.wgmma import producer as grad_weight_wgmma_producer
from numba_tconv.gradients.weight.wgmma import tile as grad_weight_wgmma_config
from numba_tconv.kernels.common import tensor_map
from numba_tconv.kernels.common.tensor_core import fragments
from numba_tconv.lab.measure import workloads
from numba_tconv.ptx import swizzled_descriptor
from numba_tconv.runtime.device import H200
from numba_tconv.runtime.layout import Layout
from numba_tconv.selection.gradient import GRADIENTS
from tests.gpu.common import LARGE
from tests.gradient_parity import gradient_operands, torchs_gradient
from tests.parity import SMALL
from tests.thorough import thorough

PROBLEMS = {**SMALL, **LARGE, **{name: workload.problem for name, workload in workloads.WORKLOADS.items()}}
PRECISIONS = ["tf32", "fp16", "bf16"]
every_precision = pytest.mark.parametrize("precision", thorough(PRECISIONS, always=["tf32", "bf16"]))


def planes_by_definition(g, problem):
    p = problem
    phases = min(p.taps.rows, p.kernel_size)
    result = torch.zeros(p.batch, p.out_channels * phases, planes.columns_of(p), dtype=g.dtype)
    for a in range(phases):
        for j in range(result.shape[2]):
            o = j * p.stride - p.padding + a * p.dilation
            if 0 <= o < p.out_length:
                result[:, a::phases, j] = g[:, :, o]
    return result


@pytest.mark.parametrize("reason", SMALL)
def test_grad_input_is_a_transposed_convolution(reason):
    p = SMALL[reason]
    g, x, w = gradient_operands(p, torch.float64)
    q = grad_input_planes.adjoint(p)
    source = g if grad_input_planes.reads_grad_output(p) else planes_by_definition(g, p)
    weight = grad_input_planes.adjoint_weight(w, p)
    result = torch.conv_transpose1d(source, weight, None, 1, q.padding, 0, q.groups, q.dilation)
    assert source.shape[1:] == (q.in_channels, q.length)
    torch.testing.assert_close(result, torchs_gradient("grad_input", g, x, w, p))


# Choosing takes longer than the tests' assertions.
choose_for_weight, choose_for_input = map(cache, (grad_weight_wgmma_choose.choose, grad_input_wgmma_choose.choose))


def configs_of_weight(precision):
    found = (
        config
        for p in PROBLEMS.values()
        for alike in (0, 1, 2, 4, 8)
        if (config := choose_for_weight(p, precision, alike))
    )
    return dict.fromkeys(found)


def elements_of(config, entry, t, stride):
    """The elements of a row that a register holds, lower half first, from the product's first position on."""
    first, second = (place + t * config.lane_bytes for place in entry)
    if config.itemsize == 4:
        return [first // 4]
    if stride > 1:
        return [first // 2, second // 2]
    return [first // 2, first // 2 + 1] if first == second else [first // 2 + 1, second // 2]


@cache
def turns(window, itemsize, width):
    """Accesses of a warp for eight rows, of an output channel and a phase, by four lanes."""
    words = set()
    for m, t in itertools.product(range(8), range(4)):
        channel, phase = divmod(m, window.phases)
        element = channel * width + phase * window.dilation + t * (4 // itemsize) * window.stride
        words.add(element * itemsize // 4)
    return max(Counter(word % 32 for word in words).values())


@pytest.mark.parametrize("precision", thorough(PRECISIONS, always=["bf16"]))
def test_what_a_warp_of_grad_weight_loads_meets_in_as_few_banks_as_a_wider_box_allows(precision):
    """All rows begin alike."""
    wider = 0
    for config in configs_of_weight(precision):
        window, itemsize = config.window, config.itemsize
        if config.alike > 1 or config.by_taps:
            continue
        vector = 16 // itemsize
        span = (config.positions // config.pieces - 1) * window.stride + config.reach + 1
        least = -(-(span + vector - 1) // vector) * vector
        widths = range(least, min(least + 8 * vector, 256) + 1, vector)
        assert turns(window, itemsize, config.width) == min(turns(window, itemsize, width) for width in widths)
        wider += config.width > least
    assert wider


@every_precision
def test_a_lane_of_grad_weight_loads_what_wgmma_wants(precision):
    for config in configs_of_weight(precision):
        window, halves = config.window, 4 // config.itemsize
        entries = grad_weight_wgmma_config.operand_places(config)
        for b in range(config.tap_chunk):
            for lane in range(32):
                for half in range(2):
                    loaded = elements_of(config, entries[2 * b + half], lane % 4, window.stride)
                    # Registers 2*half and 2*half + 1 differ in the row alone.
                    ks = [fragments.wgmma_a(0, lane, 2 * half, h, halves)[1] for h in range(halves)]
                    assert loaded == [(k + b * window.step) * window.stride + config.odd for k in ks]


@every_precision
def test_a_product_of_grad_weight_loads_from_its_positions(monkeypatch, precision):
    """In Python, the addresses of a lane's rows."""
    module, slot, loads = grad_weight_wgmma_operands, 1 << 12, ("load", "load 16 bits")
    monkeypatch.setattr(module, "device_function", lambda function: function)
    monkeypatch.setattr(module, "cuda", SimpleNamespace(local=SimpleNamespace(array=lambda n, dtype: [None] * n)))
    monkeypatch.setattr(module, "ld_shared", lambda count, kind: lambda address: (loads[0], address))
    monkeypatch.setattr(module, "ld_shared_u16", lambda address: (loads[1], address))
    monkeypatch.setattr(module, "prmt", lambda low, high, selector: (low, high, selector))
    monkeypatch.setattr(module, "wgmma", lambda kind, channels: None)
    for config in configs_of_weight(precision):
        by_halves = config.itemsize == 2 and config.window.stride > 1
        selector = module.LOWER_HALVES if by_halves else module.UPPER_AND_LOWER
        positions, products = 32 // config.itemsize, wgmma_ring.PRODUCTS
        rows, load = [row << 16 for row in range(2 * config.blocks)], module.make_operands(config).load
        for k in range(products):
            registers = {}
            piece, own = divmod(k, products // config.pieces)
            start = slot + piece * config.spacing + own * positions * config.window.stride * config.itemsize
            load(k, registers, 7, SimpleNamespace(rows=rows), slot)
            expected = []
            for row, entry in itertools.product(rows, config.entries):
                low, high = ((loads[by_halves], row + start + place) for place in entry)
                expected.append(low if low == high else (low, high, selector))
            assert registers == dict(enumerate(expected, 7))


@every_precision
def test_a_product_of_grad_weight_multiplies_two_rows_of_a_block(monkeypatch, precision):
    module, found = grad_weight_wgmma_operands, []
    monkeypatch.setattr(module, "device_function", lambda function: function)
    monkeypatch.setattr(module, "wgmma", lambda kind, channels: lambda sums, *told: found.append(told))
    for config in configs_of_weight(precision):
        rows, taps, places = range(2 * config.blocks), range(config.tap_chunk), config.entries
        registers = dict(enumerate(itertools.product(rows, places), 7))
        found.clear()
        module.make_operands(config).multiply(None, registers, 7, 5)
        entries, sums = grad_weight_wgmma_config.operand_places(config), config.channels // 2
        assert found == [
            (n * sums, *((2 * block + z, entries[2 * b + half]) for half in range(2) for z in range(2)), 5, 1)
            for n, (block, b) in enumerate(itertools.product(range(config.blocks), taps))
        ]


@every_precision
def test_grad_weight_copies_by_the_maps_that_it_publishes(monkeypatch, precision):
    """The first map is x's, one a set of rows is grad_output's."""
    module, published, acquired, used = grad_weight_wgmma_producer, {}, set(), []
    g_maps, at, size = 1 << 20, 1 << 10, module.MAP_BYTES

    def publish(template, address, maps, room, lane):
        assert room == at
        published[maps] = template, address

    def publish_sets(template, maps, room, boxes, address, *_):
        for box in range(boxes):
            publish(template, address, maps + box * size, room, 0)

    def acquire_sets(maps, boxes, lane):
        acquired.update(range(maps, maps + boxes * size, size))

    for name, fake in {
        "device_function": lambda function: function,
        "make_publish": lambda itemsize: (publish_sets, acquire_sets),
        "publish": publish,
        "st_shared_b64": lambda *_: None,
        "mbarrier_arrive_expect_tx": lambda *_: None,
        "cp_async_bulk_tensor": lambda target, map_at, *_: used.append(map_at),
    }.items():
        monkeypatch.setattr(module, name, fake)
    for alike in (0, 1, 2, 4):
        config = choose_for_weight(PROBLEMS["hifigan_u1"], precision, alike)
        for found in (published, acquired, used):
            found.clear()
        (publish_maps, copy), x_map = module.make_producer(config), g_maps + config.alike * size
        maps = SimpleNamespace(g_template="g", g_address=1, b_template="x", b_address=2)
        rows, thread = SimpleNamespace(stride_c=3, length=5, channels=7), SimpleNamespace(base=at - config.map, lane=0)
        publish_maps(maps, rows, g_maps, x_map, thread)
        copy(module.Source(g_maps, x_map, 0, 0, 0, 3), 0, 0, SimpleNamespace(full=0), 0, 0)
        assert [published[one] for one in used] == [("x", 2)] + [("g", 1)] * config.alike * config.pieces
        assert acquired == set(used) == set(published)


@every_precision
def test_a_lane_of_grad_input_loads_what_wgmma_wants(precision):
    for p in PROBLEMS.values():
        config = choose_for_input(p, precision)
        if config is None:
            continue
        halves = 4 // config.itemsize
        for z in range(8):
            for lane in range(32):
                ks = [
                    fragments.wgmma_a(0, lane, 2 * (z % 2), h, halves)[1] + z // 2 * 8 * halves for h in range(halves)
                ]
                first = grad_input_wgmma_config.entry_of(z, lane % 4, halves)
                assert [first + h for h in range(halves)] == ks
                if ks[-1] >= config.entries:
                    continue
                places = [
                    grad_input_wgmma_config.place_of(k, p.kernel_size, config.width, p.dilation, 1, 0) for k in ks
                ]
                assert places == [k // p.kernel_size * config.width + k % p.kernel_size * p.dilation for k in ks]
                if halves == 2 and not config.halves:  # loaded as one word
                    assert places[1] == places[0] + 1
                    assert (places[0] + p.stride * lane - p.padding) % 2 == 0 == config.width % 2


@every_precision
def test_boxes_begin_at_multiples_of_16_bytes(precision):
    for p in PROBLEMS.values():
        config = choose_for_input(p, precision)
        if config:
            assert config.piece * config.stride * config.itemsize % 16 == 0
            assert (config.boxes - 1) * config.piece < config.rows <= config.boxes * config.piece
            assert config.stages_of(p) == 1 or config.entries * config.itemsize % 16 == 0
            if p.groups > 1 and config.through:  # a group's stages end where it ends
                assert p.out_channels_per_group * p.kernel_size % config.entries == 0
            elif p.groups > 1:
                assert p.out_channels_per_group % config.g_channels == 0
            needed = (config.piece - 1) * p.stride + (p.kernel_size - 1) * p.dilation + 1
            assert needed + 16 // config.itemsize - 1 <= config.width <= 256
    for config in configs_of_weight(precision):
        piece = config.positions // config.pieces
        assert piece * config.window.stride * config.itemsize % 16 == 0
        furthest = max(place + 3 * config.lane_bytes for place in config.places) // config.itemsize
        window = config.window
        last = (piece - 32 // config.itemsize) * window.stride + furthest + (window.phases - 1) * window.dilation
        assert last + 16 // config.itemsize - 1 - config.odd < config.width <= 256


@every_precision
def test_tiles_fit(precision):
    weight = configs_of_weight(precision)
    given = (choose_for_input(p, precision) for p in PROBLEMS.values())
    for config in (*weight, *filter(None, given)):
        assert config.shared_bytes <= H200.shared_per_block
        assert config.slot % 1024 == 0
        assert config.channels % 8 == 0
    # A warpgroup that takes every other stage has the same slots of the ring each time.
    assert all(config.stages % 2 == 0 for config in weight if config.alternate)


@every_precision
@pytest.mark.parametrize("reason", PROBLEMS)
def test_splits_are_no_longer_than_sums_may_be(reason, precision):
    p = PROBLEMS[reason]
    config = choose_for_weight(p, precision, 0)
    splits = grad_weight_wgmma_choose.splits_of(p, config)
    of_sample, stages = config.stages_of(p)
    assert of_sample * config.positions >= p.length > (of_sample - 1) * config.positions
    assert 1 <= splits <= stages
    assert -(-stages // splits) * config.positions <= grad_weight_wgmma_choose.LONGEST_SUM + config.positions


def test_taps_of_odd_chunks_do_not_shift_words():
    """With several chunks, words of two positions begin at even elements for all of them."""
    p = Problem(1, 64, 64, 9, 1000, dilation=3)
    config = grad_weight_wgmma_choose.choose(p, "bf16", 1)
    assert config.tap_chunk == 9 or config.tap_chunk * 3 % 2 == 0
    many = replace(p, kernel_size=31)
    config = grad_weight_wgmma_choose.choose(many, "bf16", 1)
    assert config.tap_chunk < 31
    assert config.tap_chunk * 3 % 2 == 0


@every_precision
def test_sets_of_rows_that_begin_alike(precision):
    """Each set has the same number of a tile's rows; groups begin with the first set; words never straddle two."""
    for p in PROBLEMS.values():
        for alike in (2, 4, 8):
            config = choose_for_weight(p, precision, alike)
            if config is None:
                continue
            assert config.g_channels % alike == 0
            assert config.box_rows * alike == config.g_channels
            assert p.groups == 1 or p.out_channels_per_group % alike == 0
            assert config.itemsize == 4 or p.stride > 1 or 16 // alike % 4 == 0
            # Only the first box has cleared elements.
            assert config.clears == p.padding <= config.positions // config.pieces * p.stride


def test_rows_alike():
    def alike(length, itemsize, channels=16, distance=None):
        strides = channels * (distance or length), distance or length, 1
        return tensor_map.rows_alike((3, channels, length), strides, itemsize)

    assert [alike(length, 4) for length in (32, 33, 34, 36)] == [1, 4, 2, 1]
    assert [alike(length, 2) for length in (32, 33, 34, 36)] == [1, 8, 4, 2]
    assert alike(33, 4, distance=36) == 1
    assert alike(33, 4, channels=6) == 0  # samples that begin unlike
    assert tensor_map.rows_alike((1, 3, 33), (99, 33, 1), 4) == 0  # fewer channels than sets
    assert tensor_map.rows_alike((1, 8, 33), (8 * 66, 66, 2), 4) == 0  # elements apart
    assert tensor_map.rows_alike((1, 8, 33), (0, 0, 1), 4) == 0  # one row for all channels


HUGE = {
    "positions": (Problem(1, 64, 64, 4, 1 << 29, stride=2), ["grad_weight_wgmma", "grad_input_wgmma"]),
    "padding": (Problem(1, 64, 64, 4, 1 << 29, stride=2, padding=1000), ["grad_weight_wgmma", "grad_input_wgmma"]),
    "rows": (Problem(1 << 26, 64, 64, 4, 3, stride=2), ["grad_weight_wgmma", "grad_input_planes"]),
}


@pytest.mark.parametrize("what", HUGE)
def test_refuses_what_32_bits_cannot_count(what):
    problem, rungs = HUGE[what]
    few = replace(problem, batch=1, length=1000)
    for rung in map(GRADIENTS.get, rungs):
        assert "32 bits" in rung.supports(problem, torch.float32, "tf32")
        assert rung.supports(few, torch.float32, "tf32") is None


def test_swizzled_descriptor():
    descriptor = swizzled_descriptor(0x12340)
    assert descriptor & 0x3FFF == 0x1234
    assert descriptor >> 32 & 0x3FFF == 1024 // 16
    assert descriptor >> 62 == 1  # 128 bytes


def test_the_room_of_the_maps_is_held_until_the_launch(monkeypatch):
    """Freed earlier, it might be another tensor's when the kernel writes there."""
    rooms, held = [], []

    def workspace(*_):
        def take():
            room = torch.empty(64)
            rooms.append(weakref.ref(room))
            return room

        return take

    def launch(*_):
        held.append(rooms[-1]() is not None)

    monkeypatch.setattr(grad_weight_wgmma, "workspace", workspace)
    monkeypatch.setattr(grad_weight_wgmma, "_prepared", lambda *_: (1, 1, launch))
    monkeypatch.setattr(grad_weight_wgmma, "room", lambda *_: lambda: torch.empty(1))
    monkeypatch.setattr(grad_weight_wgmma.grad_weight_sum, "prepare", lambda *_: lambda sums, result: None)
    monkeypatch.setattr(grad_weight_wgmma.gpu, "of", lambda index: H200)
    for name in ("dac_u1", "hifigan_u1"):  # whole sums, and others
        p = replace(workloads.get(name).problem, batch=1, length=64)
        g, x = torch.empty(1, p.out_channels, p.out_length), torch.empty(1, p.in_channels, 64)
        result = torch.empty(p.in_channels, p.out_channels, p.kernel_size)
        rung = GRADIENTS["grad_weight_wgmma"]
        rung.prepare(*map(Layout.of, (g, x, result)), p, precision="tf32")(g, x, result)
    assert held == [True, True]


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_sums_are_stored_as_the_gradient_where_there_are_tiles_enough(precision):
    def direct(name, **sizes):
        problem = replace(workloads.get(name).problem, **sizes)
        _, config = GRADIENTS["grad_weight_wgmma"].config(problem, DTYPES[precision], precision=precision)
        return config.direct

    assert direct("dac_u1")
    assert direct("oobleck_u1")
    assert not direct("hifigan_u1")  # in several splits
    assert not direct("dac_u1", kernel_size=15)  # a tile's last tap does not exist


@pytest.mark.parametrize("shift", [0, 1])
def test_a_gradient_that_begins_anywhere_is_not_written_in_vectors(monkeypatch, shift):
    seen = []

    def prepared(problem, config, *_):
        seen.append(config.direct)
        return 1, 1, None

    def second(problem, tile, sums, config):
        seen.append(config.run)

    monkeypatch.setattr(grad_weight_wgmma, "_prepared", prepared)
    monkeypatch.setattr(grad_weight_wgmma.grad_weight_sum, "prepare", second)
    monkeypatch.setattr(grad_weight_wgmma.gpu, "of", lambda index: H200)
    p = replace(workloads.get("dac_u1").problem, batch=1, length=64)
    g, x = torch.empty(1, p.out_channels, p.out_length), torch.empty(1, p.in_channels, 64)
    weight = p.in_channels, p.out_channels, p.kernel_size
    result = torch.empty(math.prod(weight) + shift)[shift:].view(weight)
    GRADIENTS["grad_weight_wgmma"].prepare(*map(Layout.of, (g, x, result)), p, precision="tf32")
    assert seen == ([False, 1] if shift else [True])


@every_precision
@pytest.mark.parametrize(("padding", "output_padding"), [(0, 0), (0, -4), (2, 0), (2, -3), (5, 5)])
def test_windows_beside_rows_are_cleared_where_either_end_is_cropped(precision, padding, output_padding):
    problem = Problem(2, 128, 64, 8, 333, stride=4, padding=padding, output_padding=output_padding)
    cropped = padding > 0 or padding - output_padding > 0
    assert not grad_input_wgmma_choose.choose(problem, precision, 1).clears
    for sheared in (2, 4):
        assert grad_input_wgmma_choose.choose(problem, precision, sheared).clears == cropped
