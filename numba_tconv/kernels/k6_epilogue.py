"""The storing half of k6: how a warpgroup's sums get from their registers to the staging buffer, and out."""

from __future__ import annotations

from numba import int32, int64

from ..ptx import barrier_sync, device_function, recomputed, take
from .k6_config import STORE_WARPS, Config
from .tensor_runs import keeps_runs, make_load_extra, make_prepare, make_store_runs
from .tensor_store import make_stage_rows, make_store_any


def make_epilogue(config: Config):
    """Store: four device functions, each of which writes all rows of a tile: those of tensor_runs.py by fours, by twos
    and by ones, and the one for tiles anywhere.

    The sums leave in rounds of ``staged_rows`` rows. They are taken out of their registers in slabs, since those have
    no run-time index (ptx.take); a slab is several rounds or a part of one.
    """
    tile, exact = config.tile, config.tile.parts == 2
    rows, sums = tile.rows, tile.rows // 2
    stage_rows, kept, sector = make_stage_rows(tile), keeps_runs(tile, STORE_WARPS), tile.sector
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
                        stage_rows(values, int32(0), slab, shared, base, staging, z * slab, alignment[2], warp, lane)
                        m = int32(m + slab)
                for z in range(rounds_a_slab):
                    stage_rows(values, int32(z * staged_rows), rows_at_once, shared, base, staging,
                               (slabs_a_round - 1) * slab, alignment[2], warp, lane)  # fmt: skip
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

    load_extra = make_load_extra(tile, STORE_WARPS, add_bias=True)
    by_quantum = (make_store_runs(tile, STORE_WARPS, quantum, prepare, load_extra) for quantum in (4, 2, 1))
    anywhere = make_store_any(tile, STORE_WARPS, add_bias=True)
    return *(make_rows(store, kept) for store in by_quantum), make_rows(anywhere, False)


def slab_of(config: Config) -> int:
    """Rows that are taken out of their registers at a time."""
    rows, staged_rows = config.tile.rows, config.tile.rows // config.tile.rounds
    return next(r for r in range(24, 0, -8) if rows % r == 0 and (r % staged_rows == 0 or staged_rows % r == 0))
