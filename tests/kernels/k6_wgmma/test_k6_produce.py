"""What k6's producers bring into each stage of the ring, and when: every stage once, by one of them."""

from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.pipeline import Pipe
from numba_tconv.kernels.k6_wgmma import boxes as k6_box
from numba_tconv.kernels.k6_wgmma import producer as k6_load
from numba_tconv.kernels.k6_wgmma import schedule as k6_schedule
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.kernels.k6_wgmma import windows as k6_windows
from numba_tconv.kernels.k6_wgmma.arguments import Fetch, Grid, Input, Samples, Shared, Window
from numba_tconv.kernels.k6_wgmma.boxes import RowAlignment
from numba_tconv.kernels.k6_wgmma.choose import choose_whole
from numba_tconv.kernels.k6_wgmma.unpacked import run_of, with_unpacked
from tests.kernels.test_tensor_store import cast_quickly

FULL, EMPTY, BASE, MAP = 100_000_000, 200_000_000, 1024, 1 << 40
SHARED = Shared(None, None, BASE)
SPLIT = SimpleNamespace(ready=300_000_000)


@dataclass
class Stage:
    """What one warp did between two waits."""

    waited: tuple
    announced: int = 0
    boxes: list = field(default_factory=list)
    weights: list = field(default_factory=list)
    filled: list = field(default_factory=list)
    fences: list = field(default_factory=list)  # of each, how many windows were filled before
    arrivals: list = field(default_factory=list)
    landed: tuple = None  # what it waited for before it split or ordered the stage
    runs: list = field(default_factory=list)  # of unpacked weights: where to, and the first's index
    ordered: list = field(default_factory=list)
    split: list = field(default_factory=list)


@pytest.fixture
def brought(monkeypatch):
    """The stages that a warp brings, by its instructions."""
    stages = []

    def expect(barrier, size):
        assert barrier - FULL == stages[-1].waited[0] - EMPTY
        stages[-1].announced += size

    def wait(barrier, parity):
        if barrier >= EMPTY:
            stages.append(Stage((int(barrier), int(parity))))
        else:
            assert len(stages[-1].arrivals) == 1, "of its copies, without which it would wait for good"
            stages[-1].landed = int(barrier), int(parity)

    def split_stage(lane, at, slot, split, window, firsts, lasts):
        assert split is SPLIT
        stages[-1].split.append((int(at), int(slot), firsts.tolist(), lasts.tolist()))

    def bring(lane, at, w, first, group_tiles, barrier):
        assert barrier - FULL == stages[-1].waited[0] - EMPTY
        stages[-1].runs.append((int(at), int(first)))

    modules = k6_load, k6_schedule, k6_windows
    cast_quickly(monkeypatch, *modules)
    for module in modules:
        monkeypatch.setattr(module, "device_function", lambda function: function)
    for name, instruction in {
        "recomputed": lambda value: value,
        "elected": lambda: True,
        "mbarrier_wait": wait,
        "make_split_stage": lambda config: split_stage,
        "make_bring": lambda config: bring,
        "make_order": lambda config: lambda lane, *places: stages[-1].ordered.append(tuple(map(int, places))),
        "mbarrier_expect_tx": expect,
        "fence_async": lambda: stages[-1].fences.append(len(stages[-1].filled)),
        "mbarrier_arrive": lambda barrier: stages[-1].arrivals.append(int(barrier)),
        "cp_async_bulk_tensor_4d": lambda *copy: stages[-1].boxes.append(tuple(map(int, copy))),
        "cp_async_bulk": lambda at, w, source, size, barrier: stages[-1].weights.append((at, source, size, barrier)),
    }.items():
        for module in (k6_load, k6_windows):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, instruction)

    def fill(x, origin, region, shared, *_):
        stages[-1].filled.append((*map(int, origin), int(shared.base + region)))

    monkeypatch.setattr(k6_windows, "make_fill", lambda config: (None, fill))
    local = SimpleNamespace(array=lambda size, dtype: np.zeros(size, np.int64))
    threads = SimpleNamespace(local=local, syncwarp=lambda: None)
    for module in (k6_load, k6_schedule):
        monkeypatch.setattr(module, "cuda", threads)
    return stages


