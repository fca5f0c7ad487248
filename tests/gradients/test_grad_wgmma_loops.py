"""Blocks of the wgmma gradients in Python: each stage is brought and multiplied once, and each tile stored once."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.gradients import wgmma_ring
from numba_tconv.gradients.input.wgmma import choose as input_choose
from numba_tconv.gradients.input.wgmma import epilogue as input_epilogue
from numba_tconv.gradients.input.wgmma import kernel as of_input
from numba_tconv.gradients.input.wgmma import operands as input_operands
from numba_tconv.gradients.input.wgmma import producer as input_producer
from numba_tconv.gradients.weight.wgmma import choose as weight_choose
from numba_tconv.gradients.weight.wgmma import kernel as of_weight
from numba_tconv.gradients.weight.wgmma import operands as weight_operands
from numba_tconv.gradients.weight.wgmma import producer as weight_producer
from numba_tconv.gradients.wgmma_ring import BLOCK, CONSUMERS, PRODUCTS, THREADS, Operands
from numba_tconv.kernels.common import pipeline
from numba_tconv.kernels.common.tensor_map import MAP_BYTES
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.device import H200
from numba_tconv.runtime.layout import NO_GPU, Layout
from tests.thread_block import OTHER, Block, in_python

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")
SHARED, BASE, ROOM, SMALL = 2560, 3072, 1 << 40, replace(H200, multiprocessors=3)
WARPS = range(THREADS // 32)
state = SimpleNamespace(block=None, config=None, boxes=0)  # of the running test; boxes: maps of grad_output


def maps_of_block():
    return ROOM + state.block.number * (state.boxes + 1) * MAP_BYTES


def copy_box(at, map_at, *begin_and_barrier):
    *begin, barrier = begin_and_barrier
    c, number = state.config, (map_at - maps_of_block()) // MAP_BYTES
    assert map_at in state.block.now.marks, "acquired"
    of_b = number == state.boxes
    name, size = ("b", c.b_bytes) if of_b else (f"g{number}", c.box_bytes)
    state.block.copy(int(at), size, (name, *map(int, begin)), 0, barrier)


def publish(template, address, map_at, room, lane):
    assert room == BASE + state.config.map
    of_b = map_at == maps_of_block() + state.boxes * MAP_BYTES
    assert (template, address) == (("b", 2) if of_b else ("g", 1))
    state.block.marks.setdefault(map_at, []).append(lane)


def acquire(map_at):
    assert state.block.now.lane in state.block.marks[map_at]
    state.block.now.marks.add(map_at)


def publish_sets(template, maps, room, boxes, address, early, stride_c, length, channels, lane):
    for box in range(boxes):
        publish(template, address, maps + box * MAP_BYTES, room, lane)


def acquire_sets(maps, boxes, lane):
    for box in range(boxes):
        acquire(maps + box * MAP_BYTES)


def fake_operands(registers, check):
    """Sums are what was multiplied: windows of grad_output, and B, with the bytes from their beginnings."""

    def prepare(lane, stage, offset):
        assert offset == stage * state.config.slot
        state.block.now.prepared = offset
        check(lane, stage, offset)

    def load(k, v, first, lane, offset):
        assert offset == state.block.now.prepared
        window, _ = state.block.memory.read(BASE + state.config.b_bytes + offset)
        v[first] = v[first + registers - 1] = window, k

    def multiply(sums, v, first, descriptor):
        block, me = state.block, state.block.now
        assert None not in sums
        assert not any(sums[1:]), "begins with zeros"
        at = (descriptor & 0x3FFF) << 4
        sums[0] = (sums[0] or ()) + ((*v[first], *block.memory.read(at)),)
        own = block.marks.get("turn", 0)
        turn = CONSUMERS * len(me.stored) + me.warp // 4
        assert not state.in_turn or turn >= own, "a later tile's products have begun"
        block.marks["turn"] = max(turn, own)
        me.products.append([(at, at + 32)])
        block.meet(("warp", me.warp), 32)

    return Operands(load, multiply, prepare, registers)


def run(function, blocks, seed):
    """What some blocks' warpgroups stored."""
    for number in {*range(0, blocks, -(-blocks // 4)), blocks - 1}:
        block = state.block = Block(number, blocks, seed)
        block.run(function, WARPS)
        for thread in block.threads:
            consumes = thread.warp < 4 * CONSUMERS
            assert ("grow" in thread.marks) == consumes == ("shrink" not in thread.marks)
        for box in range(state.boxes + 1):
            assert sorted(block.marks[maps_of_block() + box * MAP_BYTES]) == [0, OTHER], "by one warp"
        stored = []
        for team in range(CONSUMERS):
            first, *others = (thread.stored for thread in block.threads if thread.warp // 4 == team)
            assert all(other == first for other in others)
            stored.append(first)
        yield number, stored


def prepare(monkeypatch, module, config, arguments, **fakes):
    """The kernel's function in Python, its blocks and its arguments, of ``arguments`` for ``_prepared``."""
    captured = []
    kept = module.make_kernel.__wrapped__
    monkeypatch.setattr(module, "template_of_rows", lambda *_: "g")
    monkeypatch.setattr(module, "template_of_b", lambda *_: "b")
    launch = SimpleNamespace(prepare=lambda *given: captured.append(given))
    with monkeypatch.context() as patch:
        patch.setattr(module, "make_kernel", lambda config: launch)
        module._prepared.__wrapped__(*arguments)
    blocks, maps, *others = captured[0]
    maps = maps._replace(g_address=1, b_address=2, workspace=ROOM)
    fakes |= dict(
        shared_address=lambda words, index: SHARED,
        cp_async_bulk_tensor=copy_box,
        cp_async_bulk_tensor_4d=copy_box,
        publish=publish,
        tensormap_acquire=acquire,
        make_publish=lambda itemsize: (publish_sets, acquire_sets),
    )
    modules = module, input_producer, input_operands, input_epilogue, weight_producer, wgmma_ring, pipeline
    in_python(monkeypatch, lambda: state.block, modules, **fakes)
    function = kept(config)
    state.config = config
    return lambda: function(maps, *others), blocks, others


def chosen(found, fields):
    return next(c for c in found if all(getattr(c, name) == value for name, value in fields.items()))


# grad_input: problem, precision, every how many rows begin alike, fields, parts of a tile.
INPUT = {
    "ping-pong": (Problem(3, 100, 40, 4, 300, stride=2, padding=1), "tf32", 1, dict(alternate=True, blocks=1), 1),
    "cooperative": (Problem(2, 300, 40, 4, 300, stride=2, padding=1), "tf32", 1, dict(alternate=False, blocks=1), 1),
    "ping-pong, sheared, stages through channels": (
        *(Problem(2, 100, 48, 11, 300, stride=5, padding=3), "bf16", 2),
        *(dict(alternate=True, through=True, sheared=2), 1),
    ),
    "cooperative, groups, stages through channels": (
        *(Problem(2, 64, 128, 11, 300, stride=3, groups=2), "bf16", 1),
        *(dict(alternate=False, through=True, blocks=2), 1),
    ),
    "ping-pong, parts": (
        *(Problem(1, 16, 32, 11, 300, stride=5, padding=3), "bf16", 1),
        *(dict(alternate=True, through=True, blocks=2), 2),
    ),
    "cooperative, parts, groups": (
        *(Problem(2, 64, 128, 8, 130, stride=4, groups=2), "tf32", 2),
        *(dict(alternate=False, sheared=2), 4),
    ),
}


@pytest.mark.parametrize("case", INPUT)
def test_grad_input(monkeypatch, case):
    p, precision, sheared, fields, splits = INPUT[case]
    config = chosen(input_choose.candidates(p, precision, sheared), fields)
    config = replace(config, split_k=splits > 1, stages=3)  # the ring begins again in every tile
    c, alternate = config, config.alternate
    state.boxes, state.in_turn, dtype = 1, alternate, DTYPES[precision]
    g, w = Layout.contiguous(p.out_shape, dtype, NO_GPU), Layout.contiguous(p.weight_shape, dtype, NO_GPU)
    monkeypatch.setattr(of_input, "splits_of", lambda *_: splits)
    monkeypatch.setattr(of_input, "template", lambda *_: "g")
    monkeypatch.setattr(of_input, "_second_stage", lambda *_: SimpleNamespace(sums=1))

    def fill(table, number, shear):
        assert (table, number, shear) == (BASE + c.words + 8 * CONSUMERS, state.block.now.number, grad_rows.shear)
        state.block.now.marks.add("filled")

    def window_of(rows, places, phase, *told):
        assert (len(rows), len(places), len(phase)) == (2 * c.blocks, 16 if c.halves else 8, 1)
        me = state.block.now
        consumer = me.warp // 4, me.warp % 4, me.lane
        assert told == (shape, grad_rows, BASE, consumer)
        assert not c.through or all("filled" in thread.marks for thread in state.block.threads)
        return "window", consumer

    def begin_tile(window, first, meets, place, *told):
        assert (len(first), len(meets)) == (2 * c.blocks, 4 * c.blocks)
        assert told == (grid, shape, grad_rows, window[1])
        return place

    def check(place, stage, offset):
        """A warp has begun the tile that it multiplies."""
        state.block.now.place = tuple(map(int, place))

    def store(sums, result, target, warp, lane):
        me = state.block.now
        assert not me.products, "under way"
        assert (result is grad, warp, lane) == (True, me.warp % 4, me.lane)
        me.stored.append((me.place, tuple(map(int, target)), sums[0]))

    operands = fake_operands(4 * c.blocks, check)
    fakes = dict(make_fill=lambda config: fill, make_lane=lambda config: (window_of, begin_tile))
    fakes |= dict(make_operands=lambda config: operands, make_store=lambda config: store)
    function, blocks, (grad, shape, grid, grad_rows, _) = prepare(
        monkeypatch, of_input, config, (p, config, g, w, SMALL), **fakes
    )
    position_tiles, channel_tiles, tiles = c.tiles_of(p)
    stages, channels = c.stages_of(p) // splits, p.in_channels_per_group
    for number, stored in run(function, blocks, case):
        own = range(number, tiles * splits, blocks)
        for team in range(CONSUMERS):
            wanted = []
            for tile in own[team::CONSUMERS] if alternate else own:
                rest, channel_tile = divmod(tile, channel_tiles)
                rest, position_tile = divmod(rest, position_tiles)
                rest, group = divmod(rest, p.groups)
                n, part = divmod(rest, splits)
                place = n, group, part, channel_tile, position_tile * c.rows
                position = place[4] + (0 if alternate else team * BLOCK * c.blocks)
                channel = ((n * p.groups + group) * splits + part) * channels + channel_tile * c.channels
                left = channels - channel_tile * c.channels, min(p.length - position, c.rows)
                column = (place[4] * p.stride - p.padding) // (16 // c.itemsize) * (16 // c.itemsize)
                products = []
                for s in range(part * stages, (part + 1) * stages):
                    row = s * c.entries // c.period if c.through else s * c.g_channels // c.sheared
                    row += group * p.out_channels_per_group // c.sheared
                    window = ("g0", column, 0, row, n) if c.sheared > 1 else ("g0", column, row, n)
                    b = "b", s * c.entries, group * channels + channel_tile * c.channels, 0
                    products += [(window, k, b, 32 * k) for k in range(PRODUCTS)]
                wanted.append((place, (channel * p.length + position, p.length, *left), tuple(products)))
            assert stored[team] == wanted


# grad_weight: problem, precision, every how many rows begin alike (0: planes), fields, splits.
WEIGHT = {
    "own pairs": (Problem(5, 40, 48, 4, 300, stride=2, padding=1), "tf32", 1, dict(alternate=False, blocks=2), 3),
    "alternate stages, dilation": (
        *(Problem(5, 40, 48, 4, 300, stride=2, dilation=3, padding=1), "tf32", 1),
        *(dict(alternate=True, blocks=2), 2),
    ),
    "own pairs, cleared, groups": (
        *(Problem(4, 80, 160, 8, 301, stride=4, padding=2, groups=2), "tf32", 4),
        *(dict(alternate=False, clears=2, blocks=1), 4),
    ),
    "alternate stages, cleared, padded pairs": (
        *(Problem(5, 40, 64, 15, 301, stride=7, padding=3), "bf16", 2),
        *(dict(alternate=True, clears=3, by_taps=False), 1),
    ),
    "own pairs, cleared, padded pairs, more splits than a sample's stages": (
        *(Problem(40, 40, 64, 7, 50, stride=3, padding=3), "tf32", 2),
        *(dict(alternate=False, clears=3, by_taps=False, blocks=1), 5),
    ),
    "by taps, cleared": (
        *(Problem(2, 40, 64, 11, 301, stride=3, padding=4), "tf32", 2),
        *(dict(alternate=False, clears=4, by_taps=True), 2),
    ),
    "by taps, alternate stages": (
        *(Problem(3, 40, 64, 11, 301, stride=3, padding=4), "bf16", 1),
        *(dict(alternate=True, by_taps=True), 1),
    ),
    "tap chunks, odd padding": (
        *(Problem(6, 300, 70, 9, 301, padding=3, dilation=3), "bf16", 1),
        *(dict(alternate=False, tap_chunk=2, odd=1), 4),
    ),
    "planes": (Problem(4, 40, 48, 5, 300, stride=2, padding=1), "bf16", 0, dict(alternate=False), 2),
}


@pytest.mark.parametrize("case", WEIGHT)
def test_grad_weight(monkeypatch, case):
    p, precision, alike, fields, splits = WEIGHT[case]
    config = replace(chosen(weight_choose.candidates(p, precision, alike), fields), stages=4)
    c, window, alternate, by_taps = config, config.window, config.alternate, config.by_taps
    state.boxes, state.in_turn, dtype = c.alike, False, DTYPES[precision]
    length, channels = (p.out_length, p.out_channels) if alike else (p.length + 8, p.out_channels * p.stride)
    stride_c = length + (16 // c.itemsize // c.alike - length) % (16 // c.itemsize) if c.alike > 1 else length + 3
    g = Layout((p.batch, channels, length), (channels * stride_c, stride_c, 1), dtype, NO_GPU, 0)
    x = Layout.contiguous(p.in_shape, dtype, NO_GPU)
    monkeypatch.setattr(of_weight, "splits_of", lambda *_: splits)

    def row_of(z):
        """The row of a lane, its pair's channel in the tile's boxes, and its phase or tap."""
        me = state.block.now
        row = z // 2 * BLOCK + z % 2 * 8 + 16 * (me.warp % 4) + me.lane // 4
        row += 0 if alternate else BLOCK * c.blocks * (me.warp // 4)
        first = pair_tile() * c.pairs
        channel, phase = divmod(first + min(row, c.pairs - 1), window.phases)
        return row, channel - first_channel(), phase

    def tile_of(number):
        rest, channel_tile = divmod(number % grid.tiles, grid.channel_tiles)
        rest, pairs = divmod(rest, grid.pair_tiles)
        group, chunk = divmod(rest, grid.tap_chunks)
        return group, chunk, pairs, channel_tile

    def pair_tile():
        return tile_of(state.block.number)[2]

    def first_channel():
        """Of the tile's boxes."""
        return pair_tile() * c.pairs // (window.phases * c.alike) * c.alike if by_taps else pair_tile() * c.g_channels

    def first_element():
        chunk = tile_of(state.block.number)[1]
        return rows.first + chunk * c.tap_chunk * window.step * window.stride

    def meets(address, channel, element):
        """Whether a channel's element lies at ``address``, by the boxes that have arrived."""
        (name, column, *_), byte = state.block.memory.read(address)
        before = channel % c.alike * rows.stride_c % (16 // c.itemsize)
        assert name == f"g{channel % c.alike}"
        found = column + (byte - channel // c.alike * c.width * c.itemsize) // c.itemsize
        return found == before + element

    def check(lane, stage, offset):
        me = state.block.now
        (_, position, _, _), _ = state.block.memory.read(BASE + offset)
        begin = position * window.stride + first_element()
        for z in range(2 * c.blocks):
            row, channel, phase = row_of(z)
            element = begin + phase * window.dilation - c.odd + me.lane % 4 * c.lane_bytes // c.itemsize
            assert meets(lane.rows[z] + offset, channel, element)
            if c.clears:
                first_of_channel = row < c.pairs and (row == 0 or phase == 0)
                assert (lane.starts[z] == weight_operands.NOT_MINE) == (not first_of_channel)
                assert not first_of_channel or meets(lane.starts[z] + offset, channel, begin)
        if c.clears:
            assert state.block.words[lane.flags + 8 * stage] == (position == 0)
        assert (lane.first_cleared, lane.before) == (me.lane % 4, -first_element())
        assert lane.barrier == weight_operands.BARRIER + (me.warp // 4 if alternate else 0)

    def store(sums, result, staging, given, block, consumer):
        me = state.block.now
        assert not me.products, "under way"
        assert consumer == (me.warp // 4, me.warp % 4, me.lane)
        assert (result is partials, given) == (True, grid)
        assert (staging.shared is state.block.words, staging.first) == (True, (BASE - SHARED) // 4)
        me.stored.append((tuple(map(int, block)), sums[0]))

    operands = fake_operands(c.operands, check)
    function, blocks, (partials, rows, grid) = prepare(
        monkeypatch,
        of_weight,
        config,
        (p, config, alike > 0, g, x, SMALL),
        make_operands=lambda config: operands,
        make_store=lambda config: store,
        st_shared_b64=lambda at, value: state.block.words.update({int(at): value}),
    )
    assert blocks == splits * grid.tiles
    of_sample, all_stages = c.stages_of(p)
    for number, stored in run(function, blocks, case):
        split, (group, _, pairs, channel_tile) = number // grid.tiles, tile_of(number)
        own = range(split, all_stages, splits)
        for team in range(CONSUMERS):
            products = []
            for s in own[team::CONSUMERS] if alternate else own:
                n, position = divmod(s, of_sample)
                position *= c.positions
                column = position * window.stride + first_element() // (16 // c.itemsize) * (16 // c.itemsize)
                row = (group * grid.group_rows + first_channel()) // c.alike
                b = "b", position, group * p.in_channels_per_group + channel_tile * c.channels, n
                products += [(("g0", column, row, n), k, b, 32 * k) for k in range(PRODUCTS)]
            place = split, number % grid.tiles, group, pairs, channel_tile
            assert stored[team] == [(place, tuple(products) or 0.0)]
