"""Staging of k6: sums into shared memory as they will lie in y, several in one store if possible.

A lane holds two neighbouring rows in four neighbouring columns. Contiguous in y are

* without a stride, the four columns of a row: stored by fours or twos;
* with an even stride, no dilation and taps in all phases, the two rows of a column: stored by twos.

Wider stores need all runs of the round at multiples of as many outputs. Else each sum is stored by itself."""

from __future__ import annotations

import torch
from numba import cuda, float32, int32, uint32

from numba_tconv.kernels.common.tensor_core.tile import Tile
from numba_tconv.kernels.k6_wgmma.tile import Config
from numba_tconv.ptx import (
    device_function,
    ld_shared,
    pack_bf16,
    pack_f16,
    repeated,
    st_shared,
    st_shared_b32,
    st_shared_f32,
    st_shared_halves,
    st_shared_v2_b32,
    st_shared_v2_f32,
)

BATCH = 8  # core matrices whose biases are loaded together, to hide latency


def rotation(lane, span):
    """The column that a lane writes first, against bank conflicts."""
    return 0 if span % 2 == 1 and span > 1 else lane & 3 if span <= 2 else lane >> 3 & 3


def rotation_of_pairs(lane, span):
    """``rotation`` for two outputs at a time; for span 1, the first column of a pair."""
    return lane & 2 if span == 1 else 0 if span // 2 % 2 == 1 and span > 2 else (lane >> 2 ^ lane >> 3) & 3


def pairs_phases(tile: Tile) -> bool:
    """Whether a lane's two rows are neighbouring outputs of one channel."""
    return tile.span % 2 == 0 and tile.span == tile.phases and tile.spread == 1


