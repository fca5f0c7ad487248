"""Planes of a long stride: squares of grad_output transposed in registers.

A thread takes a square: as many columns as 16 bytes have elements, by as many phases. It loads a vector of each column,
in which phases lie side by side, and stores a vector of each phase. Transposing a square only renames registers;
elements of 16 bits are paired anew. Vectors leave through shared memory, because direct stores would write half
sectors.

A thread loads single elements where phases are not adjacent or not aligned to 16 bytes, and where grad_output ends
within a vector. It stores vectors all the same."""

from __future__ import annotations

from functools import cache

from numba import cuda, int32, int64, types, uint16, uint32, uint64

from numba_tconv.kernels.common.integer import divided
from numba_tconv.kernels.common.tensor_map import ALIGNMENT
from numba_tconv.ptx import device_function, load_vector, recomputed, repeated, store_vector
from numba_tconv.runtime.kernel import Kernel, flat

SQUARES = 8  # of a tile along the phases
COLUMNS = 96  # of a tile, at most
RESIDENT = 1152  # threads of a multiprocessor, at least
WORDS = 4  # of a vector


# A square stays in the words it was loaded in: 16-bit elements would take a register each.
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


@cache
def make_kernel(config) -> Kernel:
    """Make the kernel of a configuration of planes.py.

    Its arguments are those of the kernel in planes.py; its grid is ``along`` blocks a row."""
    stride, dilation, phases, kind = config.stride, config.dilation, config.phases, config.kind
    itemsize, squares = config.itemsize, SQUARES
    vector, of_word = ALIGNMENT // itemsize, 4 // itemsize
    word, word_of, element_of = (types.uint32, _pair, _half) if of_word == 2 else (kind, _element, _only)
    all_words, tile_phases, strips = vector * WORDS, squares * vector, _strips(phases, vector)
    threads = squares * (COLUMNS // vector)
    shared_bytes = (tile_phases * (COLUMNS // vector) + squares) * ALIGNMENT
    span = (vector - 1) * stride + vector  # elements of grad_output that a square spans
    side_by_side = dilation == 1 and stride % vector == 0  # a square's vectors are all aligned, or none

    @device_function
    def load_column(z, state):
        words, g, source, first, length = state
        elements = cuda.local.array(vector, dtype=kind)
        if uint64(first + int64(z) * stride) < uint64(length):
            load_vector(elements, 0, g, source + int64(z) * stride)
            for q in range(WORDS):
                words[z * WORDS + q] = word_of(elements, q)
        else:
            for q in range(WORDS):
                words[z * WORDS + q] = word(0)

    @device_function
    def put_phase(a, state):
        words, turned, at, width = state
        elements = cuda.local.array(vector, dtype=kind)
        for z in range(vector):
            elements[z] = element_of(words[z * WORDS + a // of_word], a % of_word)
        store_vector(turned, int32(at + a * width) * vector, elements, 0)

    load_columns, put_phases = repeated(load_column, vector), repeated(put_phase, vector)

    @device_function
    def turn_vectors(g, source, first, length, turned, at, width):
        """Turn a square of aligned vectors, each of them wholly inside or outside of grad_output."""
        words = cuda.local.array(all_words, dtype=word)
        load_columns(int32(0), (words, g, source, first, length))
        put_phases(int32(0), (words, turned, at, width))

    @device_function
    def turn_elements(g, source, g_l, first, length, turned, at, width, left):
        """Turn up to ``left`` phases of any square."""
        columns = cuda.local.array(vector, dtype=kind)
        a = int32(0)
        while a < min(left, int32(vector)):
            for z in range(vector):
                inside = uint64(first + z * stride) < uint64(length)
                columns[z] = g[uint64(source + z * stride * g_l)] if inside else kind(0)
            store_vector(turned, int32(at + a * width) * vector, columns, 0)
            a = recomputed(int32(a + 1))  # unrolled further, it would take too many registers
            first, source = first + dilation, source + dilation * g_l

    def planes_turned(g, g_n, g_c, g_l, result, channels, out_length, padding, columns, pitch, rows):
        row = int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y
        if row >= rows:
            return
        turned = cuda.shared.array(0, dtype=kind)
        thread = int32(cuda.threadIdx.x)
        tile, strip = divided(int32(cuda.blockIdx.x), int32(strips))
        tiles, _ = divided(int32(cuda.gridDim.x), int32(strips))
        # Vectors are dealt out in pairs: a sector has two.
        vectors = int32(uint64(pitch) // uint64(vector))
        share, _ = divided(int32(vectors + tiles - 1), tiles)
        share = int32(share + (share & 1))
        begin = int32(tile * share)
        width = min(share, int32(vectors - begin))
        phase = int32(strip * tile_phases)
        own_phases = min(int32(phases - phase), int32(tile_phases))
        # Eight vectors fill all banks. One is left out after every 1 << skip phases that end with the last banks, so
        # neither eight vectors of adjacent squares nor eight in a row share a bank.
        skip = int32(3) if of_word == 2 else int32(2 + (width & 1))
        k, own = divided(thread, int32(squares))
        own = int32(own * vector)
        if k < width and own < own_phases:
            at = int32(own * width + (own >> skip) + k)
            sample = int64(uint32(row) // uint32(channels))
            first = int64(begin + k) * (vector * stride) - padding + int64(phase + own) * dilation
            source = sample * g_n + (row - sample * channels) * g_c + first * g_l
            by_vectors = False
            if side_by_side and g_l == 1:
                aligned = (int64(g.ctypes.data) + source * itemsize) & (ALIGNMENT - 1) == 0
                within = first >= 0 and first + span <= out_length
                by_vectors = aligned and (within or (padding | out_length) & (vector - 1) == 0)
            if by_vectors:
                turn_vectors(g, source, first, out_length, turned, at, width)
            else:
                turn_elements(g, source, g_l, first, out_length, turned, at, width, int32(own_phases - own))
        cuda.syncthreads()
        piece = cuda.local.array(vector, dtype=kind)
        target, others = (row * phases + phase) * vectors + begin, uint32(vectors - width)
        # v // width is v * inverse >> 16, as long as v * width < 1 << 16.
        inverse, _ = divided(int32(width + 0xFFFF), width)
        v, end = thread, int32(own_phases * width)
        while v < end:
            a = int32(int32(v * inverse) >> 16)
            load_vector(piece, 0, turned, int32(v + (a >> skip)) * vector)
            store_vector(result, (target + v + uint32(a) * others) * vector, piece, 0)
            v = recomputed(int32(v + threads))  # keeps the addresses in few registers

    stored, integers = flat(kind), (types.int64,)
    signature, blocks = (stored, *integers * 3, stored, *integers * 6), RESIDENT // threads
    return Kernel("planes_turned", planes_turned, signature, threads, shared_bytes, blocks, key=repr(config))


def _strips(phases: int, vector: int) -> int:
    """Tiles along the phases."""
    return -(-phases // (SQUARES * vector))


def along(columns: int, phases: int, itemsize: int) -> int:
    """Blocks of a row."""
    return _strips(phases, ALIGNMENT // itemsize) * -(-columns // COLUMNS)
