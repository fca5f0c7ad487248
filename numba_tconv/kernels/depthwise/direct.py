"""The direct form, for 16 bits: threads read inputs from global memory into registers.

A thread makes 16 bytes of outputs a pass. Passes advance by whole strides and loads: all run one case of straight-line
code."""

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import torch
from numba import cuda, int32, int64, types, uint32, uint64

from numba_tconv.formula.problem import Problem
from numba_tconv.formula.taps import Taps
from numba_tconv.ptx import load_guarded, multiply_add, multiply_runs, store_run
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel

from .arguments import shared_signature
from .rows import MOST_SAMPLES, split

VECTOR = 8
LANES = 128, 64, 32
MOST_WEIGHTS = 16
MOST_TAPS_PER_ROW = 8


@dataclass(frozen=True)
class DirectConfig:
    """``lanes`` threads share a row."""

    dtype: torch.dtype
    taps: Taps
    out_per_group: int
    lanes: int = 128
    threads: int = 128
    passes: int = 16
    runs: int = 2  # in flight
    min_blocks: int = 2

    @property
    def families(self) -> int:
        """As Config.families (tile.py)."""
        return min(self.taps.stride, VECTOR)

    @property
    def step(self) -> int:
        return self.lanes * VECTOR

    @property
    def granule(self) -> int:
        return VECTOR // self.families

    @cached_property
    def window(self) -> int:
        """Inputs of a vector, in any phase."""
        return self.taps.taps_per_row + (self.taps.stride - 1 + VECTOR - 1) // self.taps.stride

    @cached_property
    def granules(self) -> int:
        """Loads that hold a window."""
        return -(-(self.window + self.granule - 1) // self.granule)

    def shared_bytes(self, passes: int) -> int:
        return 0

    def arguments(self, rows: int, passes: int) -> tuple:
        return rows, passes

    def work(self) -> str:
        return f"{VECTOR} outputs a thread in each pass, {self.lanes} threads a row; all in registers"

    @cached_property
    def cases(self) -> tuple:
        """(output, weight, place in the loads) of every product, by case.

        A case is a first phase and the first input's place in its load; phases up to stride - VECTOR share cases.
        Weight f * taps_per_row + b is family f's tap b."""
        stride, taps_per_row = self.taps.stride, self.taps.taps_per_row
        first_phases = range(max(0, stride - VECTOR), stride)
        return tuple(
            tuple(
                (z, z % self.families * taps_per_row + b, lead + taps_per_row - 1 + (phase + z) // stride - b)
                for z in range(VECTOR)
                for b in range(taps_per_row)
            )
            for phase in first_phases
            for lead in range(self.granule)
        )


def fits(config: DirectConfig) -> bool:
    """Whether phases and places repeat in every pass, with equally few taps."""
    taps, taps_per_row = config.taps, config.taps.taps_per_row
    halves = config.dtype.itemsize == 2
    regular = taps.dilation == 1 and taps.kernel_size % taps.stride == 0
    repeat = config.step % (taps.stride * config.granule) == 0 and max(taps.stride, VECTOR) % config.families == 0
    few = taps_per_row <= MOST_TAPS_PER_ROW and config.families * taps_per_row <= MOST_WEIGHTS
    return halves and regular and repeat and few


@cache
def make_kernel(config: DirectConfig) -> Kernel:
    element, taps = ELEMENTS[config.dtype], config.taps
    load, store, accumulator = element.load, element.store, element.accumulator
    stride, taps_per_row, families, granule = taps.stride, taps.taps_per_row, config.families, config.granule
    lanes, teams, step, runs = config.lanes, config.threads // config.lanes, config.step, config.runs
    span, out_per_group = config.granules * granule, config.out_per_group
    weight_count, output_count = families * taps_per_row, runs * VECTOR
    columns, same_case = step // stride, max(0, stride - VECTOR)
    fetch_guarded, put = load_guarded(element, span), store_run(element)
    multiply = multiply_add(config.cases)
    multiply_fast = multiply_runs(element, config.cases, VECTOR, granule, config.granules, runs)

    def depthwise_direct(x, w, bias, y, sizes, row_count, passes):
        inputs = cuda.local.array(span, dtype=accumulator)
        weights = cuda.local.array(weight_count, dtype=accumulator)
        total = cuda.local.array(output_count, dtype=accumulator)

        thread = uint32(cuda.threadIdx.x)
        team, lane = int32(thread // uint32(lanes)), int32(thread % uint32(lanes))
        row = int64(cuda.blockIdx.x) * teams + team
        stretch = int64(cuda.blockIdx.z) * cuda.gridDim.y + cuda.blockIdx.y
        if row >= row_count or stretch * passes * step >= sizes.out_length + VECTOR:
            return
        n = int64(uint32(row) // uint32(sizes.groups))
        group = row - n * sizes.groups
        source = n * x.stride_n + group * x.stride_c
        length, out_length, first_output = int32(sizes.length), int32(sizes.out_length), int32(stretch * passes * step)
        last_begin = int32(length - span - (runs - 1) * columns) if x.stride_l == 1 else int32(-1)
        last_output = int32(out_length - VECTOR - (runs - 1) * step)
        j = int32(0)
        while j < out_per_group:
            target = (row * out_per_group + j) * out_length
            overhang = int32((y.offset + target) & (VECTOR - 1))
            o = int32(first_output - overhang + lane * VECTOR)
            column, phase = divmod(int32(o + int32(sizes.padding)), int32(stride))
            begin = int32(column - (taps_per_row - 1))
            lead = int32((x.offset + source + begin) & (granule - 1))
            begin = int32(begin - lead)
            case = int32(max(phase - same_case, 0) * granule + lead)
            w_offset = group * w.stride_i + j * w.stride_o
            for f in range(families):
                tap = int32(phase + f)
                tap = int32(tap - stride) if tap >= stride else tap
                for b in range(taps_per_row):
                    index = w_offset + int64(tap + b * stride) * w.stride_k
                    weights[f * taps_per_row + b] = load(w.data[uint64(index)])
            offset = load(bias.data[uint64(group * out_per_group + j)]) if bias.exists else accumulator(0)
            end = int32(min(out_length, int32(o + passes * step)))
            while o < end:
                for z in range(output_count):
                    total[z] = offset
                if begin >= 0 and begin <= last_begin and o >= 0 and o <= last_output and o + (runs - 1) * step < end:
                    multiply_fast(total, weights, x.data, source + begin, int32(columns), case)
                    for r in range(runs):
                        put(y.data, target + o + r * step, total, r * VECTOR)
                    o = int32(o + runs * step)
                    begin = int32(begin + runs * columns)
                else:
                    fetch_guarded(inputs, x.data, source, x.stride_l, begin, length)
                    multiply(total, weights, inputs, case)
                    for z in range(VECTOR):
                        if o + z >= 0 and o + z < out_length:
                            y.data[uint64(target + o + z)] = store(total[z])
                    o = int32(o + step)
                    begin = int32(begin + columns)
            j = int32(j + 1)

    signature = (*shared_signature(element.storage), types.int64, types.int64)
    name, threads = "depthwise_direct", config.threads
    return Kernel(name, depthwise_direct, signature, threads, min_blocks=config.min_blocks, key=repr(config))


def tiles(problem: Problem, dtype: torch.dtype, sizes) -> list[DirectConfig]:
    p = problem
    if p.in_channels_per_group > 1 or p.last_sample >= MOST_SAMPLES:
        return []
    configs = (DirectConfig(dtype, p.taps, p.out_channels_per_group, **each) for each in sizes)
    return [config for config in configs if fits(config)]


@lru_cache(maxsize=1024)
def choose(problem: Problem, dtype: torch.dtype) -> DirectConfig | None:
    found = tiles(problem, dtype, [{"lanes": lanes} for lanes in LANES])
    full = [config for config in found if config.step <= problem.out_length]
    return next(iter(full), found[-1] if found else None)


def tiny(problem: Problem, dtype: torch.dtype) -> list[DirectConfig]:
    sizes = (4, 8, 2, 1), (4, 4, 4, 2)
    names = "lanes", "threads", "passes", "runs"
    return tiles(problem, dtype, [dict(zip(names, size, strict=True), min_blocks=1) for size in sizes])


def plan(problem: Problem, config: DirectConfig) -> tuple[int, int]:
    return split(problem.batch * problem.groups, -(-(problem.out_length + VECTOR - 1) // VECTOR), config)
