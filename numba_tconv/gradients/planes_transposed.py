"""Planes of a long stride: squares of grad_output transposed in registers.

A square is 16 bytes of columns by as many phases. A thread loads a vector of each column (elements where phases are not
adjacent and aligned, or grad_output ends) and stores one of each phase, through shared memory, in whole sectors."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from numba import cuda, int32, int64, types, uint16, uint32, uint64

from numba_tconv.kernels.common.arguments import Signal, arguments
from numba_tconv.kernels.common.integer import divided
from numba_tconv.kernels.common.tensor_map import ALIGNMENT
from numba_tconv.ptx import device_function, load_vector, recomputed, repeated, store_vector
from numba_tconv.runtime.kernel import Kernel, flat

SQUARES = 8  # along phases
COLUMNS = 96
RESIDENT = 1152  # threads of a multiprocessor
WORDS = 4


class Sizes(NamedTuple):
    out_channels: int
    out_length: int
    padding: int
    columns: int
    pitch: int
    rows: int


class Square(NamedTuple):
    data: object
    source: int
    first_output: int
    out_length: int


class Staging(NamedTuple):
    shared: object
    vector: int
    pitch: int  # vectors between phases


# A square stays in words: 16-bit elements would take a register each.
@device_function
def _pair(elements, q):
    return uint32(uint32(elements[2 * q]) | uint32(elements[2 * q + 1]) << uint32(16))


@device_function
def _half(word, upper):
    return uint16(word >> uint32(16 * upper))


@device_function
def _element(elements, q):
    return elements[q]


@device_function
def _only(word, upper):
    return word


def _make_transpose_vectors(config) -> Callable:
    """Build ``transpose_vectors``, for aligned vectors wholly inside or outside."""
    stride, kind, vector = config.stride, config.kind, ALIGNMENT // config.itemsize
    of_word = 4 // config.itemsize
    word, word_of, element_of = (types.uint32, _pair, _half) if of_word == 2 else (kind, _element, _only)
    all_words = vector * WORDS

    @device_function
    def load_column(z, state):
        words, square = state
        elements = cuda.local.array(vector, dtype=kind)
        if uint64(square.first_output + int64(z) * stride) < uint64(square.out_length):
            load_vector(elements, 0, square.data, square.source + int64(z) * stride)
            for q in range(WORDS):
                words[z * WORDS + q] = word_of(elements, q)
        else:
            for q in range(WORDS):
                words[z * WORDS + q] = word(0)

    @device_function
    def store_phase(a, state):
        words, staging = state
        elements = cuda.local.array(vector, dtype=kind)
        for z in range(vector):
            elements[z] = element_of(words[z * WORDS + a // of_word], a % of_word)
        store_vector(staging.shared, int32(staging.vector + a * staging.pitch) * vector, elements, 0)

    load_columns, store_phases = repeated(load_column, vector), repeated(store_phase, vector)

    @device_function
    def transpose_vectors(square, staging):
        words = cuda.local.array(all_words, dtype=word)
        load_columns(int32(0), (words, square))
        store_phases(int32(0), (words, staging))

    return transpose_vectors


def _make_transpose_elements(config) -> Callable:
    """Build ``transpose_elements``, for any square, of up to ``phases_left`` phases."""
    stride, dilation, kind, vector = config.stride, config.dilation, config.kind, ALIGNMENT // config.itemsize

    @device_function
    def transpose_elements(square, stride_l, phases_left, staging):
        elements = cuda.local.array(vector, dtype=kind)
        output, source = square.first_output, square.source
        a = int32(0)
        while a < min(phases_left, int32(vector)):
            for z in range(vector):
                inside = uint64(output + z * stride) < uint64(square.out_length)
                elements[z] = square.data[uint64(source + z * stride * stride_l)] if inside else kind(0)
            store_vector(staging.shared, int32(staging.vector + a * staging.pitch) * vector, elements, 0)
            a = recomputed(int32(a + 1))  # unrolled, it would spill
            output, source = output + dilation, source + dilation * stride_l

    return transpose_elements


@cache
def make_kernel(config) -> Kernel:
    stride, dilation, phases, kind = config.stride, config.dilation, config.phases, config.kind
    itemsize, squares = config.itemsize, SQUARES
    vector, narrow = ALIGNMENT // itemsize, itemsize == 2
    tile_phases, strips = squares * vector, _strips(phases, vector)
    threads = squares * (COLUMNS // vector)
    shared_bytes = (tile_phases * (COLUMNS // vector) + squares) * ALIGNMENT
    span = (vector - 1) * stride + vector
    side_by_side = dilation == 1 and stride % vector == 0  # all vectors are aligned, or none
    transpose_vectors, transpose_elements = _make_transpose_vectors(config), _make_transpose_elements(config)

    def planes_transposed(grad_output, planes, sizes):
        row = int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y
        if row >= sizes.rows:
            return
        transposed = cuda.shared.array(0, dtype=kind)
        thread = int32(cuda.threadIdx.x)
        tile, strip = divided(int32(cuda.blockIdx.x), int32(strips))
        tiles, _ = divided(int32(cuda.gridDim.x), int32(strips))
        # Vectors are dealt out by sectors.
        vectors = int32(uint64(sizes.pitch) // uint64(vector))
        share, _ = divided(int32(vectors + tiles - 1), tiles)
        share = int32(share + (share & 1))
        first_vector = int32(tile * share)
        width = min(share, int32(vectors - first_vector))
        tile_phase = int32(strip * tile_phases)
        phases_left = min(int32(phases - tile_phase), int32(tile_phases))
        # A vector is left out after every 1 << skip phases, so that eight vectors of adjacent squares, or in a row,
        # share no bank.
        skip = int32(3) if narrow else int32(2 + (width & 1))
        k, phase = divided(thread, int32(squares))
        phase = int32(phase * vector)
        if k < width and phase < phases_left:
            staging = Staging(transposed, int32(phase * width + (phase >> skip) + k), width)
            sample = int64(uint32(row) // uint32(sizes.out_channels))
            output = int64(first_vector + k) * (vector * stride) - sizes.padding + int64(tile_phase + phase) * dilation
            source = sample * grad_output.stride_n + (row - sample * sizes.out_channels) * grad_output.stride_c
            source += output * grad_output.stride_l
            square = Square(grad_output.data, source, output, sizes.out_length)
            by_vectors = False
            if side_by_side and grad_output.stride_l == 1:
                aligned = (int64(grad_output.data.ctypes.data) + source * itemsize) & (ALIGNMENT - 1) == 0
                within = output >= 0 and output + span <= sizes.out_length
                by_vectors = aligned and (within or (sizes.padding | sizes.out_length) & (vector - 1) == 0)
            if by_vectors:
                transpose_vectors(square, staging)
            else:
                transpose_elements(square, grad_output.stride_l, int32(phases_left - phase), staging)
        cuda.syncthreads()
        piece = cuda.local.array(vector, dtype=kind)
        target, others = (row * phases + tile_phase) * vectors + first_vector, uint32(vectors - width)
        # v // width is v * inverse >> 16, as long as v * width < 1 << 16.
        inverse, _ = divided(int32(width + 0xFFFF), width)
        v, end = thread, int32(phases_left * width)
        while v < end:
            a = int32(int32(v * inverse) >> 16)
            load_vector(piece, 0, transposed, int32(v + (a >> skip)) * vector)
            store_vector(planes, (target + v + uint32(a) * others) * vector, piece, 0)
            v = recomputed(int32(v + threads))  # saves registers

    signature, blocks = (arguments(Signal, data=flat(kind)), flat(kind), arguments(Sizes)), RESIDENT // threads
    return Kernel("planes_transposed", planes_transposed, signature, threads, shared_bytes, blocks, key=repr(config))


def _strips(phases: int, vector: int) -> int:
    return -(-phases // (SQUARES * vector))


def along(columns: int, phases: int, itemsize: int) -> int:
    return _strips(phases, ALIGNMENT // itemsize) * -(-columns // COLUMNS)
