"""k6's stores of rows in rounds on the CPU: `store_rows` runs lane by lane in plain Python.

Instructions are replaced by their meanings, which also refuse bad addresses. A warpgroup's threads run one after the
other, once for each stretch between two barriers: they leave traces of it alone, and know what earlier ones loaded. In
a stretch no thread may load what another stores.
"""

import contextlib
import itertools
from collections import Counter, defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_core import store_any as tensor_store
from numba_tconv.kernels.common.tensor_core import store_rows as tensor_rows
from numba_tconv.kernels.common.tensor_core import store_runs as tensor_runs
from numba_tconv.kernels.common.tensor_core.fragments import wgmma_d
from numba_tconv.kernels.common.tensor_core.outputs import Place, Thread
from numba_tconv.kernels.k6_wgmma import epilogue as k6_epilogue
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.kernels.k6_wgmma.arguments import Buffers, Shared, Sums
from numba_tconv.kernels.k6_wgmma.epilogue import rows as k6_rows
from numba_tconv.lab.measure import workloads
from tests.kernels.test_tensor_store import cast_quickly, expected, output_of
from tests.thorough import thorough

from .test_k6_bulk import LANES, WARPS, Passed, bias_of, repeated, same, straight_tiles, sums_of

BUFFERS = 1024  # bytes of shared memory where they lie


@pytest.fixture
def in_python(monkeypatch):
    def barrier_sync(barrier, threads):
        assert (barrier, threads) == (2, state.threads)
        state.stretch += 1
        if state.stretch > state.watched:
            raise Passed

    def store(address, *values):
        assert address % (4 * len(values)) == 0
        if state.stretch == state.watched:
            for z, value in enumerate(values):
                state.memory[address + 4 * z] = value
                state.stored.add(address + 4 * z)

    def ld_shared(count, kind):
        def load(address):
            assert address % (4 * count) == 0, "whether the value is used or not"
            state.loads += 1
            if state.stretch == state.watched:
                words = [address + 4 * z for z in range(count)]
                state.loaded.update(words)
                state.known[state.thread].append(tuple(state.memory.get(word, 0.0) for word in words))
            values = state.known[state.thread][state.loads - 1]
            return values if count > 1 else values[0]

        return load

    def ld_shared_st_global_if(count):
        load = ld_shared(count, None)

        def copy(wanted, y, index, address):
            words = load(address) if count > 1 else (load(address),)
            if wanted and state.stretch == state.watched:
                assert (state.shift + index) % count == 0
                state.at_once.add(count)
                for z in range(count):
                    state.written[int(index + z)] += 1
                    y[int(index + z)] = words[z]

        return copy

    state = SimpleNamespace(threads=128, shift=0, stretch=0, watched=0, at_once=set(), written=Counter())
    local = SimpleNamespace(array=lambda size, dtype: [None] * size)
    monkeypatch.setattr(tensor_rows, "cuda", SimpleNamespace(local=local))
    for module in (k6_rows, tensor_rows, tensor_runs, tensor_store):
        monkeypatch.setattr(module, "device_function", same)
    for meaning in (repeated, barrier_sync, ld_shared, ld_shared_st_global_if):
        for module in (k6_rows, tensor_rows):
            monkeypatch.setattr(module, meaning.__name__, meaning, raising=False)
    for name in ("st_shared", "st_shared_f32"):
        monkeypatch.setattr(k6_rows, name, store)
    monkeypatch.setattr(k6_rows, "recomputed", same)
    cast_quickly(monkeypatch, k6_rows, tensor_rows, tensor_runs, tensor_store)
    state.store = store
    return state


def configured(p, precision, aligned=True, **optional):
    found = k6_config.configs(p, precision, **optional)
    return next(c for c in found if c.by_rows and c.tile.aligned == aligned)


# Rows of the output at multiples of four, two and one; as many channels as fill two rounds, three, or not all of two;
# samples that end inside of a tile, and with one; a second set of tiles of rows.
CASES = [
    (Problem(2, 8, 16, 3, 258), 0, 4, False),
    (Problem(2, 8, 16, 3, 258), 4, 4, True),
    (Problem(2, 8, 16, 3, 258), 2, 2, False),
    (Problem(2, 8, 16, 3, 258), 3, 1, True),
    (Problem(2, 8, 24, 3, 256), 6, 2, True),
    (Problem(1, 8, 24, 3, 389), 0, 1, False),
    (Problem(2, 8, 13, 3, 301, padding=1), 0, 1, True),
    (Problem(2, 8, 13, 3, 302, padding=2), 5, 1, False),
    (Problem(2, 8, 16, 5, 236, dilation=3), 0, 4, True),
    (Problem(1, 8, 136, 3, 254), 0, 4, True),
    (Problem(2, 8, 8, 3, 600, padding=1), 1, 4, False),
]


