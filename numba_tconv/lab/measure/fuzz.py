"""Random problems on every rung and gradient, against float64. Seed and number determine a case."""

import itertools
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from numba_tconv.formula.padding import WORDS, parts_of
from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.cli import commands
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime import device
from numba_tconv.selection.directions import rung_direction
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS
from numba_tconv.torch_api import gradient_operators as grad_ops
from numba_tconv.torch_api import torchs

from .bench import DTYPES
from .directions import Operands


class Structure(NamedTuple):
    stride: int
    kernel_size: int
    dilation: int
    in_per_group: int
    out_per_group: int


# Few, to limit compilation.
_USUAL = [
    *[(1, 1, 1, 16, 16), (1, 3, 1, 128, 128), (1, 5, 3, 32, 64), (1, 7, 1, 24, 130), (1, 11, 5, 17, 40)],
    *[(1, 41, 1, 9, 10), (2, 4, 1, 128, 64), (2, 3, 2, 32, 64), (2, 2, 1, 40, 72), (2, 5, 3, 20, 33)],
    *[(3, 7, 1, 37, 53), (3, 7, 5, 16, 24), (4, 8, 1, 48, 8), (4, 6, 2, 8, 16), (5, 10, 1, 64, 32)],
    *[(5, 3, 1, 10, 12), (6, 9, 4, 12, 20), (8, 16, 1, 64, 32), (8, 9, 12, 24, 40), (16, 32, 1, 16, 9)],
    *[(12, 5, 18, 8, 8), (100, 130, 1, 8, 3), (256, 512, 1, 8, 1), (2, 4, 1, 1, 1), (1, 9, 700, 16, 16)],
]
_TINY = [(1, 3, 1, 2, 3), (2, 4, 1, 3, 2), (2, 3, 2, 2, 2), (3, 5, 2, 1, 3), (4, 2, 1, 2, 1), (2, 3, 5, 1, 1)]
STRUCTURES, TINY_STRUCTURES = ([Structure(*numbers) for numbers in some] for some in (_USUAL, _TINY))
REPORT_S = 30


class Mismatch(AssertionError):
    """A result that no order of sums explains."""


@dataclass(frozen=True)
class Layout:
    """``order``: outermost dimension first; ``gaps``: factors of dense strides (0 repeats a number); ``shift``:
    elements before the tensor."""

    order: tuple[int, int, int] = (0, 1, 2)
    gaps: tuple[int, int, int] = (1, 1, 1)
    shift: int = 0

    def random(self, shape, dtype, generator):
        strides, below = [0, 0, 0], 1
        for d in reversed(self.order):
            strides[d] = below * self.gaps[d]
            below = max(below, strides[d] * shape[d])
        span = self.shift + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        numbers = torch.randn(span, generator=generator, device=generator.device).to(dtype)
        return numbers.as_strided(shape, strides, self.shift)


@dataclass(frozen=True)
class Case:
    """``layouts``: of input, weight, grad_output."""

    rung: str
    problem: Problem
    dtype: str
    precision: str
    layouts: tuple[Layout, Layout, Layout]
    seed: int

    def line(self) -> str:
        return f"from numba_tconv.lab.measure.fuzz import *; {self!r}.check()"

    def check(self) -> None:
        p, dtype, where = self.problem, DTYPES[self.dtype], "cpu" if SIMULATOR else "cuda"
        generator = torch.Generator(where).manual_seed(self.seed)
        shapes = p.in_shape, p.weight_shape, p.out_shape
        x, w, g = (one.random(shape, dtype, generator) for one, shape in zip(self.layouts, shapes, strict=True))
        bias = Layout().random((1, 1, p.out_channels), dtype, generator)[0, 0] if p.bias else None
        rung, of = (RUNGS | GRADIENTS)[self.rung], rung_direction(self.rung)
        operands = Operands(x, w, bias, g).of(of)
        result = torch.full(p.shape_of(of), math.nan, dtype=dtype, device=where)
        # Tiny tiles give tiny problems seams and tails.
        config = rung.tiny_configs(p, dtype)[0] if SIMULATOR else None
        rung.run(*operands, result, p, config, self.precision)
        far = (result.double() - in_float64(of, operands, p)).abs()
        wrong = ~(far <= bound(of, operands, p, dtype, self.precision))  # NaN too
        if wrong.any():
            raise Mismatch(f"{int(wrong.sum())} of {wrong.numel()} elements are wrong, the worst by {far.max():.3g}")


def in_float64(of: str, operands, problem: Problem) -> torch.Tensor:
    p = problem
    first, *others = (None if t is None else t.double() for t in operands)
    if of == "forward":
        return torchs.forward(first, *others, *p.parameters)
    if of == "grad_bias":
        return first.sum((0, 2))
    if of == "grad_input":
        return grad_ops.torchs_input(first, *others, p.length, p.parameters)
    return grad_ops.torchs_weight(first, *others, p.kernel_size, p.parameters)


