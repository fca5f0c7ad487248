"""Shared by the wgmma gradients: ring, mainloop, tensors.

Operand A is in registers, from windows of grad_output; operand B in shared memory, in swizzled rows of 128 bytes. One
warp produces, two warpgroups consume."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from numba import int32, types

from numba_tconv.formula.precision import DTYPES, KINDS
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.arguments import arguments
from numba_tconv.kernels.common.pipeline import BARRIER, init_stage
from numba_tconv.kernels.common.tensor_core.rung import tensor_core_reason
from numba_tconv.kernels.common.tensor_map import MAP_BYTES, MAP_WORDS, encode, row_bytes
from numba_tconv.ptx import (
    device_function,
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_init,
    mbarrier_wait,
    repeated,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from numba_tconv.runtime.device import H200
from numba_tconv.runtime.layout import Layout, room

from .rung import GradientRung

KNOWN = "tf32", "fp16", "bf16"
CONSUMERS = 2  # warpgroups
THREADS = (CONSUMERS + 1) * 128  # the last warpgroup's first warp produces
REGISTERS = 240, 24
BLOCK = 64  # rows of one product
ROW = 128  # bytes of a row of B
PRODUCTS = 4  # of a stage: 32 bytes of a row each
MOST_CHANNELS = 256  # columns of one product
MOST_STAGES, FEWEST_STAGES = 8, 3
# Fitted: bytes arriving a clock; clocks between boxes; a stage's beside products.
ARRIVING, BOX_CLOCKS, STAGE_CLOCKS = 45, 94, 80
SHARED = 128  # bytes a clock
LONGEST_SIGNAL = 1 << 30  # before cropping: sums of two places are int32


class Ring:
    """What both gradients' configurations share."""

    precision: str
    blocks: int  # of 64 rows in a warpgroup
    channels: int
    alternate: bool  # warpgroups take alternate stages (grad_weight) or tiles (ping-pong)
    stages: int
    g_channels: int
    width: int
    alike: int  # distance of channels whose rows begin alike modulo 16 bytes; each set has its boxes
    boxes: int
    own_words = 0  # 64-bit words beside the barriers

    @property
    def itemsize(self) -> int:
        return DTYPES[self.precision].itemsize

    @property
    def kind(self) -> str:
        return KINDS[self.precision][0]

    @property
    def rows(self) -> int:
        return BLOCK * self.blocks * (1 if self.alternate else CONSUMERS)

    @property
    def warpgroup_rows(self) -> int:
        """From one warpgroup's rows to the other's."""
        return 0 if self.alternate else BLOCK * self.blocks

    def width_of(self, elements: int) -> int:
        """A box's row for ``elements``: whole vectors, up to vector - 1 elements early."""
        vector = 16 // self.itemsize
        return -(-(elements + vector - 1) // vector) * vector

    # A stage: rows of B, a multiple of 1,024 bytes, and boxes at multiples of 128.

    @property
    def b_bytes(self) -> int:
        return self.channels * ROW

    @property
    def box_rows(self) -> int:
        return self.g_channels // self.alike

    @property
    def box_bytes(self) -> int:
        return self.box_rows * self.width * self.itemsize

    @property
    def spacing(self) -> int:
        return -(-self.box_bytes // 128) * 128

    @property
    def stage_bytes(self) -> int:
        return self.b_bytes + self.boxes * self.box_bytes

    @property
    def arriving(self) -> float:
        return max(self.stage_bytes / ARRIVING, (self.boxes + 1) * BOX_CLOCKS)

    @property
    def slot(self) -> int:
        """Bytes between stages."""
        return -(-(self.b_bytes + self.boxes * self.spacing) // 1024) * 1024

    # Byte offsets from shared memory's first multiple of 1,024.

    @property
    def barriers(self) -> int:
        return self.stages * self.slot

    @property
    def words(self) -> int:
        return self.barriers + 2 * 8 * self.stages

    @property
    def map(self) -> int:
        return -(-(self.words + 8 * self.own_words) // 128) * 128

    @property
    def shared_bytes(self) -> int:
        return 1024 + self.map + 128


def deepest(config, step: int = 1):
    """``config`` with the most stages that fit (MOST_STAGES, less multiples of ``step``), or None."""
    rings = (replace(config, stages=stages) for stages in range(MOST_STAGES, FEWEST_STAGES - 1, -step))
    return next((ring for ring in rings if ring.shared_bytes <= H200.shared_per_block), None)


class TensorMaps(NamedTuple):
    """Maps without addresses, addresses, the workspace for finished maps."""

    g_template: tuple
    b_template: tuple
    g_address: int
    b_address: int
    workspace: int


_TEMPLATE = types.UniTuple(types.int64, MAP_WORDS)
MAPS = arguments(TensorMaps, g_template=_TEMPLATE, b_template=_TEMPLATE)


class Thread(NamedTuple):
    base: int  # of shared memory
    lane: int
    warp: int


class Consumer(NamedTuple):
    warpgroup: int
    warp: int
    lane: int


class Operands(NamedTuple):
    """How a gradient multiplies a stage: device functions, and a set's ``registers``.

    ``load(k, registers, first, lane, offset)`` fills ``registers[first:]`` for product k of the stage ``offset`` bytes
    after slot 0; ``lane`` is the gradient's state. ``multiply(sums, registers, first, descriptor)`` multiplies them by
    B. Each warp calls ``prepare(lane, stage, offset)`` for an arrived stage."""

    load: Callable
    multiply: Callable
    prepare: Callable
    registers: int


class Products(NamedTuple):
    sums: tuple
    registers: tuple
    lane: tuple
    offset: int
    descriptor: int
    released: int  # the last stage's mbarrier, or 0


@device_function
def as_it_came(lane, stage, offset):
    """A ``prepare`` that does nothing."""


def make_setup(config: Ring, releases: int, turns: int = 0):
    """Build one thread's initialisation of mbarriers.

    ``releases`` warps release a stage; ``turns`` mbarriers of four arrivals lie at ``config.words``."""
    stages, words = config.stages, config.words

    @device_function
    def setup(pipe, base):
        for stage in range(stages):
            init_stage(pipe, stage, 1, releases)
        for turn in range(turns):
            mbarrier_init(int32(base + words) + BARRIER * turn, 4)
        fence_mbarrier_init()

    return setup


def make_mainloop(config: Ring, operands: Operands, step: int = 1, sets: int = 2):
    """Build the loop over every ``step``-th of the next ``stages_left`` stages.

    With two ``sets`` of operands, one is loaded during products. ``descriptor``: B in slot 0; ``signals``: this lane
    releases stages for its warp. Returns the next stage, its parity, and the last stage, not yet released."""
    load, multiply, prepare, count = operands.load, operands.multiply, operands.prepare, operands.registers
    stages, slot_bytes, wait = config.stages, config.slot, wgmma_wait(sets - 1)

    @device_function
    def product(k, state):
        first = int32(k % sets * count)
        load(k, state.registers, first, state.lane, state.offset)
        wgmma_fence()
        multiply(state.sums, state.registers, first, state.descriptor + 2 * k)
        wgmma_commit()
        wait()
        if k == 0 and state.released:  # products have read its B
            mbarrier_arrive(state.released)

    multiply_stage = repeated(product, PRODUCTS)

    @device_function
    def mainloop(sums, registers, lane, descriptor, stage, parity, stages_left, pipe, signals):
        last = int32(-1)
        while stages_left > 0:
            mbarrier_wait(pipe.full + BARRIER * stage, parity)
            prepare(lane, stage, int32(stage * slot_bytes))
            released = int32(pipe.empty + BARRIER * last) if last >= 0 and signals else int32(0)
            multiply_stage(int32(0), Products(sums, registers, lane, int32(stage * slot_bytes),
                                              descriptor + ((stage * slot_bytes) >> 4), released))  # fmt: skip
            last, stages_left, stage = stage, int32(stages_left - step), int32(stage + step)
            if stage >= stages:
                stage, parity = int32(stage - stages), int32(parity ^ 1)
        return stage, parity, last

    return mainloop


def workspace(blocks: int, boxes: int, index: int) -> Callable[[], torch.Tensor]:
    """Room for blocks' ``boxes`` maps of grad_output and one of B, on GPU ``index``."""
    return room((blocks * (boxes + 1) * MAP_BYTES,), torch.uint8, index)


@lru_cache(maxsize=1024)
def _template(shape: tuple, strides: tuple, precision: str, alike: int, box: tuple, swizzled: bool) -> tuple[int, ...]:
    (batch, channels, length), (n_bytes, c_bytes) = shape, row_bytes(shape, strides, DTYPES[precision].itemsize)
    return encode(precision, (length, -(-channels // alike), batch), (c_bytes * alike, n_bytes), (*box, 1), swizzled)


def template_of_rows(g: Layout, config: Ring) -> tuple[int, ...]:
    """The map of every ``config.alike``-th row of grad_output or planes (N, rows, elements), at any address."""
    box = config.width, config.box_rows
    return _template(g.shape, g.strides, config.precision, config.alike, box, False)


def template_of_b(b: Layout, config: Ring) -> tuple[int, ...]:
    return _template(b.shape, b.strides, config.precision, 1, (ROW // config.itemsize, config.channels), True)


class WgmmaGradient(GradientRung):
    tensor_cores = True
    exact_cc = (9, 0)

    def no_tile(self, problem: Problem, precision: str) -> str | None:
        raise NotImplementedError

    def supports(self, problem, dtype, precision):
        if reason := tensor_core_reason(dtype, precision, KNOWN):
            return reason
        p = problem
        if max(p.batch, p.in_channels, p.out_channels * p.stride, p.last_sample) >= LONGEST_SIGNAL:
            return "it counts samples, channels, phases and positions in 32 bits"
        return self.no_tile(problem, precision)
