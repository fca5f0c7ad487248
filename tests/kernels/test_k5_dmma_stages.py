"""The producers and consumers of k5_dmma's ring, as plain Python."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from numba_tconv.kernels.k5_dmma import ring as k5_dmma_ring
from tests.kernels.test_k5_dmma import configs

# Where a block's windows lie, in windows: its first column, the signal's first column and length, columns of a sample.
PLACES = {
    "inside": (4, 0, 8, 8),
    "before the first sample": (-4, 0, 8, 8),
    "behind the last sample": (12, 0, 8, 8),
    "before a signal": (4, -8, 8, 8),
    "at a signal's end": (4, 0, 4, 8),
    "across samples": (4, 0, 8, 4),
}


@pytest.mark.parametrize("place", PLACES)
def test_every_stage_of_the_ring_has_its_own_weights_and_channels(monkeypatch, place):
    """A producer thread in Python, for two chunks of taps and a last stage of one channel."""
    c = next(c for _, c in configs() if c.ring and c.x_vector == 2)
    copies, elsewhere, waits = [], [], []
    monkeypatch.setattr(k5_dmma_ring, "mbarrier_wait", lambda *told: waits.append(told))
    for name in ("barrier_sync", "mbarrier_await_copies", "mbarrier_arrive_expect_tx"):
        monkeypatch.setattr(k5_dmma_ring, name, lambda *arguments: None)
    monkeypatch.setattr(k5_dmma_ring, "device_function", lambda function: function)
    monkeypatch.setattr(k5_dmma_ring, "cuda", SimpleNamespace(threadIdx=SimpleNamespace(x=c.threads)))
    monkeypatch.setattr(k5_dmma_ring, "make_aim", lambda *arguments: lambda *arguments: None)
    monkeypatch.setattr(
        k5_dmma_ring, "make_load_window", lambda *arguments: lambda block, at, x, *of: elsewhere.append((at, *of))
    )
    monkeypatch.setattr(k5_dmma_ring, "cp_async_bulk", lambda *arguments: copies.append(arguments[:4]))
    fulls = c.stages + 1
    channels, pitch, inside = fulls * c.block_k + 1, 16 * c.copied, place == "inside"
    block_column, first_column, length, columns = (number * c.copied for number in PLACES[place])
    block = SimpleNamespace(base=1024, tile_offset=48, group_offset=96, first_column=block_column)
    grid = SimpleNamespace(tap_chunks=2, first_column=first_column, columns=columns)
    sizes = SimpleNamespace(batch=1, length=length, in_per_group=channels)
    k5_dmma_ring.make_fill_ring(c)(
        block, 0, 512, SimpleNamespace(data="x", stride_n=0, stride_c=pitch), "w", sizes, grid
    )
    stages = list(itertools.product(range(2), range(fulls + 1)))
    places = [z % c.stages * c.stage for z in range(len(stages))]
    assert len(stages) > 2 * c.stages
    assert waits == [(512 + 8 * (z % c.stages), (1 + z // c.stages) % 2) for z in range(len(stages))]
    assert [copy for copy in copies if copy[1] == "w"] == [
        (block.base + (at + c.x_stage) * c.itemsize, "w", block.tile_offset + z * c.w_stage, c.w_stage * c.itemsize)
        for z, at in enumerate(places)
    ]
    windows = [
        (block.base + at * c.itemsize, "x", block.group_offset + s * c.block_k * pitch + first, c.copied * c.itemsize)
        for at, (chunk, s) in zip(places, stages, strict=True)
        for first in [block.first_column - c.lead - chunk * c.chunk_shift]
        if inside and s < fulls
    ]
    assert [copy for copy in copies if copy[1] == "x"] == windows
    assert elsewhere == [
        (at, block.group_offset + s * c.block_k * pitch, channels - s * c.block_k)
        for at, (_, s) in zip(places, stages, strict=True)
        if not inside or s == fulls
    ]


@pytest.mark.parametrize("live", [True, False])
def test_every_stage_of_the_ring_is_multiplied_once_and_handed_back(monkeypatch, live):
    """A consumer thread in Python, whose tile's last taps, of a second chunk, are fewer; or without columns."""
    c = next(c for _, c in configs() if c.ring)
    chunks, fulls, base, full = 2, c.stages + 1, 1024, 4096
    waits, arrivals, products, stored = [], [], [], []

    def wait(*stage):
        waits.append(stage)
        assert len(waits) <= chunks * fulls, "it would wait forever"

    for name in ("barrier_sync", "mbarrier_init", "fence_mbarrier_init", "griddepcontrol_wait", "fence_async"):
        monkeypatch.setattr(k5_dmma_ring, name, lambda *_: None)
    array, at_zero = SimpleNamespace(array=lambda size, dtype: [None] * size), SimpleNamespace(x=0, y=0, z=0)
    cuda = SimpleNamespace(shared=array, local=array, syncthreads=lambda: None, threadIdx=at_zero, blockIdx=at_zero)
    cuda.gridDim = SimpleNamespace(y=1)
    parts = SimpleNamespace(
        window=1,
        weights=1,
        lane_of=lambda thread: SimpleNamespace(window=3, weights=5, column=0),
        tails_of=lambda lane, taps: "tails",
        multiply=lambda registers, stage, last: products.append((stage.window, stage.weights, last)),
        put=lambda shared, sums, weights, lane: stored.append(sums),
    )
    monkeypatch.setattr(k5_dmma_ring, "cuda", cuda)
    monkeypatch.setattr(k5_dmma_ring, "make_multiply", lambda config: parts)
    for name in ("make_fill_ring", "make_store", "setmaxnreg"):
        monkeypatch.setattr(k5_dmma_ring, name, lambda *_: lambda *_: None)
    monkeypatch.setattr(k5_dmma_ring, "shared_base", lambda shared: base)
    monkeypatch.setattr(k5_dmma_ring, "shared_address", lambda barriers, index: full)
    monkeypatch.setattr(k5_dmma_ring, "recomputed", lambda value: value)
    monkeypatch.setattr(k5_dmma_ring, "mbarrier_wait", wait)
    monkeypatch.setattr(k5_dmma_ring, "mbarrier_arrive", lambda bar: arrivals.append(bar))
    monkeypatch.setattr(k5_dmma_ring, "kernel_of", lambda name, function, *_: function)
    kernel = k5_dmma_ring.make_kernel.__wrapped__(replace(c, ragged=True))
    grid = SimpleNamespace(row_tiles=1, tap_chunks=chunks, channel_chunks=fulls, full_phases=1, columns=int(live))
    sizes = SimpleNamespace(in_per_group=1, batch=1)
    kernel(SimpleNamespace(stride_c=1), None, None, None, sizes, grid)

    turns = [(s % c.stages, s // c.stages % 2) for s in range(chunks * fulls)]
    assert waits == [(full + 8 * slot, parity) for slot, parity in turns]
    assert arrivals == [full + 8 * (c.stages + slot) for slot, _ in turns]
    places = [base + c.itemsize * c.stage * slot for slot, _ in turns]
    assert products == [
        (at + c.itemsize * 3, at + c.itemsize * (c.x_stage + 5), "tails" if s >= fulls else -1)
        for s, at in enumerate(places)
        if live
    ]
    assert [set(sums) for sums in stored] == [{0.0}]
