"""k5_dmma on Hopper: a warp-specialised kernel with a ring of stages.

    x, packed w --copy engine or cp.async--> ring in shared memory --mma.sync--> sums --> shared memory --> y
        producers (4 warps)                             consumers (``config.threads``)

mbarriers tell the producers that a slot is free and the consumers that a stage has landed, so no warp waits for one
that multiplies. Producers leave most of their registers to the consumers (setmaxnreg). Two blocks share a
multiprocessor: one multiplies while the other stores.

The copy engine fetches a stage's weights at once, and rows of x where the window lies in one sample. Other windows come
by cp.async, with zeros outside the signal (kernels/k4_register_tile/producer.py).
"""

from __future__ import annotations

from functools import cache

from numba import cuda, float64, int32, int64

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

WARP, COPYING = 32, 4  # threads of a warp; producer warps
REGISTERS = 200, 56  # of a consumer and of a producer thread: together as many as at launch
OF_MULTIPLYING, OF_COPYING = 1, 2  # named barriers of consumers and producers; 0 is the block's


@cache
def make_kernel(config: Config) -> Kernel:
    threads, stages, block_n, block_k = config.threads, config.stages, config.block_n, config.block_k
    itemsize, width, copied, reach = config.itemsize, config.width, config.copied, config.halo + config.lead
    x_vector, x_stage, w_stage, chunk_shift = config.x_vector, config.x_stage, config.w_stage, config.chunk_shift
    stage, x_bytes, w_bytes = x_stage + w_stage, copied * itemsize, w_stage * itemsize
    phases, channels, parts, ragged = config.phases, config.channels, config.parts, config.ragged
    warp_columns, sums = WARP // config.lanes_m * config.thread_n, config.thread_m * config.thread_n
    all_barriers, sources = config.barriers, config.entries - 2 - config.barriers
    window, weights, place_of, tails_of, multiply_stage, put = make_multiply(config)
    aim, load_window = make_aim(config, COPYING, threads), make_load_window(config, COPYING, threads)
    store, rows = make_store(config), block_k // COPYING  # of x, for a producer warp
    grow, shrink = setmaxnreg(REGISTERS[0], True), setmaxnreg(REGISTERS[1], False)

    @device_function
    def fill_ring(shared, base, source, place, full, empty, x, w, first, columns, first_column, batch, length, stride_n,
                  stride_c, stride_l, x_group, in_per_group, w_tile, tap_chunks):  # fmt: skip
        """The producers' loop: copy every stage into its slot once all consumers have released it."""
        warp, lane = int32((cuda.threadIdx.x - threads) // WARP), int32(cuda.threadIdx.x % WARP)
        slot, parity = int32(0), int32(1)
        # Bytes that this lane announces: a row of x, and all weights.
        of_row, of_weights = int32(x_bytes if lane < rows else 0), int32(w_bytes if warp == 0 and lane == 0 else 0)
        for chunk in range(tap_chunks):
            shift = reach + chunk * chunk_shift
            barrier_sync(int32(OF_COPYING), int32(COPYING * WARP))  # all producers have left the chunk before
            aim(source, place, first, shift, columns, first_column, batch, length, stride_n, stride_l)
            barrier_sync(int32(OF_COPYING), int32(COPYING * WARP))
            n, column = divmod(first - shift, columns)
            i = first_column + column
            along = n >= 0 and n < batch and i >= 0 and i + copied <= length and column + copied <= columns
            own = int32(warp * rows + lane)  # row of x
            row = x_group + n * stride_n + i + own * stride_c
            offset, left = x_group, in_per_group
            while left > 0:
                at, bar = int32(slot * stage), int32(full + 8 * slot)
                mbarrier_wait(empty + 8 * slot, parity)
                # Every lane arrives, because racecheck does not credit one thread's arrival to its warp.
                if x_vector > 1 and along and left >= block_k:
                    mbarrier_arrive_expect_tx(bar, int32(of_row + of_weights))
                    if lane < rows:
                        cp_async_bulk(int32(base + (at + own * width) * itemsize), x, row, int32(x_bytes), bar)
                else:
                    load_window(shared, at, x, source, offset, stride_c, left)
                    mbarrier_await_copies(bar)
                    mbarrier_arrive_expect_tx(bar, of_weights)
                if of_weights > 0:
                    cp_async_bulk(int32(base + (at + x_stage) * itemsize), w, w_tile, int32(w_bytes), bar)
                w_tile, left = w_tile + w_stage, left - block_k
                offset, row = offset + block_k * stride_c, row + block_k * stride_c
                slot = int32(slot + 1)
                if slot == stages:
                    slot, parity = int32(0), int32(parity ^ 1)

    def k5_dmma_ring(
        x, stride_n, stride_c, stride_l, w, bias, has_bias, y, batch, length, out_length, in_per_group, out_per_group,
        groups, padding, columns, first_column, row_tiles, tap_chunks, channel_chunks, last_row,
    ):  # fmt: skip
        shared = cuda.shared.array(0, dtype=float64)
        source = cuda.shared.array(sources, dtype=int64)
        place = cuda.shared.array(2, dtype=int64)
        barriers = cuda.shared.array(all_barriers, dtype=int64)
        group, row_tile = divmod(int32(cuda.blockIdx.x), int32(row_tiles))
        thread = int32(cuda.threadIdx.x)
        first = (int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y) * block_n
        base, full = shared_base(shared), shared_address(barriers, int64(0))
        empty = int32(full + 8 * stages)
        if thread == 0:
            for s in range(stages):
                mbarrier_init(full + 8 * s, int32(COPYING * WARP))
                mbarrier_init(empty + 8 * s, int32(threads))
            fence_mbarrier_init()
        cuda.syncthreads()
        griddepcontrol_wait()  # for the packed weights

        total = int32(tap_chunks * channel_chunks)
        if thread >= threads:
            shrink()
            fill_ring(shared, base, source, place, full, empty, x, w, first, columns, first_column, batch, length,
                      stride_n, stride_c, stride_l, group * in_per_group * stride_c, in_per_group,
                      int64(cuda.blockIdx.x) * total * w_stage, int32(tap_chunks))  # fmt: skip
        else:
            grow()
            row_at, column_at, of_weights, of_columns = place_of(thread)
            acc = cuda.local.array(sums, dtype=float64)
            xs = cuda.local.array(window, dtype=float64)
            ws = cuda.local.array(weights, dtype=float64)
            for s in range(sums):
                acc[s] = float64(0)
            tails = tails_of(row_at, int32(last_row - row_tile % parts * phases)) if ragged else int32(-1)
            # A warp whose columns all lie behind the last one does not multiply.
            live = first + column_at // warp_columns * warp_columns < batch * columns
            slot, parity, left = int32(0), int32(0), total
            while left > 0:
                mbarrier_wait(full + 8 * slot, parity)
                if live:
                    at = int32(base + itemsize * stage * slot)
                    x_at, w_at = int32(at + itemsize * of_columns), int32(at + itemsize * (x_stage + of_weights))
                    last = tails if left <= int32(channel_chunks) else int32(-1)
                    multiply_stage(acc, xs, ws, shared, x_at, w_at, last)
                fence_async()  # orders this lane's reads before writes of the copy engine
                mbarrier_arrive(empty + 8 * slot)
                left, slot = int32(left - 1), int32(slot + 1)
                if slot == stages:
                    slot, parity = int32(0), int32(parity ^ 1)
            barrier_sync(int32(OF_MULTIPLYING), int32(threads))  # the output tile lies where the stages were
            row_at, column_at, _, _ = place_of(recomputed(int32(cuda.threadIdx.x)))  # recomputed, else they would spill
            put(shared, acc, ws, row_at, column_at)
            barrier_sync(int32(OF_MULTIPLYING), int32(threads))
            channel = row_tile // parts * channels
            channels_left = int32(min(channels, out_per_group - channel))
            store(y, shared, ws, bias, has_bias, place, columns, first_column, batch, group * out_per_group + channel,
                  channels_left, row_tile % parts * phases, out_per_group * groups, out_length, padding)  # fmt: skip

    return kernel_of("k5_dmma_ring", k5_dmma_ring, config, threads + COPYING * WARP)
