"""Configurations.

In sizes m counts rows (output channel, phase), n columns (positions of all samples end to end), k input channels.
A block has ``block_m x block_n`` sums, divided as WarpTile describes, and ``block_k`` channels a stage."""

from dataclasses import dataclass, replace

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.register_tile import WarpTile
from numba_tconv.kernels.common.sectors import ENTRY, entries_before
from numba_tconv.runtime.device import RESERVED_SHARED, Device
from numba_tconv.runtime.elements import ELEMENTS

WINDOW_LIMIT = 20  # elements in registers
UNROLL_LIMIT = 384  # multiply-adds of a channel


@dataclass(frozen=True)
class Config(WarpTile):
    dtype: torch.dtype
    stride: int
    dilation: int
    tap_chunk: int  # taps of a window
    several_chunks: bool  # a row has more than one
    ragged: bool  # some rows lack the last tap
    whole_chunks: bool  # channels fill whole stages
    one_phase: bool  # a block's rows have one phase
    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int
    lanes_m: int
    stages: int = 2
    min_blocks: int = 2  # the register budget
    partial: int = 0  # stages of a partial sum; 0: all
    x_vector: int = 1  # elements of a cp.async
    apart: bool = False  # rows in order of phase; a thread has one
    y_vector: int = 1  # outputs of a store
    splits: int = 1

    barriers = 0
    fragments = False  # packed as tensor-core operands

    @property
    def phases(self) -> int:
        return 1 if self.one_phase else min(self.taps.rows, self.block_m)

    @property
    def uniform(self) -> bool:
        """Whether a thread's rows all have the last tap, or none."""
        return self.one_phase or self.apart

    @property
    def channels(self) -> int:
        return self.block_m // self.phases

    @property
    def row_parts(self) -> int:
        """Row tiles of a channel's phases."""
        return -(-self.taps.rows // self.phases)

    @property
    def at_once(self) -> int:
        """Channels in a turn of the loop."""
        return 2 if self.partial and self.block_k % 2 == 0 and not self.ragged else 1

    @property
    def halo(self) -> int:
        """Window columns before the thread's, in vectors."""
        return -(-(self.tap_chunk - 1) * self.taps.step // self.vector) * self.vector

    @property
    def begin(self) -> int:
        """Windows begin at multiples of so many columns."""
        return self.x_vector

    @property
    def lead(self) -> int:
        """Columns of a stage before the block."""
        return -(-self.halo // self.begin) * self.begin

    @property
    def copied(self) -> int:
        return self.block_n + self.lead

    @property
    def entries(self) -> int:
        """Entries before the stages: Block.offsets, Block.start, barriers."""
        return entries_before(self.copied // self.x_vector + 2 + self.barriers)

    @property
    def width(self) -> int:
        """Columns between channels in shared memory."""
        return self.copied

    @property
    def window(self) -> int:
        return self.thread_n + self.halo

    @property
    def x_stage(self) -> int:
        return self.block_k * self.width

    @property
    def w_stage(self) -> int:
        return self.block_k * self.tap_chunk * self.block_m

    @property
    def stage(self) -> int:
        return self.x_stage + self.w_stage

    @property
    def chunk_shift(self) -> int:
        """Columns between windows of tap chunks."""
        return self.tap_chunk * self.taps.step if self.several_chunks else 0

    def columns(self, problem: Problem) -> tuple[int, int]:
        """First column and columns of a sample: multiples of ``begin``."""
        columns, v = problem.taps.columns(problem.length, problem.out_length, problem.padding), self.begin
        first = columns.start // v * v
        return first, -(-(columns.stop - first) // v) * v

    def row_tiles(self, problem: Problem) -> int:
        return -(-problem.out_channels_per_group // self.channels) * self.row_parts

    def tap_chunks(self, problem: Problem) -> int:
        return problem.taps.taps_per_row // self.tap_chunk

    def channel_chunks(self, problem: Problem) -> int:
        return -(-problem.in_channels_per_group // self.block_k)

    def multiplied_taps(self, problem: Problem) -> float:
        """Multiplied taps of a chunk, on average."""
        chunks = problem.taps.rows * self.tap_chunks(problem)
        return problem.kernel_size / chunks if self.uniform else self.tap_chunk


def terms_of_a_partial_sum(problem: Problem) -> int:
    return 192 if problem.taps.rows == 1 else min(256, max(32, problem.in_channels_per_group))


def tap_chunk(problem: Problem, sums: int, thread_n: int) -> int:
    """The most taps that divide a row, fit in registers and are unrolled."""
    t = problem.taps
    fitting = (
        c
        for c in range(1, min(t.taps_per_row, max(1, UNROLL_LIMIT // sums)) + 1)
        if c == 1 or (c * sums <= UNROLL_LIMIT and (c - 1) * t.step <= WINDOW_LIMIT - thread_n)
    )
    return max(c for c in fitting if t.taps_per_row % c == 0)


def make(problem: Problem, dtype: torch.dtype, block_k: int, **tile) -> Config:
    """A configuration; ``tile``: fields of Config, ``tap_chunk`` by default the largest.

    ``x_vector`` becomes 1 where later windows begin inside a vector."""
    t = problem.taps
    chunk = tile.pop("tap_chunk", None) or tap_chunk(problem, tile["thread_m"] * tile["thread_n"], tile["thread_n"])
    ragged, one_phase = problem.kernel_size % t.rows != 0, tile.pop("one_phase", False)
    terms = terms_of_a_partial_sum(problem)
    short = dtype == torch.float64 or problem.terms() <= terms
    if chunk < t.taps_per_row and chunk * t.step % tile.get("x_vector", 1):
        tile["x_vector"] = 1
    tile.setdefault("partial", 0 if short else max(1, terms // (block_k * chunk)))
    config = Config(
        dtype=dtype,
        stride=problem.stride,
        dilation=problem.dilation,
        tap_chunk=chunk,
        several_chunks=chunk < t.taps_per_row,
        ragged=ragged,
        one_phase=one_phase,
        whole_chunks=problem.in_channels_per_group % block_k == 0,
        block_k=block_k,
        **tile,
    )
    return storing_vectors(config, problem)


def storing_vectors(config: Config, problem: Problem) -> Config:
    """The same with vector stores, where y's rows and columns allow."""
    if problem.stride > 1:
        return config
    first, columns = config.columns(problem)
    # At stride 1 a column is an output.
    aligned = not any(v % config.vector for v in (problem.out_length, first - problem.padding, columns))
    return replace(config, y_vector=config.vector if aligned else 1)


def fits(config: Config, device: Device) -> bool:
    need = config.shared_bytes + ENTRY * config.entries + RESERVED_SHARED
    return config.min_blocks * need <= device.shared_per_multiprocessor


def tiny(problem: Problem, dtype: torch.dtype) -> list[Config]:
    one_phase = problem.kernel_size % problem.taps.rows != 0
    v = 16 // (ELEMENTS[dtype].accumulator.bitwidth // 8)
    shapes = (
        dict(block_k=2, block_m=4, block_n=32 * v, lanes_m=1, partial=1),
        dict(block_k=2, block_m=32, block_n=4 * v, lanes_m=8, stages=3, one_phase=one_phase),
        dict(block_k=2, block_m=16, block_n=8 * v, lanes_m=4, tap_chunk=1, partial=2),
    )
    if one_phase and 1 < problem.taps.rows <= 8:
        rows = dict(block_k=2, block_m=8 * problem.taps.rows, block_n=16 * v, lanes_m=2, partial=1, apart=True)
        shapes = (*shapes, rows)
    return [make(problem, dtype, thread_m=4, thread_n=v, **shape) for shape in shapes]
