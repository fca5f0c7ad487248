"""k5's stores of rows in rounds on the CPU: a tile's sums, lane by lane through `store_tile`, as in test_k6_rows.py."""

import contextlib
import itertools
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_core import store_any as tensor_store
from numba_tconv.kernels.common.tensor_core.outputs import Output, Place, Staging, Thread
from numba_tconv.kernels.common.tensor_core.tile import staged_at
from numba_tconv.kernels.k5_mma import choose as k5_choice
from numba_tconv.kernels.k5_mma import epilogue as k5_store
from numba_tconv.kernels.k5_mma.tile import RUN, Config, run_of
from numba_tconv.lab.measure import workloads
from tests.thorough import thorough

from .k6_wgmma.test_k6_bulk import LANES, Passed, same
from .k6_wgmma.test_k6_rows import BUFFERS, check_written, in_python  # noqa: F401
from .test_tensor_store import cast_quickly, code

LANES_A_ROW = 4  # of a fragment of sums


@pytest.fixture
def k5_in_python(monkeypatch, in_python):  # noqa: F811
    cast_quickly(monkeypatch, k5_store)
    monkeypatch.setattr(k5_store, "device_function", same)
    monkeypatch.setattr(k5_store, "st_shared", in_python.store)
    return in_python


# Warps in one row and in two, with one to four fragments; output rows at multiples of four, two and one; two buffers
# and one; channels that do not fill the tile's rows; two row tiles.
CASES = [
    (Problem(2, 8, 16, 3, 258), 0, 4),
    (Problem(2, 8, 24, 3, 256), 6, 2),
    (Problem(1, 8, 48, 3, 301, padding=1), 0, 1),
    (Problem(1, 8, 64, 5, 244, dilation=3), 0, 4),
    (Problem(1, 8, 90, 3, 302, padding=2), 5, 1),
    (Problem(1, 8, 61, 3, 254), 3, 1),
    (Problem(1, 8, 128, 3, 254), 4, 4),
    (Problem(1, 8, 144, 3, 389), 0, 1),
]


@pytest.mark.parametrize(
    ("aligned", "rounds_of"),
    thorough(itertools.product([True, False], ["all", 8]), always=[(True, "all"), (False, 8)]),
)
@pytest.mark.parametrize(("p", "shift", "at_once"), thorough(CASES, always=CASES[1:3]), ids=str)
def test_every_output_is_its_own_sum(k5_in_python, p, shift, at_once, rounds_of, aligned):
    config = k5_choice.choose(p, "tf32")
    assert config.tile.aligned, "of few input channels"
    config = replace(config, tile=replace(config.tile, aligned=aligned))
    if rounds_of != "all":
        config = replace(config, tile=replace(config.tile, round_channels=_smallest(config.tile)))
    assert config.by_rows
    check(k5_in_python, p, config, shift)
    assert k5_in_python.at_once == {at_once}


@pytest.mark.parametrize("channels", thorough([16, 32, 64, 128], always=[16, 64]))
def test_sums_of_split_operands(k5_in_python, channels):
    p = Problem(2, 8, channels, 3, 258)
    config = k5_choice.choose(p, "tf32x3")
    assert config.by_rows
    check(k5_in_python, p, config, 2)


