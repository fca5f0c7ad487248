"""The form of the depthwise rung for few channels with long filters, whose weights no thread's registers hold.

A thread makes neighbouring columns of all phases and output channels of a group; a column is the outputs between one
input and the next. Sums and a window of inputs are in registers. Weights lie in shared memory in the order of taps: a
16-byte load, the same for a whole warp, serves four times as many multiply-adds as a thread has columns.

* Which tap meets which input is known when the kernel is made: straight-line code, in chunks of taps.
* Asynchronous copies bring inputs to shared memory, some channels a group, while the first channels are multiplied. A
  block begins up to a vector early, at a multiple of 16 bytes.
* Outputs replace the inputs in shared memory, at an odd pitch against bank conflicts, and leave in vectors of 16 bytes.
"""

from __future__ import annotations

from functools import cache

from numba import cuda, int32, int64, types, uint32, uint64

from numba_tconv.ptx import (
    copy_vectors,
    cp_async,
    cp_async_commit,
    cp_async_wait,
    device_function,
    multiply_window,
    repeated,
    spread,
    store_gathered,
    store_run,
    store_runs,
)
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, flat

from .long_tile import LongConfig

BATCH = 4  # elements that a thread has in flight, where it copies through registers


@cache
def make_kernel(config: LongConfig) -> Kernel:
    element, taps = ELEMENTS[config.dtype], config.taps
    load, store, accumulator, storage = element.load, element.store, element.accumulator, element.storage
    stride, kernel_size = taps.stride, taps.kernel_size
    in_per_group, out_per_group = config.in_per_group, config.out_per_group
    threads, columns, span, halo, width = config.threads, config.columns, config.span, config.halo, config.width
    vector, batch, run, pitch, active = config.vector, config.batch, config.run, config.pitch, config.active
    weight_pitch, row_weights = config.weight_pitch, kernel_size * out_per_group
    weight_count, sum_count = in_per_group * row_weights, out_per_group * run
    # Offset of the inputs in shared memory, in sums and in elements.
    stage = in_per_group * weight_pitch
    inputs_at = stage * config.sum_bytes // config.dtype.itemsize
    outputs, plane = threads * run, threads * pitch
    hop_outputs, hop_places = active * vector, active * vector // run * pitch
    full_chunks, last_taps = config.full_chunks, config.last_taps
    chunk_hop, chunk_weights = config.hop, config.chunk * out_per_group
    first_at, last_at = halo - config.reach(config.chunk), halo - full_chunks * chunk_hop - config.reach(last_taps)
    by_channel = config.by_channel
    by_chunk = config.apart and not by_channel
    multiply = multiply_window(element, config.products(config.chunk), by_chunk)
    multiply_last = multiply_window(element, config.products(last_taps), by_chunk)
    # All threads of a block in the middle of a row run straight-line code.
    fill_steps, store_steps = width // (threads * vector), max(1, outputs // hop_outputs) - 1
    copy, copy_steps = copy_vectors(1, 0), copy_vectors(fill_steps, threads * vector)
    put, put_steps = store_run(element), store_gathered(element, store_steps, hop_places, hop_outputs)
    pieces = sum_count if by_channel else 1
    begin_sums, put_sums = spread(out_per_group, run), store_runs(out_per_group, run, plane)
    groups_of_copies = -(-in_per_group // batch)
    wait = cp_async_wait(groups_of_copies - 1)

    @device_function
    def clear_piece(s, piece):
        piece[s] = accumulator(0)

    @device_function
    def add_piece(s, state):
        sums, piece = state
        sums[s] += piece[s]

    clear_pieces, add_pieces = repeated(clear_piece, pieces), repeated(add_piece, pieces)

    if config.dtype.itemsize >= 4:
        copy_element = cp_async(1)

        @device_function
        def fill_by_elements(inputs, base, x, source, x_l, thread, begin, end):
            e = thread
            while e < width:
                copy_element(inputs, base + e, x, source + e * x_l, e >= begin and e < end)
                e = int32(e + threads)

    else:

        @device_function
        def fill_by_elements(inputs, base, x, source, x_l, thread, begin, end):
            raw = cuda.local.array(BATCH, dtype=storage)
            e = thread
            while e < width:
                for v in range(BATCH):
                    i = int32(e + v * threads)
                    raw[v] = x[uint64(source + i * x_l)] if i >= begin and i < end else storage(0)
                for v in range(BATCH):
                    i = int32(e + v * threads)
                    if i < width:
                        inputs[uint64(base + i)] = raw[v]
                e = int32(e + BATCH * threads)

    @device_function
    def fill(inputs, base, x, source, x_l, aligned, thread, begin, end):
        """Copy a channel's window, of which [begin, end) lies in the signal; the rest becomes zeros."""
        if aligned:
            e, last = int32(thread * vector), int32(end - vector)
            if begin == 0 and end == width:
                copy_steps(inputs, base + e, x, source + e)
                e = int32(e + fill_steps * threads * vector)
            while e < width:
                if e >= begin and e <= last:
                    copy(inputs, base + e, x, source + e)
                else:
                    for z in range(vector):
                        i = int32(e + z)
                        inputs[uint64(base + i)] = x[uint64(source + i)] if i >= begin and i < end else storage(0)
                e = int32(e + threads * vector)
        else:
            fill_by_elements(inputs, base, x, source, x_l, thread, begin, end)

    @device_function
    def fetch_weights(raw, w, w_at, w_i, w_o, w_k, first):
        for v in range(BATCH):
            i = int32(first + v * threads)
            if i < weight_count:
                c = int32(uint32(i) // uint32(row_weights))
                i = int32(i - c * row_weights)
                k = int32(uint32(i) // uint32(out_per_group))
                j = int32(i - k * out_per_group)
                raw[v] = w[uint64(w_at + c * w_i + j * w_o + k * w_k)]

    @device_function
    def put_weights(weights, raw, first):
        for v in range(BATCH):
            i = int32(first + v * threads)
            if i < weight_count:
                c = int32(uint32(i) // uint32(row_weights))
                weights[uint64(c * (weight_pitch - row_weights) + i)] = load(raw[v])

    def depthwise_long(
        x, x_offset, x_n, x_c, x_l, w, w_i, w_o, w_k, bias, has_bias, y, y_offset, length, out_length, padding, groups,
    ):  # fmt: skip
        shared, inputs = cuda.shared.array(0, dtype=accumulator), cuda.shared.array(0, dtype=storage)
        sums = cuda.local.array(sum_count, dtype=accumulator)
        piece = cuda.local.array(pieces, dtype=accumulator)  # of each sum
        offsets = cuda.local.array(out_per_group, dtype=accumulator)
        raw = cuda.local.array(BATCH, dtype=storage)
        places = cuda.local.array(vector, dtype=int32)
        out = cuda.local.array(vector, dtype=accumulator)

        thread, row = int32(cuda.threadIdx.x), int64(cuda.blockIdx.x)  # over all groups of all samples
        n = int64(uint32(row) // uint32(groups))
        group = row - n * groups
        first = padding // stride + (int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y) * span
        source = n * x_n + group * in_per_group * x_c + (first - halo) * x_l
        # A block begins up to vector - 1 columns earlier, at a multiple of 16 bytes if every channel has one.
        aligned = x_l == 1 and (in_per_group == 1 or x_c & (vector - 1) == 0)
        lead = int32((x_offset + source) & (vector - 1) if aligned else 0)
        first -= lead
        source -= lead
        first_output = first * stride - padding
        # Outputs low to high of the block are in the row.
        low, high = int32(max(int64(0), -first_output)), int32(min(int64(outputs), out_length - first_output))
        if high <= 0:
            return
        begin = int32(min(int64(width), max(int64(0), halo - first)))
        end = int32(max(int64(0), min(int64(width), length + halo - first)))

        # Weights are loaded first, so as not to wait for other blocks' inputs.
        w_at = group * in_per_group * w_i
        fetch_weights(raw, w, w_at, w_i, w_o, w_k, thread)
        for j in range(out_per_group):
            offsets[j] = load(bias[uint64(group * out_per_group + j)]) if has_bias else accumulator(0)
        base, c = int32(inputs_at), int32(0)
        while c < in_per_group:
            fill(inputs, base, x, source, x_l, aligned, thread, begin, end)
            base = int32(base + width)
            source += x_c
            c = int32(c + 1)
            if c % batch == 0 or c == in_per_group:
                cp_async_commit()
        put_weights(shared, raw, thread)
        i = int32(thread + BATCH * threads)
        while i < weight_count:
            fetch_weights(raw, w, w_at, w_i, w_o, w_k, i)
            put_weights(shared, raw, i)
            i = int32(i + BATCH * threads)

        begin_sums(sums, offsets)
        own = int32(thread * run)
        base, weights_at, c = int32(inputs_at + thread * columns), int32(0), int32(0)
        while c < in_per_group:
            if c % batch == 0:
                # An empty group follows each wait, so that as many are in flight.
                wait()
                cuda.syncthreads()
                cp_async_commit()
            if own < high:
                at, weight, chunk = int32(base + first_at), weights_at, int32(0)
                if by_channel:
                    clear_pieces(int32(0), piece)
                while chunk < full_chunks:
                    multiply(piece if by_channel else sums, inputs, at, shared, weight)
                    at = int32(at - chunk_hop)
                    weight = int32(weight + chunk_weights)
                    chunk = int32(chunk + 1)
                if last_taps:
                    multiply_last(piece if by_channel else sums, inputs, base + last_at, shared, weight)
                if by_channel:
                    add_pieces(int32(0), (sums, piece))
            base = int32(base + width)
            weights_at = int32(weights_at + weight_pitch)
            c = int32(c + 1)

        cuda.syncthreads()
        put_sums(shared, stage + thread * pitch, sums)
        cuda.syncthreads()
        if thread >= active:
            return
        j = int32(0)
        while j < out_per_group:
            target = (row * out_per_group + j) * out_length + first_output
            e = int32(thread * vector - int32((y_offset + target) & (vector - 1)))
            for z in range(vector):
                # Counted from a run earlier: the first vector may begin before the block's outputs.
                i = int32(e + z + run)
                place = int32(uint32(i) // uint32(run))
                places[z] = int32(stage + j * plane + i - run + (place - 1) * (pitch - run))
            last = int32(high - vector)
            last_of_steps = int32(last - (store_steps - 1) * hop_outputs)
            while e < high:
                if e >= low and e <= last:
                    for z in range(vector):
                        out[z] = shared[uint64(places[z])]
                    put(y, target + e, out, 0)
                else:
                    for z in range(vector):
                        i = int32(e + z)
                        if i >= low and i < high:
                            y[uint64(target + i)] = store(shared[uint64(places[z])])
                for z in range(vector):
                    places[z] = int32(places[z] + hop_places)
                e = int32(e + hop_outputs)
                if store_steps and e >= low and e <= last_of_steps:
                    put_steps(y, target + e, shared, places)
                    for z in range(vector):
                        places[z] = int32(places[z] + store_steps * hop_places)
                    e = int32(e + store_steps * hop_outputs)
            j = int32(j + 1)

    stored, integers = flat(storage), (types.int64,)
    signature = (stored, *integers * 4, stored, *integers * 3, stored, *integers, stored, *integers * 5)
    return Kernel("depthwise_long", depthwise_long, signature, threads, min_blocks=config.min_blocks, key=repr(config))
