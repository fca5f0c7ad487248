"""k5_dmma on Hopper: a warp-specialised kernel.

    x, packed w --copy engine or cp.async--> ring in shared memory --mma.sync--> sums --> shared memory --> y
        producers (4 warps)                             consumers (``config.threads``)

Two blocks share a multiprocessor: one multiplies while the other stores. The copy engine fetches weights and windows in
one sample; cp.async others, with zeros outside the signal."""

from functools import cache

from numba import cuda, float64, int32, int64

from numba_tconv.kernels.k4_register_tile.arguments import Block, Registers, Stage
from numba_tconv.kernels.k4_register_tile.epilogue import make_store
from numba_tconv.kernels.k4_register_tile.plan import kernel_of
from numba_tconv.kernels.k4_register_tile.producer import make_aim, make_load_window
from numba_tconv.ptx import (
    barrier_sync,
    cp_async_bulk,
    device_function,
    fence_async,
    fence_mbarrier_init,
    griddepcontrol_wait,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_await_copies,
    mbarrier_init,
    mbarrier_wait,
    recomputed,
    setmaxnreg,
    shared_address,
    shared_base,
)
from numba_tconv.runtime.kernel import Kernel

from .mainloop import make_multiply
from .tile import Config

WARP, COPYING = 32, 4  # threads; producer warps
REGISTERS = 200, 56  # of a consumer and a producer thread
OF_MULTIPLYING, OF_COPYING = 1, 2  # named barriers; 0 is the block's


