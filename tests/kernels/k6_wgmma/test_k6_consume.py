"""k6's blocks in Python: what producers bring is what consumers multiply, and every tile is stored once, whole."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.k6_wgmma import kernel
from numba_tconv.kernels.k6_wgmma import tile as k6_tile
from numba_tconv.kernels.k6_wgmma.choose import choose_whole
from numba_tconv.kernels.k6_wgmma.tile import configs
from numba_tconv.kernels.k6_wgmma.unpacked import run_of, with_unpacked
from numba_tconv.ptx import SIMULATOR
from tests.kernels.k6_wgmma.kernel_in_python import kernel_in_python, run_kernel, state
from tests.thread_block import Block, Over

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")


def resident(problem, precision, **fields):
    config = next(c for c in configs(problem, precision) if c.resident)
    return problem, replace(config, **fields)


def streamed(problem, precision, **fields):
    """Even weights that would stay."""
    config = replace(configs(problem, precision)[0], resident=False, weights=0)
    return problem, replace(k6_tile.deepest(config), **fields)


def unpacked(problem, precision):
    found = (with_unpacked(problem, replace(c, resident=False, weights=0)) for c in configs(problem, precision))
    return problem, next(filter(None, found))


def chosen(problem, precision):
    return problem, choose_whole(problem, precision)


SHARED = dict(buffers=1, bulk_channels=0)
# What each is for; problem and configuration, elements between channels, and before x.
CASES = {
    "ping-pong, two depths a stage": (*resident(Problem(3, 24, 16, 4, 700, stride=2), "tf32"), 0),
    "ping-pong, a shared staging buffer": (*resident(Problem(3, 56, 33, 5, 500, stride=3), "tf32", **SHARED), 0),
    "ping-pong, groups": (*resident(Problem(2, 192, 32, 3, 700, stride=2, groups=4), "fp16"), 0),
    "ping-pong, a single phase": (*resident(Problem(5, 128, 200, 3, 256), "bf16"), 0),
    "ping-pong, large weights, a row tile a block": (*resident(Problem(2, 328, 40, 8, 700, stride=4), "tf32"), 0),
    "ping-pong, parts of the phases": (*resident(Problem(2, 24, 2, 140, 700, stride=130), "bf16"), 0),
    "ping-pong, several tap chunks": (*resident(Problem(2, 32, 16, 64, 700, stride=2), "tf32"), 0),
    "ping-pong, unaligned": (*resident(Problem(3, 24, 16, 4, 700, stride=2), "tf32"), 1),
    "ping-pong, samples in one window": (*resident(Problem(30, 32, 16, 4, 40, stride=2), "bf16"), 0),
    "ping-pong, phases without taps": (*resident(Problem(2, 24, 16, 3, 700, stride=5), "tf32"), 0),
    "cooperative, a single phase": (*streamed(Problem(3, 160, 256, 3, 400), "tf32"), 0),
    "cooperative, a single phase, several tap chunks": (*streamed(Problem(2, 48, 64, 31, 700), "bf16"), 0),
    "cooperative, several tap chunks": (*streamed(Problem(2, 96, 16, 64, 700, stride=2), "tf32"), 0),
    "cooperative, deep stages": (*streamed(Problem(2, 200, 130, 3, 400), "tf32", depths=2, stages=4), 0),
    "cooperative, one depth, groups": (*streamed(Problem(2, 48, 256, 3, 300, groups=2), "bf16"), 0),
    "split operands": (*chosen(Problem(2, 104, 16, 3, 700), "tf32x3"), 1),
    "operands split ahead": (*chosen(Problem(2, 104, 16, 5, 999, dilation=3), "tf32x3"), 1),
    "split operands, several tap chunks, streamed": (*streamed(Problem(2, 40, 64, 11, 300), "tf32x3"), 0),
    "parts of the phases, split ahead": (*chosen(Problem(1, 80, 3, 1024, 63, stride=256), "tf32x3"), 0),
    "weights not packed": (*unpacked(Problem(2, 192, 64, 16, 300, stride=8, groups=2), "tf32"), 0),
}


def wanted(problem, config, packed):
    """Of every tile, its place and products."""
    tile, grid = config.tile, state.given.grid
    cc, group_tiles = k6_tile.channel_chunks(problem, config), tile.row_tiles(problem)
    columns = state.given.x.samples.columns
    count = -(-k6_tile.column_tiles(problem, config) // config.regions) * config.regions
    for row_tile in range(group_tiles * problem.groups):
        group, own = divmod(row_tile, group_tiles)
        first_channel, first = own // tile.row_parts * tile.channels, own % tile.row_parts * tile.phases
        left = min(tile.channels, problem.out_channels_per_group - first_channel)
        channel = group * problem.out_channels_per_group + first_channel
        for t in range(count):
            n, j = divmod(t * tile.advance, columns)
            products = []
            for chunk in range(grid.tap_chunks):
                taps = tile.last_taps(problem) if chunk == grid.tap_chunks - 1 else tile.tap_chunk
                for d in range(cc):
                    stage, z = divmod(d, config.depths)
                    x_channel = group * problem.in_channels_per_group + stage * config.depth
                    x = ("x", n, j, chunk, x_channel), z * tile.depth, (n, j, chunk)
                    weights = packed, ((row_tile * grid.tap_chunks + chunk) * cc + d) * tile.depth_weights
                    if config.unpacked:
                        run = x_channel * group_tiles + own
                        at = run * run_of(config) * tile.itemsize + z * tile.depth_weights
                        weights = ("ordered", "w"), at
                    products.append((x, weights, taps))
            yield (n, j, first, channel, left), tuple(products)


@pytest.mark.parametrize("case", CASES)
def test_every_tile_is_stored_once(monkeypatch, case):
    problem, config, more = CASES[case]
    packed, stored = run_kernel(monkeypatch, problem, config, more, case)
    expected, found = (sorted(tiles, key=lambda tile: tile[0]) for tiles in (wanted(problem, config, packed), stored))
    assert [place for place, _ in found] == [place for place, _ in expected]
    assert found == expected


def test_gaps_are_zero_before_threads_part(monkeypatch):
    """Every thread's, in one block; one of them makes the mbarriers."""
    problem, config = resident(Problem(2, 24, 16, 3, 700, stride=5), "tf32")
    assert config.tile.has_gaps
    function, blocks, _ = kernel_in_python(monkeypatch, problem, config, 0)
    block, written = Block(0, blocks, 0), []
    monkeypatch.setattr(state, "block", block)

    class Words:
        def __setitem__(self, index, value):
            assert value == 0
            written.append(index)

    def syncthreads(self):
        raise Over

    block.words = Words()
    monkeypatch.setattr(type(kernel.cuda), "syncthreads", syncthreads)
    for number in range(k6_tile.THREADS):
        block.now = SimpleNamespace(number=number, marks=set())
        with pytest.raises(Over):
            function()
        assert ("fence" in block.now.marks) == (number == 0)
    assert sorted(written) == list(range(config.staging // 4, (config.staging + config.staging_bytes) // 4))
