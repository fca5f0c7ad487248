"""k6's bulk stores on the CPU: `store` runs lane by lane in plain Python; every output is its own sum.

Instructions are replaced by their meanings, which also refuse bad addresses. A warpgroup's threads run one after the
other, once for each stretch between two barriers, and leave traces of it alone. Lanes that exchange values run twice:
the second run knows what each hands over.
"""

import contextlib
from collections import Counter, defaultdict
from functools import lru_cache, partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_core import store_any as tensor_store
from numba_tconv.kernels.common.tensor_core import store_runs as tensor_runs
from numba_tconv.kernels.common.tensor_core.outputs import Place, Thread
from numba_tconv.kernels.common.tensor_core.tile import COLUMNS
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.kernels.k6_wgmma.arguments import Buffers, Leaving, Shared, Sums
from numba_tconv.kernels.k6_wgmma.epilogue import bulk as k6_bulk
from numba_tconv.kernels.k6_wgmma.epilogue import staging as k6_stage
from numba_tconv.kernels.k6_wgmma.epilogue import vectors as k6_vectors
from numba_tconv.lab.measure import workloads
from tests.kernels.test_tensor_store import cast_quickly, code, expected, output_of
from tests.thorough import thorough

WARPS, LANES = 4, 32
BUFFERS, BIASES = 1024, 1 << 20  # bytes of shared memory where they lie


class Passed(Exception):
    """The stretch that is watched is over."""


def same(value):
    return value


def repeated(function, count):
    return lambda k, state: [function(k + z, state) for z in range(count)]


