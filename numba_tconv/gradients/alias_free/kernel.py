"""The alias-free activation's gradients: x and y's gradient are read once, x's gradient written once.

    x     --> samples (shared) --window--> up-samples u --+
                                                          +--> du (registers) --> planes (shared) --windows--> dx
    dy    --> samples (shared) --window--> dv ------------+
                                                          +--> sums of alpha and beta, a part for each block

dv, the gradient of the activated up-samples, is made from dy as u is from x. du, the gradient of the up-samples, is
filtered as the forward kernel filters v. A repeated end receives what its repetitions would receive.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from numba import cuda, float64, int32, int64, uint32, uint64

from numba_tconv.kernels.alias_free.fetch import make_fetch
from numba_tconv.kernels.alias_free.phase import trigonometry
from numba_tconv.kernels.common.arguments import Signal, arguments
from numba_tconv.ptx import device_function, load_guarded, load_vector, multiply_add, repeated, store_run, store_vector
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, flat

from . import slope
from .tile import Config

FAR = 1024  # keeps dividends positive


class Sizes(NamedTuple):
    length: int
    out_length: int
    channels: int
    passes: int  # tiles of a block
    blocks: int
    splits: int  # parts of a channel's sums


@cache
def make_kernel(config: Config) -> Kernel:
    element, c = ELEMENTS[config.dtype], config
    load, store, accumulator = element.load, element.store, element.accumulator
    wide, is_snake, log_scale = accumulator.bitwidth == 64, c.activation == "snake", c.log_scale
    run, vector, threads, positions, outputs = c.run, c.vector, c.threads, c.positions, c.outputs
    up_taps, down_taps, up_ratio, down_ratio = c.up_taps, c.down_taps, c.up_ratio, c.down_ratio
    up_shift, down_shift, pad, lead = c.sizes.up_shift, c.sizes.down_shift, c.sizes.pad, c.down.lead
    samples, grads, plane, aligned, by_windows = c.samples, c.grads, c.plane, c.aligned, c.by_windows
    before, turned_before = c.up.before, c.turned.before
    up_window, turned_window, down_window = c.up.window, c.turned.window, c.down.window
    ups, windows, planes_room = run * up_ratio, up_ratio * down_window, up_ratio * plane
    halvings = threads.bit_length() - 1
    fetch_up, fetch_down = load_guarded(element, up_taps), load_guarded(element, down_taps)
    multiply_up, multiply_down = multiply_add((c.up.products,)), multiply_add((c.down.products,))
    multiply_turned = multiply_add((c.turned.products,))
    fetch_x, fetch_dy = make_fetch(element, samples, threads, pad), make_fetch(element, grads, threads, 0)
    stored = min(run, 16 // c.dtype.itemsize)
    put = store_run(element, stored)
    fill, near_phase, far_phase, sine, cosine = trigonometry(wide)
    pointwise = slope.identity if is_snake else slope.POINTWISE[c.activation]
    takes_sums = is_snake and c.parameters
    sums_room = 2 * threads if takes_sums else vector

    @device_function
    def through_snake(t, u, grad, sums, constants):
        """The gradient of u, given its activation's; adds to ``sums``."""
        s, co = sine(t), cosine(t)
        part = grad * s
        if takes_sums:
            sums[0] = cuda.fma(u * co, part, sums[0])
            sums[1] = cuda.fma(s, part, sums[1])
        return cuda.fma(constants[4] * co, part, grad)

    @device_function
    def through(z, state):
        values, slopes, sums, constants = state
        u, grad = values[z], slopes[z]
        if is_snake:
            values[z] = through_snake(near_phase(u, constants), u, grad, sums, constants)
        else:
            values[z] = grad * pointwise(u)

    @device_function
    def through_far(z, state):
        values, slopes, sums, constants = state
        u, grad = values[z], slopes[z]
        values[z] = through_snake(far_phase(u, constants), u, grad, sums, constants)

    @device_function
    def before_row(filter_down, dy, target, out_length):
        """What repetitions of the first activated up-sample receive."""
        total = accumulator(0)
        for o in range(min(-(-down_shift // down_ratio), out_length)):
            value = load(dy.data[uint64(target + o * dy.stride_l)])
            for k in range(min(down_shift - o * down_ratio, down_taps)):
                total += load(filter_down[uint64(k)]) * value
        return total

    @device_function
    def after_row(filter_down, dy, target, out_length, up_length):
        """What repetitions of the last activated up-sample receive."""
        total = accumulator(0)
        first = max(0, (up_length + down_shift - down_taps) // down_ratio)
        for o in range(first, out_length):
            value = load(dy.data[uint64(target + o * dy.stride_l)])
            for k in range(max(0, up_length + down_shift - o * down_ratio), down_taps):
                total += load(filter_down[uint64(k)]) * value
        return total

    @device_function
    def at_ends(z, state):
        """Zero outside the row; at its ends also what repetitions receive. Phases first, then positions."""
        slopes, first, up_length, head, tail = state
        m = first + z % run * up_ratio + z // run
        if m < 0 or m >= up_length:
            slopes[z] = accumulator(0)
        if m == 0:
            slopes[z] += head
        if m == up_length - 1:
            slopes[z] += tail

    @device_function
    def repetitions(filter_up, planes, first, end, origin, up_length):
        """What an end of x receives from its repetitions ``first`` to ``end - 1``.

        In float32 each repetition is summed on its own: shorter sums round less.
        """
        total = accumulator(0)
        for j in range(first, end):
            place = j * up_ratio - up_shift  # the up-sample of the first tap
            taps = accumulator(0)
            for k in range(max(0, -place), min(up_taps, up_length - place)):
                n = uint32(place + k - origin)
                value = planes[n % uint32(up_ratio) * uint32(plane) + n // uint32(up_ratio)]
                if wide:
                    total += load(filter_up[uint64(k)]) * value
                else:
                    taps += load(filter_up[uint64(k)]) * value
            if not wide:
                total += taps
        return accumulator(up_ratio) * total

    through_all, through_all_far = repeated(through, ups), repeated(through_far, ups)
    all_at_ends = repeated(at_ends, ups)

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
        slopes = cuda.local.array(ups, dtype=accumulator)
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
        total_alpha, total_beta = accumulator(0), accumulator(0)

        for turn in range(passes):
            begin = int32((chunk * passes + int32(turn)) * outputs - shift)
            if begin >= length:
                break
            first = int32(begin - (up_shift + lead) // up_ratio)
            origin = int32(first * up_ratio)  # the up-sample of entry 0 of plane 0
            if by_windows:
                first_grad = int32(first - turned_before)
            else:
                lowest = int32(origin + down_shift - down_taps + 1 + FAR * down_ratio)
                first_grad = int32(lowest // down_ratio - FAR)
            at_edge = origin <= 0 or origin + positions * up_ratio >= up_length
            # A thread's up-samples count in one tile; those after the last tile's outputs count there.
            counts = thread * run < outputs or begin + outputs >= length

            fetch_x(shared_x, x, source, int32(first - before), length)
            fetch_dy(shared_dy, dy, grad_source, first_grad, out_length)
            cuda.syncthreads()

            constants = (accumulator(0), accumulator(0), accumulator(0), accumulator(0), accumulator(0))
            if is_snake:
                turns, rest, inverse = shared_constants[0], shared_constants[1], shared_constants[2]
                slope_factor = accumulator(2 * math.pi) * turns * inverse
                constants = (turns, rest, inverse, shared_constants[3], slope_factor)
            sums[0], sums[1] = accumulator(0), accumulator(0)
            for v in range(0, up_window, vector):
                load_vector(window, v, shared_x, thread * run + v)
            for z in range(ups):
                values[z] = accumulator(0)
            multiply_up(values, up, window, 0)
            head, tail, mine = accumulator(0), accumulator(0), int32(origin + thread * ups)
            if by_windows:
                if at_edge:
                    if mine <= 0 and mine + ups > 0:
                        head = before_row(down_filter, dy, grad_source, out_length)
                    if mine < up_length and mine + ups >= up_length:
                        tail = after_row(down_filter, dy, grad_source, out_length, up_length)
                for v in range(0, turned_window, vector):
                    load_vector(turned, v, shared_dy, thread * run + v)
                for z in range(ups):
                    slopes[z] = accumulator(0)
                multiply_turned(slopes, down, turned, 0)
                if at_edge:
                    all_at_ends(int32(0), (slopes, mine, up_length, head, tail))
                near = True
                if is_snake:
                    largest = accumulator(0)
                    for z in range(ups):
                        largest = max(largest, abs(values[z]))
                    near = largest <= constants[3]
                if near:
                    through_all(int32(0), (values, slopes, sums, constants))
                if is_snake and not near:
                    through_all_far(int32(0), (values, slopes, sums, constants))
            for p in range(up_ratio):
                for v in range(0, run, vector):
                    store_vector(planes, p * plane + thread * run + v, values, p * run + v)
            if not by_windows:
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
                    u = planes[place]
                    if is_snake:
                        t = near_phase(u, constants) if abs(u) <= constants[3] else far_phase(u, constants)
                        before_sums = sums[0], sums[1]
                        planes[place] = through_snake(t, u, grad, sums, constants)
                        if n // up_ratio >= outputs and begin + outputs < length:
                            sums[0], sums[1] = before_sums
                    else:
                        planes[place] = grad * pointwise(u)
                counts = True
            if takes_sums and counts:
                total_alpha += sums[0]
                total_beta += sums[1]
            cuda.syncthreads()

            for o in range(thread * run, outputs, threads * run):
                for q in range(up_ratio):
                    for v in range(0, down_window, vector):
                        load_vector(down_values, q * down_window + v, planes, q * plane + o + v)
                for z in range(run):
                    results[z] = accumulator(0)
                multiply_down(results, up, down_values, 0)
                here = int32(begin + o)
                if here > 0 and here + run < length:
                    for z in range(0, run, stored):
                        put(dx, target + here + z, results, z)
                else:
                    head, tail = accumulator(0), accumulator(0)
                    if here <= 0 and here + run > 0:
                        head = repetitions(up_filter, planes, -pad, 0, origin, up_length)
                    if here < length and here + run >= length:
                        tail = repetitions(up_filter, planes, length, length + pad, origin, up_length)
                    for z in range(run):
                        at = int32(here + z)
                        value = results[z]
                        if at == 0:
                            value += head
                        if at == length - 1:
                            value += tail
                        if at >= 0 and at < length:
                            dx[uint64(target + at)] = store(value)

        if takes_sums:
            shared_sums[thread], shared_sums[threads + thread] = total_alpha, total_beta
            for h in range(halvings):
                cuda.syncthreads()
                half = threads >> (h + 1)
                if thread < half:
                    shared_sums[thread] += shared_sums[thread + half]
                    shared_sums[threads + thread] += shared_sums[threads + thread + half]
            if thread == 0:
                place = channel * sizes.splits + sample * sizes.blocks + chunk
                partials[uint64(place)] = shared_sums[0]
                partials[uint64(sizes.channels * sizes.splits + place)] = shared_sums[threads]

    data = flat(element.storage)
    signal = arguments(Signal, data=data)
    signature = (signal, signal, *[data] * 5, flat(accumulator), arguments(Sizes))
    return Kernel("alias_free_gradient", alias_free_gradient, signature, threads, min_blocks=c.min_blocks, key=repr(c))
