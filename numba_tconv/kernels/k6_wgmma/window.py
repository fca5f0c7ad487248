"""The register operand of k6's products: a lane's window of x."""

from __future__ import annotations

from numba import cuda, float32, int32

from numba_tconv.kernels.common.tensor_core.split_operand import SPLIT_ROWS, make_split, put_tf32
from numba_tconv.kernels.common.tensor_core.tile import Tile
from numba_tconv.ptx import bits_of, device_function, float_of, ld_shared, prmt, recomputed

from .tile import Config

ALIGNED = 0  # a value of ``together`` (make_window)


def halves(low, high):
    """Return prmt's selector of two halves: 0 and 1 of the first word, 2 and 3 of the second."""
    return sum((2 * half + byte) << (8 * z + 4 * byte) for z, half in enumerate((low, high)) for byte in range(2))


def lane_rows_of(tile: Tile) -> int:
    """Return the rows of x (16-bit: pairs of rows) of which a lane has a window."""
    return SPLIT_ROWS if tile.parts == 2 else 2


def make_beyond(config: Config):
    """Build a device function: the columns of a lane's window before its row, plus 256 times those behind it.

    ``element``: the window's first column, in a row of ``length`` elements.
    """
    window = 4 + config.tile.halo

    @device_function
    def beyond_of(element, length):
        before = min(max(int32(-element), int32(0)), int32(window))
        behind = min(max(int32(element + window - length), int32(0)), int32(window))
        return int32(before | behind << 8)

    return beyond_of


