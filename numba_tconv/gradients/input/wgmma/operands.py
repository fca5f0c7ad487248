"""A stage's windows: where they begin, where a lane reads, zeros beside the signal.

Stages may cut a channel's taps: a window's first ``phase`` entries are earlier stages'. A shared table holds a period's
places; a lane reads its own from the stage's phase on.

Memory beside rows in sheared boxes counts as zero: 64 bits a position say which entries meet the signal."""

from numba import cuda, int32, uint64

from numba_tconv.gradients.wgmma_ring import BLOCK, CONSUMERS, PRODUCTS, ROW, THREADS, Operands, as_it_came
from numba_tconv.ptx import (
    device_function,
    ld_shared,
    ld_shared_u16,
    prmt,
    recomputed,
    st_shared_b32,
    st_shared_v2_b32,
    wgmma,
)

from .arguments import Ends, Lane, Window
from .tile import Config, entry_of, place_of

BITS = 64


def make_advance(config: Config):
    """Build the step to the next stage's map row and phase."""
    rows, step, period = config.row_step, config.phase_step, config.period

    @device_function
    def advance(row, phase):
        row, phase = int32(row + rows), int32(phase + step)
        if step and phase >= period:
            row, phase = int32(row + 1), int32(phase - period)
        return row, phase

    return advance


