"""k5_dmma: float64 on tensor cores.

Idea: k4's matrix product, load and store as they are (kernels/k4_register_tile/kernel.py), but a warp multiplies it by
mma.sync in float64, which since Ampere has twice the rate of CUDA cores, in the same arithmetic.

* Multiply (mainloop.py): 16 rows by 8 columns and 4 or 8 channels a product; of 64 x 32 sums a warp loads four
  vectors of weights and four columns of inputs for 16 products.
* Packing (kernels/k4_register_tile/pack.py): a lane's weights of a product are 16 consecutive bytes.
* Ring (ring.py): on Hopper, where products are many, warps of their own copy. Elsewhere stages are deep, and
  two of them enough: a warp's products of a stage take longer than the copies of the next.
* Sectors (kernels/common/sectors.py): a window begins with one, where its copies are of 16 bytes: memory is read once,
  not twice (hifigan_u3 0.806 to 0.784 ms, seamless_u1 0.602 to 0.582; H200, a script).

Expected over k4: up to twice as fast, where products are the limit.

Measured (H200, kb64): 7.21 ms, 2.5 times as fast as k4; 42 to 60 TFLOP/s where products are many. By a script, without
packing and without a ring, 2.0 to 3.6 times as fast as k4 on twelve layers, 1.9 on demucs_out, 1.6 on kb79 and 1.4 on
convtasnet, which memory limits more.

What keeps tiles without a ring from the peak (patch, 4.0 ms; H200, ncu and scripts): tensor cores multiplied in 79% of
the clocks (9fa90f0, before windows began with sectors), those of cuBLAS's kernel for the same product (64 x 64 tiles,
three blocks a multiprocessor) in 95%, but at a clock that the GPU's power lowers. A variant that fetches operands a
product ahead, across barriers, took as long; without the copies of later stages that one took 0.54 ms less, without
barriers 0.27. That is what the ring saves.
"""

from __future__ import annotations

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
FEWEST_ROWS = 8  # with fewer, CUDA cores are as fast: most of a product would be zeros


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
