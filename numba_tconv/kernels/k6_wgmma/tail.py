"""Every sample's last column on CUDA cores, where it alone would take another tile.

A thread has a row of a tile and a share of its weights. Partial sums are added in a fixed order. Early blocks gather on
few multiprocessors: long sums do not begin early."""

import math
from functools import cache
from typing import NamedTuple

import torch
from numba import cuda, float32, int32, int64, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.arguments import arguments, of_problem
from numba_tconv.kernels.common.integer import divided
from numba_tconv.kernels.common.tensor_core.fragments import split_channel
from numba_tconv.kernels.common.tensor_core.pack import WORDS, packed_size
from numba_tconv.kernels.common.tensor_core.tile import Tile
from numba_tconv.ptx import bits_of, device_function, f16_to_f32, griddepcontrol_wait, load_run, repeated, round_tf32
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat

from .arguments import Weights
from .tile import Config, tail_column

THREADS = 512
SAMPLES = 2  # a block
LOADS = 8  # in flight, a thread
MOST_EARLY_DEPTHS = 64  # of an early launch
CHANNELS = 2048  # in shared memory at a time
INPUTS = CHANNELS * SAMPLES


class Input(NamedTuple):
    """x, as in arguments.Input."""

    data: object
    stride_n: int
    stride_c: int


class Sizes(NamedTuple):
    batch: int
    length: int
    in_per_group: int
    out_per_group: int


class RowTiles(NamedTuple):
    group_tiles: int
    row_tiles: int
    depths: int  # of a row tile


class LastColumn(NamedTuple):
    column: int
    first_output: int
    outputs: int
    length: int  # of y


class Pieces(NamedTuple):
    """A thread's next vectors of weights."""

    packed: object
    first: int  # depth and tap, as a number of taps; unpacked: an index
    row: int
    piece: int
    parts: int  # to the thread's next piece
    pitch: int  # unpacked: elements between channels


class Products(NamedTuple):
    totals: object
    weights: object
    shared: object
    inverse: float  # of split weights' scale


