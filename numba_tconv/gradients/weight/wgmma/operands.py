"""How a lane reads rows, and zeros before them.

Taps may meet up to ``padding`` positions before a row, where a map of unaligned rows has other memory. So warps that
read a sample's first stage clear it."""

from numba import cuda, float32, int32

from numba_tconv.gradients.wgmma_ring import CONSUMERS, PRODUCTS, Operands, as_it_came
from numba_tconv.ptx import (
    barrier_sync,
    device_function,
    fence_async,
    ld_shared,
    ld_shared_u16,
    prmt,
    st_shared_f32,
    st_shared_halves,
    wgmma,
)

from .tile import Config, operand_places

# prmt: a word's upper half and the next's lower half; two words' lower halves.
UPPER_AND_LOWER, LOWER_HALVES = 0x5432, 0x5410
BARRIER = 2  # and the next, for alternating warpgroups
NOT_MINE = -1  # another lane clears the row


def make_operands(config: Config) -> Operands:
    blocks, chunk, stride = config.blocks, config.tap_chunk, config.window.stride
    entries, places = config.entries, config.places
    count, raw_count = len(entries), len(places)
    low_places, high_places = (tuple(places.index(entry[z]) for entry in entries) for z in range(2))
    entry_of = tuple(entries.index(entry) for entry in operand_places(config))
    halves = config.itemsize == 2 and stride > 1
    load_word, multiply_all = ld_shared(1, int32), wgmma(config.kind, config.channels)
    load_raw, joined = (ld_shared_u16, LOWER_HALVES) if halves else (load_word, UPPER_AND_LOWER)
    of_piece, sums_of_tap = PRODUCTS // config.pieces, config.channels // 2
    product_bytes, spacing = 32 * stride, config.spacing

    @device_function
    def load(k, registers, first, lane, offset):
        raw = cuda.local.array(raw_count, dtype=int32)
        offset = int32(offset + k // of_piece * spacing + k % of_piece * product_bytes)
        for row in range(2 * blocks):
            for w in range(raw_count):
                raw[w] = load_raw(int32(lane.rows[row] + offset + places[w]))
            for e in range(count):
                low, high = raw[low_places[e]], raw[high_places[e]]
                same = low_places[e] == high_places[e]
                registers[first + row * count + e] = low if same else prmt(low, high, joined)

    @device_function
    def multiply(sums, registers, first, descriptor):
        for block in range(blocks):
            row, next_row = first + 2 * block * count, first + (2 * block + 1) * count
            for b in range(chunk):
                low, high = entry_of[2 * b], entry_of[2 * b + 1]
                multiply_all(sums, (block * chunk + b) * sums_of_tap, registers[row + low], registers[next_row + low],
                             registers[row + high], registers[next_row + high], descriptor, int32(1))  # fmt: skip

    return Operands(load, multiply, make_clear(config) if config.clears else as_it_came, config.operands)


def make_clear(config: Config):
    """Build ``clear``: zeros before the rows of a sample's first stage, four lanes a row."""
    itemsize, lane_rows = config.itemsize, 2 * config.blocks
    threads = 128 if config.alternate else 128 * CONSUMERS
    load_word = ld_shared(1, int32)

    @device_function
    def clear(lane, stage, offset):
        if load_word(int32(lane.flags + 8 * stage)):
            element = int32(lane.first_cleared)
            while element < lane.before:
                for z in range(lane_rows):
                    target = int32(lane.starts[z] + offset + element * itemsize)
                    if lane.starts[z] != NOT_MINE:
                        if itemsize == 4:
                            st_shared_f32(target, float32(0))
                        else:
                            st_shared_halves(target, target, int32(0))
                element = int32(element + 4)
            fence_async()  # the copy engine writes here next
            barrier_sync(lane.barrier, threads)

    return clear
