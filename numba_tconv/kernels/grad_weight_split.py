"""grad_weight_split: a matrix product from registers, its long sums split over blocks.

Idea: the gradient of the weight has a row for every input channel and a column for every pair of an output channel and
a phase (grad_window.py), times the taps of a row; its depth is the positions of all samples, laid end to end. Rows and
columns are few and the sums long, so the positions are split over blocks; the partial sums of the blocks lie in a
workspace, and a second kernel adds them up in a fixed order (grad_sum.py): equal calls give equal bits.

* Load: cp.async copies a stage (positions of x and of the pairs) into shared memory while the stage before is
  multiplied; both have positions as their fastest dimension, in memory, in shared memory and in registers.
* Multiply: a thread loads a vector of positions of its rows, and for each of its pairs the window that the taps meet
  there. With few rows and columns, slices of the threads share the positions of a stage.
* Store: the slices' sums are added up through shared memory, in float64: they may be as many as the threads.

A sum of thousands of products loses digits, so in float32 about a hundred are added up apart, and a split is short.
Each element of x is read once a column tile (and tap chunk), each of grad_output once a row tile.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

import torch
from numba import cuda, float64, int32, int64, types, uint64

from ..elements import ELEMENTS
from ..launch import Kernel, Prepared, alike, flat
from ..problem import Problem
from ..ptx import add_vectors, cp_async_commit, cp_async_wait, load_vector, store_vectors
from . import device as gpu
from .grad_rung import GradientRung
from .grad_sum import accumulator_of, added_up
from .grad_sum import make_kernel as make_sum
from .grad_weight_config import Config, choose, splits_of, tiny
from .grad_window import NOWHERE, locate, make_copy, make_fetch
from .k4_register_tile import vectors_align
from .rung import cuda_core_reason


@cache
def make_kernel(config: Config) -> Kernel:
    threads, vector, slices, slice_threads = config.threads, config.vector, config.slices, config.slice_threads
    block_m, block_l, tap_chunk = config.block_m, config.block_l, config.tap_chunk
    thread_m, thread_p, lanes_m, lanes_p = config.thread_m, config.thread_p, config.lanes_m, config.lanes_p
    phases, channels, stride = config.phases, config.channels, config.stride
    rows, step = config.taps.rows, config.taps.step
    width, x_pitch, g_pitch = config.width, config.pitch(config.block_l), config.pitch(config.width)
    x_stage, stage, sums, window = config.x_stage, config.stage, config.sums, config.window_columns
    partial, partials = config.partial, 2 * config.stage
    table_columns, x_vectors = 2 * width, thread_m * vector
    warp_p = min(lanes_p, 8)  # a warp is about as many lanes along m as along p, which share the fewest loads
    x_vector = config.x_vector
    x_lanes = min(threads, block_l // x_vector)
    element = ELEMENTS[config.dtype]
    accumulator = element.accumulator
    copy_x = make_copy(config.dtype, x_vector)
    fetch, wait_for_stage = make_fetch(config.window), cp_async_wait(0)
    add_partial_sums = add_vectors(sums // vector, threads * vector)
    store_partial_sums = store_vectors(sums // vector, threads * vector)

    @cuda.jit(device=True, inline="always")
    def lane_of(e):
        """Lane along m and lane along p of thread ``e`` of a slice."""
        return int32(e // warp_p % lanes_m), int32(e // (warp_p * lanes_m) * warp_p + e % warp_p)

    @cuda.jit(device=True, inline="always")
    def aim(x_source, source, start, table, n_first, i_first, columns, batch, length, padding, x_n, x_l, g_n, g_l):
        """Where each column of a stage lies in x and in grad_output; NOWHERE: not in them."""
        e = int32(cuda.threadIdx.x)
        while e < width:
            n, i = locate(n_first, i_first, e, columns)
            x_source[uint64(table + e)] = n * x_n + i * x_l if n < batch and i < length else int64(NOWHERE)
            source[uint64(table + e)] = n * g_n + (i * stride - padding) * g_l
            start[uint64(table + e)] = i * stride - padding if n < batch else int64(NOWHERE)
            e = int32(e + threads)

    @cuda.jit(device=True, inline="always")
    def fetch_x(shared, base, x, x_source, table, offset, x_c, rows_left):
        """Copy a stage of x: a row is fetched by neighbouring threads."""
        column = int32(cuda.threadIdx.x % x_lanes * x_vector)
        first = int32(cuda.threadIdx.x // x_lanes)
        hop = threads // x_lanes * x_c
        while column < block_l:
            at = x_source[uint64(table + column)]
            inside = at != NOWHERE
            at += offset + first * x_c
            to = int32(base + first * x_pitch + column)
            m = first
            while m < block_m:
                valid = inside and m < rows_left
                copy_x(shared, to, x, at if valid else int64(0), valid)
                at += hop
                to = int32(to + threads // x_lanes * x_pitch)
                m = int32(m + threads // x_lanes)
            column = int32(column + x_lanes * x_vector)

    @cuda.jit(device=True, inline="always")
    def multiply(acc, xs, gs, shared, x_at, g_at):
        """One vector of positions: every tap of a pair reads the same register window at another offset."""
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
        groups, padding, columns, row_tiles, channel_tiles, parts, tap_chunks, phases_total, stages, split_stages,
    ):  # fmt: skip
        shared = cuda.shared.array(0, dtype=accumulator)
        x_source = cuda.shared.array(table_columns, dtype=int64)
        source = cuda.shared.array(table_columns, dtype=int64)
        start = cuda.shared.array(table_columns, dtype=int64)
        # The tiles of a split are neighbours in the grid: they read the same positions.
        rest, row_tile = divmod(int64(cuda.blockIdx.x), row_tiles)
        rest, channel_tile = divmod(rest, channel_tiles)
        rest, part = divmod(rest, parts)
        rest, chunk = divmod(rest, tap_chunks)
        split, group = divmod(rest, groups)
        first_row, first_channel, first_phase = row_tile * block_m, channel_tile * channels, part * phases
        first_tap = first_phase + chunk * tap_chunk * rows
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

        # The table of a stage's columns is made two stages ahead, its loads one. Sample and position of its first
        # column move by a constant, without a division.
        total = int32(min(split_stages, stages - split * split_stages))
        n, i = divmod(split * split_stages * block_l, columns)
        hop_n, hop_i = divmod(int64(block_l), columns)
        s = int32(-2)
        while s < total:
            if s >= 0:
                wait_for_stage()
            cuda.syncthreads()  # stage and table have landed for everybody, and everybody has left those made next
            table = int32((s + 1) % 2 * width)
            if s >= -1 and s + 1 < total:
                base = int32((s + 1) % 2 * stage)
                fetch_x(shared, base, x, x_source, table, x_offset, x_c, rows_left)
                fetch(shared, base + x_stage, g, source, start, table, g_offset, g_c, g_l, first_tap,
                      phases_total - first_phase, channels_left, out_length)  # fmt: skip
            cp_async_commit()
            aim(x_source, source, start, width - table, n, i, columns, batch, length, padding, x_n, x_l, g_n, g_l)
            n += hop_n
            i += hop_i
            if i >= columns:
                n += 1
                i -= columns
            if s >= 0:
                x_at = int32(s % 2 * stage + lane_m * x_pitch)
                g_at = int32(s % 2 * stage + x_stage + lane_p * g_pitch)
                at = slice_at
                while at < block_l:
                    multiply(acc, xs, gs, shared, x_at + at, g_at + at)
                    at = int32(at + slices * vector)
                if partial and s % partial == partial - 1:
                    if s >= partial:
                        add_partial_sums(acc, shared, partials + thread * vector)
                    store_partial_sums(shared, partials + thread * vector, acc)
                    for z in range(sums):
                        acc[z] = accumulator(0)
            s = int32(s + 1)

        if partial and total >= partial:
            add_partial_sums(acc, shared, partials + thread * vector)
        cuda.syncthreads()  # the sums lie where the stages were
        for z in range(sums):
            shared[uint64(z * threads + thread)] = acc[z]
        cuda.syncthreads()
        e = thread
        while e < sums * slice_threads:
            number, within = int32(e // slice_threads), int32(e % slice_threads)
            lane_m, lane_p = lane_of(within)
            m = int32(number // (thread_p * tap_chunk) * lanes_m + lane_m)
            pair = int32(number // tap_chunk % thread_p * lanes_p + lane_p)
            c, a, b = int32(pair // phases), int32(pair % phases), int32(number % tap_chunk)
            k = first_tap + a + b * rows
            if m < rows_left and c < channels and c < channels_left and first_phase + a < phases_total and k < taps:
                value = float64(0)
                z = int32(0)
                while z < slices:
                    value += float64(shared[uint64(number * threads + z * slice_threads + within)])
                    z = int32(z + 1)
                ci = (split * groups + group) * in_per_group + first_row + m
                result[uint64((ci * out_per_group + first_channel + c) * taps + k)] = accumulator(value)
            e = int32(e + threads)

    stored, integers = flat(element.storage), (types.int64,)
    signature = (stored, *integers * 3, stored, *integers * 3, flat(accumulator), *integers * 16)
    return Kernel(
        "grad_weight_split",
        grad_weight_split,
        signature,
        threads,
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
        aligned = x.offset % 16 == 0 and vectors_align(alike(x.shape, x.dtype, x.strides))
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
            config = replace(config, x_vector=config.vector)
    splits, length = splits_of(p, config, device)
    weights = p.in_channels * p.out_channels_per_group * p.kernel_size
    launch = make_kernel(config).prepare(
        splits * config.blocks(p),
        *(alike((p.batch, p.out_channels, p.out_length), dtype, g_strides), *g_strides),
        *(alike((p.batch, p.in_channels, p.length), dtype, x_strides), *x_strides),
        alike((splits * weights,), accumulator_of(dtype)),
        *(p.batch, p.length, p.out_length, p.in_channels_per_group, p.out_channels_per_group, p.kernel_size),
        *(p.groups, p.padding, config.columns(p), *config.tiles(p)),
        *(min(p.taps.rows, p.kernel_size), config.stages(p), length),
    )
    return splits, launch
