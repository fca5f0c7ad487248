"""k6's kernel as Python (thread_block.py): who copies, waits, multiplies and stores what.

Windows are what a producer has located, sums what has been multiplied."""

from types import SimpleNamespace

from numba_tconv.kernels.common import pipeline
from numba_tconv.kernels.common.tensor_core import fragments
from numba_tconv.kernels.common.tensor_core.outputs import Output
from numba_tconv.kernels.common.tensor_map import MAP_BYTES
from numba_tconv.kernels.k6_wgmma import arguments, barriers, boxes, consumer, epilogue, kernel, mainloop, plan
from numba_tconv.kernels.k6_wgmma import producer as k6_producer
from numba_tconv.kernels.k6_wgmma import schedule as k6_schedule
from numba_tconv.kernels.k6_wgmma.operands import lane_rows_of
from numba_tconv.kernels.k6_wgmma.tile import CONSUMERS, PRODUCERS
from numba_tconv.runtime.layout import NO_GPU, Layout
from tests.thread_block import OTHER, Block, in_python

BASE, ROOM, ADDRESS = 2048, 1 << 40, 1 << 41


class Packed:
    """The weights' memory; its last element is their inverse scale."""

    def __init__(self, size):
        self.shape = (size,)

    def __getitem__(self, index):
        assert "waited" in state.block.now.marks, "they may not be packed yet"
        return "inverse", index == self.shape[0] - 1


state = SimpleNamespace(block=None, config=None, given=None)  # of the running test


def elements():
    """Shared memory as elements of x."""
    return state.block.words if state.config.tile.itemsize == 4 else state.block.elements


def fake_windows(config):
    """The windows of the pair of tiles that a producer warp has located."""

    def copy(z, at, row, barrier):
        tiles, chunk = state.block.now.located
        x, c = state.given.x, config
        what = "x", *tiles[z], chunk, row << x.window.alike_log
        state.block.copy(BASE + at + z * x.window.region, c.depth * x.window.pitch, what, 0, barrier)

    def locate_windows(windows, bounds, tiles, chunk, x, box_bytes, announced):
        state.block.now.located = [*zip(tiles.sample, tiles.column, strict=True)], chunk
        return announced + (config.regions * box_bytes if x.fetch.boxed else 0)

    def copy_boxes(windows, x, x_map, base, at, row, barrier):
        assert base == BASE
        assert not x.fetch.boxed or x_map in state.block.now.marks, "acquired"
        for z in range(config.regions if x.fetch.boxed else 0):
            copy(z, at, row, barrier)

    def fill_rest(windows, x, at, channel0, stage, in_per_group, shared, lane, barrier):
        assert shared.elements is elements()
        assert shared.base == BASE
        assert in_per_group == state.given.channels.in_per_group
        state.block.now.fills = fills_of(state.block.now) + 1
        if not x.fetch.boxed and lane == 0:  # at once: it writes itself
            for z in range(config.regions):
                copy(z, at, channel0 + stage * config.depth, None)
                state.block.land(state.block.copies.pop())

    return locate_windows, copy_boxes, fill_rest


def fills_of(thread):
    """How many stages a lane has filled."""
    return getattr(thread, "fills", 0)


def arrive(at):
    block, me = state.block, state.block.now
    assert all(fills_of(thread) == fills_of(me) for thread in block.threads if thread.warp == me.warp), (
        "lanes still fill"
    )
    block.arrive(at)


def check_split(split):
    block, c = state.block, state.config
    assert split.ready == BASE + c.ready
    if c.split_ahead:
        assert split.inverses == BASE + c.ready + 8 * c.stages
        assert split.scales == ("scales", ("inverse", True))
    assert "waited" in block.now.marks


def fake_split_stage(config):
    def split_stage(lane, at, slot, split, window, begins, ends):
        check_split(split)
        what, _ = state.block.memory.read(at)
        assert what[0] == "x"
        if lane == 0:
            for z in range(config.regions):
                at_z = at + z * window.region
                (_, *what), _ = state.block.memory.read(at_z)
                state.block.memory.write(at_z, config.depth * window.pitch, ("x", *what))
        state.block.arrive(split.ready + slot)

    return split_stage


def fake_bring(lane, at, w, first, group_tiles, barrier):
    if lane == 0:
        assert "waited" in state.block.now.marks
        state.block.expect(barrier, 0)
        state.block.copy(at, state.config.stage_weights, "w", int(first) * state.config.tile.itemsize, barrier)


def fake_order(lane, raw, at, ready):
    what, byte = state.block.memory.read(raw, state.config.stage_weights)
    if lane == 0:
        state.block.memory.write(at, state.config.stage_weights, ("ordered", what), byte)
    state.block.arrive(ready)


