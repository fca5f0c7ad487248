"""Products of split operands, in Python: each once, small ones first, few of them summed by tensor cores."""

from dataclasses import replace

import pytest

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common import pipeline
from numba_tconv.kernels.common.pipeline import Pipe, Slot
from numba_tconv.kernels.common.tensor_core.split_operand import MOST_SPLIT_TAPS
from numba_tconv.kernels.k6_wgmma import mainloop as k6_multiply
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.kernels.k6_wgmma.arguments import Chunk, Lane, Order, Sums, View
from numba_tconv.kernels.k6_wgmma.tile import BLOCKS
from numba_tconv.ptx import SIMULATOR

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")
LARGE, SMALL = 0, 1  # parts of an operand
EMPTY, FULL = 1000, 3000  # mbarriers of free and of full stages
# The window's scale, and its inverse if split ahead; what scales its products' sums.
SCALES, INVERSES, INVERSE = object(), 4000, 0.5
SLOT = 3  # slot of a test's single stage
TURN = 2000  # mbarrier of the warpgroup's turn
BYTES = 1 << 12  # of a stage


def in_python(monkeypatch, config, multiply_all=None):
    """The device function of ``config`` in Python, and its effects on the stages, in order."""
    done = []
    for name in ("wgmma_commit", "mbarrier_wait"):
        monkeypatch.setattr(k6_multiply, name, lambda *_: None)
    monkeypatch.setattr(k6_multiply, "wgmma_fence", lambda: done.append("fence"))
    monkeypatch.setattr(pipeline, "mbarrier_wait", lambda *_: None)
    monkeypatch.setattr(pipeline, "mbarrier_arrive", lambda barrier: done.append(int(barrier)))
    for name in ("advance", "release", "stage_before", "wait_full"):
        monkeypatch.setattr(k6_multiply, name, getattr(pipeline, name).py_func)
    monkeypatch.setattr(k6_multiply, "recomputed", lambda value: value)
    monkeypatch.setattr(k6_multiply, "device_function", lambda function: function)
    monkeypatch.setattr(k6_multiply, "wgmma", lambda kind, rows: multiply_all or (lambda *_: done.append("products")))
    monkeypatch.setattr(k6_multiply, "wgmma_wait", lambda count: lambda: done.append(f"wait {count}"))

    def window(*arguments):
        assert arguments[-1].scales is SCALES
        done.append("window")
        return None if config.split_ahead else INVERSE

    def load_inverse(address):
        assert config.split_ahead
        assert address == INVERSES + 8 * SLOT
        return INVERSE

    monkeypatch.setattr(k6_multiply, "ld_shared", lambda count, kind: load_inverse)
    monkeypatch.setattr(k6_multiply, "make_window", lambda config, first=0, end=None: window)
    monkeypatch.setattr(k6_multiply, "make_hand_over", lambda config: (lambda *_: None, None))
    return k6_multiply.make_mainloop(config), done


def consume(mainloop, config, acc, total=None, v=(0,) * 1000, *, depths, **others):
    """Run the mainloop over ``depths`` of a tap chunk, from ring stage ``stage`` on."""
    given = dict(stages=config.stages, stage=0, taps=config.tile.tap_chunk, add=0, address=0, h_step=0, slot=BYTES)
    given |= dict(descriptor=0, parity=0) | others
    pipe, slot = Pipe(FULL, EMPTY, given["stages"]), Slot(given["stage"], 0)
    view = View(given["address"], False, False, 0, 0)
    lane = Lane(given["h_step"], 0, given["slot"], given["descriptor"], SCALES, INVERSES)
    chunk, turn = Chunk(given["add"], given["taps"], depths), Order(TURN, given["parity"])
    sums = Sums(acc, total, None, None)
    return mainloop(sums, v, pipe, slot, view, lane, chunk, given["descriptor"], None, turn)


# Problem, and taps of the chunk: all in one; all in several; the last's fewer ones.
CHUNKS = [(Problem(2, 16, 64, taps, 256), taps) for taps in range(1, 6)]
CHUNKS += [(Problem(2, 16, 64, 5, 256, dilation=4), taps) for taps in (3, 2)]
CHUNKS += [(Problem(2, 16, 64, 5, 256, dilation=3), 5), (Problem(2, 16, 64, 3, 256, dilation=6), 3)]
CHUNKS += [(Problem(2, 16, 64, 11, 256), taps) for taps in (4, 3, 1)]


