"""Sums into shared memory, as they will lie in y.

A lane holds two rows in four columns. Without a stride it stores a row's columns by fours or twos; with an even stride,
no dilation and taps in all phases a column's rows by twos; else, or unaligned, by ones."""

from collections.abc import Callable
from typing import NamedTuple

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

BATCH = 8  # core matrices' biases loaded together


class Round(NamedTuple):
    biases_at: int  # address of its biases
    row: int  # the lane's first of eight
    first: int  # core matrix
    pitch: int  # bytes between runs
    biases: object


class Matrix(NamedTuple):
    """A lane's part of a core matrix."""

    acc: object
    columns: tuple  # addresses, in writing order
    odd: bool  # the first is odd
    far: bool  # the first is 2 or 3
    round: Round


class Pieces(NamedTuple):
    """Device functions (core matrix, Matrix)."""

    load_biases: Callable
    one: Callable
    pair: Callable
    four: Callable


def rotation(lane, span):
    """The column that a lane writes first, against bank conflicts."""
    return 0 if span % 2 == 1 and span > 1 else lane & 3 if span <= 2 else lane >> 3 & 3


def rotation_of_pairs(lane, span):
    """``rotation`` by twos; for span 1, a pair's first column."""
    return lane & 2 if span == 1 else 0 if span // 2 % 2 == 1 and span > 2 else (lane >> 2 ^ lane >> 3) & 3


def pairs_phases(tile: Tile) -> bool:
    """Whether a lane's two rows are neighbouring outputs."""
    return tile.span % 2 == 0 and tile.span == tile.phases and tile.spread == 1


