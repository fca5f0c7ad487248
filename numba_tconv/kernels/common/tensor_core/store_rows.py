"""Store of float32 tiles without a stride: rounds of eight rows, a run each.

Straight-line code, because little hides its latency. A round takes two barriers, or one with two buffers."""

from typing import NamedTuple

from numba import boolean, cuda, int32, int64

from numba_tconv.ptx import barrier_sync, device_function, ld_shared_st_global_if, repeated

from .store_runs import make_run_of
from .tile import Tile

ROUND_ROWS = 8


class Rounds(NamedTuple):
    sums: object
    lane_at: object
    y: object
    target: object  # index in y of the lane's first output, by row
    source: object  # its address in the first buffer
    wanted: object
    team: int
    rows_left: int
    further: int  # outputs from a round to the next


def make_store_rounds(tile: Tile, warps: int, stage, buffers: int, buffer_bytes: int):
    """Build the store of a tile in one sample by ``warps`` warps.

    ``stage(k, sums, lane_at, buffer)`` puts rows ``8 * k`` to ``8 * k + 7`` ``buffer`` bytes behind the first buffer,
    which is at ``at``. ``lane_at`` is ``stage``'s own."""
    run_of = make_run_of(tile)
    of_width = (_make_store(tile, warps, stage, run_of, buffers, buffer_bytes, width) for width in (4, 2, 1))
    by_fours, by_twos, by_ones = of_width

    @device_function
    def store(sums, lane_at, at, out, place, thread):
        if out.alignment.quantum == 4:
            by_fours(sums, lane_at, at, out, place, thread)
        elif out.alignment.quantum == 2:
            by_twos(sums, lane_at, at, out, place, thread)
        else:
            by_ones(sums, lane_at, at, out, place, thread)

    return store


def _make_store(tile: Tile, warps: int, stage, run_of, buffers: int, buffer_bytes: int, width: int):
    """Build the store for runs at multiples of ``width`` outputs."""
    rows, pitch, overlap, threads = tile.rows, tile.pitch, tile.overlap, 32 * warps
    warp_rows = ROUND_ROWS // warps
    step = 32 * width
    steps = -(-(tile.advance + tile.sector - 1) // step)
    pieces = warp_rows * steps
    copy = ld_shared_st_global_if(width)

    @device_function
    def store_round(k, rounds):
        buffer = int32(k % buffers * buffer_bytes)
        if buffers == 1 and k > 0:
            barrier_sync(rounds.team + 1, threads)
        stage(k, rounds.sums, rounds.lane_at, buffer)
        barrier_sync(rounds.team + 1, threads)
        for p in range(pieces):
            at = int32(rounds.source[p // steps] + buffer + p % steps * step * 4)
            exists = int32(k * ROUND_ROWS + p // steps * warps) < rounds.rows_left
            copy(rounds.wanted[p] and exists, rounds.y, rounds.target[p // steps] + p % steps * step, at)
        for z in range(warp_rows):
            rounds.target[z] += rounds.further

    store_rounds = repeated(store_round, rows // ROUND_ROWS)

    @device_function
    def store(sums, lane_at, at, out, place, thread):
        # Eight rows are whole sectors: all rounds' runs lie alike.
        target, source = cuda.local.array(warp_rows, dtype=int64), cuda.local.array(warp_rows, dtype=int32)
        wanted = cuda.local.array(pieces, dtype=boolean)
        for z in range(warp_rows):
            run = place.head + z * warps * out.length
            low, high, early = run_of(run, place.extent, out.alignment)
            first = int32(thread.lane * width - early)
            target[z] = run + first
            source[z] = int32(at + ((thread.warp + z * warps) * pitch + overlap + first) * 4)
            for h in range(steps):
                wanted[z * steps + h] = low <= first + h * step < high
        store_rounds(int32(0), Rounds(sums, lane_at, out.data, target, source, wanted, thread.team,
                                      int32(place.channels_left - thread.warp), ROUND_ROWS * out.length))  # fmt: skip

    return store
