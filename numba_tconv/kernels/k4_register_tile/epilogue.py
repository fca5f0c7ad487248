"""k4's and k5_dmma's epilogue: from shared memory to runs of outputs."""

from numba import cuda, int32, int64, uint32, uint64

from numba_tconv.ptx import device_function, load_vector, store_vector
from numba_tconv.runtime.elements import ELEMENTS

from .tile import Config


def make_store(config: Config):
    """Build ``store``, by the first ``config.threads`` threads; outputs without a tap are the bias, or zero.

    ``values``: a local array of ``y_vector`` elements."""
    threads, block_n, y_vector, pitch = config.threads, config.block_n, config.y_vector, config.result_pitch
    stride, dilation, gap, rows = config.stride, config.dilation, config.taps.gap, config.taps.rows
    phases, channels, row_parts = config.phases, config.channels, config.row_parts
    accumulator = ELEMENTS[config.dtype].accumulator
    phase_pitch, channel_pitch = (channels * pitch, pitch) if config.apart else (pitch, phases * pitch)
    run = block_n * phases * gap
    lanes_run = min(run // y_vector, threads)
    channel_lanes = threads // lanes_run
    all_store = threads % lanes_run == 0

    @device_function
    def store(y, shared, start, group, row_tile, values, bias, sizes, grid):
        channel, first_phase = row_tile // row_parts * channels, row_tile % row_parts * phases
        channels_left = int32(min(channels, sizes.out_per_group - channel))
        first_channel = group * sizes.out_per_group + channel  # of all groups
        columns, out_channels = grid.columns, sizes.out_per_group * sizes.groups
        first_n, first_column = start[0], start[1]
        thread = int32(cuda.threadIdx.x)
        end = run if all_store or thread < channel_lanes * lanes_run else 0  # others would write again
        for e in range(thread % lanes_run * y_vector, end, lanes_run * y_vector):
            offset, row_column = e % gap, e // gap
            phase, column = row_column % phases, row_column // phases
            n, i = first_n, first_column + column
            if i >= columns:
                # 32 bits suffice where several samples end in the tile.
                ended = int64(uint32(i) // uint32(columns)) if columns < block_n else int64(1)
                n += ended
                i -= ended * columns
            o = (grid.first_column + i) * stride + (first_phase + phase) * dilation + offset - sizes.padding
            if n < sizes.batch and first_phase + phase < rows and o >= 0 and o < sizes.out_length:
                staged = int32(phase * phase_pitch + column)
                co = first_channel + thread // lanes_run
                target = (n * out_channels + co) * sizes.out_length + o
                while co < first_channel + channels_left:
                    source = int32(staged + (co - first_channel) * channel_pitch)
                    if y_vector > 1:
                        load_vector(values, 0, shared, source)
                        if bias.exists:
                            for z in range(y_vector):
                                values[z] += bias.data[uint64(co)]
                        store_vector(y, target, values, 0)
                    else:
                        value = shared[uint64(source)]
                        if offset != 0:
                            value = accumulator(0)
                        if bias.exists:
                            value += bias.data[uint64(co)]
                        y[uint64(target)] = value
                    co += channel_lanes
                    target += channel_lanes * sizes.out_length

    return store