@pytest.fixture
def in_python(monkeypatch):
    def barrier_sync(barrier, threads):
        state.stretch += 1
        if state.stretch > state.watched:
            raise Passed

    def store(address, value):
        if state.stretch == state.watched:
            state.memory[int(address)] = value

    def st_shared_f32(address, *values):
        assert address % (4 * len(values)) == 0
        state.together[len(values)] += 1
        for e, value in enumerate(values):
            store(address + 4 * e, value)

    def st_shared_halves(low_at, high_at, pair, together=1):
        assert low_at % 2 == high_at % 2 == 0
        state.together[together] += 1
        store(low_at, pair[0])
        store(high_at, pair[1])

    def st_shared_b32(address, *pairs):
        assert address % (4 * len(pairs)) == 0
        for e, pair in enumerate(pairs):
            st_shared_halves(address + 4 * e, address + 4 * e + 2, pair, 2 * len(pairs))

    def ld_shared(count, kind):
        def load(address):
            assert address % (4 * count) == 0, "whether the value is used or not"
            return int(address)

        return load

    def cp_async_bulk_store(y, index, address, size):
        if state.stretch == state.watched and state.leaves_traces:
            assert (state.shift + index) * state.itemsize % 16 == address % 16 == size % 16 == 0 < size
            for e in range(size // state.itemsize):
                y[index + e] = state.memory[int(address + e * state.itemsize)]
            state.in_bulk += size // state.itemsize

    def st_global_vector(exists, y, index, address):
        if state.stretch == state.watched and state.leaves_traces and exists:
            assert (state.shift + index) * state.itemsize % 16 == address % 16 == 0
            for e in range(16 // state.itemsize):
                y[index + e] = state.memory[int(address + e * state.itemsize)]
            state.in_bulk += 16 // state.itemsize

    def shfl_sync(mask, value, owner):
        """What lane ``owner`` hands over at the same point."""
        assert 0 <= owner < LANES
        state.handed[state.lane].append(value)
        if not state.leaves_traces or state.stretch < state.watched:
            return value
        return state.known[owner][len(state.handed[state.lane]) - 1]

    class Output(dict):
        def __setitem__(self, index, value):
            if state.stretch == state.watched and state.leaves_traces:
                state.written[int(index)] += 1
                super().__setitem__(int(index), float(value))

    class Stored:
        def __getitem__(self, index):
            return state.memory.get(int(index) * state.itemsize)

    state = SimpleNamespace(shift=0, itemsize=4, in_bulk=0, stretch=0, watched=0, memory={}, written=Counter())
    state.together = Counter()  # outputs staged by one instruction, without biases
    state.leaves_traces = True
    state.Output, state.Stored = Output, Stored
    for module in (k6_bulk, k6_stage, k6_vectors, tensor_runs, tensor_store):
        monkeypatch.setattr(module, "device_function", same)
    cast_quickly(monkeypatch, k6_bulk, k6_stage, k6_vectors, tensor_runs, tensor_store)
    for meaning in (repeated, barrier_sync, cp_async_bulk_store):
        monkeypatch.setattr(k6_bulk, meaning.__name__, meaning)
    monkeypatch.setattr(k6_bulk, "st_shared_f32", store)
    for meaning in (repeated, st_shared_f32, st_shared_halves, st_shared_b32):
        monkeypatch.setattr(k6_stage, meaning.__name__, meaning)
    for name, meaning in (("st_shared", st_shared_f32), ("st_shared_v2_f32", st_shared_f32)):
        monkeypatch.setattr(k6_stage, name, meaning)
    monkeypatch.setattr(k6_stage, "st_shared_v2_b32", st_shared_b32)
    for name in ("fence_async", "cp_async_bulk_commit"):
        monkeypatch.setattr(k6_bulk, name, lambda: None)
    monkeypatch.setattr(k6_bulk, "cp_async_bulk_wait_read", lambda pending: lambda: None)
    monkeypatch.setattr(k6_stage, "ld_shared", lambda count, kind: lambda address: state.memory.get(int(address), 0))
    monkeypatch.setattr(k6_vectors, "st_global_vector", st_global_vector)
    monkeypatch.setattr(k6_vectors, "ld_shared", ld_shared)
    monkeypatch.setattr(
        k6_vectors,
        "cuda",
        SimpleNamespace(shfl_sync=shfl_sync, syncwarp=lambda: None, any_sync=lambda mask, value: True),
    )
    monkeypatch.setattr(k6_bulk, "recomputed", same)
    local = SimpleNamespace(array=lambda size, dtype: [None] * size)
    monkeypatch.setattr(k6_stage, "cuda", SimpleNamespace(local=local))
    for name in ("pack_f16", "pack_bf16"):
        monkeypatch.setattr(k6_stage, name, lambda low, high: (low, high))
    return state


# One phase, two, five, eight; phases without taps; rows of 16-byte multiples and others; samples that end inside a
# tile, and with one.
CASES = {
    "stride 1": Problem(2, 8, 16, 3, 258),
    "stride 1, odd rows": Problem(2, 8, 13, 3, 301, padding=1),
    "stride 2": Problem(2, 8, 8, 4, 250, stride=2, padding=1),
    "stride 2, odd rows": Problem(2, 8, 9, 5, 250, stride=2),
    "stride 5": Problem(2, 8, 8, 10, 260, stride=5, padding=3, output_padding=1),
    "stride 8": Problem(2, 8, 6, 16, 250, stride=8, padding=4),
    "dilation": Problem(2, 8, 8, 7, 260, stride=3, dilation=2, padding=2),
    "phases apart": Problem(2, 8, 8, 4, 250, stride=2, dilation=3, padding=2),
    "one tap": Problem(2, 8, 16, 1, 250, stride=2, output_padding=1),
    "phases without taps": Problem(2, 8, 16, 3, 250, stride=2, dilation=2, padding=1),
    # More core matrices than one load of biases serves: one channel a row, and several rows.
    "96 rows": Problem(1, 8, 96, 3, 130),
    "100 rows": Problem(1, 8, 20, 10, 130, stride=5),
    "128 rows": Problem(1, 8, 16, 16, 130, stride=8),
}


# Elements from a multiple of 16 bytes to y; sums of a lane that are staged together: runs begin at multiples of so
# many.
WAYS = [
    *[("stride 1", "tf32", 0, 4), ("stride 1", "tf32", 2, 2), ("stride 1", "tf32", 3, 1)],
    *[("stride 1", "bf16", 4, 4), ("stride 1", "bf16", 6, 2), ("stride 1", "bf16", 1, 1), ("stride 1", "bf16", 3, 1)],
    *[("stride 1, odd rows", "tf32", 0, 1), ("stride 1, odd rows", "bf16", 0, 1), ("stride 1, odd rows", "bf16", 1, 1)],
    *[("stride 2", "tf32", 1, 2), ("stride 2", "tf32", 0, 1), ("stride 2", "bf16", 3, 2)],
    *[("stride 2, odd rows", "tf32", 0, 1), ("stride 2, odd rows", "bf16", 1, 1)],
    *[("stride 5", "tf32", 3, 1), ("stride 5", "bf16", 0, 1)],
    *[("stride 8", "tf32", 0, 2), ("stride 8", "tf32", 3, 1), ("stride 8", "bf16", 2, 2)],
    *[("dilation", "tf32", 0, 1), ("dilation", "bf16", 1, 1)],
    *[("phases apart", "tf32", 0, 1), ("phases apart", "bf16", 2, 1)],
    *[("one tap", "tf32", 0, 1), ("one tap", "bf16", 2, 1)],
    *[("phases without taps", "tf32", 0, 1), ("phases without taps", "bf16", 1, 1)],
    *[("96 rows", "bf16", 0, 4), ("100 rows", "tf32", 0, 1), ("128 rows", "bf16", 0, 2)],
]
# Every problem; two sums of a row together.
USUAL = {*WAYS[::6], *{way[0]: way for way in WAYS}.values(), *WAYS[1:5:3]}


@pytest.mark.parametrize(("case", "precision", "shift", "together"), thorough(WAYS, always=USUAL))
def test_every_output_is_its_own_sum(in_python, case, precision, shift, together):
    state, p = in_python, CASES[case]
    config = next(c for c in k6_config.configs(p, precision) if c.bulk_channels)
    check(state, p, config, shift)
    assert state.in_bulk > 0.9 * sum(state.written.values()), "nearly all is left to the copy engine"
    assert set(state.together) == {together}


@pytest.mark.parametrize(("case", "shift", "together"), [("stride 1", 0, 4), ("stride 2", 3, 2), ("stride 2", 0, 1)])
def test_outputs_wider_than_operands(in_python, case, shift, together):
    """Partial sums, of 16-bit operands, are float32."""
    p = CASES[case]
    config = next(c for c in k6_config.configs(p, "bf16", wide_outputs=True) if c.bulk_channels)
    check(in_python, p, config, shift)
    assert set(in_python.together) == {together}


@pytest.mark.parametrize(("channels", "stride"), [(32, 2), (6, 8)], ids=["16 of 32", "3 of 6"])
def test_rounds_of_half_the_channels(in_python, channels, stride):
    p = Problem(1, 8, channels, 2 * stride, 250, stride=stride, padding=1)
    config = next(c for c in k6_config.configs(p, "tf32") if 0 < c.bulk_channels < c.tile.channels)
    check(in_python, p, config, 0)


def test_a_run_leaves_when_it_is_due(in_python, monkeypatch):
    """Once, though another lane of its warp is due later."""
    left = []
    monkeypatch.setattr(k6_bulk, "cp_async_bulk_store", lambda y, at, source, size: left.append((at, source, size)))
    warp = SimpleNamespace(any_sync=lambda mask, value: True, syncwarp=lambda: None)
    monkeypatch.setattr(k6_bulk, "cuda", warp)
    when_due, at_once = k6_bulk.make_hand_over(SimpleNamespace(spreads=True))
    leaving = Leaving([64, 4096, 3], [7], 1, None)
    for turn in range(6):
        when_due(leaving)
        assert left == ([(7, 4096, 64)] if turn >= 2 else [])
    at_once(leaving)
    assert len(left) == 1


@pytest.mark.parametrize(("precision", "shift"), [("tf32", 0), ("tf32", 3), ("bf16", 1)])
def test_runs_without_a_whole_vector(in_python, precision, shift):
    """A signal cropped to five outputs: tiles have few or none."""
    p = Problem(2, 8, 16, 3, 233, padding=115)
    check(in_python, p, next(c for c in k6_config.configs(p, precision) if c.by_lanes), shift)


def bias_of(channel):
    return 0.125 * (channel + 1)


def straight_tiles(p, config, out, to_the_output):
    """Column tile of each tile that leaves straight, and a function from warp to the tile's Place."""
    tile, columns = config.tile, k6_config.sample_columns(p, config)[1]
    aim, head_of = tensor_store.make_aim(tile, to_the_output)
    for row_tile in range(tile.row_tiles(p)):
        co = row_tile * tile.channels
        left = min(tile.channels, p.out_channels - co)
        for column_tile in range(k6_config.column_tiles(p, config)):
            n, j = divmod(column_tile * tile.advance, columns)
            extent, straight = aim(n, j, out)
            if straight:
                yield column_tile, partial(_place, n, j, co, left, extent, head_of, out)


def _place(n, j, co, left, extent, head_of, out, warp):
    return Place(n, j, 0, co, left, extent, head_of(n, co, extent, out, warp))


def check(state, p, config, shift):
    tile, first = config.tile, k6_config.sample_columns(p, config)[0]
    state.itemsize, state.shift = tile.out_dtype.itemsize, shift
    y, stored = state.Output(), state.Stored()
    out = output_of(p, y, config, tensor_store.alignment_of(shift * state.itemsize, p, tile))
    buffers = Buffers(Shared(stored, stored, 0), BUFFERS, BIASES, None, None)
    store, _ = k6_bulk.make_bulk_store(config)
    rounds, found = tile.channels // config.bulk_channels, 0
    for column_tile, place_of in straight_tiles(p, config, out, to_the_output=True):
        found += 1
        state.memory = {}
        state.handed = defaultdict(list)
        for state.watched in range(2 * rounds + 1):
            writes = config.by_lanes and state.watched > 0 and state.watched % 2 == 0
            for warp, state.leaves_traces in product(range(WARPS), (False, True) if writes else (True,)):
                state.known, state.handed = state.handed, defaultdict(list)
                for state.lane in range(LANES):
                    state.stretch = 0
                    place = place_of(warp)
                    sums = [*sums_of(p, config, column_tile, place.channel, warp, state.lane)]
                    leaving = Leaving([0] * 3, [0], 1, y)
                    channel = 32 * warp + state.lane
                    bias = bias_of(place.channel + channel) if channel < place.channels_left else 0.0
                    with contextlib.suppress(Passed):
                        thread = Thread(0, warp, state.lane)
                        store(Sums(sums, None, None, None), leaving, buffers, out, place, bias, thread)
                    if config.spreads and state.watched == state.stretch and leaving.held[k6_bulk.DUE] > 0:
                        k6_bulk.make_hand_over(config)[1](leaving)
        assert max(state.memory) < BIASES + config.bias_bytes
        assert all(BUFFERS <= at < BUFFERS + config.own_staging or at >= BIASES for at in state.memory)
    assert found, "some tile leaves in bulk"
    assert set(state.written.values()) == {1}, "no output twice"
    inner = set(np.ndindex(p.out_shape))
    rows = defaultdict(list)
    for index, value in y.items():
        rest, o = divmod(index, p.out_length)
        sample, channel = divmod(rest, p.out_channels)
        assert (sample, channel, o) in inner
        rows[sample, channel].append(o)
        assert value == expected(p, first, sample, channel, o) + bias_of(channel)
    for outputs in rows.values():
        assert max(outputs) - min(outputs) + 1 == len(outputs), "none is left out"


@lru_cache(WARPS * LANES)  # a tile's, with which every stretch begins
def sums_of(p, config, column_tile, co, warp, lane, row=0):
    """A lane's sums as wgmma leaves them, of the tile whose first row of taps is ``row``."""
    tile, columns = config.tile, k6_config.sample_columns(p, config)[1]
    sums, start, phases = tile.rows // 2, column_tile * tile.advance - tile.overlap, tile.phases
    acc = [0.0] * (2 * sums)
    for e in range(2 * sums):
        block, i = divmod(e, sums)
        m = i // 4 * 8 + (lane & 3) * 2 + i % 2
        column = 32 * warp + lane // 4 * 4 + 2 * block + i % 4 // 2
        channel, phase = divmod(m, phases)
        sample, j = divmod(start + column, columns)
        acc[e] = code(sample, j, co + channel, row + phase)
    return tuple(acc)


def cycles(config, together):
    """Clocks for each access of a warp that stores a core matrix, ``together`` neighbouring outputs a lane."""
    tile, size = config.tile, together * config.tile.itemsize
    first_of = k6_stage.rotation if together == 1 else k6_stage.rotation_of_pairs
    found, lanes = [], 32 // max(1, size // 4)  # whose stores are one access
    for i, start in product(range(0, 4, together if tile.span == 1 else 1), range(0, LANES, lanes)):
        banks = defaultdict(set)
        for lane in range(start, start + lanes):
            channel, phase = divmod(lane % 4 * 2, tile.phases)
            if channel < tile.channels:
                column = lane // 4 * 4 + (first_of(lane, tile.span) + i) % 4
                at = (channel * config.bulk_pitch + column * tile.span + phase * tile.spread) * tile.itemsize
                for byte in range(0, size, 4):
                    banks[(at + byte) // 4 % 32].add((at + byte) // 4)
        found.append(max(map(len, banks.values())))
    return sum(found) / len(found)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_a_warps_writes_are_spread_over_the_banks(precision):
    """At most twice the fewest cycles in most cases, for the workloads' tiles with a span up to 8."""
    tiles = {c for w in workloads.WORKLOADS.values() if w.problem.groups == 1
             for c in k6_config.configs(w.problem, precision) if c.bulk_channels and c.tile.span <= 8}  # fmt: skip
    assert {1, 2, 4, 8} <= {config.tile.span for config in tiles}
    for config in tiles:
        assert cycles(config, 1) <= 2.5, config.tile
        if config.tile.span == 1 or k6_stage.pairs_phases(config.tile):
            assert cycles(config, 2) <= 2, config.tile


def test_a_buffer_holds_the_longest_run():
    for workload in workloads.WORKLOADS.values():
        for config in k6_config.configs(workload.problem, "bf16"):
            tile = config.tile
            if config.bulk_channels:
                longest = COLUMNS * tile.span + tile.spread * (tile.phases - 1)
                vector = 16 // tile.itemsize
                assert config.bulk_pitch % vector == 0
                assert config.bulk_pitch >= longest + vector - 1
                assert config.own_staging >= config.bulk_channels * (config.bulk_pitch + vector - 1) * tile.itemsize