def bound(of: str, operands, problem: Problem, dtype: torch.dtype, precision: str) -> torch.Tensor:
    """Each element's largest difference from float64, in any order of its sum.

    Operands, additions (doubled: tensor cores truncate) and the result are rounded.
    """
    magnitude = in_float64(of, [None if t is None else t.abs() for t in operands], problem)
    operands_rounding = 2**-10 + 2**-20 if precision == "tf32" else 0
    additions = (problem.terms(of) + 8) * (2**-52 if dtype == torch.float64 else 2**-22)
    stored = torch.finfo(dtype)
    return magnitude * (operands_rounding + additions + stored.eps / 2) + stored.smallest_normal


def draw(seed: int, number: int) -> Case:
    drawn = random.Random(f"{seed} {number}")
    gpu = device.current_device()
    while True:
        problem = _problem(drawn)
        name, dtype = drawn.choice([*RUNGS, *GRADIENTS]), drawn.choice(list(PRECISIONS))
        precision = drawn.choice(PRECISIONS[dtype])
        rung = (RUNGS | GRADIENTS)[name]
        if rung.refusal(problem, dtype, precision, gpu) is None:
            layouts = tuple(_layout(drawn) for _ in range(3))
            return Case(name, problem, str(dtype).removeprefix("torch."), precision, layouts, drawn.getrandbits(31))


def _problem(drawn: random.Random) -> Problem:
    structure = drawn.choice(TINY_STRUCTURES if SIMULATOR else STRUCTURES)
    stride, kernel_size, dilation = structure.stride, structure.kernel_size, structure.dilation
    # Around one tile of columns and beyond; less for long strides.
    longest = 12 if SIMULATOR else drawn.choice((140, max(1, 2000 // stride)))
    length, groups = drawn.randint(1, longest), drawn.randint(1, 2 if SIMULATOR else 3)
    output_padding = drawn.randrange(max(stride, dilation))
    uncropped = (length - 1) * stride + dilation * (kernel_size - 1) + output_padding + 1
    reach = dilation * (kernel_size - 1) + stride  # up to this padding meets most edge cases
    most = min(drawn.choice((reach, uncropped)), (uncropped - 1) // 2)
    padding = drawn.choice((drawn.randint(0, most), (drawn.randint(0, most), drawn.randint(0, most)), *WORDS))
    parts = parts_of(padding, kernel_size, stride, output_padding, dilation)
    return Problem(
        batch=drawn.randint(1, 2 if SIMULATOR else 5),
        in_channels=groups * structure.in_per_group,
        out_channels=groups * structure.out_per_group,
        kernel_size=kernel_size,
        length=length,
        stride=stride,
        padding=parts.padding,
        output_padding=parts.output_padding,
        groups=groups,
        dilation=dilation,
        bias=drawn.random() < 0.5,
    )


def _layout(drawn: random.Random) -> Layout:
    shift = drawn.choice((0, 0, drawn.randrange(16)))
    if drawn.random() < 0.5:
        return Layout(shift=shift)
    order = drawn.choice(list(itertools.permutations(range(3))))
    gaps = [drawn.choice((1, 2, 3)), drawn.choice((0, 1, 1)), 1]
    drawn.shuffle(gaps)
    return Layout(order, tuple(gaps), shift)


def run_fuzz(arguments, draw: Callable[[int, int], Any] = draw) -> int:
    if not (SIMULATOR or torch.cuda.is_available()):
        return commands.in_simulator(arguments.argv)
    return check_cases(draw, arguments)


def check_cases(draw: Callable[[int, int], Any], arguments) -> int:
    """Check cases ``draw(seed, number)``; print wrong ones as Python.

    Other exceptions end the run: they may spoil the context.
    """
    seed, number, wrong, said = arguments.seed, arguments.first, 0, time.monotonic()
    end = number + arguments.count
    try:
        while number < end:
            case = draw(seed, number)
            try:
                case.check()
            except Mismatch as error:
                wrong += 1
                print(f"case {number}: {error}\n{case.line()}", flush=True)
            except Exception:
                print(f"case {number} is not computed\n{case.line()}", flush=True)
                raise
            number += 1
            if time.monotonic() - said > REPORT_S:
                said = time.monotonic()
                print(f"{number - arguments.first} cases, {wrong} wrong", flush=True)
    except KeyboardInterrupt:
        print(f"{number - arguments.first} cases, {wrong} wrong; go on with --seed {seed} --first {number}", flush=True)
        raise
    print(f"seed {seed}, cases {arguments.first} to {number - 1}: {wrong} wrong")
    return commands.FAILED if wrong else 0
