"""The multiplying half of k6: the products of the stages of a tile, by a warpgroup."""

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
    """Multiply: a device function, what a warpgroup does with the stages of a tile and a chunk of taps.

    Every lane says for itself that it has read what it reads of a stage. One lane for its warp took longer: 0.387 ms
    instead of 0.380 on dac_u1 in bfloat16, 0.766 instead of 0.750 on dac_u2 (H200, a script; no recorded rows).

    With split operands (tf32x3) the products of a few taps are summed from zero, the small ones first, and added to
    ``total`` on CUDA cores: tensor cores cut off what an addition cannot hold, so the error of a long sum grows with
    its length. What limits it is power: a GPU that repeats kb64 or kb74 draws its 700 W, and its clock falls to 1.35 to
    1.6 GHz on kb64. So it is instructions that count, not how well they overlap: with operands of TF32, to hide the
    splitting behind a warpgroup's own products (a block of columns each by turns, windows split ahead), to let the
    warpgroups issue theirs by turns, or to add up two stages together took as long or longer on kb64; and operands of
    fp16, half as many products, 0.69 times as long (kernels/common/tensor_core/split_operand.py). Where each number is
    in many windows, the warps that copy split it instead (split_ahead.py). (H100, H200, scripts; no recorded rows.)"""
    tile, resident, unroll, in_turn = config.tile, config.resident, config.unroll, not config.paired
    single = config.depths == 1  # each depth is a stage
    rows, parts, chunk, step = tile.rows, tile.parts, tile.tap_chunk, tile.taps.step
    halo, window, tap_weights = tile.halo, 4 + tile.halo, rows * tile.depth * tile.operand_size
    sums, all_sums, exact, several_chunks = rows // 2, BLOCKS * rows // 2, parts == 2, tile.several_chunks
    tap_groups = -(-chunk // MOST_SPLIT_TAPS)
    # Of a wide window first what the first taps need, the rest when half of their operands have done their work: all of
    # kb74's at once take so many registers that it depends on the version of Python whether they suffice. If they do
    # not, it takes 1.25 times as long (H200, a script).
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
        """The products of one tap: its window is that of the stage at another offset. ``descriptor``: the lower half of
        the weights', which alone depends on where they are."""
        x_part = 1 if parts == 2 and part == 0 else 0
        w_part = 1 if parts == 2 and part == 1 else 0
        q = at + 2 * x_part * window + halo - b * step + 2 * block
        low = int32(descriptor + (w_part * chunk + b) * (tap_weights >> 4))
        multiply_all(acc, block * sums, v[q], v[q + 1], v[q + window], v[q + window + 1],
                     int64(uint32(low)) | high_half, add)  # fmt: skip

    @device_function
    def multiply(acc, total, v, at, descriptor, add, taps, inverse, where):
        """The products of one depth; the first of them take the place of the sums if ``add`` is 0."""
        wgmma_fence()
        for b in range(chunk):
            for block in range(BLOCKS):
                multiply_tap(acc, v, at, b, block, 0, descriptor, add if b == 0 else int32(1))
        wgmma_commit()

    @device_function
    def multiply_taps(acc, total, v, at, descriptor, first, count, inverse, where):
        """Of split operands: the small products first, and the sums of these taps added up apart. ``where``: of the
        window, for its rest."""
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
        """The same for split operands, by a few taps at a time; where the last chunk has fewer, by twos."""
        if several_chunks and taps < chunk:
            for b in range(0, chunk - 1, 2):
                if b + 1 < taps:
                    multiply_taps(acc, total, v, at, descriptor, b, 2, inverse, where)
                elif b < taps:
                    multiply_taps(acc, total, v, at, descriptor, b, 1, inverse, where)
        else:  # the first apart: with what it loads inside, LLVM would leave the groups a loop, and v in memory
            multiply_taps(acc, total, v, at, descriptor, 0, chunk // tap_groups, inverse, where)
            for group in range(1, tap_groups):
                first = group * chunk // tap_groups
                count = (group + 1) * chunk // tap_groups - first
                multiply_taps(acc, total, v, at, descriptor, first, count, inverse, where)

    multiply_depth = multiply_exactly if exact else multiply

    @device_function
    def one_depth(acc, total, v, z, x_at, h_step, odd_step, beyond, together, rounded, scales, ring, descriptor0,
                  descriptor, add, taps, s, parity, full, empty):  # fmt: skip
        """The window and the products of a depth, the ``z``-th of those that are unrolled, of the stage in slot ``s``.
        ``scales``: of split operands, what ``make_window`` must know; if they are split ahead, first where the inverses
        of the warpgroup's windows are. Returns the slot of the next and its parity."""
        slot, stages = ring
        offset = recomputed(int32(s * slot))  # before the wait, so that the loads do not wait for it as well
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
        if not resident:  # what they read from the ring they have read by then
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
        """The windows and the products of the next ``count`` depths, while the last tile's runs leave
        (epilogue/bulk.py). ``taps``: how many of the chunk's exist. ``turn``, ``my_turn``: the mbarrier, and its
        parity, that a warpgroup waits for before a tile's first stage if the warpgroups multiply by turns. Returns the
        next slot, its parity, and where the next weights are."""
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
