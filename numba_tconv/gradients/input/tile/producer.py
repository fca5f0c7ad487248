"""Loads, by cp.async."""

from numba import cuda, int32, int64, uint32, uint64

from numba_tconv.gradients.window import Columns, make_fetch, make_locate
from numba_tconv.ptx import device_function, recomputed

from .tile import Config


def make_load(config: Config):
    """Build ``fill_table``, and window.make_fetch's ``fetch``, whose columns are the table.

    For each chunk of taps and phases it holds elements of grad_output at channel 0, by column and phase."""
    threads, phases, table_entries = config.threads, config.phases, config.table_entries
    chunk_taps, locate_element = config.tap_chunk * config.taps.rows, make_locate(config.stride, config.dilation)

    @device_function
    def fill_table(table, tap_chunk, phase, block, grad_output, sizes, grid):
        cuda.syncthreads()
        e = block.thread
        while e < table_entries:
            column, a = uint32(e) // uint32(phases), uint32(e) % uint32(phases)
            tap = phase + tap_chunk * int64(chunk_taps)
            phases_left = grid.phases - phase
            columns = Columns(block.sample, block.position, grid.window_columns, tap, phases_left, grad_output, sizes)
            table[uint64(e)] = locate_element(columns, column, a)
            e = recomputed(int32(e + threads))  # stays rolled
        cuda.syncthreads()

    @device_function
    def looked_up(table, column, a):
        return table[uint64(column * phases + a)]

    return fill_table, make_fetch(config.window, looked_up)
