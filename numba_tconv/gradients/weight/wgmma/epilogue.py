"""The direct epilogue of grad_weight_wgmma: whole sums straight into the weight's gradient.

Sums pass through the ring's shared memory from the order of registers to that of the gradient, in which an input
channel's output channels and taps are one run. With planes (gradients/planes.py) a tile has some phases of one output
channel, so its run is in pieces, one for each tap."""

from __future__ import annotations

from numba import cuda, float32, int32, int64, uint64

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.wgmma_ring import BLOCK, CONSUMERS
from numba_tconv.kernels.common.integer import divided
from numba_tconv.kernels.common.tensor_core.fragments import wgmma_d
from numba_tconv.kernels.common.tensor_map import ALIGNMENT
from numba_tconv.ptx import barrier_sync, device_function, load_vector, repeated, store_run
from numba_tconv.runtime.elements import ELEMENTS

from .tile import Config

THREADS = 128 * CONSUMERS  # of the consumers
BARRIER = 1  # named barrier of the consumers
VECTOR = 4  # float32 elements of 16 bytes


def run_of(config: Config) -> int:
    """Elements of a channel's run: all taps of the tile's output channels, or the tile's taps."""
    return config.pairs * config.tap_chunk


def pitch_of(config: Config) -> int:
    """Elements between two channels' runs in shared memory, without bank conflicts for a warp's writes."""
    return next(p for p in range(run_of(config), run_of(config) + 16) if p % 16 == VECTOR)


def suits(problem: Problem, config: Config) -> bool:
    """Whether tiles of grad_output in place have whole runs that fit in the ring and are multiples of 16 bytes."""
    p, c = problem, config
    whole = not c.in_turns and c.tap_chunk * c.window.phases == p.kernel_size
    lengths = run_of(c), p.out_channels_per_group * p.kernel_size
    return whole and _fits(c) and all(length * c.itemsize % ALIGNMENT == 0 for length in lengths)


def planes_suit(problem: Problem, config: Config, phases: int) -> bool:
    """Whether tiles of planes, ``phases`` of a channel, have all taps of phases of one output channel."""
    c = config
    whole = not c.in_turns and c.tap_chunk * phases == problem.kernel_size and phases % c.rows == 0
    return whole and _fits(c)


def _fits(config: Config) -> bool:
    """Whether the ring has room for a tile's sums."""
    return 4 * config.channels * pitch_of(config) <= config.barriers


def make_store(config: Config):
    """A device function that stores a tile: takes the sums, the shared memory and its first free element, the gradient,
    and the tile's place in it."""
    blocks, chunk, channels, sums = config.blocks, config.tap_chunk, config.channels, config.channels // 2
    pairs, run, plane_phases = config.pairs, run_of(config), config.plane_phases
    phases = config.rows if plane_phases else config.window.phases  # side by side in shared memory
    kernel_size, pitch, vector, lane_rows = chunk * phases, pitch_of(config), ALIGNMENT // config.itemsize, 2 * blocks
    apart = plane_phases - phases  # elements between the pieces of a run
    of_run = run // vector
    place, store = device_function(wgmma_d), store_run(ELEMENTS[DTYPES[config.precision]])

    @device_function
    def stage_sum(k, state):
        """Put one of the lane's sums into shared memory."""
        acc, shared, free, runs, group_warp, lane = state
        tap, z = int32(k // sums), int32(k % sums)
        _, n = place(group_warp, lane, z)
        at = runs[tap // chunk * 2 + z % 4 // 2]
        if at >= 0:
            shared[uint64(int32(free + n * pitch + at + tap % chunk * phases))] = acc[k]

    stage_all = repeated(stage_sum, config.sums)

    @device_function
    def store_sums(acc, shared, free, result, crew, group_warp, lane, group, pair_tile, channel_tile, group_rows,
                   group_channels):  # fmt: skip
        runs = cuda.local.array(lane_rows, dtype=int32)  # where the runs of the lane's rows begin
        for z in range(lane_rows):
            m, _ = place(group_warp, lane, z % 2 * 2)
            m = int32(m + BLOCK * (blocks * crew + z // 2))
            channel, phase = divided(m, int32(phases))
            runs[z] = int32(channel * kernel_size + phase) if m < pairs else int32(-1)
        barrier_sync(BARRIER, THREADS)  # the last products have read the ring
        stage_all(int32(0), (acc, shared, free, runs, group_warp, lane))
        barrier_sync(BARRIER, THREADS)
        first, first_channel = pair_tile * int64(run), channel_tile * int64(channels)
        channels_left = int32(min(int64(channels), group_channels - first_channel))
        length = group_rows * (chunk if plane_phases else kernel_size)
        left = int32(min(int64(run), length - first))
        if plane_phases:
            channel, phase = divided(int32(pair_tile * pairs), int32(plane_phases))
            first = channel * int64(plane_phases * chunk) + phase
        start = (group * group_channels + first_channel) * length + first
        values = cuda.local.array(vector, dtype=float32)
        e = int32((crew * 4 + group_warp) * 32 + lane)
        while e < of_run * channels_left:
            n, at = divided(e, int32(of_run))
            at = int32(at * vector)
            if at < left:
                for u in range(0, vector, VECTOR):
                    load_vector(values, u, shared, int64(int32(free + n * pitch + at + u)))
                to = int32(at + at // phases * apart if plane_phases else at)
                store(result, start + n * length + to, values, 0)
            e = int32(e + THREADS)

    return store_sums
