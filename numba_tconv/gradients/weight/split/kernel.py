"""grad_weight_split: a register-tiled matrix product on CUDA cores, its long sums split over blocks.

The gradient has a row for every input channel, a column for every pair of an output channel and a phase
(gradients/window.py) times the taps of a row, and the positions of all samples as its depth. Blocks split the
positions; a second kernel adds the partial sums in a fixed order (gradients/sum.py): equal calls give equal bits.

* Load: cp.async copies a stage of x and of the pairs during the products of the stage before. A thread locates a column
  once for several channels.
* Multiply: a thread loads a vector of positions of its rows, and for each pair the window that the taps meet. With few
  rows and columns, slices of threads share a stage's positions.
* Store: straight from registers; the sums of slices are added through shared memory in float64.
* Rest: where some phases have a tap more, a launch has two kinds of blocks (tile.py), those of the rest last.

Float32 sums are put aside in blocks, and splits are short, to limit rounding error."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

import torch
from numba import cuda, float64, int32, int64, types, uint32, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.rung import GradientRung
from numba_tconv.gradients.sum import accumulator_of, added_up
from numba_tconv.gradients.sum import make_kernel as make_sum
from numba_tconv.gradients.window import NOWHERE, locate, make_aim, make_fetch
from numba_tconv.kernels.k4_register_tile.plan import vectors_align
from numba_tconv.kernels.rung import cuda_core_reason
from numba_tconv.ptx import add_vectors, cp_async_commit, cp_async_wait, device_function, load_vector, store_vectors
from numba_tconv.runtime import device as gpu
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared, alike, flat

from .tile import REST, WHOLE, Config, tiny
from .tiles import choose, splits_of

NUMBERS = 8  # that describe how a kind of blocks shares the work


def make_blocks(config: Config) -> Callable:
    """The function of all blocks of one kind: a kernel's, or a device function for one of two kinds."""
    threads, vector, slices, slice_threads = config.threads, config.vector, config.slices, config.slice_threads
    block_m, block_l, tap_chunk = config.block_m, config.block_l, config.tap_chunk
    thread_m, thread_p, lanes_m, lanes_p = config.thread_m, config.thread_p, config.lanes_m, config.lanes_p
    phases, channels, stride = config.phases, config.channels, config.stride
    rows, step = config.taps.rows, config.taps.step
    x_pitch, g_pitch = config.pitch(config.block_l), config.pitch(config.width)
    x_stage, stage, sums, window = config.x_stage, config.stage, config.sums, config.window_columns
    partial, partials = config.partial, 2 * config.stage
    of_whole, of_rest = config.part == WHOLE, config.part == REST
    x_vectors, hop, vectors_a_turn = thread_m * vector, slices * vector, config.vectors_a_turn
    warp_p = min(lanes_p, 8)  # about as many lanes along m as along p in a warp, for the fewest loads
    element = ELEMENTS[config.dtype]
    accumulator = element.accumulator
    aim, wait_for_stage = make_aim(stride, config.dilation), cp_async_wait(0)
    add_partial_sums = add_vectors(sums // vector, threads * vector)
    store_partial_sums = store_vectors(sums // vector, threads * vector)

    @device_function
    def lane_of(e):
        """Lane along m and lane along p of thread ``e`` of a slice."""
        return int32(e // warp_p % lanes_m), int32(e // (warp_p * lanes_m) * warp_p + e % warp_p)

    @device_function
    def aim_x(stage_of_x, column, a):
        n, i, columns, batch, length, x_n, x_l = stage_of_x
        n, i = locate(n, i, column, columns)
        return n * x_n + i * x_l if n < batch and i < length else int64(NOWHERE)

    @device_function
    def aim_g(stage_of_g, column, a):
        n, i, columns, batch, tap, phases_left, padding, out_length, g_n, g_l = stage_of_g
        return aim(n, i, column, columns, batch, tap, a, phases_left, padding, out_length, g_n, g_l)

    fetch_x, fetch_g = make_fetch(config.x_window, aim_x), make_fetch(config.window, aim_g)

    @device_function
    def multiply(acc, xs, gs, shared, x_at, g_at):
        """Multiply one vector of positions: every tap of a pair reads the same register window at another offset."""
        for m in range(thread_m):
            load_vector(xs, m * vector, shared, x_at + m * (lanes_m * x_pitch))
        for p in range(thread_p):
            for q in range(0, window, vector):
                load_vector(gs, q, shared, g_at + p * (lanes_p * g_pitch) + q)
            for b in range(tap_chunk):
                for m in range(thread_m):
                    for z in range(vector):
                        acc[(m * thread_p + p) * tap_chunk + b] += xs[m * vector + z] * gs[z + b * step]

    def grad_weight_split(
        g, g_n, g_c, g_l, x, x_n, x_c, x_l, result, batch, length, out_length, in_per_group, out_per_group, taps,
        groups, padding, numbers,
    ):  # fmt: skip
        columns, row_tiles, channel_tiles, parts, tap_chunks, phases_total, stages, split_stages = numbers
        whole = taps // rows * rows  # taps of whole rows
        begin, end = whole if of_rest else 0, whole if of_whole else taps
        shared = cuda.shared.array(0, dtype=accumulator)
        # Tiles of a split, which read the same positions, are neighbours in the grid.
        block = cuda.gridDim.x - 1 - cuda.blockIdx.x if of_rest else cuda.blockIdx.x
        rest, row_tile = divmod(int64(block), row_tiles)
        rest, channel_tile = divmod(rest, channel_tiles)
        rest, part = divmod(rest, parts)
        rest, chunk = divmod(rest, tap_chunks)
        split, group = divmod(rest, groups)
        first_row, first_channel, first_phase = row_tile * block_m, channel_tile * channels, part * phases
        first_tap = begin + first_phase + chunk * tap_chunk * rows
        rows_left, channels_left = int32(min(block_m, in_per_group - first_row)), out_per_group - first_channel
        x_offset = (group * in_per_group + first_row) * x_c
        g_offset = (group * out_per_group + first_channel) * g_c

        thread = int32(cuda.threadIdx.x)
        lane_m, lane_p = lane_of(thread % slice_threads)
        slice_at = int32(thread // slice_threads * vector)
        acc = cuda.local.array(sums, dtype=accumulator)
        xs = cuda.local.array(x_vectors, dtype=accumulator)
        gs = cuda.local.array(window, dtype=accumulator)
        for s in range(sums):
            acc[s] = accumulator(0)

        # The loads run a stage ahead; n and i are the next load's first column.
        total = int32(min(split_stages, stages - split * split_stages))
        n, i = divmod(split * split_stages * block_l, columns)
        hop_n, hop_i = divmod(int64(block_l), columns)
        load_at, multiply_at = int32(0), int32(0)  # offsets of the two stages
        aside = int32(partial)  # stages until the sums are put aside
        s = int32(-1)
        while s < total:
            if s >= 0:
                wait_for_stage()
            cuda.syncthreads()  # the stage has landed, and the slot loaded next is free
            if s + 1 < total:
                fetch_x(shared, load_at, x, x_offset, x_c, rows_left, (n, i, columns, batch, length, x_n, x_l))
                fetch_g(shared, load_at + x_stage, g, g_offset, g_c, channels_left,
                        (n, i, columns, batch, first_tap, phases_total - first_phase, padding, out_length, g_n,
                         g_l))  # fmt: skip
                load_at = int32(stage - load_at)
                n += hop_n
                i += hop_i
                if i >= columns:
                    n += 1
                    i -= columns
            cp_async_commit()
            if s >= 0:
                x_at = int32(multiply_at + lane_m * x_pitch)
                g_at = int32(multiply_at + x_stage + lane_p * g_pitch)
                multiply_at = int32(stage - multiply_at)
                at = slice_at
                while at < block_l:
                    multiply(acc, xs, gs, shared, x_at + at, g_at + at)
                    if vectors_a_turn == 2:
                        multiply(acc, xs, gs, shared, x_at + at + hop, g_at + at + hop)
                    at = int32(at + vectors_a_turn * hop)
                aside = int32(aside - 1)
                if partial and aside == 0:
                    aside = int32(partial)
                    if s >= partial:
                        add_partial_sums(acc, shared, partials + thread * vector)
                    store_partial_sums(shared, partials + thread * vector, acc)
                    for z in range(sums):
                        acc[z] = accumulator(0)
            s = int32(s + 1)

        if partial and total >= partial:
            add_partial_sums(acc, shared, partials + thread * vector)
        first_ci = (split * groups + group) * in_per_group + first_row
        if slices == 1:
            # Unrolled: a loop over sums would locate each of them.
            to_row = lanes_m * out_per_group * taps
            rows_left = int32(rows_left - lane_m)
            for p in range(thread_p):
                pair = uint32(p * lanes_p + lane_p)
                c, a = int32(pair // uint32(phases)), int32(pair % uint32(phases))
                k = first_tap + a
                exists = c < channels and c < channels_left and first_phase + a < phases_total
                taps_left = int32(end - k) if exists else int32(0)
                at = ((first_ci + lane_m) * out_per_group + first_channel + c) * taps + k
                for m in range(thread_m):
                    for b in range(tap_chunk):
                        if m * lanes_m < rows_left and b * rows < taps_left:
                            result[uint64(at + b * rows)] = acc[(m * thread_p + p) * tap_chunk + b]
                    at += to_row
        else:
            cuda.syncthreads()  # the sums take the place of the stages
            for z in range(sums):
                shared[uint64(z * threads + thread)] = acc[z]
            cuda.syncthreads()
            # A thread adds up sums across the slices.
            within, number = int32(thread % slice_threads), uint32(thread // slice_threads)
            while number < sums:
                m = int32(number // uint32(thread_p * tap_chunk)) * lanes_m + lane_m
                pair = number // uint32(tap_chunk) % uint32(thread_p) * uint32(lanes_p) + uint32(lane_p)
                c, a, b = int32(pair // uint32(phases)), int32(pair % uint32(phases)), int32(number % uint32(tap_chunk))
                k = first_tap + a + b * rows
                if m < rows_left and c < channels and c < channels_left and first_phase + a < phases_total and k < end:
                    value = float64(0)
                    z = int32(0)
                    while z < slices:
                        value += float64(shared[uint64(int32(number) * threads + z * slice_threads + within)])
                        z = int32(z + 1)
                    at = ((first_ci + m) * out_per_group + first_channel + c) * taps + k
                    result[uint64(at)] = accumulator(value)
                number = uint32(number + slices)

    return grad_weight_split


@cache
def make_kernel(config: Config) -> Kernel:
    element, integers, numbers = ELEMENTS[config.dtype], (types.int64,), types.UniTuple(types.int64, NUMBERS)
    stored = flat(element.storage)
    signature = (stored, *integers * 3, stored, *integers * 3, flat(element.accumulator), *integers * 8, numbers)
    function = make_blocks(config)
    if config.rest:
        whole, rest = device_function(function), device_function(make_blocks(config.rest))
        signature += (numbers, types.int64)

        def function(
            g, g_n, g_c, g_l, x, x_n, x_c, x_l, result, batch, length, out_length, in_per_group, out_per_group, taps,
            groups, padding, numbers, numbers_of_rest, blocks,
        ):  # fmt: skip
            if cuda.blockIdx.x < blocks:
                whole(g, g_n, g_c, g_l, x, x_n, x_c, x_l, result, batch, length, out_length, in_per_group,
                      out_per_group, taps, groups, padding, numbers)  # fmt: skip
            else:
                rest(g, g_n, g_c, g_l, x, x_n, x_c, x_l, result, batch, length, out_length, in_per_group,
                     out_per_group, taps, groups, padding, numbers_of_rest)  # fmt: skip

    return Kernel(
        "grad_weight_split",
        function,
        signature,
        config.threads,
        config.shared_bytes,
        config.min_blocks,
        key=repr(config),
    )


class WeightSplit(GradientRung):
    name = "grad_weight_split"
    of = "grad_weight"
    idea = "a matrix product from registers; the positions are split over blocks, and added up in a fixed order"
    minimum_cc = (8, 0)  # cp.async

    def supports(self, problem, dtype, precision):
        return cuda_core_reason(dtype, precision)

    def config(self, problem, dtype, device=None, precision=None):
        return choose(problem, dtype, device or gpu.H200)

    def tiny_configs(self, problem, dtype):
        return tiny(problem, dtype)

    def kernels(self, config):
        return [(make_kernel(config), config.shared_bytes), (make_sum(config.dtype), 0)]

    def prepare(self, grad_output, x, result, problem, config=None, precision=None):
        aligned = vectors_align(x, 16 // x.dtype.itemsize)
        splits, launch = _prepared(
            *(problem, config, result.dtype, grad_output.strides, x.strides, aligned, gpu.of(result.index)),
        )
        return added_up(launch, result, splits)


@lru_cache(maxsize=1024)
def _prepared(
    problem: Problem,
    config: Config | None,
    dtype: torch.dtype,
    g_strides: tuple,
    x_strides: tuple,
    aligned: bool,
    device: gpu.Device,
) -> tuple[int, Prepared]:
    """Splits, and the launch. ``aligned``: whether 16-byte vectors of x are."""
    p = problem
    if config is None:
        config = choose(p, dtype, device)
        if dtype in (torch.float32, torch.float64) and aligned:
            config = config.copying_vectors()
    splits, _ = splits_of(p, config, device)

    def numbers(tile):
        stages = tile.stages(p)
        return tile.columns(p), *tile.counts(p), tile.phases_of(p), stages, -(-stages // splits)

    of_rest = (numbers(config.rest), splits * config.own_blocks(p)) if config.rest else ()
    weights = p.in_channels * p.out_channels_per_group * p.kernel_size
    launch = make_kernel(config).prepare(
        splits * config.blocks(p),
        *(alike((p.batch, p.out_channels, p.out_length), dtype, g_strides), *g_strides),
        *(alike((p.batch, p.in_channels, p.length), dtype, x_strides), *x_strides),
        alike((splits * weights,), accumulator_of(dtype)),
        *(p.batch, p.length, p.out_length, p.in_channels_per_group, p.out_channels_per_group, p.kernel_size),
        *(p.groups, p.padding, numbers(config), *of_rest),
    )
    return splits, launch
