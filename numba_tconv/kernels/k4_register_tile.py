"""k4: a matrix product from registers.

Idea: a thread that holds a tile of ``thread_m x thread_n`` sums needs thread_m weights and thread_n inputs for
thread_m * thread_n multiply-adds, and the inputs serve every tap of the row, because the taps slide over one window.

The problem as a matrix product (taps.py, "rows"): its rows are (output channel, row of taps), its columns the positions
of all samples laid end to end, its depth (input channel, tap). The phases of a strided problem are neighbouring rows:
they meet in the same block and are interleaved on the way out.

* Load: cp.async copies a stage of ``block_k`` channels (input window and packed weights) into shared memory while the
  stage before is multiplied.
* Multiply (k4_multiply.py): 16-byte shared loads into registers, then thread_m * thread_n multiply-adds a tap. In
  float64 tensor cores can take its place (k5_dmma.py).
* Store: the sums go through shared memory, from where consecutive threads write consecutive outputs.
* Order (thread_sums.py): products seldom wait for their registers.
* Sums: long ones are put aside now and then, so that they lose fewer digits; where that leaves room for deeper stages,
  by upper halves (ptx/halves.py; encodec_u1: 0.557 ms for 0.587; H100, a script).
* Left out: where K is no multiple of the stride, some rows have a tap less. A block's rows are then those of one phase,
  if channels are many, so that it multiplies no tap that is not there (SeamlessM4T's layer, K = 11 and stride 5: 0.81
  to 0.65 ms). Warps behind the last column multiply nothing (hifigan_u1 at batch 1, a column more than four tiles:
  0.101 to 0.088 ms).
* Split (channel_parts.py): where few tiles have long sums, the input channels are dealt out to parts.
* Few blocks (k4_few.py): tiles of other shapes, where the usual ones would leave much of the GPU idle; rows of unequal
  taps then lie apart, those of all phases in a block and those of one in a warp.

Shared loads a multiply-add: 1/thread_n for w and 1/(thread_m * taps) for x, where k3 has more than one; and they are
four or two elements wide.

Measured (H200, kb64, float32): 8.59 ms, 3.9 times k3.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from numba import cuda, int32, int64, types, uint32, uint64

from ..elements import ELEMENTS
from ..launch import Kernel, flat
from ..layout import NO_GPU, Layout
from ..ptx import (
    cp_async,
    cp_async_commit,
    cp_async_wait,
    load_vector,
    shared_base,
    store_vector,
)
from . import device
from .k4_config import Config, tiny
from .k4_cost import choose
from .k4_multiply import make_multiply
from .k4_plan import config_for, plan_of
from .rung import Rung, cuda_core_reason, taking_bias
from .thread_sums import sums_aside
from .weight_cache import packed_weights


@cache
def make_kernel(config: Config, make_multiply=make_multiply, name: str = "k4_register_tile") -> Kernel:
    """``make_multiply``: how its blocks multiply; the kernel of another rung, ``name``, may differ in that alone."""
    threads, vector, stages = config.threads, config.vector, config.stages
    block_n, block_k = config.block_n, config.block_k
    warps, warp_columns, reach = threads // 32, 32 // config.lanes_m * config.thread_n, config.halo + config.lead
    width, pitch = config.width, config.pitch
    x_vector, x_stage, w_stage = config.x_vector, config.x_stage, config.w_stage
    stage = x_stage + w_stage
    stride, dilation, taps = config.stride, config.dilation, config.taps
    gap, rows = taps.gap, taps.rows
    phases, channels, parts, ragged = config.phases, config.channels, config.parts, config.ragged
    a_pitch, co_pitch = (channels * pitch, pitch) if config.apart else (pitch, phases * pitch)  # of the staged tile
    accumulator, sums = ELEMENTS[config.dtype].accumulator, config.thread_m * config.thread_n
    w_copies = -(-w_stage // (vector * threads))
    chunk_shift = config.chunk_shift
    x_per_row = config.copied // x_vector
    x_copies, sources = -(-x_per_row // 32), config.entries - 2
    whole_chunks, partial, partials, halves = config.whole_chunks, config.partial, config.partials, config.halves
    itemsize = config.itemsize
    run = block_n * phases * gap  # consecutive outputs of one channel in the tile
    y_vector = config.y_vector
    lanes_run = min(run // y_vector, threads)
    channel_lanes = threads // lanes_run
    all_store = threads % lanes_run == 0
    add_partial_sums, store_partial_sums = sums_aside(sums, vector, threads, halves)
    window, weights, place_of, tails_of, multiply_stage, put = make_multiply(config)
    copy_x, copy_w, wait_for_stage = cp_async(x_vector), cp_async(vector), cp_async_wait(stages - 2)

    @cuda.jit(device=True, inline="always")
    def aim(source, place, first, shift, columns, first_column, batch, length, stride_n, stride_l):
        """Where each vector of the window lies in x, at channel 0; -1: not in the signal.

        It stands in shared memory, because as registers of the threads that copy it would cost more than it saves.
        """
        p = int32(cuda.threadIdx.x)
        while p < x_per_row:
            n, column = divmod(first + p * x_vector - shift, columns)
            if p * x_vector == shift:  # for the store, which would else keep the division's result in registers
                place[0], place[1] = n, column
            i = first_column + column
            inside = n >= 0 and n < batch and i >= 0 and i < length
            source[uint64(p)] = n * stride_n + i * stride_l if inside else int64(-1)
            p = int32(p + threads)

    @cuda.jit(device=True, inline="always")
    def load(shared, base, x, source, offset, stride_c, channels_left, w, w_offset):
        """Start the copies of one stage."""
        warp, lane, thread = int32(cuda.threadIdx.x // 32), int32(cuda.threadIdx.x % 32), int32(cuda.threadIdx.x)
        # A warp copies whole channels, one after the other: p needs no division, and where a vector lies is worked out
        # once for all of them.
        for j in range(x_copies):
            p = int32(lane + 32 * j)
            if 32 * (j + 1) <= x_per_row or p < x_per_row:
                first = source[uint64(p)]
                inside = first >= 0
                element = first + offset + warp * stride_c if inside else int64(0)
                forth = warps * stride_c if inside else int64(0)
                at = int32(base + warp * width + p * x_vector)
                for z in range(-(-block_k // warps)):
                    if z < block_k // warps or warp < block_k % warps:
                        exists = whole_chunks or warp + z * warps < channels_left
                        copy_x(shared, at + z * warps * width, x, element, inside and exists)
                        element += forth
        at, w_at = int32(base + x_stage + thread * vector), w_offset + thread * vector
        for j in range(w_copies):
            if (j + 1) * threads * vector <= w_stage or int32((thread + j * threads) * vector) < w_stage:
                copy_w(shared, at + j * threads * vector, w, w_at + j * threads * vector, True)

    @cuda.jit(device=True, inline="always")
    def advance(base, acc, xs, ws, shared, source, place, x, w, s, end, total, chunk, channel, first, columns,
                first_column, batch, length, stride_n, stride_c, stride_l, x_group, in_per_group, w_tile, of_columns,
                of_weights, tails, channel_chunks, live):  # fmt: skip
        """Multiply the stages from s to ``end``, the copies running stages - 1 ahead: the next are those of tap chunk
        ``chunk`` and of ``channel``. Returns the next stage, chunk and channel."""
        while s < end:
            if s >= 0:
                wait_for_stage()
                cuda.syncthreads()  # the stage has landed for everybody, and everybody has left the one loaded next
            ahead = int32(s + stages - 1)
            if ahead < total:
                if channel == 0:
                    cuda.syncthreads()  # nobody still copies the chunk before
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

    @cuda.jit(device=True, inline="always")
    def store(y, shared, values, bias, has_bias, place, columns, first_column, batch, co_begin, channels_left, a_begin,
              out_channels, out_length, padding):  # fmt: skip
        """Write the tile that lies in shared memory: consecutive threads, consecutive outputs."""
        n_first, column_first = place[0], place[1]
        thread = int32(cuda.threadIdx.x)
        end = run if all_store or thread < channel_lanes * lanes_run else 0  # the rest would write again
        for e in range(thread % lanes_run * y_vector, end, lanes_run * y_vector):
            # Position and phase are worked out once and serve the output channels of the block.
            offset, row_column = e % gap, e // gap
            a, column = row_column % phases, row_column // phases
            n, i = n_first, column_first + column
            if i >= columns:
                # Divided in 32 bits, which hold i where more than one sample ends in the tile.
                ended = int64(uint32(i) // uint32(columns)) if columns < block_n else int64(1)
                n += ended
                i -= ended * columns
            o = (first_column + i) * stride + (a_begin + a) * dilation + offset - padding
            if n < batch and a_begin + a < rows and o >= 0 and o < out_length:
                at = int32(a * a_pitch + column)
                co = co_begin + thread // lanes_run
                target = (n * out_channels + co) * out_length + o
                while co < co_begin + channels_left:
                    source = int32(at + (co - co_begin) * co_pitch)
                    if y_vector > 1:
                        load_vector(values, 0, shared, source)
                        if has_bias:
                            for z in range(y_vector):
                                values[z] += bias[uint64(co)]
                        store_vector(y, target, values, 0)
                    else:
                        value = shared[uint64(source)]
                        if offset != 0:
                            value = accumulator(0)
                        if has_bias:
                            value += bias[uint64(co)]
                        y[uint64(target)] = value
                    co += channel_lanes
                    target += channel_lanes * out_length

    def k4_register_tile(
        x, stride_n, stride_c, stride_l, w, bias, has_bias, y, batch, length, out_length, in_per_group, out_per_group,
        groups, padding, columns, first_column, row_tiles, tap_chunks, channel_chunks, last_row,
    ):  # fmt: skip
        shared = cuda.shared.array(0, dtype=accumulator)
        source = cuda.shared.array(sources, dtype=int64)
        place = cuda.shared.array(2, dtype=int64)
        # Row tiles are neighbours in the grid: they read the same inputs. Column tiles may be more than one axis takes.
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
        # A warp all of whose columns are behind the last one leaves the products to the others.
        live = first + column_at // warp_columns * warp_columns < batch * columns
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
            # A sum of hundreds of terms loses digits with its length; short ones, added up, lose fewer. To change sums
            # in the loop over stages, if only now and then, would cost moves of all of them at every stage.
            if s < total:
                if s > partial:
                    add_partial_sums(acc, shared, partials + thread * vector)
                store_partial_sums(shared, partials + thread * vector, acc)
                if not halves:
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

    stored = ELEMENTS[config.dtype].storage
    integers = (types.int64,)
    signature = (flat(stored), *integers * 3, flat(stored), flat(stored), *integers, flat(stored), *integers * 13)
    return Kernel(
        name,
        k4_register_tile,
        signature,
        threads,
        config.shared_bytes,
        config.min_blocks,
        key=repr(config),
    )


class RegisterTile(Rung):
    name = "k4_register_tile"
    idea = "a matrix product from registers: 16-byte loads, one window for all taps, cp.async double buffering"
    minimum_cc = (8, 0)  # cp.async

    # The kernel of a configuration that does not split its sums; the configuration for an input's layout, a problem and
    # a device.
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
        return self.make_kernel(replace(config, splits=1))  # in how many parts the channels are summed is the launch's

    def prepare(self, x, w, bias, y, problem, config=None, precision=None):
        y_aligned = y.offset % 16 == 0
        packing, launch, second = plan_of(
            self.make_kernel, self.choose, problem, config, x, w, bias is not None, y_aligned, device.of(x.index)
        )
        fill = taking_bias(second.after(launch, x.index) if second else launch, bias)
        return lambda x, w, bias, y: fill(x, packed_weights(w, packing), bias, y)
