"""Store of float32 tiles without a stride: rounds of eight rows, a run each.

Straight-line code, because little hides its latency. A round takes two barriers, or one with two buffers."""

from typing import NamedTuple

from numba import boolean, cuda, int32, int64

from numba_tconv.ptx import barrier_sync, device_function, ld_shared_st_global_if, repeated

from .store_runs import make_run_of
from .tile import Tile

ROUND_ROWS = 8


WIDTHS = 4, 2, 1  # outputs of a copy


class Rounds(NamedTuple):
    sums: object
    lane_at: object
    y: object
    target: object  # index in y of the lane's first output, by row
    source: object  # its address in the first buffer
    wanted: object  # copies, by row and step
    width: int
    team: int
    rows_left: int
    further: int  # outputs from a round to the next


def make_store_rounds(tile: Tile, warps: int, stage, buffers: int, buffer_bytes: int):
    """Build the store of a tile in one sample by ``warps`` warps.

    ``stage(k, sums, lane_at, buffer)`` puts rows ``8 * k`` to ``8 * k + 7`` ``buffer`` bytes behind the first buffer,
    which is at ``at``. ``lane_at`` is ``stage``'s own."""
    rows, pitch, overlap, threads, warp_rows = tile.rows, tile.pitch, tile.overlap, 32 * warps, ROUND_ROWS // warps
    most_steps = _steps(tile, min(WIDTHS))
    pieces, run_of = warp_rows * most_steps, make_run_of(tile)
    by_fours, by_twos, by_ones = (_make_copies(tile, warps, width, most_steps) for width in WIDTHS)

    @device_function
    def store_round(k, rounds):
        buffer = int32(k % buffers * buffer_bytes)
        if buffers == 1 and k > 0:
            barrier_sync(rounds.team + 1, threads)
        stage(k, rounds.sums, rounds.lane_at, buffer)
        barrier_sync(rounds.team + 1, threads)
        if rounds.width == 4:
            by_fours(k, buffer, rounds)
        elif rounds.width == 2:
            by_twos(k, buffer, rounds)
        else:
            by_ones(k, buffer, rounds)
        for z in range(warp_rows):
            rounds.target[z] += rounds.further

    store_rounds = repeated(store_round, rows // ROUND_ROWS)

    @device_function
    def store(sums, lane_at, at, out, place, thread):
        # Eight rows are whole sectors: all rounds' runs lie alike.
        target, source = cuda.local.array(warp_rows, dtype=int64), cuda.local.array(warp_rows, dtype=int32)
        wanted, width = cuda.local.array(pieces, dtype=boolean), int32(out.alignment.quantum)
        for z in range(warp_rows):
            run = place.head + z * warps * out.length
            low, high, early = run_of(run, place.extent, out.alignment)
            first = int32(thread.lane * width - early)
            target[z] = run + first
            source[z] = int32(at + ((thread.warp + z * warps) * pitch + overlap + first) * 4)
            for h in range(most_steps):
                wanted[z * most_steps + h] = low <= first + h * 32 * width < high
        store_rounds(int32(0), Rounds(sums, lane_at, out.data, target, source, wanted, width, thread.team,
                                      int32(place.channels_left - thread.warp), ROUND_ROWS * out.length))  # fmt: skip

    return store


def _steps(tile: Tile, width: int) -> int:
    return -(-(tile.advance + tile.sector - 1) // (32 * width))


def _make_copies(tile: Tile, warps: int, width: int, most_steps: int):
    """Build a round's copies of ``width`` outputs."""
    copy, step, steps, warp_rows = ld_shared_st_global_if(width), 32 * width, _steps(tile, width), ROUND_ROWS // warps

    @device_function
    def copies(k, buffer, rounds):
        for z in range(warp_rows):
            exists = int32(k * ROUND_ROWS + z * warps) < rounds.rows_left
            for h in range(steps):
                at = int32(rounds.source[z] + buffer + h * step * 4)
                copy(rounds.wanted[z * most_steps + h] and exists, rounds.y, rounds.target[z] + h * step, at)

    return copies
