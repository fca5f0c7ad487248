"""The store of float32 tiles without a stride: eight rows a round, each row one run.

Hardly anything hides a round, so the code is straight-line. A round takes one barrier with two buffers, else two.
"""

from __future__ import annotations

from numba import boolean, cuda, int32, int64

from numba_tconv.ptx import barrier_sync, device_function, ld_shared_st_global_if, repeated

from .store_runs import make_run_of
from .tile import Tile

ROUND_ROWS = 8  # rows of a tile that leave together


def make_store_rounds(tile: Tile, warps: int, stage, buffers: int, buffer_bytes: int):
    """A device function by which a team of ``warps`` warps writes a tile in one sample.

    ``stage``: device function (k, sums, places, buffer) that puts rows ``8 * k`` to ``8 * k + 7`` at ``buffer`` bytes
    behind the first buffer; ``places`` is its own. ``at``: address of the first buffer. ``head``: index in y of the
    tile's first own output, for channel ``warp``; ``left``: channels from the tile's first on.
    """
    of_width = (_make_store(tile, warps, stage, buffers, buffer_bytes, width) for width in (4, 2, 1))
    by_fours, by_twos, by_ones = of_width

    @device_function
    def store(sums, y, places, at, team, warp, lane, head, there, left, out_length, alignment):
        if alignment[1] == 4:
            by_fours(sums, y, places, at, team, warp, lane, head, there, left, out_length, alignment)
        elif alignment[1] == 2:
            by_twos(sums, y, places, at, team, warp, lane, head, there, left, out_length, alignment)
        else:
            by_ones(sums, y, places, at, team, warp, lane, head, there, left, out_length, alignment)

    return store


def _make_store(tile: Tile, warps: int, stage, buffers: int, buffer_bytes: int, width: int):
    """The same for runs that begin at multiples of ``width`` outputs, which a lane loads and writes at once."""
    rows, pitch, overlap, threads = tile.rows, tile.pitch, tile.overlap, 32 * warps
    own_rows = ROUND_ROWS // warps  # rows of a warp in a round
    step = 32 * width  # outputs that a warp writes at once
    steps = -(-(tile.advance + tile.sector - 1) // step)  # of a run
    pieces = own_rows * steps
    copy, run_of = ld_shared_st_global_if(width), make_run_of(tile)

    @device_function
    def store_round(k, state):
        sums, y, places, (target, source, wanted), team, left, further = state
        buffer = int32(k % buffers * buffer_bytes)
        if buffers == 1 and k > 0:
            barrier_sync(team + 1, threads)
        stage(k, sums, places, buffer)
        barrier_sync(team + 1, threads)
        for p in range(pieces):
            at = int32(source[p // steps] + buffer + p % steps * step * 4)
            exists = int32(k * ROUND_ROWS + p // steps * warps) < left
            copy(wanted[p] and exists, y, target[p // steps] + p % steps * step, at)
        for z in range(own_rows):
            target[z] += further

    store_rounds = repeated(store_round, rows // ROUND_ROWS)

    @device_function
    def store(sums, y, places, at, team, warp, lane, head, there, left, out_length, alignment):
        # Eight rows on, runs lie alike: eight rows are whole sectors.
        target, source = cuda.local.array(own_rows, dtype=int64), cuda.local.array(own_rows, dtype=int32)
        wanted = cuda.local.array(pieces, dtype=boolean)
        for z in range(own_rows):
            run = head + z * warps * out_length
            low, high, early = run_of(run, there, alignment)
            first = int32(lane * width - early)
            target[z] = run + first
            source[z] = int32(at + ((warp + z * warps) * pitch + overlap + first) * 4)
            for h in range(steps):
                wanted[z * steps + h] = low <= first + h * step < high
        ways = target, source, wanted
        store_rounds(int32(0), (sums, y, places, ways, team, int32(left - warp), ROUND_ROWS * out_length))

    return store