def make_window(config: Config, first: int = 0, end: int | None = None):
    """Build a device function that loads a lane's window as operand registers, ``parts`` times two rows of ``window``.

    Register (h, q) of a part holds column q for channels k = t + 4*h or, with 16-bit elements, k = 2*t + 8*h and the
    next. With q = halo - shift + 2*block + half it is register 2*h + half of A
    (kernels/common/tensor_core/fragments.py). Split operands come from channels t, t + 4, t + 8 and t + 12
    (``split_channel``). Split ahead, the rows are the larger and smaller parts of the first two, then of the others
    (split_ahead.py); only then may ``first`` and ``end``, multiples of four, limit the columns.

    * ``x_at``, ``offset``: address of the window in the first slot; bytes from there, a multiple of 16.
    * ``h_step``, ``odd_step``: bytes from the row of h = 0 to that of h = 1; to the next channel.
    * ``together``: elements a load, 4, 2 or 1, as all rows' alignment allows. ALIGNED: 4, rows begin at multiples of 16
      bytes and are rounded where needed.
    * ``beyond``: whether a lane of the warp reads outside its row, and the lane's columns there (``make_beyond``),
      which become zeros; unused if ALIGNED or split ahead.
    * ``rounded``: the copy engine has rounded to TF32.
    * ``scales``: of split operands (kernels/common/tensor_core/split_operand.py).

    Returns the factor of the products' sums; 1 unless the lane splits.
    """
    tile = config.tile
    window, itemsize, exact = 4 + tile.halo, config.tile.itemsize, config.tile.parts == 2
    unused, lane_rows, ahead = tile.halo - tile.reach, lane_rows_of(tile), config.split_ahead
    register_rows = (0, 2, 1, 3) if ahead else (0, 1, 2, 3)  # larger parts first
    end = window if end is None else end
    split = make_split(window, unused)
    load_word, load_two_words = ld_shared(1, int32), ld_shared(2, int32)
    lower, upper, own, turned = halves(0, 2), halves(1, 3), (halves(0, 3), halves(1, 2)), (halves(3, 0), halves(2, 1))

    @device_function
    def clear(v, at, beyond):
        some, beyond = beyond
        if some:  # uniform in the warp
            beyond = recomputed(beyond)  # saves registers
            before, end = int32(beyond & 255), int32(window - (beyond >> 8))
            for h in range(lane_rows):
                for q in range(unused, window):
                    v[at + h * window + q] = v[at + h * window + q] if before <= q < end else int32(0)

    def make_rows(count):
        load = ld_shared(count, float32)

        @device_function
        def rows(v, at, x_at, h_step):
            for h in range(lane_rows):
                for q in range(first, end, count):
                    values = load(x_at + h * h_step + q * itemsize)
                    for z in range(count):
                        v[at + register_rows[h] * window + q + z] = bits_of(values[z])

        return rows

    fours, twos = make_rows(4), make_rows(2)

    # The barriers keep the compiler from merging the branches into predicated loads. The slowest branch comes first,
    # because tests cost clocks in each stage.
    @device_function
    def load_singles(v, at, x_at, offset, h_step, odd_step, beyond, together, rounded, scales):
        x_at = int32(x_at + offset)
        if together == ALIGNED:
            fours(v, at, x_at, h_step)
        else:
            cuda.syncwarp()
            if together == 1:
                cuda.syncwarp()
                for h in range(lane_rows):
                    for q in range(max(unused, first), end):
                        v[at + register_rows[h] * window + q] = load_word(x_at + h * h_step + q * itemsize)
            elif together == 4:
                fours(v, at, x_at, h_step)
            else:
                cuda.syncwarp()
                twos(v, at, x_at, h_step)
            if not ahead:
                clear(v, at, beyond)
            if not exact and not rounded:
                for z in range(2 * window):
                    put_tf32(v, at + z, float_of(v[at + z]))
        return split(v, at, scales) if exact and not ahead else float32(1)

    @device_function
    def interleave(v, at, even, odd):
        """Turn two columns of each of two channels from a word a channel into a word a column."""
        v[at] = prmt(even, odd, lower)
        v[at + 1] = prmt(even, odd, upper)

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
    def words_within_one(v, at, x_at, offset, h_step, odd_step):
        """Load where one of two neighbouring channels begins within a word."""
        # Only the offset depends on the stage.
        even_within = x_at & 2
        whole_at = int32(int32(x_at + odd_step if even_within else x_at) + offset)
        parted_at = int32(int32((x_at if even_within else x_at + odd_step) & -4) + offset)
        first, second = int32(turned[0] if even_within else own[0]), int32(turned[1] if even_within else own[1])
        for h in range(2):
            parted = load_word(parted_at + h * h_step)
            for q in range(0, window, 2):
                whole = load_word(whole_at + h * h_step + q * itemsize)
                next_parted = load_word(parted_at + h * h_step + (q + 2) * itemsize)
                v[at + h * window + q] = prmt(whole, parted, first)
                v[at + h * window + q + 1] = prmt(whole, next_parted, second)
                parted = next_parted

    @device_function
    def words_within_both(v, at, x_at, h_step, odd_step):
        even_at, odd_at = int32(x_at - 2), int32(x_at + odd_step - 2)
        for h in range(2):
            even, odd = load_word(even_at + h * h_step), load_word(odd_at + h * h_step)
            for q in range(0, window, 2):
                after = h * h_step + (q + 2) * itemsize
                next_even, next_odd = load_word(even_at + after), load_word(odd_at + after)
                v[at + h * window + q] = prmt(even, odd, upper)
                v[at + h * window + q + 1] = prmt(next_even, next_odd, lower)
                even, odd = next_even, next_odd

    @device_function
    def load_halves(v, at, x_at, offset, h_step, odd_step, beyond, together, rounded, scales):
        own_at = int32(x_at + offset)
        if together == ALIGNED:
            pairs_of_words(v, at, own_at, h_step, odd_step)
        else:
            cuda.syncwarp()
            if odd_step & 2:
                words_within_one(v, at, x_at, offset, h_step, odd_step)
            elif together == 4:
                cuda.syncwarp()
                pairs_of_words(v, at, own_at, h_step, odd_step)
            elif together == 2:
                cuda.syncwarp()
                words(v, at, own_at, h_step, odd_step)
            else:
                cuda.syncwarp()
                words_within_both(v, at, own_at, h_step, odd_step)
            clear(v, at, beyond)
        return float32(1)

    return load_singles if itemsize == 4 else load_halves