@pytest.mark.parametrize(
    ("case", "aligned"),
    thorough(
        itertools.product(range(len(CASES)), [True, False]),
        always=[(1, True), (2, True), (3, False), (6, True), (8, False), (9, True)],
    ),
)
def test_every_output_is_its_own_sum(in_python, case, aligned):
    p, shift, at_once, has_bias = CASES[case]
    check(in_python, p, configured(p, "tf32", aligned), shift, has_bias)
    assert in_python.at_once == {at_once}


@pytest.mark.parametrize(("precision", "wide"), [("tf32x3", False), ("bf16", True)])
def test_sums_of_split_operands_and_partial_sums(in_python, precision, wide):
    p = Problem(2, 16, 16, 3, 258)
    check(in_python, p, configured(p, precision, wide_outputs=wide), 2, True)


@pytest.mark.parametrize("round_buffers", [1, 2])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("channels", thorough([8, 16, 24], always=[24]))
def test_a_buffer_is_read_before_it_is_staged_in_again(in_python, channels, has_bias, round_buffers):
    """Tiles of one, two and three rounds; the next tile begins with the same buffer after three."""
    p = Problem(1, 8, channels, 3, 256)
    config = replace(configured(p, "tf32"), round_buffers=round_buffers)
    check(in_python, p, config, 0, has_bias, times=2)


def test_two_buffers_where_the_ring_is_as_deep():
    found = {w: configured(workloads.get(w).problem, "tf32") for w in ("kb64", "kb74")}
    buffers = {w: (config.buffers, config.round_buffers) for w, config in found.items()}
    assert buffers == {"kb64": (1, 1), "kb74": (2, 2)}
    for more in (dict(buffers=2), dict(round_buffers=2)):
        shallower = k6_config.deepest(replace(found["kb64"], **more))
        assert shallower.stages < min(found["kb64"].stages, k6_config.SHALLOW_RING), more


def test_one_buffer_only_where_the_ring_is_shallow():
    """A ring of many stages gains nothing by one more."""
    p = Problem(2, 104, 128, 3, 256)
    config = configured(p, "tf32")
    passed_on = k6_config.deepest(replace(config, buffers=1))
    assert k6_config.SHALLOW_RING <= config.stages < passed_on.stages
    assert config.buffers == 2


def check(state, p, config, shift, has_bias, times=1):
    """``times``: how often each tile is stored."""
    tile, first = config.tile, k6_config.sample_columns(p, config)[0]
    state.shift, y, found = shift, {}, 0
    out = output_of(p, y, config, tensor_store.alignment_of(shift * 4, p, tile), has_bias)
    buffers = Buffers(Shared(None, None, 0), BUFFERS, None, None, None)
    store = k6_rows.make_store_rows(config)
    for column_tile, place_of in straight_tiles(p, config, out, to_the_output=False):
        found += 1
        state.memory, state.known = {}, defaultdict(list)
        rounds = tile.rows // 8 * (3 - config.round_buffers) + (config.round_buffers == 2) + 2 * has_bias
        for state.watched in range(times * rounds + 1):
            state.stored, state.loaded = set(), set()
            for warp in range(WARPS):
                place = place_of(warp)
                for lane in range(LANES):
                    state.stretch, state.loads, state.thread = 0, 0, (warp, lane)
                    sums = sums_of(p, config, column_tile, place.channel, warp, lane)
                    channel = 32 * warp + lane
                    bias = bias_of(place.channel + channel) if has_bias and channel < place.channels_left else 0.0
                    with contextlib.suppress(Passed):
                        for _ in range(times):
                            acc, total = (None, [*sums]) if tile.operand_halves == 2 else ([*sums], None)
                            own = Sums(acc, total, None, None)
                            store(own, None, buffers, out, place, bias, Thread(1, warp, lane))
            assert not state.stored & state.loaded, "what is loaded was stored before a barrier"
        assert min(state.memory) >= BUFFERS
        assert max(state.memory) < BUFFERS + config.staging_buffer - 16
    assert found, "some tile leaves by rows"
    check_written(state, p, y, first, times, lambda channel: bias_of(channel) if has_bias else 0)


def check_written(state, p, y, first, times, added):
    """Every output is its sum and what is ``added``; nothing else is written."""
    assert set(state.written.values()) == {times}, "no output twice"
    rows = defaultdict(list)
    for index, value in y.items():
        rest, o = divmod(index, p.out_length)
        sample, channel = divmod(rest, p.out_channels)
        assert 0 <= sample < p.batch
        rows[sample, channel].append(o)
        assert value == expected(p, first, sample, channel, o) + added(channel)
    assert {channel for _, channel in rows} == set(range(p.out_channels))
    for outputs in rows.values():
        assert max(outputs) - min(outputs) + 1 == len(outputs), "none is left out"


