"""Tiles of a step on tensor cores: ``Config`` fixes the machine code, ``choose`` picks it."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.ptx.mma import DEPTH
from numba_tconv.runtime.device import H200

KINDS = {torch.float32: "tf32", torch.float16: "f16", torch.bfloat16: "bf16"}  # of mma.sync
PRECISIONS = {torch.float32: "tf32", torch.float16: "fp16", torch.bfloat16: "bf16"}
VECTOR = 16  # bytes of a copy
ROWS, COLUMNS = 16, 8  # of a product
WARP_COLUMNS = (32, 64)  # of a warp at most: more where registers are short
MOST_REGISTERS = 0.75  # of a thread's, as far as ``Config.registers`` counts them
MOST_FRAMES = 64  # new ones of a slot
MOST_CHANNEL_WARPS, MOST_WARPS = 8, 16  # that share a stage's input channels, and of a block
LEAST_STAGES, MOST_STAGES = 3, 6
STATIC_SHARED = 1024  # bytes of a block for other shared memory


@dataclass(frozen=True)
class Config:
    """A block computes ``columns`` columns, a slot's new frame each, of ``channels`` output channels of a group.

    Teams of ``column_warps`` warps share the columns; the teams share a stage's input channels, ``slices`` products
    deep. A slot has at least ``frames`` new ones, a power of two. ``apart``: sums lie behind the ring of stages."""

    dtype: torch.dtype
    kernel_size: int
    stride: int
    channels: int
    columns: int
    frames: int
    warps: int
    column_warps: int
    stages: int
    apart: bool
    slices: int

    @property
    def kept(self) -> int:
        """Frames of the state."""
        return self.kernel_size // self.stride - 1

    @property
    def straight(self) -> bool:
        """Frames are copied as they lie."""
        return self.frames == 1 and self.kept <= 1

    @property
    def most_slots(self) -> int:
        return self.columns // self.frames

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def depth(self) -> int:
        """Input channels of a warp in a stage."""
        return DEPTH[KINDS[self.dtype]]

    @property
    def channel_warps(self) -> int:
        return self.warps // self.column_warps

    @property
    def stage_channels(self) -> int:
        return self.channel_warps * self.depth * self.slices

    @property
    def delay(self) -> int:
        """Stages multiplied before a ticket is read: two hide its latency."""
        return 2 if self.stages > LEAST_STAGES else 1

    @property
    def ahead(self) -> int:
        """Stages under way while one is multiplied; ``delay`` before it may still become the state."""
        return self.stages - 1 - self.delay

    @property
    def rows(self) -> int:
        """An output channel and a phase each."""
        return self.channels * self.stride

    @property
    def row_blocks(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def column_blocks(self) -> int:
        return self.columns // self.column_warps // COLUMNS

    @property
    def weight_row(self) -> int:
        """Bytes of an input channel's weights."""
        return self.channels * self.kernel_size * self.itemsize

    @property
    def weight_pitch(self) -> int:
        """Bytes between input channels' weights, for few bank conflicts."""
        wanted = (32, 96) if self.itemsize == 4 else (16, 48, 80, 112)
        return next(p for p in range(self.weight_row, self.weight_row + 129, VECTOR) if p % 128 in wanted)

    @property
    def frame_pitch(self) -> int:
        """Bytes between frames, free of bank conflicts."""
        return self.stage_channels * self.itemsize + VECTOR

    @property
    def vectors(self) -> tuple[int, int]:
        """Vectors of a stage's kept and new frames that a thread loads at most."""
        pieces = self.stage_channels * self.itemsize // VECTOR
        return tuple(-(-rows * pieces // self.threads) for rows in (self.most_slots * self.kept, self.columns))

    @property
    def by_matrix(self) -> bool:
        """Eight phases of a tap and channel are a row of ldmatrix."""
        return self.itemsize == 2 and self.stride % 8 == 0

    @property
    def registers(self) -> int:
        """A thread's for sums, a slice's weights, places of irregular rows, and loads."""
        of_rows = 4 if self.stride & (self.stride - 1) == 0 else 6
        loads = 0 if self.straight else sum(self.vectors)
        return 4 * self.row_blocks * self.column_blocks + of_rows * self.row_blocks + 4 * loads

    @property
    def weights_bytes(self) -> int:
        return self.stage_channels * self.weight_pitch

    @property
    def stage_bytes(self) -> int:
        return self.weights_bytes + (self.columns + self.most_slots * self.kept) * self.frame_pitch

    @property
    def sum_pitch(self) -> int:
        """Elements between columns of sums."""
        return self.row_blocks * ROWS + 4

    @property
    def sums_bytes(self) -> int:
        return self.channel_warps * self.columns * self.sum_pitch * 4

    @property
    def sums_at(self) -> int:
        return self.stages * self.stage_bytes if self.apart else 0

    @property
    def shared_bytes(self) -> int:
        return max(self.stages * self.stage_bytes, self.sums_at + self.sums_bytes)


def refusal(problem: Problem, dtype: torch.dtype, precision: str, limit: int) -> str | None:
    """Why no tile computes the step. ``limit``: as for ``choose``."""
    p, vector = problem, VECTOR // dtype.itemsize
    if PRECISIONS.get(dtype) != precision:
        return f"it multiplies in {', '.join(PRECISIONS.values())}, not in {precision}"
    if p.dilation != 1 or p.kernel_size % p.stride:
        return "its taps are a multiple of the stride, without dilation"
    if p.in_channels_per_group % vector:
        return f"it takes a multiple of {vector} input channels a group"
    if p.length > MOST_FRAMES:
        return f"it takes up to {MOST_FRAMES} new frames"
    if choose(p, dtype, limit) is None:
        return f"no tile fits in {limit} bytes of shared memory"
    return None


@lru_cache(maxsize=1024)
def choose(problem: Problem, dtype: torch.dtype, limit: int = H200.shared_per_block) -> Config | None:
    """The tile of a step with the least traffic; None if none fits in ``limit`` bytes of shared memory."""
    p = problem
    candidates = [
        config
        for channels in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
        for columns in (8, 16, 32, 64, 128)
        if (config := _config(p, dtype, channels, columns, limit))
    ]
    return min(candidates, key=lambda config: _traffic(p, config), default=None)


def _config(problem: Problem, dtype: torch.dtype, channels: int, columns: int, limit: int) -> Config | None:
    p = problem
    if columns < p.length or channels * p.kernel_size * dtype.itemsize % VECTOR:
        return None
    depth, group_channels = DEPTH[KINDS[dtype]], p.in_channels_per_group
    frames = 1 << p.length.bit_length() - 1
    for half, slices, widest in product((False, True), (2, 1), WARP_COLUMNS):
        column_warps = -(-columns // widest)
        channel_warps = max(1, min(MOST_CHANNEL_WARPS, MOST_WARPS // column_warps, -(-group_channels // depth)))
        channel_warps = -(-channel_warps // 2) if half else channel_warps
        stage_channels, warps = channel_warps * depth * slices, channel_warps * column_warps
        if slices > 1 and (half or stage_channels > group_channels):
            continue
        most_registers = MOST_REGISTERS * 65536 / max(256, 32 * warps)
        least = LEAST_STAGES + slices - 1
        deepest = max(least, min(MOST_STAGES, -(-group_channels // stage_channels) + 3))
        for stages, apart in product(range(deepest, least - 1, -1), (True, False)):
            sizes = channels, columns, frames, warps, column_warps, stages
            config = Config(dtype, p.kernel_size, p.stride, *sizes, apart, slices)
            if config.registers <= most_registers and config.shared_bytes <= limit - STATIC_SHARED:
                return config
    return None


def slots_of(config: Config, frames: int) -> int:
    """Slots of a block's columns."""
    return config.columns // frames


def blocks_of(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Groups, tiles of output channels of a group, and tiles of slots."""
    row_tiles = -(-problem.out_channels_per_group // config.channels)
    return problem.groups, row_tiles, -(-problem.batch // slots_of(config, problem.length))


def _traffic(problem: Problem, config: Config) -> tuple[int, int]:
    """Elements that the busiest multiprocessor reads, and blocks."""
    groups, row_tiles, slot_tiles = blocks_of(problem, config)
    elements = config.channels * config.kernel_size + config.columns * (config.kept + 1)
    blocks = groups * row_tiles * slot_tiles
    return -(-blocks // H200.multiprocessors) * elements, blocks


def tiny(problem: Problem, dtype: torch.dtype) -> list[Config]:
    """As Rung.tiny_configs."""
    usual = choose(problem, dtype)
    least = VECTOR // math.gcd(VECTOR, problem.kernel_size * dtype.itemsize)
    return [
        usual,
        replace(usual, channels=least, columns=COLUMNS, warps=1, slices=1, stages=LEAST_STAGES),
        replace(
            usual, channels=2 * least, columns=2 * COLUMNS, warps=4, column_warps=2, slices=2, stages=5, apart=False
        ),
    ]
