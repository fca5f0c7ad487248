"""The register operand: a lane's window of x."""

from numba import cuda, float32, int32

from numba_tconv.kernels.common.tensor_core.split_operand import SPLIT_ROWS, make_split, put_tf32
from numba_tconv.kernels.common.tensor_core.tile import Tile
from numba_tconv.ptx import bits_of, device_function, float_of, ld_shared, prmt, recomputed

from .arguments import View
from .tile import Config
from .windows import make_window_start

ALIGNED = 0  # a value of View.together


def halves(low, high):
    """prmt's selector of two halves: 0, 1 of the first word, 2, 3 of the second."""
    return sum((2 * half + byte) << (8 * z + 4 * byte) for z, half in enumerate((low, high)) for byte in range(2))


def lane_rows_of(tile: Tile) -> int:
    """Rows of a lane's window (16-bit: pairs of channels)."""
    return SPLIT_ROWS if tile.operand_halves == 2 else 2


def make_beyond(config: Config):
    """Build ``beyond``: a window's columns before its row, plus 256 times those behind; ``element``: its first."""
    window = 4 + config.tile.halo

    @device_function
    def beyond_of(element, length):
        before = min(max(int32(-element), int32(0)), int32(window))
        behind = min(max(int32(element + window - length), int32(0)), int32(window))
        return int32(before | behind << 8)

    return beyond_of


def make_window(config: Config, first: int = 0, end: int | None = None):
    """Build the load of a lane's window as operands: two rows of ``window`` registers, four of split operands.

    Register (h, q) holds column q of channel t + 4*h or, in 16 bits, of 2*t + 8*h and the next. With q = halo - shift +
    2*block + half it is register 2*h + half of A (tensor_core/fragments.py). Split operands have the channels of
    fragments.split_channel; split ahead, hi and lo of the first two, then of the others. Only then may ``first`` and
    ``end``, multiples of four, limit the columns.

    ``offset``: bytes from the first stage, a multiple of 16. View.together is 4, 2 or 1, or ALIGNED: rounded, 16-byte
    aligned rows. Returns the products' factor; 1 unless the lane splits."""
    if config.tile.itemsize == 2:
        return _make_halves(config)
    return _make_singles(config, first, 4 + config.tile.halo if end is None else end)


def _make_clear(config: Config):
    """Build ``clear``: zeros in the columns outside the row."""
    window, unused, lane_rows = 4 + config.tile.halo, config.tile.halo - config.tile.reach, lane_rows_of(config.tile)

    @device_function
    def clear(v, at, view):
        if view.some_outside:  # uniform in the warp
            beyond = recomputed(view.beyond)
            before, end = int32(beyond & 255), int32(window - (beyond >> 8))
            for h in range(lane_rows):
                for q in range(unused, window):
                    v[at + h * window + q] = v[at + h * window + q] if before <= q < end else int32(0)

    return clear


# ``syncwarp`` keeps branches from becoming predicated loads. The slowest way is tested first: tests cost clocks.


def _make_singles(config: Config, first: int, end: int):
    """``make_window`` of 32-bit elements."""
    tile, ahead = config.tile, config.split_ahead
    window, itemsize, exact, unused = 4 + tile.halo, tile.itemsize, tile.operand_halves == 2, tile.halo - tile.reach
    lane_rows, load_word, clear = lane_rows_of(tile), ld_shared(1, int32), _make_clear(config)
    register_rows = (0, 2, 1, 3) if ahead else (0, 1, 2, 3)  # hi first
    split = make_split(window, unused)

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

    @device_function
    def load_singles(v, at, offset, view, lane):
        h_step, together = lane.h_step, view.together
        x_at = int32(view.address + offset)
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
                clear(v, at, view)
            if not exact and not view.rounded:
                for z in range(2 * window):
                    put_tf32(v, at + z, float_of(v[at + z]))
        return split(v, at, lane.scales) if exact and not ahead else float32(1)

    return load_singles


def _make_halves(config: Config):
    """``make_window`` of 16-bit elements."""
    window, itemsize, clear = 4 + config.tile.halo, config.tile.itemsize, _make_clear(config)
    load_word, load_two_words = ld_shared(1, int32), ld_shared(2, int32)
    lower, upper, own, turned = halves(0, 2), halves(1, 3), (halves(0, 3), halves(1, 2)), (halves(3, 0), halves(2, 1))

    @device_function
    def interleave(v, at, even, odd):
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
        """One of two channels begins within a word."""
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
    def load_halves(v, at, offset, view, lane):
        h_step, odd_step, together = lane.h_step, lane.odd_step, view.together
        own_at = int32(view.address + offset)
        if together == ALIGNED:
            pairs_of_words(v, at, own_at, h_step, odd_step)
        else:
            cuda.syncwarp()
            if odd_step & 2:
                words_within_one(v, at, view.address, offset, h_step, odd_step)
            elif together == 4:
                cuda.syncwarp()
                pairs_of_words(v, at, own_at, h_step, odd_step)
            elif together == 2:
                cuda.syncwarp()
                words(v, at, own_at, h_step, odd_step)
            else:
                cuda.syncwarp()
                words_within_both(v, at, own_at, h_step, odd_step)
            clear(v, at, view)
        return float32(1)

    return load_halves


def make_view(config: Config):
    """Build ``view_of``: a lane's View, for the tile at sample ``n`` and column ``j``.

    ``column``: the lane's window in the tile; ``x_at``: its address if windows are aligned."""
    tile = config.tile
    itemsize, vector, lead, halo = tile.itemsize, 16 // tile.itemsize, tile.lead, tile.halo
    shift, before = tile.chunk_shift, tile.overlap + lead
    # Consumers round what the copy engine has not.
    some_rounded, ahead = tile.precision == "tf32", config.split_ahead
    window_start, beyond_of = make_window_start(config, int32), make_beyond(config)

    @device_function
    def view_of(n, j, chunk, x, column, x_at):
        aligned, samples = x.fetch.aligned, x.samples
        rounded, some, beyond, together = False, False, int32(0), int32(4)
        if some_rounded or not aligned:
            if not aligned:
                # Samples' columns are multiples of eight.
                begin = int32(int32(x.early + samples.first_column + j) - int32(before + chunk * shift))
                x_at = int32(x_at + (begin & (vector - 1)) * itemsize)
                begins = int32(begin | int32(x.stride_c))
                together = int32(1 if begins & 1 else 2 if begins & 2 else 4)
            if x.fetch.boxed:
                _, i, rounded = window_start(
                    n, j, chunk, True, x.fetch.whole_tiles, samples.length, samples.columns, samples.first_column
                )
                if not (aligned or ahead):
                    if rounded:
                        beyond = beyond_of(int32(i + column + lead - halo), int32(samples.length))
                    some = cuda.any_sync(0xFFFFFFFF, beyond != 0)
        if aligned and (rounded or not some_rounded):
            together = int32(ALIGNED)
        return View(x_at, rounded, some, beyond, together)

    return view_of
