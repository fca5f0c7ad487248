"""A lane's window in registers, and its products."""

from typing import NamedTuple

from numba import cuda, float32, int32, uint64

from numba_tconv.kernels.common.tensor_core.split_operand import SPLIT_ROWS, make_split, put_tf32
from numba_tconv.ptx import bits_of, device_function, ld_shared, mma, prmt
from numba_tconv.runtime.elements import ELEMENTS

from .tile import RUN, Config

# prmt's selectors: a word, or its upper half and the next's lower.
OWN, NEXT = 0x3210, 0x5432


class Selectors(NamedTuple):
    """OWN or NEXT, by parity of the channel."""

    even: int
    odd: int


def make_window(config: Config):
    """Build the load of a lane's window as operands: two rows of ``window`` registers, four of split operands.

    Register (h, q) holds column q of channel t + 4*h or, in 16 bits, of 2*t + 8*h and the next: register h of B for
    column q - halo and tap 0. Split operands: fragments.split_channel. Returns the products' factor."""
    tile, window, unused = config.tile, config.window, config.halo - config.tile.reach
    row, row_words = config.pitch * tile.itemsize, window // 2 + 1
    exact, split = tile.operand_halves == 2, make_split(window, unused)
    lane_rows = SPLIT_ROWS if exact else 2
    load4, load_pairs, load_pair = ld_shared(4, float32), ld_shared(4, int32), ld_shared(1, int32)

    @device_function
    def load_singles(v, x_at, selectors, scales):
        for h in range(lane_rows):
            for q in range(0, window, 4):
                values = load4(x_at + h * 4 * row + q * 4)
                for z in range(4):
                    if exact:
                        v[h * window + q + z] = bits_of(values[z])
                    elif q + z >= unused:
                        put_tf32(v, h * window + q + z, values[z])
        return split(v, 0, scales) if exact else float32(1)

    @device_function
    def load_halves(v, x_at, selectors, scales):
        for h in range(2):
            for q in range(0, window, 8):
                even, odd = load_pairs(x_at + h * 8 * row + q * 2), load_pairs(x_at + (h * 8 + 1) * row + q * 2)
                for z in range(4):
                    v[h * window + q + 2 * z] = prmt(even[z], odd[z], 0x5410)
                    v[h * window + q + 2 * z + 1] = prmt(even[z], odd[z], 0x7632)
        return float32(1)

    @device_function
    def load_words(words, row_at, selector):
        """A row's words, each combined with the next."""
        for q in range(0, window, 8):
            values = load_pairs(row_at + q * 2)
            for z in range(4):
                words[q // 2 + z] = values[z]
        words[row_words - 1] = load_pair(row_at + window * 2)
        for z in range(row_words - 1):
            words[z] = prmt(words[z], words[z + 1], selector)

    @device_function
    def load_shifted(v, x_at, selectors, scales):
        even, odd = cuda.local.array(row_words, dtype=int32), cuda.local.array(row_words, dtype=int32)
        for h in range(2):
            load_words(even, x_at + h * 8 * row, selectors.even)
            load_words(odd, x_at + (h * 8 + 1) * row, selectors.odd)
            for z in range(row_words - 1):
                v[h * window + 2 * z] = prmt(even[z], odd[z], 0x5410)
                v[h * window + 2 * z + 1] = prmt(even[z], odd[z], 0x7632)
        return float32(1)

    if config.shifted:
        return load_shifted
    return load_singles if tile.itemsize == 4 else load_halves


def make_products(config: Config):
    """Build a window's products; ``w_at``: address of the lane's fragments."""
    tile, window, halo, step = config.tile, config.window, config.halo, config.tile.taps.step
    halves, chunk, fragments = tile.operand_halves, tile.tap_chunk, config.fragments
    tap_weights = tile.rows * tile.depth * tile.operand_size
    load_fragment, multiply = ld_shared(4, int32), mma(tile.kind)

    @device_function
    def products(acc, v, w_at):
        a = cuda.local.array(4, dtype=int32)
        for product in range(2 * halves - 1):  # large products last: small ones meet small sums
            x_half = 1 if halves == 2 and product == 0 else 0
            w_half = 1 if halves == 2 and product == 1 else 0
            for b in range(chunk):
                q = 2 * x_half * window + halo - b * step
                for m in range(fragments):
                    a[0], a[1], a[2], a[3] = load_fragment(w_at + (w_half * chunk + b) * tap_weights + m * 512)
                    for j in range(RUN):
                        multiply(acc, m * (RUN * 4) + 4 * j, a, 0, v[q + j], v[q + window + j])

    return products


def make_start(config: Config):
    """Build ``load_biases`` (zeros if the store adds them) and ``start``, which sets the sums to them."""
    fragments, add_bias = config.fragments, not config.tile.has_gaps
    reciprocal = config.tile.reciprocal
    load_type = ELEMENTS[config.tile.dtype].load

    @device_function
    def load_biases(biases, weights, lane_row, row_tile):
        for r in range(2 * fragments):
            biases[r] = float32(0)
            if add_bias and weights.has_bias:
                channel = int32(((lane_row + 8 * r) * reciprocal) >> 16)
                if channel < row_tile.channels_left:
                    biases[r] = float32(load_type(weights.bias[uint64(row_tile.first_channel + channel)]))

    @device_function
    def start(sums, biases):
        for m in range(fragments):
            for j in range(RUN):
                for e in range(4):
                    sums[(m * RUN + j) * 4 + e] = biases[2 * m + e // 2]

    return load_biases, start
