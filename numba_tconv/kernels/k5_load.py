"""The loading half of k5: the copies of a stage, and a lane's window of it in registers."""

from __future__ import annotations

from numba import cuda, float32, int32, int64, uint32, uint64

from ..ptx import cp_async_to, ld_shared, prmt, recomputed
from .k5_config import Config
from .tensor_operand import make_put

BATCH = 8  # elements that a thread has under way where cp.async cannot copy them


def make_load(config: Config):
    """Two device functions: ``aim``, where the window's vectors lie in x, and ``load``, the copies of one stage."""
    tile, threads, depth, pitch = config.tile, config.threads, config.depth, config.pitch
    itemsize, vector, per_row = tile.itemsize, config.x_vector, config.copies_a_row
    before, advance, shift = tile.overlap + tile.lead, tile.advance, tile.chunk_shift
    x_stage, w_stage = config.x_stage, config.w_stage
    row_lanes = max(1, threads // depth)  # threads that copy one row of x
    rows_at_once = threads // row_lanes
    row_copies, w_copies = -(-per_row // row_lanes), -(-w_stage // (16 * threads))
    by_copy = vector * itemsize >= 4
    table_at, entry = config.table, ld_shared(4, int32)
    copy_x, copy_w = cp_async_to(max(4, vector * itemsize)), cp_async_to(16)

    @cuda.jit(device=True, inline="always")
    def joined(low, high):
        return int64(high) << 32 | int64(uint32(low))

    @cuda.jit(device=True, inline="always")
    def aim(table, column_tile, chunk, batch, length, columns, first, stride_n, stride_l):
        """Where each vector of the window lies in x, at channel 0, and how many bytes of it are in the signal."""
        n, j = divmod(column_tile * advance - before - chunk * shift, columns)
        p = int32(cuda.threadIdx.x)
        while p < per_row:
            m, c = n, j + p * vector
            while c >= columns:
                m, c = m + 1, c - columns
            i = first + c
            inside = m >= 0 and m < batch and i >= 0 and i < length
            at = m * stride_n + i * stride_l if inside else int64(0)
            entry = int32(table_at // 4 + 4 * p)
            table[uint64(entry)], table[uint64(entry + 1)] = int32(at & 0xFFFFFFFF), int32(at >> 32)
            table[uint64(entry + 2)] = int32(min(int64(vector), length - i) * itemsize) if inside else int32(0)
            p = int32(p + threads)

    @cuda.jit(device=True, inline="always")
    def load(base, at, x, values, bits, offset, stride_c, channels_left, w, w_offset):
        """Start the copies of one stage, which begins at byte ``at`` of the block's shared memory."""
        thread = recomputed(int32(cuda.threadIdx.x))  # what follows from it is not worth registers between the stages
        row, p0 = int32(uint32(thread) // uint32(row_lanes)), int32(uint32(thread) % uint32(row_lanes))
        target, table = int32(base + at), int32(base + table_at + p0 * 16)
        from_w, to_w = w_offset + thread * (16 // itemsize), int32(target + x_stage + thread * 16)
        for z in range(w_copies):
            if w_stage % (16 * threads) == 0 or z < w_copies - 1 or thread < w_stage // 16 % threads:
                copy_w(to_w + z * (threads * 16), w, from_w + z * (threads * 16 // itemsize), 16)
        while row < depth:
            from_row = offset + row * stride_c
            exists = row < channels_left
            if by_copy:
                to_x = int32(target + (row * pitch + p0 * vector) * itemsize)
                for z in range(row_copies):
                    if (z + 1) * row_lanes <= per_row or p0 < per_row - z * row_lanes:
                        low, high, size, _ = entry(table + z * (row_lanes * 16))
                        if not exists:
                            size = int32(0)
                        copy_x(to_x + z * (row_lanes * vector * itemsize), x, joined(low, high) + from_row, size)
            else:
                p = int32(p0)
                while p < per_row:  # several elements at a time, for a load from memory takes long
                    for z in range(BATCH):
                        q = int32(min(p + z * row_lanes, per_row - 1))
                        low, high, size, _ = entry(base + table_at + q * 16)
                        values[z] = x[uint64(joined(low, high) + from_row)] if exists and size > 0 else 0
                    for z in range(BATCH):
                        q = int32(p + z * row_lanes)
                        if q < per_row:
                            bits[uint64(at // itemsize + row * pitch + q)] = values[z]
                    p = int32(p + BATCH * row_lanes)
            row = int32(row + rows_at_once)

    return aim, load


def make_window(config: Config):
    """A device function: a lane's window of x as operand registers, ``parts`` times two rows of ``window`` registers.

    Register (h, q) holds the window's column q for channel t + 4*h of a product or, with 16-bit elements, for channels
    2*t + 8*h and the next: register h of B (fragments.py) for the lane's column q - halo and tap 0.
    """
    tile, window, unused = config.tile, config.window, config.halo - config.tile.reach
    row, put = config.pitch * tile.itemsize, make_put(tile.parts, 2 * config.window)
    load4, load_pairs = ld_shared(4, float32), ld_shared(4, int32)

    @cuda.jit(device=True, inline="always")
    def load_tf32(v, x_at):
        for h in range(2):
            for q in range(0, window, 4):
                values = load4(x_at + h * 4 * row + q * 4)
                for z in range(4):
                    if q + z >= unused:
                        put(v, h * window + q + z, values[z])

    @cuda.jit(device=True, inline="always")
    def load_halves(v, x_at):
        for h in range(2):
            for q in range(0, window, 8):
                even, odd = load_pairs(x_at + h * 8 * row + q * 2), load_pairs(x_at + (h * 8 + 1) * row + q * 2)
                for z in range(4):
                    v[h * window + q + 2 * z] = prmt(even[z], odd[z], 0x5410)
                    v[h * window + q + 2 * z + 1] = prmt(even[z], odd[z], 0x7632)

    return load_tf32 if tile.kind == "tf32" else load_halves
