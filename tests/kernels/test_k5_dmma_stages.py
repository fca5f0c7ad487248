"""The producers of k5_dmma's ring, as plain Python."""

import itertools
from types import SimpleNamespace

import pytest

from numba_tconv.kernels.k5_dmma import ring as k5_dmma_ring
from tests.kernels.test_k5_dmma import configs


@pytest.mark.parametrize("inside", [True, False])
def test_every_stage_of_the_ring_has_its_own_weights_and_channels(monkeypatch, inside):
    """A producer thread in Python, for two chunks of taps and a last stage of one channel."""
    c = next(c for _, c in configs() if c.ring and c.x_vector == 2)
    copies, elsewhere = [], []
    for name in ("barrier_sync", "mbarrier_wait", "mbarrier_await_copies", "mbarrier_arrive_expect_tx"):
        monkeypatch.setattr(k5_dmma_ring, name, lambda *arguments: None)
    monkeypatch.setattr(k5_dmma_ring, "device_function", lambda function: function)
    monkeypatch.setattr(k5_dmma_ring, "cuda", SimpleNamespace(threadIdx=SimpleNamespace(x=c.threads)))
    monkeypatch.setattr(k5_dmma_ring, "make_aim", lambda *arguments: lambda *arguments: None)
    monkeypatch.setattr(
        k5_dmma_ring, "make_load_window", lambda *arguments: lambda block, at, x, *of: elsewhere.append((at, *of))
    )
    monkeypatch.setattr(k5_dmma_ring, "cp_async_bulk", lambda *arguments: copies.append(arguments[:4]))
    fulls = c.stages + 1
    channels, columns, pitch = fulls * c.block_k + 1, 8 * c.copied, 16 * c.copied
    block = SimpleNamespace(base=1024, tile_offset=48, group_offset=96, first_column=4 * c.copied)
    grid = SimpleNamespace(tap_chunks=2, first_column=0, columns=columns)
    sizes = SimpleNamespace(batch=1, length=columns if inside else 0, in_per_group=channels)
    k5_dmma_ring.make_fill_ring(c)(block, 0, 0, SimpleNamespace(data="x", stride_n=0, stride_c=pitch), "w", sizes, grid)
    stages = list(itertools.product(range(2), range(fulls + 1)))
    places = [z % c.stages * c.stage for z in range(len(stages))]
    assert [copy for copy in copies if copy[1] == "w"] == [
        (block.base + (at + c.x_stage) * c.itemsize, "w", block.tile_offset + z * c.w_stage, c.w_stage * c.itemsize)
        for z, at in enumerate(places)
    ]
    windows = [
        (block.base + at * c.itemsize, "x", block.group_offset + s * c.block_k * pitch + first, c.copied * c.itemsize)
        for at, (chunk, s) in zip(places, stages, strict=True)
        for first in [block.first_column - c.halo - c.lead - chunk * c.chunk_shift]
        if inside and s < fulls
    ]
    assert [copy for copy in copies if copy[1] == "x"] == windows
    assert elsewhere == [
        (at, block.group_offset + s * c.block_k * pitch, channels - s * c.block_k)
        for at, (_, s) in zip(places, stages, strict=True)
        if not inside or s == fulls
    ]
