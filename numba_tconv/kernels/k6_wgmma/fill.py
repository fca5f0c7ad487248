"""Fills windows that no box brings: samples share them, or x has no map."""

from typing import NamedTuple

from numba import cuda, int32, int64, uint64

from numba_tconv.ptx import cp_async_to, device_function, mbarrier_await_copies, nounroll, recomputed, repeated
from numba_tconv.runtime.elements import ELEMENTS

from .boxes import place
from .tile import Config

TOGETHER = 2  # 16-bit elements in flight; more would spill


class Piece(NamedTuple):
    """Elements under way, of TOGETHER channels."""

    x: object
    values: object
    source: int  # index in x
    channel: int
    channels_left: int
    shared: object
    element: int  # of the window
    stride_c: int
    window: object
    at: int  # byte of the window


def make_fill(config: Config):
    """Build ``fill_in_vectors`` and ``fill``, for windows that are no boxes."""
    width, itemsize, depth = config.width, config.tile.itemsize, config.depth
    storage, asynchronous, vector = ELEMENTS[config.tile.dtype].storage, itemsize == 4, 16 // itemsize
    copy, copy_vector = cp_async_to(4), cp_async_to(16)
    row_vectors = width // vector
    all_vectors = depth * row_vectors

    @device_function
    def fill_in_vectors(x, origin, address, lane, barrier):
        """Copies rows whose ends are 16-byte aligned."""
        window, samples = x.window, x.samples
        e = recomputed(lane)  # saves registers
        while e < all_vectors:
            c = int32(e // row_vectors)
            p = int32((e - c * row_vectors) * vector)
            sample, element = int64(origin.sample), origin.element + p
            while element >= samples.columns:
                sample, element = sample + 1, element - samples.columns
            exists = (
                c < origin.channels_left
                and sample >= 0
                and sample < samples.batch
                and element >= 0
                and element < samples.length
            )
            source = sample * x.stride_n + (origin.channel + c) * x.stride_c + element if exists else int64(0)
            row = int32(address + place(c, window.alike_log, window.pitch, window.shear))
            copy_vector(row + p * itemsize, x.data, source, 16 if exists else 0)
            e = int32(e + 32)
        mbarrier_await_copies(barrier)

    @device_function
    def element_at(c, p, window, at):
        return int32(at + place(c, window.alike_log, window.pitch, window.shear) + p * itemsize)

    @device_function
    def load(z, piece):
        exists = piece.channel + z < piece.channels_left
        value = piece.x[uint64(piece.source + z * piece.stride_c if exists else int64(0))]
        piece.values[z] = value if exists else storage(0)

    @device_function
    def store(z, piece):
        at = element_at(int32(piece.channel + z), piece.element, piece.window, piece.at)
        piece.shared[uint64(at // itemsize)] = piece.values[z]

    load_all, store_all = repeated(load, TOGETHER), repeated(store, TOGETHER)

    @device_function
    def fill(x, origin, region, shared, lane, barrier):
        window, samples = x.window, x.samples
        early = int32(0 if x.fetch.aligned else int32(x.early + origin.element) & (vector - 1))
        at = int32(region + early * itemsize)
        lane = recomputed(lane)  # saves registers
        values = cuda.local.array(TOGETHER, dtype=storage)
        p = int32(lane)
        while p < width:
            sample, element = int64(origin.sample), origin.element + p
            while element >= samples.columns:
                sample, element = sample + 1, element - samples.columns
            inside = sample >= 0 and sample < samples.batch and element >= 0 and element < samples.length
            channels_left = int32(min(origin.channels_left, depth) if inside else 0)
            c = int32(0)
            while c < depth:
                nounroll()  # unrolled, it would spill
                exists = c < channels_left
                source = sample * x.stride_n + (origin.channel + c) * x.stride_c + element if exists else int64(0)
                if asynchronous:
                    copy(shared.base + element_at(c, p, window, at), x.data, source, itemsize if exists else 0)
                    c = recomputed(int32(c + 1))
                else:
                    piece = Piece(x.data, values, source, c, channels_left, shared.elements, p, x.stride_c, window, at)
                    load_all(int32(0), piece)
                    store_all(int32(0), piece)
                    c = recomputed(int32(c + TOGETHER))
            p = int32(p + 32)
        mbarrier_await_copies(barrier)

    return fill_in_vectors, fill
