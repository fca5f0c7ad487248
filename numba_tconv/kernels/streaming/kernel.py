"""The kernel of a step by columns: weights as they lie and the frames of all slots (drawing: kernels/README.md).

Sums of SUM_CHANNELS input channels are added in the order of k2_polyphase, so steps give its bits on the whole signal,
whatever the frames, slots and mask."""

from functools import cache

from numba import cuda, int32, int64, types, uint32, uint64

from numba_tconv.kernels.common.arguments import arguments
from numba_tconv.kernels.rung import SUM_CHANNELS
from numba_tconv.ptx import device_function
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, flat

from .arguments import Sizes, signature_of
from .tile import Config

READS = 8  # frames of a thread in flight, or one of each slot if more


@device_function
def is_live(mask, n):
    """Whether slot ``n`` advances."""
    return not mask.exists or mask.data[n] != 0


def make_read(config: Config):
    """Build ``read``: copies a block's frames, converted, to shared memory ``frames`` (input channels, window, slots).

    Zeros follow the last frame."""
    element, threads, window = ELEMENTS[config.dtype], config.threads, config.window
    slots, kept, in_per_group = config.slots, config.kept, config.in_per_group
    load, storage, rows = element.load, element.storage, config.group_count * config.in_per_group * window
    rows_at_once = max(1, min(READS // slots, -(-rows // threads)))
    at_once = rows_at_once * slots

    @device_function
    def read(frames, x, state, first_channel, channels, first_slot, first_frame, sizes):
        values = cuda.local.array(at_once, dtype=storage)
        all_channels = sizes.groups * in_per_group
        of_state = (first_slot * all_channels + first_channel) * kept + first_frame
        of_x = first_slot * x.stride_n + first_channel * x.stride_c + (first_frame - kept) * x.stride_l
        old_frames = int32(max(int64(0), kept - first_frame))  # from the state
        end = int32(min(int64(window), sizes.frames - first_frame + kept))
        last_slots = int32(min(int64(slots), sizes.batch - first_slot))
        first_row = int32(cuda.threadIdx.x)
        while first_row < rows:
            for z in range(rows_at_once):  # all loads first
                c, f = divmod(int32(first_row + z * threads), int32(window))
                for s in range(slots):
                    values[z * slots + s] = storage(0)
                if c < channels and f < end:
                    if f < old_frames:
                        at = of_state + c * int64(kept) + f
                        for s in range(slots):
                            if s < last_slots:
                                values[z * slots + s] = state[uint64(at)]
                            at += all_channels * kept
                    else:
                        at = of_x + c * x.stride_c + f * x.stride_l
                        for s in range(slots):
                            if s < last_slots:
                                values[z * slots + s] = x.data[uint64(at)]
                            at += x.stride_n
            for z in range(rows_at_once):
                row = int32(first_row + z * threads)
                if row < rows:
                    first = uint64(row) * uint64(slots)
                    for s in range(slots):
                        frames[first + uint64(s)] = load(values[z * slots + s])
            first_row = int32(first_row + rows_at_once * threads)

    return read


def make_multiply(config: Config):
    """Build ``multiply``: sums a column over ``count`` input channels.

    Weights from ``offset`` of ``w`` on, frames from element ``at`` of shared memory on. ``now`` and ``after``:
    ``ahead`` weights each, multiplied and loaded."""
    element, ahead, all_sums = ELEMENTS[config.dtype], config.ahead, config.sums
    load, accumulator, pitch = element.load, element.accumulator, config.window * config.slots
    whole = config.in_per_group % SUM_CHANNELS % ahead == 0 and SUM_CHANNELS % ahead == 0

    @device_function
    def fetch(weights, w, offset, left):
        for z in range(ahead):
            if z < left:
                weights[z] = w.data[uint64(offset + z * w.stride_i)]

    @device_function
    def multiply(sums, now, after, frames, at, w, offset, count):
        for i in range(all_sums):
            sums[i] = accumulator(0)
        fetch(now, w, offset, count)
        c, first = int32(0), uint64(at)
        while c < count:
            offset += ahead * w.stride_i
            fetch(after, w, offset, int32(count - c - ahead))
            for z in range(ahead):
                # A channel that does not exist must not multiply: zero times NaN is NaN.
                if whole or c + z < count:
                    weight = load(now[z])
                    for i in range(all_sums):
                        sums[i] += weight * frames[first + uint64(z * pitch + i)]
            for z in range(ahead):
                now[z] = after[z]
            first += uint64(ahead * pitch)
            c = int32(c + ahead)

    return multiply


def make_keep(config: Config):
    """Build ``keep``: writes a block's part of the new state.

    One thread a row goes forward, so that it reads a frame before it overwrites it."""
    threads, slots, kept = config.threads, config.slots, config.kept
    in_per_group, most = config.in_per_group, config.group_count * config.in_per_group

    @device_function
    def keep(x, state, mask, first_channel, channels, first_slot, sizes):
        e = int32(cuda.threadIdx.x)
        while e < slots * most:
            s, c = divmod(e, int32(most))
            n, channel = first_slot + s, first_channel + c
            if n < sizes.batch and c < channels and is_live(mask, n):
                row = (n * sizes.groups * in_per_group + channel) * kept
                source = n * x.stride_n + channel * x.stride_c
                for f in range(kept):
                    t = f + sizes.frames
                    if t < kept:
                        state[uint64(row + f)] = state[uint64(row + t)]
                    else:
                        state[uint64(row + f)] = x.data[uint64(source + (t - kept) * x.stride_l)]
            e = int32(e + threads)

    return keep


@device_function
def draw(is_last, tickets, ticket, readers):
    """Note whether this block is the last of ``readers`` that have read the state, and reset the ticket."""
    is_last[0] = 1
    if readers > 1:
        cuda.threadfence()
        is_last[0] = 0
        if cuda.atomic.add(tickets, ticket, int32(1)) == readers - 1:
            tickets[ticket] = int32(0)
            is_last[0] = 1


@cache
def make_kernel(config: Config) -> Kernel:
    element, taps, threads = ELEMENTS[config.dtype], config.taps, config.threads
    load, store, accumulator, storage = element.load, element.store, element.accumulator, element.storage
    kernel_size, stride, dilation, gap, rows = taps.kernel_size, taps.stride, taps.dilation, taps.gap, taps.rows
    inverse, kept = taps.dilation_inverse, config.kept
    slots, frame_count, channels, group_count = config.slots, config.frames, config.channels, config.group_count
    lanes, parts, columns, all_sums, ahead = config.lanes, config.parts, config.columns, config.sums, config.ahead
    in_per_group, out_per_group = config.in_per_group, config.out_per_group
    window, window_size = config.window, config.window_size
    read, multiply, keep = make_read(config), make_multiply(config), make_keep(config)
    channel_tiles = -(-out_per_group // channels)

    def streaming_step(x, state, w, bias, mask, y, tickets, sizes):
        shared = cuda.shared.array(0, dtype=accumulator)
        is_last = cuda.shared.array(1, dtype=int32)
        sums = cuda.local.array(all_sums, dtype=accumulator)
        now = cuda.local.array(ahead, dtype=storage)
        after = cuda.local.array(ahead, dtype=storage)
        thread = int32(cuda.threadIdx.x)

        # Blocks that read the same weights are neighbours in the grid.
        rest, frame_tile = divmod(int64(cuda.blockIdx.x), sizes.frame_tiles)
        tile, slot_tile = divmod(rest, sizes.slot_tiles)
        group_tile, channel_tile = divmod(tile, int64(channel_tiles))
        first_group, first_out = group_tile * group_count, int32(channel_tile * channels)
        first_slot, first_frame = slot_tile * slots, frame_tile * frame_count
        groups = int32(min(int64(group_count), sizes.groups - first_group))
        first_in, in_channels = first_group * in_per_group, int32(groups * in_per_group)
        live = False
        for s in range(slots):
            if first_slot + s < sizes.batch and is_live(mask, first_slot + s):
                live = True

        if live:
            read(shared, x, state, first_in, in_channels, first_slot, first_frame, sizes)
        cuda.syncthreads()
        if kept and thread == 0:
            draw(is_last, tickets, group_tile * sizes.slot_tiles + slot_tile, sizes.readers)

        lane, column = divmod(thread, int32(columns))
        row, k = divmod(column, int32(kernel_size))
        group, out = divmod(row, int32(channels))
        if live and lane < lanes and group < groups and first_out + out < out_per_group:
            base = (first_group + group) * in_per_group * w.stride_i + (first_out + out) * w.stride_o + k * w.stride_k
            frame = int32(kept - k * int64(dilation) // stride)
            part = lane
            while part < parts:
                c = int32(part * SUM_CHANNELS)
                # Unsigned: ptxas takes a sign-extended product for a multiple of 16 bytes.
                at = uint32(((group * in_per_group + c) * window + frame) * slots)
                count = int32(min(SUM_CHANNELS, in_per_group - c))
                multiply(sums, now, after, shared, at, w, base + c * w.stride_i, count)
                for i in range(all_sums):
                    shared[uint32(window_size + (part * all_sums + i) * columns + column)] = sums[i]
                part = int32(part + lanes)
        cuda.syncthreads()

        out_length = sizes.frames * stride
        e = thread
        while e < slots * group_count * channels * frame_count * stride:
            row, u = divmod(e, int32(frame_count * stride))
            s, row = divmod(row, int32(group_count * channels))
            group, out = divmod(row, int32(channels))
            t, phase = divmod(u, int32(stride))
            n, o = first_slot + s, first_frame * stride + u
            if n < sizes.batch and group < groups and first_out + out < out_per_group and o < out_length:
                co = (first_group + group) * out_per_group + first_out + out
                total = accumulator(0)
                if is_live(mask, n):
                    total = load(bias.data[uint64(co)]) if bias.exists else accumulator(0)
                    k = int32(int64(phase) // gap * inverse % rows)
                    if phase % gap:
                        k = int32(kernel_size)
                    while k < kernel_size:
                        at = int32(window_size + (t * slots + s) * columns + row * kernel_size + k)
                        for _ in range(parts):
                            total += shared[uint32(at)]
                            at = int32(at + all_sums * columns)
                        k = int32(k + rows)
                y[uint64((n * sizes.groups * out_per_group + co) * out_length + o)] = store(total)
            e = int32(e + threads)

        if kept and is_last[0]:
            keep(x, state, mask, first_in, in_channels, first_slot, sizes)

    signature = signature_of(storage, flat(types.int32), arguments(Sizes))
    launch = dict(threads=threads, shared_bytes=config.shared_bytes, min_blocks=config.min_blocks)
    return Kernel("streaming_step", streaming_step, signature, **launch, key=repr(config))
