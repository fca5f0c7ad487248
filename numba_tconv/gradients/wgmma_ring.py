"""What the gradients on wgmma share: a ring of stages, the loop over them, and the tensors that the rungs take.

A block computes tiles of products: the operand in registers (A) comes out of windows of grad_output, each lane reading
where its rows and its depth meet them; the operand in shared memory (B) is rows as they lie in memory, 128 bytes a
stage, which the copy engine swizzles. One warp copies, two warpgroups multiply. Which windows, which rows, and what a
lane reads is the gradient's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from numba import int32

from numba_tconv.formula.precision import DTYPES, KINDS
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_core.rung import tensor_core_reason
from numba_tconv.kernels.common.tensor_map import MAP_BYTES, encode, row_bytes
from numba_tconv.ptx import (
    device_function,
    mbarrier_arrive,
    mbarrier_wait,
    repeated,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait,
)
from numba_tconv.runtime.device import H200
from numba_tconv.runtime.layout import room

from .rung import GradientRung

KNOWN = "tf32", "fp16", "bf16"
CONSUMERS = 2  # warpgroups that multiply
THREADS = (CONSUMERS + 1) * 128  # one warp of the last warpgroup copies
REGISTERS = 240, 24  # of a thread that multiplies, and of one that copies
BLOCK = 64  # rows of one product
ROW = 128  # bytes of a row of B in a stage
PRODUCTS = 4  # along the depth, in a stage: each takes 32 bytes of a row
MOST_CHANNELS = 256  # columns of one product
MOST_STAGES, FEWEST_STAGES = 8, 3
# Fitted to times of a script, of which there are no rows (H200): bytes that arrive at a multiprocessor a clock, clocks
# from one box's copy to the next, clocks of a stage beside its products.
ARRIVING, BOX_CLOCKS, STAGE_CLOCKS = 45, 94, 80
SHARED = 128  # bytes that shared memory reads or writes a clock
LONGEST_SIGNAL = 1 << 30  # elements before padding crops them: places, and sums of two, are int32


class Ring:
    """The part of a configuration that says what a stage is and where it lies in shared memory."""

    precision: str
    blocks: int  # of 64 rows, of a warpgroup
    channels: int  # input channels of a tile
    in_turns: bool
    stages: int
    g_channels: int  # output channels of a stage
    width: int  # elements of a box's row
    alike: int  # every how many channels rows of grad_output begin alike, modulo 16 bytes; each set has its own boxes
    boxes: int  # of grad_output, in a stage
    own_words = 0  # of 64 bits, beside the stages' barriers

    @property
    def itemsize(self) -> int:
        return DTYPES[self.precision].itemsize

    @property
    def kind(self) -> str:
        return KINDS[self.precision][0]

    @property
    def rows(self) -> int:
        """Rows of products in a tile."""
        return BLOCK * self.blocks * (1 if self.in_turns else CONSUMERS)

    def width_of(self, elements: int) -> int:
        """Elements of a box's row that holds ``elements``: a whole number of 16 bytes; and it begins at a multiple of
        16 bytes, which may be before the first element."""
        vector = 16 // self.itemsize
        return -(-(elements + vector - 1) // vector) * vector

    # A stage is rows of B, a multiple of 1,024 bytes, and boxes of grad_output, each at a multiple of 128.

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
        """Bytes from one box to the next."""
        return -(-self.box_bytes // 128) * 128

    @property
    def stage_bytes(self) -> int:
        """That arrive for a stage."""
        return self.b_bytes + self.boxes * self.box_bytes

    @property
    def arriving(self) -> float:
        """Estimated clocks that a stage takes to arrive."""
        return max(self.stage_bytes / ARRIVING, (self.boxes + 1) * BOX_CLOCKS)

    @property
    def slot(self) -> int:
        """Bytes from one stage to the next."""
        return -(-(self.b_bytes + self.boxes * self.spacing) // 1024) * 1024

    # Where things lie in shared memory, in bytes from the first multiple of 1,024: ring, mbarriers (two a stage), the
    # rung's own words, a tensor map.

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


def deepest(config, apart: int = 1):
    """The configuration with as many stages as shared memory holds, of those ``apart``; None if they are too few."""
    rings = (replace(config, stages=stages) for stages in range(MOST_STAGES, FEWEST_STAGES - 1, -apart))
    return next((ring for ring in rings if ring.shared_bytes <= H200.shared_per_block), None)


@device_function
def as_it_came(lane, s, offset):
    """What ``make_loop`` does to a stage that needs nothing."""


def make_loop(config: Ring, load, multiply, operands: int, every: int, sets: int = 2, prepare=as_it_came):
    """The main loop, a device function: the products of ``count`` stages from slot ``s`` on, every ``every``-th.

    ``load(k, v, at, lane, offset)`` fills registers ``v[at:at+operands]`` for product k of the stage that begins
    ``offset`` bytes after the first, ``lane`` being what it knows of its lane; ``multiply(acc, v, at, descriptor)``
    multiplies them by B. With two ``sets`` of operands, one is loaded while the other is multiplied.
    ``prepare(lane, s, offset)`` is called by each warp for a stage that has arrived.

    Takes sums, registers, ``lane``, the descriptor of B in slot 0, slot and parity of the first stage, the count, the
    mbarriers, and whether this lane signals for its warp. Returns the slot and parity after the last stage, and the
    last slot, which nobody has set free.
    """
    stages, slot = config.stages, config.slot
    wait = wgmma_wait(sets - 1)

    @device_function
    def product(k, state):
        acc, v, lane, offset, descriptor, done = state
        at = int32(k % sets * operands)
        load(k, v, at, lane, offset)
        wgmma_fence()
        multiply(acc, v, at, descriptor + 2 * k)
        wgmma_commit()
        wait()
        if k == 0 and done:  # by now the products of the stage before have read its B
            mbarrier_arrive(done)

    stage = repeated(product, PRODUCTS)

    @device_function
    def loop(acc, v, lane, descriptor, s, parity, count, full, empty, signals):
        before = int32(-1)
        while count > 0:
            mbarrier_wait(full + 8 * s, parity)
            prepare(lane, s, int32(s * slot))
            done = int32(empty + 8 * before) if before >= 0 and signals else int32(0)
            stage(int32(0), (acc, v, lane, int32(s * slot), descriptor + ((s * slot) >> 4), done))
            before, count, s = s, int32(count - every), int32(s + every)
            if s >= stages:
                s, parity = int32(s - stages), int32(parity ^ 1)
        return s, parity, before

    return loop


def workspace(blocks: int, boxes: int, index: int) -> Callable[[], torch.Tensor]:
    """The room where blocks publish their maps of grad_output's boxes and of B; ``index``: torch's, of the GPU."""
    return room((blocks * (boxes + 1) * MAP_BYTES,), torch.uint8, index)


@lru_cache(maxsize=1024)
def _template(shape: tuple, strides: tuple, precision: str, alike: int, box: tuple, swizzled: bool) -> tuple[int, ...]:
    (batch, channels, length), (n_bytes, c_bytes) = shape, row_bytes(shape, strides, DTYPES[precision].itemsize)
    return encode(precision, (length, -(-channels // alike), batch), (c_bytes * alike, n_bytes), (*box, 1), swizzled)


def template_of_rows(g: torch.Tensor, config: Ring) -> tuple[int, ...]:
    """The map of grad_output, or its planes, (N, rows, elements), wherever it is: of every ``config.alike``-th row."""
    box = config.width, config.box_rows
    return _template(g.shape, g.stride(), config.precision, config.alike, box, False)


def template_of_b(b: torch.Tensor, config: Ring) -> tuple[int, ...]:
    """The map of B, likewise."""
    return _template(b.shape, b.stride(), config.precision, 1, (ROW // config.itemsize, config.channels), True)


class WgmmaGradient(GradientRung):
    """A gradient on wgmma."""

    tensor_cores = True
    exact_cc = (9, 0)

    def no_tile(self, problem: Problem, precision: str) -> str | None:
        """Why the rung has no tile for the problem; None if it has one."""
        raise NotImplementedError

    def supports(self, problem, dtype, precision):
        if reason := tensor_core_reason(dtype, precision, KNOWN):
            return reason
        p = problem
        if max(p.batch, p.in_channels, p.out_channels * p.stride, p.out_length + 2 * p.padding) >= LONGEST_SIGNAL:
            return "it counts samples, channels, phases and positions in 32 bits"
        return self.no_tile(problem, precision)
