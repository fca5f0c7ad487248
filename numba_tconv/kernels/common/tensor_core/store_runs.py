"""The usual store: of a tile in one sample.

Nothing hides a branch or load: the code is straight-line, with predicates and several loads in flight."""

import torch
from numba import cuda, float32, int32, uint32, uint64

from numba_tconv.ptx import bits_of, device_function, ld_shared, pack_bf16, pack_f16, recomputed, st_global_if
from numba_tconv.runtime.elements import ELEMENTS

from .tile import Tile, staged_at

HELD = 16  # outputs between load and store


def outputs_at_once(quantum: int, itemsize: int) -> int:
    """Outputs of a lane's write."""
    return 16 // itemsize if quantum == 4 else 2 if quantum == 2 else 4 // itemsize


def channels_of_a_warp(tile: Tile, warps: int) -> int:
    return -(-tile.round_channels // warps)


def most_channels(tile: Tile) -> int:
    return 4 if tile.span * tile.out_dtype.itemsize == 2 else 2


def keeps_runs(tile: Tile, warps: int) -> bool:
    return channels_of_a_warp(tile, warps) <= most_channels(tile)


def runs_channels(tile: Tile, warps: int) -> int:
    return min(channels_of_a_warp(tile, warps), most_channels(tile))


def runs_loads(tile: Tile) -> int:
    return max(outputs_at_once(quantum, tile.out_dtype.itemsize) // quantum for quantum in (4, 2, 1))


def runs_sizes(tile: Tile, warps: int) -> tuple[int, int]:
    """Elements of ``runs.source``, and of the other arrays."""
    channels = runs_channels(tile, warps)
    return channels * runs_loads(tile), channels


def _all_channels(tile: Tile, warps: int) -> int:
    channels = runs_channels(tile, warps)
    return -(-channels_of_a_warp(tile, warps) // channels) * channels


def _some_channels(tile: Tile, warps: int) -> bool:
    """Whether a warp's last channel may pass the round."""
    return tile.round_channels % (warps * runs_channels(tile, warps)) != 0


def make_run_of(tile: Tile):
    """Build ``run_of``: a channel's run, first output and end, and its sector's outputs before the tile's own."""
    span, advance, sector = tile.span, tile.advance, tile.sector

    @device_function
    def run_of(run, extent, alignment):
        """``run``: index in y of the channel's own first output."""
        early = int32(int32(run + alignment.shift) & (sector - 1))
        end = int32(advance * span - (int32(early + advance * span) & (sector - 1)))
        low = int32(max(int32(-early), extent.lowest))
        high = int32(min(end if extent.goes_on else int32(advance * span), extent.highest))
        return low, high, early

    return run_of


def make_prepare(tile: Tile, warps: int):
    """Build ``prepare``: fills ``runs`` for a warp's channels from the ``z0``-th on."""
    span, overlap = tile.span, tile.overlap
    round_channels, pitch, skip, itemsize = tile.round_channels, tile.pitch, tile.skip, tile.out_dtype.itemsize
    channels, loads, some_channels = runs_channels(tile, warps), runs_loads(tile), _some_channels(tile, warps)
    at_once, slot_of, run_of = device_function(outputs_at_once), device_function(staged_at), make_run_of(tile)

    @device_function
    def prepare(runs, z0, out, staging, place, thread):
        target, source, done, size = runs.target, runs.source, runs.done, runs.size
        quantum, to_staged = int32(out.alignment.quantum), int32(out.alignment.offset + overlap * span)
        width = int32(at_once(quantum, itemsize))
        for z in range(channels):
            channel = int32(thread.warp + (z0 + z) * warps)
            exists = channel < place.channels_left and (not some_channels or channel < round_channels)
            run = place.head + (z0 + z) * (warps * out.length)
            low, high, early = run_of(run, place.extent, out.alignment)
            size[z] = int32(max(int32(high - low), int32(0))) if exists else int32(0)
            e = int32(thread.lane * width - early)
            done[z], target[z] = int32(e - low), run + e
            for q in range(loads):
                u = int32(e + to_staged + q * quantum)
                source[z * loads + q] = int32(staging.base + (staging.at + channel * pitch + slot_of(u, skip)) * 4)

    return prepare


def make_load_biases(tile: Tile, warps: int, add_bias: bool = False):
    """Build the load of biases, or zeros."""
    load_type, add_bias = ELEMENTS[tile.dtype].load, add_bias or tile.has_gaps
    all_channels, some_channels = _all_channels(tile, warps), _some_channels(tile, warps)
    round_channels = tile.round_channels

    @device_function
    def load_biases(biases, out, place, warp):
        for z in range(all_channels):
            biases[z] = float32(0)
        if add_bias and out.has_bias:
            for z in range(all_channels):
                channel = int32(warp + z * warps)
                exists = channel < place.channels_left and (not some_channels or channel < round_channels)
                biases[z] = load_type(out.bias[uint64(place.channel + channel if exists else 0)])

    return load_biases


def make_store_runs(tile: Tile, warps: int, quantum: int, prepare, load_biases):
    """Build the store of a round; ``quantum`` outputs are loaded together."""
    span, advance, sector = tile.span, tile.advance, tile.sector
    round_channels, skip = tile.round_channels, tile.skip
    itemsize = tile.out_dtype.itemsize
    halves = itemsize == 2
    narrow = pack_f16 if tile.dtype == torch.float16 else pack_bf16
    width, all_loads = outputs_at_once(quantum, itemsize), runs_loads(tile)
    loads, words = width // quantum, width * itemsize // 4
    load, write = ld_shared(quantum, float32), st_global_if(words)
    step, step_bytes = 32 * width, (32 + skip) * width * 4
    channels, kept, all_channels = runs_channels(tile, warps), keeps_runs(tile, warps), _all_channels(tile, warps)
    all_steps = -(-(advance * span + sector - 1) // step)
    turns = -(-all_steps // max(1, HELD // (width * channels)))
    steps = -(-all_steps // turns)
    all_held = channels * steps * width

    @device_function
    def store_some(runs, z0, y, staging, biases):
        target, source, done, size = runs.target, runs.source, runs.done, runs.size
        held = cuda.local.array(all_held, dtype=float32)
        output = cuda.local.array(4, dtype=int32)
        turn = int32(0)
        while turn < turns:
            for z in range(channels):
                for h in range(steps):
                    wanted = uint32(done[z] + (turn * steps + h) * step) < uint32(size[z])
                    for q in range(loads):
                        # A predicated load keeps the old value alive.
                        from_run = int32(source[z * all_loads + q] + (turn * steps + h) * step_bytes)
                        outputs = load(from_run if wanted else int32(staging.base + staging.at * 4))
                        first_held = ((z * steps + h) * loads + q) * quantum
                        if quantum == 1:
                            held[first_held] = outputs
                        else:
                            for k in range(quantum):
                                held[first_held + k] = outputs[k]
            for z in range(channels):
                for h in range(steps):
                    for k in range(words):
                        w = (z * steps + h) * width + k * (width // words)
                        if halves:
                            output[k] = narrow(held[w] + biases[z0 + z], held[w + 1] + biases[z0 + z])
                        else:
                            output[k] = bits_of(held[w] + biases[z0 + z])
                    before = int32((turn * steps + h) * step)
                    write(uint32(done[z] + before) < uint32(size[z]), y, target[z] + before, output)
            turn = int32(turn + 1)
            if turns > 1:  # otherwise turns overlap, and registers run out
                turn = recomputed(turn)

    @device_function
    def store_runs(runs, out, staging, place, thread):
        """Write a round; return the next Place.head."""
        biases = cuda.local.array(all_channels, dtype=float32)
        load_biases(biases, out, place, thread.warp)
        if kept:
            store_some(runs, 0, out.data, staging, biases)
            for z in range(channels):
                runs.target[z] += round_channels * out.length
        else:
            for z0 in range(0, all_channels, channels):
                prepare(runs, int32(z0), out, staging, place, thread)
                store_some(runs, z0, out.data, staging, biases)
        return place.head + round_channels * out.length

    return store_runs
