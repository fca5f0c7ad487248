"""The alias-free activation's gradients (kernels/README.md).

dv, the gradient of activated up-samples, is made from dy as u from x. du, the gradient of up-samples, is filtered as v
in the forward kernel."""

import math
from functools import cache

from numba import cuda, float64, int32, int64, uint32, uint64

from numba_tconv.kernels.common.arguments import Signal, arguments
from numba_tconv.ptx import device_function, load_guarded, load_vector, multiply_add, store_vector
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, flat

from .arguments import Edge, Output, Registers, Sizes, UpSamples
from .ends import make_ends
from .epilogue import make_add_up, make_store
from .fetch import make_fetch
from .through import make_through
from .tile import FAR, Config
from .trigonometry import Constants, trigonometry


@cache
def make_kernel(config: Config) -> Kernel:
    element, c = ELEMENTS[config.dtype], config
    load, accumulator = element.load, element.accumulator
    is_snake, log_scale, takes_sums = c.activation == "snake", c.log_scale, c.takes_sums
    run, vector, threads, positions, outputs = c.run, c.vector, c.threads, c.positions, c.outputs
    up_taps, down_taps, up_ratio, down_ratio = c.up_taps, c.down_taps, c.up_ratio, c.down_ratio
    up_shift, down_shift, pad, lead = c.sizes.up_shift, c.sizes.down_shift, c.sizes.pad, c.down.lead
    samples, grads, plane, aligned, same_ratio = c.samples, c.grads, c.plane, c.aligned, c.same_ratio
    before, turned_before = c.up.before, c.turned.before
    up_window, turned_window = c.up.window, c.turned.window
    ups, windows, planes_room = run * up_ratio, up_ratio * c.down.window, up_ratio * plane
    fetch_up, fetch_down = load_guarded(element, up_taps), load_guarded(element, down_taps)
    multiply_up, multiply_turned = multiply_add((c.up.products,)), multiply_add((c.turned.products,))
    fetch_x, fetch_dy = make_fetch(element, samples, threads, pad), make_fetch(element, grads, threads, 0)
    trig, ends, (through_one, through_all) = trigonometry(accumulator.bitwidth == 64), make_ends(c), make_through(c)
    fill, constants_of = trig.fill, trig.constants
    before_row, after_row, all_at_ends = ends.before_row, ends.after_row, ends.add
    store_tile, add_up = make_store(c, ends), make_add_up(c.threads)
    sums_room = 2 * threads if takes_sums else vector

    @device_function
    def dv_by_windows(up_samples, turned, down, shared_dy, at_edge, edge):
        thread = int32(cuda.threadIdx.x)
        for v in range(0, turned_window, vector):
            load_vector(turned, v, shared_dy, thread * run + v)
        for z in range(ups):
            up_samples.dv[z] = accumulator(0)
        multiply_turned(up_samples.dv, down, turned, 0)
        if at_edge:
            all_at_ends(int32(0), edge)

    def alias_free_gradient(x, dy, up_filter, down_filter, alpha, beta, dx, partials, sizes):
        shared_x = cuda.shared.array(samples, dtype=accumulator)
        shared_dy = cuda.shared.array(grads, dtype=accumulator)
        planes = cuda.shared.array(planes_room, dtype=accumulator)
        shared_constants = cuda.shared.array(4, dtype=accumulator)
        shared_sums = cuda.shared.array(sums_room, dtype=accumulator)
        up = cuda.local.array(up_taps, dtype=accumulator)
        down = cuda.local.array(down_taps, dtype=accumulator)
        window = cuda.local.array(up_window, dtype=accumulator)
        turned = cuda.local.array(turned_window, dtype=accumulator)
        values = cuda.local.array(ups, dtype=accumulator)
        dv = cuda.local.array(ups, dtype=accumulator)
        down_values = cuda.local.array(windows, dtype=accumulator)
        results = cuda.local.array(run, dtype=accumulator)
        sums = cuda.local.array(2, dtype=accumulator)

        thread, block = int32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        row = int64(block // uint32(sizes.blocks))
        chunk = int32(block - uint32(row) * uint32(sizes.blocks))
        sample = int64(uint32(row) // uint32(sizes.channels))
        channel = row - sample * sizes.channels
        length, out_length, passes = int32(sizes.length), int32(sizes.out_length), int32(sizes.passes)
        up_length = int32(length * up_ratio)
        source, target = sample * x.stride_n + channel * x.stride_c, row * sizes.length
        grad_source = sample * dy.stride_n + channel * dy.stride_c
        shift = int32(target & (aligned - 1))

        fetch_up(up, up_filter, 0, 1, int32(0), int32(up_taps))
        fetch_down(down, down_filter, 0, 1, int32(0), int32(down_taps))
        for k in range(up_taps):
            up[k] *= accumulator(up_ratio)
        if is_snake and thread == 0:
            a, b = float64(load(alpha[uint64(channel)])), float64(load(beta[uint64(channel)]))
            if log_scale:
                a, b = math.exp(a), math.exp(b)
            fill(shared_constants, a, b)
        up_samples = UpSamples(values, dv, sums)
        output, registers = Output(dx, target, sizes.length), Registers(down_values, results, up)
        total_alpha, total_beta = accumulator(0), accumulator(0)

        for turn in range(passes):
            position = (chunk * passes + int32(turn)) * outputs - shift
            begin = int32(position)
            if begin >= length:
                break
            first = int32(begin - (up_shift + lead) // up_ratio)
            origin = int32(first * up_ratio)  # the up-sample of entry 0 of plane 0
            if same_ratio:
                first_grad = int32(first - turned_before)
            else:
                lowest = int32(origin + down_shift - down_taps + 1 + FAR * down_ratio)
                first_grad = int32(lowest // down_ratio - FAR)
            at_edge = origin <= 0 or origin + positions * up_ratio >= up_length
            # Up-samples count in one tile; those after the last tile's outputs in that.
            counts = thread * run < outputs or begin + outputs >= length

            fetch_x(shared_x, x, source, int32(first - before), length)
            fetch_dy(shared_dy, dy, grad_source, first_grad, out_length)
            cuda.syncthreads()

            zero = accumulator(0)
            constants = constants_of(shared_constants) if is_snake else Constants(zero, zero, zero, zero, zero)
            sums[0], sums[1] = accumulator(0), accumulator(0)
            for v in range(0, up_window, vector):
                load_vector(window, v, shared_x, thread * run + v)
            for z in range(ups):
                values[z] = accumulator(0)
            multiply_up(values, up, window, 0)
            head, tail, first_up = accumulator(0), accumulator(0), int32(origin + thread * ups)
            if same_ratio:
                if at_edge:
                    if first_up <= 0 and first_up + ups > 0:
                        head = before_row(down_filter, dy, grad_source, out_length)
                    if first_up < up_length and first_up + ups >= up_length:
                        tail = after_row(down_filter, dy, grad_source, out_length, up_length)
                dv_by_windows(up_samples, turned, down, shared_dy, at_edge, Edge(dv, first_up, up_length, head, tail))
                through_all(up_samples, constants)
            for p in range(up_ratio):
                for v in range(0, run, vector):
                    store_vector(planes, p * plane + thread * run + v, values, p * run + v)
            if not same_ratio:
                cuda.syncthreads()
                for n in range(thread, positions * up_ratio, threads):
                    m, place = int32(origin + n), uint32(n % up_ratio * plane + n // up_ratio)
                    grad = accumulator(0)
                    if m >= 0 and m < up_length:
                        for k in range((m + down_shift) % down_ratio, down_taps, down_ratio):
                            at = (m + down_shift - k + FAR * down_ratio) // down_ratio - FAR - first_grad
                            grad += load(down_filter[uint64(k)]) * shared_dy[uint32(at)]
                        if m == 0:
                            grad += before_row(down_filter, dy, grad_source, out_length)
                        if m == up_length - 1:
                            grad += after_row(down_filter, dy, grad_source, out_length, up_length)
                    before_sums = sums[0], sums[1]
                    planes[place] = through_one(planes[place], grad, sums, constants)
                    if is_snake and n // up_ratio >= outputs and begin + outputs < length:
                        sums[0], sums[1] = before_sums
                counts = True
            if takes_sums and counts:
                total_alpha += sums[0]
                total_beta += sums[1]
            cuda.syncthreads()

            store_tile(output, registers, up_filter, planes, position, origin)

        if takes_sums:
            add_up(shared_sums, total_alpha, total_beta)
            if thread == 0:
                place = channel * sizes.splits + sample * sizes.blocks + chunk
                partials[uint64(place)] = shared_sums[0]
                partials[uint64(sizes.channels * sizes.splits + place)] = shared_sums[threads]

    data = flat(element.storage)
    signal = arguments(Signal, data=data)
    signature = (signal, signal, *[data] * 5, flat(accumulator), arguments(Sizes))
    return Kernel("alias_free_gradient", alias_free_gradient, signature, threads, min_blocks=c.min_blocks, key=repr(c))
