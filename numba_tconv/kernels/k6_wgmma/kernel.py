"""k6: a warp-specialised, persistent wgmma kernel.

    x, w --TMA--> ring of stages in shared memory --window--> registers --wgmma--> sums --staging--> y
          producers (4 warps)                      consumers (2 x 128 threads)

* schedule.py, producer.py, windows.py: fill the ring, by boxes.py or, where samples share a window, fill.py.
* unpacked.py: producers order weights that no kernel has packed.
* consumer.py, operands.py, mainloop.py: a lane's window serves all taps.
* epilogue/: stages sums and writes aligned runs.
* input.py copies what no tensor map describes. tail.py computes a lone last column.

*Ping-pong* (resident weights): warpgroups take alternate tiles. *Cooperative* (streamed weights or tf32x3): they
take neighbouring tiles from the same stages.

Measured (H200, kb64, tf32): 1.28 ms, 1.5 times k5."""

from functools import cache

import torch
from numba import cuda, float32, int32, int64, uint64

from numba_tconv.kernels.common import split_sums
from numba_tconv.kernels.common.packed_weights import packed_weights
from numba_tconv.kernels.common.rows import make_kernel as row_copy
from numba_tconv.kernels.common.tensor_core.outputs import Output, Thread
from numba_tconv.kernels.common.tensor_core.rung import TensorRung, default_precision
from numba_tconv.kernels.common.tensor_core.split_operand import scales_of
from numba_tconv.kernels.common.tensor_core.tile import COLUMNS, SECTOR
from numba_tconv.kernels.common.tensor_map import MAP_BYTES, publish
from numba_tconv.kernels.rung import Step, taking_bias
from numba_tconv.ptx import (
    barrier_sync,
    cp_async_bulk,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    mbarrier_arrive_expect_tx,
    setmaxnreg,
    shared_address,
    tensormap_acquire,
)
from numba_tconv.runtime.device import H200
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel
from numba_tconv.runtime.layout import room

from .arguments import Shared, Split, narrow_grid, narrow_input, signature_of
from .barriers import make_barriers
from .choose import choose, choose_packed, cost
from .consumer import make_consume
from .input import is_copied
from .plan import plan_of
from .producer import make_produce
from .schedule import make_schedule
from .tail import make_kernel as tail_kernel
from .tile import CONSUMERS, PRODUCERS, REGISTERS, THREADS, Config, configs, sample_columns
from .unpacked import lies_well

BULK = 1 << 15  # most bytes of a bulk copy
SHARED_WINDOW, MOST_SLOWDOWN = 6, 3.0  # taps that last as long as a shared window; at most
MOST_FILLED = 1.1  # columns with padding, over a signal's own, that joining cannot better
# k5 is faster below both.
FEWEST_ROWS, FEWEST_DEPTHS = 64, 3


