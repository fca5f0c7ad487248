"""The mainloop of k6: a consumer warpgroup's products over the stages of a tile."""

from __future__ import annotations

from numba import float32, int32, int64, uint32

from numba_tconv.kernels.common.tensor_core.split_operand import MOST_SPLIT_TAPS
from numba_tconv.ptx import (
    device_function,
    ld_shared,
    mbarrier_arrive,
    mbarrier_wait,
    recomputed,
    wgmma,
    wgmma_commit,
    wgmma_descriptor,
    wgmma_fence,
    wgmma_wait,
)

from .epilogue.bulk import make_hand_over
from .tile import BLOCKS, Config
from .window import lane_rows_of, make_window

STRIDE = 128  # bytes from a core matrix of the weights to the next along n


def make_stages(config: Config):
    """Build ``stages``, the mainloop over one tile and tap chunk: wait for a stage, load, multiply, release the slot.

    With resident weights a slot is released once its products are issued: the window is in registers. Tensor cores read
    streamed weights themselves, so their slot is released when the products are done. Every thread arrives on
    ``empty``.

    In tf32x3 at most MOST_SPLIT_TAPS taps are summed in ``acc``, smallest products first, and then added to ``total``
    on CUDA cores, because tensor cores truncate. Power limits the clock there, so fewer instructions matter more than
    overlap.
    """
    tile, resident, unroll, in_turn = config.tile, config.resident, config.unroll, not config.paired
    single = config.depths == 1  # each depth is a stage
    rows, parts, chunk, step = tile.rows, tile.parts, tile.tap_chunk, tile.taps.step
    halo, window, tap_weights = tile.halo, 4 + tile.halo, rows * tile.depth * tile.operand_size
    sums, all_sums, exact, several_chunks = rows // 2, BLOCKS * rows // 2, parts == 2, tile.several_chunks
    tap_groups = -(-chunk // MOST_SPLIT_TAPS)
    # To save registers, the rest of a wide window is loaded when half of the first taps' products are done.
    first_column = 0
    if config.split_ahead and tap_groups > 1 and not several_chunks:
        first_column = max(halo - (chunk // tap_groups - 1) * step, 0) // 4 * 4
    multiply_all, load_window = wgmma(tile.kind, rows), make_window(config, first_column)
    load_rest = make_window(config, 0, first_column)
    wait_for_all, wait_for_older, wait_for_older_block = wgmma_wait(0), wgmma_wait(unroll - 1), wgmma_wait(1)
    depth_weights, operands, lane_rows = tile.depth_weights, parts * 2 * window, lane_rows_of(tile)
    high_half = wgmma_descriptor(0, 0, STRIDE) & ~0xFFFFFFFF
    when_due, _ = make_hand_over(config)
    ahead, load_inverse = config.split_ahead, ld_shared(1, float32)

    @device_function
    def multiply_tap(acc, v, at, b, block, part, descriptor, add):
        """Issue the products of tap ``b`` and a block of columns.

        ``at``: the depth's first register in ``v``. ``part``: which of the three split products; the first two are
        small. ``descriptor``: lower half of the weights' descriptor.
        """
        x_part = 1 if parts == 2 and part == 0 else 0
        w_part = 1 if parts == 2 and part == 1 else 0
        q = at + 2 * x_part * window + halo - b * step + 2 * block
        low = int32(descriptor + (w_part * chunk + b) * (tap_weights >> 4))
        multiply_all(acc, block * sums, v[q], v[q + 1], v[q + window], v[q + window + 1],
                     int64(uint32(low)) | high_half, add)  # fmt: skip

    @device_function
    def multiply(acc, total, v, at, descriptor, add, taps, inverse, where):
        """Issue a depth's products; the first overwrite the sums if ``add`` is 0."""
        wgmma_fence()
        for b in range(chunk):
            for block in range(BLOCKS):
                multiply_tap(acc, v, at, b, block, 0, descriptor, add if b == 0 else int32(1))
        wgmma_commit()

    @device_function
    def multiply_taps(acc, total, v, at, descriptor, first, count, inverse, where):
        """Add the products of ``count`` split taps from ``first`` on to ``total``; ``where``: how to load the window's
        rest.
        """
        wgmma_fence()
        for block in range(BLOCKS):
            for part in range(3):
                for z in range(count):
                    multiply_tap(acc, v, at, first + z, block, part, descriptor, int32(part + z > 0))
            wgmma_commit()
        wait_for_older_block()
        for e in range(sums):
            total[e] += acc[e] * inverse
        if first_column > 0 and first == 0:
            load_rest(v, at, *where)
        wait_for_all()
        for e in range(sums, all_sums):
            total[e] += acc[e] * inverse

    @device_function
    def multiply_exactly(acc, total, v, at, descriptor, add, taps, inverse, where):
        """``multiply`` for split operands, a few taps at a time; by twos where the last chunk has fewer."""
        if several_chunks and taps < chunk:
            for b in range(0, chunk - 1, 2):
                if b + 1 < taps:
                    multiply_taps(acc, total, v, at, descriptor, b, 2, inverse, where)
                elif b < taps:
                    multiply_taps(acc, total, v, at, descriptor, b, 1, inverse, where)
        else:  # the first group apart: with its loads inside, LLVM would keep the loop, and v in memory
            multiply_taps(acc, total, v, at, descriptor, 0, chunk // tap_groups, inverse, where)
            for group in range(1, tap_groups):
                first = group * chunk // tap_groups
                count = (group + 1) * chunk // tap_groups - first
                multiply_taps(acc, total, v, at, descriptor, first, count, inverse, where)

    multiply_depth = multiply_exactly if exact else multiply

    @device_function
    def one_depth(acc, total, v, z, x_at, h_step, odd_step, beyond, together, rounded, scales, ring, descriptor0,
                  descriptor, add, taps, s, parity, full, empty):  # fmt: skip
        """Load and multiply the ``z``-th unrolled depth, in slot ``s``; return the next slot and its parity.

        ``scales``: as for ``make_window``; split ahead, first the address of the inverse scales of the warpgroup's
        windows.
        """
        slot, stages = ring
        offset = recomputed(int32(s * slot))  # before the wait, to keep it off the critical path
        if single or z == 0:
            mbarrier_wait(full + 8 * s, parity)
        if not resident:
            descriptor = int32(descriptor0 + (offset >> 4))
            if not single:
                descriptor = int32(descriptor + z * (depth_weights >> 4))
        if not single:
            offset = int32(offset + z * (lane_rows * h_step))
        at = int32(z * operands)
        where = x_at, offset, h_step, odd_step, beyond, together, rounded, scales
        inverse = load_window(v, at, *where)
        if ahead:
            inverse = load_inverse(int32(scales[0] + 8 * s))
        multiply_depth(acc, total, v, at, descriptor, add, taps, inverse, where)
        if resident and (single or z == unroll - 1):
            mbarrier_arrive(empty + 8 * s)
        if not exact:
            wait_for_older()
        if not resident:  # products that have ended no longer read the ring
            if unroll == 1:
                mbarrier_arrive(empty + 8 * s)
            elif add and (single or z == 0):
                mbarrier_arrive(empty + 8 * (s - 1 if s > 0 else stages - 1))
        if single or z == unroll - 1:
            s = int32(s + 1)
            if s == stages:
                s, parity = int32(0), int32(parity ^ 1)
        return s, parity

    @device_function
    def stages(acc, total, held, goes, y, v, x_at, h_step, odd_step, beyond, together, rounded, scales, ring,
               descriptor0, descriptor, add, taps, s, parity, full, empty, count, turn, my_turn):  # fmt: skip
        """Consume the next ``count`` depths while the last tile's runs leave (``held``, ``goes``: epilogue/bulk.py).

        ``x_at`` to ``rounded``: the lane's window (window.py). ``ring``: bytes of a slot, slots. ``s``, ``parity``: the
        next slot. ``add``: 0 if the first products overwrite the sums. ``taps``: existing taps of the chunk. ``turn``,
        ``my_turn``: mbarrier and parity to wait for before a tile, if the warpgroups take turns.

        Returns the next slot, its parity, and the next weights' descriptor.
        """
        if in_turn and add == 0:
            mbarrier_wait(turn, my_turn)
        depth = int32(0)
        while depth < count:
            s, parity = one_depth(acc, total, v, int32(0), x_at, h_step, odd_step, beyond, together, rounded, scales,
                                  ring, descriptor0, descriptor, add, taps, s, parity, full, empty)  # fmt: skip
            add = int32(1)
            when_due(held, goes, y)
            descriptor = int32(descriptor + (depth_weights >> 4))
            if unroll > 1:
                s, parity = one_depth(acc, total, v, int32(1), x_at, h_step, odd_step, beyond, together,
                                      rounded, scales, ring, descriptor0, descriptor, add, taps, s, parity, full,
                                      empty)  # fmt: skip
                descriptor = int32(descriptor + (depth_weights >> 4))
            depth = int32(depth + unroll)
        return s, parity, descriptor

    return stages