def check_split(stage, at, slot, config, geometry, rows, early, length):
    """Every stage is split once: its windows' share of x, zeros beside it."""
    ((split_at, split_slot, firsts, lasts),) = stage.split
    assert (split_at, split_slot) == (at, slot)
    boxes = {to: begin for to, _, begin, *_ in stage.boxes}
    filled = {to: (early + i) % 4 * (not rows.aligned) for _, i, _, _, to in stage.filled}
    elements = range(geometry.pitch // 4)
    for z, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
        region = at + z * geometry.region
        if region in filled:
            own = range(filled[region], filled[region] + config.width)
        elif rows.aligned:  # the copy engine makes zeros
            own = elements
        else:
            own = [e for e in elements if 0 <= boxes[region] - early + e < length]
        assert [e for e in elements if first <= e < last] == list(own)


# Resident and streamed weights; one window or two; one chunk of taps or several; missing channels in the unrolled
# loop's last pass; groups of an odd number of depths; rows that begin alike or not; windows shared by samples; fewer
# slots than producers; operands that these split; weights that they order.
@pytest.mark.parametrize("alike", [1, 4])
@pytest.mark.parametrize(
    ("problem", "precision"),
    [
        (Problem(2, 24, 16, 4, 4096, stride=2), "tf32"),
        (Problem(3, 768, 64, 8, 2048, stride=4), "bf16"),
        (Problem(2, 96, 16, 64, 2048, stride=2), "tf32"),
        (Problem(2, 192, 32, 3, 1024, stride=2, groups=4), "fp16"),
        (Problem(2, 104, 16, 3, 2048), "tf32x3"),
        (Problem(2, 328, 64, 8, 1024, stride=4), "tf32"),
        (Problem(7, 32, 16, 4, 40, stride=2), "bf16"),
        (Problem(1, 80, 80, 1024, 63, stride=256), "tf32x3"),
        (Problem(2, 104, 16, 5, 999, dilation=3), "tf32x3"),
        (Problem(7, 32, 16, 8, 12, stride=2), "tf32x3"),
        (Problem(2, 1024, 64, 8, 300, stride=4), "unpacked bf16"),
        (Problem(2, 1024, 64, 16, 300, stride=8, groups=2), "unpacked tf32"),
    ],
)
def test_every_stage_once(brought, monkeypatch, problem, precision, alike):
    p, config = problem, choose_whole(problem, precision.split()[-1])
    config = with_unpacked(p, config) if precision.startswith("unpacked") else config
    vector = 16 // config.tile.itemsize
    rows = RowAlignment() if alike == 1 else RowAlignment(alike, 3 * vector // alike, False)
    tile, g = config.tile, k6_box.geometry(config, rows)
    (first, columns), column_tiles = k6_config.sample_columns(p, config), k6_config.column_tiles(p, config)
    group_tiles, tap_chunks = tile.row_tiles(p), tile.tap_chunks(p)
    row_tiles, stages = group_tiles * p.groups, k6_config.channel_chunks(p, config) // config.depths
    blocks = row_tiles if config.resident else 1  # the last of which is looked at
    monkeypatch.setattr(k6_load.cuda, "gridDim", SimpleNamespace(x=blocks), raising=False)
    monkeypatch.setattr(k6_load.cuda, "blockIdx", SimpleNamespace(x=blocks - 1), raising=False)
    log, early, stride_c = alike.bit_length() - 1, 0 if alike == 1 else 3, p.length + rows.shear
    window = Window(log, g.pitch, g.shear, g.region, g.stage_bytes, g.stages)
    schedule = k6_schedule.make_schedule(config)
    produce, apart = k6_load.make_produce(config, schedule), columns % tile.advance == 0
    # Two phases of a slot look alike, so a warp that waits must be at most one round of the ring ahead.
    fetch, samples = Fetch(True, rows.aligned, apart, False), Samples(p.batch, p.length, columns, first)
    x = Input(None, None, p.in_channels * stride_c, stride_c, early, window, fetch, samples)
    depths = k6_config.channel_chunks(p, config)
    grid = Grid(tap_chunks, tile.last_taps(p), depths, group_tiles, row_tiles, column_tiles, 1)
    by_place, together = defaultdict(list), min(k6_config.PRODUCERS, g.stages)
    for warp in range(k6_config.PRODUCERS):
        brought.clear()
        produce(0, warp, x, MAP, "w", grid, p.in_channels_per_group, Pipe(FULL, EMPTY, g.stages), SHARED, SPLIT)
        for number, stage in enumerate(brought):
            by_place[number * together + warp].append(stage)

    _, locate, sample_of, _ = schedule
    window_start = k6_windows.make_window_start(config)
    groups_of_tiles = -(-column_tiles // config.regions)
    turns = groups_of_tiles if config.resident else groups_of_tiles * row_tiles
    k, boxed_windows = 0, 0
    for turn in range(turns):
        row_tile, column_tile = locate(turn, grid)
        channel0 = row_tile // group_tiles * p.in_channels_per_group
        for chunk in range(tap_chunks):
            for s in range(stages):
                (stage,) = by_place.pop(k)
                slot, at = k % g.stages, BASE + config.ring + k % g.stages * g.stage_bytes
                barrier = FULL + 8 * slot
                assert stage.waited == (EMPTY + 8 * slot, 1 - k // g.stages % 2)
                assert stage.arrivals == [barrier]
                expected, filled = [], []
                for z in range(config.regions):
                    n, j = sample_of(column_tile + z, columns)
                    n, i, in_box = window_start(n, j, chunk, True, apart, p.length, columns, first)
                    here = at + z * g.region
                    if in_box:
                        if p.groups > 1:
                            assert (s + 1) * config.depth <= p.in_channels_per_group, "the next group's channels"
                        row = (channel0 + s * config.depth) >> log
                        expected.append((here, MAP, (early + i) // vector * vector, 0, row, n, barrier))
                    else:
                        done = s * config.depth
                        filled.append((n, i, channel0 + done, p.in_channels_per_group - done, here))
                boxed_windows += len(expected)
                assert stage.filled == filled
                if config.split_ahead:
                    assert stage.landed == (barrier, k // g.stages % 2)
                    check_split(stage, at, 8 * slot, config, g, rows, early, p.length)
                elif config.unpacked:
                    assert stage.landed == (barrier, k // g.stages % 2)
                    address, run = at + config.regions * g.region, run_of(config)
                    first_run = (channel0 + s * config.depth) * group_tiles + row_tile % group_tiles
                    assert stage.runs == [(address + config.stage_weights, first_run * run)]
                    assert stage.ordered == [(address + config.stage_weights, address, SPLIT.ready + 8 * slot)]
                else:
                    assert stage.landed is None
                    assert not stage.split
                assert stage.fences == list(range(1, len(filled) + 1)), "the lane's own writes, before the engine's"
                assert sorted(stage.boxes) == sorted(tuple(map(int, box)) for box in expected)
                source = ((row_tile * tap_chunks + chunk) * stages + s) * config.stage_weights // tile.itemsize
                weights = [(at + config.regions * g.region, source, config.stage_weights, barrier)]
                assert stage.weights == ([] if config.resident or config.unpacked else weights)
                copied = len(expected) * config.depth * g.pitch
                assert stage.announced == copied + (0 if config.resident else config.stage_weights)
                k += 1
    assert not by_place
    assert (boxed_windows > 0) == (columns > 64)
