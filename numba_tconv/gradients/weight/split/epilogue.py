"""Store of a split's sums, in the weight's order."""

from collections.abc import Callable

from numba import cuda, float64, int32, uint32, uint64

from numba_tconv.ptx import device_function
from numba_tconv.runtime.elements import ELEMENTS

from .tile import Config


def make_store(config: Config) -> Callable:
    """Build the store: from registers, or in float64 from slices added up in shared memory."""
    return _make_store_registers(config) if config.slices == 1 else _make_store_slices(config)


def _make_store_registers(config: Config) -> Callable:
    phases, channels, tap_chunk, rows = config.phases, config.channels, config.tap_chunk, config.taps.rows
    thread_m, thread_p, lanes_m, lanes_p = config.thread_m, config.thread_p, config.lanes_m, config.lanes_p

    @device_function
    def store_registers(sums, shared, tile, result, sizes, grid):
        first_ci = (tile.split * sizes.groups + tile.group) * sizes.in_channels_per_group + tile.first_row
        # Unrolled: a loop would locate each sum.
        to_row = lanes_m * sizes.out_channels_per_group * sizes.kernel_size
        rows_left = int32(tile.rows_left - tile.lane_m)
        for p in range(thread_p):
            pair = uint32(p * lanes_p + tile.lane_p)
            c, a = int32(pair // uint32(phases)), int32(pair % uint32(phases))
            k = tile.first_tap + a
            exists = c < channels and c < tile.channels_left and tile.first_phase + a < grid.phases
            taps_left = int32(tile.end_tap - k) if exists else int32(0)
            row = (first_ci + tile.lane_m) * sizes.out_channels_per_group + tile.first_channel + c
            target = row * sizes.kernel_size + k
            for m in range(thread_m):
                for b in range(tap_chunk):
                    if m * lanes_m < rows_left and b * rows < taps_left:
                        result[uint64(target + b * rows)] = sums[(m * thread_p + p) * tap_chunk + b]
                target += to_row

    return store_registers


def _make_store_slices(config: Config) -> Callable:
    phases, channels, tap_chunk, rows = config.phases, config.channels, config.tap_chunk, config.taps.rows
    thread_p, lanes_m, lanes_p, all_sums = config.thread_p, config.lanes_m, config.lanes_p, config.sums
    threads, slices, slice_threads = config.threads, config.slices, config.slice_threads
    accumulator = ELEMENTS[config.dtype].accumulator

    @device_function
    def store_slices(sums, shared, tile, result, sizes, grid):
        first_ci = (tile.split * sizes.groups + tile.group) * sizes.in_channels_per_group + tile.first_row
        cuda.syncthreads()
        for z in range(all_sums):
            shared[uint64(z * threads + tile.thread)] = sums[z]
        cuda.syncthreads()
        within, number = int32(tile.thread % slice_threads), uint32(tile.thread // slice_threads)
        while number < all_sums:
            m = int32(number // uint32(thread_p * tap_chunk)) * lanes_m + tile.lane_m
            pair = number // uint32(tap_chunk) % uint32(thread_p) * uint32(lanes_p) + uint32(tile.lane_p)
            c, a, b = int32(pair // uint32(phases)), int32(pair % uint32(phases)), int32(number % uint32(tap_chunk))
            k = tile.first_tap + a + b * rows
            if (
                m < tile.rows_left
                and c < channels
                and c < tile.channels_left
                and tile.first_phase + a < grid.phases
                and k < tile.end_tap
            ):
                value = float64(0)
                z = int32(0)
                while z < slices:
                    value += float64(shared[uint64(int32(number) * threads + z * slice_threads + within)])
                    z = int32(z + 1)
                row = (first_ci + m) * sizes.out_channels_per_group + tile.first_channel + c
                target = row * sizes.kernel_size + k
                result[uint64(target)] = accumulator(value)
            number = uint32(number + slices)

    return store_slices
