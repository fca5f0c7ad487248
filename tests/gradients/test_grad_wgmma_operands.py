"""What lanes of the wgmma gradients clear, multiply and store, in Python."""

from collections import Counter
from types import SimpleNamespace

import pytest

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.input.wgmma import choose as input_choose
from numba_tconv.gradients.input.wgmma import operands as input_operands
from numba_tconv.gradients.weight.wgmma import choose as weight_choose
from numba_tconv.gradients.weight.wgmma import epilogue, operands
from numba_tconv.gradients.wgmma_ring import BLOCK, CONSUMERS
from numba_tconv.kernels.common.tensor_core import fragments
from numba_tconv.ptx import SIMULATOR

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")

PADDED = Problem(5, 40, 64, 7, 301, stride=3, padding=5)
TAPS = Problem(6, 300, 70, 9, 301, padding=3, dilation=3)


def configs(problem, precision, alike, **fields):
    found = weight_choose.candidates(problem, precision, alike)
    return [c for c in found if all(getattr(c, name) == value for name, value in fields.items())]


def in_python(monkeypatch, module, **fakes):
    for name, value in dict(device_function=lambda function: function, wgmma=lambda *_: None, **fakes).items():
        monkeypatch.setattr(module, name, value, raising=False)


@pytest.mark.parametrize("flag", [0, 1])
@pytest.mark.parametrize("before", [0, 1, 5, 8])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("alternate", [False, True])
def test_four_lanes_clear_what_a_sample_has_not_before_its_first_stage(monkeypatch, alternate, precision, before, flag):
    stage, slot, cleared, done = 3, 1 << 12, Counter(), []

    def clear_halves(low_at, high_at, value):
        assert low_at == high_at
        cleared[low_at] += value == 0

    in_python(
        monkeypatch,
        operands,
        ld_shared=lambda *_: lambda address: flag if address == 64 + 8 * stage else 1 - flag,
        st_shared_f32=lambda at, value: cleared.update([at] if value == 0 else []),
        st_shared_halves=clear_halves,
        fence_async=lambda: done.append("fence"),
        barrier_sync=lambda name, count: done.append((name, count)),
    )
    config = configs(PADDED, precision, 2, alternate=alternate)[0]
    starts = [row << 16 for row in range(2 * config.blocks)]
    starts[1] = operands.NOT_MINE
    clear = operands.make_clear(config)
    for lane in range(4):
        done.clear()
        clear(SimpleNamespace(flags=64, first_cleared=lane, before=before, starts=starts, barrier=7), stage, slot)
        assert done == (["fence", (7, 128 if alternate else 128 * CONSUMERS)] if flag else [])
    mine = [start for start in starts if start != operands.NOT_MINE]
    wanted = [start + slot + z * config.itemsize for start in mine for z in range(before)] if flag else []
    assert cleared == Counter(wanted)


def test_rows_are_cleared_where_a_configuration_says_so(monkeypatch):
    in_python(monkeypatch, operands, make_clear=lambda config: "clears")
    for config in configs(PADDED, "bf16", 2) + configs(TAPS, "bf16", 1):
        assert operands.make_operands(config).prepare == ("clears" if config.clears else operands.as_it_came)


@pytest.mark.parametrize(("problem", "alike"), [(PADDED, 2), (TAPS, 1)], ids=["pairs", "taps"])
@pytest.mark.parametrize("alternate", [False, True])
def test_partial_sums_are_stored_once(monkeypatch, problem, alike, alternate):
    stored = {}

    def store_pair(where, result, at, both):
        assert (where, result) == (True, "result")
        assert at % 2 == 0
        for z in range(2):
            assert at + z not in stored
            stored[at + z] = both[z]

    in_python(
        monkeypatch,
        epilogue,
        st_global_if=lambda count: {2: store_pair}[count],
        bits_of=lambda value: value,
        cuda=SimpleNamespace(local=SimpleNamespace(array=lambda n, dtype: [None] * n)),
    )
    config = max(configs(problem, "bf16", alike, alternate=alternate), key=lambda c: (c.tap_chunk, c.blocks))
    store, sums_of_tap, tiles, wanted = epilogue._make_partial(config), config.channels // 2, 5, {}
    for warpgroup in range(CONSUMERS):
        for warp in range(4):
            for lane in range(32):
                consumer = SimpleNamespace(warpgroup=warpgroup, warp=warp, lane=lane)
                count = config.blocks * config.tap_chunk * sums_of_tap
                sums = [(warpgroup, warp, lane, z) for z in range(count)]
                block = SimpleNamespace(split=3, tile=2)
                store(sums, "result", None, SimpleNamespace(tiles=tiles), block, consumer)
                for z, value in enumerate(sums):
                    place, own = divmod(z, sums_of_tap)
                    b, tap = divmod(place, config.tap_chunk)
                    m, n = fragments.wgmma_d(warp, lane, own)
                    row = BLOCK * b + m + (0 if alternate else BLOCK * config.blocks * warpgroup)
                    partial = 3 * CONSUMERS + warpgroup if alternate else 3
                    at = (partial * tiles + 2) * config.tile_sums + (tap * config.rows + row) * config.channels + n
                    wanted[at] = value
    assert stored == wanted
    assert len(wanted) == config.tile_sums * (CONSUMERS if alternate else 1)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_a_product_of_grad_input_multiplies_the_registers_of_each_block(monkeypatch, precision):
    found = []
    in_python(monkeypatch, input_operands, ld_shared=lambda *_: None)
    monkeypatch.setattr(input_operands, "wgmma", lambda kind, channels: lambda sums, *told: found.append(told))
    for config in input_choose.candidates(Problem(3, 100, 40, 4, 300, stride=2, padding=1), precision, 1):
        found.clear()
        input_operands.make_operands(config).multiply("sums", list(range(100, 120)), 3, 9)
        each = config.channels // 2
        assert found == [(b * each, *(103 + 4 * b + z for z in range(4)), 9, 1) for b in range(config.blocks)]


def test_a_tile_is_staged_when_products_have_read_the_ring_and_stored_when_it_is_whole(monkeypatch):
    calls, config = [], configs(Problem(4, 64, 64, 4, 300, stride=4), "bf16", 1, alternate=False)[0]
    in_python(
        monkeypatch,
        epilogue,
        cuda=SimpleNamespace(local=SimpleNamespace(array=lambda n, dtype: [None] * n)),
        repeated=lambda function, count: lambda k, state: calls.append("stage"),
        divided=divmod,
        barrier_sync=lambda *told: calls.append(told),
        load_vector=lambda *_: calls.append("load"),
        store_run=lambda element: lambda *_: calls.append("store"),
    )
    store = epilogue._make_direct(config)
    grid, block = (
        SimpleNamespace(group_channels=64, group_rows=64),
        SimpleNamespace(pair_tile=0, channel_tile=0, group=0),
    )
    store([0.0] * config.sums, None, epilogue.Staging({}, 0), grid, block, SimpleNamespace(warpgroup=0, warp=0, lane=0))
    meeting = epilogue.BARRIER, 128 * CONSUMERS
    assert calls[:3] == [meeting, "stage", meeting]
    assert set(calls[3:]) == {"load", "store"}
