"""k4: a matrix product from registers (kernels/README.md).

* producer.py, pack.py: cp.async copies a stage during the last one's products.
* mainloop.py: 16-byte shared loads; one window serves every tap of a row.
* epilogue.py: interleaves the phases.

Long float32 sums are accumulated in blocks, to limit rounding error. Where K is no multiple of the stride, a block
may have one phase, and multiplies only existing taps.

Measured (H200, kb64, float32): 8.37 ms, 4.0 times k3."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from numba import cuda, int32, int64

from numba_tconv.kernels.common import split_sums
from numba_tconv.kernels.common.packed_weights import after_packing
from numba_tconv.kernels.common.register_tile import make_put_aside
from numba_tconv.kernels.rung import Rung, Step, taking_bias
from numba_tconv.ptx import cp_async, cp_async_commit, cp_async_wait, device_function, griddepcontrol_wait, shared_base
from numba_tconv.runtime import device
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel

from . import pack
from .arguments import Block, Progress, Registers, Stage
from .choose import choose
from .epilogue import make_store
from .mainloop import make_multiply
from .plan import config_for, kernel_of, plan_of
from .producer import make_aim, make_load_window
from .tile import Config, tiny


def make_advance(config: Config, multiply: Callable):
    """Build ``advance``: multiplies up to stage ``end``, copies ahead, returns the Progress.

    ``tails``: from Multiply.tails_of. ``live``: whether the thread multiplies."""
    threads, vector, stages, block_k = config.threads, config.vector, config.stages, config.block_k
    x_stage, w_stage, itemsize = config.x_stage, config.w_stage, config.itemsize
    slot_size, lead, chunk_shift = config.stage, config.lead, config.chunk_shift
    w_copies = -(-w_stage // (vector * threads))
    aim, load_window = make_aim(config, threads // 32), make_load_window(config, threads // 32)
    copy_w, wait_for_stage = cp_async(vector), cp_async_wait(stages - 2)

    @device_function
    def load_weights(block, slot, packed, offset):
        thread = int32(cuda.threadIdx.x)
        target, source = int32(slot + x_stage + thread * vector), offset + thread * vector
        for j in range(w_copies):
            if (j + 1) * threads * vector <= w_stage or int32((thread + j * threads) * vector) < w_stage:
                copy_w(block.shared, target + j * threads * vector, packed, source + j * threads * vector, True)

    @device_function
    def advance(progress, end, block, registers, lane, tails, live, x, packed, sizes, grid):
        channel, chunk, stage = progress.channel, progress.chunk, progress.stage
        while stage < end:
            if stage >= 0:
                wait_for_stage()
                cuda.syncthreads()  # the stage has landed; a slot is free
            ahead = int32(stage + stages - 1)
            if ahead < block.stages:
                if channel == 0:
                    cuda.syncthreads()
                    aim(block, lead + chunk * chunk_shift, x, sizes, grid)
                    cuda.syncthreads()
                slot, in_x = int32(ahead % stages * slot_size), block.group_offset + channel * x.stride_c
                channels_left, in_packed = sizes.in_per_group - channel, block.tile_offset + ahead * w_stage
                load_window(block, slot, x, in_x, channels_left)
                load_weights(block, slot, packed, in_packed)
                channel = int32(channel + block_k)
                if channel >= sizes.in_per_group:
                    channel, chunk = int32(0), int32(chunk + 1)
            cp_async_commit()
            if stage >= 0 and live:
                slot = int32(block.base + itemsize * slot_size * (stage % stages))
                window = int32(slot + itemsize * lane.window)
                weights = int32(slot + itemsize * (x_stage + lane.weights))
                last = tails if stage >= block.stages - grid.channel_chunks else int32(-1)
                multiply(registers, Stage(block.shared, window, weights), last)
            stage = int32(stage + 1)
        return Progress(stage=stage, chunk=chunk, channel=channel)

    return advance


@cache
def make_kernel(config: Config, make_multiply=make_multiply, name: str = "k4_register_tile") -> Kernel:
    """The kernel of k4, or of k5_dmma with its own ``make_multiply``."""
    threads, vector, block_n = config.threads, config.vector, config.block_n
    stages, w_stage = config.stages, config.w_stage
    warp_columns, window_offsets = 32 // config.lanes_m * config.thread_n, config.entries - 2
    phases, row_parts, ragged = config.phases, config.row_parts, config.ragged
    accumulator, all_sums = ELEMENTS[config.dtype].accumulator, config.thread_m * config.thread_n
    partial, partials = config.partial, config.partials
    put_aside, add_partial_sums = make_put_aside(config, all_sums)
    mainloop = make_multiply(config)
    window, weights, multiply, put = mainloop.window, mainloop.weights, mainloop.multiply, mainloop.put
    lane_of, tails_of = mainloop.lane_of, mainloop.tails_of
    advance, store = make_advance(config, multiply), make_store(config)

    def k4_register_tile(x, packed, bias, y, sizes, grid):
        shared = cuda.shared.array(0, dtype=accumulator)
        offsets = cuda.shared.array(window_offsets, dtype=int64)
        start = cuda.shared.array(2, dtype=int64)
        # Neighbours read the same inputs. Column tiles may need two axes.
        group, row_tile = divmod(int32(cuda.blockIdx.x), int32(grid.row_tiles))
        thread = int32(cuda.threadIdx.x)
        first_column = (int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y) * block_n
        lane = lane_of(thread)

        base = shared_base(shared)
        sums, of_window = cuda.local.array(all_sums, dtype=accumulator), cuda.local.array(window, dtype=accumulator)
        registers = Registers(sums, of_window, cuda.local.array(weights, dtype=accumulator))
        results = cuda.local.array(vector, dtype=accumulator)
        for s in range(all_sums):
            registers.sums[s] = accumulator(0)

        total = int32(grid.tap_chunks * grid.channel_chunks)
        group_offset = group * sizes.in_per_group * x.stride_c
        tile_offset = int64(cuda.blockIdx.x) * total * w_stage
        block = Block(shared, base, offsets, start, first_column, group_offset, tile_offset, total)
        tails = tails_of(lane, int32(grid.full_phases - row_tile % row_parts * phases)) if ragged else int32(-1)
        # Warps behind the last column do not multiply.
        live = first_column + lane.column // warp_columns * warp_columns < sizes.batch * grid.columns
        griddepcontrol_wait()  # for packed weights
        stage, chunk, channel = int32(1 - stages), int32(0), int32(0)
        if not partial:
            now = Progress(stage, chunk, channel)
            stage, chunk, channel = advance(now, total, block, registers, lane, tails, live, x, packed, sizes, grid)
        end = int32(min(partial, total))
        while partial and stage < total:
            now = Progress(stage, chunk, channel)
            stage, chunk, channel = advance(now, end, block, registers, lane, tails, live, x, packed, sizes, grid)
            # Not in ``advance``, where the compiler would move the sums at every stage.
            if stage < total:
                put_aside(registers.sums, shared, partials + thread * vector, stage > partial)
                end = int32(min(end + partial, total))
        if partial and total > partial:
            add_partial_sums(registers.sums, shared, partials + thread * vector)
        cuda.syncthreads()  # the output tile overwrites the stages
        put(shared, registers.sums, results, lane)
        cuda.syncthreads()
        store(y, shared, start, group, row_tile, registers.weights, bias, sizes, grid)

    return kernel_of(name, k4_register_tile, config, threads)


class RegisterTile(Rung):
    name = "k4_register_tile"
    idea = "a matrix product from registers: 16-byte loads, one window for all taps, cp.async double buffering"
    minimum_cc = (8, 0)  # cp.async

    # ``choose`` takes (layout of x, problem, device).
    make_kernel, choose = staticmethod(make_kernel), staticmethod(config_for)
    tiny_configs = staticmethod(tiny)

    def supports(self, problem, dtype, precision):
        if dtype in (torch.float16, torch.bfloat16):
            return "its cp.async pipeline takes float32 and float64; half types wait for the tensor-core rungs"
        return super().supports(problem, dtype, precision)

    def config(self, problem, dtype, precision=None):
        return choose(problem, dtype)

    def config_of(self, x, problem, precision, device):
        return self.choose(x, problem, device)

    def tile(self, config):
        c = config
        sums = f"{c.block_m} rows by {c.block_n} columns, {c.thread_m} by {c.thread_n} a thread"
        parts = "" if c.splits == 1 else f"; input channels in {c.splits} parts, whose sums are added up"
        return f"{sums}; {c.stages} stages of {c.block_k} input channels{parts}"

    def kernel(self, config):
        return self.make_kernel(replace(config, splits=1))

    def steps(self, config, problem, device=device.H200):
        packing = pack.make_kernel(pack.order_of(config))
        sums = split_sums.steps(config.splits, config.dtype, early=device.launches_early)
        return [Step("pack", packing, packing.shared_bytes), *super().steps(config, problem, device), *sums]

    def prepare(self, x, w, bias, y, problem, config=None, precision=None):
        y_aligned = y.offset % 16 == 0
        packing, launch, second = plan_of(
            self.make_kernel, self.choose, problem, config, x, w, bias is not None, y_aligned, device.of(x.index)
        )
        fill = after_packing(packing, launch)
        return taking_bias(second.after(fill, x.index) if second else fill, bias)
