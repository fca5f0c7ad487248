"""The operands of k6's products: a lane's window of x, out of a stage and into registers."""

from __future__ import annotations

from numba import cuda, float32, int32

from ..ptx import bits_of, device_function, float_of, ld_shared, ld_shared_u16, prmt
from .k6_config import Config
from .tensor_operand import make_put


def make_window(config: Config):
    """A device function: a lane's window of x as operand registers, ``parts`` times two rows of ``window`` registers.

    Register (h, q) of a part holds the window's column q for the channels of k = t + 4*h, or, with 16-bit elements, of
    k = 2*t + 8*h and the next: with q = halo - shift + 2*block + half it is register 2*h + half of A (fragments.py).
    ``h_step``: bytes from the row of h = 0 to that of h = 1; ``odd_step``: to that of the next channel. ``element``:
    that of the row in register 0. ``straight``: the rows are at multiples of 16 bytes, and rounded where they must be.
    ``rounded``: the copy engine has rounded the window to TF32.
    """
    tile = config.tile
    window, itemsize, split = 4 + tile.halo, config.tile.itemsize, config.tile.parts == 2
    unused, put = tile.halo - tile.reach, make_put(tile.parts, 2 * (4 + tile.halo))
    load4, load2, load_word = ld_shared(4, float32), ld_shared(2, int32), ld_shared(1, int32)

    @device_function
    def clear(v, at, element):
        """Where the window begins before the row does: what a box holds there is the end of the row before."""
        if element < 0:
            for h in range(2):
                for q in range(unused, window):
                    v[at + h * window + q] = v[at + h * window + q] if element + q >= 0 else int32(0)

    # The warp's barrier keeps the compiler from mixing the two ways into one, with predicates: loads that are not made
    # would wait in the same queue.
    @device_function
    def load_tf32(v, at, x_at, h_step, odd_step, element, straight, rounded):
        if straight:
            for h in range(2):
                for q in range(0, window, 4):
                    values = load4(x_at + h * h_step + q * itemsize)
                    for z in range(4):
                        v[at + h * window + q + z] = bits_of(values[z])
        else:
            cuda.syncwarp()
            for h in range(2):
                for q in range(unused, window):
                    v[at + h * window + q] = load_word(x_at + h * h_step + q * itemsize)
            clear(v, at, element)
            if not split and not rounded:
                for z in range(2 * window):
                    put(v, at + z, float_of(v[at + z]))
        if split:
            for z in range(2 * window):
                put(v, at + z, float_of(v[at + z]))

    @device_function
    def load_halves(v, at, x_at, h_step, odd_step, element, straight, rounded):
        if straight:
            for h in range(2):
                for q in range(0, window, 4):
                    even = load2(x_at + h * h_step + q * itemsize)
                    odd = load2(x_at + h * h_step + odd_step + q * itemsize)
                    for z in range(2):
                        v[at + h * window + q + 2 * z] = prmt(even[z], odd[z], 0x5410)
                        v[at + h * window + q + 2 * z + 1] = prmt(even[z], odd[z], 0x7632)
        else:
            cuda.syncwarp()
            for h in range(2):
                for q in range(unused, window):
                    even_at = x_at + h * h_step + q * itemsize
                    v[at + h * window + q] = ld_shared_u16(even_at) | ld_shared_u16(even_at + odd_step) << 16
            clear(v, at, element)

    return load_tf32 if tile.kind == "tf32" else load_halves
