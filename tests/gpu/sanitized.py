"""Small problems that reach every code path of every kernel, to be run under compute-sanitizer (test_sanitizer.py):

    compute-sanitizer --tool memcheck --report-api-errors no python -m tests.gpu.sanitized [rung ...]

Each result is compared with float64. Sanitizers are slow, so problems are tiny, configurations few, and lengths and
layouts share them. ``as_if_large`` gives small problems the code paths of large ones.

torch computes on the CPU and moves whole storages, by copies that initcheck takes for writes. Each storage is an
allocation of its own, so that memcheck sees one byte too many, and initcheck no earlier tensor.
"""

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
from numba_tconv.kernels.common.split_sums import split
from numba_tconv.kernels.k4_register_tile import tile as k4_config
from numba_tconv.kernels.k6_wgmma import choose as k6_choose
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.kernels.k6_wgmma.unpacked import with_unpacked
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
from .sanitized_alias_free import RUNG as ACTIVATION
from .sanitized_alias_free import activation_cases
from .sanitized_depthwise import DEPTHWISE, depthwise_cases
from .sanitized_doubles import double_cases
from .sanitized_streaming import RUNG as STEP
from .sanitized_streaming import step_cases

MULTIPROCESSORS = 3  # as reported to the rungs


@dataclass(frozen=True)
class Row:
    problem: Problem
    precisions: tuple[str, ...]
    layout: str = "contiguous"  # of input and weight
    offset: int = 0  # elements from the allocation's start to the output's


def _row(sizes, kernel_size, length, *precisions, layout="contiguous", offset=0, **parameters):
    batch, *channels = sizes
    return Row(Problem(batch, *channels, kernel_size, length, **parameters), precisions, layout, offset)


_STRIDE_1 = dict(padding=1, bias=True)
_GAPS = dict(stride=2, dilation=2, bias=True)  # KernelBench 79: no tap reaches every other output
_APART = dict(stride=4, dilation=134, padding=5, bias=True)
_THIRDS = dict(stride=3, dilation=3)
_DECODER = dict(stride=4, bias=True)
_HALVES = dict(stride=2, padding=3, bias=True)