def _make_multiply(tile: Tile, unpacked: bool):
    """Build the load and the product of a piece, (index, (Products, Pieces))."""
    rows, depth, taps, all_parts = tile.rows, tile.depth, tile.tap_chunk, tile.operand_halves
    elements, vector = 16 // tile.itemsize, 16 // tile.operand_size
    block, load_weights = rows * depth // vector * elements, load_run(ELEMENTS[tile.dtype], elements)
    channels_on = tuple(map(split_channel, range(vector)))
    widened, rounded = ELEMENTS[tile.dtype].load, tile.kind == "tf32"

    @device_function
    def load_piece(u, state):
        products, pieces = state
        channel_chunk, half = divided(int32(pieces.piece + u * pieces.parts), int32(depth // vector))
        at = (pieces.first + channel_chunk * (all_parts * taps)) * block + (half * rows + pieces.row) * elements
        for z in range(all_parts):
            own = (z * LOADS + u) * elements
            load_weights(products.weights[own : own + elements], pieces.packed, at + z * (taps * block), int32(0))

    @device_function
    def load_unpacked(u, state):
        products, pieces = state
        channel, at = int32((pieces.piece + u * pieces.parts) * vector), pieces.first + pieces.row
        for q in range(vector):
            weight = widened(pieces.packed[uint64(at + (channel + q) * pieces.pitch)])
            products.weights[u * vector + q] = round_tf32(weight) if rounded else weight

    @device_function
    def multiply(u, state):
        products, pieces = state
        totals, weights, shared, inverse = products.totals, products.weights, products.shared, products.inverse
        at = int32((pieces.piece + u * pieces.parts) * (vector * SAMPLES))
        for q in range(vector):
            if all_parts == 2:  # two channels share a word
                high, low = weights[u * WORDS + q // 2], weights[(LOADS + u) * WORDS + q // 2]
                weight = (f16_to_f32(bits_of(high), q % 2 == 1) + f16_to_f32(bits_of(low), q % 2 == 1)) * inverse
                channel = channels_on[q]
            else:
                weight, channel = weights[u * vector + q], q
            for z in range(SAMPLES):
                totals[z] += weight * shared[at + channel * SAMPLES + z]

    return load_unpacked if unpacked else load_piece, multiply


@cache
def make_kernel(tile: Tile, unpacked: bool = False) -> Kernel:
    phases, channels, depth, taps, all_parts = (
        tile.phases,
        tile.channels,
        tile.depth,
        tile.tap_chunk,
        tile.operand_halves,
    )
    vector, all_weights = 16 // tile.operand_size, tile.operand_halves * LOADS * 16 // tile.itemsize
    element, kernel_size = ELEMENTS[tile.dtype], taps * tile.stride
    load, store, storage = element.load, element.store, element.storage
    load_piece, multiply = _make_multiply(tile, unpacked)
    load_all, multiply_all = repeated(load_piece, LOADS), repeated(multiply, LOADS)

    @device_function
    def fetch(shared, inputs, x, sizes, thread, i, few_samples, group, first_depth, depths):
        e = int32(thread)
        while e < depths * (depth * SAMPLES):
            for u in range(LOADS):
                place = int32(e + u * THREADS)
                c, n = first_depth * depth + place // SAMPLES, few_samples * SAMPLES + place % SAMPLES
                inside = c < sizes.in_per_group and n < sizes.batch
                at = n * x.stride_n + (group * sizes.in_per_group + c) * x.stride_c + i
                inputs[u] = load(x.data[uint64(at if inside else int64(0))]) if inside else float32(0)
            for u in range(LOADS):
                if e + u * THREADS < INPUTS:
                    shared[e + u * THREADS] = inputs[u]
            e = int32(e + LOADS * THREADS)

    def k6_tail(x, layer, y, sizes, tiles, last):
        shared = cuda.shared.array(INPUTS, dtype=float32)
        weights, totals = cuda.local.array(all_weights, dtype=float32), cuda.local.array(SAMPLES, dtype=float32)
        inputs = cuda.local.array(LOADS, dtype=float32)
        thread, outputs = int32(cuda.threadIdx.x), int32(last.outputs)
        few_samples, row_tile = divided(int32(cuda.blockIdx.x), int32(tiles.row_tiles))
        group, group_tile = divided(row_tile, int32(tiles.group_tiles))
        sums = int32(channels * outputs)
        parts = int32(THREADS // sums)
        part, own = divided(thread, sums)
        channel, phase = divided(own, outputs)
        row = int32(channel * phases + phase)
        for z in range(SAMPLES):
            totals[z] = float32(0)
        inverse = load(layer.packed[uint64(layer.packed.shape[0] - 1)]) if all_parts == 2 else float32(1)
        first_depth = int32(0)
        while first_depth < tiles.depths:
            depths = int32(min(CHANNELS // depth, tiles.depths - first_depth))
            for tap in range(taps):
                i = int64(last.column - tap)
                if i >= 0 and i < sizes.length:
                    cuda.syncthreads()
                    fetch(shared, inputs, x, sizes, thread, i, few_samples, group, first_depth, depths)
                    cuda.syncthreads()
                    first = (int64(row_tile) * tiles.depths + first_depth) * (all_parts * taps) + tap
                    pitch = sizes.out_per_group * kernel_size
                    if unpacked:
                        own_channel = group * sizes.in_per_group + first_depth * depth
                        own_run = (group_tile * channels + channel) * kernel_size - channel * phases
                        first = own_channel * pitch + own_run + tap * phases
                    piece, pieces = int32(part), int32(depths * (depth // vector) if part < parts else 0)
                    products = Products(totals, weights, shared, inverse)
                    while piece + (LOADS - 1) * parts < pieces:
                        load_all(int32(0), (products, Pieces(layer.packed, first, row, piece, parts, pitch)))
                        multiply_all(int32(0), (products, Pieces(layer.packed, first, row, piece, parts, pitch)))
                        piece = int32(piece + LOADS * parts)
                    while piece < pieces:
                        load_piece(int32(0), (products, Pieces(layer.packed, first, row, piece, parts, pitch)))
                        multiply(int32(0), (products, Pieces(layer.packed, first, row, piece, parts, pitch)))
                        piece = int32(piece + parts)
            first_depth = int32(first_depth + depths)
        cuda.syncthreads()
        for z in range(SAMPLES):
            shared[z * THREADS + thread] = totals[z]
        cuda.syncthreads()
        e = int32(thread)
        while e < sums * SAMPLES:
            z, own = divided(e, sums)
            channel, phase = divided(own, outputs)
            channel, n = int64(group_tile * channels + channel), int64(few_samples * SAMPLES + z)
            if channel < sizes.out_per_group and n < sizes.batch:
                total, part = float32(0), int32(0)
                while part < parts:
                    total += shared[z * THREADS + part * sums + own]
                    part = int32(part + 1)
                co = group * sizes.out_per_group + channel
                if layer.has_bias:
                    total += load(layer.bias[uint64(co)])
                out_channels = tiles.row_tiles // tiles.group_tiles * sizes.out_per_group
                y[uint64((n * out_channels + co) * last.length + last.first_output + phase)] = store(total)
            e = int32(e + THREADS)
        griddepcontrol_wait()

    stored = flat(storage)
    layer = arguments(Weights, packed=stored, bias=stored)
    signature = arguments(Input, data=stored), layer, stored, *map(arguments, (Sizes, RowTiles, LastColumn))
    return Kernel("k6_tail", k6_tail, signature, THREADS, key=f"{tile!r} {unpacked}" if unpacked else repr(tile))


def prepare(
    problem: Problem, config: Config, x_shape: tuple, x_strides: tuple, dtype: torch.dtype, depths: int, has_bias: bool
) -> Prepared:
    """The launch of x, packed weights, bias (else any tensor of ``dtype``) and y.

    ``x_strides``: in elements; positions are contiguous. ``depths``: of a row tile."""
    p, tile, column = problem, config.tile, tail_column(problem, config)
    group_tiles, first_output = tile.row_tiles(p), column * p.stride - p.padding
    row_tiles = group_tiles * p.groups
    packed_elements = math.prod(p.weight_shape) if config.unpacked else packed_size(tile, row_tiles * depths)
    packed = alike((packed_elements,), dtype)
    return make_kernel(tile, config.unpacked).prepare(
        -(-p.batch // SAMPLES) * row_tiles,
        Input(alike(x_shape, dtype, x_strides), *x_strides[:2]),
        Weights(packed, alike((p.out_channels,), dtype) if has_bias else packed, int(has_bias)),
        alike(p.out_shape, dtype),
        of_problem(Sizes, p),
        RowTiles(group_tiles, row_tiles, depths),
        LastColumn(column, first_output, p.out_length - first_output, p.out_length),
        early=depths <= MOST_EARLY_DEPTHS,
    )
