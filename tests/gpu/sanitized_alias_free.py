"""The alias-free activation and its gradients for compute-sanitizer (sanitized.py): rows of one tile and of several."""

import math
from dataclasses import dataclass

import torch

from numba_tconv.formula.alias_free import alias_free
from numba_tconv.gradients.alias_free import plan as gradient_plan
from numba_tconv.gradients.alias_free import tile as gradient_tile
from numba_tconv.gradients.sum import accumulator_of
from numba_tconv.kernels.alias_free import plan, tile
from numba_tconv.kernels.rung import BFLOAT16_CC
from numba_tconv.runtime import device
from numba_tconv.torch_api.alias_free_operators import composed

RUNG = "alias_free"
# Reason: filters' taps, ratios, lengths.
SIZES = {
    "BigVGAN's": ((12, 12), (2, 2), (1, 37, 1301)),
    "odd taps, three phases": ((7, 11), (3, 3), (5, 1301)),
    "unequal ratios": ((12, 9), (2, 3), (5, 1301)),
    "one tap": ((1, 1), (1, 1), (5, 1301)),
}


@dataclass(frozen=True)
class Activation:
    """Two samples of three channels of ``length``; beta is alpha if ``tied``."""

    reason: str
    length: int
    dtype: torch.dtype
    activation: str = "snake"
    tied: bool = False
    parameters: bool = True  # their gradients too
    rung: str = RUNG

    def refusal(self) -> str | None:
        have = device.current_device().cc
        lacks = self.dtype == torch.bfloat16 and have < BFLOAT16_CC
        return f"it needs a GPU of compute capability {BFLOAT16_CC}, not {have}" if lacks else None

    def wrong(self, where: str = "cuda") -> str | None:
        """None if everything is right."""
        taps, ratios, _ = SIZES[self.reason]
        x = torch.randn(2, 3, self.length).to(self.dtype)
        sizes = alias_free(x.shape, *taps, *ratios)
        dy = torch.randn(2, 3, sizes.out_length).to(self.dtype)
        filters = [(torch.randn(count) / count).to(self.dtype) for count in taps]  # averages, as filters are
        snake = self.activation == "snake"
        alpha = torch.rand(3).to(self.dtype) if snake else None
        beta = torch.rand(3).to(self.dtype) if snake and not self.tied else None
        exact = [one if one is None else one.double().clone().requires_grad_() for one in (x, *filters, alpha, beta)]
        right = composed(*exact, *ratios, True, self.activation)
        given = [exact[z] for z in (0, 3, 4) if exact[z] is not None]
        wanted = [right, *torch.autograd.grad(right, given, dy.double())]
        found = self._computed(sizes, x, dy, filters, alpha, beta, where)
        limit = 64 * torch.finfo(self.dtype).eps
        for name, one, truth in zip(("y", "dx", "dalpha", "dbeta"), found, wanted, strict=False):
            far = (one.cpu().double() - truth.detach()).abs().max()
            if not far <= limit * max(1, truth.abs().max()):
                return f"wrong {name}"
        return None

    def _computed(self, sizes, x, dy, filters, alpha, beta, where):
        first = filters[0]  # stands for a tensor that there is not
        alpha = first if alpha is None else alpha
        beta = alpha if beta is None else beta
        x, dy, up, down, alpha, beta = (one.to(where) for one in (x, dy, *filters, alpha, beta))

        def empty(*shape, dtype=self.dtype):
            return torch.full(shape, math.nan, dtype=dtype).to(where)

        chosen = sizes, self.dtype, self.activation, True
        y = empty(2, 3, sizes.out_length)
        plan.prepare(sizes, x.stride(), tile.choose(*chosen))(x, up, down, alpha, beta, y)
        parameters = self.parameters and self.activation == "snake"
        config = gradient_tile.choose(*chosen, parameters)
        dx, found = empty(2, 3, self.length), [empty(3) for _ in range(2)]
        sums = empty(gradient_plan.partials_of(sizes, config), dtype=accumulator_of(self.dtype))
        gradient_plan.prepare(sizes, x.stride(), dy.stride(), config)(x, dy, up, down, alpha, beta, dx, sums)
        if not parameters:
            return y, dx
        gradient_plan.prepare_parameters(sizes, config, self.tied)(sums, alpha, beta, *found)
        return y, dx, *(found[:1] if self.tied else found)


def activation_cases():
    for reason, (_, _, lengths) in SIZES.items():
        for length in lengths:
            yield Activation(reason, length, torch.float32)
    for dtype in (torch.float64, torch.bfloat16):
        yield Activation("BigVGAN's", 1301, dtype, tied=True)
    yield Activation("BigVGAN's", 1301, torch.float32, parameters=False)
    yield Activation("BigVGAN's", 1301, torch.float32, "gelu")
