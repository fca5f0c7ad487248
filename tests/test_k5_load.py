"""The copies of k5 with resident weights on the CPU: every stage that a team's threads fetch, in plain Python, against
the definition of a window; and which problems keep their weights in shared memory."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from numba_tconv import workloads
from numba_tconv.kernels import k5_config, k5_load, k5_mma
from numba_tconv.kernels.device import A100, H200
from numba_tconv.problem import Problem
from tests.test_k6_bulk import same
from tests.test_tensor_store import cast_quickly

FEW = replace(H200, multiprocessors=2)
GRID = 2  # blocks along the columns
STAGES = 4096  # bytes of shared memory where they lie


@pytest.fixture
def copies(monkeypatch):
    """What the copies since it was last cleared have put where: of each word of shared memory the index in x, None for
    a zero."""
    found, state = {}, SimpleNamespace(words={}, groups=0)

    def put(address, word, index):
        assert address + 4 * word not in found, "no word twice"
        found[address + 4 * word] = index

    def cp_async_vector(address, source):
        assert address % 16 == source % 16 == 0
        for word in range(4):
            put(address, word, int(source) // 4 + word)

    def cp_async_to(size):
        def copy(address, x, g, used):
            assert size == 16
            assert address % 16 == g * x.itemsize % 16 == used % x.itemsize == 0
            for word in range(4):
                put(address, word, int(g) * x.itemsize // 4 + word if 4 * word < used else None)

        return copy

    def commit():
        state.groups += 1

    state.words = found
    monkeypatch.setattr(k5_load, "device_function", same)
    monkeypatch.setattr(k5_load, "cp_async_vector", cp_async_vector)
    monkeypatch.setattr(k5_load, "cp_async_to", cp_async_to)
    monkeypatch.setattr(k5_load, "global_address", lambda x, g: g * x.itemsize)
    monkeypatch.setattr(k5_load, "cp_async_commit", commit)
    cast_quickly(monkeypatch, k5_load)
    return state


def resident(p, precision):
    config = k5_config.choose(p, precision, FEW)
    assert config.resident_weights, p
    return config


# One tile a sample and many, samples that share a tile, channels that fill no stage, groups, phases, chunks of taps,
# windows that begin before the signal and end behind it; half as many words for elements of 16 bits.
CASES = [
    (Problem(2, 48, 24, 3, 5756), "tf32"),
    (Problem(1, 20, 16, 5, 4100, padding=2, dilation=3), "tf32"),
    (Problem(300, 9, 16, 3, 20, padding=1), "tf32"),
    (Problem(2, 16, 16, 3, 2052, groups=2), "tf32"),
    (Problem(2, 16, 8, 8, 2200, stride=4, padding=2), "tf32"),
    (Problem(2, 16, 16, 4, 4288, stride=2, dilation=3), "tf32"),  # of which the first column is before the signal
    (Problem(1, 8, 8, 61, 4096, padding=30), "tf32"),
    (Problem(2, 32, 24, 3, 4096), "bf16"),
    (Problem(120, 24, 16, 3, 40, padding=1), "bf16"),
]


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize(("p", "precision"), CASES, ids=str)
def test_every_stage_is_the_window_of_its_tile(copies, p, precision, place):
    config = resident(p, precision)
    tile, (first, columns) = config.tile, config.tile.columns(p)
    x = SimpleNamespace(itemsize=tile.itemsize)
    stride_c, stride_n = p.length, p.in_channels * p.length
    channels, tiles, team_threads = p.in_channels_per_group, tile.column_tiles(p), config.threads // config.teams
    signal, vector = (p.batch, p.length, columns, first), config.x_vector
    aim, load, next_stage = k5_load.make_load_ahead(config)
    stride = GRID * config.teams
    group, start = (0, 0) if place == "first" else (p.groups - 1, stride - 1)  # the block's and its team's tile
    steps = stride, *divmod(stride * tile.advance, columns), tile.tap_chunks(p), tiles
    rows = channels, group * channels * stride_c, stride_n, stride_c

    def of_thread(thread):
        copied = divmod(thread, config.row_lanes)
        n, j = divmod(start * tile.advance, columns)
        aimed = aim(x, n, j, 0, start < tiles, copied, signal, rows)
        to = STAGES + (copied[0] * config.pitch + copied[1] * vector) * tile.itemsize
        return [(start, n, j, 0, 0, *aimed), to, copied]

    threads = [of_thread(thread) for thread in range(team_threads)]
    along = 0
    for now in range(start, tiles, stride):
        for chunk in range(tile.tap_chunks(p)):
            for channel in range(0, channels, config.depth):
                copies.words.clear()
                for thread in threads:
                    ahead, to, copied = thread
                    assert ahead[:3] == (now, *divmod(now * tile.advance, columns))
                    assert ahead[3:5] == (chunk, channel)
                    along += channel <= ahead[6]
                    load(ahead, to, x, tiles, copied, signal, rows)
                    thread[0] = next_stage(ahead, x, steps, copied, signal, rows)
                begin = now * tile.advance - tile.overlap - tile.lead - chunk * tile.chunk_shift
                check(copies.words, p, config, group, channel, begin, first, columns)
    assert threads[0][0][0] >= tiles, "no tile is left out"
    assert (along > 0) == (p.length > 1000), "tiles within a sample go the short way"
    copies.words.clear()
    before = copies.groups
    load(threads[0][0], STAGES, x, tiles, threads[0][2], signal, rows)
    assert not copies.words, "behind the last tile nothing is copied"
    assert copies.groups == before + 1, "but a group there is"


def check(words, p, config, group, channel, begin, first, columns):
    """``begin``: column of all samples where the window begins."""
    tile, a_word = config.tile, 4 // config.tile.itemsize
    assert len(words) == config.depth * config.copies_a_row * 4
    for row in range(config.depth):
        for place in range(0, config.width, a_word):
            sample, j = divmod(begin + place, columns)
            i, c = first + j, group * p.in_channels_per_group + channel + row
            there = 0 <= sample < p.batch and 0 <= i < p.length and channel + row < p.in_channels_per_group
            index = ((sample * p.in_channels + c) * p.length + i) // a_word if there else None
            assert words[STAGES + (row * config.pitch + place) * tile.itemsize] == index, (row, place)


def test_weights_stay_where_they_fit_and_pay():
    """Beside eight warps; not for few tiles, where x is copied by elements, or where positions need 64 bits."""
    named = {name: workloads.get(name).problem for name in ("kb64", "kb74", "kb79", "hifigan_u1")}
    chosen = {name: k5_config.choose(p, "tf32") for name, p in named.items()}
    assert {name: config.teams for name, config in chosen.items()} == {"kb64": 4, "kb74": 4, "kb79": 4, "hifigan_u1": 1}
    for name in ("kb64", "kb74", "kb79"):
        p, row_tiles = named[name], chosen[name].tile.row_tiles(named[name])
        assert chosen[name].resident_weights * row_tiles == p.in_channels * p.out_channels * p.kernel_size * 4
        assert chosen[name].shared_bytes <= H200.shared_per_block
        assert chosen[name].tile_warps == 2, "few meet at a barrier"
    assert not chosen["hifigan_u1"].resident_weights
    assert not k5_config.choose(named["kb64"], "tf32", A100).resident_weights
    assert k5_config.choose(named["kb74"], "tf32", A100).resident_weights
    p = named["kb74"]
    assert not k5_config.choose(p, "tf32", aligned=False).resident_weights
    assert not k5_config.choose(replace(p, batch=1, length=8192), "tf32").resident_weights
    assert not k5_config.choose(replace(p, batch=1, length=2**31), "tf32").resident_weights
    assert k5_config.choose(replace(p, batch=1, length=2**29), "tf32").resident_weights


def test_a_block_loads_as_many_weights_as_are_packed():
    for p, precision in CASES:
        config = resident(p, precision)
        tile, chunks = config.tile, config.channel_chunks(p)
        packed = k5_mma.packing_of(p, tile, "mma", chunks, _weights(p, tile)).size * tile.itemsize
        assert packed == p.groups * tile.row_tiles(p) * config.resident_weights


def _weights(p, tile):
    from numba_tconv.layout import NO_GPU, Layout

    return Layout.contiguous((p.in_channels, p.out_channels_per_group, p.kernel_size), tile.dtype, NO_GPU)


def test_inputs_that_lie_otherwise_stream_their_weights():
    p = CASES[0][0]
    config = resident(p, "tf32")
    x = torch.empty((p.batch, p.in_channels, p.length + 1), device="meta")[:, :, 1:]
    found = k5_config.config_of(p, "tf32", FEW, tuple(x.shape), x.stride(), 4)
    assert config.x_vector == 4
    assert (found.x_vector, found.resident_weights) == (1, 0)
