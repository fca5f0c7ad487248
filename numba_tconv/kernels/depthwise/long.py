"""The form for long filters, whose weights registers do not hold.

A thread makes neighbouring columns of a group's phases and output channels, from registers. A 16-byte load of weights
serves a warp. Which tap meets which input is known when compiling.

* Channels are copied while earlier ones are multiplied.
* Outputs replace inputs in shared memory and leave in vectors."""

from functools import cache

from numba import cuda, int32, int64, uint32, uint64

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
from numba_tconv.runtime.kernel import Kernel

from .arguments import Window, shared_signature
from .long_tile import LongConfig

BATCH = 4  # elements in flight


def make_fill(config: LongConfig):
    """Build ``fill``: a block starts to copy a channel's Window."""
    storage, threads, width, vector = ELEMENTS[config.dtype].storage, config.threads, config.width, config.vector
    fill_steps = width // (threads * vector)
    copy, copy_steps = copy_vectors(1, 0), copy_vectors(fill_steps, threads * vector)

    if config.dtype.itemsize >= 4:
        copy_element = cp_async(1)

        @device_function
        def fill_by_elements(inputs, base, x, window, thread):
            e = thread
            while e < width:
                inside = e >= window.begin and e < window.end
                copy_element(inputs, base + e, x.data, window.source + e * x.stride_l, inside)
                e = int32(e + threads)

    else:

        @device_function
        def fill_by_elements(inputs, base, x, window, thread):
            raw = cuda.local.array(BATCH, dtype=storage)
            e = thread
            while e < width:
                for v in range(BATCH):
                    i = int32(e + v * threads)
                    inside = i >= window.begin and i < window.end
                    raw[v] = x.data[uint64(window.source + i * x.stride_l)] if inside else storage(0)
                for v in range(BATCH):
                    i = int32(e + v * threads)
                    if i < width:
                        inputs[uint64(base + i)] = raw[v]
                e = int32(e + BATCH * threads)

    @device_function
    def fill(inputs, base, x, window, thread):
        if window.aligned:
            e, last = int32(thread * vector), int32(window.end - vector)
            if window.begin == 0 and window.end == width:
                copy_steps(inputs, base + e, x.data, window.source + e)
                e = int32(e + fill_steps * threads * vector)
            while e < width:
                if e >= window.begin and e <= last:
                    copy(inputs, base + e, x.data, window.source + e)
                else:
                    for z in range(vector):
                        i = int32(e + z)
                        inside = i >= window.begin and i < window.end
                        inputs[uint64(base + i)] = x.data[uint64(window.source + i)] if inside else storage(0)
                e = int32(e + threads * vector)
        else:
            fill_by_elements(inputs, base, x, window, thread)

    return fill


