"""Random alias-free activations and gradients, against float64."""

import random
from dataclasses import dataclass

import torch

from numba_tconv.formula.alias_free import ACTIVATIONS, MOST_RATIO, MOST_TAPS, AliasFree, alias_free
from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.gradients.alias_free import tile
from numba_tconv.ptx import SIMULATOR
from numba_tconv.torch_api import alias_free_operators as ops

from .bench import DTYPES
from .fuzz import Mismatch, run_fuzz

SUMS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-20, torch.float16: 2.0**-20}
UNITS = 32  # multiple of SUMS allowed for the longest sums and phases
LONGEST = 40 if SIMULATOR else 3000


@dataclass(frozen=True)
class Case:
    """``tied``: beta is alpha; ``parameters``: with their gradients."""

    sizes: AliasFree
    dtype: str
    activation: str
    log_scale: bool
    tied: bool
    parameters: bool
    turned: bool  # samples are not adjacent
    seed: int

    def line(self) -> str:
        return f"from numba_tconv.lab.measure.fuzz_activations import *; {self!r}.check()"

    def check(self) -> None:
        tensors, dy = self.operands()
        form = ops.Form(self.sizes.up_ratio, self.sizes.down_ratio, self.log_scale, self.activation)
        exact = ops.Tensors(*(one if one is None else one.double().clone().requires_grad_() for one in tensors))
        y = ops.composed(*exact, *form)
        given = [one for one in (exact.x, exact.alpha, exact.beta) if one is not None]
        wanted = [y.detach(), *torch.autograd.grad(y, given, dy.double())]
        found = self.computed(tensors, dy)
        for name, one, right, limit in zip(
            ("y", "dx", "dalpha", "dbeta"), found, wanted, self.limits(exact, dy), strict=False
        ):
            far = (one.double() - right).abs()
            wrong = ~(far <= limit + torch.finfo(dy.dtype).eps * right.abs())
            if wrong.any():
                raise Mismatch(f"{int(wrong.sum())} of {wrong.numel()} elements of {name} are wrong")

    def operands(self) -> tuple[ops.Tensors, torch.Tensor]:
        """The tensors, and the output's gradient."""
        s, dtype, where = self.sizes, DTYPES[self.dtype], "cpu" if SIMULATOR else "cuda"
        generator = torch.Generator(where).manual_seed(self.seed)

        def tensor(*shape):
            return torch.randn(shape, generator=generator, device=where)

        def signal(length):
            one = tensor(s.batch, s.channels, length).to(dtype)
            return one.mT.contiguous().mT if self.turned else one

        filters = [tensor(count).softmax(0).to(dtype) for count in (s.up_taps, s.down_taps)]
        snake = self.activation == "snake"
        alpha, beta = (tensor(s.channels).sigmoid().add(0.3).to(dtype) if snake else None for _ in range(2))
        return ops.Tensors(signal(s.length), *filters, alpha, None if self.tied else beta), signal(s.out_length)

    def computed(self, tensors: ops.Tensors, dy):
        others = tensors.beside_x()
        index = -1 if SIMULATOR else dy.get_device()
        x, dy = ops.adjacent(tensors.x), ops.adjacent(dy)
        forward = ops.ready(self.sizes, x.stride(), x.dtype, index, self.activation, self.log_scale)
        config = tile.choose(self.sizes, x.dtype, self.activation, self.log_scale, self.parameters)
        gradients = ops.ready_gradients(self.sizes, x.stride(), dy.stride(), config, index, self.tied)
        found = [forward(x, *others), *gradients(x, dy, *others)]
        return [one for one in found if one.numel()]

    def limits(self, exact, dy) -> tuple[float, float, float, float]:
        """Largest errors beside one rounding: UNITS of the largest number on the way."""
        t = ops.Tensors(*(None if one is None else one.detach() for one in exact))
        u = float(self.sizes.up_ratio * t.up_filter.abs().sum() * t.x.abs().max())
        a = b = 1.0
        if t.alpha is not None:
            alpha, beta = t.alpha, t.alpha if t.beta is None else t.beta
            a = float((alpha.exp() if self.log_scale else alpha).max())
            b = float((beta.exp() if self.log_scale else beta).min())
        unit, gain = UNITS * SUMS[dy.dtype], float(t.down_filter.abs().sum())
        phase = 1 + a * u
        slope = 1 + a / b * phase
        grad = float(self.sizes.down_taps * t.down_filter.abs().max() * dy.double().abs().max())
        terms = self.sizes.batch * self.sizes.up_length
        of_parameters = unit * terms**0.5 * grad * (1 + phase) * phase / min(1, b) ** 2
        of_x = unit * self.sizes.up_taps * grad * slope
        return unit * gain * (u + phase / b), of_x, of_parameters, of_parameters


def draw(seed: int, number: int) -> Case:
    drawn = random.Random(f"activations {seed} {number}")
    up_ratio = drawn.randint(1, MOST_RATIO)
    down_ratio = up_ratio if drawn.random() < 0.7 else drawn.randint(1, MOST_RATIO)
    up_taps = drawn.choice((12, drawn.randint(up_ratio, MOST_TAPS)))
    down_taps = drawn.choice((12, drawn.randint(1, MOST_TAPS)))
    length = drawn.randint(1, drawn.choice((8, LONGEST)))
    shape = drawn.randint(1, 3), drawn.randint(1, 3), length
    activation = drawn.choice((*["snake"] * len(ACTIVATIONS), *ACTIVATIONS))
    snake = activation == "snake"
    dtypes = [dtype for dtype in PRECISIONS if not SIMULATOR or dtype != torch.bfloat16]
    return Case(
        alias_free(shape, up_taps, down_taps, up_ratio, down_ratio),
        str(drawn.choice(dtypes)).removeprefix("torch."),
        activation,
        drawn.random() < 0.5,
        not snake or drawn.random() < 0.5,
        snake and drawn.random() < 0.8,
        drawn.random() < 0.3,
        drawn.getrandbits(31),
    )


def run_fuzz_activations(arguments) -> int:
    return run_fuzz(arguments, draw)
