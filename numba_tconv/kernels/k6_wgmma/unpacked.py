"""Unpacked weights: producer warps bring w (C_in, C_out/groups, K) as it lies, and order each stage for wgmma.

A tile's weights of a channel are one run. No packing reads and writes them, but each pair of tiles orders them anew."""

from dataclasses import replace

from numba import cuda, int32, int64

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_map import ALIGNMENT
from numba_tconv.ptx import (
    cp_async_bulk,
    device_function,
    fence_async,
    float_of,
    ld_shared,
    mbarrier_arrive,
    prmt,
    round_tf32,
    st_shared,
)
from numba_tconv.runtime.layout import Layout

from .tile import Config, deepest

VECTOR = 16  # bytes: neighbouring channels of a row
TOGETHER = 4  # vectors in flight, a lane
LOWER, UPPER = 0x5410, 0x7632  # prmt's selectors
LANES = 32


def with_unpacked(problem: Problem, config: Config) -> Config | None:
    """``config`` with unpacked weights; None unless tiles take whole runs, lanes equal shares."""
    tile, p = config.tile, problem
    if config.resident or tile.operand_halves > 1 or not tile.whole or p.kernel_size != tile.tap_chunk * tile.stride:
        return None
    if p.dilation > 1 or p.out_channels_per_group % tile.channels or tile.channels * tile.phases != tile.rows:
        return None
    if p.in_channels_per_group % (config.unroll * tile.depth) or tile.stride * tile.itemsize % 4:
        return None
    if LANES % (p.kernel_size * tile.itemsize // 4) or run_of(config) * tile.itemsize % (4 * LANES):
        return None
    return deepest(replace(config, unpacked=True))


def lies_well(weights: Layout) -> bool:
    """Whether the copy engine takes the runs."""
    return weights.is_contiguous and weights.offset % ALIGNMENT == 0


def run_of(config: Config) -> int:
    """Elements of a tile's weights of one input channel."""
    return config.tile.channels * config.tile.tap_chunk * config.tile.stride


def make_bring(config: Config):
    """Build ``bring``: lanes copy a stage's runs, the first from ``w[first:]``."""
    depth, run = config.depth, run_of(config)
    run_bytes = run * config.tile.itemsize

    @device_function
    def bring(lane, address, w, first, group_tiles, barrier):
        if lane < depth:
            at = first + int64(lane) * (int64(group_tiles) * run)
            cp_async_bulk(address + lane * run_bytes, w, at, run_bytes, barrier)

    return bring


def make_order(config: Config):
    """Build ``order``: a warp brings the stage at ``raw`` into pack.py's order at ``address``, then it is ``ready``.

    Against bank conflicts, lanes read neighbouring weights and write neighbouring rows."""
    tile, itemsize, run = config.tile, config.tile.itemsize, run_of(config)
    taps, stride, wide = tile.tap_chunk, tile.stride, itemsize == 4
    channels, step = VECTOR // itemsize, 4 // itemsize  # of a vector, of a word
    words, tap_words, parts = taps * stride // step, stride // step, tile.depth // channels
    part_bytes, tap_bytes = channels * run * itemsize, tile.rows * VECTOR
    rounds, round_bytes = run // step // LANES, LANES // words * stride * VECTOR
    together = next(count for count in (TOGETHER * itemsize // 4, 1) if rounds % count == 0)
    all_parts, all_words, load = config.depths * parts, together * channels, ld_shared(1, int32)

    @device_function
    def store_single(v, z, at):
        st_shared(at, round_tf32(float_of(v[z])), round_tf32(float_of(v[z + 1])),
                  round_tf32(float_of(v[z + 2])), round_tf32(float_of(v[z + 3])))  # fmt: skip

    @device_function
    def store_pair(v, z, at):
        st_shared(at, float_of(prmt(v[z], v[z + 1], LOWER)), float_of(prmt(v[z + 2], v[z + 3], LOWER)),
                  float_of(prmt(v[z + 4], v[z + 5], LOWER)), float_of(prmt(v[z + 6], v[z + 7], LOWER)))  # fmt: skip
        st_shared(at + VECTOR, float_of(prmt(v[z], v[z + 1], UPPER)), float_of(prmt(v[z + 2], v[z + 3], UPPER)),
                  float_of(prmt(v[z + 4], v[z + 5], UPPER)), float_of(prmt(v[z + 6], v[z + 7], UPPER)))  # fmt: skip

    store = store_single if wide else store_pair

    @device_function
    def order(lane, raw, address, ready):
        v = cuda.local.array(all_words, dtype=int32)
        channel, word = lane // words, lane % words
        tap, in_tap = word // tap_words, word % tap_words
        source = int32(raw + lane * 4)
        target = int32(address + tap * (parts * tap_bytes) + (channel * stride + in_tap * step) * VECTOR)
        for part in range(all_parts):
            own = int32(target + part // parts * (taps * parts * tap_bytes) + part % parts * tap_bytes)
            for round in range(0, rounds, together):
                for u in range(together):
                    for q in range(channels):
                        v[u * channels + q] = load(source + (round + u) * (4 * LANES) + q * (run * itemsize))
                for u in range(together):
                    store(v, u * channels, own + (round + u) * round_bytes)
            source = int32(source + part_bytes)
        fence_async()  # wgmma reads, and the copy engine writes here next
        mbarrier_arrive(ready)

    return order