def make_copy_weights(config: LongConfig):
    """Build copies of BATCH weights, every ``threads``-th from ``first``.

    * ``fetch`` loads them.
    * ``put`` converts and stores them by (input channel, tap, output channel)."""
    load, threads, out_per_group = ELEMENTS[config.dtype].load, config.threads, config.out_per_group
    row_weights, weight_pitch = config.taps.kernel_size * out_per_group, config.weight_pitch
    weight_count = config.in_per_group * row_weights

    @device_function
    def fetch(raw, w, group_offset, first):
        for v in range(BATCH):
            i = int32(first + v * threads)
            if i < weight_count:
                c = int32(uint32(i) // uint32(row_weights))
                i = int32(i - c * row_weights)
                k = int32(uint32(i) // uint32(out_per_group))
                j = int32(i - k * out_per_group)
                raw[v] = w.data[uint64(group_offset + c * w.stride_i + j * w.stride_o + k * w.stride_k)]

    @device_function
    def put(weights, raw, first):
        for v in range(BATCH):
            i = int32(first + v * threads)
            if i < weight_count:
                c = int32(uint32(i) // uint32(row_weights))
                weights[uint64(c * (weight_pitch - row_weights) + i)] = load(raw[v])

    return fetch, put


def make_multiply(config: LongConfig):
    """Build ``multiply``, which adds an input channel's products.

    ``piece``: a local array for the channel's sums, if apart. ``first_input``, ``weights``: places of the thread's
    first column and the channel's weights."""
    element, full_chunks, last_taps, hop = ELEMENTS[config.dtype], config.full_chunks, config.last_taps, config.hop
    chunk_weights, accumulator, by_channel = config.chunk * config.out_per_group, element.accumulator, config.by_channel
    before = config.halo - config.reach(config.chunk)
    before_last = config.halo - full_chunks * hop - config.reach(last_taps)
    pieces = config.out_per_group * config.run if by_channel else 1
    by_chunk = config.apart and not by_channel
    multiply_chunk = multiply_window(element, config.products(config.chunk), by_chunk)
    multiply_last = multiply_window(element, config.products(last_taps), by_chunk)

    @device_function
    def clear_piece(s, piece):
        piece[s] = accumulator(0)

    @device_function
    def add_piece(s, state):
        sums, piece = state
        sums[s] += piece[s]

    clear_pieces, add_pieces = repeated(clear_piece, pieces), repeated(add_piece, pieces)

    @device_function
    def multiply(sums, piece, inputs, first_input, shared, weights):
        place, weight, chunk = int32(first_input + before), weights, int32(0)
        if by_channel:
            clear_pieces(int32(0), piece)
        while chunk < full_chunks:
            multiply_chunk(piece if by_channel else sums, inputs, place, shared, weight)
            place = int32(place - hop)
            weight = int32(weight + chunk_weights)
            chunk = int32(chunk + 1)
        if last_taps:
            multiply_last(piece if by_channel else sums, inputs, first_input + before_last, shared, weight)
        if by_channel:
            add_pieces(int32(0), (sums, piece))

    return multiply


def _make_store(config: LongConfig):
    """Build the store of staged outputs ``low`` to ``high``, from ``first_output`` of each row on."""
    element, out_per_group, run, pitch = ELEMENTS[config.dtype], config.out_per_group, config.run, config.pitch
    threads, active, vector, store = config.threads, config.active, config.vector, element.store
    stage, plane = config.in_per_group * config.weight_pitch, threads * pitch
    hop_outputs, hop_places = active * vector, active * vector // run * pitch
    store_steps = max(1, threads * run // hop_outputs) - 1
    put, put_steps = store_run(element), store_gathered(element, store_steps, hop_places, hop_outputs)
    accumulator = element.accumulator

    @device_function
    def store_outputs(y, shared, first_row, out_length, first_output, low, high, thread):
        places = cuda.local.array(vector, dtype=int32)
        out = cuda.local.array(vector, dtype=accumulator)
        j = int32(0)
        while j < out_per_group:
            target = (first_row + j) * out_length + first_output
            e = int32(thread * vector - int32((y.offset + target) & (vector - 1)))
            for z in range(vector):
                # A run more: the first vector may begin early.
                i = int32(e + z + run)
                of_run = int32(uint32(i) // uint32(run))
                places[z] = int32(stage + j * plane + i - run + (of_run - 1) * (pitch - run))
            last = int32(high - vector)
            last_of_steps = int32(last - (store_steps - 1) * hop_outputs)
            while e < high:
                if e >= low and e <= last:
                    for z in range(vector):
                        out[z] = shared[uint64(places[z])]
                    put(y.data, target + e, out, 0)
                else:
                    for z in range(vector):
                        i = int32(e + z)
                        if i >= low and i < high:
                            y.data[uint64(target + i)] = store(shared[uint64(places[z])])
                for z in range(vector):
                    places[z] = int32(places[z] + hop_places)
                e = int32(e + hop_outputs)
                if store_steps and e >= low and e <= last_of_steps:
                    put_steps(y.data, target + e, shared, places)
                    for z in range(vector):
                        places[z] = int32(places[z] + store_steps * hop_places)
                    e = int32(e + store_steps * hop_outputs)
            j = int32(j + 1)

    return store_outputs


@cache
def make_kernel(config: LongConfig) -> Kernel:
    element, taps = ELEMENTS[config.dtype], config.taps
    load, accumulator, storage = element.load, element.accumulator, element.storage
    stride, in_per_group, out_per_group = taps.stride, config.in_per_group, config.out_per_group
    threads, columns, span, halo, width = config.threads, config.columns, config.span, config.halo, config.width
    vector, batch, run, pitch, active = config.vector, config.batch, config.run, config.pitch, config.active
    weight_pitch, sum_count = config.weight_pitch, out_per_group * run
    weight_count = in_per_group * taps.kernel_size * out_per_group
    # Where inputs begin, in sums and in elements.
    stage = in_per_group * weight_pitch
    first_place = stage * config.sum_bytes // config.dtype.itemsize
    outputs, plane, store_outputs = threads * run, threads * pitch, _make_store(config)
    pieces = sum_count if config.by_channel else 1
    begin_sums, put_sums = spread(out_per_group, run), store_runs(out_per_group, run, plane)
    wait = cp_async_wait(-(-in_per_group // batch) - 1)
    fill, multiply, (fetch_weights, put_weights) = make_fill(config), make_multiply(config), make_copy_weights(config)

    def depthwise_long(x, w, bias, y, sizes):
        shared, inputs = cuda.shared.array(0, dtype=accumulator), cuda.shared.array(0, dtype=storage)
        sums = cuda.local.array(sum_count, dtype=accumulator)
        piece = cuda.local.array(pieces, dtype=accumulator)
        offsets = cuda.local.array(out_per_group, dtype=accumulator)
        raw = cuda.local.array(BATCH, dtype=storage)

        thread, row = int32(cuda.threadIdx.x), int64(cuda.blockIdx.x)
        n = int64(uint32(row) // uint32(sizes.groups))
        group = row - n * sizes.groups
        column = sizes.padding // stride + (int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y) * span
        source = n * x.stride_n + group * in_per_group * x.stride_c + (column - halo) * x.stride_l
        # Up to vector - 1 columns early, 16-byte aligned.
        aligned = x.stride_l == 1 and (in_per_group == 1 or x.stride_c & (vector - 1) == 0)
        lead = int32((x.offset + source) & (vector - 1) if aligned else 0)
        column -= lead
        source -= lead
        first_output = column * stride - sizes.padding
        low, high = int32(max(int64(0), -first_output)), int32(min(int64(outputs), sizes.out_length - first_output))
        if high <= 0:
            return
        begin = int32(min(int64(width), max(int64(0), halo - column)))
        end = int32(max(int64(0), min(int64(width), sizes.length + halo - column)))

        group_offset = group * in_per_group * w.stride_i
        fetch_weights(raw, w, group_offset, thread)
        for j in range(out_per_group):
            offsets[j] = load(bias.data[uint64(group * out_per_group + j)]) if bias.exists else accumulator(0)
        base, c = int32(first_place), int32(0)
        while c < in_per_group:
            fill(inputs, base, x, Window(source, begin, end, aligned), thread)
            base = int32(base + width)
            source += x.stride_c
            c = int32(c + 1)
            if c % batch == 0 or c == in_per_group:
                cp_async_commit()
        put_weights(shared, raw, thread)
        i = int32(thread + BATCH * threads)
        while i < weight_count:
            fetch_weights(raw, w, group_offset, i)
            put_weights(shared, raw, i)
            i = int32(i + BATCH * threads)

        begin_sums(sums, offsets)
        first_of_thread = int32(thread * run)
        base, weights, c = int32(first_place + thread * columns), int32(0), int32(0)
        while c < in_per_group:
            if c % batch == 0:
                # An empty group replaces the arrived one.
                wait()
                cuda.syncthreads()
                cp_async_commit()
            if first_of_thread < high:
                multiply(sums, piece, inputs, base, shared, weights)
            base = int32(base + width)
            weights = int32(weights + weight_pitch)
            c = int32(c + 1)

        cuda.syncthreads()
        put_sums(shared, stage + thread * pitch, sums)
        cuda.syncthreads()
        if thread >= active:
            return
        store_outputs(y, shared, row * out_per_group, sizes.out_length, first_output, low, high, thread)

    signature = shared_signature(storage)
    return Kernel("depthwise_long", depthwise_long, signature, threads, min_blocks=config.min_blocks, key=repr(config))
