"""k6: a warp-specialised, persistent wgmma kernel.

    x, w --TMA--> ring of stages in shared memory --window--> registers --wgmma--> sums --staging--> y
          producers (4 warps)                      consumers (2 x 128 threads)

* schedule.py, producer.py, boxes.py: fill the ring, by boxes or, where samples share a window, by rows.
* unpacked.py: producers order weights that no kernel has packed.
* operands.py, mainloop.py: a lane's window of four columns serves all taps.
* epilogue/: stages sums and writes aligned runs.
* input.py copies what no tensor map describes. tail.py computes a lone last column.

*Ping-pong* (resident weights): warpgroups take alternate tiles. *Cooperative* (streamed weights or tf32x3): they
take neighbouring tiles from the same stages.

Measured (H200, kb64, tf32): 1.28 ms, 1.5 times k5."""

from functools import cache

import torch
from numba import cuda, float32, int32, int64, uint32, uint64

from numba_tconv.kernels.common import split_sums
from numba_tconv.kernels.common.packed_weights import packed_weights
from numba_tconv.kernels.common.pipeline import FULL, Pipe, Slot, init_stage, release
from numba_tconv.kernels.common.rows import make_kernel as row_copy
from numba_tconv.kernels.common.tensor_core.fragments import column_of
from numba_tconv.kernels.common.tensor_core.outputs import Output, Runs, Thread
from numba_tconv.kernels.common.tensor_core.rung import TensorRung, default_precision
from numba_tconv.kernels.common.tensor_core.split_operand import scales_of
from numba_tconv.kernels.common.tensor_core.tile import COLUMNS, SECTOR
from numba_tconv.kernels.common.tensor_map import MAP_BYTES, publish
from numba_tconv.kernels.rung import Step, taking_bias
from numba_tconv.ptx import (
    barrier_sync,
    cp_async_bulk,
    device_function,
    fence_mbarrier_init,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    opaque,
    recomputed,
    setmaxnreg,
    shared_address,
    tensormap_acquire,
    wgmma_descriptor,
    wgmma_wait,
)
from numba_tconv.runtime.device import H200
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel
from numba_tconv.runtime.layout import room

from .arguments import (
    Buffers,
    Chunk,
    Fetch,
    Grid,
    Input,
    Lane,
    Leaving,
    Rows,
    Split,
    Sums,
    Tile,
    Turn,
    View,
    Window,
    signature_of,
)
from .boxes import place as byte_of
from .choose import choose, choose_packed, cost
from .epilogue import make_epilogue, make_extra_of, runs_of, slab_of
from .input import is_copied
from .mainloop import make_mainloop
from .operands import lane_rows_of, make_view
from .plan import plan_of
from .producer import make_produce
from .schedule import make_follow, make_locate
from .tail import make_kernel as tail_kernel
from .tile import BLOCKS, CONSUMERS, PRODUCERS, REGISTERS, THREADS, Config, configs, sample_columns
from .unpacked import lies_well

BULK = 1 << 15  # most bytes of a bulk copy
SHARED_WINDOW, MOST_SLOWDOWN = 6, 3.0  # taps that last as long as a shared window; at most
MOST_FILLED = 1.1  # columns with padding, over a signal's own, that joining cannot better
# k5 is faster below both.
FEWEST_ROWS, FEWEST_TURNS = 64, 3


