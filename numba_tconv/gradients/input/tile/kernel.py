"""grad_input_tile: a register-tiled matrix product on CUDA cores.

grad_input has a row for every input channel, a column for every position, and the depth (output channel, tap). The taps
of one row read one window of grad_output (gradients/window.py). As in k4, a thread holds ``thread_m x thread_n`` sums.

* Load: cp.async copies a stage (windows of some output channels and phases, and packed weights) during the products of
  the stage before. Half types are converted, without overlap. A table holds the place of each column, because copies
  and multiply-adds share the schedulers.
* Multiply: 16-byte shared loads, then thread_m * thread_n multiply-adds a tap. Phases with one tap less have their own
  loop without tests. Large thread tiles and blocks reduce register writes and copies a product.
* Order (kernels/common/thread_sums.py): avoids register bank conflicts.
* Sums: long float32 sums are put aside in blocks, to limit rounding error.
* Store: through shared memory; consecutive threads write consecutive positions.
* Beside (few.py): blocks may copy their first windows while the weights are packed.
* Parts (gradients/input/parts.py): few blocks with long sums split the output channels.

Each grad_output element is read once a row tile (and tap chunk), each weight once a column tile."""

from __future__ import annotations

import math
from functools import cache, lru_cache

import torch
from numba import cuda, int32, int64, types, uint32, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.input.parts import second_stage, split
from numba_tconv.gradients.rung import GradientRung
from numba_tconv.gradients.window import locate, make_aim, make_fetch
from numba_tconv.kernels.common import partial_sum
from numba_tconv.kernels.common.thread_sums import make_sums
from numba_tconv.kernels.rung import cuda_core_reason
from numba_tconv.ptx import (
    add_vectors,
    cp_async,
    cp_async_commit,
    cp_async_wait,
    device_function,
    griddepcontrol_wait,
    load_vector_at,
    recomputed,
    repeated,
    shared_base,
    store_vector,
    store_vectors,
)
from numba_tconv.runtime import device as gpu
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat
from numba_tconv.runtime.layout import room

from .few import choose
from .pack import make_kernel as make_pack
from .pack import prepare_pack
from .tile import Config, tiny

GRID_AXIS = 65_535  # blocks along y or z of a grid, at most