def make_fill_ring(config: Config):
    """Build ``fill_ring``: producer warps copy every stage of a tile."""
    threads, stages, block_k, itemsize = config.threads, config.stages, config.block_k, config.itemsize
    width, copied, lead, chunk_shift = config.width, config.copied, config.lead, config.chunk_shift
    x_vector, x_stage, w_stage = config.x_vector, config.x_stage, config.w_stage
    stage, x_bytes, w_bytes = config.stage, copied * itemsize, w_stage * itemsize
    aim, load_window = make_aim(config, COPYING, threads), make_load_window(config, COPYING, threads)
    rows = block_k // COPYING  # of a producer warp

    @device_function
    def fill_ring(block, full, empty, x, packed, sizes, grid):
        warp, lane = int32((cuda.threadIdx.x - threads) // WARP), int32(cuda.threadIdx.x % WARP)
        slot, parity = int32(0), int32(1)
        # Bytes that a lane announces.
        of_row, of_weights = int32(x_bytes if lane < rows else 0), int32(w_bytes if warp == 0 and lane == 0 else 0)
        in_packed, columns = block.tile_offset, grid.columns
        for chunk in range(int32(grid.tap_chunks)):
            shift = lead + chunk * chunk_shift
            barrier_sync(int32(OF_COPYING), int32(COPYING * WARP))
            aim(block, shift, x, sizes, grid)
            barrier_sync(int32(OF_COPYING), int32(COPYING * WARP))
            n, column = divmod(block.first_column - shift, columns)
            i = grid.first_column + column
            whole = n >= 0 and n < sizes.batch and i >= 0 and i + copied <= sizes.length and column + copied <= columns
            row = int32(warp * rows + lane)
            in_x = block.group_offset + n * x.stride_n + i + row * x.stride_c
            channel, left = block.group_offset, sizes.in_per_group
            while left > 0:
                at, bar = int32(slot * stage), int32(full + 8 * slot)
                mbarrier_wait(empty + 8 * slot, parity)
                # Every lane arrives, for racecheck.
                if x_vector > 1 and whole and left >= block_k:
                    mbarrier_arrive_expect_tx(bar, int32(of_row + of_weights))
                    if lane < rows:
                        target = int32(block.base + (at + row * width) * itemsize)
                        cp_async_bulk(target, x.data, in_x, int32(x_bytes), bar)
                else:
                    load_window(block, at, x, channel, left)
                    mbarrier_await_copies(bar)
                    mbarrier_arrive_expect_tx(bar, of_weights)
                if of_weights > 0:
                    target = int32(block.base + (at + x_stage) * itemsize)
                    cp_async_bulk(target, packed, in_packed, int32(w_bytes), bar)
                in_packed, left = in_packed + w_stage, left - block_k
                channel, in_x = channel + block_k * x.stride_c, in_x + block_k * x.stride_c
                slot = int32(slot + 1)
                if slot == stages:
                    slot, parity = int32(0), int32(parity ^ 1)

    return fill_ring


@cache
def make_kernel(config: Config) -> Kernel:
    threads, stages, block_n, itemsize = config.threads, config.stages, config.block_n, config.itemsize
    x_stage, w_stage, stage = config.x_stage, config.w_stage, config.stage
    phases, row_parts, ragged = config.phases, config.row_parts, config.ragged
    warp_columns, sums = WARP // config.lanes_m * config.thread_n, config.thread_m * config.thread_n
    all_barriers, window_offsets = config.barriers, config.entries - 2 - config.barriers
    mainloop = make_multiply(config)
    window, weights, multiply, put = mainloop.window, mainloop.weights, mainloop.multiply, mainloop.put
    lane_of, tails_of = mainloop.lane_of, mainloop.tails_of
    fill_ring, store = make_fill_ring(config), make_store(config)
    grow, shrink = setmaxnreg(REGISTERS[0], True), setmaxnreg(REGISTERS[1], False)

    def k5_dmma_ring(x, packed, bias, y, sizes, grid):
        shared = cuda.shared.array(0, dtype=float64)
        offsets = cuda.shared.array(window_offsets, dtype=int64)
        start = cuda.shared.array(2, dtype=int64)
        barriers = cuda.shared.array(all_barriers, dtype=int64)
        group, row_tile = divmod(int32(cuda.blockIdx.x), int32(grid.row_tiles))
        thread = int32(cuda.threadIdx.x)
        first_column = (int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y) * block_n
        base, full = shared_base(shared), shared_address(barriers, int64(0))
        empty = int32(full + 8 * stages)
        if thread == 0:
            for s in range(stages):
                mbarrier_init(full + 8 * s, int32(COPYING * WARP))
                mbarrier_init(empty + 8 * s, int32(threads))
            fence_mbarrier_init()
        cuda.syncthreads()
        griddepcontrol_wait()

        total = int32(grid.tap_chunks * grid.channel_chunks)
        if thread >= threads:
            shrink()
            group_offset = group * sizes.in_per_group * x.stride_c
            tile_offset = int64(cuda.blockIdx.x) * total * w_stage
            block = Block(shared, base, offsets, start, first_column, group_offset, tile_offset, total)
            fill_ring(block, full, empty, x, packed, sizes, grid)
        else:
            grow()
            lane = lane_of(thread)
            registers = Registers(
                cuda.local.array(sums, dtype=float64),
                cuda.local.array(window, dtype=float64),
                cuda.local.array(weights, dtype=float64),
            )
            for s in range(sums):
                registers.sums[s] = float64(0)
            tails = tails_of(lane, int32(grid.full_phases - row_tile % row_parts * phases)) if ragged else int32(-1)
            live = first_column + lane.column // warp_columns * warp_columns < sizes.batch * grid.columns
            slot, parity, left = int32(0), int32(0), total
            while left > 0:
                mbarrier_wait(full + 8 * slot, parity)
                if live:
                    at = int32(base + itemsize * stage * slot)
                    in_window = int32(at + itemsize * lane.window)
                    in_weights = int32(at + itemsize * (x_stage + lane.weights))
                    last = tails if left <= int32(grid.channel_chunks) else int32(-1)
                    multiply(registers, Stage(shared, in_window, in_weights), last)
                fence_async()  # the copy engine writes here next
                mbarrier_arrive(empty + 8 * slot)
                left, slot = int32(left - 1), int32(slot + 1)
                if slot == stages:
                    slot, parity = int32(0), int32(parity ^ 1)
            barrier_sync(int32(OF_MULTIPLYING), int32(threads))
            lane = lane_of(recomputed(int32(cuda.threadIdx.x)))  # else it would spill
            put(shared, registers.sums, registers.weights, lane)
            barrier_sync(int32(OF_MULTIPLYING), int32(threads))
            store(y, shared, start, group, row_tile, registers.weights, bias, sizes, grid)

    return kernel_of("k5_dmma_ring", k5_dmma_ring, config, threads + COPYING * WARP)
