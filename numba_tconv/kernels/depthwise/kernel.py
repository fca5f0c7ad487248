"""depthwise: few channels a group.

A block copies the inputs of a stretch of outputs into shared memory. A thread makes 16 aligned bytes of outputs a pass.

* A pass advances by whole strides: outputs keep their phases, and weights stay in registers.
* A vector's outputs a stride apart are a family: they share weights and nearly all inputs.

direct.py takes 16-bit layers of one input channel a group and equal taps in all phases, long.py more weights than
registers hold."""

from functools import cache, lru_cache
from typing import NamedTuple

from numba import cuda, int32, int64, types, uint32, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.formula.taps import Taps
from numba_tconv.kernels.common.arguments import (
    Bias,
    of_problem,
    over_planes,
    placed_like,
    placed_signal_like,
    weights_like,
)
from numba_tconv.kernels.rung import Rung, taking_bias
from numba_tconv.ptx import device_function, load_vector, store_vector
from numba_tconv.runtime import device as devices
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import STATIC_SHARED_LIMIT, Kernel, Prepared, alike
from numba_tconv.runtime.layout import Layout

from . import direct, long, long_tile
from .arguments import Sizes, Window, shared_signature
from .direct import DirectConfig
from .long_tile import LongConfig
from .rows import MOST_CHANNELS, MOST_ROWS
from .tile import Config, choose, plan

BATCH = 4  # vectors in flight


class Families(NamedTuple):
    """A thread's local arrays."""

    newest: object  # place of the first tap's input
    first_weight: object
    taps: object


def make_fill(config: Config):
    """Build ``fill``: a team copies a Window."""
    element, vector, lanes, in_per_group = ELEMENTS[config.dtype], config.vector, config.lanes, config.in_per_group
    load, accumulator, storage = element.load, element.accumulator, element.storage
    batch_elements, shared_vector = BATCH * vector, 4 // config.words

    @device_function
    def fill(shared, base, x, window, lane, width):
        raw = cuda.local.array(batch_elements, dtype=storage)
        values = cuda.local.array(vector, dtype=accumulator)
        source, begin, end = window.source, window.begin, window.end
        last = int32(end - vector)
        c = int32(0)
        while c < in_per_group:
            e = int32(lane * vector) if window.aligned else width
            while e < width:
                for v in range(BATCH):
                    first = int32(e + v * lanes * vector)
                    if first >= begin and first <= last:
                        load_vector(raw, v * vector, x.data, source + first)
                    else:
                        for z in range(vector):
                            i = int32(first + z)
                            inside = i >= begin and i < end
                            raw[v * vector + z] = x.data[uint64(source + i)] if inside else storage(0)
                for v in range(BATCH):
                    first = int32(e + v * lanes * vector)
                    if first < width:
                        for z in range(vector):
                            values[z] = load(raw[v * vector + z])
                        for z in range(0, vector, shared_vector):
                            store_vector(shared, base + first + z, values, z)
                e = int32(e + BATCH * lanes * vector)
            e = width if window.aligned else lane
            while e < width:
                for v in range(BATCH):
                    i = int32(e + v * lanes)
                    inside = i >= begin and i < end
                    raw[v] = x.data[uint64(source + i * x.stride_l)] if inside else storage(0)
                for v in range(BATCH):
                    if e + v * lanes < width:
                        shared[uint64(base + e + v * lanes)] = load(raw[v])
                e = int32(e + BATCH * lanes)
            base = int32(base + width)
            source += x.stride_c
            c = int32(c + 1)

    return fill


