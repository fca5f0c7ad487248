"""The operands of k6's products: a lane's window of x, out of a stage and into registers."""

from __future__ import annotations

from numba import cuda, float32, int32

from ..ptx import ld_shared, ld_shared_u16, prmt
from .k6_config import Config
from .tensor_operand import make_put


def make_window(config: Config):
    """A device function: a lane's window of x as operand registers, ``parts`` times two rows of ``window`` registers.

    Register (h, q) of a part holds the window's column q for the channels of k = t + 4*h, or, with 16-bit elements, of
    k = 2*t + 8*h and the next: with q = halo - shift + 2*block + half it is register 2*h + half of A (fragments.py).
    """
    tile = config.tile
    window, row, itemsize = 4 + tile.halo, config.pitch * tile.itemsize, tile.itemsize
    unused, put = tile.halo - tile.reach, make_put(tile.parts, 2 * (4 + tile.halo))
    load4, load2, load_word, load_half = (
        ld_shared(4, float32),
        ld_shared(2, int32),
        ld_shared(1, float32),
        ld_shared_u16,
    )

    @cuda.jit(device=True, inline="always")
    def load_tf32(v, at, x_at, aligned, skip, skip_odd):
        if aligned:
            for h in range(2):
                for q in range(0, window, 4):
                    values = load4(x_at + h * 4 * row + q * itemsize)
                    for z in range(4):
                        put(v, at + h * window + q + z, values[z])
        else:
            for h in range(2):
                for q in range(unused, window):
                    put(v, at + h * window + q, load_word(x_at + h * 4 * row + (q - skip) * itemsize))

    @cuda.jit(device=True, inline="always")
    def load_halves(v, at, x_at, aligned, skip, skip_odd):
        if aligned:
            for h in range(2):
                for q in range(0, window, 4):
                    even = load2(x_at + h * 8 * row + q * itemsize)
                    odd = load2(x_at + (h * 8 + 1) * row + q * itemsize)
                    for z in range(2):
                        v[at + h * window + q + 2 * z] = prmt(even[z], odd[z], 0x5410)
                        v[at + h * window + q + 2 * z + 1] = prmt(even[z], odd[z], 0x7632)
        else:
            even_at, odd_at = x_at - skip * itemsize, x_at + row - skip_odd * itemsize
            for h in range(2):
                for q in range(unused, window):
                    offset = h * 8 * row + q * itemsize
                    v[at + h * window + q] = load_half(even_at + offset) | load_half(odd_at + offset) << 16

    return load_tf32 if tile.kind == "tf32" else load_halves
