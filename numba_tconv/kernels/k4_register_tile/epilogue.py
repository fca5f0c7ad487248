"""The epilogue of k4 and of k5_dmma's ring: writes a tile of sums from shared memory as runs of outputs."""

from __future__ import annotations

from numba import cuda, int32, int64, uint32, uint64

from numba_tconv.ptx import device_function, load_vector, store_vector
from numba_tconv.runtime.elements import ELEMENTS

from .tile import Config


def make_store(config: Config):
    """A device function ``store`` for the first ``config.threads`` threads of a block.

    ``values``: a local array of ``y_vector`` elements. ``place``: sample and column where the tile begins.
    ``co_begin``, ``channels_left``: first output channel, and channels from it on. ``a_begin``: first row of taps.
    Outputs that no tap reaches become the bias or zero.
    """
    threads, block_n, y_vector, pitch = config.threads, config.block_n, config.y_vector, config.pitch
    stride, dilation, gap, rows = config.stride, config.dilation, config.taps.gap, config.taps.rows
    phases, channels, accumulator = config.phases, config.channels, ELEMENTS[config.dtype].accumulator
    a_pitch, co_pitch = (channels * pitch, pitch) if config.apart else (pitch, phases * pitch)  # of the staged tile
    run = block_n * phases * gap  # consecutive outputs of one channel in the tile
    lanes_run = min(run // y_vector, threads)
    channel_lanes = threads // lanes_run
    all_store = threads % lanes_run == 0

    @device_function
    def store(y, shared, values, bias, has_bias, place, columns, first_column, batch, co_begin, channels_left, a_begin,
              out_channels, out_length, padding):  # fmt: skip
        """Write the staged tile: consecutive threads write consecutive outputs."""
        n_first, column_first = place[0], place[1]
        thread = int32(cuda.threadIdx.x)
        end = run if all_store or thread < channel_lanes * lanes_run else 0  # the rest would write again
        for e in range(thread % lanes_run * y_vector, end, lanes_run * y_vector):
            # Position and phase serve all output channels of the block.
            offset, row_column = e % gap, e // gap
            a, column = row_column % phases, row_column // phases
            n, i = n_first, column_first + column
            if i >= columns:
                # A 32-bit division suffices where several samples end in the tile.
                ended = int64(uint32(i) // uint32(columns)) if columns < block_n else int64(1)
                n += ended
                i -= ended * columns
            o = (first_column + i) * stride + (a_begin + a) * dilation + offset - padding
            if n < batch and a_begin + a < rows and o >= 0 and o < out_length:
                at = int32(a * a_pitch + column)
                co = co_begin + thread // lanes_run
                target = (n * out_channels + co) * out_length + o
                while co < co_begin + channels_left:
                    source = int32(at + (co - co_begin) * co_pitch)
                    if y_vector > 1:
                        load_vector(values, 0, shared, source)
                        if has_bias:
                            for z in range(y_vector):
                                values[z] += bias[uint64(co)]
                        store_vector(y, target, values, 0)
                    else:
                        value = shared[uint64(source)]
                        if offset != 0:
                            value = accumulator(0)
                        if has_bias:
                            value += bias[uint64(co)]
                        y[uint64(target)] = value
                    co += channel_lanes
                    target += channel_lanes * out_length

    return store
