"""Store of k6 for tiles without a stride whose rows leave by the warps' own stores, one run each.

Eight rows, a core matrix, are staged at a time, and each of the four warps writes two of them. A tile has as many of
these rounds as core matrices, and hardly anything hides what they cost. So they are straight-line code, and what stays
the same from round to round is worked out once. With two buffers, taken in turn, a round costs one barrier, else two.
"""

from __future__ import annotations

from numba import boolean, cuda, float32, int32, int64

from ..ptx import (
    barrier_sync,
    device_function,
    ld_shared,
    ld_shared_st_global_if,
    recomputed,
    repeated,
    st_shared,
    st_shared_f32,
)
from .fragments import column_of
from .k6_config import ROUND_ROWS, STORE_WARPS, Config
from .tensor_runs import make_run_of

OWN_ROWS = ROUND_ROWS // STORE_WARPS  # of a warp, in a round


def make_store_rows(config: Config):
    """A device function that writes the rows of a tile whose outputs lie in one sample.

    ``at``: bytes of shared memory where the warpgroup's buffers lie. ``extra``: the bias of the tile's channel
    ``32 * warp + lane``. ``head``: index in y of the tile's own first output, for channel ``warp``; ``left``: channels
    that there are from the tile's first one on.
    """
    by_fours, by_twos, by_ones = (_make_store(config, width) for width in (4, 2, 1))
    add_biases, exact = _make_add_biases(config), config.tile.parts == 2

    @device_function
    def store(sums, y, base, at, crew, warp, lane, head, there, left, out_length, alignment):
        if alignment[1] == 4:
            by_fours(sums, y, base, at, crew, warp, lane, head, there, left, out_length, alignment)
        elif alignment[1] == 2:
            by_twos(sums, y, base, at, crew, warp, lane, head, there, left, out_length, alignment)
        else:
            by_ones(sums, y, base, at, crew, warp, lane, head, there, left, out_length, alignment)

    @device_function
    def store_rows(acc, total, y, base, at, extra, has_bias, crew, warp, lane, head, there, left, out_length,
                   alignment):  # fmt: skip
        lane = recomputed(lane)
        barrier_sync(crew + 1, 128)  # the buffers of the tile before have been read
        if has_bias:
            add_biases(total if exact else acc, int32(base + at), extra, crew, warp, lane)
        store(total if exact else acc, y, base, at, crew, warp, lane, head, there, left, out_length, alignment)

    return store_rows


def _make_add_biases(config: Config):
    """A device function: each sum gets the bias of its row, by way of shared memory at ``at``."""
    rows, sums = config.tile.rows, config.tile.rows // 2
    load = ld_shared(1, float32)

    @device_function
    def add_matrix(k, state):
        acc, at, lane = state
        for z in range(2):
            bias = load(int32(at + (k * ROUND_ROWS + (lane & 3) * 2 + z) * 4))
            acc[4 * k + z] += bias
            acc[4 * k + z + 2] += bias
            acc[4 * k + z + sums] += bias
            acc[4 * k + z + sums + 2] += bias

    add_matrices = repeated(add_matrix, rows // ROUND_ROWS)

    @device_function
    def add_biases(acc, at, extra, crew, warp, lane):
        row = int32(warp * 32 + lane)
        if row < rows:
            st_shared_f32(int32(at + row * 4), extra)
        barrier_sync(crew + 1, 128)
        add_matrices(int32(0), (acc, at, lane))
        barrier_sync(crew + 1, 128)  # the sums are staged where the biases are

    return add_biases


def _make_store(config: Config, width: int):
    """For runs that begin at multiples of ``width`` outputs: a lane loads and writes as many at once."""
    tile = config.tile
    rows, sums, pitch, overlap, buffer_bytes = tile.rows, tile.rows // 2, tile.pitch, tile.overlap, config.round_bytes
    copy, buffers = ld_shared_st_global_if(width), config.round_buffers
    step = 32 * width  # outputs that a warp writes at once
    steps = -(-(tile.advance + tile.sector - 1) // step)  # of a run
    pieces = OWN_ROWS * steps
    column_of_lane, run_of = device_function(column_of), make_run_of(tile)

    @device_function
    def store_round(k, state):
        acc, y, (column, target, source, wanted), crew, left, further = state
        buffer = int32(k % buffers * buffer_bytes)
        if buffers == 1 and k > 0:
            barrier_sync(crew + 1, 128)
        for z in range(2):
            a = 4 * k + z
            st_shared(int32(column + buffer + z * pitch * 4), acc[a], acc[a + 2], acc[a + sums], acc[a + sums + 2])
        barrier_sync(crew + 1, 128)
        for p in range(pieces):
            at = int32(source[p // steps] + buffer + p % steps * step * 4)
            exists = int32(k * ROUND_ROWS + p // steps * STORE_WARPS) < left
            copy(wanted[p] and exists, y, target[p // steps] + p % steps * step, at)
        for z in range(OWN_ROWS):
            target[z] += further

    store_rounds = repeated(store_round, rows // ROUND_ROWS)

    @device_function
    def store(acc, y, base, at, crew, warp, lane, head, there, left, out_length, alignment):
        # Of the warp's first rows; the later ones begin as far from a sector, eight rows being a multiple of sectors.
        target, source = cuda.local.array(OWN_ROWS, dtype=int64), cuda.local.array(OWN_ROWS, dtype=int32)
        wanted = cuda.local.array(pieces, dtype=boolean)
        for z in range(OWN_ROWS):
            run = head + z * STORE_WARPS * out_length
            low, high, early = run_of(run, there, alignment)
            first = int32(lane * width - early)
            target[z] = run + first
            source[z] = int32(base + at + ((warp + z * STORE_WARPS) * pitch + overlap + first) * 4)
            for h in range(steps):
                wanted[z * steps + h] = low <= first + h * step < high
        column = int32(base + at + ((lane & 3) * 2 * pitch + column_of_lane(warp, lane, 0, 0)) * 4)
        ways = column, target, source, wanted
        store_rounds(int32(0), (acc, y, ways, crew, int32(left - warp), ROUND_ROWS * out_length))

    return store