def make_start(config: Config):
    """Build (stage) -> its windows' first map row, and its phase."""
    rows, entries, period, through = config.row_step, config.entries, config.period, config.through

    @device_function
    def start(stage):
        if through:
            return int32(stage * entries // period), int32(stage * entries % period)
        return int32(stage * rows), int32(0)

    return start


def make_fill(config: Config):
    """Build ``fill``, by all threads: the shared table of entries' places."""
    entries, entry_bytes, itemsize, halves = config.table_entries, config.table_bytes, config.itemsize, config.halves
    kernel_size, width, dilation, sheared = config.kernel_size, config.width, config.dilation, config.sheared
    place = device_function(place_of)

    @device_function
    def fill(table, thread, shear):
        entry = int32(thread)
        while entry < entries:
            target = int32(table + entry * entry_bytes)
            low = int32(place(entry, kernel_size, width, dilation, sheared, shear) * itemsize)
            if halves:
                high = int32(place(int32(entry + 1), kernel_size, width, dilation, sheared, shear) * itemsize)
                st_shared_v2_b32(target, low, high)
            else:
                st_shared_b32(target, low)
            entry = recomputed(int32(entry + THREADS))

    return fill


def make_lane(config: Config):
    """Build two device functions on a consumer's local arrays.

    The first fills and returns a Window's ``rows`` and ``places``. The second begins a tile: it sets the phase and,
    where the warp meets a signal's end, ``first`` and ``meets``, and returns the Lane."""
    x_bytes, spacing, piece, stride, blocks = config.b_bytes, config.spacing, config.piece, config.stride, config.blocks
    kernel_size, width, dilation, sheared = config.kernel_size, config.width, config.dilation, config.sheared
    itemsize, neighbours, vector = config.itemsize, 4 // config.itemsize, 16 // config.itemsize
    entries, clears, split_k, table_bytes = config.entries, config.clears, config.split_k, config.table_bytes
    entry, place, table_offset = device_function(entry_of), device_function(place_of), config.words + 8 * CONSUMERS
    lanes_entries, last_tap = 2 if config.halves else 1, (kernel_size - 1) * dilation
    start, (bits_of, _), warpgroup_rows = make_start(config), make_bits(config), config.warpgroup_rows

    @device_function
    def row_of(consumer, z):
        row = 16 * consumer.warp + (consumer.lane >> 2) + z // 2 * BLOCK + z % 2 * 8
        return int32(row + warpgroup_rows * consumer.warpgroup)

    @device_function
    def window_of(rows, places, phase, shape, grad_rows, base, consumer):
        lane = consumer.lane
        for z in range(2 * blocks):
            m = row_of(consumer, z)
            element = m % piece * stride + (int32(shape.first) & (vector - 1))
            rows[z] = int32(base + x_bytes + m // piece * spacing + element * itemsize)
        for z in range(2 * PRODUCTS * lanes_entries):
            e = int32(entry(int32(z // lanes_entries), lane & 3, neighbours) + z % lanes_entries)
            e = int32(e if e < entries else 0)
            places[z] = int32(place(e, kernel_size, width, dilation, sheared, int32(grad_rows.shear)) * itemsize)
        first_entry = int32(entry(int32(0), lane & 3, neighbours))
        table = int32(base + table_offset + first_entry * table_bytes)
        return Window(rows, places, first_entry, table, phase)

    @device_function
    def begin_tile(window, first, meets, tile, grid, shape, grad_rows, consumer):
        window.phase[0], reached = int32(0), int32(0)
        if split_k:
            _, begins = start(int32(tile.split * int32(grid.tile_stages)))
            window.phase[0] = int32(begins * table_bytes)
        if clears:
            for z in range(2 * blocks):
                first[z] = int32((tile.position + row_of(consumer, z)) * stride + shape.first)
                reached |= int32(first[z] < 0 or first[z] + last_tap >= grad_rows.length)
            reached = int32(cuda.any_sync(0xFFFFFFFF, reached))
            if reached:
                for z in range(2 * blocks):
                    tap = int32(window.phase[0] // table_bytes % kernel_size)
                    meets[z] = bits_of(first[z], tap, int32(grad_rows.length))
        return Lane(window, Ends(reached, first, meets, int32(grad_rows.length)))

    return window_of, begin_tile


def make_prepare(config: Config):
    """Build ``prepare``: a lane's places in a stage, and which entries meet the signal.

    Phase and first half of ``meets`` become the next stage's, the second half this one's."""
    through, clears, lane_rows = config.through, config.clears, 2 * config.blocks
    halves, entry_bytes, kernel_size = config.halves, config.table_bytes, config.kernel_size
    step, period = config.phase_step * entry_bytes, config.period * entry_bytes
    product_half = 4 * 4 // config.itemsize * entry_bytes  # from a lane's places to eight registers' columns on
    load_word, load_pair = ld_shared(1, int32), ld_shared(2, int32)
    bits_of, advanced = make_bits(config)
    if not through and not clears:
        return as_it_came

    @device_function
    def prepare(lane, stage, offset):
        places, phase, ends = lane.window.places, lane.window.phase, lane.ends
        if through:
            source = int32(lane.window.table + phase[0])
            for z in range(2 * PRODUCTS):
                if halves:
                    places[2 * z], places[2 * z + 1] = load_pair(int32(source + z * product_half))
                else:
                    places[z] = load_word(int32(source + z * product_half))
            after = int32(phase[0] + step)
            phase[0] = int32(after - period if after >= period else after)
        if clears and ends.reached:
            for z in range(lane_rows):
                ends.meets[lane_rows + z] = ends.meets[z]
                if kernel_size <= BITS:
                    ends.meets[z] = advanced(ends.meets[z])
                else:
                    tap = int32(phase[0] // entry_bytes % kernel_size)
                    ends.meets[z] = bits_of(ends.first[z], tap, ends.length)

    return prepare


def make_bits(config: Config):
    """Build two device functions of 64 bits: bit j says whether entry j of a stage meets the signal at a position.

    The first makes them: tap 0 meets element ``first``, entry 0 has ``tap``, the signal ``length`` elements. The
    second, for at most 64 taps, advances them by a stage."""
    kernel_size, dilation, step = config.kernel_size, config.dilation, config.phase_step % config.kernel_size

    @device_function
    def below(bit):
        one = uint64(1) << uint64(min(max(int32(bit - 1), int32(0)), int32(BITS - 1)))
        return uint64(one + uint64(one - uint64(1))) if bit > 0 else uint64(0)

    @device_function
    def bits_of(first, tap, length):
        begin = int32((max(int32(-first), int32(0)) + dilation - 1) // dilation)
        end = int32(min(int32((max(int32(length - first), int32(0)) + dilation - 1) // dilation), int32(kernel_size)))
        after = int32(kernel_size - tap)  # the next channel's first bit
        if kernel_size > BITS:
            this_channel = uint64(below(int32(end - tap)) & ~below(int32(begin - tap)))
            return this_channel | uint64(below(int32(after + end)) & ~below(int32(after + begin)))
        bits, taps = uint64(below(end) & ~below(begin)), kernel_size
        while taps < BITS:
            bits |= uint64(bits << uint64(taps))
            taps *= 2
        return uint64(bits >> uint64(tap)) | uint64(uint64(bits << uint64(after - 1)) << uint64(1))

    @device_function
    def advanced(bits):
        return uint64(bits >> uint64(step)) | uint64(bits << uint64(kernel_size - step)) if step else bits

    return bits_of, advanced


def make_keep(config: Config):
    """Build ``keep``: a loaded register, with zeros beside the signal.

    ``z`` counts a lane's registers of a position. prmt spreads a mask's bit from the top of its byte."""
    neighbours, halves = 4 // config.itemsize, config.itemsize == 2

    @device_function
    def keep(value, bits, z, first_entry):
        byte = int32(z * neighbours // 2)
        word, up = int32(bits >> uint64(byte // 4 * 32)), int32(7 - first_entry)
        if halves:
            mask = prmt(int32(word << up), int32(word << (up - 1)), int32(0xCC88 + 0x1111 * (byte % 4)))
        else:
            moved = int32(word << (up - z % 2 * 4))
            mask = prmt(moved, moved, int32(0x8888 + 0x1111 * byte))
        return value & mask

    return keep


def make_operands(config: Config) -> Operands:
    blocks, sums_of_block, entries = config.blocks, config.channels // 2, config.entries
    neighbours, halves = 4 // config.itemsize, config.halves
    lanes_entries = 2 if halves else 1
    entry_at = device_function(entry_of)
    load_word, multiply_all = ld_shared(1, int32), wgmma(config.kind, config.channels)
    keep, clears, lane_rows = make_keep(config), config.clears, 2 * blocks
    masked = entries * config.itemsize < ROW  # the row goes on with the next channel

    @device_function
    def load_register(row, places, z, entry):
        if halves:
            low, high = ld_shared_u16(int32(row + places[z])), ld_shared_u16(int32(row + places[z + 1]))
            if masked:
                low = low if entry < entries else int32(0)
                high = high if entry + 1 < entries else int32(0)
            return low | high << 16
        value = load_word(int32(row + places[z]))
        if masked:
            value = value if entry < entries else int32(0)
        return value

    @device_function
    def load(k, registers, first, lane, offset):
        window, ends = lane.window, lane.ends
        for half in range(2):
            entry = int32(window.first_entry + entry_at(int32(2 * k + half), int32(0), neighbours))
            for row in range(lane_rows):
                z = first + row // 2 * 4 + 2 * half + row % 2
                place = (2 * k + half) * lanes_entries
                registers[z] = load_register(int32(window.rows[row] + offset), window.places, place, entry)
        if clears and ends.reached:
            for half in range(2):
                for row in range(lane_rows):
                    z = first + row // 2 * 4 + 2 * half + row % 2
                    bits = ends.meets[lane_rows + row]
                    registers[z] = keep(registers[z], bits, int32(2 * k + half), window.first_entry)

    @device_function
    def multiply(sums, registers, first, descriptor):
        for block in range(blocks):
            z = first + 4 * block
            multiply_all(sums, block * sums_of_block, registers[z], registers[z + 1], registers[z + 2],
                         registers[z + 3], descriptor, int32(1))  # fmt: skip

    return Operands(load, multiply, make_prepare(config), 4 * blocks)
