"""grad_input_wgmma's store: after the exchange between lanes each sum lies at its position and channel."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from numba_tconv.gradients.input.wgmma import choose as grad_input_wgmma_choose
from numba_tconv.gradients.input.wgmma import epilogue as grad_input_wgmma_store
from numba_tconv.gradients.input.wgmma.arguments import Shape, Tile
from numba_tconv.kernels.common.tensor_core import fragments
from numba_tconv.lab.measure import workloads

LANES, TIMEOUT_S = 32, 30


@pytest.fixture
def stored(monkeypatch):
    """Stores by address: a sum is its position and channel. A warp's lanes are threads that meet in exchanges."""
    found, own, meeting, given = {}, threading.local(), threading.Barrier(LANES, timeout=TIMEOUT_S), [None] * LANES

    def exchanged(mask, value, distance):
        given[own.lane] = value
        meeting.wait()
        other = given[own.lane ^ distance]
        meeting.wait()
        return other

    def store_of(count):
        def store(wanted, grad, at, words):
            for place, value in enumerate(sum(words[:count], ())) if wanted else ():
                assert at + place not in found
                found[int(at + place)] = value

        return store

    class Grad:
        def __setitem__(self, at, value):
            assert int(at) not in found
            found[int(at)] = value

    def run(config, length, left, positions):
        store = grad_input_wgmma_store.make_store(config)

        def work(warp, lane):
            own.lane = lane
            acc = []
            for z in range(config.sums):
                m, n = fragments.wgmma_d(warp, lane, z % (config.channels // 2))
                acc.append((int(m) + z // (config.channels // 2) * 64, int(n)))
            target = grad_input_wgmma_store.Target(0, length, channels_left=left, positions_left=positions)
            store(acc, Grad(), target, warp, lane)

        with ThreadPoolExecutor(LANES) as pool:
            for warp in range(4):
                list(pool.map(work, [warp] * LANES, range(LANES)))
        return found

    local = SimpleNamespace(array=lambda size, dtype: [None] * size)
    fakes = {
        "cuda": SimpleNamespace(local=local, shfl_xor_sync=exchanged),
        "device_function": lambda function: function,
        "repeated": lambda step, count: lambda first, state: [step(k, state) for k in range(count)],
        "bits_of": lambda value: (value,),
        "float_of": lambda word: word[0],
        "st_global_if": store_of,
        "ELEMENTS": dict.fromkeys(grad_input_wgmma_store.ELEMENTS, SimpleNamespace(store=lambda value: value)),
        "pack_bf16": lambda low, high: (low, high),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(grad_input_wgmma_store, name, fake)
    return run


@pytest.mark.parametrize(("precision", "partial"), [("tf32", False), ("bf16", False), ("bf16", True)])
@pytest.mark.parametrize(
    ("length", "left", "positions"),
    [(256, 16, 128), (300, 11, 100), (301, 16, 101), (302, 5, 70)],
    ids=["whole", "tails, in fours", "tails, one by one", "even lengths"],
)
def test_every_sum_at_its_position_and_channel(stored, precision, partial, length, left, positions):
    problem = workloads.get("hifigan_u3").problem
    config = replace(grad_input_wgmma_choose.choose(problem, precision), channels=16, blocks=2, split_k=partial)
    found = stored(config, length, left, positions)
    assert found == {n * length + m: (m, n) for n in range(left) for m in range(positions)}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("warpgroup", [0, 1])
def test_where_a_tile_begins_in_the_result(splits, warpgroup):
    """Which is (N, groups, splits, channels of a group, L) if it is in parts."""
    config = grad_input_wgmma_choose.choose(workloads.get("dac_u1").problem, "bf16")
    config = replace(config, channels=16, alternate=False, split_k=splits > 1)
    aim = grad_input_wgmma_store.make_aim(config)
    aim = getattr(aim, "py_func", aim)
    place = Tile(sample=1, group=1, split=splits - 1, channel_tile=2, position=256)
    target = aim(place, Shape(0, 1000, 2, 0, 40), splits, warpgroup)
    row, position = ((1 * 2 + 1) * splits + splits - 1) * 40 + 2 * 16, 256 + 64 * config.blocks * warpgroup
    assert (target.start, target.channels_left) == (row * 1000 + position, 40 - 2 * 16)
    assert target.positions_left == min(1000 - position, config.rows)