def _make_rows_of(config: Config):
    phases, channels, row_parts = config.tile.phases, config.tile.channels, config.tile.row_parts

    @device_function
    def rows_of(row_tile, group_tiles, out_per_group):
        group = int32(uint32(row_tile) // uint32(group_tiles))
        group_tile = int32(row_tile - group * group_tiles)
        channel = int64(group_tile // row_parts * channels)
        left = int32(min(int64(channels), out_per_group - channel))
        return Rows(int32(group_tile % row_parts * phases), group * out_per_group + channel, left)

    return rows_of


@cache
def make_kernel(config: Config) -> Kernel:
    tile, most_stages, resident, paired = config.tile, config.stages, config.resident, config.paired
    unroll, depths = config.unroll, config.depths
    rows, parts, depth = tile.rows, tile.parts, tile.depth
    halo, window, phases, channels, all_taps = tile.halo, 4 + tile.halo, tile.phases, tile.channels, tile.tap_chunk
    itemsize, lead = tile.itemsize, tile.lead
    regions, map_at, ready_at = config.regions, config.map, config.ready
    lane_channels, lane_rows = 4 // itemsize, lane_rows_of(tile)
    all_weights, ring_at, staging_at, barriers_at = config.weights, config.ring, config.staging, config.barriers
    empty_slots, all_staging = tile.empty_slots, config.staging_bytes // 4
    own_staging, extras_at, own_extras = config.own_staging, config.extras_at, config.extras
    block_sums, operands = rows // 2, parts * 2 * window
    all_sums, all_operands = BLOCKS * block_sums, unroll * operands
    ahead, makes_ready = config.split_ahead, config.makes_ready
    exact = parts == 2
    all_totals = all_sums if exact else 1
    storage = ELEMENTS[tile.dtype].storage
    wait_for_all = wgmma_wait(0)
    grow, shrink = setmaxnreg(REGISTERS[0], True), setmaxnreg(REGISTERS[1], False)
    produce, mainloop, view_of = make_produce(config), make_mainloop(config), make_view(config)
    turns, _ = make_locate(config)
    turns_on = 1 if paired else CONSUMERS
    first_tile, tile_after = make_follow(config, turns_on)
    # Locating the next tile early pays only with one phase.
    keeps_rows, looks_ahead = resident and not exact, not exact and phases == 1
    epilogue = make_epilogue(config)
    aim_tile, store_tile, finish = epilogue.aim, epilogue.store, epilogue.finish
    # Runs leave during three quarters of the next tile.
    steps_for_runs = 4 * unroll * -(-channels // 4)
    extra_of, slab, (run_loads, run_channels) = make_extra_of(config), slab_of(config), runs_of(config)
    rows_of = _make_rows_of(config)
    column_of_lane, descriptor_of = (device_function(f) for f in (column_of, wgmma_descriptor))

    def k6_wgmma(tensor_map, x, weights, y, channels, columns, grid, alignment):
        shared = cuda.shared.array(0, dtype=float32)
        as_stored = cuda.shared.array(0, dtype=storage)
        base = shared_address(shared, 0)
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(cuda.shfl_sync(0xFFFFFFFF, thread >> 5, 0))
        out_channels = channels.out_per_group * channels.groups
        grid = Grid(grid.tap_chunks, grid.last_taps, grid.channel_chunks, int32(grid.group_tiles),
                    int32(grid.row_tiles), int32(grid.column_tiles), int32(grid.band))  # fmt: skip
        fetch = Fetch(x.fetch.boxed != 0, x.fetch.aligned != 0, x.fetch.whole_tiles != 0, x.fetch.in_vectors != 0)
        window = Window(int32(x.window.alike_log), int32(x.window.pitch), int32(x.window.shear),
                        int32(x.window.region), int32(x.window.slot), int32(x.window.stages))  # fmt: skip
        x = Input(x.data, x.address, x.stride_n, x.stride_c, x.early, window, fetch, x.samples)
        full, empty = int32(base + barriers_at), int32(base + barriers_at + 8 * most_stages)
        weights_full, product_turn = int32(empty + 8 * most_stages), int32(empty + 8 * most_stages + 8)
        staging_turn = int32(product_turn + 8 * CONSUMERS)
        ready = int32(base + ready_at) if makes_ready else full
        inverses = int32(ready + 8 * most_stages)
        copied, read = Pipe(full, empty, window.stages), Pipe(ready, empty, window.stages)
        if thread == 0:
            for stage in range(most_stages):
                init_stage(copied, stage, 1, 128 * CONSUMERS if paired else 128)
                if makes_ready:
                    mbarrier_init(ready + 8 * stage, 32)
            mbarrier_init(weights_full, 1)
            for s in range(CONSUMERS):
                mbarrier_init(product_turn + 8 * s, 4)
                mbarrier_init(staging_turn + 8 * s, 128)
            fence_mbarrier_init()
        if empty_slots:
            e = int32(thread)
            while e < all_staging:
                shared[uint64(staging_at // 4 + e)] = float32(0)
                e = int32(e + THREADS)
        cuda.syncthreads()

        if warp >= CONSUMERS * 4:
            shrink()
            x_map = tensor_map.room + int64(cuda.blockIdx.x) * MAP_BYTES
            if warp == CONSUMERS * 4 and fetch.boxed:
                publish(tensor_map.template, x.address - x.early * itemsize, x_map, base + map_at, lane)
            griddepcontrol_wait()  # for packed weights
            griddepcontrol_launch_dependents()
            if resident and thread == CONSUMERS * 128:
                mbarrier_arrive_expect_tx(weights_full, all_weights)
                at = int64(int32(cuda.blockIdx.x) % grid.row_tiles) * (all_weights // itemsize)
                for b in range(0, all_weights, BULK):
                    cp_async_bulk(
                        base + b, weights.packed, at + b // itemsize, min(BULK, all_weights - b), weights_full
                    )
            barrier_sync(CONSUMERS + 1, PRODUCERS * 32)
            if fetch.boxed and lane == 0:
                tensormap_acquire(x_map)
            packed = weights.packed
            scales = scales_of(packed[uint64(packed.shape[0] - 1)]) if ahead else (int32(0), int32(0))
            produce(lane, int32(warp - CONSUMERS * 4), x, x_map, weights.packed, grid, channels.in_per_group, copied,
                    base, as_stored, Split(ready, inverses, scales))  # fmt: skip
        else:
            grow()
            griddepcontrol_wait()
            griddepcontrol_launch_dependents()  # after the wait: it may read packed weights
            group_warp, crew = int32(warp & 3), int32(warp >> 2)
            other = int32(1 - crew)
            acc = cuda.local.array(all_sums, dtype=float32)
            total = cuda.local.array(all_totals, dtype=float32)
            values = cuda.local.array(slab, dtype=float32)
            held, target = cuda.local.array(3, dtype=int32), cuda.local.array(1, dtype=int64)
            for z in range(3):
                held[z] = int32(0)
            target[0] = int64(0)
            v = cuda.local.array(all_operands, dtype=int32)
            runs = Runs(
                cuda.local.array(run_channels, dtype=int64),
                cuda.local.array(run_loads, dtype=int32),
                cuda.local.array(run_channels, dtype=int32),
                cuda.local.array(run_channels, dtype=int32),
            )
            column = column_of_lane(group_warp, lane, 0, 0)
            x_at = int32(base + ring_at + (lead - halo + column) * itemsize)
            lane_channel = int32((lane & 3) * lane_channels)
            x_at = int32(x_at + byte_of(lane_channel, window.alike_log, window.pitch, window.shear))
            h_step, odd_step = int32(depth // lane_rows * window.pitch), int32(window.pitch + window.shear)
            if paired:
                x_at = int32(x_at + crew * window.region)
            weights_at = int32(0 if resident else ring_at + regions * window.region)
            # Opaque: else recomputed for each stage.
            descriptor0 = recomputed(int32(descriptor_of(base + weights_at, rows * 16, 0)))
            staging, extras = int32(staging_at + crew * own_staging), int32(extras_at + crew * own_extras)
            if resident:
                mbarrier_wait(weights_full, 0)
            for z in range(all_sums):
                acc[z] = opaque(float32(0))
            packed = weights.packed
            scales = scales_of(packed[uint64(packed.shape[0] - 1)]) if exact else (int32(0), int32(0))
            if ahead:
                scales = int32(inverses + 4 * crew), int32(0)
            tap_chunks, channel_chunks = int32(grid.tap_chunks), int32(grid.channel_chunks)
            per_tile = int32(tap_chunks * channel_chunks)
            interval = int32(max(int32(int32(per_tile * 3) // steps_for_runs), int32(1)))
            per_tile = int32(per_tile // depths)
            sums, leaving = Sums(acc, total, values, runs), Leaving(held, target, interval, y.data)
            out = Output(y.data, weights.bias, weights.has_bias, y.batch, columns.per_sample, columns.first,
                         out_channels, y.length, columns.padding, alignment)  # fmt: skip
            me, windows = Thread(crew, group_warp, lane), Lane(h_step, odd_step, window.slot, descriptor0, scales)
            stage, parity, my_turn = int32(0), int32(FULL), int32(1 - crew)
            turn, count = int32(0), turns(grid)
            if not paired:
                turn = int32(crew)
                stage = int32(crew * per_tile)
            own, in_columns = crew if paired else int32(0), x.samples.columns
            (row_tile, n, j), step = first_tile(turn, grid, own, in_columns)
            if keeps_rows:
                rows_now = rows_of(row_tile, grid.group_tiles, channels.out_per_group)
            # ``known``: ``view`` holds for the next tile.
            view, known = View(x_at, False, False, int32(0), int32(4)), False
            while turn < count:
                while stage >= window.stages:
                    stage, parity = int32(stage - window.stages), int32(parity ^ 1)
                if not keeps_rows and not exact:
                    rows_now = rows_of(row_tile, grid.group_tiles, channels.out_per_group)
                if exact:
                    for z in range(all_sums):
                        total[z] = float32(0)
                descriptor, add = descriptor0, int32(0)
                tap_chunk = int32(0)
                while tap_chunk < tap_chunks:
                    if not known:
                        view = view_of(n, j, tap_chunk, x, column, x_at)
                    known = False
                    taps = int32(grid.last_taps if tap_chunk == tap_chunks - 1 else all_taps)
                    chunk = Chunk(add, taps, channel_chunks)
                    stage, parity, descriptor = mainloop(sums, v, read, Slot(stage, parity), view, windows, chunk,
                                                         descriptor, leaving,
                                                         Turn(product_turn + 8 * crew, my_turn))  # fmt: skip
                    add = int32(1)
                    tap_chunk = int32(tap_chunk + 1)
                if not paired and lane == 0:
                    mbarrier_arrive(product_turn + 8 * other)
                if exact:
                    rows_now = rows_of(row_tile, grid.group_tiles, channels.out_per_group)
                extra = extra_of(out, rows_now.channel, rows_now.channels_left, int32(thread & 127))
                place, straight = aim_tile(n, j, rows_now.first, rows_now.channel, rows_now.channels_left, out, me)
                turn = int32(turn + turns_on)
                next_n, next_j = n, j
                if looks_ahead and turn < count:
                    row_tile, next_n, next_j = tile_after(turn, Tile(row_tile, n, j), step, grid, own, in_columns)
                    view, known = view_of(next_n, next_j, int32(0), x, column, x_at), True
                wait_for_all()
                if not resident and unroll > 1:
                    release(read, stage - 1 if stage > 0 else window.stages - 1)

                buffers = Buffers(shared, as_stored, base, staging, extras, staging_turn, my_turn)
                store_tile(sums, leaving, buffers, out, place, straight, extra, me)
                my_turn = int32(my_turn ^ 1)
                n, j = next_n, next_j
                if not looks_ahead and turn < count:
                    row_tile, n, j = tile_after(turn, Tile(row_tile, n, j), step, grid, own, in_columns)
                if not paired:
                    stage = int32(stage + (CONSUMERS - 1) * per_tile)
            finish(leaving, crew)

    return Kernel("k6_wgmma", k6_wgmma, signature_of(config), THREADS, config.shared_bytes, key=repr(config))


class WarpgroupMatrix(TensorRung):
    name = "k6_wgmma"
    order = "wgmma"
    exact_cc = (9, 0)
    idea = "Hopper's wgmma, fed through a ring of stages by warps that only copy; aligned runs of outputs"

    choose, make_kernel = staticmethod(choose), staticmethod(make_kernel)

    def unsuited(self, problem, dtype, precision, device):
        tile = configs(problem, precision)[0].tile
        fewest, stages = FEWEST_ROWS // tile.parts, tile.tap_chunks(problem) * tile.channel_chunks(problem)
        if tile.rows < fewest and stages < FEWEST_TURNS:
            return (
                f"it is for tiles of at least {fewest} rows (output channels times phases), not {tile.rows}, or of "
                f"{FEWEST_TURNS} stages (input channels times taps), not {stages}"
            )
        return None

    def kernel(self, config):
        return make_kernel(config.compiled)

    def steps(self, config, problem, device=H200):
        copies = [Step("copy", row_copy(config.tile.dtype))] if is_copied(problem, config) else []
        tail = [Step("tail", tail_kernel(config.tile, config.unpacked))] if config.tail else []
        sums = split_sums.steps(config.splits, config.tile.dtype, early=True)
        if not config.unpacked:
            return [*copies, *super().steps(config, problem, device), *tail, *sums]
        main = Step("main", self.kernel(config), self.shared_bytes(problem, config))
        of_packed = self.steps(choose_packed(problem, config.tile.precision), problem, device)
        return [*copies, main, *tail, *sums, *(step._replace(name="frozen") for step in of_packed)]

    def tile(self, config):
        c, tiles = config, "pairs of tiles" if config.paired else "tiles in turn"
        weights = "resident" if c.resident else "streamed as they lie" if c.unpacked else "streamed"
        stores = "in bulk by the copy engine" if c.bulk_channels and not c.by_lanes else "by the warps' stores"
        joined = "; samples joined beforehand" if c.joined else ""
        tail = "; a sample's last column apart, on CUDA cores" if c.tail else ""
        parts = "" if c.splits == 1 else f"; input channels in {c.splits} parts, whose sums are added up"
        return (
            f"{tiles}, of {c.tile.rows} rows by {COLUMNS} columns; {c.stages} stages of {c.depth} input channels; "
            f"weights {weights}; outputs leave {stores}{joined}{parts}{tail}"
        )

    def predicted_ms(self, problem, config, device):
        return cost(problem, config, device)

    def slowdown(self, problem, config):
        """Windows that signals share are filled row by row, in the time of SHARED_WINDOW taps."""
        p = split_sums.split(problem, config.splits)
        columns, needed = sample_columns(p, config)[1], config.tile.columns(p)[1]
        if config.joined or columns % config.tile.advance == 0:
            # A window scales split operands: quiet signals alone keep digits.
            return 1.0 if columns > MOST_FILLED * needed and config.tile.parts == 1 else None
        return max(1.0, min(MOST_SLOWDOWN, SHARED_WINDOW / p.taps.taps_per_row))

    def prepare(self, x, w, bias, y, problem, config=None, precision=None):
        precision = precision or default_precision(x.dtype)
        config = config or choose(problem, precision)
        if not config.unpacked:
            return self._prepare(x, w, bias, y, problem, config)
        of_packed = cache(lambda: self._prepare(x, w, bias, y, problem, choose_packed(problem, precision)))
        if not lies_well(w):
            return of_packed()
        of_unpacked = self._prepare(x, w, bias, y, problem, config)

        def either(x, w, bias, y):
            (of_packed() if hasattr(w, "packings") else of_unpacked)(x, w, bias, y)  # frozen weights are packed

        return either

    def _prepare(self, x, w, bias, y, problem, config):
        plan = plan_of(make_kernel, problem, config, x, w, bias is not None, y.offset % SECTOR)
        packing, launch, tail, copy, second = plan.packing, plan.launch, plan.tail, plan.copy, plan.second
        maps_room, ordinary = room((plan.map_bytes,), torch.uint8, x.index), launch.ordinary

        def fill(x, w, bias, y):
            # The launch writes maps before packing ends: packing must not read that memory.
            maps = maps_room()
            packed, now = packed_weights(w, packing) if packing else (w, False)
            (launch if now else ordinary)(maps, x, x.data_ptr(), packed, bias, y)
            if tail:
                tail(x, packed, bias, y)

        def fill_from_copy(x, w, bias, y):
            fill(copy(x), w, bias, y)

        fill_whole = fill_from_copy if copy else fill
        return taking_bias(second.after(fill_whole, x.index) if second else fill_whole, bias)
