"""The block's mbarriers."""

from typing import NamedTuple

from numba import int32

from numba_tconv.kernels.common.pipeline import BARRIER, Pipe, init_stage
from numba_tconv.ptx import device_function, fence_mbarrier_init, mbarrier_init

from .tile import CONSUMERS, Config


class Barriers(NamedTuple):
    """Shared addresses: stage 0's, the first warpgroup's."""

    copied: Pipe  # filled by copies
    ready: Pipe  # for consumers
    weights: int  # resident ones have arrived
    products: int  # orders products
    staging: int  # orders stores in a shared buffer
    inverses: int  # scales (split_ahead.py)


def make_barriers(config: Config):
    """Build ``barriers_of`` and, for one thread, ``init_barriers``."""
    barriers_at, ready_at, most_stages = config.barriers, config.ready, config.stages
    makes_ready, releases = config.makes_ready, 128 * CONSUMERS if config.paired else 128

    @device_function
    def barriers_of(base, stages):
        full, empty = int32(base + barriers_at), int32(base + barriers_at + BARRIER * most_stages)
        weights, products = int32(empty + BARRIER * most_stages), int32(empty + BARRIER * (most_stages + 1))
        ready = int32(base + ready_at) if makes_ready else full
        copied, read = Pipe(full, empty, stages), Pipe(ready, empty, stages)
        staging, inverses = int32(products + BARRIER * CONSUMERS), int32(ready + BARRIER * most_stages)
        return Barriers(copied, read, weights, products, staging, inverses)

    @device_function
    def init_barriers(barriers):
        for stage in range(most_stages):
            init_stage(barriers.copied, stage, 1, releases)
            if makes_ready:
                mbarrier_init(barriers.ready.full + BARRIER * stage, 32)
        mbarrier_init(barriers.weights, 1)
        for s in range(CONSUMERS):
            mbarrier_init(barriers.products + BARRIER * s, 4)
            mbarrier_init(barriers.staging + BARRIER * s, 128)
        fence_mbarrier_init()

    return barriers_of, init_barriers
