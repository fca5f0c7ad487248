"""Random streams: each slot's steps against its whole signal.

On GPUs "ieee" and "fp64" must give k2_polyphase's bits; else float64 judges.
"""

import random
from dataclasses import dataclass

import torch

from numba_tconv import streaming
from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.formula.problem import Problem
from numba_tconv.torch_api.functional import conv_transpose1d

from .bench import DTYPES
from .fuzz import STRUCTURES, TINY_STRUCTURES, Mismatch, bound, check_cases

MOST_SLOTS, MOST_STEPS, MOST_NEW = 20, 6, 40
EXACT = "ieee", "fp64"


@dataclass(frozen=True)
class Case:
    """``chunks``: new frames of each step."""

    layer: Problem
    dtype: str
    precision: str
    slots: int
    chunks: tuple[int, ...]
    seed: int
    device: str

    def line(self) -> str:
        return f"from numba_tconv.lab.measure.fuzz_steps import *; {self!r}.check()"

    def check(self) -> None:
        p, dtype, drawn = self.layer, DTYPES[self.dtype], random.Random(self.seed)
        generator = torch.Generator(self.device).manual_seed(self.seed)

        def tensor(*shape):
            return torch.randn(shape, generator=generator, device=self.device).to(dtype)

        weight = tensor(*p.weight_shape)
        bias = tensor(p.out_channels) if p.bias else None
        state = streaming.initial_state(self.slots, weight, p.stride, p.dilation)
        operands = weight, bias, p.stride, p.groups, p.dilation
        heard = [tensor(p.in_channels, 0) for _ in range(self.slots)]  # since the slot's last reset
        said = [tensor(p.out_channels, 0) for _ in range(self.slots)]
        for new in self.chunks:
            x = tensor(self.slots, p.in_channels, new)
            if drawn.random() < 0.3:
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            live = [drawn.random() < 0.7 for _ in range(self.slots)] if drawn.random() < 0.5 else [True] * self.slots
            mask = None if all(live) else torch.tensor(live, device=self.device)
            for n in range(self.slots):
                if drawn.random() < 0.1:
                    state[n].zero_()
                    heard[n], said[n] = heard[n][:, :0], said[n][:, :0]
            y = streaming.step(x, state, *operands, mask, precision=self.precision)
            for n in range(self.slots):
                if live[n]:
                    heard[n], said[n] = torch.cat([heard[n], x[n]], 1), torch.cat([said[n], y[n]], 1)
                elif y[n].any():
                    raise Mismatch(f"slot {n} rests, but puts out something")
        for n in range(self.slots):
            self._check_slot(heard[n], said[n], state[n], weight, bias)

    def _check_slot(self, heard, said, state, weight, bias) -> None:
        p, kept = self.layer, state.shape[1]
        before = torch.cat([torch.zeros_like(state), heard], dim=1)
        if not torch.equal(state, before[:, before.shape[1] - kept :]):
            raise Mismatch("a state is wrong")
        if not heard.shape[1]:
            return
        wanted, beyond = said.shape[1], max(0, p.stride - p.dilation * (p.kernel_size - 1) - 1)
        rest = p.stride, 0, beyond, p.groups, p.dilation
        if self.device == "cuda" and self.precision in EXACT:
            whole = conv_transpose1d(heard[None], weight, bias, *rest, variant="k2_polyphase", precision=self.precision)
            wrong = said != whole[0, :, :wanted]
        else:
            whole = Problem(
                *(1, p.in_channels, p.out_channels, p.kernel_size, heard.shape[1]),
                *(p.stride, 0, beyond, p.groups, p.dilation, p.bias),
            )
            exact = torch.conv_transpose1d(
                heard[None].double(), weight.double(), bias if bias is None else bias.double(), *rest
            )
            most = bound("forward", (heard[None], weight, bias), whole, said.dtype, self.precision)
            wrong = ~((said - exact[0, :, :wanted]).abs() <= most[0, :, :wanted])
        if wrong.any():
            raise Mismatch(f"{int(wrong.sum())} of {wrong.numel()} outputs are wrong")


def draw(seed: int, number: int) -> Case:
    drawn = random.Random(f"steps {seed} {number}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    structure = drawn.choice(STRUCTURES if device == "cuda" else TINY_STRUCTURES)
    groups = drawn.randint(1, 3)
    layer = Problem(
        batch=1,
        in_channels=groups * structure.in_per_group,
        out_channels=groups * structure.out_per_group,
        kernel_size=structure.kernel_size,
        length=1,
        stride=structure.stride,
        groups=groups,
        dilation=structure.dilation,
        bias=drawn.random() < 0.5,
    )
    dtype = drawn.choice(list(PRECISIONS) if device == "cuda" else [torch.float32, torch.float64])
    few = drawn.choice((1, 3, MOST_NEW))
    chunks = tuple(drawn.randint(1, few) for _ in range(drawn.randint(1, MOST_STEPS)))
    slots = drawn.randint(1, drawn.choice((2, MOST_SLOTS)))
    precision = drawn.choice(PRECISIONS[dtype]) if device == "cuda" else PRECISIONS[dtype][0]
    return Case(layer, str(dtype).removeprefix("torch."), precision, slots, chunks, drawn.getrandbits(31), device)


def run_fuzz_steps(arguments) -> int:
    with torch.no_grad():
        return check_cases(draw, arguments)
