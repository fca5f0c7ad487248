"""Streams: layers, chunks, masks and resets for the tests of steps, and the loop that plays them."""

from dataclasses import dataclass

import torch

from numba_tconv.formula.problem import Problem


def _layer(channels, kernel_size, stride=1, **parameters):
    return Problem(1, *channels, kernel_size, 1, stride, **parameters)


# Reason and layer, small enough for the simulator.
LAYERS = {
    "K = 2s, the usual decoder layer": _layer((4, 2), 4, 2, bias=True),
    "K not a multiple of the stride": _layer((3, 2), 5, 2),
    "K = s, nothing is kept": _layer((2, 2), 3, 3, bias=True),
    "K < s, outputs of bias alone": _layer((2, 2), 2, 5, bias=True),
    "stride 1": _layer((3, 4), 5),
    "dilation above stride": _layer((3, 2), 4, 2, dilation=3, bias=True),
    "dilation below stride": _layer((2, 3), 4, 5, dilation=3),
    "gcd(stride, dilation) = 2": _layer((2, 2), 4, 6, dilation=4, bias=True),
    "groups": _layer((4, 6), 4, 2, groups=2, bias=True),
    "depthwise": _layer((6, 6), 4, 2, groups=6, bias=True),
    "depthwise with dilation": _layer((4, 4), 3, 2, groups=4, dilation=3, bias=True),
    "channels of two parts": _layer((70, 3), 4, 2, bias=True),
}

# The same for steps on tensor cores, which take slots and weights in vectors.
MATRICES = "eight phases of 16 bits, a row of ldmatrix"
PRODUCTS = {
    "K = 2s, five stages of a warp": _layer((40, 6), 4, 2, bias=True),
    "K = 3s, two frames kept": _layer((24, 8), 6, 2, bias=True),
    "K = s, nothing is kept": _layer((16, 4), 4, 4),
    "groups": _layer((48, 12), 4, 2, groups=2, bias=True),
    "rows that fill no product": _layer((16, 8), 10, 5, bias=True),
    "four phases of 16 bits, half a row": _layer((16, 8), 8, 4),
    MATRICES: _layer((40, 3), 16, 8, bias=True),
}


@dataclass
class Stream:
    """Random operands of ``slots`` streams of ``frames`` frames each."""

    layer: Problem
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def parameters(self) -> tuple[int, int, int]:
        return self.layer.stride, self.layer.groups, self.layer.dilation

    @property
    def kept(self) -> int:
        return self.layer.taps.shift(self.layer.kernel_size - 1)

    def offline(self, convolve=torch.conv_transpose1d) -> torch.Tensor:
        """The first L*stride outputs of the whole signal, by ``convolve``."""
        p = self.layer
        beyond = max(0, p.stride - p.dilation * (p.kernel_size - 1) - 1)
        y = convolve(self.x, self.weight, self.bias, p.stride, 0, beyond, p.groups, p.dilation)
        return y[:, :, : self.x.shape[2] * p.stride]

    def state(self, slots=None) -> torch.Tensor:
        slots = self.x.shape[0] if slots is None else slots
        return self.x.new_zeros((slots, self.layer.in_channels, self.kept))


def stream(layer: Problem, slots: int, frames: int, dtype=torch.float32, device="cpu", seed=0) -> Stream:
    p, generator = layer, torch.Generator(device).manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    weight = random(*p.weight_shape)
    return Stream(p, random(slots, p.in_channels, frames), weight, random(p.out_channels) if p.bias else None)


def chunked(x: torch.Tensor, chunks) -> list[torch.Tensor]:
    return list(x.split(list(chunks), dim=2))