def bulk(at, source, index, size, barrier):
    assert "waited" in state.block.now.marks, "weights may not be packed yet"
    assert 0 < size <= kernel.BULK or not state.config.resident
    state.block.copy(at, size, source, index * state.config.tile.itemsize, barrier)


def fake_multiply(config):
    def multiply(sums, v, at, descriptor, add, taps, inverse, offset, view, lane):
        block, me = state.block, state.block.now
        held = sums.total if config.tile.operand_halves == 2 else sums.acc
        assert all(value is not None for value in held), "begins with numbers"
        if config.tile.operand_halves == 1 and not add:
            held[0] = ()
        weights_at = (descriptor & 0x3FFF) << 4
        assert descriptor >> 16 == config.tile.rows, "core matrices of weights along the depth"
        weights = block.memory.read(weights_at, config.tile.depth_weights)
        held[0] = (held[0] or ()) + ((v[at], weights, taps),)
        if config.tile.operand_halves == 1:
            me.products.append([(weights_at, weights_at + config.tile.depth_weights)])
        if not config.paired:
            turn = 2 * len(me.stored) + me.warp // 4
            assert turn >= block.marks.get("turn", 0), "a later tile's products have begun"
            block.marks["turn"] = turn
        block.meet(("warp", me.warp), 32)

    return multiply


