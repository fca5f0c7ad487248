"""Tiles of a step by columns: ``Config`` fixes the machine code, ``choose`` picks it."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.formula.taps import Taps
from numba_tconv.kernels.rung import SUM_CHANNELS
from numba_tconv.runtime.elements import ELEMENTS

MOST_THREADS = 512
COLUMNS = 32  # of a block with several blocks of input channels
FEW_COLUMNS = 128  # of a block with one
MOST_SUMS = 16  # 4-byte registers of a thread for sums
AHEAD, FEW_AHEAD, MANY_SUMS = 8, 4, 8  # weights of a thread in flight; fewer in float64 or with many sums
MOST_STRIDE = 1 << 18  # outputs in 32 bits
MOST_SHARED = 80 * 1024  # bytes of a block: two fit on a multiprocessor of 8.0, or from 9.0 on
MINIMUM_CC = 8, 0  # first whose blocks may have so much


@dataclass(frozen=True)
class Config:
    """A block computes ``slots`` slots and ``frames`` new frames of ``channels`` output channels in each of
    ``group_count`` groups.

    ``lanes`` threads share a column, an output channel and a tap, in parts of SUM_CHANNELS input channels."""

    dtype: torch.dtype
    taps: Taps
    in_per_group: int
    out_per_group: int
    slots: int
    frames: int
    channels: int
    group_count: int
    lanes: int
    ahead: int = AHEAD

    @property
    def kept(self) -> int:
        """Frames of the state."""
        return self.taps.shift(self.taps.kernel_size - 1)

    @property
    def columns(self) -> int:
        return self.group_count * self.channels * self.taps.kernel_size

    @property
    def sums(self) -> int:
        return self.slots * self.frames

    @property
    def parts(self) -> int:
        return -(-self.in_per_group // SUM_CHANNELS)

    @cached_property
    def threads(self) -> int:
        return -(-self.columns * self.lanes // 32) * 32

    @property
    def min_blocks(self) -> int:
        """Blocks of a multiprocessor: 64 registers a thread, more in small blocks."""
        return max(1, 1024 // self.threads) if self.threads > 128 else 4

    @property
    def window(self) -> int:
        """Frames of a slot that a block reads."""
        return self.kept + self.frames

    @property
    def window_size(self) -> int:
        return self.group_count * self.in_per_group * self.window * self.slots

    @property
    def shared_bytes(self) -> int:
        size = self.window_size + self.parts * self.sums * self.columns
        return size * ELEMENTS[self.dtype].accumulator.bitwidth // 8


def refusal(problem: Problem, dtype: torch.dtype) -> str | None:
    """Why no block computes the step."""
    if dtype not in ELEMENTS:
        return f"it takes {', '.join(e.name for e in ELEMENTS.values())}, not {str(dtype).removeprefix('torch.')}"
    if problem.kernel_size > MOST_THREADS:
        return f"it takes up to {MOST_THREADS} taps"
    if problem.stride > MOST_STRIDE:
        return f"it takes strides up to {MOST_STRIDE}"
    if (need := _config(problem, dtype, 1, 1).shared_bytes) > MOST_SHARED:
        return f"one slot and frame need {need} bytes of shared memory, of {MOST_SHARED}"
    return None


@lru_cache(maxsize=1024)
def choose(problem: Problem, dtype: torch.dtype) -> Config:
    """The tile of a step: as many frames as fit, which share inputs, then slots, which share weights."""
    most = MOST_SUMS * 32 // ELEMENTS[dtype].accumulator.bitwidth
    frames, slots = 1, 1
    while frames < problem.length and 2 * frames <= most and _fits(problem, dtype, 2 * frames, 1):
        frames *= 2
    while slots < problem.batch and 2 * slots * frames <= most and _fits(problem, dtype, frames, 2 * slots):
        slots *= 2
    return _config(problem, dtype, frames, slots)


def _fits(problem: Problem, dtype: torch.dtype, frames: int, slots: int) -> bool:
    return _config(problem, dtype, frames, slots).shared_bytes <= MOST_SHARED


def _config(problem: Problem, dtype: torch.dtype, frames: int, slots: int) -> Config:
    p, taps = problem, problem.kernel_size
    sizes = p.in_channels_per_group, p.out_channels_per_group
    parts = -(-p.in_channels_per_group // SUM_CHANNELS)
    columns = COLUMNS if parts > 1 else FEW_COLUMNS
    channels = max(1, min(p.out_channels_per_group, columns // taps))
    group_count = max(1, min(p.groups, columns // (taps * channels))) if channels == p.out_channels_per_group else 1
    lanes = max(1, min(parts, MOST_THREADS // (group_count * channels * taps)))
    config = Config(dtype, p.taps, *sizes, slots, frames, channels, group_count, lanes)
    if config.sums >= MANY_SUMS or dtype == torch.float64:
        config = replace(config, ahead=FEW_AHEAD)
    while config.group_count > 1 and config.shared_bytes > MOST_SHARED:
        config = replace(config, group_count=config.group_count // 2)
    return config


def tiny(problem: Problem, dtype: torch.dtype) -> list[Config]:
    """As Rung.tiny_configs."""
    usual = choose(problem, dtype)
    return [
        usual,
        replace(usual, slots=2, frames=1, channels=1, group_count=1, lanes=1, ahead=2),
        replace(usual, slots=1, frames=2, group_count=1, lanes=1, ahead=3),
    ]
