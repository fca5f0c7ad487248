"""From registers to y."""

from collections.abc import Callable
from typing import NamedTuple

from numba import float32, int32, int64, uint64

from numba_tconv.kernels.common.tensor_core.outputs import Place, Staging, Thread
from numba_tconv.kernels.common.tensor_core.store_any import make_aim, make_stage_rows, make_store_any
from numba_tconv.kernels.common.tensor_core.store_runs import (
    keeps_runs,
    make_load_biases,
    make_prepare,
    make_store_runs,
    runs_sizes,
)
from numba_tconv.kernels.k6_wgmma.tile import STORE_WARPS, Config
from numba_tconv.ptx import barrier_sync, device_function, mbarrier_arrive, mbarrier_wait, recomputed, take
from numba_tconv.runtime.elements import ELEMENTS

from .bulk import make_bulk_store
from .by_phases import make_phases_store
from .rows import make_store_rows


class Epilogue(NamedTuple):
    aim: Callable  # a tile's Place, and ``straight``
    store: Callable
    finish: Callable  # waits until shared memory has been read


def make_epilogue(config: Config) -> Epilogue:
    """Build the epilogue; make_bias_of gives ``bias``.

    Tiles of some phases leave from registers (by_phases.py), tiles in one sample by bulk.py, rows.py or store_runs.py,
    others by store_any.py."""
    if config.tile.by_phases:
        return _make_part(config)
    bulk, by_rows, by_turns = config.bulk_channels > 0, config.by_rows, not config.bulk_channels and config.buffers == 1
    aim, head_of = make_aim(config.tile, to_the_output=bulk)
    make_rows = _make_by_rounds(config)
    anywhere = make_rows(make_store_any(config.tile, STORE_WARPS, add_bias=True), False)
    if bulk:
        straight_on, finish_bulk = make_bulk_store(config)
    else:
        straight_on, finish_bulk = make_store_rows(config) if by_rows else _make_runs(config, make_rows), None

    @device_function
    def aim_tile(sample, column, row, channel, channels_left, out, thread):
        extent, straight = aim(int64(sample), column, out)
        head = head_of(int64(sample), channel, extent, out, thread.warp)
        return Place(sample, column, row, channel, channels_left, extent, head), straight

    @device_function
    def store_tile(sums, leaving, buffers, out, place, straight, bias, thread):
        if by_turns:
            mbarrier_wait(buffers.order + 8 * thread.team, buffers.parity)
        if straight:
            straight_on(sums, leaving, buffers, out, place, bias, thread)
        else:
            if bulk:
                finish_bulk(leaving, thread.team)
            if by_rows:
                barrier_sync(thread.team + 1, 128)  # the last tile's buffers have been read
            anywhere(sums, leaving, buffers, out, place, bias, thread)
        if by_turns:  # every lane arrives, for racecheck
            mbarrier_arrive(buffers.order + 8 * (1 - thread.team))

    @device_function
    def finish(leaving, team):
        if bulk:
            finish_bulk(leaving, team)

    return Epilogue(aim_tile, store_tile, finish)


def _make_part(config: Config) -> Epilogue:
    store = make_phases_store(config)

    @device_function
    def aim_tile(sample, column, row, channel, channels_left, out, thread):
        return Place(sample, column, row, channel, channels_left, None, None), True

    @device_function
    def store_tile(sums, leaving, buffers, out, place, straight, bias, thread):
        store(sums, out, place, bias, thread)

    @device_function
    def finish(leaving, team):
        pass

    return Epilogue(aim_tile, store_tile, finish)


def make_bias_of(config: Config):
    """Build the load of a thread's bias; ``number``: the thread's in its warpgroup."""
    load_type, part = ELEMENTS[config.tile.dtype].load, config.tile.by_phases
    staged = config.bulk_channels > 0 or config.by_rows

    @device_function
    def bias_of_part(out, channel, channels_left, number):
        return load_type(out.bias[uint64(channel)]) if out.has_bias else float32(0)

    if part:
        return bias_of_part

    @device_function
    def bias_of(out, channel, channels_left, number):
        exists = staged and out.has_bias and number < channels_left
        return load_type(out.bias[uint64(channel + number)]) if exists else float32(0)

    return bias_of


