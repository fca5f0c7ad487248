"""Steps of streams for compute-sanitizer (sanitized.py): each kernel's usual tile and tiny ones, whole and ragged."""

import math
from dataclasses import dataclass, replace

import torch

from numba_tconv.kernels.streaming import depthwise, mma_tile, plan, tile
from numba_tconv.runtime import device
from numba_tconv.runtime.layout import Layout
from tests.streams import LAYERS, MATRICES, PRODUCTS, stream

RUNG = "streaming_step"
TF32_EPS = 2.0**-10
REASONS = (
    *("K = 2s, the usual decoder layer", "K not a multiple of the stride", "K < s, outputs of bias alone"),
    *("gcd(stride, dilation) = 2", "groups", "depthwise", "channels of two parts"),
)


COLUMNS, PRODUCT, DEPTHWISE = "columns", "products", "depthwise"
TINY = {
    COLUMNS: tile.tiny,
    PRODUCT: mma_tile.tiny,
    DEPTHWISE: lambda problem, dtype: [depthwise.choose(problem, dtype)],
}


@dataclass(frozen=True)
class Steps:
    """Some slots, of which one may rest, and two steps: of one new frame and of three."""

    reason: str
    dtype: torch.dtype
    kernel: str
    config: int  # of TINY
    masked: bool
    rung: str = RUNG

    @property
    def slots(self) -> int:
        return 9 if self.kernel == PRODUCT else 3  # more than the columns of a tensor core's product

    def refusal(self) -> str | None:
        have, least = device.current_device().cc, tile.MINIMUM_CC
        return None if have >= least else f"it needs a GPU of compute capability {least}, not {have}"

    def wrong(self, where: str = "cuda") -> str | None:
        """Play the steps; None if outputs and state are right."""
        layers = PRODUCTS if self.kernel == PRODUCT else LAYERS
        s = stream(layers[self.reason], self.slots, 4, self.dtype)
        mask = torch.tensor([True, not self.masked] + [True] * (self.slots - 2))
        there = [None if t is None else t.to(where) for t in (s.x, s.weight, s.bias)]
        state, on = s.state().to(where), mask.to(where) if self.masked else None
        outputs, weight, bias = [], there[1], there[2]
        for first, frames in ((0, 1), (1, 3)):
            p = replace(s.layer, batch=self.slots, length=frames)
            x = there[0][:, :, first : first + frames]
            if self.kernel == PRODUCT:  # which takes adjacent channels
                x = s.x[:, :, first : first + frames].contiguous().to(where)
            y = torch.full((self.slots, p.out_channels, frames * p.stride), math.nan, dtype=self.dtype).to(where)
            laid_out = (None if t is None else Layout.of(t) for t in (x, weight, bias))
            launch = plan.prepare(*laid_out, self.masked, p, TINY[self.kernel](p, self.dtype)[self.config])
            launch(x, state, weight, bias, on, y)
            outputs.append(y.cpu())
        y, state = torch.cat(outputs, dim=2), state.cpu()
        kept = torch.cat([s.state(), s.x], dim=2)[:, :, 4:]
        if not torch.equal(state[mask], kept[mask]) or state[~mask].any():
            return "a wrong state"
        exact = replace(s, x=s.x.double(), weight=s.weight.double(), bias=None if s.bias is None else s.bias.double())
        limit = 64 * torch.finfo(self.dtype).eps
        if self.kernel == PRODUCT:
            limit = max(limit, 64 * TF32_EPS)
        near = torch.allclose(y[mask].double(), exact.offline()[mask], rtol=limit, atol=limit)
        return None if near and not y[~mask].any() else "wrong outputs"


def step_cases():
    for reason in REASONS:
        for config in range(3):
            yield Steps(reason, torch.float32, COLUMNS, config, masked=config == 1)
    for dtype in (torch.float64, torch.bfloat16):
        yield Steps(REASONS[0], dtype, COLUMNS, 0, masked=True)
    yield Steps("depthwise", torch.float32, DEPTHWISE, 0, masked=True)
    yield Steps("depthwise", torch.bfloat16, DEPTHWISE, 0, masked=False)
    yield Steps("depthwise with dilation", torch.float64, DEPTHWISE, 0, masked=True)
    halves = "K = 2s, five stages of a warp", "four phases of 16 bits, half a row", MATRICES
    for dtype, reasons in ((torch.float32, PRODUCTS), (torch.float16, halves), (torch.bfloat16, halves)):
        for reason in reasons:
            for config in range(3):
                yield Steps(reason, dtype, PRODUCT, config, masked=config == (dtype == torch.float32))
