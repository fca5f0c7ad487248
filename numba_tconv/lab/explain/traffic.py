"""Counts the loads of k1 to k4."""

from dataclasses import dataclass

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels import k3_shared_tile
from numba_tconv.kernels.common.split_sums import split
from numba_tconv.kernels.k4_register_tile.choose import blocks


@dataclass(frozen=True)
class Traffic:
    """Averages for one output: ``turns`` of the inner loop (one input channel and tap each), elements loaded.

    k1 takes all taps, k2 and k3 the longest phase's, k4 also the tile's padding.
    """

    turns: float
    multiply_adds: float
    from_global: float
    from_shared: float


def traffic(name: str, problem: Problem, config) -> Traffic:
    """Raises ValueError for other rungs than k1 to k4."""
    p = problem
    outputs = p.batch * p.out_channels * p.out_length
    depth, products = p.in_channels_per_group, p.flops / 2 / outputs
    turns = depth * p.taps.taps_per_row
    if name == "k1_gather":
        return Traffic(depth * p.kernel_size, products, 2 * products, 0)
    if name == "k2_polyphase":
        return Traffic(turns, products, 2 * products, 0)
    if name == "k3_shared_tile":
        of_outputs = p.batch * p.groups * -(-p.out_length // config.outputs)
        windows = -(-p.out_channels_per_group // config.channels) * k3_shared_tile.window(p, config)
        fetched = of_outputs * depth * (windows + p.out_channels_per_group * p.kernel_size)
        return Traffic(turns, products, fetched / outputs, (1 + 1 / config.channels) * products)
    if name == "k4_register_tile":
        part = split(p, config.splits)
        stages = blocks(part, config) * config.tap_chunks(part) * config.channel_chunks(part)
        turns = stages * config.block_k * config.multiplied_taps(part) * config.block_m * config.block_n / outputs
        of_thread = config.thread_m * config.thread_n * config.tap_chunk
        loads = (config.window + config.tap_chunk * config.thread_m) / of_thread
        partial_sums = config.splits if config.splits > 1 else 0
        fetched = stages * (config.x_stage + config.w_stage) / outputs + partial_sums
        return Traffic(turns, products, fetched, loads * turns)
    raise ValueError(f"the traffic of {name!r} is not counted, only that of k1 to k4")