def _make_runs(config: Config, make_rows):
    tile = config.tile
    prepare, load_biases = make_prepare(tile, STORE_WARPS), make_load_biases(tile, STORE_WARPS, add_bias=True)
    stores = (make_store_runs(tile, STORE_WARPS, quantum, prepare, load_biases) for quantum in (4, 2, 1))
    by_fours, by_twos, by_ones = stores

    @device_function
    def store_round(runs, out, staging, place, thread):
        if out.alignment.quantum == 4:
            return by_fours(runs, out, staging, place, thread)
        if out.alignment.quantum == 2:
            return by_twos(runs, out, staging, place, thread)
        return by_ones(runs, out, staging, place, thread)

    return make_rows(store_round, keeps_runs(tile, STORE_WARPS))


def _make_by_rounds(config: Config):
    """Build a tile's store from a round's; a slab is several rounds or part of one."""
    tile, exact = config.tile, config.tile.operand_halves == 2
    rows, sums = tile.rows, tile.rows // 2
    stage_rows, sector = make_stage_rows(tile), tile.sector
    staged_channels, staged_rows, channels = tile.round_channels, rows // tile.rounds, tile.channels
    slab = slab_of(config)
    rounds_a_slab, slabs_a_round = max(1, slab // staged_rows), max(1, staged_rows // slab)
    rows_at_once = min(slab, staged_rows)
    in_slab = [4 * (r // 2) + r % 2 + b * sums + 2 * h for r in range(slab // 4) for b in (0, 1) for h in (0, 1)]
    take_slab, prepare = take(in_slab, slab // 2, rows // slab), make_prepare(tile, STORE_WARPS)

    def make_rows(store, may_keep):
        @device_function
        def store_rows(sums, leaving, buffers, out, place, bias, thread):
            sample, column, row, channel = place.sample, place.column, place.row, place.channel
            channels_left, extent, head = place.channels_left, place.extent, place.head
            staging = Staging(buffers.shared.words, buffers.shared.base, int32(buffers.at // 4))
            thread = Thread(thread.team, thread.warp, recomputed(thread.lane))
            values, runs, offset = sums.values, sums.runs, out.alignment.offset
            steady = False
            if may_keep:
                steady = channels_left >= channels and (int32(out.length) * staged_channels) & (sector - 1) == 0
                tile_place = Place(sample, column, row, channel, int64(channels_left), extent, head)
                prepare(runs, int32(0), out, staging, tile_place, thread)
            m = int32(0)
            while m < rows:
                for z in range(slabs_a_round):
                    take_slab(values, sums.total if exact else sums.acc, m // slab)
                    if z < slabs_a_round - 1:
                        stage_rows(values, int32(0), int32(slab), int32(z * slab), staging, offset, thread)
                        m = int32(m + slab)
                for z in range(rounds_a_slab):
                    stage_rows(values, int32(z * staged_rows), int32(rows_at_once), int32((slabs_a_round - 1) * slab),
                               staging, offset, thread)  # fmt: skip
                    done = int32(m // staged_rows * staged_channels)
                    if may_keep and not steady:
                        left = Place(sample, column, row, channel + done, channels_left - done, extent, head)
                        prepare(runs, int32(0), out, staging, left, thread)
                    barrier_sync(thread.team + 1, 128)
                    left = Place(sample, column, row, channel + done, channels_left - done, extent, head)
                    head = store(runs, out, staging, left, thread)
                    barrier_sync(thread.team + 1, 128)
                    m = int32(m + rows_at_once)

        return store_rows

    return make_rows


def slab_of(config: Config) -> int:
    """Rows taken from registers at a time, by ``take``: registers have no index."""
    rows, staged_rows = config.tile.rows, config.tile.rows // config.tile.rounds
    return next(r for r in range(24, 0, -8) if rows % r == 0 and (r % staged_rows == 0 or staged_rows % r == 0))


def runs_of(config: Config) -> tuple[int, int]:
    """Lengths of Sums.runs (store_runs.py)."""
    return (1, 1) if config.bulk_channels or config.by_rows else runs_sizes(config.tile, STORE_WARPS)
