"""Planes of a long stride: grad_output's phases taken apart by squares that are turned in registers.

A thread that copied a column of every phase, as planes.py does, would hold hundreds of elements, and its neighbours
would read a stride apart. So it takes a square: of as many columns as 16 bytes have elements, as many phases. The
phases of a column lie side by side in grad_output, and the columns of a phase in the planes: the thread loads a vector
of each column, all of them under way together, and has a vector of each phase. To turn the square is to name registers
otherwise; elements of 16 bits are paired anew.

Eight neighbouring threads read on along the phases, so that a warp reads 128 bytes of a column. What they have to write
lies a plane apart, and a plane may begin within a sector of 32 bytes: they would write halves of sectors, which cost
most. So a block's vectors meet in shared memory, from where they go to the planes in the order in which they lie there:
a stretch of each phase, or, where a plane is no longer than a block's tile, one stretch of all its phases.

Where the phases of a column lie apart or begin elsewhere than at a multiple of 16 bytes, and where grad_output ends
within a vector, a thread loads single elements, one phase of its square at a time; it stores vectors all the same.

Memory limits it: waveglow in bfloat16 takes 22.8 us, torch's plain copy of the same bytes 21.0. Stored straight from
the squares, in half sectors, it took 44; element by element through shared memory 48; a column of every phase a thread
193 (H200, scripts; no recorded rows).
"""

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
    itemsize, squares = config.itemsize, SQUARES
    vector, of_word = ALIGNMENT // itemsize, 4 // itemsize
    word, word_of, element_of = (types.uint32, _pair, _half) if of_word == 2 else (kind, _element, _only)
    all_words, tile_phases, strips = vector * WORDS, squares * vector, _strips(phases, vector)
    threads = squares * (COLUMNS // vector)
    shared_bytes = (tile_phases * (COLUMNS // vector) + squares) * ALIGNMENT
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
    def put_phase(a, state):
        words, turned, at, width = state
        elements = cuda.local.array(vector, dtype=kind)
        for z in range(vector):
            elements[z] = element_of(words[z * WORDS + a // of_word], a % of_word)
        store_vector(turned, int32(at + a * width) * vector, elements, 0)

    load_columns, put_phases = repeated(load_column, vector), repeated(put_phase, vector)

    @device_function
    def turn_vectors(g, source, first, length, turned, at, width):
        """Turn a square of aligned vectors, each of them inside of grad_output or outside."""
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
            a = recomputed(int32(a + 1))  # unrolled further it would take too many registers
            first, source = first + dilation, source + dilation * g_l

    def planes_turned(g, g_n, g_c, g_l, result, channels, out_length, padding, columns, pitch, rows):
        row = int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y
        if row >= rows:
            return
        turned = cuda.shared.array(0, dtype=kind)
        thread = int32(cuda.threadIdx.x)
        tile, strip = divided(int32(cuda.blockIdx.x), int32(strips))
        tiles, _ = divided(int32(cuda.gridDim.x), int32(strips))
        # A plane's vectors, with what fills up the last one, are dealt out in pairs: a sector has two.
        vectors = int32(uint64(pitch) // uint64(vector))
        share, _ = divided(int32(vectors + tiles - 1), tiles)
        share = int32(share + (share & 1))
        begin = int32(tile * share)
        width = min(share, int32(vectors - begin))
        phase = int32(strip * tile_phases)
        own_phases = min(int32(phases - phase), int32(tile_phases))
        # Eight vectors fill all banks. Of shared memory one is left out after so many phases, 1 << skip, as end with
        # the last banks: so neither eight vectors of squares side by side meet in a bank, nor eight in a row.
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
            v = recomputed(int32(v + threads))  # which keeps the addresses in few registers

    stored, integers = flat(kind), (types.int64,)
    signature, blocks = (stored, *integers * 3, stored, *integers * 6), RESIDENT // threads
    return Kernel("planes_turned", planes_turned, signature, threads, shared_bytes, blocks, key=repr(config))


def _strips(phases: int, vector: int) -> int:
    """Tiles along the phases."""
    return -(-phases // (SQUARES * vector))


def along(columns: int, phases: int, itemsize: int) -> int:
    """Blocks of a row."""
    return _strips(phases, ALIGNMENT // itemsize) * -(-columns // COLUMNS)
