"""depthwise: few channels a group. Memory is the limit, so every input is read once and every output written once.

A block copies the inputs of a stretch of outputs into shared memory, with many 16-byte loads in flight. In each pass a
thread makes 16 bytes of neighbouring outputs and stores them at a multiple of 16 bytes.

* A pass advances by whole strides, so a thread's outputs keep their phases: it loads weights into registers once a
  stretch and output channel.
* Outputs of one vector a stride apart form a family: they share weights and nearly all inputs.
* Rows of odd lengths are vectorised, too. Weights are not packed.
* Short rows share a block, each with a team of its threads.

With many weights, or phases that repeat only beyond a team, taps stay loops that load weights each time. 16-bit layers
of one channel a group and equal taps in every phase take direct.py; more weights than registers hold take long.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

from numba import cuda, int32, int64, types, uint32, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.rung import Rung, cuda_core_reason, taking_bias
from numba_tconv.ptx import device_function, load_vector, store_vector
from numba_tconv.runtime import device as devices
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import STATIC_SHARED_LIMIT, Kernel, Prepared, alike, flat

from . import direct as depthwise_direct
from . import long as depthwise_long
from . import long_tile as depthwise_long_config
from .direct import DirectConfig
from .long_tile import LongConfig
from .rows import MOST_CHANNELS, MOST_ROWS, grid, offset_of
from .tile import Config, choose, plan

BATCH = 4  # vectors that a thread has in flight


@cache
def make_kernel(config: Config) -> Kernel:
    element, taps = ELEMENTS[config.dtype], config.taps
    load, store, accumulator, storage = element.load, element.store, element.accumulator, element.storage
    stride, dilation, gap, rows, inverse = taps.stride, taps.dilation, taps.gap, taps.rows, taps.dilation_inverse
    kernel_size, taps_per_row, tap_step = taps.kernel_size, taps.taps_per_row, taps.step
    lanes, teams, active, step = config.lanes, config.threads // config.lanes, config.active, config.step
    vector, families, halo, keeps_weights = config.vector, config.families, config.halo, config.keeps_weights
    in_per_group, out_per_group = config.in_per_group, config.out_per_group
    registers = config.weights if keeps_weights else 1
    ragged = gap > 1 or kernel_size % rows != 0  # some phases have fewer taps than others
    batch_elements, shared_vector = BATCH * vector, 4 // config.words
    number = uint32 if stride * max(stride, dilation) < 2**32 else uint64  # 32 bits divide faster

    @device_function
    def fill(shared, base, x, source, x_c, x_l, aligned, lane, begin, end, width):
        """Copy the team's window, of which [begin, end) lies in the signal; the rest becomes zeros."""
        raw = cuda.local.array(batch_elements, dtype=storage)
        values = cuda.local.array(vector, dtype=accumulator)
        last = int32(end - vector)
        c = int32(0)
        while c < in_per_group:
            # All loads of a batch are in flight together.
            e = int32(lane * vector) if aligned else width
            while e < width:
                for v in range(BATCH):
                    at = int32(e + v * lanes * vector)
                    if at >= begin and at <= last:
                        load_vector(raw, v * vector, x, source + at)
                    else:
                        for z in range(vector):
                            i = int32(at + z)
                            raw[v * vector + z] = x[uint64(source + i)] if i >= begin and i < end else storage(0)
                for v in range(BATCH):
                    at = int32(e + v * lanes * vector)
                    if at < width:
                        for z in range(vector):
                            values[z] = load(raw[v * vector + z])
                        for z in range(0, vector, shared_vector):
                            store_vector(shared, base + at + z, values, z)
                e = int32(e + BATCH * lanes * vector)
            e = width if aligned else lane
            while e < width:
                for v in range(BATCH):
                    i = int32(e + v * lanes)
                    raw[v] = x[uint64(source + i * x_l)] if i >= begin and i < end else storage(0)
                for v in range(BATCH):
                    if e + v * lanes < width:
                        shared[uint64(base + e + v * lanes)] = load(raw[v])
                e = int32(e + BATCH * lanes)
            base = int32(base + width)
            source += x_c
            c = int32(c + 1)

    @device_function
    def aim(newest, place, own, base, start, w_at, w_k):
        """Fill in for each family: its first tap's weight, its number of taps, and what the first tap reads.

        ``start``: the vector's first output, counted from column ``base`` of the window, ``stride`` outputs a column.
        """
        for f in range(families):
            column = number(start + f) // number(stride)
            phase = number(number(start + f) - column * number(stride))
            first = number(phase // number(gap) * number(inverse) % number(rows))
            own[f] = int32((kernel_size + rows - 1 - int64(first)) // rows)
            if gap > 1 and phase % number(gap) != 0:
                own[f] = int32(0)
            shift = int32(first * number(dilation) // number(stride))
            place[f] = w_at + int64(first) * w_k
            newest[f] = uint64(base + int32(column) - shift) if own[f] > 0 else uint64(0)

    def depthwise(
        x, x_offset, x_n, x_c, x_l, w, w_i, w_o, w_k, bias, has_bias, y, y_offset, length, out_length, padding,
        groups, row_count, passes, width,
    ):  # fmt: skip
        shared = cuda.shared.array(0, dtype=accumulator)
        newest = cuda.local.array(families, dtype=uint64)
        place = cuda.local.array(families, dtype=int64)
        own = cuda.local.array(families, dtype=int32)
        weights = cuda.local.array(registers, dtype=accumulator)
        part = cuda.local.array(vector, dtype=accumulator)
        total = cuda.local.array(vector, dtype=accumulator)
        out = cuda.local.array(vector, dtype=storage)

        thread = uint32(cuda.threadIdx.x)
        team, lane = int32(thread // uint32(lanes)), int32(thread % uint32(lanes))
        row = int64(cuda.blockIdx.x) * teams + team  # over all groups of all samples
        n = int64(uint32(row) // uint32(groups))
        group = row - n * groups
        first_output = (int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y) * passes * step
        # One window serves all output channels, whose vectors begin up to vector - 1 outputs earlier.
        first_column, first_phase = divmod(first_output + padding - (vector - 1), stride)
        first_column -= halo
        source = n * x_n + group * in_per_group * x_c + first_column * x_l
        # The window begins up to vector - 1 inputs earlier, at a multiple of 16 bytes if every channel has one.
        aligned = x_l == 1 and (in_per_group == 1 or x_c & (vector - 1) == 0)
        lead = int32((x_offset + source) & (vector - 1) if aligned else 0)
        first_column -= lead
        base = int32(team * in_per_group * width)
        if row < row_count:
            begin = int32(max(int64(0), -first_column))
            end = int32(max(int64(0), min(int64(width), length - first_column)))
            fill(shared, base, x, source - lead * x_l, x_c, x_l, aligned, lane, begin, end, int32(width))
        cuda.syncthreads()
        if row >= row_count or lane >= active:
            return

        base, w_hop = int32(base + lead + halo), rows * w_k
        j = int32(0)
        while j < out_per_group:
            target = (row * out_per_group + j) * out_length
            early = int32((y_offset + target) & (vector - 1))
            o = first_output - early + lane * vector
            left = int32(min(out_length - o, passes * step - lane * vector))
            skip = int32(max(-o, 0))  # outputs of the first vector that lie before the row
            start = int32(first_phase + (vector - 1) - early + lane * vector)
            target += o
            w_at = group * in_per_group * w_i + j * w_o
            offset = load(bias[uint64(group * out_per_group + j)]) if has_bias else accumulator(0)
            if keeps_weights:
                aim(newest, place, own, base, start, w_at, w_k)
                for f in range(families):
                    for c in range(in_per_group):
                        for b in range(taps_per_row):
                            if not ragged or b < own[f]:
                                weight = load(w[uint64(place[f] + c * w_i + b * w_hop)])
                                weights[(f * in_per_group + c) * taps_per_row + b] = weight
            while left > 0:
                if not keeps_weights:
                    aim(newest, place, own, base, start, w_at, w_k)
                for z in range(vector):
                    total[z] = offset
                for c in range(in_per_group):
                    # Summed separately, because the error of a sum grows with its length.
                    for z in range(vector):
                        part[z] = accumulator(0)
                    for b in range(taps_per_row):
                        for f in range(families):
                            # A tap that a phase lacks must not multiply: zero times NaN is NaN.
                            if not ragged or b < own[f]:
                                if keeps_weights:
                                    weight = weights[(f * in_per_group + c) * taps_per_row + b]
                                else:
                                    weight = load(w[uint64(place[f] + c * w_i + b * w_hop)])
                                at = newest[f] + uint64(c * width) - uint64(b * tap_step)
                                for m in range(vector // families):
                                    part[f + m * families] += weight * shared[at + uint64(m)]
                    for z in range(vector):
                        total[z] += part[z]
                for z in range(vector):
                    out[z] = store(total[z])
                if skip == 0 and left >= vector:
                    store_vector(y, target, out, 0)
                else:
                    for z in range(vector):
                        if z >= skip and z < left:
                            y[uint64(target + z)] = out[z]
                skip = int32(0)
                left = int32(left - step)
                target += step
                start = int32(start + step)
                if keeps_weights:
                    for f in range(families):
                        newest[f] += uint64(step // stride)
            j = int32(j + 1)

    stored, integers = flat(storage), (types.int64,)
    signature = (stored, *integers * 4, stored, *integers * 3, stored, *integers, stored, *integers * 8)
    return Kernel("depthwise", depthwise, signature, config.threads, min_blocks=config.min_blocks, key=repr(config))


class Form(NamedTuple):
    """A form of the rung: makes the kernel of a configuration, and plans ``passes`` and ``stretches`` of a problem.

    A form's configuration has the ``lanes`` of a team, the ``threads`` of a block, ``shared_bytes(passes)``, the
    kernel's own ``arguments(rows, passes)``, and a block's ``work()`` in words."""

    make_kernel: Callable
    plan: Callable


FORMS = {
    Config: Form(make_kernel, plan),
    DirectConfig: Form(depthwise_direct.make_kernel, depthwise_direct.plan),
    LongConfig: Form(depthwise_long.make_kernel, depthwise_long_config.plan),
}


class Depthwise(Rung):
    name = "depthwise"
    idea = "few channels a group: inputs through shared memory once, weights in registers, aligned 16-byte stores"

    def supports(self, problem, dtype, precision):
        if reason := cuda_core_reason(dtype, precision):
            return reason
        if max(problem.in_channels_per_group, problem.out_channels_per_group) > MOST_CHANNELS:
            return f"it takes up to {MOST_CHANNELS} input and {MOST_CHANNELS} output channels a group"
        if problem.batch * problem.groups > MOST_ROWS:
            return f"it takes up to {MOST_ROWS} pairs of a sample and a group"
        if (need := choose(problem, dtype).shared_bytes(1)) > STATIC_SHARED_LIMIT:
            return f"the inputs of one pass need {need} bytes of shared memory, of {STATIC_SHARED_LIMIT}"
        return None

    def config(self, problem, dtype, precision=None):
        chosen = depthwise_direct.choose(problem, dtype) or depthwise_long_config.choose(problem, dtype)
        return chosen or choose(problem, dtype)

    def config_on(self, device, problem, dtype, precision=None):
        config = self.config(problem, dtype)
        older = isinstance(config, LongConfig) and device.cc < depthwise_long_config.MINIMUM_CC
        return choose(problem, dtype) if older else config

    def tile(self, config):
        return config.work()

    def tiny_configs(self, problem, dtype):
        channels = problem.in_channels_per_group, problem.out_channels_per_group
        # Stretches of one or several passes; two rows a block; too few lanes for some phases to repeat.
        staged = [Config(dtype, problem.taps, *channels, *sizes) for sizes in ((4, 8, 1), (8, 8, 64), (2, 6, 1))]
        return [*staged, *depthwise_direct.tiny(problem, dtype), *depthwise_long_config.tiny(problem, dtype)]

    def kernel(self, config):
        return FORMS[type(config)].make_kernel(config)

    def shared_bytes(self, problem, config):
        return config.shared_bytes(FORMS[type(config)].plan(problem, config)[0])

    def prepare(self, x, w, bias, y, problem, config=None, precision=None):
        launch = _prepared(
            *(problem, config or self.config_on(devices.of(x.index), problem, x.dtype), x.strides, w.strides),
            *(bias is not None, offset_of(x), offset_of(y)),
        )
        return taking_bias(launch, bias)


@lru_cache(maxsize=1024)
def _prepared(
    problem: Problem,
    config: Config | DirectConfig | LongConfig,
    x_strides: tuple,
    w_strides: tuple,
    has_bias: bool,
    x_offset: int,
    y_offset: int,
) -> Prepared:
    """``x_offset``, ``y_offset``: elements from a multiple of 16 bytes to the first of x and of y."""
    p, dtype, form = problem, config.dtype, FORMS[type(config)]
    passes, stretches = form.plan(p, config)
    rows = p.batch * p.groups
    return form.make_kernel(config).prepare(
        grid(rows, config.threads // config.lanes, stretches),
        *(alike((p.batch, p.in_channels, p.length), dtype, x_strides), x_offset, *x_strides),
        *(alike((p.in_channels, p.out_channels_per_group, p.kernel_size), dtype, w_strides), *w_strides),
        *(alike((p.out_channels,), dtype), has_bias),
        *(alike((p.batch, p.out_channels, p.out_length), dtype), y_offset),
        *(p.length, p.out_length, p.padding, p.groups, *config.arguments(rows, passes)),
        shared_bytes=config.shared_bytes(passes),
    )
