"""k5_dmma: float64 on tensor cores, in the same arithmetic at twice the rate.

k4's tiles, multiplied by mma.sync. On Hopper, producer warps copy (ring.py)."""

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.k4_register_tile import kernel as k4_register_tile
from numba_tconv.kernels.k4_register_tile.kernel import RegisterTile
from numba_tconv.kernels.k4_register_tile.plan import vector_of
from numba_tconv.kernels.rung import Rung
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.device import Device
from numba_tconv.runtime.kernel import Kernel
from numba_tconv.runtime.layout import Layout

from . import ring as k5_dmma_ring
from .mainloop import make_multiply
from .tile import CHANNELS, Config, choose

NAME = "k5_dmma"
FEWEST_ROWS = 8  # below, products are mostly zeros


def make_kernel(config: Config) -> Kernel:
    if config.ring:
        return k5_dmma_ring.make_kernel(config)
    return k4_register_tile.make_kernel(config, make_multiply, NAME)


def config_for(x: Layout, problem: Problem, device: Device) -> Config:
    return choose(problem, vector_of(x), device)


class DoubleMatrix(RegisterTile):
    name = NAME
    idea = "float64 on tensor cores: k4's tiles, multiplied by mma.sync"
    minimum_cc = (8, 0)

    make_kernel, choose = staticmethod(make_kernel), staticmethod(config_for)
    tiny_configs = Rung.tiny_configs

    def supports(self, problem, dtype, precision):
        if SIMULATOR:
            return "the CUDA simulator has no tensor cores"
        if dtype != torch.float64 or precision != "fp64":
            return f"it multiplies on tensor cores, in fp64, not in {precision}"
        return None

    def unsuited(self, problem, dtype, precision, device):
        rows = problem.out_channels_per_group * min(problem.taps.rows, problem.kernel_size)
        if problem.in_channels_per_group < CHANNELS:
            return f"it is for at least {CHANNELS} input channels a group, not {problem.in_channels_per_group}"
        if rows < FEWEST_ROWS:
            return f"it is for at least {FEWEST_ROWS} pairs of an output channel and a phase a group, not {rows}"
        return None

    def config(self, problem, dtype, precision=None):
        return choose(problem)

    def tile(self, config):
        c = config
        sums = f"{c.block_m} rows by {c.block_n} columns, {8 * c.thread_m} by {4 * c.thread_n} a warp"
        ring = ", a ring that warps of its own fill" if c.ring else ""
        return f"{sums}; {c.stages} stages of {c.block_k} input channels{ring}"