@pytest.mark.parametrize(("problem", "taps"), CHUNKS)
def test_split_operands(monkeypatch, problem, taps):
    config = k6_config.configs(problem, "tf32x3")[0]
    tile = config.tile
    sums, window, chunk = tile.rows // 2, 4 + tile.halo, tile.tap_chunk
    assert taps in (chunk, tile.last_taps(problem)) or taps < chunk
    groups = []  # each sum's products since zero: first register of x, lower half of the descriptor

    def multiply_all(acc, at, x0, x1, x2, x3, descriptor, add):
        # Columns of a block, and of the row of the next four channels.
        assert (x1, x2, x3) == (x0 + 1, x0 + window, x0 + window + 1)
        if not add:
            groups.append([])
            acc[at : at + sums] = [0] * sums
        groups[-1].append((at // sums, x0, descriptor & 0xFFFFFFFF))
        for e in range(sums):
            acc[at + e] += 1

    mainloop, _ = in_python(monkeypatch, config, multiply_all)
    acc, total = [7] * (BLOCKS * sums), [0] * (BLOCKS * sums)
    v = range(tile.operand_halves * 2 * window)  # each register holds its own number
    consume(mainloop, config, acc, total, v, depths=1, taps=taps, stage=SLOT)

    tap_bytes, expected = tile.rows * tile.depth * 2 >> 4, []
    for block in range(BLOCKS):
        for b in range(taps):
            x = tile.halo - b * tile.taps.step + 2 * block
            for x_part, w_part in ((SMALL, LARGE), (LARGE, SMALL), (LARGE, LARGE)):
                expected.append((block, x + 2 * x_part * window, (w_part * chunk + b) * tap_bytes))
    assert sorted(product for group in groups for product in group) == sorted(expected)
    assert total == [3 * taps * INVERSE] * len(total), "every product is added up, once, and scaled back"
    for group in groups:
        assert len({block for block, _, _ in group}) == 1
        assert len(group) <= 3 * MOST_SPLIT_TAPS
        small = [x >= 2 * window or w >= chunk * tap_bytes for _, x, w in group]
        assert small == sorted(small, reverse=True), "the small ones come first"


@pytest.mark.parametrize("add", [0, 1])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("dilation", [1, 3])
def test_the_first_tap_alone_may_begin_sums(monkeypatch, dilation, precision, add):
    config = replace(k6_config.configs(Problem(2, 16, 64, 3, 256, dilation=dilation), precision)[0], depths=1)
    tile, found = config.tile, []
    sums, window = tile.rows // 2, 4 + tile.halo

    def multiply_all(acc, at, x0, x1, x2, x3, descriptor, add):
        assert (x1, x2, x3) == (x0 + 1, x0 + window, x0 + window + 1)
        found.append((at // sums, x0, descriptor & 0xFFFFFFFF, add))

    mainloop, _ = in_python(monkeypatch, config, multiply_all)
    consume(mainloop, config, [0] * (BLOCKS * sums), v=range(4 * window), depths=2, add=add)
    tap_bytes, chunk = tile.rows * tile.depth * tile.operand_size >> 4, tile.tap_chunk
    assert found == [
        (block, x + 2 * block, (depth * chunk + b) * tap_bytes, add if depth == b == 0 else 1)
        for depth in range(2)
        for b in range(chunk)
        for x in [2 * depth * window + tile.halo - b * tile.taps.step]
        for block in range(BLOCKS)
    ]


@pytest.mark.parametrize(("problem", "taps"), CHUNKS)
def test_what_products_read_is_loaded_before_them_and_not_under_them(monkeypatch, problem, taps):
    """A window split ahead comes in two pieces where operands would take too many registers."""
    config = k6_config.configs(problem, "tf32x3")[0]
    tile = config.tile
    window, sums = 4 + tile.halo, tile.rows // 2
    loaded, under_way, pieces = set(), [set()], []  # columns of the window; of each batch of products under way
    fenced = set()  # columns that were loaded before a fence

    def make_window(config, first=0, end=None):
        def load(*arguments):
            columns = set(range(first, window if end is None else end))
            assert not columns & set().union(*under_way), "the registers of products that are under way"
            _, _, offset, _, lane = arguments
            assert offset == SLOT * BYTES
            assert lane.scales is SCALES
            loaded.update(columns)
            pieces.append(len(columns))
            return None if config.split_ahead else INVERSE

        return load

    def multiply_all(acc, at, x0, x1, x2, x3, descriptor, add):
        columns = {x % window for x in (x0, x1, x2, x3)}
        assert columns <= fenced
        under_way[-1] |= columns
        acc[at : at + sums] = [0] * sums

    def wgmma_wait(most):
        return lambda: under_way.__setitem__(slice(0, len(under_way) - 1 - most), [])

    in_python(monkeypatch, config, multiply_all)
    monkeypatch.setattr(k6_multiply, "make_window", make_window)
    monkeypatch.setattr(k6_multiply, "wgmma_fence", lambda: fenced.update(loaded))
    monkeypatch.setattr(k6_multiply, "wgmma_commit", lambda: under_way.append(set()))
    monkeypatch.setattr(k6_multiply, "wgmma_wait", wgmma_wait)
    mainloop = k6_multiply.make_mainloop(config)
    acc, total = [0] * (BLOCKS * sums), [0] * (BLOCKS * sums)
    consume(mainloop, config, acc, total, range(4 * window), depths=1, taps=taps, stage=SLOT)
    assert sum(pieces) == window, "each column is loaded once"
    assert len(pieces) == (2 if taps > MOST_SPLIT_TAPS and tile.halo > 4 else 1)


# Weights resident or streamed; one or two depths a stage; two are unrolled.
kinds = pytest.mark.parametrize(("resident", "depths"), [(r, depths) for r in (False, True) for depths in (1, 2)])


def config_of(resident, depths):
    problem = Problem(2, 128, 128, 3, 256) if resident else Problem(2, 768, 512, 16, 256, stride=8)
    config = next(c for c in k6_config.configs(problem, "bf16") if c.resident == resident)
    assert config.unroll == 2
    return replace(config, depths=depths)


@kinds
def test_a_stage_is_set_free_when_all_of_it_is_read(monkeypatch, resident, depths):
    """Streamed weights: when the next stage's products are under way."""
    config = config_of(resident, depths)
    mainloop, done = in_python(monkeypatch, config)
    consume(mainloop, config, [0] * (BLOCKS * config.tile.rows // 2), depths=4)
    slots = list(range(4 // depths)) if resident else list(range(4 // depths - 1))
    assert [e for e in done if isinstance(e, int)] == [EMPTY + 8 * slot for slot in slots]
    windows = [at for at, e in enumerate(done) if e == "window"]
    waits = [at for at, e in enumerate(done) if e == "wait 1"]
    assert len(windows) == len(waits) == 4
    fences = [at for at, e in enumerate(done) if e == "fence"]
    assert all(window < fence for window, fence in zip(windows, fences, strict=True))
    for slot in slots:
        last = slot * depths + depths - 1
        assert done.index(EMPTY + 8 * slot) > (windows[last] if resident else waits[last + 1])


@kinds
def test_a_stage_is_read_from_its_slot(monkeypatch, resident, depths):
    """Its windows and streamed weights; around the end of the ring. It is waited for once."""
    config = config_of(resident, depths)
    windows, weights, waited = [], [], []
    in_python(monkeypatch, config, lambda acc, at, *rest: weights.append(rest[4] & 0xFFFFFFFF))
    monkeypatch.setattr(
        k6_multiply,
        "make_window",
        lambda config, first=0, end=None: lambda v, at, offset, view, lane: windows.append(int(view.address + offset)),
    )
    for module in (k6_multiply, pipeline):
        monkeypatch.setattr(module, "mbarrier_wait", lambda barrier, parity: waited.append((int(barrier), parity)))
    mainloop = k6_multiply.make_mainloop(config)
    slot, stages, first, x_at, descriptor0, h_step = 5 << 7, 3, 2, 7 << 20, 9 << 4, 1 << 6
    acc = [0] * (BLOCKS * config.tile.rows // 2)
    consume(mainloop, config, acc, depths=4, stages=stages, stage=first, address=x_at, h_step=h_step, slot=slot,
            descriptor=descriptor0)  # fmt: skip
    places = [(2, 0), (0, 0), (1, 0), (2, 0)] if depths == 1 else [(2, 0), (2, 1), (0, 0), (0, 1)]  # slot, depth in it
    assert windows == [x_at + slot * s + z * 2 * h_step for s, z in places]
    own = config.tile.depth_weights
    at = range(0, 4 * own, own) if resident else [slot * s + z * own for s, z in places]
    assert weights[:: len(weights) // 4] == [descriptor0 + (bytes >> 4) for bytes in at]
    of_stages = [(FULL + 8 * s, int(number > 0)) for number, (s, z) in enumerate(places) if z == 0]
    assert [barrier for barrier in waited if barrier[0] != TURN] == of_stages


@pytest.mark.parametrize("resident", [False, True])
def test_a_tile_waits_for_its_turn_before_its_first_stage(monkeypatch, resident):
    """Ping-pong: once a tile, not for each chunk of taps."""
    problem = Problem(2, 128, 128, 3, 256) if resident else Problem(2, 768, 512, 16, 256, stride=8)
    config = next(c for c in k6_config.configs(problem, "bf16") if c.resident == resident)
    mainloop, done = in_python(monkeypatch, config)
    for module in (k6_multiply, pipeline):
        monkeypatch.setattr(module, "mbarrier_wait", lambda barrier, parity: done.append((int(barrier), parity)))
    for add in (0, 1):
        consume(mainloop, config, [0] * (BLOCKS * config.tile.rows // 2), depths=2, add=add, parity=1)
    turns = [at for at, e in enumerate(done) if e == (TURN, 1)]
    assert turns == ([0] if resident else [])
