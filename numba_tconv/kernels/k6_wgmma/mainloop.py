"""A warpgroup's products of a tile."""

from numba import float32, int32, int64, uint32

from numba_tconv.kernels.common.pipeline import Slot, advance, release, stage_before, wait_full
from numba_tconv.kernels.common.tensor_core.split_operand import MOST_SPLIT_TAPS
from numba_tconv.ptx import (
    device_function,
    ld_shared,
    mbarrier_wait,
    recomputed,
    wgmma,
    wgmma_commit,
    wgmma_descriptor,
    wgmma_fence,
    wgmma_wait,
)

from .epilogue.bulk import make_hand_over
from .operands import lane_rows_of, make_window
from .tile import BLOCKS, Config

STRIDE = 128  # bytes between the weights' core matrices along n


def _first_column(config: Config) -> int:
    """Earlier columns are loaded after the first products, to save registers."""
    tile = config.tile
    tap_groups = -(-tile.tap_chunk // MOST_SPLIT_TAPS)
    if not config.split_ahead or tap_groups == 1 or tile.several_chunks:
        return 0
    return max(tile.halo - (tile.tap_chunk // tap_groups - 1) * tile.taps.step, 0) // 4 * 4


def _make_multiply(config: Config):
    """Build the products of a depth.

    Tensor cores truncate. In tf32x3, ``acc`` sums at most MOST_SPLIT_TAPS taps, smallest products first; CUDA cores add
    it to ``total``."""
    tile = config.tile
    rows, parts, chunk, step = tile.rows, tile.operand_halves, tile.tap_chunk, tile.taps.step
    halo, window, tap_weights = tile.halo, 4 + tile.halo, rows * tile.depth * tile.operand_size
    block_sums, all_sums, several_chunks = rows // 2, BLOCKS * rows // 2, tile.several_chunks
    tap_groups, first_column = -(-chunk // MOST_SPLIT_TAPS), _first_column(config)
    multiply_all, load_rest = wgmma(tile.kind, rows), make_window(config, 0, first_column)
    wait_for_all, wait_for_older_block = wgmma_wait(0), wgmma_wait(1)
    high_half = wgmma_descriptor(0, 0, STRIDE) & ~0xFFFFFFFF

    @device_function
    def multiply_tap(acc, v, at, b, block, product, descriptor, add):
        """Issue tap ``b``'s products for a block of columns.

        ``at``: the depth's first register. ``product``: of three split ones. ``descriptor``: lower half."""
        x_half = 1 if parts == 2 and product == 0 else 0
        w_half = 1 if parts == 2 and product == 1 else 0
        q = at + 2 * x_half * window + halo - b * step + 2 * block
        low = int32(descriptor + (w_half * chunk + b) * (tap_weights >> 4))
        multiply_all(acc, block * block_sums, v[q], v[q + 1], v[q + window], v[q + window + 1],
                     int64(uint32(low)) | high_half, add)  # fmt: skip

    @device_function
    def multiply(sums, v, at, descriptor, add, taps, inverse, offset, view, lane):
        """Issue a depth's products; overwrite the sums if ``add`` is 0."""
        wgmma_fence()
        for b in range(chunk):
            for block in range(BLOCKS):
                multiply_tap(sums.acc, v, at, b, block, 0, descriptor, add if b == 0 else int32(1))
        wgmma_commit()

    @device_function
    def multiply_taps(sums, v, at, descriptor, first, count, inverse, offset, view, lane):
        """Add ``count`` split taps to the totals."""
        acc, total = sums.acc, sums.total
        wgmma_fence()
        for block in range(BLOCKS):
            for product in range(3):
                for z in range(count):
                    multiply_tap(acc, v, at, first + z, block, product, descriptor, int32(product + z > 0))
            wgmma_commit()
        wait_for_older_block()
        for e in range(block_sums):
            total[e] += acc[e] * inverse
        if first_column > 0 and first == 0:
            load_rest(v, at, offset, view, lane)
        wait_for_all()
        for e in range(block_sums, all_sums):
            total[e] += acc[e] * inverse

    @device_function
    def multiply_exactly(sums, v, at, descriptor, add, taps, inverse, offset, view, lane):
        if several_chunks and taps < chunk:
            for b in range(0, chunk - 1, 2):
                if b + 1 < taps:
                    multiply_taps(sums, v, at, descriptor, b, 2, inverse, offset, view, lane)
                elif b < taps:
                    multiply_taps(sums, v, at, descriptor, b, 1, inverse, offset, view, lane)
        else:  # the first apart: else LLVM keeps the loop, and v in memory
            multiply_taps(sums, v, at, descriptor, 0, chunk // tap_groups, inverse, offset, view, lane)
            for group in range(1, tap_groups):
                first = group * chunk // tap_groups
                count = (group + 1) * chunk // tap_groups - first
                multiply_taps(sums, v, at, descriptor, first, count, inverse, offset, view, lane)

    return multiply_exactly if parts == 2 else multiply


def make_mainloop(config: Config):
    """Build ``mainloop``: for each stage of a tap chunk, wait, load the window, multiply, release the slot.

    With resident weights a slot is released once its products are issued: the window is in registers. Products read
    streamed weights, so their slot is released after them. Every thread arrives, for racecheck."""
    tile, resident, unroll, ping_pong = config.tile, config.resident, config.unroll, not config.paired
    single = config.depths == 1
    load_window, multiply_depth = make_window(config, _first_column(config)), _make_multiply(config)
    wait_for_older, exact = wgmma_wait(unroll - 1), tile.operand_halves == 2
    depth_weights, operands, lane_rows = (
        tile.depth_weights,
        tile.operand_halves * 2 * (4 + tile.halo),
        lane_rows_of(tile),
    )
    when_due, _ = make_hand_over(config)
    ahead, load_inverse = config.split_ahead, ld_shared(1, float32)

    @device_function
    def one_depth(sums, v, z, pipe, slot, view, lane, taps, add, descriptor):
        """The ``z``-th unrolled depth; returns the next slot."""
        offset = recomputed(int32(slot.stage * lane.stage_bytes))  # before the wait, off the critical path
        if single or z == 0:
            wait_full(pipe, slot)
        if not resident:
            descriptor = int32(lane.descriptor + (offset >> 4))
            if not single:
                descriptor = int32(descriptor + z * (depth_weights >> 4))
        if not single:
            offset = int32(offset + z * (lane_rows * lane.h_step))
        at = int32(z * operands)
        inverse = load_window(v, at, offset, view, lane)
        if ahead:
            inverse = load_inverse(int32(lane.inverses + 8 * slot.stage))
        multiply_depth(sums, v, at, descriptor, add, taps, inverse, offset, view, lane)
        if resident and (single or z == unroll - 1):
            release(pipe, slot.stage)
        if not exact:
            wait_for_older()
        if not resident:
            if unroll == 1:
                release(pipe, slot.stage)
            elif add and (single or z == 0):
                release(pipe, stage_before(pipe, slot))
        if single or z == unroll - 1:
            slot = advance(pipe, slot)
        return slot

    @device_function
    def mainloop(sums, v, pipe, slot, view, lane, chunk, descriptor, leaving, order):
        """Consume a tap chunk's stages from ``slot`` on, while the last tile's runs leave (epilogue/bulk.py).

        ``descriptor``: of resident weights. Returns the next stage, parity and descriptor."""
        add = chunk.add
        if ping_pong and add == 0:
            mbarrier_wait(order.barrier, order.parity)
        stage, parity, depth = slot.stage, slot.parity, int32(0)
        while depth < chunk.depths:
            stage, parity = one_depth(
                sums, v, int32(0), pipe, Slot(stage, parity), view, lane, chunk.taps, add, descriptor
            )
            add = int32(1)
            when_due(leaving)
            descriptor = int32(descriptor + (depth_weights >> 4))
            if unroll > 1:
                stage, parity = one_depth(
                    sums, v, int32(1), pipe, Slot(stage, parity), view, lane, chunk.taps, add, descriptor
                )
                descriptor = int32(descriptor + (depth_weights >> 4))
            depth = int32(depth + unroll)
        return stage, parity, descriptor

    return mainloop
