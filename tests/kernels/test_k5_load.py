"""k5's copies on the CPU: every stage, against the definition of a window; and where weights are resident."""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.k5_mma import choose as k5_choice
from numba_tconv.kernels.k5_mma import kernel as k5_mma
from numba_tconv.kernels.k5_mma import load_ahead as k5_load_ahead
from numba_tconv.kernels.k5_mma import producer as k5_load
from numba_tconv.kernels.k5_mma import resident as k5_resident
from numba_tconv.kernels.k5_mma.mainloop import NEXT
from numba_tconv.lab.measure import workloads
from numba_tconv.runtime.device import A100, H200
from tests.thorough import thorough

from .k6_wgmma.test_k6_bulk import same
from .test_tensor_store import cast_quickly

FEW = replace(H200, multiprocessors=2)
GRID = 2  # blocks along the columns
STAGES = 4096  # bytes of shared memory where they lie
MISSING = -1  # where nothing is copied to


class Rows:
    """x, whose elements are their indices plus one; the first is ``offset`` past a multiple of 16 bytes."""

    def __init__(self, itemsize, offset):
        self.itemsize, self.offset = itemsize, offset

    def __getitem__(self, index):
        return int(index) + 1

    def address(self, index):
        return (int(index) + self.offset) * self.itemsize


class Bits:
    """Shared memory as an array of 16-bit elements, addressed by ``put``."""

    def __init__(self, put):
        self.put = put

    def __setitem__(self, index, value):
        self.put(index * 2, value)


