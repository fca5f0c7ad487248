"""The kernel of the alias-free activation: x is read once and y written once.

    x --> samples (shared) --window--> up-samples, activated (registers) --> planes (shared) --windows--> y

A thread makes the up-samples of ``run`` neighbouring positions, then ``run`` neighbouring outputs. Planes hold every
``down_ratio``-th up-sample, so that neighbouring threads load and store neighbouring vectors.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from numba import cuda, int32, int64, uint32, uint64

from numba_tconv.kernels.common.arguments import Signal, arguments
from numba_tconv.ptx import device_function, load_guarded, load_vector, multiply_add, repeated, store_run, store_vector
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, flat

from . import activation
from .tile import Config

FAR = 1024  # added before a division, so that no dividend is negative


class Sizes(NamedTuple):
    length: int
    out_length: int
    channels: int
    passes: int  # tiles of a block
    blocks: int  # of a row


@cache
def make_kernel(config: Config) -> Kernel:
    element, c = ELEMENTS[config.dtype], config
    load, store, accumulator = element.load, element.store, element.accumulator
    wide, is_snake = accumulator.bitwidth == 64, c.activation == "snake"
    checks_range = is_snake and not wide
    run, vector, threads, positions, samples = c.run, c.vector, c.threads, c.positions, c.samples
    up_taps, down_taps, up_ratio, down_ratio = c.up_taps, c.down_taps, c.up_ratio, c.down_ratio
    plane, outputs, aligned, before = c.plane, c.outputs, c.aligned, c.before
    same_ratio, lead, pad = c.same_ratio, c.lead, c.sizes.pad
    down_shift, last_reach = c.sizes.down_shift, c.down_taps // 2
    up_window, down_window, ups = c.up_window, c.down_window, c.run * c.up_ratio
    loads = -(-samples // threads)
    windows, planes_room = down_ratio * down_window, down_ratio * plane
    fetch_up, fetch_down = load_guarded(element, up_taps), load_guarded(element, down_taps)
    multiply_up, multiply_down = multiply_add((c.up_products,)), multiply_add((c.down_products,))
    stored = min(run, 16 // c.dtype.itemsize)
    put = store_run(element, stored)
    fill = activation.make_constants(wide, c.log_scale)
    act, far_act = activation.of(c.activation, c.dtype), activation.distant_snake

    @device_function
    def activate(z, state):
        values, constants = state
        values[z] = act(values[z], constants)

    @device_function
    def activate_far(z, state):
        values, constants = state
        values[z] = far_act(values[z], constants)

    @device_function
    def scatter(z, state):
        values, planes, first = state
        n = first + z % run * up_ratio + z // run
        if n >= 0 and n < planes_room:
            planes[n % down_ratio * plane + n // down_ratio] = values[z]

    activate_all, activate_all_far = repeated(activate, ups), repeated(activate_far, ups)
    scatter_all = repeated(scatter, ups)

    def alias_free(x, up_filter, down_filter, alpha, beta, y, sizes):
        shared_x = cuda.shared.array(samples, dtype=accumulator)
        planes = cuda.shared.array(planes_room, dtype=accumulator)
        shared_constants = cuda.shared.array(4, dtype=accumulator)
        up = cuda.local.array(up_taps, dtype=accumulator)
        down = cuda.local.array(down_taps, dtype=accumulator)
        window = cuda.local.array(up_window, dtype=accumulator)
        values = cuda.local.array(ups, dtype=accumulator)
        down_values = cuda.local.array(windows, dtype=accumulator)
        sums = cuda.local.array(run, dtype=accumulator)

        thread, block = int32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        row = int64(block // uint32(sizes.blocks))
        chunk = int32(block - uint32(row) * uint32(sizes.blocks))
        sample = int64(uint32(row) // uint32(sizes.channels))
        channel = row - sample * sizes.channels
        length, out_length, passes = int32(sizes.length), int32(sizes.out_length), int32(sizes.passes)
        up_length = int32(length * up_ratio)
        source, target = sample * x.stride_n + channel * x.stride_c, row * sizes.out_length
        shift = int32(target & (aligned - 1))

        fetch_up(up, up_filter, 0, 1, int32(0), int32(up_taps))
        fetch_down(down, down_filter, 0, 1, int32(0), int32(down_taps))
        for k in range(up_taps):
            up[k] *= accumulator(up_ratio)
        if is_snake and thread == 0:
            fill(shared_constants, load(alpha[uint64(channel)]), load(beta[uint64(channel)]))

        for turn in range(passes):
            begin = int32((chunk * passes + int32(turn)) * outputs - shift)
            if begin >= out_length:
                break
            # Positions of the tile, and the up-sample that is entry 0 of plane 0.
            if same_ratio:
                first = int32(begin - (down_shift + lead) // down_ratio)
                origin = int32(first * up_ratio)
            else:
                origin = int32(begin * down_ratio - down_shift)
                first = int32((origin + FAR * up_ratio) // up_ratio - FAR)

            j0 = int32(first - before)
            if j0 >= 0 and j0 + samples <= length:
                inside = source + int64(j0) * x.stride_l
                for z in range(loads):
                    i = int32(thread + z * threads)
                    if i < samples:
                        shared_x[uint32(i)] = load(x.data[uint64(inside + i * x.stride_l)])
            else:
                for i in range(thread, samples, threads):
                    j = int32(j0 + i)
                    nearest = min(max(j, int32(0)), int32(length - 1))
                    value = load(x.data[uint64(source + int64(nearest) * x.stride_l)])
                    shared_x[i] = value if j >= -pad and j < length + pad else accumulator(0)
            cuda.syncthreads()

            for v in range(0, up_window, vector):
                load_vector(window, v, shared_x, thread * run + v)
            for z in range(ups):
                values[z] = accumulator(0)
            multiply_up(values, up, window, 0)
            constants = (
                (shared_constants[0], shared_constants[1], shared_constants[2], shared_constants[3])
                if is_snake
                else (accumulator(0), accumulator(0), accumulator(0), accumulator(0))
            )
            near = True
            if checks_range:
                largest = accumulator(0)
                for z in range(ups):
                    largest = max(largest, abs(values[z]))
                near = largest <= constants[3]
            if near:
                activate_all(int32(0), (values, constants))
            if checks_range and not near:
                activate_all_far(int32(0), (values, constants))
            if same_ratio:
                for p in range(up_ratio):
                    for v in range(0, run, vector):
                        store_vector(planes, p * plane + thread * run + v, values, p * run + v)
            else:
                scatter_all(int32(0), (values, planes, int32((first + thread * run) * up_ratio - origin)))

            if origin < 0 or origin + positions * up_ratio > up_length:
                cuda.syncthreads()
                at = int32(-origin)  # the row's first up-sample
                if at > 0:
                    for n in range(thread, at, threads):
                        planes[n % down_ratio * plane + n // down_ratio] = planes[
                            at % down_ratio * plane + at // down_ratio
                        ]
                at = int32(up_length - 1 - origin)  # and its last
                for n in range(at + 1 + thread, min(at + 1 + last_reach, planes_room), threads):
                    planes[n % down_ratio * plane + n // down_ratio] = planes[
                        at % down_ratio * plane + at // down_ratio
                    ]
            cuda.syncthreads()

            for o in range(thread * run, outputs, threads * run):
                for q in range(down_ratio):
                    for v in range(0, down_window, vector):
                        load_vector(down_values, q * down_window + v, planes, q * plane + o + v)
                for z in range(run):
                    sums[z] = accumulator(0)
                multiply_down(sums, down, down_values, 0)
                here = int32(begin + o)
                if here >= 0 and here + run <= out_length:
                    for z in range(0, run, stored):
                        put(y, target + here + z, sums, z)
                else:
                    for z in range(run):
                        if here + z >= 0 and here + z < out_length:
                            y[uint64(target + here + z)] = store(sums[z])

    data = flat(element.storage)
    signature = (arguments(Signal, data=data), *[data] * 5, arguments(Sizes))
    return Kernel("alias_free", alias_free, signature, threads, min_blocks=c.min_blocks, key=repr(config))