@pytest.mark.parametrize(
    "p",
    [
        Problem(2, 8, 48, 3, 256),
        Problem(2, 8, 32, 8, 256, stride=4),
        Problem(2, 8, 32, 1, 256, stride=2),
        Problem(2, 8, 32, 3, 256, stride=5),
    ],
    ids=str,
)
def test_other_tiles_stage_a_sum_where_its_output_is(monkeypatch, p):
    """Span 1, equal phases, every other output empty, phases without taps."""
    config = k5_choice.choose(p, "tf32")
    tile, memory, expected = config.tile, {}, {}
    cast_quickly(monkeypatch, k5_store)
    monkeypatch.setattr(k5_store, "device_function", same)
    monkeypatch.setattr(k5_store, "st_shared", lambda address, *values: memory.update(enumerate(values, address // 4)))
    at, offset, row0, columns = 1024, 0 if tile.span == 1 or k5_store.gaps_between(tile) else 3, 2, (8, 40)
    sums = range(1, 1 + 4 * RUN * config.fragments)  # above zero, which fills gaps
    k5_store._make_stage_sums(config)[0](sums, Staging(memory, 0, at), row0, *columns, offset)
    places = itertools.product(range(config.fragments), range(RUN), range(2), range(2))
    for value, (m, j, half, e) in zip(sums, places, strict=True):
        channel, phase = divmod(row0 + 16 * m + 8 * half, tile.phases)
        if channel < tile.round_channels:
            u = (columns[e] + j) * tile.span + phase * tile.spread + offset
            expected[at + channel * tile.pitch + staged_at(u, tile.skip)] = value
    assert expected
    assert {place: value for place, value in memory.items() if value} == expected


def test_rounds_only_of_warps_that_share_their_rows():
    """Three rows of warps leave eight rows in another way."""
    config = k5_choice.choose(Problem(2, 8, 48, 3, 256), "tf32x3")
    assert config.tile_warps == 6
    assert not config.by_rows
    for precision in ("tf32", "tf32x3"):
        for channels in range(1, 200):
            config = k5_choice.choose(Problem(64, 8, channels, 3, 65536), precision)
            assert not config.by_rows or 8 % config.tile_warps == 0
            assert not config.resident_weights or config.teams * config.tile_warps % 4 == 0


def test_where_products_take_longer_than_memory_no_column_is_computed_twice():
    def aligned(name, precision, **changed):
        return k5_choice.choose(replace(workloads.get(name).problem, **changed), precision).tile.aligned

    assert {name: aligned(name, "tf32") for name in ("kb64", "kb74", "dac_u1", "demucs_out")} == {
        **dict(kb64=False, kb74=True, dac_u1=False, demucs_out=True)
    }
    assert not aligned("kb74", "tf32x3"), "three products"
    assert aligned("kb64", "bf16"), "lanes write two elements at once"
    for length in (1, 1000, 1 << 20):  # one kernel for all
        assert not aligned("kb64", "tf32", batch=1, length=length)
        assert aligned("kb74", "tf32", length=length)


def test_cases_reach_every_shape_of_warps():
    configs = [k5_choice.choose(p, "tf32") for p, _, _ in CASES]
    assert {c.row_warps for c in configs} == {1, 2}
    assert {c.fragments for c in configs} == {1, 2, 3, 4}


def _smallest(tile):
    """The smallest number of channels that may be staged together and fill a round."""
    return next(c for c in range(8, tile.channels + 1) if tile.channels % c == 0)


def check(state, p, config, shift):
    tile, (first, columns) = config.tile, config.tile.columns(p)
    state.shift, state.threads, team, y, found = shift, 32 * config.tile_warps, 1, {}, 0
    alignment = tensor_store.alignment_of(shift * 4, p, tile)
    out = Output(y, None, 0, p.batch, columns, first, p.out_channels, p.out_length, p.padding, alignment)
    aim, _ = tensor_store.make_aim(tile)
    store, zeros_first = k5_store.make_store_tile(config)
    assert not zeros_first
    stretches = tile.rows // 8 * (1 if config.staging_buffers == 2 else 2)
    for row_tile in range(tile.row_tiles(p)):
        co = row_tile * tile.channels
        for column_tile in range(tile.column_tiles(p)):
            n, j = divmod(column_tile * tile.advance, columns)
            if not aim(n, j, out)[1]:
                continue
            found += 1
            state.memory, state.known = {}, defaultdict(list)
            for state.watched in range(stretches + 1):
                state.stored, state.loaded = set(), set()
                for warp in range(config.tile_warps):
                    for lane in range(LANES):
                        state.stretch, state.loads, state.thread = 0, 0, (warp, lane)
                        sums = sums_of(config, column_tile, columns, co, warp, lane)
                        with contextlib.suppress(Passed):
                            place = Place(n, j, 0, co, p.out_channels - co, 0, 0)
                            store(sums, out, None, 0, BUFFERS, place, Thread(team, warp, lane))
                assert not state.stored & state.loaded, "what is loaded was stored before a barrier"
                assert max(state.loaded, default=0) < BUFFERS + config.staging_bytes
            assert min(state.memory) >= BUFFERS
            assert max(state.memory) < BUFFERS + config.staging_bytes
    assert found, "some tile leaves by rows"
    check_written(state, p, y, first, 1, lambda channel: 0)


def sums_of(config, column_tile, columns, co, warp, lane):
    """A lane's sums as mma.sync leaves them: two rows of each 16-row fragment, two columns of each product's eight."""
    tile, t = config.tile, lane % LANES_A_ROW
    start = column_tile * tile.advance - tile.overlap
    acc = []
    for m in range(config.fragments):
        for column in range(RUN):
            for half, e in ((0, 0), (0, 1), (1, 0), (1, 1)):
                row = (warp // 2 * config.fragments + m) * 16 + half * 8 + lane // LANES_A_ROW
                place = warp % 2 * 64 + run_of(2 * t + e, tile.itemsize) * RUN + column
                sample, j = divmod(start + place, columns)
                acc.append(code(sample, j, co + row, 0))
    return acc


@pytest.mark.parametrize("warps", [1, 2, 4])
@pytest.mark.parametrize("row", [64, 128, 256, 384, 4096], ids="{} bytes".format)
def test_rounds_unroll_few_stores(row, warps):
    """A warp stores 128 bytes at once, of as many channels as the most stores allow, but of one at least."""
    for round_channels in (1, 3, 6, 16, 64, 128):
        tile = SimpleNamespace(advance=row // 4, span=2, itemsize=2, round_channels=round_channels)
        found = Config.channels_at_once.fget(SimpleNamespace(tile=tile, tile_warps=warps))
        rounds = {c: -(-c // warps) for c in range(1, round_channels + 1) if round_channels % c == 0}
        fitting = [c for c, r in rounds.items() if r == 1 or r * max(1, row // 128) <= 16]
        assert found in fitting
        assert all((c / rounds[c], c) <= (found / rounds[found], found) for c in fitting)
