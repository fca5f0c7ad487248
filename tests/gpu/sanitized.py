"""Small problems that reach every code path of every kernel, to be run under compute-sanitizer (test_sanitizer.py):

    compute-sanitizer --tool memcheck --report-api-errors no python -m tests.gpu.sanitized [rung ...]

Each result is held against float64, so that kernels that compute nothing do not pass. A sanitizer slows a kernel down
up to a hundred times, and a kernel takes seconds to compile: so the problems are tiny, the configurations few, and many
lengths and layouts share one. Small problems go the ways of large ones by ``as_if_large``.

torch computes on the CPU and moves whole storages, by copies that initcheck takes for writes: of what runs on the GPU
only the copy that makes an input contiguous is torch's. Each storage is an allocation of its own, without a cache of
torch's around it: so memcheck sees one byte too many, and initcheck what an earlier tensor would have left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest import mock

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.channel_parts import split
from numba_tconv.kernels.k4_register_tile import tile as k4_config
from numba_tconv.kernels.k6_wgmma import split as k6_split
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.lab.measure.fuzz import bound
from numba_tconv.runtime import device
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS
from tests.few_blocks import few_blocks_are_enough
from tests.gradient_parity import (
    ON_CUDA_CORES,
    ON_TENSOR_CORES,
    gradient_operands,
    gradient_terms,
    inputs_of,
    poisoned_gradient,
    torchs_gradient,
)
from tests.parity import SMALL, operands, poisoned, verdict

from .common import ARITHMETIC, LARGE, TENSOR_ARITHMETIC, TENSOR_CORES, in_float64
from .sanitized_depthwise import DEPTHWISE, depthwise_cases
from .sanitized_doubles import double_cases

MULTIPROCESSORS = 3  # that the rungs are told of


@dataclass(frozen=True)
class Row:
    problem: Problem
    precisions: tuple[str, ...]
    layout: str = "contiguous"  # of input and weight
    offset: int = 0  # elements by which the output begins after its allocation


def _row(sizes, kernel_size, length, *precisions, layout="contiguous", offset=0, **parameters):
    batch, *channels = sizes
    return Row(Problem(batch, *channels, kernel_size, length, **parameters), precisions, layout, offset)


_STRIDE_1 = dict(padding=1, bias=True)
_GAPS = dict(stride=2, dilation=2, bias=True)  # KernelBench 79: every other output is reached by no tap
_APART = dict(stride=4, dilation=134, padding=5, bias=True)
_THIRDS = dict(stride=3, dilation=3)
_DECODER = dict(stride=4, bias=True)
_HALVES = dict(stride=2, padding=3, bias=True)

# For the rungs on tensor cores and, in ieee and fp64, for k4. What each row is there for, and the row; k5 and k6 are
# compiled once for the rows of a paragraph in one precision, k5 once more where rows of x are not at 16 bytes, and once
# more where the elements of a row lie apart.
ROWS = {
    # Stride 1, resident weights, two stages unrolled: cheap, so here are the ways in which rows lie in memory.
    "rows of x and y at 16 bytes": _row((2, 16, 24), 3, 304, "tf32", "ieee", "fp64", **_STRIDE_1),
    "rows at 8 bytes, every second alike": _row((2, 16, 24), 3, 302, "tf32", "ieee", **_STRIDE_1),
    "rows at 4 bytes, every fourth alike": _row((2, 16, 24), 3, 301, "tf32", "ieee", **_STRIDE_1),
    "several tiles a block and warpgroup": _row((1, 16, 24), 3, 2000, "tf32", "tf32x3", **_STRIDE_1),
    "samples that share windows, filled in vectors": _row((9, 16, 24), 3, 24, "tf32", "ieee", **_STRIDE_1),
    "samples that share windows, filled by elements": _row((9, 16, 24), 3, 21, "tf32", **_STRIDE_1),
    "samples at 4 bytes, no tensor map": _row((2, 15, 24), 3, 301, "tf32", padding=1),
    "tails of channels and rows": _row((2, 9, 19), 3, 304, "tf32", "ieee", padding=1),
    "groups of whole stages": _row((2, 32, 48), 3, 304, "tf32", groups=2, **_STRIDE_1),
    "groups of one depth": _row((2, 16, 48), 3, 304, "tf32", groups=2, **_STRIDE_1),
    "groups of part of a stage": _row((2, 24, 48), 3, 304, "tf32", "ieee", groups=2, **_STRIDE_1),
    "x one element past 16 bytes": _row((2, 16, 24), 3, 304, "tf32", "ieee", layout="misaligned", **_STRIDE_1),
    "x transposed": _row((2, 16, 24), 3, 304, "tf32", "ieee", layout="transposed", **_STRIDE_1),
    "x every second": _row((2, 16, 24), 3, 301, "tf32", layout="every_second", **_STRIDE_1),
    "x expanded": _row((2, 16, 24), 3, 304, "tf32", layout="expanded", **_STRIDE_1),
    "y at 16 bytes, which k4 stores in vectors": _row((2, 16, 24), 5, 304, "ieee", "fp64", bias=True),
    "y one element past 16 bytes, for k4": _row((2, 16, 24), 5, 304, "ieee", offset=1, bias=True),
    "y one element past a sector": _row((2, 16, 24), 3, 304, "tf32", offset=1, **_STRIDE_1),
    "y of 8 bytes past a sector": _row((2, 16, 24), 3, 302, "tf32", offset=2, **_STRIDE_1),
    # Resident weights beside which a round of rows has one buffer of both warpgroups: so that the ring is deeper, or
    # because no more fits.
    "rows in rounds, a deeper ring": _row((2, 128, 128), 3, 302, "tf32", padding=2),
    "rows in rounds, a deeper ring, several turns": _row((1, 128, 128), 3, 1498, "tf32"),
    "rows in rounds, a buffer passed on": _row((2, 144, 120), 3, 301, "tf32", **_STRIDE_1),
    "rows in rounds, a buffer passed on, several turns": _row((1, 144, 120), 3, 1500, "tf32", bias=True),
    # Resident weights of k5: beside one buffer for rounds, with tiles of rows, groups, chunks of taps, and phases that
    # no tap reaches.
    "resident, one buffer": _row((1, 128, 128), 3, 1496, "tf32", bias=True),
    "streamed, six warps a tile": _row((2, 16, 48), 3, 304, "tf32x3", **_STRIDE_1),
    "resident, tiles of rows": _row((1, 16, 144), 3, 1000, "tf32", **_STRIDE_1),
    "resident, groups": _row((2, 48, 72), 3, 304, "tf32", groups=3, **_STRIDE_1),
    "resident, chunks of taps": _row((1, 8, 16), 41, 1000, "tf32", padding=20),
    "resident, two of three phases empty": _row((2, 16, 24), 3, 304, "tf32", bias=True, **_THIRDS),
    "two of three phases empty, unaligned": _row((2, 16, 24), 3, 301, "tf32", bias=True, **_THIRDS),
    "phases empty, x every second": _row((2, 16, 24), 3, 301, "tf32", layout="every_second", bias=True, **_THIRDS),
    # Weights that stream, with the most taps: several chunks of them.
    "streamed, several turns": _row((1, 16, 128), 41, 1000, "tf32", "tf32x3", padding=20, bias=True),
    "streamed, every fourth row alike": _row((2, 16, 128), 41, 301, "tf32", "tf32x3", padding=20, bias=True),
    "streamed, filled in vectors": _row((9, 128, 128), 17, 4, "tf32", "tf32x3", padding=8),
    "streamed, filled by elements": _row((9, 128, 128), 17, 5, "tf32", "tf32x3", padding=8),
    "streamed, stages of two depths": _row((2, 1024, 64), 2, 300, "bf16", stride=2, bias=True),
    "streamed, a stage without channels": _row((2, 328, 64), 8, 300, "tf32", "tf32x3", stride=4, padding=2),
    # Outputs that no tap reaches, in a whole tile, stored by fours, twos and ones; 16 bits, every eighth row alike.
    "empty slots, by fours": _row((2, 16, 24), 3, 304, "tf32", "fp16", output_padding=1, **_GAPS),
    "empty slots, by twos": _row((2, 16, 24), 3, 302, "tf32", "fp16", padding=1, output_padding=1, **_GAPS),
    "empty slots, by ones": _row((2, 16, 24), 3, 301, "tf32", "fp16", padding=1, **_GAPS),
    "empty slots, several turns": _row((1, 16, 24), 3, 2000, "tf32", "fp16", output_padding=1, **_GAPS),
    "empty slots, filled in vectors": _row((9, 16, 24), 3, 24, "tf32", "fp16", output_padding=1, **_GAPS),
    "empty slots, filled by elements": _row((9, 16, 24), 3, 21, "tf32", "fp16", padding=1, **_GAPS),
    "empty slots, y past a sector": _row((2, 16, 24), 3, 304, "tf32", "fp16", offset=1, output_padding=1, **_GAPS),
    "empty slots, x within a word": _row((2, 16, 24), 3, 302, "fp16", layout="misaligned", **_GAPS),
    "empty slots, x within a word, odd rows": _row((2, 16, 24), 3, 301, "fp16", layout="misaligned", **_GAPS),
    # For k4: rows of unequal taps, so many that a block has those of one phase.
    "unequal taps, a phase a block": _row((2, 16, 64), 11, 304, "ieee", stride=5, padding=3, bias=True),
    # One column of a sample is more than whole tiles have; groups, and more samples than a block takes.
    "a column left over": _row((3, 32, 24), 8, 128, "tf32", padding=2, groups=2, **_DECODER),
    # More phases than a tile has rows: a part of them in each tile, two phases in the last.
    "part of the phases": _row((2, 16, 2), 260, 40, "bf16", stride=130, padding=7, bias=True),
    "part of the phases, unaligned": _row((3, 16, 2), 260, 37, "bf16", stride=130, padding=7, bias=True),
    # Phases of neighbouring outputs far apart: a single row of taps in a tile. Few channels, so that k6 has a stage
    # without any.
    "single row of taps": _row((2, 7, 9), 4, 400, "tf32", "ieee", **_APART),
    "single row of taps, unaligned": _row((2, 8, 9), 4, 401, "tf32", **_APART),
    # Split operands; a decoder's layer, whose phases interleave, in two row tiles.
    "split operands": _row((2, 16, 24), 8, 128, "tf32x3", "ieee", padding=2, **_DECODER),
    "split operands, every second row alike": _row((2, 16, 24), 8, 130, "tf32x3", padding=1, **_DECODER),
    "split operands, every fourth alike": _row((2, 16, 24), 8, 121, "tf32x3", padding=2, output_padding=1, **_DECODER),
    "split operands, several turns": _row((1, 16, 24), 8, 1000, "tf32x3", padding=2, **_DECODER),
    "split operands, filled in vectors": _row((9, 16, 24), 8, 24, "tf32x3", padding=2, **_DECODER),
    "split operands, filled by elements": _row((9, 16, 24), 8, 21, "tf32x3", padding=2, **_DECODER),
    # Split by the warps that copy, as they are where weights stream above, beside resident weights.
    "split ahead, every fourth row alike": _row((2, 16, 24), 5, 301, "tf32x3", dilation=3, bias=True),
    "split ahead, filled by elements": _row((9, 16, 24), 5, 9, "tf32x3", dilation=3, bias=True),
    # 16-bit elements without a stride: outputs side by side, in runs that begin at words, or by turns within one.
    "halves side by side": _row((2, 16, 24), 3, 304, "bf16", bias=True),
    "halves side by side, odd rows": _row((2, 16, 24), 3, 301, "bf16", bias=True),
    # 16-bit elements with streamed weights: two windows in a stage, every eighth row alike.
    "halves, streamed": _row((2, 256, 64), 8, 304, "bf16", **_HALVES),
    "halves, streamed, several turns": _row((1, 256, 64), 8, 1000, "bf16", **_HALVES),
    "halves, streamed, every eighth row alike": _row((2, 256, 64), 8, 301, "bf16", output_padding=1, **_HALVES),
    "halves, streamed, x within a word": _row((2, 256, 64), 8, 302, "bf16", layout="misaligned", **_HALVES),
    "halves, streamed, x within a word, odd rows": _row((2, 256, 64), 8, 301, "bf16", layout="misaligned", **_HALVES),
    "halves, streamed, a column left over": _row((3, 256, 64), 8, 127, "bf16", **_HALVES),
    "halves, streamed, filled in vectors": _row((9, 256, 64), 8, 24, "bf16", **_HALVES),
    "halves, streamed, filled by elements": _row((9, 256, 64), 8, 21, "bf16", **_HALVES),
}

# Of SMALL: for what does not depend on the index formula. Several tiles, and groups.
FEW = ("positions past one tile, strided", "groups, unequal channels")
# For the tiny tiles of the gradients, some of which take a part of the phases.
TENSOR_GRADIENTS = {
    "stride 1, odd padding": Problem(2, 24, 16, 3, 40, padding=1),
    "padding larger than the kernel": Problem(2, 24, 16, 3, 40, padding=5),
    "the usual decoder layer": Problem(2, 72, 40, 4, 300, stride=2, padding=1),
    "eight phases": Problem(1, 24, 16, 16, 48, stride=8, padding=4),
    "rows that begin anywhere": Problem(2, 24, 16, 6, 37, stride=3),
    "a row of taps that fills no stage": Problem(1, 64, 20, 3, 40, stride=2, padding=1, dilation=2),
    "many taps, in chunks": Problem(1, 24, 16, 40, 64),
    "groups": Problem(1, 32, 48, 4, 40, stride=2, groups=2),
    "tiles of all kinds": Problem(1, 264, 136, 4, 300, stride=2),
    "many weights, a phase without its second tap": Problem(1, 264, 72, 15, 40, stride=8),
}
# For grad_input_wgmma: stages that run on through the channels, and rows that begin unlike, which it reads in place.
INPUT_GRADIENTS = {
    "ten taps": Problem(1, 64, 40, 10, 40, stride=5, padding=3, output_padding=1),
    "eleven taps, every second row alike or all": Problem(2, 64, 24, 11, 36, stride=5, padding=3),
    "eleven taps, every fourth row alike or second": Problem(2, 64, 24, 11, 38, stride=5, padding=3),
    "six taps, two tiles of a sample": Problem(1, 24, 64, 6, 300, stride=2, padding=1),
    "six taps, tiles in turn": Problem(1, 264, 24, 6, 301, stride=2, padding=1),
    "groups, stages to their ends": Problem(1, 32, 64, 6, 40, stride=2, padding=1, groups=2),
    "every eighth row alike or fourth, two tiles": Problem(2, 24, 16, 4, 300, stride=2, padding=1, output_padding=1),
    "rows that begin unlike, nothing to clear": Problem(2, 24, 24, 10, 37, stride=5),
    "more taps than a stage, padding": Problem(2, 24, 24, 77, 20, stride=3, padding=40),
    "padding larger than a tile": Problem(1, 24, 16, 3, 400, stride=2, padding=300),
    "parts of a tile, ten taps": Problem(1, 24, 96, 10, 37, stride=5, padding=2),
    "parts of a tile, eight taps": Problem(1, 24, 192, 8, 40, stride=4, padding=2),
}
# For grad_weight_wgmma: tiles that begin within a channel; of planes, stored as the gradient.
WEIGHT_GRADIENTS = {
    "eleven taps, rows that begin unlike": Problem(3, 264, 24, 11, 38, stride=5, padding=3),
    "eleven taps, warpgroups in turn": Problem(2, 24, 4, 11, 200, stride=5, padding=3),
    "phases taken apart, whole sums": Problem(2, 24, 3, 512, 20, stride=256, padding=100),
}
FEW_GRADIENTS = ("K = 2s, the usual decoder layer", "groups, unequal channels")


@dataclass(frozen=True)
class Forward:
    """A problem, and the rung that computes it."""

    reason: str
    rung: str
    problem: Problem
    dtype: torch.dtype
    precision: str
    layout: str = "contiguous"
    offset: int = 0
    config: object = None

    def refusal(self) -> str | None:
        return RUNGS[self.rung].runs_on(device.current_device())

    def wrong(self, where: str = "cuda") -> str | None:
        """Compute it; None if the result is right."""
        p, dtype = self.problem, self.dtype
        x, w, bias = operands(p, dtype, "cpu", self.layout)
        y = poisoned(p, dtype)
        around = moved(torch.full((self.offset + y.numel(),), math.nan, dtype=dtype), where)
        there = (None if t is None else moved(t, where) for t in (x, w, bias))
        RUNGS[self.rung].run(*there, around[self.offset :].view(y.shape), p, self.config, self.precision)
        before, y = around.cpu().split((self.offset, y.numel()))
        if not before.isnan().all():
            return "it wrote before the output"
        far = (y.view_as(poisoned(p, dtype)).double() - in_float64(x, w, bias, p)).abs()
        wrong = ~(far <= bound("forward", (x, w, bias), p, dtype, self.precision))  # true for NaN too
        return f"{wrong.sum()} wrong outputs" if wrong.any() else None


@dataclass(frozen=True)
class Gradient:
    """A problem, and the rung that computes one of its gradients."""

    reason: str
    rung: str
    problem: Problem
    dtype: torch.dtype
    layout: str = "contiguous"
    config: object = None
    precision: str | None = None

    def refusal(self) -> str | None:
        return GRADIENTS[self.rung].runs_on(device.current_device())

    def wrong(self, where: str = "cuda") -> str | None:
        rung, p = GRADIENTS[self.rung], self.problem
        g, x, w = gradient_operands(p, self.dtype, "cpu", self.layout)
        torchs = torchs_gradient(rung.of, g, x, w, p)
        oracle = torchs_gradient(rung.of, g.double(), x.double(), w.double(), p)
        result = moved(poisoned_gradient(rung.of, p, self.dtype), where)
        rung.run(*inputs_of(rung.of, *(moved(t, where) for t in (g, x, w))), result, p, self.config, self.precision)
        return verdict(result.cpu(), torchs, oracle, gradient_terms(rung.of, p), self.precision)


def moved(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """The tensor with all of its storage: torch's own copy would make it contiguous, by a kernel."""
    storage = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    return storage.to(where, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@contextlib.contextmanager
def as_if_large() -> Iterator[None]:
    """Few multiprocessors and blocks are enough: then a block of a small problem, too, takes several tiles (k6), a team
    several passes (depthwise), and a split several stages (the gradients)."""
    of = device.of
    with (
        mock.patch.object(device, "of", lambda index: replace(of(index), multiprocessors=MULTIPROCESSORS)),
        few_blocks_are_enough(),
    ):
        yield


def cases() -> list[Forward | Gradient]:
    """All of them; within ``as_if_large``."""
    of_gradients = *_of_gradients(), *_of_gradients_on_tensor_cores()
    of_depthwise = (Forward(rung="depthwise", **case) for case in depthwise_cases())
    of_doubles = (Forward(rung="k5_dmma", **case) for case in double_cases(ROWS))
    return [*_of_rows(), *of_doubles, *_of_split_sums(), *_on_cuda_cores(), *of_depthwise, *of_gradients]


def _of_rows():
    dtypes = {precision: dtype for dtype, precision in ARITHMETIC}
    on_tensor_cores = [precision for _, precision in TENSOR_ARITHMETIC]
    for reason, row in ROWS.items():
        for precision in row.precisions:
            rungs = TENSOR_CORES if precision in on_tensor_cores else [RUNGS["k4_register_tile"]]
            for rung in rungs:
                case = Forward(reason, rung.name, row.problem, dtypes[precision], precision, row.layout, row.offset)
                if rung.name == "k6_wgmma":
                    yield from (replace(case, config=config) for config in _highest(row.problem, precision))
                else:
                    yield case


def _highest(problem, precision):
    """Configurations of k6 with the highest tile: all ways to store its outputs. The one that is chosen for so small a
    problem would often have a lower tile, and then resident weights."""
    configs = k6_config.configs(problem, precision)
    return [config for config in configs if config.tile.rows == configs[0].tile.rows]


def _of_split_sums():
    """k6 and the kernel that adds up its partial sums: the outputs of a whole tile and of a part of the phases. That
    kernel stores vectors; where y begins elsewhere, their outputs; after k4 it adds up outputs one by one."""
    whole = Problem(2, 64, 24, 8, 21, stride=4, padding=2, bias=True)
    part = Problem(3, 64, 2, 260, 37, stride=130, padding=7)
    for reason, problem in (("channels in parts", whole), ("channels in parts, part of the phases", part)):
        for dtype, precision in ((torch.float32, "tf32"), (torch.bfloat16, "bf16")):
            first = k6_split.candidates(problem, precision)[0]
            for offset in (0, 1):
                yield Forward(reason, "k6_wgmma", problem, dtype, precision, offset=offset, config=first)
    odd = Problem(2, 32, 3, 5, 21, padding=2, bias=True)
    tile = k4_config.tiny(split(odd, 2), torch.float32)[0]
    yield Forward("channels in parts", "k4_register_tile", odd, torch.float32, "ieee", config=replace(tile, splits=2))


def _on_cuda_cores():
    long = replace(LARGE["HiFi-GAN's third layer"], length=20)  # more channels than one sum, or one stage of k3, takes
    for name in ("k1_gather", "k2_polyphase", "k3_shared_tile"):
        for reason, problem in {**SMALL, "128 channels": long}.items():
            yield Forward(reason, name, problem, torch.float32, "ieee")
        for dtype, precision in ARITHMETIC:
            if RUNGS[name].supports(SMALL[FEW[0]], dtype, precision) is None:
                yield Forward(FEW[0], name, SMALL[FEW[0]], dtype, precision, "transposed")
    # One thread an output needs no tiny tiles.
    for name, dtypes in (("k3_shared_tile", (torch.float32,)), ("k4_register_tile", (torch.float32, torch.float64))):
        for dtype in dtypes:
            for reason in FEW if dtype == torch.float32 else FEW[:1]:
                for config in RUNGS[name].tiny_configs(SMALL[reason], dtype):
                    precision = "ieee" if dtype == torch.float32 else "fp64"
                    yield Forward(reason, name, SMALL[reason], dtype, precision, config=config)
    ragged = "K not a multiple of the stride"  # the last tap of a row exists in some rows only
    for config in (None, *RUNGS["k4_register_tile"].tiny_configs(SMALL[ragged], torch.float32)):
        yield Forward(ragged, "k4_register_tile", SMALL[ragged], torch.float32, "ieee", config=config)


def _of_gradients():
    for name, rung in ON_CUDA_CORES.items():
        for reason in FEW_GRADIENTS:
            for config in (None, *rung.tiny_configs(SMALL[reason], torch.float32)):
                yield Gradient(reason, name, SMALL[reason], torch.float32, config=config)
        yield Gradient("transposed", name, SMALL[FEW[0]], torch.float32, "transposed")
        # Several tiles; x in vectors of 16 bytes; phases that no tap reaches.
        for reason in (FEW[0], "stride 1, dilation", "K < s, phases without taps"):
            yield Gradient(reason, name, SMALL[reason], torch.float32)
        for dtype in (torch.float64, torch.bfloat16):
            yield Gradient(FEW[0], name, SMALL[FEW[0]], dtype)
    unequal = Problem(2, 6, 4, 11, 40, stride=5, padding=3)
    for name in ("grad_input_tile", "grad_weight_split"):
        for config in (None, *GRADIENTS[name].tiny_configs(unequal, torch.float32)):
            yield Gradient("unequal taps", name, unequal, torch.float32, config=config)
    for name in ("grad_input_depthwise", "grad_weight_depthwise"):
        for reason in ("equal taps, many rows", "equal taps, a vector in a column"):
            for layout in ("contiguous", "expanded"):
                yield Gradient(reason, name, DEPTHWISE[reason], torch.bfloat16, layout)


def _of_gradients_on_tensor_cores():
    for name, rung in ON_TENSOR_CORES.items():
        own = {"grad_input_wgmma": INPUT_GRADIENTS, "grad_weight_wgmma": WEIGHT_GRADIENTS}.get(name, {})
        for reason, problem in {**TENSOR_GRADIENTS, **own}.items():
            for dtype, precision in ((torch.float32, "tf32"), (torch.bfloat16, "bf16"), (torch.float64, "fp64")):
                if rung.supports(problem, dtype, precision) is None:
                    yield Gradient(reason, name, problem, dtype, precision=precision)


def main(argv: list[str] | None = None) -> int:
    names = [*RUNGS, *GRADIENTS]
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitized", description=__doc__.partition("\n")[0])
    parser.add_argument("rung", nargs="*", help=f"of {', '.join(names)}; all if none is named")
    chosen = parser.parse_args(argv).rung or names
    if unknown := set(chosen) - set(names):
        parser.error(f"no rung: {', '.join(sorted(unknown))}")
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # read at the first allocation
    right = wrong = 0
    with as_if_large():
        for case in cases():
            if case.rung not in chosen:
                continue
            if reason := case.refusal():
                print(f"passed over: {case.rung}: {reason}")
                continue
            torch.manual_seed(0)
            if mistake := case.wrong():
                print(f"WRONG: {mistake}: {case}")
                wrong += 1
            else:
                right += 1
    print(f"{right} right, {wrong} wrong")
    return 0 if right and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
