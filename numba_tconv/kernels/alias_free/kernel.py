"""The alias-free activation's kernel (kernels/README.md).

A thread makes the up-samples of ``run`` positions, then ``run`` outputs. Planes hold every ``down_ratio``-th up-sample.
Taps are loaded in every tile: registers hold one filter at a time."""

from functools import cache
from typing import NamedTuple

from numba import cuda, int32, int64, uint32, uint64

from numba_tconv.kernels.common.arguments import Signal, arguments
from numba_tconv.ptx import device_function, global_address, load_vector, multiply_add, repeated, store_vector
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, flat

from . import activation
from .epilogue import Registers, make_epilogue
from .filters import whole
from .tile import Config

FAR = 1024  # keeps dividends positive


class Sizes(NamedTuple):
    length: int
    out_length: int
    channels: int
    passes: int  # tiles of a block


def make_fetch(config: Config):
    """Build ``inside``, of aligned vectors inside a row, and ``anywhere``: sample i goes to ``place(i)``."""
    element, c = ELEMENTS[config.dtype], config
    load, storage, accumulator = element.load, element.storage, element.accumulator
    vector, lanes, threads, samples = c.vector, c.lanes, c.threads, c.samples
    pad, reads_zeros = c.sizes.pad, c.reads_zeros
    place, vectors = device_function(c.place), samples // lanes
    a_run, stride = max(1, c.run // lanes), c.stride if c.run >= lanes else lanes
    rounds, all_load = -(-vectors // threads), vectors % threads == 0

    @device_function
    def sample(x, source, j, length):
        nearest = min(max(j, int32(0)), int32(length - 1))
        value = load(x.data[uint64(source + int64(nearest) * x.stride_l)])
        return accumulator(0) if reads_zeros and (j < -pad or j >= length + pad) else value

    @device_function
    def place_of(v):
        """Where vector ``v`` lies."""
        return uint32(v // a_run * stride + v % a_run * lanes)

    @device_function
    def load_samples(shared, x, source, v):
        elements = cuda.local.array(lanes, dtype=storage)
        values = cuda.local.array(lanes, dtype=accumulator)
        load_vector(elements, 0, x.data, source + v * lanes)
        for e in range(lanes):
            values[e] = load(elements[e])
        at = place_of(uint32(v))
        for e in range(0, lanes, vector):
            store_vector(shared, at + e, values, e)

    @device_function
    def inside(shared, x, source, first, length):
        thread = int32(cuda.threadIdx.x)
        for z in range(rounds):
            v = int32(thread + z * threads)
            if all_load or v < vectors:
                load_samples(shared, x, source + first, v)

    @device_function
    def anywhere(shared, x, source, first, length):
        thread = int32(cuda.threadIdx.x)
        values = cuda.local.array(lanes, dtype=accumulator)
        if x.stride_l == 1 and global_address(x.data, source + first) & 15 == 0:
            for z in range(rounds):
                v = int32(thread + z * threads)
                if v < vectors:
                    j = int32(first + v * lanes)
                    if j >= 0 and int32(j + lanes) <= length:
                        load_samples(shared, x, source + first, v)
                    else:
                        for e in range(lanes):
                            values[e] = sample(x, source, int32(j + e), length)
                        at = place_of(uint32(v))
                        for e in range(0, lanes, vector):
                            store_vector(shared, at + e, values, e)
        else:
            i = thread
            while i < samples:
                shared[place(uint32(i))] = sample(x, source, int32(first + i), length)
                i = int32(i + threads)

    return inside, anywhere


@cache
def make_kernel(config: Config) -> Kernel:
    element, c = ELEMENTS[config.dtype], config
    load, accumulator = element.load, element.accumulator
    is_snake = c.activation == "snake"
    run, vector, threads, positions, stride = c.run, c.vector, c.threads, c.positions, c.stride
    up_taps, down_taps, up_ratio, down_ratio = c.up_taps, c.down_taps, c.up_ratio, c.down_ratio
    plane, outputs, aligned, before, early = c.plane, c.outputs, c.aligned, c.up.before, c.early
    same_ratio, down_shift, last_reach = c.same_ratio, c.sizes.down_shift, c.down_taps // 2
    up_window, ups = c.up.window, c.run * c.up_ratio
    up_room, down_room = whole(up_taps, vector), whole(down_taps, vector)
    samples_room, planes_room, ends = c.room(max(c.samples, c.windows)), c.plane * down_ratio, c.entries * down_ratio
    windows = down_ratio * c.down.window
    most_taps = max(up_taps, down_taps)  # at most the threads
    place, (fetch_inside, fetch_anywhere) = device_function(c.place), make_fetch(c)
    ahead, count = early + before, c.samples
    multiply_up, (begin_sums, store_tile) = multiply_add((c.up.products,)), make_epilogue(c)
    fill = activation.make_constants(c.dtype, c.log_scale)
    act = activation.of(c.activation, c.dtype)

    @device_function
    def activate(z, state):
        values, constants = state
        values[z] = act(values[z], constants)

    @device_function
    def entry(n):
        return uint32(n) % uint32(down_ratio) * uint32(plane) + place(uint32(n) // uint32(down_ratio))

    @device_function
    def scatter(z, state):
        values, planes, first = state
        n = int32(first + z % run * up_ratio + z // run)
        if n >= 0 and n < ends:
            planes[entry(n)] = values[z]

    activate_all, scatter_all = repeated(activate, ups), repeated(scatter, ups)

    def alias_free(x, up_filter, down_filter, alpha, beta, y, sizes):
        samples = cuda.shared.array(samples_room, dtype=accumulator)
        planes = cuda.shared.array(planes_room, dtype=accumulator)
        shared_up = cuda.shared.array(up_room, dtype=accumulator)
        shared_down = cuda.shared.array(down_room, dtype=accumulator)
        shared_constants = cuda.shared.array(vector, dtype=accumulator)
        up = cuda.local.array(up_room, dtype=accumulator)
        down = cuda.local.array(down_room, dtype=accumulator)
        constants = cuda.local.array(vector, dtype=accumulator)
        window = cuda.local.array(up_window, dtype=accumulator)
        values = cuda.local.array(ups, dtype=accumulator)
        down_values = cuda.local.array(windows, dtype=accumulator)
        sums = cuda.local.array(run, dtype=accumulator)

        thread, block, chunk = int32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), int32(cuda.blockIdx.y)
        row, sample = int64(block), int64(block // uint32(sizes.channels))
        channel = int64(uint32(block - sample * sizes.channels))
        length, out_length, passes = int32(sizes.length), int32(sizes.out_length), int32(sizes.passes)
        up_length = int32(length * up_ratio)
        source, target = sample * x.stride_n + channel * x.stride_c, row * sizes.out_length
        shift = int32(target & (aligned - 1))

        if thread < most_taps:
            k, scale = uint32(thread), accumulator(1)
            up_tap = load(up_filter[k]) if k < up_taps else accumulator(0)
            down_tap = load(down_filter[k]) if k < down_taps else accumulator(0)
            if is_snake:
                scale = fill(constants, load(alpha[uint64(channel)]), load(beta[uint64(channel)]))
                if thread == 0:
                    shared_constants[0], shared_constants[1] = constants[0], constants[1]
            if k < up_taps:
                shared_up[k] = up_tap * (accumulator(up_ratio) * scale)
            if k < down_taps:
                shared_down[k] = down_tap / scale

        own = uint32(thread * stride)  # the thread's entries
        registers = Registers(down_values, sums, down)
        begin = int32(chunk * passes * outputs - shift)
        end = min(int32(begin + passes * outputs), out_length)
        # Begins of tiles inside the row, from ``ahead`` on, with x in vectors.
        begins_inside = int32(0)
        if same_ratio and x.stride_l == 1 and global_address(x.data, source + begin - ahead) & 15 == 0:
            begins_inside = max(int32(length - count + 1), int32(0))
        while begin < end:
            # The first position, and the up-sample of entry 0.
            if same_ratio:
                first = int32(begin - early)
                origin = int32(first * up_ratio)
            else:
                origin = int32(begin * down_ratio - down_shift)
                first = int32((origin + FAR * up_ratio) // up_ratio - FAR)
            is_inside = uint32(begin - ahead) < uint32(begins_inside)
            if is_inside:
                fetch_inside(samples, x, source, int32(first - before), length)
            else:
                fetch_anywhere(samples, x, source, int32(first - before), length)
            cuda.syncthreads()

            for v in range(0, up_room, vector):
                load_vector(up, v, shared_up, v)
            for v in range(0, up_window, vector):
                load_vector(window, v, samples, own + place(uint32(v)))
            for z in range(ups):
                values[z] = accumulator(0)
            multiply_up(values, up, window, 0)
            load_vector(constants, 0, shared_constants, 0)
            activate_all(int32(0), (values, (constants[0], constants[1])))
            if same_ratio:
                for v in range(0, run, vector):
                    for p in range(up_ratio):
                        store_vector(planes, own + p * plane + v, values, p * run + v)
            else:
                scatter_all(int32(0), (values, planes, int32((first + thread * run) * up_ratio - origin)))

            at_end = not is_inside
            if not same_ratio:
                at_end = origin < 0 or int32(origin + positions * up_ratio) > up_length
            for v in range(0, down_room, vector):
                load_vector(down, v, shared_down, v)
            if same_ratio and not at_end:
                begin_sums(sums, down, values)
            if at_end:
                cuda.syncthreads()
                # Both reach less far than there are threads.
                row_begin, row_last = int32(-origin), int32(up_length - 1 - origin)
                n = int32(row_begin - 1 - thread)
                if thread < down_shift and n >= 0:
                    planes[entry(n)] = planes[entry(row_begin)]
                n = int32(row_last + 1 + thread)
                if thread < last_reach and n < ends:
                    planes[entry(n)] = planes[entry(row_last)]
            cuda.syncthreads()

            if same_ratio and at_end:
                for v in range(0, run, vector):
                    for p in range(up_ratio):
                        load_vector(values, p * run + v, planes, own + p * plane + v)
                begin_sums(sums, down, values)
            store_tile(y, target, sizes.out_length, registers, planes, begin)
            begin = int32(begin + outputs)

    data = flat(element.storage)
    signature = (arguments(Signal, data=data), *[data] * 5, arguments(Sizes))
    return Kernel("alias_free", alias_free, signature, threads, min_blocks=c.min_blocks, key=repr(config))