def make_stage(config: Config, matrices: int):
    """Build the staging of a round of ``matrices`` core matrices from ``first`` on.

    ``column``: address of the lane's first column in the first run. ``extra_at``: of the round's biases. ``pitch``:
    bytes from run to run. ``begin``: outputs from a multiple of 16 bytes to the first run."""
    tile = config.tile
    span, itemsize = tile.span, tile.out_dtype.itemsize
    (load_extras, *pieces), batch_rows = make_pieces(config), 2 * BATCH
    one, pair, four = (_in_batches(piece, load_extras, matrices) for piece in pieces)
    first_of, first_of_pairs = device_function(rotation), device_function(rotation_of_pairs)
    by_columns, by_phases = span == 1, pairs_phases(tile)
    step = span * itemsize

    @device_function
    def from_column(column, first):
        """Addresses of the lane's columns, cyclically from ``first``."""
        return (column + first * step, column + (first + 1 & 3) * step, column + (first + 2 & 3) * step,
                column + (first + 3 & 3) * step)  # fmt: skip

    @device_function
    def stage(first, acc, column, extra_at, lane, pitch, begin):
        misplaced = int32(begin | pitch // itemsize)
        extras = cuda.local.array(batch_rows, dtype=float32)
        where = extra_at, int32((lane & 3) * 2), first, pitch, extras
        if by_columns and misplaced & 3 == 0:
            four(first, (acc, (column, column, column, column), False, False, where))
        elif (by_columns or by_phases) and misplaced & 1 == 0:
            turn = int32(first_of_pairs(lane, span))
            pair(first, (acc, from_column(column, turn), turn & 1 == 1, turn & 2 == 2, where))
        else:
            turn = int32(first_of(lane, span))
            one(first, (acc, from_column(column, turn), turn & 1 == 1, turn & 2 == 2, where))

    return stage


def _in_batches(piece, load_extras, matrices: int):
    """Build (first core matrix, state): ``load_extras``, then ``piece``, batch by batch."""
    number = min(BATCH, matrices)
    load_all, put_all = repeated(load_extras, number), repeated(piece, number)

    @device_function
    def batch(k, state):
        load_all(k, state)
        put_all(k, state)

    if number == matrices:
        return batch
    others = _in_batches(piece, load_extras, matrices - number)

    @device_function
    def batches(k, state):
        batch(k, state)
        others(int32(k + number), state)

    return batches


def make_pieces(config: Config):
    """Build four device functions (core matrix, state): load the lane's two biases; store by ones, twos, fours.

    ``state``: sums; addresses of the lane's columns in writing order; whether the order begins with an odd column, with
    one of the second two; biases' address, lane's first row of eight, first core matrix, pitch, loaded biases."""
    tile = config.tile
    spread, phases, itemsize, sums = tile.spread, tile.phases, tile.out_dtype.itemsize, tile.rows // 2
    span = tile.span if tile.empty_slots else 1  # each column's outputs that no row reaches
    aligned_rows, halves, by_phases = 8 % phases == 0 or phases % 8 == 0, itemsize == 2, pairs_phases(tile)
    narrow = pack_f16 if tile.dtype == torch.float16 else pack_bf16
    load, same_channel = ld_shared(1, float32), phases % 2 == 0

    @device_function
    def row_of(k, r, where):
        """Byte offsets of row ``r`` of core matrix ``k``, and of its bias."""
        _, _, first, pitch, _ = where
        k = int32(k - first)
        if aligned_rows:  # the lane's share and the compile-time share
            channel, phase = int32(uint32(r) // uint32(phases)), int32(uint32(r) % uint32(phases))
            before = int32(8 * k // phases)
            return (int32(channel * pitch + (phase + 8 * k % phases) * (spread * itemsize) + before * pitch),
                    int32(channel * 4 + before * 4))  # fmt: skip
        channel = int32(uint32(8 * k + r) // uint32(phases))
        return int32(channel * pitch + (8 * k + r - channel * phases) * (spread * itemsize)), int32(channel * 4)

    @device_function
    def place_of(k, where):
        """Index of core matrix ``k``'s loaded biases."""
        return int32(uint32(k - where[2]) % uint32(BATCH)) * 2

    @device_function
    def load_extras(k, state):
        _, _, _, _, where = state
        extra_at, row, _, _, extras = where
        z = place_of(k, where)
        _, even_at = row_of(k, row, where)
        extras[z] = load(int32(extra_at + even_at))
        if not same_channel:
            _, odd_at = row_of(k, int32(row + 1), where)
            extras[z + 1] = load(int32(extra_at + odd_at))

    @device_function
    def staged(k, z, where):
        """Offset of the lane's row ``z`` of core matrix ``k``, and its bias."""
        _, row, _, _, extras = where
        at, _ = row_of(k, int32(row + z), where)
        return at, extras[place_of(k, where) + (0 if same_channel else z)]

    @device_function
    def rotated(acc, a, odd, far, i):
        """The ``i``-th to be written of a row's four sums, from ``a`` on."""
        z0, z1, z2, z3 = acc[a], acc[a + 2], acc[a + sums], acc[a + sums + 2]
        if i % 2 == 1:
            z0, z1, z2, z3 = z1, z2, z3, z0
        if i // 2 == 1:
            z0, z1, z2, z3 = z2, z3, z0, z1
        near, other = z1 if odd else z0, z3 if odd else z2
        return other if far else near

    @device_function
    def put_apart(low_at, high_at, low, high):
        if halves:
            st_shared_halves(low_at, high_at, narrow(low, high))
        else:
            st_shared_f32(low_at, low)
            st_shared_f32(high_at, high)

    @device_function
    def one(k, state):
        acc, columns, odd, far, where = state
        even_at, even_extra = staged(k, 0, where)
        odd_at, odd_extra = staged(k, 1, where)
        for i in range(4):
            even_sum = rotated(acc, 4 * k, odd, far, i) + even_extra
            odd_sum = rotated(acc, 4 * k + 1, odd, far, i) + odd_extra
            put_apart(int32(columns[i] + even_at), int32(columns[i] + odd_at), even_sum, odd_sum)
            for gap in range(itemsize, span * itemsize, itemsize):
                put_apart(int32(columns[i] + even_at + gap), int32(columns[i] + odd_at + gap), even_extra, odd_extra)

    @device_function
    def pair_of_phases(k, state):
        acc, columns, odd, far, where = state
        at, extra = staged(k, 0, where)
        for i in range(4):
            low, high = rotated(acc, 4 * k, odd, far, i) + extra, rotated(acc, 4 * k + 1, odd, far, i) + extra
            if halves:
                st_shared_b32(int32(columns[i] + at), narrow(low, high))
            else:
                st_shared_v2_f32(int32(columns[i] + at), low, high)

    @device_function
    def pair_of_columns(k, state):
        acc, columns, _, far, where = state
        for z in range(2):
            at, extra = staged(k, z, where)
            a, near_at, far_at = 4 * k + z, int32(columns[0] + at), int32(columns[2] + at)
            z0, z1, z2, z3 = acc[a] + extra, acc[a + 2] + extra, acc[a + sums] + extra, acc[a + sums + 2] + extra
            if halves:
                low, high = narrow(z0, z1), narrow(z2, z3)
                st_shared_b32(near_at, high if far else low)
                st_shared_b32(far_at, low if far else high)
            else:
                st_shared_v2_f32(near_at, z2 if far else z0, z3 if far else z1)
                st_shared_v2_f32(far_at, z0 if far else z2, z1 if far else z3)

    @device_function
    def four(k, state):
        acc, columns, _, _, where = state
        for z in range(2):
            at, extra = staged(k, z, where)
            a, at = 4 * k + z, int32(columns[0] + at)
            z0, z1, z2, z3 = acc[a] + extra, acc[a + 2] + extra, acc[a + sums] + extra, acc[a + sums + 2] + extra
            if halves:
                st_shared_v2_b32(at, narrow(z0, z1), narrow(z2, z3))
            else:
                st_shared(at, z0, z1, z2, z3)

    return load_extras, one, pair_of_phases if by_phases else pair_of_columns, four
