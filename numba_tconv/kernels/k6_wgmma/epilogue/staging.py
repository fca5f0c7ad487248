"""Staging of k6: a tile's sums into shared memory, as they will lie in y, several of a lane's together where that is
possible.

A lane's sums are those of two neighbouring rows in four neighbouring columns (kernels/common/tensor_core/fragments.py).
Side by side in y lie

* without a stride, the four columns of a row: four outputs are written together, or twice two;
* with an even stride and no dilation, if all phases have taps, the two rows of a column: phases of one channel.

They are written together if every run of the round begins at a multiple of as many outputs: where a run begins depends
on y, since it stands as far from a multiple of 16 bytes as it will there (bulk.py). If not even by twos, every sum
is written by itself. That takes two or four times as many instructions, and in 16 bits each has half of a bank's word.

Biases are loaded for several core matrices together. Loaded where each is added, behind the stores of the row before,
they were waited for in every row: almost half of the samples of the staging (profiles of kb64 and kb74 in bfloat16; no
rows).
"""

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

BATCH = 8  # core matrices whose biases are loaded together


def rotation(lane, span):
    """Which of its four columns a lane writes first, one output at a time, so that a warp's writes are spread over the
    banks; kernels call it too."""
    return 0 if span % 2 == 1 and span > 1 else lane & 3 if span <= 2 else lane >> 3 & 3


def rotation_of_pairs(lane, span):
    """The same for two outputs at a time: for an even span the first column, for a span of 1 that of the first two."""
    return lane & 2 if span == 1 else 0 if span // 2 % 2 == 1 and span > 2 else (lane >> 2 ^ lane >> 3) & 3


def pairs_phases(tile: Tile) -> bool:
    """Whether the two rows of a lane are neighbouring outputs of one channel."""
    return tile.span % 2 == 0 and tile.span == tile.phases and tile.spread == 1


def make_stage(config: Config, matrices: int):
    """A device function that puts the sums of ``matrices`` core matrices, a round, into the staging buffer.

    ``first``: number of the first of them; ``column``: where the lane's first column stands in the run of the round's
    first row; ``extra_at``: where the biases of the round's channels do; ``pitch``: from one channel's run to the next
    (bytes all); ``begin``: outputs by which the first run begins after a multiple of 16 bytes.
    """
    tile = config.tile
    span, itemsize = tile.span, tile.out_dtype.itemsize
    (load_extras, *pieces), batch_rows = make_pieces(config), 2 * BATCH
    one, pair, four = (_in_batches(piece, load_extras, matrices) for piece in pieces)
    first_of, first_of_pairs = device_function(rotation), device_function(rotation_of_pairs)
    by_columns, by_phases = span == 1, pairs_phases(tile)
    step = span * itemsize

    @device_function
    def from_column(column, first):
        """The lane's columns, from its ``first`` one on, and around."""
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
    """A device function (number of the first core matrix, state) that calls ``piece`` for each of ``matrices``, and
    ``load_extras`` for as many as a batch has before."""
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
    """Four device functions (core matrix, state): one that loads the biases of the lane's two rows, and three that
    write its sums of them: one by one, by twos and by fours.

    ``state``: the sums; where the lane's columns stand, in the order in which they are written; whether that begins
    with an odd one, and with one of the second two; and what all matrices share: where the biases are, the lane's first
    row of eight, the round's first core matrix, the pitch of the runs, and the biases that have been loaded.
    """
    tile = config.tile
    spread, phases, itemsize, sums = tile.spread, tile.phases, tile.out_dtype.itemsize, tile.rows // 2
    span = tile.span if tile.empty_slots else 1  # then outputs that no row reaches stand behind each column's one
    aligned_rows, halves, by_phases = 8 % phases == 0 or phases % 8 == 0, itemsize == 2, pairs_phases(tile)
    narrow = pack_f16 if tile.dtype == torch.float16 else pack_bf16
    load, same_channel = ld_shared(1, float32), phases % 2 == 0

    @device_function
    def row_of(k, r, where):
        """Bytes from the buffer's start to row ``r`` of core matrix ``k``, and to its bias from the first one."""
        _, _, first, pitch, _ = where
        k = int32(k - first)
        if aligned_rows:  # what depends on the lane, and what is known when the code is compiled
            channel, phase = int32(uint32(r) // uint32(phases)), int32(uint32(r) % uint32(phases))
            before = int32(8 * k // phases)
            return (int32(channel * pitch + (phase + 8 * k % phases) * (spread * itemsize) + before * pitch),
                    int32(channel * 4 + before * 4))  # fmt: skip
        channel = int32(uint32(8 * k + r) // uint32(phases))
        return int32(channel * pitch + (8 * k + r - channel * phases) * (spread * itemsize)), int32(channel * 4)

    @device_function
    def place_of(k, where):
        """Where the biases of core matrix ``k`` are, of those that have been loaded."""
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
        """Where the lane's row ``z`` of core matrix ``k`` stands, and its bias."""
        _, row, _, _, extras = where
        at, _ = row_of(k, int32(row + z), where)
        return at, extras[place_of(k, where) + (0 if same_channel else z)]

    @device_function
    def rotated(acc, a, odd, far, i):
        """Of the four sums of a row from ``a`` on, the one whose turn is ``i``."""
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
