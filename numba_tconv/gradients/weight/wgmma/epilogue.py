"""The store: a split's sums among the partial sums, or whole ones into the gradient.

Whole sums pass through the ring's memory into the gradient's order: runs of an input channel's output channels and
taps. A tile of planes has some phases of one output channel: a piece of run a tap."""

from typing import NamedTuple

from numba import cuda, float32, int32, int64, uint64

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.wgmma_ring import BLOCK, CONSUMERS
from numba_tconv.kernels.common.integer import divided
from numba_tconv.kernels.common.tensor_core.fragments import wgmma_d
from numba_tconv.kernels.common.tensor_map import ALIGNMENT
from numba_tconv.ptx import (
    barrier_sync,
    bits_of,
    device_function,
    load_vector,
    repeated,
    st_global_if,
    store_run,
)
from numba_tconv.runtime.elements import ELEMENTS

from .tile import Config

THREADS = 128 * CONSUMERS
BARRIER = 1
VECTOR = 4


class Staging(NamedTuple):
    shared: object
    first: int


class Staged(NamedTuple):
    sums: object
    staging: Staging
    runs: object  # where its rows' runs begin, or negative
    consumer: object


def run_of(config: Config) -> int:
    """Elements of a channel's run: all taps of the tile's output channels, or its taps."""
    return config.pairs * config.tap_chunk


def pitch_of(config: Config) -> int:
    """Elements between runs, against bank conflicts."""
    return next(p for p in range(run_of(config), run_of(config) + 16) if p % 16 == VECTOR)


def suits(problem: Problem, config: Config) -> bool:
    """Whether tiles of grad_output have whole, 16-byte aligned runs that fit in the ring."""
    p, c = problem, config
    whole = not c.alternate and c.tap_chunk * c.window.phases == p.kernel_size
    lengths = run_of(c), p.out_channels_per_group * p.kernel_size
    return whole and _fits(c) and all(length * c.itemsize % ALIGNMENT == 0 for length in lengths)


def planes_suit(problem: Problem, config: Config, phases: int) -> bool:
    """Whether tiles of planes, ``phases`` a channel, have all taps of phases of one output channel."""
    c = config
    whole = not c.alternate and c.tap_chunk * phases == problem.kernel_size and phases % c.rows == 0
    return whole and _fits(c)


def _fits(config: Config) -> bool:
    return 4 * config.channels * pitch_of(config) <= config.barriers


def make_store(config: Config):
    return _make_direct(config) if config.direct else _make_partial(config)


def _make_direct(config: Config):
    blocks, chunk, channels, sums_of_tap = config.blocks, config.tap_chunk, config.channels, config.channels // 2
    pairs, run, plane_phases = config.pairs, run_of(config), config.plane_phases
    phases = config.rows if plane_phases else config.window.phases  # adjacent in shared memory
    kernel_size, pitch, vector, lane_rows = chunk * phases, pitch_of(config), ALIGNMENT // config.itemsize, 2 * blocks
    gap = plane_phases - phases
    vectors = run // vector
    fragment, store_vector = device_function(wgmma_d), store_run(ELEMENTS[DTYPES[config.precision]])

    @device_function
    def stage_sum(k, state):
        staging, consumer = state.staging, state.consumer
        tap, z = int32(k // sums_of_tap), int32(k % sums_of_tap)
        _, n = fragment(consumer.warp, consumer.lane, z)
        begin = state.runs[tap // chunk * 2 + z % 4 // 2]
        if begin >= 0:
            staging.shared[uint64(int32(staging.first + n * pitch + begin + tap % chunk * phases))] = state.sums[k]

    stage_all = repeated(stage_sum, config.sums)

    @device_function
    def store(sums, result, staging, grid, block, consumer):
        runs = cuda.local.array(lane_rows, dtype=int32)
        for z in range(lane_rows):
            m, _ = fragment(consumer.warp, consumer.lane, z % 2 * 2)
            m = int32(m + BLOCK * (blocks * consumer.warpgroup + z // 2))
            channel, phase = divided(m, int32(phases))
            runs[z] = int32(channel * kernel_size + phase) if m < pairs else int32(-1)
        barrier_sync(BARRIER, THREADS)  # products have read the ring
        stage_all(int32(0), Staged(sums, staging, runs, consumer))
        barrier_sync(BARRIER, THREADS)
        first, first_channel = block.pair_tile * int64(run), block.channel_tile * int64(channels)
        channels_left = int32(min(int64(channels), grid.group_channels - first_channel))
        length = grid.group_rows * (chunk if plane_phases else kernel_size)
        elements_left = int32(min(int64(run), length - first))
        if plane_phases:
            channel, phase = divided(int32(block.pair_tile * pairs), int32(plane_phases))
            first = channel * int64(plane_phases * chunk) + phase
        start = (int64(block.group) * grid.group_channels + first_channel) * length + first
        values = cuda.local.array(vector, dtype=float32)
        e = int32((consumer.warpgroup * 4 + consumer.warp) * 32 + consumer.lane)
        while e < vectors * channels_left:
            n, element = divided(e, int32(vectors))
            element = int32(element * vector)
            if element < elements_left:
                for u in range(0, vector, VECTOR):
                    load_vector(values, u, staging.shared, int64(int32(staging.first + n * pitch + element + u)))
                target = int32(element + element // phases * gap if plane_phases else element)
                store_vector(result, start + n * length + target, values, 0)
            e = int32(e + THREADS)

    return store


def _make_partial(config: Config):
    blocks, chunk, channels, sums_of_tap = config.blocks, config.tap_chunk, config.channels, config.channels // 2
    rows, warpgroup_rows, tile_sums, alternate = config.rows, config.warpgroup_rows, config.tile_sums, config.alternate
    fragment, store_pair = device_function(wgmma_d), st_global_if(2)

    @device_function
    def store(sums, result, staging, grid, block, consumer):
        partial = block.split * CONSUMERS + consumer.warpgroup if alternate else block.split
        tile_start = (partial * grid.tiles + block.tile) * tile_sums
        both = cuda.local.array(2, dtype=int32)
        for b in range(blocks):
            for tap in range(chunk):
                for z in range(0, sums_of_tap, 2):
                    m, n = fragment(consumer.warp, consumer.lane, z)
                    row = tap * rows + warpgroup_rows * consumer.warpgroup + BLOCK * b + m
                    both[0] = bits_of(sums[(b * chunk + tap) * sums_of_tap + z])
                    both[1] = bits_of(sums[(b * chunk + tap) * sums_of_tap + z + 1])
                    store_pair(True, result, tile_start + row * channels + n, both)

    return store