@pytest.mark.parametrize("workload", ["kb79", "hifigan_u3", "dac_u1", "encodec_u2", "seamless_u1"])
def test_other_tiles_are_staged_and_stored_round_by_round(monkeypatch, workload):
    """Each of a lane's sums in its row and column, for whichever rows are taken from registers at a time."""
    p = workloads.get(workload).problem
    config = next(c for c in k6_config.configs(p, "tf32") if not c.tile.by_phases)
    tile, staged, stored = config.tile, {}, []

    def take(offsets, stride, cases):
        def taken(values, sums, case):
            assert 0 <= case < cases
            values[:] = [sums[offset + case * stride] for offset in offsets]

        return taken

    def stage_rows(values, first_value, count, first_row, staging, offset, thread):
        for r, column in itertools.product(range(count // 4), range(4)):
            staged[first_row + r // 2 * 8 + r % 2, column] = values[first_value + 4 * r + column]

    def store(runs, out, staging, place, thread):
        stored.append((place.channel, place.channels_left, {**staged}))
        staged.clear()

    for name in ("device_function", "recomputed"):
        monkeypatch.setattr(k6_epilogue, name, same)
    monkeypatch.setattr(k6_epilogue, "take", take)
    monkeypatch.setattr(k6_epilogue, "make_stage_rows", lambda tile: stage_rows)
    monkeypatch.setattr(k6_epilogue, "barrier_sync", lambda *_: None)
    out = SimpleNamespace(alignment=SimpleNamespace(offset=0))
    place, buffers = Place(0, 0, 0, 16, tile.channels, None, None), Buffers(Shared(None, None, 0), 0, 0, None, None)
    sums = Sums(range(tile.rows), None, [], None)
    k6_epilogue._make_by_rounds(config)(store, False)(sums, None, buffers, out, place, 0.0, Thread(0, 0, 0))

    rows, expected = tile.rows // tile.rounds, [{} for _ in range(tile.rounds)]
    for e in sums.acc:
        block, register = divmod(e, tile.rows // 2)
        half, row = wgmma_d(0, 0, register)
        expected[row // rows][row % rows, 2 * block + half // 8] = e
    done = range(0, tile.channels, tile.round_channels)
    assert stored == [(16 + c, tile.channels - c, of) for c, of in zip(done, expected, strict=True)]


@pytest.mark.parametrize(("length", "missing", "alike"), [(66, 0, True), (66, 1, False), (65, 0, False)])
def test_runs_are_kept_for_all_rounds_if_these_begin_alike(monkeypatch, length, missing, alike):
    """Else each round, whose channels begin elsewhere in a sector or are fewer, has its own."""
    p = workloads.get("dac_u1").problem
    config = next(c for c in k6_config.configs(p, "tf32") if not (c.tile.by_phases or c.bulk_channels or c.by_rows))
    tile, done = config.tile, []

    def prepare(runs, first, out, staging, place, thread):
        done.append(("runs", place.channel, place.channels_left))

    def store(runs, out, staging, place, thread):
        done.append(("store", place.channel, place.channels_left))

    for name in ("device_function", "recomputed"):
        monkeypatch.setattr(k6_epilogue, name, same)
    for name in ("take", "make_stage_rows", "barrier_sync"):
        monkeypatch.setattr(k6_epilogue, name, lambda *_: lambda *_: None)
    monkeypatch.setattr(k6_epilogue, "make_prepare", lambda *_: prepare)
    out = SimpleNamespace(alignment=SimpleNamespace(offset=0), length=length)
    place = Place(0, 0, 0, 16, tile.channels - missing, None, None)
    buffers, sums = Buffers(Shared(None, None, 0), 0, 0, None, None), Sums(range(tile.rows), None, [], None)
    k6_epilogue._make_by_rounds(config)(store, True)(sums, None, buffers, out, place, 0.0, Thread(0, 0, 0))
    expected = [("runs", 16, tile.channels - missing)]
    for c in range(0, tile.channels, tile.round_channels):
        left = 16 + c, tile.channels - missing - c
        expected += [("store", *left)] if alike else [("runs", *left), ("store", *left)]
    assert done == expected


def test_runs_are_stored_by_as_many_outputs_as_lie_together(monkeypatch):
    monkeypatch.setattr(k6_epilogue, "device_function", same)
    monkeypatch.setattr(k6_epilogue, "make_store_runs", lambda tile, warps, quantum, *_: lambda *_: quantum)
    config = configured(Problem(2, 8, 16, 3, 258), "tf32")
    store = k6_epilogue._make_runs(config, lambda store, keeps: store)
    for quantum in (4, 2, 1):
        out = SimpleNamespace(alignment=SimpleNamespace(quantum=quantum))
        assert store(None, out, None, None, None) == quantum


def test_a_thread_loads_the_bias_of_its_channel(monkeypatch):
    """While products run; of channels that there are."""
    element = SimpleNamespace(load=lambda value: value)
    monkeypatch.setattr(k6_epilogue, "ELEMENTS", {torch.float32: element})
    monkeypatch.setattr(k6_epilogue, "device_function", lambda function: function)
    of_thread = k6_epilogue.make_bias_of(configured(Problem(2, 8, 16, 3, 258), "tf32"))
    bias = [bias_of(channel) for channel in range(40)]
    out = SimpleNamespace(bias=bias, has_bias=True)
    assert [of_thread(out, 16, 13, number) for number in (0, 12, 13)] == [bias[16], bias[28], 0]
    assert of_thread(SimpleNamespace(bias=bias, has_bias=False), 16, 13, 0) == 0


@pytest.mark.parametrize("straight", [False, True])
@pytest.mark.parametrize("buffers", [1, 2])
def test_buffers_are_handed_over_when_they_have_been_read(monkeypatch, buffers, straight):
    """To the next tile by a barrier; to the other warpgroup, ping-pong, by every lane."""
    done = []

    def stub(*event):
        return lambda *_: done.append(event)

    config = replace(configured(Problem(2, 8, 16, 3, 258), "tf32"), buffers=buffers)
    monkeypatch.setattr(k6_epilogue, "device_function", same)
    monkeypatch.setattr(k6_epilogue, "make_aim", lambda *_, **__: (lambda *_: (None, straight), lambda *_: 0))
    monkeypatch.setattr(k6_epilogue, "_make_by_rounds", lambda config: lambda store, keeps: stub("anywhere"))
    monkeypatch.setattr(k6_epilogue, "make_store_any", lambda *_, **__: None)
    monkeypatch.setattr(k6_epilogue, "make_store_rows", lambda config: stub("rows"))
    monkeypatch.setattr(k6_epilogue, "barrier_sync", lambda *barrier: done.append(("barrier", *barrier)))
    monkeypatch.setattr(k6_epilogue, "mbarrier_wait", lambda *turn: done.append(("wait", *turn)))
    monkeypatch.setattr(k6_epilogue, "mbarrier_arrive", lambda turn: done.append(("arrive", turn)))
    epilogue = k6_epilogue.make_epilogue(config)
    crew, turns, parity = 1, 4096, 1
    staging = Buffers(Shared(None, None, 0), 0, 0, turns, parity)
    for lane in (0, 1):
        done.clear()
        thread = Thread(crew, 0, lane)
        place, goes_straight = epilogue.aim(0, 0, 0, 0, 8, None, thread)
        epilogue.store(None, None, staging, None, place, goes_straight, 0.0, thread)
        stored = [("rows",)] if straight else [("barrier", crew + 1, 128), ("anywhere",)]
        passed_on = buffers == 1
        assert done == [
            *[("wait", turns + 8, parity)] * passed_on,
            *stored,
            *[("arrive", turns)] * passed_on,
        ]


@pytest.mark.parametrize("straight", [False, True])
def test_where_a_tile_goes_is_what_the_stores_are_told(monkeypatch, straight):
    """Sample, column and channels of the tile, its extent, and the index of the warp's first output."""
    told = []

    def tell(*given):
        told.append(given)

    def aim(sample, column, out):
        return ("extent", sample, column, out), straight

    config = configured(Problem(2, 8, 16, 3, 258), "tf32")
    monkeypatch.setattr(k6_epilogue, "device_function", same)
    monkeypatch.setattr(k6_epilogue, "make_aim", lambda *_, **__: (aim, lambda *head: head))
    monkeypatch.setattr(k6_epilogue, "_make_by_rounds", lambda config: lambda store, keeps: tell)
    monkeypatch.setattr(k6_epilogue, "make_store_any", lambda *_, **__: None)
    monkeypatch.setattr(k6_epilogue, "make_store_rows", lambda config: tell)
    for name in ("barrier_sync", "mbarrier_wait", "mbarrier_arrive"):
        monkeypatch.setattr(k6_epilogue, name, lambda *_: None)
    epilogue, out, thread = k6_epilogue.make_epilogue(config), object(), Thread(1, 2, 3)
    place, goes_straight = epilogue.aim(3, 40, 5, 16, 13, out, thread)
    extent = ("extent", 3, 40, out)
    assert place == Place(3, 40, 5, 16, 13, extent, (3, 16, extent, out, 2))
    buffers = Buffers(Shared(None, None, 0), 0, 0, 4096, 1)
    epilogue.store("sums", "leaving", buffers, out, place, goes_straight, 0.5, thread)
    assert told == [("sums", "leaving", buffers, out, place, 0.5, thread)]
