"""Store of k6 for tiles in one sample whose runs are short (Config.by_lanes).

Sums are staged as in bulk.py, but lanes write the runs, 16 bytes each: a bulk copy has a fixed cost to issue.
"""

from __future__ import annotations

from numba import cuda, int32, int64, uint64

from numba_tconv.kernels.common.tensor_core.store_runs import make_run_of
from numba_tconv.kernels.k6_wgmma.tile import STORE_WARPS, Config
from numba_tconv.ptx import device_function, ld_shared, st_global_vector


def make_whole_vectors(config: Config):
    """Build ``whole_vectors``, which returns the bytes, staged address and index in y of a lane's whole vectors."""
    tile, channels = config.tile, config.bulk_channels
    itemsize, to_staged = tile.out_dtype.itemsize, tile.overlap * tile.span
    vector = 16 // itemsize
    all_ends = -(-channels // STORE_WARPS) * vector
    run_of = make_run_of(tile)

    @device_function
    def parts_of(run, there, alignment):
        """Return a run's begin, its outputs before the first whole vector and in whole vectors, and its end."""
        low, high, _ = run_of(run, there, alignment)
        length = int32(max(int32(high - low), int32(0)))
        before = int32(min(int32(-int32(run + low + alignment[0]) & (vector - 1)), length))
        return low, before, int32((length - before) // vector * vector), int32(low + length)

    @device_function
    def whole_vectors(y, base, shared, at, warp, lane, run, there, pitch, channels_left, out_length, alignment):
        """Write the ends of the warp's runs, and return the lane's whole vectors.

        ``run``: index in y of the tile's own first output, for the round's first channel. ``at``: offset of that
        channel's staged run in shared memory, in bytes.
        """
        channel = int32(lane * STORE_WARPS + warp)
        size, source, target, has_ends = int32(0), int32(base), int64(0), False
        staged = int32(at // itemsize + to_staged)
        if channel < channels and channel < channels_left:
            own = run + channel * out_length
            low, before, inner, high = parts_of(own, there, alignment)
            has_ends = low + inner < high
            e = int32(low + before)
            size, target = int32(inner * itemsize), own + e
            if inner > 0:  # else no multiple of 16 bytes, and all lanes read there
                source = int32(base + (staged + channel * pitch + e) * itemsize)
        if cuda.any_sync(0xFFFFFFFF, has_ends):
            # Both ends of a run together are one vector or none, unless the run ends with its sample.
            place = int32(lane)
            while place < all_ends:
                channel, z = int32(place // vector * STORE_WARPS + warp), int32(place % vector)
                if channel < channels and channel < channels_left:
                    own = run + channel * out_length
                    low, before, inner, high = parts_of(own, there, alignment)
                    while z < high - low - inner:
                        e = int32(low + z + (inner if z >= before else int32(0)))
                        y[uint64(own + e)] = shared[uint64(staged + channel * pitch + e)]
                        z = int32(z + vector)
                place = int32(place + 32)
        return size, source, target

    return whole_vectors


def lanes_of(config: Config) -> tuple[int, int]:
    """Return the lanes that write a run together, a vector each, and how often they do."""
    tile = config.tile
    vectors = (tile.advance * tile.span + tile.sector - 1) * tile.out_dtype.itemsize // 16
    lanes = min(32, 1 << (vectors - 1).bit_length())
    return lanes, -(-vectors // lanes)


def make_write_vectors(config: Config):
    """Build a device function that writes a warp's channels of the round to y."""
    tile, channels = config.tile, config.bulk_channels
    vector = 16 // tile.out_dtype.itemsize
    lanes, turns = lanes_of(config)
    all_turns = -(-channels // STORE_WARPS // (32 // lanes)) * turns
    load, whole_vectors = ld_shared(4, int32), make_whole_vectors(config)

    @device_function
    def vector_of(turn, run, lane):
        """Return whether a lane's vector exists, its index in y and its value; ``run``: the lane's."""
        size, source, target = run
        owner = int32(turn // turns * (32 // lanes) + lane // lanes)
        e = int32(turn % turns * lanes + lane % lanes)
        exists = 16 * e < cuda.shfl_sync(0xFFFFFFFF, size, owner)
        at = int32(cuda.shfl_sync(0xFFFFFFFF, source, owner) + (16 * e if exists else 0))
        return exists, cuda.shfl_sync(0xFFFFFFFF, target, owner) + e * vector, load(at)

    @device_function
    def write_vectors(turn, state):
        y, run, lane = state
        exists, index, value = vector_of(turn, run, lane)
        st_global_vector(exists, y, index, value)

    @device_function
    def write_fours(turn, state):
        """Write with four loads in flight."""
        y, run, lane = state
        a, b = vector_of(turn, run, lane), vector_of(int32(turn + 1), run, lane)
        c, d = vector_of(int32(turn + 2), run, lane), vector_of(int32(turn + 3), run, lane)
        st_global_vector(a[0], y, a[1], a[2])
        st_global_vector(b[0], y, b[1], b[2])
        st_global_vector(c[0], y, c[1], c[2])
        st_global_vector(d[0], y, d[1], d[2])

    @device_function
    def write(y, base, shared, at, warp, lane, run, there, pitch, channels_left, out_length, alignment):
        """Write the runs; arguments as in ``whole_vectors``."""
        own = whole_vectors(y, base, shared, at, warp, lane, run, there, pitch, channels_left, out_length, alignment)
        cuda.syncwarp()
        turn = int32(0)
        while turn < all_turns // 4 * 4:
            write_fours(turn, (y, own, lane))
            turn = int32(turn + 4)
        while turn < all_turns:
            write_vectors(turn, (y, own, lane))
            turn = int32(turn + 1)

    return write
