"""Steps of streams for compute-sanitizer (sanitized.py): the usual tile and tiny ones, whole and ragged."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from numba_tconv.kernels.streaming import plan, tile
from numba_tconv.runtime import device
from numba_tconv.runtime.layout import Layout
from tests.streams import LAYERS, stream

RUNG = "streaming_step"
REASONS = (
    *("K = 2s, the usual decoder layer", "K not a multiple of the stride", "K < s, outputs of bias alone"),
    *("gcd(stride, dilation) = 2", "groups", "depthwise", "channels of two parts"),
)


@dataclass(frozen=True)
class Steps:
    """Three slots, of which one may rest, and two steps: of one new frame and of three."""

    reason: str
    dtype: torch.dtype
    config: int  # of tile.tiny
    masked: bool
    rung: str = RUNG

    def refusal(self) -> str | None:
        have, least = device.current_device().cc, tile.MINIMUM_CC
        return None if have >= least else f"it needs a GPU of compute capability {least}, not {have}"

    def wrong(self, where: str = "cuda") -> str | None:
        """Play the steps; None if outputs and state are right."""
        s = stream(LAYERS[self.reason], 3, 4, self.dtype)
        mask = torch.tensor([True, not self.masked, True])
        there = [None if t is None else t.to(where) for t in (s.x, s.weight, s.bias)]
        state, on = s.state().to(where), mask.to(where) if self.masked else None
        outputs, weight, bias = [], there[1], there[2]
        for first, frames in ((0, 1), (1, 3)):
            p = replace(s.layer, batch=3, length=frames)
            x = there[0][:, :, first : first + frames]
            y = torch.full((3, p.out_channels, frames * p.stride), math.nan, dtype=self.dtype).to(where)
            laid_out = (None if t is None else Layout.of(t) for t in (x, weight, bias))
            launch = plan.prepare(*laid_out, self.masked, p, tile.tiny(p, self.dtype)[self.config])
            launch(x, state, weight, bias, on, y)
            outputs.append(y.cpu())
        y, state = torch.cat(outputs, dim=2), state.cpu()
        kept = torch.cat([s.state(), s.x], dim=2)[:, :, 4:]
        if not torch.equal(state[mask], kept[mask]) or state[~mask].any():
            return "a wrong state"
        exact = replace(s, x=s.x.double(), weight=s.weight.double(), bias=None if s.bias is None else s.bias.double())
        limit = 64 * torch.finfo(self.dtype).eps
        near = torch.allclose(y[mask].double(), exact.offline()[mask], rtol=limit, atol=limit)
        return None if near and not y[~mask].any() else "wrong outputs"


def step_cases():
    for reason in REASONS:
        for config in range(3):
            yield Steps(reason, torch.float32, config, masked=config == 1)
    for dtype in (torch.float64, torch.bfloat16):
        yield Steps(REASONS[0], dtype, 0, masked=True)
