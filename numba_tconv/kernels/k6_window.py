"""The operands of k6's products: a lane's window of x, out of a stage and into registers."""

from __future__ import annotations

from numba import cuda, float32, int32

from ..ptx import bits_of, device_function, float_of, ld_shared, prmt
from .k6_config import Config
from .tensor_operand import make_put


def make_window(config: Config):
    """A device function: a lane's window of x as operand registers, ``parts`` times two rows of ``window`` registers.

    Register (h, q) of a part holds the window's column q for the channels of k = t + 4*h, or, with 16-bit elements, of
    k = 2*t + 8*h and the next: with q = halo - shift + 2*block + half it is register 2*h + half of A (fragments.py).
    ``h_step``: bytes from the row of h = 0 to that of h = 1; ``odd_step``: to that of the next channel. ``element``:
    that of the row in register 0. ``together``: elements that may be loaded at a time, 4, 2 or 1, since all rows begin
    at multiples of as many; 0: 4, and the rows begin at multiples of 16 bytes, rounded where they must be.
    ``rounded``: the copy engine has rounded the window to TF32.
    """
    tile = config.tile
    window, itemsize, split = 4 + tile.halo, config.tile.itemsize, config.tile.parts == 2
    unused, put = tile.halo - tile.reach, make_put(tile.parts, 2 * (4 + tile.halo))
    load_word, load_two_words = ld_shared(1, int32), ld_shared(2, int32)

    @device_function
    def clear(v, at, element):
        """Where the window begins before the row does: what a box holds there is the end of the row before."""
        if element < 0:
            for h in range(2):
                for q in range(unused, window):
                    v[at + h * window + q] = v[at + h * window + q] if element + q >= 0 else int32(0)

    def make_rows(count):
        load = ld_shared(count, float32)

        @device_function
        def rows(v, at, x_at, h_step):
            for h in range(2):
                for q in range(0, window, count):
                    values = load(x_at + h * h_step + q * itemsize)
                    for z in range(count):
                        v[at + h * window + q + z] = bits_of(values[z])

        return rows

    fours, twos = make_rows(4), make_rows(2)

    # The warp's barrier keeps the compiler from mixing the ways into one, with predicates: loads that are not made
    # would wait in the same queue.
    @device_function
    def load_tf32(v, at, x_at, h_step, odd_step, element, together, rounded):
        if together == 0:
            fours(v, at, x_at, h_step)
        else:
            cuda.syncwarp()
            if together == 4:
                fours(v, at, x_at, h_step)
            elif together == 2:
                cuda.syncwarp()
                twos(v, at, x_at, h_step)
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
    def interleave(v, at, even, odd):
        """Two neighbours of each of two channels, a word a channel, as a word a column."""
        v[at] = prmt(even, odd, 0x5410)
        v[at + 1] = prmt(even, odd, 0x7632)

    @device_function
    def pairs_of_words(v, at, x_at, h_step, odd_step):
        for h in range(2):
            for q in range(0, window, 4):
                even = load_two_words(x_at + h * h_step + q * itemsize)
                odd = load_two_words(x_at + h * h_step + odd_step + q * itemsize)
                for z in range(2):
                    interleave(v, at + h * window + q + 2 * z, even[z], odd[z])

    @device_function
    def words(v, at, x_at, h_step, odd_step):
        for h in range(2):
            for q in range(0, window, 2):
                even_at = x_at + h * h_step + q * itemsize
                interleave(v, at + h * window + q, load_word(even_at), load_word(even_at + odd_step))

    @device_function
    def words_in_words(v, at, even_at, odd_at, h_step):
        """Where two neighbours may lie in two words: selectors say which half of a word is the first."""
        of_even, of_odd = int32(0x5432 if even_at & 2 else 0x3210), int32(0x5432 if odd_at & 2 else 0x3210)
        even_at, odd_at = int32(even_at & -4), int32(odd_at & -4)
        for h in range(2):
            even, odd = load_word(even_at + h * h_step), load_word(odd_at + h * h_step)
            for q in range(0, window, 2):
                after = h * h_step + (q + 2) * itemsize
                next_even, next_odd = load_word(even_at + after), load_word(odd_at + after)
                interleave(v, at + h * window + q, prmt(even, next_even, of_even), prmt(odd, next_odd, of_odd))
                even, odd = next_even, next_odd

    @device_function
    def load_halves(v, at, x_at, h_step, odd_step, element, together, rounded):
        if together == 0:
            pairs_of_words(v, at, x_at, h_step, odd_step)
        else:
            cuda.syncwarp()
            if together == 4:
                pairs_of_words(v, at, x_at, h_step, odd_step)
            elif together == 2:
                cuda.syncwarp()
                words(v, at, x_at, h_step, odd_step)
            else:
                cuda.syncwarp()
                words_in_words(v, at, x_at, int32(x_at + odd_step), h_step)
            clear(v, at, element)

    return load_tf32 if tile.kind == "tf32" else load_halves