@pytest.fixture
def copies(monkeypatch):
    """Copies of ``x`` since the last clearing: shared position to index in x, None for a zero; and of weights."""
    state = SimpleNamespace(elements={}, weights=[], groups=0, x=None, table=defaultdict(int))
    state.thread = SimpleNamespace(x=0)

    def put(address, index):
        assert address not in state.elements, "no element twice"
        state.elements[address] = index

    def copy_whole(size):
        def copy(address, source):
            assert address % size == source % size == 0
            for e in range(size // state.x.itemsize):
                put(address + e * state.x.itemsize, int(source) // state.x.itemsize - state.x.offset + e)

        return copy

    def cp_async_to(size):
        def copy(address, x, g, used):
            if x is not state.x:
                state.weights.append((address, int(g), used))
                return
            assert address % size == used % x.itemsize == 0
            assert used == 0 or x.address(g) % size == 0
            for e in range(size // x.itemsize):
                put(address + e * x.itemsize, int(g) + e if e * x.itemsize < used else None)

        return copy

    def st_shared_u16(address, value):
        put(address, value - 1 if value else None)

    def commit():
        state.groups += 1

    state.bits = Bits(st_shared_u16)

    meanings = dict(
        device_function=same,
        recomputed=same,
        cp_async_vector=copy_whole(16),
        cp_async_word=copy_whole(4),
        cp_async_to=cp_async_to,
        cp_async_commit=commit,
        st_shared_u16=st_shared_u16,
        global_address=lambda x, g: x.address(g),
        ld_shared=lambda count, kind: lambda address: [state.table[address // 4 + z] for z in range(count)],
        cuda=SimpleNamespace(local=SimpleNamespace(array=lambda n, dtype: [0] * n), threadIdx=state.thread),
    )
    for module in (k5_load, k5_load_ahead):
        for name, meaning in meanings.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, meaning)
    cast_quickly(monkeypatch, k5_load, k5_load_ahead)
    return state


def resident(p, precision, aligned=True):
    config = k5_choice.choose(p, precision, FEW, aligned)
    assert config.resident_weights, p
    assert config.x_vector * config.tile.itemsize == (16 if aligned else 4)
    return config


def signal_of(p, x, config, group):
    """x (N, C_in, L) as a block of a group reads it."""
    first, columns = config.tile.columns(p)
    return k5_load.GroupInput(
        data=x,
        batch=p.batch,
        length=p.length,
        columns=columns,
        first_column=first,
        channels=p.in_channels_per_group,
        first_row=group * p.in_channels_per_group * p.length,
        stride_n=p.in_channels * p.length,
        stride_c=p.length,
    )


# One tile a sample and many, samples that share a tile, channels that fill no stage, groups, phases, chunks of taps,
# windows beyond both ends of the signal; 16 bits.
CASES = [
    (Problem(2, 48, 24, 3, 5756), "tf32"),
    (Problem(1, 20, 16, 5, 4100, padding=2, dilation=3), "tf32"),
    (Problem(300, 9, 16, 3, 20, padding=1), "tf32"),
    (Problem(2, 16, 16, 3, 2052, groups=2), "tf32"),
    (Problem(2, 16, 8, 8, 2200, stride=4, padding=2), "tf32"),
    (Problem(2, 16, 16, 4, 4288, stride=2, dilation=3), "tf32"),  # the first column is before the signal
    (Problem(1, 8, 8, 61, 4096, padding=30), "tf32"),
    (Problem(2, 32, 24, 3, 4096), "bf16"),
    (Problem(120, 24, 16, 3, 40, padding=1), "bf16"),
]


# Rows at 8 and 4 bytes, or x itself; in 16 bits all, none or every second row within a word, or those of every second
# sample or group; samples shorter than a window.
ANYWHERE = [
    (Problem(2, 48, 24, 3, 5758), "tf32", 0),
    (Problem(1, 20, 16, 5, 4099, padding=2, dilation=3), "tf32", 0),
    (Problem(300, 9, 16, 3, 19, padding=1), "tf32", 3),
    (Problem(2, 16, 8, 8, 2201, stride=4, padding=2), "tf32", 1),
    (Problem(1, 8, 8, 61, 4093, padding=30), "tf32", 0),
    (Problem(2, 32, 24, 3, 4098), "bf16", 0),
    (Problem(2, 32, 24, 3, 4098), "bf16", 1),
    (Problem(2, 32, 24, 3, 4095), "bf16", 0),
    (Problem(3, 37, 24, 3, 2047), "bf16", 1),
    (Problem(2, 74, 16, 3, 2047, groups=2), "bf16", 0),
    (Problem(2, 74, 16, 3, 2049, groups=2, stride=2), "bf16", 1),
    (Problem(121, 25, 16, 3, 39, padding=1), "bf16", 0),
    (Problem(3, 17, 8, 149, 1501, padding=74), "bf16", 0),
]
EVERY_WAY = [(*case, 0, True) for case in CASES] + [(*case, False) for case in ANYWHERE]


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize(("p", "precision", "offset", "aligned"), thorough(EVERY_WAY, always=EVERY_WAY[::2]), ids=str)
def test_every_stage_is_the_window_of_its_tile(copies, p, precision, offset, aligned, place):
    config = resident(p, precision, aligned)
    tile, (first, columns) = config.tile, config.tile.columns(p)
    x = copies.x = Rows(tile.itemsize, offset)
    channels, tiles, team_threads = p.in_channels_per_group, tile.column_tiles(p), config.threads // config.teams
    vector = config.x_vector
    aim, load, next_stage = k5_load_ahead.make_load_ahead(config)
    selectors_of = k5_load.make_selectors_of(config)
    stride = GRID * config.teams
    group, start = (0, 0) if place == "first" else (p.groups - 1, stride - 1)  # the block's and its team's tile
    schedule = k5_load_ahead.Schedule(stride, *divmod(stride * tile.advance, columns), tile.tap_chunks(p), tiles)
    signal = signal_of(p, x, config, group)

    def of_thread(thread):
        share = k5_load.Share(*divmod(thread, config.row_lanes))
        n, j = divmod(start * tile.advance, columns)
        source = aim(n, j, 0, start < tiles, share, signal)
        to = STAGES + (share.row * config.pitch + share.first_copy * vector) * tile.itemsize
        return [k5_load_ahead.Ahead(start, n, j, 0, 0, *source), to, share]

    threads = [of_thread(thread) for thread in range(team_threads)]
    along = 0
    for now in range(start, tiles, stride):
        for chunk in range(tile.tap_chunks(p)):
            for channel in range(0, channels, config.depth):
                copies.elements.clear()
                for thread in threads:
                    ahead, to, share = thread
                    assert (ahead.tile, ahead.sample, ahead.column) == (now, *divmod(now * tile.advance, columns))
                    assert (ahead.chunk, ahead.channel) == (chunk, channel)
                    along += channel <= ahead.last_channel
                    load(ahead, to, tiles, share, signal)
                    thread[0] = next_stage(ahead, schedule, share, signal)
                begin = now * tile.advance - tile.overlap - tile.lead - chunk * tile.chunk_shift
                turned = [selector == NEXT for selector in selectors_of(now * tile.advance // columns, signal)]
                check(copies.elements, turned, p, config, group, channel, begin, first, columns)
    assert threads[0][0].tile >= tiles, "no tile is left out"
    assert (along > 0) == (p.length > 1000), "tiles within a sample go the short way"
    copies.elements.clear()
    before = copies.groups
    load(threads[0][0], STAGES, tiles, threads[0][2], signal)
    assert not copies.elements, "behind the last tile nothing is copied"
    assert copies.groups == before + 1, "but a group there is"


@pytest.mark.parametrize("samples", [1, 8])
def test_every_tile_of_resident_weights_is_stored_where_it_begins(monkeypatch, samples):
    """Also tiles that begin with a sample."""
    config, thread = resident(*CASES[0]), SimpleNamespace(lane=0, team=0, warp=0, warp_row=0, first_column=0)
    block, stored, advance = SimpleNamespace(x=0, y=0), [], config.tile.advance

    def nothing(*_):
        return None

    arrays = SimpleNamespace(array=lambda count, dtype: [0] * count)
    for name, meaning in dict(
        device_function=same,
        recomputed=same,
        cp_async_wait=lambda groups: nothing,
        barrier_sync=nothing,
        griddepcontrol_wait=nothing,
        shared_address=lambda *_: 0,
        cuda=SimpleNamespace(
            **dict(shared=arrays, local=arrays, syncthreads=nothing),
            **dict(threadIdx=SimpleNamespace(x=0), blockIdx=block, gridDim=SimpleNamespace(y=GRID)),
        ),
        make_thread_of=lambda config: lambda number: thread,
        make_selectors_of=lambda config: nothing,
        make_load_ahead=lambda config: (
            lambda *_: SimpleNamespace(address=0, last_channel=0),
            nothing,
            lambda ahead, *_: ahead,
        ),
        make_window=lambda config: nothing,
        make_products=lambda config: nothing,
        make_start=lambda config: (nothing, nothing),
        make_store_tile=lambda config: (lambda *given: stored.append(given[5][:2]), False),
        make_clear=nothing,
        _make_load_weights=lambda config: nothing,
        output_of=nothing,
    ).items():
        monkeypatch.setattr(k5_resident, name, meaning)
    cast_quickly(monkeypatch, k5_resident)
    tiles, columns = 40, 40 // samples * advance
    one = dict(length=columns, in_per_group=8, out_per_group=8, groups=1)
    sizes = SimpleNamespace(batch=samples, columns=columns, first_column=0, **one)
    x, weights = SimpleNamespace(data=None, stride_n=0, stride_c=0), SimpleNamespace(packed=None)
    loop = SimpleNamespace(tap_chunks=1, stages_a_chunk=1, group_tiles=1)
    kernel = k5_resident.make_kernel.__wrapped__(config).function
    for block.y in range(GRID):
        for thread.team in range(config.teams):
            kernel(x, weights, None, sizes, loop, tiles, None)
    assert sorted(stored) == [divmod(number * advance, columns) for number in range(tiles)]


# Several tiles a block, tails of channels, chunks of taps (in 16 bits also an odd number of columns apart), strides.
STREAMED = [
    (Problem(2, 44, 24, 3, 600), "tf32", 0, True),
    (Problem(2, 44, 24, 3, 601, padding=1), "tf32", 1, False),
    (Problem(9, 16, 24, 3, 21, padding=1), "tf32", 0, False),
    (Problem(2, 16, 64, 61, 330, padding=30), "tf32", 0, False),
    (Problem(2, 48, 32, 8, 304, stride=4, padding=2), "bf16", 0, True),
    (Problem(2, 48, 32, 8, 301, stride=4, padding=2), "bf16", 0, False),
    (Problem(3, 35, 24, 3, 302, padding=1), "bf16", 1, False),
    (Problem(2, 130, 48, 3, 603, groups=2), "bf16", 0, False),
    (Problem(2, 33, 64, 61, 401, padding=30), "bf16", 0, False),
    (Problem(2, 16, 16, 65, 301, padding=60, dilation=3), "bf16", 0, False),
    (Problem(9, 17, 24, 3, 21, padding=1), "bf16", 1, False),
]


@pytest.mark.parametrize(
    ("p", "precision", "offset", "aligned"), thorough(STREAMED, always=STREAMED[:3] + STREAMED[5:7]), ids=str
)
def test_every_stage_beside_streamed_weights(copies, p, precision, offset, aligned):
    config = k5_choice.choose(p, precision, H200, aligned)
    assert not config.resident_weights
    tile, (first, columns) = config.tile, config.tile.columns(p)
    x = copies.x = Rows(tile.itemsize, offset)
    w, w_first = Rows(tile.itemsize, 0), 1 << 20
    weights = STAGES + config.x_stage
    w_copies = [(weights + z, w_first + z // tile.itemsize, 16) for z in range(0, config.w_stage, 16)]
    tiles = tile.column_tiles(p)
    aim, load = k5_load.make_load(config)
    selectors_of = k5_load.make_selectors_of(config)
    shared = k5_load.Shared(0, copies.table, copies.bits, [0] * k5_load.BATCH)
    in_steps = 0
    for group in range(p.groups):
        signal = signal_of(p, x, config, group)
        for column_tile in range(0, tiles, config.tiles):
            selectors = selectors_of(column_tile * tile.advance // columns, signal)
            for chunk in range(tile.tap_chunks(p)):
                sources = []
                for copies.thread.x in range(config.threads):
                    sources.append(aim(copies.table, column_tile, chunk, 1, signal))
                for channel in range(0, p.in_channels_per_group, config.depth):
                    copies.elements.clear()
                    copies.weights.clear()
                    for copies.thread.x in range(config.threads):
                        source = sources[copies.thread.x]
                        in_steps += channel <= source.last_channel
                        load(shared, STAGES, channel, signal, source, selectors, w, w_first)
                    assert sorted(copies.weights) == w_copies
                    begin = column_tile * tile.advance - tile.overlap - tile.lead - chunk * tile.chunk_shift
                    turned = [selector == NEXT for selector in selectors]
                    check(copies.elements, turned, p, config, group, channel, begin, first, columns)
    fits = p.length > config.width and tile.chunk_shift % config.x_vector == 0
    assert (in_steps > 0) == config.in_steps == fits, "windows within a sample are not listed"
    for column_tile in range(tiles):
        places = []
        for stride_l in (1, 2):
            for copies.thread.x in range(config.threads):
                source = aim(copies.table, column_tile, 0, stride_l, signal)
                assert stride_l == 1 or source.last_channel == -1, "but where elements of a row lie apart"
            words = range(config.table // 4, config.table // 4 + 4 * config.table_entries)
            assert all(word in words for word in copies.table), "nothing beside the table"
            places.append([copies.table[entry] for entry in words[::4]])
        twice = [place + place % signal.stride_n for place in places[0]]
        assert places[1] == twice, "twice as far from the sample's first"


def check(elements, turned, p, config, group, channel, begin, first, columns):
    """``begin``: the window's first column; ``turned``: even and odd channels' columns differ by an element.

    What fills a word beside the window belongs to the same signal.
    """
    tile, elements = config.tile, dict(elements)
    assert turned == [False, False] or config.shifted
    for row in range(config.depth):
        at, c = STAGES + row * config.pitch * tile.itemsize, group * p.in_channels_per_group + channel + row
        copied = [elements.pop(at + e * tile.itemsize, MISSING) for e in range(config.copies_a_row * config.x_vector)]
        window = copied[turned[row % 2] :][: config.width]
        for place, index in enumerate(window):
            sample, j = divmod(begin + place, columns)
            i = first + j
            there = 0 <= sample < p.batch and 0 <= i < p.length and channel + row < p.in_channels_per_group
            assert index == ((sample * p.in_channels + c) * p.length + i if there else None), (row, place)
        beside = set(copied) - set(window) - {MISSING}
        assert {index // p.length for index in beside} <= {index // p.length for index in window if index is not None}
    assert not elements, "nothing beyond"


def test_weights_stay_where_they_fit_and_pay():
    """Beside eight warps; not for few tiles, copies by elements, or 64-bit positions."""
    named = {name: workloads.get(name).problem for name in ("kb64", "kb74", "kb79", "hifigan_u1")}
    chosen = {name: k5_choice.choose(p, "tf32") for name, p in named.items()}
    assert {name: config.teams for name, config in chosen.items()} == {"kb64": 4, "kb74": 4, "kb79": 4, "hifigan_u1": 1}
    for name in ("kb64", "kb74", "kb79"):
        p, row_tiles = named[name], chosen[name].tile.row_tiles(named[name])
        assert chosen[name].resident_weights * row_tiles == p.in_channels * p.out_channels * p.kernel_size * 4
        assert chosen[name].shared_bytes <= H200.shared_per_block
        assert chosen[name].tile_warps == 2, "few meet at a barrier"
    assert not chosen["hifigan_u1"].resident_weights
    assert not k5_choice.choose(named["kb64"], "tf32", A100).resident_weights
    assert k5_choice.choose(named["kb74"], "tf32", A100).resident_weights
    p = named["kb74"]
    assert k5_choice.choose(p, "tf32", aligned=False).resident_weights
    assert not k5_choice.choose(p, "tf32", aligned=False, contiguous=False).resident_weights
    assert not k5_choice.choose(replace(p, batch=1, length=8192), "tf32").resident_weights
    assert not k5_choice.choose(replace(p, batch=1, length=2**31), "tf32").resident_weights
    assert k5_choice.choose(replace(p, batch=1, length=2**29), "tf32").resident_weights


def test_windows_of_chunks_an_odd_number_of_columns_apart():
    """16-bit elements within a word are listed, beside streamed weights."""
    p = Problem(2, 16, 16, 9, 8192, dilation=3)
    configs = {precision: k5_choice.choose(p, precision, FEW, aligned=False) for precision in ("tf32", "bf16")}
    assert all(config.tile.chunk_shift % 2 for config in configs.values())
    assert {precision: config.resident_weights > 0 for precision, config in configs.items()} == dict(tf32=1, bf16=0)
    assert {precision: config.in_steps for precision, config in configs.items()} == dict(tf32=True, bf16=False)


def test_a_block_loads_as_many_weights_as_are_packed():
    for p, precision in CASES:
        config = resident(p, precision)
        tile, chunks = config.tile, config.channel_chunks(p)
        packed = k5_mma.packing_of(p, tile, "mma", chunks, _weights(p, tile)).size * tile.itemsize
        assert packed == p.groups * tile.row_tiles(p) * config.resident_weights


def _weights(p, tile):
    from numba_tconv.runtime.layout import NO_GPU, Layout

    return Layout.contiguous(p.weight_shape, tile.dtype, NO_GPU)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_how_rows_of_an_input_are_copied(precision):
    """In vectors or words; separate elements only beside streamed weights."""
    p = Problem(2, 32, 24, 3, 4096)
    vector = 16 // resident(p, precision).tile.itemsize

    def copied(x, offset=0):
        config = k5_choice.config_of(p, precision, FEW, tuple(x.shape), x.stride(), offset)
        return config.x_vector, config.resident_weights > 0

    rows = p.in_shape[:2]
    assert copied(torch.empty(p.in_shape, device="meta")) == (vector, True)
    assert copied(torch.empty((*rows, p.length + 1), device="meta")[:, :, 1:], 4) == (vector // 4, True)
    assert copied(torch.empty((*rows, 2 * p.length), device="meta")[:, :, ::2]) == (vector // 4, False)
