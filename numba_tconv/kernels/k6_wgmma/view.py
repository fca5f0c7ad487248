"""What a lane of k6 that multiplies must know, beside where its window is, to load it from the stages of a tile and of
a chunk of taps (window.py). It is worked out once for all of them."""

from __future__ import annotations

from numba import cuda, int32

from numba_tconv.ptx import device_function

from .producer import make_window_start
from .tile import Config
from .window import ALIGNED, make_beyond


def make_view(config: Config):
    """A device function. ``n``, ``j``: as in producer.py. ``taken``, the same for all tiles: from ``boxed`` to
    ``apart`` as there; ``early``: elements from the multiple of 16 bytes before x to x; ``stride_c``: of x; ``loaded``:
    inputs of a sample, its columns, and the first of them; ``column``: of the tile, where the lane's window begins;
    ``x_at``: where it is, if the tile's begins at a multiple of 16 bytes.

    Returns the window's place, whether the copy engine has rounded it, and ``beyond`` and ``together`` of
    window.py.
    """
    tile = config.tile
    itemsize, vector, lead, halo = tile.itemsize, 16 // tile.itemsize, tile.lead, tile.halo
    shift, before = tile.chunk_shift, tile.overlap + lead
    # Only windows that the copy engine has not rounded are rounded when they are read.
    some_rounded, ahead = tile.precision == "tf32", config.split_ahead
    window_start, beyond_of = make_window_start(config, int32), make_beyond(config)

    @device_function
    def view_of(n, j, chunk, taken):
        boxed, aligned, apart, early, stride_c, loaded, column, x_at = taken
        rounded, some, beyond, together = False, False, int32(0), int32(4)
        inputs, columns, first = loaded
        if some_rounded or not aligned:
            if not aligned:
                # Modulo 16 bytes it does not matter in which sample that is: columns are multiples of eight.
                begin = int32(int32(early + first + j) - int32(before + chunk * shift))
                x_at = int32(x_at + (begin & (vector - 1)) * itemsize)
                begins = int32(begin | int32(stride_c))  # of every row, modulo 4
                together = int32(1 if begins & 1 else 2 if begins & 2 else 4)
            if boxed:
                _, i, rounded = window_start(n, j, chunk, True, apart, inputs, columns, first)
                if not (aligned or ahead):
                    if rounded:
                        beyond = beyond_of(int32(i + column + lead - halo), int32(inputs))
                    some = cuda.any_sync(0xFFFFFFFF, beyond != 0)
        if aligned and (rounded or not some_rounded):
            together = int32(ALIGNED)
        return x_at, rounded, (some, beyond), together

    return view_of