def make_aim(config: Config):
    """Build ``aim``, which fills in Families.

    ``start``: the vector's first output, from column ``base`` on, ``stride`` outputs a column."""
    taps, families_count = config.taps, config.families
    stride, dilation, gap, rows, inverse = taps.stride, taps.dilation, taps.gap, taps.rows, taps.dilation_inverse
    kernel_size = taps.kernel_size
    number = uint32 if stride * max(stride, dilation) < 2**32 else uint64  # 32 bits divide faster

    @device_function
    def aim(families, base, start, w_offset, stride_k):
        for f in range(families_count):
            column = number(start + f) // number(stride)
            phase = number(number(start + f) - column * number(stride))
            first_tap = number(phase // number(gap) * number(inverse) % number(rows))
            families.taps[f] = int32((kernel_size + rows - 1 - int64(first_tap)) // rows)
            if gap > 1 and phase % number(gap) != 0:
                families.taps[f] = int32(0)
            shift = int32(first_tap * number(dilation) // number(stride))
            families.first_weight[f] = w_offset + int64(first_tap) * stride_k
            families.newest[f] = uint64(base + int32(column) - shift) if families.taps[f] > 0 else uint64(0)

    return aim


def is_ragged(taps: Taps) -> bool:
    """Whether some phases have fewer taps."""
    return taps.gap > 1 or taps.kernel_size % taps.rows != 0


def _make_load_weights(config: Config):
    families_count, in_per_group, taps_per_row = config.families, config.in_per_group, config.taps.taps_per_row
    load, ragged, rows = ELEMENTS[config.dtype].load, is_ragged(config.taps), config.taps.rows

    @device_function
    def load_weights(weights, w, families):
        row_stride = rows * w.stride_k
        for f in range(families_count):
            for c in range(in_per_group):
                for b in range(taps_per_row):
                    if not ragged or b < families.taps[f]:
                        index = families.first_weight[f] + c * w.stride_i + b * row_stride
                        weights[(f * in_per_group + c) * taps_per_row + b] = load(w.data[uint64(index)])

    return load_weights


def _make_add_products(config: Config):
    accumulator, load, taps = ELEMENTS[config.dtype].accumulator, ELEMENTS[config.dtype].load, config.taps
    taps_per_row, tap_step, rows, ragged = taps.taps_per_row, taps.step, taps.rows, is_ragged(taps)
    vector, all_families, in_per_group = config.vector, config.families, config.in_per_group
    keeps_weights = config.keeps_weights

    @device_function
    def add_products(total, part, shared, weights, w, families, offset, width):
        row_stride = rows * w.stride_k
        for z in range(vector):
            total[z] = offset
        for c in range(in_per_group):
            # Long sums lose digits.
            for z in range(vector):
                part[z] = accumulator(0)
            for b in range(taps_per_row):
                for f in range(all_families):
                    # Zero times NaN is NaN.
                    if not ragged or b < families.taps[f]:
                        if keeps_weights:
                            weight = weights[(f * in_per_group + c) * taps_per_row + b]
                        else:
                            index = families.first_weight[f] + c * w.stride_i + b * row_stride
                            weight = load(w.data[uint64(index)])
                        first = families.newest[f] + uint64(c * width) - uint64(b * tap_step)
                        for m in range(vector // all_families):
                            part[f + m * all_families] += weight * shared[first + uint64(m)]
            for z in range(vector):
                total[z] += part[z]

    return add_products


def _make_store_outputs(config: Config):
    store, vector = ELEMENTS[config.dtype].store, config.vector

    @device_function
    def store_outputs(y, target, out, total, skip, outputs_left):
        for z in range(vector):
            out[z] = store(total[z])
        if skip == 0 and outputs_left >= vector:
            store_vector(y, target, out, 0)
        else:
            for z in range(vector):
                if z >= skip and z < outputs_left:
                    y[uint64(target + z)] = out[z]

    return store_outputs


@cache
def make_kernel(config: Config) -> Kernel:
    element, stride = ELEMENTS[config.dtype], config.taps.stride
    load, accumulator, storage = element.load, element.accumulator, element.storage
    lanes, teams, active, step = config.lanes, config.threads // config.lanes, config.active, config.step
    vector, all_families, halo, keeps_weights = config.vector, config.families, config.halo, config.keeps_weights
    in_per_group, out_per_group = config.in_per_group, config.out_per_group
    registers = config.weights if keeps_weights else 1
    fill, aim, load_weights = make_fill(config), make_aim(config), _make_load_weights(config)
    add_products, store_outputs = _make_add_products(config), _make_store_outputs(config)

    def depthwise(x, w, bias, y, sizes, row_count, passes, width):
        shared = cuda.shared.array(0, dtype=accumulator)
        families = Families(
            cuda.local.array(all_families, dtype=uint64),
            cuda.local.array(all_families, dtype=int64),
            cuda.local.array(all_families, dtype=int32),
        )
        weights = cuda.local.array(registers, dtype=accumulator)
        part, total = cuda.local.array(vector, dtype=accumulator), cuda.local.array(vector, dtype=accumulator)
        out = cuda.local.array(vector, dtype=storage)

        thread = uint32(cuda.threadIdx.x)
        team, lane = int32(thread // uint32(lanes)), int32(thread % uint32(lanes))
        row = int64(cuda.blockIdx.x) * teams + team
        n = int64(uint32(row) // uint32(sizes.groups))
        group = row - n * sizes.groups
        first_output = (int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y) * passes * step
        # The window serves all output channels' vectors, up to vector - 1 early.
        first_column, first_phase = divmod(first_output + sizes.padding - (vector - 1), stride)
        first_column -= halo
        source = n * x.stride_n + group * in_per_group * x.stride_c + first_column * x.stride_l
        aligned = x.stride_l == 1 and (in_per_group == 1 or x.stride_c & (vector - 1) == 0)
        lead = int32((x.offset + source) & (vector - 1) if aligned else 0)
        first_column -= lead
        base = int32(team * in_per_group * width)
        if row < row_count:
            begin = int32(max(int64(0), -first_column))
            end = int32(max(int64(0), min(int64(width), sizes.length - first_column)))
            fill(shared, base, x, Window(source - lead * x.stride_l, begin, end, aligned), lane, int32(width))
        cuda.syncthreads()
        if row >= row_count or lane >= active:
            return

        base = int32(base + lead + halo)
        j = int32(0)
        while j < out_per_group:
            target = (row * out_per_group + j) * sizes.out_length
            overhang = int32((y.offset + target) & (vector - 1))
            o = first_output - overhang + lane * vector
            outputs_left = int32(min(sizes.out_length - o, passes * step - lane * vector))
            skip = int32(max(-o, 0))
            start = int32(first_phase + (vector - 1) - overhang + lane * vector)
            target += o
            w_offset = group * in_per_group * w.stride_i + j * w.stride_o
            offset = load(bias.data[uint64(group * out_per_group + j)]) if bias.exists else accumulator(0)
            if keeps_weights:
                aim(families, base, start, w_offset, w.stride_k)
                load_weights(weights, w, families)
            while outputs_left > 0:
                if not keeps_weights:
                    aim(families, base, start, w_offset, w.stride_k)
                add_products(total, part, shared, weights, w, families, offset, width)
                store_outputs(y.data, target, out, total, skip, outputs_left)
                skip = int32(0)
                outputs_left = int32(outputs_left - step)
                target += step
                start = int32(start + step)
                if keeps_weights:
                    for f in range(all_families):
                        families.newest[f] += uint64(step // stride)
            j = int32(j + 1)

    signature = (*shared_signature(storage), *(types.int64,) * 3)
    return Kernel("depthwise", depthwise, signature, config.threads, min_blocks=config.min_blocks, key=repr(config))


# Kernels, and plans: passes and stretches. A configuration has a team's ``lanes``, a block's ``threads``,
# ``shared_bytes(passes)``, the kernel's last ``arguments(rows, passes)``, and ``work()`` in words.
FORMS = {
    Config: (make_kernel, plan),
    DirectConfig: (direct.make_kernel, direct.plan),
    LongConfig: (long.make_kernel, long_tile.plan),
}


class Depthwise(Rung):
    name = "depthwise"
    idea = "few channels a group: inputs through shared memory once, weights in registers, aligned 16-byte stores"

    def supports(self, problem, dtype, precision):
        if reason := super().supports(problem, dtype, precision):
            return reason
        if max(problem.in_channels_per_group, problem.out_channels_per_group) > MOST_CHANNELS:
            return f"it takes up to {MOST_CHANNELS} input and {MOST_CHANNELS} output channels a group"
        if problem.batch * problem.groups > MOST_ROWS:
            return f"it takes up to {MOST_ROWS} pairs of a sample and a group"
        if (need := choose(problem, dtype).shared_bytes(1)) > STATIC_SHARED_LIMIT:
            return f"the inputs of one pass need {need} bytes of shared memory, of {STATIC_SHARED_LIMIT}"
        return None

    def config(self, problem, dtype, precision=None):
        chosen = direct.choose(problem, dtype) or long_tile.choose(problem, dtype)
        return chosen or choose(problem, dtype)

    def config_on(self, device, problem, dtype, precision=None):
        config = self.config(problem, dtype)
        older = isinstance(config, LongConfig) and device.cc < long_tile.MINIMUM_CC
        return choose(problem, dtype) if older else config

    def tile(self, config):
        return config.work()

    def tiny_configs(self, problem, dtype):
        channels = problem.in_channels_per_group, problem.out_channels_per_group
        # One pass or several; two rows a block; phases that do not repeat.
        staged = [Config(dtype, problem.taps, *channels, *sizes) for sizes in ((4, 8, 1), (8, 8, 64), (2, 6, 1))]
        return [*staged, *direct.tiny(problem, dtype), *long_tile.tiny(problem, dtype)]

    def kernel(self, config):
        return FORMS[type(config)][0](config)

    def shared_bytes(self, problem, config):
        passes, _ = FORMS[type(config)][1](problem, config)
        return config.shared_bytes(passes)

    def prepare(self, x, w, bias, y, problem, config=None, precision=None):
        config = config or self.config_on(devices.of(x.index), problem, x.dtype)
        return taking_bias(_prepared(problem, config, x, w, bias is not None, y), bias)


@lru_cache(maxsize=1024)
def _prepared(
    problem: Problem, config: Config | DirectConfig | LongConfig, x: Layout, w: Layout, has_bias: bool, y: Layout
) -> Prepared:
    p, (make, plan_of) = problem, FORMS[type(config)]
    (passes, stretches), rows = plan_of(p, config), p.batch * p.groups
    return make(config).prepare(
        over_planes(-(-rows // (config.threads // config.lanes)), stretches),
        *(placed_signal_like(x), weights_like(w)),
        Bias(alike((p.out_channels,), x.dtype), has_bias),
        *(placed_like(y), of_problem(Sizes, p)),
        *config.arguments(rows, passes),
        shared_bytes=config.shared_bytes(passes),
    )