@cache
def make_kernel(config: Config) -> Kernel:
    threads, vector, vector_m, stages = config.threads, config.vector, config.vector_m, config.stages
    block_m, block_n, tap_chunk, whole = config.block_m, config.block_n, config.tap_chunk, config.whole
    thread_m, thread_n, lanes_m, lanes_n = config.thread_m, config.thread_n, config.lanes_m, 32 // config.lanes_m
    warps_n, rows, step, stride = config.warps_n, config.taps.rows, config.taps.step, config.stride
    phases, channels, pairs = config.phases, config.channels, config.pairs
    g_stage, w_stage, partial, partials = config.g_stage, config.w_stage, config.partial, config.partials
    pitch, result_pitch = config.pitch, config.result_pitch
    stage, sums, window = g_stage + w_stage, thread_m * thread_n, thread_n + config.halo
    early, table, entries, long_phases = config.early, config.table, config.entries, config.long_phases
    w_copies = -(-w_stage // (vector * threads))
    lanes_run, pairs_a_turn, short_a_turn = math.gcd(block_n, threads), config.pairs_a_turn, config.short_a_turn
    short_phases, itemsize = phases - long_phases, config.itemsize
    g_row, w_row, w_short = itemsize * pitch, itemsize * tap_chunk * block_m, itemsize * (tap_chunk - 1) * block_m
    add_products, copy_sums = make_sums(thread_n, vector, config.exchanged)
    element = ELEMENTS[config.dtype]
    store, accumulator = element.store, element.accumulator
    aim = make_aim(stride, config.dilation)
    copy_w, wait_for_stage = cp_async(vector), cp_async_wait(stages - 2)
    add_partial_sums = add_vectors(sums // vector, threads * vector)
    store_partial_sums = store_vectors(sums // vector, threads * vector)

    @device_function
    def aimed(source, column, a):
        return source[uint64(column * phases + a)]

    fetch = make_fetch(config.window, aimed)

    @device_function
    def place(s, channel_chunks, parts):
        """Tap chunk and first phase of stage ``s``."""
        rest = uint32(s) // uint32(channel_chunks)
        chunk = rest // uint32(parts)
        return int32(chunk), int32(rest - chunk * uint32(parts)) * phases

    @device_function
    def taps_of(pair, full, taps):
        """Taps of a pair: ``taps`` in the first ``full`` phases of the stage, one less in the others."""
        return taps if uint32(pair) % uint32(phases) < full else taps - 1

    @device_function
    def product(b, state):
        """Tap ``b`` of a row."""
        acc, gs, ws, shared, base, w_at, own = state
        # A tap that a row lacks must not multiply: zero times NaN is NaN.
        if whole or long_phases or b < own:
            for m in range(0, thread_m, vector_m):
                at = int32(w_at + itemsize * (b * block_m + m * lanes_m))
                if vector_m == vector:
                    load_vector_at(ws, m, shared, at)
                else:
                    for z in range(vector_m):
                        ws[m + z] = shared[uint64((at - base) // itemsize + z)]
            for m in range(thread_m):
                add_products(acc, ws, gs, m, b * step)

    def multiply_taps(taps):
        products = repeated(product, taps)
        window = thread_n + -(-(taps - 1) * step // vector) * vector

        @device_function
        def multiply(z, state):
            """Pair ``z`` of a turn: every tap reads the same register window at another offset."""
            acc, gs, ws, shared, base, g_at, w_at, w_row, pair, full, taps_left = state
            for q in range(0, window, vector):
                load_vector_at(gs, q, shared, int32(g_at + z * g_row + itemsize * q))
            own = taps_of(pair + z, full, taps_left)
            products(int32(0), (acc, gs, ws, shared, base, int32(w_at + z * w_row), own))

        return multiply

    multiply, multiply_short = multiply_taps(tap_chunk), multiply_taps(max(1, tap_chunk - 1))
    multiply_turn, multiply_short_turn = repeated(multiply, pairs_a_turn), repeated(multiply_short, short_a_turn)

    def grad_input_tile(
        g, g_n, g_c, g_l, w, grad, batch, length, out_length, in_per_group, out_per_group, groups, padding, columns,
        window_columns, row_tiles, tap_chunks, channel_chunks, parts, phases_total, taps_per_row, full_rows,
    ):  # fmt: skip
        shared = cuda.shared.array(0, dtype=accumulator)
        source = cuda.shared.array(entries, dtype=int64)
        # Row tiles, which read the same windows, are neighbours in the grid.
        group, row_tile = divmod(int32(cuda.blockIdx.x), int32(row_tiles))
        thread = int32(cuda.threadIdx.x)
        first = (int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y) * block_n
        n_first, i_first = divmod(first, columns)
        warp, lane = thread // 32, thread % 32
        row_at = int32(warp // warps_n * (lanes_m * thread_m) + lane // lanes_n * vector_m)
        column_at = int32(warp % warps_n * (lanes_n * thread_n) + lane % lanes_n * thread_n)
        base = shared_base(shared)
        g_base = int32(base + itemsize * column_at)
        w_base = int32(base + itemsize * (g_stage + row_at))
        acc = cuda.local.array(sums, dtype=accumulator)
        gs = cuda.local.array(window, dtype=accumulator)
        ws = cuda.local.array(thread_m, dtype=accumulator)
        results = cuda.local.array(vector, dtype=accumulator)
        for s in range(sums):
            acc[s] = accumulator(0)

        # The loads run stages - 1 ahead; chunk, phase and channel are the next load's.
        total = int32(tap_chunks * parts * channel_chunks)
        chunk, phase, channel = int32(0), int32(0), int32(0)
        w_offset = int64(cuda.blockIdx.x) * total * w_stage
        g_offset = group * out_per_group * g_c
        load_at, multiply_at = int32(0), int32(0)  # offsets of the stages
        aside = int32(partial)  # stages until the sums are put aside
        s = int32(1 - stages)
        while s < total:
            if s >= 0:
                wait_for_stage()
                cuda.syncthreads()  # the stage has landed, and the slot loaded next is free
            if s + stages - 1 < total:
                if channel == 0:
                    cuda.syncthreads()  # the table is free
                    e = thread
                    while e < table:
                        column, a = uint32(e) // uint32(phases), uint32(e) % uint32(phases)
                        tap = phase + chunk * int64(tap_chunk * rows)
                        source[uint64(e)] = aim(n_first, i_first, column, window_columns, batch, tap, a,
                                                phases_total - phase, padding, out_length, g_n, g_l)  # fmt: skip
                        e = recomputed(int32(e + threads))  # not worth unrolling
                    cuda.syncthreads()
                fetch(shared, load_at, g, g_offset, g_c, out_per_group - channel, source)
                if early and channel == 0:
                    griddepcontrol_wait()  # for the weights
                for j in range(w_copies):
                    e = int32((thread + j * threads) * vector)
                    if (j + 1) * threads * vector <= w_stage or e < w_stage:
                        copy_w(shared, load_at + g_stage + e, w, w_offset + e, True)
                load_at = int32(load_at + stage if load_at < (stages - 1) * stage else 0)
                w_offset += w_stage
                g_offset += channels * g_c
                channel = int32(channel + channels)
                if channel >= int32(out_per_group):
                    g_offset = group * out_per_group * g_c
                    channel, phase = int32(0), int32(phase + phases)
                    if phase >= int32(phases_total):
                        phase, chunk = int32(0), int32(chunk + 1)
            cp_async_commit()
            if s >= 0:
                full, taps_left = int32(phases), int32(tap_chunk)  # phases of the stage with all taps; their taps
                if not (whole or long_phases):
                    at_chunk, at_phase = place(s, channel_chunks, parts)
                    full, taps_left = int32(full_rows - at_phase), int32(taps_per_row - at_chunk * tap_chunk)
                g_at = int32(g_base + itemsize * multiply_at)
                w_at = int32(w_base + itemsize * multiply_at)
                multiply_at = int32(multiply_at + stage if multiply_at < (stages - 1) * stage else 0)
                if long_phases:
                    channel_left = int32(channels)
                    while channel_left > 0:
                        # The long phases come last, because they would slow down the others' loop.
                        g_long, w_long = g_at, w_at
                        g_at, w_at = int32(g_at + long_phases * g_row), int32(w_at + long_phases * w_row)
                        p = int32(0)
                        while p < short_phases:
                            multiply_short_turn(
                                int32(0), (acc, gs, ws, shared, base, g_at, w_at, w_short, 0, full, taps_left)
                            )
                            g_at, w_at = int32(g_at + short_a_turn * g_row), int32(w_at + short_a_turn * w_short)
                            p = int32(p + short_a_turn)
                        for _ in range(long_phases):
                            multiply(int32(0), (acc, gs, ws, shared, base, g_long, w_long, w_row, 0, full, taps_left))
                            g_long, w_long = int32(g_long + g_row), int32(w_long + w_row)
                        channel_left = int32(channel_left - 1)
                else:
                    pair = int32(0)
                    while pair < pairs:
                        multiply_turn(int32(0), (acc, gs, ws, shared, base, g_at, w_at, w_row, pair, full, taps_left))
                        g_at, w_at = int32(g_at + pairs_a_turn * g_row), int32(w_at + pairs_a_turn * w_row)
                        pair = int32(pair + pairs_a_turn)
                aside = int32(aside - 1)
                # The error of a float32 sum grows with its length.
                if partial and aside == 0:
                    aside = int32(partial)
                    if s >= partial:
                        add_partial_sums(acc, shared, partials + thread * vector)
                    store_partial_sums(shared, partials + thread * vector, acc)
                    for i in range(sums):
                        acc[i] = accumulator(0)
            s = int32(s + 1)

        if partial and total >= partial:
            add_partial_sums(acc, shared, partials + thread * vector)
        cuda.syncthreads()  # the result takes the place of the stages
        for m in range(thread_m):
            row = row_at + m // vector_m * (vector_m * lanes_m) + m % vector_m
            for n in range(0, thread_n, vector):
                copy_sums(results, acc, m, n)
                store_vector(shared, row * result_pitch + column_at + n, results, 0)
        cuda.syncthreads()
        first_row = row_tile * block_m
        rows_left = int32(min(block_m, in_per_group - first_row))
        e = int32(thread % lanes_run)
        while e < block_n:
            n, i = locate(n_first, i_first, e, columns)
            if n < batch and i < length:
                m = int32(thread // lanes_run)
                target = ((n * groups + group) * in_per_group + first_row + m) * length + i
                while m < rows_left:
                    grad[uint64(target)] = store(shared[uint64(m * result_pitch + e)])
                    target += threads // lanes_run * length
                    m = int32(m + threads // lanes_run)
            e = int32(e + lanes_run)

    stored, integers = flat(element.storage), (types.int64,)
    signature = (stored, *integers * 3, flat(accumulator), stored, *integers * 16)
    return Kernel(
        "grad_input_tile",
        grad_input_tile,
        signature,
        threads,
        config.shared_bytes,
        config.min_blocks,
        key=repr(config),
    )


class InputTile(GradientRung):
    name = "grad_input_tile"
    of = "grad_input"
    idea = "a matrix product from registers: one window of grad_output for all taps of a row, loaded a stage ahead"
    minimum_cc = (8, 0)  # cp.async

    def supports(self, problem, dtype, precision):
        return cuda_core_reason(dtype, precision)

    def config(self, problem, dtype, device=None, precision=None):
        return choose(problem, dtype, device or gpu.H200)

    def tiny_configs(self, problem, dtype):
        return tiny(problem, dtype)

    def kernels(self, config):
        alone = config.alone
        sums = [(kernel, 0) for kernel in partial_sum.kernels_of(config, config.dtype)]
        return [(make_kernel(alone), config.shared_bytes), (make_pack(alone, config.beside), 0), *sums]

    def prepare(self, grad_output, weight, result, problem, config=None, precision=None):
        like, pack, launch, second = _prepared(
            *(problem, config, result.dtype, grad_output.strides, weight.strides, gpu.of(result.index)),
        )
        packed_room = room(like.shape, like.dtype, result.index)
        sums_room = room((second.sums,), torch.float32, result.index) if second else None

        def fill(grad_output, weight, result):
            packed = packed_room()
            pack(weight, packed)
            if second:
                sums = sums_room()
                launch(grad_output, packed, sums)
                second.launch(sums, packed, result)
            else:
                launch(grad_output, packed, result)

        return fill


@lru_cache(maxsize=1024)
def _prepared(
    problem: Problem,
    config: Config | None,
    dtype: torch.dtype,
    g_strides: tuple,
    w_strides: tuple,
    device: gpu.Device,
) -> tuple[torch.Tensor, Prepared, Prepared, partial_sum.SecondStage | None]:
    """A stand-in for the packed weights, the launches that pack and that compute, and the second stage for parts, or
    None."""
    config = config or choose(problem, dtype, device)
    second = second_stage(problem, dtype, config.splits, config.early)
    packed, pack = prepare_pack(problem, config, w_strides)
    p, t = split(problem, config.splits), problem.taps
    row_tiles, column_tiles = config.row_tiles(p), config.column_tiles(p)
    planes = -(-column_tiles // GRID_AXIS)
    phases = min(t.rows, p.kernel_size)
    launch = make_kernel(config.alone).prepare(
        (row_tiles * p.groups, -(-column_tiles // planes), planes),
        *(alike((p.batch, p.out_channels, p.out_length), dtype, g_strides), *g_strides, packed),
        alike((p.batch, p.in_channels, p.length), dtype),
        *(p.batch, p.length, p.out_length, p.in_channels_per_group, p.out_channels_per_group, p.groups, p.padding),
        *(*config.columns(p), row_tiles, *config.depth(p)),
        *(phases, t.taps_per_row, p.kernel_size - (t.taps_per_row - 1) * phases),
        early=config.early,
    )
    return packed, pack, launch, second
