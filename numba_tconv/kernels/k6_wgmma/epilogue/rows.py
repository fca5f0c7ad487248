"""Store of float32 tiles without a stride: rounds of a core matrix (tensor_core/store_rows.py)."""

from numba import float32, int32

from numba_tconv.kernels.common.tensor_core.fragments import column_of
from numba_tconv.kernels.common.tensor_core.outputs import Thread
from numba_tconv.kernels.common.tensor_core.store_rows import ROUND_ROWS, make_store_rounds
from numba_tconv.kernels.k6_wgmma.tile import STORE_WARPS, Config
from numba_tconv.ptx import barrier_sync, device_function, ld_shared, recomputed, repeated, st_shared, st_shared_f32


def make_store_rows(config: Config):
    tile, exact = config.tile, config.tile.operand_halves == 2
    pitch, column_of_lane = tile.pitch, device_function(column_of)
    add_biases = _make_add_biases(config)
    store = make_store_rounds(tile, STORE_WARPS, _make_stage(config), config.round_buffers, config.round_bytes)

    @device_function
    def store_rows(sums, leaving, buffers, out, place, bias, thread):
        thread = Thread(thread.team, thread.warp, recomputed(thread.lane))
        at = int32(buffers.shared.base + buffers.at)
        own = sums.total if exact else sums.acc
        barrier_sync(thread.team + 1, 128)  # the last tile's buffers have been read
        if out.has_bias:
            add_biases(own, at, bias, thread)
        column = int32(at + ((thread.lane & 3) * 2 * pitch + column_of_lane(thread.warp, thread.lane, 0, 0)) * 4)
        store(own, column, at, out, place, thread)

    return store_rows


def _make_add_biases(config: Config):
    """Build the addition of biases, through shared memory at ``at``."""
    rows, sums = config.tile.rows, config.tile.rows // 2
    load = ld_shared(1, float32)

    @device_function
    def add_matrix(k, state):
        acc, at, lane = state
        for z in range(2):
            bias = load(int32(at + (k * ROUND_ROWS + (lane & 3) * 2 + z) * 4))
            acc[4 * k + z] += bias
            acc[4 * k + z + 2] += bias
            acc[4 * k + z + sums] += bias
            acc[4 * k + z + sums + 2] += bias

    add_matrices = repeated(add_matrix, rows // ROUND_ROWS)

    @device_function
    def add_biases(acc, at, bias, thread):
        row = int32(thread.warp * 32 + thread.lane)
        if row < rows:
            st_shared_f32(int32(at + row * 4), bias)
        barrier_sync(thread.team + 1, 128)
        add_matrices(int32(0), (acc, at, thread.lane))
        barrier_sync(thread.team + 1, 128)  # sums are staged in the same bytes

    return add_biases


def _make_stage(config: Config):
    """Build the staging of eight rows; ``column``: address of the lane's first column."""
    sums_of_half, pitch = config.tile.rows // 2, config.tile.pitch

    @device_function
    def stage(k, sums, column, buffer):
        for z in range(2):
            a = 4 * k + z
            st_shared(int32(column + buffer + z * pitch * 4), sums[a], sums[a + 2], sums[a + sums_of_half],
                      sums[a + sums_of_half + 2])  # fmt: skip

    return stage