# Reason and problem, for the tensor-core rungs and, in ieee and fp64, for k4. k5 and k6 are compiled once a paragraph
# and precision; k5 again for rows of x not at 16 bytes, and for separate elements.
ROWS = {
    # Stride 1, resident weights, two stages unrolled: cheap, so memory layouts of rows are tried here.
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
    # Resident weights; both warpgroups share a buffer of row rounds, for a deeper ring or lack of space.
    "rows in rounds, a deeper ring": _row((2, 128, 128), 3, 302, "tf32", padding=2),
    "rows in rounds, a deeper ring, several turns": _row((1, 128, 128), 3, 1498, "tf32"),
    "rows in rounds, a buffer passed on": _row((2, 144, 120), 3, 301, "tf32", **_STRIDE_1),
    "rows in rounds, a buffer passed on, several turns": _row((1, 144, 120), 3, 1500, "tf32", bias=True),
    # k5's resident weights: one buffer for rounds, tiles of rows, groups, chunks of taps, phases without taps.
    "resident, one buffer": _row((1, 128, 128), 3, 1496, "tf32", bias=True),
    "streamed, six warps a tile": _row((2, 16, 48), 3, 304, "tf32x3", **_STRIDE_1),
    "resident, tiles of rows": _row((1, 16, 144), 3, 1000, "tf32", **_STRIDE_1),
    "resident, groups": _row((2, 48, 72), 3, 304, "tf32", groups=3, **_STRIDE_1),
    "resident, chunks of taps": _row((1, 8, 16), 41, 1000, "tf32", padding=20),
    "resident, two of three phases empty": _row((2, 16, 24), 3, 304, "tf32", bias=True, **_THIRDS),
    "two of three phases empty, unaligned": _row((2, 16, 24), 3, 301, "tf32", bias=True, **_THIRDS),
    "phases empty, x every second": _row((2, 16, 24), 3, 301, "tf32", layout="every_second", bias=True, **_THIRDS),
    # Streamed weights with the most taps, in several chunks.
    "streamed, several turns": _row((1, 16, 128), 41, 1000, "tf32", "tf32x3", padding=20, bias=True),
    "streamed, every fourth row alike": _row((2, 16, 128), 41, 301, "tf32", "tf32x3", padding=20, bias=True),
    "streamed, filled in vectors": _row((9, 128, 128), 17, 4, "tf32", "tf32x3", padding=8),
    "streamed, filled by elements": _row((9, 128, 128), 17, 5, "tf32", "tf32x3", padding=8),
    "streamed, stages of two depths": _row((2, 1024, 64), 2, 300, "bf16", stride=2, bias=True),
    "streamed, a stage without channels": _row((2, 328, 64), 8, 300, "tf32", "tf32x3", stride=4, padding=2),
    # Outputs without taps, in a whole tile, stored by fours, twos and ones; 16 bits, every eighth row alike.
    "empty slots, by fours": _row((2, 16, 24), 3, 304, "tf32", "fp16", output_padding=1, **_GAPS),
    "empty slots, by twos": _row((2, 16, 24), 3, 302, "tf32", "fp16", padding=1, output_padding=1, **_GAPS),
    "empty slots, by ones": _row((2, 16, 24), 3, 301, "tf32", "fp16", padding=1, **_GAPS),
    "empty slots, several turns": _row((1, 16, 24), 3, 2000, "tf32", "fp16", output_padding=1, **_GAPS),
    "empty slots, filled in vectors": _row((9, 16, 24), 3, 24, "tf32", "fp16", output_padding=1, **_GAPS),
    "empty slots, filled by elements": _row((9, 16, 24), 3, 21, "tf32", "fp16", padding=1, **_GAPS),
    "empty slots, y past a sector": _row((2, 16, 24), 3, 304, "tf32", "fp16", offset=1, output_padding=1, **_GAPS),
    "empty slots, x within a word": _row((2, 16, 24), 3, 302, "fp16", layout="misaligned", **_GAPS),
    "empty slots, x within a word, odd rows": _row((2, 16, 24), 3, 301, "fp16", layout="misaligned", **_GAPS),
    # k4: rows of unequal taps; a block has the rows of one phase.
    "unequal taps, a phase a block": _row((2, 16, 64), 11, 304, "ieee", stride=5, padding=3, bias=True),
    # A sample's last column needs more than whole tiles; groups, and more samples than a block takes.
    "a column left over": _row((3, 32, 24), 8, 128, "tf32", padding=2, groups=2, **_DECODER),
    # More phases than a tile's rows: each tile has some, the last has two.
    "part of the phases": _row((2, 16, 2), 260, 40, "bf16", stride=130, padding=7, bias=True),
    "part of the phases, unaligned": _row((3, 16, 2), 260, 37, "bf16", stride=130, padding=7, bias=True),
    # Neighbouring outputs' phases far apart: a tile has one row of taps. Few channels: a stage of k6 has none.
    "single row of taps": _row((2, 7, 9), 4, 400, "tf32", "ieee", **_APART),
    "single row of taps, unaligned": _row((2, 8, 9), 4, 401, "tf32", **_APART),
    # Split operands; a decoder's layer with interleaved phases, in two row tiles.
    "split operands": _row((2, 16, 24), 8, 128, "tf32x3", "ieee", padding=2, **_DECODER),
    "split operands, every second row alike": _row((2, 16, 24), 8, 130, "tf32x3", padding=1, **_DECODER),
    "split operands, every fourth alike": _row((2, 16, 24), 8, 121, "tf32x3", padding=2, output_padding=1, **_DECODER),
    "split operands, several turns": _row((1, 16, 24), 8, 1000, "tf32x3", padding=2, **_DECODER),
    "split operands, filled in vectors": _row((9, 16, 24), 8, 24, "tf32x3", padding=2, **_DECODER),
    "split operands, filled by elements": _row((9, 16, 24), 8, 21, "tf32x3", padding=2, **_DECODER),
    # Producers split beside resident weights; above they do beside streamed ones.
    "split ahead, every fourth row alike": _row((2, 16, 24), 5, 301, "tf32x3", dilation=3, bias=True),
    "split ahead, filled by elements": _row((9, 16, 24), 5, 9, "tf32x3", dilation=3, bias=True),
    # 16 bits without a stride: adjacent outputs, in runs that begin at words, or alternately within one.
    "halves side by side": _row((2, 16, 24), 3, 304, "bf16", bias=True),
    "halves side by side, odd rows": _row((2, 16, 24), 3, 301, "bf16", bias=True),
    # 16 bits with streamed weights: two windows in a stage, every eighth row alike.
    "halves, streamed": _row((2, 256, 64), 8, 304, "bf16", **_HALVES),
    "halves, streamed, several turns": _row((1, 256, 64), 8, 1000, "bf16", **_HALVES),
    "halves, streamed, every eighth row alike": _row((2, 256, 64), 8, 301, "bf16", output_padding=1, **_HALVES),
    "halves, streamed, x within a word": _row((2, 256, 64), 8, 302, "bf16", layout="misaligned", **_HALVES),
    "halves, streamed, x within a word, odd rows": _row((2, 256, 64), 8, 301, "bf16", layout="misaligned", **_HALVES),
    "halves, streamed, a column left over": _row((3, 256, 64), 8, 127, "bf16", **_HALVES),
    "halves, streamed, filled in vectors": _row((9, 256, 64), 8, 24, "bf16", **_HALVES),
    "halves, streamed, filled by elements": _row((9, 256, 64), 8, 21, "bf16", **_HALVES),
}

