"""How a consumer lane reads its windows of a tile and tap chunk (window.py)."""

from __future__ import annotations

from numba import cuda, int32

from numba_tconv.ptx import device_function

from .producer import make_window_start
from .tile import Config
from .window import ALIGNED, make_beyond


def make_view(config: Config):
    """Build ``view_of``, called once for a tile's tap chunk.

    ``n``, ``j``: as in producer.py. ``taken``, the same for all tiles: ``boxed``, ``aligned`` and ``apart`` as in
    producer.py; ``early``, elements from a multiple of 16 bytes to x; ``stride_c`` of x; ``loaded``, a sample's inputs,
    columns and first column; ``column`` of the tile where the lane's window begins; ``x_at``, its address if the tile's
    window begins at a multiple of 16 bytes.

    Returns the window's address, whether the copy engine has rounded it, and ``beyond`` and ``together`` (window.py).
    """
    tile = config.tile
    itemsize, vector, lead, halo = tile.itemsize, 16 // tile.itemsize, tile.lead, tile.halo
    shift, before = tile.chunk_shift, tile.overlap + lead
    # Consumers round the windows that the copy engine has not.
    some_rounded, ahead = tile.precision == "tf32", config.split_ahead
    window_start, beyond_of = make_window_start(config, int32), make_beyond(config)

    @device_function
    def view_of(n, j, chunk, taken):
        boxed, aligned, apart, early, stride_c, loaded, column, x_at = taken
        rounded, some, beyond, together = False, False, int32(0), int32(4)
        inputs, columns, first = loaded
        if some_rounded or not aligned:
            if not aligned:
                # The sample does not matter: its columns are a multiple of eight.
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