@cache
def make_kernel(config: Config) -> Kernel:
    itemsize, storage = config.tile.itemsize, ELEMENTS[config.tile.dtype].storage
    weights_bytes, map_at, staging_at, resident = config.weights, config.map, config.staging // 4, config.resident
    has_gaps, all_staging, ahead = config.tile.has_gaps, config.staging_bytes // 4, config.split_ahead
    (barriers_of, init_barriers), schedule = make_barriers(config), make_schedule(config)
    produce, consume = make_produce(config, schedule), make_consume(config, schedule)
    grow, shrink = setmaxnreg(REGISTERS[0], True), setmaxnreg(REGISTERS[1], False)

    def k6_wgmma(tensor_map, x, weights, y, channels, columns, grid, alignment):
        words, elements = cuda.shared.array(0, dtype=float32), cuda.shared.array(0, dtype=storage)
        base = shared_address(words, 0)
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(cuda.shfl_sync(0xFFFFFFFF, thread >> 5, 0))
        out_channels = channels.out_per_group * channels.groups
        grid, x, shared = narrow_grid(grid), narrow_input(x), Shared(words, elements, base)
        barriers = barriers_of(base, x.window.stages)
        if thread == 0:
            init_barriers(barriers)
        if has_gaps:
            e = int32(thread)
            while e < all_staging:
                words[uint64(staging_at + e)] = float32(0)
                e = int32(e + THREADS)
        cuda.syncthreads()

        if warp >= CONSUMERS * 4:
            shrink()
            x_map = tensor_map.room + int64(cuda.blockIdx.x) * MAP_BYTES
            if warp == CONSUMERS * 4 and x.fetch.boxed:
                publish(tensor_map.template, x.address - x.early * itemsize, x_map, base + map_at, lane)
            griddepcontrol_wait()  # for packed weights
            griddepcontrol_launch_dependents()
            if resident and thread == CONSUMERS * 128:
                mbarrier_arrive_expect_tx(barriers.weights, weights_bytes)
                at = int64(int32(cuda.blockIdx.x) % grid.row_tiles) * (weights_bytes // itemsize)
                for b in range(0, weights_bytes, BULK):
                    cp_async_bulk(base + b, weights.packed, at + b // itemsize, min(BULK, weights_bytes - b),
                                  barriers.weights)  # fmt: skip
            barrier_sync(CONSUMERS + 1, PRODUCERS * 32)
            if x.fetch.boxed and lane == 0:
                tensormap_acquire(x_map)
            packed = weights.packed
            scales = scales_of(packed[uint64(packed.shape[0] - 1)]) if ahead else (int32(0), int32(0))
            produce(lane, int32(warp - CONSUMERS * 4), x, x_map, weights.packed, grid, channels.in_per_group,
                    barriers.copied, shared, Split(barriers.ready.full, barriers.inverses, scales))  # fmt: skip
        else:
            grow()
            griddepcontrol_wait()
            griddepcontrol_launch_dependents()  # after the wait: it may read packed weights
            me = Thread(int32(warp >> 2), int32(warp & 3), lane)
            out = Output(y.data, weights.bias, weights.has_bias, y.batch, columns.per_sample, columns.first,
                         out_channels, y.length, columns.padding, alignment)  # fmt: skip
            consume(me, x, weights.packed, out, grid, channels.out_per_group, shared, barriers)

    return Kernel("k6_wgmma", k6_wgmma, signature_of(config), THREADS, config.shared_bytes, key=repr(config))


class WarpgroupMatrix(TensorRung):
    name = "k6_wgmma"
    order = "wgmma"
    exact_cc = (9, 0)
    idea = "Hopper's wgmma, fed through a ring of stages by warps that only copy; aligned runs of outputs"

    choose, make_kernel = staticmethod(choose), staticmethod(make_kernel)

    def unsuited(self, problem, dtype, precision, device):
        tile = configs(problem, precision)[0].tile
        fewest, stages = FEWEST_ROWS // tile.operand_halves, tile.tap_chunks(problem) * tile.channel_chunks(problem)
        if tile.rows < fewest and stages < FEWEST_DEPTHS:
            return (
                f"it is for tiles of at least {fewest} rows (output channels times phases), not {tile.rows}, or of "
                f"{FEWEST_DEPTHS} stages (input channels times taps), not {stages}"
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
            return 1.0 if columns > MOST_FILLED * needed and config.tile.operand_halves == 1 else None
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

        def launch_all(x, w, bias, y):
            # The launch writes maps before packing ends: packing must not read that memory.
            maps = maps_room()
            packed, now = packed_weights(w, packing) if packing else (w, False)
            (launch if now else ordinary)(maps, x, x.data_ptr(), packed, bias, y)
            if tail:
                tail(x, packed, bias, y)

        def launch_on_copy(x, w, bias, y):
            launch_all(copy(x), w, bias, y)

        launch_whole = launch_on_copy if copy else launch_all
        return taking_bias(second.after(launch_whole, x.index) if second else launch_whole, bias)