def fake_window(config, first=0, end=None):
    """A lane's window: its content and where it reads."""
    tile = config.tile

    def load(v, at, offset, view, lane):
        me, address = state.block.now, view.address + offset
        window = state.given.x.window
        channels = 4 // tile.itemsize
        assert lane.odd_step == window.pitch + window.shear
        assert lane.h_step == tile.depth // lane_rows_of(tile) * window.pitch
        assert lane.stage_bytes == window.stage_bytes
        assert view.together == (me.lane, me.warp % 4)
        if config.split_ahead:
            assert lane.inverses == BASE + config.ready + 8 * config.stages + 4 * (me.warp // 4)
        if tile.operand_halves == 2:
            assert lane.scales == ("scales", ("inverse", True))
        what, byte = state.block.memory.read(address)
        column = fragments.column_of(me.warp % 4, me.lane, 0, 0) + tile.lead - tile.halo
        c, rest = divmod(byte - column * tile.itemsize, window.pitch)
        assert rest == c % (1 << window.alike_log) * window.shear
        c -= me.lane % 4 * channels
        v[at] = v[at + tile.operand_halves * 2 * (4 + tile.halo) - 1] = (what, c, view.beyond)
        return 1.0

    return load


def fake_view(config):
    def view_of(n, j, chunk, x, column, x_at):
        me = state.block.now
        me.views += 1
        assert column == fragments.column_of(me.warp % 4, me.lane, 0, 0)
        return arguments.View(x_at, False, False, (n, j, chunk), (me.lane, me.warp % 4))

    return view_of


def record(sums, leaving, buffers, out, place, bias, thread):
    block, c, me = state.block, state.config, state.block.now
    assert not me.products, "under way"
    team = me.warp // 4
    assert thread == (team, me.warp % 4, me.lane)
    g = state.given
    channels = g.channels.out_per_group * g.channels.groups
    assert out == Output(g.y.data, g.weights.bias, g.weights.has_bias, g.y.batch, g.columns.per_sample,
                         g.columns.first, channels, g.y.length, g.columns.padding, g.alignment)  # fmt: skip
    assert bias == ("bias", place.channel, place.channels_left, 32 * thread.warp + me.lane)
    if buffers:
        words, of_x, base = buffers.shared
        assert (words is block.words, of_x is elements(), base) == (True, True, BASE)
        assert buffers.at == c.staging + (team * c.staging_bytes // 2 if c.own_staging else 0)
        assert buffers.biases_at == c.biases_at + team * c.bias_bytes
    if leaving:
        turns = -(-c.tile.channels // 4)  # of three quarters of a tile's
        depths = g.grid.tap_chunks * g.grid.channel_chunks
        assert leaving.interval == max(1, depths * 3 // 4 // c.unroll // turns)
        assert leaving.y is out.data
        assert leaving.target == [0]
        assert leaving.held == [0, 0, 0]
    if c.buffers == 1 and not c.bulk_channels:
        block.marks.setdefault("storing", set()).add(me.number)
        me.pause(lambda: True)
        assert {number // 128 for number in block.marks["storing"]} == {team}, "the buffer is one's at a time"
        block.marks["storing"].discard(me.number)
    held = sums.total if c.tile.operand_halves == 2 else sums.acc
    me.stored.append((tuple(place[:5]), held[0]))


def kernel_in_python(monkeypatch, problem, config, more):
    """k6's function, its blocks, and its weights."""
    tile, dtype = config.tile, config.tile.dtype
    strides = problem.in_channels * (problem.length + more), problem.length + more, 1
    x = Layout(problem.in_shape, strides, dtype, NO_GPU, more * tile.itemsize)
    w = Layout.contiguous(problem.weight_shape, dtype, NO_GPU)
    captured = []
    prepare = SimpleNamespace(prepare=lambda *given, early: captured.append(given))
    monkeypatch.setattr(plan.device, "of", lambda index: SimpleNamespace(multiprocessors=3))
    monkeypatch.setattr(plan, "template_map", lambda *_: ("template",))
    plan.plan_of.__wrapped__(lambda config: prepare, problem, config, x, w, True, 8)
    blocks, tensor_map, x, weights, *others = captured[0]
    tensor_map, x = tensor_map._replace(room=ROOM), x._replace(address=ADDRESS)
    packed = Packed(weights.packed.shape[0])
    weights = weights._replace(packed=packed)
    names = "tensor_map", "x", "weights", "y", "channels", "columns", "grid", "alignment"
    given = tensor_map, x, weights, *others
    state.config, state.given = config, SimpleNamespace(**dict(zip(names, given, strict=True)))

    def publish(template, address, maps, at, lane):
        assert (template, at) == (tensor_map.template, BASE + config.map)
        assert address == ADDRESS - x.early * tile.itemsize
        assert maps == ROOM + state.block.number * MAP_BYTES
        state.block.marks.setdefault("published", []).append(state.block.now.number)

    def acquire(maps):
        assert len(state.block.marks["published"]) == 2
        assert maps == ROOM + state.block.number * MAP_BYTES
        state.block.now.marks.add(maps)

    def launch():
        assert "waited" in state.block.now.marks
        state.block.now.marks.add("launched")

    fakes = dict(
        shared_address=lambda words, index: BASE,
        publish=publish,
        mbarrier_arrive=arrive,
        tensormap_acquire=acquire,
        griddepcontrol_launch_dependents=launch,
        cp_async_bulk=bulk,
        scales_of=lambda inverse: ("scales", inverse),
        make_windows=fake_windows,
        make_split_stage=fake_split_stage,
        make_bring=lambda config: fake_bring,
        make_order=lambda config: fake_order,
        make_window=fake_window,
        _make_multiply=fake_multiply,
        ld_shared=lambda count, kind: lambda address: 1.0,
        make_hand_over=lambda config: (lambda leaving: None, None),
        make_view=fake_view,
        make_bias_of=lambda config: lambda out, *told: ("bias", *told),
        make_aim=lambda tile, **_: (lambda n, j, out: (None, j // tile.advance % 2 == 0), lambda *_: None),
        make_store_any=lambda *_, **__: None,
        _make_by_rounds=lambda config: lambda store, keep: record,
        _make_runs=lambda config, rows: record,
        make_store_rows=lambda config: record,
        make_bulk_store=lambda config: (record, lambda leaving, team: state.block.now.marks.add(("finished", team))),
        make_phases_store=lambda config: (
            lambda sums, out, place, bias, me: record(sums, None, None, out, place, bias, me)
        ),
    )
    modules = kernel, consumer, mainloop, k6_schedule, k6_producer, barriers, arguments, pipeline, epilogue, boxes
    in_python(monkeypatch, lambda: state.block, modules, **fakes)
    function = kernel.make_kernel.__wrapped__(config.compiled)
    return lambda: function(*given), blocks, packed


def run_kernel(monkeypatch, problem, config, more, seed):
    """Tiles that were stored, and the weights."""
    function, blocks, packed = kernel_in_python(monkeypatch, problem, config, more)
    stored = []
    for number in range(blocks):
        block = state.block = Block(number, blocks, seed)
        block.run(function, range(4 * CONSUMERS + PRODUCERS))
        check_threads(block, config, state.given.x)
        for team in range(CONSUMERS):
            first, *others = (thread.stored for thread in block.threads if thread.warp // 4 == team)
            assert all(other == first for other in others)
            stored += first
    return packed, stored


def check_threads(block, config, x):
    for thread in block.threads:
        consumes = thread.warp < 4 * CONSUMERS
        assert ("grow" in thread.marks) == consumes == ("shrink" not in thread.marks)
        assert {"waited", "launched"} <= thread.marks
        assert thread.views == len(thread.stored) * state.given.grid.tap_chunks, "of each window once"
        if consumes and config.bulk_channels:
            assert ("finished", thread.warp // 4) in thread.marks
    assert sorted(block.marks.get("published", [])) == ([256, 256 + OTHER] if x.fetch.boxed else []), (
        "by all lanes of a warp"
    )
    for at, (count, missing, size, _) in block.barriers.items():
        assert (missing, size) == (count, 0), f"arrivals at {at - BASE} that nobody waits for"