# Independent of the index formula: several tiles, and groups.
FEW = ("positions past one tile, strided", "groups, unequal channels")
# For the gradients' tiny tiles, some of which take only some of the phases.
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
# For grad_input_wgmma: stages that run on through the channels; rows that begin differently, read in place.
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
# For grad_weight_wgmma: tiles that begin within a channel; planes, stored as the gradient.
WEIGHT_GRADIENTS = {
    "eleven taps, rows that begin unlike": Problem(3, 264, 24, 11, 38, stride=5, padding=3),
    "eleven taps, warpgroups in turn": Problem(2, 24, 4, 11, 200, stride=5, padding=3),
    "phases taken apart, whole sums": Problem(2, 24, 3, 512, 20, stride=256, padding=100),
}
FEW_GRADIENTS = ("K = 2s, the usual decoder layer", "groups, unequal channels")


@dataclass(frozen=True)
class Forward:
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
        """None if the result is right."""
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
        wrong = ~(far <= bound("forward", (x, w, bias), p, dtype, self.precision))  # NaN too
        return f"{wrong.sum()} wrong outputs" if wrong.any() else None


@dataclass(frozen=True)
class Gradient:
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
    """The tensor with its whole storage, moved without a kernel."""
    storage = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    return storage.to(where, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@contextlib.contextmanager
def as_if_large() -> Iterator[None]:
    """Few multiprocessors and blocks suffice, so small problems have several tiles, passes or stages each."""
    of = device.of
    with (
        mock.patch.object(device, "of", lambda index: replace(of(index), multiprocessors=MULTIPROCESSORS)),
        few_blocks_are_enough(),
    ):
        yield


def cases() -> list[Forward | Gradient]:
    """All cases; call within ``as_if_large``."""
    of_gradients = *_of_gradients(), *_of_gradients_on_tensor_cores()
    of_depthwise = (Forward(rung="depthwise", **case) for case in depthwise_cases())
    of_doubles = (Forward(rung="k5_dmma", **case) for case in double_cases(ROWS))
    return [
        *_of_rows(),
        *of_doubles,
        *_of_split_sums(),
        *_of_unpacked(),
        *_on_cuda_cores(),
        *of_depthwise,
        *of_gradients,
    ]


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
    """k6's configurations with the highest tile, for all ways to store; small problems would often get a lower one."""
    configs = k6_config.configs(problem, precision)
    return [config for config in configs if config.tile.rows == configs[0].tile.rows]


def _of_split_sums():
    """k6 and the kernel that adds its partial sums, by vectors, or single outputs where y begins elsewhere."""
    whole = Problem(2, 64, 24, 8, 21, stride=4, padding=2, bias=True)
    part = Problem(3, 64, 2, 260, 37, stride=130, padding=7)
    for reason, problem in (("channels in parts", whole), ("channels in parts, part of the phases", part)):
        for dtype, precision in ((torch.float32, "tf32"), (torch.bfloat16, "bf16")):
            first = k6_choose.split_configs(problem, precision)[0]
            for offset in (0, 1):
                yield Forward(reason, "k6_wgmma", problem, dtype, precision, offset=offset, config=first)
    odd = Problem(2, 32, 3, 5, 21, padding=2, bias=True)
    tile = k4_config.tiny(split(odd, 2), torch.float32)[0]
    yield Forward("channels in parts", "k4_register_tile", odd, torch.float32, "ieee", config=replace(tile, splits=2))


def _of_unpacked():
    """k6 with unpacked weights: with and without a lone last column apart, and channels in parts."""
    problem = Problem(1, 1024, 32, 16, 128, stride=8, padding=4, bias=True)
    for dtype, precision in ((torch.float32, "tf32"), (torch.bfloat16, "bf16")):
        for config in (*_highest(problem, precision), *k6_choose.split_configs(problem, precision)[2:3]):
            if way := with_unpacked(split(problem, config.splits), config):
                yield Forward("unpacked weights", "k6_wgmma", problem, dtype, precision, config=way)


def _on_cuda_cores():
    long = replace(LARGE["HiFi-GAN's third layer"], length=20)  # more channels than one sum or a stage of k3 takes
    for name in ("k1_gather", "k2_polyphase", "k3_shared_tile"):
        for reason, problem in {**SMALL, "128 channels": long}.items():
            yield Forward(reason, name, problem, torch.float32, "ieee")
        for dtype, precision in ARITHMETIC:
            if RUNGS[name].supports(SMALL[FEW[0]], dtype, precision) is None:
                yield Forward(FEW[0], name, SMALL[FEW[0]], dtype, precision, "transposed")
    # Rungs with one thread an output need no tiny tiles.
    for name, dtypes in (("k3_shared_tile", (torch.float32,)), ("k4_register_tile", (torch.float32, torch.float64))):
        for dtype in dtypes:
            for reason in FEW if dtype == torch.float32 else FEW[:1]:
                for config in RUNGS[name].tiny_configs(SMALL[reason], dtype):
                    precision = "ieee" if dtype == torch.float32 else "fp64"
                    yield Forward(reason, name, SMALL[reason], dtype, precision, config=config)
    ragged = "K not a multiple of the stride"  # only some rows have a last tap
    for config in (None, *RUNGS["k4_register_tile"].tiny_configs(SMALL[ragged], torch.float32)):
        yield Forward(ragged, "k4_register_tile", SMALL[ragged], torch.float32, "ieee", config=config)


def _of_gradients():
    for name, rung in ON_CUDA_CORES.items():
        for reason in FEW_GRADIENTS:
            for config in (None, *rung.tiny_configs(SMALL[reason], torch.float32)):
                yield Gradient(reason, name, SMALL[reason], torch.float32, config=config)
        yield Gradient("transposed", name, SMALL[FEW[0]], torch.float32, "transposed")
        # Several tiles; x in vectors of 16 bytes; phases without taps.
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
    names = [*RUNGS, *GRADIENTS, STEP, ACTIVATION]
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitized", description=__doc__.partition("\n")[0])
    parser.add_argument("rung", nargs="*", help=f"of {', '.join(names)}; all if none is named")
    chosen = parser.parse_args(argv).rung or names
    if unknown := set(chosen) - set(names):
        parser.error(f"no rung: {', '.join(sorted(unknown))}")
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # read at the first allocation
    right = wrong = 0
    with as_if_large():
        for case in (*cases(), *step_cases(), *activation_cases()):
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