def make_stage(config: Config, matrices: int):
    """Build the staging of a round: ``matrices`` core matrices from ``first`` on.

    ``column``, ``biases_at``: addresses of the lane's first column and biases. ``pitch``: bytes between runs.
    ``begin``: outputs from a 16-byte boundary to the first run."""
    tile = config.tile
    span, itemsize = tile.span, tile.out_dtype.itemsize
    pieces, batch_rows = make_pieces(config), 2 * BATCH
    stores = pieces.one, pieces.pair, pieces.four
    one, pair, four = (_in_batches(store, pieces.load_biases, matrices) for store in stores)
    first_of, first_of_pairs = device_function(rotation), device_function(rotation_of_pairs)
    by_columns, by_phases = span == 1, pairs_phases(tile)
    step = span * itemsize

    @device_function
    def from_column(column, first):
        return (
            column + first * step,
            column + (first + 1 & 3) * step,
            column + (first + 2 & 3) * step,
            column + (first + 3 & 3) * step,
        )

    @device_function
    def stage(first, acc, column, biases_at, lane, pitch, begin):
        misplaced = int32(begin | pitch // itemsize)
        biases = cuda.local.array(batch_rows, dtype=float32)
        round = Round(biases_at, int32((lane & 3) * 2), first, pitch, biases)
        if by_columns and misplaced & 3 == 0:
            four(first, Matrix(acc, (column, column, column, column), False, False, round))
        elif (by_columns or by_phases) and misplaced & 1 == 0:
            rotation = int32(first_of_pairs(lane, span))
            pair(first, Matrix(acc, from_column(column, rotation), rotation & 1 == 1, rotation & 2 == 2, round))
        else:
            rotation = int32(first_of(lane, span))
            one(first, Matrix(acc, from_column(column, rotation), rotation & 1 == 1, rotation & 2 == 2, round))

    return stage


def _in_batches(piece, load_biases, matrices: int):
    """Build ``load_biases``, then ``piece``, by batches."""
    number = min(BATCH, matrices)
    load_all, put_all = repeated(load_biases, number), repeated(piece, number)

    @device_function
    def batch(k, state):
        load_all(k, state)
        put_all(k, state)

    if number == matrices:
        return batch
    others = _in_batches(piece, load_biases, matrices - number)

    @device_function
    def batches(k, state):
        batch(k, state)
        others(int32(k + number), state)

    return batches


def _make_rows(config: Config):
    spread, phases, itemsize = config.tile.spread, config.tile.phases, config.tile.out_dtype.itemsize
    aligned_rows, load, same_channel = 8 % phases == 0 or phases % 8 == 0, ld_shared(1, float32), phases % 2 == 0

    @device_function
    def row_of(k, r, round):
        """Byte offsets of the row and its bias."""
        pitch, k = round.pitch, int32(k - round.first)
        if aligned_rows:
            channel, phase = int32(uint32(r) // uint32(phases)), int32(uint32(r) % uint32(phases))
            before = int32(8 * k // phases)
            return (
                int32(channel * pitch + (phase + 8 * k % phases) * (spread * itemsize) + before * pitch),
                int32(channel * 4 + before * 4),
            )
        channel = int32(uint32(8 * k + r) // uint32(phases))
        return int32(channel * pitch + (8 * k + r - channel * phases) * (spread * itemsize)), int32(channel * 4)

    @device_function
    def place_of(k, round):
        return int32(uint32(k - round.first) % uint32(BATCH)) * 2

    @device_function
    def load_biases(k, matrix):
        round = matrix.round
        z = place_of(k, round)
        _, even_at = row_of(k, round.row, round)
        round.biases[z] = load(int32(round.biases_at + even_at))
        if not same_channel:
            _, odd_at = row_of(k, int32(round.row + 1), round)
            round.biases[z + 1] = load(int32(round.biases_at + odd_at))

    @device_function
    def staged(k, z, round):
        at, _ = row_of(k, int32(round.row + z), round)
        return at, round.biases[place_of(k, round) + (0 if same_channel else z)]

    return load_biases, staged


def make_pieces(config: Config) -> Pieces:
    tile, (load_biases, staged) = config.tile, _make_rows(config)
    itemsize, sums, halves = tile.out_dtype.itemsize, tile.rows // 2, tile.out_dtype.itemsize == 2
    span = tile.span if tile.has_gaps else 1  # gaps get the bias
    narrow = pack_f16 if tile.dtype == torch.float16 else pack_bf16

    @device_function
    def rotated(acc, a, odd, far, i):
        """The ``i``-th written sum of a row whose sums begin at ``a``."""
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
    def one(k, matrix):
        acc, columns, odd, far = matrix.acc, matrix.columns, matrix.odd, matrix.far
        even_at, even_bias = staged(k, 0, matrix.round)
        odd_at, odd_bias = staged(k, 1, matrix.round)
        for i in range(4):
            even_sum = rotated(acc, 4 * k, odd, far, i) + even_bias
            odd_sum = rotated(acc, 4 * k + 1, odd, far, i) + odd_bias
            put_apart(int32(columns[i] + even_at), int32(columns[i] + odd_at), even_sum, odd_sum)
            for gap in range(itemsize, span * itemsize, itemsize):
                put_apart(int32(columns[i] + even_at + gap), int32(columns[i] + odd_at + gap), even_bias, odd_bias)

    @device_function
    def pair_of_phases(k, matrix):
        acc, columns, odd, far = matrix.acc, matrix.columns, matrix.odd, matrix.far
        at, bias = staged(k, 0, matrix.round)
        for i in range(4):
            low, high = rotated(acc, 4 * k, odd, far, i) + bias, rotated(acc, 4 * k + 1, odd, far, i) + bias
            if halves:
                st_shared_b32(int32(columns[i] + at), narrow(low, high))
            else:
                st_shared_v2_f32(int32(columns[i] + at), low, high)

    @device_function
    def pair_of_columns(k, matrix):
        acc, columns, far = matrix.acc, matrix.columns, matrix.far
        for z in range(2):
            at, bias = staged(k, z, matrix.round)
            a, near_at, far_at = 4 * k + z, int32(columns[0] + at), int32(columns[2] + at)
            z0, z1, z2, z3 = acc[a] + bias, acc[a + 2] + bias, acc[a + sums] + bias, acc[a + sums + 2] + bias
            if halves:
                low, high = narrow(z0, z1), narrow(z2, z3)
                st_shared_b32(near_at, high if far else low)
                st_shared_b32(far_at, low if far else high)
            else:
                st_shared_v2_f32(near_at, z2 if far else z0, z3 if far else z1)
                st_shared_v2_f32(far_at, z0 if far else z2, z1 if far else z3)

    @device_function
    def four(k, matrix):
        acc, columns = matrix.acc, matrix.columns
        for z in range(2):
            at, bias = staged(k, z, matrix.round)
            a, at = 4 * k + z, int32(columns[0] + at)
            z0, z1, z2, z3 = acc[a] + bias, acc[a + 2] + bias, acc[a + sums] + bias, acc[a + sums + 2] + bias
            if halves:
                st_shared_v2_b32(at, narrow(z0, z1), narrow(z2, z3))
            else:
                st_shared(at, z0, z1, z2, z3)

    return Pieces(load_biases, one, pair_of_phases if pairs_phases(tile) else pair_of_columns, four)
