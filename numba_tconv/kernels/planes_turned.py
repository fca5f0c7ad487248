"""Planes of a long stride: grad_output's phases taken apart by squares that are turned in registers.

A thread that copied a column of every phase, as planes.py does, would hold hundreds of elements, and its neighbours
would read a stride apart. So it takes a square: of as many columns as 16 bytes have elements, as many phases. The
phases of a column lie side by side in grad_output, and the columns of a phase in the planes: the thread loads a vector
of each column, all of them under way together, and stores a vector of each phase. To turn the square is to name
registers otherwise; elements of 16 bits are paired anew. A few neighbouring threads read on along the phases, the next
ones those of the next columns, so that a warp reads and writes runs of several sectors.

Where the phases of a column lie apart or begin elsewhere than at a multiple of 16 bytes, and where grad_output ends
within a vector, a thread loads single elements, one phase of its square at a time; it stores vectors all the same.

Of waveglow's grad_output in bfloat16 a vector takes about 40 instructions, read and written. Through shared memory,
element by element, it took ten times as many and 48 us; a column of every phase a thread, 193 us (H200, scripts; no
recorded rows).
"""

from __future__ import annotations

from functools import cache

from numba import cuda, int32, int64, types, uint16, uint32, uint64

from ..launch import Kernel, flat
from ..ptx import device_function, load_vector, nounroll, repeated, store_vector
from .tensor_map import ALIGNMENT

AREA = 6144  # elements of a block's squares
LANES = 4  # threads that read on along the phases
WORDS = 4  # of a vector
WIDEST = 8  # elements of a vector, at most


# A square is held in the words that it was loaded in: 16-bit elements would take a register each.
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
    """The kernel of a configuration of planes.py, with the arguments that its own has, but another grid."""
    stride, dilation, phases, kind = config.stride, config.dilation, config.phases, config.kind
    itemsize, lanes = config.itemsize, LANES
    vector, of_word = ALIGNMENT // itemsize, 4 // itemsize
    word, word_of, element_of = (types.uint32, _pair, _half) if of_word == 2 else (kind, _element, _only)
    all_words, threads = vector * WORDS, AREA // (vector * vector)
    span = (vector - 1) * stride + vector  # elements of grad_output from a square's first one to its last one
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
    def store_phase(a, state):
        words, result, target, pitch, left = state
        elements = cuda.local.array(vector, dtype=kind)
        for z in range(vector):
            elements[z] = element_of(words[z * WORDS + a // of_word], a % of_word)
        if a < left:
            store_vector(result, target + a * pitch, elements, 0)

    load_columns, store_phases = repeated(load_column, vector), repeated(store_phase, vector)

    @device_function
    def turn_vectors(g, source, first, length, result, target, pitch, left):
        """Copy up to ``left`` phases of a square of aligned vectors, each of them inside of grad_output or outside."""
        words = cuda.local.array(all_words, dtype=word)
        load_columns(int32(0), (words, g, source, first, length))
        store_phases(int32(0), (words, result, target, pitch, left))

    @device_function
    def turn_elements(g, source, g_l, first, length, result, target, pitch, left):
        """Copy up to ``left`` phases of any square."""
        columns = cuda.local.array(vector, dtype=kind)
        a = int32(0)
        while a < min(left, int32(vector)):
            nounroll()
            for z in range(vector):
                inside = uint64(first + z * stride) < uint64(length)
                columns[z] = g[uint64(source + z * stride * g_l)] if inside else kind(0)
            store_vector(result, target, columns, 0)
            a, target = int32(a + 1), target + pitch
            first, source = first + dilation, source + dilation * g_l

    def planes_turned(g, g_n, g_c, g_l, result, channels, out_length, padding, columns, pitch, rows):
        row = int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y
        if row >= rows:
            return
        square = uint32(uint32(cuda.blockIdx.x) * uint32(threads) + uint32(cuda.threadIdx.x))
        run, lane = uint32(square // uint32(lanes)), uint32(square % uint32(lanes))
        vectors = uint32(uint64(pitch) // uint64(vector))  # of a plane; what fills up the last one is written too
        strip = uint32(run // vectors)
        phase = int64(uint32(strip * uint32(lanes) + lane)) * vector
        if phase >= phases:
            return
        left, column = int32(phases - phase), int64(uint32(run - strip * vectors)) * vector
        sample = int64(uint32(row) // uint32(channels))
        first = column * stride - padding + phase * dilation
        source = sample * g_n + (row - sample * channels) * g_c + first * g_l
        target = (row * phases + phase) * pitch + column
        by_vectors = False
        if side_by_side and g_l == 1:
            aligned = (int64(g.ctypes.data) + source * itemsize) & (ALIGNMENT - 1) == 0
            within = first >= 0 and first + span <= out_length
            by_vectors = aligned and (within or (padding | out_length) & (vector - 1) == 0)
        if by_vectors:
            turn_vectors(g, source, first, out_length, result, target, pitch, left)
        else:
            turn_elements(g, source, g_l, first, out_length, result, target, pitch, left)

    stored, integers = flat(kind), (types.int64,)
    key = repr(config)
    return Kernel("planes_turned", planes_turned, (stored, *integers * 3, stored, *integers * 6), threads, key=key)


def along(columns: int, phases: int) -> int:
    """Blocks of a row: as many as its squares need whatever the elements. A block's squares of larger ones are smaller,
    and there are more of them."""
    strip = LANES * WIDEST
    all_columns, all_phases = -(-columns // WIDEST) * WIDEST, -(-phases // strip) * strip
    return -(-all_columns * all_phases // AREA)
