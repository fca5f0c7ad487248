"""Store of tiles in one sample with short runs (Config.by_lanes).

Staged as in bulk.py; lanes write vectors, because a bulk copy has a fixed cost."""

from typing import NamedTuple

from numba import cuda, int32, int64, uint64

from numba_tconv.kernels.common.tensor_core.store_runs import make_run_of
from numba_tconv.kernels.k6_wgmma.tile import STORE_WARPS, Config
from numba_tconv.ptx import device_function, ld_shared, st_global_vector


class Staged(NamedTuple):
    """A round's staged runs."""

    shared: object  # as elements of y
    base: int  # address of ``shared``
    at: int  # bytes to the first channel's run
    pitch: int  # elements between runs
    run: int  # index in y of the first channel's run
    channels_left: int
    extent: object


class Pieces(NamedTuple):
    """A run's ends and whole vectors, in outputs after the tile's first."""

    begin: int
    before: int
    inner: int  # in whole vectors
    end: int


class Vectors(NamedTuple):
    size: int  # bytes
    source: int  # shared address
    target: int  # index in y


def make_whole_vectors(config: Config):
    """Build ``whole_vectors``: writes the ends of runs, returns the lane's Vectors."""
    tile, channels = config.tile, config.bulk_channels
    itemsize, to_staged = tile.out_dtype.itemsize, tile.overlap * tile.span
    vector = 16 // itemsize
    all_ends = -(-channels // STORE_WARPS) * vector
    run_of = make_run_of(tile)

    @device_function
    def pieces_of(run, extent, alignment):
        low, high, _ = run_of(run, extent, alignment)
        length = int32(max(int32(high - low), int32(0)))
        before = int32(min(int32(-int32(run + low + alignment.shift) & (vector - 1)), length))
        return Pieces(low, before, int32((length - before) // vector * vector), int32(low + length))

    @device_function
    def whole_vectors(staged, out, thread):
        channel = int32(thread.lane * STORE_WARPS + thread.warp)
        size, source, target, has_ends = int32(0), int32(staged.base), int64(0), False
        first = int32(staged.at // itemsize + to_staged)
        if channel < channels and channel < staged.channels_left:
            run = staged.run + channel * out.length
            pieces = pieces_of(run, staged.extent, out.alignment)
            has_ends = pieces.begin + pieces.inner < pieces.end
            e = int32(pieces.begin + pieces.before)
            size, target = int32(pieces.inner * itemsize), run + e
            if pieces.inner > 0:
                source = int32(staged.base + (first + channel * staged.pitch + e) * itemsize)
        if cuda.any_sync(0xFFFFFFFF, has_ends):
            # The ends together are a vector or none, unless the run ends with its sample.
            end = int32(thread.lane)
            while end < all_ends:
                channel, z = int32(end // vector * STORE_WARPS + thread.warp), int32(end % vector)
                if channel < channels and channel < staged.channels_left:
                    run = staged.run + channel * out.length
                    pieces = pieces_of(run, staged.extent, out.alignment)
                    while z < pieces.end - pieces.begin - pieces.inner:
                        e = int32(pieces.begin + z + (pieces.inner if z >= pieces.before else int32(0)))
                        out.data[uint64(run + e)] = staged.shared[uint64(first + channel * staged.pitch + e)]
                        z = int32(z + vector)
                end = int32(end + 32)
        return Vectors(size, source, target)

    return whole_vectors


def lanes_of(config: Config) -> tuple[int, int]:
    """Lanes that write a run, and vectors of each."""
    tile = config.tile
    vectors = (tile.advance * tile.span + tile.sector - 1) * tile.out_dtype.itemsize // 16
    lanes = min(32, 1 << (vectors - 1).bit_length())
    return lanes, -(-vectors // lanes)


def make_write_vectors(config: Config):
    tile, channels = config.tile, config.bulk_channels
    vector = 16 // tile.out_dtype.itemsize
    lanes, steps = lanes_of(config)
    all_steps = -(-channels // STORE_WARPS // (32 // lanes)) * steps
    load, whole_vectors = ld_shared(4, int32), make_whole_vectors(config)

    @device_function
    def vector_of(step, vectors, lane):
        """Whether the vector exists, its index in y, its value."""
        size, source, target = vectors
        owner = int32(step // steps * (32 // lanes) + lane // lanes)
        e = int32(step % steps * lanes + lane % lanes)
        exists = 16 * e < cuda.shfl_sync(0xFFFFFFFF, size, owner)
        at = int32(cuda.shfl_sync(0xFFFFFFFF, source, owner) + (16 * e if exists else 0))
        return exists, cuda.shfl_sync(0xFFFFFFFF, target, owner) + e * vector, load(at)

    @device_function
    def write_vectors(step, state):
        y, vectors, lane = state
        exists, index, value = vector_of(step, vectors, lane)
        st_global_vector(exists, y, index, value)

    @device_function
    def write_fours(step, state):
        y, vectors, lane = state
        a, b = vector_of(step, vectors, lane), vector_of(int32(step + 1), vectors, lane)
        c, d = vector_of(int32(step + 2), vectors, lane), vector_of(int32(step + 3), vectors, lane)
        st_global_vector(a[0], y, a[1], a[2])
        st_global_vector(b[0], y, b[1], b[2])
        st_global_vector(c[0], y, c[1], c[2])
        st_global_vector(d[0], y, d[1], d[2])

    @device_function
    def write(staged, out, thread):
        vectors = whole_vectors(staged, out, thread)
        cuda.syncwarp()
        step = int32(0)
        while step < all_steps // 4 * 4:
            write_fours(step, (out.data, vectors, thread.lane))
            step = int32(step + 4)
        while step < all_steps:
            write_vectors(step, (out.data, vectors, thread.lane))
            step = int32(step + 1)

    return write
