"""The storing half of k6: how a warpgroup's sums get from their registers to the staging buffer, and out."""

from __future__ import annotations

from numba import int32

from ..ptx import barrier_sync, device_function, recomputed, take
from .k6_config import Config
from .tensor_store import make_stage_rows, make_store


def make_epilogue(config: Config):
    """Store: four device functions: ``aim`` and ``aim_inside`` of tensor_store.py, and two that write a slab of rows.

    The sums leave in rounds of ``staged_rows`` rows. They are taken out of their registers in slabs, since those have
    no run-time index (ptx.take); a slab is several rounds or a part of one.
    """
    tile, exact = config.tile, config.tile.parts == 2
    rows, sums = tile.rows, tile.rows // 2
    aim, aim_inside, store_inside, store_any = make_store(tile, 4, add_bias=True)
    stage_rows = make_stage_rows(tile)
    staged_channels, staged_rows = tile.round_channels, rows // tile.rounds
    slab = slab_of(config)
    rounds_a_slab, slabs_a_round = max(1, slab // staged_rows), max(1, staged_rows // slab)
    rows_at_once = min(slab, staged_rows)
    in_slab = [4 * (r // 2) + r % 2 + b * sums + 2 * h for r in range(slab // 4) for b in (0, 1) for h in (0, 1)]
    take_slab = take(in_slab, slab // 2, rows // slab)

    def make_slab(store):
        @device_function
        def one_slab(m, acc, total, values, head, y, shared, base, staging, bias, has_bias, crew, warp, lane, n, j,
                     begin, n_next, begin_next, row, co, left, batch, columns, first, out_channels, out_length, padding,
                     alignment):  # fmt: skip
            """Stage the rows from ``m`` on, write the rounds that they complete. Returns the next row and ``head``."""
            lane = recomputed(lane)
            for z in range(slabs_a_round):
                if exact:
                    take_slab(values, total, m // slab)
                else:
                    take_slab(values, acc, m // slab)
                if z < slabs_a_round - 1:
                    stage_rows(values, 0, slab, shared, base, staging, z * slab, alignment[2], warp, lane)
                    m = int32(m + slab)
            for z in range(rounds_a_slab):
                stage_rows(values, z * staged_rows, rows_at_once, shared, base, staging, (slabs_a_round - 1) * slab,
                           alignment[2], warp, lane)  # fmt: skip
                barrier_sync(crew + 1, 128)
                done = int32(m // staged_rows * staged_channels)
                head = store(head, y, shared, base, staging, bias, has_bias, warp, lane, n, j, begin, n_next,
                             begin_next, row, co + done, left - done, batch, columns, first, out_channels, out_length,
                             padding, alignment)  # fmt: skip
                barrier_sync(crew + 1, 128)
                m = int32(m + rows_at_once)
            return m, head

        return one_slab

    return aim, aim_inside, make_slab(store_inside), make_slab(store_any)


def slab_of(config: Config) -> int:
    """Rows that are taken out of their registers at a time."""
    rows, staged_rows = config.tile.rows, config.tile.rows // config.tile.rounds
    return next(r for r in range(24, 0, -8) if rows % r == 0 and (r % staged_rows == 0 or staged_rows % r == 0))
