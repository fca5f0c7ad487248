"""k4: a matrix product from registers.

    x, packed w --cp.async--> stages in shared memory --> registers --multiply-adds--> sums --> shared memory --> y

A thread holds ``thread_m x thread_n`` sums and needs thread_m weights and thread_n inputs for thread_m * thread_n
multiply-adds. One window of inputs serves every tap of a row, because the taps slide over it.

The matrix product (formula/taps.py, "rows"): rows are (output channel, row of taps), columns the positions of all
samples laid end to end, depth is (input channel, tap). The phases of a strided problem are neighbouring rows.

* producer.py, pack.py: cp.async copies a stage of ``block_k`` channels while the stage before is multiplied.
* mainloop.py: 16-byte shared loads, then thread_m * thread_n multiply-adds a tap.
* epilogue.py: interleaves the phases in shared memory; consecutive threads write consecutive outputs.
* kernels/common/thread_sums.py: an order of products that seldom waits for register banks.
* Long float32 sums are accumulated in blocks, which limits the rounding error.
* Missing taps: where K is no multiple of the stride, a block with many channels takes rows of one phase, so that it
  multiplies existing taps only. Warps behind the last column skip the products.
* kernels/common/channel_parts.py: split-K over the input channels, where few tiles have long sums.
* few.py: tiles of other shapes for launches of few blocks.

Shared loads a multiply-add: 1/thread_n for w and 1/(thread_m * taps) for x; k3 has more than one.

Measured (H200, kb64, float32): 8.59 ms, 3.9 times k3.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from numba import cuda, int32, int64

from numba_tconv.kernels.common.packed_weights import after_packing
from numba_tconv.kernels.rung import Rung, cuda_core_reason, taking_bias
from numba_tconv.ptx import (
    add_vectors,
    cp_async,
    cp_async_commit,
    cp_async_wait,
    device_function,
    griddepcontrol_wait,
    shared_base,
    store_vectors,
)
from numba_tconv.runtime import device
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel
from numba_tconv.runtime.layout import NO_GPU, Layout

from .cost import choose
from .epilogue import make_store
from .mainloop import make_multiply
from .plan import config_for, kernel_of, plan_of
from .producer import make_aim, make_load_window
from .tile import Config, tiny


@cache
def make_kernel(config: Config, make_multiply=make_multiply, name: str = "k4_register_tile") -> Kernel:
    """The kernel of a configuration.

    ``make_multiply``: builds the products of a block (mainloop.Multiply); k5_dmma passes its own, with its ``name``.
    """
    threads, vector, stages = config.threads, config.vector, config.stages
    block_n, block_k = config.block_n, config.block_k
    warps, warp_columns, reach = threads // 32, 32 // config.lanes_m * config.thread_n, config.halo + config.lead
    x_stage, w_stage = config.x_stage, config.w_stage
    stage = x_stage + w_stage
    phases, channels, parts, ragged = config.phases, config.channels, config.parts, config.ragged
    accumulator, sums = ELEMENTS[config.dtype].accumulator, config.thread_m * config.thread_n
    w_copies = -(-w_stage // (vector * threads))
    chunk_shift = config.chunk_shift
    sources = config.entries - 2
    partial, partials, itemsize = config.partial, config.partials, config.itemsize
    add_partial_sums = add_vectors(sums // vector, threads * vector)
    store_partial_sums = store_vectors(sums // vector, threads * vector)
    window, weights, place_of, tails_of, multiply_stage, put = make_multiply(config)
    aim, load_window, store = make_aim(config, warps), make_load_window(config, warps), make_store(config)
    copy_w, wait_for_stage = cp_async(vector), cp_async_wait(stages - 2)

    @device_function
    def load(shared, base, x, source, offset, stride_c, channels_left, w, w_offset):
        """Start the copies of one stage."""
        thread = int32(cuda.threadIdx.x)
        load_window(shared, base, x, source, offset, stride_c, channels_left)
        at, w_at = int32(base + x_stage + thread * vector), w_offset + thread * vector
        for j in range(w_copies):
            if (j + 1) * threads * vector <= w_stage or int32((thread + j * threads) * vector) < w_stage:
                copy_w(shared, at + j * threads * vector, w, w_at + j * threads * vector, True)

    @device_function
    def advance(base, acc, xs, ws, shared, source, place, x, w, s, end, total, chunk, channel, first, columns,
                first_column, batch, length, stride_n, stride_c, stride_l, x_group, in_per_group, w_tile, of_columns,
                of_weights, tails, channel_chunks, live):  # fmt: skip
        """Multiply the stages from ``s`` to ``end``, with the copies ``stages - 1`` ahead, of tap chunk ``chunk`` and
        of ``channel``. ``tails``: a bit for each row that has the last tap. Returns the next stage, chunk and channel.
        """
        while s < end:
            if s >= 0:
                wait_for_stage()
                cuda.syncthreads()  # the stage has landed, and all threads have left the one loaded next
            ahead = int32(s + stages - 1)
            if ahead < total:
                if channel == 0:
                    cuda.syncthreads()  # all threads have left the chunk before
                    shift = reach + chunk * chunk_shift
                    aim(source, place, first, shift, columns, first_column, batch, length, stride_n, stride_l)
                    cuda.syncthreads()
                load(shared, int32(ahead % stages * stage), x, source, x_group + channel * stride_c, stride_c,
                     in_per_group - channel, w, w_tile + ahead * w_stage)  # fmt: skip
                channel = int32(channel + block_k)
                if channel >= in_per_group:
                    channel, chunk = int32(0), int32(chunk + 1)
            cp_async_commit()
            if s >= 0 and live:
                at = int32(base + itemsize * stage * (s % stages))
                x_at, w_at = int32(at + itemsize * of_columns), int32(at + itemsize * (x_stage + of_weights))
                last = tails if s >= total - channel_chunks else int32(-1)
                multiply_stage(acc, xs, ws, shared, x_at, w_at, last)
            s = int32(s + 1)
        return s, chunk, channel

    def k4_register_tile(
        x, stride_n, stride_c, stride_l, w, bias, has_bias, y, batch, length, out_length, in_per_group, out_per_group,
        groups, padding, columns, first_column, row_tiles, tap_chunks, channel_chunks, last_row,
    ):  # fmt: skip
        shared = cuda.shared.array(0, dtype=accumulator)
        source = cuda.shared.array(sources, dtype=int64)
        place = cuda.shared.array(2, dtype=int64)
        # Row tiles are neighbours in the grid, because they read the same inputs. Column tiles may need two axes.
        group, row_tile = divmod(int32(cuda.blockIdx.x), int32(row_tiles))
        thread = int32(cuda.threadIdx.x)
        first = (int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y) * block_n
        row_at, column_at, of_weights, of_columns = place_of(thread)

        base = shared_base(shared)
        acc = cuda.local.array(sums, dtype=accumulator)
        xs = cuda.local.array(window, dtype=accumulator)
        ws = cuda.local.array(weights, dtype=accumulator)
        results = cuda.local.array(vector, dtype=accumulator)
        for s in range(sums):
            acc[s] = accumulator(0)

        total = int32(tap_chunks * channel_chunks)
        x_group, w_tile = group * in_per_group * stride_c, int64(cuda.blockIdx.x) * total * w_stage
        tails = tails_of(row_at, int32(last_row - row_tile % parts * phases)) if ragged else int32(-1)
        # A warp whose columns all lie behind the last one does not multiply.
        live = first + column_at // warp_columns * warp_columns < batch * columns
        griddepcontrol_wait()  # for the packed weights
        s, chunk, channel = int32(1 - stages), int32(0), int32(0)
        if not partial:
            s, chunk, channel = advance(base, acc, xs, ws, shared, source, place, x, w, s, total, total, chunk, channel,
                                        first, columns, first_column, batch, length, stride_n, stride_c, stride_l,
                                        x_group, in_per_group, w_tile, of_columns, of_weights, tails,
                                        channel_chunks, live)  # fmt: skip
        end = int32(min(partial, total))
        while partial and s < total:
            s, chunk, channel = advance(base, acc, xs, ws, shared, source, place, x, w, s, end, total, chunk, channel,
                                        first, columns, first_column, batch, length, stride_n, stride_c, stride_l,
                                        x_group, in_per_group, w_tile, of_columns, of_weights, tails,
                                        channel_chunks, live)  # fmt: skip
            # Blocks of terms are summed apart, in a loop of their own: sums changed inside the loop would be moved
            # every stage.
            if s < total:
                if s > partial:
                    add_partial_sums(acc, shared, partials + thread * vector)
                store_partial_sums(shared, partials + thread * vector, acc)
                for i in range(sums):
                    acc[i] = accumulator(0)
                end = int32(min(end + partial, total))
        if partial and total > partial:
            add_partial_sums(acc, shared, partials + thread * vector)
        cuda.syncthreads()  # the output tile lies where the stages were
        put(shared, acc, results, row_at, column_at)
        cuda.syncthreads()
        channel = row_tile // parts * channels
        channels_left = int32(min(channels, out_per_group - channel))
        store(y, shared, ws, bias, has_bias, place, columns, first_column, batch, group * out_per_group + channel,
              channels_left, row_tile % parts * phases, out_per_group * groups, out_length, padding)  # fmt: skip

    return kernel_of(name, k4_register_tile, config, threads)


class RegisterTile(Rung):
    name = "k4_register_tile"
    idea = "a matrix product from registers: 16-byte loads, one window for all taps, cp.async double buffering"
    minimum_cc = (8, 0)  # cp.async

    # ``choose(layout of x, problem, device)`` returns a configuration.
    make_kernel, choose = staticmethod(make_kernel), staticmethod(config_for)

    def supports(self, problem, dtype, precision):
        if dtype in (torch.float16, torch.bfloat16):
            return "its cp.async pipeline takes float32 and float64; half types wait for the tensor-core rungs"
        return cuda_core_reason(dtype, precision)

    def config(self, problem, dtype, precision=None):
        return choose(problem, dtype)

    def config_on(self, device, problem, dtype, precision):
        x = Layout.contiguous((problem.batch, problem.in_channels, problem.length), dtype, NO_GPU)
        return self.choose(x, problem, device)

    def tile(self, config):
        c = config
        sums = f"{c.block_m} rows by {c.block_n} columns, {c.thread_m} by {c.thread_n} a thread"
        parts = "" if c.splits == 1 else f"; input channels in {c.splits} parts, whose sums are added up"
        return f"{sums}; {c.stages} stages of {c.block_k} input channels{parts}"

    def tiny_configs(self, problem, dtype):
        return tiny(problem, dtype)

    def kernel(self, config):
        return self.make_kernel(replace(config, splits=1))  # splits belongs to the launch

    def prepare(self, x, w, bias, y, problem, config=None, precision=None):
        y_aligned = y.offset % 16 == 0
        packing, launch, second = plan_of(
            self.make_kernel, self.choose, problem, config, x, w, bias is not None, y_aligned, device.of(x.index)
        )
        fill = after_packing(packing, launch)
        return taking_bias(second.after(fill, x.index) if second else fill, bias)
