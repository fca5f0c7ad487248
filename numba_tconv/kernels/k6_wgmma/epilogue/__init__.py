"""The epilogue of k6: from a consumer warpgroup's registers to y."""

from __future__ import annotations

from numba import float32, int32, int64, uint64

from numba_tconv.kernels.common.tensor_core.store_any import make_aim, make_stage_rows, make_store_any
from numba_tconv.kernels.common.tensor_core.store_runs import (
    keeps_runs,
    make_load_extra,
    make_prepare,
    make_store_runs,
    runs_sizes,
)
from numba_tconv.kernels.k6_wgmma.tile import STORE_WARPS, Config
from numba_tconv.ptx import barrier_sync, device_function, mbarrier_arrive, mbarrier_wait, recomputed, take
from numba_tconv.runtime.elements import ELEMENTS

from .bulk import make_bulk_store
from .part import make_part_store
from .rows import make_store_rows


def make_epilogue(config: Config):
    """Build ``aim_tile`` (locates a tile's outputs during its last products), ``store_tile`` and ``finish`` (at the
    end).

    A part of the phases is written straight from registers (part.py). Other sums are taken in slabs (ptx.take), since
    registers have no run-time index. Tiles within one sample leave in bulk (bulk.py), in rows (rows.py) or in runs
    (kernels/common/tensor_core/store_runs.py); others by kernels/common/tensor_core/store_any.py.
    """
    if config.tile.part:
        return _make_part(config)
    bulk, by_rows, by_turns = config.bulk_channels > 0, config.by_rows, not config.bulk_channels and config.buffers == 1
    aim, head_of = make_aim(config.tile, to_the_output=bulk)
    make_rows = _make_rows(config)
    anywhere = make_rows(make_store_any(config.tile, STORE_WARPS, add_bias=True), False)
    store_bulk, finish_bulk = make_bulk_store(config) if bulk else (None, None)
    if bulk:
        straight_on = _make_bulk(config.tile, store_bulk)
    else:
        straight_on = _make_by_rows(config) if by_rows else _make_runs(config, make_rows)

    @device_function
    def aim_tile(warp, n, j, co, batch, columns, first, out_channels, out_length, padding, alignment):
        there, straight = aim(int64(n), j, batch, columns, first, out_length, padding, alignment)
        return there, straight, head_of(int64(n), there, warp, co, out_channels, out_length)

    @device_function
    def store_tile(acc, total, values, runs, held, goes, interval, y, shared, as_stored, base, at, extra_at, extra,
                   bias, has_bias, crew, warp, lane, aimed, n, j, row, co, left, batch, columns, first, out_channels,
                   out_length, padding, alignment, staging_turn, parity):  # fmt: skip
        """Write all rows of a tile.

        ``at``: offset of the staging buffer, in bytes. ``aimed``: from ``aim_tile``. ``staging_turn``, ``parity``:
        mbarriers of a shared buffer's turns. ``held``, ``goes``, ``interval``: see bulk.py.
        """
        there, straight, head = aimed
        if by_turns:
            mbarrier_wait(staging_turn + 8 * crew, parity)
        if straight:
            straight_on(acc, total, values, runs, held, goes, interval, head, y, shared, as_stored, base, at, extra_at,
                        extra, bias, has_bias, crew, warp, lane, n, j, there, row, co, left, batch, columns, first,
                        out_channels, out_length, padding, alignment)  # fmt: skip
        else:
            if bulk:
                finish_bulk(held, goes, y, crew)
            if by_rows:
                barrier_sync(crew + 1, 128)  # the last tile's buffers have been read
            anywhere(acc, total, values, runs, head, y, shared, base, int32(at // 4), bias, has_bias, crew, warp, lane,
                     n, j, there, row, co, left, batch, columns, first, out_channels, out_length, padding,
                     alignment)  # fmt: skip
        if by_turns:  # every lane arrives, for racecheck
            mbarrier_arrive(staging_turn + 8 * (1 - crew))

    @device_function
    def finish(held, goes, y, crew):
        if bulk:
            finish_bulk(held, goes, y, crew)

    return aim_tile, store_tile, finish


def _make_part(config: Config):
    """Build the functions of ``make_epilogue`` for a part of the phases."""
    store = make_part_store(config)

    @device_function
    def aim_tile(warp, n, j, co, batch, columns, first, out_channels, out_length, padding, alignment):
        return None

    @device_function
    def store_tile(acc, total, values, runs, held, goes, interval, y, shared, as_stored, base, at, extra_at, extra,
                   bias, has_bias, crew, warp, lane, aimed, n, j, row, co, left, batch, columns, first, out_channels,
                   out_length, padding, alignment, staging_turn, parity):  # fmt: skip
        store(acc, total, y, extra, warp, lane, n, j, row, co, batch, columns, first, out_channels, out_length, padding,
              alignment)  # fmt: skip

    @device_function
    def finish(held, goes, y, crew):
        pass

    return aim_tile, store_tile, finish


def make_extra_of(config: Config):
    """Build a device function that loads a bias during the products: of channel ``thread``, or of a part's channel."""
    load_type, part = ELEMENTS[config.tile.dtype].load, config.tile.part
    staged = config.bulk_channels > 0 or config.by_rows

    @device_function
    def extra_of_part(bias, has_bias, co, left, thread):
        return load_type(bias[uint64(co)]) if has_bias else float32(0)

    if part:
        return extra_of_part

    @device_function
    def extra_of(bias, has_bias, co, left, thread):
        return load_type(bias[uint64(co + thread)]) if staged and has_bias and thread < left else float32(0)

    return extra_of


def _make_bulk(tile, store):
    """Wrap the store of bulk.py in the common arguments."""

    @device_function
    def narrow(shared, as_stored):
        return as_stored

    @device_function
    def wide(shared, as_stored):
        return shared

    as_outputs = wide if tile.wide_outputs else narrow  # shared memory, as elements of y

    @device_function
    def store_in_bulk(acc, total, values, runs, held, goes, interval, head, y, shared, as_stored, base, at, extra_at,
                      extra, bias, has_bias, crew, warp, lane, n, j, there, row, co, left, batch, columns, first,
                      out_channels, out_length, padding, alignment):  # fmt: skip
        run = head - int64(warp) * out_length  # of the tile's first channel
        store(acc, total, held, goes, interval, y, base, as_outputs(shared, as_stored), at, extra_at, extra, crew, warp,
              lane, run, there, left, out_length, alignment)  # fmt: skip

    return store_in_bulk


def _make_by_rows(config: Config):
    """Wrap the store of rows.py in the common arguments."""
    store = make_store_rows(config)

    @device_function
    def store_rows(acc, total, values, runs, held, goes, interval, head, y, shared, as_stored, base, at, extra_at,
                   extra, bias, has_bias, crew, warp, lane, n, j, there, row, co, left, batch, columns, first,
                   out_channels, out_length, padding, alignment):  # fmt: skip
        store(acc, total, y, base, at, extra, has_bias, crew, warp, lane, head, there, left, out_length, alignment)

    return store_rows


def _make_runs(config: Config, make_rows):
    """Build one device function from the three stores of kernels/common/tensor_core/store_runs.py."""
    tile = config.tile
    prepare, kept = make_prepare(tile, STORE_WARPS), keeps_runs(tile, STORE_WARPS)
    load_extra = make_load_extra(tile, STORE_WARPS, add_bias=True)
    stores = (make_store_runs(tile, STORE_WARPS, quantum, prepare, load_extra) for quantum in (4, 2, 1))
    by_fours, by_twos, by_ones = (make_rows(store, kept) for store in stores)

    @device_function
    def store_in_runs(acc, total, values, runs, held, goes, interval, head, y, shared, as_stored, base, at, extra_at,
                      extra, bias, has_bias, crew, warp, lane, n, j, there, row, co, left, batch, columns, first,
                      out_channels, out_length, padding, alignment):  # fmt: skip
        at = int32(at // 4)
        if alignment[1] == 4:
            by_fours(acc, total, values, runs, head, y, shared, base, at, bias, has_bias, crew, warp, lane, n, j, there,
                     row, co, left, batch, columns, first, out_channels, out_length, padding, alignment)  # fmt: skip
        elif alignment[1] == 2:
            by_twos(acc, total, values, runs, head, y, shared, base, at, bias, has_bias, crew, warp, lane, n, j, there,
                    row, co, left, batch, columns, first, out_channels, out_length, padding, alignment)  # fmt: skip
        else:
            by_ones(acc, total, values, runs, head, y, shared, base, at, bias, has_bias, crew, warp, lane, n, j, there,
                    row, co, left, batch, columns, first, out_channels, out_length, padding, alignment)  # fmt: skip

    return store_in_runs


def _make_rows(config: Config):
    """Return a function that builds a tile's store from a round's store.

    It stages rounds of ``staged_rows`` and writes each. A slab is several rounds or a part of one.
    """
    tile, exact = config.tile, config.tile.parts == 2
    rows, sums = tile.rows, tile.rows // 2
    stage_rows, sector = make_stage_rows(tile), tile.sector
    staged_channels, staged_rows, channels = tile.round_channels, rows // tile.rounds, tile.channels
    slab = slab_of(config)
    rounds_a_slab, slabs_a_round = max(1, slab // staged_rows), max(1, staged_rows // slab)
    rows_at_once = min(slab, staged_rows)
    in_slab = [4 * (r // 2) + r % 2 + b * sums + 2 * h for r in range(slab // 4) for b in (0, 1) for h in (0, 1)]
    take_slab, prepare = take(in_slab, slab // 2, rows // slab), make_prepare(tile, STORE_WARPS)

    @device_function
    def take_values(values, sums_of_all, case):
        take_slab(values, sums_of_all, case)

    def make_rows(store, may_keep):
        @device_function
        def store_rows(acc, total, values, runs, head, y, shared, base, staging, bias, has_bias, crew, warp, lane, n, j,
                       there, row, co, left, batch, columns, first, out_channels, out_length, padding,
                       alignment):  # fmt: skip
            lane = recomputed(lane)
            steady = False
            if may_keep:
                steady = left >= channels and (int32(out_length) * staged_channels) & (sector - 1) == 0
                prepare(runs, int32(0), head, there, base, staging, warp, lane, int64(left), out_length, alignment)
            m = int32(0)  # row of the tile
            while m < rows:
                for z in range(slabs_a_round):
                    take_values(values, total if exact else acc, m // slab)
                    if z < slabs_a_round - 1:
                        stage_rows(values, int32(0), int32(slab), shared, base, staging, int32(z * slab), alignment[2],
                                   warp, lane)  # fmt: skip
                        m = int32(m + slab)
                for z in range(rounds_a_slab):
                    stage_rows(values, int32(z * staged_rows), int32(rows_at_once), shared, base, staging,
                               int32((slabs_a_round - 1) * slab), alignment[2], warp, lane)  # fmt: skip
                    done = int32(m // staged_rows * staged_channels)
                    if may_keep and not steady:
                        prepare(runs, int32(0), head, there, base, staging, warp, lane, int64(left - done), out_length,
                                alignment)  # fmt: skip
                    barrier_sync(crew + 1, 128)
                    head = store(head, runs, y, shared, base, staging, bias, has_bias, warp, lane, n, j, there, row,
                                 co + done, left - done, batch, columns, first, out_channels, out_length, padding,
                                 alignment)  # fmt: skip
                    barrier_sync(crew + 1, 128)
                    m = int32(m + rows_at_once)

        return store_rows

    return make_rows


def slab_of(config: Config) -> int:
    """Return the rows that are taken from registers at a time."""
    rows, staged_rows = config.tile.rows, config.tile.rows // config.tile.rounds
    return next(r for r in range(24, 0, -8) if rows % r == 0 and (r % staged_rows == 0 or staged_rows % r == 0))


def runs_of(config: Config) -> tuple[int, int]:
    """Return the lengths of the arrays of ``runs`` (kernels/common/tensor_core/store_runs.py)."""
    return (1, 1) if config.bulk_channels or config.by_rows else runs_sizes(config.tile, STORE_WARPS)
